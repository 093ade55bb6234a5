"""Measures several ways ("arms") of doing one thing, side by side in one run.

A workload is a file beside this one with a function `workload(quick: bool) -> Workload`. The arms take turns, in
changing order, so that whatever else the machine does falls on all of them; the results of one run are checked before
anything is timed, so that no number is reported for a wrong answer.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import daskgrad


@dataclass(frozen=True)
class Arm:
    """One way.

    Attributes:
        name: what the table calls it.
        rows: how many rows one run does; slow ways get fewer, and all are compared by rows/s.
        run: does it once, on data that is ready; what it returns goes to the workload's `check`.
    """

    name: str
    rows: int
    run: Callable[[], Any]


@dataclass(frozen=True)
class Workload:
    """What is measured.

    Attributes:
        title: one line that says it.
        arms: the ways; the first is the one that the others are compared with.
        check: gets each arm's name and result; raises AssertionError where a result is wrong.
        repeats: timed runs of each arm.
        close: ends what was started for it.
    """

    title: str
    arms: Sequence[Arm]
    check: Callable[[str, Any], None]
    repeats: int = 7
    close: Callable[[], None] = field(default=lambda: None)


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


def measure(workload: Workload) -> list[Measured]:
    """Check every arm's result once (which warms it up, too), then time all of them in turns."""
    try:
        for arm in workload.arms:
            workload.check(arm.name, arm.run())
        seconds: dict[str, list[float]] = {arm.name: [] for arm in workload.arms}
        for number in range(workload.repeats):
            for arm in rotated(workload.arms, number):
                started = time.perf_counter()
                arm.run()
                seconds[arm.name].append(time.perf_counter() - started)
    finally:
        workload.close()
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


def table(title: str, results: Sequence[Measured]) -> str:
    """The results as lines of text."""
    width = max(len(result.name) for result in results)
    lines = [title, f"  {'':<{width}}  {'rows':>10}  {'rows/s':>12}  {'±':>4}  {'best':>12}  × {results[0].name}"]
    for result in results:
        ratio = "1" if result is results[0] else f"{result.ratio:.3g}  [{result.low:.3g}, {result.high:.3g}]"
        numbers = f"{result.rows:>10,}  {result.rows_per_second:>12,.0f}  {result.spread:>4.0%}  {result.best:>12,.0f}"
        lines.append(f"  {result.name:<{width}}  {numbers}  {ratio}")
    return "\n".join(lines)


def as_json(results: Mapping[str, Sequence[Measured]]) -> str:
    """All results, with what one needs to know to compare them with those of another day."""
    others = {name: metadata.version(name) for name in ("torch", "numpy", "pandas", "dask", "distributed", "pyarrow")}
    return json.dumps(
        {
            "versions": {"python": platform.python_version(), "daskgrad": daskgrad.__version__, **others},
            "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()},
            "workloads": {name: [asdict(result) for result in measured] for name, measured in results.items()},
        },
        indent=2,
    )


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
