"""torch.cond, while_loop, scan and map in a model: the branch that is taken, and the loop that runs, are recorded."""

import warnings

import parity
import pytest
import torch
from torch import nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.map import map as map_rows

from smpc.compile import compile_model
from smpc.errors import StepError, TraceError
from smpc.tracer import NodeKind, record


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x, lengths):
        return self.last(self.function(self, self.first(x), lengths))


def branch(self, x, lengths):
    return torch.cond(lengths.max() > 2, lambda y: self.inner(y).sin(), lambda y: y.cos(), (x,))


def prefixes(self, x, lengths):
    return associative_scan(lambda a, b: a * b, x, dim=0, combine_mode="generic")


def loop(self, x, lengths):
    start = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, self.inner(y).tanh()), (start, x))[1]


def recurrence(self, x, lengths):
    return scan(lambda carry, row: ((carry + self.inner(row)).tanh(), carry * row), x[0] * 0, x, dim=0)[1]


def rows(self, x, lengths):
    return map_rows(lambda row: self.inner(row).sin(), x)


def batch():
    torch.manual_seed(0)
    return (torch.randn(8, 4), torch.tensor([1, 2, 3, 4, 2, 3, 4, 4])), {}


def eager(model, inputs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch compiles these operators before it runs them, and has much to say
        return parity.run_eager(model, inputs, 2)


@pytest.mark.parametrize("function", [branch, prefixes])
def test_a_branch_and_a_scan_are_recorded(function):
    inputs = batch()
    model = Model(function)
    compilation = compile_model(model, inputs, pipeline_parallel_degree=2, microbatches=2)
    assert [guard.expected for guard in compilation.trace.guards] == ([True] if function is branch else [])
    parity.assert_same(eager(model, inputs), parity.run_loopback(model, compilation, inputs))
    if function is branch:
        inputs[0][1][4:] = 1
        with pytest.raises(StepError, match=r"microbatch 1: the model's Python depends on torch\.Tensor\.__bool__"):
            parity.run_loopback(model, compilation, inputs)


@pytest.mark.parametrize("function", [loop, recurrence, rows])
def test_loops_are_recorded_step_by_step(function):
    """By itself torch decomposes what loops call, and adds up gradients in an order of its own: last bits may differ."""
    inputs = batch()
    model = Model(function)
    compilation = compile_model(model, inputs, pipeline_parallel_degree=2, microbatches=2)
    expected, found = eager(model, inputs), parity.run_loopback(model, compilation, inputs)
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-5, atol=1e-7)


class Chooses(nn.Module):
    """Which branch is taken depends on parameters."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.cond(x.sum() > 0, self.one, self.other, (x,))


@pytest.mark.long
def test_what_depends_on_parameters_is_called_whole():
    inputs = batch()[0][:1], {}
    model = nn.Sequential(nn.Linear(4, 4), Chooses(), nn.Linear(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compilation = compile_model(model, inputs, pipeline_parallel_degree=2, microbatches=2)
        assert [n.target for n in compilation.trace.nodes if n.kind is NodeKind.CALL_MODULE] == ["1"]
        parity.assert_same(eager(model, inputs), parity.run_loopback(model, compilation, inputs))
    with pytest.raises(TraceError, match=r"it depends on parameter first\.weight; what to do"):
        record(Model(lambda self, x, lengths: torch.cond(x.sum() > 0, self.inner, self.last, (x,))), *batch())
