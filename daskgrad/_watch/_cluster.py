"""Watching a cluster: a plugin of the scheduler adds up what its workers tell, for as long as anybody holds it.

The plugin travels by value, so that a scheduler needs no daskgrad; what it imports is imported there.
"""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Iterable
from typing import Any

from ._history import History
from ._page import Page, dashboard_of
from ._reporter import PLUGIN, TOPIC, group_of
from ._tally import Computation, Line, Tally

ASK = "daskgrad_watch"
"""The name of the plugin, and of the scheduler's handler that it brings."""
GOODBYE = 5  # seconds that a scheduler has to answer it
_shipping = threading.Lock()


class Hold:
    """A client's hold on the plugin of its cluster; the last one to let go takes it away.

    Args:
        client: a running `distributed.Client`.
        lasting: it stays when the client goes.
    """

    def __init__(self, client: Any, *, lasting: bool = False) -> None:
        self.client, self.token = client, uuid.uuid4().hex
        self.since = int(self._ask("hold", owner="" if lasting else client.id, make=True)["number"])

    def lines(self) -> tuple[dict[str, Line], bool]:
        """How far this client's computations are that began since this was made, by title; and whether news are to come."""
        found = self._ask("lines", client=self.client.id, since=self.since)
        return {title: Line.of_state(title, state) for title, state in found["lines"].items()}, bool(found["news_to_come"])

    def release(self) -> None:
        """Let go."""
        if self.client.status == "running":
            self.client.sync(self._asking, "release", False, {}, asynchronous=False, callback_timeout=GOODBYE)

    def ask(self, what: str, **details: Any) -> Any:
        """An answer of the plugin."""
        return self._ask(what, **details)

    def _ask(self, what: str, make: bool = False, **details: Any) -> Any:
        return self.client.sync(self._asking, what, make, details, asynchronous=False)

    async def _asking(self, what: str, make: bool, details: dict[str, Any]) -> Any:
        scheduler = self.client.scheduler
        if make:
            await scheduler.register_scheduler_plugin(plugin=_shipped(), name=ASK, idempotent=True)
        return await getattr(scheduler, ASK)(what=what, token=self.token, **details)


def _shipped() -> bytes:
    """The plugin by value, with the modules that it is made of."""
    import cloudpickle

    package = sys.modules[__package__]
    with _shipping:
        cloudpickle.register_pickle_by_value(package)
        try:
            return bytes(cloudpickle.dumps(_plugin()))
        finally:
            cloudpickle.unregister_pickle_by_value(package)


def _plugin() -> Any:
    from distributed import SchedulerPlugin

    class Watch(SchedulerPlugin):
        """Adds up the records of the workers, and answers to whoever asks."""

        name, idempotent = ASK, True

        async def start(self, scheduler: Any) -> None:
            self.desk = Desk(scheduler)
            await self.desk.open()

        def update_graph(self, scheduler: Any, *, client: str, tasks: Any, **kwargs: Any) -> None:
            self.desk.submitted(client, tasks)

        def log_event(self, topic: str, msg: Any) -> None:
            if topic == TOPIC:
                self.desk.hear(msg)

        def remove_client(self, scheduler: Any, client: str) -> None:
            self.desk.gone(client)

    return Watch()


class Desk:
    """Of one scheduler: the tally of its computations, and who holds it."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.tally, self.history = scheduler, Tally(), History()
        self.holders: dict[str, str] = {}  # token: the client that must be there, "" for none
        self._page: Page | None = None
        self._viewers: set[str] = set()  # tokens

    async def open(self) -> None:
        """From now on the workers tell, and the handler answers. What is being computed already is seen too."""
        import pickle

        from distributed import WorkerPlugin

        plugin: Any = WorkerPlugin()  # distributed's own class: there is nothing of daskgrad to import
        plugin.name = PLUGIN
        self.scheduler.handlers[ASK] = self.answer
        waiting = [key for key, task in self.scheduler.tasks.items() if task.state not in ("released", "memory", "erred", "forgotten")]
        if waiting:
            self.tally.begin("", _counted(waiting), 0)
        await self.scheduler.register_worker_plugin(None, plugin=pickle.dumps(plugin), name=PLUGIN, idempotent=True)

    async def close(self) -> None:
        """Nothing of this is left."""
        scheduler = self.scheduler
        self._close_page()
        scheduler.handlers.pop(ASK, None)
        if ASK in scheduler.plugins:
            scheduler.remove_plugin(ASK)
        if PLUGIN in scheduler.worker_plugins:
            await scheduler.unregister_worker_plugin(None, name=PLUGIN)
        scheduler._broker._topics.pop(TOPIC, None)

    async def answer(self, what: str, token: str, **details: Any) -> dict[str, Any]:
        """The scheduler's handler."""
        if what == "page":
            return self._open_page(token)
        if what == "state":
            return self.history.state(details["number"])
        if what == "hold":
            self.holders[token] = details["owner"]
            return {"number": 1 if len(self.holders) == 1 else self.tally.next_number}
        if what == "release":
            self._let_go(token)
            if not self.holders:
                await self.close()
            return {}
        return self.lines(details["client"], details["since"])

    def lines(self, client: str, since: int) -> dict[str, Any]:
        """Of the computations of a client since a number; those that tasks submit are theirs too."""

        def theirs(computation: Computation) -> bool:
            by = computation.client
            return computation.number >= since and (by in (client, "") or by.startswith("Client-worker-"))

        tally = Tally()
        tally.computations = list(filter(theirs, self.tally.computations))
        lines = {title: line.state() for title, line in tally.lines().items()}
        return {"lines": lines, "news_to_come": any(one.news_to_come for one in filter(theirs, self.tally.latest()))}

    def submitted(self, client: str, keys: Any) -> None:
        """A graph has come."""
        self.tally.begin(client, _counted(keys), self._next_run())

    def hear(self, message: dict[str, Any]) -> None:
        """Records have come."""
        for record in message["parts"]:
            computation, grown = self.tally.update(record)
            if grown is not None:
                self.history.hear(computation, record, grown, str(message.get("worker", "")))

    def gone(self, client: str) -> None:
        """A client has left, and with it what it held."""
        held = len(self.holders)
        for token in [token for token, owner in self.holders.items() if owner == client]:
            self._let_go(token)
        if held and not self.holders:
            self.scheduler._ongoing_background_tasks.call_soon(self.close)

    def _let_go(self, token: str) -> None:
        self.holders.pop(token, None)
        self._viewers.discard(token)
        if not self._viewers:
            self._close_page()

    def _open_page(self, token: str) -> dict[str, Any]:
        dashboard = dashboard_of(self.scheduler)
        if dashboard is None:
            return {"missing": True}
        self._viewers.add(token)
        if self._page is None:
            self._page = Page(self.scheduler, dashboard, self.history)
        server = self.scheduler.http_server
        return {"path": self._page.path, "secure": server.ssl_options is not None, "port": server.port}

    def _close_page(self) -> None:
        if self._page is not None:
            self._page.close()
            self._page = None

    def _next_run(self) -> int:
        """The number that the next run of a task will have; 0 where this distributed does not tell."""
        import copy

        from distributed.scheduler import TaskState

        runs = getattr(TaskState, "_run_id_iterator", None)
        return 0 if runs is None else int(next(copy.copy(runs)))


def _counted(keys: Iterable[Any]) -> dict[str, int]:
    """How many tasks there are in each group."""
    found: dict[str, int] = {}
    for key in keys:
        group = group_of(key)
        found[group] = found.get(group, 0) + 1
    return found
