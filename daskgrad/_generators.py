"""The random generators of a process that a row function may draw from: torch's, there and on a GPU, Python's and NumPy's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def begin(seed: int) -> None:
    """All of them from `seed`."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Afterwards all of them stand where they stood."""
    of_torch, of_python, of_numpy = random_state(device), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        set_random_state(of_torch, device)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def random_state(device: torch.device) -> Tensor:
    """Where torch's generators stand, as bytes: the CPU's, followed by the one of a GPU, from which `fn` draws there."""
    state = torch.get_rng_state()
    return state if device.type == "cpu" else torch.cat([state, torch.cuda.get_rng_state(device)])


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Puts them back to a `random_state` of the same device."""
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size].clone())  # torch reads a state as if it were not part of a longer tensor: a crash
    if device.type != "cpu":
        torch.cuda.set_rng_state(state[size:].clone(), device)
