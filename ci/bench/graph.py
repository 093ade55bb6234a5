"""A column over 100,000 partitions: what it takes to build the graph, before the first task runs."""

from __future__ import annotations

from typing import Any

import clusters
from clusters import greeks, greeks_by_hand
from harness import Arm, Mark, Workload

OURS, THEIRS = "daskgrad", "bare map_partitions"


def workload(quick: bool) -> Workload:
    partitions = 200 if quick else 100_000
    frame = clusters.book(partitions, partitions)

    def check(name: str, result: Any) -> None:
        assert len(result) >= partitions, name

    return Workload(
        title="a graph is built, optimised and made of tasks",
        arms=[
            Arm(OURS, partitions, lambda: graph(greeks(frame, "vmap"))),
            Arm(THEIRS, partitions, lambda: graph(greeks_by_hand(frame))),
        ],
        check=check,
        repeats=1 if quick else 5,
        unit="partitions",
        marks=[Mark("building the graph of 100,000 partitions, against bare Dask's", OURS, THEIRS, 1.3, "time")],
    )


def graph(frame: Any) -> Any:
    """All that comes before the first task runs."""
    return dict(frame.optimize().__dask_graph__())
