"""The norm of each row's gradient by one layer's parameters, at the shapes of Opacus's own layer benchmark: see `norms`.

The loss of a row is the squared distance of the layer's output from a target. Opacus has layers of its own in place of torch's attention
and recurrent ones; they get the same weights. A way that has no rule for a layer is left out there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from harness import Workload
from norms import Task, norms
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention  # type: ignore[import-untyped]
from torch import Tensor, nn


class First(nn.Module):
    """The first of what a layer returns, on (rows, steps, width)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[0]
        return out


class Attention(nn.Module):
    """Attention on (rows, steps of query, key and value, width); inside, the steps come first, since Opacus's is wrong the other way."""

    batch_first = False

    def __init__(self, layer: nn.Module, steps: Sequence[int]) -> None:
        super().__init__()
        self.layer, self.steps = layer, list(steps)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = x.transpose(0, 1).split(self.steps)
        out: Tensor = self.layer(query, key, value)[0].transpose(0, 1)
        return out


@dataclass(frozen=True)
class Layer:
    """A layer that is measured.

    Attributes:
        make: it, as in torch.
        shape: a row's input; an empty one is an index.
        rows: how many, of which the slow ways do `few`.
        best: the ways, each with the batch size that suits it best.
        twin: the same for Opacus, where that has its own.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rows: int
    best: dict[str, int]
    few: int = 256
    twin: Callable[[], nn.Module] | None = None


STEPS = (64, 128, 128)  # of query, key and value
LAYERS = {
    "Linear": Layer(
        lambda: nn.Linear(512, 512),
        (512,),
        8192,
        {"BackPACK": 512, "Opacus hooks": 16, "Opacus functorch": 16, "Opacus ghost": 512, "vmap(grad)": 16},
    ),
    "Conv2d": Layer(
        lambda: nn.Conv2d(64, 64, 8),
        (64, 50, 100),
        8,
        {"BackPACK": 1, "Opacus hooks": 2, "Opacus functorch": 2, "Opacus ghost": 2, "vmap(grad)": 2},
    ),
    "LayerNorm": Layer(
        lambda: nn.LayerNorm(64),
        (64,),
        65_536,
        {"Opacus hooks": 1024, "Opacus functorch": 1024, "Opacus ghost": 1024, "vmap(grad)": 1024},
        few=8192,
    ),
    "InstanceNorm1d": Layer(
        lambda: nn.InstanceNorm1d(256, affine=True),
        (256, 64),
        2048,
        {"Opacus hooks": 64, "Opacus functorch": 64, "Opacus ghost": 64, "vmap(grad)": 64},
    ),
    "GroupNorm": Layer(
        lambda: nn.GroupNorm(16, 256),
        (256,),
        16_384,
        {"Opacus hooks": 512, "Opacus functorch": 512, "Opacus ghost": 512, "vmap(grad)": 512},
        few=4096,
    ),
    "Embedding": Layer(
        lambda: nn.Embedding(20_000, 100),
        (),
        65_536,
        {"BackPACK": 64, "Opacus hooks": 8, "Opacus functorch": 8, "Opacus ghost": 1024, "vmap(grad)": 8},
        few=32,
    ),
    "MultiheadAttention": Layer(
        lambda: Attention(nn.MultiheadAttention(100, 4), STEPS),
        (sum(STEPS), 100),
        256,
        {"Opacus hooks": 32, "Opacus functorch": 32, "Opacus ghost": 32, "vmap(grad)": 32},
        few=64,
        twin=lambda: Attention(DPMultiheadAttention(100, 4), STEPS),
    ),
    "RNN": Layer(
        lambda: First(nn.RNN(100, 100, bias=False, batch_first=True)),
        (128, 100),
        512,
        {"Opacus hooks": 64, "Opacus functorch": 64, "Opacus ghost": 64},
        few=64,
        twin=lambda: First(DPRNN(100, 100, bias=False, batch_first=True)),
    ),
    "GRU": Layer(
        lambda: First(nn.GRU(100, 100, bias=False, batch_first=True)),
        (128, 100),
        256,
        {"Opacus hooks": 64, "Opacus functorch": 64, "Opacus ghost": 64},
        few=64,
        twin=lambda: First(DPGRU(100, 100, bias=False, batch_first=True)),
    ),
    "LSTM": Layer(
        lambda: First(nn.LSTM(100, 100, bias=False, batch_first=True)),
        (128, 100),
        256,
        {"Opacus hooks": 64, "Opacus functorch": 64, "Opacus ghost": 64},
        few=64,
        twin=lambda: First(DPLSTM(100, 100, bias=False, batch_first=True)),
    ),
}


def workloads(quick: bool) -> Iterator[tuple[str, Workload]]:
    for name, layer in LAYERS.items():
        yield name, of_layer(name, layer, quick)


def of_layer(name: str, layer: Layer, quick: bool) -> Workload:
    torch.manual_seed(0)
    rows = min(layer.rows, 2) if quick else layer.rows
    model = layer.make()
    x = torch.randn(rows, *layer.shape) if layer.shape else torch.randint(int(model.num_embeddings), (rows,))  # type: ignore[arg-type]
    with torch.no_grad():
        y = torch.randn(rows, *model(x[:1]).shape[1:])

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        value: Tensor = ((model(x[None])[0] - y) ** 2).sum()
        return value

    def losses(out: Tensor, y: Tensor) -> Tensor:
        return ((out - y) ** 2).flatten(1).sum(1)

    twin = None
    if layer.twin is not None:
        twin = layer.twin()
        twin.get_submodule("layer").load_state_dict(model.get_submodule("layer").state_dict())
    title = f"norm of the gradient by the parameters of {name}, a row of shape {layer.shape}, float32, one thread"
    return norms(title, Task(model, loss, losses, x, y, twin), layer.best, quick, layer.few)
