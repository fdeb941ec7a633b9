"""Losses and means over a sequence of which each rank has a slice: every rank gives a summand.

    loss = sum over own rows of loss_i / number of all rows that count

A `Cut` says which slice a rank has of which dimension: (dimension, blocks, mirrored), as in `smpc.executor.pieces`.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from smpc.executor.collectives import TensorGroup
from smpc.executor.pieces import own_pieces

Cut = tuple[int, tuple[int, ...], bool]


def rows_cross_entropy(
    group: TensorGroup,
    cut: Cut,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """This rank's summand of `torch.nn.functional.cross_entropy`: own rows of the logits `input`, all labels `target`."""
    dim, blocks, mirrored = cut
    own = own_pieces(target, max(0, dim - 1), group.rank, group.size, blocks, mirrored) if group.size > 1 else target
    loss = F.cross_entropy(
        input, own, weight, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
    )
    if reduction == "sum":
        return loss
    counted = target != ignore_index
    if weight is None:
        return loss / counted.sum()
    return loss / weight[target.masked_fill(~counted, 0)].masked_fill(~counted, 0).sum()


def mean_part(group: TensorGroup, cut: Cut, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """This rank's summand of `input.mean(...)` over a dimension of which all ranks have equally much."""
    found: Tensor = input.mean(*args, **kwargs) / group.size
    return found
