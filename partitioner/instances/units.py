"""Nodes that share a device as one unit, the order that a split keeps, and transfers between units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import networkx as nx

from smpc.partitioner.instances.instance import Instance
from smpc.partitioner.problem import in_proportion
from smpc.partitioner.solvers.ilp import Value


@dataclass(frozen=True, slots=True)
class Found:
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
