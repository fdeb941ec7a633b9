"""Fewer microbatches than stages, a frozen stage, a parameter that nothing uses: gradients as in eager, and no hang."""

import pytest
import torch
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp


class Partly(nn.Module):
    def __init__(self, frozen):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.unused = nn.Linear(2, 2)
        for i in frozen:
            self.layers[i].requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def batch():
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(1))


@smp.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def train(rank, folder, frozen):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})
    model = smp.DistributedModel(Partly(frozen))
    losses = [train_step(model, batch()).reduce_mean() for _ in range(2)]
    return losses, {name: parameter.grad for name, parameter in model.local_named_parameters()}


@pytest.mark.parametrize("frozen", [(0, 1), (2, 3)], ids=["first stage", "last stage"])
def test_frozen_stages(tmp_path, frozen):
    results = run_workers(train, 2, tmp_path, frozen)
    model = Partly(frozen)
    for _ in range(2):
        loss = model(batch()).square().mean()
        loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {}
    for losses, grads in results:
        assert all(torch.equal(value, loss.detach()) for value in losses)
        found |= grads
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert found[name] is None if grad is None else torch.equal(found[name], grad), name
    assert sum(grad is None for grad in found.values()) == 6
