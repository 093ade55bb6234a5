"""The verbs. They make the plan and hand it to the carrier: pandas at once, Dask lazily."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from . import _captured, _dask, _options, _plan
from ._derivative import UNNAMED, Aux, Derivative, Norm, Problem, Project, Total, parse
from ._errors import PlanError
from ._names import function_name
from ._plan import Plan
from ._source import Source
from ._watch._reporter import watched


def grad_column(
    data: Any,
    fn: Callable[..., Any],
    wrt: Any = None,
    *,
    inputs: Mapping[str, Any] | None = None,
    shared: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The gradient of `fn`, a PyTorch function of one row, for every row, as a column.

    Args:
        data: a pandas DataFrame or Series (computed at once), or a Dask DataFrame, Series or Bag (lazy: nothing is computed, and
            `fn` is not called, until `.compute()`).
        fn: a pure function of one row, written with torch operations: one number out, a tensor of shape (). An argument that is
            named like a column gets that row's cell: a tensor of shape () for a number, of the cell's shape for an array or list,
            the plain Python value for anything else (text, category, date). A function of one argument that names no column gets
            the whole row: `row["x"]`, `row.x`.
        wrt: the argument to differentiate by → a Series; a list of arguments → a DataFrame; None: the first argument that a column
            feeds. Of a function of whole rows: the column.
        inputs: where arguments come from, if not from the column of their name: `{"x": "column"}`, or `{"x": ["f0", "f1"]}` to
            stack columns into a vector, whose gradient comes back as those columns.
        shared: arguments that are the same for every row: `{"model": net}`. A module's floating dtype is the dtype of the
            computation where it differs from the table's.
        **options: how to compute, the same for every verb:

            - `engine="auto"`: batches under vmap, and row by row what cannot be batched; "vmap" or "loop" alone.
              "compiled": the derivative as native code, which takes a C++ compiler half a minute once and is kept in the user's cache
              folder, or the one that DASKGRAD_CACHE names; like "auto", with a warning, where there can be none.
            - `batch_size=None`: rows computed at once; None chooses so that memory stays bounded.
            - `dtype=None`: the floating dtype of the computation, results back in the column's; None: that of a shared module,
              else that of what is read.
            - `device=None`: where to compute, "cpu" (None), "cuda", "cuda:0", or "auto": a GPU where there is one.
            - `on_error="raise"`: stop and name the row that failed; "null": its result is missing, the others keep theirs.
            - `allow_unused=False`: True gives zeros, not an error, where no argument asked for reaches the output.
            - `randomness="error"`: refuse random draws; "different" draws for each row, "same" once for all rows.
            - `seed=None`: makes those draws repeatable for the same partitions; None: they follow torch's generator.
            - `detect_anomaly=False`: True names the operation and the line that made a gradient not finite, as an error.

    Returns:
        A Series or DataFrame with `data`'s index. Each column has the label and dtype of what it is taken with respect to: float32
        stays float32, `Float64` keeps its `<NA>`, an array cell gives an array cell of its own shape; integers give float64. A row
        with a missing value in what it reads is missing in the result.

    Raises:
        PlanError: the call makes no sense (a TypeError): arguments and columns do not fit, a dtype cannot be differentiated.
        GraphError: no gradient can pass (a RuntimeError): a value has left torch, or nothing asked for reaches the output.
        RowError: `fn` failed on a row (a RuntimeError); it has `label`, `partition`, `values`, and the exception as `__cause__`.

    Example:
        >>> import pandas as pd, daskgrad as dg
        >>> df = pd.DataFrame({"x": [1.0, 2.0, 3.0], "y": [4.0, 5.0, 6.0]})
        >>> def f(x, y):
        ...     return x**2 * y
        >>> dg.grad_column(df, f).tolist()
        [8.0, 20.0, 36.0]
        >>> dg.grad_column(df, f, wrt=["x", "y"])
              x    y
        0   8.0  1.0
        1  20.0  4.0
        2  36.0  9.0
    """
    if isinstance(wrt, Mapping):
        raise PlanError(
            f"wrt={wrt!r} is not possible, for a dict names no argument: wrt='x' gives a Series, wrt=['x', 'y'] a DataFrame, and "
            "dg.derivatives takes {name: derivative}"
        )
    if "vector" in options:
        raise PlanError("vector= is for dg.derivatives, which gives Jacobians: grad_column is of a function that returns one number")
    return apply(data, plan_of(data, fn, wrt, inputs=inputs, shared=shared, **options))


def derivatives(
    data: Any,
    fn: Callable[..., Any],
    wanted: Mapping[Hashable, Any],
    *,
    vector: bool = False,
    inputs: Mapping[str, Any] | None = None,
    shared: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Several derivatives of `fn`, a PyTorch function of one row, for every row, in one pass over the data.

    Args:
        data, fn, inputs, shared, **options: as for `grad_column`.
        wanted: `{name: derivative}`: `()` the value, `"x"` first order, `("x", "y")` by x, then by y, and so on to any order;
            `dg.norm("x")`, `dg.dot("x", v)`, `dg.project("x", k)` reductions; `("x", dg.dot("x", v))` a Hessian times a vector;
            `dg.aux("name")` a further output of `fn`; `dg.problem` what is wrong with the row. By array arguments: gradient vectors,
            Hessian matrices, and of a vector-valued `fn` Jacobians, with axes as in `torch.func`: output, then input.
        vector: `fn` returns a vector: values and Jacobians are array cells (output axes, then input axes) in object columns. On
            pandas this is seen by itself; a lazy Dask column must be told, since its dtype is declared before `fn` is called.

    Returns:
        A DataFrame with `data`'s index and the names of `wanted`.

    Raises:
        PlanError, GraphError, RowError: as for `grad_column`. With `dg.problem` among what is wanted, no row raises.

    Example:
        >>> import pandas as pd, daskgrad as dg
        >>> df = pd.DataFrame({"x": [1.0, 2.0]})
        >>> dg.derivatives(df, lambda x: x**3, {"value": (), "slope": "x", "curvature": ("x", "x")})
           value  slope  curvature
        0    1.0    3.0        6.0
        1    8.0   12.0       12.0
    """
    if not isinstance(wanted, Mapping) or not wanted:
        raise PlanError(f"derivatives needs {{name: derivative}} with at least one name, as {{'slope': 'x'}}; it got {wanted!r}")
    return apply(data, plan_of(data, fn, wanted, vector=vector, inputs=inputs, shared=shared, **options))


def plan_of(
    data: Any,
    fn: Callable[..., Any],
    wrt: Any,
    *,
    vector: bool = False,
    inputs: Mapping[str, Any] | None = None,
    shared: Mapping[str, Any] | None = None,
    **options: Any,
) -> Plan:
    """The plan of a call: of `derivatives` where `wrt` is `{name: derivative}`, of `grad_column` otherwise. Nothing is computed."""
    several = isinstance(wrt, list | Mapping)
    asked = _asked(wrt)
    if any(isinstance(derivative, Problem) for _, derivative in asked):
        options.setdefault("on_error", "null")
    chosen = _options.make(options)
    if chosen.randomness != "error" and chosen.seed is None:
        chosen = replace(chosen, seed=_seed())
    plan = _plan.make(
        _source(data),
        fn,
        asked,
        inputs=inputs,
        shared=shared,
        options=chosen,
        single=not several,
        output=("vector" if vector else "any") if isinstance(wrt, Mapping) else "number",
    )
    _captured.check(plan)
    if _dask.kind(data) in ("frame", "series"):
        _dask.refuse_text_that_was_arrays(data, {column for argument in plan.inputs for column in argument.columns})
    return plan


def _asked(wrt: Any) -> list[tuple[Hashable, Derivative]]:
    """What is asked for, with its name or `UNNAMED` for the name of the column; empty for the default, the first argument."""
    if isinstance(wrt, Mapping):
        return [(name, parse(wish, name)) for name, wish in wrt.items()]
    if isinstance(wrt, list) and not wrt:
        raise PlanError("wrt=[] asks for no derivative: name at least one argument, or leave wrt out for the first")
    wishes = wrt if isinstance(wrt, list) else [] if wrt is None else [wrt]
    for wish in wishes:
        _check_hashable(wish, wrt)
    return [(UNNAMED, wish if isinstance(wish, Norm | Project | Total | Aux | Problem) else (wish,)) for wish in wishes]


def _check_hashable(wish: Any, wrt: Any) -> None:
    try:
        hash(wish)
    except TypeError:
        raise PlanError(
            f"wrt={_in_short(wrt)} is not possible, for a {type(wish).__name__} names no argument: wrt='x' gives a Series, wrt=['x', 'y'] "
            "a DataFrame"
        ) from None


def _in_short(wrt: Any) -> str:
    text = " ".join(repr(wrt).split())
    return text if len(text) <= 40 else text[:40] + "…"


def apply(data: Any, plan: Plan) -> Any:
    """`plan` on its carrier: pandas at once, Dask lazily."""
    kind = _dask.kind(data)
    if kind is None:
        return _on_pandas(data, plan)
    return _dask.bag(data, plan) if kind == "bag" else _dask.frame(data, plan)


def _on_pandas(data: pd.DataFrame | pd.Series, plan: Plan) -> Any:
    from ._shared import copies

    if isinstance(data, pd.DataFrame) and plan.columns is not None and plan.columns != list(data.columns):
        wanted = frozenset(plan.columns)  # by place: pandas takes some labels for masks, and finds others only among their like
        data = data.iloc[:, [place for place, label in enumerate(data.columns) if label in wanted]]
    with watched(function_name(plan.fn), None, len(data), of=len(data), passes=plan.states):
        return replace(plan, shared=copies(plan.shared)).run(data, None)


def _source(data: Any) -> Source:
    """What is known of `data` before it is touched."""
    kind = _dask.kind(data)
    if kind == "bag":
        return Source("bag", pd.DataFrame(), None, _dask.peek(data))
    empty = data._meta if kind is not None else data
    if isinstance(empty, pd.Series):
        return Source("series", empty.iloc[:0], [empty.name], dask=kind is not None)
    if isinstance(empty, pd.DataFrame):
        return Source("frame", empty.iloc[:0], list(empty.columns), dask=kind is not None)
    if callable(data):
        raise PlanError("the data comes first and then the row function, as in grad_column(data, fn); here data is a function")
    raise PlanError(
        f"data is a {type(data).__module__}.{type(data).__qualname__}. Possible: a pandas DataFrame or Series, a Dask DataFrame, "
        "Series or Bag."
    )


def _seed() -> int:
    """Without a seed: from torch's generator as it stands, so that `torch.manual_seed` decides; it is not moved."""
    import torch

    state = torch.get_rng_state().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(state, digest_size=7).digest(), "little")
