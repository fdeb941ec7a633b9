"""Predicted bytes of a stage.

    static      parameters it reads (a shared one is held by each of its stages; tied names are one), their gradients
                and optimizer state, buffers
    activations of one microbatch, held from its forward to its backward: the union, by storage, of what autograd
                saves in the stage's nodes, of the values received that need a gradient, and of those sent on that do.
                State is not counted again. A storage that another stage made counts with the bytes that are received
                of it
    transient   the largest node at work: its backward holds the gradients of its inputs and outputs, which are as
                large as what its forward moves
    peak        static + in flight * activations + transient

Storages are exact (recorded by the tracer), so activations are too; the allocator's rounding and the runtime's own
buffers are not included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smpc.partitioner.cost import CostModel
from smpc.partitioner.graph import Graph
from smpc.partitioner.plan import INPUTS, Edge
from smpc.tracer.ir import NodeKind, StateSpec, Trace


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage: see the module docstring."""

    num_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    activation_bytes: int
    transient_bytes: int

    @property
    def static_bytes(self) -> int:
        """Bytes held whatever the microbatches do."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.buffer_bytes

    def peak_bytes(self, in_flight: int) -> int:
        """Bytes at the peak of a schedule that holds `in_flight` microbatches."""
        return self.static_bytes + in_flight * self.activation_bytes + self.transient_bytes


def state_bytes(state: StateSpec, cost_model: CostModel) -> int:
    """Bytes of a parameter or buffer with its gradient and optimizer state."""
    return state.spec.num_bytes + cost_model.gradient_bytes(state) + cost_model.optimizer_bytes(state)


def distinct_state(trace: Trace, indices: Sequence[int]) -> list[StateSpec]:
    """The state of these indices, one for each storage."""
    found: dict[tuple[int, int], StateSpec] = {}
    for i in indices:
        storage = trace.state[i].storage
        found.setdefault((storage, -1 if storage >= 0 else i), trace.state[i])
    return list(found.values())


def stage_memory(
    graph: Graph,
    cost_model: CostModel,
    stage: int,
    positions: Sequence[int],
    state: Sequence[int],
    edges: Sequence[Edge],
    is_last: bool,
) -> StageMemory:
    """Bytes of one stage that runs the nodes at `positions` (its own and recomputed ones) and reads `state`."""
    held = distinct_state(graph.trace, state)
    parameters = [spec for spec in held if spec.is_parameter]
    nodes = graph.trace.nodes
    return StageMemory(
        num_parameters=sum(spec.spec.num_elements for spec in parameters),
        parameter_bytes=sum(spec.spec.num_bytes for spec in parameters),
        gradient_bytes=sum(cost_model.gradient_bytes(spec) for spec in parameters),
        optimizer_bytes=sum(cost_model.optimizer_bytes(spec) for spec in parameters),
        buffer_bytes=sum(spec.spec.num_bytes for spec in held if not spec.is_parameter),
        activation_bytes=_activation_bytes(graph, stage, positions, edges, is_last),
        transient_bytes=max((nodes[i].bytes_moved for i in positions), default=0),
    )


def _activation_bytes(graph: Graph, stage: int, positions: Sequence[int], edges: Sequence[Edge], is_last: bool) -> int:
    trace = graph.trace
    held = {storage for i in positions for storage in trace.nodes[i].saved}
    received: dict[int, int] = {}  # storage -> bytes received of it
    for edge in edges:
        sent = edge.source == stage
        for name in edge.values if sent or edge.destination == stage else ():
            node = trace.node(name)
            if not sent and node.kind is not NodeKind.PLACEHOLDER:
                received[node.storage] = received.get(node.storage, 0) + _bytes_of(trace, name)
            if edge.source != INPUTS and _needs_gradient(trace, name):
                held.add(node.storage)
    if is_last:
        held.update(trace.node(name).storage for name in trace.output_names if _needs_gradient(trace, name))
    held -= {state.storage for state in trace.state} | {-1}
    made = {trace.nodes[i].storage for i in positions} - received.keys()
    return sum(
        trace.storages[storage] if storage in made or storage not in received else received[storage]
        for storage in sorted(held)
    )


def _bytes_of(trace: Trace, name: str) -> int:
    spec = trace.node(name).spec
    assert spec is not None, f"{name} is not a tensor"
    return spec.num_bytes


def _needs_gradient(trace: Trace, name: str) -> bool:
    spec = trace.node(name).spec
    return spec is not None and spec.requires_grad
