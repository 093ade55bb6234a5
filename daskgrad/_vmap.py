"""torch.vmap for tensors that all begin with the rows, without looking for tensors in trees of arguments and results.

It is what `torch.vmap` does once it has found them. Where torch's private functions for it have changed, `torch.vmap` itself is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_functorch: Any = torch._C._functorch
try:
    from torch._functorch.vmap import lazy_load_decompositions, vmap_increment_nesting  # type: ignore[attr-defined]

    _add, _remove = _functorch._add_batch_dim, _functorch._remove_batch_dim
except (ImportError, AttributeError):  # pragma: no cover  # another torch
    DIRECT = False
else:
    DIRECT = True


def over_rows(
    call: Callable[[int, list[Tensor]], Sequence[Tensor]], count: Any, tensors: Sequence[Tensor], randomness: str
) -> list[Tensor]:
    """What `call` makes of each of the rows.

    Args:
        call: given the vmap level and one row of each tensor, returns tensors.
        count: how many rows.
        tensors: (rows, *shape).
        randomness: of `torch.vmap`.

    Returns:
        Its results, each (rows, *shape).
    """
    if not DIRECT:
        anchor = torch.empty((count, 0), device=tensors[0].device if tensors else None)
        mapped = torch.vmap(lambda first, *rest: tuple(call(_functorch.maybe_get_level(first), list(rest))), randomness=randomness)
        return list(mapped(anchor, *tensors))
    lazy_load_decompositions()
    with vmap_increment_nesting(count, randomness) as level:
        results = call(level, [_add(tensor, 0, level) for tensor in tensors])
        return [_remove(result, level, count, 0) for result in results]
