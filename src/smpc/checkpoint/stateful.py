"""State dicts of a rank's own part, for torch.distributed.checkpoint: nothing is gathered to save or load them.

    Held({"head.weight": held(shards), "step": 3})      what `dcp.save` writes and `dcp.load` fills: views of this rank's tensors
    held(shards)                                        the shards of one name as a tensor of the global shape; None if there are none
    asked_by_torch()                                    whether, and for what, `dcp.save` or `dcp.load` themselves call `state_dict()`

A tensor of which a rank has only some boxes is a `HeldTensor`: it has the global shape and dtype, the values of the boxes, and the
methods that torch's planners call. Nothing can be computed with it. Its chunks are stored like DTensors', and load anywhere: in plain
PyTorch in one process, FSDP2, another topology.

    rank 0   HeldTensor (50257, 768), rows 0 to 25128          rank 1   HeldTensor (50257, 768), rows 25129 to 50256

`dcp.save({"model": model})` calls `model.state_dict()`, as users do who want whole tensors. So who calls is what counts: only if
torch does so directly, to save or to load at once, it gets a Held. A user's own Stateful that calls it gets whole tensors, and so
does `async_save`, which copies what it gets.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from smpc.checkpoint.format.draft_content import Shard
from smpc.errors import CheckpointError

_PACKAGE = "torch.distributed.checkpoint."
_SAVER, _LOADER = _PACKAGE + "state_dict_saver", _PACKAGE + "state_dict_loader"


class Purpose(StrEnum):
    """The purpose for which torch reads a state dict."""

    SAVE = "save"
    LOAD = "load"  # to fill the tensors in it


class LocalStateDict(dict[str, Any]):
    """A state dict of views of this rank's part; `load_state_dict` completes a load after torch has filled the views."""


class HeldTensor(Tensor):
    """Boxes of a tensor; see the module's docstring."""

    shards: tuple[Shard, ...]

    @staticmethod
    def of(shards: Sequence[Shard]) -> HeldTensor:
        """Boxes of one tensor."""
        first = shards[0]
        return HeldTensor.like(first.tensor, first.global_shape, shards)

    @staticmethod
    def like(tensor: Tensor, shape: Sequence[int], shards: Sequence[Shard]) -> HeldTensor:
        """Boxes, or none, of one tensor of a global shape, with another's dtype and device."""
        made: HeldTensor = torch.Tensor._make_wrapper_subclass(
            HeldTensor, tuple(shape), dtype=tensor.dtype, device=tensor.device
        )
        made.shards = tuple(shards)
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Only boxes have values."""
        raise CheckpointError(
            f"{function}: this tensor is what torch.distributed.checkpoint saves and loads of it on this rank, not the whole; "
            "call state_dict() for whole tensors"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        boxes = [(list(shard.offsets), list(shard.shape)) for shard in self.shards]
        return f"HeldTensor({list(self.shape)}, {self.dtype}, boxes={boxes})"

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """torch's name for: what this rank writes."""
        return [self._write_item(fqn, *each) for each in zip(self.shards, self.__create_chunk_list__(), strict=True)]

    def _write_item(self, fqn: str, shard: Shard, chunk: ChunkStorageMetadata) -> WriteItem:
        properties = TensorProperties.create_from_tensor(shard.tensor)
        data = TensorWriteData(chunk=chunk, properties=properties, size=self.size())
        return WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """torch's name for the offsets of the boxes."""
        return [
            ChunkStorageMetadata(offsets=torch.Size(shard.offsets), sizes=torch.Size(shard.shape))
            for shard in self.shards
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """torch's name for: a box, to be written or filled."""
        return next(shard.tensor for shard in self.shards if shard.offsets == tuple(index.offset or ()))


def held(shards: Sequence[Shard]) -> Tensor | None:
    """A tensor of which this rank has these shards: the tensor itself where they are all of it, None where it has nothing."""
    there = [shard for shard in shards if shard.tensor.numel() or shard.shape == shard.global_shape]
    if not there:
        return None
    if there[0].shape == there[0].global_shape:
        return there[0].tensor
    return HeldTensor.of(there)


def asked_by_torch() -> Purpose | None:
    """Why torch.distributed.checkpoint calls the caller, if it does: for a blocking save, or for a load."""
    frame: FrameType | None = sys._getframe(2)
    purpose = {_SAVER: Purpose.SAVE, _LOADER: Purpose.LOAD}.get(_stateful_module(frame))
    while frame is not None and _stateful_module(frame).startswith(_PACKAGE):
        if frame.f_code.co_name == "async_save":
            return None
        frame = frame.f_back
    return purpose


def _stateful_module(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__"))
