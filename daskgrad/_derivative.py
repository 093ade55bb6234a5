"""The vocabulary of derivatives: what a user may ask for, written down. No torch, no data.

A derivative is a tuple of steps, `()` the value, or a reduction of such a derivative. A step is the name of an argument, or a direction
(`dot`). Steps commute: partial derivatives that differ in order are equal.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import numpy as np

from ._errors import PlanError


@dataclass(frozen=True)
class Dot:
    """The derivative by `wrt` along a direction: a column of the data, a constant, or for a module tensors by their names.

    `each`: of a module in several states, a direction for each of them; `in_state` picks one.
    """

    wrt: Hashable
    column: Hashable | None
    constant: Constant | None = None
    tensors: tuple[tuple[str, Constant], ...] = ()
    each: tuple[Dot, ...] = ()

    def __str__(self) -> str:
        return f"dot({self.wrt})"


@dataclass(frozen=True)
class Constant:
    """An array as a value: comparable, hashable, picklable."""

    data: bytes
    shape: tuple[int, ...]

    @property
    def array(self) -> Any:
        """float64, of `shape`."""
        return np.frombuffer(self.data, dtype=np.float64).reshape(self.shape)


Step = Hashable  # a name, or a Dot
Order = tuple[Step, ...]
"""`()` is the value itself, `("x",)` first order, `("x", "y")` by x, then by y."""


@dataclass(frozen=True)
class Norm:
    """The Euclidean norm of one or several derivatives together; `per_layer`: one norm for each layer of a shared module."""

    of: tuple[Order, ...]
    per_layer: bool = False

    def __str__(self) -> str:
        return f"norm({', '.join(map(spelled, self.of))})"


@dataclass(frozen=True)
class Project:
    """A derivative, flattened, times a fixed random matrix with `k` columns."""

    of: tuple[Order, ...]
    k: int
    seed: int

    def __str__(self) -> str:
        return f"project({', '.join(map(spelled, self.of))})"


@dataclass(frozen=True)
class Total:
    """The sum over all rows of the gradient by shared parameters: as it is, of its squares, or of it clipped to a norm."""

    wrt: Hashable
    squares: bool = False
    clip: float | None = None

    def __str__(self) -> str:
        return f"total({self.wrt})"


@dataclass(frozen=True)
class Aux:
    """A further output: `fn` returns `(value, {"name": extra})`."""

    name: str
    array: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Problem:
    """What is wrong with a row, in words; missing where all is well."""

    def __str__(self) -> str:
        return "problem"


Reduction = Norm | Project
Derivative = Order | Reduction | Total | Aux | Problem

UNNAMED: Hashable = object()
"""In place of the name of a result that was given none: it gets the column's. (None may itself be a name.)"""

Given = ParamSpec("Given")
Made = TypeVar("Made")


def _checked(make: Callable[Given, Made]) -> Callable[Given, Made]:
    """`make`, which says how it is called where it is called otherwise."""
    signature = inspect.signature(make)
    spelled = ", ".join(name if p.default is p.empty else f"{name}={p.default!r}" for name, p in signature.parameters.items())

    @functools.wraps(make)
    def checked(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        unknown = [name for name in kwargs if name not in signature.parameters]
        try:
            if unknown:
                raise TypeError(f"it has no argument {unknown[0]!r}")
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise PlanError(
                f"dg.{make.__name__}({spelled}) is how it is called: {error}. It says what is wanted and computes nothing: "
                "dg.grad_column(data, fn, wrt=dg.norm('x')) does."
            ) from None
        return make(*args, **kwargs)

    return checked


problem = Problem()
"""Asks `derivatives` for a text column: the exception of a row that failed, *gradient not finite while the value is*,
or *value not finite*; missing where all is well. Asking for it implies `on_error="null"`."""


@_checked
def norm(wrt: Any, *, per_layer: bool = False) -> Norm:
    """The Euclidean norm of the gradient by `wrt`, one number per row: sqrt(Σ gᵢ²).

    Args:
        wrt: an argument, a list of them (the joint norm), or a tuple: a higher order (the Frobenius norm of a Hessian). Of a shared
            module: `"model"`, a part of it (`"model.head"`), or a glob; the gradient by its parameters is then never formed.
        per_layer: of a shared module: a column for each of its layers, named after it.

    Raises:
        PlanError: `wrt` names no argument.

    Example:
        >>> import pandas as pd, daskgrad as dg
        >>> df = pd.DataFrame({"x": [3.0], "y": [4.0]})
        >>> dg.grad_column(df, lambda x, y: (x**2 + y**2) / 2, wrt=dg.norm(["x", "y"])).tolist()
        [5.0]
    """
    return Norm(_orders(wrt, "norm"), per_layer)


@_checked
def dot(wrt: Hashable, vector: Any) -> Dot:
    """The directional derivative: the gradient by `wrt` times `vector`, one number per row: Σ gᵢ vᵢ.

    As a step of an order it makes products with a Hessian that is never formed: `("x", dg.dot("x", v))` is H·v.

    Args:
        wrt: the argument.
        vector: the label of a column (text), which holds each row's direction, or a number or array of the argument's shape. By a
            shared module: another module, a checkpoint, or `{parameter: tensor}`; parameters that are not named have direction 0.
            Of a module in several states (`checkpoints`) also a list of these, one for each state.

    Raises:
        PlanError: `vector` is neither a label nor numbers, or a mapping of nothing.

    Example:
        >>> import pandas as pd, daskgrad as dg
        >>> df = pd.DataFrame({"x": [[1.0, 2.0]], "v": [[1.0, -1.0]]})
        >>> dg.grad_column(df, lambda x: (x**3).sum(), wrt=dg.dot("x", "v")).tolist()
        [-9.0]
        >>> dg.derivatives(df, lambda x: (x**3).sum(), {"hv": ("x", dg.dot("x", "v"))})["hv"].iloc[0].tolist()
        [6.0, -12.0]
    """
    if isinstance(vector, str):
        return Dot(wrt, vector)
    if hasattr(vector, "state_dict"):
        vector = vector.state_dict()
    if isinstance(vector, Mapping):
        if not vector:
            raise PlanError(f"dot({wrt!r}, {{}}): the direction names no parameter. A direction is {{parameter: tensor}} of at least one.")
        return Dot(wrt, None, None, tuple((str(name), _constant(tensor)) for name, tensor in vector.items()))
    if isinstance(vector, list | tuple) and any(isinstance(one, Mapping) or hasattr(one, "state_dict") for one in vector):
        return Dot(wrt, None, each=tuple(dot(wrt, one) for one in vector))
    try:
        return Dot(wrt, None, _constant(vector))
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(
            f"dot({wrt!r}, ...) needs the label of one column, or numbers, as its vector, not {vector!r:.80}. Several columns make one: "
            "df['v'] = list(df[[...]].to_numpy()). By a shared module it needs another module, a checkpoint, or {parameter: tensor}."
        ) from error


def _constant(vector: Any) -> Constant:
    array = np.asarray(vector.detach().cpu() if hasattr(vector, "detach") else vector, dtype=np.float64)
    return Constant(array.tobytes(), array.shape)


@_checked
def project(wrt: Any, k: int, seed: int = 0) -> Project:
    """A random projection of the gradient by `wrt` to `k` numbers, which keeps inner products and norms on average.

    The gradient, flattened to (n,), is multiplied by an (n, k) matrix of independent draws from N(0, 1/k) (Johnson and
    Lindenstrauss, 1984). Its entry (i, j) depends on (`seed`, i, j) alone, so rows, partitions and workers agree, and rows of
    other lengths too.

    Args:
        wrt: as for `norm`; by shared parameters, one argument.
        k: the length of the result, an array cell.
        seed: which matrix.

    Raises:
        PlanError: `k` is no number of entries, or `wrt` names no argument.

    Example:
        >>> import pandas as pd, daskgrad as dg
        >>> df = pd.DataFrame({"x": [[1.0, 2.0], [1.0, 2.0]]})
        >>> first, second = dg.grad_column(df, lambda x: (x**2).sum(), wrt=dg.project("x", 3, seed=1))
        >>> first.shape, bool((first == second).all())
        ((3,), True)
    """
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise PlanError(f"project({wrt!r}, k={k!r}): k is the number of entries to keep, at least 1")
    return Project(_orders(wrt, "project"), int(k), int(seed))


def aux(name: str, *, array: bool = False) -> Aux:
    """A further output of `fn`, which then returns `(value, {"name": extra, ...})`: the extra of each row as a column.

    Args:
        name: the key.
        array: the extra is an array in each row (an object column), not a number.

    Example:
        >>> import pandas as pd, daskgrad as dg
        >>> def f(x):
        ...     return x**2, {"half": x / 2}
        >>> dg.derivatives(pd.DataFrame({"x": [1.0, 2.0]}), f, {"slope": "x", "half": dg.aux("half")})
           slope  half
        0    2.0   0.5
        1    4.0   1.0
    """
    return Aux(name, array)


def parse(wish: object, name: Hashable) -> Derivative:
    """The derivative that `wish` spells: `"x"`, `("x", "y")`, `()` or a reduction."""
    if isinstance(wish, Norm | Project | Aux | Problem):
        return wish
    if isinstance(wish, tuple):
        if all(map(_is_step, wish)):
            return wish
    elif _is_step(wish):
        return (wish,)
    raise PlanError(
        f"{name!r} asks for {_shown(wish)}, which is no derivative: a part of it names no argument (only dg.dot can be a step of an "
        "order). Possible: () the value, 'x' first order, ('x', 'y') by x then by y, dg.norm('x'), dg.dot('x', v), dg.project('x', k), "
        "dg.aux('name'), dg.problem."
    )


def _is_step(step: object) -> bool:
    """Whether it may be the name of an argument, or of a column in a function of whole rows: any label but a tuple, which is an order."""
    label = isinstance(step, Hashable) and not isinstance(step, tuple | Norm | Project | Total | Aux | Problem) and not callable(step)
    return label or isinstance(step, Dot)


def _shown(wish: object) -> str:
    if isinstance(wish, tuple):
        return f"({', '.join(_shown(step) for step in wish)})"
    return str(wish) if isinstance(wish, Dot | Norm | Project | Aux) else repr(wish)


def orders_of(derivative: Derivative) -> tuple[Order, ...]:
    """The derivatives to compute for `derivative`."""
    if isinstance(derivative, Norm | Project):
        return derivative.of
    if isinstance(derivative, Total):
        return ((derivative.wrt,),)
    return () if isinstance(derivative, Aux | Problem) else (derivative,)


def arguments_of(derivative: Derivative) -> tuple[Hashable, ...]:
    """The arguments that `derivative` is taken with respect to, in order, with repetition."""
    return tuple(step.wrt if isinstance(step, Dot) else step for order in orders_of(derivative) for step in order)


def directions_of(derivatives: Iterable[Derivative]) -> tuple[Dot, ...]:
    """The distinct directions in `derivatives`."""
    steps = (step for derivative in derivatives for order in orders_of(derivative) for step in order)
    return tuple(dict.fromkeys(step for step in steps if isinstance(step, Dot)))


def in_state(derivative: Derivative, k: int) -> Derivative:
    """`derivative` as it is of state `k` of a shared module, along the direction of that state."""

    def of_state(order: Order) -> Order:
        return tuple(step.each[k] if isinstance(step, Dot) and step.each else step for step in order)

    if isinstance(derivative, Norm | Project):
        return replace(derivative, of=tuple(map(of_state, derivative.of)))
    return of_state(derivative) if isinstance(derivative, tuple) else derivative


def spelled(order: Order) -> str:
    """An order as a user writes it: `x`, or `(x, y)`."""
    steps = [str(step) for step in order]
    return steps[0] if len(steps) == 1 else f"({', '.join(steps)})"


def written(derivative: Derivative) -> str:
    """A derivative as a user writes it."""
    return spelled(derivative) if isinstance(derivative, tuple) else str(derivative)


def _orders(wrt: Any, what: str) -> tuple[Order, ...]:
    wishes = wrt if isinstance(wrt, list) else [wrt]
    orders = []
    for wish in wishes:
        order = wish if isinstance(wish, tuple) else (wish,)
        if not order or not all(map(_is_step, order)):
            raise PlanError(f"dg.{what}({wrt!r}): an argument, a list of arguments, or a tuple (a higher order) is needed")
        orders.append(order)
    if not orders:
        raise PlanError(f"dg.{what}([]) names no argument")
    return tuple(orders)
