"""Recomputation: regions for the backward pass, and values that a stage would otherwise receive.

Which regions of a trace are computed again for the backward pass, and by which stage (see `smpc.tracer.regions`).

Terms
    requested   the regions of the trace and those that the option `recompute` names, but for those that cannot be run again: a region
                that reads memory which it, or a later node, writes in place would read something else the second time
    active      regions of one stage: requested ones that run wholly there. Consecutive layers of a sequential container become one
                region, as its strategy says. A requested region that a cut goes through is computed once, and its values are kept
    split       the names of those, with the stages that they are on

Example: layers a, b on stage 0 and c, d, e on stage 1, strategy "group_2": the regions a b on stage 0, c d and e on stage 1.

Which values a stage computes again instead of receiving them.

An input-only value (see `smpc.partitioner.graph.trace_graph`) may be recomputed by any stage. Its cone is every node that this
takes: the value, what it is computed from, and the in-place writes among them. It is recomputed when that is quicker
than sending it:

    sum over the cone of (forward time + kernel overhead) + time to send the model inputs that the cone reads
        <= time to send the value                    (latencies left out for the inputs: they share one message)

Masks and positions pass easily: memory is some sixty times faster than a link, and a message costs fifty small
kernels. The decision depends on the value alone, not on the cut, so it is the same for every plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from smpc.partitioner.costs.node_costs import CostModel
from smpc.partitioner.graph.trace_graph import Clusters, Graph
from smpc.partitioner.stage_costs import IntArray
from smpc.tracer.constants import references
from smpc.tracer.ir import NodeKind, Region, Trace
from smpc.tracer.regions import group_size, matching_regions

_LOOKUPS = ("torch.nn.functional.embedding", "torch.nn.functional.embedding_bag")


@dataclass(frozen=True, slots=True)
class RequestedRegions:
    """Regions to compute again, outer ones first, and warnings about those that cannot be."""

    regions: tuple[Region, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ActiveRegions:
    """Regions of every stage, outer ones first, and those that no stage has whole, as (name, stages)."""

    by_stage: tuple[tuple[Region, ...], ...]
    split: tuple[tuple[str, tuple[int, ...]], ...]


def requested_regions(trace: Trace, patterns: Sequence[str] = ()) -> RequestedRegions:
    """The regions that the model and the patterns ask for. ConfigError for a pattern that matches nothing."""
    wanted = tuple(patterns)
    return trace.remembered((requested_regions, wanted), lambda: _requested_regions(trace, wanted))


def _requested_regions(trace: Trace, patterns: tuple[str, ...]) -> RequestedRegions:
    """The regions that the model or patterns ask to compute again, and notes on those that cannot be."""
    found, notes = [], []
    last_write: dict[int, int] = {}
    for position, node in enumerate(trace.nodes):
        last_write.update({trace.node(name).storage: position for name in node.mutates})
    last_write.pop(-1, None)
    asked = (*trace.regions, *matching_regions(trace, patterns))
    for region in sorted(asked, key=lambda region: (region.first, -region.last)):
        read = (trace.node(name) for name in region_inputs(trace, region))
        written = [node.name for node in read if last_write.get(node.storage, -1) >= region.first]
        runs = [name for name in trace.differentiating if region.first <= trace.position(name) < region.last]
        if runs:
            notes.append(
                f"{region.name or 'the model'} is not checkpointed: {trace.node(runs[0]).target} in it runs autograd in its forward"
            )
        elif written:
            notes.append(
                f"{region.name or 'the model'} is not checkpointed: it reads {written[0]!r}, which is written in place afterwards, so it "
                "could not be computed again"
            )
        elif drawn := _generators_of_region(trace, region):
            notes.append(
                f"{region.name or 'the model'} is not checkpointed: it draws from the random generator {drawn[0]!r}, which would give "
                "other numbers the second time"
            )
        else:
            found.append(region)
    return RequestedRegions(tuple(found), tuple(dict.fromkeys(notes)))


def _generators_of_region(trace: Trace, region: Region) -> list[str]:
    """Random generators of the model from which a region draws."""
    written = (trace.node(name) for node in trace.nodes[region.first : region.last] for name in node.mutates)
    return [node.target for node in written if node.kind is NodeKind.GET_ATTR and node.spec is None]


def region_inputs(trace: Trace, region: Region) -> tuple[str, ...]:
    """Names of the values that a region reads and that are no parameters, buffers or attributes, in order of reading."""
    return trace.remembered((region_inputs, region), lambda: _region_inputs(trace, region))


def _region_inputs(trace: Trace, region: Region) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for call in trace.calls:
        if call.parent == region.call and region.first <= call.first and call.last <= region.last:
            names.update(dict.fromkeys(references(call.argument_leaves)))
    for node in trace.nodes[region.first : region.last]:
        if node.name in trace.live:
            names.update(dict.fromkeys(node.inputs))
    return tuple(
        name for name in names if trace.position(name) < region.first and trace.node(name).kind is not NodeKind.GET_ATTR
    )


def with_regions(graph: Graph, regions: Sequence[Region]) -> Graph:
    """The graph as solvers see it: nodes of a region keep what it reads, none of what they save."""
    saved = list(graph.saved)
    for region in regions:
        for position in range(region.first, region.last):
            saved[position] = ()
    end = 0
    for region in regions:
        if region.first < end:  # inside another one
            continue
        end = region.last
        first = next((i for i in range(region.first, region.last) if graph.is_compute(i)), None)
        if first is not None:
            storages = (graph.trace.node(name).storage for name in region_inputs(graph.trace, region))
            saved[first] = tuple(dict.fromkeys(storage for storage in storages if storage >= 0))
    return replace(graph, saved=tuple(saved))


def kept_bytes(trace: Trace, regions: Sequence[Region]) -> int:
    """Bytes that a whole microbatch keeps for its backward, where these regions, outer ones first, are computed again."""
    outside, found, end = np.ones(len(trace.nodes), dtype=bool), set[int](), 0
    for region in regions:
        outside[region.first : region.last] = False
        if region.first >= end:
            found.update(trace.node(name).storage for name in region_inputs(trace, region))
            end = region.last
    for position in np.flatnonzero(outside).tolist():
        found.update(trace.nodes[position].saved)
    found -= {state.storage for state in trace.state} | {-1}
    return sum(trace.storages[storage] for storage in sorted(found))


def active_regions(
    graph: Graph, regions: Sequence[Region], stage_of: IntArray, recomputed: Sequence[Sequence[int]]
) -> ActiveRegions:
    """The regions of each stage. `stage_of` is by rank; `recomputed`: by stage, positions of other stages' nodes that it runs too."""
    found: list[list[Region]] = [[] for _ in recomputed]
    split: dict[str, tuple[int, ...]] = {}
    again = [frozenset(positions) for positions in recomputed]
    for region in regions:
        owners = _owners_of_region(graph, region, stage_of)
        whole = [stage for stage in owners if all(s == stage or places <= again[stage] for s, places in owners.items())]
        if whole:
            found[whole[0]].append(region)
        elif owners:
            split.setdefault(region.name, tuple(sorted(owners)))
    return ActiveRegions(tuple(_grouped_regions(found[stage]) for stage in range(len(found))), tuple(split.items()))


def _owners_of_region(graph: Graph, region: Region, stage_of: IntArray) -> dict[int, frozenset[int]]:
    """Stage -> positions of the region's live nodes that it owns."""
    owners: dict[int, set[int]] = {}
    for position in range(region.first, region.last):
        if graph.is_compute(position) and graph.trace.nodes[position].name in graph.trace.live:
            owners.setdefault(int(stage_of[graph.rank[position]]), set()).add(position)
    return {stage: frozenset(found) for stage, found in owners.items()}


def _grouped_regions(regions: Sequence[Region]) -> tuple[Region, ...]:
    """The regions of a stage, with a sequence's consecutive layers merged by its strategy."""
    found: list[Region] = []
    open_groups: dict[int, tuple[int, int]] = {}  # sequence -> (index into found, layers in that group)
    for region in regions:
        index, count = open_groups.get(region.sequence, (-1, 0)) if region.sequence >= 0 else (-1, 0)
        size = group_size(region.strategy) if region.sequence >= 0 else 1
        if count and (not size or count < size) and found[index].last == region.first:
            name = f"{found[index].name.partition(' to ')[0]} to {region.name}"
            found[index] = replace(found[index], name=name, last=region.last)
            open_groups[region.sequence] = (index, count + 1)
        else:
            open_groups[region.sequence] = (len(found), 1)
            found.append(region)
    return tuple(found)


def changing_buffers(trace: Trace, region: Region) -> tuple[str, ...]:
    """Canonical names of the buffers that a region uses and that the model changes, inside it or elsewhere, in order of state."""
    storages, names, whole = _changed_state(trace, range(len(trace.nodes)))
    own_storages, own_names, own_whole = _changed_state(trace, range(region.first, region.last))
    read = (trace.node(name) for node in trace.nodes[region.first : region.last] for name in node.inputs)
    used = {node.target for node in read if node.kind is NodeKind.GET_ATTR} | own_names
    found = []
    for state in trace.state:
        changes = state.storage in storages or state.name in names or state.name.startswith(whole)
        uses = not used.isdisjoint(state.names) or state.storage in own_storages or state.name.startswith(own_whole)
        if changes and uses and not state.is_parameter:
            found.append(state.name)
    return tuple(found)


def changing_parameters(trace: Trace, region: Region) -> tuple[str, ...]:
    """Canonical names of the parameters that a region uses and that forward writes into, but for lookups: what a lookup scales down, it
    does not scale again."""
    written = {trace.node(name).storage for node in trace.nodes if node.target not in _LOOKUPS for name in node.mutates}
    inside = trace.nodes[region.first : region.last]
    used = {trace.node(name).storage for node in inside for name in (*node.inputs, *node.mutates)}
    return tuple(state.name for state in trace.state if state.is_parameter and state.storage in (written & used) - {-1})


def _changed_state(trace: Trace, positions: range) -> tuple[set[int], set[str], tuple[str, ...]]:
    """The state that these nodes may change: storages, names of buffers, prefixes of the names of buffers."""
    nodes = [trace.nodes[position] for position in positions]
    storages = {trace.node(name).storage for node in nodes for name in node.mutates} - {-1}
    names = {node.target for node in nodes if node.kind is NodeKind.SET_ATTR}
    return storages, names, tuple(f"{node.target}." for node in nodes if node.kind is NodeKind.CALL_MODULE)


def recompute_depths(regions: Sequence[Region]) -> Mapping[int, int]:
    """Position -> how often the node there is computed again: once for each region around it."""
    found: dict[int, int] = {}
    for region in regions:
        for position in range(region.first, region.last):
            found[position] = found.get(position, 0) + 1
    return found


def find_recomputable(graph: Graph, clusters: Clusters, cost_model: CostModel) -> dict[int, tuple[int, ...]]:
    """The cone of each value that is recomputed where it is needed, as positions in execution order."""
    found: dict[int, tuple[int, ...]] = {}
    for position in graph.compute.tolist():
        spec = graph.trace.nodes[position].spec
        if clusters.input_only[position] and (spec is not None or position in graph.outputs):
            # A value without a shape cannot be sent.
            budget = cost_model.transfer_time(spec.num_bytes) if spec is not None else math.inf
            cone = _cheap_cone(graph, clusters, cost_model, position, budget)
            if cone is not None:
                found[position] = cone
    return found


def _cheap_cone(
    graph: Graph, clusters: Clusters, cost_model: CostModel, position: int, budget: float
) -> tuple[int, ...] | None:
    """The cone, or None as soon as it takes longer than `budget`, in seconds."""
    seen, pending = {position}, [position]
    while pending:
        current = pending.pop()
        node = graph.trace.nodes[current]
        if node.kind is NodeKind.PLACEHOLDER:
            assert node.spec is not None, f"model input {node.name} is not a tensor"
            budget -= node.spec.num_bytes / cost_model.link_bandwidth
        elif graph.is_compute(current):
            dtype = node.spec.dtype if node.spec is not None else "float32"
            is_view = node.bytes_moved == 0 and node.flops == 0
            budget -= cost_model.forward_time(node, dtype) + (0.0 if is_view else cost_model.kernel_overhead)
        if budget < 0:
            return None
        for other in (*graph.inputs[current], *clusters.writers.get(current, ())):
            if other not in seen:
                seen.add(other)
                pending.append(other)
    return tuple(sorted(i for i in seen if graph.is_compute(i)))
