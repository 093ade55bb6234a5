"""The way back: the numbers that torch computed, put into a column of the dtype that was declared.

The twin of `_cells`: what `Cells.take` took out by rows goes back by rows, in any order, in any number of pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import accumulate
from math import prod
from typing import Any, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from ._cells import Array, Rows
from ._dtypes import DType, is_list, is_tensor
from ._memory import copy_into


class ColumnBuilder:
    """A column that is filled by rows.

    Args:
        dtype: of the column to be; as `gradient_dtype` gives it, or text.
        index: (rows,) its index.
        name: its name.

    Raises:
        TypeError: no column of results has this dtype.
    """

    def __init__(self, dtype: DType, index: pd.Index, name: Hashable) -> None:
        self._index, self._name = index, name
        self._store = _store(dtype, len(index))

    def put(self, rows: Rows, values: Array) -> None:
        """Fill `rows` with `values`, (k,) or (k, *shape), cast to the column's dtype. `values` is copied.

        Raises:
            TypeError: complex numbers into a real column.
            ValueError: the cells' shape is none that the column's dtype can hold.
        """
        self._store.put(rows, values)

    def room(self, rows: slice, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | None:
        """Where values of `rows` of this dtype and shape will lie, (k, *shape), to be written and then `put`; None where that copies."""
        return self._store.room(rows, dtype, shape)

    def finish(self) -> pd.Series:
        """The column; rows that were never put are missing in its dtype's own way. The builder is spent."""
        values = self._store.finish()
        # without a dtype pandas guesses one for objects: text would become str
        column: pd.Series = pd.Series(values, index=self._index, name=self._name, dtype=values.dtype, copy=False)
        return column


def empty(dtype: DType, index: pd.Index, name: Hashable) -> pd.Series:
    """A column of `dtype` that is missing everywhere; on an empty index, the meta of a result."""
    return ColumnBuilder(dtype, index, name).finish()


class _Store(Protocol):
    def put(self, rows: Rows, values: Array) -> None: ...

    def room(self, rows: slice, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | None: ...

    def finish(self) -> Any: ...


def _store(dtype: DType, rows: int) -> _Store:
    if isinstance(dtype, pd.StringDtype):
        return _Objects(rows, lambda items: pd.array(items, dtype=dtype))
    if isinstance(dtype, pd.ArrowDtype):
        return _arrow_store(dtype.pyarrow_dtype, rows)
    if isinstance(dtype, np.dtype) and dtype.kind in "fc":
        return _Numbers(dtype, rows, lambda values, _: values)
    if isinstance(dtype, np.dtype) and dtype.kind == "O":
        return _Objects(rows, lambda items: items)
    if isinstance(dtype, (pd.Float32Dtype, pd.Float64Dtype)):
        width = np.dtype("f4" if isinstance(dtype, pd.Float32Dtype) else "f8")
        return _Numbers(width, rows, pd.arrays.FloatingArray)
    raise TypeError(f"no result has the dtype {dtype}")


def _arrow_store(kind: Any, rows: int) -> _Store:
    def column(array: Any) -> Any:
        return pd.arrays.ArrowExtensionArray(pa.chunked_array([array], type=array.type))

    if pa.types.is_floating(kind):
        plain = np.dtype(kind.to_pandas_dtype())
        return _Numbers(plain, rows, lambda values, missing: column(_arrow_numbers(values, missing)))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _Objects(rows, lambda items: column(pa.array(items, kind)))
    levels, leaf = _levels(kind)
    if levels and pa.types.is_floating(leaf):
        return _Lists(kind, rows, column)
    raise TypeError(f"no result has the Arrow type {kind}")


def _check_real(values: Array, dtype: np.dtype[Any]) -> None:
    if values.dtype.kind == "c" and dtype.kind != "c":
        raise TypeError(f"complex numbers do not go into a column of {dtype.name}")


def _arrow_numbers(values: Array, missing: NDArray[np.bool_]) -> Any:
    return pa.array(values, mask=missing, from_pandas=False)  # NaN stays a number


def _cast(values: Array, dtype: np.dtype[Any]) -> Array:
    """A copy of `values` in `dtype`."""
    _check_real(values, dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # float16 and float32 overflow to inf, as in torch
        return np.array(values, dtype=dtype, order="C", copy=True)


class _Numbers:
    """One number a cell, in one buffer."""

    def __init__(self, dtype: np.dtype[Any], rows: int, seal: Callable[[Array, NDArray[np.bool_]], Any]) -> None:
        self._values = np.empty(rows, dtype)  # (rows,)
        self._whole = 0  # so many rows, from the first on, have been put in their order
        self._some: NDArray[np.bool_] | None = None  # (rows,) which have been put, where not in their order
        self._seal = seal

    def put(self, rows: Rows, values: Array) -> None:
        if values.ndim != 1:
            raise ValueError(f"cells of shape {values.shape[1:]} do not go into a column of numbers")
        if np.may_share_memory(values, self._values):
            pass  # it was written into the room for it
        elif values.dtype == self._values.dtype:
            if isinstance(rows, slice):
                copy_into(self._values[rows], values)
            else:
                self._values[rows] = values
        else:
            _check_real(values, self._values.dtype)
            with np.errstate(over="ignore", invalid="ignore"):  # float16 and float32 overflow to inf, as in torch
                self._values[rows] = values
        self._mark(rows)

    def _mark(self, rows: Rows) -> None:
        if self._some is None and isinstance(rows, slice) and rows.step is None and rows.start == self._whole:
            self._whole = rows.stop
            return
        if self._some is None:
            self._some = np.zeros(len(self._values), bool)
            self._some[: self._whole] = True
        self._some[rows] = True

    def room(self, rows: slice, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | None:
        return self._values[rows] if (dtype, shape) == (self._values.dtype, ()) else None

    def finish(self) -> Any:
        if self._some is None:
            missing = np.zeros(len(self._values), bool)
            missing[self._whole :] = True
        else:
            missing = ~self._some
        if self._whole < len(self._values):
            self._values[missing] = complex(np.nan, np.nan) if self._values.dtype.kind == "c" else np.nan
        return self._seal(self._values, missing)


class _Objects:
    """Any object a cell: Python numbers, arrays of their own, text."""

    def __init__(self, rows: int, seal: Callable[[Array], Any]) -> None:
        self._items = np.full(rows, None, object)  # (rows,)
        self._seal = seal

    def put(self, rows: Rows, values: Array) -> None:
        # an array cell must not be a view: pickled, each view would drag the whole batch along
        cells = values.tolist() if values.ndim == 1 else (cell.copy() for cell in values)
        self._items[rows] = np.fromiter(cells, object, len(values))

    def room(self, rows: slice, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        return None

    def finish(self) -> Any:
        return self._seal(self._items)


class _Lists:
    """An array a cell, shapes as they come, in Arrow's flat form."""

    def __init__(self, kind: Any, rows: int, seal: Callable[[Any], Any]) -> None:
        self._kind, self._seal = kind, seal
        self._levels, leaf = _levels(kind)
        self._dtype = np.dtype(leaf.to_pandas_dtype())
        self._tensor: tuple[int, ...] | None = tuple(kind.shape) if is_tensor(kind) else None
        fixed = [getattr(level, "list_size", 0) for level in self._levels]
        # (rows, dimensions): a row that is never put keeps the fixed sizes, which Arrow wants under a null too
        self._shapes = np.tile(np.array(fixed, np.int64), (rows, 1))
        self._missing = np.ones(rows, bool)  # (rows,)
        self._pieces: list[tuple[NDArray[np.intp], Array]] = []  # (k,), (k, size)

    def put(self, rows: Rows, values: Array) -> None:
        shape = self._check(values.shape[1:])
        where = np.arange(len(self._missing))[rows]
        self._pieces.append((where, _cast(values, self._dtype).reshape(len(values), prod(shape))))
        self._shapes[where] = shape
        self._missing[where] = False

    def room(self, rows: slice, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        return None

    def finish(self) -> Any:
        sizes = self._shapes.prod(axis=1)  # (rows,)
        starts = np.cumsum(sizes) - sizes  # (rows,)
        flat = np.zeros(int(sizes.sum()), self._dtype)  # (elements,)
        for rows, values in self._pieces:
            _scatter(flat, starts[rows], values)
        self._pieces.clear()
        return self._seal(self._nest(flat))

    def _check(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape by levels that cells of `shape` have."""
        if self._tensor is not None:
            fits = shape == self._tensor
        else:
            sizes = [getattr(level, "list_size", None) for level in self._levels]
            fits = len(shape) == len(sizes)
            fits = fits and all(size in (None, length) for size, length in zip(sizes, shape, strict=True))
        if not fits:
            raise ValueError(f"cells of shape {shape} do not go into a column of {self._kind}")
        return shape if self._tensor is None else (prod(shape),)

    def _nest(self, flat: Array) -> Any:
        """The flat numbers as the list type, from the innermost level outwards."""
        leaf = self._levels[-1].value_type
        array = pa.Array.from_buffers(leaf, len(flat), [None, pa.py_buffer(flat)])
        per_row = list(accumulate(self._shapes.T, np.multiply, initial=np.ones(len(self._shapes), np.int64)))
        for depth in range(len(self._levels) - 1, -1, -1):
            lengths = np.repeat(self._shapes[:, depth], per_row[depth])  # (lists of this level,)
            validity = _bits(~self._missing) if depth == 0 and self._missing.any() else None
            array = _wrap(self._levels[depth], lengths, validity, array)
        return pa.ExtensionArray.from_storage(self._kind, array) if is_tensor(self._kind) else array


def _levels(kind: Any) -> tuple[list[Any], Any]:
    """The list types of a nested type from the outermost inwards, and the item type."""
    levels, kind = [], kind.storage_type if is_tensor(kind) else kind
    while is_list(kind):
        levels.append(kind)
        kind = kind.value_type
    return levels, kind


def _scatter(flat: Array, starts: NDArray[np.int64], values: Array) -> None:
    """Write the rows of `values` (k, size) into `flat`, each from its start on."""
    size = values.shape[1]
    if values.size == 0:
        return
    if (np.diff(starts) == size).all():
        flat[starts[0] : starts[0] + values.size] = values.ravel()
    else:
        np.lib.stride_tricks.sliding_window_view(flat, size, writeable=True)[starts] = values


def _bits(flags: NDArray[np.bool_]) -> Any:
    return pa.array(flags, pa.bool_()).buffers()[1]


def _wrap(kind: Any, lengths: NDArray[np.int64], validity: Any, items: Any) -> Any:
    """Lists of the given lengths around `items`."""
    if pa.types.is_fixed_size_list(kind):
        return pa.Array.from_buffers(kind, len(lengths), [validity], children=[items])
    width = np.int64 if pa.types.is_large_list(kind) else np.int32
    if len(items) > np.iinfo(width).max:
        raise ValueError(f"one part holds {len(items)} elements, more than {kind} can count: use smaller partitions")
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(width)
    return pa.Array.from_buffers(kind, len(lengths), [validity, pa.py_buffer(offsets)], children=[items])
