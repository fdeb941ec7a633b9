"""Slices of tensors: a part of a whole is filled from whatever pieces arrive."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smpc.errors import CheckpointError
from smpc.nn import DistributedLinear
from smpc.nn.parallel import ParameterSlice, TensorParallel
from smpc.tracer.ir import TensorSpec
from smpc.v1.layout.placement import Slices, place
from smpc.v1.state_dicts.merge_ranks import MergedPiece, fill, survey


@given(data=st.data(), size=st.integers(1, 8), dim=st.integers(0, 1), whole=st.booleans())
def test_any_pieces_fill_any_slice(data, size, dim, whole):
    full = torch.arange(size * 3.0).reshape(3, size) if dim else torch.arange(size * 3.0).reshape(size, 3)
    start = data.draw(st.integers(0, size - 1))
    length = data.draw(st.integers(1, size - start))
    shard = None if whole else ParameterSlice(dim, size, start)
    expected = full if whole else full.narrow(dim, start, length)
    target = torch.full_like(expected, -1.0)
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=3))})
    for first, last in itertools.pairwise(cuts):
        value = full.narrow(dim, first, last - first)
        fill(target, shard, MergedPiece(0, TensorSpec.of(value), dim, first), value)
    assert torch.equal(target, expected)


def test_state_without_a_place_in_the_whole_is_refused():
    module = DistributedLinear(4, 4, parallel=TensorParallel())
    slices = Slices(module)
    assert slices.get("weight") is None  # one rank has all
    slices._shards["weight"] = ParameterSlice(1, 8, 4)
    assert slices.whole_shape("weight", (4, 4)) == (4, 8)
    assert slices.of_state("weight", "step", torch.tensor(1.0), (4, 4)) is None
    assert slices.of_state("weight", "exp_avg", torch.ones(4, 4), (4, 4)) == ParameterSlice(1, 8, 4)
    with pytest.raises(CheckpointError, match="optimizer state row of weight"):
        slices.of_state("weight", "row", torch.ones(4), (4, 4))
    (shard,) = place("optimizer", "weight::m", torch.ones(4, 4), ParameterSlice(1, 8, 4))
    assert (shard.global_shape, shard.offsets) == ((4, 8), (0, 4))


class Told:
    """Control messages among pretended ranks: what each of them would have told is known."""

    def __init__(self, answers):
        self.answers = answers

    def gather(self, mine):
        return self.answers


def surveyed(*described):
    """What ranks agree on that have these (shape, slice) under one key."""
    answers = [("", {"w": (TensorSpec.of(torch.ones(shape)), shard, True)}) for shape, shard in described]
    return survey({}, Told(answers), "the state")["w"]


@pytest.mark.parametrize(
    ("described", "owner"),
    [
        ([((4, 3), ParameterSlice(0, 4, 0)), ((0, 3), ParameterSlice(0, 4, 4))], 0),
        ([((0, 3), ParameterSlice(0, 4, 4)), ((4, 3), ParameterSlice(0, 4, 0))], 1),
        ([((0, 3), ParameterSlice(0, 4, 4)), ((4, 3), None)], 1),  # of a job in which every rank had all
        ([((4, 3), ParameterSlice(0, 4, 0)), ((4, 3), None)], 0),
    ],
)
def test_a_rank_that_has_all_speaks_for_those_that_have_nothing(described, owner):
    """Experts that are modules of their own: one rank has all rows of a parameter, the others none."""
    item = surveyed(*described)
    assert item.shape == (4, 3)
    assert [(piece.owner, tuple(piece.spec.shape)) for piece in item.pieces] == [(owner, (4, 3))]


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ([((4, 3), None), ((2, 3), ParameterSlice(0, 4, 2))], "on rank 0 of the replica"),
        ([((4, 3), ParameterSlice(0, 4, 0)), ((5, 3), None)], "on rank 0 of the replica"),
        ([((0, 3), ParameterSlice(0, 4, 4)), ((0, 3), ParameterSlice(0, 4, 4))], "cover 0 of 4"),
        ([((0, 3), ParameterSlice(0, 4, 4)), ((2, 3), ParameterSlice(0, 4, 0))], "cover 2 of 4"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(described, said):
    with pytest.raises(CheckpointError, match=said):
        surveyed(*described)
