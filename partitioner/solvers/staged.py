"""Placements on devices whose transfers count in their load: exact, by a dynamic program over the prefixes of the graph.

Terms
    order       (u, w): u runs on no later stage than w. In a graph for training, backward units come the other way round
    prefix      a set of units that contains whatever its members come after, as in `smpc.partitioner.solvers.prefix_lattice`
    stage       what one prefix has beyond another one. A placement in stages is a rising chain of prefixes, from none to all
    state       which devices have their stage already: how many of the row, or how many of each kind if their order is free

The cost of a stage is the load of `smpc.partitioner.solvers.loads`. With I' and I the prefixes around a stage,

    transfers(I', I) = transfers(none, I), corrected for the values that some of their units in I' and some outside touch

so of each I' only those few values are looked at, for all I at once. `solve_stages` tries growing thresholds: with one all stages that
cost more are left out, so few prefixes are reached; the first threshold that leads to the full prefix gives the optimum, and each that
does not is a lower bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from smpc.partitioner.solvers.loads import ROUNDING, LoadProblem, simple_bound
from smpc.partitioner.solvers.prefix_lattice import prefixes, to_words
from smpc.partitioner.stage_costs import FloatArray, IntArray

T = TypeVar("T", bound=np.generic)

_MAX_PREFIXES = 200_000  # for all placements
_MAX_USES = 80_000_000  # values x prefixes, 3 bytes each
_SOME_PREFIXES = 80_000  # for some of them
_FEW_PREFIXES = 2000  # with so many, a good placement is found at once
_WINDOWS = (
    math.inf,
    64,
    32,
    16,
    12,
    10,
    8,
    6,
    5,
    4,
    3,
    2,
    1,
)  # by how much a unit may come before one that the order has earlier
_SHARES = (0.1, 0.4, 0.8, 0.95, 1.0)  # of the way from what is proven to what is known
_FACTORS = (1.05, 1.2, 1.5, 2.0, 4.0)
_MAX_STATES = 1000
_MAX_CELLS = 20_000_000  # states x prefixes
MAX_PAIRS = 8_000_000_000  # of prefixes that are looked at for one problem
STOPPED = "the search for placements stopped at its limit: best one found"


@dataclass(frozen=True, slots=True)
class Staged:
    """The device of each unit, its largest load, and a lower bound for placements in stages; `note`: a limit that was hit."""

    device_of: tuple[int, ...] | None
    bottleneck: float
    lower_bound: float
    row: tuple[int, ...] = ()  # the devices in the order of their stages
    note: str = ""


def solve_stages(problem: LoadProblem, gap: float, most_pairs: int = MAX_PAIRS) -> Staged:
    """The best placement in stages; proven within `gap` unless the graph has too many prefixes, or more pairs of them would have to be
    looked at than `most_pairs` (`STOPPED`), which the note says."""
    bound = simple_bound(problem)
    if len(_staged_states(problem)[0]) > _MAX_STATES:
        found = solve_stages(replace(problem, in_row=True), gap, most_pairs)
        return replace(
            found, lower_bound=min(bound, found.bottleneck), note="too many kinds of devices to try every order of them"
        )
    best = Staged(None, math.inf, bound)
    for order in _staged_orders(problem):
        few = _widest_prefixes(problem, order, _FEW_PREFIXES, _FEW_PREFIXES)[0]
        for tried in (_Prefixes.of(problem, order, 1, _SOME_PREFIXES), few):
            if tried is not None and best.bottleneck > bound * (1.0 + gap):
                best = _better(best, _search_stages(tried, best.bottleneck, MAX_PAIRS))
    most = min(_MAX_PREFIXES, _MAX_CELLS // len(_staged_states(problem)[0]), _MAX_USES // max(1, len(problem.values)))
    lattice, is_whole = _widest_prefixes(problem, list(_staged_orders(problem))[-1], most, min(most, _SOME_PREFIXES))
    if lattice is None:
        return replace(best, lower_bound=bound, note="the graph is too large to search all placements")
    budget, proven, note = most_pairs, bound, "" if is_whole else "the graph has too many placements to search them all"
    for limit in _staged_limits(bound, best.bottleneck):
        if best.bottleneck <= proven * (1.0 + gap):
            break
        below = _search_stages(lattice, limit, budget)
        budget -= lattice.pairs
        if below is None:
            note = STOPPED
            break
        if below.device_of is not None:
            best = _better(best, below)
            proven = best.bottleneck
            break
        proven = limit
    return replace(best, lower_bound=min(best.bottleneck, proven if is_whole else bound), note=note)


def _staged_limits(bound: float, known: float) -> list[float]:
    """Loads to search below, the largest last: a known placement's, or infinity."""
    if math.isinf(known):
        return [*(bound * factor for factor in _FACTORS if bound > 0), known]
    return [bound + share * (known - bound) for share in _SHARES]


def _better(best: Staged, other: Staged | None) -> Staged:
    return best if other is None or other.bottleneck >= best.bottleneck else other


def _staged_orders(problem: LoadProblem) -> Iterator[list[int]]:
    """Orders of all units that keep the problem's: breadth first, and what was begun first finished first."""
    yield list(nx.lexicographical_topological_sort(problem.order))
    waiting = {unit: problem.order.in_degree(unit) for unit in problem.order}
    ready = sorted((unit for unit, number in waiting.items() if not number), reverse=True)
    found = []
    while ready:
        unit = ready.pop()
        found.append(unit)
        for other in sorted(problem.order.successors(unit), reverse=True):
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    yield found


def _widest_prefixes(problem: LoadProblem, order: Sequence[int], most: int, some: int) -> tuple[_Prefixes | None, bool]:
    """All prefixes, if they are no more than `most`, else those within the widest window that makes no more than `some`; and whether
    they are all."""
    for window in _WINDOWS:
        found = _Prefixes.of(problem, order, window, most if math.isinf(window) else some)
        if found is not None:
            return found, math.isinf(window)
    return None, False


@dataclass
class _Prefixes:
    """The prefixes of a problem, smaller ones first, with the cost of stages between them."""

    problem: LoadProblem
    masks: list[int]
    words: NDArray[np.uint64]  # [words, prefixes]
    costs: FloatArray  # [kinds, prefixes], of units that can run there
    later: FloatArray  # [kinds, prefixes], the least of these costs from each prefix on
    banned: IntArray  # [kinds, prefixes]: how many cannot
    memory: IntArray  # [kinds, prefixes]
    least: FloatArray  # cost of each prefix where its units cost least
    users: NDArray[np.int16]  # [values, prefixes]: consumers in each prefix
    made: NDArray[np.bool_]  # [values, prefixes]: whether the producer is in it
    num_users: IntArray
    num_bytes: FloatArray
    base: FloatArray  # bytes that each prefix sends and receives as a stage
    pairs: int = 0  # that the last search has looked at

    @classmethod
    def of(cls, problem: LoadProblem, order: Sequence[int], window: float, most: int) -> _Prefixes | None:
        """`window`: a unit comes after those so many places before it in `order`; None if there are more prefixes than `most`."""
        before = [sorted(problem.order.predecessors(unit)) for unit in range(problem.num_units)]
        if not math.isinf(window):
            for i in range(len(order) - int(window)):
                before[order[i + int(window)]].append(order[i])
        walked = prefixes([sorted(set(found)) for found in before], most)
        if walked is None:
            return None
        masks, _, added = walked
        sizes = np.asarray([mask.bit_count() for mask in masks])
        assert (np.diff(sizes) >= 0).all(), "prefixes are found by size"
        can = np.isfinite(problem.costs)
        least = problem.costs.min(axis=0)
        columns = np.concatenate(
            [np.where(can, problem.costs, 0.0), ~can, np.where(np.isfinite(least), least, 0.0)[None]]
        )
        sums = _stage_sums(columns, added)
        kinds = len(problem.limits)
        users, made = _uses_of_prefixes(problem, added)
        num_users = np.asarray([len(value.consumers) for value in problem.values], dtype=np.int64)
        num_bytes = np.asarray([value.num_bytes for value in problem.values], dtype=np.float64)
        sends = made & (users < num_users[:, None]) if len(num_users) else made
        base = num_bytes @ sends + num_bytes @ (~made & (users > 0)) if len(num_users) else np.zeros(len(masks))
        words = to_words(masks, problem.num_units // 64 + 1)
        return cls(
            problem, masks, np.ascontiguousarray(words.T), sums[:kinds], _least_from(sums[:kinds]),
            sums[kinds : 2 * kinds].astype(np.int64), _stage_sums(problem.memory, added), sums[-1], users, made, num_users, num_bytes, base,
        )  # fmt: skip

    def devices_needed(self, limit: float) -> IntArray:
        """How many devices at least what is beyond each prefix takes, if none may have a load above `limit`."""
        rate = min(self.problem.rates[kind] for kind in self.problem.kind_of)
        beyond = self.least[-1] - self.least + rate * self.base  # what crosses is received, or sent back, once at least
        needed: IntArray = np.ceil(beyond / max(limit, 1e-300) * (1.0 - ROUNDING)).clip(max=2**30).astype(np.int64)
        return needed

    def stages(
        self, start: int, kinds: Sequence[int], limit: float, allowed: NDArray[np.bool_]
    ) -> tuple[IntArray, dict[int, FloatArray]]:
        """The prefixes that may follow `start` with a stage of at most `limit` on one of these kinds, and its cost on each."""
        most = [self.costs[kind, start] + limit * (1.0 + 2 * ROUNDING) for kind in kinds]
        end = max(int(np.searchsorted(self.later[kind], x, "right")) for kind, x in zip(kinds, most, strict=True))
        begin = start + 1 + (int(allowed[start + 1 : end].argmax()) if end > start + 1 else 0)
        near = np.zeros(max(0, end - begin), dtype=bool)
        moved = np.abs(self.base[begin:end] - self.base[start])  # at least: what crosses one of the two prefixes alone
        for kind in kinds:
            own = self.costs[kind, begin:end] - self.costs[kind, start]
            near |= own + self.problem.rates[kind] * moved <= limit * (1.0 + ROUNDING)
        near &= allowed[begin:end]
        self.pairs += len(near)
        found = np.flatnonzero(near) + begin
        for word in self.words:
            inside = word[start]
            if inside and len(found):
                found = found[(word[found] & inside) == inside]
        num_bytes = self._transfers(start, found) if any(self.problem.rates[kind] for kind in kinds) else 0.0
        self.pairs += len(found)
        cost = {}
        for kind in kinds:
            own = self.costs[kind, found] - self.costs[kind, start] + self.problem.rates[kind] * num_bytes
            own[self.banned[kind, found] > self.banned[kind, start]] = np.inf
            own[self.memory[kind, found] - self.memory[kind, start] > self.problem.limits[kind]] = np.inf
            cost[kind] = own
        return found, cost

    def _transfers(self, start: int, found: IntArray) -> FloatArray:
        """Bytes that the stages from `start` to each of `found` send and receive."""
        total = self.base[found]
        users, made = self.users[:, start], self.made[:, start]
        partly = np.flatnonzero((users + made > 0) & (users + made < self.num_users + 1))
        self.pairs += len(partly) * len(found)
        for v in partly.tolist():
            here, there = int(users[v]), self.users[v, found]
            everyone = self.num_users[v]
            if made[v]:  # base: sent if some user is beyond; in truth: received if some user is in the stage
                change = (there > here).astype(np.int8) - (there < everyone)
            else:  # some users are before: base received it, or sent it if the producer is in and some user beyond
                is_made = self.made[v, found]
                truth = is_made | (there > here)
                change = truth.astype(np.int8) - np.where(is_made, there < everyone, True)
            total = total + self.num_bytes[v] * change
        return total


def _least_from(costs: FloatArray) -> FloatArray:
    """The least of each row from each column on."""
    found: FloatArray = np.minimum.accumulate(costs[:, ::-1], axis=1)[:, ::-1]
    return np.ascontiguousarray(found)


def _stage_sums(columns: NDArray[T], added: Sequence[tuple[int, int]]) -> NDArray[T]:
    """Sums of rows over the units of each prefix, [rows, prefixes]."""
    found = np.zeros((len(added) + 1, len(columns)), dtype=columns.dtype)
    by_unit = np.ascontiguousarray(columns.T)
    for target, (source, unit) in enumerate(added, 1):
        found[target] = found[source] + by_unit[unit]
    return np.ascontiguousarray(found.T)


def _uses_of_prefixes(
    problem: LoadProblem, added: Sequence[tuple[int, int]]
) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
    """For each value and prefix: how many of the value's consumers are in the prefix, and whether its producer is."""
    columns = np.zeros((2, len(problem.values), problem.num_units), dtype=np.int16)
    for v, value in enumerate(problem.values):
        columns[0, v, list(value.consumers)] = 1
        columns[1, v, value.producer] = 1
    return _stage_sums(columns[0], added), _stage_sums(columns[1], added) > 0


def _search_stages(lattice: _Prefixes, limit: float, budget: int) -> Staged | None:
    """The best placement with no load above `limit`; without devices if there is none; None if it takes more pairs than `budget`."""
    problem, size = lattice.problem, len(lattice.masks)
    states, following = _staged_states(problem)
    lattice.pairs = 0
    reached = np.full((len(states), size), np.inf)
    parent = np.full((len(states), size), -1, dtype=np.int32)
    cause = np.full((len(states), size), -1, dtype=np.int16)  # the state before
    reached[0, 0] = 0.0
    needed = lattice.devices_needed(limit)
    allowed = [needed < number for number in range(problem.num_devices + 1)]  # by how many devices have no stage yet
    for start in range(size - 1):
        own = reached[:, start]
        if not (own <= limit).any():
            continue
        if problem.in_row and problem.may_idle:
            _skip_devices(own, parent[:, start], cause[:, start], start)
        active = [
            state
            for state, used in enumerate(states)
            if own[state] <= limit and needed[start] <= problem.num_devices - sum(used)
        ]
        if problem.may_idle and not problem.in_row:
            active = [s for s in active if not any(own[t] <= own[s] and _is_less(states[t], states[s]) for t in active)]
        kinds = sorted({kind for state in active for kind, _ in following[state]})
        if not kinds:
            continue
        least_used = min(sum(states[state]) for state in active)
        found, costs = lattice.stages(start, kinds, limit, allowed[problem.num_devices - least_used])
        if lattice.pairs > budget:
            return None
        for state in active:
            for kind, after in following[state]:
                new = np.maximum(costs[kind], own[state])
                better = (new <= limit * (1.0 + 1e-12)) & (new < reached[after, found])
                where = found[better]
                reached[after, where], parent[after, where], cause[after, where] = new[better], start, state
    ends = range(len(states)) if problem.may_idle else [len(states) - 1]
    last = min(ends, key=lambda state: (reached[state, -1], state))
    if math.isinf(reached[last, -1]):
        return Staged(None, math.inf, limit)
    return _read_stages(lattice, states, parent, cause, last)


def _is_less(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))


def _skip_devices(own: FloatArray, parent: NDArray[np.int32], cause: NDArray[np.int16], start: int) -> None:
    """Devices of the row that stay without a stage."""
    for state in range(1, len(own)):
        if own[state - 1] < own[state]:
            own[state], parent[state], cause[state] = own[state - 1], start, state - 1


def _staged_states(problem: LoadProblem) -> tuple[list[tuple[int, ...]], list[list[tuple[int, int]]]]:
    """Devices used so far, by kind or (in a row) in all, and of each state the (kind, next state) that may follow."""
    if problem.in_row:
        number = problem.num_devices
        row = [[(problem.kind_of[s], s + 1)] if s < number else [] for s in range(number + 1)]
        return [(s,) for s in range(number + 1)], row
    counts = [problem.kind_of.count(kind) for kind in range(len(problem.limits))]
    states = sorted(itertools.product(*(range(count + 1) for count in counts)), key=lambda used: (sum(used), used))
    number_of = {used: i for i, used in enumerate(states)}
    following = []
    for used in states:
        more = [(kind, (*used[:kind], used[kind] + 1, *used[kind + 1 :])) for kind in range(len(counts))]
        following.append([(kind, number_of[after]) for kind, after in more if after in number_of])
    return states, following


def _read_stages(
    lattice: _Prefixes, states: list[tuple[int, ...]], parent: NDArray[np.int32], cause: NDArray[np.int16], last: int
) -> Staged:
    """The placement that the tables of `_search_stages` spell."""
    problem = lattice.problem
    free = [[d for d, k in enumerate(problem.kind_of) if k == kind] for kind in range(len(problem.limits))]
    device_of, row = [-1] * problem.num_units, []
    prefix, state = len(lattice.masks) - 1, last
    while prefix:
        before, came = int(parent[state, prefix]), int(cause[state, prefix])
        if before != prefix:
            if problem.in_row:
                device = came
            else:
                kind = next(k for k, (a, b) in enumerate(zip(states[came], states[state], strict=True)) if a != b)
                device = free[kind][states[came][kind]]
            row.append(device)
            mask = lattice.masks[prefix] & ~lattice.masks[before]
            while mask:
                unit = mask.bit_length() - 1
                device_of[unit] = device
                mask ^= 1 << unit
        prefix, state = before, came
    return Staged(tuple(device_of), problem.bottleneck(device_of), 0.0, tuple(reversed(row)))
