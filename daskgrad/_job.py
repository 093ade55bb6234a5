"""What `to_parquet` and `verify` have to make: a file for each part of a collection, what it is made from, and the task that makes it."""

from __future__ import annotations

import hashlib
import json
import operator
import pickle
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dask._task_spec import Task, TaskRef
from dask.typing import Key

from . import _task, _write
from ._errors import PlanError
from ._folder import Folder
from ._parts import Collection, Graph, Identities, needed, split
from ._task import Order, Subgraph

_DIGITS = 6


@dataclass(frozen=True)
class Wishes:
    """How `to_parquet` was called; its docstring tells what each means."""

    resume: bool = True
    on_change: str = "refuse"
    environment: str = "same"
    inputs: str = "files"
    on_failure: str = "finish"
    timeout: float | None = None
    isolate: bool = False
    write_index: bool = True
    schema: Any = None
    compression: str = "snappy"


class Job:
    """The parts of `collection` as files in `folder`.

    Attributes:
        identities, identity: what each part is made from.
        schema: of every file; columns whose type only cells tell are `null` until some have been seen.
        environment: the versions and the processor that make them; None: not known before the first part is made.

    Raises:
        PlanError: a column that Parquet cannot hold; the inputs lie in the folder itself; workers that differ.
    """

    def __init__(self, folder: Folder, collection: Collection, wishes: Wishes, runner: Any) -> None:
        self.folder, self.collection, self.wishes, self.runner = folder, collection, wishes, runner
        self.schema = _write.declared(collection.meta, wishes.write_index, wishes.schema)
        self.identities = Identities(collection, by_content=wishes.inputs == "content", extra=_manner(wishes))
        self.identity = [self.identities.of(key) for key in collection.keys]
        _check_apart(folder, self.identities.files)
        alike = wishes.environment == "same"
        self.environment: dict[str, str] | None = runner.environment(bool(self.identities.plans), alike)

    @property
    def parts(self) -> int:
        return len(self.collection.keys)

    def name(self, number: int) -> str:
        """Names sort as numbers do, for readers that go by name."""
        return f"part-{number:0{max(_DIGITS, len(str(self.parts - 1)))}}.parquet"

    def digest(self) -> str:
        """What is made here, as a whole: equal for runs whose parts may lie together."""
        told = [[one.recipe for one in self.identity], self.environment]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def learn(self, types: Mapping[str, Any]) -> None:
        """Types of columns that only cells could tell."""
        self.schema = _write.filled(self.schema, types)

    # ---------------------------------------------------------------------------- as a graph

    def tasks(self, numbers: Iterable[int], **how: Any) -> tuple[Graph, dict[Key, int]]:
        """The graph that makes these parts, and the number of the part behind each of its keys. `how`: of each `Order`."""
        graph, pieces = split(self.collection.graph, {number: self.collection.keys[number] for number in numbers})
        token, shared = uuid.uuid4().hex[:12], self._shared()
        keys: dict[Key, int] = {}
        for number, piece in pieces.items():
            order = self._order(number, piece, {**shared, **how})
            told = [_told(graph, self.identity[number].leaves[place], token) for place in order.told]
            key = (f"to-parquet-{token}", number)
            refs = [TaskRef(outside) for outside in piece.outside]
            graph[key] = Task(key, operator.call, _opened("run"), piece, pickle.dumps(order), *refs, *told)
            keys[key] = number
        return graph, keys

    def checks(self, numbers: Iterable[int]) -> tuple[Graph, dict[Key, int]]:
        """The graph that tells the inputs of these parts by their content, and makes no part."""
        token, graph = uuid.uuid4().hex[:12], dict(self.collection.graph)
        keys: dict[Key, int] = {}
        for number in numbers:
            one = self.identity[number]
            key = (f"look-{token}", number)
            graph[key] = Task(key, _listed, *[_told(graph, one.leaves[place], token) for place in one.open])
            keys[key] = number
        return needed(graph, keys), keys

    def _shared(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder.path),
            "aside": str(self.folder.aside),
            "plans": self.identities.plans,
            "schema": self.schema.serialize().to_pybytes(),
            "index": self.wishes.write_index,
            "compression": self.wishes.compression,
            "job": self.digest(),
            "isolate": self.wishes.isolate,
            "timeout": self.wishes.timeout,
        }

    def _order(self, number: int, piece: Subgraph, shared: Mapping[str, Any]) -> Order:
        one = self.identity[number]
        return Order(
            number=number,
            name=self.name(number),
            recipe=one.recipe,
            inputs=one.inputs,
            watched={one.leaves[place]: place for place in one.open if one.leaves[place] in piece.nodes},
            told=[place for place in one.open if one.leaves[place] not in piece.nodes],
            sources=one.sources,
            **shared,
        )


def _manner(wishes: Wishes) -> list[Any]:
    """What of the wishes decides what the files hold."""
    return [wishes.write_index, wishes.compression, {name: str(kind) for name, kind in _write.given_types(wishes.schema).items()}]


def _check_apart(folder: Folder, files: Iterable[str]) -> None:
    inside = [file for file in files if folder.path in Path(file).absolute().parents]
    if inside:
        raise PlanError(f"{folder.path} holds an input, {min(inside)}: parts are not written among what they are made from. Choose another")


def _opened(function: str) -> Task:
    return Task(None, pickle.loads, _task.shim(function))


def _told(graph: Graph, leaf: Key, token: str) -> TaskRef:
    """The digest of an input's content, made once for all that ask."""
    key = (f"look-{token}", str(leaf))
    if key not in graph:
        graph[key] = Task(key, operator.call, _opened("digest_of"), TaskRef(leaf))
    return TaskRef(key)


def _listed(*digests: Any) -> list[Any]:
    return list(digests)
