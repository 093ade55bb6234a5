"""Cases from several fields: option prices, implied volatility, matrices, the size of a result."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import oracle
import pandas as pd
import pytest
import torch
from compare import (
    CARRIERS,
    ENGINES,
    assert_cells,
    assert_column,
    in_equal_parts,
    object_series,
    on_carrier,
    slower_is_fine,
)
from oracle import call_greeks, price_call

import daskgrad as dg

Tensor = torch.Tensor
BOTH = ("auto", "loop")
AT_THE_MONEY = {"spot": 100.0, "strike": 100.0, "vol": 0.2, "rate": 0.05, "expiry": 1.0}
STATED = {"spot": 0.636831, "strike": -0.532325, "expiry": 6.414028, "rate": 53.232482, "vol": 37.524035}

GREEKS: dict[str, tuple[str, ...]] = {
    "value": (),
    "delta": ("spot",),
    "vega": ("vol",),
    "rho": ("rate",),
    "by_strike": ("strike",),
    "by_expiry": ("expiry",),
    "gamma": ("spot", "spot"),
    "vanna": ("spot", "vol"),
    "volga": ("vol", "vol"),
    "charm": ("spot", "expiry"),
    "speed": ("spot", "spot", "spot"),
}


def book(rows: int = 60) -> pd.DataFrame:
    """Options deep in and out of the money, short and long expiries; seeded."""
    rng = np.random.default_rng(5)
    return pd.DataFrame(
        {
            "spot": rng.uniform(40, 200, rows),
            "strike": rng.uniform(60, 160, rows),
            "vol": rng.uniform(0.1, 0.6, rows),
            "rate": rng.uniform(-0.01, 0.08, rows),
            "expiry": np.concatenate([rng.uniform(0.02, 0.1, rows // 2), rng.uniform(0.1, 5, rows - rows // 2)]),
        }
    )


# --- e01: Black-Scholes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_case_e01_first_order(engine: str, carrier: str) -> None:
    frame = pd.DataFrame([AT_THE_MONEY, AT_THE_MONEY])
    names = list(STATED)
    got = on_carrier(carrier, frame, lambda data: dg.grad_column(data, price_call, names, engine=engine))
    assert list(got.columns) == names
    for name in names:
        assert_cells(list(got[name]), [STATED[name]] * 2, rtol=0, atol=5.1e-7)
        assert_cells(list(got[name]), [call_by(name)] * 2, rtol=1e-12)


def call_by(name: str) -> float:
    """The closed form of the derivative by this argument, at the money."""
    greek = {"spot": "delta", "strike": "by_strike", "expiry": "by_expiry", "rate": "rho", "vol": "vega"}[name]
    return call_greeks(**AT_THE_MONEY)[greek]


@pytest.mark.parametrize("engine", ENGINES)
def test_case_e01_gamma(engine: str) -> None:
    got = dg.derivatives(pd.DataFrame([AT_THE_MONEY]), price_call, {"gamma": ("spot", "spot")}, engine=engine)
    assert_cells(list(got["gamma"]), [0.018762], rtol=0, atol=5.1e-7)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_case_e01_every_greek_to_third_order_in_one_pass(engine: str, carrier: str) -> None:
    """Equal to closed forms to 1e-10 over a book that spans the moneyness and the expiries."""
    frame = book()
    got = on_carrier(carrier, frame, lambda data: dg.derivatives(data, price_call, GREEKS, engine=engine))
    assert list(got.columns) == list(GREEKS)
    closed = [call_greeks(**row) for row in frame.to_dict("records")]
    for name in GREEKS:
        assert_column(got[name], [row[name] for row in closed], name=name, dtype=np.dtype("float64"), index=frame.index)


# John C. Hull, Options, Futures, and Other Derivatives, chapter "The Greek letters": a stock at 49, strike 50, rate 5 %,
# volatility 20 %, 20 weeks; the printed values have three or four digits.
HULL = {"spot": 49.0, "strike": 50.0, "rate": 0.05, "vol": 0.2, "expiry": 0.3846}
HULL_TABLE = {
    "value": (2.40, 5e-3),
    "delta": (0.522, 5e-4),
    "gamma": (0.066, 5e-4),
    "vega": (12.1, 5e-2),
    "rho": (8.91, 5e-3),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_textbook_table(engine: str) -> None:
    got = dg.derivatives(pd.DataFrame([HULL]), price_call, {name: GREEKS[name] for name in HULL_TABLE}, engine=engine)
    for name, (printed, half_digit) in HULL_TABLE.items():
        assert_cells(list(got[name]), [printed], rtol=0, atol=half_digit)


def price_option(kind: str, spot: Tensor, strike: Tensor, vol: Tensor, rate: Tensor, expiry: Tensor) -> Tensor:
    call = price_call(spot, strike, vol, rate, expiry)
    if kind == "call":
        return call
    return call - spot + strike * torch.exp(-rate * expiry)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_calls_and_puts_in_one_function(engine: str, carrier: str) -> None:
    """A text column and a plain ``if``: a put's delta is the call's less one."""
    frame = book(20)
    frame["kind"] = ["call", "put", "put", "call"] * 5
    got = on_carrier(carrier, frame, lambda data: dg.grad_column(data, price_option, "spot", engine=engine))
    closed = [call_greeks(**{k: row[k] for k in AT_THE_MONEY})["delta"] - (row["kind"] == "put") for row in frame.to_dict("records")]
    assert_column(got, closed, name="spot", dtype=np.dtype("float64"), index=frame.index)


# --- e04: implied volatility --------------------------------------------------------------------------------


def implied_vol(price: Tensor) -> Tensor:
    """Newton's steps until the price is met, for the option at the money."""
    vol = torch.tensor(0.3)
    for _ in range(60):
        gap = price_call(torch.tensor(100.0), torch.tensor(100.0), vol, torch.tensor(0.05), torch.tensor(1.0)) - price
        d1 = (0.05 + vol**2 / 2) / vol
        step = gap / (100 * torch.exp(-(d1**2) / 2) / math.sqrt(2 * math.pi))
        vol = vol - step
        if abs(step) < 1e-9:
            # One more step: its derivative is exact to second order.
            gap = price_call(torch.tensor(100.0), torch.tensor(100.0), vol, torch.tensor(0.05), torch.tensor(1.0)) - price
            d1 = (0.05 + vol**2 / 2) / vol
            return vol - gap / (100 * torch.exp(-(d1**2) / 2) / math.sqrt(2 * math.pi))
        if not vol > 0:
            raise ValueError("no volatility gives this price")
    raise ValueError("no volatility gives this price")


@pytest.mark.parametrize("engine", BOTH)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_case_e04_implied_volatility(engine: str, carrier: str) -> None:
    true_vols = [0.2, 0.15, 0.35, 0.6] * 10
    prices = [call_greeks(**{**AT_THE_MONEY, "vol": vol})["value"] for vol in true_vols]
    slopes = [1 / call_greeks(**{**AT_THE_MONEY, "vol": vol})["vega"] for vol in true_vols]
    frame = pd.DataFrame({"price": prices})
    with slower_is_fine():
        got = on_carrier(carrier, frame, lambda data: dg.grad_column(data, implied_vol, engine=engine))
    assert_cells(list(got), slopes, rtol=1e-9)
    assert_cells([got.iloc[0]], [0.026650], rtol=0, atol=5.1e-7)


@pytest.mark.parametrize("engine", BOTH)
def test_case_e04_a_row_without_a_solution_is_flagged(engine: str) -> None:
    fair = call_greeks(**AT_THE_MONEY)["value"]
    labels = ["p", "q", *(f"r{n}" for n in range(30))]
    frame = pd.DataFrame({"price": [fair, 4.0, *[fair] * 30]}, index=labels)  # 4.0 is below the price at zero volatility
    with slower_is_fine():
        got = dg.derivatives(frame, implied_vol, {"slope": "price", "problem": dg.problem}, engine=engine)
    assert_cells(list(got["slope"]), [0.026650, None, *[0.026650] * 30], rtol=0, atol=5.1e-7)
    assert [pd.isna(text) for text in got["problem"]] == [True, False] + [True] * 30
    with slower_is_fine(), pytest.raises(dg.RowError) as raised:
        dg.grad_column(frame, implied_vol, engine=engine)
    assert raised.value.label == "q"


# --- e05-like: a logistic function with interaction ---------------------------------------------------------


def logistic(x: Tensor, z: Tensor) -> Tensor:
    return torch.sigmoid(0.2 + 0.7 * x - 0.4 * z + 0.9 * x * z)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_marginal_effects_of_a_logistic_function_with_interaction(engine: str, carrier: str) -> None:
    """Ai and Norton (2003): the interaction effect is the cross derivative, not the coefficient times the density."""
    frame = pd.DataFrame({"x": [0.0, 1.0, -2.0], "z": [0.5, -1.0, 2.0]})
    wanted = {"by_x": "x", "by_z": "z", "interaction": ("x", "z")}
    got = on_carrier(carrier, frame, lambda data: dg.derivatives(data, logistic, wanted, engine=engine))
    for place, (x, z) in enumerate(zip(frame["x"], frame["z"], strict=True)):
        p = 1 / (1 + math.exp(-(0.2 + 0.7 * x - 0.4 * z + 0.9 * x * z)))
        slope_x, slope_z, density = 0.7 + 0.9 * z, -0.4 + 0.9 * x, p * (1 - p)
        closed = [density * slope_x, density * slope_z, density * (0.9 + (1 - 2 * p) * slope_x * slope_z)]
        assert_cells(got.iloc[place].tolist(), closed, rtol=1e-12)


# --- e07: matrices in cells ---------------------------------------------------------------------------------


MATRIX_FUNCTIONS: dict[str, Any] = {
    "A[1,1]**2": lambda A: A[1, 1] ** 2,
    "trace": lambda A: torch.trace(A @ A),
    "log det": lambda A: torch.logdet(A @ A.T + torch.eye(3)),
    "solve": lambda A: torch.linalg.solve(A @ A.T + torch.eye(3), torch.ones(3)).sum(),
    "norm": lambda A: torch.linalg.norm(A),
}


@pytest.mark.parametrize("kind", sorted(MATRIX_FUNCTIONS))
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_case_e07_matrix_cells(kind: str, engine: str, carrier: str) -> None:
    cells = list(np.random.default_rng(0).normal(size=(4, 3, 3)))
    frame = pd.DataFrame({"A": object_series(cells)})
    got = on_carrier(carrier, frame, lambda data: dg.grad_column(data, MATRIX_FUNCTIONS[kind], engine=engine))
    assert_column(
        got,
        oracle.gradient([{"A": c} for c in cells], MATRIX_FUNCTIONS[kind], "A"),
        name="A",
        dtype=np.dtype(object),
        index=frame.index,
    )
    if kind == "A[1,1]**2":
        for cell, gradient in zip(cells, got, strict=True):
            expected = np.zeros((3, 3))
            expected[1, 1] = 2 * cell[1, 1]
            assert_cells([gradient], [expected])


@pytest.mark.parametrize("engine", ENGINES)
def test_hessians_of_matrix_cells(engine: str) -> None:
    """Where forward mode under vmap is silently wrong."""
    cells = list(np.random.default_rng(0).normal(size=(3, 2, 2)))
    rows = [{"A": cell} for cell in cells]

    def fn(A: Tensor) -> Tensor:
        return torch.logdet(A @ A.T + torch.eye(2)) + torch.linalg.det(A)

    with slower_is_fine():
        got = dg.derivatives(pd.DataFrame({"A": object_series(cells)}), fn, {"h": ("A", "A")}, engine=engine)
    assert_cells(list(got["h"]), oracle.derivative(rows, fn, ("A", "A")))


# --- e08: the size of a result ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["shared", "closed over"])
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_case_e08_a_result_column_is_only_numbers(way: str, carrier: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 50_000), torch.nn.Linear(50_000, 1)).double()
    rows = 1000
    frame = pd.DataFrame({"x": np.linspace(0, 1, rows), "other": ["text " * 20] * rows})
    fn: Any = (lambda x, m: m(x.reshape(1)).sum()) if way == "shared" else (lambda x: model(x.reshape(1)).sum())
    shared = {"m": model} if way == "shared" else None
    got = on_carrier(carrier, frame, lambda data: dg.grad_column(data, fn, shared=shared))
    assert len(pickle.dumps(got)) < 8 * rows + len(pickle.dumps(frame.index)) + 8 * rows + 2000
    assert not hasattr(got, "grad_fn")
    assert got.attrs == {}


def test_case_e08_array_cells_do_not_hold_their_batch() -> None:
    """A cell that is a view would pickle alone as itself, but keep the whole batch in memory."""
    frame = pd.DataFrame({"v": object_series([np.ones(4)] * 1000)})
    got = dg.grad_column(frame, lambda v: (v**2).sum())
    assert len(pickle.dumps(got.iloc[:1])) < 2000


def test_lazy_and_eager_books_agree() -> None:
    frame = book(200)
    eager = dg.grad_column(frame, price_call, ["spot", "vol"])
    lazy = dg.grad_column(in_equal_parts(frame, 4), price_call, ["spot", "vol"]).compute(scheduler="threads")
    pd.testing.assert_frame_equal(lazy, eager, rtol=1e-12)
