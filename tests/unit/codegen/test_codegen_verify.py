"""The verifier rejects broken programs, says why, and accepts nothing that does not run."""

from dataclasses import replace

import pytest
from codegen_cases import chain_channels, channel, pipelines, reference, replay, split_backwards
from drawn import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from smpc.codegen.lower import lower
from smpc.codegen.program import Instruction, Op, RankProgram, StageCode
from smpc.codegen.schedules.named import SCHEDULES, evaluation
from smpc.codegen.verify import Expectation, verify, verify_programs
from smpc.errors import ScheduleError


def parse(*programs):
    """One program for each text, instructions separated by commas."""
    return [[Instruction.parse(text) for text in program.split(",") if text.strip()] for program in programs]


def rejection(programs, expectation, **options):
    with pytest.raises(ScheduleError) as caught:
        verify(programs, expectation, **options)
    return str(caught.value).splitlines()


def refusal(programs, expectation):
    """Why the programs are refused; empty if they are not."""
    try:
        verify(programs, expectation)
    except ScheduleError as error:
        return str(error)
    return ""


PLACEMENT = (0, 1)
PAIR = Expectation((channel(0, 0, 1, PLACEMENT),), PLACEMENT, num_ranks=2, num_microbatches=2)
FIRST = "F s0 m0, SEND e0 m0 r1, F s0 m1, SEND e0 m1 r1, RECV_GRAD e0 m0 r1, B s0 m0, RECV_GRAD e0 m1 r1, B s0 m1"
LAST = "RECV e0 m0 r0, F s1 m0, B s1 m0, SEND_GRAD e0 m0 r0, RECV e0 m1 r0, F s1 m1, B s1 m1, SEND_GRAD e0 m1 r0"


def test_a_hand_written_program_passes():
    assert verify(parse(FIRST, LAST), PAIR) == (2, 1)
    assert verify(parse(FIRST, LAST), PAIR, max_in_flight=(2, 1)) == (2, 1)


def test_a_dropped_send():
    assert rejection(parse(FIRST.replace("SEND e0 m1 r1, ", ""), LAST), PAIR) == ["rank 0: SEND e0 m1 r1 is missing"]


def test_a_dropped_receive_is_missing_at_its_use_too():
    assert rejection(parse(FIRST, LAST.replace("RECV e0 m1 r0, ", "")), PAIR) == [
        "rank 1: RECV e0 m1 r0 is missing",
        "rank 1, instruction 4: F s1 m1 comes before RECV e0 m1 r0, which it needs",
    ]


def test_everything_wrong_with_a_program_is_listed():
    program = FIRST.replace("F s0 m1", "F s0 m0").replace("r1, B s0 m0", "r0, B s0 m0")
    assert rejection(parse(program, LAST), PAIR) == [
        "rank 0: RECV_GRAD e0 m0 r1 is missing",
        "rank 0: F s0 m1 is missing",
        "rank 0, instruction 0: F s0 m0 runs 2 times",
        "rank 0, instruction 4: RECV_GRAD e0 m0 r0 is not part of the plan for this rank",
        "rank 0, instruction 3: SEND e0 m1 r1 comes before F s0 m1, which it needs",
        "rank 0, instruction 5: B s0 m0 comes before RECV_GRAD e0 m0 r1, which it needs",
        "rank 0, instruction 7: B s0 m1 comes before F s0 m1, which it needs",
    ]


def test_swapped_receives_do_not_match_the_sends():
    program = "RECV e0 m1 r0, RECV e0 m0 r0, " + LAST.replace("RECV e0 m0 r0, ", "").replace("RECV e0 m1 r0, ", "")
    (line,) = rejection(parse(FIRST, program), PAIR)
    assert line.startswith("rank 1, instruction 0: RECV e0 m1 r0 meets SEND e0 m0 r1, instruction 1 of rank 0;")


def test_activations_and_gradients_share_one_queue():
    placement = (0, 1, 0)
    channels = (channel(0, 0, 1, placement), channel(1, 1, 2, placement))
    first = "F s0 m0, SEND e0 m0 r1, RECV e1 m0 r1, F s2 m0, B s2 m0, SEND_GRAD e1 m0 r1, RECV_GRAD e0 m0 r1, B s0 m0"
    last = "RECV e0 m0 r0, F s1 m0, SEND e1 m0 r0, RECV_GRAD e1 m0 r0, B s1 m0, SEND_GRAD e0 m0 r0"
    expectation = Expectation(channels, placement, 2, 1)
    assert verify(parse(first, last), expectation) == (1, 1, 1)
    crossed = first.replace("RECV_GRAD e0 m0 r1, ", "").replace("RECV e1", "RECV_GRAD e0 m0 r1, RECV e1")
    (line,) = rejection(parse(crossed, last), expectation)
    assert line.startswith("rank 0, instruction 2: RECV_GRAD e0 m0 r1 meets SEND e1 m0 r0, instruction 2 of rank 1;")


def test_a_deadlock_names_the_circle():
    # Each rank waits for what the other sends afterwards.
    placement = (0, 1, 1, 0, 2)
    channels = (channel(0, 0, 2, placement), channel(1, 1, 3, placement), channel(2, 0, 4, placement))
    expectation = Expectation(channels, placement, 3, 1, has_backward=False)
    good = (
        "F s0 m0, SEND e0 m0 r1, SEND e2 m0 r2, RECV e1 m0 r1, F s3 m0",
        "F s1 m0, SEND e1 m0 r0, RECV e0 m0 r0, F s2 m0",
    )
    assert verify(parse(*good, "RECV e2 m0 r0, F s4 m0"), expectation) == (0, 0, 0, 0, 0)
    first = "RECV e1 m0 r1, F s0 m0, SEND e0 m0 r1, SEND e2 m0 r2, F s3 m0"
    second = "RECV e0 m0 r0, F s1 m0, SEND e1 m0 r0, F s2 m0"
    assert rejection(parse(first, second, "RECV e2 m0 r0, F s4 m0"), expectation) == [
        "deadlock: each of these waits for the next one, the last for the first",
        "  rank 0, instruction 0: RECV e1 m0 r1 waits for rank 1",
        "  rank 1, instruction 0: RECV e0 m0 r0 waits for rank 0",
    ]


def test_crossed_sends_block_each_other_in_rendezvous():
    assert rejection(parse(FIRST, LAST), PAIR, rendezvous=True) == [
        "deadlock (sends block until they are received): each of these waits for the next one, the last for the first",
        "  rank 0, instruction 3: SEND e0 m1 r1 waits for rank 1",
        "  rank 1, instruction 3: SEND_GRAD e0 m0 r0 waits for rank 0",
    ]
    early = "RECV e0 m0 r0, F s1 m0, RECV e0 m1 r0, B s1 m0, SEND_GRAD e0 m0 r0, F s1 m1, B s1 m1, SEND_GRAD e0 m1 r0"
    assert verify(parse(FIRST, early), PAIR, rendezvous=True) == (2, 1)


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_simple_chains_and_evaluation_need_no_buffers(num_stages):
    placement = tuple(range(num_stages))
    channels = chain_channels(placement)
    for schedule, trains in (
        (SCHEDULES["simple"](num_stages, placement, 4, 1), True),
        (evaluation(num_stages, placement, 4), False),
    ):
        programs = lower(schedule, channels, num_ranks=num_stages)
        assert len(programs) == num_stages
        verify(
            programs, Expectation(channels, placement, num_stages, 4, trains), rendezvous=True
        )  # raises, or all is well


def test_reduces_in_another_order_deadlock():
    shared = (("a", (0, 1)), ("b", (1, 0)))
    expectation = Expectation((), PLACEMENT, 2, 1, shared_parameters=shared)
    body = "F s{0} m0, B s{0} m0, ".format
    verify(parse(body(0) + "REDUCE p0, REDUCE p1", body(1) + "REDUCE p0, REDUCE p1"), expectation)
    assert rejection(parse(body(0) + "REDUCE p0, REDUCE p1", body(1) + "REDUCE p1, REDUCE p0"), expectation)[1:] == [
        "  rank 0, instruction 2: REDUCE p0 waits for rank 1",
        "  rank 1, instruction 2: REDUCE p1 waits for rank 0",
    ]
    early = parse(body(0) + "REDUCE p0, REDUCE p1", "F s1 m0, REDUCE p0, B s1 m0, REDUCE p1")
    assert rejection(early, expectation) == ["rank 1, instruction 1: REDUCE p0 comes before B s1 m0, which it needs"]


def test_microbatches_out_of_order():
    expectation = Expectation((), (0,), 1, 2)
    assert rejection(parse("F s0 m1, F s0 m0, B s0 m1, B s0 m0"), expectation) == [
        "rank 0, instruction 1: F s0 m0 comes after microbatch 1; expected ascending order",
        "rank 0, instruction 3: B s0 m0 comes after microbatch 1; expected ascending order",
    ]


def test_too_many_microbatches_in_flight():
    assert rejection(parse(FIRST, LAST), PAIR, max_in_flight=(1, 1)) == [
        "stage 0 has 2 microbatches in flight, more than its bound of 1"
    ]


def test_channels_must_fit_the_placement():
    wrong = replace(PAIR, channels=(channel(0, 0, 1, (1, 0)), channel(7, 0, 1, PLACEMENT)), num_ranks=3)
    lines = rejection(parse(FIRST, LAST), wrong)
    assert lines[0] == "expected channel 0 from rank 0 to 1, where its stages are, found from rank 1 to 0"
    assert lines[1].startswith("expected channel 1 between stages of (0, 1), found Channel(index=7")
    assert lines[2] == "expected programs for 3 ranks, found 2"


def rank_programs():
    stages = [StageCode(s, f"Stage{s}", (), (), "", (), ()) for s in range(2)]
    return [
        RankProgram(
            rank=rank,
            num_ranks=2,
            num_microbatches=2,
            has_backward=True,
            instructions=tuple(program),
            channels=PAIR.channels,
            stages=(stages[rank],),
            shared_parameters=(),
            schedule="interleaved",
            fingerprint="",
        )
        for rank, program in enumerate(parse(FIRST, LAST))
    ]


def test_rank_programs():
    first, last = rank_programs()
    assert verify_programs([first, last], max_in_flight=(2, 1)) == (2, 1)
    with pytest.raises(ScheduleError, match="differs from position 0 in num_microbatches"):
        verify_programs([first, replace(last, num_microbatches=3)])
    with pytest.raises(ScheduleError, match="position 0 that of rank 1"):
        verify_programs([last, first])
    with pytest.raises(ScheduleError, match="each stage on one rank"):
        verify_programs([first, replace(last, stages=first.stages)])


SPLIT = "F s0 m0, F s0 m1, B s0 m0, B s0 m1, W s0 m0, W s0 m1"


def test_a_split_backward():
    one = Expectation((), (0,), 1, 2, shared_parameters=())
    assert verify(parse(SPLIT), one) == (2,)
    assert verify(parse("F s0 m0, F s0 m1, B s0 m0, W s0 m0, B s0 m1"), one, max_in_flight=(2,)) == (2,)
    # The activations are held until the W, so another F before it makes two.
    assert rejection(parse("F s0 m0, B s0 m0, F s0 m1, W s0 m0, B s0 m1"), one, max_in_flight=(1,)) == [
        "stage 0 has 2 microbatches in flight, more than its bound of 1"
    ]
    assert rejection(parse("F s0 m0, W s0 m0, B s0 m0, F s0 m1, B s0 m1"), one) == [
        "rank 0, instruction 1: W s0 m0 comes before B s0 m0, which it needs"
    ]
    assert rejection(parse(SPLIT + ", W s0 m1"), one) == ["rank 0, instruction 5: W s0 m1 runs 2 times"]
    assert rejection(parse(SPLIT + ", W s1 m0"), one) == [
        "rank 0, instruction 6: W s1 m0 is not part of the plan for this rank"
    ]
    forwards = Expectation((), (0,), 1, 1, has_backward=False)
    assert "W s0 m0 is not part of the plan" in rejection(parse("F s0 m0, W s0 m0"), forwards)[0]


def test_gradients_of_parameters_add_up_in_the_order_of_the_microbatches():
    one = Expectation((), (0,), 1, 2)
    swapped = SPLIT.replace("W s0 m0, W s0 m1", "W s0 m1, W s0 m0")
    assert rejection(parse(swapped), one) == [
        "rank 0, instruction 5: W s0 m0 comes after microbatch 1; expected ascending order"
    ]
    # The whole backward of 1 adds before the W of 0.
    assert rejection(parse("F s0 m0, F s0 m1, B s0 m0, B s0 m1, W s0 m0"), one) == [
        "rank 0, instruction 4: W s0 m0 comes after microbatch 1; expected ascending order"
    ]


def test_gradients_are_reduced_when_all_parts_are_there():
    shared = Expectation((), (0, 1), 2, 1, shared_parameters=(("a", (0, 1)),))
    body = "F s{0} m0, B s{0} m0, {1}"
    verify(parse(body.format(0, "W s0 m0, REDUCE p0"), body.format(1, "REDUCE p0")), shared)
    assert rejection(parse(body.format(0, "REDUCE p0, W s0 m0"), body.format(1, "REDUCE p0")), shared) == [
        "rank 0, instruction 2: REDUCE p0 comes before W s0 m0, which it needs"
    ]


@settings(max_examples=examples(300), deadline=None)
@given(pipelines(max_stages=4, max_microbatches=3), st.sampled_from(sorted(SCHEDULES)), st.data())
def test_a_mutated_program_is_rejected_or_runs(pipeline, name, data):
    placement, channels, m, active = pipeline
    shared = (("a", (0, 1)), ("b", (1, 0)))
    schedule = SCHEDULES[name](len(placement), placement, m, active)
    if data.draw(st.booleans()):
        schedule = split_backwards(schedule, data.draw(st.randoms(use_true_random=False)))
    programs = [list(p) for p in lower(schedule, channels, num_ranks=4, shared_parameters=shared)]
    rank = data.draw(st.sampled_from([rank for rank, program in enumerate(programs) if program]))
    program = programs[rank]
    position = data.draw(st.integers(0, len(program) - 1))
    mutation = data.draw(st.sampled_from(["drop", "repeat", "move"]))
    moved = program.pop(position)
    if mutation == "repeat":
        program.insert(position, moved)
    if mutation != "drop":
        target = data.draw(st.integers(0, len(program)))
        program.insert(target, moved)
        assume(mutation == "repeat" or target != position)
    why = refusal(programs, Expectation(channels, placement, 4, m, True, shared))
    ran = replay(programs, channels, shared, seed=1) == reference(len(placement), channels, m)
    assert ran == (not why) or "ascending" in why
    # Without its W, a B is a whole backward: another program, and mostly a right one.
    assert mutation == "move" or why or moved.op is Op.WEIGHT
