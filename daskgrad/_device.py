"""Where a part is computed: the CPU, or a GPU; where there are several GPUs, each thread of a process keeps one. The generators there."""

from __future__ import annotations

import itertools
import threading

import torch
from torch import Tensor

from ._errors import PlanError

_turns = itertools.count()
_mine = threading.local()


def device_of(asked: str | None) -> torch.device:
    """The device for this thread.

    Args:
        asked: the option as `Options` has checked it: "cpu", "cuda", "cuda:1", "auto", or None for the CPU.

    Raises:
        PlanError: a GPU is asked for that is not here. Never is it the CPU instead.
    """
    asked = asked or "cpu"
    there = torch.cuda.device_count() if asked != "cpu" and torch.cuda.is_available() else 0
    if asked == "cpu" or (asked == "auto" and not there):
        return torch.device("cpu")
    if not there:
        raise PlanError(
            f'device={asked!r} is asked for, but torch finds no CUDA device here. Use device="auto" or "cpu", or on a cluster send the '
            'parts to workers that have one: start these with --resources "GPU=1", and compute under dask.annotate(resources={"GPU": 1}).'
        )
    if asked in ("auto", "cuda"):
        return torch.device("cuda", _turn() % there)
    index = torch.device(asked).index
    if index >= there:
        raise PlanError(f"device={asked!r} is asked for, and torch finds {there} here: 'cuda:0' to 'cuda:{there - 1}' are possible.")
    return torch.device("cuda", index)


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


def _turn() -> int:
    """This thread's number among those that have asked for a GPU."""
    if not hasattr(_mine, "turn"):
        _mine.turn = next(_turns)
    turn: int = _mine.turn
    return turn
