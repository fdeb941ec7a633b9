"""Times and bytes of nodes, against the formulas worked by hand.

What a split backward defers, as the cost model sees it, against what the executor defers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from smpc.executor.split_backward import intercept
from smpc.partitioner.costs.device import Kernels
from smpc.partitioner.costs.device_file import find_device
from smpc.partitioner.costs.node_costs import DEFERRABLE, CostModel, node_times, weight_time
from smpc.partitioner.costs.operation_kinds import name_of
from smpc.tracer import record, targets
from smpc.tracer.constants import Ref

DEVICE = CostModel(peak_flops={"float32": 1e3, "bfloat16": 1e4}, memory_bandwidth=1e9)


def times_of(model, x):
    trace = record(model, (x,))
    times = node_times(trace, DEVICE)
    position = next(i for i, node in enumerate(trace.nodes) if node.target == "torch.nn.functional.linear")
    return float(times.forward[position]), float(times.backward[position])


def test_the_backward_of_a_product_is_one_product_for_each_gradient():
    flops = 2 * 4 * 8 * 16
    linear = nn.Linear(8, 16, bias=False)
    forward, backward = times_of(linear, torch.zeros(4, 8))
    assert forward == pytest.approx(flops / 1e3)
    assert backward == pytest.approx(flops / 1e3)  # the input needs no gradient
    both = nn.Sequential(nn.Embedding(5, 8), linear)
    forward, backward = times_of(both, torch.zeros(4, dtype=torch.long))
    assert backward == pytest.approx(2 * forward) == pytest.approx(2 * flops / 1e3)


def test_a_frozen_model_has_no_backward():
    assert times_of(nn.Linear(8, 16).requires_grad_(False), torch.zeros(4, 8))[1] == 0.0


def test_sixteen_bit_products_are_faster():
    slow, _ = times_of(nn.Linear(8, 16), torch.zeros(4, 8))
    fast, _ = times_of(nn.Linear(8, 16).bfloat16(), torch.zeros(4, 8, dtype=torch.bfloat16))
    assert fast == pytest.approx(slow / 10)


def test_views_take_no_time_and_copies_take_bandwidth():
    class Moves(nn.Module):
        def forward(self, x):
            return x.view(-1).neg()

    trace = record(Moves(), (torch.zeros(10, 10),))
    times = node_times(trace, DEVICE)
    assert times.forward.tolist() == [0.0, 0.0, pytest.approx(800 / 1e9)]
    assert times.whole().tolist() == [0, 0, 800_000_000]


def test_state_is_what_adam_holds():
    state = record(nn.BatchNorm1d(8), (torch.zeros(4, 8),)).state
    weight = next(item for item in state if item.name == "weight")
    buffer = next(item for item in state if item.name == "running_mean")
    assert (DEVICE.gradient_bytes(weight), DEVICE.optimizer_bytes(weight)) == (32, 64)
    assert (DEVICE.gradient_bytes(buffer), DEVICE.optimizer_bytes(buffer)) == (0, 0)


def test_the_executor_defers_the_same_functions():
    assert {targets.name_of(function) for function in intercept._DEFERRABLE} <= DEFERRABLE
    assert {targets.function(name) for name in DEFERRABLE} == intercept._DEFERRABLE


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


def test_what_draws_apart_on_each_rank_is_the_operation_that_it_was():
    trace = record(Attention(), (torch.zeros(1, 2, 4, 8, requires_grad=True),), {})
    node = next(node for node in trace.nodes if node.flops)
    apart = replace(
        node, target="smpc.executor.tensor_ops.draw_apart", args=(node.target, Ref(node.inputs[0]), *node.args)
    )
    assert name_of(node) == name_of(apart) == "attention_dropout"
    costs = CostModel.of(replace(find_device("h100"), kernels=Kernels(attention=(0.5, 0.25))), 1)
    assert costs.forward_time(node, "float32") == costs.forward_time(apart, "float32")


class Attention(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)


def test_frozen_and_checkpointed_calls_defer_nothing():
    trace = record(Block(), (torch.zeros(2, 3, dtype=torch.long),), {})
    first, frozen, last = (i for i, node in enumerate(trace.nodes) if node.target.endswith(".linear"))
    backward = np.full(len(trace.nodes), 3.0)
    assert [weight_time(trace, [i], backward, trace.regions) for i in (first, frozen, last)] == [1.5, 0.0, 0.0]
    assert weight_time(trace, range(len(trace.nodes)), backward, trace.regions) == 4.5
