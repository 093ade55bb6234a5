"""x·x: a gradient per row, where the arithmetic is next to nothing, so that everything around it shows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import joblib
import numpy as np
import pandas as pd
import torch
from harness import Arm, Workload
from numpy.typing import NDArray
from torch.func import grad, vmap

import daskgrad as dg


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


def workload(quick: bool) -> Workload:
    rows, few = (1_000, 50) if quick else (1_000_000, 5_000)
    values: NDArray[np.float64] = np.random.default_rng(0).standard_normal(rows)
    frame = pd.DataFrame({"x": values})
    tensor = torch.from_numpy(values.copy())  # (rows,)
    batched = vmap(grad(square))
    some = values[:few].tolist()
    loky = joblib.Parallel(n_jobs=2, backend="loky")
    threads = joblib.Parallel(n_jobs=2, backend="threading")

    def check(name: str, result: Iterable[Any]) -> None:
        got = np.asarray(result)
        np.testing.assert_array_equal(got, 2 * values[: len(got)], err_msg=name)  # 2x has no rounding
        assert len(got) in (rows, few), name

    return Workload(
        title="gradient of x·x per row, float64",
        arms=[
            Arm("daskgrad, pandas in and out", rows, lambda: dg.grad_column(frame, square)),
            Arm("bare vmap(grad), tensors ready", rows, lambda: batched(tensor)),
            Arm("serial loop", few, lambda: [one_gradient(x) for x in some]),
            Arm("joblib loky", few, lambda: loky(joblib.delayed(one_gradient_with_one_thread)(x) for x in some)),
            Arm("joblib threading", few, lambda: threads(joblib.delayed(one_gradient)(x) for x in some)),
        ],
        check=check,
        repeats=2 if quick else 9,
        close=shut_down_loky,
    )


def shut_down_loky() -> None:
    """joblib keeps its worker processes for the next call; there is none."""
    joblib.externals.loky.get_reusable_executor().shutdown(wait=True)
