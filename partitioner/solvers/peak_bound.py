"""An upper bound of the predicted peak memory of a stage that runs an interval of the compute nodes.

`PeakRows.row(start, stop, stage)` gives it for start..j, j = start + 1, ..., stop (exclusive ends): the formula of
`smpc.partitioner.memory.peak`, evaluated for many intervals at once (`step_peak`), so that solvers can respect a limit. It is the
prediction itself but for small things, always on the safe side: what lives while a node works is taken from a
walk over the whole model, and gradients of parameters with several users count from the start. Regions that are computed again
(`smpc.partitioner.graph.recompute_regions`) are taken as whole: an interval that ends inside one takes more than is said here. With
offloading, what leaves the interval counts as held, and so does what a region reads that ends outside.

What a stage receives and sends depends on both ends of the interval. A value that crosses `start` is received if a node of
the interval reads it, and a leaf of autograd from then on until a node that saves it; one that crosses `j` is sent if it
was made or received in the interval.

    values            made by node -1 |  0  1  2  3   read by
    a                       -1        |     *     *   1 and 3     start = 0: [0, 1) neither receives nor sends a;
    b                                 |  *     *      2           [0, 2) receives a and sends it on, and sends b
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from smpc.partitioner.costs.node_costs import CostModel, NodeTimes
from smpc.partitioner.graph.recompute_regions import region_inputs
from smpc.partitioner.graph.trace_graph import Graph
from smpc.partitioner.memory.lifetimes import lifetimes, loss_roots, saved_activations
from smpc.partitioner.memory.peak import (
    RECEIVE_WINDOW,
    Resident,
    StepTerms,
    received_ahead,
    step_peak,
    working_bytes,
)
from smpc.partitioner.solvers.chain import Intervals
from smpc.partitioner.solvers.coarsen import node_units, state_items
from smpc.partitioner.stage_costs import IntArray, Scale, SharedItem, Units, check_total
from smpc.tracer.ir import NodeKind, Region, StateSpec

_BYTES = Scale(1.0, 1, 1)  # only memory is asked for
_CACHED = 1 << 29  # bytes of what intervals have whatever their stage, if these are of _USUAL nodes
_USUAL = 4096


@dataclass(frozen=True)
class _CrossingValues:
    """Values that may cross between stages and need a gradient or not, one entry each."""

    made: IntArray  # rank
    num_bytes: IntArray
    gradient: IntArray  # bytes of the gradient; 0: needs none
    saved: tuple[tuple[int, ...], ...]  # ranks that save its storage
    read: tuple[tuple[int, ...], ...]  # ranks that read it; the number of nodes stands for the model's output
    last: IntArray  # the last of these

    def after(self, which: IntArray, start: int, ranks: tuple[tuple[int, ...], ...], end: int) -> IntArray:
        """For these values, the first of their `ranks` from `start` on; `end` if there is none."""
        found = (next((rank for rank in ranks[v] if rank >= start), end) for v in which.tolist())
        return np.fromiter(found, dtype=np.int64, count=len(which))


@dataclass(frozen=True)
class _Away:
    """What regions that are computed again read and what may be offloaded, one entry for each region and storage."""

    first: IntArray  # rank at which the region begins
    before: IntArray  # rank at which the last region before it begins that reads the storage; -1: there is none
    last: IntArray  # rank of the region's end, or of the last reader behind it: an interval beyond has it to itself
    made: IntArray  # rank
    num_bytes: IntArray
    received: IntArray  # bytes of it, where another stage makes it

    @classmethod
    def of(cls, graph: Graph, regions: Sequence[Region]) -> _Away:
        """The entries of regions inside no other. As at run time (`smpc.partitioner.memory.lifetimes`), inputs and state stay."""
        trace, rows, seen, end = graph.trace, list[tuple[int, ...]](), dict[int, int](), -1
        ignored = _state_storages(graph) | {n.storage for n in trace.nodes if n.kind is NodeKind.PLACEHOLDER} | {-1}
        held: dict[int, list[int]] = {}
        for position in graph.compute.tolist():
            held.setdefault(trace.nodes[position].storage, []).append(position)
        for region in regions:
            if region.last <= end:
                continue
            end = region.last
            first, last = (int(np.searchsorted(graph.compute, position)) for position in (region.first, region.last))
            for name in region_inputs(trace, region):
                node = trace.node(name)
                if node.spec is None or not node.spec.requires_grad or node.storage in ignored or first == last:
                    continue
                views = held.get(node.storage, [])
                readers = [int(graph.rank[i]) for view in views for i in graph.consumers[view]]
                readers += [graph.num_compute] * any(view in graph.outputs for view in views)
                made = min((int(graph.rank[view]) for view in views), default=-1)
                sizes = trace.storages[node.storage], node.spec.num_bytes
                if seen.get(node.storage) != first:
                    rows.append((first, seen.get(node.storage, -1), max(last - 1, *readers, 0), made, *sizes))
                seen[node.storage] = first
        return cls(*np.asarray(rows, dtype=np.int64).reshape(-1, 6).T)

    def within(self, start: int, stop: int) -> IntArray:
        """By interval end, from `start`: what a microbatch that is offloaded has less on the device, at least."""
        which = (self.first >= start) & (self.before < start)
        size = np.where(self.made >= start, self.num_bytes, self.received)
        return _peaks_from(stop - start, self.last[which] - start, size[which])


class PeakRows:
    """Peaks of intervals: see the module docstring."""

    def __init__(
        self,
        graph: Graph,
        cost_model: CostModel,
        times: NodeTimes,
        recomputable: Sequence[int],
        in_flight: Sequence[int],
        num_microbatches: int,
        regions: Sequence[Region] = (),
        resident: Sequence[Resident] | None = None,
    ) -> None:
        self.resident = resident
        self.away = None if resident is None else _Away.of(graph, regions)
        self.num_units = graph.num_compute
        self.in_flight = tuple(in_flight)
        self.num_microbatches = max(num_microbatches, *in_flight)
        self.cost_model = cost_model
        units = node_units(graph, times, cost_model)
        no_memory = (0,) * self.num_units
        static = replace(units, activation_bytes=no_memory, shared=_static_only(units))
        held = Units(no_memory, no_memory, units.activation_bytes, _activations_only(units))
        self.static, self.held = Intervals(static, _BYTES), Intervals(held, _BYTES)
        self.gathered = _state_intervals(graph, cost_model.gathered_bytes)
        self.apart = _state_intervals(graph, cost_model.apart_bytes)
        self.averaging = _state_intervals(graph, lambda state: _averaging_in_peaks(state, cost_model))
        self.scratch = _state_intervals(graph, _scratch_in_peaks(cost_model))
        gradients = _of_one_user(graph, cost_model.gradient_bytes)
        apart = _of_one_user(graph, cost_model.apart_bytes)
        self.later = np.concatenate(([0], np.cumsum(apart)))
        self.gradients = np.concatenate(([0], np.cumsum(gradients)))
        roots = loss_roots(graph)
        positions = graph.compute.tolist()
        until = saved_activations(
            graph, positions, regions, lambda storage: graph.trace.storages[storage], _state_storages(graph)
        )
        live = lifetimes(graph, positions, roots, kept=until.kept)
        self.forward, self.backward = live.forward, working_bytes(until, live) - until.forward
        self.adding = self.backward + np.maximum(0, live.parameters - apart)
        self.values = _values_in_peaks(graph, set(recomputable))
        specs = [spec for i in roots if (spec := graph.trace.nodes[i].spec) is not None]
        self.root_bytes = sum(spec.num_bytes for spec in specs)
        placeholders = {n.storage for n in graph.trace.nodes if n.kind is NodeKind.PLACEHOLDER}
        self.input_bytes = sum(graph.trace.storages[storage] for storage in sorted(placeholders))
        self.input_savers, self.saved_inputs = _saved_inputs(graph, placeholders)
        self.copied = state_items(graph, cost_model.copy_bytes)
        self.copies = _copies_in_peaks(self.copied, self.num_units, len(in_flight))
        self.lower_units = _at_least(units, gradients)
        self.activation_bytes = units.totals()[2]
        self._check_sums()
        self._known: OrderedDict[tuple[int, int], _FromStart] = OrderedDict()  # the last used come last

    def _check_sums(self) -> None:
        """PartitionError if what `row` adds up could overflow: no sum of its terms is larger than this."""
        intervals = (self.static, self.copies, self.gathered, self.apart, self.averaging, self.scratch)
        values = int(self.values.num_bytes.sum()) + int(self.values.gradient.sum())
        one_microbatch = self.activation_bytes + 8 * values + self.root_bytes + self.input_bytes
        at_work = sum(int(found.max(initial=0)) for found in (self.forward, self.backward, self.adding))
        total = sum(found.total_bytes for found in intervals) + at_work
        total += (self.num_microbatches + RECEIVE_WINDOW + 1) * one_microbatch
        check_total(total, f"bytes at the peak of a rank, with {self.num_microbatches} microbatches")

    def scheduled(self, in_flight: Sequence[int]) -> PeakRows:
        """The same for another number of stages."""
        other = copy.copy(self)
        other.resident = other.away = None  # it is not known what such a schedule offloads
        other.in_flight = tuple(in_flight)
        other.num_microbatches = max(self.num_microbatches, *in_flight)
        other.copies = _copies_in_peaks(self.copied, self.num_units, len(in_flight))
        other._check_sums()
        other._known = OrderedDict()
        return other

    @property
    def least_in_flight(self) -> tuple[int, ...]:
        """By stage, microbatches that are there with all of their activations when most is."""
        if self.resident is None:
            return self.in_flight
        return tuple(min(k, resident.most) for k, resident in zip(self.in_flight, self.resident, strict=True))

    def _held(self, start: int, stop: int, stage: int, total: IntArray) -> dict[str, Any]:
        """Terms for microbatches beside the one that runs."""
        if self.resident is None or self.away is None:
            return {"others": lambda count: (count - 1) * total}
        resident, away = self.resident[stage], self.away.within(start, stop)
        return {
            "others": lambda count: (count - 1) * total - max(0, count - resident.most) * away,
            "last": resident.last,
            "others_last": (resident.last - 1) * total,
        }

    def working(self, rank: int) -> int:
        """What lives while the backward of a node works."""
        return int(self.adding[rank])

    def row(self, start: int, stop: int, stage: int) -> IntArray:
        """Peak of start..j for each j: see the module docstring."""
        k, m = self.in_flight[stage], self.num_microbatches
        length = stop - start
        # The next stages ask for a little more: they find it there.
        found = self._from(start, min(self.num_units, start + (1 << length.bit_length()))).until(length)
        own = max(0, min(m, max(self.in_flight[: stage + 1])) - k) if self.cost_model.holds_sent else 1
        crossing = received_ahead(m, k) * found.received + own * found.received_gradients
        total, after = found.total, found.total + found.kept
        if stage == len(self.in_flight) - 1 and stop == self.num_units:
            total = total.copy()
            total[-1] += self.root_bytes
            after[-1] += 2 * self.root_bytes
        terms = StepTerms(
            **self._held(start, stop, stage, total),
            one_forward=found.one_forward,
            after_forward=after,
            first_backward=found.first_backward,
            later_backward=found.later_backward,
            sent=found.kept,
            waiting=self._behind(stage) * found.kept,
            early_gradients=found.early_gradients,
            gradients=0,
            given_back=found.returned,
            gathering=found.gathering,
            averaging=found.averaging,
        )
        peak = found.static + step_peak(terms, self.cost_model, k, m) + crossing + found.sent
        if start == 0:
            saved = _peaks_from(stop, self.input_savers, self.saved_inputs)
            peak = peak + m * self.input_bytes - k * saved
        if self.cost_model.holds_sent and self.num_units > length:
            peak = peak + self.copies.memory(start, stop)
        highest: IntArray = np.maximum(peak, found.static + found.scratch)
        return highest

    def _behind(self, stage: int) -> int:
        """Microbatches whose values sent are not known to have arrived, from the first gradient on, at most."""
        return max(0, self.in_flight[stage] - min(self.in_flight[stage:]))

    def _from(self, start: int, stop: int) -> _FromStart:
        key = start, stop
        if key not in self._known:
            self._known[key] = self._of_start(start, stop)
            if len(self._known) > _CACHED // (len(_FromStart._fields) * 8 * _USUAL):
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    def _of_start(self, start: int, stop: int) -> _FromStart:
        received, gradients, leaf, unsaved, skipped, sent, kept, returned = self._boundary(start, stop)
        static, held, scratch = (intervals.memory(start, stop) for intervals in (self.static, self.held, self.scratch))
        until = held + unsaved
        span = slice(start, stop)
        absent = self.gradients[start : stop + 1] - self.gradients[start]
        if self.cost_model.optimizer.main_grad:
            absent = np.zeros_like(absent)
        unread = 2 * skipped
        later = self.later[start:stop] - self.later[start]
        backward = np.maximum.accumulate(until + self.adding[span] - later) - unread
        gathering = averaging = np.zeros(stop - start, dtype=np.int64)
        if self.cost_model.optimizer.in_parts:
            gathering = self.gathered.memory(start, stop) - absent[1:]
            averaging = self.averaging.memory(start, stop)
        return _FromStart(
            static=static,
            scratch=scratch,
            total=held + leaf,
            one_forward=np.maximum.accumulate(until + self.forward[span]) - skipped,
            first_backward=np.maximum.accumulate(until + self.backward[span] - absent[:-1]) - unread,
            later_backward=backward + self.apart.memory(start, stop),
            early_gradients=-absent[1:],  # beyond `static`, which has all gradients
            gathering=gathering,
            averaging=averaging,
            received=received,
            received_gradients=gradients,
            sent=sent,
            kept=kept,
            returned=returned,
        )

    def _boundary(self, start: int, stop: int) -> tuple[IntArray, ...]:
        """What depends on both ends.

        By j: what is received, and its gradients; leaves of one microbatch that no node saves; by node: values that cross `start` and that
        no node saves up to this one; by j: values that cross both ends and are not used between; buffers for gradients of what is sent;
        what is sent and kept though no node saves it; what one microbatch received, with the gradients for it.
        """
        m, values = self.num_microbatches, self.values
        length, end = stop - start, self.num_units + 1
        received = np.flatnonzero((values.made < start) & (values.last >= start))
        read = values.after(received, start, values.read, end)
        saved = np.minimum(values.after(received, start, values.saved, end), end)
        gradient = values.gradient[received]
        num_bytes = _peaks_from(length, read - start, values.num_bytes[received])
        gradients = _peaks_from(length, read - start, gradient)
        leaf = gradients - _peaks_from(length, np.maximum(read, saved) - start, gradient)
        unsaved = gradient.sum() - _peaks_from(length, saved - start, gradient)
        skipped = gradient.sum() - gradients
        back = min(m, RECEIVE_WINDOW + 1)
        made = np.flatnonzero((values.made >= start) & (values.made < stop) & (values.gradient > 0))
        sends = np.concatenate((made, received))
        since = np.concatenate((values.made[made], read))
        size, until = values.gradient[sends], values.last[sends]
        sent = _peaks_between(length, since - start, until - start, back * size)
        kept = np.zeros(length, dtype=np.int64)
        if self.cost_model.holds_sent:
            saver = values.after(made, start, values.saved, end)
            kept = _peaks_between(
                length,
                values.made[made] - start,
                np.minimum(values.last[made], saver) - start,
                values.gradient[made],
            )
        return num_bytes, gradients, leaf, unsaved, skipped, sent, kept, num_bytes + gradients


class _FromStart(NamedTuple):
    """Terms of intervals from one place, by their ends, that do not depend on the stage that runs them (see `StepTerms`)."""

    static: IntArray
    scratch: IntArray
    total: IntArray
    one_forward: IntArray
    first_backward: IntArray
    later_backward: IntArray
    early_gradients: IntArray
    gathering: IntArray
    averaging: IntArray
    received: IntArray
    received_gradients: IntArray
    sent: IntArray
    kept: IntArray
    returned: IntArray

    def until(self, length: int) -> _FromStart:
        """The first ends alone."""
        return _FromStart(*(column[:length] for column in self))


def _state_storages(graph: Graph) -> frozenset[int]:
    return frozenset(state.storage for state in graph.trace.state)


def _peaks_from(length: int, index: IntArray, amount: IntArray) -> IntArray:
    """By interval end j = index + 1, ...: the sum of the amounts whose node is inside."""
    change = np.zeros(length + 1, dtype=np.int64)
    np.add.at(change, np.clip(index, 0, length), amount)
    sums: IntArray = np.cumsum(change)[:length]
    return sums


def _peaks_between(length: int, first: IntArray, last: IntArray, amount: IntArray) -> IntArray:
    """By interval end: the sum of the amounts made inside (at `first`) and wanted outside (up to `last`)."""
    return _peaks_from(length, first, amount) - _peaks_from(length, np.maximum(first, last), amount)


def _static_only(units: Units) -> tuple[SharedItem, ...]:
    return tuple(SharedItem(item.users, item.static_bytes) for item in units.shared if item.static_bytes)


def _activations_only(units: Units) -> tuple[SharedItem, ...]:
    return tuple(SharedItem(item.users, 0, item.activation_bytes) for item in units.shared if item.activation_bytes)


def _of_one_user(graph: Graph, num_bytes: Callable[[StateSpec], int]) -> IntArray:
    """By rank: bytes of the parameters that this node alone uses."""
    found = np.zeros(graph.num_compute, dtype=np.int64)
    for users, size in state_items(graph, num_bytes):
        if len(users) == 1:
            found[users[0]] += size
    return found


def _state_intervals(graph: Graph, num_bytes: Callable[[StateSpec], int]) -> Intervals:
    """Intervals of bytes that a stage holds once for each of its parameters, whoever else uses it."""
    own, shared = [0] * graph.num_compute, []
    for users, size in state_items(graph, num_bytes):
        if len(users) == 1:
            own[users[0]] += size
        else:
            shared.append(SharedItem(users, size))
    none = (0,) * graph.num_compute
    return Intervals(Units(none, tuple(own), none, tuple(shared)), _BYTES)


def _averaging_in_peaks(state: StateSpec, cost_model: CostModel) -> int:
    """Bytes that a parameter takes while its gradient is averaged, beyond those that it has in a step, at most."""
    in_step = cost_model.gathered_bytes(state) + cost_model.gradient_bytes(state)
    return max(0, cost_model.averaging_bytes(state) - in_step)


def _scratch_in_peaks(cost_model: CostModel) -> Callable[[StateSpec], int]:
    """Bytes that the optimizer makes and drops for a parameter."""

    def of(state: StateSpec) -> int:
        return cost_model.optimizer_scratch((state,))

    return of


def _saved_inputs(graph: Graph, storages: set[int]) -> tuple[IntArray, IntArray]:
    """The first rank that saves each model input that is saved, and its bytes."""
    first: dict[int, int] = {}
    for rank, position in enumerate(graph.compute.tolist()):
        for storage in graph.saved[position]:
            if storage in storages:
                first.setdefault(storage, rank)
    sizes = [graph.trace.storages[storage] for storage in first]
    return np.asarray(list(first.values()), dtype=np.int64), np.asarray(sizes, dtype=np.int64)


def _copies_in_peaks(state: Sequence[tuple[tuple[int, ...], int]], num_units: int, num_stages: int) -> Intervals:
    """Intervals of the buffers in which other stages' gradients of shared parameters arrive; `state`: users, and bytes of one buffer."""
    none = (0,) * num_units
    shared = [
        SharedItem(users, (min(num_stages, len(users)) - 1) * num_bytes) for users, num_bytes in state if len(users) > 1
    ]
    return Intervals(Units(none, none, none, tuple(shared)), _BYTES)


def _at_least(units: Units, gradients: IntArray) -> Units:
    """Units whose memory no peak is below: all that is static but for gradients, and activations."""
    static = tuple((np.asarray(units.static_bytes) - gradients).tolist())
    return Units((0,) * len(units), static, units.activation_bytes, _activations_only(units))


def _values_in_peaks(graph: Graph, recomputable: set[int]) -> _CrossingValues:
    nodes, end = graph.trace.nodes, graph.num_compute
    savers: dict[int, list[int]] = {}
    for rank, position in enumerate(graph.compute.tolist()):
        for storage in graph.saved[position]:
            savers.setdefault(storage, []).append(rank)
    outputs = set(graph.outputs)
    rows = []
    for rank, position in enumerate(graph.compute.tolist()):
        spec = nodes[position].spec
        readers = [int(graph.rank[i]) for i in graph.consumers[position]] + [end] * (position in outputs)
        if spec is None or position in recomputable or not readers:
            continue
        gradient = spec.num_bytes if spec.requires_grad else 0
        rows.append((rank, spec.arrival_bytes, gradient, savers.get(nodes[position].storage, []), readers))
    return _CrossingValues(
        np.asarray([row[0] for row in rows], dtype=np.int64),
        np.asarray([row[1] for row in rows], dtype=np.int64),
        np.asarray([row[2] for row in rows], dtype=np.int64),
        tuple(tuple(row[3]) for row in rows),
        tuple(tuple(row[4]) for row in rows),
        np.asarray([min(row[4][-1], end - 1) for row in rows], dtype=np.int64),
    )
