"""All placements of a graph at once: its prefixes, and the chains of prefixes that are placements.

Terms
    prefix      a set of units that contains whatever its members depend on. A placement that keeps all dependencies is a
                rising chain of prefixes: what runs on stages 0..s for each s, whether stages are contiguous or not
    frontier    the largest prefixes that stages 0..s can run when no stage may cost more than a bound. Whatever can be
                finished from a prefix can be finished from a larger one, so smaller ones need not be kept
    twins       units of equal cost with the same shared items, of which the first depends on no more than the second and
                all that depends on the second depends on the first. Exchanging two that are out of order keeps a placement
                valid and moves it towards order, so the first may be taken to run no later than the second

    fluid       units that are left out of the lattice, because with them it would have too many prefixes. They may be
                split and count as one amount, at their least cost: what stages 0..s did of it is at most what their prefix has released
                (all that a unit depends on has run) and at least what is due (something that depends on it has run)

A transformer has few prefixes: branches (query, key, value) join again soon, and the projections of an encoder's output
that wait in a decoder are twins. Units off the heaviest path become fluid, those that can wait longest first, heavy ones last.

`best_chain` bisects for the smallest bottleneck. With all units and few prefixes it minds that no stage may be empty, and
is exact; else stages may be empty and units fluid, which only lowers costs, so what it proves is a lower bound.

    0 -> 1 -> 3     prefixes {} {0} {01} {02} {012} {0123}; with times 1, 8, 8, 1 and two stages
    0 -> 2 -> 3     {} {01} {0123} is a best chain, with bottleneck 9

`place` makes a placement of all units from the prefixes: the best that several bounds lead to. For a bound on the stages, the lattice
says where the units that it keeps run; the fluid ones are then placed whole, from the last stage to the first: each runs as late as it
may, on the stage of what depends on it if the bound allows, else earlier, so that little is sent ahead of its use. Units of several uses
do not fit exactly, so some larger bounds are tried too, and the best placement counts.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from smpc.partitioner.stage_costs import FloatArray, IntArray, Scale, Units, heaviest_path, own_costs, stage_costs

_EXACT = 300  # with at most so many prefixes, all that can be reached are kept
_MAX_PREFIXES = 30000
_ACCURACY = 2e-4  # of the bisection, relative
_ROUNDING = 1e-9
_HEAVY = 0.02  # of a stage: units that cost more become fluid last
_WAITS = (  # most units of the path that a unit off it may wait for, and whether heavy ones may wait longer
    *((wait, True) for wait in (math.inf, 200, 50, 25, 12, 6, 0)),
    (0, False),
)

Bits = NDArray[np.uint64]


@dataclass(frozen=True)
class Lattice:
    """The prefixes of the units `kept`, by number of members; units are numbered as in `units`."""

    kept: tuple[int, ...]  # original units
    units: Units
    masks: tuple[int, ...]  # members of each prefix, a bit for each unit
    words: Bits  # the same, [prefixes, words]
    time: IntArray  # of each prefix, shared items counted once
    static: IntArray
    activation: IntArray
    covers: IntArray  # (prefix, prefix with one unit more), ordered, [pairs, 2]
    items: tuple[int, ...]  # users of each shared item, as bits
    fluid: IntArray  # fluid units: time, static bytes, activation bytes, [3, units]
    released: IntArray  # the same of the fluid that each prefix releases, [3, prefixes]
    due: IntArray
    is_exact: bool  # whether all units are kept and stages without any can be ruled out
    _open: dict[int, list[tuple[int, Bits]]] = field(default_factory=dict)

    def open_items(self, prefix: int) -> list[tuple[int, Bits]]:
        """Items with users on both sides of a prefix, and the users outside."""
        if prefix not in self._open:
            mask, width = self.masks[prefix], self.words.shape[1]
            self._open[prefix] = [
                (k, to_words([users & ~mask], width)[0])
                for k, users in enumerate(self.items)
                if users & mask and users & ~mask
            ]
        return self._open[prefix]

    def least_costs(self, start: int, stop: int, scale: Scale, stage: int, in_flight: int) -> FloatArray:
        """Cost of a stage that runs what prefix p has beyond `start`, for p = start..stop - 1, shared items on both sides left out."""
        rows = slice(start, stop)
        static, activation = self.static[rows] - self.static[start], self.activation[rows] - self.activation[start]
        return scale.cost_on(stage, self.time[rows] - self.time[start], static + in_flight * activation)

    def containing(self, start: int, targets: IntArray) -> IntArray:
        """The prefixes that contain `start`."""
        lacking = np.flatnonzero(self.words[start])  # words that have members
        lacks = (self.words[start, lacking] & ~self.words[targets[:, None], lacking]) != 0
        found: IntArray = targets[~lacks.any(axis=1)]
        return found

    def costs(self, start: int, targets: IntArray, scale: Scale, stage: int, in_flight: int) -> FloatArray:
        """Cost of a stage that runs what each of `targets`, which contain `start`, has beyond it."""
        static, activation = (column[targets] - column[start] for column in (self.static, self.activation))
        for k, users in self.open_items(start) if scale.counts_memory else ():
            used = np.zeros(len(targets), dtype=np.bool_)
            for word in np.flatnonzero(users):
                used |= (self.words[targets, word] & users[word]) != 0
            static = static + used * self.units.shared[k].static_bytes
            activation = activation + used * self.units.shared[k].activation_bytes
        return scale.cost_on(stage, self.time[targets] - self.time[start], static + in_flight * activation)


@dataclass(frozen=True, slots=True)
class PrefixChain:
    """No placement has a smaller bottleneck than `bound`; with fluid units there is one of `possible`: `stages`, if looked for."""

    bound: float
    possible: float
    stages: tuple[int, ...] | None = None  # of each unit of the lattice


def build_lattice(
    units: Units, dag: nx.DiGraph[int], scale: Scale, in_flight: Sequence[int], most: int = _MAX_PREFIXES
) -> Lattice | None:
    """The lattice of the heaviest path and as many other units as go; None if it would have more than `most` prefixes."""
    costs = own_costs(units, scale, max(1, sum(in_flight) // len(in_flight)))
    path = heaviest_path(dag, costs)
    order = list(nx.lexicographical_topological_sort(dag))
    waits = _lattice_waits(dag, order, path)
    heavy = costs > _HEAVY * float(costs.sum()) / len(in_flight)
    choices: list[list[int]] = []
    for wait, keeps_heavy in _WAITS:
        kept = [u for u in order if waits[u] <= wait or (keeps_heavy and heavy[u])]
        if not choices or len(kept) != len(choices[-1]):
            choices.append(kept)
    best, low, high = None, 0, len(choices)
    while low < high:  # the first choice that goes, as if more units always made more prefixes
        middle = (low + high) // 2
        found = _lattice(units, dag, order, choices[middle], most)
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
    return best


def best_chain(lattice: Lattice, scale: Scale, in_flight: Sequence[int], low: float, high: float) -> PrefixChain:
    """Bisect between a proven bound and a bottleneck that is known to be possible (finite)."""
    chains: dict[float, list[int] | None] = {}

    def within(bound: float) -> bool:
        """Looks for a chain unless what is known of other bounds tells: what goes within one goes within all larger ones."""
        if any(chain is not None and known <= bound for known, chain in chains.items()):
            return True
        if any(chain is None and known >= bound for known, chain in chains.items()):
            return False
        chains[bound] = _chain_within(lattice, scale, in_flight, bound)
        return chains[bound] is not None

    middle = high * (1.0 - _ACCURACY / 2)
    if low < high * (1.0 - _ACCURACY) and within(middle):
        within(_last_middle(low, middle))  # often the least that is asked for goes, and nothing between needs a look
    while low < high * (1.0 - _ACCURACY):
        if within(middle):
            high = middle
        else:
            low = middle
        middle = (low + high) / 2
    chain = chains.get(high)
    return PrefixChain(min(low, high), high, None if chain is None else _lattice_stages(lattice, chain))


def _last_middle(low: float, high: float) -> float:
    """The last bound that bisection looks at if every one before was possible."""
    middle = high
    while low < high * (1.0 - _ACCURACY):
        middle = (low + high) / 2
        high = middle
    return middle


def chain_stages(lattice: Lattice, scale: Scale, in_flight: Sequence[int], bound: float) -> tuple[int, ...] | None:
    """The stage of each unit of the lattice, no stage costing more than `bound`; None if that cannot be."""
    chain = _chain_within(lattice, scale, in_flight, bound)
    return None if chain is None else _lattice_stages(lattice, chain)


def _lattice_waits(dag: nx.DiGraph[int], order: Sequence[int], path: Sequence[int]) -> dict[int, float]:
    """How many units of the path run between what a unit depends on and what depends on it; 0 for the path itself."""
    place = {unit: i for i, unit in enumerate(path)}
    ready: dict[int, int] = {}
    needed: dict[int, int] = {}
    for unit in order:
        ready[unit] = place.get(unit, max((ready[other] for other in dag.predecessors(unit)), default=-1))
    for unit in reversed(order):
        needed[unit] = place.get(unit, min((needed[other] for other in dag.successors(unit)), default=len(path)))
    return {unit: 0.0 if unit in place else float(needed[unit] - ready[unit]) for unit in order}


def _lattice(units: Units, dag: nx.DiGraph[int], order: list[int], kept: list[int], most: int) -> Lattice | None:
    subset = units.subset(kept)
    if len(kept) >= most:
        return None
    bit = {unit: 1 << i for i, unit in enumerate(kept)}
    before, after = (
        _reached_in_lattice(dag.predecessors, order, bit),
        _reached_in_lattice(dag.successors, order[::-1], bit),
    )
    ancestors, descendants = [before[u] for u in kept], [after[u] for u in kept]
    walked = prefixes(_order_among(ancestors, descendants, subset), most)
    if walked is None:
        return None
    masks, covers, added = walked
    left_out = sorted(set(order) - set(kept))
    columns = np.asarray((units.time, units.static_bytes, units.activation_bytes), dtype=np.int64)
    fluid = [
        (_last_of(before[u], ancestors), _first_of(after[u], descendants), before[u], after[u], u) for u in left_out
    ]
    return Lattice(
        tuple(kept),
        subset,
        tuple(masks),
        to_words(masks, len(kept) // 64 + 1),
        *_lattice_sums(subset, masks, added),
        np.asarray(covers, dtype=np.int64).reshape(-1, 2),
        tuple(sum(1 << user for user in item.users) for item in subset.shared),
        columns[:, left_out],
        *_lattice_fluid(columns.T, fluid, masks, added, len(kept)),
        len(kept) == len(units) and len(masks) <= _EXACT,
    )


def _lattice_sums(units: Units, masks: list[int], added: list[tuple[int, int]]) -> tuple[IntArray, IntArray, IntArray]:
    """Time, static bytes and activation bytes of each prefix."""
    items = [sum(1 << user for user in item.users) for item in units.shared]
    using = units.items_of()
    columns = list(zip(units.time, units.static_bytes, units.activation_bytes, strict=True))
    rows: list[tuple[int, int, int]] = [(0, 0, 0)]
    for source, unit in added:
        time, static, activation = (a + b for a, b in zip(rows[source], columns[unit], strict=True))
        for k in using[unit]:
            if not items[k] & masks[source]:
                static += units.shared[k].static_bytes
                activation += units.shared[k].activation_bytes
        rows.append((time, static, activation))
    time_of, static_of, activation_of = np.ascontiguousarray(np.asarray(rows, dtype=np.int64).T)
    return time_of, static_of, activation_of


def _lattice_fluid(
    columns: IntArray,
    fluid: list[tuple[list[int], list[int], int, int, int]],
    masks: list[int],
    added: list[tuple[int, int]],
    num_kept: int,
) -> tuple[IntArray, IntArray]:
    """The units released and due at each prefix; `fluid`: last before, first after, all before, all after, unit."""
    released, due = np.zeros((2, len(masks), 3), dtype=np.int64)
    opens: list[list[tuple[int, int]]] = [[] for _ in range(num_kept)]
    closes: list[list[tuple[int, int]]] = [[] for _ in range(num_kept)]
    for last, first, before, after, unit in fluid:
        if not columns[unit].any():
            continue
        if not last:
            released += columns[unit]
        for i in last:
            opens[i].append((before, unit))
        for i in first:
            closes[i].append((after, unit))
    starts = released[0].copy()
    for target, (source, unit) in enumerate(added, 1):
        opened = [other for before, other in opens[unit] if not before & ~masks[target]]
        closed = [other for after, other in closes[unit] if not after & masks[source]]
        released[target] = released[source] + columns[opened].sum(axis=0)
        due[target] = due[source] + columns[closed].sum(axis=0)
    assert (released[0] == starts).all(), "the empty prefix has released what depends on nothing"
    return np.ascontiguousarray(released.T), np.ascontiguousarray(due.T)


def _order_among(ancestors: list[int], descendants: list[int], units: Units) -> list[list[int]]:
    """The units directly before each, twins in order included."""
    using = units.items_of()
    alike: dict[tuple[int, int, int, tuple[int, ...]], list[int]] = {}
    for i, row in enumerate(zip(units.time, units.static_bytes, units.activation_bytes, strict=True)):
        alike.setdefault((*row, tuple(using[i])), []).append(i)

    def rank(
        i: int,
    ) -> tuple[int, int, int]:  # in this order nothing comes before what it depends on, nor a twin before the first
        return ancestors[i].bit_count(), -descendants[i].bit_count(), i

    direct = [_last_of(mask, ancestors) for mask in ancestors]
    for group in alike.values():
        group.sort(key=rank)
        for u, w in itertools.pairwise(group):
            if not ancestors[u] & ~ancestors[w] and not descendants[w] & ~descendants[u]:
                direct[w].append(u)
    closed = [0] * len(units)
    for i in sorted(range(len(units)), key=rank):
        for u in direct[i]:
            closed[i] |= closed[u] | 1 << u
    return [sorted({u for u in found if not any(closed[w] >> u & 1 for w in found)}) for found in direct]


def _reached_in_lattice(
    neighbours: Callable[[int], Iterator[int]], order: list[int], bit: dict[int, int]
) -> dict[int, int]:
    """The units with a bit that are reached from each unit, itself left out."""
    found: dict[int, int] = {}
    for unit in order:
        mask = 0
        for other in neighbours(unit):
            mask |= found[other] | bit.get(other, 0)
        found[unit] = mask
    return found


def _last_of(mask: int, ancestors: list[int]) -> list[int]:
    """The members that no other member depends on."""
    found = []
    while mask:
        unit = mask.bit_length() - 1
        found.append(unit)
        mask &= ~(ancestors[unit] | 1 << unit)
    return found


def _first_of(mask: int, descendants: list[int]) -> list[int]:
    """The members that depend on no other member."""
    found = []
    while mask:
        unit = (mask & -mask).bit_length() - 1
        found.append(unit)
        mask &= ~(descendants[unit] | 1 << unit)
    return found


def prefixes(
    before: list[list[int]], most: int
) -> tuple[list[int], list[tuple[int, int]], list[tuple[int, int]]] | None:
    """All prefixes, the pairs that differ by one unit, and how each prefix was first reached: from which, by what unit."""
    needed = [sum(1 << u for u in found) for found in before]
    after: list[list[int]] = [[] for _ in before]
    for w, found in enumerate(before):
        for u in found:
            after[u].append(w)
    masks, number = [0], {0: 0}
    ready = [[w for w, found in enumerate(before) if not found]]
    covers, added = [], []
    source = 0
    while source < len(masks):
        for unit in ready[source]:
            mask = masks[source] | 1 << unit
            target = number.get(mask)
            if target is None:
                if len(masks) >= most:
                    return None
                target = number[mask] = len(masks)
                masks.append(mask)
                added.append((source, unit))
                ready.append([w for w in ready[source] if w != unit])
                ready[-1] += [w for w in after[unit] if not needed[w] & ~mask]
            covers.append((source, target))
        source += 1
    return masks, covers, added


def _chain_within(lattice: Lattice, scale: Scale, in_flight: Sequence[int], bound: float) -> list[int] | None:
    """The prefix after each stage, no stage costing more than `bound`; None if there is no such chain."""
    size, num_stages = len(lattice.masks), len(in_flight)
    released, due = (_least_cost(amounts, scale, in_flight) for amounts in (lattice.released, lattice.due))
    everything = due.copy()
    everything[-1] = released[-1]  # in the end all fluid is due, whether or not something depends on it
    frontier, done = [0], np.zeros(size)
    came_from: list[IntArray] = []
    for stage in range(num_stages):
        allowed = size - (num_stages - 1 - stage) if lattice.is_exact else size
        needed = (everything if stage == num_stages - 1 else due) * (1.0 - _ROUNDING) - 1e-15
        rate = _lattice_rate(lattice, scale, in_flight, stage)
        window = _lattice_windows(lattice, scale, stage, in_flight[stage], bound)
        reached, parent = np.full(size, -np.inf), np.full(size, -1, dtype=np.int64)
        for prefix in frontier:
            rows = slice(prefix, min(window(prefix), allowed))
            least = lattice.least_costs(prefix, rows.stop, scale, stage, in_flight[stage])
            amount = np.minimum(released[rows], done[prefix] + (bound - least) / rate)
            targets = prefix + np.flatnonzero((least <= bound) & (amount >= needed[rows]) & (amount > reached[rows]))
            if lattice.is_exact and len(targets) and targets[0] == prefix:
                targets = targets[1:]  # the stage would be empty
            targets = lattice.containing(prefix, targets)
            row = lattice.costs(prefix, targets, scale, stage, in_flight[stage])
            amount = np.minimum(released[targets], done[prefix] + (bound - row) / rate)
            better = (row <= bound) & (amount >= needed[targets]) & (amount > reached[targets])
            targets = targets[better]
            reached[targets], parent[targets] = amount[better], prefix
        frontier, done = _lattice_frontier(lattice, reached), reached
        came_from.append(parent)
    if came_from[-1][-1] < 0:
        return None
    chain = [size - 1]
    for parent in reversed(came_from[1:]):
        chain.append(int(parent[chain[-1]]))
    return chain[::-1]


def _least_cost(amounts: IntArray, scale: Scale, in_flight: Sequence[int]) -> FloatArray:
    """Cost of fluid where it costs least."""
    time, static, held = amounts
    return scale.cost(time, static + min(in_flight) * held, scale.fastest)


def _lattice_rate(lattice: Lattice, scale: Scale, in_flight: Sequence[int], stage: int) -> float:
    """The least cost of fluid on this stage, relative to its overall least cost."""
    time, static, held = lattice.fluid
    least = _least_cost(lattice.fluid, scale, in_flight)
    here = scale.cost(time, static + in_flight[stage] * held, scale.speed(stage))
    return float((here[least > 0] / least[least > 0]).min(initial=math.inf)) if (least > 0).any() else 1.0


def _lattice_windows(lattice: Lattice, scale: Scale, stage: int, in_flight: int, bound: float) -> Callable[[int], int]:
    """Where prefixes end that a stage may reach: beyond, all cost more than the bound."""
    sums = scale.cost(lattice.time, lattice.static + in_flight * lattice.activation, scale.speed(stage))
    least = np.minimum.accumulate(sums[::-1])[::-1]
    return lambda prefix: int(np.searchsorted(least, (sums[prefix] + bound) * (1.0 + _ROUNDING), side="right"))


def _lattice_frontier(lattice: Lattice, done: FloatArray) -> list[int]:
    """The reached prefixes that none contains which has as much of the fluid done; all of them for an exact answer."""
    found = np.flatnonzero(done > -np.inf)
    if lattice.is_exact or not len(found):
        return found.tolist()
    low, high = np.searchsorted(lattice.covers[:, 0], (found[0], found[-1] + 1))
    source, target = lattice.covers[low:high].T
    smaller = np.zeros(len(done), dtype=bool)
    smaller[source[(done[target] >= done[source]) & (done[target] > -np.inf)]] = True
    kept: list[int] = []
    for prefix in found[~smaller[found]][::-1].tolist():
        inside = (lattice.words[prefix] & ~lattice.words[kept]) == 0
        if not (inside.all(axis=1) & (done[kept] >= done[prefix])).any():
            kept.append(prefix)
    return kept[::-1]


def _lattice_stages(lattice: Lattice, chain: list[int]) -> tuple[int, ...]:
    stage_of = [0] * len(lattice.kept)
    before = 0
    for stage, prefix in enumerate(chain):
        mask = lattice.masks[prefix] & ~before
        before = lattice.masks[prefix]
        while mask:
            unit = mask.bit_length() - 1
            stage_of[unit] = stage
            mask ^= 1 << unit
    return tuple(stage_of)


def to_words(masks: Sequence[int], num_words: int) -> Bits:
    """Masks as words of 64 bits, [masks, words]."""
    data = b"".join(mask.to_bytes(8 * num_words, "little") for mask in masks)
    return np.frombuffer(data, dtype=np.uint64).reshape(len(masks), num_words)


_LARGER = (0.0, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05)  # bounds that are tried, beyond the smallest one


@dataclass(frozen=True, slots=True)
class Placed:
    """A placement and its largest stage cost."""

    stage_of: tuple[int, ...]  # by unit
    bottleneck: float


def place(
    units: Units, dag: nx.DiGraph[int], scale: Scale, in_flight: Sequence[int], low: float, high: float
) -> Placed | None:
    """A placement with a bottleneck below `high` (finite); None if none is found. `low` is a proven bound."""
    lattice = build_lattice(units, dag, scale, in_flight)
    if lattice is None:
        return None
    smallest = best_chain(lattice, scale, in_flight, low, high)
    best: Placed | None = None
    for larger in _LARGER:
        bound = smallest.possible * (1.0 + larger)
        if bound >= (high if best is None else best.bottleneck):
            break
        stages = smallest.stages if bound == smallest.possible else None
        stages = stages or chain_stages(lattice, scale, in_flight, bound)
        if stages is None:
            continue
        found = _complete_from_lattice(units, dag, lattice, stages, scale, in_flight, bound)
        cost = float(stage_costs(units, scale, in_flight, found).max())
        if cost < (high if best is None else best.bottleneck) and len(set(found)) == len(in_flight):
            best = Placed(found, cost)
    return best


class _Load:
    """The content of a stage so far."""

    def __init__(self, units: Units, using: Sequence[Sequence[int]], scale: Scale, stage: int, in_flight: int) -> None:
        self.units, self.using, self.scale, self.stage, self.in_flight = units, using, scale, stage, in_flight
        self.time = self.memory = 0
        self.items: set[int] = set()

    def after(self, unit: int) -> tuple[int, int]:
        """Time and memory with one unit more."""
        units = self.units
        memory = self.memory + units.static_bytes[unit] + self.in_flight * units.activation_bytes[unit]
        for k in self.using[unit]:
            if k not in self.items:
                memory += units.shared[k].static_bytes + self.in_flight * units.shared[k].activation_bytes
        return self.time + units.time[unit], memory

    def add(self, unit: int) -> None:
        """Run the unit here."""
        self.time, self.memory = self.after(unit)
        self.items.update(self.using[unit])

    def fits(self, unit: int, bound: float) -> bool:
        """Whether the stage stays within the bound."""
        return self.scale.cost_of_one(self.stage, *self.after(unit)) <= bound


def _complete_from_lattice(
    units: Units,
    dag: nx.DiGraph[int],
    lattice: Lattice,
    stages: Sequence[int],
    scale: Scale,
    in_flight: Sequence[int],
    bound: float,
) -> tuple[int, ...]:
    """Stages of all units, given the stages of the lattice's units."""
    using = units.items_of()
    loads = [_Load(units, using, scale, stage, held) for stage, held in enumerate(in_flight)]
    placed = dict(zip(lattice.kept, stages, strict=True))
    for unit, stage in placed.items():
        loads[stage].add(unit)
    order = list(nx.lexicographical_topological_sort(dag))
    earliest: dict[int, int] = {}
    for unit in order:
        earliest[unit] = placed.get(unit, max((earliest[other] for other in dag.predecessors(unit)), default=0))
    place_of = {unit: i for i, unit in enumerate(order)}
    waiting = sorted((u for u in order if u not in placed), key=lambda u: (-earliest[u], -place_of[u]))
    turn = {unit: i for i, unit in enumerate(waiting)}
    lacking = {unit: sum(other in turn for other in dag.successors(unit)) for unit in waiting}
    ready = [turn[unit] for unit in waiting if not lacking[unit]]  # a heap: what depends on these is placed
    for stage in reversed(range(len(in_flight))):
        left = []
        while ready:
            unit = waiting[heapq.heappop(ready)]
            may_run = all(placed[other] >= stage for other in dag.successors(unit))
            if not may_run or not (earliest[unit] == stage or loads[stage].fits(unit, bound)):
                left.append(turn[unit])
                continue
            placed[unit] = stage
            loads[stage].add(unit)
            for other in dag.predecessors(unit):
                if other in turn:
                    lacking[other] -= 1
                    if not lacking[other]:
                        heapq.heappush(ready, turn[other])
        ready = left
    return tuple(placed[unit] for unit in range(len(units)))
