"""What scripts change between calls of models that run as they were recorded: the next call has plain PyTorch's numbers, or is an error."""

import copy
import types

import pytest
import torch
import torch.distributed as dist
from executor_harness import run_workers
from torch import nn
from torch.nn import functional as F

from smpc import context_parallel, tensor_parallel
from smpc.errors import StepError
from smpc.executor.collectives import TensorGroup
from smpc.v2.transforming.sharing import share

SETTINGS = types.SimpleNamespace(scale=1.0)
LINEAR = nn.Linear.forward


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.listed, self.activation, self.scale = [self.up], F.relu, 1.0
        self.by_name, self.held = {"scales": [1.0]}, types.SimpleNamespace(scale=1.0)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x):
        h = self.down(self.activation(self.listed[0](x)))
        scale = 1.0 if self.up.bias.requires_grad else 2.0
        scale *= self.scale * self.by_name["scales"][0] * self.held.scale * SETTINGS.scale
        return h * scale * getattr(self.up.weight, "multiplier", 1.0) + self.shift


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.dropout, self.scale = nn.Dropout(0.0), 1.0

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.dropout(x) * self.scale


def tripled(module, args, output):
    return 3 * output


CHANGES = {
    "attribute of a module": lambda model: setattr(model.blocks[1], "scale", 0.3),
    "attribute of the model": lambda model: setattr(model, "scale", 0.3),
    "item": lambda model: model.blocks[0].by_name["scales"].__setitem__(0, 0.3),
    "attribute of an object": lambda model: setattr(model.blocks[0].held, "scale", 0.3),
    "attribute of a parameter": lambda model: setattr(model.blocks[0].up.weight, "multiplier", 0.3),
    "frozen parameter": lambda model: model.blocks[0].up.bias.requires_grad_(False),
    "global": lambda model: setattr(SETTINGS, "scale", 0.3),
    "function": lambda model: setattr(model.blocks[0], "activation", F.gelu),
    "module": lambda model: setattr(model, "dropout", nn.ReLU()),
    "module in a list": lambda model: model.blocks[1].listed.__setitem__(0, model.blocks[0].up),
    "hook": lambda model: model.blocks[1].down.register_forward_hook(tripled),
    "values of a buffer": lambda model: model.blocks[1].shift.fill_(2.0),
    "shape of a buffer": lambda model: setattr(model.blocks[1], "shift", torch.full((1,), 2.0)),
    "mode of a module": lambda model: (setattr(model.dropout, "p", 1.0), model.dropout.eval()),
    "dropout": lambda model: setattr(model.dropout, "p", 1.0),
    "forward of a layer": lambda model: setattr(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight)),
}


def in_place(model, x, group, **shared):
    share(model, [((x,), {})], shared.get("tensor"), shared.get("context"), attention="p2p", sources=None)
    return model


SURFACES = {
    "tensor_parallel.shard": lambda model, x, group: tensor_parallel.shard(model, x, group),
    "context_parallel.shard": lambda model, x, group: context_parallel.shard(model, x, group),
    "v2, slices of weights": lambda model, x, group: in_place(model, x, group, tensor=group),
    "v2, slices of sequences": lambda model, x, group: in_place(model, x, group, context=group),
}


def own_part(values, surface, rank):
    return values.chunk(2, 1)[rank] if surface == "v2, slices of sequences" else values


def call_twice(rank, surface, change):
    """How far the calls before and after a change are from plain PyTorch's, and the second one's error."""
    SETTINGS.scale = 1.0
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 8, 8)
    eager = copy.deepcopy(model)
    run, distances = SURFACES[surface](model, x, TensorGroup.of(dist.group.WORLD)), []
    try:
        for number in range(2):
            if number:
                change(model)
                change(eager)
            difference = run(own_part(x, surface, rank)) - own_part(eager(x), surface, rank)
            distances.append(difference.abs().max().item())
    except StepError as error:
        return distances, str(error)
    finally:
        nn.Linear.forward = LINEAR
    return distances, ""


def call_all(rank, _, cases):
    return {(surface, what): call_twice(rank, surface, CHANGES[what]) for surface, what in cases}


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What the two ranks had in every case that this run has chosen, in one launch."""
    chosen = [item.callspec.params for item in request.session.items if item.fspath == request.fspath]
    cases = [(params["surface"], params["what"]) for params in chosen]
    return run_workers(call_all, 2, tmp_path_factory.mktemp("ranks"), cases)


@pytest.mark.matrix(16)
@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("surface", SURFACES)
def test_a_change_between_calls_is_followed_or_told(surface, what, found):
    for rank in found:
        distances, error = rank[surface, what]
        assert max(distances) < 1e-5
        assert len(distances) == 2 or (
            surface.endswith("shard") and ("which was" in error or "has a forward hook" in error)
        )
