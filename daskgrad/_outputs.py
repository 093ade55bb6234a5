"""The columns of a result: their labels and dtypes, declared before anything is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from . import _dtypes
from ._binding import Input
from ._derivative import UNNAMED, Aux, Derivative, Dot, Problem, Project, Total, arguments_of, written
from ._errors import PlanError
from ._source import Source, differentiable, gradient_dtype_of


@dataclass(frozen=True)
class Output:
    """One column of the result: its label and dtype, and which part of which derivative it holds, in which state of a shared module."""

    label: Hashable
    derivative: Derivative
    dtype: Any
    component: int | None = None
    checkpoint: int | None = None


def outputs_of(
    source: Source,
    asked: list[tuple[Hashable, Derivative]],
    by_name: dict[Hashable, Input],
    bound: tuple[Input, ...],
    parameters: Mapping[Hashable, tuple[str, ...]],
    numbers: Collection[Hashable],
) -> tuple[Output, ...]:
    """`numbers`: the shared parameters that are numbers, tensors of shape ()."""
    outputs: list[Output] = []
    for label, derivative in asked:
        if parameters and any(name in parameters for name in arguments_of(derivative)):
            dtype = _number(source, derivative, bound, numbers)
            outputs.append(Output(written(derivative) if label is UNNAMED else label, derivative, dtype))
            continue
        stacked = isinstance(derivative, tuple) and len(derivative) == 1 and _stacked(derivative[0], by_name)
        if label is UNNAMED and stacked:
            for k, column in enumerate(by_name[derivative[0]].columns):  # type: ignore[index]
                outputs.append(Output(column, derivative, gradient_dtype_of(source, column), k))
        else:
            name = _label(derivative, by_name) if label is UNNAMED else label
            outputs.append(Output(name, derivative, _derivative_dtype(source, derivative, by_name, bound)))
    labels = [output.label for output in outputs]
    twice = [label for label, times in Counter(labels).items() if times > 1]
    if twice:
        raise PlanError(
            f"two results would carry the label {twice[0]!r}. Give each a name of its own: dg.derivatives(data, fn, {{'a': ..., 'b': ...}})"
        )
    return tuple(outputs)


def _stacked(step: Any, by_name: dict[Hashable, Input]) -> bool:
    return not isinstance(step, Dot) and by_name[step].stacked


def _label(derivative: Derivative, by_name: dict[Hashable, Input]) -> Hashable:
    """The name of a result that was given none: the column that feeds the argument, or the reduction as it is written."""
    if isinstance(derivative, tuple) and len(derivative) == 1 and not isinstance(derivative[0], Dot):
        return by_name[derivative[0]].label
    return str(derivative[0]) if isinstance(derivative, tuple) else str(derivative)


def _number(source: Source, derivative: Derivative, bound: tuple[Input, ...], numbers: Collection[Hashable]) -> Any:
    """The dtype of a derivative by shared parameters: an array of all of them, or a number of the floating dtype of what is read."""
    formed = isinstance(derivative, Project | Total)
    formed |= isinstance(derivative, tuple) and not isinstance(derivative[0], Dot) and derivative[0] not in numbers
    if formed:
        return np.dtype(object)
    dtypes = [gradient_dtype_of(source, c) for a in bound for c in a.columns if differentiable(source, c)]
    return _dtypes.common_dtype(dtypes, value=True)


def _derivative_dtype(source: Source, derivative: Derivative, by_name: dict[Hashable, Input], bound: tuple[Input, ...]) -> Any:
    """First order: the argument's own (rule 1). Numbers made of several: what all that is involved has in common."""
    if isinstance(derivative, Problem):
        return pd.StringDtype(na_value=np.nan)
    if isinstance(derivative, Project) or (isinstance(derivative, Aux) and derivative.array):
        return np.dtype(object)
    names = [step for step in derivative if not isinstance(step, Dot)] if isinstance(derivative, tuple) else []
    if len(names) == 1 and not by_name[names[0]].stacked:
        return gradient_dtype_of(source, by_name[names[0]].columns[0])
    if any(by_name[name].stacked for name in names):
        return np.dtype(object)
    involved = [by_name[name] for name in arguments_of(derivative)] or list(bound)
    dtypes = [gradient_dtype_of(source, c) for a in involved for c in a.columns if differentiable(source, c)]
    return _dtypes.common_dtype(dtypes, value=not names)
