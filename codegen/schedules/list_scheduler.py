"""A list scheduler: the best order of actions that it finds for any placement, unequal stages and slow messages.

Terms
    slot        room for the activations of one (stage, microbatch) on a rank, from its F to its W
    policy      what a rank prefers when it could run several actions

Whenever a rank is free it runs one of the actions whose values are there and for which it has a slot. The backward is
always split: others wait for B and F, nobody waits for W, so W comes last unless slots are short. There are three kinds of
policies, and of each kind several, which differ in how long a rank would rather wait for a B or an F that is on its way
than begin a W:

    by kind             B before F or F before B, then the oldest microbatch
    by remaining way    what has the longest way to go, all messages included, to the end of its microbatch; a later
                        microbatch yields a little to an earlier one. Every later stage of a rank has a slot kept for it, so
                        that the first stages cannot fill the rank with what they begin
    by a given order    the order of a start, but each W some places later, or after its B where it has none

Every policy is run, until it falls behind the best one; the best of all these and of the given starts is polished.
So the result is never worse than a start. The same problem has the same result, in any
unit of time, and is searched once.

Deadlock. A rank keeps slots for the oldest microbatch that is not through on it: an F of another one is not begun if the
remaining Fs of the oldest would then lack slots. So the oldest microbatch of all can always continue.

Example: four pieces on each of 8 ranks, 16 microbatches, I = 1.4 F and W = 0.6 F. Interleaved 1F1B, whose backwards are
whole, idles 9.9% of the time; started from it, with no more in flight on a rank, the search idles 6.7%.

`polish` improves a schedule by moving single actions, one at a time, as long as the time allows.

Terms
    move        an action goes to another place in the order of its rank. Not across actions of the same stage and kind
                (the order of the microbatches stays) nor of the same stage and microbatch (F, B, W stay in order), and
                never so that a rank holds more than it may
    energy      the time of the step plus a small part of the times at which the ranks end: a move that makes one rank
                ready earlier is progress before it makes the step shorter

Simulated annealing: a move that makes things worse is kept with a probability that falls to nothing by the end. The best
schedule that was seen is the result, so it is never worse than the one given. The random numbers come from a fixed seed.

Example: ZB-V on 8 ranks with 16 microbatches and messages that take a tenth of a forward idles 12.4% of the time; after
the 1302 moves that `_POLISH_WORK` leaves for a schedule of that length, 11.9%.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from smpc.codegen.program import Action, Op, Schedule, peaks, rank_peaks, split_backwards
from smpc.codegen.simulate import Costs, Transfer, simulate
from smpc.errors import ScheduleError
from smpc.partitioner.graph.plan import INPUTS

MOVES = 8000  # of the polish, at most
_MEMORY = 64  # searches whose results are kept
_WORK = 30_000  # actions that the policies of the remaining way may simulate, all together
_TICKS = 2**24  # of the longest forward or backward
_LAST = 1e12  # above every other rank
_SOON = 1e-9  # what starts within this share of a forward starts now
_NEAR = 0.01  # a policy is given up when its step takes so much longer than the best: `simulate` finds little less


@dataclass(frozen=True, slots=True)
class Policy:
    """A rank's preference: the smallest of `order`, if there is one, or the longest of `ways`, else a B before an F before a W."""

    patience: float = 0.0  # shares of a W that a rank waits for an F or B instead
    late_first: bool = True  # among several F, the latest stage's
    forward_first: bool = False
    order: Mapping[Key, float] = field(default_factory=dict)
    ways: Mapping[tuple[Op, int], float] = field(default_factory=dict)  # seconds to the end of a microbatch
    pace: float = 1.0  # seconds by which a microbatch yields to the one before it
    bias: float = 0.0  # seconds by which F yields to B
    late_weight_first: bool = False  # among several W, the latest stage's, not the oldest microbatch's
    reserve: int = 0  # slots kept for each later stage of the rank
    limits: tuple[int, ...] = ()  # by stage, the most in flight; the problem's own bounds hold besides
    is_safe: bool = False  # takes no slot that the microbatches before may come to need, so every run ends

    def rank(self, key: Key) -> float:
        """The smallest comes first."""
        if self.order:
            return self.order[key]
        op, stage, microbatch = key
        if self.ways:
            if op is Op.WEIGHT:
                return (
                    _LAST - stage + 1e-3 * microbatch if self.late_weight_first else _LAST + microbatch - 1e-3 * stage
                )
            return self.pace * microbatch - self.ways[op, stage] + (self.bias if op is Op.FORWARD else 0.0)
        kind = 3.0 if op is Op.WEIGHT else 1.0 + (op is Op.BACKWARD) * (1 if self.forward_first else -1)
        deeper = -stage if self.late_first or op is not Op.FORWARD else stage
        return kind + 1e-3 * microbatch + 1e-6 * deeper


def search(
    placement: Sequence[int],
    num_microbatches: int,
    links: Sequence[Transfer],
    costs: Costs,
    *,
    starts: Sequence[Schedule] = (),
    in_flight: Sequence[int] | None = None,
    slots: Sequence[int] | None = None,
    moves: int = MOVES,
) -> Schedule:
    """The schedule with the shortest step that was found; at most `in_flight[s]` microbatches in flight on stage s and
    `slots[r]` (stage, microbatch) on rank r.

    Each start within these bounds competes. ScheduleError if a rank has fewer slots than stages.
    """
    placement = tuple(placement)
    unlimited = tuple(placement.count(r) * num_microbatches for r in range(max(placement) + 1))
    problem = Problem(
        placement,
        num_microbatches,
        tuple(links),
        costs,
        (num_microbatches,) * len(placement) if in_flight is None else tuple(in_flight),
        unlimited if slots is None else tuple(slots),
    )
    found = _search_schedule(_in_ticks(problem), tuple(starts), moves)
    return min(filter(problem.allows, (found, *starts)), key=problem.makespan)


def _in_ticks(problem: Problem) -> Problem:
    """The problem with whole numbers as times, so that sums are exact: what is done does not depend on the unit of time, nor
    on which of two equal times is rounded up."""
    costs = problem.costs
    unit = max(*costs.forward, *costs.backward) / _TICKS or 1.0

    def ticks(seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(float(round(x / unit)) for x in seconds)

    def message(num_bytes: int) -> int:
        return round(num_bytes / costs.bandwidth / unit)

    links = tuple(
        replace(link, num_bytes=message(link.num_bytes), gradient_bytes=message(link.gradient_bytes))
        for link in problem.links
    )
    weight = ticks([costs.of(Action(Op.WEIGHT, stage, 0)) for stage in range(len(problem.placement))])
    exact = Costs(ticks(costs.forward), ticks(costs.backward), ticks([costs.latency])[0], 1.0, weight)
    return replace(problem, links=links, costs=exact)


@functools.lru_cache(maxsize=_MEMORY)
def _search_schedule(problem: Problem, starts: tuple[Schedule, ...], moves: int) -> Schedule:
    """The schedule with the shortest makespan that policies and moves find."""
    found = [(problem.makespan(start), start) for start in starts if problem.allows(start)]
    policies = [
        Policy(patience, late, first)
        for patience in (0.0, 0.35, 0.7, 1.0)
        for late in (True, False)
        for first in (False, True)
    ]
    policies += [
        Policy(patience, order=_searched_order(start, lag))
        for start in starts
        for lag in (0, 2, 4, 8, 16)
        for patience in (0.0, 0.35, 0.7)
    ]
    actions = 3 * len(problem.placement) * problem.num_microbatches
    policies += itertools.islice(_by_remaining_way(problem), _WORK // actions)
    for policy in policies:
        shortest = min((seconds for seconds, _ in found), default=math.inf)
        schedule = _PolicyRun(problem, policy).run(shortest * (1.0 + _NEAR))
        if schedule is not None:
            found.append((problem.makespan(schedule), schedule))
    if not found:
        schedule = _PolicyRun(problem, Policy(is_safe=True)).run()
        assert schedule is not None, "a safe run ends"
        found.append((problem.makespan(schedule), schedule))
    best = min(found, key=lambda entry: entry[0])[1]
    return polish(problem, best, moves) if moves else best


def with_late_weights(
    schedule: Schedule,
    placement: Sequence[int],
    links: Sequence[Transfer],
    costs: Costs,
    lag: int,
    slots: Sequence[int],
) -> Schedule:
    """A schedule whose ranks take their F and B in the given order, as far as these are there, and each W `lag` places
    later than given, or when there is nothing else to do or no slot; ScheduleError as `search`."""
    num_microbatches = 1 + max(action.microbatch for actions in schedule for action in actions)
    in_flight = (num_microbatches,) * len(placement)
    problem = Problem(tuple(placement), num_microbatches, tuple(links), costs, in_flight, tuple(slots))
    found = _PolicyRun(problem, Policy(order=_searched_order(schedule, lag))).run()
    assert found is not None, "without a limit and reserved slots every run ends"
    return found


def _by_remaining_way(problem: Problem) -> Iterator[Policy]:
    """Policies that look ahead, the most often best ones first."""
    ways = _searched_ways(problem)
    unit = sum(problem.costs.forward) / len(problem.slots)  # a forward of all stages of a rank
    limits = [_searched_shares(problem, ways, extra) for extra in (1, problem.num_microbatches)]
    grid = itertools.product((0.8, 1.2), (0.5, 0.0, 1.0), (0.2, 0.6), limits, (False, True))
    for pace, bias, patience, limit, late_weight_first in grid:
        yield Policy(
            patience,
            ways=ways,
            pace=pace * unit,
            bias=bias * unit,
            late_weight_first=late_weight_first,
            reserve=1,
            limits=limit,
        )


def _searched_shares(problem: Problem, ways: Mapping[tuple[Op, int], float], extra: int) -> tuple[int, ...]:
    """The slots of each rank, shared among its stages by how long each holds one, and some more."""
    totals = [0.0] * len(problem.slots)
    held = [ways[Op.FORWARD, stage] - ways[Op.BACKWARD, stage] for stage in range(len(problem.placement))]  # F to B
    for stage, rank in enumerate(problem.placement):
        totals[rank] += held[stage]
    return tuple(
        min(
            problem.num_microbatches,
            math.ceil(problem.slots[rank] * held[stage] / (totals[rank] or 1.0) - _SOON) + extra,
        )
        for stage, rank in enumerate(problem.placement)
    )


def _searched_ways(problem: Problem) -> dict[tuple[Op, int], float]:
    """Seconds from the start of a stage's F or B to the end of the last B of its microbatch, if nothing is in the way."""
    placement, costs = problem.placement, problem.costs
    ways: dict[tuple[Op, int], float] = {}
    links = [link for link in problem.links if link.source != INPUTS]

    def hop(link: Transfer, num_bytes: int) -> float:
        near = placement[link.source] == placement[link.destination]
        return 0.0 if near else num_bytes / costs.bandwidth + costs.latency

    for stage in range(len(placement)):  # a link leads to a later stage
        after = [
            hop(link, link.gradient_bytes) + ways[Op.BACKWARD, link.source]
            for link in links
            if link.destination == stage and link.has_gradient
        ]
        ways[Op.BACKWARD, stage] = costs.of(Action(Op.BACKWARD, stage, 0), is_split=True) + max(after, default=0.0)
    for stage in reversed(range(len(placement))):
        after = [
            hop(link, link.num_bytes) + ways[Op.FORWARD, link.destination] for link in links if link.source == stage
        ]
        ways[Op.FORWARD, stage] = costs.forward[stage] + max(ways[Op.BACKWARD, stage], *after, 0.0)
    return ways


def _searched_order(schedule: Schedule, lag: int = 0) -> dict[Key, float]:
    """The position of every action on its rank, with W `lag` further back; a missing W is placed after its B."""
    order: dict[Key, float] = {}
    for actions in schedule:
        for position, action in enumerate(actions):
            is_weight = action.op is Op.WEIGHT
            order[action.op, action.stage, action.microbatch] = float(position + lag * is_weight)
            if action.op is Op.BACKWARD:
                order[Op.WEIGHT, action.stage, action.microbatch] = position + lag + 0.5
    return order


class _PolicyRun:
    """One policy on one problem. Ranks decide in order of time, knowing what is on its way to them."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        self.problem, self.policy = problem, policy
        m, costs = problem.num_microbatches, problem.costs
        stages = range(len(problem.placement))
        num_ranks = len(problem.slots)
        self.stages_of = [[s for s in stages if problem.placement[s] == rank] for rank in range(num_ranks)]
        self.incoming = [[x for x in problem.links if x.destination == s and x.source != INPUTS] for s in stages]
        self.outgoing = [[x for x in problem.links if x.source == s] for s in stages]
        self.missing = {}
        for s in stages:
            returning = sum(link.has_gradient for link in self.outgoing[s])
            for i in range(m):
                self.missing[Op.FORWARD, s, i] = len(self.incoming[s])
                self.missing[Op.BACKWARD, s, i] = 1 + returning
                self.missing[Op.WEIGHT, s, i] = 1
        self.ready = dict.fromkeys(self.missing, 0.0)
        ops = (Op.FORWARD, Op.BACKWARD, Op.WEIGHT)
        self.seconds = {(op, s): costs.of(Action(op, s, 0), is_split=True) for op in ops for s in stages}
        self.next = {(op, s): 0 for op in ops for s in stages}
        self.soon = _SOON * max(costs.forward)
        self.free = [0.0] * num_ranks
        self.left = [m * sum(self.seconds[op, s] for op in ops for s in own) for own in self.stages_of]
        self.held = [0] * num_ranks
        self.orders: list[list[Action]] = [[] for _ in range(num_ranks)]
        self.wake = [(0.0, rank) for rank in range(num_ranks)]

    def run(self, limit: float = math.inf) -> Schedule | None:
        """The orders of the ranks; None if the step takes longer than `limit`, or if a rank had no slot for the oldest
        microbatch, so that all wait."""
        while self.wake:
            now, rank = heapq.heappop(self.wake)
            while self.wake and self.wake[0] == (now, rank):
                heapq.heappop(self.wake)
            if self.free[rank] <= now:
                key = self.choose(rank, now)
                if key is not None:
                    self.commit(rank, key, now)
                    if self.free[rank] + self.left[rank] > limit:
                        return None
        total = 3 * len(self.problem.placement) * self.problem.num_microbatches
        if sum(map(len, self.orders)) < total:
            return None
        return tuple(tuple(order) for order in self.orders)

    def choose(self, rank: int, now: float) -> Key | None:
        """The action that the rank starts now; None: it waits."""
        best: Key | None = None
        lowest, soonest = 0.0, float("inf")
        for stage in self.stages_of[rank]:
            for op in (Op.FORWARD, Op.BACKWARD, Op.WEIGHT):
                key = (op, stage, self.next[op, stage])
                if key[2] == self.problem.num_microbatches or self.missing[key]:
                    continue
                if op is Op.FORWARD and not self.admits(rank, stage, key[2]):
                    continue
                if self.ready[key] > now + self.soon:
                    soonest = min(soonest, self.ready[key]) if op is not Op.WEIGHT else soonest
                elif best is None or self.policy.rank(key) < lowest:
                    best, lowest = key, self.policy.rank(key)
        if best is None or best[0] is not Op.WEIGHT or self.held[rank] == self.problem.slots[rank]:
            return best
        waits = soonest < now + self.policy.patience * self.seconds[Op.WEIGHT, best[1]]
        return None if waits else best

    def admits(self, rank: int, stage: int, microbatch: int) -> bool:
        """Whether there is a slot for a forward, and enough others for the oldest microbatch of the rank."""
        problem = self.problem
        if microbatch - self.next[Op.WEIGHT, stage] >= problem.in_flight[stage]:
            return False
        if self.policy.reserve:
            if microbatch - self.next[Op.WEIGHT, stage] >= self.policy.limits[stage]:
                return False
            unfinished = (
                self.next[Op.FORWARD, s] < problem.num_microbatches for s in self.stages_of[rank] if s > stage
            )
            return self.held[rank] + 1 + self.policy.reserve * sum(unfinished) <= problem.slots[rank]
        if self.policy.is_safe:
            return self.is_safe(rank, stage, microbatch)
        oldest = min(self.next[Op.WEIGHT, s] for s in self.stages_of[rank])
        needed = sum(self.next[Op.FORWARD, s] <= oldest for s in self.stages_of[rank])
        own = microbatch == oldest
        return self.held[rank] + 1 + needed - own <= problem.slots[rank]

    def is_safe(self, rank: int, stage: int, microbatch: int) -> bool:
        """Whether, after this forward, every microbatch can have a slot for each of its forwards to come, one after the other
        (the banker's algorithm): the oldest with what is free, the next also with what the oldest gives back."""
        free = self.problem.slots[rank] - self.held[rank] - 1
        oldest = min(self.next[Op.WEIGHT, s] for s in self.stages_of[rank])
        for other in range(oldest, microbatch + 1):
            begun = sum(
                self.next[Op.FORWARD, s] > other or (s, other) == (stage, microbatch) for s in self.stages_of[rank]
            )
            ended = sum(self.next[Op.WEIGHT, s] > other for s in self.stages_of[rank])
            if free < len(self.stages_of[rank]) - begun:
                return False
            free += begun - ended
        return True

    def commit(self, rank: int, key: Key, now: float) -> None:
        """Run an action and tell those that wait for it."""
        op, stage, microbatch = key
        end = now + self.seconds[op, stage]
        self.left[rank] -= self.seconds[op, stage]
        self.orders[rank].append(Action(op, stage, microbatch))
        self.next[op, stage] += 1
        self.free[rank] = end
        heapq.heappush(self.wake, (end, rank))
        if op is Op.WEIGHT:
            self.held[rank] -= 1
        elif op is Op.FORWARD:
            self.held[rank] += 1
            self.arrive((Op.BACKWARD, stage, microbatch), end)
            for link in self.outgoing[stage]:
                self.send((op, link.destination, microbatch), rank, end, link.num_bytes)
        else:
            self.arrive((Op.WEIGHT, stage, microbatch), end)
            for link in self.incoming[stage]:
                if link.has_gradient:
                    self.send((op, link.source, microbatch), rank, end, link.gradient_bytes)

    def send(self, key: Key, source: int, time: float, num_bytes: int) -> None:
        """A message that the action `key` waits for."""
        rank, costs = self.problem.placement[key[1]], self.problem.costs
        self.arrive(key, time if rank == source else time + num_bytes / costs.bandwidth + costs.latency)

    def arrive(self, key: Key, time: float) -> None:
        """Notes that an input of the action `key` arrives at that time."""
        self.missing[key] -= 1
        self.ready[key] = max(self.ready[key], time)
        if not self.missing[key]:
            heapq.heappush(self.wake, (self.ready[key], self.problem.placement[key[1]]))


Key = tuple[Op, int, int]

_SEED = 1
_LENGTHS = (1, 1, 1, 2, 3, 4, 6, 8, 12, 20)
_SHARE_OF_ENDS = 0.02
_POLISH_WORK = 1_000_000  # actions that all moves together may simulate
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Problem:
    """The actions to order, and their bounds."""

    placement: tuple[int, ...]
    num_microbatches: int
    links: tuple[Transfer, ...]
    costs: Costs
    in_flight: tuple[int, ...]  # by stage
    slots: tuple[int, ...]  # by rank

    def __post_init__(self) -> None:
        for rank, slots in enumerate(self.slots):
            held = self.placement.count(rank)
            if slots < held or any(self.in_flight[s] < 1 for s, r in enumerate(self.placement) if r == rank):
                raise ScheduleError(
                    f"expected slots for each of the {held} stages of rank {rank}, found {slots}; allow more in flight"
                )

    def makespan(self, schedule: Schedule) -> float:
        """Seconds that a step takes."""
        return simulate(schedule, self.links, self.costs).makespan

    def holds(self, rank: int, order: Sequence[Key], split: frozenset[tuple[int, int]]) -> bool:
        """Whether an order of a rank stays within the bounds."""
        held = 0
        by_stage = dict.fromkeys((stage for _, stage, _ in order), 0)
        for op, stage, microbatch in order:
            if op is Op.FORWARD:
                held += 1
                by_stage[stage] += 1
                if held > self.slots[rank] or by_stage[stage] > self.in_flight[stage]:
                    return False
            elif op is Op.WEIGHT or (stage, microbatch) not in split:
                held -= 1
                by_stage[stage] -= 1
        return True

    def allows(self, schedule: Schedule) -> bool:
        """Whether a schedule stays within the bounds."""
        held, slots = peaks(schedule, len(self.placement)), rank_peaks(schedule)
        return all(a <= b for a, b in zip((*held, *slots), (*self.in_flight, *self.slots), strict=True))


def polish(problem: Problem, schedule: Schedule, moves: int) -> Schedule:
    """A schedule within the same bounds whose step is not longer. Fewer moves are made if the schedule is very long."""
    numbers = random.Random(_SEED)
    orders = [[(a.op, a.stage, a.microbatch) for a in actions] for actions in schedule]
    clock = _Clock(problem, schedule)
    moves = min(moves, _POLISH_WORK // max(1, sum(map(len, orders))))
    warmth = 0.1 * sum(problem.costs.forward) / len(problem.costs.forward)
    energy, makespan = clock.energy(orders)
    best, shortest = schedule, makespan
    for count in range(moves):
        rank = numbers.randrange(len(orders))
        order = orders[rank]
        moved = _moved_action(order, numbers)
        if moved is None or not problem.holds(rank, moved, clock.split):
            continue
        orders[rank] = moved
        found = clock.energy(orders)
        temperature = warmth * (1.0 - count / moves) ** 2
        if found[0] - energy > -temperature * math.log(1.0 - numbers.random()) + _TOLERANCE:
            orders[rank] = order
            continue
        energy, makespan = found
        if makespan < shortest - _TOLERANCE:
            best, shortest = tuple(tuple(Action(*key) for key in order) for order in orders), makespan
    return best if problem.makespan(best) <= problem.makespan(schedule) else schedule


def _moved_action(order: list[Key], numbers: random.Random) -> list[Key] | None:
    """The order with one action elsewhere; None where that is no move."""
    if not order:
        return None
    source = numbers.randrange(len(order))
    target = source + numbers.choice((-1, 1)) * numbers.choice(_LENGTHS)
    target = min(max(0, target), len(order) - 1)
    op, stage, microbatch = order[source]
    passed = order[target:source] if target < source else order[source + 1 : target + 1]
    if not passed or any(s == stage and (o is op or m == microbatch) for o, s, m in passed):
        return None
    moved = order[:source] + order[source + 1 :]
    moved.insert(target, order[source])
    return moved


class _Clock:
    """When a step with given orders ends, like `simulate` but for wires that are shared, and much faster."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        costs, placement = problem.costs, problem.placement
        self.split = split_backwards(action for actions in schedule for action in actions)
        self.seconds: Mapping[Key, float] = {
            (a.op, a.stage, a.microbatch): costs.of(a, (a.stage, a.microbatch) in self.split)
            for actions in schedule
            for a in actions
        }
        self.sources: dict[tuple[Op, int], list[tuple[Op, int, float]]] = {}
        for stage in range(len(placement)):
            self.sources[Op.FORWARD, stage] = []
            self.sources[Op.BACKWARD, stage] = [(Op.FORWARD, stage, 0.0)]
            self.sources[Op.WEIGHT, stage] = [(Op.BACKWARD, stage, 0.0)]
        for link in problem.links:
            if link.source == INPUTS:
                continue
            near = placement[link.source] == placement[link.destination]
            ahead, back = (
                0.0 if near else num_bytes / costs.bandwidth + costs.latency
                for num_bytes in (link.num_bytes, link.gradient_bytes)
            )
            self.sources[Op.FORWARD, link.destination].append((Op.FORWARD, link.source, ahead))
            if link.has_gradient:
                self.sources[Op.BACKWARD, link.source].append((Op.BACKWARD, link.destination, back))

    def energy(self, orders: list[list[Key]]) -> tuple[float, float]:
        """(energy, makespan); infinite if the orders wait for each other in a circle."""
        position, free = [0] * len(orders), [0.0] * len(orders)
        done: dict[Key, float] = {}
        waiting: dict[Key, list[int]] = {}
        runnable = list(range(len(orders)))
        while runnable:
            rank = runnable.pop()
            order, index, time = orders[rank], position[rank], free[rank]
            while index < len(order):
                key = order[index]
                op, stage, microbatch = key
                start = time
                for source_op, source, delay in self.sources[op, stage]:
                    needed = (source_op, source, microbatch)
                    end = done.get(needed)
                    if end is None:
                        waiting.setdefault(needed, []).append(rank)
                        break
                    start = max(start, end + delay)
                else:
                    time = done[key] = start + self.seconds[key]
                    index += 1
                    runnable.extend(waiting.pop(key, ()))
                    continue
                break
            position[rank], free[rank] = index, time
        if any(index < len(order) for index, order in zip(position, orders, strict=True)):
            return math.inf, math.inf
        makespan = max(free, default=0.0)
        return makespan + _SHARE_OF_ENDS * sum(free), makespan
