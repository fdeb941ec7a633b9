"""What microbatches take at least, by one that was recorded: bounds for searches, which no plan of the same cost model is below.

A microbatch of k times the size has as many operations, k times the FLOPs and k times the bytes of activations. Ranks that share it divide
each of these by their number at best. So an operation takes at least

    k a / t / c  +  b / t / e              t tensor-parallel, c context-parallel and e expert-parallel ranks
    a   its FLOPs and activations          at the best rate that kernels reach at any size: small ones are slower
    b   its parameters                     read where it has no FLOPs, and written as gradients

and, where nothing is rewritten (t = c = 1), the launch of a kernel. What does not depend on the batch counts for nothing, for it may
be computed once; nor does what no output is made from, nor what modules that are called whole do, but for their FLOPs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from smpc.partitioner.costs.cost import (
    ATTENTION_BACKWARD,
    CostedNode,
    CostModel,
    Product,
    attention_flops,
    costed_nodes,
    is_attention,
    name_of,
    product_of,
    weight_gradient_bytes,
)
from smpc.partitioner.costs.device import best_share
from smpc.partitioner.problem import FloatArray
from smpc.tracer.ir import NodeKind, Trace


@dataclass(frozen=True, eq=False)
class LeastTimes:
    """Seconds of one microbatch by index into Trace.nodes, forwards in the first row and backwards in the second."""

    flops: FloatArray  # [2, n] of products and attention
    activations: FloatArray  # [2, n] that are read or written, not while the operation computes
    parameters: FloatArray  # [2, n]
    launches: FloatArray  # [2, n] however small the microbatch is
    accumulated: float = 0.0  # to add gradients to those of earlier microbatches, on top
    products: float = 0.0  # launches of products with parameters, which are there whatever ranks share
    exchanged: float = 0.0  # for the bytes of collectives, which grow with the microbatch
    is_fused: bool = False  # attention is one operation

    def of(self, times: float, tensor: int = 1, context: int = 1, expert: int = 1) -> float:
        """Seconds of a microbatch of so many times the size, shared by ranks that it is not shared by yet.

        Where attention is made of several operations, context-parallel ranks may have it as one: FLOPs alone count.
        """
        shared = times / tensor / context
        added = self.accumulated / tensor / expert + self.exchanged * shared
        if tensor == context == expert == 1:
            each = (self.flops + self.activations) * times + self.parameters
            return float(np.maximum(self.launches, each).sum()) + added
        flops, activations, parameters = self._sums
        grows = flops + activations if self.is_fused or context == 1 else flops
        return max(self.products, grows * shared + parameters / tensor / expert) + added

    @functools.cached_property
    def _sums(self) -> tuple[float, float, float]:
        return float(self.flops.sum()), float(self.activations.sum()), float(self.parameters.sum())


def least_times(trace: Trace, costs: CostModel) -> LeastTimes:
    """Of a recorded microbatch."""
    flops, activations, parameters, launches = np.zeros((4, 2, len(trace.nodes)))
    counted = grows_with_batch(trace)
    of_costs, products, is_fused = _LeastTime(trace, costs), 0.0, False
    for item in costed_nodes(trace):
        i, node = item.position, item.node
        if node.name not in counted:
            continue
        has_backward = item.num_gradients > 0
        read = [trace.node(name) for name in node.inputs]
        weights = sum(value.spec.num_bytes for value in read if value.kind is NodeKind.GET_ATTR and value.spec)
        flops[0, i], activations[0, i], parameters[0, i] = of_costs.forward(item, weights)
        launches[0, i] = of_costs.launch(item, is_backward=False)
        if has_backward:
            flops[1, i], activations[1, i], parameters[1, i] = of_costs.backward(item, weights)
            launches[1, i] = of_costs.launch(item, is_backward=True)
        if node.flops and weights:
            products += (1 + has_backward) * costs.kernels.launch
        is_fused = is_fused or is_attention(node)
    added = of_costs.accumulated(weight_gradient_bytes(trace, costs)) if costs.accumulated else 0.0
    return LeastTimes(flops, activations, parameters, launches, added, products, 0.0, is_fused)


def grows_with_batch(trace: Trace) -> set[str]:
    """The names of the nodes that are taken to grow with the batch: they are made from inputs, and outputs are made from them."""
    return _from_inputs(trace) & _to_outputs(trace)


def _from_inputs(trace: Trace) -> set[str]:
    """The names of the nodes that are made from the inputs of the model."""
    found: set[str] = set()
    for node in trace.nodes:
        if node.kind is NodeKind.PLACEHOLDER or any(name in found for name in node.inputs):
            found.add(node.name)
    return found


def _to_outputs(trace: Trace) -> set[str]:
    """The names of the nodes from which its outputs are made."""
    found = set(trace.output_names)
    for node in reversed(trace.nodes):
        if node.name in found:
            found.update(node.inputs)
    return found


class _LeastTime:
    """Seconds of one node: (FLOPs, activations, parameters), see `smpc.partitioner.costs.cost` for what it has to do."""

    def __init__(self, trace: Trace, costs: CostModel) -> None:
        self._trace, self._costs, self._kernels = trace, costs, costs.kernels
        self._byte = 1.0 / (costs.memory_bandwidth * best_share(self._kernels.memory))

    def forward(self, item: CostedNode, weights: int) -> tuple[float, float, float]:
        """Of the forward. `weights`: bytes of the parameters that it reads."""
        node = item.node
        measured = self._measured(item, is_backward=False)
        if node.flops:
            work = self._work(item, 1, is_backward=False) if measured is None else node.flops * measured
            written = 0 if node.kind is NodeKind.CALL_MODULE or node.spec is None else node.spec.num_bytes
            return work, 0.0 if measured is not None else written * self._byte, 0.0
        if node.kind is NodeKind.CALL_MODULE or not node.bytes_moved + item.kept:
            return 0.0, 0.0, 0.0
        byte = self._byte if measured is None else measured
        return 0.0, max(0, node.bytes_moved + item.kept - weights) * byte, weights * byte

    def backward(self, item: CostedNode, weights: int) -> tuple[float, float, float]:
        """Of the backward, if it has one. `weights`: bytes of the parameters that the forward reads."""
        node, products = item.node, min(2, item.num_gradients)
        measured = self._measured(item, is_backward=True)
        if node.flops:
            if measured is not None:
                return products * node.flops * measured, 0.0, 0.0
            work = self._work(item, products, is_backward=True)
            if node.kind is NodeKind.CALL_MODULE:
                return work, 0.0, 0.0
            out = 0 if node.spec is None else node.spec.num_bytes
            share = self._byte * products / 2
            return work, max(0, node.bytes_moved - out - weights) * share, weights * share
        if node.kind is NodeKind.CALL_MODULE or not node.bytes_moved:
            return 0.0, 0.0, 0.0
        byte = self._byte if measured is None else measured
        return 0.0, (1.5 * max(0, node.bytes_moved - weights) + item.kept) * byte, 1.5 * weights * byte

    def launch(self, item: CostedNode, *, is_backward: bool) -> float:
        """What it takes however small it is."""
        node = item.node
        if not node.bytes_moved and not node.flops and not (item.kept and not is_backward):
            return self._kernels.view_time(name_of(node), is_backward=is_backward)
        products = min(2, item.num_gradients) if node.flops and is_backward and not self._kernels.operations else 1
        return products * self._kernels.launch

    def accumulated(self, weights: Mapping[str, int]) -> float:
        """To add all gradients of parameters to earlier ones."""
        read = [name for item in costed_nodes(self._trace) if item.num_gradients for name in item.node.inputs]
        return self._costs.accumulated * 3 * sum(weights.get(name, 0) for name in read) * self._byte

    def _measured(self, item: CostedNode, *, is_backward: bool) -> float | None:
        """Seconds of a FLOP or byte by the best that was measured of such operations; None if there was nothing."""
        node, costs = item.node, self._costs
        name = name_of(node) if self._kernels.operations else ""
        curves = self._kernels.operations.get(name) or self._kernels.operations.get(name.removesuffix("_broadcast"))
        if curves is None:
            return None
        peak = costs.peak(item.dtype) if node.flops else costs.memory_bandwidth
        return 1.0 / (peak * best_share(curves[is_backward]))

    def _work(self, item: CostedNode, products: int, *, is_backward: bool) -> float:
        node, peak = item.node, self._costs.peak(item.dtype)
        if is_attention(node):
            share = self._kernels.attention[is_backward]
            return attention_flops(node) * (ATTENTION_BACKWARD if is_backward else 1.0) / (peak * share)
        shape = product_of(node)
        if shape is None:
            return products * node.flops / peak
        columns, depth = self._kept_sizes(item, shape)
        depths = (columns, 0)[:products] if is_backward else (depth,)
        return sum(self._kernels.least_product_time(node.flops, each, peak, item.dtype) for each in depths)

    def _kept_sizes(self, item: CostedNode, shape: Product) -> tuple[int, int]:
        """Columns and depth of a product with a parameter, which no size of the microbatch changes; zeros for others."""
        read = [self._trace.node(name) for name in item.node.inputs]
        sizes = [set(value.spec.shape) for value in read if value.kind is NodeKind.GET_ATTR and value.spec]
        _, _, columns, depth = shape
        return (columns, depth) if {columns, depth} in sizes else (0, 0)
