"""Sums over all rows of the gradient by shared parameters: per-row exact, as a tree reduction on Dask, in memory that rows do not enter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from . import _dask
from ._column import apply, plan_of
from ._derivative import Total
from ._errors import PlanError
from ._names import listing, nearest

Gradients = dict[str, NDArray[np.float64]]


def mean_gradient(
    data: Any,
    fn: Callable[..., Any],
    wrt: str,
    *,
    inputs: Mapping[str, Any] | None = None,
    shared: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The mean over all rows of the gradient of `fn` by shared parameters.

    Args:
        data, fn, inputs, shared, **options: as for `grad_column`. Rows with a missing value (and with `on_error="null"` rows that fail)
            do not count.
        wrt: a shared argument, a part of it (`"model.head"`), or a glob.

    Returns:
        `{parameter path: array of its shape}`, float64; of a module in several states (`checkpoints`) a list with one for each. Of
        Dask data a `dask.delayed.Delayed` of it: nothing is computed before `.compute()`.

    Raises:
        PlanError: `wrt` names no shared parameter.
        GraphError, RowError: as for `grad_column`.

    Example:
        >>> import pandas as pd, torch, daskgrad as dg
        >>> df = pd.DataFrame({"x": [1.0, 3.0]})
        >>> dg.mean_gradient(df, lambda w, x: w * x**2, "w", shared={"w": torch.tensor(2.0)})
        {'w': array(5.)}
    """
    return _total(data, fn, Total(wrt), inputs, shared, options, mean=True)


def fisher_diagonal(
    data: Any,
    fn: Callable[..., Any],
    wrt: str,
    *,
    inputs: Mapping[str, Any] | None = None,
    shared: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The mean over all rows of the squared gradient, element by element: the diagonal of the empirical Fisher information.

    `fn` is the negative log-likelihood of one row. Arguments, result and errors as for `mean_gradient`.

    Example:
        >>> import pandas as pd, torch, daskgrad as dg
        >>> df = pd.DataFrame({"x": [1.0, 3.0]})
        >>> dg.fisher_diagonal(df, lambda w, x: w * x, "w", shared={"w": torch.tensor(2.0)})
        {'w': array(5.)}
    """
    return _total(data, fn, Total(wrt, squares=True), inputs, shared, options, mean=True)


def clipped_sum(
    data: Any,
    fn: Callable[..., Any],
    wrt: str,
    max_norm: float,
    *,
    inputs: Mapping[str, Any] | None = None,
    shared: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The sum over all rows of their gradients, each scaled down to `max_norm` where it is longer (Abadi et al. 2016, arXiv:1607.00133).

    Arguments, result and errors as for `mean_gradient`; `max_norm` is a length above 0.

    Example:
        >>> import pandas as pd, torch, daskgrad as dg
        >>> df = pd.DataFrame({"x": [1.0, 3.0]})
        >>> dg.clipped_sum(df, lambda w, x: w * x, "w", max_norm=2.0, shared={"w": torch.tensor(2.0)})
        {'w': array(3.)}
    """
    if not max_norm > 0:
        raise PlanError(f"max_norm={max_norm!r} is not possible: a length above 0")
    return _total(data, fn, Total(wrt, clip=float(max_norm)), inputs, shared, options, mean=False)


def _total(
    data: Any,
    fn: Callable[..., Any],
    total: Total,
    inputs: Mapping[str, Any] | None,
    shared: Mapping[str, Any] | None,
    options: dict[str, Any],
    *,
    mean: bool,
) -> Any:
    plan = plan_of(data, fn, total, inputs=inputs, shared=shared, **options)
    if total.wrt not in plan.parameters:
        raise PlanError(
            f"{total.wrt!r} is no shared argument, and sums are of gradients by shared parameters: {listing(plan.shared)}. By a "
            "column, grad_column(...).mean() and .sum() are pandas' and Dask's own."
        )
    from ._parameters import parameters_of

    there = parameters_of(plan.shared)
    shapes = {path: tuple(there[path].shape) for path in plan.parameters[total.wrt]}
    several = plan.checkpoints is not None
    if _dask.kind(data) is None:
        return finished(apply(data, plan), shapes, mean, several)
    return _dask.summed(data, plan, finished, shapes, mean, several)


def finished(sums: pd.Series, shapes: Mapping[str, tuple[int, ...]], mean: bool, several: bool) -> Gradients | list[Gradients]:
    """The sum over all parts, (states, 1 + elements) with the count in front, as one array for each parameter, for each state."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    found = []
    for count, flat in ((state[0], state[1:]) for state in sums.iloc[0]):
        whole = flat if not mean else flat / count if count else np.full_like(flat, np.nan)
        parts = zip(shapes.items(), np.split(whole, ends[:-1]), strict=True)
        found.append({path: part.reshape(shape) for (path, shape), part in parts})
    return found if several else found[0]


def parameter_slices(shared: Mapping[str, Any], wrt: str) -> dict[str, slice]:
    """Which part of a flat gradient, as `wrt="model"` gives it in each cell, belongs to which parameter.

    Args:
        shared: the shared arguments, as for `grad_column`.
        wrt: the same `wrt`.

    Returns:
        `{parameter path: slice}`, in order; the gradient of each is flattened in row-major order.

    Raises:
        PlanError: `wrt` names no shared parameter.

    Example:
        >>> import torch, daskgrad as dg
        >>> dg.parameter_slices({"model": torch.nn.Linear(3, 2)}, "model")
        {'model.weight': slice(0, 6, None), 'model.bias': slice(6, 8, None)}
    """
    from ._parameters import matching, parameters_of

    there = {path: tensor for path, tensor in parameters_of(shared).items() if tensor.is_floating_point()}
    meant = matching(wrt, list(there))
    if not meant:
        raise PlanError(f"{wrt!r} names no shared parameter. Possible: {listing(there)}.{nearest(wrt, there)}")
    found, start = {}, 0
    for path in meant:
        found[path] = slice(start, start + there[path].numel())
        start = found[path].stop
    return found
