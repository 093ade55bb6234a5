"""The Dask carriers: a plan over the partitions of a DataFrame, a Series or a Bag.

The only module that knows Dask's collections (`_expression` is its other half). Dask is imported when a collection is
at hand, never for pandas data. What goes into a graph is described in `_ship`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import operator
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from . import _crash, _ship, _threads
from ._blob import LARGE, Blob, current_client, plan_key
from ._errors import DaskgradError, EngineWarning, PlanError, fit_to_travel
from ._names import function_name, listing
from ._warn import one_call
from ._watch._reporter import counting, watched

if TYPE_CHECKING:
    from ._plan import Plan

Kind = Literal["frame", "series", "bag"]


def kind(data: Any) -> Kind | None:
    """Which Dask collection `data` is, or None. Dask is not imported to find out: without it, nothing can be one."""
    frames, bags = sys.modules.get("dask.dataframe"), sys.modules.get("dask.bag")
    if frames is not None and isinstance(data, frames.DataFrame):
        return "frame"
    if frames is not None and isinstance(data, frames.Series) and not isinstance(data, frames.Index):
        return "series"
    if bags is not None and isinstance(data, bags.Bag):
        return "bag"
    return None


# -------------------------------------------------------------------------------- at the call


class Parcel:
    """A plan as it was at the call: the bytes that travel, and the plan itself for what is decided here.

    The live plan answers about names, dtypes and columns only. What runs, on every scheduler, comes out of the bytes.
    """

    def __init__(self, data: bytes, plan: Plan) -> None:
        self.data, self.title, self._plan = data, plan.title, plan
        self._chosen: dict[tuple[Hashable, ...], Plan] = {}
        self._compiled: dict[tuple[Hashable, ...] | None, Parcel] = {}

    def __dask_tokenize__(self) -> tuple[str, str]:
        return "daskgrad.Parcel", self.digest

    def __reduce__(self) -> tuple[Any, ...]:
        return _parcel, (self.data,)

    def __repr__(self) -> str:
        return f"Parcel({self.title}-{self.digest[:8]})"

    @property
    def digest(self) -> str:
        """The content's hash: equal for equal bytes, so that the same call has the same keys."""
        return self.data[: _ship.DIGEST].hex()

    def plan(self, labels: tuple[Hashable, ...] | None = None) -> Plan:
        """The plan, or the plan for the result columns `labels` alone."""
        if labels is None:
            return self._plan
        if labels not in self._chosen:
            self._chosen[labels] = self._plan.only(labels)
        return self._chosen[labels]

    def compiled(self, empty: pd.DataFrame | pd.Series, labels: tuple[Hashable, ...] | None) -> Parcel:
        """The same with its kernel for data like `empty`, where the workers of a client are to have one: they need no compiler then.

        The plan is asked for when the graph is made, so that is when the row function is traced: not at the call, which is lazy.
        """
        if self._plan.options.engine != "compiled" or current_client() is None:
            return self
        if labels not in self._compiled:
            from ._compiled import beforehand

            plan = _ship.unpack(self.data)
            plan = plan if labels is None else plan.only(labels)
            made = beforehand(plan, empty)
            self._compiled[labels] = (
                self if made is plan else Parcel(_ship.pack(replace(_ship.unpack(self.data), kernels=made.kernels)), self._plan)
            )
        return self._compiled[labels]

    def node(self) -> Any:
        """The one copy of the plan in a graph, as a Delayed. Workers of the current client have a large one already."""
        if isinstance(self._load, Blob):
            self._load.announce()
        return self._delayed

    @functools.cached_property
    def _delayed(self) -> Any:
        from dask.delayed import delayed

        return delayed(self._load, name=plan_key(_ship.identity(self.data)), pure=True, traverse=False)

    @functools.cached_property
    def _load(self) -> bytes | Blob:
        return Blob(self.data, _ship.DIGEST) if len(self.data) > LARGE else self.data


def frame(data: Any, plan: Plan, *, as_expression: bool = True) -> Any:
    """The plan's result for a Dask DataFrame or Series, lazily: nothing is computed and the row function is not called.

    Args:
        data: the Dask DataFrame or Series.
        plan: the plan made for it.
        as_expression: let Dask's optimiser move filters, `head` and projections below the derivatives.
            False: map over partitions.

    Returns:
        A Dask Series or DataFrame with the divisions of `data`.

    Raises:
        PlanError, GraphError: the plan cannot be sent to a worker.
    """
    parcel = Parcel(_ship.pack(plan), plan)
    _threads.settle()
    if plan.columns is not None and data.ndim == 2 and list(data.columns) != list(plan.columns):
        data = data[list(plan.columns)]
    if as_expression and plan.rowwise:
        try:
            from ._expression import expression
        except ImportError as error:
            _warn_slower(error)
        else:
            return expression(data, parcel)
    return mapped(data, parcel, None)


def bag(data: Any, plan: Plan) -> Any:
    """The plan's result for a Dask Bag, lazily: a Dask Series or DataFrame whose partitions are numbered from 0 each.

    Raises:
        PlanError, GraphError: the plan cannot be sent to a worker.
    """
    import dask
    import dask.dataframe as dd
    from dask._task_spec import Task, TaskRef
    from dask.base import tokenize
    from dask.delayed import Delayed
    from dask.highlevelgraph import HighLevelGraph

    parcel = Parcel(_ship.pack(plan), plan)
    _threads.settle()
    name = f"{parcel.title}-{tokenize(data.name, parcel.digest)}"
    graph = dict(data.__dask_optimize__(data.dask, data.__dask_keys__()))
    node = parcel.node()
    graph.update(node.dask)
    keys = [(name, number) for number in range(data.npartitions)]
    for key in keys:
        part, parcel_ref = TaskRef((data.name, key[1])), TaskRef(node.key)
        graph[key] = Task(key, operator.call, _opened_shim(), part, parcel_ref, None, {"number": key[1]})
    layer = HighLevelGraph.from_collections(name, graph, dependencies=())
    parts = [Delayed(key, layer, layer=name) for key in keys]
    with dask.config.set({"dataframe.convert-string": False}):  # array cells stay arrays
        return dd.from_delayed(parts, meta=plan.meta(plan.records([])), prefix=parcel.title, verify_meta=False)


def summed(data: Any, plan: Plan, finish: Callable[..., Any], *details: Any) -> Any:
    """`finish(sum over the partitions, *details)` as a Delayed: a tree of sums, eight at a time."""
    from dask.delayed import delayed

    parts = bag(data, plan) if kind(data) == "bag" else frame(data, plan, as_expression=False)
    found = list(parts.to_delayed(optimize_graph=False))
    while len(found) > 1:
        found = [delayed(sum)(found[start : start + 8]) for start in range(0, len(found), 8)]
    return delayed(finish)(found[0], *details)


def peek(data: Any) -> list[Any] | None:
    """The records of a Bag that lie in its graph (`dask.bag.from_sequence`); None where only computing would tell."""
    from dask._task_spec import DataNode

    records: list[Any] = []
    for key in data.__dask_keys__():
        node = data.dask.get(key)
        part = node.value if isinstance(node, DataNode) else node
        if not isinstance(part, list):
            return None
        records.extend(part)
    return records


def refuse_text_that_was_arrays(data: Any, read: Collection[Hashable]) -> None:
    """Raise a PlanError if one of the columns `read` is text that Dask has made of arrays."""
    turned = [label for label in _text_that_was_arrays(data) if label in read]
    if turned:
        raise PlanError(
            f"the column {turned[0]!r} held arrays, and Dask has turned them into text on the way in. Set "
            'dask.config.set({"dataframe.convert-string": False}) before from_pandas, and the arrays stay arrays. '
            f"Columns that are text now: {listing(turned)}."
        )


def _text_that_was_arrays(data: Any) -> list[Hashable]:
    """The labels of text columns that were arrays or lists in the pandas object that `from_pandas` was given.

    Dask turns every object column into text unless the option `dataframe.convert-string` is off. Nothing is computed.
    """
    found: list[Hashable] = []
    for node in data.expr.walk():
        source = getattr(_operand(node, "frame"), "_data", None)
        if isinstance(source, pd.DataFrame | pd.Series) and _operand(node, "pyarrow_strings_enabled"):
            columns = [source] if isinstance(source, pd.Series) else [source.iloc[:, k] for k in range(source.shape[1])]
            found += [column.name for column in columns if _holds_arrays(column) and column.name not in found]
    meta = data._meta
    held = {meta.name: meta.dtype} if meta.ndim == 1 else dict(zip(meta.columns, meta.dtypes, strict=True))
    return [label for label in found if label in held and pd.api.types.is_string_dtype(held[label])]


def mapped(data: Any, parcel: Parcel, labels: tuple[Hashable, ...] | None) -> Any:
    """The plan over the partitions of `data` by the public `map_partitions`; `labels`: these result columns only."""
    rows = _rows_of(data) if counting() else None
    choice = None if labels is None and rows is None else pickle.dumps((labels, rows))
    meta = parcel.plan(labels).meta(data._meta)
    options = {"enforce_metadata": False, "transform_divisions": False, "token": parcel.title}
    return data.map_partitions(_pipe(), _opened_shim(), parcel.node(), choice, meta=meta, **options)


def _rows_of(data: Any) -> int | None:
    """The number of rows of a frame, where its source knows it without reading them: pandas, the footers of Parquet files."""
    try:
        from dask.dataframe.dask_expr._expr import Literal
        from dask.dataframe.dask_expr._reductions import Len
    except ImportError:  # another Dask: it is not shown then
        return None
    length = Len(data.expr).simplify()
    return int(length.value) if isinstance(length, Literal) else None


def _parcel(data: bytes) -> Parcel:
    return Parcel(data, _ship.unpack(data))


def _operand(node: Any, name: str) -> Any:
    return node.operand(name) if name in type(node)._parameters else None


def _holds_arrays(column: pd.Series) -> bool:
    return column.dtype == object and any(isinstance(cell, np.ndarray | list | tuple) for cell in column)


def _opened_shim() -> Any:
    """A piece of graph that becomes the task's function inside the task: a failure there costs no worker."""
    from dask._task_spec import Task

    return Task(None, pickle.loads, _ship.shim())


@functools.cache
def _pipe() -> Any:
    """`part.pipe(function, …)` for `map_partitions`, which gives `partition_info` to what has it in its signature."""
    from dask.utils import methodcaller

    pipe = functools.partial(methodcaller("pipe"))
    several, last = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("args", several), inspect.Parameter("partition_info", last, default=None)]
    pipe.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return pipe


def _warn_slower(error: ImportError) -> None:
    warnings.warn(
        f"This version of Dask has other expression classes than daskgrad knows ({error}): `head`, `len` and filters "
        "after a derivative compute whole partitions. The answers are the same.",
        EngineWarning,
        stacklevel=4,
    )


# -------------------------------------------------------------------------------- in a task


def run_part(part: Any, parcel: bytes | Blob, choice: bytes | None, partition_info: dict[str, Any] | None) -> pd.Series | pd.DataFrame:
    """One partition in a task.

    Args:
        part: the partition: pandas, or any iterable of records from a Bag.
        parcel: the packed plan, or the ticket for it.
        choice: pickled, the labels of the result columns that are wanted (None: all), and the number of rows of all partitions
            (None: not known); None for both.
        partition_info: what Dask tells about the partition; its number is used in messages only.
    """
    number = partition_info["number"] if partition_info else None
    try:
        plan = _ship.unpack(parcel)
        labels, rows = told_to_part(choice)
        if labels is not None:
            plan = plan.only(labels)
        part, call = _as_pandas(plan, part), _ship.identity(parcel)
        seen = watched(function_name(plan.fn), call, len(part), of=rows, passes=plan.states)
        with _threads.one(), one_call(call), _survived(plan.title, number), seen:
            return plan.run(part, number)
    except DaskgradError as error:
        problem = error
    # Outside of the except block, for there Python would chain the original to it, and a chain must be pickled whole.
    problem.__context__ = None
    if _away():
        raise fit_to_travel(problem)
    if threading.current_thread() is not threading.main_thread():
        from ._ambient import drain

        drain(_ship.identity(parcel), problem)
    raise problem


def _survived(title: str, partition: int | None) -> contextlib.AbstractContextManager[None]:
    """Inside it, a crash of the process leaves word of where it was."""
    worker = _ship.worker()
    if worker is not None:
        return _crash.watched(worker, str(worker.get_current_task()), title, partition)
    return _crash.told() if multiprocessing.parent_process() is not None else contextlib.nullcontext()


def told_to_part(choice: bytes | None) -> tuple[tuple[Hashable, ...] | None, int | None]:
    """The labels of the columns that are wanted, None for all; and the rows of all partitions, None where they are not known."""
    found: tuple[tuple[Hashable, ...] | None, int | None] = (None, None) if choice is None else pickle.loads(choice)
    return found


def _as_pandas(plan: Plan, part: Any) -> pd.DataFrame | pd.Series:
    return part if isinstance(part, pd.DataFrame | pd.Series) else plan.records(list(part))


def _away() -> bool:
    """Whether an error raised here has to be pickled to reach the caller."""
    return multiprocessing.parent_process() is not None or _ship.worker() is not None
