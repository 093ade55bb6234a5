"""What `local_client` starts: a Dask cluster of processes on this machine that is private, tuned for torch, and gone when you are.

Dask's own `LocalCluster` starts the same processes. What differs, and why, stands beside each setting.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import dask
from dask.system import CPU_COUNT
from dask.utils import format_bytes, parse_bytes
from distributed import Client, LocalCluster, Nanny, Security, Status, Worker
from distributed.client import AllExit
from distributed.deploy.cluster import Cluster
from distributed.system import MEMORY_LIMIT
from distributed.utils import silence_logging_cmgr
from distributed.worker_memory import parse_memory_limit

from . import _malloc
from ._errors import PlanError
from ._main_script import must_be_guarded
from ._names import nearest
from ._watch._reporter import arrived, leaving

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

# An idle worker that has imported torch and taken one gradient holds about 475 MB. Below this limit the first batch
# gets it paused or killed, again and again.
LEAST_MEMORY = parse_bytes("700 MB")
# What a worker gets at least where the number of workers is ours to choose.
ROOMY_MEMORY = parse_bytes("1 GB")

MALLOC_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": str(_malloc.MMAP), "MALLOC_TRIM_THRESHOLD_": str(_malloc.TRIM)}

# LocalCluster's arguments that would make the cluster less than private, or another kind of cluster.
FIXED = {
    "asynchronous", "dashboard_address", "host", "interface", "ip", "processes", "protocol", "security",
    "worker_class", "worker_dashboard_address",
}  # fmt: skip


def start(
    n_workers: int | None,
    threads_per_worker: int,
    memory_limit: str | float | None,
    *,
    tls: bool,
    dashboard_port: int | None,
    websocket_origins: Sequence[str],
    **kwargs: Any,
) -> LocalClient:
    """See `daskgrad.local_client`."""
    if refused := sorted(FIXED & kwargs.keys()):
        raise PlanError(
            f"local_client() got {', '.join(refused)}, which it sets itself: worker processes on {LOOPBACK} only. "
            f"For another cluster, make a dask.distributed.LocalCluster and a Client of it; daskgrad runs on that too."
        )
    for name in kwargs:
        if name not in (known := _known()):
            raise PlanError(f"local_client() has no argument {name!r}.{nearest(name, known)} LocalCluster's are taken, too.")
    if n_workers is not None and n_workers < 0:
        raise PlanError(f"n_workers={n_workers} is not possible: a number of processes, or None, which chooses by the machine")
    if dask.config.get("distributed.worker.multiprocessing-method", "spawn") != "fork":
        must_be_guarded("local_client()")
    if n_workers is None:
        n_workers = _workers_that_fit(threads_per_worker, memory_limit)
    memory = _memory_per_worker(memory_limit, n_workers)
    scheduler_kwargs = {"dashboard": dashboard_port is not None, **kwargs.pop("scheduler_kwargs", {})}
    with dask.config.set(_scheduler_settings(websocket_origins)):
        cluster = _PrivateCluster(  # type: ignore[no-untyped-call]
            n_workers=n_workers,
            threads_per_worker=threads_per_worker,
            memory_limit=memory,
            host=LOOPBACK,
            dashboard_address=f"{LOOPBACK}:{_free_port(dashboard_port)}",
            worker_dashboard_address=None,
            worker_class=_TunedNanny,
            security=_temporary_security() if tls else None,
            scheduler_kwargs=scheduler_kwargs,
            **kwargs,
        )
    try:
        return LocalClient(cluster)
    except BaseException:
        cluster.close()
        raise


def _known() -> set[str]:
    """What may be given: to `local_client`, and on to the cluster, its nannies and workers."""
    from . import _cluster

    takers = (_cluster.local_client, LocalCluster, Nanny, Worker)
    return {name for taker in takers for name in inspect.signature(taker).parameters} - {"self", "args", "kwargs", "worker_kwargs"}


class LocalClient(Client):
    """A `dask.distributed.Client` that closes its cluster with itself. Made by `local_client`."""

    _open: ClassVar[set[LocalClient]] = set()

    def __init__(self, cluster: LocalCluster) -> None:
        super().__init__(cluster)  # type: ignore[no-untyped-call]
        self._open.add(self)
        assert self.loop is not None  # the running client's
        self.loop.add_callback(lambda: asyncio.get_running_loop().set_exception_handler(_ignore_abandoned_waits))
        arrived(self)

    def close(self, *args: Any, **kwargs: Any) -> None:
        """Close the client, then end its scheduler and workers. Once is enough; more does no harm."""
        self._open.discard(self)
        # A task that still runs delays its worker, which Dask would report; closing is what was asked for.
        if self.status == "running":
            leaving(self)
        with silence_logging_cmgr(logging.ERROR):
            try:
                super().close(*args, **kwargs)  # type: ignore[no-untyped-call]
            finally:
                if self.cluster is not None and self.cluster.status != Status.closed:
                    self.cluster.close()


def _ignore_abandoned_waits(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Dask ends its waits by AllExit when Ctrl-C or a failed future ends a gather; asyncio would print each of them."""
    if not isinstance(context.get("exception"), AllExit):
        loop.default_exception_handler(context)


def _close_all() -> None:
    for client in list(LocalClient._open):
        client.close()


# Closing needs threads, which the interpreter no longer starts once the ordinary exit handlers run: this list runs
# before. It is not a documented name, so there is a second best.
_at_exit: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)
_at_exit(_close_all)


class _PrivateCluster(LocalCluster):
    """A LocalCluster that never gives up a worker."""

    def _update_worker_status(self, op: str, msg: Any) -> None:
        # LocalCluster's own version forgets a worker whose name is absent some seconds after a loss. One that died
        # twice may just be starting again at that moment, and is then lost for good. Nannies restart them anyway.
        Cluster._update_worker_status(self, op, msg)


class _TunedNanny(Nanny):
    """A Nanny whose workers get malloc settings that suit torch, and that gives `os.environ` back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, ours in MALLOC_SETTINGS.items():
            theirs = self.pre_spawn_env.get(name, os.environ.get(name))
            if theirs in (None, _malloc.DASKS):  # anything else is somebody's choice, and stays
                self.pre_spawn_env[name] = self.env[name] = ours

    async def instantiate(self) -> Status:
        """Start the worker process, at first and after each loss."""
        # the last two: how a worker process knows its parent, by its name of today and of before
        with _BORROWED_ENVIRON.names([*self.pre_spawn_env, "__DASK_PARENT_PID", "DASK_PARENT"]):
            return await super().instantiate()


class _BorrowedEnviron:
    """Puts back the environment variables that Nannies set in this process in order to hand them to a new worker.

    Several start at once, so the state before the first is kept until the last is done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: dict[str, str | None] = {}

    @contextlib.contextmanager
    def names(self, names: Iterable[str]) -> Iterator[None]:
        with self._lock:
            self._users += 1
            for name in names:
                self._before.setdefault(name, os.environ.get(name))
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._give_back()

    def _give_back(self) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before.clear()


_BORROWED_ENVIRON = _BorrowedEnviron()


def _scheduler_settings(websocket_origins: Sequence[str]) -> dict[str, Any]:
    """What a scheduler reads from Dask's configuration when it is made."""
    settings: dict[str, Any] = {
        # Dask allows "*": any page in the user's browser could then read rows, messages and profiles.
        "distributed.scheduler.dashboard.bokeh-application.allow_websocket_origin": [
            LOOPBACK,
            "localhost",
            *websocket_origins,
        ],
    }
    if dask.config.get("distributed.scheduler.no-workers-timeout", None) is None:
        # Dask waits for ever; workers of this machine are back within seconds or not at all.
        settings["distributed.scheduler.no-workers-timeout"] = "60s"
    return settings


def _workers_that_fit(threads_per_worker: int, memory_limit: str | float | None) -> int:
    """One worker per `threads_per_worker` cores, fewer where an equal share of memory would be too little for torch."""
    by_cores = max(1, CPU_COUNT // threads_per_worker)
    return max(1, min(by_cores, MEMORY_LIMIT // ROOMY_MEMORY)) if memory_limit == "auto" else by_cores


def _memory_per_worker(memory_limit: str | float | None, n_workers: int) -> int | None:
    """The limit in bytes, None for none."""
    limit: int | None = parse_memory_limit(memory_limit, 1, max(1, n_workers), logger=logger)
    if limit is not None and limit < LEAST_MEMORY:
        raise PlanError(
            f"local_client(memory_limit={memory_limit!r}) gives each of {n_workers} workers {format_bytes(limit)}, and "
            f"a worker that has imported torch and taken one gradient already holds about 475 MB. Give each at least "
            f"{LEAST_MEMORY / 1e6:.0f} MB: a larger memory_limit, or fewer workers by n_workers=."
        )
    return limit


def _free_port(port: int | None) -> int:
    """`port` if it can be listened on, else 0: any. Asked first, because Dask would start as well, but warn."""
    if not port:
        return 0
    with socket.socket() as probe:
        # As the server itself does: a port in its time of waiting after a close is not busy.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen()
        except OSError:
            return 0
    return port


def _temporary_security() -> Security:
    try:
        security: Security = Security.temporary()
    except ImportError as error:
        raise PlanError(
            "local_client(tls=True) makes a certificate with the cryptography package, which is not installed: pip install daskgrad[tls]"
        ) from error
    return security
