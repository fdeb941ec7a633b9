"""Which pieces of a dimension a rank has, and the two orders in which all of them can stand.

Terms
    blocks      sizes of runs of the dimension that are each shared out by themselves; none: the dimension is one block
    mirrored    of each block, cut in 2n pieces, the r-th of n ranks has pieces r and 2n - 1 - r: its parts of a triangle are then
                as large as everybody's. Otherwise a block is cut in n pieces, and rank r has the r-th
    rank order  the pieces of rank 0, then of rank 1, ...: the order after gathering

    0 1 2 3 4 5 6 7     on two ranks, mirrored: rank 0 has 0 1 6 7, rank 1 has 2 3 4 5
    0 1 2 3 | 4 5 6 7   in two blocks: rank 0 has 0 1 4 5, rank 1 has 2 3 6 7

>>> pieces_of(1, 8, 2, mirrored=True)
((2, 2), (4, 2))
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

Pieces = tuple[tuple[int, int], ...]  # (start, length), as they stand on a rank


@functools.lru_cache(maxsize=4096)
def pieces_of(rank: int, size: int, num_ranks: int, blocks: tuple[int, ...] = (), mirrored: bool = False) -> Pieces:
    """The pieces of a dimension of `size` elements that a rank has. ValueError if a block cannot be cut into equal pieces."""
    each = num_ranks * 2 if mirrored else num_ranks
    found: list[tuple[int, int]] = []
    start = 0
    for block in blocks or (size,):
        if block % each:
            raise ValueError(
                f"expected {block} elements in each part of a dimension of {size} to be divisible by {each}, for {num_ranks} ranks"
                f"{' with two pieces each' if mirrored else ''}; pad it, or use another number of ranks"
            )
        length = block // each
        found += [(start + place * length, length) for place in ((rank, each - 1 - rank) if mirrored else (rank,))]
        start += block
    assert start == size, f"blocks {blocks} of {size} elements"
    return tuple(found)


def own_pieces(
    tensor: Tensor, dim: int, rank: int, num_ranks: int, blocks: tuple[int, ...] = (), mirrored: bool = False
) -> Tensor:
    """A rank's pieces of a whole tensor, joined: a new, contiguous tensor."""
    pieces = pieces_of(rank, tensor.shape[dim], num_ranks, tuple(blocks), mirrored)
    return torch.cat([tensor.narrow(dim, start, length) for start, length in pieces], dim)


def in_rank_order(
    tensor: Tensor, dim: int, num_ranks: int, blocks: tuple[int, ...] = (), mirrored: bool = False
) -> Tensor:
    """A whole tensor, with its pieces in rank order."""
    if not (blocks or mirrored):
        return tensor
    order = _all_pieces(tensor.shape[dim], num_ranks, tuple(blocks), mirrored)
    return torch.cat([tensor.narrow(dim, start, length) for start, length in order], dim)


def in_own_order(
    tensor: Tensor, dim: int, num_ranks: int, blocks: tuple[int, ...] = (), mirrored: bool = False
) -> Tensor:
    """The whole tensor again, of one in rank order."""
    if not (blocks or mirrored):
        return tensor
    order = _all_pieces(tensor.shape[dim], num_ranks, tuple(blocks), mirrored)
    parts = torch.split(tensor, [length for _, length in order], dim)
    ascending = sorted(range(len(order)), key=lambda i: order[i][0])
    return torch.cat([parts[i] for i in ascending], dim)


@functools.lru_cache(maxsize=1024)
def _all_pieces(size: int, num_ranks: int, blocks: tuple[int, ...], mirrored: bool) -> Pieces:
    return tuple(piece for rank in range(num_ranks) for piece in pieces_of(rank, size, num_ranks, blocks, mirrored))
