"""What the gradient page costs the workers that it watches."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import clusters
import numpy as np
from harness import Arm, Mark, Workload

import daskgrad as dg

SEEN, UNSEEN = "with dg.monitor(client)", "without"


def workload(quick: bool) -> Workload:
    rows, partitions, times = (4_000, 4, 1) if quick else (4_000_000, 8, 4)
    frame = clusters.book(rows, partitions)
    expected = clusters.expected_sums(frame)
    with ExitStack() as stack:
        client = stack.enter_context(dg.local_client(n_workers=1, dashboard_port=0))
        held = clusters.on(client, frame)
        page = _Page(client)
        close = stack.pop_all().close

    def check(name: str, result: Any) -> None:
        for greek, value in result.items():
            np.testing.assert_allclose(value, expected[greek], rtol=1e-8, err_msg=f"{name}: {greek}")

    def sums() -> Any:
        for _ in range(times):
            found = clusters.sums(client, clusters.greeks(held, "vmap"))
        return found

    return Workload(
        title=f"value and 5 Greeks, float64, {partitions} partitions in one worker's memory",
        arms=[Arm(SEEN, times * rows, sums, page.there), Arm(UNSEEN, times * rows, sums, page.gone)],
        check=check,
        repeats=1 if quick else 21,
        close=close,
        marks=[Mark("value and 5 Greeks, watched by the gradient page", SEEN, UNSEEN, 1.01, "time")],
    )


class _Page:
    """The page on the cluster's dashboard, which comes and goes."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._monitor: dg.Monitor | None = None

    def there(self) -> None:
        if self._monitor is None:
            self._monitor = dg.monitor(self._client)

    def gone(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
