"""The compiled engine: which kernel serves which rows, when one is made, and when the eager engine goes on instead.

The first batch of every path is eager. It finds what a row function may not do, it finds the path, and it is what a kernel's first rows
are held against; so a kernel only ever does what the eager engine has done before it, faster.
"""

from __future__ import annotations

import logging
import math
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import _binaries
from ._binaries import Run, UnusableError
from ._cells import ArrayKind, StaticKind
from ._compiler import NoKernelError, compile_apart
from ._derivative import Derivative, Total
from ._fingerprint import Unstable, fingerprint
from ._memory import as_tensor
from ._mode import is_whole
from ._paths import Answers, Paths, Rows

if TYPE_CHECKING:
    import pandas as pd

    from ._plan import Plan

_log = logging.getLogger("daskgrad")

PAYS = 5_000_000
"""Rows from which a path, a static value or a shape gets a kernel of its own: with fewer, compiling takes longer than it saves."""
CHUNK_BYTES = 3 * 2**19
"""Bytes of columns that go into a kernel and come out of it at once, for each thread: they stay in the cache."""
LEAST, MOST = 1024, 16_000
"""Rows at once, for each thread: a column of float64 is then less than the 128 KiB from which malloc may ask the system each time."""
PACES = (1, 4, 16)
"""How many times as many rows are tried: a kernel that is one loop over its rows, without arrays in between, gains by them."""
TRIALS = 3
"""Times that one of these is tried, for others may be using the machine."""
LONGEST = 0.05
"""Seconds that a kernel may hold the GIL."""
KEPT = 64
"""Kernels that a process holds."""
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 2e-1}
"""How far a kernel's first rows may be from the eager engine's, as a part of the largest of the column."""


@dataclass(frozen=True)
class Shipped:
    """A kernel that travels with its plan: for which rows, and the file."""

    kinds: tuple[tuple[Hashable, ArrayKind | StaticKind], ...]
    derivatives: tuple[Derivative, ...]
    data: bytes


Room = Callable[[Derivative, np.dtype[Any], tuple[int, ...]], NDArray[Any] | None]
"""Memory for a derivative of the rows at hand, by its dtype and its shape for a row; None where a kernel cannot write there."""


@dataclass(frozen=True)
class Made:
    """A derivative as a kernel makes it: its dtype, the same for NumPy if it has it, and its shape for a row."""

    dtype: torch.dtype
    plain: np.dtype[Any] | None
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...]) -> Made:
        return cls(getattr(torch, name), np.dtype(name) if hasattr(np, name) else None, shape)


@dataclass
class Kernel:
    """A kernel in this process.

    Attributes:
        run: columns and memory for the derivatives → what the questions are about.
        derivatives: which they are.
        made: what each is like.
        path: the answers that its rows give.
        questions: for each, whether its whole part is the answer.
        seconds: how long it took to make.
        rows: how many at once, for each thread, stay in the cache.
        paces: how many times as many were tried, and the seconds that a row took, the last few times.
    """

    run: Run
    derivatives: tuple[Derivative, ...]
    made: tuple[Made, ...]
    path: Answers
    questions: tuple[bool, ...]
    seconds: float
    rows: int = MOST
    paces: dict[int, list[float]] = field(default_factory=dict)

    def __call__(self, tensors: list[Tensor], room: Room) -> tuple[list[Tensor], dict[Derivative, Tensor]]:
        """What the questions are about and the derivatives, each (rows, *shape); these in `room`, where there is some."""
        count = len(tensors[0])
        if count == 1:  # a graph that holds for any number of rows was traced for two or more
            asked, made = self([torch.cat([tensor, tensor]) for tensor in tensors], no_room)
            return [tensor[:1] for tensor in asked], {derivative: tensor[:1] for derivative, tensor in made.items()}
        made = {}
        for derivative, one in zip(self.derivatives, self.made, strict=True):
            given = None if one.plain is None else room(derivative, one.plain, one.shape)
            made[derivative] = torch.empty((count, *one.shape), dtype=one.dtype) if given is None else torch.from_numpy(given)
        asked = self.run([*tensors, *made.values()])
        if any(len(tensor) != count for tensor in asked):
            raise RuntimeError("it holds for one number of rows only")
        return asked, made

    @property
    def at_once(self) -> int:
        """How many rows to take at once, for each thread: what has not been tried enough, then the most that are as fast as any."""
        known = min(self.paces.get(1, [0.0]))
        best = {pace: min(self.paces.get(pace, [known])) for pace in PACES}
        quick = [pace for pace in PACES if best[pace] * pace * self.rows <= LONGEST]
        if not quick:
            return max(1, int(LONGEST / known))
        trial = next((pace for pace in quick if len(self.paces.get(pace, ())) < TRIALS), None)
        fastest = min(best[pace] for pace in quick)
        return self.rows * (trial or max(pace for pace in quick if best[pace] <= 1.1 * fastest))

    def took(self, rows: int, seconds: float) -> None:
        """So many `rows` for each thread took `seconds` at once: learn from it how many to take."""
        pace = max(1, rows // self.rows)
        if rows == pace * self.rows or (rows < self.rows and seconds > LONGEST):
            tried = self.paces.setdefault(pace, [])
            tried.append(seconds / max(rows, 1))
            del tried[:-TRIALS]

    def on_path(self, asked: Sequence[Tensor], paths: Paths) -> bool:
        """Take the rows off `paths` that answer otherwise; False where one has no answer at all."""
        begun = len(paths.answers)
        for tensor, whole, answer in list(zip(asked, self.questions, self.path, strict=True))[begun:]:
            values: NDArray[Any] = tensor.reshape(len(tensor)).numpy()
            here = values if paths.active is None else values[paths.active]
            if whole and not is_whole(here).all():
                return False
            if not paths.follow(np.where(is_whole(values), values, 0).astype(np.int64) if whole else values, answer):
                break
        return True

    def weigh(self, columns: Sequence[Tensor], made: Iterable[Tensor]) -> None:
        """Choose how many rows to take at once, by what `columns` and what is made of them hold."""
        held = sum(tensor.numel() * tensor.element_size() for tensor in (*columns, *made))
        self.rows = max(LEAST, min(MOST, math.floor(CHUNK_BYTES * len(columns[0]) / max(held, 1))))


def no_room(derivative: Derivative, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """`Room` that is nowhere."""


# --- the kernels of this process --------------------------------------------------------------------------------------


@dataclass
class _Entry:
    """One kernel, or why there is none; `rows` that the eager engine has done in its place."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    kernel: Kernel | None = None
    reason: str | None = None
    looked: bool = False
    rows: int = 0


_entries: OrderedDict[str, _Entry] = OrderedDict()
_entries_lock = threading.Lock()


def _entry(key: str) -> _Entry:
    with _entries_lock:
        entry = _entries.setdefault(key, _Entry())
        _entries.move_to_end(key)
        while len(_entries) > KEPT:
            _entries.popitem(last=False)
        return entry


# --- one group of rows ------------------------------------------------------------------------------------------------


@dataclass
class Native:
    """The kernels for rows of one kind.

    Attributes:
        plan, request: what is asked; the request for no path yet.
        columns: the columns of some rows, for reading only.
        alone: all rows of the part are of this kind.
        refused: why no row can have a kernel.
        kernels: by their paths.
    """

    plan: Plan
    request: Any
    columns: Callable[[Rows], Mapping[Hashable, NDArray[Any]]]
    alone: bool
    refused: str | None = None
    kernels: dict[Answers, Kernel] = field(default_factory=dict)
    seen: set[Answers] = field(default_factory=set)

    def kernel(self, answers: Answers) -> Kernel | None:
        """The kernel for rows that have given `answers` so far."""
        return next((kernel for path, kernel in self.kernels.items() if path[: len(answers)] == answers), None)

    def tensors(self, rows: Rows) -> list[Tensor]:
        """The columns of `rows`, for reading only; without a copy where memory allows."""
        return [as_tensor(column) for column in self.columns(rows).values()]

    def learn(self, paths: Paths, results: Mapping[Derivative, NDArray[Any]], expected: int, *, fresh: bool) -> str | None:
        """After an eager batch: see to a kernel for its path, of `expected` rows more; or why there is none."""
        path = tuple(paths.answers)
        if path in self.kernels or self.refused is not None:
            return None
        request = replace(self.request, answers=path, fresh=fresh)
        shipped = self._shipped(path)
        try:
            key = fingerprint(shipped.data) if shipped is not None else _key(self.plan, request)
        except Unstable as error:
            self.refused = f"what the function takes along cannot be told by its content, so that no kernel could be found again ({error})"
            return self.refused
        entry = _entry(key)
        with entry.lock:
            entry.rows += len(paths.remaining)
            if entry.kernel is None and entry.reason is None:
                self._fill(entry, key, request, shipped, paths, results, expected)
        if entry.kernel is not None:
            self.kernels[path] = entry.kernel
        return entry.reason or (None if entry.kernel is not None else _too_few(path))

    def _shipped(self, path: Answers) -> Shipped | None:
        wanted = set(self.request.derivatives)
        fitting = (s for s in self.plan.kernels if s.kinds == self.request.kinds and wanted <= set(s.derivatives))
        return next(fitting, None) if path == () and self.request.checkpoint is None else None

    def _fill(
        self,
        entry: _Entry,
        key: str,
        request: Any,
        shipped: Shipped | None,
        paths: Paths,
        results: Mapping[Derivative, NDArray[Any]],
        expected: int,
    ) -> None:
        """Put a kernel that agrees with the eager engine on `paths` into `entry`, or the reason why not."""
        simple = request.answers == () and self.alone and request.checkpoint is None
        worth = simple or entry.rows + expected >= PAYS
        try:
            kernel = _from_plan(shipped) if shipped is not None else _from_disk(self.plan, request, key, entry, make=worth)
            if kernel is not None:
                self._hold_against(kernel, paths, results)
                entry.kernel = kernel
        except (UnusableError, NoKernelError) as error:
            entry.reason = f"rows run on the eager engine, not compiled: {error}"

    def _hold_against(self, kernel: Kernel, paths: Paths, results: Mapping[Derivative, NDArray[Any]]) -> None:
        """Raise UnusableError where the kernel's first rows differ from what the eager engine has made of them."""
        try:
            columns = self.tensors(paths.rows)
            asked, made = kernel(columns, no_room)
        except RuntimeError as error:
            raise UnusableError(f"the kernel fails on its first rows ({error})") from error
        kernel.weigh(columns, [*asked, *made.values()])
        held = Paths(paths.rows, ())
        if not kernel.on_path(asked, held) or not np.array_equal(held.remaining, paths.remaining):
            raise UnusableError("the kernel's first rows take other paths")
        for derivative, expected in results.items():
            found = made[derivative] if held.active is None else made[derivative][torch.from_numpy(held.active)]
            _compare(derivative, found, torch.from_numpy(expected))


def _compare(derivative: Derivative, found: Tensor, expected: Tensor) -> None:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise UnusableError(f"the kernel's {derivative} is of another kind: {found.dtype} {tuple(found.shape)}")
    if not (expected.is_floating_point() or expected.is_complex()):
        if not torch.equal(found, expected):
            raise UnusableError(f"the kernel's first rows differ in {derivative}")
        return
    finite = expected.isfinite()
    scale = expected[finite].abs().max() if finite.any() else torch.zeros(())
    tolerance = TOLERANCE.get(expected.abs().dtype, 1e-3)
    near = torch.isclose(found, expected, rtol=tolerance, atol=tolerance * float(scale), equal_nan=True)
    if not near.all():
        raise UnusableError(f"the kernel's first rows differ in {derivative}, by more than {tolerance:g} of the largest")


def _too_few(path: Answers) -> str:
    what = f"rows that take one path through the function ({len(path)} decisions)" if path else "rows of one kind"
    return f"some rows run on the eager engine: {what} get a kernel of their own from {PAYS:,} of them on, for with fewer it does not pay"


# --- where kernels come from ------------------------------------------------------------------------------------------


def _key(plan: Plan, request: Any) -> str:
    """What a kernel depends on."""
    options = plan.options
    states = None if plan.checkpoints is None or request.checkpoint is None else plan.checkpoints[1][request.checkpoint]
    about = (plan.form, [(i.name, i.stacked) for i in plan.inputs], plan.named, plan.output, plan.version)
    settings = (None if options.dtype is None else options.dtype.name, options.allow_unused)
    machine = _binaries.here()
    kinds = [(name, _kind(kind)) for name, kind in request.kinds]
    host = (machine.torch, machine.machine, machine.cpu)
    return fingerprint((plan.content, about, settings, states, kinds, request.derivatives, request.answers, request.fresh, host))


def _kind(kind: ArrayKind | StaticKind) -> tuple[Any, ...]:
    return ("static", kind.value) if isinstance(kind, StaticKind) else (kind.dtype.str, kind.shape)


def content(plan: Plan) -> str:
    """The row function of `plan` with all that is in its reach.

    Raises:
        Unstable: something in it shows no content.
    """
    return fingerprint((plan.fn, dict(plan.shared)))


def _from_plan(shipped: Shipped) -> Kernel:
    """The kernel that came with the plan."""
    with tempfile.TemporaryDirectory(prefix="daskgrad-") as scratch:
        path = Path(scratch, "kernel.pt2")
        path.write_bytes(shipped.data)
        return _loaded(path, shipped.derivatives, ())


def _from_disk(plan: Plan, request: Any, key: str, entry: _Entry, *, make: bool) -> Kernel | None:
    """The kernel from the disk; made, if it is not there and is to be made."""
    if entry.looked and not make:
        return None
    entry.looked = True
    where = _binaries.folder()
    path = where / f"{key}.pt2"
    if not path.exists() and not make:
        return None
    make_sure(plan, request, path)
    return _loaded(path, request.derivatives, request.answers)


def make_sure(plan: Plan, request: Any, path: Path) -> None:
    """See to it that the kernel lies at `path`.

    Raises:
        NoKernelError: it cannot be made, and why.
    """
    if _there(path):
        return
    with _binaries.locked(path):
        if _there(path):  # another process has made it meanwhile
            return
        refusal = path.with_suffix(".no")
        if refusal.exists():
            raise NoKernelError(refusal.read_text(), lasting=True)
        _log.info("compiling a kernel for %s", plan.title)
        try:
            compile_apart(plan, request, path)
        except NoKernelError as error:
            if error.lasting:
                refusal.write_text(str(error))
            raise
        _binaries.prune(path.parent)


def _there(path: Path) -> bool:
    """Whether a whole kernel lies at `path`; a broken one goes."""
    if not path.exists():
        return False
    try:
        _binaries.note_of(path)
    except UnusableError:
        path.unlink(missing_ok=True)
        return False
    _binaries.touch(path)
    return True


def _loaded(path: Path, derivatives: tuple[Derivative, ...], answers: Answers) -> Kernel:
    note = _binaries.note_of(path)
    _binaries.check(note)
    made = tuple(Made.of(dtype, shape) for dtype, shape in note.made)
    return Kernel(_binaries.load(path), derivatives, made, answers, note.questions, note.seconds)


# --- from a plan to its kernels ---------------------------------------------------------------------------------------


def engine(
    plan: Plan,
    kinds: Mapping[Hashable, ArrayKind | StaticKind],
    derivatives: Sequence[Derivative],
    checkpoint: int | None,
    columns: Callable[[Rows], Mapping[Hashable, NDArray[Any]]],
    *,
    alone: bool,
) -> Native:
    """The kernels for rows whose cells are of `kinds`."""
    from ._trace import Request

    request = Request(tuple(kinds.items()), tuple(derivatives), checkpoint=checkpoint)
    return Native(plan, request, columns, alone, refusal(plan))


def refusal(plan: Plan) -> str | None:
    """Why no kernel can serve `plan`; None where one may."""
    reasons = {
        "it takes the whole row, whose columns are found while it runs": plan.form == "row",
        "derivatives by shared parameters come from products of matrices, which are no faster compiled": bool(plan.parameters),
        "sums over rows are eager": any(isinstance(derivative, Total) for derivative in plan.asked),
        "random draws are eager": plan.options.randomness != "error" or plan.captured.draws,
        "it holds TorchScript that reads values": plan.captured.scripted,
        "kernels are for the CPU": (plan.options.device or "cpu") != "cpu",
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    return None if why is None else f"rows run on the eager engine, not compiled: {why}"


def beforehand(plan: Plan, empty: pd.DataFrame | pd.Series) -> Plan:
    """`plan` with its kernel, made here for workers that have no compiler; as it is, where that takes values to know."""
    from ._result import Result
    from ._table import Table
    from ._trace import Request

    if plan.kernels or plan.checkpoints is not None or refusal(plan) is not None:
        return plan
    table = Table(plan, empty)
    cells = {argument.name: table.argument(argument) for argument in plan.inputs}
    if any(one.n_kinds != 1 for one in cells.values()):
        return plan
    kinds = tuple((name, one.kind(0)) for name, one in cells.items())
    request = Request(kinds, tuple(Result(plan, empty, None).wanted_derivatives))
    try:
        path = _binaries.folder() / f"{_key(plan, request)}.pt2"
        make_sure(plan, request, path)
        return replace(plan, kernels=(Shipped(kinds, request.derivatives, path.read_bytes()),))
    except (NoKernelError, UnusableError, Unstable) as reason:
        _log.info("no kernel beforehand for %s: %s", plan.title, reason)
        return plan
