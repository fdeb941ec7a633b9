"""A placement problem in numbers: a graph of nodes, the devices, and the objective; and what a placement costs.

Terms
    node        something that runs on one device: its time on a device of speed 1, memory that its device holds for it, and
                memory that it holds once for every microbatch in flight there
    edge        the target needs what the source makes; `num_bytes` cross if they run on different devices. What one source
                sends to one device is sent once: the largest of its edges counts
    device      has a speed, a memory limit, a kind and a bandwidth. On devices of a kind that a node names in `time_on` it takes that
                time instead. A device with a bandwidth takes num_bytes / bandwidth to send what a node makes, once for all others that
                use it, and as long to receive it from one; that time is part of its load. Without, transfers take it none
    backward    a node of the backward of a graph for training. `together` puts it where its forward node is

How nodes may be split over devices, `split`:

    row         the devices form a pipeline in the order given: no edge leads to an earlier one. Between backward nodes none leads to a
                later one, and between forward and backward nodes edges lead anywhere
    contiguous  the same, for the best order of the devices
    free        edges lead anywhere

Each device runs at least one node, unless `may_idle`.

`times`, `memory` and `largest_load` are a placement's costs by definition, in fractions: reported numbers are exact, whatever the solvers
round.

Nodes that share a device as one unit, the order that a split keeps, and transfers between units.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from fractions import Fraction
from typing import Any

import networkx as nx

from smpc.config.numbers import shown
from smpc.errors import PartitionError
from smpc.partitioner.solvers.ilp import Value
from smpc.partitioner.stage_costs import in_proportion

SPLITS = ("row", "contiguous", "free")
_MOST = 1e200  # amounts, speeds and their inverses are within this: so are all sums and quotients within doubles
_MOST_IN_FLIGHT = 2**30
_MOST_DEVICES = 100_000
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Node:
    """Costs of a node: see the module docstring."""

    name: str
    time: float
    memory: float = 0.0
    activation_memory: float = 0.0
    time_on: Mapping[str, float | None] = field(
        default_factory=dict, hash=False
    )  # by kind of device; None: it cannot run there
    memory_on: Mapping[str, float] = field(default_factory=dict, hash=False)  # by kind of device, instead of `memory`
    backward: bool = False

    def time_at(self, device: Processor) -> float | None:
        """Before the device's speed counts; None: it cannot run there."""
        return self.time_on.get(device.kind, self.time)

    def memory_at(self, device: Processor) -> float:
        """Without what is held for microbatches in flight."""
        return self.memory_on.get(device.kind, self.memory)


@dataclass(frozen=True, slots=True)
class Link:
    """`target` needs what `source` makes."""

    source: str
    target: str
    num_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Processor:
    """A device: nodes take time / speed on it, and it holds at most `memory_limit` (None: any amount)."""

    speed: float = 1.0
    memory_limit: float | None = None
    in_flight: int = 1  # microbatches whose activations it holds
    kind: str = ""
    bandwidth: float | None = None  # bytes that it sends or receives in a unit of time; None: any number


@dataclass(frozen=True, slots=True)
class Instance:
    """A graph, the devices, and the objective; `together` lists nodes that must share a device."""

    nodes: tuple[Node, ...]
    edges: tuple[Link, ...]
    devices: tuple[Processor, ...]
    memory_weight: float = 0.0
    together: tuple[tuple[str, ...], ...] = ()
    split: str = "row"
    may_idle: bool = False

    def __post_init__(self) -> None:
        problems = list(_bad_types(self)) or [*_bad_numbers(self), *_bad_names(self)]
        if problems:
            more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise PartitionError(f"expected a valid instance, found: {'; '.join(problems[:_SHOWN])}{more}")
        graph = self.graph()
        if not nx.is_directed_acyclic_graph(graph):
            circle = [self.nodes[u].name for u, _ in nx.find_cycle(graph)]
            raise PartitionError(
                f"expected a graph without cycles, found {' -> '.join((*circle, circle[0]))}: nodes that need each other "
                "must be one node"
            )

    @classmethod
    def of(
        cls,
        nodes: Iterable[Node],
        edges: Iterable[Link | tuple[str, str] | tuple[str, str, float]],
        devices: int | Iterable[Processor],
        memory_weight: float = 0.0,
        together: Iterable[Iterable[str]] = (),
        split: str = "row",
        may_idle: bool = False,
    ) -> Instance:
        """From any iterables; an edge may be a tuple, and devices may be a number of equal ones."""
        links = tuple(edge if isinstance(edge, Link) else Link(*edge) for edge in edges)
        row = (Processor(),) * devices if isinstance(devices, int) else tuple(devices)
        groups = tuple(tuple(group) for group in together)
        return cls(tuple(nodes), links, row, memory_weight, groups, split, may_idle)

    @classmethod
    def from_json(cls, text: str) -> Instance:
        """Objects with the keys `nodes`, `edges`, `devices` (a list or a number), and, if wanted, the other fields."""
        return cls.from_object(json.loads(text))

    @classmethod
    def from_object(cls, data: Any) -> Instance:
        """The same from such JSON. PartitionError for anything else."""
        known = {field.name for field in fields(cls)}
        if not isinstance(data, dict) or not {"nodes", "edges", "devices"} <= data.keys() <= known:
            found = sorted(data) if isinstance(data, dict) else type(data).__name__
            raise PartitionError(
                f"expected an object with nodes, edges and devices, and of other keys only {sorted(known)}, found {found}"
            )
        devices, together = data["devices"], data.get("together", ())
        if not isinstance(together, (list, tuple)) or not all(
            isinstance(group, list) and all(isinstance(name, str) for name in group) for group in together
        ):
            raise PartitionError("expected together to be a list of lists of names of nodes")
        is_number = isinstance(devices, int) and not isinstance(devices, bool)
        if is_number and not 1 <= devices <= _MOST_DEVICES:
            raise PartitionError(f"expected a number of devices from 1 to {_MOST_DEVICES}, found {_shown(devices)}")
        return cls.of(
            _rows_of_instance(Node, data["nodes"]),
            _rows_of_instance(Link, data["edges"]),
            devices if is_number else _rows_of_instance(Processor, devices),
            data.get("memory_weight", 0.0),
            together,
            data.get("split", "row"),
            data.get("may_idle", False),
        )

    @property
    def number_of(self) -> dict[str, int]:
        """The place of each node among them all."""
        return {node.name: i for i, node in enumerate(self.nodes)}

    def graph(self) -> nx.DiGraph[int]:
        """The nodes by number, and their edges."""
        number = self.number_of
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(range(len(self.nodes)))
        graph.add_edges_from((number[edge.source], number[edge.target]) for edge in self.edges)
        return graph


def _rows_of_instance(kind: type[Any], rows: Any) -> list[Any]:
    """Objects of JSON as dataclasses; what is wrong with the keys is said for all of them."""
    known = {field.name for field in fields(kind)}
    needed = {field.name for field in fields(kind) if field.default is field.default_factory is MISSING}
    if not isinstance(rows, (list, tuple)):
        raise PartitionError(f"expected a list of {kind.__name__} objects, found {type(rows).__name__}")
    problems = []
    for i, row in enumerate(rows):
        if not isinstance(row, dict) or not needed <= row.keys() <= known:
            problems.append(f"{kind.__name__} {i} has {sorted(row) if isinstance(row, dict) else row!r}")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise PartitionError(
            f"expected the keys {sorted(needed)} and of others only {sorted(known - needed)}, found: "
            f"{'; '.join(problems[:_SHOWN])}{more}"
        )
    return [kind(**row) for row in rows]


def _bad_numbers(instance: Instance) -> Iterator[str]:
    def is_amount(value: Any, most: float = _MOST) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= most

    for node in instance.nodes:
        for name in ("time", "memory", "activation_memory"):
            if not is_amount(value := getattr(node, name)):
                yield f"{name} {_shown(value)} of node {node.name}, which must be a number from 0 to {_MOST:g}"
        amounts = [(kind, time) for kind, time in node.time_on.items() if time is not None]
        for kind, value in (*amounts, *node.memory_on.items()):
            if not is_amount(value):
                yield f"{_shown(value)} of node {node.name} on devices of kind {kind!r}, which must be a number from 0 to {_MOST:g}"
        if instance.devices and all(node.time_at(device) is None for device in instance.devices):
            yield f"node {node.name}, which can run on none of the devices"
    for edge in instance.edges:
        if not is_amount(edge.num_bytes):
            yield f"{_shown(edge.num_bytes)} bytes of edge {edge.source} -> {edge.target}, which must be a number from 0 to {_MOST:g}"
    for i, device in enumerate(instance.devices):
        if not is_amount(device.speed) or device.speed < 1 / _MOST:
            yield f"speed {_shown(device.speed)} of device {i}, which must be a number from {1 / _MOST:g} to {_MOST:g}"
        if device.bandwidth is not None and (not is_amount(device.bandwidth) or device.bandwidth < 1 / _MOST):
            yield f"bandwidth {_shown(device.bandwidth)} of device {i}, which must be a number from {1 / _MOST:g} to {_MOST:g}, or None"
        if device.memory_limit is not None and not is_amount(device.memory_limit, sys.float_info.max):
            yield f"memory limit {_shown(device.memory_limit)} of device {i}, which must be a number of 0 or more, or None"
        if not isinstance(device.in_flight, int) or not 1 <= device.in_flight <= _MOST_IN_FLIGHT:
            yield (
                f"{_shown(device.in_flight)} microbatches in flight on device {i}, which must be a whole number from 1 to {_MOST_IN_FLIGHT}"
            )
    if not is_amount(instance.memory_weight) or instance.memory_weight > 1:
        yield f"memory weight {instance.memory_weight!r}, which must be between 0 and 1"
    if not isinstance(instance.split, str) or instance.split not in SPLITS:
        yield f"split {instance.split!r}, which must be one of {', '.join(SPLITS)}"


def _bad_types(instance: Any) -> Iterator[str]:
    """A value that is neither a name nor a table, as files may have it."""
    for i, node in enumerate(instance.nodes):
        if not isinstance(node.name, str):
            yield f"the name {_shown(node.name)} of node {i}, which must be a text"
        for name in ("time_on", "memory_on"):
            if not isinstance(table := getattr(node, name), Mapping) or not all(
                isinstance(kind, str) for kind in table
            ):
                yield f"{name} {_shown(table)} of node {i}, which must be amounts by kind of device"
        if not isinstance(node.backward, bool):
            yield f"backward {_shown(node.backward)} of node {i}, which must be true or false"
    for i, edge in enumerate(instance.edges):
        if not isinstance(edge.source, str) or not isinstance(edge.target, str):
            yield f"edge {i} from {_shown(edge.source)} to {_shown(edge.target)}, which must be names of nodes"
    for i, device in enumerate(instance.devices):
        if not isinstance(device.kind, str):
            yield f"kind {_shown(device.kind)} of device {i}, which must be a text"
    if not isinstance(instance.may_idle, bool):
        yield f"may_idle {_shown(instance.may_idle)}, which must be true or false"


def _shown(value: Any) -> str:
    """The value, if it is not too long to be shown."""
    return f"of {value.bit_length()} bits" if isinstance(value, int) and value.bit_length() > 64 else shown(value)


def _bad_names(instance: Instance) -> Iterator[str]:
    names = Counter(node.name for node in instance.nodes)
    if not instance.nodes:
        yield "no node"
    if not instance.devices:
        yield "no device"
    for name, count in names.items():
        if count > 1:
            yield f"{count} nodes called {name}"
    for edge in instance.edges:
        for name in (edge.source, edge.target):
            if name not in names:
                yield f"edge {edge.source} -> {edge.target} of an unknown node {name}"
    for group in instance.together:
        for name in group:
            if name not in names:
                yield f"an unknown node {name} among those to keep together"


def times(instance: Instance, device_of: Mapping[str, int]) -> list[Fraction]:
    """The time of each device for its nodes and its transfers. Every node is where it can run."""
    found = [Fraction(0)] * len(instance.devices)
    for node in instance.nodes:
        device = instance.devices[device_of[node.name]]
        found[device_of[node.name]] += Fraction(node.time_at(device) or 0) / Fraction(device.speed)
    for (_, device_index), num_bytes in _sent_by_source(instance, device_of).items():
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


def moved_bytes(instance: Instance, device_of: Mapping[str, int]) -> float:
    """Bytes that cross: what one source sends to one device once."""
    home = device_of
    return float(
        sum(
            num_bytes
            for (source, target), num_bytes in _sent_by_source(instance, device_of).items()
            if home[source] != target
        )
    )


def _sent_by_source(instance: Instance, device_of: Mapping[str, int]) -> dict[tuple[str, int], Fraction]:
    """The transfers of each source, by the device that sends or receives them: the largest of several edges."""
    sent: dict[tuple[str, int], Fraction] = {}
    for edge in instance.edges:
        home, target = device_of[edge.source], device_of[edge.target]
        for device in (home, target) if home != target else ():
            key = edge.source, device
            sent[key] = max(sent.get(key, Fraction(0)), Fraction(edge.num_bytes))
    return sent


@dataclass(frozen=True, slots=True)
class FoundPlacement:
    """The device of each unit, a bound that holds for all placements, the solver, and the limits that were hit."""

    device_of: tuple[int, ...]
    lower_bound: float
    solver: str
    note: str = ""

    def by_node(self, instance: Instance, unit_of: Sequence[int]) -> dict[str, int]:
        """The device of each node, by name."""
        return {node.name: self.device_of[unit] for node, unit in zip(instance.nodes, unit_of, strict=True)}


def joined(instance: Instance) -> tuple[list[int], nx.DiGraph[int]]:
    """The unit of each node, and the order of units: an edge goes from a unit that runs on the same or an earlier stage.

    A node between two nodes of a group joins the group. Backward nodes run in the order of their forward nodes turned round; splits that
    are free have no order.
    """
    graph, nodes = instance.graph(), instance.nodes
    ordered: nx.DiGraph[int] = nx.DiGraph()
    ordered.add_nodes_from(graph)
    for u, w in graph.edges:
        if instance.split != "free" and nodes[u].backward == nodes[w].backward:
            ordered.add_edge(*((w, u) if nodes[u].backward else (u, w)))
    tied, number = ordered.copy(), instance.number_of
    for group in instance.together:
        nx.add_cycle(tied, [number[name] for name in group])
    components = sorted(sorted(component) for component in nx.strongly_connected_components(tied))
    unit_of = {node: unit for unit, component in enumerate(components) for node in component}
    dag: nx.DiGraph[int] = nx.DiGraph()
    dag.add_nodes_from(range(len(components)))
    dag.add_edges_from(sorted({(unit_of[u], unit_of[w]) for u, w in ordered.edges if unit_of[u] != unit_of[w]}))
    return [unit_of[node] for node in range(len(nodes))], dag


def values(instance: Instance, unit_of: Sequence[int]) -> tuple[tuple[Value, ...], Fraction]:
    """The transfers of each source to other units, in integers proportional to the bytes of the edges, and the factor."""
    sent, factor = in_proportion([edge.num_bytes for edge in instance.edges])
    return tuple(_transfers_of_units(instance, sent, unit_of)), factor


def _transfers_of_units(instance: Instance, sent: Sequence[int], unit_of: Sequence[int]) -> Iterator[Value]:
    """The transfers of each source to other units: once to each device, so targets of different size count as nested parts."""
    number = instance.number_of
    sizes: dict[int, dict[int, int]] = {}
    for edge, size in zip(instance.edges, sent, strict=True):
        source, target = number[edge.source], unit_of[number[edge.target]]
        if unit_of[source] != target and size:
            targets = sizes.setdefault(source, {})
            targets[target] = max(size, targets.get(target, 0))
    for source, targets in sorted(sizes.items()):
        before = 0
        for size in sorted(set(targets.values())):
            users = tuple(sorted(target for target, wanted in targets.items() if wanted >= size))
            yield Value(unit_of[source], users, size - before)
            before = size
