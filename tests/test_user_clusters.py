"""Clusters that users make: `dask scheduler` and `dask worker` as separate programs, also over TLS.

What is asked for: everything works with daskgrad installed there and nothing else; what is missing somewhere fails the
job with one sentence that names the worker, and costs no worker; who has no certificate can neither submit nor read.
"""

from __future__ import annotations

import os
import ssl
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import dask.bag as db
import pandas as pd
import pytest
import torch
from compare import assert_cells, in_equal_parts
from distributed import Client, Security
from programs import Cluster, certificates, first_byte, of_version, presenting, programs, with_modules, without

import daskgrad as dg

pytestmark = pytest.mark.cluster

FRAME = pd.DataFrame({"x": [1.0, 2.0, 3.0, 4.0], "y": [0.5, 0.25, 2.0, 1.0]}, index=list("opqr"))
MODEL = torch.nn.Linear(1, 1).double()
SHORT = 90  # seconds: "within seconds" on a machine that is much too busy; what hangs, hangs for ever


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * x * y


def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x.reshape(1)).sum() - y) ** 2


@pytest.fixture(scope="module", autouse=True)
def by_value() -> Iterator[None]:
    """What this module defines travels as from a script or a notebook: the programs know nothing of the tests."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A scheduler that has neither daskgrad nor torch; workers: one that has all, one without daskgrad, one with an old one."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "old").mkdir()
    (folder / "old" / "of_a_user.py").write_text("def something_else(x):\n    return x\n")
    workers: Mapping[str, Mapping[str, str]] = {
        "good": with_modules(folder / "old"),
        "bare": without(folder / "bare", "daskgrad"),
        "aged": of_version(folder / "aged", "0.0.1"),
    }
    with programs(folder, workers, scheduler=without(folder / "nothing", "daskgrad", "torch")) as made:
        yield made


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.address, timeout="180s") as client:
        client.wait_for_workers(3, timeout=180)
        before = client.run(os.getpid)
        yield client
        assert client.run(os.getpid) == before, "a worker was lost or restarted"


def address_of(client: Client, name: str) -> str:
    found: str = next(address for address, worker in client.scheduler_info(n_workers=-1)["workers"].items() if worker["name"] == name)
    return found


def on(client: Client, name: str, column: Any) -> Any:
    """The column's result, computed by the worker `name` alone."""
    return client.compute(column, workers=[address_of(client, name)], allow_other_workers=False).result(timeout=SHORT)


# -------------------------------------------------------------------------------- installed there


def test_every_verb_works_where_it_is_installed(client: Client) -> None:
    """Nothing but daskgrad on the workers is needed, and the scheduler needs neither it nor torch."""
    lazy = in_equal_parts(FRAME, 2)
    column = dg.grad_column(lazy, product, "x")
    assert_cells(list(on(client, "good", column)), [1.0, 1.0, 12.0, 8.0])
    found = on(client, "good", dg.derivatives(lazy, product, {"value": (), "cross": ("x", "y")}))
    assert_cells(list(found["cross"]), [2.0, 4.0, 6.0, 8.0])
    bag = db.from_sequence(FRAME.to_dict("records"), npartitions=2)
    assert_cells(list(on(client, "good", dg.grad_column(bag, product, "y"))), [1.0, 4.0, 9.0, 16.0])
    filtered = lazy.assign(slope=column)
    filtered = filtered[filtered.x > 2]
    assert_cells(list(on(client, "good", filtered)["slope"]), [12.0, 8.0])


# -------------------------------------------------------------------------------- missing, or another


def test_a_worker_without_daskgrad_is_named(client: Client) -> None:
    """The job fails within seconds with one sentence that names the worker; the worker lives on."""
    column = dg.grad_column(in_equal_parts(FRAME, 2), product, "x")
    began = time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"daskgrad cannot be used on the worker at \S+ \(process \d+\): No module named 'daskgrad'\. Install"
    ):
        on(client, "bare", column)
    assert time.monotonic() - began < SHORT
    assert client.submit(sum, [1, 2], workers=["bare"]).result(timeout=SHORT) == 3


def test_a_worker_with_another_daskgrad_is_named(client: Client) -> None:
    column = dg.grad_column(in_equal_parts(FRAME, 2), product, "x")
    expected = rf"daskgrad is 0\.0\.1 on worker tcp://\S+ on \S+, but the call was made with daskgrad {dg.__version__}\. Install"
    with pytest.raises(dg.PlanError, match=expected):
        on(client, "aged", column)


@pytest.mark.parametrize("old", [False, True], ids=["missing", "another version"])
def test_a_module_of_the_users_that_differs_there_is_named(
    client: Client, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    name = "of_a_user" if old else "only_at_home"
    (tmp_path / f"{name}.py").write_text("def square(x):\n    return x * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    column = dg.grad_column(in_equal_parts(FRAME, 2), __import__(name).square)
    with pytest.raises(dg.PlanError, match=rf"cannot be loaded on worker tcp://\S+ on .*{name}"):
        on(client, "good", column)


# -------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return certificates(tmp_path_factory.mktemp("tls") / "ours", "scheduler", "worker", "client")


def security(files: Mapping[str, str]) -> Security:
    own = {"tls_client_cert": files["client"], "tls_client_key": files["client-key"]}
    return Security(tls_ca_file=files["ca"], require_encryption=True, **own)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, files: dict[str, str]) -> Iterator[Cluster]:
    with programs(tmp_path_factory.mktemp("guarded"), ["one"], security=files) as made:
        yield made


def test_it_works_over_tls_with_certificate_files(guarded: Cluster, files: dict[str, str]) -> None:
    assert guarded.address.startswith("tls://127.0.0.1:")
    with Client(guarded.address, security=security(files), timeout="180s") as client:
        client.wait_for_workers(1, timeout=180)
        (worker,) = client.scheduler_info()["workers"]
        assert worker.startswith("tls://127.0.0.1:")
        assert_cells(list(dg.grad_column(in_equal_parts(FRAME, 2), product, "x").compute()), [1.0, 1.0, 12.0, 8.0])
        found = dg.mean_gradient(in_equal_parts(FRAME, 2), loss, "model", shared={"model": MODEL}).compute()
    for name, gradient in dg.mean_gradient(FRAME, loss, "model", shared={"model": MODEL}).items():
        assert_cells([found[name]], [gradient])


def test_without_a_certificate_nothing_is_submitted_or_read(guarded: Cluster, files: dict[str, str], tmp_path: Path) -> None:
    """Neither the scheduler, who is submitted to, nor a worker, who holds the data, talks to who has none of ours."""
    strange = certificates(tmp_path / "strange", "client")
    with Client(guarded.address, security=security(files), timeout="180s") as client:
        (worker,) = client.scheduler_info()["workers"]
        for address in (guarded.address, worker):
            assert first_byte(address, presenting(files["client"], files["client-key"]))
            for context in (presenting(), presenting(strange["client"], strange["client-key"])):
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    first_byte(address, context)


def test_dasks_own_client_is_told_that_it_cannot_connect(guarded: Cluster, files: dict[str, str], tmp_path: Path) -> None:
    strange = certificates(tmp_path / "strange", "client")
    stranger = security({**strange, "ca": files["ca"]})
    for place, how in ((guarded.address, stranger), (guarded.address.replace("tls://", "tcp://"), None)):
        with pytest.raises(OSError, match=r"Timed out trying to connect|closed"):
            Client(place, security=how, timeout="1s")
