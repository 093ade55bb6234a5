"""Values by their content, in words that are the same in every process: what decides whether two computations are one.

A pickle does not do: it orders sets by hash, names imported functions without their code, and holds addresses. So this walks
values itself. Functions and classes of the user's own modules count by their code, with all that they look up; those of installed
packages by name and version. What cannot be told apart by content raises `Unstable`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import site
import struct
import sys
import sysconfig
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa

from ._torch import torch_if_imported

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

_NOWHERE = sys.maxsize


class Unstable(Exception):
    """A value whose content cannot be told: another process could not know it again."""


def fingerprint(value: Any) -> str:
    """The sha256 of `value`'s content: equal for equal content, also in other processes.

    Raises:
        Unstable: it holds something whose content cannot be told, such as a lock.
    """
    return Fingerprint().of(value)


class Fingerprint:
    """Fingerprints of several values that have parts in common, each of which is walked once.

    Args:
        special: first asked about every value: bytes that stand for it, or None to walk it.
    """

    def __init__(self, special: Callable[[Any], bytes | None] | None = None) -> None:
        self._special = special
        self._known: dict[int, tuple[Any, bytes]] = {}  # the value is kept, so that its id stays its own
        self._open: dict[int, int] = {}  # being walked now, with their depths
        self._closed_at = _NOWHERE  # the least depth at which a cycle has closed

    def of(self, value: Any) -> str:
        return self._digest(value).hex()

    def _digest(self, value: Any) -> bytes:
        given = self._special(value) if self._special is not None else None
        if given is not None:
            return _sha(b"special", given)
        plain = _plain(value)
        if plain is not None:
            return _sha(type(value).__name__.encode(), plain)
        if id(value) in self._known:
            return self._known[id(value)][1]
        if id(value) in self._open:
            self._closed_at = min(self._closed_at, self._open[id(value)])
            return _sha(b"cycle", str(len(self._open) - self._open[id(value)]).encode())
        depth = self._open[id(value)] = len(self._open)
        try:
            digest = self._walk(value)
        finally:
            del self._open[id(value)]
        if self._closed_at >= depth:
            self._closed_at = _NOWHERE
        if self._closed_at is _NOWHERE or isinstance(value, types.FunctionType | type):
            self._known[id(value)] = (value, digest)
        return digest

    def _all(self, kind: str, parts: Iterable[Any]) -> bytes:
        return _sha(kind.encode(), *[self._digest(part) for part in parts])

    def _walk(self, value: Any) -> bytes:
        container = _CONTAINERS.get(type(value))
        if container is not None:
            return container(self, value)
        for kinds, walk in _WALKS:
            if isinstance(value, kinds):
                return walk(self, value)
        if _is_torch(value):
            return _torch(self, value)
        return _object(self, value)


def _sha(*pieces: Buffer) -> bytes:
    found = hashlib.sha256()
    for piece in pieces:
        found.update(memoryview(piece).nbytes.to_bytes(8, "little"))
        found.update(piece)
    return found.digest()


def _plain(value: Any) -> bytes | None:
    kind = type(value)
    if value is None or kind in (bool, int):
        return repr(value).encode()
    if kind is float:
        return struct.pack("<d", value)
    if kind is str:
        text: str = value
        return text.encode("utf-8", "surrogatepass")
    return bytes(value) if kind in (bytes, bytearray) else None


# -------------------------------------------------------------------------------- containers and plain values


def _sequence(walk: Fingerprint, value: Any) -> bytes:
    return walk._all(type(value).__qualname__, value)


def _mapping(walk: Fingerprint, value: Mapping[Any, Any]) -> bytes:
    return walk._all(type(value).__qualname__, [part for item in value.items() for part in item])


def _set(walk: Fingerprint, value: Any) -> bytes:
    return _sha(type(value).__qualname__.encode(), *sorted(walk._digest(part) for part in value))


def _enum(walk: Fingerprint, value: enum.Enum) -> bytes:
    return walk._all("enum", [type(value), value.name, value.value])


def _partial(walk: Fingerprint, value: functools.partial[Any]) -> bytes:
    return walk._all("partial", [value.func, value.args, value.keywords])


def _property(walk: Fingerprint, value: property) -> bytes:
    return walk._all("property", [value.fget, value.fset])


def _wrapped(walk: Fingerprint, value: Any) -> bytes:
    return walk._all(type(value).__qualname__, [value.__func__])


def _lazy(walk: Fingerprint, value: functools.cached_property[Any]) -> bytes:
    return walk._all("cached_property", [value.func])


def _nothing(walk: Fingerprint, value: Any) -> bytes:
    return _sha(type(value).__qualname__.encode())


# -------------------------------------------------------------------------------- code


def _code(walk: Fingerprint, value: types.CodeType) -> bytes:
    """What it does: neither where it stands nor how its lines are numbered."""
    names = (value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars, value.co_name)
    counts = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags)
    return walk._all("code", [value.co_code, value.co_consts, names, counts, value.co_exceptiontable])


def _function(walk: Fingerprint, value: types.FunctionType) -> bytes:
    name = [value.__module__, value.__qualname__]
    inside = [value.__defaults__, value.__kwdefaults__, *_cells(value), vars(value)]
    if is_library(value.__module__):
        written = [value.__code__] if "<locals>" in value.__qualname__ or "<lambda>" in value.__qualname__ else []
        return walk._all("library function", [*name, _release(value.__module__), *written, *inside])
    globals_ = [part for item in _looked_up(value) for part in item]
    return walk._all("function", [value.__code__, *inside, *globals_])


def _cells(fn: types.FunctionType) -> Iterator[Any]:
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing in it yet
            yield "empty cell"


def _looked_up(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The globals that the function and those written inside it use; of a user's module what is used of it."""
    names = _names(fn.__code__)
    for name in sorted(names):
        if name not in fn.__globals__:
            continue
        value = fn.__globals__[name]
        yield name, value
        if isinstance(value, types.ModuleType) and not is_library(value.__name__):
            yield from _of_module(value, names, {value.__name__})


def _of_module(module: types.ModuleType, names: set[str], seen: set[str]) -> Iterator[tuple[str, Any]]:
    for name in sorted(names & vars(module).keys()):
        value = vars(module)[name]
        yield f"{module.__name__}.{name}", value
        if isinstance(value, types.ModuleType) and not is_library(value.__name__) and value.__name__ not in seen:
            yield from _of_module(value, names, seen | {value.__name__})


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


def _builtin(walk: Fingerprint, value: Any) -> bytes:
    owner = getattr(value, "__self__", None)
    bound = [] if owner is None or isinstance(owner, types.ModuleType) else [owner]
    return walk._all("builtin", [value.__module__ or "", value.__qualname__, *bound])


def _ufunc(walk: Fingerprint, value: np.ufunc) -> bytes:
    if value.__name__.endswith("(vectorized)"):  # a Python function, out of reach
        raise Unstable(f"a numpy.ufunc ({value.__name__})")
    return walk._all("ufunc", [value.__name__, _release("numpy")])


def _method(walk: Fingerprint, value: types.MethodType) -> bytes:
    return walk._all("method", [value.__func__, value.__self__])


def _descriptor(walk: Fingerprint, value: Any) -> bytes:
    return walk._all("descriptor", [value.__objclass__.__module__, value.__qualname__])


def _module(walk: Fingerprint, value: types.ModuleType) -> bytes:
    return walk._all("module", [value.__name__, _release(value.__name__) if is_library(value.__name__) else ""])


_OF_THE_CLASS = {"__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__", "__static_attributes__", "__qualname__"}


def _class(walk: Fingerprint, value: type) -> bytes:
    name = [value.__module__, value.__qualname__]
    if is_library(value.__module__):
        return walk._all("library class", [*name, _release(value.__module__)])
    own = {k: v for k, v in vars(value).items() if k not in _OF_THE_CLASS and not k.startswith("_abc_")}
    items = [part for key in sorted(own) for part in (key, own[key])]
    return walk._all("class", [value.__qualname__, value.__bases__, *items])


@functools.cache
def is_library(module: str | None) -> bool:
    """Whether a module belongs to Python or an installed package, and so counts by its version and not by its code."""
    top = (module or "").partition(".")[0]
    if top == "daskgrad" or top in sys.builtin_module_names:
        return True
    if top == "__main__" or top not in sys.modules:
        return False
    file = getattr(sys.modules[top], "__file__", None) or next(iter(getattr(sys.modules[top], "__path__", [])), None)
    if file is None:
        return False
    places = Path(file).resolve().parents
    return any(folder in places for folder in _installed())


@functools.cache
def _installed() -> tuple[Path, ...]:
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple({Path(path).resolve() for path in [*paths, *site.getsitepackages(), site.getusersitepackages()] if path})


@functools.cache
def _release(module: str) -> str:
    """The version of the package that `module` belongs to; "" where there is none to be found."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return ""
    return _version_of(top) or _own_word(top) or next(filter(None, map(_version_of, _distributions().get(top, []))), "")


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _own_word(top: str) -> str:
    """What a package that is called otherwise than its distribution (sklearn, yaml) says itself."""
    told = getattr(sys.modules.get(top), "__version__", "")
    return told if isinstance(told, str) else ""


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Every package's distributions; it takes seconds, for the lists of all installed files are read."""
    return importlib.metadata.packages_distributions()


# -------------------------------------------------------------------------------- numbers and tables


def _array(walk: Fingerprint, value: np.ndarray[Any, Any]) -> bytes:
    head = [value.dtype.str if value.dtype.names is None else repr(value.dtype), value.shape]
    if value.dtype.hasobject:
        return walk._all("array", [*head, *value.ravel().tolist()])
    return _sha(b"array", walk._all("head", head), np.ascontiguousarray(value).reshape(-1).view(np.uint8).data if value.nbytes else b"")


def _number(walk: Fingerprint, value: np.generic) -> bytes:
    return walk._all("number", [value.dtype.str, value.tobytes()])


def _dtype(walk: Fingerprint, value: Any) -> bytes:
    parts: list[Any] = [type(value).__qualname__, repr(value)]
    if isinstance(value, pd.CategoricalDtype):
        parts += [value.categories, value.ordered]
    return walk._all("dtype", parts)


def _frame(walk: Fingerprint, value: pd.DataFrame) -> bytes:
    columns = [value.iloc[:, place].array for place in range(value.shape[1])]
    return walk._all("frame", [value.columns, value.index, *columns])


def _series(walk: Fingerprint, value: pd.Series) -> bytes:
    return walk._all("series", [value.name, value.index, value.array])


def _index(walk: Fingerprint, value: pd.Index) -> bytes:
    if isinstance(value, pd.RangeIndex):
        return walk._all("range", [value.name, value.start, value.stop, value.step])
    if isinstance(value, pd.MultiIndex):
        return walk._all("levels", [list(value.names), *[value.get_level_values(k).array for k in range(value.nlevels)]])
    return walk._all("index", [value.name, value.array])


def _column(walk: Fingerprint, value: Any) -> bytes:
    """The cells of a pandas array, however it is cut into chunks."""
    if isinstance(value, pd.arrays.NumpyExtensionArray):
        return walk._digest(value.to_numpy())
    if isinstance(value, pd.Categorical):
        return walk._all("categorical", [value.dtype, value.codes])
    if not hasattr(value, "__arrow_array__"):
        return walk._all("column", [value.dtype, np.asarray(value)])
    try:
        arrow = pa.array(value)
    except (pa.ArrowException, TypeError):
        return walk._all("column", [value.dtype, np.asarray(value, dtype=object)])
    return walk._all("column", [value.dtype, arrow])


def _arrow(walk: Fingerprint, value: Any) -> bytes:
    chunks = value.combine_chunks() if isinstance(value, pa.ChunkedArray) else value
    whole = pa.concat_arrays([chunks]) if isinstance(chunks, pa.Array) else chunks
    batch = pa.RecordBatch.from_arrays([whole], ["_"])
    return _sha(b"arrow", str(whole.type).encode(), memoryview(batch.serialize()))


def _arrow_type(walk: Fingerprint, value: Any) -> bytes:
    return _sha(type(value).__qualname__.encode(), str(value).encode())


def _is_torch(value: Any) -> bool:
    return torch_if_imported() is not None and isinstance(value, _torch_kinds())


def _torch_kinds() -> tuple[type, ...]:
    torch = torch_if_imported()
    return torch.Tensor, torch.nn.Module, torch.dtype, torch.device, torch.Size, torch.jit.ScriptFunction


def _torch(walk: Fingerprint, value: Any) -> bytes:
    torch = torch_if_imported()
    if isinstance(value, torch.Tensor):
        return _tensor(walk, value)
    if isinstance(value, torch.jit.ScriptModule):
        return walk._all("script", [str(value.inlined_graph), value.training, dict(value.state_dict())])
    if isinstance(value, torch.jit.ScriptFunction):
        return walk._all("script", [str(value.inlined_graph)])
    if isinstance(value, torch.nn.Module):
        return walk._all("module", [type(value), *[part for item in _attributes(value).items() for part in item]])
    return _sha(type(value).__qualname__.encode(), str(value).encode())


def _tensor(walk: Fingerprint, value: Any) -> bytes:
    torch = torch_if_imported()
    head = walk._all("head", [type(value).__qualname__, str(value.dtype), list(value.shape), value.requires_grad])
    try:
        flat = value.detach().cpu().to_dense() if value.layout != torch.strided else value.detach().cpu()
        flat = flat.resolve_conj().resolve_neg().contiguous().reshape(-1)
        held = flat.view(torch.uint8).numpy()
    except RuntimeError as error:
        raise Unstable(f"a {type(value).__name__} ({error})") from error
    return _sha(b"tensor", head, memoryview(held) if held.size else b"")


# -------------------------------------------------------------------------------- any other object


def _attributes(value: Any) -> dict[str, Any]:
    """What it holds, without what it only remembers."""
    cached = {name for kind in type(value).__mro__ for name, part in vars(kind).items() if isinstance(part, functools.cached_property)}
    return {name: part for name, part in vars(value).items() if name not in cached}


def _object(walk: Fingerprint, value: Any) -> bytes:
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return walk._all("dataclass", [type(value), *[part for name in names for part in (name, getattr(value, name))]])
    if hasattr(value, "__wrapped__") and callable(value):  # functools.lru_cache and its like
        return walk._all("wrapped", [type(value).__qualname__, value.__wrapped__])
    try:
        reduced = value.__reduce_ex__(4)
    except Exception as error:
        raise Unstable(f"a {type(value).__module__}.{type(value).__qualname__} ({error})") from error
    if isinstance(reduced, str):
        return walk._all("global", [type(value), reduced])
    make, args, state, items, pairs = (*reduced, None, None, None)[:5]
    if isinstance(state, dict) and hasattr(value, "__dict__") and state.keys() == vars(value).keys():
        state = _attributes(value)
    held: list[Hashable | Any] = [type(value), make, args, state]
    return walk._all("object", [*held, *(items or ()), *[part for pair in pairs or () for part in pair]])


_CONTAINERS: dict[type, Callable[[Fingerprint, Any], bytes]] = {
    **dict.fromkeys((list, tuple), _sequence),
    **dict.fromkeys((dict, OrderedDict, types.MappingProxyType), _mapping),
    **dict.fromkeys((set, frozenset), _set),
    complex: lambda walk, value: walk._all("complex", [value.real, value.imag]),
    slice: lambda walk, value: walk._all("slice", [value.start, value.stop, value.step]),
    range: lambda walk, value: walk._all("range", [value.start, value.stop, value.step]),
}

# The first that fits; subclasses of the user's own go by their class and content (`_object`).
_WALKS: list[tuple[Any, Callable[[Fingerprint, Any], bytes]]] = [
    (enum.Enum, _enum),
    (functools.partial, _partial),
    (types.FunctionType, _function),
    (types.CodeType, _code),
    (type, _class),
    (types.ModuleType, _module),
    (types.MethodType, _method),
    (types.BuiltinFunctionType, _builtin),
    (np.ufunc, _ufunc),
    ((types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType), _descriptor),
    (property, _property),
    (functools.cached_property, _lazy),
    ((staticmethod, classmethod), _wrapped),
    ((weakref.ref, types.EllipsisType, types.NotImplementedType), _nothing),
    (np.ndarray, _array),
    (np.generic, _number),
    ((np.dtype, pd.api.extensions.ExtensionDtype), _dtype),
    (pd.DataFrame, _frame),
    (pd.Series, _series),
    (pd.Index, _index),
    (pd.api.extensions.ExtensionArray, _column),
    ((pa.Array, pa.ChunkedArray), _arrow),
    ((pa.DataType, pa.Field, pa.Schema), _arrow_type),
]
