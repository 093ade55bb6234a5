"""What several workloads need of the libraries that daskgrad is measured beside."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import daskgrad as dg


def absent(*names: str) -> str | None:
    """Why a peer cannot run here: it is not installed. None where it can."""
    gone = [name for name in names if importlib.util.find_spec(name) is None]
    return f"{', '.join(gone)} not installed" if gone else None


def jax_in_float64() -> tuple[Any, Any]:
    """`jax` and `jax.numpy`, computing in float64."""
    jax: Any = importlib.import_module("jax")
    jax.config.update("jax_enable_x64", True)
    return jax, importlib.import_module("jax.numpy")


def no_compiled_engine(quick: bool) -> str | None:
    """Why `engine="compiled"` cannot run here; None where it can."""
    left_out = too_long_for(quick)
    if left_out:
        return left_out
    with warnings.catch_warnings():
        warnings.simplefilter("error", dg.EngineWarning)
        try:
            dg.grad_column(pd.Series(range(1000), name="x", dtype=float), _square, engine="compiled")
        except dg.EngineWarning as warning:
            return str(warning).splitlines()[0]
    return None


def _square(x: torch.Tensor) -> torch.Tensor:
    return x * x


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Environment variables for the processes that are started inside."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# --- Ray and Spark: workers that find the modules beside this one, on this machine only ------------------------------


def too_long_for(quick: bool) -> str | None:
    """Why Ray and Spark, and compiling, which take half a minute and more, are left out of a quick run."""
    return "left out of --quick; DASKGRAD_TESTS=long brings it in" if quick and os.environ.get("DASKGRAD_TESTS") != "long" else None


def no_ray() -> str | None:
    return absent("ray")


def start_ray(processes: int) -> Any:
    """Ray with `processes` workers of one thread each; `ray.shutdown()` ends it."""
    ray: Any = importlib.import_module("ray")
    with worker_environment():
        ray.init(
            address="local",
            num_cpus=processes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address="127.0.0.1",
            runtime_env={"env_vars": {"PYTHONPATH": _path(), "OMP_NUM_THREADS": "1"}},
        )
    data: Any = importlib.import_module("ray.data")
    data.DataContext.get_current().enable_progress_bars = False
    return ray


def no_spark() -> str | None:
    return absent("pyspark") or (None if shutil.which("java") else "no Java found")


def start_spark(processes: int) -> Any:
    """A local Spark session with `processes` task slots; `stop()` ends it."""
    sql: Any = importlib.import_module("pyspark.sql")
    with worker_environment():
        builder = sql.SparkSession.builder.master(f"local[{processes}]").appName("bench")
        options = {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.driver.memory": "4g",
            "spark.sql.execution.arrow.pyspark.enabled": "true",
            "spark.sql.execution.arrow.maxRecordsPerBatch": "250000",
            "spark.sql.files.maxPartitionBytes": "1g",
            "spark.log.level": "ERROR",
        }
        for name, value in options.items():
            builder = builder.config(name, value)
        return builder.getOrCreate()


def worker_environment() -> contextlib.AbstractContextManager[None]:
    import sys

    return environment(PYTHONPATH=_path(), OMP_NUM_THREADS="1", PYSPARK_PYTHON=sys.executable, PYSPARK_DRIVER_PYTHON=sys.executable)


def _path() -> str:
    return os.pathsep.join([str(Path(__file__).parent), str(Path(dg.__file__).parents[1])])
