"""dg.progress(): the numbers it shows are those of the work that was done, wherever that was, and nothing of it stays behind."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import tempfile
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import dask.bag as db
import dask.dataframe as dd
import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nbclient import NotebookClient
from programs import programs, wait_until, with_modules, without

import daskgrad as dg
from daskgrad._watch import _reporter
from daskgrad._watch._tally import Line, Tally

SCHEDULERS = ("synchronous", "threads", "processes")


def square(x: torch.Tensor) -> torch.Tensor:
    return x**2


def refuses_nine(x: torch.Tensor) -> torch.Tensor:
    if x == 9:
        raise ValueError("nine")
    return x**2


def frame(rows: int) -> pd.DataFrame:
    return pd.DataFrame({"x": np.arange(float(rows))})


@pytest.fixture(autouse=True)
def leaves_nothing(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test no thread, file, variable, callback or watcher of progress is left."""
    folder = tmp_path_factory.mktemp("temporaries")  # of this test alone: others may compute on this machine
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert _reporter.FILES not in os.environ
    assert not _reporter.watching()
    assert not list(folder.glob("daskgrad-progress-*"))
    assert not [thread for thread in threading.enumerate() if thread.name == "daskgrad-progress"]
    assert not dask.callbacks.Callback.active


def done(progress: Any, title: str = "square") -> tuple[int, int | None, int, int | None, int]:
    """Rows, of all, partitions, of all, and failures."""
    line: Line = progress.lines()[title]
    return line.rows, line.of, line.parts, line.all, line.failed


def watched() -> dg.progress:
    return dg.progress(file=io.StringIO())


# -------------------------------------------------------------------------------- the numbers


def test_pandas() -> None:
    """A frame in memory is one part, and its rows are known."""
    with watched() as progress:
        dg.grad_column(frame(1000), square)
    assert done(progress) == (1000, 1000, 1, 1, 0)


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_each_engine_counts_each_row_once(engine: str) -> None:
    """Also where rows take different paths, or some of them fail."""

    def forked(x: torch.Tensor) -> torch.Tensor:
        if x > 50:
            return x**3
        return refuses_nine(x)

    with watched() as progress:
        found = dg.grad_column(frame(100), forked, engine=engine, on_error="null")
    assert found.isna().sum() == 1
    assert done(progress, forked.__qualname__.rpartition(".")[2]) == (100, 100, 1, 1, 0)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_local_schedulers(scheduler: str) -> None:
    """Each of Dask's schedulers of this machine, also the one whose work is done in other processes."""
    lazy = dd.from_pandas(frame(1000), npartitions=7)
    with watched() as progress:
        dg.grad_column(lazy, square).compute(scheduler=scheduler)
    assert done(progress) == (1000, 1000, 7, 7, 0)


def test_cluster(client: Any) -> None:
    """A distributed cluster, told by its workers."""
    lazy = dd.from_pandas(frame(1000), npartitions=7)
    with watched() as progress:
        dg.grad_column(lazy, square).compute()
    assert done(progress) == (1000, 1000, 7, 7, 0)


def test_two_computations_add_up_and_functions_have_lines_of_their_own(client: Any) -> None:
    """What one function computes adds up; another function is another line."""

    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    lazy = dd.from_pandas(frame(100), npartitions=2)
    with watched() as progress:
        for start in range(2):  # other rows: a scheduler may still have those of the same tasks
            dg.grad_column(dd.from_pandas(frame(100) + start, npartitions=2), square).compute()
        dg.grad_column(lazy, cube).compute(scheduler="synchronous")
    assert done(progress) == (200, 200, 4, 4, 0)
    assert done(progress, "cube") == (100, 100, 2, 2, 0)


def test_only_what_is_computed_inside_counts(client: Any) -> None:
    """Work before and after the block is nobody's."""
    before, inside, after = (dg.grad_column(dd.from_pandas(frame(100) + k, npartitions=2), square) for k in range(3))
    before.compute()
    with watched() as progress:
        inside.compute()
    after.compute()
    assert done(progress)[0] == 100


def test_a_client_that_is_made_and_closed_inside() -> None:
    """A cluster need not be there when the block begins, nor when it ends."""
    with watched() as progress, dg.local_client(n_workers=1):
        dg.grad_column(dd.from_pandas(frame(100), npartitions=5), square).compute()
    assert done(progress) == (100, 100, 5, 5, 0)


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # Dask's own, on this pandas
def test_parquet_knows_its_rows_and_a_bag_does_not(tmp_path: Path) -> None:
    """Rows of all only where the source knows them without reading."""
    for number in range(4):
        frame(25).to_parquet(tmp_path / f"{number}.parquet", index=False)
    with watched() as progress:
        dg.grad_column(dd.read_parquet(str(tmp_path)), square).compute(scheduler="synchronous")
    assert done(progress)[:2] == (100, 100)
    with watched() as progress:
        dg.grad_column(db.from_sequence(range(12), npartitions=3), square).compute(scheduler="synchronous")
    assert done(progress) == (12, None, 3, 3, 0)


def test_several_states_of_a_model_are_one_pass_over_the_rows() -> None:
    """A row is done when all of its results are."""
    net = torch.nn.Linear(1, 1).double()

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x.reshape(1)).sum() ** 2

    states = dg.checkpoints(net, [net.state_dict(), net.state_dict()])
    with watched() as progress:
        dg.derivatives(frame(50), loss, {"n": dg.norm("model")}, shared={"model": states})
    assert done(progress, "loss") == (50, 50, 1, 1, 0)


def test_a_failure_is_shown_and_the_caller_gets_it() -> None:
    """An exception passes through the block; the part that failed is told, and never counted as done."""
    lazy = dd.from_pandas(frame(100), npartitions=10)
    with pytest.raises(dg.RowError, match="nine"), watched() as progress:
        dg.grad_column(lazy, refuses_nine).compute(scheduler="synchronous")
    assert done(progress, "refuses_nine")[3:] == (10, 1)
    assert done(progress, "refuses_nine")[2] <= 9


LOOKS: list[int] = []


def test_it_moves_inside_a_long_partition() -> None:
    """Rows of a single part are told while the others of it are still to come."""
    LOOKS.clear()
    with watched() as progress:

        def looks(x: torch.Tensor) -> torch.Tensor:
            progress._look()
            LOOKS.append(progress.lines()["looks"].rows)
            return x**2

        dg.grad_column(frame(40), looks, engine="loop")
    assert sorted(LOOKS) == LOOKS
    assert LOOKS[0] == 0
    assert len(set(LOOKS)) == 40


@pytest.mark.cluster
def test_case_c17_rows_grow_within_one_long_partition_also_where_the_output_is_no_terminal(client: Any) -> None:
    """A worker's records come a few times a second, and lines are written while the part runs."""

    def slow(x: torch.Tensor) -> torch.Tensor:
        import time

        time.sleep(0.02)
        return x**2

    written = io.StringIO()
    seen: set[int] = set()
    with dg.progress(file=written) as progress:
        future = client.compute(dg.grad_column(dd.from_pandas(frame(200), npartitions=1), slow, engine="loop"))
        wait_until(lambda: seen.add(progress.lines()["slow"].rows if progress.lines() else 0) or future.done(), "the part is done")
    assert len(seen - {0, 200}) >= 2
    assert done(progress, "slow") == (200, 200, 1, 1, 0)
    rows = [int(re.findall(r"([\d,]+) of 200 rows", line)[0]) for line in written.getvalue().splitlines()]
    assert rows == sorted(set(rows))
    assert len(rows) >= 2
    assert rows[-1] == 200


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("scheduler", [*SCHEDULERS, "distributed"])
def test_parts_in_processes_of_their_own_are_seen(scheduler: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Rows grow while a part is under way in a child process; at the end each counts once, and files are one computation."""

    def slow(x: torch.Tensor) -> torch.Tensor:
        import time

        time.sleep(0.02)
        return x**2

    where = request.getfixturevalue("client") if scheduler == "distributed" else scheduler
    lazy = dd.from_pandas(frame(120), npartitions=3)
    lazy = lazy.assign(slope=dg.grad_column(lazy, slow, engine="loop"))
    seen: set[int] = set()
    with watched() as progress:
        writer = threading.Thread(target=dg.to_parquet, args=(lazy, tmp_path / "out"), kwargs={"timeout": 600, "scheduler": where})
        writer.start()
        wait_until(lambda: seen.add(progress.lines()["slow"].rows if progress.lines() else 0) or not writer.is_alive(), "it is written")
        writer.join()
    assert len(seen - {0, 40, 80, 120}) >= 2
    assert done(progress, "slow") == (120, 120, 3, 3, 0)
    assert len(pd.read_parquet(tmp_path / "out")) == 120


@pytest.mark.cluster
def test_a_part_that_is_run_again_counts_once() -> None:
    """A worker that is killed in its part loses what it had told of it."""

    def slow(x: torch.Tensor) -> torch.Tensor:
        import time

        time.sleep(0.01)
        return x**2

    with watched() as progress, dg.local_client(n_workers=2) as client:
        pids = client.run(os.getpid)
        future = client.compute(dg.grad_column(dd.from_pandas(frame(400), npartitions=4), slow, engine="loop"))
        wait_until(lambda: progress.lines() and progress.lines()["slow"].rows > 20, "some rows are done")
        os.kill(next(iter(pids.values())), signal.SIGKILL)
        future.result(timeout=180)
    assert done(progress, "slow") == (400, 400, 4, 4, 0)


@pytest.mark.cluster
def test_a_scheduler_that_has_no_daskgrad(tmp_path: Path) -> None:
    """A cluster of separate programs, whose scheduler has neither daskgrad nor torch; afterwards nothing is left on it."""
    from distributed import Client

    def trace(dask_scheduler: Any) -> tuple[bool, list[str], list[str]]:
        return "daskgrad_watch" in dask_scheduler.handlers, list(dask_scheduler.plugins), list(dask_scheduler.worker_plugins)

    workers = {"one": with_modules(), "two": with_modules()}
    bare = without(tmp_path / "nothing", "daskgrad", "torch")
    with programs(tmp_path, workers, scheduler=bare) as made, Client(made.address, timeout="180s") as client:
        client.wait_for_workers(2, timeout=180)
        before = client.run_on_scheduler(trace)
        with watched() as progress:
            dg.grad_column(dd.from_pandas(frame(300), npartitions=6), square_here()).compute()
            assert client.run_on_scheduler(trace) != before
        assert done(progress, "here") == (300, 300, 6, 6, 0)
        assert client.run_on_scheduler(trace) == before


def square_here() -> Any:
    """A function that travels by value: the programs know nothing of this module."""
    namespace: dict[str, Any] = {}
    exec("def here(x):\n    return x**2", namespace)
    return namespace["here"]


@given(
    rows=st.integers(1, 40),
    parts=st.integers(1, 6),
    scheduler=st.sampled_from(["synchronous", "threads"]),
    times=st.integers(1, 3),
    kept=st.integers(0, 40),
)
def test_the_numbers_are_those_of_the_work(rows: int, parts: int, scheduler: str, times: int, kept: int) -> None:
    """Any frame in any partitions, computed any number of times, and filtered: each row that is computed counts once each time."""
    lazy = dd.from_pandas(frame(rows), npartitions=parts)
    column = dg.grad_column(lazy, square)
    with watched() as progress:
        for _ in range(times):
            column.compute(scheduler=scheduler)
        column[lazy.x < kept].compute(scheduler=scheduler)
    computed = progress.lines()["square"]
    assert times * rows + min(rows, kept) <= computed.rows <= (times + 1) * rows  # a filter may be moved below the column
    assert computed.parts == computed.all == (times + 1) * lazy.npartitions


@given(st.data())
def test_records_may_be_late_lost_and_repeated(data: st.DataObject) -> None:
    """The tally of parts is that of the last records, in whatever order, and how often, they come before it."""
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    tally = Tally()
    tally.begin("client", {"group": len(sizes)}, 1)

    def record(part: int, run: int, rows: int, state: str) -> dict[str, Any]:
        call = {"group": "group", "call": "", "title": "f", "of": sum(sizes)}
        return {**call, "unit": f"{part}|0", "run": run, "rows": rows, "size": sizes[part], "state": state}

    news = [record(part, run, data.draw(st.integers(0, size)), "running") for part, size in enumerate(sizes) for run in (1, 2)]
    for one in data.draw(st.permutations(news)):
        if data.draw(st.booleans()):
            tally.update(one)
    for part, size in enumerate(sizes):
        for _ in range(data.draw(st.integers(1, 2))):
            tally.update(record(part, 2, size, "done"))
    for one in data.draw(st.permutations(news)):
        tally.update(one)
    line = tally.lines()["f"]
    assert (line.rows, line.of, line.parts, line.all, line.failed) == (sum(sizes), sum(sizes), len(sizes), len(sizes), 0)


# -------------------------------------------------------------------------------- how it is shown


def test_plain_lines_where_the_output_is_no_terminal() -> None:
    """Whole lines, no control characters; the last has the truth."""
    written = io.StringIO()
    with dg.progress(file=written):
        dg.grad_column(dd.from_pandas(frame(1000), npartitions=7), square).compute(scheduler="threads")
    *_, last = written.getvalue().splitlines()
    assert re.fullmatch(r"square: 100% · 1,000 of 1,000 rows · [\d,]+ rows/s · 7 of 7 partitions · 00:\d\d", last)
    assert written.getvalue().isprintable() or written.getvalue().replace("\n", "").isprintable()


def test_standard_error_is_where_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output stays the caller's."""
    with dg.progress():
        dg.grad_column(frame(10), square)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("square: 100% · 10 of 10 rows")


def test_bars_in_a_terminal() -> None:
    """A real terminal device gets tqdm's bar."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 160))
    shown: list[bytes] = []

    def read() -> None:
        while b"7 of 7" not in b"".join(shown):
            shown.append(os.read(ours, 1 << 16))

    reader = threading.Thread(target=read, daemon=True)
    with open(theirs, "w", encoding="utf-8") as terminal:
        reader.start()
        with dg.progress(file=terminal):
            dg.grad_column(dd.from_pandas(frame(1000), npartitions=7), square).compute(scheduler="threads")
        terminal.flush()
        reader.join(60)
    last = [text for text in re.split(r"[\r\n]+", b"".join(shown).decode()) if "square" in text][-1]
    assert re.search(r"square 100% \|█+\| 1,000 of 1,000 rows · [\d,]+ rows/s · 7 of 7 partitions · 00:\d\d", last)


def test_nothing_is_shown_where_nothing_is_differentiated(capsys: pytest.CaptureFixture[str]) -> None:
    """Other work of Dask is not ours to show."""
    with dg.progress():
        dd.from_pandas(frame(10), npartitions=2).x.sum().compute(scheduler="synchronous")
    assert capsys.readouterr() == ("", "")


def test_blocks_within_blocks() -> None:
    """Each shows what is computed inside of it."""
    with watched() as outer:
        dg.grad_column(frame(10), square)
        with watched() as inner:
            dg.grad_column(dd.from_pandas(frame(20), npartitions=2), square).compute(scheduler="processes")
    assert done(inner)[0] == 20
    assert done(outer)[0] == 30


def test_one_display_in_a_notebook() -> None:
    """A kernel of its own: one display that is rewritten, stored with its last numbers; names from the data are text."""
    code = """
        import pandas as pd, daskgrad as dg

        def f(x):
            return x ** 2

        f.__name__ = "<b>f</b>"
        with dg.progress():
            dg.grad_column(pd.DataFrame({"x": range(1000)}, dtype=float), f)
    """
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("\n".join(line[8:] for line in code.splitlines()))])
    environment = {**os.environ, "PYTHONPATH": str(Path(dg.__file__).parents[1])}
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute(env=environment)
    (output,) = notebook.cells[0].outputs
    assert output["output_type"] == "display_data"
    shown = output["data"]["text/html"]
    assert "1,000 of 1,000 rows" in shown
    assert 'value="1.0000"' in shown
    assert "&lt;b&gt;f&lt;/b&gt;" in shown
