"""`to_parquet` while processes die for real: by a signal, by a row that kills them, by a row that never ends."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import pandas as pd
import pytest
import torch
from programs import wait_until

import daskgrad as dg
from daskgrad import _complete

PROGRAM = """
import os, signal, sys
from pathlib import Path

import dask, dask.dataframe as dd, pandas as pd, torch
import daskgrad as dg

class Model(torch.nn.Module):  # of the main script, with a set whose order is the hash seed's
    names = {"a", "b", "c", "d", "e"}

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, dtype=torch.float64)

    def forward(self, x):
        return self.layer(x).sum()

def fn(x, model, row):
    if int(row) == int(os.environ.get("DIES", "-1")):
        os.kill(os.getpid(), signal.SIGKILL)
    return model(x[None]) ** 2 if "a" in {"a", "b", "c"} else x

def main(source, out, filesystem):
    torch.manual_seed(7)
    if source == "pandas":
        frame = dd.from_pandas(pd.DataFrame({"x": [float(n) for n in range(40)], "row": range(40)}), npartitions=8)
    else:
        groups = {"split_row_groups": True} if filesystem == "fsspec" else {}  # Arrow's has no such thing
        frame = dd.read_parquet(source, filesystem=filesystem, **groups)
    torch.manual_seed(7)
    found = frame.assign(slope=dg.grad_column(frame, fn, "x", shared={"model": Model()}, engine="loop"))
    written = dg.to_parquet(found, out, scheduler="synchronous")
    print(written.written, written.kept)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def run(folder: Path, source: Any, out: Path, filesystem: str = "fsspec", **env: str) -> subprocess.CompletedProcess[str]:
    script = folder / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, script, source, out, filesystem]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=200)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.slow
def test_case_a06_killed_in_the_middle_and_gone_on_with_in_another_process(tmp_path: Path) -> None:
    """The class is one of the main script; the hash seed is another in each process; a part is where it died."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    died = run(tmp_path, "pandas", killed, PYTHONHASHSEED="1", DIES="23")
    assert died.returncode == -signal.SIGKILL, died.stderr
    there = contents(killed)
    assert 0 < len(there) < 8
    assert all(len(pd.read_parquet(killed / name)) == 5 for name in there)
    again = run(tmp_path, "pandas", killed, PYTHONHASHSEED="2")
    assert again.stdout.split() == [str(8 - len(there)), str(len(there))], again.stderr
    assert run(tmp_path, "pandas", whole, PYTHONHASHSEED="3").stdout.split() == ["8", "0"]
    assert contents(killed) == contents(whole)


@pytest.mark.slow
@pytest.mark.parametrize("filesystem", ["fsspec", "arrow"])
def test_files_are_known_again_in_another_process(filesystem: str, tmp_path: Path) -> None:
    data = pd.DataFrame({"x": [float(n) for n in range(40)], "row": range(40)})
    data.to_parquet(tmp_path / "in.parquet", row_group_size=10)
    first = run(tmp_path, tmp_path / "in.parquet", tmp_path / "out", filesystem, PYTHONHASHSEED="1")
    parts = int(first.stdout.split()[0])
    second = run(tmp_path, tmp_path / "in.parquet", tmp_path / "out", filesystem, PYTHONHASHSEED="2")
    assert second.stdout.split() == ["0", str(parts)], second.stderr


def hard(x: Any, row: Any) -> Any:
    """Row 7 kills its process, rows 23 and 24 never end."""
    if row == 7:
        os.kill(os.getpid(), signal.SIGSEGV)
    while 23 <= row <= 24:
        pass
    return torch.sin(x)


def hard_frame() -> Any:
    data = pd.DataFrame({"x": 1.0, "row": range(40)}, index=[f"label{n:02}" for n in range(40)])
    frame = dd.from_pandas(data, npartitions=4)
    return frame.assign(slope=dg.grad_column(frame, hard, "x"))


@pytest.mark.slow
def test_a_row_that_kills_its_process_and_one_that_never_ends_are_named_and_all_else_is_written(tmp_path: Path) -> None:
    written = dg.to_parquet(hard_frame(), tmp_path / "out", timeout=4.0, on_failure="report", scheduler="synchronous")
    assert (written.written, sorted(written.failures)) == (2, [0, 2])
    kills: Any = written.failures[0]
    assert isinstance(kills, dg.RowError)
    assert (kills.label, kills.partition, kills.values["row"]) == ("label07", 0, 7)
    assert "row 'label07' of partition 0 kills its process (SIGSEGV)" in str(kills)
    never: Any = written.failures[2]
    assert isinstance(never, dg.RowError)
    assert (never.label, never.partition) == ("label23", 2)
    assert "did not end within 4 s" in str(never)
    assert sorted(pd.read_parquet(tmp_path / "out").row) == [*range(10, 20), *range(30, 40)]


def test_rows_that_are_tried_to_find_the_one_that_kills_are_no_progress(tmp_path: Path) -> None:
    frame = dd.from_pandas(pd.DataFrame({"x": 1.0, "row": range(20)}), npartitions=2)
    frame = frame.assign(slope=dg.grad_column(frame, killer, "x", engine="loop"))
    with dg.progress(file=io.StringIO()) as progress:
        written = dg.to_parquet(frame, tmp_path / "out", isolate=True, on_failure="report", scheduler="synchronous")
    assert (written.written, list(written.failures)) == (1, [0])
    line = progress.lines()["killer"]
    assert (line.parts, line.all) == (1, 2)
    assert 10 <= line.rows <= 17


@pytest.mark.slow
def test_workers_that_a_row_kills_cost_only_its_part(tmp_path: Path) -> None:
    """Each death takes along what else the worker was at: the scheduler blames both, one of them wrongly."""
    from distributed import Client, LocalCluster

    data = pd.DataFrame({"x": 1.0, "row": range(40)}, index=[f"label{n:02}" for n in range(40)])
    frame = dd.from_pandas(data, npartitions=8)
    frame = frame.assign(slope=dg.grad_column(frame, killer, "x"))
    ours = {"host": "127.0.0.1", "dashboard_address": None, "silence_logs": 60}
    with (
        LocalCluster(n_workers=2, threads_per_worker=2, processes=True, **ours) as cluster,
        Client(cluster),
        pytest.raises(dg.RowError, match=r"row 'label07' of partition 1 kills its process \(SIGKILL") as caught,
    ):
        dg.to_parquet(frame, tmp_path / "out")
    assert caught.value.label == "label07"
    assert "this is partition 1; 1 of 8 failed" in caught.value.__notes__[0]
    assert sorted(pd.read_parquet(tmp_path / "out").row) == [*range(5), *range(10, 40)]


@pytest.mark.slow
def test_a_worker_that_dies_with_answers_that_nobody_has_fetched_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed import Client, LocalCluster

    frame = dd.from_pandas(pd.DataFrame({"x": 1.0, "row": range(40)}), npartitions=8)
    frame = frame.assign(slope=dg.grad_column(frame, torch.sin, inputs={"input": "x"}))
    ours = {"host": "127.0.0.1", "dashboard_address": None, "silence_logs": 60}
    taken: list[int] = []
    with LocalCluster(n_workers=1, threads_per_worker=2, processes=True, **ours) as cluster, Client(cluster) as client:
        before = _complete.part_done

        def first_waits(run: Any, outcome: Any) -> None:
            if not taken:
                wait_until(lambda: len(client.run_on_scheduler(answers)) == 8, "all parts are answered")
                (pid,) = client.run(os.getpid).values()
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda: not client.run_on_scheduler(answers), "they are lost")
            taken.append(outcome.number)
            before(run, outcome)

        monkeypatch.setattr(_complete, "part_done", first_waits)
        assert dg.to_parquet(frame, tmp_path / "out").written == 8
    assert sorted(taken) == list(range(8))
    assert sorted(pd.read_parquet(tmp_path / "out").row) == list(range(40))


def answers(dask_scheduler: Any) -> list[str]:
    """The parts whose outcome lies on a worker."""
    return [str(key) for key, task in dask_scheduler.tasks.items() if task.state == "memory" and "to-parquet" in str(key)]


def killer(x: Any, row: Any) -> Any:
    if row == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.sin(x)
