"""What many partitions, and long ones, cost: ci/load [--quick] [--rows ROWS] [--workers N].

Loads on worker processes, each with a limit of 2 GB: 10,000 partitions of 1,000 rows, beside Dask alone; one partition of 10
million rows; ROWS rows streaming from Parquet to one sum; a model of 200 MB that every worker needs. For each: seconds, bytes of the
graph, processor time of scheduler and client, and the peak memory of each process above what it had before.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import click
import dask.dataframe as dd
import numpy as np
import pandas as pd
import psutil

import daskgrad as dg

FILE = 1_000_000  # rows


def square(x: Any) -> Any:
    """The row function of all three."""
    return x * x


def table(start: int, rows: int) -> pd.DataFrame:
    """Rows numbered on."""
    return pd.DataFrame({"x": np.arange(float(start), float(start + rows))})


def many(partitions: int, rows: int) -> Any:
    """Partitions that are made where they are computed."""
    return dd.from_map(lambda k: pd.DataFrame({"x": np.arange(k * rows, (k + 1.0) * rows)}), range(partitions), meta=table(0, 0))


def stored(folder: Path, rows: int) -> Any:
    """Parquet files of a million rows."""
    for start in range(0, rows, FILE):
        table(start, min(FILE, rows - start)).to_parquet(folder / f"{start:012}.parquet", index=False)
    return dd.read_parquet(str(folder))


@contextmanager
def watched(processes: dict[str, psutil.Process]) -> Iterator[dict[str, float]]:
    """Peak memory of each process while the block runs, in MB above what it had at the start."""
    begin = {name: process.memory_info().rss for name, process in processes.items()}
    peaks, stop = dict.fromkeys(processes, 0.0), threading.Event()

    def look() -> None:
        while not stop.wait(0.05):
            for name, process in processes.items():
                peaks[name] = max(peaks[name], (process.memory_info().rss - begin[name]) / 1e6)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        stop.set()
        thread.join()


@contextmanager
def sent(client: Any) -> Iterator[list[int]]:
    """The bytes of each graph that `client` gives to its scheduler while the block runs."""
    sizes: list[int] = []
    before = client._send_to_scheduler

    def counted(message: dict[str, Any]) -> None:
        if message.get("op") == "update-graph":
            whole = message["expr_ser"]
            sizes.append(sum(memoryview(frame).nbytes for frame in whole.frames))
        before(message)

    client._send_to_scheduler = counted
    try:
        yield sizes
    finally:
        client._send_to_scheduler = before


def measured(client: Any, name: str, make: Callable[[], Any], rows: int) -> None:
    """Print what the sum of the gradient column of a frame of `rows` rows costs, which must be right."""
    processes = processes_of(client)
    frame = make()
    with watched(processes) as peaks, sent(client) as graphs:
        began, busy = time.perf_counter(), time.process_time()
        total = dg.grad_column(frame, square).sum().compute()
        seconds, busy = time.perf_counter() - began, time.process_time() - busy
    assert np.isclose(total, rows * (rows - 1.0), rtol=1e-9), (total, rows)
    alive(client, processes)
    click.echo(f"{name}: {frame.npartitions:,} partitions, {rows:,} rows")
    click.echo(f"  {seconds:.1f} s, {rows / seconds:,.0f} rows/s")
    click.echo(f"  graph {sum(graphs):,} B, {sum(graphs) / frame.npartitions:,.0f} B a partition")
    click.echo(f"  scheduler and client: {busy:.1f} s of processor time, {1e3 * busy / frame.npartitions:.2f} ms a partition")
    told(peaks)


def bare(client: Any, frame: Any) -> None:
    """Print what Dask alone costs with as many partitions: a function that adds, mapped over them."""
    busy, began = time.process_time(), time.perf_counter()
    frame.map_partitions(lambda part: part["x"] + part["x"], meta=("x", float)).sum().compute()
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    click.echo("Dask alone, the same partitions, x + x")
    click.echo(f"  {seconds:.1f} s; scheduler and client: {busy:.1f} s, {1e3 * busy / frame.npartitions:.2f} ms a partition")


def model_of(megabytes: int) -> Any:
    """A linear layer of that size."""
    import torch

    return torch.nn.Linear(1000, megabytes * 250, bias=False)


def shipped(client: Any, megabytes: int) -> None:
    """Print what it costs to bring a model to the workers: once each, however many partitions there are."""
    import torch

    model, partitions = model_of(megabytes), 20
    data = pd.DataFrame({"x": np.linspace(0, 1, partitions)})

    def loss(model: Any, x: Any) -> Any:
        return (model.weight[0, 0] * x) ** 2

    processes = processes_of(client)
    with watched(processes) as peaks, sent(client) as graphs:
        began = time.perf_counter()
        column = dg.grad_column(dd.from_pandas(data, npartitions=partitions), loss, "x", shared={"model": model})
        lazy = time.perf_counter() - began
        found = column.compute()
        seconds = time.perf_counter() - began
    weight = float(model.weight.detach()[0, 0])
    assert np.allclose(found, 2 * weight**2 * torch.from_numpy(data["x"].to_numpy(copy=True)).float().numpy(), rtol=1e-5)
    alive(client, processes)
    click.echo(f"a model of {megabytes} MB to {len(processes) - 1} workers, {partitions} partitions")
    click.echo(f"  {lazy:.1f} s for the call, {seconds:.1f} s in all; graph {sum(graphs):,} B")
    told(peaks, megabytes)


def processes_of(client: Any) -> dict[str, psutil.Process]:
    found = {f"worker {k}": psutil.Process(pid) for k, pid in enumerate(client.run(os.getpid).values())}
    return {**found, "scheduler and client": psutil.Process()}


def alive(client: Any, processes: dict[str, psutil.Process]) -> None:
    """Raise AssertionError where a worker was lost."""
    assert set(client.run(os.getpid).values()) == {process.pid for process in processes.values()} - {os.getpid()}, "a worker was lost"


def told(peaks: dict[str, float], of: int | None = None) -> None:
    """Print the peaks of memory; as multiples of so many MB, too."""
    for name, peak in peaks.items():
        click.echo(f"  {name}: +{peak:,.0f} MB at most" + ("" if of is None else f", {peak / of:.1f} times the model"))


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Tiny sizes: a check that it runs.")
@click.option("--rows", type=int, default=100_000_000, show_default=True, help="How many rows stream from Parquet.")
@click.option("--workers", type=int, default=2, show_default=True, help="How many worker processes.")
def main(quick: bool, rows: int, workers: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="daskgrad-load-"))
    partitions, each, long, megabytes = (100, 10, 100_000, 16) if quick else (10_000, 1_000, 10_000_000, 200)
    rows = 100_000 if quick else rows
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("dask", "pandas", "torch"))
    click.echo(f"{date.today()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}; {workers} workers of 2 GB")
    try:
        with dg.local_client(n_workers=workers, memory_limit="2 GB", dashboard_port=None) as client:
            dg.grad_column(many(2 * workers, 10), square).compute()  # torch is loaded
            measured(client, "many small", lambda: many(partitions, each), partitions * each)
            bare(client, many(partitions, each))
            measured(client, "one long", lambda: many(1, long), long)
            measured(client, "streaming from Parquet", lambda: stored(folder, rows), rows)
            shipped(client, megabytes)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
