"""Cuts inside TorchScript, which no torch function mode sees: a dispatch mode does, row at a time.

A batch needs no watching: vmap refuses to read a value there, and the rows go one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ._mode import RowMode

_READS = (
    "aten::Float",
    "aten::FloatImplicit",
    "aten::ScalarImplicit",
    "aten::Complex",
    "aten::ComplexImplicit",
    "aten::item",
    "prim::tolist",
)


class Watch(TorchDispatchMode):
    """Refuses to read a differentiated value into a Python number. Noted in `mode.cut`, since TorchScript changes the exception."""

    def __init__(self, mode: RowMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and self.mode.differentiated(args[0]):
            self.mode.refuse("float() or .item() inside TorchScript")
        return func(*args, **(kwargs or {}))


def watch(mode: RowMode, needed: bool) -> AbstractContextManager[Any]:
    """Watches `mode`'s call of the row function, where that is `needed`."""
    return Watch(mode) if needed else nullcontext()


def reads_values(reachable: Iterator[tuple[str, Any]]) -> bool:
    """Whether TorchScript that the row function can get at reads a tensor into a number, other than by int() and bool()."""
    return any(_reads(value) for _, value in reachable)


def _reads(value: Any) -> bool:
    if isinstance(value, torch.jit.ScriptFunction):
        return _in_graph(value)
    if isinstance(value, torch.nn.Module):
        scripted = [part for part in value.modules() if isinstance(part, torch.jit.ScriptModule)]
        return any(hasattr(part, "forward") and _in_graph(part) for part in scripted)
    return False


def _in_graph(scripted: Any) -> bool:
    try:
        found = scripted.inlined_graph
    except RuntimeError:  # a container without a forward
        return False
    return any(found.findAllNodes(kind, recurse=True) for kind in _READS)
