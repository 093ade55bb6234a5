"""Eager torch in worker processes: how their memory allocator is set decides what it costs. One process each, one thread."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import clusters
import numpy as np
from harness import Arm, Mark, Workload

OURS, THEIRS = "daskgrad on local_client", "map_partitions(vmap(grad)) on Dask's default cluster"


def workload(quick: bool) -> Workload:
    rows, partitions = (4_000, 4) if quick else (4_000_000, 4)
    processes = 2
    frame = clusters.book(rows, partitions)
    expected = clusters.expected_sums(frame)
    with ExitStack() as stack:
        tuned, plain = clusters.ours(stack, processes, quick), clusters.default(stack, processes, quick)
        on_tuned, on_plain = clusters.on(tuned, frame), clusters.on(plain, frame)
        close = stack.pop_all().close
    arms = [
        Arm(OURS, rows, lambda: clusters.sums(tuned, clusters.greeks(on_tuned, "vmap"))),
        Arm(THEIRS, rows, lambda: clusters.sums(plain, clusters.greeks_by_hand(on_plain))),
        Arm("daskgrad on Dask's default cluster", rows, lambda: clusters.sums(plain, clusters.greeks(on_plain, "vmap"))),
        Arm("map_partitions(vmap(grad)) on local_client", rows, lambda: clusters.sums(tuned, clusters.greeks_by_hand(on_tuned))),
    ]

    def check(name: str, result: Any) -> None:
        for greek, value in result.items():
            np.testing.assert_allclose(value, expected[greek], rtol=1e-8, err_msg=f"{name}: {greek}")

    profile = partial(clusters.profile_in_worker, tuned, rows // partitions, "vmap")
    return Workload(
        title=f"value and 5 Greeks, eager, {processes} processes with one thread each, {rows // partitions:,} rows a partition",
        arms=arms,
        check=check,
        repeats=1 if quick else 9,
        close=close,
        marks=[Mark("eager on a cluster from local_client, against map_partitions on Dask's default", OURS, THEIRS, 1.8, profile=profile)],
    )
