"""The compiled engine: the same answers from a kernel, found again on disk, and the eager engine where there can be none.

Each kernel takes a compiler several seconds, so these tests share a folder of kernels and few functions.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import oracle
import pandas as pd
import pytest
import strategies
import torch
from compare import assert_cells, computed, partitioned, slower_is_fine
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import daskgrad as dg
from daskgrad import _binaries, _compiled, _compiler


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    """These tests compile."""
    named = os.environ.get("CXX", "g++")
    assert shutil.which(named), f"the tests of the compiled engine need a C++ compiler, and there is no {named}: apt-get install g++"


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: nothing is loaded yet."""
    monkeypatch.setattr(_compiled, "_entries", type(_compiled._entries)())


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that reach the compiler, which runs in this process: that saves its start."""
    asked: list[Any] = []

    def here(plan: Any, request: Any, target: Path) -> None:
        asked.append(request)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, which another process would keep to itself
            _compiler.build(plan, request, target)

    monkeypatch.setattr(_compiled, "compile_apart", here)
    return asked


@pytest.fixture
def no_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler must not be asked."""

    def refuse(*request: Any) -> None:
        raise AssertionError(f"{request} was to be compiled")

    monkeypatch.setattr(_compiled, "compile_apart", refuse)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels pay from few rows on."""
    monkeypatch.setattr(_compiled, "PAYS", 200)


@pytest.fixture
def eager_is_refused(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the eager engine refuse more than so many rows: the others must have come from a kernel."""

    def limit(rows: int) -> None:
        from daskgrad import _kernel

        before, done = _kernel._tensors, [0]

        def counted(arrays: Any, device: Any) -> Any:
            done[0] += len(next(iter(arrays.values()), ()))
            assert done[0] <= rows, f"the eager engine got {done[0]} rows"
            return before(arrays, device)

        monkeypatch.setattr(_kernel, "_tensors", counted)

    return limit


WANTED = {"value": (), "slope": "x", "by_y": "y", "mixed": ("x", "y"), "length": dg.norm(["x", "y"])}


def wave(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * y**2


def expected_wave(frame: pd.DataFrame) -> dict[str, Any]:
    x, y = frame["x"].to_numpy(), frame["y"].to_numpy()
    by_x, by_y = np.cos(x) * y**2, 2 * np.sin(x) * y
    return {"value": np.sin(x) * y**2, "slope": by_x, "by_y": by_y, "mixed": 2 * np.cos(x) * y, "length": np.hypot(by_x, by_y)}


def waves(rows: int, dtype: str = "float64") -> pd.DataFrame:
    rng = np.random.default_rng(rows)
    return pd.DataFrame({"x": rng.normal(size=rows), "y": rng.uniform(1, 2, rows)}).astype(dtype)


def assert_wave(found: pd.DataFrame, frame: pd.DataFrame, rtol: float = 1e-12) -> None:
    for name, values in expected_wave(frame).items():
        np.testing.assert_allclose(found[name], values, rtol=rtol, err_msg=name)
    pd.testing.assert_index_equal(found.index, frame.index)


# --- one kernel -------------------------------------------------------------------------------------------------------


def test_rows_come_from_a_kernel_compiled_in_another_process(kernels: Path, eager_is_refused: Callable[[int], None]) -> None:
    frame = waves(50_001)
    eager_is_refused(64)
    assert_wave(dg.derivatives(frame, wave, WANTED, engine="compiled"), frame)
    made = {path.suffix for path in kernels.iterdir()}
    assert ".pt2" in made and ".new" not in made


def test_a_second_process_starts_at_once(tmp_path: Path, no_compiling: None, kernels: Path) -> None:
    """The kernel is found by the content of the function, which stands in another file there; torch's compiler is not imported."""
    frame = waves(1000)
    assert_wave(dg.derivatives(frame, wave, WANTED, engine="compiled"), frame)  # it is there
    script = tmp_path / "again.py"
    script.write_text(_AGAIN)
    house = os.pathsep.join([_HOUSE, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PATH": "", "PYTHONPATH": house}  # there is no compiler
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"inductor": False, "compiled": 100_000 - 64}


_HOUSE = str(Path(dg.__file__).resolve().parent.parent)
_AGAIN = """
from __future__ import annotations

import json, sys
import numpy as np, pandas as pd, torch
import daskgrad as dg
from daskgrad import _kernel

# Elsewhere in the file, and with another name for the frame.
def wave(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * y**2

reports = []
solve = _kernel.solve
def noted(job, sink):
    reports.append(job.report)
    solve(job, sink)
_kernel.solve = noted
table = pd.DataFrame({"x": np.linspace(0, 1, 100_000), "y": 2.0})
wanted = {"value": (), "slope": "x", "by_y": "y", "mixed": ("x", "y"), "length": dg.norm(["x", "y"])}
found = dg.derivatives(table, wave, wanted, engine="compiled")
np.testing.assert_allclose(found["slope"], np.cos(table["x"]) * 4, rtol=1e-12)
print(json.dumps({"inductor": "torch._inductor" in sys.modules, "compiled": sum(r.compiled for r in reports)}))
"""


def test_what_is_missing_or_repeated_stays_in_its_place(no_compiling: None) -> None:
    frame = waves(500)
    frame.index = pd.Index(np.arange(500) // 2, name="id")
    frame["x"] = frame["x"].astype("Float64")
    frame.iloc[7, 0] = pd.NA
    found = dg.derivatives(frame, wave, WANTED, engine="compiled")
    assert found["slope"].isna().tolist() == frame["x"].isna().tolist()
    whole = frame[frame["x"].notna()].astype(float)
    assert found["slope"].dtype == "Float64"
    assert_wave(found[found["slope"].notna()].astype(float), whole)


def test_read_only_columns_and_the_frame_itself_are_left_alone(no_compiling: None) -> None:
    frame = waves(300)
    before = frame.copy(deep=True)
    frame["x"].to_numpy().flags.writeable = False
    assert_wave(dg.derivatives(frame, wave, WANTED, engine="compiled"), frame)
    pd.testing.assert_frame_equal(frame, before)


def test_a_batch_of_one_row_and_no_rows(no_compiling: None) -> None:
    assert_wave(dg.derivatives(waves(65), wave, WANTED, engine="compiled"), waves(65))  # 64 rows, and one
    assert_wave(dg.derivatives(waves(1), wave, WANTED, engine="compiled"), waves(1))
    assert len(dg.derivatives(waves(0), wave, WANTED, engine="compiled")) == 0
    assert_wave(dg.derivatives(waves(100), wave, WANTED, engine="compiled", batch_size=7), waves(100))


def test_bad_rows_are_told(no_compiling: None) -> None:
    frame = waves(1000)
    frame.loc[900, "x"] = np.inf
    found = dg.derivatives(frame, wave, {**WANTED, "problem": dg.problem}, engine="compiled")
    assert found["problem"].dropna().to_dict() == {900: "value not finite"}


# --- other kernels ----------------------------------------------------------------------------------------------------


_EXAMPLES = 12 if os.environ.get("DASKGRAD_TESTS") == "long" else 1  # each is a kernel to compile


@given(data=st.data())
@settings(max_examples=_EXAMPLES, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
def test_random_functions_equal_the_oracle(data: st.DataObject, compiled: list[Any]) -> None:
    kinds = {"x": "scalar", "y": "scalar", "n": "count", "v": "vector"}
    program = data.draw(strategies.programs(kinds, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    rows = [{"x": rng.normal(), "y": rng.normal(), "n": 2, "v": rng.normal(size=3)} for _ in range(200)]
    orders: dict[str, Any] = {"value": (), "x": "x", "v": "v", "xv": ("x", "v")}
    with slower_is_fine():  # some of torch's rules fix the number of rows
        got = dg.derivatives(pd.DataFrame(rows), program.fn, orders, engine="compiled", allow_unused=True)
    paths: dict[str, tuple[str, ...]] = {"value": (), "x": ("x",), "v": ("v",), "xv": ("x", "v")}
    for name, path in paths.items():
        assert_cells(list(got[name]), oracle.derivative(rows, program.fn, path, allow_unused=True), rtol=1e-9)


STEPPED = {"value": (), "slope": "x", "bend": ("x", "x")}


def stepped(x: torch.Tensor, kind: str) -> torch.Tensor:
    if x > 5:
        raise ValueError("too large")
    if x < 0:
        return -(x**3) if kind == "odd" else x**2
    return torch.exp(x)


def test_paths_and_texts_have_kernels_of_their_own_where_they_pay(
    compiled: list[Any], soon: None, eager_is_refused: Callable[[int], None]
) -> None:
    """1,000 rows take one path, 150 another, and of the second text there are 30: of the three only the first pays."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(0.1, 1, 1000), rng.uniform(-1, -0.1, 180)])
    frame = pd.DataFrame({"x": x, "kind": ["odd"] * 1150 + ["even"] * 30}).sample(frac=1, random_state=0)
    eager_is_refused(400)
    with pytest.warns(dg.EngineWarning, match="take one path through the function"):
        found = dg.derivatives(frame, stepped, STEPPED, engine="compiled", batch_size=64)
    above, odd = frame["x"] > 0, frame["kind"] == "odd"
    x = frame["x"].to_numpy()
    np.testing.assert_allclose(found["value"], np.select([above, odd], [np.exp(x), -(x**3)], x**2), rtol=1e-12)
    np.testing.assert_allclose(found["slope"], np.select([above, odd], [np.exp(x), -3 * x**2], 2 * x), rtol=1e-12)
    np.testing.assert_allclose(found["bend"], np.select([above, odd], [np.exp(x), -6 * x], 2.0), rtol=1e-12)
    assert [request.answers for request in compiled] == [(False, False)]


def test_a_kernel_writes_into_the_result(monkeypatch: pytest.MonkeyPatch, no_compiling: None) -> None:
    load, written = _binaries.load, []

    def watched(path: Path) -> _binaries.Run:
        run = load(path)

        def noted(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            written.append([(tensor.data_ptr(), len(tensor)) for tensor in tensors[-len(WANTED) :]])
            return run(tensors)

        return noted

    monkeypatch.setattr(_binaries, "load", watched)
    found = dg.derivatives(waves(1000), wave, WANTED, engine="compiled")
    assert_wave(found, waves(1000))
    memory = {name: found[name].to_numpy().__array_interface__["data"][0] for name in WANTED}
    assert found[list(WANTED)].dtypes.nunique() == 1
    after_the_first = [(place, count) for chunk in written[1:] for place, count in chunk]
    inside = [any(start <= place < start + 8000 for start in memory.values()) for place, _ in after_the_first]
    assert inside and all(inside)
    assert sum(count for _, count in after_the_first) == len(WANTED) * (1000 - 64)


def test_how_many_rows_a_kernel_takes_at_once_changes_no_bit(monkeypatch: pytest.MonkeyPatch, no_compiling: None) -> None:
    """The clock decides how many, so it may differ from run to run; the column must not."""
    rows, asked = waves(5003), []
    found = dg.derivatives(rows, wave, WANTED, engine="compiled")
    for many in (61, 998, 5003):
        monkeypatch.setattr(_compiled.Kernel, "at_once", property(lambda kernel, many=many: asked.append(many) or many))
        pd.testing.assert_frame_equal(dg.derivatives(rows, wave, WANTED, engine="compiled"), found, check_exact=True)
    assert set(asked) == {61, 998, 5003}


def test_a_small_network_has_a_kernel(compiled: list[Any], empty_folder: Path, eager_is_refused: Callable[[int], None]) -> None:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    frame, inputs = waves(3000), {"x": ["x", "y"]}

    def output(x: torch.Tensor, network: Any) -> torch.Tensor:
        result: torch.Tensor = network(x).squeeze()
        return result

    eager = dg.derivatives(frame, output, {"value": (), "slope": "x"}, inputs=inputs, shared={"network": network})
    eager_is_refused(64)
    found = dg.derivatives(frame, output, {"value": (), "slope": "x"}, inputs=inputs, shared={"network": network}, engine="compiled")
    assert len(compiled) == 1
    np.testing.assert_allclose(found["value"], eager["value"], rtol=1e-12)
    np.testing.assert_allclose(np.stack(found["slope"]), np.stack(eager["slope"]), rtol=1e-12)


# --- Dask -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
def test_dask_equals_pandas(scheduler: str, no_compiling: None) -> None:
    frame = waves(3000)
    data = partitioned(frame, [(0, 1000), (1000, 1000), (1000, 3000)])
    assert_wave(computed(dg.derivatives(data, wave, WANTED, engine="compiled"), scheduler), frame)


def test_workers_get_the_kernel_with_the_plan(client: Any, no_compiling: None) -> None:
    """They would make one of their own otherwise: their environment does not name this folder."""
    frame = waves(3000)
    data = dg.derivatives(dd.from_pandas(frame, npartitions=6), wave, WANTED, engine="compiled")
    assert_wave(data.compute(), frame)
    loaded = client.run(_loaded)
    assert all(loaded.values()), loaded


def _loaded() -> int:
    from daskgrad import _compiled

    return sum(entry.kernel is not None for entry in _compiled._entries.values())


# --- where there can be no kernel -------------------------------------------------------------------------------------


def doctored(kernels: Path, to: Path, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    """A folder with the kernels of the others, which say something else about themselves."""
    to.chmod(0o700)
    monkeypatch.setenv("DASKGRAD_CACHE", str(to))
    for path in kernels.glob("*.pt2"):
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(to / path.name, "w") as target:
            for name in source.namelist():
                data = source.read(name)
                target.writestr(name, json.dumps({**json.loads(data), **changed}) if name == "daskgrad.json" else data)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"cpu": ["amx_of_another_cpu"]}, "for a CPU with amx_of_another_cpu, which this CPU lacks"),
        ({"isa": "AVX4096"}, "for a CPU with AVX4096"),
        ({"machine": "s390x"}, "compiled for s390x"),
        ({"torch": "1.0"}, "for torch 1.0, and this is torch"),
    ],
)
def test_a_kernel_for_another_machine_is_never_loaded(
    changed: dict[str, Any], why: str, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_compiling: None
) -> None:
    doctored(kernels, tmp_path, monkeypatch, **changed)
    monkeypatch.setattr(_binaries, "load", lambda path: pytest.fail("it was loaded"))
    with pytest.warns(dg.EngineWarning, match=why) as told:
        assert_wave(dg.derivatives(waves(1000), wave, WANTED, engine="compiled"), waves(1000))
    assert len(told) == 1


def test_a_kernel_whose_first_rows_are_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch, no_compiling: None) -> None:
    load = _binaries.load

    def wrong(path: Path) -> _binaries.Run:
        run = load(path)

        def a_little(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            questions = run(tensors)
            tensors[-1][3] *= 1 + 1e-6
            return questions

        return a_little

    monkeypatch.setattr(_binaries, "load", wrong)
    with pytest.warns(dg.EngineWarning, match="first rows differ") as told:
        assert_wave(dg.derivatives(waves(1000), wave, WANTED, engine="compiled"), waves(1000))
    assert len(told) == 1


def test_a_broken_file_is_made_anew(kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doctored(kernels, tmp_path, monkeypatch)
    for path in tmp_path.glob("*.pt2"):
        path.write_bytes(path.read_bytes()[:-100])

    def again(plan: Any, request: Any, target: Path) -> None:
        assert not target.exists()
        shutil.copy(kernels / target.name, target)

    monkeypatch.setattr(_compiled, "compile_apart", again)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_wave(dg.derivatives(waves(1000), wave, WANTED, engine="compiled"), waves(1000))


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without kernels."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("DASKGRAD_CACHE", str(tmp_path))
    return tmp_path


def test_without_a_compiler_rows_are_eager(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(dg.EngineWarning, match=r"no C\+\+ compiler \(no-such-compiler\).*install g\+\+") as told:
        assert_wave(dg.derivatives(waves(1000), wave, WANTED, engine="compiled"), waves(1000))
    assert len(told) == 1


def test_a_folder_that_others_can_write_is_not_used(empty_folder: Path, no_compiling: None) -> None:
    empty_folder.chmod(0o777)
    with pytest.warns(dg.EngineWarning, match="can be written by, another user: set DASKGRAD_CACHE"):
        assert_wave(dg.derivatives(waves(1000), wave, WANTED, engine="compiled"), waves(1000))


def inverse(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(torch.stack([x, x**2, x + 3, 1 / x]).reshape(2, 2)).sum()


def by_row(row: Any) -> Any:
    return row["x"] ** 2


def layer(x: torch.Tensor, net: torch.nn.Linear) -> torch.Tensor:
    return net(x.reshape(1)).sum()


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x**2 + 0 * torch.rand(())


def test_what_cannot_be_compiled_says_so_once_and_is_not_tried_again(compiled: list[Any], empty_folder: Path) -> None:
    frame = waves(200) + 2
    expected = dg.grad_column(frame, inverse)
    for _ in range(2):
        with pytest.warns(dg.EngineWarning, match="linalg_inv.*, which a kernel cannot"):
            pd.testing.assert_series_equal(dg.grad_column(frame, inverse, engine="compiled"), expected)
        _compiled._entries.clear()
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("fn", "options", "why"),
    [
        (by_row, {"wrt": "x"}, "whole row"),
        (noisy, {"randomness": "different"}, "random draws are eager"),
        (layer, {"wrt": "net.weight", "shared": {"net": torch.nn.Linear(1, 1).double()}}, "shared parameters"),
    ],
)
def test_calls_that_stay_eager_say_why(fn: Any, options: dict[str, Any], why: str, no_compiling: None) -> None:
    frame = waves(100)
    with pytest.warns(dg.EngineWarning, match=why):
        found = dg.grad_column(frame, fn, engine="compiled", **options)
    expected = dg.grad_column(frame, fn, **options)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)


# --- the rules --------------------------------------------------------------------------------------------------------


def test_an_error_names_its_row_and_null_sets_it_aside(compiled: list[Any], soon: None, eager_is_refused: Callable[[int], None]) -> None:
    frame = pd.DataFrame({"x": np.linspace(0.1, 1, 2000), "kind": "odd"}, index=[f"r{k}" for k in range(2000)])
    frame.loc["r1500", "x"] = 6.0
    eager_is_refused(400)
    with pytest.raises(dg.RowError, match="r1500") as told:
        dg.derivatives(frame, stepped, STEPPED, engine="compiled")
    assert isinstance(told.value.__cause__, ValueError)
    found = dg.derivatives(frame, stepped, STEPPED, engine="compiled", on_error="null")
    assert found.index[found.isna().all(axis=1)].tolist() == ["r1500"]
    kept = found.drop(index="r1500")
    for name in STEPPED:
        np.testing.assert_allclose(kept[name], np.exp(frame.drop(index="r1500")["x"]), rtol=1e-12)


def test_auto_never_compiles_and_is_the_same_bit_for_bit(no_compiling: None) -> None:
    frame = waves(50_000)
    first, again = (dg.derivatives(frame, wave, WANTED) for _ in range(2))
    pd.testing.assert_frame_equal(first, again, check_exact=True)


def test_explain_says_what_compiling_costs_and_where_it_pays(kernels: Path, no_compiling: None) -> None:
    told = str(dg.explain(waves(1000), wave, WANTED, engine="compiled"))
    assert "a compiled kernel" in told
    assert f"kept in {kernels}" in told
    assert "from about" in told or "never" in told
