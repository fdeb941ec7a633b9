"""Slices of one dimension for slices of another, where the slices are pieces (`smpc.executor.pieces`)."""

from __future__ import annotations

from torch import Tensor

from smpc.executor import collectives, pieces
from smpc.executor.collectives import TensorGroup

Pieces = tuple[tuple[int, ...], bool]  # blocks, mirrored


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
        lambda x: _exchanged(x, there, back, group),
        lambda grad: _exchanged(grad, back, there, group),
    )


def _exchanged(
    tensor: Tensor, split_at: tuple[int, Pieces], gather_at: tuple[int, Pieces], group: TensorGroup
) -> Tensor:
    (split_dim, sent), (gather_dim, got) = split_at, gather_at
    ordered = pieces.in_rank_order(tensor, split_dim, group.size, *sent)
    joined = collectives.exchanged(ordered, split_dim, gather_dim, group)
    return pieces.in_own_order(joined, gather_dim, group.size, *got)
