"""NumPy's memory and torch's: the same, without a copy where that is allowed, and by torch's threads where there is much to copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ._torch import torch_if_imported

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[Any]
LARGE = 2**16
"""Numbers from which a copy is left to torch, which has several threads: fewer are copied before these have met."""


class _Memory:
    """An array for torch, which has no arrays that are for reading only."""

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}
        self._array = array


def as_tensor(array: Array) -> Tensor:
    """`array` as a tensor, for reading only; without a copy where memory allows."""
    import torch

    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Memory(array)))


def copied(array: Array) -> Array:
    """A copy of `array`, C-contiguous."""
    if not _by_torch(array):
        return np.array(array, order="C", copy=True)
    made: Array = np.empty(array.shape, array.dtype)
    as_tensor(made).copy_(as_tensor(array))
    return made


def copy_into(target: Array, source: Array) -> None:
    """`target[...] = source`, of equal shapes and dtypes."""
    if _by_torch(source) and target.flags.c_contiguous:
        as_tensor(target).copy_(as_tensor(source))
    else:
        target[...] = source


def _by_torch(array: Array) -> bool:
    if array.size < LARGE or array.dtype.kind not in "fi" or not array.dtype.isnative or not array.flags.c_contiguous:
        return False
    torch = torch_if_imported()
    return torch is not None and torch.get_num_threads() > 1
