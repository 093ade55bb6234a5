"""Names and lists as messages show them."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any


def function_name(fn: Callable[..., Any]) -> str:
    """The name a user knows the function by."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", None) or type(fn).__name__
    return "lambda" if name == "<lambda>" else str(name)


def among(name: Hashable, names: Iterable[Hashable]) -> bool:
    """`name in names`, also where one of them is pd.NA, whose comparison is neither true nor false."""
    return name in dict.fromkeys(names)


def nearest(name: Hashable, possible: Iterable[Hashable]) -> str:
    """` Did you mean 'spot'?`, or nothing where none is near."""
    found = difflib.get_close_matches(str(name), [str(p) for p in possible], n=1)
    return f" Did you mean {found[0]!r}?" if found else ""


def said(error: BaseException) -> str:
    """The message of an exception, also of one whose own `__str__` fails."""
    try:
        return str(error)
    except Exception as worse:
        return f"(its message cannot be shown: {type(worse).__name__})"


def shown(value: Any) -> str:
    """`repr(value)`, also of a value whose own `__repr__` fails."""
    try:
        return repr(value)
    except Exception as worse:
        return f"<{type(value).__name__} whose repr fails: {type(worse).__name__}>"


def listing(names: Iterable[Hashable], most: int = 20) -> str:
    """`'a', 'b', 'c'`, cut where there are too many to read."""
    found = [shown(name) for name in names]
    rest = len(found) - most
    return ", ".join(found[:most]) + (f", … ({rest} more)" if rest > 0 else "") if found else "none"
