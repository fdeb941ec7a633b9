"""Functions that the code of tensor- and context-parallel stages calls on plain tensors: collectives, local operations, losses, attention.

        function        takes             returns      backward
        own_part        replicated        sharded      zeros around this rank's slice: partial, as its users' gradients must be
        to_partial      replicated        partial      identity: the gradient of a partial tensor is whole on every rank
        embedding       sharded rows      partial      of its own rows alone
        cross_entropy   sharded classes   replicated   of its own classes alone; forward, two small all-reduces

Slices can be several pieces of a dimension, joined: for `blocks` and `mirrored` see `smpc.executor.collectives`.

`smpc.executor.shared_draws` has the functions that draw random numbers. See `smpc.executor.collectives` for the terms. Results of calls
that cut or join are contiguous, so that code can view them.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from smpc.executor import collectives
from smpc.executor.collectives import TensorGroup, all_reduce, replicate_in
from smpc.executor.sequence.ring import ring_attention
from smpc.executor.sequence.sliced import all_to_all, causal_rows, exchanged_attention, mean_part, rows_cross_entropy
from smpc.executor.shared_draws import attention_with_noise, draw_apart, dropout_noise
from smpc.kernels.vocab_parallel_cross_entropy import vocab_parallel_cross_entropy

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "attention_with_noise",
    "causal_rows",
    "cross_entropy",
    "draw_apart",
    "dropout_noise",
    "embedding",
    "exchanged_attention",
    "gather_in",
    "mean_part",
    "on_summands",
    "own_part",
    "reduce_scatter",
    "replicate_in",
    "ring_attention",
    "rows_cross_entropy",
    "split",
    "to_partial",
]


def all_gather(
    tensor: Tensor, dim: int, group: TensorGroup, blocks: tuple[int, ...] = (), mirrored: bool = False
) -> Tensor:
    """`smpc.executor.collectives.all_gather`, contiguous, of slices that are these pieces."""
    if not (blocks or mirrored):
        return collectives.all_gather(tensor, dim, group).contiguous()
    return collectives.collective(
        tensor,
        group,
        lambda x: _whole(x, dim, group, blocks, mirrored),
        lambda grad: collectives.own_pieces(grad, dim, group.rank, group.size, blocks, mirrored),
    )


def gather_in(
    tensor: Tensor, dim: int, group: TensorGroup, blocks: tuple[int, ...] = (), mirrored: bool = False
) -> Tensor:
    """`smpc.executor.collectives.gather_in`, contiguous, of slices that are these pieces."""
    if not (blocks or mirrored):
        return collectives.gather_in(tensor, dim, group).contiguous()
    return collectives.collective(
        tensor,
        group,
        lambda x: _whole(x, dim, group, blocks, mirrored),
        lambda grad: _own_of_sum(grad, dim, group, blocks, mirrored),
    )


def reduce_scatter(
    tensor: Tensor, dim: int, group: TensorGroup, blocks: tuple[int, ...] = (), mirrored: bool = False
) -> Tensor:
    """`smpc.executor.collectives.reduce_scatter`, contiguous, to slices that are these pieces."""
    if not (blocks or mirrored):
        return collectives.reduce_scatter(tensor, dim, group).contiguous()
    return collectives.collective(
        tensor,
        group,
        lambda x: _own_of_sum(x, dim, group, blocks, mirrored),
        lambda grad: _whole(grad, dim, group, blocks, mirrored),
    )


def split(tensor: Tensor, dim: int, group: TensorGroup, blocks: tuple[int, ...] = (), mirrored: bool = False) -> Tensor:
    """`smpc.executor.collectives.split`, to slices that are these pieces."""
    if not (blocks or mirrored):
        return collectives.split(tensor, dim, group)
    return collectives.collective(
        tensor,
        group,
        lambda x: collectives.own_pieces(x, dim, group.rank, group.size, blocks, mirrored),
        lambda grad: _whole(grad, dim, group, blocks, mirrored),
    )


def own_part(
    tensor: Tensor, dim: int, group: TensorGroup, blocks: tuple[int, ...] = (), mirrored: bool = False
) -> Tensor:
    """This rank's slice along `dim`, or of each of the `blocks` along it, joined."""
    if group.size == 1:
        return tensor
    if not (blocks or mirrored):
        return collectives.own_slice(tensor, dim, group)
    return collectives.own_pieces(tensor, dim, group.rank, group.size, blocks, mirrored)


def _whole(tensor: Tensor, dim: int, group: TensorGroup, blocks: tuple[int, ...], mirrored: bool) -> Tensor:
    return collectives.in_own_order(collectives.gathered(tensor, dim, group), dim, group.size, blocks, mirrored)


def _own_of_sum(tensor: Tensor, dim: int, group: TensorGroup, blocks: tuple[int, ...], mirrored: bool) -> Tensor:
    ordered = collectives.in_rank_order(tensor, dim, group.size, blocks, mirrored)
    return collectives.scattered_sum(ordered, dim, group).contiguous()


def to_partial(tensor: Tensor, group: TensorGroup) -> Tensor:
    """A summand on each rank whose sum is the tensor: the tensor itself on the first, zeros on the others."""
    return collectives.collective(
        tensor, group, lambda x: x.view_as(x) if group.rank == 0 else torch.zeros_like(x), lambda grad: grad
    )


class CalledWith(Protocol):
    """What stands for a module in a program, and calls it with other tensors in place of parameters."""

    def get_parameter(self, target: str) -> Tensor:
        """As of a module."""

    def called_with(self, tensors: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call with these tensors in place of the module's parameters of these names."""


def on_summands(
    module: nn.Module | CalledWith, names: tuple[str, ...], group: TensorGroup, *args: Any, **kwargs: Any
) -> Any:
    """Calls a module with summands in place of the parameters of these names: what they are added to is a summand on each rank."""
    summands = {name: to_partial(module.get_parameter(name), group) for name in names}
    if isinstance(module, nn.Module):
        return functional_call(module, summands, args, kwargs)
    return module.called_with(summands, args, kwargs)


def embedding(ids: Tensor, rows: Tensor, padding_idx: int | None, group: TensorGroup) -> Tensor:
    """Looks up the rows that this rank has of a table split by rows; the others are zeros.

    The row of `padding_idx` (of the whole table) gets no gradient.
    """
    start = group.rank * rows.shape[0]
    local = ids - start
    elsewhere = (local < 0) | (local >= rows.shape[0])
    own_padding = None
    if padding_idx is not None:
        padding = padding_idx % (rows.shape[0] * group.size) - start
        own_padding = padding if 0 <= padding < rows.shape[0] else None
    found = F.embedding(local.masked_fill(elsewhere, 0), rows, own_padding)
    return found.masked_fill(elsewhere.unsqueeze(-1), 0)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: TensorGroup,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of [rows, classes] logits, of which this rank has its share of the classes. Sums are in fp32."""
    if group.process_group is None:
        return F.cross_entropy(
            logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
        )
    losses = vocab_parallel_cross_entropy(
        logits,
        target,
        group.process_group,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    if reduction == "mean":  # where all labels are ignored: NaN, as torch's
        losses = losses.sum() / (target != ignore_index).sum()
    elif reduction == "sum":
        losses = losses.sum()
    return losses.to(logits.dtype)
