"""Sums over rows of gradients by shared parameters, several checkpoints in one pass, a norm for each layer, slices of a flat gradient."""

from __future__ import annotations

from typing import Any

import dask
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from compare import object_series
from torch import Tensor, nn

import daskgrad as dg
from daskgrad import _contributions


class Reader(nn.Module):
    """An embedding that is tied to the output, a layer that is used twice, a norm: every kind of part there is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, padding_idx=0)
        self.mix = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        inner = self.mix(torch.tanh(self.mix(self.table(tokens))))
        scores: Tensor = self.out(self.norm(inner))
        return scores


def net() -> Reader:
    torch.manual_seed(0)
    return Reader().double()


def frame(rows: int = 37) -> pd.DataFrame:
    rng = np.random.default_rng(1)
    tokens = [rng.integers(0, 6, size=length) for length in rng.integers(1, 5, size=rows)]
    return pd.DataFrame({"tokens": object_series(tokens).array, "weight": rng.normal(size=rows)})


def loss(model: Any, tokens: Tensor, weight: Tensor) -> Tensor:
    value = (torch.logsumexp(model(tokens), -1) ** 2).sum() * weight
    return value if weight > 0 else 2 * value.abs()


def by_hand(model: nn.Module, table: pd.DataFrame) -> dict[str, np.ndarray[Any, Any]]:
    """(rows, *shape) for each parameter: plain autograd through the module itself, one row after the other."""
    names = [name for name, _ in model.named_parameters()]
    rows = []
    for tokens, weight in zip(table["tokens"], table["weight"], strict=True):
        value = loss(model, torch.from_numpy(tokens), torch.tensor(weight, dtype=torch.float64))
        rows.append(torch.autograd.grad(value, list(model.parameters())))
    return {f"model.{name}": np.stack([row[k].numpy() for row in rows]) for k, name in enumerate(names)}


def lengths(gradients: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    flat = np.concatenate([g.reshape(len(g), -1) for g in gradients.values()], axis=1)
    found: np.ndarray[Any, Any] = np.linalg.norm(flat, axis=1)
    return found


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-10, atol=1e-12, err_msg=name)


CARRIERS = ["pandas", "dask", "threads", "bag"]


def carried(carrier: str, table: pd.DataFrame, verb: Any) -> Any:
    if carrier == "pandas":
        return verb(table)
    if carrier == "bag":
        return verb(db.from_sequence(table.to_dict("records"), npartitions=3)).compute(scheduler="synchronous")
    with dask.config.set({"dataframe.convert-string": False}):
        return verb(dd.from_pandas(table, npartitions=11)).compute(scheduler="threads" if carrier == "threads" else "synchronous")


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_sums_equal_those_of_the_formed_gradients(carrier: str, engine: str) -> None:
    model, table = net(), frame()
    rows = by_hand(model, table)
    call = {"shared": {"model": model}, "engine": engine}
    mean = carried(carrier, table, lambda data: dg.mean_gradient(data, loss, "model", **call))
    assert_equal(mean, {name: g.mean(0) for name, g in rows.items()})
    fisher = carried(carrier, table, lambda data: dg.fisher_diagonal(data, loss, "model", **call))
    assert_equal(fisher, {name: (g**2).mean(0) for name, g in rows.items()})
    scale = np.minimum(1, 0.7 / lengths(rows))
    assert 0 < (scale < 1).sum() < len(table), "some rows are clipped and some are not"
    clipped = carried(carrier, table, lambda data: dg.clipped_sum(data, loss, "model", 0.7, **call))
    assert_equal(clipped, {name: np.tensordot(scale, g, 1) for name, g in rows.items()})


@pytest.mark.parametrize("verb", [dg.mean_gradient, dg.fisher_diagonal])
def test_sums_come_from_batches(verb: Any) -> None:
    """engine="vmap" cannot go to the loop where a rule breaks."""
    model, table = net(), frame(200)
    found = verb(table, loss, "model", shared={"model": model}, engine="vmap")
    power = 1 if verb is dg.mean_gradient else 2
    assert_equal(found, {name: (g**power).mean(0) for name, g in by_hand(model, table).items()})


def test_missing_and_failed_rows_do_not_count() -> None:
    table = pd.DataFrame({"x": pd.array([1.0, None, 3.0], dtype="Float64")})
    assert dg.mean_gradient(table, lambda w, x: w * x, "w", shared={"w": torch.tensor(1.0)})["w"] == 2.0

    def picky(w: Tensor, x: Tensor) -> Tensor:
        if x > 2:
            raise ValueError("too much")
        return w * x

    with pytest.raises(dg.RowError, match="too much"):
        dg.mean_gradient(table, picky, "w", shared={"w": torch.tensor(1.0)})
    assert dg.mean_gradient(table, picky, "w", shared={"w": torch.tensor(1.0)}, on_error="null")["w"] == 1.0


@pytest.mark.parametrize("carrier", CARRIERS)
def test_sums_of_each_checkpoint(carrier: str) -> None:
    model, table = net(), frame()
    states = [{name: tensor * factor for name, tensor in model.state_dict().items()} for factor in (1.0, 0.5)]
    call = {"shared": {"model": dg.checkpoints(model, states)}}
    mean = carried(carrier, table, lambda data: dg.mean_gradient(data, loss, "model", **call))
    clipped = carried(carrier, table, lambda data: dg.clipped_sum(data, loss, "model.mix", 0.7, **call))
    for k, state in enumerate(states):
        one = net()
        one.load_state_dict(state)
        rows = by_hand(one, table)
        assert_equal(mean[k], {name: g.mean(0) for name, g in rows.items()})
        part = {name: g for name, g in rows.items() if name.startswith("model.mix.")}
        assert_equal(clipped[k], {name: np.tensordot(np.minimum(1, 0.7 / lengths(part)), g, 1) for name, g in part.items()})


def test_a_row_that_fails_in_one_state_counts_in_the_others() -> None:
    def picky(model: nn.Module, x: Tensor) -> Tensor:
        value: Tensor = model(x[None]).sum()
        if value > 2:
            raise ValueError("too much")
        return value

    model = nn.Linear(1, 1, bias=False)
    states = [{"weight": torch.tensor([[factor]])} for factor in (1.0, 2.0, 9.0)]
    table = pd.DataFrame({"x": [1.0, 2.0, 4.0]})
    shared = {"model": dg.checkpoints(model, states)}
    means = dg.mean_gradient(table, picky, "model", shared=shared, on_error="null")
    assert [mean["model.weight"].item() for mean in means[:2]] == [1.5, 1.0]
    assert np.isnan(means[2]["model.weight"]).all()


@pytest.mark.parametrize("carrier", CARRIERS)
def test_parts_without_rows_add_nothing(carrier: str) -> None:
    """A filter leaves some partitions empty; in others all rows are missing."""
    model, table = net(), frame()
    table = table.convert_dtypes()
    table.loc[5:20, "weight"] = pd.NA
    present = table[table["weight"].notna() & (table.index > 12)]
    rows = by_hand(model, present.astype({"weight": float}))

    def verb(data: Any) -> Any:
        if isinstance(data, db.Bag):
            return dg.mean_gradient(data.filter(lambda record: record["row"] > 12), loss, "model", shared={"model": model})
        return dg.mean_gradient(data[data["row"] > 12], loss, "model", shared={"model": model})

    mean = carried(carrier, table.assign(row=table.index), verb)
    assert_equal(mean, {name: g.mean(0) for name, g in rows.items()})


def test_no_rows_have_no_mean_and_an_empty_sum() -> None:
    table = frame().iloc[:0]
    assert np.isnan(dg.mean_gradient(table, loss, "model", shared={"model": net()})["model.mix.bias"]).all()
    assert (dg.clipped_sum(table, loss, "model", 1.0, shared={"model": net()})["model.mix.bias"] == 0).all()


def test_sums_are_lazy_and_refuse_what_is_no_parameter() -> None:
    calls: list[int] = []

    def seen(w: Tensor, x: Tensor) -> Tensor:
        calls.append(1)
        return w * x

    table = pd.DataFrame({"x": [1.0, 2.0]})
    lazy = dg.mean_gradient(dd.from_pandas(table, npartitions=2), seen, "w", shared={"w": torch.tensor(1.0)})
    assert not calls
    assert lazy.compute(scheduler="synchronous")["w"] == 1.5
    with pytest.raises(dg.PlanError, match="no shared argument"):
        dg.mean_gradient(table, seen, "x", shared={"w": torch.tensor(1.0)})
    with pytest.raises(dg.PlanError, match="max_norm"):
        dg.clipped_sum(table, seen, "w", 0, shared={"w": torch.tensor(1.0)})


@pytest.mark.parametrize("carrier", CARRIERS)
def test_checkpoints_give_a_column_each(carrier: str) -> None:
    model, table = net(), frame()
    states = [{name: tensor * factor for name, tensor in model.state_dict().items()} for factor in (1.0, 0.5, 2.0)]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shared = {"model": dg.checkpoints(model, states)}
    found = carried(carrier, table, lambda data: dg.derivatives(data, loss, {"n": dg.norm("model"), "v": ()}, shared=shared))
    assert list(found.columns) == ["n[0]", "n[1]", "n[2]", "v[0]", "v[1]", "v[2]"]
    for k, state in enumerate(states):
        one = net()
        one.load_state_dict(state)
        np.testing.assert_allclose(found[f"n[{k}]"], lengths(by_hand(one, table)), rtol=1e-10)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("carrier", CARRIERS)
def test_each_checkpoint_has_its_own_direction(carrier: str) -> None:
    """One pass with a direction for each state is the passes of the states alone, of the product and of what contains it."""
    model, table = net(), frame()
    states = [{name: tensor * factor for name, tensor in model.state_dict().items()} for factor in (1.0, 0.5)]
    torch.manual_seed(1)
    directions = [{name: torch.randn_like(tensor) for name, tensor in model.named_parameters()} for _ in states]
    shared = {"model": dg.checkpoints(model, states)}
    asked = {"v": dg.dot("model", directions), "same": dg.dot("model", directions[0]), "problem": dg.problem}
    found = carried(carrier, table, lambda data: dg.derivatives(data, loss, asked, shared=shared))
    assert list(found.columns) == ["v[0]", "v[1]", "same[0]", "same[1]", "problem[0]", "problem[1]"]
    for k, state in enumerate(states):
        one = net()
        one.load_state_dict(state)
        rows = by_hand(one, table)
        for name, direction in (("v", directions[k]), ("same", directions[0])):
            products = sum(np.tensordot(rows[f"model.{part}"], tensor.numpy(), tensor.dim()) for part, tensor in direction.items())
            np.testing.assert_allclose(found[f"{name}[{k}]"], products, rtol=1e-10)
        assert found[f"problem[{k}]"].isna().all()


def test_directions_that_do_not_fit_are_refused() -> None:
    model, table = net(), frame(3)
    state = model.state_dict()
    two = {"model": dg.checkpoints(model, [state, state])}
    with pytest.raises(dg.PlanError, match=r"has 3 directions.*a module in 2"):
        dg.grad_column(table, loss, wrt=dg.dot("model", [state] * 3), shared=two)
    with pytest.raises(dg.PlanError, match=r"has 2 directions.*no module in several states"):
        dg.grad_column(table, loss, wrt=dg.dot("model", [state] * 2), shared={"model": model})
    with pytest.raises(dg.PlanError, match=r"mux\.bias.*no parameter"):
        dg.grad_column(table, loss, wrt=dg.dot("model", [state, {"mux.bias": state["mix.bias"]}]), shared=two)
    for direction in (state, [state, state]):
        with pytest.raises(dg.PlanError, match=r"'weight' is none.*label of a column, or numbers"):
            dg.grad_column(table, loss, wrt=dg.dot("weight", direction), shared=two)
    with pytest.raises(dg.PlanError, match="names no parameter"):
        dg.dot("model", {})


def test_a_state_that_does_not_fit_is_refused() -> None:
    state = net().state_dict()
    with pytest.raises(dg.PlanError, match=r"state 1 does not fit.*mix\.bias"):
        dg.checkpoints(net(), [state, {**state, "mix.bias": torch.zeros(9)}])
    with pytest.raises(dg.PlanError, match="at least one"):
        dg.checkpoints(net(), [])


def test_a_norm_for_each_layer() -> None:
    model, table = net(), frame()
    rows = by_hand(model, table)
    found = dg.grad_column(table, loss, wrt=dg.norm("model", per_layer=True), shared={"model": model})
    assert list(found.columns) == ["norm(model.table)", "norm(model.mix)", "norm(model.norm)"]
    for layer in ("table", "mix", "norm"):
        own = {name: g for name, g in rows.items() if name.startswith(f"model.{layer}.")}
        np.testing.assert_allclose(found[f"norm(model.{layer})"], lengths(own), rtol=1e-10)


def test_slices_say_which_parameter_is_where() -> None:
    model, table = net(), frame()
    rows = by_hand(model, table)
    flat = np.stack(dg.grad_column(table, loss, wrt="model", shared={"model": model}))
    slices = dg.parameter_slices({"model": model}, "model")
    assert list(slices) == list(rows)
    for name, place in slices.items():
        np.testing.assert_allclose(flat[:, place], rows[name].reshape(len(table), -1), rtol=1e-10, atol=1e-12)
    with pytest.raises(dg.PlanError, match="Did you mean"):
        dg.parameter_slices({"model": model}, "model.mux")


@pytest.mark.parametrize("alone", [0, 2**25], ids=["rows one by one", "rows as groups"])
def test_sums_of_a_convolution_equal_those_of_the_formed_gradients(alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough channels and places that torch's kernels form what is not summed at once."""
    monkeypatch.setattr(_contributions, "ALONE", alone)
    torch.manual_seed(0)
    model = nn.Conv2d(8, 4, 3, stride=2, padding=1, groups=1).double()
    rng = np.random.default_rng(2)
    table = pd.DataFrame({"x": object_series(list(rng.normal(size=(11, 8, 9, 8)))).array})
    assert _contributions.convolved_pays(8, 4, 9, 20)

    def by_convolution(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out.sin().sum()

    outputs = [by_convolution(model, torch.from_numpy(cell)) for cell in table["x"]]
    gradients = [torch.autograd.grad(output, list(model.parameters())) for output in outputs]
    rows = {f"model.{name}": np.stack([g[k].numpy() for g in gradients]) for k, name in enumerate(["weight", "bias"])}
    call: Any = {"shared": {"model": model}}
    assert_equal(dg.mean_gradient(table, by_convolution, "model", **call), {name: g.mean(0) for name, g in rows.items()})
    assert_equal(dg.fisher_diagonal(table, by_convolution, "model", **call), {name: (g**2).mean(0) for name, g in rows.items()})
    clip = np.minimum(1, 2.0 / lengths(rows))
    clipped = dg.clipped_sum(table, by_convolution, "model", 2.0, **call)
    assert_equal(clipped, {name: np.tensordot(clip, g, 1) for name, g in rows.items()})
