"""Virtual stages: every rank runs v pieces of the model, and a microbatch goes round the ranks v times (1F1B,
interleaved; Megatron-LM, arXiv 2104.04473, section 2.3).

Terms
    p       number of ranks
    v       pieces per rank; stage s is on rank s % p, so piece s // p of that rank
    m       number of microbatches
    turn    p microbatches that a rank takes through one piece before it goes on with its next piece

Example: p = 2, v = 2, m = 4, backwards as long as forwards (`table`):

    rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 ... 2B2 ... 2B3 0B2 0B3
    rank 1  ... 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 ...
"""

from __future__ import annotations

from collections.abc import Iterator

from smpc.codegen.actions import Action, Schedule, backward, forward


def loop_placement(num_ranks: int, num_pieces: int) -> tuple[int, ...]:
    """The rank of each stage: stage s is on rank s % p."""
    return tuple(stage % num_ranks for stage in range(num_ranks * num_pieces))


def interleaved_1f1b(num_ranks: int, num_pieces: int, num_microbatches: int) -> Schedule:
    """1F1B over v pieces per rank.

    Rank r runs min(v m, 2 (p - r - 1) + (v - 1) p) forwards, then a forward and a backward in turn, then the remaining
    backwards. Its forwards take p microbatches through the first piece, the same ones through the second, and so on, then
    the next p; its backwards likewise, from the last piece to the first.

    Bubble (p - 1) / (v m + p - 1) on balanced pieces if p divides m. In flight on rank 0, in shares of a rank (v pieces
    are one): p + (p - 1) / v; rank r holds 2 r / v less. With fewer microbatches than that, v m pieces.

    If p does not divide m, it is the schedule of the next multiple of p without the microbatches that do not exist. No
    action is later than it is there, so a step takes at most as long as with ceil(m / p) p microbatches.
    """
    total = -(-num_microbatches // num_ranks) * num_ranks * num_pieces
    order = []
    for rank in range(num_ranks):
        forwards = [forward(s, m) for s, m in _turns(rank, num_ranks, num_pieces, total)]
        backwards = [
            backward(num_ranks * num_pieces - 1 - s, m)
            for s, m in _turns(num_ranks - 1 - rank, num_ranks, num_pieces, total)
        ]
        warm_up = min(total, 2 * (num_ranks - rank - 1) + (num_pieces - 1) * num_ranks)
        actions = [*forwards[:warm_up], *_alternate(forwards[warm_up:], backwards), *backwards[total - warm_up :]]
        order.append(tuple(action for action in actions if action.microbatch < num_microbatches))
    return tuple(order)


def _turns(rank: int, num_ranks: int, num_pieces: int, total: int) -> Iterator[tuple[int, int]]:
    """(stage, microbatch) of a rank's forwards, in order."""
    for index in range(total):
        turn, within = divmod(index, num_ranks * num_pieces)
        piece, offset = divmod(within, num_ranks)
        yield piece * num_ranks + rank, turn * num_ranks + offset


def _alternate(forwards: list[Action], backwards: list[Action]) -> Iterator[Action]:
    """A forward and a backward in turn, as long as there are forwards."""
    for ahead, back in zip(forwards, backwards, strict=False):
        yield ahead
        yield back
