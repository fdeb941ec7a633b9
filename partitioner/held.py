"""What is held from a stage's forward to its backward, node by node, where some of it is computed again.

Terms
    kept        storages that wait for the backward: what autograd saves in nodes outside of checkpointed regions, and what each region
                reads. What nodes inside save is dropped after the forward
    re-run      of a region: its forward once more, before its backward. What its nodes save is there from then on, until their own
                backward; of a region inside it, only what that reads, and so on

Example: y = gelu(x); region: h = linear(y), z = gelu(h); every value 4 bytes. The first gelu keeps x (4), the region keeps y. forward:
4, 8, 8. backward: at the second gelu x, y and h are there (12), at the linear x and y (8), at the first gelu x (4).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from smpc.partitioner.checkpoints import region_inputs
from smpc.partitioner.graph import Graph
from smpc.partitioner.problem import IntArray
from smpc.tracer.ir import Region


@dataclass(frozen=True)
class Held:
    """Bytes by index into the positions that were asked for."""

    forward: IntArray  # when the node's forward has run
    backward: IntArray  # when its backward starts, with what was computed again
    rerun: IntArray  # the most during the re-runs of the regions that end with the node; 0 elsewhere
    kept: frozenset[int]  # storages; with those that were there before
    offloadable: frozenset[int]  # storages of activations that outer regions read


def held(
    graph: Graph,
    positions: Sequence[int],
    regions: Sequence[Region],
    size: Callable[[int], int],
    before: frozenset[int] = frozenset(),
    before_bytes: int = 0,
) -> Held:
    """What a stage holds that runs the nodes at `positions`, in order, with these regions, outer ones first.

    `size` gives the bytes of a storage. Those in `before` are there from the start, and take `before_bytes` together.
    """
    walk = _Walk(graph, positions, size)
    spans = [(*walk.span(region), region) for region in regions]
    inside = [span for span in spans if span[0] < span[1]]
    level, kept = walk.scope(0, len(positions), inside, set(before), before_bytes)
    return Held(level, walk.backward, walk.rerun, frozenset(kept), walk.offloadable(inside))


_Span = tuple[int, int, Region]


class _Walk:
    def __init__(self, graph: Graph, positions: Sequence[int], size: Callable[[int], int]) -> None:
        self.graph, self.positions, self.size = graph, positions, size
        self.backward, self.rerun = np.zeros((2, len(positions)), dtype=np.int64)

    def span(self, region: Region) -> tuple[int, int]:
        """The region as first and last + 1 index."""
        return bisect_left(self.positions, region.first), bisect_left(self.positions, region.last)

    def inputs(self, region: Region) -> list[int]:
        """Storages that the region keeps."""
        trace = self.graph.trace
        return [trace.node(name).storage for name in region_inputs(trace, region)]

    def offloadable(self, spans: Sequence[_Span]) -> frozenset[int]:
        """Storages that need a gradient among what the regions keep that are inside no other."""
        trace, end = self.graph.trace, 0
        found: set[int] = set()
        for _, stop, region in spans:
            if stop > end:
                nodes = (trace.node(name) for name in region_inputs(trace, region))
                found.update(node.storage for node in nodes if node.spec is not None and node.spec.requires_grad)
                end = stop
        return frozenset(found)

    def scope(
        self, start: int, stop: int, spans: Sequence[_Span], seen: set[int], base: int
    ) -> tuple[IntArray, set[int]]:
        """Walks nodes and the outermost of the regions `spans`; bytes held by index, as long as no region is run again."""
        level = np.zeros(stop - start, dtype=np.int64)
        nodes, i, bytes_held = self.graph.trace.nodes, start, base
        waiting = list(spans)
        while i < stop:
            if not waiting or waiting[0][0] > i:
                bytes_held += self.add(nodes[self.positions[i]].saved, seen)
                level[i - start] = self.backward[i] = bytes_held
                i += 1
                continue
            first, last, region = waiting.pop(0)
            inner = [span for span in waiting if span[1] <= last]
            waiting = waiting[len(inner) :]
            bytes_held += self.add(self.inputs(region), seen)
            level[first - start : last - start] = bytes_held
            self.run_again(first, last, inner, seen, bytes_held)
            i = last
        return level, seen

    def run_again(self, first: int, last: int, inner: Sequence[_Span], seen: set[int], base: int) -> None:
        """Notes what is held in the backward of a region, and what its re-run takes."""
        level, kept = self.scope(first, last, inner, set(seen), base)
        live = live_forward(self.graph, self.positions[first:last], kept)
        savers = [i for i in range(first, last) if self.graph.trace.nodes[self.positions[i]].saved]
        end = savers[-1] - first if savers else 0  # it stops before the node that saves last computes
        peak = max(int((level[:end] + live[:end]).max(initial=0)), int(level[end]))
        self.rerun[last - 1] = max(int(self.rerun[last - 1]), peak)

    def add(self, storages: Sequence[int], seen: set[int]) -> int:
        fresh = [storage for storage in dict.fromkeys(storages) if storage >= 0 and storage not in seen]
        seen.update(fresh)
        return sum(self.size(storage) for storage in fresh)


def live_forward(graph: Graph, positions: Sequence[int], kept: set[int] | frozenset[int]) -> IntArray:
    """By index: bytes of results that a later node of `positions` still reads, and the node's workspace.

    Those of `kept` count until the node that saves them, from which on they are held.
    """
    nodes = graph.trace.nodes
    index = {position: i for i, position in enumerate(positions)}
    saver: dict[int, int] = {}
    own: dict[int, int] = {}
    # Regions keep what they read; while they are run again, what their nodes save.
    for saved in (graph.saved, [node.saved for node in nodes]):
        for i, position in enumerate(positions):
            for storage in saved[position]:
                own.setdefault(storage, i)
        saver, own = {**own, **saver}, {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, position in enumerate(positions):
        storage = nodes[position].storage
        if storage < 0:
            continue
        first.setdefault(storage, i)
        readers = [index[reader] for reader in graph.consumers[position] if reader in index]
        last[storage] = max((last.get(storage, i), i, *readers))
    change = np.zeros(len(positions) + 1, dtype=np.int64)
    for storage, start in first.items():
        end = last[storage] + 1 if storage not in kept else max(start, saver.get(storage, start))
        change[start] += graph.trace.storages[storage]
        change[end] -= graph.trace.storages[storage]
    live: IntArray = np.cumsum(change)[:-1]
    return live if graph.workspace is None else live + graph.workspace.forward[list(positions)]
