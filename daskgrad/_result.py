"""One part's result as it fills: rows back in their place, and the rows that failed by name. The kernel's sink."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from . import _dtypes
from ._captured import modules, reachable, tensors_of
from ._cells import python_value, shown_label
from ._columns import ColumnBuilder
from ._derivative import Aux, Derivative, Problem, Total, arguments_of
from ._errors import DaskgradError, GraphError, PlanError, RowError, UsersOwn
from ._kernel import Report
from ._lines import at_line
from ._names import function_name, said, shown
from ._outputs import Output
from ._paths import Rows
from ._plan import Plan
from ._records import DEFAULT
from ._shared import module_dtype
from ._source import column_of
from ._table import Cast, Table, as_slice, dtypes_of, kind_of
from ._warn import nothing, slower
from ._watch._reporter import Reporter, current


@dataclass
class Result:
    """The result columns as they fill, and the rows that failed.

    Attributes:
        plan, part, partition: what is computed, of which rows, and the number of their partition (None in pandas).
        failures: what went wrong, by position in the part.
        first: the first position of them.
        reason: why something ran slower than it could.
        checkpoint: the state of a shared module that results come from now.
        reports: what was seen in each group of rows, for `explain`.
        reporter: tells how far this is to who watches.
    """

    plan: Plan
    part: pd.DataFrame | pd.Series
    partition: int | None
    failures: dict[int, Exception] = field(default_factory=dict)
    first: int | None = None
    reason: str | None = None
    checkpoint: int | None = None
    reports: list[Report] = field(default_factory=list)
    reporter: Reporter = field(default_factory=current)

    def __post_init__(self) -> None:
        index = self.part.index
        self._columns = {
            output: ColumnBuilder(output.dtype, index, output.label)
            for output in self.plan.outputs
            if not isinstance(output.derivative, Problem | Total)
        }
        self._holds: dict[Derivative, list[Output]] = {}
        for output in self._columns:
            self._holds.setdefault(output.derivative, []).append(output)
        self._filled: set[Output] = set()
        self._notes = self.reporter.noted(index, self.partition, self.reports)
        self._anomalies: dict[int, str] = {}
        self._watched = self.plan.options.detect_anomaly
        self._problem = any(isinstance(derivative, Problem) for derivative in self.plan.asked)
        looked_at = len(index) if self._problem or self._watched else 0
        self._finite = {False: np.ones(looked_at, bool), True: np.ones(looked_at, bool)}

    @property
    def wanted_derivatives(self) -> list[Derivative]:
        """What to compute, in the state of now; where problems are asked for, all of the call and the value."""
        now = dict.fromkeys(output.derivative for output in self.plan.outputs if output.checkpoint == self.checkpoint)
        wanted = [d for d in now if not isinstance(d, Problem)]
        if any(isinstance(d, Problem) for d in now):
            wanted += [(), *(d for d in self.plan.asked if not isinstance(d, Problem))]
            if not any(arguments_of(derivative) for derivative in wanted):
                wanted += [(name,) for name in self.plan.named]
        return list(dict.fromkeys(wanted))

    @property
    def null(self) -> bool:
        return self._problem or self.plan.options.on_error == "null"

    # the kernel's side

    def put(self, derivative: Derivative, rows: Rows | slice, values: NDArray[Any]) -> None:
        places = as_slice(rows)
        for output in self._holds.get(derivative, ()):
            if output.checkpoint == self.checkpoint:
                found = values if output.component is None else values[:, output.component]
                self._put(output, places, found)
                if self._notes is not None:
                    self._notes.put(output.label, places, found, gradient=derivative != () and not isinstance(derivative, Aux))
        if (self._problem or self._watched) and not isinstance(derivative, Aux):
            self._finite[derivative != ()][places] &= np.isfinite(values.reshape(len(values), -1)).all(axis=1)

    def room(self, derivative: Derivative, rows: slice, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
        held = [output for output in self._holds.get(derivative, ()) if output.checkpoint == self.checkpoint]
        return self._columns[held[0]].room(rows, dtype, shape) if len(held) == 1 and held[0].component is None else None

    def _put(self, output: Output, places: Rows | slice, values: NDArray[Any]) -> None:
        try:
            self._columns[output].put(places, values)
            self._filled.add(output)
            return
        except (TypeError, ValueError) as error:
            problem = error
        if self.plan.output == "any" and self.partition is None and output not in self._filled:  # vectors, as it turns out
            self._columns[output] = ColumnBuilder(np.dtype(object), self.part.index, output.label)
            self._columns[output].put(places, values)
            self._filled.add(output)
            return
        hint = ""
        if self.plan.bag:
            hint = " A lazy Bag does not tell what it holds, so numbers were expected: bag.to_dataframe(meta={...: object}) says so."
        elif self.plan.output == "any":
            hint = " Where the row function returns a vector, say so: dg.derivatives(..., vector=True)."
        raise PlanError(f"the result column {output.label!r} was declared {output.dtype}, but {problem}.{hint}") from problem

    def not_finite(self, rows: Rows) -> NDArray[np.bool_]:
        """Which of `rows` have a derivative that is not finite."""
        return ~self._finite[True][rows]

    def anomaly(self, row: int, what: str) -> None:
        """What made the gradient of `row` not finite: an error, or where rows that fail may be missing, a word in `problem`."""
        if self.null:
            self._anomalies[row] = what
        else:
            self.fail(row, RuntimeError(what))

    def fail(self, row: int, error: Exception) -> None:
        error = error.error if isinstance(error, UsersOwn) else error
        if self._notes is not None and row not in self.failures:
            self._notes.fail(row, error)
        self.failures.setdefault(row, error)
        if self.first is None or row < self.first:
            self.first = row

    def wanted(self, rows: Rows) -> Rows:
        if self.null or self.first is None:
            return rows
        return rows[rows < self.first]

    def slower(self, reason: str) -> None:
        self.reason = self.reason or reason

    def done(self, rows: int) -> None:
        self.reporter.done(rows)

    # the caller's side

    def finish(self) -> pd.Series | pd.DataFrame:
        if self.reason is not None:
            slower(function_name(self.plan.fn), self.reason)
        if self.null and not self._problem and not self._filled:
            self._warn_of_nothing()
        if self.first is not None and not self.null:
            raise self._error(self.first)
        index = self.part.index
        made = {output.label: builder.finish() for output, builder in self._columns.items()}
        columns = [made[o.label] if o.label in made else self._problems(o, index) for o in self.plan.outputs]
        return self.plan.assemble(columns, index)

    def _warn_of_nothing(self) -> None:
        """Every row failed: that is hardly a matter of the rows. (One row of many partitions says nothing of the others.)"""
        if self.first is None or (self.partition is not None and len(self.failures) == 1):
            return
        cause = self.failures[self.first]
        count, where = len(self.failures), "" if self.partition is None else f" of partition {self.partition}"
        failed = f"all {count:,} rows{where} failed and have no result" if count > 1 else "the only row failed and has no result"
        row = shown_label(self.part.index[self.first])
        nothing(
            function_name(self.plan.fn),
            f"{failed}; {'the first of them' if count > 1 else 'it'}, row {row}: {type(cause).__name__}: {said(cause)}{at_line(cause)}",
        )

    def _problems(self, output: Output, index: pd.Index) -> pd.Series:
        texts = np.full(len(index), None, dtype=object)
        texts[~self._finite[True]] = "gradient not finite"
        for row, what in self._anomalies.items():
            texts[row] = what
        texts[~self._finite[False]] = "value not finite"
        for row, error in self.failures.items():
            texts[row] = f"{type(error).__name__}: {said(error)}"
        return pd.Series(pd.array(texts, dtype=output.dtype), index=index, name=output.label)

    def _error(self, row: int) -> DaskgradError:
        cause = self.failures[row]
        label = self.part.index[row]
        values = self._values(row)
        where = f"row {shown_label(label)}" + ("" if self.partition is None else f" of partition {self.partition}")
        arguments = ", ".join(f"{name}={_short(value)}" for name, value in values.items())
        cut = isinstance(cause, GraphError)
        call = f"{function_name(self.plan.fn)}({arguments})"
        if cut:
            message = f"{where}, {call}: {cause}\n{arrays_hint(self.plan, cause)}".rstrip()
        else:
            message = (
                f"{call} failed in {where}: {type(cause).__name__}: {said(cause)}{at_line(cause)}\n"
                f"{dtype_hint(self.plan, self.part, cause)}{arrays_hint(self.plan, cause)}{_row_hint(cause)}"
                f"{_tensor_hint(cause)}{_slope_hint(cause)}{_gap_hint(values)}{_others_hint(row)}"
            ).rstrip()
        kind = GraphError if cut else RowError
        error = kind(message, label=label, partition=self.partition, values=values)
        error.__cause__ = cause.__cause__ if cut else cause
        return error

    def _values(self, row: int) -> dict[str, Any]:
        if self.plan.form == "row" and isinstance(self.part, pd.DataFrame):
            return {str(label): python_value(self.part.iloc[row, k]) for k, label in enumerate(self.part.columns)}
        table = Table(self.plan, self.part.iloc[row : row + 1])
        cells = {str(a.name): table.argument(a).cell(0) for a in self.plan.inputs}
        return {name: value for name, value in cells.items() if value is not DEFAULT}


def _others_hint(row: int) -> str:
    """Only where rows before were well: a mistake in the function fails on all of them."""
    return "on_error='null' keeps the other rows and leaves this one missing." if row else ""


def _gap_hint(values: dict[str, Any]) -> str:
    gaps = [name for name, value in values.items() if isinstance(value, float) and value != value]
    if not gaps:
        return ""
    return (
        f"{gaps[0]} is NaN there, which is a number in a plain float column. Where it means that nothing is known, "
        "df.convert_dtypes() makes it a missing value, and the row is left out.\n"
    )


class Sums(Result):
    """The sum over a part's rows, and how many there were: one array (states, 1 + elements), the count in front."""

    def __post_init__(self) -> None:
        from ._parameters import parameters_of

        super().__post_init__()
        (wrt,) = {derivative.wrt for derivative in self.plan.asked if isinstance(derivative, Total)}
        there = parameters_of(self.plan.shared)
        elements = sum(there[path].numel() for path in self.plan.parameters[wrt])
        self.sums = np.zeros((self.plan.states, 1 + elements))

    def put(self, derivative: Derivative, rows: Rows | slice, values: NDArray[Any]) -> None:
        counted = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        sums = self.sums[self.checkpoint or 0]
        sums[0] += counted
        sums[1:] += values.astype(np.float64).reshape(len(values), -1).sum(axis=0)

    def room(self, derivative: Derivative, rows: slice, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        return None

    def finish(self) -> pd.Series:
        if self.null and not self.sums[:, 0].any():
            self._warn_of_nothing()
        if self.first is not None and not self.null:
            raise self._error(self.first)
        cell = np.empty(1, dtype=object)
        cell[0] = self.sums
        return pd.Series(cell, name=self.plan.outputs[0].label)


_OF_DTYPES = re.compile(r"dtype|scalar type|\b(Double|Float|Half|Long|Int|Char|Byte|Bool)\b|\b(double|float|long int)\b")


def dtype_hint(plan: Plan, part: pd.DataFrame | pd.Series, cause: BaseException) -> str:
    """Where torch was given two dtypes: which there are, the rule, and what to write."""
    if not isinstance(cause, RuntimeError | TypeError | ValueError) or not _OF_DTYPES.search(said(cause)):
        return ""
    own = module_dtype([*plan.shared.values(), plan.fn])
    ours = Cast(plan, own, [kind_of(dtype) for dtype in dtypes_of(part)]).floating
    found, remedies = [], []
    for name, module in modules(plan):
        theirs = module_dtype([module])
        if theirs is not None and theirs != ours and name not in plan.shared and name != "fn":
            found.append(f"the module {name!r} that the function captures is {theirs}")
            remedies.append(
                f"pass it as an argument with shared={{{name!r}: {name}}}, whose dtype then decides, or ask for dtype={theirs.name!r}"
            )
    for name, dtype in tensors_of(plan):
        if dtype.is_floating_point and str(dtype) != f"torch.{ours.name}":
            found.append(f"the tensor {name!r} is {str(dtype).removeprefix('torch.')}")
            remedies.append(f"write {name}.to(torch.{ours.name})")
    for name in _whole_numbers(plan, part):
        found.append(f"{name!r} is int64, for an integer that is not differentiated stays one")
        remedies.append(f"write {name}.to(torch.{ours.name}) where a floating number is wanted")
    if not found:
        return ""
    table = f"The function computes in {ours}, as its module does" if own is not None else f"The table is {ours}"
    return f"{table}, and {', '.join(found[:3])}: {'; '.join(remedies[:3])}.\n"


def _whole_numbers(plan: Plan, part: pd.DataFrame | pd.Series) -> list[str]:
    """The arguments that are integers inside."""
    given = {a.name: [column_of(part, column).dtype for column in a.columns] for a in plan.inputs if a.name not in plan.named}
    return [str(name) for name, dtypes in given.items() if all(_dtypes.role(dtype) == "integer" for dtype in dtypes)]


def arrays_hint(plan: Plan, cause: BaseException) -> str:
    """Where a tensor met a NumPy array: which one it may be, and what to write."""
    if not re.search(r"numpy\.ndarray|a NumPy conversion", said(cause)):
        return ""
    arrays = [(name, value) for name, value in reachable(plan) if isinstance(value, np.ndarray)]
    if not arrays:
        return "torch's operators take no NumPy arrays, nor NumPy's functions tensors: torch.as_tensor(array) makes a tensor of one.\n"
    name = arrays[0][0]
    as_tensor = f"shared={{{name!r}: torch.from_numpy({name})}}" if name in plan.shared else f"{name} = torch.from_numpy({name})"
    return f"{name!r} is a NumPy array, and torch's operators do not take it: {as_tensor} makes it a tensor.\n"


def _row_hint(cause: BaseException) -> str:
    if "RowView" not in said(cause):
        return ""
    return (
        "The function gets the whole row, which is no tensor: read columns from it (row.x, row['x']), or name the columns that make one "
        "tensor, inputs={argument: ['f0', 'f1']}.\n"
    )


_OF_BATCHES = re.compile(
    r"input \(got \dD|shapes cannot be multiplied|size mismatch, got input|too many indices for tensor|Dimension out of range"
    r"|tuple index out of range|a 0-d(im)? tensor"
)


def _slope_hint(cause: BaseException) -> str:
    """Where torch knows no derivative of an operation, which it finds out on the way back, at no line of the user's."""
    found = re.search(r"derivative for aten::(\w+) is not implemented", said(cause))
    if found is None:
        return ""
    rounded = " (x // y is torch.floor(x / y))" if found[1] == "floor_divide" else ""
    return f"torch has no derivative of {found[1]}: write it of operations that have one{rounded}.\n"


def _tensor_hint(cause: BaseException) -> str:
    """Where something written for batches, for vectors or for plain numbers met the tensors of one row."""
    if isinstance(cause, KeyError) and cause.args and hasattr(cause.args[0], "requires_grad"):
        return "A dict or a set finds a tensor by identity, and never by its value: write int(n) or float(x) for a key.\n"
    if "zero-dimensional tensor" in said(cause) and "concatenated" in said(cause):
        return "A column of numbers gives the function one number, a tensor of shape (): torch.stack([x, y]) makes a vector of several.\n"
    if not isinstance(cause, RuntimeError | ValueError | IndexError | TypeError) or not _OF_BATCHES.search(said(cause)):
        return ""
    return (
        "The function gets one row and no batch: a number is a tensor of shape (), a vector's first element is x[0], and a model that "
        "expects batches takes model(x[None])[0].\n"
    )


def _short(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= 60 else text[:57] + "..."
