"""A large plan travels once to each worker, wherever the column is computed, and goes when nothing needs it."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

import daskgrad as dg
from daskgrad import _blob, _ship
from daskgrad._errors import PlanError

WEIGHTS = 3_000_000  # 24 MB of them
PARTITIONS = 50
# As in a script: it travels by value. Each time it is opened, the process is noted.
MODEL = """
import os
import torch

class Model(torch.nn.Module):
    def __init__(self, log, size):
        super().__init__()
        self.log = str(log)
        self.weight = torch.nn.Parameter(torch.arange(size, dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        return x * x * self.weight[3]

    def __setstate__(self, state):
        super().__setstate__(state)
        with open(self.log, "a") as file:
            file.write(f"{os.getpid()}\\n")
"""


def model(folder: Path, size: int = WEIGHTS) -> Any:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(MODEL, names)
    return names["Model"](folder / "opened", size)


def opened(folder: Path) -> Counter[int]:
    """How often each process opened the model."""
    log = folder / "opened"
    return Counter(map(int, log.read_text().split())) if log.exists() else Counter()


def frame(partitions: int = PARTITIONS) -> Any:
    return dd.from_pandas(pd.DataFrame({"x": np.arange(4.0 * partitions)}), npartitions=partitions)


def column(net: Any, partitions: int = PARTITIONS) -> Any:
    return dg.grad_column(frame(partitions), by_model(), shared={"m": net})


def by_model() -> Callable[..., Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def by_model(x, m):\n    return m(x)", names)
    return names["by_model"]  # type: ignore[no-any-return]


def right(got: pd.Series) -> bool:
    return bool(np.array_equal(got.to_numpy(), 6 * np.arange(float(len(got)))))


def computed(made: Any, **options: Any) -> bool:
    return right(made.compute(**options))


def on_each_worker(client: Any, made: Any) -> bool:
    """The whole column on each worker by itself: left to choose, Dask may give all parts to one."""

    def on(address: str) -> bool:
        assert until(lambda: not client.who_has()), "parts of the computation before would be taken as they are"
        return right(client.compute(made, workers=[address]).result())

    return all(on(address) for address in client.run(os.getpid))


def plugins(client: Any) -> list[list[str]]:
    """The names of daskgrad's plugins on each worker."""
    found = client.run(lambda dask_worker: [name for name in dask_worker.plugins if name.startswith("daskgrad-")])
    return list(found.values())


def until(true: Callable[[], bool], seconds: float = 120) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()


def workers(client: Any) -> set[int]:
    return set(client.run(os.getpid, on_error="ignore").values())


@pytest.fixture(autouse=True)
def nothing_left(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """No test leaves a plan on the shared workers, or a file."""
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster")  # it has its files elsewhere
    folder = tmp_path_factory.mktemp("temporaries")  # of this test alone: others may compute on this machine
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    gc.collect()
    assert not list(folder.glob("daskgrad-*"))
    if "cluster" in request.fixturenames:
        assert until(lambda: not any(plugins(request.getfixturevalue("cluster"))))


# -------------------------------------------------------------------------------- c12


@pytest.mark.cluster
def test_case_c12_a_large_model_goes_once_to_each_worker(client: Any, tmp_path: Path) -> None:
    made = column(model(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert computed(made)
        assert on_each_worker(client, made)
    assert opened(tmp_path) == dict.fromkeys(workers(client), 1)
    assert [len(names) for names in plugins(client)] == [1, 1]
    del made
    gc.collect()
    assert until(lambda: not any(plugins(client)))


@pytest.mark.cluster
@pytest.mark.slow
def test_case_c12_also_to_workers_that_restart_or_join_late(tmp_path: Path) -> None:
    from distributed import Client, LocalCluster

    strict = {"distributed.admin.large-graph-warning-threshold": "1 MB"}
    place: dict[str, Any] = {
        "threads_per_worker": 1,
        "host": "127.0.0.1",
        "dashboard_address": "127.0.0.1:0",
        "worker_dashboard_address": None,
    }
    with dask.config.set(strict), LocalCluster(n_workers=1, silence_logs=50, **place) as local, Client(local) as client:
        made = column(model(tmp_path))
        assert on_each_worker(client, made)
        first = workers(client)
        for pid in first:
            os.kill(pid, signal.SIGKILL)  # nobody is left to have it from
        assert until(lambda: len(workers(client) - first) == 1)
        assert on_each_worker(client, made)
        local.scale(2)
        client.wait_for_workers(2)
        assert on_each_worker(client, made)
        assert opened(tmp_path) == dict.fromkeys(first | workers(client), 1)


@pytest.mark.cluster
def test_case_c12_the_graph_does_not_grow_with_the_model(client: Any, tmp_path: Path) -> None:
    sent: dict[tuple[int, int], int] = {}
    send = client._send_to_scheduler

    def weigh(message: Any) -> None:
        if message.get("op") == "update-graph":
            sent[case] = sum(memoryview(part).nbytes for part in message["expr_ser"].frames)
        send(message)

    client._send_to_scheduler = weigh
    try:
        for case in ((200_000, 2), (200_000, 50), (400_000, 2), (400_000, 50)):
            assert right(column(model(tmp_path, case[0]), case[1]).compute())
    finally:
        del client._send_to_scheduler
    assert abs(sent[400_000, 50] - sent[200_000, 50]) < 100
    assert abs(sent[400_000, 2] - sent[200_000, 2]) < 100
    assert max(sent.values()) < 200_000


# -------------------------------------------------------------------------------- wherever it is computed


@pytest.mark.cluster
@pytest.mark.slow
def test_a_column_made_with_a_client_runs_on_every_scheduler(client: Any, tmp_path: Path) -> None:
    made = column(model(tmp_path, 200_000), 4)
    assert computed(made)
    for scheduler in ("synchronous", "threads", "processes"):
        assert computed(made, scheduler=scheduler), scheduler


@pytest.mark.slow
def test_on_processes_it_goes_through_one_private_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = column(model(tmp_path), 8)
    with dask.config.set(scheduler="processes", num_workers=2):
        assert computed(made)
    assert set(opened(tmp_path).values()) == {1}
    (folder,) = tmp_path.glob("daskgrad-*")
    (file,) = folder.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    assert file.stat().st_size > 8 * WEIGHTS
    del made
    gc.collect()
    assert not folder.exists()


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["expression", "map_partitions", "bag"])
def test_a_column_made_before_any_client_runs_on_one_made_later(cluster: Any, tmp_path: Path, kind: str) -> None:
    net = model(tmp_path, 200_000)
    made = carried(kind, net)
    key = made.dask  # lowered, without a client
    assert key is not None
    with cluster.as_current():
        assert computed(made)


def carried(kind: str, net: Any) -> Any:
    if kind == "expression":
        return column(net, 4)
    if kind == "bag":
        records = db.from_sequence([{"x": float(x)} for x in range(8)], npartitions=2)
        return dg.grad_column(records, by_model(), shared={"m": net})
    return dg.grad_column(frame(4), by_model(), shared={"m": net}, randomness="same")


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["expression", "map_partitions", "bag"])
def test_the_keys_are_the_same_with_and_without_a_client(cluster: Any, tmp_path: Path, kind: str) -> None:
    net = model(tmp_path, 200_000)
    without = set(carried(kind, net).dask)
    with cluster.as_current():
        assert set(carried(kind, net).dask) == without


@pytest.mark.cluster
def test_a_client_that_was_not_the_current_one_gets_the_bytes(cluster: Any, tmp_path: Path) -> None:
    made = column(model(tmp_path, 200_000), 4)
    assert right(cluster.compute(made).result())
    assert not any(plugins(cluster))


@pytest.mark.cluster
def test_nothing_is_registered_for_a_small_plan(client: Any, tmp_path: Path) -> None:
    made = column(model(tmp_path, 10), 4)
    assert computed(made)
    assert not any(plugins(client))


# -------------------------------------------------------------------------------- as long as it is needed


@pytest.mark.cluster
def test_what_was_persisted_goes_on_without_its_column(client: Any, tmp_path: Path) -> None:
    """The column is garbage as soon as `persist` returns, and its tasks have hardly begun."""
    kept = column(model(tmp_path, 200_000), 20).persist()
    gc.collect()
    assert computed(kept)
    assert all(plugins(client)), "a lost part would be computed again"
    del kept
    gc.collect()
    assert until(lambda: not any(plugins(client)))


@pytest.mark.cluster
def test_parts_taken_apart_keep_it(client: Any, tmp_path: Path) -> None:
    parts = column(model(tmp_path, 200_000), 4).to_delayed()
    gc.collect()
    assert right(pd.concat(dask.compute(*parts)))


@pytest.mark.cluster
def test_equal_columns_share_it(client: Any, tmp_path: Path) -> None:
    net = model(tmp_path, 200_000)
    first, second = column(net, 4), column(net, 4)
    assert computed(first)
    del first
    gc.collect()
    assert computed(second)
    assert [len(names) for names in plugins(client)] == [1, 1]


def test_a_ticket_whose_plan_is_gone_says_what_to_do() -> None:
    for where in (b"P", b"F/nowhere/at/all"):
        with pytest.raises(PlanError, match=r"no longer on process \d+ on .*Make the column again and keep it"):
            _ship.unpack(bytes(32) + where)


def test_anyone_else_who_pickles_it_gets_all_of_it() -> None:
    data = bytes(range(32)) + b"\x80" * 100
    assert pickle.loads(pickle.dumps(_blob.Blob(data, 32))) == data


def test_a_forked_copy_removes_nothing(tmp_path: Path) -> None:
    (tmp_path / "plan").touch()
    _blob._remove(str(tmp_path), os.getpid() + 1)
    assert (tmp_path / "plan").exists()
