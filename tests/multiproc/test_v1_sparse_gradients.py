"""Embeddings with sparse gradients, on ranks that share sequences, stages or samples: one process's parameters, and sparse gradients."""

import pytest
import torch
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp

STEPS, MB = 3, 2


class Net(nn.Module):
    """`by_function`: the embedding's weight is used by itself, so that stages have no embedding."""

    def __init__(self, by_function):
        super().__init__()
        torch.manual_seed(0)
        self.by_function = by_function
        self.embed = nn.Embedding(20, 8, sparse=True)
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 20)

    def forward(self, ids):
        embedded = nn.functional.embedding(ids, self.embed.weight, sparse=True) if self.by_function else self.embed(ids)
        logits = self.head(torch.tanh(self.inner(embedded)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def batch(step, part):
    return torch.randint(12, (4, 8), generator=torch.Generator().manual_seed(10 * step + part))


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


@smp.step
def train_step(model, ids):
    loss = model(ids)
    model.backward(loss)
    return loss


def trained(rank, folder, config, by_function):
    smp.init({"ddp": True, "microbatches": MB, **config})
    model = smp.DistributedModel(Net(by_function))
    optimizer = smp.DistributedOptimizer(optimizer_of(model))
    for step in range(STEPS):
        if step != 1:  # gradients of two steps add up
            optimizer.zero_grad()
        train_step(model, batch(step, smp.data_rank()))
        assert all(p.grad.is_sparse for name, p in model.local_named_parameters() if "embed" in name)
        optimizer.step()
    found = model.state_dict(), smp.data_size()
    smp.shutdown()
    return found


def expected(num_parts):
    model = Net(False)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        if step != 1:
            optimizer.zero_grad()
        for part in range(num_parts):
            (model(batch(step, part)) / num_parts).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("config", "ranks", "by_function"),
    [
        ({"context_parallel_degree": 2}, 2, False),
        pytest.param({"context_parallel_degree": 2}, 4, True, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_degree": 2}, 4, True, marks=pytest.mark.slow),
        pytest.param({"context_parallel_degree": 2, "pipeline_parallel_degree": 2}, 4, False, marks=pytest.mark.slow),
    ],
)
def test_sparse_gradients_train(tmp_path, config, ranks, by_function):
    """DistributedDataParallel, around stages that have no embedding, said that it cannot access a storage."""
    for found, num_parts in run_workers(trained, ranks, tmp_path, config, by_function):
        torch.testing.assert_close(dict(found), dict(expected(num_parts)), rtol=1e-5, atol=2e-6)
