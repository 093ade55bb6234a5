"""A Bag's records as a part: one column of cells for each argument, with a plain integer index."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from . import _cells

if TYPE_CHECKING:
    from ._binding import Input
    from ._plan import Plan


class _Mark:
    """Stands in a cell; the same object again after a pickle, found by its name in this module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name.lower()

    def __reduce__(self) -> str:
        return self._name


ABSENT = _Mark("ABSENT")
"""Stands where a record lacks a key."""
DEFAULT = _Mark("DEFAULT")
"""Stands where a record lacks a key and the row function is called without that argument."""


def frame_of(plan: Plan, records: list[Any]) -> pd.DataFrame:
    """`records` as a frame. Of mappings keys count, of tuples positions; anything else is the value itself."""
    if plan.form == "row":
        keys = dict.fromkeys([*(key for record in records for key in _keys(record)), *plan.named])
        columns: dict[Hashable, list[Any]] = {key: [_of_whole(record, key) for record in records] for key in keys}
    else:
        columns = {}
        for argument in plan.inputs:
            for column in argument.columns:
                columns[column] = [_cell(record, argument, column, plan.named) for record in records]
    frame = pd.DataFrame({k: objects(cells) for k, cells in enumerate(columns.values())}, index=pd.RangeIndex(len(records)))
    frame.columns = pd.Index(list(columns), tupleize_cols=False)
    return frame


def objects(cells: list[Any]) -> np.ndarray[Any, Any]:
    """Cells side by side as they are; NumPy would merge arrays of one shape."""
    array = np.empty(len(cells), dtype=object)
    for k, cell in enumerate(cells):
        array[k] = cell
    return array


def _cell(record: Any, argument: Input, column: Hashable, named: Collection[Hashable]) -> Any:
    """What feeds `argument`. Its default is a cell only where it is differentiated: as a cell, None would be a missing value."""
    found = _look_up(record, argument, column)
    if found is not ABSENT or argument.default is inspect.Parameter.empty:
        return found
    return argument.default if argument.name in named else DEFAULT


def _look_up(record: Any, argument: Input, column: Hashable) -> Any:
    if isinstance(record, Mapping):
        return _of_key(record, column)
    if argument.position is None:
        return _of_label(record, column, argument.stacked)
    if isinstance(record, tuple):
        return record[argument.position] if argument.position < len(record) else ABSENT
    return record if argument.position == 0 else ABSENT


def _of_label(record: Any, label: Hashable, stacked: bool) -> Any:
    """What `inputs` names in a record without keys: a place in a tuple, a field of a namedtuple, or the one value that there is."""
    if not isinstance(record, tuple):
        return ABSENT if stacked else record
    if isinstance(label, int) and not isinstance(label, bool):
        return record[label] if -len(record) <= label < len(record) else ABSENT
    return getattr(record, str(label)) if label in getattr(record, "_fields", ()) else ABSENT


def _keys(record: Any) -> Iterable[Hashable]:
    """What a whole row can be asked for: keys, fields of a namedtuple, places of another tuple."""
    if isinstance(record, Mapping):
        return record
    return getattr(record, "_fields", range(len(record))) if isinstance(record, tuple) else ()


def _of_whole(record: Any, key: Hashable) -> Any:
    return _of_label(record, key, stacked=True) if isinstance(record, tuple) else _of_key(record, key)


def _of_key(record: Any, key: Hashable) -> Any:
    return record[key] if isinstance(record, Mapping) and key in record else ABSENT


def empty_of(records: list[Any], arguments: Iterable[Input]) -> pd.DataFrame:
    """An empty frame with the dtype of what feeds each argument, as far as `records` tell: numbers unless they are something else.

    Raises:
        GraphError: a cell is a tensor that carries a graph.
    """
    dtypes = {c: _dtype_of(records, argument, c) for argument in arguments for c in argument.columns}
    return pd.DataFrame({column: pd.Series([], dtype=dtype) for column, dtype in dtypes.items()})


def _dtype_of(records: list[Any], argument: Input, column: Hashable) -> np.dtype[Any]:
    found = (_look_up(record, argument, column) for record in records)
    cells = _cells.read(pd.Series(objects([None if cell is ABSENT else cell for cell in found]), name=column))
    kinds = [cells.kind(code) for code in range(cells.n_kinds)]
    arrays = [kind for kind in kinds if isinstance(kind, _cells.ArrayKind)]
    if len(arrays) < len(kinds) or any(kind.shape for kind in arrays):
        return np.dtype(object)
    return np.dtype("complex128" if any(kind.dtype.kind == "c" for kind in arrays) else "float64")
