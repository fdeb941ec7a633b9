"""Loading a state dict: `load`.

Source: "torch.sagemaker.distributed.checkpoint.state_dict_loader" in the public reference of SMP v2.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from smpc.checkpoint.torch_format.agreement import CoordinatedRanks
from smpc.checkpoint.torch_format.loading import load_state
from smpc.checkpoint.torch_format.reader import TorchFormatReader
from smpc.errors import UsageError
from smpc.v2.distributed.checkpoint.s3_filesystem import S3ClientConfig
from smpc.v2.distributed.checkpoint.state_dict_saver import at_place, options_of
from smpc.v2.transforming.transformed_slices import take_over

__all__ = ["load"]


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    check_keys_matched: bool = True,
    coordinator_rank: int = 0,
    s3_region: str | None = None,
    s3client_config: S3ClientConfig | None = None,
) -> None:
    """Fill a state dict from a checkpoint: tensors in place, other values replaced. Every rank of the group calls it.

    The checkpoint may have been saved by another number of ranks, which divided its tensors otherwise; one of the local kind, whose ids
    differ between ranks, by as many shards. `check_keys_matched`: compare the keys of all ranks first. Nothing that a file names is run.

    Raises CheckpointError on every rank if it fails on one; it is a KeyError, too, if the checkpoint lacks keys.
    """
    if storage_reader is None and checkpoint_id is None:
        raise UsageError(
            "load: expected a checkpoint_id or a storage_reader, found neither; pass the location of the checkpoint"
        )
    if storage_reader is None:
        assert checkpoint_id is not None, "checked above"
        reader: StorageReader = TorchFormatReader(
            checkpoint_id, options=options_of(checkpoint_id, s3_region, s3client_config)
        )
    else:
        reader = storage_reader
        reader.reset(checkpoint_id)
    ranks = CoordinatedRanks(process_group or (dist.group.WORLD if dist.is_initialized() else None), coordinator_rank)
    parts = at_place(state_dict, str(getattr(reader, "checkpoint_id", "")), ranks)
    if parts is state_dict:
        load_state(state_dict, reader, ranks, planner, same_keys=check_keys_matched)
        return
    load_state(parts, reader, ranks, planner, same_keys=check_keys_matched)
    take_over(state_dict, parts)
