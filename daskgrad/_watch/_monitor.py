"""dg.monitor(client): the gradient page on that cluster's dashboard, and a compact view of it in a notebook."""

from __future__ import annotations

import contextlib
import html
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from daskgrad._errors import PlanError

from . import _reporter, _tables

if TYPE_CHECKING:
    from ._cluster import Hold

PERIOD = 0.5  # seconds between two looks of a notebook's view
LAST_NEWS = 1.0  # seconds that the end of a view waits for what workers have not told yet


class Monitor:
    """The gradient page of a cluster, made by `monitor`.

    Attributes:
        link: its address, made from `client.dashboard_link`.
    """

    def __init__(self, client: Any) -> None:
        from ._cluster import Hold

        self._hold: Hold | None = Hold(client)
        self._views: list[_View] = []
        _reporter.pages.add(self)
        try:
            found = self._hold.ask("page")
            if found.get("missing"):
                raise PlanError(
                    "monitor() adds a page to the cluster's dashboard, and this scheduler has none: install bokeh where the scheduler "
                    "runs (pip install daskgrad[dashboard]), and start it with its dashboard, "
                    "as in local_client(dashboard_port=0). dg.progress() needs no dashboard."
                )
            self.link = _link(client.dashboard_link, found["path"], found["secure"], found["port"])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take the page away, unless another monitor still shows it. Once is enough; more does no harm."""
        _reporter.pages.discard(self)
        views, self._views = self._views, []
        if views and self.open:
            self._wait_for_last_news()
        for view in views:
            view.end()
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.release()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<gradient page at {self.link}{'' if self._hold else ', closed'}>"

    def _repr_html_(self) -> str:
        """The page's numbers as they are now."""
        link = html.escape(self.link)
        head = f'<div class="dg"><a href="{link}" target="_blank">{link}</a></div>'
        hold = self._hold
        if hold is None or hold.client.status != "running":
            return f'<style>{_tables.STYLE}</style><div class="dg">The gradient page is closed.</div>'
        state = hold.ask("state", number=None)
        return f"<style>{_tables.STYLE}</style>{head}{_tables.summary(state)}{_tables.columns(state)}{_tables.trouble(state)}"

    def _ipython_display_(self) -> None:
        """In a notebook: the numbers, kept up to date until the page is closed."""
        from IPython import display

        html_of: Any = display.HTML
        show: Any = display.display
        handle = show(html_of(self._repr_html_()), display_id=True)
        if handle is not None and self._hold is not None:
            self._views.append(_View(self, lambda found: handle.update(html_of(found))))

    def _wait_for_last_news(self) -> None:
        """Workers tell a few times a second: what has just ended may not have been told yet."""
        assert self._hold is not None
        until = time.monotonic() + LAST_NEWS
        with contextlib.suppress(OSError):  # the cluster has gone in this moment
            while self._hold.lines()[1] and time.monotonic() < until:
                time.sleep(0.05)

    @property
    def open(self) -> bool:
        """Whether there is a page to look at."""
        return self._hold is not None and self._hold.client.status == "running"


class _View:
    """A display of a notebook that shows a monitor's numbers until it is closed: last those of the end."""

    def __init__(self, monitor: Monitor, show: Callable[[str], None]) -> None:
        self._monitor, self._show, self._shown = monitor, show, ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="daskgrad-monitor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._monitor.open and not self._over.wait(PERIOD):
            self._look()

    def _look(self) -> None:
        try:
            found = self._monitor._repr_html_() if self._monitor.open else self._shown
        except OSError:  # the cluster has gone in this moment
            return
        if found != self._shown:
            self._show(found)
            self._shown = found

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        self._look()


def monitor(client: Any = None) -> Monitor:
    """Add the gradient page to a cluster's own Dask dashboard: `dg.monitor(client)`.

    It shows, live and for each computation: rows done of all, rows per second over time and of each worker, the distribution of the
    magnitudes of each result column, the rows that have a missing value, are not finite or failed, with the latest labels
    and messages, the engine in use, how many path groups it found, and the slowest partitions. "Gradients" in the
    dashboard's navigation leads to it. It works on any cluster that has a dashboard; on the scheduler nothing of daskgrad needs to be
    installed.

    Workers tell what they have seen four times a second, from the batches that fit into less than 1 % of their time; where that is not
    every row, the page says how many. The page goes when the monitor is closed, or with its client; nothing is left then.
    In a notebook, the monitor as the last line of a cell shows the same numbers.

    **Who can open the dashboard can read the labels and messages of rows that fail.** `dg.local_client` keeps it to this machine;
    Dask's own clusters show it to whoever reaches the port.

    Args:
        client: a `dask.distributed.Client`; None: the current one.

    Returns:
        The monitor: `.link` is the page's address, `.close()` takes it away; also a context manager.

    Raises:
        PlanError: no client, or the scheduler has no dashboard.

    Example:
        >>> with dg.local_client() as client, dg.monitor(client) as page:  # doctest: +SKIP
        ...     print(page.link)
        http://127.0.0.1:8787/gradients
    """
    if client is None:
        from distributed import default_client

        try:
            client = default_client()
        except ValueError:
            raise PlanError("monitor() found no client: make one, as by client = dg.local_client(), and pass it") from None
    return Monitor(client)


def _link(status: str, path: str, secure: bool, port: int) -> str:
    """The page's address, from what the client takes for the dashboard's.

    The client knows neither the prefix nor whether it is HTTPS, unless its owner has said so by `distributed.dashboard.link`.
    """
    parts = urlsplit(status)
    before = parts.path.removesuffix("/status").rstrip("/")
    prefix, _, name = path.rpartition("/")
    if not before.endswith(prefix):
        before += prefix
    scheme = "https" if secure and parts.port == port else parts.scheme
    return urlunsplit((scheme, parts.netloc, f"{before}/{name}", "", ""))
