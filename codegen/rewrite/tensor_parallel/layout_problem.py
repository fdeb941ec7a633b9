"""The choice of strategies as a numeric problem, and the parts of a trace that decide alike: equal blocks, and iterations of loops.

The problem has the strategies of each operation, the users of each value, and costs.

Terms
    part      a node with all that play its part in equal blocks, by the position of the first: they get the same strategy
    option    a strategy that a part may run by; a parameter's are layouts that it may have

Costs are in bytes sent by a rank, summed over a trace: the bytes of the conversions, `latency_bytes` for each collective, the work that
ranks repeat (as the bytes that could be sent meanwhile), and `state` for each byte of weights, gradients and optimizer state that a rank
holds beyond its share. The last has by far the largest weight: the purpose of tensor parallelism is to split weights. Conversions are
paid once for each value and layout, whatever the number of users. A sharded parameter is used in its layout, never gathered: gathering
is a job for fully sharded data parallelism, which does it better.

Equal blocks (`representatives`): what is decided for one layer is decided for all that equal it.

Two module calls are equal if their nodes agree one by one: same operations, constants and specs, the same values inside, values from
outside in the same order and with the same specs, parameters of the same names below the module. They count as equal blocks if their
names differ in numbers alone (`h.0` and `h.1`, not `q` and `k`) and they call modules themselves: the layers of one feed-forward network
must be able to differ even if they are equal. The outermost of nested calls count.

    >>> representatives(trace)            # doctest: +SKIP
    (0, 1, 2, 3, 2, 3, 2, 3, 8)           # nodes 2 and 3 are a block; it comes again at 4 and at 6

Equal iterations (`iterations`) of a loop that a model's Python unrolled: what is decided for one is decided for all.

The scan of a state-space model is one such loop: `state = decay[:, :, i] * state + update[:, :, i]`, for every position i of the sequence.

Nodes first, first + 1, ... are an iteration of `length` nodes if the next `length` nodes are the same again: same operations on values of
the same specs, the same constants but for numbers that index, and the same values, counted from the start of the iteration if they are in
this one or the one before, by name otherwise. Strategies must be the same, too. The first iteration takes its state from elsewhere, so
the second one represents the others; nodes that read parameters are in no loop.

    >>> iterations(trace, facts, range(40))            # doctest: +SKIP
    {12: 6, 13: 7, 14: 8, 18: 6, ...}                  # nodes 12 to 17 and 18 to 23 are what nodes 6 to 11 are
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from smpc.codegen.rewrite.tensor_parallel.layouts import (
    BROADCAST,
    REPLICATED,
    CollectiveStep,
    Layout,
    LayoutKind,
    conversion,
    sent_bytes,
)
from smpc.codegen.rewrite.tensor_parallel.rules import strategies
from smpc.codegen.rewrite.tensor_parallel.strategy import Facts, Strategy, draws
from smpc.errors import CodegenError
from smpc.tracer.constants import map_references
from smpc.tracer.ir import ModuleCall, Node, NodeKind, TensorSpec, Trace
from smpc.tracer.targets import GETITEM, SETITEM

_COMPUTES = (NodeKind.CALL_FUNCTION, NodeKind.CALL_MODULE, NodeKind.SET_ATTR)
_FREE = 1e-3  # of a collective's latency: a step that sends nothing, so the shorter of equal plans wins

Restriction = Callable[
    [Node, Strategy], bool
]  # whether a node may run by a strategy; of a parameter: have the layout of its output


@dataclass(frozen=True, slots=True)
class Weights:
    """Costs, in bytes sent by a rank; the defaults are for one host of H100s."""

    state: float = 1000.0  # for a byte of a weight of two or more dimensions
    vector_state: float = 1.0  # for a byte of one of fewer
    latency_bytes: float = 2.0**20  # for a collective
    per_byte_moved: float = 0.13  # link bandwidth / memory bandwidth
    per_flop: float = 0.001  # link bandwidth / peak
    activation: float = 0.0  # for a byte of a result that a rank has beyond its share
    sums_gradients: bool = True  # whether summing up the gradient of a whole parameter over the ranks costs anything


@dataclass(slots=True)
class LayoutProblem:
    """The representative nodes, the strategies of each, and the users of each value."""

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
        """The cost of a part's strategy alone."""
        return _layout_option_cost(self, part, option, self.weights)

    def conversion_cost(self, part: int, source: Layout, target: Layout) -> float | None:
        """The cost of converting a part's value to another layout; None: impossible."""
        spec = self.spec(part)
        if source == target:
            return 0.0
        if spec is None or (source.kind is LayoutKind.SHARDED and self.trace.nodes[part].kind is NodeKind.GET_ATTR):
            return None
        if target == BROADCAST and not self.weights.sums_gradients and self.trace.nodes[part].kind is NodeKind.GET_ATTR:
            return 0.0
        steps = conversion(source, target, spec, self.facts.degree)
        return None if steps is None else self.count[part] * _steps_cost(steps, spec, self.facts.degree, self.weights)


def collect(
    trace: Trace,
    degree: int,
    allowed: Restriction,
    weights: Weights,
    share_blocks: bool,
    facts: Facts | None = None,
) -> LayoutProblem:
    """The problem of a trace. Raises CodegenError if nothing is allowed for some operation."""
    facts = facts or Facts(trace, degree)
    parts = _parts_of_layout_problem(trace, facts) if share_blocks else tuple(range(len(trace.nodes)))
    problem = LayoutProblem(trace, facts, weights, parts)
    whole_only, live = _aliases_of_written(trace), trace.live | _reads_in_layout_problem(trace)
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
            if node.name in whole_only or (facts.draws_whole and draws(node)):
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


def _parts_of_layout_problem(trace: Trace, facts: Facts) -> tuple[int, ...]:
    """By position, the representative of a node: in the first of equal blocks, the second of equal iterations."""
    blocks = representatives(trace)
    first = [p for p, node in enumerate(trace.nodes) if blocks[p] == p and node.name not in facts.constants]
    loops = iterations(trace, facts, first)
    return tuple(loops.get(part, part) for part in blocks)


def _reads_in_layout_problem(trace: Trace) -> frozenset[str]:
    return frozenset(node.name for node in trace.nodes if node.kind is NodeKind.GET_ATTR)


def _add_parameters(problem: LayoutProblem, allowed: Restriction) -> None:
    """A parameter is whole, or sharded as one of its users needs it; it is whole if a module that is called whole also reads it."""
    for position, node in enumerate(problem.trace.nodes):
        if node.kind is not NodeKind.GET_ATTR or position not in problem.count:
            continue
        wanted = dict.fromkeys([REPLICATED])
        for producer, user, index in problem.edges:
            if producer == position:
                wanted.update(dict.fromkeys(option.inputs[index] for option in problem.options[user]))
        may_shard = node.target not in problem.facts.read_inside
        layouts = [
            layout for layout in wanted if layout == REPLICATED or (layout.kind is LayoutKind.SHARDED and may_shard)
        ]
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


def _steps_cost(steps: Sequence[CollectiveStep], spec: TensorSpec, degree: int, weights: Weights) -> float:
    total = 0.0
    for step in steps:
        collectives = (step.forward > 0) + (step.backward > 0)
        total += sum(sent_bytes(step, spec, degree)) + weights.latency_bytes * (collectives or _FREE)
    return total


def _layout_option_cost(problem: LayoutProblem, part: int, option: Strategy, weights: Weights) -> float:
    """The cost of a node's strategy alone: repeated work, bytes sent inside, and state beyond the rank's share."""
    node, excess = problem.trace.nodes[part], 1.0 - 1.0 / problem.facts.degree
    if node.kind is NodeKind.GET_ATTR:
        return (
            0.0
            if option.output.kind is LayoutKind.SHARDED or node.spec is None
            else excess * _state_cost(problem, part, weights)
        )
    work = max(node.bytes_moved * weights.per_byte_moved, node.flops * weights.per_flop)
    backward = 2.0 if problem.facts.requires_grad(node.name) else 0.0
    cost = 0.0 if option.divides_work else excess * work * (1.0 + backward)
    if node.spec is not None and option.output.kind is not LayoutKind.SHARDED:
        cost += excess * node.spec.num_bytes * weights.activation
    cost += sum(num_bytes + weights.latency_bytes for num_bytes in (*option.sent, *option.sent_back))
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


def representatives(trace: Trace) -> tuple[int, ...]:
    """For each node, by position, the position of the first one that plays its part."""
    found = list(range(len(trace.nodes)))
    composite = dict.fromkeys(call.parent for call in trace.calls)
    signatures = [
        _signature_of_equal_layouts(trace, call) if index in composite else "" for index, call in enumerate(trace.calls)
    ]
    count = Counter(signatures)
    first_of: dict[str, ModuleCall] = {}
    end = 0
    for call, signature in zip(trace.calls, signatures, strict=True):
        if not signature or count[signature] < 2 or call.first < end or call.first == call.last:
            continue
        end = call.last
        first = first_of.setdefault(signature, call)
        for offset in range(call.last - call.first):
            found[call.first + offset] = first.first + offset
    return tuple(found)


def _signature_of_equal_layouts(trace: Trace, call: ModuleCall) -> str:
    outside: dict[str, int] = {}
    span = range(call.first, call.last)

    def named(name: str) -> Any:
        position = trace.position(name)
        if position in span:
            return position - call.first
        return "outside", outside.setdefault(name, len(outside)), _spec(trace.node(name))

    rows = []
    for node in trace.nodes[call.first : call.last]:
        target = node.target
        if node.kind in (NodeKind.GET_ATTR, NodeKind.SET_ATTR, NodeKind.CALL_MODULE):
            target = target.removeprefix(f"{call.fqn}.")
        arguments = map_references((node.args, dict(node.kwargs)), named)
        rows.append(repr((node.kind.value, target, arguments, _spec(node), bool(node.mutates), node.grad_enabled)))
    return "\n".join([re.sub(r"\d+", "*", call.fqn), call.class_name, *rows])


def _spec(node: Node) -> Any:
    return None if node.spec is None else (node.spec.shape, node.spec.dtype, node.spec.requires_grad)


_LEAST = 3  # iterations that make a loop
_LONGEST = 256  # nodes of an iteration
_TRIES = 16  # lengths that are tried for an iteration from one node on


def iterations(trace: Trace, facts: Facts, positions: Sequence[int]) -> dict[int, int]:
    """Maps the positions of nodes of a loop's third and later iterations to positions in the second; among `positions`, which ascend."""
    nodes = [trace.nodes[position] for position in positions]
    kinds = [_kind_of_layout_node(facts, node) for node in nodes]
    index = {node.name: i for i, node in enumerate(nodes)}
    found: dict[int, int] = {}
    start = 0
    while start < len(nodes):
        end = start + 1
        for length in _lengths_of_layout_iterations(kinds, start):
            count = _count_of_layout_iterations(facts, nodes, kinds, index, start, length)
            if count >= _LEAST:
                end = start + count * length
                second = start + length
                found |= {positions[i]: positions[second + (i - second) % length] for i in range(second + length, end)}
                break
        start = end
    return found


def _kind_of_layout_node(facts: Facts, node: Node) -> Hashable:
    """A node's operation without its operands: equal for nodes that may correspond in two iterations."""
    spec = None if node.spec is None else (node.spec.shape, node.spec.dtype, node.spec.requires_grad)
    arguments = map_references((node.args, dict(node.kwargs)), lambda name: _spec_of(facts, name))
    return repr(
        (node.kind.value, node.target, _unnumbered(node, arguments), spec, len(node.mutates), node.grad_enabled)
    )


def _spec_of(facts: Facts, name: str) -> Any:
    spec = facts.spec(name)
    return None if spec is None else ("value", spec.shape, spec.dtype, spec.requires_grad)


def _unnumbered(node: Node, arguments: Any) -> Any:
    """An index without its numbers, which count the iterations."""
    return re.sub(r"\b\d+\b", "*", repr(arguments)) if node.target in (GETITEM, SETITEM) else arguments


def _lengths_of_layout_iterations(kinds: Sequence[Hashable], start: int) -> Iterator[int]:
    """After how many nodes the same seems to come again."""
    ends = range(start + 1, min(start + _LONGEST, len(kinds) - 1) + 1)
    again = (i - start for i in ends if kinds[i] == kinds[start])
    return (
        length
        for length in itertools.islice(again, _TRIES)
        if kinds[start : start + length] == kinds[start + length : start + 2 * length]
    )


def _count_of_layout_iterations(
    facts: Facts, nodes: Sequence[Node], kinds: Sequence[Hashable], index: dict[str, int], start: int, length: int
) -> int:
    """How many equal iterations there are, the first with what it takes from elsewhere."""
    block = kinds[start : start + length]
    second: list[Any] | None = None
    for count in itertools.count(1):
        begin = start + count * length
        if kinds[begin : begin + length] != block:
            return count
        own = nodes[begin : begin + length]
        form = [(_references(facts, node, index, begin, length), _strategies(facts, node)) for node in own]
        if second is not None and form != second:
            return count
        second = form
    raise AssertionError("a trace has an end")


def _references(facts: Facts, node: Node, index: dict[str, int], begin: int, length: int) -> tuple[Any, ...]:
    """The operands of a node of the iteration that begins there."""

    def form(name: str) -> Any:
        if name in facts.constants:
            return "constant"
        place = index.get(name, -1) - begin
        return place if -length <= place < length and name in index else name

    return tuple(form(name) for name in node.inputs)


def _strategies(facts: Facts, node: Node) -> Any:
    return strategies(facts, node) if node.kind in (NodeKind.CALL_FUNCTION, NodeKind.CALL_MODULE) else ()
