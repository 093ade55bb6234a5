"""torch's own table of operators, one at a time: a scalar row function made of each, against the row-at-a-time oracle.

Every differentiable float64 operator, by all of its float64 tensors at once: one sample with at least two elements here,
all of its samples with ``DASKGRAD_TESTS=long``. Rows are the sample's tensors at a few scales near 1, which keeps them inside
the operator's domain, and where it has gradients there: rounded (ties and zeros), all equal, all zero. Samples of a single
number come too: there vmap can mix the rows. What is left out, and why, stands in ``EXCLUDED`` and ``REFUSED``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import oracle
import pandas as pd
import pytest
import torch
from compare import assert_cells, object_series, slower_is_fine
from torch.utils import _pytree as pytree

import daskgrad as dg

common = pytest.importorskip("torch.testing._internal.common_methods_invocations")

Tensor = torch.Tensor
LONG = os.environ.get("DASKGRAD_TESTS") == "long"
SCALES = (1.0, 0.99, 0.97, 0.96, 0.94, 0.91)

EXCLUDED: dict[str, str] = {
    "cartesian_prod": "its first argument here has at most one element, or is spread over positional arguments",
    "normal.number_mean": "draws from two Python numbers: there is no tensor to differentiate by",
    "sparse.mm.reduce": "takes a sparse tensor, which no cell of a table is",
    "sparse.sampled_addmm": "takes a sparse tensor, which no cell of a table is",
}


def full_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


OPERATORS = {full_name(op): op for op in common.op_db if torch.float64 in op.supported_backward_dtypes("cpu") and op.supports_autograd}


def weighted(out: Any) -> Tensor:
    """One real number that has every floating output in it, each element with a weight of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in pytree.tree_leaves(out):
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            continue
        parts = [leaf.real, leaf.imag] if leaf.is_complex() else [leaf]
        for part in parts:
            weights = torch.cos(torch.arange(part.numel(), dtype=torch.float64) + 0.3).reshape(part.shape)
            total = total + (part * weights).sum()
    return total


REFUSED: dict[str, str] = {
    "nn.functional.binary_cross_entropy": "plain torch refuses a differentiated weight, a batch goes by a formula that does not",
    "nn.functional.binary_cross_entropy_with_logits": "the same",
    "nn.functional.nll_loss": "the same",
    "nn.functional.cross_entropy": "the same",
    "masked.norm": "order 0: constant for plain torch, of gradient zero in a batch",
    "linalg.lstsq": "a matrix without full rank: which of many answers comes depends on the kernel",
    "linalg.lstsq.grad_oriented": "the same",
    "linalg.qr": "a matrix without full rank: a zero of R is divided by, and is rounding, which depends on the processor",
    "qr": "the same",
    "linalg.eig": "equal eigenvalues: their difference is divided by, and is rounding, which depends on the processor",
    "linalg.det": "a singular matrix: torch perturbs it, and by what depends on the kernel",
}
"""What is tried at the sample's own scales by its first tensor alone, and why."""


def variants(cells: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Rows that go together: near the sample, and at its ties and zeros."""
    yield [{name: cell * scale for name, cell in cells.items()} for scale in SCALES]
    special: list[Callable[[Any], Any]] = [np.round, np.zeros_like, lambda cell: -np.ones_like(cell), lambda cell: np.full_like(cell, 0.5)]
    yield [{name: make(cell) for name, cell in cells.items()} for make in special]


def row_function(op: Any, sample: Any, most: int) -> tuple[Callable[..., Tensor], dict[str, Any]] | None:
    """The operator as a function of at most ``most`` of the sample's float64 tensors, and those; ``None`` where it has none."""
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    tensors = [(k, leaf) for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    places = [k for k, leaf in tensors if leaf.dtype == torch.float64 and leaf.layout == torch.strided]
    names = {f"x{place}": place for place in places[:most]}
    if not names:
        return None

    def fn(**given: Tensor) -> Tensor:
        filled = list(leaves)
        for name, place in names.items():
            filled[place] = given[name]
        first, args, kwargs = pytree.tree_unflatten(filled, spec)
        return weighted(sample.output_process_fn_grad(op(first, *args, **kwargs)))

    namespace: dict[str, Any] = {"fn": fn}
    exec(f"def row({', '.join(names)}):\n    return fn({', '.join(f'{name}={name}' for name in names)})", namespace)
    return namespace["row"], {name: leaves[place].numpy() for name, place in names.items()}


def samples_of(name: str) -> Iterator[tuple[Callable[..., Tensor], dict[str, Any]]]:
    """Row functions with a cell for each of their arguments: the first sample with two elements and the first single number."""
    torch.manual_seed(0)
    np.random.seed(0)
    seen: set[bool] = set()
    for sample in OPERATORS[name].sample_inputs("cpu", torch.float64, requires_grad=False):
        made = row_function(OPERATORS[name], sample, 1 if name in REFUSED else 4)
        if made is None:
            continue
        number = all(cell.size < 2 for cell in made[1].values())
        if number in seen and not LONG:
            continue
        seen.add(number)
        yield made


def outcome(row: dict[str, Any], fn: Callable[..., Tensor]) -> dict[str, Any] | None:
    """Value and gradients of plain autograd, None where it raises."""
    try:
        with oracle.default_dtype(torch.float64):
            leaves = oracle.arguments(row, list(row), torch.float64)
            value = fn(**{name: leaf.clone() for name, leaf in leaves.items()})
            # create_graph=True would take other formulas at singular matrices
            made = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    except (RuntimeError, ValueError):
        return None
    found = {"value": value.detach().numpy()}
    for (name, leaf), g in zip(leaves.items(), made, strict=True):
        found[name] = np.zeros(leaf.shape) if g is None else (g.to_dense() + 0.0).numpy()  # a sparse one, or torch's lazy zero
    return found


def column(cells: list[Any]) -> pd.Series[Any]:
    return object_series(cells) if np.ndim(cells[0]) else pd.Series([float(cell) for cell in cells])


@pytest.mark.parametrize("name", sorted(OPERATORS.keys() - EXCLUDED.keys()))
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")  # torch's on its own operators
@pytest.mark.filterwarnings("ignore:.*failed and have no result:RuntimeWarning")  # some operators refuse every row
def test_operator(name: str) -> None:
    """daskgrad's automatic answer equals plain autograd's, row by row: numbers where that has numbers, missing where it raises."""
    seen = 0
    for fn, cells in samples_of(name):
        for rows in [next(variants(cells))] if name in REFUSED else variants(cells):
            expected = [outcome(row, fn) for row in rows]
            copies = 1 if len(rows) == len(SCALES) else 5  # enough rows for a batch where some of them fail
            rows, expected = rows * copies, expected * copies
            frame = pd.DataFrame({label: column([row[label] for row in rows]).reset_index(drop=True) for label in cells})
            with slower_is_fine():
                got = dg.derivatives(frame, fn, {"value": (), **{label: label for label in cells}}, on_error="null")
            for label in ("value", *cells):
                assert_cells(list(got[label]), [None if row is None else row[label] for row in expected], rtol=1e-9)
            seen += 1
    assert seen, "no sample was tried: list the operator as excluded, with its reason"
