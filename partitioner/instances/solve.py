"""The numeric planner: a graph of costs and devices in, a placement with a proven bound out. No model is needed.

The load of a device is (1 - w) * its time / total time + w * its memory / total memory, with w the memory weight; its time is the sum of
its nodes' times divided by its speed, plus the time of its transfers (see `smpc.partitioner.instances.instance`). `solve_instance`
minimises the largest load: with `row` if neither transfers nor kinds of devices count, else with `loaded`.

Numbers may be fractions. They are exact where 61 bits hold them all; where they differ too much in size for that, they are rounded
to one part in 2^60 of the total: a placement that is found is within the limits all the same, but one that just fits may be missed.

    instance = Instance.of(
        nodes=[Node("a", 1), Node("b", 8), Node("c", 8), Node("d", 1)],
        edges=[("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")],
        devices=2,
    )
    found = solve_instance(instance)
    found.stage_of                              # {'a': 0, 'b': 0, 'c': 1, 'd': 1}
    found.bottleneck, found.lower_bound         # (0.5, 0.5): nine of eighteen
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from smpc.errors import MemoryLimitError, PartitionError
from smpc.partitioner.instances.instance import Instance, Link, largest_load, memory, received_bytes, times
from smpc.partitioner.instances.loaded import solve_loaded
from smpc.partitioner.instances.row import a_cut_fits, solve_row
from smpc.partitioner.instances.units import Found, joined
from smpc.partitioner.problem import relative_gap
from smpc.partitioner.solvers.ilp import TIME_LIMIT

_MAX_DEVICES = 128  # the search for the fewest that would do goes no further


@dataclass(frozen=True, slots=True)
class InstanceSolution:
    """No placement has a smaller bottleneck than `lower_bound`; gap = bottleneck / lower_bound - 1, infinite if only 0 is proven."""

    stage_of: dict[str, int]  # device of each node
    bottleneck: float
    lower_bound: float
    gap: float
    times: tuple[float, ...]  # by device, with its transfers
    memory: tuple[float, ...]
    received_bytes: float
    solver: str  # "chain", "graph", "search" or "ilp"
    note: str = ""  # a solver limit that was hit, for instance


def solve_instance(instance: Instance, gap: float = 1e-3, time_limit: float = TIME_LIMIT) -> InstanceSolution:
    """The best placement found, to within the relative `gap` if that can be proven.

    time_limit: seconds for the integer program; the other steps are bounded by their size. Raises MemoryLimitError if nothing
    fits, with the least memory and the fewest devices that would do; PartitionError for more devices than nodes.
    """
    if time_limit < 0 or gap < 0:
        raise PartitionError(f"expected a time limit and a gap of 0 or more, found {time_limit} and {gap}")
    unit_of, _ = joined(instance)
    number = len(set(unit_of))
    if len(instance.devices) > number and not instance.may_idle:
        raise PartitionError(
            f"expected at most as many devices as separable nodes, found {len(instance.devices)} and {number}"
        )
    found = _find_for_instance(instance, gap, time_limit)
    if found is None:
        raise _infeasible_instance(instance, unit_of)
    by_node = found.by_node(instance, unit_of)
    taken, held = times(instance, by_node), memory(instance, by_node)
    bottleneck = largest_load(instance, taken, held)
    proven = min(found.lower_bound, bottleneck)
    return InstanceSolution(
        by_node,
        bottleneck,
        proven,
        relative_gap(bottleneck, proven),
        tuple(map(float, taken)),
        tuple(map(float, held)),
        received_bytes(instance, by_node),
        found.solver,
        found.note,
    )


def _find_for_instance(instance: Instance, gap: float, time_limit: float) -> Found | None:
    return (solve_row if _is_plain(instance) else solve_loaded)(instance, gap, time_limit)


def _is_plain(instance: Instance) -> bool:
    """Whether devices differ in speed and memory alone, stand in a row, and each has a node."""
    has_kinds = any(node.time_on or node.memory_on or node.backward for node in instance.nodes)
    has_transfers = any(device.bandwidth is not None for device in instance.devices)
    return instance.split == "row" and not (instance.may_idle or has_kinds or has_transfers)


def _infeasible_instance(instance: Instance, unit_of: Sequence[int]) -> PartitionError:
    """The error when nothing fits."""
    devices = tuple(replace(device, memory_limit=None, bandwidth=None) for device in instance.devices)
    edges = tuple(Link(edge.source, edge.target) for edge in instance.edges)
    found = _find_for_instance(replace(instance, edges=edges, devices=devices, memory_weight=1.0), 1e-3, TIME_LIMIT)
    if found is None:
        return PartitionError(
            f"expected a placement in which every node can run on its device, found none with the split {instance.split!r}; have more "
            "devices of the kinds that nodes need, or another order of devices"
        )
    least = max(memory(instance, found.by_node(instance, unit_of)))
    limits = [device.memory_limit for device in instance.devices]
    text = (
        f"expected a placement within memory limits {_limits_as_text(limits)}, found none on {len(limits)} devices: the least limit for "
        f"every device that would do is {_rounded_up(least)}"
    )
    if len(set(instance.devices)) == 1 and _is_plain(instance):
        fewest = _fewest_devices(instance, len(set(unit_of)))
        some = (
            f"the fewest devices that would do are {fewest}"
            if fewest
            else f"none of up to {_MAX_DEVICES} devices would do"
        )
        text += f", and within this limit {some}"
    return MemoryLimitError(f"{text}; raise memory_limit or use more devices", math.ceil(least))


def _fewest_devices(instance: Instance, num_units: int) -> int | None:
    """The fewest devices like those given for which a placement is found."""
    limit = Fraction(instance.devices[0].memory_limit or 1)
    lowest = max(len(instance.devices) + 1, math.ceil(sum(Fraction(node.memory) for node in instance.nodes) / limit))
    for count in range(lowest, min(_MAX_DEVICES, num_units) + 1):
        more = replace(instance, devices=instance.devices[:1] * count)
        if a_cut_fits(more) or solve_row(more, 1e-3, TIME_LIMIT) is not None:
            return count
    return None


def _rounded_up(value: Fraction) -> str:
    """In six digits, or in as many as it takes not to say less."""
    nearest = float(value)
    upper = nearest if nearest >= value else math.nextafter(nearest, math.inf)
    return next(text for text in (f"{upper:g}", repr(upper)) if Fraction(float(text)) >= value)


def _limits_as_text(limits: Sequence[float | None]) -> str:
    """Limits of devices, one if they are all alike."""
    texts = ["none" if limit is None else f"{limit:g}" for limit in limits]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)
