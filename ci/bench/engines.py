"""Parquet → value and five Greeks → their sums, on two processes: daskgrad, and the same vmap by hand on other engines.

Ray Data and Spark are in the requirements of `ci/bench/run`; Spark needs Java. Each is warm: its workers have run once.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import clusters
import dask.dataframe as dd
import numpy as np
import pandas as pd
import peers
from black_scholes import WANTED
from clusters import greeks_of_part, sum_of_part
from greeks import options
from harness import Arm, Workload

RAY, IN_PANDAS, UDF = "Ray Data map_batches(vmap(grad))", "PySpark mapInPandas(vmap(grad))", "PySpark pandas UDF(vmap(grad))"


def workload(quick: bool) -> Workload:
    rows, files = (2_000, 2) if quick else (4_000_000, 8)
    processes = 1 if quick else 2
    stack = ExitStack()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="daskgrad-bench-")))
    for seed in range(files):
        options(rows // files, seed).to_parquet(folder / f"part.{seed}.parquet", index=False)
    expected = clusters.expected_sums(clusters.book(rows, files))
    ours, plain = clusters.ours(stack, processes, quick), clusters.default(stack, processes, quick)
    read = dd.read_parquet(folder)
    arms = [
        Arm("daskgrad on local_client", rows, lambda: clusters.sums(ours, clusters.greeks(read, "auto"))),
        Arm("map_partitions(vmap(grad)) on Dask's default cluster", rows, lambda: clusters.sums(plain, clusters.greeks_by_hand(read))),
    ]
    missing = {}
    if absent := peers.too_long_for(quick) or peers.no_ray():
        missing[RAY] = absent
    else:
        arms.append(Arm(RAY, rows, on_ray(stack, folder, processes)))
    if absent := peers.too_long_for(quick) or peers.no_spark():
        missing |= {IN_PANDAS: absent, UDF: absent}
    else:
        arms += [Arm(name, rows, run) for name, run in on_spark(stack, folder, processes).items()]

    def check(name: str, result: Any) -> None:
        assert set(result) == set(WANTED), name
        for greek, value in result.items():
            np.testing.assert_allclose(value, expected[greek], rtol=1e-8, err_msg=f"{name}: {greek}")

    return Workload(
        title=f"Parquet → value and 5 Greeks → sums, {files} files, {processes} processes",
        arms=arms,
        check=check,
        repeats=1 if quick else 5,
        close=stack.close,
        missing=missing,
    )


def on_ray(stack: ExitStack, folder: Path, processes: int) -> Callable[[], dict[Any, float]]:
    ray = peers.start_ray(processes)
    stack.callback(ray.shutdown)
    data: Any = importlib.import_module("ray.data")

    def run() -> dict[Any, float]:
        found = data.read_parquet(str(folder)).map_batches(sums_of_batch, batch_format="pandas", batch_size=None).to_pandas()
        sums: dict[Any, float] = found.sum().to_dict()
        return sums

    return run


def sums_of_batch(part: pd.DataFrame) -> pd.DataFrame:
    return sum_of_part(greeks_of_part(part))


def on_spark(stack: ExitStack, folder: Path, processes: int) -> dict[str, Callable[[], dict[Any, float]]]:
    spark = peers.start_spark(processes)
    stack.callback(spark.stop)
    functions: Any = importlib.import_module("pyspark.sql.functions")
    schema = ", ".join(f"{name} double" for name in WANTED)
    struct = functions.pandas_udf(udf, schema)

    def totals(frame: Any) -> dict[Any, float]:
        sums: dict[Any, float] = frame.agg(*[functions.sum(name).alias(name) for name in WANTED]).collect()[0].asDict()
        return sums

    def in_pandas() -> dict[Any, float]:
        return totals(spark.read.parquet(str(folder)).mapInPandas(greeks_of_parts, schema))

    def by_udf() -> dict[Any, float]:
        frame = spark.read.parquet(str(folder))
        return totals(frame.select(struct(*frame.columns).alias("greeks")).select("greeks.*"))

    return {IN_PANDAS: in_pandas, UDF: by_udf}


def greeks_of_parts(parts: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    return map(greeks_of_part, parts)


def udf(spot: pd.Series, strike: pd.Series, vol: pd.Series, rate: pd.Series, expiry: pd.Series) -> pd.DataFrame:
    return greeks_of_part(pd.DataFrame({"spot": spot, "strike": strike, "vol": vol, "rate": rate, "expiry": expiry}))
