"""Gradients by shared parameters: every rule, and what is made of them, against gradients that are formed one row at a time.

The oracle is plain ``torch.autograd.grad`` by the parameters of a copy of the model, for each row anew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import oracle
import pandas as pd
import pytest
import torch
from compare import ENGINES, assert_cells, object_series, slower_is_fine
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import daskgrad as dg
from daskgrad._reduce import rows_of_matrix

Tensor = torch.Tensor
WIDE = "by parameters: too wide to be drawn by hand"

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
    matrix = rows_of_matrix(5, 0, len(along), 3)
    expected = {
        "norm": [None if g is None else float(g.norm()) for g in flat],
        "dot": [None if g is None else float(g @ along) for g in flat],
        "project": [None if g is None else (g @ matrix).numpy() for g in flat],
        "gradient": [None if g is None else g.numpy() for g in flat],
    }
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
    "conv transposed": (lambda: nn.ConvTranspose2d(2, 3, 2, stride=2), (2, 3, 3)),
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
    "instance norm": (lambda: nn.InstanceNorm1d(3, affine=True), (2, 3, 5)),
    "prelu": (lambda: nn.PReLU(3), (2, 3)),
    "bilinear": (lambda: _Twice(nn.Bilinear(3, 3, 2)), (3,)),
    "lstm": (lambda: _First(nn.LSTM(3, 4, num_layers=2, batch_first=True)), (5, 3)),
    "lstm, both ways": (lambda: _First(nn.LSTM(2, 3, bidirectional=True)), (4, 2)),
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
    "tied": (lambda: _Tied(), (4,)),
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
        return torch.tanh(self.encoder(x)) @ self.encoder.weight


class _Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.norm(torch.tanh(self.layer(x)))
        return x


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
        return self.layer(x) * self.scale + self.layer.weight.square().sum() + self.layer.weight.T[0]


class _Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.layer(2 * x)
        return self.layer(x) - target + F.linear(x, self.layer.weight.detach())


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
) -> None:
    kind: Any = nn.Conv1d if dims == 1 else nn.Conv2d
    stride = 1 if padding == "same" else stride
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "bias": bias}
    model = seeded(lambda: kind(groups * channels, groups * per_group, kernel, **options))
    shape = (*([samples] if samples else []), groups * channels, *([6, 7][:dims]))
    assert_by_parameters(table(*shape, rows=5), loss, {"model": model}, engines=["vmap"])


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
