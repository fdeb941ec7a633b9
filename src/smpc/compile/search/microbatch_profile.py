"""Times and bytes of a microbatch, operation by operation, and of its stages if it is cut into so many, without a plan.

    profile = Profile.of(analysis, chain, ...)     of a recorded microbatch, once
    stages = profile.stages("blocks", 16)          cut so that the longest stage is as short as can be, as plans are
    stages.peak(in_flight, ...)                    about what the fullest rank holds, of one with split backwards by `split_uses.splits`

The cut goes as the solver's does, but one stage after the other: of the ends that the smallest longest stage allows, the one that breaks
the fewest modules, and of these the one that the fewest bytes cross. Bytes are counted as in `smpc.partitioner.memory.peak`, with a rougher
look at what lives while one operation works.

Modules that are computed again (`Again`) are not walked through for every microbatch: what they keep is taken to shrink as it does in the
smallest microbatch. A module that takes longer than a stage's share is cut, and then keeps what it keeps without.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from smpc.codegen.program import Op
from smpc.compile.replica_traffic import Sharding
from smpc.compile.search.split_uses import BesideRows, SplitUses
from smpc.partitioner.costs.node_costs import SENT_UPDATES, CostModel
from smpc.partitioner.graph.trace_graph import Graph
from smpc.partitioner.memory.lifetimes import lifetimes, loss_roots, saved_activations
from smpc.partitioner.memory.memory_by_action import deferred_bytes
from smpc.partitioner.memory.peak import RECEIVE_WINDOW, working_bytes
from smpc.partitioner.solvers.chain import ChainProblem
from smpc.partitioner.solvers.coarsen import Analysis, state_items
from smpc.partitioner.stage_costs import FloatArray, IntArray
from smpc.tracer.ir import NodeKind, StateSpec, Trace

TOLERANCE = 0.01  # by which a stage may be longer, for a cut that breaks less
_ROUNDS = 40  # of the bisection


@dataclass(frozen=True)
class _Bytes:
    """Bytes that a stage has once, however many of its operations use them."""

    own: FloatArray  # up to each operation, [n + 1], each where it is used first
    user: IntArray  # the uses after the first
    before: IntArray  # the use before that one
    size: FloatArray

    @classmethod
    def of(cls, num_units: int, items: Sequence[tuple[Sequence[int], int]]) -> _Bytes:
        """Of (users in ascending order, bytes)."""
        first = np.zeros(num_units + 1)
        for users, size in items:
            first[users[0] + 1] += size
        later = [(b, a, size) for users, size in items for a, b in itertools.pairwise(users) if size]
        rows = np.asarray(later, dtype=np.int64).reshape(-1, 3)
        return cls(np.cumsum(first), rows[:, 0], rows[:, 1], rows[:, 2].astype(float))

    def elsewhere(self, starts: IntArray) -> FloatArray:
        """By stage, what it uses that an earlier stage has used first."""
        found = np.zeros(len(starts))
        if len(self.user):
            stage = np.searchsorted(starts, self.user, side="right") - 1
            fresh = self.before < starts[stage]
            np.add.at(found, stage[fresh], self.size[fresh])
        return found

    def by_stage(self, starts: IntArray, ends: IntArray) -> FloatArray:
        """What each stage has."""
        found: FloatArray = self.own[ends] - self.own[starts] + self.elsewhere(starts)
        return found


@dataclass(frozen=True)
class Stages:
    """What each stage is, one microbatch of it: seconds, and bytes."""

    seconds: FloatArray
    parameters: FloatArray
    buffers: FloatArray
    optimizer: FloatArray
    gradients: FloatArray
    activations: FloatArray  # from its forward to its backward
    forward: FloatArray  # the most while the forward runs
    first: FloatArray  # the most while the first backward runs, with the gradients of parameters that are there by then
    later: FloatArray  # the most while another one runs, gradients of parameters left out
    deferred: FloatArray  # where the backward is split, between its two parts, of activations and their gradients
    kept: FloatArray  # there, of gradients of parameters, which the first part makes
    received: FloatArray
    sent: FloatArray
    inputs: float  # of the model
    experts: tuple[
        FloatArray, FloatArray, FloatArray
    ]  # of these, parameters, optimizer and gradients of experts that ranks divide

    def share(self, num_ranks: int, placement: IntArray) -> float:
        """The busiest rank's share of the whole time."""
        busy = np.bincount(placement, self.seconds, minlength=num_ranks)
        return float(busy.max() / max(busy.sum(), 1e-30))

    def peak(self, in_flight: IntArray, placement: IntArray, held: Held, split: SplitUses | None = None) -> float:
        """About what the fullest rank holds. `split`: the stages' actions, where their backwards are split."""
        if split is not None:
            in_flight = split.before_backward
        k, m, memory = np.minimum(in_flight, held.microbatches), held.microbatches, held.memory
        parameters, gradients = self.parameters * held.state, self.gradients * held.state
        activations, later = self.activations * memory, self.later * memory
        others = (k - 1) * activations
        behind = np.where(k < m, others, np.maximum(k - 2, 0) * activations)
        exists = gradients if held.early else (self.first - self.later) * held.state
        found = np.maximum(others + later + exists, others + np.maximum(self.forward * memory, activations))
        more = others + np.maximum(self.forward * memory, activations) + gradients
        found = np.where(k < m, np.maximum(found, more), found)
        if m > 1:
            found = np.maximum(found, behind + later + gradients)
        after = gradients + held.update_of(parameters)
        kept = parameters + self.buffers + self._kept(held)
        if held.sharding is Sharding.FULL and held.replicas > 1:
            after = 2 * gradients - parameters
            found = np.maximum(found, self.forward * memory + parameters)
        if split is None:
            most = np.bincount(placement, np.maximum(found, after))
        else:
            most = np.maximum(self._during(split, placement, held), np.bincount(placement, after))
        ahead = np.minimum(m, k + RECEIVE_WINDOW) - k + 1
        messages = ahead * self.received + min(m, RECEIVE_WINDOW + 1) * self.sent
        kept = kept + messages * memory
        kept[0] += m * self.inputs * memory
        return float((np.bincount(placement, kept) + most).max())

    def _kept(self, held: Held) -> FloatArray:
        """What stays beside parameters: of the optimizer, the buckets of replicas, and parts of parameters."""
        whole, found = (self.parameters, self.optimizer, self.gradients), np.zeros(len(self.seconds))
        others = tuple(column - own for column, own in zip(whole, self.experts, strict=True))
        nothing = np.zeros(len(self.seconds))  # experts are summed at the end of a step, without buckets
        experts = *self.experts[:2], nothing
        for (parameters, optimizer, buckets), number in ((others, held.replicas), (experts, held.same)):
            found += held.kept_of(optimizer, buckets, number)
            if held.sharding is Sharding.FULL and held.replicas > 1:
                found += parameters / number
        return found * held.state

    def _during(self, split: SplitUses, placement: IntArray, held: Held) -> FloatArray:
        """By rank, activations and gradients: `smpc.partitioner.memory.memory_by_action` with a rougher look at single operations."""
        activations, forward, later = (column * held.memory for column in (self.activations, self.forward, self.later))
        gradients, exists = self.gradients * held.state, (self.first - self.later) * held.state
        deferred = self.deferred * held.memory + self.kept * held.state
        is_gathered = held.sharding is Sharding.FULL and held.replicas > 1

        def holds(beside: BesideRows) -> FloatArray:
            stage = beside.stage
            own = np.where(beside.has_gradients | held.early, gradients[stage], 0.0)
            found: FloatArray = beside.waiting * activations[stage] + beside.deferred * deferred[stage] + own
            return found

        def running(op: Op | None, beside: BesideRows) -> FloatArray:
            stage, exist = beside.stage, beside.has_gradients | held.early
            found: FloatArray
            match op:
                case Op.FORWARD:
                    gathered = np.where(beside.is_first & is_gathered, self.parameters[stage] * held.state, 0.0)
                    found = np.maximum(forward[stage] + gathered, activations[stage])
                case Op.BACKWARD:
                    found = np.maximum(later[stage], deferred[stage])
                case Op.WEIGHT:
                    found = np.where(exist, deferred[stage], np.maximum(deferred[stage], gradients[stage]))
                case _:
                    found = later[stage] + np.where(exist, 0.0, exists[stage])
            return found

        most = np.zeros(len(self.seconds))
        for op, rows in split.actions.items():
            together = holds(rows.own) + running(op, rows.own)
            np.add.at(together, rows.row, holds(rows.others))
            np.maximum.at(most, rows.own.stage, together)
        if not split.share_ranks:
            return np.bincount(placement, most).astype(float)
        by_rank = np.zeros(int(placement.max()) + 1)
        np.maximum.at(by_rank, placement, most)
        return by_rank


@dataclass(frozen=True, slots=True)
class Held:
    """What else the peak of a rank depends on. `memory`, `state`: how many times the bytes of the profile."""

    microbatches: int
    sharding: Sharding
    replicas: int  # ranks that hold the same parameters
    same: int  # ranks that hold the same experts
    scratch: float  # what the optimizer makes and drops, in sizes of the parameters
    buckets: float  # bytes of updated parameters that are under way at a time
    early: bool  # gradients are there before the first backward
    memory: float = 1.0
    state: float = 1.0

    def update_of(self, parameters: FloatArray) -> FloatArray:
        """What the optimizer makes and drops; ranks that divide its state send each other what they have updated, in buckets."""
        if self.sharding is not Sharding.STATE or self.replicas == 1:
            return self.scratch * parameters
        found: FloatArray = np.maximum(self.scratch / self.replicas * parameters, np.minimum(parameters, self.buckets))
        return found

    def kept_of(self, optimizer: FloatArray, buckets: FloatArray, number: int) -> FloatArray:
        """Of the optimizer, with the buckets of replicas; `number`: ranks that hold the same."""
        if number == 1:
            return optimizer
        if self.sharding is Sharding.FULL:
            return optimizer / number
        return (optimizer / number if self.sharding is Sharding.STATE else optimizer) + buckets


@dataclass(frozen=True, eq=False)
class Profile:
    """One microbatch: see the module docstring. Arrays are by operation, [n], or up to each, [n + 1]."""

    seconds: FloatArray  # [n] forward and backward
    forward_seconds: FloatArray  # [n]
    compute: IntArray  # [n] positions in the trace
    pieces: IntArray  # where cuts may be, 0 and n included
    depth: FloatArray  # [n] modules that a cut before an operation breaks
    crossing: FloatArray  # [n] bytes that cross such a cut
    leaves: FloatArray  # [n] of these, what no operation after the cut saves
    saved: _Bytes
    parameters: _Bytes
    buffers: _Bytes
    optimizer: _Bytes
    gradients: _Bytes
    experts: tuple[_Bytes, _Bytes, _Bytes]  # parameters, optimizer and gradients of those that ranks divide
    forward: FloatArray  # [n] bytes beyond what is saved up to an operation, while it runs
    working: FloatArray  # [n] the same, while its backward runs
    deferred: FloatArray  # [n] bytes that are held between the two parts of a split backward
    outputs: float  # bytes that the last stage hands on
    inputs: float
    scratch: float  # see `Held`
    buckets: float
    early: bool
    regions: dict[str, tuple[IntArray, float]] = field(default_factory=dict)  # see `compute_again`
    _known: dict[tuple[str, int], Stages | None] = field(default_factory=dict)

    @classmethod
    def of(cls, analysis: Analysis, chain: ChainProblem, experts: Collection[str] = ()) -> Profile:
        """The profile of what was recorded; `chain`: its chain problem; `experts`: names of parameters of experts that ranks divide."""
        graph, costs, trace = analysis.graph, analysis.cost_model, analysis.graph.trace
        n, compute = graph.num_compute, graph.compute
        forbidden = np.zeros(n + 1, dtype=bool)
        forbidden[list(chain.forbidden)] = True
        forbidden[[0, n]] = False
        roots, regions = loss_roots(graph), analysis.checkpoints.regions
        held = frozenset(state.storage for state in trace.state)
        positions = compute.tolist()
        until = saved_activations(graph, positions, regions, lambda storage: trace.storages[storage], held)
        live = lifetimes(graph, positions, roots, kept=until.kept, exact=False)

        def state(num_bytes: Callable[[StateSpec], int]) -> _Bytes:
            return _Bytes.of(n, state_items(graph, num_bytes))

        def of_experts(num_bytes: Callable[[StateSpec], int]) -> _Bytes:
            return state(lambda spec: num_bytes(spec) if spec.name in experts and spec.is_parameter else 0)

        specs = [trace.nodes[i].spec for i in roots]
        given = {node.storage for node in trace.nodes if node.kind is NodeKind.PLACEHOLDER}
        return cls(
            (analysis.times.forward + analysis.times.backward)[compute],
            analysis.times.forward[compute],
            compute,
            np.flatnonzero(~forbidden),
            np.asarray(chain.cut_depth, dtype=float),
            np.asarray(chain.cut_bytes, dtype=float),
            _profile_leaves(graph, set(analysis.recomputable)),
            _saved_in_profile(graph, held),
            state(lambda spec: spec.spec.num_bytes if spec.is_parameter else 0),
            state(lambda spec: 0 if spec.is_parameter else spec.spec.num_bytes),
            state(costs.optimizer_bytes),
            state(costs.gradient_bytes),
            (
                of_experts(lambda spec: spec.spec.num_bytes),
                of_experts(costs.optimizer_bytes),
                of_experts(costs.gradient_bytes),
            ),
            live.forward.astype(float),
            (working_bytes(until, live) - until.forward).astype(float),
            np.diff(deferred_bytes(graph, costs, positions, range(len(trace.state)), regions).until, prepend=0).astype(
                float
            ),
            float(sum(spec.num_bytes for spec in specs if spec is not None)),
            float(sum(trace.storages[storage] for storage in sorted(given))),
            _scratch_in_profile(trace, costs),
            float(
                max(
                    (SENT_UPDATES * spec.spec.torch_dtype.itemsize for spec in trace.state if spec.is_parameter),
                    default=0,
                )
            ),
            costs.optimizer.main_grad,
        )

    def compute_again(self, name: str, regions: Sequence[tuple[int, int]], kept: float) -> None:
        """What `stages` takes a name for: regions by first and last + 1 position, and the part that is kept of what they save."""
        spans = np.searchsorted(self.compute, np.asarray(regions, dtype=np.int64).reshape(-1, 2))
        self.regions[name] = spans, kept

    def saved_inside(self, regions: Sequence[tuple[int, int]]) -> float:
        """Bytes that regions save, if they are not computed again."""
        spans = np.searchsorted(self.compute, np.asarray(regions, dtype=np.int64).reshape(-1, 2))
        return float((self.saved.own[spans[:, 1]] - self.saved.own[spans[:, 0]]).sum())

    def stages(self, again: str, num_stages: int) -> Stages | None:
        """Cut into so many; None: there are not as many pieces."""
        key = again, num_stages
        if key not in self._known:
            self._known[key] = self._stages(again, num_stages)
        return self._known[key]

    def _stages(self, again: str, num_stages: int) -> Stages | None:
        if num_stages > len(self.pieces) - 1:
            return None
        seconds, saved, working, deferred, pieces = self._with(again, num_stages)
        ends = _profile_cut(np.append(0.0, np.cumsum(seconds)), pieces, self.depth, self.crossing, num_stages)
        starts = np.append(0, ends[:-1])
        elsewhere = self.saved.elsewhere(starts)
        leaves = np.append(0.0, self.leaves[starts[1:]])
        here = elsewhere + leaves
        until, base = saved[1:], saved[starts]
        gradients = self.gradients.by_stage(starts, ends)
        later = np.maximum.reduceat(until + working, starts) - base + here
        missing = self.gradients.own[:-1]
        first = np.maximum.reduceat(until + working - missing, starts) - base + self.gradients.own[starts] + here
        activations, own = saved[ends] - base + here, self.experts
        activations[-1] += self.outputs
        return Stages(
            np.add.reduceat(seconds, starts),
            self.parameters.by_stage(starts, ends),
            self.buffers.by_stage(starts, ends),
            self.optimizer.by_stage(starts, ends),
            gradients,
            activations,
            np.maximum.reduceat(until + self.forward, starts) - base + here,
            first + gradients,
            later,
            np.add.reduceat(deferred, starts),
            np.add.reduceat(np.where(deferred > 0, 0.0, np.diff(self.gradients.own)), starts),
            np.append(0.0, self.crossing[starts[1:]]),
            np.append(self.crossing[ends[:-1]], 0.0),
            self.inputs,
            (own[0].by_stage(starts, ends), own[1].by_stage(starts, ends), own[2].by_stage(starts, ends)),
        )

    def _with(self, again: str, num_stages: int) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, IntArray]:
        """With what is computed again in so many stages: seconds, bytes saved up to each, bytes at work, bytes between the parts of a
        split backward, and where cuts may be.
        """
        spans, kept = self.regions.get(again, (np.zeros((0, 2), dtype=np.int64), 1.0))
        plain = self.saved.own
        sums = np.append(0.0, np.cumsum(self.seconds)), np.append(0.0, np.cumsum(self.forward_seconds))
        times = [column[spans[:, 1]] - column[spans[:, 0]] for column in sums]
        share = (sums[0][-1] + times[1].sum()) / num_stages
        spans = spans[(times[0] + times[1] <= share) & (spans[:, 0] < spans[:, 1])]
        change, first = np.zeros(len(plain)), np.full(len(self.seconds), -1)
        for start, stop in spans.tolist():
            change[start], change[stop] = change[start] + 1, change[stop] - 1
            first[start:stop] = start
        inside = np.cumsum(change)[:-1] > 0
        seconds = self.seconds + np.where(inside, self.forward_seconds, 0.0)
        saved = np.append(0.0, np.cumsum(np.diff(plain) * np.where(inside, kept, 1.0)))
        rerun = plain[1:] - plain[first] - (saved[1:] - saved[first])
        working = self.working + np.where(inside, rerun, 0.0)
        within = np.append(inside & (first != np.arange(len(first))), False)
        pieces = self.pieces[~within[self.pieces]]
        deferred = np.where(inside, 0.0, self.deferred)
        return seconds, saved, working, deferred, pieces if len(pieces) > num_stages else self.pieces


def _saved_in_profile(graph: Graph, state: frozenset[int]) -> _Bytes:
    savers: dict[int, list[int]] = {}
    for rank, position in enumerate(graph.compute.tolist()):
        for storage in graph.saved[position]:
            if storage not in state:
                savers.setdefault(storage, []).append(rank)
    sizes = graph.trace.storages
    return _Bytes.of(graph.num_compute, [(users, sizes[storage]) for storage, users in savers.items()])


def _profile_leaves(graph: Graph, recomputable: set[int]) -> FloatArray:
    """By operation: bytes of values that cross a cut before it, need a gradient, and are saved by nothing after it."""
    n, nodes = graph.num_compute, graph.trace.nodes
    last_saver: dict[int, int] = {}
    for rank, position in enumerate(graph.compute.tolist()):
        last_saver.update(dict.fromkeys(graph.saved[position], rank))
    change = np.zeros(n + 1)
    for rank, position in enumerate(graph.compute.tolist()):
        spec = nodes[position].spec
        readers = graph.consumers[position]
        if spec is None or not spec.requires_grad or position in recomputable or not len(readers):
            continue
        last = int(graph.rank[list(readers)].max())
        since = max(rank, last_saver.get(nodes[position].storage, -1)) + 1
        if since <= last:
            change[since] += spec.num_bytes
            change[last + 1] -= spec.num_bytes
    found: FloatArray = np.cumsum(change)[:n]
    return found


def _profile_cut(
    until: FloatArray, pieces: IntArray, depth: FloatArray, crossing: FloatArray, num_stages: int
) -> IntArray:
    """Ends of the stages: see the module docstring."""
    times, last = until[pieces].tolist(), len(pieces) - 1

    def reach(bound: float) -> list[int]:
        ends, start = [], 0
        for left in range(num_stages - 1, -1, -1):
            start = max(start + 1, min(last - left, bisect_right(times, times[start] + bound) - 1))
            ends.append(start)
        return ends

    low, high = times[-1] / num_stages, times[-1]
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        ends = reach(middle)
        longest = max(times[b] - times[a] for a, b in zip([0, *ends[:-1]], ends, strict=True))
        low, high = (low, middle) if longest <= middle and ends[-1] == last else (middle, high)
        if high - low <= TOLERANCE / 10 * high:
            break
    bound = high * (1.0 + TOLERANCE)
    latest, earliest, stop = reach(bound), [last], last
    for left in range(num_stages - 1, 0, -1):
        stop = min(stop - 1, max(left, bisect_left(times, times[stop] - bound)))
        earliest.append(stop)
    earliest.reverse()
    price = np.append(depth * (1.0 + crossing.max(initial=0.0)) + crossing, 0.0)[pieces]
    found, start = [], 0
    for stage in range(num_stages):
        farthest = min(latest[stage], bisect_right(times, times[start] + bound) - 1)
        nearest = max(start + 1, earliest[stage])
        start = nearest + int(price[nearest : max(farthest, nearest) + 1].argmin())
        found.append(start)
    cuts: IntArray = pieces[np.asarray(found)]
    return cuts


def _scratch_in_profile(trace: Trace, costs: CostModel) -> float:
    """What the optimizer makes and drops, in sizes of the parameters."""
    parameters = [state for state in trace.state if state.is_parameter]
    num_bytes = sum(state.spec.num_bytes for state in parameters)
    return costs.optimizer_scratch(parameters) / num_bytes if num_bytes else 0.0


@functools.lru_cache(4096)
def in_flight(schedule: str, num_ranks: int, num_pieces: int, microbatches: int) -> IntArray:
    """By stage, microbatches in flight at the most: see `smpc.codegen.schedules`."""
    ranks, stages = np.arange(num_ranks), np.arange(num_ranks * num_pieces)
    match schedule:
        case "gpipe":
            found = np.full(len(stages), microbatches)
        case "zb-h1":
            found = np.full(len(stages), num_ranks)
        case "zb-h2":
            found = np.full(len(stages), 2 * num_ranks - 1)
        case "interleaved-1f1b":
            falling = np.minimum(num_ranks, 2 * (num_ranks - ranks) - 1)
            rounds = [
                falling if piece in (num_pieces // 2 - 1, num_pieces - 1) else np.full(num_ranks, num_ranks)
                for piece in range(num_pieces)
            ]
            more = [num_ranks if piece < num_pieces // 2 else 0 for piece in range(num_pieces)]
            found = np.concatenate([held + extra for held, extra in zip(rounds, more, strict=True)])
        case "zb-v" if microbatches < len(stages):
            found = np.full(len(stages), microbatches)
        case _:  # 1f1b, and zb-v down the ranks and up again
            found = len(stages) - stages
    held: IntArray = np.minimum(found, microbatches)
    return held


@functools.lru_cache(4096)
def placement(schedule: str, num_ranks: int, num_pieces: int) -> IntArray:
    """The rank of each stage."""
    stages = np.arange(num_ranks * num_pieces)
    if schedule == "zb-v":
        stages = np.minimum(stages, len(stages) - 1 - stages)
    ranks: IntArray = stages % num_ranks
    return ranks
