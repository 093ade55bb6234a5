"""An output and the arguments it was made from: their derivatives, by reverse mode alone.

The same code serves a batch (`lead` = 1: every tensor begins with the rows) and a single row (`lead` = 0). Rows do not depend on each
other, so the derivative of the sum over the rows is the derivative of each.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, _vmap_internals
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.overrides import TorchFunctionMode

from ._ambient import slow_rules
from ._derivative import Dot, Order, Step

Leaves = Mapping[Hashable, Tensor]
Directions = Mapping[Dot, Tensor]


def reaches(output: Tensor, leaves: Sequence[Tensor | GradientEdge]) -> bool:
    """Whether a path in the recorded graph leads from `output` to one of `leaves`."""
    wanted = {id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
    inside = {leaf.grad_fn if isinstance(leaf, Tensor) else leaf.node for leaf in leaves} - {None}
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
    if deeper:
        _refuse_a_dead_end(gradients.values())
    made: dict[Step, Tensor] = {}
    for step in steps:
        name = step.wrt if isinstance(step, Dot) else step
        leaf, gradient = leaves[name], gradients[name]
        if gradient is None:
            gradient = leaf.new_zeros((*output.shape, *leaf.shape[lead:]), dtype=leaf.dtype)
        made[step] = _along(gradient, directions[step], leaf, output, lead) if isinstance(step, Dot) else gradient
    return made, reached


def _refuse_a_dead_end(gradients: Iterable[Tensor | None]) -> None:
    """A backward pass that is marked as good for one derivative leaves a node that leads nowhere: the next order would be a silent 0."""
    todo = [gradient.grad_fn for gradient in gradients if gradient is not None and gradient.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node.name() == "torch::autograd::Error":
            raise RuntimeError("trying to differentiate twice a function that was marked with @once_differentiable")
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        todo += new


def _along(gradient: Tensor, vector: Tensor, leaf: Tensor, output: Tensor, lead: int) -> Tensor:
    """`gradient` (*rows, *out, *shape) times `vector` (*rows, *shape), summed over the shape."""
    shape = leaf.shape[lead:]
    if vector.shape[lead:] != shape and vector.shape[lead:].numel() != 1:
        raise ValueError(f"the direction has the shape {tuple(vector.shape[lead:])}, and its argument {tuple(shape)}: they must agree")
    rows = vector.shape[:lead]
    out = [1] * (output.dim() - lead)
    fitted = vector.reshape((*rows, *out, *(shape if vector.shape[lead:] == shape else [1] * len(shape))))
    product = (gradient * fitted.to(gradient.dtype)).reshape(*output.shape, -1)
    return product.sum(-1)


class _InTorch(TorchFunctionMode):
    """While a backward pass records its own graph: one that is written in Python may not go on outside of torch.

    There no graph is recorded, detached or not, and the next order would be a silent 0.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _OUT_OF_TORCH and (args[0].is_floating_point() or args[0].is_complex()):
            raise RuntimeError(
                f"the backward pass of a torch.autograd.Function takes numbers out of torch, by {func.__name__}(), so it cannot be "
                "differentiated again: write it with torch operations, or ask for the first order only"
            )
        return func(*args, **(kwargs or {}))


_OUT_OF_TORCH = frozenset({Tensor.numpy, Tensor.__array__, Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__complex__})


# --- first order ------------------------------------------------------------------------------------------------------


def _by(output: Tensor, leaves: Sequence[Tensor], lead: int, *, create_graph: bool, last: bool) -> list[Tensor | None]:
    """The gradients of every component of `output`: (*rows, *out, *shape) for each leaf, None where nothing leads there."""
    if not output.requires_grad:
        return [None] * len(leaves)
    if output.dim() == lead:
        return list(_grad(output.sum() if create_graph else output, leaves, create_graph=create_graph, retain_graph=not last))
    flat = output.reshape(*output.shape[:lead], -1)  # (*rows, out)
    unseen = _unseen()
    if not create_graph and not unseen and by_columns(flat.shape[-1], sum(leaf.shape[lead:].numel() for leaf in leaves)):
        columns = _by_columns(flat, leaves, lead)
        if columns is not None:
            return [None if c is None else c.reshape(*output.shape, *leaf.shape[lead:]) for c, leaf in zip(columns, leaves, strict=True)]
    if not create_graph and lead and not unseen:  # the loop stays plain
        rows = _by_rows_at_once(flat, leaves, lead)
        if rows is not None:
            return [None if r is None else r.reshape(*output.shape, *leaf.shape[lead:]) for r, leaf in zip(rows, leaves, strict=True)]
    parts = [_grad(flat[..., k].sum(), leaves, create_graph=create_graph, retain_graph=True) for k in range(flat.shape[-1])]
    return [_stacked([part[k] for part in parts], output.shape, leaf, lead) for k, leaf in enumerate(leaves)]


def _unseen() -> bool:
    """Whether this run is traced for values that are not known yet: then no product can be checked."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def _grad(output: Tensor, leaves: Sequence[Tensor], *, create_graph: bool, retain_graph: bool) -> Sequence[Tensor | None]:
    # Not `torch.autograd.grad` with grad_outputs: for those it imports its symbolic shapes, which takes a second and 100 MB.
    if create_graph:
        # A backward pass that is marked as good for one derivative says so only where what comes in could be differentiated, too.
        output = output * torch.ones_like(output, requires_grad=True)
        one = torch.ones_like(output)
        with _InTorch():
            gradients = _engine_run_backward((output,), (one,), True, True, tuple(leaves), True, accumulate_grad=False)
    else:
        one = output.new_ones(()).expand(output.shape)
        gradients = _engine_run_backward((output,), (one,), retain_graph, False, tuple(leaves), True, accumulate_grad=False)
    # An embedding with sparse=True gives a sparse gradient, which no cell can hold.
    return [g.to_dense() if g is not None and g.layout is not torch.strided else g for g in gradients]


def _stacked(parts: list[Tensor | None], shape: torch.Size, leaf: Tensor, lead: int) -> Tensor | None:
    if all(part is None for part in parts):
        return None
    whole = torch.stack([torch.zeros_like(leaf) if part is None else part for part in parts], dim=lead)
    return whole.reshape(*shape, *leaf.shape[lead:])


def _by_rows_at_once(flat: Tensor, leaves: Sequence[Tensor], lead: int) -> list[Tensor | None] | None:
    """A small Jacobian by its rows, all of them in one backward pass under vmap: (*rows, out, in) for each leaf.

    None where the passes are better made one by one: few of them, large ones, or ones that do not come out as the one product that
    is made the usual way (torch's batching rules are not to be trusted unseen).
    """
    count = flat.shape[-1]
    if not _worth_batching(count, max(flat.numel() // max(count, 1), sum(leaf.numel() for leaf in leaves))):
        return None
    u = _weights(count, flat)
    expected = _grad((flat * u).sum(), leaves, create_graph=False, retain_graph=True)
    try:
        products = _batched_grad(flat, leaves, count)
    except (RuntimeError, NotImplementedError):
        return None
    found: list[Tensor | None] = []
    for product, right, leaf in zip(products, expected, leaves, strict=True):
        if product is None or right is None:
            if product is not right:
                return None
            found.append(None)
            continue
        jacobian = product.reshape(count, *leaf.shape[:lead], -1)  # (out, *rows, in)
        if not _agrees(torch.tensordot(u, jacobian, 1), right.reshape(jacobian.shape[1:]), jacobian.abs().sum(0)):
            return None
        found.append(jacobian.movedim(0, -2))
    return found


def _by_columns(flat: Tensor, leaves: Sequence[Tensor], lead: int) -> list[Tensor | None] | None:
    """A tall Jacobian by its columns: the reverse product uᵀJ is linear in u, and its derivative by u is a column.

    Returns (*rows, out, in) for each leaf; None where the result cannot be relied on, as with an operation whose backward pass does not
    record a graph, or 0·inf. One product that was computed the usual way is compared.
    """
    u = _weights(flat.shape[-1], flat).expand_as(flat).clone().requires_grad_()
    try:
        products = torch.autograd.grad((flat * u).sum(), leaves, create_graph=True, allow_unused=True)
        return [None if p is None else _columns(p, u, leaf, lead) for p, leaf in zip(products, leaves, strict=True)]
    except (_UnreliableError, RuntimeError, NotImplementedError):
        return None


class _UnreliableError(Exception):
    """Columns that do not agree with the reverse product."""


def _columns(product: Tensor, u: Tensor, leaf: Tensor, lead: int) -> Tensor:
    """(*rows, out, in) from `product` = uᵀJ (*rows, *shape)."""
    if not product.requires_grad or leaf.is_complex():
        raise _UnreliableError
    flat = product.reshape(*leaf.shape[:lead], -1)  # (*rows, in)
    count = flat.shape[-1]
    if lead and _worth_batching(count, u.numel()):
        try:
            (jacobian,) = _batched_grad(flat, [u], count)
            if jacobian is not None:
                return _checked_columns(jacobian, flat, u)
        except (_UnreliableError, RuntimeError, NotImplementedError):
            pass  # one by one, then
    parts: list[Any] = [torch.autograd.grad(flat[..., j].sum(), u, retain_graph=True, allow_unused=True)[0] for j in range(count)]
    if not parts or any(part is None for part in parts):
        raise _UnreliableError
    return _checked_columns(torch.stack(parts), flat, u)


def _checked_columns(jacobian: Tensor, product: Tensor, u: Tensor) -> Tensor:
    """(*rows, out, in) of `jacobian` (in, *rows, out), which times u is `product` (*rows, in)."""
    again = torch.linalg.vecdot(jacobian, u.detach()).movedim(0, -1)
    if not _agrees(again, product.detach(), torch.linalg.vector_norm(jacobian, 1, dim=-1).movedim(0, -1)):
        raise _UnreliableError
    return jacobian.movedim(0, -1)


# --- products that are made at once, and checked ------------------------------------------------------------------------

AT_ONCE = 2**20
"""Elements of a Jacobian up to which its backward passes are worth making at once: beyond, they no longer fit the caches."""


def _worth_batching(passes: int, elements: int) -> bool:
    """Whether so many backward passes with so many elements each are better made at once."""
    return passes > 2 and passes * elements <= AT_ONCE


def _batched_grad(output: Tensor, leaves: Sequence[Tensor], count: int) -> Sequence[Tensor | None]:
    """The gradients of each of the `count` components of `output` (*rows, count): (count, *leaf) for each leaf.

    It is `torch.autograd.grad(is_grads_batched=True)` without the import of torch's symbolic shapes, and without batching rules that
    torch itself calls slow: those raise RuntimeError.
    """
    unit = torch.eye(count, dtype=output.dtype, device=output.device)
    seeds = unit.reshape(count, *[1] * (output.dim() - 1), count).expand(count, *output.shape)

    def product(seed: Tensor) -> Any:
        return _engine_run_backward((output,), (seed,), True, False, tuple(leaves), True, accumulate_grad=False)

    with slow_rules(False):
        made: Sequence[Tensor | None] = _vmap_internals._vmap(product, 0, 0, allow_none_pass_through=True)(seeds)
    if any(gradient is not None and gradient.layout is not torch.strided for gradient in made):
        raise RuntimeError("a sparse gradient")
    return made


def _weights(count: int, like: Tensor) -> Tensor:
    """(count,) of the sort of `like`, in [1, 2), without a pattern that an error could share."""
    places = torch.arange(1, count + 1, dtype=torch.float64, device=like.device)
    return (1 + (places * 0.6180339887498949).frac()).to(like.dtype)


def _agrees(product: Tensor, expected: Tensor, scale: Tensor) -> bool:
    """Whether two ways to a product agree but for rounding, in sums of terms as large as `scale`. NaN agrees with nothing."""
    exact = torch.finfo(scale.dtype).eps ** 0.5
    return bool(((product - expected).abs() <= 2 * exact * scale).all())


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
