"""The Dask carriers, with a plan that is easy to see through: labels, cost, keys, threads, errors, bare places."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import standin
import torch
from dask.delayed import delayed
from standin import SEEN, Breaker, Doubler

from daskgrad import _dask, _ship
from daskgrad._errors import EngineWarning, GraphError, PlanError, RowError

FORMS = pytest.mark.parametrize("as_expression", [True, False], ids=["expression", "mapped"])
SERIES = Doubler({"x": ("x", 2.0)}, columns=["x"])
LONG = os.environ.get("DASKGRAD_TESTS") == "long"
FRAME = Doubler({"a": ("x", 2.0), "b": ("y", 3.0), "c": ("x", 5.0)}, single=False, columns=["x", "y"])


def table(rows: int = 100) -> pd.DataFrame:
    numbers = np.random.default_rng(0)
    columns = {"x": numbers.normal(size=rows), "y": numbers.normal(size=rows), "z": numbers.integers(0, 10, rows)}
    text = pd.array(["u", "v"] * (rows // 2), dtype="string[pyarrow]")  # as Dask would make it
    return pd.DataFrame({**columns, "s": text}, index=pd.Index(np.arange(rows), name="i"))


def column(data: Any, plan: Any = SERIES, **options: Any) -> Any:
    return _dask.frame(data, plan, **options)


def here(collection: Any) -> Any:
    return collection.compute(scheduler="synchronous")


def rows_run(compute: Any) -> int:
    SEEN.clear()
    with dask.config.set(scheduler="synchronous"):
        compute()
    return sum(SEEN)


def same(collection: Any, expected: pd.DataFrame | pd.Series) -> None:
    """Value, order, labels and dtypes; and that what was declared is what came."""
    result = here(collection)
    compare: Any = pd.testing.assert_series_equal if isinstance(expected, pd.Series) else pd.testing.assert_frame_equal
    compare(result, expected)
    compare(result.iloc[:0], collection._meta, check_index_type=False)
    assert result.index.names == collection._meta.index.names


# -------------------------------------------------------------------------------- the answer and its labels


@FORMS
@pytest.mark.parametrize("scheduler", ["synchronous", "threads", pytest.param("processes", marks=pytest.mark.cluster)])
def test_every_scheduler_gives_the_same(as_expression: bool, scheduler: str) -> None:
    df = table()
    result = column(dd.from_pandas(df, npartitions=3), as_expression=as_expression)
    assert isinstance(result, dd.Series)
    assert result.name == "x"
    assert result.dtype == "float64"
    pd.testing.assert_series_equal(result.compute(scheduler=scheduler, num_workers=2), 2 * df.x)


@pytest.mark.cluster
@FORMS
def test_a_cluster_of_processes_gives_the_same(as_expression: bool, client: Any) -> None:
    df = table()
    ddf = dd.from_pandas(df, npartitions=3)
    result = ddf.assign(g=column(ddf, as_expression=as_expression))
    pd.testing.assert_frame_equal(client.compute(result[result.z > 4]).result(), df.assign(g=2 * df.x)[df.z > 4])


@FORMS
def test_divisions_are_kept_known_or_not(as_expression: bool) -> None:
    ddf = dd.from_pandas(table(), npartitions=4)
    assert column(ddf, as_expression=as_expression).divisions == ddf.divisions
    unknown = ddf.clear_divisions()
    assert column(unknown, as_expression=as_expression).divisions == (None,) * 5
    same(unknown.assign(g=column(unknown, as_expression=as_expression)), table().assign(g=2 * table().x))


@FORMS
def test_repeated_labels_empty_partitions_and_series(as_expression: bool) -> None:
    df = pd.DataFrame({"x": [1.0, 2.0, 3.0, 4.0], "y": 0.0}, index=[1, 1, 2, 2])
    parts = [df.iloc[:0], df.iloc[:1], df.iloc[1:], df.iloc[:0]]
    ddf = dd.from_map(lambda k: parts[k], range(4), meta=df.iloc[:0])
    same(column(ddf, as_expression=as_expression), 2 * df.x)
    same(column(ddf.x, as_expression=as_expression), 2 * df.x)
    same(column(ddf[ddf.x > 99], as_expression=as_expression), 2 * df.x.iloc[:0])


@FORMS
def test_case_c09_partitions_with_a_multiindex(as_expression: bool) -> None:
    df = table(6).set_index(pd.MultiIndex.from_product([[7, 8], [1, 2, 3]], names=["k", "n"]))
    whole = dd.from_map(lambda k: df.iloc[3 * k : 3 * k + 3], [0, 1], meta=df.iloc[:0])
    parts = dd.from_delayed([delayed(df.iloc[3 * k : 3 * k + 3]) for k in (0, 1)], meta=df.iloc[:0], verify_meta=False)
    for ddf in (whole, parts):
        same(column(ddf, as_expression=as_expression), 2 * df.x)
        same(column(ddf, FRAME, as_expression=as_expression)[["b"]], (3 * df.y).to_frame("b"))


@FORMS
def test_a_plan_for_the_whole_row_gets_every_column(as_expression: bool) -> None:
    plan = replace(SERIES, columns=None)
    df = table()
    result = column(dd.from_pandas(df, npartitions=2), plan, as_expression=as_expression)
    same(result, 2 * df.x)
    assert list(here(dd.from_pandas(df, npartitions=2)).columns) == list(df.columns)


@FORMS
def test_nothing_is_computed_at_the_call(as_expression: bool) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("computed")

    ddf = dd.from_pandas(table(), npartitions=2)
    SEEN.clear()
    with dask.config.set(scheduler=never):
        result = ddf.assign(g=column(ddf, as_expression=as_expression))
        assert result.dtypes["g"] == "float64"
        _dask.bag(db.from_sequence([{"x": 1.0}]), SERIES)  # type: ignore[arg-type]
    assert SEEN == []


# -------------------------------------------------------------------------------- what it costs


def test_head_len_projection_and_filters_cost_what_they_show() -> None:
    df = table(1000)
    ddf = dd.from_pandas(df, npartitions=4)
    g = column(ddf)
    a = ddf.assign(g=g)
    kept = int((df.z > 7).sum())
    assert rows_run(lambda: a.head(4)) == 4
    assert rows_run(lambda: g.tail(4)) == 4
    assert rows_run(lambda: len(a)) == 0
    assert rows_run(lambda: a[["x", "y"]].compute()) == 0
    assert rows_run(lambda: a.drop(columns="g").compute()) == 0
    assert rows_run(lambda: a[a.z > 7].compute()) == kept
    assert rows_run(lambda: g[ddf.z > 7].compute()) == kept
    assert rows_run(lambda: a.loc[a.z > 7, ["x", "g"]].compute()) == kept
    assert rows_run(lambda: a.query("z > 7").compute()) == kept
    assert rows_run(lambda: a.query("z > 7 and g > 0").compute()) == 1000
    assert rows_run(lambda: a[a.z > 7].g.sum().compute()) == kept
    twice = a[a.z > 7]
    assert rows_run(lambda: twice[twice.y > 0].compute()) == int(((df.z > 7) & (df.y > 0)).sum())
    assert rows_run(lambda: a[a.z > 7].head(3)) == 3
    assert rows_run(lambda: len(a[a.z > 7])) == 0
    assert rows_run(lambda: a.index.compute()) == 0
    mixed = ddf.assign(m=ddf.y * 2, g=g, top=ddf.y.max()).assign(after=ddf.x)
    assert rows_run(lambda: mixed[mixed.z > 7].compute()) == kept
    greeks = column(ddf, FRAME)
    several = ddf.assign(**{label: greeks[label] for label in greeks.columns})
    assert rows_run(lambda: several[several.z > 7].compute()) == kept
    assert rows_run(lambda: several.head(4)) == 4
    assert rows_run(lambda: a[a.g > 0].compute()) == 1000
    more = a.assign(h=a.g * 2 + a.y, k=-g)
    assert rows_run(lambda: more[more.z > 7].compute()) == kept
    assert rows_run(lambda: more[(more.z > 7) & (more.y > 0)].assign(n=1.0).h.sum().compute()) == int(((df.z > 7) & (df.y > 0)).sum())
    assert rows_run(lambda: more[more.h > 0].compute()) == 1000
    assert rows_run(lambda: a.g.abs().clip(0, 3).round(1).astype("float32")[a.z > 7].compute()) == kept
    assert rows_run(lambda: ddf.assign(h=g.fillna(0.0) - g.mean())[ddf.z > 7].compute()) == 1000  # the mean is that of all rows
    assert rows_run(lambda: a[(a.z > 7) & (a.g > 0)].compute()) == kept
    assert rows_run(lambda: a[(a.g > a.g.mean()) & (a.z > 7)].compute()) == 1000  # the mean is that of all rows
    assert rows_run(lambda: a[(a.z > 7) | (a.g > 0)].compute()) == 1000
    assert rows_run(lambda: more.h.head(4)) == 4
    assert rows_run(lambda: len(more)) == 0
    same(more[more.z > 7], df.assign(g=2 * df.x, h=4 * df.x + df.y, k=-2 * df.x)[df.z > 7])
    same(a[a.g > 0], df.assign(g=2 * df.x)[df.x > 0])
    same(g[ddf.z > 7], 2 * df.x[df.z > 7])


def test_only_the_wanted_results_are_made_and_only_their_columns_read(tmp_path: Path) -> None:
    df = table().reset_index(drop=True)
    df.to_parquet(tmp_path / "t.parquet")
    watch = tmp_path / "seen"
    greeks = column(dd.read_parquet(tmp_path / "t.parquet"), replace(FRAME, watch=str(watch)))
    same(greeks[["c"]], (5 * df.x).to_frame("c"))
    same(greeks["b"], (3 * df.y).rename("b"))
    same(greeks[["c", "b"]], pd.DataFrame({"c": 5 * df.x, "b": 3 * df.y}))
    assert [line.split()[2] for line in watch.read_text().splitlines()] == ["x", "y", "x,y"]
    both = (greeks["a"] + greeks["c"]).optimize()
    assert len([node for node in both.expr.walk() if "plan" in node._name]) == 1


@FORMS
@pytest.mark.filterwarnings("ignore:The inplace keyword:Warning")  # Dask's own reader, under pandas 3.1
@pytest.mark.parametrize("filesystem", ["fsspec", "arrow"])
def test_parquet_reads_only_what_is_needed(as_expression: bool, filesystem: str, tmp_path: Path) -> None:
    df = table()
    for number in range(4):
        df.iloc[25 * number : 25 * number + 25].to_parquet(tmp_path / f"{number}.parquet", index=False)
    ddf = dd.read_parquet(tmp_path, filesystem=filesystem)
    result = column(ddf, as_expression=as_expression)
    leaves = _leaves(result.expr.simplify())
    assert [list(leaf.operand("columns")) for leaf in leaves] == [["x"]]
    pd.testing.assert_series_equal(here(result), 2 * here(ddf.x))  # not df.x: Arrow lists files in an order of its own


def test_random_results_are_not_moved_about() -> None:
    df = table(1000)
    ddf = dd.from_pandas(df, npartitions=4)
    a = ddf.assign(g=column(ddf, replace(SERIES, rowwise=False)))
    assert rows_run(lambda: a[a.z > 7].compute()) == 1000
    assert rows_run(lambda: a.head(2)) == 250
    same(a[a.z > 7], df.assign(g=2 * df.x)[df.z > 7])


def test_other_private_classes_in_dask_mean_slower_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "daskgrad._expression", None)
    with pytest.warns(EngineWarning, match="compute whole partitions"):
        result = column(dd.from_pandas(table(), npartitions=3))
    assert rows_run(lambda: result.head(2)) == 34
    same(result, 2 * table().x)


@pytest.mark.parametrize("name", ["Filter", "Query", "_tokenize_partial", "is_filter_pushdown_available"])
def test_one_private_part_that_is_no_more_is_enough_to_be_slower(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dask.dataframe.dask_expr import _expr

    monkeypatch.delitem(sys.modules, "daskgrad._expression", raising=False)
    monkeypatch.delattr(_expr, name)
    with pytest.warns(EngineWarning, match=name):
        result = column(dd.from_pandas(table(), npartitions=3))
    monkeypatch.undo()
    same(result, 2 * table().x)


def test_dask_has_the_private_classes_we_use() -> None:
    from daskgrad._expression import Derivatives

    assert isinstance(column(dd.from_pandas(table(), npartitions=2)).expr, Derivatives)


STEPS: list[Any] = [
    lambda d, r: d[d.z > r.randint(0, 9)],
    lambda d, r: d[(d.z > 3) & (d.s == "u")],
    lambda d, r: d[(d.z > 6) | (d.y > 0)],
    lambda d, r: d[d.z > d.z.mean()],
    lambda d, r: d[d.z.isin([1, 4, 7])],
    lambda d, r: d[d.y > d.x],
    lambda d, r: d[[name for name in d.columns if name != "z"] + ["z"]],
    lambda d, r: d.rename(columns={"y": "y"}),
    lambda d, r: d.assign(**{f"w{r.random()}": d.y * 2}),  # a column assigned twice, Dask itself puts last
    lambda d, r: d.assign(y=d.y + 1),
    lambda d, r: d.loc[d.z < 8],
    lambda d, r: d.query("z > 2 and y < 1.5"),
    lambda d, r: d[d.x < 1.5].assign(v=d.x),
    lambda d, r: d.assign(**{f"w{r.random()}": abs(d[d.columns[-1]]) if d.dtypes[d.columns[-1]] == "float64" else d.z}),
    lambda d, r: d.assign(z=d.z + 1),
    lambda d, r: d.assign(v=d.y.clip(-1, 1).round(2)).fillna(0.0) if "s" not in d else d,
    lambda d, r: d[(d.z > 2) & (d[d.columns[-1]] == d[d.columns[-1]])],
    lambda d, r: d[(d.z > 2) & (d.y > d.y.mean())],
]
GRADIENTS: list[Any] = [
    (lambda d, grad, greeks: d.assign(g=grad(d)), "g"),
    (lambda d, grad, greeks: d.assign(g=greeks(d)["b"]), "g"),
    (lambda d, grad, greeks: d.assign(g=greeks(d)["a"], h=greeks(d)["c"]), "h"),
    (lambda d, grad, greeks: d.assign(g=grad(d) + 1), "g"),
    (lambda d, grad, greeks: d.assign(m=d.y * 2, g=grad(d), k=1), "g"),
    (lambda d, grad, greeks: d[d.x > -1].assign(g=grad(d)), "g"),  # of more rows: lined up by label
    (lambda d, grad, greeks: d.assign(g=grad(d), top=d.y.max()), "g"),
    (lambda d, grad, greeks: d.assign(g=grad(d)).assign(h=lambda f: f.g * f.y - 1), "h"),
    (lambda d, grad, greeks: d.assign(g=-grad(d).abs() + d.y), "g"),
    (lambda d, grad, greeks: d.assign(f=grad(d)).rename(columns={"f": "g"}), "g"),
    (lambda d, grad, greeks: d.assign(g=grad(d).where(d.y > 0, 0.0).astype("float32").astype("float64")), "g"),
    (lambda d, grad, greeks: d.assign(g=grad(d) - grad(d).mean()), "g"),
]
ENDS: list[Any] = [
    lambda d, name: d,
    lambda d, name: d[name],
    lambda d, name: d[[name, "z"]],
    lambda d, name: d[d[name] > 0],
    lambda d, name: d[[column for column in d.columns if column != name]],
    lambda d, name: d[d.z > 4][[name]],
    lambda d, name: d[d.z > 4].assign(u=1)[name],
    lambda d, name: d.loc[d.z > 4, ["x", name]],
    lambda d, name: d[d.z > 4].assign(u=d.x)[["u", name]],
    lambda d, name: d[d.z > 4][name] + 1,
    lambda d, name: d[[name, "z"]][d.z > 2],
    lambda d, name: d[name][d.z > 2],
    lambda d, name: d[(d.z > 4) & (d[name] > 0)],
    lambda d, name: d[(d[name] > d[name].mean()) & (d.z > 4)],
    lambda d, name: (2 * d[name].abs())[d.z > 2],
    lambda d, name: d.assign(u=d[name] ** 2)[d.z > 4],
]


@pytest.mark.parametrize("seed", range(400 if LONG else 60))
def test_random_programs_agree_with_pandas_in_both_forms(seed: int) -> None:
    df = table(60)
    ddf = dd.from_pandas(df, npartitions=4)
    sources = [
        ddf,
        ddf.clear_divisions(),
        dd.from_map(lambda k: df.iloc[20 * k : 20 * k + 20], range(3), meta=df.iloc[:0]),
    ]
    expected = _program(seed, df, lambda d: SERIES.run(d, None), lambda d: FRAME.run(d, None))
    source = sources[seed % 3]
    rows = []
    for form in (True, False):
        made = _program(
            seed,
            source,
            lambda d, f=form: column(d, SERIES, as_expression=f),
            lambda d, f=form: column(d, FRAME, as_expression=f),
        )
        rows.append(rows_run(lambda made=made: same(made, expected)))
    assert rows[0] <= rows[1]


def _program(seed: int, data: Any, grad: Any, greeks: Any) -> Any:
    """The same random program for pandas and Dask."""
    draw = random.Random(seed)
    for _ in range(draw.randint(0, 2)):
        data = draw.choice(STEPS)(data, draw)
    gradient, name = draw.choice(GRADIENTS)
    data = gradient(data, grad, greeks)
    for _ in range(draw.randint(0, 3)):
        data = draw.choice(STEPS)(data, draw)
    return draw.choice(ENDS)(data, name)


# -------------------------------------------------------------------------------- the graph


@FORMS
def test_keys_are_deterministic_and_readable(as_expression: bool) -> None:
    ddf = dd.from_pandas(table(), npartitions=3)
    model = torch.nn.Linear(2, 1)
    plan = replace(SERIES, shared={"model": model})
    first, again = (column(ddf, replace(plan), as_expression=as_expression) for _ in range(2))
    assert first._name == again._name
    assert first.dask.keys() == again.dask.keys()
    assert sum(key[0].startswith("grad-price-") for key in first.dask) == 3
    with torch.no_grad():
        model.weight += 1
    assert column(ddf, plan, as_expression=as_expression)._name != first._name


@FORMS
def test_one_copy_of_the_plan_in_the_graph(as_expression: bool) -> None:
    ddf = dd.from_pandas(table(), npartitions=20)
    plan = replace(FRAME, shared={"weights": np.random.default_rng(0).random(100_000)})  # 800 kB
    greeks = column(ddf, plan, as_expression=as_expression)
    result = ddf.assign(a=greeks["a"], b=greeks["b"])
    assert 800_000 < len(pickle.dumps(result.optimize().expr)) < 1_000_000


@FORMS
def test_the_graph_holds_nothing_of_ours_but_bytes(as_expression: bool) -> None:
    ddf = dd.from_pandas(table(), npartitions=2)
    result = ddf.assign(g=column(ddf, as_expression=as_expression))
    result = result[result.z > 4]
    sent = pickle.dumps(result.optimize().expr) + pickle.dumps(dict(result.optimize().dask))
    classes = _classes_in(sent)
    assert classes
    assert not {name for name in classes if name.split(".")[0] in ("daskgrad", "torch", "standin")}


def _classes_in(data: bytes) -> set[str]:
    """The modules that unpickling `data` imports."""
    found: set[str] = set()

    class Listing(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found.add(f"{module}.{name}")
            return super().find_class(module, name)

    import io

    Listing(io.BytesIO(data)).load()
    return found


def _leaves(expression: Any) -> list[Any]:
    return [node for node in expression.walk() if "path" in type(node)._parameters]


def test_a_lazy_column_can_be_pickled_itself() -> None:
    result = column(dd.from_pandas(table(), npartitions=3), FRAME)
    again = pickle.loads(pickle.dumps(result))
    assert again._name == result._name
    same(again[["b"]], (3 * table().y).to_frame("b"))


# -------------------------------------------------------------------------------- Bags


@pytest.mark.parametrize("scheduler", ["synchronous", "threads", pytest.param("processes", marks=pytest.mark.cluster)])
def test_a_bag_gives_a_column_numbered_from_zero_in_each_partition(scheduler: str) -> None:
    data = db.from_sequence([{"x": 1.0}, {"x": 2.5}, {"x": 3.0}], npartitions=2)
    for bag in (data, data.map(dict), data.filter(bool).map_partitions(iter)):
        result = _dask.bag(bag, SERIES)  # type: ignore[arg-type]
        assert isinstance(result, dd.Series)
        assert not result.known_divisions
        assert result.dtype == "float64"
        expected = pd.Series([2.0, 5.0, 6.0], index=[0, 1, 0], name="x")
        pd.testing.assert_series_equal(result.compute(scheduler=scheduler), expected)


@pytest.mark.cluster
def test_a_bag_on_a_cluster(client: Any) -> None:
    result = _dask.bag(db.from_sequence([{"x": 1.0}, {"x": 2.5}], npartitions=2), SERIES)  # type: ignore[arg-type]
    assert list(client.compute(result).result()) == [2.0, 5.0]


def test_case_c11_an_empty_bag_and_empty_partitions() -> None:
    empty = here(_dask.bag(db.from_sequence([]), SERIES))  # type: ignore[arg-type]
    assert len(empty) == 0
    assert empty.dtype == "float64"
    some = db.from_sequence([{"x": 1.0}, {"x": 2.0}], npartitions=2).filter(lambda record: record["x"] > 1)
    assert list(here(_dask.bag(some, SERIES))) == [4.0]  # type: ignore[arg-type]


def test_a_bag_has_deterministic_readable_keys_and_one_plan() -> None:
    bag = db.from_sequence([{"x": float(k)} for k in range(40)], npartitions=20)
    plan = replace(SERIES, shared={"weights": np.random.default_rng(0).random(100_000)})
    first, again = (_dask.bag(bag, replace(plan)) for _ in range(2))  # type: ignore[arg-type]
    assert first._name == again._name
    keys = list(first.optimize().dask)
    assert any("grad-price-" in str(key) for key in keys)
    assert len(pickle.dumps(first.optimize().expr)) < 1_000_000


def test_records_are_seen_only_where_they_lie_in_the_graph() -> None:
    records = [{"x": 1.0}, {"x": 2.0}, {"x": 3.0}]
    bag = db.from_sequence(records, npartitions=2)

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("computed")

    with dask.config.set(scheduler=never):
        assert _dask.peek(bag) == records
        assert _dask.peek(db.from_sequence([])) == []
        assert _dask.peek(bag.map(dict)) is None
        assert _dask.peek(db.from_delayed([delayed(list)()])) is None


# -------------------------------------------------------------------------------- threads


def test_case_a07_tasks_use_one_torch_thread_and_put_it_back(tmp_path: Path) -> None:
    watch = tmp_path / "seen"
    ddf = dd.from_pandas(table(400), npartitions=40)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        good, bad = column(ddf, replace(SERIES, watch=str(watch))), column(ddf, Breaker(**vars(SERIES), bad=200))
        good.compute(scheduler="threads", num_workers=4)
        assert {line.split()[1] for line in watch.read_text().splitlines()} == {"1"}
        with ThreadPoolExecutor(4) as pool, pytest.raises(RowError):  # Dask raises while other parts still run: the pool waits for them
            bad.compute(scheduler="threads", pool=pool)
        assert torch.get_num_threads() == 3
        assert _in_a_new_thread(torch.get_num_threads) == 3
        watch.unlink()
        good.compute(scheduler="synchronous")
        assert {line.split()[1] for line in watch.read_text().splitlines()} == {"3"}
    finally:
        torch.set_num_threads(before)


@pytest.mark.cluster
def test_tasks_in_processes_use_one_torch_thread(tmp_path: Path) -> None:
    result = column(dd.from_pandas(table(), npartitions=4), replace(SERIES, watch=str(tmp_path / "seen")))
    result.compute(scheduler="processes", num_workers=2)
    lines = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
    assert {threads for _, threads, _ in lines} == {"1"}
    assert str(os.getpid()) not in {pid for pid, _, _ in lines}


def _in_a_new_thread(work: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


# -------------------------------------------------------------------------------- errors


CAUSES = ["value_error", "key_error", "two_arguments", "holding_a_lock", "local_class"]


def _check(error: Any, cause: str) -> None:
    expected = getattr(standin, cause)()
    assert isinstance(error, GraphError if cause == "key_error" else RowError)
    assert "row 57" in str(error)
    assert (error.label, error.partition, error.values["x"]) == (57, 2, table().x[57])
    assert type(error.__cause__).__name__ == type(expected).__name__
    assert str(error.__cause__) == str(expected)
    if cause != "local_class":
        assert isinstance(error.__cause__, type(expected))


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("scheduler", ["synchronous", "threads", pytest.param("processes", marks=pytest.mark.cluster)])
def test_errors_arrive_whole(cause: str, scheduler: str) -> None:
    ddf = dd.from_pandas(table(), npartitions=4)
    result = column(ddf, Breaker(**vars(SERIES), bad=57, cause=getattr(standin, cause)))
    with pytest.raises((RowError, GraphError)) as caught:
        result.compute(scheduler=scheduler, num_workers=2)
    _check(caught.value, cause)
    if scheduler == "threads" and cause == "holding_a_lock":
        original: Any = caught.value.__cause__  # itself: nothing had to be pickled
        assert isinstance(original.lock, type(threading.Lock()))


@pytest.mark.cluster
@pytest.mark.parametrize("cause", CAUSES)
def test_errors_arrive_whole_from_a_cluster(cause: str, client: Any) -> None:
    ddf = dd.from_pandas(table(), npartitions=4)
    result = column(ddf, Breaker(**vars(SERIES), bad=57, cause=getattr(standin, cause)))
    with pytest.raises((RowError, GraphError)) as caught:
        client.compute(result).result()
    _check(caught.value, cause)


def test_errors_arrive_whole_without_tblib() -> None:
    """Dask alone does not bring tblib, and then wraps what a process raised."""
    from dask.multiprocessing import remote_exception

    error = pickle.loads(pickle.dumps(RowError("row 'q'", label="q", partition=3, values={"x": 1.0})))
    wrapped: Any = remote_exception(error, "the traceback")
    assert isinstance(wrapped, RowError)
    assert (wrapped.label, wrapped.partition, wrapped.values) == ("q", 3, {"x": 1.0})


# -------------------------------------------------------------------------------- places that lack something


NODE = """
import asyncio, sys
role, address, *missing = sys.argv[1:]
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
async def main():
    from distributed import Scheduler, Worker
    if role == "scheduler":
        node = Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0")
    else:
        node = Worker(address, host="127.0.0.1", nthreads=1, dashboard_address="127.0.0.1:0")
    async with node:
        print(node.address, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
if __name__ == "__main__":
    asyncio.run(main())
"""


@contextmanager
def node(role: str, address: str, *missing: str) -> Iterator[str]:
    """A scheduler or a worker in a process of its own where the modules `missing` cannot be imported; its address."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", NODE, role, address, *missing]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().decode().strip()
        finally:
            process.stdin.close()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.mark.cluster
def test_the_scheduler_needs_neither_daskgrad_nor_torch() -> None:
    from distributed import Client

    df = table()
    ddf = dd.from_pandas(df, npartitions=3)
    with (
        node("scheduler", "-", "daskgrad", "torch", "standin") as address,
        node("worker", address),
        Client(address, set_as_default=False) as client,
    ):
        for form in (True, False):
            a = ddf.assign(g=column(ddf, as_expression=form), h=column(ddf, FRAME, as_expression=form)["b"])
            result = client.compute(a[a.z > 4]).result(timeout=180)
            pd.testing.assert_frame_equal(result, df.assign(g=2 * df.x, h=3 * df.y)[df.z > 4])
        bag = _dask.bag(db.from_sequence([{"x": 1.0}, {"x": 2.5}], npartitions=2), SERIES)  # type: ignore[arg-type]
        assert list(client.compute(bag).result(timeout=180)) == [2.0, 5.0]

        def imported() -> list[str]:
            import sys

            return [name for name in ("daskgrad", "torch", "standin") if name in sys.modules]

        assert client.run_on_scheduler(imported) == []


@pytest.mark.cluster
def test_a_worker_that_lacks_something_says_so_and_lives() -> None:
    from distributed import Client

    ddf = dd.from_pandas(table(), npartitions=3)
    with node("scheduler", "-") as address, Client(address, set_as_default=False) as client:
        for missing, kind, text in (
            ("daskgrad", RuntimeError, "daskgrad cannot be used on the worker at .*No module named 'daskgrad'"),
            ("standin", PlanError, "cannot be loaded on worker tcp://127.0.0.1:.*module `standin` is missing"),
        ):
            with node("worker", address, missing) as worker:
                client.wait_for_workers(1, timeout=180)
                with pytest.raises(kind, match=text):
                    client.compute(column(ddf, replace(SERIES, title=f"grad-{missing}"))).result(timeout=180)
                assert worker in client.scheduler_info()["workers"]
                assert client.submit(int, "7", pure=False).result(timeout=180) == 7


# -------------------------------------------------------------------------------- what is it?


def test_kinds_are_told_without_importing_dask() -> None:
    ddf = dd.from_pandas(table(), npartitions=1)
    told = [_dask.kind(data) for data in (ddf, ddf.x, db.from_sequence([1]), table(), ddf.index, ddf.x.sum(), 3)]
    assert told == ["frame", "series", "bag", None, None, None, None]
    code = (
        "import sys, daskgrad._dask as d, pandas as pd\n"
        "print(d.kind(pd.DataFrame()), 'dask.dataframe' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    assert done.stdout.split() == ["None", "False", "False"]


def test_case_c02_arrays_that_became_text_are_found() -> None:
    df = pd.DataFrame(
        {"x": [1.0, 2.0], "v": [np.ones(2), np.zeros(2)], "w": [[1], [2]], "s": ["a", "b"], "o": ["a", None]},
        dtype=None,
    )
    df["o"] = df["o"].astype(object)
    ddf = dd.from_pandas(df, npartitions=2)
    assert _dask._text_that_was_arrays(ddf) == ["v", "w"]
    assert _dask._text_that_was_arrays(ddf[ddf.x > 0][["v", "x"]]) == ["v"]
    assert _dask._text_that_was_arrays(ddf.w) == ["w"]
    assert _dask._text_that_was_arrays(ddf.assign(v=ddf.x)[["v"]]) == []
    with dask.config.set({"dataframe.convert-string": False}):
        assert _dask._text_that_was_arrays(dd.from_pandas(df, npartitions=2)) == []


def test_what_cannot_be_sent_is_refused_at_the_call() -> None:
    lock = threading.Lock()
    plan = replace(SERIES, fn=lambda x: (lock, x))
    with pytest.raises(PlanError, match="captures `lock`"):
        column(dd.from_pandas(table(), npartitions=1), plan)
    with pytest.raises(PlanError, match="captures `lock`"):
        _dask.bag(db.from_sequence([{"x": 1.0}]), plan)  # type: ignore[arg-type]
    assert _ship.here().startswith("process ")
