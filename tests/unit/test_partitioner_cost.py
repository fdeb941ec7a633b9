"""Times and bytes of nodes, against the formulas worked by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smpc.partitioner.cost import CostModel, node_times
from smpc.tracer import record

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
    assert times.total_femtoseconds().tolist() == [0, 0, 800_000_000]


def test_state_is_what_adam_holds():
    state = record(nn.BatchNorm1d(8), (torch.zeros(4, 8),)).state
    weight = next(item for item in state if item.name == "weight")
    buffer = next(item for item in state if item.name == "running_mean")
    assert (DEVICE.gradient_bytes(weight), DEVICE.optimizer_bytes(weight)) == (32, 64)
    assert (DEVICE.gradient_bytes(buffer), DEVICE.optimizer_bytes(buffer)) == (0, 0)
