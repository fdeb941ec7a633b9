"""Instances whose devices differ in speed and memory alone, in a row, each with a node: all of the planner's solvers, to proof.

1   the best cut of the nodes, in topological order, into contiguous stages, exact for that order
2   all placements, by their prefixes (`smpc.partitioner.solvers.lattice`), which also proves the lower bound
3   small instances: the integer program (`smpc.partitioner.solvers.ilp`), which closes what gap is left and then saves bytes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import networkx as nx

from smpc.errors import PartitionError
from smpc.partitioner.instances.instance import Instance, is_within
from smpc.partitioner.instances.units import Found, joined, values
from smpc.partitioner.problem import Scale, Units, in_proportion, stage_costs
from smpc.partitioner.solvers.bound import graph_bound
from smpc.partitioner.solvers.chain import ChainProblem, solve_chain
from smpc.partitioner.solvers.ilp import PlacementProblem, Value, received_bytes, solve_placement
from smpc.partitioner.solvers.lattice import place

_MAX_ILP_UNITS = 48


def solve_row(instance: Instance, gap: float, time_limit: float) -> Found | None:
    """The best placement found; None if nothing fits."""
    numbers = _Numbers.of(instance)
    found = _search_row(numbers, gap, time_limit)
    if found is not None and not is_within(instance, found.by_node(instance, numbers.unit_of)):
        numbers = numbers.strict()  # rounding: keep to limits rounded down
        stricter = _search_row(numbers, gap, time_limit)
        found = (
            None if stricter is None else replace(stricter, lower_bound=min(found.lower_bound, stricter.lower_bound))
        )
    return found


def a_cut_fits(instance: Instance) -> bool:
    """Whether some cut of the nodes in topological order is within the limits, which is quick to say."""
    return _contiguous_placement(_Numbers.of(instance)) is not None


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The instance in whole numbers; nodes that share a device are one unit."""

    units: Units
    dag: nx.DiGraph[int]
    scale: Scale
    in_flight: tuple[int, ...]
    values: tuple[Value, ...]
    unit_of: tuple[int, ...]  # by node
    strict_limits: tuple[int, ...]  # rounded down; the limits of `scale` allow for rounding

    @classmethod
    def of(cls, instance: Instance) -> _Numbers:
        time, _ = in_proportion([node.time for node in instance.nodes])
        in_flight = tuple(device.in_flight for device in instance.devices)
        amounts = [value for node in instance.nodes for value in (node.memory, node.activation_memory)]
        held, per_byte = in_proportion(amounts, max(in_flight))
        unit_of, dag = joined(instance)
        units = Units(tuple(time), tuple(held[::2]), tuple(held[1::2])).merged(unit_of, dag.number_of_nodes())
        most = sum(units.static_bytes) + max(in_flight) * sum(units.activation_bytes)
        limits = [_in_bytes(device.memory_limit, per_byte, most) for device in instance.devices]
        rounded = [whole != Fraction(value) * per_byte for whole, value in zip(held, amounts, strict=True)]
        slack = sum(rounded[::2]) + max(in_flight) * sum(rounded[1::2])
        scale = Scale.of(
            units,
            in_flight,
            instance.memory_weight,
            speeds=[device.speed for device in instance.devices],
            limits=[min(most, limit + slack) for limit in limits],
            exactly=True,
        )
        sent, _ = values(instance, unit_of)
        return cls(units, dag, scale, in_flight, sent, tuple(unit_of), tuple(limits))

    def strict(self) -> _Numbers:
        """The same with limits rounded down."""
        return replace(self, scale=replace(self.scale, limits=self.strict_limits))

    def problem(self) -> PlacementProblem:
        """For the integer program."""
        return PlacementProblem(self.units, self.scale, self.in_flight, tuple(sorted(self.dag.edges)), self.values)

    def cost(self, stage_of: Sequence[int]) -> float:
        """The largest load."""
        return float(stage_costs(self.units, self.scale, self.in_flight, stage_of).max())


def _search_row(numbers: _Numbers, gap: float, time_limit: float) -> Found | None:
    """The best placement in a row that is found; None if limits allow none."""
    start, solver = _contiguous_placement(numbers), "chain"
    highest = numbers.cost(start) if start is not None else _everything_on_row(numbers)
    units, dag, scale, in_flight = numbers.units, numbers.dag, numbers.scale, numbers.in_flight
    bound = graph_bound(units, dag, scale, in_flight, 0.0, highest) if len(in_flight) > 1 else highest
    if math.isinf(bound):
        return None
    if highest > bound * (1.0 + gap) or start is None:
        placed = place(units, dag, scale, in_flight, bound, highest * (1.0 if start is not None else 2.0))
        if placed is not None:
            start, solver, highest = placed.stage_of, "graph", placed.bottleneck
    note = ""
    is_open = start is None or highest > bound * (1.0 + gap)
    if len(in_flight) > 1 and len(units) <= _MAX_ILP_UNITS and (numbers.values or is_open):
        problem = numbers.problem()
        before = None if start is None else (highest, received_bytes(problem, start))
        reduced = replace(problem, dependencies=tuple(sorted(nx.transitive_reduction(numbers.dag).edges)))
        try:
            solution = solve_placement(reduced, start, gap / 2, time_limit)
        except PartitionError:
            return None
        bound, note = max(bound, solution.lower_bound), solution.note
        if before is None or (solution.bottleneck, solution.received_bytes) != before:
            start, solver = solution.assignment, "ilp"
    return None if start is None else Found(tuple(start), bound, solver, note)


def _contiguous_placement(numbers: _Numbers) -> tuple[int, ...] | None:
    """The best placement that is contiguous in one order of the units."""
    order = list(nx.lexicographical_topological_sort(numbers.dag))
    chain = ChainProblem(numbers.units.subset(order), numbers.scale, numbers.in_flight)
    try:
        stages = solve_chain(chain, len(numbers.in_flight)).assignment(len(order))
    except PartitionError:  # none within the limits
        return None
    placed = dict(zip(order, stages, strict=True))
    return tuple(placed[unit] for unit in range(len(order)))


def _everything_on_row(numbers: _Numbers) -> float:
    """More than any device can have to do."""
    units, scale = numbers.units, replace(numbers.scale, limits=())
    alone = [
        stage_costs(units, scale, numbers.in_flight, [s] * len(units)).max() for s in range(len(numbers.in_flight))
    ]
    return float(max(alone)) * (1.0 + 1e-6) + 1e-9


def _in_bytes(limit: float | None, per_byte: Fraction, most: int) -> int:
    """A limit in whole numbers, rounded down: at most what all nodes take."""
    return most if limit is None else min(most, math.floor(Fraction(limit) * per_byte))
