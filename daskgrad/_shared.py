"""Shared arguments: the same for every row, and as they were afterwards."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ._captured import by_storage
from ._checkpoints import in_state
from ._mode import RowMode
from ._parameters import parameters_of
from ._plan import Plan

SMALL = 2**16
"""Bytes up to which a shared tensor is copied for each call, so that a row that writes into it writes into its own copy."""


class Shared:
    """The shared arguments of a plan, ready for use in this thread.

    Attributes:
        values: by argument name.
        targets: the parameters that are differentiated, by path.
        device: where they are.
        dtype: the floating dtype of the modules among them (and of the row function, if it is one), None without any.
        kept: the tensors among them that every call gets as they are, by their storage, with their names.
    """

    def __init__(self, plan: Plan, device: torch.device, checkpoint: int | None = None) -> None:
        given = dict(plan.shared)
        if plan.checkpoints is not None and checkpoint is not None:
            name, states = plan.checkpoints
            given[name] = in_state(given[name], states[checkpoint])
        self.device = device
        self.values = {name: _ready(value, device) for name, value in given.items()}
        self.dtype = module_dtype([*plan.shared.values(), plan.fn])
        everything = parameters_of(self.values)
        self.targets = {path: everything[path] for wish in plan.parameters.values() for path in wish}
        self._small = [
            name
            for name, value in self.values.items()
            if isinstance(value, Tensor) and value.numel() * value.element_size() <= SMALL and name not in self.targets
        ]

        self.kept = by_storage(_inside((name, value) for name, value in self.values.items() if name not in self._small))

    def for_call(self, mode: RowMode) -> Mapping[str, Any]:
        """The values for one call of the row function."""
        if not self._small:
            return self.values
        copies = {name: self.values[name].clone() for name in self._small}
        if mode.fresh:
            copies = {name: mode.own(tensor) for name, tensor in copies.items()}
        return {**self.values, **copies}


def _inside(values: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """`values`, and what dicts, lists and tuples among them hold."""
    for name, value in values:
        yield name, value
        if isinstance(value, Mapping):
            yield from _inside((f"{name}[{key!r}]", item) for key, item in value.items())
        elif isinstance(value, list | tuple):
            yield from _inside((f"{name}[{k}]", item) for k, item in enumerate(value))


def copies(shared: Mapping[str, Any]) -> dict[str, Any]:
    """Copies that may be used and changed: the caller's own stay as they are. (On Dask the bytes are the copy.)"""
    return {name: _copy(value) for name, value in shared.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, nn.Module):
        return copy.deepcopy(value)
    if type(value) in (dict, list, tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        made = {key: _copy(item) for key, item in items}
        return made if isinstance(value, dict) else type(value)(made.values())
    return value


def doubled(value: Any) -> Any:
    """A copy with its floating tensors in float64: of a module, a tensor, and what dicts, lists and tuples hold."""
    copied = copies({"value": value})["value"]
    if isinstance(copied, nn.Module):
        return copied.double()
    if isinstance(copied, Tensor):
        return copied.double() if copied.is_floating_point() else copied
    if type(copied) in (dict, list, tuple):
        made = [doubled(item) for item in (copied.values() if isinstance(copied, dict) else copied)]
        return dict(zip(copied, made, strict=True)) if isinstance(copied, dict) else type(copied)(made)
    return copied


def _ready(value: Any, device: torch.device) -> Any:
    """On the device, recording no graph: derivatives by a parameter come from its calls and copies (`_parameters`), not from itself."""
    if isinstance(value, nn.Module):
        return value.to(device).requires_grad_(False)
    if isinstance(value, Tensor):
        return value.detach().to(device)
    return value


def module_dtype(values: list[Any]) -> np.dtype[Any] | None:
    """The floating dtype of the first module among `values` that has one."""
    for value in values:
        if isinstance(value, nn.Module):
            for tensor in [*value.parameters(), *value.buffers()]:
                if tensor.is_floating_point():
                    name = str(tensor.dtype).removeprefix("torch.")
                    return np.dtype(name) if name in ("float16", "float32", "float64") else None
    return None
