"""Memory of a rank by its actions: where backwards are in two parts, or where the rank has several stages.

B computes the gradients of inputs, and W, later, the gradients of parameters.

Between B and W a microbatch holds what W reads, and nothing else (see `smpc.executor.split_backward`):

    deferred      of one microbatch: for each call that is put off what autograd saves of it, by storage, the arguments that its
                  record holds, and the gradient of its result; of the other calls the gradients of parameters, which W adds up

A stage holds the largest of the following over its actions, with a other microbatches that wait for B, d that wait for W, and n over the
nodes of the stage (for the terms see `smpc.partitioner.memory.peak`):

    F     a activations + d deferred + activations up to n + what lives at n, with what waits
    B     a activations + d deferred + activations up to n + what lives at n + deferred of the nodes behind n, with what waits; over gloo
          also, instead of waiting, what the others have left behind
    W     a activations + d deferred + deferred of the nodes up to n + gradients of parameters from n on; in a later W instead of these the
          one that is added at n
    BW    a backward in one part: a activations + d deferred + its first or later backward

and from the first W or BW on all gradients of parameters.

A rank with several stages runs one at a time. So its peak is the largest, over its actions, of what the action's stage holds meanwhile and
the others hold beside it: their microbatches that wait, and their gradients. The number of message buffers never falls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from smpc.partitioner.costs.node_costs import CostModel, put_off
from smpc.partitioner.graph.trace_graph import Graph
from smpc.partitioner.stage_costs import IntArray
from smpc.tracer.constants import Ref
from smpc.tracer.ir import Node, NodeKind, Region, Trace


class HeldMessages(NamedTuple):
    """What a rank holds of messages: see `smpc.codegen.message_buffers`."""

    num_bytes: int  # of buffers that no microbatch in flight has, and of gradients sent
    sent: tuple[
        tuple[int, int], ...
    ] = ()  # by stage, microbatches whose values are not known to have arrived, or to be taken
    kept: int = 0  # of `num_bytes` and of what microbatches have, buffers that stay for the next step


class Beside(NamedTuple):
    """What there is beside the microbatch of an action: others that wait for B, others that wait for W, and whether a W has run."""

    waiting: int
    deferred: int
    has_gradients: bool
    others: tuple[tuple[int, Beside], ...] = ()  # the same of the rank's other stages, by stage
    messages: HeldMessages | None = None  # of a rank with several stages, where they are counted


@dataclass(frozen=True, slots=True)
class ActionUse:
    """What is there beside the forwards, the two parts of backwards, and the whole backwards of a stage in a step, each once."""

    forwards: tuple[Beside, ...]
    backwards: tuple[Beside, ...]
    weights: tuple[Beside, ...]
    whole: tuple[Beside, ...] = ()

    @property
    def before_backward(self) -> int:
        """The most microbatches between F and B."""
        return 1 + max((beside.waiting for beside in (*self.backwards, *self.whole)), default=0)

    @property
    def counts_messages(self) -> bool:
        """Whether messages are counted along the rank's actions."""
        return any(beside.messages is not None for beside in self.forwards)

    @property
    def alone(self) -> ActionUse:
        """The same, as if the rank had no other stage."""
        kinds = (self.forwards, self.backwards, self.weights, self.whole)
        return ActionUse(*(tuple(dict.fromkeys(b._replace(others=()) for b in kind)) for kind in kinds))

    def times(self, factor: float, most: int) -> ActionUse:
        """The use with `factor` times as many microbatches in flight, at most `most`; for a stage whose rank has no other."""

        def more(kind: tuple[Beside, ...]) -> tuple[Beside, ...]:
            found = []
            for beside in kind:
                before = min(most, round((beside.waiting + 1) * factor)) - 1
                after = min(most - 1 - before, round(beside.deferred * factor))
                found.append(beside._replace(waiting=before, deferred=after))
            return tuple(dict.fromkeys(found))

        return ActionUse(more(self.forwards), more(self.backwards), more(self.weights), more(self.whole))

    @property
    def in_one_part(self) -> ActionUse:
        """The same, of a stage that has nothing to put off."""
        whole = tuple(dict.fromkeys(map(_in_one_part, (*self.whole, *self.backwards))))
        return ActionUse(tuple(dict.fromkeys(map(_in_one_part, self.forwards))), (), (), whole)

    def in_flight(self, activations: int, deferred: int) -> int:
        """The most bytes of all microbatches in flight, of so many before B and after it."""
        before_b = (*self.forwards, *self.backwards, *self.whole)
        found = [(b.waiting + 1) * activations + b.deferred * deferred for b in before_b]
        return max(found + [b.waiting * activations + (b.deferred + 1) * deferred for b in self.weights])


def _in_one_part(beside: Beside) -> Beside:
    return beside._replace(deferred=0, has_gradients=beside.has_gradients or beside.deferred > 0)


@dataclass(frozen=True, slots=True)
class Deferred:
    """Bytes of one microbatch: `total` from B to W; by node, in B and in W."""

    total: int
    behind: IntArray  # of the nodes behind each, beyond the activations up to it
    until: IntArray  # of the nodes up to each


class ActionTerms(NamedTuple):
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
    first_backward: int  # in one part, with the gradients of parameters
    later_backward: int
    gathering: int = 0  # beside the first forward, where the optimizer holds parameters in parts
    averaging: int = 0  # after the last backward, where it does
    received: int = 0  # in messages, of a microbatch
    arriving: int = 0  # the gradient that a backward has received, where it is not among the messages
    unanswered: int = 1 << 30  # the most microbatches whose values are not known to have arrived


class ActionBytes(NamedTuple):
    """What a stage holds during an action, beyond parameters, optimizer state, buffers and messages received ahead."""

    num_bytes: int
    in_flight: int  # of these, what waits from F to the end of the backward
    beside: Beside
    runs: int  # microbatches before W that it is about: none or one


@dataclass(frozen=True, slots=True)
class StageActions:
    """The actions of a stage, and what it holds meanwhile."""

    terms: ActionTerms
    deferred: Deferred
    use: ActionUse

    def during(self) -> Iterator[ActionBytes]:
        """The most in each of its actions."""
        terms, deferred, use, most = self.terms, self.deferred, self.use, self.use.before_backward
        backward = int((terms.working + deferred.behind).max(initial=0))
        for b in use.forwards:
            running = max(terms.forward, terms.gathering if b[:3] == (0, 0, False) else 0)
            yield self._action(b, self._sent(b) + running, 1, 0)
        for b in use.backwards:
            yield self._action(b, self._arrived(b, most) + backward, 1, 0)
        first = int((deferred.until + terms.exists).max(initial=0))
        for b in use.weights:
            later = b.has_gradients or terms.early_gradients
            waiting = terms.waiting if b.messages is None else 0
            yield self._action(b, waiting + (deferred.total + terms.largest if later else first), 0, 1)
        for b in use.whole:
            exist = terms.gradients if b.has_gradients else terms.early_gradients  # the terms have them, too
            running = terms.later_backward if b.has_gradients else terms.first_backward
            yield self._action(b, self._arrived(b, most) + running - exist, 1, 0)
        for b in (*use.weights, *use.whole) if terms.averaging else ():
            if not b.waiting and not b.deferred:
                yield self._action(b, max(1, most) * terms.given_back + terms.averaging, 0, 0)

    def _arrived(self, beside: Beside, most: int) -> int:
        """Messages beside a backward, where they are not counted along the actions."""
        if beside.messages is not None:
            return 0
        left = 0 if beside.waiting or beside.others else (most - 1) * self.terms.given_back
        return max(self.terms.waiting, left) + self.terms.arriving

    def idle(self, beside: Beside, *, counts_messages: bool) -> int:
        """While another stage of the rank runs."""
        if counts_messages:
            return self._others(beside)
        has_begun = beside.has_gradients or beside.deferred > 0
        return self._others(beside) + (self.terms.waiting if has_begun else self._sent(beside))

    def waiting(self, beside: Beside, before_b: int = 0, before_w: int = 0) -> int:
        """Bytes of the microbatches in flight, with so many more."""
        return (beside.waiting + before_b) * self.terms.activations + (beside.deferred + before_w) * self.deferred.total

    def _action(self, beside: Beside, running: int, before_b: int, before_w: int) -> ActionBytes:
        return ActionBytes(self._others(beside) + running, self.waiting(beside, before_b, before_w), beside, before_b)

    def _sent(self, beside: Beside) -> int:
        """Values sent that nothing else holds, before the first gradient: with other stages on the rank, messages come back soon."""
        return min(beside.waiting, self.terms.unanswered) * self.terms.sent if beside.messages is None else 0

    def _others(self, beside: Beside) -> int:
        own = beside if self.deferred.total else _in_one_part(beside)
        gradients = self.terms.gradients if own.has_gradients else self.terms.early_gradients
        return self.waiting(beside) + gradients


class RankShare(NamedTuple):
    """Bytes of one stage when its rank holds most."""

    held: int
    in_flight: int  # of these, in microbatches in flight
    messages: int = 0  # of these, where messages are counted along the rank's actions


def rank_shares(stages: Mapping[int, StageActions]) -> dict[int, RankShare]:
    """By stage of one rank, when all of them together hold most."""

    def received(stage: int, action: ActionBytes) -> int:
        waiting = {stage: action.beside.waiting + action.runs} | {i: b.waiting for i, b in action.beside.others}
        return sum(stages[i].terms.received * number for i, number in waiting.items())

    known = [(stage, action, received(stage, action)) for stage, own in stages.items() for action in own.during()]
    most_received = max(now for *_, now in known)
    most, found = -1, dict[int, RankShare]()
    for stage, (num_bytes, in_flight, beside, _), now in known:
        has_begun = any(b.has_gradients or b.deferred for b in (beside, *(other for _, other in beside.others)))
        messages, counts = 0, beside.messages is not None
        if beside.messages is not None:
            messages = beside.messages.num_bytes + sum(stages[i].terms.sent * n for i, n in beside.messages.sent)
        left = most_received - now if has_begun and not counts else 0
        shares = {stage: RankShare(num_bytes + left + messages, in_flight, messages)}
        for i, other in beside.others:
            shares[i] = RankShare(stages[i].idle(other, counts_messages=counts), stages[i].waiting(other))
        total = sum(share.held for share in shares.values())
        if total > most:
            most, found = total, shares
    return found


def deferred_bytes(
    graph: Graph, cost_model: CostModel, positions: Sequence[int], state: Sequence[int], regions: Sequence[Region]
) -> Deferred:
    """What a stage that runs the nodes at `positions`, in order, and reads this state holds between B and W."""
    trace = graph.trace
    index = {position: i for i, position in enumerate(positions)}
    calls = calls_put_off(graph, cost_model, positions, regions)
    places = [index[i] for i in calls]
    arguments = held_arguments(graph, calls)
    ignored = {item.storage for item in trace.state} | {-1}
    saver, user = dict[int, int](), dict[int, int]()  # of storages: the first node that saves it, and the first put off
    for i, position in enumerate(positions):
        for storage in (*trace.nodes[position].saved, *arguments.get(position, ())):
            saver.setdefault(storage, i)
    behind, until = np.zeros((2, len(positions) + 1), dtype=np.int64)
    total = 0
    for i in places:
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
    for i, num_bytes in _kept_gradients(graph, cost_model, index, state, set(places)).items():
        behind[i] += num_bytes
        total += num_bytes
    after: IntArray = np.cumsum(behind[::-1])[::-1]
    return Deferred(total, after[1:], np.cumsum(until)[:-1])


def calls_put_off(
    graph: Graph, cost_model: CostModel, positions: Sequence[int], regions: Sequence[Region]
) -> tuple[int, ...]:
    """Positions of the calls whose gradients of parameters are left to W, in a stage that runs the nodes at `positions`."""
    ours, trace = set(positions), graph.trace
    calls = trace.remembered(
        (calls_put_off, cost_model.worthwhile),
        lambda: [trace.position(node.name) for node in put_off(trace, cost_model)],
    )
    return tuple(i for i in calls if i in ours and not any(region.first <= i < region.last for region in regions))


def held_arguments(graph: Graph, calls: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Storages of arguments that `calls`, which are put off, hold until W, though autograd may save a copy of them: by position.

    A record of a call holds what is differentiated; a plain product of rows and a matrix holds the rows, which autograd saves.
    """
    trace, found = graph.trace, dict[int, tuple[int, ...]]()
    for position in calls:
        node = trace.nodes[position]
        if not _is_product(trace, node):
            values = [trace.node(name) for name in node.inputs]
            wanted = (v for v in values if v.kind is not NodeKind.GET_ATTR and v.spec is not None)
            found[position] = tuple(v.storage for v in wanted if v.spec is not None and v.spec.requires_grad)
    return found


def _is_product(trace: Trace, node: Node) -> bool:
    """Whether W multiplies rows without a record: see `smpc.executor.split_backward.deferred_calls.as_product`."""
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
