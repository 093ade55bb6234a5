"""One part: cells → tensors → columns. The one function that every carrier runs.

run            the part's cells (_table), rows with a missing value set aside
  _solve       rows that are alike: their derivatives (_kernel)
               rows back in their place, failures named (_result)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from . import _captured, _compiled, _generators, _kernel
from ._ambient import neutral
from ._cells import ArrayKind, StaticKind
from ._derivative import Derivative, Dot, Total, directions_of
from ._device import device_of
from ._errors import PlanError, UsersOwn
from ._mode import RowMode
from ._names import function_name, shown
from ._output import Wish
from ._paths import Rows
from ._plan import Plan
from ._records import ABSENT, DEFAULT
from ._result import Result, Sums
from ._row import RowView, complete
from ._shared import Shared
from ._table import Cast, Group, Table, as_slice, dtypes_of, kind_of
from ._wishes import directions_by_path


def run(plan: Plan, part: pd.DataFrame | pd.Series, partition: int | None) -> pd.Series | pd.DataFrame:
    """The result of `plan` for one part: `part`'s index, in `part`'s order."""
    return solve(plan, part, partition).finish()


def solve(plan: Plan, part: pd.DataFrame | pd.Series, partition: int | None) -> Result:
    """The result of one part before it is made into columns, with the rows that failed."""
    summed = any(isinstance(derivative, Total) for derivative in plan.asked)
    result = Sums(plan, part, partition) if summed else Result(plan, part, partition)
    if len(part):
        table = Table(plan, part)
        device = device_of(plan.options.device)
        states: list[int | None] = [None] if plan.checkpoints is None else list(range(len(plan.checkpoints[1])))
        for group in table.groups():
            for result.checkpoint in states:
                _solve(plan, table, group, device, result)
    return result


def _solve(plan: Plan, table: Table, group: Group, device: torch.device, result: Result) -> None:
    kinds = {a.name: table.argument(a).kind(group.codes[a.name]) for a in plan.inputs if a.name in group.codes}
    absent = [a for a in plan.inputs if getattr(kinds.get(a.name), "value", None) is ABSENT]
    if absent:
        for row in group.rows:
            result.fail(int(row), KeyError(f"the record has no {absent[0].columns[0]!r}, which feeds {absent[0].name!r}"))
        return
    for name in plan.named:
        if isinstance(kind := kinds.get(name), StaticKind):
            raise PlanError(_static_refused(plan, name, kind.value))
    shared = Shared(plan, device, result.checkpoint)
    cast = Cast(plan, shared.dtype, list(kinds.values()) if kinds else [kind_of(t) for t in dtypes_of(table.part)])
    random = plan.options.randomness != "error"
    job = job_of(plan, table, kinds, cast, shared, result.wanted_derivatives)
    job.rows, job.arrays = group.rows, _arrays(plan, table, kinds, cast)
    job.seed = _seed(plan, table, group) if random else 0
    if plan.options.engine == "compiled":
        views = _arrays(plan, table, kinds, cast, copy=False)
        alone = len(group.rows) == len(table.part)
        job.native = _compiled.engine(plan, kinds, job.wish.derivatives, result.checkpoint, views, alone=alone)
    job.report.dtype = cast.floating.name
    result.reports.append(job.report)
    if plan.captured.draws:
        _draw_row_by_row(plan, job, result)
    with neutral(cast.default, device, exclusive=random):
        if random:
            _generators.begin(job.seed)
        _kernel.solve(job, result)
        if plan.options.detect_anomaly:
            _name_anomalies(job, result)


def _draw_row_by_row(plan: Plan, job: _kernel.Job, result: Result) -> None:
    """The loop for draws of Python or NumPy, where the engine is not asked for by name."""
    if plan.options.engine in ("auto", "compiled"):
        job.options = replace(plan.options, engine="loop")
        if len(job.rows) > _kernel.STOP_BISECTING:
            result.slower("rows go one by one, since the function can draw random numbers of Python or NumPy, which a batch would share")
    elif plan.options.engine == "vmap" and plan.options.randomness == "different":
        raise PlanError(
            'engine="vmap" cannot draw for each row from the random generators of Python or NumPy, whose draws a batch shares: '
            'engine="auto" or "loop" can, and torch\'s own draws are batched'
        )


def _name_anomalies(job: _kernel.Job, result: Result) -> None:
    """What made a gradient not finite, for the rows where one is: the first of them, or up to a thousand to be told of."""
    rows = job.rows[result.not_finite(job.rows)]
    for row in result.wanted(rows)[: 1000 if result.null else 1]:
        where = _kernel.first_not_finite(job, int(row))
        if where is not None:
            result.anomaly(int(row), f"gradient not finite: {where}")


def _seed(plan: Plan, table: Table, group: Group) -> int:
    """Where random draws begin: one draw for all rows is the same in every part; others follow what is in the part."""
    if plan.options.randomness == "same":
        return plan.options.seed or 0
    return table.seed() + int(group.rows[0])


def job_of(
    plan: Plan,
    table: Table,
    kinds: Mapping[Hashable, ArrayKind | StaticKind],
    cast: Cast,
    shared: Shared,
    derivatives: list[Derivative],
) -> _kernel.Job:
    """What is to be done with rows whose cells are of `kinds`; the rows themselves are still to be said."""
    return _kernel.Job(
        rows=np.arange(0),
        arrays=lambda rows: {},
        call=_caller(plan, table, kinds, cast, shared),
        wish=_wish(plan, derivatives, shared),
        options=plan.options,
        device=shared.device,
        directions=_constants(plan, shared.device),
        scripted=plan.captured.scripted,
        noise=lambda: _captured.noise(plan),
    )


def _wish(plan: Plan, derivatives: list[Derivative], shared: Shared) -> Wish:
    """What is wanted of each row."""
    shapes = {path: tuple(tensor.shape) for path, tensor in shared.targets.items()}
    along = {}
    for step in directions_of(plan.asked):
        if step.wrt in plan.parameters:
            meant = {path: shapes[path] for path in plan.parameters[step.wrt]}
            along[step] = {path: torch.from_numpy(array.copy()) for path, array in directions_by_path(step, meant).items()}
    vectors = plan.output != "number" and not plan.parameters
    return Wish(plan.named, derivatives, vectors, plan.options.allow_unused, shared.targets, plan.parameters, along)


def _constants(plan: Plan, device: torch.device) -> dict[Dot, torch.Tensor]:
    """The directions that are the same for every row."""
    found = directions_of(plan.asked)
    return {
        step: torch.from_numpy(step.constant.array.copy()).to(device)
        for step in found
        if step.constant is not None and step.wrt not in plan.parameters
    }


def _static_refused(plan: Plan, name: Hashable, value: Any) -> str:
    return (
        f"the derivative by {name!r} of {function_name(plan.fn)} is asked for, but its column holds {shown(value)}, a "
        f"{type(value).__name__}, which cannot be differentiated"
    )


def _arrays(
    plan: Plan, table: Table, kinds: Mapping[Hashable, ArrayKind | StaticKind], cast: Cast, *, copy: bool = True
) -> Callable[[Rows], _kernel.Arrays]:
    arguments = [a for a in plan.inputs if isinstance(kinds.get(a.name), ArrayKind)]

    def arrays(rows: Rows) -> _kernel.Arrays:
        return {a.name: cast(a.name, table.argument(a).take(as_slice(rows), copy=copy)) for a in arguments}

    return arrays


def _caller(
    plan: Plan,
    table: Table,
    kinds: Mapping[Hashable, ArrayKind | StaticKind],
    cast: Cast,
    shared: Shared,
) -> _kernel.Call:
    """Calls the row function with tensors for what columns feed, and all its other arguments."""
    signature = plan.signature
    fixed: dict[Any, Any] = {n: k.value for n, k in kinds.items() if isinstance(k, StaticKind) and k.value is not DEFAULT}
    free = next((n for n in signature.names if n not in shared.values and n not in signature.defaults), None)
    free = free if free is not None else signature.names[0]
    kept = {**plan.captured.tensors, **shared.kept}

    def call(columns: Mapping[Hashable, Tensor], mode: RowMode, rows: Rows) -> Any:
        mode.kept = kept
        given: dict[Any, Any] = {**fixed, **shared.for_call(mode), **columns}
        view = None
        if plan.form == "row":
            view = given[free] = RowView(table, cast, mode, rows, plan.named)
        positional, keyword = signature.arguments(given)
        try:
            result = plan.fn(*positional, **keyword)
        except PlanError as error:
            if error is mode.wrong:
                raise
            raise UsersOwn(error) from error
        if view is not None:
            complete(view)
        return result

    return call
