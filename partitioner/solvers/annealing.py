"""Better placements by moving one unit at a time: simulated annealing, the same for the same problem.

It minimises the sum of (load / best known load)^8 over the devices, which the largest load dominates, plus memory beyond the devices'
limits. Half of the moves take a unit from the most loaded device, and half go where a neighbour is, so that transfers end. With a row
of devices, no unit moves past what it comes after or before.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np

from smpc.partitioner.solvers.loads import LoadProblem

_STEPS_PER_UNIT = 1500
_MAX_STEPS = 300_000
_POWER = 8
_WARM, _COLD = 0.3, 1e-4  # temperatures, in terms of the sum that is made small
_TOO_MUCH = 10.0  # what it costs to hold as much again as the limit


def improve_by_moves(problem: LoadProblem, start: Sequence[int], row: Sequence[int] | None = None) -> tuple[int, ...]:
    """The best placement met, no worse than `start`. `row`: devices in an order that the problem's order of units keeps; None: any."""
    state = _State(problem, start, row)
    drawn = random.Random(0)
    steps = min(_MAX_STEPS, _STEPS_PER_UNIT * problem.num_units)
    best, lowest = tuple(start), problem.bottleneck(start)
    for step in range(steps):
        temperature = _WARM * (_COLD / _WARM) ** (step / steps)
        move = state.draw(drawn)
        if move is None:
            continue
        change = state.change(*move)
        if change is None:
            continue
        worse = state.energy(change[0], change[1]) - state.energy(state.loads, state.held)
        if worse <= 0 or drawn.random() < math.exp(-worse / temperature):
            state.move(*move, *change)
            if max(state.loads) < lowest * (1.0 - 1e-12) and state.is_within():
                best, lowest = tuple(state.device_of), max(state.loads)
    return best if problem.bottleneck(best) <= problem.bottleneck(start) else tuple(start)


class _State:
    """A placement, the loads of its devices, and updates for a move."""

    def __init__(self, problem: LoadProblem, start: Sequence[int], row: Sequence[int] | None) -> None:
        self.problem, self.device_of = problem, list(start)
        devices = range(problem.num_devices)
        self.costs = [problem.costs[kind].tolist() for kind in problem.kind_of]
        self.memory = [problem.memory[kind].tolist() for kind in problem.kind_of]
        self.limits = [problem.limits[kind] for kind in problem.kind_of]
        self.rates = [problem.rates[kind] for kind in problem.kind_of]
        self.number = [self.device_of.count(device) for device in devices]
        self.place = None if row is None else {device: i for i, device in enumerate(row)}
        self.row = list(devices if row is None else row)
        self.before = [list(problem.order.predecessors(unit)) for unit in range(problem.num_units)]
        self.after = [list(problem.order.successors(unit)) for unit in range(problem.num_units)]
        self.values = [(value.producer, value.consumers, value.num_bytes) for value in problem.values]
        self.touched: list[list[int]] = [[] for _ in range(problem.num_units)]
        neighbours: list[set[int]] = [set() for _ in range(problem.num_units)]
        for v, (producer, consumers, _) in enumerate(self.values):
            for unit in (producer, *consumers):
                self.touched[unit].append(v)
            neighbours[producer].update(consumers)
            for unit in consumers:
                neighbours[unit].add(producer)
        self.neighbours = [sorted(found) for found in neighbours]
        self.loads = np.where(np.isfinite(found := problem.loads(start)), found, 0.0).tolist()
        self.held = [0] * problem.num_devices
        for unit, device in enumerate(start):
            self.held[device] += self.memory[device][unit]
        if not all(np.isfinite(found)):  # over a limit: loads as they are without one
            self.loads = [0.0] * problem.num_devices
            for unit, device in enumerate(start):
                self.loads[device] += self.costs[device][unit]
            for v in range(len(self.values)):
                for device in self._payers(v):
                    self.loads[device] += self.values[v][2] * self.rates[device]
        self.reference = max(self.loads) or 1.0

    def draw(self, drawn: random.Random) -> tuple[int, int] | None:
        """A unit and where to move it; None if that may not be."""
        unit = drawn.randrange(len(self.device_of))
        if drawn.random() < 0.5:
            worst = max(range(len(self.loads)), key=self.loads.__getitem__)
            for _ in range(8):
                if self.device_of[unit] == worst:
                    break
                unit = drawn.randrange(len(self.device_of))
        near = self.neighbours[unit]
        target = self.row[drawn.randrange(len(self.row))]
        if near and drawn.random() < 0.5:
            target = self.device_of[near[drawn.randrange(len(near))]]
        here = self.device_of[unit]
        if target == here or math.isinf(self.costs[target][unit]):
            return None
        if self.number[here] == 1 and not self.problem.may_idle:
            return None
        return (unit, target) if self._keeps_order(unit, target) else None

    def _keeps_order(self, unit: int, target: int) -> bool:
        place = self.place
        if place is None:
            return True
        at = place[target]
        first = all(place[self.device_of[other]] <= at for other in self.before[unit])
        return first and all(place[self.device_of[other]] >= at for other in self.after[unit])

    def change(self, unit: int, target: int) -> tuple[list[float], list[int]] | None:
        """Loads and memory after a move."""
        here = self.device_of[unit]
        loads, held = self.loads.copy(), self.held.copy()
        loads[here] -= self.costs[here][unit]
        loads[target] += self.costs[target][unit]
        held[here] -= self.memory[here][unit]
        held[target] += self.memory[target][unit]
        before = [self._payers(v) for v in self.touched[unit]]
        self.device_of[unit] = target
        for v, paid in zip(self.touched[unit], before, strict=True):
            pays, num_bytes = self._payers(v), self.values[v][2]
            for device in paid - pays:
                loads[device] -= num_bytes * self.rates[device]
            for device in pays - paid:
                loads[device] += num_bytes * self.rates[device]
        self.device_of[unit] = here
        return loads, held

    def move(self, unit: int, target: int, loads: list[float], held: list[int]) -> None:
        """Make a move whose change is known."""
        self.number[self.device_of[unit]] -= 1
        self.number[target] += 1
        self.device_of[unit], self.loads, self.held = target, loads, held

    def energy(self, loads: list[float], held: list[int]) -> float:
        """The minimised value."""
        total = sum((load / self.reference) ** _POWER for load in loads)
        for amount, limit in zip(held, self.limits, strict=True):
            if amount > limit:
                total += _TOO_MUCH * (amount - limit) / max(1, limit)
        return total

    def is_within(self) -> bool:
        """Whether no device holds more than it may."""
        return all(amount <= limit for amount, limit in zip(self.held, self.limits, strict=True))

    def _payers(self, v: int) -> set[int]:
        """The devices that send or receive a value."""
        producer, consumers, _ = self.values[v]
        found = {self.device_of[user] for user in consumers}
        found.add(self.device_of[producer])
        return found if len(found) > 1 else set()
