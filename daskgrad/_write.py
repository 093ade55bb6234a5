"""One part on its way to disk: its columns in Arrow, written aside, checked, made durable, renamed into place."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import uuid
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ._dtypes import is_list, is_tensor
from ._errors import PlanError
from ._fingerprint import fingerprint

FOOTER = b"daskgrad"  # the key in a file's own metadata
_UNKNOWN = pa.null()

# -------------------------------------------------------------------------------- the schema


def index_names(index: pd.Index) -> list[str]:
    """The columns that an index is written to, by the names that pandas gives them."""
    return [f"__index_level_{k}__" if name is None else str(name) for k, name in enumerate(index.names)]


def declared(meta: pd.DataFrame, index: bool, given: Any) -> pa.Schema:
    """What the dtypes alone say about the file's columns; `null` where only cells can tell.

    Raises:
        PlanError: Parquet cannot hold a column.
    """
    given = given_types(given)
    columns = {str(label): meta.iloc[:, place] for place, label in enumerate(meta.columns)}
    levels = {name: meta.index.get_level_values(k).to_series() for k, name in enumerate(index_names(meta.index))} if index else {}
    _check_names(meta, [*columns, *levels], given)
    fields = [(name, given[name] if name in given else _declared(name, cells)) for name, cells in {**columns, **levels}.items()]
    return pa.schema(fields)


def given_types(schema: Any) -> dict[str, Any]:
    """`{column: type}` of what a user gave as `schema=`."""
    return {name: schema.field(name).type for name in schema.names} if isinstance(schema, pa.Schema) else dict(schema or {})


def _check_names(meta: pd.DataFrame, names: list[str], given: Mapping[str, Any]) -> None:
    other = [label for label in meta.columns if not isinstance(label, str)]
    if other:
        raise PlanError(
            f"Parquet names columns by text, and {other[0]!r} is a {type(other[0]).__name__}: rename it, as by "
            "ddf.rename(columns={...}), before to_parquet"
        )
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise PlanError(f"two columns (or an index level) are named {twice[0]!r}, which a Parquet file cannot hold: rename one")
    unknown = [name for name in given if name not in names]
    if unknown:
        raise PlanError(f"schema= names {unknown[0]!r}, which is no column. The columns: {', '.join(names)}.")


def _declared(name: str, cells: pd.Series) -> Any:
    dtype = cells.dtype
    if isinstance(dtype, np.dtype) and dtype.kind == "c":
        raise PlanError(f"the column {name!r} is complex, which Parquet cannot hold: write its real and imaginary parts as two columns")
    if isinstance(dtype, pd.ArrowDtype):
        return _stored(dtype.pyarrow_dtype)
    if pd.api.types.is_object_dtype(dtype):
        return _UNKNOWN
    if isinstance(dtype, pd.CategoricalDtype):
        values = _UNKNOWN if dtype.categories.dtype == object else pa.array(dtype.categories[:0]).type
        values = pa.large_string() if isinstance(dtype.categories.dtype, pd.StringDtype) else values
        return _UNKNOWN if values == _UNKNOWN else pa.dictionary(pa.int32(), values, dtype.ordered)
    try:
        return pa.array(cells.iloc[:0], from_pandas=True).type
    except (pa.ArrowException, TypeError) as error:
        raise PlanError(f"the column {name!r} is {dtype}, which Parquet cannot hold ({error})") from None


def _stored(kind: Any) -> Any:
    """An Arrow type as readers know it: the tensor extension as plain lists."""
    return kind.storage_type if is_tensor(kind) else kind


def open_columns(schema: pa.Schema) -> list[str]:
    """Those whose type only cells can tell."""
    return [field.name for field in schema if field.type == _UNKNOWN]


def found(frame: pd.DataFrame, schema: pa.Schema) -> dict[str, Any]:
    """The types of the open columns of `schema`, as far as the cells of `frame` tell them."""
    types = {name: _type_of(name, _cells(frame, name)) for name in open_columns(schema)}
    return {name: kind for name, kind in types.items() if kind is not None and kind != _UNKNOWN}


def filled(schema: pa.Schema, types: Mapping[str, Any]) -> pa.Schema:
    """`schema` with these types for its open columns."""
    return pa.schema([field.with_type(types[field.name]) if field.name in types else field for field in schema])


def _cells(frame: pd.DataFrame, name: str) -> pd.Series:
    if name in frame.columns:
        return frame[name]
    return frame.index.get_level_values(index_names(frame.index).index(name)).to_series()


def _type_of(name: str, cells: pd.Series) -> Any:
    if isinstance(cells.dtype, pd.CategoricalDtype):
        return pa.dictionary(pa.int32(), pa.array(cells.cat.categories).type, cells.cat.ordered)
    present = [cell for cell in cells if not _missing(cell)]
    arrays = [cell for cell in present if isinstance(cell, np.ndarray)]
    if not present:
        return None
    if len(arrays) < len(present) or all(cell.ndim == 0 for cell in arrays):
        return _guessed(name, cells)
    depths = {cell.ndim for cell in arrays}
    if len(depths) > 1:
        raise PlanError(f"the column {name!r} holds arrays of {' and '.join(map(str, sorted(depths)))} dimensions, which no column can")
    leaf = np.result_type(*{cell.dtype for cell in arrays})
    return _nested(_leaf(name, leaf), depths.pop())


def _guessed(name: str, cells: pd.Series) -> Any:
    try:
        return pa.array(cells, from_pandas=True).type
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise PlanError(f"the cells of the column {name!r} have no type in common that Parquet knows: {error}") from None


def _leaf(name: str, dtype: Any) -> Any:
    if dtype.kind == "c":
        raise PlanError(f"the column {name!r} holds complex arrays, which Parquet cannot hold: write real and imaginary parts")
    try:
        return pa.from_numpy_dtype(dtype)
    except (pa.ArrowException, TypeError) as error:
        raise PlanError(f"the column {name!r} holds arrays of {dtype}, which Parquet cannot hold ({error})") from None


def _nested(leaf: Any, depth: int) -> Any:
    for _ in range(depth):
        leaf = pa.list_(leaf)
    return leaf


def _missing(cell: Any) -> bool:
    return cell is None or cell is pd.NA or cell is pd.NaT or (isinstance(cell, float) and cell != cell)


# -------------------------------------------------------------------------------- the table


def table(frame: pd.DataFrame, schema: pa.Schema, index: bool) -> pa.Table:
    """`frame` in exactly this schema; array cells as lists, which pandas reads back as arrays.

    Raises:
        PlanError: a column's cells do not fit the type of its column.
    """
    lists = [field for field in schema if is_list(field.type) and field.name in frame.columns]
    numbers = [field.name for field in lists]
    plain = frame.assign(**dict.fromkeys(numbers)).astype(dict.fromkeys(numbers, object)) if numbers else frame
    bare = pa.schema([field.with_type(_UNKNOWN) if field.name in numbers else field for field in schema])
    try:
        made = pa.Table.from_pandas(plain, schema=bare, preserve_index=index, nthreads=1)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise PlanError(_unfit(frame, schema, error)) from error
    for field in lists:
        place = made.schema.get_field_index(field.name)
        made = made.set_column(place, field, _lists(field, frame[field.name]))
    return made


def _lists(field: pa.Field, cells: pd.Series) -> Any:
    if isinstance(cells.dtype, pd.ArrowDtype):
        kept = pa.chunked_array(cells.array.__arrow_array__())
        kept = pa.chunked_array([c.storage if is_tensor(c.type) else c for c in kept.chunks], type=_stored(kept.type))
        return kept if kept.type == field.type else kept.cast(field.type)
    depth = _depth(field.type)
    try:
        if depth == 1:
            return pa.array([None if _missing(cell) else cell for cell in cells], type=field.type, from_pandas=False)
        return pa.array([None if _missing(cell) else _rows(cell, depth) for cell in cells], type=field.type, from_pandas=False)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise PlanError(_unfit_cells(field.name, cells, field.type, error)) from error


def _depth(kind: Any) -> int:
    return 1 + _depth(kind.value_type) if is_list(kind) else 0


def _rows(cell: Any, depth: int) -> Any:
    """A matrix as a list of its rows: Arrow takes arrays of one axis only."""
    if depth == 1:
        return np.ascontiguousarray(cell)
    if isinstance(cell, np.ndarray) and cell.ndim != depth:
        raise ValueError(f"a cell has {cell.ndim} dimensions, not {depth}")
    return [_rows(part, depth - 1) for part in cell]


def _unfit(frame: pd.DataFrame, schema: pa.Schema, error: Exception) -> str:
    for name in frame.columns:
        field = schema.field(name)
        if is_list(field.type):
            continue
        try:
            pa.array(frame[name], type=field.type, from_pandas=True)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as problem:
            return _unfit_cells(name, frame[name], field.type, problem)
    return f"the part does not fit the schema of the parts before it: {error}"


def _unfit_cells(name: Hashable, cells: pd.Series, kind: Any, error: Exception) -> str:
    return (
        f"the cells of the column {name!r} ({cells.dtype}) do not fit {kind}, the type of that column in the other files: {error}. Say "
        f"what fits all parts: to_parquet(..., schema={{{name!r}: pyarrow type}})."
    )


# -------------------------------------------------------------------------------- the file


def put(made: pa.Table, identity: Mapping[str, Any], folder: Path, aside: Path, name: str, compression: str, ours: Any) -> int | None:
    """Write one whole part to `folder / name`; the bytes written, or None where `ours()` says that another job has taken over.

    Until it is renamed it lies in `aside`, so that `folder` never holds half a file.

    Raises:
        OSError: the disk is full, or the file that was read back is not the one that was written.
    """
    made = made.replace_schema_metadata({**(made.schema.metadata or {}), FOOTER: json.dumps(identity).encode()})
    temporary = aside / f"{name}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        with open(temporary, "xb") as file:
            pq.write_table(made, file, compression=compression)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        check(temporary, made)
        if not ours():
            return None
        os.replace(temporary, folder / name)
        sync_folder(folder)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    return size


def check(path: Path, made: pa.Table) -> None:
    """Read the file's footer back from disk."""
    with pq.ParquetFile(path) as file:
        whole = file.metadata.num_rows == made.num_rows and file.schema_arrow.metadata.get(FOOTER) == made.schema.metadata[FOOTER]
    if not whole:
        raise OSError(f"{path} does not read back as it was written")


def difference(made: pa.Table, path: Path, compression: str, tolerance: float) -> str | None:
    """How the file at `path` differs from `made`, in words, by its first difference; None: not at all.

    Args:
        made: what the file should hold.
        path: the file.
        compression: of the file.
        tolerance: by how much numbers may differ, relative to the larger; 0: by no bit.
    """
    written = io.BytesIO()
    pq.write_table(made, written, compression=compression)  # through the same way, so that nothing else can differ
    anew = pq.read_table(written)
    try:
        there = pq.read_table(path, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        return f"it cannot be read: {error}"
    if anew.schema != there.schema or len(anew) != len(there):
        return f"it has {len(there)} rows of {there.schema.names}, now there are {len(anew)} of {anew.schema.names}"
    for name in anew.column_names:
        if fingerprint(anew[name]) == fingerprint(there[name]):
            continue
        pairs = zip(there[name].to_pylist(), anew[name].to_pylist(), strict=True)
        apart = [(row, *pair) for row, pair in enumerate(pairs) if not _near(*pair, tolerance)]
        if apart:
            row, was, now = apart[0]
            return f"column {name!r} differs in {len(apart)} of {len(anew)} rows: row {row} holds {was!r}, and is {now!r} made again"
    return None


def _near(one: Any, two: Any, tolerance: float) -> bool:
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(_near(a, b, tolerance) for a, b in zip(one, two, strict=True))
    if isinstance(one, float) and isinstance(two, float) and tolerance > 0:
        return math.isclose(one, two, rel_tol=tolerance) or (one != one and two != two)
    return repr(one) == repr(two)  # tells 0.0 from -0.0, and takes nan for itself


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def footer(path: Path) -> tuple[dict[str, Any] | None, pa.Schema, int]:
    """(what made this file, its schema, its rows); None for a file that is not daskgrad's.

    Raises:
        pa.ArrowInvalid, OSError: it is no Parquet file, or a damaged one.
    """
    with path.open("rb") as start:
        if start.read(4) != b"PAR1":
            raise pa.ArrowInvalid(f"{path} does not begin as a Parquet file")
    with pq.ParquetFile(path) as file:
        schema, rows = file.schema_arrow, file.metadata.num_rows
    told = (schema.metadata or {}).get(FOOTER)
    return (None if told is None else json.loads(told)), schema, rows
