"""A folder of parts and the folder beside it: who may write, what is there, what was being written when a run ended.

`path` holds whole parts and nothing else, since readers try every file in it. Everything else is in `<path>.daskgrad/`: parts
being written, the lock, the mark of each part that runs, what is being made, and how it was made for `verify`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from . import _write
from ._errors import PlanError, StoreError

_PART = re.compile(r"part-\d{6,}\.parquet")
_BEAT, _DEAD = 10.0, 60.0  # seconds: how often a lock without flock is renewed, and after how long it counts as left behind
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


@dataclass(frozen=True)
class Part:
    """A file of daskgrad's in the folder."""

    name: str
    identity: dict[str, Any]
    schema: pa.Schema
    rows: int
    size: int

    @property
    def number(self) -> int:
        return int(self.identity["part"])


class Folder:
    """The folder of parts at `path`, and the one beside it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        text = os.fspath(path)
        if "://" in text and not text.startswith("file://"):
            raise PlanError(f"to_parquet writes to folders, and {text!r} is none: a path on a disk that every worker sees")
        self.path = Path(text.removeprefix("file://")).absolute()
        self.aside = self.path.with_name(self.path.name + ".daskgrad")

    def make(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise PlanError(f"{self.path} is a file: to_parquet needs a folder, new or of its own")
        self.path.mkdir(parents=True, exist_ok=True)
        self.aside.mkdir(exist_ok=True)

    # ---------------------------------------------------------------------------- what is there

    def parts(self) -> tuple[dict[str, Part], list[str]]:
        """The parts that lie here, by name; and the names of those that can no longer be read.

        Raises:
            PlanError: there are files that daskgrad has not written, which a reader would take for parts.
        """
        found, foreign, damaged = {}, [], []
        for file in sorted(self.path.iterdir()):
            try:
                identity, schema, rows = _write.footer(file) if file.is_file() else (None, None, 0)
            except (pa.ArrowException, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None and error.errno != errno.EINVAL:
                    raise
                identity, schema, rows = None, None, 0
            if identity is None and schema is None and self._mine(file):
                damaged.append(file.name)
            elif identity is None:
                foreign.append(file.name)
            else:
                found[file.name] = Part(file.name, identity, schema, rows, file.stat().st_size)
        if foreign:
            raise PlanError(
                f"{self.path} holds {len(foreign)} file(s) that daskgrad has not written, such as {foreign[0]!r}. A reader would take them "
                "for parts: choose a new folder, or remove them."
            )
        return found, damaged

    def _mine(self, file: Path) -> bool:
        """Whether a file that cannot be read was written here: an earlier run has left word of itself, and gave this name."""
        here = any((self.aside / name).exists() for name in ("job", "recipe"))
        return here and file.is_file() and _PART.fullmatch(file.name) is not None

    def remove(self, names: list[str]) -> None:
        for name in names:
            (self.path / name).unlink()
        if names:
            _write.sync_folder(self.path)

    # ---------------------------------------------------------------------------- what is being made

    def begin(self, job: str) -> None:
        """From now on only parts of this job are renamed into place, also where tasks of a dead one still run."""
        self._put("job", job.encode())

    def record(self, name: str, data: bytes) -> None:
        self._put(name, data)

    def _put(self, name: str, data: bytes) -> None:
        temporary = self.aside / f"{name}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            temporary.write_bytes(data)
            os.replace(temporary, self.aside / name)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()

    def interrupted(self) -> list[int]:
        """The numbers of the parts that were running when an earlier run ended; their marks and half-written files go."""
        numbers = []
        for file in self.aside.iterdir():
            if file.suffix == ".running":
                numbers.append(int(file.stem.rpartition("-")[2]))
            if file.suffix in (".running", ".tmp"):
                with contextlib.suppress(FileNotFoundError):  # a task of a dead run may still be at it
                    file.unlink()
        return sorted(numbers)

    def end(self) -> None:
        """The job is complete. What is beside the parts goes, but for the record of how they were made."""
        for name in ("job", "lock"):
            (self.aside / name).unlink(missing_ok=True)

    # ---------------------------------------------------------------------------- the lock

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder alone.

        Raises:
            StoreError: somebody else writes here.
        """
        self.aside.mkdir(exist_ok=True)
        file = self._lock()
        try:
            yield
        finally:
            file.close()

    def _lock(self) -> IO[str] | _Beat:
        path = self.aside / "lock"
        while True:
            file = open(path, "a+")  # noqa: SIM115  closed by the caller
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.close()
                if error.errno in _NO_LOCKS:
                    return _Beat(self.aside / "lock.owner", self.path)
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                raise StoreError(_busy(self.path, path.read_text())) from None
            if _same(file, path):
                file.truncate(0)
                file.write(_owner())
                file.flush()
                return file
            file.close()  # the holder before us has just removed it


def _same(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _owner() -> str:
    return json.dumps({"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")})


def _busy(path: Path, owner: str) -> str:
    try:
        told = json.loads(owner)
        who = f"process {told['process']} on {told['host']}, since {told['since']}"
    except ValueError:
        who = "another process"
    return f"{path} is being written by {who}. Wait for it, or write to another folder."


class _Beat:
    """A lock for file systems without flock: a file that one process makes, and touches while it lives."""

    def __init__(self, path: Path, folder: Path) -> None:
        self._path, self._over = path, threading.Event()
        for _ in range(2):
            try:
                with open(path, "x") as file:
                    file.write(_owner())
                break
            except FileExistsError:
                if not _left_behind(path):
                    raise StoreError(_busy(folder, path.read_text())) from None
                path.unlink(missing_ok=True)
        else:
            raise StoreError(_busy(folder, ""))
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._over.wait(_BEAT):
            os.utime(self._path)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._path.unlink(missing_ok=True)


def _left_behind(path: Path) -> bool:
    try:
        told, age = json.loads(path.read_text()), time.time() - path.stat().st_mtime
    except (FileNotFoundError, ValueError):
        return False
    if told["host"] == socket.gethostname():
        return not _alive(told["process"])
    return age > _DEAD


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
