"""Cases from the field about Dask and tables: laziness, dtypes, indexes, Bags, missing values, one bad row."""

from __future__ import annotations

import decimal
from pathlib import Path
from typing import Any

import dask
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import strategies
import torch
from compare import (
    CARRIERS,
    ENGINES,
    assert_cells,
    assert_column,
    assert_declared,
    bag_of,
    computed,
    in_equal_parts,
    object_series,
    on_carrier,
    partitioned,
    slower_is_fine,
)

import daskgrad as dg

Tensor = torch.Tensor
FLOAT64 = np.dtype("float64")
BOTH = ("auto", "loop")


def square(x: Tensor) -> Tensor:
    return x * x


def no_work(*args: Any, **kwargs: Any) -> Any:
    """A scheduler that must not be asked."""
    raise AssertionError("computed at declaration")


# --- c01: lazy ----------------------------------------------------------------------------------------------


CALLS: list[int] = []  # of ``watched``, which is shipped by reference: what it closes over would be a snapshot


def watched(x: Tensor) -> Tensor:
    CALLS.append(1)
    if x != 1.5 and x != 2.5 and x != 4.5:
        raise AssertionError(f"an invented value: {x}")
    return x * x


@pytest.mark.parametrize("kind", ["dataframe", "series", "derivatives", "bag"])
def test_case_c01_nothing_runs_at_declaration(kind: str) -> None:
    """No call at declaration, no compute either on a frame; afterwards only values of the data are seen."""
    frame = pd.DataFrame({"x": [1.5, 2.5, 4.5]})
    lazy = dd.from_pandas(frame, npartitions=2)
    CALLS.clear()
    if kind == "bag":  # whether a Bag may be looked at for its keys is left open
        column = dg.grad_column(bag_of(frame.to_dict("records"), 2), watched)
    else:
        with dask.config.set(scheduler=no_work):
            if kind == "derivatives":
                column = dg.derivatives(lazy, watched, {"g": "x", "v": ()})["g"]
            else:
                column = dg.grad_column(lazy["x"] if kind == "series" else lazy, watched)
    assert CALLS == []
    with slower_is_fine():
        assert_cells(list(column.compute(scheduler="synchronous")), [3.0, 5.0, 9.0])
    assert CALLS


def test_a_declared_column_is_a_snapshot() -> None:
    """Rule 8: the function and shared arguments are taken as they are at the call."""
    scale = torch.tensor(3.0, dtype=torch.float64)
    model = torch.nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(2.0)
    lazy = in_equal_parts(pd.DataFrame({"x": [1.0, 2.0]}), 2)
    column = dg.grad_column(lazy, lambda x, m: (m(x.reshape(1)) * scale).sum(), shared={"m": model})
    with torch.no_grad():
        scale.fill_(0.0)
        model.weight.fill_(0.0)
    assert_cells(list(column.compute(scheduler="synchronous")), [6.0, 6.0])


def test_only_the_columns_that_are_read_are_loaded(tmp_path: Path) -> None:
    """Proved on Parquet: a column whose file bytes are gone is never missed."""
    frame = pd.DataFrame({"x": [1.0, 2.0, 3.0], "y": [1.0, 1.0, 2.0], "big": ["a" * 50] * 3, "other": [1, 2, 3]})
    frame.to_parquet(tmp_path / "part.parquet")
    read = dd.read_parquet(tmp_path)
    column = dg.grad_column(read, lambda x, y: x * x * y)
    plan = column.optimize(fuse=False).expr.tree_repr()
    assert "big" not in plan and "other" not in plan, plan
    assert_cells(list(column.compute(scheduler="synchronous")), [2.0, 4.0, 12.0])


def test_graph_keys_are_deterministic_and_readable() -> None:
    """The same call on the same data gives the same keys; the dashboard shows what runs."""
    lazy = in_equal_parts(pd.DataFrame({"x": [1.0, 2.0]}), 2)
    first, second = (dg.grad_column(lazy, square) for _ in range(2))
    assert first.__dask_keys__() == second.__dask_keys__()
    assert dg.grad_column(lazy, lambda x: x * x * x).__dask_keys__() != first.__dask_keys__()
    names = {str(key[0] if isinstance(key, tuple) else key) for key in first.__dask_graph__()}
    assert any("grad" in name for name in names), names


def test_one_shared_copy_of_the_plan() -> None:
    """Sixteen partitions do not make the graph sixteen models large."""
    import cloudpickle

    model = torch.nn.Linear(1, 100_000, bias=False)
    frame = pd.DataFrame({"x": np.arange(32.0)})

    def size(parts: int) -> int:
        column = dg.grad_column(in_equal_parts(frame, parts), lambda x, m: m(x.reshape(1)).sum(), shared={"m": model})
        return len(cloudpickle.dumps(column.optimize().__dask_graph__()))

    assert size(16) < size(1) + 200_000


# --- c02: arrays turned into text ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["arrays", "lists", "tuples"])
def test_case_c02_text_that_once_was_arrays(kind: str) -> None:
    """Dask's default turns object cells into text: refused at the call with the setting named; never parsed."""
    make: Any = {"arrays": np.array, "lists": list, "tuples": tuple}[kind]
    frame = pd.DataFrame({"pixels": object_series([make([1.0, 2.0]), make([3.0, 4.0])])})
    with dask.config.set({"dataframe.convert-string": True}):
        lazy = dd.from_pandas(frame, npartitions=1)
        with pytest.raises(dg.PlanError) as raised:
            dg.grad_column(lazy, lambda pixels: (pixels**2).sum())
    assert "pixels" in str(raised.value)
    assert "dataframe.convert-string" in str(raised.value)
    with dask.config.set({"dataframe.convert-string": False}):
        got = computed(dg.grad_column(dd.from_pandas(frame, npartitions=1), lambda pixels: (pixels**2).sum()))
    assert_cells(list(got), [[2.0, 4.0], [6.0, 8.0]])


# --- c05: dtypes --------------------------------------------------------------------------------------------

EVERY_DTYPE: dict[str, tuple[Any, Any]] = {
    "float32": ([1.0, 2.0], "float32"),
    "float64": ([1.0, 2.0], "float64"),
    "int64": ([1, 2], "float64"),
    "int8": ([1, 2], "float64"),
    "complex64": ([1 + 1j, 2j], "complex64"),
    "complex128": ([1 + 1j, 2j], "complex128"),
    "Float32": ([1.0, None], "Float32"),
    "Float64": ([1.0, None], "Float64"),
    "Int64": ([1, None], "Float64"),
    "double[pyarrow]": ([1.0, None], "double[pyarrow]"),
    "float[pyarrow]": ([1.0, None], "float[pyarrow]"),
    "int64[pyarrow]": ([1, None], "double[pyarrow]"),
}


@pytest.mark.parametrize("dtype", sorted(EVERY_DTYPE))
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
@pytest.mark.parametrize("engine", ENGINES)
def test_case_c05_dtype_declared_is_dtype_computed(dtype: str, carrier: str, engine: str) -> None:
    cells, want = EVERY_DTYPE[dtype]
    frame = pd.DataFrame({"x": pd.Series(cells, dtype=dtype)})
    got = on_carrier(carrier, frame, lambda data: dg.grad_column(data, lambda x: x.abs() ** 2, engine=engine))
    expected = [None if cell is None else 2 * cell for cell in cells]
    assert_column(got, expected, name="x", dtype=pd.Series([], dtype=want).dtype, index=frame.index, rtol=1e-6)


ARRAY_CELLS: dict[str, Any] = {
    "object of float64 arrays": object_series([np.ones(3), np.arange(3.0), None]),
    "object of float32 arrays": object_series([np.ones(3, "float32"), np.arange(3, dtype="float32"), None]),
    "object of matrices": object_series([np.ones((2, 2)), np.eye(2), None]),
    "object of integer arrays": object_series([np.ones(3, "int64"), np.arange(3), None]),
    "object of lists": object_series([[1.0, 2.0], [3.0, 4.0], None]),
    "list": pd.Series(pd.arrays.ArrowExtensionArray(pa.array([[1.0, 2.0], [3.0, 4.0], None], pa.list_(pa.float64())))),
    "float32 list": pd.Series(pd.arrays.ArrowExtensionArray(pa.array([[1.0, 2.0], [3.0, 4.0], None], pa.list_(pa.float32())))),
    "large list": pd.Series(pd.arrays.ArrowExtensionArray(pa.array([[1.0, 2.0], [3.0, 4.0], None], pa.large_list(pa.float64())))),
    "fixed-size list": pd.Series(pd.arrays.ArrowExtensionArray(pa.array([[1.0, 2.0], [3.0, 4.0], None], pa.list_(pa.float64(), 2)))),
}


@pytest.mark.parametrize("kind", sorted(ARRAY_CELLS))
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
@pytest.mark.parametrize("engine", ENGINES)
def test_case_c05_array_cells_keep_their_column_type(kind: str, carrier: str, engine: str) -> None:
    frame = pd.DataFrame({"x": ARRAY_CELLS[kind].array})
    got = on_carrier(carrier, frame, lambda data: dg.grad_column(data, lambda x: (x**2).sum(), engine=engine))
    expected = [None if cell is None or (np.ndim(cell) == 0 and pd.isna(cell)) else 2.0 * np.asarray(cell) for cell in frame["x"]]
    assert_column(got, expected, name="x", dtype=frame["x"].dtype, index=frame.index, rtol=1e-6)
    if kind.startswith("object"):
        assert np.asarray(got.iloc[0]).dtype == (np.float32 if "float32" in kind else np.float64)


def test_case_c05_integer_and_decimal_in_arrow() -> None:
    whole = pd.Series(pd.arrays.ArrowExtensionArray(pa.array([[1, 2], [3, 4]], pa.list_(pa.int64()))))
    got = dg.grad_column(pd.DataFrame({"x": whole}), lambda x: (x**2).sum())
    assert got.dtype == pd.ArrowDtype(pa.list_(pa.float64()))
    assert_cells(list(got.array), [[2.0, 4.0], [6.0, 8.0]])
    money = pd.Series([decimal.Decimal("1.50"), None], dtype=pd.ArrowDtype(pa.decimal128(10, 2)))
    got = dg.grad_column(pd.DataFrame({"x": money}), square)
    assert_column(got, [3.0, None], name="x", dtype=pd.ArrowDtype(pa.float64()))


def test_case_c05_several_dtypes_at_once() -> None:
    """Each result column has its own argument's dtype, and the DataFrame declares all of them."""
    frame = pd.DataFrame(
        {name: pd.Series(cells, dtype=name) for name, (cells, _) in EVERY_DTYPE.items() if name.islower() and "[" not in name}
    )
    names = list(frame.columns)

    def fn(**cells: Tensor) -> Tensor:
        return torch.stack([(cell.abs() ** 2).double() for cell in cells.values()]).sum()

    source = f"def total({', '.join(names)}):\n    return f({', '.join(f'{n}={n}' for n in names)})\n"
    scope: dict[str, Any] = {"f": fn}
    exec(source, scope)
    lazy = dg.grad_column(partitioned(frame, [(0, 1), (1, 1), (1, 2)]), scope["total"], names)
    got = computed(lazy)
    for name in names:
        assert got[name].dtype == pd.Series([], dtype=strategies.expected_dtype(str(frame[name].dtype))).dtype


def test_inputs_stack_columns_and_give_them_back() -> None:
    """``inputs={"x": [columns]}``: a vector in, those columns out, each with its own dtype."""
    frame = pd.DataFrame({"f0": [1.0, 2.0], "f1": np.array([3, 4], dtype="float32"), "f2": [5, 6]}, index=["p", "q"])
    for data in (frame, in_equal_parts(frame, 2)):
        got = dg.grad_column(data, lambda x: (x**2).sum(), inputs={"x": ["f0", "f1", "f2"]})
        got = got if isinstance(got, pd.DataFrame) else computed(got)
        assert_column(got["f0"], [2.0, 4.0], name="f0", dtype=FLOAT64, index=frame.index)
        assert_column(got["f1"], [6.0, 8.0], name="f1", dtype=np.dtype("float32"), index=frame.index)
        assert_column(got["f2"], [10.0, 12.0], name="f2", dtype=FLOAT64, index=frame.index)


# --- c06, c09: indexes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [7, 7, 7, 7], [3, 1, 3, 0], ["a", "b", "a", "b"]])
@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
def test_case_c06_unknown_divisions_and_assign(engine: str, labels: list[Any], scheduler: str) -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0, 3.0, 4.0], "y": [9.0, 9.0, 9.0, 9.0]}, index=labels)
    lazy = partitioned(frame, [(0, 1), (1, 3), (3, 3), (3, 4)])
    assert not lazy.known_divisions
    got = lazy.assign(g=dg.grad_column(lazy, square, engine=engine)).compute(scheduler=scheduler)
    pd.testing.assert_frame_equal(got, frame.assign(g=[2.0, 4.0, 6.0, 8.0]))


def test_case_c06_known_divisions_are_kept() -> None:
    lazy = dd.from_pandas(pd.DataFrame({"x": [1.0, 2.0, 3.0, 4.0]}), npartitions=3)
    column = dg.grad_column(lazy, square)
    assert column.divisions == lazy.divisions
    assert column.npartitions == lazy.npartitions
    assert_cells(list(column.loc[2:3].compute(scheduler="synchronous")), [6.0, 8.0])


def test_the_result_lines_up_for_a_descent_step() -> None:
    """Rule 1: ``df[cols] - 0.1 * grad_column(...)``."""
    frame = pd.DataFrame({"x": [1.0, 2.0], "y": [3.0, 4.0]}, index=["p", "p"])
    got = frame[["x", "y"]] - 0.1 * dg.grad_column(frame, lambda x, y: x * x + y * y, ["x", "y"]).set_axis(frame.index)
    assert_cells(got.to_numpy().tolist(), [[0.8, 2.4], [1.6, 3.2]])


@pytest.mark.parametrize("engine", ENGINES)
def test_case_c09_multiindex(engine: str) -> None:
    index = pd.MultiIndex.from_tuples([("a", 1), ("a", 1), ("b", 2)], names=["group", "step"])
    frame = pd.DataFrame({"x": [1.0, 2.0, 3.0]}, index=index)
    got = dg.grad_column(frame, square, engine=engine)
    assert_column(got, [2.0, 4.0, 6.0], name="x", dtype=FLOAT64, index=index)
    with slower_is_fine(), pytest.raises(dg.RowError) as raised:
        dg.grad_column(frame, bad_at_three, engine="loop")
    assert raised.value.label == ("b", 2)


def bad_at_three(x: Tensor) -> Tensor:
    if x == 3:
        raise ValueError("three")
    return x * x


def test_case_c09_dask_partitions_that_carry_a_multiindex() -> None:
    index = pd.MultiIndex.from_tuples([("a", 1), ("a", 1), ("b", 2)], names=["group", "step"])
    frame = pd.DataFrame({"x": [1.0, 2.0, 3.0]}, index=index)
    got = dg.grad_column(partitioned(frame, [(0, 2), (2, 3)]), square).compute(scheduler="synchronous")
    assert_column(got, [2.0, 4.0, 6.0], name="x", dtype=FLOAT64, index=index)


def test_labels_that_are_not_text() -> None:
    """A column label may be a tuple or a number; a tuple in ``inputs`` is one label."""
    frame = pd.DataFrame({("a", "b"): [1.0, 2.0], 7: [3.0, 4.0]})
    got = dg.grad_column(frame, lambda x, y: x * x * y, inputs={"x": ("a", "b"), "y": 7})
    assert_column(got, [6.0, 16.0], name=("a", "b"), dtype=FLOAT64)


# --- c10, c11: Bags and emptiness ---------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
def test_case_c10_a_bag_of_mappings(engine: str, scheduler: str) -> None:
    """1 and then 2.5 in another partition: not turned into integers by the first record."""
    got = computed(dg.grad_column(bag_of([{"x": 1}, {"x": 2.5}], 2), square, engine=engine), scheduler)
    assert_column(got, [2.0, 5.0], name="x", dtype=FLOAT64)


def test_case_c10_the_index_is_plain_per_partition() -> None:
    got = computed(dg.grad_column(bag_of([{"x": float(n)} for n in range(4)], 2), square))
    assert list(got.index) == [0, 1, 0, 1]


@pytest.mark.parametrize("rows", [[{"x": 1.0}, {"x": None}, {"x": 2.0}], [{"x": None}, {"x": 1.0}], [1.0, None, 2.0]])
def test_case_c10_none_is_missing(rows: list[Any]) -> None:
    got = computed(dg.grad_column(bag_of(rows, 2), square))
    values = [row["x"] if isinstance(row, dict) else row for row in rows]
    assert_cells(list(got), [None if value is None else 2 * value for value in values])


def test_case_c10_a_key_that_only_comes_later() -> None:
    """Kept, or named as missing: never a silent wrong number."""
    rows: list[dict[str, Any]] = [{"x": 1.0}, {"x": 2.0, "y": 3.0}]
    refusal = ""
    try:
        with slower_is_fine():
            got = list(computed(dg.grad_column(bag_of(rows, 2), lambda x, y: x * x * y)))
    except dg.DaskgradError as error:
        refusal = str(error)
    if refusal:
        assert "y" in refusal
    else:
        assert_cells(got, [None, 12.0])


@pytest.mark.parametrize("engine", ENGINES)
def test_case_c10_whole_row_form(engine: str) -> None:
    got = computed(
        dg.grad_column(
            bag_of([{"x": 1.0, "y": 2.0}, {"x": 3.0, "y": 4.0}], 2),
            lambda row: row["x"] ** 2 * row.y,
            "x",
            engine=engine,
        )
    )
    assert_cells(list(got), [4.0, 24.0])


def empties() -> dict[str, Any]:
    frame = pd.DataFrame({"x": [1.0, 2.0]})
    lazy = in_equal_parts(frame, 2)
    return {
        "pandas": frame.iloc[:0],
        "pandas series": frame["x"].iloc[:0],
        "dask": in_equal_parts(frame.iloc[:0], 1),
        "dask filtered": lazy[lazy.x > 100],
        "dask of empty parts": partitioned(frame, [(0, 0), (0, 0)]),
        "bag": db.from_sequence([{"x": 1.0}], npartitions=1).filter(lambda row: False),
        "an empty bag": db.from_sequence([], npartitions=1),
    }


@pytest.mark.parametrize("kind", sorted(empties()))
@pytest.mark.parametrize("engine", ENGINES)
def test_case_c11_nothing_in_gives_an_empty_float_column(kind: str, engine: str) -> None:
    calls: list[int] = []

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        return x * x

    got = dg.grad_column(empties()[kind], fn, engine=engine)
    got = got if isinstance(got, pd.Series) else computed(got)
    assert_column(got, [], name=got.name, dtype=FLOAT64)
    assert calls == []


def test_case_c11_an_all_missing_column() -> None:
    got = dg.grad_column(pd.DataFrame({"x": pd.Series([None, None], dtype="Float64")}), square)
    assert_column(got, [None, None], name="x", dtype=pd.Float64Dtype())


# --- c15: one bad row ---------------------------------------------------------------------------------------


def fails_by_raise(x: Tensor) -> Tensor:
    if x > 899.5:
        raise ValueError("beyond the model")
    return x * x


def fails_by_assert(x: Tensor) -> Tensor:
    assert x < 899.5, "beyond the model"
    return x * x


def fails_in_torch(x: Tensor) -> Tensor:
    return torch.linalg.cholesky((900 - x + 1e-3 * 0) * torch.eye(2)).sum() + x * x


def fails_by_key(x: Tensor) -> Tensor:
    n = int(x)
    return x * {900: None}.get(n, 2.0)  # type: ignore[operator]


@pytest.mark.parametrize("fn", [fails_by_raise, fails_by_assert, fails_in_torch, fails_by_key])
@pytest.mark.parametrize("engine", BOTH)
@pytest.mark.parametrize("parts", [None, 4])
def test_case_c15_one_bad_row(fn: Any, engine: str, parts: int | None) -> None:
    """1,000 rows, label "q" bad: the message holds it and its partition; the other 999 are kept on request."""
    if fn is fails_by_key:
        values = np.where(np.arange(1000) == 700, 900.0, np.arange(1000) % 7 + 0.5)
    else:
        values = np.where(np.arange(1000) == 700, 900.0, np.arange(1000) / 10)
    labels = [f"r{n}" for n in range(1000)]
    labels[700] = "q"
    frame = pd.DataFrame({"x": values}, index=labels)
    data: Any = frame if parts is None else in_equal_parts(frame, parts)

    def run(**options: Any) -> Any:
        with slower_is_fine():
            got = dg.grad_column(data, fn, engine=engine, **options)
            return got if parts is None else computed(got)

    with pytest.raises(dg.RowError) as raised:
        run()
    assert raised.value.label == "q"
    assert "q" in str(raised.value)
    assert raised.value.__cause__ is not None
    assert float(raised.value.values["x"]) == 900.0
    if parts is not None:
        assert raised.value.partition == 2
        assert "2" in str(raised.value)
    got = run(on_error="null")
    assert pd.isna(got.loc["q"])
    kept = got.drop("q")
    assert len(kept) == 999
    assert np.isfinite(kept.to_numpy()).all()
    if fn in (fails_by_raise, fails_by_assert):
        assert_cells(list(kept), list(2 * np.delete(values, 700)))


def test_the_first_bad_row_of_several_is_named() -> None:
    frame = pd.DataFrame({"x": [1.0, 950.0, 2.0, 960.0]}, index=list("abcd"))
    for engine in BOTH:
        for batch_size in (None, 1, 3):
            with slower_is_fine(), pytest.raises(dg.RowError) as raised:
                dg.grad_column(frame, fails_by_raise, engine=engine, batch_size=batch_size)
            assert raised.value.label == "b"


def test_try_except_in_the_function_sees_each_row_alone() -> None:
    """A batch's error must not send every row down the except path."""

    def fn(x: Tensor) -> Tensor:
        try:
            return torch.linalg.cholesky(x * torch.eye(2)).sum()
        except torch.linalg.LinAlgError:
            return -5 * x

    values = [4.0, -1.0, 9.0, 1.0]
    for engine in BOTH:
        with slower_is_fine():
            got = dg.grad_column(pd.DataFrame({"x": values}), fn, engine=engine)
        assert_cells(list(got), [2 * 0.5 / 2, -5.0, 2 * 0.5 / 3, 1.0])


# --- d01, d06: missing values, static arguments -------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
@pytest.mark.parametrize("dtype", ["Float64", "double[pyarrow]", "Float32"])
def test_case_d01_missing_in_missing_out(engine: str, carrier: str, dtype: str) -> None:
    frame = pd.DataFrame({"x": pd.Series([1.5, None], dtype=dtype)})
    got = on_carrier(carrier, frame, lambda data: dg.grad_column(data, square, engine=engine))
    assert_column(got, [3.0, None], name="x", dtype=frame["x"].dtype, index=frame.index)
    assert got.iloc[1] is pd.NA


@pytest.mark.parametrize("engine", ENGINES)
def test_case_d01_a_missing_value_in_any_column_read(engine: str) -> None:
    """The other column's missing value counts, in whatever kind the result is; fn never sees it."""
    frame = pd.DataFrame(
        {
            "x": [1.0, 2.0, 3.0, 4.0],
            "n": pd.Series([1, None, 3, 4], dtype="Int64"),
            "kind": pd.Series(["call", "put", None, "put"], dtype=object),
            "unread": pd.Series([None, None, None, None], dtype="Float64"),
        }
    )

    def fn(x: Tensor, n: Tensor, kind: str) -> Tensor:
        assert kind in ("call", "put")
        return x * x * n

    with slower_is_fine():
        got = dg.grad_column(frame, fn, engine=engine)
    assert_column(got, [2.0, None, None, 32.0], name="x", dtype=FLOAT64, index=frame.index)


@pytest.mark.parametrize("engine", ENGINES)
def test_case_d01_nan_is_a_number(engine: str) -> None:
    """In a plain float column NaN flows through the arithmetic, even to a finite answer."""
    frame = pd.DataFrame({"x": [np.nan, 2.0]})
    got = dg.grad_column(frame, lambda x: torch.nan_to_num(x) * 0 + 3 * x, engine=engine)
    assert_cells(list(got), [3.0, 3.0])


@pytest.mark.parametrize("engine", ENGINES)
def test_case_d01_missing_inside_a_list_cell(engine: str) -> None:
    frame = pd.DataFrame({"v": object_series([[1.0, 2.0], [1.0, None], None])})
    got = dg.grad_column(frame, lambda v: (v**2).sum(), engine=engine)
    assert_cells(list(got), [[2.0, 4.0], None, None])


@pytest.mark.parametrize("dtype", ["boolean", "bool", "bool[pyarrow]"])
def test_case_d01_booleans_are_refused_in_wrt_and_fine_as_an_input(dtype: str) -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0], "flag": pd.Series([True, False], dtype=dtype)})

    def fn(x: Tensor, flag: Tensor) -> Tensor:
        return torch.where(flag, x * x, 5 * x)

    assert_cells(list(dg.grad_column(frame, fn)), [2.0, 5.0])
    with pytest.raises(dg.PlanError, match="flag"):
        dg.grad_column(frame, fn, "flag")


def dated_frame() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "x": [1.0, 2.0, 3.0],
            "g": pd.Categorical(["a", "b", "a"]),
            "t": pd.to_datetime(["2024-01-01", "2024-07-01", "2025-01-01"]),
            "kind": ["call", "put", "call"],
        }
    )


def by_static(x: Tensor, g: str, kind: str) -> Tensor:
    assert isinstance(g, str)
    if kind == "call":
        return x * x * (2 if g == "a" else 3)
    return -x * {"a": 10, "b": 20}[g]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_case_d06_static_arguments(engine: str, carrier: str) -> None:
    frame = dated_frame()
    got = on_carrier(carrier, frame, lambda data: dg.grad_column(data, by_static, engine=engine))
    assert_column(got, [4.0, -20.0, 12.0], name="x", dtype=FLOAT64, index=frame.index)


@pytest.mark.parametrize("engine", ENGINES)
def test_case_d06_a_date_is_a_python_value(engine: str) -> None:
    got = dg.grad_column(dated_frame(), lambda x, t: x * x * (1 if t.year == 2024 else 5), engine=engine)
    assert_cells(list(got), [2.0, 4.0, 30.0])


@pytest.mark.parametrize("name", ["g", "t", "kind"])
def test_case_d06_a_derivative_by_a_static_column_is_refused_by_name(name: str) -> None:
    frame = dated_frame()
    for data in (frame, in_equal_parts(frame, 2)):
        with pytest.raises(dg.PlanError, match=name):
            dg.grad_column(data, lambda x, g, t, kind: x * x, name)
        with pytest.raises(TypeError, match=name):
            dg.grad_column(data, lambda x, g, t, kind: x * x, ["x", name])


def test_bool_objects_are_python_values() -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0], "flag": object_series([True, False]).array})
    got = dg.grad_column(frame, lambda x, flag: x * x if flag is True else 7 * x)
    assert_cells(list(got), [2.0, 7.0])


# --- binding (design rule 4) --------------------------------------------------------------------------------


def test_binding_errors_list_what_exists_and_guess() -> None:
    frame = pd.DataFrame({"spot": [1.0], "strike": [2.0]})
    with pytest.raises(dg.PlanError) as raised:
        dg.grad_column(frame, lambda spot, strke: spot * strke)
    assert "strke" in str(raised.value) and "strike" in str(raised.value) and "spot" in str(raised.value)
    with pytest.raises(dg.PlanError, match="spott"):
        dg.grad_column(frame, lambda spot, strike: spot * strike, "spott")


def test_binding_order_inputs_shared_column_default() -> None:
    import functools

    frame = pd.DataFrame({"x": [1.0, 2.0], "y": [10.0, 20.0], "z": [100.0, 200.0]})

    def fn(x: Tensor, y: Any = 1000.0) -> Tensor:
        return x * x * y

    assert_cells(list(dg.grad_column(frame, fn)), [20.0, 80.0])
    assert_cells(list(dg.grad_column(frame, fn, inputs={"y": "z"})), [200.0, 800.0])
    assert_cells(list(dg.grad_column(frame, fn, shared={"y": 3.0})), [6.0, 12.0])
    assert_cells(list(dg.grad_column(frame[["x"]], fn)), [2000.0, 4000.0])
    assert_cells(list(dg.grad_column(frame, functools.partial(fn, y=5.0))), [10.0, 20.0])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_whole_row_form(engine: str, carrier: str) -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0], "items": [3.0, 4.0], "two words": [5.0, 6.0]})
    got = on_carrier(
        carrier,
        frame,
        lambda data: dg.grad_column(data, lambda row: row.x**2 * row.items * row["two words"], ["x", "items"], engine=engine),
    )
    assert_cells(got.to_numpy().tolist(), [[30.0, 5.0], [96.0, 24.0]])


def test_whole_row_form_needs_wrt() -> None:
    with pytest.raises(dg.PlanError, match="wrt"):
        dg.grad_column(pd.DataFrame({"x": [1.0]}), lambda row: row.x**2)


def test_two_results_with_one_label_point_to_derivatives() -> None:
    with pytest.raises(dg.PlanError, match="derivatives"):
        dg.grad_column(pd.DataFrame({"x": [1.0]}), lambda a, b: a * b, ["a", "b"], inputs={"a": "x", "b": "x"})


def test_duplicate_column_names_matter_only_when_read() -> None:
    frame = pd.DataFrame([[1.0, 2.0, 3.0]], columns=["x", "y", "y"])
    assert_cells(list(dg.grad_column(frame, square)), [2.0])
    with pytest.raises(dg.PlanError, match="y"):
        dg.grad_column(frame, lambda x, y: x * y)


@pytest.mark.parametrize("ambient", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("engine", ENGINES)
def test_ambient_state_does_not_matter(ambient: Any, engine: str) -> None:
    """Rule 7: grad mode, inference mode, default dtype and device of the caller."""
    frame = pd.DataFrame({"x": [0.25, 0.5]})

    def fn(x: Tensor) -> Tensor:
        return (x * torch.linspace(0, 1, 5)).sum() * torch.tensor(0.1)

    with ambient():
        got = dg.grad_column(frame, fn, engine=engine)
    assert_cells(list(got), [0.25, 0.25], rtol=1e-15)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("meta"):
            got = dg.grad_column(frame, fn, engine=engine)
    finally:
        torch.set_default_dtype(before)
    assert_cells(list(got), [0.25, 0.25], rtol=1e-15)


def test_results_are_plain_numbers() -> None:
    """Rule 12, also for a model that is closed over."""
    model = torch.nn.Linear(1, 1).double()
    got = dg.grad_column(pd.DataFrame({"x": [1.0]}), lambda x: model(x.reshape(1)).sum())
    assert got.dtype == FLOAT64
    assert isinstance(got.iloc[0], float)


def test_declared_dtypes_of_a_frame_of_derivatives() -> None:
    frame = pd.DataFrame({"x": np.array([1, 2], dtype="float32"), "k": [1, 2]})
    lazy = dg.derivatives(in_equal_parts(frame, 2), lambda x, k: x * x * k, {"value": (), "x": "x", "xx": ("x", "x")})
    assert_declared(lazy, lazy.compute(scheduler="synchronous"))
