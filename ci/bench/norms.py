"""The norm of each row's gradient by all parameters of an MLP (100-256-256-1), beside the ways that people have today.

daskgrad goes from a DataFrame to a column; the others get tensors that are ready. Each has the batch size that suits it best.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from backpack import backpack, extend  # type: ignore[import-untyped]
from backpack.extensions import BatchL2Grad  # type: ignore[import-untyped]
from harness import Arm, Workload
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import daskgrad as dg


@dataclass(frozen=True)
class Task:
    """A model and its rows.

    Attributes:
        loss: of one row, as daskgrad and the loop take it.
        losses: of the model's outputs for a batch and its `y`, (rows,), as the others take it.
        x, y: (rows, *shape) and (rows,), or (rows, *shape) as well.
        twin: the same model with the layers that Opacus has for it, where it needs its own.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    losses: Callable[[Tensor, Tensor], Tensor]
    x: Tensor
    y: Tensor
    twin: nn.Module | None = None

    def batches(self, rows: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.x[:rows].split(size), self.y[:rows].split(size), strict=True)


def workload(quick: bool) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    rows = 64 if quick else 16_384

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        error: Tensor = model(x)[0] - y
        return error**2

    task = Task(model, loss, lambda out, y: (out[:, 0] - y) ** 2, torch.randn(rows, 100), torch.randn(rows))
    best = {"BackPACK": 2048, "Opacus hooks": 64, "Opacus functorch": 64, "Opacus ghost": 2048, "vmap(grad)": 64}
    return norms("norm of the gradient by an MLP's parameters (100-256-256-1), float32, one thread", task, best, quick)


def norms(title: str, task: Task, best: Mapping[str, int], quick: bool, few: int = 256) -> Workload:
    """daskgrad, the ways named in `best` with their batch sizes, and the loop; slow ways do the first `few` rows."""
    rows, few = len(task.x), min(len(task.x), few)
    frame = pd.DataFrame({"x": cells(task.x), "y": cells(task.y)})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = by_loop(task, few).numpy()
    arms = [Arm("daskgrad, pandas in and out", rows, partial(by_daskgrad, task, frame))]
    for name, size in best.items():
        prepare, way, fast = WAYS[name]
        count = rows if fast else few
        model = task.twin if task.twin is not None and name.startswith("Opacus") else task.model
        arms.append(Arm(name, count, partial(way, task, prepare(copy.deepcopy(model)), count, size)))
    arms.append(Arm("loop", few, partial(by_loop, task, few)))

    def check(name: str, result: Any) -> None:
        assert len(result) in (rows, few), name
        found = np.asarray(result.detach() if isinstance(result, Tensor) else result)
        np.testing.assert_allclose(found[:few], expected, rtol=1e-3, atol=1e-6 * expected.max(), err_msg=name)

    return Workload(title, arms, check, repeats=1 if quick else 7, close=lambda: torch.set_num_threads(threads))


def cells(values: Tensor) -> Any:
    """A column: of numbers, or of arrays."""
    return values.numpy() if values.dim() == 1 else list(values.numpy())


# --- the ways ---------------------------------------------------------------------------------------------------------


def by_daskgrad(task: Task, frame: pd.DataFrame) -> Any:
    return dg.grad_column(frame, task.loss, wrt=dg.norm("model"), shared={"model": task.model})


def by_backpack(task: Task, module: Any, rows: int, size: int) -> Tensor:
    found = []
    for x, y in task.batches(rows, size):
        module.zero_grad()
        with backpack(BatchL2Grad()):
            task.losses(module(x), y).sum().backward()
        found.append(torch.stack([p.batch_l2 for p in module.parameters()]).sum(0).sqrt())
    return torch.cat(found)


def by_opacus(task: Task, module: Any, rows: int, size: int) -> Tensor:
    found = []
    for x, y in task.batches(rows, size):
        module.zero_grad()
        task.losses(module(x), y).sum().backward()
        found.append(torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in module.parameters()]).norm(dim=0))
    return torch.cat(found)


def by_ghost(task: Task, module: Any, rows: int, size: int) -> Tensor:
    found = []
    for x, y in task.batches(rows, size):
        module.zero_grad()
        task.losses(module(x), y).sum().backward()
        found.append(module.get_norm_sample())
    return torch.cat(found)


def by_vmap(task: Task, module: Any, rows: int, size: int) -> Tensor:
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def of_row(given: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        value: Tensor = task.losses(functional_call(module, given, (x[None],)), y[None])[0]
        return value

    def norm(x: Tensor, y: Tensor) -> Tensor:
        length: Tensor = torch.stack([g.norm() for g in grad(of_row)(parameters, x, y).values()]).norm()
        return length

    return torch.cat([vmap(norm)(x, y) for x, y in task.batches(rows, size)])


def by_loop(task: Task, rows: int) -> Tensor:
    found = []
    parameters = list(task.model.parameters())
    for x, y in zip(task.x[:rows], task.y[:rows], strict=True):
        gradients = torch.autograd.grad(task.loss(task.model, x, y), parameters)
        found.append(torch.stack([g.norm() for g in gradients]).norm())
    return torch.stack(found)


def for_opacus(model: nn.Module) -> dict[str, Any]:
    return {"loss_reduction": "sum", "batch_first": getattr(model, "batch_first", True)}


Way = Callable[[Task, Any, int, int], Tensor]
WAYS: dict[str, tuple[Callable[[nn.Module], Any], Way, bool]] = {  # how the model is prepared, the way, whether it does all rows
    "BackPACK": (extend, by_backpack, True),
    "Opacus hooks": (lambda model: GradSampleModule(model, **for_opacus(model)), by_opacus, False),
    "Opacus functorch": (lambda model: GradSampleModule(model, force_functorch=True, **for_opacus(model)), by_opacus, False),
    "Opacus ghost": (
        lambda model: GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=True, **for_opacus(model)),
        by_ghost,
        True,
    ),
    "vmap(grad)": (lambda model: model, by_vmap, False),
}
