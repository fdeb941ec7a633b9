"""From any source to any form; docs/checkpoints.md says what each keeps.

with open_source(path) as source:
    write_checkpoint(source, "run/step_100")    a checkpoint of this library ("partial")
    write_file_of(source, "model.safetensors")  one file of the model ("full")
    write_archive_of(source, "model.bin")       one file of the model for torch.load ("torch")
    write_folder(source, "export")              a Hugging Face folder ("hf")
    write_distributed(source, "dcp")            torch.distributed.checkpoint ("dcp")
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from smpc.checkpoint.channel import Alone
from smpc.checkpoint.distributed import METADATA, DistributedSource
from smpc.checkpoint.folder.folders import Root, is_checkpoint, is_share
from smpc.checkpoint.format.draft_content import Advance, Content, Shard
from smpc.checkpoint.format.manifest import NAME
from smpc.checkpoint.format.regular_file import is_file
from smpc.checkpoint.format.tensorfile import is_tensorfile
from smpc.checkpoint.save import save
from smpc.checkpoint.sources.conversion_sources import TIED, CheckpointSource, LegacySource, SafetensorsSource, Source
from smpc.checkpoint.sources.export import shard_of
from smpc.errors import CheckpointError


def open_source(path: str | os.PathLike[str], *, any_name: bool = False) -> Source:
    """The source at a path, to be read tensor by tensor. Raises CheckpointError if it is missing or cannot be read.

    `any_name`: of a checkpoint, see `Checkpoint.open`.
    """
    found = os.path.abspath(os.fspath(path))
    if is_file(found):
        parent = os.path.dirname(found)
        if not any_name and is_checkpoint(parent) and is_share(os.path.basename(found)):
            raise CheckpointError(f"{found}: the share of one rank of the checkpoint {parent}; name the folder")
        return SafetensorsSource(found) if is_tensorfile(found) else LegacySource(found)
    if not os.path.isdir(found):
        raise CheckpointError(f"{found}: no such file or folder")
    if is_checkpoint(found):  # perhaps one that has lost its manifest, which is an error
        return CheckpointSource(found, any_name=any_name)
    if os.path.lexists(os.path.join(found, METADATA)):
        return DistributedSource(found)
    if any(name.endswith(".safetensors") for name in os.listdir(found)):
        return SafetensorsSource(found)
    root = Root(found)
    tags = root.tags()
    raise CheckpointError(
        f"{found}: expected a checkpoint ({NAME}), a folder of .safetensors files or of torch.distributed.checkpoint ({METADATA}); "
        + (f"it holds the checkpoints {', '.join(tags)}, name one of them" if tags else "found none of them")
    )


def write_checkpoint(
    source: Source,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    advance: Advance | None = None,
) -> str:
    """Write a checkpoint of this library: its folder's name is the tag. From another checkpoint everything but pickled content is kept."""
    parent, tag = os.path.split(os.path.abspath(os.fspath(path)))
    if not os.path.isdir(parent):
        raise CheckpointError(f"cannot write {os.path.join(parent, tag)}: there is no folder {parent}")
    metadata = source.metadata
    tied = metadata.get(TIED, {}) if isinstance(metadata, Mapping) else {}  # other names of what is there once
    shards: list[Shard] = [
        shard_of(source, item, dtype if item.kind == "model" and item.dtype.is_floating_point else None)
        for item in source.items
        if not (item.kind == "model" and item.name in tied)
    ]
    content = Content(shards, metadata=source.metadata)
    if isinstance(source, CheckpointSource):
        old = source.checkpoint
        content = Content(shards, metadata=source.metadata, user=old.user(), plan=old.plan)
    return save(Root(parent), tag, content, Alone(), advance=advance)
