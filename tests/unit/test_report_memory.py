"""Memory curves: against counting the microbatches in flight at sampled times."""

import pytest
from report_cases import compilation

from smpc.report.memory import memory_curves, resident_bytes


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
def test_activations_stay_until_the_deferred_part_of_a_backward(schedule):
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
                ended = sum(e.action.op == ("W" if split else "B") and e.end <= time for e in stage_events)
                held += (started - ended) * stage.activation_bytes_per_microbatch
            assert _at(curve, time) == curve.static_bytes + held


def test_curve_has_no_dips_of_no_length():
    found = compilation(4, 9)
    makespan = found.plan.schedule.step_time
    for curve in memory_curves(found.plan, found.timeline()):
        for (start, before), (end, low), (next_start, after) in zip(
            curve.points, curve.points[1:], curve.points[2:], strict=False
        ):
            assert not (low < before and low < after and next_start - end < 1e-9 * makespan), (start, end)
