"""Dask clusters as their users make them: `dask scheduler` and `dask worker` as programs of their own, on 127.0.0.1.

A program sees daskgrad as it is here, none at all, or another version of it, by what stands first on its PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import daskgrad as dg

LOOPBACK = "127.0.0.1"
HOUSE = Path(dg.__file__).resolve().parent
PATIENCE = 180.0  # seconds; what takes longer hangs

_NONE_AT_ALL = """
import importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None

sys.meta_path.insert(0, Refuse())
"""


def wait_until(true: Callable[[], Any], what: str, seconds: float = PATIENCE) -> None:
    """Return when `true()` is; fail when it is not within `seconds`."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.05)


def without(folder: Path, *modules: str) -> dict[str, str]:
    """The environment of a Python that has not got `modules`."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_NONE_AT_ALL.format(names=set(modules)))
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(HOUSE.parent)])}


def of_version(folder: Path, version: str) -> dict[str, str]:
    """The environment of a Python whose daskgrad is the one tested here, under another version number."""
    package = folder / "daskgrad"
    package.mkdir(parents=True)
    for path in HOUSE.iterdir():
        if path.name not in ("__init__.py", "__pycache__"):
            (package / path.name).symlink_to(path)
    source = (HOUSE / "__init__.py").read_text()
    changed = source.replace(f'__version__ = "{dg.__version__}"', f'__version__ = "{version}"')
    assert changed != source
    (package / "__init__.py").write_text(changed)
    return {"PYTHONPATH": str(folder)}


def with_modules(*folders: Path) -> dict[str, str]:
    """The environment of a Python that has this daskgrad and finds the modules in `folders`."""
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), str(HOUSE.parent)])}


@dataclass
class Cluster:
    """A scheduler and workers that are programs; all of them end with `programs`.

    Attributes:
        address: the scheduler's.
        scheduler: its process.
        workers: the worker programs by name. Each is a nanny, whose child does the work.
    """

    folder: Path
    security: Mapping[str, str]  # command line options, by program or for both
    settings: Mapping[str, str]
    dashboard: bool | str = False
    address: str = ""
    scheduler: subprocess.Popen[bytes] = field(init=False)
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def start_scheduler(self, env: Mapping[str, str] | None = None) -> None:
        """Start it and learn its address."""
        number = len(list(self.folder.glob("scheduler*.json")))
        file = self.folder / f"scheduler{number}.json"
        pages = ["--dashboard-address", f"{LOOPBACK}:0"] if self.dashboard else ["--no-dashboard"]
        pages += ["--dashboard-prefix", self.dashboard] if isinstance(self.dashboard, str) else []
        options = ["--port", "0", *pages, "--scheduler-file", str(file), *self._security("scheduler")]
        self.scheduler = self._program(f"scheduler{number}", ["scheduler", *options], env)
        wait_until(lambda: file.exists() and file.read_text().endswith("}"), "the scheduler's address")
        self.address = json.loads(file.read_text())["address"]

    def start_worker(self, name: str, env: Mapping[str, str] | None = None, address: str | None = None, *options: str) -> None:
        """Start a worker of one thread. `address`: of the scheduler, where it is to be reached by another way."""
        place = ["--name", name, "--nthreads", "1", "--no-dashboard", "--local-directory", str(self.folder)]
        command = ["worker", address or self.address, *place, *options, *self._security("worker")]
        self.workers[name] = self._program(name, command, env)

    def log(self, name: str) -> str:
        """What a program has printed."""
        return (self.folder / f"{name}.log").read_text()

    def _security(self, program: str) -> list[str]:
        given = self.security
        if not given:
            return []
        files = ["--tls-ca-file", given["ca"], "--tls-cert", given[program], "--tls-key", given[f"{program}-key"]]
        return ["--protocol", "tls", *files]

    def _program(self, name: str, arguments: Sequence[str], env: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context((self.folder / f"{name}.log").open("wb"))
        command = [sys.executable, "-m", "dask", *arguments[:1], *arguments[1:], "--host", LOOPBACK]
        full = {**os.environ, "OMP_NUM_THREADS": "1", **with_modules(), **self.settings, **(env or {})}
        # Not in the house, which Python would find first: `-m` looks in the current folder.
        process = subprocess.Popen(command, env=full, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        self._stack.callback(_end, process)
        return process


@contextlib.contextmanager
def programs(
    folder: Path,
    workers: Mapping[str, Mapping[str, str]] | Sequence[str] = (),
    *,
    scheduler: Mapping[str, str] | None = None,
    security: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    dashboard: bool | str = False,
) -> Iterator[Cluster]:
    """A scheduler and its workers.

    Args:
        folder: an empty folder for logs and files.
        workers: names, or the environment of each by its name.
        scheduler: the scheduler's environment.
        security: what `certificates` returns; None: no TLS.
        config: Dask's configuration for all of them.
        dashboard: the scheduler has one; a text: with this prefix to its pages.
    """
    settings = {f"DASK_{key.upper().replace('.', '__').replace('-', '_')}": str(value) for key, value in (config or {}).items()}
    cluster = Cluster(folder, security or {}, settings, dashboard)
    with cluster._stack:
        cluster.start_scheduler(scheduler)
        for name in workers:
            cluster.start_worker(name, workers[name] if isinstance(workers, Mapping) else None)
        yield cluster


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program and what it started: a nanny takes its worker along."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait(15)


# -------------------------------------------------------------------------------- TLS


def first_byte(address: str, context: ssl.SSLContext) -> bytes:
    """What a Dask server says first to a client that comes with this context."""
    where = urlsplit(address)
    with (
        socket.create_connection((where.hostname, where.port), timeout=60) as plain,
        context.wrap_socket(plain) as encrypted,
    ):
        return encrypted.recv(1)


def presenting(certificate: str | None = None, key: str | None = None) -> ssl.SSLContext:
    """A client's context with this certificate or none. It asks nothing of the server, which alone decides then."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate is not None:
        context.load_cert_chain(certificate, key)
    return context


def certificates(folder: Path, *names: str) -> dict[str, str]:
    """A certificate authority and, signed by it, certificates for `names`: paths of PEM files by name and `name-key`."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    folder.mkdir()
    authority = ec.generate_private_key(ec.SECP256R1())
    issuer = _subject("daskgrad's tests")
    root = _certificate(issuer, issuer, authority.public_key(), authority=True).sign(authority, hashes.SHA256())
    found = {"ca": _written(folder / "ca.pem", root)}
    for name in names:
        key = ec.generate_private_key(ec.SECP256R1())
        signed = _certificate(_subject(name), issuer, key.public_key(), authority=False).sign(authority, hashes.SHA256())
        found[name] = _written(folder / f"{name}.pem", signed)
        found[f"{name}-key"] = _written_key(folder / f"{name}-key.pem", key)
    return found


def _subject(name: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _certificate(subject: Any, issuer: Any, key: Any, *, authority: bool) -> Any:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=12))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(LOOPBACK))]), critical=False)
    )


def _written(path: Path, certificate: Any) -> str:
    from cryptography.hazmat.primitives import serialization

    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return str(path)


def _written_key(path: Path, key: Any) -> str:
    from cryptography.hazmat.primitives import serialization

    plain = serialization.NoEncryption()
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return str(path)


# -------------------------------------------------------------------------------- a network that can be cut


class Wire:
    """A TCP connection to `address` that a test can cut or freeze, in both directions: a proxy on 127.0.0.1."""

    def __init__(self, address: str) -> None:
        self._target = urlsplit(address)
        self._listener = socket.create_server((LOOPBACK, 0))
        self.address = f"{self._target.scheme}://{LOOPBACK}:{self._listener.getsockname()[1]}"
        self._flows = threading.Event()
        self._flows.set()
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def freeze(self) -> None:
        """From now on nothing arrives, and nobody is told: as behind a router that has lost its way."""
        self._flows.clear()

    def thaw(self) -> None:
        """What waited arrives."""
        self._flows.set()

    def cut(self) -> None:
        """Every connection is closed, and no other is accepted."""
        # A thread that waits in accept() or recv() wakes at a shutdown, not at a close.
        for end in [self._listener, *self._ends]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        """Cut it, and wait for its threads."""
        self.thaw()
        self.cut()
        for thread in self._threads:
            thread.join(10)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((self._target.hostname, self._target.port))
                self._ends += [near, far]
                pairs = [(near, far), (far, near)]
                started = [threading.Thread(target=self._pump, args=pair) for pair in pairs]
                self._threads += started
                for thread in started:
                    thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # either end was closed
            while data := source.recv(2**16):
                self._flows.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
