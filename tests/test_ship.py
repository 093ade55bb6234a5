"""Plan ↔ bytes: what travels, what is refused by name, who opens it how often, and what a bare place says."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import cloudpickle
import pytest
import torch
from standin import Doubler, TwoArguments, holding_a_lock, local_class, two_arguments

from daskgrad import _ship
from daskgrad._errors import GraphError, PlanError, RowError, fit_to_travel

LOCK = threading.Lock()


def plan_of(fn: Any = None, **shared: Any) -> Doubler:
    return Doubler({"x": ("x", 2.0)}, columns=["x"], fn=fn or (lambda x: 2 * x), shared=shared)


def packed(plan: Doubler) -> bytes:
    return _ship.pack(plan)  # type: ignore[arg-type]


def by_value(source: str, name: str, **names: Any) -> Any:
    """A function as a script or a notebook has it: with globals of its own, and no module to import it from."""
    namespace: dict[str, Any] = {"__name__": "__main__", **names}
    exec(source, namespace)
    return namespace[name]


def in_a_fresh_process(code: str, data: bytes) -> str:
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, timeout=180)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


# -------------------------------------------------------------------------------- refused at the call


def test_case_a06_a_lock_in_a_closure_is_named() -> None:
    lock = threading.Lock()

    def price(x: Any) -> Any:
        with lock:
            return x * 2

    with pytest.raises(
        PlanError,
        match=r"The row function `price` captures `lock` \(a _thread\.lock\), which cannot be sent to a worker",
    ):
        packed(plan_of(price))


def test_case_a06_an_open_file_among_the_globals_of_a_script_is_named(tmp_path: Any) -> None:
    with (tmp_path / "log").open("w") as log:
        price = by_value("def price(x):\n    log.write('x')\n    return x", "price", log=log)
        with pytest.raises(PlanError, match=r"`price` captures `log` \(a _io\.TextIOWrapper\)"):
            packed(plan_of(price))


def test_case_a06_a_model_class_of_the_main_script_works() -> None:
    source = "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return 3 * x"
    net = by_value(source, "Net")()
    again = _ship.unpack(packed(plan_of(model=net)))
    assert again.shared["model"](torch.tensor(2.0)) == 6


def test_defaults_partial_arguments_bound_methods_and_helpers_are_searched() -> None:
    lock = threading.Lock()

    def with_default(x: Any, guard: Any = lock) -> Any:
        return x

    def helper(x: Any) -> Any:
        return lock

    def through(x: Any) -> Any:
        return helper(x)

    class Model:
        def __init__(self) -> None:
            self.guard = threading.Lock()

        def price(self, x: Any) -> Any:
            return x

    with pytest.raises(PlanError, match=r"`with_default` captures `guard` \(a _thread\.lock\)"):
        packed(plan_of(with_default))
    with pytest.raises(PlanError, match=r"`double_it` captures `guard` \(a _thread\.lock\)"):
        packed(plan_of(functools.partial(by_value("def double_it(x, guard): return x", "double_it"), guard=LOCK)))
    with pytest.raises(PlanError, match=r"`through` captures `lock` \(a _thread\.lock\) through `helper`"):
        packed(plan_of(through))
    with pytest.raises(PlanError, match=r"`price` captures `guard` \(a _thread\.lock\) through `self`"):
        packed(plan_of(Model().price))


def test_a_shared_argument_is_named_with_its_part() -> None:
    with pytest.raises(PlanError, match=r"The shared argument `guard` is a _thread\.lock, which cannot be sent"):
        packed(plan_of(guard=LOCK))
    net = torch.nn.Linear(2, 1)
    net.guard = LOCK  # type: ignore[assignment]
    with pytest.raises(PlanError, match=r"The shared argument `model` holds `guard` \(a _thread\.lock\)"):
        packed(plan_of(model=net))


def test_a_tensor_that_carries_a_graph_is_refused_where_a_pickle_would_cut_it() -> None:
    p = torch.tensor(2.0, requires_grad=True)
    t = p * 2
    assert pickle.loads(pickle.dumps(t)).grad_fn is None  # what is to be prevented

    def price(x: Any) -> Any:
        return x * t

    with pytest.raises(GraphError, match=r"The row function `price` captures `t` \(a tensor\), which carries a graph"):
        packed(plan_of(price))
    with pytest.raises(GraphError, match=r"The shared argument `scale` is a tensor, which carries a graph"):
        packed(plan_of(scale=t))
    leaf = _ship.unpack(packed(plan_of(scale=p, cut=t.detach())))
    assert leaf.shared["scale"] == 2
    assert leaf.shared["cut"] == 4


# -------------------------------------------------------------------------------- opening


def test_the_same_plan_gives_the_same_bytes_and_another_gives_others() -> None:
    net = torch.nn.Linear(3, 1)
    plan = plan_of(model=net)
    assert packed(plan) == packed(replace(plan))
    before = packed(plan)
    with torch.no_grad():
        net.weight += 1
    assert packed(plan) != before
    assert not torch.equal(_ship.unpack(before).shared["model"].weight, net.weight)  # a snapshot


def test_each_thread_opens_it_once_and_has_its_own() -> None:
    data = packed(plan_of(model=torch.nn.Linear(2, 1)))
    seen: dict[int, list[Any]] = {}

    def work(number: int) -> None:
        seen[number] = [_ship.unpack(data), _ship.unpack(bytes(bytearray(data)))]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(first is second for first, second in seen.values())
    assert len({id(first.shared["model"]) for first, _ in seen.values()}) == 3


def test_what_a_thread_keeps_is_bounded() -> None:
    first = packed(plan_of(number=-1))
    kept = _ship.unpack(first)
    for number in range(_ship.KEPT_PLANS):
        _ship.unpack(packed(plan_of(number=number)))
    assert len(_ship._kept.plans) == _ship.KEPT_PLANS
    assert _ship.unpack(first) is not kept


def test_another_daskgrad_or_torch_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    data = packed(plan_of(number=101))
    monkeypatch.setattr(_ship, "_version", lambda: "9.9")
    with pytest.raises(PlanError, match=r"daskgrad is 9\.9 on process \d+ on .*, but the call was made with daskgrad"):
        _ship.unpack(data)
    monkeypatch.undo()
    monkeypatch.setattr(_ship, "_torch_version", lambda: "1.0")
    with pytest.raises(PlanError, match=r"torch is 1\.0 on .*Install torch 2"):
        _ship.unpack(data)
    monkeypatch.setattr(_ship, "_torch_version", lambda: None)
    with pytest.raises(PlanError, match=r"torch is not installed on "):
        _ship.unpack(data)


def test_a_missing_module_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "desk_models.py").write_text("def price(x):\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    import desk_models  # type: ignore[import-not-found]

    data = packed(plan_of(desk_models.price))
    monkeypatch.undo()
    del sys.modules["desk_models"]
    with pytest.raises(PlanError, match=r"cannot be loaded on process .*module `desk_models` is missing there") as caught:
        _ship.unpack(data)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_the_shim_opens_without_daskgrad_and_says_what_is_missing() -> None:
    code = """
import pickle, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("daskgrad", "torch"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
run = pickle.loads(sys.stdin.buffer.read())
try:
    run([], b"", None, {"number": 0})
except RuntimeError as error:
    print(error, error.__cause__)
"""
    said = in_a_fresh_process(code, _ship.shim())
    assert said.startswith("daskgrad cannot be used on the worker at ")
    assert "No module named 'daskgrad'" in said
    assert b"daskgrad/" not in _ship.shim()  # no path of this machine


# -------------------------------------------------------------------------------- errors under way


@pytest.mark.parametrize("loads", [pickle.loads, cloudpickle.loads])
def test_an_error_keeps_its_row_and_its_cause_through_a_pickle(loads: Any) -> None:
    error = RowError("row 'q': bad", label=("q", 1), partition=3, values={"x": 1.5, "lock": LOCK})
    error.__cause__ = two_arguments()
    error.add_note("seen by a note")
    for sent in (fit_to_travel(error), fit_to_travel(fit_to_travel(error))):
        again = loads(pickle.dumps(sent))
        assert type(again) is RowError
        assert str(again) == "row 'q': bad"
        assert (again.label, again.partition, again.values["x"]) == (("q", 1), 3, 1.5)
        assert "lock" in again.values["lock"]
        assert again.__notes__ == ["seen by a note"]
        assert isinstance(again.__cause__, TwoArguments)
        assert (again.__cause__.code, str(again.__cause__)) == (7, "7 at the moon")


def test_causes_that_cannot_be_pickled_come_back_as_what_they_are() -> None:
    for make, text in ((holding_a_lock, "locked"), (local_class, "local 1 2")):
        error = PlanError("no")
        cause: Any = make()
        error.__cause__ = cause
        again = pickle.loads(pickle.dumps(fit_to_travel(error)))
        assert type(again.__cause__) is type(cause)
        assert str(again.__cause__) == text
        assert "lock" in again.__cause__.lock


def test_a_cause_whose_class_is_missing_on_arrival_comes_as_its_text(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "desk_errors.py").write_text("class Odd(Exception):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import desk_errors  # type: ignore[import-not-found]

    error = RowError("row")
    error.__cause__ = desk_errors.Odd("no quote")
    sent = pickle.dumps(fit_to_travel(error))
    monkeypatch.undo()
    del sys.modules["desk_errors"]
    again = pickle.loads(sent)
    assert type(again) is RowError
    assert type(again.__cause__) is RuntimeError
    assert str(again.__cause__) == "desk_errors.Odd: no quote"


def test_a_message_stays_shorter_than_what_distributed_replaces() -> None:
    again = pickle.loads(pickle.dumps(RowError("y" * 50_000, values={"x": 1})))
    assert len(str(again)) < 10_000


def _through(value: Any) -> Any:
    return pickle.loads(_ship._pickled(value))


def test_equal_tensors_make_equal_bytes() -> None:
    make = [lambda: torch.arange(5.0), lambda: torch.nn.Parameter(torch.ones(2, 3)), lambda: torch.ones(2, dtype=torch.bfloat16)]
    for tensor in make:
        kept = tensor()  # so that the other one lies elsewhere
        assert _ship._pickled(kept) == _ship._pickled(tensor())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).T[1:],
        torch.tensor(1.0),
        torch.empty(0),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(2, dtype=torch.bfloat16),
        torch.eye(2).to_sparse(),
        torch.ones(2).requires_grad_(),
    ],
    ids=lambda tensor: f"{tensor.layout}-{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_a_tensor_arrives_as_it_was_and_can_be_written_into(tensor: torch.Tensor) -> None:
    again = _through(tensor)
    assert (again.dtype, again.shape, again.stride() if again.layout is torch.strided else None, again.requires_grad) == (
        tensor.dtype,
        tensor.shape,
        tensor.stride() if tensor.layout is torch.strided else None,
        tensor.requires_grad,
    )
    assert torch.equal(again.to_dense(), tensor.to_dense())
    if again.layout is torch.strided:
        with torch.no_grad():
            again.zero_()


def test_tensors_that_share_memory_still_do() -> None:
    whole = torch.arange(4.0)
    again, part = _through((whole, whole[2:]))
    again[2] = 7.0
    assert part[0] == 7.0
    assert whole[2] == 2.0, "the caller's memory is another"
