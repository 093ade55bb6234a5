"""Measures several ways ("arms") of doing one thing, side by side in one run.

A workload is a file beside this one with a function `workload(quick: bool) -> Workload`. The arms take turns, in
changing order, so that whatever else the machine does falls on all of them; the results of one run are checked before
anything is timed, so that no number is reported for a wrong answer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Arm:
    """One way.

    Attributes:
        name: what the table calls it.
        rows: how many rows one run does; slow ways get fewer, and all are compared by rows/s.
        run: does it once, on data that is ready; what it returns goes to the workload's `check`.
        before: is called before each run, and not timed.
    """

    name: str
    rows: int
    run: Callable[[], Any]
    before: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Mark:
    """What is to be reached: one arm beside another, paired round by round.

    Attributes:
        work: the line of the summary.
        arm, against: names of arms. Where one of them is missing, the mark is reported as not measured.
        bound: "speed": rows/s of `arm` are at least `bound` times those of `against`. "time": it takes at most `bound` times as
            long. "extra": it takes at most `bound` milliseconds more for each of `rows` (which are partitions then).
        profile: text that says where `arm`'s time goes, asked for where the mark is missed; None: cProfile of one run.
    """

    work: str
    arm: str
    against: str
    bound: float
    kind: Literal["speed", "time", "extra"] = "speed"
    profile: Callable[[], str] | None = None


@dataclass(frozen=True)
class Workload:
    """What is measured.

    Attributes:
        title: one line that says it.
        arms: the ways; the first is the one that the others are compared with.
        check: gets each arm's name and result; raises AssertionError where a result is wrong.
        repeats: timed runs of each arm.
        close: ends what was started for it.
        missing: ways that cannot be measured here, and why.
        marks: what is to be reached.
        unit: what `rows` counts.
        notes: further lines for the table, asked for when all arms have run.
    """

    title: str
    arms: Sequence[Arm]
    check: Callable[[str, Any], None]
    repeats: int = 7
    close: Callable[[], None] = field(default=lambda: None)
    missing: Mapping[str, str] = field(default_factory=dict)
    marks: Sequence[Mark] = ()
    unit: str = "rows"
    notes: Callable[[], Sequence[str]] = field(default=lambda: ())


@dataclass(frozen=True)
class Measured:
    """One arm's numbers: seconds of each run, and what follows from them.

    Attributes:
        ratio: median over the rounds of (seconds per row of the first arm / of this arm), so 0.5 means half as many
            rows/s. Paired: both were timed in the same round. `low` and `high`: the middle half of them.
        rows_per_second, spread: median over the rounds, and half the width of the middle half as a part of it.
        best: rows/s of the fastest round; what else runs on the machine can only make a round slower.
    """

    name: str
    rows: int
    seconds: list[float]
    rows_per_second: float
    spread: float
    best: float
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Reached:
    """A mark and what was reached: the median over the rounds, and the middle half of them. None: an arm is missing."""

    work: str
    kind: str
    bound: float
    value: float | None
    low: float | None
    high: float | None
    met: bool | None
    why: str = ""
    profile: str = ""


@dataclass(frozen=True)
class Outcome:
    """All that one workload gave."""

    title: str
    unit: str
    arms: list[Measured]
    missing: Mapping[str, str]
    marks: list[Reached]
    notes: list[str]


def run(workload: Workload, profiled: bool = False) -> Outcome:
    """Measure `workload`, hold it against its marks, and end it; where `profiled`, find out why a mark was missed."""
    try:
        arms = timed(workload)
        marks = [reached(mark, workload, arms, profiled) for mark in workload.marks]
        return Outcome(workload.title, workload.unit, arms, dict(workload.missing), marks, list(workload.notes()))
    finally:
        workload.close()


def measure(workload: Workload) -> list[Measured]:
    """The arms' numbers alone."""
    return run(workload).arms


def timed(workload: Workload) -> list[Measured]:
    """Check every arm's result once (which warms it up, too), then time all of them in turns."""
    for arm in workload.arms:
        arm.before()
        workload.check(arm.name, arm.run())
    seconds: dict[str, list[float]] = {arm.name: [] for arm in workload.arms}
    for number in range(workload.repeats):
        for arm in rotated(workload.arms, number):
            arm.before()
            started = time.perf_counter()
            result = arm.run()
            seconds[arm.name].append(time.perf_counter() - started)
            del result  # freeing it is nobody's work
    first = workload.arms[0]
    return [measured(arm, seconds[arm.name], first, seconds[first.name]) for arm in workload.arms]


def rotated(arms: Sequence[Arm], number: int) -> list[Arm]:
    """Another arm first in each round, and every other round backwards: nobody always follows the same one."""
    start = number % len(arms)
    order = [*arms[start:], *arms[:start]]
    return order[::-1] if number % 2 else order


def measured(arm: Arm, seconds: list[float], first: Arm, seconds_of_first: list[float]) -> Measured:
    speeds = [arm.rows / s for s in seconds]
    ratios = [(f / first.rows) / (s / arm.rows) for f, s in zip(seconds_of_first, seconds, strict=True)]
    low, high = middle_half(ratios)
    slow, fast = middle_half(speeds)
    median = statistics.median(speeds)
    return Measured(
        name=arm.name,
        rows=arm.rows,
        seconds=seconds,
        rows_per_second=median,
        spread=(fast - slow) / 2 / median,
        best=max(speeds),
        ratio=statistics.median(ratios),
        low=low,
        high=high,
    )


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """The first and third quartile."""
    if len(values) == 1:
        return values[0], values[0]
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return quartiles[0], quartiles[2]


# --- marks ------------------------------------------------------------------------------------------------------------


def reached(mark: Mark, workload: Workload, arms: Sequence[Measured], profiled: bool = False) -> Reached:
    """What `arms` make of `mark`."""
    found = {arm.name: arm for arm in arms}
    absent = [name for name in (mark.arm, mark.against) if name not in found]
    if absent:
        why = f"{absent[0]}: {workload.missing.get(absent[0], 'no such arm')}"
        return Reached(mark.work, mark.kind, mark.bound, None, None, None, None, why)
    values = compared(mark, found[mark.arm], found[mark.against])
    low, high = middle_half(values)
    value = statistics.median(values)
    met = value >= mark.bound if mark.kind == "speed" else value <= mark.bound
    profile = ""
    if profiled and not met:
        arm = next(arm for arm in workload.arms if arm.name == mark.arm)
        profile = mark.profile() if mark.profile is not None else profile_of(arm.run)
    return Reached(mark.work, mark.kind, mark.bound, value, low, high, met, profile=profile)


def compared(mark: Mark, arm: Measured, against: Measured) -> list[float]:
    """The value of `mark` in each round."""
    rounds = list(zip(arm.seconds, against.seconds, strict=True))
    if mark.kind == "extra":
        return [1000 * (ours / arm.rows - theirs / against.rows) for ours, theirs in rounds]
    speeds = [(theirs / against.rows) / (ours / arm.rows) for ours, theirs in rounds]
    return speeds if mark.kind == "speed" else [1 / speed for speed in speeds]


def profile_of(run: Callable[[], Any], lines: int = 14) -> str:
    """Where the time of one run goes: the functions that take most themselves."""
    import cProfile
    import io
    import pstats

    profile = cProfile.Profile()
    profile.runcall(run)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(lines)
    return "\n".join(line for line in text.getvalue().splitlines() if line.strip())
