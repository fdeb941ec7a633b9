"""Models that draw from random generators of their own: eager's numbers, from one stage; what seeds them is called whole or refused."""

import copy

import parity
import pytest
import torch
from torch import nn

from smpc.compile import compile_model
from smpc.errors import TraceError
from smpc.tracer import NodeKind, record, verify


class Noise(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.linear, self.generator = nn.Linear(4, 4), generator

    def forward(self, x):
        return self.linear(x) + torch.randn(x.shape, generator=self.generator)


class Reseeded(Noise):
    """Draws the same numbers each time."""

    def forward(self, x):
        self.generator.manual_seed(7)
        return super().forward(x)


class Model(nn.Module):
    """Noise in two modules and in between, from one generator."""

    def __init__(self, kind=Noise):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.generators = {"mask": generator}
        self.layers = nn.ModuleList(
            [nn.Linear(4, 4), kind(generator), nn.Linear(4, 4), kind(generator), nn.Linear(4, 4)]
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, nn.Linear):
                x = x * torch.empty_like(x).bernoulli_(0.5, generator=self.generators["mask"])
        return x


INPUTS = (torch.linspace(-1, 1, 32).reshape(8, 4),), {}


@pytest.mark.parametrize("kind", [Noise, Reseeded])
def test_what_draws_from_one_generator_runs_on_one_stage(kind):
    model = Model(kind)
    before = model.generators["mask"].get_state()
    compilation = compile_model(model, INPUTS, pipeline_parallel_degree=2, microbatches=4)
    assert torch.equal(model.generators["mask"].get_state(), before)
    whole = [node.target for node in compilation.trace.nodes if node.kind is NodeKind.CALL_MODULE]
    assert whole == ([] if kind is Noise else ["layers.1", "layers.3"])
    stage_of = dict(compilation.plan.assignment)
    drawing = {stage_of[node.name] for node in compilation.trace.nodes if node.random or node.name in whole}
    assert len(drawing) == 1
    verify(compilation.trace, model, *parity.split(INPUTS, 4)[0])
    parity.assert_same(parity.run_eager(model, INPUTS, 4), parity.run_loopback(model, compilation, INPUTS))


def test_a_region_that_draws_is_not_computed_again():
    model = nn.Sequential(nn.Linear(4, 4), Noise(torch.Generator().manual_seed(1)), nn.Linear(4, 4))
    options = {"pipeline_parallel_degree": 2, "microbatches": 2, "recompute": ("1",)}
    with pytest.warns(UserWarning, match=r"1 is not checkpointed: it draws from the random generator '1\.generator'"):
        compilation = compile_model(model, INPUTS, **options)
    parity.assert_same(parity.run_eager(model, INPUTS, 2), parity.run_loopback(model, compilation, INPUTS))


class Root(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return self.function(self, self.linear(x))


ELSEWHERE = torch.Generator().manual_seed(0)


def seeds(self, x):
    return x + torch.rand(x.shape, generator=self.generator.manual_seed(0))


def sets(self, x):
    self.generator.set_state(ELSEWHERE.get_state())
    return x


def outside(self, x):
    return x + torch.rand(x.shape, generator=ELSEWHERE)


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (seeds, r"random generator generator is seeded, or its state is set, in forward"),
        (sets, r"random generator generator is seeded, or its state is set, in forward"),
        (outside, r"a torch\.Generator that no module holds; what to do: keep it as an attribute of a module"),
    ],
)
def test_what_a_trace_cannot_follow_is_refused(function, match):
    model = Root(function)
    before = copy.deepcopy(model.generator).get_state()
    with pytest.raises(TraceError, match=match):
        record(model, *INPUTS)
    assert torch.equal(model.generator.get_state(), before)
