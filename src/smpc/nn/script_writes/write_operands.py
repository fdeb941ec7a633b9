"""What scripts use beside slices where they write into slices: numbers and ordinary tensors, as numbers that ranks compare.

    p.mul_(float(p.norm()))              0.5 is a number as any other here, but another one on each rank
    p.add_(torch.randn(p.shape))         one process draws other values for other rows; ranks that are seeded alike draw the same
    p.mul_(mask); p.copy_(rows)          along the rows, a mask that is the same for all of them, or other values on each rank

    weight of 4 rows, [4, 2]     operand [2], [1, 2], []          alike on all ranks
                                 operand [4, 2], all rows equal   alike
                                 operand [4, 2], other rows       apart: equal ones on two ranks are no rows of one tensor
    bias that all have whole     any operand                      alike

Values keep what was used to compute them, until they are written (`OfSlice.used`). Tensors become numbers on their device, and are read
when ranks compare (`compare_writes`, beside).
"""

from __future__ import annotations

import sys
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
    """`kinds`: a number of what must be the same on all ranks. `numbers`: those that must be near each other. `tensors`: what
    `described` and `alike` say of each."""

    kinds: int = 0
    numbers: tuple[float, ...] = ()
    tensors: tuple[Tensor, ...] = ()

    def and_also(self, other: Used) -> Used:
        """Both."""
        if other == NOTHING:
            return self
        kinds = zlib.crc32(repr((self.kinds, other.kinds)).encode())
        return Used(kinds, (*self.numbers, *other.numbers)[-_MOST:], (*self.tensors, *other.tensors)[-_MOST:])


NOTHING = Used()
ANY = -sys.float_info.max  # among numbers: one that others need not be near


@dataclass(frozen=True, slots=True)
class Rows:
    """The shape of what is written or computed, and along which dimensions it has a slice's rows. None: rows are not told apart.

    `is_by_element`: operands are expanded to its shape.
    """

    shape: torch.Size
    dims: tuple[int, ...]
    is_by_element: bool


def used_in(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], others: Sequence[Tensor], rows: Rows) -> Used:
    """What a function uses of numbers, and of ordinary tensors, which are `others`."""
    leaves = tree_leaves((tuple(args), dict(kwargs)))
    kinds = list(_kinds(leaves, rows))
    tensors = [found for each in others if (found := described(each, rows)) is not None]
    return _used(name, kinds, leaves, tensors)


def used_by_all(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> Used:
    """The same for a tensor that all ranks have whole."""
    leaves = tree_leaves((tuple(args), dict(kwargs)))
    kinds = [repr(each) for each in leaves if isinstance(each, (Number, str, slice)) and not isinstance(each, float)]
    return _used(name, kinds, leaves, [alike(each) for each in tensors if _has_values(each)])


def _used(name: str, kinds: Sequence[str], leaves: Sequence[Any], tensors: Sequence[Tensor]) -> Used:
    numbers = tuple(float(each) for each in leaves if isinstance(each, float))
    return Used(zlib.crc32(repr((name, kinds)).encode()) if kinds else 0, numbers, tuple(tensors))


def _kinds(leaves: Sequence[Any], rows: Rows) -> Iterator[str]:
    """Sizes are left out, as slices may be uneven."""
    sizes = {rows.shape[dim] for dim in rows.dims}
    for leaf in leaves:
        if isinstance(leaf, int) and not rows.is_by_element:
            if rows.dims and leaf not in sizes:
                yield repr(int(leaf))
        elif isinstance(leaf, slice) and rows.dims:
            yield repr([each for each in (leaf.start, leaf.stop, leaf.step) if isinstance(each, int)])
        elif isinstance(leaf, (Number, str)) and not isinstance(leaf, float):
            yield repr(leaf)


def _has_values(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def described(tensor: Tensor, rows: Rows) -> Tensor | None:
    """Whether all rows of a tensor are equal, numbers of its first one and of all, what `_sum` says, and how many elements that sums up;
    int64, on its device."""
    own = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()
    if not _has_values(own):
        return None
    if not rows.is_by_element:
        has_rows = bool({*own.shape} & {rows.shape[dim] for dim in rows.dims})
        return alike(own) if rows.dims and not has_rows else None
    if any(rows.shape[dim] == 1 for dim in rows.dims):
        return alike(own) if own.numel() == 1 else None
    first, are_equal = own, torch.ones((), dtype=torch.bool, device=own.device)
    missing = len(rows.shape) - own.dim()
    for dim in rows.dims:
        if dim >= missing and own.shape[dim - missing] > 1:
            are_equal = are_equal & (own == own.narrow(dim - missing, 0, 1)).all()
            first = first.narrow(dim - missing, 0, 1)
    if not rows.dims:
        first = own.reshape(-1)[:1]
        are_equal = (own == first).all()
    return torch.stack([are_equal.to(torch.int64), fingerprint(first), fingerprint(own), *_sum(first)])


def alike(tensor: Tensor) -> Tensor:
    """The same of a tensor that has no rows of the slice."""
    own = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()
    found = fingerprint(own)
    return torch.stack([torch.ones_like(found), found, found, *_sum(own)])


def _sum(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of a sum, of absolute values unless they are integers, and the number of elements. Near tensors have near sums."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        found = tensor.sum(dtype=torch.float64)
    else:
        dtype = torch.complex128 if tensor.is_complex() else torch.float64
        found = torch.linalg.vector_norm(tensor, 1, dtype=dtype)
    bits = found.view(torch.int64)
    return bits, torch.full_like(bits, tensor.numel())


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
