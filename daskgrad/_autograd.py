"""An output and the arguments it was made from: their derivatives, by reverse mode alone.

The same code serves a batch (`lead` = 1: every tensor begins with the rows) and a single row (`lead` = 0). Rows do not depend on each
other, so the derivative of the sum over the rows is the derivative of each.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._derivative import Dot, Order, Step

Leaves = Mapping[Hashable, Tensor]
Directions = Mapping[Dot, Tensor]


def reaches(output: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Whether a path in the recorded graph leads from `output` to one of `leaves`."""
    wanted = {id(leaf) for leaf in leaves}
    inside = {leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None}
    if id(output) in wanted:
        return True
    todo = [output.grad_fn] if output.grad_fn is not None else []
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node in inside or id(getattr(node, "variable", None)) in wanted:
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return False


def derive(output: Tensor, leaves: Leaves, wanted: Sequence[Order], lead: int, directions: Directions) -> tuple[dict[Order, Tensor], bool]:
    """The derivatives `wanted` of `output` (*rows, *out) by `leaves` (*rows, *shape), and whether any was found to be reached.

    Each comes back as (*rows, *out, *shape of each argument in order; a direction has no axes). Equal mixed partials are computed once,
    and what several orders begin with is shared. What is not reached is zero.
    """
    canonical = {order: canonical_order(order, {name: leaf.shape[lead:].numel() for name, leaf in leaves.items()}) for order in wanted}
    orders = list(dict.fromkeys(canonical.values()))
    found: dict[Order, Tensor] = {(): output}
    reached = False
    depth = max(map(len, orders), default=0)
    for length in range(depth):
        for prefix in dict.fromkeys(order[:length] for order in orders if len(order) > length):
            here = [order for order in orders if len(order) > length and order[:length] == prefix]
            steps = list(dict.fromkeys(order[length] for order in here))
            deeper = any(len(order) > length + 1 for order in here)
            last = length + 1 == depth and len(orders) == 1
            made, any_reached = _step(found[prefix], steps, leaves, lead, directions, deeper=deeper, last=last)
            reached = reached or any_reached
            found.update({(*prefix, step): tensor for step, tensor in made.items()})
    return {order: _arranged(found[canonical[order]], order, canonical[order], leaves, lead) for order in wanted}, reached


def canonical_order(order: Order, sizes: Mapping[Hashable, int]) -> Order:
    """The cheapest of the equal orders: directions first, which give one number, then arguments with few elements."""
    rank = {name: (size, position) for position, (name, size) in enumerate(sizes.items())}
    directions = sorted((step for step in order if isinstance(step, Dot)), key=lambda step: rank[step.wrt])
    names = sorted((step for step in order if not isinstance(step, Dot)), key=rank.__getitem__)
    return (*directions, *names)


def by_columns(outputs: int, inputs: int) -> bool:
    """Whether a Jacobian is cheaper by its columns: so many elements come out, and so many go in."""
    return inputs < outputs


def _step(
    output: Tensor, steps: Sequence[Step], leaves: Leaves, lead: int, directions: Directions, *, deeper: bool, last: bool
) -> tuple[dict[Step, Tensor], bool]:
    """One more derivative of `output` for each of `steps`."""
    names = list(dict.fromkeys(step.wrt if isinstance(step, Dot) else step for step in steps))
    gradients = dict(zip(names, _by(output, [leaves[name] for name in names], lead, create_graph=deeper, last=last), strict=True))
    reached = any(gradient is not None for gradient in gradients.values())
    made: dict[Step, Tensor] = {}
    for step in steps:
        name = step.wrt if isinstance(step, Dot) else step
        leaf, gradient = leaves[name], gradients[name]
        if gradient is None:
            gradient = leaf.new_zeros((*output.shape, *leaf.shape[lead:]), dtype=leaf.dtype)
        made[step] = _along(gradient, directions[step], leaf, output, lead) if isinstance(step, Dot) else gradient
    return made, reached


def _along(gradient: Tensor, vector: Tensor, leaf: Tensor, output: Tensor, lead: int) -> Tensor:
    """`gradient` (*rows, *out, *shape) times `vector` (*rows, *shape), summed over the shape."""
    shape = leaf.shape[lead:]
    if vector.shape[lead:] != shape and vector.shape[lead:].numel() != 1:
        raise ValueError(f"the direction has the shape {tuple(vector.shape[lead:])}, and its argument {tuple(shape)}: they must agree")
    rows = vector.shape[:lead]
    out = [1] * (output.dim() - lead)
    fitted = vector.reshape(*rows, *out, *(shape if vector.shape[lead:] == shape else [1] * len(shape)))
    product = (gradient * fitted.to(gradient.dtype)).reshape(*output.shape, -1)
    return product.sum(-1)


# --- first order ------------------------------------------------------------------------------------------------------


def _by(output: Tensor, leaves: Sequence[Tensor], lead: int, *, create_graph: bool, last: bool) -> list[Tensor | None]:
    """The gradients of every component of `output`: (*rows, *out, *shape) for each leaf, None where nothing leads there."""
    if not output.requires_grad:
        return [None] * len(leaves)
    if output.dim() == lead:
        return list(_grad(output.sum(), leaves, create_graph=create_graph, retain_graph=not last))
    flat = output.reshape(*output.shape[:lead], -1)  # (*rows, out)
    if not create_graph and by_columns(flat.shape[-1], sum(leaf.shape[lead:].numel() for leaf in leaves)):
        columns = _by_columns(flat, leaves, lead)
        if columns is not None:
            return [None if c is None else c.reshape(*output.shape, *leaf.shape[lead:]) for c, leaf in zip(columns, leaves, strict=True)]
    parts = [_grad(flat[..., k].sum(), leaves, create_graph=create_graph, retain_graph=True) for k in range(flat.shape[-1])]
    return [_stacked([part[k] for part in parts], output.shape, leaf, lead) for k, leaf in enumerate(leaves)]


def _grad(output: Tensor, leaves: Sequence[Tensor], *, create_graph: bool, retain_graph: bool) -> Sequence[Tensor | None]:
    # A sum, not grad_outputs: for those torch imports its symbolic shapes, which takes a second and 100 MB.
    gradients = torch.autograd.grad(output, leaves, create_graph=create_graph, retain_graph=retain_graph or create_graph, allow_unused=True)
    # An embedding with sparse=True gives a sparse gradient, which no cell can hold.
    return [g.to_dense() if g is not None and g.layout is not torch.strided else g for g in gradients]


def _stacked(parts: list[Tensor | None], shape: torch.Size, leaf: Tensor, lead: int) -> Tensor | None:
    if all(part is None for part in parts):
        return None
    whole = torch.stack([torch.zeros_like(leaf) if part is None else part for part in parts], dim=lead)
    return whole.reshape(*shape, *leaf.shape[lead:])


def _by_columns(flat: Tensor, leaves: Sequence[Tensor], lead: int) -> list[Tensor | None] | None:
    """A tall Jacobian by its columns: the reverse product uᵀJ is linear in u, and its derivative by u is a column.

    Returns (*rows, out, in) for each leaf; None where the result cannot be relied on, as with an operation whose backward pass does not
    record a graph, or 0·inf. One product that was computed the usual way is compared.
    """
    u = torch.linspace(1.0, 2.0, flat.shape[-1], dtype=flat.dtype, device=flat.device).expand_as(flat).clone().requires_grad_()
    try:
        products = torch.autograd.grad((flat * u).sum(), leaves, create_graph=True, allow_unused=True)
        return [None if p is None else _columns(p, u, leaf, lead) for p, leaf in zip(products, leaves, strict=True)]
    except (_UnreliableError, RuntimeError, NotImplementedError):
        return None


class _UnreliableError(Exception):
    """Columns that do not agree with the reverse product."""


def _columns(product: Tensor, u: Tensor, leaf: Tensor, lead: int) -> Tensor:
    """(*rows, out, in) from `product` = uᵀJ (*rows, *shape)."""
    parts: list[Any] = []
    if product.requires_grad and not leaf.is_complex():
        flat = product.reshape(*leaf.shape[:lead], -1)
        parts = [torch.autograd.grad(flat[..., j].sum(), u, retain_graph=True, allow_unused=True)[0] for j in range(flat.shape[-1])]
    if not parts or any(part is None for part in parts):
        raise _UnreliableError
    jacobian = torch.stack(parts, dim=-1)  # (*rows, out, in)
    again = (jacobian * u.detach().unsqueeze(-1)).sum(-2)
    expected = product.detach().reshape(again.shape)
    exact = torch.finfo(again.dtype).eps ** 0.5
    scale = (jacobian * u.detach().unsqueeze(-1)).abs().sum(-2)
    if not ((again - expected).abs() <= exact * scale).all():  # NaN fails too
        raise _UnreliableError
    return jacobian


def _arranged(tensor: Tensor, order: Order, canonical: Order, leaves: Leaves, lead: int) -> Tensor:
    """`tensor` with the axes of each argument in the order asked for."""
    names = [step for step in canonical if not isinstance(step, Dot)]
    wanted = [step for step in order if not isinstance(step, Dot)]
    if wanted == names:
        return tensor
    dims = [leaves[name].dim() - lead for name in names]
    first = tensor.dim() - sum(dims)
    starts = [first + sum(dims[:k]) for k in range(len(dims))]
    places = list(range(len(names)))
    axes = list(range(first))
    for name in wanted:
        place = next(p for p in places if names[p] == name)
        places.remove(place)
        axes += range(starts[place], starts[place] + dims[place])
    return tensor.permute(axes)
