"""The value, five first and three second order Greeks of Black-Scholes: in one pass, in nine, and by hand."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import peers
import torch
from harness import Arm, Workload
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

import daskgrad as dg

NAMES = ("spot", "strike", "vol", "rate", "expiry")
GREEKS: dict[Hashable, tuple[str, ...]] = {
    "value": (),
    "delta": ("spot",),
    "dual": ("strike",),
    "vega": ("vol",),
    "rho": ("rate",),
    "theta": ("expiry",),
    "gamma": ("spot", "spot"),
    "vanna": ("spot", "vol"),
    "volga": ("vol", "vol"),
}
JAX = "by hand: jax.jit(vmap(grads))"
Columns = Mapping[Hashable, Any]


def price(spot: Tensor, strike: Tensor, vol: Tensor, rate: Tensor, expiry: Tensor) -> Tensor:
    root = vol * torch.sqrt(expiry)
    d1 = (torch.log(spot / strike) + (rate + vol**2 / 2) * expiry) / root
    value: Tensor = spot * torch.special.ndtr(d1) - strike * torch.exp(-rate * expiry) * torch.special.ndtr(d1 - root)
    return value


def options(rows: int, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    bounds = {"spot": (50, 150), "strike": (50, 150), "vol": (0.1, 0.5), "rate": (0, 0.05), "expiry": (0.1, 2)}
    return pd.DataFrame({name: rng.uniform(*bounds[name], rows) for name in NAMES})


def closed_forms(book: pd.DataFrame) -> dict[Hashable, NDArray[np.float64]]:
    """By Haug, The Complete Guide to Option Pricing Formulas, 2nd ed., chapter 2; each (rows,)."""
    S, K, vol, r, T = (book[name].to_numpy() for name in NAMES)
    root = vol * np.sqrt(T)
    d1 = (np.log(S / K) + (r + vol**2 / 2) * T) / root
    d2, n = d1 - root, np.exp(-(d1**2) / 2) / np.sqrt(2 * np.pi)
    N1, N2 = (torch.special.ndtr(torch.from_numpy(d)).numpy() for d in (d1, d2))
    paid, vega = K * np.exp(-r * T), S * n * np.sqrt(T)
    return {
        "value": S * N1 - paid * N2,
        "delta": N1,
        "dual": -paid / K * N2,
        "vega": vega,
        "rho": T * paid * N2,
        "theta": S * n * vol / (2 * np.sqrt(T)) + r * paid * N2,
        "gamma": n / (S * root),
        "vanna": -n * d2 / vol,
        "volga": vega * d1 * d2 / vol,
    }


def separate_passes(book: pd.DataFrame) -> Columns:
    return {name: dg.derivatives(book, price, {name: order})[name] for name, order in GREEKS.items()}


def by_torch_func(book: pd.DataFrame) -> Columns:
    """As one writes it with torch.func: value and gradient, and the gradients of two of its elements."""
    columns = [torch.from_numpy(book[name].to_numpy(copy=True)) for name in NAMES]  # each (rows,)
    first, value = vmap(grad_and_value(price, argnums=(0, 1, 2, 3, 4)))(*columns)
    gamma, vanna = vmap(grad(lambda *a: grad(price, argnums=0)(*a), argnums=(0, 2)))(*columns)
    volga = vmap(grad(lambda *a: grad(price, argnums=2)(*a), argnums=2))(*columns)
    return {name: column.numpy() for name, column in zip(GREEKS, (value, *first, gamma, vanna, volga), strict=True)}


def by_hand_in_jax() -> Callable[..., Any]:
    """`price`, as JAX can trace it."""
    jax, jnp = peers.jax_in_float64()
    cdf = jax.scipy.special.ndtr

    def jax_price(spot: Any, strike: Any, vol: Any, rate: Any, expiry: Any) -> Any:
        root = vol * jnp.sqrt(expiry)
        d1 = (jnp.log(spot / strike) + (rate + vol**2 / 2) * expiry) / root
        return spot * cdf(d1) - strike * jnp.exp(-rate * expiry) * cdf(d1 - root)

    return jax_price


def by_jax() -> Callable[[pd.DataFrame], Columns]:
    """The same with jax.jit and jax.vmap."""
    jax, _ = peers.jax_in_float64()
    jax_price = by_hand_in_jax()
    first = jax.value_and_grad(jax_price, argnums=(0, 1, 2, 3, 4))
    by_spot = jax.grad(jax.grad(jax_price, argnums=0), argnums=(0, 2))
    by_vol = jax.grad(jax.grad(jax_price, argnums=2), argnums=2)
    run = jax.jit(jax.vmap(lambda *a: (first(*a), by_spot(*a), by_vol(*a))))

    def greeks(book: pd.DataFrame) -> Columns:
        (value, gradients), (gamma, vanna), volga = run(*(book[name].to_numpy() for name in NAMES))
        return {name: np.asarray(column) for name, column in zip(GREEKS, (value, *gradients, gamma, vanna, volga), strict=True)}

    return greeks


def workload(quick: bool) -> Workload:
    sizes = (100, 1_000) if quick else (1_000_000, 100_000, 10_000, 1_000)
    books = {rows: options(rows) for rows in sizes}
    right = {rows: closed_forms(book) for rows, book in books.items()}
    ways: dict[str, Callable[[pd.DataFrame], Columns]] = {
        "daskgrad, one pass": lambda book: dg.derivatives(book, price, GREEKS),
        "daskgrad, nine passes": separate_passes,
        "by hand: torch.func, vmap of nested grads": by_torch_func,
    }
    absent = peers.absent("jax")
    if not absent:
        ways[JAX] = by_jax()

    def check(name: str, result: Columns) -> None:
        rows = int(name.rsplit(" × ", 1)[1].replace(",", ""))
        for greek in GREEKS:
            np.testing.assert_allclose(np.asarray(result[greek]), right[rows][greek], rtol=1e-8, atol=1e-9, err_msg=f"{name}: {greek}")

    def arm(way: str, rows: int) -> Arm:
        return Arm(f"{way} × {rows:,}", rows, lambda: ways[way](books[rows]))

    return Workload(
        "value, 5 first and 3 second order Greeks, float64",
        [arm(way, rows) for rows in sizes for way in ways],
        check,
        repeats=1 if quick else 5,
        missing={JAX: absent} if absent else {},
    )
