"""What would run, and why: for a terminal and for a notebook."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from . import _dask
from ._binding import Input
from ._cells import StaticKind, shown_label
from ._column import plan_of
from ._derivative import Aux, Derivative, Dot, Norm, Order, Problem, Project, Total, arguments_of, spelled
from ._errors import DaskgradError
from ._names import function_name, said
from ._plan import Plan
from ._sample import few_rows

if TYPE_CHECKING:
    from ._kernel import Report

ROWS = 256
"""Rows of pandas data that are run to see; of Dask data it is a sixteenth."""
REPEATED = 65_536
"""Rows that are run to measure how fast a compiled kernel is."""
OFTEN = 32
"""Times that each row of a sample is run where too few are alike to make a batch: in the whole data they would be as many."""
PATIENCE = 2.0
"""Seconds that this may take."""


@dataclass(frozen=True)
class Explanation:
    """Sections of (what, how); text in a terminal, tables in a notebook."""

    title: str
    sections: Sequence[tuple[str, Sequence[tuple[str, str]]]]

    def __str__(self) -> str:
        width = max((len(what) for _, lines in self.sections for what, _ in lines), default=0)
        text = [self.title]
        for name, lines in self.sections:
            text += ["", name]
            text += [f"  {what:<{width}}  {how}" for what, how in lines]
        return "\n".join(text)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cell = 'style="text-align:left;vertical-align:top;padding:2px 12px 2px 0"'
        rows = []
        for name, lines in self.sections:
            rows.append(f'<tr><th colspan="2" style="text-align:left;padding-top:8px">{html.escape(name)}</th></tr>')
            rows += [f"<tr><td {cell}><code>{html.escape(what)}</code></td><td {cell}>{html.escape(how)}</td></tr>" for what, how in lines]
        return f"<div><b>{html.escape(self.title)}</b><table>{''.join(rows)}</table></div>"


def explain(
    data: Any,
    fn: Callable[..., Any],
    wrt: Any = None,
    *,
    vector: bool = False,
    inputs: Mapping[str, Any] | None = None,
    shared: Mapping[str, Any] | None = None,
    **options: Any,
) -> Explanation:
    """What a call would read, compute and return, and why; seen by running a few rows.

    Args:
        data, fn, inputs, shared, **options: as for `grad_column`.
        wrt: as for `grad_column`, or `{name: derivative}` as for `derivatives`.
        vector: as for `derivatives`.

    Returns:
        An `Explanation`: `print` it, or leave it at the end of a notebook's cell. Of Dask data, a few rows of three partitions are
        computed; the explanation says which. With `engine="compiled"` the kernel is made, and kept for the call itself.

    Raises:
        PlanError: the call itself makes no sense.

    Example:
        >>> import pandas as pd, daskgrad as dg
        >>> df = pd.DataFrame({"x": [1.0, 2.0], "kind": ["call", "put"]})
        >>> print(dg.explain(df, lambda x, kind: x**2 if kind == "call" else -x))  # doctest: +ELLIPSIS
        lambda on a pandas DataFrame of 2 rows
        ...
    """
    plan = plan_of(data, fn, wrt, vector=vector, inputs=inputs, shared=shared, **options)
    local = _dask.kind(data) is None
    sample, looked = few_rows(data, ROWS if local else ROWS // 16)
    part = plan.records(sample) if isinstance(sample, list) else sample
    sampled = not local or len(part) < len(data)
    return Explanation(
        f"{function_name(fn)} on {_described(data)}",
        [("Reads", _reads(plan, part)), ("Returns", _returns(plan)), *_seen(plan, part, looked, sampled=sampled)],
    )


def _described(data: Any) -> str:
    kind = _dask.kind(data)
    if kind is None:
        return f"a pandas {type(data).__name__} of {len(data):,} rows"
    name = {"frame": "DataFrame", "series": "Series", "bag": "Bag"}[kind]
    return f"a Dask {name} of {data.npartitions:,} partitions"


# --- what is decided before anything runs -----------------------------------------------------------------------------


def _reads(plan: Plan, part: pd.DataFrame | pd.Series) -> list[tuple[str, str]]:
    from ._table import Table

    table = Table(plan, part)
    lines = [(str(argument.name), _source(argument, table, part)) for argument in plan.inputs]
    if plan.form == "row":
        lines.append(("the whole row", "columns are looked at when they are read, and all of them are loaded"))
    lines += [(name, f"shared: {_shared(value)}") for name, value in plan.shared.items()]
    bound = {argument.name for argument in plan.inputs} | set(plan.shared)
    lines += [(name, f"its default, {value!r:.60}") for name, value in plan.signature.defaults.items() if name not in bound]
    return lines


def _source(argument: Input, table: Any, part: pd.DataFrame | pd.Series) -> str:
    columns = ", ".join(repr(column) for column in argument.columns[:6]) + (", …" if len(argument.columns) > 6 else "")
    what = f"columns {columns} stacked" if argument.stacked else f"column {columns}"
    dtype = table.column(argument.columns[0]).dtype
    cells = table.argument(argument)
    count = int(cells.codes.max()) + 1 if cells.codes is not None and len(part) else min(len(part), 1)
    kinds = [cells.kind(code) for code in range(count)]
    static = [kind for kind in kinds if isinstance(kind, StaticKind)]
    shapes = [kind.shape for kind in kinds if not isinstance(kind, StaticKind)]
    gaps = _gaps(cells, kinds, len(part))
    if static:
        shown = ", ".join(repr(kind.value) for kind in static[:4]) + (", …" if len(static) > 4 else "")
        return f"{what} ({dtype}): static, the plain value, {shown}{gaps}"
    if not shapes or set(shapes) == {()}:
        return f"{what} ({dtype}): a number{gaps}"
    held = f"an array of shape {shapes[0]}" if len(set(shapes)) == 1 else f"arrays of {len(set(shapes))} shapes, grouped"
    return f"{what} ({dtype}): {held}{gaps}"


def _gaps(cells: Any, kinds: Sequence[Any], rows: int) -> str:
    """How many rows have nothing there, or NaN, and what becomes of them."""
    text = ""
    missing = 0 if cells.missing is None else int(cells.missing.sum())
    if missing:
        text += f"; missing in {missing} of {_counted(rows, 'row')}, whose results are missing too"
    nan = 0
    for code, kind in enumerate(kinds):
        if isinstance(kind, StaticKind) or kind.dtype.kind not in "fc":
            continue
        here = np.ones(rows, bool) if cells.codes is None else cells.codes == code
        if cells.missing is not None:
            here = here & ~cells.missing
        found = cells.take(np.flatnonzero(here))
        nan += int(np.isnan(found.reshape(len(found), math.prod(kind.shape))).any(axis=1).sum())
    if nan:
        text += (
            f"; NaN in {nan} of {_counted(rows, 'row')}, a number that goes through the function (df.convert_dtypes() makes gaps of them)"
        )
    return text


def _shared(value: Any) -> str:
    parameters = getattr(value, "parameters", None)
    if callable(parameters):
        found = list(parameters())
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in found})
        return f"{type(value).__name__}, {sum(p.numel() for p in found):,} parameters, {', '.join(dtypes)}"
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else f" {value!r:.60}")


def _returns(plan: Plan) -> list[tuple[str, str]]:
    return [(str(output.label), f"{output.dtype}: {_meaning(output.derivative)}") for output in plan.outputs]


def _meaning(derivative: Derivative) -> str:
    if isinstance(derivative, Problem):
        return "what is wrong with the row"
    if isinstance(derivative, Aux):
        return f"the further output {derivative.name!r}"
    if isinstance(derivative, Norm | Project | Total):
        return f"{derivative}, a reduction of the gradient"
    return f"d/d{spelled(derivative)}" if derivative else "the value"


# --- what is seen by running ------------------------------------------------------------------------------------------


def _seen(plan: Plan, part: pd.DataFrame | pd.Series, looked: str, *, sampled: bool) -> list[tuple[str, list[tuple[str, str]]]]:
    from ._part import solve
    from ._shared import copies, module_dtype

    trial = replace(plan, shared=copies(plan.shared), options=replace(plan.options, on_error="null"))
    times = 1
    try:
        started = time.perf_counter()
        result = solve(trial, part, None)
        few = plan.options.engine != "loop" and result.reason is None and any(report.looped for report in result.reports)
        if sampled and few and OFTEN * (time.perf_counter() - started) < PATIENCE:
            times = OFTEN
            result = solve(trial, part.take(np.tile(np.arange(len(part)), times)), None)
    except DaskgradError as problem:
        return [("Runs", [("looked at", looked), ("error", f"{type(problem).__name__}: {problem}")])]
    reports: list[Report] = result.reports
    forced = plan.options.dtype or module_dtype([*plan.shared.values(), plan.fn])
    lines = [("looked at", looked), ("dtype inside", _dtype(reports, forced is not None))]
    lines += _engine(plan, reports, result.reason, times)
    if any(report.compiled for report in reports):
        lines += _compiling(trial, part, max(report.seconds for report in reports))
    if result.failures:
        row, error = min(result.failures.items())
        first = f"row {shown_label(part.index[row])}: {type(error).__name__}: {said(error)}"
        lines.append(("fails", f"{len(result.failures) // times} of the rows looked at; {first}"))
    return [("Runs", lines), ("Derivatives", _modes(plan, reports))]


def _dtype(reports: Sequence[Report], forced: bool) -> str:
    found = ", ".join(sorted({report.dtype for report in reports})) or "unknown: no row was seen"
    why = "cast on the way in, and results back (a shared module's dtype, or the option dtype=, wins)" if forced else "that of what is read"
    return f"{found}, {why}"


def _engine(plan: Plan, reports: Sequence[Report], reason: str | None, times: int) -> list[tuple[str, str]]:
    """`times`: how often each row was run."""
    batched, looped, compiled = (sum(getattr(r, how) for r in reports) // times for how in ("batched", "looped", "compiled"))
    if compiled:
        how = f"a compiled kernel; the first {batched} rows looked at came from batches under vmap, against which it was checked"
    elif plan.options.engine == "loop":
        how = "the loop, as asked: one row after the other"
    elif looped and not batched:
        how = f"the loop: {reason or 'too few rows are alike to make a batch'}"
    elif looped:
        how = f"batches under vmap; {looped} of {batched + looped} rows one by one: {reason or 'too few alike'}"
    else:
        how = "batches under vmap, and one backward pass for each batch"
    lines = [("engine", how)]
    if batched:
        paths, size = sum(r.paths for r in reports), max(r.batch_size for r in reports)
        per_row = max(r.bytes_per_row for r in reports)
        lines.append(
            (
                "groups and paths",
                f"{_counted(len(reports), 'group')} of rows that are alike, {_counted(paths, 'path')} through the function",
            )
        )
        lines.append(
            (
                "batch",
                f"up to {size:,} rows; about {per_row:,} bytes a row forward, {_memory(reports, size * per_row)} MiB a batch, backward too",
            )
        )
    if reason:
        lines.append(("slower", reason))
    if (reason or looped > 16) and plan.options.engine != "loop":  # fewer tell nothing about the function
        lines.append(("faster", "torch operations that vmap can batch, and torch.where instead of values that differ in every row"))
    return lines


def _memory(reports: Sequence[Report], forward: int) -> str:
    """MiB of a batch; where its size was chosen, then so that they stay within a budget."""
    budget = max(report.budget for report in reports)
    return f"{2 * min(forward, budget or forward) / 2**20:,.0f}"


def _compiling(plan: Plan, part: pd.DataFrame | pd.Series, seconds: float) -> list[tuple[str, str]]:
    """What the kernel cost, and how many rows have to be computed before it has saved that; measured on the rows looked at, repeated."""
    from ._binaries import folder

    eager = replace(plan, options=replace(plan.options, engine="auto"))
    many = part.take(np.resize(np.arange(len(part)), REPEATED))
    slow, fast = (min(_seconds(way, many) for _ in range(3)) / REPEATED for way in (eager, plan))
    lines = [("compiling", f"{seconds:.1f} s here, once: kept in {folder()} for this function, these dtypes, this torch and CPU")]
    each = f"{slow * 1e9:,.0f} ns a row by batches, {fast * 1e9:,.0f} compiled"
    pays = f"from about {seconds / (slow - fast):,.0f} rows" if slow > fast else "never"
    return [*lines, ("pays", f"{pays} ({each}, on {_threads()} here)")]


def _seconds(plan: Plan, part: pd.DataFrame | pd.Series) -> float:
    from ._part import solve

    started = time.perf_counter()
    solve(plan, part, None)
    return time.perf_counter() - started


def _threads() -> str:
    """How many threads torch may use in this process."""
    import torch

    return _counted(torch.get_num_threads(), "thread")


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _modes(plan: Plan, reports: Sequence[Report]) -> list[tuple[str, str]]:
    report = next((r for r in reports if r.batched or r.looped), None)
    if report is None:
        return [("unknown", "no row came through")]
    sizes = {name: math.prod(report.shapes.get(name, ())) for name in plan.named}
    out = math.prod(report.output)
    lines = []
    for derivative in plan.derivatives:
        orders = derivative.of if isinstance(derivative, Norm | Project) else (derivative,) if isinstance(derivative, tuple) else ()
        lines += [(spelled(order) if order else "value", _mode(order, sizes, out)) for order in orders if not _of_shared(plan, order)]
        lines += [(spelled(order), _by_parameters(report)) for order in orders if _of_shared(plan, order)]
    return list(dict.fromkeys(lines))


def _of_shared(plan: Plan, order: Order) -> bool:
    return any(name in plan.parameters for name in arguments_of(order))


def _by_parameters(report: Report) -> str:
    how = "from the inputs and output gradients of the layers, never formed"
    return f"{how}; but formed for each row, having no rule: {', '.join(report.own[:6])}" if report.own else how


def _mode(order: tuple[Any, ...], sizes: Mapping[Any, int], out: int) -> str:
    from ._autograd import by_columns, canonical_order

    if not order:
        return "forward"
    first, *rest = canonical_order(order, sizes)
    inputs = sizes[first.wrt if isinstance(first, Dot) else first]
    if out == 1:
        how = "reverse: one backward pass, shared by all first-order derivatives"
    elif not rest and by_columns(out, inputs):
        how = f"a Jacobian of {out} × {inputs} by its columns: {inputs} products of the reverse of the reverse pass, checked by one of them"
    else:
        how = f"a Jacobian of {out} × {inputs} by its rows: {out} backward passes"
    passes = out
    for step, following in zip([first, *rest], rest, strict=False):
        passes *= 1 if isinstance(step, Dot) else sizes[step]
        how += f"; then by {following}: {passes} backward pass{'es' if passes > 1 else ''} through the same graph"
    return how
