"""Differentiable collectives over the ranks that hold the slices of the same tensor-parallel modules.

Terms
    replicated   every rank of the group has the same values, and, in the backward pass, the same whole gradient
    sharded      every rank has its own slice along one dimension, and the gradient of that slice
    partial      every rank has a summand; the tensor meant is their sum

        function         takes         returns       backward
        replicate_in     replicated    replicated    all-reduce: its users compute partial gradients
        all_reduce       partial       replicated    identity
        all_gather       sharded       replicated    slice, as the gradients are whole on every rank
        gather_in        sharded       replicated    reduce-scatter: its users compute partial gradients
        reduce_scatter   partial       sharded       all-gather
        split            replicated    sharded       all-gather
        all_to_all       sharded by b  sharded by a  all-to-all the other way

(`replicate_in` and `all_reduce` are f and g of Shoeybi et al. 2019, arXiv 1909.08053, `gather_in` and `reduce_scatter` come from
Korthikanti et al. 2022, arXiv 2205.05198.) In a group of one rank each returns its argument. Fake tensors are answered by shape alone,
so that a recorder can run the modules that call these. Small CPU tensors go through memory where all ranks are on one host
(`smpc.executor.host_memory.shared_slots`), everything else through the process group: which way does not depend on the rank.

Example, a linear layer whose weight is split by columns, then one whose weight is split by rows, on [N, H] inputs:

    h = F.linear(replicate_in(x, group), columns)         # [N, 4H / size]
    y = all_reduce(F.linear(h, rows), group)              # [N, H]

Which pieces of a dimension a rank has, and the two orders in which all of them can be.

Terms
    blocks      sizes of runs of the dimension that are each shared out by themselves; none: the dimension is one block
    mirrored    of each block, cut in 2n pieces, the r-th of n ranks has pieces r and 2n - 1 - r: its parts of a triangle are then
                as large as everybody's. Otherwise a block is cut in n pieces, and rank r has the r-th
    rank order  the pieces of rank 0, then of rank 1, ...: the order after gathering

    0 1 2 3 4 5 6 7     on two ranks, mirrored: rank 0 has 0 1 6 7, rank 1 has 2 3 4 5
    0 1 2 3 | 4 5 6 7   in two blocks: rank 0 has 0 1 4 5, rank 1 has 2 3 6 7

>>> pieces_of(1, 8, 2, mirrored=True)
((2, 2), (4, 2))
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from smpc.executor.host_memory.shared_memory import GroupMemory
from smpc.executor.host_memory.shared_slots import SUMMED, SharedSlots, slices_of

_PAIR = 2
OnRank = Callable[[Tensor], Tensor]  # of this rank's tensor, communicating inside, to this rank's tensor


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """The ranks over which tensor-parallel modules are split, and this process's place among them."""

    process_group: dist.ProcessGroup | None = None  # None: a group of one
    rank: int = 0
    size: int = 1
    _link: GroupMemory | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of a group of {self.size}"
        assert self.size == 1 or self.process_group is not None, "several ranks need a process group"
        if self.process_group is not None and self.size > 1:
            object.__setattr__(self, "_link", GroupMemory.of(self.process_group))

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> TensorGroup:
        """The group behind a torch.distributed group that this process belongs to."""
        return cls(process_group, process_group.rank(), process_group.size())

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorGroup:
        """A copy of a module that knows its group is in the same one."""
        return self

    def share(self, size: int) -> int:
        """This rank's part of `size` elements. An uneven rest goes to the first ranks."""
        return self.shares(size)[self.rank]

    def start(self, size: int) -> int:
        """Where this rank's part of `size` elements begins."""
        return sum(self.shares(size)[: self.rank])

    def shares(self, size: int) -> tuple[int, ...]:
        """Every rank's part of `size` elements."""
        each, rest = divmod(size, self.size)
        return tuple(each + (rank < rest) for rank in range(self.size))

    def slots_for(self, tensor: Tensor) -> SharedSlots | None:
        """The shared memory that a tensor goes through, None: the process group. Collective at the first CPU tensor.

        What is larger than a slot goes through in pieces, for each of which all ranks wait: between more than two a ring is faster.
        """
        slots = None if self._link is None or not tensor.is_cpu else self._link.slots
        return slots if slots is None or self.size == _PAIR or slots.holds(tensor.nbytes) else None


def replicate_in(tensor: Tensor, group: TensorGroup) -> Tensor:
    """A replicated tensor whose users compute partial gradients, summed in the backward pass."""
    return collective(tensor, group, lambda x: x.view_as(x), lambda grad: summed(grad, group))


def all_reduce(tensor: Tensor, group: TensorGroup) -> Tensor:
    """The sum of a partial tensor, on every rank."""
    return collective(tensor, group, lambda x: summed(x, group), lambda grad: grad)


def all_gather(tensor: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """The slices along `dim`, put together; its users must be replicated too."""
    return collective(tensor, group, lambda x: gathered(x, dim, group), lambda grad: own_slice(grad, dim, group))


def gather_in(tensor: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """The slices along `dim`, put together, for users that compute partial gradients."""
    return collective(tensor, group, lambda x: gathered(x, dim, group), lambda grad: scattered_sum(grad, dim, group))


def reduce_scatter(tensor: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """This rank's slice along `dim` of the sum of a partial tensor. The group's size must divide that dimension."""
    return collective(tensor, group, lambda x: scattered_sum(x, dim, group), lambda grad: gathered(grad, dim, group))


def split(tensor: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """This rank's slice along `dim` of a replicated tensor. The group's size must divide that dimension."""
    return collective(tensor, group, lambda x: own_slice(x, dim, group), lambda grad: gathered(grad, dim, group))


def all_to_all(tensor: Tensor, split_dim: int, gather_dim: int, group: TensorGroup) -> Tensor:
    """A tensor sharded along `gather_dim` becomes one sharded along `split_dim`."""
    return collective(
        tensor,
        group,
        lambda x: exchanged(x, split_dim, gather_dim, group),
        lambda grad: exchanged(grad, gather_dim, split_dim, group),
    )


def collective(tensor: Tensor, group: TensorGroup, there: OnRank, back: OnRank) -> Tensor:
    """`there` of a tensor, with `back` of its gradient in the backward pass. In a group of one rank, the tensor itself."""
    return tensor if group.size == 1 else linear_map(tensor, there, back)


def linear_map(tensor: Tensor, there: OnRank, back: OnRank) -> Tensor:
    """`there` of a tensor, with `back`, its adjoint, of the gradient in the backward pass."""
    found: Tensor = _LinearMap.apply(tensor, there, back)  # type: ignore[no-untyped-call]
    return found


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: OnRank, back: OnRank) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():  # for a gradient of gradients (create_graph)
            return linear_map(grad, ctx.back, ctx.there), None, None
        return ctx.back(grad), None, None


def sum_over(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Sums a contiguous tensor in place over the ranks, outside autograd; returns it."""
    if group.size > 1 and not is_fake(tensor):
        slots = group.slots_for(tensor) if tensor.dtype in SUMMED else None
        if slots is not None:
            slots.sum(tensor, tensor)
        else:
            _process_group(group).allreduce([tensor]).wait()
    return tensor


def summed(tensor: Tensor, group: TensorGroup) -> Tensor:
    """The sum over all ranks, contiguous, outside autograd; of sparse tensors (gradients of embeddings), sparse."""
    if tensor.layout is torch.sparse_coo:
        return _summed_sparse(tensor, group)
    if tensor.dtype in SUMMED and group.size > 1 and not is_fake(tensor):
        slots = group.slots_for(tensor)
        if slots is not None:
            return slots.sum(tensor)
    return sum_over(tensor.clone(memory_format=torch.contiguous_format), group)


def _summed_sparse(tensor: Tensor, group: TensorGroup) -> Tensor:
    """All ranks' entries, in rank order; ranks may have different numbers of them."""
    if group.size == 1 or is_fake(tensor):
        return tensor
    own = tensor.coalesce()
    counts = gathered(torch.tensor([own._nnz()], device=tensor.device), 0, group).tolist()
    joined = []
    for part, along in ((own.indices(), 1), (own.values(), 0)):
        padding = [max(counts) - own._nnz() if dim == along else size for dim, size in enumerate(part.shape)]
        filled = torch.cat((part, part.new_zeros(padding)), along)
        pieces = gathered(filled, along, group).chunk(group.size, along)
        joined.append(torch.cat([piece.narrow(along, 0, n) for piece, n in zip(pieces, counts, strict=True)], along))
    return torch.sparse_coo_tensor(joined[0], joined[1], tensor.shape, check_invariants=False)


def gathered(tensor: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """The equal slices of all ranks along `dim`, contiguous, outside autograd. Booleans travel as bytes."""
    if group.size == 1:
        return tensor
    if tensor.dtype is torch.bool:
        return gathered(tensor.to(torch.uint8), dim, group).to(torch.bool)
    slots = None if is_fake(tensor) else group.slots_for(tensor)
    if slots is not None:
        return slots.gather(tensor, dim)
    own = tensor.contiguous()
    whole = own.new_empty((group.size * own.shape[0], *own.shape[1:]))
    if not is_fake(tensor):
        _process_group(group)._allgather_base(whole, own).wait()
    return torch.cat(whole.view(group.size, *own.shape).unbind(), dim) if dim % tensor.dim() else whole


def scattered_sum(tensor: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """This rank's slice along `dim` of the sum over all ranks, contiguous, outside autograd."""
    _check_divides(tensor, dim, group)
    slots = group.slots_for(tensor) if tensor.dtype in SUMMED and not is_fake(tensor) else None
    if slots is not None:
        return slots.scattered_sum(tensor, dim)
    slices = slices_of(tensor, dim, group.size).contiguous()
    own = slices.new_empty(slices.shape[1:])
    if not is_fake(tensor):
        _process_group(group)._reduce_scatter_base(own, slices.flatten(0, 1), dist.ReduceScatterOptions()).wait()
    return own


def own_slice(tensor: Tensor, dim: int, group: TensorGroup) -> Tensor:
    """This rank's slice of a tensor along `dim`, as a contiguous tensor."""
    _check_divides(tensor, dim, group)
    return tensor.chunk(group.size, dim)[group.rank].contiguous()


def exchanged(tensor: Tensor, split_dim: int, gather_dim: int, group: TensorGroup) -> Tensor:
    """Sends slice i along `split_dim` to rank i; joins what arrives along `gather_dim`. Outside autograd."""
    _check_divides(tensor, split_dim, group)
    outgoing = torch.cat(tensor.chunk(group.size, split_dim))
    slots = None if is_fake(tensor) else group.slots_for(outgoing)
    if slots is not None:
        return slots.all_to_all(outgoing, gather_dim)
    incoming = torch.empty_like(outgoing)
    if not is_fake(tensor):
        _process_group(group).alltoall_base(incoming, outgoing, [], []).wait()
    return torch.cat(incoming.chunk(group.size), gather_dim)


def _process_group(group: TensorGroup) -> dist.ProcessGroup:
    assert group.process_group is not None
    return group.process_group


def _check_divides(tensor: Tensor, dim: int, group: TensorGroup) -> None:
    if tensor.shape[dim] % group.size:
        raise ValueError(
            f"expected dimension {dim} of a tensor of shape {tuple(tensor.shape)} to be divisible by the "
            f"{group.size} tensor-parallel ranks, found {tensor.shape[dim]}; pad it, or change tensor_parallel_degree"
        )


Pieces = tuple[tuple[int, int], ...]  # (start, length), as they are on a rank


@functools.lru_cache(maxsize=4096)
def pieces_of(rank: int, size: int, num_ranks: int, blocks: tuple[int, ...] = (), mirrored: bool = False) -> Pieces:
    """The pieces of a dimension of `size` elements that a rank has. ValueError if a block cannot be cut into equal pieces."""
    each = num_ranks * 2 if mirrored else num_ranks
    found: list[tuple[int, int]] = []
    start = 0
    for block in blocks or (size,):
        if block % each:
            raise ValueError(
                f"expected {block} elements in each part of a dimension of {size} to be divisible by {each}, for {num_ranks} ranks"
                f"{' with two pieces each' if mirrored else ''}; pad it, or use another number of ranks"
            )
        length = block // each
        found += [(start + place * length, length) for place in ((rank, each - 1 - rank) if mirrored else (rank,))]
        start += block
    assert start == size, f"blocks {blocks} of {size} elements"
    return tuple(found)


def own_pieces(
    tensor: Tensor, dim: int, rank: int, num_ranks: int, blocks: tuple[int, ...] = (), mirrored: bool = False
) -> Tensor:
    """A rank's pieces of a whole tensor, joined: a new, contiguous tensor."""
    pieces = pieces_of(rank, tensor.shape[dim], num_ranks, tuple(blocks), mirrored)
    return torch.cat([tensor.narrow(dim, start, length) for start, length in pieces], dim)


def in_rank_order(
    tensor: Tensor, dim: int, num_ranks: int, blocks: tuple[int, ...] = (), mirrored: bool = False
) -> Tensor:
    """A whole tensor, with its pieces in rank order."""
    if not (blocks or mirrored):
        return tensor
    order = _all_pieces(tensor.shape[dim], num_ranks, tuple(blocks), mirrored)
    return torch.cat([tensor.narrow(dim, start, length) for start, length in order], dim)


def in_own_order(
    tensor: Tensor, dim: int, num_ranks: int, blocks: tuple[int, ...] = (), mirrored: bool = False
) -> Tensor:
    """The whole tensor again, of one in rank order."""
    if not (blocks or mirrored):
        return tensor
    order = _all_pieces(tensor.shape[dim], num_ranks, tuple(blocks), mirrored)
    parts = torch.split(tensor, [length for _, length in order], dim)
    ascending = sorted(range(len(order)), key=lambda i: order[i][0])
    return torch.cat([parts[i] for i in ascending], dim)


@functools.lru_cache(maxsize=1024)
def _all_pieces(size: int, num_ranks: int, blocks: tuple[int, ...], mirrored: bool) -> Pieces:
    return tuple(piece for rank in range(num_ranks) for piece in pieces_of(rank, size, num_ranks, blocks, mirrored))
