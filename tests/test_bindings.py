"""How arguments are bound: what the row function is called with, and what a call that makes no sense says."""

from __future__ import annotations

import sys
import types
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import daskgrad as dg

Point = namedtuple("Point", "y x")


def of_bag(records: list[Any], fn: Callable[..., Any], **how: Any) -> Any:
    return dg.grad_column(db.from_sequence(records, npartitions=1), fn, **how).compute(scheduler="synchronous")


def scaled(x: Tensor, scale: Any = None) -> Tensor:
    return x * x if scale is None else x * scale


def test_a_default_that_is_none_is_no_missing_value() -> None:
    records = [{"x": 1.0}, {"x": 2.0, "scale": 3.0}, {"x": 3.0, "scale": None}]
    got = of_bag(records, scaled)
    assert got[:2].tolist() == [2.0, 3.0]
    assert np.isnan(got[2]), "the record itself says None: that is a missing value"
    assert of_bag([1.0, 2.0], scaled).tolist() == [2.0, 4.0]
    assert of_bag([(1.0,), (2.0, 5.0)], scaled).tolist() == [2.0, 5.0]


@pytest.mark.parametrize("default", [2, "a", ["a", 1], float("nan"), torch.sin, True], ids=repr)
def test_a_record_without_the_key_gets_the_default_as_it_is(default: Any) -> None:
    def same(x: Tensor, how: Any = default) -> Tensor:
        return 3 * x if type(how) is type(default) else x

    assert of_bag([{"x": 1.0}], same).tolist() == [3.0]


def test_a_default_is_differentiated_where_it_is_asked_for() -> None:
    def product(x: Tensor, y: Any = 5.0) -> Any:
        return x * y

    assert of_bag([{"x": 2.0}, {"x": 3.0, "y": 7.0}], product, wrt="y").tolist() == [2.0, 3.0]


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """A module whose functions travel by reference."""
    source = (
        "UNSET = object()\n"
        "def f(x, how=UNSET):\n    return x * x if how is UNSET else 7 * x\n"
        "def g(x, how=UNSET, scale=1.0, /, *, other=UNSET):\n    return scale * x * x if how is other is UNSET else 7 * x\n"
    )
    made = types.ModuleType("with_a_sentinel")
    sys.modules[made.__name__] = made
    exec(source, vars(made))
    yield made
    del sys.modules[made.__name__]


def test_a_default_stays_the_object_that_it_is_on_every_carrier(module: types.ModuleType) -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0]})
    lazy = dd.from_pandas(frame, npartitions=2)
    for data in (frame, lazy):
        got = dg.grad_column(data, module.f)
        assert (got if data is frame else got.compute(scheduler="synchronous")).tolist() == [2.0, 4.0]


def test_a_default_before_an_argument_that_is_given_by_position_only(module: types.ModuleType) -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0], "scale": [3.0, 4.0]})
    assert dg.grad_column(frame, module.g).tolist() == [6.0, 16.0]
