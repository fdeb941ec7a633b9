"""Chooses a strategy for every operation: the cheapest of all that fit together.

Equal blocks get the same strategies, so a model of a hundred layers is as large a problem as one of one. It is solved exactly: by
elimination (`eliminate`), or, where tables would be too large for that, as an integer program.

`solve_ilp` solves an integer program to proof by HiGHS through pulp. Variables, for part n, option k, value v and layouts a, b (see
`smpc.codegen.rewrite.tensor_parallel.layout_problem`):

    s[n,k] = 1    n runs by option k                   sum over k of s[n,k] = 1
    z[v,a,b]      v, produced in layout a, is used in b: z[v,a,b] <= what produces v in a
                  for each user n of v: what uses v in b <= sum over a of z[v,a,b]

`eliminate` takes out one part after another (bucket elimination): exact, and quick where few parts depend on each other.

Each value gives a table of costs over the options of its producer and its users, each part a table over its own. To eliminate a part, the
tables that depend on it are added up, and for all options of the others the best of its own is kept. Traces are long and thin: few parts
depend on each other at any point, so the tables stay small. The part whose elimination makes the smallest table goes first.

For x -> a -> b -> y, eliminating a leaves a table over (x, b), eliminating b one over (x, y).

Where values have many users (a state space model's recurrence), the tables grow beyond memory. Then options are left out that no best
choice needs (dead-end elimination): with f the tables that depend on a part,

    option k is a dead end if for some option j    sum over f of (min over the options of the others of f(k, .) - f(j, .)) >= 0

since j costs no more than k, whatever the others do. Small tables are eliminated first, so that the sum has few and telling terms; dead
ends go whenever no table below the next of `_STAGES` is left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from smpc.codegen.rewrite.tensor_parallel.layout_problem import LayoutProblem, Restriction, Weights, collect
from smpc.codegen.rewrite.tensor_parallel.layouts import REPLICATED, Layout
from smpc.codegen.rewrite.tensor_parallel.strategy import Facts, Strategy
from smpc.errors import CodegenError
from smpc.tracer.ir import NodeKind, Trace

if TYPE_CHECKING:
    import pulp

    _Variables = dict[int, tuple[pulp.LpVariable, ...]]


_STAGES = (300, 3_000, 30_000, 300_000)  # entries of tables, before dead ends are looked for
_LARGEST = 16_000_000  # entries of a table
_MOST_AXES = 16  # of a table that one value gives
_LARGEST_VALUE = 300  # ... that one value gives; beyond, the layouts that it is had in are a part of their own

IntArray = npt.NDArray[np.int64]
Table = npt.NDArray[np.float64]
Factor = tuple[tuple[int, ...], Table]  # parts, ascending, and the costs over their options


def eliminate(problem: LayoutProblem, *, drop_dead_ends: bool = False) -> dict[int, int] | None:
    """The index of each part's option; empty if nothing fits together, None if a table would be too large.

    drop_dead_ends: drop options on the way. The cost of the result is the same; if there are several best choices, it may be another one.
    """
    tables = _Tables.of(problem)
    if tables is None:
        return {}
    for largest in _STAGES if drop_dead_ends else ():
        tables.eliminate(largest)
        while tables.drop_dead_ends():
            tables.eliminate(largest)
    tables.eliminate(_LARGEST)
    if not all(np.isfinite(table).any() for _, (_, table), _ in tables.done):
        return {}
    if tables.by_part:
        return None
    picked = tables.read_back()
    return {part: picked.get(part, 0) for part in sorted(problem.options)}


@dataclass(frozen=True, slots=True)
class _Tables:
    """The remaining choices."""

    kept: dict[int, IntArray]  # by part: the indices of the options that are left
    by_part: dict[int, list[Factor]]  # by part that is left: the tables that depend on it
    done: list[tuple[int, Factor, tuple[IntArray, ...]]] = field(
        default_factory=list
    )  # eliminated: part, sum of tables, options by axis

    @classmethod
    def of(cls, problem: LayoutProblem) -> _Tables | None:
        """None if nothing fits together."""
        sizes = {part: len(options) for part, options in problem.options.items()}
        factors: list[Factor] = []
        for part, options in problem.options.items():
            factors.append(((part,), np.asarray([problem.option_cost(part, option) for option in options])))
        for producer, users in problem.users().items():
            parts = dict.fromkeys((producer, *(user for user, _ in users)))
            if len(parts) <= _MOST_AXES and math.prod(sizes[part] for part in parts) <= _LARGEST_VALUE:
                factors.append(_value_factor(problem, producer, users))
            else:
                factors += _value_star(problem, producer, users, sizes)
        by_part: dict[int, list[Factor]] = {part: [] for part, size in sizes.items() if size > 1}
        for factor in (_of_choices(factor, sizes) for factor in factors):
            if not factor[0] and not np.isfinite(factor[1]):
                return None
            for part in factor[0]:
                by_part[part].append(factor)
        return cls({part: np.arange(size) for part, size in sizes.items()}, by_part)

    def eliminate(self, largest: int) -> None:
        """Takes out parts while their tables have at most so many entries."""
        width = {part: self._joint_size(part) for part in self.by_part}
        while width:
            part = min(width, key=lambda p: (width[p], p))
            if width.pop(part) > largest:
                break
            joint = self._sum(self.by_part.pop(part))
            self.done.append((part, joint, tuple(self.kept[other] for other in joint[0])))
            left = tuple(other for other in joint[0] if other != part)
            reduced = (left, joint[1].min(axis=joint[0].index(part)))
            for other in left:
                self.by_part[other] = [factor for factor in self.by_part[other] if part not in factor[0]] + [reduced]
                width[other] = self._joint_size(other)

    def drop_dead_ends(self) -> bool:
        """Leaves out options that no best choice needs; whether there were any."""
        found, waiting = False, dict.fromkeys(self.by_part)
        while waiting:
            part = next(iter(waiting))
            del waiting[part]
            with np.errstate(invalid="ignore"):  # neither of two options that exclude each other's tables is a dead end
                left = _options_left(np.sum([_cost_differences(factor, part) for factor in self.by_part[part]], axis=0))
            if left.all():
                continue
            found = True
            self.kept[part] = self.kept[part][left]
            for factor in self.by_part[part]:
                parts, table = factor
                self._replace(factor, (parts, np.compress(left, table, axis=parts.index(part))))
                waiting.update(dict.fromkeys(other for other in parts if other != part))
            if len(self.kept[part]) == 1:
                waiting.pop(part, None)
                self._settle(part)
        return found

    def _replace(self, factor: Factor, other: Factor) -> None:
        for part in other[0]:
            self.by_part[part] = [other if known is factor else known for known in self.by_part[part]]

    def _settle(self, part: int) -> None:
        """Takes out a part with one option, so that tables keep few axes; what is left of its own tables is in `done`."""
        own = np.zeros(1)
        for factor in self.by_part.pop(part):
            parts, table = factor
            axis = parts.index(part)
            if len(parts) == 1:
                own = own + table
            self._replace(factor, ((*parts[:axis], *parts[axis + 1 :]), np.squeeze(table, axis)))
        self.done.append((part, ((part,), own), (self.kept[part],)))

    def read_back(self) -> dict[int, int]:
        """The options, from the part that was eliminated last to the first."""
        picked: dict[int, int] = {}
        for part, (parts, table), options in reversed(self.done):
            index = tuple(
                slice(None) if other == part else int(np.searchsorted(of_axis, picked[other]))
                for other, of_axis in zip(parts, options, strict=True)
            )
            picked[part] = int(options[parts.index(part)][np.argmin(table[index])])
        return dict(sorted(picked.items()))

    def _joint_size(self, part: int) -> int:
        return math.prod(
            len(self.kept[other]) for other in dict.fromkeys(p for parts, _ in self.by_part[part] for p in parts)
        )

    def _sum(self, factors: list[Factor]) -> Factor:
        parts = tuple(sorted({part for own, _ in factors for part in own}))
        table = np.zeros(tuple(len(self.kept[part]) for part in parts))
        for own, costs in factors:
            table += costs.reshape(tuple(len(self.kept[part]) if part in own else 1 for part in parts))
        return parts, table


def _cost_differences(factor: Factor, part: int) -> Table:
    """By options (k, j) of the part: how much more k costs than j at least; infinite if k goes with no options of others."""
    parts, table = factor
    rows = np.moveaxis(table, parts.index(part), 0).reshape(table.shape[parts.index(part)], -1)
    found = np.empty((len(rows), len(rows)))
    for j, row in enumerate(rows):
        more = np.subtract(rows, row, out=np.full_like(rows, np.inf), where=np.isfinite(rows))
        found[:, j] = more.min(axis=1)
    return found


def _options_left(differences: Table) -> npt.NDArray[np.bool_]:
    """The options that are left, each of the others being no better than one of them; the last of equal ones go first."""
    left = np.ones(len(differences), dtype=np.bool_)
    dead = differences >= 0.0
    np.fill_diagonal(dead, val=False)
    while True:
        candidates = np.flatnonzero((dead & left).any(axis=1) & left)
        if not len(candidates):
            return left
        left[candidates[-1]] = False


def _of_choices(factor: Factor, sizes: dict[int, int]) -> Factor:
    """Without the parts that have one option alone: arrays have few axes."""
    parts, table = factor
    left = tuple(part for part in parts if sizes[part] > 1)
    return left, table.reshape(tuple(sizes[part] for part in left))


def _value_factor(problem: LayoutProblem, producer: int, users: list[tuple[int, int]]) -> Factor:
    """The cost of the conversions of one value: each needed layout counts once."""
    parts = tuple(sorted({producer, *(user for user, _ in users)}))
    shape = tuple(len(problem.options[part]) for part in parts)
    needs: dict[Layout, npt.NDArray[np.bool_]] = {}
    for user, index in users:
        for k, option in enumerate(problem.options[user]):
            needed = needs.setdefault(option.inputs[index], np.zeros(shape, dtype=np.bool_))
            needed[_at(parts, user, k)] = True
    if producer in problem.returned:
        needs[REPLICATED] = np.ones(shape, dtype=np.bool_)
    table = np.zeros(shape)
    for target, needed in needs.items():
        axes = [-1 if part == producer else 1 for part in parts]
        table += np.where(needed, _conversion_costs(problem, producer, target).reshape(axes), 0.0)
    return parts, table


def _conversion_costs(problem: LayoutProblem, producer: int, target: Layout) -> Table:
    """By option of the producer."""
    costs = [problem.conversion_cost(producer, option.output, target) for option in problem.options[producer]]
    return np.asarray([math.inf if cost is None else cost for cost in costs])


def _value_star(
    problem: LayoutProblem, producer: int, users: list[tuple[int, int]], sizes: dict[int, int]
) -> list[Factor]:
    """The same for a value with many users: the set of layouts that it is had in is a part of its own, which every user looks into.

    Such parts have negative numbers, and are added to `sizes`.
    """
    always = [REPLICATED] if producer in problem.returned else []
    targets = list(dict.fromkeys(option.inputs[i] for user, i in users for option in problem.options[user]))
    targets = [target for target in targets if target not in always]
    star, num_sets = min(0, *sizes) - 1, 1 << len(targets)
    sizes[star] = num_sets
    has = {target: (np.arange(num_sets) >> i) & 1 == 1 for i, target in enumerate(targets)}
    factors: list[Factor] = []
    for user, index in users:
        table = np.zeros((num_sets, len(problem.options[user])))
        for k, option in enumerate(problem.options[user]):
            if option.inputs[index] in has:
                table[~has[option.inputs[index]], k] = math.inf
        factors.append(((star, user), table))
    costs = np.zeros((num_sets, len(problem.options[producer])))
    for target in (*always, *targets):
        needed = has.get(target, np.ones(num_sets, dtype=np.bool_))
        costs += np.where(needed[:, None], _conversion_costs(problem, producer, target)[None, :], 0.0)
    factors.append(((star, producer), costs))
    return factors


def _at(parts: tuple[int, ...], part: int, option: int) -> tuple[slice | int, ...]:
    return tuple(option if other == part else slice(None) for other in parts)


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
