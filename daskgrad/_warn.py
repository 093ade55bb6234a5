"""What runs slower than it could is said once per call, not once per part."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ._errors import EngineWarning

_call: ContextVar[bytes | None] = ContextVar("daskgrad_call", default=None)
_said: dict[bytes, None] = {}
_KEPT = 4096
_HERE = os.path.dirname(__file__) + os.sep


@contextmanager
def one_call(identity: bytes) -> Iterator[None]:
    """Parts that run inside belong to one call of the user's: in this process it warns once."""
    token = _call.set(identity)
    try:
        yield
    finally:
        _call.reset(token)


def current_call() -> bytes | None:
    """The identity of the call that this part belongs to; None in pandas, where a call is one part."""
    return _call.get()


def slower(function: str, reason: str) -> None:
    """Warn that `function` runs slower than it could, at the user's line; on a worker, where the call was made."""
    _once(b"", f"{function}: {reason}", EngineWarning)


def nothing(function: str, what: str) -> None:
    """Warn that a part has no result at all."""
    _once(b"nothing", f"{function}: {what}", RuntimeWarning)


def _once(kind: bytes, message: str, category: type[Warning]) -> None:
    call = _call.get()
    if call is not None:
        if call + kind in _said:
            return
        _said[call + kind] = None
        if len(_said) > _KEPT:
            _said.pop(next(iter(_said)))
    distributed = sys.modules.get("distributed")
    if distributed is not None and _on_worker(distributed):
        distributed.worker.warn(message, category=category)
    else:
        warnings.warn(message, category, stacklevel=_users_level())


def _on_worker(distributed: Any) -> bool:
    try:
        distributed.get_worker()
    except ValueError:
        return False
    return True


def _users_level() -> int:
    """How far up the first frame is that is not daskgrad's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame, level = frame.f_back, level + 1
    return level
