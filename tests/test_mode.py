"""What one torch call means in a batch and row at a time: alike, and equal to plain autograd."""

from __future__ import annotations

import math
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pandas as pd
import pytest
import torch
from compare import ENGINES, assert_cells, object_series, slower_is_fine

import daskgrad as dg

Tensor = torch.Tensor


def scalars(count: int = 40) -> pd.DataFrame:
    """Rows enough for a batch; `n` are small counts."""
    rng = np.random.default_rng(0)
    return pd.DataFrame({"x": rng.uniform(-3, 3, count), "n": rng.integers(0, 4, count)})


def assert_gradient(frame: pd.DataFrame, fn: Callable[..., Any], engine: str) -> None:
    """The gradient by ``x``, and the value, are the oracle's."""
    rows = [
        dict(zip(frame, (np.asarray(c).copy() if np.ndim(c) else c for c in cells), strict=True)) for cells in frame.itertuples(index=False)
    ]
    rows = [{name: row[name] for name in fn.__code__.co_varnames[: fn.__code__.co_argcount]} for row in rows]
    expected = [oracle.row_derivatives(row, fn, {"value": (), "d": ("x",)}) for row in rows]
    with slower_is_fine():
        got = dg.derivatives(frame, fn, {"value": (), "d": "x"}, engine=engine)
    for label in ("value", "d"):
        assert_cells(list(got[label]), [row[label] for row in expected])


# --- the first argument by keyword


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["max", "min", "median"])
def test_a_tie_is_shared_out_alike_by_keyword(name: str, engine: str) -> None:
    def fn(x: Tensor) -> Tensor:
        result: Tensor = getattr(torch, name)(input=x)
        return result * 2

    assert_gradient(pd.DataFrame({"x": object_series([np.array([1.0, 1.0, 1.0, k]) for k in range(40)])}), fn, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_two_tensors_are_compared_by_keyword(engine: str) -> None:
    def fn(x: Tensor, n: Tensor) -> Tensor:
        if torch.equal(input=n, other=torch.tensor(2)):
            return x * x
        return x * 3 if torch.allclose(input=x, other=torch.tensor(1.0), atol=1) else x * 5

    assert_gradient(scalars(), fn, engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * torch.asarray(obj=[x]).sum(),
        lambda x: x * torch.as_tensor(data=[x]).sum(),
        lambda x: x * torch.tensor(data=[x]).sum(),
        lambda x: x * x.new_tensor(data=[x]).sum(),
    ],
)
def test_a_copy_by_keyword_is_a_cut(fn: Callable[[Tensor], Tensor], engine: str) -> None:
    with pytest.raises(dg.GraphError, match="takes a differentiated value out of torch"):
        dg.grad_column(scalars(), fn, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_literal_by_keyword_is_no_cut(engine: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return x * x.new_tensor(data=[1.0, 2.0]).sum()

    assert_gradient(scalars(), fn, engine)


# --- where vmap mixes rows, or differentiates otherwise


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "fn", [lambda x: x.roll(1) * x, lambda x: torch.roll(x * x, shifts=3) + x, lambda x: torch.roll(input=x, shifts=-1) ** 2]
)
def test_rolling_a_number_does_not_mix_rows(fn: Callable[[Tensor], Tensor], engine: str) -> None:
    assert_gradient(scalars(), fn, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_derivative_inside_of_a_detached_value(engine: str) -> None:
    def fn(x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda t: t**3)(x.detach())
        curve = torch.func.grad(torch.func.grad(lambda t: t**3))(x.detach())
        return slope * x + curve * x * x

    assert_gradient(scalars(), fn, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_derivative_inside_that_closes_over_the_argument(engine: str) -> None:
    def fn(x: Tensor, n: Tensor) -> Tensor:
        return torch.func.grad(lambda t: t**3 * x + t * x * x)(n.double())

    assert_gradient(scalars(), fn, engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["max", "min", "median", "nanmedian"])
@pytest.mark.parametrize(
    "cell", [[1.0, np.nan, 3.0], [np.nan, 2.0, np.nan], [np.nan] * 3, [1.0, 1.0, 3.0, 3.0], [np.inf, np.inf, -np.inf, -np.inf]]
)
def test_the_gradient_of_an_extreme(cell: list[float], name: str, engine: str) -> None:
    def fn(x: Tensor) -> Tensor:
        result: Tensor = getattr(x, name)()
        return result

    assert_gradient(pd.DataFrame({"x": object_series([np.array(cell)] * 40)}), fn, engine)


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * x.new([x]).sum(),
        lambda x: x * x.storage()[0],
        lambda x: x * x.untyped_storage().nbytes(),
        lambda x: x * pickle.loads(pickle.dumps(x)),
    ],
)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_copy_by_way_of_memory_is_a_cut(fn: Callable[[Tensor], Tensor], engine: str) -> None:
    with pytest.raises(dg.GraphError, match="takes a differentiated value out of torch"):
        dg.grad_column(scalars(), fn, engine=engine)


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_sparse_gradient_is_made_dense(engine: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.nn.functional.embedding(torch.tensor([0, 2]), x, sparse=True).pow(2).sum()

    cells = [np.arange(6.0).reshape(3, 2) + k for k in range(40)]
    with slower_is_fine():
        got = dg.grad_column(pd.DataFrame({"x": object_series(cells)}), fn, engine=engine)
    assert_cells(list(got), [2 * cell * [[1], [0], [1]] for cell in cells])


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_strides_set_in_place(engine: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return (x.clone().as_strided_((4,), (1,), 1) * torch.arange(4)).sum()

    assert_gradient(pd.DataFrame({"x": object_series([np.arange(6.0) + k for k in range(40)])}), fn, engine)


# --- draws that vmap does not see


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_the_dropout_of_a_recurrent_layer_is_refused_unless_it_is_meant(engine: str) -> None:
    layer = torch.nn.LSTM(2, 3, 2, dropout=0.5).double().train()

    def fn(x: Tensor) -> Tensor:
        return layer(torch.stack([x, x]).reshape(1, 2))[0].sum()

    state = torch.get_rng_state()
    with pytest.raises(dg.PlanError, match="draws random numbers"):
        dg.grad_column(scalars(), fn, engine=engine)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("draw", [random.random, np.random.random])
def test_a_draw_of_another_generator_is_each_rows_own(draw: Callable[[], float]) -> None:
    with slower_is_fine():
        got = dg.grad_column(scalars(), lambda x: x * draw(), randomness="different")
    assert got.nunique() == 40


# --- TorchScript


def scripted_without_a_warning(function: Callable[..., Any]) -> Any:
    """torch.jit.script, which torch calls deprecated, and which models of today still come in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)


@scripted_without_a_warning
def scripted_float(x):
    return x * math.exp(float(x))


@scripted_without_a_warning
def scripted_item(x):
    return x * x.detach().item() + x * x.item()


@scripted_without_a_warning
def scripted_paths(x):
    for _ in range(int(x.abs())):
        x = x * 1.5
    if bool(x > 0):
        return x * x
    return x * 3


@scripted_without_a_warning
def scripted_detached(x):
    return x * float(x.detach())


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("scripted", [scripted_float, scripted_item])
def test_a_cut_inside_torchscript(scripted: Any, engine: str) -> None:
    with pytest.raises(dg.GraphError, match="inside TorchScript"), slower_is_fine():
        dg.grad_column(scalars(), lambda x: scripted(x) * x, engine=engine)


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("scripted", [scripted_paths, scripted_detached])
def test_control_flow_inside_torchscript(scripted: Any, engine: str) -> None:
    def fn(x: Tensor) -> Tensor:
        result: Tensor = scripted(x) * x
        return result

    assert_gradient(scalars(), fn, engine)


# --- kernels in another layout


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 2},
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0)},
        {"kernel_size": 2, "dilation": 2, "stride": 1, "ceil_mode": True},
        {"kernel_size": 3, "stride": 2, "padding": 1, "return_indices": True},
    ],
)
@pytest.mark.parametrize("samples", [[], [2]])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pooling_is_that_of_a_row(options: dict[str, Any], samples: list[int], dtype: str) -> None:
    """Bit for bit, also where elements are equal, missing or infinite; and what comes out can be viewed as ever."""
    rng = np.random.default_rng(0)
    images = rng.integers(-2, 3, (40, *samples, 8, 7, 9)).astype(dtype)
    images[rng.random(images.shape) < 0.02] = np.nan
    images[rng.random(images.shape) < 0.02] = np.inf
    weights = torch.randn(8, 1, 1, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))

    def fn(x: Tensor) -> Tensor:
        pooled: Any = torch.nn.functional.max_pool2d(x * weights, **options)
        values = pooled[0] * (pooled[1] + 1) if isinstance(pooled, tuple) else pooled
        return (values.view(-1).nan_to_num(posinf=2.0, neginf=-3.0) ** 2).sum()

    frame = pd.DataFrame({"x": list(images)})
    batched, single = (dg.derivatives(frame, fn, {"value": (), "d": "x"}, engine=engine) for engine in ("vmap", "loop"))
    np.testing.assert_allclose(batched.value, single.value, rtol=1e-5)
    assert sum(np.abs(cell).sum() for cell in single.d) > 1000
    for ours, theirs in zip(batched.d, single.d, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_pooling_under_transforms_of_the_row_function() -> None:
    images = np.random.default_rng(0).normal(size=(40, 3, 8, 6, 6)).astype(np.float32)

    def fn(x: Tensor) -> Tensor:
        pool = torch.nn.functional.max_pool2d
        each = torch.vmap(lambda one: pool(one, 2).square().sum())(x)
        slope = torch.func.grad(lambda one: pool(one, 3).pow(3).sum())(x[0])
        return each.sum() + slope.sum() + pool(x, 2, 1).sum()

    frame = pd.DataFrame({"x": list(images)})
    batched, single = (dg.grad_column(frame, fn, engine=engine) for engine in ("vmap", "loop"))
    for ours, theirs in zip(batched, single, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_the_direct_way_into_vmap_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where torch's private functions have changed: then `torch.vmap` itself is used, which is slower and as right."""
    from daskgrad import _vmap

    assert _vmap.DIRECT
    rows = torch.arange(6.0).reshape(3, 2)

    def call(level: int, given: list[torch.Tensor]) -> list[torch.Tensor]:
        assert torch._C._functorch.maybe_get_level(given[0]) == level
        return [given[0].sum(), torch.zeros(2), given[0] * given[1]]

    direct = _vmap.over_rows(call, 3, [rows, rows + 1], "error")
    monkeypatch.setattr(_vmap, "DIRECT", False)
    for ours, theirs in zip(direct, _vmap.over_rows(call, 3, [rows, rows + 1], "error"), strict=True):
        assert torch.equal(ours, theirs)
    assert direct[1].shape == (3, 2)
