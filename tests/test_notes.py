"""What the gradient page is told of a part: who looks changes nothing, and a row that failed is told among any that are not finite."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from programs import wait_until

import daskgrad as dg
from daskgrad._watch._notes import Notes


class Silent:
    """Of labels, the one that no message can show."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no str")


def trouble(notes: Notes) -> list[list[str]]:
    return list(notes.record()["trouble"])


def test_a_row_that_failed_is_told_among_many_that_are_not_finite() -> None:
    notes = Notes(pd.Index(np.arange(100) * 2), 0, [])
    values = np.ones(10)
    values[[3, 5]] = np.nan
    for batch in range(10):
        for column in "abcde":
            notes.put(column, slice(10 * batch, 10 * batch + 10), values, gradient=True)
    notes.fail(50, ValueError("the failure"))
    told = trouble(notes)
    assert ["failed", "100", "ValueError: the failure"] in told
    rows = [label for kind, label, _ in told if kind == "not finite"]
    assert len(rows) == len(set(rows)) > 1  # each row once, not by each of its columns
    assert told[0] == ["not finite", "6", "a is nan"]


def test_a_row_is_not_finite_by_any_column_and_counts_once() -> None:
    notes = Notes(pd.RangeIndex(4), 0, [])
    notes.put("a", slice(0, 4), np.array([1, np.inf, 2, 3.0]), gradient=True)
    notes.put("b", slice(0, 4), np.array([1, np.nan, -np.inf, 3.0]), gradient=True)
    record = notes.record()
    assert record["bad"] == 2
    assert [record["columns"][name][1] for name in "ab"] == [1, 2]
    assert record["trouble"] == [["not finite", "1", "a is inf"], ["not finite", "2", "b is -inf"]]


@pytest.mark.parametrize(
    ("values", "bad"),
    [(np.full(4, 1e308), 0), (np.array([np.inf, -np.inf, 1, 2]), 2), (np.full((4, 3), 1e200), 0), (np.full(4, 3e38, np.float32), 0)],
    ids=["sum", "infinities", "norm", "float32"],
)
def test_looking_warns_of_nothing(values: Any, bad: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        notes = Notes(pd.RangeIndex(4), 0, [])
        notes.put("a", slice(0, 4), values, gradient=True)
    assert notes.record()["bad"] == bad


@pytest.mark.parametrize(
    ("label", "text"),
    [(np.int64(7), "7"), ("7", "'7'"), ((np.int64(7), "b"), "(7, 'b')"), (Silent(), "<Silent whose repr fails: RuntimeError>")],
)
def test_labels_are_told_as_their_user_wrote_them(label: Any, text: str) -> None:
    index = pd.MultiIndex.from_tuples([label]) if isinstance(label, tuple) else pd.Index([label])
    notes = Notes(index, 0, [])
    notes.put(label, slice(0, 1), np.ones(1), gradient=True)
    notes.fail(0, SilentError())
    assert trouble(notes) == [["failed", text, "SilentError: (its message cannot be shown: RuntimeError)"]]


def fragile(x: torch.Tensor) -> torch.Tensor:
    if x < 0:
        raise SilentError
    return x**2


def steep(x: torch.Tensor) -> torch.Tensor:
    return x * 1e308


@pytest.mark.cluster
def test_a_computation_ends_alike_with_and_without_the_page() -> None:
    """Also where the workers take warnings for errors, and a failure has no words."""

    def strict() -> None:
        warnings.simplefilter("error", RuntimeWarning)

    def slope(fn: Callable[..., Any]) -> list[float]:
        frame = pd.DataFrame({"x": [1.0, -1.0, 1.5, 1.25]}, index=[10, 20, 30, 40])
        table = dg.derivatives(dd.from_pandas(frame, npartitions=2), fn, {"d": "x"}, on_error="null")
        return [float(value) for value in table["d"].compute()]

    with dg.local_client(n_workers=1, dashboard_port=0) as client:
        client.run(strict)
        alone = slope(fragile), slope(steep)
        with dg.monitor(client) as page:
            watched = slope(fragile), slope(steep)
            wait_until(lambda: "4 of 4" in page._repr_html_(), "the page has heard of it")
    np.testing.assert_array_equal(alone, [[2, np.nan, 3, 2.5], [1e308] * 4])
    np.testing.assert_array_equal(watched, alone)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_quantiles_are_nearer_than_a_bin_is_wide(share: float) -> None:
    """Of magnitudes that are spread over their log scale, as NumPy finds them."""
    from daskgrad._watch import _tables
    from daskgrad._watch._history import LOWEST, PER_DECADE

    values = 10 ** np.random.default_rng(0).normal(-2.0, 1.0, 100_000)
    places, counts = np.unique(np.floor((np.log10(values) - LOWEST) * PER_DECADE).astype(int), return_counts=True)
    found = float(_tables.quantile(list(zip(places.tolist(), counts.tolist(), strict=True)), share))
    assert found == pytest.approx(np.quantile(values, share), rel=0.06)  # two digits are shown
