"""local_client: private, tuned, and gone afterwards. What is asked of it stands in its docstring."""

from __future__ import annotations

import http.client
import logging
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import dask
import psutil
import pytest
from distributed import Client, LocalCluster, Security, Status
from programs import first_byte, presenting, wait_until

from daskgrad import PlanError, local_client
from daskgrad._local_cluster import MALLOC_SETTINGS, LocalClient

pytestmark = pytest.mark.cluster

LOOPBACK = "127.0.0.1"


def listeners() -> list[tuple[str, int]]:
    """(address, port) of everything that this process and its children listen on."""
    found = []
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        found += [tuple(c.laddr) for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return found


def workers_of(client: Client) -> list[int]:
    return list(client.run(os.getpid, on_error="ignore").values())


def websocket_status(link: str, origin: str) -> int:
    """The HTTP status that a browser gets which opens the dashboard's live data from a page of `origin`."""
    address = urlsplit(link)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    token = session_token(connection)
    connection.request(
        "GET",
        "/status/ws",
        headers={
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Origin": origin,
            "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Protocol": f"bokeh, {token}",
        },
    )
    status = connection.getresponse().status
    connection.close()
    return status


def session_token(connection: http.client.HTTPConnection) -> str:
    """What the page itself hands to its script, so that the origin is the only thing that differs between two calls."""
    connection.request("GET", "/status")
    page = connection.getresponse().read().decode()
    return page.split('"token":"')[1].split('"')[0]


@pytest.fixture(scope="module")
def environ() -> dict[str, str]:
    return dict(os.environ)


@pytest.fixture(scope="module")
def client(environ: dict[str, str]) -> Iterator[LocalClient]:
    with local_client(n_workers=2, dashboard_port=0) as client:
        yield client


def test_case_c18_every_listener_is_on_loopback(client: LocalClient) -> None:
    found = listeners()
    assert len(found) >= 2 + 3 * 2  # scheduler: comm, http; each worker: nanny, worker, http
    assert {address for address, _ in found} == {LOOPBACK}


def test_it_runs_work_and_is_the_default(client: LocalClient) -> None:
    assert client.submit(sum, [1, 2, 3]).result() == 6
    assert Client.current() is client


def test_pages_of_other_sites_cannot_read_the_dashboard(client: LocalClient) -> None:
    port = urlsplit(client.dashboard_link).port
    assert websocket_status(client.dashboard_link, f"http://{LOOPBACK}:{port}") == 101
    assert websocket_status(client.dashboard_link, "http://evil.example") == 403
    assert websocket_status(client.dashboard_link, f"http://evil.example:{port}") == 403


def test_workers_get_the_malloc_settings(client: LocalClient) -> None:
    for settings in client.run(lambda: dict(os.environ)).values():
        assert {name: settings[name] for name in MALLOC_SETTINGS} == MALLOC_SETTINGS
        assert settings["OMP_NUM_THREADS"] == "1"


def test_os_environ_stays_as_it_was(client: LocalClient, environ: dict[str, str]) -> None:
    # pytest itself keeps the name of the running test there
    now = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    assert now == {name: value for name, value in environ.items() if name != "PYTEST_CURRENT_TEST"}


def test_case_c19_a_busy_port_is_no_error_and_no_warning() -> None:
    with socket.socket() as taken, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        taken.bind((LOOPBACK, 0))
        taken.listen()
        busy = taken.getsockname()[1]
        with local_client(n_workers=0, dashboard_port=busy) as client:
            port = urlsplit(client.dashboard_link).port
            assert port not in (busy, 0)
            assert (LOOPBACK, port) in listeners()
    assert not [w for w in caught if "already in use" in str(w.message)]


def test_case_c19_a_proxys_link_is_the_clients_own() -> None:
    link = "https://hub.example/proxy/{port}/status"
    with dask.config.set({"distributed.dashboard.link": link}), local_client(n_workers=0, dashboard_port=0) as client:
        port = client.scheduler_info()["services"]["dashboard"]
        assert client.dashboard_link == link.format(port=port)
        assert (LOOPBACK, port) in listeners()


def test_without_a_dashboard_no_page_is_served() -> None:
    with local_client(n_workers=0, dashboard_port=None) as client:
        port = client.scheduler_info()["services"]["dashboard"]
        connection = http.client.HTTPConnection(LOOPBACK, port, timeout=60)
        connection.request("GET", "/status")
        assert connection.getresponse().status == 404
        connection.close()


def test_further_websocket_origins_can_be_named() -> None:
    with local_client(n_workers=0, dashboard_port=0, websocket_origins=["hub.example:443"]) as client:
        assert websocket_status(client.dashboard_link, "https://hub.example:443") == 101
        assert websocket_status(client.dashboard_link, "https://other.example:443") == 403


@pytest.mark.parametrize("limit", ["512MB", 512 * 10**6, "699 MB"])
def test_too_little_memory_is_refused_before_anything_starts(limit: str | int) -> None:
    before = psutil.Process().children(recursive=True)
    with pytest.raises(PlanError, match=r"at least\s+700 MB"):
        local_client(n_workers=1, memory_limit=limit)
    assert psutil.Process().children(recursive=True) == before


def test_a_share_of_memory_that_is_too_small_is_refused() -> None:
    with pytest.raises(PlanError, match="fewer workers by n_workers="):
        local_client(n_workers=10_000)


@pytest.mark.parametrize("name", ["host", "dashboard_address", "processes"])
def test_arguments_that_would_undo_it_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match=f"got {name}, which it sets itself"):
        local_client(n_workers=0, **{name: "0.0.0.0"})


@pytest.mark.parametrize(
    ("given", "says"), [({"workers": 2}, "Did you mean 'n_workers'?"), ({"n_workers": -1}, "n_workers=-1 is not possible")]
)
def test_arguments_that_make_no_sense_start_nothing(given: dict[str, int], says: str) -> None:
    before = psutil.Process().children(recursive=True)
    with pytest.raises(PlanError, match=re.escape(says)):
        local_client(**given)
    assert psutil.Process().children(recursive=True) == before


def test_a_worker_killed_twice_comes_back_for_good() -> None:
    """Dask looks, so long after each loss, whether the worker is back, and forgets it if it is just starting again."""
    before = dict(os.environ)
    began = time.monotonic()
    with local_client(n_workers=1, dashboard_port=None, silence_logs=logging.CRITICAL) as client:
        wait = 1 + time.monotonic() - began  # seconds: longer than this machine takes to start a worker again
        with dask.config.set({"distributed.deploy.lost-worker-timeout": f"{wait}s"}):
            first = workers_of(client)[0]
            os.kill(first, signal.SIGKILL)
            look = time.monotonic() + wait
            second = wait_for_another(client, first)
            time.sleep(max(0.0, look - 0.1 - time.monotonic()))
            os.kill(second, signal.SIGKILL)  # so that Dask's look after the first loss falls into the second restart
            third = wait_for_another(client, second)
            time.sleep(wait + 0.2)  # past the look after the second loss
        assert workers_of(client) == [third]
        assert client.submit(sum, [1, 2]).result(timeout=180) == 3
        assert len(client.cluster.workers) == 1
    assert dict(os.environ) == before  # restarts borrow it too


def wait_for_another(client: Client, old: int) -> int:
    """The process id of the worker that replaces `old`. Its nanny is asked: a message to who just died waits for long."""
    (nanny,) = client.cluster.workers.values()
    wait_until(lambda: nanny.pid not in (None, old) and client.scheduler_info()["workers"], "another worker process")
    found: int = nanny.pid
    return found


def test_closing_the_client_ends_its_cluster() -> None:
    client = local_client(n_workers=1, dashboard_port=None)
    cluster, pid = client.cluster, workers_of(client)[0]
    with client:
        pass
    assert cluster.status == Status.closed
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    client.close()  # again does no harm


def test_a_client_of_the_users_is_left_alone(client: LocalClient) -> None:
    """It is the default again afterwards, and on its cluster nothing has changed."""
    with LocalCluster(n_workers=0, host=LOOPBACK, dashboard_address=f"{LOOPBACK}:0") as theirs, Client(theirs) as user:
        before = (dict(user.cluster.scheduler.plugins), sorted(dask.config.config), user.scheduler_info()["workers"])
        with local_client(n_workers=0, dashboard_port=None) as ours:
            assert Client.current() is ours
        assert Client.current() is user
        assert (dict(user.cluster.scheduler.plugins), sorted(dask.config.config), user.scheduler_info()["workers"]) == before
        assert user.status == "running"


SCRIPT = """
    import os, sys, time
    from daskgrad import local_client

    if __name__ == "__main__":
        client = local_client(n_workers=1, dashboard_port=None)
        print(*client.run(os.getpid).values(), flush=True)
        {ending}
"""


def run_script(folder: Path, ending: str, send: signal.Signals | None = None) -> tuple[int, str, str]:
    """(exit code, stdout without the worker's pid, stderr) of a script that starts a client and ends so, or by a signal."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(ending=ending))
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    assert process.stdout
    worker = int(process.stdout.readline())
    if send is not None:
        time.sleep(0.5)
        process.send_signal(send)
    out, err = process.communicate(timeout=180)
    wait_until(lambda: not psutil.pid_exists(worker), "the end of the worker")
    return process.returncode, out, err


def test_the_interpreters_exit_ends_it_without_a_word(tmp_path: Path) -> None:
    assert run_script(tmp_path, "sys.exit(3)") == (3, "", "")


def test_ctrl_c_ends_it_and_says_one_thing(tmp_path: Path) -> None:
    gather = "client.gather(client.map(time.sleep, [1] * 50, pure=False))"
    code, out, err = run_script(tmp_path, gather, signal.SIGINT)
    assert (code, out) == (-signal.SIGINT, "")
    assert err.count("KeyboardInterrupt") == err.count("Traceback (most recent call last)") == 1
    assert "AllExit" not in err
    assert "cannot schedule new futures" not in err


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_program_that_is_ended(tmp_path: Path, sent: signal.Signals) -> None:
    """A batch system ends a job by SIGTERM, and by SIGKILL where that does not help: the workers go too, soon after."""
    code, out, _ = run_script(tmp_path, "client.gather(client.map(time.sleep, [1] * 50, pure=False))", sent)
    assert (code, out) == (-sent, "")


def test_work_is_done_without_a_word(tmp_path: Path) -> None:
    """Nothing is printed but what the script prints, by no process."""
    column = "dg.grad_column(dd.from_pandas(pd.Series([1.0, 2.0, 3.0], name='x'), npartitions=2), lambda x: x * x)"
    ending = f"import pandas as pd, dask.dataframe as dd, daskgrad as dg; print(list({column}.compute()))"
    assert run_script(tmp_path, ending) == (0, "[2.0, 4.0, 6.0]\n", "")


UNGUARDED = {
    "at the top": "import daskgrad\nclient = daskgrad.local_client(n_workers=1)\n",
    "in a function": "import daskgrad\ndef main():\n    daskgrad.local_client(n_workers=1)\nif True:\n    main()\n",
}


@pytest.mark.parametrize("where", UNGUARDED)
def test_a_script_without_a_guard_is_told_so_in_one_sentence(tmp_path: Path, where: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED[where])
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("daskgrad._errors.PlanError: local_client() starts processes, and each of them runs")
    assert lines[-1].endswith('Put what starts there under `if __name__ == "__main__":`.')
    assert done.stderr.count("Traceback") == 1


GUARDED = """
import multiprocessing
import daskgrad

def main():
    with daskgrad.local_client(n_workers=0, dashboard_port=None) as client:
        print(client.status)

if {test}:
    main()
"""


@pytest.mark.parametrize("test", ['__name__ == "__main__"', "multiprocessing.parent_process() is None"])
@pytest.mark.parametrize("module", [False, True])
def test_a_guard_is_seen(tmp_path: Path, test: str, module: bool) -> None:
    (tmp_path / "script.py").write_text(GUARDED.format(test=test))
    how = ["-m", "script"] if module else ["script.py"]
    done = subprocess.run([sys.executable, *how], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "running\n", "")


def context_of(security: Security) -> ssl.SSLContext:
    """A client's context with its certificate, which asks nothing of the server: only the server decides here."""
    context: ssl.SSLContext = security.get_connection_args("client")["ssl_context"]
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def test_tls_keeps_out_who_has_no_certificate() -> None:
    with local_client(n_workers=1, dashboard_port=None, tls=True) as client:
        assert client.submit(sum, [1, 2, 3]).result() == 6
        (worker,) = client.scheduler_info()["workers"]
        for address in (client.scheduler.address, worker):
            assert address.startswith(f"tls://{LOOPBACK}")
            assert len(first_byte(address, context_of(client.security))) == 1
            for context in (presenting(), context_of(Security.temporary())):
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    first_byte(address, context)


def test_tls_without_cryptography_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)  # as if it were not installed
    with pytest.raises(PlanError, match=r"pip install daskgrad\[tls\]"):
        local_client(n_workers=0, tls=True)
