"""A derivative as a Dask expression: `head`, `len`, a projection or a filter costs only the rows and columns it shows.

Dask's expression classes are private. Where they cannot be imported, `_dask` maps over partitions instead: the same
answer from more work. The classes here are only ever seen by the optimiser in the caller's process: they are lowered to
Dask's own before anything is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

from dask.dataframe.dask_expr import _collection, _expr

from ._dask import Parcel, mapped

Labels = tuple[Hashable, ...]
Expr = Any  # Dask's classes are not typed

# Looked up here, where an ImportError can still send the caller another way.
try:
    Assign: Any = _expr.Assign
    Elemwise: Any = _expr.Elemwise
    Filter: Any = _expr.Filter
    Projection: Any = _expr.Projection
    are_co_aligned: Any = _expr.are_co_aligned
    determine_column_projection: Any = _expr.determine_column_projection
    is_filter_pushdown_available: Any = _expr.is_filter_pushdown_available
    new_collection: Any = vars(_collection)["new_collection"]
except (AttributeError, KeyError) as error:
    raise ImportError(str(error)) from error


class Derivatives(Elemwise):  # type: ignore[misc]
    """The result of a plan: one row out for each row in.

    `parcel` is a plain object and not a Delayed, which `tail` would take for a part of the frame.
    """

    _parameters = ["frame", "parcel", "labels"]

    @functools.cached_property
    def _meta(self) -> Any:
        return self.parcel.plan(self.labels).meta(self.frame._meta)

    @functools.cached_property
    def _name(self) -> str:
        return f"{self.parcel.title}-{self.deterministic_token}"

    def _task(self, name: Any, index: int) -> Any:
        raise NotImplementedError("lowered before any task is made")

    def _lower(self) -> Expr:
        return mapped(new_collection(self.frame), self.parcel, self.labels).expr

    def _simplify_up(self, parent: Expr, dependents: Any) -> Expr:
        if type(parent) is Assign and any(_source(value) is not None for value in parent.vals):
            return AssignDerivatives(*parent.operands)
        if isinstance(parent, Filter):
            return self._filtered(parent, dependents)
        if isinstance(parent, Projection) and self.ndim == 2:
            return self._projected(parent, dependents)
        return None

    def _filter_passthrough_available(self, parent: Expr, dependents: Any) -> bool:
        return self._filtered(parent, dependents) is not None

    def _filtered(self, parent: Expr, dependents: Any) -> Expr:
        """`parent`, a filter of this by a predicate that does not look at this, with the filter below."""
        if not isinstance(parent, Filter) or parent.frame._name != self._name:
            return None
        predicate = parent.predicate
        if _looks_at(predicate, {self._name}) or not are_co_aligned(self.frame, predicate):
            return None
        if not is_filter_pushdown_available(self, parent, dependents):
            return None
        return _under_filter(self, predicate)

    def _projected(self, parent: Expr, dependents: Any) -> Expr:
        """`parent`, a choice of columns, over a plan that makes only the columns that anything asks for."""
        wanted = determine_column_projection(self, parent, dependents)
        wanted = wanted if isinstance(wanted, list) else [wanted]
        labels = tuple(label for label in self.columns if label in wanted)
        if len(labels) == len(self.columns) or not labels:
            return None
        return type(parent)(self._only(labels), *parent.operands[1:])

    def _only(self, labels: Labels) -> Expr:
        needed = self.parcel.plan(labels).columns
        frame = self.frame
        if needed is not None and frame.ndim == 2 and len(needed) < len(frame.columns):
            frame = frame[[label for label in frame.columns if label in needed]]
        return type(self)(frame, self.parcel, labels)


class AssignDerivatives(Assign):  # type: ignore[misc]
    """`ddf.assign(delta=…)` of derivatives: a filter on other columns goes below them, and none are made unasked."""

    def _lower(self) -> Expr:
        return Assign(*self.operands)

    def _simplify_up(self, parent: Expr, dependents: Any) -> Expr:
        if isinstance(parent, Filter):
            return self._filtered(parent, dependents)
        if isinstance(parent, Projection) and not set(parent.columns) & set(self.keys):
            # Dask's own Assign computes the new columns when exactly they are dropped.
            return type(parent)(self.frame, *parent.operands[1:])
        return super()._simplify_up(parent, dependents)

    def _filter_passthrough_available(self, parent: Expr, dependents: Any) -> bool:
        return self._filtered(parent, dependents) is not None

    def _filtered(self, parent: Expr, dependents: Any) -> Expr:
        if not isinstance(parent, Filter) or parent.frame._name != self._name:
            return None
        sources = [source for source in map(_source, self.vals) if source is not None]
        if len(sources) < len(self.vals):
            return None
        predicate = _below(parent.predicate, self)
        if predicate is None or _looks_at(predicate, {source._name for source in sources} | {self._name}):
            return None
        if not are_co_aligned(self.frame, predicate, *[source.frame for source in sources]):
            return None
        if not is_filter_pushdown_available(self, parent, dependents):
            return None
        # One predicate, unfiltered, for every branch: a mean inside it keeps its value.
        pairs = zip(self.keys, self.vals, strict=True)
        values = [operand for key, value in pairs for operand in (key, _under_filter(value, predicate))]
        return type(self)(Filter(self.frame, predicate), *values)


def _source(value: Any) -> Derivatives | None:
    """The derivatives that an assigned value is, or is a column of."""
    if isinstance(value, Derivatives):
        return value
    if isinstance(value, Projection) and isinstance(value.frame, Derivatives):
        return value.frame
    return None


def _under_filter(value: Expr, predicate: Expr) -> Expr:
    """`value`, which is derivatives or a column of them, of the rows where `predicate` holds."""
    source = _source(value)
    assert source is not None
    below = type(source)(Filter(source.frame, predicate), *source.operands[1:])
    return below if value is source else type(value)(below, *value.operands[1:])


def _looks_at(predicate: Expr, names: set[str]) -> bool:
    return any(node._name in names for node in predicate.walk())


def _below(predicate: Expr, node: Assign) -> Expr:
    """`predicate` in terms of `node.frame`; None where it looks at a column that `node` makes, or at all of `node`."""
    if isinstance(predicate, Projection) and predicate.frame._name == node._name:
        made = any(label in node.keys for label in predicate.columns)
        return None if made else Projection(node.frame, *predicate.operands[1:])
    if predicate._name == node._name:
        return None
    operands = []
    for operand in predicate.operands:
        below = _below(operand, node) if isinstance(operand, _expr.Expr) else operand
        if below is None and isinstance(operand, _expr.Expr):
            return None
        operands.append(below)
    pairs = zip(operands, predicate.operands, strict=True)
    changed = any(isinstance(new, _expr.Expr) and new._name != old._name for new, old in pairs)
    return type(predicate)(*operands) if changed else predicate


def expression(frame: Any, parcel: Parcel) -> Any:
    """The Dask collection of `parcel`'s plan over the Dask collection `frame`."""
    return new_collection(Derivatives(frame.expr, parcel, None))
