"""Operations on a sequence of which each rank has a slice: attention, exchanges of slices, losses and means.

Attention takes keys and values that are whole, or sliced as the queries are. `smpc.executor.sequence.ring` has another way for the latter.

`causal_rows`: keys and values are whole. Query i sees keys up to i: every run of queries that a rank has is a call of its own, with the
keys up to its last query.

`all_to_all` exchanges slices of one dimension for slices of another, where the slices are pieces (`smpc.executor.collectives`).

`rows_cross_entropy` and `mean_part` are losses and means over the whole sequence: every rank gives a summand.

    loss = sum over own rows of loss_i / number of all rows that count

A `Cut` says which slice a rank has of which dimension: (dimension, blocks, mirrored), as in `smpc.executor.collectives`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from smpc.executor import collectives
from smpc.executor.collectives import TensorGroup, own_pieces, pieces_of

Cut = tuple[int, tuple[int, ...], bool]


def all_to_all(
    tensor: Tensor,
    split_dim: int,
    gather_dim: int,
    group: TensorGroup,
    split_pieces: Pieces = ((), False),
    gather_pieces: Pieces = ((), False),
) -> Tensor:
    """`smpc.executor.collectives.all_to_all`, to slices that are these pieces of one dimension, of such of another."""
    if split_pieces == gather_pieces == ((), False):
        return collectives.all_to_all(tensor, split_dim, gather_dim, group)
    there, back = (split_dim, split_pieces), (gather_dim, gather_pieces)
    return collectives.collective(
        tensor,
        group,
        lambda x: _exchanged_slices(x, there, back, group),
        lambda grad: _exchanged_slices(grad, back, there, group),
    )


def _exchanged_slices(
    tensor: Tensor, split_at: tuple[int, Pieces], gather_at: tuple[int, Pieces], group: TensorGroup
) -> Tensor:
    (split_dim, sent), (gather_dim, got) = split_at, gather_at
    ordered = collectives.in_rank_order(tensor, split_dim, group.size, *sent)
    joined = collectives.exchanged(ordered, split_dim, gather_dim, group)
    return collectives.in_own_order(joined, gather_dim, group.size, *got)


def causal_rows(
    group: TensorGroup,
    cut: Cut,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Causal attention of this rank's queries `[..., own, head size]`; keys and values `[..., keys, head size]` are whole. Contiguous."""
    _, blocks, mirrored = cut
    total, done, results = query.shape[-2] * group.size, 0, []
    for start, length in pieces_of(group.rank, total, group.size, blocks, mirrored):
        end = min(start + length, key.shape[-2])
        rows = torch.arange(start, start + length, device=query.device).unsqueeze(1)
        seen = torch.arange(end, device=query.device).unsqueeze(0) <= rows
        results.append(
            F.scaled_dot_product_attention(
                query.narrow(-2, done, length),
                key.narrow(-2, 0, end),
                value.narrow(-2, 0, end),
                seen,
                dropout_p,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        )
        done += length
    return torch.cat(results, -2).contiguous()


def exchanged_attention(
    group: TensorGroup,
    cut: Cut,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of slices `[batch, heads, own, head size]`: ranks exchange slices of the sequence for slices of the heads, and back.

    `attn_mask` is whole; of one with heads every rank takes its own. Contiguous.
    """
    pieces = cut[1:]
    q, k, v = (all_to_all(tensor, 1, 2, group, gather_pieces=pieces) for tensor in (query, key, value))
    mask = attn_mask
    if mask is not None and mask.dim() > 2 and mask.shape[-3] == query.shape[1] and query.shape[1] > 1:
        mask = mask.chunk(group.size, -3)[group.rank]
    found = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return all_to_all(found, 2, 1, group, split_pieces=pieces).contiguous()


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


Pieces = tuple[tuple[int, ...], bool]  # blocks, mirrored
