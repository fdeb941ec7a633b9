"""What a node costs on an assumed device: times by the roofline, bytes of state by the optimizer.

    forward time  = its bytes over the bandwidth; for nodes with FLOPs the longer of the product (or fused attention) and the bytes that
                    are read meanwhile, and the bytes written after it; at least the launch of a kernel
    backward time = for nodes with FLOPs (matrix products, convolutions, attention) one product of the same size
                    for each input that needs a gradient: dX = dY @ W.T and dW = X.T @ dY cost as much as Y = X @ W, each as its shape
                    lets it. A fused attention's has two and a half times the FLOPs of its forward. For all others, half as many bytes
                    again: gradients are read and written, and saved values are read again. Nodes without gradients cost nothing.
    accumulation  a gradient that is added to the sum of earlier microbatches is read twice and written once; part of the backward

Views move no bytes, and take no time unless it was measured. What an operation keeps for its backward beside inputs and output (the mask of
a dropout, the log-probabilities of a loss) is written and read as well. `smpc.partitioner.costs.device` says how fast products, attention
and copies are, and `smpc.partitioner.costs.collective_times` how long ranks take to exchange what they have.

State: a trained parameter has a gradient and optimizer state, by the name of the optimizer (`smpc.partitioner.costs.named_optimizers`).

Example: a model on four H100s of one host, trained by AdamW with float32 masters:

    CostModel.of(find_device("h100"), num_ranks=4, optimizer=find_optimizer("adamw-fp32-master"))

`weight_time`: the two parts of a stage's backward: for its inputs (I), and for its parameters (W), which a schedule may defer.
`deferred_time`: how much longer a forward and a backward in two parts take together, on devices that say so.

What can be deferred are the calls of `DEFERRABLE` that take a parameter and are in no activation checkpoint (see
`smpc.executor.split_backward.intercept`). Of such a call's backward, W has one matrix product for each parameter of two or more dimensions,
I one for each other input that needs a gradient; a bias counts for nothing beside them. Of a module that is called whole and has
parameters, W has half. All else is part of I.

Example: linear(x, weight, bias) in the middle of a model has W = I; the first one of a model, whose input needs no
gradient, is all W, and so is an embedding. matmul(query, key) is all I. A block of F = 1 with 0.6 in linear layers and
0.4 in products of activations has a backward of I = 1.4 and W = 0.6.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from smpc.partitioner.costs.collective_times import sent_time
from smpc.partitioner.costs.device import H100, Device, Group, Kernels
from smpc.partitioner.costs.named_optimizers import ADAM, TOGETHER, Optimizer
from smpc.partitioner.costs.operation_kinds import (
    ATTENTION_BACKWARD,
    attention_flops,
    broader_name,
    is_attention,
    measured_flops,
    name_of,
    product_of,
)
from smpc.partitioner.stage_costs import FloatArray, IntArray, whole_times
from smpc.tracer.ir import Node, NodeKind, Region, StateSpec, Trace

SENT_UPDATES = (
    2 << 23
)  # elements in buckets of updated parameters under way: `smpc.v1.optimization.sharded_optimizer_state`


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
    kernels: Kernels = field(default_factory=Kernels)  # what is reached of the peaks
    accumulated: float = 0.0  # share of the microbatches whose gradients are added to earlier ones
    kernel_overhead: float = 1e-6  # s to run one node once more; used to judge recomputation only
    optimizer: Optimizer = ADAM
    holds_sent: bool = False  # sent tensors stay until the receiver is known to have them: gloo
    sends_batch: bool = False  # a script's step function runs on the last rank, which gets its arguments
    batches: tuple[int, ...] = ()  # bytes that each pipeline rank calls it with; (): the model's inputs, on the first
    casts: bool = False  # in a script: the model is in half precision, the batch and the outputs it gets are not
    keeps_outputs: bool = False  # a script's step function has the model's outputs while it differentiates
    apart: frozenset[str] = frozenset()  # parameters that fewer ranks hold, such as experts, by canonical names
    optimizer_apart: Optimizer = ADAM  # theirs
    # Of a model that runs as it is, whose blocks gather parameters that are in parts: elements of small ones, and most that stay whole
    units: tuple[int, int] | None = None
    worthwhile: float = 0.0  # multiplications for its parameters below which a call is not put off in split backwards

    @classmethod
    def of(cls, device: Device, num_ranks: int, optimizer: Optimizer = ADAM, microbatches: int = 1) -> CostModel:
        """The costs of `num_ranks` pipeline ranks on devices of one kind."""
        wire = device.wire(num_ranks)
        return cls(
            device.name,
            device.peak_flops,
            device.memory_bandwidth,
            device.memory_bytes,
            wire.rate,
            wire.latency,
            device.kernels,
            1.0 - 1.0 / microbatches,
            optimizer=optimizer,
            holds_sent=device.transport == "gloo",
            worthwhile=WORTHWHILE if device.transport == "gloo" else 0.0,
        )

    def peak(self, dtype: str) -> float:
        """FLOP/s of a dtype; one that is not listed counts as float32."""
        return self.peak_flops.get(dtype, self.peak_flops["float32"])

    def forward_time(self, node: Node, dtype: str, kept_bytes: int = 0) -> float:
        """Seconds of one forward. `kept_bytes`: what it keeps for its backward beside inputs and output."""
        moved = node.bytes_moved + kept_bytes
        if not moved and not node.flops:
            return self.kernels.view_time(name_of(node), is_backward=False)
        work = measured_flops(node) or moved
        measured = self._measured(node, dtype, work, work)
        if measured is not None:
            return measured
        if node.flops:
            written = node.spec.num_bytes if node.spec is not None else 0
            return max(self._product(node, dtype, 1, moved - written, written), self.kernels.launch)
        return max(self._memory_time(moved), self.kernels.launch)

    def backward_time(self, node: Node, dtype: str, num_gradients: int, kept_bytes: int = 0) -> float:
        """Seconds of one backward that yields gradients for `num_gradients` inputs."""
        if num_gradients == 0:
            return 0.0
        if not (node.bytes_moved or node.flops):
            return self.kernels.view_time(name_of(node), is_backward=True)
        products = min(2, num_gradients)
        moved = 3 * node.bytes_moved // 2 + kept_bytes
        flops = measured_flops(node)
        size, amount = flops or node.bytes_moved + kept_bytes, products * flops or moved
        measured = self._measured(node, dtype, size, amount, is_backward=True)
        if measured is not None:
            return measured
        if not node.flops:
            return max(self._memory_time(moved), self.kernels.launch)
        read = node.spec.num_bytes if node.spec is not None else 0  # the gradient, by each product, and the other input
        written = (node.bytes_moved - read) * products // 2
        work = self._product(node, dtype, products, 2 * node.bytes_moved - written, written, is_backward=True)
        return max(work, products * self.kernels.launch)

    def accumulation_time(self, num_bytes: int) -> float:
        """Seconds to add so many bytes of gradients to the sum of earlier microbatches, times the share of microbatches that do."""
        return self.accumulated * self._memory_time(3 * num_bytes)

    def _measured(self, node: Node, dtype: str, size: float, work: float, *, is_backward: bool = False) -> float | None:
        """Seconds by what was measured of operations like this one, of a size; None if there is nothing of the kind."""
        if not self.kernels.operations:
            return None
        name, measured = name_of(node), self.kernels.measured_share
        share = measured(name, size, is_backward=is_backward)
        if share is None:
            share = measured(broader_name(name), size, is_backward=is_backward)
        if share is None:
            return None
        peak = self.peak(dtype) if node.flops else self.memory_bandwidth
        return max(work / (peak * share), self.kernels.launch)

    def _memory_time(self, num_bytes: int) -> float:
        return self.kernels.memory_time(max(0, num_bytes), self.memory_bandwidth)

    def _product(
        self, node: Node, dtype: str, products: int, read: int, written: int, is_backward: bool = False
    ) -> float:
        """Seconds of a node with FLOPs: inputs are read while it computes, a tile of the output is written when it is done."""
        work = self._work(node, dtype, products, is_backward=is_backward)
        return max(work, self._memory_time(read)) + self._memory_time(written)

    def _work(self, node: Node, dtype: str, products: int, *, is_backward: bool) -> float:
        """Seconds of the node's arithmetic: so many products of its size."""
        peak = self.peak(dtype)
        if is_attention(node):
            share = self.kernels.attention[is_backward]
            return attention_flops(node) * (ATTENTION_BACKWARD if is_backward else 1.0) / (peak * share)
        shape = product_of(node)
        if shape is None:
            return products * node.flops / peak
        batch, m, n, k = shape
        shapes = ((batch, m, k, n), (batch, k, n, m))[:products] if is_backward else (shape,)
        return sum(self.kernels.product_time(one, peak, dtype) for one in shapes)

    def optimizer_of(self, state: StateSpec) -> Optimizer:
        """What the optimizer keeps of a parameter, and how it is divided over ranks."""
        return self.optimizer_apart if state.name in self.apart else self.optimizer

    def held_bytes(self, state: StateSpec) -> int:
        """Bytes of a parameter or buffer in a step."""
        return self.optimizer_of(state).parameter_bytes(state.spec) if state.is_parameter else state.spec.num_bytes

    def gathered_bytes(self, state: StateSpec) -> int:
        """Bytes that ranks which have parts of a parameter send each other to make it whole; 0 for a buffer."""
        return self.optimizer_of(state).gathered_bytes(state.spec) if state.is_parameter else 0

    def averaging_bytes(self, state: StateSpec) -> int:
        """Bytes at work while gradients of which every rank keeps a part are averaged: whole ones, as much to send, gloo's results, if
        there are several ranks."""
        whole, optimizer = self.gradient_bytes(state), self.optimizer_of(state)
        if not optimizer.in_parts:
            return 0
        return 2 * whole + (-(-whole // optimizer.shards) if self.holds_sent and optimizer.shards > 1 else 0)

    def copy_bytes(self, state: StateSpec) -> int:
        """Bytes of what two stages that share a parameter tell each other of its gradient."""
        return self.optimizer_of(state).part_bytes(state.spec) if state.is_parameter else 0

    def apart_bytes(self, state: StateSpec) -> int:
        """Bytes of the gradient of a parameter that is added up only when its backward pass ends."""
        return self.optimizer_of(state).apart_bytes(state.spec) if _is_trained(state) else 0

    def gradient_bytes(self, state: StateSpec) -> int:
        """Bytes of the gradient of a parameter."""
        return self.optimizer_of(state).gradient_bytes(state.spec) if _is_trained(state) else 0

    def optimizer_bytes(self, state: StateSpec) -> int:
        """Bytes of optimizer state of a parameter."""
        return self.optimizer_of(state).state_bytes(state.spec) if _is_trained(state) else 0

    def optimizer_scratch(self, states: Iterable[StateSpec]) -> int:
        """Bytes that an optimizer step makes and drops: gradients of masters, and what updates take.

        Updates are made for all parameters at once, on a CPU for one after another. Ranks that divide state update ranges of rows; those
        that have parts of parameters update these. A stage's whole parameters, which are freed by then, took more than that. After the
        updates, ranks that divide state send each other what they have updated, in buckets. Before them, small gradients of experts are
        summed in messages.
        """
        trained = [(self.optimizer_of(state), state.spec) for state in states if _is_trained(state)]
        trained = [(optimizer, spec) for optimizer, spec in trained if self.units or not optimizer.in_parts]
        gradients = sum(optimizer.master_gradient_bytes(spec) for optimizer, spec in trained)
        whole = [optimizer.temporary_bytes(spec) for optimizer, spec in trained]
        own = [-(-size // optimizer.shards) for size, (optimizer, _) in zip(whole, trained, strict=True)]
        most = own if self.units else whole
        updates = gradients + (2 * min(max(most, default=0), sum(own)) if self.holds_sent else sum(own))
        sent = [spec for optimizer, spec in trained if optimizer.shards > 1 and not optimizer.in_parts]
        room = max((SENT_UPDATES * spec.torch_dtype.itemsize for spec in sent), default=0)
        summed = min(TOGETHER, sum(optimizer.message_bytes(spec) for optimizer, spec in trained))
        return max(updates, summed, min(room, sum(spec.num_bytes for spec in sent)))

    def transfer_time(self, num_bytes: int) -> float:
        """Seconds to send bytes from one stage to another."""
        return self.link_latency + num_bytes / self.link_bandwidth


def _is_trained(state: StateSpec) -> bool:
    return state.is_parameter and state.spec.requires_grad


@dataclass(frozen=True)
class Workspace:
    """Bytes that nodes make and drop while they work, by index into Trace.nodes: see `smpc.partitioner.costs.timing`."""

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

    def whole(self) -> IntArray:
        """Forward plus backward in whole numbers of one unit, femtoseconds for all but hours: see `smpc.partitioner.stage_costs`."""
        return whole_times(self.forward + self.backward)


@dataclass(frozen=True, slots=True)
class CostedNode:
    """A node that computes, its dtype, the inputs that need gradients, and bytes kept that are neither inputs nor output."""

    position: int
    node: Node
    dtype: str
    num_gradients: int
    kept: int
    kind: int  # nodes with the same number take the same time on every device


def costed_nodes(trace: Trace) -> tuple[CostedNode, ...]:
    """The nodes that take time, in order."""
    return trace.remembered(costed_nodes, lambda: tuple(_find_costed(trace)))


def _find_costed(trace: Trace) -> Iterator[CostedNode]:
    storages = {node.name: node.storage for node in trace.nodes}
    needs_gradient: dict[str, bool] = {}
    dtypes: dict[str, str] = {}
    flat: dict[str, bool] = {}  # biases: beside a product their gradients take no time
    kinds: dict[tuple[object, ...], int] = {}
    for i, node in enumerate(trace.nodes):
        inputs = node.inputs
        gradients = sum(needs_gradient[name] and not (node.flops and flat[name]) for name in inputs)
        gradients = gradients if node.grad_enabled else 0
        if node.kind is NodeKind.CALL_MODULE and node.saved:
            gradients += 1  # its parameters are not among its inputs
        if node.spec is not None:
            needs_gradient[node.name], dtypes[node.name] = node.spec.requires_grad, node.spec.dtype
        else:
            needs_gradient[node.name] = gradients > 0
            dtypes[node.name] = next((dtypes[name] for name in inputs), "float32")
        flat[node.name] = node.spec is not None and len(node.spec.shape) < 2
        if node.kind in (NodeKind.CALL_FUNCTION, NodeKind.CALL_MODULE):
            kept = _kept_bytes(trace, node, storages)
            counted = gradients if needs_gradient[node.name] else 0
            kind = kinds.setdefault(_work_key(node, dtypes[node.name], counted, kept), len(kinds))
            yield CostedNode(i, node, dtypes[node.name], counted, kept, kind)


def _work_key(node: Node, dtype: str, num_gradients: int, kept: int) -> tuple[object, ...]:
    """All that the times of a node depend on, but for the device. The blocks of a model are mostly alike."""
    attention = attention_flops(node) if is_attention(node) else None
    names = node.target, name_of(node), attention
    return (*names, node.spec, node.flops, node.bytes_moved, dtype, num_gradients, kept)


def node_times(trace: Trace, cost_model: CostModel) -> NodeTimes:
    """Times of every node of a trace."""
    forward, backward = np.zeros((2, len(trace.nodes)))
    weights = weight_gradient_bytes(trace, cost_model) if cost_model.accumulated else {}
    known: dict[int, tuple[float, float]] = {}
    for item in costed_nodes(trace):
        i, node, kept = item.position, item.node, item.kept
        if item.kind not in known:
            there = cost_model.forward_time(node, item.dtype, kept)
            known[item.kind] = there, cost_model.backward_time(node, item.dtype, item.num_gradients, kept)
        forward[i], backward[i] = known[item.kind]
        if backward[i] and cost_model.accumulated:
            backward[i] += cost_model.accumulation_time(sum(weights.get(name, 0) for name in node.inputs))
    return NodeTimes(forward, backward)


@dataclass(frozen=True, slots=True)
class Work:
    """What a node has to do, as its times are counted: FLOPs of one product, or bytes; and all of its forward and backward.

    A view has nothing to do: its size is 0, and `backward` says whether there is one.
    """

    position: int
    name: str
    dtype: str
    is_product: bool
    size: float
    forward: float
    backward: float


def work_of(trace: Trace) -> Iterator[Work]:
    """The work of every node that takes time, in order."""
    for item in costed_nodes(trace):
        node, kept = item.node, item.kept
        if node.flops:
            size = forward = measured_flops(node)
            backward = min(2, item.num_gradients) * size
        else:
            size = forward = node.bytes_moved + kept
            backward = (3 * node.bytes_moved // 2 + kept) * bool(item.num_gradients)
        if not size:
            yield Work(item.position, name_of(node), item.dtype, False, 0, 0, bool(item.num_gradients))
        else:
            yield Work(item.position, name_of(node), item.dtype, bool(node.flops), size, forward, backward)


def useful_times(trace: Trace, device: Device) -> FloatArray:
    """Seconds of every node's FLOPs at the peak of its dtype, forward and backward, nothing twice."""
    seconds = np.zeros(len(trace.nodes))
    for item in costed_nodes(trace):
        seconds[item.position] = _flops(item.node) * (1 + min(2, item.num_gradients)) / device.peak(item.dtype)
    return seconds


def useful_flops(trace: Trace) -> tuple[float, float]:
    """FLOPs of one microbatch: of its forward, and of forward and backward, nothing twice."""
    found = [(_flops(item.node), min(2, item.num_gradients)) for item in costed_nodes(trace)]
    return sum(flops for flops, _ in found), sum(flops * (1 + num) for flops, num in found)


def _flops(node: Node) -> float:
    return attention_flops(node) if is_attention(node) else node.flops


def _kept_bytes(trace: Trace, node: Node, storages: Mapping[str, int]) -> int:
    """Bytes that autograd keeps of the node and that are neither its inputs nor its output."""
    known = {node.storage, *(storages[name] for name in node.inputs)}
    return sum(trace.storages[i] for i in node.saved if i not in known)


def weight_gradient_bytes(trace: Trace, cost_model: CostModel) -> dict[str, int]:
    """Bytes of the gradients of the trained parameters, by the nodes that read them."""
    state = {name: item for item in trace.state for name in item.names}
    reads = (node for node in trace.nodes if node.kind is NodeKind.GET_ATTR and node.target in state)
    return {node.name: cost_model.gradient_bytes(state[node.target]) for node in reads}


class Collective(Protocol):
    """A node of a tensor-parallel rank's trace that sends: bytes in its forward, and in its backward."""

    @property
    def node(self) -> str:
        """The node's name."""

    @property
    def forward_bytes(self) -> int:
        """What a rank sends in the forward."""

    @property
    def backward_bytes(self) -> int:
        """What a rank sends in the backward."""

    @property
    def overlaps(self) -> bool:
        """Whether it goes on while the node computes."""

    @property
    def moves(self) -> bool:
        """Whether it puts slices together or apart, rather than to sum tensors of the same size."""


def times_with_collectives(
    trace: Trace,
    collectives: Iterable[Collective],
    cost_model: CostModel,
    group: Group,
    device: Device,
    plain: NodeTimes | None = None,
) -> NodeTimes:
    """Predicted times of a sharded trace's nodes. Collectives are timed by what they send, in groups of this kind.

    `plain`: the times without collectives, if they are known already.
    """
    times = plain or node_times(trace, cost_model)
    known = tuple(collectives)
    forward, backward = collective_times(trace, known, group, device)
    for position in (trace.position(item.node) for item in known if item.overlaps):
        forward[position] = max(0.0, forward[position] - times.forward[position])
        backward[position] = max(0.0, backward[position] - times.backward[position])
    return NodeTimes(times.forward + forward, times.backward + backward)


def collective_times(
    trace: Trace, collectives: Iterable[Collective], group: Group, device: Device
) -> tuple[FloatArray, FloatArray]:
    """Seconds that ranks of a group exchange what they have at each node of a sharded trace: forward, backward."""
    forward, backward = np.zeros((2, len(trace.nodes)))
    sent = {item.node: item for item in collectives}
    for position, node in enumerate(trace.nodes):
        item = sent.get(node.name)
        if item is not None:
            forward[position] = sent_time(item.forward_bytes, group, device, moves=item.moves)
            backward[position] = sent_time(item.backward_bytes, group, device, moves=item.moves)
    return forward, backward


_FUNCTIONAL = (
    "linear",
    "embedding",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
)
_PRODUCTS = ("addmm", "mm", "bmm", "matmul")
WORTHWHILE = 2_000_000  # multiplications, which take a core about 50 us: on a CPU, smaller calls are not put off
DEFERRABLE = frozenset(
    (
        *(f"torch.nn.functional.{name}" for name in _FUNCTIONAL),
        *(
            f"torch.{name}" for name in (*_PRODUCTS, "dsmm")
        ),  # torch.dsmm is torch.mm, and comes first where traces look
        *(f"torch.Tensor.{name}" for name in (*_PRODUCTS, "__matmul__", "__rmatmul__")),
    )
)


def weight_time(trace: Trace, positions: Sequence[int], backward: FloatArray, regions: Sequence[Region]) -> float:
    """Seconds of W of a stage's nodes, which may be in its checkpointed `regions`; `backward` is by node."""
    found = np.asarray(positions, dtype=np.int64)
    return float(np.sum(weight_times(trace, backward, regions)[found[_is_free(trace, regions)[found]]]))


def weight_times(trace: Trace, backward: FloatArray, regions: Sequence[Region]) -> FloatArray:
    """Seconds of W of each node; arguments as of `weight_time`."""
    found: FloatArray = np.where(_is_free(trace, regions), _shares_of_weight_cost(trace) * backward, 0.0)
    return found


def _is_free(trace: Trace, regions: Sequence[Region]) -> NDArray[np.bool_]:
    """Which nodes are in none of the regions."""
    free = np.ones(len(trace.nodes), dtype=bool)
    for region in regions:
        free[region.first : region.last] = False
    return free


def deferred_time(trace: Trace, positions: Sequence[int], kernels: Kernels, regions: Sequence[Region]) -> float:
    """Seconds that a stage's forward and backward take longer where the backward is split; arguments as of `weight_time`."""
    if not kernels.deferred:
        return 0.0
    free = {i for i in positions if not any(region.first <= i < region.last for region in regions)}
    split = (node for node in deferred_of(trace) if trace.position(node.name) in free)
    return sum(kernels.deferred_time(broader_name(name_of(node)), node.flops) for node in split)


def deferred_of(trace: Trace) -> Iterator[Node]:
    """The nodes with FLOPs whose backward can be in two parts."""
    return (node for node in _divisible(trace) if node.flops)


def put_off(trace: Trace, cost_model: CostModel) -> list[Node]:
    """The nodes whose backward is in two parts where they are in no checkpoint: calls that are not small, and modules with FLOPs."""
    return [
        node for node, number in _sized(trace) if node.kind is NodeKind.CALL_MODULE or number >= cost_model.worthwhile
    ]


def _sized(trace: Trace) -> list[tuple[Node, float]]:
    """The calls whose backward can be in two parts, with their multiplications, and such modules with FLOPs."""
    return trace.remembered(
        _sized,
        lambda: [
            (node, 0.0 if node.kind is NodeKind.CALL_MODULE else multiplications(trace, node))
            for node in _divisible(trace)
            if node.kind is not NodeKind.CALL_MODULE or node.flops
        ],
    )


def multiplications(trace: Trace, node: Node) -> float:
    """Roughly, of the gradients of a call's parameters, as `smpc.executor.split_backward.intercept` counts them."""
    values = [(value, value.spec) for value in map(trace.node, node.inputs) if value.spec is not None]
    longest = elements = 0
    for value, spec in values:
        if value.kind is NodeKind.GET_ATTR and spec.requires_grad:
            longest = max(longest, *spec.shape) if spec.shape else longest
        else:
            elements = max(elements, spec.num_elements)
    return float(longest * elements)


def _divisible(trace: Trace) -> Iterator[Node]:
    return (node for node, share in zip(trace.nodes, _shares_of_weight_cost(trace).tolist(), strict=True) if share)


def _shares_of_weight_cost(trace: Trace) -> FloatArray:
    """The part of each node's backward that W has."""
    return trace.remembered(
        _shares_of_weight_cost, lambda: np.asarray([_weight_share(trace, node) for node in trace.nodes])
    )


def _weight_share(trace: Trace, node: Node) -> float:
    """The part of a node's backward that W has."""
    if node.kind is NodeKind.CALL_MODULE:
        return 0.5 if node.saved else 0.0
    if node.kind is not NodeKind.CALL_FUNCTION or node.target not in DEFERRABLE:
        return 0.0
    weights = others = 0
    for name in node.inputs:
        value = trace.nodes[trace.position(name)]
        if value.spec is None or not value.spec.requires_grad:
            continue
        if value.kind is not NodeKind.GET_ATTR:
            others += 1
        elif len(value.spec.shape) > 1:
            weights += 1
    return weights / (weights + others) if weights else 0.0
