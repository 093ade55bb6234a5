"""The norm of each row's gradient by a million parameters, in a real worker process: its peak memory, which rows do not raise.

Formed in float32, the gradients of 100,000 rows are 400 GB. Each arm has a worker of its own, which starts with it, and makes the rows
where they are needed; so rows/s include that start. The check refuses a peak above 1.5 GB, and one that has grown with the rows.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from functools import partial

import dask.dataframe as dd
import numpy as np
import pandas as pd
import torch
from harness import Arm, Workload
from torch import Tensor, nn

import daskgrad as dg

MOST = 1.5e9
"""Bytes of a worker."""
FEATURES = [f"f{k}" for k in range(100)]


def workload(quick: bool) -> Workload:
    torch.manual_seed(0)
    wide = 20 if quick else 3000
    model = nn.Sequential(nn.Linear(100, wide), nn.Tanh(), nn.Linear(wide, 230), nn.Tanh(), nn.Linear(230, 1))
    count = sum(parameter.numel() for parameter in model.parameters())
    many = 400 if quick else 100_000
    arms = [Arm(f"{rows:,} rows", rows, partial(by_worker, model, rows)) for rows in ([many] if quick else [many, many // 4])]
    peaks: dict[str, float] = {}

    def check(name: str, result: Mapping[str, float]) -> None:
        peaks[name] = result["peak"]
        print(f"{name} by {count:,} parameters: the worker's peak is {result['peak'] / 1e9:.2f} GB")
        assert np.isfinite(result["sum"]), name
        assert result["sum"] > 0, name
        assert result["peak"] <= MOST, f"{name}: {result['peak'] / 1e9:.2f} GB"
        assert max(peaks.values()) <= 1.25 * min(peaks.values()), f"the peak grows with the rows: {peaks}"

    title = f"norm of the gradient by {count:,} parameters in a worker of its own, of 1.5 GB, started with it"
    return Workload(title, arms, check, repeats=1)


def by_worker(model: nn.Module, rows: int) -> Mapping[str, float]:
    """The sum of the norms, and the peak of the one worker's memory in bytes."""
    with dg.local_client(n_workers=1, memory_limit=MOST, dashboard_port=None) as client:
        frame = dd.from_map(part, range(10), rows=rows // 10, meta=part(0, 1))
        norms = dg.grad_column(frame, loss, wrt=dg.norm("model"), shared={"model": model}, inputs={"x": FEATURES})
        total = float(norms.sum().compute(scheduler=client))
        (peak,) = client.run(peak_of_process).values()
    return {"sum": total, "peak": peak}


def loss(model: nn.Module, x: Tensor) -> Tensor:
    error: Tensor = model(x)[0]
    return error**2


def part(seed: int, rows: int) -> pd.DataFrame:
    return pd.DataFrame(np.random.default_rng(seed).standard_normal((rows, len(FEATURES)), dtype=np.float32), columns=FEATURES)


def peak_of_process() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
