"""Tensors and numpy arrays that are plain attributes: forward writes into them by some way, and a backward needs what was there.

In a pipeline the next microbatch writes before the backward of the first: plain PyTorch's gradients, or a PartitionError that says where.
"""

import ctypes

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from effect_base import EFFECTS, EQUAL, WIDTH, Effect, Layer
from effect_runs import Case, outcome
from torch import nn

from smpc.compile import compile_model
from smpc.errors import PartitionError, TraceError
from smpc.tracer import record

WRITES = {
    "in place": lambda self: self.table.mul_(0.9),
    "data": lambda self: self.tables[0].data.mul_(0.9),
    "view": lambda self: self.table.detach()[:2].mul_(0.9),
    "foreach": lambda self: torch._foreach_mul_([self.table], 0.9),
    "numpy": lambda self: np.multiply(self.table.numpy(), 0.9, out=self.table.numpy()),
    "asarray": lambda self: np.multiply(np.asarray(self.table), 0.9, out=np.asarray(self.table)),
    "data_ptr": lambda self: ctypes.memset(self.table.data_ptr(), 0, 8),
    "array": lambda self: np.multiply(self.array, 0.9, out=self.array),
    "over the array": lambda self: torch.from_numpy(self.array).mul_(0.9),
}
NEEDS = {
    "tensor": lambda self, h: h * self.table,
    "item": lambda self, h: h * self.tables[0][:],
    "array": lambda self, h: h * torch.from_numpy(self.array),
}
LEAVES = {
    "copy": lambda self, h: h * self.table.clone(),
    "copy of the array": lambda self, h: h * torch.tensor(self.array),
    "unneeded": lambda self, h: h + self.table,
}


NOTHING = {"nothing": lambda self: None}


class Attributes(Layer):
    """Its tensor and its array are one memory. `asks`: Python depends on values, so that it must be run for real."""

    def __init__(self, write, read, asks):
        super().__init__()
        self.write, self.read, self.asks = write, read, asks

    def setup(self):
        self.array = np.linspace(1, 2, WIDTH)
        self.table = torch.from_numpy(self.array)
        self.tables = [self.table]

    def act(self, h):
        if self.asks and bool(h.sum() < -1e9):
            return h
        out = (NEEDS | LEAVES)[self.read](self, h)
        with torch.no_grad():
            (WRITES | NOTHING)[self.write](self)
        return out


def outcome_of(monkeypatch, make):
    monkeypatch.setitem(EFFECTS, "Attributes", Effect(make, EQUAL))
    return outcome(Case(("Attributes", "Layer", "Layer"), schedule="simple", cut=3))


@pytest.mark.matrix(18)
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("read", [*NEEDS, *LEAVES])
@pytest.mark.parametrize("write", WRITES)
def test_attributes_that_a_backward_needs_and_forward_writes(monkeypatch, write, read, asks):
    """Gradients were those of other values, or the program did not write at all, without a word."""
    found = outcome_of(monkeypatch, lambda: Attributes(write, read, asks))
    if read in LEAVES:
        assert found == "equal"
    elif not found.startswith("fails: "):  # in plain PyTorch, too, which says so
        assert "layers.0.table: needed as it was at" in found or "layers.0.array: needed as it was at" in found, found
        assert "written in place at" in found


class TwoOfOne(nn.Module):
    """One layer needs the memory that another one writes."""

    def __init__(self, asks):
        super().__init__()
        self.first, self.second = Attributes("data", "unneeded", False), Attributes("nothing", "tensor", asks)
        self.first.table, self.first.tables = self.second.table, self.second.tables

    def forward(self, x):
        return self.first(self.second(x))


@pytest.mark.parametrize("asks", [False, True])
def test_memory_that_two_modules_share(asks):
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    with pytest.raises(PartitionError, match=r"(first|second)\.table: needed as it was at .*, written in place at"):
        compile_model(TwoOfOne(asks), x, pipeline_parallel_degree=2, microbatches=2)
    compile_model(TwoOfOne(asks), x, pipeline_parallel_degree=1, microbatches=1)


OUTSIDE, ARRAY = torch.ones(4), np.ones(4, dtype=np.float32)
OUTSIDE_WRITES = {
    "data": lambda: OUTSIDE.data.mul_(0.5),
    "view": lambda: OUTSIDE.view(2, 2).detach().mul_(0.5),
    "array": lambda: torch.from_numpy(ARRAY).mul_(0.5),
}


class WritesOutside(nn.Linear):
    def __init__(self, write):
        super().__init__(4, 4)
        self.write = write

    def forward(self, x):
        OUTSIDE_WRITES[self.write]()
        return super().forward(x)


@pytest.mark.parametrize("write", OUTSIDE_WRITES)
def test_memory_outside_of_the_model_is_not_written(write):
    """By an alias of a tensor that no module holds, programs wrote into a copy, without a word."""
    with pytest.raises(TraceError, match="forward writes into a tensor that no module holds"):
        record(WritesOutside(write), (torch.randn(2, 4),))


class LargeParameter(nn.Module):
    """Of more elements than a real run gives values to: zeros, which a product leaves as they are."""

    def __init__(self, writes):
        super().__init__()
        self.weight, self.writes = nn.Parameter(torch.empty(8, (1 << 21) + 1, dtype=torch.float16)), writes

    def forward(self, x):
        if bool(x.sum() < -1e9):
            return x
        out = F.linear(self.weight[:, :4], x.half()).T.float()
        if self.writes:
            self.weight.data.numpy()[:, 1] *= 0.5
        return F.pad(out, (0, 0))[:, :4] + x


@pytest.mark.parametrize("writes", [False, True])
def test_hidden_writes_into_large_parameters(writes):
    """They were not compared."""
    model = nn.Sequential(nn.Linear(4, 4), LargeParameter(writes))
    trace = record(model, (torch.randn(2, 4),))
    assert [name for name, _, _ in trace.overwritten] == ["1.weight"] * writes
