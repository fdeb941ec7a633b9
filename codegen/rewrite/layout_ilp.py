"""The choice of strategies as an integer program, solved to proof by HiGHS through pulp.

Variables, for part n, option k, value v and layouts a, b (see `smpc.codegen.rewrite.layout_problem`):

    s[n,k] = 1    n runs by option k                   sum over k of s[n,k] = 1
    z[v,a,b]      v, produced in layout a, is used in b: z[v,a,b] <= what produces v in a
                  for each user n of v: what uses v in b <= sum over a of z[v,a,b]
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pulp

from smpc.codegen.rewrite.layout_problem import LayoutProblem
from smpc.codegen.rewrite.sharding import REPLICATED, Layout
from smpc.errors import CodegenError

_Variables = dict[int, tuple[pulp.LpVariable, ...]]


def solve_ilp(problem: LayoutProblem, time_limit: float = 60.0) -> tuple[dict[int, int], bool]:
    """The index of each part's option, and whether it is proven that no better choice exists. Empty: nothing fits together."""
    program, chosen = _build(problem)
    proven = _solve(program, time_limit)
    picked = {}
    for part, row in chosen.items():
        values = [x.varValue or 0.0 for x in row]
        best = max(range(len(row)), key=values.__getitem__)
        if values[best] < 0.5:
            return {}, proven
        picked[part] = best
    return picked, proven


def _build(problem: LayoutProblem) -> tuple[pulp.LpProblem, _Variables]:
    program = pulp.LpProblem("layouts", pulp.LpMinimize)
    chosen: _Variables = {}
    terms: list[tuple[pulp.LpVariable, float]] = []
    for part, options in problem.options.items():
        row = tuple(program.add_variable(f"s_{part}_{k}", cat=pulp.LpBinary) for k in range(len(options)))
        program += pulp.lpSum(row) == 1
        chosen[part] = row
        terms += [(x, problem.option_cost(part, option)) for x, option in zip(row, options, strict=True)]
    for producer, users in problem.users().items():
        terms += _conversions(program, problem, chosen, producer, users)
    scale = 1.0 / problem.weights.latency_bytes
    program.setObjective(pulp.LpAffineExpression([(x, cost * scale) for x, cost in terms if cost]))
    return program, chosen


def _conversions(
    program: pulp.LpProblem,
    problem: LayoutProblem,
    chosen: _Variables,
    producer: int,
    users: Sequence[tuple[int, int]],
) -> list[tuple[pulp.LpVariable, float]]:
    """Constrains the layouts in which one value is made and used; the costs of its conversions."""
    made = _by_layout(chosen[producer], [option.output for option in problem.options[producer]])
    needs = [
        _by_layout(chosen[user], [option.inputs[index] for option in problem.options[user]]) for user, index in users
    ]
    if producer in problem.returned:
        needs.append({REPLICATED: pulp.LpAffineExpression(constant=1)})
    terms = []
    for number, target in enumerate(dict.fromkeys(layout for need in needs for layout in need)):
        ways = [made[target]] if target in made else []
        for source, produced in made.items():
            cost = problem.conversion_cost(producer, source, target)
            if cost is not None and source != target:
                z = program.add_variable(f"z_{producer}_{number}_{len(ways)}", lowBound=0, upBound=1)
                program += z <= produced
                ways.append(z)
                terms.append((z, cost))
        for need in needs:
            if target in need:
                program += need[target] <= pulp.lpSum(ways)
    return terms


def _by_layout(row: Sequence[pulp.LpVariable], layouts: Sequence[Layout]) -> dict[Layout, pulp.LpAffineExpression]:
    found: dict[Layout, list[pulp.LpVariable]] = {}
    for x, layout in zip(row, layouts, strict=True):
        found.setdefault(layout, []).append(x)
    return {layout: pulp.lpSum(variables) for layout, variables in found.items()}


def _solve(program: pulp.LpProblem, time_limit: float) -> bool:
    """Solves in place; whether to proof."""
    solver = pulp.HiGHS(msg=False, threads=1, timeLimit=time_limit, gapRel=1e-7, gapAbs=1e-9, random_seed=0)
    if not solver.available():
        raise CodegenError("expected the solver that chooses layouts, found none: pip install highspy")
    with contextlib.suppress(KeyError):
        program.solve(solver)
    return bool(program.solverModel.modelStatusToString(program.solverModel.getModelStatus()) == "Optimal")
