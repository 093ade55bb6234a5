"""device=: a GPU where there is one, an error where there is none, and batches that its memory holds."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import daskgrad as dg
from daskgrad import _device, _generators, _kernel

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: device='cuda' is not tested")
FRAME = pd.DataFrame({"x": np.linspace(0.1, 2.0, 5000), "y": np.linspace(1.0, 3.0, 5000), "kind": ["a", "b"] * 2500})


def wave(x: torch.Tensor, y: torch.Tensor, kind: str) -> torch.Tensor:
    if x > 1.5:
        return x * y
    return torch.sin(x) * y**2 if kind == "a" else x**3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_an_error_and_auto_is_the_cpu() -> None:
    with pytest.raises(dg.PlanError, match=r"torch finds no CUDA device here.*--resources"):
        dg.grad_column(FRAME, wave, "x", device="cuda")
    pd.testing.assert_series_equal(dg.grad_column(FRAME, wave, "x", device="auto"), dg.grad_column(FRAME, wave, "x"))


def test_each_thread_has_a_gpu_of_its_own_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    found: list[list[torch.device]] = []

    def ask() -> None:
        found.append([_device.device_of(asked) for asked in ("cuda", "auto", "cuda")])

    for _ in range(6):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert all(len(set(devices)) == 1 for devices in found)
    assert sorted(str(devices[0]) for devices in found) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1", "cuda:2", "cuda:2"]
    assert _device.device_of("cuda:2") == torch.device("cuda", 2)
    with pytest.raises(dg.PlanError, match="'cuda:3' is asked for, and torch finds 3 here: 'cuda:0' to 'cuda:2'"):
        _device.device_of("cuda:3")


@pytest.mark.parametrize("where", ["_tensors", "batch"])
def test_batches_that_memory_does_not_hold_are_halved(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Memory for 700 rows: no larger batch is copied there or comes to its end, and none is tried again once that is known."""
    call, refused, done = getattr(_kernel, where), [], []

    def small(*args: Any, **options: Any) -> Any:
        rows = len(args[2].rows) if where == "batch" else max(len(array) for array in args[0].values())
        if rows > 700:
            refused.append(rows)
            raise torch.OutOfMemoryError("CUDA out of memory")
        done.append(rows)
        return call(*args, **options)

    frame = pd.concat([FRAME] * 6, ignore_index=True)
    expected = dg.grad_column(frame, wave, "x")
    monkeypatch.setattr(_kernel, where, small)
    pd.testing.assert_series_equal(dg.grad_column(frame, wave, "x"), expected)
    assert refused and len(refused) <= 16
    assert max(done) >= 200


def test_a_row_that_memory_does_not_hold_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(_kernel, "batch", none)
    with pytest.raises(dg.RowError, match=r"failed in row 0: .*CUDA out of memory"):
        dg.grad_column(FRAME, wave, "x", engine="vmap")


def test_a_gpus_generator_is_looked_at_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, there = torch.Generator(), torch.device("cuda", 1)
    states: dict[torch.device, torch.Generator] = {there: gpu}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device].get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states[device].set_state(state))
    before = _generators.random_state(there)
    first = torch.rand(2, generator=gpu)  # the CPU's own generator stays where it was
    assert not torch.equal(before, _generators.random_state(there))
    torch.rand(3)
    _generators.set_random_state(before, there)
    assert torch.equal(before, _generators.random_state(there))
    assert torch.equal(first, torch.rand(2, generator=gpu))


@GPU
def test_draws_on_a_gpu_are_refused() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x * torch.randn(())

    for engine in ("auto", "vmap", "loop"):
        with pytest.raises(dg.PlanError, match="draws random numbers"):
            dg.grad_column(FRAME.iloc[:100], noisy, "x", device="cuda", engine=engine)


@GPU
@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
def test_a_gpu_gives_what_the_cpu_gives(engine: str) -> None:
    part = FRAME.iloc[:200] if engine == "loop" else FRAME
    wanted: Any = {"value": (), "slope": "x", "cross": ("x", "y"), "length": dg.norm(["x", "y"])}
    found = dg.derivatives(part, wave, wanted, engine=engine, device="cuda")
    pd.testing.assert_frame_equal(found, dg.derivatives(part, wave, wanted, engine=engine), rtol=1e-10)


@GPU
def test_norms_by_a_models_parameters_on_a_gpu() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(x[None]).squeeze() - y) ** 2

    options: Any = {"wrt": dg.norm("model"), "shared": {"model": model}}
    found = dg.grad_column(FRAME, loss, device="cuda", **options)
    pd.testing.assert_series_equal(found, dg.grad_column(FRAME, loss, **options), rtol=1e-9)
    assert next(model.parameters()).device.type == "cpu"
