"""Dealing parameters out: every row has one owner, and owners have about as many bytes."""

import itertools

import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from smpc.mesh import Axis
from smpc.v1.optimization.sharded_optimizer_state import AssignedParameter, OwnedRows, ShardedLot, deal

LOTS = st.lists(
    st.one_of(
        st.builds(ShardedLot, st.integers(0, 200_000)),
        st.builds(
            lambda rows, width, granule: ShardedLot(rows * width, rows, granule),
            *[st.integers(1, 300)] * 2,
            st.sampled_from([1, 8, 64]),
        ),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(LOTS, st.lists(st.integers(0, 100_000), min_size=1, max_size=9))
def test_every_row_has_one_owner_and_loads_are_what_was_dealt(lots, before):
    loads = list(before)
    found = deal(lots, loads)
    expected = list(before)
    for lot, cuts in zip(lots, found, strict=True):
        assert cuts[0].start == 0
        assert cuts[-1].stop == lot.rows
        assert all(a.stop == b.start and a.owner < b.owner for a, b in itertools.pairwise(cuts))
        assert all(cut.stop % lot.granule == 0 for cut in cuts[:-1])
        assert len(cuts) == 1 or lot.may_be_cut
        for cut in cuts:
            part = lot.size if len(cuts) == 1 else lot.size * cut.stop // lot.rows - lot.size * cut.start // lot.rows
            assert part or not lot.size
            expected[cut.owner] += part
    assert loads == expected
    assert sum(len(cuts) - 1 for cuts in found) < len(loads)


@settings(deadline=None)
@given(st.lists(st.integers(1, 200_000), max_size=30), st.integers(1, 9))
def test_without_cuts_no_owner_has_more_than_the_average_and_one_lot(sizes, owners):
    loads = [0] * owners
    deal([ShardedLot(size) for size in sizes], loads)
    assert max(loads) <= sum(sizes) / owners + max(sizes, default=0)


@settings(deadline=None)
@given(
    st.lists(st.integers(4096, 400_000), min_size=1, max_size=20),
    st.lists(st.integers(0, 90_000), min_size=1, max_size=9),
)
def test_what_may_be_cut_anywhere_comes_out_even(sizes, before):
    loads = list(before)
    deal([ShardedLot(size, size) for size in sizes], loads)
    grown = [load for load, old in zip(loads, before, strict=True) if load > old]
    # Lots too small for a cut are dealt out whole; they are less than 1/1024 of a share.
    assert max(grown) - min(grown) <= (sum(loads) // len(loads)) // 1024 + 4096 + len(loads)


def test_the_large_are_cut_at_granules_and_the_small_are_not():
    assert deal([ShardedLot(64_000, 1000, 8), ShardedLot(100, 100), ShardedLot(60, 60)], [0, 0]) == [
        (OwnedRows(0, 0, 496), OwnedRows(1, 496, 1000)),
        (OwnedRows(0, 0, 100),),
        (OwnedRows(0, 0, 60),),
    ]


def gpt2_lots(may_be_cut):
    """GPT-2 with 124 million parameters: fp32 masters and both of Adam's moments."""
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    parameters = list(model.parameters())
    assert sum(parameter.numel() for parameter in parameters) == 124_439_808
    return [AssignedParameter(p, 12 * p.numel(), Axis.DP, p.shape[0] if may_be_cut else 0).lot() for p in parameters]


def imbalance(lots, owners):
    """The largest share in units of the average."""
    loads = [0] * owners
    deal(lots, loads)
    return max(loads) * owners / sum(loads)


def test_gpt2_is_balanced_over_2_4_and_8_replicas_though_its_embedding_is_a_third_of_it():
    whole, cut = gpt2_lots(False), gpt2_lots(True)
    found = {owners: (imbalance(whole, owners), imbalance(cut, owners)) for owners in (2, 4, 8)}
    print({owners: [f"{ratio:.5f}" for ratio in ratios] for owners, ratios in found.items()})
    assert found[4][0] > 1.2
    assert found[8][0] > 2.4
    assert max(cut for _, cut in found.values()) < 1.0001
