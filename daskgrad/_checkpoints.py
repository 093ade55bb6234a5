"""Several states of one shared module: a result for each, in one pass over the data."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ._errors import PlanError

State = Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoints:
    """A module, and the states in which it is used one after the other. Made by `checkpoints`."""

    module: Any
    states: tuple[State, ...]


def checkpoints(module: Any, states: Iterable[State]) -> Checkpoints:
    """A shared module in several states: `shared={"model": dg.checkpoints(net, [state_1, state_2])}`.

    Args:
        module: the module; it is not changed.
        states: state dicts of it, as `module.state_dict()` gives them.

    Returns:
        What takes the module's place in `shared`. Every result column then comes once for each state, as `name[0]`, `name[1]`, …

    Raises:
        PlanError: a state does not fit the module.

    Example:
        >>> import pandas as pd, torch, daskgrad as dg
        >>> net = torch.nn.Linear(1, 1, bias=False)
        >>> early, late = ({"weight": torch.tensor([[w]])} for w in (1.0, 2.0))
        >>> df = pd.DataFrame({"x": [[3.0]]})
        >>> dg.grad_column(df, lambda model, x: model(x), wrt="x", shared={"model": dg.checkpoints(net, [early, late])})
            x[0]   x[1]
        0  [1.0]  [2.0]
    """
    kept = tuple(dict(state) for state in states)
    if not kept:
        raise PlanError("checkpoints needs at least one state dict")
    ours = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    for k, state in enumerate(kept):
        theirs = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if theirs != ours:
            wrong = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
            raise PlanError(f"state {k} does not fit the module: {', '.join(wrong[:5])} is missing, too much, or of another shape")
    return Checkpoints(module, kept)


def in_state(module: Any, state: State) -> Any:
    """A copy of `module` in `state`."""
    loaded = copy.deepcopy(module)
    loaded.load_state_dict(state)
    return loaded
