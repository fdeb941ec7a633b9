"""Products of a hidden state inside with weights that are split by output channels, without keeping what the ranks have gathered.

    [tp * B, S, H / tp] --all-gather--> [tp * B, S, H] --weights--> [tp * B, S, out / tp] each
                                              |
                          given up after the products, gathered once more for the gradients of the weights

So a rank keeps its own slice alone of every hidden state for the backward pass (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from smpc.executor.collectives import TensorGroup, gather_in, gathered, reduce_scatter

Linear = tuple[Tensor, Tensor | None]  # weight [out / tp, H] and bias [out / tp]


def gathered_products(hidden: Tensor, linears: Sequence[Linear], group: TensorGroup) -> tuple[Tensor, ...]:
    """The output of every linear layer for the hidden state that is sliced over ranks along its last dimension."""
    device = hidden.device.type
    flat = [tensor for linear in linears for tensor in linear]
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, flat = hidden.to(dtype), [None if tensor is None else tensor.to(dtype) for tensor in flat]
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        found: tuple[Tensor, ...] = _Products.apply(hidden, group, *flat)  # type: ignore[no-untyped-call]
    return found


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: TensorGroup, *flat: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = flat[::2], flat[1::2]
        ctx.save_for_backward(hidden, *weights)
        ctx.group = group
        ctx.set_materialize_grads(False)
        whole = gathered(hidden, -1, group)
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, *weights = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        into_hidden = None
        if wanted[0]:
            parts = [grad @ weight for grad, weight in zip(grads, weights, strict=True) if grad is not None]
            into_hidden = reduce_scatter(sum(parts[1:], parts[0]), -1, ctx.group)
        rows = gather_in(hidden, -1, ctx.group).flatten(0, -2) if any(wanted[2::2]) else None
        found: list[Tensor | None] = []
        for i, grad in enumerate(grads):
            flat = None if grad is None else grad.flatten(0, -2)
            found.append(flat.t() @ rows if flat is not None and rows is not None and wanted[2 + 2 * i] else None)
            found.append(flat.sum(0) if flat is not None and wanted[3 + 2 * i] else None)
        return into_hidden, None, *found
