"""The benchmarks run, refuse wrong results, and do their sums right. They measure nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "ci" / "bench"
WORKLOADS = sorted(file.stem for file in BENCH.glob("*.py") if file.stem not in {"__main__", "harness", "report", "chart", "peers", "clusters"})


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import harness

    return harness


@pytest.mark.cluster
@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_runs(name: str, tmp_path: Path) -> None:
    out = tmp_path / "numbers.json"
    command = [sys.executable, str(BENCH), "--quick", "--out", str(out), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    numbers = json.loads(out.read_text())
    assert {label.partition(":")[0] for label in numbers["workloads"]} == {name}
    for arm in (arm for outcome in numbers["workloads"].values() for arm in outcome["arms"]):
        assert arm["name"] in done.stdout
        assert arm["rows_per_second"] > 0
        assert len(arm["seconds"]) >= 2
    assert {"torch", "daskgrad"} < numbers["versions"].keys()


def test_a_wrong_result_is_refused_and_the_workload_closed(harness: ModuleType) -> None:
    closed = []

    def check(name: str, result: Any) -> None:
        assert result == 4, name

    arms = [harness.Arm("right", 1, lambda: 4), harness.Arm("wrong", 1, lambda: 5)]
    with pytest.raises(AssertionError, match="wrong"):
        harness.measure(harness.Workload("sums", arms, check, close=lambda: closed.append(True)))
    assert closed == [True]


def test_arms_take_turns(harness: ModuleType) -> None:
    calls = []
    arms = [harness.Arm(name, 1, lambda name=name: calls.append(name)) for name in "abc"]
    harness.measure(harness.Workload("order", arms, lambda name, result: None, repeats=3))
    assert "".join(calls) == "abc" + "abc" + "acb" + "cab"


def test_ratios_are_paired_and_by_row(harness: ModuleType) -> None:
    first, other = harness.Arm("first", 100, int), harness.Arm("other", 10, int)
    # the machine was twice as slow in the second round, for both
    result = harness.measured(other, [1.0, 2.0, 1.0], first, [5.0, 10.0, 5.0])
    assert result.ratio == result.low == result.high == 0.5
    assert result.rows_per_second == 10
    assert harness.measured(first, [5.0], first, [5.0]).ratio == 1
