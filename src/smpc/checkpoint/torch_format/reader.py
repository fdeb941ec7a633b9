"""Reading a checkpoint's files without running what they name.

`.metadata` is a pickle that torch unpickles as such; here it is read as records (`smpc.checkpoint.sources.distributed_metadata`). Tensors
and other values are unpickled with weights_only=True, and the checksums of their archives are held against their bytes.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from smpc.checkpoint.folder.files import load_tensors
from smpc.checkpoint.format.regular_file import printable
from smpc.checkpoint.sources.distributed_metadata import MOST, Described, DistributedMetadata, parse_metadata
from smpc.checkpoint.torch_format.file_systems import file_system_of, is_url, names_in
from smpc.checkpoint.torch_format.saving import METADATA
from smpc.errors import CheckpointError


class TorchFormatReader(FileSystemReader):
    """A storage reader for `torch.distributed.checkpoint` too."""

    def __init__(self, path: str | os.PathLike[str], *, options: Mapping[str, Any] = MappingProxyType({})) -> None:
        super().__init__("." if is_url(path) else path)
        self._options = dict(options)
        self.fs, self.path = file_system_of(path, self._options)  # type: ignore[assignment]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Go on with another place."""
        self.storage_data = {}
        if checkpoint_id:
            self.fs, self.path = file_system_of(checkpoint_id, self._options)  # type: ignore[assignment]

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What there is. Raises CheckpointError if there is no checkpoint, or its metadata are damaged or hostile."""
        path = self.fs.concat_path(self.path, METADATA)
        try:
            with self.fs.create_stream(path, "rb") as file:
                data = file.read(MOST + 1)
        except FileNotFoundError:
            raise CheckpointError(f"no checkpoint in {self.path}: {_found_instead(self.fs, self.path)}") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        if len(data) > MOST:
            raise CheckpointError(f"{path}: expected at most {MOST} bytes, found more")
        return _as_torch(parse_metadata(data, str(path)), str(path))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan says, file after file."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            path = self.fs.concat_path(self.path, name)
            try:
                with self.fs.create_stream(path, "rb") as file:
                    self._read_file(file, str(path), items, planner)
            except FileNotFoundError:
                raise CheckpointError(
                    f"{path} is missing, though {METADATA} names it; the checkpoint is damaged"
                ) from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, file: Any, path: str, items: list[ReadItem], planner: LoadPlanner) -> None:
        place, chunk = (-1, -1), None
        for item in sorted(items, key=lambda item: self.storage_data[item.storage_index].offset):
            info = self.storage_data[item.storage_index]
            where = f"{path}: {printable(item.storage_index.fqn)}"
            if (info.offset, info.length) != place:
                file.seek(info.offset)
                data = file.read(info.length)
                if len(data) < info.length:
                    raise CheckpointError(f"{where}: truncated at byte {info.offset + len(data)}")
                place, chunk = (
                    (info.offset, info.length),
                    None if item.type == LoadItemType.BYTE_IO else load_tensors(data, where),
                )
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(data))
                continue
            _fill_item(planner, item, chunk, where)


def _fill_item(planner: LoadPlanner, item: ReadItem, chunk: Any, where: str) -> None:
    """Copy the part of a chunk that an item asks for to where the planner wants it."""
    if not isinstance(chunk, Tensor) or any(
        start + size > whole for start, size, whole in zip(item.storage_offsets, item.lengths, chunk.shape, strict=True)
    ):
        raise CheckpointError(f"{where}: its content is not what {METADATA} says")
    for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        chunk = chunk.narrow(dim, start, size)
    target = planner.resolve_tensor(item).detach()
    if target.shape != chunk.shape:
        raise CheckpointError(f"{where}: expected shape {list(target.shape)}, found {list(chunk.shape)}")
    target.copy_(chunk)
    planner.commit_tensor(item, target)


def _as_torch(found: DistributedMetadata, path: str) -> Metadata:
    """Checked metadata, in torch's classes."""
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for (name, offset), info in found.stored.items():
        if os.path.basename(info.file) != info.file or info.file in ("", ".", "..") or not info.is_plain:
            raise CheckpointError(
                f"{path}: refused: {printable(name)} is in {printable(info.file)!r}, which torch.save did not write here"
            )
        is_tensor = found.entries.get(name) is not None
        storage[MetadataIndex(name, offset if is_tensor else None)] = _StorageInfo(info.file, info.begin, info.length)
    return Metadata(
        {
            name: BytesStorageMetadata() if each is None else _tensor_to_read(each)
            for name, each in found.entries.items()
        },
        planner_data=found.paths,
        storage_data=storage,
        storage_meta=StorageMeta(),
    )


def _tensor_to_read(described: Described) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.shape)) for box in described.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=described.dtype), torch.Size(described.shape), chunks)


def _found_instead(fs: Any, path: Any) -> str:
    """What there is in place of a checkpoint, for the error."""
    names = names_in(fs, path)
    if not names:
        return "nothing is there"
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"expected a file {METADATA}, found {', '.join(map(printable, names[:10]))}{more}"
