"""torch.distributed.checkpoint: its folders read without trusting them, and written for `torch.distributed.checkpoint.load`.

    DistributedSource(folder)                 a Source; `open_source` finds it by its .metadata
    write_distributed(source, folder)         {"model": {name: tensor}, "optimizer": {...}}, one tensor in memory at a time

Keys are the paths of the saved nested dict: the first level is the kind, the rest, joined by dots, the name. Values on the first level
have the kind "model". An optimizer's state is written and read in the form of torch's `get_optimizer_state_dict`:

    {"optimizer": {"state": {parameter: {key: tensor}}, "param_groups": [...]}}     kind "optimizer", name "parameter::key";
                                                                                   metadata["optimizer"]["param_groups"]

A Trainer's folder, with {"state": {"model": {...}, "optimizers": {class: {"state": ...}}}, "rng": ...}, is read as such a dict, too; for
where its groups are see `smpc.checkpoint.sources.conversion_sources`.
Extra state of modules comes as `metadata["extra_state"]`, other values that are no tensors as
`metadata["torch.distributed.checkpoint"]`, by key.

`.metadata` is a pickle, and torch unpickles it as such, with whatever it calls; `smpc.checkpoint.sources.distributed_metadata` calls
nothing. Tensors and other values are read with weights_only=True; a value that needs more is refused. torch keeps no checksums of its
own, but torch.save's archives have some: they detect damage to the bytes of a tensor when it is read
(`smpc.checkpoint.folder.files`).
"""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from smpc.checkpoint.folder.files import load_tensors
from smpc.checkpoint.format.draft_content import VALUES, Advance
from smpc.checkpoint.format.dtypes import num_bytes
from smpc.checkpoint.format.plain_json import flatten, rebuild
from smpc.checkpoint.format.regions import Box, find_gap
from smpc.checkpoint.format.regular_file import open_regular, printable
from smpc.checkpoint.modules import OPTIMIZER, SEPARATOR
from smpc.checkpoint.sources.conversion_sources import Source, SourceItem, groups_of, with_tied
from smpc.checkpoint.sources.distributed_metadata import Described, Stored, read_metadata
from smpc.checkpoint.sources.export import new_export_path
from smpc.errors import CheckpointError

METADATA = ".metadata"
OTHERS = "torch.distributed.checkpoint"  # key in metadata of the values that are no tensors
_OWN = "smpc_metadata"  # key of our metadata in a folder that we write
_STATE, _GROUPS = (OPTIMIZER, "state"), (OPTIMIZER, "param_groups")
_TRAINED = "state.plain"  # key of a Trainer folder's JSON
_EXTRA = "_extra_state"  # what keys of torch's extra state end in


class DistributedSource:
    """A folder that torch.distributed.checkpoint wrote."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        path = os.path.join(folder, METADATA)
        self._found = read_metadata(path)
        try:
            self._read_items()
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
            raise CheckpointError(
                f"{path}: not as torch writes it, or damaged: {type(error).__name__}: {str(error)[:200]}"
            ) from error

    def __enter__(self) -> DistributedSource:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def read(self, item: SourceItem) -> Tensor:
        """See Source. Raises CheckpointError if a chunk is not as the metadata says."""
        key = self._keys[item.kind, item.name]
        described = self._found.entries[key]
        assert described is not None, "a tensor"
        for box in described.chunks:  # before there is room for all of them
            if self._where(key, box.offsets).length < num_bytes(box.shape, item.dtype):
                raise self._not_as_said(key, box)
        values = torch.empty(item.shape, dtype=item.dtype)
        whole = Box((0,) * len(item.shape), item.shape)
        for box in described.chunks:
            chunk = self._load(key, box.offsets)
            if not isinstance(chunk, Tensor) or tuple(chunk.shape) != box.shape or chunk.dtype != item.dtype:
                raise self._not_as_said(key, box)
            values[box.within(whole)].copy_(chunk)
        return values

    def _not_as_said(self, key: str, box: Box) -> CheckpointError:
        return CheckpointError(
            f"{self._folder}: the chunk of {printable(key)} at {list(box.offsets)} is not what {METADATA} says"
        )

    def _read_items(self) -> None:
        paths = self._found.paths
        self._keys: dict[tuple[str, str], str] = {}
        self.items: list[SourceItem] = []
        others: dict[str, Any] = {}
        where: dict[str, tuple[Any, ...]] = {}
        for key, entry in self._found.entries.items():
            if entry is None:
                others[key] = self._load(key, ())
                where[key] = _path_in_distributed_state(paths.get(key, (key,)))
                continue
            item = self._item(key, paths.get(key, (key,)), entry)
            self._keys[item.kind, item.name] = key
            self.items.append(item)
        self.metadata: Any = self._metadata(others, where)
        self.items = [item for item in self.items if item.kind != VALUES]

    def _item(self, key: str, path: tuple[Any, ...], entry: Described) -> SourceItem:
        path = _path_in_distributed_state(path)
        kind = str(path[0]) if len(path) > 1 else "model"
        name = ".".join(map(str, path[1:] if len(path) > 1 else path))
        if path[:2] == _STATE and len(path) == 4:
            name = f"{path[2]}{SEPARATOR}{path[3]}"
        gap = find_gap(entry.shape, entry.chunks)
        if gap is not None or (kind, name) in self._keys:
            raise CheckpointError(f"{self._folder}: {printable(key)}: {gap or 'another tensor has the same name'}")
        return SourceItem(kind, name, entry.dtype, entry.shape)

    def _metadata(self, others: dict[str, Any], where: Mapping[str, tuple[Any, ...]]) -> Any:
        own = others.pop(_OWN, None)
        if own is None:
            return _known_metadata(others, where)
        items = {item.name: item for item in self.items if item.kind == VALUES}
        try:
            return rebuild(json.loads(own), lambda name: self.read(items[name]))
        except CheckpointError as error:
            raise CheckpointError(f"{self._folder}: its metadata is damaged: {error}") from error

    def _load(self, key: str, offsets: tuple[int, ...]) -> Any:
        """A chunk or another value, as torch.save wrote it into one of the files."""
        info = self._where(key, offsets)
        path = os.path.join(self._folder, info.file)
        descriptor = open_regular(path)
        try:
            if info.begin < 0 or info.length < 0 or info.begin + info.length > os.fstat(descriptor).st_size:
                place = f"at bytes {info.begin} to {info.begin + info.length}"
                raise CheckpointError(f"{path}: truncated: {printable(key)} is {place}")
            return load_tensors(_pread(descriptor, info.length, info.begin), f"{path}: {printable(key)}")
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def _where(self, key: str, offsets: tuple[int, ...]) -> Stored:
        info = self._found.stored.get((key, offsets))
        if info is None:
            raise CheckpointError(
                f"{self._folder}: {METADATA} does not say where {printable(key)} at {list(offsets)} is"
            )
        if os.path.basename(info.file) != info.file or info.file in ("", ".", ".."):
            raise CheckpointError(
                f"{self._folder}: expected the plain name of a file in the same folder, found {info.file!r}"
            )
        if not info.is_plain:
            raise CheckpointError(
                f"{self._folder}: {printable(key)} was written through an extension, such as compression; not supported"
            )
        return info


def _path_in_distributed_state(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The path of a tensor, where a Trainer has put model and optimizers below `state` (`smpc.composer`, mosaicml)."""
    if path[0] == "state" and len(path) > 2 and path[1] == "model":
        return path[1:]
    if path[:2] == ("state", "optimizers") and path[3:4] in (("state",), ("param_groups",)) and len(path) == 6:
        return (_STATE[0], *path[3:])
    return path


def _known_metadata(others: dict[str, Any], where: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Metadata out of values that are no tensors: options of parameter groups and extra state as we have them, the rest by key."""
    found: dict[str, Any] = {}
    for key, path in where.items():
        if path[:2] == _GROUPS and len(path) == 4:
            groups = found.setdefault(_GROUPS[0], {}).setdefault(_GROUPS[1], [])
            if not 0 <= path[2] < len(where):
                raise ValueError(f"there is no parameter group {path[2]}")
            groups.extend({} for _ in range(path[2] + 1 - len(groups)))
            groups[path[2]][path[3]] = others.pop(key)
        elif path[0] == "model" and len(path) > 1 and str(path[1]).endswith(_EXTRA):
            inner = found.setdefault("extra_state", {})
            for part in path[1:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = others.pop(key)
    groups = groups_of({"plain": others[_TRAINED]}) if _TRAINED in others else None
    if groups is not None:
        found[_GROUPS[0]] = {_GROUPS[1]: groups}
    return found | ({OTHERS: others} if others else {})


def write_distributed(source: Source, path: str | os.PathLike[str], *, advance: Advance | None = None) -> str:
    """Write a folder for torch.distributed.checkpoint. Raises CheckpointError if it exists or cannot be written."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.state_dict_saver import save

    state, bring = _described_tree(with_tied(source), advance)

    class Planner(DefaultSavePlanner):
        """Brings tensors when they are written."""

        def lookup_object(self, index: MetadataIndex) -> Any:
            """The value of a key."""
            return bring[index.fqn]() if index.fqn in bring else super().lookup_object(index)

    with new_export_path(path) as draft:
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


def _described_tree(source: Source, advance: Advance | None) -> tuple[dict[str, Any], dict[str, Callable[[], Tensor]]]:
    """The nested dict to save, with meta tensors, since torch plans with shapes alone; and by key a function that reads each."""
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
        if key in bring:
            raise CheckpointError(f"two tensors would be called {printable(key)}; rename one")
        bring[key] = _tensor_reader(source, item, advance)
        inner = state
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = torch.empty(item.shape, dtype=item.dtype, device="meta")
    return state, bring


def _tensor_reader(source: Source, item: SourceItem, advance: Advance | None) -> Callable[[], Tensor]:
    """Reads a tensor of the source when it is called."""

    def bring() -> Tensor:
        values = source.read(item)
        if advance is not None:
            advance(item.num_bytes)
        return values

    return bring


def _pread(descriptor: int, length: int, start: int) -> bytes:
    """As os.pread, which brings 2 GiB at most."""
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        count = os.preadv(descriptor, [view[done : done + (64 << 20)]], start + done)
        if not count:
            raise OSError(errno.EIO, "truncated while it was read")
        done += count
    return bytes(data)
