"""The parts of a bubble, of steps that a second simulation has made up: one instruction after another, each with its time."""

from __future__ import annotations

import pytest
from report_cases import compilation

from smpc.codegen.program import Op
from smpc.executor.measure.spans import Span
from smpc.observe.observer import RankRecord, StepRecord
from smpc.report.measured import compare, explain, pipeline_steps
from smpc.report.predict import plan_links

RANKS, MICROBATCHES = 3, 4
FORWARD, BACKWARD = 1_000_000, 2_000_000  # nanoseconds
SENDS, RECEIVES = (Op.SEND, Op.SEND_GRAD), {Op.RECV: Op.SEND, Op.RECV_GRAD: Op.SEND_GRAD}


def even(rank, instruction):
    return {Op.FORWARD: FORWARD, Op.BACKWARD: BACKWARD}.get(instruction.op, 0)


def record(programs, seconds=even, pause=lambda i: 0, send=0, way=0, take=0, late=lambda i: 0, number=1):
    """What the ranks of these programs record of a step in which instructions last so long, with pauses before some of them,
    messages are so long under way, and some are taken late."""
    clock, position, sent = [0] * len(programs), [0] * len(programs), {}
    spans = [[] for _ in programs]
    while any(at < len(p.instructions) for at, p in zip(position, programs, strict=True)):
        before = list(position)
        for rank, program in enumerate(programs):
            for i in program.instructions[position[rank] :]:
                start = clock[rank]
                if i.op in RECEIVES:
                    key = i.peer, rank, RECEIVES[i.op], i.edge, i.microbatch
                    if key not in sent:
                        break
                    clock[rank] = max(start, sent[key] + way) + take + late(i)
                elif i.op in SENDS:
                    clock[rank] += send
                    sent[rank, i.peer, i.op, i.edge, i.microbatch] = clock[rank]
                else:
                    start += pause(i)
                    clock[rank] = start + seconds(rank, i)
                spans[rank].append(Span(i, start, clock[rank]))
                position[rank] += 1
        assert position != before, "deadlock"
    steps = [(StepRecord(number, True, 0, 0, now, tuple(own)),) for now, own in zip(clock, spans, strict=True)]
    return [RankRecord(rank, rank, 0, 1, own) for rank, own in enumerate(steps)]


@pytest.fixture(scope="module", params=["interleaved", "simple"])
def found(request):
    return compilation(RANKS, MICROBATCHES, request.param)


def parts(found, *steps):
    recorded = [step for records in steps for step in pipeline_steps(records, RANKS)]
    assert len(recorded) == len(steps)
    return explain(recorded, plan_links(found.plan)), recorded


def test_a_bubble_of_nothing_but_the_schedule_is_that_of_its_formula(found):
    bubble, _ = parts(found, record(found.programs))
    assert bubble.schedule == pytest.approx((RANKS - 1) / (MICROBATCHES + RANKS - 1))
    assert (bubble.uneven, bubble.messages, bubble.other) == pytest.approx((0, 0, 0), abs=1e-9)


def test_uneven_times_are_a_part_of_their_own(found):
    steps = []
    for number in range(3):

        def seconds(rank, i, number=number):
            is_slow = i.microbatch == (i.stage + number) % MICROBATCHES
            return (3 if is_slow else 1) * even(rank, i)

        steps.append(record(found.programs, seconds, number=number))
    bubble, recorded = parts(found, *steps)
    assert bubble.schedule == pytest.approx((RANKS - 1) / (MICROBATCHES + RANKS - 1))
    assert bubble.measured == sorted(step.bubble_fraction for step in recorded)[1]
    assert abs(bubble.uneven) > 0.01
    assert (bubble.messages, bubble.other) == pytest.approx((0, 0), abs=1e-9)


def test_messages_are_a_part_of_their_own(found):
    records = record(found.programs, send=30_000, way=200_000, take=50_000)
    bubble, (step,) = parts(found, records)
    assert bubble.schedule == pytest.approx((RANKS - 1) / (MICROBATCHES + RANKS - 1))
    assert bubble.uneven == pytest.approx(0, abs=1e-9)
    assert bubble.messages > 0.05
    assert bubble.simulated == pytest.approx(
        step.bubble_fraction, rel=0.02
    )  # inputs are sent as well, which is not simulated


def test_what_a_rank_does_between_actions_is_a_part_of_its_own(found):
    bubble, (step,) = parts(found, record(found.programs, pause=lambda i: 100_000))
    assert (bubble.uneven, bubble.messages) == pytest.approx((0, 0), abs=1e-9)
    assert bubble.bookkeeping > 0.02
    assert bubble.simulated == pytest.approx(
        step.bubble_fraction, rel=0.03
    )  # before the first action it is not in the step


def test_what_no_part_explains_is_left_over(found):
    """The last rank is faster than the others and waits for all that it receives; one message it takes late."""
    awaited = next(i for i in found.programs[-1].instructions if i.op is Op.RECV and i.microbatch == 2)
    bubble, _ = parts(
        found,
        record(
            found.programs,
            lambda rank, i: even(rank, i) // (2 if rank == RANKS - 1 else 1),
            late=lambda i: 5 * FORWARD if i == awaited else 0,
        ),
    )
    assert bubble.uneven == pytest.approx(0, abs=1e-9)
    assert bubble.other > 0.02
    assert bubble.measured == pytest.approx(bubble.simulated + bubble.other)


def test_a_report_says_it(found):
    records = record(found.programs, send=30_000, way=200_000, take=50_000)
    result = compare(found.plan, records)
    bubble, _ = parts(found, records)
    assert result.bubble == bubble
    assert str(bubble) in str(result)
    assert "schedule 33.3%" in str(bubble)
    assert compare(found.plan, records, is_parallel=False).bubble is None
    assert explain([], []) is None
