"""The order of ring attention: every query meets every key that it sees once, ranks have equal work, and wrong orders are found."""

import dataclasses
import itertools

import pytest
import torch

from smpc.codegen import ring_order
from smpc.codegen.ring_order import SlicePart, pairs_of_work, prove_ring, ring_steps
from smpc.errors import ScheduleError

SIZES = [1, 2, 3, 4, 8, 16]


def pieces_of(rank, ranks, part, mirrored):
    """Places in the sequence, of `2 * ranks` pieces, of what a step names."""
    both = [rank, 2 * ranks - 1 - rank] if mirrored else [2 * rank, 2 * rank + 1]
    return {SlicePart.ALL: both, SlicePart.FIRST: both[:1], SlicePart.SECOND: both[1:], None: []}[part]


@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", SIZES)
def test_the_order_is_right(ranks, causal, mirrored):
    """Each piece of the queries meets every piece of the keys that it may see, once; `prove_ring` agrees."""
    met = torch.zeros(2 * ranks, 2 * ranks)
    for rank in range(ranks):
        for step in ring_steps(rank, ranks, causal=causal, mirrored=mirrored):
            queries = pieces_of(rank, ranks, step.queries, mirrored)
            for query, key in itertools.product(queries, pieces_of(step.source, ranks, step.keys, mirrored)):
                met[query, key] += key <= query or not step.causal
    assert torch.equal(met, torch.ones_like(met).tril() if causal else torch.ones_like(met))
    prove_ring(ranks, causal=causal, mirrored=mirrored)


@pytest.mark.parametrize("ranks", SIZES)
def test_zigzag_gives_every_rank_the_same_work(ranks):
    """And all of it is half of the square."""
    work = [pairs_of_work(rank, ranks, causal=True, mirrored=True) for rank in range(ranks)]
    assert work == [2.0 * ranks] * ranks


def test_slices_in_a_row_leave_ranks_idle():
    assert [pairs_of_work(rank, 4, causal=True, mirrored=False) for rank in range(4)] == [2.0, 6.0, 10.0, 14.0]


def test_the_steps_of_a_rank_as_text():
    texts = [[str(step) for step in ring_steps(rank, 3, causal=True, mirrored=True)] for rank in range(3)]
    assert texts == [
        ["own causal", "r2: second x all", "r1: second x all"],
        ["own causal", "r0: all x first", "r2: second x all"],
        ["own causal", "r1: all x first", "r0: all x first"],
    ]


def broken(change):
    """`ring_steps` with one step of rank 1 changed."""

    def steps(rank, num_ranks, *, causal, mirrored):
        found = ring_steps(rank, num_ranks, causal=causal, mirrored=mirrored)
        return tuple(dataclasses.replace(s, **change) if (rank, i) == (1, 1) else s for i, s in enumerate(found))

    return steps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": SlicePart.ALL}, "expected piece 1 of the queries to meet piece 7 of the keys 0 times, found 1"),
        ({"queries": None}, "expected piece 1 of the queries to meet piece 0 of the keys 1 times, found 0"),
        ({"source": 2}, "to meet piece"),
        ({"sends_to": 0}, "rank 1 sends to 0 at step 1, which waits for 3"),
        ({"receives_from": 3}, "rank 0 sends to 1 at step 1, which waits for 3"),
    ],
)
def test_a_wrong_order_is_found(monkeypatch, change, message):
    monkeypatch.setattr(ring_order, "ring_steps", broken(change))
    with pytest.raises(ScheduleError, match=message):
        prove_ring(4, causal=True, mirrored=True)
