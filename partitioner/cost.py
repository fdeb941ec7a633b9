"""What a node costs on an assumed device: times by the roofline, bytes of state by the optimizer.

    forward time  = max(flops / peak, bytes_moved / bandwidth)
    backward time = the same with twice the bytes (gradients are read and written, and saved values are read again)
                    and, for nodes with FLOPs (matrix products, convolutions, attention), one product of the same size
                    for each input that needs a gradient: dX = dY @ W.T and dW = X.T @ dY cost as much as Y = X @ W.
                    Attention with its three inputs counts two, which is close to what fused kernels do. Nodes without
                    gradients cost nothing.

Views move no bytes and take no time. All times are estimates in seconds for one device of the given kind (see
`smpc.partitioner.device`). Only ratios matter to the partition.

State: a trained parameter has a gradient and optimizer state (see `smpc.partitioner.optimizer`).

Example: a model on four H100s of one host, trained by AdamW with float32 masters:

    CostModel.of(find_device("h100"), num_ranks=4, optimizer=find_optimizer("adamw-fp32-master"))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from smpc.partitioner.device import H100, Device
from smpc.partitioner.optimizer import ADAM, Optimizer
from smpc.partitioner.problem import FloatArray, IntArray
from smpc.tracer.ir import Node, NodeKind, StateSpec, Trace

_FEMTO = 1e15


@dataclass(frozen=True, slots=True)
class CostModel:
    """A device, a link and an optimizer: see the module docstring."""

    device: str = H100.name
    peak_flops: Mapping[str, float] = field(
        default_factory=lambda: H100.peak_flops
    )  # FLOP/s by dtype; others as float32
    memory_bandwidth: float = H100.memory_bandwidth  # bytes/s
    memory_bytes: int = H100.memory_bytes
    link_bandwidth: float = H100.between_hosts.bandwidth  # bytes/s between stages
    link_latency: float = H100.between_hosts.latency  # s for one message, with what both ends do about it
    kernel_overhead: float = 1e-6  # s to run one node once more; used to judge recomputation only
    optimizer: Optimizer = ADAM
    holds_sent: bool = False  # sent tensors stay until the receiver is known to have them: gloo

    @classmethod
    def of(cls, device: Device, num_ranks: int, optimizer: Optimizer = ADAM) -> CostModel:
        """The costs of `num_ranks` pipeline ranks on devices of one kind."""
        wire = device.wire(num_ranks)
        return cls(
            device.name,
            device.peak_flops,
            device.memory_bandwidth,
            device.memory_bytes,
            wire.bandwidth,
            wire.latency,
            optimizer=optimizer,
            holds_sent=device.transport == "gloo",
        )

    def forward_time(self, node: Node, dtype: str) -> float:
        """Seconds of one forward."""
        return self._roofline(node.flops, node.bytes_moved, dtype)

    def backward_time(self, node: Node, dtype: str, num_gradients: int) -> float:
        """Seconds of one backward that yields gradients for `num_gradients` inputs."""
        if num_gradients == 0:
            return 0.0
        return self._roofline(node.flops * min(2, num_gradients), 2 * node.bytes_moved, dtype)

    def held_bytes(self, state: StateSpec) -> int:
        """Bytes of a parameter or buffer in a step."""
        return self.optimizer.parameter_bytes(state.spec) if state.is_parameter else state.spec.num_bytes

    def gathered_bytes(self, state: StateSpec) -> int:
        """Bytes that ranks which have parts of a parameter send each other to make it whole; 0 for a buffer."""
        return self.optimizer.gathered_bytes(state.spec) if state.is_parameter else 0

    def averaging_bytes(self, state: StateSpec) -> int:
        """Bytes at work while gradients of which every rank keeps a part are averaged: whole ones, as much to send, gloo's results."""
        whole = self.gradient_bytes(state)
        return 2 * whole + (-(-whole // self.optimizer.shards) if self.holds_sent else 0)

    def copy_bytes(self, state: StateSpec) -> int:
        """Bytes of what two stages that share a parameter tell each other of its gradient."""
        return self.optimizer.part_bytes(state.spec) if state.is_parameter else 0

    def apart_bytes(self, state: StateSpec) -> int:
        """Bytes of the gradient of a parameter that is added up only when its backward pass ends."""
        return self.optimizer.apart_bytes(state.spec) if _is_trained(state) else 0

    def gradient_bytes(self, state: StateSpec) -> int:
        """Bytes of the gradient of a parameter."""
        return self.optimizer.gradient_bytes(state.spec) if _is_trained(state) else 0

    def optimizer_bytes(self, state: StateSpec) -> int:
        """Bytes of optimizer state of a parameter."""
        return self.optimizer.state_bytes(state.spec) if _is_trained(state) else 0

    def optimizer_scratch(self, parameter_bytes: int, largest: int) -> int:
        """Bytes that an optimizer step makes and drops: for all parameters at once, on a CPU for one after another."""
        return self.optimizer.scratch * (2 * largest if self.holds_sent else parameter_bytes)

    def transfer_time(self, num_bytes: int) -> float:
        """Seconds to send bytes from one stage to another."""
        return self.link_latency + num_bytes / self.link_bandwidth

    def _roofline(self, flops: int, num_bytes: int, dtype: str) -> float:
        peak = self.peak_flops.get(dtype, self.peak_flops["float32"])
        return max(flops / peak, num_bytes / self.memory_bandwidth)


def _is_trained(state: StateSpec) -> bool:
    return state.is_parameter and state.spec.requires_grad


@dataclass(frozen=True)
class Workspace:
    """Bytes that nodes make and drop while they work, by index into Trace.nodes: see `smpc.partitioner.workspace`."""

    forward: IntArray
    backward: IntArray


@dataclass(frozen=True)
class NodeTimes:
    """Seconds by index into Trace.nodes; zero for inputs and attribute reads."""

    forward: FloatArray
    backward: FloatArray
    workspace: Workspace | None = None  # None: it was not measured

    def with_reruns(self, depths: Mapping[int, int]) -> NodeTimes:
        """The same, with backwards for which the node's forward runs again so many times."""
        backward = self.backward.copy()
        for position, count in depths.items():
            backward[position] += count * self.forward[position]
        return replace(self, backward=backward)

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
