"""Times of products, attention and copies: by waves of tiles, counted by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smpc.partitioner.costs.device import Kernels
from smpc.partitioner.costs.device_file import find_device
from smpc.partitioner.costs.node_costs import CostModel, node_times
from smpc.partitioner.costs.operation_kinds import (
    attention_flops,
    broader_name,
    is_attention,
    measured_flops,
    name_of,
    product_of,
)
from smpc.tracer import record

A100 = find_device("a100")


def node_of(model, *inputs, flops=True):
    trace = record(model, inputs)
    return trace, next(node for node in trace.nodes if (node.flops > 0) is flops and node.bytes_moved)


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)


def test_shapes_of_products():
    assert product_of(node_of(nn.Linear(64, 256), torch.zeros(8, 512, 64))[1]) == (1, 4096, 256, 64)
    assert product_of(node_of(Call(torch.bmm), meta(6, 5, 4), meta(6, 4, 3))[1]) == (6, 5, 3, 4)
    assert product_of(node_of(Call(torch.matmul), meta(2, 3, 5, 4), meta(2, 3, 4, 7))[1]) == (6, 5, 7, 4)
    assert product_of(node_of(Call(torch.matmul), meta(2, 5, 4), meta(4, 7))[1]) == (1, 10, 7, 4)
    assert product_of(node_of(nn.Conv2d(3, 16, 3), torch.zeros(2, 3, 10, 10))[1]) == (1, 2 * 8 * 8, 16, 27)
    assert product_of(node_of(nn.Conv1d(3, 16, 5), torch.zeros(2, 3, 10))[1]) == (1, 2 * 6, 16, 15)
    assert product_of(node_of(Call(torch.neg), meta(4), flops=False)[1]) is None


@pytest.mark.parametrize(
    ("convolution", "shape", "name"),
    [
        (nn.Conv2d(16, 32, 3, padding=1), (2, 16, 32, 32), "conv"),
        (nn.Conv2d(16, 32, 3, stride=2, padding=1), (2, 16, 32, 32), "conv"),
        (nn.ConvTranspose2d(16, 32, 3, stride=2), (2, 16, 32, 32), "conv"),
        (nn.Conv1d(8, 8, 5), (2, 8, 64), "conv"),
        (nn.Conv2d(16, 32, 1), (2, 16, 32, 32), "conv_pointwise"),
        (nn.Conv2d(512, 16, 1, bias=False), (2, 512, 4, 4), "conv_pointwise"),
        (nn.Conv2d(16, 32, 1, stride=2), (2, 16, 32, 32), "conv_pointwise"),
        (nn.Conv2d(3, 64, 8, stride=8), (2, 3, 32, 32), "conv_pointwise"),
        (nn.Conv2d(32, 32, 3, padding=1, groups=32), (2, 32, 16, 16), "conv_grouped"),
        (nn.Conv2d(32, 32, 3, padding=1, groups=4), (2, 32, 16, 16), "conv_grouped"),
    ],
)
def test_convolutions_are_of_three_kinds(convolution, shape, name):
    node = node_of(convolution, torch.zeros(shape))[1]
    assert name_of(node) == name
    assert broader_name(name) == "conv"


def test_channels_that_fill_no_vector_register_count_as_if_they_did():
    image = torch.zeros(2, 16, 32, 32)
    narrow, full, wider = (node_of(nn.Conv2d(16, channels, 3), image)[1] for channels in (8, 16, 17))
    assert measured_flops(narrow) == measured_flops(full) == full.flops == 2 * narrow.flops
    assert measured_flops(wider) == 2 * full.flops
    grouped, layer = (
        node_of(nn.Conv2d(8, 8, 3, groups=8), image[:, :8])[1],
        node_of(nn.Linear(8, 8), torch.zeros(4, 8))[1],
    )
    assert (measured_flops(grouped), measured_flops(layer)) == (grouped.flops, layer.flops)


def test_a_kind_that_was_not_measured_takes_what_its_broader_kind_does():
    node = node_of(nn.Conv2d(16, 32, 1), torch.zeros(2, 16, 32, 32))[1]
    measured = {"conv": (((1.0, 0.5),), ((1.0, 0.25),))}
    model = CostModel(peak_flops={"float32": 1.0}, kernels=Kernels(operations=measured))
    assert model.forward_time(node, "float32") == pytest.approx(node.flops / 0.5)
    finer = measured | {"conv_pointwise": (((1.0, 0.1),), ((1.0, 0.1),))}
    model = CostModel(peak_flops={"float32": 1.0}, kernels=Kernels(operations=finer))
    assert model.forward_time(node, "float32") == pytest.approx(node.flops / 0.1)


def test_a_wave_that_is_not_full_takes_as_long_as_a_full_one():
    kernels = Kernels(processors=100)
    full = kernels.product_time((1, 256 * 10, 128 * 10, 1000), 1e12, "float32")
    assert full == pytest.approx(2 * 2560 * 1280 * 1064 / 1e12)
    assert kernels.product_time((1, 256 * 5, 128 * 5, 1000), 1e12, "float32") > full / 4
    one_more = kernels.product_time((1, 256 * 10 + 1, 128 * 10, 1000), 1e12, "float32")
    assert full < one_more <= 2 * full


def test_a_large_product_reaches_what_the_device_does():
    flops = 2 * 8192**3
    seconds = A100.kernels.product_time((1, 8192, 8192, 8192), A100.peak("bfloat16"), "bfloat16")
    assert flops / seconds == pytest.approx(258e12, rel=0.06)
    thin = A100.kernels.product_time((1, 8192, 8192, 32), A100.peak("bfloat16"), "bfloat16")
    assert 2 * 8192 * 8192 * 32 / thin < 0.5 * flops / seconds


def test_causal_attention_has_half_to_do():
    heads = [meta(2, 4, 128, 64) for _ in range(3)]
    _, whole = node_of(Call(F.scaled_dot_product_attention), *heads)
    _, causal = node_of(Call(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)), *heads)
    assert is_attention(whole)
    assert is_attention(causal)
    assert attention_flops(causal) == attention_flops(whole) / 2 == 2 * 2 * 4 * 128 * 128 * 64 / 1.0
    peak = {"float32": 1.0, "bfloat16": 1.0}
    model = CostModel(peak_flops=peak, memory_bandwidth=1e30, kernels=Kernels(attention=(0.5, 0.25)))
    assert model.forward_time(causal, "bfloat16") == pytest.approx(attention_flops(causal) / 0.5)
    assert model.backward_time(causal, "bfloat16", 3) == pytest.approx(2.5 * attention_flops(causal) / 0.25)
    named = (*whole.kwargs, ("causal", True))
    own = dataclasses.replace(whole, target="smpc.kernels.attention.flash_attention", kwargs=named)
    ring = dataclasses.replace(own, target="smpc.executor.ring_attention", args=("group", "cut", *whole.args, None))
    for node in (own, ring):
        assert attention_flops(node) == attention_flops(causal)
        assert name_of(node) == name_of(causal) == "attention_causal"


def test_what_a_loss_keeps_is_written_and_read_too():
    trace = record(nn.Sequential(nn.Linear(10, 10), nn.Dropout(0.5)), (torch.zeros(100, 10),))
    times = node_times(trace, CostModel(peak_flops={"float32": 1e30}, memory_bandwidth=1.0))
    position = next(i for i, node in enumerate(trace.nodes) if node.target.endswith("dropout"))
    kept = sum(trace.storages[i] for i in trace.nodes[position].saved)
    assert kept > 0
    assert times.forward[position] == pytest.approx(8000 + kept)
    assert times.backward[position] == pytest.approx(12000 + kept)


def test_gradients_of_later_microbatches_are_added():
    trace = record(nn.Linear(100, 100, bias=False), (torch.zeros(4, 100),))
    position = next(i for i, node in enumerate(trace.nodes) if node.flops)

    def backward(accumulated):
        costs = CostModel(peak_flops={"float32": 1e30}, memory_bandwidth=1.0, accumulated=accumulated)
        return node_times(trace, costs).backward[position]

    assert backward(0.75) - backward(0.0) == pytest.approx(0.75 * 3 * 40_000)
