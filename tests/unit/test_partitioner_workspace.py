"""Measured workspace: blocks that a node takes and gives back, and what they do to the predicted peak."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from smpc.compile import compile_model
from smpc.executor.live_bytes import LiveBytes
from smpc.partitioner.workspace import measure_workspace
from smpc.tracer import record


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
