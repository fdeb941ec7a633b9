"""How long a collective takes: the one place that says so for every kind, size and group of ranks.

    collective_time(Kind.ALL_REDUCE, 100e6, Group(64, per_host=8), device)

`num_bytes`: of the whole tensor, which the d ranks of a group hold together or which each of them ends up with:

    kind              num_bytes                                    a rank sends
    all-reduce        what every rank has                          2 n (d - 1) / d
    all-gather        what every rank has afterwards               n (d - 1) / d
    reduce-scatter    what every rank has before                   n (d - 1) / d
    all-to-all        what every rank has, before and after        n (d - 1) / d
    broadcast         the message                                  n
    send              the message, to one other rank               n

Two levels: wires inside a host, and one wire of every device to the network. A ring passes through a host once, in and out, over the
wires of all of the group's devices there, so it is as fast as the slower of a device's wire inside and `per_host` wires between:

    bandwidth = rate inside                                 all on one host
                min(rate inside, per_host * rate between)   else
    time      = latency + sent / bandwidth + steps * hop

Steps of a ring: d - 1, twice that for an all-reduce. An all-reduce may take a tree instead: 2 n / bandwidth, and per_host - 1 hops inside
and log2(hosts) between, up and down; the faster of both counts, as libraries choose by size. An all-to-all sends every rank its part,
over the wire to that rank. Latency is a message's, including the work of both ends.

Where a device's collectives were measured (`Device.collectives`: by kind, bytes/s by the bytes that a rank sends), that counts for ranks
of one host; `IN_OPERATIONS` are those between operations, of tensor-parallel ranks and others, which need not take the same way: sums,
and `MOVES_IN_OPERATIONS` where slices are put together or apart.

Example: 268 MB on 8 H100s of one host are gathered in 268e6 * 7/8 / (0.8 * 450e9) s + 34 us = 0.69 ms.
"""

from __future__ import annotations

import math
from enum import StrEnum

from smpc.partitioner.costs.device import Device, Group, at


class CollectiveKind(StrEnum):
    """The kinds of collectives: see the module docstring."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    SEND = "send"


IN_OPERATIONS, MOVES_IN_OPERATIONS = "in-operations", "in-operations-moves"


def collective_time(kind: CollectiveKind, num_bytes: float, group: Group, device: Device) -> float:
    """Seconds until all ranks of a group are done; 0 for one rank, or nothing to send."""
    if group.size == 1 or num_bytes <= 0:
        return 0.0
    if group.hosts == 1 and kind in device.collectives:
        sent = _bytes_sent_by_collective(kind, num_bytes, group.size)
        return sent / at(device.collectives[kind], sent)
    if kind is CollectiveKind.ALL_TO_ALL:
        return _all_to_all(num_bytes, group, device)
    latency, rate = _collective_latency(group, device), bandwidth(group, device)
    if kind is CollectiveKind.SEND:
        return latency + num_bytes / rate
    part, (ring, tree) = num_bytes * (group.size - 1) / group.size, _collective_hops(group, device)
    if kind is CollectiveKind.ALL_REDUCE:
        return latency + min(2 * part / rate + 2 * ring, 2 * num_bytes / rate + 2 * tree)
    if kind is CollectiveKind.BROADCAST:
        return latency + num_bytes / rate + tree
    return latency + part / rate + ring


def sent_time(num_bytes: float, group: Group, device: Device, *, moves: bool = False) -> float:
    """Seconds of a collective on a ring, by the bytes that every rank sends for it, in one go.

    `moves`: it puts slices together or apart, rather than to sum tensors.
    """
    if group.size == 1 or num_bytes <= 0:
        return 0.0
    measured = device.collectives.get(IN_OPERATIONS)
    if moves:
        measured = device.collectives.get(MOVES_IN_OPERATIONS, measured)
    if group.hosts == 1 and measured is not None:
        return num_bytes / at(measured, num_bytes)
    return (
        _collective_latency(group, device) + num_bytes / bandwidth(group, device) + _collective_hops(group, device)[0]
    )


def _bytes_sent_by_collective(kind: CollectiveKind, num_bytes: float, size: int) -> float:
    """The bytes that a rank sends, by the table above."""
    if kind in (CollectiveKind.BROADCAST, CollectiveKind.SEND):
        return num_bytes
    return num_bytes * (size - 1) / size * (2 if kind is CollectiveKind.ALL_REDUCE else 1)


def least_time(kind: CollectiveKind, num_bytes: float, group: Group, device: Device) -> float:
    """Seconds that a ring's bytes alone take: no collective of the kind, in however many pieces, is faster."""
    if group.size == 1 or num_bytes <= 0:
        return 0.0
    if group.hosts == 1 and kind in device.collectives:
        return _bytes_sent_by_collective(kind, num_bytes, group.size) / max(
            rate for _, rate in device.collectives[kind]
        )
    times = 2 if kind is CollectiveKind.ALL_REDUCE else 1
    return times * num_bytes * (group.size - 1) / group.size / bandwidth(group, device)


def bandwidth(group: Group, device: Device) -> float:
    """Bytes/s at which a ring through the group goes round."""
    inside, between = device.inside_host.rate, group.per_host * device.between_hosts.rate
    if group.hosts == 1:
        return inside
    return between if group.per_host == 1 else min(inside, between)


def _collective_latency(group: Group, device: Device) -> float:
    return device.inside_host.latency if group.hosts == 1 else device.between_hosts.latency


def _collective_hops(group: Group, device: Device) -> tuple[float, float]:
    """Seconds of a ring's steps, and of the way from the leaves of a tree to its root."""
    inside, between = device.inside_host.hop, device.between_hosts.hop
    ring = (group.size - 1) * (inside if group.hosts == 1 else between)
    tree = (group.per_host - 1) * inside + math.ceil(math.log2(group.hosts)) * between
    return ring, tree


def _all_to_all(num_bytes: float, group: Group, device: Device) -> float:
    """To each rank its part, over the wire that leads there; both levels at once."""
    part = num_bytes / group.size
    inside = (group.per_host - 1) * part / device.inside_host.rate
    between = (group.size - group.per_host) * part / device.between_hosts.rate
    return _collective_latency(group, device) + max(inside, between) + _collective_hops(group, device)[1]
