"""Modules that are called whole and run for real: once for all that are alike, and again for one that is not."""

import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from smpc.tracer.operations import opaque
from smpc.tracer.record import record


class Routed(nn.Module):
    """Python that depends on parameters: nothing of it can be recorded."""

    def __init__(self, width=8, scale=1, act=None):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(width, 8)), scale
        self.act = act or nn.Tanh()

    def forward(self, x):
        for _ in range(self.scale):
            x = self.act(x @ self.weight.T) @ self.weight
        return x if self.weight.sum() > 0 else x * 2


@pytest.fixture
def runs(monkeypatch):
    found = []
    monkeypatch.setattr(opaque, "probe", lambda module, *rest: found.append(module) or real(module, *rest))
    return found


real = opaque.probe


def recorded(*layers):
    trace = record(nn.Sequential(nn.Linear(8, 8), *layers), (torch.randn(4, 8),), {})
    return [node.flops for node in trace.nodes if node.kind == "call_module"]


def test_equal_layers_are_run_once(runs):
    flops = recorded(*(Routed() for _ in range(5)))
    assert len(runs) == 1
    assert len(flops) == 5
    assert set(flops) == {2 * 2 * 4 * 8 * 8}


@pytest.mark.parametrize("other", [{"width": 16}, {"scale": 2}, {"act": nn.ReLU()}, {"act": nn.Linear(8, 8)}])
def test_a_layer_that_differs_is_run_by_itself(runs, other):
    flops = recorded(Routed(), Routed(**other), Routed())
    assert len(runs) == 2
    assert flops[0] == flops[2]
    alone = recorded(Routed(**other))
    assert flops[1] == alone[0]


def test_hooks_and_buffers_make_a_layer_its_own(runs):
    hooked, held = Routed(), Routed()
    hooked.act.register_forward_hook(lambda *args: None)
    held.register_buffer("count", torch.ones(3))
    recorded(Routed(), hooked, held, held, Routed())
    assert len(runs) == 4


class Dropping(Routed):
    """Computes what nobody uses; `kept`: what that keeps is let go of at the end of forward, not at once."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def forward(self, x):
        found, unused = super().forward(x), []
        for _ in range(8):
            unused.append((found + 1) * (found + 2))
            if not self.kept:
                unused.clear()
        return found


def test_what_a_module_keeps_is_counted_wherever_its_memory_lies():
    """Memory that had been let go of gave its address to other memory, which did not count: ranks recorded different models, by chance."""
    traces = [
        record(nn.Sequential(nn.Linear(8, 8), Dropping(kept)), (torch.randn(4, 8),), {}) for kept in (True, False)
    ]
    kept, dropped = (
        [t.storages[s] for node in t.nodes if node.kind == "call_module" for s in node.saved] for t in traces
    )
    assert dropped == kept
    assert len(kept) >= 16


def resident():
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_memory_of_parameters_that_a_real_run_does_not_touch_is_not_taken(dtype):
    """All of it was written, six times for each kind of experts: most of the minute that a large mixture took."""
    parameter = nn.Parameter(torch.empty(1 << 27, 8, dtype=dtype, device="meta"), requires_grad=False)
    before = resident()
    drawn = opaque._InventedValues(0, 0).state(parameter)
    assert (drawn.shape, drawn.dtype, drawn.stride()) == (parameter.shape, dtype, parameter.stride())
    assert not drawn[1 << 26].any()
    drawn[1] = 3
    assert drawn[:3].sum() == 24
    assert resident() - before < 1 << 28
