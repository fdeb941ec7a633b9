"""Losses of the router against their formulas, and that joining one is adding it."""

import torch

from smpc.experts.routers import aux_loss, join_loss, joined_losses_scaled, z_loss


def test_aux_loss_formula():
    torch.manual_seed(0)
    logits, index = torch.randn(10, 4), torch.randint(0, 4, (10, 2))
    probabilities = logits.softmax(-1)
    shares = [(index == expert).float().mean().item() for expert in range(4)]
    expected = 0.5 * 4 * sum(share * probabilities[:, expert].mean() for expert, share in enumerate(shares))
    torch.testing.assert_close(aux_loss(logits, index, 0.5), expected)


def test_aux_loss_is_one_when_even():
    index = torch.arange(8).view(8, 1) % 4
    torch.testing.assert_close(aux_loss(torch.zeros(8, 4), index), torch.tensor(1.0))


def test_z_loss_formula():
    logits = torch.randn(7, 3)
    torch.testing.assert_close(z_loss(logits, 2.0), 2 * (logits.exp().sum(-1).log() ** 2).mean())


def test_losses_of_no_tokens_are_zero_and_connected():
    logits = torch.empty(0, 4, requires_grad=True)
    loss = aux_loss(logits, torch.empty(0, 2, dtype=torch.int64)) + z_loss(logits)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad.shape == (0, 4)


def test_joining_is_adding():
    torch.manual_seed(0)
    weight = torch.randn(4, 3, dtype=torch.float64)
    tokens = torch.randn(6, 4, dtype=torch.float64)
    gradients = []
    for is_joined in (False, True):
        own = weight.clone().requires_grad_()
        logits = tokens @ own
        loss = z_loss(logits, 0.1)
        result = join_loss(logits.tanh(), loss, scale=8.0) if is_joined else logits.tanh()
        total = 8 * result.square().sum()
        (total if is_joined else total + 8 * loss).backward()
        gradients.append(own.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_joined_loss_leaves_the_value():
    tensor = torch.randn(3)
    assert torch.equal(join_loss(tensor, torch.tensor(5.0)), tensor)


def test_joined_losses_of_a_batch_that_counts_otherwise():
    """Of a batch that a rank runs for others alone (`model.join`) no loss may count; joined ones have no gradient to look at."""
    for factor in (0.0, 1.5):
        logits = torch.randn(6, 4, requires_grad=True)
        with joined_losses_scaled(factor):
            (join_loss(logits.tanh(), z_loss(logits), scale=8.0) * 0).sum().backward()
        (expected,) = torch.autograd.grad(8.0 * factor * z_loss(logits), logits)
        torch.testing.assert_close(logits.grad, expected, rtol=1e-6, atol=0)
