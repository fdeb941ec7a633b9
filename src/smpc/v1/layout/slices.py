"""Which slices of the whole model's tensors a tensor-parallel rank holds.

    slices = Slices(module)                           names are canonical: those of named_parameters()
    slices.get("head.weight")                         Shard(dim=0, size=50257, start=25129), or None where the rank holds all of it
    slices.whole_shape("head.weight", (25128, 768))   (50257, 768)

A tensor that belongs to a parameter, such as an optimizer moment, is sliced like the parameter if it has the parameter's shape. A tensor of
one element is the same on all ranks. Other tensors (factored moments) have no known place in the whole, and are refused.

`digest_of` is what ranks compare that must have the same tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from smpc import checkpoint
from smpc.errors import CheckpointError
from smpc.nn.parallel import Shard, distributed_modules


class Slices:
    """The slices of a module's parameters, where ranks hold different ones."""

    def __init__(self, module: nn.Module) -> None:
        found: dict[int, Shard] = {}
        for _, owner in distributed_modules(module):
            for name, parameter in owner.named_parameters(recurse=False):
                if name in owner.shards and owner.parallel.group.size > 1:
                    found[id(parameter)] = owner.shards[name]
        self._shards = {name: found[id(p)] for name, p in module.named_parameters() if id(p) in found}

    def add(self, name: str, shard: Shard) -> None:
        """Registers that a parameter has become a slice."""
        self._shards[name] = shard

    def get(self, name: str) -> Shard | None:
        """The slice of a parameter; None if a rank has all of it."""
        return self._shards.get(name)

    def whole_shape(self, name: str, own: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor, of which this rank has a slice of shape `own`."""
        shard = self._shards.get(name)
        return tuple(own) if shard is None else whole_shape(shard, own)

    def own_part(self, name: str, whole: Tensor, own: Sequence[int]) -> Tensor:
        """This rank's part, of shape `own`, of a whole value."""
        shard = self._shards.get(name)
        if shard is None:
            return whole
        return self.joined(name, [whole.narrow(shard.dim, at, n) for _, at, n in shard.runs_of(own[shard.dim])])

    def joined(self, name: str, runs: Sequence[Tensor]) -> Tensor:
        """The slice that consists of exactly these runs; if there is one run, the run itself."""
        shard = self._shards.get(name)
        return runs[0] if shard is None or len(runs) == 1 else torch.cat(tuple(runs), shard.dim)

    def of_state(self, name: str, key: str, value: Tensor, own: Sequence[int]) -> Shard | None:
        """The slice of `value`, the state `key` of a parameter of shape `own`. Raises CheckpointError if it cannot be known."""
        shard = self._shards.get(name)
        if shard is None or tuple(value.shape) == tuple(own):
            return shard
        if value.numel() == 1:
            return None
        raise CheckpointError(
            f"optimizer state {key} of {name}, a parameter that tensor-parallel ranks share, has the shape {list(value.shape)} and the "
            f"parameter {list(own)}: its place in the whole is not known; use an optimizer whose state has the parameters' shapes"
        )


def whole_shape(shard: Shard, own: Sequence[int]) -> tuple[int, ...]:
    """The shape of the whole tensor of a slice of shape `own`."""
    return tuple(shard.size if dim == shard.dim else size for dim, size in enumerate(own))


def place(kind: str, name: str, tensor: Tensor, shard: Shard | None) -> list[checkpoint.Shard]:
    """A tensor of this rank, the slice `shard` of a whole tensor, in a checkpoint's form: a part for every run.

    For a DTensor: this rank's part of the slice, divided by runs. CheckpointError for a DTensor of other ranks.
    """
    own = checkpoint.shard_of(kind, name, tensor)
    if own is None:
        raise CheckpointError(f"{kind} {name}: a DTensor of other ranks than this one")
    if shard is None:
        return [own]
    whole, offsets = whole_shape(shard, own.global_shape), own.offsets
    if not shard.runs:
        moved = tuple(o + shard.start if dim == shard.dim else o for dim, o in enumerate(offsets))
        return [checkpoint.Shard.of(kind, name, own.tensor, whole, moved)]
    found: list[checkpoint.Shard] = []
    first = offsets[shard.dim]
    end = first + own.tensor.shape[shard.dim]
    for start, at, length in shard.runs_of(own.global_shape[shard.dim]):
        low, high = max(start, first), min(start + length, end)
        if low < high or (not found and start + length >= end):  # an empty part has a place, too
            moved = tuple(at + low - start if dim == shard.dim else o for dim, o in enumerate(offsets))
            part = own.tensor.narrow(shard.dim, min(low - first, end - first), max(0, high - low))
            found.append(checkpoint.Shard.of(kind, name, part, whole, moved))
    return found


def digest_of(tensor: Tensor) -> str:
    """Equal for tensors of equal type, shape and bytes."""
    data = tensor.detach().cpu().contiguous()
    content = data.view(torch.uint8).numpy().tobytes() if data.dim() else repr(data.item()).encode()
    return hashlib.sha256(f"{data.dtype}{tuple(data.shape)}".encode() + content).hexdigest()
