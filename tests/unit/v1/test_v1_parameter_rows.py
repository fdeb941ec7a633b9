"""Parts of parameters in an optimizer's groups: where they are in the whole, whose memory they have, what becomes of their state."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from smpc.nn.parallel import ParameterSlice
from smpc.v1.optimization.sharded_optimizer_state import OwnParts, Range


@st.composite
def slices(draw):
    """A slice of a whole of 40 columns, as one run or several, and a range of it."""
    bounds = sorted(draw(st.sets(st.integers(0, 40), min_size=2, max_size=8)))
    runs = [(a, b - a) for a, b in zip(bounds[::2], bounds[1::2], strict=False)]
    size = sum(length for _, length in runs)
    start = draw(st.integers(0, size - 1))
    length = draw(st.integers(1, size - start))
    shard = ParameterSlice(1, 40, runs[0][0], tuple(runs) if len(runs) > 1 else ())
    return shard, size, Range(1, start, length)


@given(slices())
def test_rows_of_a_slice_are_a_slice_of_the_whole(found):
    shard, size, rows = found
    whole = torch.arange(80).view(2, 40)
    own = torch.cat([whole[:, at : at + length] for _, at, length in shard.runs_of(size)], 1)
    part = rows.within(shard, size)
    again = torch.cat([whole[:, at : at + length] for _, at, length in part.runs_of(rows.length)], 1)
    assert torch.equal(again, rows.of(own))
    assert tuple(again.shape) == rows.shape(tuple(own.shape))
    alone = rows.within(None, size)
    assert (alone.dim, alone.size, alone.start, alone.runs) == (1, size, rows.start, ())


def test_a_part_shares_memory_and_follows_its_parameter():
    weight, bias = nn.Parameter(torch.arange(12.0).view(4, 3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adagrad([weight, bias], lr=0.5, initial_accumulator_value=2.0)
    optimizer.state[weight]["sum"] += torch.arange(12.0).view(4, 3)
    parts = OwnParts()
    for _ in range(2):  # the second time there is nothing to do
        parts.adopt(optimizer, lambda parameter: Range(0, 1, 2) if parameter is weight else None)
    part, other = optimizer.param_groups[0]["params"]
    assert other is bias
    assert parts.parameter_of(part) is weight
    assert parts.entry_of(weight) is part
    assert parts.entry_of(bias) is bias
    assert torch.equal(optimizer.state[part]["sum"], torch.arange(12.0).view(4, 3)[1:3] + 2)
    assert weight not in optimizer.state
    weight.grad = torch.ones(4, 3)
    before = weight.detach().clone()
    parts.refresh()
    optimizer.step()
    changed = (weight != before).any(1)
    assert changed.tolist() == [False, True, True, False]
    parts.drop_gradients()
    assert part.grad is None
    for _ in range(2):  # with the memory that it had, and with other memory
        version = part._version
        with torch.no_grad():
            weight.add_(1)
        parts.refresh()
        assert torch.equal(part, weight[1:3])
        assert part._version > version
        weight.data = weight.data.clone()
        parts.refresh()
        assert part.data_ptr() == weight[1:3].data_ptr()
    weight.requires_grad_(False)
    parts.refresh()
    assert not part.requires_grad


def test_sparse_gradients_are_cut_as_dense_ones_are():
    grad = torch.sparse_coo_tensor(torch.tensor([[0, 2, 2]]), torch.ones(3, 5), (4, 5), check_invariants=True)
    assert torch.equal(Range(0, 1, 2).of(grad).to_dense(), grad.to_dense()[1:3])
