"""What a row function takes along besides its arguments: modules that it must not be given, values that cannot be meant."""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ._errors import GraphError, PlanError
from ._torch import torch_if_imported

if TYPE_CHECKING:
    from ._plan import Plan


def check(plan: Plan) -> None:
    """Refuse what no engine can do right, before any of them runs.

    Raises:
        PlanError: a batch norm in train mode: one row has no batch statistics. A collection of Dask's, which is not computed.
        GraphError: a shared tensor carries a graph, which belongs to whoever built it.
    """
    torch = torch_if_imported()
    if torch is None:
        return
    for name, value in reachable(plan):
        if hasattr(type(value), "__dask_graph__"):
            raise PlanError(
                f"{name!r}, which the row function uses, is a lazy {type(value).__name__} of Dask, and no row can wait for all the others: "
                f"compute it first, as in {name}.sum().compute()"
            )
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            what = "the shared argument" if name in plan.shared else "what the row function captures,"
            raise GraphError(
                f"{what} {name!r} is a tensor that carries a graph: it was computed from tensors that require a gradient. A graph "
                "does not survive the way to a worker process. Compute it inside the row function, or pass .detach() of it."
            )
    for name, module in modules(plan):
        for path, layer in module.named_modules():
            batch_norm = isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)
            if batch_norm and layer.training:
                where = f"{name}.{path}" if path else name
                raise PlanError(
                    f"{where} is a {type(layer).__name__} in train mode, which normalises by the statistics of a batch, and one row has "
                    f"none. Call {name}.eval() first: then it uses the running statistics."
                )


@dataclass(frozen=True)
class Captured:
    """What is in reach of a row function.

    Attributes:
        draws: it can draw from Python's or NumPy's random generators, whose draws a batch would share.
        scripted: TorchScript in its reach reads tensors into numbers.
        tensors: the tensors that it captures, by their storage, with the names that its author knows them by.
    """

    draws: bool
    scripted: bool
    tensors: Mapping[int, str]


def look(plan: Plan) -> Captured:
    """What is in reach of the row function of `plan`."""
    from . import _scripted

    captured = ((name, value) for name, value in reachable(replace(plan, shared={})))
    return Captured(_draws_outside_torch(plan), _scripted.reads_values(reachable(plan)), by_storage(captured))


def narrow(plan: Plan) -> Iterator[tuple[str, Any]]:
    """The modules and tensors in reach, by name, that are floating and not float64, with their dtypes."""
    import torch

    for name, value in reachable(plan):
        tensors = [value] if isinstance(value, torch.Tensor) else [*value.parameters(), *value.buffers()] if is_module(value) else []
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.dtype != torch.float64 and value is not plan.fn:
                yield name, tensor.dtype
                break


def tensors_of(plan: Plan) -> Iterator[tuple[str, Any]]:
    """The tensors that a row function is given or captures, by name, with their dtypes."""
    import torch

    return ((name, value.dtype) for name, value in reachable(plan) if isinstance(value, torch.Tensor))


def by_storage(values: Iterable[tuple[str, Any]]) -> dict[int, str]:
    """The tensors among `values`, those of modules included, by their storage."""
    import torch

    found: dict[int, str] = {}
    for name, value in values:
        if isinstance(value, torch.Tensor):
            found[storage_of(value)] = name
        elif isinstance(value, torch.nn.Module):
            for path, tensor in [*value.named_parameters(), *value.named_buffers()]:
                found[storage_of(tensor)] = f"{name}.{path}"
    return found


def storage_of(tensor: Any) -> int:
    """What tensors that share their numbers have in common; 0 for those that have no numbers at all."""
    try:
        storage: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse, or of a functorch level that has ended
        return 0
    return storage


def _draws_outside_torch(plan: Plan) -> bool:
    for _, value in reachable(plan):
        bound = getattr(value, "__self__", None)  # random.random is a method of a hidden generator
        if value is random or value is np.random or isinstance(value, _GENERATORS) or isinstance(bound, _GENERATORS):
            return True
        if isinstance(value, types.FunctionType) and "random" in _looked_up(value.__code__) and _of_numpy(value):
            return True
    return False


_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)


def _of_numpy(fn: types.FunctionType) -> bool:
    return any(value is np for _, value in _of_function(fn))


def modules(plan: Plan) -> Iterator[tuple[str, Any]]:
    """The torch modules that the row function can get at, with the name that its author knows them by."""
    return ((name, value) for name, value in reachable(plan) if is_module(value))


def noise(plan: Plan) -> str:
    """Which layers in reach draw random numbers, being in train mode, and the remedy; empty where none does."""
    import torch

    found, roots = [], {}
    for name, module in modules(plan):
        for path, layer in module.named_modules():
            rate = getattr(layer, "p" if isinstance(layer, torch.nn.modules.dropout._DropoutNd) else "dropout", 0.0)
            if layer.training and isinstance(rate, float) and rate > 0:
                found.append(f"{name}.{path}" if path else name)
                roots[name] = type(layer).__name__
    if not found:
        return ""
    (kind, *_), several = roots.values(), len(found) > 1
    which = ", ".join(found[:5]) + (", …" if len(found) > 5 else "")
    remedy = " and ".join(f"{name}.eval()" for name in roots)
    return f". {which} {'are' if several else f'is a {kind}'} in train mode{', and draw' if several else ''}: {remedy} ends that. Else"


def reachable(plan: Plan) -> Iterator[tuple[str, Any]]:
    """The row function, its shared arguments and what it captures: closures, globals, defaults, bound arguments, helpers."""
    todo: list[tuple[str, Any]] = [("fn", plan.fn), *plan.shared.items()]
    seen: set[int] = set()
    while todo:
        name, value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield name, value
        todo.extend(_parts(name, value))


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield from value.keywords.items()
        yield from ((f"argument {k}", part) for k, part in enumerate(value.args))
        yield name, value.func
    elif isinstance(value, types.MethodType):
        yield name, value.__func__
        yield "self", value.__self__
        yield from getattr(value.__self__, "__dict__", {}).items()
    elif isinstance(value, types.FunctionType):
        if (value.__module__ or "").partition(".")[0] not in ("torch", "numpy", "pandas", "daskgrad"):
            yield from _of_function(value)
    elif isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", part) for key, part in list(value.items())[:1000])
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{k}]", part) for k, part in enumerate(value[:1000]))
    elif callable(value) and not isinstance(value, type) and not is_module(value):
        yield from getattr(value, "__dict__", {}).items()
        call = vars(type(value)).get("__call__")
        if isinstance(call, types.FunctionType):
            yield name, call


def is_module(value: object) -> bool:
    """Whether it is a torch module; torch is not imported to find out."""
    torch = torch_if_imported()
    return torch is not None and isinstance(value, torch.nn.Module)


def _of_function(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # nothing in it yet
            continue
    for name in _looked_up(fn.__code__):
        if name in fn.__globals__:
            yield name, fn.__globals__[name]
    yield from (fn.__kwdefaults__ or {}).items()
    for k, default in enumerate(fn.__defaults__ or ()):
        yield f"default {k}", default
    if hasattr(fn, "__wrapped__"):
        yield fn.__name__, fn.__wrapped__


def _looked_up(code: types.CodeType) -> set[str]:
    inner = (_looked_up(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)
