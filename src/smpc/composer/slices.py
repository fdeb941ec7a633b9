"""Ranks that slice layers together train on the same samples, and draw the same random numbers: what they check, and share."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch.distributed import ProcessGroup, get_process_group_ranks

from smpc import dist
from smpc.checkpoint.rng import capture_rng, restore_rng
from smpc.composer.microbatches import tensors_of
from smpc.errors import ConfigError


def check_same_batch(batch: Any, group: ProcessGroup | None) -> None:
    """Raise ConfigError, unless all ranks of the group have the same tensors in their batches. Collective; nothing without a group."""
    if group is None:
        return
    checksum = 0
    for tensor in tensors_of(batch):
        plain = tensor.detach().cpu().contiguous()
        checksum = zlib.crc32(f"{plain.dtype}{tuple(plain.shape)}".encode(), checksum)
        checksum = zlib.crc32(plain.reshape(-1).view(torch.uint8).numpy().tobytes(), checksum)
    found = [int(each) for each in dist.all_gather(torch.tensor([checksum]), group)]
    if len(set(found)) > 1:
        ranks = ", ".join(map(str, get_process_group_ranks(group)))
        raise ConfigError(
            f"batch: expected the same one on ranks {ranks}, which slice layers together, found several; let their data loaders read the "
            "same samples in one order"
        )


def share_random_state(group: ProcessGroup) -> None:
    """Give all ranks of the group the random state of its first one: what is not sliced is dropped alike. Collective."""
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    state: list[Any] = [capture_rng() | {"cuda": []}, torch.cuda.get_rng_state() if in_use else None]
    dist.broadcast_object_list(state, get_process_group_ranks(group)[0], group)
    restore_rng(state[0])
    if in_use:  # of the device that this process has, whatever its number
        torch.cuda.set_rng_state(state[1])
