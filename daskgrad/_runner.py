"""Keys of a graph on whichever scheduler Dask would use, one answer at a time, and what becomes of those whose process dies."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dask.typing import Key

from . import _task, _wanted
from ._errors import PlanError, StoreError

Graph = dict[Key, Any]
Done = Callable[[Key, Any], None]


class Died(Exception):
    """The process of a task died: its keys, or None where a whole pool is gone and with it the answer to which of them."""

    def __init__(self, keys: list[Key] | None) -> None:
        super().__init__(keys)
        self.keys = keys


def runner_of(scheduler: Any, collection: Any) -> Local | Distributed:
    """For what `.compute(scheduler=...)` takes: None is the current client, or what Dask's configuration says, or else threads.

    Args:
        scheduler: that.
        collection: of Dask's, which may have a scheduler of its own; None where there is none.
    """
    import dask.threaded
    from dask.base import get_scheduler

    if hasattr(scheduler, "get_versions"):
        get = scheduler.get
    else:
        get = get_scheduler(collections=[collection], scheduler=scheduler) or dask.threaded.get
    client = getattr(get, "__self__", None)
    if client is not None and hasattr(client, "get_versions"):
        if client.asynchronous:
            raise PlanError("to_parquet waits for its parts, which an asynchronous client does not allow: use a Client without it")
        return Distributed(client)
    return Local(get)


class Local:
    """Dask's own schedulers on this machine: synchronous, threads, processes."""

    def __init__(self, get: Any) -> None:
        self._get = get

    def environment(self, torch: bool, alike: bool) -> dict[str, str]:
        return _task.environment(torch)

    def run(self, graph: Graph, keys: Iterable[Key], done: Done) -> None:
        """Call `done(key, value)` for each of `keys` as soon as it is there.

        Raises:
            Died: a process of the pool has died, and the pool with it.
        """
        from concurrent.futures.process import BrokenProcessPool

        from dask.callbacks import Callback

        wanted = set(keys)

        def look(key: Key, value: Any, *_: Any) -> None:
            if key in wanted:
                done(key, value)

        try:
            with _awaited(self._get) as get, Callback(posttask=look):
                get(graph, list(wanted))
        except BrokenProcessPool:
            raise Died(None) from None


@contextlib.contextmanager
def _awaited(get: Any) -> Iterator[Any]:
    """Dask's threads in a pool that has ended afterwards: where something is raised, Dask leaves the tasks that run then to themselves.

    Those stop at their next batch of rows, so that an interrupt need not wait for whole parts.
    """
    import dask.threaded
    from dask.system import CPU_COUNT

    if get is not dask.threaded.get or dask.config.get("pool", None) is not None:
        yield get
        return
    pool = _Pool(dask.config.get("num_workers", None) or CPU_COUNT)
    try:
        with _wanted.waited_for():
            yield functools.partial(get, pool=pool)
    finally:
        pool.shutdown(cancel_futures=True)


class _Pool(ThreadPoolExecutor):
    """Threads that see the context variables of the caller, as in Dask's own pool."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(contextvars.copy_context().run, fn, *args, **kwargs)


class Distributed:
    """A client of `dask.distributed`: one future for each key, few of them gathered at a time."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def environment(self, torch: bool, alike: bool) -> dict[str, str] | None:
        """What all workers have in common; None where there is no worker yet, or where they need not be `alike`.

        Raises:
            PlanError: daskgrad is not on a worker, or the workers differ though they are to be `alike`.
        """
        if not alike:
            return None
        found = self._client.run(_task.workers_environment(torch))
        kinds = {tuple(sorted(environment.items())): worker for worker, environment in found.items()}
        if len(kinds) > 1:
            (one, here), (two, there) = list(kinds.items())[:2]
            raise Differ(dict(one), here, dict(two), there)
        return dict(next(iter(kinds))) if kinds else None

    def run(self, graph: Graph, keys: Iterable[Key], done: Done) -> None:
        """Call `done(key, value)` for each of `keys` as soon as it is there.

        Raises:
            Died: workers have died over some of them, as often as the scheduler allows; all others are done.
            StoreError: the scheduler is gone.
        """
        from distributed import KilledWorker, as_completed

        futures = dict(zip(keys, self._client.get(graph, list(keys), sync=False), strict=True))
        by_key = {future.key: key for key, future in futures.items()}
        killed: list[Key] = []
        try:
            coming = as_completed(list(futures.values()), loop=self._client.loop)
            for future in coming:
                key = by_key[future.key]
                if future.status in ("lost", "pending"):  # the worker that held it has died meanwhile: it is made again
                    coming.add(future)
                    continue
                if future.status == "cancelled":
                    raise StoreError("the scheduler is gone or has dropped the work. What is written stays; run it again to go on.")
                error = future.exception() if future.status == "error" else None
                if isinstance(error, KilledWorker):
                    killed.append(key)
                elif error is not None:
                    raise error
                else:
                    done(key, future.result())
                del futures[key]
        finally:
            self._client.cancel(list(futures.values()))
        if killed:
            raise Died(killed)


class Differ(PlanError):
    """Two workers of one cluster would not give the same bits."""

    def __init__(self, one: dict[str, str], here: str, two: dict[str, str], there: str) -> None:
        names = [name for name in {**one, **two} if one.get(name) != two.get(name)]
        told = ", ".join(f"{name} {one.get(name)} and {two.get(name)}" for name in names)
        super().__init__(
            f"the workers {here} and {there} differ ({told}), so that which of them makes a part would decide its bits. Make them alike, "
            'or accept it: to_parquet(..., environment="any").'
        )
