"""How the ranks that share a sequence compute its attention, and which way is the cheapest for each.

    way          what travels                                       what it can do
    p2p          keys and values, from rank to rank in a ring       causal or not, padding of keys; no dropout
    all_gather   keys and values, to every rank at once             any mask
    a2a          slices of the sequence for slices of the heads     any mask; heads and key heads that the ranks divide
    auto         the cheapest of these

p2p overlaps: a step's transfer costs only the time by which it exceeds the step's work. Where a way does not apply, all_gather is used.
For p2p attention becomes `flash_attention` first (`smpc.codegen.rewrite.kernels`): key heads unrepeated, masks read as a triangle and
hidden keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from smpc.codegen.rewrite.context_parallel.rules import ATTENTION, EXCHANGE_WAY, can_exchange, heads, is_causal
from smpc.codegen.rewrite.kernels.graph import Graph, Refusal, Replacement, Rewrite
from smpc.codegen.rewrite.kernels.patterns import flash_attention
from smpc.codegen.rewrite.kernels.rewrite import rewrite_kernels
from smpc.codegen.rewrite.tensor_parallel.layout_problem import Weights
from smpc.codegen.rewrite.tensor_parallel.layouts import Kind
from smpc.codegen.rewrite.tensor_parallel.strategy import Facts, Strategy, argument, short_name
from smpc.config.planner import CONTEXT_METHODS
from smpc.tracer.ir import Node, Trace

METHODS = CONTEXT_METHODS
AUTO, P2P, ALL_GATHER, A2A = METHODS


def with_rings(trace: Trace, degree: int, method: str, weights: Weights) -> Trace:
    """The trace with those attentions as `flash_attention` that are to go around in a ring, and can."""
    attentions = [node for node in trace.nodes if short_name(node.target) == ATTENTION]
    if method not in (AUTO, P2P) or not attentions:
        return trace
    facts = Facts(trace, degree)
    wanted = frozenset(node.name for node in attentions if _cheapest_method(facts, node, method, weights) == P2P)
    if not wanted:
        return trace

    def find(graph: Graph) -> Iterator[Replacement | Refusal]:
        for proposal in flash_attention.REWRITE.find(graph):
            if isinstance(proposal, Replacement) and proposal.result in wanted and _can_ring(proposal, graph, degree):
                yield proposal

    return rewrite_kernels(trace, (Rewrite(flash_attention.REWRITE.op, find),)).trace


def ways_of(facts: Facts, method: str, weights: Weights) -> Mapping[str, str]:
    """By attention that does not go around in a ring: all_gather or a2a."""
    rest = ALL_GATHER if method == P2P else method
    nodes = (node for node in facts.trace.nodes if short_name(node.target) == ATTENTION)
    return {
        node.name: ALL_GATHER if (way := _cheapest_method(facts, node, rest, weights)) == P2P else way for node in nodes
    }


def fits(ways: Mapping[str, str], node: Node, strategy: Strategy) -> bool:
    """Whether a strategy shares an attention in the way that it has, if at all."""
    way = ways.get(node.name)
    if way is None or strategy.output.kind is not Kind.SHARDED or strategy.output.dim != _sequence_dim(node):
        return True
    return (strategy.way == EXCHANGE_WAY) == (way == A2A)


def _sequence_dim(node: Node) -> int:
    return len(node.spec.shape) - 2 if node.spec is not None else -1


def _can_ring(proposal: Replacement, graph: Graph, degree: int) -> bool:
    """Whether slices of this attention's queries and keys can go around."""
    call = proposal.calls[-1]
    lengths = [graph.shape(ref.name)[2] for ref in call.args[:2]]
    options = dict(call.kwargs)
    causal = bool(options.get("causal", False))
    equal = lengths[0] == lengths[1] and not options.get("causal_offset")
    distinct = len({ref.name for ref in call.args[:3]}) == 3
    return distinct and all(length % degree == 0 for length in lengths) and (equal or not causal)


def _cheapest_method(facts: Facts, node: Node, method: str, weights: Weights) -> str:
    """The cheapest way of those that there are, in bytes sent by a rank forward and backward; equal ones in this order."""
    if method == A2A:
        return A2A if can_exchange(facts, node) else ALL_GATHER
    if method != AUTO:
        return method
    names, spec = heads(node), node.spec
    if names is None or spec is None:
        return ALL_GATHER
    queries, keys, values = (facts.shape(name) for name in names)
    n, size = facts.degree, spec.torch_dtype.itemsize
    share = (n - 1) / n
    pair = size * (math.prod(keys) + math.prod(values))
    work = weights.per_flop * 4 * math.prod(queries) * keys[-2] / n * (0.5 if is_causal(node) else 1.0)
    costs = {ALL_GATHER: 2 * share * pair + 4 * weights.latency_bytes}
    if argument(node, 4, "dropout_p", 0.0) == 0.0:
        steps = (3 * n - 2) * weights.latency_bytes
        costs[P2P] = max(0.0, share * pair - work * share) + max(0.0, 2 * share * pair - 2.5 * work * share) + steps
    if can_exchange(facts, node):
        costs[A2A] = 2 * share * (size * math.prod(queries) + pair + spec.num_bytes) / n + 8 * weights.latency_bytes
    return min(costs, key=lambda way: (costs[way], METHODS.index(way)))
