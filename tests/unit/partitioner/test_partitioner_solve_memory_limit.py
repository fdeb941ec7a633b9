"""Memory limits: the solvers against brute force, the bound against the prediction, and what is said when nothing fits."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
import torch
import zoo
from drawn import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from smpc.compile import compile_model
from smpc.errors import ConfigError, MemoryLimitError, PartitionError
from smpc.executor.program.interpreter import DEFAULT_WINDOW
from smpc.partitioner import planner as limit_module
from smpc.partitioner.costs.device_file import find_device
from smpc.partitioner.costs.named_optimizers import ADAM, find_optimizer
from smpc.partitioner.costs.node_costs import CostModel
from smpc.partitioner.graph.plan import ScheduleSummary
from smpc.partitioner.memory.peak import RECEIVE_WINDOW, Resident
from smpc.partitioner.planner import plan_from_assignment
from smpc.partitioner.solvers import chain_limited
from smpc.partitioner.solvers.chain_limited import LimitedChain, fits, least_peak, solve_limited
from smpc.partitioner.solvers.coarsen import analyse, chain_problem, keep_regions_whole
from smpc.partitioner.solvers.ilp import PlacementProblem, solve_placement
from smpc.partitioner.solvers.peak_bound import PeakRows
from smpc.partitioner.stage_costs import Scale, Units, stage_costs
from smpc.tracer import record


class Layers(nn.Module):
    """Layers of different widths, and a skip connection over all but the first."""

    def __init__(self, widths):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16)) for width in widths
        )

    def forward(self, x):
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        return (x + first).square().mean()


def limited_chain(
    widths, in_flight, num_microbatches, device="cpu", optimizer=ADAM, dtype=torch.float32, resident=None
):
    """With `resident`, layers are computed again, and what they read is offloaded."""
    cost_model = CostModel.of(find_device(device), len(in_flight), optimizer)
    trace = record(Layers(widths).to(dtype), (torch.zeros(64, 16, dtype=dtype),))
    analysis = analyse(trace, cost_model, None, ("layers.*",) if resident else ())
    if resident:
        analysis = keep_regions_whole(analysis, len(in_flight))
    graph, units = analysis.graph, analysis.units
    scale = Scale.of(units, in_flight, 0.0)
    problem = chain_problem(graph, analysis.clusters, analysis.recomputable, units, scale, in_flight)
    recomputable = tuple(analysis.recomputable)
    regions = analysis.checkpoints.regions
    peaks = PeakRows(
        graph, analysis.cost_model, analysis.times, recomputable, in_flight, num_microbatches, regions, resident
    )
    return analysis, problem, LimitedChain.of(problem, peaks, len(in_flight))


def partitions(problem, chain):
    """Every contiguous partition: (bottleneck, largest peak)."""
    n, in_flight = len(problem.units), problem.in_flight
    allowed = [p for p in range(1, n) if p not in problem.forbidden]
    for cuts in itertools.combinations(allowed, len(in_flight) - 1):
        ends = (0, *cuts, n)
        stage_of = [s for s, (a, b) in enumerate(itertools.pairwise(ends)) for _ in range(a, b)]
        bottleneck = float(stage_costs(problem.units, problem.scale, in_flight, stage_of).max())
        peak = max(int(chain.peaks.row(a, b, s)[-1]) for s, (a, b) in enumerate(itertools.pairwise(ends)))
        yield bottleneck, peak


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize(("in_flight", "num_microbatches"), [((2, 1), 4), ((3, 3, 3), 3), ((3, 2, 1), 8)])
@pytest.mark.parametrize("widths", [(8, 64, 8, 8, 256), (128, 8, 8, 8, 8), (16, 16, 16, 16)])
def test_limited_solutions_equal_brute_force(widths, in_flight, num_microbatches, offloads):
    resident = [Resident(1, 1)] * len(in_flight) if offloads else None
    _, problem, chain = limited_chain(widths, in_flight, num_microbatches, resident=resident)
    found = list(partitions(problem, chain))
    least = min(peak for _, peak in found)
    assert least_peak(chain)[1:] == (least, True)
    most = min(found)[1]
    for limit in sorted({least, least + (most - least) // 3, (least + most) // 2, most}):
        best = min(bottleneck for bottleneck, peak in found if peak <= limit)
        solution = solve_limited(chain, limit, tolerance=0.0)
        assert solution is not None
        assert solution.bottleneck == solution.optimum == best
        assert fits(chain, limit)
    assert solve_limited(chain, least - 1, tolerance=0.0) is None
    assert not fits(chain, least - 1)


def test_a_long_chain_says_that_its_least_peak_is_not_proven(monkeypatch):
    """A report of 64 stages of 7,700 operations took 150 s of a core, most of them to prove the least peak of a plan that did not fit."""
    _, problem, chain = limited_chain((8, 64, 8, 8, 256), (3, 3, 3), 3)
    least = min(peak for _, peak in partitions(problem, chain))
    monkeypatch.setattr(chain_limited, "_MOST_STARTS", 18)
    solution, peak, is_proven = least_peak(chain)
    ends = (0, *solution.cuts, len(problem.units))
    assert peak == max(int(chain.peaks.row(a, b, s)[-1]) for s, (a, b) in enumerate(itertools.pairwise(ends)))
    assert least <= peak <= 1.3 * least
    assert not is_proven
    assert fits(chain, peak)
    assert fits(chain, least - 1) is None


@pytest.mark.matrix(3)
@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize(("in_flight", "num_microbatches"), [((2, 1), 4), ((3, 3, 3), 3)])
@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        (ADAM, torch.float32),
        (ADAM.fully_sharded(2), torch.float32),
        (find_optimizer("adamw-fp32-master-wide-grad").fully_sharded(4), torch.bfloat16),
    ],
)
def test_the_bound_is_the_prediction_but_for_little(in_flight, num_microbatches, device, optimizer, dtype):
    analysis, _, chain = limited_chain((8, 64, 8, 128), in_flight, num_microbatches, device, optimizer, dtype)
    most = (
        1.2 if optimizer.wide_grad else 1.15
    )  # the bound has wide gradients from the start, also where they come later
    names = [analysis.graph.trace.nodes[i].name for i in analysis.graph.compute.tolist()]
    schedule = compile_model(nn.Linear(2, 2), torch.zeros(num_microbatches, 2), pipeline_parallel_degree=1,
                             microbatches=num_microbatches).plan.schedule  # fmt: skip
    for cuts in itertools.combinations(range(1, len(names)), len(in_flight) - 1):
        ends = (0, *cuts, len(names))
        assignment = {names[r]: s for s, (a, b) in enumerate(itertools.pairwise(ends)) for r in range(a, b)}
        plan = plan_from_assignment(
            analysis.graph.trace,
            assignment,
            num_stages=len(in_flight),
            in_flight=in_flight,
            cost_model=analysis.cost_model,
            schedule=schedule,
        )
        for stage, (a, b) in zip(plan.stages, itertools.pairwise(ends), strict=True):
            bound = int(chain.peaks.row(a, b, stage.index)[-1])
            assert stage.peak_memory_bytes <= bound <= most * stage.peak_memory_bytes


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize(("in_flight", "num_microbatches"), [((12, 12), 12), ((6, 4), 12)])
def test_the_bound_counts_what_is_offloaded(in_flight, num_microbatches, device):
    resident = [Resident(2, 2), Resident(3, 1)]
    analysis, problem, chain = limited_chain((8, 64, 8, 128), in_flight, num_microbatches, device, resident=resident)
    trace, count = analysis.graph.trace, len(problem.units)
    names = [trace.nodes[i].name for i in analysis.graph.compute.tolist()]
    inside = {i for region in analysis.checkpoints.regions for i in range(region.first + 1, region.last)}
    allowed = [cut for cut in range(1, count) if int(analysis.graph.compute[cut]) not in inside]
    assert len(allowed) >= 3
    summary = ScheduleSummary("1f1b", num_microbatches, max(in_flight), 0.0, 0.0)
    moved = 0
    for cut in allowed:
        asked = {"num_stages": 2, "in_flight": in_flight, "cost_model": analysis.cost_model, "schedule": summary}
        assignment = {name: int(rank >= cut) for rank, name in enumerate(names)}
        plan, plain = (
            plan_from_assignment(trace, assignment, **asked, recompute=("layers.*",), resident=found)
            for found in (resident, None)
        )
        for stage, before, (a, b) in zip(plan.stages, plain.stages, ((0, cut), (cut, count)), strict=True):
            bound = int(chain.peaks.row(a, b, stage.index)[-1])
            assert stage.peak_memory_bytes <= bound <= 1.15 * stage.peak_memory_bytes
            moved += stage.peak_memory_bytes < 0.9 * before.peak_memory_bytes
    assert moved


def test_the_window_is_the_executors():
    assert RECEIVE_WINDOW == DEFAULT_WINDOW


def plan_of(name, limit, **settings):
    model, batch = zoo.build(name)
    options = {"pipeline_parallel_degree": 2, "microbatches": 8, "memory_weight": 0.0, "device": "cpu", **settings}
    return compile_model(model, batch, memory_limit=limit, **options).plan


def peak_of(plan):
    return max(stage.peak_memory_bytes for stage in plan.stages)


def stated(text, pattern):
    found = re.search(pattern + r" ([\d.]+) (KiB|MiB|GiB)", text)
    assert found, text
    return math.ceil(float(found[1]) * 1024 ** (1 + ("KiB", "MiB", "GiB").index(found[2])))


@pytest.mark.matrix(2)
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.slow), "unet"])
def test_the_memory_that_is_said_to_do_does(name, pipeline):
    with pytest.raises(PartitionError) as caught:
        plan_of(name, 1000, pipeline=pipeline)
    text = str(caught.value)
    assert "\n" not in text
    assert "expected a plan within 1000 B for each rank, found none with 2 stages" in text
    least = stated(text, "least that would do is")
    plan = plan_of(name, least, pipeline=pipeline)
    assert peak_of(plan) <= least == plan.objective.memory_limit
    with pytest.raises(PartitionError, match="the least that would do is"):
        plan_of(name, int(0.97 * least), pipeline=pipeline)


def test_a_limit_holds_where_blocks_gather_their_own_parameters():
    """Solvers take parameters in parts to be whole, which is right for the stages of a pipeline alone."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    options = {"pipeline_parallel_degree": 1, "data_parallel_degree": 4, "fully_shard": True, "device": "cpu"}

    def peak(limit=None):
        return peak_of(compile_model(model, torch.zeros(4, 1024), memory_limit=limit, **options).plan)

    free, parameters = peak(), 8 * 4 * 1024 * 1025
    assert (
        free < (1 + 1) * parameters + parameters
    )  # a part of all, whole ones, two of each in parts, gradients of one block
    assert peak(free) == free
    with pytest.raises(MemoryLimitError) as caught:
        peak(free - 1)
    assert caught.value.least_bytes == free


@pytest.mark.long
def test_the_number_of_stages_that_is_said_to_do_does():
    limit = int(0.6 * peak_of(plan_of("gpt2", None)))
    with pytest.raises(PartitionError) as caught:
        plan_of("gpt2", limit)
    found = re.search(r"fewest stages that would do are (\d+)", str(caught.value))
    assert found, str(caught.value)
    fewest = int(found[1])
    assert fewest > 2
    assert peak_of(plan_of("gpt2", limit, pipeline_parallel_degree=fewest)) <= limit
    with pytest.raises(PartitionError):
        plan_of("gpt2", limit, pipeline_parallel_degree=fewest - 1)


@pytest.mark.long
def test_a_limit_that_does_not_bind_changes_nothing():
    free, limited = plan_of("llama", None), plan_of("llama", "80GB")
    assert limited.assignment == free.assignment
    assert limited.objective.memory_limit == 80 * 10**9


def test_a_limit_costs_time_and_saves_memory():
    free = plan_of("unet", None, pipeline_parallel_degree=4)
    limited = plan_of("unet", int(0.9 * peak_of(free)), pipeline_parallel_degree=4)
    assert peak_of(limited) <= 0.9 * peak_of(free)
    assert limited.objective.bottleneck > free.objective.bottleneck


def test_the_integer_program_respects_the_limit():
    units = Units((4, 3, 2, 1), (10, 1, 1, 1), (0, 0, 0, 0))
    scale = Scale.of(units, (1, 1), 0.0)
    problem = PlacementProblem(units, scale, (1, 1), ())
    assert solve_placement(problem).bottleneck == pytest.approx(0.5)
    limited = problem.limited(12, (2, 0, 0, 5))
    best = min(
        float(stage_costs(units, scale, (1, 1), placed).max())
        for placed in itertools.product((0, 1), repeat=4)
        if len(set(placed)) == 2
        and all(
            sum(units.static_bytes[u] for u in range(4) if placed[u] == s)
            + max((limited.working[u] for u in range(4) if placed[u] == s), default=0)
            <= 12
            for s in (0, 1)
        )
    )
    found = solve_placement(limited)
    assert found.bottleneck == pytest.approx(best)
    assert best > 0.5
    with pytest.raises(PartitionError, match="found none"):
        solve_placement(problem.limited(9, (0, 0, 0, 0)))


@pytest.mark.parametrize("limit", ["80 gigs", "-5GB", 0, "nan", "", "GB"])
def test_bad_limits(limit):
    with pytest.raises(ConfigError, match="memory_limit: expected a size such as 80GB"):
        plan_of("gpt2", limit)


@settings(max_examples=examples(300))
@given(st.integers(1, 2**50), st.integers(0, 2**50), st.integers(-2, 2))
def test_bytes_of_a_smaller_rank_fit_scaled_if_and_only_if_they_fit(limit, more, off):
    """Ranks of 49 and 1000 bytes: 49 of 49 could become 1001 of 1000."""
    scaled = limit_module._scaled_to_limit(np.asarray([max(0, limit + off)]), limit, limit + more)
    assert (int(scaled[0]) <= limit + more) == (max(0, limit + off) <= limit)
