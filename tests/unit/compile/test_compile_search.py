"""The search finds what trying everything finds, its bounds hold, and what it says would do, does."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest
import torch
from torch import nn

import smpc
from smpc.codegen.rewrite.tensor_parallel.choose_layouts import choose
from smpc.codegen.rewrite.tensor_parallel.rewrite import rewrite
from smpc.compile import PipelineOptions, Traced, compile_model, plan_trace
from smpc.compile.replica_traffic import Sharding, StepSurroundings
from smpc.compile.search import Verdict
from smpc.compile.search.estimate import (
    EstimatedPlace,
    EstimatedReruns,
    EstimatedSample,
    least_peak,
    least_step,
)
from smpc.compile.search.least_times import least_times
from smpc.compile.search.searcher import _Searcher
from smpc.compile.search.space import (
    ALL_SCHEDULES,
    Again,
    Shape,
    Tried,
    candidates,
    repeated_blocks,
    shapes,
    shardings,
    tensor_degrees,
    wire,
)
from smpc.compile.step_breakdown import step_parts
from smpc.config import Config
from smpc.config.numbers import MAX_STEPS
from smpc.errors import ConfigError, MemoryLimitError, PartitionError
from smpc.mesh import Axis
from smpc.partitioner.costs.device import Device, Group, Wire
from smpc.partitioner.costs.device_file import find_device
from smpc.partitioner.costs.named_optimizers import find_optimizer
from smpc.partitioner.costs.node_costs import node_times, times_with_collectives
from smpc.partitioner.planner import rank_peaks
from smpc.partitioner.solvers import chain_limited
from smpc.tracer import record

# Two devices a host: with four ranks it matters which of them share one.
DEVICE = Device("small", {"float32": 1e12}, 1e11, 10**8, 2, Wire(1e11, 1e-6), Wire(1e9, 5e-6))
NOTHING, STATE, FULL = Sharding.NONE, Sharding.STATE, Sharding.FULL
AGAIN = ("model", "half the blocks", "blocks")


def tried(tensor=(1,), sharding=(NOTHING,), again=("model",), context=(1,), expert=(1,)):
    """What is tried, with all schedules."""
    return Tried(tensor, context, expert, sharding, again, ALL_SCHEDULES)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, width=64, depth=6):
        super().__init__()
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, 16)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).sum()


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):
        return Stack()


@pytest.fixture(scope="module")
def batch():
    return torch.zeros(4, 32, 16, device="meta")


EVERYTHING = tried((1, 2), (NOTHING, FULL), AGAIN)


def options(candidate, blocks, limit=None):
    link = wire(DEVICE, candidate.mesh, Axis.PP)
    return PipelineOptions(
        pipeline_parallel_degree=candidate.pipeline_parallel_degree,
        microbatches=candidate.microbatches,
        memory_weight=0.0,
        device=Device("small", {"float32": 1e12}, 1e11, 10**8, 2, link, link),
        memory_limit=limit,
        schedule=candidate.schedule,
        virtual_pipeline_degree=candidate.virtual_pipeline_degree,
        data_parallel_degree=candidate.data_parallel_degree,
        shard_optimizer_state=candidate.sharding is STATE,
        fully_shard=candidate.sharding is FULL,
        recompute={"model": (), "half the blocks": blocks[::2], "blocks": blocks}[candidate.recompute],
    )


@pytest.fixture(scope="module")
def everything(model, batch):
    """Every candidate for 4 ranks that can be planned: (candidate, options, trace, times, seconds, peak)."""
    traces = {size: record(model, (batch[:size],)) for size in (1, 2, 4)}
    found = []
    sharded = {size: rewrite(trace, choose(trace, 2)) for size, trace in traces.items()}
    for candidate in candidates(4, 4, DEVICE, EVERYTHING):
        trace, times, rank = traces[candidate.microbatch_size], None, None
        chosen = options(candidate, repeated_blocks(trace))
        if candidate.tensor_parallel_degree == 2:
            rank = sharded[candidate.microbatch_size]
            trace, group = rank.trace, Group.of(candidate.mesh, Axis.TP, DEVICE)
            times = times_with_collectives(trace, rank.collectives, chosen.cost_model, group, DEVICE)
        try:
            place = StepSurroundings.on(
                candidate.mesh, (DEVICE,) * candidate.pipeline_parallel_degree, candidate.sharding
            )
            planned = plan_trace(Traced(trace, rank, times=times), chosen, prove=False, around=place)
        except PartitionError:
            continue
        plan = planned.plan
        rank = Traced(trace, sharded.get(candidate.microbatch_size) if times is not None else None)
        seconds = step_parts(rank, plan, planned.timeline, place, chosen.recompute)
        found.append((candidate, chosen, trace, times, seconds.total, max(rank_peaks(plan).values())))
    return found


def search(model, batch, **others):
    """All but context parallelism, until there is a proof."""
    kinds = [NOTHING, FULL]
    return smpc.search(
        model, batch, device=DEVICE, effort=math.inf, context_parallel_degrees=[1], shardings=kinds, **others
    )


@pytest.fixture(scope="module")
def free(model, batch):
    """A search in which memory does not matter, to its end."""
    return search(model, batch, world_size=4, memory_limit=10**9)


def test_every_candidate_has_all_ranks_and_the_whole_batch():
    found = list(candidates(12, 24, find_device("h100"), tried()))
    assert len(set(found)) == len(found)
    for candidate in found:
        assert candidate.pipeline_parallel_degree * candidate.data_parallel_degree == 12
        assert candidate.microbatches * candidate.data_parallel_degree * candidate.microbatch_size == 24
    assert {c.pipeline_parallel_degree for c in found} == {1, 2, 3, 4, 6, 12}
    assert {c.schedule for c in found if c.pipeline_parallel_degree == 1} == {"1f1b"}


def test_placements_are_told_apart_where_hosts_are():
    one_host = {c.placement_strategy for c in candidates(8, 8, find_device("h100"), tried())}
    two_hosts = {c.placement_strategy for c in candidates(16, 16, find_device("h100"), tried())}
    assert (one_host, two_hosts) == ({"cluster"}, {"cluster", "spread"})


def test_repeated_blocks_are_the_members_of_outermost_lists(model, batch):
    assert repeated_blocks(record(model, (batch[:1],))) == tuple(f"blocks.{i}" for i in range(6))
    assert repeated_blocks(record(nn.Linear(16, 16), (torch.zeros(1, 16),))) == ()


def test_bounds_hold_for_every_candidate(everything):
    assert len(everything) > 60
    for candidate, chosen, trace, times, seconds, peak in everything:
        costs = dataclasses.replace(chosen.cost_model, optimizer=find_optimizer("adam"))
        sample, plain = (
            EstimatedSample.of(trace, costs, chosen.recompute, times),
            EstimatedSample.of(trace, costs, (), times),
        )
        link = wire(DEVICE, candidate.mesh, Axis.PP)
        place = EstimatedPlace(link, StepSurroundings.on(candidate.mesh, (DEVICE,), Sharding.NONE), DEVICE, 4)
        assert least_step(sample, candidate, place) <= seconds * (1 + 1e-9), candidate
        again = EstimatedReruns.of(trace, chosen.recompute, times or node_times(trace, costs)).at_least(
            candidate.num_stages
        )
        assert least_step(plain, candidate, place, again) <= seconds * (1 + 1e-9), candidate
        assert least_peak(sample, candidate) <= peak, candidate


def test_a_small_microbatch_bounds_larger_ones_and_those_that_ranks_share(everything, model, batch):
    trace = record(model, (batch[:1],))
    for candidate, chosen, *_, seconds, _ in everything:
        least = least_times(trace, chosen.cost_model)
        shared = candidate.microbatch_size, candidate.tensor_parallel_degree
        one, path = least.of(*shared), least.path(*shared, is_split=candidate.schedule.startswith("zb"))
        assert one * candidate.microbatches / candidate.pipeline_parallel_degree <= seconds * (1 + 1e-9), candidate
        assert path <= seconds * (1 + 1e-9), candidate


def test_the_best_is_the_best_of_all(free, everything):
    found = free
    fastest = min(seconds for *_, seconds, _ in everything)
    assert fastest * (1 - 1e-9) <= found.best.step_time <= fastest * 1.0102
    assert any(result.step_is_bound for result in found.results)  # not everything was planned
    assert found.gap <= 0.01
    assert sum(result.ways for result in found.results) == len(list(candidates(4, 4, DEVICE, EVERYTHING)))
    known = {candidate: seconds for candidate, *_, seconds, _ in everything}
    for result in found.results[1:]:
        if result.verdict is Verdict.SLOWER and result.candidate in known:
            limit = known[result.candidate] * (1 + 1e-9)
            assert result.step_time <= limit, result


def test_tensor_parallel_ranks_are_neighbours_on_one_host_and_share_all_that_they_can(everything):
    assert tensor_degrees(12, find_device("h100")) == (1, 2, 4)
    assert tensor_degrees(4, DEVICE) == (1, 2)
    shared = [entry for entry in everything if entry[0].tensor_parallel_degree == 2]
    assert len(shared) > 20
    for candidate, _, trace, *_ in shared:
        assert candidate.pipeline_parallel_degree * candidate.data_parallel_degree == 2
        assert all(abs(a - b) == 1 for a, b in candidate.mesh.groups(Axis.TP))
        assert trace.state[0].spec.num_elements in (16 * 64, 16 * 64 // 2)


def test_a_search_takes_tensor_parallel_ranks_where_they_are_the_fastest(batch):
    # One sample cannot be shared by replicas nor make microbatches; two ranks that share every product halve the time.
    with torch.device("meta"):
        model = Stack(width=1024, depth=2)
    near = Device("near", {"float32": 1e12}, 1e12, 10**12, 2, Wire(1e13, 0.0), Wire(1e13, 0.0))
    found = smpc.search(model, batch[:1], world_size=2, device=near)
    alone = smpc.search(
        model, batch[:1], world_size=2, device=near, tensor_parallel_degrees=[1], context_parallel_degrees=[1]
    )
    assert found.best.candidate.tensor_parallel_degree == 2
    assert found.best.step_time < 0.75 * alone.best.step_time
    assert found.sharded is not None
    settings = Config.parse(found.config())
    assert (settings.tensor_parallel_degree, settings.tensor_parallel_plan) == (2, "auto")


class Classifier(nn.Module):
    """Returns its loss, and logits that are far larger than all else."""

    def __init__(self, vocabulary=4096):
        super().__init__()
        self.first, self.head = nn.Linear(16, 64), nn.Linear(64, vocabulary, bias=False)

    def forward(self, x, labels):
        logits = self.head(torch.relu(self.first(x)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.fixture(scope="module")
def classified():
    """A model and a batch whose logits are 8 MiB a sample."""
    with torch.device("meta"):
        return Classifier(), {"x": torch.zeros(2, 512, 16), "labels": torch.zeros(2, 512, dtype=torch.int64)}


@pytest.mark.parametrize("degrees", [{"tensor": 2}, {"context": 2}])
def test_logits_are_not_gathered_where_the_loss_is_all_that_is_trained_with(classified, degrees):
    model, batch = classified
    tensor, context = degrees.get("tensor", 1), degrees.get("context", 1)
    found = smpc.search(
        model,
        batch,
        world_size=2,
        device=DEVICE,
        effort=math.inf,
        tensor_parallel_degrees=[tensor],
        context_parallel_degrees=[context],
    )
    settings = Config.parse(found.config())
    assert settings.tensor_parallel_outputs == "loss"
    known = {name: getattr(found.options, name) for name in ("microbatches", "device", "optimizer", "memory_weight")}
    known |= {name: getattr(found.options, name) for name in ("fully_shard", "shard_optimizer_state")}
    known |= {
        "tensor_parallel_degree": tensor,
        "context_parallel_degree": context,
        "recompute": found.options.recompute,
    }
    by_hand = {
        outputs: compile_model(
            model,
            batch,
            pipeline_parallel_degree=1,
            tensor_parallel_outputs=outputs,
            memory_limit=10**9,
            warn=False,
            **known,
        ).plan
        for outputs in (("loss",), None)
    }
    peak = found.best.peak_bytes
    assert max(rank_peaks(by_hand["loss",]).values()) == peak
    assert max(rank_peaks(by_hand[None]).values()) > peak
    assert found.plan.schedule.step_time == pytest.approx(by_hand["loss",].schedule.step_time)


def test_the_best_with_a_loss_is_the_best_of_all_degrees(classified):
    model, batch = classified
    found = smpc.search(model, batch, world_size=4, device=DEVICE, effort=math.inf)
    alone = [
        smpc.search(
            model,
            batch,
            world_size=4,
            device=DEVICE,
            effort=math.inf,
            tensor_parallel_degrees=[tensor],
            context_parallel_degrees=[context],
        ).best.step_time
        for tensor, context in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2))
    ]
    assert found.best.step_time <= min(alone) * 1.0102


def test_what_cannot_be_split_is_rejected_with_the_reason():
    model, x = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)), torch.zeros(2, 3)
    found = smpc.search(model, x, world_size=2, device=DEVICE)
    wrong = [result for result in found.results if result.candidate.tensor_parallel_degree == 2]
    assert wrong
    assert {result.reason for result in wrong} == {"no parameter can be split over 2 tensor-parallel ranks"}


@pytest.mark.long
def test_a_limit_is_kept_and_costs_time(model, batch, free, everything):
    least = min(peak for *_, peak in everything)
    limit = int(1.2 * least)
    tight = search(model, batch, world_size=4, memory_limit=limit)
    assert max(rank_peaks(tight.plan).values()) <= limit < max(rank_peaks(free.plan).values())
    assert tight.best.step_time > free.best.step_time
    assert all(r.peak_bytes > limit for r in tight.results if r.verdict is Verdict.MEMORY)
    for candidate, *_, seconds, peak in everything:
        if peak <= limit:
            assert tight.best.step_time <= seconds * 1.0102, candidate


@pytest.mark.long
def test_the_least_memory_that_is_said_to_do_does(model, batch):
    simple = {"world_size": 2, "schedules": ["gpipe", "1f1b"]}
    with pytest.raises(MemoryLimitError, match="the least memory that would do is") as caught:
        search(model, batch[:2], **simple, memory_limit="1KB")
    least = caught.value.least_bytes
    assert caught.value.is_least
    assert search(model, batch[:2], **simple, memory_limit=least).best.peak_bytes <= least
    with pytest.raises(MemoryLimitError):
        search(model, batch[:2], **simple, memory_limit=least - 1)


@pytest.mark.long
def test_of_several_stages_on_a_rank_the_least_memory_is_known_but_not_proven(model, batch):
    """The largest stage is the smallest that it can be, which the fullest rank need not be."""
    with pytest.raises(MemoryLimitError, match="the least memory that is known to do is") as caught:
        search(model, batch[:2], world_size=2, memory_limit="1KB", schedules=["zb-v"])
    assert not caught.value.is_least
    least = caught.value.least_bytes
    assert search(model, batch[:2], world_size=2, memory_limit=least, schedules=["zb-v"]).best.peak_bytes <= least


def test_an_unproven_least_memory_is_said_to_be_known(model, batch, monkeypatch):
    monkeypatch.setattr(chain_limited, "_MOST_STARTS", 0)
    with pytest.raises(MemoryLimitError, match="the least memory that is known to do is") as caught:
        search(model, batch[:2], world_size=2, memory_limit="1KB")
    assert not caught.value.is_least


@pytest.mark.slow
def test_the_same_search_gives_the_same_bytes(model, batch, free):
    again = search(model, batch, world_size=4, memory_limit=10**9)
    assert again.to_json() == free.to_json()
    assert json.loads(free.to_json())["results"][0]["verdict"] == "best"


def test_what_was_found_is_a_configuration(free):
    config = Config.parse(free.config())
    assert config.microbatches == free.best.candidate.microbatches
    assert config.schedule == free.best.candidate.schedule


def test_progress_counts_up(model, batch):
    seen = []
    smpc.search(model, batch, world_size=2, device=DEVICE, show_progress=lambda *told: seen.append(told))
    assert any(phase.startswith("Searching") and "best" in phase for phase, _, _ in seen)
    assert all(0 <= done <= total for _, done, total in seen)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"world_size": 0}, "world_size: expected at least 1, found 0"),
        ({"world_size": 2, "schedules": ["1f2b"]}, "schedules: expected some of 1f1b"),
        ({"world_size": 2, "schedules": []}, "found none"),
        ({"world_size": 2, "tensor_parallel_degrees": [3]}, "tensor_parallel_degrees: expected numbers that divide"),
        ({"world_size": 2, "context_parallel_degrees": [0]}, "context_parallel_degrees: expected numbers that divide"),
        ({"world_size": 2, "expert_parallel_degrees": []}, "expert_parallel_degrees: expected some, found none"),
        ({"world_size": 2, "shardings": ["all"]}, "shardings: expected some of 'nothing', .*, found 'all'"),
        ({"world_size": 2, "effort": 0.0}, "effort: expected a number above 0, found 0"),
        ({"world_size": 2, "memory_limit": "much"}, "memory_limit: expected a size"),
        ({"world_size": 2, "optimizer": "adamm"}, "did you mean 'adam'?"),
    ],
)
def test_bad_settings(model, batch, changes, text):
    with pytest.raises(ConfigError, match=text.replace("?", r"\?")):
        smpc.search(model, batch, **changes)


def test_a_batch_that_replicas_cannot_share_goes_to_a_pipeline(model, batch):
    found = smpc.search(model, batch[:3], world_size=2, device=DEVICE)
    assert {result.candidate.data_parallel_degree for result in found.results} == {1}
    with pytest.raises(ConfigError, match="at least one sample"):
        smpc.search(model, batch[:0], world_size=2, device=DEVICE)


def test_a_search_that_ends_early_says_how_much_faster_others_may_be(model, batch, everything):
    found = smpc.search(model, batch, world_size=4, memory_limit=10**9, device=DEVICE, effort=0.01)
    fastest = min(seconds for *_, seconds, _ in everything)
    assert found.gap > 0.01
    assert found.best.step_time * (1 - found.gap) <= fastest * (1 + 1e-9)
    left = [result for result in found.results if result.verdict is Verdict.OPEN]
    assert left
    assert min(result.step_time for result in left) == pytest.approx(found.best.step_time * (1 - found.gap))


def test_context_parallel_ranks_are_searched(everything):
    # One long sequence: no replicas, no microbatches, and ranks of different hosts that cannot share a product.
    with torch.device("meta"):
        model = nn.Sequential(*(Block(256) for _ in range(3)))
    far = Device("far", {"float32": 1e12}, 1e12, 10**12, 1, Wire(1e13, 0.0), Wire(1e12, 0.0))
    found = smpc.search(model, torch.zeros(1, 4096, 256, device="meta"), world_size=2, device=far)
    assert found.best.candidate.context_parallel_degree == 2
    assert found.context is not None
    assert Config.parse(found.config()).context_parallel_degree == 2
    options = PipelineOptions(1, 1, device=far, context_parallel_degree=2, memory_weight=0.0)
    assert options.context_parallel_degree == found.options.context_parallel_degree


def test_experts_are_divided_beside_weights_and_sequences():
    found = {
        (shape.tensor_parallel_degree, shape.context_parallel_degree, shape.mesh.size(Axis.EP))
        for shape in shapes(8, 8, DEVICE, tried((1, 2), context=(1, 2), expert=(1, 2)))
    }
    assert found == set(itertools.product((1, 2), repeat=3))


def test_modules_to_compute_again_are_blocks_some_of_them_and_parts(model, batch):
    trace = record(model, (batch[:1],))
    found = Again.of(trace, [1.0 if node.flops else 0.0 for node in trace.nodes])
    assert found.names == AGAIN
    assert found["half the blocks"] == ("blocks.0", "blocks.2", "blocks.4")


@pytest.mark.long
def test_schedules_of_too_many_actions_are_left_out():
    """A search ended with the error for one of them, though others fit."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(300)))
    once = {"tensor_parallel_degrees": [1], "context_parallel_degrees": [1], "shardings": [NOTHING], "effort": 0.1}
    found = smpc.search(model, torch.zeros(1024, 4), world_size=128, device=DEVICE, schedules=["1f1b", "zb-v"], **once)
    most = max(result.candidate.num_stages * result.candidate.microbatches for result in found.results)
    assert most <= MAX_STEPS < 2 * 128 * 1024


@pytest.mark.long
def test_without_a_plan_the_budget_goes_to_what_needs_the_least_memory(model, batch, everything):
    limit = int(1.05 * min(peak for *_, peak in everything))
    found = smpc.search(model, batch, world_size=4, memory_limit=limit, device=DEVICE, effort=1e-6)
    fastest = min(seconds for *_, seconds, peak in everything if peak <= limit)
    assert found.best.peak_bytes <= limit
    assert found.best.step_time * (1 - found.gap) <= fastest * (1 + 1e-9)


def test_the_first_shape_that_is_looked_at_gives_a_plan(model, batch):
    seen = []
    smpc.search(model, batch, world_size=4, device=DEVICE, show_progress=lambda phase, done, total: seen.append(phase))
    without = [phase for phase in seen if phase.startswith("Searching") and "best" not in phase]
    assert len(without) == 3  # before the first shape, while it is looked at, and before its plan


@pytest.mark.long
def test_how_far_guesses_are_off_is_not_counted_twice(model, batch, monkeypatch):
    """What is learned is a planned peak over a guessed one. It was multiplied by what had been learned before: 2.4, 5.9, 24, 36."""
    once, learned = _Searcher._try, []

    def attempt(self, waiting, candidate):
        known = dict(self.fullness)
        once(self, waiting, candidate)
        look = self.forecast.guessed(candidate, self.forecast.place(waiting.shape), self.forecast.sample(waiting.shape))
        for key, factor in self.fullness.items():
            if factor != known.get(key):
                learned.append((factor, self.results[-1].peak_bytes / look.peak))

    monkeypatch.setattr(_Searcher, "_try", attempt)
    search(model, batch, world_size=4)
    assert len(learned) > 2
    for factor, expected in learned:
        assert factor == pytest.approx(expected)


def test_context_ranks_divide_parameters_without_replicas_as_smpc_compile_lets_them():
    """Each of them holds all parameters: long sequences on one node did not fit, or were slower, as nothing was ever divided."""
    for replicas, context, tried in ((1, 8, tuple(Sharding)), (2, 4, tuple(Sharding)), (1, 1, (Sharding.NONE,))):
        shape = Shape(1, replicas, "cluster", 1, 1, 1, context, 1)
        options = PipelineOptions(1, data_parallel_degree=replicas, context_parallel_degree=context, fully_shard=True)
        assert shardings(shape, tuple(Sharding)) == tried
        assert (options.num_shards > 1) == (Sharding.FULL in tried)
