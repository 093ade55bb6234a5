"""An output and the arguments it was made from: their derivatives, by reverse mode alone.

The same code serves a batch (`lead` = 1: every tensor begins with the rows) and a single row (`lead` = 0). Rows do not depend on
each other, so the derivative of the sum over the rows is the derivative of each.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from ._derivative import Order


def reaches(output: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Whether a path in the recorded graph leads from `output` to one of `leaves`."""
    wanted = {id(leaf) for leaf in leaves}
    if id(output) in wanted:
        return True
    todo = [output.grad_fn] if output.grad_fn is not None else []
    seen = set(todo)
    while todo:
        node = todo.pop()
        if id(getattr(node, "variable", None)) in wanted:
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return False


def derive(output: Tensor, leaves: Mapping[Hashable, Tensor], wanted: Sequence[Order], lead: int) -> tuple[dict[Order, Tensor], bool]:
    """The derivatives `wanted` of `output` (*rows, *out) by `leaves` (*rows, *shape), and whether any was found to be reached.

    Each comes back as (*rows, *out, *shape of each argument in order). Mixed partials that are equal are computed once.
    What is not reached is zero.
    """
    sizes = {name: leaf.shape[lead:].numel() for name, leaf in leaves.items()}
    rank = {name: (sizes[name], position) for position, name in enumerate(leaves)}
    canonical = {order: tuple(sorted(order, key=rank.__getitem__)) for order in wanted}
    found: dict[Order, Tensor] = {(): output}
    reached = False
    depth = max(map(len, canonical.values()), default=0)
    for length in range(depth):
        for prefix in dict.fromkeys(order[:length] for order in canonical.values() if len(order) > length):
            names = list(dict.fromkeys(o[length] for o in canonical.values() if len(o) > length and o[:length] == prefix))
            deeper = any(len(o) > length + 1 and o[:length] == prefix for o in canonical.values())
            last = length + 1 == depth and len(canonical) == 1
            gradients = _by(found[prefix], [leaves[name] for name in names], lead, create_graph=deeper, last=last)
            reached = reached or any(gradient is not None for gradient in gradients)
            for name, gradient in zip(names, gradients, strict=True):
                shape = (*found[prefix].shape, *leaves[name].shape[lead:])
                found[(*prefix, name)] = leaves[name].new_zeros(shape) if gradient is None else gradient
    return {order: _arranged(found[canonical[order]], order, canonical[order], leaves, lead) for order in wanted}, reached


def _by(output: Tensor, leaves: Sequence[Tensor], lead: int, *, create_graph: bool, last: bool) -> list[Tensor | None]:
    """The gradients of every component of `output`: (*rows, *out, *shape) for each leaf, None where nothing leads there."""
    if not output.requires_grad:
        return [None] * len(leaves)
    if output.dim() == lead:
        return list(_grad(output, leaves, create_graph=create_graph, retain_graph=not last))
    flat = output.reshape(*output.shape[:lead], -1)
    rows = [_grad(flat[..., k], leaves, create_graph=create_graph, retain_graph=True) for k in range(flat.shape[-1])]
    return [_stacked([row[k] for row in rows], output.shape, leaf, lead) for k, leaf in enumerate(leaves)]


def _grad(output: Tensor, leaves: Sequence[Tensor], *, create_graph: bool, retain_graph: bool) -> Sequence[Tensor | None]:
    return torch.autograd.grad(
        output.sum(),  # giving grad_outputs instead makes torch import its symbolic shapes: a second, and 100 MB
        leaves,
        create_graph=create_graph,
        retain_graph=retain_graph or create_graph,
        allow_unused=True,
    )


def _stacked(parts: list[Tensor | None], shape: torch.Size, leaf: Tensor, lead: int) -> Tensor | None:
    if all(part is None for part in parts):
        return None
    whole = torch.stack([torch.zeros_like(leaf) if part is None else part for part in parts], dim=lead)
    return whole.reshape(*shape, *leaf.shape[lead:])


def _arranged(tensor: Tensor, order: Order, canonical: Order, leaves: Mapping[Hashable, Tensor], lead: int) -> Tensor:
    """`tensor` with the axes of each argument in the order asked for."""
    if order == canonical:
        return tensor
    dims = [leaves[name].dim() - lead for name in canonical]
    first = tensor.dim() - sum(dims)
    starts = [first + sum(dims[:k]) for k in range(len(dims))]
    places = list(range(len(canonical)))
    axes = list(range(first))
    for name in order:
        place = next(p for p in places if canonical[p] == name)
        places.remove(place)
        axes += range(starts[place], starts[place] + dims[place])
    return tensor.permute(axes)
