"""Whether work is still wanted: what runs in other threads looks, and stops where whoever waited for it has gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import thread
from contextlib import contextmanager
from contextvars import ContextVar

_over: ContextVar[threading.Event | None] = ContextVar("daskgrad_over", default=None)


class Unwanted(Exception):
    """Nobody waits for this work. Seen by nobody."""


@contextmanager
def waited_for() -> Iterator[None]:
    """Work that is given away inside, with a copy of the context, is wanted until the block is left."""
    over = threading.Event()
    token = _over.set(over)
    try:
        yield
    finally:
        over.set()
        _over.reset(token)


def check() -> None:
    """Raise where nobody waits for the work of this thread: its run has ended, or the interpreter does, which joins the threads of pools.

    Raises:
        Unwanted: so it is.
    """
    over = _over.get()
    ending = getattr(thread, "_shutdown", False) and threading.current_thread() is not threading.main_thread()
    if ending or (over is not None and over.is_set()):
        raise Unwanted
