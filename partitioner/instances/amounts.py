"""The cost of a placement by definition, in fractions: reported numbers are exact, whatever the solvers round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from smpc.partitioner.instances.instance import Instance


def times(instance: Instance, device_of: Mapping[str, int]) -> list[Fraction]:
    """The time of each device for its nodes and its transfers. Every node is where it can run."""
    found = [Fraction(0)] * len(instance.devices)
    for node in instance.nodes:
        device = instance.devices[device_of[node.name]]
        found[device_of[node.name]] += Fraction(node.time_at(device) or 0) / Fraction(device.speed)
    for (_, device_index), num_bytes in _sent(instance, device_of).items():
        if (bandwidth := instance.devices[device_index].bandwidth) is not None:
            found[device_index] += num_bytes / Fraction(bandwidth)
    return found


def memory(instance: Instance, device_of: Mapping[str, int]) -> list[Fraction]:
    """The memory of each device."""
    found = [Fraction(0)] * len(instance.devices)
    for node in instance.nodes:
        device = instance.devices[device_of[node.name]]
        held = device.in_flight * Fraction(node.activation_memory)
        found[device_of[node.name]] += Fraction(node.memory_at(device)) + held
    return found


def totals(instance: Instance) -> tuple[Fraction, Fraction]:
    """Time and memory of all nodes, which loads are shares of: `time` and `memory` of each, activations times the mean in flight."""
    mean = Fraction(sum(device.in_flight for device in instance.devices), len(instance.devices))
    time = sum((Fraction(node.time) for node in instance.nodes), Fraction(0))
    held = sum(
        (Fraction(node.memory) + mean * Fraction(node.activation_memory) for node in instance.nodes), Fraction(0)
    )
    return time or Fraction(1), held or Fraction(1)


def largest_load(instance: Instance, times: Sequence[Fraction], memory: Sequence[Fraction]) -> float:
    """The loads of devices with these times and memory."""
    weight = Fraction(instance.memory_weight)
    total_time, total = totals(instance)
    loads = zip(times, memory, strict=True)
    return float(max((1 - weight) * time / total_time + weight * held / total for time, held in loads))


def is_within(instance: Instance, device_of: Mapping[str, int]) -> bool:
    """Whether every device is within its limit."""
    held = zip(memory(instance, device_of), instance.devices, strict=True)
    return all(device.memory_limit is None or amount <= device.memory_limit for amount, device in held)


def received_bytes(instance: Instance, device_of: Mapping[str, int]) -> float:
    """Bytes that cross: what one source sends to one device once."""
    home = device_of
    return float(
        sum(num_bytes for (source, target), num_bytes in _sent(instance, device_of).items() if home[source] != target)
    )


def _sent(instance: Instance, device_of: Mapping[str, int]) -> dict[tuple[str, int], Fraction]:
    """The transfers of each source, by the device that sends or receives them: the largest of several edges."""
    sent: dict[tuple[str, int], Fraction] = {}
    for edge in instance.edges:
        home, target = device_of[edge.source], device_of[edge.target]
        for device in (home, target) if home != target else ():
            key = edge.source, device
            sent[key] = max(sent.get(key, Fraction(0)), Fraction(edge.num_bytes))
    return sent
