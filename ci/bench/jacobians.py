"""Jacobians of a small network, tall and wide: the columns of daskgrad beside torch.func's two modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from harness import Arm, Workload
from torch import Tensor
from torch.func import jacfwd, jacrev, vmap

import daskgrad as dg

HIDDEN = 64


def network(out: int, inp: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """tanh(B · tanh(A · x)) and, by hand, its Jacobian for (rows, inp) → (rows, out, inp)."""
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(HIDDEN, inp, dtype=torch.float64, generator=generator) / inp**0.5
    B = torch.randn(out, HIDDEN, dtype=torch.float64, generator=generator) / HIDDEN**0.5

    def fn(x: Tensor) -> Tensor:
        return torch.tanh(B @ torch.tanh(A @ x))

    def jacobian(x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ A.T)  # (rows, HIDDEN)
        outer = 1 - torch.tanh(hidden @ B.T) ** 2  # (rows, out)
        whole: Tensor = outer[:, :, None] * ((B * (1 - hidden**2)[:, None, :]) @ A)
        return whole

    return fn, jacobian


def workload(quick: bool) -> Workload:
    shapes = [(64, 4), (4, 64)] if quick else [(2048, 32), (32, 2048)]
    arms, right = [], {}
    for out, inp in shapes:
        for rows in (8,) if quick else (8, 32):
            fn, jacobian = network(out, inp)
            x = torch.randn(rows, inp, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            frame = pd.DataFrame({"x": pd.Series(list(x.numpy()), dtype=object)})
            where = f"{out} × {inp}, {rows} rows"
            right[where] = jacobian(x).numpy()
            ways: dict[str, Callable[..., Any]] = {
                "daskgrad": lambda fn=fn, frame=frame: dg.derivatives(frame, fn, {"jacobian": "x"})["jacobian"],
                "by hand: vmap(jacfwd)": lambda fn=fn, x=x: vmap(jacfwd(fn))(x).numpy(),
                "by hand: vmap(jacrev)": lambda fn=fn, x=x: vmap(jacrev(fn))(x).numpy(),
            }
            arms += [Arm(f"{way}: {where}", rows, run) for way, run in ways.items()]

    def check(name: str, result: Any) -> None:
        np.testing.assert_allclose(np.stack(list(result)), right[name.rsplit(": ", 1)[1]], rtol=1e-10, atol=1e-12, err_msg=name)

    return Workload("Jacobians of tanh(B · tanh(A · x)), outputs × inputs, float64", arms, check, repeats=1 if quick else 5)
