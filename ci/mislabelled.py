"""Finds wrong labels: real digits, one label in twenty flipped, rows sorted by the norm of their gradient by the model's parameters.

`.venv/bin/python ci/mislabelled.py` takes seconds and prints the same numbers each time.
"""

from __future__ import annotations

import click
import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F

import daskgrad as dg

FLIPPED = 0.05


def loss(model: nn.Module, pixels: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(model(pixels), label)


def digits() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Images to train on, of which some have another label than they should (`flipped`), and others to test on."""
    images, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(images))
    frame = pd.DataFrame({"pixels": list((images / 16).astype(np.float32)), "label": labels}).iloc[order].reset_index(drop=True)
    train, test = frame[:1500].copy(), frame[1500:]
    train["flipped"] = False
    chosen = rng.choice(len(train), int(FLIPPED * len(train)), replace=False)
    train.loc[chosen, "flipped"] = True
    train.loc[chosen, "label"] = (train.loc[chosen, "label"] + rng.integers(1, 10, len(chosen))) % 10
    return train, test


def trained(train: pd.DataFrame) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    pixels, labels = _tensors(train)
    for _ in range(20):
        for rows in torch.randperm(len(pixels)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(pixels[rows]), labels[rows]).backward()
            optimizer.step()
    return model


def _tensors(frame: pd.DataFrame) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(np.stack(list(frame["pixels"]))), torch.from_numpy(frame["label"].to_numpy(copy=True))


def found(train: pd.DataFrame, model: nn.Module) -> tuple[float, float]:
    """The part of flipped labels among the rows with the largest norms, as many as were flipped; and the area under the ROC curve."""
    norms = dg.grad_column(train, loss, wrt=dg.norm("model"), shared={"model": model})
    first = norms.nlargest(int(train["flipped"].sum())).index
    return float(train.loc[first, "flipped"].mean()), float(roc_auc_score(train["flipped"], norms))


def main() -> None:
    torch.set_num_threads(1)  # the same sums in the same order everywhere
    train, test = digits()
    model = trained(train)
    pixels, labels = _tensors(test)
    accuracy = float((model(pixels).argmax(1) == labels).double().mean())
    precision, area = found(train, model)
    flipped = int(train["flipped"].sum())
    click.echo(f"{len(train)} digits, {flipped} labels flipped; the model is right on {accuracy:.1%} of {len(test)} others.")
    click.echo(
        f"Of the {flipped} rows with the largest gradient norm {precision:.0%} are flipped (by chance {FLIPPED:.0%}); AUC {area:.3f}."
    )


if __name__ == "__main__":
    main()
