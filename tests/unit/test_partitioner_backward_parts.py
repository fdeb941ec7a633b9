"""What a split backward defers, as the cost model sees it, against what the executor defers."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from smpc.executor import deferral
from smpc.partitioner.backward_parts import DEFERRABLE, weight_time
from smpc.tracer import targets
from smpc.tracer.record import record


def test_the_executor_defers_the_same_functions():
    assert {targets.name_of(function) for function in deferral._DEFERRABLE} <= DEFERRABLE
    assert {targets.function(name) for name in DEFERRABLE} == deferral._DEFERRABLE


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(5, 8), nn.LayerNorm(8)
        self.linear, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)

    def forward(self, ids):
        x = self.linear(self.norm(self.embed(ids)))
        return checkpoint(self.linear, self.frozen(x) @ x.mT @ x, use_reentrant=False)


@pytest.mark.parametrize(
    ("target", "share"),
    [("embedding", 1.0), ("linear", 0.5), ("layer_norm", 0.0), ("matmul", 0.0)],
)
def test_shares(target, share):
    trace = record(Block(), (torch.zeros(2, 3, dtype=torch.long),), {})
    found = [i for i, node in enumerate(trace.nodes) if node.target.endswith(target)]
    backward = np.ones(len(trace.nodes))
    assert weight_time(trace, found[:1], backward, ()) == share


def test_frozen_and_checkpointed_calls_defer_nothing():
    trace = record(Block(), (torch.zeros(2, 3, dtype=torch.long),), {})
    first, frozen, last = (i for i, node in enumerate(trace.nodes) if node.target.endswith(".linear"))
    backward = np.full(len(trace.nodes), 3.0)
    assert [weight_time(trace, [i], backward, trace.regions) for i in (first, frozen, last)] == [1.5, 0.0, 0.0]
    assert weight_time(trace, range(len(trace.nodes)), backward, trace.regions) == 4.5
