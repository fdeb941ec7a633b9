"""Schedules as tables, and what holds for all of them."""

import textwrap

import pytest
from drawn import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from smpc.codegen.program import Action, backward, forward
from smpc.codegen.schedules.named import SCHEDULES, evaluation, in_flight, scheduler, table
from smpc.errors import ConfigError, ScheduleError

TABLES = {
    ("simple", (0,), 3, 9): "rank 0  F0 F1 F2 B0 B1 B2",
    ("simple", (0, 1, 2), 4, 9): """\
        rank 0  F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
        rank 1  .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
        rank 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..""",
    ("interleaved", (0,), 3, 9): "rank 0  F0 B0 F1 B1 F2 B2",
    ("interleaved", (0, 1), 3, 9): """\
        rank 0  F0 F1 .. B0 F2 B1 .. B2
        rank 1  .. F0 B0 F1 B1 F2 B2 ..""",
    ("interleaved", (0, 1, 2), 4, 9): """\
        rank 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
        rank 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
        rank 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..""",
    # fewer microbatches than stages
    ("interleaved", (0, 1, 2, 3), 2, 9): """\
        rank 0  F0 F1 .. .. .. .. .. B0 .. B1
        rank 1  .. F0 F1 .. .. .. B0 .. B1 ..
        rank 2  .. .. F0 F1 .. B0 .. B1 .. ..
        rank 3  .. .. .. F0 B0 F1 B1 .. .. ..""",
    # one microbatch at a time
    ("interleaved", (0, 1), 2, 1): """\
        rank 0  F0 .. .. B0 F1 .. .. B1
        rank 1  .. F0 B0 .. .. F1 B1 ..""",
    # two at a time in three stages: waves, not a forward that waits for the stage before
    ("interleaved", (0, 1, 2), 4, 2): """\
        rank 0  F0 F1 .. .. .. B0 F2 B1 F3 .. .. B2 .. B3
        rank 1  .. F0 F1 .. B0 .. B1 F2 .. F3 B2 .. B3 ..
        rank 2  .. .. F0 B0 F1 B1 .. .. F2 B2 F3 B3 .. ..""",
    # a permutation moves rows only
    ("interleaved", (1, 0), 2, 9): """\
        rank 0  .. F0 B0 F1 B1 ..
        rank 1  F0 F1 .. B0 .. B1""",
    # several stages on a rank (their order comes from backwards that take twice as long)
    ("interleaved", (0, 1, 0), 2, 9): """\
        rank 0  0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1
        rank 1  ... 1F0 1F1 ... 1B0 ... 1B1 ...""",
    ("simple", (1, 2, 1, 0), 2, 9): """\
        rank 0  ... ... ... 3F0 3F1 3B0 3B1 ... ... ...
        rank 1  0F0 0F1 2F0 2F1 ... ... 2B0 2B1 0B0 0B1
        rank 2  ... 1F0 1F1 ... ... ... ... 1B0 1B1 ...""",
}


@pytest.mark.parametrize("case", TABLES, ids=str)
def test_tables(case):
    name, placement, num_microbatches, active = case
    found = table(SCHEDULES[name](len(placement), placement, num_microbatches, active))
    assert found.splitlines() == textwrap.dedent(TABLES[case]).splitlines()


def test_evaluation_runs_forwards_only():
    assert table(evaluation(3, (0, 1, 2), 2)).splitlines() == [
        "rank 0  F0 F1 .. ..",
        "rank 1  .. F0 F1 ..",
        "rank 2  .. .. F0 F1",
    ]


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_interleaved_is_textbook_1f1b_when_the_limit_does_not_bind(num_stages):
    for num_microbatches in range(1, 18):
        schedule = SCHEDULES["interleaved"](num_stages, range(num_stages), num_microbatches, num_stages)
        for stage, actions in enumerate(schedule):
            warm_up = min(num_microbatches, num_stages - stage)
            expected = [forward(stage, m) for m in range(warm_up)]
            for m in range(num_microbatches):
                expected.append(backward(stage, m))
                expected += [forward(stage, n) for n in [m + warm_up] if n < num_microbatches]
            assert list(actions) == expected


@settings(max_examples=examples(150), deadline=None)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.lists(st.integers(0, 4), min_size=1, max_size=7),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_every_schedule_is_complete_possible_ascending_and_bounded(name, placement, num_microbatches, active):
    num_stages = len(placement)
    schedule = SCHEDULES[name](num_stages, placement, num_microbatches, active)
    assert len(schedule) == max(placement) + 1
    assert schedule == SCHEDULES[name](num_stages, placement, num_microbatches, active)

    waiting, done, peaks, now = [list(actions) for actions in schedule], set(), [0] * num_stages, [0] * num_stages
    last = {}
    while any(waiting):
        rank = next(r for r, rest in enumerate(waiting) if rest and _possible(rest[0], done, num_stages))
        action = waiting[rank].pop(0)
        assert placement[action.stage] == rank
        assert action not in done
        assert action.microbatch == last.get((action.op, action.stage), -1) + 1
        last[action.op, action.stage] = action.microbatch
        done.add(action)
    assert len(done) == 2 * num_stages * num_microbatches
    for actions in schedule:
        for action in actions:
            now[action.stage] += 1 if action.op == "F" else -1
            peaks[action.stage] = max(peaks[action.stage], now[action.stage])
    assert tuple(peaks) == in_flight(name, num_stages, num_microbatches, active)
    if name == "interleaved":
        assert peaks == [min(num_microbatches, num_stages - stage, active) for stage in range(num_stages)]
    else:
        assert peaks == [num_microbatches] * num_stages


def _possible(action, done, num_stages):
    """Whether what a chain of stages needs for the action has run."""
    stage, m = action.stage, action.microbatch
    if action.op == "F":
        return stage == 0 or forward(stage - 1, m) in done
    return forward(stage, m) in done and (stage == num_stages - 1 or backward(stage + 1, m) in done)


def test_an_action_prints_and_parses():
    assert str(forward(2, 0)) == "F s2 m0"
    assert Action.parse("B s1 m13") == backward(1, 13)
    assert str(backward(1, 13).instruction) == "B s1 m13"
    with pytest.raises(ScheduleError, match="found SEND"):
        Action.parse("SEND e0 m1 r1")
    with pytest.raises(ScheduleError, match="expected an instruction"):
        Action.parse("F stage0 m1")


def test_an_unknown_schedule_names_the_closest():
    with pytest.raises(ConfigError, match="found 'interleavd'; did you mean 'interleaved'"):
        scheduler("interleavd")
    with pytest.raises(ConfigError, match=r"expected one of 'interleaved', 'simple', found 'x'$"):
        in_flight("x", 2, 2, 2)


def test_impossible_arguments_are_reported_together():
    with pytest.raises(ScheduleError) as caught:
        SCHEDULES["simple"](2, (0, -1, 1), 0, 0)
    assert str(caught.value).splitlines() == [
        "expected a rank for each of 2 stages, at least one; found (0, -1, 1)",
        "expected pipeline ranks from 0, found (0, -1, 1)",
        "expected at least one microbatch, found 0",
        "expected at least one active microbatch, found 0",
    ]
