"""Ragged rows: a list column of 1 to 50 numbers a row, and the gradient of log-sum-exp in each row's own length."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from harness import Arm, Workload
from torch import Tensor
from torch.func import grad, vmap

import daskgrad as dg

LONGEST = 50


def soft_maximum(x: Tensor) -> Tensor:
    return torch.logsumexp(x, 0)


def masked_soft_maximum(x: Tensor, there: Tensor) -> Tensor:
    return torch.logsumexp(torch.where(there, x, -torch.inf), 0)


def padded_by_hand(column: pd.Series) -> pd.Series:
    """Pad to the longest, mask, differentiate, take the padding out again."""
    lists = column.array.__arrow_array__().combine_chunks()
    lengths = lists.value_lengths().to_numpy()  # (rows,)
    there = np.arange(lengths.max()) < lengths[:, None]  # (rows, longest)
    cells = np.zeros(there.shape)  # (rows, longest)
    cells[there] = lists.flatten().to_numpy()
    gradients = vmap(grad(masked_soft_maximum))(torch.from_numpy(cells), torch.from_numpy(there)).numpy()
    return as_column(pa.ListArray.from_arrays(lists.offsets, gradients[there]), column.index)


def looped(column: pd.Series) -> pd.Series:
    """Row by row."""
    gradients = []
    for cell in column:
        leaf = torch.tensor(cell, dtype=torch.float64, requires_grad=True)
        gradients.append(torch.autograd.grad(soft_maximum(leaf), leaf)[0].numpy())
    return as_column(pa.array(gradients, pa.list_(pa.float64())), column.index)


def as_column(lists: pa.ListArray, index: pd.Index) -> pd.Series:
    return pd.Series(pd.arrays.ArrowExtensionArray(pa.chunked_array([lists])), index=index)


def workload(quick: bool) -> Workload:
    rows, few = (1_000, 50) if quick else (200_000, 4_000)
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, LONGEST, rows, endpoint=True)  # (rows,)
    offsets = np.concatenate([[0], np.cumsum(lengths)])  # (rows + 1,)
    numbers = rng.standard_normal(offsets[-1])  # (elements,)
    column = as_column(pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), numbers), pd.RangeIndex(rows))
    some = column.iloc[:few]
    powers = np.exp(numbers)
    softmax = powers / np.repeat(np.add.reduceat(powers, offsets[:-1]), lengths)  # (elements,)

    def check(name: str, result: pd.Series) -> None:
        lists = result.array.__arrow_array__().combine_chunks()
        assert len(lists) in (rows, few), name
        np.testing.assert_array_equal(lists.value_lengths().to_numpy(), lengths[: len(lists)], err_msg=name)
        np.testing.assert_allclose(lists.flatten().to_numpy(), softmax[: offsets[len(lists)]], rtol=1e-12, err_msg=name)

    return Workload(
        title=f"log-sum-exp of an Arrow list column, 1 to {LONGEST} numbers a row, float64",
        arms=[
            Arm("daskgrad, rows as they are", rows, lambda: dg.grad_column(column, soft_maximum)),
            Arm("by hand: pad, mask, vmap(grad), unpad", rows, lambda: padded_by_hand(column)),
            Arm("serial loop", few, lambda: looped(some)),
        ],
        check=check,
        repeats=1 if quick else 7,
    )
