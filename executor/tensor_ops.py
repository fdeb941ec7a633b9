"""What the code of tensor-parallel stages calls on plain tensors: the collectives, three operations that communicate nothing, and a loss.

        function        takes             returns      backward
        own_part        replicated        sharded      zeros around this rank's slice: partial, as those of its users must be
        to_partial      replicated        partial      identity: the gradient of a partial tensor is whole on every rank
        embedding       sharded rows      partial      of its own rows alone
        cross_entropy   sharded classes   replicated   of its own classes alone; forward, two small all-reduces

`draw_apart` runs what draws random numbers for slices: equal draws where data is equal, different ones where it is split.
See `smpc.executor.collectives` for the terms. What comes out of a call that cuts or joins is contiguous, so that code which views it runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from smpc.executor import collectives
from smpc.executor.collectives import TensorGroup, all_reduce, all_to_all, replicate_in, split
from smpc.kernels.vocab_parallel_cross_entropy import vocab_parallel_cross_entropy
from smpc.tracer.targets import function

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "cross_entropy",
    "draw_apart",
    "embedding",
    "gather_in",
    "own_part",
    "reduce_scatter",
    "replicate_in",
    "split",
    "to_partial",
]


def all_gather(tensor: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """`smpc.executor.collectives.all_gather`, contiguous."""
    return collectives.all_gather(tensor, dim, group).contiguous()


def gather_in(tensor: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """`smpc.executor.collectives.gather_in`, contiguous."""
    return collectives.gather_in(tensor, dim, group).contiguous()


def reduce_scatter(tensor: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """`smpc.executor.collectives.reduce_scatter`, contiguous."""
    return collectives.reduce_scatter(tensor, dim, group).contiguous()


def own_part(tensor: Tensor, dim: int, group: TensorGroup, blocks: tuple[int, ...] = ()) -> Tensor:
    """This rank's slice along `dim`, or of each of the `blocks` along it, joined."""
    if group.size == 1:
        return tensor
    if not blocks:
        return collectives.own_slice(tensor, dim, group)
    parts = torch.split(tensor, list(blocks), dim)
    return torch.cat([part.chunk(group.size, dim)[group.rank] for part in parts], dim)


def to_partial(tensor: Tensor, group: TensorGroup) -> Tensor:
    """A summand on each rank whose sum is the tensor: the tensor itself on the first, zeros on the others."""
    return collectives.collective(
        tensor, group, lambda x: x.view_as(x) if group.rank == 0 else torch.zeros_like(x), lambda grad: grad
    )


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


def draw_apart(name: str, group: TensorGroup, *args: Any, **kwargs: Any) -> Any:
    """Calls the torch function `name` (dropout, say) on slices: what it draws differs between the ranks.

    They go on alike from there: one draw of the default CPU generator, in which they agree, seeds all that the call draws.
    """
    seed = int(torch.randint(2**62, ()).item()) + group.rank
    cuda = next((arg.device for arg in args if isinstance(arg, Tensor) and arg.is_cuda), None)
    with torch.random.fork_rng([] if cuda is None else [cuda]):
        torch.default_generator.manual_seed(seed)
        if cuda is not None:
            with torch.cuda.device(cuda):
                torch.cuda.manual_seed(seed)
        return function(name)(*args, **kwargs)
