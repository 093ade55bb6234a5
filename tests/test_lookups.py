"""What a tensor would answer by identity, and never by value, is refused before it is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask.dataframe as dd
import pandas as pd
import pytest
import torch

import daskgrad as dg

Tensor = torch.Tensor
FRAME = pd.DataFrame({"x": [1.0, 2.0, 3.0], "n": [1, 2, 3], "f": [True, False, True], "kind": ["a", "b", "a"]})
RATES = {1: 10.0, 2: 20.0}
CHOSEN = {1, 2}


def in_a_literal(x: Tensor, n: Any) -> Tensor:
    return x * 2 if n in {1, 2} else x


def in_a_global(x: Tensor, n: Any) -> Tensor:
    return x if n not in CHOSEN else x * 2


def in_a_closure() -> Callable[..., Tensor]:
    chosen = frozenset(CHOSEN)

    def fn(x: Tensor, n: Any) -> Tensor:
        return x * 2 if n in chosen else x

    return fn


def by_get(x: Tensor, n: Any) -> Tensor:
    return x * RATES.get(n, 0.0)


def by_get_of_a_literal(x: Tensor, n: Any) -> Tensor:
    return x * {1: 10.0}.get(n, 0.0)


def by_get_of_what_is_shared(x: Tensor, n: Any, rates: Any) -> Tensor:
    return x * rates.get(n, 0.0)


def by_is(x: Tensor, f: Any) -> Tensor:
    return x * 2 if f is True else x


def by_is_not(x: Tensor, f: Any) -> Tensor:
    return x if f is not False else x * 2


def of_a_row(row: Any) -> Tensor:
    result: Tensor = row.x * 2 if row.n in CHOSEN else row.x
    return result


def of_a_rows_label(row: Any) -> Tensor:
    result: Tensor = row["x"] * RATES.get(row["n"], 0.0)
    return result


REFUSED = [
    in_a_literal, in_a_global, in_a_closure(), by_get, by_get_of_a_literal, by_get_of_what_is_shared, by_is, by_is_not, of_a_row,
    of_a_rows_label,
]  # fmt: skip


@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("lazy", [False, True])
def test_what_is_looked_for_by_identity_is_refused(fn: Callable[..., Tensor], lazy: bool) -> None:
    data = dd.from_pandas(FRAME, npartitions=1) if lazy else FRAME
    shared = {"rates": RATES} if fn is by_get_of_what_is_shared else None
    with pytest.raises(dg.PlanError, match=r"test_lookups.py:\d+ `.*`: .* is a tensor, and .* by identity, never by value: write int\("):
        dg.grad_column(data, fn, wrt="x", shared=shared)


class Registry:
    def get(self, n: Any) -> Any:
        return 2.0 * n


REGISTRY = Registry()


def of_another_kind(x: Tensor, n: Any) -> Tensor:
    return x * REGISTRY.get(n)


def of_text(x: Tensor, kind: Any) -> Tensor:
    return x * {"a": 2.0}.get(kind, 4.0) if kind in {"a", "b"} else x


def made_an_int(x: Tensor, n: Any) -> Tensor:
    n = int(n)
    return x * (2.0 if n in CHOSEN else 1.0) * RATES.get(n, 1.0)


def something_made_of_it(x: Tensor, n: Any) -> Tensor:
    return x * {"1": 10.0}.get(f"{n}", 1.0) * {2: 3.0}.get(int(n), 1.0) * (2.0 if int(n) in CHOSEN else 1.0)


def in_a_tuple(x: Tensor, n: Any) -> Tensor:
    return x * 2 if n in (1, 2) else x


def is_none(x: Tensor, n: Any, f: Any = None) -> Tensor:
    return x * 2 if n is not None and f is not None else x


ALLOWED = [
    (of_another_kind, [2.0, 4.0, 6.0]), (of_text, [2.0, 4.0, 2.0]), (made_an_int, [20.0, 40.0, 1.0]), (in_a_tuple, [2.0, 2.0, 1.0]),
    (something_made_of_it, [20.0, 6.0, 1.0]),
    (is_none, [2.0, 2.0, 2.0]),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "expected"), ALLOWED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_found_by_value_is_not(fn: Callable[..., Tensor], expected: list[float]) -> None:
    assert dg.grad_column(FRAME, fn).tolist() == expected
