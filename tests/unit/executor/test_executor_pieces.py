"""Pieces of a dimension: every rank's, and the orders in which they are."""

import pytest
import torch
from tensor_ranks import run_ranks, tensor_groups

from smpc.executor import tensor_ops
from smpc.executor.collectives import in_own_order, in_rank_order, own_pieces, pieces_of

CASES = [((), False), ((), True), ((8, 8), False), ((8, 8), True), ((4, 12), False)]


def test_mirrored_pieces_are_the_first_from_both_ends():
    assert [pieces_of(rank, 8, 2, mirrored=True) for rank in range(2)] == [((0, 2), (6, 2)), ((2, 2), (4, 2))]
    assert pieces_of(1, 8, 2, (4, 4)) == ((2, 2), (6, 2))


def test_triangles_are_equal_for_mirrored_pieces():
    """Pairs of a query and a key that it sees, by rank."""
    for ranks in (2, 4, 8):
        work = [
            sum(start + i + 1 for start, length in pieces_of(rank, 64, ranks, mirrored=True) for i in range(length))
            for rank in range(ranks)
        ]
        assert len(set(work)) == 1


@pytest.mark.parametrize(("blocks", "mirrored"), CASES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_orders_lead_back(blocks, mirrored, ranks):
    whole = torch.arange(3 * 16).view(3, 16)
    ordered = in_rank_order(whole, 1, ranks, blocks, mirrored)
    parts = [own_pieces(whole, 1, rank, ranks, blocks, mirrored) for rank in range(ranks)]
    assert torch.equal(ordered, torch.cat(parts, 1))
    assert torch.equal(in_own_order(ordered, 1, ranks, blocks, mirrored), whole)


def test_a_block_that_cannot_be_cut_is_an_error():
    with pytest.raises(ValueError, match=r"expected 6 elements .* divisible by 4, for 2 ranks with two pieces each"):
        pieces_of(0, 6, 2, mirrored=True)


@pytest.mark.parametrize(("blocks", "mirrored"), CASES)
def test_collectives_of_pieces_mean_what_those_of_slices_do(blocks, mirrored):
    """Values and gradients, in terms of the whole tensor."""
    torch.manual_seed(0)
    whole, gradients = torch.randn(4, 16), torch.randn(2, 4, 16)
    groups, how = tensor_groups(2), {"blocks": blocks, "mirrored": mirrored}

    def own(tensor, rank):
        return own_pieces(tensor, 1, rank, 2, blocks, mirrored)

    def call(function, value, gradient, rank):
        tensor = value.clone().requires_grad_()
        found = getattr(tensor_ops, function)(tensor, 1, groups[rank], **how)
        found.backward(gradient)
        return found.detach(), tensor.grad

    def work(rank):
        gathered = call("gather_in", own(whole, rank), gradients[rank], rank)
        replicated = call("all_gather", own(whole, rank), gradients[0], rank)
        scattered = call("reduce_scatter", gradients[rank], own(whole, rank), rank)
        cut = call("split", whole, own(gradients[0], rank), rank)
        return gathered, replicated, scattered, cut

    for rank, (gathered, replicated, scattered, cut) in enumerate(run_ranks(2, work)):
        assert torch.equal(gathered[0], whole)
        torch.testing.assert_close(gathered[1], own(gradients.sum(0), rank))
        assert torch.equal(replicated[0], whole)
        assert torch.equal(replicated[1], own(gradients[0], rank))
        torch.testing.assert_close(scattered[0], own(gradients.sum(0), rank))
        assert torch.equal(scattered[1], whole)
        assert torch.equal(cut[0], own(whole, rank))
        assert torch.equal(cut[1], gradients[0])


@pytest.mark.parametrize(("blocks", "mirrored"), CASES)
def test_all_to_all_between_pieces(blocks, mirrored):
    torch.manual_seed(0)
    whole, pieces, groups = torch.randn(4, 16), (blocks, mirrored), tensor_groups(2)

    def work(rank):
        group = groups[rank]
        tensor = own_pieces(whole, 1, rank, 2, blocks, mirrored).requires_grad_()
        found = tensor_ops.all_to_all(tensor, 0, 1, group, gather_pieces=pieces)
        found.backward(found.detach())
        back = tensor_ops.all_to_all(found.detach(), 1, 0, group, split_pieces=pieces)
        return tensor.detach(), found.detach(), tensor.grad, back

    for rank, (tensor, found, gradient, back) in enumerate(run_ranks(2, work)):
        assert torch.equal(found, whole.chunk(2)[rank])
        assert torch.equal(gradient, tensor)
        assert torch.equal(back, tensor)
