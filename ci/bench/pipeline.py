"""Parquet → five Greeks → Parquet on worker processes, beside the same pipeline with plain arithmetic in their place.

`--rows 100_000_000` is the full size; memory stays bounded, as a row group is a partition. The largest memory of a worker
stands below the table. Files are made beside the system's other temporary ones and go at the end.
"""

from __future__ import annotations

import resource
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import clusters
import dask.dataframe as dd
import numpy as np
import pandas as pd
import peers
from clusters import GREEKS
from greeks import closed_forms, options, price
from harness import Arm, Mark, Workload

import daskgrad as dg

OURS, PLAIN, ONE = "daskgrad: 5 Greeks", "5 columns of plain arithmetic", "1 column of plain arithmetic"
FILE_ROWS = 1_000_000


def workload(quick: bool, rows: int = 4_000_000) -> Workload:
    rows = 2_000 if quick else rows
    stack = ExitStack()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="daskgrad-bench-")))
    source = folder / "in"
    source.mkdir()
    sizes = [min(FILE_ROWS, rows - start) for start in range(0, rows, FILE_ROWS)]
    for seed, size in enumerate(sizes):
        options(size, seed).to_parquet(source / f"part.{seed:05d}.parquet", index=False)
    client = clusters.ours(stack, 2, quick)
    engine = "vmap" if peers.no_compiled_engine(quick) else "compiled"
    frame = dd.read_parquet(source)

    def written(result: Any, name: str) -> Path:
        target = folder / name
        shutil.rmtree(target, ignore_errors=True)
        result.to_parquet(target)
        return target

    def check(name: str, target: Path) -> None:
        assert sum(len(pd.read_parquet(file)) for file in target.glob("*.parquet")) == rows, name
        if name == OURS:
            right = closed_forms(options(sizes[0]))
            first = pd.read_parquet(min(target.glob("*.parquet"))).iloc[: sizes[0]]
            for greek in GREEKS:
                np.testing.assert_allclose(first[greek], right[greek][: len(first)], rtol=1e-8, atol=1e-9, err_msg=greek)

    def memory() -> list[str]:
        peaks = client.run(peak_memory)
        return [f"largest memory of a worker: {max(peaks.values()) / 2**20:,.0f} MiB"]

    return Workload(
        title=f"Parquet to Parquet, {len(sizes)} files, engine={engine!r}",
        arms=[
            Arm(OURS, rows, lambda: written(dg.derivatives(frame, price, GREEKS, engine=engine), "greeks")),
            Arm(PLAIN, rows, lambda: written(frame.assign(**plain(frame))[list(GREEKS)], "plain")),
            Arm(ONE, rows, lambda: written(frame.assign(total=frame["spot"] * frame["vol"])[["total"]], "one")),
        ],
        check=check,
        repeats=1 if quick else 3 if rows > 10_000_000 else 7,
        close=stack.close,
        marks=[Mark("Parquet → 5 Greeks → Parquet, against the same with plain arithmetic columns", OURS, PLAIN, 0.75)],
        notes=memory,
    )


def plain(frame: Any) -> dict[Any, Any]:
    """As many columns as there are Greeks, each of one multiplication."""
    names = ("spot", "strike", "vol", "rate", "expiry")
    return {greek: frame[name] * frame["spot"] for greek, name in zip(GREEKS, names, strict=True)}


def peak_memory() -> int:
    """Bytes that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
