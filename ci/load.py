"""What many partitions, and long ones, cost: ci/load [--quick] [--rows ROWS].

Three loads on two worker processes, each with a limit of 2 GB: 10,000 partitions of 1,000 rows; ROWS rows streaming from Parquet to
one sum; one partition of 10 million rows. For each: seconds, bytes of the graph for a partition, and the peak memory of scheduler
and workers above what they had before.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import dask.dataframe as dd
import numpy as np
import pandas as pd
import psutil
from distributed.protocol.pickle import dumps

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


def measured(client: Any, make: Callable[[], Any], rows: int) -> str:
    """A line about the sum of the gradient column of a frame of `rows` rows, which must be right."""
    pids = client.run(lambda: __import__("os").getpid())
    processes = {f"worker {k}": psutil.Process(pid) for k, pid in enumerate(pids.values())}
    processes["scheduler and client"] = psutil.Process()
    frame = make()
    with watched(processes) as peaks:
        began = time.perf_counter()
        column = dg.grad_column(frame, square)
        size = len(dumps(dict(column.optimize().__dask_graph__()))) / frame.npartitions
        total = column.sum().compute()
        seconds = time.perf_counter() - began
    assert np.isclose(total, rows * (rows - 1.0), rtol=1e-9), (total, rows)
    assert client.run(lambda: __import__("os").getpid()) == pids, "a worker was lost"
    memory = ", ".join(f"{name} +{peak:,.0f} MB" for name, peak in peaks.items())
    speed = f"{seconds:.1f} s, {rows / seconds:,.0f} rows/s"
    return f"{frame.npartitions:,} partitions, {rows:,} rows: {speed}, {size:,.0f} B of graph a partition; {memory}"


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Tiny sizes: a check that it runs.")
@click.option("--rows", type=int, default=100_000_000, show_default=True, help="How many rows stream from Parquet.")
def main(quick: bool, rows: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="daskgrad-load-"))
    partitions, each, long = (100, 10, 100_000) if quick else (10_000, 1_000, 10_000_000)
    rows = 100_000 if quick else rows
    try:
        with dg.local_client(n_workers=2, memory_limit="2 GB", dashboard_port=None) as client:
            dg.grad_column(many(2, 10), square).compute()  # torch is loaded
            click.echo("many small:  " + measured(client, lambda: many(partitions, each), partitions * each))
            click.echo("one long:    " + measured(client, lambda: many(1, long), long))
            click.echo("streaming:   " + measured(client, lambda: stored(folder, rows), rows))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
