"""Which values a stage computes again instead of receiving them.

An input-only value (see `smpc.partitioner.clusters`) may be recomputed by any stage. Its cone is every node that this
takes: the value, what it is computed from, and the in-place writes among them. It is recomputed when that is quicker
than sending it:

    sum over the cone of (forward time + kernel overhead) + time to send the model inputs that the cone reads
        <= time to send the value                    (latencies left out for the inputs: they share one message)

Masks and positions pass easily: memory is some sixty times faster than a link, and a message costs fifty small
kernels. The decision depends on the value alone, not on the cut, so it is the same for every plan.
"""

from __future__ import annotations

from smpc.partitioner.clusters import Clusters
from smpc.partitioner.cost import CostModel
from smpc.partitioner.graph import Graph
from smpc.tracer.ir import NodeKind, TensorSpec


def find_recomputable(graph: Graph, clusters: Clusters, cost_model: CostModel) -> dict[int, tuple[int, ...]]:
    """The cone of each value that is recomputed where it is needed, as positions in execution order."""
    found: dict[int, tuple[int, ...]] = {}
    for position in graph.compute.tolist():
        spec = graph.trace.nodes[position].spec
        if clusters.input_only[position] and spec is not None:
            cone = _cheap_cone(graph, clusters, cost_model, position, spec)
            if cone is not None:
                found[position] = cone
    return found


def _cheap_cone(
    graph: Graph, clusters: Clusters, cost_model: CostModel, position: int, spec: TensorSpec
) -> tuple[int, ...] | None:
    """The cone, or None as soon as it takes longer than sending the value."""
    budget = cost_model.transfer_time(spec.num_bytes)
    seen, pending = {position}, [position]
    while pending:
        current = pending.pop()
        node = graph.trace.nodes[current]
        if node.kind is NodeKind.PLACEHOLDER:
            assert node.spec is not None, f"model input {node.name} is not a tensor"
            budget -= node.spec.num_bytes / cost_model.link_bandwidth
        elif graph.is_compute(current):
            dtype = node.spec.dtype if node.spec is not None else "float32"
            is_view = node.bytes_moved == 0 and node.flops == 0
            budget -= cost_model.forward_time(node, dtype) + (0.0 if is_view else cost_model.kernel_overhead)
        if budget < 0:
            return None
        for other in (*graph.inputs[current], *clusters.writers.get(current, ())):
            if other not in seen:
                seen.add(other)
                pending.append(other)
    return tuple(sorted(i for i in seen if graph.is_compute(i)))
