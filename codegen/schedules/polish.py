"""Improves a schedule by moving single actions, one at a time, as long as the time allows.

Terms
    move        an action goes to another place in the order of its rank. Not across actions of the same stage and kind
                (the order of the microbatches stays) nor of the same stage and microbatch (F, B, W stay in order), and
                never so that a rank holds more than it may
    energy      the time of the step plus a small part of the times at which the ranks end: a move that makes one rank
                ready earlier is progress before it makes the step shorter

Simulated annealing: a move that makes things worse is kept with a probability that falls to nothing by the end. The best
schedule that was seen is the result, so it is never worse than the one given. The random numbers come from a fixed seed.

Example: ZB-V on 8 ranks with 16 microbatches and messages that take a tenth of a forward idles 12.4% of the time; after
the 1302 moves that `_WORK` leaves for a schedule of that length, 11.9%.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smpc.codegen.actions import Action, Schedule, peaks, rank_peaks, split_backwards
from smpc.codegen.program import Op
from smpc.codegen.simulate import Costs, Link, simulate
from smpc.errors import ScheduleError
from smpc.partitioner.plan import INPUTS

Key = tuple[Op, int, int]

_SEED = 1
_LENGTHS = (1, 1, 1, 2, 3, 4, 6, 8, 12, 20)
_SHARE_OF_ENDS = 0.02
_WORK = 1_000_000  # actions that all moves together may simulate
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Problem:
    """What is to be ordered, and within which bounds."""

    placement: tuple[int, ...]
    num_microbatches: int
    links: tuple[Link, ...]
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
    moves = min(moves, _WORK // max(1, sum(map(len, orders))))
    warmth = 0.1 * sum(problem.costs.forward) / len(problem.costs.forward)
    energy, makespan = clock.energy(orders)
    best, shortest = schedule, makespan
    for count in range(moves):
        rank = numbers.randrange(len(orders))
        order = orders[rank]
        moved = _move(order, numbers)
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


def _move(order: list[Key], numbers: random.Random) -> list[Key] | None:
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
