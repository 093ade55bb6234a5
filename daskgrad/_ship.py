"""A plan as bytes that only the task itself opens, and the small function that opens them.

What a worker cannot unpickle before a task has begun takes the worker down and leaves the client waiting. So a Dask
graph of daskgrad holds bytes and callables of Python and Dask, nothing else: the scheduler needs neither daskgrad nor
torch, and a worker that lacks something says so in one sentence.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import importlib.metadata
import inspect
import io
import os
import pickle
import socket
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from ._blob import Blob, fetch, is_ticket
from ._errors import GraphError, PlanError
from ._lines import arrived, files_of
from ._torch import torch_if_imported

if TYPE_CHECKING:
    from ._plan import Plan

DIGEST = 32  # bytes of a sha256, in front of every packed plan: its identity without reading all of it again
KEPT_PLANS = 8  # in each thread
KEPT_BYTES = 2**28  # in each thread; the plan used last stays whatever its size


def pack(plan: Plan, captured: Mapping[str, Any] | None = None) -> bytes:
    """`plan` as bytes: a snapshot of the row function and its shared arguments as they are now.

    Args:
        plan: the plan.
        captured: what the user handed over, by the name to use in a message. None: the plan's `fn` and `shared`.

    Raises:
        PlanError: something in it cannot be sent to a worker; the message names the captured variable.
        GraphError: a tensor in it carries a graph, which no other process can continue.
    """
    problem: Exception
    try:
        body = _pickled(plan)
    except Exception as error:
        problem = error
    else:
        made_by = (_version(), _torch_version())
        digest = hashlib.sha256(repr(made_by).encode())
        digest.update(body)
        # The plan lies at the end as it is: within another pickle it would be copied where it is opened, and it may be a large model.
        return b"".join([digest.digest(), pickle.dumps((*made_by, files_of(plan), len(body)), protocol=5), body])
    given = {"fn": getattr(plan, "fn", None), **getattr(plan, "shared", {})} if captured is None else captured
    raise _unshippable(problem, given)


def unpack(parcel: bytes | Blob) -> Plan:
    """The plan in `parcel`: each thread has a copy of its own, opened once and then kept.

    Modules are not safe to share between threads, and opening a large model for every partition is slow.

    Args:
        parcel: what `pack` made; or the ticket that travelled in its place, whose plan this process then has.

    Raises:
        PlanError: another daskgrad or torch here than where it was packed, or something that it needs is missing here.
    """
    plan: Plan | None = _kept.get(identity(parcel))
    if plan is None:
        whole = _whole(parcel)
        plan = _opened(whole)
        _kept.put(identity(parcel), plan, len(whole))
    return plan


def snapshot(parcel: bytes | Blob) -> Plan:
    """The plan as it was packed, in a copy that nothing has run: a run may leave marks, such as which parameters ask for gradients."""
    return _opened(_whole(parcel))


def redeemed(value: Any) -> Any:
    """The packed plan, where `value` is the ticket that travelled to this process in its place; any other value as it is."""
    if not isinstance(value, bytes) or not is_ticket(value, DIGEST):
        return value
    found = fetch(value, DIGEST, worker())
    return value if found is None else found


def identity(parcel: bytes | Blob) -> bytes:
    """The digest of the plan's content: equal for equal calls."""
    return parcel.digest if isinstance(parcel, Blob) else parcel[:DIGEST]


def _whole(parcel: bytes | Blob) -> bytes:
    if isinstance(parcel, Blob):
        return parcel.data
    if not is_ticket(parcel, DIGEST):
        return parcel
    found = fetch(parcel, DIGEST, worker())
    if found is None:
        raise PlanError(
            f"The row function and its shared arguments are no longer on {here()}: they are kept there as long as the "
            "column that needs them, and that column or its client is gone. Make the column again and keep it until "
            "the computation is done."
        )
    return found


def here() -> str:
    """This process in words, for a message: the worker's address where there is one."""
    at = worker()
    where = f"process {os.getpid()}" if at is None else f"worker {at.address}"
    return f"{where} on {socket.gethostname()}"


def worker() -> Any:
    """The worker of `dask.distributed` in whose task this runs, or None."""
    distributed = sys.modules.get("distributed")
    if distributed is None:
        return None
    try:
        return distributed.get_worker()
    except ValueError:  # its way to say: not in a task
        return None


# -------------------------------------------------------------------------------- the function in the graph


def _opener() -> Callable[..., Any]:
    """The task's function. It uses nothing from this module: it travels by value to where there may be no daskgrad."""

    def run(part: Any, parcel: bytes, choice: Any = None, partition_info: Any = None) -> Any:
        import os
        import socket

        try:
            from daskgrad._dask import run_part
        except ImportError as error:
            missing = str(error)
        else:
            return run_part(part, parcel, choice, partition_info)
        where = f"{socket.gethostname()} (process {os.getpid()})"
        raise RuntimeError(
            f"daskgrad cannot be used on the worker at {where}: {missing}. Install the same daskgrad there as where the call was made."
        )

    return run


@functools.cache
def shim() -> bytes:
    """`run(part, parcel, choice, partition_info)` pickled by value: `pickle.loads(shim())` needs no daskgrad."""
    import cloudpickle

    code = _opener().__code__.replace(co_filename="<daskgrad>")  # the same bytes wherever daskgrad is installed
    bare = types.FunctionType(code, {"__name__": "__daskgrad__", "__builtins__": builtins}, "run", (None, None))
    bare.__qualname__, bare.__module__ = "run", "__daskgrad__"
    return cast(bytes, cloudpickle.dumps(bare))


# -------------------------------------------------------------------------------- opening


class _Kept(threading.local):
    """The plans opened by this thread, the one used last at the end."""

    def __init__(self) -> None:
        self.plans: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()

    def get(self, digest: bytes) -> Any:
        if digest not in self.plans:
            return None
        self.plans.move_to_end(digest)
        return self.plans[digest][0]

    def put(self, digest: bytes, plan: Any, size: int) -> None:
        self.plans[digest] = (plan, size)
        while len(self.plans) > 1 and (len(self.plans) > KEPT_PLANS or self._size() > KEPT_BYTES):
            self.plans.popitem(last=False)

    def _size(self) -> int:
        return sum(size for _, size in self.plans.values())


_kept = _Kept()


def _opened(parcel: bytes) -> Plan:
    theirs, their_torch, files, size = pickle.loads(memoryview(parcel)[DIGEST:])
    arrived(files)
    _must_agree("daskgrad", theirs, _version())
    _must_agree("torch", their_torch, _torch_version())
    try:
        return cast("Plan", pickle.loads(memoryview(parcel)[len(parcel) - size :]))
    except Exception as error:
        problem = error
    raise PlanError(_cannot_open(problem)) from problem


def _must_agree(package: str, theirs: str | None, ours: str | None) -> None:
    if _release(theirs) == _release(ours):
        return
    found = "is not installed" if ours is None else f"is {ours}"
    raise PlanError(
        f"{package} {found} on {here()}, but the call was made with {package} {theirs}. "
        f"Install {package} {_release(theirs)} on every worker."
    )


def _cannot_open(problem: Exception) -> str:
    if isinstance(problem, ModuleNotFoundError):
        what, remedy = f"module `{problem.name}` is missing there", f"install `{problem.name}` on every worker"
    elif isinstance(problem, ImportError | AttributeError):
        what, remedy = f"{problem}", "install the same version of your own modules on every worker"
    else:
        what, remedy = f"{type(problem).__name__}: {problem}", "check that what it takes along can be unpickled"
    return (
        f"The row function cannot be loaded on {here()}: {what}. To help, {remedy}, or define the function in your "
        "script or notebook, from where it travels by itself."
    )


def _release(version: str | None) -> str | None:
    """The version without the local part, which says how torch was built ("2.13.0+cpu")."""
    return None if version is None else version.partition("+")[0]


def _version() -> str:
    from . import __version__

    return __version__


def _torch_version() -> str | None:
    """torch's version without importing it; None where there is no torch."""
    torch = torch_if_imported()
    if torch is not None:
        return str(torch.__version__)
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


# -------------------------------------------------------------------------------- packing, and what went wrong


class _CarriesGraphError(Exception):
    """A tensor with a graph was met while pickling."""


def _pickled(value: Any) -> bytes:
    """`value` by cloudpickle, refusing the tensors that a pickle would quietly cut from their graph."""
    import cloudpickle

    torch = torch_if_imported()

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if _has_graph(obj):
                raise _CarriesGraphError
            if torch is not None and isinstance(obj, torch.TypedStorage):
                return _typed_storage, (obj._untyped_storage, obj.dtype)
            if torch is not None and isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
                return _storage, (_memory(obj),)
            return super().reducer_override(obj)

    with io.BytesIO() as file:
        Pickler(file, protocol=5).dump(value)
        return file.getvalue()


def _memory(storage: Any) -> pickle.PickleBuffer:
    """A tensor's memory. torch's own pickle of it also holds its address, so that equal calls would have different keys."""
    torch = torch_if_imported()
    return pickle.PickleBuffer(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())  # (bytes,), the same memory


def _storage(data: bytearray) -> Any:
    import torch

    return torch.frombuffer(data, dtype=torch.uint8).untyped_storage() if len(data) else torch.UntypedStorage(0)


def _typed_storage(storage: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _has_graph(value: Any) -> bool:
    torch = torch_if_imported()
    return torch is not None and isinstance(value, torch.Tensor) and value.grad_fn is not None


def _unshippable(problem: Exception, captured: Mapping[str, Any]) -> PlanError | GraphError:
    cut = isinstance(problem, _CarriesGraphError)
    sentence = _named(captured)
    if cut:
        return GraphError(
            f"{sentence}, which carries a graph: it was computed from tensors that require a gradient. A graph cannot "
            "be continued in another process, and a copy would quietly lose it. Compute it inside the row function, or "
            "pass `.detach()` of it."
        )
    error = PlanError(
        f"{sentence}, which cannot be sent to a worker ({type(problem).__name__}: {problem}). A row function can take "
        "along numbers, arrays, tensors, modules and functions. Make the object inside the row function, or pass what "
        "it yields with `shared=`."
    )
    error.__cause__ = problem
    return error


def _named(captured: Mapping[str, Any]) -> str:
    """Which captured variable it is: "The row function `price` captures `lock` (a _thread.lock)"."""
    for name, value in captured.items():
        if _ships(value):
            continue
        subject = f"The row function `{_called(value)}`" if name == "fn" else f"The shared argument `{name}`"
        path = _blamed(value, {id(value)})
        if not path:
            return f"{subject} is a {_kind(value)}" if name != "fn" else f"{subject} is an object"
        through = "".join(f" through `{step}`" for step, _ in path[:-1])
        last, culprit = path[-1]
        return f"{subject} {'captures' if name == 'fn' else 'holds'} `{last}` (a {_kind(culprit)}){through}"
    return "The row function with its shared arguments is a value"


def _blamed(value: Any, seen: set[int]) -> list[tuple[str, Any]]:
    """The way from `value` down to the part of it that does not ship: names, and the object under each."""
    for name, part in _parts(value):
        if id(part) in seen:
            continue
        seen.add(id(part))
        if not _ships(part):
            return [(name, part), *_blamed(part, seen)]
    return []


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What `value` takes along, by the name that its author knows it by."""
    if isinstance(value, functools.partial):
        bound = inspect.signature(value.func).bind_partial(*value.args) if value.args else None
        yield from (bound.arguments if bound else {}).items()
        yield from value.keywords.items()
        yield _called(value.func), value.func
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
        yield _called(value.__func__), value.__func__
    elif isinstance(value, types.FunctionType):
        yield from _captured(value)
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{place}]", part) for place, part in enumerate(value))
    elif isinstance(value, type):
        yield from vars(value).items()
    else:
        yield from vars(value).items() if hasattr(value, "__dict__") else ()


def _captured(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a cell that nothing has been put in yet
            continue
    yield from ((name, fn.__globals__[name]) for name in sorted(_names(fn.__code__)) if name in fn.__globals__)
    with_defaults = [parameter for parameter in inspect.signature(fn).parameters.values() if parameter.default is not parameter.empty]
    yield from ((parameter.name, parameter.default) for parameter in with_defaults)
    yield from vars(fn).items()


def _names(code: types.CodeType) -> set[str]:
    """The names that `code` and the functions written inside it look up."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


def _ships(value: Any) -> bool:
    try:
        _pickled(value)
    except Exception:
        return False
    return True


def _called(value: Any) -> str:
    if isinstance(value, functools.partial):
        return _called(value.func)
    return getattr(value, "__name__", None) or type(value).__name__


def _kind(value: Any) -> str:
    if _has_graph(value):
        return "tensor"
    module = type(value).__module__
    return type(value).__qualname__ if module == "builtins" else f"{module}.{type(value).__qualname__}"
