"""A large packed plan in a Dask graph, and the ticket that goes to the scheduler in its place.

Where the plan is pickled, whoever sends it decides what travels. A client's workers have it from a plugin that was
registered when the graph was made: the scheduler gives that to every worker, also to one that restarts or joins late.
Dask's own process pool finds it in a file. Anyone else gets the bytes, which are right everywhere, only slow.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import tempfile
import threading
import uuid
import weakref
from typing import Any, Final, Literal

LARGE = 2**20  # bytes; smaller plans travel as they are
_PLUGIN: Final = b"P"
_FILE: Final = b"F"  # no pickle begins with either
_log = logging.getLogger("daskgrad")
_FIRST_LOOK, _LAST_LOOK = 0.1, 5.0  # seconds between looks at whether a task still needs a plan


class Blob:
    """A packed plan in a graph. It is pickled as `bytes`, so that nothing of daskgrad is needed to open it.

    Args:
        data: the packed plan, which begins with the digest of its content.
        digest_size: how many bytes that digest has.
    """

    def __init__(self, data: bytes, digest_size: int) -> None:
        self.data, self.digest = data, data[:digest_size]
        self._leases: weakref.WeakKeyDictionary[Any, _Lease] = weakref.WeakKeyDictionary()
        self._path: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        sender = _sender()
        if sender == "processes":
            return bytes, (self.digest + _FILE + os.fsencode(self._file()),)
        if sender is not None and sender in self._leases:
            return bytes, (self.digest + _PLUGIN,)
        return bytes, (self.data,)

    def __repr__(self) -> str:
        return f"Blob({self.digest.hex()[:8]}, {len(self.data)} bytes)"

    def announce(self) -> None:
        """Give the plan to the workers of the current client, where there is one that can wait for it."""
        client = current_client()
        if client is not None and client not in self._leases:
            lease = _lease(client, self)
            self._leases[client] = lease
            weakref.finalize(self, lease.end, weakref.ref(client), os.getpid())

    def _file(self) -> str:
        """The file for processes on this machine, readable by this user only, which goes when this object goes."""
        if self._path is None:
            folder = tempfile.mkdtemp(prefix="daskgrad-")  # private: mode 0700
            weakref.finalize(self, _remove, folder, os.getpid())
            path = os.path.join(folder, self.digest.hex())
            with open(path, "xb") as file:
                file.write(self.data)
            self._path = path
        return self._path


def is_ticket(parcel: bytes, digest_size: int) -> bool:
    """Whether `parcel` stands for a plan that lies elsewhere."""
    return parcel[digest_size : digest_size + 1] in (_PLUGIN, _FILE)


def fetch(ticket: bytes, digest_size: int, worker: Any) -> bytes | None:
    """The packed plan that `ticket` stands for; None where it is not here.

    Args:
        ticket: what `is_ticket`.
        digest_size: how many bytes its digest has.
        worker: the worker of `dask.distributed` that this runs in, or None.
    """
    digest, kind, where = ticket[:digest_size], ticket[digest_size : digest_size + 1], ticket[digest_size + 1 :]
    if kind == _FILE:
        return _read(where)
    plugins = {} if worker is None else worker.plugins
    names = [name for name in list(plugins) if name.startswith(_plugin_name(digest))]
    return getattr(plugins.get(names[0]), "data", None) if names else None


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked process has a copy of whatever its parent holds
        shutil.rmtree(folder, ignore_errors=True)


def _read(path: bytes) -> bytes | None:
    if not os.path.exists(path):
        return None
    with open(path, "rb") as file:
        return file.read()


# -------------------------------------------------------------------------------- who sends, and to whom


def current_client() -> Any:
    """The client that a computation would use now, if this thread may wait for it."""
    distributed = sys.modules.get("distributed")
    if distributed is None:
        return None
    try:
        client = distributed.Client.current()
    except ValueError:  # its way to say: there is none
        return None
    return client if client.status == "running" and not client.asynchronous else None


def _sender() -> Any | Literal["processes"] | None:
    """Who is pickling: a client, Dask's process pool, or None for anyone else.

    Dask does not tell an object where it is going, so this looks at who called. A Dask that is built in another way
    than this knows makes it None, which is right and slow. A client cannot be asked to wait here: it holds a lock.
    """
    distributed = sys.modules.get("distributed")
    frame = sys._getframe(2)
    while frame is not None:
        module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
        if module == "dask.local" and function == "fire_tasks":
            return "processes"
        if distributed is not None and module == "distributed.client" and function == "_graph_to_futures":
            return frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    return None


# -------------------------------------------------------------------------------- the plugin, and its end


class _Lease:
    """One plan on the workers of one client, for as long as a `Blob` or a task needs it."""

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.name = f"{_plugin_name(digest)}-{uuid.uuid4().hex[:8]}"  # another client may bring the same plan
        self.holders: weakref.WeakSet[Blob] = weakref.WeakSet()
        self.closed = False

    def end(self, client_ref: weakref.ref[Any], owner: int) -> None:
        """Called when a holder is gone, in any thread: it must not wait."""
        client = client_ref()
        if client is not None and client.status == "running" and os.getpid() == owner:
            client.loop.add_callback(self._withdraw, client)

    async def _withdraw(self, client: Any) -> None:
        try:
            await self._unneeded(client)
            if client.status == "running" and self._close(client):
                await client._unregister_worker_plugin(name=self.name)
        except OSError as error:  # a closed connection among them: the client ends, and takes its plans along
            if client.status == "running":
                _log.warning("daskgrad: a plan could not be taken from the workers: %s", error)

    async def _unneeded(self, client: Any) -> None:
        """Wait until no task needs it: what was persisted goes on after its column is gone."""
        pending, pause = set(client.futures), _FIRST_LOOK
        while client.status == "running" and not self._held():
            pending = {key for key in pending if key in client.futures and client.futures[key].status == "pending"}
            if not pending and not await self._needed(client):  # while they are pending, the scheduler may not know yet
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK)

    async def _needed(self, client: Any) -> bool:
        key = plan_key(self.digest)
        states = await client.scheduler.get_task_status(keys=[key, (key, 0)])
        return any(state is not None for state in states.values())

    def _held(self) -> bool:
        with _lock:
            return any(True for _ in self.holders)  # its length still counts one that is just going

    def _close(self, client: Any) -> bool:
        """Whether this is over: from now on nobody gets it from `_lease`."""
        with _lock:
            if self.closed or self._held():
                return False
            self.closed = True
            leases = _leases.get(client, {})
            if leases.get(self.digest) is self:
                del leases[self.digest]
            return True


_lock = threading.RLock()  # never held while waiting for a client, whose loop takes it too
_leases: weakref.WeakKeyDictionary[Any, dict[bytes, _Lease]] = weakref.WeakKeyDictionary()


def _lease(client: Any, blob: Blob) -> _Lease:
    with _lock:
        known = _leases.setdefault(client, {}).get(blob.digest)
        if known is not None:
            known.holders.add(blob)
            return known
    lease = _Lease(blob.digest)
    lease.holders.add(blob)
    client.register_plugin(_plugin(lease.name, blob.data))
    with _lock:
        _leases[client][blob.digest] = lease
    return lease


def _plugin(name: str, data: bytes) -> Any:
    """Distributed's own class with the plan as an attribute: there is nothing of daskgrad to import."""
    from distributed import WorkerPlugin

    plugin: Any = WorkerPlugin()
    plugin.name, plugin.idempotent, plugin.data = name, True, data
    return plugin


def _plugin_name(digest: bytes) -> str:
    return f"daskgrad-{digest.hex()}"


def plan_key(digest: bytes) -> str:
    """The key of a plan in a graph: from its content, wherever it is and however it travels."""
    return f"plan-{digest.hex()}"
