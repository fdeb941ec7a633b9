"""Reads `.metadata` of torch.distributed.checkpoint: which tensors exist, in which chunks, and where each chunk is stored.

    read_metadata("dcp/.metadata").entries["model.weight"]      Described(dtype, shape, chunks), or None for a value that is no tensor
                                  .stored["model.weight", (0, 0)]  Stored(file, begin, length)
                                  .paths["model.weight"]        ("model", "weight"): keys in the nested dict that was saved

The file is a pickle, and torch runs whatever it says. Here it is read as records (`smpc.checkpoint.format.inert_pickle`), of the names
that torch writes alone, and every value is checked before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from smpc.checkpoint.format.dtypes import checked_shape
from smpc.checkpoint.format.inert_pickle import PickledPairs, PickledRecord, parse
from smpc.checkpoint.format.regions import Box
from smpc.checkpoint.format.regular_file import read_regular
from smpc.errors import CheckpointError

MOST = 1 << 29  # bytes
_MODULE = "torch.distributed.checkpoint.metadata."
_SIZE, _PROPERTIES = "torch.Size", f"{_MODULE}TensorProperties"
_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_INDEX, _STORED = f"{_MODULE}MetadataIndex", "torch.distributed.checkpoint.filesystem._StorageInfo"
_CHUNK, _TENSOR, _VALUE = (f"{_MODULE}{name}StorageMetadata" for name in ("Chunk", "Tensor", "Bytes"))
_KNOWN = {
    *_DTYPES,
    *(_SIZE, _PROPERTIES, _INDEX, _STORED, _CHUNK, _TENSOR, _VALUE),
    *(f"{_MODULE}{name}" for name in ("Metadata", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *("torch.serialization._get_layout", "pathlib.PosixPath", "pathlib._local.PosixPath"),
}


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor, and the chunks that tile it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a chunk or a value is stored. `is_plain`: as torch.save wrote it, not through an extension such as compression."""

    file: str
    begin: int
    length: int
    is_plain: bool


@dataclass(frozen=True, slots=True)
class DistributedMetadata:
    """See the module's docstring. Where one thing is stored several times, the last counts, as in torch."""

    entries: dict[str, Described | None]
    stored: dict[tuple[str, tuple[int, ...]], Stored]
    paths: dict[str, tuple[str | int, ...]]


def read_metadata(path: str) -> DistributedMetadata:
    """Raises CheckpointError, naming the file, if it is damaged, or holds anything that does not belong there."""
    return parse_metadata(read_regular(path, MOST), path)


def parse_metadata(data: bytes, path: str) -> DistributedMetadata:
    """As `read_metadata`, of the bytes of the file; `path` names it in errors."""
    try:
        top = parse(data, _KNOWN.__contains__).fields(f"{_MODULE}Metadata")
        return DistributedMetadata(
            {
                key: _described_tensor(entry)
                for key, entry in _metadata_pairs(top["state_dict_metadata"]).by_name().items()
            },
            dict(_stored_place(*pair) for pair in _metadata_pairs(top["storage_data"])),
            {
                key: _metadata_path(value)
                for key, value in _metadata_pairs(top.get("planner_data") or PickledPairs()).by_name().items()
            },
        )
    except CheckpointError as error:
        raise CheckpointError(f"{path}: refused: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{path}: not as torch writes it, or damaged: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def _metadata_pairs(value: Any) -> PickledPairs:
    if not isinstance(value, PickledPairs):
        raise TypeError(f"expected a dict, found {type(value).__name__}")
    return value


def _described_tensor(entry: Any) -> Described | None:
    """The tensor that an entry of the metadata describes; None for another value."""
    if isinstance(entry, PickledRecord) and entry.name == _VALUE:
        return None
    found = entry.fields(_TENSOR)
    properties = found["properties"]
    if properties.name != _PROPERTIES or type(properties.state) is not tuple:
        raise TypeError("expected properties of a tensor")
    chunks = [chunk.fields(_CHUNK) for chunk in found["chunks"]]
    boxes = tuple(Box(_size_of_record(chunk["offsets"]), _size_of_record(chunk["sizes"])) for chunk in chunks)
    return Described(_DTYPES[properties.state[0].name], _size_of_record(found["size"]), boxes)


def _stored_place(index: Any, info: Any) -> tuple[tuple[str, tuple[int, ...]], Stored]:
    """Which bytes of which file have a part of a tensor."""
    key, where = index.fields(_INDEX), info.fields(_STORED)
    name, file, begin, length = key["fqn"], where["relative_path"], where["offset"], where["length"]
    if type(name) is not str or type(file) is not str or type(begin) is not int or type(length) is not int:
        raise TypeError("expected a name, a file and its bytes")
    offset = key.get("offset")
    stored = Stored(file, begin, length, not where.get("transform_descriptors"))
    return (name, () if offset is None else _size_of_record(offset)), stored


def _size_of_record(value: Any) -> tuple[int, ...]:
    """The shape that a torch.Size in the metadata is."""
    if isinstance(value, PickledRecord):
        if value.name != _SIZE or type(value.args) is not tuple or len(value.args) > 1:
            raise TypeError("expected a torch.Size")
        value = value.args[0] if value.args else ()
    return checked_shape(value)


def _metadata_path(value: Any) -> tuple[str | int, ...]:
    if type(value) is not tuple or not value or any(type(part) not in (str, int) for part in value):
        raise TypeError("expected keys of a nested dict")
    return value
