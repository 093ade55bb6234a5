"""Cases from the field about row functions: control flow, cuts, layers, random draws, kinks, what comes back."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from pathlib import Path
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
    bag_of,
    computed,
    in_equal_parts,
    object_series,
    on_carrier,
    run_script,
    slower_is_fine,
    values_of,
)
from torch.nn import functional as F

import daskgrad as dg

Tensor = torch.Tensor
BOTH = ("auto", "loop")  # engines for functions that a batch alone cannot run
MANY = 16  # a few rows may be looped at once: repeated so often they are worth a batch


def column(values: Any, name: str = "x") -> pd.DataFrame:
    return pd.DataFrame({name: values})


def rows_of(values: Any, name: str = "x") -> list[dict[str, Any]]:
    return [{name: value} for value in values]


def line_of(fn: Callable[..., Any], text: str) -> int:
    """The line of ``fn``'s file that holds ``text``."""
    code = fn.__code__
    lines = Path(code.co_filename).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if n >= code.co_firstlineno and text in line)


# --- b01: branches by value ---------------------------------------------------------------------------------


def branch_expression(x: Tensor) -> Tensor:
    return x**3 if x > 0 else -x


def branch_statement(x: Tensor) -> Tensor:
    if x > 0:
        return x**3
    return -x


def branch_and_or(x: Tensor) -> Tensor:
    return x**3 if (x > 0 and x < 100) or x > 200 else -x


def branch_any(x: Tensor) -> Tensor:
    return x**3 if bool((x * torch.ones(3) > 0).any()) else -x


def branch_elif(x: Tensor) -> Tensor:
    if x < -1:
        y = -x
    elif x <= 0:
        y = -1.0 * x
    else:
        y = x * x * x
    return y


@pytest.mark.parametrize("fn", [branch_expression, branch_statement, branch_and_or, branch_any, branch_elif])
@pytest.mark.parametrize("engine", BOTH)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_case_b01_branches_by_value(fn: Any, engine: str, carrier: str) -> None:
    frame = column([-2.0, 0.0, 3.0] * MANY)
    with slower_is_fine():
        got = on_carrier(carrier, frame, lambda data: dg.grad_column(data, fn, engine=engine))
    assert_column(got, [-1.0, -1.0, 27.0] * MANY, name="x", dtype=np.dtype("float64"), index=frame.index)


def test_case_b01_batched() -> None:
    """Branches run as batches: far fewer calls than rows, and nothing slower to warn about."""
    calls: list[int] = []

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        return x**3 if x > 0 else -x

    values = np.tile([-2.0, 0.0, 3.0], 2000)
    with warnings.catch_warnings():
        warnings.simplefilter("error", dg.EngineWarning)
        got = dg.grad_column(column(values), fn)
    assert_cells(list(got), np.tile([-1.0, -1.0, 27.0], 2000))
    assert len(calls) < 100


def newton_root(x: Tensor) -> Tensor:
    guess = x.clone()
    while (guess * guess - x).abs() > 1e-13 * x:
        guess = (guess + x / guess) / 2
    return guess


def halved(x: Tensor) -> Tensor:
    n = 0
    while x > 1:
        x = x / 2
        n += 1
    return x * (n + 1)


def powers(x: Tensor) -> Tensor:
    total = x * 0
    for k in range(int(x)):
        total = total + x**k
    return total + x


def python_max(x: Tensor) -> Tensor:
    return max(x * x, 2 * x + 1.01)


def guarded(x: Tensor) -> Tensor:
    assert x > 0
    return torch.log(x)


@pytest.mark.parametrize("fn", [halved, powers, python_max, guarded])
@pytest.mark.parametrize("engine", BOTH)
@pytest.mark.parametrize("batch_size", [None, 1, 7])
def test_loops_and_early_ends_by_value(fn: Any, engine: str, batch_size: int | None) -> None:
    values = [0.3, 1.7, 2.5, 9.9, 33.3] * MANY
    with slower_is_fine():
        got = dg.grad_column(column(values), fn, engine=engine, batch_size=batch_size)
    assert_cells(list(got), oracle.gradient(rows_of(values), fn, "x"))


@pytest.mark.parametrize("engine", BOTH)
def test_a_loop_until_converged(engine: str) -> None:
    """The derivative of the converged root; the number of steps is decided by rounding, so compare with mathematics."""
    values = [0.3, 2.0, 5.0, 1e4] * MANY
    with slower_is_fine():
        got = dg.grad_column(column(values), newton_root, engine=engine)
    assert_cells(list(got), [0.5 / math.sqrt(v) for v in values], rtol=1e-6)


# --- b02: a differentiated value leaves torch ---------------------------------------------------------------


def cut_math_exp(x: Tensor) -> Tensor:
    return x * math.exp(x)  # cut


def cut_float(x: Tensor) -> Tensor:
    return x * float(x)  # cut


def cut_item(x: Tensor) -> Tensor:
    scale = x.item()  # cut
    return x * scale


def cut_percent(x: Tensor) -> Tensor:
    return x * len("%f" % x)  # cut # noqa: UP031


def cut_numpy_function(x: Tensor) -> Tensor:
    return x * float(np.exp(x.numpy()))  # cut


def cut_torch_tensor(x: Tensor) -> Tensor:
    return x * torch.tensor(x)  # cut


def cut_list_in_tensor(x: Tensor) -> Tensor:
    return (x * torch.tensor([x, 2 * x])).sum()  # cut


def cut_new_tensor(x: Tensor) -> Tensor:
    return x * x.new_tensor(x)  # cut


def cut_tolist(x: Tensor) -> Tensor:
    return x * x.reshape(1).tolist()[0]  # cut


def cut_in_a_comparison(x: Tensor) -> Tensor:
    if float(x) > 0:  # cut
        return x * x
    return -x


def cut_item_in_a_comparison(x: Tensor) -> Tensor:
    return x * x if x.item() > 0 else -x  # cut


def cut_of_a_later_value(x: Tensor) -> Tensor:
    y = torch.sin(x) + 2
    return x * math.log(y)  # cut


def cut_floor(x: Tensor) -> Tensor:
    return x * math.floor(x)  # cut


def cut_complex(x: Tensor) -> Tensor:
    return x * abs(complex(x))  # cut


def cut_linspace(x: Tensor) -> Tensor:
    return (x * torch.linspace(0, x, 3)).sum()  # cut


CUTS = [
    cut_math_exp,
    cut_float,
    cut_item,
    cut_percent,
    cut_numpy_function,
    cut_torch_tensor,
    cut_list_in_tensor,
    cut_new_tensor,
    cut_tolist,
    cut_in_a_comparison,
    cut_item_in_a_comparison,
    cut_of_a_later_value,
    cut_floor,
    cut_complex,
    cut_linspace,
]


@pytest.mark.parametrize("fn", CUTS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")  # torch's own advice on the user's line
def test_case_b02_a_cut_names_the_line(fn: Any, engine: str) -> None:
    with slower_is_fine(), pytest.raises(dg.GraphError) as raised:
        dg.grad_column(column([-2.0, 0.0, 3.0]), fn, engine=engine)
    text = str(raised.value)
    assert Path(__file__).name in text
    assert str(line_of(fn, "# cut")) in text


@pytest.mark.parametrize("carrier", sorted(CARRIERS))
@pytest.mark.parametrize("engine", ENGINES)
def test_case_b02_on_every_carrier(carrier: str, engine: str) -> None:
    frame = column([-2.0, 0.0, 3.0])
    with slower_is_fine(), pytest.raises(dg.GraphError, match=str(line_of(cut_math_exp, "# cut"))):
        on_carrier(carrier, frame, lambda data: dg.grad_column(data, cut_math_exp, engine=engine))


@pytest.mark.parametrize("engine", ENGINES)
def test_case_b02_done_right(engine: str) -> None:
    got = dg.grad_column(column([-2.0, 0.0, 3.0]), lambda x: x * torch.exp(x), engine=engine)
    assert_cells(list(got), [-math.exp(-2), 1.0, 4 * math.exp(3)])


@pytest.mark.parametrize("batch_size", [None, 1, 2])
@pytest.mark.parametrize("engine", ENGINES)
def test_case_b02_does_not_depend_on_the_batch(batch_size: int | None, engine: str) -> None:
    with slower_is_fine(), pytest.raises(dg.GraphError):
        dg.grad_column(column([-2.0, 0.0, 3.0]), cut_math_exp, engine=engine, batch_size=batch_size)


@pytest.mark.parametrize("engine", BOTH)
def test_case_b02_printing_and_formatting_are_allowed(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each row sees its own text."""

    def fn(x: Tensor) -> Tensor:
        print(x)
        text = f"{x:.1f} {x!r} {x}"
        scale = {"-2.0": 2.0, "0.0": 5.0}.get(text.split()[0], 7.0)
        return x * torch.exp(x) * scale

    with slower_is_fine():
        got = dg.grad_column(column([-2.0, 0.0, 3.0] * MANY), fn, engine=engine)
    assert_cells(list(got), [-2 * math.exp(-2), 5.0, 28 * math.exp(3)] * MANY)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["detach", "data", "no_grad", "detached item"])
def test_an_explicit_detach_is_obeyed(engine: str, kind: str) -> None:
    """x·exp(x) with the exponential held constant: its gradient is exp(x)."""

    def fn(x: Tensor) -> Tensor:
        if kind == "detach":
            return x * torch.exp(x.detach())
        if kind == "data":
            return x * torch.exp(x.data)
        if kind == "detached item":
            return x * torch.exp(x).detach()
        with torch.no_grad():
            held = torch.exp(x)
        return x * held

    got = dg.grad_column(column([-2.0, 0.0, 3.0]), fn, engine=engine)
    assert_cells(list(got), [math.exp(-2), 1.0, math.exp(3)])


@pytest.mark.parametrize("engine", BOTH)
def test_integers_taken_from_values_are_control_flow(engine: str) -> None:
    table = torch.tensor([1.0, 10.0, 100.0, 1000.0])

    def fn(x: Tensor, n: Tensor) -> Tensor:
        total = x * table[int(x)].double()
        for k in range(n):  # type: ignore[call-overload]
            total = total + x * k
        return total + x * table[n.item()].double()  # type: ignore[index]

    frame = pd.DataFrame({"x": [0.5, 1.5, 2.5] * MANY, "n": [0, 2, 3] * MANY})
    with slower_is_fine():
        got = dg.grad_column(frame, fn, engine=engine)
    assert_cells(list(got), [1 + 0 + 1.0, 10 + 1 + 100.0, 100 + 3 + 1000.0] * MANY)


# --- b03: everything cut ------------------------------------------------------------------------------------


def only_torch_tensor(x: Tensor) -> Tensor:
    return torch.tensor(x) ** 2


def only_detach(x: Tensor) -> Tensor:
    return x.detach() ** 2


def only_data(x: Tensor) -> Tensor:
    return x.data**2


def only_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x**2


def only_numpy(x: Tensor) -> Tensor:
    return torch.as_tensor(x.numpy() ** 2)


def only_comparison(x: Tensor) -> Tensor:
    return (x > 0).double() * torch.nn.Parameter(torch.ones((), dtype=torch.float64))


def only_constant(x: Tensor) -> Tensor:
    return torch.tensor(3.0)


def only_round_trip(x: Tensor) -> Tensor:
    return x.to(torch.int64).double() ** 2


@pytest.mark.parametrize(
    "fn",
    [
        only_torch_tensor,
        only_detach,
        only_data,
        only_no_grad,
        only_numpy,
        only_comparison,
        only_constant,
        only_round_trip,
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("batch_size", [None, 1])
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")  # torch's own advice on the user's line
def test_case_b03_no_path_is_a_graph_error(fn: Any, engine: str, batch_size: int | None) -> None:
    with slower_is_fine(), pytest.raises(dg.GraphError):
        dg.grad_column(column([-2.0, 0.0, 3.0]), fn, engine=engine, batch_size=batch_size)


@pytest.mark.parametrize("fn", [only_detach, only_data, only_no_grad, only_comparison, only_constant, only_round_trip])
@pytest.mark.parametrize("engine", ENGINES)
def test_case_b03_zeros_on_request(fn: Any, engine: str) -> None:
    got = dg.grad_column(column([-2.0, 0.0, 3.0]), fn, engine=engine, allow_unused=True)
    assert_cells(list(got), [0.0, 0.0, 0.0])


@pytest.mark.parametrize("engine", ENGINES)
def test_allow_unused_is_no_leave_for_a_cut(engine: str) -> None:
    with slower_is_fine(), pytest.raises(dg.GraphError):
        dg.grad_column(column([-2.0, 0.0, 3.0]), cut_math_exp, engine=engine, allow_unused=True)


# --- b04: an argument that does not reach -------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_case_b04_one_reached_argument_is_enough(engine: str, carrier: str) -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0, 6.0]})

    def fn(a: Tensor, b: Tensor) -> Tensor:
        return a**2

    got = on_carrier(carrier, frame, lambda data: dg.grad_column(data, fn, ["a", "b"], engine=engine))
    assert_column(got["a"], [2.0, 4.0, 6.0], name="a", dtype=np.dtype("float64"), index=frame.index)
    assert_column(got["b"], [0.0, 0.0, 0.0], name="b", dtype=np.dtype("float64"), index=frame.index)
    with slower_is_fine(), pytest.raises(dg.GraphError):
        on_carrier(carrier, frame, lambda data: dg.grad_column(data, fn, "b", engine=engine))
    zeros = on_carrier(carrier, frame, lambda data: dg.grad_column(data, fn, "b", engine=engine, allow_unused=True))
    assert_column(zeros, [0.0, 0.0, 0.0], name="b", dtype=np.dtype("float64"), index=frame.index)


@pytest.mark.parametrize("engine", ENGINES)
def test_case_b04_vectors_and_floats_keep_their_type(engine: str) -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0], "v": [np.ones(3), np.ones(3)], "f": np.array([1, 2], dtype="float32")})

    def fn(a: Tensor, v: Tensor, f: Tensor) -> Tensor:
        return a**2

    got = dg.grad_column(frame, fn, ["a", "v", "f"], engine=engine)
    assert_cells(list(got["v"]), [np.zeros(3), np.zeros(3)])
    assert got["f"].dtype == np.dtype("float32")


# --- b07: dropout and other draws ---------------------------------------------------------------------------


def dropout_half(x: Tensor) -> Tensor:
    return F.dropout(x * torch.ones(4), 0.5).sum()


def dropout_none(x: Tensor) -> Tensor:
    return F.dropout(x * torch.ones(4), 0.0).sum()


def bernoulli(x: Tensor) -> Tensor:
    return (x * torch.ones(4) * torch.bernoulli(torch.full((4,), 0.5))).sum()


def normal_noise(x: Tensor) -> Tensor:
    return x * torch.randn(())


def random_like(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


@pytest.mark.parametrize("fn", [dropout_half, bernoulli, normal_noise, random_like])
@pytest.mark.parametrize("engine", ENGINES)
def test_case_b07_randomness_is_refused_with_the_option_named(fn: Any, engine: str) -> None:
    with slower_is_fine(), pytest.raises(dg.DaskgradError, match="randomness"):
        dg.grad_column(column([1.0, 2.0]), fn, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_case_b07_different_draws_per_row(engine: str) -> None:
    got = set(dg.grad_column(column(np.ones(200)), dropout_half, engine=engine, randomness="different", seed=0))
    assert got <= {0.0, 2.0, 4.0, 6.0, 8.0}
    assert len(got) > 2


@pytest.mark.parametrize("engine", ENGINES)
def test_case_b07_no_probability_is_exact(engine: str) -> None:
    got = dg.grad_column(column([1.0, 2.0]), dropout_none, engine=engine, randomness="different", seed=0)
    assert list(got) == [4.0, 4.0]


# --- b08: one row has no batch ------------------------------------------------------------------------------

TRAIN_MODE = {
    "BatchNorm1d": lambda: torch.nn.BatchNorm1d(3),
    "BatchNorm2d": lambda: torch.nn.Sequential(torch.nn.Unflatten(1, (1, 1, 3)), torch.nn.BatchNorm2d(1), torch.nn.Flatten()),
    "inside a model": lambda: torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sequential(torch.nn.BatchNorm1d(3))),
    "without running statistics": lambda: torch.nn.BatchNorm1d(3, track_running_stats=False),
}


@pytest.mark.parametrize("kind", sorted(TRAIN_MODE))
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", ["shared", "closed over"])
def test_case_b08_batch_norm_in_train_mode_is_refused(kind: str, engine: str, way: str) -> None:
    model = TRAIN_MODE[kind]().double()
    frame = column([np.ones(3), np.arange(3.0)])
    fn: Any = lambda x, m=model: (m(x[None]) ** 2).sum()  # noqa: E731
    shared: Any = {"m": model}
    if way == "closed over":
        fn, shared = lambda x: (model(x[None]) ** 2).sum(), None
    with pytest.raises(dg.DaskgradError, match=r"eval\(\)"):
        dg.grad_column(frame, fn, shared=shared, engine=engine)


@pytest.mark.parametrize("kind", ["BatchNorm1d", "BatchNorm2d", "inside a model"])
@pytest.mark.parametrize("engine", ENGINES)
def test_case_b08_eval_mode_is_right(kind: str, engine: str) -> None:
    torch.manual_seed(0)
    model = TRAIN_MODE[kind]().double().eval()

    def fn(x: Tensor) -> Tensor:
        total: Tensor = (model(x[None]) ** 2).sum()
        return total

    cells = [np.ones(3), np.arange(3.0)]
    got = dg.grad_column(column(cells), fn, engine=engine)
    assert_cells(list(got), oracle.gradient(rows_of(cells), fn, "x"))


# --- b10, b11: recurrences and attention --------------------------------------------------------------------


def recurrences() -> dict[str, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    lstm, gru = torch.nn.LSTM(2, 3).double(), torch.nn.GRU(2, 3, num_layers=2).double()
    rnn, both_ways = torch.nn.RNN(2, 3).double(), torch.nn.LSTM(2, 3, bidirectional=True, batch_first=True).double()
    gru_cell, lstm_cell, rnn_cell = (
        torch.nn.GRUCell(2, 3).double(),
        torch.nn.LSTMCell(2, 3).double(),
        torch.nn.RNNCell(2, 3).double(),
    )

    def run_gru_cell(x: Tensor) -> Tensor:
        state = torch.zeros(3)
        for step in x:
            state = gru_cell(step, state)
        return (state**2).sum()

    def run_lstm_cell(x: Tensor) -> Tensor:
        state = (torch.zeros(3), torch.zeros(3))
        for step in x:
            state = lstm_cell(step, state)
        return state[0].sum()

    return {
        "LSTM": lambda x: (lstm(x)[0] ** 2).sum(),
        "GRU": lambda x: (gru(x)[0] ** 2).sum(),
        "RNN": lambda x: (rnn(x)[0] ** 2).sum(),
        "bidirectional LSTM with a batch axis": lambda x: (both_ways(x[None])[0] ** 2).sum(),
        "GRUCell": run_gru_cell,
        "LSTMCell": run_lstm_cell,
        "RNNCell": lambda x: rnn_cell(x[0]).sum() + rnn_cell(x[1]).sum(),
    }


@pytest.mark.parametrize("kind", sorted(recurrences()))
@pytest.mark.parametrize("engine", BOTH)
def test_case_b10_recurrent_layers(kind: str, engine: str) -> None:
    fn = recurrences()[kind]
    rng = np.random.default_rng(0)
    cells = [rng.normal(size=(4, 2)) for _ in range(20)]
    with slower_is_fine():
        got = dg.grad_column(pd.DataFrame({"x": object_series(cells)}), fn, engine=engine)
    assert_cells(list(got), oracle.gradient(rows_of(cells), fn, "x"), rtol=1e-12)


def attentions() -> dict[str, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(4, 2, batch_first=True).double().eval()
    encoder = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).double().eval()
    encoder_post = torch.nn.TransformerEncoderLayer(4, 2, 8, norm_first=True).double().eval()
    return {
        "MultiheadAttention": lambda x: (attention(x[None], x[None], x[None])[0] ** 2).sum(),
        "MultiheadAttention without weights": lambda x: attention(x, x, x, need_weights=False)[0].sum(),
        "encoder layer": lambda x: (encoder(x[None]) ** 3).sum(),
        "encoder layer, norm first": lambda x: (encoder_post(x) ** 3).sum(),
        "scaled_dot_product_attention": lambda x: (F.scaled_dot_product_attention(x[None], x[None], x[None]) ** 2).sum(),
        "causal": lambda x: (F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True) ** 2).sum(),
    }


@pytest.mark.parametrize("kind", sorted(attentions()))
@pytest.mark.parametrize("engine", BOTH)
def test_case_b11_attention(kind: str, engine: str) -> None:
    """The loop's value; torch's performance warnings become one line of ours, or none."""
    fn = attentions()[kind]
    rng = np.random.default_rng(0)
    cells = [rng.normal(size=(3, 4)) for _ in range(20)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        got = dg.grad_column(pd.DataFrame({"x": object_series(cells)}), fn, engine=engine, batch_size=10)
    assert [w for w in seen if not issubclass(w.category, dg.EngineWarning)] == []
    assert len(seen) <= 1
    assert_cells(list(got), oracle.gradient(rows_of(cells), fn, "x"), rtol=1e-12)


# --- b12: a custom Function without a vmap rule -------------------------------------------------------------


class Square(torch.autograd.Function):
    """The old form: forward takes ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class SquareWithSetup(Square):
    """The new form, still without a vmap rule."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)


class SquareThroughNumpy(Square):
    """What leaves torch inside a custom forward is the user's word."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.as_tensor(x.detach().numpy() ** 2)


class SquareInForward(torch.autograd.Function):
    """Computes the gradient in the forward pass, and only when it will be asked for, as torch's chunked losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(2 * x if ctx.needs_input_grad[0] else torch.zeros_like(x))
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (slope,) = ctx.saved_tensors
        return slope * grad


@pytest.mark.parametrize("function", [Square, SquareWithSetup, SquareThroughNumpy, SquareInForward])
@pytest.mark.parametrize("engine", BOTH)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_case_b12_custom_functions(function: Any, engine: str, carrier: str) -> None:
    frame = column([-2.0, 0.5, 3.0] * MANY)
    with slower_is_fine():
        got = on_carrier(carrier, frame, lambda data: dg.grad_column(data, lambda x: function.apply(x), engine=engine))
    assert_cells(list(got), [-4.0, 1.0, 6.0] * MANY)


@pytest.mark.parametrize("function", [Square, SquareWithSetup, SquareInForward])
def test_case_b12_the_vmap_engine_is_right_or_refuses(function: Any) -> None:
    """Never a silent wrong number: without a vmap rule, ``engine="vmap"`` gives 2x or an error."""
    try:
        got = dg.grad_column(column([-2.0, 0.5, 3.0] * MANY), lambda x: function.apply(x), engine="vmap")
    except dg.DaskgradError:
        return
    assert_cells(list(got), [-4.0, 1.0, 6.0] * MANY)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_function_sees_that_it_is_differentiated(engine: str) -> None:
    """``requires_grad`` inside the function is true in every engine, of what is differentiated alone."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return (x * x if x.requires_grad else x.detach() * 5) + (7 * x if y.requires_grad else 11 * x)

    frame = pd.DataFrame({"x": [1.0, 2.0] * MANY, "y": [1.0, 1.0] * MANY})
    assert_cells(list(dg.grad_column(frame, fn, "x", engine=engine)), [13.0, 15.0] * MANY)


@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_going_to_the_loop_is_said_once_per_call(carrier: str) -> None:
    """Section 6: once per call, not once per partition, with the reason."""
    frame = column(np.arange(6.0))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        got = on_carrier(carrier, frame, lambda data: dg.grad_column(data, lambda x: Square.apply(x), batch_size=1))
    assert_cells(list(got), list(2 * np.arange(6.0)))
    assert [w.category for w in seen].count(dg.EngineWarning) <= 1


def test_the_loop_is_announced() -> None:
    with pytest.warns(dg.EngineWarning):
        dg.grad_column(column(np.arange(200.0)), lambda x: Square.apply(x))


def test_checkpointing_works() -> None:
    from torch.utils.checkpoint import checkpoint

    def fn(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(lambda y: torch.sin(y) * y, x, use_reentrant=False)
        return out

    with slower_is_fine():
        got = dg.grad_column(column([0.5, 1.5]), fn)
    assert_cells(list(got), [math.sin(v) + v * math.cos(v) for v in (0.5, 1.5)])


# --- data-dependent sizes, buffers, in-place writes -----------------------------------------------


def masked(v: Tensor) -> Tensor:
    return (v[v > 0] ** 2).sum() + v.sum()


def nonzero(v: Tensor) -> Tensor:
    return (v[(v > 0.5).nonzero().squeeze(-1)] ** 3).sum() + v[0]


def unique(v: Tensor) -> Tensor:
    kinds = torch.unique(v.detach().round())  # torch has no derivative for unique itself
    return (v**2).sum() * len(kinds) + (v[0] * kinds).sum()


def mean_of_positive(v: Tensor) -> Tensor:
    chosen = v[v > 0]
    return chosen.mean() if len(chosen) else v.sum() * 0.5


def buffer_zeros(v: Tensor) -> Tensor:
    out = torch.zeros(3)
    out[0] = v[0] ** 2
    out[1] = v[1] ** 3
    return out.sum() + v[2]


def buffer_loop(v: Tensor) -> Tensor:
    out = torch.empty(len(v))
    for i in range(len(v)):
        out[i] = v[i] * (out[i - 1].clone() if i else 1.0)
    return out.sum()


def buffer_like(v: Tensor) -> Tensor:
    out = torch.full_like(v, 2.0)
    out[1:] = v[:-1] * 3
    out += v
    return (out**2).sum()


def write_into_the_argument(v: Tensor) -> Tensor:
    v[0] = v[1].clone() * v[2].clone()
    v.mul_(2.0)
    return (v**2).sum()


def clone_of_a_constant(v: Tensor) -> Tensor:
    base = torch.tensor([1.0, 2.0, 3.0]).clone()
    base[2] = v[2] * v[0]
    return (base * v).sum()


SCRATCH = torch.zeros(3, dtype=torch.float64)


def write_into_a_global(v: Tensor) -> Tensor:
    SCRATCH[0] = v[0] * v[1]
    return SCRATCH.sum()


def add_to_a_global(v: Tensor) -> Tensor:
    with torch.no_grad():
        SCRATCH.view(-1).add_(1.0)
    return SCRATCH[0] * v.sum()


def out_into_a_global(v: Tensor) -> Tensor:
    with torch.no_grad():
        torch.mul(v, 2.0, out=SCRATCH)
    return (SCRATCH * v).sum()


def accumulate_with_an_operator(v: Tensor) -> Tensor:
    ours = SCRATCH
    ours += v.detach()
    return (ours * v).sum()


@pytest.mark.parametrize("fn", [write_into_a_global, add_to_a_global, out_into_a_global, accumulate_with_an_operator])
@pytest.mark.parametrize("engine", ENGINES)
def test_writing_into_a_captured_tensor_is_refused_before_it_happens(fn: Any, engine: str) -> None:
    """Rows would see what others wrote, in nobody's order, and the caller's tensor would be another one afterwards."""
    frame = pd.DataFrame({"v": object_series([np.array([1.0, 2.0, 3.0])] * MANY)})
    with slower_is_fine(), pytest.raises(dg.GraphError, match="writes into 'SCRATCH'"):
        dg.grad_column(frame, fn, engine=engine)
    assert SCRATCH.tolist() == [0.0, 0.0, 0.0]
    assert not SCRATCH.requires_grad


@pytest.mark.parametrize("engine", ENGINES)
def test_writing_into_a_shared_module_is_refused(engine: str) -> None:
    """As with a captured one; a small shared tensor is each row's own, and may be written into."""
    net = torch.nn.Linear(3, 1).double()

    def count(model: torch.nn.Module, v: Tensor) -> Tensor:
        with torch.no_grad():
            model.bias.add_(1.0)  # type: ignore[operator, union-attr]
        out: Tensor = model(v).sum()
        return out

    frame = pd.DataFrame({"v": object_series([np.array([1.0, 2.0, 3.0])] * MANY)})
    with slower_is_fine(), pytest.raises(dg.GraphError, match=r"writes into 'model\.bias'"):
        dg.grad_column(frame, count, shared={"model": net}, engine=engine)
    with slower_is_fine():
        got = dg.grad_column(frame, lambda v, c: (c.add_(1.0) * v).sum(), shared={"c": torch.zeros(3, dtype=torch.float64)}, engine=engine)
    assert_cells(list(got), [np.ones(3)] * MANY)


def plan_error_of_its_own(x: Tensor) -> Tensor:
    if x > 2:
        dg.grad_column(pd.DataFrame({"z": [1.0]}), lambda q: q * q)  # makes no sense: no column q
    return x * x


@pytest.mark.parametrize("engine", ENGINES)
def test_a_plan_error_inside_the_row_function_is_a_row_that_failed(engine: str) -> None:
    """It is the row's, not the call's: named, and missing where that is asked for."""
    frame = column([1.0, 2.0, 3.0] * MANY)
    with slower_is_fine():
        got = dg.derivatives(frame, plan_error_of_its_own, {"g": "x", "p": dg.problem}, engine=engine)
        with pytest.raises(dg.RowError, match="row 2") as raised:
            dg.grad_column(frame, plan_error_of_its_own, engine=engine)
    assert_cells(list(got["g"]), [2.0, 4.0, None] * MANY)
    assert got["p"][2].startswith("PlanError")
    assert isinstance(raised.value.__cause__, dg.PlanError)


DATA_DEPENDENT = [
    masked,
    nonzero,
    unique,
    mean_of_positive,
    buffer_zeros,
    buffer_loop,
    buffer_like,
    write_into_the_argument,
    clone_of_a_constant,
]


@pytest.mark.parametrize("fn", DATA_DEPENDENT)
@pytest.mark.parametrize("engine", BOTH)
@pytest.mark.parametrize("batch_size", [None, 1, 3])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_sizes_and_buffers_that_depend_on_data(fn: Any, engine: str, batch_size: int | None, dtype: str) -> None:
    rng = np.random.default_rng(1)
    cells = [rng.normal(size=3).astype(dtype) for _ in range(40)]
    frame = pd.DataFrame({"v": object_series(cells)})
    kept = [cell.copy() for cell in cells]
    with slower_is_fine():
        got = dg.grad_column(frame, fn, engine=engine, batch_size=batch_size)
    exact = torch.float64 if dtype == "float64" else torch.float32
    assert_cells(list(got), oracle.gradient(rows_of(kept, "v"), fn, "v", exact), rtol=1e-10 if dtype == "float64" else 1e-5)
    assert all(np.array_equal(a, b) for a, b in zip(frame["v"], kept, strict=True)), "the caller's cells were written"


# --- b16: distributions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_case_b16_log_prob(engine: str, carrier: str) -> None:
    frame = column([-2.0, 0.5, 3.0])
    got = on_carrier(
        carrier,
        frame,
        lambda data: dg.grad_column(data, lambda x: torch.distributions.Normal(0.0, 1.0).log_prob(x), engine=engine),
    )
    assert_cells(list(got), [2.0, -0.5, -3.0])


def scale_log_prob(x: Tensor, scale: Tensor) -> Tensor:
    out: Tensor = torch.distributions.Normal(0.0, scale, validate_args=True).log_prob(x)
    return out


def rate_log_prob(x: Tensor, scale: Tensor) -> Tensor:
    out: Tensor = torch.distributions.Exponential(scale, validate_args=True).log_prob(x.abs())
    return out


@pytest.mark.parametrize("fn", [scale_log_prob, rate_log_prob])
@pytest.mark.parametrize("engine", BOTH)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_case_b16_a_bad_scale_names_its_row(fn: Any, engine: str, carrier: str) -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0, 3.0], "scale": [1.0, -1.0, 2.0]}, index=["p", "q", "r"])
    with slower_is_fine(), pytest.raises(dg.RowError) as raised:
        on_carrier(carrier, frame, lambda data: dg.grad_column(data, fn, engine=engine))
    assert raised.value.label == "q"
    assert isinstance(raised.value.__cause__, ValueError)
    assert float(raised.value.values["scale"]) == -1.0
    with slower_is_fine():
        got = on_carrier(carrier, frame, lambda data: dg.grad_column(data, fn, engine=engine, on_error="null"))
    rows = [{"x": 1.0, "scale": 1.0}, {"x": 3.0, "scale": 2.0}]
    first, last = oracle.gradient(rows, fn, "x")
    assert_cells(list(got), [first, None, last])


# --- b19: pure functions only -------------------------------------------------------------------------------


def test_case_b19_the_loop_calls_once_per_row() -> None:
    calls: list[float] = []

    def fn(x: Tensor) -> Tensor:
        calls.append(1.0)
        return x * x

    dg.grad_column(column([1.0, 2.0, 3.0]), fn, engine="loop")
    assert len(calls) == 3


def test_case_b19_pure_functions_are_documented() -> None:
    text = dg.grad_column.__doc__
    assert text is not None
    assert "pure" in text


@pytest.mark.parametrize("engine", ENGINES)
def test_case_b19_python_random_is_not_torch_random(engine: str) -> None:
    """Drawing from ``random`` is impure; the promise is only that some valid draw is used and nothing breaks."""
    got = dg.grad_column(column([1.0, 2.0, 3.0]), lambda x: x * random.choice([1.0, 2.0]), engine=engine)
    assert set(got) <= {1.0, 2.0}


# --- b20: memory --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_case_b20_batch_sizes_agree_on_a_wide_layer() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4096), torch.nn.Tanh(), torch.nn.Linear(4096, 1)).double()
    cells = list(np.random.default_rng(0).normal(size=(40, 8)))
    frame = pd.DataFrame({"x": object_series(cells)})

    def fn(x: Tensor, model: torch.nn.Module) -> Tensor:
        total: Tensor = model(x).sum()
        return total

    columns = [list(dg.grad_column(frame, fn, shared={"model": model}, batch_size=size)) for size in (None, 1, 3)]
    for other in columns[1:]:
        assert_cells(other, columns[0], rtol=1e-12)


@pytest.mark.slow
def test_case_b20_default_options_finish_within_bounded_memory(tmp_path: Path) -> None:
    """Peak memory of a fresh process, with 5,000 rows and with 100,000: it grows by what the data itself takes."""
    script = tmp_path / "peak.py"
    script.write_text(
        "import resource, sys\n"
        "import numpy as np, pandas as pd, torch\n"
        "import daskgrad as dg\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(2, 4096), torch.nn.Tanh(), torch.nn.Linear(4096, 1))\n"
        "frame = pd.DataFrame(np.random.default_rng(0).normal(size=(int(sys.argv[1]), 2)), columns=['a', 'b']).astype('float32')\n"
        "got = dg.grad_column(frame, lambda x, m: m(x).sum(), inputs={'x': ['a', 'b']}, shared={'m': model})\n"
        "assert np.isfinite(got.to_numpy()).all()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)\n"
    )
    peaks = []
    for rows in ("5000", "100000"):
        done = run_script(script, rows)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    # 100,000 × 4096 float32 is 1.6 GB for one activation; the table and the result are under 5 MB.
    assert peaks[1] - peaks[0] < 200, peaks


# --- b21, b22, b23: not finite, and what dg.problem says ----------------------------------------------------


def where_sqrt(x: Tensor) -> Tensor:
    return torch.where(x > 0, torch.sqrt(x), x)


def where_exp(x: Tensor) -> Tensor:
    return torch.where(x <= 0, torch.exp(x), 1 + x)


def with_problem(frame: pd.DataFrame, fn: Any, **options: Any) -> pd.DataFrame:
    with slower_is_fine():
        found: pd.DataFrame = dg.derivatives(frame, fn, {"value": (), "slope": "x", "problem": dg.problem}, **options)
    assert list(found.columns) == ["value", "slope", "problem"]
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_case_b21_a_branch_not_taken_poisons_the_gradient(engine: str) -> None:
    """torch's own answer, and a word about it."""
    found = with_problem(column([-2.0, 0.0, 3.0]), where_sqrt, engine=engine)
    np.testing.assert_allclose(values_of(found["slope"]), [math.nan, math.nan, 0.5 / math.sqrt(3)], rtol=1e-12)
    np.testing.assert_allclose(values_of(found["value"]), [-2.0, 0.0, math.sqrt(3)], rtol=1e-12)
    assert [pd.isna(text) for text in found["problem"]] == [False, False, True]
    assert all("gradient" in text and "finite" in text for text in found["problem"][:2])
    found = with_problem(column([1000.0]), where_exp, engine=engine)
    assert math.isnan(values_of(found["slope"])[0])
    assert "gradient" in found["problem"].iloc[0]


ZERO_POINTS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "sqrt(x)": (lambda x: torch.sqrt(x), math.inf),
    "sqrt(x²)": (lambda x: torch.sqrt(x**2), math.nan),
    "linalg.norm": (lambda x: torch.linalg.norm(x.reshape(1)), 0.0),
    "abs": (lambda x: x.abs(), 0.0),
    "-x·log(x)": (lambda x: -x * torch.log(x), math.nan),
}


@pytest.mark.parametrize("kind", sorted(ZERO_POINTS))
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_case_b22_at_zero(kind: str, engine: str, carrier: str) -> None:
    fn, slope = ZERO_POINTS[kind]
    frame = column([0.0, 0.0])
    got = on_carrier(carrier, frame, lambda data: dg.grad_column(data, fn, engine=engine))
    np.testing.assert_array_equal(values_of(got), [slope, slope])


@pytest.mark.parametrize("kind", sorted(ZERO_POINTS))
@pytest.mark.parametrize("engine", ENGINES)
def test_case_b22_what_is_not_finite_is_flagged(kind: str, engine: str) -> None:
    fn, slope = ZERO_POINTS[kind]
    found = with_problem(column([0.0]), fn, engine=engine)
    assert pd.isna(found["problem"].iloc[0]) == math.isfinite(slope)


@pytest.mark.parametrize("engine", ENGINES)
def test_case_b23_a_value_that_is_not_finite(engine: str) -> None:
    found = with_problem(column([-2.0, 3.0]), lambda x: torch.log(x), engine=engine)
    assert_cells(list(found["slope"]), [-0.5, 1 / 3])
    assert "value" in found["problem"].iloc[0]
    assert pd.isna(found["problem"].iloc[1])


@pytest.mark.parametrize("engine", BOTH)
def test_problem_names_the_exception(engine: str) -> None:
    def fn(x: Tensor) -> Tensor:
        if x > 2:
            raise ValueError("too large")
        return x * x

    found = with_problem(column([1.0, 3.0, 2.0]), fn, engine=engine)
    assert_cells(list(found["slope"]), [2.0, None, 4.0])
    assert "too large" in found["problem"].iloc[1]
    assert "ValueError" in found["problem"].iloc[1]
    assert [pd.isna(text) for text in found["problem"]] == [True, False, True]


@pytest.mark.parametrize("engine", BOTH)
def test_problem_names_a_cut_graph(engine: str) -> None:
    found = with_problem(column([-2.0, 3.0]), lambda x: x * x if x > 0 else torch.tensor(1.0), engine=engine)
    assert_cells(list(found["slope"]), [None, 6.0])
    assert isinstance(found["problem"].iloc[0], str)
    assert pd.isna(found["problem"].iloc[1])


def test_detect_anomaly_names_the_operation_and_the_line() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 1.0
        root = torch.sqrt(y - 1.0)  # first
        return torch.where(x > 1, root, x)

    found = with_problem(column([0.5, 3.0]), fn, detect_anomaly=True)
    text = found["problem"].iloc[0]
    assert "sqrt" in text.lower()
    assert str(line_of(fn, "# first")) in text
    assert pd.isna(found["problem"].iloc[1])


# --- b24: kinks ---------------------------------------------------------------------------------------------

KINKS: dict[str, tuple[Callable[[Tensor], Tensor], list[float]]] = {
    "relu": (lambda x: F.relu(x), [0.0, -1.0, 1.0]),
    "clamp": (lambda x: x.clamp(-1.0, 1.0), [-1.0, 1.0, 0.5, 2.0]),
    "clamp_min": (lambda x: x.clamp_min(0.0), [0.0, 1.0]),
    "maximum of a tie": (lambda x: torch.maximum(x, x * x), [0.0, 1.0, 2.0]),
    "minimum of a tie": (lambda x: torch.minimum(x, 2 - x), [1.0, 0.0]),
    "max of a tie": (lambda x: torch.stack([x, x * x, x**3]).max(), [0.0, 1.0]),
    "amax of a tie": (lambda x: torch.stack([x, x * x, x**3]).amax(), [0.0, 1.0]),
    "sort of a tie": (lambda x: torch.stack([x, x * x]).sort().values[0], [0.0, 1.0, 3.0]),
    "abs": (lambda x: x.abs(), [0.0, -0.0, 1.0]),
    "hardtanh": (lambda x: F.hardtanh(x), [-1.0, 1.0]),
    "hardsigmoid": (lambda x: F.hardsigmoid(x), [-3.0, 3.0, 0.0]),
    "leaky_relu": (lambda x: F.leaky_relu(x), [0.0]),
    "relu6": (lambda x: F.relu6(x), [0.0, 6.0]),
    "huber": (lambda x: F.huber_loss(x, x * 0), [1.0, -1.0, 0.0]),
    "round": (lambda x: x.round() + x, [0.5, 1.5]),
    "fmod": (lambda x: torch.fmod(x, 1.0), [1.0, 2.5]),
    "median of a tie": (lambda x: torch.stack([x, x * x, x**3]).median(), [1.0, 0.0]),
    "heaviside": (lambda x: torch.sign(x) * x, [0.0, 1.0]),
}


@pytest.mark.parametrize("kind", sorted(KINKS))
@pytest.mark.parametrize("engine", ENGINES)
def test_case_b24_kinks_are_torchs_own(kind: str, engine: str) -> None:
    fn, values = KINKS[kind]
    many = values * 32  # enough rows for a batch
    expected = oracle.gradient(rows_of(many), fn, "x")
    with slower_is_fine():
        got = dg.grad_column(column(many), fn, engine=engine)
    assert_cells(list(got), expected, rtol=1e-14)


# --- b27: complex -------------------------------------------------------------------------------------------

COMPLEX: dict[str, Callable[[Tensor], Tensor]] = {
    "abs(z)²": lambda z: z.abs() ** 2,
    "Re z³": lambda z: (z**3).real,
    "Im exp(z)": lambda z: torch.exp(z).imag,
    "|z|·angle": lambda z: z.abs() * torch.angle(z),
    "z·z̄": lambda z: (z * z.conj()).real,
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_case_b27_abs_squared(engine: str, carrier: str) -> None:
    frame = column(np.array([3 + 4j, 1 - 2j]), "z")
    got = on_carrier(carrier, frame, lambda data: dg.grad_column(data, lambda z: z.abs() ** 2, engine=engine))
    assert_column(got, [6 + 8j, 2 - 4j], name="z", dtype=np.dtype("complex128"), index=frame.index)


@pytest.mark.parametrize("kind", sorted(COMPLEX))
@pytest.mark.parametrize("engine", ENGINES)
def test_case_b27_follows_torch(kind: str, engine: str) -> None:
    values = np.array([3 + 4j, 1 - 2j, -0.5 + 0.25j])
    got = dg.grad_column(column(values, "z"), COMPLEX[kind], engine=engine)
    assert_cells(list(got), oracle.gradient(rows_of(values, "z"), COMPLEX[kind], "z"))
    assert_cells(list(got), [oracle.numeric({"z": z}, COMPLEX[kind], "z") for z in values], rtol=1e-7)


@pytest.mark.parametrize("fn", [lambda z: z * z, lambda z: torch.exp(z), lambda z: z.conj()])
@pytest.mark.parametrize("engine", ENGINES)
def test_case_b27_complex_output_asks_for_a_real_number(fn: Any, engine: str) -> None:
    with slower_is_fine(), pytest.raises(dg.DaskgradError, match="real"):
        dg.grad_column(column(np.array([3 + 4j]), "z"), fn, engine=engine)


def test_second_order_by_a_complex_argument_is_an_error() -> None:
    with pytest.raises(dg.DaskgradError, match="complex"):
        dg.derivatives(column(np.array([3 + 4j]), "z"), lambda z: z.abs() ** 2, {"zz": ("z", "z")})


# --- b28, b29: integers and precisions ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int64", "int32", "Int64", "int64[pyarrow]", "uint8"])
@pytest.mark.parametrize("engine", ENGINES)
def test_case_b28_an_integer_stays_an_integer(dtype: str, engine: str) -> None:
    """k as an embedding index; the gradient is for x only."""
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64)
    frame = pd.DataFrame({"x": [0.5, 1.5, 2.5], "k": pd.Series([2, 0, 1], dtype=dtype)})

    def fn(x: Tensor, k: Tensor) -> Tensor:
        assert not k.is_floating_point()
        return (F.embedding(k.long(), table) * x * x).sum()

    got = dg.grad_column(frame, fn, engine=engine)
    assert_cells(list(got), [2 * x * s for x, s in ((0.5, 11.0), (1.5, 3.0), (2.5, 7.0))])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_case_b28_as_an_index_and_a_module(engine: str, carrier: str) -> None:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(4, 3).double()
    frame = pd.DataFrame({"x": [0.5, 1.5, 2.5], "k": [2, 0, 1]})

    def fn(x: Tensor, k: Tensor, embedding: torch.nn.Module) -> Tensor:
        total: Tensor = (embedding(k) * x).sum()
        return total

    got = on_carrier(carrier, frame, lambda data: dg.grad_column(data, fn, shared={"embedding": embedding}, engine=engine))
    assert_cells(list(got), [float(embedding.weight[k].sum().detach()) for k in (2, 0, 1)])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_case_b29_a_shared_float32_model_wins(engine: str, carrier: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    frame = column([0.5, 1.5, -2.0])

    def fn(x: Tensor, model: torch.nn.Module) -> Tensor:
        total: Tensor = model(x.reshape(1)).sum()
        return total

    got = on_carrier(carrier, frame, lambda data: dg.grad_column(data, fn, shared={"model": model}, engine=engine))
    expected = oracle.gradient(rows_of([0.5, 1.5, -2.0]), lambda x: fn(x, model), "x", torch.float32)
    assert_column(got, expected, name="x", dtype=np.dtype("float64"), index=frame.index, rtol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_case_b29_a_closed_over_model_is_an_error_with_the_remedies(engine: str) -> None:
    model = torch.nn.Linear(1, 1)
    with slower_is_fine(), pytest.raises(dg.DaskgradError) as raised:
        dg.grad_column(column([0.5, 1.5]), lambda x: model(x.reshape(1)).sum(), engine=engine)
    for word in ("float32", "float64", "shared=", "dtype="):
        assert word in str(raised.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_case_b29_dtype_casts_on_the_way_in_and_back(engine: str) -> None:
    model = torch.nn.Linear(1, 1)
    seen: list[torch.dtype] = []

    def fn(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        total: Tensor = model(x.reshape(1)).sum()
        return total

    got = dg.grad_column(column([0.5, 1.5]), fn, engine=engine, dtype=torch.float32)
    assert got.dtype == np.dtype("float64")
    assert set(seen) == {torch.float32}
    assert_cells(list(got), [model.weight.item()] * 2, rtol=1e-6)


# --- b31: what comes back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_case_b31_one_element_is_a_number(engine: str) -> None:
    got = dg.grad_column(column([1.0, 2.0]), lambda x: (x * x).reshape(1), engine=engine)
    assert_cells(list(got), [2.0, 4.0])


@pytest.mark.parametrize("fn", [lambda x: x * torch.ones(3), lambda x: torch.stack([x, x]), lambda x: x * torch.ones(2, 2)])
@pytest.mark.parametrize("engine", ENGINES)
def test_case_b31_a_vector_names_the_jacobian(fn: Any, engine: str) -> None:
    with slower_is_fine(), pytest.raises(dg.DaskgradError, match=r"(?i)jacobian"):
        dg.grad_column(column([1.0, 2.0]), fn, engine=engine)


WRONG_RETURNS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "None": (lambda x: None, "None"),
    "a tuple": (lambda x: (x, x), "tuple"),
    "text": (lambda x: "price", "str"),
    "a dict": (lambda x: {"value": x}, "dict"),
    "a list": (lambda x: [x * x], "list"),
}


@pytest.mark.parametrize("kind", sorted(WRONG_RETURNS))
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("carrier", ["pandas", "dask(3)"])
def test_case_b31_other_things_are_a_row_error(kind: str, engine: str, carrier: str) -> None:
    fn, word = WRONG_RETURNS[kind]
    with slower_is_fine(), pytest.raises(dg.RowError) as raised:
        on_carrier(carrier, column([1.0, 2.0, 3.0]), lambda data: dg.grad_column(data, fn, engine=engine))
    assert isinstance(raised.value.__cause__, TypeError)
    assert word in str(raised.value) + str(raised.value.__cause__)


CONSTANT_BRANCHES: dict[str, Callable[[Tensor], Any]] = {
    "max": lambda x: max(x - 1, 0),
    "a float": lambda x: x - 1 if x > 1 else 0.0,
    "a tensor": lambda x: x - 1 if x > 1 else torch.tensor(0.0),
    "detached": lambda x: x - 1 if x > 1 else (x - 1).detach(),
}


@pytest.mark.parametrize("kind", sorted(CONSTANT_BRANCHES))
@pytest.mark.parametrize("engine", BOTH)
@pytest.mark.parametrize("batch_size", [None, 1])
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_case_b31_a_constant_in_one_branch(kind: str, engine: str, batch_size: int | None, carrier: str) -> None:
    fn = CONSTANT_BRANCHES[kind]
    frame = pd.DataFrame({"x": [0.0, 3.0]}, index=["first", "second"])

    def run(**options: Any) -> Any:
        with slower_is_fine():
            return on_carrier(carrier, frame, lambda data: dg.grad_column(data, fn, engine=engine, batch_size=batch_size, **options))

    with pytest.raises(dg.GraphError, match="first"):
        run()
    assert_cells(list(run(allow_unused=True)), [0.0, 1.0])
    assert_cells(list(run(on_error="null")), [None, 1.0])


# --- b36, b38: shared arguments, ragged cells ---------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
@pytest.mark.parametrize("kind", ["tensor", "array", "list"])
def test_case_b36_a_shared_argument_as_long_as_the_frame(engine: str, carrier: str, kind: str) -> None:
    weights: Any = {
        "tensor": torch.tensor([1.0, 2.0, 3.0]),
        "array": np.array([1.0, 2.0, 3.0]),
        "list": [1.0, 2.0, 3.0],
    }[kind]

    def fn(x: Tensor, w: Any) -> Tensor:
        return x * x * sum(w)

    frame = column([1.0, 2.0, 3.0])
    got = on_carrier(carrier, frame, lambda data: dg.grad_column(data, fn, shared={"w": weights}, engine=engine))
    assert_cells(list(got), [12.0, 24.0, 36.0])


@pytest.mark.parametrize("make", [list, lambda c: np.array(c, dtype=float), tuple])
@pytest.mark.parametrize("engine", BOTH)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_case_b38_ragged_cells(make: Any, engine: str, carrier: str) -> None:
    frame = pd.DataFrame({"r": object_series([make([1.0, 2.0]), make([3.0]), make([4.0, 5.0])])})
    with slower_is_fine():
        got = on_carrier(carrier, frame, lambda data: dg.grad_column(data, lambda r: (r**2).sum(), engine=engine))
    assert_column(got, [[2.0, 4.0], [6.0], [8.0, 10.0]], name="r", dtype=np.dtype(object), index=frame.index)


@pytest.mark.parametrize("engine", BOTH)
def test_case_b38_an_empty_cell(engine: str) -> None:
    frame = pd.DataFrame({"r": object_series([np.array([1.0, 2.0]), np.array([])])})
    with slower_is_fine():
        got = dg.grad_column(frame, lambda r: (r**2).sum(), engine=engine)
    assert_cells(list(got), [np.array([2.0, 4.0]), np.array([])])


@pytest.mark.parametrize("engine", BOTH)
def test_case_b38_integer_lists_give_floats(engine: str) -> None:
    frame = pd.DataFrame({"r": object_series([[1, 2], [3]])})
    with slower_is_fine():
        got = dg.grad_column(frame, lambda r: (r**2).sum(), engine=engine)
    assert_cells(list(got), [[2.0, 4.0], [6.0]])
    assert all(np.array(cell).dtype == np.float64 for cell in got)


def test_ragged_cells_in_a_bag() -> None:
    got = computed(dg.grad_column(bag_of([{"r": [1.0, 2.0]}, {"r": [3.0]}], 2), lambda r: (r**2).sum()))
    assert_cells(list(got), [[2.0, 4.0], [6.0]])


# --- b32, b33: several derivatives in one pass --------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_case_b32_value_and_gradient(engine: str, carrier: str) -> None:
    frame = column([1.0, 2.0])
    got = on_carrier(carrier, frame, lambda data: dg.derivatives(data, lambda x: x**3, {"cube": (), "slope": "x"}, engine=engine))
    assert list(got.columns) == ["cube", "slope"]
    assert_cells(list(got["cube"]), [1.0, 8.0])
    assert_cells(list(got["slope"]), [3.0, 12.0])


def test_case_b32_from_one_pass() -> None:
    """The loop calls the function once per row for both."""
    calls: list[int] = []

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        return x**3

    dg.derivatives(column([1.0, 2.0]), fn, {"cube": (), "slope": "x", "bend": ("x", "x")}, engine="loop")
    assert len(calls) == 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
def test_case_b33_second_order(engine: str, carrier: str) -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0], "y": [2.0, -1.0]})
    wanted = {"xx": ("x", "x"), "xy": ("x", "y"), "yx": ("y", "x"), "yy": ("y", "y")}
    got = on_carrier(carrier, frame, lambda data: dg.derivatives(data, lambda x, y: x**3 * y, wanted, engine=engine))
    assert_cells(got.to_numpy().tolist(), [[12.0, 3.0, 3.0, 0.0], [-12.0, 12.0, 12.0, 0.0]])


@pytest.mark.parametrize("engine", ENGINES)
def test_case_b33_as_a_hessian_matrix_per_row(engine: str) -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0], "y": [2.0, -1.0]})
    got = dg.derivatives(frame, lambda v: v[0] ** 3 * v[1], {"h": ("v", "v")}, inputs={"v": ["x", "y"]}, engine=engine)
    assert_cells(list(got["h"]), [[[12.0, 3.0], [3.0, 0.0]], [[-12.0, 12.0], [12.0, 0.0]]])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_derivative_without_a_graph_left_is_zero(engine: str) -> None:
    """Rule 9: once reached, zero at any order; a linear function has a second derivative."""
    wanted = {"value": (), "x": "x", "xx": ("x", "x"), "xxx": ("x", "x", "x"), "xy": ("x", "y")}
    frame = pd.DataFrame({"x": [1.0, 2.0], "y": [3.0, 4.0]})
    got = dg.derivatives(frame, lambda x, y: 3 * x + 1, wanted, engine=engine)
    assert_cells(got.to_numpy().tolist(), [[4.0, 3.0, 0.0, 0.0, 0.0], [7.0, 3.0, 0.0, 0.0, 0.0]])
    alone = dg.derivatives(frame, lambda x, y: 3 * x + 1, {"xx": ("x", "x")}, engine=engine)
    assert_cells(list(alone["xx"]), [0.0, 0.0])


def test_derivatives_on_dask_declare_their_columns() -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0], "v": object_series([np.ones(2), np.ones(2)]).array})
    lazy = dg.derivatives(in_equal_parts(frame, 2), lambda x, v: x * (v**2).sum(), {"value": (), "v": "v", "problem": dg.problem})
    got = computed(lazy)
    assert_cells(list(got["v"]), [[2.0, 2.0], [4.0, 4.0]])
