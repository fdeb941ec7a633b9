"""The simulator against formulas and timelines worked out by hand."""

import pytest
from codegen_cases import channel

from smpc.codegen.program import Action, backward, forward, weight
from smpc.codegen.schedules.named import SCHEDULES, evaluation
from smpc.codegen.simulate import Costs, Timeline, Transfer, chain, simulate, timeline_text
from smpc.errors import ScheduleError
from smpc.tracer.ir import TensorSpec


def events(timeline):
    return [(e.rank, str(e.action), e.start, e.end) for e in timeline.events]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("p", range(2, 9))
def test_bubble_of_balanced_stages(name, p):
    for m in (1, 2, 3, p - 1, p, p + 1, 2 * p, 24):
        timeline = simulate(SCHEDULES[name](p, range(p), m, p + 2), chain(p), Costs.uniform(p))
        assert timeline.makespan == 3 * (m + p - 1)
        assert timeline.busy == (3 * m,) * p
        assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
        forwards = simulate(evaluation(p, range(p), m), chain(p), Costs.uniform(p))
        assert forwards.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


def test_latency_and_bandwidth_delay_what_crosses_ranks():
    schedule = SCHEDULES["simple"](2, (0, 1), 2, 9)
    costs = Costs(forward=(1.0, 1.0), backward=(2.0, 2.0), latency=0.5, bandwidth=100.0)
    timeline = simulate(schedule, [Transfer(0, 1, num_bytes=300, gradient_bytes=100)], costs)
    # The first message is on the wire from 1 to 4, the second waits for the wire and takes until 7; gradients take 1.
    assert events(timeline) == [
        (0, "F s0 m0", 0.0, 1.0),
        (0, "F s0 m1", 1.0, 2.0),
        (1, "F s1 m0", 4.5, 5.5),
        (1, "F s1 m1", 7.5, 8.5),
        (1, "B s1 m0", 8.5, 10.5),
        (1, "B s1 m1", 10.5, 12.5),
        (0, "B s0 m0", 12.0, 14.0),
        (0, "B s0 m1", 14.0, 16.0),
    ]
    assert timeline.busy == (6.0, 6.0)
    assert timeline.bubble_fraction == pytest.approx(1 - 12 / 32)
    on_one_rank = simulate(SCHEDULES["simple"](2, (0, 0), 2, 9), [Transfer(0, 1, 300, 100)], costs)
    assert on_one_rank.makespan == 12.0


def test_messages_take_the_time_of_the_ranks_that_send_and_receive_them():
    schedule = SCHEDULES["simple"](2, (0, 1), 2, 9)
    costs = Costs((1.0, 1.0), (2.0, 2.0), latency=0.25, sending=0.5, receiving=0.125)
    timeline = simulate(schedule, chain(2), costs)
    # Handed over at 1.5, there at 1.75, taken by 1.875. Rank 0 goes on at 1.5, and rank 1 after its backward at 6.375.
    assert events(timeline) == [
        (0, "F s0 m0", 0.0, 1.0),
        (0, "F s0 m1", 1.5, 2.5),
        (1, "F s1 m0", 1.875, 2.875),
        (1, "F s1 m1", 3.375, 4.375),
        (1, "B s1 m0", 4.375, 6.375),
        (1, "B s1 m1", 6.875, 8.875),
        (0, "B s0 m0", 7.25, 9.25),
        (0, "B s0 m1", 9.75, 11.75),
    ]
    assert timeline.busy == (6.0, 6.0)
    on_one_rank = simulate(SCHEDULES["simple"](2, (0, 0), 2, 9), chain(2), costs)
    assert on_one_rank.makespan == 12.0


def test_a_backward_in_two_parts_makes_forward_and_both_parts_longer():
    costs = Costs((1.0,), (2.0,), weight=(0.5,), split=(0.75,))
    assert [costs.of(action, is_split=True) for action in (forward(0, 0), backward(0, 0), weight(0, 0))] == [
        1.25,
        1.75,
        0.75,
    ]
    assert [costs.of(action) for action in (forward(0, 0), backward(0, 0))] == [1.0, 2.0]
    whole = simulate(((forward(0, 0), backward(0, 0)),), (), costs)
    parts = simulate(((forward(0, 0), backward(0, 0), weight(0, 0)),), (), costs)
    assert (whole.makespan, parts.makespan) == (3.0, 3.75)


def test_an_unbalanced_stage_sets_the_pace():
    schedule = SCHEDULES["interleaved"](2, (0, 1), 4, 9)
    timeline = simulate(schedule, chain(2), Costs((1.0, 3.0), (2.0, 6.0)))
    assert timeline.makespan == 1.0 + 4 * 9.0 + 2.0


def test_parallel_branches_run_at_the_same_time():
    schedule = evaluation(3, (0, 1, 2), 1)
    timeline = simulate(schedule, [Transfer(0, 2), Transfer(1, 2), Transfer(-1, 1)], Costs.uniform(3))
    assert [start for *_, start, _ in events(timeline)] == [0.0, 0.0, 1.0]


def test_a_backward_without_gradients_waits_for_its_forward_only():
    schedule = SCHEDULES["simple"](2, (0, 1), 1, 1)
    timeline = simulate(schedule, [Transfer(0, 1, has_gradient=False)], Costs.uniform(2))
    assert events(timeline)[1:] == [(0, "B s0 m0", 1.0, 3.0), (1, "F s1 m0", 1.0, 2.0), (1, "B s1 m0", 2.0, 4.0)]


def test_a_link_counts_the_bytes_of_a_channel():
    assert Transfer.of(channel(0, 0, 1, (0, 1), grad=(True, False))) == Transfer(0, 1, 16, 8)
    assert Transfer.of(channel(0, 0, 1, (0, 1), grad=(False,))) == Transfer(0, 1, 8, 0, has_gradient=False)
    assert Transfer.of(channel(0, -1, 1, (0, 1), grad=(True,))) == Transfer(-1, 1, 8, 0, has_gradient=False)
    assert TensorSpec((2,), "float32", (1,)).num_bytes == 8


def test_timeline_text():
    timeline = simulate(SCHEDULES["interleaved"](2, (0, 1), 3, 9), chain(2), Costs.uniform(2))
    assert timeline_text(timeline).splitlines() == [
        "rank 0  F0 F1 .. .. B0 -- F2 B1 -- .. B2 --",
        "rank 1  .. F0 B0 -- F1 B1 -- F2 B2 -- .. ..",
    ]
    assert timeline_text(timeline, max_columns=6).splitlines() == [
        "rank 0  F1 .. B0 B1 .. B2",
        "rank 1  F0 B0 B1 F2 B2 ..",
    ]
    assert timeline_text(Timeline(2, ())) == "rank 0\nrank 1\n"
    assert Timeline(2, ()).bubble_fraction == 0.0


def test_columns_line_up_when_numbers_get_longer():
    timeline = simulate(SCHEDULES["simple"](12, [*range(11), 0], 11, 9), chain(12), Costs.uniform(12))
    rows = timeline_text(timeline).splitlines()
    assert rows[0].startswith("rank 0   0F0   0F1   ")
    assert rows[10].startswith("rank 10  ..... .....")
    assert len({len(row) for row in rows if not row.endswith(".")}) == 1


def test_a_deadlock_names_who_waits_for_what():
    schedule = tuple(
        tuple(Action.parse(text) for text in rank) for rank in [["F s0 m0", "B s0 m0", "F s0 m1"], ["F s1 m1"]]
    )
    with pytest.raises(ScheduleError) as caught:
        simulate(schedule, chain(2), Costs.uniform(2))
    assert str(caught.value).splitlines()[1:3] == [
        "  rank 0: B s0 m0 waits for B s1 m0",
        "  rank 1: F s1 m1 waits for F s0 m1",
    ]


def test_a_link_to_a_stage_that_no_rank_runs():
    with pytest.raises(ScheduleError, match="runs stage 1"):
        simulate(evaluation(1, (0,), 1), chain(2), Costs.uniform(2))
