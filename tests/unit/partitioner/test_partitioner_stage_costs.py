"""Sums beyond 64 bits: against Python's integers and fractions, which do not overflow."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import networkx as nx
import numpy as np
import pytest
import torch
from drawn import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from smpc.compile import PipelineOptions, Traced, compile_model, plan_trace
from smpc.errors import PartitionError
from smpc.partitioner.costs.node_costs import NodeTimes, node_times
from smpc.partitioner.graph.plan import ScheduleSummary
from smpc.partitioner.planner import solve_partition
from smpc.partitioner.solvers.bottleneck_bound import graph_bound
from smpc.partitioner.solvers.chain import ChainProblem, solve_chain
from smpc.partitioner.solvers.ilp import PlacementProblem, solve_placement
from smpc.partitioner.solvers.prefix_lattice import place
from smpc.partitioner.stage_costs import LARGEST, UNITS_PER_SECOND, Scale, SharedItem, Units, stage_costs, whole_times
from smpc.tracer import record

NEARLY = 1e-12  # double precision, a few roundings


def exact_costs(units, weight, in_flight, stage_of):
    """The definition of a stage's cost in fractions, and the most bytes that a sum has."""
    static_total = sum(units.static_bytes) + sum(item.static_bytes for item in units.shared)
    held_total = sum(units.activation_bytes) + sum(item.activation_bytes for item in units.shared)
    total_time, w = max(1, sum(units.time)), Fraction(weight)
    total_memory = max(1, static_total - (-held_total * sum(in_flight) // len(in_flight)))
    costs = []
    for stage, k in enumerate(in_flight):
        mine = {u for u, s in enumerate(stage_of) if s == stage}
        items = [item for item in units.shared if mine & set(item.users)]
        static = sum(units.static_bytes[u] for u in mine) + sum(item.static_bytes for item in items)
        held = sum(units.activation_bytes[u] for u in mine) + sum(item.activation_bytes for item in items)
        time = Fraction(sum(units.time[u] for u in mine), total_time)
        costs.append((1 - w) * time + w * Fraction(static + k * held, total_memory))
    return costs


def fits(columns, shared, in_flight):
    """Whether all sums are below 2^63."""
    time, static, held = (sum(column) for column in columns)
    static += sum(item.static_bytes for item in shared)
    held += sum(item.activation_bytes for item in shared)
    return max(time, static, held, static + max(in_flight) * held) <= LARGEST


@st.composite
def large(draw):
    """Whole numbers around every power of two up to 2^63."""
    n, num_stages = draw(st.integers(3, 6)), draw(st.integers(2, 3))
    number = st.builds(lambda power, more: 2**power + more, st.integers(0, 62), st.integers(-1, 9))
    columns = [tuple(draw(st.lists(number, min_size=n, max_size=n))) for _ in range(3)]
    members = st.sets(st.integers(0, n - 1), min_size=1, max_size=3).map(lambda found: tuple(sorted(found)))
    shared = tuple(draw(st.lists(st.builds(SharedItem, members, number, number), max_size=2)))
    in_flight = tuple(draw(st.lists(st.integers(1, 5), min_size=num_stages, max_size=num_stages)))
    pairs = list(itertools.combinations(range(n), 2))
    edges = sorted(draw(st.sets(st.sampled_from(pairs), max_size=6)))
    return columns, shared, in_flight, draw(st.sampled_from([0.0, 0.5, 1.0])), edges


@settings(max_examples=examples(40), deadline=None)
@given(large())
@example(  # the integer program "proved" a bound 4e-8 above the optimum
    (
        [(1,) * 6, (1,) * 6, (1, 1, 1, 1, 1, 2**30)],
        (SharedItem((0,), 1, 2**8),),
        (1, 3),
        0.5,
        [],
    )
)
def test_every_solver_agrees_with_fractions_or_refuses(case):
    columns, shared, in_flight, weight, edges = case
    if not fits(columns, shared, in_flight):
        with pytest.raises(PartitionError, match=r"expected less than 2\^63 "):
            Scale.of(Units(*columns, shared), in_flight, weight)
        return
    units = Units(*columns, shared)
    scale, stages = Scale.of(units, in_flight, weight), range(len(in_flight))
    placed = [
        stage_of for stage_of in itertools.product(stages, repeat=len(units)) if len({*stage_of}) == len(in_flight)
    ]
    best = {stage_of: max(exact_costs(units, weight, in_flight, stage_of)) for stage_of in placed}
    for stage_of, bottleneck in best.items():
        assert stage_costs(units, scale, in_flight, stage_of).max() == pytest.approx(float(bottleneck), rel=NEARLY)

    chain = solve_chain(ChainProblem(units, scale, in_flight), len(in_flight))
    rising = [bottleneck for stage_of, bottleneck in best.items() if sorted(stage_of) == list(stage_of)]
    assert chain.optimum == pytest.approx(float(min(rising)), rel=NEARLY)

    dag = nx.DiGraph()
    dag.add_nodes_from(range(len(units)))
    dag.add_edges_from(edges)
    optimum = float(min(best[row] for row in placed if all(row[u] <= row[w] for u, w in edges)))
    assert graph_bound(units, dag, scale, in_flight, 0.0, 2 * optimum) <= optimum * (1 + NEARLY)
    found = place(units, dag, scale, in_flight, 0.0, 2 * optimum)
    assert found is not None
    assert found.bottleneck == pytest.approx(optimum, rel=1e-3)
    program = solve_placement(PlacementProblem(units, scale, in_flight, tuple(edges)))
    assert program.bottleneck == pytest.approx(optimum, rel=1e-5)
    assert program.lower_bound <= optimum * (1 + NEARLY)


@settings(max_examples=examples(200))
@given(st.lists(st.floats(0.0, 1e300), min_size=1, max_size=8))
@example([LARGEST / 1e15])
@example([2.0**62 / 1e15, 2.0**62 / 1e15])
@example([9223.0, 0.3])
@example([9223.0, 0.4])
def test_the_unit_of_times_is_the_first_in_which_they_add_up(seconds):
    def rounded(per_second):
        return [round(float(np.float64(value) * per_second)) for value in seconds]

    possible = [
        rounded(per_second)
        for per_second in UNITS_PER_SECOND
        if max(seconds) * per_second < 1e30 and sum(rounded(per_second)) <= LARGEST
    ]
    if not possible:
        with pytest.raises(PartitionError, match=r"less than 9.22e\+18 seconds in all"):
            whole_times(np.asarray(seconds))
        return
    assert whole_times(np.asarray(seconds)).tolist() == possible[0]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0])
def test_times_that_are_no_times(value):
    with pytest.raises(PartitionError, match=f"expected times of operations that are finite.*found {value} seconds"):
        whole_times(np.asarray([1.0, value]))


def layers():
    widths = (8, 64, 8, 32, 8, 8, 48, 8)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
    return record(model, (torch.zeros(4, 8),))


@pytest.mark.parametrize("seconds", [1e3, 9e3, 1e4, 1e7, 1e13, 1e18])
@pytest.mark.parametrize(
    "options", [PipelineOptions(3, 4, memory_weight=0.0), PipelineOptions(2, 2, memory_limit="1MB")]
)
def test_a_plan_does_not_depend_on_how_long_all_takes(options, seconds):
    trace = layers()
    times = node_times(trace, options.cost_model)
    longer = seconds / float((times.forward + times.backward).sum())
    # Not powers of two, so that rounding to whole numbers differs in every node, by less than the tolerance.
    slower = NodeTimes(times.forward * longer, times.backward * longer)
    scaled = plan_trace(Traced(trace, times=slower), options).plan
    plan = plan_trace(Traced(trace, times=times), options).plan
    assert scaled.assignment == plan.assignment
    assert scaled.objective.bottleneck == pytest.approx(plan.objective.bottleneck, rel=1e-5)
    assert scaled.objective.lower_bound == pytest.approx(plan.objective.lower_bound, rel=1e-5)
    assert sum(stage.forward_time + stage.backward_time for stage in scaled.stages) == pytest.approx(seconds)


def huge_llama(num_layers, batch):
    """Layers of Llama 3.1 405B, and a batch of sequences of 8192 tokens; nothing of it is allocated."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=num_layers,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(batch, 8192, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


def check_huge(plan):
    costs = [stage.cost for stage in plan.stages]
    times = [stage.forward_time + stage.backward_time for stage in plan.stages]
    assert sum(times) > LARGEST / 1e15
    assert costs == pytest.approx([time / sum(times) for time in times])
    assert plan.objective.bottleneck == max(costs)
    assert 1 / len(costs) <= plan.objective.bottleneck / (1 + 1e-9) <= plan.objective.lower_bound * 1.01


def test_hours_in_one_step():
    """A sum of femtoseconds overflowed at 2.6 hours: stages of negative time, "proven" best."""
    plan = compile_model(
        *huge_llama(3, 2048 * 126 // 3), pipeline_parallel_degree=3, memory_weight=0.0, warn=False
    ).plan
    check_huge(plan)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 8])
def test_hours_in_one_step_of_405_billion_parameters(num_stages):
    model, inputs = huge_llama(126, 2048)
    check_huge(compile_model(model, inputs, pipeline_parallel_degree=num_stages, memory_weight=0.0, warn=False).plan)


def test_more_bytes_than_can_be_added_up():
    model, inputs = huge_llama(2, 2**31)
    with pytest.raises(PartitionError, match=r"expected less than 2\^63 bytes .*found .*microbatches smaller"):
        compile_model(model, inputs, pipeline_parallel_degree=2, microbatches=2)


def test_many_microbatches_of_many_bytes():
    with pytest.raises(PartitionError, match=r"expected less than 2\^63 bytes with \d+ microbatches in flight, found"):
        solve_partition(layers(), num_stages=2, in_flight=(2**55, 1))
    summary = ScheduleSummary("simple", 2**50, 2**50, 0.0, 0.0)
    with pytest.raises(PartitionError, match=r"expected less than 2\^63 bytes at the peak of a rank, with \d+ micro"):
        solve_partition(layers(), num_stages=2, in_flight=(1, 1), schedule=summary, memory_limit=1)


def test_a_device_that_takes_for_ever():
    trace = layers()
    slow = replace(PipelineOptions(2).devices[0], peak_flops={"float32": 1e-320})
    with pytest.raises(PartitionError, match="finite and not negative, found inf seconds: check the FLOP/s"):
        plan_trace(Traced(trace), PipelineOptions(2, device=slow))


@settings(max_examples=examples(200), deadline=None)
@given(
    st.integers(0, 2**60), st.integers(0, 2**60), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([(), (3.0, 0.7)])
)
def test_one_stage_costs_what_it_costs_among_others(time, memory, weight, speeds):
    scale = Scale(weight, 2**59 + 1, 2.0**58 + 3, speeds, (memory, max(0, memory - 1)))
    many = [float(scale.cost_on(stage, np.asarray([time]), np.asarray([memory]))[0]) for stage in (0, 1)]
    assert [scale.cost_of_one(stage, time, memory) for stage in (0, 1)] == many
