"""The question this project comes from, with joblib itself, and each way of answering it.

Ten random scalars; ``y = x * x`` is built in the parent; ``torch.autograd.grad`` is then called on the pairs in parallel.
"""

from __future__ import annotations

import pickle
from typing import Any

import dask
import dask.bag as db
import dask.dataframe as dd
import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from compare import assert_cells, in_equal_parts, object_series

import daskgrad as dg

VALUES = np.random.default_rng(0).normal(size=10)
TRUE = 2 * VALUES


def square(x: Any) -> Any:
    return x * x


def gradient_of_pair(y: torch.Tensor, x: torch.Tensor) -> float:
    """What each job of the question does: the graph is expected to have come along."""
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    return float(gradient.detach())


def gradient_rebuilt(value: float) -> float:
    """What each job should do: build the graph where the row lives."""
    torch.set_num_threads(1)
    x = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    return gradient_of_pair(square(x), x)


def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    leaves = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in VALUES]
    return [(x * x, x) for x in leaves]


def test_serial_is_right() -> None:
    assert_cells([gradient_of_pair(y, x) for y, x in pairs()], list(TRUE))


def test_joblib_threads_are_right() -> None:
    with joblib.parallel_config(backend="threading", n_jobs=2):
        found = joblib.Parallel()(joblib.delayed(gradient_of_pair)(y, x) for y, x in pairs())
    assert_cells(found, list(TRUE))


@pytest.mark.slow
@pytest.mark.parametrize("anomaly", [False, True])
def test_joblib_processes_lose_the_graph(anomaly: bool) -> None:
    """The question: a tensor pickled to another process arrives without its graph, and anomaly mode does not help."""
    with (
        torch.autograd.set_detect_anomaly(anomaly, check_nan=False),
        joblib.parallel_config(backend="loky", n_jobs=2),
        pytest.raises(RuntimeError),
    ):
        joblib.Parallel()(joblib.delayed(gradient_of_pair)(y, x) for y, x in pairs())


@pytest.mark.slow
def test_joblib_processes_that_rebuild_the_graph_are_right() -> None:
    with joblib.parallel_config(backend="loky", n_jobs=2):
        found = joblib.Parallel()(joblib.delayed(gradient_rebuilt)(value) for value in VALUES)
    assert_cells(found, list(TRUE))


def test_the_reason() -> None:
    """Pickled alone, the output of a graph becomes a leaf: there is nothing left to differentiate."""
    y, _ = pairs()[0]
    assert y.grad_fn is not None
    assert pickle.loads(pickle.dumps(y)).grad_fn is None


# --- the same ten numbers -----------------------------------------------------------------------------------


def table() -> pd.DataFrame:
    return pd.DataFrame({"x": VALUES})


@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
def test_pandas(engine: str) -> None:
    assert_cells(list(dg.grad_column(table(), square, engine=engine)), list(TRUE))
    assert_cells(list(dg.grad_column(table()["x"], square, engine=engine)), list(TRUE))


SCHEDULERS = ["synchronous", "threads", pytest.param("processes", marks=pytest.mark.slow)]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_dask(scheduler: str) -> None:
    column = dg.grad_column(in_equal_parts(table(), 3), square)
    assert_cells(list(column.compute(scheduler=scheduler)), list(TRUE))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("keyed", [True, False])
def test_bag(scheduler: str, keyed: bool) -> None:
    rows = [{"x": value} if keyed else value for value in VALUES.tolist()]
    column = dg.grad_column(db.from_sequence(rows, npartitions=2), square)
    assert isinstance(column, dd.Series)
    assert_cells(list(column.compute(scheduler=scheduler)), list(TRUE))


@pytest.mark.cluster
def test_distributed(client: Any) -> None:
    column = dg.grad_column(in_equal_parts(table(), 4), square)
    assert_cells(list(column.compute()), list(TRUE))
    bag = dg.grad_column(db.from_sequence([{"x": value} for value in VALUES.tolist()], npartitions=2), square)
    assert_cells(list(bag.compute()), list(TRUE))


@pytest.mark.cluster
def test_joblib_on_dask_lives_beside_it(client: Any) -> None:
    """A script that uses joblib's Dask backend and a gradient column on one cluster."""
    with joblib.parallel_config(backend="dask", client=client):
        found = joblib.Parallel()(joblib.delayed(gradient_rebuilt)(value) for value in VALUES[:4])
    assert_cells(found, list(TRUE[:4]))
    assert_cells(list(dg.grad_column(in_equal_parts(table(), 2), square).compute()), list(TRUE))


# --- graphs from the parent ---------------------------------------------------------------------------------


def graph_cells() -> list[torch.Tensor]:
    return [y for y, _ in pairs()]


def assert_explains(error: pytest.ExceptionInfo[dg.GraphError]) -> None:
    """The message is about this very thing: the cell has a graph, and it must be built inside the row function."""
    text = str(error.value).lower()
    assert "graph" in text
    assert "inside" in text


def test_a_pandas_column_of_graphs_is_refused() -> None:
    frame = pd.DataFrame({"y": object_series(graph_cells())})
    with pytest.raises(dg.GraphError) as error:
        dg.grad_column(frame, lambda y: y * y)
    assert_explains(error)
    assert "y" in str(error.value)
    assert "row 0" in str(error.value)


def test_a_dask_column_of_graphs_is_refused() -> None:
    frame = pd.DataFrame({"y": object_series(graph_cells())})
    with pytest.raises(dg.GraphError) as error, dask.config.set({"dataframe.convert-string": False}):
        dg.grad_column(dd.from_pandas(frame, npartitions=2, sort=False), lambda y: y * y).compute(scheduler="synchronous")
    assert_explains(error)


@pytest.mark.parametrize("keyed", [True, False])
def test_a_bag_of_graphs_is_refused(keyed: bool) -> None:
    """On the schedulers that hand objects over as they are; a pickled cell has lost its graph before anyone can look."""
    cells = graph_cells()
    rows = [{"y": cell} for cell in cells] if keyed else cells
    with pytest.raises(dg.GraphError) as error:
        dg.grad_column(db.from_sequence(rows, npartitions=2), lambda y: y * y).compute(scheduler="synchronous")
    assert_explains(error)


def test_leaf_tensors_are_fine() -> None:
    leaves = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in VALUES]
    frame = pd.DataFrame({"x": object_series(leaves)})
    assert_cells(list(dg.grad_column(frame, square)), list(TRUE))
