"""What a torch call means while a row function runs: a cut, a question to the rows, a fresh buffer.

A torch function mode sees every call that `fn` makes. Row at a time, and in a batch alike,

- a differentiated value that leaves torch (`float(x)`, `x.item()`, `torch.tensor(x)`, …) is a cut: a `GraphError` that names the line;
- in a batch, a Python value made of a tensor (`if x > 0`, `int(n)`, `f"{x}"`) is a question that each row answers for itself.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from . import _parameters, _recurrent
from ._autograd import reaches
from ._captured import storage_of
from ._errors import GraphError, PlanError
from ._lines import users_line
from ._parameters import Uses
from ._paths import OwnParameters, Paths, Question, TooLarge, Unbatchable

_functorch: Any = torch._C._functorch
_Handler = Callable[["RowMode", Any, tuple[Any, ...], dict[str, Any]], Any]


_FIRST = ("condition", "input", "data", "obj")
"""What torch calls the first argument of the functions below, where it is given by keyword."""


_IN_TORCH = (
    "Use the torch operation instead (torch.exp for math.exp), compare tensors with tensors, or write x.detach() where the value is meant "
    "to be a constant."
)


class RowMode(TorchFunctionMode):
    """Watches one call of the row function: on one row, or (with `paths`) on a batch of rows under vmap.

    Attributes:
        leaves: the differentiated arguments, and the places in the graph that parameters feed.
        cut: the first cut that was found, also where `fn` caught the exception.
        raised: an exception of torch that passed through, also where `fn` caught it.
        missing: the row read a missing value.
        kept: the tensors that are there before and after the call, by their storage, with their names.
        wrong: daskgrad's own error about the call, raised inside the row function.
        named: the differentiated arguments by name.
        level: the vmap level of the batch.
        uses: the shared parameters that are differentiated, and how they are used.
        limit: bytes that the calls' results may hold (`paths.nbytes`); past it the run ends.
    """

    def __init__(
        self,
        leaves: Sequence[Tensor],
        paths: Paths | None = None,
        *,
        fresh: bool = False,
        limit: float = math.inf,
        uses: Uses | None = None,
    ) -> None:
        super().__init__()
        self.leaves: list[Tensor | GradientEdge]
        self.leaves, self.paths, self.fresh, self.limit = list(leaves), paths, fresh, limit
        self.cut: GraphError | None = None
        self.raised: Exception | None = None
        self.missing = False
        self.wrong: PlanError | None = None
        self.kept: Mapping[int, str] = {}
        self.level = -1
        self.named: dict[Hashable, Tensor] = {}
        self.uses = uses

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return _opened_attention(*args, **kwargs)
        if self.uses is not None and (names := self.uses.named_in(*args, *kwargs.values())):
            return self._with_parameters(func, args, kwargs, names)
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handler = _HANDLERS.get(func)
        if handler is not None and not args and (name := next((n for n in _FIRST if n in kwargs), None)) is not None:
            args, kwargs = (kwargs[name],), {key: value for key, value in kwargs.items() if key != name}
        if self.kept and _writes(func, kwargs):
            self._refuse_to_write(func, args, kwargs)
        try:
            if handler is not None:
                result = handler(self, func, args, kwargs)
            elif func in _FACTORIES:
                result = _buffer(self, func, args, kwargs)
            else:
                result = func(*args, **kwargs)
        except GraphError:
            raise
        except Exception as error:
            self.raised = self.raised or error
            raise
        if self.paths is not None and not self.paths.traced and isinstance(result, Tensor):
            self._weigh(result)
        return result

    def _with_parameters(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> Any:
        """A call that takes differentiated parameters: by its rule, or with each row's own copies."""
        assert self.uses is not None
        attribute = getattr(getattr(func, "__self__", None), "__name__", None) if func.__name__ == "__get__" else None
        if attribute == "requires_grad":
            return True
        if not torch.is_grad_enabled() or func is Tensor.detach or (attribute is not None and attribute not in _TENSORS):
            return func(*args, **kwargs)
        if self.paths is not None and not self.uses.own.intersection(names) and not _foreign(self, [args, kwargs]):
            if (slices := _parameters.slices(func, args, kwargs, self.uses)) is not None:
                return slices
            found = _parameters.rule(func, args, kwargs, self.uses)
            if found is not None:
                return self._tapped(func, args, kwargs, *found)
            if func in _RECURRENT and not kwargs and (opened := self._opened(func, args)) is not NotImplemented:
                return opened
        if self.paths is not None and (without := [name for name in names if name not in self.uses.own]):
            self.paths.stop(OwnParameters(without))
        args, kwargs = self.uses.replaced(list(args), self._own_copy), self.uses.replaced(kwargs, self._own_copy)
        return self._call(func, tuple(args), kwargs)

    def _opened(self, func: Any, args: tuple[Any, ...]) -> Any:
        """A recurrent layer or cell with its linear layers in sight, which have rules."""
        if not func.__name__.endswith("cell") and _recurrent.drops(args):
            self.unbatchable("dropout between recurrent layers")
        with self:
            return _recurrent.by_formula(func.__name__, args)

    def _tapped(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Tensor, makes: dict[str, Any]) -> Any:
        """The call's output, whose place in the graph is kept so that it can be differentiated by, whatever is written into it later."""
        assert self.uses is not None and self.paths is not None
        output = self._at_once(*args) if func is F.linear and not kwargs else None
        if output is None:
            output = self._call(func, args, kwargs)
        if self.of_rows(output) is None:
            output = self.own(output)
        made = _made(_bottom(output))
        if made is None:
            output = output.clone()
            made = _bottom(output)
        if not made.requires_grad:
            with temporarily_pop_interpreter_stack():
                _begin_graph(made)
        place = get_gradient_edge(made)
        self.leaves.append(place)
        rows = self.of_rows(given)
        rows = given.expand(len(self.paths.rows), *given.shape) if rows is None else rows
        axis, shape = _functorch.maybe_get_bdim(output), _bottom(output).shape
        self.uses.calls.append(_parameters.Call(rows.detach(), place, shape, axis, makes, rows._version))
        return output

    def _at_once(self, given: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """A linear layer of all rows with its bias in the same product, which vmap would add in another step; None where it cannot be."""
        rows = self.plain_rows(given)
        if rows is None or any(map(_functorch.is_functorch_wrapped_tensor, (weight, *([] if bias is None else [bias])))):
            return None
        if rows.dim() < 2 or weight.dim() != 2 or rows.shape[-1] != weight.shape[1] or (bias is not None and bias.dim() != 1):
            return None
        with temporarily_pop_interpreter_stack():
            flat = rows if rows.dim() == 2 else rows.reshape(-1, rows.shape[-1])
            output = flat @ weight.T if bias is None else torch.addmm(bias, flat, weight.T)
            output = output if rows.dim() == 2 else output.reshape(*rows.shape[:-1], len(weight))
        self._weigh(output)
        return self.batched(output)

    def _own_copy(self, name: str) -> Tensor:
        """The copy of a parameter that belongs to one row."""
        assert self.uses is not None
        if name not in self.uses.leaves:
            target = self.uses.targets[name].detach()
            with contextlib.nullcontext() if self.paths is None else temporarily_pop_interpreter_stack():
                copies = target if self.paths is None else target.expand(len(self.paths.rows), *target.shape)
                leaf = self.uses.leaves[name] = copies.clone().requires_grad_()
            self.leaves.append(leaf)
            if self.paths is not None:
                self._weigh(leaf)
        leaf = self.uses.leaves[name]
        return leaf if self.paths is None else _functorch._add_batch_dim(leaf, 0, self.level)

    def _weigh(self, result: Tensor) -> None:
        assert self.paths is not None
        self.paths.nbytes += _nbytes(result)
        self.paths.calls += 1
        if self.paths.nbytes > self.limit and len(self.paths.rows) > 1:
            self.paths.stop(TooLarge())

    # what a tensor is

    def of_rows(self, tensor: Any) -> Tensor | None:
        """The value of a batched tensor with the rows in front, (rows, *shape); None for one that is the same for every row."""
        if self.paths is None or not isinstance(tensor, Tensor):
            return None
        axis = None
        while _functorch.is_functorch_wrapped_tensor(tensor):
            if _functorch.is_batchedtensor(tensor):
                if axis is not None or _functorch.maybe_get_level(tensor) != self.level:
                    return None  # batched by a vmap of the row function's own
                axis = _functorch.maybe_get_bdim(tensor)
            tensor = _functorch.get_unwrapped(tensor)
        return None if axis is None else tensor.movedim(axis, 0)

    def plain_rows(self, tensor: Any) -> Tensor | None:
        """As `of_rows`, but None also where a transform of the row function's own is around or beneath: what is made of it is whole."""
        if not (_functorch.is_batchedtensor(tensor) and _functorch.maybe_get_level(tensor) == self.level):
            return None
        return None if _functorch.is_functorch_wrapped_tensor(_functorch.get_unwrapped(tensor)) else self.of_rows(tensor)

    def batched(self, rows: Tensor) -> Tensor:
        """(rows, *shape) as the batched tensor that the row function sees."""
        tensor: Tensor = _functorch._add_batch_dim(rows, 0, self.level)
        return tensor

    def differentiated(self, tensor: Any) -> bool:
        """Whether a gradient that was asked for would flow through `tensor`."""
        if not isinstance(tensor, Tensor) or not torch.is_grad_enabled():
            return False
        bottom = _bottom(tensor)
        return bottom.requires_grad and reaches(bottom, self.leaves)

    # what is to be done about it

    def refuse(self, what: str, remedy: str = _IN_TORCH) -> None:
        """Raise for a differentiated value that leaves torch by `what`, at the user's line."""
        self.cut = self.cut or GraphError(
            f"{users_line()}: {what} takes a differentiated value out of torch, so no gradient could pass. {remedy}"
        )
        raise self.cut

    def _refuse_to_write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise where a call would write into a tensor that was there before: other rows, and the caller, would see it."""
        targets = _tensors_in([kwargs.get("out"), *args[:1]])
        name = next((self.kept[s] for t in targets if (s := storage_of(_bottom(t))) in self.kept), None)
        if name is not None:
            self.cut = self.cut or GraphError(
                f"{users_line()}: {func.__name__}() writes into {name!r}, which was made outside of the row function: other rows would see "
                f"it, in an order that is nobody's choice, and so would you afterwards. Make the tensor inside, or write into "
                f"{name}.clone()."
            )
            raise self.cut

    def unbatchable(self, why: str) -> NoReturn:
        """End the run: rows on this path go one by one."""
        assert self.paths is not None
        self.paths.stop(Unbatchable(f"{why}, at {users_line()}"))

    def own(self, result: Any) -> Any:
        """A copy of a fresh buffer for each row, so that rows can write into it."""
        if not isinstance(result, Tensor) or self.paths is None or _functorch.is_functorch_wrapped_tensor(result):
            return result
        count = self.paths.count
        copies = result.expand(count, *result.shape).clone()
        return _functorch._add_batch_dim(copies, 0, self.level)


_TENSORS = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})
"""Attributes that are tensors of the same values."""


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_IN_PLACE = {"__setitem__", *(f"__i{name}__" for name in _OPERATORS)}


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call writes into its first argument, or into `out`."""
    name = func.__name__
    return (name[-1] == "_" and (name[-2] != "_" or name in _IN_PLACE) and name != "requires_grad_") or "out" in kwargs


def _foreign(mode: RowMode, args: Any) -> bool:
    """Whether a tensor among `args` is batched by a vmap of the row function's own."""
    tensors = (tensor for tensor in _tensors_in(args) if _functorch.is_functorch_wrapped_tensor(tensor))
    return any(mode.of_rows(tensor) is None for tensor in tensors)


def _bottom(tensor: Tensor) -> Tensor:
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def _made(tensor: Tensor) -> Tensor | None:
    """The tensor that a call has made, where `tensor` is all of it in another shape; None for another view of it.

    What is written into a view passes by its place in the graph, never by that of the tensor which it is a view of.
    """
    base = tensor._base
    if base is None:
        return tensor
    whole = base.numel() == tensor.numel() and base.is_contiguous() and tensor.is_contiguous()
    return base if whole else None


def _begin_graph(tensor: Tensor) -> None:
    """Make `tensor`, which has none, the beginning of a graph, and yet no leaf, into which nobody may write."""
    nothing = tensor.narrow(0, 0, 0)
    nothing.copy_(torch.empty_like(nothing).requires_grad_())


def _nbytes(tensor: Tensor) -> int:
    bottom = _bottom(tensor)
    return bottom.numel() * bottom.element_size()


# --- a value leaves torch ---------------------------------------------------------------------------------------------


def _leaves_as(what: str) -> _Handler:
    def leaves(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if mode.differentiated(args[0]):
            mode.refuse(what)
        rows = mode.of_rows(args[0])
        if rows is None:
            return func(*args, **kwargs)
        if rows.dim() > 1 and what not in ("float()", ".item()"):
            mode.unbatchable(f"{what} of a vector")
        answer = _answer(mode, rows, func, args)
        return _PLAIN[what](answer) if what in _PLAIN else answer

    return leaves


_PLAIN: dict[str, Callable[[Any], Any]] = {"float()": float, "complex()": complex, ".numpy()": np.asarray}
"""What Python and NumPy want these to be, also of an integer."""


def _answer(mode: RowMode, rows: Tensor, func: Any, args: tuple[Any, ...]) -> Any:
    """The Python value of a one-element tensor in each row."""
    assert mode.paths is not None
    if rows[0].numel() != 1:
        return func(*args)  # torch's own error
    return mode.paths.ask(lambda: _numbers(rows), question=Question(rows))


def _numbers(rows: Tensor) -> np.ndarray[Any, Any]:
    return rows.detach().reshape(len(rows)).resolve_conj().resolve_neg().cpu().numpy()


def is_whole(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Which of `numbers` have a whole part that int64 holds."""
    return np.abs(numbers) < 2.0**62 if numbers.dtype.kind == "f" else np.ones(len(numbers), bool)


def _plain(tensor: Any) -> Any:
    """`tensor` without its graph: torch warns where a Python value is made of one that requires a gradient."""
    return tensor.detach() if isinstance(tensor, Tensor) and tensor.requires_grad else tensor


def _truth(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = mode.of_rows(args[0])
    return func(_plain(args[0])) if rows is None else bool(_answer(mode, rows != 0, func, args))


def _whole(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = mode.of_rows(args[0])
    if rows is None:
        return func(_plain(args[0]), **kwargs)
    if func is Tensor.__index__ and (rows.is_floating_point() or rows.is_complex()):
        return func(rows[0].detach())  # torch's own error
    if rows[0].numel() != 1:
        return func(*args, **kwargs)
    assert mode.paths is not None

    def whole() -> np.ndarray[Any, Any]:
        numbers = _numbers(rows)
        if not is_whole(numbers).all():
            mode.unbatchable("int() of a value that is not finite, or huge")
        return numbers.astype(np.int64)

    return int(mode.paths.ask(whole, question=Question(rows, whole=True)))


def _text(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = mode.of_rows(args[0])
    if rows is None or mode.paths is None:
        return func(_plain(args[0]), *args[1:], **kwargs)
    return mode.paths.ask(lambda: np.array([func(row, *args[1:], **kwargs) for row in rows.detach()], dtype=object))


def _contains(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _together(mode, func, args, kwargs, lambda whole, one: (whole == one).any())


def _both(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The second of two tensors, where it is given by keyword, among `args`."""
    if len(args) > 1 or "other" not in kwargs:
        return args, kwargs
    return (*args, kwargs["other"]), {name: value for name, value in kwargs.items() if name != "other"}


def _equal(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = _both(args, kwargs)
    if isinstance(args[1], Tensor) and args[0].shape != args[1].shape:
        return False
    return _together(mode, func, args, kwargs, lambda a, b: (a == b).all())


def _allclose(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = _both(args, kwargs)
    return _together(mode, func, args[:2], kwargs, lambda a, b: torch.isclose(a, b, *args[2:], **kwargs).all(), whole=args)


def _together(
    mode: RowMode,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    truth: Callable[[Tensor, Tensor], Tensor],
    whole: tuple[Any, ...] | None = None,
) -> Any:
    """The truth of two tensors together, as a question."""
    if mode.of_rows(args[0]) is None and mode.of_rows(args[1]) is None:
        return func(*(whole or args), **kwargs)
    answer = truth(args[0], args[1])
    rows = mode.of_rows(answer)
    assert mode.paths is not None
    return bool(answer) if rows is None else bool(mode.paths.ask(lambda: _numbers(rows), question=Question(rows)))


# --- a value is copied without its graph ------------------------------------------------------------------------------


def _tensors_in(data: Any) -> Iterator[Tensor]:
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, list | tuple):
        for item in data:
            yield from _tensors_in(item)
    elif isinstance(data, dict):
        for item in data.values():
            yield from _tensors_in(item)


def _differ(mode: RowMode, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a tensor among the arguments differs from row to row."""
    return any(mode.of_rows(tensor) is not None for tensor in _tensors_in([*args, *kwargs.values()]))


def _buffer(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call makes anew: each row's own, where rows are to write into it."""
    result = func(*args, **kwargs)
    return mode.own(result) if mode.fresh else result


def _literal(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.tensor(data)`, `x.new_tensor(data)`: copies values, never the graph."""
    data = kwargs["data"] if "data" in kwargs else args[-1] if args else None
    if any(mode.differentiated(tensor) for tensor in _tensors_in(data)):
        mode.refuse(f"{func.__name__}()")
    if _differ(mode, [data], {}):
        made = _stacked(data)
        return made.to(kwargs["dtype"]) if kwargs.get("dtype") is not None else made
    return _buffer(mode, func, args, kwargs)


def _stacked(data: Any) -> Tensor:
    """What `torch.tensor(data)` is, where `data` holds batched tensors that are constants for the gradient."""
    if isinstance(data, Tensor):
        return data.detach().clone()
    if not isinstance(data, list | tuple):
        return torch.tensor(data)
    parts = [_stacked(item) for item in data]
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    return torch.stack([part.to(dtype) for part in parts])


def _of_list(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`as_tensor`, `asarray`: keep the graph of a tensor, cut that of a list of tensors."""
    data = args[0] if args else next(iter(kwargs.values()), None)
    if isinstance(data, list | tuple):
        return _literal(mode, func, args, kwargs)
    return func(*args, **kwargs)


def _of_list_in_self(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.new([y])`: cuts the graph of what is in the list."""
    if any(mode.differentiated(tensor) for item in args[1:] if not isinstance(item, Tensor) for tensor in _tensors_in(item)):
        mode.refuse("new()")
    return _buffer(mode, func, args, kwargs)


def _takes_numbers(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`linspace`, `arange`, `full`: a tensor given as a number loses its graph."""
    numbers = args[1:] if func in (torch.full_like, Tensor.new_full) else args
    if any(mode.differentiated(value) for value in [*numbers, *kwargs.values()]):
        mode.refuse(f"{func.__name__}()")
    return _buffer(mode, func, args, kwargs)


# --- a gradient inside the row function ---------------------------------------------------------------------------------


def _gradient(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.autograd.grad`: needs `create_graph`, else what it gives is a constant for the gradient around it; no batch can do it."""
    outputs = args[0] if args else kwargs["outputs"]
    if any(_functorch.is_gradtrackingtensor(tensor) for tensor in _tensors_in([args, kwargs])):  # torch.func.grad's own call
        return func(*args, **kwargs)
    graph = kwargs.get("create_graph", args[4] if len(args) > 4 else False)
    if not graph and any(mode.differentiated(output) for output in _tensors_in([outputs])):
        mode.refuse(
            "torch.autograd.grad() without create_graph=True",
            "Write torch.func.grad(f)(x), which runs in batches, or create_graph=True; or differentiate something.detach() where the "
            "slope is meant to be a constant.",
        )
    if mode.paths is not None:
        mode.unbatchable("torch.autograd.grad() of a batch is not to be had; torch.func.grad(f)(x) is")
    return func(*args, **kwargs)


def _backward(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`y.backward()`: it puts gradients where nobody looks for them."""
    if any(mode.differentiated(output) for output in _tensors_in([args[0] if args else [*kwargs.values()]])):
        mode.refuse(
            f"{func.__name__}()",
            "A row function returns the value, and daskgrad differentiates it: leave backward() out, and return what it was called on. "
            "A slope that is needed inside is torch.func.grad(f)(x).",
        )
    if mode.paths is not None:
        mode.unbatchable("backward() inside")
    return func(*args, **kwargs)


# --- attributes that vmap hides ---------------------------------------------------------------------------------------


def _data(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wrapped = _functorch.is_functorch_wrapped_tensor(args[0])
    return args[0].detach() if wrapped else func(*args, **kwargs)


def _of_bottom(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if func is not _getter("requires_grad") and mode.of_rows(tensor) is not None and any(_bottom(tensor) is leaf for leaf in mode.leaves):
        return func(_bottom(tensor).clone())  # as row at a time, where `fn` gets a copy of the leaf, into which it may write
    inner = _functorch.is_gradtrackingtensor(tensor)  # of a torch.func.grad of the row function's own, which asks for itself
    return func(tensor if inner or mode.of_rows(tensor) is None else _bottom(tensor), *args[1:], **kwargs)


# --- what looks at requires_grad inside torch, where the mode cannot answer --------------------------------------------


def _never_batched(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _differ(mode, args, kwargs):
        mode.unbatchable(f"torch's {func.__name__} would take a batch for a constant")
    return func(*args, **kwargs)


def _strided(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In place, the gradient in a batch is silently wrong: the rows' own strides are taken for the batch's."""
    if mode.of_rows(args[0]) is not None:
        mode.unbatchable("as_strided_ has no gradient in a batch")
    return func(*args, **kwargs)


def _select_scatter(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.select_scatter` by its meaning: the gradient of torch's own is silently wrong where a batch is differentiated."""
    if not _differ(mode, args, kwargs):
        return func(*args, **kwargs)
    given = dict(zip(("input", "src", "dim", "index"), args, strict=False)) | kwargs
    whole, dim, index = given["input"], given["dim"], given["index"]
    size, rest = whole.shape[dim], [*whole.shape]
    rest.pop(dim)
    if not -size <= index < size or [*given["src"].shape] != rest:
        return func(*args, **kwargs)  # torch's own error
    here = torch.arange(size, device=whole.device) == index % size
    shape = [1] * whole.dim()
    shape[dim] = -1
    return torch.where(here.reshape(shape), given["src"].unsqueeze(dim), whole)


def _index_select(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An index of shape () as one of shape (1,): with the former the gradient of a batch is silently that of several rows."""
    given = dict(zip(("input", "dim", "index"), args, strict=False)) | kwargs
    index = given.get("index")
    if isinstance(index, Tensor) and not index.dim() and given["input"].dim() and _differ(mode, args, kwargs):
        return torch.index_select(given["input"], given["dim"], index.reshape(1))
    return func(*args, **kwargs)


def _roll(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A single number rolled is itself; vmap would roll the rows of the batch."""
    dims = args[2] if len(args) > 2 else kwargs.get("dims", ())
    if args[0].dim() or dims not in ((), []) or mode.of_rows(args[0]) is None:
        return func(*args, **kwargs)
    return args[0].clone()


# --- kernels that are faster in another layout ------------------------------------------------------------------------


def _max_pool(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's kernel finds the largest several times as fast where the channels lie side by side; it is then taken where it lies."""
    rows = mode.plain_rows(args[0])
    if rows is None or not pooled_by_channels(rows) or mode.paths is None or mode.paths.traced or kwargs.get("return_indices"):
        return func(*args, **kwargs)
    options = {name: value for name, value in kwargs.items() if name != "return_indices"}
    with temporarily_pop_interpreter_stack():
        images = rows.reshape(-1, *rows.shape[-3:])
        beside = images.detach().contiguous(memory_format=torch.channels_last)
        index = F.max_pool2d_with_indices(beside, *args[1:], **options)[1].contiguous()
        pooled = images.flatten(2).gather(2, index.flatten(2))
        return mode.batched(pooled.reshape(*rows.shape[:-2], *index.shape[-2:]))


def pooled_by_channels(rows: Tensor) -> bool:
    """Whether the copies pay for images (rows, [samples,] channels, height, width)."""
    return rows.dim() in (4, 5) and rows.dtype in (torch.float32, torch.float64) and rows.device.type == "cpu" and rows.shape[-3] >= 8


# --- reductions whose gradient at a tie vmap shares out otherwise ------------------------------------------------------


def _extreme(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.max()` shares its gradient among equal elements; vmap gives it to one of them. `amax` shares it in both."""
    if len(args) > 1 or kwargs or mode.of_rows(args[0]) is None or args[0].dim() == 0:
        return func(*args, **kwargs)
    tensor, largest = args[0], func in (torch.max, Tensor.max)
    extreme = torch.amax if largest else torch.amin
    rows = mode.of_rows(tensor)
    assert mode.paths is not None
    if rows is None or not rows.is_floating_point() or not (mode.paths.traced or rows.isnan().any()):
        return extreme(tensor)
    lost = tensor.isnan()
    found = extreme(torch.where(lost, -math.inf if largest else math.inf, tensor))
    return torch.where(lost.any(), _share(tensor, lost), found)


def _share(tensor: Tensor, lost: Tensor) -> Tensor:
    """NaN, whose gradient those that are NaN share."""
    return torch.where(lost, tensor, 0).sum() / lost.sum().clamp(min=1)


def _middle(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.median()`: likewise."""
    if len(args) > 1 or kwargs or mode.of_rows(args[0]) is None or args[0].dim() == 0 or not args[0].is_floating_point():
        return func(*args, **kwargs)
    tensor = args[0]
    middle = func(tensor.detach())
    equal, lost = tensor == middle, tensor.isnan()
    # Whichever of the two is taken, the others are not equal to it even where it is infinite.
    above = torch.amax(torch.where(equal, tensor, -math.inf))
    below = torch.amin(torch.where(equal, tensor, math.inf))
    return torch.where(middle.isnan(), _share(tensor, lost), torch.where(middle > 0, above, below))


# --- sizes that depend on values --------------------------------------------------------------------------------------


def _nonzero(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = mode.of_rows(args[0])
    if rows is None or len(args) > 1 or "out" in kwargs:
        return func(*args, **kwargs)
    found = _places(mode, args[0] != 0, rows.shape[1:])
    return tuple(found.unbind(1)) if kwargs.get("as_tuple") else found


def _where(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) == 1 and not kwargs and mode.of_rows(args[0]) is not None:
        return _nonzero(mode, func, args, {"as_tuple": True})
    return func(*args, **kwargs)


def _getitem(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, key = args
    if isinstance(key, Tensor) and key.dtype in (torch.bool, torch.uint8) and mode.of_rows(key) is not None:
        return _masked(mode, tensor, key)
    return func(*args, **kwargs)


def _masked_select(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or mode.of_rows(args[1]) is None:
        return func(*args, **kwargs)
    return _masked(mode, *torch.broadcast_tensors(*args))


def _masked(mode: RowMode, tensor: Tensor, mask: Tensor) -> Tensor:
    """`tensor[mask]` in rows that have equally many places to show."""
    shape = mask.shape
    if tensor.shape[: len(shape)] != shape:
        mode.unbatchable("a mask of another shape")
    index = _flat_places(mode, mask)  # (count,)
    rest = tensor.shape[len(shape) :]
    flat = tensor.reshape(-1, *rest)
    index = index.reshape(-1, *[1] * len(rest)).expand(-1, *rest)
    return torch.gather(flat, 0, index)


def _flat_places(mode: RowMode, mask: Tensor) -> Tensor:
    """The flat indices of what is true, in rows that have equally many: (count,)."""
    flat = (mask != 0).reshape(-1)
    counts = mode.of_rows(flat.sum(-1))
    assert counts is not None and mode.paths is not None
    count = int(mode.paths.ask(lambda: _numbers(counts), question=Question(counts)))
    order = torch.argsort((~flat).to(torch.uint8), stable=True)
    return order[:count]


def _places(mode: RowMode, mask: Tensor, shape: Sequence[int]) -> Tensor:
    """The indices of what is true: (count, dims)."""
    index = _flat_places(mode, mask)
    axes = []
    for size in reversed(shape):
        axes.append(index % size)
        index = index // size
    if not axes:
        return index.new_zeros((index.shape[0], 0)) if math.prod(index.shape) else index.reshape(0, 0)
    return torch.stack(axes[::-1], dim=-1)


# --- recurrent layers -------------------------------------------------------------------------------------------------


def _recur(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A recurrent layer or cell by its formula, where anything in it differs from row to row."""
    if kwargs or not _differ(mode, args, kwargs):
        return func(*args, **kwargs)
    name = func.__name__
    if not name.endswith("cell") and _recurrent.drops(args):
        mode.unbatchable("dropout between recurrent layers")
    result = _recurrent.by_formula(name, args)
    return func(*args) if result is NotImplemented else result


def _attend(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attention by its formula: the fused kernel has no batching rule."""
    if not _differ(mode, args, kwargs):
        return func(*args, **kwargs)
    return torch.ops.aten._scaled_dot_product_attention_math(*args, **kwargs)[0]


def _weighted(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss by whose weights a row is differentiated: torch has no derivative for that, but its batching rule has, of a batch of one."""
    given = dict(zip(_PARAMETERS_OF[func], args, strict=False)) | kwargs
    if func is F.binary_cross_entropy_with_logits and given["target"].dtype == torch.int64:
        # Of an integer torch makes a number in a batch, and an error of one row.
        return func(**{**given, "target": given["target"].to(given["input"].dtype)})
    if mode.paths is not None or not any(mode.differentiated(given.get(name)) for name in ("weight", "pos_weight")):
        return func(*args, **kwargs)
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    options = {name: value for name, value in given.items() if name not in tensors}
    one_row = torch.vmap(lambda *values: func(**dict(zip(tensors, values, strict=True)), **options))
    return one_row(*(tensor.unsqueeze(0) for tensor in tensors.values())).squeeze(0)


_PARAMETERS_OF = {
    loss: tuple(inspect.signature(loss).parameters)
    for loss in (F.cross_entropy, F.nll_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
}


def _embed(mode: RowMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A table of each row's own: vmap puts the tables one below the other, and knows `padding_idx` in the first alone."""
    given = dict(zip(("input", "weight", "padding_idx"), args, strict=False)) | kwargs
    padding, weight = given.get("padding_idx"), given["weight"]
    if padding is None or mode.of_rows(weight) is None:
        return func(*args, **kwargs)
    others = {name: value for name, value in kwargs.items() if name not in ("input", "weight", "padding_idx")}
    found = func(given["input"], weight, None, *args[3:], **others)
    return torch.where((given["input"] == padding % weight.shape[0]).unsqueeze(-1), found.detach(), found)


_opened_attention = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda tensors: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
"""torch's own attention, which hands itself over whole to a mode, with its parts in sight: the linear layers have rules, the fused kernel
has no batching rule, and a layer of the whole would be neither."""


_BLIND = [getattr(F, name) for name in ("linear_cross_entropy",) if hasattr(F, name)]


_RECURRENT = [getattr(torch, name + cell) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in ("", "_cell")]


def _getter(attribute: str) -> Any:
    """What reading an attribute of a tensor calls."""
    return getattr(Tensor, attribute).__get__


_HANDLERS: dict[Any, _Handler] = {
    Tensor.__float__: _leaves_as("float()"),
    Tensor.item: _leaves_as(".item()"),
    Tensor.tolist: _leaves_as(".tolist()"),
    Tensor.numpy: _leaves_as(".numpy()"),
    Tensor.__array__: _leaves_as("a NumPy conversion"),
    Tensor.__complex__: _leaves_as("complex()"),
    Tensor.__dlpack__: _leaves_as("a DLPack export"),
    Tensor.storage: _leaves_as("the storage"),
    Tensor.untyped_storage: _leaves_as("the storage (also for pickle and torch.save)"),
    Tensor.__bool__: _truth,
    Tensor.is_nonzero: _truth,
    torch.is_nonzero: _truth,
    Tensor.__int__: _whole,
    Tensor.__index__: _whole,
    Tensor.__format__: _text,
    Tensor.__repr__: _text,
    Tensor.__contains__: _contains,
    torch.equal: _equal,
    Tensor.equal: _equal,
    torch.allclose: _allclose,
    Tensor.allclose: _allclose,
    torch.tensor: _literal,
    torch.scalar_tensor: _takes_numbers,
    Tensor.new_tensor: _literal,
    Tensor.new: _of_list_in_self,
    torch.as_tensor: _of_list,
    torch.asarray: _of_list,
    torch.linspace: _takes_numbers,
    torch.logspace: _takes_numbers,
    torch.arange: _takes_numbers,
    torch.range: _takes_numbers,
    torch.full: _takes_numbers,
    torch.full_like: _takes_numbers,
    Tensor.new_full: _takes_numbers,
    _getter("data"): _data,
    _getter("requires_grad"): _of_bottom,
    _getter("grad_fn"): _of_bottom,
    _getter("is_leaf"): _of_bottom,
    **dict.fromkeys(_RECURRENT, _recur),
    F.scaled_dot_product_attention: _attend,
    F.embedding: _embed,
    **dict.fromkeys(_PARAMETERS_OF, _weighted),
    **dict.fromkeys(_BLIND, _never_batched),
    torch.as_strided_: _strided,
    Tensor.as_strided_: _strided,
    torch.select_scatter: _select_scatter,
    Tensor.select_scatter: _select_scatter,
    torch.index_select: _index_select,
    Tensor.index_select: _index_select,
    torch.autograd.grad: _gradient,
    torch.autograd.backward: _backward,
    Tensor.backward: _backward,
    F.max_pool2d: _max_pool,
    torch.max_pool2d: _max_pool,
    torch.roll: _roll,
    Tensor.roll: _roll,
    torch.max: _extreme,
    Tensor.max: _extreme,
    torch.min: _extreme,
    Tensor.min: _extreme,
    torch.median: _middle,
    Tensor.median: _middle,
    torch.nanmedian: _middle,
    Tensor.nanmedian: _middle,
    torch.nonzero: _nonzero,
    Tensor.nonzero: _nonzero,
    torch.argwhere: _nonzero,
    Tensor.argwhere: _nonzero,
    torch.where: _where,
    Tensor.__getitem__: _getitem,
    torch.masked_select: _masked_select,
    Tensor.masked_select: _masked_select,
}

_FACTORIES = frozenset(
    {
        torch.zeros,
        torch.ones,
        torch.empty,
        torch.eye,
        torch.zeros_like,
        torch.ones_like,
        torch.empty_like,
        torch.clone,
        torch.tril_indices,
        torch.triu_indices,
        Tensor.new_zeros,
        Tensor.new_ones,
        Tensor.new_empty,
        Tensor.clone,
        Tensor.detach,
    }
)
