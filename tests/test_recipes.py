"""What the pages' recipes are for, at full precision: influence against real steps of an optimizer, scores against statsmodels."""

from __future__ import annotations

import copy
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import statsmodels.api as sm
import torch
from torch import Tensor, nn

import daskgrad as dg


def cross_entropy(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(), label)


def test_influence_is_what_a_step_on_the_row_does_to_the_held_out_loss() -> None:
    """The difference of the held-out loss after a step of SGD along a row's gradient and one against it, for each of two checkpoints."""
    rng = np.random.default_rng(0)
    data = pd.DataFrame(rng.normal(size=(60, 2)), columns=["a", "b"])
    data["label"] = (data["a"] + data["b"] ** 2 > 1).astype(float)
    rows, held_out = data[:12], data[12:]
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double() for _ in range(2)]
    call: dict[str, Any] = {
        "shared": {"model": dg.checkpoints(nets[0], [net.state_dict() for net in nets])},
        "inputs": {"x": ["a", "b"]},
    }
    directions = dg.mean_gradient(dd.from_pandas(held_out, npartitions=5), cross_entropy, "model", **call).compute(scheduler="synchronous")
    products = dg.grad_column(dd.from_pandas(rows, npartitions=3), cross_entropy, wrt=dg.dot("model", directions), **call)
    products = products.compute(scheduler="synchronous")

    def tensors(table: pd.DataFrame) -> tuple[Tensor, Tensor]:
        return torch.tensor(table[["a", "b"]].to_numpy()), torch.tensor(table["label"].to_numpy())

    def held_out_loss_after(net: nn.Module, row: int, way: int) -> float:
        net = copy.deepcopy(net)
        x, label = tensors(rows.iloc[[row]])
        (way * nn.functional.binary_cross_entropy_with_logits(net(x).squeeze(1), label)).backward()
        torch.optim.SGD(net.parameters(), lr=1e-4).step()
        x, label = tensors(held_out)
        return nn.functional.binary_cross_entropy_with_logits(net(x).squeeze(1), label).item()

    for k, net in enumerate(nets):
        fell = [(held_out_loss_after(net, row, -1) - held_out_loss_after(net, row, 1)) / 2e-4 for row in range(len(rows))]
        np.testing.assert_allclose(products.iloc[:, k], fell, rtol=1e-6, atol=1e-9)


def test_scores_and_hessians_make_the_sandwich_of_statsmodels() -> None:
    rng = np.random.default_rng(1)
    data = pd.DataFrame({"one": 1.0, "dose": rng.normal(size=300), "clinic": rng.integers(0, 20, size=300)})
    data["cases"] = rng.poisson(np.exp(0.5 + 0.3 * data["dose"] + 0.5 * rng.normal(size=20)[data["clinic"]]))
    names = ["one", "dose"]

    def minus_log_likelihood(beta: Tensor, x: Tensor, cases: Tensor) -> Tensor:
        return torch.exp(x @ beta) - cases * (x @ beta)

    model = sm.Poisson(data["cases"], data[names])
    beta = model.fit(disp=False, tol=1e-12).params.to_numpy()
    data["beta"] = [beta] * len(data)
    wanted = {"score": "beta", "hessian": ("beta", "beta")}
    found = dg.derivatives(data, minus_log_likelihood, wanted, inputs={"x": names})
    scores = np.stack(found["score"])
    bread = np.linalg.inv(np.stack(found["hessian"]).sum(axis=0))
    np.testing.assert_allclose(scores, -model.score_obs(beta), rtol=1e-10, atol=1e-12)
    robust = model.fit(disp=False, tol=1e-12, cov_type="HC0").cov_params().to_numpy()
    np.testing.assert_allclose(bread @ scores.T @ scores @ bread, robust, rtol=1e-6)
    sums = pd.DataFrame(scores).groupby(data["clinic"]).sum().to_numpy()
    by_clinic = {"groups": data["clinic"], "use_correction": False}
    clustered = model.fit(disp=False, tol=1e-12, cov_type="cluster", cov_kwds=by_clinic).cov_params().to_numpy()
    np.testing.assert_allclose(bread @ sums.T @ sums @ bread, clustered, rtol=1e-6)

    shared = {"beta": torch.tensor(beta)}
    again = dg.grad_column(data.drop(columns="beta"), minus_log_likelihood, wrt="beta", inputs={"x": names}, shared=shared)
    np.testing.assert_allclose(np.stack(again), scores, rtol=1e-12)
