"""Memory curves: against counting the microbatches in flight at sampled times."""

import pytest
import torch
from report_cases import compilation
from torch import nn

from smpc.compile import compile_model
from smpc.report.memory_curve import (
    gradients_at_peak,
    memory_curves,
    microbatch_bytes,
    reported_working_bytes,
    resident_bytes,
)
from smpc.report.tables import memory_table


def _at(curve, time):
    return [num_bytes for start, num_bytes in curve.points if start <= time][-1]


@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
@pytest.mark.parametrize("num_microbatches", [1, 4, 9])
def test_curve_counts_microbatches_between_forward_and_backward(pipeline, num_microbatches):
    found = compilation(3, num_microbatches, pipeline)
    timeline = found.timeline()
    curves = memory_curves(found.plan, timeline)
    assert [curve.rank for curve in curves] == [0, 1, 2]
    for curve, stage in zip(curves, found.plan.stages, strict=True):
        assert curve.peak_bytes == stage.peak_memory_bytes
        assert curve.static_bytes == resident_bytes(stage)
        assert curve.points[-1][1] == curve.static_bytes
        assert [time for time, _ in curve.points] == sorted(time for time, _ in curve.points)
        own = [event for event in timeline.events if event.rank == curve.rank]
        for event in own:
            time = (event.start + event.end) / 2
            started = sum(e.action.op == "F" and e.start <= time for e in own)
            ended = sum(e.action.op == "B" and e.end <= time for e in own)
            expected = curve.static_bytes + (started - ended) * stage.activation_bytes_per_microbatch
            assert _at(curve, time) == expected


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "interleaved-1f1b"])
def test_what_the_deferred_part_of_a_backward_reads_stays_until_then(schedule):
    found = compilation(2, 4, schedule=schedule)
    timeline = found.timeline()
    split = any(event.action.op == "W" for event in timeline.events)
    assert split == schedule.startswith("zb")
    for curve in memory_curves(found.plan, timeline):
        own = [event for event in timeline.events if event.rank == curve.rank]
        for event in own:
            time = (event.start + event.end) / 2
            held = 0
            for stage in found.plan.stages:
                stage_events = [e for e in own if e.action.stage == stage.index]
                started = sum(e.action.op == "F" and e.start <= time for e in stage_events)
                back, ended = (sum(e.action.op == op and e.end <= time for e in stage_events) for op in "BW")
                held += (started - back) * stage.activation_bytes_per_microbatch
                held += (back - ended) * stage.deferred_bytes_per_microbatch
            assert _at(curve, time) == curve.static_bytes + held


def test_curve_has_no_dips_of_no_length():
    found = compilation(4, 9)
    makespan = found.plan.schedule.step_time
    for curve in memory_curves(found.plan, found.timeline()):
        for (start, before), (end, low), (next_start, after) in zip(
            curve.points, curve.points[1:], curve.points[2:], strict=False
        ):
            assert not (low < before and low < after and next_start - end < 1e-9 * makespan), (start, end)


def deep(**options):
    """Layers whose activations are larger than their gradients: most is held before there is any gradient of a parameter."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
        inputs = torch.zeros(512 * options.get("microbatches", 1), 256)
    return compile_model(model, inputs, optimizer="sgd", warn=False, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_degree": 1},
        {"pipeline_parallel_degree": 2},
        {"pipeline_parallel_degree": 2, "microbatches": 4},
        {"pipeline_parallel_degree": 2, "microbatches": 8, "recompute": ("*",), "offload_activations": True},
        {
            "pipeline_parallel_degree": 2,
            "microbatches": 8,
            "recompute": ("?",),
            "offload_activations": True,
            "pipeline": "simple",
        },
        {"pipeline_parallel_degree": 2, "microbatches": 8, "schedule": "zb-h1"},
        {"pipeline_parallel_degree": 4, "microbatches": 8, "schedule": "zb-h2"},
        {"pipeline_parallel_degree": 2, "virtual_pipeline_degree": 2, "microbatches": 8, "schedule": "zb-v"},
    ],
)
def test_nothing_is_ever_less_than_none(options):
    """Working memory was shown as -24.0 MiB, and of a rank that offloads activations, its weights."""
    found = deep(**options)
    for stage in found.plan.stages:
        parts = (stage.parameter_bytes, gradients_at_peak(stage), stage.optimizer_bytes, stage.buffer_bytes)
        assert min(*parts, reported_working_bytes(stage), microbatch_bytes(stage), resident_bytes(stage)) >= 0
        if not stage.offloaded_bytes_per_microbatch:
            held = stage.num_in_flight * stage.activation_bytes_per_microbatch
            held = held if stage.in_flight_bytes is None else stage.in_flight_bytes
            assert sum(parts) + reported_working_bytes(stage) + held == stage.peak_memory_bytes
    for row in (*memory_table(found.plan).rows, memory_table(found.plan).totals):
        assert not any(cell.startswith("-") for cell in row)
    for curve in memory_curves(found.plan, found.timeline()):
        assert min(curve.parameter_bytes, curve.gradient_bytes, curve.optimizer_bytes, curve.other_bytes) >= 0
        peaks = [stage.peak_memory_bytes for stage in found.plan.stages if stage.rank == curve.rank]
        assert curve.peak_bytes == sum(peaks) or (len(peaks) > 1 and curve.peak_bytes < sum(peaks))


def test_a_plan_of_which_working_memory_was_negative():
    (stage,) = deep(pipeline_parallel_degree=1).plan.stages
    assert stage.communication_bytes + stage.transient_bytes < 0
    assert gradients_at_peak(stage) < stage.gradient_bytes
    assert reported_working_bytes(stage) == 0
