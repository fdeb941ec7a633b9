"""The chain solver against brute force over all contiguous partitions."""

from __future__ import annotations

import itertools

import pytest
from drawn import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from smpc.errors import PartitionError
from smpc.partitioner.solvers.chain import ChainProblem, Intervals, solve_chain
from smpc.partitioner.stage_costs import Scale, SharedItem, Units


def cost_of(problem, stage, units):
    """The cost of one stage, written out from the definition, unit by unit."""
    scale, columns = problem.scale, problem.units
    held = [item for item in columns.shared if any(user in units for user in item.users)]
    static = sum(columns.static_bytes[u] for u in units) + sum(item.static_bytes for item in held)
    activation = sum(columns.activation_bytes[u] for u in units) + sum(item.activation_bytes for item in held)
    memory = static + problem.in_flight[stage] * activation
    time = sum(columns.time[u] for u in units)
    return (1 - scale.memory_weight) * (time / max(1, scale.total_time)) + scale.memory_weight * (
        memory / max(1, scale.total_memory)
    )


def partitions(problem, num_stages):
    """Every allowed partition with its bottleneck and its (depth, bytes, cuts)."""
    n = len(problem.units)
    for cuts in itertools.combinations([p for p in range(1, n) if p not in problem.forbidden], num_stages - 1):
        ends = (0, *cuts, n)
        bottleneck = max(cost_of(problem, s, range(ends[s], ends[s + 1])) for s in range(num_stages))
        yield bottleneck, (sum(problem.cut_depth[c] for c in cuts), sum(problem.cut_bytes[c] for c in cuts))


@st.composite
def problems(draw):
    n = draw(st.integers(1, 9))
    num_stages = draw(st.integers(1, 4))
    small = st.lists(st.integers(0, 9), min_size=n, max_size=n).map(tuple)
    members = st.sets(st.integers(0, n - 1), min_size=1, max_size=4).map(lambda s: tuple(sorted(s)))
    shared = draw(st.lists(st.builds(SharedItem, members, st.integers(0, 20), st.integers(0, 20)), max_size=3))
    units = Units(draw(small), draw(small), draw(small), tuple(shared))
    in_flight = tuple(draw(st.lists(st.integers(0, 5), min_size=num_stages, max_size=num_stages)))
    scale = Scale.of(units, in_flight, draw(st.sampled_from([0.0, 0.3, 0.8, 1.0])))
    forbidden = tuple(sorted(draw(st.sets(st.integers(1, max(1, n - 1)), max_size=3))))
    return ChainProblem(units, scale, in_flight, draw(small), draw(small), forbidden), num_stages


@settings(max_examples=examples(500), deadline=None)
@given(problems(), st.sampled_from([0.0, 0.01, 0.3]))
def test_equals_brute_force(case, tolerance):
    problem, num_stages = case
    found = list(partitions(problem, num_stages))
    if not found:
        with pytest.raises(PartitionError):
            solve_chain(problem, num_stages, tolerance)
        return
    solution = solve_chain(problem, num_stages, tolerance)
    optimum = min(bottleneck for bottleneck, _ in found)
    assert solution.optimum == optimum
    assert not set(solution.cuts) & set(problem.forbidden)
    ends = (0, *solution.cuts, len(problem.units))
    assert solution.bottleneck == max(cost_of(problem, s, range(*ends[s : s + 2])) for s in range(num_stages))
    assert solution.bottleneck <= optimum * (1 + tolerance)
    best = min(penalty for bottleneck, penalty in found if bottleneck <= optimum * (1 + tolerance))
    assert (sum(problem.cut_depth[c] for c in solution.cuts), sum(problem.cut_bytes[c] for c in solution.cuts)) == best


def test_a_stage_is_never_left_empty_even_where_that_would_be_cheaper():
    # Stage 1 holds nine microbatches: 1 2 | | 2 9 would cost 11, but stage 1 must take a unit, and the smallest costs
    # 18.
    units = Units((0, 0, 0, 0), (0, 0, 0, 0), (1, 2, 2, 9))
    problem = ChainProblem(units, Scale(1.0, 1, 1), (1, 9, 1))
    solution = solve_chain(problem, 3)
    assert solution.optimum == 18.0
    assert solution.cuts == (1, 2)


def test_module_docstring_example():
    problem = ChainProblem(
        Units((3, 1, 1, 1, 3), (0,) * 5, (0,) * 5), Scale(0.0, 1, 1), (1, 1), cut_depth=(0, 0, 2, 1, 0)
    )
    assert solve_chain(problem, 2).cuts == (3,)
    assert solve_chain(problem, 2).assignment(5) == (0, 0, 0, 1, 1)


def test_more_stages_than_pieces():
    units = Units((1, 1, 1), (0, 0, 0), (0, 0, 0))
    with pytest.raises(PartitionError, match="at least 3 separable pieces for 3 stages, found 2"):
        solve_chain(ChainProblem(units, Scale(0.0, 3, 1), (1, 1, 1), forbidden=(1,)), 3)


def test_thousands_of_units_take_no_time():
    units = Units(tuple(i * 7919 % 101 for i in range(20000)), (1,) * 20000, (1,) * 20000)
    in_flight = tuple(range(16, 0, -1))
    problem = ChainProblem(units, Scale.of(units, in_flight, 0.5), in_flight)
    solution = solve_chain(problem, 16, 0.01)
    assert len(solution.cuts) == 15
    assert solution.optimum <= solution.bottleneck <= 1.01 * solution.optimum


def test_a_loose_bound_does_not_cost_a_row_for_every_cut(monkeypatch):
    """Where one unit is heavy, nearly every cut of the others is allowed: 39,000 rows were computed here."""
    rows = []
    whole = Intervals.costs
    monkeypatch.setattr(Intervals, "costs", lambda self, *of: rows.append(of) or whole(self, *of))
    units = Units((*(1,) * 3000, 1000), (0,) * 3001, (0,) * 3001)
    problem = ChainProblem(units, Scale.of(units, (1,) * 16, 0.0), (1,) * 16, (1,) * 3001)
    assert solve_chain(problem, 16).bottleneck == pytest.approx(0.25)
    assert len(rows) < 3000
