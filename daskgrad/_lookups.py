"""Questions that a tensor answers by identity, found in the code of a row function before it runs.

A dict and a set look for a key by its hash, and torch's is the tensor's identity; `n is True` is identity, too. Neither can be watched
while `fn` runs, and both are silent: the default, the other branch.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

from ._errors import PlanError
from ._lines import told

_LOADS = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_DEREF")
_STORES = ("STORE_FAST", "STORE_DEREF", "DELETE_FAST")
_NOTHING = ("CACHE", "PRECALL", "RESUME", "NOP", "EXTENDED_ARG")


def refuse(fn: Callable[..., Any], tensors: Collection[Hashable], shared: Mapping[str, Any], row: str | None) -> None:
    """Refuse a number of the row's that is looked for by identity.

    Args:
        fn: the row function.
        tensors: its arguments that are tensors, one number each; of a whole row, the columns.
        shared: its shared arguments.
        row: the argument that is the whole row.

    Raises:
        PlanError: so it is.
    """
    function = getattr(fn, "__func__", fn)
    if not isinstance(function, types.FunctionType) or not _asks(function.__code__):
        return
    for line, name, question in _found(function, tensors, shared, row):
        raise PlanError(
            f"{told(function.__code__, line, function.__globals__)}: {name!r} is a tensor, and {question} by identity, never by value: "
            f"write int({name}), or bool({name}), or compare with =="
        )


@functools.lru_cache(maxsize=1024)
def _asks(code: types.CodeType) -> bool:
    """Whether there is anything to look for, as in most functions there is not."""
    return "get" in code.co_names or any(step.opname in ("CONTAINS_OP", "IS_OP") for step in dis.get_instructions(code))


def _found(
    function: types.FunctionType, tensors: Collection[Hashable], shared: Mapping[str, Any], row: str | None
) -> Iterator[tuple[int, str, str]]:
    steps = [step for step in dis.get_instructions(function) if step.opname not in _NOTHING]
    again = {step.argval for step in steps if step.opname in _STORES}  # n = int(n): from somewhere on it is no tensor
    line = function.__code__.co_firstlineno
    for place, step in enumerate(steps):
        line = (step.positions.lineno if step.positions is not None else None) or line
        name, behind = _tensor(steps[place:], tensors, row)
        if name is None or step.argval in again:
            continue
        if place > 1 and steps[place - 1].opname in ("LOAD_METHOD", "LOAD_ATTR") and steps[place - 1].argval == "get":
            if _is_called(steps[place + behind :]) and isinstance(_value(function, steps[place - 2], shared), Mapping):
                yield line, name, "a dict finds it"
        elif place + behind + 1 < len(steps):
            other, question = _value(function, steps[place + behind], shared), steps[place + behind + 1].opname
            if question == "CONTAINS_OP" and isinstance(other, set | frozenset | Mapping):
                yield line, name, "a set or a dict finds it"
            elif question == "IS_OP" and isinstance(other, bool):
                yield line, name, "`is` tells it"


def _is_called(steps: Sequence[dis.Instruction]) -> bool:
    """Whether what was loaded is an argument as it stands, the only one or with one more that is loaded: `get(n)`, `get(n, 0.0)`."""
    names = [step.opname for step in steps[:2]]
    return names[:1] == ["CALL"] or (len(names) > 1 and names[0].startswith("LOAD_") and names[1] == "CALL")


def _tensor(steps: Sequence[dis.Instruction], tensors: Collection[Hashable], row: str | None) -> tuple[str | None, int]:
    """The tensor that is loaded here, as it is written, and by how many steps; None where none is."""
    if steps[0].opname not in _LOADS:
        return None, 0
    name = steps[0].argval
    if name != row:
        return (name, 1) if name in tensors else (None, 0)
    if len(steps) > 1 and steps[1].opname == "LOAD_ATTR" and steps[1].argval in tensors:
        return f"{row}.{steps[1].argval}", 2
    by_label = len(steps) > 2 and steps[1].opname == "LOAD_CONST" and steps[2].opname.startswith("BINARY_")
    return (f"{row}[{steps[1].argval!r}]", 3) if by_label and steps[1].argval in tensors else (None, 0)


def _value(function: types.FunctionType, step: dis.Instruction, shared: Mapping[str, Any]) -> Any:
    """What is loaded or made, where that is known before anything runs."""
    if step.opname == "LOAD_CONST":
        return step.argval
    if step.opname in ("BUILD_MAP", "BUILD_CONST_KEY_MAP"):
        return {}
    if step.opname in _LOADS and step.argval in shared:
        return shared[step.argval]
    if step.opname == "LOAD_GLOBAL":
        return function.__globals__.get(step.argval)
    if step.opname == "LOAD_DEREF" and function.__closure__ is not None and step.argval in function.__code__.co_freevars:
        cell = function.__closure__[function.__code__.co_freevars.index(step.argval)]
        return getattr(cell, "cell_contents", None)
    return None
