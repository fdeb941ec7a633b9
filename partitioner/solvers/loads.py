"""Loads of devices with transfers: the one definition that `staged`, `moves` and `load_program` share.

    load of a device = its units' costs on it + rate * (bytes that it sends + bytes that it receives)

A unit's output is sent once, if another device uses it, and received once by each other device that uses it. Devices of one kind are
alike: a unit costs the same on each of them, and so does a byte.

Example: units 0 -> 1 -> 2 with costs of 2, each of which sends one byte at a rate of 1. On two devices {0} {1 2} has the loads 2 + 1 and
1 + 4; {0 1} {2} has 4 + 1 and 1 + 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np

from smpc.partitioner.problem import FloatArray, IntArray
from smpc.partitioner.solvers.ilp import Value

ROUNDING = 1e-9  # what floating point arithmetic may add to a load, relative
_ROUNDS, _STEPS = (
    3,
    60,
)  # of the search for weights of kinds, and of that of two of them: a third of what is left goes with each


@dataclass(frozen=True)
class LoadProblem:
    """Units, devices by kind, and the objective. Costs are in any one unit; `kind_of` has the kind of each device, in their row."""

    costs: FloatArray  # [kinds, units]; infinite: a unit cannot run there
    memory: IntArray  # [kinds, units]
    limits: tuple[int, ...]  # most memory, by kind
    rates: tuple[float, ...]  # cost of a byte sent or received, by kind
    kind_of: tuple[int, ...]
    order: nx.DiGraph[int]
    values: tuple[Value, ...]
    in_row: bool = True  # stages lie on the devices in the order given, not in any
    may_idle: bool = False  # devices may have no stage

    def __post_init__(self) -> None:
        if {*self.kind_of} != {*range(len(self.costs))}:
            raise ValueError(
                f"expected a device of each of {len(self.costs)} kinds, found devices of kinds {sorted({*self.kind_of})}"
            )

    @property
    def num_devices(self) -> int:
        """Devices in all."""
        return len(self.kind_of)

    @property
    def num_units(self) -> int:
        """Units are numbered from 0."""
        return int(self.costs.shape[1])

    def loads(self, device_of: Sequence[int]) -> FloatArray:
        """The cost of each device with its units and its transfers; infinite beyond its limit, and where a unit cannot run."""
        loads, held = np.zeros(len(self.kind_of)), [0] * len(self.kind_of)
        for unit, device in enumerate(device_of):
            loads[device] += self.costs[self.kind_of[device], unit]
            held[device] += int(self.memory[self.kind_of[device], unit])
        for value in self.values:
            home = device_of[value.producer]
            others = {device_of[user] for user in value.consumers} - {home}
            for device in (home, *others) if others else ():
                loads[device] += value.num_bytes * self.rates[self.kind_of[device]]
        over = [total > self.limits[kind] for total, kind in zip(held, self.kind_of, strict=True)]
        return np.where(over, np.inf, loads)

    def bottleneck(self, device_of: Sequence[int]) -> float:
        """The largest load."""
        return float(self.loads(device_of).max())


def simple_bound(problem: LoadProblem) -> float:
    """Work divided among all devices as one likes, and the heaviest unit."""
    heaviest = problem.costs.min(axis=0).max(initial=0.0)
    return float(max(heaviest, divided(problem)[0])) * (1.0 - ROUNDING)


def divided(problem: LoadProblem) -> tuple[float, FloatArray]:
    """The least load of units that may be cut in pieces, and the weights of the kinds of devices, by kind, that prove it.

    Weights that add up to one over all devices make the largest load at least the sum of all loads times their weights, and that is at
    least what the units cost where they cost least by then. The sum is concave in the weights: those of two kinds at a time are improved.
    """
    number = np.bincount(problem.kind_of, minlength=len(problem.costs)).astype(float)
    share = number / number.sum()  # of all weight, by kind

    def least(share: FloatArray) -> float:
        weights = np.where(np.isfinite(problem.costs), share[:, None] / number[:, None], np.inf)
        return float(np.min(weights * np.where(np.isfinite(problem.costs), problem.costs, 1.0), axis=0).sum())

    def moved(k: int, other: int, part: float) -> FloatArray:
        found: FloatArray = share.copy()
        both = share[k] + share[other]
        found[k], found[other] = part * both, (1.0 - part) * both
        return found

    for k, other in [*itertools.combinations(range(len(number)), 2)] * (_ROUNDS if len(number) > 2 else 1):
        low, high = 0.0, 1.0
        for _ in range(_STEPS):
            a, b = low + (high - low) / 3, high - (high - low) / 3
            low, high = (low, b) if least(moved(k, other, a)) >= least(moved(k, other, b)) else (a, high)
        share = max(share, moved(k, other, (low + high) / 2), key=least)
    return least(share), share / number
