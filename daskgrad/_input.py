"""Tables for the command line: Parquet or CSV files as a Dask DataFrame, and a filter of its rows."""

from __future__ import annotations

import ast
import glob
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ._errors import PlanError
from ._names import listing, nearest
from ._unreadable import gaps as gaps_told
from ._unreadable import why

KINDS = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv"}
COMPRESSED = (".gz", ".bz2", ".xz", ".zip")
SAMPLE = 16 * 2**20  # bytes of a CSV file that decide about dtypes; Dask's own 256 kB are soon misled


def table(
    source: str,
    where: str | None = None,
    *,
    dtypes: Mapping[str, str] | None = None,
    separator: str | None = None,
    gaps: Sequence[str] = (),
) -> Any:
    """The Dask DataFrame of `source`: a file, a folder of files, or a glob; Parquet or CSV, as the names end.

    Args:
        source: where it lies.
        where: a condition on columns as `DataFrame.query` takes it: only the rows that fulfil it. What Parquet's statistics rule out
            is not read.
        dtypes: of CSV columns, where the beginning of the file misleads.
        separator: of a CSV file; None: a comma, or a tab in .tsv.
        gaps: texts that stand for a missing value in CSV, beside those that pandas knows.

    Raises:
        PlanError: no file, no kind that can be read, or a condition that makes no sense.
    """
    kind, paths = _found(source)
    if kind == "csv":
        frame = _csv(paths, dtypes or {}, separator, gaps)
        return frame if where is None else _filtered(frame, where)
    if dtypes or separator or gaps:
        raise PlanError("--column, --separator and --missing are for CSV: a Parquet file says itself what its columns are")
    frame = _parquet(paths)
    if where is None:
        return frame
    filters = list(_ruled_out(where, frame._meta))
    return _filtered(_parquet(paths, filters=[filters]) if filters else frame, where)


def files(source: str) -> list[Path]:
    """The local files and folders that `table` reads."""
    _, paths = _found(source)
    return [Path(path) for path in ([paths] if isinstance(paths, str) else paths) if "://" not in path]


# --- files ------------------------------------------------------------------------------------------------------------


def _found(source: str) -> tuple[str, Any]:
    """The kind of the files, and what the reader takes."""
    if "://" in source:
        return _kind(source), source
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if _ends(file) in KINDS)
        inside = sorted(path.glob("**/*.parquet")) if not files else []  # folders by value: year=2024/…
        if not files and not inside:
            raise PlanError(f"the folder {source} holds no {' or '.join(KINDS)} files")
        kinds = {KINDS[_ends(file)] for file in files or inside}
        if len(kinds) > 1:
            raise PlanError(f"the folder {source} holds Parquet and CSV files: name one kind, as in '{path / '*.csv'}'")
        kind = kinds.pop()
        return kind, source if kind == "parquet" else list(map(str, files))
    files = sorted(map(Path, glob.glob(source, recursive=True))) if glob.has_magic(source) else [path]
    if not files or not files[0].exists():
        raise PlanError(_nothing_there(path, source))
    kinds = {_kind(str(file)) for file in files}
    if len(kinds) > 1:
        raise PlanError(f"{source} means Parquet and CSV files: name one kind")
    return kinds.pop(), list(map(str, files))


def _ends(file: Path) -> str:
    """The ending that tells the kind: `.csv` of `a.csv.gz`."""
    endings = [ending.lower() for ending in file.suffixes]
    if endings and endings[-1] in COMPRESSED:
        endings.pop()
    return endings[-1] if endings else ""


def _kind(name: str) -> str:
    ending = _ends(Path(name))
    if ending not in KINDS:
        raise PlanError(f"{name} ends neither in {', '.join(KINDS)}, so what is in it is unknown")
    return KINDS[ending]


def _nothing_there(path: Path, source: str) -> str:
    if glob.has_magic(source):
        return f"no file matches {source}"
    others = [str(other) for other in path.parent.iterdir()] if path.parent.is_dir() else []
    return f"there is no file {source}.{nearest(source, others)}"


def _parquet(paths: Any, **options: Any) -> Any:
    """A null is a missing value: Arrow's dtypes tell it from NaN, pandas' own would not."""
    import dask.dataframe as dd
    import pyarrow as pa

    try:
        if _may_hold_nulls(paths):
            options["dtype_backend"] = "pyarrow"
        return dd.read_parquet(paths, **options)
    except (pa.ArrowException, OSError) as error:
        raise PlanError(f"{_together(paths)} cannot be read as Parquet: {why(error)}") from error


def _may_hold_nulls(paths: Any) -> bool:
    """Whether there are nulls in a column of numbers, as the files' own statistics tell; True where they do not."""
    import pyarrow.parquet as pq

    if isinstance(paths, str) and "://" in paths:
        return True
    given = [Path(path) for path in ([paths] if isinstance(paths, str) else paths)]
    for file in (file for path in given for file in ([path] if path.is_file() else path.glob("**/*")) if _ends(file) in KINDS):
        with pq.ParquetFile(file) as whole:
            about = whole.metadata
        groups = (about.row_group(group) for group in range(about.num_row_groups))
        tops = [k for k in range(about.num_columns) if about.schema.column(k).max_definition_level < 2]  # neither lists nor records
        columns = (group.column(k) for group in groups for k in tops)
        numbers = (column.statistics for column in columns if column.physical_type != "BYTE_ARRAY")
        if any(told is None or not told.has_null_count or told.null_count for told in numbers):
            return True
    return False


def _csv(paths: list[str], dtypes: Mapping[str, str], separator: str | None, gaps: Sequence[str]) -> Any:
    """Gaps are missing values and text is text: Arrow's dtypes, not float NaN."""
    import dask.dataframe as dd

    first = str(paths[0] if isinstance(paths, list) else paths)
    options: dict[str, Any] = {"sep": separator or ("\t" if _ends(Path(first)) == ".tsv" else ","), "na_values": list(gaps)}
    whole = {"blocksize": None} if first.lower().endswith(COMPRESSED) else {"sample": SAMPLE}
    try:
        frame = dd.read_csv(paths, dtype_backend="pyarrow", dtype=dict(dtypes) or None, **options, **whole)
        begins = pd.read_csv(first, nrows=1, **options)
    except (ValueError, TypeError, OSError) as error:
        told = gaps_told(error, lambda: [Path(first)], separator)
        raise PlanError(told or f"{first} cannot be read as CSV: {why(error)}") from error
    for column in dtypes:
        if column not in frame.columns:
            columns = list(frame.columns)
            raise PlanError(f"--column {column}=…: there is no such column. The columns: {listing(columns)}.{nearest(column, columns)}")
    if separator is None and len(frame.columns) == 1 and (likely := next((s for s in ";|\t" if s in str(frame.columns[0])), None)):
        raise PlanError(f"{first} has one column, {frame.columns[0]!r}: is {likely!r} between its columns? --separator {likely!r} says so.")
    untold = [column for column in frame.columns if column not in dtypes]
    if begins.empty and untold:
        raise PlanError(
            f"{first} has a header and no rows, so nothing tells what its columns hold: --column NAME=DTYPE, for each of them, does"
        )
    return frame


def _together(paths: Any) -> str:
    return str(paths[0] if isinstance(paths, list) and len(paths) == 1 else paths)


# --- rows -------------------------------------------------------------------------------------------------------------


def _filtered(frame: Any, where: str) -> Any:
    """The rows of `frame` for which `where` holds; only the columns that it may mean are looked at."""
    columns = [column for column in frame.columns if str(column) in where]
    _check(frame._meta_nonempty, where)
    return frame[frame[columns].map_partitions(_holds, where, meta=(columns[0], "bool"))]


def _check(example: pd.DataFrame, where: str) -> None:
    try:
        found = example.eval(where, engine="python")
    except Exception as error:  # whatever pandas' parser and the operators raise
        columns = listing(example.columns)
        raise PlanError(f"--where {where!r} cannot be evaluated: {error}. The columns: {columns}.") from error
    if not isinstance(found, pd.Series) or not pd.api.types.is_bool_dtype(found.dtype):
        raise PlanError(f"--where {where!r} is no condition: it must be true or false for each row")


def _holds(part: pd.DataFrame, where: str) -> pd.Series:
    """Where the condition holds; where it is unknown, it does not."""
    found: Any = part.eval(where, engine="python")
    holds: pd.Series = found.fillna(False).astype(bool)
    return holds


_COMPARED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "=="}
_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "=="}


def _ruled_out(where: str, meta: pd.DataFrame) -> Iterator[tuple[str, str, Any]]:
    """Those conditions of a conjunction that a Parquet reader understands; the others are left to `_filtered`."""
    try:
        tree = ast.parse(where.strip(), mode="eval").body
    except SyntaxError:  # pandas takes more than Python does
        return
    for term in _terms(tree):
        if isinstance(term, ast.Compare):
            yield from _comparisons(term, meta)


def _terms(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        for value in node.values:
            yield from _terms(value)
    else:
        yield node


def _comparisons(node: ast.Compare, meta: pd.DataFrame) -> Iterator[tuple[str, str, Any]]:
    """`(column, operator, number or text)` of a comparison, also of `1 < x < 2`."""
    sides = [node.left, *node.comparators]
    for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
        sign = _COMPARED.get(type(operator))
        if sign is None:
            continue
        if isinstance(right, ast.Name):
            left, right, sign = right, left, _TURNED[sign]
        if isinstance(left, ast.Name) and isinstance(right, ast.Constant) and _comparable(left.id, right.value, meta):
            yield left.id, sign, right.value


def _comparable(column: str, value: Any, meta: pd.DataFrame) -> bool:
    if column not in meta.columns:
        return False
    dtype = meta[column].dtype
    if isinstance(value, str):
        return isinstance(dtype, pd.StringDtype | pd.ArrowDtype) and pd.api.types.is_string_dtype(dtype)
    number = pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_bool_dtype(dtype)
    return number and isinstance(value, int | float) and not isinstance(value, bool)
