"""Plans of recorded models: what is on which stage, what crosses, what is proven, and what is refused."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from drawn import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from smpc.errors import PartitionError
from smpc.partitioner import planner
from smpc.partitioner.costs.node_costs import CostModel
from smpc.partitioner.graph.plan import INPUTS, Plan
from smpc.partitioner.graph.trace_graph import check_assignment
from smpc.partitioner.planner import TOLERANCE, analyse, plan_from_assignment, solve_partition
from smpc.partitioner.solvers.bottleneck_bound import lower_bound
from smpc.partitioner.stage_costs import Scale, stage_costs
from smpc.tracer import record


class Branches(nn.Module):
    """Layers wired at random: layer i reads the sum of the values named by `wiring[i]` (0 is the input)."""

    def __init__(self, widths, wiring):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, width) for width in widths)
        self.back = nn.ModuleList(nn.Linear(width, 4) for width in widths)
        self.wiring = wiring

    def forward(self, x):
        values = [x]
        for layer, back, reads in zip(self.layers, self.back, self.wiring, strict=True):
            values.append(
                back(layer(sum(values[i] for i in reads[1:]) + values[reads[0]] if reads[1:] else values[reads[0]]))
            )
        return values[-1]


@st.composite
def branches(draw, max_layers):
    count = draw(st.integers(1, max_layers))
    widths = draw(st.lists(st.sampled_from([1, 4, 32, 64]), min_size=count, max_size=count))
    wiring = [
        tuple(sorted(draw(st.sets(st.integers(0, i), min_size=1, max_size=2)), reverse=True)) for i in range(count)
    ]
    return Branches(widths, wiring)


def tiny_gpt2(num_layers=2, tie=True):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=num_layers,
        n_head=2,
        n_embd=32,
        vocab_size=64,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=tie,
        use_cache=False,
    )
    return record(transformers.GPT2LMHeadModel(config), (), {"input_ids": torch.zeros(2, 16, dtype=torch.long)})


class Block(nn.Module):
    def __init__(self, channels, out):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out)

    def forward(self, x):
        return torch.relu_(self.norm(self.conv(x)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.middle = Block(3, 8), Block(8, 16), Block(16, 16)
        self.up2, self.up1, self.head = Block(32, 8), Block(16, 8), nn.Conv2d(8, 2, 1)
        self.pool, self.up = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.middle(self.pool(b))
        d = self.up2(torch.cat([self.up(c), b], 1))
        return self.head(self.up1(torch.cat([self.up(d), a], 1)))


def unet_trace():
    return record(UNet(), (torch.zeros(2, 3, 16, 16),))


def delivered(trace, plan):
    """Values by stage: owned, recomputed and received ones, checked to be complete and never delivered twice."""
    assignment = dict(plan.assignment)
    has = [set(stage.recomputed) for stage in plan.stages]
    for name, stage in assignment.items():
        has[stage].add(name)
    for edge in plan.edges:
        for name in edge.values:
            assert name not in has[edge.destination], f"{name} reaches stage {edge.destination} twice"
            if edge.source == INPUTS:
                assert trace.node(name).kind == "placeholder"
            else:
                assert edge.source < edge.destination
            has[edge.destination].add(name)
    for edge in plan.edges:
        assert edge.source == INPUTS or set(edge.values) <= has[edge.source]
    needed = [(name, assignment[name]) for name in assignment if name in trace.live]
    needed += [(name, stage.index) for stage in plan.stages for name in stage.recomputed]
    for name, stage in needed:
        for read in trace.node(name).inputs:
            assert read in has[stage] or trace.node(read).kind == "get_attr", f"stage {stage}: {name} lacks {read}"
    for name in trace.output_names:
        assert name in has[-1] or trace.node(name).kind == "get_attr"
    return has


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("build", [tiny_gpt2, unet_trace])
def test_every_stage_gets_what_it_reads(build, num_stages):
    trace = build()
    in_flight = tuple(range(num_stages, 0, -1))
    plan = solve_partition(trace, num_stages=num_stages, in_flight=in_flight)
    delivered(trace, plan)
    check_assignment(trace, dict(plan.assignment), num_stages)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.objective.bottleneck == max(stage.cost for stage in plan.stages)
    assert plan.objective.lower_bound <= plan.objective.bottleneck
    again = plan_from_assignment(trace, dict(plan.assignment), num_stages=num_stages, in_flight=in_flight)
    assert (again.stages, again.edges, again.shared_parameters) == (plan.stages, plan.edges, plan.shared_parameters)
    assert again.objective.solver == "manual"


def test_same_input_same_bytes():
    first, second = (solve_partition(tiny_gpt2(), num_stages=2, in_flight=(2, 1)).to_json() for _ in range(2))
    assert first == second


def test_blocks_stay_whole_where_that_costs_little():
    plan = solve_partition(tiny_gpt2(num_layers=12, tie=False), num_stages=3, in_flight=(1, 1, 1))
    whole = [name for stage in plan.stages for name in stage.modules]
    blocks = [name for name in whole if name.count(".") == 2 and name.startswith("transformer.h.")]
    assert len(blocks) >= 10
    optimum = float(plan.objective.note.removeprefix("best contiguous cut "))
    assert plan.objective.bottleneck <= optimum * (1 + TOLERANCE) * (1 + 1e-5)


def test_a_tied_parameter_is_held_by_each_stage_that_uses_it():
    trace = tiny_gpt2()
    plan = solve_partition(trace, num_stages=2, in_flight=(2, 1))
    assert [(item.name, item.stages) for item in plan.shared_parameters] == [("transformer.wte.weight", (0, 1))]
    assert all("transformer.wte.weight" in stage.parameters for stage in plan.stages)
    total = sum(state.spec.num_elements for state in trace.state)
    assert sum(stage.num_parameters for stage in plan.stages) == total + 64 * 32
    assert {name for stage in plan.stages for name in stage.parameters} == {state.name for state in trace.state}


def test_static_memory_is_adam():
    plan = solve_partition(tiny_gpt2(tie=False), num_stages=2, in_flight=(2, 1))
    for stage in plan.stages:
        assert stage.parameter_bytes == stage.gradient_bytes == 4 * stage.num_parameters
        assert stage.optimizer_bytes == 8 * stage.num_parameters
        static = stage.parameter_bytes + stage.gradient_bytes + stage.optimizer_bytes
        held = stage.num_in_flight * stage.activation_bytes_per_microbatch + stage.communication_bytes
        assert stage.peak_memory_bytes == static + held + stage.transient_bytes
        assert stage.peak_memory_bytes > static


def test_activation_bytes_of_one_stage_are_what_autograd_keeps():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    x = torch.randn(5, 8)
    plan = solve_partition(record(model, (x,)), num_stages=1, in_flight=(1,))
    kept = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = model(x)
    kept[out.untyped_storage().data_ptr()] = out.untyped_storage().nbytes()
    assert plan.stages[0].activation_bytes_per_microbatch == sum(kept.values())


def test_unused_parameters_have_one_owner():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.extra = nn.Parameter(torch.zeros(3))
            self.never = nn.Linear(4, 4)

        def forward(self, x):
            return self.b(self.a(x))

    plan = solve_partition(record(Unused(), (torch.zeros(2, 4),)), num_stages=2, in_flight=(1, 1))
    assert [stage.modules for stage in plan.stages] == [("a",), ("b",)]
    assert set(plan.stages[0].parameters) == {"a.weight", "a.bias", "never.weight", "never.bias"}
    assert set(plan.stages[1].parameters) == {"b.weight", "b.bias", "b.extra"}
    assert plan.shared_parameters == ()


@settings(max_examples=examples(50), deadline=None)
@given(branches(5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_any_monotone_assignment_becomes_a_complete_plan(model, num_stages, random):
    trace = record(model, (torch.zeros(2, 4),))
    names = [node.name for node in trace.nodes if node.kind not in ("placeholder", "get_attr")]
    assignment = {}
    for name in names:
        earliest = max((assignment.get(read, 0) for read in trace.node(name).inputs), default=0)
        assignment[name] = random.randint(earliest, min(num_stages - 1, earliest + 1))
    number = {stage: i for i, stage in enumerate(sorted(set(assignment.values())))}  # close the gaps
    assignment = {name: number[stage] for name, stage in assignment.items()}
    plan = plan_from_assignment(trace, assignment, num_stages=len(number), in_flight=(1,) * len(number))
    delivered(trace, plan)
    assert dict(plan.assignment) == assignment
    assert plan.objective.lower_bound <= plan.objective.bottleneck


@settings(max_examples=examples(40), deadline=None)
@given(branches(3), st.integers(2, 3), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())
def test_lower_bound_holds_for_every_placement(model, num_stages, memory_weight, rising):
    analysis = analyse(record(model, (torch.zeros(2, 4),)), CostModel())
    in_flight = tuple(range(1, num_stages + 1)) if rising else tuple(range(num_stages, 0, -1))
    scale = Scale.of(analysis.units, in_flight, memory_weight)
    bound = lower_bound(analysis.graph, analysis.clusters, analysis.units, scale, in_flight)
    pairs = [(int(analysis.graph.rank[u]), int(analysis.graph.rank[w])) for u, w in analysis.graph.dependencies()]
    smallest = min(
        (
            float(stage_costs(analysis.units, scale, in_flight, assignment).max())
            for assignment in itertools.product(range(num_stages), repeat=analysis.graph.num_compute)
            if all(assignment[u] <= assignment[w] for u, w in pairs) and len(set(assignment)) == num_stages
        ),
        default=math.inf,  # fewer operations than stages
    )
    assume(smallest < math.inf)
    assert 0 < bound <= smallest * (1 + 1e-12)
    closer = lower_bound(analysis.graph, analysis.clusters, analysis.units, scale, in_flight, reached=smallest * 1.5)
    assert bound <= closer <= smallest * (1 + 1e-12)


def test_lower_bound_is_close_on_a_long_chain():
    trace = record(nn.Sequential(*(nn.Linear(16, 16) for _ in range(64))), (torch.zeros(4, 16),))
    plan = solve_partition(trace, num_stages=4, in_flight=(4, 3, 2, 1))
    assert plan.objective.gap < 0.05


class Fork(nn.Module):
    """Costs 3, 4, 3, 2 in order of execution: contiguous stages cost 7 and 5, the best two cost 6 each."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(64, 64 * width) for width in (3, 4, 3, 2))

    def forward(self, x):
        return self.a(x), self.b(x), self.c(x), self.d(x)


def test_free_order_is_made_use_of():
    trace = record(Fork(), (torch.zeros(4, 64),))
    plan = solve_partition(trace, num_stages=2, in_flight=(1, 1), memory_weight=0.0)
    delivered(trace, plan)
    assert plan.objective.solver == "graph"
    assert sorted(stage.modules for stage in plan.stages) == [("a", "c"), ("b", "d")]
    assert plan.objective.gap < 1e-3
    assert float(plan.objective.note.removeprefix("best contiguous cut ")) > 0.55


class Wide(nn.Module):
    """The branches of `Fork` behind one value."""

    def __init__(self):
        super().__init__()
        self.first, self.fork = nn.Linear(64, 64), Fork()

    def forward(self, x):
        return self.fork(self.first(x))


def test_readers_of_one_value_keep_their_order():
    trace = record(Wide(), (torch.zeros(4, 64),))
    plan = solve_partition(trace, num_stages=2, in_flight=(1, 1), memory_weight=0.0)
    stages = [stage for name, stage in plan.assignment if name.startswith("linear")]
    assert stages == sorted(stages)
    crossed = dict(plan.assignment) | {"linear_1": 1, "linear_2": 0, "linear_3": 1, "linear_4": 1}
    manual = plan_from_assignment(trace, crossed, num_stages=2, in_flight=(1, 1))
    assert manual.objective.note == "1 gradient sums in another order than in one process"


def test_without_a_free_order_the_best_cut_is_used(monkeypatch):
    monkeypatch.setattr(planner, "place", lambda *_: None)
    trace = record(Fork(), (torch.zeros(4, 64),))
    plan = solve_partition(trace, num_stages=2, in_flight=(1, 1), memory_weight=0.0)
    assert plan.objective.solver == "chain"
    assert plan.objective.gap > 0.05  # half on each side is proven to be the least, and no cut has that


def test_a_chain_is_solved_to_proof():
    plan = solve_partition(unet_trace(), num_stages=3, in_flight=(3, 2, 1))
    assert plan.objective.solver == "chain"
    assert plan.objective.gap <= TOLERANCE + 1e-3


def test_more_stages_than_modules():
    trace = record(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.zeros(2, 4),))
    with pytest.raises(PartitionError, match="found 3 stages and 2 modules"):
        solve_partition(trace, num_stages=3, in_flight=(1, 1, 1))


@pytest.mark.parametrize(
    ("settings_", "text"),
    [
        ({"num_stages": 0, "in_flight": ()}, "at least 1 stage, found 0"),
        ({"num_stages": 1, "in_flight": (1,), "memory_weight": 1.5}, "memory_weight between 0 and 1, found 1.5"),
        ({"num_stages": 2, "in_flight": (1,)}, "in_flight to be 2 numbers"),
        ({"num_stages": 2, "in_flight": (1, 1), "placement": (0,)}, "placement to be 2 numbers"),
    ],
)
def test_bad_settings(settings_, text):
    trace = record(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.zeros(2, 4),))
    with pytest.raises(PartitionError, match=text) as caught:
        solve_partition(trace, **settings_)
    assert "\n" not in str(caught.value)


def test_without_proof_nothing_is_claimed():
    """A plan made without proof said that no plan is better: its bound was its own bottleneck, its gap 0."""
    proven = solve_partition(tiny_gpt2(), num_stages=3, in_flight=(3, 2, 1)).objective
    quick = solve_partition(tiny_gpt2(), num_stages=3, in_flight=(3, 2, 1), prove=False)
    assert (quick.objective.lower_bound, quick.objective.gap) == (0.0, math.inf)
    told = planner.with_bound(quick, proven.lower_bound).objective
    assert told.lower_bound == proven.lower_bound
    assert told.gap == quick.objective.bottleneck / proven.lower_bound - 1
    alone = solve_partition(tiny_gpt2(), num_stages=1, in_flight=(1,), prove=False).objective
    assert alone.gap == 0.0
