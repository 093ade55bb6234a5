"""torch's surroundings while row functions run: neutral inside, as they were afterwards.

Grad mode, inference mode, autocast and the device context belong to a thread and are simply entered. The default dtype, anomaly mode
and the random generator belong to the process: whoever needs the same ones shares them, the others wait.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from . import _wanted
from ._generators import kept
from ._warn import current_call

_functorch: Any = torch._C._functorch


class _Gate:
    """Who runs inside now, with which default dtype. Re-entrant for a row function that calls daskgrad itself.

    Parts of one call that fail stop the other parts of that call in this process before the error goes up: Dask's threads scheduler
    raises while they still run, and the caller would find torch's default dtype as they have set it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: dict[int, int] = {}
        self._calls: dict[int, bytes | None] = {}
        self._failed: dict[bytes, Exception] = {}
        self._waiting = 0
        self._exclusive = False
        self._dtype = torch.float32
        self._outside: tuple[torch.dtype, bool, bool] | None = None
        self._slow_rules = 0

    def enter(self, dtype: torch.dtype, exclusive: bool) -> torch.dtype | None:
        """Returns the default dtype to go back to where the same thread was inside already."""
        me, call = threading.get_ident(), current_call()
        with self._changed:
            if me in self._threads:
                return self._enter_again(me, dtype)
            self._stop_where_failed(call)
            self._waiting += 1
            self._changed.wait_for(lambda: self._free(dtype, exclusive))
            self._waiting -= 1
            if not self._threads:
                self._open(dtype)
            self._threads[me], self._calls[me] = 1, call
            self._exclusive = exclusive
            return None

    def leave(self, before: torch.dtype | None) -> None:
        me = threading.get_ident()
        with self._changed:
            self._threads[me] -= 1
            if before is not None:
                torch.set_default_dtype(before)
                self._dtype = before
            if not self._threads[me]:
                del self._threads[me], self._calls[me]
                if not self._threads:
                    self._close()
                self._exclusive = False
                self._changed.notify_all()

    def drain(self, call: bytes, error: Exception) -> None:
        """`error` ends `call`: wait until its parts in other threads have stopped."""
        with self._changed:
            if call in self._failed:
                return
            self._failed[call] = error
            self._changed.wait_for(lambda: call not in self._calls.values(), timeout=60)
            del self._failed[call]
            self._changed.notify_all()

    def checkpoint(self) -> None:
        """Raise where another part of the same call has failed, or nobody waits for this one any more."""
        _wanted.check()
        error = self._failed.get(current_call() or b"")
        if error is not None:
            raise error

    def _stop_where_failed(self, call: bytes | None) -> None:
        error = self._failed.get(call or b"")
        if error is not None:
            self._changed.wait_for(lambda: call not in self._failed)
            raise error

    def allow_slow_rules(self, step: int) -> None:
        """One thread more, or less, lets vmap loop over rows inside an operation that has no batching rule."""
        with self._changed:
            self._slow_rules += step
            _functorch._set_vmap_fallback_enabled(self._slow_rules > 0)

    def _free(self, dtype: torch.dtype, exclusive: bool) -> bool:
        if not self._threads:
            return True
        alike = dtype == self._dtype and not exclusive and not self._exclusive
        return alike and self._waiting <= 1  # nobody who wants another dtype waits for ever

    def _enter_again(self, me: int, dtype: torch.dtype) -> torch.dtype:
        self._changed.wait_for(lambda: dtype == self._dtype or len(self._threads) == 1)
        self._threads[me] += 1
        before, self._dtype = self._dtype, dtype
        torch.set_default_dtype(dtype)
        return before

    def _open(self, dtype: torch.dtype) -> None:
        self._outside = (
            torch.get_default_dtype(),
            torch.is_anomaly_enabled(),
            _functorch._is_vmap_fallback_enabled(),
        )
        self._dtype = dtype
        torch.set_default_dtype(dtype)
        torch.autograd.set_detect_anomaly(False)
        _functorch._set_vmap_fallback_warning_enabled(False)
        _functorch._set_vmap_fallback_enabled(False)

    def _close(self) -> None:
        assert self._outside is not None
        dtype, anomaly, slow_rules = self._outside
        torch.set_default_dtype(dtype)
        torch.autograd.set_detect_anomaly(anomaly)
        _functorch._set_vmap_fallback_warning_enabled(True)  # torch's default; it cannot be asked
        _functorch._set_vmap_fallback_enabled(slow_rules)


_gate = _Gate()
checkpoint = _gate.checkpoint
drain = _gate.drain


@contextmanager
def neutral(dtype: torch.dtype, device: torch.device, exclusive: bool = False) -> Iterator[None]:
    """Inside: `dtype` is torch's default, gradients are recorded, nothing of the caller's surroundings is felt.

    `exclusive` keeps other row functions out, for those that use the process's random generators; their state is put back too.
    """
    before = _gate.enter(dtype, exclusive)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autocast(device.type, enabled=False))
            if torch._C._len_torch_function_stack() or device.type != "cpu":
                stack.enter_context(torch.device(device))
            if exclusive:
                stack.enter_context(kept(device))
            yield
    finally:
        _gate.leave(before)


@contextmanager
def slow_rules(allowed: bool) -> Iterator[None]:
    """Inside, where `allowed`, vmap may loop over the rows inside an operation that has no batching rule."""
    if allowed:
        _gate.allow_slow_rules(1)
    try:
        yield
    finally:
        if allowed:
            _gate.allow_slow_rules(-1)
