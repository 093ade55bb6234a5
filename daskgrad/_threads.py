"""torch's number of threads: one where parts run beside each other, and all that the caller has where only one of them can run."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Iterator

from ._torch import torch_if_imported


class _State:
    """How many tasks have torch at one thread now, and the caller's number of threads.

    torch's number is one for each thread, but the last one set is also what threads started later begin with. So the
    first task in notes it and each one that leaves puts it back. A thread that first asks for its number reads the common
    one and sets it again, in two steps: so our threads ask inside the lock.
    """

    lock = threading.Lock()
    inside = 0
    outside = 1


@contextlib.contextmanager
def one() -> Iterator[None]:
    """torch's operations on one thread where tasks run beside each other; in the caller's main thread as he has it."""
    if threading.current_thread() is threading.main_thread() and multiprocessing.parent_process() is None:
        yield
        return
    import torch

    with _State.lock:
        torch.get_num_threads()  # a thread takes over the common number when it first asks: let that not be later
        if _State.inside == 0:
            _State.outside = _of_a_new_thread(torch.get_num_threads)
        _State.inside += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _State.lock:
            _State.inside -= 1
            torch.set_num_threads(_State.outside)


def _of_a_new_thread(ask: Callable[[], int]) -> int:
    """The answer in a thread that has set nothing: one of a pool still has what an earlier task left it."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(ask()))
    thread.start()
    thread.join()
    return found[0]


def settle() -> None:
    """Fix torch's number of threads for the calling thread, before tasks change what it would begin with."""
    torch = torch_if_imported()
    if torch is not None:
        with _State.lock:
            torch.get_num_threads()


@contextlib.contextmanager
def for_kernels() -> Iterator[None]:
    """The caller's number of threads, inside `one`: compiled kernels hold the GIL, so that only one of them runs at a time."""
    if not _State.inside:
        yield
        return
    import torch

    before = torch.get_num_threads()
    _set(_State.outside)
    try:
        yield
    finally:
        _set(before)


def _set(number: int) -> None:
    import torch

    if number != torch.get_num_threads():
        with _State.lock:
            torch.set_num_threads(number)
