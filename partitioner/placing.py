"""A placement of all units from the prefixes of a lattice: the best that several bounds lead to.

For a bound on the stages, `smpc.partitioner.lattice` says where the units that it keeps run; the fluid ones are then
placed whole, from the last stage to the first: each runs as late as it may, on the stage of what depends on it if the
bound allows, else earlier, so that little is sent ahead of its use. Units of several uses do not fit exactly, so some
larger bounds are tried too, and the best placement counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np

from smpc.partitioner.lattice import Lattice, best_chain, build_lattice, chain_stages
from smpc.partitioner.problem import Scale, Units, stage_costs

_LARGER = (0.0, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05)  # bounds that are tried, beyond the smallest one


@dataclass(frozen=True, slots=True)
class Placed:
    """A placement and its largest stage cost."""

    stage_of: tuple[int, ...]  # by unit
    bottleneck: float


def place(
    units: Units, dag: nx.DiGraph[int], scale: Scale, in_flight: Sequence[int], low: float, high: float
) -> Placed | None:
    """A placement with a bottleneck below `high` (finite); None if none is found. `low` is a proven bound."""
    lattice = build_lattice(units, dag, scale, in_flight)
    if lattice is None:
        return None
    smallest = best_chain(lattice, scale, in_flight, low, high)
    best: Placed | None = None
    for larger in _LARGER:
        bound = smallest.possible * (1.0 + larger)
        if bound >= (high if best is None else best.bottleneck):
            break
        stages = chain_stages(lattice, scale, in_flight, bound)
        if stages is None:
            continue
        found = _complete(units, dag, lattice, stages, scale, in_flight, bound)
        cost = float(stage_costs(units, scale, in_flight, found).max())
        if cost < (high if best is None else best.bottleneck) and len(set(found)) == len(in_flight):
            best = Placed(found, cost)
    return best


class _Load:
    """What a stage holds so far."""

    def __init__(self, units: Units, using: Sequence[Sequence[int]], scale: Scale, stage: int, in_flight: int) -> None:
        self.units, self.using, self.scale, self.stage, self.in_flight = units, using, scale, stage, in_flight
        self.time = self.memory = 0
        self.items: set[int] = set()

    def after(self, unit: int) -> tuple[int, int]:
        """Time and memory with one unit more."""
        units = self.units
        memory = self.memory + units.static_bytes[unit] + self.in_flight * units.activation_bytes[unit]
        for k in self.using[unit]:
            if k not in self.items:
                memory += units.shared[k].static_bytes + self.in_flight * units.shared[k].activation_bytes
        return self.time + units.time[unit], memory

    def add(self, unit: int) -> None:
        """Run the unit here."""
        self.time, self.memory = self.after(unit)
        self.items.update(self.using[unit])

    def fits(self, unit: int, bound: float) -> bool:
        """Whether the stage stays within the bound."""
        time, memory = self.after(unit)
        return bool(self.scale.cost_on(self.stage, np.asarray([time]), np.asarray([memory]))[0] <= bound)


def _complete(
    units: Units,
    dag: nx.DiGraph[int],
    lattice: Lattice,
    stages: Sequence[int],
    scale: Scale,
    in_flight: Sequence[int],
    bound: float,
) -> tuple[int, ...]:
    """Stages of all units, those of the lattice given."""
    using = units.items_of()
    loads = [_Load(units, using, scale, stage, held) for stage, held in enumerate(in_flight)]
    placed = dict(zip(lattice.kept, stages, strict=True))
    for unit, stage in placed.items():
        loads[stage].add(unit)
    order = list(nx.lexicographical_topological_sort(dag))
    earliest: dict[int, int] = {}
    for unit in order:
        earliest[unit] = placed.get(unit, max((earliest[other] for other in dag.predecessors(unit)), default=0))
    place_of = {unit: i for i, unit in enumerate(order)}
    waiting = sorted((u for u in order if u not in placed), key=lambda u: (-earliest[u], -place_of[u]))
    for stage in reversed(range(len(in_flight))):
        left = []
        for unit in waiting:
            ready = all(placed.get(other, -1) >= stage for other in dag.successors(unit))
            if ready and (earliest[unit] == stage or loads[stage].fits(unit, bound)):
                placed[unit] = stage
                loads[stage].add(unit)
            else:
                left.append(unit)
        waiting = left
    return tuple(placed[unit] for unit in range(len(units)))
