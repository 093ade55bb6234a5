"""The norm of each row's gradient by the parameters of a small CNN on 32 × 32 colour images of 32 and 64 channels: see `norms`."""

from __future__ import annotations

import torch
from harness import Workload
from norms import Task, norms
from torch import Tensor, nn
from torch.nn import functional as F


def workload(quick: bool) -> Workload:
    torch.manual_seed(0)
    rows = 8 if quick else 256
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4096, 10),
    )

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x[None]), y[None])

    task = Task(
        model,
        loss,
        lambda out, y: F.cross_entropy(out, y, reduction="none"),
        torch.randn(rows, 3, 32, 32),
        torch.randint(0, 10, (rows,)),
    )
    best = dict.fromkeys(["BackPACK", "Opacus hooks", "Opacus functorch", "Opacus ghost", "vmap(grad)"], 64)
    return norms("norm of the gradient by a CNN's parameters, 32 × 32 colour images, float32, one thread", task, best, quick)
