"""Tables by which one launch works on many tensors: the address of each, and which part of which tensor a program takes.

Terms
    row      one entry of the lists: a parameter, its gradient, its moments; one address a column, 0 where there is none, and the size
    chunk    CHUNK elements of one row, or what is left of it: the work of one program
    starts   row r has the chunks starts[r] up to starts[r + 1]

    sizes 40000, 0, 100         chunks (row, number)   (0, 0) (0, 1) (0, 2) (2, 0)         starts   0 3 3 4

Kernels walk over the addresses, so the tensors of a row must have the same memory layout, without gaps (`same_layout`), and
stay alive during the launch. `TableCache` keeps tables while the addresses stay the same, which they do from step to step
where gradients are zeroed, and mostly do where torch's allocator gives freed gradients' memory out again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 16384
COLUMNS = 7  # six addresses and the size
_KEPT = 64


@dataclass(frozen=True, slots=True)
class TensorTable:
    """The tables of one launch, on the device of the tensors."""

    rows: Tensor  # [rows, COLUMNS] int64
    chunks: Tensor  # [chunks, 2] int32
    starts: Tensor  # [rows + 1] int32
    num_rows: int
    num_chunks: int
    aligned: bool  # every address is a multiple of 16 bytes


class TableCache:
    """The tables of the last launches, by the addresses and sizes in them."""

    def __init__(self) -> None:
        self._tables: OrderedDict[tuple[object, ...], TensorTable] = OrderedDict()

    def table(self, columns: Sequence[Sequence[Tensor]]) -> TensorTable:
        """The table of `columns`: lists of equal length, or empty ones; the first gives device and sizes and is not empty."""
        first = columns[0]
        device = first[0].device
        sizes = tuple(tensor.numel() for tensor in first)
        addresses = tuple(tuple(tensor.data_ptr() for tensor in column) for column in columns)
        key = (device, sizes, addresses)
        found = self._tables.get(key)
        if found is None:
            found = self._tables[key] = _build(device, sizes, addresses)
            if len(self._tables) > _KEPT:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return found


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether the elements of two tensors of one shape are in the same order in memory; one of the two has no gaps."""
    return a.stride() == b.stride() or (a.is_contiguous() and b.is_contiguous())


def _build(device: torch.device, sizes: tuple[int, ...], addresses: tuple[tuple[int, ...], ...]) -> TensorTable:
    rows = torch.zeros(len(sizes), COLUMNS, dtype=torch.int64)
    for column, values in enumerate(addresses):
        if values:
            rows[:, column] = torch.tensor(values, dtype=torch.int64)
    rows[:, -1] = torch.tensor(sizes, dtype=torch.int64)
    counts = (rows[:, -1] + CHUNK - 1) // CHUNK
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    owners = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    numbers = torch.arange(owners.numel()) - starts[owners]
    return TensorTable(
        rows=_upload(rows, device),
        chunks=_upload(torch.stack((owners, numbers), 1).to(torch.int32), device),
        starts=_upload(starts.to(torch.int32), device),
        num_rows=len(sizes),
        num_chunks=owners.numel(),
        aligned=all(address % 16 == 0 for column in addresses for address in column),
    )


def _upload(tensor: Tensor, device: torch.device) -> Tensor:
    # From pinned memory, so that the host does not wait for the device.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
