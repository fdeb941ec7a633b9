"""Merges flat mappings that the ranks of a replica hold in parts, tensor by tensor.

A rank's part maps keys to tensors and plain values; a tensor may be a slice of a whole (`smpc.nn.parallel.ParameterSlice`). First
the ranks exchange what they have (specs, and the plain values themselves), then each tensor or slice is broadcast by the lowest rank that
has it. No rank holds more than its result and one of these tensors.

    rank 0 has {"a": tensor}, rank 1 has {"b": tensor}; both keep all: both end with {"a": ..., "b": ...} on the CPU
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from smpc.errors import CheckpointError
from smpc.nn.parallel import ParameterSlice
from smpc.tracer.ir import TensorSpec
from smpc.v1.layout.placement import whole_shape
from smpc.v1.session.step_messages import Control
from smpc.v1.steps.results import pack, unpack

K = TypeVar("K", bound=Hashable)
Described = tuple[int, TensorSpec, ParameterSlice | None]  # owner, its tensor, and the part of the whole that it is


@dataclass(frozen=True, slots=True)
class MergedPiece:
    """A tensor of `owner`: a whole item, or its part from `start` on along `dim`. It begins at `own` in the owner's tensor."""

    owner: int
    spec: TensorSpec
    dim: int = 0
    start: int = 0
    own: int = 0

    def of(self, tensor: Tensor) -> Tensor:
        """The piece, cut from its owner's tensor."""
        size = self.spec.shape[self.dim] if self.spec.shape else 0
        if not self.spec.shape or tensor.shape[self.dim] == size:
            return tensor.detach()
        return tensor.detach().narrow(self.dim, self.own, size).contiguous()


@dataclass(frozen=True, slots=True)
class MergedItem:
    """The description of a key before its tensors are sent. Without pieces it is the plain `value`."""

    pieces: tuple[MergedPiece, ...] = ()
    shape: tuple[int, ...] = ()  # of the whole
    dtype: str = ""
    value: Any = None

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor."""
        return bool(self.pieces)

    @staticmethod
    def of(value: Any) -> MergedItem:
        """The item of a value that this rank has whole."""
        if not isinstance(value, Tensor):
            return MergedItem(value=value)
        spec = TensorSpec.of(value.detach())
        return MergedItem((MergedPiece(0, spec),), tuple(spec.shape), spec.dtype)


def survey(
    part: Mapping[K, Any],
    control: Control,
    what: str,
    slice_of: Callable[[K, Tensor], ParameterSlice | None] = lambda key, value: None,
) -> dict[K, MergedItem]:
    """Every key that any rank has, in order of ranks. `slice_of` says which slice of a whole a tensor of this rank is.

    Raises CheckpointError on all ranks if their values for a key do not fit together, or if a rank cannot describe its value.
    """
    described: dict[K, Any] = {}
    failure = ""
    try:
        for key, value in part.items():
            is_tensor = isinstance(value, Tensor) and value.layout is torch.strided  # a sparse one is sent as it is
            described[key] = (
                (TensorSpec.of(value.detach()), slice_of(key, value), True) if is_tensor else (value, None, False)
            )
    except CheckpointError as error:
        failure = str(error)
    answers = control.gather((failure, described))
    wrong = list(dict.fromkeys(text for text, _ in answers if text))
    tensors: dict[K, list[Described]] = {}
    found: dict[K, MergedItem] = {}
    for rank, (_, items) in enumerate(answers):
        for key, (value, shard, is_tensor) in items.items():
            if is_tensor != (key in tensors) and key in found:
                wrong.append(f"{key}: a tensor on one rank of the replica, {value} on rank {rank}")
            elif is_tensor:
                tensors.setdefault(key, []).append((rank, value, shard))
            found.setdefault(key, MergedItem(value=None if is_tensor else value))
    for key, pieces in tensors.items():
        found[key] = _whole_item(key, pieces, wrong)
    if wrong:
        raise CheckpointError("\n".join([f"the ranks' parts of {what} do not fit together", *wrong]))
    return found


def stream(
    part: Mapping[K, Any], items: Mapping[K, MergedItem], control: Control
) -> Iterator[tuple[K, MergedPiece | None, Any]]:
    """Every key with its value, or with its pieces, one after the other, on the CPU. Collective: take all of them, and release each
    before the next.

    `items` come from `survey`.
    """
    for key, item in items.items():
        if not item.is_tensor:
            yield key, None, item.value
        for piece in item.pieces:
            # A helper, so that nothing here holds a piece while the next one comes.
            yield key, piece, _exchanged_piece(part.get(key), piece, control)
    for owner in sorted({piece.owner for item in items.values() for piece in item.pieces}):
        control.acknowledge(owner)


def _exchanged_piece(own: Any, piece: MergedPiece, control: Control) -> Tensor:
    """A piece, on the CPU of all ranks."""
    if piece.owner == control.rank:
        sent = piece.of(own)
        control.broadcast_bytes(pack([sent], control.device), control.rank)
        control.settle()  # at once: what waits to be sent stays in memory
        return sent.cpu()
    payload = torch.empty(piece.spec.num_bytes, dtype=torch.uint8, device=control.device)
    control.broadcast_bytes(payload, piece.owner)
    (value,) = unpack(payload, [piece.spec])
    return value.cpu()


def merge(
    part: Mapping[K, Any], items: Mapping[K, MergedItem], control: Control, keep: Callable[[K], bool]
) -> dict[K, Any]:
    """The whole values of all keys that `keep` wants on this rank, tensors on the CPU. Collective."""
    merged: dict[K, Any] = {}
    for key, piece, value in stream(part, items, control):
        if keep(key):
            _keep_piece(merged, key, items[key], piece, value)
        del value  # before the next one comes
    return merged


def _keep_piece(merged: dict[K, Any], key: K, item: MergedItem, piece: MergedPiece | None, value: Any) -> None:
    """Copy a value, or a piece of it, to its place."""
    if piece is None or tuple(value.shape) == item.shape:
        merged[key] = value
        return
    if key not in merged:
        merged[key] = torch.empty(item.shape, dtype=value.dtype)
    merged[key].narrow(piece.dim, piece.start, value.shape[piece.dim]).copy_(value)


def fill(target: Tensor, shard: ParameterSlice | None, piece: MergedPiece, value: Tensor) -> None:
    """Copy the part of a piece that overlaps with `target`, the slice `shard` of the same whole."""
    if shard is None:
        if tuple(value.shape) != tuple(target.shape):
            target = target.narrow(piece.dim, piece.start, value.shape[piece.dim])
        target.copy_(value)
        return
    for own, start, length in shard.runs_of(target.shape[shard.dim]):
        low, high = max(start, piece.start), min(start + length, piece.start + value.shape[shard.dim])
        if low < high:
            part = value.narrow(shard.dim, low - piece.start, high - low)
            target.narrow(shard.dim, own + low - start, high - low).copy_(part)


def _whole_item(key: Any, found: Sequence[Described], wrong: list[str]) -> MergedItem:
    """The item that pieces make up, or what is wrong with them."""
    having = [each for each in found if _has_all(*each[1:])]
    if having and all(
        each in having or not each[1].num_elements for each in found
    ):  # some have all of it, others nothing
        found = having
    first, spec, shard = found[0]
    pieces: dict[int, MergedPiece] = {}
    for rank, other, place in found:
        same = other.dtype == spec.dtype and _kind(place, other) == _kind(shard, spec)
        mine = [MergedPiece(rank, other)] if place is None else _pieces_of_slice(rank, other, place)
        known = [pieces.setdefault(piece.start, piece) for piece in mine]
        alike = all(a.spec.shape == b.spec.shape for a, b in zip(known, mine, strict=True))
        if not same or not alike:
            wrong.append(f"{key}: {spec} on rank {first} of the replica, {other} on rank {rank}")
    ordered = tuple(pieces[start] for start in sorted(pieces))
    if shard is None:
        return MergedItem(ordered, tuple(spec.shape), spec.dtype)
    end = 0
    for piece in ordered:
        if piece.start != end:
            break
        end += piece.spec.shape[shard.dim]
    if end != shard.size:
        wrong.append(f"{key}: the slices of the ranks cover {end} of {shard.size} along dimension {shard.dim}")
    return MergedItem(ordered, whole_shape(shard, spec.shape), spec.dtype)


def _has_all(spec: TensorSpec, shard: ParameterSlice | None) -> bool:
    """Whether a rank's slice is the whole."""
    return shard is None or spec.shape[shard.dim] == shard.size


def _pieces_of_slice(rank: int, spec: TensorSpec, shard: ParameterSlice) -> list[MergedPiece]:
    """The pieces that a slice is."""
    if not shard.runs:
        return [MergedPiece(rank, spec, shard.dim, shard.start)]
    dtype, found = getattr(torch, spec.dtype.removeprefix("torch.")), []
    for own, start, length in shard.runs_of(spec.shape[shard.dim]):
        shape = (*spec.shape[: shard.dim], length, *spec.shape[shard.dim + 1 :])
        part = TensorSpec.of(torch.empty(shape, dtype=dtype, device="meta"))
        found.append(MergedPiece(rank, part, shard.dim, start, own))
    return found


def _kind(shard: ParameterSlice | None, spec: TensorSpec) -> tuple[object, ...]:
    """The values that must be equal for all pieces of a whole."""
    return tuple(spec.shape) if shard is None or _has_all(spec, shard) else (shard.dim, *whole_shape(shard, spec.shape))
