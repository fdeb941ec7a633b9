"""The numeric planner: a graph of costs and devices in, a placement with a proven bound out. No model is needed.

The load of a device is (1 - w) * its time / total time + w * its memory / total memory, with w the memory weight; its time is the sum of
its nodes' times divided by its speed, plus the time of its transfers (see `smpc.partitioner.instances.instance`). `solve_instance`
minimises the largest load: with `solve_row` if neither transfers nor kinds of devices count, else with `solve_loaded`.

Numbers may be fractions. They are exact where 61 bits hold them all; where they differ too much in size for that, they are rounded
to one part in 2^60 of the total: a placement that is found is within the limits all the same, but one that just fits may be missed.

    instance = Instance.of(
        nodes=[Node("a", 1), Node("b", 8), Node("c", 8), Node("d", 1)],
        edges=[("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")],
        devices=2,
    )
    found = solve_instance(instance)
    found.stage_of                              # {'a': 0, 'b': 0, 'c': 1, 'd': 1}
    found.bottleneck, found.lower_bound         # (0.5, 0.5): nine of eighteen

`solve_loaded`: instances whose loads count transfers, or kinds of devices, or whose devices come in any order or none at all.

1   splits into stages: all placements, by their prefixes (`smpc.partitioner.solvers.staged`), exact unless there are too many
2   what is not proven then, and splits that are free: moves of single units (`smpc.partitioner.solvers.annealing`)
3   what devices cut at least, for a bound above work alone (`smpc.partitioner.solvers.transfer_bound`)
4   and the integer program, for those small enough (`smpc.partitioner.solvers.loads`)

`solve_row`: instances whose devices differ in speed and memory alone, in a row, each with a node: all of the planner's solvers, to proof.

1   the best cut of the nodes, in topological order, into contiguous stages, exact for that order
2   all placements, by their prefixes (`smpc.partitioner.solvers.prefix_lattice`), which also proves the lower bound
3   small instances: the integer program (`smpc.partitioner.solvers.ilp`), which closes what gap is left and then saves bytes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import networkx as nx
import numpy as np

from smpc.errors import MemoryLimitError, PartitionError
from smpc.partitioner.instances.instance import (
    FoundPlacement,
    Instance,
    Link,
    Processor,
    is_within,
    joined,
    largest_load,
    memory,
    moved_bytes,
    times,
    totals,
    values,
)
from smpc.partitioner.solvers.annealing import improve_by_moves
from smpc.partitioner.solvers.bottleneck_bound import graph_bound
from smpc.partitioner.solvers.chain import ChainProblem, solve_chain
from smpc.partitioner.solvers.ilp import TIME_LIMIT, PlacementProblem, Value, received_bytes, solve_placement
from smpc.partitioner.solvers.loads import LoadProblem, simple_bound, solve_loads
from smpc.partitioner.solvers.prefix_lattice import place
from smpc.partitioner.solvers.staged import MAX_PAIRS, STOPPED, Staged, solve_stages
from smpc.partitioner.solvers.transfer_bound import cut_bound
from smpc.partitioner.stage_costs import FloatArray, IntArray, Scale, Units, in_proportion, relative_gap, stage_costs

_MAX_ILP_UNITS = 48


def solve_row(instance: Instance, gap: float, time_limit: float) -> FoundPlacement | None:
    """The best placement found; None if nothing fits."""
    numbers = _WholeNumbers.of(instance)
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
    return _contiguous_placement(_WholeNumbers.of(instance)) is not None


@dataclass(frozen=True, slots=True)
class _WholeNumbers:
    """The instance in whole numbers; nodes that share a device are one unit."""

    units: Units
    dag: nx.DiGraph[int]
    scale: Scale
    in_flight: tuple[int, ...]
    values: tuple[Value, ...]
    unit_of: tuple[int, ...]  # by node
    strict_limits: tuple[int, ...]  # rounded down; the limits of `scale` allow for rounding

    @classmethod
    def of(cls, instance: Instance) -> _WholeNumbers:
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

    def strict(self) -> _WholeNumbers:
        """The same with limits rounded down."""
        return replace(self, scale=replace(self.scale, limits=self.strict_limits))

    def problem(self) -> PlacementProblem:
        """For the integer program."""
        return PlacementProblem(self.units, self.scale, self.in_flight, tuple(sorted(self.dag.edges)), self.values)

    def cost(self, stage_of: Sequence[int]) -> float:
        """The largest load."""
        return float(stage_costs(self.units, self.scale, self.in_flight, stage_of).max())


def _search_row(numbers: _WholeNumbers, gap: float, time_limit: float) -> FoundPlacement | None:
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
    return None if start is None else FoundPlacement(tuple(start), bound, solver, note)


def _contiguous_placement(numbers: _WholeNumbers) -> tuple[int, ...] | None:
    """The best placement that is contiguous in one order of the units."""
    order = list(nx.lexicographical_topological_sort(numbers.dag))
    chain = ChainProblem(numbers.units.subset(order), numbers.scale, numbers.in_flight)
    try:
        stages = solve_chain(chain, len(numbers.in_flight)).assignment(len(order))
    except PartitionError:  # none within the limits
        return None
    placed = dict(zip(order, stages, strict=True))
    return tuple(placed[unit] for unit in range(len(order)))


def _everything_on_row(numbers: _WholeNumbers) -> float:
    """More than any device can have to do."""
    units, scale = numbers.units, replace(numbers.scale, limits=())
    alone = [
        stage_costs(units, scale, numbers.in_flight, [s] * len(units)).max() for s in range(len(numbers.in_flight))
    ]
    return float(max(alone)) * (1.0 + 1e-6) + 1e-9


def _in_bytes(limit: float | None, per_byte: Fraction, most: int) -> int:
    """A limit in whole numbers, rounded down: at most what all nodes take."""
    return most if limit is None else min(most, math.floor(Fraction(limit) * per_byte))


_LARGEST = 1e300
_MAX_PROGRAM = 1500  # units x devices of an integer program
_FIRST_PAIRS = 200_000_000  # of prefixes that are looked at before the integer program is asked


def solve_loaded(instance: Instance, gap: float, time_limit: float) -> FoundPlacement | None:
    """The best placement found; None if nothing fits."""
    if instance.split == "free":
        return _solve_free(instance, gap, time_limit)
    problem = load_problem(instance)
    first = solve_stages(problem, gap, _FIRST_PAIRS if _takes_program(problem) else MAX_PAIRS)
    found = _from_stages(problem, first, gap, time_limit)
    is_proven = found is not None and problem.bottleneck(found.device_of) <= found.lower_bound * (1.0 + gap)
    if is_proven or first.note != STOPPED or not _takes_program(problem):
        return found
    whole = solve_stages(problem, gap)
    if found is None:
        return (
            None if whole.device_of is None else FoundPlacement(whole.device_of, whole.lower_bound, "graph", whole.note)
        )
    found = replace(found, lower_bound=max(found.lower_bound, whole.lower_bound), note=whole.note)
    if whole.device_of is not None and whole.bottleneck < problem.bottleneck(found.device_of):
        found = replace(found, device_of=whole.device_of, solver="graph")
    return found


def _from_stages(problem: LoadProblem, staged: Staged, gap: float, time_limit: float) -> FoundPlacement | None:
    """What the search of stages found, improved unless it is proven."""
    start, bound = staged.device_of, staged.lower_bound
    if start is None or not staged.note or staged.bottleneck <= bound * (1.0 + gap):
        return None if start is None else FoundPlacement(start, bound, "graph", staged.note)
    return _improved_loaded(problem, start, bound, staged, gap, time_limit)


def _takes_program(problem: LoadProblem) -> bool:
    """Whether the integer program knows its order, and is small enough: it then proves in seconds what may take minutes to search."""
    return problem.in_row and problem.num_units * problem.num_devices <= _MAX_PROGRAM


def _solve_free(instance: Instance, gap: float, time_limit: float) -> FoundPlacement | None:
    """Begins with the best split into stages, if one fits."""
    problem = load_problem(instance)
    bound = simple_bound(problem)
    unit_of, _ = joined(instance)
    stages = replace(instance, split="contiguous")
    in_stages = load_problem(stages)
    may_stage = instance.may_idle or in_stages.num_units >= in_stages.num_devices
    staged = solve_stages(in_stages, gap).device_of if may_stage else None
    if staged is None:
        start = _loaded_anywhere(problem)
    else:
        found = dict(zip(unit_of, (staged[unit] for unit in joined(stages)[0]), strict=True))
        start = tuple(found[unit] for unit in range(problem.num_units))
    if problem.bottleneck(start) <= bound * (1.0 + gap):
        return FoundPlacement(start, bound, "graph")
    return _improved_loaded(problem, start, bound, None, gap, time_limit)


def _improved_loaded(
    problem: LoadProblem, start: tuple[int, ...], bound: float, staged: Staged | None, gap: float, time_limit: float
) -> FoundPlacement | None:
    """By moves of units and the integer program. `staged`: what keeps the order of units, if they have one."""
    moved = improve_by_moves(problem, start, None if staged is None else staged.row)
    best, solver, note = moved, "graph" if moved == start else "search", "" if staged is None else staged.note
    reached = problem.bottleneck(best)
    if math.isinf(reached) or not (problem.may_idle or len(set(best)) == problem.num_devices):
        return None
    if reached > bound * (1.0 + gap):
        bound = max(bound, cut_bound(problem, reached))
    has_program = problem.in_row or staged is None
    if reached > bound * (1.0 + gap) and has_program and problem.num_units * problem.num_devices <= _MAX_PROGRAM:
        found, proven, note = solve_loads(problem, best, gap / 2, time_limit)
        bound = max(bound, proven)
        if problem.bottleneck(found) < reached:
            best, solver = found, "ilp"
    elif reached > bound * (1.0 + gap):
        note = note or "too large for the integer program: best placement found"
    return FoundPlacement(best, bound, solver, note)


def _loaded_anywhere(problem: LoadProblem) -> tuple[int, ...]:
    """Where a free split may begin: the heaviest unit first, each where that makes the least load, whatever is held."""
    found, loads = [0] * problem.num_units, [0.0] * problem.num_devices
    heaviest = sorted(range(problem.num_units), key=lambda u: (-float(problem.costs[:, u].min()), u))
    for i, unit in enumerate(heaviest):
        costs = [float(problem.costs[kind, unit]) for kind in problem.kind_of]
        allowed = [d for d, cost in enumerate(costs) if math.isfinite(cost)]
        idle = [d for d in allowed if not loads[d]] if len(heaviest) - i <= problem.num_devices else []
        device = min(idle or allowed, key=lambda d: (loads[d] + costs[d], d))
        found[unit], loads[device] = device, loads[device] + costs[device]
    return tuple(found)


def load_problem(instance: Instance) -> LoadProblem:
    """The instance in the numbers of the solvers: a unit for nodes that share a device, and a kind for devices that are alike."""
    unit_of, order = joined(instance)
    kinds = list(dict.fromkeys(instance.devices))
    size = (len(kinds), order.number_of_nodes())
    memory, limits = _memory_of_loaded_units(instance, kinds, unit_of, size)
    sent, factor = values(instance, unit_of)
    per_second, _ = _weights_of_loads(instance)
    return LoadProblem(
        _load_costs(instance, kinds, unit_of, size),
        memory,
        limits,
        tuple(_double(per_second / (Fraction(kind.bandwidth) * factor)) if kind.bandwidth else 0.0 for kind in kinds),
        tuple(kinds.index(device) for device in instance.devices),
        order,
        sent,
        instance.split == "row",
        instance.may_idle,
    )


def _weights_of_loads(instance: Instance) -> tuple[Fraction, Fraction]:
    """The weights of a unit of time and of a byte in a load."""
    time, held = totals(instance)
    weight = Fraction(instance.memory_weight)
    return (1 - weight) / time, weight / held


def _load_costs(instance: Instance, kinds: list[Processor], unit_of: list[int], size: tuple[int, int]) -> FloatArray:
    """The load of each unit on each kind of device."""
    per_second, per_byte = _weights_of_loads(instance)
    costs = np.zeros(size)
    for k, kind in enumerate(kinds):
        exact = [Fraction(0)] * size[1]
        for node, unit in zip(instance.nodes, unit_of, strict=True):
            time = node.time_at(kind)
            if time is None:
                costs[k, unit] = math.inf
            held = Fraction(node.memory_at(kind)) + kind.in_flight * Fraction(node.activation_memory)
            exact[unit] += per_second * Fraction(time or 0) / Fraction(kind.speed) + per_byte * held
        costs[k] += [_double(value) for value in exact]
    return costs


def _memory_of_loaded_units(
    instance: Instance, kinds: list[Processor], unit_of: list[int], size: tuple[int, int]
) -> tuple[IntArray, tuple[int, ...]]:
    """The memory of units, rounded up, and the limits, rounded down, by kind."""
    amounts = [
        value for node in instance.nodes for kind in kinds for value in (node.memory_at(kind), node.activation_memory)
    ]
    whole, factor = in_proportion(amounts, max(kind.in_flight for kind in kinds))
    memory = np.zeros(size, dtype=np.int64)
    for i, unit in enumerate(unit_of):
        for k, kind in enumerate(kinds):
            at = 2 * (i * len(kinds) + k)
            memory[k, unit] += whole[at] + kind.in_flight * whole[at + 1]
    most = int(memory.sum(axis=1).max())
    limits = (
        most if kind.memory_limit is None else min(most, math.floor(Fraction(kind.memory_limit) * factor))
        for kind in kinds
    )
    return memory, tuple(limits)


def _double(value: Fraction) -> float:
    return float(min(value, Fraction(_LARGEST)))


_MAX_DEVICES = 128  # the search for the fewest that would do goes no further


@dataclass(frozen=True, slots=True)
class InstanceSolution:
    """No placement has a smaller bottleneck than `lower_bound`; gap = bottleneck / lower_bound - 1, infinite if only 0 is proven."""

    stage_of: dict[str, int]  # device of each node
    bottleneck: float
    lower_bound: float
    gap: float
    times: tuple[float, ...]  # by device, with its transfers
    memory: tuple[float, ...]
    received_bytes: float
    solver: str  # "chain", "graph", "search" or "ilp"
    note: str = ""  # a solver limit that was hit, for instance


def solve_instance(instance: Instance, gap: float = 1e-3, time_limit: float = 40.0) -> InstanceSolution:
    """The best placement found, to within the relative `gap` if that can be proven.

    time_limit: seconds for the integer program; the other steps are bounded by their size. Raises MemoryLimitError if nothing
    fits, with the least memory and the fewest devices that would do; PartitionError for more devices than nodes.
    """
    if not (time_limit >= 0 and gap >= 0):  # nor nan
        raise PartitionError(f"expected a time limit and a gap of 0 or more, found {time_limit} and {gap}")
    unit_of, _ = joined(instance)
    number = len(set(unit_of))
    if len(instance.devices) > number and not instance.may_idle:
        raise PartitionError(
            f"expected at most as many devices as separable nodes, found {len(instance.devices)} and {number}"
        )
    found = _find_for_instance(instance, gap, time_limit)
    if found is None:
        raise _infeasible_instance(instance, unit_of)
    by_node = found.by_node(instance, unit_of)
    taken, held = times(instance, by_node), memory(instance, by_node)
    bottleneck = largest_load(instance, taken, held)
    proven = min(found.lower_bound, bottleneck)
    return InstanceSolution(
        by_node,
        bottleneck,
        proven,
        relative_gap(bottleneck, proven),
        tuple(map(float, taken)),
        tuple(map(float, held)),
        moved_bytes(instance, by_node),
        found.solver,
        found.note,
    )


def _find_for_instance(instance: Instance, gap: float, time_limit: float) -> FoundPlacement | None:
    return (solve_row if _is_plain(instance) else solve_loaded)(instance, gap, time_limit)


def _is_plain(instance: Instance) -> bool:
    """Whether devices differ in speed and memory alone, are in a row, and each has a node."""
    has_kinds = any(node.time_on or node.memory_on or node.backward for node in instance.nodes)
    has_transfers = any(device.bandwidth is not None for device in instance.devices)
    return instance.split == "row" and not (instance.may_idle or has_kinds or has_transfers)


def _infeasible_instance(instance: Instance, unit_of: Sequence[int]) -> PartitionError:
    """The error when nothing fits."""
    devices = tuple(replace(device, memory_limit=None, bandwidth=None) for device in instance.devices)
    edges = tuple(Link(edge.source, edge.target) for edge in instance.edges)
    found = _find_for_instance(replace(instance, edges=edges, devices=devices, memory_weight=1.0), 1e-3, TIME_LIMIT)
    if found is None:
        return PartitionError(
            f"expected a placement in which every node can run on its device, found none with the split {instance.split!r}; have more "
            "devices of the kinds that nodes need, or another order of devices"
        )
    least = max(memory(instance, found.by_node(instance, unit_of)))
    limits = [device.memory_limit for device in instance.devices]
    text = (
        f"expected a placement within memory limits {_limits_as_text(limits)}, found none on {len(limits)} devices: the least limit for "
        f"every device that would do is {_rounded_up(least)}"
    )
    if len(set(instance.devices)) == 1 and _is_plain(instance):
        fewest = _fewest_devices(instance, len(set(unit_of)))
        some = (
            f"the fewest devices that would do are {fewest}"
            if fewest
            else f"none of up to {_MAX_DEVICES} devices would do"
        )
        text += f", and within this limit {some}"
    return MemoryLimitError(f"{text}; raise memory_limit or use more devices", math.ceil(least))


def _fewest_devices(instance: Instance, num_units: int) -> int | None:
    """The fewest devices like those given for which a placement is found."""
    limit = Fraction(instance.devices[0].memory_limit or 1)
    lowest = max(len(instance.devices) + 1, math.ceil(sum(Fraction(node.memory) for node in instance.nodes) / limit))
    for count in range(lowest, min(_MAX_DEVICES, num_units) + 1):
        more = replace(instance, devices=instance.devices[:1] * count)
        if a_cut_fits(more) or solve_row(more, 1e-3, TIME_LIMIT) is not None:
            return count
    return None


def _rounded_up(value: Fraction) -> str:
    """In six digits, or in as many as it takes not to say less."""
    nearest = float(value)
    upper = nearest if nearest >= value else math.nextafter(nearest, math.inf)
    return next(text for text in (f"{upper:g}", repr(upper)) if Fraction(float(text)) >= value)


def _limits_as_text(limits: Sequence[float | None]) -> str:
    """Limits of devices, one if they are all alike."""
    texts = ["none" if limit is None else f"{limit:g}" for limit in limits]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)
