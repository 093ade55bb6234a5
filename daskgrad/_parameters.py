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
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F

from . import _reduce
from ._contributions import FORMED, Contribution, Convolved, Formed, Grouped, Index, Outer, Pieces, Rows, Stacked, convolved_pays, together

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


Make = Callable[["Call", Tensor], Contribution]  # from the call, and the gradient by its output, with the rows in front


@dataclass
class Call:
    """A torch call with a rule, and what each parameter gets of it.

    Attributes:
        given: the layer's input, (rows, *shape).
        output: the place of its output in the graph of autograd.
        shape: the output's, with the rows at `axis`.
        version: how often the input had been written into.
    """

    given: Tensor
    output: GradientEdge
    shape: torch.Size
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
        self._slices: dict[int, tuple[Tensor, int]] = {}

    def note_slices(self, slices: Sequence[Tensor], name: str) -> None:
        """The parameter has been cut along its first axis: calls that take a slice take a part of it."""
        start = 0
        for piece in slices:
            self._names[id(piece)] = name
            self._slices[id(piece)] = (piece, start)  # kept, so that its id stays its own
            start += len(piece)

    def place_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """Where in the first axis of a parameter a slice of it stands; None for a whole one."""
        found = self._slices.get(id(tensor))
        return None if found is None else (found[1], found[1] + len(tensor))

    def named_in(self, *args: Any) -> list[str]:
        """The paths of the parameters among the arguments of a call. It is asked for every call, so it takes few steps."""
        found = []
        for item in args:
            name = self._names.get(id(item))
            if name is not None:
                found.append(name)
            elif isinstance(item, list | tuple):
                found += self.named_in(*item)
            elif type(item) is dict:
                found += self.named_in(*item.values())
        return found

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

    def wanted(self) -> list[Tensor | GradientEdge]:
        """What to differentiate by."""
        return [*(call.output for call in self.calls), *self.leaves.values()]

    def parts(self, gradients: Sequence[Tensor | None]) -> dict[str, list[Contribution]]:
        """What each parameter's gradient is made of, from the gradients by `wanted`."""
        found: dict[str, list[Contribution]] = {name: [] for name in self.targets}
        for call, gradient in zip(self.calls, gradients, strict=False):
            for name, make in call.makes.items() if gradient is not None else ():
                found[name].append(make(call, gradient.reshape(call.shape).movedim(call.axis, 0)))  # type: ignore[union-attr]
        for name, gradient in zip(self.leaves, gradients[len(self.calls) :], strict=True):
            if gradient is not None:
                found[name].append(Formed(gradient))
        return {name: together(parts) for name, parts in found.items()}


# --- the rules --------------------------------------------------------------------------------------------------------


def rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], uses: Uses) -> tuple[Tensor, dict[str, Make]] | None:
    """The layer's input, and what each parameter gets of it; None where there is no rule for this call."""
    make = _RULES.get(func)
    given, wanted = make(args, kwargs) if make is not None else (None, {})
    named = {name: _in_place(how, tensor, name, uses) for tensor, how in wanted.values() for name in uses.named_in(tensor)}
    if given is None or sorted(named) != sorted(uses.named_in(*args, *kwargs.values())):
        return None
    return given, named


def _in_place(how: Make, tensor: Tensor, name: str, uses: Uses) -> Make:
    """`how`, for a parameter of which `tensor` may be a slice."""
    place, shape = uses.place_of(tensor), uses.targets[name].shape
    return how if place is None else lambda call, b: Stacked({place: how(call, b)}, shape)


def slices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], uses: Uses) -> Any:
    """What a call that cuts a parameter along its first axis returns; None for any other call."""
    given = _bound(("input", "sizes", "dim"), args, kwargs)
    if func not in _CUTS or given.get("dim", 0) != 0 or uses.place_of(given["input"]) is not None:
        return None
    found = func(*args, **kwargs)
    uses.note_slices(found, uses.named_in(given["input"])[0])
    return found


_CUTS = frozenset({torch.chunk, Tensor.chunk, torch.split, Tensor.split})

Wanted = dict[str, tuple[Tensor, Make]]


def _bound(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(names, args, strict=False)) | kwargs


def _linear(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, Wanted]:
    given = _bound(("input", "weight", "bias"), args, kwargs)
    weight = given["weight"]

    def of_weight(call: Call, b: Tensor) -> Contribution:
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


def _convolution(dims: int, *, transposed: bool = False) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Tensor | None, Wanted]]:
    options = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
    names = ("input", "weight", "bias", "stride", "padding", *options)

    def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, Wanted]:
        given = _bound(names, args, kwargs)
        weight, groups = given["weight"], given.get("groups", 1)
        kernel = tuple(weight.shape[2:])
        stride, dilation = _each(given.get("stride", 1), dims), _each(given.get("dilation", 1), dims)
        around = _around(given.get("padding", 0), kernel, dilation)

        def of_weight(call: Call, b: Tensor) -> Contribution:
            a = call.input
            # A transposed convolution is the gradient of a convolution by its input: kernels look at what comes back, not at what came in.
            seen, met = (b, a) if transposed else (a, b)
            rows, places = len(seen), tuple(met.shape[-dims:])

            if (by_kernels := _by_kernels(seen, met, weight.shape, stride, around, dilation, groups)) is not None:
                return by_kernels

            def of(some: Index) -> Contribution:
                """The part of some rows: patches (rows, samples, groups, channels · kernel, t) and what they meet there."""
                image = F.pad(seen[some].reshape(-1, *seen.shape[-dims - 1 :]), around)
                patches = _patches(image, kernel, stride, dilation, places).unflatten(1, (groups, -1))
                out = met[some].reshape(len(image), groups, -1, math.prod(places))
                return _by_groups(patches, out, len(seen[some]), weight.shape)

            held = seen[0].numel() // math.prod(seen.shape[-dims:]) * math.prod(kernel) * math.prod(places)  # elements of a row's patches
            return of(slice(None)) if rows * held <= FORMED else Pieces(of, rows, max(1, FORMED // held))

        def summed(b: Tensor, count: int) -> Tensor:
            return b.reshape(len(b), -1, count, math.prod(b.shape[-dims:])).sum((1, 3))

        return given["input"], _with_bias({"weight": (weight, of_weight)}, given.get("bias"), summed)

    return make


def _by_kernels(
    seen: Tensor,
    met: Tensor,
    shape: torch.Size,
    stride: tuple[int, ...],
    around: Sequence[int],
    dilation: tuple[int, ...],
    groups: int,
) -> Convolved | None:
    """A convolution's part by torch's own kernels, where that is faster: `seen` (rows, [samples,] channels, *image), `met` likewise."""
    dims = len(stride)
    kernel, places = shape[2:], met.shape[-dims:]
    samples = math.prod(met.shape[1 : -dims - 1])
    if not convolved_pays(shape[1], shape[0] // groups, math.prod(kernel), samples * math.prod(places)):
        return None
    before, behind = around[-2::-2], around[-1::-2]  # by axis, from the first
    reach = [(count - 1) * step + apart * (size - 1) + 1 for size, count, step, apart in zip(kernel, places, stride, dilation, strict=True)]
    fits = all(0 <= size + 2 * pad - far < step for size, pad, far, step in zip(seen.shape[-dims:], before, reach, stride, strict=True))
    if before != behind or not fits:  # put around by hand, and cut to what kernels reach
        image = F.pad(seen, around)
        for axis, far in enumerate(reach, -dims):
            image = image.narrow(axis, 0, far)
        seen, before = image, [0] * dims
    lead = (len(met), samples)
    return Convolved(
        seen.reshape(*lead, *seen.shape[-dims - 1 :]),
        met.reshape(*lead, *met.shape[-dims - 1 :]),
        stride,
        tuple(before),
        dilation,
        groups,
        shape,
    )


def _by_groups(patches: Tensor, out: Tensor, rows: int, shape: torch.Size) -> Contribution:
    """A convolution's part from patches (rows · samples, groups, in, t) and what they meet, (rows · samples, groups, out, t)."""
    both = []
    for x in (patches, out):
        samples = x.mT.reshape(rows, -1, *x.mT.shape[1:])  # (rows, samples, groups, t, size)
        single = samples.shape[1] == 1
        both.append(samples[:, 0] if single else samples.transpose(1, 2).flatten(2, 3))
    a, b = both
    return Outer(a[:, 0], b[:, 0], shape) if a.shape[1] == 1 else Grouped(a, b, shape)


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


def _patches(image: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], places: Sequence[int]) -> Tensor:
    """What a kernel sees of each image at every place: (n, channels · kernel, places)."""
    shape = (len(image), image.shape[1] * math.prod(kernel), math.prod(places))
    if not picking_pays(image, kernel, places):
        return _windows(image, kernel, stride, dilation, places).reshape(shape)
    numbers = torch.arange(image[0].numel(), device=image.device).reshape(1, *image.shape[1:])
    seen = _windows(numbers, kernel, stride, dilation, places)
    return image.reshape(len(image), -1).index_select(1, seen.reshape(-1)).reshape(shape)


def picking_pays(image: Tensor, kernel: Sequence[int], places: Sequence[int]) -> bool:
    """Whether elements are faster picked by their numbers than copied from windows, a copy whose innermost loop is one line of places.

    Measured on 10 shapes, one thread: 2 to 4 times as fast in float32 where images are many and lines short, else no faster.
    """
    return image.element_size() == 4 and image.device.type == "cpu" and len(image) >= 32 and places[-1] <= 8 and math.prod(kernel) > 1


def _windows(image: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], places: Sequence[int]) -> Tensor:
    """(n, channels, *kernel, *places), a view."""
    inside = image.stride()[2:]
    strides = [s * n for by in (dilation, stride) for s, n in zip(inside, by, strict=True)]
    return image.as_strided((*image.shape[:2], *kernel, *places), (*image.stride()[:2], *strides), image.storage_offset())


def _embedding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, Wanted]:
    given = _bound(("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"), args, kwargs)
    weight, padding = given["weight"], given.get("padding_idx")
    if given.get("max_norm") is not None or given.get("scale_grad_by_freq"):
        return None, {}

    def of_weight(call: Call, b: Tensor) -> Contribution:
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
    def of_scale(call: Call, b: Tensor) -> Contribution:
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


def _plain_instance_norm(a: Tensor, given: dict[str, Any]) -> Tensor:
    if given.get("use_input_stats", True):
        return F.instance_norm(a, eps=given.get("eps", 1e-5))
    return _plain_batch_norm(a, given)


def _plain_batch_norm(a: Tensor, given: dict[str, Any]) -> Tensor:
    return F.batch_norm(a, given["running_mean"], given["running_var"], eps=given.get("eps", 1e-5))


def _with_statistics(names: Sequence[str], plain: Callable[[Tensor, dict[str, Any]], Tensor]) -> Any:
    """The rule of a norm that may keep statistics: where it does not change them, and they are the same for every row."""
    rule = _norm(names, plain, channels=True)

    def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, Wanted]:
        found, wanted = rule(args, kwargs)
        given = _bound(names, args, kwargs)
        kept = [tensor for tensor in (given.get("running_mean"), given.get("running_var")) if tensor is not None]
        changed = given.get("training", bool(kept) and given.get("use_input_stats", True))
        if changed or any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in kept):
            return None, {}
        return found, wanted

    return make


_RULES: dict[Any, Any] = {
    F.linear: _linear,
    torch.conv1d: _convolution(1),
    torch.conv2d: _convolution(2),
    torch.conv3d: _convolution(3),
    torch.conv_transpose1d: _convolution(1, transposed=True),
    torch.conv_transpose2d: _convolution(2, transposed=True),
    torch.conv_transpose3d: _convolution(3, transposed=True),
    F.embedding: _embedding,
    F.layer_norm: _norm(("input", "normalized_shape", "weight", "bias", "eps"), _plain_layer_norm, channels=False),
    F.rms_norm: _norm(("input", "normalized_shape", "weight", "eps"), _plain_rms_norm, channels=False),
    F.group_norm: _norm(("input", "num_groups", "weight", "bias", "eps"), _plain_group_norm, channels=True),
    F.batch_norm: _with_statistics(("input", "running_mean", "running_var"), _plain_batch_norm),
    F.instance_norm: _with_statistics(("input", "running_mean", "running_var"), _plain_instance_norm),
}


# --- what is wanted of them -------------------------------------------------------------------------------------------


def squared_norm(parts: Mapping[str, list[Contribution]], names: Sequence[str], like: Tensor) -> Tensor:
    """(rows,) the squared norm of the gradients by `names` together."""
    total = like.new_zeros(len(like))
    for name in names:
        for part in parts[name]:
            total = total + part.squared()
    return total


def along(parts: Mapping[str, list[Contribution]], vectors: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """(rows,) the gradients times the direction `vectors`."""
    total = like.new_zeros(len(like))
    for name, vector in vectors.items():
        for part in parts[name]:
            total = total + part.along(vector.to(like))
    return total


def projected(
    parts: Mapping[str, list[Contribution]], targets: Mapping[str, Tensor], names: Sequence[str], k: int, seed: int, like: Tensor
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


def flattened(parts: Mapping[str, list[Contribution]], targets: Mapping[str, Tensor], names: Sequence[str], like: Tensor) -> Tensor:
    """(rows, parameters) the gradients by `names`, flattened one after the other."""
    rows = len(like)
    flat = [parts[name][0].formed().reshape(rows, -1) if parts[name] else like.new_zeros((rows, targets[name].numel())) for name in names]
    return torch.cat(flat, dim=1)


def total(
    parts: Mapping[str, list[Contribution]],
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
