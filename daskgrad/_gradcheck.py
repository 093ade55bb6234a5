"""Whether derivatives are right: against central differences and the row-at-a-time loop, on rows drawn from the data."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from . import _captured
from ._column import derivatives, plan_of
from ._derivative import problem
from ._errors import PlanError
from ._names import listing
from ._plan import Plan
from ._records import objects
from ._sample import few_rows


def gradcheck(
    data: Any,
    fn: Callable[..., Any],
    wrt: Any = None,
    rows: int = 20,
    *,
    inputs: Mapping[str, Any] | None = None,
    shared: Mapping[str, Any] | None = None,
    **options: Any,
) -> pd.DataFrame:
    """The gradient of `fn` beside what central differences and the plain loop give, on rows drawn from the data.

    Args:
        data, fn, wrt, inputs, shared, **options: as for `grad_column`. Of Dask data a few rows of a few partitions are computed.
        rows: how many rows to draw, spread over the data.

    Returns:
        A DataFrame with a line for each row and argument (for an array argument, the element that agrees least, `x[2]`): the row's
        label, `argument`, `analytic` (the engine asked for), `loop` (plain torch.autograd), `numeric`, `difference` (of analytic and
        numeric), and a `verdict`: "agrees", "differs", "kink" (the slopes to the left and to the right differ, and the gradient lies
        between them), "not finite", "missing", "complex: not checked by differences", or the exception. Nothing is raised for a row.

    The numeric slope is Richardson's extrapolation of central differences with the steps h and h/2, h = ε^(1/4)·max(1, |x|). It is taken
    in float64 whatever the dtype of the computation, with copies of shared modules and tensors; what was computed in float32 then has to
    agree with it to float32's rounding. A float32 module that `fn` captures cannot be copied: the differences are float32's as well, and
    a verdict "differs" says so.

    Raises:
        PlanError: the call itself makes no sense.

    Example:
        >>> import pandas as pd, daskgrad as dg
        >>> dg.gradcheck(pd.DataFrame({"x": [1.0, 2.0]}), lambda x: x**3)[["analytic", "verdict"]].values.tolist()
        [[3.0, 'agrees'], [12.0, 'agrees']]
    """
    sample, _ = few_rows(data, rows)
    if isinstance(sample, list):
        sample, inputs = _frame_of_records(data, sample, fn, wrt, inputs, shared, options)
    options["on_error"] = "null"
    plan = plan_of(sample, fn, wrt, inputs=inputs, shared=shared, **options)
    if plan.parameters:
        raise PlanError(
            f"gradcheck holds derivatives by columns against differences, and {listing(plan.parameters)} is a shared argument: ask for "
            f"{listing(argument.name for argument in plan.inputs)}, or compare engine='loop' with engine='vmap'"
        )
    check = _Check(sample, fn, plan, {"inputs": inputs, "shared": shared, **options})
    return check.table()


def _frame_of_records(
    data: Any,
    records: list[Any],
    fn: Callable[..., Any],
    wrt: Any,
    inputs: Mapping[str, Any] | None,
    shared: Mapping[str, Any] | None,
    options: dict[str, Any],
) -> tuple[pd.DataFrame, Mapping[str, Any]]:
    """A Bag's records as the frame that their plan makes of them, and the inputs that name its columns."""
    plan = plan_of(data, fn, wrt, inputs=inputs, shared=shared, **options)
    named = {str(a.name): list(a.columns) if a.stacked else a.columns[0] for a in plan.inputs if plan.form == "columns"}
    return plan.records(records), named


class _Check:
    """The columns of the table, one after the other."""

    def __init__(self, sample: pd.DataFrame | pd.Series, fn: Callable[..., Any], plan: Plan, call: dict[str, Any]) -> None:
        self.sample, self.fn, self.plan, self.call = sample, fn, plan, call
        from ._shared import module_dtype

        dtype = plan.options.dtype or module_dtype([*plan.shared.values(), plan.fn]) or np.dtype("float64")
        self.eps = float(np.finfo(dtype).eps)
        self.exact = self._in_float64()
        narrow = [name for name, dtype in _captured.narrow(plan) if name not in plan.shared]
        self.narrow = narrow[0] if narrow else None
        if self.narrow is not None:
            self.exact = (fn, {**call, "dtype": "float32"})
        self.step = float(np.finfo("float64" if self.narrow is None else "float32").eps) ** 0.25

    def _in_float64(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The function and the call whose values differences are taken of."""
        from ._captured import is_module
        from ._shared import doubled

        fn = doubled(self.fn) if is_module(self.fn) else self.fn
        return fn, {**self.call, "shared": doubled(dict(self.call["shared"] or {})), "dtype": "float64"}

    def table(self) -> pd.DataFrame:
        names = list(self.plan.named)
        wanted: dict[Hashable, Any] = {str(k): (name,) for k, name in enumerate(names)}
        found = self._derivatives(self.sample, {**wanted, "problem": problem})
        loop = self._derivatives(self.sample, {**wanted, "problem": problem}, engine="loop")
        lines = []
        for row in range(len(self.sample)):
            for k, name in enumerate(names):
                lines.append(self._line(row, name, found[str(k)].iloc[row], loop[str(k)].iloc[row], found["problem"].iloc[row]))
        columns = ["argument", "analytic", "loop", "numeric", "difference", "verdict"]
        return pd.DataFrame(lines, columns=columns, index=self.sample.index.repeat(len(names)))

    def _derivatives(self, sample: Any, wanted: dict[Hashable, Any], **more: Any) -> pd.DataFrame:
        found: pd.DataFrame = derivatives(sample, self.fn, wanted, **{**self.call, **more})
        return found

    def _line(self, row: int, name: Hashable, analytic: Any, loop: Any, problem: Any) -> tuple[Any, ...]:
        failed = isinstance(problem, str) and "not finite" not in problem
        if failed or (np.ndim(analytic) == 0 and pd.isna(analytic) and not isinstance(problem, str)):
            return _without_numbers(name, problem[:60] if failed else "missing")
        if np.iscomplexobj(analytic):
            return _without_numbers(name, "complex: not checked by differences")
        ours, theirs = _flat(analytic), _flat(loop)
        slopes = self._slopes(row, name)  # (4, elements)
        if slopes.shape[1] != len(ours):
            return _without_numbers(name, "the numeric slope could not be taken")
        if not len(ours):
            return _without_numbers(name, "agrees")
        gap = np.abs(ours - slopes[0])
        worst = int(np.argmax(np.where(np.isfinite(gap), gap, np.inf)))
        shown = str(name) if np.ndim(analytic) == 0 else f"{name}[{', '.join(map(str, np.unravel_index(worst, np.shape(analytic))))}]"
        verdict = self._verdict(float(ours[worst]), float(theirs[worst]), slopes[:, worst], _precision(analytic))
        return (shown, ours[worst], theirs[worst], slopes[0, worst], gap[worst], verdict)

    def _verdict(self, ours: float, loop: float, slopes: NDArray[np.float64], precision: float) -> str:
        numeric, error, bend, bent = (float(slope) for slope in slopes)
        if not np.isfinite([ours, numeric]).all():
            return "not finite"
        scale = max(1.0, abs(ours), abs(numeric))
        exact = max(self.eps, precision) ** 0.4 * scale
        if abs(bent) > 100 * exact and abs(bent) > 0.75 * abs(bend) and abs(ours - numeric) <= abs(bent):
            return "kink"
        well = abs(ours - loop) <= exact and abs(ours - numeric) <= exact + 4 * error
        if well or self.narrow is None:
            return "agrees" if well else "differs"
        return f"differs, in float32: with shared={{{self.narrow!r}: ...}} differences are float64"

    # --- slopes by differences

    def _slopes(self, row: int, name: Hashable) -> NDArray[np.float64]:
        """(4, elements): the extrapolated slope, its estimated error, and how far the slope bends within h and within h/2."""
        cells = self._cells(row, name)
        count = len(cells)
        if not count:
            return np.zeros((4, 0))
        h = self.step * np.maximum(1.0, np.abs(cells))
        shifts = np.concatenate([s * np.diag(h) for s in (-1, -0.5, 0.5, 1)] + [np.zeros((1, count))])  # (4·elements + 1, elements)
        values = self._values(row, name, cells + shifts)
        with np.errstate(invalid="ignore"):  # inf - inf: the verdict says that it is not finite
            return self._differences(values, h)

    @staticmethod
    def _differences(values: NDArray[np.float64], h: NDArray[np.float64]) -> NDArray[np.float64]:
        below, low, high, above = values[:-1].reshape(4, len(h))
        middle = values[-1]
        wide, narrow = (above - below) / (2 * h), (high - low) / h
        bend = (above - 2 * middle + below) / h  # halves with the step where fn is smooth, and stays at a kink
        bent = (high - 2 * middle + low) / (h / 2)
        return np.stack([(4 * narrow - wide) / 3, np.abs(narrow - wide), bend, bent])

    def _labels(self, name: Hashable) -> tuple[Hashable, ...]:
        return next(argument.columns for argument in self.plan.inputs if argument.name == name)

    def _column(self, label: Hashable) -> pd.Series:
        sample: Any = self.sample
        column: pd.Series = sample if isinstance(sample, pd.Series) else sample[label]
        return column

    def _cells(self, row: int, name: Hashable) -> NDArray[np.float64]:
        """The elements of an argument in a row, flat."""
        return np.concatenate([_flat(self._column(label).iloc[row]) for label in self._labels(name)])

    def _values(self, row: int, name: Hashable, cells: NDArray[np.float64]) -> NDArray[np.float64]:
        """`fn` at each of `cells` (points, elements), the other arguments as they are in `row`."""
        labels = self._labels(name)
        points = self.sample.iloc[np.full(len(cells), row)].reset_index(drop=True)
        shape = np.shape(np.asarray(self._column(labels[0]).iloc[row]))
        size = int(np.prod(shape))
        for k, label in enumerate(labels):
            block = cells[:, k * size : (k + 1) * size]
            made: Any = pd.Series(objects([point.reshape(shape) for point in block]) if shape else block[:, 0])
            points = made.rename(points.name) if isinstance(points, pd.Series) else _with(points, label, made)
        if isinstance(points, pd.DataFrame):
            narrow = {label: "float64" for label, dtype in points.dtypes.items() if dtype in (np.float16, np.float32)}
            points = points.astype(narrow)
        wanted: dict[Hashable, Any] = {"value": ()}
        if self.plan.form == "row":
            wanted["slope"] = (name,)  # a function of whole rows must be told its arguments
        fn, call = self.exact
        values: Any = derivatives(points, fn, wanted, **call)["value"]
        if any(np.ndim(value) for value in values):
            return np.full(len(cells), np.nan)
        found: NDArray[np.float64] = values.to_numpy(dtype="float64", na_value=np.nan)
        return found


def _without_numbers(name: Hashable, verdict: str) -> tuple[Any, ...]:
    return (str(name), np.nan, np.nan, np.nan, np.nan, verdict)


def _flat(cell: Any) -> NDArray[np.float64]:
    return np.asarray(cell, dtype=np.float64).reshape(-1)


def _precision(cell: Any) -> float:
    """The rounding of what came back, which may be coarser than that of the computation."""
    dtype = np.asarray(cell).dtype
    return float(np.finfo(dtype).eps) if dtype.kind == "f" else 0.0


def _with(frame: pd.DataFrame, label: Any, column: pd.Series) -> pd.DataFrame:
    """`frame` with another column of that label; `frame` itself stays."""
    frame = frame.copy(deep=False)
    frame[label] = column
    return frame
