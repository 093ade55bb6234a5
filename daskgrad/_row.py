"""The whole row, for a function that takes one argument: `row["x"]`, `row.x`. A column is looked at when it is read."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

from ._binding import Input
from ._cells import StaticKind
from ._errors import PlanError
from ._mode import RowMode
from ._names import listing, nearest, shown
from ._paths import MissingCell, Rows
from ._records import ABSENT

if TYPE_CHECKING:
    from ._table import Cast, Table

_functorch: Any = torch._C._functorch


class RowView:
    """One row's cells by label: numbers and arrays as tensors, everything else as the plain Python value.

    Attributes are columns only. In a batch the view stands for all rows of the batch.
    """

    __slots__ = ("__cast", "__columns", "__known", "__mode", "__named", "__rows", "__table")

    def __init__(self, table: Table, cast: Cast, mode: RowMode, rows: Rows, named: Sequence[Hashable]) -> None:
        self.__table, self.__cast, self.__mode, self.__rows = table, cast, mode, rows
        self.__named = dict.fromkeys(named)
        self.__columns: dict[Hashable, Any] = {}
        self.__known = dict.fromkeys(table.part.columns)  # in order, for messages

    def __getitem__(self, label: Hashable) -> Any:
        if label not in self.__known:
            raise KeyError(self.__unknown(label))
        if label not in self.__columns:
            try:
                self.__columns[label] = self.__load(label)
            except PlanError as error:
                self.__mode.wrong = error
                raise
        return self.__columns[label]

    def __getattr__(self, name: str) -> Any:
        if name in ("_RowView__known", "__setstate__"):  # asked of a copy in the making, which nothing has filled yet
            raise AttributeError(name)
        if name not in self.__known:
            raise AttributeError(self.__unknown(name))
        return self[name]

    # Without these Python would try 0, 1, 2, ... as labels.
    __iter__ = None
    __contains__ = None

    def __repr__(self) -> str:
        return f"<a row with the columns {listing(self.__known)}>"

    def __complete(self) -> None:
        """Load what is differentiated and was not read: its gradient is zero, and a missing value in it does not count."""
        for name in self.__named:
            if name not in self.__mode.named:
                self.__load(name, read=False)
        ordered = {name: self.__mode.named[name] for name in self.__named}
        self.__mode.named.clear()
        self.__mode.named.update(ordered)

    def __unknown(self, label: Hashable) -> str:
        said = f"the row has no column {label!r}. Its columns: {listing(self.__known)}.{nearest(label, self.__known)}"
        methods = isinstance(label, str) and hasattr(pd.Series, label)
        return f"{said} It is no Series and has no methods: row['x'] and row.x are its columns." if methods else said

    def __load(self, label: Hashable, *, read: bool = True) -> Any:
        cells = self.__table.argument(Input(label, (label,)))
        missing = None if cells.missing is None else cells.missing[self.__rows]
        if missing is not None and self.__same(missing):
            if read:
                self.__missing()
            return self.__tensor(label, np.zeros(len(self.__rows)))
        codes = None if cells.codes is None else cells.codes[self.__rows]
        kind = cells.kind(0 if codes is None else int(self.__same(codes)))
        if isinstance(kind, StaticKind):
            if kind.value is ABSENT:
                raise KeyError(f"this record has no {label!r}")
            if label in self.__named:
                raise PlanError(f"the derivative by {label!r} is asked for, but it holds {shown(kind.value)}, which is no number")
            return kind.value
        return self.__tensor(label, self.__cast(label, cells.take(self.__rows)))

    def __same(self, values: Any) -> Any:
        """What all rows of the batch agree on: those that differ cannot even be passengers, having no such cell."""
        paths = self.__mode.paths
        return values[0].item() if paths is None else paths.ask(lambda: values, strict=True)

    def __missing(self) -> NoReturn:
        self.__mode.missing = True
        if self.__mode.paths is not None:
            self.__mode.paths.stop(MissingCell())
        raise MissingCell

    def __tensor(self, label: Hashable, array: Any) -> Tensor:
        mode = self.__mode
        one = mode.paths is None
        tensor = torch.from_numpy(array[0:1].reshape(array.shape[1:]) if one else array)
        if label in self.__named:
            with contextlib.nullcontext() if one else temporarily_pop_interpreter_stack():  # vmap lets nothing require a gradient
                tensor = mode.named[label] = tensor.requires_grad_()
            mode.leaves.append(tensor)
            tensor = tensor.clone() if one or mode.fresh else tensor
        return tensor if one else _functorch._add_batch_dim(tensor, 0, mode.level)


def complete(view: RowView) -> None:
    """After the call: what is differentiated and was not read. (No method: a column may have any name.)"""
    view._RowView__complete()
