"""What forward reads besides its inputs may change between steps: every change tells, on two gloo processes, and equals one process.

Before, a program kept the values of its first step: `self.beta = 0.7`, a replaced activation, another global trained on with the old ones.
"""

import dataclasses
import functools
import types

import pytest
import torch
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp
from smpc.errors import SmpcError, StepError

SHIFT = 0.25
settings = types.ModuleType("settings_of_a_script")
settings.POWER = 2


@dataclasses.dataclass
class Config:
    """Read through an object that the model holds."""

    scale: float = 0.5
    table: dict = dataclasses.field(default_factory=lambda: {"offsets": [0.1, 0.2]})


def make_gate(limit):
    def gate(x):
        return x.clamp(max=limit)

    return gate


def shifted(x):
    return x + SHIFT


class Reader(nn.Module):
    """Reads every kind of thing that Python can read."""

    FACTOR = 1.5

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.seq = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.dropout = nn.Dropout(0.0)
        self.beta, self.use_relu, self.config, self.gate = 0.5, True, Config(), make_gate(2.0)
        self.mask = torch.linspace(0, 1, 6)
        self.order = [0, 1, 2, 3]

    def forward(self, x):
        for index in self.order:
            x = self.layers[index](x) * self.beta
        x = torch.relu(x) if self.use_relu else torch.tanh(x)
        x = shifted(self.seq(self.gate(x))) * self.FACTOR + self.config.scale * self.mask
        x = x + sum(self.config.table["offsets"]) + (1.0 if hasattr(self, "extra") else 0.0)
        return self.dropout(x) ** settings.POWER


def set_global(value):
    global SHIFT
    SHIFT = value


def set_cell(module, value):
    module.gate.__closure__[0].cell_contents = value


CHANGES = {
    "a number": lambda m: setattr(m, "beta", 0.7),
    "a number, back": lambda m: setattr(m, "beta", 0.5),
    "a number of a submodule": lambda m: setattr(m.dropout, "p", 1.0),
    "a number of a submodule, back": lambda m: setattr(m.dropout, "p", 0.0),
    "a flag": lambda m: setattr(m, "use_relu", False),
    "an object's attribute": lambda m: setattr(m.config, "scale", 0.9),
    "a list in a dict in an object": lambda m: m.config.table["offsets"].append(0.3),
    "a closure": lambda m: set_cell(m, 0.1),
    "another closure": lambda m: setattr(m, "gate", make_gate(0.2)),
    "a tensor": lambda m: setattr(m, "mask", torch.ones(6)),
    "a tensor, in place": lambda m: m.mask.mul_(3),
    "the order of layers": lambda m: m.order.__setitem__(slice(0, 2), [1, 0]),
    "a global": lambda m: set_global(0.75),
    "a module of Python": lambda m: setattr(settings, "POWER", 3),
    "a class attribute": lambda m: setattr(Reader, "FACTOR", 0.5),
    "an activation": lambda m: m.seq.__setitem__(1, nn.Sigmoid()),
    "an attribute that was not there": lambda m: setattr(m, "extra", True),
    "an attribute that is gone": lambda m: delattr(m, "extra"),
    "a method of one object": lambda m: setattr(m.dropout, "forward", lambda x: x * 2),
    "through __dict__": lambda m: vars(m).update(beta=0.25),
    "nothing": lambda m: None,
}


@smp.step
def train_step(model, x):
    loss = (model(x) ** 2).mean()
    model.backward(loss)
    return loss


def restore():
    set_global(0.25)
    settings.POWER, Reader.FACTOR = 2, 1.5


def data():
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(7))


def train(rank, folder):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "program_cache_size": 64})
    torch.manual_seed(0)
    module = Reader()
    model = smp.DistributedModel(module)
    found = [train_step(model, data()).outputs]
    for change in CHANGES.values():
        change(module)
        found.append(train_step(model, data()).outputs)
    return found, {name: p.grad for name, p in model.local_named_parameters()}, len(model._pipeline.programs.entries)


def reference():
    torch.manual_seed(0)
    model, found = Reader(), []
    for change in (lambda m: None, *CHANGES.values()):
        change(model)
        losses = []
        for part in data().chunk(2):
            loss = (model(part) ** 2).mean()
            (loss / 2).backward()
            losses.append(loss.detach())
        found.append(losses)
    return found, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.long
def test_what_forward_reads_may_change_between_steps(tmp_path):
    restore()
    results = run_workers(train, 2, tmp_path)
    expected, gradients = reference()
    restore()
    for got, _, num_programs in results:
        for name, ours, theirs in zip(("first", *CHANGES), got, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), name
        # Back to a value of before, tensors of one shape, and nothing: no new programs.
        assert num_programs == len(CHANGES) + 1 - 6
    ours = results[0][1] | results[1][1]
    for name, gradient in gradients.items():
        assert torch.equal(ours[name], gradient), name


def change_on_one_rank(rank, folder, changing):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    torch.manual_seed(0)
    module = Reader()
    model = smp.DistributedModel(module)
    train_step(model, data())
    if rank == changing:
        module.beta = 0.7
    with pytest.raises(SmpcError) as error:
        train_step(model, data())
    return str(error.value)


@pytest.mark.parametrize("changing", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_change_on_one_rank_alone_is_told(tmp_path, changing):
    results = run_workers(change_on_one_rank, 2, tmp_path, changing)
    assert any("attribute 'beta' of the model: 0.7, which was 0.5" in text for text in results), results


def replace_parameter(rank, folder, how):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    torch.manual_seed(0)
    module = Reader()
    model = smp.DistributedModel(module)
    train_step(model, data())
    if how == "replaced":
        module.layers[0].weight = nn.Parameter(torch.ones(6, 6))
    elif how == "added":
        module.layers.append(nn.Linear(6, 6))
        module.order.append(4)
    else:
        del module.layers[3]
        module.order.remove(3)
    with pytest.raises(StepError, match=rf"parameter 'layers\.\d\.weight' was {how}"):
        train_step(model, data())
    return True


@pytest.mark.parametrize("how", ["replaced", "added", "removed"])
def test_parameters_stay_what_they_are(tmp_path, how):
    assert run_workers(replace_parameter, 2, tmp_path, how) == [True, True]


class Sized(nn.Linear):
    """A size that is computed once."""

    @functools.cached_property
    def width(self):
        return self.weight.shape[0]

    def forward(self, x):
        return super().forward(x)[..., : self.width]


def train_cached(rank, folder):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(*(Sized(6, 6) for _ in range(4))))
    return [train_step(model, data()).outputs for _ in range(3)], len(model._pipeline.programs.entries)


def test_what_a_module_computes_once_and_keeps_is_no_change(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(Sized(6, 6) for _ in range(4)))
    expected = [(model(part) ** 2).mean() for part in data().chunk(2)]
    for steps, num_programs in run_workers(train_cached, 2, tmp_path):
        assert num_programs == 1
        for losses in steps:
            assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
