"""What a node costs on an assumed device: times by the roofline, bytes of state by the optimizer.

    forward time  = max(flops / peak, bytes_moved / bandwidth)
    backward time = the same with twice the bytes (gradients are read and written, and saved values are read again)
                    and, for nodes with FLOPs (matrix products, convolutions, attention), one product of the same size
                    for each input that needs a gradient: dX = dY @ W.T and dW = X.T @ dY cost as much as Y = X @ W.
                    Attention with its three inputs counts two, which is close to what fused kernels do. Nodes without
                    gradients cost nothing.

Views move no bytes and take no time. All times are estimates in seconds for one device of the default kind: an H100
SXM with dense tensor cores (989 TFLOP/s in 16 bit, 67 TFLOP/s in fp32 without TF32, 3.35 TB/s) behind a 400 Gbit/s
link. Only ratios matter to the partition, and those hold for most accelerators.

State: a trained parameter has a gradient of its own dtype and `optimizer_bytes_per_element` bytes of optimizer state;
8 is Adam with two fp32 moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from smpc.partitioner.problem import FloatArray, IntArray
from smpc.tracer.ir import Node, NodeKind, StateSpec, Trace

_H100_PEAK = MappingProxyType(
    {
        "float64": 67e12,
        "float32": 67e12,
        "bfloat16": 989e12,
        "float16": 989e12,
        "float8_e4m3fn": 1979e12,
        "float8_e5m2": 1979e12,
    }
)
_FEMTO = 1e15


@dataclass(frozen=True, slots=True)
class CostModel:
    """A device, a link and an optimizer: see the module docstring."""

    device: str = "H100 SXM"
    peak_flops: Mapping[str, float] = field(default_factory=lambda: _H100_PEAK)  # FLOP/s by dtype; others as float32
    memory_bandwidth: float = 3.35e12  # bytes/s
    link_bandwidth: float = 50e9  # bytes/s between stages
    link_latency: float = 50e-6  # s for one message, with what both ends do about it
    kernel_overhead: float = 1e-6  # s to run one node once more; used to judge recomputation only
    optimizer_bytes_per_element: int = 8

    def forward_time(self, node: Node, dtype: str) -> float:
        """Seconds of one forward."""
        return self._roofline(node.flops, node.bytes_moved, dtype)

    def backward_time(self, node: Node, dtype: str, num_gradients: int) -> float:
        """Seconds of one backward that yields gradients for `num_gradients` inputs."""
        if num_gradients == 0:
            return 0.0
        return self._roofline(node.flops * min(2, num_gradients), 2 * node.bytes_moved, dtype)

    def gradient_bytes(self, state: StateSpec) -> int:
        """Bytes of the gradient of a parameter."""
        return state.spec.num_bytes if state.is_parameter and state.spec.requires_grad else 0

    def optimizer_bytes(self, state: StateSpec) -> int:
        """Bytes of optimizer state of a parameter."""
        trained = state.is_parameter and state.spec.requires_grad
        return self.optimizer_bytes_per_element * state.spec.num_elements if trained else 0

    def transfer_time(self, num_bytes: int) -> float:
        """Seconds to send bytes from one stage to another."""
        return self.link_latency + num_bytes / self.link_bandwidth

    def _roofline(self, flops: int, num_bytes: int, dtype: str) -> float:
        peak = self.peak_flops.get(dtype, self.peak_flops["float32"])
        return max(flops / peak, num_bytes / self.memory_bandwidth)


@dataclass(frozen=True)
class NodeTimes:
    """Seconds by index into Trace.nodes; zero for inputs and attribute reads."""

    forward: FloatArray
    backward: FloatArray

    def total_femtoseconds(self) -> IntArray:
        """Forward plus backward in whole femtoseconds: sums of these do not depend on their order."""
        return np.rint((self.forward + self.backward) * _FEMTO).astype(np.int64)


def node_times(trace: Trace, cost_model: CostModel) -> NodeTimes:
    """Times of every node of a trace."""
    n = len(trace.nodes)
    forward, backward = np.zeros(n), np.zeros(n)
    needs_gradient: dict[str, bool] = {}
    dtypes: dict[str, str] = {}
    for i, node in enumerate(trace.nodes):
        inputs = node.inputs
        gradients = sum(needs_gradient[name] for name in inputs) if node.grad_enabled else 0
        if node.kind is NodeKind.CALL_MODULE and node.saved:
            gradients += 1  # its parameters are not among its inputs
        if node.spec is not None:
            needs_gradient[node.name], dtypes[node.name] = node.spec.requires_grad, node.spec.dtype
        else:
            needs_gradient[node.name] = gradients > 0
            dtypes[node.name] = next((dtypes[name] for name in inputs), "float32")
        if node.kind in (NodeKind.CALL_FUNCTION, NodeKind.CALL_MODULE):
            dtype = dtypes[node.name]
            forward[i] = cost_model.forward_time(node, dtype)
            backward[i] = cost_model.backward_time(node, dtype, gradients if needs_gradient[node.name] else 0)
    return NodeTimes(forward, backward)
