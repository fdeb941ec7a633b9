"""Predicted bytes of a stage, on a rank of its own.

    static        parameters it reads (a shared one is held by each of its ranks, and counts for the first of a rank's stages; tied
                  names are one), their gradients and optimizer state, buffers
    activations   of one microbatch, held from its forward to its backward: the union, by storage, of what autograd
                  saves in the stage's nodes (of a region that is computed again: of what it reads, see
                  `smpc.partitioner.memory.lifetimes`) and of the values received that need a gradient. On the last stage also of
                  the outputs that the user's loss reads, if the model does not compute one. State is not counted again. A storage that
                  another stage made counts with the bytes that are received of it, and not at all where a stage of the same rank
                  keeps it for its own backward, which comes later
    communication buffers of messages received ahead (the executor posts `RECEIVE_WINDOW` of each peer), over gloo also the
                  gradients sent that are not known to have arrived, and buffers to sum shared parameters; on
                  pipeline rank 0 the inputs of all microbatches, as far as they are not counted as activations; in a script also on the
                  last rank, where its step function runs. Over gloo, of ranks with several stages, messages are counted along the
                  programs instead: `smpc.codegen.message_buffers`
    waiting       over gloo, bytes of values sent that nothing else holds: until a message comes back that the receiver sent after it
                  had them (`smpc.executor.program.message_order`). Of k microbatches in flight at the sender and k' at the receiver, k
                  - k' wait from the first gradient on, all k before it
    peak          the most at any time of a training step in which the optimizer starts without gradients, as after
                  `zero_grad()`: see below
    transient     what the peak holds beyond static, in flight x activations, and communication. It is negative where the
                  peak comes before all gradients exist

The peak is the largest of, with k microbatches in flight of m, and n over the nodes of the stage (see
`smpc.partitioner.memory.lifetimes` for what lives while one of them works):

    first backward   waiting + (k - 1) activations + activations up to n + what lives at n + gradients of parameters from n on;
                     where n ends a region, also what its re-run takes, with the gradients that wait meanwhile
    later backward   waiting + (k' - 1) activations + activations up to n + what lives at n + all gradients of parameters + those that
                     n adds to them; k' is k, or k - 1 if the first backward comes after the last forward (k = m)
    forward          (k - 1) activations + activations up to n + what lives at n, with what waits: before the first gradient, and
                     if k < m after it, with all gradients
    last backward    over gloo, instead of waiting and k' - 1 activations: buffers for what those k - 1 microbatches received, and the
                     gradients sent back for it, which stay until the end of the step
    behind them      over gloo, with offloading: of the last microbatches, all of which are back, their activations, and for the others what
                     the last backward has for them
    optimizer        what its step makes and drops; over gloo also the buffers that are kept for the messages of the next step

Where backwards are split (zero bubble), and where a rank has several stages, `smpc.partitioner.memory.memory_by_action` has the phases
instead: peaks of the stages of a rank are then what each holds when all of them hold most. The bounds of solvers
(`smpc.partitioner.solvers.peak_bound`) count a microbatch as whole until its W, and so does this where something is offloaded.

With `fully_shard` a rank keeps its part of parameters and optimizer state, and in a step it has whole parameters and gradients as well,
which count as parameters and gradients here. Then it is also the largest of

    gathering        the first forward of a stage: what all ranks have sent, from which the whole parameters were copied, and one forward
    averaging        after the last backward, when whole parameters are gone: whole gradients twice, and over gloo the rank's part

and where gradients are added up in another dtype than they come in (fp32), each backward holds all of those that it makes to its end.
Where the model runs as it is, its blocks gather their own parameters: see `smpc.partitioner.memory.sharded_blocks`.

Storages are exact (recorded by the tracer), so activations are too; the allocator's rounding and the workspace of
libraries are not included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from smpc.partitioner.costs.node_costs import CostModel
from smpc.partitioner.graph.plan import INPUTS, Edge
from smpc.partitioner.graph.trace_graph import Graph
from smpc.partitioner.memory.lifetimes import Lifetimes, SavedActivations, lifetimes, loss_roots, saved_activations
from smpc.partitioner.memory.memory_by_action import (
    ActionTerms,
    ActionUse,
    Deferred,
    RankShare,
    StageActions,
    calls_put_off,
    deferred_bytes,
    held_arguments,
    rank_shares,
)
from smpc.partitioner.memory.sharded_blocks import UnitTerms, find_units, peak_of_units
from smpc.partitioner.stage_costs import IntArray
from smpc.tracer.ir import Node, NodeKind, Region, StateSpec, Trace

Bytes = int | IntArray
RECEIVE_WINDOW = 4  # messages of a peer that the executor receives ahead
LEAST_POOLED = 64 * 1024  # bytes; below, allocating is faster than looking for a free buffer, and none is kept


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage: see the module docstring."""

    num_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    activation_bytes: int
    communication_bytes: int
    transient_bytes: int
    peak_bytes: int
    offloaded_bytes: int = 0  # of the activations, what is offloaded
    deferred_bytes: int = 0  # of one microbatch between B and W, where the backward is split
    in_flight_bytes: int | None = None  # by actions: the most of all in flight; of several stages, at the peak
    after_step_bytes: int = 0  # while the optimizer works, beyond parameters, buffers and optimizer state
    update_bytes: int = 0  # of these, what its step makes and drops
    actions: StageActions | None = None  # where the peak is found by them
    kept: frozenset[int] = frozenset()  # storages that a microbatch keeps from F to B


@dataclass(frozen=True, slots=True)
class Resident:
    """With offloading, of the microbatches of a stage that are in flight those that are on the device, at most."""

    most: int
    last: int  # once all forwards have run, and all that are left are there


@dataclass(frozen=True, slots=True)
class StageUse:
    """What a stage is and does in a step, as far as its memory depends on it."""

    index: int
    positions: tuple[int, ...]  # its nodes, and those that it runs again, in order of execution
    state: tuple[int, ...]  # parameters and buffers that it reads
    in_flight: tuple[int, ...]  # microbatches in flight of every stage; where backwards are split, before B
    ranks: tuple[int, ...]  # that every stage runs on
    num_microbatches: int
    is_last: bool
    holds_inputs: bool  # it runs on the pipeline rank that the model's inputs are given to
    holders: Mapping[int, int]  # by parameter: ranks that hold it, where several do
    regions: tuple[Region, ...] = ()  # what it computes again, outer ones first
    resident: Resident | None = None  # None: nothing is offloaded
    actions: ActionUse | None = None  # None: no backward is split and the rank has one stage, or something is offloaded
    kept_before: Mapping[int, frozenset[int]] = field(default_factory=dict)  # by earlier stage of the rank

    @property
    def num_in_flight(self) -> int:
        """Of this stage."""
        return self.in_flight[self.index]

    def stays(self, edge: Edge) -> bool:
        """Whether a value passes from one stage of the rank to another: it is in no message."""
        return edge.source != INPUTS and self.ranks[edge.source] == self.ranks[edge.destination]

    def holds(self, edge: Edge, cost_model: CostModel) -> bool:
        """Whether it has values of an edge for a while after its forward, though nothing saves them."""
        counts = self.actions is not None and self.actions.counts_messages
        return counts if self.stays(edge) else cost_model.holds_sent

    @property
    def has_neighbours(self) -> bool:
        """Whether the rank has other stages, and what they all hold at once is found by their actions."""
        return self.actions is not None and self.ranks.count(self.ranks[self.index]) > 1

    @property
    def splits(self) -> bool:
        """Whether backwards of it are split."""
        return self.actions is not None and bool(self.actions.weights)


class StepTerms(NamedTuple):
    """What the peak of a step is made of, beyond what is there all the time: bytes of one stage, or of many stages as an array."""

    others: Callable[[int], Bytes]  # what so many microbatches in flight hold beside the one that runs
    one_forward: Bytes  # the most of the one that runs its forward
    after_forward: Bytes  # what it holds when its forward has ended
    first_backward: Bytes  # the most in the first backward of the step, the gradients included that exist by then
    later_backward: Bytes  # the most in a later one, with all gradients
    sent: Bytes  # values sent that a microbatch holds, though no node saves them, until they have arrived
    waiting: Bytes  # of all microbatches, from the first gradient on
    early_gradients: Bytes  # gradients that exist before the first backward
    gradients: Bytes  # all of them
    given_back: Bytes  # what a microbatch leaves behind until the end of the step
    gathering: Bytes  # beside the first forward, where the optimizer holds parameters in parts
    averaging: Bytes  # after the last backward, where it does
    last: int = 1  # with offloading, microbatches that are left when nothing is away any more
    others_last: Bytes = 0  # what those hold beside the one that runs


def step_peak(terms: StepTerms, cost_model: CostModel, num_in_flight: int, num_microbatches: int) -> Bytes:
    """The most of a step's phases: see the module docstring. The one formula, of a stage's prediction and of the solvers' bounds."""
    more = num_microbatches > num_in_flight
    others, sent = terms.others(num_in_flight), (num_in_flight - 1) * terms.sent
    forward = others + _larger_peak(terms.one_forward, terms.after_forward)
    found = [forward + sent + terms.early_gradients, terms.waiting + others + terms.first_backward]
    if more:
        found.append(forward + _smaller_peak(terms.waiting, sent) + terms.gradients)
    if num_microbatches > 1:
        behind = others if more else terms.others(num_in_flight - 1)
        found.append(terms.waiting + behind + terms.later_backward)
        if cost_model.holds_sent:
            found.append((num_in_flight - 1) * terms.given_back + terms.later_backward)
            if 1 < terms.last < num_in_flight:
                behind = (num_in_flight - terms.last) * terms.given_back
                found.append(behind + terms.others_last + terms.later_backward)
    if cost_model.optimizer.in_parts:
        found.append(_in_parts(terms, cost_model, num_in_flight))
    return functools.reduce(_larger_peak, found)


def _in_parts(terms: StepTerms, cost_model: CostModel, num_in_flight: int) -> Bytes:
    """The most where parameters in parts are gathered, and where their gradients are averaged."""
    left = (num_in_flight if cost_model.holds_sent else 1) * terms.given_back
    return _larger_peak(terms.gathering + terms.one_forward, left + terms.averaging)


def _larger_peak(one: Bytes, other: Bytes) -> Bytes:
    return max(one, other) if isinstance(one, int) and isinstance(other, int) else np.maximum(one, other)


def _smaller_peak(one: Bytes, other: Bytes) -> Bytes:
    return min(one, other) if isinstance(one, int) and isinstance(other, int) else np.minimum(one, other)


def received_ahead(num_microbatches: int, num_in_flight: int, window: int = RECEIVE_WINDOW) -> int:
    """Buffers for messages that are received before a microbatch in flight asks for them."""
    return min(num_microbatches, num_in_flight + window) - min(num_microbatches, num_in_flight)


def state_bytes(state: StateSpec, cost_model: CostModel) -> int:
    """Bytes of a parameter or buffer with its gradient and optimizer state."""
    return cost_model.held_bytes(state) + cost_model.gradient_bytes(state) + cost_model.optimizer_bytes(state)


def distinct_state(trace: Trace, indices: Sequence[int]) -> list[StateSpec]:
    """The state of these indices, one for each storage."""
    found: dict[tuple[int, int], StateSpec] = {}
    for i in indices:
        storage = trace.state[i].storage
        found.setdefault((storage, -1 if storage >= 0 else i), trace.state[i])
    return list(found.values())


def stage_memory(graph: Graph, cost_model: CostModel, use: StageUse, edges: Sequence[Edge]) -> StageMemory:
    """Bytes of one stage."""
    if use.actions is not None and use.splits and not calls_put_off(graph, cost_model, use.positions, use.regions):
        use = replace(use, actions=use.actions.in_one_part)
    held = distinct_state(graph.trace, use.state)
    parameters = [spec for spec in held if spec.is_parameter]
    parameter_bytes = sum(cost_model.held_bytes(spec) for spec in parameters)
    gradient_bytes = sum(cost_model.gradient_bytes(spec) for spec in parameters)
    optimizer_bytes = sum(cost_model.optimizer_bytes(spec) for spec in parameters)
    buffer_bytes = sum(spec.spec.num_bytes for spec in held if not spec.is_parameter)
    activations = _Activations.find(graph, cost_model, use, edges)
    communication = _communication_bytes(graph, cost_model, use, edges)
    communication += _batch_bytes(graph.trace, cost_model, use, activations)
    terms, working, exists, live = _step_terms(graph, cost_model, use, edges, activations, parameters)
    actions, deferred, in_flight = None, 0, None
    if use.actions is not None:
        actions = _stage_actions(graph, cost_model, use, edges, terms, working, exists)
        deferred, during_step = actions.deferred.total, max(action.num_bytes for action in actions.during())
        in_flight = use.actions.in_flight(activations.total, deferred)
    elif cost_model.units is not None:
        during_step = _peak_in_units(graph, cost_model, use, activations, terms, working, live)
    else:
        found = step_peak(terms, cost_model, use.num_in_flight, max(use.num_microbatches, use.num_in_flight))
        assert isinstance(found, int), found
        during_step = found
    during_step += communication
    update = cost_model.optimizer_scratch(parameters)
    after_step = gradient_bytes + update
    held_bytes = parameter_bytes
    if cost_model.units is not None:
        held_bytes = sum(cost_model.copy_bytes(spec) for spec in parameters)
        parts = (-(-cost_model.gradient_bytes(spec) // cost_model.optimizer_of(spec).shards) for spec in parameters)
        after_step = sum(parts) + update
    after_step += _pooled_bytes(graph.trace, cost_model, use, edges)
    peak = held_bytes + optimizer_bytes + buffer_bytes + max(during_step, after_step)
    known = parameter_bytes + gradient_bytes + optimizer_bytes + buffer_bytes + communication
    known += activations.of(use.num_in_flight, use.resident) if in_flight is None else in_flight
    return StageMemory(
        sum(spec.spec.num_elements for spec in parameters),
        parameter_bytes,
        gradient_bytes,
        optimizer_bytes,
        buffer_bytes,
        activations.total,
        communication,
        peak - known,
        peak,
        activations.offloaded,
        deferred,
        in_flight,
        after_step,
        update,
        actions,
        activations.saved.kept,
    )


def _batch_bytes(trace: Trace, cost_model: CostModel, use: StageUse, activations: _Activations) -> int:
    """Of the model's inputs, what is there all the time, beyond what microbatches in flight have of it.

    A script that trains in half precision has its batch in float32: inputs are copies, of all microbatches on a pipeline's first rank.
    Of the batches that ranks call a step function with, the first rank's is the model's inputs, and the last rank gets it, beside its own.
    """
    number, rank = use.num_microbatches, use.ranks[use.index]
    narrow = set[int]()
    if cost_model.casts:
        narrow = {node.storage for node in trace.nodes if node.kind is NodeKind.PLACEHOLDER and _is_narrow(node)}
    copied = sum(trace.storages[storage] for storage in sorted(narrow))
    given = number * (activations.input_bytes + copied)
    batches = cost_model.batches or (given,)
    beside = max(0, batches[0] - given)  # arguments that the model does not get
    is_first_of_rank = use.ranks.index(rank) == use.index
    own = batches[rank] if is_first_of_rank and 0 < rank < len(batches) else 0
    if use.holds_inputs:
        saved = activations.saved_input_bytes
        if cost_model.sends_batch:
            return beside + given + number * copied - use.num_in_flight * saved
        kept = sum(trace.storages[storage] for storage in sorted(narrow & activations.saved.kept))
        return given - use.num_in_flight * (saved - kept)
    if use.is_last and cost_model.sends_batch and rank:
        return own + beside + given
    return own


def _is_narrow(node: Node) -> bool:
    dtype = None if node.spec is None else node.spec.torch_dtype
    return dtype is not None and dtype.is_floating_point and dtype.itemsize < 4


def on_one_rank(stages: Mapping[int, StageMemory], update_bytes: int) -> dict[int, StageMemory]:
    """The stages of a rank, each with its part of the rank's peak, where its actions are known; else with its own peak.

    `update_bytes`: what the optimizer's step of all of them makes and drops.
    """
    actions = {index: memory.actions for index, memory in stages.items() if memory.actions is not None}
    if len(actions) < len(stages) or len(stages) == 1:
        return dict(stages)
    during = {
        i: share._replace(held=stages[i].communication_bytes + share.held) for i, share in rank_shares(actions).items()
    }
    after = {index: RankShare(memory.after_step_bytes, 0) for index, memory in stages.items()}
    seen = [b.messages for own in actions.values() for b in own.use.forwards if b.messages is not None]
    first = min(stages)
    more = (
        update_bytes - sum(memory.update_bytes for memory in stages.values()) + max((m.kept for m in seen), default=0)
    )
    after[first] = after[first]._replace(held=after[first].held + more)
    most = max(during, after, key=lambda shares: sum(share.held for share in shares.values()))
    found: dict[int, StageMemory] = {}
    for index, memory in stages.items():
        held, in_flight, messages = most[index]
        communication = memory.communication_bytes + messages
        known = memory.parameter_bytes + memory.optimizer_bytes + memory.buffer_bytes
        found[index] = replace(
            memory,
            peak_bytes=known + held,
            transient_bytes=held - memory.gradient_bytes - communication - in_flight,
            in_flight_bytes=in_flight,
            communication_bytes=communication,
        )
    return found


def _input_storages(trace: Trace) -> frozenset[int]:
    return frozenset(node.storage for node in trace.nodes if node.kind is NodeKind.PLACEHOLDER)


@dataclass(frozen=True, slots=True)
class _Activations:
    """What one microbatch holds between its forward and its backward."""

    total: int
    saved: SavedActivations  # by node
    offloaded: int  # of `total`, what waits in the CPU's memory where activations are offloaded
    input_bytes: int  # of the model's inputs, whether they are saved or not
    saved_input_bytes: int
    sent_bytes: int  # of the values sent that a microbatch holds beside `total` until they have arrived
    waiting_bytes: int  # of all microbatches, from the first gradient on

    @classmethod
    def find(cls, graph: Graph, cost_model: CostModel, use: StageUse, edges: Sequence[Edge]) -> _Activations:
        trace = graph.trace
        received: dict[int, int] = {}  # storage -> bytes received of it
        leaves: set[int] = set()
        there: set[int] = set()  # storages of values that the rank's stage that made them keeps for longer
        kept: dict[int, int] = {}  # storage of a value sent -> microbatches that wait from the first gradient on
        for edge in edges:
            for name in edge.values:
                node = trace.node(name)
                if edge.destination == use.index and node.kind is not NodeKind.PLACEHOLDER:
                    received[node.storage] = received.get(node.storage, 0) + _bytes_of(trace, name)
                    there |= {node.storage} & use.kept_before.get(edge.source, frozenset())
                    if _needs_gradient(trace, name):
                        leaves.add(node.storage)
                elif edge.source == use.index and use.holds(edge, cost_model) and _needs_gradient(trace, name):
                    behind = max(0, use.num_in_flight - use.in_flight[edge.destination])
                    kept[node.storage] = max(behind, kept.get(node.storage, 0))
        outputs = {node.storage for node in (trace.nodes[i] for i in loss_roots(graph)) if node.storage >= 0}
        outputs = outputs if use.is_last else set()
        ignored = {state.storage for state in trace.state} | {-1} | there
        made = {trace.nodes[i].storage for i in use.positions} - received.keys()
        inputs = trace.remembered(_input_storages, lambda: _input_storages(trace))

        def size(storage: int) -> int:
            whole = storage in made or storage not in received
            return trace.storages[storage] if whole else received[storage]

        received_bytes = sum(size(storage) for storage in sorted(leaves - ignored))
        calls = calls_put_off(graph, cost_model, use.positions, use.regions) if use.splits else ()
        before = frozenset(ignored | leaves)
        more = held_arguments(graph, calls)
        found = saved_activations(graph, use.positions, use.regions, size, before, received_bytes, more)
        saved = int(found.forward[-1]) if len(found.forward) else received_bytes
        rest = sum(size(storage) for storage in sorted(outputs - found.kept))
        alone = sorted(kept.keys() - found.kept - outputs)
        sent = {trace.node(name).storage for edge in edges if edge.source == use.index for name in edge.values}
        if use.is_last:
            sent.update(trace.node(name).storage for name in trace.output_names)
        away = found.offloadable - kept.keys() - outputs - sent - inputs - ignored
        return cls(
            saved + rest,
            found,
            sum(size(storage) for storage in sorted(away)) if use.resident is not None else 0,
            sum(trace.storages[storage] for storage in inputs),
            sum(trace.storages[storage] for storage in sorted(inputs & found.kept - ignored)),
            sum(size(storage) for storage in alone),
            sum(kept[storage] * size(storage) for storage in alone),
        )

    def of(self, num_in_flight: int, resident: Resident | None) -> int:
        """Bytes of several microbatches in flight."""
        away = 0 if resident is None else max(0, num_in_flight - resident.most)
        return num_in_flight * self.total - away * self.offloaded


@dataclass(frozen=True, slots=True)
class _Outputs:
    """What a microbatch has of the model's outputs beside its activations and the loss, on the last stage."""

    total: int = 0  # once its forward has run; in a script that trains in half precision, copies in float32 as well
    kept: int = 0  # of that, in its backward

    @classmethod
    def find(
        cls, graph: Graph, cost_model: CostModel, use: StageUse, activations: _Activations, roots: Sequence[int]
    ) -> _Outputs:
        if not use.is_last:
            return cls()
        trace = graph.trace
        given = [trace.nodes[i] for i in dict.fromkeys(graph.outputs)]
        counted = {trace.nodes[i].storage for i in roots} | {state.storage for state in trace.state} | {-1}
        counted |= activations.saved.kept | _input_storages(trace)
        narrow = [node for node in given if cost_model.casts and _is_narrow(node)]
        copies = sum(4 * node.spec.num_elements for node in narrow if node.spec is not None)
        alone = {node.storage for node in given} - counted
        dropped = alone & {node.storage for node in narrow}
        total = copies + sum(trace.storages[storage] for storage in sorted(alone))
        kept = total - sum(trace.storages[storage] for storage in sorted(dropped))
        return cls(total, kept if cost_model.keeps_outputs else 0)


def _step_terms(
    graph: Graph,
    cost_model: CostModel,
    use: StageUse,
    edges: Sequence[Edge],
    activations: _Activations,
    parameters: Sequence[StateSpec],
) -> tuple[StepTerms, IntArray, IntArray, Lifetimes]:
    """What the peak is made of; by node, what works in its backward, and the gradients of parameters that exist by then; lifetimes."""
    trace = graph.trace
    gradient_bytes = sum(cost_model.gradient_bytes(state) for state in parameters)
    sent = [name for edge in edges if edge.source == use.index for name in edge.values if _needs_gradient(trace, name)]
    roots = loss_roots(graph) if use.is_last else ()
    until = activations.saved
    live = lifetimes(graph, use.positions, roots, [trace.position(name) for name in sent], until.kept)
    exists, added = _parameter_gradients(graph, cost_model, use)
    outputs = _Outputs.find(graph, cost_model, use, activations, roots)
    working = working_bytes(until, live) + outputs.kept
    early = gradient_bytes if cost_model.optimizer.main_grad else 0  # gradients that exist before the first backward
    gathered = sum(cost_model.gathered_bytes(state) for state in parameters)
    terms = StepTerms(
        others=lambda count: activations.of(count, use.resident) - activations.total,
        one_forward=int((until.forward + live.forward).max(initial=0)),
        after_forward=activations.total
        + activations.sent_bytes
        + sum(_bytes_of(trace, trace.nodes[i].name) for i in roots)
        + outputs.total,
        first_backward=int((working + (gradient_bytes if early else exists)).max(initial=0)),
        later_backward=int((working + added).max(initial=0)) + gradient_bytes,
        sent=activations.sent_bytes,
        waiting=activations.waiting_bytes,
        early_gradients=early,
        gradients=gradient_bytes,
        given_back=_given_back(graph, use, edges),
        gathering=gathered,
        averaging=sum(cost_model.averaging_bytes(state) for state in parameters) - gathered,
        last=1 if use.resident is None else use.resident.last,
        others_last=0 if use.resident is None else (use.resident.last - 1) * activations.total,
    )
    return terms, working, exists, live


def _peak_in_units(
    graph: Graph,
    cost_model: CostModel,
    use: StageUse,
    activations: _Activations,
    terms: StepTerms,
    working: IntArray,
    live: Lifetimes,
) -> int:
    """The most of a step where each block gathers its own parameters, beyond their parts."""
    units = find_units(graph, cost_model, use.positions, use.state)
    for unit in units:
        unit.exists, unit.added = _parameter_gradients(graph, cost_model, replace(use, state=tuple(unit.state)))
    forward = activations.saved.forward + live.forward
    forward[-1:] = np.maximum(forward[-1:], int(terms.after_forward))
    return peak_of_units(
        units, UnitTerms(activations.saved.forward, forward, working, live.before), use.num_microbatches
    )


def _stage_actions(
    graph: Graph,
    cost_model: CostModel,
    use: StageUse,
    edges: Sequence[Edge],
    terms: StepTerms,
    working: IntArray,
    exists: IntArray,
) -> StageActions:
    """What the actions of a stage hold, from the terms of a step that is found without them."""
    assert use.actions is not None, "its actions are known"
    state, in_parts = [graph.trace.state[i] for i in use.state], cost_model.optimizer.in_parts
    deferred = Deferred(0, np.zeros_like(working), np.zeros_like(working))
    if use.splits:
        deferred = deferred_bytes(graph, cost_model, use.positions, use.state, use.regions)
    found = ActionTerms(
        int(terms.others(2)),
        int(_larger_peak(terms.one_forward, terms.after_forward)),
        working,
        exists,
        max((item.spec.num_bytes for item in state if cost_model.gradient_bytes(item)), default=0),
        int(terms.gradients),
        int(terms.early_gradients),
        int(terms.sent),
        int(terms.waiting),
        int(terms.given_back) if cost_model.holds_sent else 0,
        int(terms.first_backward),
        int(terms.later_backward),
        int(terms.gathering + terms.one_forward) if in_parts else 0,
        int(terms.averaging) if in_parts else 0,
    )
    if use.has_neighbours:
        arriving = sum(
            _gradient_bytes(graph.trace, edge) for edge in edges if edge.source == use.index and not use.stays(edge)
        )
        entering = (
            edge for edge in edges if edge.destination == use.index and edge.source != INPUTS and not use.stays(edge)
        )
        received = sum(edge.num_bytes for edge in entering) if cost_model.holds_sent else 0
        found = found._replace(received=received, arriving=arriving, unanswered=len(set(use.ranks)))
    return StageActions(found, deferred, use.actions)


def working_bytes(saved: SavedActivations, live: Lifetimes) -> IntArray:
    """By node: activations of the microbatch and their gradients while its backward works, the re-run before it included."""
    rerun = np.where(saved.rerun > 0, saved.rerun + live.before, 0)
    found: IntArray = np.maximum(saved.backward + live.backward, rerun)
    return found


def _given_back(graph: Graph, use: StageUse, edges: Sequence[Edge]) -> int:
    """Bytes that a microbatch leaves behind until the end of the step: buffers for what it received, and gradients sent back."""
    entering = [
        edge
        for edge in edges
        if edge.destination == use.index and not use.stays(edge) and not (edge.source == INPUTS and use.holds_inputs)
    ]
    values = [name for edge in entering if edge.source != INPUTS for name in edge.values]
    gradients = sum(_bytes_of(graph.trace, name) for name in values if _needs_gradient(graph.trace, name))
    return sum(edge.num_bytes for edge in entering) + gradients


def _parameter_gradients(graph: Graph, cost_model: CostModel, use: StageUse) -> tuple[IntArray, IntArray]:
    """By node: the gradients of parameters that exist once its backward works, and those that it is adding up.

    Where several nodes read a parameter, each after the first has its own gradient and the sum beside what has been summed.
    """
    index = {position: i for i, position in enumerate(use.positions)}
    exists, change = np.zeros((2, len(use.positions) + 1), dtype=np.int64)
    summing = np.zeros(len(use.positions), dtype=np.int64)
    for i in use.state:
        state = graph.trace.state[i]
        users = [index[position] for position in graph.state_users[i] if position in index]
        num_bytes = cost_model.gradient_bytes(state)
        if users and num_bytes:
            exists[: max(users) + 1] += num_bytes
            apart = cost_model.apart_bytes(state)
            exists[: max(users) + 1] -= num_bytes - apart if apart else 0
            change[0 if apart else min(users)] += state.spec.num_bytes
            change[max(users) + 1] -= state.spec.num_bytes
            again = [] if use.splits else sorted(set(users))[:-1]
            summing[again] = np.maximum(summing[again], 2 * state.spec.num_bytes)
    return exists[:-1] + summing, np.cumsum(change)[:-1] + summing


def _communication_bytes(graph: Graph, cost_model: CostModel, use: StageUse, edges: Sequence[Edge]) -> int:
    """Buffers of messages; the one that a microbatch in flight has received is an activation."""
    trace = graph.trace
    num_microbatches, window = use.num_microbatches, RECEIVE_WINDOW
    counts = use.actions is not None and use.actions.counts_messages  # then they are known by action
    edges = [] if counts else edges
    peers = [_peer(use, edge) for edge in edges]
    total = 0
    for edge, peer in zip(edges, peers, strict=True):
        gradients, kinds = _gradient_bytes(trace, edge), max(1, peers.count(peer))
        ahead = _window_of(peers, peer)
        more: float = received_ahead(num_microbatches, use.num_in_flight, ahead)
        back: float = min(num_microbatches, ahead + 1)
        if use.has_neighbours:  # the window is of all their messages, and one stage has a gradient at a time
            more, back = min(more, window / kinds), min(num_microbatches, window / kinds)
        if peer is None:
            continue
        if edge.source == INPUTS:
            total += 0 if use.holds_inputs or edge.destination != use.index else int(more * edge.num_bytes)
        elif edge.destination == use.index:
            unread = max(0, min(num_microbatches, use.in_flight[edge.source]) - use.num_in_flight)
            sent = unread if cost_model.holds_sent else 1
            total += int(more * edge.num_bytes) + sent * gradients
        elif edge.source == use.index:
            total += int(back * gradients)
    if cost_model.holds_sent:
        shared = [i for i in use.state if i in use.holders]
        total += sum((use.holders[i] - 1) * cost_model.copy_bytes(trace.state[i]) for i in shared)
    return total


def _pooled_bytes(trace: Trace, cost_model: CostModel, use: StageUse, edges: Sequence[Edge]) -> int:
    """Over gloo, receive buffers that are kept for the next step, of a rank with one stage."""
    if not cost_model.holds_sent or use.has_neighbours:
        return 0
    peers, total = [_peer(use, edge) for edge in edges], 0
    for edge, peer in zip(edges, peers, strict=True):
        arrives = edge.destination == use.index
        if peer is None or (edge.source == INPUTS and (use.holds_inputs or not arrives)):
            continue
        ahead = _window_of(peers, peer)
        sizes = [_bytes_of(trace, name) for name in edge.values if arrives or _needs_gradient(trace, name)]
        number = min(use.num_microbatches, use.num_in_flight + ahead if arrives else ahead + 1)
        total += number * sum(size for size in sizes if size >= LEAST_POOLED)
    return total


def _window_of(peers: Sequence[int | None], peer: int | None) -> int:
    """Messages of one edge that are received ahead: all kinds of messages of a peer share the window."""
    return -(-RECEIVE_WINDOW // max(1, peers.count(peer)))


def _gradient_bytes(trace: Trace, edge: Edge) -> int:
    return sum(_bytes_of(trace, name) for name in edge.values if _needs_gradient(trace, name))


def _peer(use: StageUse, edge: Edge) -> int | None:
    """The rank that the stage's rank receives messages of an edge from: values, or the gradients for what it sent; None: there are none."""
    own, receiver = use.ranks[use.index], use.ranks[edge.destination]
    sender = 0 if edge.source == INPUTS else use.ranks[edge.source]
    if use.stays(edge):
        return None
    if receiver == own:
        return sender
    return receiver if sender == own and edge.source != INPUTS else None


def _bytes_of(trace: Trace, name: str) -> int:
    spec = trace.node(name).spec
    assert spec is not None, f"{name} is not a tensor"
    return spec.num_bytes


def _needs_gradient(trace: Trace, name: str) -> bool:
    spec = trace.node(name).spec
    return spec is not None and spec.requires_grad
