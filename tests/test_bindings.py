"""How arguments are bound: what the row function is called with, and what a call that makes no sense says."""

from __future__ import annotations

import copy
import sys
import types
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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


def product(a: Tensor, b: Tensor) -> Tensor:
    return a * a * b


def test_inputs_says_which_place_or_field_of_a_tuple() -> None:
    assert of_bag([(2.0, 5.0)], product).tolist() == [20.0]
    assert of_bag([(2.0, 5.0)], product, inputs={"a": 1, "b": 0}).tolist() == [20.0]
    assert of_bag([(2.0, 5.0)], lambda a: a**2, inputs={"a": 1}).tolist() == [10.0]
    assert of_bag([Point(2.0, 5.0)], product, inputs={"a": "x", "b": "y"}).tolist() == [20.0]
    assert of_bag([(2.0, 5.0)], lambda v: (v**3).sum(), inputs={"v": [0, 1]}).to_numpy().tolist() == [[12.0, 75.0]]


@pytest.mark.parametrize("record", [(2.0, 5.0), 2.0, [2.0, 5.0]], ids=repr)
def test_names_that_a_record_does_not_have_cannot_be_stacked(record: Any) -> None:
    with pytest.raises(dg.RowError, match="the record has no 'p'"):
        of_bag([record], lambda v: (v**3).sum(), inputs={"v": ["p", "q"]})


@pytest.mark.parametrize("wrt", [{"x"}, {"x": 1}, np.array(["x"]), pd.Index(["x"]), [["x"]]], ids=repr)
def test_what_names_no_argument_is_refused(wrt: Any) -> None:
    with pytest.raises(dg.PlanError, match=r"names no argument: wrt='x' gives a Series"):
        dg.grad_column(pd.DataFrame({"x": [1.0]}), scaled, wrt=wrt)
    with pytest.raises(dg.PlanError, match=r"names no argument"):
        dg.derivatives(pd.DataFrame({"x": [1.0]}), scaled, {"a": ("x", ["x"])})


@pytest.mark.parametrize("given", ["x", ["x"], 5])
@pytest.mark.parametrize("where", ["inputs", "shared"])
def test_inputs_and_shared_are_mappings(where: str, given: Any) -> None:
    with pytest.raises(dg.PlanError, match=rf"{where}=.* a mapping is needed, {where}={{argument: ...}}"):
        dg.grad_column(pd.DataFrame({"x": [1.0]}), scaled, **{where: given})


def test_a_series_has_no_column_that_an_array_names() -> None:
    with pytest.raises(dg.PlanError, match="the data is a Series named 'x'"):
        dg.grad_column(pd.Series([1.0], name="x"), scaled, inputs={"x": np.array([1, 2])})


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda row: "x" in row, "not iterable|not a container"),
        (lambda row: sum(row), "not iterable"),
        (lambda row: row.z, "has no column 'z'. Its columns: 'x', 'b', 'a'."),
    ],
)
def test_what_a_row_is_not(fn: Callable[..., Any], message: str) -> None:
    with pytest.raises(dg.RowError, match=message):
        dg.grad_column(pd.DataFrame({"x": [1.0], "b": [2.0], "a": [3.0]}), fn, wrt="x")


class Place(NamedTuple):
    x: float
    y: float


@pytest.mark.parametrize(
    ("records", "fn", "wrt"),
    [
        ([(2.0, 3.0), (4.0, 5.0)], lambda row: row[0] ** 2 * row[1], [0, 1]),
        ([Place(2.0, 3.0), Place(4.0, 5.0)], lambda row: row.x**2 * row["y"], ["x", "y"]),
        ([{"x": 2.0, "y": 3.0}, {"x": 4.0, "y": 5.0}], lambda row: row.x**2 * row["y"], ["x", "y"]),
    ],
)
def test_whole_records(records: list[Any], fn: Callable[..., Any], wrt: list[Any]) -> None:
    got = dg.grad_column(db.from_sequence(records, npartitions=2), fn, wrt=wrt).compute(scheduler="synchronous")
    assert got.columns.tolist() == wrt
    assert got.to_numpy().tolist() == [[12.0, 4.0], [40.0, 16.0]]


def test_a_record_without_what_is_read_says_so() -> None:
    records = db.from_sequence([{"x": 1.0, "y": 2.0}, {"x": 3.0}], npartitions=1)
    with pytest.raises(dg.RowError, match="this record has no 'y'"):
        dg.grad_column(records, lambda row: row.x * row.y, wrt="x").compute(scheduler="synchronous")


def test_a_copy_of_a_row_is_a_row() -> None:
    assert dg.grad_column(pd.DataFrame({"x": [3.0]}), lambda row: copy.copy(row).x ** 2, wrt="x").tolist() == [6.0]


@pytest.mark.parametrize("device", ["tpu", "meta", "mps", 5, "", "cuda:x"])
def test_a_device_that_there_is_not_is_refused_at_the_call(device: Any) -> None:
    with pytest.raises(dg.PlanError, match=r"is not possible\. Possible: 'cpu', 'cuda'"):
        dg.grad_column(dd.from_pandas(pd.DataFrame({"x": [1.0]}), npartitions=1), scaled, device=device)


def test_no_remedy_is_named_for_a_module_that_is_the_function_itself() -> None:
    with pytest.raises(dg.RowError) as caught:
        dg.grad_column(pd.Series([1.0], name="x"), torch.nn.Linear(1, 1))
    assert "shared=" not in str(caught.value)


# --- labels that are no text ------------------------------------------------------------------------------------------

LABELS: list[Any] = [None, pd.NA, pd.NaT, True, False, 0, 1.5, b"x", ("x", 1), "", pd.Timestamp("2024-01-01")]


def two_columns(label: Any) -> pd.DataFrame:
    return pd.DataFrame([[1.0, 5.0], [2.0, 6.0]], columns=pd.Index([label, "y"], dtype=object, tupleize_cols=False))


def same_labels(found: Any, expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(a is b or (type(a) is type(b) and a == b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("label", LABELS, ids=repr)
def test_any_label_names_a_column(label: Any) -> None:
    """By inputs, alone and stacked, and in a function of whole rows; what comes back has the very label."""
    frame = two_columns(label)
    one = dg.grad_column(frame, scaled, inputs={"x": label})
    assert same_labels([one.name], [label])
    assert one.tolist() == [2.0, 4.0]
    stacked = dg.grad_column(frame, lambda x: (x * x).sum(), inputs={"x": [label, "y"]})
    rows = dg.grad_column(frame, lambda row: row[label] * row["y"], [label, "y"])
    assert same_labels(list(stacked.columns), [label, "y"])
    assert same_labels(list(rows.columns), [label, "y"])
    assert stacked.to_numpy().tolist() == [[2.0, 10.0], [4.0, 12.0]]
    assert rows.to_numpy().tolist() == [[5.0, 1.0], [6.0, 2.0]]
    made = dg.derivatives(frame, lambda y: y * y, {label: "y", "value": ()})
    assert same_labels(list(made.columns), [label, "value"])
    assert made.to_numpy().tolist() == [[10.0, 25.0], [12.0, 36.0]]


@pytest.mark.parametrize("label", LABELS, ids=repr)
def test_any_label_names_a_row(label: Any) -> None:
    """As a label of the index it is kept, and told where the row fails."""
    frame = pd.DataFrame({"x": [1.0, 2.0]}, index=pd.Index([label, "b"], dtype=object, tupleize_cols=False))
    column = dg.grad_column(frame, scaled)
    assert same_labels(list(column.index), [label, "b"])
    with pytest.raises(dg.RowError) as raised:
        dg.grad_column(frame, lambda x: x if x > 1 else 1 / 0)
    assert same_labels([raised.value.label], [label])


@pytest.mark.parametrize("label", [0, True, 1.5, None])
def test_any_label_is_a_derivative_of_whole_rows(label: Any) -> None:
    """Orders and reductions name columns by labels that are no text, too."""
    frame = two_columns(label)
    wanted = {"first": label, "second": (label, label), "norm": dg.norm([label, "y"]), "along": dg.dot(label, 3.0)}
    got = dg.derivatives(frame, lambda row: row[label] ** 2 * row["y"], wanted)
    np.testing.assert_allclose(got["first"], [10, 24])
    np.testing.assert_allclose(got["second"], [10, 12])
    np.testing.assert_allclose(got["norm"], [np.hypot(10, 1), np.hypot(24, 4)])
    np.testing.assert_allclose(got["along"], [30, 72])


def test_labels_that_are_true_or_false_work_in_dask() -> None:
    lazy = dd.from_pandas(two_columns(True), npartitions=2)
    assert dg.grad_column(lazy, scaled, inputs={"x": True}).compute(scheduler="synchronous").tolist() == [2.0, 4.0]


@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
def test_the_value_alone_of_whole_rows(engine: str) -> None:
    """Nothing is differentiated, so `wrt` need not say by what; the dtype is what the numeric columns have in common."""
    frame = pd.DataFrame({"x": np.float32([1.0, 2.0]), "y": np.float32([3.0, 4.0]), "t": ["a", "b"]})
    for data in (frame, dd.from_pandas(frame, npartitions=2)):
        got = dg.derivatives(
            data, lambda row: (row["x"] ** 2 * row["y"], {"half": row["y"] / 2}), {"v": (), "h": dg.aux("half")}, engine=engine
        )
        got = got if isinstance(got, pd.DataFrame) else got.compute(scheduler="synchronous")
        assert got["v"].tolist() == [3.0, 16.0]
        assert got["h"].tolist() == [1.5, 2.0]
        assert got["v"].dtype == np.float32
    twice = pd.DataFrame([[1.0, 2.0, 3.0]], columns=["a", "a", "b"])
    assert dg.derivatives(twice, lambda row: row["b"] * 2, {"v": ()}, engine=engine)["v"].tolist() == [6.0]
