"""The control flow of `paths_10` with a hundred ways through: each run takes fewer rows along."""

from __future__ import annotations

from harness import Workload
from paths_10 import compare


def workload(quick: bool) -> Workload:
    return compare(100, quick)
