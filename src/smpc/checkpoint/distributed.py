"""torch.distributed.checkpoint: its folders read without trusting them, and written for `torch.distributed.checkpoint.load`.

    DistributedSource(folder)                 a Source; `open_source` finds it by its .metadata
    write_distributed(source, folder)         {"model": {name: tensor}, "optimizer": {...}}, one tensor in memory at a time

Keys are those of the nested dict that was saved: the first level is the kind, the rest, joined by dots, the name. What lies on the first
level itself has the kind "model". An optimizer's state is written as torch's `get_optimizer_state_dict` has it, and read so:

    {"optimizer": {"state": {parameter: {key: tensor}}, "param_groups": [...]}}     kind "optimizer", name "parameter::key";
                                                                                   metadata["optimizer"]["param_groups"]

Extra state of modules comes as `metadata["extra_state"]`, other values that are no tensors as
`metadata["torch.distributed.checkpoint"]`, by key.

`.metadata` is a pickle, and torch unpickles it as such, with whatever it calls. Here the unpickler knows the names that torch writes and no
others, and what it makes of them are inert records: nothing in the file is ever called. Tensors and other values are read with
weights_only=True; a value that needs more is refused. torch keeps no checksums: damage to a tensor cannot be seen in such a folder.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from smpc.checkpoint.boxes import Box, find_gap
from smpc.checkpoint.content import VALUES
from smpc.checkpoint.export import new_path
from smpc.checkpoint.modules import OPTIMIZER, SEPARATOR
from smpc.checkpoint.sources import Item, Source
from smpc.checkpoint.tensorfile import Advance, open_regular
from smpc.checkpoint.tree import flatten, rebuild
from smpc.checkpoint.views import with_tied
from smpc.errors import CheckpointError

METADATA = ".metadata"
OTHERS = "torch.distributed.checkpoint"  # key in metadata of the values that are no tensors
_OWN = "smpc_metadata"  # key of our metadata in a folder that we write
_STATE, _GROUPS = (OPTIMIZER, "state"), (OPTIMIZER, "param_groups")
_EXTRA = "_extra_state"  # what keys of torch's extra state end in
_MAX_METADATA = 1 << 30


class DistributedSource:
    """A folder that torch.distributed.checkpoint wrote."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        path = os.path.join(folder, METADATA)
        try:
            self._read_metadata(_unpickle(path))
        except CheckpointError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: not as torch writes it, or damaged: {type(error).__name__}: {error}"
            ) from error

    def __enter__(self) -> DistributedSource:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def read(self, item: Item) -> Tensor:
        """See Source. Raises CheckpointError if a chunk is not as the metadata says."""
        key = self._keys[item.kind, item.name]
        values = torch.empty(item.shape, dtype=item.dtype)
        whole = Box((0,) * len(item.shape), item.shape)
        for box in self._chunks[key]:
            chunk = self._load(key, box.offsets)
            if not isinstance(chunk, Tensor) or tuple(chunk.shape) != box.shape or chunk.dtype != item.dtype:
                raise CheckpointError(
                    f"{self._folder}: the chunk of {key} at {list(box.offsets)} is not what {METADATA} says"
                )
            values[box.within(whole)].copy_(chunk)
        return values

    def _read_metadata(self, found: Any) -> None:
        described: Mapping[str, Any] = found.state_dict_metadata
        paths: Mapping[str, Any] = vars(found).get("planner_data") or {}
        self._infos = {
            (str(index.fqn), tuple(vars(index).get("offset") or ())): info for index, info in found.storage_data.items()
        }
        self._chunks: dict[str, list[Box]] = {}
        self._keys: dict[tuple[str, str], str] = {}
        self.items: list[Item] = []
        others: dict[str, Any] = {}
        where: dict[str, tuple[Any, ...]] = {}
        for key, entry in described.items():
            if not vars(entry):  # BytesStorageMetadata: no fields
                others[key] = self._load(key, ())
                where[key] = paths.get(key, (key,))
                continue
            item = self._item(key, paths.get(key, (key,)), entry)
            self._keys[item.kind, item.name] = key
            self.items.append(item)
        self.metadata: Any = self._metadata(others, where)
        self.items = [item for item in self.items if item.kind != VALUES]

    def _item(self, key: str, path: tuple[Any, ...], entry: Any) -> Item:
        kind = str(path[0]) if len(path) > 1 else "model"
        name = ".".join(map(str, path[1:] if len(path) > 1 else path))
        if path[:2] == _STATE and len(path) == 4:
            name = f"{path[2]}{SEPARATOR}{path[3]}"
        shape = tuple(entry.size)
        self._chunks[key] = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        gap = find_gap(shape, self._chunks[key])
        if gap is not None or (kind, name) in self._keys:
            raise CheckpointError(f"{self._folder}: {key}: {gap or 'another tensor has the same name'}")
        return Item(kind, name, entry.properties.state[0], shape)

    def _metadata(self, others: dict[str, Any], where: Mapping[str, tuple[Any, ...]]) -> Any:
        own = others.pop(_OWN, None)
        if own is None:
            return _known(others, where)
        items = {item.name: item for item in self.items if item.kind == VALUES}
        return rebuild(json.loads(own), lambda name: self.read(items[name]))

    def _load(self, key: str, offsets: tuple[int, ...]) -> Any:
        """A chunk or another value, as torch.save wrote it into one of the files."""
        info = self._infos.get((key, offsets))
        if info is None:
            raise CheckpointError(f"{self._folder}: {METADATA} does not say where {key} at {list(offsets)} lies")
        name, start, length = str(info.relative_path), int(info.offset), int(info.length)
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise CheckpointError(
                f"{self._folder}: expected the plain name of a file in the same folder, found {name!r}"
            )
        if vars(info).get("transform_descriptors"):
            raise CheckpointError(
                f"{self._folder}: {key} was written through an extension, such as compression; not supported"
            )
        path = os.path.join(self._folder, name)
        descriptor = open_regular(path)
        try:
            if start < 0 or length < 0 or start + length > os.fstat(descriptor).st_size:
                raise CheckpointError(f"{path}: truncated: {key} lies at bytes {start} to {start + length}")
            data = os.pread(descriptor, length, start) if length < 1 << 30 else _pread(descriptor, length, start)
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path}: {key} holds objects that are not tensors or plain values, or is damaged; such are never unpickled"
            ) from error
        except Exception as error:  # as in `smpc.checkpoint.files.read_file`
            raise CheckpointError(f"{path}: cannot read {key}: {type(error).__name__}: {str(error)[:200]}") from error
        finally:
            os.close(descriptor)


def _known(others: dict[str, Any], where: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Metadata out of values that are no tensors: options of parameter groups and extra state as we have them, the rest by key."""
    found: dict[str, Any] = {}
    for key, path in where.items():
        if path[:2] == _GROUPS and len(path) == 4:
            groups = found.setdefault(_GROUPS[0], {}).setdefault(_GROUPS[1], [])
            groups.extend({} for _ in range(path[2] + 1 - len(groups)))
            groups[path[2]][path[3]] = others.pop(key)
        elif path[0] == "model" and len(path) > 1 and str(path[1]).endswith(_EXTRA):
            inner = found.setdefault("extra_state", {})
            for part in path[1:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = others.pop(key)
    return found | ({OTHERS: others} if others else {})


def write_distributed(source: Source, path: str | os.PathLike[str], *, advance: Advance | None = None) -> str:
    """Write a folder for torch.distributed.checkpoint. Raises CheckpointError if it exists or cannot be written."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.state_dict_saver import save

    state, bring = _described(with_tied(source), advance)

    class Planner(DefaultSavePlanner):
        """Brings tensors when they are written."""

        def lookup_object(self, index: MetadataIndex) -> Any:
            """The value of a key."""
            return bring[index.fqn]() if index.fqn in bring else super().lookup_object(index)

    with new_path(path) as draft:
        os.mkdir(draft, 0o700)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it should be
                save(state, storage_writer=FileSystemWriter(draft), planner=Planner(), no_dist=True)
        except Exception as error:  # torch wraps whatever happens
            raise CheckpointError(f"cannot write {path}: {type(error).__name__}: {str(error)[:500]}") from error
        for name in os.listdir(draft):
            os.chmod(os.path.join(draft, name), 0o600)
    return os.path.abspath(os.fspath(path))


def _described(source: Source, advance: Advance | None) -> tuple[dict[str, Any], dict[str, Callable[[], Tensor]]]:
    """The nested dict to save, with meta tensors, as torch plans with shapes alone; and what brings each when it is written, by key."""
    values, tensors = flatten(source.metadata, "metadata")
    state: dict[str, Any] = {_OWN: json.dumps(values)}
    if tensors:
        state[VALUES] = dict(tensors)
    metadata = source.metadata if isinstance(source.metadata, Mapping) else {}
    groups = metadata.get(_GROUPS[0])
    if isinstance(groups, Mapping) and _GROUPS[1] in groups:
        state[_GROUPS[0]] = {_GROUPS[1]: groups[_GROUPS[1]]}
    if isinstance(metadata.get("extra_state"), Mapping):
        state["model"] = dict(metadata["extra_state"])
    bring: dict[str, Callable[[], Tensor]] = {}
    for item in source.items:
        name, _, of_state = item.name.rpartition(SEPARATOR)
        path = (*_STATE, name, of_state) if item.kind == _STATE[0] and name else (item.kind, item.name)
        key = ".".join(path)
        assert key not in bring, f"two tensors are called {key}"
        bring[key] = _bringing(source, item, advance)
        inner = state
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = torch.empty(item.shape, dtype=item.dtype, device="meta")
    return state, bring


def _bringing(source: Source, item: Item, advance: Advance | None) -> Callable[[], Tensor]:
    def bring() -> Tensor:
        values = source.read(item)
        if advance is not None:
            advance(item.num_bytes)
        return values

    return bring


class _Record:
    """What stands for an object of the pickle: its fields, and nothing that runs."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.__dict__["state"] = state


def _tuple(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values)


def _first(value: Any) -> Any:
    return value


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    *(
        (_METADATA_MODULE, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): _tuple,
    ("torch.serialization", "_get_layout"): _first,
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"): _first,
}


class _Unpickler(pickle.Unpickler):
    """Knows what torch writes into .metadata, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return _Record
        if (module, name) in _FUNCTIONS:
            return _FUNCTIONS[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong there")


def _unpickle(path: str) -> Any:
    with open(open_regular(path), "rb") as file:
        data = file.read(_MAX_METADATA + 1)
    if len(data) > _MAX_METADATA:
        raise CheckpointError(f"{path}: larger than {_MAX_METADATA} bytes")
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle fails in many ways
        raise CheckpointError(f"{path}: refused: {type(error).__name__}: {str(error)[:200]}") from error


def _pread(descriptor: int, length: int, start: int) -> bytes:
    """As os.pread, which brings 2 GiB at most."""
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        count = os.preadv(descriptor, [view[done : done + (64 << 20)]], start + done)
        if not count:
            raise OSError("truncated")
        done += count
    return bytes(data)
