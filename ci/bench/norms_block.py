"""The norm of each row's gradient by all parameters of a transformer block: see `norms`. BackPACK has no rule for its parts."""

from __future__ import annotations

import torch
from harness import Workload
from norms import Task, norms
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and a feed-forward layer, on (rows, steps, width) or (steps, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.read(self.before(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.movedim(-3, 0).transpose(-3, -2)  # (…, heads, steps, width / heads)
        found = F.scaled_dot_product_attention(query, key, value).transpose(-3, -2).flatten(-2)
        x = x + self.write(found)
        out: Tensor = x + self.feed(self.between(x))
        return out


def workload(quick: bool) -> Workload:
    torch.manual_seed(0)
    rows = 8 if quick else 512

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        value: Tensor = ((model(x).mean(-2) - y) ** 2).sum()
        return value

    task = Task(
        Block(128, 4), loss, lambda out, y: ((out.mean(-2) - y[:, None]) ** 2).sum(-1), torch.randn(rows, 32, 128), torch.randn(rows)
    )
    best = {"Opacus hooks": 32, "Opacus functorch": 32, "Opacus ghost": 64, "vmap(grad)": 32}
    title = "norm of the gradient by a transformer block's parameters (width 128, 4 heads, 32 steps), float32, one thread"
    return norms(title, task, best, quick)
