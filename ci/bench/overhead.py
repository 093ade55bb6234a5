"""What a small partition costs beyond its arithmetic."""

from __future__ import annotations

from typing import Any

import dask.dataframe as dd
import numpy as np
from clusters import greeks, greeks_by_hand
from greeks import options
from harness import Arm, Mark, Workload

OURS, THEIRS = "daskgrad", "map_partitions(vmap(grad))"


def workload(quick: bool) -> Workload:
    partitions = 8 if quick else 400
    frame = dd.from_pandas(options(100 * partitions), npartitions=partitions)
    right = greeks_by_hand(frame).compute(scheduler="synchronous")

    def check(name: str, result: Any) -> None:
        np.testing.assert_allclose(result, right, rtol=1e-9, atol=1e-12, err_msg=name)

    return Workload(
        title="value and 5 Greeks, 100 rows a partition, one after the other",
        arms=[
            Arm(OURS, partitions, lambda: greeks(frame, "vmap").compute(scheduler="synchronous")),
            Arm(THEIRS, partitions, lambda: greeks_by_hand(frame).compute(scheduler="synchronous")),
        ],
        check=check,
        repeats=1 if quick else 11,
        unit="partitions",
        marks=[Mark("a small partition, above a hand-written map_partitions of the same vmap(grad)", OURS, THEIRS, 1, "extra")],
    )
