"""Slices of tensors: a part of a whole is filled from whatever pieces arrive."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smpc.errors import CheckpointError
from smpc.nn import DistributedLinear
from smpc.nn.parallel import Shard, TensorParallel
from smpc.tracer.ir import TensorSpec
from smpc.v1.layout.slices import Slices, place
from smpc.v1.state_dicts.merge import Piece, fill


@given(data=st.data(), size=st.integers(1, 8), dim=st.integers(0, 1), whole=st.booleans())
def test_any_pieces_fill_any_slice(data, size, dim, whole):
    full = torch.arange(size * 3.0).reshape(3, size) if dim else torch.arange(size * 3.0).reshape(size, 3)
    start = data.draw(st.integers(0, size - 1))
    length = data.draw(st.integers(1, size - start))
    shard = None if whole else Shard(dim, size, start)
    expected = full if whole else full.narrow(dim, start, length)
    target = torch.full_like(expected, -1.0)
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=3))})
    for first, last in itertools.pairwise(cuts):
        value = full.narrow(dim, first, last - first)
        fill(target, shard, Piece(0, TensorSpec.of(value), dim, first), value)
    assert torch.equal(target, expected)


def test_state_without_a_place_in_the_whole_is_refused():
    module = DistributedLinear(4, 4, parallel=TensorParallel())
    slices = Slices(module)
    assert slices.get("weight") is None  # one rank has all
    slices._shards["weight"] = Shard(1, 8, 4)
    assert slices.whole_shape("weight", (4, 4)) == (4, 8)
    assert slices.of_state("weight", "step", torch.tensor(1.0), (4, 4)) is None
    assert slices.of_state("weight", "exp_avg", torch.ones(4, 4), (4, 4)) == Shard(1, 8, 4)
    with pytest.raises(CheckpointError, match="optimizer state row of weight"):
        slices.of_state("weight", "row", torch.ones(4), (4, 4))
    (shard,) = place("optimizer", "weight::m", torch.ones(4, 4), Shard(1, 8, 4))
    assert (shard.global_shape, shard.offsets) == ((4, 8), (0, 4))
