"""Collectives of CPU tensors between the processes of one host, through memory that they share.

Terms
    slot      room for one tensor. Every rank has two, which it alone writes and all ranks read: one for even-numbered collectives, one for
              odd-numbered ones
    cell      an int64 in a cache line of its own. Every rank has three, which it alone writes: one for each slot, and one that says
              that it is gone
    word      the content of a slot's cell: the number of the collective whose tensor is in the slot, and the kind of tensor

    memory    | cells of rank 0, 1, .. | slot 0 of rank 0 | slot 1 of rank 0 | slot 0 of rank 1 | ..

In its collective number k every rank

    1  copies its tensor into its slot k mod 2
    2  writes the word of k into that slot's cell
    3  waits until the slot k mod 2 of every other rank has the same word in its cell
    4  computes its result from all ranks' slots k mod 2, in the order of the ranks: sums are bitwise the same on all of them

Why no rank reads a half-written tensor: step 2 comes after step 1, step 4 after step 3. Why no rank overwrites a tensor that another
still reads: a rank writes into slot k mod 2 again in collective k + 2. By then it has seen, in step 3 of k + 1, that every rank has
begun k + 1, and so has done step 4 of k. A rank is therefore never more than one collective ahead, and a cell holds the word of k or of
k - 2 while a rank waits for k: any other word means that ranks do not call the same collectives.

A tensor that is larger than a slot goes through in pieces, each by a collective of its own. The kind of a piece includes the size of the
whole tensor.

`smpc.executor.host_memory.shared_peers` says how a rank waits, and which processors this is for. A cell is written in one instruction. A
rank is gone when its group has been destroyed, or one of its collectives did not come to its end.

Example: `slots.sum(tensor)` on all ranks of a group returns the sum of their tensors; `smpc.executor.host_memory.shared_memory.GroupMemory`
has them.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from smpc.errors import TransportError
from smpc.executor.host_memory.shared_peers import CACHE_LINE, PAGE, Peer, Peers

SUMMED: Final = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)  # what gloo sums, but for booleans
_ROUNDED: Final = (torch.bfloat16, torch.float16)  # added up in fp32

_CELLS: Final = 3 * CACHE_LINE  # of a rank: its slots' cells, and the one that says that it has left
_GONE: Final = 2 * CACHE_LINE
_ALL_SLOTS: Final = 1 << 22  # bytes
_SIZE_BITS: Final = 21  # of a word, from the lowest: bytes of the tensor, kind, number
_KIND_BITS: Final = 8
_NUMBER_SHIFT: Final = _SIZE_BITS + _KIND_BITS
_NUMBER_MASK: Final = (
    1 << (63 - _NUMBER_SHIFT)
) - 1  # numbers may start again from 0, as a cell holds the number of k or of k - 2

_MAX_LAYOUTS = 256


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the tensors of one kind of collective are. By slot: this rank's, as it is written, and all ranks', as this one reads them."""

    kind: int  # the low bits of the words
    own: tuple[Tensor, Tensor]
    parts: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


def slot_bytes(size: int) -> int:
    """The most that a piece may have in a group of `size` ranks: 1 MiB for two, and less for more, of whom each reads all slots."""
    return max(_ALL_SLOTS // (2 * size * PAGE), 1) * PAGE


def num_bytes(size: int) -> int:
    """How much memory the slots of `size` ranks take, once they have been used."""
    return _header_bytes(size) + 2 * size * slot_bytes(size)


class SharedSlots:
    """One rank's end of the shared memory of a group. All ranks call the same methods in the same order, with tensors of equal sizes.

    `peers`: the others by rank in the group, and None at this rank's place. `timeout` is in seconds, of a collective or a piece of one.
    Tensors are on the CPU. TransportError if a rank is gone, too late, or calls something else; there is no way on after that.
    """

    def __init__(self, memory: mmap.mmap, rank: int, peers: Sequence[Peer | None], timeout: float) -> None:
        self._rank, self._size = rank, len(peers)
        assert len(memory) == num_bytes(self._size), f"{len(memory)} bytes for {self._size} ranks"
        self._slot_bytes = slot_bytes(self._size)
        self._number = 0
        self._cells = memoryview(memory).cast("q")
        gone = [other * _CELLS + _GONE for other in range(self._size)]
        self._peers = Peers(self._cells, gone, rank, peers, timeout)
        self._others = tuple((other, other * _CELLS) for other in range(self._size) if other != rank)
        self._layouts: dict[tuple[object, ...], _Layout] = {}
        with torch.inference_mode(False):
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    def holds(self, num_bytes: int) -> bool:
        """Whether a tensor of so many bytes is one piece."""
        return num_bytes <= self._slot_bytes

    def sum(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """The sum of all ranks' tensors, contiguous, or in `out`. Half precision is summed in fp32 and rounded once."""
        if self.holds(tensor.nbytes):
            return _sum_of_slots(self._exchange(tensor, "sum"), out)
        flat, kind = tensor.detach().reshape(-1), f"sum of {tensor.nbytes}"
        total = torch.empty_like(flat) if out is None else out.detach().view(-1)
        for piece in self._pieces(flat, 1):
            _sum_of_slots(self._exchange(flat[piece], kind), total[piece])
        return total.view(tensor.shape) if out is None else out

    def gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """All ranks' tensors, joined along `dim`, contiguous."""
        if self.holds(tensor.nbytes):
            return torch.cat(self._exchange(tensor, "gather"), dim)
        flat, kind = tensor.detach().reshape(-1), f"{tensor.nbytes} gather"
        whole = flat.new_empty((self._size, flat.numel()))
        for piece in self._pieces(flat, 1):
            for own, part in zip(whole, self._exchange(flat[piece], kind), strict=True):
                own[piece].copy_(part)
        parts = whole.view(self._size, *tensor.shape)
        return torch.cat(parts.unbind(), dim) if dim % tensor.dim() else parts.flatten(0, 1)

    def scattered_sum(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """This rank's share, along `dim`, of the sum of all ranks' tensors, contiguous."""
        first = slices_of(tensor, dim, self._size)
        if self.holds(tensor.nbytes):
            return _sum_of_slots(self._exchange(first, "scattered sum", shared_out=True), None)[0]
        shares, kind = first.detach().reshape(self._size, -1), f"scattered sum of {tensor.nbytes}"
        total = shares.new_empty((1, shares.shape[1]))
        for piece in self._pieces(total[0], self._size):
            _sum_of_slots(self._exchange(shares[:, piece], kind, shared_out=True), total[:, piece])
        return total.view(first.shape[1:])

    def all_to_all(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's share, along the first dimension, of every rank's tensor, joined along `dim`."""
        if self.holds(tensor.nbytes):
            return torch.cat(self._exchange(tensor, "all to all", shared_out=True), dim)
        shares, kind = tensor.detach().reshape(self._size, -1), f"{tensor.nbytes} all to all"
        whole = torch.empty_like(shares)
        for piece in self._pieces(whole[0], self._size):
            for own, part in zip(whole, self._exchange(shares[:, piece], kind, shared_out=True), strict=True):
                own[piece].copy_(part[0])
        return torch.cat(whole.view(self._size, tensor.shape[0] // self._size, *tensor.shape[1:]).unbind(), dim)

    def _pieces(self, flat: Tensor, times: int) -> Iterator[slice]:
        """Parts of a flat tensor that fit into a slot so many times."""
        length = self._slot_bytes // (times * flat.itemsize)
        return (slice(start, start + length) for start in range(0, flat.numel(), length))

    def close(self) -> None:
        """Tell the others that this rank is gone. For any thread, any number of times; in a forked child it does nothing."""
        self._peers.close()
        self._layouts.clear()

    def _exchange(self, tensor: Tensor, name: str, shared_out: bool = False) -> tuple[Tensor, ...]:
        """Steps 1 to 3 of a collective: all ranks' tensors, or this rank's shares of them, to be read before the next but one."""
        self._peers.check_open()
        key = (name, tensor.dtype, tensor.shape)
        try:
            layout = self._layouts.get(key) or self._lay_out(key, name, tensor, shared_out)
            number = self._number = self._number + 1
            slot = number & 1
            layout.own[slot].copy_(tensor.detach())
            word = (number & _NUMBER_MASK) << _NUMBER_SHIFT | layout.kind
            cells, offset = self._cells, slot << 3
            cells[self._rank * _CELLS + offset] = word
            for other, first in self._others:
                if cells[first + offset] != word:
                    self._await(other, first + offset, word)
        except BaseException:  # a signal's handler may raise, too: then this collective has no end here
            self.close()
            raise
        return layout.parts[slot]

    def _await(self, other: int, cell: int, word: int) -> None:
        """Step 3, for one of the other ranks."""
        number = word >> _NUMBER_SHIFT
        found = self._peers.wait(
            other, cell, lambda found: found >> _NUMBER_SHIFT == number, "in a collective of the host"
        )
        if found != word:
            rank = self._peers.rank_in_job(other)
            raise TransportError(
                f"expected rank {rank} to call what this rank calls, a collective of {_bytes_of(word)} bytes, found one of "
                f"{_bytes_of(found)} bytes, or of another kind or dtype; give all ranks of the group inputs of the same shape"
            )

    def _lay_out(self, key: tuple[object, ...], name: str, tensor: Tensor, shared_out: bool) -> _Layout:
        dtype, shape, num = tensor.dtype, tensor.shape, tensor.nbytes
        assert tensor.is_cpu, f"a tensor on {tensor.device}"
        assert name.endswith(("gather", "all")) or dtype in SUMMED, f"no sums of {dtype}"
        if len(self._layouts) >= _MAX_LAYOUTS:
            self._layouts.clear()

        def view(rank: int, slot: int) -> Tensor:
            start = _header_bytes(self._size) + (2 * rank + slot) * self._slot_bytes
            return self._bytes[start : start + num].view(dtype).view(shape)

        def part(rank: int, slot: int) -> Tensor:
            whole = view(rank, slot)
            return whole.chunk(self._size)[self._rank] if shared_out else whole

        with torch.inference_mode(False):  # or they could not be written outside of it later
            own = (view(self._rank, 0), view(self._rank, 1))
            first, second = (tuple(part(rank, slot) for rank in range(self._size)) for slot in (0, 1))
        kind = zlib.crc32(f"{name} {dtype}".encode()) % (1 << _KIND_BITS) << _SIZE_BITS | num
        found = self._layouts[key] = _Layout(kind, own, (first, second))
        return found


def slices_of(tensor: Tensor, dim: int, size: int) -> Tensor:
    """The equal slices along `dim`, for each of `size` ranks, as a view [ranks, *shape of a slice]."""
    slices: Tensor = tensor.unflatten(dim, (size, tensor.shape[dim] // size))  # type: ignore[no-untyped-call]
    return slices.movedim(dim % tensor.dim(), 0)


def _sum_of_slots(parts: tuple[Tensor, ...], out: Tensor | None) -> Tensor:
    """The sum in the order of the ranks."""
    target = None if out is None else out.detach()
    if len(parts) == 2:
        return torch.add(*parts, out=target)
    dtype = parts[0].dtype
    total = parts[0].to(torch.float32 if dtype in _ROUNDED else dtype, copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total.to(dtype) if target is None else target.copy_(total)


def _header_bytes(size: int) -> int:
    return -(-size * _CELLS * 8 // PAGE) * PAGE


def _bytes_of(word: int) -> int:
    return word & ((1 << _SIZE_BITS) - 1)
