"""Lowered programs: small ones in full, random ones by running them and comparing what every stage computed."""

import pytest
from codegen_cases import chain_channels, channel, pipelines, reference, replay
from drawn import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from smpc.codegen.lower import lower
from smpc.codegen.program import Action, Op
from smpc.codegen.schedules.named import SCHEDULES, evaluation, in_flight
from smpc.codegen.verify import Expectation, verify
from smpc.errors import ScheduleError


def lines(program):
    return [str(instruction) for instruction in program]


def test_two_stages_with_labels_and_a_shared_parameter():
    placement = (0, 1)
    channels = (channel(0, -1, 0, placement), channel(1, -1, 1, placement), channel(2, 0, 1, placement))
    schedule = SCHEDULES["interleaved"](2, placement, 2, 4)
    shared = (("embedding.weight", (0, 1)), ("bias", (1,)), ("scale", (1, 0)))
    first, last = lower(schedule, channels, num_ranks=2, shared_parameters=shared)
    assert lines(first) == [
        "SEND e1 m0 r1",
        "MOVE e0 m0",
        "F s0 m0",
        "SEND e2 m0 r1",
        "SEND e1 m1 r1",
        "MOVE e0 m1",
        "F s0 m1",
        "SEND e2 m1 r1",
        "RECV_GRAD e2 m0 r1",
        "B s0 m0",
        "RECV_GRAD e2 m1 r1",
        "B s0 m1",
        "REDUCE p0",
        "REDUCE p2",
    ]
    assert lines(last) == [
        "RECV e1 m0 r0",
        "RECV e2 m0 r0",
        "F s1 m0",
        "B s1 m0",
        "SEND_GRAD e2 m0 r0",
        "RECV e1 m1 r0",
        "RECV e2 m1 r0",
        "F s1 m1",
        "B s1 m1",
        "SEND_GRAD e2 m1 r0",
        "REDUCE p0",
        "REDUCE p2",
    ]


def test_two_stages_on_one_rank_move_values():
    placement = (0, 0)
    channels = (channel(0, -1, 0, placement), channel(1, 0, 1, placement), channel(2, -1, 1, placement))
    (program,) = lower(SCHEDULES["simple"](2, placement, 1, 1), channels, num_ranks=1)
    assert lines(program) == [
        "MOVE e0 m0",
        "F s0 m0",
        "MOVE e1 m0",
        "MOVE e2 m0",
        "F s1 m0",
        "B s1 m0",
        "MOVE_GRAD e1 m0",
        "B s0 m0",
    ]


def test_values_without_gradients_send_none_back():
    placement = (0, 1)
    mask, hidden = channel(0, 0, 1, placement, grad=(False,)), channel(1, 0, 1, placement, grad=(False, True))
    first, last = lower(SCHEDULES["simple"](2, placement, 1, 1), (mask, hidden), num_ranks=2)
    assert lines(first) == ["F s0 m0", "SEND e0 m0 r1", "SEND e1 m0 r1", "RECV_GRAD e1 m0 r1", "B s0 m0"]
    assert lines(last) == ["RECV e0 m0 r0", "RECV e1 m0 r0", "F s1 m0", "B s1 m0", "SEND_GRAD e1 m0 r0"]


def test_evaluation_has_no_gradients_and_reduces_nothing():
    placement = (0, 1)
    channels = (channel(0, 0, 1, placement),)
    first, last = lower(evaluation(2, placement, 1), channels, num_ranks=2, shared_parameters=(("w", (0, 1)),))
    assert lines(first) == ["F s0 m0", "SEND e0 m0 r1"]
    assert lines(last) == ["RECV e0 m0 r0", "F s1 m0"]


def test_a_message_needed_later_is_received_when_its_turn_comes():
    # Rank 0 has stages 0 and 1; rank 1 runs stage 2, fed by stage 1, before stage 3, fed by stage 0, which sends first.
    placement = (0, 0, 1, 1)
    channels = (channel(0, 0, 3, placement), channel(1, 1, 2, placement))
    _, last = lower(evaluation(4, placement, 1), channels, num_ranks=2)
    assert lines(last) == ["RECV e0 m0 r0", "RECV e1 m0 r0", "F s2 m0", "F s3 m0"]


def test_inputs_leave_rank_0_ahead_of_the_rank_that_needs_them_first():
    # Rank 1 starts microbatch 1 when rank 0 starts microbatch 0 of stage 2, and microbatch 2 when it has ended that.
    placement = (1, 1, 0)
    channels = (channel(0, -1, 0, placement), channel(1, 0, 1, placement), channel(2, 1, 2, placement))
    schedule = SCHEDULES["simple"](3, placement, 3, 9)
    programs = lower(schedule, channels, num_ranks=2)
    sends = ["SEND e0 m0 r1", "SEND e0 m1 r1", "SEND e0 m2 r1"]
    assert lines(programs[0])[:5] == [*sends, "RECV e2 m0 r1", "F s2 m0"]
    assert verify(programs, Expectation(channels, placement, 2, 3)) == (3, 3, 3)


def test_rank_0_without_a_stage_still_sends_the_inputs():
    placement = (1,)
    channels = (channel(0, -1, 0, placement),)
    programs = lower(SCHEDULES["simple"](1, placement, 2, 1), channels, num_ranks=3)
    assert lines(programs[0]) == ["SEND e0 m0 r1", "SEND e0 m1 r1"]
    assert lines(programs[1])[:3] == ["RECV e0 m0 r0", "F s0 m0", "RECV e0 m1 r0"]
    assert programs[2] == ()


def test_a_deadlocking_schedule_is_refused():
    schedule = tuple(tuple(map(Action.parse, rank)) for rank in [["F s0 m0", "F s2 m0"], ["F s1 m1", "F s1 m0"]])
    channels = (channel(0, 0, 1, (0, 1, 0)), channel(1, 1, 2, (0, 1, 0)))
    with pytest.raises(ScheduleError, match="rank 1: F s1 m1 waits for F s0 m1"):
        lower(schedule, channels, num_ranks=2)
    with pytest.raises(ScheduleError, match="schedule for 1 ranks, found one for 2"):
        lower(schedule, channels, num_ranks=1)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
def test_chains_of_stages(name, num_stages):
    placement = tuple(range(num_stages))
    channels = chain_channels(placement)
    for m in (1, 2, num_stages, 2 * num_stages + 1):
        programs = lower(SCHEDULES[name](num_stages, placement, m, num_stages + 2), channels, num_ranks=num_stages)
        assert replay(programs, channels) == reference(num_stages, channels, m)


@settings(max_examples=examples(300), deadline=None)
@given(pipelines(), st.sampled_from([*SCHEDULES, "evaluation"]), st.integers(0, 3))
def test_any_pipeline_runs_and_computes_the_same(pipeline, name, seed):
    placement, channels, m, active = pipeline
    num_stages, num_ranks, trains = len(placement), 4, name != "evaluation"
    if trains:
        schedule, bound = SCHEDULES[name](num_stages, placement, m, active), in_flight(name, num_stages, m, active)
    else:
        schedule, bound = evaluation(num_stages, placement, m), (0,) * num_stages
    shared = (("a", (0, 2)), ("b", (3,)), ("c", (3, 2, 0)))
    programs = lower(schedule, channels, num_ranks=num_ranks, shared_parameters=shared)
    assert programs == lower(schedule, channels, num_ranks=num_ranks, shared_parameters=shared)
    expectation = Expectation(channels, placement, num_ranks, m, trains, shared)
    assert verify(programs, expectation, max_in_flight=bound) == bound
    assert replay(programs, channels, shared if trains else (), seed) == reference(num_stages, channels, m, trains)
    for rank, actions in enumerate(schedule):
        kept = [i for i in programs[rank] if i.op in (Op.FORWARD, Op.BACKWARD)]
        assert kept == [action.instruction for action in actions]
