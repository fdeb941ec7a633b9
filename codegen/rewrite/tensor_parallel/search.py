"""Chooses a strategy for every operation: the cheapest of all that fit together.

Equal blocks get the same strategies, so a model of a hundred layers is as large a problem as one of one. It is solved exactly: by
elimination (`smpc.codegen.rewrite.tensor_parallel.elimination`), or, where tables would be too large for that, as an integer program.

`solve_ilp` solves an integer program to proof by HiGHS through pulp. Variables, for part n, option k, value v and layouts a, b (see
`smpc.codegen.rewrite.tensor_parallel.layout_problem`):

    s[n,k] = 1    n runs by option k                   sum over k of s[n,k] = 1
    z[v,a,b]      v, produced in layout a, is used in b: z[v,a,b] <= what produces v in a
                  for each user n of v: what uses v in b <= sum over a of z[v,a,b]
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smpc.codegen.rewrite.tensor_parallel.elimination import eliminate
from smpc.codegen.rewrite.tensor_parallel.layout_problem import LayoutProblem, Restriction, Weights, collect
from smpc.codegen.rewrite.tensor_parallel.layouts import REPLICATED, Layout
from smpc.codegen.rewrite.tensor_parallel.strategy import Facts, Strategy
from smpc.errors import CodegenError
from smpc.tracer.ir import NodeKind, Trace

if TYPE_CHECKING:
    import pulp

    _Variables = dict[int, tuple[pulp.LpVariable, ...]]


@dataclass(frozen=True, slots=True)
class ShardingChoice:
    """A strategy for each node that computes, and a layout for each parameter; `proven`: no better one exists."""

    degree: int
    by_node: tuple[tuple[str, Strategy], ...]
    by_parameter: tuple[tuple[str, Layout], ...]
    proven: bool = True


def choose(
    trace: Trace,
    degree: int,
    allowed: Restriction = lambda node, strategy: True,
    weights: Weights | None = None,
    time_limit: float = 60.0,
    share_blocks: bool = True,
    facts: Facts | None = None,
) -> ShardingChoice:
    """The best strategies for `degree` ranks among those that are `allowed`; equal blocks get the same, with `share_blocks`.

    `facts`: what rules know of the trace, if that is more than for tensor parallelism.
    Raises CodegenError if nothing that is allowed fits together.
    """
    problem = collect(trace, degree, allowed, weights or Weights(), share_blocks, facts)
    picked, proven = eliminate(problem), True
    if picked is None:
        picked = eliminate(problem, drop_dead_ends=True)
    if picked is None:
        picked, proven = solve_ilp(problem, time_limit)
    if not picked and problem.options:
        raise CodegenError(
            f"expected layouts that fit together for {degree} ranks, found none; relax the explicit plan"
        )
    return _decode_searched(problem, picked, degree, proven)


def _decode_searched(problem: LayoutProblem, picked: Mapping[int, int], degree: int, proven: bool) -> ShardingChoice:
    by_node, by_parameter = [], []
    for position, node in enumerate(problem.trace.nodes):
        part = problem.part[position]
        if part not in picked or node.name in problem.facts.constants:
            continue
        strategy = problem.options[part][picked[part]]
        if node.kind is NodeKind.GET_ATTR:
            by_parameter.append((node.target, strategy.output))
        else:
            by_node.append((node.name, _searched_strategy_renamed(problem, position, strategy)))
            by_parameter += by_node[-1][1].state
    return ShardingChoice(degree, tuple(by_node), tuple(by_parameter), proven)


def _searched_strategy_renamed(problem: LayoutProblem, position: int, strategy: Strategy) -> Strategy:
    """The representative's strategy for another node: with that one's parameters."""
    node, first = problem.trace.nodes[position], problem.trace.nodes[problem.part[position]]
    state = tuple((node.target + name.removeprefix(first.target), layout) for name, layout in strategy.state)
    return dataclasses.replace(strategy, state=state)


def solve_ilp(problem: LayoutProblem, time_limit: float = 60.0) -> tuple[dict[int, int], bool]:
    """The index of each part's option, and whether it is proven that no better choice exists. Empty: nothing fits together."""
    program, chosen = _build_search_program(problem)
    proven = _solve_search_program(program, time_limit)
    picked = {}
    for part, row in chosen.items():
        values = [x.varValue or 0.0 for x in row]
        best = max(range(len(row)), key=values.__getitem__)
        if values[best] < 0.5:
            return {}, proven
        picked[part] = best
    return picked, proven


def _build_search_program(problem: LayoutProblem) -> tuple[pulp.LpProblem, _Variables]:
    import pulp

    program = pulp.LpProblem("layouts", pulp.LpMinimize)
    chosen: _Variables = {}
    terms: list[tuple[pulp.LpVariable, float]] = []
    for part, options in problem.options.items():
        row = tuple(program.add_variable(f"s_{part}_{k}", cat=pulp.LpBinary) for k in range(len(options)))
        program += pulp.lpSum(row) == 1
        chosen[part] = row
        terms += [(x, problem.option_cost(part, option)) for x, option in zip(row, options, strict=True)]
    for producer, users in problem.users().items():
        terms += _conversions_in_search(program, problem, chosen, producer, users)
    scale = 1.0 / problem.weights.latency_bytes
    program.setObjective(pulp.LpAffineExpression([(x, cost * scale) for x, cost in terms if cost]))
    return program, chosen


def _conversions_in_search(
    program: pulp.LpProblem,
    problem: LayoutProblem,
    chosen: _Variables,
    producer: int,
    users: Sequence[tuple[int, int]],
) -> list[tuple[pulp.LpVariable, float]]:
    """Constrains the layouts in which one value is made and used; the costs of its conversions."""
    import pulp

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
    import pulp

    found: dict[Layout, list[pulp.LpVariable]] = {}
    for x, layout in zip(row, layouts, strict=True):
        found.setdefault(layout, []).append(x)
    return {layout: pulp.lpSum(variables) for layout, variables in found.items()}


def _solve_search_program(program: pulp.LpProblem, time_limit: float) -> bool:
    """Solves in place; whether to proof."""
    import pulp

    solver = pulp.HiGHS(msg=False, threads=1, timeLimit=time_limit, gapRel=1e-7, gapAbs=1e-9, random_seed=0)
    if not solver.available():
        raise CodegenError("expected the solver that chooses layouts, found none: pip install highspy")
    with contextlib.suppress(KeyError):
        program.solve(solver)
    return bool(program.solverModel.modelStatusToString(program.solverModel.getModelStatus()) == "Optimal")
