"""An answer to compare with, made one row at a time by plain ``torch.autograd.grad``.

It shares nothing with daskgrad: no import, no vmap, no pandas. A row is a mapping from argument name to cell, where a
cell is a Python number, a sequence of numbers, a NumPy array, a text, or ``None`` for a missing value. Central
differences are a second opinion that does not use autograd either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Cell = Any
Row = Mapping[str, Cell]
RowFunction = Callable[..., Any]
Array = npt.NDArray[Any]

# Rule 1 and rule 5 of the design, by hand: the dtype of a column → the dtype of a gradient taken with respect to it.
RESULT_DTYPE: dict[str, str] = {
    "float16": "float16",
    "float32": "float32",
    "float64": "float64",
    "int8": "float64",
    "int16": "float64",
    "int32": "float64",
    "int64": "float64",
    "uint8": "float64",
    "uint16": "float64",
    "uint32": "float64",
    "uint64": "float64",
    "complex64": "complex64",
    "complex128": "complex128",
    "Float32": "Float32",
    "Float64": "Float64",
    "Int8": "Float64",
    "Int32": "Float64",
    "Int64": "Float64",
    "UInt8": "Float64",
    "float[pyarrow]": "float[pyarrow]",
    "double[pyarrow]": "double[pyarrow]",
    "int32[pyarrow]": "double[pyarrow]",
    "int64[pyarrow]": "double[pyarrow]",
    "object": "object",
}
# Columns that can be read by a row function but never differentiated.
REFUSED_DTYPES: tuple[str, ...] = (
    "bool",
    "boolean",
    "bool[pyarrow]",
    "str",
    "category",
    "datetime64[ns]",
    "timedelta64[ns]",
)


class Unreached(Exception):
    """No requested argument reaches the output of this row: the contract's ``GraphError``."""


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch's default floating dtype set for a while: what the contract promises inside a row function."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def is_missing(cell: Cell) -> bool:
    """True for a missing value: ``None`` itself or a list with ``None`` inside. NaN is a number."""
    if cell is None:
        return True
    return isinstance(cell, (list, tuple)) and any(is_missing(part) for part in cell)


def is_static(cell: Cell) -> bool:
    """True for what reaches the row function as the plain Python value."""
    return not isinstance(cell, (bool, int, float, complex, list, tuple, np.ndarray, np.generic, torch.Tensor))


def as_tensor(cell: Cell, dtype: torch.dtype, differentiated: bool) -> torch.Tensor:
    """A fresh leaf for one cell. Integers stay integers unless they are differentiated; floats become ``dtype``."""
    array = np.array(cell)  # a copy: an in-place write acts on the row's own tensor
    tensor = torch.from_numpy(array) if array.ndim else torch.tensor(array.item())
    if tensor.is_complex():
        tensor = tensor.to(torch.complex64 if dtype == torch.float32 else torch.complex128)
    elif differentiated or tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor.requires_grad_(differentiated)


def arguments(row: Row, wrt: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
    """What the row function is called with."""
    return {k: cell if is_static(cell) else as_tensor(cell, dtype, k in wrt) for k, cell in row.items()}


def as_output(out: Any, vector: bool = False) -> torch.Tensor:
    """The output as a number (or, for a Jacobian, as it is)."""
    if not isinstance(out, torch.Tensor):
        raise Unreached(f"a constant came back: {out!r}")
    if not vector and out.numel() != 1:
        raise TypeError(f"not one number: {tuple(out.shape)}")
    return out if vector else out.reshape(())


def step(out: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """d out / d by, attached: shape is out's axes, then by's. Zero where ``by`` has no path to ``out``."""
    rows = []
    for element in out.reshape(-1):
        grad = None
        if element.requires_grad:
            (grad,) = torch.autograd.grad(element, by, create_graph=True, allow_unused=True)
        rows.append(torch.zeros_like(by) if grad is None else grad)
    flat = torch.stack(rows) if rows else by.new_zeros((0, *by.shape))  # (outputs, *by)
    return flat.reshape((*out.shape, *by.shape))


def reaches(out: torch.Tensor, leaves: Sequence[torch.Tensor]) -> bool:
    """True when some leaf has a path to ``out``."""
    if not out.requires_grad:
        return False
    grads = torch.autograd.grad(out.sum(), list(leaves), retain_graph=True, allow_unused=True)
    return any(g is not None for g in grads)


def row_derivatives(
    row: Row,
    fn: RowFunction,
    wanted: Mapping[str, tuple[str, ...]],
    dtype: torch.dtype = torch.float64,
    *,
    vector: bool = False,
    allow_unused: bool = False,
) -> dict[str, Array]:
    """Every wanted derivative of one row, each a path of argument names: () the value, ("x", "y") by x and then by y.

    Raises ``Unreached`` when no argument named in any path reaches the output, and whatever ``fn`` raises.
    """
    named = sorted({name for path in wanted.values() for name in path})
    with default_dtype(dtype), torch.enable_grad():
        leaves = arguments(row, named, dtype)
        # A clone: fn may write into its argument, which a leaf forbids.
        given = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in leaves.items()}
        out = fn(**given)
        if allow_unused and not isinstance(out, torch.Tensor):
            out = torch.tensor(float(out))
        out = as_output(out, vector)
        if named and not allow_unused and not reaches(out, [leaves[k] for k in named]):
            raise Unreached("no requested argument reaches the output")
        found: dict[str, Array] = {}
        for label, path in wanted.items():
            at = out
            for name in path:
                at = step(at, leaves[name])
            found[label] = at.detach().cpu().resolve_conj().numpy().copy()
        return found


def gradient(rows: Sequence[Row], fn: RowFunction, wrt: str, dtype: torch.dtype = torch.float64, **options: Any) -> list[Array | None]:
    """d fn / d wrt for each row, in the argument's own shape; ``None`` for a row with a missing value."""
    return derivative(rows, fn, (wrt,), dtype, **options)


def derivative(
    rows: Sequence[Row], fn: RowFunction, path: tuple[str, ...], dtype: torch.dtype = torch.float64, **options: Any
) -> list[Array | None]:
    """The derivative by each name in ``path`` in turn, for each row."""
    return [None if any(map(is_missing, row.values())) else row_derivatives(row, fn, {"d": path}, dtype, **options)["d"] for row in rows]


def jacobian(rows: Sequence[Row], fn: RowFunction, wrt: str, dtype: torch.dtype = torch.float64) -> list[Array | None]:
    """The Jacobian of a vector-valued function for each row: output axes, then input axes."""
    return derivative(rows, fn, (wrt,), dtype, vector=True)


def outcomes(
    rows: Sequence[Row], fn: RowFunction, wrt: Sequence[str], dtype: torch.dtype = torch.float64
) -> list[dict[str, Array] | Exception | None]:
    """For each row: its gradients, ``None`` where a value is missing, or the exception the row deserves."""
    found: list[dict[str, Array] | Exception | None] = []
    for row in rows:
        if any(map(is_missing, row.values())):
            found.append(None)
            continue
        try:
            found.append(row_derivatives(row, fn, {name: (name,) for name in wrt}, dtype))
        except Exception as error:
            found.append(error)
    return found


def numeric(row: Row, fn: RowFunction, wrt: str, step_size: float = 1e-6) -> Array:
    """Central differences in float64, element by element; for a complex cell d/dRe + i·d/dIm, as torch has it."""

    def value(array: Array) -> float:
        with default_dtype(torch.float64), torch.no_grad():
            given = arguments({**row, wrt: array}, (), torch.float64)
            out = fn(**given)
            return float(out)

    centre = np.array(row[wrt])
    directions: tuple[complex, ...] = (1.0,)
    if np.iscomplexobj(centre):
        directions = (1.0, 1j)
    else:
        centre = centre.astype(np.float64)
    slope = np.zeros(centre.shape, dtype=centre.dtype)
    for place in np.ndindex(centre.shape):
        for direction in directions:
            h = step_size * max(1.0, float(abs(centre[place])))
            ahead, behind = centre.copy(), centre.copy()
            ahead[place] += h * direction
            behind[place] -= h * direction
            slope[place] += direction * (value(ahead) - value(behind)) / (2 * h)
    return slope


def price_call(spot: Any, strike: Any, vol: Any, rate: Any, expiry: Any) -> torch.Tensor:
    """The Black-Scholes price of a European call."""
    root = vol * torch.sqrt(expiry)
    d1 = (torch.log(spot / strike) + (rate + vol * vol / 2) * expiry) / root
    price: torch.Tensor = spot * torch.special.ndtr(d1) - strike * torch.exp(-rate * expiry) * torch.special.ndtr(d1 - root)
    return price


def call_greeks(spot: float, strike: float, vol: float, rate: float, expiry: float) -> dict[str, float]:
    """Closed forms of the call's derivatives, with Python's own ``math``: nothing here is differentiated."""
    root_t = math.sqrt(expiry)
    d1 = (math.log(spot / strike) + (rate + vol * vol / 2) * expiry) / (vol * root_t)
    d2 = d1 - vol * root_t
    density = math.exp(-d1 * d1 / 2) / math.sqrt(2 * math.pi)
    discounted = strike * math.exp(-rate * expiry)
    below1, below2 = math.erfc(-d1 / math.sqrt(2)) / 2, math.erfc(-d2 / math.sqrt(2)) / 2
    vega = spot * density * root_t
    gamma = density / (spot * vol * root_t)
    return {
        "value": spot * below1 - discounted * below2,
        "delta": below1,
        "vega": vega,
        "rho": discounted * expiry * below2,
        "by_strike": -math.exp(-rate * expiry) * below2,
        "by_expiry": spot * density * vol / (2 * root_t) + rate * discounted * below2,
        "gamma": gamma,
        "vanna": -density * d2 / vol,
        "volga": vega * d1 * d2 / vol,
        "charm": density * (2 * rate * expiry - d2 * vol * root_t) / (2 * expiry * vol * root_t),  # d delta / d expiry
        "speed": -gamma / spot * (d1 / (vol * root_t) + 1),
    }
