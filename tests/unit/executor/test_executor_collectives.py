"""The collectives against what they mean: values and gradients of whole tensors, on two and on three ranks that are threads."""

import pytest
import torch
import torch.nn.functional as F
from tensor_ranks import run_ranks, tensor_groups

from smpc.executor import collectives
from smpc.executor.collectives import TensorGroup

DIMS = [0, 1, -1]
ALL = ["replicate_in", "all_reduce", "all_gather", "gather_in", "reduce_scatter", "split", "all_to_all"]


def on_ranks(call, inputs, gradients):
    """By rank: what `call(tensor, group)` returns, and the gradient of its input for this gradient of its output."""
    groups = tensor_groups(len(inputs))

    def work(rank):
        tensor = inputs[rank].clone().requires_grad_()
        found = call(tensor, groups[rank])
        found.backward(gradients[rank])
        return found.detach(), tensor.grad

    return run_ranks(len(inputs), work)


def drawn(size, count):
    torch.manual_seed(0)
    return [torch.randn(6, 6, 6) for _ in range(size * count)]


@pytest.mark.parametrize("size", [2, 3])
def test_replicated_to_users_of_parts(size):
    whole, parts = drawn(1, 1)[0], drawn(size, 1)
    for value, gradient in on_ranks(collectives.replicate_in, [whole] * size, parts):
        assert torch.equal(value, whole)
        torch.testing.assert_close(gradient, sum(parts))


@pytest.mark.parametrize("size", [2, 3])
def test_sparse_gradients_of_users_of_parts(size):
    """Those of an embedding's table: a rank has looked up more entries than another, one twice, or none."""
    table = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    ids = [torch.tensor([1, 3, 3]), torch.tensor([], dtype=torch.int64), torch.tensor([6, 1, 0, 2])][:size]
    groups = tensor_groups(size)

    def work(rank):
        own = table.clone().requires_grad_()
        found = F.embedding(ids[rank], collectives.replicate_in(own, groups[rank]), sparse=True)
        (found * (rank + 1)).sum().backward()
        return own.grad

    expected = sum(
        torch.zeros_like(table).index_add(0, each, torch.full((len(each), 4), i + 1.0)) for i, each in enumerate(ids)
    )
    for grad in run_ranks(size, work):
        assert grad.layout is torch.sparse_coo
        assert torch.equal(grad.to_dense(), expected)


@pytest.mark.parametrize("size", [2, 3])
def test_sum_of_partial(size):
    parts, whole = drawn(size, 1), torch.ones(6, 6, 6)
    for value, gradient in on_ranks(collectives.all_reduce, parts, [whole] * size):
        torch.testing.assert_close(value, sum(parts))
        assert torch.equal(gradient, whole)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("size", [2, 3])
def test_sharded_to_whole(size, dim):
    whole, gradient = drawn(2, 1)
    shards, own = whole.chunk(size, dim), gradient.chunk(size, dim)
    results = on_ranks(lambda x, group: collectives.all_gather(x, dim, group), shards, [gradient] * size)
    for rank, (value, found) in enumerate(results):
        assert torch.equal(value, whole)
        assert torch.equal(found, own[rank])


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("size", [2, 3])
def test_gather_and_reduce_scatter_are_each_other_s_gradient(size, dim):
    whole, parts = drawn(1, 1)[0], drawn(size, 1)
    shards, sums = whole.chunk(size, dim), sum(parts).chunk(size, dim)
    gathers = on_ranks(lambda x, group: collectives.gather_in(x, dim, group), shards, parts)
    scatters = on_ranks(lambda x, group: collectives.reduce_scatter(x, dim, group), parts, shards)
    for rank in range(size):
        value, gradient = gathers[rank]
        assert torch.equal(value, whole)
        torch.testing.assert_close(gradient, sums[rank])
        value, gradient = scatters[rank]
        torch.testing.assert_close(value, sums[rank])
        assert torch.equal(gradient, whole)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("size", [2, 3])
def test_whole_to_sharded(size, dim):
    whole, gradient = drawn(2, 1)
    results = on_ranks(
        lambda x, group: collectives.split(x, dim, group),
        [whole] * size,
        [g.contiguous() for g in gradient.chunk(size, dim)],
    )
    for rank, (value, found) in enumerate(results):
        assert torch.equal(value, whole.chunk(size, dim)[rank])
        assert torch.equal(found, gradient)


@pytest.mark.parametrize("size", [2, 3])
def test_sharded_one_way_to_another(size):
    whole, gradient = drawn(2, 1)
    results = on_ranks(
        lambda x, group: collectives.all_to_all(x, 2, 0, group), whole.chunk(size, 0), gradient.chunk(size, 2)
    )
    for rank, (value, found) in enumerate(results):
        assert torch.equal(value, whole.chunk(size, 2)[rank])
        assert torch.equal(found, gradient.chunk(size, 0)[rank])


@pytest.mark.parametrize("name", ALL)
def test_one_rank_alone_adds_nothing(name):
    tensor = torch.randn(4, requires_grad=True) * 2
    dims = {"replicate_in": (), "all_reduce": (), "all_to_all": (0, 1)}.get(name, (0,))
    assert getattr(collectives, name)(tensor, *dims, TensorGroup()) is tensor


@pytest.mark.parametrize("name", ["reduce_scatter", "split"])
def test_sizes_that_do_not_divide_are_refused(name):
    with pytest.raises(ValueError, match=r"expected dimension 0 .* divisible by the 2 tensor-parallel ranks, found 3"):
        getattr(collectives, name)(torch.zeros(3, 4), 0, tensor_groups(2)[0])
