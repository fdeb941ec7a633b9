"""A lower bound on the load of placements whose transfers count: every device that does its share of the work cuts some values.

Terms
    weight      of each kind of device; the weights of all devices add up to one (`smpc.partitioner.solvers.loads.divided`)
    price       of a unit: the least weight x cost of it on any kind; together they are the least load of units cut in pieces, L
    f(t)        the least that a set of units whose prices add up to t cuts, by weight

A device of weight w with the units S and a load of at most B has price(S) + f(price(S)) <= w B. Let Y(B) be the largest price for which
that holds: if the Y(B) of all devices add up to less than L, no placement has a load of at most B.

f is over all sets, connected or not, by a dynamic program over the units in a row: for each value that some units behind and some ahead
touch, it knows whether the units behind are all in the set, all out of it, or some of each. So it is for graphs in which few values are
open at a time. Prices are counted in whole steps whose sums from the start are rounded, so a run of neighbours in the row is wrong by at
most one step, however long it is: the start of a run counts one step more, and what a set cuts two steps less for each of its runs.

Example: four units in a line, of cost 1, each of which sends a value of cost 1 to the next, on two devices. Work alone says 2; but what is
not all of the line cuts a value, so of a load of 2.5 only 1.5 is work, and 3 is proven.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smpc.partitioner.solvers.loads import ROUNDING, LoadProblem, divided
from smpc.partitioner.stage_costs import FloatArray

_MAX_MOVES = 100_000  # of all units
_STEPS = 2000  # of the largest price that a device may have
_ROUNDS = 50  # of the bisection
_OUT, _IN, _BOTH = 0, 1, 2


def cut_bound(problem: LoadProblem, known: float) -> float:
    """A bound on the largest load, at most `known`, which some placement has; 0 where too many values are open at a time."""
    total, weights = divided(problem)
    walk = None
    if total > 0 and np.isfinite(known):
        walk = _StateWalk.of(problem, range(problem.num_units)) or _StateWalk.of(problem, _narrow_cuts(problem))
    if walk is None:
        return 0.0
    weighted = np.full(problem.costs.shape, np.inf)
    np.multiply(weights[:, None], problem.costs, out=weighted, where=np.isfinite(problem.costs))
    tables: dict[int, tuple[float, FloatArray]] = {}
    for kind in sorted(set(problem.kind_of)):
        weight = float(weights[kind])
        if problem.rates[kind] and weight > 0:
            step = weight * known / _STEPS
            tables[kind] = step, walk.least_cuts(weighted.min(axis=0), step, weight * problem.rates[kind])
    low, high = 0.0, known
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        most = sum(_largest_cut(tables.get(kind), float(weights[kind]) * middle) for kind in problem.kind_of)
        low, high = (middle, high) if most < total * (1.0 - ROUNDING) else (low, middle)
    return low * (1.0 - ROUNDING)


def _largest_cut(table: tuple[float, FloatArray] | None, most: float) -> float:
    """The largest price of the units of a device with a load of `most`, by weight."""
    if table is None:
        return most
    step, cuts = table
    prices = step * np.arange(len(cuts))
    within = np.flatnonzero(prices + cuts <= most * (1.0 + ROUNDING))
    return float(min(most, prices[within[-1]])) if len(within) else 0.0


@dataclass(frozen=True, slots=True)
class _Move:
    """From one state to another, with a unit in the set or out of it. num_bytes: of the values that it cuts."""

    source: int
    target: int
    is_in: bool
    starts: bool  # a run
    num_bytes: float


@dataclass(frozen=True)
class _StateWalk:
    """The states of the dynamic program, unit by unit, and what follows from each of them."""

    row: tuple[int, ...]  # the units
    moves: tuple[tuple[_Move, ...], ...]  # by place in the row
    sizes: tuple[int, ...]  # states after each place

    @classmethod
    def of(cls, problem: LoadProblem, row: Sequence[int]) -> _StateWalk | None:
        """None if there are too many moves."""
        by_unit, place = _touching_cut(problem), {unit: i for i, unit in enumerate(row)}
        last = [max(place[unit] for unit in (value.producer, *value.consumers)) for value in problem.values]
        opened: list[int] = []
        states: dict[tuple[int, ...], int] = {(_OUT,): 0}  # sides of the last unit and of the open values
        moves, sizes, number = [], [], 0
        for at, unit in enumerate(row):
            here = by_unit[unit]
            now = [v for v in dict.fromkeys([*opened, *here]) if last[v] > at]
            found: dict[tuple[int, ...], int] = {}
            made = []
            for state, source in states.items():
                before = dict(zip(opened, state[1:], strict=True))
                for side in (_OUT, _IN):
                    cut = [v for v in here if before.get(v, side) == 1 - side]
                    after = {**dict.fromkeys(here, side), **before, **dict.fromkeys(cut, _BOTH)}
                    target = found.setdefault((side, *(after[v] for v in now)), len(found))
                    num_bytes = float(sum(problem.values[v].num_bytes for v in cut))
                    made.append(_Move(source, target, side == _IN, side == _IN and state[0] == _OUT, num_bytes))
            states, opened, number = found, now, number + len(made)
            moves.append(tuple(made))
            sizes.append(len(found))
            if number > _MAX_MOVES:
                return None
        return cls(tuple(row), tuple(moves), tuple(sizes))

    def least_cuts(self, prices: FloatArray, step: float, rate: float) -> FloatArray:
        """f by the number of steps, two steps less for each run; the last one is of all sets with as many or more."""
        whole = np.diff(np.round(np.append(0.0, np.cumsum(prices[list(self.row)])) / step)).astype(np.int64).tolist()
        most = _STEPS + 2
        table = np.full((1, most + 1), np.inf)
        table[0, 0] = 0.0
        for made, size, steps in zip(self.moves, self.sizes, whole, strict=True):
            after = np.full((size, most + 1), np.inf)
            for move in made:
                shift = min(most, (steps + move.starts) * move.is_in)
                before = table[move.source] + (rate * move.num_bytes - 2 * step * move.starts)
                place = after[move.target]
                np.minimum(place[shift:], before[: most + 1 - shift], out=place[shift:])
                place[most] = min(place[most], before[most - shift :].min())
            table = after
        found: FloatArray = table.min(axis=0)
        return found


def _touching_cut(problem: LoadProblem) -> list[list[int]]:
    """By unit, the values that it makes or uses."""
    found: list[list[int]] = [[] for _ in range(problem.num_units)]
    for v, value in enumerate(problem.values):
        for unit in sorted({value.producer, *value.consumers}):
            found[unit].append(v)
    return found


def _narrow_cuts(problem: LoadProblem) -> list[int]:
    """All units in a row in which few values are open at a time: always the one that opens the fewest and closes the most."""
    by_unit = _touching_cut(problem)
    left = [len({value.producer, *value.consumers}) for value in problem.values]
    whole = list(left)
    row: list[int] = []
    rest = dict.fromkeys(range(problem.num_units))
    near: dict[int, None] = {}

    def opens(unit: int) -> tuple[int, int]:
        return sum((left[v] == whole[v]) - (left[v] == 1) for v in by_unit[unit]), unit

    while rest:
        unit = min(near or rest, key=opens)
        row.append(unit)
        rest.pop(unit)
        near.pop(unit, None)
        for v in by_unit[unit]:
            left[v] -= 1
            for other in (problem.values[v].producer, *problem.values[v].consumers):
                if other in rest:
                    near[other] = None
    return row
