"""`to_parquet` and `verify`: what lies in the folder is whole, is what was asked for, and is made once."""

from __future__ import annotations

import fcntl
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import daskgrad as dg
from daskgrad import _complete, _folder, _write


@pytest.fixture(autouse=True)
def in_this_thread() -> Iterator[None]:
    with dask.config.set(scheduler="synchronous"):
        yield


def wave(x: Any, k: Any) -> Any:
    return torch.sin(x) * k


def table(rows: int = 20) -> pd.DataFrame:
    return pd.DataFrame({"x": np.arange(float(rows)), "k": 2.0, "kind": ["call", "put"] * (rows // 2)})


def slopes(data: pd.DataFrame | Any, fn: Callable[..., Any] = wave, parts: int = 5, **options: Any) -> Any:
    frame = dd.from_pandas(data, npartitions=parts) if isinstance(data, pd.DataFrame) else data
    return frame.assign(slope=dg.grad_column(frame, fn, **options))


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file with its bytes and when it was written."""
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in sorted(folder.iterdir())}


def contents(folder: Path) -> dict[str, bytes]:
    return {name: data for name, (data, _) in state(folder).items()}


def spoil(folder: Path, *names: str) -> None:
    for name in names:
        (folder / f"part-{name}.parquet").unlink()


# -------------------------------------------------------------------------------- written


@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
def test_each_partition_is_a_file_and_the_numbers_are_right(scheduler: str, tmp_path: Path) -> None:
    written = dg.to_parquet(slopes(table()), tmp_path / "out", scheduler=scheduler)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [f"part-00000{number}.parquet" for number in range(5)]
    assert (written.parts, written.written, written.kept, written.rows, dict(written.failures)) == (5, 5, 0, 20, {})
    assert written.size == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    assert "20 rows in 5 parts (5 computed now, 0 kept)" in str(written)
    found = pd.read_parquet(tmp_path / "out")
    pd.testing.assert_frame_equal(found[["x", "k"]], table()[["x", "k"]])
    assert found.kind.tolist() == table().kind.tolist()
    assert found.slope.tolist() == pytest.approx([2 * math.cos(x) for x in range(20)])


def test_on_a_cluster(client: Any, tmp_path: Path) -> None:
    frame = slopes(table())
    with dask.config.set(scheduler=None):
        assert dg.to_parquet(frame, tmp_path / "out").written == 5
        assert dg.to_parquet(frame, tmp_path / "out").kept == 5
        spoil(tmp_path / "out", "000003")
        assert dg.to_parquet(frame, tmp_path / "out").written == 1
    assert pd.read_parquet(tmp_path / "out").slope.tolist() == pytest.approx([2 * math.cos(x) for x in range(20)])


def test_a_series_and_a_frame_without_derivatives(tmp_path: Path) -> None:
    frame = dd.from_pandas(table(), npartitions=2)
    dg.to_parquet(dg.grad_column(frame, wave), tmp_path / "series")
    assert pd.read_parquet(tmp_path / "series").columns.tolist() == ["x"]
    dg.to_parquet(frame, tmp_path / "plain", write_index=False)
    assert pq.read_table(tmp_path / "plain").column_names == ["x", "k", "kind"]


@pytest.mark.parametrize("few", [True, False])
def test_parts_are_partitions_as_dask_reads_them(few: bool, tmp_path: Path) -> None:
    """Dask reads several small files as one where few of their columns are wanted: numbers are those of what runs."""
    (tmp_path / "in").mkdir()
    for number in range(12):
        table(10).assign(x=float(number)).to_parquet(tmp_path / f"in/{number:02}.parquet")
    frame = dd.read_parquet(tmp_path / "in")
    column = (
        dg.grad_column(frame, lambda x: x**2)
        if few
        else slopes(frame, lambda x: x**2).slope.to_frame("x").assign(kind=frame.kind, k=frame.k)
    )
    parts = dg.to_parquet(column, tmp_path / "out").written
    assert (parts == 12) if not few else (1 < parts < 12)
    found = [pd.read_parquet(file).x.tolist() for file in sorted((tmp_path / "out").iterdir())]
    assert len(found) == parts
    assert [x for part in found for x in part] == [2.0 * number for number in range(12) for _ in range(10)]


# -------------------------------------------------------------------------------- once


def test_only_what_is_missing_is_made_and_the_result_is_the_same_to_the_bit(tmp_path: Path) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    dg.to_parquet(slopes(table()), whole)
    dg.to_parquet(slopes(table()), again)
    spoil(again, "000001", "000004")
    before = state(again)
    written = dg.to_parquet(slopes(table()), again)
    assert (written.written, written.kept, written.rows) == (2, 3, 20)
    assert {name: seen for name, seen in state(again).items() if name in before} == before
    assert contents(again) == contents(whole)


def test_nothing_is_made_where_nothing_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dg.to_parquet(slopes(table()), tmp_path / "out")
    monkeypatch.setattr(_complete, "_make", lambda *_: pytest.fail("made"))
    assert dg.to_parquet(slopes(table()), tmp_path / "out").kept == 5


def test_resume_false_makes_all_again(tmp_path: Path) -> None:
    dg.to_parquet(slopes(table()), tmp_path / "out")
    before = state(tmp_path / "out")
    assert dg.to_parquet(slopes(table()), tmp_path / "out", resume=False).written == 5
    after = state(tmp_path / "out")
    assert all(before[name] != after[name] and before[name][0] == after[name][0] for name in before)


def loss(model: Any, x: Any) -> Any:
    return model(x[None].to(torch.float32)).sum() ** 2


def scored(seed: int) -> Any:
    torch.manual_seed(seed)
    frame = dd.from_pandas(table(), npartitions=5)
    return frame.assign(slope=dg.grad_column(frame, loss, wrt="x", shared={"model": torch.nn.Linear(1, 1)}))


OTHERS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "function": (lambda: slopes(table()), lambda: slopes(table(), lambda x, k: torch.cos(x) * k), "lambda"),
    "constant": (
        lambda: slopes(table(), lambda x, k: x * k),
        lambda: slopes(table(), lambda x, k: x * k * 2),
        "the code, a shared argument, an option or a step",
    ),
    "parameters": (lambda: scored(1), lambda: scored(2), "a shared argument"),
    "argument": (lambda: slopes(table()), lambda: slopes(table(), wrt="k"), "'k'"),
    "option": (lambda: slopes(table()), lambda: slopes(table(), dtype="float32"), "an option"),
    "engine": (lambda: slopes(table()), lambda: slopes(table(), engine="loop"), "an option"),
    "step above": (lambda: slopes(table()), lambda: slopes(table()).assign(slope=1.0), "no derivative"),
    "step below": (
        lambda: slopes(table()),
        lambda: slopes(dd.from_pandas(table(), npartitions=5).assign(k=3.0)),
        "a step around them",
    ),
    "columns": (lambda: slopes(table()), lambda: slopes(table())[["slope"]], "a step around them"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_result_is_refused_and_nothing_touched(kind: str, tmp_path: Path) -> None:
    one, two, says = OTHERS[kind]
    dg.to_parquet(one(), tmp_path / "out")
    spoil(tmp_path / "out", "000001")
    before = state(tmp_path / "out")
    with pytest.raises(dg.PlanError, match=r"4 of 4 parts in .* are another result: .*on_change=.recompute.") as caught:
        dg.to_parquet(two(), tmp_path / "out")
    assert says in str(caught.value)
    assert state(tmp_path / "out") == before
    assert dg.to_parquet(one(), tmp_path / "out").kept == 4
    assert dg.to_parquet(two(), tmp_path / "out", on_change="recompute").written == 5
    dg.to_parquet(two(), tmp_path / "anew")
    assert contents(tmp_path / "out") == contents(tmp_path / "anew")


def test_another_environment_is_refused_or_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dg.to_parquet(slopes(table()), tmp_path / "out")
    from daskgrad import _task

    plain = _task.environment
    monkeypatch.setattr(_task, "environment", lambda torch: {**plain(torch), "cpu": "another"})
    with pytest.raises(dg.PlanError, match=r"made in another environment .*another now"):
        dg.to_parquet(slopes(table()), tmp_path / "out")
    assert dg.to_parquet(slopes(table()), tmp_path / "out", environment="any").kept == 5
    assert dg.to_parquet(slopes(table()), tmp_path / "out", on_change="recompute").written == 5


def test_what_cannot_be_known_again_is_never_kept(tmp_path: Path) -> None:
    class Hidden:
        def __dask_tokenize__(self) -> str:
            return "hidden"

        def __reduce__(self) -> Any:
            raise TypeError("not for others")

    def frame() -> Any:
        column = slopes(table())
        return column.map_partitions(lambda part, _: part, Hidden(), meta=column._meta)

    dg.to_parquet(frame(), tmp_path / "out", scheduler="threads")
    with pytest.raises(dg.PlanError, match=r"cannot be known again, since it holds a .*Hidden \(not for others\)"):
        dg.to_parquet(frame(), tmp_path / "out", scheduler="threads")
    assert dg.to_parquet(frame(), tmp_path / "out", scheduler="threads", on_change="recompute").written == 5


# -------------------------------------------------------------------------------- from other inputs


def files(folder: Path, **changed: float) -> Path:
    folder.mkdir(exist_ok=True)
    for number in range(4):
        part = table(10).assign(x=float(number), k=changed.get(f"k{number}", 2.0))
        path = folder / f"{number}.parquet"
        if not path.exists() or f"k{number}" in changed:
            part.to_parquet(path)
    return folder


def test_parts_whose_file_has_changed_are_made_again(tmp_path: Path) -> None:
    def write(**options: Any) -> Any:
        return dg.to_parquet(slopes(dd.read_parquet(tmp_path / "in")), tmp_path / "out", **options)

    files(tmp_path / "in")
    assert write().written == 4
    before = state(tmp_path / "out")
    files(tmp_path / "in", k2=5.0)
    assert (write().written, write().kept) == (1, 4)
    after = state(tmp_path / "out")
    assert [name for name in before if before[name] != after[name]] == ["part-000002.parquet"]
    assert pd.read_parquet(tmp_path / "out/part-000002.parquet").slope.tolist() == pytest.approx([5 * math.cos(2)] * 10)
    os.utime(tmp_path / "in/1.parquet")
    assert write().written == 1
    assert write(inputs="content", on_change="recompute").written == 4
    os.utime(tmp_path / "in/1.parquet")
    assert write(inputs="content").written == 0
    files(tmp_path / "in", k1=7.0)
    assert write(inputs="content").written == 1


def test_what_arrow_reads_is_known_by_its_files_too(tmp_path: Path) -> None:
    def write() -> Any:
        return dg.to_parquet(slopes(dd.read_parquet(tmp_path / "in", filesystem="arrow")), tmp_path / "out")

    files(tmp_path / "in")
    parts = write().written
    assert write().kept == parts
    files(tmp_path / "in", k2=5.0)
    assert 1 <= write().written < parts
    found = pd.read_parquet(tmp_path / "out").groupby("x").slope.agg(["min", "max"])
    assert found["min"].tolist() == found["max"].tolist() == pytest.approx([2.0, 2 * math.cos(1), 5 * math.cos(2), 2 * math.cos(3)])


def test_parts_whose_rows_have_changed_are_made_again(tmp_path: Path) -> None:
    dg.to_parquet(slopes(table()), tmp_path / "out")
    other = table()
    other.loc[6, "x"] = -1.0
    written = dg.to_parquet(slopes(other), tmp_path / "out")
    assert (written.written, written.kept) == (1, 4)
    assert pd.read_parquet(tmp_path / "out").slope.tolist() == pytest.approx([2 * math.cos(x) for x in other.x])


def test_parts_of_partitions_that_are_no_more_go(tmp_path: Path) -> None:
    dg.to_parquet(slopes(table(20), parts=5), tmp_path / "out")
    written = dg.to_parquet(slopes(table(12), parts=3), tmp_path / "out")
    assert (written.parts, written.kept) == (3, 3)
    assert len(list((tmp_path / "out").iterdir())) == 3


@pytest.mark.parametrize("source", ["delayed", "csv", "map"])
def test_inputs_that_only_their_content_tells(source: str, tmp_path: Path) -> None:
    value = tmp_path / "value"
    value.write_text("2")

    def made(number: int) -> pd.DataFrame:
        return table(10).assign(x=float(number * int(value.read_text())))

    def frame() -> Any:
        if source == "csv":
            for number in range(3):
                made(number).to_csv(tmp_path / f"{number}.csv", index=False)
            return slopes(dd.read_csv(f"{tmp_path}/*.csv"))
        meta = table(10).iloc[:0]
        if source == "map":
            return slopes(dd.from_map(made, [0, 1, 2], meta=meta))
        return slopes(dd.from_delayed([dask.delayed(made)(number) for number in range(3)], meta=meta))

    assert dg.to_parquet(frame(), tmp_path / "out").written == 3
    assert dg.to_parquet(frame(), tmp_path / "out").kept == 3
    value.write_text("3")  # the first partition stays as it is, all zeros
    assert dg.to_parquet(frame(), tmp_path / "out").written == 2
    assert pd.read_parquet(tmp_path / "out").x.unique().tolist() == [0.0, 3.0, 6.0]


def test_a_shuffle_depends_on_all_of_its_inputs(tmp_path: Path) -> None:
    def frame(data: pd.DataFrame) -> Any:
        return slopes(dd.from_pandas(data, npartitions=3).shuffle("kind", npartitions=2, shuffle_method="tasks"))

    dg.to_parquet(frame(table()), tmp_path / "out")
    assert dg.to_parquet(frame(table()), tmp_path / "out").kept == 2
    assert dg.to_parquet(frame(table().assign(x=[*range(19), 7.0])), tmp_path / "out").written == 2


# -------------------------------------------------------------------------------- nothing half done


def test_a_part_that_is_not_whole_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, seen = pq.write_table, []

    def half(made: pa.Table, file: Any, **options: Any) -> None:
        assert len(list((tmp_path / "out").iterdir())) == len(seen)
        seen.append(made)
        plain(made.slice(0, 1) if len(seen) == 5 else made, file, **options)  # the last reads back, with a row in place of four

    monkeypatch.setattr(pq, "write_table", half)
    with pytest.raises(OSError, match="does not read back as it was written"):
        dg.to_parquet(slopes(table()), tmp_path / "out")
    monkeypatch.undo()
    assert len(pd.read_parquet(tmp_path / "out")) == 16
    assert not list(tmp_path.glob("**/*.tmp"))
    assert dg.to_parquet(slopes(table()), tmp_path / "out", scheduler="synchronous").written == 1


def test_nothing_but_parts_lies_in_the_folder_and_what_was_left_goes(tmp_path: Path) -> None:
    dg.to_parquet(slopes(table()), tmp_path / "out")
    spoil(tmp_path / "out", "000002")
    left = tmp_path / "out.daskgrad/part-000002.parquet.0123.tmp"
    left.write_bytes(b"PAR1 half of it")
    dg.to_parquet(slopes(table()), tmp_path / "out")
    assert not left.exists()
    assert sorted(file.name for file in (tmp_path / "out.daskgrad").iterdir()) == ["recipe"]
    for read in (pd.read_parquet, lambda path: dd.read_parquet(path, filesystem="arrow").compute(), pq.read_table):
        assert len(read(tmp_path / "out")) == 20


@pytest.mark.parametrize("name", ["letter.txt", "part-000000.parquet", "_metadata"])
def test_files_of_others_are_left_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    if name.endswith("parquet"):
        table().to_parquet(tmp_path / "out" / name)
    else:
        (tmp_path / "out" / name).write_text("mine")
    before = state(tmp_path / "out")
    for options in ({}, {"on_change": "recompute"}, {"resume": False}):
        with pytest.raises(dg.PlanError, match=r"holds 1 file\(s\) that daskgrad has not written"):
            dg.to_parquet(slopes(table()), tmp_path / "out", **options)
    assert state(tmp_path / "out") == before


def test_the_folder_that_is_read_is_not_written(tmp_path: Path) -> None:
    dg.to_parquet(slopes(table()), tmp_path / "out")
    before = state(tmp_path / "out")
    frame = slopes(dd.read_parquet(tmp_path / "out"), lambda slope: slope**2)
    for options in ({}, {"on_change": "recompute"}, {"resume": False}, {"inputs": "content", "resume": False}):
        with pytest.raises(dg.PlanError, match="holds an input"):
            dg.to_parquet(frame, tmp_path / "out", **options)
    assert state(tmp_path / "out") == before


def test_a_second_writer_is_told(tmp_path: Path) -> None:
    folder = _folder.Folder(tmp_path / "out")
    folder.make()
    with folder.locked(), pytest.raises(dg.StoreError, match=rf"is being written by process {os.getpid()} on .*, since"):
        dg.to_parquet(slopes(table()), tmp_path / "out")
    assert dg.to_parquet(slopes(table()), tmp_path / "out").written == 5


def test_a_second_writer_is_told_also_where_files_have_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(_folder.errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = _folder.Folder(tmp_path / "out")
    folder.make()
    with folder.locked(), pytest.raises(dg.StoreError, match="is being written by process"):
        dg.to_parquet(slopes(table()), tmp_path / "out")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    owner = folder.aside / "lock.owner"
    owner.write_text(_folder._owner().replace(f'"process": {os.getpid()}', f'"process": {ended.pid}'))
    assert dg.to_parquet(slopes(table()), tmp_path / "out").written == 5
    assert not owner.exists()


def test_tasks_of_a_job_that_was_replaced_leave_the_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _write.table

    def taken_over(*args: Any) -> Any:
        (tmp_path / "out.daskgrad/job").write_text("another")
        return plain(*args)

    monkeypatch.setattr(_write, "table", taken_over)
    with pytest.raises(dg.StoreError, match="another job has begun"):
        dg.to_parquet(slopes(table()), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"a small disk cannot be made here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_said_and_what_was_written_stays(small_disk: Path) -> None:
    random = np.random.default_rng(1)
    data = pd.DataFrame({"x": random.normal(size=60_000), "k": 2.0})
    with pytest.raises(dg.StoreError, match=r"takes no more: .* MB free\)\. \d+ of 6 parts lie whole") as caught:
        dg.to_parquet(slopes(data, parts=6), small_disk / "out", scheduler="threads")
    assert isinstance(caught.value, OSError)
    there = pd.read_parquet(small_disk / "out")
    assert f"{len(there) // 10_000} of 6 parts" in str(caught.value)
    assert 10_000 <= len(there) < 60_000
    pd.testing.assert_series_equal(there.slope, 2 * np.cos(data.x[there.index]), check_names=False)
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    assert dg.to_parquet(slopes(data, parts=6), small_disk / "out").kept == len(there) // 10_000
    assert len(pd.read_parquet(small_disk / "out")) == 60_000


under_way = threading.Event()


def one_fails_while_one_runs(part: pd.DataFrame) -> pd.DataFrame:
    if part.index[0] == 0:
        assert under_way.wait(60)
        raise ValueError("the first")
    under_way.set()
    time.sleep(0.5)
    return part


def cut_short(data: bytes) -> bytes:
    return data[: len(data) // 2]


def begun_otherwise(data: bytes) -> bytes:
    return b"x" * 7 + data[7:]


def emptied(data: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [cut_short, begun_otherwise, emptied])
def test_a_damaged_part_is_made_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    dg.to_parquet(slopes(table()), tmp_path / "out")
    before = contents(tmp_path / "out")
    file = tmp_path / "out/part-000002.parquet"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(dg.StoreError, match=r"1 of 5 parts in .* cannot be read: 'part-000002.parquet'. to_parquet makes them"):
        dg.verify(tmp_path / "out")
    again = dg.to_parquet(slopes(table()), tmp_path / "out")
    assert (again.written, again.kept) == (1, 4)
    assert contents(tmp_path / "out") == before


def test_verify_names_a_part_whose_data_is_damaged(tmp_path: Path) -> None:
    dg.to_parquet(slopes(table()), tmp_path / "out")
    file = tmp_path / "out/part-000002.parquet"
    data = bytearray(file.read_bytes())
    data[4:60] = b"x" * 56
    file.write_bytes(data)
    with pytest.raises(dg.StoreError, match=r"part 2 of .* is not what is made from its inputs now: it cannot be read"):
        dg.verify(tmp_path / "out", rows=None)


def test_an_unreadable_file_in_another_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/part-000000.parquet").write_text("not ours")
    with pytest.raises(dg.PlanError, match="that daskgrad has not written"):
        dg.to_parquet(slopes(table()), tmp_path / "out")
    assert (tmp_path / "out/part-000000.parquet").read_text() == "not ours"


def test_no_part_is_under_way_once_it_has_raised(tmp_path: Path) -> None:
    frame = dd.from_pandas(table(), npartitions=2).map_partitions(one_fails_while_one_runs, meta=table()[:0])
    with dask.config.set(num_workers=2), pytest.raises(ValueError, match="the first"):
        dg.to_parquet(frame, tmp_path / "out", on_failure="stop", scheduler="threads")
    assert len(list((tmp_path / "out").iterdir())) == 1
    assert not list((tmp_path / "out.daskgrad").glob("*.running"))


# -------------------------------------------------------------------------------- rows that fail


def picky(x: Any, k: Any) -> Any:
    if x > 8:
        raise ValueError("not this one")
    return x * k


def with_labels() -> pd.DataFrame:
    labels = [f"row{number}" for number in range(1000)]
    return pd.DataFrame({"x": 1.0, "k": 2.0}, index=labels).sort_index().assign(x=lambda data: np.where(data.index == "row321", 9.0, 1.0))


@pytest.mark.parametrize("on_failure", ["finish", "stop", "report"])
def test_case_c15_one_bad_row(on_failure: str, tmp_path: Path) -> None:
    data = with_labels()
    at = data.index.get_loc("row321") // 100
    frame = slopes(data, picky, parts=10)
    if on_failure == "report":
        written = dg.to_parquet(frame, tmp_path / "out", on_failure=on_failure)
        assert (written.written, list(written.failures)) == (9, [at])
        assert "1 failed" in str(written)
        error: Any = written.failures[at]
    else:
        with pytest.raises(dg.RowError) as caught:
            dg.to_parquet(frame, tmp_path / "out", on_failure=on_failure)
        error = caught.value
        assert f"this is partition {at}; 1 of 10 failed" in error.__notes__[0]
    assert (error.label, error.partition) == ("row321", at)
    assert isinstance(error.__cause__, ValueError)
    assert len(list((tmp_path / "out").iterdir())) in (range(9) if on_failure == "stop" else [9])
    written = dg.to_parquet(slopes(data, picky, parts=10, on_error="null"), tmp_path / "out", on_change="recompute")
    found = pd.read_parquet(tmp_path / "out").slope
    assert found.isna().sum() == 1
    assert found.drop("row321").tolist() == [2.0] * 999


# -------------------------------------------------------------------------------- columns


def arrays(rows: int = 6) -> pd.DataFrame:
    random = np.random.default_rng(3)
    cells = {
        "v": [random.normal(size=3) for _ in range(rows)],
        "f": [random.normal(size=2).astype("float32") for _ in range(rows)],
        "m": [random.normal(size=(2, 3)) for _ in range(rows)],
    }
    return pd.DataFrame(cells)


def test_case_c03_array_columns_come_back_from_every_reader(tmp_path: Path) -> None:
    data = arrays().assign(row=range(6))
    data.loc[4, "v"] = None
    with dask.config.set({"dataframe.convert-string": False}):
        frame = dd.from_pandas(data, npartitions=3)
        found = dg.derivatives(frame, lambda v, f, m: (v**2).sum() + (f**3).sum() + (m**2).sum(), {"dv": "v", "df": "f", "dm": "m"})
        dg.to_parquet(found.assign(row=frame.row), tmp_path / "out")
    schema = pq.read_table(tmp_path / "out").schema
    assert schema.field("dv").type == pa.list_(pa.float64())
    assert schema.field("df").type == pa.list_(pa.float32())
    assert schema.field("dm").type == pa.list_(pa.list_(pa.float64()))
    right = {"dv": [2 * v if v is not None else None for v in data.v], "dm": [2 * m for m in data.m]}
    right["df"] = [3 * f**2 for f in data.f]
    readers: dict[str, Callable[[Path], Any]] = {
        "pandas": pd.read_parquet,
        "dask": lambda path: dd.read_parquet(path).compute(),
        "dask by arrow": lambda path: dd.read_parquet(path, filesystem="arrow").compute(),
        "pyarrow": lambda path: pq.read_table(path).to_pydict(),
        "polars": lambda path: polars.read_parquet(path / "*.parquet").to_dict(as_series=False),
    }
    for name, read in readers.items():
        back = read(tmp_path / "out")
        place = list(back["row"]).index  # Arrow's own order of files is not that of their names
        for column, cells in right.items():
            for row, cell in enumerate(cells):
                got = list(back[column])[place(row)]
                if row == 4:  # a missing value in any column that is read
                    assert got is None, name
                else:
                    np.testing.assert_allclose(
                        np.array([list(part) if np.ndim(part) else part for part in got]), cell, rtol=1e-6, err_msg=name
                    )


def test_case_c02_arrays_that_became_text_are_not_written_as_text(tmp_path: Path) -> None:
    frame = dd.from_pandas(arrays(), npartitions=2)
    with pytest.raises(dg.PlanError, match=r"'v' held arrays.*dataframe.convert-string"):
        dg.to_parquet(frame, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_column_whose_first_cells_are_missing_gets_the_type_of_the_others(tmp_path: Path) -> None:
    data = arrays(12)
    data.loc[:7, "v"] = None
    with dask.config.set({"dataframe.convert-string": False}):
        frame = dd.from_pandas(data[["v"]], npartitions=6)
        written = dg.to_parquet(frame.assign(none=None), tmp_path / "out")
    assert written.rows == 12
    kinds = {str(pq.read_schema(file).remove_metadata()) for file in (tmp_path / "out").iterdir()}
    assert len(kinds) == 1
    back = pq.read_table(tmp_path / "out")
    assert back.schema.field("v").type == pa.list_(pa.float64())
    assert back["v"].null_count == 8
    assert dg.to_parquet(frame.assign(none=None), tmp_path / "out").kept == 6


CELLS: dict[str, Any] = {
    "float32": np.array([1.5, np.nan, 3.0, -0.0], dtype="float32"),
    "int64": [1, 2, 3, 4],
    "Int64": pd.array([1, None, 3, 4], dtype="Int64"),
    "Float64": pd.array([1.5, None, 3.5, 4.5], dtype="Float64"),
    "bool": [True, False, True, True],
    "boolean": pd.array([True, None, True, True], dtype="boolean"),
    "text": pd.array(["a", None, "ü", ""], dtype="string"),
    "category": pd.Categorical(["a", None, "b", "a"], ["b", "a", "never"]),
    "date": pd.to_datetime(["2020-01-01", None, "2021-01-01", "2022-01-01"]),
    "zone": pd.to_datetime(["2020-01-01", None, "2021-01-01", "2022-01-01"]).tz_localize("Europe/Berlin"),
    "span": pd.to_timedelta([1, None, 3, 4], unit="s"),
    "arrow": pd.array([1.5, None, 2.5, 3.5], dtype=pd.ArrowDtype(pa.float64())),
    "arrow list": pd.array([[1.5], None, [], [3.5, 4.5]], dtype=pd.ArrowDtype(pa.list_(pa.float64()))),
    "arrow date": pd.array([None] * 4, dtype=pd.ArrowDtype(pa.date32())),
    "decimal": pd.array([1, None, 3, 4], dtype=pd.ArrowDtype(pa.decimal128(6, 2))),
}


@pytest.mark.parametrize("kind", CELLS)
def test_every_type_comes_back_as_from_pandas_own_writer(kind: str, tmp_path: Path) -> None:
    data = pd.DataFrame({"c": CELLS[kind]}, index=pd.Index([3, 1, 4, 1], name="day"))
    frame = dd.from_pandas(data, npartitions=2, sort=False)
    dg.to_parquet(frame, tmp_path / "out")
    frame.compute().to_parquet(tmp_path / "one.parquet")
    if kind == "arrow list":  # pandas does not read back what it wrote
        assert pq.read_table(tmp_path / "out")["c"].to_pylist() == pq.read_table(tmp_path / "one.parquet")["c"].to_pylist()
    else:
        pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "out"), pd.read_parquet(tmp_path / "one.parquet"))


def test_empty_partitions_are_files_of_the_same_kind(tmp_path: Path) -> None:
    frame = slopes(table(), parts=4)
    frame = frame[frame.x > 100]
    assert dg.to_parquet(frame, tmp_path / "out").rows == 0
    back = pd.read_parquet(tmp_path / "out")
    assert back.dtypes.to_dict() == {"x": "float64", "k": "float64", "kind": back.kind.dtype, "slope": "float64"}


REFUSED: dict[str, tuple[Callable[[], pd.DataFrame], str]] = {
    "complex": (lambda: pd.DataFrame({"z": np.ones(4, "c16")}), "'z' is complex.* real and imaginary"),
    "number as a name": (lambda: pd.DataFrame({0: [1.0]}), "0 is a int: rename it"),
    "index": (lambda: pd.DataFrame({"day": [1.0]}, index=pd.Index([1], name="day")), "are named 'day'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_parquet_cannot_hold_is_refused_before_work(kind: str, tmp_path: Path) -> None:
    make, says = REFUSED[kind]
    with pytest.raises(dg.PlanError, match=says):
        dg.to_parquet(dd.from_pandas(make(), npartitions=1), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_cells_of_several_types_are_said_and_a_schema_helps(tmp_path: Path) -> None:
    with dask.config.set({"dataframe.convert-string": False}):
        frame = dd.from_pandas(pd.DataFrame({"c": [1, 2, 3, "x"]}, dtype=object), npartitions=2)
        with pytest.raises(dg.PlanError, match=r"(?s)the cells of the column 'c'"):
            dg.to_parquet(frame, tmp_path / "out")
        frame = dd.from_pandas(pd.DataFrame({"c": [1, 2, 3, 4.5]}, dtype=object), npartitions=2)
        dg.to_parquet(frame, tmp_path / "other", schema={"c": pa.float64()})
    assert pd.read_parquet(tmp_path / "other").c.tolist() == [1.0, 2.0, 3.0, 4.5]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"on_change": "mix"}, r"on_change='mix' is not possible. Possible: 'refuse', 'recompute'"),
        ({"timeout": 0}, "seconds above 0"),
        ({"path": "s3://bucket/out"}, "writes to folders"),
        ({"data": table()}, "A pandas frame has its own to_parquet"),
        ({"schema": {"nope": pa.float64()}}, "'nope', which is no column"),
    ],
)
def test_calls_that_make_no_sense(arguments: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(dg.PlanError, match=says):
        dg.to_parquet(**{"data": slopes(table()), "path": tmp_path / "out", **arguments})


# -------------------------------------------------------------------------------- verify


def tampered(file: Path, column: str, row: int, value: float) -> None:
    """The file with one number changed, and its footer kept."""
    made = pq.read_table(file)
    cells = made[column].to_pylist()
    cells[row] = value
    pq.write_table(made.set_column(made.schema.get_field_index(column), column, pa.array(cells)), file)


def test_verify_compares_as_many_rows_as_asked(tmp_path: Path) -> None:
    dg.to_parquet(slopes(table()), tmp_path / "out")
    before = state(tmp_path / "out")
    verified = dg.verify(tmp_path / "out", rows=5)
    assert (verified.rows, len(verified.checked), verified.parts) == (8, 2, 5)
    assert "8 rows in 2 of 5 parts computed again, all alike" in str(verified)
    assert dg.verify(tmp_path / "out", rows=5, seed=4).checked != verified.checked
    assert dg.verify(tmp_path / "out", rows=None).checked == (0, 1, 2, 3, 4)
    assert state(tmp_path / "out") == before


def test_verify_needs_no_scheduler(tmp_path: Path) -> None:
    dg.to_parquet(slopes(table()), tmp_path / "out")
    with dask.config.set(scheduler=None):
        assert dg.verify(tmp_path / "out", rows=None).checked == (0, 1, 2, 3, 4)


def test_verify_finds_one_wrong_number(tmp_path: Path) -> None:
    dg.to_parquet(slopes(table()), tmp_path / "out")
    right = pd.read_parquet(tmp_path / "out").slope[13]
    tampered(tmp_path / "out/part-000003.parquet", "slope", 1, right * (1 + 1e-13))
    with pytest.raises(dg.StoreError, match=r"part 3 of .*column 'slope' differs in 1 of 4 rows: row 1 holds .*1 of 5 parts") as caught:
        dg.verify(tmp_path / "out", rows=None)
    assert caught.value.partition == 3
    assert dg.verify(tmp_path / "out", rows=None, tolerance=1e-12).rows == 20
    tampered(tmp_path / "out/part-000003.parquet", "slope", 1, math.nan)
    with pytest.raises(dg.StoreError, match="row 1 holds nan"):
        dg.verify(tmp_path / "out", rows=None, tolerance=1e-12)


def test_verify_says_what_is_missing_or_has_changed(tmp_path: Path) -> None:
    def frame() -> Any:
        return slopes(dd.read_parquet(files(tmp_path / "in")))

    with pytest.raises(dg.PlanError, match="recipe is not there"):
        dg.verify(tmp_path / "out")
    dg.to_parquet(frame(), tmp_path / "out")
    spoil(tmp_path / "out", "000002")
    with pytest.raises(dg.StoreError, match=r"1 of 4 parts are not in .*: 2\."):
        dg.verify(tmp_path / "out")
    dg.to_parquet(frame(), tmp_path / "out")
    assert dg.verify(tmp_path / "out", rows=None).rows == 40
    files(tmp_path / "in", k1=9.0)
    with pytest.raises(dg.StoreError, match=r"inputs of 1 of 4 parts .*part-000001.parquet"):
        dg.verify(tmp_path / "out")


def test_verify_takes_the_data_where_it_was_too_much_to_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_complete, "_RECORD", 100)
    dg.to_parquet(slopes(table()), tmp_path / "out", write_index=False)
    with pytest.raises(dg.PlanError, match=r"too much data to keep it a second time: give verify"):
        dg.verify(tmp_path / "out")
    assert dg.verify(tmp_path / "out", data=slopes(table())).rows == 20
    with pytest.raises(dg.PlanError, match=r"5 of 5 parts .* are another result"):
        dg.verify(tmp_path / "out", data=slopes(table(), wrt="k"))


def test_whether_anybody_watches_is_no_part_of_what_is_made(tmp_path: Path) -> None:
    """A run under `progress` is continued by one without, and the other way round; rows of to_parquet are seen."""
    import io

    def made() -> Any:
        frame = dd.from_pandas(pd.DataFrame({"x": [1.0, 2.0, 3.0, 4.0]}), npartitions=2)
        return frame.assign(slope=dg.grad_column(frame, lambda x: x**2))

    with dg.progress(file=io.StringIO()) as progress:
        first = dg.to_parquet(made(), tmp_path / "out", scheduler="synchronous")
    assert (first.written, progress.lines()["lambda"].rows) == (2, 4)
    assert dg.to_parquet(made(), tmp_path / "out", scheduler="synchronous").kept == 2
    (tmp_path / "out" / sorted(file.name for file in (tmp_path / "out").iterdir())[0]).unlink()
    with dg.progress(file=io.StringIO()):
        again = dg.to_parquet(made(), tmp_path / "out", scheduler="synchronous")
    assert (again.written, again.kept) == (1, 1)
