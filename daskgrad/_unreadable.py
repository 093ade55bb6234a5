"""What is wrong with a file that cannot be read, in a sentence that says where and what to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pandas as pd

from ._names import listing
from ._source import Absent


def why(error: BaseException) -> str:
    """The reader's own message, without what Dask writes around it for those who call the reader themselves."""
    text = " ".join(str(error).rpartition("Original Message: ")[2].split())
    text = text.partition(" Pass argument")[0].partition(". If your data has")[0]
    return f"{text} A quotation mark may not be closed." if "EOF" in text else text


def remedy(error: BaseException, files: Callable[[], Sequence[Path]], separator: str | None) -> str | None:
    """What to do about an error that reading raised while it was computed; None where `error` says something else.

    Args:
        error: what was raised.
        files: the local files that are read; called where one of them is to be looked into.
        separator: of CSV files.
    """
    columns = _mismatched(error)
    number = re.search(r"could not convert string to float: |Failed to parse string: |Unable to parse string ", str(error))
    if columns is not None or number:
        place = _no_number(files(), separator, columns)
        if place is not None:
            return place
    if columns is not None:
        options = " ".join(f"--column '{column}={dtype}'" for column, dtype in columns.items())
        return f"CSV columns go on otherwise than they begin: {listing(columns)}. Say what they hold: {options}"
    if (gap := gaps(error, files, separator)) is not None:
        return gap
    if ("in the [columns]" in str(error) or isinstance(error, Absent)) and (without := _without(files(), separator)):
        return without
    if isinstance(error, pd.errors.ParserError):
        return f"{_named(files())} cannot be read as CSV: {why(error)} (Lines are counted from where a part begins.)"
    return None


def gaps(error: BaseException, files: Callable[[], Sequence[Path]], separator: str | None) -> str | None:
    """What to write for a column that was said to hold integers and has gaps; None where `error` says something else."""
    found = re.search(r"(?:passed user dtype of (\w+) for \w+ dtyped data|Integer column has NA values) in column (\d+)", str(error))
    if found is None:
        return None
    column, dtype = _header(files()[0], separator)[int(found[2])], found[1] or "int64"
    return f"the column {column!r} has gaps, which {dtype} cannot hold: --column '{column}={dtype.capitalize()}' can"


def _mismatched(error: BaseException) -> dict[str, str] | None:
    """What Dask found in columns whose beginning promised something else."""
    found = re.search(r"Mismatched dtypes found.*?dtype=(\{.*?\})", str(error), re.DOTALL)
    return None if found is None else dict(ast.literal_eval(found[1]))


def _no_number(files: Sequence[Path], separator: str | None, columns: Iterable[str] | None) -> str | None:
    """The first cell that is no number in a column that otherwise holds numbers."""
    for file in files:
        before = 0
        numbers: set[str] = set()
        with pd.read_csv(file, sep=_separator(file, separator), dtype="str", chunksize=100_000) as parts:
            for part in parts:
                for column in columns if columns is not None else part.columns:
                    texts = part[column].dropna()
                    wrong = texts[pd.to_numeric(texts, errors="coerce").isna()]
                    if len(wrong) < len(texts):
                        numbers.add(column)
                    if len(wrong) and column in numbers:
                        text, row = wrong.iloc[0], before + int((part.index < wrong.index[0]).sum()) + 1
                        return (
                            f"{file}: the column {column!r} holds {text!r} in row {row:,} (the first is 1), and numbers elsewhere. "
                            f"--missing {text!r} takes that for a missing value, --column '{column}=string' the column for text."
                        )
                before += len(part)
    return None


def _without(files: Sequence[Path], separator: str | None) -> str | None:
    """Which file lacks columns that the first has."""
    headers = {
        file: list(pd.read_csv(file, sep=separator or ("\t" if ".tsv" in file.suffixes else ","), nrows=0).columns) for file in files
    }
    first = next(iter(headers.values()), [])
    for file, columns in headers.items():
        if lacking := [column for column in first if column not in columns]:
            return f"{file} has no column {listing(lacking)}, which {files[0]} has. Its columns: {listing(columns)}."
    return None


def _header(file: Path, separator: str | None) -> list[str]:
    return [str(label) for label in pd.read_csv(file, sep=_separator(file, separator), nrows=0).columns]


def _separator(file: Path, separator: str | None) -> str:
    return separator or ("\t" if ".tsv" in file.suffixes else ",")


def _named(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"one of {listing(map(str, files), 3)}"
