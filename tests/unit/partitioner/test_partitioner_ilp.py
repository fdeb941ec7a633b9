"""The integer program against brute force over all monotone placements."""

from __future__ import annotations

import itertools

import pytest
from drawn import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from smpc.errors import PartitionError
from smpc.partitioner.solvers import ilp
from smpc.partitioner.solvers.ilp import PlacementProblem, Value, received_bytes, solve_placement
from smpc.partitioner.stage_costs import Scale, SharedItem, Units, stage_costs


@st.composite
def problems(draw):
    n = draw(st.integers(2, 6))
    num_stages = draw(st.integers(1, min(3, n)))
    small = st.lists(st.integers(0, 9), min_size=n, max_size=n).map(tuple)
    members = st.sets(st.integers(0, n - 1), min_size=1, max_size=3).map(lambda s: tuple(sorted(s)))
    shared = draw(st.lists(st.builds(SharedItem, members, st.integers(0, 20), st.integers(0, 20)), max_size=2))
    units = Units(draw(small), draw(small), draw(small), tuple(shared))
    in_flight = tuple(draw(st.lists(st.integers(0, 4), min_size=num_stages, max_size=num_stages)))
    scale = Scale.of(units, in_flight, draw(st.sampled_from([0.0, 0.3, 1.0])))
    pairs = [(u, w) for u in range(n) for w in range(u + 1, n)]
    dependencies = tuple(sorted(draw(st.sets(st.sampled_from(pairs), max_size=8))))
    values = tuple(
        Value(u, tuple(w for v, w in dependencies if v == u), draw(st.integers(0, 9)))
        for u in sorted({u for u, _ in dependencies})
    )
    return PlacementProblem(units, scale, in_flight, dependencies, values)


def placements(problem):
    """Every monotone placement without empty stages: (bottleneck, bytes)."""
    num_stages = len(problem.in_flight)
    for assignment in itertools.product(range(num_stages), repeat=len(problem.units)):
        if len(set(assignment)) == num_stages and all(assignment[u] <= assignment[w] for u, w in problem.dependencies):
            costs = stage_costs(problem.units, problem.scale, problem.in_flight, assignment)
            yield float(costs.max()), received_bytes(problem, assignment), assignment


@settings(max_examples=examples(60), deadline=None)
@given(problems())
def test_equals_brute_force(problem):
    found = list(placements(problem))
    optimum = min(bottleneck for bottleneck, _, _ in found)
    solution = solve_placement(problem)
    assert solution.bottleneck == pytest.approx(optimum, rel=1e-6, abs=1e-9)
    assert optimum * (1 - 1e-6) - 2e-6 <= solution.lower_bound <= optimum * (1 + 1e-12)
    best = min(num_bytes for bottleneck, num_bytes, _ in found if bottleneck <= solution.bottleneck)
    assert solution.received_bytes == best
    assert any(assignment == solution.assignment for _, _, assignment in found)


def diamond():
    """Four units that no order but the graph's binds: two heavy branches between a light head and tail."""
    units = Units((1, 8, 8, 1), (0, 0, 0, 0), (0, 0, 0, 0))
    edges = ((0, 1), (0, 2), (1, 3), (2, 3))
    values = (Value(0, (1, 2), 5), Value(1, (3,), 5), Value(2, (3,), 5))
    return PlacementProblem(units, Scale.of(units, (1, 1), 0.0), (1, 1), edges, values)


def test_the_start_is_kept_when_nothing_is_better():
    problem = diamond()
    solution = solve_placement(problem, start=(0, 1, 0, 1))
    assert solution.bottleneck == 0.5
    assert solution.assignment == (0, 1, 0, 1)


def test_same_input_same_answer():
    assert solve_placement(diamond()) == solve_placement(diamond())


def test_a_hit_limit_is_said_and_the_start_is_used():
    problem = diamond()
    solution = solve_placement(problem, start=(0, 0, 0, 1), time_limit=0.0)
    assert "limit" in solution.note
    assert solution.bottleneck <= 17 / 18
    assert solution.lower_bound <= 0.5


def test_the_node_limit_is_no_error(monkeypatch):
    monkeypatch.setattr(ilp, "_NODE_LIMIT", 1)
    n = 18
    units = Units(tuple(17 * i % 29 + 1 for i in range(n)), (0,) * n, (0,) * n)
    problem = PlacementProblem(units, Scale.of(units, (1,) * 4, 0.0), (1,) * 4, tuple((i, i + 2) for i in range(n - 2)))
    start = tuple(i * 4 // n for i in range(n))
    solution = solve_placement(problem, start=start)
    assert "limit" in solution.note
    assert solution.lower_bound <= solution.bottleneck
    assert solution.bottleneck <= float(stage_costs(units, problem.scale, problem.in_flight, start).max())


def test_cbc_is_the_fallback(monkeypatch):
    monkeypatch.setattr(ilp, "solver_name", lambda: "CBC")
    solution = solve_placement(diamond())
    assert solution.bottleneck == 0.5
    assert solution.received_bytes == 10


def test_without_a_solver_the_start_is_the_answer(monkeypatch):
    monkeypatch.setattr(ilp, "solver_name", lambda: None)
    with pytest.warns(UserWarning, match="highspy"):
        solution = solve_placement(diamond(), start=(0, 0, 0, 1))
    assert solution.assignment == (0, 0, 0, 1)
    assert "no solver" in solution.note


def test_more_stages_than_units():
    units = Units((1,), (0,), (0,))
    with pytest.raises(PartitionError, match="at least 2 units"):
        solve_placement(PlacementProblem(units, Scale.of(units, (1, 1), 0.0), (1, 1), ()))
