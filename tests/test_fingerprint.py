"""Content as a digest: equal for equal content in every process, another for whatever could change a result."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import functools
import importlib
import importlib.metadata
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from daskgrad import _fingerprint
from daskgrad._fingerprint import Fingerprint, Unstable, fingerprint

PROGRAM = """
import collections, dataclasses, enum, functools, math, random
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from daskgrad._fingerprint import fingerprint

class Kind(enum.Enum):
    CALL = 1
    PUT = "p"

@dataclasses.dataclass(frozen=True)
class Terms:
    names: frozenset = frozenset({"spot", "strike", "vol", "rate"})
    kind: Kind = Kind.PUT

class Pair(NamedTuple):
    left: int
    right: float

class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.seen = {"a", "b", "c", "d"}

    def forward(self, x):
        return self.layer(x).tanh()

def even(n):
    return True if n == 0 else odd(n - 1)

def odd(n):
    return False if n == 0 else even(n - 1)

def closure(k):
    table = {"x": k, "y": {k, k + 1}}
    return lambda x: x * table["x"] if x in {"a", "b", "c"} else math.exp(k) + torch.sin(x)

class Method:
    def __init__(self, k):
        self.k = k

    @property
    def double(self):
        return 2 * self.k

    @staticmethod
    def plain(x):
        return x

    def call(self, x):
        return self.double * x

torch.manual_seed(3)
head = Head()
values = {
    "text": "häh", "numbers": [1, 1.5, True, None, 2**80, -0.0, float("nan"), 3j],
    "set": {"a", "b", ("c", 1), frozenset("xyz")}, "ordered": collections.OrderedDict(b=1, a=2), "slice": slice(1, None),
    "enum": Kind.CALL, "dataclass": Terms(), "named": Pair(1, 2.0), "head": head, "state": head.state_dict(),
    "mutual": even, "closure": closure(2), "partial": functools.partial(closure(3), 1), "method": Method(2).call, "object": Method({1, 2}),
    "array": np.arange(6.0).reshape(2, 3).T, "structured": np.zeros(3, dtype=[("a", "f4"), ("b", ">i2")]),
    "dates": np.array(["2020-01-01"], dtype="datetime64[D]"), "objects": np.array(["a", None, 2.5], dtype=object),
    "frame": pd.DataFrame({"x": [1.0, 2.0], "t": ["a", None], "c": pd.Categorical(["u", "v"])}, index=[5, 6]),
    "torch": [torch.sin, torch.float32, torch.device("cpu"), torch.tensor([1 + 2j]).conj(), torch.eye(2).to_sparse()],
    "builtin": [len, math.exp, str.upper, (1).__add__, np.sin], "lru": functools.lru_cache(closure(4)), "class": Method,
    "cubed": head.layer.forward, "range": range(3), "module": torch.nn, "random": random.Random(3).getstate(),
}
for name, value in values.items():
    print(name, fingerprint(value))
"""


def told(folder: Path, seed: str, prelude: str = "") -> dict[str, str]:
    script = folder / f"program{seed}.py"
    script.write_text(prelude + PROGRAM)
    env = {**os.environ, "PYTHONHASHSEED": seed}
    found = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr
    return dict(line.split() for line in found.stdout.splitlines())


def test_alike_in_every_process_whatever_its_hash_seed(tmp_path: Path) -> None:
    """Also from a file of another name whose lines stand elsewhere."""
    first = told(tmp_path, "1")
    assert first == told(tmp_path, "4021", prelude='"""A word in front."""\n\n\nimport os\n')
    assert len(set(first.values())) == len(first)


# -------------------------------------------------------------------------------- what differs


class Colour(enum.Enum):
    RED = 1


class Point:
    def __init__(self, x: Any) -> None:
        self.x = x


def scaled(k: Any) -> Callable[[Any], Any]:
    def inner(x: Any) -> Any:
        return x * k

    return inner


def with_default(k: Any) -> Callable[[Any], Any]:
    def inner(x: Any, factor: Any = k) -> Any:
        return x * factor

    return inner


def linear(seed: int, *, train: bool = True, frozen: bool = False) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()).train(train).requires_grad_(not frozen)


DIFFERENT = {
    "type": (1, 1.0),
    "truth": (1, True),
    "text and bytes": ("a", b"a"),
    "sign of zero": (0.0, -0.0),
    "order": ([1, 2], [2, 1]),
    "nesting": ([[1], 2], [[1, 2]]),
    "list and tuple": ([1], (1,)),
    "order of a mapping": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "order of an ordered one": (collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1)),
    "shape": (np.zeros((2, 3)), np.zeros((3, 2))),
    "dtype": (np.zeros(2, "f4"), np.zeros(2, "i4")),
    "byte order": (np.zeros(2, "<f4"), np.zeros(2, ">f4")),
    "empty": (np.zeros(0), np.zeros((0, 2))),
    "unit": (np.array([1], "m8[s]"), np.array([1], "m8[ms]")),
    "numpy number": (np.float32(1), np.float64(1)),
    "tensor dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "tensor bit": (torch.tensor([0.0]), torch.tensor([-0.0])),
    "tensor asks": (torch.zeros(2), torch.zeros(2, requires_grad=True)),
    "weights": (linear(1), linear(2)),
    "training": (linear(1), linear(1, train=False)),
    "frozen": (linear(1), linear(1, frozen=True)),
    "closure": (scaled(2), scaled(3)),
    "default": (with_default(2), with_default(3)),
    "constant": (lambda x: x * 2, lambda x: x * 3),
    "operator": (lambda x: x + 2, lambda x: x * 2),
    "attribute": (lambda x: x.sin(), lambda x: x.cos()),
    "library function": (torch.sin, torch.cos),
    "nested": (lambda x: (lambda: x * 2)(), lambda x: (lambda: x * 3)()),
    "partial": (functools.partial(scaled, 1), functools.partial(scaled, 2)),
    "object": (Point(1), Point(2)),
    "deep object": (Point([{"k": torch.zeros(1)}]), Point([{"k": torch.ones(1)}])),
    "index": (pd.Series([1.0], index=[0]), pd.Series([1.0], index=[1])),
    "column name": (pd.DataFrame({"x": [1.0]}), pd.DataFrame({"y": [1.0]})),
    "missing": (pd.Series([1, None], dtype="Int64"), pd.Series([1, 0], dtype="Int64")),
    "kind of text": (pd.Series(["a"], dtype=object), pd.Series(["a"], dtype="string")),
    "categories": (pd.Categorical(["a"], ["a", "b"]), pd.Categorical(["a"], ["a", "c"])),
    "levels": (pd.MultiIndex.from_tuples([(1, 2)]), pd.MultiIndex.from_tuples([(2, 2)])),
    "array cells": (pd.Series([np.zeros(2)]), pd.Series([np.ones(2)])),
    "zone": (pd.Timestamp("2020", tz="UTC"), pd.Timestamp("2020", tz="Europe/Berlin")),
    "arrow": (pa.array([1, None]), pa.array([1, 0])),
    "date": (datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different(kind: str) -> None:
    one, two = DIFFERENT[kind]
    assert fingerprint(one) != fingerprint(two)


EQUAL = {
    "layout": (np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3))),
    "strides": (np.arange(4)[::2], np.array([0, 2])),
    "tensor strides": (torch.arange(4)[::2], torch.tensor([0, 2])),
    "set order": ({"a", "b", "c"}, {"c", "b", "a"}),
    "identity": ([[1], [1]], (lambda part: [part, part])([1])),
    "chunks": (pa.chunked_array([[1], [2, 3]]), pa.chunked_array([[1, 2], [3]])),
    "sliced arrow": (pa.array([7, 1, 2])[1:], pa.array([1, 2])),
    "arrow column": (pd.Series(["q", "a"], dtype="string[pyarrow]")[1:].array, pd.Series(["a"], dtype="string[pyarrow]").array),
    "weights": (linear(1), linear(1)),
    "closure": (scaled(2), scaled(2)),
    "object": (Point([1]), Point([1])),
}


@pytest.mark.parametrize("kind", EQUAL)
def test_equal(kind: str) -> None:
    one, two = EQUAL[kind]
    assert fingerprint(one) == fingerprint(two)


def written(folder: Path, text: str, name: str) -> types.ModuleType:
    (folder / f"{name}.py").write_text(text)
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return importlib.import_module(name)


USERS = """
import math
from enum import Enum

SCALE = 2.0

class Kind(Enum):
    CALL = 1

class Model:
    factor = 3.0

    def __call__(self, x):
        return helper(x) * self.factor

def helper(x):
    '''In words.'''
    return x * SCALE

def fn(x, kind=Kind.CALL):
    return Model()(x) + math.pi
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SCALE = 2.0", "SCALE = 2.5"),
        ("factor = 3.0", "factor = 4.0"),
        ("x * SCALE", "x + SCALE"),
        ("CALL = 1", "CALL = 2"),
        ("math.pi", "math.e"),
        ("* self.factor", "/ self.factor"),
    ],
)
def test_what_a_users_function_looks_up_counts(old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = fingerprint(written(tmp_path, USERS, "users_of_test").fn)
    moved = fingerprint(written(tmp_path, "\n# moved\n" + USERS, "users_of_test").fn)
    after = fingerprint(written(tmp_path, USERS.replace(old, new), "users_of_test").fn)
    del sys.modules["users_of_test"]
    assert before == moved != after


def test_a_shared_module_of_the_users_counts_by_what_is_used_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def through(text: str) -> str:
        written(tmp_path, text, "users_of_test")
        return fingerprint(written(tmp_path, "import users_of_test\ndef fn(x):\n    return users_of_test.fn(x)", "caller_of_test").fn)

    before = through(USERS)
    assert through(USERS + "\nUNUSED = 1\n") == before
    assert through(USERS.replace("SCALE = 2.0", "SCALE = 2.5")) != before
    del sys.modules["users_of_test"], sys.modules["caller_of_test"]


# -------------------------------------------------------------------------------- what cannot be told


@pytest.mark.parametrize(
    "value",
    [threading.Lock(), (x for x in [1]), torch.zeros(2, device="meta"), np.frompyfunc(abs, 1, 1), [1, {"deep": threading.RLock()}]],
)
def test_what_cannot_be_told_is_said(value: Any) -> None:
    with pytest.raises(Unstable, match=r"^a "):
        fingerprint(value)


def test_cycles_end() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    other: list[Any] = [2]
    other.append(other)
    assert fingerprint(loop) != fingerprint(other)
    node, twin = Point(None), Point(None)
    node.x, twin.x = node, twin
    assert fingerprint(node) == fingerprint(twin)


def test_what_is_only_remembered_does_not_count() -> None:
    @dataclasses.dataclass
    class Once:
        k: int

    class Lazy:
        def __init__(self) -> None:
            self.k = 2

        @functools.cached_property
        def double(self) -> int:
            return 2 * self.k

    lazy = Lazy()
    before = fingerprint(lazy)
    assert lazy.double == 4
    assert fingerprint(lazy) == before
    assert fingerprint(Once(1)) != fingerprint(Once(2))

    @functools.lru_cache
    def cached(k: int) -> int:
        return k + 1

    before = fingerprint(cached)
    assert cached(1) == 2
    assert fingerprint(cached) == before


def test_a_special_meaning_goes_first_wherever_the_value_stands() -> None:
    walk = Fingerprint(lambda value: b"stands for it" if isinstance(value, Point) else None)
    assert walk.of([Point(1)]) == walk.of([Point(2)]) != walk.of([1])


def test_the_lists_of_installed_files_are_not_read_for_what_tells_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds: not for a package that is called like its distribution, and not for one that says its version itself."""
    import sklearn

    def refused() -> None:
        raise AssertionError("all installed files were looked at")

    _fingerprint._release.cache_clear()
    _fingerprint._distributions.cache_clear()
    monkeypatch.setattr(importlib.metadata, "packages_distributions", refused)
    assert _fingerprint._release("torch.nn") == importlib.metadata.version("torch")
    assert _fingerprint._release("sklearn.tree") == importlib.metadata.version("scikit-learn") == sklearn.__version__
    assert _fingerprint._release("json.decoder") == ""
    _fingerprint._release.cache_clear()
