"""What a model's forward writes into whole parameters stays, when they are in parts again.

A momentum encoder that follows another one in forward, `nn.Embedding(max_norm=...)`, a weight that is clamped: torch's `fully_shard` drops
the whole parameter, and what was written into it, without a word. Each rank keeps its part of it:

    whole, written into    w0 w1 w2 w3
    parts                  rank 0: w0 w1    rank 1: w2 w3

As without shards, all replicas must write the same: what depends on a replica's batch would differ between them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from smpc.sharding.tensors import local, own_part_of_sharded


def keep_writes(units: Iterable[FSDPModule]) -> None:
    """Have units take over what is written into their whole parameters."""
    for unit in units:
        group: Any = unit._get_fsdp_state()._fsdp_param_group
        if group is not None:
            group._to_sharded = functools.partial(_let_go, group, group._to_sharded)


@torch.no_grad()
def _let_go(group: Any, original: Callable[[], None]) -> None:
    """In place of what frees whole parameters."""
    if not group.is_sharded:
        for each in group.fsdp_params:
            _write_back(each)
    original()


def _write_back(parameter: Any) -> None:
    whole = getattr(parameter, "_unsharded_param", None)
    part = local(parameter.sharded_param.detach())
    if whole is None or isinstance(whole, DTensor) or whole.dtype != part.dtype:
        return
    own = own_part_of_sharded(parameter.sharded_param, whole.detach())
    # Comparing is cheap where nothing waits for a device, and leaves the part's version alone, by which masters notice writes.
    if not part.is_cpu or not torch.equal(own, part):
        part.copy_(own)
    room = parameter.all_gather_outputs[0]
    if whole.untyped_storage().data_ptr() != room.untyped_storage().data_ptr():  # `weight.data = ...`
        whole.data = torch.as_strided(room, whole.shape, parameter._contiguous_orig_stride, storage_offset=0)
