"""The vocabulary of derivatives: what a user may ask for, written down. No torch, no data."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from ._errors import PlanError

Order = tuple[Hashable, ...]
"""`()` is the value itself, `("x",)` first order, `("x", "y")` by x, then by y."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with a row, in words; missing where all is well."""

    def __str__(self) -> str:
        return "problem"


problem = Problem()
"""Asks `derivatives` for a text column: the exception of a row that failed, *gradient not finite while the value is*,
or *value not finite*; missing where all is well. Asking for it implies `on_error="null"`."""

Derivative = Order | Problem


def parse(wish: object, name: Hashable) -> Derivative:
    """The derivative that `wish` spells: `"x"`, `("x", "y")`, `()` or a reduction."""
    if isinstance(wish, Problem):
        return wish
    if isinstance(wish, tuple):
        return wish
    if isinstance(wish, str):
        return (wish,)
    raise PlanError(
        f"{name!r} asks for {wish!r}, which is no derivative. Possible: () the value, 'x' first order, ('x', 'y') by x "
        "then by y, dg.problem."
    )


def arguments_of(derivative: Derivative) -> tuple[Hashable, ...]:
    """The arguments that `derivative` is taken with respect to, in order, with repetition."""
    return () if isinstance(derivative, Problem) else derivative
