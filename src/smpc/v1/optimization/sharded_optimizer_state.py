"""`shard_optimizer_state`: one of the ranks that hold a parameter updates it, or some of its rows, and sends the result to the others.

    shards.assign(entries)           who updates what
    shards.owns(parameter)           whether this rank updates it, or rows of it
    shards.range_of(parameter)       the rows, if others update the rest
    shards.gather()                  after the optimizer's step: every rank gets what the others have updated

Terms
    holders   the ranks that hold the same values of a parameter, and average its gradient: the reduced-data-parallel group for a parameter
              of a distributed (tensor-parallel) module, those that hold the same experts for one of experts that ranks divide, the
              data-parallel group for any other
    owner     a holder that has the optimizer state of a parameter or of a range of its rows, and their fp32 master
    rows      along dimension 0; of a tensor-parallel rank's slice, along the dimension in which it is sliced

Shares are balanced by bytes; see `deal`. A parameter is cut only if the optimizer updates every element independently
(`elementwise`); otherwise, for example if the optimizer takes norms of parameters, it has one owner. Parameters that require no
gradient are assigned last, so that both the existing and the possible state are balanced.

    replica 0   embedding rows 0 to 399, norm          replica 1   embedding rows 400 to 600, head, bias

The replicas average gradients anyway, and an owner computes the same update as every rank would, so results are the same, bit by bit, as
without sharding. Cuts are at multiples of a vector of elements, since some CPU kernels round the last few elements of a tensor
differently.

After the step owners send in buckets, two at a time: memory for them is bounded, whatever the parameters' sizes.

`ShardedNames` are attributes of an optimizer that scripts read under `sharded_data_parallel_degree`, by DeepSpeed's names. Without that
key they do not exist.

    optimizer.fp16_groups                      for each group, the model's parameters, in parts
    optimizer.fp32_partitioned_groups_flat     for each group, this rank's parts of what is updated, in one flat fp32 tensor; a copy
    optimizer._global_grad_norm                the norm of all gradients before the last step, which clips to `sdp_gradient_clipping`
    optimizer.ds_param_shard_group             the ranks that have the other parts

Source: public training scripts for SMP v1.

`deal` deals parameters out to owners, so that all own about as many bytes: whole where it must be, in ranges of rows where that may be.

    deal([Lot(60_000, rows=100), Lot(9_000), Lot(600)], loads := [0, 0])
        [(Cut(owner=0, start=0, stop=43), Cut(owner=1, start=43, stop=100)), (Cut(owner=0),), (Cut(owner=1),)]
        and the loads are [34_800, 34_800]

Terms
    lot       a parameter: its bytes, and how many rows it has that may go to different owners; 0 rows: it goes to one owner
    granule   rows are cut at multiples of it
    load      the bytes that an owner has

What must stay whole goes first, from the largest to the smallest, each to the owner with the smallest load. Then the large lots that
may be cut, in their order, fill one owner after the other up to a common level: n owners make at most n - 1 cuts, and what an owner has
is a few long runs. Small lots, whole, even out what is left.

    level  ---------------------------
           | head     | head         |
           | (rest)   |--------------|     what must stay whole is at the bottom, small lots on top
           |----------| embedding    |
           | whole    |              |

Parts of parameters, which replace parameters in the optimizer's groups if a rank updates only some of their rows.

    parts.adopt(optimizer, range_of)     in the optimizer's groups, parts take the parameters' places; their state is cut to size
    parts.refresh()                      parts are in the parameters' memory, and have their gradients' rows
    parts.drop_gradients()

A part is an nn.Parameter that shares the memory of its rows with the parameter: updating it updates the parameter, and an fp32 master of it
is a master of these rows. Its gradient is a view of the parameter's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from smpc.mesh import Axis
from smpc.nn.parallel import ParameterSlice
from smpc.nn.script_writes.data_aliases import data_version, watch_data
from smpc.sharding.dtensors import local
from smpc.v1.session.process_state import Session, state


@dataclass(frozen=True, slots=True)
class Range:
    """`length` rows of a parameter along `dim`, from `start` on."""

    dim: int
    start: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        """These rows; a view of a dense tensor."""
        if tensor.layout is torch.sparse_coo:
            return tensor.narrow_copy(self.dim, self.start, self.length)
        return tensor.narrow(self.dim, self.start, self.length)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the rows, if `whole` is the parameter's."""
        return tuple(self.length if dim == self.dim else size for dim, size in enumerate(whole))

    def within(self, shard: ParameterSlice | None, size: int) -> ParameterSlice:
        """The rows as a slice of the whole model's parameter, if this rank's parameter, with `size` rows, is the slice `shard`."""
        if shard is None:
            return ParameterSlice(self.dim, size, self.start)
        runs = []
        for own, start, length in shard.runs_of(size):
            low, high = max(own, self.start), min(own + length, self.start + self.length)
            if low < high:
                runs.append((start + low - own, high - low))
        return ParameterSlice(self.dim, shard.size, runs[0][0], tuple(runs) if len(runs) > 1 else ())


@dataclass(slots=True)
class _UpdatePart:
    parameter: Tensor
    part: nn.Parameter
    range: Range
    seen: tuple[int, int]  # counters of the parameter and of its `data`

    def refresh(self) -> None:
        rows = self.range.of(self.parameter.detach())
        if rows.data_ptr() != self.part.data_ptr() or rows.device != self.part.device:
            self.part.data = rows  # somebody has given the parameter other memory
        now = self.parameter._version, data_version(self.parameter)
        if now != self.seen and (self.part._version != now[0] or now[1] != self.seen[1]):
            torch.autograd.graph.increment_version(self.part)  # after that they no longer count together
        self.seen = now
        if self.part.requires_grad != self.parameter.requires_grad:
            self.part.requires_grad_(self.parameter.requires_grad)


class OwnParts:
    """The parts that this rank updates."""

    def __init__(self) -> None:
        self._parts: dict[int, _UpdatePart] = {}  # by id of the parameter
        self._parameters: dict[int, Tensor] = {}  # by id of the part

    def adopt(self, optimizer: Optimizer, range_of: Callable[[Tensor], Range | None]) -> None:
        """Put parts in the optimizer's groups, for every parameter of which there is a range, and that has none yet."""
        for group in optimizer.param_groups:
            # In place: some optimizers keep the list.
            group["params"][:] = [self._place(optimizer, entry, range_of(entry)) for entry in group["params"]]

    def _place(self, optimizer: Optimizer, parameter: Tensor, own: Range | None) -> Tensor:
        if own is None or id(parameter) in self._parts or id(parameter) in self._parameters:
            return parameter
        part = nn.Parameter(own.of(parameter.detach()), requires_grad=parameter.requires_grad)
        part.grad_dtype = parameter.grad_dtype  # gradients may be wider
        if parameter.dtype.itemsize < 4:  # it has a master
            watch_data(parameter)
        self._parts[id(parameter)] = _UpdatePart(parameter, part, own, (parameter._version, data_version(parameter)))
        self._parameters[id(part)] = parameter
        if parameter in optimizer.state:
            optimizer.state[part] = {
                key: own.of(value).clone() if isinstance(value, Tensor) and value.shape == parameter.shape else value
                for key, value in optimizer.state.pop(parameter).items()
            }
        return part

    def parameter_of(self, entry: Tensor) -> Tensor:
        """The parameter that a part belongs to; other entries unchanged."""
        return self._parameters.get(id(entry), entry)

    def entry_of(self, parameter: Tensor) -> Tensor:
        """The tensor that this rank updates for a parameter: a part, or all of it."""
        found = self._parts.get(id(parameter))
        return parameter if found is None else found.part

    def range_of(self, parameter: Tensor) -> Range | None:
        """The rows of a parameter that this rank updates; None if it is not in parts here."""
        found = self._parts.get(id(parameter))
        return None if found is None else found.range

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the parts' memory and gradients from the parameters."""
        for each in self._parts.values():
            each.refresh()
            grad = each.parameter.grad
            each.part.grad = None if grad is None else each.range.of(grad)

    def drop_gradients(self) -> None:
        """Free the parameters' gradients."""
        for each in self._parts.values():
            each.part.grad = None


_SMALLEST = 1 << 10  # bytes: smaller lots are not worth a cut
_SHARE = 1024  # nor are those that are less than this part of what each owner gets


@dataclass(frozen=True, slots=True)
class ShardedLot:
    """What is dealt out; see the module's docstring."""

    size: int
    rows: int = 0
    granule: int = 1

    @property
    def may_be_cut(self) -> bool:
        """Whether it has rows for several owners."""
        return self.rows >= 2 * self.granule


@dataclass(frozen=True, slots=True)
class OwnedRows:
    """Rows of a lot that one owner gets; of a lot without rows, all of it."""

    owner: int
    start: int = 0
    stop: int = 0


def deal(lots: Sequence[ShardedLot], loads: list[int]) -> list[tuple[OwnedRows, ...]]:
    """The owners of each lot, in order of rows. `loads` of the owners are brought up to date."""
    share = (sum(loads) + sum(lot.size for lot in lots)) // len(loads)
    large = [i for i, lot in enumerate(lots) if lot.may_be_cut and lot.size >= max(_SMALLEST, share // _SHARE)]
    whole = sorted((i for i, lot in enumerate(lots) if not lot.may_be_cut), key=lambda i: -lots[i].size)
    known = {*large, *whole}
    small = sorted((i for i in range(len(lots)) if i not in known), key=lambda i: -lots[i].size)
    # The small ones among them may as well come last.
    first = [i for i in whole if lots[i].size >= share // _SHARE]
    last = sorted([*whole[len(first) :], *small], key=lambda i: -lots[i].size)
    found: dict[int, tuple[OwnedRows, ...]] = {}
    for i in first:
        found[i] = (_least(lots[i], loads),)
    found |= _fill_owners(lots, large, loads)
    for i in last:
        found[i] = (_least(lots[i], loads),)
    return [found[i] for i in range(len(lots))]


def _least(lot: ShardedLot, loads: list[int]) -> OwnedRows:
    owner = min(range(len(loads)), key=lambda owner: (loads[owner], owner))
    loads[owner] += lot.size
    return OwnedRows(owner, 0, lot.rows)


def _fill_owners(
    lots: Sequence[ShardedLot], large: Sequence[int], loads: list[int]
) -> dict[int, tuple[OwnedRows, ...]]:
    """Owners one after the other, each up to the level that those left can reach together."""
    found: dict[int, list[OwnedRows]] = {i: [] for i in large}
    left = sum(lots[i].size for i in large)
    queue = [(i, 0) for i in large]  # lot, first row that is left
    for owner in range(len(loads)):
        room = _level_of_owners(loads[owner:], left) - loads[owner]
        is_last = owner == len(loads) - 1
        while queue and (room > 0 or is_last):
            i, start = queue.pop(0)
            stop = lots[i].rows if is_last else _stop(lots[i], start, room)
            size = _bytes_of_sharded_lot(lots[i], start, stop)
            if stop > start:
                found[i].append(OwnedRows(owner, start, stop))
                loads[owner] += size
                left -= size
                room -= size
            if stop < lots[i].rows:
                queue.insert(0, (i, stop))
                break
    return {i: tuple(cuts) for i, cuts in found.items()}


def _stop(lot: ShardedLot, start: int, room: int) -> int:
    """Where to cut, so that the rows from `start` on fill the room as closely as possible."""
    granules = (room * lot.rows / lot.size) / lot.granule
    stop = start + round(granules) * lot.granule
    return lot.rows if lot.rows - stop < lot.granule else stop


def _bytes_of_sharded_lot(lot: ShardedLot, start: int, stop: int) -> int:
    return lot.size * stop // lot.rows - lot.size * start // lot.rows


def _level_of_owners(loads: Sequence[int], left: int) -> int:
    """How high all that is left fills owners with these loads."""
    ordered = sorted(loads)
    filled = 0
    for count, load in enumerate(ordered, start=1):
        filled += load
        level = (left + filled) // count
        if count == len(ordered) or level <= ordered[count]:
            return level
    raise AssertionError("the last owner ends the search")


_BUCKET = 1 << 23  # elements that are sent at once
_IN_FLIGHT = 2  # buckets
_VECTORS = (64, 16, 8)  # elements
_HOLDERS = (Axis.EXPERT_DATA, Axis.RDP, Axis.DP)  # of a parameter


@dataclass(frozen=True, slots=True)
class AssignedParameter:
    """A parameter to be assigned.

    `size`: bytes of the owner's state, and `rows`: along `dim`; both are equal on all tensor-parallel ranks, even if their slices
    differ. Without rows it has one owner. `holders`: the axis of the ranks that hold it.
    """

    parameter: Tensor
    size: int
    holders: Axis
    rows: int = 0
    dim: int = 0

    def lot(self) -> ShardedLot:
        """The parameters as lots."""
        if self.rows < 2 or not self.size:
            return ShardedLot(self.size)
        width = math.prod(size for dim, size in enumerate(self.parameter.shape) if dim != self.dim)
        for vector in _VECTORS if self.dim == 0 else ():
            granule = vector // math.gcd(vector, width)
            if granule * 256 <= self.rows or granule == 1:
                return ShardedLot(self.size, self.rows, granule)
        return ShardedLot(self.size, self.rows)

    def range_of(self, cut: OwnedRows) -> Range:
        """The rows of this rank's tensor for a cut."""
        own = self.parameter.shape[self.dim]
        start, stop = (bound * own // self.rows for bound in (cut.start, cut.stop))
        return Range(self.dim, start, stop - start)


class Shards:
    """Who updates what, among the ranks of this rank's data-parallel group."""

    def __init__(self, session: Session) -> None:
        self._session = session
        members = session.mesh.group(Axis.DP, session.rank)
        self._position = members.index(session.rank)
        self._places = {axis: [session.mesh.axis_rank(axis, member) for member in members] for axis in _HOLDERS}
        self._loads = [0] * len(members)
        self._entries: dict[int, AssignedParameter] = {}
        self._cuts: dict[int, tuple[OwnedRows, ...]] = {}  # by id; owners are positions in the group of holders

    def assign(self, entries: Sequence[AssignedParameter]) -> None:
        """Give owners to the entries that have none. The same on every rank of the group, for the same entries."""
        new = [entry for entry in entries if id(entry.parameter) not in self._entries]
        self._entries |= {id(entry.parameter): entry for entry in new}
        for trains in (True, False):
            kind = [entry for entry in new if entry.parameter.requires_grad == trains]
            # Entries with fewer holders come first: the others can even out the rest.
            for axis in _HOLDERS:
                self._deal([entry for entry in kind if entry.holders is axis], self._places[axis])

    def _deal(self, entries: Sequence[AssignedParameter], places: Sequence[int]) -> None:
        """Assigns entries to holders. `places`: of all ranks; ranks with the same place have the same share of their slices or experts."""
        before = [
            max(load for load, other in zip(self._loads, places, strict=True) if other == place)
            for place in range(max(places) + 1)
        ]
        loads = list(before)
        for entry, cuts in zip(entries, deal([entry.lot() for entry in entries], loads), strict=True):
            self._cuts[id(entry.parameter)] = cuts
        for position, place in enumerate(places):
            self._loads[position] += loads[place] - before[place]

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank updates a parameter or rows of it. Every rank updates a parameter without an owner."""
        entry = self._entries.get(id(parameter))
        if entry is None:
            return True
        cut = self._own_cut(entry)
        return cut is not None and (len(self._cuts[id(parameter)]) == 1 or entry.range_of(cut).length > 0)

    def range_of(self, parameter: Tensor) -> Range | None:
        """The rows of a parameter that this rank updates, if it does not update all or none of them."""
        entry = self._entries.get(id(parameter))
        if entry is None or len(self._cuts[id(parameter)]) == 1 or not self.owns(parameter):
            return None
        cut = self._own_cut(entry)
        return None if cut is None else entry.range_of(cut)

    def _own_cut(self, entry: AssignedParameter) -> OwnedRows | None:
        own = self._places[entry.holders][self._position]
        return next((cut for cut in self._cuts[id(entry.parameter)] if cut.owner == own), None)

    def is_counted(self, parameter: Tensor) -> bool:
        """Whether this rank counts the parameter in a norm over the owners; exactly one holder does."""
        entry = self._entries.get(id(parameter))
        if entry is None or not self.owns(parameter):
            return entry is None and self._position == 0
        mesh, rank = self._session.mesh, self._session.rank
        if entry.holders is Axis.EXPERT_DATA and mesh.axis_rank(Axis.EP, rank):
            return False
        return entry.holders is Axis.DP or mesh.tp_rank(rank) == 0

    def gather(self) -> None:
        """Every rank gets the updated rows that it does not own from their owners. Collective."""
        for axis in (Axis.RDP, Axis.DP, Axis.EXPERT_DATA):
            entries = [entry for entry in self._entries.values() if entry.holders is axis]
            if entries:
                self._gather(entries, self._session.groups[axis])

    @torch.no_grad()
    def _gather(self, entries: Sequence[AssignedParameter], group: dist.ProcessGroup) -> None:
        pending: deque[_UpdateExchange] = deque()
        for owner in range(group.size()):
            for bucket in _buckets(self._owned_by(owner, entries)):
                if len(pending) == _IN_FLIGHT:
                    pending.popleft().finish()
                pending.append(_UpdateExchange(bucket, group, owner))
        for exchange in pending:
            exchange.finish()

    def _owned_by(self, owner: int, entries: Sequence[AssignedParameter]) -> Iterator[Tensor]:
        """An owner's updated rows, in pieces that fit into a bucket."""
        for entry in entries:
            if not entry.parameter.requires_grad:
                continue
            cuts = self._cuts[id(entry.parameter)]
            for cut in cuts:
                if cut.owner == owner:
                    whole = entry.parameter.detach()
                    yield from _pieces_of_tensor(whole if len(cuts) == 1 else entry.range_of(cut).of(whole))


class _UpdateExchange:
    """Tensors of one dtype and device on their way from the group's rank `source`."""

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup, source: int) -> None:
        self._tensors, self._receives = tensors, group.rank() != source
        # A contiguous tensor is sent as it is, and received in place.
        self._is_direct = len(tensors) == 1 and tensors[0].is_contiguous()
        self._flat = tensors[0] if self._is_direct else self._packed()
        self._work = dist.broadcast(self._flat, group=group, group_src=source, async_op=True)

    def _packed(self) -> Tensor:
        if not self._receives:
            return torch.cat([tensor.reshape(-1) for tensor in self._tensors])
        return self._tensors[0].new_empty(sum(tensor.numel() for tensor in self._tensors))

    def finish(self) -> None:
        """Wait, and copy what was received to its place."""
        if self._work is not None:
            self._work.wait()
        if self._receives and self._is_direct:
            torch.autograd.graph.increment_version(self._tensors[0])
        elif self._receives:
            sizes = [tensor.numel() for tensor in self._tensors]
            for tensor, part in zip(self._tensors, torch.split(self._flat, sizes), strict=True):
                tensor.copy_(part.view(tensor.shape))


def _pieces_of_tensor(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor, along dimension 0, in pieces of at most a bucket; larger rows one at a time."""
    if tensor.numel() <= _BUCKET or tensor.shape[0] == 1:
        if tensor.numel():
            yield tensor
        return
    rows = max(_BUCKET * tensor.shape[0] // tensor.numel(), 1)
    yield from torch.split(tensor, rows)


def _buckets(tensors: Iterator[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype and device, some at a time."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        if bucket and (size + tensor.numel() > _BUCKET or kind != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


class ShardedNames(Optimizer):
    """These attributes, for an optimizer of a sharded model."""

    optimizer: Optimizer
    parameter_of: Callable[[Tensor], Tensor]
    _norm: Tensor | None = None

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The model's parameters, whatever their dtype."""
        _check_sharded("fp16_groups")
        return [[self.parameter_of(entry) for entry in group["params"]] for group in self.optimizer.param_groups]

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """Masters, or the parameters themselves in fp32: this rank's parts."""
        _check_sharded("fp32_partitioned_groups_flat")
        groups = [[local(entry.detach()) for entry in group["params"]] for group in self.optimizer.param_groups]
        return [
            torch.cat([part.float().reshape(-1) for part in parts]) if parts else torch.zeros(0) for parts in groups
        ]

    @property
    def ds_param_shard_group(self) -> dist.ProcessGroup:
        """The process group over which each parameter is sharded."""
        _check_sharded("ds_param_shard_group")
        return state.session.groups[Axis.FSDP]

    @property
    def _global_grad_norm(self) -> Any:
        """0-dimensional; None before the first step, and without clipping."""
        _check_sharded("_global_grad_norm")
        return self._norm


def max_norm() -> float:
    """The norm that the optimizer's step clips to; 0: no clipping."""
    is_sharded = state.initialized and state.session.mesh.shard_size > 1
    return state.cfg.sdp_gradient_clipping if is_sharded else 0.0


def _check_sharded(name: str) -> None:
    """Raises AttributeError without sharded data parallelism."""
    if not (state.initialized and state.session.mesh.shard_size > 1):
        raise AttributeError(
            f"DistributedOptimizer.{name}: there is one under sharded data parallelism alone (sharded_data_parallel_degree above 1)"
        )
