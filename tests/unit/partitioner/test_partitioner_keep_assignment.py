"""A new trace of the same model keeps every module on its stage."""

import pytest
import torch
import torch.nn.functional as F
import zoo
from planning import compile_trace
from random_plans import compile_assignment
from torch import nn

from smpc.compile import PipelineOptions, compile_model
from smpc.errors import PartitionError
from smpc.partitioner.keep_assignment import follow
from smpc.sample_inputs import first_microbatch
from smpc.tracer import record


def stages_of_parameters(plan):
    return [(stage.rank, stage.parameters) for stage in plan.stages]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert", "unet", "convnet"])
def test_eval_mode_and_another_batch_keep_every_parameter_in_place(name):
    model, batch = zoo.build(name)
    compilation = compile_model(model, batch, pipeline_parallel_degree=3, microbatches=2)
    other = record(model.eval(), *first_microbatch(batch, 8))
    again = compile_trace(other, PipelineOptions(3, 4), like=compilation)
    assert stages_of_parameters(again.plan) == stages_of_parameters(compilation.plan)
    # A proof would take longer than all else about this plan, and would change nothing.
    assert (compilation.plan.objective.lower_bound > 0, again.plan.objective.lower_bound) == (True, 0.0)


class Length(nn.Module):
    """Does more on longer inputs: other nodes, another number of calls."""

    def __init__(self):
        super().__init__()
        self.embed, self.step = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.embed(x)
        if x.shape[1] > 2:
            h = F.pad(h, (0, 0, 1, 0)) * 2
        for _ in range(x.shape[1]):
            h = self.step(h).tanh()
        h = self.norm(h)
        if not self.training:
            h = h + 1
        return self.head(h) + torch.arange(4)


class Tasks(nn.Module):
    """A head for each task, and more layers later on."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.heads = nn.ModuleDict({task: nn.Linear(4, 4) for task in ("first", "second", "third")})

    def forward(self, x, depth, task):
        for layer in self.layers[:depth]:
            x = layer(x).relu()
        return self.heads[task](x)


@pytest.mark.parametrize("task", ["first", "second", "third"])
def test_what_the_first_program_does_not_use_is_beside_what_it_uses(task):
    """All of it was on the first stage, where later programs could not use it."""
    model, x = Tasks(), torch.zeros(4, 4)
    compilation = compile_model(model, (x, 3, task), pipeline_parallel_degree=2, microbatches=1)
    assert all(
        any(name.startswith("layers.0") for name in stage.parameters) == (stage.index == 0)
        for stage in compilation.plan.stages
    )
    for depth, other in ((4, "first"), (4, "second"), (2, "third")):
        again = compile_trace(record(model, (x, depth, other), {}), PipelineOptions(2, 1), like=compilation)
        stages = dict(again.plan.assignment)
        head = [node.name for node in again.trace.nodes if again.trace.calls[node.call].fqn == f"heads.{other}"]
        assert {stages[name] for name in head if name in stages} == {1}


def assign(trace, **modules):
    """Stage of each named module's nodes; the others go with what comes before."""
    stages, stage = {}, 0
    for node in trace.nodes:
        stage = max(stage, modules.get(trace.calls[node.call].fqn, 0))
        if node.kind not in ("placeholder", "get_attr"):
            stages[node.name] = stage
    return stages


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("training", [True, False])
def test_calls_follow_their_module_and_the_rest_its_neighbours(length, training):
    model = Length()
    planned = record(model, (torch.ones(2, 2, 4),))
    plan = compile_assignment(planned, assign(planned, norm=1, head=2)).plan
    trace = record(model.train(training), (torch.ones(2, length, 4),))
    found = follow(trace, planned, plan)
    expected = {"embed": 0, "step": 0, "norm": 1, "head": 2}
    for node in trace.nodes:
        module = trace.calls[node.call].fqn
        if node.kind == "call_function" and module:
            assert found[node.name] == expected[module]
    if length > 2:
        assert found[trace.node("pad").name] == 0
    if not training:
        (added,) = [n.name for n in trace.nodes if n.target == "torch.Tensor.add" and 1 in n.args]
        assert found[added] == 1
    assert found["arange"] == 2


class Swaps(nn.Module):
    """Runs its two layers in the other order in eval mode."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(x)) if self.training else self.a(self.b(x) * 2)


def test_a_module_that_would_have_to_run_too_early_is_named():
    model = Swaps()
    planned = record(model, (torch.ones(2, 4),))
    plan = compile_assignment(planned, assign(planned, b=1)).plan
    with pytest.raises(PartitionError, match=r"with these inputs a \(.*stage 0.*partition the model for these"):
        follow(record(model.eval(), (torch.ones(2, 4),)), planned, plan)


class Writes(nn.Module):
    """In eval mode an addition comes first; what is written in place is made in a module that was cut."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.body(x)
        if not self.training:
            h = h + 1
        h = h.relu()
        total = torch.zeros_like(h)
        total += h
        total *= 2
        return self.head(total.tanh())


def test_nodes_of_a_call_that_was_cut_follow_the_same_operations():
    """Nodes joined by in-place writes went to two stages: the buffer to that of its reader's producers, the write to another."""
    model = Writes()
    planned = record(model, (torch.ones(2, 4),))
    before = {}
    for node in planned.nodes:
        if node.kind not in ("placeholder", "get_attr"):
            before[node.name] = int("zeros_like" in before or node.target.endswith("zeros_like"))
    plan = compile_assignment(planned, before).plan
    trace = record(model.eval(), (torch.ones(2, 4),))
    found = follow(trace, planned, plan)
    assert len(found) == len(before) + 1
    relu, zeros = (
        next(found[node.name] for node in trace.nodes if node.target.endswith(end)) for end in ("relu", "zeros_like")
    )
    assert (relu, zeros) == (0, 1)
    again = compile_trace(trace, PipelineOptions(2, 1), like=compile_assignment(planned, before))
    assert [stage.parameters for stage in again.plan.stages] == [stage.parameters for stage in plan.stages]


class Joins(nn.Module):
    """In eval mode two modules of different stages write to one tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        if self.training:
            return self.b(self.a(x))
        h = self.a(x)
        return h.add_(F.linear(h, self.b.weight)).mul_(self.b.bias)


def test_what_can_run_on_no_stage_is_named():
    model = Joins()
    planned = record(model, (torch.ones(2, 4),))
    plan = compile_assignment(planned, assign(planned, b=1)).plan
    with pytest.raises(PartitionError, match=r"with these inputs .*share memory that is written.*on different stages"):
        follow(record(model.eval(), (torch.ones(2, 4),)), planned, plan)
