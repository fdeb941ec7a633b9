"""Measured times: they follow what is really slow, and measuring leaves no trace in the model.

Measured workspace: blocks that a node takes and gives back, and what they do to the predicted peak.
"""

from __future__ import annotations

import copy
import itertools
import time

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

from smpc.compile import compile_model
from smpc.errors import ConfigError
from smpc.executor.measure.spans import LiveBytes
from smpc.partitioner.costs.timing import measure_times, measure_workspace
from smpc.sample_inputs import first_microbatch
from smpc.tracer import record


class Slow(torch.autograd.Function):
    """Does nothing, and takes its time: no count of FLOPs or bytes can know."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(0.01)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.03)
        return gradient * 2


class SlowLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return Slow.apply(self.linear(x))


def times_by_target(model, *inputs):
    trace = record(model, inputs)
    times = measure_times(trace, model, inputs, {}, runs=3)
    found = zip(trace.nodes, times.forward.tolist(), times.backward.tolist(), strict=True)
    return [(node.target.rpartition(".")[2], forward, backward) for node, forward, backward in found]


def test_a_big_product_takes_longer_than_a_small_one():
    model = nn.Sequential(nn.Linear(8, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 8))
    linears = [entry[1:] for entry in times_by_target(model, torch.randn(512, 8)) if entry[0] == "linear"]
    small, big, _ = linears
    assert big[0] > 3 * small[0]
    assert big[1] > 3 * small[1]


def test_what_needs_no_gradient_has_no_backward():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).requires_grad_(False)
    assert all(backward == 0.0 for _, _, backward in times_by_target(model, torch.randn(4, 8)))


def test_inputs_and_reads_take_no_time():
    entries = times_by_target(nn.Linear(8, 8), torch.randn(4, 8))
    assert [forward > 0 for _, forward, _ in entries] == [False, False, False, True]


def test_two_slow_operations_get_a_stage_each():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)), SlowLayer(), SlowLayer())
    options = {"pipeline_parallel_degree": 2, "microbatches": 2, "memory_weight": 0.0}
    predicted = compile_model(model, torch.randn(4, 16), **options).plan
    measured = compile_model(model, torch.randn(4, 16), trace_execution_times=True, **options).plan
    assert {"6", "7"} <= set(predicted.stages[1].modules)
    assert [stage for operation, stage in measured.assignment if operation.startswith("Slow")] == [0, 1]
    for stage in measured.stages:
        assert stage.forward_time >= 0.01
        assert stage.backward_time >= 0.03
    assert measured.device.endswith("times measured")


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", sorted(zoo.MODELS))
def test_every_model_of_the_zoo_is_measured_and_left_alone(name):
    model, batch = zoo.build(name)
    before = copy.deepcopy(model.state_dict())
    args, kwargs = first_microbatch(batch, 2)
    trace = record(model, args, kwargs)
    random = torch.get_rng_state()
    times = measure_times(trace, model, args, kwargs, runs=1)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert times.forward.sum() > 0
    assert times.backward.sum() > 0


def test_a_model_without_memory_cannot_be_measured():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="trace_execution_times: expected a model and inputs with memory"):
        compile_model(model, torch.randn(4, 4), pipeline_parallel_degree=1, trace_execution_times=True)


class Mixed(torch.autograd.Function):
    """Takes `BLOCKS` of the size of its input in the forward, and gives them back."""

    BLOCKS = 3

    @staticmethod
    def forward(ctx, x):
        blocks = [torch.zeros_like(x) for _ in range(Mixed.BLOCKS)]
        return x + blocks[0]

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.zeros_like(gradient).add_(1)


class MixedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return Mixed.apply(self.linear(x))


def test_what_a_call_takes_and_gives_back_is_its_workspace():
    x = torch.randn(128, 64)
    model = nn.Sequential(nn.Linear(64, 64), MixedLayer(), nn.Tanh())
    trace = record(model, (x,))
    found = measure_workspace(trace, model, (x,), {})
    position = next(i for i, node in enumerate(trace.nodes) if node.target.endswith("Mixed.apply"))
    assert found.forward[position] == Mixed.BLOCKS * x.nbytes
    assert found.backward[position] >= x.nbytes
    tanh = next(i for i, node in enumerate(trace.nodes) if "tanh" in node.target)
    assert found.forward[tanh] == 0


def test_measured_workspace_raises_the_predicted_peak_to_what_is_used():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), MixedLayer(), nn.Linear(64, 1))
    x = torch.randn(512, 64)
    options = {"pipeline_parallel_degree": 1, "optimizer": "sgd", "device": "cpu"}
    peaks = [
        compile_model(model, x, trace_memory_usage=measured, **options).plan.stages[0].peak_memory_bytes
        for measured in (False, True)
    ]
    with LiveBytes(itertools.chain(model.parameters(), (x,))) as counter:
        model(x).sum().backward()
    assert peaks[0] < 0.85 * counter.peak
    assert abs(peaks[1] / counter.peak - 1) < 0.05


def test_a_convolution_unfolds_its_input():
    x = torch.randn(1, 3, 64, 64)
    model = nn.Conv2d(3, 8, 3, padding=1, bias=False)
    trace = record(model, (x,))
    (position,) = (i for i, node in enumerate(trace.nodes) if "conv2d" in node.target)
    torch.backends.mkldnn.set_flags(False)
    try:
        found = measure_workspace(trace, model, (x,), {})
    finally:
        torch.backends.mkldnn.set_flags(True)
    assert found.forward[position] == F.unfold(x, 3, padding=1).nbytes
