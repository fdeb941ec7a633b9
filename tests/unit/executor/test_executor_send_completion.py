"""What programs tell about the arrival of messages, against runs of them in random order."""

import random
from collections import defaultdict

import pytest
from codegen_cases import chain_channels, pipelines, split_backwards
from drawn import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from smpc.codegen.lower import lower
from smpc.codegen.program import Op, RankProgram
from smpc.codegen.schedules.named import evaluation, interleaved
from smpc.executor.program.message_order import awaited_by_sends, told_by_receives

SENDS, RECEIVES = (Op.SEND, Op.SEND_GRAD), (Op.RECV, Op.RECV_GRAD)


def programs_of(schedule, channels, num_ranks):
    instructions = lower(schedule, channels, num_ranks=num_ranks)
    return tuple(
        RankProgram(r, num_ranks, 1, True, own, channels, (), (), "", "") for r, own in enumerate(instructions)
    )


def assert_ends(programs, seed, told=(), awaited=()):
    """Run all ranks in random order; the most messages that a rank did not know to have arrived."""
    order = random.Random(seed)
    position = [0] * len(programs)
    sent, taken, known = defaultdict(int), defaultdict(int), defaultdict(int)
    most = 0
    while True:
        ready = []
        for rank, program in enumerate(programs):
            here = program.instructions[position[rank]] if position[rank] < len(program.instructions) else None
            if here is None or (here.op in RECEIVES and sent[here.peer, rank] == taken[here.peer, rank]):
                continue
            if here.op in SENDS and awaited and taken[rank, here.peer] < awaited[rank][here]:
                continue
            ready.append((rank, here))
        if not ready:
            break
        rank, here = order.choice(ready)
        position[rank] += 1
        if here.op in RECEIVES:
            taken[here.peer, rank] += 1
            if told:
                assert told[rank][here] <= taken[rank, here.peer]
                known[rank, here.peer] = max(known[rank, here.peer], told[rank][here])
        elif here.op in SENDS:
            if awaited:
                known[rank, here.peer] = max(known[rank, here.peer], awaited[rank][here])
            sent[rank, here.peer] += 1
            most = max(most, sent[rank, here.peer] - known[rank, here.peer])
    assert [len(program.instructions) for program in programs] == position, "deadlock"
    return most


@settings(max_examples=examples(60), deadline=None)
@given(pipelines(), st.integers(0, 2**32), st.booleans())
def test_receives_tell_what_is_true_in_any_order_of_the_ranks(pipeline, seed, splits):
    placement, channels, num_microbatches, active = pipeline
    schedule = interleaved(len(placement), placement, num_microbatches, active)
    if splits:
        schedule = split_backwards(schedule, random.Random(seed))
    programs = programs_of(schedule, channels, 4)
    assert_ends(programs, seed, told=[told_by_receives(programs, rank) for rank in range(4)])


@settings(max_examples=examples(60), deadline=None)
@given(pipelines(), st.integers(0, 2**32), st.integers(1, 3))
def test_waiting_sends_do_not_deadlock_in_any_order_of_the_ranks(pipeline, seed, window):
    placement, channels, num_microbatches, _ = pipeline
    programs = programs_of(evaluation(len(placement), placement, num_microbatches), channels, 4)
    assert_ends(programs, seed, awaited=[awaited_by_sends(programs, rank, window) for rank in range(4)])


@pytest.mark.parametrize("placement", [(0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0)])
def test_what_is_held_does_not_grow_with_the_microbatches(placement):
    """But for `gpipe`, whose forwards are all over before the first gradient."""
    num_ranks, held = max(placement) + 1, {}
    for m in (16, 64):
        training = programs_of(
            interleaved(len(placement), placement, m, num_ranks + 2), chain_channels(placement), num_ranks
        )
        told = [told_by_receives(training, rank) for rank in range(num_ranks)]
        forward = programs_of(evaluation(len(placement), placement, m), chain_channels(placement), num_ranks)
        awaited = [awaited_by_sends(forward, rank, 4) for rank in range(num_ranks)]
        held[m] = assert_ends(training, 0, told=told), assert_ends(forward, 0, awaited=awaited)
    assert held[64] == held[16]
    assert max(held[16]) < 16
