"""The options of a call: checked once, the same for every verb."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ._errors import PlanError
from ._names import listing, nearest

CHOICES = {
    "engine": ("auto", "vmap", "loop", "compiled"),
    "on_error": ("raise", "null"),
    "randomness": ("error", "different", "same"),
}


@dataclass(frozen=True)
class Options:
    """How to compute; `grad_column`'s docstring tells a user what each means.

    Attributes:
        engine: "auto", "vmap", "loop" or "compiled".
        batch_size: rows at once, 1 or more; None: chosen by what a row costs.
        dtype: a floating dtype that the computation is cast to; None: as the data or a shared module has it.
        device: as torch writes it, or "auto"; None: the CPU.
        on_error: "raise", or "null" for a missing result where a row fails.
        allow_unused: zeros where nothing that was asked for reaches the output.
        randomness: "error", "different" or "same", as of `torch.vmap`.
        seed: of random draws; None only where none are allowed, or until the call has chosen one.
        detect_anomaly: find what made a gradient not finite.
    """

    engine: str = "auto"
    batch_size: int | None = None
    dtype: np.dtype[Any] | None = None
    device: str | None = None
    on_error: str = "raise"
    allow_unused: bool = False
    randomness: str = "error"
    seed: int | None = None
    detect_anomaly: bool = False


def make(given: dict[str, Any]) -> Options:
    """The options of a call, or a PlanError that names the one that is wrong."""
    _check_names(given)
    for name, choices in CHOICES.items():
        if name in given and given[name] not in choices:
            raise PlanError(f"{name}={given[name]!r} is not possible. Possible: {listing(choices)}.")
    given = dict(given)
    given["dtype"] = _dtype(given.get("dtype"))
    for name in ("batch_size", "seed"):
        if given.get(name) is not None:
            given[name] = _whole(name, given[name])
    if given.get("batch_size") is not None and given["batch_size"] < 1:
        raise PlanError(f"batch_size={given['batch_size']} is not possible: at least 1 row, or None to let daskgrad choose")
    for name in ("allow_unused", "detect_anomaly"):
        if not isinstance(given.get(name, False), bool | np.bool_):
            raise PlanError(f"{name}={given[name]!r} is not possible: True or False")
    if given.get("device") is not None:
        given["device"] = _device(given["device"])
    return Options(**given)


def _check_names(given: dict[str, Any]) -> None:
    known = [field.name for field in fields(Options)]
    for name in given:
        if name not in known:
            raise PlanError(f"there is no option {name!r}. The options: {listing(known)}.{nearest(name, known)}")


def _device(value: Any) -> str:
    """A device as text; whether the machine that computes has one shows there."""
    name = str(value)
    if name not in ("cpu", "auto", "cuda") and not re.fullmatch(r"(cpu|cuda):\d+", name):
        raise PlanError(f"device={value!r} is not possible. Possible: 'cpu', 'cuda', 'cuda:0', 'auto', or None.")
    return name


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise PlanError(f"{name}={value!r} is not possible: a whole number, or None")
    return int(value)


def _dtype(value: Any) -> np.dtype[Any] | None:
    """A floating dtype given as torch, NumPy or Python spell it."""
    if value is None:
        return None
    name = str(value).removeprefix("torch.") if str(value).startswith("torch.") else value
    try:
        dtype = np.dtype(name)
    except TypeError:
        dtype = None
    if dtype is None or dtype not in (np.dtype("float16"), np.dtype("float32"), np.dtype("float64")):
        raise PlanError(f"dtype={value!r} is not possible: a floating dtype (float16, float32, float64), or None")
    return dtype
