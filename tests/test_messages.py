"""Messages name the line, the layer, the dtype, and the remedy."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from compare import slower_is_fine
from torch import Tensor, nn

import daskgrad as dg

_random = np.random.default_rng(0)
FRAME = pd.DataFrame({f"f{k}": _random.normal(size=20) for k in range(4)}, index=[f"row{k}" for k in range(20)])
FRAME["y"] = _random.normal(size=20)
FRAME["n"] = np.arange(20) % 3
VECTOR = {"x": ["f0", "f1", "f2", "f3"]}
HERE = re.escape(__file__)
NARROW = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))  # float32
WEIGHTS = torch.ones(4, dtype=torch.float32)
PLAIN = np.ones(4)


def line_of(fn: Callable[..., Any], source: str) -> str:
    """The place of a line of `fn`, as messages name it."""
    lines, first = inspect.getsourcelines(fn)
    number = first + next(k for k, line in enumerate(lines) if source in line)
    return f"{HERE}:{number} `.*{re.escape(source)}"


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4))
        self.encoder.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)).sum()  # type: ignore[no-any-return]


# --- a row that failed


@pytest.mark.parametrize("rows", [1, 20])
def test_a_row_that_failed_has_the_line_of_the_users_function(rows: int) -> None:
    def helper(y: Tensor) -> Tensor:
        if y > -10:
            raise ValueError("boom")
        return y

    def fn(y: Tensor) -> Tensor:
        return helper(y) ** 2

    expected = f"failed in row 'row0': ValueError: boom, at {line_of(helper, 'raise ValueError')}"
    with pytest.raises(dg.RowError, match=expected) as caught:
        dg.grad_column(FRAME.iloc[:rows], fn)
    assert caught.value.label == "row0"
    lazy = dd.from_pandas(FRAME.iloc[:rows].reset_index(drop=True), npartitions=1)
    with pytest.raises(dg.RowError, match=line_of(helper, "raise ValueError")):
        dg.grad_column(lazy, fn).compute(scheduler="synchronous")


def test_what_torch_raises_has_the_line_that_called_it() -> None:
    def fn(x: Tensor) -> Tensor:
        short = x[:3]
        return NARROW(short.float()).sum()  # type: ignore[no-any-return]

    with pytest.raises(dg.RowError, match=f"cannot be multiplied .*, at {line_of(fn, 'NARROW(short.float())')}"):
        dg.grad_column(FRAME, fn, inputs=VECTOR)


def test_every_row_fails_and_nobody_raises() -> None:
    def fn(y: Tensor) -> Tensor:
        return torch.tanhh(y)  # type: ignore[attr-defined,no-any-return]

    for rows, said in ((20, "all 20 rows failed and have no result; the first of them, row 'row0'"), (1, "the only row failed")):
        with pytest.warns(RuntimeWarning, match=f"fn: {said}.*has no attribute 'tanhh', at {line_of(fn, 'tanhh')}"):
            found = dg.grad_column(FRAME.iloc[:rows], fn, on_error="null")
        assert found.isna().all()
    lazy = dg.grad_column(dd.from_pandas(FRAME, npartitions=4), fn, on_error="null")
    with pytest.warns(RuntimeWarning) as caught:
        lazy.compute(scheduler="synchronous")
    assert len(caught) == 1  # once for the call, not once for each part


def test_some_rows_fail_or_all_are_missing_and_nothing_is_said() -> None:
    def fn(y: Tensor) -> Tensor:
        if y < 0:
            raise ValueError("boom")
        return y**2

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 0 < dg.grad_column(FRAME, fn, on_error="null").isna().sum() < 20
        missing = pd.DataFrame({"y": pd.array([None] * 3, dtype="Float64")})
        assert dg.grad_column(missing, fn, on_error="null").isna().all()
        told = dg.derivatives(FRAME[FRAME.y < 0], fn, {"slope": "y", "problem": dg.problem})
        assert (told.problem == "ValueError: boom").all()


# --- layers that draw


def test_dropout_in_train_mode_names_the_layer_and_eval() -> None:
    model = Encoder()
    expected = (
        r"refused unless it is meant\. model\.encoder\.drop is a Dropout in train mode: model\.eval\(\) ends that\. Else: randomness="
    )
    for rows in (1, 20):
        with pytest.raises(dg.PlanError, match=expected):
            dg.grad_column(FRAME.iloc[:rows], lambda model, x: model(x), wrt=dg.norm("model"), inputs=VECTOR, shared={"model": model})
    recurrent = nn.LSTM(1, 2, num_layers=2, dropout=0.5)
    with pytest.raises(dg.PlanError, match=r"lstm is a LSTM in train mode: lstm\.eval\(\)"):
        dg.grad_column(FRAME, lambda x, lstm: lstm(x.reshape(4, 1))[0].sum(), inputs=VECTOR, shared={"lstm": recurrent})
    dg.grad_column(FRAME, lambda model, x: model(x), wrt=dg.norm("model"), inputs=VECTOR, shared={"model": model.eval()})
    with pytest.raises(dg.PlanError, match="refused unless it is meant: randomness="):
        dg.grad_column(FRAME, lambda y: y * torch.rand(()))


# --- two dtypes


def test_two_dtypes_have_the_rule_and_what_to_write() -> None:
    with pytest.raises(dg.RowError, match=r"The table is float64, and the module 'NARROW' .* is float32: .*shared=\{'NARROW': NARROW\}"):
        dg.grad_column(FRAME, lambda x: NARROW(x).sum(), inputs=VECTOR)
    with pytest.raises(dg.RowError, match=r"the tensor 'WEIGHTS' is float32: write WEIGHTS\.to\(torch\.float64\)"):
        dg.grad_column(FRAME, lambda x: x @ WEIGHTS, inputs=VECTOR)
    with pytest.raises(dg.RowError, match=r"computes in float32, as its module does, and 'n' is int64, .* write n\.to\(torch\.float32\)"):
        dg.grad_column(FRAME, lambda model, n, y: (model(n) * y).sum(), wrt="y", inputs={"n": ["n"]}, shared={"model": nn.Linear(1, 1)})
    remedied = dg.grad_column(
        FRAME, lambda model, n, y: (model(n.to(torch.float32)) * y).sum(), wrt="y", inputs={"n": ["n"]}, shared={"model": nn.Linear(1, 1)}
    )
    assert remedied.notna().all()


def test_another_mistake_has_no_hint_of_dtypes() -> None:
    def fn(x: Tensor) -> Tensor:
        raise ValueError("boom")
        return NARROW(x)  # type: ignore[no-any-return]

    with pytest.raises(dg.RowError) as caught:
        dg.grad_column(FRAME, fn, inputs=VECTOR)
    assert "float32" not in str(caught.value)


def test_numpy_arrays_among_tensors_are_named() -> None:
    with pytest.raises(dg.RowError, match=r"'PLAIN' is a NumPy array.*: PLAIN = torch\.from_numpy\(PLAIN\) makes it a tensor"):
        dg.grad_column(FRAME, lambda x: (PLAIN * x).sum(), inputs=VECTOR)
    with pytest.raises(dg.GraphError, match=r"'w' is a NumPy array.*: shared=\{'w': torch\.from_numpy\(w\)\}"):
        dg.grad_column(FRAME, lambda x, w: (x * w).sum(), inputs=VECTOR, shared={"w": PLAIN})


# --- what is asked for


def _asks(wrt: Any, **more: Any) -> Callable[[], Any]:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (model(x).squeeze() - y) ** 2

    return lambda: dg.grad_column(FRAME, loss, wrt=wrt, **{"inputs": VECTOR, "shared": {"model": NARROW}, **more})


NAMES = "'model.0.weight', 'model.0.bias', 'model.2.weight', 'model.2.bias'"
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "dot, another argument": (
        lambda: dg.dot("x", directions="v"),  # type: ignore[call-arg]
        "dg.dot(wrt, vector) is how it is called: it has no argument 'directions'",
    ),
    "norm of data": (lambda: dg.norm(FRAME, len), "dg.norm(wrt, per_layer=False) is how it is called"),  # type: ignore[call-arg]
    "dot, several columns": (lambda: dg.dot("x", ["f0", "f1"]), "Several columns make one: df['v'] = list(df[[...]].to_numpy())"),
    "dot, parameters": (_asks(None, inputs={"z": "y"}), "Its arguments: 'model', 'x', 'y'"),
    "dot, no such parameter": (_asks(dg.dot("model", {"0.wait": torch.ones(3, 4)})), f"is no parameter. The parameters: {NAMES}"),
    "dot, one tensor": (_asks(dg.dot("model", torch.ones(3))), f"it got an array of shape (3,). The parameters: {NAMES}"),
    "dot, a column": (_asks(dg.dot("model", "y")), "needs a direction for each parameter"),
    "norm, not called": (_asks(dg.norm), "the derivative by the function norm is asked for: call it, as in dg.norm('x')"),
    "a name": (lambda: dg.derivatives(FRAME, lambda y: y, "y"), "as {'slope': 'x'}; it got 'y'"),  # type: ignore[arg-type]
    "a module of whole rows": (lambda: dg.grad_column(FRAME, NARROW), "inputs={'input': ['f0', 'f1']} stacks them into a vector"),
    "a number": (
        lambda: dg.grad_column(FRAME, lambda y, k: y * k, wrt="k", shared={"k": 2.0}),
        "'k' is the float 2.0: shared={'k': torch.tensor(2.0)} makes it one",
    ),
    "an array": (
        lambda: dg.grad_column(FRAME, lambda y, k: y * k.sum(), wrt="k", shared={"k": np.ones(2)}),
        "'k' is a NumPy ndarray: shared={'k': torch.from_numpy(k)} makes it one",
    ),
    "integers": (
        lambda: dg.grad_column(FRAME, lambda y, k: y * k, wrt="k", shared={"k": torch.tensor(2)}),
        "'k' is a tensor of torch.int64: k.double() is floating",
    ),
    "a default": (lambda: dg.grad_column(FRAME, lambda y, k=2.0: y * k, wrt="k"), "it is its default, 2.0. inputs={'k': column}"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_call_that_makes_no_sense_says_what_would(name: str) -> None:
    call, said = MISTAKES[name]
    with pytest.raises(dg.PlanError, match=re.escape(said)):
        call()


def test_tensors_in_the_order_of_the_parameters_are_a_direction_as_the_message_says() -> None:
    tensors = [torch.ones_like(tensor) for tensor in NARROW.parameters()]
    named = dg.dot("model", dict(zip(dict(NARROW.named_parameters()), tensors, strict=True)))
    assert _asks(named)().notna().all()


def test_what_daskgrad_has_not_leads_to_what_it_has() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'sum'.*dg\.mean_gradient\(data, fn, 'model'"):
        dg.sum  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'grad'.*'gradcheck'"):
        dg.grad  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(dg, "__wrapped__")


@pytest.mark.parametrize("rows", [1, 20])
def test_a_truth_has_no_gradient(rows: int) -> None:
    with pytest.raises(dg.GraphError, match=r"returned a truth \(a bool tensor\), which has no gradient.*torch\.where\(x > y, a, b\)"):
        dg.grad_column(FRAME.iloc[:rows], lambda y: y > 0)
    with pytest.raises(dg.GraphError, match=r"returned an integer \(a int64 tensor\)"):
        dg.grad_column(FRAME.iloc[:rows], lambda y: y.long())
    assert (dg.grad_column(FRAME.iloc[:rows], lambda y: y > 0, allow_unused=True) == 0).all()


# --- gradients inside


def _inner(y: Tensor) -> Tensor:
    return torch.sin(y) * y


@pytest.mark.parametrize("rows", [1, 20])
def test_a_gradient_inside_says_how_it_is_written(rows: int) -> None:
    def without(y: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(_inner(y), y)
        return slope * y

    def with_graph(y: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(_inner(y), y, create_graph=True)
        return slope * y

    def by_func(y: Tensor) -> Tensor:
        return torch.func.grad(_inner)(y) * y

    def of_constant(y: Tensor) -> Tensor:
        point = y.detach().requires_grad_()
        (slope,) = torch.autograd.grad(_inner(point), point)
        return slope * y

    def back(y: Tensor) -> Tensor:
        _inner(y).backward()
        return y

    part = FRAME.iloc[:rows]
    y = part.y.to_numpy()
    slope = np.cos(y) * y + np.sin(y)
    with pytest.raises(dg.GraphError, match=f"{line_of(without, 'torch.autograd.grad')}.*torch.func.grad.f..x., which runs in batches"):
        dg.grad_column(part, without)
    with pytest.raises(dg.GraphError, match=f"{line_of(back, 'backward')}.*leave backward.. out, and return what it was called on"):
        dg.grad_column(part, back)
    np.testing.assert_allclose(dg.grad_column(part, by_func), slope + y * (2 * np.cos(y) - y * np.sin(y)))
    with (
        contextlib.nullcontext()
        if rows == 1
        else pytest.warns(dg.EngineWarning, match=f"torch.func.grad.f..x. is, at {line_of(with_graph, 'create_graph')}")
    ):
        np.testing.assert_allclose(dg.grad_column(part, with_graph), slope + y * (2 * np.cos(y) - y * np.sin(y)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.EngineWarning)
        np.testing.assert_allclose(dg.grad_column(part, of_constant), slope)


# --- row by row


def test_what_goes_row_by_row_names_the_line() -> None:
    def by_numpy(x: Tensor, y: Tensor) -> Tensor:
        weights = x.detach().numpy()
        return y**2 * float(weights.sum())

    with pytest.warns(dg.EngineWarning, match=f"one by one.*numpy.. of a vector, at {line_of(by_numpy, '.numpy()')}"):
        dg.grad_column(FRAME, by_numpy, wrt="y", inputs=VECTOR)

    def printing(y: Tensor) -> Tensor:
        print("y is", y)
        return y**2

    many = pd.DataFrame({"y": _random.normal(size=2000)})
    said = f"one by one.*they part at {line_of(printing, 'print(')}.*, which has a value of its own in nearly every row"
    with pytest.warns(dg.EngineWarning, match=said), contextlib.redirect_stdout(io.StringIO()) as printed:
        found = dg.grad_column(many, printing)
    np.testing.assert_allclose(found, 2 * many.y)
    assert len(set(printed.getvalue().splitlines())) > 1900


# --- shared numbers


def test_a_gradient_by_a_shared_number_is_a_number() -> None:
    shared = {"k": torch.tensor(3.0, dtype=torch.float64), "p": {"a": torch.tensor(2.0, dtype=torch.float64)}, "w": torch.ones(1).double()}
    wanted = {"k": "k", "a": "p.a", "w": "w", "p": "p", "norm": dg.norm("k")}
    for rows in (0, 1, 20):
        found = dg.derivatives(FRAME.iloc[:rows], lambda y, k, p, w: y * k**2 * p["a"] * w.sum(), wanted, shared=shared)
        assert found[["k", "a", "norm"]].dtypes.tolist() == [np.dtype("float64")] * 3
        np.testing.assert_allclose(found.k, 12 * FRAME.y.iloc[:rows])
        np.testing.assert_allclose(found.a, 9 * FRAME.y.iloc[:rows])
        assert [cell.shape for cell in found.w] == [(1,)] * rows == [cell.shape for cell in found.p]
    lazy = dg.grad_column(dd.from_pandas(FRAME, npartitions=2), lambda y, k: y * k**2, wrt="k", shared={"k": shared["k"]})
    assert lazy.dtype == lazy.compute(scheduler="synchronous").dtype == "float64"


# --- looking before running


def drawn(x: Tensor) -> Any:
    yield x


async def awaited(x: Tensor) -> Tensor:
    return x


def unhooked(y: Tensor) -> Tensor:
    with torch.no_grad():
        return y**2


BEGINNERS = {
    "a batch's column": (lambda v: v[:, 0].sum(), "The function gets one row and no batch: a number is a tensor of shape ()"),
    "a batch's length": (lambda y: y.shape[0] * y, "The function gets one row and no batch"),
    "an element of a number": (lambda y: y[0], "The function gets one row and no batch"),
    "a loop over a number": (lambda y: sum(one for one in y), "The function gets one row and no batch"),
    "a batch's axis": (lambda v: v.sum(1), "model(x[None])[0]"),
    "a module for batches": (torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(2)).double().eval(), "model(x[None])[0]"),
    "numbers joined": (lambda y: torch.cat([y, y]).sum(), "torch.stack([x, y]) makes a vector of several"),
    "a key": (lambda y: y * {1: 2.0}[y.long()], "write int(n) or float(x) for a key"),
    "a tuple": (lambda y: (y, y), "a tuple of 2 (torch.stack makes a vector"),
    "a rounded quotient": (lambda y: y // 2, "x // y is torch.floor(x / y)"),
    "an array": (lambda y: np.array([1.0, 2.0]) * y, "torch.as_tensor(array) makes a tensor of one"),
    "without gradient": (unhooked, "or something under torch.no_grad() or with detach()"),
    "a generator": (drawn, "drawn is a generator (it holds a yield)"),
    "a coroutine": (awaited, "awaited is a coroutine (async def)"),
    "a vector": (lambda v: v * 2, "{'jacobian': 'v'}"),
}


@pytest.mark.parametrize("name", BEGINNERS)
def test_a_beginners_mistake_has_its_remedy(name: str) -> None:
    fn, says = BEGINNERS[name]
    frame = pd.DataFrame({"y": [1.0, 2.0], "v": [np.ones(2), np.ones(2)]})
    inputs = {"input": "v"} if isinstance(fn, torch.nn.Module) else None
    with slower_is_fine(), pytest.raises(dg.DaskgradError, match=re.escape(says)) as caught:
        dg.grad_column(frame, fn, inputs=inputs)
    assert not str(caught.value).endswith("\n")


def test_a_call_in_another_order_says_which() -> None:
    frame = pd.DataFrame({"x": [1.0], "y": [2.0]})
    lazy = dd.from_pandas(frame, npartitions=1)
    for call, says in {
        "swapped": (lambda: dg.grad_column(lambda x: x, frame), "the data comes first and then the row function"),
        "a tuple": (lambda: dg.grad_column(frame, lambda x, y: x * y, wrt=("x", "y")), "wrt=['x', 'y'], a list, gives a column for each"),
        "a column": (lambda: dg.grad_column(frame, lambda x: x, wrt=frame.x), "a Series names no argument"),
        "vector": (lambda: dg.grad_column(frame, lambda x: x, vector=True), "vector= is for dg.derivatives"),
        "a sum by a column": (lambda: dg.mean_gradient(frame, lambda x: x, "x"), "grad_column(...).mean()"),
        "a lazy frame": (lambda: dg.grad_column(frame, lambda x: x * lazy.x.sum()), "compute it first, as in lazy.sum().compute()"),
        "a method": (lambda: dg.grad_column(frame, lambda row: row.get("x"), wrt="x"), "It is no Series and has no methods"),
    }.values():
        with pytest.raises(dg.DaskgradError, match=re.escape(says)):
            call()


def test_explain_counts_gaps_and_nan() -> None:
    gaps = pd.DataFrame({"a": [np.nan, np.nan, 1.0], "b": pd.array([1.0, None, 2.0], dtype="Float64"), "c": [[1.0, np.nan], [2.0], None]})
    text = str(dg.explain(gaps, lambda a, b, c: a * b * c.sum(), wrt=["a", "b"]))
    assert re.search(r"column 'a' \(float64\): a number; NaN in 2 of 3 rows, a number that goes through the function", text)
    assert re.search(r"column 'b' \(Float64\): a number; missing in 1 of 3 rows, whose results are missing too", text)
    assert re.search(r"column 'c' .*missing in \d of 3 rows", text)
    assert "NaN" not in str(dg.explain(FRAME, lambda y: y**2))


def test_gradcheck_of_float32_takes_differences_in_float64() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (model(x).squeeze() - y) ** 2

    table = dg.gradcheck(FRAME, loss, wrt="x", inputs=VECTOR, shared={"model": model})
    assert (table.verdict == "agrees").all()
    assert (table.difference < 1e-5).mean() > 0.9  # float32's rounding, not that of its differences; a few rows have a kink near
    assert next(model.parameters()).dtype == torch.float32

    class Wrong(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x**2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * x * 2.02

    def wrong(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return Wrong.apply(loss(model, x, y) + 3)  # type: ignore[no-any-return]

    table = dg.gradcheck(FRAME, wrong, wrt="x", inputs=VECTOR, shared={"model": model})
    assert (table.verdict == "differs").mean() > 0.5
    captured = dg.gradcheck(FRAME.astype("float32"), lambda x, y: (NARROW(x).squeeze() - y) ** 2, wrt="x", inputs=VECTOR)
    assert (captured.verdict == "agrees").all()
