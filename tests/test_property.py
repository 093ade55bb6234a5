"""Drawn row functions on drawn frames, in every spelling, against the row-at-a-time oracle.

A failure shows the program's source, the frame and the options. Equality is exact in name, dtype, index, shape and
missing values; numbers agree to 1e-10 in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import oracle
import pandas as pd
import pytest
import strategies
import torch
from compare import (
    LOCAL_SCHEDULERS,
    TOLERANCE,
    assert_cells,
    assert_column,
    bag_of,
    computed,
    in_equal_parts,
    partitioned,
    slower_is_fine,
)
from hypothesis import assume, given, note
from hypothesis import strategies as st
from strategies import Program, Table

import daskgrad as dg

KINDS: tuple[dict[str, str], ...] = (
    {"x": "scalar"},
    {"x": "scalar", "y": "scalar"},
    {"v": "vector"},
    {"x": "scalar", "v": "vector"},
    {"x": "scalar", "k": "count"},
    {"x": "scalar", "y": "scalar", "k": "count", "v": "vector"},
)
WITH_X = tuple(kinds for kinds in KINDS if "x" in kinds)
BATCH_SIZES = (None, 1, 3, 7)


def draw_wrt(data: st.DataObject, kinds: dict[str, str], table: Table) -> list[str]:
    """Some of the arguments; an integer vector always, because undifferentiated it would stay an integer."""
    numbers = [name for name, kind in kinds.items() if kind != "count"]
    some = data.draw(st.lists(st.sampled_from(numbers), min_size=1, unique=True), label="wrt")
    return some + [n for n in numbers if n not in some and table.dtypes[n] == "arrays of int64"]


def draw_options(data: st.DataObject, engines: Sequence[str]) -> dict[str, Any]:
    return {
        "engine": data.draw(st.sampled_from(list(engines)), label="engine"),
        "batch_size": data.draw(st.sampled_from(BATCH_SIZES), label="batch_size"),
    }


def cells(found: Sequence[Any], name: str) -> list[Any]:
    """The expected cells of one argument: arrays, or ``None`` for a missing or failed row."""
    return [row[name] if isinstance(row, dict) else None for row in found]


def assert_frame(got: Any, table: Table, found: Sequence[Any], wrt: Sequence[str]) -> None:
    """A DataFrame of gradients equals the oracle's outcomes."""
    assert isinstance(got, pd.DataFrame)
    assert list(got.columns) == list(wrt)
    for name in wrt:
        assert_column(
            got[name],
            cells(found, name),
            name=name,
            dtype=strategies.expected_dtype(table.dtypes[name]),
            index=table.frame.index,
            rtol=TOLERANCE[table.floating],
        )


def check(data: Any, table: Table, program: Program, wrt: list[str], found: Sequence[Any], options: dict[str, Any]) -> None:
    """One call on one carrier, with the drawn options."""
    note(f"wrt={wrt} {options}")
    with slower_is_fine():
        got = dg.grad_column(data, program.fn, wrt, **options)
        if not isinstance(got, pd.DataFrame):
            got = computed(got)
    assert_frame(got, table, found, wrt)


@given(st.data())
def test_branch_free_functions(data: st.DataObject) -> None:
    """pandas, every engine and batch size."""
    kinds = data.draw(st.sampled_from(KINDS))
    program = data.draw(strategies.programs(kinds), label="fn")
    table = data.draw(strategies.tables(kinds, multi=True), label="table")
    wrt = draw_wrt(data, kinds, table)
    found = oracle.outcomes(table.rows, program.fn, wrt, table.floating)
    check(table.frame, table, program, wrt, found, draw_options(data, ["auto", "vmap", "loop"]))


@given(st.data())
def test_one_name_gives_a_series_and_no_name_means_the_first_argument(data: st.DataObject) -> None:
    kinds = data.draw(st.sampled_from(WITH_X))
    program = data.draw(strategies.programs(kinds), label="fn")
    # An integer vector that nobody differentiates stays an integer, which the drawn functions are not written for.
    table = data.draw(strategies.tables(kinds).filter(lambda t: "arrays of int64" not in t.dtypes.values()), label="table")
    expected = oracle.gradient(table.rows, program.fn, "x", table.floating)
    by_name = dg.grad_column(table.frame, program.fn, "x")
    by_default = dg.grad_column(table.frame, program.fn)
    for got in (by_name, by_default):
        dtype = strategies.expected_dtype(table.dtypes["x"])
        assert_column(got, expected, name="x", dtype=dtype, index=table.frame.index, rtol=TOLERANCE[table.floating])


@given(st.data())
def test_ragged_cells(data: st.DataObject) -> None:
    """List and array cells of 1 to 4 numbers: each gradient in its own row's length."""
    kinds = data.draw(st.sampled_from([kinds for kinds in KINDS if "v" in kinds]))
    program = data.draw(strategies.programs(kinds, length=None), label="fn")
    table = data.draw(strategies.tables(kinds, length=None), label="table")
    wrt = draw_wrt(data, kinds, table)
    found = oracle.outcomes(table.rows, program.fn, wrt, table.floating)
    check(table.frame, table, program, wrt, found, draw_options(data, ["auto", "loop"]))


@given(st.data())
def test_control_flow(data: st.DataObject) -> None:
    """Branches, loops, early returns, Python's max, formatting, try/except: each row as if it were alone."""
    kinds = data.draw(st.sampled_from(WITH_X))
    length = data.draw(st.sampled_from([3, None]))
    program = data.draw(strategies.control_programs(kinds, length), label="fn")
    table = data.draw(strategies.tables(kinds, length), label="table")
    wrt = draw_wrt(data, kinds, table)
    found = oracle.outcomes(table.rows, program.fn, wrt, table.floating)
    assume(not any(isinstance(row, Exception) for row in found))
    check(table.frame, table, program, wrt, found, draw_options(data, ["auto", "loop"]))


@given(st.data())
def test_rows_that_fail(data: st.DataObject) -> None:
    """``"null"`` keeps the others; ``"raise"`` names the first bad row and keeps its exception."""
    kinds = data.draw(st.sampled_from(WITH_X))
    program = data.draw(strategies.control_programs(kinds, failing=True), label="fn")
    table = data.draw(strategies.tables(kinds), label="table")
    wrt = draw_wrt(data, kinds, table)
    found = oracle.outcomes(table.rows, program.fn, wrt, table.floating)
    options = draw_options(data, ["auto", "loop"])
    check(table.frame, table, program, wrt, found, {**options, "on_error": "null"})
    bad = [place for place, row in enumerate(found) if isinstance(row, Exception)]
    if not bad:
        check(table.frame, table, program, wrt, found, {**options, "on_error": "raise"})
        return
    with slower_is_fine(), pytest.raises(dg.DaskgradError) as raised:
        dg.grad_column(table.frame, program.fn, wrt, on_error="raise", **options)
    assert_names_row(raised.value, table.frame.index[bad[0]], found[bad[0]])


def assert_names_row(error: dg.DaskgradError, label: Any, cause: Exception) -> None:
    """The error is about this row, of the kind that ``cause`` deserves."""
    assert str(label) in str(error)
    if isinstance(cause, oracle.Unreached):
        assert isinstance(error, dg.GraphError)
        return
    assert isinstance(error, dg.RowError)
    assert error.label == label
    assert type(error.__cause__) is type(cause)
    assert str(error.__cause__) == str(cause)


@given(st.data())
def test_dask_equals_the_oracle_for_every_partitioning(data: st.DataObject) -> None:
    """Known and unknown divisions, empty parts, every index that Dask carries, synchronous and threads."""
    kinds = data.draw(st.sampled_from(KINDS))
    control = "x" in kinds and data.draw(st.booleans())
    drawn = strategies.control_programs(kinds) if control else strategies.programs(kinds)
    program = data.draw(drawn, label="fn")
    table = data.draw(strategies.tables(kinds), label="table")
    wrt = draw_wrt(data, kinds, table)
    found = oracle.outcomes(table.rows, program.fn, wrt, table.floating)
    assume(not any(isinstance(row, Exception) for row in found))
    bounds = data.draw(strategies.cuts(len(table.rows)), label="cuts")
    equal = data.draw(st.booleans(), label="from_pandas")
    frame = in_equal_parts(table.frame, len(bounds)) if equal else partitioned(table.frame, bounds)
    options = draw_options(data, ["auto", "loop"])
    with slower_is_fine():
        column = dg.grad_column(frame, program.fn, wrt, **options)
        assert column.divisions == frame.divisions
        got = computed(column, data.draw(st.sampled_from(LOCAL_SCHEDULERS), label="scheduler"))
    assert_frame(got, table, found, wrt)


@given(st.data())
def test_a_bag_of_mappings_equals_the_oracle(data: st.DataObject) -> None:
    kinds = data.draw(st.sampled_from([{"x": "scalar"}, {"x": "scalar", "y": "scalar"}, {"x": "scalar", "k": "count"}]))
    control = data.draw(st.booleans())
    program = data.draw(strategies.control_programs(kinds) if control else strategies.programs(kinds), label="fn")
    table = data.draw(strategies.tables(kinds, only=["float64", "Float64"], max_rows=12), label="table")
    wrt = draw_wrt(data, kinds, table)
    found = oracle.outcomes(table.rows, program.fn, wrt)
    assume(not any(isinstance(row, Exception) for row in found))
    assume(table.rows)  # an empty Bag has no keys to know: test_cases_tables has it
    with slower_is_fine():
        column = dg.grad_column(bag_of(table.rows, data.draw(st.integers(1, 4))), program.fn, wrt, **draw_options(data, ["auto", "loop"]))
        got = computed(column)
    for name in wrt:
        assert_column(got[name], cells(found, name), name=name, dtype=np.dtype("float64"))


@given(st.data())
def test_a_bag_of_tuples_goes_by_position(data: st.DataObject) -> None:
    kinds = {"x": "scalar", "y": "scalar"}
    program = data.draw(strategies.programs(kinds), label="fn")
    table = data.draw(strategies.tables(kinds, only=["float64"], max_rows=8), label="table")
    assume(table.rows)
    rows = [(row["x"], row["y"]) for row in table.rows]
    got = computed(dg.grad_column(bag_of(rows, 2), program.fn, "y"))
    assert_cells(list(got), oracle.gradient(table.rows, program.fn, "y"))


def test_series_of_plain_values() -> None:
    """For a Series the row is the value."""
    series = pd.Series([0.5, -1.25, 2.0], index=list("abb"), name="price")
    got = dg.grad_column(series, lambda x: torch.sin(x) * x)
    expected = oracle.gradient([{"x": v} for v in series], lambda x: torch.sin(x) * x, "x")
    assert_cells(list(got), expected)
    assert list(got.index) == list("abb")


ORDERS: dict[str, tuple[str, ...]] = {
    "value": (),
    "x": ("x",),
    "y": ("y",),
    "xx": ("x", "x"),
    "xy": ("x", "y"),
    "yx": ("y", "x"),
    "xxy": ("x", "x", "y"),
    "xyx": ("x", "y", "x"),
    "yyy": ("y", "y", "y"),
}
VECTOR_ORDERS: dict[str, tuple[str, ...]] = {
    "value": (),
    "v": ("v",),
    "vv": ("v", "v"),
    "xv": ("x", "v"),
    "vx": ("v", "x"),
    "xx": ("x", "x"),
}


@given(st.data())
def test_derivatives_of_every_order(data: st.DataObject) -> None:
    """Any subset of the orders, for scalars and for vectors, with and without branches, equals nested autograd."""
    vector = data.draw(st.booleans())
    kinds = {"x": "scalar", "v": "vector"} if vector else {"x": "scalar", "y": "scalar"}
    orders = VECTOR_ORDERS if vector else ORDERS
    control = data.draw(st.booleans())
    program = data.draw(strategies.control_programs(kinds) if control else strategies.programs(kinds), label="fn")
    table = data.draw(strategies.tables(kinds, max_rows=8).filter(lambda t: t.floating == torch.float64), label="table")
    names = data.draw(st.lists(st.sampled_from(sorted(orders)), min_size=1, unique=True), label="wanted")
    wanted = {name: orders[name] for name in names}
    # Integer vectors are floats only where the call names them.
    assume(table.dtypes.get("v") != "arrays of int64" or any("v" in path for path in wanted.values()))
    expected = [
        None if any(map(oracle.is_missing, row.values())) else oracle.row_derivatives(row, program.fn, wanted) for row in table.rows
    ]
    with slower_is_fine():
        got = dg.derivatives(table.frame, program.fn, wanted, **draw_options(data, ["auto", "loop"]))
    assert list(got.columns) == names
    pd.testing.assert_index_equal(got.index, table.frame.index, exact="equiv")
    for name in names:
        # Third derivatives of nested powers are large: relative to their size.
        assert_cells(list(got[name].array), cells(expected, name), rtol=1e-9)


@given(st.data())
def test_jacobian_of_a_vector_valued_function(data: st.DataObject) -> None:
    """Output axes, then input axes."""
    kinds = {"v": "vector"}
    parts = [data.draw(strategies.programs(kinds), label=f"fn{n}") for n in range(data.draw(st.integers(2, 4)))]
    table = data.draw(strategies.tables(kinds, max_rows=12).filter(lambda t: t.floating == torch.float64), label="table")

    def several(v: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.fn(v) for part in parts])

    expected = oracle.jacobian(table.rows, several, "v")
    with slower_is_fine():
        got = dg.derivatives(table.frame, several, {"jacobian": "v"}, **draw_options(data, ["auto", "loop"]))
    assert_cells(list(got["jacobian"].array), expected)


@given(st.data())
def test_equal_spellings_agree(data: st.DataObject) -> None:
    """The answer does not depend on batch size, engine or ambient state, but for rounding."""
    kinds = data.draw(st.sampled_from(WITH_X))
    program = data.draw(strategies.control_programs(kinds), label="fn")
    table = data.draw(strategies.tables(kinds), label="table")
    wrt = draw_wrt(data, kinds, table)
    found = oracle.outcomes(table.rows, program.fn, wrt, table.floating)
    assume(not any(isinstance(row, Exception) for row in found))
    ambient = data.draw(st.sampled_from([torch.no_grad, torch.inference_mode, torch.enable_grad]), label="ambient")
    with ambient():
        check(table.frame, table, program, wrt, found, draw_options(data, ["auto", "loop"]))


@pytest.mark.parametrize("kind", [*strategies.INDEXES, "multi"])
@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
def test_every_index(kind: str, engine: str) -> None:
    """Rule 2 by example: the index is the input's, repeated labels and MultiIndex included."""
    index = strategies.make_index(kind, 7)
    frame = pd.DataFrame({"x": np.arange(7.0)}, index=index)
    got = dg.grad_column(frame, lambda x: x**2, engine=engine)
    assert_column(got, [2.0 * n for n in range(7)], name="x", dtype=np.dtype("float64"), index=index)


@pytest.mark.parametrize("dtype", sorted(oracle.RESULT_DTYPE))
@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
def test_every_dtype(dtype: str, engine: str) -> None:
    """Rules 1 and 5 by example, on pandas and on Dask with an empty part."""
    if dtype == "object":
        cells_in: list[Any] = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    else:
        cells_in = [1, 2]
    series = pd.Series(strategies.make_column(cells_in, "arrays") if dtype == "object" else pd.Series(cells_in, dtype=dtype))
    frame = pd.DataFrame({"x": series})

    def square(x: torch.Tensor) -> torch.Tensor:
        return (x.abs() ** 2).sum()

    expected = [2 * np.asarray(cell) for cell in cells_in]
    want = pd.Series([], dtype=oracle.RESULT_DTYPE[dtype]).dtype
    got = dg.grad_column(frame, square, engine=engine)
    assert_column(got, expected, name="x", dtype=want, index=frame.index, rtol=1e-3 if dtype == "float16" else 1e-6)
    lazy = computed(dg.grad_column(partitioned(frame, [(0, 0), (0, 1), (1, 2)]), square, engine=engine))
    assert_column(lazy, expected, name="x", dtype=want, index=frame.index, rtol=1e-3 if dtype == "float16" else 1e-6)


@pytest.mark.parametrize("dtype", oracle.REFUSED_DTYPES)
def test_every_refused_dtype(dtype: str) -> None:
    """Rule 1: a column that cannot be differentiated is refused by name, at the call."""
    source: dict[str, Any] = {
        "bool": [True, False],
        "boolean": [True, None],
        "bool[pyarrow]": [True, None],
        "str": ["a", "b"],
        "category": ["a", "b"],
        "datetime64[ns]": pd.to_datetime(["2024-01-01", "2024-01-02"]),
        "timedelta64[ns]": pd.to_timedelta([1, 2], unit="D"),
    }
    frame = pd.DataFrame({"flag": pd.Series(source[dtype]).astype(dtype), "x": [1.0, 2.0]})
    for data in (frame, in_equal_parts(frame, 2)):
        with pytest.raises(dg.PlanError, match="flag"):
            dg.grad_column(data, lambda flag, x: x * x, "flag")
