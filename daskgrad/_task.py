"""What runs where the data is: one part, from its inputs to its file, as one task that never raises.

A part's own piece of the graph travels as bytes and is run here, node after node: what cannot be opened fails inside the task and
costs no worker, what the part is made from is seen on the way, and the whole can be run again in a process of its own.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import functools
import hashlib
import importlib.metadata
import json
import os
import pickle
import platform
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from dask.typing import Key

from . import _ship, _write
from ._errors import DaskgradError, carried, fit_to_travel

PACKAGES = ("daskgrad", "torch", "pandas", "numpy", "pyarrow", "dask")


class Subgraph:
    """The nodes that only one part needs, in the order to run them. Away from the caller it is bytes.

    Args:
        nodes: of the graph, by key: a node need not know its own.
        outside: the keys that they need of the rest of the graph, in the order in which `run` gets their values.
        key: whose value is the part.
    """

    def __init__(self, nodes: Mapping[Key, Any], outside: Sequence[Key], key: Key) -> None:
        self.nodes, self.outside, self.key = dict(nodes), list(outside), key

    def __reduce__(self) -> tuple[Any, ...]:
        import cloudpickle

        return bytes, (cloudpickle.dumps((self.nodes, self.outside, self.key)),)

    def run(self, given: Sequence[Any], watched: dict[Key, str | None]) -> Any:
        """The part. `watched`: the keys whose content is wanted; their digests are put there."""
        from ._parts import content

        values = dict(zip(self.outside, given, strict=True))
        last_use = {below: key for key, node in self.nodes.items() for below in node.dependencies}
        for key, node in self.nodes.items():
            values[key] = node(values)
            if key in watched:
                watched[key] = content(values[key])
            for below in node.dependencies:
                if last_use[below] == key and below != self.key:
                    values.pop(below, None)
        return values[self.key]


@dataclass(frozen=True)
class Order:
    """What to do with a part.

    Attributes:
        number: the part's.
        name: its file's.
        folder, aside: where it goes, and where it is written.
        recipe: the digest of all that is done; None: it cannot be told.
        inputs: the digests of its inputs, None for those in `watched` and `told`.
        watched: {key: place among the inputs} of inputs that this part's own piece makes.
        told: places of the inputs whose digests come with the task.
        sources: the inputs in words.
        plans: the derivatives in words.
        schema: as Arrow's IPC has it.
        index: write the index.
        compression: of the file.
        job: whose part it is: it is renamed into place only while that job is the folder's.
        isolate: run it in a process of its own.
        timeout: seconds that it may take; None: as long as it takes.
        tolerance: the file is there, and is compared with what is made here; None: it is written.
    """

    number: int
    name: str
    folder: str
    aside: str
    recipe: str | None
    inputs: list[str | None]
    watched: dict[Key, int]
    told: list[int]
    sources: list[Any]
    plans: list[Any]
    schema: bytes
    index: bool
    compression: str
    job: str
    isolate: bool = False
    timeout: float | None = None
    tolerance: float | None = None


@dataclass
class Outcome:
    """What became of a part.

    Attributes:
        number: the part's.
        status: "written" · "untyped": a column holds only missing values, so that its type is not known yet · "failed" ·
            "superseded": another job writes here now · "alike", "differs": the file that was there.
        rows, size, seconds: of a written part: rows, bytes, and how long it took.
        types: of columns whose dtype does not tell: {name: Arrow type}.
        error: of a failed part: the exception, pickled.
        fatal: every other part would fail in the same way.
        difference: of a file that differs: where, in words.
        environment: of the process that made it.
    """

    number: int
    status: str
    rows: int = 0
    size: int = 0
    seconds: float = 0.0
    types: dict[str, Any] | None = None
    error: bytes | None = None
    fatal: bool = False
    difference: str | None = None
    environment: dict[str, str] | None = None

    def exception(self) -> BaseException:
        assert self.error is not None
        return cast(BaseException, pickle.loads(self.error))


def run(parcel: Subgraph | bytes, order_bytes: bytes, *given: Any) -> Outcome:
    """Compute a part and put it into its folder. What goes wrong is in the outcome."""
    order: Order = pickle.loads(order_bytes)
    started = time.perf_counter()
    try:
        with _marked(order):
            if order.isolate or order.timeout is not None:
                from ._isolated import run_isolated

                outcome = run_isolated(parcel, order, given)
            else:
                outcome = make(parcel, order, given)
    except Exception as error:
        outcome = Outcome(order.number, "failed", error=packed(error), fatal=fatal(error))
    outcome.seconds = time.perf_counter() - started
    return outcome


def make(parcel: Subgraph | bytes, order: Order, given: Sequence[Any]) -> Outcome:
    """The part, computed and written here."""
    subgraph = opened(parcel)
    watched: dict[Key, str | None] = dict.fromkeys(order.watched)
    split = len(subgraph.outside)
    frame = subgraph.run(given[:split], watched)
    schema = pa.ipc.read_schema(pa.py_buffer(order.schema))
    types = _write.found(frame, schema)
    schema = _write.filled(schema, types)
    here = environment(bool(order.plans))
    if _write.open_columns(schema):
        return Outcome(order.number, "untyped", types=types, environment=here)
    inputs = list(order.inputs)
    for key, place in order.watched.items():
        inputs[place] = watched[key]
    for place, digest in zip(order.told, given[split:], strict=True):
        inputs[place] = digest
    identity = {
        "part": order.number,
        "recipe": order.recipe,
        "inputs": together(inputs),
        "sources": order.sources,
        "derivatives": order.plans,
        "environment": here,
    }
    made = _write.table(frame, schema, order.index)
    if order.tolerance is not None:
        difference = _write.difference(made, Path(order.folder) / order.name, order.compression, order.tolerance)
        return Outcome(order.number, "alike" if difference is None else "differs", len(frame), difference=difference, environment=here)
    ours = functools.partial(_is_ours, Path(order.aside), order.job)
    size = _write.put(made, identity, Path(order.folder), Path(order.aside), order.name, order.compression, ours)
    status = "superseded" if size is None else "written"
    return Outcome(order.number, status, len(frame), size or 0, types=types, environment=here)


def opened(parcel: Subgraph | bytes) -> Subgraph:
    return parcel if isinstance(parcel, Subgraph) else Subgraph(*pickle.loads(parcel))


def digest_of(value: Any) -> str | None:
    """The content of an input that several parts share."""
    from ._parts import content

    return content(value)


def together(inputs: Sequence[str | None]) -> str | None:
    """One digest for all inputs of a part; None where one of them cannot be told."""
    return None if None in inputs else hashlib.sha256(json.dumps(list(inputs)).encode()).hexdigest()


def environment(torch: bool) -> dict[str, str]:
    """What else the bits of a result depend on: versions, and which instructions this processor has."""
    found = {name: version for name in PACKAGES if (torch or name != "torch") and (version := _version(name)) is not None}
    found["python"] = ".".join(map(str, sys.version_info[:2]))
    found["cpu"] = platform.machine()
    if torch:
        import torch as library

        found["cpu"] += f" {library.backends.cpu.get_cpu_capability()}"
    return found


@functools.cache
def _version(name: str) -> str | None:
    if name == "daskgrad":
        return _ship._version()
    if name == "torch":
        return _ship._torch_version()
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_ours(aside: Path, job: str) -> bool:
    try:
        return (aside / "job").read_text() == job
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _marked(order: Order) -> Iterator[None]:
    """A mark beside the folder while a part runs: should its process die, the next run knows which parts it was at."""
    mark = Path(order.aside) / f"part-{order.number}.running"
    mark.write_text(f"{socket.gethostname()} {os.getpid()}")
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


def packed(error: Exception) -> bytes:
    """An exception as bytes that give it back where they are opened, or a stand-in that says the same."""
    if isinstance(error, DaskgradError):
        return pickle.dumps(fit_to_travel(error))
    return pickle.dumps(carried(error))


def fatal(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# -------------------------------------------------------------------------------- in the graph


@functools.cache
def shim(function: str) -> bytes:
    """A function of this module, pickled by value: `pickle.loads(shim("run"))` needs no daskgrad, only its call does."""
    import cloudpickle

    def call(*args: Any, **kwargs: Any) -> Any:
        import os
        import socket

        try:
            from daskgrad import _task
        except ImportError as error:
            missing = str(error)
        else:
            return getattr(_task, FUNCTION)(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821
        where = f"{socket.gethostname()} (process {os.getpid()})"
        raise RuntimeError(
            f"daskgrad cannot be used on the worker at {where}: {missing}. Install the same daskgrad there as where the call was made."
        )

    bare = types.FunctionType(
        call.__code__.replace(co_filename="<daskgrad>"),
        {"__name__": "__daskgrad__", "__builtins__": builtins, "FUNCTION": function},
        function,
    )
    bare.__qualname__, bare.__module__ = function, "__daskgrad__"
    return cast(bytes, cloudpickle.dumps(bare))


def workers_environment(torch: bool) -> Callable[[], dict[str, str]]:
    """For `client.run`: the environment there."""
    return functools.partial(pickle.loads(shim("environment")), torch)
