"""The numbers of all parts, added up by computation.

Runs in the process that watches, and on a scheduler, where it travels by value: nothing but Python's own modules here.

A record says where a part stands: its numbers are cumulative, so that records may be lost, repeated or late. A part is known by its
`unit`; where a task is run again, the same unit comes again with another `run`, and counts once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

Record = dict[str, Any]

KEPT = 200  # computations that are remembered one by one; older ones that are over are added up
GROUPS = 5000  # of tasks, whose computation is known: most of a cluster's have nothing to do with derivatives
PLAN = "plan-"  # what the names of plans' tasks begin with
SAME = 8  # computations of the same tasks


class Line:
    """How far the parts of one row function are, in one computation or in several.

    Attributes:
        title: the row function's name.
        rows, of: rows done, and of all where that is known.
        parts, all: partitions done, and of all where that is known.
        share: partitions done and begun, the latter by their share of rows.
        failed: parts that ended with an exception, and have not been repeated.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.rows, self.parts, self.failed = 0, 0, 0
        self.of: int | None = 0
        self.all: int | None = 0
        self.share = 0.0

    def add(self, other: Line) -> None:
        self.rows, self.parts, self.failed = self.rows + other.rows, self.parts + other.parts, self.failed + other.failed
        self.share += other.share
        self.of = None if self.of is None or other.of is None else self.of + other.of
        self.all = None if self.all is None or other.all is None else self.all + other.all

    @property
    def fraction(self) -> float | None:
        """Of all that is to be done, 0 to 1: by rows where their number is known, else by partitions."""
        if self.of:
            return min(1.0, self.rows / self.of)
        return min(1.0, self.share / self.all) if self.all else None

    def state(self) -> list[Any]:
        """Plain, to be sent; `of_state` makes the line of it again."""
        return [self.rows, self.of, self.parts, self.all, self.share, self.failed]

    @classmethod
    def of_state(cls, title: str, state: Iterable[Any]) -> Line:
        """What `state` was made of."""
        line = cls(title)
        line.rows, line.of, line.parts, line.all, line.share, line.failed = state
        return line

    @property
    def over(self) -> bool:
        return self.all is not None and self.parts >= self.all


class Computation:
    """What was submitted at once.

    Attributes:
        number: its number, from 1.
        client: who submitted it; "" where that is not known.
        tasks: how many tasks it has in each group, by the group's name; None where that is not known.
        first_run: the runs of its tasks have this number, or a later one.
        live: the latest record of each part that is not done.
        done: the parts that are.
    """

    def __init__(self, number: int, client: str, tasks: Mapping[str, int] | None, first_run: int) -> None:
        self.number, self.client, self.tasks, self.first_run = number, client, tasks, first_run
        self.live: dict[str, Record] = {}
        self.done: set[str] = set()
        self._calls: dict[tuple[str, str, str], _Call] = {}

    @property
    def heard(self) -> bool:
        """Whether anything is known of its parts."""
        return bool(self._calls)

    @property
    def news_to_come(self) -> bool:
        """Whether parts of it are not done, as far as that is known. They need a plan, whose task is in the graph too."""
        if not self.heard:
            return any(group.startswith(PLAN) for group in self.tasks or ())
        return not all(line.over for line in self.lines().values())

    def update(self, record: Record) -> int | None:
        """What is known of one part now. Returns how many rows are new; None where it is old news altogether."""
        unit = record["unit"]
        known = self.live.get(unit)
        if unit in self.done or (known is not None and record["run"] < known["run"]):
            return None  # computed again after it was done, or late news of an attempt that was given up
        call = self._calls.setdefault(_call_of(record), _Call())
        call.places = max(call.places, 1 + int(unit.rpartition("|")[2]) if "|" in unit else 1)
        call.of = record["of"] if call.of is None else call.of
        before = 0 if known is None else known["rows"]
        if record["state"] == "done":
            self.live.pop(unit, None)
            self.done.add(unit)
            call.rows, call.parts = call.rows + record["rows"], call.parts + 1
            return int(record["rows"]) - before
        rows = max(before, record["rows"])
        self.live[unit] = {**record, "rows": rows}
        return int(rows) - before

    def lines(self) -> dict[str, Line]:
        """By title."""
        found = {key: self._line(key, call) for key, call in self._calls.items()}
        for record in self.live.values():
            line = found[_call_of(record)]
            line.rows += record["rows"]
            line.share += record["rows"] / max(1, record["size"])
            line.failed += record["state"] == "failed"
        by_title: dict[str, Line] = {}
        _add(by_title, found.values())
        return by_title

    def _line(self, key: tuple[str, str, str], call: _Call) -> Line:
        title, _, group = key
        line = Line(title)
        line.rows, line.parts, line.share, line.of = call.rows, call.parts, float(call.parts), call.of
        tasks = None if self.tasks is None else self.tasks.get(group)
        line.all = None if tasks is None else tasks * call.places
        return line


class _Call:
    """The parts of one call in one group of tasks; `places`: how many of them a task has."""

    def __init__(self) -> None:
        self.rows, self.parts, self.places = 0, 0, 1
        self.of: int | None = None


def _call_of(record: Record) -> tuple[str, str, str]:
    return record["title"], record["call"], record["group"]


class Tally:
    """Computations, the latest last.

    Attributes:
        computations: those of which parts have been heard of.
        earlier: those that are over and no longer remembered one by one, by title.
        next_number: of the computation that begins next.
    """

    def __init__(self) -> None:
        self.computations: list[Computation] = []
        self.earlier: dict[str, Line] = {}
        self.next_number = 1
        self._by_group: OrderedDict[str, list[Computation]] = OrderedDict()

    def begin(self, client: str, tasks: Mapping[str, int] | None, first_run: int, groups: Iterable[str] = ()) -> Computation:
        """Tasks were submitted: how many in each group; None with `groups` where that is not known."""
        computation = Computation(self.next_number, client, tasks, first_run)
        self.next_number += 1
        for group in groups if tasks is None else tasks:
            known = self._by_group.pop(group, [])
            self._by_group[group] = [*known[-SAME:], computation]
        while len(self._by_group) > GROUPS:
            self._by_group.popitem(last=False)
        return computation

    def update(self, record: Record) -> tuple[Computation, int | None]:
        """News of a part: its computation, and how many rows are new (None: old news)."""
        computation = self._of(record)
        if not computation.heard:
            self.computations.append(computation)
            self._forget()
        return computation, computation.update(record)

    def lines(self) -> dict[str, Line]:
        """Everything, by title."""
        found: dict[str, Line] = {}
        _add(found, self.earlier.values())
        for computation in self.computations:
            _add(found, computation.lines().values())
        return found

    def latest(self) -> list[Computation]:
        """Of each group of tasks the latest computation, heard or not."""
        return [known[-1] for known in self._by_group.values()]

    def _of(self, record: Record) -> Computation:
        """The latest computation that can have run it."""
        for computation in reversed(self._by_group.get(record["group"], [])):
            if not record["run"] or computation.first_run <= record["run"]:
                return computation
        return self.begin("", None, 0, [record["group"]])  # submitted before anybody watched

    def _forget(self) -> None:
        while len(self.computations) > KEPT:
            oldest = next((computation for computation in self.computations if not computation.live), self.computations[0])
            self.computations.remove(oldest)
            _add(self.earlier, oldest.lines().values())


def _add(found: dict[str, Line], lines: Iterable[Line]) -> None:
    for line in lines:
        found.setdefault(line.title, Line(line.title)).add(line)
