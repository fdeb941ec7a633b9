"""Which memory lives when, in a stage: memory held from its forward to its backward, and further memory while it runs.

When memory lives while a stage runs one microbatch: the bytes beyond what is held from forward to backward.

Terms
    block       the memory of one gradient of an activation; several values may share it
    forward     by node: bytes of results that autograd does not save and that a later node still reads, and its workspace, if
                that was measured (`smpc.partitioner.costs.timing`)
    backward    by node: bytes of gradients of activations while the node's backward works, its own results and scratch
                included. Gradients of parameters are not among them
    parameters  by node: bytes of gradients of parameters that its backward makes
    before      by node: bytes of gradients of activations when its backward starts

The backward pass visits the nodes in reverse. A node reads the gradient of its result, makes the gradients of its inputs, and
then frees the first. What it makes, and which gradients it passes on, is seen in a run of the operation alone
(`smpc.partitioner.memory.footprints`); a second contribution to a gradient then makes a third block, as it does where tensors are
watched or the first one arrived from another stage (unwatched, autograd may add in place).

For other nodes this is assumed: a node makes no gradient if it can pass its own on: sums, views of the same size and parts of a
concatenation. A second contribution is added to the first in place if nothing else shares that block, else both make a third. What a fused
operation saves for itself it needs once more as scratch, as the gradient of that inner value.

Example: loss = mse(relu(linear(x)), y), every value 4 bytes: backward of mse holds 4 (its result), of relu 8 (the
gradient read and the one made), of linear 4 (x needs none).

The memory held from a stage's forward to its backward, node by node, with recomputation.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from smpc.partitioner.graph.recompute_regions import region_inputs
from smpc.partitioner.graph.trace_graph import Graph
from smpc.partitioner.memory.footprints import HANDED_ON, Footprint, Stride, footprint, forward_footprint
from smpc.partitioner.stage_costs import IntArray
from smpc.tracer import targets
from smpc.tracer.ir import Node, NodeKind, Region


@dataclass(frozen=True)
class SavedActivations:
    """Bytes by index into the positions that were asked for."""

    forward: IntArray  # when the node's forward has run
    backward: IntArray  # when its backward starts, including recomputed values
    rerun: IntArray  # the most during the re-runs of the regions that end with the node; 0 elsewhere
    kept: frozenset[int]  # storages; with those that were there before
    offloadable: frozenset[int]  # storages of activations that outer regions read


def saved_activations(
    graph: Graph,
    positions: Sequence[int],
    regions: Sequence[Region],
    size: Callable[[int], int],
    before: frozenset[int] = frozenset(),
    before_bytes: int = 0,
    more: Mapping[int, Sequence[int]] | None = None,
) -> SavedActivations:
    """The memory of a stage that runs the nodes at `positions`, in order, with these regions, outer ones first.

    `size` gives the bytes of a storage. Storages in `before` exist from the start, and take `before_bytes` together. `more` has storages
    that nodes keep beside what autograd saves, by position.
    """
    walk = _SavedWalk(graph, positions, size, more or {})
    spans = [(*walk.span(region), region) for region in regions]
    inside = [span for span in spans if span[0] < span[1]]
    level, kept = walk.scope(0, len(positions), inside, set(before), before_bytes)
    return SavedActivations(level, walk.backward, walk.rerun, frozenset(kept), walk.offloadable(inside))


_Span = tuple[int, int, Region]


class _SavedWalk:
    def __init__(
        self, graph: Graph, positions: Sequence[int], size: Callable[[int], int], more: Mapping[int, Sequence[int]]
    ) -> None:
        self.graph, self.positions, self.size, self.more = graph, positions, size, more
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
                position = self.positions[i]
                bytes_held += self.add((*nodes[position].saved, *self.more.get(position, ())), seen)
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
        """Notes the memory held in the backward of a region, and the memory of its re-run."""
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


def live_forward(
    graph: Graph, positions: Sequence[int], kept: set[int] | frozenset[int], exact: bool = True
) -> IntArray:
    """By index: bytes of results that a later node of `positions` still reads, and the node's workspace.

    Storages of `kept` count until the node that saves them; from then on they are held.
    """
    nodes = graph.trace.nodes
    index = {position: i for i, position in enumerate(positions)}
    saver: dict[int, int] = {}
    own: dict[int, int] = {}
    # Regions keep what they read; while they are run again, what their nodes save.
    for by_node in (
        [graph.saved[position] for position in positions],
        [nodes[position].saved for position in positions],
    ):
        for i, saved in enumerate(by_node):
            for storage in saved:
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
    known = [forward_footprint(graph.trace, position) if exact else None for position in positions]
    scratch = np.asarray(
        [_rearranged(nodes[i]) if found is None else found.scratch for i, found in zip(positions, known, strict=True)],
        dtype=np.int64,
    )
    if graph.workspace is not None:
        scratch = np.maximum(scratch, graph.workspace.forward[list(positions)])
    live: IntArray = np.cumsum(change)[:-1] + scratch
    return live


def _rearranged(node: Node) -> int:
    """Bytes that come from other ranks and are copied into their places, where slices are no runs of the whole."""
    is_gathered = node.target == f"{targets.TENSOR_OPS}.all_gather" and node.spec is not None
    return node.spec.num_bytes if is_gathered and node.spec is not None and node.kwargs else 0


# Their backward hands the gradient of the result on, as it is or in parts.
_HANDS_ON = frozenset(
    f"{prefix}{name}"
    for prefix, names in (
        ("torch.", ("add", "cat", "concat", "concatenate", "stack")),
        ("torch.Tensor.", ("add", "add_", "__add__", "__radd__", "__iadd__")),
        ("_operator.", ("add", "iadd")),
    )
    for name in names
)
_LSTM = "torch.lstm"
_JOINS = frozenset(("torch.cat", "torch.concat", "torch.concatenate", "torch.stack"))


@dataclass(frozen=True)
class Lifetimes:
    """Bytes by index into the `positions` that were asked for: see the module docstring."""

    forward: IntArray
    backward: IntArray
    parameters: IntArray
    before: IntArray


def lifetimes(
    graph: Graph,
    positions: Sequence[int],
    roots: Iterable[int],
    arriving: Iterable[int] = (),
    kept: frozenset[int] | None = None,
    *,
    exact: bool = True,
) -> Lifetimes:
    """Lifetimes of a stage that runs the nodes at `positions`, in order of execution.

    The backward pass starts with gradients of the nodes at `roots`, and at `arriving`, which other stages send; the latter are in
    buffers that are not counted here. `kept` are the storages that are held until then; None: what autograd saves. `exact`: without, no
    operation is run alone, which takes a millisecond for each kind, and all is assumed.
    """
    if kept is None:
        kept = frozenset(storage for position in positions for storage in graph.trace.nodes[position].saved)
    asked = _Asked(tuple(positions), tuple(roots), tuple(arriving), kept)
    if graph.workspace is not None:
        return _found(graph, asked, exact)
    saved = tuple(graph.saved[position] for position in positions)
    return graph.trace.remembered((lifetimes, asked, saved, exact), lambda: _found(graph, asked, exact))


class _Asked(NamedTuple):
    """A stage: the arguments of `lifetimes`. Schedules, and what replicas divide, leave them as they are."""

    positions: tuple[int, ...]
    roots: tuple[int, ...]
    arriving: tuple[int, ...]
    kept: frozenset[int]


def _found(graph: Graph, asked: _Asked, exact: bool) -> Lifetimes:
    """The lifetimes of a stage. Nobody may write into them: other plans with the same stage get them as well."""
    backward, parameters, before = _Backward(graph, exact).run(asked.positions, asked.roots, asked.arriving)
    found = Lifetimes(live_forward(graph, asked.positions, asked.kept, exact), backward, parameters, before)
    for column in (found.forward, found.backward, found.parameters, found.before):
        column.setflags(write=False)
    return found


def loss_roots(graph: Graph) -> tuple[int, ...]:
    """Outputs at which the backward pass starts: scalars that need a gradient, such as a loss; else all outputs that do."""
    wanted = [i for i in graph.outputs if (spec := graph.trace.nodes[i].spec) is not None and spec.requires_grad]
    losses = [i for i in wanted if (spec := graph.trace.nodes[i].spec) is not None and spec.num_elements == 1]
    return tuple(losses or wanted)


class _Backward:
    """One walk; `blocks` has [bytes, how many values hold it] of each gradient, `held` the blocks of each value."""

    def __init__(self, graph: Graph, exact: bool) -> None:
        self.graph, self.exact = graph, exact
        self.nodes = graph.trace.nodes
        self.held: dict[int, list[list[int]]] = {}
        self.strides: dict[int, Stride] = {}  # of gradients, where they are known
        self.live = 0

    def run(
        self, positions: Sequence[int], roots: Iterable[int], arriving: Iterable[int]
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Gradient bytes of activations and of parameters, and of activations before, by index."""
        for position in dict.fromkeys(arriving):
            self.held[position] = [[0, 2]]  # the message's buffer holds it as well
        for position in dict.fromkeys(roots):
            self.held[position] = [self.new(position)]
        activations, parameters, before = np.zeros((3, len(positions)), dtype=np.int64)
        seen: set[int] = set()
        for i in range(len(positions) - 1, -1, -1):
            own = self.held.pop(result := self.result(positions[i]), None)
            activations[i] = before[i] = self.live
            if own is None:
                continue
            known = None
            if self.exact:
                known = footprint(self.graph.trace, positions[i], self.strides.pop(result, None))
            if known is not None and known.gradients:
                activations[i], parameters[i] = self.follow(positions[i], known, own)
                continue
            if self.nodes[positions[i]].grad_enabled:
                activations[i], parameters[i] = self.visit(positions[i], own, seen)
            self.release(*own)
        return activations, parameters, before

    def result(self, position: int) -> int:
        """The node whose gradient is read by the backward of the node at `position`: for `x[i] = y`, the node of x."""
        node = self.nodes[position]
        is_own = node.target != targets.SETITEM or not node.mutates
        return position if is_own else self.graph.trace.position(node.mutates[0])

    def follow(self, position: int, known: Footprint, own: list[list[int]]) -> tuple[int, int]:
        """The same as `visit`, of an operation whose footprint is known. Lets go of its own gradient."""
        largest = self.live + (known.shared if own[0][1] > 1 else known.working)
        parameters = 0
        made: list[tuple[int, list[int], Stride]] = []
        block = own[0]
        for source, gradient in zip(self.graph.inputs[position], known.gradients, strict=True):
            if gradient is None:
                continue
            num_bytes, stride = gradient
            if self.graph.state_of[source] >= 0:
                largest -= max(0, num_bytes)  # counted apart
                parameters += self.graph.trace.state[self.graph.state_of[source]].spec.num_bytes
                continue
            if num_bytes >= 0:
                block = [num_bytes, 0]
                self.live += num_bytes
            elif num_bytes == HANDED_ON:
                block = own[0]
            block[1] += 1
            made.append((source, block, stride))
        self.release(*own)
        for source, block, stride in made:
            if source not in self.held:
                self.strides[source] = stride
            largest = max(largest, self.add(source, block, apart=True))
        if self.graph.workspace is not None:
            largest = max(largest, self.live + int(self.graph.workspace.backward[position]))
        return max(largest, self.live), parameters

    def visit(self, position: int, own: list[list[int]], seen: set[int]) -> tuple[int, int]:
        """Makes the gradients of a node's inputs. Returns the bytes at work meanwhile, and the bytes of parameters' gradients."""
        node = self.nodes[position]
        made = self._module_parameters(node, position, seen)
        largest = self.live
        for source in self.graph.inputs[position]:
            if self.graph.state_of[source] >= 0:
                state = self.graph.trace.state[self.graph.state_of[source]]
                made += state.spec.num_bytes if state.is_parameter and state.spec.requires_grad else 0
            elif self.needs(source):
                largest = max(largest, self.contribute(position, source, own))
        at_work = max(largest, self.live) + self.scratch(position)
        if self.graph.workspace is not None:
            at_work = max(at_work, self.live + int(self.graph.workspace.backward[position]))
        return at_work, made

    def contribute(self, position: int, source: int, own: list[list[int]]) -> int:
        """Makes a gradient of `source`, and adds it to what there is. Returns the bytes at work meanwhile."""
        handed = self.hands_on(position, source)
        block = own[0] if handed else self.new(source)
        if handed:
            block[1] += 1
        return self.add(source, block)

    def add(self, source: int, block: list[int], *, apart: bool = False) -> int:
        """Adds a gradient to `source`'s, in place unless something shares it or `apart`. Returns the bytes at work meanwhile."""
        before = self.held.get(source)
        if before is None:
            self.held[source] = [block]
            return self.live
        if self.nodes[source].spec is None:  # parts of a tuple are beside each other
            before.append(block)
            return self.live
        if apart or before[0][1] > 1:
            total = self.new(source)
            largest = self.live
            self.release(before[0])
            self.held[source] = [total]
        else:
            largest = self.live
        self.release(block)
        return largest

    def new(self, position: int) -> list[int]:
        """A gradient of the value at `position`."""
        spec = self.nodes[position].spec
        size = spec.num_bytes if spec is not None else 0
        self.live += size
        return [size, 1]

    def release(self, *blocks: list[int]) -> None:
        """One value less holds each of the blocks."""
        for block in blocks:
            block[1] -= 1
            if block[1] == 0:
                self.live -= block[0]

    def needs(self, position: int) -> bool:
        """Whether the value has a gradient; a tuple has one if something that it is made of has."""
        spec = self.nodes[position].spec
        if spec is not None:
            return spec.requires_grad
        return self.nodes[position].grad_enabled and any(self.needs(i) for i in self.graph.inputs[position])

    def hands_on(self, position: int, source: int) -> bool:
        """Whether the gradient of the result is also used as the input's."""
        node, origin = self.nodes[position], self.nodes[source]
        if node.spec is None:
            return False
        if origin.spec is None:
            return True
        if node.target in _JOINS:
            return True
        if node.spec.num_elements != origin.spec.num_elements or node.spec.dtype != origin.spec.dtype:
            return False
        return node.target in _HANDS_ON or (node.storage == origin.storage >= 0 and not node.bytes_moved)

    def scratch(self, position: int) -> int:
        """The largest inner value that the node saves for itself. What a kernel of LSTMs keeps, more than it returns, has no gradient."""
        node, storages = self.nodes[position], self.graph.trace.storages
        results = [] if node.spec is not None else [self.nodes[i].storage for i in self.graph.consumers[position]]
        known = {node.storage, *results, *(self.nodes[i].storage for i in self.graph.inputs[position])}
        inner = [storages[storage] for storage in node.saved if storage not in known]
        if node.target == _LSTM:
            returned = max((storages[storage] for storage in results if storage >= 0), default=0)
            inner = [num_bytes for num_bytes in inner if num_bytes <= returned]
        return max(inner, default=0)

    def _module_parameters(self, node: Node, position: int, seen: set[int]) -> int:
        """Bytes of gradients that a module called whole makes of its own parameters."""
        if node.kind is not NodeKind.CALL_MODULE:
            return 0
        found = 0
        for i, (state, users) in enumerate(zip(self.graph.trace.state, self.graph.state_users, strict=True)):
            if position in users and i not in seen and state.is_parameter and state.spec.requires_grad:
                seen.add(i)
                found += state.spec.num_bytes
        return found
