"""One part while it is computed: its thread writes plain numbers, whoever watches reads them.

    watched          around a part: a reporter, if anybody could be watching
      Reporter       the numbers of one part
      _Here          watched by a `dg.progress()` of this process, which reads the reporters themselves
      _OnWorker      on a worker of a cluster: a record of each part a few times a second, if a watcher has asked for it
      _ToFile        in a process of Dask's own pool: the same, as lines of a file that `dg.progress()` has named
    A part that runs in a child process of any of these is relayed: `_relay`.

The kernel only adds numbers. Clocks are read, and records made, a few times a second.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Protocol

from daskgrad._wanted import Unwanted

if TYPE_CHECKING:
    from ._notes import Notes

PERIOD: Final = 0.25  # seconds between two records of the same part
TOPIC: Final = "daskgrad"
PLUGIN: Final = "daskgrad-watch"
"""The worker plugin whose presence asks for records: it travels to restarted and late workers by itself."""
FILES: Final = "DASKGRAD_PROGRESS_FILES"
"""The environment variable that names where processes of a pool append their records."""

Record = dict[str, Any]
_serial = itertools.count(1)


class Reporter:
    """The numbers of one part.

    Attributes:
        title: the row function's name.
        call: identity of the call that the part belongs to, "" where there is none (pandas).
        size: rows of the part.
        of: rows of all parts, where the source knows.
        passes: how often each row is computed: once for each state of a module that comes in several.
        state: "running", "done" or "failed".
    """

    def __init__(self, title: str, call: str, size: int, of: int | None, passes: int, post: _Post | None) -> None:
        self.title, self.call, self.size, self.of, self.passes = title, call, size, of, passes
        self.state = "running"
        self.serial = next(_serial)
        self.unit, self.run, self.group = f"{os.getpid()}-{self.serial}", self.serial, call
        self._rows = 0
        self._post = post if post is not None and post.PERIODIC else None
        self._next = time.monotonic() + PERIOD
        self._notes: Notes | None = None

    def noted(self, index: Any, partition: int | None, reports: Sequence[Any]) -> Notes | None:
        """Where to note what is seen of the part's results, for the gradient page; None where no page can be."""
        if self._post is not None and self._post.noting:
            from ._notes import Notes

            self._notes = Notes(index, partition, reports)
        return self._notes

    def failed(self, error: BaseException) -> None:
        """The part has ended with `error`. One that nobody waited for any more has not failed: it stays as it was."""
        if isinstance(error, Unwanted | KeyboardInterrupt):
            return
        self.state = "failed"
        if self._notes is not None and self._notes.quiet:
            self._notes.broke(error)

    def done(self, rows: int) -> None:
        """`rows` more have their results. Called by the kernel after each batch, or row of the loop."""
        self._rows += rows
        if self._notes is not None:
            self._notes.settle()
        if self._post is not None:
            now = time.monotonic()
            if now >= self._next:
                self._next = now + PERIOD
                self._post.tick(self)

    def record(self) -> Record:
        """What is known now, of plain types. Numbers only grow, so a record that is lost costs nothing."""
        computed = min(self._rows // self.passes, self.size)
        rows = self.size if self.state == "done" else computed
        record: Record = {
            "unit": self.unit,
            "run": self.run,
            "group": self.group,
            "call": self.call,
            "title": self.title,
            "rows": rows,
            "size": self.size,
            "of": self.of,
            "state": self.state,
        }
        if self._notes is not None:
            record["notes"] = notes = self._notes.record()
            record["missing"] = max(0, rows - computed - notes["failed"]) if self.state == "done" else 0
        return record


class _Nobody(Reporter):
    """Where nobody watches."""

    def __init__(self) -> None:
        super().__init__("", "", 0, None, 1, None)

    def done(self, rows: int) -> None:
        pass


NOBODY: Final = _Nobody()
_current: ContextVar[Reporter] = ContextVar("daskgrad_reporter", default=NOBODY)
current = _current.get


@contextmanager
def watched(title: str, call: bytes | None, size: int, *, of: int | None, passes: int) -> Iterator[None]:
    """A part of `size` rows is computed inside, and `current()` is its reporter."""
    to = post()
    if to is None:
        yield
        return
    reporter = Reporter(title, call.hex()[:16] if call else "", size, of, passes, to)
    token = _current.set(reporter)
    to.begin(reporter)
    try:
        yield
    except BaseException as error:
        reporter.failed(error)
        raise
    else:
        reporter.state = "done"
    finally:
        _current.reset(token)
        to.end(reporter)


# -------------------------------------------------------------------------------- who may be watching


class _Post(Protocol):
    """How the numbers of a part get to who watches it."""

    PERIODIC: bool

    @property
    def noting(self) -> bool:
        """Whether the gradient page may want to know of the results as well."""

    def begin(self, reporter: Reporter) -> None:
        """The part begins, in the calling thread."""

    def tick(self, reporter: Reporter) -> None:
        """A period has passed. Called only where `PERIODIC`."""

    def end(self, reporter: Reporter) -> None:
        """The part has ended."""


class Watcher(Protocol):
    """A `dg.progress()` of this process."""

    def begin(self, reporter: Reporter) -> None: ...

    def end(self, reporter: Reporter) -> None: ...

    def arrived(self, client: Any) -> None: ...

    def leaving(self, client: Any) -> None: ...


watchers: list[Watcher] = []  # those of this process; replaced, never changed, so that any thread may walk it
_owner = os.getpid()


def watch(watcher: Watcher) -> None:
    """From now on `watcher` hears of the parts in this process."""
    global watchers, _owner
    if _owner != os.getpid():  # forked: the parent's watchers are not here
        watchers, _owner = [], os.getpid()
    watchers = [*watchers, watcher]


def unwatch(watcher: Watcher) -> None:
    """The opposite of `watch`."""
    global watchers
    watchers = [other for other in watchers if other is not watcher]


def watching() -> bool:
    """Whether anybody in this process wants to see what is computed here."""
    return bool(watchers) and _owner == os.getpid()


pages: set[object] = set()
"""The gradient pages that this process has opened."""


def counting() -> bool:
    """Whether it is of interest to anybody how many rows there are of all."""
    return watching() or bool(pages)


def arrived(client: Any) -> None:
    """`client` has made its cluster: seen before anything is computed there."""
    for watcher in watchers:
        watcher.arrived(client)


def leaving(client: Any) -> None:
    """`client` is about to close its cluster: a last look."""
    for watcher in watchers:
        watcher.leaving(client)


parent: _Post | None = None
"""Where a child process tells of its parts, if this is one and somebody watches."""
child = False
"""Whether this is one."""


def post() -> _Post | None:
    """Where the numbers of a part of this thread go."""
    if child:
        return parent
    worker = _worker()
    if worker is not None:
        return _of_worker(worker)
    if watching():
        return _HERE
    return _ToFile(os.environ[FILES]) if FILES in os.environ else None


def _worker() -> Any:
    get_worker = getattr(sys.modules.get("distributed"), "get_worker", None)
    if get_worker is None:  # not imported, or another thread is importing it
        return None
    try:
        return get_worker()
    except ValueError:  # its way to say: not in a task
        return None


class _Here:
    PERIODIC = noting = False

    def begin(self, reporter: Reporter) -> None:
        for watcher in watchers:
            watcher.begin(reporter)

    def tick(self, reporter: Reporter) -> None:
        raise NotImplementedError("who watches in this process looks by itself")

    def end(self, reporter: Reporter) -> None:
        for watcher in watchers:
            watcher.end(reporter)


_HERE: Final = _Here()


class _ToFile:
    """Lines of files; each is written at once at the end, so that any number of processes may append."""

    PERIODIC, noting = True, False

    def __init__(self, paths: str) -> None:
        self._paths = paths.split(os.pathsep)

    def begin(self, reporter: Reporter) -> None:
        reporter.run = 0  # serial numbers of other processes say nothing
        self.tick(reporter)

    def tick(self, reporter: Reporter) -> None:
        line = json.dumps(reporter.record()).encode() + b"\n"
        for path in self._paths:
            try:
                file = os.open(path, os.O_WRONLY | os.O_APPEND)
            except FileNotFoundError:  # whoever watched has gone
                continue
            try:
                os.write(file, line)
            finally:
                os.close(file)

    end = tick


def group_of(key: Any) -> str:
    """The tasks that are alike, by the key of one."""
    from dask.utils import key_split

    return str(key[0]) if isinstance(key, tuple) else str(key_split(key))


class _OnWorker:
    """The parts of one worker. Records go out together, a few times a second, and only where a watcher has asked."""

    PERIODIC = True

    def __init__(self, worker: Any) -> None:
        self._worker: Callable[[], Any] = weakref.ref(worker)
        self._lock = threading.Lock()
        self._live: dict[int, Reporter] = {}
        self._ended: list[Record] = []
        self._timer = False
        self._places: dict[int, tuple[Any, int, int]] = {}

    def begin(self, reporter: Reporter) -> None:
        worker = self._worker()
        key = worker.get_current_task()
        task = worker.state.tasks.get(key)
        reporter.run = getattr(task, "run_id", 0)
        reporter.group = group_of(key)
        place = self._place(key, reporter.run)
        reporter.unit = f"{key}|{place}"
        with self._lock:
            self._live[reporter.serial] = reporter
        self._start()

    def tick(self, reporter: Reporter) -> None:
        self._start()

    def end(self, reporter: Reporter) -> None:
        with self._lock:
            del self._live[reporter.serial]
            if self._asked():
                self._ended.append(reporter.record())
        self._start()

    def _place(self, key: Any, run: int) -> int:
        """The how manieth part of its task this is: Dask may fuse several into one."""
        me = threading.get_ident()
        last = self._places.get(me)
        place = last[2] + 1 if last is not None and last[:2] == (key, run) else 0
        self._places[me] = (key, run, place)
        return place

    @property
    def noting(self) -> bool:
        return self._asked()

    def _asked(self) -> bool:
        worker = self._worker()
        return worker is not None and any(name.startswith(PLUGIN) for name in list(worker.plugins))

    def _start(self) -> None:
        """See to it that the worker's loop sends, if anybody has asked."""
        if self._timer or not self._asked():
            return
        with self._lock:
            if self._timer:
                return
            self._timer = True
        self._worker().loop.add_callback(self._later)

    def _later(self) -> None:
        worker = self._worker()
        if worker is not None:
            worker.loop.call_later(PERIOD, self._send)

    def _send(self) -> None:
        with self._lock:
            records, self._ended = self._ended, []
            records += [reporter.record() for reporter in self._live.values()]
            self._timer = bool(self._live)
        worker = self._worker()
        if worker is None:
            return
        if records and self._asked():
            worker.log_event(TOPIC, {"parts": records})
        if self._timer:
            self._later()


_workers: weakref.WeakKeyDictionary[Any, _OnWorker] = weakref.WeakKeyDictionary()
_workers_lock = threading.Lock()


def _of_worker(worker: Any) -> _OnWorker:
    with _workers_lock:
        if worker not in _workers:
            _workers[worker] = _OnWorker(worker)
        return _workers[worker]


def next_serial() -> int:
    """The parts that begin from now on in this process have this number, or a later one."""
    return next(_serial)
