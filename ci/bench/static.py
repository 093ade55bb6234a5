"""A text column that decides the formula: deltas of calls and puts by one function with a plain `if`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from harness import Arm, Workload
from torch import Tensor
from torch.func import grad, vmap

import daskgrad as dg

NUMBERS = ["spot", "strike", "vol", "rate", "expiry"]


def moneyness(spot: Tensor, strike: Tensor, vol: Tensor, rate: Tensor, expiry: Tensor) -> Tensor:
    return (torch.log(spot / strike) + (rate + vol * vol / 2) * expiry) / (vol * torch.sqrt(expiry))


def call(spot: Tensor, strike: Tensor, vol: Tensor, rate: Tensor, expiry: Tensor) -> Tensor:
    d1 = moneyness(spot, strike, vol, rate, expiry)
    d2 = d1 - vol * torch.sqrt(expiry)
    value: Tensor = spot * torch.special.ndtr(d1) - strike * torch.exp(-rate * expiry) * torch.special.ndtr(d2)
    return value


def put(spot: Tensor, strike: Tensor, vol: Tensor, rate: Tensor, expiry: Tensor) -> Tensor:
    d1 = moneyness(spot, strike, vol, rate, expiry)
    d2 = d1 - vol * torch.sqrt(expiry)
    value: Tensor = strike * torch.exp(-rate * expiry) * torch.special.ndtr(-d2) - spot * torch.special.ndtr(-d1)
    return value


def price(spot: Tensor, strike: Tensor, vol: Tensor, rate: Tensor, expiry: Tensor, kind: str) -> Tensor:
    if kind == "call":
        return call(spot, strike, vol, rate, expiry)
    return put(spot, strike, vol, rate, expiry)


def price_of_both(spot: Tensor, strike: Tensor, vol: Tensor, rate: Tensor, expiry: Tensor, is_call: Tensor) -> Tensor:
    return torch.where(is_call, call(spot, strike, vol, rate, expiry), put(spot, strike, vol, rate, expiry))


def tensors(book: pd.DataFrame) -> list[Tensor]:
    return [torch.from_numpy(book[name].to_numpy(copy=True)) for name in NUMBERS]  # each (rows,)


def split_and_vmapped(book: pd.DataFrame) -> pd.Series:
    calls = book["kind"] == "call"
    parts = []
    function: Any
    for function, rows in ((call, book[calls]), (put, book[~calls])):
        parts.append(pd.Series(vmap(grad(function))(*tensors(rows)).numpy(), index=rows.index))
    return pd.concat(parts).reindex(book.index)


def split_and_called_twice(book: pd.DataFrame) -> pd.Series:
    calls = book["kind"] == "call"
    both: pd.Series = pd.concat([dg.grad_column(book[calls], call), dg.grad_column(book[~calls], put)])
    return both.reindex(book.index)


def both_and_where(book: pd.DataFrame) -> pd.Series:
    is_call = torch.from_numpy((book["kind"] == "call").to_numpy(copy=True))  # (rows,)
    deltas: Any = vmap(grad(price_of_both))
    return pd.Series(deltas(*tensors(book), is_call).numpy(), index=book.index)


def options(rows: int) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "spot": rng.uniform(50, 150, rows),
            "strike": rng.uniform(50, 150, rows),
            "vol": rng.uniform(0.1, 0.5, rows),
            "rate": rng.uniform(0, 0.05, rows),
            "expiry": rng.uniform(0.1, 2, rows),
            "kind": rng.choice(["call", "put"], rows),
        }
    )


def workload(quick: bool) -> Workload:
    rows = 1_000 if quick else 1_000_000
    book = options(rows)
    delta = torch.special.ndtr(moneyness(*tensors(book))).numpy() - (book["kind"] == "put").to_numpy()  # (rows,)

    def check(name: str, result: pd.Series) -> None:
        np.testing.assert_allclose(result, delta, rtol=1e-9, atol=1e-12, err_msg=name)

    return Workload(
        title="delta of calls and puts, told apart by a text column, float64",
        arms=[
            Arm("daskgrad, a plain if", rows, lambda: dg.grad_column(book, price)),
            Arm("by hand: split, two vmap(grad)", rows, lambda: split_and_vmapped(book)),
            Arm("by hand: split, two grad_column", rows, lambda: split_and_called_twice(book)),
            Arm("by hand: torch.where, vmap(grad)", rows, lambda: both_and_where(book)),
        ],
        check=check,
        repeats=1 if quick else 7,
    )
