"""torch's own table of operators, one at a time: a scalar row function made of each, against the row-at-a-time oracle.

Every differentiable float64 operator: its first sample with at least two elements here, all of its samples with
``DASKGRAD_TESTS=long``. Rows are the sample's input at a few scales near 1, which keeps it inside the operator's
domain. What is left out, and why, stands in ``EXCLUDED``.
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
from torch.testing._internal import common_methods_invocations as common  # needs expecttest
from torch.utils import _pytree as pytree

import daskgrad as dg

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


def row_function(op: Any, sample: Any) -> tuple[Callable[[Tensor], Tensor], Tensor] | None:
    """The operator as a function of the sample's first tensor, all else held; ``None`` where it is no float64 tensor."""
    held = pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (sample.args, sample.kwargs))
    args, kwargs = held
    first = sample.input
    if isinstance(first, Tensor):
        rest: list[Tensor] | None = None
    elif isinstance(first, (list, tuple)) and first and isinstance(first[0], Tensor):
        rest = [part.detach() for part in first[1:]]
        first = first[0]
    else:
        return None
    if first.dtype != torch.float64 or first.layout != torch.strided:
        return None

    def fn(x: Tensor) -> Tensor:
        given: Any = x if rest is None else [x, *rest]
        return weighted(sample.output_process_fn_grad(op(given, *args, **kwargs)))

    return fn, first.detach()


def samples_of(op: Any) -> Iterator[tuple[Callable[[Tensor], Tensor], list[Any]]]:
    """Row functions with the cells of their rows."""
    torch.manual_seed(0)
    np.random.seed(0)
    for sample in op.sample_inputs("cpu", torch.float64, requires_grad=True):
        made = row_function(op, sample)
        if made is None:
            continue
        fn, cell = made
        if cell.numel() < 2 and not LONG:
            continue
        yield fn, [cell.numpy() * scale for scale in SCALES]
        if not LONG:
            return


@pytest.mark.parametrize("name", sorted(OPERATORS.keys() - EXCLUDED.keys()))
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")  # torch's on its own operators
def test_operator(name: str) -> None:
    """daskgrad's automatic answer equals plain autograd's, row by row."""
    seen = 0
    for fn, cells in samples_of(OPERATORS[name]):
        expected = oracle.gradient([{"x": cell} for cell in cells], fn, "x")
        with slower_is_fine():
            got = dg.grad_column(pd.DataFrame({"x": object_series(cells)}), fn)
        assert_cells([np.asarray(cell) for cell in got], expected, rtol=1e-9)
        seen += 1
    assert seen, "no sample was tried: list the operator as excluded, with its reason"


def test_exclusions_are_real() -> None:
    """Each excluded name is an operator of this torch; the list does not outlive its reasons."""
    assert EXCLUDED.keys() <= OPERATORS.keys()
