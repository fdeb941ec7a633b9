"""Memory of a rank whose whole model runs as it is, with parameters in parts that blocks gather for themselves (`fully_shard`).

The stages of a pipeline gather all that they have in their first forward (`smpc.partitioner.memory.peak`). Without a pipeline each unit
does so: the repeated blocks, and the model with what is in none of them. `smpc.sharding.units` finds them in the model, `traced_units` here
by the calls of a trace, for predictions of memory and of time. Experts that ranks divide are units of their own inside of their blocks.
How long a unit stays whole:

    step          to the end of its last backward; whole gradients add up, and are averaged there. Units of small parameters
    microbatch    from its forward to its backward; gradients are averaged in each backward, and parts of them add up
    never         while it runs, and while the unit behind it in a backward does, which has it gathered ahead; likewise

With n over the nodes, the most is one of

    forward      activations up to n + what lives at n + whole units + gradients of earlier microbatches; where a unit begins, also what
                 all ranks have sent, from which the whole was copied
    backward     activations up to n + what lives at n + whole units + gradients: of a unit those that exist at n, beside the parts of
                 those that are done; and what the unit before has sent for its average, which is let go of with the next
    averaging    behind a unit: activations in front of it + the gradient of its input + its gradients twice, and over gloo the rank's
                 part + whole units that are left
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from smpc.config.keep import Keep, keep_of
from smpc.partitioner.costs.node_costs import CostModel
from smpc.partitioner.graph.trace_graph import Graph
from smpc.partitioner.stage_costs import IntArray
from smpc.tracer.ir import NodeKind, Trace


def repeated_blocks(trace: Trace) -> tuple[str, ...]:
    """Names of the repeated blocks, in order of execution: calls of one class in one list, and not inside another block."""
    lists: dict[tuple[str, str], dict[str, None]] = {}
    for call in trace.calls:
        around, _, name = call.fqn.rpartition(".")
        if name.isdecimal():
            lists.setdefault((around, call.class_name), {})[call.fqn] = None
    repeated = {name for names in lists.values() if len(names) > 1 for name in names}
    return tuple(
        name
        for name in dict.fromkeys(call.fqn for call in trace.calls)
        if name in repeated and not any(name.startswith(f"{other}.") for other in repeated)
    )


@dataclass(frozen=True, slots=True)
class TracedUnit:
    """A unit that runs from position `first` to `last`. `state`: its parameters; `is_apart`: in parts on fewer ranks than others."""

    name: str
    first: int
    last: int
    state: tuple[int, ...]
    keep: Keep
    is_apart: bool = False


def traced_units(
    trace: Trace,
    positions: Sequence[int],
    state: Sequence[int],
    limits: tuple[int, int],
    apart: Collection[str] = (),
) -> list[TracedUnit]:
    """The units that have some of these parameters, in the order in which they end, the model last, in a run of the nodes at `positions`.

    `limits`: of small parameters, and of models that stay whole, in elements; `apart`: names of parameters that fewer ranks hold.
    """
    runs = frozenset(positions)
    spans: dict[str, list[int]] = {name: [] for name in repeated_blocks(trace)}
    for call in trace.calls:
        if call.fqn in spans:
            spans[call.fqn] += [position for position in range(call.first, call.last) if position in runs]
    blocks = {name: (min(found), max(found)) for name, found in spans.items() if found}
    whole = (min(positions, default=0), max(positions, default=0))
    parameters = [i for i in state if trace.state[i].is_parameter]
    held: dict[tuple[str, bool], list[int]] = {}
    for i in parameters:
        around = {_unit_of(name, blocks) for name in trace.state[i].names}
        name = "" if len(around) > 1 else around.pop()
        held.setdefault((name, trace.state[i].name in apart), []).append(i)
    total = sum(trace.state[i].spec.num_elements for i in parameters)
    calls = [position for position in positions if trace.nodes[position].kind is NodeKind.CALL_MODULE]
    found = []
    for (name, is_apart), own in held.items():
        first, last = blocks.get(name, whole)
        if is_apart:
            first, last = _span_of_experts(trace, own, calls) or (first, last)
        largest = max(trace.state[i].spec.num_elements for i in own)
        found.append(TracedUnit(name, first, last, tuple(own), keep_of(largest, total, *limits), is_apart))
    return sorted(
        found, key=lambda unit: (not unit.name and not unit.is_apart, unit.last, not unit.is_apart, unit.first)
    )


def _span_of_experts(trace: Trace, state: Sequence[int], calls: Sequence[int]) -> tuple[int, int] | None:
    """The first and the last of the modules with these parameters that are called whole; None: none is. `calls`: of all such modules."""
    modules = {name[:end] for i in state for name in trace.state[i].names for end in _dots(name)}
    found = [position for position in calls if trace.nodes[position].target in modules]
    return (min(found), max(found)) if found else None


def _dots(name: str) -> list[int]:
    return [end for end, letter in enumerate(name) if letter == "."]


@dataclass
class UnitBytes:
    """Bytes of one unit, which runs the nodes from index `first` to `last`.

    `exists`: by node, the gradients of its parameters that exist once its backward works, if none did before; `added`: those that are being
    added to earlier ones.
    """

    first: int
    last: int
    keep: Keep = Keep.NEVER
    state: list[int] = field(default_factory=list)
    whole: int = 0  # parameters
    gradients: int = 0
    parts: int = 0  # of gradients
    averaging: int = 0
    exists: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    added: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def adds_up(self) -> bool:
        """Whether its gradients add up until the step's last backward."""
        return self.keep is Keep.STEP


def find_units(graph: Graph, cost_model: CostModel, positions: Sequence[int], state: Sequence[int]) -> list[UnitBytes]:
    """The bytes of `traced_units`; they run the nodes of these indices into `positions`."""
    trace = graph.trace
    index = {position: i for i, position in enumerate(positions)}
    found = []
    for unit in traced_units(trace, positions, state, cost_model.units or (0, 0), cost_model.apart):
        own = [trace.state[i] for i in unit.state]
        held = UnitBytes(index.get(unit.first, 0), index.get(unit.last, 0), unit.keep, list(unit.state))
        held.whole = sum(map(cost_model.gathered_bytes, own))
        held.gradients = sum(map(cost_model.gradient_bytes, own))
        held.parts = sum(-(-cost_model.gradient_bytes(each) // cost_model.optimizer_of(each).shards) for each in own)
        held.averaging = sum(map(cost_model.averaging_bytes, own))
        found.append(held)
    return found


def _unit_of(name: str, units: Iterable[str]) -> str:
    return next((unit for unit in units if name.startswith(f"{unit}.")), "")


class UnitTerms(NamedTuple):
    """By node, of a microbatch: held when its forward has run, and at work in it; at work in its backward, and before that."""

    held: IntArray
    forward: IntArray
    backward: IntArray
    before: IntArray


def peak_of_units(units: Sequence[UnitBytes], terms: UnitTerms, num_microbatches: int) -> int:
    """The most bytes in a step, beyond the parts of parameters, optimizer state and buffers."""
    if not len(terms.held) or not units:
        return int(max(terms.forward.max(initial=0), terms.backward.max(initial=0)))
    last = num_microbatches - 1
    kinds = {(number == 0, number == last) for number in (0, 1, last) if number <= last}
    return max(peak for kind in sorted(kinds) for peak in _Microbatch(units, terms, *kind).peaks())


@dataclass(frozen=True)
class _Microbatch:
    """The first, last or another one of a step."""

    units: Sequence[UnitBytes]
    terms: UnitTerms
    is_first: bool
    is_last: bool

    def peaks(self) -> Iterator[int]:
        """The most in its forward, its backward, and behind each unit."""
        nodes = np.arange(len(self.terms.held))
        left = 0 if self.is_first else sum(unit.gradients if unit.adds_up else unit.parts for unit in self.units)
        forward = self.terms.forward + sum(self._whole_forward(unit, nodes) for unit in self.units) + left
        yield int(forward.max())
        for unit in self.units:
            if self.is_first or not unit.adds_up:
                yield int(forward[unit.first]) + unit.whole
        beside = sum(self._whole_backward(i, nodes) + self._gradients(unit, nodes) for i, unit in enumerate(self.units))
        yield int((self.terms.backward + beside + self._sent(nodes)).max())
        for i, unit in enumerate(self.units):
            if self._averages(unit):
                yield self._behind(i)

    def _averages(self, unit: UnitBytes) -> bool:
        return self.is_last or not unit.adds_up

    def _whole_forward(self, unit: UnitBytes, nodes: IntArray) -> IntArray:
        if unit.adds_up and not self.is_first:
            return np.full_like(nodes, unit.whole)
        ends = unit.last if unit.keep is Keep.NEVER else len(nodes)
        return unit.whole * ((unit.first <= nodes) & (nodes <= ends))

    def _whole_backward(self, number: int, nodes: IntArray) -> IntArray:
        """One that is let go of after its forward is gathered again when the backward of the one behind it begins."""
        unit = self.units[number]
        if not self._averages(unit):
            return np.full_like(nodes, unit.whole)
        ends = len(nodes)
        if unit.keep is Keep.NEVER:
            ends = max(unit.last, *(other.last for other in self.units[number + 1 : number + 2]), unit.last)
        return unit.whole * ((unit.first <= nodes) & (nodes <= ends))

    def _gradients(self, unit: UnitBytes, nodes: IntArray) -> IntArray:
        """The gradients that exist, and what is being added to them; parts once that is done."""
        earlier = 0 if self.is_first else unit.gradients if unit.adds_up else unit.parts
        own = unit.added if unit.adds_up and not self.is_first else unit.exists
        return np.where((unit.first <= nodes) | (not self._averages(unit)), earlier + own, unit.parts)

    def _sent(self, nodes: IntArray) -> IntArray:
        """What the unit that was done last has sent."""
        found = np.zeros_like(nodes)
        for unit in sorted(self.units, key=lambda unit: -unit.first):
            if self._averages(unit):
                found = np.where(nodes < unit.first, unit.gradients, found)
        return found

    def _behind(self, number: int) -> int:
        """While the gradients of a unit are averaged, in front of its first node."""
        unit, at = self.units[number], self.units[number].first
        others = [(i, other) for i, other in enumerate(self.units) if i != number]
        parts = 0 if self.is_first or unit.adds_up else unit.parts
        if at == 0:  # all others are done
            rest = sum(o.parts if self._averages(o) else o.whole + o.gradients for _, o in others)
            return parts + unit.averaging + rest
        place = np.arange(len(self.terms.held))
        rest = sum(int((self._whole_backward(i, place) + self._gradients(o, place))[at - 1]) for i, o in others)
        return int(self.terms.held[at - 1] + self.terms.before[at - 1]) + parts + unit.averaging + rest
