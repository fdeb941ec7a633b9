"""Saving a state dict: `save`, and `async_save` with `maybe_finalize_async_calls`.

    save({"model": model.state_dict(), "step": 100}, checkpoint_id="run/step_100")
    async_save(state_dict, checkpoint_id="s3://bucket/run/step_200")
    maybe_finalize_async_calls(blocking=True)

Checkpoints are in the format of torch.distributed.checkpoint, whose `load` reads them. A new checkpoint replaces an old one when it is
complete. Ranks that pass different ids save checkpoints of their own parts: the local kind.

Source: "torch.sagemaker.distributed.checkpoint.state_dict_saver" in the public reference of SMP v2.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from smpc.checkpoint.torch_format.agreement import CoordinatedRanks
from smpc.checkpoint.torch_format.file_systems import is_url
from smpc.checkpoint.torch_format.saving import StateSaving, TorchFormatWriter, local_parts, save_state
from smpc.errors import UsageError
from smpc.v2.distributed.checkpoint.async_utils import AsyncCallsQueue
from smpc.v2.distributed.checkpoint.s3_filesystem import S3ClientConfig, is_s3_uri, s3_options
from smpc.v2.state_handler import state
from smpc.v2.transforming.transformed_slices import as_boxes

__all__ = [
    "DEFAULT_ASYNC_REQUEST_QUEUE",
    "PyTorchDistSaveShardedStrategy",
    "SaveShardedStrategy",
    "async_save",
    "maybe_finalize_async_calls",
    "save",
]
DEFAULT_ASYNC_REQUEST_QUEUE = AsyncCallsQueue()


class SaveShardedStrategy:
    """How tensors that are divided over ranks are saved: a format's name and version."""

    backend, version = "torch_dist", 1


class PyTorchDistSaveShardedStrategy(SaveShardedStrategy):
    """The format of torch.distributed.checkpoint, which is the only one here."""


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    queue: AsyncCallsQueue | None = None,
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
    s3client_config: S3ClientConfig | None = None,
) -> None:
    """Start to save a state dict; returns when its tensors may change. Every rank of the group calls it.

    This rank's data is copied to CPU memory first, which the next save reuses. The call waits for an earlier save of the queue.
    `coordinator_rank` is a rank of the group. Raises CheckpointError if this save cannot begin, or the one before it failed.
    """
    _check_strategy(sharded_strategy)
    writer = _storage_writer(checkpoint_id, storage_writer, s3_region, s3client_config)
    chosen = planner or DefaultSavePlanner(enable_plan_caching=not force_check_all_plans)
    state = _parts_of(state_dict, writer, _ranks(process_group, coordinator_rank))
    (queue or DEFAULT_ASYNC_REQUEST_QUEUE).schedule(
        lambda ranks: StateSaving(state, writer, ranks, chosen, wait=wait_error_handling),
        process_group,
        coordinator_rank,
    )


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
    s3client_config: S3ClientConfig | None = None,
) -> None:
    """Save a state dict, and return when the checkpoint is complete. Every rank of the group calls it.

    Raises CheckpointError on every rank if it fails on one, and an older checkpoint of the same id stays.
    """
    writer = _storage_writer(checkpoint_id, storage_writer, s3_region, s3client_config)
    chosen = planner or DefaultSavePlanner(enable_plan_caching=not force_check_all_plans)
    ranks = _ranks(process_group, coordinator_rank)
    save_state(_parts_of(state_dict, writer, ranks), writer, ranks, chosen, wait=wait_error_handling)


def maybe_finalize_async_calls(blocking: bool = True, process_group: dist.ProcessGroup | None = None) -> list[int]:
    """Ends saves of the default queue: all of them if `blocking`, otherwise those that are done. Returns the indices of the calls."""
    return DEFAULT_ASYNC_REQUEST_QUEUE.maybe_finalize_async_calls(blocking, process_group)


def _ranks(process_group: dist.ProcessGroup | None, coordinator_rank: int) -> CoordinatedRanks:
    return CoordinatedRanks(process_group or (dist.group.WORLD if dist.is_initialized() else None), coordinator_rank)


def _parts_of(state_dict: dict[str, Any], writer: StorageWriter, ranks: CoordinatedRanks) -> dict[str, Any]:
    return at_place(state_dict, str(getattr(writer, "checkpoint_id", "")), ranks)


def at_place(state_dict: dict[str, Any], place: str, ranks: CoordinatedRanks) -> dict[str, Any]:
    """This rank's storage for saving to a place, or loading from it. Collective.

    If it saves alone there, while others save elsewhere: its own parts. If all ranks with slices of a tensor save there: whole tensors.
    Otherwise each folder has the tensors of one rank of each tensor-parallel group: slices. Memory is shared.
    """
    own = (place, state.tp_rank, state.ep_rank) if state.is_initialized else (place, 0, 0)
    everybody = ranks.everybody(own)
    there = [each for each in everybody if each[0] == place]
    if len(everybody) > 1 and len(there) == 1:
        parts: dict[str, Any] = local_parts(state_dict)
        return parts
    is_whole = state.is_initialized and len(set(there)) == state.tp_size * state.ep_size
    boxes: dict[str, Any] = as_boxes(state_dict) if is_whole else state_dict
    return boxes


def _storage_writer(
    checkpoint_id: str | os.PathLike[str] | None,
    writer: StorageWriter | None,
    region: str | None,
    config: S3ClientConfig | None,
) -> StorageWriter:
    """The writer of a checkpoint, given or made."""
    if writer is not None:
        writer.reset(checkpoint_id)
        return writer
    if checkpoint_id is None:
        raise UsageError(
            "save: expected a checkpoint_id or a storage_writer, found neither; pass a location for the checkpoint"
        )
    return TorchFormatWriter(checkpoint_id, options=options_of(checkpoint_id, region, config))


def options_of(place: str | os.PathLike[str], region: str | None, config: S3ClientConfig | None) -> dict[str, Any]:
    """The fsspec options of a place."""
    return s3_options(region, config) if is_url(place) and is_s3_uri(place) else {}


def _check_strategy(strategy: Any) -> None:
    pair = (strategy.backend, strategy.version) if isinstance(strategy, SaveShardedStrategy) else strategy
    known = (PyTorchDistSaveShardedStrategy.backend, PyTorchDistSaveShardedStrategy.version)
    if pair is not None and tuple(pair) != known:
        raise UsageError(
            f"sharded_strategy: expected None, PyTorchDistSaveShardedStrategy() or {known}, found {strategy!r}"
        )
