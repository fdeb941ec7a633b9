"""Predictions from a plan alone: the same as those made with the model at hand."""

import dataclasses

import pytest
from report_cases import compilation

from smpc.errors import ConfigError
from smpc.partitioner.graph.plan import Plan
from smpc.report.predict import plan_timeline, predict


@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
def test_a_saved_plan_has_the_same_timeline(pipeline):
    found = compilation(3, 4, pipeline)
    plan = Plan.from_json(found.plan.to_json())
    assert plan_timeline(plan) == found.timeline()
    assert predict(plan) == found.plan


@pytest.mark.parametrize(
    ("num_microbatches", "pipeline", "active"),
    [(16, "interleaved", None), (1, "interleaved", None), (9, "simple", None), (8, "interleaved", 2)],
)
def test_another_schedule_is_predicted_as_if_compiled_for_it(num_microbatches, pipeline, active):
    # Balanced by time alone, the cut does not depend on the schedule.
    options = {"memory_weight": 0.0}
    plan = compilation(3, 4, "interleaved", **options).plan
    expected = compilation(3, num_microbatches, pipeline, active_microbatches=active, **options).plan
    found = predict(plan, num_microbatches=num_microbatches, pipeline=pipeline, active_microbatches=active)
    assert found.assignment == expected.assignment
    # All but the share of the microbatches whose gradients are added to earlier ones.
    about = {"bubble_fraction": 0.0, "step_time": 0.0}
    assert dataclasses.replace(found.schedule, **about) == dataclasses.replace(expected.schedule, **about)
    assert found.schedule.bubble_fraction == pytest.approx(expected.schedule.bubble_fraction, rel=0.06)
    assert found.schedule.step_time == pytest.approx(expected.schedule.step_time, rel=0.06)
    assert [stage.num_in_flight for stage in found.stages] == [stage.num_in_flight for stage in expected.stages]
    for stage, other in zip(found.stages, expected.stages, strict=True):  # messages are as many as in the old schedule
        assert stage.peak_memory_bytes == pytest.approx(other.peak_memory_bytes, rel=0.25)
    assert plan_timeline(found).makespan == found.schedule.step_time


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "interleaved-1f1b", "list"])
def test_named_schedules(schedule):
    found = compilation(2, 4, schedule=schedule)
    assert plan_timeline(found.plan) == found.timeline()
    assert predict(found.plan) == found.plan
    more = predict(found.plan, num_microbatches=8)
    assert more.schedule.name == found.plan.schedule.name
    assert more.schedule.step_time > found.plan.schedule.step_time


def test_a_limit_of_active_microbatches_that_was_set_stays():
    plan = compilation(3, 8, active_microbatches=2).plan
    assert predict(plan, num_microbatches=32).schedule.active_microbatches == 2
    assert predict(compilation(3, 4).plan, num_microbatches=32).schedule.active_microbatches == 5


def test_there_and_back_again():
    plan = compilation().plan
    assert (
        predict(predict(plan, num_microbatches=32, pipeline="simple"), num_microbatches=4, pipeline="interleaved")
        == plan
    )


def test_slower_links_make_longer_steps():
    plan = compilation().plan
    slow = dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, link_bandwidth=1e8))
    assert predict(slow).schedule.step_time > plan.schedule.step_time


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_microbatches": 0}, "microbatches: expected at least 1, found 0"),
        ({"active_microbatches": -1}, "active_microbatches: expected at least 1, found -1"),
        ({"pipeline": "interleavd"}, "did you mean 'interleaved'?"),
    ],
)
def test_bad_settings(options, says):
    with pytest.raises(ConfigError) as error:
        predict(compilation().plan, **options)
    assert says in str(error.value)
