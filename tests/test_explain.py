"""What `explain` says, what it computes to say it, and that nothing in the data can break it."""

from __future__ import annotations

import threading
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from compare import bag_of, in_equal_parts, object_series, partitioned, slower_is_fine

import daskgrad as dg

Tensor = torch.Tensor


def said(*arguments: Any, **options: Any) -> str:
    with slower_is_fine():
        return str(dg.explain(*arguments, **options))


def numbers(rows: int = 40) -> pd.DataFrame:
    return pd.DataFrame({"x": np.linspace(-1, 1, rows), "y": np.linspace(1, 2, rows)})


def test_it_says_what_is_read_returned_and_run() -> None:
    frame = numbers().assign(kind="call", unread=1)

    def price(x: Tensor, y: Tensor, kind: str, scale: float = 2.0) -> Tensor:
        return scale * x**2 * y if kind == "call" else -x

    text = said(frame, price, {"value": (), "slope": "x", "cross": ("x", "y"), "size": dg.norm(["x", "y"])})
    assert text.splitlines()[0] == "price on a pandas DataFrame of 40 rows"
    for part in (
        "column 'x' (float64): a number",
        "static, the plain value, 'call'",
        "its default, 2.0",
        "float64: d/d(x, y)",
        "norm(x, y)",
    ):
        assert part in text
    for part in ("40 of 40 rows were looked at", "float64, that of what is read", "batches under vmap", "bytes a row", "one backward pass"):
        assert part in text
    assert "unread" not in text


def test_hostile_names_are_escaped() -> None:
    evil = "<img src=x onerror=alert(1)>&\"'"
    frame = pd.DataFrame({evil: [1.0, 2.0], "kind": ["<script>", "</td>"]})

    def fn(x: Tensor, kind: str) -> Tensor:
        return x**2

    made = dg.explain(frame, fn, {"<b>bold</b>": "x"}, inputs={"x": evil})
    html = made._repr_html_()
    for raw in ("<img", "<script", "<b>bold", "</td>'"):
        assert raw not in html
    assert "&lt;img src=x onerror=alert(1)&gt;&amp;" in html and "&lt;script&gt;" in html and "&lt;b&gt;bold" in html
    assert html.count("<tr>") == html.count("</tr>") and html.count("<td") == html.count("</td>")
    assert evil.replace("'", "\\'") in str(made)


def test_failing_rows_are_named_and_the_text_escaped() -> None:
    def fn(x: Tensor) -> Tensor:
        if x > 0.9:
            raise ValueError("<i>too large</i>")
        return x**2

    made = dg.explain(numbers().set_index("y"), fn)
    assert "ValueError: <i>too large</i>" in str(made) and "row 1.97" in str(made)
    assert "<i>" not in made._repr_html_()


class Parts:
    """Makes a part of ten rows when it is computed, and counts."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.lock = threading.Lock()

    def __dask_tokenize__(self) -> str:
        return "counted parts"

    def __call__(self, part: int) -> pd.DataFrame:
        with self.lock:
            self.made.append(part)
        return numbers(100).assign(part=part)


def test_of_dask_data_a_few_rows_are_computed() -> None:
    parts = Parts()
    lazy = dd.from_map(parts, list(range(50)), meta=numbers(0).assign(part=0))
    rows = []

    def fn(x: Tensor, y: Tensor) -> Tensor:
        rows.append(1)
        return x * y

    with dask.config.set(scheduler="synchronous"):
        text = said(lazy, fn, engine="loop")
    assert sorted(set(parts.made)) == [0, 25, 49] and len(parts.made) == 3
    assert len(rows) <= 20
    assert "partitions 0, 25, 49" in text and "on a Dask DataFrame of 50 partitions" in text


def test_rows_that_are_few_in_the_sample_are_many_in_the_data() -> None:
    """Each row looked at takes a path of its own kind; in the data there are thousands on each."""
    frame = pd.DataFrame({"x": np.ones(4000), "n": np.arange(4000) % 12})

    def fn(x: Tensor, n: Tensor) -> Tensor:
        for _ in range(int(n)):
            x = x * 2
        return x

    for data in (frame, dd.from_pandas(frame, npartitions=5)):
        text = said(data, fn)
        assert "engine            batches under vmap, and one backward pass for each batch" in text
        assert "one by one" not in text and "the loop" not in text
    assert "too few rows are alike" in said(frame[:12], fn)


@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
def test_the_data_are_not_changed(engine: str) -> None:
    frame = numbers().assign(v=object_series([np.ones(2)] * 40).to_numpy())
    before = frame.copy(deep=True)

    def fn(x: Tensor, v: Tensor) -> Tensor:
        v.mul_(2)
        return x * v.sum()

    said(frame, fn, ["x", "v"], engine=engine)
    pd.testing.assert_frame_equal(frame, before)
    assert frame["v"].iloc[0].tolist() == [1, 1]


def test_the_model_is_not_changed() -> None:
    net = torch.nn.Linear(2, 1)
    before = {name: p.clone() for name, p in net.state_dict().items()}
    frame = pd.DataFrame({"v": object_series([np.ones(2)] * 5)})
    text = said(frame, lambda v, net: net(v).sum(), shared={"net": net})
    assert "shared: Linear, 3 parameters, float32" in text and "float32, cast on the way in" in text
    assert all(torch.equal(p, before[name]) for name, p in net.state_dict().items())
    assert net.weight.grad is None


EMPTY = numbers(0)
ARRAYS = object_series([np.ones(2), np.ones(3), np.ones(2)])


@pytest.mark.parametrize(
    ("data", "fn", "part"),
    [
        (pd.Series([1.0, 2.0], name="x"), lambda x: x**2, "a pandas Series of 2 rows"),
        (EMPTY, lambda x: x**2, "0 of 0 rows"),
        (EMPTY["x"], lambda x: x**2, "0 of 0 rows"),
        (in_equal_parts(numbers(), 3), lambda x: x**2, "3 partitions"),
        (in_equal_parts(numbers(), 3)["x"], lambda x: x**2, "a Dask Series"),
        (partitioned(numbers(4), [(0, 0), (0, 4), (4, 4)]), lambda x: x**2, "4 in all"),
        (partitioned(EMPTY, [(0, 0)]), lambda x: x**2, "0 in all"),
        (bag_of([{"x": 1.0}, {"x": 2.0}], 2), lambda x: x**2, "the first 2 records"),
        (bag_of([1.0, 2.0], 1), lambda x: x**2, "a Dask Bag"),
        (bag_of([], 1), lambda x: x**2, "the first 0 records"),
        (pd.DataFrame({"v": ARRAYS}), lambda v: v.sum() ** 2, "arrays of 2 shapes, grouped"),
        (pd.DataFrame({"x": pd.Series([None, None], dtype="Float64")}), lambda x: x**2, "2 of 2"),
        (numbers(), lambda x: None, "TypeError"),
        (numbers(), lambda x: x.detach(), "GraphError"),
        (numbers(), lambda x: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_whatever_the_data_are(data: Any, fn: Any, part: str) -> None:
    with slower_is_fine():
        made = dg.explain(data, fn)
    assert part in str(made)
    assert made._repr_html_().startswith("<div>")


def test_a_function_of_whole_rows() -> None:
    text = said(numbers(), lambda row: row.x**2 * row["y"], "x")
    assert "the whole row" in text and "all of them are loaded" in text


def test_the_mode_of_each_derivative() -> None:
    frame = pd.DataFrame({"v": object_series([np.ones(3)] * 20)})
    tall = said(frame, lambda v: v.sum() * torch.ones(9), {"j": "v"})
    assert "a Jacobian of 9 × 3 by its columns" in tall
    wide = said(frame, lambda v: v[:2] ** 2, {"j": "v"})
    assert "a Jacobian of 2 × 3 by its rows" in wide
    assert "then by v: 3 backward passes" in said(frame, lambda v: (v**3).sum(), {"h": ("v", "v")})


def test_what_would_be_slow_and_why() -> None:
    text = said(numbers(200), lambda x: torch.as_tensor(sum(1 / (k + 1) for k in range(int(1e4 * abs(x))))) * x)
    assert "the loop" in text and "faster" in text
    assert "the loop, as asked" in said(numbers(), lambda x: x**2, engine="loop")


def test_a_call_that_makes_no_sense_is_an_error() -> None:
    for data in (numbers(), in_equal_parts(numbers(), 2)):
        with pytest.raises(dg.PlanError, match="nowhere"):
            dg.explain(data, lambda x: x, "nowhere")
