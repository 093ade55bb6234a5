"""What a process leaves behind that dies inside a part, so that who tries the part again can tell why it is not to be had.

A crash in native code ends a worker with everything it runs, and Dask, which tries again elsewhere, then blames any of
the parts that were there. Python's own fault handler knows the thread: here it writes into a file that is looked at
before a part runs. A part whose thread crashed twice is not tried a third time; the error says where it crashed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ._errors import RowError
from ._lines import file_of

TRIES = 2
_FOLDER = "daskgrad-crashes"
_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_THREAD = re.compile(r"^(Current t|T)hread 0x0*([0-9a-f]+)(?: \[.*\])? \(most recent call first\):\n((?:  File .*\n?)*)", re.MULTILINE)
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True)
class _Crash:
    """How a process died: the signal in words, and the stack of its thread, the innermost (file, line, function) first."""

    file: Path
    signal: str
    stack: list[tuple[str, int, str]]


@contextlib.contextmanager
def watched(worker: Any, task: str, title: str, partition: int | None) -> Iterator[None]:
    """Run one part on a worker of `dask.distributed` so that a crash of the process is known to whoever runs it next.

    Args:
        worker: the worker.
        task: the part's key in the graph.
        title: the name of the column's tasks, for the message.
        partition: the part's number, for the message.

    Raises:
        RowError: processes of this machine have died of this part before.
    """
    if os.name != "posix":  # elsewhere nothing is known of a process that has died
        yield
        return
    folder = Path(worker.local_directory).parent / _FOLDER
    found = _crashes_of(folder, task)
    if len(found) >= TRIES:
        for crash in found:
            crash.file.unlink(missing_ok=True)  # it was said: a new computation begins anew
        raise RowError(_message(found, title, partition), partition=partition)
    with _JOURNAL.open(folder), _JOURNAL.part(task):
        yield


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Run one part in a process of a pool, which nobody tries again: a crash says on standard error where it was."""
    if faulthandler.is_enabled():
        yield
        return
    faulthandler.enable(2)
    try:
        yield
    finally:
        faulthandler.disable()


def _message(found: list[_Crash], title: str, partition: int | None) -> str:
    crash, function = found[-1], title.partition("-")[2]
    frame = next((frame for frame in crash.stack if frame[2] == function), crash.stack[0] if crash.stack else None)
    where = ""
    if frame is not None:
        file, line, name = frame
        where = f", in line {line} of {file if os.path.exists(file) else file_of(name, line)}, in {name}"
    return (
        f"partition {partition} of {title}: the process that computed it died {len(found)} times of a {crash.signal.lower()}{where}. "
        "A row that crashes native code takes its process along, so which row it was is not known. To find it, write the column with "
        "dg.to_parquet: it keeps the other partitions, tries this one alone and in halves, and names the rows."
    )


# -------------------------------------------------------------------------------- writing


class _Journal:
    """This process's file: which part each thread runs, and at the end, if it is a bad one, what Python says of it.

    It exists while parts run here. A process that has the fault handler on already keeps it as it is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._file: IO[str] | None = None

    @contextlib.contextmanager
    def open(self, folder: Path) -> Iterator[None]:
        with self._lock:
            if self._inside == 0 and not faulthandler.is_enabled():
                folder.mkdir(mode=0o700, exist_ok=True)
                self._file = (folder / f"{socket.gethostname()}-{os.getpid()}").open("w", buffering=1)
                faulthandler.enable(self._file)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0 and self._file is not None:
                    faulthandler.disable()
                    self._file.close()
                    os.unlink(self._file.name)
                    self._file = None

    @contextlib.contextmanager
    def part(self, task: str) -> Iterator[None]:
        self._note("begin", task)
        try:
            yield
        finally:
            self._note("end", task)

    def _note(self, word: str, task: str) -> None:
        file = self._file
        if file is not None:
            file.write(f"{word} {threading.get_ident():x} {task!r}\n")


_JOURNAL = _Journal()


# -------------------------------------------------------------------------------- reading


def _crashes_of(folder: Path, task: str) -> list[_Crash]:
    """The crashes of this machine's processes in a thread that ran `task`, the oldest first."""
    if not folder.is_dir():
        return []
    files = [path for path in folder.iterdir() if _is_of_the_dead(path)]
    found = [crash for path in files if (crash := _read(path, task)) is not None]
    return sorted(found, key=lambda crash: crash.file.name)


def _is_of_the_dead(path: Path) -> bool:
    host, _, pid = path.name.rpartition("-")
    if host != socket.gethostname() or not pid.isdigit() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # alive, and another user's
        return False
    return False


def _read(path: Path, task: str) -> _Crash | None:
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:  # another worker has told of it
        return None
    fatal = _FATAL.search(text)
    if fatal is None:  # killed from outside: nobody's fault that it could tell
        path.unlink(missing_ok=True)
        return None
    running = _running(text[: fatal.start()])
    threads = {ident: (current, stack) for current, ident, stack in _threads(text[fatal.end() :])}
    crashed = [ident for ident, (current, _) in threads.items() if current and ident in running]
    # A thread of OpenMP's has no name in Python: the crash was in the part that ran here, if it was only one.
    culprit = crashed[0] if crashed else next(iter(running)) if len(running) == 1 else None
    if culprit is None or running[culprit] != repr(task):
        return None
    stack = [(file, int(line), name) for file, line, name in _FRAME.findall(threads.get(culprit, (False, ""))[1])]
    return _Crash(path, fatal.group(1), stack)


def _threads(dump: str) -> list[tuple[bool, str, str]]:
    """(it is the one that crashed, its number, its stack) of each thread."""
    return [(word != "T", ident, stack) for word, ident, stack in _THREAD.findall(dump)]


def _running(notes: str) -> dict[str, str]:
    """What each thread had begun and not ended: its number → the part's key."""
    found: dict[str, str] = {}
    for line in notes.splitlines():
        word, ident, task = (*line.split(" ", 2), "", "")[:3]
        if word == "begin":
            found[ident] = task
        else:
            found.pop(ident, None)
    return found
