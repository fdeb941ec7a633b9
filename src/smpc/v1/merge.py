"""Flat mappings that the ranks of a replica hold in parts, brought together tensor by tensor.

A rank's part maps keys to tensors and plain values; a tensor may be a slice of a whole (`smpc.nn.parallel.Shard`). First the ranks
exchange what they have (specs, and the plain values themselves), then each tensor or slice is broadcast by the lowest rank that has it. No
rank holds more than what it keeps and one of them.

    rank 0 has {"a": tensor}, rank 1 has {"b": tensor}; both keep all: both end with {"a": ..., "b": ...} on the CPU
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from smpc.errors import CheckpointError
from smpc.nn.parallel import Shard
from smpc.tracer.ir import TensorSpec
from smpc.v1.control import Control
from smpc.v1.results import pack, unpack
from smpc.v1.slices import whole_shape

K = TypeVar("K", bound=Hashable)
Described = tuple[int, TensorSpec, Shard | None]  # owner, what it has, and which part of the whole that is


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor that `owner` has: all of an item, or from `start` on along `dim`."""

    owner: int
    spec: TensorSpec
    dim: int = 0
    start: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """What is known of a key before its tensors are sent. Without pieces it is the plain `value`."""

    pieces: tuple[Piece, ...] = ()
    shape: tuple[int, ...] = ()  # of the whole
    dtype: str = ""
    value: Any = None

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor."""
        return bool(self.pieces)

    @staticmethod
    def of(value: Any) -> Item:
        """What this rank has itself, all of it."""
        if not isinstance(value, Tensor):
            return Item(value=value)
        spec = TensorSpec.of(value.detach())
        return Item((Piece(0, spec),), tuple(spec.shape), spec.dtype)


def survey(
    part: Mapping[K, Any],
    control: Control,
    what: str,
    slice_of: Callable[[K, Tensor], Shard | None] = lambda key, value: None,
) -> dict[K, Item]:
    """Every key that any rank has, in order of ranks. `slice_of` says which slice of a whole a tensor of this rank is.

    Raises CheckpointError on all ranks if what they have under one key does not fit together, or one of them cannot say.
    """
    described: dict[K, Any] = {}
    failure = ""
    try:
        for key, value in part.items():
            is_tensor = isinstance(value, Tensor)
            described[key] = (
                (TensorSpec.of(value.detach()), slice_of(key, value), True) if is_tensor else (value, None, False)
            )
    except CheckpointError as error:
        failure = str(error)
    answers = control.gather((failure, described))
    wrong = list(dict.fromkeys(text for text, _ in answers if text))
    tensors: dict[K, list[Described]] = {}
    found: dict[K, Item] = {}
    for rank, (_, items) in enumerate(answers):
        for key, (value, shard, is_tensor) in items.items():
            if is_tensor != (key in tensors) and key in found:
                wrong.append(f"{key}: a tensor on one rank of the replica, {value} on rank {rank}")
            elif is_tensor:
                tensors.setdefault(key, []).append((rank, value, shard))
            found.setdefault(key, Item(value=None if is_tensor else value))
    for key, pieces in tensors.items():
        found[key] = _whole(key, pieces, wrong)
    if wrong:
        raise CheckpointError("\n".join([f"the ranks' parts of {what} do not fit together", *wrong]))
    return found


def stream(part: Mapping[K, Any], items: Mapping[K, Item], control: Control) -> Iterator[tuple[K, Piece | None, Any]]:
    """Every key with its value, or with one after the other of its pieces on the CPU. Collective; take all of them.

    `items` come from `survey`.
    """
    for key, item in items.items():
        if not item.is_tensor:
            yield key, None, item.value
        for piece in item.pieces:
            if piece.owner == control.rank:
                control.broadcast_bytes(pack([part[key]], control.device), control.rank)
                control.settle()  # at once: what waits to be sent stays in memory
                value = part[key].detach().cpu()
            else:
                payload = torch.empty(piece.spec.num_bytes, dtype=torch.uint8, device=control.device)
                control.broadcast_bytes(payload, piece.owner)
                (value,) = unpack(payload, [piece.spec])
                value = value.cpu()
            yield key, piece, value
    for owner in sorted({piece.owner for item in items.values() for piece in item.pieces}):
        control.acknowledge(owner)


def merge(part: Mapping[K, Any], items: Mapping[K, Item], control: Control, keep: Callable[[K], bool]) -> dict[K, Any]:
    """The whole values of all keys that `keep` wants on this rank, tensors on the CPU. Collective."""
    merged: dict[K, Any] = {}
    for key, piece, value in stream(part, items, control):
        if not keep(key):
            continue
        item = items[key]
        if piece is None or tuple(value.shape) == item.shape:
            merged[key] = value
            continue
        if key not in merged:
            merged[key] = torch.empty(item.shape, dtype=value.dtype)
        merged[key].narrow(piece.dim, piece.start, value.shape[piece.dim]).copy_(value)
    return merged


def fill(target: Tensor, shard: Shard | None, piece: Piece, value: Tensor) -> None:
    """Copy what a piece of a whole has for `target`, which is the slice `shard` of it."""
    if shard is None or tuple(value.shape) == whole_shape(shard, target.shape):
        whole = value if shard is None else value.narrow(shard.dim, shard.start, target.shape[shard.dim])
        if shard is None and tuple(value.shape) != tuple(target.shape):
            target = target.narrow(piece.dim, piece.start, value.shape[piece.dim])
        target.copy_(whole)
        return
    low = max(shard.start, piece.start)
    high = min(shard.start + target.shape[shard.dim], piece.start + value.shape[shard.dim])
    if low < high:
        own = target.narrow(shard.dim, low - shard.start, high - low)
        own.copy_(value.narrow(shard.dim, low - piece.start, high - low))


def _whole(key: Any, found: Sequence[Described], wrong: list[str]) -> Item:
    """The item that pieces make up; says what is wrong with them."""
    first, spec, shard = found[0]
    pieces: dict[int, Piece] = {}
    for rank, other, place in found:
        same = other.dtype == spec.dtype and _kind(place, other) == _kind(shard, spec)
        start = 0 if place is None else place.start
        known = pieces.setdefault(start, Piece(rank, other, 0 if place is None else place.dim, start))
        if not same or tuple(known.spec.shape) != tuple(other.shape):
            wrong.append(f"{key}: {spec} on rank {first} of the replica, {other} on rank {rank}")
    ordered = tuple(pieces[start] for start in sorted(pieces))
    if shard is None:
        return Item(ordered, tuple(spec.shape), spec.dtype)
    end = 0
    for piece in ordered:
        if piece.start != end:
            break
        end += piece.spec.shape[shard.dim]
    if end != shard.size:
        wrong.append(f"{key}: the slices of the ranks cover {end} of {shard.size} along dimension {shard.dim}")
    return Item(ordered, whole_shape(shard, spec.shape), spec.dtype)


def _kind(shard: Shard | None, spec: TensorSpec) -> tuple[object, ...]:
    """What must be the same for all pieces of a whole."""
    return tuple(spec.shape) if shard is None else (shard.dim, *whole_shape(shard, spec.shape))
