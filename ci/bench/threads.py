"""Two cores used in three ways, each beside one core: torch's own threads, Dask's threads, worker processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import clusters
import dask.dataframe as dd
import numpy as np
import pandas as pd
import peers
import torch
from black_scholes import WANTED
from clusters import greeks
from harness import Arm, Workload

ENGINES = {"eager": "vmap", "compiled": "compiled"}


def workload(quick: bool) -> Workload:
    rows, partitions = (4_000, 4) if quick else (4_000_000, 16)
    parted = clusters.book(rows, partitions)
    expected = clusters.expected_sums(parted)
    book = parted.compute(scheduler="synchronous")
    absent = peers.no_compiled_engine(quick)
    with ExitStack() as stack:
        clients = {n: clusters.ours(stack, n, quick) for n in (1, 2)}
        held = {n: clusters.on(client, parted) for n, client in clients.items()}
        close = stack.pop_all().close
    ways: dict[str, Callable[[int, str], Any]] = {
        "pandas, torch threads": partial(in_pandas, book),
        "Dask's threads scheduler": partial(on_threads, dd.from_pandas(book, npartitions=partitions)),
        "worker processes": lambda n, engine: clusters.sums(clients[n], greeks(held[n], engine)),
    }
    arms, missing = [], {}
    for kind, engine in ENGINES.items():
        for way, run in ways.items():
            two, one = (f"{way}: {n}, {kind}" for n in (2, 1))
            if engine == "compiled" and absent:
                missing[two] = absent
                continue
            arms += [Arm(two, rows, partial(run, 2, engine)), Arm(one, rows, partial(run, 1, engine))]

    def check(name: str, result: Any) -> None:
        for greek in WANTED:
            np.testing.assert_allclose(result[greek], expected[greek], rtol=1e-8, err_msg=f"{name}: {greek}")

    return Workload(
        title="value and 5 Greeks, one core and two",
        arms=arms,
        check=check,
        repeats=1 if quick else 7,
        close=close,
        missing=missing,
    )


def in_pandas(book: pd.DataFrame, threads: int, engine: str) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return greeks(book, engine).sum().to_dict()
    finally:
        torch.set_num_threads(before)


def on_threads(frame: Any, threads: int, engine: str) -> Any:
    parts = greeks(frame, engine).map_partitions(clusters.sum_of_part, meta=dict.fromkeys(WANTED, "f8"))
    return parts.compute(scheduler="threads", num_workers=threads).sum().to_dict()
