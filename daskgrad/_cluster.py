"""`local_client`, without importing `distributed` before it is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._local_cluster import LocalClient


def local_client(
    n_workers: int | None = None,
    threads_per_worker: int = 1,
    memory_limit: str | float | None = "auto",
    *,
    tls: bool = False,
    dashboard_port: int | None = 8787,
    websocket_origins: Sequence[str] = (),
    **kwargs: Any,
) -> LocalClient:
    """A `dask.distributed` client with worker processes of its own on this machine, private and tuned for torch.

    Every listener is on 127.0.0.1, and pages of other sites that are open in your browser cannot read the dashboard's
    live data. `os.environ` stays as it was. The workers end with the client: at `close()`, at the end of the `with`
    block, or with the interpreter. A worker that dies is restarted, however often.

    In a script, call it under `if __name__ == "__main__":`, because worker processes import the script; elsewhere it is
    refused.

    Args:
        n_workers: worker processes. None: one per core (divided by `threads_per_worker`), as far as memory reaches.
        threads_per_worker: threads in each. One, as eager torch scales better over processes.
        memory_limit: per worker, as Dask takes it: "auto" (an equal share), "2 GB", bytes, a fraction of the machine's
            memory up to 1.0, or None for no limit. Less than 700 MB is refused: torch alone fills that.
        tls: encrypt the traffic between client, scheduler and workers with a certificate made for this cluster; who
            does not have it can neither submit nor read. The dashboard stays plain HTTP on 127.0.0.1;
            `dashboard_port=None` switches it off. Needs `pip install daskgrad[tls]`.
        dashboard_port: where the dashboard listens; another port is taken where this one is busy
            (`client.dashboard_link` tells which). None: no dashboard.
        websocket_origins: further hosts that may show the dashboard, such as that of a Jupyter proxy.
        **kwargs: further arguments of `dask.distributed.LocalCluster`.

    Returns:
        A `dask.distributed.Client`, set as the default, so that `.compute()` runs on it.

    Raises:
        PlanError: a script without that guard; too little memory; `tls` without the `cryptography` package; an
            argument that would undo the above.

    Example:
        >>> import daskgrad as dg
        >>> with dg.local_client(n_workers=1) as client:  # doctest: +SKIP
        ...     print(client.dashboard_link)
        http://127.0.0.1:8787/status
    """
    from ._local_cluster import start

    return start(
        n_workers,
        threads_per_worker,
        memory_limit,
        tls=tls,
        dashboard_port=dashboard_port,
        websocket_origins=websocket_origins,
        **kwargs,
    )
