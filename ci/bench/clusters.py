"""What workloads on clusters share: Dask clusters side by side, data that is there already, a profile from a worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from typing import Any

import dask.dataframe as dd
import pandas as pd
import torch
from black_scholes import WANTED
from greeks import NAMES, closed_forms, options, price
from torch.func import grad_and_value, vmap

import daskgrad as dg

GREEKS = {name: wish for name, wish in WANTED.items() if name != "value"}


def ours(stack: ExitStack, processes: int, quick: bool) -> Any:
    """A client of daskgrad's own cluster: one thread in each process. `stack` ends it."""
    return _started(stack, lambda: [dg.local_client(n_workers=1 if quick else processes, dashboard_port=None)], "ours", quick)


def default(stack: ExitStack, processes: int, quick: bool) -> Any:
    """A client of Dask's own LocalCluster with its defaults, but for the number of processes and where it listens."""
    from distributed import Client, LocalCluster

    def start() -> list[Any]:
        before = dict(os.environ)
        cluster = LocalCluster(n_workers=1 if quick else processes, threads_per_worker=1, host="127.0.0.1", dashboard_address=None)
        os.environ.clear()  # LocalCluster leaves its workers' settings there, for whatever starts next
        os.environ.update(before)
        return [cluster, Client(cluster)]

    return _started(stack, start, "default", quick)


def _started(stack: ExitStack, start: Callable[[], list[Any]], kind: str, quick: bool) -> Any:
    """What `start` gives, ended by `stack`; or, where nothing is measured, one of each kind for all workloads, ended with the program."""
    if not quick:
        return [stack.enter_context(part) for part in start()][-1]
    if kind not in _KEPT:
        _KEPT[kind] = start()
    return _KEPT[kind][-1]


_KEPT: dict[str, list[Any]] = {}


def book(rows: int, partitions: int) -> Any:
    """Options in a Dask DataFrame whose partitions are made where they are needed."""
    return dd.from_map(part_of_book, range(partitions), rows=rows // partitions, meta=options(1))


def part_of_book(seed: int, rows: int) -> pd.DataFrame:
    return options(rows, seed)


def on(client: Any, frame: Any) -> Any:
    """`frame` in the memory of `client`'s workers, spread evenly."""
    from distributed import wait

    workers = list(client.scheduler_info()["workers"])
    parts = frame.optimize(fuse=False).to_delayed(optimize_graph=False)
    held = [client.compute(part, workers=workers[k % len(workers)]) for k, part in enumerate(parts)]
    wait(held)
    return dd.from_delayed(held, meta=frame._meta, verify_meta=False)


def expected_sums(frame: Any) -> dict[Hashable, float]:
    """The sums of the closed forms."""
    columns: dict[Hashable, float] = dict.fromkeys(WANTED, 0.0)
    for part in frame.to_delayed():
        right = closed_forms(part.compute(scheduler="synchronous"))
        for name in columns:
            columns[name] += float(right[name].sum())
    return columns


def greeks(frame: Any, engine: str) -> Any:
    return dg.derivatives(frame, price, WANTED, engine=engine)


def greeks_by_hand(frame: Any) -> Any:
    """As one writes it without daskgrad."""
    return frame.map_partitions(greeks_of_part, meta=dict.fromkeys(WANTED, "f8"))


def greeks_of_part(part: pd.DataFrame) -> pd.DataFrame:
    columns = [torch.from_numpy(part[name].to_numpy(copy=True)) for name in NAMES]  # each (rows,)
    gradients, value = vmap(grad_and_value(price, argnums=(0, 1, 2, 3, 4)))(*columns)
    named = dict(zip(WANTED, (value, *gradients), strict=True))
    return pd.DataFrame({name: column.numpy() for name, column in named.items()}, index=part.index, copy=False)


def sums(client: Any, frame: Any) -> Mapping[Hashable, float]:
    """The sum of each column: the columns are made where the data is, and next to nothing travels."""
    parts = frame.map_partitions(sum_of_part, meta=dict.fromkeys(WANTED, "f8")).compute(scheduler=client)
    found: Mapping[Hashable, float] = parts.sum().to_dict()
    return found


def sum_of_part(part: pd.DataFrame) -> pd.DataFrame:
    return part.sum().to_frame().T


def profile_in_worker(client: Any, rows: int, engine: str) -> str:
    """Where the time goes in a worker, for one partition."""
    found: str = client.submit(_profile, rows, engine, pure=False).result()
    return found


def _profile(rows: int, engine: str) -> str:
    from harness import profile_of

    part = options(rows)
    dg.derivatives(part, price, WANTED, engine=engine)
    return profile_of(lambda: dg.derivatives(part, price, WANTED, engine=engine))
