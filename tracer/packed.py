"""Recurrent layers over packed sequences, for which torch has no kernel without values.

A packed sequence is (data [sum of lengths, features], batch sizes by time step). The batch sizes decide how the layer walks over the
data, not what shapes it returns: data [sum of lengths, directions * hidden], and states as they were given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from smpc.tracer.effects import tensors_in

_RECURRENT = ("gru", "lstm", "rnn_relu", "rnn_tanh")


def is_packed(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether the call is torch's `lstm(data, batch_sizes, states, ...)` or the like; else states come second."""
    if getattr(func, "__name__", "") not in _RECURRENT or len(args) != 9:
        return False
    sizes = args[1]
    return isinstance(sizes, torch.Tensor) and sizes.dtype is torch.int64 and sizes.dim() == 1


def run_packed(args: tuple[Any, ...]) -> tuple[tuple[torch.Tensor, ...], int]:
    """What the call returns over fakes, and its FLOPs: two for each weight and row of data, as good as exact."""
    data, _, states, weights, *_, bidirectional = args
    states = tuple(tensors_in(states))
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    found = (data.new_empty(data.shape[0], width), *(torch.empty_like(state) for state in states))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(args)):
        found = tuple(tensor.requires_grad_().clone() for tensor in found)
    return found, sum(2 * data.shape[0] * weight.numel() for weight in weights if weight.dim() == 2)
