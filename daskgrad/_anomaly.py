"""Where a gradient stopped being finite: the operation and the user's line, found by running one row again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from ._lines import users_line
from ._mode import RowMode


class _Tracing(RowMode):
    """Notes at which line each node of the graph was made."""

    def __init__(self, leaves: list[Tensor]) -> None:
        super().__init__(leaves)
        self.made_at: dict[Any, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                self._note(tensor.grad_fn)
        return result

    def _note(self, node: Any) -> None:
        line = None
        todo = [node]
        while todo:
            node = todo.pop()
            if node not in self.made_at:
                self.made_at[node] = line = line or users_line()
                todo.extend(following for following, _ in node.next_functions if following is not None)


def first_not_finite(leaves: Mapping[Hashable, Tensor], call: Callable[[Mapping[Hashable, Tensor], RowMode], Tensor]) -> str | None:
    """The first operation of the backward pass that makes a gradient which is not finite, and its line.

    `call` gives the row function's output for the arguments `leaves`, watched by the mode.
    """
    mode = _Tracing(list(leaves.values()))
    output = call({name: leaf.clone() for name, leaf in leaves.items()}, mode)
    if not output.requires_grad:
        return None
    found: list[str] = []

    def watch(node: Any) -> None:
        def hook(made: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]) -> None:
            if not found and all(map(_finite, given)) and not all(map(_finite, made)):
                found.append(f"{node.name()} of {mode.made_at[node]}")

        node.register_hook(hook)

    for node in mode.made_at:
        watch(node)
    torch.autograd.grad(output.sum(), list(leaves.values()), allow_unused=True)
    return found[0] if found else None


def _finite(tensor: Tensor | None) -> bool:
    return tensor is None or bool(torch.isfinite(tensor).all())
