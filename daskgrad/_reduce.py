"""Reductions of a gradient: norms and random projections."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 4096
"""Rows of a projection's matrix that are drawn together; part of what its entries are, never to be changed."""


def norm(gradients: Sequence[Tensor], lead: int) -> Tensor:
    """The Euclidean norm of all elements together: (*rows,) from tensors (*rows, *shape). As torch's, inf and nan pass through."""
    flat = [gradient.reshape(*gradient.shape[:lead], -1) for gradient in gradients]
    length: Tensor = torch.linalg.vector_norm(torch.cat([f.abs() for f in flat], dim=-1), dim=-1)
    return length


def project(gradients: Sequence[Tensor], lead: int, k: int, seed: int) -> Tensor:
    """Each row's elements, in order, times the matrix of `entries`: (*rows, k) from tensors (*rows, *shape)."""
    flat = torch.cat([gradient.reshape(*gradient.shape[:lead], -1) for gradient in gradients], dim=-1)  # (*rows, n)
    total = flat.new_zeros((*flat.shape[:-1], k))
    for start, stop in blocks(flat.shape[-1]):
        matrix = torch.from_numpy(entries(seed, start // BLOCK, k)[: stop - start]).to(flat)
        total = total + flat[..., start:stop] @ matrix
    return total


def column_of_matrix(seed: int, start: int, stop: int, k: int, column: int) -> Tensor:
    """Rows start … stop of one column of the projection's matrix, (stop - start,): all that is ever held of it for a parameter."""
    first, last = start // BLOCK, -(-stop // BLOCK)
    whole = np.concatenate([np.zeros(0), *(_draws(seed, block, column) for block in range(first, last))])
    return torch.from_numpy(whole[start - first * BLOCK : stop - first * BLOCK] / np.sqrt(k))


def blocks(n: int) -> Iterator[tuple[int, int]]:
    """The ranges of BLOCK rows that n rows fall into."""
    for start in range(0, n, BLOCK):
        yield start, min(n, start + BLOCK)


def entries(seed: int, block: int, k: int) -> NDArray[np.float64]:
    """Rows block·BLOCK … of the projection's matrix, (BLOCK, k): entry (i, j) is a function of (seed, i, j) alone, but for the factor
    1/sqrt(k), which makes its variance 1/k.
    """
    matrix: NDArray[np.float64] = np.stack([_draws(seed, block, column) for column in range(k)], axis=1) / np.sqrt(k)
    return matrix


@functools.lru_cache(maxsize=2048)  # 64 MB
def _draws(seed: int, block: int, column: int) -> NDArray[np.float64]:
    """(BLOCK,) draws from N(0, 1).

    Philox (Salmon et al., 2011) is a counter-based generator whose raw stream NumPy keeps the same in all versions; column j has the
    key (seed, j) and block b the counter b. The normal distribution's quantile function makes the draws normal.
    """
    key, counter = np.array([seed % 2**64, column], dtype=np.uint64), np.array([0, block, 0, 0], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw(BLOCK)
    uniform = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    draws: NDArray[np.float64] = torch.special.ndtri(torch.from_numpy(uniform)).numpy()
    return draws
