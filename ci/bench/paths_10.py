"""Control flow that each row decides for itself: a `while` and an `if`, ten ways through."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from harness import Arm, Workload
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad, vmap

import daskgrad as dg


def walk(x: Tensor) -> Tensor:
    """As many steps as `x` is long, and two ways to end."""
    total, left = torch.sin(x), x
    while left > 1:
        total = total + torch.sin(left)
        left = left - 1
    if left > 0.5:
        return total * left
    return total - left


def masked_walk(steps: int) -> Callable[[Tensor], Tensor]:
    """`walk` as one writes it for vmap: every row takes `steps` steps and both ends, and masks choose."""

    def masked(x: Tensor) -> Tensor:
        total, left = torch.sin(x), x
        for _ in range(steps):
            on = left > 1
            total = torch.where(on, total + torch.sin(left), total)
            left = torch.where(on, left - 1, left)
        return torch.where(left > 0.5, total * left, total - left)

    return masked


def one_gradient(x: float) -> float:
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(walk(leaf), leaf)
    return gradient.item()


def expected(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The derivative of `walk`, by hand: sums of sines over the steps, (rows,)."""
    steps = np.arange(int(x.max()) + 1)[:, None]  # (steps, 1)
    taken = x - steps > 1  # (steps, rows)
    total = np.sin(x) + np.where(taken, np.sin(x - steps), 0).sum(axis=0)
    slope = np.cos(x) + np.where(taken, np.cos(x - steps), 0).sum(axis=0)
    left = x - taken.sum(axis=0)
    result: NDArray[np.float64] = np.where(left > 0.5, slope * left + total, slope - 1)
    return result


def compare(paths: int, quick: bool) -> Workload:
    rows, few = (100, 10) if quick else (200_000, 4_000)
    lengths = paths // 2  # each of them ends in two ways
    values: NDArray[np.float64] = np.random.default_rng(0).uniform(0, lengths, rows)
    frame = pd.DataFrame({"x": values})
    tensor = torch.from_numpy(values.copy())  # (rows,)
    batched = vmap(grad(masked_walk(lengths - 1)))
    right = expected(values)

    def check(name: str, result: object) -> None:
        got = np.asarray(result)
        assert len(got) in (rows, few), name
        np.testing.assert_allclose(got, right[: len(got)], rtol=1e-9, atol=1e-9, err_msg=name)

    return Workload(
        title=f"while and if, {paths} paths, float64",
        arms=[
            Arm("daskgrad, as written", rows, lambda: dg.grad_column(frame, walk)),
            Arm("by hand: torch.where, vmap(grad)", rows, lambda: batched(tensor)),
            Arm("daskgrad, engine='loop'", few, lambda: dg.grad_column(frame.iloc[:few], walk, engine="loop")),
            Arm("serial loop", few, lambda: [one_gradient(x) for x in values[:few].tolist()]),
        ],
        check=check,
        repeats=1 if quick else 5,
    )


def workload(quick: bool) -> Workload:
    return compare(10, quick)
