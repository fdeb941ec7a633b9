"""The least time of microbatches, found from one that was recorded: bounds for searches, which no plan of the same cost model is below.

A microbatch of k times the size has as many operations, k times the FLOPs and k times the bytes of activations. Ranks that share it divide
each of these by their number at best. So an operation takes at least

    k a / t / c  +  b / t / e              t tensor-parallel, c context-parallel and e expert-parallel ranks
    a   its FLOPs and activations          at the best rate that kernels reach at any size: small ones are slower
    b   its parameters                     read where it has no FLOPs, and written as gradients

and the launch of a kernel. For ranks that share a microbatch, the launch counts where an operation has a gradient and is no copy into
another layout: these ranks have such operations too, while others may be left out, or be views of a slice. What does not depend on the
batch counts for nothing, for it may be computed once; nor does what no output is made from, nor what modules that are called whole do, but
for their FLOPs.

A microbatch passes one stage after the other. So a step takes at least the longest chain of operations that wait for each other, forward
and backward, however many stages there are: `LeastTimes.path`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from smpc.partitioner.costs.device import best_share
from smpc.partitioner.costs.node_costs import (
    CostedNode,
    CostModel,
    costed_nodes,
    weight_gradient_bytes,
    weight_times,
)
from smpc.partitioner.costs.operation_kinds import (
    ATTENTION_BACKWARD,
    Product,
    attention_flops,
    broader_name,
    is_attention,
    name_of,
    product_of,
)
from smpc.partitioner.stage_costs import FloatArray
from smpc.tracer.ir import Node, NodeKind, Trace

# By name: they copy or not as their input is laid out, which is another way for a slice of it.
_LAYOUTS = frozenset(("contiguous", "flatten", "ravel", "reshape", "reshape_as", "unflatten", "view", "view_as"))


@dataclass(frozen=True, eq=False)
class LeastTimes:
    """Seconds of one microbatch by index into Trace.nodes, forwards in the first row and backwards in the second."""

    flops: FloatArray  # [2, n] of products and attention
    activations: FloatArray  # [2, n] that are read or written, not while the operation computes
    parameters: FloatArray  # [2, n]
    launches: FloatArray  # [2, n] however small the microbatch is
    lasting: FloatArray  # [2, n] of these, what is there whatever ranks share
    chains: FloatArray  # [2, 2, n] what counts of `path`, forward and backward; the second, of backwards in two parts
    accumulated: float = 0.0  # to add gradients to the sum of earlier microbatches, on top
    products: float = 0.0  # launches of products with parameters, which are there whatever ranks share
    exchanged: float = 0.0  # for the bytes of collectives, which grow with the microbatch
    is_fused: bool = False  # attention is one operation
    _known: dict[tuple[float, ...], tuple[float, float, float]] = field(default_factory=dict)

    def of(self, times: float, tensor: int = 1, context: int = 1, expert: int = 1) -> float:
        """Seconds of a microbatch of so many times the size, shared by ranks that it is not shared by yet.

        Where attention is made of several operations, context-parallel ranks may have it as one: FLOPs alone count.
        """
        added = self.accumulated / tensor / expert + self.exchanged * times / tensor / context
        return self._found(times, tensor, context, expert)[0] + added

    def path(
        self, times: float, tensor: int = 1, context: int = 1, expert: int = 1, *, is_split: bool = False
    ) -> float:
        """Of these, seconds of the longest chain of operations that wait for each other; `is_split`: backwards for inputs alone."""
        return self._found(times, tensor, context, expert)[1 + is_split]

    def _found(self, times: float, tensor: int, context: int, expert: int) -> tuple[float, float, float]:
        """Seconds of all operations, and of both chains."""
        key = times, tensor, context, expert
        if key not in self._known:
            each = self._each(times, tensor, context, expert)
            whole = max(self.products, float(each.sum()))
            chain, split = (float((each * counted).sum()) for counted in self.chains)
            self._known[key] = whole, chain, split
        return self._known[key]

    def _each(self, times: float, tensor: int, context: int, expert: int) -> FloatArray:
        """Seconds of each operation."""
        shared = times / tensor / context
        if context > 1 and not self.is_fused:
            return self.flops * shared + self.parameters / tensor / expert
        each = (self.flops + self.activations) * shared + self.parameters / tensor / expert
        if expert > 1:  # ranks that divide experts may call them whole
            return each
        found: FloatArray = np.maximum(self.launches if tensor == context == 1 else self.lasting, each)
        return found


def least_times(trace: Trace, costs: CostModel) -> LeastTimes:
    """The least times of a recorded microbatch."""
    flops, activations, parameters, launches, lasting = np.zeros((5, 2, len(trace.nodes)))
    counted = grows_with_batch(trace)
    of_costs, products, is_fused = _LeastTime(trace, costs), 0.0, False
    for item in costed_nodes(trace):
        i, node = item.position, item.node
        if node.name not in counted:
            continue
        has_backward = item.num_gradients > 0
        (flops[:, i], activations[:, i], parameters[:, i], launches[:, i]), weights = of_costs.of(item)
        if has_backward and node.bytes_moved and name_of(node) not in _LAYOUTS:
            lasting[:, i] = launches[:, i]
        if node.flops and weights:
            products += (1 + has_backward) * costs.kernels.launch
        is_fused = is_fused or is_attention(node)
    added = of_costs.accumulated(weight_gradient_bytes(trace, costs)) if costs.accumulated else 0.0
    chains = _chains(trace, np.maximum(launches, flops + activations + parameters))
    return LeastTimes(flops, activations, parameters, launches, lasting, chains, added, products, 0.0, is_fused)


def _chains(trace: Trace, seconds: FloatArray) -> FloatArray:
    """What counts of the longest chain, [2, 2, n]: whole backwards, and those without what may be done later."""
    sooner = np.stack([np.ones(len(trace.nodes)), 1.0 - weight_times(trace, np.ones(len(trace.nodes)), ())])
    whole = _longest_chain(trace, seconds.sum(axis=0))
    split = _longest_chain(trace, (seconds * sooner).sum(axis=0))
    return np.stack([np.stack([whole, whole]), sooner * split])


def _longest_chain(trace: Trace, seconds: FloatArray) -> FloatArray:
    """1 for the nodes of the longest chain that leads to an output, 0 for others."""
    until: dict[str, float] = {}
    before: dict[str, str] = {}
    for node, own in zip(trace.nodes, seconds.tolist(), strict=True):
        latest = max(node.inputs, key=lambda name: until[name], default="")
        before[node.name], until[node.name] = latest, own + until.get(latest, 0.0)
    found, name = np.zeros(len(trace.nodes)), max(trace.output_names, key=lambda name: until[name], default="")
    while name:
        found[trace.position(name)] = 1.0
        name = before[name]
    return found


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
    """Seconds of a node: (FLOPs, activations, parameters), see `smpc.partitioner.costs.node_costs` for what it has to do."""

    def __init__(self, trace: Trace, costs: CostModel) -> None:
        self._trace, self._costs, self._kernels = trace, costs, costs.kernels
        self._byte = 1.0 / (costs.memory_bandwidth * best_share(self._kernels.memory))
        self._growing = _from_inputs(trace)
        self._parameters = {state.storage for state in trace.state if state.is_parameter and state.storage >= 0}
        self._known: dict[tuple[object, ...], tuple[FloatArray, int]] = {}  # the blocks of a model are mostly alike

    def of(self, item: CostedNode) -> tuple[FloatArray, int]:
        """Of forward and backward, [4, 2], the last of them launches; and bytes of the parameters that it reads."""
        fixed = [self._trace.node(name) for name in item.node.inputs if name not in self._growing]
        shapes = (value.spec.shape for value in fixed if value.kind is NodeKind.GET_ATTR and value.spec)
        weights = sum(self._num_bytes(value) for value in fixed if self._is_held(value))
        same = sum(self._num_bytes(value) for value in fixed if not self._is_held(value))
        key = item.kind, weights, same, *shapes
        if key not in self._known:
            forward = *self.forward(item, weights, same), self.launch(item, is_backward=False)
            backward: tuple[float, ...] = (0.0,) * 4
            if item.num_gradients > 0:
                backward = *self.backward(item, weights, same), self.launch(item, is_backward=True)
            self._known[key] = np.asarray([forward, backward], dtype=float).T, weights
        return self._known[key]

    def _is_held(self, value: Node) -> bool:
        """Whether it is a parameter or buffer, or a view of a parameter."""
        return value.kind is NodeKind.GET_ATTR or value.storage in self._parameters

    def _num_bytes(self, value: Node) -> int:
        """Bytes of what is the same for every microbatch."""
        if value.spec is None:
            return 0
        size = value.spec.num_bytes
        return min(size, self._trace.storages[value.storage]) if value.storage >= 0 else size

    def forward(self, item: CostedNode, weights: int, same: int) -> tuple[float, float, float]:
        """Of the forward. `weights`: bytes of the parameters that it reads; `same`: of what else is made from no input.

        The latter counts for nothing: it does not grow with the microbatch, and ranks may have slices of it.
        """
        node = item.node
        measured = self._measured(item, is_backward=False)
        if node.flops:
            work = self._work(item, 1, is_backward=False) if measured is None else node.flops * measured
            written = 0 if node.kind is NodeKind.CALL_MODULE or node.spec is None else node.spec.num_bytes
            return work, 0.0 if measured is not None else written * self._byte, 0.0
        if node.kind is NodeKind.CALL_MODULE or not node.bytes_moved + item.kept:
            return 0.0, 0.0, 0.0
        byte = self._byte if measured is None else measured
        return 0.0, max(0, node.bytes_moved + item.kept - weights - same) * byte, weights * byte

    def backward(self, item: CostedNode, weights: int, same: int) -> tuple[float, float, float]:
        """Of the backward, if it has one; arguments as of `forward`."""
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
            return work, max(0, node.bytes_moved - out - weights - same) * share, weights * share
        if node.kind is NodeKind.CALL_MODULE or not node.bytes_moved:
            return 0.0, 0.0, 0.0
        byte = self._byte if measured is None else measured
        return 0.0, (1.5 * max(0, node.bytes_moved - weights - same) + item.kept) * byte, 1.5 * weights * byte

    def launch(self, item: CostedNode, *, is_backward: bool) -> float:
        """What it takes however small it is."""
        node = item.node
        if not node.bytes_moved and not node.flops and not (item.kept and not is_backward):
            return self._kernels.view_time(name_of(node), is_backward=is_backward)
        products = min(2, item.num_gradients) if node.flops and is_backward and not self._kernels.operations else 1
        return products * self._kernels.launch

    def accumulated(self, weights: Mapping[str, int]) -> float:
        """To add all gradients of parameters to earlier ones."""
        known = (item for item in costed_nodes(self._trace) if item.num_gradients and item.node.bytes_moved)
        read = [name for item in known for name in item.node.inputs]
        return self._costs.accumulated * 3 * sum(weights.get(name, 0) for name in read) * self._byte

    def _measured(self, item: CostedNode, *, is_backward: bool) -> float | None:
        """Seconds of a FLOP or byte by the best that was measured of such operations; None if there was nothing."""
        node, costs = item.node, self._costs
        name = name_of(node) if self._kernels.operations else ""
        curves = self._kernels.operations.get(name) or self._kernels.operations.get(broader_name(name))
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
