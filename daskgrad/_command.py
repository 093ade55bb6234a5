"""What `daskgrad grad` and `daskgrad explain` do: text from the command line to a call, its result to files, and a summary."""

from __future__ import annotations

import csv
import fnmatch
import math
import shutil
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from . import _dtypes, _imported, _input, _spec
from ._column import derivatives, grad_column
from ._errors import PlanError
from ._explain import Explanation, explain
from ._folder import Folder
from ._names import listing, nearest
from ._store import to_parquet

SHOWN = 10  # rows, where nothing is written


@dataclass(frozen=True)
class Request:
    """A command line, still as text.

    Attributes:
        source: Parquet or CSV files.
        function: `FILE.py:function` or `package.module:function`.
        wrt: arguments to differentiate by.
        named: further derivatives, `name=spec`.
        inputs: `argument=column`.
        shared: `argument=number`, or what `_imported.named` takes.
        where: a condition on columns.
        keep: the columns of the source to write as well; None: all.
        dtypes: `column=dtype` of CSV columns.
        separator: of CSV.
        gaps: texts that stand for a missing value in CSV.
        options: as of `grad_column`.
    """

    source: str
    function: str
    wrt: Sequence[str] = ()
    named: Sequence[str] = ()
    inputs: Sequence[str] = ()
    shared: Sequence[str] = ()
    where: str | None = None
    keep: Sequence[str] | None = None
    dtypes: Sequence[str] = ()
    separator: str | None = None
    gaps: Sequence[str] = ()
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Call:
    """The call that a request means. `wanted` is for `derivatives`, where names were given; else `wrt` is for `grad_column`."""

    data: Any
    fn: Callable[..., Any]
    wrt: Any
    wanted: dict[Hashable, Any] | None
    arguments: dict[str, Any]


def call_of(request: Request) -> Call:
    """The call that `request` means; nothing is computed.

    Raises:
        PlanError: a part of it makes no sense.
    """
    fn = _imported.named(request.function)
    if not callable(fn):
        raise PlanError(f"{request.function} is no function: it is {fn!r:.60}, of type {type(fn).__name__}")
    dtypes = dict(_pair(text, "--column") for text in request.dtypes)
    data = _input.table(request.source, request.where, dtypes=dtypes, separator=request.separator, gaps=request.gaps)
    arguments = {
        "inputs": dict(_input_of(text, list(data.columns)) for text in request.inputs) or None,
        "shared": {name: _shared(value) for name, value in (_pair(text, "--shared") for text in request.shared)} or None,
        **(request.options or {}),
    }
    by = [_spec.by(text) for text in request.wrt]
    if not request.named:
        return Call(data, fn, by or None, None, arguments)
    wanted: dict[Hashable, Any] = {f"d_{text}": wish for text, wish in zip(request.wrt, by, strict=True)}
    for name, spec in (_pair(text, "--derivative") for text in request.named):
        if name in wanted:
            raise PlanError(f"--derivative {name}=… is there twice")
        wanted[name] = _spec.derivative(spec, name)
    return Call(data, fn, None, wanted, arguments)


def _pair(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise PlanError(f"{option} {text!r} is not NAME=VALUE")
    return name.strip(), value


def _input_of(text: str, columns: list[str]) -> tuple[str, Any]:
    """`x=f0,f1` or `x=f*` stacks columns into a vector; `x=price` is one column."""
    argument, value = _pair(text, "--input")
    (labels,) = csv.reader([value])  # a label that holds a comma stands in quotes
    if len(labels) == 1 and labels[0] in columns:
        return argument, labels[0]
    found = [label for pattern in labels for label in _matching(pattern, columns)]
    return argument, found


def _matching(pattern: str, columns: list[str]) -> list[str]:
    found = [pattern] if pattern in columns else fnmatch.filter(columns, pattern)
    if not found:
        raise PlanError(f"--input: there is no column {pattern!r}. The columns: {listing(columns)}.{nearest(pattern, columns)}")
    return found


def _shared(text: str) -> Any:
    """A number, or what `FILE.py:name` names."""
    try:
        return float(text)
    except ValueError:
        return _imported.named(text)


# --- grad -------------------------------------------------------------------------------------------------------------


def frame_of(request: Request) -> tuple[Any, list[str]]:
    """The Dask DataFrame that is written, and the labels of the derivatives in it.

    Raises:
        PlanError: a part of the request makes no sense, or two columns would have one label.
    """
    call = call_of(request)
    if call.wanted is not None:
        found = derivatives(call.data, call.fn, call.wanted, **call.arguments)
    else:
        found = grad_column(call.data, call.fn, call.wrt, **call.arguments)
        found = found.to_frame() if found.ndim == 1 else found
        found = found.rename(columns={label: f"d_{label}" for label in found.columns})
    columns = list(call.data.columns)
    kept = columns if request.keep is None else list(request.keep)
    for label in kept:
        if label not in columns:
            raise PlanError(f"--keep {label}: there is no such column. The columns: {listing(columns)}.{nearest(label, columns)}")
    made = [str(label) for label in found.columns]
    for label in made:
        if label in kept:
            raise PlanError(f"the table has a column {label!r} already: give the derivative another name, --derivative NAME=SPEC")
    return call.data[kept].assign(**{label: found[label] for label in found.columns}), made


def explanation_of(request: Request) -> Explanation:
    """What the call would do, seen on a few rows."""
    call = call_of(request)
    return explain(call.data, call.fn, call.wrt if call.wanted is None else call.wanted, **call.arguments)


def first_rows(frame: Any) -> str:
    """What is shown where no file was asked for."""
    return str(frame.head(SHOWN, npartitions=-1).to_string())


# --- files ------------------------------------------------------------------------------------------------------------


def write(frame: Any, source: str, out: Path, *, resume: bool = False, overwrite: bool = False) -> list[Path]:
    """Compute `frame`, which reads `source`, into `out`: a folder of Parquet files, or one CSV file.

    A CSV file is put together from Parquet files beside it, which stay until `finish`: they are what `resume` continues from. One
    that is there already is replaced when the new one is whole.

    Returns:
        The Parquet files, in order.

    Raises:
        PlanError: `out` is there already, is what is read, or cannot hold what is to be written.
        RowError, GraphError: a row failed.
    """
    if str(out) == "-":
        raise PlanError("--out -: results go to a file and not into a pipe. Name a .csv file, or a .parquet folder.")
    as_csv = _is_csv(out, frame)
    folder = _folder(out)
    _spare(source, {out, folder})
    _make_way(out, folder, resume=resume, overwrite=overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        to_parquet(frame, folder, write_index=_indexed(frame))
    except PlanError as error:
        if not resume:
            raise
        raise PlanError(f"{error} On this command line: --overwrite replaces {out}.") from None
    files = sorted(folder.glob("*.parquet"))
    if as_csv:
        _join(files, out, index=_indexed(frame))
    return files


def finish(out: Path) -> None:
    """Remove what lies beside a CSV file that is complete."""
    folder = Folder(_folder(out))
    if _folder(out) != out:
        shutil.rmtree(folder.path)
        shutil.rmtree(folder.aside)


def _folder(out: Path) -> Path:
    return out.with_name(out.name + ".parts") if out.suffix.lower() == ".csv" else out


def _is_csv(out: Path, frame: Any) -> bool:
    ending = out.suffix.lower()
    if ending not in (".csv", ".parquet", ".pq", ""):
        raise PlanError(f"--out {out} ends in {ending}. Possible: .csv, or .parquet for a folder of Parquet files.")
    arrays = [label for label, dtype in frame.dtypes.items() if _dtypes.role(dtype) in ("array", "object")]
    if ending == ".csv" and arrays:
        raise PlanError(f"the column {arrays[0]!r} holds arrays, which a CSV file cannot: use --out {out.with_suffix('.parquet')}")
    return ending == ".csv"


def _spare(source: str, places: set[Path]) -> None:
    """What is read is not written over: it would be gone before it is read."""
    for file in _input.files(source):
        for place in places:
            if place.exists() and any(place.samefile(part) for part in (file, *file.absolute().parents, *file.resolve().parents)):
                said = "is what is read" if place.samefile(file) else f"holds {file}, which is read"
                raise PlanError(f"--out {place} {said}: writing there would destroy it. Give --out another name.")


def _make_way(out: Path, folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Let `out` be new, unless what is there is to be continued."""
    if out.exists() and not overwrite and not (resume and folder == out):
        raise PlanError(f"{out} is there already: --overwrite replaces it{', --resume continues it' if folder == out else ''}")
    if resume:
        return
    for place in {out, folder}:
        if place.is_dir():
            others = [file.name for file in place.iterdir() if file.suffix not in (".parquet", ".pq")]
            if others:
                raise PlanError(f"the folder {place} holds {others[0]}, which is no Parquet file, so it is not replaced")
            with Folder(place).locked():
                shutil.rmtree(place)
        elif place.exists() and folder == out:  # a CSV file stays until the new one is whole
            place.unlink()


def _join(files: Sequence[Path], out: Path, *, index: bool) -> None:
    """One CSV file of all, which appears when it is whole."""
    aside = out.with_name(out.name + ".part")
    with aside.open("w", encoding="utf-8", newline="") as text:
        for number, file in enumerate(files):
            pd.read_parquet(file).to_csv(text, index=index, header=number == 0)
    aside.replace(out)


# --- summary ----------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What stands in one column of the result.

    Attributes:
        missing: rows without a value.
        text: it holds texts.
        unbounded: numbers that are not finite.
        finite: how many are.
        least, most, total: of the finite ones.
        texts: how often each text stands there.
    """

    missing: int = 0
    text: bool = False
    unbounded: int = 0
    finite: int = 0
    least: float = math.inf
    most: float = -math.inf
    total: float = 0.0
    texts: Counter[str] = field(default_factory=Counter)

    def add(self, column: pd.Series) -> None:
        self.missing += int(column.isna().sum())
        if pd.api.types.is_numeric_dtype(column.dtype) and not pd.api.types.is_complex_dtype(column.dtype):
            numbers = column.dropna().to_numpy(dtype=np.float64)
            finite = numbers[np.isfinite(numbers)]
            self.unbounded += len(numbers) - len(finite)
            if len(finite):
                self.finite += len(finite)
                self.least, self.most = min(self.least, float(finite.min())), max(self.most, float(finite.max()))
                self.total += float(finite.sum())
        elif not pd.api.types.is_object_dtype(column.dtype) and pd.api.types.is_string_dtype(column.dtype):
            self.text = True
            self.texts.update(column.dropna())

    def __str__(self) -> str:
        if self.text:
            return "; ".join(f"{count:,} × {text}" for text, count in self.texts.most_common(3)) or "none"
        said = [f"{self.least:.6g} to {self.most:.6g}, mean {self.total / self.finite:.6g}"] if self.finite else []
        said += [f"{self.missing:,} missing"] if self.missing else []
        said += [f"{self.unbounded:,} not finite"] if self.unbounded else []
        return "; ".join(said) or "arrays"


def summary(files: Sequence[Path], made: Sequence[str], out: Path, seconds: float) -> Iterator[str]:
    """Lines that say what was written; the derivatives are read back for it."""
    rows, seen = 0, {label: Seen() for label in made}
    for file in files:
        part = pd.read_parquet(file, columns=list(made))
        rows += len(part)
        for label, column in seen.items():
            column.add(part[label])
    where = f"{out}" if _folder(out) != out else f"{out}, {len(files)} file{'' if len(files) == 1 else 's'}"
    yield f"{rows:,} rows in {seconds:.1f} s → {where}"
    width = max(map(len, made))
    for label, column in seen.items():
        yield f"  {label:<{width}}  {column}"


# --- what runs --------------------------------------------------------------------------------------------------------


def _indexed(frame: Any) -> bool:
    """Whether the index says something: it has a name, or is no numbering."""
    return frame.index.name is not None or not pd.api.types.is_integer_dtype(frame.index.dtype)
