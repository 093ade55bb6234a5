"""ci/load, on sizes so small that it only shows that it runs and that its sums are right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

LOAD = Path(__file__).parents[1] / "ci" / "load.py"


@pytest.mark.slow
def test_each_load_runs_and_tells_its_costs() -> None:
    done = subprocess.run([sys.executable, str(LOAD), "--quick"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    for load in (
        "many small: 100 partitions, 1,000 rows",
        "one long: 1 partitions",
        "streaming from Parquet",
        "a model of 16 MB to 2 workers",
    ):
        assert load in done.stdout
    assert len(re.findall(r"scheduler and client: .* ms a partition", done.stdout)) == 4
    of_the_model = int(re.findall(r"graph ([\d,]+) B\n", done.stdout)[-1].replace(",", ""))
    assert of_the_model < 100_000  # the model itself is not in it
