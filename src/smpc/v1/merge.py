"""Flat mappings that the ranks of a replica hold in parts, merged tensor by tensor.

A rank's part maps keys to tensors and plain values. First the ranks exchange what they have (specs, and the plain values themselves), then
each tensor is broadcast by the lowest rank that has it and kept where it is wanted. No rank holds more than what it keeps and one tensor.

    rank 0 has {"a": tensor}, rank 1 has {"b": tensor}; both keep all: both end with {"a": ..., "b": ...} on the CPU
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from smpc.errors import CheckpointError
from smpc.tracer.ir import TensorSpec
from smpc.v1.control import Control
from smpc.v1.results import pack, unpack

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Item:
    """What is known of a key before its tensor is sent. `value` is a TensorSpec or, of a plain value, the value."""

    owner: int
    value: Any
    is_tensor: bool


def survey(part: Mapping[K, Any], control: Control, what: str) -> dict[K, Item]:
    """Every key that any rank has, in order of ranks.

    Raises CheckpointError on all ranks if two of them have tensors of different shapes or dtypes under one key.
    """
    described = {
        key: (_spec(value), True) if isinstance(value, Tensor) else (value, False) for key, value in part.items()
    }
    found: dict[K, Item] = {}
    wrong: list[str] = []
    for rank, items in enumerate(control.gather(described)):
        for key, (value, is_tensor) in items.items():
            known = found.setdefault(key, Item(rank, value, is_tensor))
            if is_tensor != known.is_tensor or (is_tensor and str(value) != str(known.value)):
                wrong.append(f"{key}: {known.value} on rank {known.owner} of the replica, {value} on rank {rank}")
    if wrong:
        raise CheckpointError("\n".join([f"the ranks' parts of {what} contradict each other", *wrong]))
    return found


def merge(part: Mapping[K, Any], items: Mapping[K, Item], control: Control, keep: Callable[[K], bool]) -> dict[K, Any]:
    """The values of all keys that `keep` wants on this rank, tensors on the CPU. Collective; `items` come from `survey`."""
    merged: dict[K, Any] = {}
    for key, item in items.items():
        if not item.is_tensor:
            value = item.value
        elif item.owner == control.rank:
            control.broadcast_bytes(pack([part[key]], control.device), control.rank)
            control.settle()  # at once: what waits to be sent stays in memory
            value = part[key].detach().cpu()
        else:
            payload = torch.empty(item.value.num_bytes, dtype=torch.uint8, device=control.device)
            control.broadcast_bytes(payload, item.owner)
            (value,) = unpack(payload, [item.value])
            value = value.cpu()
        if keep(key):
            merged[key] = value
    for owner in sorted({item.owner for item in items.values() if item.is_tensor}):
        control.acknowledge(owner)
    return merged


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec.of(tensor.detach())
