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
WORKLOADS = sorted(
    file.stem for file in BENCH.glob("*.py") if file.stem not in {"__main__", "harness", "report", "chart", "peers", "clusters"}
)


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import harness

    return harness


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What one run of all workloads writes as JSON, and what it prints."""
    out = tmp_path_factory.mktemp("bench") / "numbers.json"
    command = [sys.executable, str(BENCH), "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
    assert out.exists(), done.stderr
    assert out.with_suffix(".svg").read_text().rstrip().endswith("</svg>")
    return json.loads(out.read_text()), done.stdout


@pytest.mark.cluster
@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_runs(name: str, quick: tuple[dict[str, Any], str]) -> None:
    numbers, printed = quick
    assert name not in numbers["failed"], numbers["failed"][name]
    outcomes = [outcome for label, outcome in numbers["workloads"].items() if label.partition(":")[0] == name]
    assert outcomes
    for arm in (arm for outcome in outcomes for arm in outcome["arms"]):
        assert arm["name"] in printed
        assert arm["rows_per_second"] > 0
        assert arm["seconds"]


@pytest.mark.cluster
def test_a_run_says_where_it_was(quick: tuple[dict[str, Any], str]) -> None:
    numbers, _ = quick
    assert numbers["quick"] is True
    assert {"torch", "daskgrad", "dask", "pandas"} < numbers["versions"].keys()
    assert numbers["machine"]["cores_used"] >= 1


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
