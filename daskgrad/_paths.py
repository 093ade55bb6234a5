"""Paths: where rows of one batch give different answers to a question, they part.

A run goes on with the larger part and remembers the others with the answers they gave so far; they come back in a later run, which
replays those answers. The number of runs is the number of distinct paths, not of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ._lines import users_line

if TYPE_CHECKING:
    from torch import Tensor

Rows = NDArray[np.intp]
Answers = tuple[Any, ...]

FEW = 4
"""Fewer rows than this are faster one by one than as a batch (measured: a batched run costs about three rows)."""


class Signal(BaseException):
    """Ends a run without blaming the row function; no `except Exception` of its own can catch it."""


class Regroup(Signal):
    """Fewer than half of the rows are still on the path: run again with those alone."""


class Unbatchable(Signal):
    """This path cannot run batched, for the reason given."""


class MissingCell(Signal):
    """The rows on this path read a missing value: they have no result, and that is no error."""


class OwnParameters(Signal):
    """A parameter is used in a way that has no rule: run again with a copy of it for each row."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.names = names


class TooLarge(Signal):
    """The run needs more memory than it may: run again with fewer rows."""


@dataclass(frozen=True)
class Question:
    """What a question is about, for those who want to ask it again: `tensor` (rows, ...) with one element in each row, whose value is the
    answer, or (`whole`) its whole part.
    """

    tensor: Tensor
    whole: bool = False


class Paths:
    """The questions of one run, and how its rows answer them.

    Attributes:
        traced: the run is recorded for any rows, and there are no values to look at.
        rows: the rows that run, positions in the part, (rows,).
        count: how many they are; a symbol where the run is traced.
        answers: the answers so far; a run begins with those that its rows gave before.
        active: which of `rows` are still on the path, None for all, (active,) indices into `rows`.
        left: the rows that have left, with their answers.
        parted: how many answers the question had that nearly every row answers in its own way, and the user's line where it was asked.
        nbytes: what the results of the run's torch calls hold so far, views counted too.
        calls: how many these are.
    """

    traced = False

    def __init__(self, rows: Rows, answers: Answers) -> None:
        self.rows = rows
        self.count: Any = len(rows)
        self.answers = list(answers)
        self.active: Rows | None = None
        self.left: list[tuple[Answers, Rows]] = []
        self.signal: Signal | None = None
        self.nbytes = 0
        self.calls = 0
        self.parted = (0, "")
        self._asked = 0

    @property
    def remaining(self) -> Rows:
        """The rows that are still on the path."""
        return self.rows if self.active is None else self.rows[self.active]

    def ask(self, evaluate: Callable[[], NDArray[Any]], *, strict: bool = False, question: Question | None = None) -> Any:
        """The answer to go on with. `evaluate` gives each row's answer, (rows,).

        `strict`: rows that answer otherwise cannot take part in what follows, not even as passengers. `question`: what it is about,
        where that can be computed without Python.
        """
        self._asked += 1
        if self._asked <= len(self.answers):
            return self.answers[self._asked - 1]
        values = evaluate()
        here = values if self.active is None else values[self.active]
        codes, uniques = _factorized(here)
        if len(uniques) == 1:
            self.answers.append(uniques[0])
            return uniques[0]
        if len(uniques) * FEW > len(here) > FEW and len(uniques) > self.parted[0]:
            self.parted = (len(uniques), users_line())
        answer = self._part(codes, uniques)
        assert self.active is not None
        if strict or 2 * len(self.active) < len(self.rows):
            self.stop(Regroup())
        return answer

    def stop(self, signal: Signal) -> NoReturn:
        """End the run; noted, in case a bare `except:` of the row function catches it."""
        self.signal = self.signal or signal
        raise signal

    def follow(self, values: NDArray[Any], answer: Any) -> bool:
        """Go on with `answer`, where each row's is in `values` (rows,); False where no row gives it."""
        here = values if self.active is None else values[self.active]
        codes, uniques = _factorized(here)
        wanted = next((code for code, value in enumerate(uniques) if _same(value, answer)), None)
        if len(uniques) == 1 and wanted is not None:
            self.answers.append(answer)
        else:
            self._part(codes, [*uniques, answer], len(uniques) if wanted is None else wanted)
        return wanted is not None

    def _part(self, codes: NDArray[np.intp], uniques: list[Any], keep: int | None = None) -> Any:
        """Go on with the answer `keep`, or the one that most rows give; the others have left."""
        before = tuple(self.answers)
        counts = np.bincount(codes, minlength=len(uniques))
        most = int(counts.argmax()) if keep is None else keep
        active = np.arange(len(self.rows)) if self.active is None else self.active
        groups = np.split(active[np.argsort(codes, kind="stable")], np.cumsum(counts)[:-1])
        for code, group in enumerate(groups):
            if code != most and len(group):
                self.left.append(((*before, uniques[code]), self.rows[group]))
        self.active = groups[most]
        self.answers.append(uniques[most])
        return uniques[most]


def _same(value: Any, answer: Any) -> bool:
    """Whether two answers are one: equal, and of floats the same zero; NaN is itself."""
    if isinstance(value, float) and isinstance(answer, float):
        return value.hex() == answer.hex()
    return bool(value == answer)


def _factorized(values: NDArray[Any]) -> tuple[NDArray[np.intp], list[Any]]:
    """Codes (rows,) and the distinct values as Python objects. Floats are told apart by their bits: 0.0 is not -0.0."""
    if values.dtype == bool:
        truths = int(np.count_nonzero(values))
        if truths in (0, len(values)):
            return np.zeros(len(values), np.intp), [truths > 0]
        return values.astype(np.intp), [False, True]
    if values.dtype.kind == "f":
        codes, bits = pd.factorize(np.ascontiguousarray(values).view(f"i{values.dtype.itemsize}"))
        return codes, np.asarray(bits).view(values.dtype).tolist()
    codes, uniques = pd.factorize(values)
    return codes, uniques.tolist() if isinstance(uniques, np.ndarray) else list(uniques)
