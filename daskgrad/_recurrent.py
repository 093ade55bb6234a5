"""Recurrent layers in a batch: torch's fused kernels have no batching rule, but their formulas need none.

The layers go through the formulas that torch itself ships for its compiler; the cells are written out here, as documented for
`torch.nn.LSTMCell`, `GRUCell` and `RNNCell`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

Formula = Callable[..., Any]


def by_formula(name: str, args: tuple[Any, ...]) -> Any:
    """What torch's recurrent layer or cell of that name returns for `args`; NotImplemented for packed sequences."""
    return cell(name, args) if name.endswith("cell") else layer(name, args)


def layer(name: str, args: tuple[Any, ...]) -> Any:
    """What `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu` returns for `args`; NotImplemented for packed sequences."""
    from torch._decomp import decompositions as formulas

    if not isinstance(args[2], list | tuple):  # data, batch_sizes, hx, params, ...
        return NotImplemented
    by_name: dict[str, Formula] = {
        "lstm": _lstm,
        "gru": formulas.gru_impl,
        "rnn_tanh": formulas.rnn_tanh_input,
        "rnn_relu": formulas.rnn_relu_input,
    }
    return by_name[name](*args)


def drops(args: tuple[Any, ...]) -> bool:
    """Whether a layer with these arguments has dropout in train mode, which torch's formulas leave out."""
    packed = not isinstance(args[2], list | tuple)
    layers, dropout, train = args[5:8] if packed else args[4:7]
    return bool(train and dropout and layers > 1)


def _lstm(
    given: Tensor,
    hidden: tuple[Tensor, Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """torch's formula, but never its float32 kernel, which has no batching rule."""
    from torch._decomp import decompositions as formulas

    layers = formulas.gather_params(params, has_biases, hidden[0].size(2) != hidden[1].size(2))
    output, states = formulas._rnn_helper(
        given,
        list(zip(hidden[0], hidden[1], strict=True)),
        layers,
        has_biases,
        num_layers,
        dropout,
        train,
        bidirectional,
        batch_first,
        formulas.one_layer_lstm,
    )
    last, memory = zip(*states, strict=True)
    return output, torch.stack(last, 0), torch.stack(memory, 0)


def cell(name: str, args: tuple[Any, ...]) -> Any:
    """What `torch.lstm_cell`, `gru_cell`, `rnn_tanh_cell` or `rnn_relu_cell` returns for `args`."""
    given, hidden, w_ih, w_hh, b_ih, b_hh = (*args, None, None)[:6]
    if name == "lstm_cell":
        return _lstm_cell(linear(given, w_ih, b_ih) + linear(hidden[0], w_hh, b_hh), hidden[1])
    ours, theirs = linear(given, w_ih, b_ih), linear(hidden, w_hh, b_hh)
    if name == "gru_cell":
        return _gru_cell(ours, theirs, hidden)
    return torch.tanh(ours + theirs) if name == "rnn_tanh_cell" else torch.relu(ours + theirs)


def _lstm_cell(gates: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    enter, forget, candidate, leave = gates.chunk(4, -1)
    state = torch.sigmoid(forget) * state + torch.sigmoid(enter) * torch.tanh(candidate)
    return torch.sigmoid(leave) * torch.tanh(state), state


def _gru_cell(ours: Tensor, theirs: Tensor, hidden: Tensor) -> Tensor:
    reset_in, update_in, new_in = ours.chunk(3, -1)
    reset_hidden, update_hidden, new_hidden = theirs.chunk(3, -1)
    reset, update = torch.sigmoid(reset_in + reset_hidden), torch.sigmoid(update_in + update_hidden)
    new = torch.tanh(new_in + reset * new_hidden)
    return new + update * (hidden - new)
