"""Gradients by shared parameters: every rule, and what is made of them, against gradients that are formed one row at a time.

The oracle is plain ``torch.autograd.grad`` by the parameters of a copy of the model, for each row anew.
"""

from __future__ import annotations

import copy
import os
import pickle
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import dask
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import oracle
import pandas as pd
import pytest
import torch
from compare import ENGINES, assert_cells, computed, in_equal_parts, object_series, slower_is_fine
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import daskgrad as dg
from daskgrad import _contributions, _parameters
from daskgrad._reduce import entries

Tensor = torch.Tensor
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")


# --- the oracle -------------------------------------------------------------------------------------------------------


def leaves_of(shared: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every floating tensor of the shared arguments, by path."""
    found: dict[str, Tensor] = {}
    for name, value in shared.items():
        if isinstance(value, nn.Module):
            found.update({f"{name}.{path}": parameter for path, parameter in value.named_parameters()})
        elif isinstance(value, dict):
            found.update({f"{name}.{key}": tensor for key, tensor in value.items()})
        elif isinstance(value, Tensor):
            found[name] = value
    return found


def formed(rows: Sequence[oracle.Row], fn: Callable[..., Any], shared: Mapping[str, Any], dtype: torch.dtype) -> list[Any]:
    """For each row the gradient by every path, or None where a value is missing."""
    found: list[Any] = []
    for row in rows:
        if any(oracle.is_missing(cell) for cell in row.values()):
            found.append(None)
            continue
        mine = copy.deepcopy(dict(shared))
        leaves = {path: tensor.requires_grad_() for path, tensor in leaves_of(mine).items()}
        with oracle.default_dtype(dtype):
            value = oracle.as_output(fn(**mine, **oracle.arguments(row, (), dtype)))
        gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        found.append(
            {
                path: torch.zeros(leaf.shape, dtype=dtype) if gradient is None else gradient.to_dense().detach()
                for (path, leaf), gradient in zip(leaves.items(), gradients, strict=True)
            }
        )
    return found


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    columns = {name: list(frame[name]) for name in frame}
    return [{str(name): _cell(cells[place]) for name, cells in columns.items()} for place in range(len(frame))]


def _cell(cell: Any) -> Any:
    return None if np.ndim(cell) == 0 and cell is pd.NA else cell


def directions(shared: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    leaves = leaves_of(shared)
    return {path: torch.randn(leaves[path].shape, generator=generator, dtype=torch.float64) for path in paths}


def assert_by_parameters(
    frame: pd.DataFrame,
    fn: Callable[..., Any],
    shared: Mapping[str, Any],
    wish: str = "model",
    *,
    below: Callable[[str], bool] = lambda path: True,
    engines: Sequence[str] = ENGINES,
    dtype: torch.dtype = torch.float64,
    rtol: float = 1e-9,
    **options: Any,
) -> None:
    """The norm, a direction, a projection and the gradient itself by ``wish`` are those of the formed gradients.

    ``below`` tells the paths that the wish means.
    """
    paths = [path for path in leaves_of(shared) if below(path)]
    vector = directions(shared, paths)
    gradients = formed(rows_of(frame), fn, shared, dtype)
    flat = [None if g is None else torch.cat([g[path].reshape(-1) for path in paths]).double() for g in gradients]
    along = torch.cat([vector[path].reshape(-1) for path in paths])
    matrix = torch.from_numpy(entries(5, 0, 3)[: len(along)])
    expected: dict[str, list[Any]] = {
        "norm": [None if g is None else float(g.norm()) for g in flat],
        "dot": [None if g is None else float(g @ along) for g in flat],
        "project": [None if g is None else (g @ matrix).numpy() for g in flat],
        "gradient": [None if g is None else g.numpy() for g in flat],
    }
    if paths == [wish] and not vector[wish].dim():  # a number by a number
        expected["gradient"] = [None if g is None else float(g) for g in flat]
    given = vector if len(paths) > 1 or paths != [wish] else vector[wish]
    wanted: Any = {"norm": dg.norm(wish), "dot": dg.dot(wish, given), "project": dg.project(wish, 3, 5), "gradient": wish}
    largest = max((float(g.norm()) for g in flat if g is not None), default=0.0)
    for engine in engines:
        with slower_is_fine():
            got = dg.derivatives(frame, fn, wanted, shared=dict(shared), engine=engine, **options)
        for label, cells in expected.items():
            assert_cells(list(got[label]), cells, rtol, rtol * max(1.0, largest) * (len(along) ** 0.5 if label == "dot" else 1))


def table(*shape: int, rows: int = 9, seed: int = 0) -> pd.DataFrame:
    """A column `x` of arrays and one `y` of numbers."""
    rng = np.random.default_rng(seed)
    return pd.DataFrame({"x": object_series([rng.standard_normal(shape) for _ in range(rows)]).array, "y": rng.standard_normal(rows)})


def tokens(count: int, length: int, rows: int = 9) -> pd.DataFrame:
    rng = np.random.default_rng(1)
    return pd.DataFrame({"x": object_series([rng.integers(0, count, length) for _ in range(rows)]).array, "y": rng.standard_normal(rows)})


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The module in float64, with parameters that are drawn, also those that torch starts at 0 and 1."""
    torch.manual_seed(0)
    module = make().double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def reading(out: Tensor, y: Tensor) -> Tensor:
    """A number of an output of any shape, to which every element contributes otherwise."""
    flat = out.reshape(-1)
    return (torch.cos(flat * torch.linspace(0.5, 2.0, flat.numel())) + flat * y).sum()


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return reading(model(x), y)


# --- every rule -------------------------------------------------------------------------------------------------------

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3), (5,)),
    "linear without bias": (lambda: nn.Linear(5, 3, bias=False), (5,)),
    "linear on a sequence, short": (lambda: nn.Linear(6, 5), (2, 6)),
    "linear on a sequence, long": (lambda: nn.Linear(3, 2), (11, 3)),
    "linear on two leading axes": (lambda: nn.Linear(3, 4), (2, 3, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3), (2, 9)),
    "conv1d with all options": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), (4, 12)),
    "conv1d same": (lambda: nn.Conv1d(2, 3, 3, padding="same", dilation=2), (2, 9)),
    "conv1d same, even": (lambda: nn.Conv1d(2, 3, 4, padding="same"), (2, 9)),
    "conv1d valid": (lambda: nn.Conv1d(2, 3, 3, padding="valid"), (2, 9)),
    "conv1d with samples": (lambda: nn.Conv1d(2, 3, 3, padding=1), (4, 2, 7)),
    "conv1d circular": (lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), (2, 7)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3), (2, 6, 7)),
    "conv2d with all options": (
        lambda: nn.Conv2d(4, 6, (2, 3), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2, bias=False),
        (4, 6, 7),
    ),
    "conv2d same": (lambda: nn.Conv2d(2, 3, 3, padding="same"), (2, 5, 6)),
    "conv2d depthwise": (lambda: nn.Conv2d(3, 6, 3, groups=3, padding=1), (3, 5, 5)),
    "conv2d with samples": (lambda: nn.Conv2d(2, 3, (1, 2)), (3, 2, 4, 4)),
    "conv2d reflect": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2), (1, 3, 3, 3)),
    "conv2d of many channels": (lambda: nn.Conv2d(8, 4, 3, padding=1), (8, 9, 8)),
    "conv1d of many channels, all options": (lambda: nn.Conv1d(16, 6, 3, stride=2, padding=2, dilation=2, groups=2), (3, 16, 24)),
    "conv transposed": (lambda: nn.ConvTranspose2d(2, 3, 2, stride=2), (2, 3, 3)),
    "conv transposed with all options": (
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=2, groups=2, dilation=3),
        (3, 4, 5),
    ),
    "conv transposed of volumes": (lambda: nn.ConvTranspose3d(2, 2, 2), (1, 2, 2, 3, 2)),
    "conv of more patches than are made at once": (lambda: nn.Conv2d(8, 1, 16), (8, 38, 38)),
    "layer norm": (lambda: nn.LayerNorm(5), (5,)),
    "layer norm on a sequence": (lambda: nn.LayerNorm(5), (3, 5)),
    "layer norm of two axes": (lambda: nn.LayerNorm((3, 5), eps=1e-2), (4, 3, 5)),
    "layer norm without bias": (lambda: nn.LayerNorm(5, bias=False), (2, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (1, 4, 3)),
    "group norm of an image": (lambda: nn.GroupNorm(2, 4, eps=1e-2), (3, 4, 3, 2)),
    "group norm without axes": (lambda: nn.GroupNorm(3, 6), (2, 6)),
    "rms norm": (lambda: nn.RMSNorm(5), (5,)),
    "rms norm of two axes": (lambda: nn.RMSNorm((2, 5), eps=1e-3), (3, 2, 5)),
    "batch norm in eval": (lambda: nn.BatchNorm1d(4).eval(), (3, 4)),
    "batch norm of images in eval": (lambda: nn.BatchNorm2d(2).eval(), (1, 2, 3, 3)),
    "batch norm in eval, without statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False).eval(), (3, 4, 2)),
    "instance norm": (lambda: nn.InstanceNorm1d(3, affine=True), (2, 3, 5)),
    "instance norm of one image": (lambda: nn.InstanceNorm2d(2, affine=True, eps=1e-2), (2, 3, 4)),
    "instance norm in eval": (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True).eval(), (2, 3, 5)),
    "prelu": (lambda: nn.PReLU(3), (2, 3)),
    "bilinear": (lambda: _Twice(nn.Bilinear(3, 3, 2)), (3,)),
    "lstm": (lambda: _First(nn.LSTM(3, 4, num_layers=2, batch_first=True)), (5, 3)),
    "lstm, both ways": (lambda: _First(nn.LSTM(2, 3, bidirectional=True)), (4, 2)),
    "lstm with projections": (lambda: _First(nn.LSTM(3, 5, proj_size=2, bidirectional=True)), (4, 3)),
    "lstm without bias": (lambda: _First(nn.LSTM(3, 2, bias=False)), (3, 3)),
    "rnn": (lambda: _First(nn.RNN(3, 4, num_layers=2)), (5, 3)),
    "rnn of relu": (lambda: _First(nn.RNN(3, 4, nonlinearity="relu", batch_first=True)), (5, 3)),
    "gru cell": (lambda: nn.GRUCell(3, 4), (3,)),
    "rnn, its weight used elsewhere, too": (lambda: _LooksAtItself(), (4, 3)),
    "gru": (lambda: _First(nn.GRU(3, 4)), (5, 3)),
    "lstm cell": (lambda: _First(nn.LSTMCell(3, 4)), (3,)),
    "attention": (lambda: _Attention(6, 2), (4, 6)),
    "attention of other widths": (lambda: _Attention(6, 3, kdim=4, vdim=5), (4, 15)),
    "transformer encoder": (lambda: _encoder(), (4, 6)),
    "transformer encoder in train mode": (lambda: _encoder().train(), (4, 6)),
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)), (6,)),
    "cnn": (lambda: _cnn(), (1, 8, 8)),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 3)), nn.Tanh(), nn.Linear(3, 2)), (5,)),
    "spectral norm in eval": (lambda: parametrizations.spectral_norm(nn.Linear(5, 3)).eval(), (5,)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), (4,)),
    "slices": (lambda: _Slices(), (4,)),
    "slices that overlap": (lambda: _Slices(overlap=True), (4,)),
    "tied": (lambda: _Tied(), (4,)),
    "tied convolutions": (lambda: _TiedConvolutions(), (2, 6)),
    "tied, transposed": (lambda: _TiedTransposed(), (5,)),
    "reused": (lambda: _Reused(), (4,)),
    "in a loop": (lambda: _Loop(), (3,)),
    "regularised": (lambda: _Regularised(), (4,)),
    "detached and again": (lambda: _Detached(), (4,)),
    "written into": (lambda: _WrittenInto(), (4,)),
    "functional": (lambda: _Functional(), (4,)),
    "a branch": (lambda: _Branch(), (4,)),
}


class _Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x, x)
        return out


class _First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[0]
        return out


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, **others: Any) -> None:
        super().__init__()
        self.widths = [width, others.get("kdim", 0), others.get("vdim", 0)]
        self.inner = nn.MultiheadAttention(width, heads, batch_first=True, **others)

    def forward(self, x: Tensor) -> Tensor:
        query, *others = x.split([n for n in self.widths if n], -1)
        out: Tensor = self.inner(query, *(others or (query, query)))[0]
        return out


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, dim_feedforward=7, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(0, (1, 1)),
        nn.Conv2d(1, 3, 3, padding=1),
        nn.GroupNorm(1, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4).eval(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


class _Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x)))
        return out


class _TiedTransposed(nn.Module):
    """An auto-encoder whose decoder is the encoder's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.encoder(x))
        return hidden @ self.encoder.weight


class _TiedConvolutions(nn.Module):
    """The same kernel one after the other, once in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(torch.tanh(self.inner(x)))
        return out + F.conv1d(x.repeat(2, 1), self.inner.weight, groups=2, padding=1)


class _Slices(nn.Module):
    """One weight, of which layers take parts."""

    def __init__(self, overlap: bool = False) -> None:
        super().__init__()
        self.overlap = overlap
        self.weight, self.bias = nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        first, second, _ = self.weight.chunk(3)
        bias, _ = torch.split(self.bias, [2, 4], dim=0)
        out = F.linear(torch.tanh(F.linear(x, first, bias)).repeat(2), second) + F.linear(x, first)
        return out + F.linear(x, self.weight.split(3)[0])[:2] if self.overlap else out


class _LooksAtItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.RNN(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[0]
        return out + self.inner.weight_hh_l0.square().mean()


class _Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for _ in range(3):
            out = self.norm(torch.tanh(self.layer(out)))
        return out


class _Loop(nn.Module):
    """As many steps as the row says."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        while x.abs().sum() < 4:
            x = x * 1.5 + torch.tanh(self.step(x)) + 0.2
        return x


class _Regularised(nn.Module):
    """Its weight counts in the loss, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.scale + self.layer.weight.square().sum() + self.layer.weight.T[0]
        return out


class _Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.layer(2 * x)
        out: Tensor = self.layer(x) - target + F.linear(x, self.layer.weight.detach())
        return out


class _WrittenInto(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        out[0] = 2.0
        out *= 2
        return out + self.layer(x)


class _Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = F.linear(bias=self.layer.bias, input=x, weight=self.layer.weight)
        out: Tensor = torch.func.functional_call(self.layer, dict(self.layer.named_parameters()), (torch.tanh(first),))
        return out


class _Branch(nn.Module):
    """Rows take different layers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.left(x) if x[0] > 0 else torch.tanh(self.right(x))
        return out


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(name: str) -> None:
    make, shape = LAYERS[name]
    assert_by_parameters(table(*shape), loss, {"model": seeded(make)})


WITHOUT_RULES = {
    "batch norm in eval, without statistics",
    "prelu",
    "bilinear",
    "weight norm",
    "spectral norm in eval",
    "orthogonal",
    "tied, transposed",
    "regularised",
    "rnn, its weight used elsewhere, too",
}


def test_patches_that_are_picked() -> None:
    shape = (2, 9, 13)
    picking = mock.patch.object(_parameters, "picking_pays", wraps=_parameters.picking_pays)
    with picking as asked, mock.patch.object(_parameters, "convolved_pays", return_value=False):
        model = seeded(lambda: nn.Conv2d(2, 3, (4, 3), stride=2)).float()
        assert_by_parameters(table(*shape, rows=40), loss, {"model": model}, engines=["vmap"], dtype=torch.float32, rtol=2e-5)
    assert any(_parameters.picking_pays(*call.args) for call in asked.call_args_list)


@pytest.mark.parametrize("name", LAYERS)
def test_which_layers_have_rules(name: str) -> None:
    make, shape = LAYERS[name]
    text = str(dg.explain(table(*shape), loss, wrt=dg.norm("model"), shared={"model": seeded(make)}))
    assert "never formed" in text
    assert ("having no rule" in text) == (name in WITHOUT_RULES)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding_idx": 2},
        {"padding_idx": -1},
        {"scale_grad_by_freq": True},
        {"sparse": True},
        {"max_norm": 0.5},
        {"max_norm": 0.5, "norm_type": 1.0, "padding_idx": 0},
    ],
)
@pytest.mark.parametrize("length", [1, 4, 30])
def test_an_embedding(options: dict[str, Any], length: int) -> None:
    assert_by_parameters(tokens(6, length), loss, {"model": seeded(lambda: nn.Embedding(6, 3, **options))})


def test_embedding_bags() -> None:
    def fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return reading(model(x.reshape(1, -1)), y)

    assert_by_parameters(tokens(6, 5), fn, {"model": seeded(lambda: nn.EmbeddingBag(6, 3, mode="mean"))})


class _Language(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding, self.hidden, self.out = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)
        if tied:
            self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.hidden(self.embedding(x))))
        return out


@pytest.mark.parametrize("length", [1, 3, 20])
def test_tied_embeddings(length: int) -> None:
    def fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), x.roll(1)) * y

    model = seeded(_Language)
    assert [name for name, _ in model.named_parameters()].count("embedding.weight") == 1
    assert_by_parameters(tokens(7, length), fn, {"model": model})


# --- any size ---------------------------------------------------------------------------------------------------------


@given(
    steps=st.integers(1, 9),
    size_in=st.integers(1, 6),
    size_out=st.integers(1, 6),
    bias=st.booleans(),
    uses=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_linear_of_any_size(steps: int, size_in: int, size_out: int, bias: bool, uses: int, seed: int) -> None:
    def fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(())
        for k in range(uses):
            total = total + reading(model(torch.sin(x + k)), y)
        return total

    model = seeded(lambda: nn.Linear(size_in, size_out, bias=bias))
    assert_by_parameters(table(steps, size_in, rows=5, seed=seed), fn, {"model": model}, engines=["vmap"])


@given(
    dims=st.integers(1, 2),
    channels=st.integers(1, 3),
    per_group=st.integers(1, 2),
    groups=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.one_of(st.integers(0, 2), st.sampled_from(["same", "valid"])),
    dilation=st.integers(1, 2),
    samples=st.integers(0, 2),
    bias=st.booleans(),
    by_kernels=st.booleans(),
    picked=st.booleans(),
    alone=st.sampled_from([0, 2**25]),
)
def test_convolutions_of_any_kind(
    dims: int,
    channels: int,
    per_group: int,
    groups: int,
    kernel: int,
    stride: int,
    padding: int | str,
    dilation: int,
    samples: int,
    bias: bool,
    by_kernels: bool,
    picked: bool,
    alone: int,
) -> None:
    kind: Any = nn.Conv1d if dims == 1 else nn.Conv2d
    stride = 1 if padding == "same" else stride
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "bias": bias}
    model = seeded(lambda: kind(groups * channels, groups * per_group, kernel, **options))
    shape = (*([samples] if samples else []), groups * channels, *([6, 7][:dims]))
    by = mock.patch.multiple(_parameters, convolved_pays=lambda *_: by_kernels, picking_pays=lambda *_: picked)  # else these are too small
    with by, mock.patch.multiple(_contributions, ALONE=alone, CHANNELS=0):
        assert_by_parameters(table(*shape, rows=5), loss, {"model": model}, engines=["vmap"])


@given(
    dims=st.integers(1, 2),
    channels=st.integers(1, 2),
    per_group=st.integers(1, 3),
    groups=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 1),
    more=st.integers(0, 2),
    dilation=st.integers(1, 3),
    samples=st.integers(0, 2),
    by_kernels=st.booleans(),
    picked=st.booleans(),
    alone=st.sampled_from([0, 2**25]),
)
def test_transposed_convolutions_of_any_kind(
    dims: int,
    channels: int,
    per_group: int,
    groups: int,
    kernel: int,
    stride: int,
    padding: int,
    more: int,
    dilation: int,
    samples: int,
    by_kernels: bool,
    picked: bool,
    alone: int,
) -> None:
    kind: Any = nn.ConvTranspose1d if dims == 1 else nn.ConvTranspose2d
    more = min(more, max(stride, dilation) - 1)  # torch's limit
    options = {"stride": stride, "padding": padding, "output_padding": more, "dilation": dilation, "groups": groups}
    model = seeded(lambda: kind(groups * channels, groups * per_group, kernel, **options))
    shape = (*([samples] if samples else []), groups * channels, *([4, 5][:dims]))
    by = mock.patch.multiple(_parameters, convolved_pays=lambda *_: by_kernels, picking_pays=lambda *_: picked)  # else these are too small
    with by, mock.patch.multiple(_contributions, ALONE=alone, CHANNELS=0):
        assert_by_parameters(table(*shape, rows=5), loss, {"model": model}, engines=["vmap"])


@given(
    kind=st.sampled_from(["batch", "instance", "group", "instance in eval"]),
    samples=st.integers(1, 3),
    channels=st.integers(1, 4),
    axes=st.integers(1, 3),
    eps=st.sampled_from([1e-5, 1e-1]),
)
def test_norms_of_channels_of_any_size(kind: str, samples: int, channels: int, axes: int, eps: float) -> None:
    def make() -> nn.Module:
        if kind == "group":
            return nn.GroupNorm(channels, 2 * channels, eps=eps)
        family: Any = getattr(nn, f"{'Batch' if kind == 'batch' else 'Instance'}Norm{axes}d")
        layer: nn.Module = family(2 * channels, eps=eps, affine=True, track_running_stats=kind != "instance")
        for name, buffer in layer.named_buffers():
            if name != "num_batches_tracked":
                buffer.copy_(torch.rand_like(buffer) + 0.5)
        return layer.eval()

    shape = (samples, 2 * channels, *([3, 2, 2][:axes]))
    assert_by_parameters(table(*shape, rows=5), loss, {"model": seeded(make)}, engines=["vmap"])


@given(
    kind=st.sampled_from([nn.RNN, nn.GRU, nn.LSTM]),
    steps=st.integers(1, 5),
    size_in=st.integers(1, 4),
    size=st.integers(1, 4),
    layers=st.integers(1, 2),
    both=st.booleans(),
    bias=st.booleans(),
    first=st.booleans(),
)
def test_recurrent_layers_of_any_size(
    kind: Any, steps: int, size_in: int, size: int, layers: int, both: bool, bias: bool, first: bool
) -> None:
    def make() -> nn.Module:
        return _First(kind(size_in, size, num_layers=layers, bidirectional=both, bias=bias, batch_first=first))

    assert_by_parameters(table(steps, size_in, rows=5), loss, {"model": seeded(make)}, engines=["vmap"])


@given(length=st.integers(1, 12), count=st.integers(1, 8), width=st.integers(1, 4), padding=st.booleans(), axes=st.booleans())
def test_embeddings_of_any_size(length: int, count: int, width: int, padding: bool, axes: bool) -> None:
    def fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return reading(model(x.reshape(1, -1, 1) if axes else x), y)

    model = seeded(lambda: nn.Embedding(count, width, padding_idx=0 if padding else None))
    assert_by_parameters(tokens(count, length, rows=5), fn, {"model": model}, engines=["vmap"])


@given(depth=st.integers(1, 4), width=st.integers(1, 5), norm=st.sampled_from(["layer", "rms", "none"]), seed=st.integers(0, 99))
def test_networks_of_any_size(depth: int, width: int, norm: str, seed: int) -> None:
    def layers() -> nn.Module:
        kinds: dict[str, Callable[[], nn.Module]] = {
            "layer": lambda: nn.LayerNorm(width),
            "rms": lambda: nn.RMSNorm(width),
            "none": nn.Identity,
        }
        blocks = [nn.Sequential(nn.Linear(width, width), kinds[norm](), nn.Tanh()) for _ in range(depth)]
        return nn.Sequential(*blocks, nn.Linear(width, 1))

    assert_by_parameters(table(width, rows=6, seed=seed), loss, {"model": seeded(layers)}, engines=["auto"])


# --- rows of every kind -----------------------------------------------------------------------------------------------


def test_ragged_rows() -> None:
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"x": object_series([rng.standard_normal((1 + k % 4, 3)) for k in range(24)]).array, "y": rng.standard_normal(24)})
    assert_by_parameters(frame, loss, {"model": seeded(lambda: _First(nn.GRU(3, 4)))})


def test_static_values() -> None:
    def fn(model: nn.ModuleDict, x: Tensor, y: Tensor, kind: str) -> Tensor:
        return reading(model[kind](x), y)

    frame = table(4, rows=20).assign(kind=["left", "right"] * 10)
    model = seeded(lambda: nn.ModuleDict({"left": nn.Linear(4, 2), "right": nn.Linear(4, 3)}))
    assert_by_parameters(frame, fn, {"model": model})


@pytest.mark.parametrize("engine", ENGINES)
def test_missing_values(engine: str) -> None:
    frame = table(4, rows=12)
    frame["y"] = frame["y"].astype("Float64").where(np.arange(12) % 3 > 0)
    assert_by_parameters(frame, loss, {"model": seeded(lambda: nn.Linear(4, 2))}, engines=[engine])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bad_row(engine: str) -> None:
    def fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if y > 100:
            raise ValueError("too large")
        return loss(model, x, y)

    frame = table(4, rows=40)
    frame.loc[17, "y"] = 200.0
    model = seeded(lambda: nn.Linear(4, 2))
    with pytest.raises(dg.RowError, match="row 17: ValueError: too large"):
        dg.grad_column(frame, fn, wrt=dg.norm("model"), shared={"model": model}, engine=engine)
    column = dg.grad_column(frame, fn, wrt=dg.norm("model"), shared={"model": model}, engine=engine, on_error="null")
    assert list(np.flatnonzero(column.isna())) == [17]
    good = frame.drop(index=17)
    assert_cells(list(column.drop(index=17)), [float(_norm(g)) for g in formed(rows_of(good), fn, {"model": model}, torch.float64)])


def _norm(gradients: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([g.reshape(-1) for g in gradients.values()]).norm()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_layer_that_no_row_reaches_counts_as_zero(engine: str) -> None:
    def fn(model: nn.ModuleList, x: Tensor, y: Tensor) -> Tensor:
        return reading(model[0](x), y)

    model = seeded(lambda: nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)]))
    assert_by_parameters(table(4), fn, {"model": model}, engines=[engine])
    with pytest.raises(dg.GraphError, match=r"no argument that was asked for \(model\.1\) reaches"):
        dg.grad_column(table(4), fn, wrt=dg.norm("model.1"), shared={"model": model}, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_that_leaves_torch_is_a_cut(engine: str) -> None:
    def fn(model: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        return reading(model(x), y) * model.weight[0, 0].item()

    with pytest.raises(dg.GraphError, match=r"\.item\(\) takes a differentiated value out of torch"):
        dg.grad_column(table(4), fn, wrt=dg.norm("model"), shared={"model": seeded(lambda: nn.Linear(4, 2))}, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: nn.LayerNorm(4), lambda: nn.Sequential(nn.Linear(4, 4), nn.Softplus())])
def test_an_input_that_is_written_into_after_a_layer_has_read_it(make: Callable[[], nn.Module], engine: str) -> None:
    def fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x * 1
        out: Tensor = model(x).sum()
        x.mul_(3)
        return out * y

    model = seeded(make)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        formed(rows_of(table(4)), fn, {"model": model}, torch.float64)
    with pytest.raises(dg.RowError, match="modified by an inplace operation"), slower_is_fine():
        dg.grad_column(table(4), fn, wrt=dg.norm("model"), shared={"model": model}, engine=engine)


WRITTEN_INTO: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 4), (4,)),
    "linear on a sequence": (lambda: nn.Linear(4, 4), (3, 4)),
    "convolution": (lambda: nn.Conv1d(2, 3, 2), (2, 5)),
    "grouped convolution": (lambda: nn.Conv1d(2, 4, 2, groups=2), (2, 5)),
    "layer norm": (lambda: nn.LayerNorm(4), (3, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (1, 4, 3)),
    "batch norm in eval": (lambda: nn.BatchNorm1d(4).eval(), (1, 4)),
}


@pytest.mark.parametrize("first", [True, False], ids=["first layer", "later layer"])
@pytest.mark.parametrize("name", WRITTEN_INTO)
def test_an_output_that_is_written_into(name: str, first: bool) -> None:
    """The gradient is by what the layer gave, before anyone wrote into it, or into a view of it."""

    def fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x if first else x * model.get_parameter("scale")
        out: Tensor = model.get_submodule("layer")(x)
        out.unsqueeze(0)[..., 0].mul_(3)
        out[..., 1:] += y
        out.relu_()
        return reading(out, y)

    make, shape = WRITTEN_INTO[name]
    assert_by_parameters(table(*shape), fn, {"model": seeded(lambda: _With(make()))})


class _With(nn.Module):
    """A layer, and a number that its input can be multiplied by."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.ones(()))


def test_dropout_draws_the_same_for_every_row() -> None:
    def fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return loss(model, x, y)

    def fresh(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        torch.manual_seed(11)
        return loss(model, x, y)

    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))).train()
    expected = [float(_norm(g)) for g in formed(rows_of(table(6)), fresh, {"model": model}, torch.float64)]
    for engine in ENGINES:
        column = dg.grad_column(table(6), fn, wrt=dg.norm("model"), shared={"model": model}, engine=engine, randomness="same", seed=11)
        assert_cells(list(column), expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_dropout_draws_anew_for_each_row(engine: str) -> None:
    """One weight of one, so that a row's gradient tells what was dropped: 0, or twice its input."""

    def fn(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model(x.reshape(1)).sum()
        return out

    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Dropout(0.5)).double().train()
    frame = pd.DataFrame({"x": np.ones(400)})
    options: dict[str, Any] = {"shared": {"model": model}, "engine": engine, "randomness": "different", "allow_unused": True}
    column = dg.grad_column(frame, fn, wrt=dg.norm("model"), seed=1, **options)
    assert set(column.round(12)) == {0.0, 2.0}
    assert 140 < (column > 0).sum() < 260  # six standard deviations
    pd.testing.assert_series_equal(column, dg.grad_column(frame, fn, wrt=dg.norm("model"), seed=1, **options))
    with pytest.raises(dg.PlanError, match="random"):
        dg.grad_column(frame, fn, wrt=dg.norm("model"), shared={"model": model}, engine=engine)


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: nn.Linear(5, 3), lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4))])
def test_a_float64_table_and_a_float32_model(make: Callable[[], nn.Module]) -> None:
    """b29: the columns are cast on the way in, and float64 columns come back."""
    model = seeded(make).float()
    assert_by_parameters(table(5), loss, {"model": model}, dtype=torch.float32, rtol=2e-5)
    column = dg.grad_column(table(5), loss, wrt=dg.norm("model"), shared={"model": model})
    assert column.dtype == np.float64


def test_closed_over_the_dtypes_are_an_error_with_both_remedies() -> None:
    """b29."""
    model = nn.Linear(5, 3)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        out: Tensor = (model(x) * w).sum()
        return out

    with pytest.raises(Exception, match=r"(?s)(?=.*float32)(?=.*float64|.*double)(?=.*shared=)(?=.*dtype=)"):
        dg.grad_column(table(5)[["x"]], fn, wrt=dg.norm("w"), shared={"w": torch.ones(3, dtype=torch.float64)})


# --- shared tensors, dicts, names -------------------------------------------------------------------------------------


def test_a_shared_tensor() -> None:
    def fn(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(w @ x).square().sum() * y + w[0, 0]

    assert_by_parameters(table(4), fn, {"w": torch.randn(3, 4, dtype=torch.float64)}, "w")


def test_a_shared_tensor_in_a_layer_s_call() -> None:
    def fn(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return reading(F.linear(x, w), y) + w.mean()

    assert_by_parameters(table(4), fn, {"w": torch.randn(3, 4, dtype=torch.float64)}, "w")


def test_a_shared_number() -> None:
    def fn(a: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (a * x).sin().sum() + a * y

    assert_by_parameters(table(4), fn, {"a": torch.tensor(0.7, dtype=torch.float64)}, "a")


@pytest.mark.parametrize("wish", ["w", "w.a", "w.*"])
def test_a_shared_dict(wish: str) -> None:
    def fn(w: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return (torch.tanh(x @ w["a"]) @ w["b"]) * y + w["b"].sum()

    shared = {"w": {"a": torch.randn(4, 3, dtype=torch.float64), "b": torch.randn(3, dtype=torch.float64)}}
    assert_by_parameters(table(4), fn, shared, wish, below=lambda path: path == "w.a" or wish != "w.a")


class _Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, 2)
        self.head_scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("offset", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x)) * self.head_scale + self.offset
        return out


@pytest.mark.parametrize(
    ("wish", "below"),
    [
        ("model.head", ["head.weight", "head.bias"]),
        ("model.head.bias", ["head.bias"]),
        ("model.*.weight", ["body.0.weight", "head.weight"]),
        ("model.body", ["body.0.weight", "body.0.bias"]),
        ("model.head*", ["head_scale", "head.weight", "head.bias"]),
        ("model.head_scale", ["head_scale"]),
        ("model", ["head_scale", "body.0.weight", "body.0.bias", "head.weight", "head.bias"]),
    ],
)
def test_parts_and_globs(wish: str, below: Sequence[str]) -> None:
    model = seeded(_Parts)
    assert_by_parameters(table(4), loss, {"model": model}, wish, below=lambda path: path.removeprefix("model.") in below)


def test_a_frozen_parameter_can_be_asked_for() -> None:
    model = seeded(_Parts)
    model.get_submodule("body").requires_grad_(False)
    assert_by_parameters(table(4), loss, {"model": model})
    assert not model.get_parameter("body.0.weight").requires_grad
    assert model.get_parameter("head.weight").requires_grad


def test_a_direction_may_be_a_module_or_a_checkpoint() -> None:
    model, other = seeded(_Parts), seeded(_Parts).requires_grad_(False)
    other.get_parameter("head.weight").mul_(3)
    gradients = formed(rows_of(table(4)), loss, {"model": model}, torch.float64)
    expected = [float(sum((g[f"model.{name}"] * p).sum() for name, p in other.named_parameters())) for g in gradients]
    whole = {f"model.{name}": p for name, p in other.named_parameters()}
    for direction in (other, other.state_dict(), dict(other.named_parameters()), whole):
        column = dg.grad_column(table(4), loss, wrt=dg.dot("model", direction), shared={"model": model})
        assert_cells(list(column), expected)
    head = {name: p for name, p in other.named_parameters() if name.startswith("head.")}
    expected = [float(sum((g[f"model.{name}"] * p).sum() for name, p in head.items())) for g in gradients]
    for wish in ("model", "model.head"):
        assert_cells(list(dg.grad_column(table(4), loss, wrt=dg.dot(wish, head), shared={"model": model})), expected)


def test_together_with_columns() -> None:
    """One norm of the model and a column, and both kinds of derivative in one call."""
    frame, model = table(4), seeded(_Parts)
    wanted: Any = {"value": (), "x": "x", "both": dg.norm(["model", "y"]), "model": dg.norm("model"), "y": "y"}
    got = dg.derivatives(frame, loss, wanted, shared={"model": model})
    rows = rows_of(frame)
    alone = [oracle.row_derivatives(row, lambda x, y: loss(model, x, y), {"value": (), "x": ("x",), "y": ("y",)}) for row in rows]
    norms = [float(_norm(g)) for g in formed(rows, loss, {"model": model}, torch.float64)]
    for label in ("value", "x", "y"):
        assert_cells(list(got[label]), [row[label] for row in alone])
    assert_cells(list(got["model"]), norms)
    assert_cells(list(got["both"]), [float(np.hypot(norm, row["y"])) for norm, row in zip(norms, alone, strict=True)])


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (dg.norm("model.haed"), r"(?s)no such shared parameter.*model\.head"),
        ("model.offset", r"no such shared parameter"),
        (("model", "model"), r"order above the first by shared parameters"),
        (("y", "model"), r"order above the first by shared parameters"),
        (dg.dot("model", {"head.weight": torch.ones(2, 2)}), r"direction of 'model\.head\.weight' has the shape \(2, 2\)"),
        (dg.dot("model", {"nothing": torch.ones(2)}), r"names 'nothing', which is no parameter"),
        (dg.dot("model.head.bias", torch.ones(3)), r"has the shape \(3,\)"),
    ],
)
def test_mistakes_are_told_at_the_call(wanted: Any, text: str) -> None:
    with pytest.raises(dg.PlanError, match=text):
        dg.derivatives(in_equal_parts(table(4), 2), loss, {"a": wanted}, shared={"model": seeded(_Parts)})


@pytest.mark.parametrize("engine", ENGINES)
def test_a_vector_has_no_gradient_by_parameters(engine: str) -> None:
    with pytest.raises(dg.RowError, match=r"a tensor of shape \(2,\)"):
        dg.grad_column(table(4), lambda model, x: model(x), wrt=dg.norm("model"), shared={"model": seeded(_Parts)}, engine=engine)


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("engine", ENGINES)
def test_uses_that_nearly_cancel(scale: float, engine: str) -> None:
    """A twin network on two inputs that hardly differ: the gradient is what is left of two that are far larger."""

    def fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = (model(x) - model(x + scale * y)).sum()
        return out

    model = seeded(lambda: nn.Linear(20, 30, bias=False))
    expected = [float(_norm(g)) for g in formed(rows_of(table(20)), fn, {"model": model}, torch.float64)]
    column = dg.grad_column(table(20), fn, wrt=dg.norm("model"), shared={"model": model}, engine=engine)
    assert_cells(list(column), expected, rtol=1e-8, atol=0.0)


@pytest.mark.parametrize("size", [1, 3, None])
def test_batches_of_any_size_agree(size: int | None) -> None:
    assert_by_parameters(table(4, rows=40), loss, {"model": seeded(_Parts)}, engines=["auto"], batch_size=size)


# --- carriers, threads, the model -------------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> dict[str, Any]:
    tensors = {name: tensor.detach().numpy().tobytes() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    modules = {name: (module.training, [*module._parameters], type(module)) for name, module in model.named_modules()}
    parameters = {name: (id(p), type(p), p.requires_grad, p.grad, p._version, p.is_leaf) for name, p in model.named_parameters()}
    return {"tensors": tensors, "modules": modules, "parameters": parameters}


def _mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6).eval(), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Linear(6, 2))


def mixed_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return reading(model(x.reshape(1, -1)), y)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_model_is_as_it_was(engine: str) -> None:
    model = seeded(_mixed)
    model.get_parameter("4.bias").requires_grad_(False)
    before = snapshot(model)
    dg.grad_column(table(4), mixed_loss, wrt=dg.norm("model"), shared={"model": model}, engine=engine)
    dg.grad_column(table(4), mixed_loss, wrt="model", shared={"model": model}, engine=engine)
    computed(
        dg.grad_column(in_equal_parts(table(4), 3), mixed_loss, wrt=dg.norm("model"), shared={"model": model}, engine=engine), "threads"
    )
    with pytest.raises(dg.DaskgradError):
        dg.grad_column(table(5), mixed_loss, wrt=dg.norm("model"), shared={"model": model}, engine=engine)
    assert snapshot(model) == before


@pytest.mark.parametrize("engine", ENGINES)
def test_case_a08_four_threads_and_forty_parts_twenty_times(engine: str) -> None:
    """Equal to the synchronous result each time; the parameters stay as they are."""
    frame, model = table(4, rows=400), seeded(_mixed)
    before = snapshot(model)
    column = dg.grad_column(in_equal_parts(frame, 40), mixed_loss, wrt=dg.norm("model"), shared={"model": model}, engine=engine)
    once = computed(column)
    for _ in range(20 if engine == "auto" else 3):
        with dask.config.set(scheduler="threads", num_workers=4):
            pd.testing.assert_series_equal(column.compute(), once, check_exact=True)
    assert snapshot(model) == before
    assert_cells(list(once), [float(_norm(g)) for g in formed(rows_of(frame), mixed_loss, {"model": model}, torch.float64)])


@pytest.mark.parametrize("parts", [1, 4])
def test_carriers_agree(parts: int) -> None:
    frame, model = table(4, rows=23), seeded(_Parts)
    wanted: Any = {"norm": dg.norm("model"), "dot": dg.dot("model", model), "gradient": "model", "project": dg.project("model", 2)}
    here = dg.derivatives(frame, loss, wanted, shared={"model": model})
    there = computed(dg.derivatives(in_equal_parts(frame, parts), loss, wanted, shared={"model": model}))
    bag = db.from_sequence(rows_of(frame), npartitions=parts)
    from_bag = computed(dg.derivatives(bag, loss, wanted, shared={"model": model}))
    for label in wanted:
        assert_cells(list(there[label]), list(here[label]), rtol=1e-12)
        assert_cells(list(from_bag[label]), list(here[label]), rtol=1e-12)
    assert there["norm"].dtype == from_bag["norm"].dtype == np.float64


def test_lazy_means_a_snapshot() -> None:
    frame, model = table(4), seeded(_Parts)
    now = dg.grad_column(frame, loss, wrt=dg.norm("model"), shared={"model": model})
    lazy = dg.grad_column(in_equal_parts(frame, 2), loss, wrt=dg.norm("model"), shared={"model": model})
    with torch.no_grad():
        model.get_parameter("head.weight").mul_(5)
    pd.testing.assert_series_equal(computed(lazy), now)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("engine", ENGINES)
def test_batch_norm_in_train_mode_is_refused(mode: str, engine: str) -> None:
    """b08: one row has no batch statistics."""
    model = seeded(lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2))).train(mode == "train")

    def fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return reading(model(x[None]), y)

    if mode == "eval":
        assert_by_parameters(table(1, 4, 4), fn, {"model": model}, engines=[engine])
    else:
        with pytest.raises(dg.DaskgradError, match=r"eval\(\)"):
            dg.grad_column(table(1, 4, 4), fn, wrt=dg.norm("model"), shared={"model": model}, engine=engine)


# --- the weights of a loss, by which torch itself refuses to differentiate ---------------------------------------------


def _pair(x: Tensor) -> Tensor:
    return torch.stack([x, 2 * x * x])


def _classes(y: Tensor) -> Tensor:
    return torch.stack([(y > 0).long(), (y > 0.5).long() + 1])


WEIGHTED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cross entropy, sum": lambda x, y, w: F.cross_entropy(_pair(x), _classes(y), weight=w, reduction="sum"),
    "cross entropy, mean": lambda x, y, w: F.cross_entropy(_pair(x), _classes(y), w),
    "cross entropy, one row": lambda x, y, w: F.cross_entropy(x, _classes(y)[0], w, reduction="sum"),
    "cross entropy, a class ignored": lambda x, y, w: F.cross_entropy(_pair(x), _classes(y), w, ignore_index=2),
    "cross entropy, smoothed": lambda x, y, w: F.cross_entropy(_pair(x), _classes(y), w, label_smoothing=0.2),
    "nll": lambda x, y, w: (F.nll_loss(_pair(x), _classes(y), w, reduction="none") ** 2).sum(),
    "binary": lambda x, y, w: F.binary_cross_entropy(torch.sigmoid(x), torch.sigmoid(y).expand(3), w),
    "binary with logits": lambda x, y, w: F.binary_cross_entropy_with_logits(x, torch.sigmoid(y).expand(3), w),
    "binary, positive": lambda x, y, w: F.binary_cross_entropy_with_logits(x, torch.sigmoid(y).expand(3), pos_weight=w),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_the_weights_of_a_loss(name: str) -> None:
    """By central differences: shared weights and those in a column, in every engine."""
    fn, frame, weights = WEIGHTED[name], table(3, rows=5), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    step = 1e-5 * torch.eye(3, dtype=torch.float64)
    rows = [(torch.from_numpy(x), torch.tensor(y, dtype=torch.float64)) for x, y in zip(frame["x"], frame["y"], strict=True)]
    wanted = [np.array([float(fn(x, y, weights + h) - fn(x, y, weights - h)) / 2e-5 for h in step]) for x, y in rows]
    in_column = frame.assign(w=object_series([weights.numpy()] * 5).array)
    for engine in ENGINES:
        assert_cells(list(dg.grad_column(frame, fn, wrt="w", shared={"w": weights}, engine=engine)), wanted, rtol=1e-6, atol=1e-8)
        assert_cells(list(dg.grad_column(in_column, fn, wrt="w", engine=engine)), wanted, rtol=1e-6, atol=1e-8)


# --- memory -----------------------------------------------------------------------------------------------------------

_PEAK = """
import resource, sys
import numpy as np, pandas as pd, torch
from torch import nn
import daskgrad as dg

torch.set_num_threads(1)
rows, size = int(sys.argv[1]), eval(sys.argv[2])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(100, 3000), nn.Tanh(), nn.Linear(3000, 230), nn.Tanh(), nn.Linear(230, 1))  # 1.0 M parameters
assert 0.99e6 < sum(p.numel() for p in model.parameters()) < 1.01e6
features = [f"f{k}" for k in range(100)]
frame = pd.DataFrame(np.random.default_rng(0).standard_normal((rows, 100), dtype=np.float32), columns=features)

def loss(model, x):
    return model(x)[0] ** 2

options = {"wrt": dg.norm("model"), "shared": {"model": model}, "inputs": {"x": features}, "batch_size": size}
dg.grad_column(frame[:100], loss, **options)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
norms = dg.grad_column(frame, loss, **options)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, repr(float(norms.sum())), len(norms), norms.dtype)
"""


@pytest.mark.slow
def test_case_b35_the_matrix_of_rows_by_parameters_never_exists() -> None:
    """Also b20: formed in float32 it is 40 GB; all sizes of batches agree."""

    def peak(rows: int, size: int | None) -> tuple[float, float]:
        done = subprocess.run([sys.executable, "-c", _PEAK, str(rows), str(size)], capture_output=True, text=True, check=True, timeout=900)
        more, total, count, dtype = done.stdout.split()
        assert (int(count), dtype) == (rows, "float32")
        return int(more) / 1024, float(total)

    whole, _ = peak(10_000, None)
    assert whole < 1000, f"{whole} MB more than at first"  # 40,000 MB
    sums = [peak(500, size)[1] for size in (1, 3, None)]
    np.testing.assert_allclose(sums, sums[0], rtol=1e-5)


def _highest(reset: bool) -> int:
    """The most memory of this process since the last reset, in bytes (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) * 1024


def _rows_of_ones(part: int, rows: int) -> pd.DataFrame:
    return pd.DataFrame(np.full((rows, 100), 1.0 + part, np.float32), columns=[f"f{k}" for k in range(100)])


@pytest.mark.cluster
@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak")
def test_case_b35_a_worker_never_holds_rows_by_parameters(client: Any) -> None:
    """300 rows by a million parameters in each of two parts are 1.2 GB in float32; 100,000 rows are in ci/bench norms_memory."""

    def squared(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) ** 2).sum()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 3000), nn.Tanh(), nn.Linear(3000, 230))
    frame = dd.from_map(_rows_of_ones, range(2), rows=300, meta=_rows_of_ones(0, 1))
    column = dg.grad_column(frame, squared, wrt=dg.norm("model"), shared={"model": model}, inputs={"x": list(frame.columns)})
    before = client.run(_highest, True)
    norms = column.compute()
    peaks = client.run(_highest, False)
    assert max(peaks[worker] - before[worker] for worker in peaks) < 400e6
    for part, norm in enumerate(norms[:: len(norms) // 2]):
        row = {"x": np.full(100, 1.0 + part, np.float32)}
        gradient = formed([row], squared, {"model": model}, torch.float32)[0]
        assert float(_norm(gradient)) == pytest.approx(norm, rel=1e-4)


_FAULTS = """
import resource
import torch
from daskgrad import _malloc

_malloc.keep_memory()
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**18) for _ in range(30)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory in its own way")
@pytest.mark.parametrize("settings", [{}, {"MALLOC_TRIM_THRESHOLD_": "65536"}], ids=["left alone", "by Dask's nanny"])
def test_memory_is_kept_from_batch_to_batch(settings: dict[str, str]) -> None:
    """30 tensors of 1 MB that come and go: without a word to the C library, their 7,680 pages are mapped again each time."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | settings
    done = subprocess.run([sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True, timeout=900, env=env)
    assert int(done.stdout) < 1000


@pytest.mark.slow
def test_flipped_labels_are_found() -> None:
    """What `ci/mislabelled.py` prints is far above chance."""
    script = Path(__file__).parents[1] / "ci" / "mislabelled.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=900)
    accuracy, precision, area = (
        float(re.search(pattern, done.stdout)[1])  # type: ignore[index]
        for pattern in (r"right on ([\d.]+)%", r"gradient norm (\d+)%", r"AUC (\d\.\d+)")
    )
    assert accuracy > 95
    assert precision > 75  # 5 by chance
    assert area > 0.98


def test_the_size_of_a_pickled_column() -> None:
    """e08: no model, no frame."""
    frame, model = table(4, rows=1000), seeded(lambda: nn.Linear(4, 2000))
    column = dg.grad_column(frame, loss, wrt=dg.norm("model"), shared={"model": model})
    assert len(pickle.dumps(column)) < 8 * 1000 + 2000
