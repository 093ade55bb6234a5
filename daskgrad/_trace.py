"""A plan for rows of one kind → one graph that reads columns and writes result columns, for any number of rows.

The run that is recorded is the kernel's own (`_kernel.batch`: vmap inside, autograd outside, under the same mode), on tensors without
values. So what is refused there is refused here, and what depends on values becomes a question: the answers are given beforehand, and
the graph returns what each was about, for every row to be held against them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import _kernel
from ._ambient import neutral
from ._cells import ArrayKind, StaticKind
from ._derivative import Derivative
from ._part import job_of
from ._paths import Answers, Paths, Question
from ._shared import Shared
from ._table import Cast, Table

if TYPE_CHECKING:
    from ._plan import Plan

ROWS = 499
"""Rows of the example: a number that no other axis has."""
MOST_NODES = 4000
"""Calls in a graph, beyond which a compiler takes minutes."""
MOST_CONSTANTS = 2**24
"""Bytes of weights and tables that may become part of a kernel."""


class UntraceableError(Exception):
    """Why there can be no kernel."""


@dataclass(frozen=True)
class Request:
    """Which kernel of a plan is meant.

    Attributes:
        kinds: what the cells of each argument are.
        derivatives: what it computes.
        answers: those of the path through the row function that it is for.
        fresh: buffers that the row function makes are each row's own.
        checkpoint: which state of a shared module.
    """

    kinds: tuple[tuple[Hashable, ArrayKind | StaticKind], ...]
    derivatives: tuple[Derivative, ...]
    answers: Answers = ()
    fresh: bool = False
    checkpoint: int | None = None


@dataclass(frozen=True)
class Traced:
    """A graph.

    Attributes:
        graph: takes the columns, each (rows, *shape), and memory for the derivatives, into which it writes them; returns a list of
            what the questions are about.
        examples: columns that it takes.
        made: the derivatives of these, for the memory.
        questions: for each, whether its whole part is the answer.
    """

    graph: Any
    examples: tuple[Tensor, ...]
    made: tuple[Tensor, ...]
    questions: tuple[bool, ...]


class _Recorded(Paths):
    """Paths of rows without values, whose answers are known."""

    traced = True

    def __init__(self, count: Any, answers: Answers) -> None:
        super().__init__(np.arange(ROWS), answers)
        self.count = count
        self.questions: list[Question] = []

    def ask(self, evaluate: Callable[[], NDArray[Any]], *, strict: bool = False, question: Question | None = None) -> Any:
        if question is None:
            raise UntraceableError("it depends on text that is made of values")
        if len(self.questions) == len(self.answers):
            raise UntraceableError("its path depends on values")
        self.questions.append(question)
        return self.answers[len(self.questions) - 1]


def trace(plan: Plan, request: Request) -> Traced:
    """The graph of `request`.

    Raises:
        UntraceableError: there is none, and why; or whatever the row function raises.
    """
    kinds = dict(request.kinds)
    device = torch.device("cpu")
    shared = Shared(plan, device, request.checkpoint)
    cast = Cast(plan, shared.dtype, list(kinds.values()))
    job = job_of(plan, Table(plan, pd.DataFrame()), kinds, cast, shared, list(request.derivatives))
    examples = _examples(kinds, cast)
    if not examples:
        raise UntraceableError("no column of numbers feeds it")
    questions: list[bool] = []
    with neutral(cast.default, device):
        graph = _recorded(job, examples, request, questions)
    if len(questions) != len(request.answers):
        raise UntraceableError("its path differs where there are no values")
    _check(graph)
    made = _write_in_place(graph, len(questions))
    return Traced(graph, tuple(examples.values()), made, tuple(questions))


def _examples(kinds: Mapping[Hashable, ArrayKind | StaticKind], cast: Cast) -> dict[Hashable, Tensor]:
    arrays = {name: np.ones((ROWS, *kind.shape), kind.dtype) for name, kind in kinds.items() if isinstance(kind, ArrayKind)}
    return {name: torch.from_numpy(cast(name, array)) for name, array in arrays.items()}


def _recorded(job: _kernel.Job, examples: Mapping[Hashable, Tensor], request: Request, questions: list[bool]) -> Any:
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    def run(*columns: Tensor) -> list[Tensor]:
        paths = _Recorded(columns[0].shape[0], request.answers)
        tensors = {name: column.clone() for name, column in zip(examples, columns, strict=True)}
        results, mode = _kernel.batch(job, tensors, paths, fresh=request.fresh)
        if mode.raised is not None:
            raise UntraceableError(f"it catches an exception ({type(mode.raised).__name__})")
        questions[:] = [question.whole for question in paths.questions]
        return [*(question.tensor.detach() for question in paths.questions), *(result.detach() for result in results.values())]

    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    columns = []
    for tensor in examples.values():
        sizes = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (tensor.dim() - 1)]
        columns.append(fake.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)))
    with fake:
        return make_fx(run, tracing_mode="real")(*columns)


def _write_in_place(graph: Any, asked: int) -> tuple[Tensor, ...]:
    """Have `graph`, which returns all it makes, write what comes after the first `asked` into memory that it takes besides."""
    nodes = graph.graph
    (end,) = nodes.find_nodes(op="output")
    last = nodes.find_nodes(op="placeholder")[-1]
    results = end.args[0]
    made = []
    for k, node in enumerate(results[asked:]):
        value = node.meta["val"]
        if not all(type(size) is int for size in value.shape[1:]):
            raise UntraceableError("the shape of a derivative depends on the number of rows")
        made.append(torch.empty((ROWS, *value.shape[1:]), dtype=value.dtype))
        with nodes.inserting_after(last):
            last = nodes.placeholder(f"made_{k}")
        with nodes.inserting_before(end):
            nodes.call_function(torch.ops.aten.copy_.default, (last, node))
    end.args = (list(results[:asked]),)
    graph.recompile()
    return tuple(made)


# --- what a kernel may be made of -------------------------------------------------------------------------------------

# fmt: off
_ALLOWED = frozenset((
    "sum", "mean", "amax", "amin", "prod", "cumsum", "cumprod", "any", "all", "argmax", "argmin", "max", "min", "var", "std",
    "logsumexp", "logcumsumexp", "linalg_vector_norm", "norm", "trace",
    "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm",
    "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward",
    "mm", "bmm", "addmm", "mv", "dot", "baddbmm", "matmul", "convolution", "convolution_backward", "linalg_cross",
    "full", "zeros", "ones", "empty", "full_like", "zeros_like", "ones_like", "empty_like", "new_zeros", "new_ones", "new_full",
    "new_empty", "new_empty_strided", "arange", "scalar_tensor", "linspace", "eye", "lift_fresh_copy",
    "clone", "copy", "copy_", "fill", "fill_", "zero_", "detach", "_to_copy", "cat", "stack", "constant_pad_nd", "flip", "roll",
    "squeeze_", "unsqueeze_", "t_", "transpose_",
    "repeat", "tril", "triu", "where", "_unsafe_view", "reshape", "_reshape_alias", "expand", "select", "unbind", "split",
    "split_with_sizes", "chunk", "unfold",
    "slice_backward", "select_backward", "diagonal_backward", "select_scatter", "slice_scatter", "diagonal_scatter",
    "sym_size", "sym_numel", "sym_stride",
))
"""Calls besides those element by element and views: all that cannot fail on a value, draw or look up."""
_DIVISIONS = frozenset((
    "div", "floor_divide", "remainder", "fmod", "div_", "floor_divide_", "remainder_", "fmod_", "bitwise_right_shift", "bitwise_left_shift",
))
"""Calls that end a process where the divisor is an integer zero."""
# fmt: on


def _check(graph: Any) -> None:
    """Refuse what can fail on a row, which a kernel cannot tell, and what would take too long or too much."""
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    if len(nodes) > MOST_NODES:
        raise UntraceableError(f"it makes {len(nodes)} torch calls, more than {MOST_NODES}")
    constants = sum(value.numel() * value.element_size() for value in _constants(graph))
    if constants > MOST_CONSTANTS:
        raise UntraceableError(
            f"{constants // 2**20} MiB of weights would become part of the kernel, more than {MOST_CONSTANTS // 2**20} MiB"
        )
    for node in nodes:
        if _specialized(node):
            raise UntraceableError(f"torch fixes the number of rows in {_called(node.target)}")
        if not _allowed(node):
            raise UntraceableError(f"it uses {_called(node.target)}, which a kernel cannot")


def _constants(graph: Any) -> list[Tensor]:
    names = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    found = [operator.attrgetter(name)(graph) for name in names]
    return [value for value in found if isinstance(value, Tensor)]


def _specialized(node: Any) -> bool:
    """Whether the number of rows of the example has become part of the graph."""
    shape = getattr(node.meta.get("val"), "shape", ())
    return any(type(number) is int and number == ROWS for number in (*shape, *_whole_numbers(node.args)))


def _whole_numbers(args: Any) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, list | tuple):
            yield from _whole_numbers(arg)
        else:
            yield arg


def _allowed(node: Any) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", "") in ("_operator", "math") or target in (torch.sym_max, torch.sym_min)
    name = target._schema.name.partition("::")[2]
    if target.namespace not in ("aten", "prims") or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    if name in _DIVISIONS and _of_integers(node):
        return False
    return name in _ALLOWED or torch.Tag.pointwise in target.tags or target.is_view


def _of_integers(node: Any) -> bool:
    value = node.meta.get("val")
    return not (isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()))


def _called(target: Any) -> str:
    return str(target.overloadpacket).replace("aten.", "torch.") if isinstance(target, torch._ops.OpOverload) else str(target)
