"""A cluster of two processes beside one of one: partitions lie on the workers, Greeks are made there and summed."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import clusters
import numpy as np
import peers
from harness import Arm, Mark, Workload

EAGER, COMPILED = "engine='vmap'", "engine='compiled'"


def workload(quick: bool) -> Workload:
    rows, partitions = (4_000, 4) if quick else (32_000_000, 16)  # some 100 MB each, as Dask advises: between tasks it needs milliseconds
    frame = clusters.book(rows, partitions)
    expected = clusters.expected_sums(frame)
    absent = peers.no_compiled_engine(quick)
    missing = {f"{COMPILED}, {n} process{'es' if n > 1 else ''}": absent for n in (2, 1)} if absent else {}
    arms, marks = [], []
    with ExitStack() as stack:
        clients = {n: clusters.ours(stack, n, quick) for n in (2, 1)}
        held = {n: clusters.on(client, frame) for n, client in clients.items()}
        for name, engine in ((EAGER, "vmap"), (COMPILED, "compiled")):
            two, one = f"{name}, 2 processes", f"{name}, 1 process"
            profile = partial(clusters.profile_in_worker, clients[2], rows // partitions, engine)
            marks.append(Mark(f"value and 5 Greeks, a Dask cluster of 2 processes against 1, {name}", two, one, 1.9, profile=profile))
            if not (engine == "compiled" and absent):
                arms += [Arm(way, rows, partial(sums, clients[n], held[n], engine)) for way, n in ((two, 2), (one, 1))]
        close = stack.pop_all().close

    def check(name: str, result: Any) -> None:
        for greek, value in result.items():
            np.testing.assert_allclose(value, expected[greek], rtol=1e-8, err_msg=f"{name}: {greek}")

    return Workload(
        title=f"value and 5 Greeks, float64, {partitions} partitions of {rows // partitions:,} rows, held by workers of one thread",
        arms=arms,
        check=check,
        repeats=1 if quick else 5,
        close=close,
        missing=missing,
        marks=marks,
    )


def sums(client: Any, frame: Any, engine: str) -> Any:
    return clusters.sums(client, clusters.greeks(frame, engine))
