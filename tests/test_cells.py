"""Cells to arrays and back, against a reference that goes row by row in plain Python."""

from __future__ import annotations

import datetime
import enum
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from daskgrad import _cells, _columns, _dtypes
from daskgrad._cells import ArrayKind, Cells, StaticKind
from daskgrad._errors import GraphError

MISSING = object()
LABELS = ["a", "b", "b", "d", "e", "f", "g", "h"]


class Side(enum.IntEnum):
    CALL = 1
    PUT = 2


def arrow(kind: Any) -> pd.ArrowDtype:
    return pd.ArrowDtype(kind)


def arrow_series(values: Sequence[Any], kind: Any, chunks: int = 1, skip: int = 0) -> pd.Series:
    """An Arrow column in `chunks` chunks, each cut out of an array that has `skip` more rows before and after it."""
    pieces = []
    for piece in np.array_split(np.arange(len(values)), chunks):
        rows = [values[i] for i in piece]
        whole = pa.array([None] * skip + rows + [None] * skip, kind)
        pieces.append(whole.slice(skip, len(rows)))
    return pd.Series(pd.arrays.ArrowExtensionArray(pa.chunked_array(pieces, kind)), name="x")


def objects(values: Sequence[Any]) -> pd.Series:
    """An object column of exactly these cells (pandas and NumPy unpack arrays of one length when they can)."""
    items = np.empty(len(values), object)
    for row, value in enumerate(values):
        items[row] = value
    return pd.Series(items, index=LABELS[: len(values)], name="x", dtype=object)


def assert_holds(cells: Cells, expected: Sequence[Any]) -> None:
    """Every row of `cells` is `MISSING`, the array with its dtype, or the static value expected: alone, in groups."""
    assert len(cells) == len(expected)
    missing = np.zeros(len(expected), bool) if cells.missing is None else cells.missing
    assert cells.missing is None or cells.missing.any()
    assert missing.tolist() == [value is MISSING for value in expected]
    codes = np.where(missing, -1, 0) if cells.codes is None else cells.codes
    assert codes.dtype == np.intp
    assert (codes < 0).tolist() == missing.tolist()
    assert cells.codes is None or sorted(set(codes[codes >= 0].tolist())) == list(range(cells.n_kinds))
    for code in set(codes[codes >= 0].tolist()):
        assert_kind(cells, code, np.flatnonzero(codes == code), expected)


def assert_kind(cells: Cells, code: int, rows: np.ndarray[Any, Any], expected: Sequence[Any]) -> None:
    kind = cells.kind(code)
    if isinstance(kind, StaticKind):
        for row in rows:
            assert type(kind.value) is type(expected[row])
            assert kind.value is expected[row] or kind.value == expected[row]
        return
    for chosen in (rows, rows[::-1], rows[::2], rows[:0], *(rows[i : i + 1] for i in range(len(rows)))):
        taken = cells.take(chosen)
        assert taken.flags.c_contiguous
        assert taken.flags.writeable
        assert taken.dtype.isnative
        if len(chosen) == 0:
            continue
        assert (taken.dtype, taken.shape) == (kind.dtype, (len(chosen), *kind.shape))
        for got, row in zip(taken, chosen, strict=True):
            want = np.asarray(expected[row])
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            np.testing.assert_array_equal(got, want)
        taken[...] = 0  # the row function may write; the next round still sees the data


def numbers(values: Sequence[Any], dtype: str) -> list[Any]:
    return [MISSING if value is None else np.array(value, dtype) for value in values]


# ---------------------------------------------------------------- from a dtype alone

F8, F4, O = np.dtype("f8"), np.dtype("f4"), np.dtype(object)  # noqa: E741
TENSOR = pa.fixed_shape_tensor(pa.float32(), [2, 3])
# dtype, role, gradient dtype or refusal, floating dtype
DTYPES: list[tuple[Any, str, Any, Any]] = [
    *((np.dtype(d), "real", np.dtype(d).newbyteorder("="), np.dtype(d).newbyteorder("=")) for d in ("f2", "f4", "f8", ">f4", ">f8")),
    *((np.dtype(d), "integer", F8, None) for d in ("i1", "i2", "i4", "i8", ">i8", "u1", "u2", "u4", "u8")),
    (np.dtype("c8"), "complex", np.dtype("c8"), F4),
    (np.dtype("c16"), "complex", np.dtype("c16"), F8),
    (np.dtype("?"), "bool", "it holds bool", None),
    (np.dtype("O"), "object", O, None),
    (np.dtype("longdouble"), "unsupported", "wider than any number of torch", None),
    (np.dtype("clongdouble"), "unsupported", "complex128", None),
    (np.dtype("M8[ns]"), "static", "it holds datetimes", None),
    (np.dtype("m8[ns]"), "static", "it holds durations", None),
    (pd.Float32Dtype(), "real", pd.Float32Dtype(), F4),
    (pd.Float64Dtype(), "real", pd.Float64Dtype(), F8),
    (pd.Int8Dtype(), "integer", pd.Float64Dtype(), None),
    (pd.UInt64Dtype(), "integer", pd.Float64Dtype(), None),
    (pd.BooleanDtype(), "bool", "it holds bool", None),
    (pd.SparseDtype("f4"), "real", F4, F4),
    (pd.SparseDtype("i8", 0), "integer", F8, None),
    (pd.SparseDtype(bool, False), "bool", "it holds bool", None),
    (pd.StringDtype("python"), "static", "it holds text", None),
    (pd.StringDtype("pyarrow"), "static", "it holds text", None),
    (pd.StringDtype(na_value=np.nan), "static", "it holds text", None),
    (pd.CategoricalDtype([1.0, 2.0]), "static", "it holds categories", None),
    (pd.DatetimeTZDtype("ns", "UTC"), "static", "it holds datetimes", None),
    (pd.PeriodDtype("D"), "static", "it holds periods", None),
    (pd.IntervalDtype("f8"), "static", "it holds intervals", None),
    (arrow(pa.float16()), "real", arrow(pa.float16()), np.dtype("f2")),
    (arrow(pa.float32()), "real", arrow(pa.float32()), F4),
    (arrow(pa.float64()), "real", arrow(pa.float64()), F8),
    (arrow(pa.decimal128(9, 2)), "real", arrow(pa.float64()), F8),
    (arrow(pa.decimal256(40, 2)), "real", arrow(pa.float64()), F8),
    (arrow(pa.int8()), "integer", arrow(pa.float64()), None),
    (arrow(pa.uint64()), "integer", arrow(pa.float64()), None),
    (arrow(pa.bool_()), "bool", "it holds bool", None),
    (arrow(pa.list_(pa.float32())), "array", arrow(pa.list_(pa.float32())), F4),
    (arrow(pa.list_(pa.field("el", pa.int32()))), "array", arrow(pa.list_(pa.field("el", pa.float64()))), None),
    (arrow(pa.large_list(pa.float16())), "array", arrow(pa.large_list(pa.float16())), np.dtype("f2")),
    (arrow(pa.list_(pa.decimal128(9, 2), 3)), "array", arrow(pa.list_(pa.float64(), 3)), F8),
    (arrow(pa.list_(pa.list_(pa.int8(), 2))), "array", arrow(pa.list_(pa.list_(pa.float64(), 2))), None),
    (arrow(TENSOR), "array", arrow(TENSOR), F4),
    (
        arrow(pa.fixed_shape_tensor(pa.int8(), [2])),
        "array",
        arrow(pa.fixed_shape_tensor(pa.float64(), [2])),
        None,
    ),
    (arrow(pa.list_(pa.bool_())), "array", "it holds arrays of bool", None),
    (arrow(pa.fixed_shape_tensor(pa.int8(), [2, 3], permutation=[1, 0])), "unsupported", "row-major", None),
    (arrow(pa.list_view(pa.float64())), "unsupported", "list column", None),
    (arrow(pa.list_(pa.list_view(pa.float64()))), "unsupported", "list column", None),
    (arrow(pa.list_(TENSOR)), "static", "it holds lists of", None),
    (arrow(pa.string()), "static", "it holds text", None),
    (arrow(pa.large_string()), "static", "it holds text", None),
    (arrow(pa.binary()), "static", "it holds bytes", None),
    (arrow(pa.date32()), "static", "it holds dates", None),
    (arrow(pa.time64("us")), "static", "it holds times of day", None),
    (arrow(pa.timestamp("ns")), "static", "it holds datetimes", None),
    (arrow(pa.duration("ns")), "static", "it holds durations", None),
    (arrow(pa.dictionary(pa.int8(), pa.string())), "static", "it holds categories", None),
    (arrow(pa.struct([("a", pa.float64())])), "static", "it holds records", None),
    (arrow(pa.list_(pa.string())), "static", "it holds lists of text", None),
    (arrow(pa.null()), "static", "it holds nothing but missing values", None),
]


@pytest.mark.parametrize(("dtype", "role", "gradient", "floating"), DTYPES, ids=lambda value: str(value)[:40])
def test_what_a_dtype_says(dtype: Any, role: str, gradient: Any, floating: Any) -> None:
    assert _dtypes.role(dtype) == role
    assert _dtypes.floating(dtype) == floating
    if isinstance(gradient, str):
        assert gradient in str(_dtypes.refusal(dtype))
        with pytest.raises(TypeError, match=r"^it holds"):
            _dtypes.gradient_dtype(dtype)
    else:
        assert _dtypes.refusal(dtype) is None
        found = _dtypes.gradient_dtype(dtype)
        assert found == gradient
        assert type(found) is type(gradient)


@pytest.mark.parametrize(
    ("dtypes", "value", "common"),
    [
        ([], True, F8),
        ([F4, F4], False, F4),
        ([F4, F8], False, F8),
        ([np.dtype("c8")], True, F4),
        ([F4, pd.Float32Dtype()], True, pd.Float32Dtype()),
        ([F8, pd.Float32Dtype()], True, pd.Float64Dtype()),
        ([pd.Float64Dtype(), arrow(pa.float32())], True, arrow(pa.float64())),
        ([O, F4], True, F8),
        ([O, F4], False, O),
        ([arrow(pa.list_(pa.float32()))], True, arrow(pa.float32())),
        ([arrow(pa.list_(pa.float32()))], False, O),
    ],
)
def test_a_number_out_of_several_columns(dtypes: list[Any], value: bool, common: Any) -> None:
    assert _dtypes.common_dtype(dtypes, value=value) == common


# ---------------------------------------------------------------- one number a cell

NAN = float("nan")


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f2", ">f4", ">f8"])
def test_numpy_floats_keep_nan(dtype: str) -> None:
    native = np.dtype(dtype).newbyteorder("=").str
    assert_holds(_cells.read(pd.Series([1.5, NAN, -2.0], dtype=dtype)), numbers([1.5, NAN, -2.0], native))


@pytest.mark.parametrize(
    ("dtype", "taken"),
    [
        ("i1", "i1"),
        ("i2", "i2"),
        (">i4", "i4"),
        ("i8", "i8"),
        ("u1", "u1"),
        ("u2", "i4"),
        ("u4", "i8"),
        ("u8", "i8"),
        ("?", "?"),
        ("c8", "c8"),
        (">c16", "c16"),
    ],
)
def test_numpy_numbers(dtype: str, taken: str) -> None:
    assert_holds(_cells.read(pd.Series(np.array([1, 0, 1], dtype))), numbers([1, 0, 1], taken))


@pytest.mark.parametrize(
    ("dtype", "taken"),
    [("Float32", "f4"), ("Float64", "f8"), ("Int16", "i2"), ("UInt16", "i4"), ("UInt64", "i8"), ("boolean", "?")],
)
def test_nullable_numbers(dtype: str, taken: str) -> None:
    assert_holds(_cells.read(pd.Series([1, None, 0], dtype=dtype)), numbers([1, None, 0], taken))
    assert _cells.read(pd.Series([1, 0], dtype=dtype)).missing is None


def test_nan_under_no_mask_is_a_number() -> None:
    column = pd.Series(pd.arrays.FloatingArray(np.array([1.0, NAN, 2.0]), np.array([False, False, True])))
    assert_holds(_cells.read(column), numbers([1.0, NAN, None], "f8"))


def test_sparse_numbers() -> None:
    assert_holds(_cells.read(pd.Series([0.0, NAN, 2.0], dtype="Sparse[float32]")), numbers([0.0, NAN, 2.0], "f4"))
    assert_holds(_cells.read(pd.Series([0, 3], dtype=pd.SparseDtype("i8", 0))), numbers([0, 3], "i8"))


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("skip", [0, 3])
@pytest.mark.parametrize(
    ("kind", "taken"),
    [
        (pa.float16(), "f2"),
        (pa.float32(), "f4"),
        (pa.float64(), "f8"),
        (pa.int8(), "i1"),
        (pa.uint16(), "i4"),
        (pa.uint64(), "i8"),
        (pa.bool_(), "?"),
    ],
)
def test_arrow_numbers(kind: Any, taken: str, chunks: int, skip: int) -> None:
    values = [1, None, 0, 1, 1]
    column = arrow_series([value if value is None else np.dtype(taken).type(value) for value in values], kind, chunks, skip)
    assert_holds(_cells.read(column), numbers(values, taken))
    assert_holds(_cells.read(column[:0]), [])


def test_arrow_nan_is_a_number() -> None:
    array = pa.array([1.0, NAN, None], from_pandas=False)
    assert_holds(_cells.read(pd.Series(pd.arrays.ArrowExtensionArray(array))), numbers([1.0, NAN, None], "f8"))


@given(st.lists(st.none() | st.decimals(-(10**12), 10**12, places=7, allow_nan=False), max_size=8))
def test_decimals_are_rounded_once(values: list[Decimal | None]) -> None:
    column = arrow_series(values, pa.decimal128(25, 7))
    assert_holds(_cells.read(column), numbers([v if v is None else float(v) for v in values], "f8"))


def test_uint64_beyond_int64_is_named() -> None:
    big = 2**63 + 5
    for column in (
        pd.Series([1, big], index=["p", "q"], dtype="u8", name="x"),
        pd.Series([1, big], index=["p", "q"], dtype="UInt64", name="x"),
        pd.Series([1, big], index=["p", "q"], dtype=arrow(pa.uint64()), name="x"),
        pd.Series([[1], [2, big]], index=["p", "q"], dtype=arrow(pa.list_(pa.uint64())), name="x"),
        pd.Series([1, big], index=["p", "q"], dtype=object, name="x"),
        pd.Series([np.array([1], "u8"), np.array([2, big], "u8")], index=["p", "q"], name="x"),
    ):
        with pytest.raises(ValueError, match=f"column 'x', row 'q': {big} does not fit into int64"):
            _cells.read(column)
    hidden = pd.arrays.IntegerArray(np.array([1, big], "u8"), np.array([False, True]))
    assert_holds(_cells.read(pd.Series(hidden)), numbers([1, None], "i8"))


def test_take_by_slice_never_shares_memory() -> None:
    column = pd.Series([1.0, 2.0, 3.0])
    taken = _cells.read(column).take(slice(1, 3))
    taken += 10
    assert taken.tolist() == [12.0, 13.0]
    assert column.tolist() == [1.0, 2.0, 3.0]


def test_wider_than_torch_is_refused() -> None:
    with pytest.raises(TypeError, match=r"column 'x': it holds .* wider than any number of torch"):
        _cells.read(pd.Series(np.array([1], "longdouble"), name="x"))
    with pytest.raises(ValueError, match=r"row 'b': .* wider than any number of torch"):
        _cells.read(objects([1.0, np.longdouble(2)]))
    with pytest.raises(ValueError, match="row 'b': an array of dtype"):
        _cells.read(objects([1.0, np.ones(2, "longdouble")]))


# ---------------------------------------------------------------- Arrow lists


def holds_null(cell: Any) -> bool:
    return cell is None or (isinstance(cell, list) and any(map(holds_null, cell)))


def list_kinds() -> dict[str, tuple[Any, str, Callable[[Any], st.SearchStrategy[Any]]]]:
    """name → (Arrow type, dtype taken, cells of one row out of a strategy for items)."""

    def matrix(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        sizes = st.tuples(st.integers(1, 3), st.integers(0, 3))
        return sizes.flatmap(lambda s: st.lists(st.lists(items, min_size=s[1], max_size=s[1]), min_size=s[0], max_size=s[0]))

    return {
        "list": (pa.list_(pa.float64()), "f8", lambda items: st.lists(items, max_size=3)),
        "large": (pa.large_list(pa.float32()), "f4", lambda items: st.lists(items, max_size=3)),
        "fixed": (pa.list_(pa.int32(), 2), "i4", lambda items: st.lists(items, min_size=2, max_size=2)),
        "unsigned": (pa.list_(pa.uint16()), "i4", lambda items: st.lists(items, max_size=3)),
        "bool": (pa.list_(pa.bool_()), "?", lambda items: st.lists(items.map(lambda v: v and bool(v)), max_size=3)),
        "decimal": (
            pa.list_(pa.decimal128(9, 2)),
            "f8",
            lambda items: st.lists(items.map(lambda v: v and Decimal(v)), max_size=3),
        ),
        "list of lists": (pa.list_(pa.list_(pa.float64())), "f8", matrix),
        "list of fixed": (
            pa.list_(pa.list_(pa.float64(), 2)),
            "f8",
            lambda items: st.lists(st.lists(items, min_size=2, max_size=2), min_size=1, max_size=3),
        ),
        "fixed of fixed": (
            pa.list_(pa.list_(pa.int8(), 2), 3),
            "i1",
            lambda items: st.lists(st.lists(items, min_size=2, max_size=2), min_size=3, max_size=3),
        ),
        "fixed of lists": (
            pa.list_(pa.large_list(pa.float64()), 2),
            "f8",
            lambda items: st.integers(0, 3).flatmap(lambda n: st.lists(st.lists(items, min_size=n, max_size=n), min_size=2, max_size=2)),
        ),
    }


@pytest.mark.parametrize("name", list_kinds())
@given(data=st.data())
def test_arrow_lists(name: str, data: st.DataObject) -> None:
    kind, taken, cells_of = list_kinds()[name]
    items = st.integers(1, 100)
    cell = cells_of(items) if data.draw(st.booleans()) else cells_of(st.none() | items)
    values = data.draw(st.lists(st.none() | cell, max_size=7))
    column = arrow_series(values, kind, data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2)))
    expected = [MISSING if holds_null(value) else np.array(value, float).astype(taken) for value in values]
    assert_holds(_cells.read(column), expected)


def test_arrow_lists_of_no_rows_inside_keep_their_depth() -> None:
    assert_holds(_cells.read(arrow_series([[], None], pa.list_(pa.list_(pa.float64())))), [np.empty((0, 0)), MISSING])
    assert_holds(_cells.read(arrow_series([[]], pa.list_(pa.list_(pa.float64(), 3)))), [np.empty((0, 3))])


def test_arrow_nan_inside_a_list_is_a_number() -> None:
    column = pd.Series(pd.arrays.ArrowExtensionArray(pa.array([[NAN, 1.0], [None]], from_pandas=False)))
    assert_holds(_cells.read(column), [np.array([NAN, 1.0]), MISSING])


def test_arrow_ragged_inside_one_cell() -> None:
    column = arrow_series([[[1.0], [2.0]], None, [[1.0, 2.0], [3.0]]], pa.list_(pa.list_(pa.float64())))
    column.index = pd.Index(["p", "q", "r"])
    with pytest.raises(ValueError, match="column 'x', row 'r': its inner lists differ in length"):
        _cells.read(column)
    neighbours = arrow_series([[[1.0, 2.0]], [[3.0]], [[1.0, 2.0], None]], pa.list_(pa.list_(pa.float64())))
    assert_holds(_cells.read(neighbours), [np.array([[1.0, 2.0]]), np.array([[3.0]]), MISSING])


def tensors() -> pd.Series:
    storage = pa.array([[9.0] * 6, [0.0, 1, 2, 3, 4, 5], None, [6.0, 7, 8, 9, 10, 11]], TENSOR.storage_type).slice(1)
    array = pa.ExtensionArray.from_storage(TENSOR, storage)
    return pd.Series(pd.arrays.ArrowExtensionArray(pa.chunked_array([array, array])), name="x")


def test_arrow_tensors() -> None:
    grid = np.arange(12, dtype="f4").reshape(2, 2, 3)
    assert_holds(_cells.read(tensors()), [grid[0], MISSING, grid[1]] * 2)
    assert_holds(_cells.read(tensors()[:0]), [])


# ---------------------------------------------------------------- static values


@pytest.mark.parametrize("dtype", ["object", "str", "string[python]", "string[pyarrow]", arrow(pa.string()), "category"])
def test_text(dtype: Any) -> None:
    column = pd.Series(["call", None, "put", "call"], dtype=dtype)
    cells = _cells.read(column)
    assert_holds(cells, ["call", MISSING, "put", "call"])
    assert cells.n_kinds == 2
    with pytest.raises(TypeError, match="static value"):
        cells.take(np.array([0]))


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pd.Series([2.0, None, 3.0]).astype("category"), [2.0, MISSING, 3.0]),
        (pd.Series(pd.Categorical(["b"], ["a", "b"])), ["b"]),
        (pd.Series(pd.to_datetime(["2024-01-02", "NaT"])), [pd.Timestamp("2024-01-02"), MISSING]),
        (pd.Series(pd.to_timedelta([1, None], unit="s")), [pd.Timedelta(seconds=1), MISSING]),
        (pd.Series(pd.period_range("2024", periods=2, freq="D")), [pd.Period("2024-01-01"), pd.Period("2024-01-02")]),
        (pd.Series(pd.interval_range(0, 1)), [pd.Interval(0, 1)]),
        (
            pd.Series([datetime.date(2024, 1, 2), None], dtype=arrow(pa.date32())),
            [datetime.date(2024, 1, 2), MISSING],
        ),
        (pd.Series([b"u", None], dtype=arrow(pa.binary())), [b"u", MISSING]),
        (
            pd.Series([{"a": 1}, None, {"a": 1}], dtype=arrow(pa.struct([("a", pa.int64())]))),
            [{"a": 1}, MISSING, {"a": 1}],
        ),
        (pd.Series([["u"], None], dtype=arrow(pa.list_(pa.string()))), [["u"], MISSING]),
        (pd.Series([None, None], dtype=arrow(pa.null())), [MISSING, MISSING]),
    ],
    ids=lambda value: str(value.dtype) if isinstance(value, pd.Series) else "",
)
def test_static_values(column: pd.Series, expected: list[Any]) -> None:
    assert_holds(_cells.read(column), expected)
    assert_holds(_cells.read(column[:0]), [])


def test_static_objects() -> None:
    day = datetime.date(2024, 1, 2)
    values = [True, Side.CALL, "x", day, None, NAN, Side.PUT, True]
    cells = _cells.read(objects(values))
    assert_holds(cells, [True, Side.CALL, "x", day, MISSING, MISSING, Side.PUT, True])
    assert cells.n_kinds == 5
    assert_holds(_cells.read(objects([np.bool_(True), True, np.str_("a"), "a"])), [True, True, "a", "a"])
    assert _cells.read(objects([np.bool_(True), True])).n_kinds == 1


def test_equal_instants_of_two_zones_are_two_values() -> None:
    utc = datetime.datetime(2024, 1, 1, 12, tzinfo=datetime.timezone.utc)  # noqa: UP017
    east = utc.astimezone(datetime.timezone(datetime.timedelta(hours=5)))
    cells = _cells.read(objects([utc, east, utc]))
    assert cells.codes is not None
    assert cells.codes.tolist() == [0, 1, 0]


def test_unhashable_objects_are_alike_only_when_they_are_one() -> None:
    one, two = {"a": 1}, {"a": 1}
    cells = _cells.read(objects([one, two, one, {3}]))
    assert cells.codes is not None
    assert cells.codes.tolist() == [0, 1, 0, 2]
    kind = cells.kind(1)
    assert isinstance(kind, StaticKind)
    assert kind.value is two


# ---------------------------------------------------------------- object cells


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.5, None, pd.NA, pd.NaT, NAN], numbers([1.5, None, None, None, None], "f8")),
        ([1, 2], numbers([1, 2], "i8")),
        ([1, 2.5, None], [np.array(1), np.array(2.5), MISSING]),
        ([1, 2.5, 1j], [np.array(1), np.array(2.5), np.array(1j)]),
        ([np.float32(1), np.float32(2)], numbers([1, 2], "f4")),
        ([np.float32(1), 2.0], [np.array(1, "f4"), np.array(2.0)]),
        ([np.int8(1), 200], [np.array(1, "i1"), np.array(200)]),
        ([np.uint16(1)], numbers([1], "i4")),
        ([Decimal("0.07"), Fraction(1, 4)], numbers([0.07, 0.25], "f8")),
        ([NAN, None], [MISSING, MISSING]),
        ([NAN, np.ones(2)], [MISSING, np.ones(2)]),
        ([np.array(1.0), np.array(True)], [np.array(1.0), True]),
        (["a", 1.0, NAN], ["a", np.array(1.0), MISSING]),
        ([np.ones(1), np.ones(1)], [np.ones(1), np.ones(1)]),
        ([np.ones((2, 2)), np.ones(4), None], [np.ones((2, 2)), np.ones(4), MISSING]),
        ([np.ones(2, "f4"), np.ones(2, "f8"), np.ones(2, ">f8")], [np.ones(2, "f4"), np.ones(2), np.ones(2)]),
        ([np.ones(2, "u2"), np.ones(2, "?")], [np.ones(2, "i4"), np.ones(2, "?")]),
        (
            [np.arange(6).reshape(2, 3).T, np.arange(6).reshape(3, 2)],
            [np.arange(6).reshape(2, 3).T, np.arange(6).reshape(3, 2)],
        ),
        ([[1, 2], [1.5], [], (True, False)], [np.array([1, 2]), np.array([1.5]), np.empty(0), np.array([True, False])]),
        ([[[1, 2], [3, 4]], [[1.0, None], [1.0]]], [np.array([[1, 2], [3, 4]]), MISSING]),
        ([[1.0, NAN], [pd.NA]], [np.array([1.0, NAN]), MISSING]),
        ([[np.ones(2), np.zeros(2)], [1j, 2]], [np.array([[1.0, 1], [0, 0]]), np.array([1j, 2])]),
        ([[Decimal("0.5"), 1]], [np.array([0.5, 1])]),
        ([np.array([1.0, None], object), np.array([1, 2], object)], [MISSING, np.array([1, 2])]),
        ([np.ma.array([1.0, 2], mask=[False, True]), np.ma.array([1.0, 2])], [MISSING, np.array([1.0, 2])]),
        ([pd.Series([1.0, NAN]), pd.array([1, None]), pd.array([1])], [np.array([1.0, NAN]), MISSING, np.array([1])]),
        ([pa.array([1.5]), pa.array([1.5, None])], [np.array([1.5]), MISSING]),
        ([np.datetime64("NaT"), "a"], [MISSING, "a"]),
        ([["a", "b"], ("c", "d")], [["a", "b"], ("c", "d")]),
        ([np.empty((0, 3)), np.empty((2, 0))], [np.empty((0, 3)), np.empty((2, 0))]),
        ([], []),
    ],
    ids=str,
)
def test_objects(values: list[Any], expected: list[Any]) -> None:
    column = objects(values)
    assert_holds(_cells.read(column), expected)
    assert all(cell is value for cell, value in zip(column, values, strict=True))


CELLS = st.one_of(
    st.none(),
    st.floats(allow_nan=True),
    st.text(max_size=2),
    st.booleans(),
    st.lists(st.floats(allow_nan=False), max_size=3),
    st.sampled_from([np.dtype("f4"), np.dtype(">f8"), np.dtype("i2")]).flatmap(
        lambda dtype: st.sampled_from([(1,), (2,), (2, 1), (0,)]).map(lambda shape: np.full(shape, 3, dtype))
    ),
)


@given(st.lists(CELLS, max_size=8))
def test_mixed_objects(values: list[Any]) -> None:
    def expected(value: Any) -> Any:
        if value is None or (isinstance(value, float) and value != value):
            return MISSING
        if isinstance(value, np.ndarray):
            return value.astype(value.dtype.newbyteorder("="))
        return value if isinstance(value, (str, bool)) else np.array(value, float)

    assert_holds(_cells.read(objects(values)), [expected(value) for value in values])


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ([[1, 2], [3]], "inner lists differ in length"),
        ([1.0, [2.0]], "inner lists differ in length or depth"),
        ([1.0, "a"], "mixes numbers with other values"),
        (np.array(["a", "b"]), "an array of dtype <U1"),
        (np.array([(1, 2.0)], "i4,f8"), "an array of dtype"),
        (np.array(["2024"], "M8[s]"), "an array of dtype datetime64"),
        (10**400, "does not fit"),
        ([10**400], "does not fit into int64"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_cells_that_make_no_array_are_named(cell: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"column 'x', row 'd': .*{reason}"):
        _cells.read(objects([1.0, 2.0, None, cell]))


def test_leaf_tensors_are_read_as_their_values() -> None:
    leaf = torch.tensor([1.0, 2.0], requires_grad=True)
    values = [
        leaf,
        torch.tensor(3.0, dtype=torch.float64),
        torch.tensor([1.5], dtype=torch.bfloat16),
        [torch.tensor(1.0), torch.tensor(2.0)],
        torch.tensor([1 + 2j]).conj(),
        torch.tensor(True),
    ]
    expected = [
        np.array([1, 2], "f4"),
        np.array(3.0),
        np.array([1.5], "f4"),
        np.array([1, 2], "f4"),
        np.array([1 - 2j], "c8"),
        True,
    ]
    assert_holds(_cells.read(objects(values)), expected)
    assert leaf.requires_grad
    assert leaf.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [t, t], lambda t: objects([t]).to_numpy()])
def test_a_tensor_with_a_graph_is_refused(wrap: Callable[[Any], Any]) -> None:
    raw = torch.tensor(1.0, requires_grad=True)
    with pytest.raises(GraphError, match=r"column 'x', row 'b': the cell carries a graph.*raw values") as caught:
        _cells.read(objects([raw, wrap(raw * 2)]))
    assert caught.value.label == "b"


def test_cell_is_what_python_shows() -> None:
    assert _cells.read(pd.Series([1.5])).cell(0) == 1.5
    assert type(_cells.read(pd.Series([1.5])).cell(0)) is float
    assert _cells.read(pd.Series([1.5, None], dtype="Float64")).cell(1) is pd.NA
    one = np.ones(1)
    assert _cells.read(objects([one])).cell(0) is one
    assert list(_cells.read(arrow_series([[1.0, 2.0]], pa.list_(pa.float64()))).cell(0)) == [1.0, 2.0]  # type: ignore[call-overload]


def test_rows_of_two_kinds_make_no_array() -> None:
    cells = _cells.read(objects([np.ones(2), np.ones(3)]))
    with pytest.raises(ValueError, match="several kinds"):
        cells.take(slice(None))
    with pytest.raises(IndexError, match="kind 2 of 2"):
        cells.kind(2)


def test_reading_imports_neither_torch_nor_dask() -> None:
    program = (
        "import sys, types; package = types.ModuleType('daskgrad'); package.__path__ = [sys.argv[1]];"
        "sys.modules['daskgrad'] = package; import pandas as pd; from daskgrad import _cells, _columns;"
        "_cells.read(pd.Series([[1.0], None, 'a'], dtype=object));"
        "assert not {'torch', 'dask'} & set(sys.modules), set(sys.modules) & {'torch', 'dask'}"
    )
    folder = str(_cells.__file__).rpartition("_cells.py")[0]
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- the way back

BACK = [gradient for _, _, gradient, _ in DTYPES if not isinstance(gradient, str)]
TEXT = [pd.StringDtype(), pd.StringDtype("python"), pd.StringDtype(na_value=np.nan), arrow(pa.string())]


@pytest.mark.parametrize("dtype", [*BACK, *TEXT], ids=str)
def test_empty_and_never_put(dtype: Any) -> None:
    for labels in ([], ["p", "q"]):
        index = pd.Index(labels, name="i", dtype=object)
        column = _columns.empty(dtype, index, ("x", 1))
        assert column.dtype == dtype
        assert column.name == ("x", 1)
        pd.testing.assert_index_equal(column.index, index)
        assert column.isna().all()
        if getattr(dtype, "isnative", True):  # pandas itself unpickles big-endian columns as native ones
            assert pickle.loads(pickle.dumps(column)).dtype == dtype


def test_missing_in_the_dtype_s_own_way() -> None:
    index = pd.RangeIndex(1)
    assert np.isnan(_columns.empty(F4, index, "x").array[0])
    gone = _columns.empty(np.dtype("c16"), index, "x").array[0]
    assert np.isnan(gone.real)
    assert np.isnan(gone.imag)
    assert _columns.empty(pd.Float32Dtype(), index, "x").array[0] is pd.NA
    assert _columns.empty(O, index, "x").array[0] is None
    double = _columns.empty(arrow(pa.float64()), index, "x").array.__arrow_array__()
    assert double.null_count == 1


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype("f2"),
        F4,
        F8,
        np.dtype(">f8"),
        pd.Float32Dtype(),
        pd.Float64Dtype(),
        arrow(pa.float16()),
        arrow(pa.float64()),
    ],
    ids=str,
)
def test_numbers_come_back(dtype: Any) -> None:
    builder = _columns.ColumnBuilder(dtype, pd.Index(LABELS[:6]), "x")
    values = np.array([1.5, NAN])
    builder.put(np.array([4, 1]), values)
    values[:] = 99  # the builder keeps nothing of it
    builder.put(slice(2, 3), np.array([7]))
    cells = _cells.read(builder.finish())
    plain = str((_dtypes.floating(dtype) or F8).str)
    gone: Any = NAN if isinstance(dtype, np.dtype) else None
    assert_holds(cells, numbers([gone, NAN, 7, gone, 1.5, gone], plain))
    assert cells.series.dtype == dtype


def test_too_large_for_float16_is_infinite() -> None:
    builder = _columns.ColumnBuilder(np.dtype("f2"), pd.RangeIndex(1), "x")
    builder.put(slice(None), np.array([1e30]))
    assert builder.finish().tolist() == [float("inf")]


@pytest.mark.parametrize("dtype", [F8, pd.Float64Dtype(), arrow(pa.float64()), arrow(pa.list_(pa.float64()))], ids=str)
def test_complex_does_not_go_into_real(dtype: Any) -> None:
    builder = _columns.ColumnBuilder(dtype, pd.RangeIndex(2), "x")
    shape = (2, 3) if _dtypes.role(dtype) == "array" else (2,)
    with pytest.raises(TypeError, match="complex numbers do not go into a column of float64"):
        builder.put(slice(None), np.ones(shape, complex))


def test_shapes_that_do_not_fit() -> None:
    wrong: list[tuple[Any, tuple[int, ...]]] = [
        (F8, (2, 3)),
        (arrow(pa.list_(pa.float64())), (2,)),
        (arrow(pa.list_(pa.float64())), (2, 3, 3)),
        (arrow(pa.list_(pa.float64(), 2)), (2, 3)),
        (arrow(TENSOR), (2, 3, 2)),
    ]
    for dtype, shape in wrong:
        with pytest.raises(ValueError, match="do not go into a column"):
            _columns.ColumnBuilder(dtype, pd.RangeIndex(2), "x").put(slice(None), np.ones(shape))


@pytest.mark.parametrize("dtype", [np.dtype("i8"), pd.BooleanDtype(), arrow(pa.int8()), arrow(pa.list_(pa.int8()))], ids=str)
def test_no_result_has_such_a_dtype(dtype: Any) -> None:
    with pytest.raises(TypeError, match="no result has the"):
        _columns.ColumnBuilder(dtype, pd.RangeIndex(2), "x")


def test_objects_come_back_as_plain_values() -> None:
    builder = _columns.ColumnBuilder(O, pd.Index(LABELS[:6]), "x")
    batch = np.arange(6.0).reshape(2, 3)
    builder.put(np.array([3, 0]), batch)
    builder.put(np.array([1]), np.array([2.5], "f4"))
    builder.put(np.array([2]), np.array([[7.0]]))
    batch[:] = 99
    found = builder.finish().tolist()
    assert found[0].tolist() == [3.0, 4.0, 5.0]
    assert found[3].tolist() == [0.0, 1.0, 2.0]
    assert found[0].base is None
    assert found[0].flags.owndata
    assert type(found[1]) is float
    assert found[1] == 2.5
    assert found[2].shape == (1,)
    assert found[4] is None
    assert found[5] is None


@pytest.mark.parametrize("dtype", [O, *TEXT], ids=str)
def test_text_comes_back(dtype: Any) -> None:
    builder = _columns.ColumnBuilder(dtype, pd.RangeIndex(3), "problem")
    builder.put(np.array([2, 0]), np.array(["nan", None], object))
    column = builder.finish()
    assert column.dtype == dtype
    assert column.isna().tolist() == [True, True, False]
    assert column.array[2] == "nan"


def round_trip(column: pd.Series) -> pd.Series:
    """Read, take by kinds (last kind first), and put back."""
    cells = _cells.read(column)
    builder = _columns.ColumnBuilder(_dtypes.gradient_dtype(column.dtype), column.index, column.name)
    present = np.ones(len(cells), bool) if cells.missing is None else ~cells.missing
    codes = np.where(present, 0, -1) if cells.codes is None else cells.codes
    for code in reversed(range(cells.n_kinds)):
        if isinstance(cells.kind(code), ArrayKind):
            rows = np.flatnonzero(codes == code)
            builder.put(rows, cells.take(rows))
    return builder.finish()


@pytest.mark.parametrize("name", [name for name in list_kinds() if name != "bool"])
@given(data=st.data())
def test_arrow_lists_there_and_back(name: str, data: st.DataObject) -> None:
    kind, _, cells_of = list_kinds()[name]
    values = data.draw(st.lists(st.none() | cells_of(st.integers(1, 100)), max_size=7))
    column = arrow_series(values, kind, data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2)))
    found = round_trip(column)
    assert found.dtype == _dtypes.gradient_dtype(column.dtype)
    array = found.array.__arrow_array__()
    array.validate(full=True)
    assert array.to_pylist() == values


def test_tensors_there_and_back() -> None:
    found = round_trip(tensors())
    found.array.__arrow_array__().validate(full=True)
    assert found.dtype == arrow(TENSOR)
    assert_holds(_cells.read(found), list(map(grid_or_missing, tensors())))


def grid_or_missing(cell: Any) -> Any:
    return MISSING if np.ndim(cell) == 0 and pd.isna(cell) else np.array(cell, "f4").reshape(2, 3)


@given(st.lists(CELLS.filter(lambda cell: not isinstance(cell, (str, bool))), max_size=8))
def test_objects_there_and_back(values: list[Any]) -> None:
    column = objects(values)
    found = round_trip(column)
    assert found.index.equals(column.index)
    kept = _cells.read(column).missing
    for row, (got, value) in enumerate(zip(found, values, strict=True)):
        if kept is not None and kept[row]:
            assert got is None
        else:
            assert np.shape(got) == np.shape(value)
            np.testing.assert_array_equal(got, value)
