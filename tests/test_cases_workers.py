"""Cases from the field about workers: what travels, what stays as it was, what random functions promise."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import IO, Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from compare import ENGINES, assert_cells, in_equal_parts, object_series, run_script, slower_is_fine

import daskgrad as dg

# --- a01: cells that carry a graph --------------------------------------------------------------------------


def computed_cells() -> dict[str, list[torch.Tensor]]:
    p = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    vector = torch.ones(2, dtype=torch.float64, requires_grad=True)
    return {
        "all of them": [p * 2, p * p, p.sin()],
        "one of them": [torch.tensor(1.0, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64), p * 2],
        "vectors": [vector * 2, vector + 1, vector.exp()],
        "views": [vector[0], vector[1], vector.sum()],
    }


@pytest.mark.parametrize("kind", sorted(computed_cells()))
@pytest.mark.parametrize("engine", ENGINES)
def test_case_a01_cells_that_carry_a_graph(kind: str, engine: str) -> None:
    cells = computed_cells()[kind]
    frame = pd.DataFrame({"t": object_series(cells)})
    calls: list[int] = []

    def fn(t: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return (t * t).sum()

    with pytest.raises(dg.GraphError) as error:
        dg.grad_column(frame, fn, engine=engine)
    first = next(place for place, cell in enumerate(cells) if cell.grad_fn is not None)
    assert "t" in str(error.value)
    assert f"row {first}" in str(error.value)
    assert not calls, "before any work"


@pytest.mark.parametrize("requires_grad", [False, True])
def test_case_a01_leaf_tensor_cells_are_fine(requires_grad: bool) -> None:
    cells = [torch.tensor(v, dtype=torch.float64, requires_grad=requires_grad) for v in (1.0, 2.0, -3.0)]
    got = dg.grad_column(pd.DataFrame({"t": object_series(cells)}), lambda t: t * t)
    assert_cells(list(got), [2.0, 4.0, -6.0])
    assert all(cell.grad is None for cell in cells)


# --- a03: a backward pass in the parent, then processes -----------------------------------------------------

FORK_AFTER_BACKWARD = """
import sys
import dask, dask.dataframe as dd, pandas as pd, torch
import daskgrad as dg

def square(x):
    return x * x

if __name__ == "__main__":
    x = torch.ones(1000, requires_grad=True)
    (x * x).sum().backward()
    frame = dd.from_pandas(pd.DataFrame({"x": [1.0, 2.0, 3.0]}), npartitions=2)
    with dask.config.set({"multiprocessing.context": sys.argv[1], "scheduler": "processes", "num_workers": 2}):
        try:
            print("VALUES", list(dg.grad_column(frame, square).compute()))
        except Exception as error:
            print("ERROR", str(error).replace(chr(10), " "))
"""


@pytest.mark.slow
@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_case_a03_processes_after_a_backward_in_the_parent(tmp_path: Path, start: str) -> None:
    """The right numbers or one clear sentence; a hang fails by the time limit."""
    script = tmp_path / "script.py"
    script.write_text(FORK_AFTER_BACKWARD)
    done = run_script(script, start)
    assert done.returncode == 0, done.stderr
    if start == "spawn":
        assert "VALUES [2.0, 4.0, 6.0]" in done.stdout, done.stdout + done.stderr
    elif "VALUES" in done.stdout:
        assert "VALUES [2.0, 4.0, 6.0]" in done.stdout
    else:
        assert "ERROR" in done.stdout
        assert "fork" in done.stdout.lower()


# --- a06: what can be shipped -------------------------------------------------------------------------------


def unshippable(stream: IO[str]) -> dict[str, tuple[str, Any]]:
    """Kind → captured variable and a row function that closes over it."""
    guard = threading.Lock()
    local = threading.local()

    def with_lock(x: torch.Tensor) -> torch.Tensor:
        with guard:
            return x * x

    def with_file(x: torch.Tensor) -> torch.Tensor:
        stream.write("row")
        return x * x

    def with_local(x: torch.Tensor) -> torch.Tensor:
        local.seen = True
        return x * x

    return {"lock": ("guard", with_lock), "file": ("stream", with_file), "thread-local": ("local", with_local)}


@pytest.mark.parametrize("kind", ["lock", "file", "thread-local"])
def test_case_a06_what_cannot_be_shipped_is_named_at_the_call(tmp_path: Path, kind: str) -> None:
    frame = dd.from_pandas(pd.DataFrame({"x": [1.0, 2.0]}), npartitions=1)
    with (tmp_path / "log.txt").open("w") as stream:
        name, fn = unshippable(stream)[kind]
        with pytest.raises(dg.PlanError, match=name):
            dg.grad_column(frame, fn)


MODEL_IN_MAIN = """
import dask, dask.dataframe as dd, pandas as pd, torch
import daskgrad as dg

class Double(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x):
        return self.scale * x * x

if __name__ == "__main__":
    model = Double()
    frame = dd.from_pandas(pd.DataFrame({"x": [1.0, 2.0, 3.0]}), npartitions=2)
    column = dg.grad_column(frame, lambda x, model: model(x), shared={"model": model})
    for scheduler in ("synchronous", "threads", "processes"):
        print(scheduler, list(column.compute(scheduler=scheduler)))
    closed = dg.grad_column(frame, lambda x: model(x))
    print("closed over", list(closed.compute(scheduler="processes")))
"""


@pytest.mark.slow
def test_case_a06_a_model_class_in_main_works(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MODEL_IN_MAIN)
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines == [f"{way} [4.0, 8.0, 12.0]" for way in ("synchronous", "threads", "processes", "closed over")]


# --- a10: the model is as it was ----------------------------------------------------------------------------


def snapshot(model: torch.nn.Module) -> dict[str, Any]:
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "train": [module.training for module in model.modules()],
        "grad": [p.grad for p in model.parameters()],
        "requires": [p.requires_grad for p in model.parameters()],
        "types": [type(p) for p in model.parameters()],
    }


def assert_same(model: torch.nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    assert after["state"].keys() == before["state"].keys()
    for key, value in before["state"].items():
        assert torch.equal(after["state"][key], value), key
    for part in ("train", "grad", "requires", "types"):
        assert after[part] == before[part], part


def networks() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    return {
        "BatchNorm in train mode": torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)),
        "BatchNorm in eval mode": torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).eval(),
        "Dropout in train mode": torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)),
        "mixed modes": torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5).eval(), torch.nn.Linear(4, 1)),
    }


@pytest.mark.parametrize("kind", sorted(networks()))
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", ["shared", "closed over"])
def test_case_a10_the_model_is_as_it_was(kind: str, engine: str, way: str) -> None:
    """Whether the call works (eval) or fails (train: one row has no batch; random without leave)."""
    model = networks()[kind].double()
    frame = pd.DataFrame({"x": [0.5, 1.0, 2.0]})
    before = snapshot(model)
    fails = "train" in kind

    def call() -> Any:
        if way == "closed over":
            return dg.grad_column(frame, lambda x: model(x.reshape(1, 1)).sum(), engine=engine)
        return dg.grad_column(frame, lambda x, model: model(x.reshape(1, 1)).sum(), shared={"model": model}, engine=engine)

    if fails:
        with slower_is_fine(), pytest.raises(dg.DaskgradError):
            call()
    else:
        assert np.isfinite(call()).all()
    assert_same(model, before)


@pytest.mark.parametrize("engine", ENGINES)
def test_case_a10_as_it_was_after_the_row_function_fails(engine: str) -> None:
    model = torch.nn.Linear(1, 1).double()
    before = snapshot(model)

    def fn(x: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
        out = model(x.reshape(1)).sum()
        if x > 1.5:
            raise ValueError("too large")
        return out

    with slower_is_fine(), pytest.raises(dg.RowError):
        dg.grad_column(pd.DataFrame({"x": [1.0, 2.0]}), fn, shared={"model": model}, engine=engine)
    assert_same(model, before)


# --- a11: random functions ----------------------------------------------------------------------------------


def dropped(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x * torch.ones(4), 0.5).sum()


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x * torch.randn(())


def uniform(x: torch.Tensor) -> torch.Tensor:
    return (x * torch.rand(3)).sum()


@pytest.mark.parametrize("fn", [dropped, noisy, uniform])
def test_case_a11_a_seed_repeats_the_column(fn: Any) -> None:
    """The same on every run and scheduler for the same partitions; the caller's generator is as before."""
    frame = pd.DataFrame({"x": np.ones(8)})
    lazy = in_equal_parts(frame, 2)
    options: dict[str, Any] = {"randomness": "different", "seed": 1}
    state = torch.random.get_rng_state()
    first = list(dg.grad_column(frame, fn, **options))
    assert list(dg.grad_column(frame, fn, **options)) == first
    assert len(set(first)) > 1, "rows draw for themselves"
    columns = [
        list(dg.grad_column(lazy, fn, **options).compute(scheduler=scheduler))
        for scheduler in ("synchronous", "threads", "synchronous", "threads")
    ]
    assert columns[1:] == columns[:-1]
    assert torch.equal(torch.random.get_rng_state(), state)
    other = list(dg.grad_column(frame, fn, randomness="different", seed=2))
    assert other != first


@pytest.mark.slow
def test_case_a11_also_on_processes() -> None:
    lazy = in_equal_parts(pd.DataFrame({"x": np.ones(8)}), 2)
    column = dg.grad_column(lazy, dropped, randomness="different", seed=1)
    assert list(column.compute(scheduler="processes")) == list(column.compute(scheduler="synchronous"))


@pytest.mark.cluster
def test_case_a11_also_on_a_cluster(client: Any) -> None:
    lazy = in_equal_parts(pd.DataFrame({"x": np.ones(8)}), 2)
    column = dg.grad_column(lazy, dropped, randomness="different", seed=1)
    assert list(column.compute()) == list(column.compute(scheduler="synchronous"))


@pytest.mark.parametrize("engine", ENGINES)
def test_randomness_same_is_one_draw_for_all(engine: str) -> None:
    got = list(dg.grad_column(pd.DataFrame({"x": np.ones(6)}), noisy, randomness="same", seed=3, engine=engine))
    assert len(set(got)) == 1


def noisy_otherwise(x: torch.Tensor) -> torch.Tensor:
    return x * random.random() * np.random.rand() * torch.rand(())


@pytest.mark.parametrize("engine", ENGINES)
def test_draws_of_python_and_numpy_follow_the_same_options(engine: str) -> None:
    """One draw for all, or one for each row, repeatable by the seed; and the caller's generators stand where they stood."""
    frame = pd.DataFrame({"x": np.ones(40)})
    with slower_is_fine():
        stood = random.getstate(), np.random.get_state()[1].tolist()
        same, again = (list(dg.grad_column(frame, noisy_otherwise, randomness="same", seed=3, engine=engine)) for _ in range(2))
        assert same == again
        assert len(set(same)) == 1
        if engine == "vmap":
            with pytest.raises(dg.PlanError, match='engine="auto" or "loop" can'):
                dg.grad_column(frame, noisy_otherwise, randomness="different", engine=engine)
        else:
            each, anew = (list(dg.grad_column(frame, noisy_otherwise, randomness="different", seed=3, engine=engine)) for _ in range(2))
            assert each == anew
            assert len(set(each)) == 40
        assert stood == (random.getstate(), np.random.get_state()[1].tolist())


# --- the row error survives every scheduler -------------------------------------


class TwoPart(Exception):
    """An exception that plain pickling breaks: two arguments in, one kept."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class WithLock(Exception):
    """An exception that cannot be pickled at all."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def raise_value(x: torch.Tensor) -> torch.Tensor:
    if x > 2.5:
        raise ValueError("a bad row")
    return x * x


def raise_two_part(x: torch.Tensor) -> torch.Tensor:
    if x > 2.5:
        raise TwoPart(7, "a bad row")
    return x * x


def raise_with_lock(x: torch.Tensor) -> torch.Tensor:
    if x > 2.5:
        raise WithLock("a bad row")
    return x * x


RAISERS = [raise_value, raise_two_part, raise_with_lock]


def assert_row_error(column: Any, scheduler: str | None) -> None:
    with slower_is_fine(), pytest.raises(dg.RowError) as raised:
        column.compute(scheduler=scheduler) if scheduler else column.compute()
    error = raised.value
    assert error.label == "q"
    assert error.partition == 1
    assert float(error.values["x"]) == 3.0
    assert "a bad row" in str(error.__cause__)
    assert "q" in str(error)


@pytest.mark.parametrize("fn", RAISERS)
@pytest.mark.parametrize("scheduler", ["synchronous", "threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_row_error_survives_the_scheduler(fn: Any, scheduler: str) -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0, 3.0, 1.0]}, index=list("opqr"))
    assert_row_error(dg.grad_column(in_equal_parts(frame, 2), fn), scheduler)


@pytest.mark.cluster
@pytest.mark.parametrize("fn", RAISERS)
def test_a_row_error_survives_the_cluster(client: Any, fn: Any) -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0, 3.0, 1.0]}, index=list("opqr"))
    assert_row_error(dg.grad_column(in_equal_parts(frame, 2), fn), None)


@pytest.mark.cluster
def test_a_missing_user_module_is_a_sentence_and_no_worker_is_lost(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker cannot import fails the task, not the cluster."""
    (tmp_path / "only_here.py").write_text("def square(x):\n    return x * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__("only_here")
    before = set(client.scheduler_info()["workers"])
    lazy = in_equal_parts(pd.DataFrame({"x": [1.0, 2.0]}), 2)
    with pytest.raises(Exception, match="only_here"):
        client.compute(dg.grad_column(lazy, module.square)).result(timeout=180)
    assert set(client.scheduler_info()["workers"]) == before
    assert_cells(list(dg.grad_column(lazy, raise_value).compute()), [2.0, 4.0])


def test_ambient_dask_config_is_left_alone() -> None:
    before = dict(dask.config.config)
    dg.grad_column(in_equal_parts(pd.DataFrame({"x": [1.0, 2.0]}), 2), raise_value).compute(scheduler="synchronous")
    assert dict(dask.config.config) == before
