"""x·x: a gradient per row, where the arithmetic is next to nothing, so that everything around it shows.

The last five ways do thousands of rows per second. They get fewer rows, and are compared by rows/s.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import joblib
import numpy as np
import pandas as pd
import peers
import torch
from harness import Arm, Mark, Workload
from numpy.typing import NDArray
from torch.func import grad, vmap

import daskgrad as dg

OURS, BARE, LOKY = "daskgrad, pandas in and out", "bare vmap(grad), tensors ready", "joblib loky, graph built in the job"


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def one_gradient(x: float) -> float:
    """The whole of it for one row: the graph is made where it is used."""
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(square(leaf), leaf)
    return gradient.item()


def one_gradient_with_one_thread(x: float) -> float:
    torch.set_num_threads(1)
    return one_gradient(x)


def by_vmap(frame: pd.DataFrame) -> pd.Series:
    """As one writes it by hand around a DataFrame."""
    found = vmap(grad(square))(torch.from_numpy(frame["x"].to_numpy(copy=True)))
    return pd.Series(found.numpy(), index=frame.index, name="x")


def by_jax() -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    jax, _ = peers.jax_in_float64()
    run = jax.jit(jax.vmap(jax.grad(lambda x: x * x)))
    return lambda values: np.asarray(run(values))


def workload(quick: bool) -> Workload:
    rows, few = (1_000, 50) if quick else (1_000_000, 5_000)
    values: NDArray[np.float64] = np.random.default_rng(0).standard_normal(rows)
    frame = pd.DataFrame({"x": values})
    tensor = torch.from_numpy(values.copy())  # (rows,)
    batched = vmap(grad(square))
    some = values[:few].tolist()
    loky, threads = joblib.Parallel(n_jobs=2, backend="loky"), joblib.Parallel(n_jobs=2, backend="threading")
    processes: Any = (
        importlib.import_module("torch.multiprocessing").get_context("spawn").Pool(1 if quick else 2, torch.set_num_threads, (1,))
    )
    few_rows = frame.iloc[:few]
    jobs = 1_000 if not quick else 50
    absent = peers.absent("jax")
    arms = [
        Arm(OURS, rows, partial(dg.grad_column, frame, square)),
        Arm(BARE, rows, lambda: batched(tensor)),
        Arm("vmap(grad) by hand, pandas in and out", rows, partial(by_vmap, frame)),
        *([] if absent else [Arm("jax.jit(vmap(grad)), NumPy in and out", rows, partial(by_jax(), values))]),
        Arm("plain loop", few, lambda: [one_gradient(x) for x in some]),
        Arm("df.apply, row by row", few, lambda: few_rows.apply(lambda row: one_gradient(row["x"]), axis=1)),
        Arm(LOKY, few, lambda: loky(joblib.delayed(one_gradient_with_one_thread)(x) for x in some)),
        Arm("joblib threading", few, lambda: threads(joblib.delayed(one_gradient)(x) for x in some)),
        Arm("torch.multiprocessing pool", few, lambda: processes.map(one_gradient, some, jobs)),
    ]

    def check(name: str, result: Iterable[Any]) -> None:
        got = np.asarray(result)
        np.testing.assert_array_equal(got, 2 * values[: len(got)], err_msg=name)  # 2x has no rounding
        assert len(got) in (rows, few), name

    def close() -> None:
        processes.close()
        processes.join()
        joblib.externals.loky.get_reusable_executor().shutdown(wait=True)  # kept for a next call, and there is none

    return Workload(
        title="gradient of x·x per row, float64",
        arms=arms,
        check=check,
        repeats=1 if quick else 11,
        close=close,
        missing={"jax.jit(vmap(grad)), NumPy in and out": absent} if absent else {},
        marks=[
            Mark("x·x, 1 M rows, pandas in and out, against joblib loky", OURS, LOKY, 1000),
            Mark("x·x, 1 M rows, pandas in and out, against bare vmap(grad) on ready tensors", OURS, BARE, 0.9),
        ],
    )
