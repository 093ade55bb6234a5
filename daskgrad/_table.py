"""The cells of one part: which rows are alike, and their numbers as arrays in the dtype of the computation."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from . import _cells, _dtypes
from ._binding import Input
from ._cells import ArrayKind, Cells, StaticKind
from ._derivative import Dot, directions_of
from ._errors import GraphError, PlanError
from ._paths import Rows
from ._plan import Plan
from ._source import column_of


@dataclass(frozen=True)
class Group:
    """Rows that are alike. `codes`: the kind of each argument's cells."""

    rows: Rows
    codes: Mapping[Hashable, int]


class Table:
    """What a part holds, argument by argument."""

    def __init__(self, plan: Plan, part: pd.DataFrame | pd.Series) -> None:
        self.plan, self.part = plan, part
        self._cells: dict[Hashable, Cells | Stacked] = {}

    def argument(self, argument: Input) -> Cells | Stacked:
        """The cells of a column argument."""
        if argument.name not in self._cells:
            found = [_read(self.column(column)) for column in argument.columns]
            self._cells[argument.name] = Stacked(found) if argument.stacked else found[0]
        return self._cells[argument.name]

    def column(self, label: Hashable) -> pd.Series:
        """The column of that label, of which there must be one."""
        return column_of(self.part, label)

    def groups(self) -> Iterator[Group]:
        """The rows in which nothing is missing, by what their cells are."""
        everything = _first_rows(len(self.part))
        looked_at = self.plan.inputs
        if self.plan.form == "row":  # cells are looked at when they are read, but for directions, which never are
            looked_at = tuple(argument for argument in looked_at if isinstance(argument.name, Dot))
        cells = {argument.name: self.argument(argument) for argument in looked_at}
        missing = [one.missing for one in cells.values() if one.missing is not None]
        rows = np.flatnonzero(~np.logical_or.reduce(missing)) if missing else everything
        if not len(rows):
            return
        mixed = {name: one.codes for name, one in cells.items() if one.codes is not None}
        if not mixed:
            yield Group(rows, dict.fromkeys(cells, 0))
            return
        table = pd.DataFrame({str(k): codes[rows] for k, codes in enumerate(mixed.values())})
        for _, places in sorted(table.groupby(list(table.columns), sort=False).indices.items(), key=lambda kv: kv[1][0]):
            here = rows[places]
            yield Group(here, {n: 0 if c.codes is None else int(c.codes[here[0]]) for n, c in cells.items()})

    def seed(self) -> int:
        """Where the random draws of this part begin: the user's seed and what is in the part, never its place."""
        digest = hashlib.blake2b(str(self.plan.options.seed).encode(), digest_size=8)
        digest.update(np.ascontiguousarray(pd.util.hash_pandas_object(self.part.index.to_series(), index=False)).tobytes())
        names = [self.part.name] if isinstance(self.part, pd.Series) else list(dict.fromkeys(self.part.columns))
        for name in names:
            digest.update(_content(_read(self.column(name))))
        return int.from_bytes(digest.digest(), "little") >> 1


def _read(series: pd.Series) -> Cells:
    """What a column holds; what cannot be read is a mistake of the call."""
    try:
        return _cells.read(series)
    except GraphError:
        raise
    except (TypeError, ValueError) as error:
        problem = error
    raise PlanError(str(problem)) from problem


def _content(cells: Cells) -> bytes:
    """The cells as bytes, equal for equal columns."""
    codes = np.zeros(len(cells), np.intp) if cells.codes is None else cells.codes
    if cells.missing is not None:
        codes = np.where(cells.missing, -1, codes)
    content = [codes.tobytes()]
    for code in range(cells.n_kinds):
        kind = cells.kind(code)
        rows = np.flatnonzero(codes == code)
        content.append(repr(kind.value).encode() if isinstance(kind, StaticKind) else cells.take(rows).tobytes())
    return b"|".join(content)


class Stacked:
    """Several columns as one vector argument, `inputs={"x": ["f0", "f1"]}`: like `Cells`, with one more axis."""

    def __init__(self, parts: Sequence[Cells]) -> None:
        self.parts = parts
        missing = [part.missing for part in parts if part.missing is not None]
        self.missing: NDArray[np.bool_] | None = np.logical_or.reduce(missing) if missing else None
        codes = [part.codes for part in parts if part.codes is not None]
        self.codes: NDArray[np.intp] | None = None
        self._first: NDArray[np.intp] = np.zeros(1, np.intp)
        if codes:
            table = np.stack(codes, axis=1)
            if self.missing is not None:
                table[self.missing] = -1
            _, self._first, self.codes = np.unique(table, axis=0, return_index=True, return_inverse=True)

    @property
    def n_kinds(self) -> int:
        """How many kinds occur; 0 where one of the columns does not tell."""
        return len(self._first) if all(part.n_kinds for part in self.parts) else 0

    def kind(self, code: int) -> ArrayKind | StaticKind:
        row = self._first[code]
        kinds = [part.kind(0 if part.codes is None else int(part.codes[row])) for part in self.parts]
        static = next((kind for kind in kinds if isinstance(kind, StaticKind)), None)
        if static is not None:
            return static
        arrays = [kind for kind in kinds if isinstance(kind, ArrayKind)]
        shapes = {kind.shape for kind in arrays}
        if len(shapes) > 1:
            raise PlanError(f"columns that are stacked into one vector hold cells of different shapes: {sorted(shapes)}")
        return ArrayKind(np.result_type(*[kind.dtype for kind in arrays]), (len(arrays), *shapes.pop()))

    def take(self, rows: Rows | slice, *, copy: bool = True) -> NDArray[Any]:
        parts = [part.take(rows, copy=copy) for part in self.parts]
        return np.stack(parts, axis=1, dtype=np.result_type(*parts))

    def cell(self, row: int) -> object:
        return [part.cell(row) for part in self.parts]


class Cast:
    """Which dtype each argument's numbers have inside the row function.

    `default` is torch's default dtype inside: the floating dtype of what is read, float64 if there is none.
    """

    def __init__(self, plan: Plan, module_dtype: np.dtype[Any] | None, kinds: Sequence[ArrayKind | StaticKind]) -> None:
        self.to = plan.options.dtype or module_dtype
        self._named = {*plan.named, *directions_of(plan.asked)}
        read = [_real(kind.dtype) for kind in kinds if isinstance(kind, ArrayKind) and kind.dtype.kind in "fc"]
        self.floating = self.to or (np.result_type(*read) if read else np.dtype("float64"))
        self.default: torch.dtype = getattr(torch, self.floating.name)

    def __call__(self, name: Hashable, array: NDArray[Any]) -> NDArray[Any]:
        if array.dtype.kind in "fc":
            to = array.dtype if self.to is None else self.to
            return array.astype(np.result_type(to, np.complex64) if array.dtype.kind == "c" else to, copy=False)
        if name in self._named:
            return array.astype(self.to or np.float64)
        small = array.dtype.kind in "iu" and np.can_cast(array.dtype, np.int64)
        return array.astype(np.int64, copy=False) if small else array  # what torch indexes with, and none overflows


def _real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def dtypes_of(part: pd.DataFrame | pd.Series) -> list[Any]:
    """The dtypes of a part's columns."""
    return [part.dtype] if isinstance(part, pd.Series) else list(part.dtypes)


def kind_of(dtype: Any) -> ArrayKind | StaticKind:
    """What the dtype of a column contributes to the default dtype, where cells are not looked at yet."""
    floating = None if _dtypes.role(dtype) == "static" else _dtypes.floating(dtype)
    return StaticKind(None) if floating is None else ArrayKind(floating, ())


_KEPT = 2**20  # rows: their numbers are 8 MiB
_numbers: NDArray[np.intp] = np.arange(0)


def _first_rows(count: int) -> NDArray[np.intp]:
    """The positions 0 to `count`, for reading only; kept for the next part, since their memory costs more than they do."""
    global _numbers
    if count > _KEPT:
        return np.arange(count)
    known = _numbers
    if len(known) < count:
        known = np.arange(count)
        known.flags.writeable = False
        _numbers = known
    return known[:count]


def as_slice(rows: Rows | slice) -> Rows | slice:
    """Consecutive rows, which come sorted, as a slice: no gather is needed."""
    if isinstance(rows, slice):
        return rows
    if len(rows) > 1 and rows[-1] - rows[0] == len(rows) - 1:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows
