"""The choice of strategies as a problem of numbers: what each operation may do, who uses what, and what that costs.

Terms
    part      a node with all that play its part in equal blocks, by the position of the first: they get the same strategy
    option    a strategy that a part may run by; a parameter's are layouts to lie in

Costs are in bytes sent by a rank, summed over a trace: the bytes of the conversions, `latency_bytes` for each collective, the work that
ranks repeat (as the bytes that could be sent meanwhile), and `state` for each byte of weights, gradients and optimizer state that a rank
holds beyond its share. The last comes first by far: tensor parallelism is asked for to split weights. Conversions are paid once
for each value and layout, whatever the number of users. A sharded parameter is used as it lies, never gathered: that would be another
kind of parallelism, which fully sharded data parallelism does better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from smpc.codegen.rewrite.blocks import representatives
from smpc.codegen.rewrite.rules import strategies
from smpc.codegen.rewrite.sharding import REPLICATED, Kind, Layout, Step, conversion, sent_bytes
from smpc.codegen.rewrite.strategy import Facts, Strategy
from smpc.errors import CodegenError
from smpc.tracer.ir import Node, NodeKind, TensorSpec, Trace

_COMPUTES = (NodeKind.CALL_FUNCTION, NodeKind.CALL_MODULE, NodeKind.SET_ATTR)
_FREE = 1e-3  # of a collective's latency: a step that sends nothing, so that of equal plans the shorter wins

Restriction = Callable[
    [Node, Strategy], bool
]  # whether a node may run by a strategy; of a parameter: lie in its output


@dataclass(frozen=True, slots=True)
class Weights:
    """What things cost, in bytes sent by a rank; by default those of one host of H100s."""

    state: float = 1000.0  # for a byte of a weight of two or more dimensions
    vector_state: float = 1.0  # for a byte of one of fewer
    latency_bytes: float = 2.0**20  # for a collective
    per_byte_moved: float = 0.13  # link bandwidth / memory bandwidth
    per_flop: float = 0.001  # link bandwidth / peak


@dataclass(slots=True)
class LayoutProblem:
    """The nodes that stand for all, what each may do, and who uses what."""

    trace: Trace
    facts: Facts
    weights: Weights
    part: tuple[int, ...]  # by position: the position of the representative
    options: dict[int, tuple[Strategy, ...]] = field(default_factory=dict)  # by position of a representative
    edges: dict[tuple[int, int, int], None] = field(default_factory=dict)  # (producer, user, index of the input)
    returned: dict[int, None] = field(default_factory=dict)  # must be whole
    count: Counter[int] = field(default_factory=Counter)

    def spec(self, position: int) -> TensorSpec | None:
        """The spec of a part's value; None for a tuple, whose layout cannot be changed."""
        return self.trace.nodes[position].spec

    def users(self) -> dict[int, list[tuple[int, int]]]:
        """By part whose value is used or returned: (user, index of the input)."""
        found: dict[int, list[tuple[int, int]]] = {}
        for producer, user, index in self.edges:
            found.setdefault(producer, []).append((user, index))
        return found | {part: [] for part in self.returned if part not in found}

    def option_cost(self, part: int, option: Strategy) -> float:
        """What a part's strategy costs by itself."""
        return _cost(self, part, option, self.weights)

    def conversion_cost(self, part: int, source: Layout, target: Layout) -> float | None:
        """What it costs to have a part's value in another layout than it is made in; None: it cannot be had."""
        spec = self.spec(part)
        if source == target:
            return 0.0
        if spec is None or (source.kind is Kind.SHARDED and self.trace.nodes[part].kind is NodeKind.GET_ATTR):
            return None
        steps = conversion(source, target, spec, self.facts.degree)
        return None if steps is None else self.count[part] * _steps_cost(steps, spec, self.facts.degree, self.weights)


def collect(trace: Trace, degree: int, allowed: Restriction, weights: Weights, share_blocks: bool) -> LayoutProblem:
    """The problem of a trace. Raises CodegenError if nothing is allowed for some operation."""
    facts = Facts(trace, degree)
    problem = LayoutProblem(
        trace, facts, weights, representatives(trace) if share_blocks else tuple(range(len(trace.nodes)))
    )
    whole_only, live = _aliases_of_written(trace), trace.live | _reads(trace)
    for position, node in enumerate(trace.nodes):
        if node.name in facts.constants or node.kind is NodeKind.PLACEHOLDER or node.name not in live:
            continue
        part = problem.part[position]
        problem.count[part] += 1
        if node.kind in _COMPUTES:
            for index, name in enumerate(node.inputs):
                if name not in facts.constants:
                    problem.edges[problem.part[trace.position(name)], part, index] = None
            known = problem.options[part] if part in problem.options else strategies(facts, node)
            if node.name in whole_only:
                known = known[:1]
            problem.options[part] = tuple(option for option in known if allowed(node, option))
    problem.returned.update(
        (problem.part[trace.position(name)], None) for name in trace.output_names if name not in facts.constants
    )
    _add_parameters(problem, allowed)
    empty = [trace.nodes[part].name for part, options in problem.options.items() if not options]
    if empty:
        raise CodegenError(
            f"expected a way to share every operation, found none for {', '.join(empty[:5])}; relax the plan"
        )
    return problem


def _reads(trace: Trace) -> frozenset[str]:
    return frozenset(node.name for node in trace.nodes if node.kind is NodeKind.GET_ATTR)


def _add_parameters(problem: LayoutProblem, allowed: Restriction) -> None:
    """A parameter lies whole, or sharded as one of its users wants it."""
    for position, node in enumerate(problem.trace.nodes):
        if node.kind is not NodeKind.GET_ATTR or position not in problem.count:
            continue
        wanted = dict.fromkeys([REPLICATED])
        for producer, user, index in problem.edges:
            if producer == position:
                wanted.update(dict.fromkeys(option.inputs[index] for option in problem.options[user]))
        layouts = [layout for layout in wanted if layout.kind in (Kind.REPLICATED, Kind.SHARDED)]
        options = (Strategy((), layout) for layout in layouts)
        problem.options[position] = tuple(option for option in options if allowed(node, option))


def _aliases_of_written(trace: Trace) -> frozenset[str]:
    """Nodes that make or read memory which is written afterwards: a copy in another layout would miss the writing."""
    last_write: dict[int, int] = {}
    for position, node in enumerate(trace.nodes):
        for name in node.mutates:
            last_write[trace.node(name).storage] = position
    found = []
    for position, node in enumerate(trace.nodes):
        storages = [node.storage, *(trace.node(name).storage for name in node.inputs)]
        if any(storage >= 0 and last_write.get(storage, -1) >= position for storage in storages):
            found.append(node.name)
    return frozenset(found)


def _steps_cost(steps: Sequence[Step], spec: TensorSpec, degree: int, weights: Weights) -> float:
    total = 0.0
    for step in steps:
        collectives = (step.forward > 0) + (step.backward > 0)
        total += sum(sent_bytes(step, spec, degree)) + weights.latency_bytes * (collectives or _FREE)
    return total


def _cost(problem: LayoutProblem, part: int, option: Strategy, weights: Weights) -> float:
    """What a node's strategy costs by itself: repeated work, what it sends inside, and state beyond the rank's share."""
    node, excess = problem.trace.nodes[part], 1.0 - 1.0 / problem.facts.degree
    if node.kind is NodeKind.GET_ATTR:
        return (
            0.0
            if option.output.kind is Kind.SHARDED or node.spec is None
            else excess * _state_cost(problem, part, weights)
        )
    work = max(node.bytes_moved * weights.per_byte_moved, node.flops * weights.per_flop)
    backward = 2.0 if problem.facts.requires_grad(node.name) else 0.0
    cost = 0.0 if option.divides_work else excess * work * (1.0 + backward)
    cost += sum(num_bytes + weights.latency_bytes for num_bytes in option.sent)
    if node.kind is NodeKind.CALL_MODULE and not option.state:
        inside = [s for s in problem.trace.state if s.is_parameter and s.name.startswith(f"{node.target}.")]
        cost += excess * sum(_state_bytes(s.spec) * weights.state for s in inside)
    return problem.count[part] * cost


def _state_cost(problem: LayoutProblem, part: int, weights: Weights) -> float:
    spec = problem.spec(part)
    assert spec is not None
    each = weights.state if len(spec.shape) > 1 else weights.vector_state
    return problem.count[part] * each * _state_bytes(spec)


def _state_bytes(spec: TensorSpec) -> int:
    """Bytes of a parameter with its gradient and two float32 moments."""
    return spec.num_bytes + (spec.num_bytes + 8 * spec.num_elements if spec.requires_grad else 0)
