"""Virtual stages and zero bubble: tables, and what holds for every schedule; test_codegen_schedules_formulas.py has the formulas."""

import itertools
import textwrap

import pytest
from drawn import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from smpc.codegen.program import backward, forward, peaks, split_backwards, weight
from smpc.codegen.schedules.named import interleaved_1f1b, loop_placement, table
from smpc.codegen.schedules.zero_bubble import v_placement, zb_h1, zb_h2, zb_v
from smpc.codegen.simulate import Costs, chain, simulate

TABLES = {
    ("interleaved-1f1b", 2, 4): """\
        rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 ... 2B2 ... 2B3 0B2 0B3
        rank 1  ... 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 ...""",
    # the last turn is cut short: microbatch 3 does not exist
    ("interleaved-1f1b", 2, 3): """\
        rank 0  0F0 0F1 2F0 2F1 0F2 2B0 ... 2B1 2F2 0B0 0B1 ... 2B2 ... 0B2
        rank 1  ... 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1B1 3F2 3B2 ... 1B2 ...""",
    ("zb-h1", 3, 5): """\
        rank 0  F0 F1 F2 .. .. B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4
        rank 1  .. F0 F1 .. B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 B4 W3 W4
        rank 2  .. .. F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4""",
    ("zb-h2", 3, 5): """\
        rank 0  F0 F1 F2 F3 F4 B0 W0 B1 W1 B2 W2 B3 W3 B4 W4 .. ..
        rank 1  .. F0 F1 F2 B0 F3 B1 F4 B2 W0 B3 W1 B4 W2 W3 W4 ..
        rank 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 W1 W2 W3 W4""",
    ("zb-v", 2, 3): """\
        rank 0  0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 3F2 3B2 3W2 0B1 0W1 0B2 0W2 ...
        rank 1  ... 1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1B1 2B2 1B2 1W1 2W2 1W2""",
}
BUILD = {
    "interleaved-1f1b": (lambda p: loop_placement(p, 2), lambda p, m: interleaved_1f1b(p, 2, m)),
    "interleaved-1f1b by 3": (lambda p: loop_placement(p, 3), lambda p, m: interleaved_1f1b(p, 3, m)),
    "zb-h1": (lambda p: tuple(range(p)), zb_h1),
    "zb-h2": (lambda p: tuple(range(p)), zb_h2),
    "zb-v": (v_placement, zb_v),
}


@pytest.mark.parametrize("case", TABLES, ids=str)
def test_tables(case):
    name, p, m = case
    assert table(BUILD[name][1](p, m)).splitlines() == textwrap.dedent(TABLES[case]).splitlines()


@pytest.mark.parametrize("p", [2, 3, 5, 8])
@pytest.mark.parametrize("v", [2, 3])
def test_interleaved_1f1b_takes_no_longer_than_the_next_multiple(p, v):
    for m in range(1, 3 * p):
        full = -(-m // p) * p
        found, padded = (simulate(interleaved_1f1b(p, v, n), chain(p * v), Costs.uniform(p * v)) for n in (m, full))
        assert found.makespan <= padded.makespan == 3 * (v * full + p - 1)


@pytest.mark.parametrize("p", [2, 5, 8])
def test_zb_h2_has_no_pause_between_the_first_and_the_last_action_of_a_rank(p):
    for m in (2 * p - 1, 3 * p):
        found = simulate(zb_h2(p, m), chain(p), Costs.uniform(p))
        for rank in range(p):
            own = [event for event in found.events if event.rank == rank]
            assert (own[0].start, own[-1].end) == (rank, rank + 3 * m)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_a_slower_weight_part_costs_what_the_formula_says(p):
    m = 3 * p
    for f, i, w in [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (1.0, 1.5, 0.5)]:
        costs = Costs((f,) * p, (i + w,) * p, weight=(w,) * p)
        found = simulate(zb_h1(p, m), chain(p), costs).makespan
        assert found >= m * (f + i + w) + (p - 1) * (f + i - w) - 1e-9
        one = simulate(tuple(tuple(a for a in rank if a.op != "W") for rank in zb_h1(p, m)), chain(p), costs).makespan
        assert found < one


@settings(max_examples=examples(100), deadline=None)
@given(st.sampled_from(sorted(BUILD)), st.integers(1, 6), st.integers(1, 14))
def test_every_schedule_is_complete_ascending_and_possible(name, p, m):
    placement, build = BUILD[name][0](p), BUILD[name][1]
    schedule = build(p, m)
    num_stages = len(placement)
    simulate(schedule, chain(num_stages), Costs.uniform(num_stages))
    splits = not name.startswith("interleaved")
    for rank, actions in enumerate(schedule):
        own = [stage for stage in range(num_stages) if placement[stage] == rank]
        for stage, make in itertools.product(own, (forward, backward, weight) if splits else (forward, backward)):
            op = make(stage, 0).op
            found = [action for action in actions if (action.op, action.stage) == (op, stage)]
            assert found == [make(stage, microbatch) for microbatch in range(m)]
        assert len(split_backwards(actions)) == (len(own) * m if splits else 0)
    assert max(peaks(schedule, num_stages)) <= m


def test_one_rank_has_no_bubble():
    for build in (zb_h1, zb_h2):
        assert simulate(build(1, 3), chain(1), Costs.uniform(1)).bubble_fraction == 0.0
    assert simulate(zb_v(1, 3), chain(2), Costs.uniform(2)).bubble_fraction == 0.0
    assert interleaved_1f1b(1, 1, 2) == ((forward(0, 0), backward(0, 0), forward(0, 1), backward(0, 1)),)
