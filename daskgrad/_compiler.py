"""A traced graph → a binary, in a process of its own.

The process that asks keeps its memory, its modules and its threads to itself: torch's compiler is large, is busy for seconds while it
holds the GIL, and patches modules while it traces. The row function is called there on tensors without values, never on invented ones.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._binaries import UnusableError, folder, here, write

if TYPE_CHECKING:
    from ._plan import Plan
    from ._trace import Request, Traced

SECONDS = 900
"""Time for one kernel, past which it is given up."""


class NoKernelError(Exception):
    """Why a kernel could not be made; `lasting`: it would be the same tomorrow."""

    def __init__(self, reason: str, *, lasting: bool) -> None:
        super().__init__(reason)
        self.lasting = lasting


def compile_apart(plan: Plan, request: Request, target: Path) -> None:
    """Make the kernel of `request` in another process, as the file `target`.

    Raises:
        NoKernelError: there is none, and why.
    """
    from ._ship import pack

    _need_a_compiler()
    import cloudpickle

    try:
        packed = cloudpickle.dumps((pack(plan), request))
    except Exception as error:
        raise NoKernelError(f"it cannot be handed to the compiling process ({error})", lasting=False) from error
    with tempfile.TemporaryDirectory(prefix="daskgrad-") as scratch:
        answer = Path(scratch, "answer.json")
        job = pickle.dumps((sys.path, os.getcwd(), packed, str(target), str(answer)))
        command = [sys.executable, "-W", "ignore", "-c", "from daskgrad._compiler import main; main()"]
        try:
            done = subprocess.run(command, input=job, capture_output=True, timeout=SECONDS, check=False, env=_environment(), cwd=scratch)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoKernelError(f"the compiling process failed: {error}", lasting=False) from error
        if not answer.exists():
            last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no word of it"])[-1]
            raise NoKernelError(f"the compiling process ended with {done.returncode}: {last}", lasting=False)
        told = json.loads(answer.read_text())
    if told["reason"] is not None:
        raise NoKernelError(told["reason"], lasting=told["lasting"])


def _need_a_compiler() -> None:
    """torch's compiler takes a minute to say that there is none."""
    named = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(named.split()[0] if named.strip() else "g++") is None:
        raise NoKernelError(
            f"there is no C++ compiler ({named}) on this machine: install g++, name one in CXX, or bring the kernel along in "
            "DASKGRAD_CACHE from a machine with one and the same CPU",
            lasting=False,
        )


def _environment() -> dict[str, str]:
    """The other process's: it finds this daskgrad, uses no GPU, and leaves behind only what torch has learnt about this compiler."""
    house = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [house, os.environ.get("PYTHONPATH", "")]))
    caches = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(folder() / "torch"))
    ours = {"PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": caches, "TORCHINDUCTOR_COMPILE_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **ours}


# --- in the other process ---------------------------------------------------------------------------------------------


def main() -> None:
    """Read a job from the standard input, make the kernel, and say how it went in the answer's file."""
    path, folder, packed, target, answer = pickle.loads(sys.stdin.buffer.read())
    sys.path[:] = list(dict.fromkeys([*(os.path.join(folder, entry) for entry in path), *sys.path]))
    reason, lasting = None, False
    try:
        plan, request = _opened(packed)
        build(plan, request, Path(target))
    except NoKernelError as error:
        reason, lasting = str(error), error.lasting
    whole = Path(f"{answer}.new")
    whole.write_text(json.dumps({"reason": reason, "lasting": lasting}))
    os.replace(whole, answer)


def _opened(packed: bytes) -> tuple[Plan, Request]:
    from ._ship import unpack

    try:
        parcel, request = pickle.loads(packed)
        return unpack(parcel), request
    except Exception as error:
        raise NoKernelError(f"it cannot be opened in the compiling process ({type(error).__name__}: {error})", lasting=False) from error


def build(plan: Plan, request: Request, target: Path) -> None:
    """Make the kernel of `request` here, as the file `target`.

    Raises:
        NoKernelError: there is none, and why.
    """
    from ._trace import UntraceableError, trace

    started = time.perf_counter()
    try:
        traced = trace(plan, request)
    except UntraceableError as error:
        raise NoKernelError(str(error), lasting=True) from error
    except Exception as error:
        raise NoKernelError(f"it cannot be traced ({type(error).__name__}: {_first_line(error)})", lasting=True) from error
    with tempfile.TemporaryDirectory(prefix="daskgrad-") as scratch:
        try:
            package = _packaged(traced, Path(scratch, "kernel.pt2"))
            made = [(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:])) for tensor in traced.made]
            note = here(_isa(package), traced.questions, made, time.perf_counter() - started)
            write(package, note, target)
        except (UnusableError, OSError, RuntimeError, NotImplementedError, AssertionError) as error:
            raise NoKernelError(f"torch's compiler failed ({type(error).__name__}: {_first_line(error)})", lasting=False) from error


def _packaged(traced: Traced, to: Path) -> Path:
    """The graph, compiled and packed by torch."""
    import torch
    from torch._inductor import aoti_compile_and_package, config

    given = (*traced.examples, *traced.made)
    exported = torch.export.export(traced.graph, given, dynamic_shapes=tuple({0: torch.export.Dim.AUTO} for _ in given))
    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.name in exported.graph_signature.user_inputs and isinstance(node.meta["val"].shape[0], int):
            raise RuntimeError("its graph holds for one number of rows only")
    settings = {
        "cpp.dynamic_threads": True,  # without, a kernel is for as many threads as there are where it is compiled
        "aot_inductor.precompile_headers": False,  # 200 MB, and nothing gained
        "aot_inductor.enable_line_tables": False,
    }
    with config.patch({"aot_inductor.output_path": str(to.parent)}):
        try:  # torch's word on the CPU, without the ten seconds in which it tries whether the compiler knows that CPU
            aoti_compile_and_package(exported, package_path=str(to), inductor_configs={**settings, "cpp.vec_isa_ok": True})
        except RuntimeError:
            aoti_compile_and_package(exported, package_path=str(to), inductor_configs=settings)
    return to


def _isa(package: Path) -> str:
    """The instruction sets that torch says the kernel uses, by their names."""
    import zipfile

    with zipfile.ZipFile(package) as opened:
        notes: list[dict[str, Any]] = [json.loads(opened.read(name)) for name in opened.namelist() if name.endswith("metadata.json")]
    return " ".join(sorted({word for note in notes for word in str(note.get("AOTI_CPU_ISA", "")).split()}))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
