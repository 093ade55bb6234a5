"""The plan: everything that is decided before data is touched. Every mistake of the call is raised here.

A plan is a plain immutable value that travels to the workers; torch is not needed to make one.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from . import _cells, _columns
from ._checkpoints import Checkpoints, State
from ._derivative import Aux, Derivative, Dot, Norm, Problem, Project, Total, arguments_of, directions_of, orders_of, spelled
from ._errors import PlanError
from ._names import function_name, listing, nearest
from ._options import Options

if TYPE_CHECKING:
    from ._captured import Captured

Form = Literal["columns", "row", "value"]


@dataclass(frozen=True)
class Input:
    """One column argument of the row function and what feeds it.

    Attributes:
        name: the argument; for a column that is no argument but the direction of a derivative, the `Dot`.
        columns: the labels that feed it; several only where `stacked`. In a Series or a Bag: its one label.
        stacked: the columns are stacked into a vector, `inputs={"x": ["f0", "f1"]}`.
        position: where a Bag's tuple holds it; None: by what `columns` say, a place in the tuple or a name in a namedtuple.
        default: what a Bag's record without this key means, or `inspect.Parameter.empty`.
    """

    name: Hashable
    columns: tuple[Hashable, ...]
    stacked: bool = False
    position: int | None = 0
    default: Any = inspect.Parameter.empty

    @property
    def label(self) -> Hashable:
        """The name of a result taken with respect to this argument."""
        return self.name if self.stacked else self.columns[0]


@dataclass(frozen=True)
class Output:
    """One column of the result: its label and dtype, and which part of which derivative it holds, in which state of a shared module."""

    label: Hashable
    derivative: Derivative
    dtype: Any
    component: int | None = None
    checkpoint: int | None = None


@dataclass(frozen=True)
class Signature:
    """How to call the row function: names in order; keyword-only arguments by keyword.

    `only` is how many of the positional ones can be given by position only.
    """

    positional: tuple[str, ...]
    keyword: tuple[str, ...]
    defaults: Mapping[str, Any]
    known: bool = True
    only: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return self.positional + self.keyword

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.defaults)

    def arguments(self, given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """`given` by position and by keyword. What is not given stays out: a copy of a default need not be the default."""
        last = max((k for k, name in enumerate(self.positional[: self.only]) if name in given), default=-1)
        positional: list[Any] = []
        for k, name in enumerate(self.positional):
            if name not in given and k > last:
                break
            positional.append(given[name] if name in given else self.defaults[name])
        rest = [*self.positional[len(positional) :], *self.keyword]
        return positional, {name: given[name] for name in rest if name in given}


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

    @property
    def title(self) -> str:
        """The name that tasks carry on the dashboard."""
        return f"grad-{function_name(self.fn)}"

    @property
    def rowwise(self) -> bool:
        """Whether a row's result depends on that row alone, so that a filter may go below it."""
        return self.options.randomness == "error"

    @functools.cached_property
    def captured(self) -> Captured:
        """What is in reach of the row function; looked at where it runs."""
        from ._captured import look

        return look(self)

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
        frame.columns = pd.Index([output.label for output in self.outputs], tupleize_cols=False)
        return frame

    def run(self, part: pd.DataFrame | pd.Series, partition: int | None) -> pd.Series | pd.DataFrame:
        """The result for one part."""
        from ._part import run

        return run(self, part, partition)

    def records(self, records: list[Any]) -> pd.DataFrame:
        """A Bag's partition as a part."""
        from ._records import frame_of

        return frame_of(self, records)


# --- making a plan ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """What is known of the data before it is touched.

    Attributes:
        kind: "frame", "series" or "bag".
        empty: an empty frame or Series with the data's labels and dtypes; of a Bag, what its literal records tell of the arguments.
        labels: the column labels, None where they are not known (a Bag).
        records: a Bag's records, where they lie literally in its graph.
        dask: it is a Dask collection.
    """

    kind: Literal["frame", "series", "bag"]
    empty: pd.DataFrame | pd.Series
    labels: list[Hashable] | None
    records: list[Any] | None = None
    dask: bool = False


def make(
    source: Source,
    fn: Callable[..., Any],
    asked: list[tuple[Hashable | None, Derivative]],
    *,
    inputs: Mapping[str, Any] | None,
    shared: Mapping[str, Any] | None,
    options: Options,
    single: bool,
    output: Literal["number", "vector", "any"],
) -> Plan:
    """The plan for `fn` on `source`.

    `asked` says which derivatives are wanted, with the label of each or None for the label of the column; empty: the gradient by the
    first argument that a column feeds.
    """
    if not callable(fn):
        raise PlanError(f"the row function is a {type(fn).__name__}, {fn!r}: pass a function of one row")
    signature = signature_of(fn)
    inputs, shared = _mapping("inputs", inputs), _mapping("shared", shared)
    checkpoints = _checkpoints(shared)
    _check_names(fn, signature, inputs, shared)
    per_layer = any(isinstance(derivative, Norm) and derivative.per_layer for _, derivative in asked)
    names = list(dict.fromkeys(name for _, derivative in asked for name in arguments_of(derivative)))
    form, bound = _bind(source, fn, signature, inputs, shared, names)
    if source.kind == "bag":
        from ._records import empty_of

        source = replace(source, empty=empty_of(source.records or [], bound))
    if not bound:
        raise PlanError(f"no column feeds an argument of {function_name(fn)}, so there is nothing to differentiate by")
    asked = _by_layer(asked, shared) or [(None, (bound[0].name,))]
    directions = _directions(source, [derivative for _, derivative in asked])
    parameters = _parameter_wishes(fn, [derivative for _, derivative in asked], shared)
    named = tuple(name for name in dict.fromkeys(n for _, d in asked for n in arguments_of(d)) if name not in parameters)
    if not named and not parameters and bound and any(isinstance(derivative, Problem) for _, derivative in asked):
        named = (bound[0].name,)  # what is wrong with a row: with its gradient, as `grad_column` would take it
    by_name = {argument.name: argument for argument in bound}
    for name in named:
        _check_differentiable(source, fn, name, by_name, shared)
    _refuse_complex_orders(source, [derivative for _, derivative in asked], by_name)
    if form == "row":
        bound = tuple(by_name[name] for name in named)
    outputs = _outputs(source, asked, by_name, bound, parameters)
    if output == "vector":
        outputs = tuple(replace(o, dtype=np.dtype(object)) if isinstance(o.derivative, tuple) else o for o in outputs)
    if checkpoints is not None:
        outputs = tuple(
            replace(output, label=f"{output.label}[{k}]", checkpoint=k) for output in outputs for k in range(len(checkpoints[1]))
        )
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
        asked=tuple(dict.fromkeys(derivative for _, derivative in asked)),
        checkpoints=checkpoints,
        single=single and len(outputs) == 1 and checkpoints is None and not per_layer,
        output=output,
        bag=source.kind == "bag",
        options=options,
        columns=_read(source, (*bound, *directions), form),
        version=__version__,
    )


def signature_of(fn: Callable[..., Any]) -> Signature:
    """How `fn` is called. What `functools.partial` binds is bound; a module is called like its `forward`."""
    target = getattr(fn, "forward", fn) if _is_module(fn) else fn
    schema = getattr(target, "schema", None)
    if schema is not None and hasattr(schema, "arguments"):  # TorchScript
        names = [argument.name for argument in schema.arguments if argument.name != "self"]
        return Signature(tuple(names), (), {})
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # a C function without one
        return Signature(("input",), (), {}, known=False)
    bound = _partially_bound(fn)
    positional: list[str] = []
    keyword: list[str] = []
    defaults: dict[str, Any] = {}
    only = 0
    for name, parameter in parameters.items():
        if name in bound or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        (keyword if parameter.kind is parameter.KEYWORD_ONLY else positional).append(name)
        only += parameter.kind is parameter.POSITIONAL_ONLY
        if parameter.default is not parameter.empty:
            defaults[name] = parameter.default
    return Signature(tuple(positional), tuple(keyword), defaults, only=only)


def _partially_bound(fn: Callable[..., Any]) -> set[str]:
    bound: set[str] = set()
    while isinstance(fn, functools.partial):
        bound |= set(fn.keywords)
        fn = fn.func
    return bound


def _is_module(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _mapping(where: str, given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise PlanError(f"{where}={given!r} is a {type(given).__name__}: a mapping is needed, {where}={{argument: ...}}")
    return dict(given)


def _check_names(fn: Callable[..., Any], signature: Signature, inputs: dict[str, Any], shared: dict[str, Any]) -> None:
    call = function_name(fn)
    if not signature.names:
        raise PlanError(f"{call} takes no named argument, so no column can feed it: write it as a function of one row")
    for where, mapping in (("inputs", inputs), ("shared", shared)):
        for name in mapping:
            if name not in signature.names:
                raise PlanError(
                    f"{where} names {name!r}, but {call} has no such argument. Its arguments: "
                    f"{listing(signature.names)}.{nearest(name, signature.names)}"
                )
    both = [name for name in inputs if name in shared]
    if both:
        raise PlanError(f"{both[0]!r} is both in inputs and in shared: one of them feeds the argument, not both")


def _bind(
    source: Source,
    fn: Callable[..., Any],
    signature: Signature,
    inputs: dict[str, Any],
    shared: dict[str, Any],
    row_wrt: Sequence[Hashable],
) -> tuple[Form, tuple[Input, ...]]:
    if source.kind == "series":
        return "value", (_bind_value(source, fn, signature, inputs, shared),)
    labels = source.labels
    free = [name for name in signature.required if name not in inputs and name not in shared]
    if _takes_whole_row(labels, free, signature.names, inputs, row_wrt):
        if not row_wrt:
            raise PlanError(_row_needs_wrt(fn, free[0], labels))
        columns = row_wrt if labels is None else list(labels)
        return "row", tuple(Input(label, (label,)) for label in columns)
    bound = []
    for position, name in enumerate(name for name in signature.names if name not in shared):
        argument = _bind_argument(labels, fn, signature, name, inputs)
        if argument is not None:
            bound.append(replace(argument, position=None if name in inputs else position))
    return "columns", tuple(bound)


def _takes_whole_row(
    labels: list[Hashable] | None,
    free: list[str],
    names: tuple[str, ...],
    inputs: dict[str, Any],
    row_wrt: Sequence[Hashable],
) -> bool:
    """One required argument that names no column gets the whole row. Of a Bag, whose keys are not known, `wrt` tells."""
    if len(free) != 1 or inputs:
        return False
    if labels is None:
        return bool(row_wrt) and not any(name in names for name in row_wrt)
    return free[0] not in labels and free[0] not in row_wrt


def _row_needs_wrt(fn: Callable[..., Any], name: str, labels: list[Hashable] | None) -> str:
    return (
        f"{function_name(fn)} has one argument, {name!r}, which names no column, so it gets the whole row, and then wrt must "
        f"say by which columns to differentiate. The columns: {listing(labels or [])}.{nearest(name, labels or [])}"
    )


def _bind_value(
    source: Source,
    fn: Callable[..., Any],
    signature: Signature,
    inputs: dict[str, Any],
    shared: dict[str, Any],
) -> Input:
    label: Any = source.empty.name
    given = list(inputs)
    free = [name for name in signature.required if name not in shared and name not in given]
    names = given + free
    if not names:
        names = [name for name in signature.names if name not in shared][:1]
    if len(names) != 1:
        raise PlanError(
            f"{function_name(fn)} needs {len(names)} values of each row ({listing(names)}), but the data is a Series, which has "
            "one: pass a DataFrame, or give the others in shared={...}"
        )
    for value in inputs.values():
        if not _same_label(value, label):
            raise PlanError(f"inputs asks for the column {value!r}, but the data is a Series named {label!r}")
    return Input(names[0], (label,))


def _same_label(one: Any, other: Any) -> bool:
    try:
        return one is other or (hash(one) == hash(other) and bool(one == other))
    except TypeError:  # no label at all
        return False


def _bind_argument(
    labels: list[Hashable] | None, fn: Callable[..., Any], signature: Signature, name: str, inputs: dict[str, Any]
) -> Input | None:
    default = signature.defaults.get(name, inspect.Parameter.empty)
    if name in inputs:
        return _bind_given(labels, fn, name, inputs[name])
    if labels is None:
        return Input(name, (name,), default=default)
    if name in labels:
        return Input(name, (name,))
    if default is not inspect.Parameter.empty:
        return None
    raise PlanError(
        f"{function_name(fn)} has an argument {name!r}, but there is no such column. The columns: {listing(labels)}."
        f"{nearest(name, labels)} Say where it comes from: inputs={{{name!r}: column}} or shared={{{name!r}: value}}."
    )


def _bind_given(labels: list[Hashable] | None, fn: Callable[..., Any], name: str, given: Any) -> Input:
    stacked = isinstance(given, list)
    columns = tuple(given) if stacked else (given,)
    if not columns:
        raise PlanError(f"inputs={{{name!r}: []}} names no column")
    for column in columns:
        try:
            hash(column)
        except TypeError:
            raise PlanError(f"inputs={{{name!r}: {given!r}}}: a column label, or a list of labels, is needed") from None
        if labels is not None and column not in labels:
            raise PlanError(
                f"inputs feeds {name!r} of {function_name(fn)} from the column {column!r}, which there is not. The columns: "
                f"{listing(labels)}.{nearest(column, labels)}"
            )
    return Input(name, columns, stacked)


def _check_differentiable(
    source: Source,
    fn: Callable[..., Any],
    name: Hashable,
    by_name: dict[Hashable, Input],
    shared: dict[str, Any],
) -> None:
    if name in shared:
        raise PlanError(
            f"the derivative by {name!r} is asked for, which is a shared argument. Derivatives by column arguments are possible: "
            f"{listing(by_name)}."
        )
    if name not in by_name:
        fed = [argument.name for argument in by_name.values() if name in argument.columns]
        hint = f" The column {name!r} feeds the argument {fed[0]!r}: ask for that." if fed else nearest(name, [*by_name, *shared])
        raise PlanError(
            f"the derivative by {name!r} is asked for, but no column feeds an argument of that name in {function_name(fn)}. "
            f"Possible: {listing([*by_name, *shared])}.{hint}"
        )
    for column in by_name[name].columns:
        dtype = _dtype(source, column)
        reason = None if dtype is None else _cells.refusal(dtype)
        if reason is not None:
            raise PlanError(
                f"the derivative by {name!r} is asked for, but the column {column!r} ({dtype}) cannot be differentiated: {reason}."
                f"{_text_hint(source, column)}"
            )


def _directions(source: Source, derivatives: Iterable[Derivative]) -> tuple[Input, ...]:
    """The columns that hold directions, as inputs of their own. In a Bag of tuples they have no position."""
    found = []
    for step in directions_of(derivatives):
        if step.column is None or step.tensors:
            continue
        if source.labels is not None and step.column not in source.labels:
            raise PlanError(
                f"dot({step.wrt!r}, {step.column!r}) needs the column {step.column!r} as its direction, which there is not. The columns: "
                f"{listing(source.labels)}.{nearest(step.column, source.labels)} A direction that is the same for every row is given as "
                "numbers."
            )
        dtype = _dtype(source, step.column)
        if dtype is not None and (reason := _cells.refusal(dtype)) is not None:
            raise PlanError(f"dot({step.wrt!r}, {step.column!r}): the column is no direction: {reason}")
        found.append(Input(step, (step.column,), position=sys.maxsize))
    return tuple(found)


def _refuse_complex_orders(source: Source, derivatives: Iterable[Derivative], by_name: dict[Hashable, Input]) -> None:
    """A gradient by a complex argument is ∂f/∂Re + i·∂f/∂Im, which is no number that could be differentiated again."""
    for derivative in derivatives:
        for order in orders_of(derivative):
            names = arguments_of(order)
            for name in names if len(order) > 1 else ():
                if name not in by_name:
                    continue
                dtypes = [_dtype(source, column) for column in by_name[name].columns]
                if any(dtype is not None and _cells.role(dtype) == "complex" for dtype in dtypes):
                    raise PlanError(
                        f"{spelled(order)} is of an order above the first and by {name!r}, which is complex. Take its real and "
                        "imaginary parts as arguments of their own."
                    )


def _text_hint(source: Source, column: Hashable) -> str:
    if source.kind == "bag" or not (source.dask and isinstance(_dtype(source, column), pd.StringDtype | pd.ArrowDtype)):
        return ""
    return (
        " Convert it to numbers first; where it held arrays before it went into Dask, Dask has turned them into text: set "
        'dask.config.set({"dataframe.convert-string": False}) before from_pandas.'
    )


def _dtype(source: Source, column: Hashable) -> Any:
    """The dtype of a column; None where a Bag does not tell."""
    if source.kind == "series":
        return source.empty.dtype
    if source.labels is None and column not in source.empty.columns:
        return None
    found: Any = source.empty[column]  # type: ignore[call-overload]
    if isinstance(found, pd.DataFrame):
        raise PlanError(f"the column label {column!r} stands {found.shape[1]} times in the data: rename one of them")
    return found.dtype


def _read(source: Source, bound: tuple[Input, ...], form: Form) -> list[Hashable] | None:
    """The labels that are read, in the data's order; None: all."""
    if source.kind != "frame" or form == "row":
        return None
    wanted = {column for argument in bound for column in argument.columns}
    for column in wanted:
        _dtype(source, column)
    return [label for label in source.labels or [] if label in wanted]


def _outputs(
    source: Source,
    asked: list[tuple[Hashable | None, Derivative]],
    by_name: dict[Hashable, Input],
    bound: tuple[Input, ...],
    parameters: Mapping[Hashable, tuple[str, ...]],
) -> tuple[Output, ...]:
    outputs: list[Output] = []
    for label, derivative in asked:
        if parameters and any(name in parameters for name in arguments_of(derivative)):
            outputs.append(Output(_spelled(derivative) if label is None else label, derivative, _number(source, derivative, bound)))
            continue
        stacked = isinstance(derivative, tuple) and len(derivative) == 1 and _stacked(derivative[0], by_name)
        if label is None and stacked:
            for k, column in enumerate(by_name[derivative[0]].columns):  # type: ignore[index]
                outputs.append(Output(column, derivative, _gradient_dtype(source, column), k))
        else:
            name = _label(derivative, by_name) if label is None else label
            outputs.append(Output(name, derivative, _derivative_dtype(source, derivative, by_name, bound)))
    labels = [output.label for output in outputs]
    twice = [label for label in labels if labels.count(label) > 1]
    if twice:
        raise PlanError(
            f"two results would carry the label {twice[0]!r}. Give each a name of its own: dg.derivatives(data, fn, {{'a': ..., 'b': ...}})"
        )
    return tuple(outputs)


def _spelled(derivative: Derivative) -> str:
    return spelled(derivative) if isinstance(derivative, tuple) else str(derivative)


def _number(source: Source, derivative: Derivative, bound: tuple[Input, ...]) -> Any:
    """The dtype of a derivative by shared parameters: an array of all of them, or a number of the floating dtype of what is read."""
    formed = isinstance(derivative, Project | Total) or (isinstance(derivative, tuple) and not isinstance(derivative[0], Dot))
    if formed:
        return np.dtype(object)
    dtypes = [_gradient_dtype(source, c) for a in bound for c in a.columns if _differentiable(source, c)]
    return _cells.common_dtype(dtypes, value=True)


def _parameter_wishes(fn: Callable[..., Any], derivatives: Sequence[Derivative], shared: dict[str, Any]) -> dict[Hashable, tuple[str, ...]]:
    """The parameters that are meant where a derivative is taken with respect to a shared argument, or to a part of one."""
    wishes = {
        name
        for derivative in derivatives
        for name in arguments_of(derivative)
        if isinstance(name, str) and name.partition(".")[0] in shared
    }
    if not wishes:
        return {}
    from ._parameters import matching, parameters_of

    there = {name: tensor for name, tensor in parameters_of(shared).items() if tensor.is_floating_point()}
    found: dict[Hashable, tuple[str, ...]] = {name: tuple(matching(name, list(there))) for name in sorted(wishes)}
    for name, meant in found.items():
        if not meant:
            raise PlanError(
                f"the derivative by {name!r} is asked for, but {function_name(fn)} has no such shared parameter. Possible: "
                f"{listing(there)}.{nearest(name, there)}"
            )
    for derivative in derivatives:
        _check_parameter_order(derivative, found, there)
    return found


def _checkpoints(shared: dict[str, Any]) -> tuple[str, tuple[State, ...]] | None:
    """The module that comes in several states, and those; `shared` then holds the module itself."""
    several = [name for name, value in shared.items() if isinstance(value, Checkpoints)]
    if len(several) > 1:
        raise PlanError(f"{listing(several)} are shared in several states each: one of them is possible")
    for name in several:
        found = shared[name]
        shared[name] = found.module
        return name, found.states
    return None


def _by_layer(asked: list[tuple[Hashable | None, Derivative]], shared: dict[str, Any]) -> list[tuple[Hashable | None, Derivative]]:
    """`asked`, with a norm for each layer of a shared module where that is asked for."""
    found: list[tuple[Hashable | None, Derivative]] = []
    for label, derivative in asked:
        if not (isinstance(derivative, Norm) and derivative.per_layer):
            found.append((label, derivative))
            continue
        from ._parameters import matching, parameters_of

        paths = [path for name in arguments_of(derivative) for path in matching(str(name), list(parameters_of(shared)))]
        layers = list(dict.fromkeys(path.rpartition(".")[0] or path for path in paths))
        if not layers:
            raise PlanError(f"{derivative} per layer is of shared modules, and there is none of that name. Shared: {listing(shared)}.")
        found += [(None if label is None else f"{label}.{layer}", Norm(((layer,),))) for layer in layers]
    return found


def _check_parameter_order(derivative: Derivative, found: Mapping[Hashable, tuple[str, ...]], there: Mapping[str, Any]) -> None:
    orders = [order for order in orders_of(derivative) if any(name in found for name in arguments_of(order))]
    if any(len(order) > 1 for order in orders):
        raise PlanError(f"{_spelled(derivative)} is of an order above the first by shared parameters: first order is possible")
    if isinstance(derivative, Project) and len(derivative.of) > 1:
        raise PlanError(f"{derivative}: a projection is by columns, or by one shared argument")
    for step in (step for order in orders for step in order if isinstance(step, Dot)):
        shapes = {name: tuple(there[name].shape) for name in found[step.wrt]}
        directions_by_path(step, shapes)


def directions_by_path(step: Dot, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The direction of each parameter, given by its whole path, its path inside the module, or inside the part that was named.

    Raises:
        PlanError: a name that is no parameter of the wish, or a shape that does not fit.
    """
    given = step.tensors or (("", step.constant),)
    found = {}
    for name, constant in given:
        paths = [path for path in shapes if path == name or path.endswith(f".{name}") or (not name and len(shapes) == 1)]
        if constant is None or len(paths) != 1:
            if constant is not None and step.tensors and not paths:
                continue  # a buffer of a checkpoint, or a parameter outside of the part that was named
            raise PlanError(
                f"dot({step.wrt!r}, ...) needs {{parameter: tensor}}, a module or a checkpoint as its direction. {name!r} fits "
                f"{len(paths)} of the parameters {listing(shapes)}."
            )
        if constant.shape != shapes[paths[0]]:
            raise PlanError(
                f"dot({step.wrt!r}, ...): the direction of {paths[0]!r} has the shape {constant.shape}, the parameter {shapes[paths[0]]}"
            )
        found[paths[0]] = constant.array
    if not found:
        raise PlanError(f"dot({step.wrt!r}, ...): no name in the direction is one of the parameters {listing(shapes)}")
    return found


def _stacked(step: Any, by_name: dict[Hashable, Input]) -> bool:
    return not isinstance(step, Dot) and by_name[step].stacked


def _label(derivative: Derivative, by_name: dict[Hashable, Input]) -> Hashable:
    """The name of a result that was given none: the column that feeds the argument, or the reduction as it is written."""
    if isinstance(derivative, tuple) and len(derivative) == 1 and not isinstance(derivative[0], Dot):
        return by_name[derivative[0]].label
    return str(derivative[0]) if isinstance(derivative, tuple) else str(derivative)


def _gradient_dtype(source: Source, column: Hashable) -> Any:
    dtype = _dtype(source, column)
    return np.dtype("float64") if dtype is None else _cells.gradient_dtype(dtype)


def _derivative_dtype(source: Source, derivative: Derivative, by_name: dict[Hashable, Input], bound: tuple[Input, ...]) -> Any:
    """First order: the argument's own (rule 1). Numbers made of several: what all that is involved has in common."""
    if isinstance(derivative, Problem):
        return pd.StringDtype(na_value=np.nan)
    if isinstance(derivative, Project) or (isinstance(derivative, Aux) and derivative.array):
        return np.dtype(object)
    names = [step for step in derivative if not isinstance(step, Dot)] if isinstance(derivative, tuple) else []
    if len(names) == 1 and not by_name[names[0]].stacked:
        return _gradient_dtype(source, by_name[names[0]].columns[0])
    if any(by_name[name].stacked for name in names):
        return np.dtype(object)
    involved = [by_name[name] for name in arguments_of(derivative)] or list(bound)
    dtypes = [_gradient_dtype(source, c) for a in involved for c in a.columns if _differentiable(source, c)]
    return _cells.common_dtype(dtypes, value=not names)


def _differentiable(source: Source, column: Hashable) -> bool:
    dtype = _dtype(source, column)
    return dtype is None or _cells.refusal(dtype) is None
