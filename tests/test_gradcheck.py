"""`gradcheck` tells right from wrong, and raises for no row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from compare import bag_of, in_equal_parts, object_series, slower_is_fine

import daskgrad as dg

Tensor = torch.Tensor


class Wrong(torch.autograd.Function):
    """x² with a backward pass that is off by a tenth."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2.1 * grad * x


def checked(*arguments: Any, **options: Any) -> pd.DataFrame:
    with slower_is_fine():
        found = dg.gradcheck(*arguments, **options)
    assert list(found.columns) == ["argument", "analytic", "loop", "numeric", "difference", "verdict"]
    return found


def smooth(x: Tensor) -> Tensor:
    return (torch.sin(x) * x).sum()


def test_a_wrong_backward_is_found() -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0, -3.0], "y": [1.0, 1.0, 1.0]}, index=["a", "b", "c"])
    found = checked(frame, lambda x, y: Wrong.apply(x) * y, ["x", "y"])
    assert found[found["argument"] == "x"]["verdict"].tolist() == ["differs"] * 3
    assert found[found["argument"] == "y"]["verdict"].tolist() == ["agrees"] * 3
    assert found.index.tolist() == ["a", "a", "b", "b", "c", "c"]
    np.testing.assert_allclose(found[found["argument"] == "x"]["difference"], [0.1, 0.2, 0.3], rtol=1e-6)


@pytest.mark.parametrize("fn", [torch.relu, torch.abs, lambda x: torch.maximum(x, -2 * x), lambda x: x.clamp(0, 1)])
def test_kinks_are_named(fn: Any) -> None:
    found = checked(pd.DataFrame({"x": [0.0, 0.7]}), lambda x: fn(x))
    assert found["verdict"].tolist() == ["kink", "agrees"]


COLUMNS = {
    "float32": pd.Series([0.5, 1.5], dtype="float32"),
    "float16": pd.Series([0.5, 1.5], dtype="float16"),
    "int64": pd.Series([1, 2]),
    "Int64": pd.Series([1, None], dtype="Int64"),
    "Float32": pd.Series([0.5, None], dtype="Float32"),
    "Float64": pd.Series([0.5, None], dtype="Float64"),
    "arrow double": pd.Series([0.5, None], dtype="double[pyarrow]"),
    "arrow int": pd.Series([1, None], dtype="int64[pyarrow]"),
    "object": object_series([0.5, None]).reset_index(drop=True),
    "arrays": object_series([np.array([0.5, 1.0]), None]).reset_index(drop=True),
    "ragged": object_series([np.array([0.5, 1.0]), np.array([1.0])]).reset_index(drop=True),
    "matrices": object_series([np.eye(2), np.ones((2, 2))]).reset_index(drop=True),
    "float32 arrays": object_series([np.array([0.5, 1.0], dtype="float32"), None]).reset_index(drop=True),
    "lists": pd.Series(pd.arrays.ArrowExtensionArray(pa.array([[0.5, 1.0], None]))),
    "empty arrays": object_series([np.array([]), np.array([1.0])]).reset_index(drop=True),
}


@pytest.mark.parametrize("kind", sorted(COLUMNS))
def test_every_dtype(kind: str) -> None:
    column = COLUMNS[kind]
    found = checked(pd.DataFrame({"x": column}), smooth)
    missing = [cell is None or (np.ndim(cell) == 0 and bool(pd.isna(cell))) for cell in column.array]
    assert found["verdict"].tolist() == ["missing" if m else "agrees" for m in missing]


def test_stacked_columns_name_the_element() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    found = checked(frame, lambda v: v[0] * Wrong.apply(v[1]), inputs={"v": ["a", "b"]})
    assert found["argument"].tolist() == ["v[1]", "v[1]"]
    assert found["verdict"].tolist() == ["differs", "differs"]
    assert set(checked(frame, lambda v: v[0] * v[1] ** 2, inputs={"v": ["a", "b"]})["verdict"]) == {"agrees"}


def test_the_element_that_agrees_least_is_shown() -> None:
    frame = pd.DataFrame({"m": object_series([np.arange(1.0, 5.0).reshape(2, 2)])})
    found = checked(frame, lambda m: m[0].sum() + Wrong.apply(m[1]).sum())
    assert found["argument"].tolist() == ["m[1, 1]"]
    assert found["difference"].iloc[0] == pytest.approx(0.4)


def test_rows_that_fail_are_told_not_raised() -> None:
    def fn(x: Tensor) -> Tensor:
        if x < 0:
            raise ValueError("negative")
        return x.sqrt() if x > 0 else x * torch.inf

    found = checked(pd.DataFrame({"x": [-1.0, 4.0, 0.0, np.nan]}), fn)
    assert "ValueError: negative" in found["verdict"].iloc[0]
    assert found["verdict"].tolist()[1:] == ["agrees", "not finite", "not finite"]


def test_a_row_whose_neighbours_fail() -> None:
    def fn(x: Tensor) -> Tensor:
        assert x <= 1
        return x**2

    found = checked(pd.DataFrame({"x": [1.0, 0.5]}), fn)
    assert found["verdict"].tolist() == ["not finite", "agrees"]


@pytest.mark.parametrize("fn", [lambda x: x.detach() ** 2, lambda x: None, lambda x: x.nothing()])
def test_a_function_that_always_fails(fn: Any) -> None:
    found = checked(pd.DataFrame({"x": [1.0, 2.0]}), fn)
    assert not set(found["verdict"]) & {"agrees", "differs", "kink"}
    assert found["verdict"].str.contains("Error").all()


def test_a_vector_is_told_not_raised() -> None:
    found = checked(pd.DataFrame({"x": [1.0, 2.0]}), lambda x: torch.stack([x, x**2]))
    assert set(found["verdict"]) <= {"not finite", "the numeric slope could not be taken"}


def test_complex_cells_are_told_not_raised() -> None:
    found = checked(pd.DataFrame({"z": [3 + 4j, 1 - 1j]}), lambda z: z.abs() ** 2)
    assert found["argument"].tolist() == ["z", "z"]
    assert set(found["verdict"]) == {"complex: not checked by differences"}


def test_dask_series_and_bag() -> None:
    frame = pd.DataFrame({"x": np.linspace(0.1, 3, 30)})
    assert set(checked(in_equal_parts(frame, 5), smooth)["verdict"]) == {"agrees"}
    assert len(checked(in_equal_parts(frame, 5), smooth, rows=9)) == 9
    assert set(checked(in_equal_parts(frame, 2)["x"], smooth)["verdict"]) == {"agrees"}
    assert set(checked(frame["x"], smooth)["verdict"]) == {"agrees"}
    assert set(checked(bag_of([{"x": 0.5}, {"x": None}, {"x": 1.0}], 2), smooth)["verdict"]) == {"agrees", "missing"}
    assert set(checked(bag_of([0.5, 1.0], 1), smooth)["verdict"]) == {"agrees"}


def test_rows_are_drawn_over_the_whole_data_and_not_changed() -> None:
    frame = pd.DataFrame({"x": np.arange(1000.0)})
    before = frame.copy(deep=True)
    found = checked(frame, lambda x: x**2, rows=5)
    assert found.index[0] == 0 and found.index[-1] == 999 and len(found) == 5
    pd.testing.assert_frame_equal(frame, before)


def test_no_rows() -> None:
    assert len(checked(pd.DataFrame({"x": np.zeros(0)}), smooth)) == 0


def test_static_arguments_and_a_function_of_rows() -> None:
    frame = pd.DataFrame({"kind": ["up", "down"], "x": [1.0, 2.0]})
    assert set(checked(frame, lambda x, kind: x**2 if kind == "up" else x**3, "x")["verdict"]) == {"agrees"}
    assert set(checked(frame, lambda row: row.x**2 if row.kind == "up" else -row.x, "x")["verdict"]) == {"agrees"}
