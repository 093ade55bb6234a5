"""Faults, injected for real: processes are killed, stopped and crashed, connections are cut and frozen.

In each case: the right result, or a clear error within bounded time. What is lost for good fails by a time limit.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from compare import assert_cells, in_equal_parts
from distributed import Client, KilledWorker
from distributed.client import CancelledError
from programs import Wire, programs, wait_until, with_modules

import daskgrad as dg
from daskgrad._local_cluster import LocalClient

pytestmark = pytest.mark.cluster

LONG = pytest.mark.skipif(os.environ.get("DASKGRAD_TESTS") != "long", reason="a minute of waiting: DASKGRAD_TESTS=long")
LIMIT = 180  # seconds; what takes longer on a busy machine is not bounded


def frame(parts: int, rows: int = 4) -> Any:
    values = np.arange(float(parts * rows))
    return in_equal_parts(pd.DataFrame({"x": values}, index=[f"row {n}" for n in range(len(values))]), parts)


def slow_square(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.1)
    return x * x


def assert_squares(found: Any) -> None:
    assert_cells(list(found), [2.0 * n for n in range(len(found))])


def by_value(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function as a script or a notebook would define it: it travels whole, as other programs have no tests."""
    code = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__)
    code.__module__ = "__main__"
    return code


@pytest.fixture(scope="module")
def client() -> Iterator[LocalClient]:
    with dg.local_client(n_workers=2, dashboard_port=None, silence_logs=60) as client:
        yield client


@pytest.fixture(autouse=True)
def all_well_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever failed: the shared cluster has both workers again, and the next computation is right."""
    yield
    if "client" in request.fixturenames:
        shared = request.getfixturevalue("client")
        shared.wait_for_workers(2, timeout=LIMIT)
        assert_squares(shared.compute(dg.grad_column(frame(4), slow_square)).result(timeout=LIMIT))


# -------------------------------------------------------------------------------- processes that die


def test_workers_killed_again_and_again(client: LocalClient) -> None:
    """SIGKILL in the middle, three times, now one worker and now the other: every row is right."""
    parts = client.compute(dg.grad_column(frame(24), slow_square).to_delayed())
    for count in range(1, 4):
        wait_until(lambda done=4 * count: sum(part.done() for part in parts) >= done, "some parts")  # type: ignore[misc]
        kill_a_worker(client, count % 2)
    assert_squares(pd.concat([part.result(timeout=LIMIT) for part in parts]))


def kill_a_worker(client: LocalClient, which: int) -> None:
    nanny = client.cluster.workers[which]
    wait_until(lambda: nanny.pid is not None, "a worker process")
    os.kill(nanny.pid, signal.SIGKILL)


def test_the_scheduler_killed_and_the_job_run_again(tmp_path: Path) -> None:
    """The first run fails at once with one error and its worker program ends by itself; run again elsewhere, it is right."""
    column = dg.grad_column(frame(20), by_value(slow_square))
    with programs(tmp_path, ["one"]) as cluster:
        with Client(cluster.address, set_as_default=False) as client:
            result = client.compute(column)
            wait_until(lambda: client.processing() and any(client.processing().values()), "work")
            cluster.scheduler.kill()
            with pytest.raises(CancelledError, match="scheduler-connection-lost"):
                result.result(timeout=LIMIT)
        assert cluster.workers["one"].wait(LIMIT) is not None
        cluster.start_scheduler()
        cluster.start_worker("two")
        with Client(cluster.address, set_as_default=False) as client:
            assert_squares(client.compute(column).result(timeout=LIMIT))


def allocate(x: torch.Tensor) -> torch.Tensor:
    if x == 14:
        big = torch.ones(2**27, dtype=torch.float64)  # 1 GiB
        time.sleep(10)
        return x * big[0]
    return x * x


def test_a_worker_over_its_memory_limit() -> None:
    """Dask ends the worker, and then the job (by default after four), with an error that names a task it had; others go on."""
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        dg.local_client(n_workers=1, memory_limit="700 MB", dashboard_port=None, silence_logs=60) as client,
    ):
        with pytest.raises(KilledWorker, match=r"on 1 different workers"):
            client.compute(dg.grad_column(frame(5), allocate)).result(timeout=LIMIT)
        assert_squares(client.compute(dg.grad_column(frame(3), allocate)).result(timeout=LIMIT))


def test_case_c14_a_long_partition_in_little_memory() -> None:
    """A million rows in one partition and a gigabyte: done, and the next one too, by the same worker process."""
    table = dd.from_map(lambda rows: pd.DataFrame({"x": np.arange(rows)}), [1e6], meta=pd.DataFrame({"x": [0.0]}))
    with dg.local_client(n_workers=1, memory_limit="1 GB", dashboard_port=None, silence_logs=60) as client:
        before = client.run(os.getpid)
        for factor in (2.0, 3.0):
            column = dg.grad_column(table, lambda x, factor=factor: factor * x**2, wrt="x")
            assert column.sum().compute() == pytest.approx(2 * factor * (1e6 * (1e6 - 1) / 2), rel=1e-12)
        assert client.run(os.getpid) == before


def test_a_worker_that_is_stopped() -> None:
    """SIGSTOP: who is not heard of for `worker-ttl` is ended and replaced, and its parts run elsewhere."""
    with (
        dask.config.set({"distributed.scheduler.worker-ttl": "5s"}),
        dg.local_client(n_workers=2, dashboard_port=None, silence_logs=60) as client,
    ):
        result = client.compute(dg.grad_column(frame(20), slow_square))
        wait_until(lambda: any(client.processing().values()), "work")
        os.kill(client.cluster.workers[0].pid, signal.SIGSTOP)
        assert_squares(result.result(timeout=LIMIT))


def crash(x: torch.Tensor) -> torch.Tensor:
    """Row 14 reads memory that there is not, as a bug in native code does."""
    if x == 14:
        ctypes.string_at(0)
    return x * x


def crash_elsewhere(x: torch.Tensor) -> torch.Tensor:
    """Row 14 ends the process by a signal that no thread of Python's gets, as in a thread of OpenMP's."""
    if x == 14:
        os.kill(os.getpid(), signal.SIGABRT)
        time.sleep(5)
    return x * x


@pytest.mark.parametrize(("fn", "how"), [(crash, "segmentation fault"), (crash_elsewhere, "aborted")])
def test_a_crash_on_one_row_is_told_by_partition_line_and_remedy(client: LocalClient, fn: Any, how: str) -> None:
    """With plain `.compute()`: two tries, then an error that names the true partition and how to find the row."""
    began = time.monotonic()
    with pytest.raises(dg.RowError, match=rf"partition 3 of grad-{fn.__name__}: .* died 2 times of a {how}") as raised:
        dg.grad_column(frame(20), fn).compute()
    assert time.monotonic() - began < LIMIT
    assert raised.value.partition == 3
    line = fn.__code__.co_firstlineno + 3
    assert f"in line {line} of {__file__}, in {fn.__name__}" in str(raised.value) or how == "aborted"
    assert "dg.to_parquet" in str(raised.value)


def test_the_true_partition_is_named_where_four_run_at_once() -> None:
    """Dask alone blames any part that the dying worker had: here four run in one process, and others wait for it."""
    with dg.local_client(n_workers=1, threads_per_worker=4, dashboard_port=None, silence_logs=60) as client:
        for _ in range(2):
            with pytest.raises(dg.RowError, match="partition 3 of grad-crash"):
                client.compute(dg.grad_column(frame(20), crash)).result(timeout=LIMIT)


def test_a_crash_in_a_process_pool_says_where(capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody tries again there: Dask's error at once, and the line of the row function on standard error."""
    with pytest.raises(BrokenProcessPool):
        dg.grad_column(frame(3), by_value(only_crash)).compute(scheduler="processes", num_workers=1)
    said = capfd.readouterr().err
    assert "Fatal Python error: Segmentation fault" in said
    assert f"line {only_crash.__code__.co_firstlineno + 2} in only_crash" in said


def only_crash(x: torch.Tensor) -> torch.Tensor:
    """Whatever the row."""
    ctypes.string_at(0)
    return x


# -------------------------------------------------------------------------------- a network that is cut


@pytest.mark.parametrize("how", ["closed", pytest.param("frozen", marks=LONG)])
def test_the_network_between_a_worker_and_the_scheduler(tmp_path: Path, how: str) -> None:
    """Closed, or frozen with nobody told: the parts of the worker behind it run on the other one."""
    column = dg.grad_column(frame(20), by_value(slow_square))
    with programs(tmp_path, ["near"], config={"distributed.scheduler.worker-ttl": "8s"}) as cluster, Wire(cluster.address) as wire:
        cluster.start_worker("far", None, wire.address)
        with Client(cluster.address, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=LIMIT)
            result = client.compute(column)
            wait_until(lambda: all(client.processing().values()), "work on both")
            wire.cut() if how == "closed" else wire.freeze()
            assert_squares(result.result(timeout=LIMIT))


# -------------------------------------------------------------------------------- futures and clients that go


def test_a_cancelled_future(client: LocalClient) -> None:
    """Who waits for it is told, and what is asked for next is not kept waiting by what was cancelled."""
    result = client.compute(dg.grad_column(frame(200), slow_square))
    wait_until(lambda: any(client.processing().values()), "work")
    result.cancel()
    with pytest.raises(CancelledError):
        result.result(timeout=LIMIT)
    wait_until(lambda: sum(map(len, client.processing().values())) <= 2, "the end of what was running")


GOES_AWAY = """
import sys, time
import dask.dataframe as dd, pandas as pd
from dask.distributed import Client
import daskgrad as dg

def slow(x):
    time.sleep(0.1)
    return x * x

client = Client(sys.argv[1])
lazy = dd.from_pandas(pd.DataFrame({"x": range(1000)}), npartitions=500)
future = client.compute(dg.grad_column(lazy, slow))
print("submitted", flush=True)
time.sleep(600)
"""


def test_a_client_that_goes_away(tmp_path: Path, client: LocalClient) -> None:
    """A program that is killed while its job runs: the cluster drops the job, and the next one has all workers."""
    script = tmp_path / "goes_away.py"
    script.write_text(GOES_AWAY)
    environ = {**os.environ, **with_modules()}
    with subprocess.Popen([sys.executable, script, client.scheduler.address], stdout=subprocess.PIPE, env=environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"submitted\n"
        wait_until(lambda: any(client.processing().values()), "its work")
        process.kill()
    wait_until(lambda: not any(client.processing().values()), "the end of its work")


# -------------------------------------------------------------------------------- exceptions that cannot travel


def raise_what_only_the_worker_knows(x: torch.Tensor) -> torch.Tensor:
    """An exception of a class in a module that this process has not got."""
    module = types.ModuleType("only_on_the_worker")
    sys.modules[module.__name__] = module
    exec("class Odd(Exception): pass", module.__dict__)
    if x == 14:
        raise module.Odd("a bad row")
    return x * x


class RefusesToBeMade(Exception):
    """It pickles, and raises when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ("a bad row",)


def _refuse(text: str) -> Exception:
    raise RuntimeError("not here")


def raise_what_cannot_be_rebuilt(x: torch.Tensor) -> torch.Tensor:
    if x == 14:
        raise RefusesToBeMade("a bad row")
    return x * x


@pytest.mark.parametrize("fn", [raise_what_only_the_worker_knows, raise_what_cannot_be_rebuilt])
def test_an_exception_that_cannot_be_rebuilt(client: LocalClient, fn: Any) -> None:
    """The row is named all the same, with the exception's class and text as the cause."""
    with pytest.raises(dg.RowError) as raised:
        client.compute(dg.grad_column(frame(5), fn)).result(timeout=LIMIT)
    error = raised.value
    assert (error.label, error.partition) == ("row 14", 3)
    assert "a bad row" in str(error.__cause__)
    assert "Odd" in str(error.__cause__) or "RefusesToBeMade" in str(error.__cause__) + type(error.__cause__).__name__
