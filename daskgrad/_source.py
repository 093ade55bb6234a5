"""What is known of the data before it is touched: labels and dtypes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
from pandas.errors import InvalidIndexError

from . import _dtypes
from ._errors import PlanError
from ._names import listing


@dataclass(frozen=True)
class Source:
    """What is known of the data before it is touched.

    Attributes:
        kind: "frame", "series" or "bag".
        empty: an empty frame or Series with the data's labels and dtypes; of a Bag, what its literal records tell of the arguments.
        labels: the column labels, None where they are not known (a Bag).
        records: a Bag's records, where they lie literally in its graph.
        dask: it is a Dask collection.
    """

    kind: Literal["frame", "series", "bag"]
    empty: pd.DataFrame | pd.Series
    labels: list[Hashable] | None
    records: list[Any] | None = None
    dask: bool = False
    _dtypes: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)


def dtype_of(source: Source, column: Hashable) -> Any:
    """The dtype of a column; None where a Bag does not tell."""
    if source.labels is None and column not in source.empty:
        return None
    if type(column) is not str:
        return column_of(source.empty, column).dtype
    if column not in source._dtypes:  # pandas takes its time to find a column, and a plan asks often
        source._dtypes[column] = column_of(source.empty, column).dtype
    return source._dtypes[column]


class Absent(PlanError):
    """A part lacks a column."""


def column_of(data: Any, label: Hashable) -> pd.Series:
    """The one column of that label; of a Series, itself.

    Raises:
        PlanError: there are several.
        Absent: there is none.
    """
    if isinstance(data, pd.Series):
        return data
    if type(label) is str and type(data.columns) is pd.Index and isinstance(column := data.get(label), pd.Series):
        return column
    # Not always data[label]: pandas calls a label that is callable, and takes others for masks.
    try:
        place = data.columns.get_loc(label)
    except (KeyError, TypeError, InvalidIndexError):  # a tuple, pd.NA: pandas does not find all that it holds
        places = [place for place, other in enumerate(data.columns) if other in {label}]
        place = places[0] if len(places) == 1 else places
    found: pd.Series | pd.DataFrame = data.iloc[:, place]
    if isinstance(found, pd.DataFrame) and not found.shape[1]:
        raise Absent(f"this part of the data has no column {label!r}, which others have. Its columns: {listing(data.columns)}.")
    if isinstance(found, pd.DataFrame):
        raise PlanError(f"the column label {label!r} stands {found.shape[1]} times in the data: rename one of them")
    return found


def gradient_dtype_of(source: Source, column: Hashable) -> Any:
    """The dtype of a gradient by a column; float64 where a Bag does not tell."""
    dtype = dtype_of(source, column)
    return np.dtype("float64") if dtype is None else _dtypes.gradient_dtype(dtype)


def differentiable(source: Source, column: Hashable) -> bool:
    """Whether a column's dtype can be differentiated, as far as it tells."""
    dtype = dtype_of(source, column)
    return dtype is None or _dtypes.refusal(dtype) is None
