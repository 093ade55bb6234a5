"""Exact comparison of a gradient column with the oracle's answer, and the ways to hand the same rows to daskgrad."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import torch

import daskgrad as dg

ENGINES = ("auto", "vmap", "loop")
LOCAL_SCHEDULERS = ("synchronous", "threads")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4}


@contextmanager
def slower_is_fine() -> Iterator[None]:
    """A block where "slower than it could be" may be said or not: the numbers are what is tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.EngineWarning)
        yield


def assert_cells(got: Sequence[Any], expected: Sequence[Any], rtol: float = 1e-10, atol: float | None = None) -> None:
    """Each cell equals the expected number or array; an expected ``None`` is a missing value."""
    assert len(got) == len(expected)
    for place, (cell, want) in enumerate(zip(got, expected, strict=True)):
        assert not isinstance(cell, torch.Tensor), f"row {place}: a tensor came back"
        if want is None:
            assert np.ndim(cell) == 0 and pd.isna(cell), f"row {place}: {cell!r} is not missing"
            continue
        found = np.array(cell)
        assert found.dtype != object, f"row {place}: {cell!r} is not numeric, expected {want!r}"
        assert found.shape == np.shape(want), f"row {place}: shape {found.shape}, not {np.shape(want)}"
        np.testing.assert_allclose(found, want, rtol=rtol, atol=rtol if atol is None else atol, err_msg=f"row {place}")


def assert_column(
    got: pd.Series[Any],
    expected: Sequence[Any],
    *,
    name: Any,
    dtype: Any,
    index: pd.Index[Any] | None = None,
    rtol: float = 1e-10,
    atol: float | None = None,
) -> None:
    """A column with exactly this name, dtype and index, and these cells."""
    assert isinstance(got, pd.Series), type(got)
    assert got.name == name
    assert got.dtype == dtype, f"{got.dtype} is not {dtype}"
    if index is not None:
        pd.testing.assert_index_equal(got.index, index, exact="equiv")
    assert_cells(list(got.array), expected, rtol, atol)


def partitioned(frame: pd.DataFrame, bounds: Sequence[tuple[int, int]]) -> dd.DataFrame:
    """The frame as a Dask frame of these consecutive parts, with unknown divisions; object cells stay as they are."""
    parts = [frame.iloc[start:stop] for start, stop in bounds]
    with dask.config.set({"dataframe.convert-string": False}):
        lazy: dd.DataFrame = dd.from_map(_Part(parts), list(range(len(parts))), meta=frame.iloc[:0])
        return lazy


class _Part:
    """Picks one part; its own class, so that Dask reads no signature of ours."""

    def __init__(self, parts: list[pd.DataFrame]) -> None:
        self.parts = parts

    def __call__(self, place: int) -> pd.DataFrame:
        return self.parts[place]


def in_equal_parts(frame: pd.DataFrame, npartitions: int) -> dd.DataFrame:
    """The frame through ``from_pandas``, object cells kept."""
    with dask.config.set({"dataframe.convert-string": False}):
        lazy: dd.DataFrame = dd.from_pandas(frame, npartitions=npartitions, sort=False)
        return lazy


def bag_of(rows: Sequence[Any], npartitions: int) -> db.Bag:
    """The rows as a Bag."""
    bag: db.Bag = db.from_sequence(list(rows), npartitions=npartitions)
    return bag


def computed(column: Any, scheduler: Any = "synchronous") -> Any:
    """The pandas form of a lazy result, after a look at what it declared: dtypes and names must come true."""
    with dask.config.set(scheduler=scheduler) if isinstance(scheduler, str) else _client_is_default(scheduler):
        found = column.compute()
    assert_declared(column, found)
    return found


@contextmanager
def _client_is_default(client: Any) -> Iterator[None]:
    with dask.config.set(scheduler=client):
        yield


def assert_declared(column: Any, found: Any) -> None:
    """What the lazy column said of itself is what came: name(s), dtype(s), index name."""
    if isinstance(found, pd.Series):
        assert column.name == found.name
        assert column.dtype == found.dtype, f"declared {column.dtype}, computed {found.dtype}"
    else:
        assert list(column.columns) == list(found.columns)
        pd.testing.assert_series_equal(column.dtypes, found.dtypes)
    assert column._meta.index.name == found.index.name


# Every way to hand a pandas frame over, by name, for tests that say "every carrier".
CARRIERS: dict[str, Callable[..., Any]] = {
    "pandas": lambda frame, verb: verb(frame),
    "dask(1)": lambda frame, verb: computed(verb(in_equal_parts(frame, 1))),
    "dask(3)": lambda frame, verb: computed(verb(in_equal_parts(frame, 3)), "threads"),
    "dask unknown divisions, an empty part": lambda frame, verb: computed(verb(partitioned(frame, [(0, 1), (1, 1), (1, len(frame))]))),
}


def on_carrier(carrier: str, frame: pd.DataFrame, verb: Callable[[Any], Any]) -> Any:
    """``verb`` applied to the frame in this carrier; a pandas object, the frame untouched."""
    before = frame.copy(deep=True)
    found = CARRIERS[carrier](frame, verb)
    pd.testing.assert_frame_equal(frame, before)
    return found


def object_series(values: Sequence[Any]) -> pd.Series[Any]:
    """One object per cell, none of them opened, labelled "row 0", "row 1", …"""
    array = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):
        array[place] = value
    return pd.Series(array, index=pd.Index([f"row {place}" for place in range(len(values))], dtype="str"))


def run_script(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python runs the script with the daskgrad under test; a hang fails by the time limit."""
    house = str(Path(dg.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [house, os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=script.parent,
        env={**os.environ, "PYTHONPATH": path},
    )


def values_of(column: Any) -> list[float]:
    """The numbers of a column, missing ones as NaN."""
    return [float("nan") if pd.isna(cell) else float(cell) for cell in column]
