"""Tokens to experts on one to three ranks that are threads, against every token by its own experts in one place."""

import pytest
import torch
from tensor_ranks import run_ranks, tensor_groups

from smpc.errors import ConfigError, UsageError
from smpc.executor.collectives import TensorGroup
from smpc.experts.dispatch import capacity_of, combine, dispatch, owned

EXPERTS, HIDDEN = 5, 6
WAYS = ["all_to_all", "all_gather"]
TOKENS = {1: [7], 2: [4, 9], 3: [5, 0, 8]}  # by rank


def drawn(counts, k, dtype=torch.float32, experts=EXPERTS):
    """By rank: hidden states, indices, weights, and the gradient of the result. Scales of the experts."""
    torch.manual_seed(sum(counts) + k)
    ranks = []
    for count in counts:
        index = torch.rand(count, experts).argsort(1)[:, :k]
        ranks.append(
            (
                torch.randn(count, HIDDEN, dtype=dtype),
                index,
                torch.rand(count, k, dtype=dtype),
                torch.randn(count, HIDDEN, dtype=dtype),
            )
        )
    return ranks, torch.randn(experts, HIDDEN, dtype=dtype)


def whole(hidden, index, weights, scales):
    """Each slot by its own expert, which treats every row alike, so that bits can be compared."""
    served = (index >= 0) & (index < len(scales))
    slots = torch.tanh(hidden.unsqueeze(1) * scales[index.clamp(0, len(scales) - 1)]) * served.unsqueeze(-1)
    return (slots * weights.unsqueeze(-1)).sum(1)


def one_place(ranks, scales, change=lambda index: index):
    scales = scales.clone().requires_grad_()
    results = []
    for hidden, index, weights, gradient in ranks:
        hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        found = whole(hidden, change(index), weights, scales)
        found.backward(gradient)
        results.append((found.detach(), hidden.grad, weights.grad))
    return results, scales.grad


def on_ranks(ranks, scales, **options):
    groups = tensor_groups(len(ranks))

    def work(rank):
        hidden, index, weights, gradient = ranks[rank]
        hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        mine = owned(len(scales), groups[rank])
        own = scales[mine.start : mine.stop].clone().requires_grad_()
        rows, plan = dispatch(hidden, index, len(scales), groups[rank], **options)
        assert plan.index().bincount(minlength=len(own)).tolist() == list(plan.counts)
        outputs = torch.tanh(rows * own[plan.index()])
        found = combine(outputs, plan, weights, groups[rank])
        found.backward(gradient)
        return found.detach(), hidden.grad, weights.grad, own.grad

    found = run_ranks(len(ranks), work)
    return [own[:3] for own in found], torch.cat([own[3] for own in found])


def assert_equal(found, expected):
    for own, other in zip(found[0], expected[0], strict=True):
        for tensor, wanted in zip(own, other, strict=True):
            assert torch.equal(tensor, wanted)
    torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_number_of_ranks_gives_the_same_bits(size, way, k, dtype):
    ranks, scales = drawn(TOKENS[size], k, dtype)
    assert_equal(on_ranks(ranks, scales, way=way), one_place(ranks, scales))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_in_any_order_give_the_same_bits(size, way):
    ranks, scales = drawn(TOKENS[size], 2)
    assert_equal(on_ranks(ranks, scales, way=way, is_sorted=False), one_place(ranks, scales))


@pytest.mark.parametrize("way", WAYS)
def test_slots_that_nobody_serves_add_nothing(way):
    ranks, scales = drawn([6, 6], 2)
    ranks[0][1][::2, 1] = EXPERTS
    ranks[1][1][:, 0] = -1
    assert_equal(on_ranks(ranks, scales, way=way), one_place(ranks, scales))


@pytest.mark.parametrize("way", WAYS)
def test_no_tokens_anywhere(way):
    ranks, scales = drawn([0, 0], 2)
    found, gradients = on_ranks(ranks, scales, way=way)
    assert all(tensor.numel() == 0 for own in found for tensor in own)
    assert torch.equal(gradients, torch.zeros_like(scales))


@pytest.mark.parametrize("way", WAYS)
def test_all_tokens_to_one_rank(way):
    ranks, scales = drawn([3, 3], 1, experts=4)
    for _, index, _, _ in ranks:
        index.fill_(3)
    assert_equal(on_ranks(ranks, scales, way=way), one_place(ranks, scales))


@pytest.mark.parametrize("capacity", [1, 2, 50])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_beyond_the_capacity_is_dropped(size, k, capacity):
    ranks, scales = drawn(TOKENS[size], k)

    def dropped(index):
        flat, seen = index.flatten().clone(), [0] * EXPERTS
        for slot, expert in enumerate(flat.tolist()):
            seen[expert] += 1
            if seen[expert] > capacity:
                flat[slot] = -1
        return flat.view_as(index)

    assert_equal(on_ranks(ranks, scales, capacity=capacity), one_place(ranks, scales, dropped))


def test_capacity_is_a_share():
    assert capacity_of(1.0, 8, 2, 4) == 4
    assert capacity_of(1.25, 8, 2, 4) == 5
    assert capacity_of(1.0, 1, 1, 64) == 1


def test_rows_in_the_module_documentation():
    index = [torch.tensor([[3], [0]]), torch.tensor([[1], [3]])]
    names = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])]
    groups = tensor_groups(2)
    found = run_ranks(2, lambda rank: dispatch(names[rank], index[rank], 4, groups[rank]))
    assert [(rows.flatten().tolist(), plan.counts) for rows, plan in found] == [([2, 3], (1, 1)), ([1, 4], (0, 2))]


def test_gradients_of_gradients():
    ranks, scales = drawn([4], 2, torch.float64)
    hidden, index, weights, _ = ranks[0]
    group = TensorGroup()

    def run(hidden, weights):
        rows, plan = dispatch(hidden, index, EXPERTS, group)
        return combine(torch.tanh(rows * scales[plan.index()]), plan, weights, group)

    inputs = (hidden.requires_grad_(), weights.requires_grad_())
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_wide_weights_are_used_as_they_are():
    hidden, index, weights, _ = drawn([5], 2)[0][0]
    rows, plan = dispatch(hidden.bfloat16(), index, EXPERTS, TensorGroup())
    found = combine(rows, plan, weights, TensorGroup())
    expected = (hidden.bfloat16().float().unsqueeze(1) * weights.unsqueeze(-1)).sum(1).bfloat16()
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, expected)


def test_what_does_not_fit_is_refused():
    hidden, index = torch.randn(3, 4), torch.zeros(3, 1, dtype=torch.int64)
    with pytest.raises(UsageError, match=r"found shapes \(3, 4\) and \(3,\)"):
        dispatch(hidden, index[:, 0], 2, TensorGroup())
    with pytest.raises(UsageError, match="integers"):
        dispatch(hidden, index.float(), 2, TensorGroup())
    with pytest.raises(ConfigError, match="all_to_all, all_gather, found 'ring'"):
        dispatch(hidden, index, 2, TensorGroup(), way="ring")
    with pytest.raises(ConfigError, match="found 0"):
        dispatch(hidden, index, 2, TensorGroup(), capacity=0)
    with pytest.raises(ConfigError, match="2 ranks, found 1"):
        dispatch(hidden, index, 1, tensor_groups(2)[0])
    rows, plan = dispatch(hidden, index, 2, TensorGroup())
    with pytest.raises(UsageError, match="expected 3 rows of outputs"):
        combine(rows[:2], plan, torch.ones(3, 1), TensorGroup())
