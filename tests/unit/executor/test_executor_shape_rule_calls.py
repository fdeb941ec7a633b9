"""Modules that are called whole by a shape rule, and write into what a backward needs: plain PyTorch's gradients, or an error."""

import numpy as np
import pytest
import torch
from torch import nn

import smpc
from smpc.compile import compile_model
from smpc.errors import StepError
from smpc.runtime import LoopbackRuntime

X = torch.linspace(-1, 1, 16).reshape(4, 4)
WRITES = {
    "tensor": lambda self: self.table.data.mul_(0.9),
    "array": lambda self: np.multiply(self.array, 0.9, out=self.array),
    "parameter": lambda self: self.inner.weight.data.mul_(0.9),
    "unneeded": lambda self: self.seen.data.add_(1),
    "nothing": lambda self: None,
}


class Scaled(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.inner, self.table, self.seen = nn.Linear(4, 4), torch.linspace(1, 2, 4), torch.zeros(1)
        self.array, self.write = np.linspace(1, 2, 4, dtype=np.float32), write

    def forward(self, x):
        y = self.inner(x) * self.table * torch.from_numpy(self.array)
        WRITES[self.write](self)
        return y


smpc.register_shape_rule(Scaled, lambda module, x: module.inner(x))


class Model(nn.Module):
    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.scaled, self.down = nn.Linear(4, 4), Scaled(write), nn.Linear(4, 4)

    def forward(self, x):
        return self.down(torch.tanh(self.scaled(torch.tanh(self.up(x)))))


def train(model, degree, microbatches):
    compiled = compile_model(model, X, pipeline_parallel_degree=degree, microbatches=microbatches)
    runtime = LoopbackRuntime(model)
    program = runtime.install(compiled)
    parts = [((part,), {}) for part in X.chunk(microbatches)]
    runtime.run(program, parts, lambda number, out: [(out.square().mean(), None)], training=True)


@pytest.mark.parametrize("write", WRITES)
def test_what_a_module_with_a_shape_rule_writes(write):
    """The next microbatch changed what the backward of one needed, and gradients were off by 0.02, without a word."""
    if write in ("tensor", "array", "parameter"):
        with pytest.raises(StepError, match=r"module 'scaled' \(Scaled\), which is called whole by its shape rule"):
            train(Model(write), 2, 2)
    for degree, microbatches in ((2, 1), *(((2, 2),) if write in ("unneeded", "nothing") else ())):
        plain, model = Model(write), Model(write)
        for part in X.chunk(microbatches):
            plain(part).square().mean().backward()
        train(model, degree, microbatches)
        for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, expected.grad)
