"""What is asked for, held against what there is: every wish that makes no sense is refused here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from . import _dtypes
from ._binding import Input
from ._checkpoints import Checkpoints, State
from ._derivative import UNNAMED, Derivative, Dot, Norm, Project, arguments_of, directions_of, orders_of, spelled, written
from ._errors import PlanError
from ._names import among, function_name, listing, nearest
from ._source import Source, dtype_of


def check_differentiable(
    source: Source,
    fn: Callable[..., Any],
    name: Hashable,
    by_name: dict[Hashable, Input],
    shared: dict[str, Any],
    defaults: Mapping[str, Any],
) -> None:
    """Refuse a derivative by what no column feeds, or by a column that has none. (By a shared argument: `parameter_wishes`.)"""
    if name not in by_name:
        if callable(name):
            called = function_name(name)
            raise PlanError(
                f"the derivative by the function {called} is asked for: call it, as in dg.norm('x'), or name an argument, wrt='x'"
            )
        if name in defaults:
            raise PlanError(
                f"the derivative by {name!r} is asked for, but no column feeds it, so it is its default, {defaults[str(name)]!r:.60}. "
                f"inputs={{{name!r}: column}} says which column does; shared={{{name!r}: torch.tensor(...)}} makes it a tensor that every "
                "row shares, by which can be differentiated."
            )
        raise PlanError(
            f"the derivative by {name!r} is asked for, but no column feeds an argument of that name in {function_name(fn)}. "
            f"Possible: {listing([*by_name, *shared])}.{_asked_hint(name, by_name, shared)}"
        )
    for column in by_name[name].columns:
        dtype = dtype_of(source, column)
        reason = None if dtype is None else _dtypes.refusal(dtype)
        if reason is not None:
            raise PlanError(
                f"the derivative by {name!r} is asked for, but the column {column!r} ({dtype}) cannot be differentiated: {reason}."
                f"{_text_hint(source, column)}"
            )


def _asked_hint(name: Hashable, by_name: dict[Hashable, Input], shared: dict[str, Any]) -> str:
    if isinstance(name, tuple) and name and all(part in by_name or part in shared for part in name):
        return (
            f" wrt={list(name)!r}, a list, gives a column for each; dg.derivatives(data, fn, {{'mixed': {name!r}}}) the mixed "
            "derivative by all of them."
        )
    fed = [argument.name for argument in by_name.values() if name in argument.columns]
    return f" The column {name!r} feeds the argument {fed[0]!r}: ask for that." if fed else nearest(name, [*by_name, *shared])


def _text_hint(source: Source, column: Hashable) -> str:
    if source.kind == "bag" or not (source.dask and isinstance(dtype_of(source, column), pd.StringDtype | pd.ArrowDtype)):
        return ""
    return (
        " Convert it to numbers first; where it held arrays before it went into Dask, Dask has turned them into text: set "
        'dask.config.set({"dataframe.convert-string": False}) before from_pandas.'
    )


def column_directions(source: Source, derivatives: Iterable[Derivative]) -> tuple[Input, ...]:
    """The columns that hold directions, as inputs of their own. In a Bag of tuples they have no position."""
    found = []
    for step in directions_of(derivatives):
        if step.column is None or step.tensors:
            continue
        if source.labels is not None and not among(step.column, source.labels):
            raise PlanError(
                f"dot({step.wrt!r}, {step.column!r}) needs the column {step.column!r} as its direction, which there is not. The columns: "
                f"{listing(source.labels)}.{nearest(step.column, source.labels)} A direction that is the same for every row is given as "
                "numbers."
            )
        dtype = dtype_of(source, step.column)
        if dtype is not None and (reason := _dtypes.refusal(dtype)) is not None:
            raise PlanError(f"dot({step.wrt!r}, {step.column!r}): the column is no direction: {reason}.{_text_hint(source, step.column)}")
        found.append(Input(step, (step.column,), position=sys.maxsize))
    return tuple(found)


def refuse_complex_orders(source: Source, derivatives: Iterable[Derivative], by_name: dict[Hashable, Input]) -> None:
    """A gradient by a complex argument is ∂f/∂Re + i·∂f/∂Im, which is no number that could be differentiated again."""
    for derivative in derivatives:
        for order in orders_of(derivative):
            names = arguments_of(order)
            for name in names if len(order) > 1 else ():
                if name not in by_name:
                    continue
                dtypes = [dtype_of(source, column) for column in by_name[name].columns]
                if any(dtype is not None and _dtypes.role(dtype) == "complex" for dtype in dtypes):
                    raise PlanError(
                        f"{spelled(order)} is of an order above the first and by {name!r}, which is complex. Take its real and "
                        "imaginary parts as arguments of their own."
                    )


def parameter_wishes(
    fn: Callable[..., Any], derivatives: Sequence[Derivative], shared: dict[str, Any], states: int | None
) -> dict[Hashable, tuple[str, ...]]:
    """The parameters that are meant where a derivative is taken with respect to a shared argument, or to a part of one."""
    _check_named_directions(derivatives, shared, states)
    wishes = {
        name
        for derivative in derivatives
        for name in arguments_of(derivative)
        if isinstance(name, str) and name.partition(".")[0] in shared
    }
    if not wishes:
        return {}
    from ._parameters import matching, names_in, parameters_of

    known = names_in(shared)
    there = {name: tensor for name, tensor in parameters_of(shared).items() if tensor.is_floating_point()}
    found: dict[Hashable, tuple[str, ...]] = {name: tuple(matching(name, list(there))) for name in sorted(wishes)}
    for name, meant in found.items():
        if not meant:
            raise PlanError(
                f"the derivative by {name!r} is asked for, but {function_name(fn)} has no such shared parameter. Possible: "
                f"{listing(there)}.{nearest(name, there) or _as_tensor(name, shared)}"
            )
    for derivative in derivatives:
        _check_parameter_order(derivative, found, there, known)
    return found


def _check_named_directions(derivatives: Sequence[Derivative], shared: dict[str, Any], states: int | None) -> None:
    """Directions that name parameters are by shared arguments; where there is one for each state, there are as many as states."""
    for step in directions_of(derivatives):
        if (step.tensors or step.each) and str(step.wrt).partition(".")[0] not in shared:
            raise PlanError(
                f"dot({step.wrt!r}, ...) has tensors by the names of parameters as its direction, which is for shared arguments, and "
                f"{step.wrt!r} is none. Shared: {listing(shared) or 'nothing'}. By an argument from columns, a direction is the label of "
                "a column, or numbers."
            )
        if step.each and len(step.each) != states:
            raise PlanError(
                f"dot({step.wrt!r}, [...]) has {len(step.each)} directions, one for each state of a shared module, and there is "
                f"{'no module in several states' if states is None else f'a module in {states}'}: "
                "shared={'model': dg.checkpoints(net, states)} shares one in several; for one direction, leave out the list."
            )


def numbers_in(shared: dict[str, Any], parameters: Mapping[Hashable, tuple[str, ...]]) -> set[Hashable]:
    """Those of the keys of `parameters` that mean one shared tensor of shape (), a number."""
    if not parameters:
        return set()
    from ._parameters import parameters_of

    return {name for name, tensor in parameters_of(shared).items() if parameters.get(name) == (name,) and not tensor.dim()}


def _as_tensor(name: Hashable, shared: dict[str, Any]) -> str:
    """The remedy where a shared argument is a number, or an array, or holds integers: those have no gradient, a floating tensor has."""
    value = shared.get(str(name))
    kind = type(value).__name__
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f" {name!r} is the {kind} {value!r}: shared={{{name!r}: torch.tensor({float(value)!r})}} makes it one."
    dtype = str(getattr(value, "dtype", ""))
    if dtype.startswith("torch."):
        return f" {name!r} is a tensor of {dtype}: {name}.double() is floating."
    if hasattr(value, "__array__"):
        return f" {name!r} is a NumPy {kind}: shared={{{name!r}: torch.from_numpy({name})}} makes it one."
    if isinstance(value, Mapping | list | tuple):
        return f" {name!r} is a {kind} without floating tensors: torch.tensor(...) of what is in it makes them."
    return f" {name!r} is a {kind}: modules, tensors, and dicts of tensors have parameters."


def several_states(shared: dict[str, Any]) -> tuple[str, tuple[State, ...]] | None:
    """The module that comes in several states, and those; `shared` then holds the module itself."""
    several = [name for name, value in shared.items() if isinstance(value, Checkpoints)]
    if len(several) > 1:
        raise PlanError(f"{listing(several)} are shared in several states each: one of them is possible")
    for name in several:
        found = shared[name]
        shared[name] = found.module
        return name, found.states
    return None


def by_layer(asked: list[tuple[Hashable, Derivative]], shared: dict[str, Any]) -> list[tuple[Hashable | None, Derivative]]:
    """`asked`, with a norm for each layer of a shared module where that is asked for."""
    found: list[tuple[Hashable, Derivative]] = []
    for label, derivative in asked:
        if not (isinstance(derivative, Norm) and derivative.per_layer):
            found.append((label, derivative))
            continue
        from ._parameters import matching, parameters_of

        paths = [path for name in arguments_of(derivative) for path in matching(str(name), list(parameters_of(shared)))]
        layers: dict[str, list[str]] = {}  # a module's own parameters, not those of the modules inside it
        for path in paths:
            layers.setdefault(path.rpartition(".")[0] or path, []).append(path)
        if not layers:
            raise PlanError(f"{derivative} per layer is of shared modules, and there is none of that name. Shared: {listing(shared)}.")
        for layer, own in layers.items():
            name = f"norm({layer})" if label is UNNAMED else f"{label}.{layer}"
            found.append((name, Norm(tuple((path,) for path in dict.fromkeys(own)))))
    return found


def _check_parameter_order(
    derivative: Derivative, found: Mapping[Hashable, tuple[str, ...]], there: Mapping[str, Any], known: Sequence[str]
) -> None:
    orders = [order for order in orders_of(derivative) if any(name in found for name in arguments_of(order))]
    if any(len(order) > 1 for order in orders):
        raise PlanError(f"{written(derivative)} is of an order above the first by shared parameters: first order is possible")
    if isinstance(derivative, Project) and len(derivative.of) > 1:
        raise PlanError(f"{derivative}: a projection is by columns, or by one shared argument")
    given = [step for order in orders for step in order if isinstance(step, Dot)]
    for step in (one for either in given for one in either.each or (either,)):
        unknown = [name for name, _ in step.tensors if not any(path == name or path.endswith(f".{name}") for path in known)]
        if unknown:
            raise PlanError(
                f"dot({step.wrt!r}, ...): the direction names {unknown[0]!r}, which is no parameter. The parameters: {listing(known)}."
                f"{nearest(unknown[0], known)}"
            )
        directions_by_path(step, {name: tuple(there[name].shape) for name in found[step.wrt]})


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
            if not name:
                got = f"the column {step.column!r}" if constant is None else f"an array of shape {constant.shape}"
                raise PlanError(
                    f"dot({step.wrt!r}, ...) needs a direction for each parameter: {{parameter: tensor}}, a module, or a checkpoint, and "
                    f"it got {got}. The parameters: {listing(shapes)}. Of tensors in their order: "
                    "dict(zip(dict(model.named_parameters()), tensors))."
                )
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
