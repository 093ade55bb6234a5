"""What a row function returned: judged, and turned into the derivatives that are wanted. The same rules for a batch and for one row."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import _reduce
from ._autograd import derive, reaches
from ._derivative import Aux, Derivative, Dot, Norm, Order, Project, orders_of
from ._errors import GraphError


@dataclass(frozen=True)
class Wish:
    """What is wanted of each row.

    Attributes:
        named: the arguments that are differentiated, in order.
        derivatives: what to compute.
        vectors: `fn` may return a vector; its derivatives are Jacobians.
        allow_unused: zeros, not an error, where no named argument reaches the output.
    """

    named: Sequence[Hashable]
    derivatives: Sequence[Derivative]
    vectors: bool
    allow_unused: bool

    @property
    def orders(self) -> list[Order]:
        """The derivatives that the wanted ones are made of."""
        return list(dict.fromkeys(order for derivative in self.derivatives for order in orders_of(derivative)))

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
        shown = "None (is there a return?)" if result is None else f"a {type(result).__name__}"
        raise TypeError(f"the row function returned {shown}: return one number, a tensor of shape ()")
    if result.is_complex():
        raise TypeError("the row function returned a complex number: a gradient needs a real one, such as abs() or .real")
    if result.shape == (1,) or (result.numel() == 1 and not wish.vectors):
        return result.reshape(())
    if result.dim() and not wish.vectors:
        raise TypeError(
            f"the row function returned a tensor of shape {tuple(result.shape)}, and a gradient needs one number: reduce it, as by "
            "sum(). Its Jacobian is what dg.derivatives(data, fn, {'jacobian': 'x'}) gives."
        )
    return result


def _extra(value: Any, device: torch.device) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, device=device)


def derived(
    value: Tensor,
    extras: Sequence[Tensor],
    leaves: Mapping[Hashable, Tensor],
    directions: Mapping[Dot, Tensor],
    wish: Wish,
    lead: int,
) -> dict[Derivative, Tensor]:
    """What is wanted, from the value (*rows, *out).

    Raises:
        GraphError: no argument named in the call reaches the value.
    """
    differentiable = value.requires_grad and value.is_floating_point()
    source = value if differentiable else value.detach().to(torch.get_default_dtype())
    orders, reached = derive(source, leaves, wish.orders, lead, directions)
    must = bool(wish.named) and not reached and not wish.allow_unused
    if must and not (differentiable and reaches(value, list(leaves.values()))):
        raise GraphError(
            f"no argument that was asked for ({', '.join(map(str, wish.named))}) reaches what the row function returned: it is a "
            "constant there. allow_unused=True gives zeros."
        )
    found: dict[Derivative, Tensor] = dict(zip(wish.extras, extras, strict=True))
    for derivative in wish.derivatives:
        if isinstance(derivative, Norm):
            found[derivative] = _reduce.norm([orders[order] for order in derivative.of], lead)
        elif isinstance(derivative, Project):
            found[derivative] = _reduce.project([orders[order] for order in derivative.of], lead, derivative.k, derivative.seed)
        elif isinstance(derivative, tuple):
            found[derivative] = orders[derivative]
    return found
