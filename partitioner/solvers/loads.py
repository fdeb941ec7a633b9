"""Loads of devices with transfers: the one definition that `staged`, `annealing` and `load_program` share.

    load of a device = its units' costs on it + rate * (bytes that it sends + bytes that it receives)

A unit's output is sent once, if another device uses it, and received once by each other device that uses it. Devices of one kind are
alike: a unit costs the same on each of them, and so does a byte.

Example: units 0 -> 1 -> 2 with costs of 2, each of which sends one byte at a rate of 1. On two devices {0} {1 2} has the loads 2 + 1 and
1 + 4; {0 1} {2} has 4 + 1 and 1 + 2.

Placements whose transfers count, as an integer program for HiGHS.

Variables, for unit u, device d and value v of producer p:

    x[u,d] = 1   u runs on d                 sum over d of x[u,d] = 1; sum over u of x[u,d] >= 1 unless devices may idle
    m[v,d] = 1   d sends or receives v       m[v,d] >= x[w,d] - x[p,d] and m[v,d] >= x[p,d] - x[w,d] for each consumer w
    B            largest load                B >= cost of d, for each d

In a row, u before w means that sum of x[u,t] over t <= d is at least the sum of x[w,t]. Otherwise devices of one kind could change
places: the i-th heaviest unit is kept from all but the first i of a kind. Costs are in terms of a known largest load.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import networkx as nx
import numpy as np

from smpc.partitioner.solvers.ilp import LIMIT_NOTE, Value, run_program, solver_name
from smpc.partitioner.stage_costs import FloatArray, IntArray

if TYPE_CHECKING:
    import pulp


ROUNDING = 1e-9  # what floating point arithmetic may add to a load, relative
_ROUNDS, _STEPS = (
    3,
    60,
)  # of the search over all kinds, and of the search over two of them: each step leaves out a third of the rest


@dataclass(frozen=True)
class LoadProblem:
    """Units, devices by kind, and the objective. Costs are in any one unit; `kind_of` has the kind of each device, in their row."""

    costs: FloatArray  # [kinds, units]; infinite: a unit cannot run there
    memory: IntArray  # [kinds, units]
    limits: tuple[int, ...]  # most memory, by kind
    rates: tuple[float, ...]  # cost of a byte sent or received, by kind
    kind_of: tuple[int, ...]
    order: nx.DiGraph[int]
    values: tuple[Value, ...]
    in_row: bool = True  # stages are on the devices in the order given, not in any
    may_idle: bool = False  # devices may have no stage

    def __post_init__(self) -> None:
        if {*self.kind_of} != {*range(len(self.costs))}:
            raise ValueError(
                f"expected a device of each of {len(self.costs)} kinds, found devices of kinds {sorted({*self.kind_of})}"
            )

    @property
    def num_devices(self) -> int:
        """Devices in all."""
        return len(self.kind_of)

    @property
    def num_units(self) -> int:
        """Units are numbered from 0."""
        return int(self.costs.shape[1])

    def loads(self, device_of: Sequence[int]) -> FloatArray:
        """The cost of each device with its units and its transfers; infinite beyond its limit, and where a unit cannot run."""
        loads, held = np.zeros(len(self.kind_of)), [0] * len(self.kind_of)
        for unit, device in enumerate(device_of):
            loads[device] += self.costs[self.kind_of[device], unit]
            held[device] += int(self.memory[self.kind_of[device], unit])
        for value in self.values:
            home = device_of[value.producer]
            others = {device_of[user] for user in value.consumers} - {home}
            for device in (home, *others) if others else ():
                loads[device] += value.num_bytes * self.rates[self.kind_of[device]]
        over = [total > self.limits[kind] for total, kind in zip(held, self.kind_of, strict=True)]
        return np.where(over, np.inf, loads)

    def bottleneck(self, device_of: Sequence[int]) -> float:
        """The largest load."""
        return float(self.loads(device_of).max())


def simple_bound(problem: LoadProblem) -> float:
    """Work divided among all devices as one likes, and the heaviest unit."""
    heaviest = problem.costs.min(axis=0).max(initial=0.0)
    return float(max(heaviest, divided(problem)[0])) * (1.0 - ROUNDING)


def divided(problem: LoadProblem) -> tuple[float, FloatArray]:
    """The least load of units that may be cut in pieces, and the weights of the kinds of devices, by kind, that prove it.

    If weights add up to one over all devices, the largest load is at least the sum of all loads times their weights. That sum is at least
    what the units cost, each on the kind where it costs least after weighting. It is concave in the weights: the weights of two kinds at a
    time are improved.
    """
    number = np.bincount(problem.kind_of, minlength=len(problem.costs)).astype(float)
    share = number / number.sum()  # of all weight, by kind

    def least(share: FloatArray) -> float:
        weights = np.where(np.isfinite(problem.costs), share[:, None] / number[:, None], np.inf)
        return float(np.min(weights * np.where(np.isfinite(problem.costs), problem.costs, 1.0), axis=0).sum())

    def moved(k: int, other: int, part: float) -> FloatArray:
        found: FloatArray = share.copy()
        both = share[k] + share[other]
        found[k], found[other] = part * both, (1.0 - part) * both
        return found

    for k, other in [*itertools.combinations(range(len(number)), 2)] * (_ROUNDS if len(number) > 2 else 1):
        low, high = 0.0, 1.0
        for _ in range(_STEPS):
            a, b = low + (high - low) / 3, high - (high - low) / 3
            low, high = (low, b) if least(moved(k, other, a)) >= least(moved(k, other, b)) else (a, high)
        share = max(share, moved(k, other, (low + high) / 2), key=least)
    return least(share), share / number


_MAX_NODES = 2**31 - 1  # of the search: time is its limit
_SLACK = 1e-6  # what solvers' arithmetic may be wrong by, of a load


@dataclass(frozen=True)
class _Model:
    program: pulp.LpProblem
    runs: tuple[tuple[pulp.LpVariable, ...], ...]  # by unit and device


def solve_loads(
    problem: LoadProblem, start: Sequence[int], gap: float, time_limit: float
) -> tuple[tuple[int, ...], float, str]:
    """The best placement found, no worse than `start`, which is a valid one; what none is below; a note if a limit was hit."""
    unit = problem.bottleneck(start)
    if solver_name() is None or not unit > 0:
        return tuple(start), 0.0, ""
    model = build(problem, unit)
    finished, bound = run_program(model.program, gap, time_limit, _MAX_NODES)
    proven = max(0.0, bound - _SLACK) * unit if math.isfinite(bound) else 0.0
    found = decode(problem, model)
    best = tuple(start) if found is None or problem.bottleneck(found) >= unit else found
    return best, proven, "" if finished else LIMIT_NOTE


def build(problem: LoadProblem, unit: float) -> _Model:
    """The integer program; `unit`: the largest load of a known placement, which counts as 1."""
    import pulp

    program = pulp.LpProblem("loads", pulp.LpMinimize)
    units, devices = range(problem.num_units), range(problem.num_devices)
    runs = tuple(tuple(program.add_variable(f"x_{u}_{d}", cat=pulp.LpBinary) for d in devices) for u in units)
    for row in runs:
        program += pulp.lpSum(row) == 1
    if not problem.may_idle:
        for d in devices:
            program += pulp.lpSum(row[d] for row in runs) >= 1
    for u, d in itertools.product(units, devices):
        if math.isinf(problem.costs[problem.kind_of[d], u]):
            program += runs[u][d] == 0
    if problem.in_row:
        for (u, w), d in itertools.product(sorted(problem.order.edges), devices[:-1]):
            program += pulp.lpSum(runs[u][: d + 1]) >= pulp.lpSum(runs[w][: d + 1])
    else:
        for u, d in _others_of_a_kind(problem):
            program += runs[u][d] == 0
    bottleneck = program.add_variable("B", lowBound=0)
    program += bottleneck <= 1.0 + _SLACK
    for d in devices:
        kind = problem.kind_of[d]
        program += bottleneck >= pulp.LpAffineExpression(
            [
                *_own_in_load_program(problem, runs, d, unit),
                *_transfers_in_load_program(problem, program, runs, d, unit),
            ]
        )
        limit = problem.limits[kind]
        held = [(runs[u][d], int(problem.memory[kind, u]) / max(1, limit)) for u in units]
        program += pulp.LpAffineExpression(held) <= (1.0 if limit else 0.0)
    program.setObjective(bottleneck)
    return _Model(program, runs)


def decode(problem: LoadProblem, model: _Model) -> tuple[int, ...] | None:
    """The placement that the variables spell, if they spell a valid one."""
    found = []
    for row in model.runs:
        chosen = [d for d, variable in enumerate(row) if (variable.varValue or 0.0) > 0.5]
        if len(chosen) != 1:
            return None
        found.append(chosen[0])
    ordered = not problem.in_row or all(found[u] <= found[w] for u, w in problem.order.edges)
    used = problem.may_idle or len(set(found)) == problem.num_devices
    return tuple(found) if ordered and used and math.isfinite(problem.bottleneck(found)) else None


def _own_in_load_program(
    problem: LoadProblem, runs: Sequence[Sequence[pulp.LpVariable]], d: int, unit: float
) -> list[tuple[pulp.LpVariable, float]]:
    costs = problem.costs[problem.kind_of[d]].tolist()
    return [(row[d], cost / unit) for row, cost in zip(runs, costs, strict=True) if math.isfinite(cost)]


def _transfers_in_load_program(
    problem: LoadProblem, program: pulp.LpProblem, runs: Sequence[Sequence[pulp.LpVariable]], d: int, unit: float
) -> list[tuple[pulp.LpVariable, float]]:
    rate, terms = problem.rates[problem.kind_of[d]], []
    for v, value in enumerate(problem.values if rate else ()):
        moved = program.add_variable(f"m_{v}_{d}", lowBound=0, upBound=1)
        for user in value.consumers:
            program += moved >= runs[user][d] - runs[value.producer][d]
            program += moved >= runs[value.producer][d] - runs[user][d]
        terms.append((moved, rate * value.num_bytes / unit))
    return terms


def _others_of_a_kind(problem: LoadProblem) -> list[tuple[int, int]]:
    """Units and devices that need not be tried together, as a device of the same kind would do as well."""
    weight = problem.costs.min(axis=0)
    heaviest = sorted(range(problem.num_units), key=lambda u: (-float(weight[u]), u))
    found, seen = [], [0] * len(problem.limits)
    for d, kind in enumerate(problem.kind_of):
        found += [(u, d) for u in heaviest[: seen[kind]]]
        seen[kind] += 1
    return found
