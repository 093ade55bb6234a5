"""The value and five Greeks of Black-Scholes: eager, compiled, by hand, by JAX, and beside a copy of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import peers
import torch
from greeks import NAMES, by_hand_in_jax, closed_forms, options, price
from harness import Arm, Mark, Workload
from torch import Tensor
from torch.func import grad_and_value, vmap

import daskgrad as dg

WANTED: dict[Hashable, str | tuple[()]] = {
    "value": (),
    "delta": "spot",
    "dual": "strike",
    "vega": "vol",
    "rho": "rate",
    "theta": "expiry",
}
COMPILED, JAX, COPY = (
    "daskgrad, compiled",
    "jax.jit(vmap(value_and_grad)), NumPy in and out",
    "copying the same bytes, into memory that is ready",
)
Columns = Mapping[Hashable, Any]


def by_torch_func(book: pd.DataFrame) -> pd.DataFrame:
    """As one writes it with torch.func around a DataFrame."""
    columns = [torch.from_numpy(book[name].to_numpy(copy=True)) for name in NAMES]  # each (rows,)
    gradients, value = vmap(grad_and_value(price, argnums=(0, 1, 2, 3, 4)))(*columns)
    return pd.DataFrame({name: column.numpy() for name, column in zip(WANTED, (value, *gradients), strict=True)}, copy=False)


def by_jax() -> Callable[[pd.DataFrame], Columns]:
    jax, _ = peers.jax_in_float64()
    run = jax.jit(jax.vmap(jax.value_and_grad(by_hand_in_jax(), argnums=(0, 1, 2, 3, 4))))

    def greeks(book: pd.DataFrame) -> Columns:
        value, gradients = run(*(book[name].to_numpy() for name in NAMES))
        return {name: np.asarray(column) for name, column in zip(WANTED, (value, *gradients), strict=True)}

    return greeks


def copied(sources: list[Tensor], targets: list[Tensor] | None) -> list[Tensor]:
    """As many columns written as there are results, each from a column that is read."""
    targets = [torch.empty_like(source) for source in sources] if targets is None else targets
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
    return targets


def workload(quick: bool) -> Workload:
    rows = 2_000 if quick else 2_000_000
    book = options(rows)
    right = closed_forms(book)
    sources = [torch.from_numpy(book[name].to_numpy(copy=True)) for name in (*NAMES, NAMES[0])]  # each (rows,)
    targets = [torch.empty_like(source).zero_() for source in sources]
    no_compiler, no_jax = peers.no_compiled_engine(quick), peers.absent("jax")
    missing = {name: why for name, why in ((COMPILED, no_compiler), (JAX, no_jax)) if why}
    arms = [Arm("daskgrad, eager", rows, partial(dg.derivatives, book, price, WANTED, engine="vmap"))]
    if not no_compiler:
        arms.append(Arm(COMPILED, rows, partial(dg.derivatives, book, price, WANTED, engine="compiled")))
    arms.append(Arm("by hand: vmap(grad_and_value), pandas in and out", rows, partial(by_torch_func, book)))
    if not no_jax:
        arms.append(Arm(JAX, rows, partial(by_jax(), book)))
    arms += [
        Arm(COPY, rows, partial(copied, sources, targets)),
        Arm("copying the same bytes, into fresh memory", rows, partial(copied, sources, None)),
    ]

    def check(name: str, result: Any) -> None:
        if "copying" in name:
            assert all(torch.equal(copy, source) for copy, source in zip(result, sources, strict=True)), name
            return
        for greek in WANTED:
            np.testing.assert_allclose(np.asarray(result[greek]), right[greek], rtol=1e-8, atol=1e-9, err_msg=f"{name}: {greek}")

    return Workload(
        title="value and 5 Greeks, float64; copying: six columns read, six written",
        arms=arms,
        check=check,
        repeats=1 if quick else 9,
        missing=missing,
        marks=[
            Mark("Black-Scholes value and 5 Greeks, 2 M rows, compiled, against JAX jit", COMPILED, JAX, 5),
            Mark("same, against copying the same bytes in memory", COMPILED, COPY, 0.25),
        ],
    )
