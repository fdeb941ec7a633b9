"""The search over prefixes, and placements made from it, against brute force over all monotone placements."""

from __future__ import annotations

import itertools
import math

import networkx as nx
import pytest
from drawn import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from smpc.partitioner.solvers import prefix_lattice as lattice_module
from smpc.partitioner.solvers.bottleneck_bound import graph_bound
from smpc.partitioner.solvers.prefix_lattice import best_chain, build_lattice, chain_stages, place
from smpc.partitioner.stage_costs import Scale, SharedItem, Units, stage_costs


@st.composite
def graphs(draw, max_units=6):
    n = draw(st.integers(1, max_units))
    num_stages = draw(st.integers(1, 3))
    numbers = st.lists(st.sampled_from([0, 1, 2, 2, 5, 9]), min_size=n, max_size=n).map(tuple)  # equal costs make twins
    members = st.sets(st.integers(0, n - 1), min_size=1, max_size=3).map(lambda s: tuple(sorted(s)))
    shared = draw(st.lists(st.builds(SharedItem, members, st.integers(0, 9), st.integers(0, 9)), max_size=2))
    units = Units(draw(numbers), draw(numbers), draw(numbers), tuple(shared))
    in_flight = tuple(draw(st.lists(st.integers(1, 4), min_size=num_stages, max_size=num_stages)))
    speeds = draw(st.sampled_from([(), (1.0, 2.0, 0.5)]))[:num_stages]
    limits = draw(st.sampled_from([(), (), (60, 30, 45)]))[:num_stages]
    scale = Scale.of(units, in_flight, draw(st.sampled_from([0.0, 0.3, 1.0])), speeds, limits)
    pairs = [(u, w) for u in range(n) for w in range(u + 1, n)]
    dag = nx.DiGraph()
    dag.add_nodes_from(range(n))
    dag.add_edges_from(sorted(draw(st.sets(st.sampled_from(pairs), max_size=8))) if pairs else ())
    return units, dag, scale, in_flight


def optimum(units, dag, scale, in_flight, may_be_empty=False):
    """The smallest bottleneck of any placement; infinite if there is none."""
    return min(
        (
            float(stage_costs(units, scale, in_flight, placed).max())
            for placed in itertools.product(range(len(in_flight)), repeat=len(units))
            if all(placed[u] <= placed[w] for u, w in dag.edges) and (may_be_empty or len({*placed}) == len(in_flight))
        ),
        default=math.inf,
    )


def more_than_all(units, scale, in_flight):
    free = Scale(scale.memory_weight, scale.total_time, scale.total_memory, scale.speeds)
    return 1.0 + max(float(stage_costs(units, free, in_flight, [s] * len(units)).max()) for s in range(len(in_flight)))


@settings(max_examples=examples(60), deadline=None)
@given(graphs())
def test_with_all_prefixes_the_smallest_bottleneck_is_found(case):
    units, dag, scale, in_flight = case
    best, high = optimum(*case), more_than_all(units, scale, in_flight)
    lattice = build_lattice(units, dag, scale, in_flight)
    assert lattice is not None
    assert lattice.is_exact
    found = best_chain(lattice, scale, in_flight, 0.0, high)
    if best == math.inf:
        assert found.possible == high
        assert chain_stages(lattice, scale, in_flight, high) is None
        return
    assert found.bound <= best * (1 + 1e-12)
    assert best <= found.possible * (1 + 1e-12) <= best * 1.001 + 1e-12
    assert found.stages == chain_stages(lattice, scale, in_flight, found.possible)
    stages = dict(zip(lattice.kept, found.stages, strict=True))
    assert all(stages[u] <= stages[w] for u, w in dag.edges)
    costs = stage_costs(units, scale, in_flight, [stages[u] for u in range(len(units))])
    assert float(costs.max()) <= found.possible


@settings(max_examples=examples(60), deadline=None)
@given(graphs(), st.integers(2, 40))
def test_with_fluid_units_and_empty_stages_the_bound_holds(case, most):
    units, dag, scale, in_flight = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lattice_module, "_EXACT", 0)
        lattice = build_lattice(units, dag, scale, in_flight, most)
        best = optimum(*case, may_be_empty=True)
        if lattice is None or best == math.inf:
            return
        assert len(lattice.masks) <= most
        found = best_chain(lattice, scale, in_flight, 0.0, more_than_all(units, scale, in_flight))
    assert found.bound <= best * (1 + 1e-12) + 1e-15


@settings(max_examples=examples(50), deadline=None)
@given(graphs())
def test_graph_bound_is_below_every_placement(case):
    units, dag, scale, in_flight = case
    best = optimum(*case)
    if best < math.inf:
        assert graph_bound(units, dag, scale, in_flight, 0.0, best * 1.5 + 0.01) <= best * (1 + 1e-12)
        assert graph_bound(units, dag, scale, in_flight, 0.0) <= best * (1 + 1e-12)


@settings(max_examples=examples(50), deadline=None)
@given(graphs(), st.sampled_from([3, 8, 1000]))
def test_placements_are_valid(case, most):
    units, dag, scale, in_flight = case
    best, high = optimum(*case), more_than_all(units, scale, in_flight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_lattice, "__defaults__", (most,))  # many units are fluid, and placed whole in the end
        found = place(units, dag, scale, in_flight, 0.0, high)
    if found is None:
        return
    assert all(found.stage_of[u] <= found.stage_of[w] for u, w in dag.edges)
    assert set(found.stage_of) == set(range(len(in_flight)))
    assert found.bottleneck == float(stage_costs(units, scale, in_flight, found.stage_of).max())
    assert best * (1 - 1e-12) <= found.bottleneck < high
    if most == 1000:
        assert found.bottleneck <= best * 1.001 + 1e-12


def test_module_docstring_example():
    units = Units((1, 8, 8, 1), (0,) * 4, (0,) * 4)
    dag = nx.DiGraph([(0, 1), (0, 2), (1, 3), (2, 3)])
    lattice = build_lattice(units, dag, Scale(0.0, 1, 1), (1, 1))
    assert [sorted(u for u in range(4) if mask >> u & 1) for mask in lattice.masks] == [
        [],
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
    ]  # 1 and 2 are twins
    assert best_chain(lattice, Scale(0.0, 1, 1), (1, 1), 0.0, 18.0).possible == pytest.approx(9.0, rel=1e-3)


def test_twins_are_ordered_by_what_waits_for_them():
    # 0 -> 1 -> 2 is the path; 3, 4, 5 are alike and needed by 2, 1 and 1: 64 prefixes would do without order.
    units = Units((9, 9, 9, 2, 2, 2), (0,) * 6, (0,) * 6)
    dag = nx.DiGraph([(0, 1), (1, 2), (3, 2), (4, 1), (5, 1)])
    lattice = build_lattice(units, dag, Scale(0.0, 1, 1), (1, 1))
    members = [sorted(lattice.kept[u] for u in range(6) if mask >> u & 1) for mask in lattice.masks]
    assert all(3 not in found or {4, 5} <= {*found} for found in members)
    assert all(5 not in found or 4 in found for found in members)


@pytest.mark.long
def test_thousands_of_units_with_many_prefixes():
    n = 1500
    units = Units(tuple(i * 7919 % 101 + 1 for i in range(n)), (1,) * n, (1,) * n)
    dag = nx.DiGraph([(i, i + 1 + i * 31 % 7) for i in range(n) if i + 1 + i * 31 % 7 < n])
    dag.add_nodes_from(range(n))
    scale = Scale.of(units, (4, 3, 2, 1), 0.2)
    found = place(units, dag, scale, (4, 3, 2, 1), 0.0, 1.0)
    assert found is not None
    bound = graph_bound(units, dag, scale, (4, 3, 2, 1), 0.0, found.bottleneck)
    # The search keeps a bounded number of prefixes, which costs some per cent of a graph without structure.
    assert bound <= found.bottleneck <= bound * 1.06
