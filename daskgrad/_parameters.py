"""Gradients by shared parameters, per row, without forming them.

A torch call that takes a parameter is seen by the function mode. Of the calls with a rule (linear, convolutions, embedding, the norms)
the layer's input a is kept, and b is the gradient by its output: a row's gradient is then a sum of outer products b aᵀ, of which norms
and products are taken without forming it (Goodfellow 2015, arXiv:1510.01799; for sequences Li et al. 2022, arXiv:2110.05679). A
parameter that is used in any other way is given to each row as its own, and its gradient is formed.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import _reduce

Gradient = Tensor  # (rows, *shape of the parameter)


# --- which parameters -------------------------------------------------------------------------------------------------


def parameters_of(shared: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of shared arguments by path: `model.head.weight`, `w`, `weights.a`. Tied parameters appear once."""
    found: dict[str, Tensor] = {}
    for name, value in shared.items():
        found.update(_tensors(name, value))
    return found


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, nn.Module):
        yield from ((f"{name}.{path}", parameter) for path, parameter in value.named_parameters())
    elif isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(f"{name}.{key}", item)


def names_in(shared: Mapping[str, Any]) -> list[str]:
    """Every tensor of shared arguments by path, buffers and tied parameters too."""
    modules = {name: value for name, value in shared.items() if isinstance(value, nn.Module)}
    inside = [f"{name}.{path}" for name, module in modules.items() for path in module.state_dict()]
    return list(dict.fromkeys([*parameters_of(shared), *inside]))


def matching(wish: str, names: Sequence[str]) -> list[str]:
    """The paths that `wish` means: itself, all below it, or a glob."""
    return [name for name in names if name == wish or name.startswith(f"{wish}.") or fnmatch.fnmatchcase(name, wish)]


# --- how they are used ------------------------------------------------------------------------------------------------


@dataclass
class Outer:
    """Contributions b aᵀ to a weight (out, in): a (rows, t, in), b (rows, t, out); `shape` is the parameter's."""

    a: Tensor
    b: Tensor
    shape: torch.Size

    def formed(self) -> Gradient:
        return (self.b.mT @ self.a).reshape(len(self.a), *self.shape)

    def squared(self) -> Tensor:
        steps, size_in, size_out = self.a.shape[1], self.a.shape[2], self.b.shape[2]
        if steps == 1:
            return _squared(self.a) * _squared(self.b)
        if steps * (size_in + size_out) <= size_in * size_out:
            products = (self.a @ self.a.mT) * (self.b @ self.b.mT)  # (rows, t, t)
            return _unless_cancelled(products.sum((1, 2)), products.diagonal(dim1=1, dim2=2).sum(1), self)
        return _squared(self.formed())

    def at(self, rows: Tensor) -> Outer:
        return Outer(self.a[rows], self.b[rows], self.shape)

    def along(self, vector: Tensor) -> Tensor:
        matrix = vector.to(self.b.dtype).reshape(self.b.shape[2], self.a.shape[2])
        return (self.b * (self.a @ matrix.mT)).sum((1, 2))

    def total(self, weights: Tensor) -> Tensor:
        weighted = (self.b * weights.to(self.b.dtype).reshape(-1, 1, 1)).reshape(-1, self.b.shape[2])
        return (weighted.mT @ self.a.reshape(-1, self.a.shape[2])).reshape(self.shape)

    def total_squares(self, weights: Tensor) -> Tensor:
        if self.a.shape[1] > 1:
            return Formed(self.formed()).total_squares(weights)
        return Outer(self.a.square(), self.b.square(), self.shape).total(weights)


@dataclass
class Rows:
    """Contributions b to the rows `index` of a table: index (rows, t), b (rows, t, width)."""

    index: Tensor
    b: Tensor
    shape: torch.Size

    def formed(self) -> Gradient:
        table = self.b.new_zeros((len(self.b), *self.shape))
        return table.scatter_add(1, self.index.unsqueeze(-1).expand_as(self.b), self.b)

    def squared(self) -> Tensor:
        if self.index.shape[1] == 1:
            return _squared(self.b)
        index, order = self.index.sort(1)
        place = (index[:, 1:] != index[:, :-1]).cumsum(1)  # a table of those rows alone that are there, (rows, t - 1)
        place = torch.cat([place.new_zeros((len(place), 1)), place], 1).unsqueeze(-1).expand_as(self.b)
        b = self.b.gather(1, order.unsqueeze(-1).expand_as(self.b))
        return _squared(torch.zeros_like(b).scatter_add(1, place, b))

    def along(self, vector: Tensor) -> Tensor:
        return (self.b * vector.to(self.b.dtype).reshape(self.shape)[self.index]).sum((1, 2))

    def total(self, weights: Tensor) -> Tensor:
        weighted = (self.b * weights.to(self.b.dtype).reshape(-1, 1, 1)).reshape(-1, self.b.shape[2])
        return self.b.new_zeros(self.shape).index_add(0, self.index.reshape(-1), weighted)

    def total_squares(self, weights: Tensor) -> Tensor:
        return Formed(self.formed()).total_squares(weights)

    def at(self, rows: Tensor) -> Rows:
        return Rows(self.index[rows], self.b[rows], self.shape)


@dataclass
class Tied:
    """Both kinds of contributions, to a table that is a weight, too."""

    outer: Outer
    rows: Rows

    @property
    def shape(self) -> torch.Size:
        return self.rows.shape

    def formed(self) -> Gradient:
        return self.outer.formed() + self.rows.formed()

    def squared(self) -> Tensor:
        steps = self.outer.b.shape[1]
        met = self.outer.b.gather(2, self.rows.index.unsqueeze(1).expand(-1, steps, -1))  # (rows, steps, t)
        cross = (met * (self.outer.a @ self.rows.b.mT)).sum((1, 2))
        own = self.outer.squared() + self.rows.squared()
        return _unless_cancelled(own + 2 * cross, own, self)

    def along(self, vector: Tensor) -> Tensor:
        return self.outer.along(vector) + self.rows.along(vector)

    def total(self, weights: Tensor) -> Tensor:
        return self.outer.total(weights) + self.rows.total(weights)

    def total_squares(self, weights: Tensor) -> Tensor:
        return Formed(self.formed()).total_squares(weights)

    def at(self, rows: Tensor) -> Tied:
        return Tied(self.outer.at(rows), self.rows.at(rows))


@dataclass
class Formed:
    """A gradient (rows, *shape) as it is."""

    gradient: Gradient

    def formed(self) -> Gradient:
        return self.gradient

    def squared(self) -> Tensor:
        return _squared(self.gradient)

    def along(self, vector: Tensor) -> Tensor:
        return (self.gradient * vector.to(self.gradient.dtype).reshape(self.gradient.shape[1:])).reshape(len(self.gradient), -1).sum(1)

    def total(self, weights: Tensor) -> Tensor:
        summed: Tensor = torch.tensordot(weights.to(self.gradient.dtype), self.gradient, 1)
        return summed

    def total_squares(self, weights: Tensor) -> Tensor:
        return Formed(self.gradient.square()).total(weights)


Part = Outer | Rows | Tied | Formed
Make = Callable[["Call", Tensor], Part]  # from the call, and the gradient by its output, with the rows in front


def _squared(gradient: Tensor) -> Tensor:
    flat = gradient.reshape(len(gradient), -1)
    whole = flat.shape[1] // PIECE * PIECE
    squared: Tensor = torch.linalg.vector_norm(flat[:, whole:], dim=1).square()
    if whole:
        squared = squared + torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, PIECE)), dim=2).square().sum(1)
    return squared


PIECE = 4096
"""Elements whose squares are summed one after the other: in float32 the digits of longer sums are lost (`sum` itself adds in pairs)."""


CANCELLED = 1e-3
"""Where a squared norm is a smaller part than this of the squares that it is summed from, digits were lost."""
FORMED = 2**22
"""Elements of gradients that are formed together then."""


def _unless_cancelled(squared: Tensor, squares: Tensor, part: Outer | Tied) -> Tensor:
    """`squared` (rows,), but from the formed gradient where contributions nearly cancel."""
    doubtful = (squared < CANCELLED * squares).nonzero().squeeze(1)
    for rows in doubtful.split(max(1, FORMED // part.shape.numel())) if len(doubtful) else ():
        squared[rows] = _squared(part.at(rows).formed())
    return squared


@dataclass
class Call:
    """A torch call with a rule, and what each parameter gets of it.

    Attributes:
        given: the layer's input, (rows, *shape).
        output: its output as autograd knows it, with the rows at `axis`.
        version: how often the input had been written into.
    """

    given: Tensor
    output: Tensor
    axis: int
    makes: dict[str, Make]
    version: int

    @property
    def input(self) -> Tensor:
        """The layer's input as the layer saw it.

        Raises:
            RuntimeError: it was written into since, which torch refuses, too.
        """
        if self.given._version != self.version:
            raise RuntimeError("a tensor that is needed for the gradient by parameters was modified by an inplace operation")
        return self.given


@dataclass
class Uses:
    """The parameters that are differentiated, and how one run of the row function uses them.

    Attributes:
        targets: by path.
        own: the paths of which each row has its own copy, since they are used without a rule.
        leaves: those copies, (rows, *shape).
        calls: the calls with a rule.
    """

    targets: Mapping[str, Tensor]
    own: frozenset[str]
    leaves: dict[str, Tensor] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._names = {id(tensor): name for name, tensor in self.targets.items()}

    def named_in(self, args: Any) -> list[str]:
        """The paths of the parameters among the arguments of a call."""
        return [self._names[id(tensor)] for tensor in _flat(args) if id(tensor) in self._names]

    def replaced(self, args: Any, by: Callable[[str], Tensor]) -> Any:
        """`args` with each parameter replaced."""
        if isinstance(args, Tensor):
            name = self._names.get(id(args))
            return args if name is None else by(name)
        if isinstance(args, list | tuple):
            return type(args)(self.replaced(item, by) for item in args) if type(args) in (list, tuple) else args
        if type(args) is dict:
            return {key: self.replaced(item, by) for key, item in args.items()}
        return args

    def wanted(self) -> list[Tensor]:
        """What to differentiate by."""
        return [*(call.output for call in self.calls), *self.leaves.values()]

    def parts(self, gradients: Sequence[Tensor | None]) -> dict[str, list[Part]]:
        """What each parameter's gradient is made of, from the gradients by `wanted`."""
        found: dict[str, list[Part]] = {name: [] for name in self.targets}
        for call, gradient in zip(self.calls, gradients, strict=False):
            for name, make in call.makes.items() if gradient is not None else ():
                found[name].append(make(call, gradient.movedim(call.axis, 0)))  # type: ignore[union-attr]
        for name, gradient in zip(self.leaves, gradients[len(self.calls) :], strict=True):
            if gradient is not None:
                found[name].append(Formed(gradient))
        return {name: _together(parts) for name, parts in found.items()}


def _flat(args: Any) -> Iterator[Tensor]:
    if isinstance(args, Tensor):
        yield args
    elif isinstance(args, list | tuple):
        for item in args:
            yield from _flat(item)
    elif type(args) is dict:
        yield from _flat(list(args.values()))


def _together(parts: list[Part]) -> list[Part]:
    """Several uses of one parameter as one part: the cross terms count. Equal kinds are put side by side; with what is formed, all are."""
    if len(parts) < 2:
        return parts
    outers = [part for part in parts if isinstance(part, Outer)]
    tables = [part for part in parts if isinstance(part, Rows)]
    if len(outers) + len(tables) < len(parts):
        total = parts[0].formed()
        for part in parts[1:]:
            total = total + part.formed()
        return [Formed(total)]
    if not outers:
        return [_tables(tables)]
    return [Tied(_outers(outers), _tables(tables)) if tables else _outers(outers)]


def _outers(parts: Sequence[Outer]) -> Outer:
    return Outer(torch.cat([p.a for p in parts], 1), torch.cat([p.b for p in parts], 1), parts[0].shape)


def _tables(parts: Sequence[Rows]) -> Rows:
    return Rows(torch.cat([p.index for p in parts], 1), torch.cat([p.b for p in parts], 1), parts[0].shape)


# --- the rules --------------------------------------------------------------------------------------------------------


def rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], uses: Uses) -> tuple[Tensor, dict[str, Make]] | None:
    """The layer's input, and what each parameter gets of it; None where there is no rule for this call."""
    make = _RULES.get(func)
    given, wanted = make(args, kwargs) if make is not None else (None, {})
    named = {name: how for tensor, how in wanted.values() for name in uses.named_in(tensor)}
    if given is None or sorted(named) != sorted(uses.named_in([args, kwargs])):
        return None
    return given, named


Wanted = dict[str, tuple[Tensor, Make]]


def _bound(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(names, args, strict=False)) | kwargs


def _linear(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, Wanted]:
    given = _bound(("input", "weight", "bias"), args, kwargs)
    weight = given["weight"]

    def of_weight(call: Call, b: Tensor) -> Part:
        a = call.input
        return Outer(a.reshape(len(a), -1, a.shape[-1]), b.reshape(len(b), -1, weight.shape[0]), weight.shape)

    return given["input"], _with_bias({"weight": (weight, of_weight)}, given.get("bias"), _summed)


def _summed(b: Tensor, count: int) -> Tensor:
    b = b.reshape(len(b), -1, count)
    return b[:, 0] if b.shape[1] == 1 else b.sum(1)


def _with_bias(wanted: Wanted, bias: Tensor | None, summed: Callable[[Tensor, int], Tensor]) -> Wanted:
    if bias is not None:
        count, shape = bias.numel(), bias.shape
        wanted["bias"] = (bias, lambda call, b: Formed(summed(b, count).reshape(len(b), *shape)))
    return wanted


def _convolution(dims: int) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Tensor | None, Wanted]]:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")

    def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, Wanted]:
        given = _bound(names, args, kwargs)
        weight = given["weight"]
        if given.get("groups", 1) != 1:
            return None, {}
        kernel = tuple(weight.shape[2:])
        stride, dilation = _each(given.get("stride", 1), dims), _each(given.get("dilation", 1), dims)
        around = _around(given.get("padding", 0), kernel, dilation)

        def of_weight(call: Call, b: Tensor) -> Part:
            rows, image = len(call.input), call.input.reshape(-1, *call.input.shape[-dims - 1 :])  # (rows · samples, channels, *size)
            patches = _patches(F.pad(image, around), kernel, stride, dilation).mT  # (rows · samples, t, channels · kernel)
            out = b.reshape(-1, weight.shape[0], math.prod(b.shape[-dims:])).mT  # (rows · samples, t, out)
            if len(out) > rows:
                patches, out = (x.reshape(rows, -1, x.shape[-1]) for x in (patches, out))
            return Outer(patches, out, weight.shape)

        def summed(b: Tensor, count: int) -> Tensor:
            return b.reshape(len(b), -1, count, math.prod(b.shape[-dims:])).sum((1, 3))

        return given["input"], _with_bias({"weight": (weight, of_weight)}, given.get("bias"), summed)

    return make


def _each(value: Any, dims: int) -> tuple[int, ...]:
    """An option of a convolution, for each axis."""
    sizes = tuple(value) if isinstance(value, list | tuple) else (value,)
    return sizes * dims if len(sizes) == 1 else sizes


def _around(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """What a convolution puts around an image, as `F.pad` takes it: from the last axis to the first, before and behind."""
    both = [(size, size) for size in _each(0 if isinstance(padding, str) else padding, len(kernel))]
    if padding == "same":  # of an odd number, more behind
        totals = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
        both = [(total // 2, total - total // 2) for total in totals]
    return [size for sizes in reversed(both) for size in sizes]


def _patches(image: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """What a kernel sees of each image at every place: (n, channels · kernel, places)."""
    reach = [step * (size - 1) + 1 for size, step in zip(kernel, dilation, strict=True)]
    places = [(size - r) // step + 1 for size, r, step in zip(image.shape[2:], reach, stride, strict=True)]
    inside = image.stride()[2:]
    strides = [s * n for by in (dilation, stride) for s, n in zip(inside, by, strict=True)]
    view = image.as_strided((*image.shape[:2], *kernel, *places), (*image.stride()[:2], *strides), image.storage_offset())
    return view.reshape(len(image), image.shape[1] * math.prod(kernel), math.prod(places))


def _embedding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, Wanted]:
    given = _bound(("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"), args, kwargs)
    weight, padding = given["weight"], given.get("padding_idx")
    if given.get("max_norm") is not None or given.get("scale_grad_by_freq"):
        return None, {}

    def of_weight(call: Call, b: Tensor) -> Part:
        a = call.input
        index, out = a.reshape(len(a), -1).long(), b.reshape(len(b), -1, weight.shape[1])
        if padding is not None:
            out = torch.where((index == padding % weight.shape[0]).unsqueeze(-1), 0.0, out)
        return Rows(index, out, weight.shape)

    return given["input"], {"weight": (weight, of_weight)}


def _norm(names: Sequence[str], plain: Callable[[Tensor, dict[str, Any]], Tensor], channels: bool) -> Any:
    """A layer that normalises and then scales by a weight and shifts by a bias, element by element."""

    def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, Wanted]:
        given = _bound(names, args, kwargs)
        wanted: Wanted = {}
        for name, with_input in (("weight", True), ("bias", False)):
            tensor = given.get(name)
            if tensor is not None:
                wanted[name] = (tensor, _scaling(given, plain, tensor.shape, with_input, channels))
        return given["input"], wanted

    return make


def _scaling(
    given: dict[str, Any], plain: Callable[[Tensor, dict[str, Any]], Tensor], shape: torch.Size, with_input: bool, channels: bool
) -> Make:
    def of_scale(call: Call, b: Tensor) -> Part:
        rows = len(b)
        product = b
        if with_input:
            a = call.input
            samples = a.reshape(rows * given["input"].shape[0], *given["input"].shape[1:]) if channels else a
            product = b * plain(samples, given).reshape(b.shape)
        if channels:  # (rows, samples, channels, *size)
            return Formed(product.reshape(rows, given["input"].shape[0], shape[0], -1).sum((1, 3)))
        return Formed(product.reshape(rows, -1, *shape).sum(1))

    return of_scale


def _plain_layer_norm(a: Tensor, given: dict[str, Any]) -> Tensor:
    return F.layer_norm(a, given["normalized_shape"], eps=given.get("eps", 1e-5))


def _plain_rms_norm(a: Tensor, given: dict[str, Any]) -> Tensor:
    return F.rms_norm(a, given["normalized_shape"], eps=given.get("eps"))


def _plain_group_norm(a: Tensor, given: dict[str, Any]) -> Tensor:
    return F.group_norm(a, given["num_groups"], eps=given.get("eps", 1e-5))


_RULES: dict[Any, Any] = {
    F.linear: _linear,
    torch.conv1d: _convolution(1),
    torch.conv2d: _convolution(2),
    torch.conv3d: _convolution(3),
    F.embedding: _embedding,
    F.layer_norm: _norm(("input", "normalized_shape", "weight", "bias", "eps"), _plain_layer_norm, channels=False),
    F.rms_norm: _norm(("input", "normalized_shape", "weight", "eps"), _plain_rms_norm, channels=False),
    F.group_norm: _norm(("input", "num_groups", "weight", "bias", "eps"), _plain_group_norm, channels=True),
}


# --- what is wanted of them -------------------------------------------------------------------------------------------


def squared_norm(parts: Mapping[str, list[Part]], names: Sequence[str], like: Tensor) -> Tensor:
    """(rows,) the squared norm of the gradients by `names` together."""
    total = like.new_zeros(len(like))
    for name in names:
        for part in parts[name]:
            total = total + part.squared()
    return total


def along(parts: Mapping[str, list[Part]], vectors: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """(rows,) the gradients times the direction `vectors`."""
    total = like.new_zeros(len(like))
    for name, vector in vectors.items():
        for part in parts[name]:
            total = total + part.along(vector.to(like))
    return total


def projected(
    parts: Mapping[str, list[Part]], targets: Mapping[str, Tensor], names: Sequence[str], k: int, seed: int, like: Tensor
) -> Tensor:
    """(rows, k) the gradients by `names`, flattened one after the other, times the matrix of `_reduce.entries`."""
    columns = [like.new_zeros(len(like)) for _ in range(k)]
    offset = 0
    for name in names:
        size = targets[name].numel()
        for j in range(k) if parts[name] else ():
            direction = _reduce.column_of_matrix(seed, offset, offset + size, k, j).to(like)  # (size,)
            for part in parts[name]:
                columns[j] = columns[j] + part.along(direction)
        offset += size
    return torch.stack(columns, dim=-1)


def flattened(parts: Mapping[str, list[Part]], targets: Mapping[str, Tensor], names: Sequence[str], like: Tensor) -> Tensor:
    """(rows, parameters) the gradients by `names`, flattened one after the other."""
    rows = len(like)
    flat = [parts[name][0].formed().reshape(rows, -1) if parts[name] else like.new_zeros((rows, targets[name].numel())) for name in names]
    return torch.cat(flat, dim=1)


def total(
    parts: Mapping[str, list[Part]],
    targets: Mapping[str, Tensor],
    names: Sequence[str],
    weights: Tensor,
    *,
    squares: bool,
    clip: float | None,
) -> Tensor:
    """(1, parameters) the sum over the rows of their gradients times `weights` (rows,), flattened one after the other."""
    if clip is not None:
        lengths = squared_norm(parts, names, weights).sqrt()
        weights = weights * torch.clamp(clip / lengths.clamp(min=torch.finfo(lengths.dtype).tiny), max=1.0)
    flat = []
    for name in names:
        sums = [part.total_squares(weights) if squares else part.total(weights) for part in parts[name]]
        flat.append(sums[0].reshape(-1) if sums else weights.new_zeros(targets[name].numel()))
    return torch.cat(flat)[None]
