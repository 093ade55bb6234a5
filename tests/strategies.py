"""Hypothesis strategies: row functions as Python source, frames of every dtype, partitionings.

A drawn row function is source text that is compiled and known to ``linecache``, so a failing example prints the program
itself and tracebacks have lines. Drawn functions compare inputs with odd constants only, so that no branch is decided
by rounding.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oracle
import pandas as pd
import pyarrow as pa
import torch
from hypothesis import strategies as st

_numbers = itertools.count()


def compile_function(source: str, name: str = "f") -> Callable[..., Any]:
    """The function ``name`` that ``source`` defines, with lines that tracebacks and ``inspect`` can find."""
    filename = f"<drawn {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"torch": torch, "__name__": "drawn"}
    exec(compile(source, filename, "exec"), namespace)
    function: Callable[..., Any] = namespace[name]
    return function


@dataclass(frozen=True, repr=False)
class Program:
    """A row function with its source. ``kinds`` maps each argument to "scalar", "count" or "vector"."""

    source: str
    kinds: Mapping[str, str]
    fn: Callable[..., Any] = field(compare=False)
    branch_free: bool

    def __repr__(self) -> str:
        return "\n" + self.source


@dataclass(frozen=True, repr=False)
class Table:
    """A frame with the rows that the oracle reads: the same data, written independently."""

    frame: pd.DataFrame
    rows: list[dict[str, Any]]
    dtypes: Mapping[str, str]
    floating: torch.dtype

    def __repr__(self) -> str:
        return f"Table({dict(self.dtypes)}, index={self.frame.index!r}, rows={self.rows})"


# --- functions ----------------------------------------------------------------------------------------------

_UNARY = (
    "torch.sin({a})",
    "torch.exp(0.5 * torch.tanh({a}))",
    "torch.tanh({a})",
    "torch.log1p({a}.abs())",
    "torch.sqrt({a} * {a} + 1)",
    "torch.nn.functional.softplus({a})",
    "torch.sigmoid({a})",
    "{a}.clamp(-1.317, 1.453)",
    "torch.where({a} > 0.3137, {a} * {a}, 0.5 * {a})",
    "-{a}",
    "(1.0 / ({a} * {a} + 1.5))",
    "({a} * {a} + 0.75) ** 1.5",
    "torch.atan({a}) ** 3",
    "torch.nn.functional.silu({a})",
)
_BINARY = (
    "{a} + {b}",
    "{a} - 0.7 * {b}",
    "{a} * torch.cos({b})",
    "{a} / ({b} * {b} + 1.25)",
    "torch.pow({a} * {a} + 0.5, 0.5 * torch.tanh({b}))",
    "torch.hypot({a}, {b} * {b} + 1)",
    "torch.where({a} > 0.2711, {a}, {b})",
    "torch.atan2({a}, {b} * {b} + 1)",
)
_REDUCE = (
    "{v}.sum()",
    "(0.3 * {v}).exp().sum().log()",
    "torch.dot({v}, {v})",
    "torch.linalg.norm({v} + 0.1317)",
    "{v}[0] * {v}[-1]",
    "{v}.cumsum(0).sin().sum()",
    "torch.outer({v}, {v}).tanh().sum()",
    "{v}.softmax(0)[0]",
    "({v} ** 2).mean()",
)
_REDUCE_OF_THREE = (
    "(torch.tensor([[0.3, -0.2, 0.5], [0.1, 0.7, -0.4]]) @ {v}).tanh().sum()",
    "torch.dot({v}, torch.tensor([0.7, -0.3, 0.9]))",
    "torch.linspace(0, 1, 3).dot({v})",
)
_FROM_SCALARS = (
    "(torch.stack([{a}, {b}]) + 0.0413).norm()",
    "torch.stack([{a}, 2 * {b}, {a} * {b}]).softmax(0)[1]",
    "torch.stack([{a} + 2.5, {b}]).prod()",
    "torch.cat([{a}.reshape(1), {b}.reshape(1)]).cumsum(0).sum()",
)


class _Writer:
    """Source under construction: lines, an indentation, and the names of scalars and vectors in scope."""

    def __init__(self, draw: st.DrawFn, kinds: Mapping[str, str], length: int | None) -> None:
        self.draw = draw
        self.inputs = [k for k, kind in kinds.items() if kind == "scalar"]
        self.counts = [k for k, kind in kinds.items() if kind == "count"]
        self.vectors = [k for k, kind in kinds.items() if kind == "vector"]
        self.length = length  # of every vector, None: ragged
        self.scalars = list(self.inputs)
        self.lines: list[str] = []
        self.depth = 1
        self.names = itertools.count(1)

    def write(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def pick(self, options: Sequence[str]) -> str:
        chosen: str = self.draw(st.sampled_from(list(options)))
        return chosen

    def expression(self) -> str:
        """One operation over what is in scope: a scalar."""
        kinds = ["unary", "binary", "stack"] if self.scalars else []
        if self.vectors:
            kinds += ["reduce", "elementwise"]
        kind = self.pick(kinds)
        if kind == "unary":
            return self.pick(_UNARY).format(a=self.pick(self.scalars))
        if kind in ("binary", "stack"):
            form = self.pick(_BINARY if kind == "binary" else _FROM_SCALARS)
            return form.format(a=self.pick(self.scalars), b=self.pick(self.scalars))
        vector = self.pick(self.vectors)
        if kind == "elementwise":
            inner = self.pick(_UNARY).format(a=vector)
            scaled: bool = self.draw(st.booleans())
            if self.scalars and scaled:
                inner = f"{inner} * {self.pick(self.scalars)}"
            return f"({inner}).sum()"
        forms = _REDUCE + (_REDUCE_OF_THREE if self.length == 3 else ())
        return self.pick(forms).format(v=vector)

    def assign(self) -> None:
        name = f"t{next(self.names)}"
        self.write(f"{name} = {self.expression()}")
        self.scalars.append(name)

    def returned(self) -> str:
        """An expression that has a path from every scalar and vector argument."""
        terms = [self.scalars[-1]]
        terms += [f"0.37 * {name}" for name in self.inputs] + [f"{name}.tanh().sum()" for name in self.vectors]
        return " + ".join(terms)


@st.composite
def programs(draw: st.DrawFn, kinds: Mapping[str, str], length: int | None = 3) -> Program:
    """A branch-free row function of the given arguments."""
    writer = _Writer(draw, kinds, length)
    for _ in range(draw(st.integers(1, 5))):
        writer.assign()
    for count in writer.counts:
        writer.write(f"{writer.scalars[-1]} = {writer.scalars[-1]} * {count} + 0.1 * {count}")
    writer.write(f"return {writer.returned()}")
    source = f"def f({', '.join(kinds)}):\n" + "\n".join(writer.lines) + "\n"
    return Program(source, dict(kinds), compile_function(source), branch_free=True)


# Python control flow. Each writer leaves the variable ``t`` bound to a scalar tensor; ``x`` is a scalar argument.
def _condition(writer: _Writer) -> str:
    """A truth value decided by inputs compared with odd constants."""
    name = writer.pick(writer.inputs)
    bound = writer.pick(["-1.1173", "-0.4271", "0.3137", "0.9141", "1.2719"])
    form = writer.pick(
        [
            "{n} > {b}",
            "{n} <= {b}",
            "not {n} < {b}",
            "{n} > {b} and {m} < 1.0171",
            "{n} < {b} or {m} > 0.7913",
            "bool(torch.stack([{n}, {m}]).gt({b}).any())",
            "-0.8117 < {n} < {b}",
            "torch.is_nonzero(({n} > {b}).double())",
        ]
    )
    return form.format(n=name, m=writer.pick(writer.inputs), b=bound)


def _step(writer: _Writer) -> str:
    """An update of ``t`` that stays of moderate size."""
    form = writer.pick(_UNARY + _BINARY).format(a="t", b=writer.pick(writer.inputs))
    return f"t = {form}"


def _branch(writer: _Writer, level: int) -> None:
    writer.write(f"if {_condition(writer)}:")
    _block(writer, level + 1)
    if writer.draw(st.booleans()):
        writer.write(f"elif {_condition(writer)}:")
        _block(writer, level + 1)
    if writer.draw(st.booleans()):
        writer.write("else:")
        _block(writer, level + 1)


def _while(writer: _Writer, level: int) -> None:
    turns = f"n{next(writer.names)}"
    writer.write(f"{turns} = 0")
    writer.write(f"while {turns} < {writer.pick(['3', '6'])} and abs({writer.pick(writer.inputs)}) > 0.3719 * {turns} + 0.1313:")
    writer.depth += 1
    writer.write(_step(writer))
    writer.write(f"{turns} += 1")
    writer.depth -= 1


def _for(writer: _Writer, level: int) -> None:
    trips = [f"int({name}.abs() * 2.3171)" for name in writer.inputs]
    trips += list(writer.counts) + [f"int({name})" for name in writer.counts] + [f"{name}.item()" for name in writer.counts]
    turn = f"i{next(writer.names)}"
    writer.write(f"for {turn} in range({writer.pick(trips)}):")
    writer.depth += 1
    writer.write(f"t = torch.sin(t + 0.1 * {turn}) + 0.3 * {writer.pick(writer.inputs)}")
    if writer.draw(st.booleans()):
        writer.write(f"if {turn} >= 2 and {_condition(writer)}:")
        writer.write(f"    {writer.pick(['break', 'continue'])}")
        writer.write("t = 0.9 * t")
    writer.depth -= 1


def _early_return(writer: _Writer, level: int) -> None:
    writer.write(f"if {_condition(writer)}:")
    writer.write(f"    return t * 1.7 + {writer.pick(writer.inputs)}")


def _python_max(writer: _Writer, level: int) -> None:
    form = writer.pick(["max({a}, {b} + 0.0317)", "min({a}, 0.5173 - {b})", "max({a} * 1.0, -0.3391)"])
    writer.write("t = t + " + form.format(a=writer.pick(writer.inputs), b=writer.pick(writer.inputs)))


def _format_key(writer: _Writer, level: int) -> None:
    name = writer.pick(writer.inputs)
    form = writer.pick(['f"{{{n}:.0f}}"', 'format({n}, ".0f")', '"{{:.0f}}".format({n})']).format(n=name)
    writer.write(f't = t * {{"1": 0.3, "-1": 2.0, "0": 1.25}}.get({form}, 0.7)')


def _cholesky(writer: _Writer, level: int) -> None:
    name = writer.pick(writer.inputs)
    writer.write("try:")
    writer.write(f"    t = t + torch.linalg.cholesky(torch.eye(2) * ({name} + 0.6113) + 0.25)[1].sum()")
    writer.write("except torch.linalg.LinAlgError:")
    writer.write(f"    t = t - 2 * {name}")


def _index(writer: _Writer, level: int) -> None:
    if not writer.vectors:
        return _python_max(writer, level)
    place = writer.pick([f"int({writer.pick(writer.inputs)} > 0.3137) - 1", f"{writer.vectors[0]}.argmax()"])
    writer.write(f"t = t + {writer.vectors[0]}[{place}] ** 2")
    return None


def _raise(writer: _Writer, level: int) -> None:
    name = writer.pick(writer.inputs)
    if writer.draw(st.booleans()):
        writer.write(f'assert {name} < 1.4117, "too large"')
    else:
        writer.write(f"if {name} < -1.3719:")
        writer.write('    raise ValueError("too small")')


def _constant(writer: _Writer, level: int) -> None:
    writer.write(f"if {writer.pick(writer.inputs)} > {writer.pick(['1.1931', '1.5317'])}:")
    writer.write(f"    return {writer.pick(['2.5', 'torch.tensor(2.5)', 't.detach()', '0 if t is None else 3'])}")


_CONTROL = (_branch, _branch, _while, _for, _early_return, _python_max, _format_key, _cholesky, _index)
_FAILING = (_raise, _constant)


def _block(writer: _Writer, level: int) -> None:
    writer.depth += 1
    writer.write(_step(writer))
    if level < 3 and writer.draw(st.integers(0, 2)) == 0:
        writer.draw(st.sampled_from(_CONTROL))(writer, level)
    writer.depth -= 1


@st.composite
def control_programs(draw: st.DrawFn, kinds: Mapping[str, str], length: int | None = 3, failing: bool = False) -> Program:
    """A row function with Python control flow; with ``failing``, one that raises or returns a constant on some rows."""
    writer = _Writer(draw, kinds, length)
    writer.write("t = " + " + ".join(f"0.5 * {name}" for name in writer.inputs))
    writers = draw(st.lists(st.sampled_from(_CONTROL), min_size=1, max_size=3))
    if failing:
        writers = draw(st.permutations([*writers, *draw(st.lists(st.sampled_from(_FAILING), min_size=1, max_size=2))]))
    for write in writers:
        write(writer, 1)
    tail = "".join(f" + {name}.tanh().sum()" for name in writer.vectors) + "".join(f" + 0.21 * {n} * x" for n in writer.counts)
    writer.write(f"return t * t + 0.37 * x{tail}")
    source = f"def f({', '.join(kinds)}):\n" + "\n".join(writer.lines) + "\n"
    return Program(source, dict(kinds), compile_function(source), branch_free=False)


# --- frames -------------------------------------------------------------------------------------------------

SCALAR_64 = ("float64", "float64", "Float64", "double[pyarrow]", "int64", "Int64", "int64[pyarrow]")
SCALAR_32 = ("float32", "Float32", "float[pyarrow]")
VECTOR_64 = ("arrays", "lists", "list[double]", "arrays of int64")
VECTOR_32 = ("arrays of float32", "list[float]")
COUNTS = ("int64", "Int64", "int64[pyarrow]")
INDEXES = ("range", "offset range", "repeated", "text", "dates", "floats")


def can_miss(dtype: str) -> bool:
    """True for a column that has a missing value of its own."""
    return dtype[0] in "FI" or "[pyarrow]" in dtype or dtype.startswith(("arrays", "list"))


def _scalar(dtype: str) -> st.SearchStrategy[Any]:
    if dtype.lower().startswith("int"):
        return st.integers(-2, 2)
    # A grid of binary fractions: exact in float32 too, and off every constant a function compares with.
    return st.integers(-128, 128).map(lambda n: n / 64)


def _cell(dtype: str, length: int | None) -> st.SearchStrategy[Any]:
    if not dtype.startswith(("arrays", "list")):
        return _scalar(dtype)
    least, most = (1, 4) if length is None else (length, length)
    return st.lists(_scalar("int64" if "int64" in dtype else "float64"), min_size=least, max_size=most)


def make_column(cells: Sequence[Any], dtype: str) -> pd.Series[Any]:
    """The cells as a column; ``None`` is missing."""
    if dtype.startswith("arrays"):
        kind = dtype.removeprefix("arrays of ") if " of " in dtype else "float64"
        values = np.empty(len(cells), dtype=object)
        for place, cell in enumerate(cells):
            values[place] = None if cell is None else np.array(cell, dtype=kind)
        return pd.Series(values, dtype=object)
    if dtype == "lists":
        values = np.empty(len(cells), dtype=object)
        for place, cell in enumerate(cells):
            values[place] = cell
        return pd.Series(values, dtype=object)
    if dtype.startswith("list["):
        arrow = pa.list_(pa.float64() if "double" in dtype else pa.float32())
        return pd.Series(pd.arrays.ArrowExtensionArray(pa.array(list(cells), type=arrow)))
    return pd.Series(list(cells), dtype=dtype)


def make_index(kind: str, length: int) -> pd.Index[Any]:
    """An index of ``length`` labels; only "range" and "offset range" are unique by construction of their kind alone."""
    places = range(length)
    if kind == "repeated":
        return pd.Index([place // 2 for place in places], name="id", dtype="int64")
    if kind == "text":
        return pd.Index([f"r{place:02}" for place in places], name="key", dtype="str")
    if kind == "dates":
        return pd.date_range("2024-01-01", periods=length, freq="D", name="day")
    if kind == "floats":
        return pd.Index([place * 0.5 for place in places], dtype="float64")
    if kind == "multi":
        return pd.MultiIndex.from_arrays([[f"g{p // 3}" for p in places], list(places)], names=["g", "i"])
    return pd.RangeIndex(length) if kind == "range" else pd.RangeIndex(5, 5 + 2 * length, 2, name="step")


@st.composite
def tables(
    draw: st.DrawFn,
    kinds: Mapping[str, str],
    length: int | None = 3,
    max_rows: int = 40,
    multi: bool = False,
    only: Sequence[str] | None = None,
) -> Table:
    """A frame with a column for each argument, and one more that nobody reads."""
    wide = only is not None or "count" in kinds.values() or draw(st.integers(0, 3)) > 0
    choices = {
        "scalar": only or (SCALAR_64 if wide else SCALAR_32),
        "vector": VECTOR_64 if wide else VECTOR_32,
        "count": COUNTS,
    }
    dtypes = {name: draw(st.sampled_from(choices[kind])) for name, kind in kinds.items()}
    if only is None and wide and "float" not in " ".join(dtypes.values()).lower() and "scalar" in kinds.values():
        dtypes[next(name for name, kind in kinds.items() if kind == "scalar")] = "float64"
    count = draw(st.one_of(st.integers(0, min(8, max_rows)), st.integers(max_rows // 2, max_rows)))  # groups of few rows are looped
    columns: dict[str, list[Any]] = {}
    for name, kind in kinds.items():
        cell = st.integers(0, 4) if kind == "count" else _cell(dtypes[name], length)
        if can_miss(dtypes[name]):
            cell = st.integers(0, 9).flatmap(lambda n, c=cell: st.none() if n == 0 else c)  # type: ignore[misc]
        columns[name] = draw(st.lists(cell, min_size=count, max_size=count))
    index = make_index(draw(st.sampled_from((*INDEXES, "multi") if multi else INDEXES)), count)
    frame = pd.DataFrame({name: make_column(cells, dtypes[name]) for name, cells in columns.items()})
    frame["unread"] = "text"
    frame.index = index
    rows = [{name: columns[name][place] for name in columns} for place in range(count)]
    floating = torch.float64 if wide else torch.float32
    return Table(frame, rows, dtypes, floating)


# --- partitionings ------------------------------------------------------------------------------------------


@st.composite
def cuts(draw: st.DrawFn, count: int) -> list[tuple[int, int]]:
    """Bounds of 1 to 4 consecutive parts of ``count`` rows; some may be empty."""
    inner = sorted(draw(st.lists(st.integers(0, count), min_size=0, max_size=3)))
    bounds = [0, *inner, count]
    return list(itertools.pairwise(bounds))


def expected_dtype(dtype: str) -> Any:
    """What the contract says a gradient by a column of this (drawn) dtype has for its own."""
    if dtype.startswith("list["):
        return pd.ArrowDtype(pa.list_(pa.float64() if "double" in dtype else pa.float32()))
    if dtype.startswith(("arrays", "list")):
        return np.dtype(object)
    return pd.Series([], dtype=oracle.RESULT_DTYPE[dtype]).dtype
