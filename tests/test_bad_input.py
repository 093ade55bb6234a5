"""Bad input: frames, functions and calls that nobody would write on purpose.

Whatever is drawn: the answer of a closed form, or a `DaskgradError`; in time, and with the input as it was. How many were
tried is counted and said at the end of the run.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import enum
import fractions
import itertools
import math
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from compare import partitioned
from counting import tried
from hypothesis import given
from hypothesis import strategies as st

import daskgrad as dg

SECONDS = 240  # for one call; what takes longer hangs


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Fail where the block does not end."""

    def hang(*_: Any) -> None:
        raise AssertionError(f"not within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives: its result, or the `DaskgradError`; anything else goes up."""
    with warnings.catch_warnings(), bounded():
        warnings.simplefilter("ignore")  # slower, or Dask's and pandas' own about odd frames: what is tested is the answer
        try:
            return call()
        except dg.DaskgradError as error:
            return error


# -------------------------------------------------------------------------------- cells


class Odd:
    """An object that nothing is known of, and that has no repr."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> Any:
        raise ValueError("never compare")

    def __hash__(self) -> int:
        return 7

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Colour(enum.Enum):
    RED = 1


NUMBERS_64 = [0.0, -0.0, 1.5, -2.25, 3.0, 1e-300, 5e-324, 1e154, 1e308, -1e308, math.inf, -math.inf, math.nan]
NUMBERS_32 = [0.0, -0.0, 1.5, -2.25, 3.0, 1e-45, 1e19, 3e38, math.inf, -math.inf, math.nan]
WHOLE = [0, 1, -1, 2, 100, -100]

PLAIN: dict[str, Sequence[Any]] = {
    "float64": NUMBERS_64,
    "float32": NUMBERS_32,
    "float16": [0.0, 1.5, -2.25, math.inf, math.nan],
    "Float64": [*NUMBERS_64[:-1], None],
    "Float32": [*NUMBERS_32[:-1], None],
    "double[pyarrow]": [*NUMBERS_64[:-1], None],
    "float[pyarrow]": [*NUMBERS_32[:-1], None],
    "int8": WHOLE,
    "int16": [*WHOLE, 2**15 - 1],
    "int32": [*WHOLE, -(2**31)],
    "int64": [*WHOLE, 2**63 - 1, -(2**63)],
    "uint8": [0, 1, 255],
    "uint16": [0, 1, 65535],
    "uint32": [0, 1, 2**32 - 1],
    "uint64": [0, 1, 2**53 + 1],
    "Int64": [*WHOLE, None],
    "UInt8": [0, 255, None],
    "int64[pyarrow]": [*WHOLE, None],
    "Sparse[float64]": [0.0, 0.0, 1.5, math.nan],
}
"""Columns that can be differentiated, and what they may hold; None is missing."""

ARRAYS: list[Any] = [[1.0, 2.0], [3.0], [], [math.inf, 1.0], np.arange(3.0), np.zeros((2, 3)), np.float32([1, 2]), np.array(2.0), None]
"""Cells of an object column whose gradients are known: of their own shape."""

STRANGE: list[Any] = [
    None, math.nan, pd.NA, pd.NaT, True, False, 0, 1.5, -3, 10**30, 10**400, 2 + 3j, np.float32(1.5), np.int8(3), np.bool_(True),
    np.longdouble(1.5), decimal.Decimal("1.5"), decimal.Decimal("NaN"), fractions.Fraction(1, 3), "", "text", "1.5", "nan", b"bytes",
    bytearray(b"x"), [], [1, 2], [1, None], [1, "a"], [[1, 2], [3]], [[1.0], [2.0]], [True, False], (), (1.0, 2.0), {}, {"a": 1},
    {1, 2}, frozenset(), range(3), [10**400], [math.nan], [[], []], [None], [pd.NA, 1.0], ["a"], [{}], np.array(["a"]),
    np.array([], dtype=float),
    np.array([None]), np.array([1.0, None], dtype=object), np.array([1, 2], dtype="datetime64[s]"), np.zeros((0, 3)), np.zeros((2, 0)),
    np.ma.masked, np.ma.array([1.0, 2.0], mask=[True, False]), np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    torch.tensor(2.0), torch.tensor([1, 2]), torch.ones(2, dtype=torch.bfloat16), torch.ones(2).to_sparse(), torch.tensor([1 + 1j]),
    datetime.date(2024, 1, 1), datetime.datetime(2024, 1, 1), datetime.timedelta(1), pd.Timestamp("2024"), pd.Timedelta("1D"),
    pd.Interval(0, 1), pd.Period("2024"), pd.Series([1.0]), pd.DataFrame({"a": [1.0]}), Colour.RED, Odd("x"), Odd, len, ..., NotImplemented,
    float, np.float64, "\x00", "\ud800", "x" * 10_000,
]  # fmt: skip
"""What may stand in an object column."""

WHOLE_COLUMNS: list[Callable[[int], Any]] = [
    lambda n: pd.Series([True, False] * n).iloc[:n].reset_index(drop=True),
    lambda n: pd.Series([True, None] * n, dtype="boolean").iloc[:n].reset_index(drop=True),
    lambda n: pd.Series(["a", None] * n, dtype="str").iloc[:n].reset_index(drop=True),
    lambda n: pd.Series(["a", "b"] * n, dtype="category").iloc[:n].reset_index(drop=True),
    lambda n: pd.Series([1.5, 2.5] * n, dtype="category").iloc[:n].reset_index(drop=True),
    lambda n: pd.Series(pd.date_range("2024", periods=n, tz="Europe/Berlin")),
    lambda n: pd.Series(pd.to_timedelta(np.arange(n), unit="s")),
    lambda n: pd.Series(pd.period_range("2024", periods=n, freq="D")),
    lambda n: pd.Series(pd.interval_range(0, n, periods=n) if n else pd.IntervalIndex([])),
    lambda n: pd.Series(np.arange(n) + 1j),
    lambda n: pd.Series(np.arange(n, dtype=np.longdouble)),
    lambda n: pd.Series(np.arange(n), dtype=np.dtype(">f8")),
    lambda n: pd.Series(np.arange(n), dtype=np.dtype(">i4")),
    lambda n: arrow([[1.0, 2.0], None, []], pa.list_(pa.float64()), n),
    lambda n: arrow([[1.0, None], [3.0]], pa.large_list(pa.float32()), n),
    lambda n: arrow([[1.0, 2.0], None], pa.list_(pa.float64(), 2), n),
    lambda n: arrow([[[1.0], [2.0, 3.0]]], pa.list_(pa.list_(pa.float64())), n),
    lambda n: arrow([{"a": 1.0}], pa.struct([("a", pa.float64())]), n),
    lambda n: arrow([[("k", 1.0)]], pa.map_(pa.string(), pa.float64()), n),
    lambda n: arrow([decimal.Decimal("1.50"), None], pa.decimal128(10, 2), n),
    lambda n: arrow([b"x", None], pa.binary(), n),
    lambda n: arrow([1, None], pa.duration("s"), n),
    lambda n: arrow([None], pa.null(), n),
    lambda n: arrow(["a", None], pa.dictionary(pa.int8(), pa.string()), n),
    lambda n: arrow([datetime.date(2024, 1, 1)], pa.date32(), n),
]  # fmt: skip
"""Columns of other dtypes, by their length."""


def arrow(cells: list[Any], kind: Any, rows: int) -> pd.Series[Any]:
    """A column that repeats `cells`."""
    return pd.Series(pd.arrays.ArrowExtensionArray(pa.array(list(itertools.islice(itertools.cycle(cells), rows)), type=kind)))


def objects(cells: Sequence[Any]) -> pd.Series[Any]:
    """An object column of these very cells."""
    column = np.empty(len(cells), object)
    for place, cell in enumerate(cells):
        column[place] = cell
    return pd.Series(column, dtype=object)


LABELS: list[Any] = [
    "x", "", " ", "a b", "row", "self", "fn", "x.y", "x[0]", "*", "mod*", "__class__", "__len__", "\n", "{x}", "%s", "ß", "日本", "𝔁",
    "\x00", "x" * 3000,
    None, pd.NA, pd.NaT, math.nan, True, False, 0, 1, -1, 10**30, 1.5, math.inf, 1j, b"x", (), ("x",), ("x", "y"), (("x",), 1),
    frozenset({1}), pd.Timestamp("2024"), pd.Timedelta("1D"), pd.Interval(0, 1), datetime.date(2024, 1, 1), Colour.RED, np.int64(3),
    np.bool_(True), decimal.Decimal(1), float, range(3), "index", "values", "problem", "norm(x)",
]  # fmt: skip
"""What may be the name of a column."""

INDEXES: list[Callable[[int], Any]] = [
    pd.RangeIndex,
    lambda n: pd.Index([None, math.nan, pd.NA, "a", 1, True] * n, dtype=object)[:n],
    lambda n: pd.Index([0] * n, name=(1, 2)),
    lambda n: pd.Index([math.nan] * n, name=None),
    lambda n: pd.MultiIndex.from_arrays([[1] * n, [None] * n], names=["a", "a"]),
    lambda n: pd.CategoricalIndex(["a"] * n),
    lambda n: pd.date_range("2024", periods=n, tz="Europe/Berlin", name="x"),
    lambda n: pd.interval_range(0, max(n, 1))[:n],
    lambda n: pd.Index(np.arange(n)[::-1], name=pd.NA),
    lambda n: pd.Index([(1, 2)] * n, tupleize_cols=False),
    lambda n: pd.Index([1 + 1j] * n),
]


# -------------------------------------------------------------------------------- what is right


def size(value: Any) -> Any:
    """Σ v² of what is a number or an array, and 1 of all else: the row function of most of these tests."""
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
        return 1.0
    value = value * 1.0  # an integer that is not differentiated arrives as one, and would overflow as one
    return (value * value).sum()


def both(a: Any, b: Any) -> Any:
    return size(a) * (1 + size(b))


@dataclass(frozen=True)
class Cell:
    """A cell, as what the rules make of it: a number or an array (`number`), missing, or anything (`known` is False).

    `floating`: the dtype it is computed in; None: an integer, which goes with the others.
    """

    number: Any = None
    floating: str | None = None
    known: bool = True

    @property
    def missing(self) -> bool:
        return self.known and self.number is None


ANYTHING = Cell(known=False)


def right(a: Cell, b: Cell) -> Any:
    """d both / d a; None where it is missing, ANYTHING where only a `DaskgradError` could be wrong."""
    if not a.known or not b.known:
        return ANYTHING
    if a.missing or b.missing:
        return None
    default = a.floating or b.floating or "f8"
    with np.errstate(all="ignore"):
        x, y = np.asarray(a.number).astype(a.floating or "f8"), np.asarray(b.number).astype(b.floating or default)
        upstream = (1 + (y * y).sum(dtype=y.dtype)).astype(x.dtype)
        return upstream * x + upstream * x  # as reverse mode adds it: inf and nan come out alike


def assert_right(got: Any, want: Any, least: int, where: str) -> None:
    """`least`: bytes of the narrowest dtype in it."""
    if want is ANYTHING:
        assert not isinstance(got, torch.Tensor), where
    elif want is None:
        assert np.ndim(got) == 0 and pd.isna(got), f"{where}: {got!r} is not missing"
    else:
        found = np.asarray(got, dtype=np.float64)
        assert found.shape == want.shape, f"{where}: shape {found.shape}, not {want.shape}"
        rtol = {2: 3e-2, 4: 1e-5, 8: 1e-12}[least]
        right = want.astype(np.float64)
        close = np.isclose(found, right, rtol=rtol, atol=1e-300 if rtol < 1e-6 else 1e-6, equal_nan=True)
        assert close.all(), f"{where}: {found.tolist()}, not {right.tolist()}"


# -------------------------------------------------------------------------------- drawing


FLOATING = {"float16": "f2", "float32": "f4", "Float32": "f4", "float[pyarrow]": "f4"}


@st.composite
def columns(draw: st.DrawFn, rows: int) -> tuple[pd.Series[Any], list[Cell]]:
    """A column and its cells."""
    kind = draw(st.sampled_from(["plain", "plain", "plain", "arrays", "strange", "mixed", "whole"]))
    if kind == "plain":
        dtype = draw(st.sampled_from(sorted(PLAIN)))
        cells = draw(st.lists(st.sampled_from(PLAIN[dtype]), min_size=rows, max_size=rows))
        floating = None if "int" in dtype.lower() else FLOATING.get(dtype, "f8")
        return pd.Series(cells, dtype=dtype), [Cell(cell, floating) for cell in cells]
    if kind == "arrays":
        cells = draw(st.lists(st.sampled_from(ARRAYS), min_size=rows, max_size=rows))
        return objects(cells), [Cell(cell, np.asarray(cell, dtype=getattr(cell, "dtype", "f8")).dtype.str[1:]) for cell in cells]
    if kind == "whole":
        return draw(st.sampled_from(WHOLE_COLUMNS))(rows), [ANYTHING] * rows
    some = draw(st.lists(st.sampled_from(STRANGE), min_size=1, max_size=2)) if kind == "strange" else STRANGE
    return objects([draw(st.sampled_from(some)) for _ in range(rows)]), [ANYTHING] * rows


class Drawn:
    """A frame, which of its columns feed `a` and `b`, and what they hold."""

    def __init__(self, frame: pd.DataFrame, a: Any, b: Any, cells: list[tuple[Cell, Cell]]) -> None:
        self.frame, self.a, self.b, self.cells = frame, a, b, cells

    def __repr__(self) -> str:
        shown = [f"{column.dtype}: {pickle_or_repr(list(column))}" for _, column in self.frame.items()]
        return f"Drawn(labels={list(self.frame.columns)!r}, a={self.a!r}, b={self.b!r}, index={self.frame.index!r},\n  " + "\n  ".join(
            shown
        )


def pickle_or_repr(cells: list[Any]) -> str:
    try:
        return repr(cells)
    except Exception:
        return "cells without a repr"


@st.composite
def frames(draw: st.DrawFn) -> Drawn:
    rows = draw(st.sampled_from([0, 1, 2, 3, 7]))
    made = [draw(columns(rows)) for _ in range(draw(st.integers(2, 4)))]
    labels = [draw(st.sampled_from(LABELS)) for _ in made]
    index = draw(st.sampled_from(INDEXES))(rows)
    frame = pd.concat([column for column, _ in made], axis=1)
    frame.index = index
    frame.columns = pd.Index(labels, dtype=object, tupleize_cols=False)
    return Drawn(frame, labels[0], labels[1], list(zip(made[0][1], made[1][1], strict=True)))


def stands_once(label: Any, frame: pd.DataFrame) -> bool:
    return sum(same_label(label, other) for other in frame.columns) == 1


def same_label(one: Any, other: Any) -> bool:
    return one is other or (hash(one) == hash(other) and one == other)


def snapshot(frame: pd.DataFrame) -> Any:
    """What must be as it was."""
    columns = [frame.iloc[:, k] for k in range(frame.shape[1])]
    return [*map(id, frame.columns)], frame.index.copy(), [(str(column.dtype), [content(cell) for cell in column]) for column in columns]


def assert_as_before(now: Any, before: Any) -> None:
    assert now[0] == before[0]
    assert (len(now[1]), now[1].dtype, repr(now[1])) == (len(before[1]), before[1].dtype, repr(before[1]))
    assert now[2] == before[2]


def content(cell: Any) -> Any:
    """What is in a cell, by value where it could be written into, by identity elsewhere."""
    if isinstance(cell, torch.Tensor):
        return (cell.dtype, cell.shape, cell.requires_grad, cell._version, cell.to_dense().tolist())
    if type(cell) is np.ndarray and cell.dtype != object:
        return (str(cell.dtype), cell.shape, cell.tobytes())
    if isinstance(cell, list | tuple) or (type(cell) is np.ndarray and cell.ndim):
        return [content(part) for part in cell]
    return repr(cell) if isinstance(cell, float | int | dict | set | bytearray) else type(cell)


# -------------------------------------------------------------------------------- the tests


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "engine": st.sampled_from(["auto", "vmap", "loop"]),
        "batch_size": st.sampled_from([None, 1, 2, 1000]),
        "on_error": st.sampled_from(["raise", "null"]),
    },
)


@given(drawn=frames(), options=OPTIONS, parts=st.sampled_from([0, 0, 1, 2]), rowwise=st.booleans())
def test_any_frame(drawn: Drawn, options: dict[str, Any], parts: int, rowwise: bool) -> None:
    """Every dtype, label, index and cell: right, or refused in words; the frame is as it was."""
    frame = drawn.frame
    before = snapshot(frame)
    cut = len(frame) // max(parts, 1)
    bounds = [(0, cut), (cut, len(frame))] if parts == 2 else [(0, len(frame))]

    def call() -> Any:
        data = partitioned(frame, bounds) if parts else frame
        if rowwise:
            column = dg.grad_column(data, lambda row: both(row[drawn.a], row[drawn.b]), [drawn.a], **options)
            column = column[column.columns[0]] if parts else column.iloc[:, 0]
        else:
            column = dg.grad_column(data, both, "a", inputs={"a": drawn.a, "b": drawn.b}, **options)
        return column.compute(scheduler="synchronous") if parts else column

    try:
        got = outcome(call)
    except Exception as error:
        if parts and not isinstance(error, AssertionError) and not ours(error):
            tried["frames that Dask itself cannot carry"] += 1
            return
        raise
    tried["frames refused" if isinstance(got, Exception) else "frames right"] += 1
    assert_as_before(snapshot(frame), before)
    if isinstance(got, Exception):
        return
    assert len(got) == len(frame)
    if same_label(drawn.a, drawn.b):
        return  # one column twice: its gradient is that by `a` alone
    unread = rowwise and all(np.ndim(cell) == 0 and pd.isna(cell) for cell in got)  # a row whose first cell is missing ends there
    assert unread or (stands_once(drawn.a, frame) and stands_once(drawn.b, frame)), "read, and there twice"
    for place, (cell, (a, b)) in enumerate(zip(got.array, drawn.cells, strict=True)):
        least = min(np.dtype(known.floating or "f4").itemsize for known in (a, b))  # an integer becomes what other columns are
        assert_right(cell, right(a, b), least, f"row {place}")


def ours(error: BaseException) -> bool:
    """Whether the exception comes out of daskgrad's own code."""
    trace, files = error.__traceback__, []
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return "/daskgrad/" in files[-1] or "/torch/" in files[-1]


# -------------------------------------------------------------------------------- functions


class Odder(Exception):
    """An exception that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def raises(error: Any) -> Any:
    raise error


RIGHT: list[Callable[[Any], Any]] = [
    lambda x: x * x,
    lambda x: [x * x][0],
    lambda x: (x * x).reshape(1, 1).squeeze(),
    lambda x: sum(x for _ in range(2)) * x / 2,
    lambda x: torch.stack([x, x]).prod(),
    lambda x: (x.clone() if x > 0 else x + 0.0) * x,
    lambda x: torch.where(x > 0, x * x, x.square()),
    lambda x: x.pow(2) + torch.tensor(3.0).to(x.dtype),
]
"""Functions whose derivative is 2x."""

WRONG: list[Callable[[Any], Any]] = [
    lambda x: None,
    lambda x: "text",
    lambda x: 1.0,
    lambda x: {"a": x},
    lambda x: {x},
    lambda x: x.item(),
    lambda x: float(x) * 2,
    lambda x: x.detach() * 2,
    lambda x: x.numpy(),
    lambda x: torch.tensor(float(x)),
    lambda x: x > 0,
    lambda x: x.long(),
    lambda x: x.to(torch.complex64),
    lambda x: torch.zeros(3),
    lambda x: np.sin(x),
    lambda x: (x for _ in range(2)),
    lambda x: x.sparse,
    lambda x: x["a"],
    lambda x: raises(ValueError("plain")),
    lambda x: raises(Odder()),
    lambda x: raises(dg.PlanError("the user's own")),
    lambda x: raises(StopIteration()),
    lambda x: raises(RecursionError()),
    lambda x: raises(MemoryError()),
    lambda x: len,
    lambda: 1.0,
    lambda *x: x,
    lambda x, missing: x,
    "no function",
    None,
    len,
    torch.nn.Linear,
]  # type: ignore[list-item]
"""What is no differentiable function of a row."""


@given(
    fn=st.sampled_from([*RIGHT, *WRONG]),
    values=st.lists(st.sampled_from([0.5, -2.0, 3.0]), min_size=1, max_size=4),
    options=OPTIONS,
    parts=st.sampled_from([0, 0, 1, 2]),
)
def test_any_function(fn: Any, values: list[float], options: dict[str, Any], parts: int) -> None:
    """What is a function of a row gives its derivative; all else is refused, or a missing result where that was asked for."""
    frame = pd.DataFrame({"x": values})
    before = snapshot(frame)

    def call() -> Any:
        data = partitioned(frame, [(0, 1), (1, len(frame))] if parts == 2 else [(0, len(frame))]) if parts else frame
        column = dg.grad_column(data, fn, **options)
        return column.compute(scheduler="synchronous") if parts else column

    got = outcome(call)
    assert_as_before(snapshot(frame), before)
    tried["functions refused" if isinstance(got, Exception) else "functions right"] += 1
    if isinstance(got, Exception):
        assert fn not in RIGHT, got
    elif fn in RIGHT:
        np.testing.assert_allclose(got.to_numpy(), 2 * np.array(values), rtol=1e-12)
    else:
        assert options.get("on_error") == "null"
        assert got.isna().all()


class Unshowable:
    """A label that has no repr."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def picky(x: torch.Tensor) -> torch.Tensor:
    if x < 0:
        raise ValueError("below zero")
    return x**2


@pytest.mark.parametrize(
    ("index", "text"),
    [([10, 20], "row 20"), ([(1, "a"), (2, "b")], r"row \(2, 'b'\)"), ([Unshowable(), Unshowable()], "row <Unshowable whose repr fails")],
    ids=["numbers", "tuples", "no repr"],
)
def test_a_row_is_named_by_its_label_as_its_user_wrote_it(index: list[Any], text: str) -> None:
    labels = pd.MultiIndex.from_tuples(index) if isinstance(index[0], tuple) else pd.Index(index)
    with pytest.raises(dg.RowError, match=text):
        dg.grad_column(pd.DataFrame({"x": [1.0, -1.0]}, index=labels), picky)
