"""Where a part is computed: the CPU, or a GPU; where there are several GPUs, each thread of a process keeps one."""

from __future__ import annotations

import itertools
import threading

import torch

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


def _turn() -> int:
    """This thread's number among those that have asked for a GPU."""
    if not hasattr(_mine, "turn"):
        _mine.turn = next(_turns)
    turn: int = _mine.turn
    return turn
