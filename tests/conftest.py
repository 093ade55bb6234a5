"""What all tests share: one cluster of two processes, one thread for torch, and how long property tests run.

``DASKGRAD_TESTS=long`` draws more examples and runs the whole operator table.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

# Drawing a program and a frame and running it on a scheduler is slow by nature; deadlines would measure the machine.
_SLOW_BY_NATURE = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True, suppress_health_check=_SLOW_BY_NATURE)
settings.register_profile("long", max_examples=1500, deadline=None, suppress_health_check=_SLOW_BY_NATURE)
settings.load_profile("long" if os.environ.get("DASKGRAD_TESTS") == "long" else "ci")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from more, and the machine may be shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Compiled kernels of all tests, also of the processes that they start, lie here and not in the user's own folder."""
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DASKGRAD_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def caller_state() -> Iterator[None]:
    """Rule 7 in every test: what the caller had set is as before afterwards.

    Dask's threads scheduler raises while other parts still run, and these hold torch's default dtype until they end: they are waited for.
    """
    before = _state()
    random = torch.random.get_rng_state()
    yield
    _wait_for_pools()
    assert _state() == before
    torch.random.set_rng_state(random)


def _wait_for_pools() -> None:
    """Until every thread of Dask's pools is idle: all of them have met at a barrier."""
    threaded = sys.modules.get("dask.threaded")
    if threaded is None:
        return
    pools = [threaded.default_pool, *(pool for pools in threaded.pools.values() for pool in pools.values())]
    for pool in {id(pool): pool for pool in pools if isinstance(pool, ThreadPoolExecutor) and not pool._shutdown}.values():
        barrier = threading.Barrier(pool._max_workers + 1)
        for _ in range(pool._max_workers):
            pool.submit(barrier.wait, 60)
        barrier.wait(60)


def _state() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "default device": torch.get_default_device(),
    }


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A distributed client with two worker processes, all on 127.0.0.1, not the default client; closed at the end."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            worker_dashboard_address=None,
        ) as local,
        Client(local, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture
def client(cluster: Any) -> Iterator[Any]:
    """The session's cluster as the default client for one test."""
    with cluster.as_current():
        yield cluster


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many inputs the tests of bad input have tried."""
    from counting import tried

    if tried:
        terminalreporter.write_line("tried: " + ", ".join(f"{count:,} {what}" for what, count in sorted(tried.items())))
