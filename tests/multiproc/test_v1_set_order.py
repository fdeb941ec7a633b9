"""Ranks whose processes give a set different orders train one model: what pipeline rank 0 recorded."""

import pytest
import torch
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp
from smpc.errors import TraceError


class Kinds(nn.Module):
    """Makes a table for each kind of layer, in the order in which this process has them."""

    def __init__(self, kinds, scale=0.5):
        super().__init__()
        self.kinds, self.scale = kinds, scale
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        for kind in kinds:
            self.register_buffer(f"{kind}_frequency", torch.ones(4) / len(kind))

    def forward(self, x):
        tables = {kind: torch.cos(getattr(self, f"{kind}_frequency") * x.shape[1]) for kind in self.kinds}
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh() * tables[("full", "sliding")[i % 2]] * self.scale
        return x


@smp.step
def train_step(model, x):
    loss = (model(x) ** 2).mean()
    model.backward(loss)
    return loss


def make(order, scale=0.5):
    torch.manual_seed(0)
    return Kinds(("sliding", "full") if order else ("full", "sliding"), scale)


def train(rank, folder):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(make(rank))
    losses = [
        loss.item() for _ in range(2) for loss in train_step(model, torch.linspace(-1, 1, 16).reshape(4, 4)).outputs
    ]
    gradients = {name: p.grad for name, p in model.local_named_parameters()}
    return losses, gradients


def test_ranks_may_go_through_sets_in_other_orders(tmp_path):
    results = run_workers(train, 2, tmp_path)
    model, losses = make(0), []
    for _ in range(2):
        for part in torch.linspace(-1, 1, 16).reshape(4, 4).chunk(2):
            loss = (model(part) ** 2).mean()
            (loss / 2).backward()
            losses.append(loss.item())
    assert [found for found, _ in results] == [losses, losses]
    gradients = results[0][1] | results[1][1]
    assert all(torch.equal(gradients[name], p.grad) for name, p in model.named_parameters())


def train_unlike(rank, folder):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(make(rank, 0.5 + rank))
    with pytest.raises(TraceError, match=r"recorded different models, .* PYTHONHASHSEED=0"):
        train_step(model, torch.ones(4, 4))


def test_ranks_with_other_models_are_told(tmp_path):
    assert run_workers(train_unlike, 2, tmp_path) == [None] * 2
