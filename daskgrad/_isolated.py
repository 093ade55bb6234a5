"""A part in a process of its own: it can be ended when its time is up, and when it dies, nothing else does.

run_isolated     the part in a child process, which this thread keeps for the next part
  _blame           what kills or never ends: the row function's rows, halved until one is left

The child is `python -m daskgrad._isolated FD`: it runs parts, or it holds the input of a row function and forks a process for each
range of rows that is tried.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from . import _ship, _task
from ._cells import shown_label
from ._errors import RowError, StoreError
from ._task import Order, Outcome, Subgraph
from ._watch import _reporter
from ._watch._relay import Relay, tell_parent

_START = 120.0  # seconds for a child to import daskgrad and torch
_IDLE = 20.0  # seconds without work after which a child ends
_MOST = 5  # rows that are named


class Ended(Exception):
    """A child did not answer: `how` says whether it died or ran out of time, `call` in which row function it was."""

    def __init__(self, how: str, call: int | None, late: bool) -> None:
        super().__init__(how)
        self.how, self.call, self.late = how, call, late


class Child:
    """A process that answers requests."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "daskgrad._isolated", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self._to = Connection(ours.detach())
        self._ready = False

    def ask(self, request: Any, seconds: float | None, relay: Relay | None = None) -> Any:
        """The answer to `request`; what the child tells of its parts goes to `relay`.

        Raises:
            Ended: the child has died, or no answer came in time; then it is ended.
        """
        if not self._ready:
            self._answer(_START, None)
            self._ready = True
        self._to.send_bytes(pickle.dumps(request, protocol=5))
        try:
            return self._answer(seconds, relay)
        finally:
            if relay is not None:
                relay.lost()

    def _answer(self, seconds: float | None, relay: Relay | None) -> Any:
        call: int | None = None  # the row function that has begun, None between them
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                if not self._to.poll(left):
                    self.end()
                    raise Ended(f"did not end within {seconds:g} s", call, late=True)
                kind, value = pickle.loads(self._to.recv_bytes())
            except (EOFError, ConnectionResetError):
                self.end()
                raise Ended(_death(self._process.returncode), call, late=False) from None
            if kind == "answer":
                return value
            if kind == "call":
                call = value
            elif relay is not None:
                relay.heard(value)

    def end(self) -> None:
        self._to.close()
        try:
            self._process.wait(0.5)  # it may be just dying: its own signal is what is wanted
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __del__(self) -> None:
        """The thread that kept it has ended."""
        with contextlib.suppress(Exception):  # not even begun, or the interpreter is ending
            self._to.close()
            self._process.kill()
            self._process.wait()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None


def _death(code: int) -> str:
    if code < 0:
        name = _task.signal_name(-code)
        return f"kills its process ({name}{'; the system may be out of memory' if name == 'SIGKILL' else ''})"
    return f"ends its process (exit code {code})"


_kept = threading.local()


def run_isolated(parcel: Subgraph | bytes, order: Order, given: Sequence[Any]) -> Outcome:
    """The part, made in a child process.

    Raises:
        RowError: a row kills the process, or does not end in time.
        StoreError: so does the part, outside of any row function.
    """
    import cloudpickle

    work = cloudpickle.dumps((_movable(parcel), order, [_ship.redeemed(value) for value in given]))
    try:
        relay = Relay()
        outcome: Outcome = _child().ask(("make", sys.path, work, relay.asked), order.timeout, relay)
    except Ended as ended:
        _kept.child = None
        problem = ended
    else:
        return outcome
    raise _blame(problem, order, work)


def _child() -> Child:
    child: Child | None = getattr(_kept, "child", None)
    if child is None or not child.alive:
        child = _kept.child = Child()
    return child


def _movable(parcel: Subgraph | bytes) -> Subgraph:
    """The part's nodes, with plans in the place of tickets, which only this process can redeem."""
    from dask._task_spec import DataNode

    piece = _task.opened(parcel)
    nodes = {key: DataNode(key, _ship.redeemed(node.value)) if isinstance(node, DataNode) else node for key, node in piece.nodes.items()}
    return Subgraph(nodes, piece.outside, piece.key)


# -------------------------------------------------------------------------------- whose fault it is


def _blame(ended: Ended, order: Order, work: bytes) -> RowError | StoreError:
    if ended.call is None:
        return StoreError(
            f"partition {order.number} {ended.how} while it is read or written, not in a row function. Run its input alone to find out "
            f"why: ddf.optimize(fuse=False).partitions[{order.number}].compute()",
            partition=order.number,
        )
    with_input = Child()
    try:
        # What is read again came in time before, though in a process that was warm.
        rows = with_input.ask(("hold", sys.path, work, ended.call), None if order.timeout is None else order.timeout + _START)
        limit = order.timeout if ended.late else None
        found = _rows(with_input, 0, rows, ended.late, limit, [])
        labels = with_input.ask(("labels", found[: _MOST + 1]), None)
    except Ended as worse:
        return StoreError(
            f"partition {order.number} {ended.how}; which row does it could not be found ({worse.how})", partition=order.number
        )
    finally:
        with_input.end()
    return _named(ended, order, rows, found, labels)


def _rows(child: Child, start: int, stop: int, late: bool, limit: float | None, found: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The shortest ranges of rows, at most a few, that by themselves kill a process or do not end."""
    seconds = None if limit is None else max(2.0, limit * 0.75)
    if stop <= start or len(found) > _MOST or child.ask(("try", start, stop, seconds), None):
        return found
    if stop - start == 1:
        return [*found, (start, stop)]
    middle = (start + stop) // 2
    halves = _rows(child, start, middle, late, seconds, found)
    if not (late and len(halves) > len(found)):  # each further one that never ends costs its whole limit
        halves = _rows(child, middle, stop, late, seconds, halves)
    return halves if len(halves) > len(found) else [*found, (start, stop)]


def _named(ended: Ended, order: Order, rows: int, found: list[tuple[int, int]], labels: list[Any]) -> RowError | StoreError:
    if not found or (found == [(0, rows)] and rows > 1):
        return StoreError(
            f"partition {order.number} {ended.how} as a whole ({rows} rows), though none of its rows does so alone: use smaller partitions"
            + (", or a longer timeout" if ended.late else ""),
            partition=order.number,
        )
    first, values = labels[0]
    told = [
        f"row {shown_label(label)}" if stop - start == 1 else f"rows {start} to {stop - 1} together"
        for (start, stop), (label, _) in zip(found, labels, strict=False)
    ]
    more = " (and maybe others)" if len(found) > _MOST or ended.late else ""
    return RowError(
        f"{', '.join(told[:_MOST])}{more} of partition {order.number} {ended.how}. Values of the first: {values}. All other parts are "
        "written; leave such rows out, or change the function, and run it again.",
        label=first,
        partition=order.number,
        values=values,
    )


# -------------------------------------------------------------------------------- in the child


class _Held:
    """The input of one row function."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.part, self.parcel, self.choice, self.info = args
        _ship.unpack(self.parcel)  # once, for all that are forked

    def ends(self, start: int, stop: int, seconds: float | None) -> bool:
        """Whether these rows come to an end, by an error or not, in a process of their own."""
        child = os.fork()
        if child == 0:
            _run_and_exit(self, start, stop)
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            done, status = os.waitpid(child, 0 if until is None else os.WNOHANG)
            if done:
                return os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
            if until is not None and time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return False
            time.sleep(0.01)

    def label(self, place: int) -> tuple[Any, dict[str, Any]]:
        row = self.part.iloc[place]
        values = row.to_dict() if self.part.ndim == 2 else {str(self.part.name): row}
        return self.part.index[place], values


def _run_and_exit(held: _Held, start: int, stop: int) -> None:
    from . import _dask

    try:
        _dask.run_part(held.part.iloc[start:stop], held.parcel, held.choice, held.info)
    except Exception:  # noqa: S110  an error is an end: what is looked for is what comes to none
        pass
    finally:
        os._exit(0)


class _Stopped(BaseException):
    """The input that was waited for is there."""


def _traced(connection: Connection, stop_at: int | None) -> Any:
    """`run_part` that tells when it begins and ends; the call number `stop_at` is not made but its arguments kept."""
    from . import _dask

    plain, count = _dask.run_part, [0]

    def run_part(*args: Any) -> Any:
        call = count[0]
        count[0] += 1
        if call == stop_at:
            raise _Stopped(_Held(args))
        connection.send_bytes(pickle.dumps(("call", call)))
        try:
            return plain(*args)
        finally:
            connection.send_bytes(pickle.dumps(("call", None)))

    return run_part, plain


def _serve(connection: Connection) -> None:
    _task.environment(torch=True)  # what takes long to import
    held: _Held | None = None
    _reporter.child = True
    connection.send_bytes(pickle.dumps(("answer", "ready")))
    while connection.poll(None if held is not None else _IDLE):
        try:
            kind, *details = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if kind == "make":
            _watch_parent()
            path, work, asked = details
            tell_parent(lambda record: connection.send_bytes(pickle.dumps(("part", record))), asked)
            answer: Any = _make(connection, path, work, None)
        elif kind == "hold":
            tell_parent(lambda record: None, None)  # what is tried here is no progress
            found = _make(connection, *details)
            assert isinstance(found, _Held)
            held = found
            answer = len(held.part)
        else:
            assert held is not None
            answer = held.ends(*details) if kind == "try" else [held.label(start) for start, _ in details[0]]
        connection.send_bytes(pickle.dumps(("answer", answer), protocol=5))


def _make(connection: Connection, path: list[str], work: bytes, stop_at: int | None) -> Outcome | _Held:
    from . import _dask

    sys.path[:] = path
    _dask.run_part, plain = _traced(connection, stop_at)
    try:
        parcel, order, given = pickle.loads(work)
        return _task.make(parcel, order, given)
    except _Stopped as stopped:
        held: _Held = stopped.args[0]
        return held
    except Exception as error:
        return Outcome(order.number, "failed", error=_task.packed(error), fatal=_task.fatal(error))
    finally:
        _dask.run_part = plain


def _watch_parent() -> None:
    """End with the parent, also in the middle of a row function that does not."""
    if not any(thread.name == "parent" for thread in threading.enumerate()):
        threading.Thread(target=_until_orphaned, args=(os.getppid(),), name="parent", daemon=True).start()


def _until_orphaned(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
