"""Replay and verify: the obvious meaning of a trace, and the proof that it is the model's."""

import copy
import dataclasses

import pytest
import torch
from odd_models import MovingAverage, WritesArgument
from torch import nn

from smpc.errors import TraceError
from smpc.tracer import record, replay, verify
from smpc.tracer.replay import context, input_values, read_attribute


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, scale=2.0):
        self.count += 1
        return {"y": self.linear(x) * scale}


def changed(trace, name, **changes):
    """The trace with another node of that name."""
    nodes = tuple(dataclasses.replace(n, **changes) if n.name == name else n for n in trace.nodes)
    return dataclasses.replace(trace, nodes=nodes)


def test_verify_finds_a_wrong_constant_a_lost_gradient_and_a_lost_effect():
    model, args = Model(), (torch.ones(2, 3),)
    trace = record(model, args)
    verify(trace, model, args)
    (scaled,) = [node for node in trace.nodes if node.target == "torch.Tensor.mul"]
    with pytest.raises(TraceError, match="output 0"):
        verify(changed(trace, scaled.name, args=(scaled.args[0], 3.0)), model, args)
    with pytest.raises(TraceError, match=r"gradient of linear\.weight"):
        verify(changed(trace, scaled.name, grad_enabled=False), model, args)
    (counted,) = [node for node in trace.nodes if node.mutates]
    without = dataclasses.replace(trace, nodes=tuple(n for n in trace.nodes if n is not counted))
    with pytest.raises(TraceError, match="buffer count"):
        verify(without, model, args)


def test_verify_changes_neither_model_nor_inputs():
    model, x = nn.Sequential(WritesArgument(), Model()), torch.ones(2, 4)
    model[1].linear = nn.Linear(4, 4)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    verify(record(model, (x,)), model, (x,))
    assert torch.equal(x, torch.ones(2, 4))
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_replay_runs_on_the_models_state_and_changes_it_as_the_model_does():
    model, x = Model(), torch.ones(2, 3)
    trace = record(model, (x,))
    replay(trace, model, (x,))
    assert model.count == 1
    with torch.no_grad():
        model.linear.weight.fill_(1.0)
        model.linear.bias.zero_()
    assert torch.equal(replay(trace, model, (x,))["y"], torch.full((2, 3), 6.0))
    assert model.count == 2


class Late(nn.Module):
    """Reads a buffer only after it has been rebound, but from before."""

    def __init__(self):
        super().__init__()
        self.inner = MovingAverage.Inner()

    def forward(self, x):
        before = self.inner.mean
        y, _ = self.inner(x)
        self.inner.mean = self.inner.mean * 0 + 5
        return y + before


def test_buffers_are_read_as_they_were_at_the_start():
    model, x = Late(), torch.ones(2, 4)
    trace = record(model, (x,))
    verify(trace, model, (x,))
    other = copy.deepcopy(model)
    for _ in range(2):  # the second call reads what the first one has bound
        assert torch.equal(replay(trace, other, (x,)), model(x))
        assert torch.equal(other.inner.mean, model.inner.mean)


def test_inputs_by_name():
    trace = record(Model(), (torch.ones(2, 3),), {"scale": 1.0})
    x = torch.zeros(2, 3)
    assert list(input_values(trace, (x,), {"scale": 1.0})) == ["args_0"]
    for args, kwargs in (
        ((x,), {"scale": 1.5}),
        ((x,), {"scale": torch.tensor(1.0)}),
        ((x,), {}),
        ((x[:1],), {"scale": 1.0}),
        ((x.long(),), {"scale": 1.0}),
        ((None,), {"scale": 1.0}),
    ):
        with pytest.raises(TraceError, match="trace again"):
            input_values(trace, args, kwargs)


def test_attributes_by_path():
    model = nn.Module()
    model.inner = nn.ParameterList([torch.ones(1)])
    model.tables = {"cos": torch.zeros(1), 3: torch.full((1,), 3.0)}
    model.scales = [torch.ones(1), torch.full((1,), 2.0)]
    assert read_attribute(model, "inner.0") is model.inner[0]
    assert read_attribute(model, "tables..'cos'") is model.tables["cos"]
    assert read_attribute(model, "tables..3") is model.tables[3]
    assert read_attribute(model, "scales..1") is model.scales[1]


def test_a_context_never_turns_gradients_on():
    with torch.no_grad(), context(True, None):
        assert not torch.is_grad_enabled()
    with context(False, None):
        assert not torch.is_grad_enabled()
