"""What the gradient page shows of each computation: rates over time, magnitudes, trouble. All of it is bounded.

Like `_tally`, on which it builds, it runs on a scheduler and travels by value: nothing but Python's own modules here.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

from ._tally import Computation, Line, Record

LOWEST, PER_DECADE, BINS = -16, 4, 128  # of magnitudes: from 1e-16 to 1e16
KEPT = 30  # computations
BUCKETS = 240  # of a computation's time; twice as long each when there are more
WORKERS = 40  # with a rate of their own
SLOWEST = 8
TROUBLE = 12
SILENT = 10.0  # seconds after which a computation that says nothing is taken to have stopped
RECENT = 3.0  # seconds that "rows/s" now is about


class History:
    """What is kept of the latest computations."""

    def __init__(self) -> None:
        self._stories: OrderedDict[int, _Story] = OrderedDict()

    def hear(self, computation: Computation, record: Record, grown: int, worker: str) -> None:
        """News of a part, which has `grown` rows more than before."""
        story = self._stories.get(computation.number)
        if story is None:
            story = self._stories[computation.number] = _Story(computation)
            while len(self._stories) > KEPT:
                self._stories.popitem(last=False)
        story.hear(record, grown, worker)

    def state(self, number: int | None = None) -> dict[str, Any]:
        """All that is to be seen of computation `number` (None, or one that is no longer there: the latest), of plain types."""
        stories = list(self._stories.values())
        found: dict[str, Any] = {"computations": [story.heading() for story in reversed(stories)], "shown": None}
        if stories:
            shown = self._stories.get(number or 0, stories[-1])
            found.update(shown.state(), shown=shown.computation.number)
        return found


class _Story:
    """One computation.

    Attributes:
        began, heard: when, in seconds since the epoch.
    """

    def __init__(self, computation: Computation) -> None:
        self.computation = computation
        self.began = self.heard = time.time()
        self._rates = _Rates()
        self._past = _Sum()  # of the parts that are done
        self._live: dict[str, dict[str, Any]] = {}
        self._slowest: list[list[Any]] = []
        self._trouble: deque[list[Any]] = deque(maxlen=TROUBLE)
        self._told: dict[str, int] = {}

    def hear(self, record: Record, grown: int, worker: str) -> None:
        now = time.time()
        unit, notes = record["unit"], record.get("notes")
        if notes is not None and not self._rates:
            self.began = min(self.began, now - notes["seconds"])
        self.heard = now
        self._rates.add(now, worker, grown)
        if notes is None:
            return
        self._tell(now, record, notes)
        if record["state"] == "done":
            self._live.pop(unit, None)
            self._told.pop(unit, None)
            self._past.add(notes, record["missing"])
            self._slowest = _slowest([*self._slowest, _slow(record, notes, worker)])
        else:
            self._live[unit] = {"notes": notes, "slow": _slow(record, notes, worker)}

    def _tell(self, now: float, record: Record, notes: dict[str, Any]) -> None:
        told = self._told.get(record["unit"], 0)
        for kind, label, message in notes["trouble"][told:]:
            self._trouble.appendleft([now, kind, notes["partition"], label, message])
        self._told[record["unit"]] = len(notes["trouble"])

    @property
    def _lines(self) -> dict[str, Line]:
        return self.computation.lines()

    def _condition(self, lines: Iterable[Line]) -> str:
        lines = list(lines)
        if any(line.failed for line in lines):
            return "failed"
        if lines and all(line.over for line in lines):
            return "done"
        return "running" if time.time() - self.heard < SILENT else "stopped"

    def heading(self) -> list[Any]:
        """Its number, the row functions, when it began, its condition, rows done and of all."""
        lines = self._lines
        total = _together(lines.values())
        return [self.computation.number, ", ".join(lines), self.began, self._condition(lines.values()), total.rows, total.of]

    def state(self) -> dict[str, Any]:
        lines = self._lines
        condition = self._condition(lines.values())
        total = _together(lines.values())
        now = _Sum()
        now.join(self._past)
        for live in self._live.values():
            now.add(live["notes"], 0)
        return {
            "title": ", ".join(lines),
            "condition": condition,
            "began": self.began,
            "seconds": (time.time() if condition == "running" else self.heard) - self.began,
            "line": total.state(),
            "fraction": total.fraction,
            "rate": self._rates.recent(time.time()) if condition == "running" else None,
            "rates": self._rates.state(condition == "running"),
            **now.state(),
            "slowest": _slowest([*self._slowest, *(live["slow"] for live in self._live.values())]),
            "trouble": list(self._trouble),
        }


def _together(lines: Iterable[Line]) -> Line:
    total = Line("")
    total.of = total.all = 0
    for line in lines:
        total.add(line)
    return total


def _slow(record: Record, notes: dict[str, Any], worker: str) -> list[Any]:
    return [notes["partition"], worker, notes["seconds"], record["rows"], record["size"], record["state"]]


def _slowest(parts: list[list[Any]]) -> list[list[Any]]:
    return sorted(parts, key=lambda part: -part[2])[:SLOWEST]


class _Sum:
    """Notes of several parts."""

    def __init__(self) -> None:
        self.missing, self.failed, self.bad, self.paths = 0, 0, 0, 0
        self.engines: dict[str, int] = {}
        self.columns: dict[str, _Column] = {}

    def add(self, notes: dict[str, Any], missing: int) -> None:
        self._count(missing, notes["failed"], notes["bad"], notes["paths"], notes["engines"])
        for label, (looked, bad, zeros, bins, counts) in notes["columns"].items():
            self.columns.setdefault(label, _Column()).add(looked, bad, zeros, zip(bins, counts, strict=True))

    def join(self, other: _Sum) -> None:
        self._count(other.missing, other.failed, other.bad, other.paths, other.engines)
        for label, column in other.columns.items():
            self.columns.setdefault(label, _Column()).add(column.looked, column.bad, column.zeros, column.bins.items())

    def _count(self, missing: int, failed: int, bad: int, paths: int, engines: dict[str, int]) -> None:
        self.missing, self.failed, self.bad = self.missing + missing, self.failed + failed, self.bad + bad
        self.paths = max(self.paths, paths)
        for name, rows in engines.items():
            self.engines[name] = self.engines.get(name, 0) + rows

    def state(self) -> dict[str, Any]:
        return {
            "missing": self.missing,
            "failed": self.failed,
            "bad": self.bad,
            "paths": self.paths,
            "engines": self.engines,
            "columns": [[label, *column.state()] for label, column in self.columns.items()],
        }


class _Column:
    """Rows looked at, rows not finite, and of a sample of magnitudes: zeros, and how many in each bin."""

    def __init__(self) -> None:
        self.looked, self.bad, self.zeros = 0, 0, 0
        self.bins: dict[int, int] = {}

    def add(self, looked: int, bad: int, zeros: int, bins: Iterable[tuple[int, int]]) -> None:
        self.looked, self.bad, self.zeros = self.looked + looked, self.bad + bad, self.zeros + zeros
        for place, count in bins:
            self.bins[place] = self.bins.get(place, 0) + count

    def state(self) -> list[Any]:
        return [self.looked, self.bad, self.zeros, sorted(self.bins.items())]


class _Rates:
    """Rows of each worker in buckets of time, as fine as their number allows."""

    def __init__(self) -> None:
        self._start, self._step = 0.0, 0.5
        self._buckets: list[dict[str, int]] = []
        self._workers: dict[str, None] = {}

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def add(self, now: float, worker: str, rows: int) -> None:
        if not self._buckets:
            self._start = now - self._step
        if worker not in self._workers:
            if len(self._workers) >= WORKERS:
                worker = "others"
            self._workers[worker] = None
        while (place := int((now - self._start) / self._step)) >= BUCKETS:
            pairs = range(0, len(self._buckets), 2)
            self._buckets = [_added(self._buckets[k : k + 2]) for k in pairs]
            self._step *= 2
        while len(self._buckets) <= place:
            self._buckets.append({})
        bucket = self._buckets[max(0, place)]
        bucket[worker] = bucket.get(worker, 0) + rows

    def recent(self, now: float) -> float:
        """Rows per second in the last buckets that are over."""
        last = int((now - self._start) / self._step)  # the one that fills
        first = max(0, last - max(1, round(RECENT / self._step)))
        rows = sum(sum(bucket.values()) for bucket in self._buckets[first:last])
        return rows / max(self._step, (last - first) * self._step)

    def state(self, running: bool) -> dict[str, Any]:
        """For each worker the rows per second of each bucket, which are `step` seconds long. `running`: the last is not full yet."""
        buckets = self._buckets[:-1] if running else self._buckets
        rows = {worker: [bucket.get(worker, 0) / self._step for bucket in buckets] for worker in self._workers}
        return {"step": self._step, "workers": rows}


def _added(buckets: list[dict[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for bucket in buckets:
        for worker, rows in bucket.items():
            found[worker] = found.get(worker, 0) + rows
    return found
