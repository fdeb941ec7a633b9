"""What scripts use beside slices where they write into slices: numbers and ordinary tensors, as numbers that ranks compare.

    p.mul_(float(p.norm()))              0.5 is a number as any other here, but another one on each rank
    p.add_(torch.randn(p.shape))         one process draws other values for other rows; ranks that are seeded alike draw the same
    p.mul_(mask); p.copy_(rows)          along the rows, a mask that is the same for all of them, or other values on each rank

    weight of 4 rows, [4, 2]     operand [2], [1, 2], []          alike on all ranks
                                 operand [4, 2], all rows equal   alike
                                 operand [4, 2], other rows       apart: equal ones on two ranks are no rows of one tensor

Values keep what was used to compute them, until they are written (`OfSlice.used`). Tensors become numbers on their device, and are read
when ranks compare (`compared`, beside).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

_MOST = 32  # tensors of which a value knows; of a longer history the last ones
_STEP = 6364136223846793005  # of a linear congruential generator (Knuth): an odd number, other places weigh differently
_PIECE = 2**22  # elements at once, for memory
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes of an element


@dataclass(frozen=True, slots=True)
class Used:
    """`numbers`: of those that must be alike. `tensors`: of each, whether all its rows are equal, a number of its first, and one of all."""

    numbers: int = 0
    tensors: tuple[Tensor, ...] = ()

    def and_also(self, other: Used) -> Used:
        """Both."""
        if other == NOTHING:
            return self
        return Used(zlib.crc32(repr((self.numbers, other.numbers)).encode()), (*self.tensors, *other.tensors)[-_MOST:])


NOTHING = Used()


@dataclass(frozen=True, slots=True)
class Rows:
    """Of what is written or computed: its shape, and along which dimensions it has a slice's rows. None: rows are not told apart.

    `is_by_element`: operands are expanded to its shape.
    """

    shape: torch.Size
    dims: tuple[int, ...]
    is_by_element: bool


def used_in(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], others: Sequence[Tensor], rows: Rows) -> Used:
    """What a function uses of numbers, and of ordinary tensors, which are `others`."""
    leaves = tree_leaves((tuple(args), dict(kwargs)))
    numbers = list(_numbers(leaves, rows))
    tensors = [found for each in others if (found := _compared(each, rows)) is not None]
    return Used(zlib.crc32(repr((name, numbers)).encode()) if numbers else 0, tuple(tensors))


def _numbers(leaves: Sequence[Any], rows: Rows) -> Iterator[str]:
    """Sizes are left out, as slices may be uneven."""
    sizes = {rows.shape[dim] for dim in rows.dims}
    for leaf in leaves:
        if isinstance(leaf, int) and not rows.is_by_element:
            if rows.dims and leaf not in sizes:
                yield repr(int(leaf))
        elif isinstance(leaf, (Number, str)):
            yield repr(leaf)
        elif isinstance(leaf, slice) and rows.dims:
            yield repr([each for each in (leaf.start, leaf.stop, leaf.step) if isinstance(each, int)])


def _compared(tensor: Tensor, rows: Rows) -> Tensor | None:
    own = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()
    if own.layout is not torch.strided or own.is_meta or not own.numel():
        return None
    if not rows.is_by_element:
        has_rows = bool({*own.shape} & {rows.shape[dim] for dim in rows.dims})
        return _alike(own) if rows.dims and not has_rows else None
    if any(rows.shape[dim] == 1 for dim in rows.dims):
        return _alike(own) if own.numel() == 1 else None
    first, are_equal = own, torch.ones((), dtype=torch.bool, device=own.device)
    missing = len(rows.shape) - own.dim()
    for dim in rows.dims:
        if dim >= missing and own.shape[dim - missing] > 1:
            are_equal = are_equal & (own == own.narrow(dim - missing, 0, 1)).all()
            first = first.narrow(dim - missing, 0, 1)
    if not rows.dims:
        first = own.reshape(-1)[:1]
        are_equal = (own == first).all()
    return torch.stack([are_equal.to(torch.int64), fingerprint(first), fingerprint(own)])


def _alike(tensor: Tensor) -> Tensor:
    found = fingerprint(tensor)
    return torch.stack([torch.ones_like(found), found, found])


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """A number that tells other elements, and other orders of them, apart; int64, on the tensor's device."""
    flat = tensor.contiguous().reshape(-1)
    flat = flat.view(_INTEGERS.get(flat.element_size(), torch.int64))
    found = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, piece in enumerate(torch.split(flat, _PIECE)):
        places = torch.arange(1, len(piece) + 1, device=piece.device).add_(number * _PIECE)
        found += places.mul_(_STEP).mul_(piece).sum()
    return found
