"""What a row function returned: judged, and turned into the derivatives that are wanted. The same rules for a batch and for one row."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import _parameters, _reduce
from ._autograd import derive, reaches
from ._contributions import Contribution
from ._derivative import Aux, Derivative, Dot, Norm, Order, Project, Total, orders_of
from ._errors import GraphError
from ._parameters import Uses


@dataclass(frozen=True)
class Wish:
    """What is wanted of each row.

    Attributes:
        named: the arguments that are differentiated, in order.
        derivatives: what to compute.
        vectors: `fn` may return a vector; its derivatives are Jacobians.
        allow_unused: zeros, not an error, where no named argument reaches the output.
        targets: the shared parameters that are differentiated, by path.
        shared: which of them each wish of the call means.
        along: the directions for them.
    """

    named: Sequence[Hashable]
    derivatives: Sequence[Derivative]
    vectors: bool
    allow_unused: bool
    targets: Mapping[str, Tensor] = field(default_factory=dict)
    shared: Mapping[Hashable, Sequence[str]] = field(default_factory=dict)
    along: Mapping[Dot, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def orders(self) -> list[Order]:
        """The derivatives by column arguments that the wanted ones are made of."""
        orders = (order for derivative in self.derivatives for order in orders_of(derivative))
        return list(dict.fromkeys(order for order in orders if not self.of_parameters(order)))

    def of_parameters(self, order: Order) -> Sequence[str]:
        """The parameters that an order is taken with respect to; none, if it is by columns."""
        step = order[0] if order else None
        return self.shared.get(step.wrt if isinstance(step, Dot) else step, ())

    @property
    def extras(self) -> list[Aux]:
        """The further outputs that are wanted."""
        return [derivative for derivative in self.derivatives if isinstance(derivative, Aux)]


def taken(result: Any, wish: Wish, device: torch.device) -> tuple[Tensor, ...]:
    """The value, and the extras that are wanted, of what the row function returned: a number, or `(number, {"name": extra})`.

    Raises:
        TypeError: it returned something else.
        KeyError: an extra that is wanted is not there.
    """
    extras: Mapping[str, Any] = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        result, extras = result
    missing = [extra.name for extra in wish.extras if extra.name not in extras]
    if missing:
        there = ", ".join(map(repr, extras)) or "none"
        raise KeyError(f"dg.aux({missing[0]!r}) is asked for, but the row function returned the extras: {there}")
    return (_value(result, wish, device), *(_extra(extras[extra.name], device) for extra in wish.extras))


def _value(result: Any, wish: Wish, device: torch.device) -> Tensor:
    """() a number, or a vector where that is allowed."""
    if isinstance(result, bool | int | float | np.bool_ | np.integer | np.floating):
        return torch.tensor(float(result), device=device)
    if not isinstance(result, Tensor):
        raise TypeError(f"the row function returned {_shown(result)}: return one number, a tensor of shape ()")
    if result.is_complex():
        raise TypeError("the row function returned a complex number: a gradient needs a real one, such as abs() or .real")
    if result.shape == (1,) or (result.numel() == 1 and not wish.vectors):
        return result.reshape(())
    if result.dim() and wish.targets:
        raise TypeError(
            f"the row function returned a tensor of shape {tuple(result.shape)}, and a gradient by parameters needs one number: reduce "
            "it, as by sum()"
        )
    if result.dim() and not wish.vectors:
        raise TypeError(
            f"the row function returned a tensor of shape {tuple(result.shape)}, and a gradient needs one number: reduce it, as by "
            f"sum(). Its Jacobian is what dg.derivatives(data, fn, {{'jacobian': {next(iter(wish.named), 'x')!r}}}) gives."
        )
    return result


def _shown(result: Any) -> str:
    if result is None:
        return "None (is there a return?)"
    if isinstance(result, tuple | list):
        kind = f"a {type(result).__name__} of {len(result)}"
        return f"{kind} (torch.stack makes a vector; further numbers go by name, return value, {{'name': further}}, for dg.aux)"
    return f"a {type(result).__name__}"


def _extra(value: Any, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    try:
        return torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"a further output is {value!r:.60}, a {type(value).__name__}: numbers and arrays are possible") from error


def derived(
    value: Tensor,
    extras: Sequence[Tensor],
    leaves: Mapping[Hashable, Tensor],
    directions: Mapping[Dot, Tensor],
    wish: Wish,
    lead: int,
    uses: Uses | None = None,
    active: Tensor | None = None,
) -> dict[Derivative, Tensor]:
    """What is wanted, from the value (*rows, *out). `active`: the rows (indices) that count in sums over rows.

    Raises:
        GraphError: no argument named in the call reaches the value.
    """
    differentiable = value.requires_grad and value.is_floating_point()
    source = value if differentiable else value.detach().to(torch.get_default_dtype())
    parts, used = _of_parameters(source, uses, lead) if uses is not None else ({}, False)
    orders, reached = derive(source, leaves, wish.orders, lead, directions)
    if not (reached or used or wish.allow_unused) and (wish.named or wish.targets):
        sources = [*leaves.values(), *(uses.wanted() if uses is not None else ())]
        if not (differentiable and reaches(value, sources)):
            raise GraphError(_unreached(wish, value))
    found: dict[Derivative, Tensor] = dict(zip(wish.extras, extras, strict=True))
    like = source if lead else source[None]
    for derivative in wish.derivatives:
        if any(wish.of_parameters(order) for order in orders_of(derivative)):
            result = _by_parameters(derivative, parts, orders, wish, like, lead, active)
            found[derivative] = result if lead else result[0]
        elif isinstance(derivative, Norm):
            found[derivative] = _reduce.norm([orders[order] for order in derivative.of], lead)
        elif isinstance(derivative, Project):
            found[derivative] = _reduce.project([orders[order] for order in derivative.of], lead, derivative.k, derivative.seed)
        elif isinstance(derivative, tuple):
            found[derivative] = orders[derivative]
    return found


def _unreached(wish: Wish, value: Tensor) -> str:
    if not (value.is_floating_point() or value.is_complex()):
        what = "a truth" if value.dtype == torch.bool else "an integer"
        return (
            f"the row function returned {what} (a {str(value.dtype).removeprefix('torch.')} tensor), which has no gradient: a floating "
            "number is needed. In place of a comparison write something smooth, as torch.sigmoid((x - y) / width), or "
            "torch.where(x > y, a, b) of numbers that depend on x; allow_unused=True gives zeros."
        )
    asked = ", ".join(map(str, [*wish.named, *wish.shared]))
    why = "a comparison, a branch, one side of max(), or something under torch.no_grad() or with detach()?"
    if wish.targets:
        why = "is another module used than the argument, or this one under no_grad or with detach()?"
    return (
        f"no argument that was asked for ({asked}) reaches what the row function returned: it is a constant there ({why}). Where its "
        "slope is meant to be zero, write torch.clamp(x, min=0) and the like, or ask for zeros with allow_unused=True."
    )


def _of_parameters(value: Tensor, uses: Uses, lead: int) -> tuple[dict[str, list[Contribution]], bool]:
    """What the gradient by each parameter is made of, with the rows in front, and whether any is reached.

    Raises:
        TypeError: the value is a vector.
    """
    if value.dim() > lead:
        raise TypeError(
            f"the row function returned a tensor of shape {tuple(value.shape[lead:])}, and a gradient by parameters needs a number"
        )
    wanted: Any = uses.wanted()  # tensors and places, which torch's own annotation keeps apart
    gradients: Sequence[Tensor | None] = [None] * len(wanted)
    if wanted and value.requires_grad:
        gradients = torch.autograd.grad(value.sum(), wanted, retain_graph=True, allow_unused=True)
        gradients = [g.to_dense() if g is not None and g.layout is not torch.strided else g for g in gradients]
    reached = any(gradient is not None for gradient in gradients)
    if not lead:
        gradients = [None if gradient is None else gradient[None] for gradient in gradients]
    return uses.parts(gradients), reached


def _by_parameters(
    derivative: Derivative,
    parts: Any,
    orders: Mapping[Order, Tensor],
    wish: Wish,
    like: Tensor,
    lead: int,
    active: Tensor | None,
) -> Tensor:
    """A derivative by shared parameters, with the rows in front: (rows,), or (rows, elements)."""
    like = like.detach()
    if isinstance(derivative, Norm):
        names = list(dict.fromkeys(name for order in derivative.of for name in wish.of_parameters(order)))
        total = _parameters.squared_norm(parts, names, like)
        for order in derivative.of:
            if not wish.of_parameters(order):
                total = total + _reduce.norm([orders[order]], lead).square()
        return total.sqrt()
    (order,) = orders_of(derivative)
    if isinstance(derivative, Total):
        weights = torch.ones_like(like) if active is None else torch.zeros_like(like).index_fill(0, active, 1.0)
        meant = wish.of_parameters(order)
        return _parameters.total(parts, wish.targets, meant, weights, squares=derivative.squares, clip=derivative.clip)
    if isinstance(derivative, Project):
        return _parameters.projected(parts, wish.targets, wish.of_parameters(order), derivative.k, derivative.seed, like)
    step = order[0]
    if isinstance(step, Dot):
        return _parameters.along(parts, wish.along[step], like)
    flat = _parameters.flattened(parts, wish.targets, wish.of_parameters(order), like)
    return flat[:, 0] if wish.of_parameters(order) == (step,) and not wish.targets[str(step)].dim() else flat  # a number stays one
