"""What tensor-parallel code calls on plain tensors, beyond the collectives."""

import pytest
import torch
import torch.nn.functional as F
from tensor_ranks import run_ranks, tensor_groups

from smpc.executor import tensor_ops
from smpc.executor.collectives import TensorGroup


@pytest.mark.parametrize("blocks", [(), (4, 8)])
def test_own_parts_make_up_the_tensor(blocks):
    tensor = torch.arange(24.0).reshape(2, 12).requires_grad_()
    parts = [tensor_ops.own_part(tensor, 1, group, blocks) for group in tensor_groups(2)]
    sizes = [size // 2 for size in blocks or (12,)]
    pieces = [part.split(sizes, 1) for part in parts]
    assert torch.equal(torch.cat([piece for block in zip(*pieces, strict=True) for piece in block], 1), tensor)
    parts[1].sum().backward()
    assert tensor.grad.sum() == 12  # of the rest it is zero


def test_summands_make_up_the_tensor():
    tensor = torch.randn(4, requires_grad=True)
    summands = [tensor_ops.to_partial(tensor, group) for group in tensor_groups(2)]
    assert torch.equal(summands[0] + summands[1], tensor)
    summands[1].sum().backward()
    assert torch.equal(tensor.grad, torch.ones(4))


@pytest.mark.parametrize("padding", [None, 1, 6, -1])
def test_rows_of_all_ranks_make_up_the_embedding(padding):
    table, ids = torch.randn(8, 3), torch.tensor([[0, 7, 3], [4, 6, 1]])
    whole = table.clone().requires_grad_()
    expected = F.embedding(ids, whole, padding)
    expected.sum().backward()
    rows = [part.clone().requires_grad_() for part in table.chunk(2)]
    found = [tensor_ops.embedding(ids, own, padding, group) for own, group in zip(rows, tensor_groups(2), strict=True)]
    assert torch.equal(found[0] + found[1], expected)
    for own, part in zip(rows, found, strict=True):
        part.sum().backward()
        assert own.grad is not None
    assert torch.equal(torch.cat([own.grad for own in rows]), whole.grad)


def test_what_is_gathered_can_be_viewed():
    groups = tensor_groups(2)
    parts = torch.randn(2, 3, 8).chunk(2, -1)
    for found in run_ranks(2, lambda rank: tensor_ops.all_gather(parts[rank], 2, groups[rank])):
        assert found.view(-1, 8).shape == (6, 8)


def test_draws_differ_between_ranks_which_then_agree():
    draws, after = [], []
    for group in (*tensor_groups(2), tensor_groups(2)[0]):
        torch.manual_seed(0)
        draws.append(tensor_ops.draw_apart("torch.nn.functional.dropout", group, torch.ones(64), 0.5))
        after.append(torch.rand(4))
    assert not torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])
    assert torch.equal(after[0], after[1])


def test_one_rank_has_the_whole():
    tensor = torch.randn(4)
    assert tensor_ops.own_part(tensor, 0, TensorGroup()) is tensor
    assert tensor_ops.to_partial(tensor, TensorGroup()) is tensor
