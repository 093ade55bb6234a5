"""What is seen of one part's results, for the gradient page: magnitudes, what is not finite, what failed.

Counts of what is not finite, and magnitudes, come from the batches that are looked at: as many as fit into a small share of the
thread's processor time. How many rows that were is told with them.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from daskgrad._cells import shown_label
from daskgrad._names import said

from ._history import BINS, LOWEST, PER_DECADE

SAMPLE: Final = 512  # values of a batch whose magnitude is taken
COLUMNS: Final = 24  # of results that are looked at
TROUBLE: Final = 5  # rows of a part, of each kind of trouble, that are told one by one
FINITE: Final = 0.002  # of a thread's processor time that looks for what is not finite may take
MAGNITUDES: Final = 0.0015  # and looks at magnitudes
SAVED: Final = 0.005  # seconds of either that a thread may have saved up, and begins with


class Notes:
    """Written by the thread that computes the part; `record` is called in any.

    Args:
        index: (rows,) the part's index.
        partition: its number, where that is known.
        reports: what the kernel has seen, group by group.
    """

    def __init__(self, index: pd.Index, partition: int | None, reports: Sequence[Any]) -> None:
        self._index, self._partition, self._reports = index, partition, reports
        self._began = time.perf_counter()
        self._finite, self._magnitudes = _budgets.finite, _budgets.magnitudes
        self.settle()
        self._columns: dict[str, _Column] = {}
        self._bad: NDArray[np.bool_] | None = None  # (rows,) something is not finite
        self._bad_rows, self._failed = 0, 0
        self._told: Counter[str] = Counter()
        self._trouble: list[list[str]] = []

    @property
    def quiet(self) -> bool:
        """Whether nothing has failed."""
        return not self._failed

    def put(self, label: Hashable, rows: NDArray[np.intp] | slice, values: NDArray[Any], gradient: bool) -> None:
        """A batch of one result column: `values` (k, *shape) of `rows`. `gradient`: its magnitudes are of interest."""
        if not (self._finite.open or self._magnitudes.open):
            return
        name = label if isinstance(label, str) else shown_label(label)
        column = self._columns.get(name)
        if column is None:
            if len(self._columns) >= COLUMNS:
                return
            column = self._columns[name] = _Column()
        with np.errstate(all="ignore"):  # who looks changes nothing, also where warnings are errors
            self._look(name, column, rows, values, gradient)

    def _look(self, name: str, column: _Column, rows: NDArray[np.intp] | slice, values: NDArray[Any], gradient: bool) -> None:
        if self._finite.open:
            with self._finite:
                column.looked += len(values)
                if not math.isfinite(abs(values.sum())):  # one pass; a finite sum is one of finite numbers
                    self._not_finite(name, column, rows, values)
        if gradient and self._magnitudes.open:
            with self._magnitudes:
                column.add(values[:: 1 + (len(values) - 1) // SAMPLE])

    def settle(self) -> None:
        """A batch is over, all its columns put: whether the next is looked at."""
        now = time.thread_time()
        self._finite.settle(now)
        self._magnitudes.settle(now)

    def _not_finite(self, name: str, column: _Column, rows: NDArray[np.intp] | slice, values: NDArray[Any]) -> None:
        bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)  # (k,)
        if not bad.any():  # finite numbers whose sum overflows
            return
        column.bad += int(bad.sum())
        if self._bad is None:
            self._bad = np.zeros(len(self._index), bool)
        where = np.arange(len(self._index))[rows][bad]
        new = np.flatnonzero(~self._bad[where])  # a row is told once, not by each of its columns
        if not len(new):
            return
        self._bad[where] = True
        self._bad_rows += len(new)
        first = values[bad][new[0]].reshape(-1)
        number = first[~np.isfinite(first)][0]
        self._tell("not finite", int(where[new[0]]), f"{name} is {number}")

    def fail(self, row: int, error: Exception) -> None:
        """A row has no result."""
        self._failed += 1
        self._tell("failed", row, _message(error))

    def broke(self, error: BaseException) -> None:
        """The whole part has no result."""
        self._trouble.append(["failed", "", _short(_message(error), 240)])

    def _tell(self, kind: str, row: int, message: str) -> None:
        if self._told[kind] < TROUBLE:
            self._told[kind] += 1
            self._trouble.append([kind, _short(shown_label(self._index[row]), 60), _short(message, 240)])

    def record(self) -> dict[str, Any]:
        """What is known now, of plain types."""
        reports = list(self._reports)
        return {
            "partition": self._partition,
            "seconds": time.perf_counter() - self._began,
            "engines": {
                name: count
                for name, field in (("vmap", "batched"), ("loop", "looped"), ("compiled", "compiled"))
                if (count := sum(getattr(report, field, 0) for report in reports))
            },
            "paths": sum(report.paths for report in reports),
            "failed": self._failed,
            "bad": self._bad_rows,
            "columns": {name: column.state() for name, column in list(self._columns.items())},
            "trouble": list(self._trouble),
        }


class _Budget:
    """Processor time of a thread that may be spent on something: a share of all that it uses.

    Attributes:
        open: whether some is left, for the batch that comes.
    """

    def __init__(self, share: float) -> None:
        self.open = True
        self._share, self._left = share, SAVED
        self._settled, self._started = time.thread_time(), 0.0

    def settle(self, now: float) -> None:
        """`now`: of the thread's own clock."""
        self._left = min(SAVED, self._left + self._share * (now - self._settled))
        self._settled = now
        self.open = self._left > 0

    def __enter__(self) -> None:
        self._started = time.thread_time()

    def __exit__(self, *error: object) -> None:
        self._left -= time.thread_time() - self._started


class _Budgets(threading.local):
    def __init__(self) -> None:
        self.finite, self.magnitudes = _Budget(FINITE), _Budget(MAGNITUDES)


_budgets = _Budgets()


class _Column:
    def __init__(self) -> None:
        self.looked, self.bad, self.zeros = 0, 0, 0
        self._bins = np.zeros(BINS, np.int64)

    def add(self, values: NDArray[Any]) -> None:
        """Take the magnitudes of `values` (k, *shape); of an array, its norm."""
        sizes = np.abs(values) if values.ndim == 1 else np.linalg.norm(values.reshape(len(values), -1), axis=1)  # (k,)
        sizes = sizes[np.isfinite(sizes)]
        positive = sizes[sizes > 0].astype(np.float64)
        self.zeros += len(sizes) - len(positive)
        places = np.clip((np.log10(positive) - LOWEST) * PER_DECADE, 0, BINS - 1).astype(np.intp)
        self._bins += np.bincount(places, minlength=BINS)

    def state(self) -> list[Any]:
        """Rows looked at, rows not finite, zeros among the sample, and the bins that are not empty with their counts."""
        filled = np.flatnonzero(self._bins)
        return [self.looked, self.bad, self.zeros, filled.tolist(), self._bins[filled].tolist()]


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {said(error)}"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
