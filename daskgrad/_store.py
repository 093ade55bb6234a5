"""`to_parquet`: a Dask DataFrame to a folder of Parquet files, part by part, so that nothing that has been computed is lost."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _dask
from ._errors import PlanError
from ._names import listing

if TYPE_CHECKING:
    from ._complete import Run
    from ._folder import Part
    from ._job import Wishes
    from ._task import Outcome

_CHOICES = {
    "on_change": ("refuse", "recompute"),
    "environment": ("same", "any"),
    "inputs": ("files", "content"),
    "on_failure": ("finish", "stop", "report"),
}


@dataclass(frozen=True)
class Written:
    """What `to_parquet` has done.

    Attributes:
        path: the folder.
        parts: how many files lie there.
        written: how many of them this run has computed.
        kept: how many were there already.
        rows: in all of them.
        size: of all of them, in bytes.
        seconds: how long this run took.
        failures: by partition, what went wrong with those that could not be made (with `on_failure="report"`).
    """

    path: str
    parts: int
    written: int
    kept: int
    rows: int
    size: int
    seconds: float
    failures: Mapping[int, BaseException]

    def __str__(self) -> str:
        failed = f", {len(self.failures):,} failed" if self.failures else ""
        return (
            f"{self.path}: {self.rows:,} rows in {self.parts:,} part{'' if self.parts == 1 else 's'} "
            f"({self.written:,} computed now, {self.kept:,} kept{failed}), {self.size / 1e6:,.1f} MB, {self.seconds:.1f} s"
        )


@dataclass(frozen=True)
class Verified:
    """What `verify` has compared, all of it alike.

    Attributes:
        path: the folder.
        parts: how many files lie there.
        checked: the numbers of those that were computed again.
        rows: in those.
        seconds: how long it took.
    """

    path: str
    parts: int
    checked: tuple[int, ...]
    rows: int
    seconds: float

    def __str__(self) -> str:
        parts = f"{len(self.checked):,} of {self.parts:,} parts"
        return f"{self.path}: {self.rows:,} rows in {parts} computed again, all alike, {self.seconds:.1f} s"


def to_parquet(
    data: Any,
    path: str | os.PathLike[str],
    resume: bool = True,
    *,
    on_change: str = "refuse",
    environment: str = "same",
    inputs: str = "files",
    on_failure: str = "finish",
    timeout: float | None = None,
    isolate: bool = False,
    write_index: bool = True,
    schema: Any = None,
    compression: str = "snappy",
    scheduler: Any = None,
) -> Written:
    """Write a Dask DataFrame or Series to a folder of Parquet files, one for each partition; run again, it goes on where it stopped.

    Where few columns are read from many small files, Dask reads several of them as one partition, and they become one part.

    Each part is computed, written to `<path>.daskgrad/`, read back, made durable, and renamed into `path`: what lies there is whole,
    whatever happens. Each file's footer (key `daskgrad`) carries what made it: the function and its shared arguments by content, the
    derivatives, the options, the input partition (a Parquet file by path, size and time, anything else by content), the versions
    and the kind of processor. A part is kept if all of that is the same, and then it has the bits that it would have now.

    Args:
        data: a Dask DataFrame or Series, with or without derivatives in it.
        path: a folder, new or of an earlier run, that the workers see under the same name.
        resume: False makes every part again.
        on_change: what to do with parts in `path` that are another result (another function, other parameters, derivatives, options
            or steps, or another environment): "refuse" touches nothing and raises; "recompute" removes them first, then makes all
            that is missing. Parts whose *input* has changed are always made again, and those of partitions that are no more are
            removed.
        environment: "any" also keeps parts made by other versions or another kind of processor, whose last bits may differ.
        inputs: "content" reads Parquet inputs to tell whether they have changed; "files" believes their size and time.
        on_failure: "finish" makes the other parts before it raises what went wrong with one; "stop" raises at once; "report" makes the
            others and returns, with what went wrong in `failures`.
        timeout: seconds that a part may take. It runs in a process of its own, which is ended then, and the row is looked for.
        isolate: True runs each part in a process of its own, so that one that crashes takes nothing along. Parts over which a
            worker, or an earlier run, has died are always run so, and the row is looked for.
        write_index: whether the index becomes columns of the files.
        schema: `{column: pyarrow type}` or a `pyarrow.Schema`, for columns of objects whose cells do not all have the type of those
            in the first partition. Array cells are lists, matrices lists of lists; a fixed-size list may be asked for here.
        compression: of the files, as `pyarrow.parquet` names it.
        scheduler: as for `.compute()`; None: the current client, or what Dask's configuration says.

    Returns:
        A summary: parts written and kept, rows, bytes.

    Raises:
        PlanError: the folder holds another result or files of others; a column that Parquet cannot hold.
        StoreError: another process writes there, the disk is full, a part takes too long or kills its process (also an OSError).
        GraphError, RowError: as for `grad_column`; the other parts are written. A row that kills its process or never ends is a
            RowError that names it.

    Example:
        >>> import tempfile, pandas as pd, dask.dataframe as dd, daskgrad as dg
        >>> frame = dd.from_pandas(pd.DataFrame({"x": [1.0, 2.0, 3.0, 4.0]}), npartitions=2)
        >>> frame = frame.assign(slope=dg.grad_column(frame, lambda x: x**2))
        >>> folder = tempfile.mkdtemp()
        >>> dg.to_parquet(frame, folder, scheduler="synchronous").written
        2
        >>> dg.to_parquet(frame, folder, scheduler="synchronous").written
        0
        >>> pd.read_parquet(folder).slope.tolist()
        [2.0, 4.0, 6.0, 8.0]
    """
    if _dask.kind(data) not in ("frame", "series"):
        raise PlanError(
            f"to_parquet writes a Dask DataFrame or Series part by part, and data is a {type(data).__module__}.{type(data).__qualname__}."
            " A pandas frame has its own to_parquet; a Bag has to_dataframe."
        )
    _dask.refuse_text_that_was_arrays(data, [data.name] if data.ndim == 1 else list(data.columns))
    chosen = {"on_change": on_change, "environment": environment, "inputs": inputs, "on_failure": on_failure}
    for name, choice in chosen.items():
        if choice not in _CHOICES[name]:
            raise PlanError(f"{name}={choice!r} is not possible. Possible: {listing(_CHOICES[name])}.")
    if timeout is not None and not timeout > 0:
        raise PlanError(f"timeout={timeout!r} is not possible: seconds above 0, or None")
    from ._complete import complete
    from ._folder import Folder
    from ._job import Job, Wishes
    from ._parts import collect
    from ._runner import runner_of

    started = time.perf_counter()
    wishes = Wishes(
        resume=resume, timeout=timeout, isolate=isolate, write_index=write_index, schema=schema, compression=compression, **chosen
    )
    run = complete(Job(Folder(path), collect(data), wishes, runner_of(scheduler, data)))
    return _summary(run, time.perf_counter() - started)


def _summary(run: Run, seconds: float) -> Written:
    lying: list[Part | Outcome] = [*run.kept.values(), *run.written.values()]
    return Written(
        path=str(run.job.folder.path),
        parts=len(lying),
        written=len(run.written),
        kept=len(run.kept),
        rows=sum(part.rows for part in lying),
        size=sum(part.size for part in lying),
        seconds=seconds,
        failures={number: outcome.exception() for number, outcome in sorted(run.failed.items())},
    )


def verify(
    path: str | os.PathLike[str],
    rows: int | None = 1000,
    *,
    data: Any = None,
    tolerance: float = 0.0,
    seed: int = 0,
    scheduler: Any = None,
) -> Verified:
    """Compute a sample of what `to_parquet` has written again, from its inputs, and compare.

    All files are looked at first: that all parts are there, of one result, whole, and made from the inputs as they are now. Then
    parts drawn by chance are made again, until they hold `rows` rows, and compared bit for bit.

    How parts are made lies in `<path>.daskgrad/recipe`, as a pickle: verify only folders that you trust.

    Args:
        path: the folder.
        rows: how many rows to compute again at least; None: all.
        data: the Dask DataFrame that was written, where it is not kept with the folder: one made of more than 64 MB of pandas data.
        tolerance: by how much numbers may differ, relative to the larger. 0: by no bit, which holds for the environment that made
            them; for another kind of processor, say 1e-12 for float64.
        seed: of the draw.
        scheduler: as for `.compute()`.

    Returns:
        What was compared.

    Raises:
        StoreError: parts are missing, their input has changed, or a part differs: the message names it, its column and its row.
        PlanError: the folder was not written by `to_parquet`, or holds another result than `data`.

    Example:
        >>> import tempfile, pandas as pd, dask.dataframe as dd, daskgrad as dg
        >>> frame = dd.from_pandas(pd.DataFrame({"x": [1.0, 2.0, 3.0, 4.0]}), npartitions=2)
        >>> folder = tempfile.mkdtemp() + "/slopes"
        >>> written = dg.to_parquet(frame.assign(slope=dg.grad_column(frame, lambda x: x**2)), folder, scheduler="synchronous")
        >>> dg.verify(folder, rows=None, scheduler="synchronous").checked
        (0, 1)
    """
    from ._folder import Folder
    from ._job import Job
    from ._parts import collect
    from ._runner import runner_of
    from ._verify import compare, sample

    started = time.perf_counter()
    folder = Folder(path)
    wishes, collection = _recipe(folder.aside / "recipe")
    if data is not None:
        collection = collect(data)
    if collection is None:
        raise PlanError(f"{folder.path} was made of too much data to keep it a second time: give verify(..., data=) what was written there")
    job = Job(folder, collection, wishes, runner_of(scheduler, data))
    chosen = sample(job, rows, seed)
    compared = compare(job, chosen, tolerance)
    return Verified(str(folder.path), job.parts, tuple(chosen), compared, time.perf_counter() - started)


def _recipe(file: Path) -> tuple[Wishes, Any]:
    import pickle

    try:
        wishes, collection = pickle.loads(file.read_bytes())
    except FileNotFoundError:
        raise PlanError(f"{file} is not there: verify knows how parts were made only where daskgrad.to_parquet has written them") from None
    return wishes, collection
