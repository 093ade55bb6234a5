"""Rows that are alike → their derivatives: in batches under vmap, parted by the paths they take, or one by one.

    solve          a queue of paths, each with its rows
      _batched     one run of fn on a batch; what it cannot do is found out in `_recover`
      one_by_one   plain torch.autograd, one row after the other

Both engines are judged by the same rules (`_output`, `RowMode`), so they give the same answer or the same error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import _anomaly, _generators, _scripted, _threads
from ._ambient import checkpoint, slow_rules
from ._derivative import Derivative, Dot, Total
from ._errors import GraphError, PlanError
from ._lines import at_line
from ._malloc import keep_memory
from ._mode import RowMode
from ._options import Options
from ._output import Wish, derived, taken
from ._parameters import Uses
from ._paths import FEW, Answers, MissingCell, OwnParameters, Paths, Regroup, Rows, Signal, TooLarge, Unbatchable
from ._table import as_slice
from ._vmap import over_rows

if TYPE_CHECKING:
    from ._compiled import Kernel, Native, Room

PROBE = 64
"""Rows of the first batch, which tells what a row costs."""
AT_ONCE = 256
"""Rows that are one batch: a second one would cost as much again. Not where a kernel can do the rest, nor with gradients by
parameters, which are too large to be made unmeasured."""
MOST = 524_288
"""Rows of a batch at most, for each of torch's threads: with fewer, the fixed cost of a batch shows in cheap functions, and threads
meet too often; with more nothing is gained, and temporaries leave the cache."""
BUDGET = 12 * 2**20
"""Bytes that the results of one batch's torch calls hold, for each of torch's threads; the backward pass needs about as much again.

So the C library keeps the memory for the next batch. Measured on Greeks, on functions of vectors, on an MLP, CNNs and a transformer block:
with ten times as much, half of them take 1.3 to 2.3 times as long, for every page is mapped anew.
"""
EACH = 2**17
"""Bytes of one call's result for each thread, of which a batch has at least so many: with fewer the call itself is most of the time."""
LARGEST, LARGEST_BY_PARAMETERS = 128 * 2**20, 32 * 2**20
"""What a batch never exceeds for that; the latter where layers are differentiated by, whose inputs and outputs are held beside it."""
CHUNKS = 16
"""Chunks of a compiled kernel whose columns are fetched together."""
STOP_BISECTING = 16
"""Rows that go one by one where one of them fails."""

Arrays = Mapping[Hashable, NDArray[Any]]
Call = Callable[[Mapping[Hashable, Tensor], RowMode, Rows], Any]


class Sink(Protocol):
    """Where results and failures go."""

    def put(self, derivative: Derivative, rows: Rows | slice, values: NDArray[Any]) -> None:
        """`values` (rows, *shape) of one derivative."""

    def room(self, derivative: Derivative, rows: slice, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
        """Where `rows` of one derivative will lie, (rows, *shape), to be written before they are `put`; None where they must be copied."""

    def fail(self, row: int, error: Exception) -> None:
        """`row` has no result, because of `error`."""

    def wanted(self, rows: Rows) -> Rows:
        """Those of `rows` whose result can still matter."""

    def slower(self, reason: str) -> None:
        """Something goes one by one, and why."""

    def done(self, rows: int) -> None:
        """So many more rows have their results: for who watches."""


@dataclass
class Report:
    """What was seen while rows were solved.

    Attributes:
        batched, looped, compiled: rows of which the result came from batches, from the loop, and from compiled kernels.
        seconds: how long the kernel took to make.
        paths: how many paths the rows took.
        batch_size: rows of the last batch.
        budget: bytes that torch's calls may hold in a batch, forward; 0 where nothing was chosen.
        bytes_per_row: what torch's calls hold for a row, forward.
        output: the shape of what `fn` returns.
        dtype: torch's default dtype inside.
        shapes: the shapes of the differentiated arguments.
        own: the shared parameters whose gradients are formed, being used without a rule.
    """

    batched: int = 0
    looped: int = 0
    compiled: int = 0
    seconds: float = 0.0
    paths: int = 0
    batch_size: int = 0
    budget: int = 0
    bytes_per_row: int = 0
    output: tuple[int, ...] = ()
    dtype: str = ""
    shapes: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)
    own: list[str] = field(default_factory=list)


@dataclass
class Job:
    """Rows that are alike: equal shapes, dtypes and static values.

    Attributes:
        rows: positions in the part.
        arrays: the column arguments (and directions) of some rows, each (rows, *shape), fresh and writable.
        call: calls the row function with tensors for the column arguments.
        wish: what is wanted of each row.
        directions: those that are the same for every row.
        seed: where random draws of these rows begin.
        scripted: TorchScript in `fn` reads values, which only a dispatch mode sees.
        native: compiled kernels for these rows, where they are wanted.
        noise: says which layers draw random numbers, where some do.
        report: what was seen, for `explain`.
    """

    rows: Rows
    arrays: Callable[[Rows], Arrays]
    call: Call
    wish: Wish
    options: Options
    device: torch.device
    directions: Mapping[Dot, Tensor] = field(default_factory=dict)
    seed: int = 0
    scripted: bool = False
    native: Native | None = None
    noise: Callable[[], str] = str
    report: Report = field(default_factory=Report)


def solve(job: Job, sink: Sink) -> None:
    """Put the derivatives of all rows of `job` into `sink`."""
    keep_memory()
    solver = _Solver(job, sink)
    if job.options.engine == "loop":
        solver.one_by_one(job.rows)
    else:
        solver.run()


@dataclass
class _Solver:
    """The rows of a job that are still to be solved, and what the runs so far have taught.

    Attributes:
        queue: the rows of each path, by the answers that lead to it.
        apart: parts of a batch that failed, never merged again.
        suspects: the rows of this step come from there.
        size: rows of the next batch.
        fits: the most rows that a device had memory for, where it had not for more.
        fresh: buffers that `fn` makes are each row's own.
        fallback: torch may loop over the rows inside an operation without a batching rule.
        changed: the last look for settings has changed one of these two.
        hopeless: the paths that cannot run as a batch, and why.
        false_alarms: batches that failed although each of their rows is well.
        seen: rows that have begun.
        own: the parameters of which each row has its own copy.
        walked: the paths of which batches have come to their end.
        lost: what torch says of a row on its own, and no batch of it does better.
        alone: what watched the row that was last tried on its own.
        parted: as in `Paths`, of all runs so far.
    """

    job: Job
    sink: Sink
    queue: dict[Answers, list[Rows]] = field(default_factory=dict)
    apart: list[tuple[Answers, Rows]] = field(default_factory=list)
    suspects: bool = False
    size: int = PROBE
    fits: int | None = None
    fresh: bool = False
    fallback: bool = False
    changed: bool = False
    hopeless: dict[Answers, str] = field(default_factory=dict)
    false_alarms: int = 0
    seen: int = 0
    own: frozenset[str] = frozenset()
    walked: set[Answers] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    alone: RowMode | None = None
    parted: tuple[int, str] = (0, "")

    # --- the queue of paths

    def run(self) -> None:
        at_once = 0 < len(self.job.rows) <= AT_ONCE and not self.job.wish.targets and self.job.native is None
        self.size = self.job.options.batch_size or (len(self.job.rows) if at_once else PROBE)
        if self.job.native is not None and self.job.native.refused is not None:
            self.sink.slower(self.job.native.refused)
        self._push((), self.job.rows)
        few: list[Rows] = []
        while self.queue or self.apart:
            checkpoint()
            answers, rows = self._next()
            rows = self.sink.wanted(rows)
            if (kernel := self._compiled(answers)) is not None:
                self._run_kernel(kernel, answers, rows)
            elif self._may_loop and answers in self.hopeless:
                self.one_by_one(rows)
            elif self._may_loop and len(rows) < FEW:
                few.append(rows)
            elif len(rows):
                self._step(answers, rows)
        self._loop_few(few)

    @property
    def _may_loop(self) -> bool:
        return self.job.options.engine != "vmap"

    def _push(self, answers: Answers, rows: Rows) -> None:
        self.queue.setdefault(answers, []).append(rows)

    def _next(self) -> tuple[Answers, Rows]:
        """The next batch: what failed before first, then the path that began, then whichever."""
        self.suspects = bool(self.apart)
        if self.suspects:
            return self.apart.pop()
        answers = () if () in self.queue else next(iter(self.queue))
        pieces = self.queue.pop(answers)
        rows = pieces[0] if len(pieces) == 1 else np.sort(np.concatenate(pieces))
        if self._may_loop and answers == () and self.seen >= 4096 and len(self.queue) * FEW > self.seen:
            self.hopeless[()] = f"{self.seen} rows took {len(self.queue)} different paths"
            self.sink.slower(f"rows go one by one, since nearly every row takes a path of its own ({self.hopeless[()]}){self._where}")
            return answers, rows
        if len(rows) > self.size and answers not in self.hopeless and self._compiled(answers) is None:
            self._push(answers, rows[self.size :])
            rows = rows[: self.size]
        return answers, rows

    @property
    def _where(self) -> str:
        """The line where nearly every row goes its own way, where there is one."""
        count, line = self.parted
        return f": they part at {line}, which has a value of its own in nearly every row" if count else ""

    def _loop_few(self, few: list[Rows]) -> None:
        if not few:
            return
        rows = np.sort(np.concatenate(few))
        if len(rows) > 1024 and 4 * len(rows) > len(self.job.rows):
            how_many = f"{len(rows)} of {len(self.job.rows)}"
            self.sink.slower(f"{how_many} rows go one by one, since hardly any others take the same path{self._where}")
        self.one_by_one(rows)

    # --- one batch

    def _step(self, answers: Answers, rows: Rows) -> None:
        paths = Paths(rows, answers)
        self.seen += len(rows) if answers == () else 0
        state = self._begin()
        try:
            results, mode = self._batched(paths, self.fresh, self.fallback)
        except Signal as signal:
            self._stopped(signal, paths, answers, state)
        except GraphError as cut:
            self._part(paths)
            for row in paths.remaining:
                self.sink.fail(int(row), cut)
        except Exception as error:
            self._recover(paths, answers, error)
        else:
            if mode.raised is not None:  # `fn` caught it, for a whole batch: whose was it?
                self._recover(paths, answers, mode.raised)
            elif not self._diverged_at_random(state, paths):
                self._part(paths)
                self._choose_size(paths)
                self._note(paths)
                for derivative, values in results.items():
                    self.sink.put(derivative, paths.remaining, values)
                self.sink.done(len(paths.remaining))
                if not self.suspects:
                    self._learn(paths, answers, results)

    # --- compiled kernels

    def _compiled(self, answers: Answers) -> Kernel | None:
        """The kernel for rows on this path; those that have failed once are left to the eager engine."""
        return None if self.job.native is None or self.suspects else self.job.native.kernel(answers)

    def _learn(self, paths: Paths, answers: Answers, results: dict[Derivative, NDArray[Any]]) -> None:
        """After an eager batch: see to a kernel for the rows that will take the same path."""
        native = self.job.native
        if native is None or self.fallback:
            return
        waiting = sum(len(rows) for rows in self.queue.get(answers, ()))
        expected = waiting * len(paths.remaining) // len(paths.rows)
        if not expected:
            return
        reason = native.learn(paths, results, expected, fresh=self.fresh)
        if reason is not None:
            self.sink.slower(reason)

    def _run_kernel(self, kernel: Kernel, answers: Answers, rows: Rows) -> None:
        """Rows by a kernel, as many at once as it is fastest with; those that turn out to take another path come back."""
        assert self.job.native is not None
        start = 0
        with _threads.for_kernels():
            threads = torch.get_num_threads()
            while start < len(rows):
                checkpoint()
                size = self.job.options.batch_size or kernel.at_once * threads
                reach = max(size, CHUNKS * kernel.rows * threads)
                block = self.sink.wanted(rows[start : start + reach])
                start += reach
                columns = self.job.native.tensors(block)
                k = 0
                while k < len(block):
                    size = self.job.options.batch_size or kernel.at_once * threads
                    here = block[k : k + size]
                    began = time.perf_counter()
                    self._run_chunk(kernel, answers, here, [column[k : k + size] for column in columns])
                    kernel.took(len(here) // threads, time.perf_counter() - began)
                    k += size

    def _run_chunk(self, kernel: Kernel, answers: Answers, rows: Rows, columns: list[Tensor]) -> None:
        try:
            asked, made = kernel(columns, self._room(kernel, rows))
        except RuntimeError:  # whose it was, the eager engine finds out
            self.apart.append((answers, rows))
            return
        paths = Paths(rows, answers)
        if not kernel.on_path(asked, paths):
            self.apart.append((answers, rows))
            return
        self._part(paths)
        places = as_slice(paths.remaining)
        self.job.report.compiled += len(paths.remaining)
        self.job.report.seconds = kernel.seconds
        active = None if paths.active is None else torch.from_numpy(paths.active)
        for derivative in self.job.wish.derivatives:
            if derivative in made and len(paths.remaining):
                self.sink.put(derivative, places, _array(made[derivative] if active is None else made[derivative][active]))
        self.sink.done(len(paths.remaining))

    def _room(self, kernel: Kernel, rows: Rows) -> Room:
        """The place of `rows` in the result, for a kernel whose rows are sure to be on its path."""
        places = as_slice(rows)
        if kernel.questions or not isinstance(places, slice):
            return lambda derivative, dtype, shape: None

        return lambda derivative, dtype, shape: self.sink.room(derivative, places, dtype, shape)

    def _stopped(self, signal: Signal, paths: Paths, answers: Answers, state: Tensor | None) -> None:
        """A run that ended before its result."""
        if isinstance(signal, TooLarge):
            self.size = max(1, len(paths.rows) // 2)
            self._push(answers, paths.rows)
            return
        if isinstance(signal, OwnParameters):
            self.own |= set(signal.names)
            self.job.report.own = sorted(self.own)
            self._push(answers, paths.rows)
            return
        if isinstance(signal, Regroup) and self._diverged_at_random(state, paths):
            return
        self._part(paths)
        if isinstance(signal, Regroup):
            self._choose_size(paths, most=4 * len(paths.rows))  # what a whole run costs is not known
            self._push(tuple(paths.answers), paths.remaining)
        elif isinstance(signal, Unbatchable):
            self._give_up(tuple(paths.answers), paths.remaining, str(signal))
        # MissingCell: these rows have no result

    def _note(self, paths: Paths) -> None:
        """For `explain`."""
        report = self.job.report
        report.batched += len(paths.remaining)
        self.walked.add(tuple(paths.answers))
        report.paths = len(self.walked)
        report.batch_size = self.size
        report.bytes_per_row = max(report.bytes_per_row, paths.nbytes // len(paths.rows))

    def _part(self, paths: Paths) -> None:
        """Come back for the rows that have left the path."""
        self.parted = max(self.parted, paths.parted)
        for answers, rows in paths.left:
            self._push(answers, rows)

    def _choose_size(self, paths: Paths, most: int | None = None) -> None:
        """The rows of the next batch, by what a row of this run has cost; `most` of them at most."""
        if self.job.options.batch_size is None:
            budget = self.job.report.budget = self._budget(paths)
            affordable = budget * len(paths.rows) // max(paths.nbytes, 1)
            self.size = max(1, min(affordable, most or affordable, MOST * torch.get_num_threads(), self.fits or MOST * 64))

    def _budget(self, paths: Paths) -> int:
        """Bytes for the results of the next batch's torch calls."""
        largest = LARGEST_BY_PARAMETERS if self.job.wish.targets else LARGEST
        if self.job.device.type != "cpu":
            return largest
        return min(largest, torch.get_num_threads() * max(BUDGET, EACH * paths.calls))

    def _batched(self, paths: Paths, fresh: bool, fallback: bool) -> tuple[dict[Derivative, NDArray[Any]], RowMode]:
        """One run of the row function on a batch."""
        arrays = self.job.arrays(paths.rows)
        try:
            tensors = _tensors(arrays, self.job.device)
            results, mode = batch(self.job, tensors, paths, fresh=fresh, fallback=fallback, own=self.own)
        except torch.OutOfMemoryError:  # of a GPU, whose memory others may use too
            if len(paths.rows) == 1:
                raise
            self.fits = len(paths.rows) // 2
            raise TooLarge from None
        paths.nbytes += sum(tensor.numel() * tensor.element_size() for tensor in results.values())  # a Jacobian may be most of it
        return {key: _array(tensor) for key, tensor in results.items()}, mode

    # --- what a batch cannot do

    def _recover(self, paths: Paths, answers: Answers, error: Exception) -> None:
        """A batch failed. Passengers, one bad row, a missing batching rule, a shared buffer: find out by trying."""
        if len(paths.remaining) < len(paths.rows):
            self._part(paths)
            self._push(tuple(paths.answers), paths.remaining)
            return
        rows = paths.rows
        if len(rows) <= STOP_BISECTING and self._may_loop:
            self._loop_suspects(answers, rows, error)
            return
        good = self._good_row(rows)
        if good is not None and not self._find_settings(answers, good, error):
            self._give_up(answers, rows, _reason(error))
        elif good is not None and self.changed:
            self.apart.append((answers, rows))
        elif len(rows) == 1:
            self._only_row(int(rows[0]), error)
        else:
            half = len(rows) // 2
            self.apart += [(answers, rows[half:]), (answers, rows[:half])]

    def _loop_suspects(self, answers: Answers, rows: Rows, error: Exception) -> None:
        if self.one_by_one(rows):
            return
        self.false_alarms += 1  # all of them are well: it was the batch that failed
        if self.false_alarms > 4 or len(rows) == len(self.job.rows):
            good = int(rows[0])
            if self._find_settings(answers, good, error) and self.changed:
                self.false_alarms = 0
            else:
                self._give_up(answers, rows[:0], _reason(error))

    def _good_row(self, rows: Rows) -> int | None:
        """A row that is well on its own, of three that are tried."""
        for row in (rows[0], rows[len(rows) // 2], rows[-1]):
            if self._alone(int(row)) is None:
                return int(row)
        return None

    def _alone(self, row: int) -> Exception | None:
        """What goes wrong in `row` on its own; also what `fn` caught."""
        arrays = self.job.arrays(np.array([row]))
        try:
            _, mode = self._one(_tensors(arrays, self.job.device), 0, np.array([row]))
        except MissingCell:
            return None
        except PlanError:
            raise
        except Exception as error:
            return error
        return mode.raised

    def _find_settings(self, answers: Answers, good: int, error: Exception) -> bool:
        """Whether a batch of a row that is well can run: as it is, with torch's slow batching rules, with own buffers."""
        before = (self.fresh, self.fallback)
        self.changed = False
        pair = np.array([good, good])
        for fresh, fallback in dict.fromkeys([before, (before[0], True), (True, before[1]), (True, True)]):
            try:
                _, mode = self._batched(Paths(pair, answers), fresh, fallback)
                raised = mode.raised
            except TooLarge:
                raised = None
            except Signal:
                return True
            except Exception as reason:
                if isinstance(reason, PlanError):
                    raise
                continue
            if raised is not None:
                continue
            self.changed = (fresh, fallback) != before
            self.fresh, self.fallback = fresh, fallback
            if fallback and not before[1]:
                self.sink.slower(
                    f"torch has no batching rule for an operation and loops over rows inside: {_first_line(error)}{at_line(error)}"
                )
            return True
        return False

    def _give_up(self, answers: Answers, rows: Rows, why: str) -> None:
        """Rows on this path go one by one."""
        if not self._may_loop:
            rows = self.sink.wanted(rows)
            for row in rows:
                self.sink.fail(int(row), _refused(why))
            return
        self.hopeless[answers] = why
        if len(self.job.rows) > STOP_BISECTING:
            self.sink.slower(f"rows go one by one, since they cannot run as a batch ({why})")
        self.one_by_one(rows)

    def _only_row(self, row: int, error: Exception) -> None:
        """engine="vmap", one row: its own error, or the batch's."""
        alone = self._alone(row)
        self.sink.fail(row, alone if alone is not None else _refused(_reason(error), error))

    # --- random draws

    def _begin(self) -> Tensor | None:
        if self.job.options.randomness == "error":
            return None
        if self.job.options.randomness == "same":
            _generators.begin(self.job.seed)
        return _generators.random_state(self.job.device)

    def _diverged_at_random(self, before: Tensor | None, paths: Paths) -> bool:
        """Rows that part after a draw: replayed answers would not fit fresh draws, so the whole batch goes one by one."""
        if before is None or paths.active is None or torch.equal(before, _generators.random_state(self.job.device)):
            return False
        self.one_by_one(paths.rows)
        return True

    # --- one by one

    def one_by_one(self, rows: Rows) -> int:
        """Plain torch.autograd for each of `rows`; returns in how many something was raised, caught by `fn` or not."""
        failed = 0
        for start in range(0, len(rows), 1024):
            chunk = self.sink.wanted(np.sort(rows)[start : start + 1024])
            if len(chunk):
                failed += self._loop_chunk(chunk)
        return failed

    def _loop_chunk(self, rows: Rows) -> int:
        tensors = _tensors(self.job.arrays(rows), self.job.device)
        results: list[dict[Derivative, Tensor]] = []
        done: list[int] = []
        odd = 0
        for k, row in enumerate(rows):
            checkpoint()
            try:
                found, mode = self._one(tensors, k, rows[k : k + 1])
            except MissingCell:
                continue
            except PlanError:
                raise
            except Exception as error:
                odd += 1
                if self._well_in_a_batch(int(row), error):
                    continue
                self.sink.fail(int(row), error)
                if not len(self.sink.wanted(rows[k + 1 :])):
                    break
            else:
                odd += mode.raised is not None
                done.append(k)
                results.append(found)
                self.sink.done(1)
        for derivative in results[0] if results else ():
            _put_each(self.sink, derivative, rows[done], [found[derivative] for found in results])
        self.job.report.looped += len(done)
        return odd

    def _well_in_a_batch(self, row: int, error: Exception) -> bool:
        """Whether `row`, at which torch raised `error` on its own, has a result in a batch of one.

        A few rows go one by one, many as a batch, and torch knows operations that only a batch can: the same rows would have a result
        or none, as there are many or few of them.
        """
        by_torch = self.alone is not None and self.alone.raised is error
        if self.job.options.engine == "loop" or not self._may_loop or not by_torch or str(error) in self.lost:
            return False
        if self.job.options.randomness != "error":
            return False
        paths = Paths(np.array([row]), ())
        try:
            results, mode = self._batched(paths, self.fresh, self.fallback)
        except OwnParameters as signal:
            self.own |= set(signal.names)
            return self._well_in_a_batch(row, error)  # there are fewer left each time
        except (Signal, Exception) as problem:
            if isinstance(problem, PlanError):
                raise
            self.lost.add(str(error))
            return False
        if mode.raised is not None:
            return False
        for derivative, values in results.items():
            self.sink.put(derivative, paths.remaining, values)
        self.sink.done(1)
        self.job.report.batched += 1
        return True

    def _one(self, tensors: Mapping[Hashable, Tensor], k: int, row: Rows) -> tuple[dict[Derivative, Tensor], RowMode]:
        """Row `k` of `tensors`, which is `row` of the part."""
        job = self.job
        given = {name: tensor[k] for name, tensor in tensors.items()}
        leaves = {name: given[name].detach().requires_grad_() for name in job.wish.named if name in given}
        uses = Uses(job.wish.targets, frozenset(job.wish.targets)) if job.wish.targets else None
        mode = self.alone = RowMode(list(leaves.values()), uses=uses)
        mode.named = leaves
        directions = _directions(job, given, 1, lead=0)
        given.update({name: leaf.clone() for name, leaf in leaves.items()})
        if job.options.randomness == "same":
            _generators.begin(job.seed)
        before = _generators.random_state(job.device) if job.options.randomness == "error" else None
        try:
            with _scripted.watch(mode, job.scripted), mode:
                result = job.call(given, mode, row)
        except Exception:
            if mode.cut is not None:  # TorchScript makes another exception of it
                raise mode.cut from None
            raise
        finally:
            if before is not None and not torch.equal(before, _generators.random_state(job.device)):
                _generators.set_random_state(before, job.device)
                raise _random(job.noise()) from None
        if mode.missing:
            raise MissingCell
        if mode.cut is not None:
            raise mode.cut
        value, *extras = taken(result, job.wish, job.device)
        job.report.output = tuple(value.shape)
        job.report.shapes = {name: tuple(leaf.shape) for name, leaf in mode.named.items()}
        return derived(value, extras, mode.named, directions, job.wish, 0, uses), mode


def batch(
    job: Job,
    tensors: Mapping[Hashable, Tensor],
    paths: Paths,
    *,
    fresh: bool,
    fallback: bool = False,
    own: frozenset[str] = frozenset(),
) -> tuple[dict[Derivative, Tensor], RowMode]:
    """What is wanted of the rows on the path, each (rows, *shape), from one run on `tensors` (rows, *shape), which become leaves."""
    leaves = {name: tensors[name].requires_grad_() for name in job.wish.named if name in tensors}
    uses = Uses(job.wish.targets, own) if job.wish.targets else None
    mode = RowMode(list(leaves.values()), paths, fresh=fresh, limit=4 * LARGEST, uses=uses)
    mode.named = leaves

    def one_row(level: int, columns: list[Tensor]) -> tuple[Tensor, ...]:
        mode.level = level
        given = dict(zip(tensors, columns, strict=True))
        if fresh:
            given = {name: tensor.clone() for name, tensor in given.items()}
        with mode:
            result = job.call(given, mode, paths.rows)
        if mode.cut is not None:
            raise mode.cut
        if paths.signal is not None:
            raise paths.signal
        return taken(result, job.wish, job.device)

    with slow_rules(fallback):
        value, *extras = over_rows(one_row, paths.count, list(tensors.values()), job.options.randomness)
    job.report.output = tuple(value.shape[1:])
    job.report.shapes = {name: tuple(leaf.shape[1:]) for name, leaf in mode.named.items()}
    active = None if paths.active is None else torch.from_numpy(paths.active)
    results = derived(value, extras, mode.named, _directions(job, tensors, paths.count), job.wish, 1, uses, active)
    whole = active is None or isinstance(next(iter(results), None), Total)
    return {key: tensor if whole else tensor[active] for key, tensor in results.items()}, mode


def first_not_finite(job: Job, row: int) -> str | None:
    """The operation and line that made the gradient of `row` not finite."""
    position = np.array([row])
    given = {name: tensor[0] for name, tensor in _tensors(job.arrays(position), job.device).items()}
    leaves = {name: given[name].detach().requires_grad_() for name in job.wish.named if name in given}

    def call(columns: Mapping[Hashable, Tensor], mode: RowMode) -> Tensor:
        mode.named = dict(leaves)
        with mode:
            return taken(job.call({**given, **columns}, mode, position), job.wish, job.device)[0]

    return _anomaly.first_not_finite(leaves, call)


def _refused(why: str, cause: Exception | None = None) -> Exception:
    error = RuntimeError(f'engine="vmap" cannot run this as a batch ({why}): engine="auto" or "loop" can')
    error.__cause__ = cause
    return error


def _random(noise: str) -> PlanError:
    return PlanError(
        f"the row function draws random numbers, which is refused unless it is meant{noise}: randomness='different' draws anew for each "
        "row, randomness='same' gives every row the same draw; seed= makes the column repeatable"
    )


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {_first_line(error)}{at_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]


# --- tensors and arrays -----------------------------------------------------------------------------------------------


def _tensors(arrays: Arrays, device: torch.device) -> dict[Hashable, Tensor]:
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def _directions(job: Job, tensors: Mapping[Hashable, Tensor], rows: Any, lead: int = 1) -> dict[Dot, Tensor]:
    """The directions of derivatives: those that columns hold, and the constants, for each row."""
    found = {key: tensor for key, tensor in tensors.items() if isinstance(key, Dot)}
    constants = {key: c.expand(rows, *c.shape) if lead else c for key, c in job.directions.items()}
    return {**found, **constants}


def _array(tensor: Tensor) -> NDArray[Any]:
    """Plain numbers: never attached to a graph."""
    array: NDArray[Any] = tensor.numpy(force=True)
    return array


def _put_each(sink: Sink, derivative: Derivative, rows: Rows, values: list[Tensor]) -> None:
    """Results of single rows, together where their shapes agree."""
    shapes = {value.shape for value in values}
    if len(shapes) == 1:
        sink.put(derivative, rows, _array(torch.stack([value.detach() for value in values])))
    else:
        for row, value in zip(rows, values, strict=True):
            sink.put(derivative, np.array([row]), _array(value.detach()[None]))
