"""The choice of strategies solved exactly by eliminating one part after another (bucket elimination).

Each value gives a table of costs over the options of its producer and its users, each part a table over its own. To eliminate a part, the
tables that depend on it are added up, and for all options of the others the best of its own is kept. Traces are long and thin: few
parts depend on each other at any point, so the tables stay small. The part whose elimination makes the smallest table goes first.

For x -> a -> b -> y, eliminating a leaves a table over (x, b), eliminating b one over (x, y).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from smpc.codegen.rewrite.layout_problem import LayoutProblem
from smpc.codegen.rewrite.sharding import REPLICATED, Layout

_LARGEST = 2_000_000  # entries of a table
_LARGEST_VALUE = 20_000  # ... that one value gives; beyond, its users are taken one after another

Table = npt.NDArray[np.float64]
Factor = tuple[tuple[int, ...], Table]  # parts, ascending, and the costs over their options


def eliminate(problem: LayoutProblem) -> dict[int, int] | None:
    """The index of each part's option; empty if nothing fits together, None if a table would be too large."""
    sizes = {part: len(options) for part, options in problem.options.items()}
    factors: list[Factor] = []
    for part, options in problem.options.items():
        factors.append(((part,), np.asarray([problem.option_cost(part, option) for option in options])))
    for producer, users in problem.users().items():
        parts = dict.fromkeys((producer, *(user for user, _ in users)))
        if math.prod(sizes[part] for part in parts) <= _LARGEST_VALUE:
            factors.append(_value_factor(problem, producer, users))
        else:
            factors += _value_chain(problem, producer, users, sizes)
    done: list[tuple[int, Factor]] = []
    by_part: dict[int, list[Factor]] = {part: [] for part in sizes}
    for factor in factors:
        for part in factor[0]:
            by_part[part].append(factor)
    width = {part: _joint_size(found, sizes) for part, found in by_part.items()}
    while width:
        part = min(width, key=lambda p: (width[p], p))
        if width.pop(part) > _LARGEST:
            return None
        joint = _sum(by_part.pop(part), sizes)
        done.append((part, joint))
        left = tuple(other for other in joint[0] if other != part)
        reduced = (left, joint[1].min(axis=joint[0].index(part)))
        if not left and not np.isfinite(reduced[1]):
            return {}
        for other in left:
            by_part[other] = [factor for factor in by_part[other] if part not in factor[0]] + [reduced]
            width[other] = _joint_size(by_part[other], sizes)
    return {part: option for part, option in _read_back(done).items() if part in problem.options}


def _read_back(done: list[tuple[int, Factor]]) -> dict[int, int]:
    """The options, from the part that was eliminated last to the first."""
    picked: dict[int, int] = {}
    for part, (parts, table) in reversed(done):
        index = tuple(slice(None) if other == part else picked[other] for other in parts)
        picked[part] = int(np.argmin(table[index]))
    return dict(sorted(picked.items()))


def _value_factor(problem: LayoutProblem, producer: int, users: list[tuple[int, int]]) -> Factor:
    """What the conversions of one value cost: each layout that is needed once."""
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


def _value_chain(
    problem: LayoutProblem, producer: int, users: list[tuple[int, int]], sizes: dict[int, int]
) -> list[Factor]:
    """The same for a value with many users, as a chain of tables: what the first i users need, as a set of layouts, is a part of its own.

    These parts have negative numbers, and are added to `sizes`.
    """
    targets = list(dict.fromkeys(option.inputs[i] for user, i in users for option in problem.options[user]))
    if producer in problem.returned and REPLICATED not in targets:
        targets.append(REPLICATED)
    num_sets = 1 << len(targets)
    bits = [(np.arange(num_sets) >> i) & 1 == 1 for i in range(len(targets))]
    factors: list[Factor] = []
    before: int | None = None
    for user, index in users:
        after = min(0, *sizes) - 1
        sizes[after] = num_sets
        masks = [1 << targets.index(option.inputs[index]) for option in problem.options[user]]
        parts, shape = (
            ((after, user), (num_sets, len(masks)))
            if before is None
            else (
                (after, before, user),
                (num_sets, num_sets, len(masks)),
            )
        )
        table = np.full(shape, math.inf)
        for k, mask in enumerate(masks):
            if before is None:
                table[mask, k] = 0.0
            else:
                table[np.arange(num_sets) | mask, np.arange(num_sets), k] = 0.0
        factors.append((parts, table))
        before = after
    assert before is not None, "a value without users is no chain"
    costs = np.zeros((num_sets, len(problem.options[producer])))
    for target, chosen in zip(targets, bits, strict=True):
        needed = chosen if not (target == REPLICATED and producer in problem.returned) else np.ones_like(chosen)
        costs += np.where(needed[:, None], _conversion_costs(problem, producer, target)[None, :], 0.0)
    factors.append(((before, producer), costs))
    return factors


def _at(parts: tuple[int, ...], part: int, option: int) -> tuple[slice | int, ...]:
    return tuple(option if other == part else slice(None) for other in parts)


def _joint_size(factors: list[Factor], sizes: dict[int, int]) -> int:
    return math.prod(sizes[part] for part in dict.fromkeys(part for parts, _ in factors for part in parts))


def _sum(factors: list[Factor], sizes: dict[int, int]) -> Factor:
    parts = tuple(sorted({part for own, _ in factors for part in own}))
    table = np.zeros(tuple(sizes[part] for part in parts))
    for own, costs in factors:
        table += costs.reshape(tuple(sizes[part] if part in own else 1 for part in parts))
    return parts, table
