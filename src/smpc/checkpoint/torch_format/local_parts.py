"""State dicts of one rank's part, without the other ranks: the local kind of checkpoint.

    local_parts({"model": {"weight": DTensor}})       {"model": {"weight": this rank's part}}, in the same memory

Such a checkpoint is loaded by ranks that have the same parts: the same number of shards; replicas may differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor


def local_parts(value: Any) -> Any:
    """The value with this rank's part in place of every tensor that is divided; dicts and lists are new ones."""
    if isinstance(value, Stateful):
        return local_parts(value.state_dict())
    if isinstance(value, dict):
        return {key: local_parts(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(local_parts(each) for each in value)
    return local_part(value) if isinstance(value, Tensor) else value


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; an empty one if it has none."""
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach()
    if isinstance(tensor, ShardedTensor):
        shards = tensor.local_shards()
        return shards[0].tensor.detach() if shards else torch.empty(0, dtype=tensor.dtype)
    return tensor
