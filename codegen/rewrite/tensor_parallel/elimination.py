"""The cheapest options that fit together, one for every part of a layout problem: exact, by tables.

Each value gives a table of costs over the options of its producer and its users, each part a table over its own. To eliminate a part
(bucket elimination), the tables that depend on it are added up, and for all options of the others the best of its own is kept. Traces are
long and thin: few parts depend on each other at any point, so the tables stay small. The part whose elimination makes the smallest table
goes first.

For x -> a -> b -> y, eliminating a leaves a table over (x, b), eliminating b one over (x, y).

Where values have many users (a state space model's recurrence), the tables grow beyond memory. Then options are left out that no best
choice needs (dead-end elimination): with f the tables that depend on a part,

    option k is a dead end if for some option j    sum over f of (min over the options of the others of f(k, .) - f(j, .)) >= 0

since j costs no more than k, whatever the others do. Small tables are eliminated first, so that the sum has few and telling terms; dead
ends go whenever no table below the next of `_STAGES` is left.

What is left then (blocks that run many times with the same weights) is branched on: a part is fixed to each of its options in turn, and
each of these smaller problems goes the same way, the most promising one first. Problems that cannot be better than the best choice found
are left out. The bound comes from mini-buckets (Dechter and Rish, 2003): elimination in which the tables of a part are minimized apart
where together they would be too large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from smpc.codegen.rewrite.tensor_parallel.layout_problem import LayoutProblem
from smpc.codegen.rewrite.tensor_parallel.layouts import REPLICATED, Layout

_STAGES = (300, 3_000, 30_000, 300_000)  # entries of tables, before dead ends are looked for
_LARGEST_OF_BOUND = 100_000  # entries of a table of a lower bound
_MOST_BRANCHES = 1_000
_CLOSE = 1e-9  # of the best choice's cost: a problem that may be better by less is left out
_MOST_AXES = 16  # of a table that one value gives
_LARGEST_VALUE = 300  # ... that one value gives; beyond, the layouts that it is had in are a part of their own

IntArray = npt.NDArray[np.int64]
Table = npt.NDArray[np.float64]
Factor = tuple[tuple[int, ...], Table]  # parts, ascending, and the costs over their options


def solve(problem: LayoutProblem) -> tuple[dict[int, int], bool]:
    """The index of each part's option, and whether it is proven that no better choice exists. Empty: nothing fits together."""
    root = _Tables.of(problem)
    best: _Tables | None = None
    waiting = [] if root is None else [(-math.inf, root)]
    count = 0
    while waiting and (best is None or count < _MOST_BRANCHES):
        bound, tables = waiting.pop()
        if not _is_better(bound, best):
            continue
        count += 1
        tables.reduce()
        bound = tables.lower_bound()
        if not _is_better(bound, best):
            continue
        if tables.by_part:
            promising = [(max(bound, other.lower_bound()), other) for other in tables.branches()]
            waiting += sorted(promising, key=lambda item: -item[0])
        else:
            best = tables
    proven = not any(_is_better(bound, best) for bound, _ in waiting)
    if best is None:
        return {}, proven
    picked = best.read_back()
    return {part: picked.get(part, 0) for part in sorted(problem.options)}, proven


def _is_better(cost: float, best: _Tables | None) -> bool:
    return cost < math.inf if best is None else cost < best.cost - _CLOSE * abs(best.cost)


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

    @property
    def excluded(self) -> bool:
        """Whether nothing that is left fits together."""
        return not all(np.isfinite(table).any() for _, (_, table), _ in self.done)

    @property
    def cost(self) -> float:
        """The cost of all that is eliminated, without the parts that have one option in the problem."""
        return float(sum(table.min() for part, (parts, table), _ in self.done if parts == (part,)))

    def reduce(self) -> None:
        """Leaves what is hard: drops dead ends, and eliminates parts until tables would be too large."""
        for largest in _STAGES:
            self.eliminate(largest)
            while self.drop_dead_ends():
                self.eliminate(largest)

    def branches(self) -> Iterator[_Tables]:
        """The same with each of the options of one part: of that which most tables depend on."""
        part = min(self.by_part, key=lambda p: (-len(self.by_part[p]), len(self.kept[p]), p))
        for option in range(len(self.kept[part])):
            fixed = _Tables(dict(self.kept), {p: list(own) for p, own in self.by_part.items()}, list(self.done))
            fixed._keep(part, np.arange(len(self.kept[part])) == option)
            fixed._settle(part)
            yield fixed

    def lower_bound(self) -> float:
        """No choice of what is left costs less: mini-buckets."""
        factors = list({id(factor): factor for own in self.by_part.values() for factor in own}.values())
        left, total = dict.fromkeys(self.by_part), self.cost
        while left:
            part = min(left, key=lambda p: (self._size(_parts_of(f for f in factors if p in f[0])), p))
            del left[part]
            for bucket in self._mini_buckets([factor for factor in factors if part in factor[0]]):
                reduced = _without(part, self._sum(bucket))
                factors.append(reduced)
                total += 0.0 if reduced[0] else float(reduced[1])
            factors = [factor for factor in factors if part not in factor[0]]
        return math.inf if self.excluded else total

    def eliminate(self, largest: int) -> None:
        """Takes out parts while their tables have at most so many entries."""
        width = {part: self._joint_size(part) for part in self.by_part}
        while width:
            part = min(width, key=lambda p: (width[p], p))
            if width.pop(part) > largest:
                break
            joint = self._sum(self.by_part.pop(part))
            self.done.append((part, joint, tuple(self.kept[other] for other in joint[0])))
            reduced = _without(part, joint)
            for other in reduced[0]:
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
            self._keep(part, left)
            waiting.update((other, None) for other in _parts_of(self.by_part[part]) if other != part)
            if len(self.kept[part]) == 1:
                waiting.pop(part, None)
                self._settle(part)
        return found

    def _keep(self, part: int, left: npt.NDArray[np.bool_]) -> None:
        """Drops the other options of a part."""
        self.kept[part] = self.kept[part][left]
        for factor in self.by_part[part]:
            parts, table = factor
            self._replace(factor, (parts, np.compress(left, table, axis=parts.index(part))))

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
        return self._size(_parts_of(self.by_part[part]))

    def _size(self, parts: Iterable[int]) -> int:
        return math.prod(len(self.kept[part]) for part in parts)

    def _mini_buckets(self, factors: list[Factor]) -> list[list[Factor]]:
        """The tables in groups, the sums of which are small; the largest tables first."""
        found: list[list[Factor]] = []
        for factor in sorted(factors, key=lambda own: -own[1].size):
            fitting = (own for own in found if self._size(_parts_of([*own, factor])) <= _LARGEST_OF_BOUND)
            bucket = next(fitting, None)
            if bucket is None:
                found.append([factor])
            else:
                bucket.append(factor)
        return found

    def _sum(self, factors: list[Factor]) -> Factor:
        parts = _parts_of(factors)
        table = np.zeros(tuple(len(self.kept[part]) for part in parts))
        for own, costs in factors:
            table += costs.reshape(tuple(len(self.kept[part]) if part in own else 1 for part in parts))
        return parts, table


def _parts_of(factors: Iterable[Factor]) -> tuple[int, ...]:
    return tuple(sorted({part for own, _ in factors for part in own}))


def _without(part: int, factor: Factor) -> Factor:
    """The factor without the part: its best option for all options of the others."""
    parts, table = factor
    return tuple(other for other in parts if other != part), table.min(axis=parts.index(part))


def _cost_differences(factor: Factor, part: int) -> Table:
    """By options (k, j) of the part: how much more k costs than j at least; infinite if k goes with no options of others."""
    parts, table = factor
    rows = np.moveaxis(table, parts.index(part), 0).reshape(table.shape[parts.index(part)], -1)
    found = np.fmin.reduce(rows[:, None] - rows[None], axis=2)  # without the numbers where both go with nothing
    return np.where(np.isnan(found), np.inf, found)


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
    """What a conversion to the target costs, by option of the producer."""
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
