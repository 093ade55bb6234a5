"""The plan: everything that is decided before data is touched. Every mistake of the call is raised here.

    make           a call → its plan
      bind           arguments ↔ columns (_binding)
      …              what is asked for, refused where it makes no sense (_wishes)
      outputs_of     names and dtypes of the result (_outputs)

A plan is a plain immutable value that travels to the workers; torch is not needed to make one.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from . import _columns, _dtypes, _lookups
from ._binding import Form, Input, Signature, bind, check_names, mapping, read_by, signature_of
from ._checkpoints import State
from ._derivative import UNNAMED, Aux, Derivative, Norm, Problem, arguments_of, in_state
from ._errors import PlanError
from ._names import function_name
from ._options import Options
from ._outputs import Output, outputs_of
from ._source import Source, dtype_of
from ._wishes import (
    by_layer,
    check_differentiable,
    column_directions,
    numbers_in,
    parameter_wishes,
    refuse_complex_orders,
    several_states,
)

if TYPE_CHECKING:
    from ._captured import Captured
    from ._compiled import Shipped


@dataclass(frozen=True)
class Plan:
    """What to compute, for any part of the data.

    Attributes:
        fn: the row function.
        signature: how it is called.
        form: "columns": arguments find columns · "row": `fn` gets the whole row · "value": the data is one column of values.
        inputs: the column arguments; in the row form one for each column that may be differentiated.
        shared: the shared arguments.
        outputs: the columns of the result.
        named: the arguments named anywhere in the call, also in columns that Dask has dropped since.
        parameters: which shared parameters each wish of the call means, by path.
        asked: the derivatives named anywhere in the call, likewise.
        checkpoints: the states of the shared module that comes in several, with its name.
        single: the result is a Series.
        output: what `fn` returns. "number" (a gradient is asked for), "vector" (Jacobians, in object columns), or "any": numbers
            are expected, but where the result is made at once it may turn out to be vectors.
        bag: parts are lists of records.
        options: the options of the call.
        columns: the labels of a frame's columns that are read; None: all.
        version: daskgrad's, where the call was made.
        kernels: those that were compiled where the call was made.
    """

    fn: Callable[..., Any]
    signature: Signature
    form: Form
    inputs: tuple[Input, ...]
    shared: Mapping[str, Any]
    outputs: tuple[Output, ...]
    named: tuple[Hashable, ...]
    parameters: Mapping[Hashable, tuple[str, ...]]
    asked: tuple[Derivative, ...]
    checkpoints: tuple[str, tuple[State, ...]] | None
    single: bool
    output: Literal["number", "vector", "any"]
    bag: bool
    options: Options
    columns: list[Hashable] | None = field(default=None)
    version: str = ""
    kernels: tuple[Shipped, ...] = ()

    @property
    def title(self) -> str:
        """The name that tasks carry on the dashboard."""
        return f"grad-{function_name(self.fn)}"

    @property
    def states(self) -> int:
        """How often each row is computed: once for each state of a shared module that comes in several."""
        return 1 if self.checkpoints is None else len(self.checkpoints[1])

    @property
    def rowwise(self) -> bool:
        """Whether a row's result depends on that row alone, so that a filter may go below it."""
        return self.options.randomness == "error"

    @functools.cached_property
    def captured(self) -> Captured:
        """What is in reach of the row function; looked at where it runs."""
        from ._captured import look

        return look(self)

    @functools.cached_property
    def content(self) -> str:
        """The row function and its shared arguments as a hash of their content."""
        from ._compiled import content

        return content(self)

    @property
    def derivatives(self) -> tuple[Derivative, ...]:
        """The distinct derivatives to compute."""
        return tuple(dict.fromkeys(output.derivative for output in self.outputs))

    def only(self, labels: Iterable[Hashable]) -> Plan:
        """The same plan for some of its result columns."""
        wanted = set(labels)
        return replace(self, outputs=tuple(output for output in self.outputs if output.label in wanted))

    def meta(self, empty: pd.DataFrame | pd.Series) -> pd.Series | pd.DataFrame:
        """The empty result for the empty input `empty`: names, dtypes, index."""
        index = empty.index[:0]
        return self.assemble([_columns.empty(output.dtype, index, output.label) for output in self.outputs], index)

    def assemble(self, columns: Sequence[pd.Series], index: pd.Index) -> pd.Series | pd.DataFrame:
        """The result made of its columns."""
        if self.single:
            return columns[0]
        frame = pd.concat(columns, axis=1) if columns else pd.DataFrame(index=index)
        frame.columns = _labels([output.label for output in self.outputs])
        return frame

    def run(self, part: pd.DataFrame | pd.Series, partition: int | None) -> pd.Series | pd.DataFrame:
        """The result for one part."""
        from ._part import run

        return run(self, part, partition)

    def records(self, records: list[Any]) -> pd.DataFrame:
        """A Bag's partition as a part."""
        from ._records import frame_of

        return frame_of(self, records)


def _labels(labels: list[Hashable]) -> pd.Index:
    """The labels as they are: among texts, pandas would make NaN of None and of pd.NA."""
    index = pd.Index(labels, tupleize_cols=False)
    kept = all(found is label or isinstance(label, float) or found == found for found, label in zip(index, labels, strict=True))
    return index if kept else pd.Index(labels, tupleize_cols=False, dtype=object)


def make(
    source: Source,
    fn: Callable[..., Any],
    asked: list[tuple[Hashable, Derivative]],
    *,
    inputs: Mapping[str, Any] | None,
    shared: Mapping[str, Any] | None,
    options: Options,
    single: bool,
    output: Literal["number", "vector", "any"],
) -> Plan:
    """The plan for `fn` on `source`.

    `asked` says which derivatives are wanted, with the label of each or `UNNAMED` for the label of the column; empty: the gradient by the
    first argument that a column feeds.
    """
    if not callable(fn):
        raise PlanError(f"the row function is a {type(fn).__name__}, {fn!r}: pass a function of one row")
    signature = signature_of(fn)
    inputs, shared = mapping("inputs", inputs), mapping("shared", shared)
    checkpoints = several_states(shared)
    check_names(fn, signature, inputs, shared)
    per_layer = any(isinstance(derivative, Norm) and derivative.per_layer for _, derivative in asked)
    names = list(dict.fromkeys(name for _, derivative in asked for name in arguments_of(derivative)))
    values_only = bool(asked) and all(derivative == () or isinstance(derivative, Aux) for _, derivative in asked)
    form, bound = bind(source, fn, signature, inputs, shared, names, values_only)
    if source.kind == "bag":
        from ._records import empty_of

        source = replace(source, empty=empty_of(source.records or [], bound))
    if not bound:
        raise PlanError(f"no column feeds an argument of {function_name(fn)}, so there is nothing to differentiate by")
    asked = by_layer(asked, shared) or [(UNNAMED, (bound[0].name,))]
    directions = column_directions(source, [derivative for _, derivative in asked])
    parameters = parameter_wishes(fn, [derivative for _, derivative in asked], shared, None if checkpoints is None else len(checkpoints[1]))
    named = _named([derivative for _, derivative in asked], parameters, bound)
    by_name = {argument.name: argument for argument in bound}
    for name in named:
        check_differentiable(source, fn, name, by_name, shared, signature.defaults)
    refuse_complex_orders(source, [derivative for _, derivative in asked], by_name)
    _lookups.refuse(fn, _numbers(source, bound), shared, signature.required[0] if form == "row" else None)
    read = bound
    if form == "row":
        bound = tuple(by_name[name] for name in named)
        read = bound or _that_stand_once(source, by_name)
    outputs = outputs_of(source, asked, by_name, read, parameters, numbers_in(shared, parameters))
    if output == "vector":
        outputs = tuple(replace(o, dtype=np.dtype(object)) if isinstance(o.derivative, tuple) else o for o in outputs)
    derivatives = [derivative for _, derivative in asked]
    if checkpoints is not None:
        outputs = _for_each_state(outputs, len(checkpoints[1]))
        derivatives = [in_state(derivative, k) for derivative in derivatives for k in range(len(checkpoints[1]))]
    from . import __version__

    return Plan(
        fn=fn,
        signature=signature,
        form=form,
        inputs=(*bound, *directions),
        shared=shared,
        outputs=outputs,
        named=named,
        parameters=parameters,
        asked=tuple(dict.fromkeys(derivatives)),
        checkpoints=checkpoints,
        single=single and len(outputs) == 1 and checkpoints is None and not per_layer,
        output=output,
        bag=source.kind == "bag",
        options=options,
        columns=read_by(source, (*bound, *directions), form),
        version=__version__,
    )


def _that_stand_once(source: Source, by_name: Mapping[Hashable, Input]) -> tuple[Input, ...]:
    """The columns that a function of whole rows may read."""
    times = Counter(source.labels)
    return tuple(column for label, column in by_name.items() if times[label] == 1)


def _numbers(source: Source, bound: Iterable[Input]) -> set[Hashable]:
    """The inputs that are one number each, as far as dtypes tell."""
    times = Counter(source.labels or [])
    single = [argument for argument in bound if not argument.stacked and times[argument.columns[0]] < 2]
    dtypes = {argument.name: dtype_of(source, argument.columns[0]) for argument in single}
    return {name for name, dtype in dtypes.items() if dtype is not None and _dtypes.role(dtype) in ("integer", "bool", "real")}


def _named(
    derivatives: Sequence[Derivative], parameters: Mapping[Hashable, tuple[str, ...]], bound: tuple[Input, ...]
) -> tuple[Hashable, ...]:
    """The column arguments that are differentiated."""
    found = dict.fromkeys(name for derivative in derivatives for name in arguments_of(derivative) if name not in parameters)
    if not found and not parameters and any(isinstance(derivative, Problem) for derivative in derivatives):
        return (bound[0].name,)  # what is wrong with a row: with its gradient, as `grad_column` would take it
    return tuple(found)


def _for_each_state(outputs: tuple[Output, ...], states: int) -> tuple[Output, ...]:
    """Every column once for each state of a shared module."""
    return tuple(
        replace(output, label=f"{output.label}[{k}]", derivative=in_state(output.derivative, k), checkpoint=k)
        for output in outputs
        for k in range(states)
    )
