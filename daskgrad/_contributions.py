"""What a parameter's gradient is made of, and what is taken of it without forming it.

Every kind has the rows in front, and the same methods: `formed` (rows, *shape), `squared` (rows,), `along` a direction (rows,), `total`
over the rows with weights, `total_squares` (of the gradient, element by element), and `at` some rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Gradient = Tensor  # (rows, *shape of the parameter)
Index = Tensor | slice


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
            return squared_of(self.a) * squared_of(self.b)
        if steps * (size_in + size_out) <= size_in * size_out:
            products = (self.a @ self.a.mT) * (self.b @ self.b.mT)  # (rows, t, t)
            return _unless_cancelled(products.sum((1, 2)), products.diagonal(dim1=1, dim2=2).sum(1), self)
        return squared_of(self.formed())

    def at(self, rows: Index) -> Outer:
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
class Grouped:
    """Contributions b aᵀ to each group of a weight: a (rows, groups, t, in), b (rows, groups, t, out); `shape` is the parameter's."""

    a: Tensor
    b: Tensor
    shape: torch.Size

    def formed(self) -> Gradient:
        return (self.b.mT @ self.a).reshape(len(self.a), *self.shape)

    def squared(self) -> Tensor:
        block = torch.Size([self.b.shape[3], self.a.shape[3]])
        of_groups = Outer(self.a.flatten(0, 1), self.b.flatten(0, 1), block).squared()
        return of_groups.reshape(self.a.shape[:2]).sum(1)

    def at(self, rows: Index) -> Grouped:
        return Grouped(self.a[rows], self.b[rows], self.shape)

    def along(self, vector: Tensor) -> Tensor:
        matrices = vector.to(self.b.dtype).reshape(self.a.shape[1], self.b.shape[3], self.a.shape[3])
        return (self.b * (self.a @ matrices.mT)).sum((1, 2, 3))

    def total(self, weights: Tensor) -> Tensor:
        weighted = self.b * weights.to(self.b.dtype).reshape(-1, 1, 1, 1)
        by_group = (x.transpose(0, 1).flatten(1, 2) for x in (weighted, self.a))  # each (groups, rows · t, …)
        out, into = by_group
        return (out.mT @ into).reshape(self.shape)

    def total_squares(self, weights: Tensor) -> Tensor:
        return Formed(self.formed()).total_squares(weights)


@dataclass
class Convolved:
    """Contributions to a convolution's weight by torch's own kernels, which need no patches: each row is a group of one convolution.

    Attributes:
        seen: what kernels look at, (rows, samples, channels, *image).
        met: what comes back there, (rows, samples, out channels, *places).
        stride, padding, dilation, groups: of the convolution.
        shape: the weight's.
    """

    seen: Tensor
    met: Tensor
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    shape: torch.Size

    def formed(self) -> Gradient:
        return torch.cat([self._of(rows) for rows in self._few()])

    def squared(self) -> Tensor:
        return torch.cat([squared_of(self._of(rows)) for rows in self._few()])

    def _few(self) -> Iterator[slice]:
        """Rows that are done together: one by one where one is work enough, else as many as are formed together."""
        alone = self.shape[1] < CHANNELS or self.shape.numel() * math.prod(self.met.shape[3:]) >= ALONE
        size = 1 if alone else max(1, FORMED // self.shape.numel())
        return (slice(start, start + size) for start in range(0, len(self.met), size))

    def _of(self, rows: slice) -> Gradient:
        seen, met = (x[rows].transpose(0, 1).flatten(1, 2) for x in (self.seen, self.met))  # (samples, rows · channels, *image)
        count = len(self.met[rows])
        return self._gradient(seen, met, count).reshape(count, *self.shape)

    def _gradient(self, seen: Tensor, met: Tensor, times: int = 1) -> Tensor:
        """By a weight of `times` as many out channels and groups: the sum over the samples, (times · out, in, *kernel)."""
        weight = met.new_empty(()).expand(times * self.shape[0], *self.shape[1:])  # its values do not matter
        none, groups = [0] * len(self.stride), times * self.groups
        mask = [False, True, False]
        found: Tensor = torch.ops.aten.convolution_backward(
            met, seen, weight, None, self.stride, self.padding, self.dilation, False, none, groups, mask
        )[1]
        return found

    def at(self, rows: Index) -> Convolved:
        return replace(self, seen=self.seen[rows], met=self.met[rows])

    def along(self, vector: Tensor) -> Tensor:
        seen, weight = self.seen.flatten(0, 1), vector.to(self.met.dtype).reshape(self.shape)
        none = [0] * len(self.stride)
        there = torch.convolution(seen, weight, None, self.stride, self.padding, self.dilation, False, none, self.groups)
        return (there.reshape(self.met.shape) * self.met).flatten(1).sum(1)

    def total(self, weights: Tensor) -> Tensor:
        met = self.met * weights.to(self.met.dtype).reshape(-1, *[1] * (self.met.dim() - 1))
        return self._gradient(self.seen.flatten(0, 1), met.flatten(0, 1))

    def total_squares(self, weights: Tensor) -> Tensor:
        parts = (Formed(self._of(rows)).total_squares(weights[rows]) for rows in self._few())
        return sum(parts, torch.zeros((), dtype=self.met.dtype))


ALONE = 2**25
"""Products in one row's gradient from which a row of its own is faster than rows as groups."""
CHANNELS = 8
"""With fewer channels, rows as groups are no faster than patches; a row of its own is, from so many products on:"""
LARGE = 2**22


def convolved_pays(into: int, out: int, kernel: int, steps: int) -> bool:
    """Whether torch's kernels form a convolution's gradient faster than patches do: channels of a group in and out, places of a row.

    Not where products of patches give the norm unformed (`Outer.squared`). Measured on 24 shapes, one thread: in float32 1.1 to 4.9 times
    as fast, in float64 0.8 to 2.8; and patches, several times the size of the images, need not be held.
    """
    size = into * kernel
    if steps * (size + out) <= size * out:
        return False
    return into >= CHANNELS or size * out * steps >= LARGE


@dataclass
class Pieces:
    """Contributions that are large while they are there: made for a few rows at a time.

    Attributes:
        make: the part for some rows.
        rows: how many there are.
        size: how many are made together.
    """

    make: Callable[[Index], Contribution]
    rows: int
    size: int

    def _each(self) -> Iterator[tuple[slice, Contribution]]:
        for start in range(0, self.rows, self.size):
            rows = slice(start, start + self.size)
            yield rows, self.make(rows)

    def formed(self) -> Gradient:
        return torch.cat([part.formed() for _, part in self._each()])

    def squared(self) -> Tensor:
        return torch.cat([part.squared() for _, part in self._each()])

    def at(self, rows: Index) -> Contribution:
        return self.make(rows)

    def along(self, vector: Tensor) -> Tensor:
        return torch.cat([part.along(vector) for _, part in self._each()])

    def total(self, weights: Tensor) -> Tensor:
        return sum((part.total(weights[rows]) for rows, part in self._each()), torch.zeros((), dtype=weights.dtype))

    def total_squares(self, weights: Tensor) -> Tensor:
        return sum((part.total_squares(weights[rows]) for rows, part in self._each()), torch.zeros((), dtype=weights.dtype))


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
            return squared_of(self.b)
        index, order = self.index.sort(1)
        place = (index[:, 1:] != index[:, :-1]).cumsum(1)  # a table of those rows alone that are there, (rows, t - 1)
        place = torch.cat([place.new_zeros((len(place), 1)), place], 1).unsqueeze(-1).expand_as(self.b)
        b = self.b.gather(1, order.unsqueeze(-1).expand_as(self.b))
        return squared_of(torch.zeros_like(b).scatter_add(1, place, b))

    def along(self, vector: Tensor) -> Tensor:
        return (self.b * vector.to(self.b.dtype).reshape(self.shape)[self.index]).sum((1, 2))

    def total(self, weights: Tensor) -> Tensor:
        weighted = (self.b * weights.to(self.b.dtype).reshape(-1, 1, 1)).reshape(-1, self.b.shape[2])
        return self.b.new_zeros(self.shape).index_add(0, self.index.reshape(-1), weighted)

    def total_squares(self, weights: Tensor) -> Tensor:
        return Formed(self.formed()).total_squares(weights)

    def at(self, rows: Index) -> Rows:
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

    def at(self, rows: Index) -> Tied:
        return Tied(self.outer.at(rows), self.rows.at(rows))


@dataclass
class Formed:
    """A gradient (rows, *shape) as it is."""

    gradient: Gradient

    def formed(self) -> Gradient:
        return self.gradient

    def squared(self) -> Tensor:
        return squared_of(self.gradient)

    def at(self, rows: Index) -> Formed:
        return Formed(self.gradient[rows])

    def along(self, vector: Tensor) -> Tensor:
        return (self.gradient * vector.to(self.gradient.dtype).reshape(self.gradient.shape[1:])).reshape(len(self.gradient), -1).sum(1)

    def total(self, weights: Tensor) -> Tensor:
        summed: Tensor = torch.tensordot(weights.to(self.gradient.dtype), self.gradient, 1)
        return summed

    def total_squares(self, weights: Tensor) -> Tensor:
        return Formed(self.gradient.square()).total(weights)


@dataclass
class Stacked:
    """Contributions to ranges of a parameter's first axis that have nothing in common, by (start, stop); elsewhere the gradient is 0."""

    parts: dict[tuple[int, int], Contribution]
    shape: torch.Size

    def formed(self) -> Gradient:
        formed = {place: part.formed() for place, part in self.parts.items()}
        return self._put(formed, len(next(iter(formed.values()))))

    def _put(self, pieces: Mapping[tuple[int, int], Tensor], *lead: int) -> Tensor:
        whole = next(iter(pieces.values())).new_zeros((*lead, *self.shape))
        for (start, stop), piece in pieces.items():
            whole.narrow(len(lead), start, stop - start).copy_(piece)
        return whole

    def squared(self) -> Tensor:
        return torch.stack([part.squared() for part in self.parts.values()]).sum(0)

    def at(self, rows: Index) -> Stacked:
        return Stacked({place: part.at(rows) for place, part in self.parts.items()}, self.shape)

    def along(self, vector: Tensor) -> Tensor:
        whole = vector.reshape(self.shape)
        return torch.stack([part.along(whole[start:stop]) for (start, stop), part in self.parts.items()]).sum(0)

    def total(self, weights: Tensor) -> Tensor:
        return self._put({place: part.total(weights) for place, part in self.parts.items()})

    def total_squares(self, weights: Tensor) -> Tensor:
        return self._put({place: part.total_squares(weights) for place, part in self.parts.items()})


Contribution = Outer | Grouped | Convolved | Pieces | Rows | Tied | Stacked | Formed


def squared_of(gradient: Tensor) -> Tensor:
    flat = gradient.reshape(len(gradient), -1)
    whole = flat.shape[1] // PIECE * PIECE
    rest = flat[:, whole:] if whole else flat
    squared: Tensor = torch.linalg.vector_norm(rest, dim=1).square()
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
        squared[rows] = squared_of(part.at(rows).formed())
    return squared


# --- several uses of one parameter --------------------------------------------------------------------------------------


def together(parts: list[Contribution]) -> list[Contribution]:
    """Several uses of one parameter as one part: the cross terms count. Equal kinds are put side by side; with what is formed, all are."""
    if len(parts) < 2:
        return parts
    stacked = [part for part in parts if isinstance(part, Stacked)]
    if len(stacked) == len(parts) and (apart := _side_by_side(stacked)) is not None:
        return [apart]
    pieces = [part for part in parts if isinstance(part, Pieces)]
    if pieces:
        return [replace(pieces[0], make=lambda rows: together([part.at(rows) for part in parts])[0])]
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


def _side_by_side(parts: Sequence[Stacked]) -> Stacked | None:
    """Uses of slices, where no slice overlaps another in part."""
    by_place: dict[tuple[int, int], list[Contribution]] = {}
    for part in parts:
        for place, inner in part.parts.items():
            by_place.setdefault(place, []).append(inner)
    places = sorted(by_place)
    if any(stop > start for (_, stop), (start, _) in itertools.pairwise(places)):
        return None
    return Stacked({place: together(inner)[0] for place, inner in by_place.items()}, parts[0].shape)


def _outers(parts: Sequence[Outer]) -> Outer:
    return Outer(torch.cat([p.a for p in parts], 1), torch.cat([p.b for p in parts], 1), parts[0].shape)


def _tables(parts: Sequence[Rows]) -> Rows:
    return Rows(torch.cat([p.index for p in parts], 1), torch.cat([p.b for p in parts], 1), parts[0].shape)
