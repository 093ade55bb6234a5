"""Derivatives by name: every order in one pass, against closed forms and against nested autograd, row by row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import dask
import mpmath
import numpy as np
import oracle
import pandas as pd
import pyarrow as pa
import pytest
import strategies
import torch
from compare import ENGINES, assert_cells, bag_of, computed, in_equal_parts, object_series, partitioned, slower_is_fine
from hypothesis import assume, given
from hypothesis import strategies as st

import daskgrad as dg
from daskgrad import _autograd, _reduce

Tensor = torch.Tensor
BOTH = ("auto", "loop")


# --- Greeks to third order against closed forms ---------------------------------------------------------------

NAMES = ("spot", "strike", "vol", "rate", "expiry")
ORDERS: dict[str, tuple[str, ...]] = {
    "value": (),
    "delta": ("spot",),
    "vega": ("vol",),
    "theta": ("expiry",),  # by the time that is left: the trader's theta with the other sign
    "rho": ("rate",),
    "dual_delta": ("strike",),
    "gamma": ("spot", "spot"),
    "vanna": ("spot", "vol"),
    "volga": ("vol", "vol"),
    "charm": ("spot", "expiry"),
    "veta": ("vol", "expiry"),
    "vera": ("rate", "vol"),
    "dual_gamma": ("strike", "strike"),
    "speed": ("spot", "spot", "spot"),
    "zomma": ("spot", "spot", "vol"),
    "color": ("spot", "spot", "expiry"),
    "ultima": ("vol", "vol", "vol"),
}


def greeks(spot: Any, strike: Any, vol: Any, rate: Any, expiry: Any) -> dict[str, Any]:
    """A call's Greeks without dividends, by E. G. Haug, The Complete Guide to Option Pricing Formulas, 2nd ed. (2007),
    chapter 2, in mpmath's numbers."""
    S, K, r, T = spot, strike, rate, expiry
    root = vol * mpmath.sqrt(T)
    d1 = (mpmath.log(S / K) + (r + vol**2 / 2) * T) / root
    d2 = d1 - root
    n, discounted = mpmath.npdf(d1), K * mpmath.exp(-r * T)
    N1, N2 = mpmath.erfc(-d1 / mpmath.sqrt(2)) / 2, mpmath.erfc(-d2 / mpmath.sqrt(2)) / 2
    vega, gamma = S * n * mpmath.sqrt(T), n / (S * root)
    return {
        "value": S * N1 - discounted * N2,
        "delta": N1,
        "vega": vega,
        "theta": S * n * vol / (2 * mpmath.sqrt(T)) + r * discounted * N2,
        "rho": T * discounted * N2,
        "dual_delta": -discounted / K * N2,
        "gamma": gamma,
        "vanna": -n * d2 / vol,
        "volga": vega * d1 * d2 / vol,
        "charm": n * (2 * r * T - d2 * root) / (2 * T * root),
        "veta": -vega * (r * d1 / root - (1 + d1 * d2) / (2 * T)),
        "vera": -T * discounted * mpmath.npdf(d2) * d1 / vol,
        "dual_gamma": discounted / K * mpmath.npdf(d2) / (K * root),
        "speed": -gamma / S * (d1 / root + 1),
        "zomma": gamma * (d1 * d2 - 1) / vol,
        "color": -gamma / (2 * T) * (1 + d1 * (2 * r * T - d2 * root) / root),
        "ultima": -vega / vol**2 * (d1 * d2 * (1 - d1 * d2) + d1**2 + d2**2),
    }


def book() -> pd.DataFrame:
    """A half to twice the spot, from two days to five years, calm and wild: deep in and out of the money."""
    grid = itertools.product([50.0, 80.0, 97.3, 100.0, 104.1, 125.0, 200.0], [0.07, 0.2, 0.61], [-0.011, 0.043], [0.0055, 0.083, 1.0, 5.0])
    rows = [{"spot": 100.0, "strike": strike, "vol": vol, "rate": rate, "expiry": expiry} for strike, vol, rate, expiry in grid]
    return pd.DataFrame(rows)


@pytest.mark.parametrize("engine", BOTH)
def test_greeks_equal_closed_forms(engine: str) -> None:
    """To 1e-10 of each Greek's own size, or, where it is next to nothing, to 1e-14 of the spot for a move of each variable by itself.

    The closed forms are taken with 40 digits, so their rounding is not part of it.
    """
    frame = book()
    got = dg.derivatives(frame, oracle.price_call, ORDERS, engine=engine)
    assert list(got.columns) == list(ORDERS)
    with mpmath.workdps(40):
        closed = [
            {k: float(v) for k, v in greeks(**{k: mpmath.mpf(v) for k, v in row.items()}).items()} for row in frame.to_dict("records")
        ]
    for name, order in ORDERS.items():
        right = np.array([row[name] for row in closed])
        size = frame["spot"].to_numpy() / np.prod([frame[by].abs() for by in order], axis=0)
        np.testing.assert_array_less(np.abs(got[name] - right), 1e-10 * np.maximum(np.abs(right), 1e-4 * size), err_msg=name)


def test_the_closed_forms_themselves() -> None:
    """Against mpmath's own numerical derivatives with 60 digits, at one point."""
    at = {"spot": "103", "strike": "100", "vol": "0.23", "rate": "0.04", "expiry": "0.6"}
    with mpmath.workdps(60):
        point = [mpmath.mpf(at[name]) for name in NAMES]
        closed = greeks(*point)
        for name, order in ORDERS.items():
            counts = tuple(order.count(by) for by in NAMES)
            numeric = mpmath.diff(lambda *p: greeks(*p)["value"], tuple(point), counts) if order else closed["value"]
            assert abs(closed[name] - numeric) < mpmath.mpf(10) ** -15 * (1 + abs(numeric)), name


def price_with_carry(spot: Tensor, strike: Tensor, vol: Tensor, rate: Tensor, carry: Tensor, expiry: Tensor, sign: Tensor) -> Tensor:
    """The generalised Black-Scholes-Merton price: `carry` is b, `sign` 1 for a call and -1 for a put."""
    root = vol * expiry.sqrt()
    d1 = (torch.log(spot / strike) + (carry + vol**2 / 2) * expiry) / root
    forward, discount = spot * torch.exp((carry - rate) * expiry), torch.exp(-rate * expiry)
    return sign * (forward * torch.special.ndtr(sign * d1) - strike * discount * torch.special.ndtr(sign * (d1 - root)))


# The worked examples of Haug, chapter 2, as printed: spot, strike, expiry, rate, carry, volatility; which Greek; its value.
HAUG = [
    ((105, 100, 0.5, 0.10, 0.0, 0.36), 1, ("spot",), 0.5946),
    ((105, 100, 0.5, 0.10, 0.0, 0.36), -1, ("spot",), -0.3566),
    ((55, 60, 0.75, 0.10, 0.10, 0.30), 1, ("spot", "spot"), 0.0278),
    ((90, 130, 0.75, 0.05, 0.0, 0.28), 1, ("vol", "vol"), 92.3444),
    ((55, 60, 0.75, 0.105, 0.0695, 0.30), 1, ("vol",), 18.5027),
    ((430, 405, 1 / 12, 0.07, 0.02, 0.20), -1, ("expiry",), 31.1924),  # theta, by the time that is left
]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_textbook_examples(engine: str) -> None:
    points = [{**dict(zip(("spot", "strike", "expiry", "rate", "carry", "vol"), p, strict=True)), "sign": s} for p, s, _, _ in HAUG]
    frame = pd.DataFrame(points).astype("float64")
    wanted = {str(order): order for _, _, order, _ in HAUG}
    got = dg.derivatives(frame, price_with_carry, wanted, engine=engine)
    for row, (_, _, order, printed) in enumerate(HAUG):
        assert got[str(order)].iloc[row] == pytest.approx(printed, abs=5.01e-5)


# --- any order, against nested autograd -----------------------------------------------------------------------


def some_order(names: str, most: int = 3) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(sorted(names)), max_size=most).map(tuple)


def draw_table(data: st.DataObject, kinds: Mapping[str, str], rows: int, length: int | None = 3) -> strategies.Table:
    tables = strategies.tables(kinds, length=length, max_rows=rows).filter(lambda t: t.floating == torch.float64)
    return data.draw(tables.filter(lambda t: "arrays of int64" not in t.dtypes.values()), label="table")


def carried(data: st.DataObject, frame: pd.DataFrame, verb: Callable[[Any], Any]) -> pd.DataFrame:
    """`verb` on the frame: pandas, or Dask in drawn parts."""
    if data.draw(st.booleans(), label="dask"):
        found: pd.DataFrame = computed(verb(partitioned(frame, data.draw(strategies.cuts(len(frame)), label="cuts"))))
        return found
    return verb(frame)


def expected_rows(table: strategies.Table, fn: Any, wanted: Mapping[str, tuple[str, ...]], **options: Any) -> list[dict[str, Any] | None]:
    missing = [any(map(oracle.is_missing, row.values())) for row in table.rows]
    return [None if m else oracle.row_derivatives(row, fn, wanted, **options) for row, m in zip(table.rows, missing, strict=True)]


def cells(found: list[dict[str, Any] | None], name: str) -> list[Any]:
    return [None if row is None else row[name] for row in found]


def draw_options(data: st.DataObject) -> dict[str, Any]:
    return {"engine": data.draw(st.sampled_from(BOTH)), "batch_size": data.draw(st.sampled_from([None, 1, 3]))}


@given(st.data())
def test_any_mix_of_orders_up_to_three(data: st.DataObject) -> None:
    kinds = data.draw(st.sampled_from([{"x": "scalar", "y": "scalar"}, {"x": "scalar", "v": "vector"}]))
    program = data.draw(data.draw(st.sampled_from([strategies.programs, strategies.control_programs]))(kinds), label="fn")
    table = draw_table(data, kinds, 6)
    orders = data.draw(st.lists(some_order("".join(kinds)), min_size=1, max_size=5, unique=True), label="orders")
    wanted = {f"d{n}": order for n, order in enumerate(orders)}
    expected = expected_rows(table, program.fn, wanted)
    options = draw_options(data)
    with slower_is_fine():
        got = carried(data, table.frame, lambda frame: dg.derivatives(frame, program.fn, wanted, **options))
    for name in wanted:
        assert_cells(list(got[name].array), cells(expected, name), rtol=1e-9)


@given(st.data())
def test_vector_valued_functions_of_every_shape(data: st.DataObject) -> None:
    """Tall, wide and square Jacobians, and the orders after them; on Dask by `vector=True`."""
    kinds = {"x": "scalar", "v": "vector"}
    parts = [data.draw(strategies.programs(kinds), label=f"fn{n}") for n in range(data.draw(st.sampled_from([2, 3, 5])))]
    table = draw_table(data, kinds, 6)
    wanted = {f"d{n}": order for n, order in enumerate(data.draw(st.lists(some_order("xv", 2), min_size=1, max_size=4, unique=True)))}

    def several(x: Tensor, v: Tensor) -> Tensor:
        return torch.stack([part.fn(x, v) for part in parts])

    expected = expected_rows(table, several, wanted, vector=True)
    options = draw_options(data)
    with slower_is_fine():
        got = carried(data, table.frame, lambda frame: dg.derivatives(frame, several, wanted, vector=True, **options))
    for name in wanted:
        assert_cells(list(got[name].array), cells(expected, name), rtol=1e-9)


@given(st.data())
def test_reductions_equal_the_gradient_that_is_formed(data: st.DataObject) -> None:
    """norm, dot, project and H·v, in the same pass as what they are made of."""
    length = data.draw(st.sampled_from([3, None]), label="length")
    kinds = {"x": "scalar", "v": "vector"}
    program = data.draw(strategies.programs(kinds, length=length), label="fn")
    table = draw_table(data, kinds, 6, length)
    seed = data.draw(st.integers(0, 5))
    frame = table.frame.assign(
        w=object_series([None if oracle.is_missing(row["v"]) else np.cos(row["v"]) for row in table.rows]).to_numpy()
    )
    wanted = {
        "norm": dg.norm("v"),
        "joint": dg.norm(["v", "x"]),
        "frobenius": dg.norm(("v", "v")),
        "dot": dg.dot("v", "w"),
        "projected": dg.project("v", 4, seed),
        "hv": ("v", dg.dot("v", "w")),
        "vh": (dg.dot("v", "w"), "v"),
        "vhv": (dg.dot("v", "w"), dg.dot("v", "w")),
        "xv": ("x", dg.dot("v", "w")),
        "twice": dg.dot("x", 2.0),
    }
    found = expected_rows(table, program.fn, {"x": ("x",), "v": ("v",), "vv": ("v", "v"), "xv": ("x", "v")})
    matrix = _reduce.entries(seed, 0, 4)
    expected: list[dict[str, Any] | None] = []
    for row, given_ in zip(found, table.rows, strict=True):
        if row is None:
            expected.append(None)
            continue
        w, g, H = np.cos(np.array(given_["v"])), row["v"], row["vv"]
        expected.append(
            {
                "norm": np.sqrt((g**2).sum()),
                "joint": np.sqrt((g**2).sum() + row["x"] ** 2),
                "frobenius": np.sqrt((H**2).sum()),
                "dot": g @ w,
                "projected": g @ matrix[: len(g)],
                "hv": H @ w,
                "vh": H @ w,
                "vhv": w @ H @ w,
                "xv": row["xv"] @ w,
                "twice": 2 * row["x"],
            }
        )
    options = draw_options(data)
    with slower_is_fine():
        got = carried(data, frame, lambda frame: dg.derivatives(frame, program.fn, wanted, **options))
    for name in wanted:
        assert_cells(list(got[name].array), cells(expected, name), rtol=1e-9)


@given(st.data())
def test_rows_that_fail_have_a_problem_and_the_others_their_numbers(data: st.DataObject) -> None:
    kinds = {"x": "scalar", "y": "scalar"}
    program = data.draw(strategies.control_programs(kinds, failing=True), label="fn")
    table = draw_table(data, kinds, 12)
    assume(table.rows)
    found = oracle.outcomes(table.rows, program.fn, ["x"])
    options = draw_options(data)
    wanted = {"slope": "x", "problem": dg.problem}
    with slower_is_fine():
        got = carried(data, table.frame, lambda frame: dg.derivatives(frame, program.fn, wanted, **options))
    assert_cells(list(got["slope"].array), [row["x"] if isinstance(row, dict) else None for row in found], rtol=1e-9)
    for text, row in zip(got["problem"], found, strict=True):
        if isinstance(row, Exception) and not isinstance(row, oracle.Unreached):
            assert type(row).__name__ in text and str(row) in text
        elif row is None or isinstance(row, dict):
            assert pd.isna(text)
        else:
            assert "GraphError" in text


# --- projections ----------------------------------------------------------------------------------------------


def quadratic(v: Tensor) -> Tensor:
    return (v**2).sum() / 2  # the gradient is v itself


def test_a_projection_is_the_same_for_every_partition_and_batch() -> None:
    frame = pd.DataFrame({"v": object_series(list(np.random.default_rng(0).standard_normal((30, 7))))})
    wanted = {"p": dg.project("v", 5, seed=3)}
    whole = np.stack(dg.derivatives(frame, quadratic, wanted)["p"])
    assert whole.shape == (30, 5)
    np.testing.assert_allclose(whole, np.stack(frame["v"]) @ _reduce.entries(3, 0, 5)[:7], rtol=1e-13, atol=1e-14)
    for options in ({"batch_size": 4}, {"engine": "loop"}):
        np.testing.assert_allclose(np.stack(dg.derivatives(frame, quadratic, wanted, **options)["p"]), whole, rtol=1e-13, atol=1e-14)
    for parts, scheduler in ((2, "synchronous"), (7, "threads")):
        found = computed(dg.derivatives(in_equal_parts(frame, parts), quadratic, wanted), scheduler)
        np.testing.assert_allclose(np.stack(found["p"]), whole, rtol=1e-13, atol=1e-14)
    other = np.stack(dg.derivatives(frame, quadratic, {"p": dg.project("v", 5, seed=4)})["p"])
    assert np.abs(other - whole).min() > 0


@pytest.mark.cluster
@pytest.mark.usefixtures("client")
def test_a_projection_is_the_same_on_every_worker() -> None:
    frame = pd.DataFrame({"v": object_series(list(np.random.default_rng(0).standard_normal((12, 7))))})
    wanted = {"p": dg.project("v", 5, seed=3)}
    found = dg.derivatives(in_equal_parts(frame, 6), quadratic, wanted).compute()
    np.testing.assert_allclose(np.stack(found["p"]), np.stack(dg.derivatives(frame, quadratic, wanted)["p"]), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("engine", BOTH)
def test_a_projection_of_ragged_rows_is_prefix_stable(engine: str) -> None:
    """Zeros at the end of a gradient change nothing; past a block of the matrix too."""
    long = np.random.default_rng(1).standard_normal(_reduce.BLOCK + 9)
    short = long[: _reduce.BLOCK - 2]
    padded = np.concatenate([short, np.zeros(20)])
    frame = pd.DataFrame({"v": object_series([short, padded, long, long[:3]])})
    got = dg.derivatives(frame, quadratic, {"p": dg.project("v", 3, seed=1)}, engine=engine)["p"]
    np.testing.assert_allclose(got.iloc[0], got.iloc[1], rtol=1e-12)
    matrix = np.concatenate([_reduce.entries(1, 0, 3), _reduce.entries(1, 1, 3)])
    np.testing.assert_allclose(got.iloc[2], long @ matrix[: len(long)], rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(got.iloc[3], long[:3] @ matrix[:3], rtol=1e-12)


def test_a_projection_keeps_lengths_and_inner_products_on_average() -> None:
    """Johnson and Lindenstrauss: E‖Pg‖² = ‖g‖² with variance 2‖g‖⁴/k, E⟨Pg, Ph⟩ = ⟨g, h⟩. Over 400 matrices, to four deviations."""
    k, seeds = 16, 400
    g, h = np.random.default_rng(2).standard_normal((2, 40))
    frame = pd.DataFrame({"v": object_series([g, h])})
    wanted = {str(seed): dg.project("v", k, seed) for seed in range(seeds)}
    got = dg.derivatives(frame, quadratic, wanted)
    pg, ph = np.stack(got.iloc[0]), np.stack(got.iloc[1])  # (seeds, k)
    squares = (pg**2).sum(1) / (g @ g)
    assert abs(squares.mean() - 1) < 4 * np.sqrt(2 / k / seeds)
    assert abs(squares.var() / (2 / k) - 1) < 0.4
    deviation = np.sqrt(((g @ g) * (h @ h) + (g @ h) ** 2) / k / seeds)
    assert abs((pg * ph).sum(1).mean() - g @ h) < 4 * deviation


# --- what is computed, and what is not ------------------------------------------------------------------------


@contextmanager
def counted_passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of outputs of each backward pass of torch's engine."""
    calls: list[int] = []
    real = torch.autograd.graph._engine_run_backward

    def run(outputs: Any, *args: Any, **options: Any) -> Any:
        calls.append(len(outputs))
        return real(outputs, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(torch.autograd, "_engine_run_backward", run)
        patched.setattr(_autograd, "_engine_run_backward", run)
        yield calls


# enough rows to be a batch: few go one by one
THREE = pd.DataFrame({"x": np.linspace(1, 2, 16), "y": np.linspace(0.5, 0.7, 16), "z": np.linspace(0.1, 0.2, 16)})


def mixed(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.sin(x * y) * z.exp() + x**3 * z


@pytest.mark.parametrize(
    ("wanted", "passes"),
    [
        ({"v": ()}, 0),
        ({"x": "x"}, 1),
        ({"v": (), "x": "x", "y": "y", "z": "z"}, 1),
        ({"xy": ("x", "y"), "yx": ("y", "x")}, 2),
        ({"x": "x", "y": "y", "xx": ("x", "x"), "xy": ("x", "y"), "yx": ("y", "x")}, 2),
        ({"xyz": ("x", "y", "z"), "zyx": ("z", "y", "x"), "yzx": ("y", "z", "x")}, 3),
        ({"xx": ("x", "x"), "yy": ("y", "y")}, 3),
        ({"x": "x", "n": dg.norm("x"), "d": dg.dot("x", 2.0), "p": dg.project("x", 2)}, 1),
    ],
)
def test_equal_partials_are_computed_once(wanted: dict[str, Any], passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with counted_passes(monkeypatch) as calls:
        got = dg.derivatives(THREE, mixed, wanted)
    assert len(calls) == passes
    for one, other in (("xy", "yx"), ("xyz", "zyx")):
        if one in wanted:
            pd.testing.assert_series_equal(got[one], got[other], check_names=False)


def test_a_hessian_times_a_vector_never_forms_the_hessian(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = pd.DataFrame({"v": object_series(list(np.random.default_rng(0).standard_normal((8, 50))))})
    with counted_passes(monkeypatch) as calls:
        got = dg.derivatives(frame, lambda v: (v**4).sum(), {"hv": ("v", dg.dot("v", np.arange(50.0)))})
    assert len(calls) == 2
    assert_cells(list(got["hv"]), [12 * v**2 * np.arange(50.0) for v in frame["v"]], rtol=1e-12)


def test_dropped_columns_of_a_lazy_frame_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = dg.derivatives(in_equal_parts(THREE, 2), mixed, {"x": "x", "xx": ("x", "x"), "zzz": ("z", "z", "z"), "v": ()})
    with dask.config.set(scheduler="synchronous"):
        for names, passes in ((["v"], 0), (["x"], 1), (["v", "xx"], 2)):
            with counted_passes(monkeypatch) as calls:
                found = lazy[names].compute()
            assert len(calls) == passes * 2  # two parts
            pd.testing.assert_frame_equal(found, dg.derivatives(THREE, mixed, {"x": "x", "xx": ("x", "x"), "v": ()})[names])


def test_a_direction_only_matters_while_its_column_is_kept() -> None:
    """The direction of a dropped output has the wrong shape: nobody looks at it."""
    frame = pd.DataFrame({"v": object_series([np.ones(3), np.ones(3)]), "w": object_series([np.ones(2), np.ones(2)])})
    lazy = dg.derivatives(in_equal_parts(frame, 1), lambda v: (v**2).sum(), {"value": (), "d": dg.dot("v", "w")})
    assert lazy["value"].compute().tolist() == [3, 3]
    with pytest.raises(dg.RowError, match="direction"):
        lazy["d"].compute()


# --- dtypes ---------------------------------------------------------------------------------------------------

DTYPES = {
    "float32": (pd.Series([1.0, 2.0], dtype="float32"), "float32"),
    "float64": (pd.Series([1.0, 2.0]), "float64"),
    "Float32": (pd.Series([1.0, None], dtype="Float32"), "Float32"),
    "Float64": (pd.Series([1.0, None], dtype="Float64"), "Float64"),
    "int8": (pd.Series([1, 2], dtype="int8"), "float64"),
    "Int64": (pd.Series([1, None], dtype="Int64"), "Float64"),
    "arrow double": (pd.Series([1.0, None], dtype="double[pyarrow]"), "double[pyarrow]"),
    "arrow float": (pd.Series([1.0, 2.0], dtype="float[pyarrow]"), "float[pyarrow]"),
    "arrow int": (pd.Series([1, 2], dtype="int32[pyarrow]"), "double[pyarrow]"),
    "object": (object_series([1.0, 2.0]).reset_index(drop=True), "object"),
}


@pytest.mark.parametrize("kind", sorted(DTYPES))
@pytest.mark.parametrize("engine", BOTH)
def test_dtypes_declared_are_computed(kind: str, engine: str) -> None:
    """A first order has its argument's dtype, and every number beside it what the lazy frame said."""
    column, dtype = DTYPES[kind]
    frame = pd.DataFrame({"x": column, "v": object_series([np.ones(2), np.ones(2)]).to_numpy()})
    wanted = {
        "value": (),
        "x": "x",
        "v": "v",
        "xx": ("x", "x"),
        "xv": ("x", "v"),
        "vv": ("v", "v"),
        "norm": dg.norm(["x", "v"]),
        "dot": dg.dot("v", 2.0),
        "project": dg.project("v", 2),
        "aux": dg.aux("extra"),
        "problem": dg.problem,
    }

    def fn(x: Tensor, v: Tensor) -> Any:
        return x**2 * (v**2).sum(), {"extra": x + 1}

    local = dg.derivatives(frame, fn, wanted, engine=engine)
    assert local["x"].dtype == pd.Series([], dtype=dtype).dtype
    lazy = computed(dg.derivatives(partitioned(frame, [(0, 0), (0, 1), (1, 2)]), fn, wanted, engine=engine))
    pd.testing.assert_frame_equal(lazy, local)
    numbers = {"x": 4.0, "xx": 4.0, "value": 2.0, "norm": np.sqrt(24.0), "dot": 8.0, "aux": 2.0}
    assert {name: float(local[name].iloc[0]) for name in numbers} == pytest.approx(numbers, rel=1e-6)
    assert_cells([local["xv"].iloc[0], local["vv"].iloc[0]], [np.full(2, 4.0), 2 * np.eye(2)], rtol=1e-6)


# --- Jacobians: by columns, by rows, at once, and never wrong -------------------------------------------------


def matrix_rows(rows: int, length: int) -> pd.DataFrame:
    return pd.DataFrame({"v": object_series(list(np.random.default_rng(3).standard_normal((rows, length)))).to_numpy()})


@pytest.mark.parametrize(("out", "inp"), [(40, 5), (5, 40), (12, 12), (1, 9), (3, 1)])
@pytest.mark.parametrize("engine", BOTH)
def test_jacobians_of_every_shape(out: int, inp: int, engine: str) -> None:
    W = torch.randn(out, inp, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    frame = matrix_rows(5, inp)
    got = dg.derivatives(frame, lambda v: W @ torch.tanh(v), {"j": "v"}, engine=engine)
    right = [W.numpy() * (1 - np.tanh(v) ** 2) for v in frame["v"]]
    assert_cells(list(got["j"]), right if out > 1 else [r[0] for r in right], rtol=1e-12)


class Cut(torch.autograd.Function):
    """exp, with a backward pass whose own derivative is wrong: it forgets what it multiplies by."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return Forgetful.apply(grad) * x.exp()


class Forgetful(torch.autograd.Function):
    """The identity whose derivative is claimed to be 0.5."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.5


class Once(torch.autograd.Function):
    """exp with a backward pass that can not be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.exp()


class Detached(torch.autograd.Function):
    """exp with a backward pass that leaves torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.as_tensor(grad.detach().numpy() * np.exp(x.detach().numpy()))


@pytest.mark.parametrize("exp", [Cut.apply, Once.apply, Detached.apply])
@pytest.mark.parametrize(("out", "inp"), [(17, 3), (3, 17)])
@pytest.mark.parametrize("engine", BOTH)
def test_a_custom_backward_that_can_not_be_differentiated(exp: Any, out: int, inp: int, engine: str) -> None:
    """By columns it would be wrong or refused: it falls back to the rows."""
    W = torch.randn(out, inp, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    frame = matrix_rows(4, inp)
    with slower_is_fine():
        got = dg.derivatives(frame, lambda v: W @ exp(v), {"j": "v"}, engine=engine)
    assert_cells(list(got["j"]), [W.numpy() * np.exp(v) for v in frame["v"]], rtol=1e-12)


@pytest.mark.parametrize("engine", BOTH)
def test_zero_times_infinity_in_a_tall_jacobian(engine: str) -> None:
    """What `where` does not take still gives nan at 0, as torch has it row by row: by columns the 0 would hide it."""
    spread = torch.linspace(1, 2, 9, dtype=torch.float64)

    def fn(v: Tensor) -> Tensor:
        return spread * torch.where(v.sum() > 0, (v**2).sum().sqrt(), v.sum() ** 2)

    rows = [np.array([0.5, 2.0]), np.array([-1.0, 1.0]), np.array([0.0, 0.0])]
    leaves = [torch.from_numpy(row).requires_grad_() for row in rows]
    right = [np.stack([torch.autograd.grad(out, leaf, retain_graph=True)[0].numpy() for out in fn(leaf)]) for leaf in leaves]
    assert np.isnan(right[-1]).all()
    got = dg.derivatives(pd.DataFrame({"v": object_series(rows)}), fn, {"j": "v"}, engine=engine)["j"]
    for cell, want in zip(got, right, strict=True):
        np.testing.assert_allclose(cell, want, rtol=1e-12)


@pytest.mark.parametrize("engine", BOTH)
def test_a_second_order_that_torch_refuses_names_the_row(engine: str) -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0]}, index=["a", "b"])
    with slower_is_fine(), pytest.raises(dg.RowError, match="'a'") as raised:
        dg.derivatives(frame, lambda x: Once.apply(x), {"xx": ("x", "x")}, engine=engine)
    assert "once_differentiable" in str(raised.value.__cause__)
    with slower_is_fine():
        first = dg.derivatives(frame, lambda x: Once.apply(x), {"x": "x"}, engine=engine)
    assert_cells(list(first["x"]), list(np.exp([1.0, 2.0])), rtol=1e-12)


class HalfDetached(torch.autograd.Function):
    """x³ whose backward pass keeps a graph for what comes in alone: by itself the second order would be 0, times x half of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.detach() ** 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.as_tensor(3 * np.asarray(x.detach()) ** 2)


@pytest.mark.parametrize("fn", [Detached.apply, HalfDetached.apply, lambda x: HalfDetached.apply(x) * x])
@pytest.mark.parametrize("engine", BOTH)
def test_a_second_order_through_numpy_is_refused(fn: Any, engine: str) -> None:
    """A backward pass that computes in NumPy records no graph: the second order would be wrong in silence."""
    frame = pd.DataFrame({"x": [1.0, 2.0]}, index=["a", "b"])
    with slower_is_fine(), pytest.raises(dg.RowError, match="'a'") as raised:
        dg.derivatives(frame, lambda x: fn(x), {"xx": ("x", "x")}, engine=engine)
    assert "takes numbers out of torch" in str(raised.value.__cause__)
    with slower_is_fine():
        dg.derivatives(frame, lambda x: fn(x), {"x": "x"}, engine=engine)


class Gate(torch.autograd.Function):
    """relu by hand, as many are written: its second order is 0, and numbers that are no floats may leave torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.as_tensor((x > 0).numpy())


@pytest.mark.parametrize("engine", BOTH)
def test_a_second_order_that_is_zero_by_right_stays(engine: str) -> None:
    frame = pd.DataFrame({"x": [-1.0, 2.0]})
    with slower_is_fine():
        got = dg.derivatives(frame, lambda x: Gate.apply(x) * x, {"x": "x", "xx": ("x", "x")}, engine=engine)
    assert_cells(list(got["x"]), [0.0, 4.0])
    assert_cells(list(got["xx"]), [0.0, 2.0])


def test_a_wrong_batching_rule_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a Jacobian at once are believed only where they equal a product that was made the usual way."""
    from daskgrad import _autograd

    real = _autograd._batched_grad
    seen = []

    def wrong(*arguments: Any) -> Any:
        seen.append(True)
        return [made.roll(1, 0) for made in real(*arguments)]

    monkeypatch.setattr(_autograd, "_batched_grad", wrong)
    for out, inp in ((5, 40), (40, 5)):
        W = torch.randn(out, inp, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        frame = matrix_rows(4, inp)
        got = dg.derivatives(frame, lambda v, W=W: W @ torch.tanh(v), {"j": "v"})
        assert_cells(list(got["j"]), [W.numpy() * (1 - np.tanh(v) ** 2) for v in frame["v"]], rtol=1e-12)
    assert len(seen) == 2


def test_the_rows_of_a_batch_are_chosen_by_the_size_of_the_jacobian() -> None:
    """A row's Jacobian may be far larger than all that its forward pass holds: memory stays bounded."""
    spread = torch.linspace(1, 2, 4096, dtype=torch.float64)
    said = str(dg.explain(matrix_rows(70, 64), lambda v: spread * v.sum(), {"j": "v"}))
    batch = next(line for line in said.splitlines() if line.strip().startswith("batch"))
    assert int(batch.split("up to ")[1].split()[0].replace(",", "")) <= 128


# --- every carrier and form -----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", BOTH)
def test_static_missing_and_aux(engine: str) -> None:
    frame = pd.DataFrame({"kind": ["up", "down", "up"], "x": pd.Series([2.0, 3.0, None], dtype="Float64")})

    def fn(kind: str, x: Tensor) -> Any:
        value = x**2 if kind == "up" else x**3
        return value, {"root": x.sqrt(), "both": torch.stack([x, value])}

    wanted = {"slope": "x", "bend": ("x", "x"), "root": dg.aux("root"), "both": dg.aux("both", array=True)}
    got = dg.derivatives(frame, fn, wanted, engine=engine)
    assert_cells(list(got["slope"].array), [4.0, 27.0, None])
    assert_cells(list(got["bend"].array), [2.0, 18.0, None])
    assert_cells(list(got["root"].array), [2**0.5, 3**0.5, None])
    assert_cells(list(got["both"].array), [np.array([2.0, 4.0]), np.array([3.0, 27.0]), None])
    with pytest.raises(dg.RowError, match="nowhere"):
        dg.derivatives(frame, fn, {"n": dg.aux("nowhere")}, engine=engine)


def test_a_bag_and_a_series() -> None:
    wanted = {"value": (), "slope": "x", "bend": ("x", "x")}
    bag = computed(dg.derivatives(bag_of([{"x": 2.0}, {"x": None}, {"x": 3.0}], 2), lambda x: x**3, wanted))
    assert_cells(list(bag["bend"]), [12.0, None, 18.0])
    series = dg.derivatives(pd.Series([2.0, 3.0], name="x", index=["a", "b"]), lambda x: x**3, wanted)
    assert series.loc["b"].tolist() == [27.0, 27.0, 18.0]


@pytest.mark.parametrize("engine", BOTH)
def test_stacked_columns_give_one_array_column(engine: str) -> None:
    frame = pd.DataFrame(np.random.default_rng(0).standard_normal((4, 3)), columns=["a", "b", "c"])
    wanted = {"g": "v", "h": ("v", "v"), "n": dg.norm("v")}
    got = dg.derivatives(frame, lambda v: (v**3).sum(), wanted, inputs={"v": ["a", "b", "c"]}, engine=engine)
    rows = frame.to_numpy()
    assert_cells(list(got["g"]), list(3 * rows**2), rtol=1e-12)
    assert_cells(list(got["h"]), [np.diag(6 * row) for row in rows], rtol=1e-12)
    assert_cells(list(got["n"]), list(np.linalg.norm(3 * rows**2, axis=1)), rtol=1e-12)


@pytest.mark.parametrize("engine", BOTH)
def test_slopes_of_a_logistic_function_with_interaction(engine: str) -> None:
    """As marginal effects are reported: p = σ(a + b·x + c·d + e·x·d), dp/dx = p(1-p)(b + e·d), and its cross derivative."""
    a, b, c, e = 0.3, -0.7, 1.1, 0.45
    rng = np.random.default_rng(4)
    frame = pd.DataFrame({"x": rng.normal(0, 2, 50), "d": rng.integers(0, 3, 50)})

    def p(x: Tensor, d: Tensor) -> Tensor:
        return torch.sigmoid(a + b * x + c * d + e * x * d)

    got = dg.derivatives(frame, p, {"p": (), "x": "x", "xx": ("x", "x"), "xd": ("x", "d")}, engine=engine)
    x, d = frame["x"], frame["d"]
    q = 1 / (1 + np.exp(-(a + b * x + c * d + e * x * d)))
    s, bx, bd = q * (1 - q), b + e * d, c + e * x
    right = {"p": q, "x": s * bx, "xx": s * (1 - 2 * q) * bx**2, "xd": s * (1 - 2 * q) * bx * bd + s * e}
    for name, column in right.items():
        np.testing.assert_allclose(got[name], column, rtol=1e-10, atol=1e-14, err_msg=name)


def test_arrow_lists_ragged_hessians() -> None:
    lists = pd.Series(pd.arrays.ArrowExtensionArray(pa.array([[1.0, 2.0], None, [3.0]])))
    got = dg.derivatives(pd.DataFrame({"v": lists}), lambda v: v.prod() ** 2, {"g": "v", "h": ("v", "v"), "n": dg.norm("v")})
    assert_cells(list(got["g"].array), [np.array([8.0, 4.0]), None, np.array([6.0])])
    assert_cells(list(got["h"].array), [np.array([[8.0, 8.0], [8.0, 2.0]]), None, np.array([[2.0]])])
    assert_cells(list(got["n"].array), [80**0.5, None, 6.0])


@pytest.mark.parametrize(
    "wanted",
    [{}, {"a": 3}, {"a": ["x"]}, {"a": ("x", 3)}, {"a": "nowhere"}, [], {"a": dg.norm("nowhere")}, {"a": ("x", dg.dot("x", "nowhere"))}],
)
def test_wishes_that_make_no_sense_fail_at_the_call(wanted: Any) -> None:
    for data in (THREE, in_equal_parts(THREE, 2)):
        with pytest.raises(dg.PlanError):
            dg.derivatives(data, mixed, wanted)


@pytest.mark.parametrize("make", [lambda: dg.norm([]), lambda: dg.norm({}), lambda: dg.project("x", 0), lambda: dg.dot("x", object())])
def test_reductions_that_make_no_sense(make: Callable[[], Any]) -> None:
    with pytest.raises(dg.PlanError):
        make()
