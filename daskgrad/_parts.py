"""The parts of a Dask collection as they will be computed: a graph for each, and what it is made from.

A part's identity has two halves: its *recipe*, which is all that is done, and its *inputs*, which is what it is done to. Dask's own
keys say neither: they differ between processes for equal work, and name imported functions without their code.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
from dask._task_spec import Alias, DataNode, GraphNode, Task, TaskRef, convert_legacy_graph
from dask.core import toposort
from dask.typing import Key

from . import _dask, _ship
from ._blob import Blob, plan_key
from ._fingerprint import Fingerprint, Unstable
from ._names import function_name
from ._task import Subgraph

Graph = dict[Key, Any]


@dataclass
class Collection:
    """A Dask DataFrame as the graph that will run, one key for each part, unfused: partitions keep their numbers."""

    graph: Graph
    keys: list[Key]
    meta: pd.DataFrame


def collect(data: Any) -> Collection:
    """The parts of a Dask DataFrame or Series. Nothing is computed."""
    frame = data.to_frame() if data.ndim == 1 else data
    lowered = frame.optimize(fuse=False)
    graph = convert_legacy_graph(dict(lowered.__dask_graph__()))
    keys = list(lowered.__dask_keys__())
    return Collection(needed(graph, keys), keys, lowered._meta)


def needed(graph: Graph, keys: Iterable[Key]) -> Graph:
    found: Graph = {}
    todo = list(keys)
    while todo:
        key = todo.pop()
        if key not in found and key in graph:
            found[key] = graph[key]
            todo.extend(graph[key].dependencies)
    return found


def split(graph: Graph, parts: Mapping[int, Key]) -> tuple[Graph, dict[int, Subgraph]]:
    """(what several parts share, {number: what it alone needs}) of the graph of these parts."""
    graph = needed(graph, parts.values())
    order = toposort(graph, {key: node.dependencies & graph.keys() for key, node in graph.items()})
    owner: dict[Key, int | None] = {}
    for number, key in parts.items():
        owner[key] = None if key in owner else number
    for key in reversed(order):
        mine = owner[key]
        if is_future(graph[key]):
            owner[key] = mine = None  # only the client can open it
        for below in graph[key].dependencies:
            owner[below] = mine if owner.get(below, mine) == mine else None
    shared = {key: node for key, node in graph.items() if owner[key] is None}
    pieces: dict[int, Graph] = {number: {} for number in parts}
    for key in order:
        if (alone := owner[key]) is not None:
            pieces[alone][key] = graph[key]
    return shared, {number: _piece(nodes, parts[number]) for number, nodes in pieces.items()}


def _piece(nodes: Graph, key: Key) -> Subgraph:
    outside = dict.fromkeys(below for node in nodes.values() for below in sorted(node.dependencies, key=str) if below not in nodes)
    if key not in nodes:
        outside[key] = None
    return Subgraph(nodes, list(outside), key)


# -------------------------------------------------------------------------------- what a part is made from


@dataclass
class Identity:
    """What a part is made from.

    Attributes:
        recipe: the digest of all that is done; None where that cannot be told.
        inputs: of each input in order its digest, or None where only its content will tell.
        leaves: the keys of those inputs.
        sources: the inputs in words, the first few of them.
    """

    recipe: str | None
    inputs: list[str | None]
    leaves: list[Key]
    sources: list[Any]

    @property
    def open(self) -> list[int]:
        """Places of the inputs whose digest is not known yet."""
        return [place for place, digest in enumerate(self.inputs) if digest is None]


@dataclass
class Identities:
    """The identities of the parts of `collection`.

    Args:
        collection: the parts.
        by_content: files count by their content, not by path, size and time.
        extra: what else decides what the files hold.
    """

    collection: Collection
    by_content: bool = False
    extra: Any = None
    unstable: list[str] = field(default_factory=list)
    plans: list[dict[str, Any]] = field(default_factory=list)
    files: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._recipe: dict[Key, str | None] = {}
        self._leaves: dict[Key, tuple[Key, ...]] = {}
        self._inputs: dict[Key, tuple[str | None, Any]] = {}  # of a leaf: its digest and its words
        self._refs: list[Key] = []
        self._numbers: list[Any] = []
        self._walk = Fingerprint(self._special)
        graph = self.collection.graph
        for key in toposort(graph, {key: node.dependencies & graph.keys() for key, node in graph.items()}):
            self._visit(key, graph[key])

    def of(self, key: Key) -> Identity:
        leaves = self._leaves[key]
        inputs = [self._inputs[leaf] for leaf in leaves]
        recipe = self._recipe[key]
        recipe = None if recipe is None else self._walk.of((recipe, self.extra))
        return Identity(recipe, [digest for digest, _ in inputs], list(leaves), [words for _, words in inputs[:16]])

    def _visit(self, key: Key, node: GraphNode) -> None:
        self._refs, self._numbers = [], []
        if isinstance(node, DataNode):
            self._data(key, node)
        elif not node.dependencies and not isinstance(node, Alias):
            self._source(key, node)
        else:
            self._recipe[key] = self._told(lambda: self._walk.of(_content(node)), key)
            if not node.dependencies <= set(self._refs):
                self._recipe[key] = None  # it refers to something in a way that is not known here
            leaves = dict.fromkeys(leaf for ref in self._refs for leaf in self._leaves.get(ref, ()))
            if self._numbers:  # a partition's number and bounds, which a function of the user's is given
                self._inputs[key] = (hashlib.sha256(repr(self._numbers).encode()).hexdigest(), "partition_info")
                leaves[key] = None
            self._leaves[key] = tuple(leaves)

    def _told(self, tell: Any, key: Key) -> str | None:
        try:
            digest: str = tell()
        except Unstable as problem:
            self.unstable.append(str(problem))
            return None
        return None if any(self._recipe.get(ref, "") is None for ref in self._refs) else digest

    def _data(self, key: Key, node: DataNode) -> None:
        self._leaves[key], value = (), node.value
        if isinstance(value, bytes | Blob) and _name(key) == plan_key(_ship.identity(value)):
            plan = _ship.snapshot(value)
            self.plans.append(described(plan))
            self._recipe[key] = self._told(lambda: self._walk.of(_plan(plan)), key)
            return
        self._leaves[key], self._recipe[key] = (key,), "data"
        self._inputs[key] = (None, "content") if is_future(node) else (content(value), "content")

    def _source(self, key: Key, node: GraphNode) -> None:
        """A task that reads or makes data: by its files where it names them, otherwise by what it gives."""
        self._leaves[key] = (key,)
        files = files_of(node)
        self.files.update(file for file, *_ in files or ())
        if files is None or self.by_content:
            self._recipe[key], self._inputs[key] = "made", (None, "content")
        else:
            self._recipe[key] = self._told(lambda: self._walk.of(_content(node)), key)
            self._inputs[key] = (hashlib.sha256(json.dumps(files).encode()).hexdigest(), files)

    def _special(self, value: Any) -> bytes | None:
        """Pieces of a graph, which stand for what they refer to."""
        if isinstance(value, TaskRef):
            self._refs.append(value.key)
            return str(self._recipe.get(value.key)).encode()
        if isinstance(value, _Number):
            self._numbers.append(value.info)
            return b"number"
        if isinstance(value, Task) and _is_shim(value):
            return b"daskgrad"
        return bytes.fromhex(self._walk.of(_content(value))) if isinstance(value, GraphNode) else None


@dataclass
class _Number:
    info: Any


def _content(node: Any) -> Any:
    """A node as what it does: without its key, and without what it reads."""
    if isinstance(node, Alias):
        return "alias", TaskRef(node.target)
    if isinstance(node, DataNode):
        return "value", node.value
    kwargs = dict(node.kwargs or {})
    info = kwargs.pop("partition_info", None)
    ours = any(isinstance(arg, Task) and _is_shim(arg) for arg in node.args)
    told = None if info is None or ours else _Number(info)
    func, args = node.func, list(node.args)
    if ours:
        args = [_dask.told_to_part(arg)[0] if isinstance(arg, bytes) else arg for arg in args]  # without what is for watchers alone
    if _is_parquet_reader(func):
        func, args = _reader(func), []
    if any(_fragments(arg) for arg in args):
        args = [None if _fragments(arg) else arg for arg in args]
    return type(node).__qualname__, func, args, {k: None if _fragments(v) else v for k, v in kwargs.items()}, told


def _is_shim(node: Task) -> bool:
    return node.func is pickle.loads and node.args == (_ship.shim(),)


def _name(key: Key) -> Any:
    return key[0] if isinstance(key, tuple) else key


def is_future(node: GraphNode) -> bool:
    """Whether it is a result that lies on a cluster."""
    kind = type(getattr(node, "value", None))
    return kind.__name__ == "Future" and kind.__module__.startswith("distributed")


def _plan(plan: Any) -> Any:
    return replace(plan, version="") if hasattr(plan, "version") else plan


def described(plan: Any) -> dict[str, Any]:
    """A plan in words, for whoever looks into a file."""
    options = getattr(plan, "options", None)
    return {
        "function": function_name(plan.fn),
        "columns": {str(output.label): f"{output.derivative} ({output.dtype})" for output in getattr(plan, "outputs", ())}
        if options is not None
        else {},
        "engine": getattr(options, "engine", None),
    }


def content(value: Any) -> str | None:
    """The digest of an input's content; None where it cannot be told."""
    try:
        return Fingerprint().of(value)
    except Unstable:
        return None


# -------------------------------------------------------------------------------- files that are read


def files_of(node: Any) -> list[Any] | None:
    """Of a task that reads Parquet: each file with its size, its time, and which of its row groups; None for any other task."""
    found: list[Any] = []
    if not _collect(node, found):
        return None
    return found or None


def _collect(node: Any, found: list[Any]) -> bool:
    """Add the files that `node` reads; False where one cannot be told from another."""
    reader: Any = getattr(node, "func", None)
    if _is_parquet_reader(reader):
        pieces = [piece for arg in node.args for piece in (arg if isinstance(arg, list) else [arg])]
        found += [_file(reader.fs, piece["piece"]) for piece in pieces]
    elif isinstance(node, Task):
        return all(_collect(part, found) for part in [*node.args, *(node.kwargs or {}).values()])
    else:
        found += [_of_fragment(wrapper) for wrapper in _fragments(node)]
    return all(file is not None for file in found)


def _is_parquet_reader(func: Any) -> bool:
    return type(func).__name__ == "ParquetFunctionWrapper"


def _reader(func: Any) -> Any:
    """How a reader reads, without where."""
    kept = {name: func.common_kwargs.get(name) for name in ("categories", "filters", "convert_string", "dtype_backend", "arrow_to_pandas")}
    schema = func.common_kwargs.get("schema")
    bare = None if schema is None else str(schema.remove_metadata())
    return func.engine, list(func.meta.dtypes), func.columns, func.index, kept, bare


def _fragments(value: Any) -> list[Any]:
    if type(value).__name__ == "FragmentWrapper":
        return [value]
    return [found for part in value for found in _fragments(part)] if isinstance(value, list | tuple) else []


def _file(fs: Any, piece: Any) -> list[Any] | None:
    path, groups, partitions = piece if isinstance(piece, tuple) else (piece, None, None)
    local = type(fs).__name__ == "LocalFileSystem"
    return _stat(path, [groups, str(partitions)]) if local else [path, str(fs.ukey(path)), groups, str(partitions)]


def _of_fragment(wrapper: Any) -> list[Any] | None:
    fragment = wrapper.fragment
    groups = [group.id for group in fragment.row_groups] if fragment.row_groups else None
    if fragment.filesystem.type_name == "local":
        return _stat(fragment.path, [groups, str(fragment.partition_expression)])
    info = fragment.filesystem.get_file_info(fragment.path)
    return [fragment.path, info.size, info.mtime_ns, groups, str(fragment.partition_expression)]


def _stat(path: str, which: list[Any]) -> list[Any]:
    found = os.stat(path)
    return [os.path.abspath(path), found.st_size, found.st_mtime_ns, *which]
