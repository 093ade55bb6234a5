"""Arguments ↔ columns: how a row function is called, and what feeds each of its arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ._captured import is_module
from ._errors import PlanError
from ._names import among, function_name, listing, nearest
from ._source import Source, dtype_of

Form = Literal["columns", "row", "value"]
"""columns: arguments find columns · row: `fn` gets the whole row · value: the data is one column of values."""


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


def signature_of(fn: Callable[..., Any]) -> Signature:
    """How `fn` is called. What `functools.partial` binds is bound; a module is called like its `forward`."""
    target = getattr(fn, "forward", fn) if is_module(fn) else fn
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


def mapping(where: str, given: Any) -> dict[str, Any]:
    """`inputs` or `shared` as a dict of its own."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise PlanError(f"{where}={given!r} is a {type(given).__name__}: a mapping is needed, {where}={{argument: ...}}")
    return dict(given)


_NO_NUMBER: dict[str, Callable[[Any], bool]] = {
    "a coroutine (async def)": inspect.iscoroutinefunction,
    "a generator (it holds a yield)": inspect.isgeneratorfunction,
    "an asynchronous generator": inspect.isasyncgenfunction,
}


def check_names(fn: Callable[..., Any], signature: Signature, inputs: dict[str, Any], shared: dict[str, Any]) -> None:
    """Refuse names that are no argument of `fn`, or one that is fed twice."""
    call = function_name(fn)
    for what, is_one in _NO_NUMBER.items():
        if is_one(fn):
            raise PlanError(f"{call} is {what}, and its call returns no number: write a plain function, def {call}(...), with a return")
    if not signature.names:
        raise PlanError(f"{call} takes no named argument, so no column can feed it: write it as a function of one row")
    for where, given in (("inputs", inputs), ("shared", shared)):
        for name in given:
            if name not in signature.names:
                raise PlanError(
                    f"{where} names {name!r}, but {call} has no such argument. Its arguments: "
                    f"{listing(signature.names)}.{nearest(name, signature.names)}"
                )
    both = [name for name in inputs if name in shared]
    if both:
        raise PlanError(f"{both[0]!r} is both in inputs and in shared: one of them feeds the argument, not both")


def bind(
    source: Source,
    fn: Callable[..., Any],
    signature: Signature,
    inputs: dict[str, Any],
    shared: dict[str, Any],
    row_wrt: Sequence[Hashable],
    values_only: bool,
) -> tuple[Form, tuple[Input, ...]]:
    """What `fn` gets, and what feeds each of its column arguments.

    `row_wrt`: the names that the call differentiates by; `values_only`: it wants no derivative.
    """
    if source.kind == "series":
        return "value", (_bind_value(source, fn, signature, inputs, shared),)
    labels = source.labels
    free = [name for name in signature.required if name not in inputs and name not in shared]
    if _takes_whole_row(labels, free, signature.names, inputs, row_wrt):
        if type(fn).__module__.startswith("torch.nn."):
            raise PlanError(
                f"{function_name(fn)} is a module of torch, whose argument {free[0]!r} names no column and would get the whole row, which "
                f"is no tensor. Say which columns make the tensor: inputs={{{free[0]!r}: ['f0', 'f1']}} stacks them into a vector. By its "
                "parameters: a function that takes the module as an argument, with shared={'model': model}. The columns: "
                f"{listing(labels or [])}."
            )
        if not row_wrt and not values_only:
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
    return not among(free[0], labels) and not among(free[0], row_wrt)


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
    if among(name, labels):
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
        if labels is not None and not among(column, labels):
            raise PlanError(
                f"inputs feeds {name!r} of {function_name(fn)} from the column {column!r}, which there is not. The columns: "
                f"{listing(labels)}.{nearest(column, labels)}"
            )
    return Input(name, columns, stacked)


def read_by(source: Source, bound: tuple[Input, ...], form: Form) -> list[Hashable] | None:
    """The labels that are read, in the data's order; None: all."""
    if source.kind != "frame" or form == "row":
        return None
    wanted = {column for argument in bound for column in argument.columns}
    for column in wanted:
        dtype_of(source, column)
    if all(isinstance(label, bool | np.bool_) for label in wanted):  # a list of these is a mask for pandas, not a choice of columns
        return None
    return [label for label in source.labels or [] if label in wanted]
