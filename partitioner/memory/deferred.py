"""Memory of a stage whose backward is in two parts: B computes gradients of inputs, and W, later, those of parameters.

Between B and W a microbatch holds what W reads, and nothing else (see `smpc.executor.split_backward`):

    deferred      of one microbatch: for each call that is put off what autograd saves of it, by storage, the arguments that its
                  record holds, and the gradient of its result; of the other calls the gradients of parameters, which W adds up

The peak is the largest of, over the actions of the stage, with a other microbatches that wait for B and d that wait for W, and n over the
nodes of the stage (for the terms see `smpc.partitioner.memory.peak`):

    F     a activations + d deferred + activations up to n + what lives at n, with what waits
    B     a activations + d deferred + activations up to n + what lives at n + deferred of the nodes behind n, with what waits; over gloo
          also, instead of waiting, what the others have left behind
    W     a activations + d deferred + deferred of the nodes up to n + gradients of parameters from n on; in a later W instead of these the
          one that is added at n

and from the first W on all gradients of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from smpc.partitioner.costs.cost import CostModel, deferred_of
from smpc.partitioner.graph.trace_graph import Graph
from smpc.partitioner.problem import IntArray
from smpc.tracer.constants import Ref
from smpc.tracer.ir import Node, NodeKind, Region, Trace


class Beside(NamedTuple):
    """What there is beside the microbatch of an action: others that wait for B, others that wait for W, and whether a W has run."""

    waiting: int
    deferred: int
    has_gradients: bool


@dataclass(frozen=True, slots=True)
class SplitUse:
    """What is there beside the forwards, the backwards and the Ws of a stage in a step, each once."""

    forwards: tuple[Beside, ...]
    backwards: tuple[Beside, ...]
    weights: tuple[Beside, ...]

    @property
    def before_backward(self) -> int:
        """The most microbatches between F and B."""
        return 1 + max(beside.waiting for beside in self.backwards)

    def in_flight(self, activations: int, deferred: int) -> int:
        """The most bytes of all microbatches in flight, of so many before B and after it."""
        found = [(b.waiting + 1) * activations + b.deferred * deferred for b in (*self.forwards, *self.backwards)]
        return max(found + [b.waiting * activations + (b.deferred + 1) * deferred for b in self.weights])


@dataclass(frozen=True, slots=True)
class Deferred:
    """Bytes of one microbatch: `total` from B to W; by node, in B and in W."""

    total: int
    behind: IntArray  # of the nodes behind each, beyond the activations up to it
    until: IntArray  # of the nodes up to each


class SplitTerms(NamedTuple):
    """Bytes of one stage: see the module docstring and `smpc.partitioner.memory.peak.StepTerms`."""

    activations: int
    forward: int
    working: IntArray  # by node: activations up to it, and what lives while its backward works
    exists: IntArray  # by node: gradients of parameters once it has run
    largest: int  # of the gradients of parameters
    gradients: int
    early_gradients: int
    sent: int
    waiting: int
    given_back: int


def split_peak(terms: SplitTerms, deferred: Deferred, use: SplitUse) -> int:
    """The most of a step's phases."""

    def others(beside: Beside) -> int:
        gradients = terms.gradients if beside.has_gradients else terms.early_gradients
        return beside.waiting * terms.activations + beside.deferred * deferred.total + gradients

    backward = int((terms.working + deferred.behind).max(initial=0))
    first = int((deferred.until + terms.exists).max(initial=0))
    found = [others(beside) + beside.waiting * terms.sent + terms.forward for beside in use.forwards]
    found += [terms.waiting + others(beside) + backward for beside in use.backwards]
    found += [
        (use.before_backward - 1) * terms.given_back + others(beside) + backward
        for beside in use.backwards
        if not beside.waiting
    ]
    for beside in use.weights:
        later = beside.has_gradients or terms.early_gradients
        found.append(terms.waiting + others(beside) + (deferred.total + terms.largest if later else first))
    return max(found)


def deferred_bytes(
    graph: Graph, cost_model: CostModel, positions: Sequence[int], state: Sequence[int], regions: Sequence[Region]
) -> Deferred:
    """What a stage that runs the nodes at `positions`, in order, and reads this state holds between B and W."""
    trace = graph.trace
    index = {position: i for i, position in enumerate(positions)}
    free = {i for i in positions if not any(region.first <= i < region.last for region in regions)}
    put_off = [index[i] for node in deferred_of(trace) if (i := trace.position(node.name)) in free]
    arguments = held_arguments(graph, positions, regions)
    ignored = {item.storage for item in trace.state} | {-1}
    saver, user = dict[int, int](), dict[int, int]()  # of storages: the first node that saves it, and the first put off
    for i, position in enumerate(positions):
        for storage in (*trace.nodes[position].saved, *arguments.get(position, ())):
            saver.setdefault(storage, i)
    behind, until = np.zeros((2, len(positions) + 1), dtype=np.int64)
    total = 0
    for i in put_off:
        node = trace.nodes[positions[i]]
        held = [s for s in (*node.saved, *arguments.get(positions[i], ())) if s not in ignored and s not in user]
        held = list(dict.fromkeys(held))
        user.update(dict.fromkeys(held, i))
        grad = node.spec.num_bytes if node.spec is not None else 0
        behind[i] += grad
        until[i] += grad
        for storage in held:
            behind[saver[storage]] += trace.storages[storage]
            until[i] += trace.storages[storage]
            total += trace.storages[storage]
        total += grad
    for i, num_bytes in _kept_gradients(graph, cost_model, index, state, set(put_off)).items():
        behind[i] += num_bytes
        total += num_bytes
    after: IntArray = np.cumsum(behind[::-1])[::-1]
    return Deferred(total, after[1:], np.cumsum(until)[:-1])


def held_arguments(graph: Graph, positions: Sequence[int], regions: Sequence[Region]) -> dict[int, tuple[int, ...]]:
    """Storages of arguments that calls which are put off hold until W, though autograd may save a copy of them: by position.

    A record of a call holds what is differentiated; a plain product of rows and a matrix holds the rows, which autograd saves.
    """
    trace, found = graph.trace, dict[int, tuple[int, ...]]()
    ours = set(positions)
    for node in deferred_of(trace):
        position = trace.position(node.name)
        inside = any(region.first <= position < region.last for region in regions)
        if position in ours and not inside and not _is_product(trace, node):
            values = [trace.node(name) for name in node.inputs]
            wanted = (v for v in values if v.kind is not NodeKind.GET_ATTR and v.spec is not None)
            found[position] = tuple(v.storage for v in wanted if v.spec is not None and v.spec.requires_grad)
    return found


def _is_product(trace: Trace, node: Node) -> bool:
    """Whether W multiplies rows without a record: see `smpc.executor.split_backward.pending.as_product`."""
    if node.kind is NodeKind.CALL_MODULE or node.kwargs or node.autocast is not None:
        return node.kind is NodeKind.CALL_MODULE
    place = {"torch.nn.functional.linear": 0, "torch.addmm": 1}.get(node.target)
    row = node.args[place] if place is not None and len(node.args) > place else None
    spec = trace.node(row.name).spec if isinstance(row, Ref) else None
    if spec is None:
        return False
    return len(spec.shape) == 2 or (len(spec.shape) == 3 and spec.stride == _dense(spec.shape))


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _kept_gradients(
    graph: Graph, cost_model: CostModel, index: Mapping[int, int], state: Sequence[int], put_off: set[int]
) -> dict[int, int]:
    """Bytes of gradients of parameters that B makes, by the node that makes them first: of those that a call reads which is not put off."""
    found: dict[int, int] = {}
    for i in state:
        users = [index[position] for position in graph.state_users[i] if position in index]
        own = [user for user in users if user not in put_off]
        if own and cost_model.gradient_bytes(graph.trace.state[i]):
            found[max(own)] = found.get(max(own), 0) + graph.trace.state[i].spec.num_bytes
    return found
