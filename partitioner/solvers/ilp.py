"""Placement of a DAG of units on stages as an integer program, solved to proof by HiGHS through pulp.

Input: `PlacementProblem`. Output: `PlacementSolution`: the stage of each unit, the bottleneck, a proven lower bound
for the bottleneck of any placement of these units, and a note that is empty unless a solver limit was hit.

Variables, for unit u, stage s, shared item k and value v:

    x[u,s] = 1   u runs on s                    sum over s of x[u,s] = 1;  sum over u of x[u,s] >= 1 (no stage is
    empty) h[k,s] = 1   s holds item k                 h[k,s] >= x[u,s] for each user u
    c[v,s] = 1   v is received by s             c[v,s] >= x[w,s] - x[u,s] for its producer u and each consumer w
    B            bottleneck                     B >= cost of s, for each s
    w[s]         bytes at work, with a limit    w[s] >= bytes of u x[u,s];  memory of s + w[s] <= limit
                 limits of devices              memory of s <= limit of its device

A dependency u -> w means stage(u) <= stage(w): for each s, sum of x[u,t] over t <= s is at least the sum of x[w,t].
First B is minimised, then the bytes received at that B. The search is limited by nodes, which is deterministic, and by
seconds as a last resort. Only this file and `load_program` import pulp, when they need it: it brings HiGHS, and most
plans do without.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from smpc.errors import PartitionError
from smpc.partitioner.stage_costs import Scale, Units, own_costs, stage_costs

if TYPE_CHECKING:
    import pulp

TIME_LIMIT = 10.0
_NODE_LIMIT = 500
_SLACK = 1e-7  # solver arithmetic: a known bottleneck may be met to this relative accuracy
_TOLERANCE = 1e-6  # of solvers, absolute: what they prove of B, in its unit, can be wrong by so much
_SMALL = 1e-4  # an average cost below which costs are made larger first, so that the tolerance is small beside them
_LARGE = 1e6  # most that a unit counts for
LIMIT_NOTE = "the solver stopped at its limit: best plan found"


@dataclass(frozen=True, slots=True)
class Value:
    """Bytes that a unit produces and others consume; a stage receives them at most once."""

    producer: int
    consumers: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """Units, their dependencies, and the values that they pass to each other."""

    units: Units
    scale: Scale
    in_flight: tuple[int, ...]  # by stage
    dependencies: tuple[tuple[int, int], ...]  # (u, w): stage(u) <= stage(w)
    values: tuple[Value, ...] = ()
    memory_limit: int = 0  # of a stage; 0: none
    working: tuple[int, ...] = ()  # by unit: bytes that live while it works, when there is a limit

    def limited(self, memory_limit: int, working: tuple[int, ...]) -> PlacementProblem:
        """The same problem with a limit."""
        return replace(self, memory_limit=memory_limit, working=working)


@dataclass(frozen=True, slots=True)
class PlacementSolution:
    """A placement and its proven bound."""

    assignment: tuple[int, ...]
    bottleneck: float
    lower_bound: float
    received_bytes: int
    note: str = ""


@dataclass(frozen=True)
class PlacementModel:
    """The integer program, and its variables by (unit, stage)."""

    program: pulp.LpProblem
    runs: tuple[tuple[pulp.LpVariable, ...], ...]
    bottleneck: pulp.LpVariable
    received: pulp.LpAffineExpression
    unit: float  # cost that counts as 1


def solver_name() -> str | None:
    """The solver that will be used: "HiGHS", "CBC", or None if neither is installed."""
    import pulp

    if pulp.HiGHS(msg=False).available():
        return "HiGHS"
    return "CBC" if _cbc().available() else None


def solve_placement(
    problem: PlacementProblem,
    start: Sequence[int] | None = None,
    gap: float = 0.0,
    time_limit: float = TIME_LIMIT,
) -> PlacementSolution:
    """The best placement, to within the relative `gap`, in at most `time_limit` seconds.

    `start` is a known placement: the result is never worse, and it is the result if no solver is installed.
    """
    if len(problem.in_flight) > len(problem.units):
        raise PartitionError(
            f"expected at least {len(problem.in_flight)} units for as many stages, found {len(problem.units)}"
        )
    if solver_name() is None:
        warnings.warn(
            "no solver for integer programs (highspy) is installed: using the exact chain solution", stacklevel=2
        )
        if start is None:
            raise PartitionError("expected highspy or CBC to place a graph, found neither: pip install highspy")
        return _ilp_solution(problem, tuple(start), 0.0, "no solver is installed: exact chain solution")
    found = decode(problem, solve(build(problem, start), problem, start, gap, time_limit), start)
    if start is None and found.bottleneck > _LARGE * _ilp_unit(problem, None):
        start = found.assignment  # the program did not tell such costs apart: again, now that their size is known
        found = decode(problem, solve(build(problem, start), problem, start, gap, time_limit), start)
    return found


def build(problem: PlacementProblem, start: Sequence[int] | None = None) -> PlacementModel:
    """The integer program, objective B; `start` is a known placement."""
    import pulp

    units, num_stages = problem.units, len(problem.in_flight)
    stages = range(num_stages)
    program = pulp.LpProblem("placement", pulp.LpMinimize)
    runs = tuple(tuple(_ilp_binary(program, f"x_{u}_{s}") for s in stages) for u in range(len(units)))
    for row in runs:
        program += pulp.lpSum(row) == 1
    for s in stages:
        program += pulp.lpSum(row[s] for row in runs) >= 1
    for (u, w), s in itertools.product(problem.dependencies, stages[:-1]):
        program += pulp.lpSum(runs[u][: s + 1]) >= pulp.lpSum(runs[w][: s + 1])
    held = [[_ilp_fraction(program, f"h_{k}_{s}") for s in stages] for k in range(len(units.shared))]
    for item, holds in zip(units.shared, held, strict=True):
        for user, s in itertools.product(item.users, stages):
            program += holds[s] >= runs[user][s]
    if problem.memory_limit:
        for s in stages:
            work = program.add_variable(f"w_{s}", lowBound=0)
            for row, num_bytes in zip(runs, problem.working, strict=True):
                program += work >= num_bytes / problem.memory_limit * row[s]
            memory = _ilp_cost(problem, s, runs, held, Scale(1.0, 1, problem.memory_limit))
            program += memory + work <= 1.0
    for s, limit in enumerate(problem.scale.limits):
        program += _ilp_cost(problem, s, runs, held, Scale(1.0, 1, max(1, limit))) <= (1.0 if limit else 0.0)
    bottleneck, unit = program.add_variable("B", lowBound=0), _ilp_unit(problem, start)
    for s in stages:
        program += bottleneck >= _ilp_cost(problem, s, runs, held, problem.scale, unit)
    program.setObjective(bottleneck)
    return PlacementModel(program, runs, bottleneck, _ilp_received(program, problem, runs), unit)


def _ilp_unit(problem: PlacementProblem, start: Sequence[int] | None) -> float:
    """1, unless costs are very small or large, as with devices of a speed of 1e9: then about what a stage costs."""
    if start is None:
        lowest = own_costs(problem.units, problem.scale, min(problem.in_flight))
        about = float(lowest.sum()) / len(problem.in_flight)
    else:
        about = float(stage_costs(problem.units, problem.scale, problem.in_flight, start).max())
    return about if about > 0.0 and not _SMALL <= about <= 1.0 / _SMALL else 1.0


def solve(
    model: PlacementModel, problem: PlacementProblem, start: Sequence[int] | None, gap: float, time_limit: float
) -> tuple[tuple[int, ...] | None, float, str]:
    """Assignment (None: none found), proven lower bound, note."""
    program = model.program
    if start is not None:
        known = float(stage_costs(problem.units, problem.scale, problem.in_flight, start).max())
        program += model.bottleneck <= known * (1 + _SLACK) / model.unit
    finished, bound = run_program(program, gap, time_limit / 2)
    # A program that has no solution, though one is known, was too hard for the solver's arithmetic.
    bound = model.unit * max(0.0, bound - _TOLERANCE) if start is None or np.isfinite(bound) else 0.0
    found = _read_ilp(problem, model)
    best = found if found is not None else (tuple(start) if start is not None else None)
    note = "" if finished else LIMIT_NOTE
    if best is None or not problem.values:
        return best, bound, note
    reached = float(stage_costs(problem.units, problem.scale, problem.in_flight, best).max())
    program += model.bottleneck <= reached * (1 + _SLACK) / model.unit
    program.setObjective(model.received)
    finished, _ = run_program(program, gap, time_limit / 2)
    return _read_ilp(problem, model) or best, bound, note if finished else LIMIT_NOTE


def decode(
    problem: PlacementProblem, result: tuple[tuple[int, ...] | None, float, str], start: Sequence[int] | None
) -> PlacementSolution:
    """The solution, costs computed afresh from the definition; `start` if it is better."""
    assignment, bound, note = result
    if assignment is None:
        raise PartitionError("expected a placement of the units on the stages, found none within the solver's limits")
    solution = _ilp_solution(problem, assignment, bound, note)
    if start is not None:
        known = _ilp_solution(problem, tuple(start), bound, note)
        worse = solution.bottleneck > known.bottleneck * (1 + _SLACK)
        if worse or (solution.bottleneck >= known.bottleneck and solution.received_bytes >= known.received_bytes):
            return known
    return solution


def received_bytes(problem: PlacementProblem, assignment: Sequence[int]) -> int:
    """Bytes that cross between stages: each value once for every other stage that consumes it."""
    return sum(
        value.num_bytes * len({assignment[w] for w in value.consumers} - {assignment[value.producer]})
        for value in problem.values
    )


def _ilp_solution(problem: PlacementProblem, assignment: tuple[int, ...], bound: float, note: str) -> PlacementSolution:
    bottleneck = float(stage_costs(problem.units, problem.scale, problem.in_flight, assignment).max())
    proven = min(bottleneck, max(0.0, bound * (1 - _SLACK)))
    return PlacementSolution(assignment, bottleneck, proven, received_bytes(problem, assignment), note)


def _ilp_cost(
    problem: PlacementProblem,
    stage: int,
    runs: Sequence[Sequence[pulp.LpVariable]],
    held: Sequence[Sequence[pulp.LpVariable]],
    scale: Scale,
    unit: float = 1.0,
) -> pulp.LpAffineExpression:
    """The cost of a stage in this unit as a linear expression, the same as `Scale.cost` up to `_LARGE` for a unit.

    More than that is no good placement, and more than solvers can take.
    """
    import pulp

    units, multiplier = problem.units, problem.in_flight[stage]
    per_time = (1.0 - scale.memory_weight) / max(1, scale.total_time) / scale.speed(stage) / unit
    per_byte = scale.memory_weight / max(1, scale.total_memory) / unit
    columns = zip(units.time, units.static_bytes, units.activation_bytes, runs, strict=True)
    own = [
        (row[stage], min(_LARGE, per_time * time + per_byte * (static + multiplier * activation)))
        for time, static, activation, row in columns
    ]
    shared = [
        (row[stage], min(_LARGE, per_byte * (item.static_bytes + multiplier * item.activation_bytes)))
        for item, row in zip(units.shared, held, strict=True)
    ]
    return pulp.LpAffineExpression([*own, *shared])


def _ilp_received(
    program: pulp.LpProblem, problem: PlacementProblem, runs: Sequence[Sequence[pulp.LpVariable]]
) -> pulp.LpAffineExpression:
    """Bytes received, as a share of all bytes that could cross once."""
    import pulp

    total = max(1, sum(value.num_bytes for value in problem.values))
    terms = []
    for v, value in enumerate(problem.values):
        for s in range(len(problem.in_flight)):
            crossing = _ilp_fraction(program, f"c_{v}_{s}")
            for consumer in value.consumers:
                program += crossing >= runs[consumer][s] - runs[value.producer][s]
            terms.append((crossing, value.num_bytes / total))
    return pulp.LpAffineExpression(terms)


def run_program(
    program: pulp.LpProblem, gap: float, time_limit: float, max_nodes: int | None = None
) -> tuple[bool, float]:
    """Solve; whether it was solved to proof, and the proven lower bound of the objective. `max_nodes`: of the search, None for few, so that
    it ends at the same place whatever else the machine does."""
    max_nodes = _NODE_LIMIT if max_nodes is None else max_nodes
    import pulp

    if solver_name() == "HiGHS":
        options = {"random_seed": 0, "mip_max_nodes": max_nodes}
        solver = pulp.HiGHS(msg=False, threads=1, timeLimit=time_limit, gapRel=max(gap, 1e-9), gapAbs=1e-12, **options)
        # pulp has no word for HiGHS's node limit; the variables have their values by then.
        with contextlib.suppress(KeyError):
            program.solve(solver)
        status = program.solverModel.modelStatusToString(program.solverModel.getModelStatus())
        return status == "Optimal", float(program.solverModel.getInfo().mip_dual_bound)
    limits = [f"maxNodes {max_nodes}", "randomSeed 1"]
    program.solve(_cbc(threads=1, timeLimit=time_limit, gapRel=max(gap, 1e-9), options=limits))
    finished = program.sol_status == pulp.LpSolutionOptimal
    return finished, float(pulp.value(program.objective)) * (1.0 - gap) if finished else 0.0


def _cbc(**options: Any) -> pulp.LpSolver:
    """CBC as pulp ships it (its own class for that is deprecated and warns)."""
    import pulp

    return pulp.COIN_CMD(path=pulp.PULP_CBC_CMD.pulp_cbc_path, msg=False, **options)


def _read_ilp(problem: PlacementProblem, model: PlacementModel) -> tuple[int, ...] | None:
    """The assignment that the variables spell, if they spell a valid one."""
    assignment = []
    for row in model.runs:
        chosen = [s for s, variable in enumerate(row) if (variable.varValue or 0.0) > 0.5]
        if len(chosen) != 1:
            return None
        assignment.append(chosen[0])
    ordered = all(assignment[u] <= assignment[w] for u, w in problem.dependencies)
    if not ordered or len(set(assignment)) < len(problem.in_flight):
        return None
    costs = stage_costs(problem.units, problem.scale, problem.in_flight, assignment)  # infinite beyond a limit
    return tuple(assignment) if np.isfinite(costs).all() else None


def _ilp_binary(program: pulp.LpProblem, name: str) -> pulp.LpVariable:
    import pulp

    return program.add_variable(name, cat=pulp.LpBinary)


def _ilp_fraction(program: pulp.LpProblem, name: str) -> pulp.LpVariable:
    return program.add_variable(name, lowBound=0, upBound=1)
