"""Compiled kernels as files: where they lie, for which machine they are, and how one is loaded.

A file is what torch's compiler packs, with `daskgrad.json` in it: what the kernel was made for. It is compared with the machine before
anything of the kernel is mapped into the process: a CPU that lacks an instruction ends it without a word.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIMIT = 2**28
"""Bytes of kernels that are kept on disk; those used longest ago go first."""
_NOTE = "daskgrad.json"
_X86 = ("sse", "ssse", "avx", "fma", "bmi", "f16c", "amx", "gfni", "vaes", "vpclmul", "sha", "popcnt", "movbe", "adx", "lzcnt", "abm")
_OTHERS = ("asimd", "sve", "neon", "bf16", "i8mm", "altivec", "vsx", "vx")
"""How the CPU features begin that a compiler may use."""


class UnusableError(Exception):
    """Why a kernel cannot be used here."""


@dataclass(frozen=True)
class Note:
    """What a kernel was made for.

    Attributes:
        torch: the version.
        machine: the architecture.
        cpu: the features of the CPU, all of which it may use.
        isa: those that torch's compiler says it uses, in its words.
        questions: for each path question, whether a whole part answers it.
        made: the dtype of each derivative, by torch's name, and its shape for a row.
        seconds: how long it took to make.
    """

    torch: str
    machine: str
    cpu: tuple[str, ...]
    isa: str
    questions: tuple[bool, ...]
    made: tuple[tuple[str, tuple[int, ...]], ...]
    seconds: float


def here(isa: str = "", questions: Sequence[bool] = (), made: Sequence[tuple[str, tuple[int, ...]]] = (), seconds: float = 0.0) -> Note:
    """The note of a kernel that is made here and now."""
    return Note(str(torch.__version__), platform.machine(), cpu_features(), isa, tuple(questions), tuple(made), seconds)


@functools.cache
def cpu_features() -> tuple[str, ...]:
    """The features of this machine's CPU that a compiler may use; where the system does not list them, its model and level."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return (platform.processor(), torch.backends.cpu.get_cpu_capability())
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return tuple(sorted(flag for flag in set(flags) if flag.startswith((*_X86, *_OTHERS))))


_NEEDED = {
    "AVX512": ("avx512f", "avx512dq", "avx512vl", "avx512bw", "fma"),
    "AVX512_VNNI": ("avx512_vnni",),
    "AMX_TILE": ("amx_tile",),
    "AMX_FP16": ("amx_fp16",),
    "AVX512_BF16": ("avx512_bf16",),
    "AVX2": ("avx2", "fma"),
    "ASIMD": ("asimd",),
    "SVE256": ("sve",),
}
"""The CPU features behind the names in torch's metadata."""


def check(note: Note) -> None:
    """Raise UnusableError where the kernel of `note` was made for another machine or another torch."""
    ours = here()
    if note.torch != ours.torch:
        raise UnusableError(f"it was compiled for torch {note.torch}, and this is torch {ours.torch}")
    if note.machine != ours.machine:
        raise UnusableError(f"it was compiled for {note.machine}, and this is {ours.machine}")
    needed = {*note.cpu, *(flag for name in note.isa.split() for flag in _NEEDED.get(name, (name,)))}
    lacking = sorted(needed - set(ours.cpu))
    if lacking:
        raise UnusableError(f"it was compiled for a CPU with {', '.join(lacking[:4])}, which this CPU lacks")


# --- files ------------------------------------------------------------------------------------------------------------


def write(package: Path, note: Note, to: Path) -> None:
    """Put what torch packed in `package`, with `note`, in its place: whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=to.parent, prefix=".", suffix=".new", delete=False) as file:
        try:
            with zipfile.ZipFile(package) as source, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as target:
                for name in source.namelist():
                    if not name.endswith(".cpp"):
                        target.writestr(name, source.read(name))
                target.writestr(_NOTE, json.dumps(asdict(note)))
            file.flush()
            os.replace(file.name, to)
        except BaseException:
            os.unlink(file.name)
            raise


def note_of(path: Path) -> Note:
    """What the kernel in `path` was made for.

    Raises:
        UnusableError: the file is no kernel, or broken.
    """
    try:
        with zipfile.ZipFile(path) as package:
            if package.testzip() is None:
                fields = json.loads(package.read(_NOTE))
                made = tuple((dtype, tuple(shape)) for dtype, shape in fields["made"])
                return Note(**{**fields, "cpu": tuple(fields["cpu"]), "questions": tuple(fields["questions"]), "made": made})
    except (zipfile.BadZipFile, OSError, KeyError, TypeError, ValueError) as error:
        raise UnusableError(f"its file is broken ({type(error).__name__}: {error})") from error
    raise UnusableError("its file is broken")


def folder() -> Path:
    """Where kernels are kept: `DASKGRAD_CACHE`, or the user's cache folder; made if it is not there.

    Raises:
        UnusableError: it cannot be written, or another user could put something there.
    """
    import platformdirs

    asked = os.environ.get("DASKGRAD_CACHE")
    path = Path(asked) if asked else platformdirs.user_cache_path("daskgrad", appauthor=False)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise UnusableError(f"kernels cannot be kept in {path} ({error}): set DASKGRAD_CACHE to a folder of your own") from error
    others = stat.S_IWGRP | stat.S_IWOTH
    if os.name == "posix" and (found.st_uid != os.getuid() or found.st_mode & others):
        raise UnusableError(f"{path} belongs to, or can be written by, another user: set DASKGRAD_CACHE to a folder of your own")
    return path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process, and one thread of it, at a time; the system frees it when its holder ends, however that is."""
    import fcntl

    with open(path.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def touch(path: Path) -> None:
    """It is used now."""
    with contextlib.suppress(OSError):  # another process has just removed it
        os.utime(path)


def prune(where: Path, limit: int = LIMIT) -> None:
    """Remove the kernels used longest ago until the rest takes `limit` bytes at most."""
    sizes: list[tuple[float, int, Path]] = []
    for path in where.glob("*.pt2"):
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            sizes.append((found.st_mtime, found.st_size, path))
    total = sum(size for _, size, _ in sizes)
    for _, size, path in sorted(sizes):
        if total <= limit:
            return
        path.unlink(missing_ok=True)
        total -= size


# --- in the process ---------------------------------------------------------------------------------------------------

Run = Callable[[list[Tensor]], list[Tensor]]


def load(path: Path) -> Run:
    """The kernel in `path`, which `check` has let pass.

    torch's own loader of a package imports its compiler and calls it to see what the CPU can do; what it loads with does not.
    """
    loader: Any = getattr(getattr(torch._C, "_aoti", None), "AOTIModelPackageLoader", None)
    if loader is None:
        from torch._inductor import aoti_load_package

        model: Any = aoti_load_package(str(path))
        return lambda tensors: list(model(*tensors))
    run: Run = loader(str(path), "model", False, 1, -1).run
    return run
