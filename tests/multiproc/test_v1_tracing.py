"""`trace_execution_times`, `trace_memory_usage`, `skip_tracing` in training scripts on two gloo processes: what they make of the cut."""

import pytest
import torch
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp


class Slow(nn.Module):
    """A few parameters, and much to do that is not seen in FLOPs or bytes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = self.linear(x)
        for _ in range(60):
            x = torch.cos(x)
        return x


class Model(nn.Module):
    """Two modules that take long, then two that have large parameters."""

    def __init__(self):
        super().__init__()
        self.slow = nn.ModuleList(Slow() for _ in range(2))
        self.large = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.tables = nn.ParameterList(torch.zeros(300, 8) for _ in range(2))

    def forward(self, x):
        for module in self.slow:
            x = module(x)
        for module, table in zip(self.large, self.tables, strict=True):
            x = module(x) + table[0]
        return x


@smp.step
def train_step(model, x):
    loss = (model(x) ** 2).mean()
    model.backward(loss)
    return loss


def train(rank, folder, config, options):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "memory_weight": 0.0, **config})
    torch.manual_seed(0)
    model = smp.DistributedModel(Model(), **options)
    x = torch.ones(4, 8)
    losses = train_step(model, x).outputs
    names = sorted(name for name, _ in model.local_named_parameters())
    return [loss.item() for loss in losses], names


def reference():
    torch.manual_seed(0)
    model = Model()
    return [(model(part) ** 2).mean().item() for part in torch.ones(4, 8).chunk(2)]


@pytest.mark.parametrize(
    ("config", "options", "on_rank_0", "on_rank_1"),
    [
        # Whatever a busy machine adds to measured times, what is not slow is no match for what is. Rows of tables take no time, anywhere.
        (
            {},
            {"trace_execution_times": True, "trace_memory_usage": True},
            {"slow.0.linear.weight"},
            {"large.0.weight", "large.1.weight"},
        ),
        (
            {"skip_tracing": True},
            {"trace_memory_usage": True},
            {"slow.0.linear.weight", "slow.1.linear.weight", "large.0.weight", "tables.0"},
            {"large.1.weight", "tables.1"},
        ),
    ],
)
def test_the_cut_follows_what_is_known(tmp_path, config, options, on_rank_0, on_rank_1):
    results = run_workers(train, 2, tmp_path, config, options)
    expected = reference()
    for losses, _ in results:
        assert losses == expected
    assert on_rank_0 <= set(results[0][1])
    assert on_rank_1 <= set(results[1][1])
