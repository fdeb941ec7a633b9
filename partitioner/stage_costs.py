"""The cost of a stage: the one definition that every solver, bound and report uses.

Terms
    unit        something that is placed whole: a node, or nodes that must stay together
    shared item bytes that several units need but a stage holds once: a parameter used twice, an activation that two
                nodes save
    in flight   microbatches whose activations a stage holds at the peak of the schedule

Of a stage s with a set U of units, with w the memory weight,

    memory(s) = sum of static_bytes in U + static bytes of the shared items used in U
              + in_flight[s] * (sum of activation_bytes in U + activation bytes of the shared items used in U)
    cost(s)   = (1 - w) * time(U) / speed[s] / total_time + w * memory(s) / total_memory

where speed[s] is the speed of the device that runs s, 1 if all are alike, and memory(s) may not exceed the device's limit, if
it has one: such a stage costs infinitely much.

Times and bytes are whole numbers, so sums do not depend on their order and equal stages cost exactly the same.

Example: units of time (3, 1), static bytes (10, 0) and one shared item of 20 bytes used by both; w = 0.5, totals 4
and 30. Both units on one stage cost 0.5 * 4 / 4 + 0.5 * 30 / 30 = 1; apart they cost 0.5 * 3 / 4 + 0.5 * 30 / 30 =
0.875 and 0.5 * 1 / 4 + 0.5 * 20 / 30 = 0.458.

`whole_times`, `check_total`: whole numbers stay exact. Every sum of the solvers is below 2^63, or it is an error. Solvers work on times
and bytes as 64-bit whole numbers, whose sums do not depend on their order. NumPy says nothing where such a sum overflows, so every total
is formed in Python's integers first, which do not.

    times   whole femtoseconds, if all of a model's together are less than 2^63 of them (2.56 hours); else the first of pico-, nano-,
            micro-, milliseconds and seconds in which they are. The unit depends on the sum alone. Times that need a larger unit
            are hours in all, so a picosecond more or less changes nothing
    bytes   never scaled: more than 2^63 of them (8 EiB) at once are an error, which says of what there are so many
    others  numbers that need not be whole, of instances without a model, become whole ones in proportion: `in_proportion`

Costs are fractions of the totals, in double precision: dividing a whole number by a total is monotone, so of two stages the one with
more never costs less, and equal ones cost the same, however large they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from smpc.errors import PartitionError

LARGEST = 2**63 - 1
_ROOM = 2**61  # for sums of numbers that need not be whole, with a margin for rounding up
UNITS_PER_SECOND = (1e15, 1e12, 1e9, 1e6, 1e3, 1.0)


def whole_times(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Times in whole numbers of one unit: see the module docstring. PartitionError for times that are no numbers or too long."""
    if not np.isfinite(seconds).all() or (seconds < 0).any():
        wrong = seconds[~(np.isfinite(seconds) & (seconds >= 0))][0]
        raise PartitionError(
            f"expected times of operations that are finite and not negative, found {wrong} seconds: check the FLOP/s and bandwidths "
            "of the device, and times that were measured"
        )
    for per_second in UNITS_PER_SECOND:
        with np.errstate(over="ignore"):
            rounded = np.rint(seconds * per_second)
        if (rounded < 2.0**63).all():
            whole = rounded.astype(np.int64)
            if sum(whole.tolist()) <= LARGEST:
                return whole
    raise PartitionError(
        f"expected operations that take less than {LARGEST:.3g} seconds in all, found {float(seconds.sum()):.3g}: check the FLOP/s and "
        "bandwidths of the device"
    )


def check_total(
    total: int, what: str, hint: str = "make microbatches smaller, or have fewer of them in flight"
) -> None:
    """PartitionError if whole numbers with this sum cannot be added up exactly; `what` says what they are."""
    if total > LARGEST:
        raise PartitionError(f"expected less than 2^63 {what}, found {float(total):.3g}: {hint}")


def in_proportion(values: Sequence[float], multiplier: int = 1) -> tuple[list[int], Fraction]:
    """Whole numbers in proportion to `values`, and the proportion.

    The proportion is the least power of two that makes all whole: every double is a fraction with such a denominator. Where
    `multiplier` times the sum would not fit, it is the largest that does, and values are rounded up.
    """
    exact = [Fraction(value) for value in values]
    room = Fraction(_ROOM) / (multiplier * (sum(exact) or 1))
    wanted = max((value.denominator for value in exact), default=1)
    power = room.numerator.bit_length() - room.denominator.bit_length()
    power -= Fraction(2) ** power > room
    factor = min(Fraction(wanted), Fraction(2) ** power)
    return [math.ceil(value * factor) for value in exact], factor


IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

_COLUMNS = ("units of time", "bytes of state", "bytes of activations of one microbatch")


@dataclass(frozen=True, slots=True)
class SharedItem:
    """Bytes that each stage holds once, however many of the `users` (unit indices) it runs."""

    users: tuple[int, ...]
    static_bytes: int = 0
    activation_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Units:
    """The units to place, in execution order. `time` may be in any unit: see `smpc.partitioner.stage_costs`."""

    time: tuple[int, ...]
    static_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    shared: tuple[SharedItem, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.time)
        assert len(self.static_bytes) == len(self.activation_bytes) == n, "units: columns of different length"
        assert all(0 <= user < n for item in self.shared for user in item.users), "shared item: no such unit"
        smallest = min((*self.time, *self.static_bytes, *self.activation_bytes), default=0)
        assert smallest >= 0, "units: negative time or bytes"
        for total, what in zip(self.totals(), _COLUMNS, strict=True):
            check_total(total, what)

    def __len__(self) -> int:
        return len(self.time)

    def totals(self) -> tuple[int, int, int]:
        """Time, static bytes and activation bytes of all units, shared items once."""
        static = sum(self.static_bytes) + sum(item.static_bytes for item in self.shared)
        activation = sum(self.activation_bytes) + sum(item.activation_bytes for item in self.shared)
        return sum(self.time), static, activation

    def merged(self, group: Sequence[int] | IntArray, num_groups: int) -> Units:
        """Units whose members are `group[unit]`; an item whose users are all in one group becomes the group's own."""
        labels = np.asarray(group, dtype=np.int64)
        time, static, activation = (
            _sum_by(labels, column, num_groups) for column in (self.time, self.static_bytes, self.activation_bytes)
        )
        shared: list[SharedItem] = []
        for item in self.shared:
            users = tuple(dict.fromkeys(int(labels[user]) for user in item.users))
            if len(users) == 1:
                static[users[0]] += item.static_bytes
                activation[users[0]] += item.activation_bytes
            elif users:
                shared.append(SharedItem(tuple(sorted(users)), item.static_bytes, item.activation_bytes))
        return Units(tuple(time.tolist()), tuple(static.tolist()), tuple(activation.tolist()), tuple(shared))

    def items_of(self) -> list[list[int]]:
        """The shared items that each unit uses."""
        using: list[list[int]] = [[] for _ in range(len(self))]
        for k, item in enumerate(self.shared):
            for user in item.users:
                using[user].append(k)
        return using

    def subset(self, chosen: Sequence[int]) -> Units:
        """Only the chosen units, in this order, with their shared items."""
        place = {unit: i for i, unit in enumerate(chosen)}
        time, static, activation = (
            tuple(column[unit] for unit in chosen) for column in (self.time, self.static_bytes, self.activation_bytes)
        )
        shared = []
        for item in self.shared:
            users = tuple(sorted(place[user] for user in item.users if user in place))
            if users:
                shared.append(SharedItem(users, item.static_bytes, item.activation_bytes))
        return Units(time, static, activation, tuple(shared))


@dataclass(frozen=True, slots=True)
class Scale:
    """The weights that turn time and memory into one number, and the devices' speeds and limits."""

    memory_weight: float
    total_time: int
    total_memory: float
    speeds: tuple[float, ...] = ()  # by stage; empty: all 1
    limits: tuple[int, ...] = ()  # most bytes, by stage; empty: none

    def __post_init__(self) -> None:
        if not 0.0 <= self.memory_weight <= 1.0:
            raise PartitionError(f"memory_weight must be between 0 and 1, found {self.memory_weight}")
        if any(not speed > 0.0 for speed in self.speeds):
            raise PartitionError(f"speeds of devices must be above 0, found {self.speeds}")
        if any(limit < 0 for limit in self.limits):
            raise PartitionError(f"memory limits must be 0 bytes or more, found {self.limits}")

    @classmethod
    def of(
        cls,
        units: Units,
        in_flight: Sequence[int],
        memory_weight: float,
        speeds: Sequence[float] = (),
        limits: Sequence[int] = (),
        *,
        exactly: bool = False,
    ) -> Scale:
        """Totals of the whole model, every item once and activations times the mean in flight: costs sum to about 1.

        Activations times the mean are rounded up to an integer, since bytes are large numbers; with `exactly` they are not.
        """
        time, static, activation = units.totals()
        most = max(in_flight, default=0)
        check_total(static + most * activation, f"bytes with {most} microbatches in flight")
        mean = Fraction(activation * sum(in_flight), max(1, len(in_flight)))
        memory = float(static + mean) if exactly else static + math.ceil(mean)
        return cls(memory_weight, time, memory, tuple(speeds), tuple(limits))

    @property
    def counts_memory(self) -> bool:
        """Whether memory changes a cost, or whether a stage fits."""
        return self.memory_weight > 0.0 or bool(self.limits)

    def cost(self, time: IntArray, memory: IntArray, speed: float | FloatArray = 1.0) -> FloatArray:
        """Cost of stages, limits aside. Each floating point step is monotone: more time or memory never costs less."""
        seconds = (1.0 - self.memory_weight) * (time / max(1, self.total_time) / speed)
        size = self.memory_weight * (memory / max(1, self.total_memory))
        total: FloatArray = seconds + size
        return total

    def cost_on(self, stage: int, time: IntArray, memory: IntArray) -> FloatArray:
        """Cost of sets of units that one stage may run; infinite beyond its device's limit."""
        found = self.cost(time, memory, self.speed(stage))
        return np.where(memory <= self.limits[stage], found, np.inf) if self.limits else found

    def cost_of_one(self, stage: int, time: int, memory: int) -> float:
        """`cost_on` of one set of units: the same steps, and the same rounding."""
        if self.limits and memory > self.limits[stage]:
            return math.inf
        seconds = (1.0 - self.memory_weight) * (float(time) / float(max(1, self.total_time)) / self.speed(stage))
        return seconds + self.memory_weight * (float(memory) / float(max(1, self.total_memory)))

    def speed(self, stage: int) -> float:
        """The limit of the stage's device."""
        return self.speeds[stage] if self.speeds else 1.0

    @property
    def fastest(self) -> float:
        """The speed of the fastest device."""
        return max(self.speeds, default=1.0)

    def mirrored(self) -> Scale:
        """The last stage first."""
        return replace(self, speeds=self.speeds[::-1], limits=self.limits[::-1])


def stage_loads(
    units: Units, assignment: Sequence[int] | IntArray, num_stages: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Time, static bytes and activation bytes of one microbatch, by stage."""
    labels = np.asarray(assignment, dtype=np.int64)
    time, static, activation = (
        _sum_by(labels, column, num_stages) for column in (units.time, units.static_bytes, units.activation_bytes)
    )
    for item in units.shared:
        for stage in sorted({int(labels[user]) for user in item.users}):
            static[stage] += item.static_bytes
            activation[stage] += item.activation_bytes
    return time, static, activation


def stage_costs(
    units: Units, scale: Scale, in_flight: Sequence[int], assignment: Sequence[int] | IntArray
) -> FloatArray:
    """Cost of each stage; `assignment[unit]` is a stage, `in_flight` has one entry for every stage."""
    time, static, activation = stage_loads(units, assignment, len(in_flight))
    memory = static + np.asarray(in_flight, dtype=np.int64) * activation
    costs = scale.cost(time, memory, np.asarray(scale.speeds) if scale.speeds else 1.0)
    return np.where(memory <= np.asarray(scale.limits), costs, np.inf) if scale.limits else costs


def relative_gap(bottleneck: float, proven: float) -> float:
    """bottleneck / proven - 1: infinite where nothing but 0 is proven, and 0 for a bottleneck of 0."""
    if proven > 0:
        return bottleneck / proven - 1.0
    return math.inf if bottleneck > 0 else 0.0


def own_costs(units: Units, scale: Scale, in_flight: int) -> FloatArray:
    """Cost of each unit alone on the fastest device, shared items left out."""
    memory = np.asarray(units.static_bytes, dtype=np.int64) + in_flight * np.asarray(units.activation_bytes)
    return scale.cost(np.asarray(units.time, dtype=np.int64), memory, scale.fastest)


def _sum_by(labels: IntArray, values: Sequence[int], num_labels: int) -> IntArray:
    sums = np.zeros(num_labels, dtype=np.int64)
    np.add.at(sums, labels, np.asarray(values, dtype=np.int64))
    return sums


def heaviest_path(dag: nx.DiGraph[int], costs: FloatArray) -> list[int]:
    """The units on the path whose costs sum to most."""
    own = costs.tolist()
    weight: dict[int, float] = {}
    previous: dict[int, int] = {}
    for unit in nx.lexicographical_topological_sort(dag):
        before = max(sorted(dag.predecessors(unit)), key=lambda other: weight[other], default=-1)
        weight[unit] = own[unit] + weight.get(before, 0.0)
        previous[unit] = before
    path = [max(weight, key=lambda unit: weight[unit])]
    while previous[path[-1]] >= 0:
        path.append(previous[path[-1]])
    return path[::-1]
