"""The norm of each row's gradient by all parameters of a small CNN on 28 × 28 images: see `norms`."""

from __future__ import annotations

import torch
from harness import Workload
from norms import Task, norms
from torch import Tensor, nn
from torch.nn import functional as F


def workload(quick: bool) -> Workload:
    torch.manual_seed(0)
    rows = 16 if quick else 1_024
    model = nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x[None]), y[None])

    task = Task(
        model,
        loss,
        lambda out, y: F.cross_entropy(out, y, reduction="none"),
        torch.randn(rows, 1, 28, 28),
        torch.randint(0, 10, (rows,)),
    )
    best = dict.fromkeys(["BackPACK", "Opacus hooks", "Opacus functorch", "Opacus ghost", "vmap(grad)"], 128)
    return norms("norm of the gradient by a small CNN's parameters, 28 × 28 images, float32, one thread", task, best, quick)
