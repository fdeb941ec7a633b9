"""Instances whose loads count transfers, or kinds of devices, or whose devices come in any order or none at all.

1   splits into stages: all placements, by their prefixes (`smpc.partitioner.solvers.staged`), exact unless there are too many
2   what is not proven then, and splits that are free: moves of single units (`smpc.partitioner.solvers.moves`)
3   what devices cut at least, for a bound above work alone (`smpc.partitioner.solvers.cuts`)
4   and the integer program, for those small enough (`smpc.partitioner.solvers.load_program`)
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np

from smpc.partitioner.instances.instance import Instance, Processor, totals
from smpc.partitioner.instances.units import Found, joined, values
from smpc.partitioner.problem import FloatArray, IntArray, in_proportion
from smpc.partitioner.solvers.cuts import cut_bound
from smpc.partitioner.solvers.load_program import solve_loads
from smpc.partitioner.solvers.loads import LoadProblem, simple_bound
from smpc.partitioner.solvers.moves import improve_by_moves
from smpc.partitioner.solvers.staged import Staged, solve_stages

_LARGEST = 1e300
_MAX_PROGRAM = 1500  # units x devices of an integer program


def solve_loaded(instance: Instance, gap: float, time_limit: float) -> Found | None:
    """The best placement found; None if nothing fits."""
    if instance.split == "free":
        return _solve_free(instance, gap, time_limit)
    problem = load_problem(instance)
    staged = solve_stages(problem, gap)
    start, bound = staged.device_of, staged.lower_bound
    if start is None or not staged.note or staged.bottleneck <= bound * (1.0 + gap):
        return None if start is None else Found(start, bound, "graph", staged.note)
    return _improved_loaded(problem, start, bound, staged, gap, time_limit)


def _solve_free(instance: Instance, gap: float, time_limit: float) -> Found | None:
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
        return Found(start, bound, "graph")
    return _improved_loaded(problem, start, bound, None, gap, time_limit)


def _improved_loaded(
    problem: LoadProblem, start: tuple[int, ...], bound: float, staged: Staged | None, gap: float, time_limit: float
) -> Found | None:
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
    return Found(best, bound, solver, note)


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
