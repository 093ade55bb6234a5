"""What the columns of a part hold: which rows are missing, which are alike (one dtype and shape, or one static value), and rows that
are alike as one array for torch. `_columns` is the way back.
"""

from __future__ import annotations

import datetime
import enum
import fractions
import math
import numbers
import operator
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from pandas.api.extensions import ExtensionArray, ExtensionDtype

from ._dtypes import DType, is_list, is_tensor, numpy_dtype, role, too_wide, unsupported
from ._errors import GraphError
from ._memory import copied
from ._names import shown
from ._torch import torch_if_imported

Array: TypeAlias = NDArray[Any]
Rows: TypeAlias = slice | NDArray[np.intp]

# torch stores unsigned integers wider than a byte but computes with few of them
_SIGNED: dict[str, np.dtype[Any]] = {"uint16": np.dtype("i4"), "uint32": np.dtype("i8"), "uint64": np.dtype("i8")}


# ---------------------------------------------------------------- what a part's column holds


@dataclass(frozen=True)
class ArrayKind:
    """Rows whose cells are arrays of one dtype (as `Cells.take` returns it) and shape; `()` is one number a cell."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StaticKind:
    """Rows that hold one plain Python value, which torch never sees."""

    value: Any


@dataclass(frozen=True, eq=False)
class Cells:
    """What one column of a part holds.

    Attributes:
        series: the column, unchanged.
        missing: (rows,) bool, or None where nothing is missing.
        codes: (rows,) the kind of each row, 0, 1, ... `n_kinds - 1`, each of which occurs, and -1 where missing.
            None: all rows that are not missing are of kind 0.
    """

    series: pd.Series
    missing: NDArray[np.bool_] | None
    codes: NDArray[np.intp] | None
    _arrays: Sequence[ArrayKind]  # the kinds 0 ... len(_arrays) - 1
    _statics: Sequence[Any]  # the values of the kinds after them
    _gather: Callable[[Rows, ArrayKind], Array] | None  # None: there are no array kinds
    _view: Callable[[slice, ArrayKind], Array] | None = None  # the same of consecutive rows without a copy where memory allows

    def __len__(self) -> int:
        return len(self.series)

    @property
    def n_kinds(self) -> int:
        """How many kinds occur; 0 where no cell tells: an object, list or static column without a present row."""
        return len(self._arrays) + len(self._statics)

    def kind(self, code: int) -> ArrayKind | StaticKind:
        """The kind that `code` in `codes` stands for."""
        if not 0 <= code < self.n_kinds:
            raise IndexError(f"kind {code} of {self.n_kinds}")
        if code < len(self._arrays):
            return self._arrays[code]
        return StaticKind(python_value(self._statics[code - len(self._arrays)]))

    def take(self, rows: Rows, *, copy: bool = True) -> Array:
        """The cells of `rows`, all of one array kind and none missing, as one array.

        Returns:
            (len(rows), *shape) of the kind's dtype, native, C-contiguous, and the caller's to write into; unless `copy` is False: then
            it may be the column's own memory, which is for reading only.

        Raises:
            ValueError: the rows are of several kinds.
            TypeError: they hold a static value.
        """
        kind = self.kind(self._code(rows))
        if isinstance(kind, StaticKind) or self._gather is None:
            raise TypeError(f"column {self.series.name!r}: a static value is no array")
        if not copy and self._view is not None and isinstance(rows, slice):
            return self._view(rows, kind)
        return self._gather(rows, kind)

    def cell(self, row: int) -> object:
        """The cell at position `row` as Python shows it, for messages."""
        return python_value(self.series.array[row])

    def _code(self, rows: Rows) -> int:
        if self.codes is None:
            return 0
        codes = self.codes[rows]
        if len(codes) == 0:
            return 0
        if (codes != codes[0]).any():
            raise ValueError(f"column {self.series.name!r}: rows of several kinds do not make one array")
        return int(codes[0])


def read(series: pd.Series) -> Cells:
    """What `series` holds. Its data is looked at, never changed, and copied only where `take` asks.

    Missing is what pandas and Arrow mark as missing, also inside a list cell. NaN in a column of numbers is a
    number, among objects it is missing.

    Raises:
        ValueError: a cell makes no array: ragged, an array of text, beyond int64. Column and row are named.
        GraphError: a cell is a tensor that carries a graph.
        TypeError: the dtype is one that cannot be read (`role` "unsupported").
    """
    match role(series.dtype):
        case "array":
            return _read_lists(series)
        case "object":
            return _read_objects(series)
        case "static":
            return _read_statics(series)
        case "unsupported":
            raise TypeError(f"column {series.name!r}: {unsupported(series.dtype)}")
    return _read_numbers(series)


def torch_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The native dtype, one that torch computes with, which holds the numbers of `dtype`."""
    native: np.dtype[Any] = dtype.newbyteorder("=")
    return _SIGNED.get(dtype.name, native)


def python_value(value: Any) -> Any:
    """A NumPy number or text as Python's own; anything else as it is."""
    return value.item() if isinstance(value, np.generic) and value.dtype.kind in "biufcUS" else value


def shown_label(label: Any) -> str:
    """A row's label as messages show it: as its user wrote it, also in a MultiIndex, and also where its own repr fails."""
    return shown(tuple(map(python_value, label)) if type(label) is tuple else python_value(label))


def _or_none(missing: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
    return missing if missing.any() else None


def _spread(codes: NDArray[np.intp], present: NDArray[np.bool_]) -> NDArray[np.intp]:
    """`codes` of the present rows, put back among all rows with -1 elsewhere."""
    if len(codes) == len(present):
        return codes
    full = np.full(len(present), -1, np.intp)  # (rows,)
    full[present] = codes
    return full


def _below_2_63(values: Array, series: pd.Series, row_of: Callable[[int], int | None]) -> None:
    """Raise for the first unsigned number beyond int64 that stands in a row (`row_of` a position in `values`)."""
    if values.dtype.kind != "u" or values.dtype.itemsize < 8:
        return
    for position in np.flatnonzero(values >= np.uint64(2**63)):
        if (row := row_of(int(position))) is not None:
            raise _unreadable(series, row, f"{values[position]} does not fit into int64, torch's widest integer")


def _unreadable(series: pd.Series, row: int, reason: str) -> ValueError:
    return ValueError(f"column {series.name!r}, row {shown_label(series.index[row])}: {reason}")


# ---------------------------------------------------------------- one number a cell


def _read_numbers(series: pd.Series) -> Cells:
    values, missing = _numbers(series)  # (rows,), (rows,)
    _below_2_63(values, series, lambda row: None if missing is not None and missing[row] else row)
    kind = ArrayKind(torch_dtype(values.dtype), ())

    def gather(rows: Rows, kind: ArrayKind) -> Array:
        cells = values[rows]
        if isinstance(rows, slice) and cells.dtype == kind.dtype and cells.dtype.isnative:
            return copied(cells)
        return np.array(cells, dtype=kind.dtype, order="C", copy=True)

    def view(rows: slice, kind: ArrayKind) -> Array:
        return np.ascontiguousarray(values[rows], dtype=kind.dtype)

    return Cells(series, missing, None, (kind,), (), gather, view)


def _numbers(series: pd.Series) -> tuple[Array, NDArray[np.bool_] | None]:
    dtype = series.dtype
    if isinstance(dtype, pd.ArrowDtype):
        items = _arrow_array(series)
        return _leaf(items), _or_none(_nulls(items)) if items.null_count else None
    if isinstance(dtype, np.dtype):
        return series.to_numpy(), None
    if isinstance(dtype, pd.SparseDtype):
        return np.asarray(series.array, dtype=numpy_dtype(dtype)), None
    missing = np.asarray(series.isna())
    return series.to_numpy(dtype=numpy_dtype(dtype), na_value=0), _or_none(missing)


def _arrow_array(series: pd.Series) -> Any:
    """The column as one Arrow array; a tensor column as its storage."""
    column = series.array.__arrow_array__()
    chunks, kind = column.chunks, column.type
    if not chunks:
        return pa.array([], kind.storage_type if is_tensor(kind) else kind)
    plain = [chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk for chunk in chunks]
    return plain[0] if len(plain) == 1 else pa.concat_arrays(plain)


def _nulls(items: Any) -> NDArray[np.bool_]:
    return np.asarray(items.is_null())


def _leaf(items: Any) -> Array:
    """(len(items),) the numbers of a flat Arrow array, anything under a null; a view where they are plain numbers."""
    if pa.types.is_decimal(items.type):  # Arrow's direct cast is off by a rounding, the one by way of text is not
        items = items.cast(pa.string()).cast(pa.float64())
    if pa.types.is_boolean(items.type):
        return np.asarray(items.fill_null(False))
    dtype = np.dtype(items.type.to_pandas_dtype())
    if len(items) == 0:
        return np.empty(0, dtype)
    return np.frombuffer(items.buffers()[1], dtype, count=items.offset + len(items))[items.offset :]


# ---------------------------------------------------------------- Arrow lists


@dataclass(frozen=True)
class _Runs:
    """List cells as runs of one flat array."""

    flat: Array  # (elements,)
    start: NDArray[np.int64]  # (rows,)
    stop: NDArray[np.int64]  # (rows,)
    shapes: NDArray[np.int64]  # (rows, dimensions)
    missing: NDArray[np.bool_]  # (rows,)
    ragged: NDArray[np.bool_]  # (rows,)

    def gather(self, rows: Rows, kind: ArrayKind) -> Array:
        start, size = self.start[rows], math.prod(kind.shape)  # (k,)
        if size == 0 or len(start) == 0:
            return np.zeros((len(start), *kind.shape), kind.dtype)
        if (np.diff(start) == size).all():
            block = self.flat[start[0] : start[-1] + size]
        else:
            block = np.lib.stride_tricks.sliding_window_view(self.flat, size)[start]  # (k, size)
        return np.array(block, dtype=kind.dtype, copy=None if block.base is None else True).reshape(len(start), *kind.shape)

    def row_of(self, position: int) -> int | None:
        rows = np.flatnonzero((self.start <= position) & (position < self.stop) & ~self.missing)
        return int(rows[0]) if len(rows) else None


def _read_lists(series: pd.Series) -> Cells:
    runs = _runs(_arrow_array(series), _tensor_shape(series.dtype))
    if (ragged := runs.ragged & ~runs.missing).any():
        raise _unreadable(series, int(ragged.argmax()), "its inner lists differ in length, which makes no array")
    _below_2_63(runs.flat, series, runs.row_of)
    present = ~runs.missing
    codes, first = _group(runs.shapes[present])
    kinds = [ArrayKind(torch_dtype(runs.flat.dtype), tuple(shape)) for shape in runs.shapes[present][first].tolist()]
    alike = None if len(kinds) == 1 else _spread(codes, present)
    return Cells(series, _or_none(runs.missing), alike, kinds, (), runs.gather)


def _tensor_shape(dtype: DType) -> tuple[int, ...] | None:
    kind: Any = dtype.pyarrow_dtype if isinstance(dtype, pd.ArrowDtype) else None
    return tuple(kind.shape) if is_tensor(kind) else None


def _runs(items: Any, tensor: tuple[int, ...] | None) -> _Runs:
    """The runs of an Arrow list array; those of a tensor column have its shape."""
    rows = len(items)
    start = np.arange(rows, dtype=np.int64)
    stop = start + 1
    missing, ragged = np.zeros(rows, bool), np.zeros(rows, bool)
    sizes: list[NDArray[np.int64]] = []
    while is_list(items.type):  # from the outermost dimension inwards: row r owns the items start[r] to stop[r]
        missing |= _any_in(_nulls(items), start, stop)
        edges = _edges(items)  # (len(items) + 1,)
        lengths = np.diff(edges)
        changes = np.diff(lengths, prepend=lengths[:1]) != 0
        ragged |= _any_in(changes, np.minimum(start + 1, stop), stop)
        sizes.append(_first(lengths, start, stop, getattr(items.type, "list_size", 0)))
        start, stop, items = edges[start], edges[stop], items.values
    missing |= _any_in(_nulls(items), start, stop)
    shapes = np.stack(sizes, axis=1)
    if tensor is not None:
        shapes = np.tile(np.array(tensor, np.int64), (rows, 1))
    return _Runs(_leaf(items), start, stop, shapes, missing, ragged)


def _edges(items: Any) -> NDArray[np.int64]:
    """(len(items) + 1,) where in `items.values` each list starts, and where the last one ends."""
    if pa.types.is_fixed_size_list(items.type):
        edges: NDArray[np.int64] = (np.arange(len(items) + 1) + items.offset) * items.type.list_size
        return edges
    return np.asarray(items.offsets).astype(np.int64)


def _any_in(flags: NDArray[np.bool_], start: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(rows,) whether a flag is set in `flags[start[r]:stop[r]]`."""
    if not flags.any():
        return np.zeros(len(start), bool)
    count = np.concatenate([[0], np.cumsum(flags)])
    return np.asarray(count[stop] > count[start])


def _first(lengths: NDArray[np.int64], start: NDArray[np.int64], stop: NDArray[np.int64], default: int) -> NDArray[np.int64]:
    """(rows,) the length of each row's first list; `default` for a row without one."""
    first = np.full(len(start), default, np.int64)
    filled = stop > start
    first[filled] = lengths[start[filled]]
    return first


def _group(shapes: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """(rows,) the number of each row's shape, and (kinds,) a row that has it."""
    codes, kinds = np.zeros(len(shapes), np.intp), min(1, len(shapes))
    for sizes in shapes.T:
        pairs, found = pd.factorize(codes * (sizes.max(initial=0) + 1) + sizes)
        codes, kinds = pairs.astype(np.intp), len(found)
    first = np.empty(kinds, np.intp)
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)
    return codes, first


# ---------------------------------------------------------------- static values


def _read_statics(series: pd.Series) -> Cells:
    if isinstance(series.dtype, pd.ArrowDtype) and pa.types.is_nested(series.dtype.pyarrow_dtype):
        return _read_unhashable(series)
    if isinstance(series.dtype, pd.CategoricalDtype):
        codes, categories = series.cat.codes.to_numpy(), series.cat.categories
        dense, used = pd.factorize(codes[codes >= 0])
        return _statics(series, _spread(dense.astype(np.intp), codes >= 0), categories[used])
    codes, values = pd.factorize(series, use_na_sentinel=True)
    return _statics(series, codes.astype(np.intp), values)


def _read_unhashable(series: pd.Series) -> Cells:
    present = ~np.asarray(series.isna())
    values = [cell for cell, there in zip(series.array, present, strict=True) if there]
    return _statics(series, _spread(np.arange(len(values)), present), values)


def _statics(series: pd.Series, codes: NDArray[np.intp], values: Any) -> Cells:
    missing = _or_none(codes < 0)
    return Cells(series, missing, None if len(values) == 1 else codes, (), values, None)


# ---------------------------------------------------------------- object cells

_MISSING, _NUMBER, _ARRAY, _NESTED, _STATIC = range(5)
_MISSING_TYPES = (type(None), type(pd.NA), type(pd.NaT))


class _CellError(Exception):
    """Why a cell cannot be read; `_read_objects` adds which cell that is."""


class _CarriesGraphError(_CellError):
    """The cell is, or holds, a tensor with a graph."""


def _read_objects(series: pd.Series) -> Cells:
    items = series.to_numpy()  # (rows,)
    nature = _natures(items)  # (rows,)
    items = _normalise(series, items, nature)
    _nan_is_missing(items, nature)
    codes = np.full(len(items), -1, np.intp)
    kinds: dict[ArrayKind, int] = {}
    _code_numbers(series, items, nature, codes, kinds)
    _code_arrays(series, items, nature, codes, kinds)
    values = _code_statics(items, nature, codes, len(kinds))
    alike = None if len(kinds) + len(values) == 1 else codes

    def gather(rows: Rows, kind: ArrayKind) -> Array:
        return _stack(items[rows], kind)

    return Cells(series, _or_none(nature == _MISSING), alike, list(kinds), values, gather)


_dtype_of, _shape_of, _ndim_of = map(operator.attrgetter, ("dtype", "shape", "ndim"))


def _natures(items: Array) -> NDArray[np.int8]:
    """(rows,) what each object is, by its type alone."""
    types = list(map(type, items))
    table = {kind: _nature(kind) for kind in set(types)}
    if len(table) > 1:
        return np.fromiter(map(table.__getitem__, types), np.int8, len(types))
    nature = np.empty(len(types), np.int8)
    nature[:] = list(table.values())
    return nature


def _nature(kind: type) -> int:
    if issubclass(kind, _MISSING_TYPES):
        return _MISSING
    if issubclass(kind, (bool, np.bool_, enum.Enum)):
        return _STATIC
    if issubclass(kind, (numbers.Number, Decimal)):
        return _NUMBER
    if kind is np.ndarray:
        return _ARRAY
    if issubclass(kind, np.generic):  # text, datetimes (which may be NaT), records
        return _NESTED if issubclass(kind, (np.datetime64, np.timedelta64)) else _STATIC
    if issubclass(kind, (list, tuple)) or hasattr(kind, "__array__"):
        return _NESTED
    return _STATIC


def _normalise(series: pd.Series, items: Array, nature: NDArray[np.int8]) -> Array:
    """`items` with every numeric cell a number or a plain array of at least one dimension; `nature` is kept true."""
    arrays = np.flatnonzero(nature == _ARRAY)
    cells = items[arrays].tolist()
    if not all(map(_ndim_of, cells)) or not all(map(_plain_dtype, set(map(_dtype_of, cells)))):
        odd = [cell.ndim == 0 or not _plain_dtype(cell.dtype) for cell in cells]
        nature[arrays[odd]] = _NESTED
    nested = np.flatnonzero(nature == _NESTED)
    if len(nested) == 0:
        return items
    items = items.copy()
    for row in nested.tolist():
        try:
            items[row], nature[row] = _as_item(items[row])
        except _CarriesGraphError as reason:
            label = series.index[row]
            raise GraphError(f"column {series.name!r}, row {shown_label(label)}: {reason}", label=label) from None
        except _CellError as reason:
            raise _unreadable(series, row, str(reason)) from None
    return items


def _as_item(cell: Any) -> tuple[Any, int]:
    """A nested cell as it is kept, and its nature."""
    value = _as_array(cell)
    if not isinstance(value, np.ndarray):
        return cell, value
    if value.ndim > 0:
        return value, _ARRAY
    return value[()], _STATIC if value.dtype.kind == "b" else _NUMBER


def _as_array(cell: Any) -> Array | int:
    """A cell, or an item inside one, as an array; or `_MISSING`, or `_STATIC`."""
    if isinstance(cell, (list, tuple)):
        return _from_list(cell)
    if isinstance(cell, _MISSING_TYPES) or (isinstance(cell, (np.datetime64, np.timedelta64)) and np.isnat(cell)):
        return _MISSING
    if isinstance(cell, (enum.Enum, np.datetime64, np.timedelta64)):
        return _STATIC
    if isinstance(cell, (Decimal, fractions.Fraction)):
        return np.asarray(float(cell))
    if _is_torch_tensor(cell):
        return _from_tensor(cell)
    if isinstance(cell, (numbers.Number, np.bool_)) or hasattr(type(cell), "__array__"):
        return _from_arraylike(cell)
    return _STATIC


def _from_list(cell: Sequence[Any]) -> Array | int:
    types = set(map(type, cell))
    if types <= {float}:
        return np.array(cell, np.float64)
    if types == {int}:
        return _int_array(cell)
    parts = [_as_array(item) for item in cell]
    if any(part is _MISSING for part in parts):
        return _MISSING
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if not arrays:
        return _STATIC
    if len(arrays) < len(parts):
        raise _CellError("a list that mixes numbers with other values makes no array")
    if len({part.shape for part in arrays}) > 1:
        raise _CellError("its inner lists differ in length or depth, which makes no array")
    return np.stack(arrays)


def _int_array(values: Any) -> Array:
    try:
        return np.array(values, np.int64)
    except OverflowError:
        raise _CellError("an integer that does not fit into int64, torch's widest integer") from None


def _from_arraylike(cell: Any) -> Array | int:
    if np.ma.isMaskedArray(cell):
        if np.ma.is_masked(cell):
            return _MISSING
        cell = cell.data
    if type(cell) is int:
        return _int_array(cell)
    if _holds_nulls(cell):
        return _MISSING
    array = np.asarray(cell)
    if array.dtype.kind == "O":
        return _from_list(list(array)) if array.ndim else _as_array(array.item())
    if not _plain_dtype(array.dtype):
        raise _CellError(f"an array of dtype {array.dtype}, which torch has no numbers for")
    return array


def _holds_nulls(cell: Any) -> bool:
    """Whether a pandas or Arrow container in a cell has nulls, which NumPy would turn into NaN."""
    if isinstance(cell, (pa.Array, pa.ChunkedArray)):
        return bool(cell.null_count)
    pandas = isinstance(cell, (pd.Series, pd.Index, ExtensionArray))
    return pandas and isinstance(cell.dtype, ExtensionDtype) and bool(cell.isna().any())


def _plain_dtype(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "fiucb" and not too_wide(dtype)


def _is_torch_tensor(cell: Any) -> bool:
    # where torch was never imported there is no tensor, and importing it only to ask would take seconds
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(cell, tensor)


def _from_tensor(cell: Any) -> Array:
    if cell.grad_fn is not None:
        raise _CarriesGraphError(
            "the cell carries a graph: it is a tensor that was computed from others. A graph does not survive the way "
            "to a worker process, and belongs to whoever built it: pass raw values and compute inside the function"
        )
    torch = torch_if_imported()
    values = cell.detach().cpu()  # a leaf: nothing is cut
    if values.layout is not torch.strided:
        values = values.to_dense()
    if values.dtype is torch.bfloat16:  # NumPy has none
        values = values.float()
    array: Array = values.resolve_conj().resolve_neg().numpy()
    return array


def _nan_is_missing(items: Array, nature: NDArray[np.int8]) -> None:
    """A NaN among objects is pandas' old mark for a missing value, whatever stands beside it."""
    rows = np.flatnonzero(nature == _NUMBER)
    nan = np.fromiter((cell != cell for cell in items[rows]), bool, len(rows))
    nature[rows[nan]] = _MISSING


def _code_numbers(series: pd.Series, items: Array, nature: NDArray[np.int8], codes: NDArray[np.intp], kinds: dict[ArrayKind, int]) -> None:
    """Numbers of one dtype make one kind: what a row is must not depend on its neighbours, which partitions part."""
    rows = np.flatnonzero(nature == _NUMBER)
    types = list(map(type, items[rows]))
    dtypes = {kind: _scalar_dtype(kind) for kind in set(types)}
    for kind, dtype in dtypes.items():
        if too_wide(dtype):
            raise _unreadable(series, rows[types.index(kind)], f"a {dtype.name}, wider than any number of torch")
    native = {kind: torch_dtype(dtype) for kind, dtype in dtypes.items()}
    for dtype in dict.fromkeys(native.values()):
        chosen = rows[np.fromiter((native[kind] == dtype for kind in types), bool, len(types))]
        _check_range(series, items, chosen, dtype)
        codes[chosen] = kinds.setdefault(ArrayKind(dtype, ()), len(kinds))


def _scalar_dtype(kind: type) -> np.dtype[Any]:
    if issubclass(kind, np.generic):
        return np.dtype(kind)
    if issubclass(kind, numbers.Integral):
        return np.dtype("i8")
    only_complex = issubclass(kind, numbers.Complex) and not issubclass(kind, numbers.Real)
    return np.dtype("c16" if only_complex else "f8")


def _check_range(series: pd.Series, items: Array, rows: NDArray[np.intp], dtype: np.dtype[Any]) -> None:
    try:
        items[rows].astype(dtype)
    except OverflowError:
        for row in rows.tolist():
            try:
                items[row : row + 1].astype(dtype)
            except OverflowError:
                raise _unreadable(series, row, f"{items[row]} does not fit into {dtype.name}") from None


def _code_arrays(series: pd.Series, items: Array, nature: NDArray[np.int8], codes: NDArray[np.intp], kinds: dict[ArrayKind, int]) -> None:
    rows = np.flatnonzero(nature == _ARRAY)
    cells = items[rows].tolist()
    dtypes, shapes = set(map(_dtype_of, cells)), set(map(_shape_of, cells))
    if len(dtypes) == len(shapes) == 1:  # the usual column: nothing is done cell by cell in Python
        codes[rows] = kinds.setdefault(ArrayKind(torch_dtype(*dtypes), *shapes), len(kinds))
    else:
        table: dict[tuple[np.dtype[Any], tuple[int, ...]], int] = {}
        found = [table.setdefault((cell.dtype, cell.shape), len(table)) for cell in cells]
        final = [kinds.setdefault(ArrayKind(torch_dtype(dtype), shape), len(kinds)) for dtype, shape in table]
        codes[rows] = np.array(final, np.intp)[np.array(found, np.intp)]
    if any(dtype.kind == "u" and dtype.itemsize == 8 for dtype in dtypes):
        for row in rows.tolist():
            _below_2_63(items[row].ravel(), series, _always(row))


def _always(row: int) -> Callable[[int], int]:
    return lambda position: row


def _code_statics(items: Array, nature: NDArray[np.int8], codes: NDArray[np.intp], first: int) -> Sequence[Any]:
    """Fill in the codes of static cells, from `first` on, and return their values."""
    rows = np.flatnonzero(nature == _STATIC)
    cells = items[rows]
    if set(map(type, cells)) in ({str}, {bool}):  # nothing equal that differs: pandas' own hash table
        found, distinct = pd.factorize(cells)
        codes[rows] = found + first
        return list(distinct)
    table: dict[Hashable, int] = {}
    values: list[Any] = []
    for row, cell in zip(rows.tolist(), cells, strict=True):
        code = table.setdefault(_static_key(cell), len(table))
        if code == len(values):
            values.append(cell)
        codes[row] = first + code
    return values


def _static_key(cell: Any) -> Hashable:
    """Equal for cells that a row function cannot tell apart: 1 == True and two time zones' equal instants are not."""
    value = python_value(cell)
    try:
        hash(value)
    except TypeError:
        return (id, id(cell))
    zone = value.tzinfo if isinstance(value, (datetime.datetime, datetime.time)) else None
    return type(value), value, zone


def _stack(cells: Array, kind: ArrayKind) -> Array:
    """(k, *shape) out of (k,) objects that are alike."""
    if kind.shape == ():
        return cells.astype(kind.dtype)
    stacked = np.empty((len(cells), *kind.shape), kind.dtype)
    if stacked.size:
        # end to end is five times as fast as np.stack, which makes a new view of every cell
        np.concatenate(cells.tolist(), out=stacked.reshape(-1, *kind.shape[1:]))
    return stacked
