"""A plan that is easy to see through: what the Dask carriers are tested with, so that they are tested alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from daskgrad._errors import GraphError, RowError
from daskgrad._options import Options

SEEN: list[int] = []  # rows of each part that was run in this process


class TwoArguments(Exception):
    """Its pickle fails: it keeps one argument and wants two back."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"{code} at {where}")
        self.code, self.where = code, where


def double(x: Any) -> Any:
    return 2.0 * x


@dataclass(frozen=True)
class Doubler:
    """`{label: (column, factor)}`; `single`: the result is a Series."""

    outputs: dict[Hashable, tuple[Hashable, float]]
    single: bool = True
    columns: list[Hashable] | None = None
    rowwise: bool = True
    title: str = "grad-price"
    fn: Callable[..., Any] = double
    shared: dict[str, Any] = field(default_factory=dict)
    watch: str = ""
    options: Options = field(default_factory=Options)
    states: int = 1

    def only(self, labels: Iterable[Hashable]) -> Doubler:
        kept = {label: self.outputs[label] for label in labels}
        used = {column for column, _ in kept.values()}
        return replace(self, outputs=kept, columns=[c for c in self.columns or [] if c in used])

    def meta(self, empty: pd.DataFrame | pd.Series) -> pd.DataFrame | pd.Series:
        return self._result(empty.iloc[:0])

    def run(self, part: pd.DataFrame | pd.Series, partition: int | None) -> pd.DataFrame | pd.Series:
        SEEN.append(len(part))
        if self.watch:
            import torch

            with Path(self.watch).open("a") as file:
                file.write(f"{os.getpid()} {torch.get_num_threads()} {','.join(map(str, getattr(part, 'columns', [])))}\n")
        return self._result(part)

    def records(self, records: list[Any]) -> pd.DataFrame:
        return pd.DataFrame({"x": np.array([record["x"] for record in records], "float64")})

    def _result(self, part: pd.DataFrame | pd.Series) -> pd.DataFrame | pd.Series:
        made = {}
        for label, (column, factor) in self.outputs.items():
            cells = part if isinstance(part, pd.Series) else part[column]
            made[label] = (self.fn(cells) * (factor / 2)).astype("float64").rename(label)
        if self.single:
            return next(iter(made.values()))
        return pd.DataFrame(made, index=part.index)


@dataclass(frozen=True)
class Breaker(Doubler):
    """Raises in the row labelled `bad`, with a cause of the kind asked for."""

    bad: Hashable = None
    cause: Callable[[], BaseException] = ValueError

    def run(self, part: pd.DataFrame | pd.Series, partition: int | None) -> pd.DataFrame | pd.Series:
        if self.bad in part.index:
            values = {"x": float(part.loc[self.bad, "x"]), "lock": _lock()}
            try:
                raise self.cause()
            except Exception as error:
                kind = GraphError if isinstance(error, KeyError) else RowError
                problem = kind(f"row {self.bad!r}", label=self.bad, partition=partition, values=values)
                raise problem from error
        return super().run(part, partition)


def _lock() -> Any:
    import threading

    return threading.Lock()


def value_error() -> BaseException:
    return ValueError("the scale is negative")


def key_error() -> BaseException:
    return KeyError("k")


def two_arguments() -> BaseException:
    return TwoArguments(7, "the moon")


def holding_a_lock() -> BaseException:
    error = RuntimeError("locked")
    error.lock = _lock()  # type: ignore[attr-defined]
    return error


def local_class() -> BaseException:
    class Local(Exception):
        def __init__(self, a: int, *, b: int) -> None:
            super().__init__(f"local {a} {b}")
            self.a, self.lock = a, _lock()

    return Local(1, b=2)
