"""dg.progress(): how far the derivatives are that are computed in its block, wherever they run.

progress       the context manager: a tally of this process, its clusters, and a thread that shows it
  _PoolFile    what processes of Dask's pool append     _counted     partitions that a local scheduler is given
  _Clusters    the clients of this process, whose schedulers add up what workers tell
  _Bars        shown in a terminal       _Page   in a notebook       _Lines   as plain lines anywhere else
"""

from __future__ import annotations

import html
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from . import _reporter
from ._reporter import FILES, Reporter
from ._tally import Line, Tally

if TYPE_CHECKING:
    from ._cluster import Hold

_log = logging.getLogger("daskgrad")
LAST_NEWS = 2.0  # seconds without news of a cluster after which the end no longer waits for them


class progress:  # noqa: N801  # a verb that is used in a `with`
    """Show how far the derivatives are that are computed inside: `with dg.progress(): ...`.

    Rows done, rows per second, partitions done of all and the time left from them, a line for each row function; rows of all
    where the source knows their number without reading them (pandas, `from_pandas`, Parquet). Computations of the same function
    add up, and a task that Dask runs again counts once. It follows pandas, Dask's schedulers and every `distributed.Client`
    of this process, also one that is made inside.

    In a terminal these are bars of tqdm, in a notebook one display, anywhere else plain lines, seldom enough for a log.
    Afterwards nothing is left but what was written; Ctrl-C is yours.

    Args:
        file: where to write; None: standard error.

    Example:
        >>> import pandas as pd, daskgrad as dg
        >>> with dg.progress():
        ...     dg.grad_column(pd.Series([1.0, 2.0], name="x"), lambda x: x**2).tolist()
        [2.0, 4.0]
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._lock = threading.RLock()  # of the tally
        self._tally = Tally()
        self._live: set[Reporter] = set()
        self._clusters = _Clusters()
        self._exit = ExitStack()

    def __enter__(self) -> progress:
        with ExitStack() as stack:
            self._pool = stack.enter_context(closing(_PoolFile()))
            stack.enter_context(_counted(self))
            _reporter.watch(self)
            stack.callback(_reporter.unwatch, self)
            stack.enter_context(closing(self._clusters)).follow()
            self._show = stack.enter_context(closing(_show(self._file or sys.stderr)))
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._run, name="daskgrad-progress", daemon=True)
            self._thread.start()
            self._exit = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._exit:
            self._stop.set()
            self._thread.join()
            if kind is None:
                self._clusters.wait_for_last_news()
            self._look()
            self._show.update(self.lines(), last=True)

    def lines(self) -> dict[str, Line]:
        """How far each row function is, by its name, as seen last."""
        with self._lock:
            return _together([self._tally.lines(), *self._clusters.lines.values()])

    # a watcher of this process: called in the threads that compute

    def begin(self, reporter: Reporter) -> None:
        with self._lock:
            if not reporter.call:  # pandas: a computation of its own
                reporter.group = reporter.unit
                self._tally.begin("", {reporter.group: 1}, reporter.run)
            self._live.add(reporter)

    def end(self, reporter: Reporter) -> None:
        with self._lock:
            self._live.discard(reporter)
            self._tally.update(reporter.record())

    def arrived(self, client: Any) -> None:
        """`client` has made its cluster."""
        self._clusters.follow()

    def leaving(self, client: Any) -> None:
        """`client` is about to close its cluster."""
        self._clusters.wait_for_last_news(client)

    def submitted(self, parts: Mapping[str, int]) -> None:
        """A local scheduler begins: so many parts of each call."""
        with self._lock:
            self._drain()  # what processes wrote belongs to earlier computations
            self._tally.begin("", parts, _reporter.next_serial())

    # the thread that shows

    def _run(self) -> None:
        while not self._stop.wait(self._show.period):
            self._clusters.follow()
            self._look()
            self._show.update(self.lines(), last=False)

    def _look(self) -> None:
        self._clusters.look()
        with self._lock:
            self._drain()
            for reporter in self._live:
                self._tally.update(reporter.record())

    def _drain(self) -> None:
        for record in self._pool.news():
            self._tally.update(record)


def _together(several: Iterable[Mapping[str, Line]]) -> dict[str, Line]:
    found: dict[str, Line] = {}
    for lines in several:
        for title, line in lines.items():
            found.setdefault(title, Line(title)).add(line)
    return found


# -------------------------------------------------------------------------------- where the numbers come from


class _PoolFile:
    """The file to which processes of Dask's own pool append, and which they find by their environment."""

    def __init__(self) -> None:
        handle, self.path = tempfile.mkstemp(prefix="daskgrad-progress-")
        self._file = os.fdopen(handle, "rb")
        self._rest = b""
        os.environ[FILES] = os.pathsep.join([*_paths(), self.path])

    def news(self) -> list[dict[str, Any]]:
        """The records written since the last call."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        paths = [path for path in _paths() if path != self.path]
        if paths:
            os.environ[FILES] = os.pathsep.join(paths)
        else:
            os.environ.pop(FILES, None)
        self._file.close()
        os.unlink(self.path)


def _paths() -> list[str]:
    return [path for path in os.environ.get(FILES, "").split(os.pathsep) if path]


@contextmanager
def _counted(watcher: progress) -> Iterator[None]:
    """`watcher` is told how many partitions are in each graph that one of Dask's local schedulers is given."""
    from dask.callbacks import Callback

    callback = Callback(start=lambda graph: watcher.submitted(_parts_of(graph)))
    callback.register()
    try:
        yield
    finally:
        callback.unregister()


def _parts_of(graph: Mapping[Any, Any]) -> dict[str, int]:
    """How many tasks of a graph need the plan of each call."""
    found: dict[str, int] = {}
    for task in graph.values():
        for key in getattr(task, "dependencies", ()):
            name = key[0] if isinstance(key, tuple) else key
            if isinstance(name, str) and name.startswith("plan-"):
                call = name.removeprefix("plan-")[:16]
                found[call] = found.get(call, 0) + 1
    return found


class _Clusters:
    """The clients of this process."""

    def __init__(self) -> None:
        self.lines: dict[Any, dict[str, Line]] = {}
        self._holds: dict[Any, Hold] = {}  # by client
        self._known: set[Any] = set()
        self._one = threading.Lock()
        self._busy: set[Any] = set()  # those of which news are to come

    def follow(self) -> None:
        """Watch every client that is there."""
        made = getattr(sys.modules.get("distributed"), "Client", None)
        if made is None:  # not imported, or another thread is importing it
            return
        for client in list(made._instances):
            if client.status == "running" and not client.asynchronous:
                with self._one:
                    new = client not in self._known
                    self._known.add(client)
                if new:
                    self._hold(client)

    def _hold(self, client: Any) -> None:
        from ._cluster import Hold

        try:
            self._holds[client] = Hold(client)
        except Exception as error:  # whatever a foreign scheduler has against it: the computation itself is not concerned
            _log.warning("daskgrad: no progress from %s (%s: %s)", client, type(error).__name__, error)

    def look(self) -> None:
        """What is known now of the clients that are still there; of the others, what was seen last stays."""
        for client, hold in list(self._holds.items()):
            if client.status == "running":
                try:
                    self.lines[client], more = hold.lines()
                    (self._busy.add if more else self._busy.discard)(client)
                except OSError as error:  # a closed connection among them
                    self._busy.discard(client)
                    _log.debug("daskgrad: no progress from %s: %s", client, error)

    def wait_for_last_news(self, client: Any = None) -> None:
        """Until no news are to come, or none have come for a while. `client`: of this one only."""
        asked = [one for one in self._holds if one.status == "running" and client in (None, one)]
        seen, until = None, time.monotonic() + LAST_NEWS
        while asked and time.monotonic() < until:
            self.look()
            asked = [one for one in asked if one in self._busy]
            now = [line.state() for one in asked for line in self.lines[one].values()]
            if now != seen:
                seen, until = now, time.monotonic() + LAST_NEWS
            time.sleep(0.05 if asked else 0)

    def close(self) -> None:
        for client, hold in self._holds.items():
            try:
                hold.release()
            except OSError as error:
                _log.debug("daskgrad: %s is no longer there: %s", client, error)


# -------------------------------------------------------------------------------- how it is shown


class _Show(Protocol):
    period: float

    def update(self, lines: Mapping[str, Line], last: bool) -> None:
        """Show `lines`; `last`: nothing comes after."""

    def close(self) -> None:
        """Leave what was shown last."""


def _show(file: TextIO) -> _Show:
    if _in_notebook():
        return _Page()
    return _Bars(file) if file.isatty() else _Lines(file)


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def _numbers(line: Line, seconds: float) -> list[str]:
    """The numbers of a line in words."""
    rows = f"{line.rows:,} rows" if line.of is None else f"{line.rows:,} of {line.of:,} rows"
    words = [rows, f"{_rounded(line.rows / seconds if seconds > 0 else 0):,} rows/s"]
    if line.all is not None and line.all != 1:
        words.append(f"{line.parts:,} of {line.all:,} partitions")
    elif line.all is None:
        words.append(f"{line.parts:,} partition{'' if line.parts == 1 else 's'}")
    if line.failed:
        words.append(f"{line.failed} failed")
    return words


def _rounded(number: float) -> int:
    """To three digits: more are noise."""
    digits = max(0, len(str(int(number))) - 3)
    return int(round(number, -digits))


def _times(line: Line, seconds: float) -> str:
    """The time gone, and the time left at the pace so far."""
    from tqdm import tqdm

    gone, fraction = str(tqdm.format_interval(seconds)), line.fraction
    if not fraction or fraction >= 1:
        return gone
    return f"{gone}, {tqdm.format_interval(seconds * (1 - fraction) / fraction)} left"


class _Stopwatch:
    """A stopwatch for each line, which runs while the line is not over: between two computations it stands."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._seen: dict[str, tuple[float, int]] = {}  # seconds up to now, rows

    def look(self, lines: Mapping[str, Line]) -> Iterator[tuple[Line, float]]:
        """Each line, and how long it has been going: seconds."""
        now = time.monotonic()
        for title, line in lines.items():
            seconds, rows = self._seen.get(title, (0.0, -1))
            if not line.over or rows != line.rows:
                seconds += now - self._looked
            self._seen[title] = (seconds, line.rows)
            yield line, seconds
        self._looked = now


class _Bars:
    """Bars of tqdm, one for each row function."""

    period = 0.1

    def __init__(self, file: TextIO) -> None:
        self._file, self._watch = file, _Stopwatch()
        self._bars: dict[str, Any] = {}
        self._kind = _bar()

    def update(self, lines: Mapping[str, Line], last: bool) -> None:
        for line, seconds in self._watch.look(lines):
            title = line.title
            if title not in self._bars:
                self._bars[title] = self._kind(desc=title, total=1.0, file=self._file, dynamic_ncols=True)
            bar, fraction = self._bars[title], line.fraction
            numbers = " · ".join([*_numbers(line, seconds), _times(line, seconds)])
            bar.bar_format = ("{desc} " if fraction is None else "{desc} {percentage:3.0f}% |{bar:20}| ") + numbers
            bar.n = fraction or 0.0
            bar.refresh()

    def close(self) -> None:
        for bar in self._bars.values():
            bar.close()


def _bar() -> Any:
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]  # at run time it takes no arguments
        """A tqdm that starts no thread and makes no lock between processes."""

        monitor_interval = 0

    Bar.set_lock(threading.RLock())
    return Bar


class _Lines:
    """Plain lines: the first after a second, then ever more seldom, the last at the end."""

    period = 0.25

    def __init__(self, file: TextIO) -> None:
        self._file, self._watch = file, _Stopwatch()
        self._next: dict[str, float] = {}
        self._wait: dict[str, float] = {}
        self._said: dict[str, tuple[int, int]] = {}

    def update(self, lines: Mapping[str, Line], last: bool) -> None:
        now = time.monotonic()
        for line, seconds in self._watch.look(lines):
            title = line.title
            due = self._next.setdefault(title, now + 1.0)
            news = self._said.get(title) != (line.rows, line.parts)
            if news and (last or now >= due):
                self._wait[title] = min(30.0, 1.5 * self._wait.get(title, 1.0))
                self._next[title] = now + self._wait[title]
                self._said[title] = (line.rows, line.parts)
                print(_sentence(line, seconds), file=self._file, flush=True)

    def close(self) -> None:
        pass


def _sentence(line: Line, seconds: float) -> str:
    percent = [] if line.fraction is None else [f"{100 * line.fraction:.0f}%"]
    return f"{line.title}: {' · '.join([*percent, *_numbers(line, seconds), _times(line, seconds)])}"


class _Page:
    """One display of a notebook, which is rewritten; what it shows last is stored with the notebook."""

    period = 0.5

    def __init__(self) -> None:
        self._watch = _Stopwatch()
        self._handle: Any = None
        self._shown = ""

    def update(self, lines: Mapping[str, Line], last: bool) -> None:
        from IPython import display

        html_of: Any = display.HTML
        show: Any = display.display

        text = "".join(_row(line, seconds) for line, seconds in self._watch.look(lines))
        if text == self._shown or not text:
            return
        self._shown = text
        content = html_of(f'<table class="daskgrad-progress" style="border:none">{text}</table>')
        if self._handle is None:
            self._handle = show(content, display_id=True)
        else:
            self._handle.update(content)

    def close(self) -> None:
        pass


def _row(line: Line, seconds: float) -> str:
    fraction = line.fraction
    cell = '<td style="text-align:left;padding:2px 12px 2px 0;font-variant-numeric:tabular-nums">'
    bar = "" if fraction is None else f'<progress value="{fraction:.4f}" max="1" style="width:12em"></progress>'
    percent = "" if fraction is None else f"{100 * fraction:.0f}%"
    words = "".join(f"{cell}{html.escape(word)}</td>" for word in [percent, *_numbers(line, seconds), _times(line, seconds)])
    return f"<tr>{cell}<b>{html.escape(line.title)}</b></td>{cell}{bar}</td>{words}</tr>"
