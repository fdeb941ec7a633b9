"""A rank's part of a tensor: all of it, or for a DTensor (FSDP2, torch's tensor parallelism) its local part with its offsets.

    shard_of("model", "head.weight", dtensor)     the Shard of this rank, a view; perhaps an empty one

Replicated DTensors are shards that several ranks hold alike, so one of them writes them. DTensors that are still to be summed (Partial)
have no values yet, and are refused.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from smpc.checkpoint.format.content import Shard
from smpc.errors import CheckpointError


def shard_of(kind: str, name: str, tensor: Tensor) -> Shard | None:
    """This rank's part of a tensor, to be saved or filled; None if it is not in its mesh. CheckpointError for a DTensor without values."""
    if not isinstance(tensor, DTensor):
        return Shard.whole(kind, name, tensor.detach())
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"{kind} {name}: a DTensor that is still to be summed, {tensor.placements}; redistribute it first"
        )
    if tensor.device_mesh.get_coordinate() is None:
        return None  # this rank is not in its mesh
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = (
        tensor.to_local().detach()
    )  # in this order: writing into it then counts in the version of what the DTensor holds
    if tuple(local.shape) != tuple(shape):
        raise CheckpointError(
            f"{kind} {name}: expected a local part of shape {list(shape)}, found {list(local.shape)}; DTensors must be split as torch "
            "splits them"
        )
    return Shard.of(kind, name, local, tuple(tensor.shape), tuple(offsets))


def empty_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A new tensor of the same shape, device and placement."""
    return torch.empty_like(tensor.detach(), dtype=dtype, memory_format=torch.contiguous_format)
