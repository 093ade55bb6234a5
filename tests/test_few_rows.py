"""Few rows behave as many do: the same answers, and the same errors, for 1, 2, 17 and 1,000 rows, and none for none."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import daskgrad as dg

COUNTS = (1, 2, 17, 1000)
_random = np.random.default_rng(0)
TABLE = pd.DataFrame({f"f{k}": _random.normal(size=1000) for k in range(4)})
TABLE["y"] = _random.normal(size=1000)
for _name in ("int8", "uint8", "int16", "int32", "int64"):
    TABLE[_name] = (np.arange(1000) % 3).astype(_name)
CODES = pd.Series(pd.Categorical(np.resize(["a", "b", "c"], 1000))).cat.codes  # int8
TABLE["code"] = CODES

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
TABLE_OF_VECTORS = nn.Embedding(5, 4).double()

WELL: dict[str, Callable[..., Any]] = {
    "squeeze": lambda x, y: (NET(x).squeeze() - y) ** 2,
    "a batch of one": lambda x, y: F.mse_loss(NET(x[None]), y.reshape(1, 1)),
    "embedding of a code": lambda x, code: (TABLE_OF_VECTORS(code) * x).sum() ** 2,
    "embedding, uint8": lambda x, uint8: (TABLE_OF_VECTORS(uint8) * x).sum() ** 2,
    "embedding, int16": lambda x, int16: (TABLE_OF_VECTORS(int16) * x).sum() ** 2,
    "index, int8": lambda x, int8: x[int8] ** 2,
    "index, uint8": lambda x, uint8: x[uint8] ** 2,
    "gather, int16": lambda x, int16: x.gather(0, int16[None]).sum() ** 2,
    "one_hot, int8": lambda x, int8: (F.one_hot(int8, 4) * x).pow(2).sum(),
    "class, int32": lambda x, int32: F.cross_entropy(x, int32),
    "class, uint8": lambda x, uint8: F.nll_loss(F.log_softmax(x, 0), uint8),
    "integers do not overflow": lambda x, int8: x[0] ** 2 * (int8 * 100),
    "a truth as an integer": lambda y, int64: F.binary_cross_entropy_with_logits(y, int64 // 2),
    "index_select of one place": lambda x, int64: torch.index_select(x, 0, int64).sum() ** 2,
    "index_select, a method": lambda x, int64: x.reshape(2, 2).index_select(1, int64 % 2).sum() ** 2,
    "index_select, the same place": lambda x: torch.index_select(x**2, dim=0, index=torch.tensor(1)).sum(),
    "float": lambda y, int64: y**2 * float(int64),
    "math": lambda y, int8: y**2 * math.sqrt(int8),
    "complex": lambda y, int64: y**2 * complex(int64).real,
    "int": lambda y, int64: y ** int(int64),
    "leaf": lambda x: x.pow(2).sum() * (2 if x.is_leaf else 3),
    "graph": lambda x: x.pow(2).sum() * (2 if x.grad_fn is None else 3),
}


def _arguments(fn: Callable[..., Any]) -> tuple[list[str], dict[str, Any]]:
    names = list(inspect.signature(fn).parameters)
    return names, {"x": ["f0", "f1", "f2", "f3"]} if "x" in names else {}


def _by_autograd(fn: Callable[..., Any], rows: int) -> np.ndarray[Any, Any]:
    """The gradient by the first argument, row by row; integers as torch indexes with them."""
    names, inputs = _arguments(fn)
    found = []
    for row in range(rows):
        cells = [TABLE[inputs.get(name, name)].iloc[row].tolist() for name in names]
        given = [torch.tensor(cell, dtype=torch.int64 if isinstance(cell, int) else torch.float64) for cell in cells]
        leaf = given[0].requires_grad_()
        copy = leaf.clone()
        targets = [g.to(copy.dtype) if fn is WELL["a truth as an integer"] else g for g in given[1:]]
        found.append(torch.autograd.grad(fn(copy, *targets), leaf)[0].numpy())
    return np.stack(found)


@pytest.mark.filterwarnings("ignore::daskgrad.EngineWarning")
@pytest.mark.parametrize("name", WELL)
def test_every_number_of_rows_has_the_same_gradients(name: str) -> None:
    fn = WELL[name]
    names, inputs = _arguments(fn)
    truth = _by_autograd(fn, 17)
    for rows in COUNTS:
        for engine in ("auto", "loop") if rows < 1000 else ("auto",):
            found = dg.grad_column(TABLE.iloc[:rows], fn, wrt=names[0], inputs=inputs, engine=engine).to_numpy()
            few = min(rows, 17)
            np.testing.assert_allclose(found[:few], truth[:few], rtol=1e-12, err_msg=f"{rows} rows, {engine}")
    assert not len(dg.grad_column(TABLE.iloc[:0], fn, wrt=names[0], inputs=inputs))


WRONG: dict[str, Callable[..., Any]] = {
    "a matrix is meant": lambda x: NET(x)[:, 0].sum(),
    "an axis too many": lambda x: x.softmax(1).sum(),
    "two dtypes": lambda x: x @ torch.zeros(4, dtype=torch.float32),
    "a vector": lambda x: x * 2,
    "nothing": lambda x: None,
    "its own": lambda x: {}["key"],
    "a constant": lambda x: x.sum() > 0,
    "out of torch": lambda y: math.exp(y),
    "a dict by tensor": lambda y, int64: y * {0: 1.0}[int64],
}


@pytest.mark.parametrize("name", WRONG)
def test_every_number_of_rows_has_the_same_error(name: str) -> None:
    fn = WRONG[name]
    names, inputs = _arguments(fn)
    said = set()
    for rows in COUNTS:
        with pytest.raises(dg.DaskgradError) as caught:
            dg.grad_column(TABLE.iloc[:rows], fn, wrt=names[0], inputs=inputs)
        said.add((type(caught.value), str(caught.value), caught.value.label))
    assert len(said) == 1, said


@pytest.mark.parametrize("rows", COUNTS)
def test_what_only_a_batch_can_do_has_a_result_in_few_rows_too(rows: int) -> None:
    """Torch knows operations that only vmap can do: here one that refuses what is no batch, and in some rows does so in a batch too."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if y < 0:
            return torch.ones(2) @ x  # of another length: no row of this kind has a result
        return (x if torch._C._functorch.is_batchedtensor(x) else torch.cdist(x, x)).pow(2).sum()

    part = TABLE.iloc[:rows]
    found = dg.grad_column(part, fn, wrt="x", inputs={"x": ["f0", "f1", "f2", "f3"]}, on_error="null")
    meant = 2 * part[["f0", "f1", "f2", "f3"]].where(part.y >= 0)
    np.testing.assert_allclose(found.to_numpy(), meant.to_numpy())
