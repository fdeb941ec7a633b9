"""Tensors that can be brought one at a time, wherever they lie; what conversions read from.

    open_source(path)    a checkpoint of this library, a Hugging Face folder or a .safetensors file, a torch.distributed.checkpoint
                         folder, or a legacy .pt/.bin/.pth file, told apart by what is there

    CheckpointSource     kinds and names as they were saved
    SafetensorsSource    one file, or the files of a folder with or without model.safetensors.index.json; kind "model"
    LegacySource         torch.save of a mapping of tensors, read with weights_only=True and no fallback; kind "model"

A source lists its tensors (Item) and brings one (`read`). It holds no more than that one; a legacy file is mapped, not read. For
torch.distributed.checkpoint see `smpc.checkpoint.distributed`.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from smpc.checkpoint.content import VALUES
from smpc.checkpoint.dtypes import byte_view, num_bytes
from smpc.checkpoint.files import read_file
from smpc.checkpoint.manifest import is_plain_name
from smpc.checkpoint.reader import Checkpoint
from smpc.checkpoint.tensorfile import Header, open_regular, read_header
from smpc.errors import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_MAX_INDEX = 256 << 20


@dataclass(frozen=True, slots=True)
class Item:
    """A whole tensor of a source."""

    kind: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """When contiguous."""
        return num_bytes(self.shape, self.dtype)


class Source(Protocol):
    """Where tensors come from. A context manager."""

    @property
    def items(self) -> list[Item]:
        """All tensors."""

    @property
    def metadata(self) -> Any:
        """What a checkpoint of this library was saved with; {} from elsewhere."""

    def read(self, item: Item) -> Tensor:
        """One of them, on the CPU and contiguous."""

    def __enter__(self) -> Source: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _Closing:
    """What sources have in common."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of files."""


class CheckpointSource(_Closing):
    """A checkpoint of this library."""

    def __init__(self, folder: str) -> None:
        self.checkpoint = Checkpoint.open(folder)
        self.items = [
            Item(entry.kind, entry.name, entry.dtype, entry.shape)
            for entry in self.checkpoint.entries.values()
            if entry.kind != VALUES
        ]
        self.metadata = self.checkpoint.metadata

    def read(self, item: Item) -> Tensor:
        """See Source; verified."""
        return self.checkpoint.read(item.kind, item.name)

    def close(self) -> None:
        """Let go of files."""
        self.checkpoint.close()


class SafetensorsSource(_Closing):
    """Safetensors files without a manifest. `notes`: the texts in their headers."""

    def __init__(self, path: str) -> None:
        self.metadata: Any = {}
        self._files: dict[str, tuple[int, Header]] = {}  # descriptor and header by path
        self._where: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        try:
            for file in [path] if os.path.isfile(path) else files_of(path):
                descriptor = open_regular(file)
                self._files[file] = (descriptor, Header(0, {}, {}))
                header = read_header(descriptor, file)
                self._files[file] = (descriptor, header)
                twice = sorted(set(header.tensors) & set(self._where))
                if twice:
                    raise CheckpointError(f"{', '.join(twice)}: in {file} and in {self._where[twice[0]]}")
                self._where |= dict.fromkeys(header.tensors, file)
                self.notes |= header.metadata
        except BaseException:
            self.close()
            raise
        self.items = [
            Item("model", name, *self._files[file][1].tensors[name][:2]) for name, file in self._where.items()
        ]

    def read(self, item: Item) -> Tensor:
        """See Source."""
        path = self._where[item.name]
        descriptor, header = self._files[path]
        dtype, shape, begin = header.tensors[item.name]
        values = torch.empty(shape, dtype=dtype)
        view, done = byte_view(values), 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done : done + (64 << 20)]], begin + done)
            if not count:
                raise CheckpointError(f"{path}: truncated at byte {begin + done}")
            done += count
        return values

    def close(self) -> None:
        """Let go of files."""
        files, self._files = self._files, {}
        for descriptor, _ in files.values():
            os.close(descriptor)


class LegacySource(_Closing):
    """A file of torch.save that holds a mapping of tensors, possibly under "model", "model_state_dict", "state_dict" or "module"."""

    def __init__(self, path: str) -> None:
        found = read_file(path, map_location="cpu", mmap=zipfile.is_zipfile(path))  # older files cannot be mapped
        for key in ("model", "model_state_dict", "state_dict", "module"):
            if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
                found = found[key]
                break
        if not isinstance(found, Mapping) or not any(isinstance(value, Tensor) for value in found.values()):
            raise CheckpointError(f"{path}: expected a mapping of names to tensors, found {type(found).__name__}")
        self._tensors = {str(key): value for key, value in found.items() if isinstance(value, Tensor)}
        self.items = [Item("model", name, t.dtype, tuple(t.shape)) for name, t in self._tensors.items()]
        self.metadata: Any = {}

    def read(self, item: Item) -> Tensor:
        """See Source."""
        return self._tensors[item.name].detach().contiguous()


def files_of(folder: str) -> list[str]:
    """The safetensors files of a Hugging Face folder, of which an index may say the names."""
    index = os.path.join(folder, INDEX)
    if os.path.lexists(index):
        with open(open_regular(index), "rb") as file:
            data = file.read(_MAX_INDEX + 1)
        try:
            if len(data) > _MAX_INDEX:
                raise ValueError(f"more than {_MAX_INDEX} bytes")
            names = sorted({*json.loads(data)["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{index}: damaged: {type(error).__name__}: {str(error)[:200]}") from error
        wrong = [str(name) for name in names if not is_plain_name(name)]
        if wrong:
            raise CheckpointError(
                f"{index}: expected the plain names of files in the same folder, found {', '.join(map(repr, wrong))}"
            )
    elif os.path.lexists(os.path.join(folder, SINGLE)):
        names = [SINGLE]
    else:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors") and is_plain_name(name))
    if not names:
        raise CheckpointError(f"{folder}: no .safetensors files")
    return [os.path.join(folder, name) for name in names]
