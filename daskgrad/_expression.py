"""A derivative as a Dask expression: `head`, `len`, a projection or a filter costs only the rows and columns it shows.

Dask's expression classes are private. Where they cannot be imported, `_dask` maps over partitions instead: the same
answer from more work. The classes here are only ever seen by the optimiser in the caller's process: they are lowered to
Dask's own before anything is sent.
"""

from __future__ import annotations

import ast
import functools
import weakref
from collections.abc import Hashable
from typing import Any

import pandas as pd
from dask.dataframe.dask_expr import _collection, _expr, _indexing
from dask.dataframe.dask_expr.io import io as _io

from ._dask import Parcel, mapped

Labels = tuple[Hashable, ...]
Expr = Any  # Dask's classes are not typed

# Looked up here, where an ImportError can still send the caller another way.
try:
    And: Any = _expr.And
    Assign: Any = _expr.Assign
    Elemwise: Any = _expr.Elemwise
    Eval: Any = _expr.Eval
    Filter: Any = _expr.Filter
    Index: Any = _expr.Index
    Loc: Any = _indexing.Loc
    Projection: Any = _expr.Projection
    Query: Any = _expr.Query
    IO: Any = _io.IO
    determine_column_projection: Any = _expr.determine_column_projection
    _tokenize_partial: Any = vars(_expr)["_tokenize_partial"]
    is_filter_pushdown_available: Any = _expr.is_filter_pushdown_available
    STEPS: tuple[Any, ...] = tuple(
        getattr(_expr, name)
        for name in (
            *("Binop", "Unaryop", "Abs", "Sqrt", "AsType", "Clip", "Fillna", "IsNa", "NotNull", "Round", "Isin", "Between"),
            *("Where", "Mask", "Replace", "ToFrame", "ToNumeric"),
        )
    )
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
        parcel = self.parcel.compiled(self.frame._meta, self.labels)
        return mapped(new_collection(self.frame), parcel, self.labels).expr

    def _simplify_up(self, parent: Expr, dependents: Any) -> Expr:
        if isinstance(parent, Projection) and self.ndim == 2:
            return self._projected(parent, dependents)
        return _raised(self, parent, dependents)

    def _filter_passthrough_available(self, parent: Expr, dependents: Any) -> bool:
        return _filtered(self, parent, dependents) is not None

    @property
    def _roots(self) -> list[Expr]:
        return [self.frame]

    def _under(self, predicate: Expr) -> Expr:
        return type(self)(_filter(self.frame, predicate), *self.operands[1:])

    def _projected(self, parent: Expr, dependents: Any) -> Expr:
        """`parent`, a choice of columns, over a plan that makes only the columns that anything asks for."""
        wanted = determine_column_projection(self, parent, dependents)
        wanted = wanted if isinstance(wanted, list) else [wanted]
        labels = tuple(label for label in self.columns if label in wanted)
        if len(labels) == len(self.columns) or not labels:
            return _chosen(parent)
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
        if isinstance(parent, Projection):
            if not set(parent.columns) & set(self.keys):
                # Dask's own Assign computes the new columns when exactly they are dropped.
                return type(parent)(self.frame, *parent.operands[1:])
            narrower = super()._simplify_up(parent, dependents)
            return _chosen(parent) if narrower is None else narrower
        return _raised(self, parent, dependents)

    def _filter_passthrough_available(self, parent: Expr, dependents: Any) -> bool:
        return _filtered(self, parent, dependents) is not None

    @property
    def _roots(self) -> list[Expr]:
        return [*_roots(self.frame), *(root for value in self.vals for root in _roots(value))]

    def _under(self, predicate: Expr) -> Expr:
        # One predicate, unfiltered, for every branch: a mean inside it keeps its value.
        pairs = zip(self.keys, self.vals, strict=True)
        values = [operand for key, value in pairs for operand in (key, _under(value, predicate))]
        return type(self)(_under(self.frame, predicate), *values)


class Chosen(Projection):  # type: ignore[misc]
    """Columns of derivatives, or of a frame that they were assigned to."""

    def _lower(self) -> Expr:
        return Projection(*self.operands)

    def _simplify_up(self, parent: Expr, dependents: Any) -> Expr:
        raised = _raised(self, parent, dependents)
        return super()._simplify_up(parent, dependents) if raised is None else raised

    def _filter_passthrough_available(self, parent: Expr, dependents: Any) -> bool:
        return _filtered(self, parent, dependents) is not None

    @property
    def _roots(self) -> list[Expr]:
        return _roots(self.frame)

    def _under(self, predicate: Expr) -> Expr:
        return type(self)(_under(self.frame, predicate), *self.operands[1:])


class Step:
    """What is made of derivatives element by element, `2 * ddf.delta`: mixed into a class of Dask's, whose rows it keeps."""

    _plain: Any
    operands: list[Any]

    def _lower(self) -> Expr:
        return self._plain(*self.operands)

    def _simplify_up(self, parent: Expr, dependents: Any) -> Expr:
        raised = _raised(self, parent, dependents)
        return super()._simplify_up(parent, dependents) if raised is None else raised  # type: ignore[misc]

    def _filter_passthrough_available(self, parent: Expr, dependents: Any) -> bool:
        return _filtered(self, parent, dependents) is not None

    @property
    def _roots(self) -> list[Expr]:
        return [root for operand in _columns_in(self) for root in _roots(operand)]

    def _under(self, predicate: Expr) -> Expr:
        return type(self)(*[_under(operand, predicate) for operand in self.operands])


@functools.cache
def step_of(kind: Any) -> Any:
    """Dask's class `kind` as a step."""
    return type(f"{kind.__name__}OfDerivatives", (Step, kind), {"_plain": kind})


OURS: tuple[Any, ...] = (Derivatives, AssignDerivatives, Chosen, Step)


def _raised(node: Expr, parent: Expr, dependents: Any) -> Expr:
    """`parent` over `node`, one of ours, in a form that costs less; None where there is none."""
    if type(parent) is Assign and any(isinstance(value, OURS) for value in (parent.frame, *parent.vals)):
        return AssignDerivatives(*parent.operands)
    if isinstance(parent, STEPS) and not isinstance(parent, Step):
        return step_of(type(parent))(*parent.operands)  # type: ignore[arg-type]
    if type(parent) is Index:
        return Index(node.frame)
    if type(parent) is Loc and parent.frame._name == node._name and _is_mask(parent.iindexer):
        rows = Filter(node, parent.iindexer)
        return rows if parent.cindexer is None else Projection(rows, parent.cindexer)
    if type(parent) is Query and isinstance(node, AssignDerivatives):
        return _queried(node, parent)
    return _filtered(node, parent, dependents)


def _filtered(node: Expr, parent: Expr, dependents: Any) -> Expr:
    """`parent`, a filter of `node`, with what it says of other columns than the derivatives below these; None where that is nothing."""
    if not isinstance(parent, Filter) or parent.frame._name != node._name:
        return None
    ours = _ours_in(node)
    if not any(isinstance(expr, Derivatives | AssignDerivatives) for expr in ours) or _over_all_rows(node):
        return None
    low, high, rows = [], [], {_rows(expr) for expr in node._roots}
    for said in _conjuncts(parent.predicate):
        below = _below_all(said, ours)
        if below is not None and rows == {_rows(below)}:
            low.append(below)
        else:
            high.append(said)
    if not low or not is_filter_pushdown_available(node, parent, dependents):
        return None
    made = node._under(functools.reduce(And, low))
    found = _filtered_above(node, made, high)
    if found is None:
        return None
    for expr in made.walk():  # so that a first one to ask for a column of new derivatives does not think itself the only one
        for operand in expr.dependencies():
            if isinstance(operand, Derivatives):
                dependents[operand._name].append(weakref.ref(expr))
    return found


def _filtered_above(node: Expr, made: Expr, said: list[Expr]) -> Expr:
    """`made`, which has fewer rows than `node`, where all that is `said` of `node` holds; None where that needs the other rows."""
    if not said:
        return made
    rest = functools.reduce(And, said)
    if _over_all_rows(rest):
        return None
    rest = rest.substitute(node, made)
    return Filter(made, rest) if _rows(rest) == _rows(made) else None


def _conjuncts(predicate: Expr) -> list[Expr]:
    return [*_conjuncts(predicate.left), *_conjuncts(predicate.right)] if isinstance(predicate, And) else [predicate]


def _over_all_rows(expr: Expr) -> bool:
    """Whether something in `expr` is a number made of the derivatives of all rows, such as their mean."""
    return any(part.ndim == 0 and any(isinstance(below, Derivatives) for below in part.walk()) for part in expr.walk())


def _below_all(predicate: Expr, ours: list[Expr]) -> Expr:
    """`predicate` in terms of what lies below `ours`; None where it looks at what they make, or at any derivatives."""
    for expr in ours:
        if isinstance(expr, AssignDerivatives):
            predicate = _below(predicate, expr)
            if predicate is None:
                return None
    return None if any(isinstance(expr, Derivatives) for expr in predicate.walk()) else predicate


def _rows(expr: Expr) -> Hashable:
    """Which rows `expr` has: equal for expressions that have the same ones, whatever their columns."""
    if isinstance(expr, Filter):
        return "filter", _rows(expr.frame), expr.predicate._name
    if isinstance(expr, IO):
        return "read", _tokenize_partial(expr, ["columns", "_series", "_dataset_info_cache"])
    if isinstance(expr, Elemwise):
        found = {_rows(operand) for operand in _columns_in(expr)}
        if len(found) == 1:
            return found.pop()
    return "other", expr._name


def _columns_in(expr: Expr) -> list[Expr]:
    """The operands that have rows."""
    return [operand for operand in expr.dependencies() if operand.ndim]


def _filter(frame: Expr, predicate: Expr) -> Expr:
    """The rows of `frame` where `predicate` holds, which has the same rows, without a filter below the filter.

    Dask makes one of two filters, and leaves the upper predicate as it is where that stands on other columns.
    """
    filters = _filters(frame)
    if not filters:
        return Filter(frame, predicate)
    return _filter(_unfiltered(frame), And(filters[0].predicate, _unfiltered(predicate)))


def _filters(expr: Expr) -> list[Expr]:
    """The filters that `expr` has its rows from."""
    if isinstance(expr, Filter):
        return [expr]
    return [found for operand in _columns_in(expr) for found in _filters(operand)] if isinstance(expr, Elemwise) else []


def _unfiltered(expr: Expr) -> Expr:
    """`expr` on the frames of its filters."""
    if isinstance(expr, Filter):
        return expr.frame
    if not isinstance(expr, Elemwise):
        return expr
    return type(expr)(*[_unfiltered(operand) if isinstance(operand, _expr.Expr) and operand.ndim else operand for operand in expr.operands])


def _chosen(parent: Expr) -> Expr:
    """`parent`, a choice of columns, as one of ours; None where it is already."""
    return Chosen(*parent.operands) if type(parent) is Projection else None


def _queried(node: Expr, query: Expr) -> Expr:
    """`query` of `node` as a filter by what it says of the other columns; None where it is more than Python over those."""
    try:
        names = {part.id for part in ast.walk(ast.parse(query._expr, mode="eval")) if isinstance(part, ast.Name)}
    except SyntaxError:
        return None
    if not names <= set(node.frame.columns) - set(node.keys):
        return None
    rows = Eval(node.frame, *query.operands[1:])
    return Filter(node, rows) if _is_mask(rows) else None


def _is_mask(rows: Any) -> bool:
    return isinstance(rows, _expr.Expr) and rows.ndim == 1 and pd.api.types.is_bool_dtype(rows._meta.dtype)


def _roots(value: Any) -> list[Expr]:
    """What is filtered in the place of `value`."""
    if isinstance(value, OURS):
        return list(value._roots)
    return [value] if isinstance(value, _expr.Expr) and value.ndim else []


def _under(value: Any, predicate: Expr) -> Any:
    """`value` of the rows where `predicate` holds. What is no column is the same for every row."""
    if isinstance(value, OURS):
        return value._under(predicate)
    return _filter(value, predicate) if isinstance(value, _expr.Expr) and value.ndim else value


def _ours_in(expr: Expr) -> list[Any]:
    """`expr` and what it is made of, as far as that is ours: above before below."""
    found = {expr._name: expr}
    todo: list[Any] = [expr]
    while todo:
        for operand in _columns_in(todo.pop(0)):
            if isinstance(operand, OURS):
                found.pop(operand._name, None)  # below all that it is part of
                found[operand._name] = operand
                todo.append(operand)
    return list(found.values())


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
