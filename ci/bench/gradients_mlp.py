"""The gradient of each row by all parameters of a small MLP, formed: 1,000 rows, width 100, 10 layers, the grid of published comparisons.

The others end with a tensor of each parameter's gradients; daskgrad with one array a row, in a column.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from backpack import backpack, extend  # type: ignore[import-untyped]
from backpack.extensions import BatchGrad  # type: ignore[import-untyped]
from harness import Arm, Workload
from norms import Task
from opacus.grad_sample import GradSampleModule  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import daskgrad as dg


def workload(quick: bool) -> Workload:
    torch.manual_seed(0)
    rows, width, layers = (16, 8, 3) if quick else (1_000, 100, 10)
    hidden = [layer for _ in range(layers - 1) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(width, 1))

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        error: Tensor = model(x)[0] - y
        return error**2

    task = Task(model, loss, lambda out, y: (out[:, 0] - y) ** 2, torch.randn(rows, width), torch.randn(rows))
    frame = pd.DataFrame({"x": list(task.x.numpy()), "y": task.y.numpy()})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = by_loop(task)

    def check(name: str, result: Any) -> None:
        found = np.stack(list(result)) if isinstance(result, pd.Series) else result.numpy()
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-3, atol=1e-5 * float(expected.abs().max()), err_msg=name)

    return Workload(
        f"gradient by a small MLP's parameters, formed ({rows} rows, width {width}, {layers} layers), float32, one thread",
        [
            Arm("daskgrad, pandas in and out", rows, partial(by_daskgrad, task, frame)),
            Arm("BackPACK", rows, partial(by_backpack, task, extend(copy.deepcopy(model)))),
            Arm("Opacus hooks", rows, partial(by_opacus, task, GradSampleModule(copy.deepcopy(model), loss_reduction="sum"))),
            Arm("vmap(grad)", rows, partial(by_vmap, task)),
            Arm("loop", rows, partial(by_loop, task)),
        ],
        check,
        repeats=1 if quick else 5,
        close=lambda: torch.set_num_threads(threads),
    )


def by_daskgrad(task: Task, frame: pd.DataFrame) -> Any:
    return dg.grad_column(frame, task.loss, wrt="model", shared={"model": task.model})


def by_backpack(task: Task, module: Any) -> Tensor:
    module.zero_grad()
    with backpack(BatchGrad()):
        task.losses(module(task.x), task.y).sum().backward()
    return torch.cat([p.grad_batch.flatten(1) for p in module.parameters()], 1)


def by_opacus(task: Task, module: Any) -> Tensor:
    module.zero_grad()
    task.losses(module(task.x), task.y).sum().backward()
    return torch.cat([p.grad_sample.flatten(1) for p in module.parameters()], 1)


def by_vmap(task: Task) -> Tensor:
    parameters = {name: p.detach() for name, p in task.model.named_parameters()}

    def of_row(given: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        value: Tensor = (functional_call(task.model, given, (x,))[0] - y) ** 2
        return value

    found = vmap(grad(of_row), (None, 0, 0))(parameters, task.x, task.y)
    return torch.cat([g.flatten(1) for g in found.values()], 1)


def by_loop(task: Task) -> Tensor:
    parameters = list(task.model.parameters())
    found = []
    for x, y in zip(task.x, task.y, strict=True):
        gradients = torch.autograd.grad(task.loss(task.model, x, y), parameters)
        found.append(torch.cat([g.reshape(-1) for g in gradients]))
    return torch.stack(found)
