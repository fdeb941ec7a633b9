"""Routers against their formulas, on logits that show the difference."""

import pytest
import torch

from smpc.errors import ConfigError
from smpc.experts.routers import balanced, sinkhorn, top_k


def test_top_k_weights():
    logits = torch.randn(6, 4)
    index, weights = top_k(logits, 2)
    assert torch.equal(index, logits.topk(2).indices)
    torch.testing.assert_close(weights.sum(-1), torch.ones(6))
    _, every = top_k(logits, 2, over_chosen=False)
    torch.testing.assert_close(every, logits.softmax(-1).gather(-1, index))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sinkhorn_evens_out_what_top_k_does_not(dtype):
    torch.manual_seed(0)
    logits = (torch.randn(256, 8) + torch.linspace(0, 4, 8)).to(dtype)  # all prefer the last
    greedy = top_k(logits, 1)[0].flatten().bincount(minlength=8)
    index, weights = sinkhorn(logits, 1)
    even = index.flatten().bincount(minlength=8)
    assert greedy.max() > 128
    assert even.max() < 64
    assert torch.equal(weights, logits.sigmoid().gather(-1, index))


def test_sinkhorn_is_a_doubly_scaled_plan():
    """The choice is made on exp(logits) after its rows and columns have been normalised in turn, many times."""
    torch.manual_seed(1)
    logits = torch.randn(24, 6, dtype=torch.float64)
    plan = logits.exp()
    for _ in range(2000):
        plan = plan / plan.sum(1, keepdim=True)
        plan = plan / plan.sum(0, keepdim=True)
    index, weights = sinkhorn(logits, 2, tolerance=1e-12, limit=1000)
    assert torch.equal(index, plan.topk(2).indices)
    assert torch.equal(weights, logits.softmax(-1).gather(-1, index))


def test_sinkhorn_chooses_the_largest_in_evaluation():
    logits = torch.randn(16, 4) + torch.tensor([0.0, 0.0, 0.0, 5.0])
    assert torch.equal(sinkhorn(logits, 1, training=False)[0], logits.argmax(-1, keepdim=True))


def test_sinkhorn_takes_large_logits_and_no_tokens():
    index, weights = sinkhorn(torch.tensor([[1e4, -1e4], [1e4, 0.0]]), 1)
    assert torch.isfinite(weights).all()
    assert index.shape == (2, 1)
    assert sinkhorn(torch.empty(0, 4), 2)[0].shape == (0, 2)


def test_round_robin_is_even():
    logits = torch.randn(12, 8, requires_grad=True)
    index, weights = balanced(logits, 2)
    assert index.flatten().bincount().tolist() == [3] * 8
    assert index[:5].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1]]
    weights.sum().backward()
    assert logits.grad.abs().sum() > 0


@pytest.mark.parametrize("router", [top_k, sinkhorn, balanced])
def test_too_many_experts(router):
    with pytest.raises(ConfigError, match=r"found shape \(3, 2\) and 3"):
        router(torch.randn(3, 2), 3)
