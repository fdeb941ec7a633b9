"""The numeric planner: a graph of costs and a row of devices in, a placement with a proven bound out. No model is needed.

Terms
    node        something that runs on one device: its time on a device of speed 1, memory that its device holds for it, and
                memory that it holds once for every microbatch in flight there
    edge        the target needs what the source makes; `num_bytes` cross if they run on different devices. What one source
                sends to one device is sent once: the largest of its edges counts
    device      devices form a pipeline in the order given: an edge never leads to an earlier one. Each runs at least one node

The load of a device is (1 - w) * its time / total time + w * its memory / total memory, with w the memory weight; its time is the
sum of its nodes' divided by its speed. `solve_instance` makes the largest load small:

    1   the best cut of the nodes, in topological order, into contiguous stages, exact for that order
    2   all placements, by their prefixes (`smpc.partitioner.lattice`), which also proves the lower bound
    3   small instances: the integer program (`smpc.partitioner.ilp`), which closes what gap is left and then saves bytes

Numbers may be fractions; memory is rounded up, and limits down, to one part in 2^50 of the total.

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

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import networkx as nx
import numpy as np

from smpc.errors import MemoryLimitError, PartitionError
from smpc.partitioner.bound import graph_bound
from smpc.partitioner.chain import ChainProblem, solve_chain
from smpc.partitioner.ilp import TIME_LIMIT, PlacementProblem, Value, received_bytes, solve_placement
from smpc.partitioner.placing import place
from smpc.partitioner.problem import Scale, Units, stage_costs, stage_loads

_MAX_ILP_UNITS = 48
_MAX_DEVICES = 128  # the search for the fewest that would do goes no further
_PARTS = 2**50  # what fractions of the total are rounded to
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Node:
    """Costs of a node: see the module docstring."""

    name: str
    time: float
    memory: float = 0.0
    activation_memory: float = 0.0


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


@dataclass(frozen=True, slots=True)
class Instance:
    """A graph, the devices, and what counts; `together` lists nodes that must share a device."""

    nodes: tuple[Node, ...]
    edges: tuple[Link, ...]
    devices: tuple[Processor, ...]
    memory_weight: float = 0.0
    together: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        problems = [*_bad_numbers(self), *_bad_names(self)]
        if problems:
            more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise PartitionError(f"expected a valid instance, found: {'; '.join(problems[:_SHOWN])}{more}")
        graph = _digraph(self)
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
    ) -> Instance:
        """From any iterables; an edge may be a tuple, and devices may be a number of equal ones."""
        links = tuple(edge if isinstance(edge, Link) else Link(*edge) for edge in edges)
        row = (Processor(),) * devices if isinstance(devices, int) else tuple(devices)
        return cls(tuple(nodes), links, row, memory_weight, tuple(tuple(group) for group in together))

    @classmethod
    def from_json(cls, text: str) -> Instance:
        """Objects with the keys `nodes`, `edges`, `devices` (a list or a number), and, if wanted, `memory_weight`, `together`."""
        data = json.loads(text)
        known = {field.name for field in fields(cls)}
        if not isinstance(data, dict) or not {"nodes", "edges", "devices"} <= data.keys() <= known:
            found = sorted(data) if isinstance(data, dict) else type(data).__name__
            raise PartitionError(
                f"expected an object with nodes, edges and devices, and of other keys only {sorted(known)}, found {found}"
            )
        devices = data["devices"]
        return cls.of(
            _rows(Node, data["nodes"]),
            _rows(Link, data["edges"]),
            devices if isinstance(devices, int) else _rows(Processor, devices),
            data.get("memory_weight", 0.0),
            data.get("together", ()),
        )


@dataclass(frozen=True, slots=True)
class InstanceSolution:
    """No placement has a smaller bottleneck than `lower_bound`; gap = bottleneck / lower_bound - 1."""

    stage_of: dict[str, int]  # device of each node
    bottleneck: float
    lower_bound: float
    gap: float
    times: tuple[float, ...]  # by device
    memory: tuple[float, ...]
    received_bytes: float
    solver: str  # "chain", "graph" or "ilp"
    note: str = ""  # a solver limit that was hit, for instance


def solve_instance(instance: Instance, gap: float = 1e-3, time_limit: float = TIME_LIMIT) -> InstanceSolution:
    """The best placement found, to within the relative `gap` if that can be proven.

    time_limit: seconds for the integer program; the other steps are bounded by their size. Raises MemoryLimitError if nothing
    fits, with the least memory and the fewest devices that would do; PartitionError for more devices than nodes.
    """
    if time_limit < 0 or gap < 0:
        raise PartitionError(f"expected a time limit and a gap of 0 or more, found {time_limit} and {gap}")
    numbers = _Numbers.of(instance)
    if len(instance.devices) > len(numbers.units):
        raise PartitionError(
            f"expected at most as many devices as separable nodes, found {len(instance.devices)} and {len(numbers.units)}"
        )
    found = _search(numbers, gap, time_limit)
    if found is None:
        raise _infeasible(instance, numbers)
    return _solution(instance, numbers, *found)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The instance in whole numbers; nodes that share a device are one unit."""

    units: Units
    dag: nx.DiGraph[int]
    scale: Scale
    in_flight: tuple[int, ...]
    values: tuple[Value, ...]
    unit_of: tuple[int, ...]  # by node
    per_byte: float  # whole numbers for one byte of memory
    per_sent: float  # and of edges

    @classmethod
    def of(cls, instance: Instance) -> _Numbers:
        time, _ = _whole([node.time for node in instance.nodes])
        held, per_byte = _whole([value for node in instance.nodes for value in (node.memory, node.activation_memory)])
        sent, per_sent = _whole([edge.num_bytes for edge in instance.edges])
        unit_of, dag = _joined(instance)
        in_flight = tuple(device.in_flight for device in instance.devices)
        units = Units(tuple(time), tuple(held[::2]), tuple(held[1::2])).merged(unit_of, dag.number_of_nodes())
        limits = [device.memory_limit for device in instance.devices]
        most = sum(units.static_bytes) + max(in_flight) * sum(units.activation_bytes)
        scale = Scale.of(
            units,
            in_flight,
            instance.memory_weight,
            speeds=[device.speed for device in instance.devices],
            limits=[most if limit is None else min(most, math.floor(limit * per_byte)) for limit in limits],
        )
        number = {node.name: unit for node, unit in zip(instance.nodes, unit_of, strict=True)}
        values: dict[int, dict[int, int]] = {}
        for edge, size in zip(instance.edges, sent, strict=True):
            source, target = number[edge.source], number[edge.target]
            if source != target and size:
                targets = values.setdefault(source, {})
                targets[target] = max(size, targets.get(target, 0))
        return cls(units, dag, scale, in_flight, tuple(_values(values)), tuple(unit_of), per_byte, per_sent)

    def problem(self) -> PlacementProblem:
        """For the integer program."""
        return PlacementProblem(self.units, self.scale, self.in_flight, tuple(sorted(self.dag.edges)), self.values)

    def cost(self, stage_of: Sequence[int]) -> float:
        """The largest load."""
        return float(stage_costs(self.units, self.scale, self.in_flight, stage_of).max())


def _search(numbers: _Numbers, gap: float, time_limit: float) -> tuple[tuple[int, ...], float, str, str] | None:
    """Placement of the units, bound, solver, note; None if nothing fits."""
    start, solver = _contiguous(numbers), "chain"
    highest = numbers.cost(start) if start is not None else _everything(numbers)
    units, dag, scale, in_flight = numbers.units, numbers.dag, numbers.scale, numbers.in_flight
    bound = graph_bound(units, dag, scale, in_flight, 0.0, highest) if len(in_flight) > 1 else highest
    if math.isinf(bound):
        return None
    if highest > bound * (1.0 + gap) or start is None:
        placed = place(units, dag, scale, in_flight, bound, highest * (1.0 if start is not None else 1.0 + 1e-6))
        if placed is not None:
            start, solver, highest = placed.stage_of, "graph", placed.bottleneck
    note = ""
    if len(in_flight) > 1 and len(units) <= _MAX_ILP_UNITS and (numbers.values or highest > bound * (1.0 + gap)):
        problem = numbers.problem()
        before = None if start is None else (highest, received_bytes(problem, start))
        reduced = replace(problem, dependencies=tuple(sorted(nx.transitive_reduction(numbers.dag).edges)))
        try:
            solution = solve_placement(reduced, start, gap / 2, time_limit)
        except PartitionError:
            return None
        bound, note = max(bound, solution.lower_bound), solution.note
        if before is None or (solution.bottleneck, solution.received_bytes) != before:
            start, solver = solution.assignment, "ilp"
    return None if start is None else (start, bound, solver, note)


def _contiguous(numbers: _Numbers) -> tuple[int, ...] | None:
    order = list(nx.lexicographical_topological_sort(numbers.dag))
    chain = ChainProblem(numbers.units.subset(order), numbers.scale, numbers.in_flight)
    try:
        stages = solve_chain(chain, len(numbers.in_flight)).assignment(len(order))
    except PartitionError:  # none within the limits
        return None
    placed = dict(zip(order, stages, strict=True))
    return tuple(placed[unit] for unit in range(len(order)))


def _everything(numbers: _Numbers) -> float:
    """More than any device can have to do."""
    units, scale = numbers.units, replace(numbers.scale, limits=())
    alone = [
        stage_costs(units, scale, numbers.in_flight, [s] * len(units)).max() for s in range(len(numbers.in_flight))
    ]
    return float(max(alone)) * (1.0 + 1e-6) + 1e-9


def _infeasible(instance: Instance, numbers: _Numbers) -> MemoryLimitError:
    """What to say when nothing fits."""
    in_bytes = replace(numbers, scale=replace(numbers.scale, memory_weight=1.0, limits=()), values=())
    found = _search(in_bytes, 1e-3, TIME_LIMIT)
    assert found is not None, "without limits there is a placement"
    _, static, held = stage_loads(numbers.units, found[0], len(numbers.in_flight))
    least = int((static + np.asarray(numbers.in_flight) * held).max()) / numbers.per_byte
    limits = [device.memory_limit for device in instance.devices]
    text = (
        f"expected a placement within memory limits {_listed(limits)}, found none on {len(limits)} devices: the least limit for "
        f"every device that would do is {least:g}"
    )
    if len(set(instance.devices)) == 1:
        fewest = _fewest(instance, numbers)
        some = (
            f"the fewest devices that would do are {fewest}"
            if fewest
            else f"none of up to {_MAX_DEVICES} devices would do"
        )
        text += f", and within this limit {some}"
    return MemoryLimitError(f"{text}; raise memory_limit or use more devices", math.ceil(least))


def _fewest(instance: Instance, numbers: _Numbers) -> int | None:
    """The fewest devices like those given for which a placement is found."""
    memory = numbers.scale.limits[0] or 1
    lowest = max(len(instance.devices) + 1, -(-sum(numbers.units.static_bytes) // memory))
    for count in range(lowest, min(_MAX_DEVICES, len(numbers.units)) + 1):
        more = _Numbers.of(replace(instance, devices=instance.devices[:1] * count))
        if _contiguous(more) is not None or _search(more, 1e-3, TIME_LIMIT) is not None:
            return count
    return None


def _solution(
    instance: Instance, numbers: _Numbers, stage_of: tuple[int, ...], bound: float, solver: str, note: str
) -> InstanceSolution:
    bottleneck = numbers.cost(stage_of)
    proven = min(bound, bottleneck)
    by_node = dict(zip((node.name for node in instance.nodes), (stage_of[u] for u in numbers.unit_of), strict=True))
    times, memory = [0.0] * len(instance.devices), [0.0] * len(instance.devices)
    for node in instance.nodes:
        stage = by_node[node.name]
        times[stage] += node.time / instance.devices[stage].speed
        memory[stage] += node.memory + instance.devices[stage].in_flight * node.activation_memory
    return InstanceSolution(
        by_node,
        bottleneck,
        proven,
        bottleneck / proven - 1.0 if proven > 0 else 0.0,
        tuple(times),
        tuple(memory),
        received_bytes(numbers.problem(), stage_of) / numbers.per_sent,
        solver,
        note,
    )


def _whole(values: Sequence[float]) -> tuple[list[int], float]:
    """Whole numbers in proportion to the values, rounded up, and the proportion: 1 if they are whole already."""
    if all(float(value).is_integer() for value in values) and sum(values) < _PARTS:
        return [int(value) for value in values], 1.0
    factor = 2.0 ** math.floor(math.log2(_PARTS / float(sum(values))))
    return [math.ceil(value * factor) for value in values], factor


def _digraph(instance: Instance) -> nx.DiGraph[int]:
    number = {node.name: i for i, node in enumerate(instance.nodes)}
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(instance.nodes)))
    graph.add_edges_from((number[edge.source], number[edge.target]) for edge in instance.edges)
    return graph


def _joined(instance: Instance) -> tuple[list[int], nx.DiGraph[int]]:
    """Unit of each node, and the dependencies between units. What lies between two nodes of a group joins it."""
    graph = _digraph(instance)
    tied = graph.copy()
    number = {node.name: i for i, node in enumerate(instance.nodes)}
    for group in instance.together:
        nx.add_cycle(tied, [number[name] for name in group])
    components = sorted(sorted(component) for component in nx.strongly_connected_components(tied))
    unit_of = {node: unit for unit, component in enumerate(components) for node in component}
    dag: nx.DiGraph[int] = nx.DiGraph()
    dag.add_nodes_from(range(len(components)))
    dag.add_edges_from(sorted({(unit_of[u], unit_of[w]) for u, w in graph.edges if unit_of[u] != unit_of[w]}))
    return [unit_of[node] for node in range(len(instance.nodes))], dag


def _values(sizes: Mapping[int, Mapping[int, int]]) -> Iterator[Value]:
    """What each source sends: once to each device, so targets of different size count as nested parts."""
    for source, targets in sorted(sizes.items()):
        before = 0
        for size in sorted(set(targets.values())):
            users = tuple(sorted(target for target, wanted in targets.items() if wanted >= size))
            yield Value(source, users, size - before)
            before = size


def _rows(kind: type[Any], rows: Any) -> list[Any]:
    """Objects of JSON as dataclasses; what is wrong with the keys is said for all of them."""
    known = {field.name for field in fields(kind)}
    needed = {field.name for field in fields(kind) if field.default is MISSING}
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
    def is_amount(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf

    for node in instance.nodes:
        for name in ("time", "memory", "activation_memory"):
            if not is_amount(value := getattr(node, name)):
                yield f"{name} {value!r} of node {node.name}, which must be a number of 0 or more"
    for edge in instance.edges:
        if not is_amount(edge.num_bytes):
            yield f"{edge.num_bytes!r} bytes of edge {edge.source} -> {edge.target}, which must be a number of 0 or more"
    for i, device in enumerate(instance.devices):
        if not is_amount(device.speed) or device.speed == 0:
            yield f"speed {device.speed!r} of device {i}, which must be a number above 0"
        if device.memory_limit is not None and not is_amount(device.memory_limit):
            yield f"memory limit {device.memory_limit!r} of device {i}, which must be a number of 0 or more, or None"
        if not isinstance(device.in_flight, int) or device.in_flight < 1:
            yield f"{device.in_flight!r} microbatches in flight on device {i}, which must be a whole number from 1"
    if not is_amount(instance.memory_weight) or instance.memory_weight > 1:
        yield f"memory weight {instance.memory_weight!r}, which must lie between 0 and 1"


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


def _listed(limits: Sequence[float | None]) -> str:
    """Limits of devices, one if they are all alike."""
    texts = ["none" if limit is None else f"{limit:g}" for limit in limits]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)
