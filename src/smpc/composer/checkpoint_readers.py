"""Reads checkpoints, full in a file or sharded in a folder, of this Trainer or of mosaicml's, without trusting them.

    reader = open_checkpoint("run/latest-rank0.pt", sharded=None, alone=False)
    reader.shapes["model.head.weight"]                      names and shapes first: tensors on meta
    reader.fill({"model.head.weight": weight})              then each rank its part of each tensor

Nothing is unpickled freely: `.metadata` is read by `smpc.checkpoint`, tensors and plain values with weights_only. From another
Trainer's checkpoint only known values are read: the progress of the run, and the options of the optimizer's groups.
"""

from __future__ import annotations

import datetime
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.torch_version import TorchVersion

from smpc import dist
from smpc.checkpoint.folder.files import archived_records, read_file
from smpc.checkpoint.torch_format.agreement import CoordinatedRanks
from smpc.checkpoint.torch_format.file_systems import is_url
from smpc.checkpoint.torch_format.loading import load_state, warn_of_casts
from smpc.checkpoint.torch_format.reader import TorchFormatReader as FolderFiles
from smpc.composer import storage
from smpc.composer.duration import Timestamp
from smpc.errors import CheckpointError
from smpc.sharding.dtensors import local, own_part_of_sharded
from smpc.sharding.shard import Incoming

_METADATA = ".metadata"
_PREFIX = "state."
_STATE, _MASTER = "optimizer.state.", ".master"  # in folders of other programs, and converted ones
ANY = "*"  # in place of an optimizer's class, where a checkpoint does not say it
_PLAIN_CLASSES: list[Any] = [  # in files of mosaicml's Trainer, beside tensors: times, versions, NumPy's random state
    datetime.timedelta, TorchVersion, np.ndarray, np.dtype, type(np.dtype(np.uint32)), np.empty(0).__reduce__()[0],
]  # fmt: skip


class Reader(Protocol):
    """The contents of a checkpoint. `shapes`: tensors on meta, as `model.<name>`, `optimizers.<Class>.state.<name>.<key>`."""

    shapes: Mapping[str, Tensor]
    plain: Mapping[str, Any]

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors of these shapes, by name, or this rank's parts of them. Collective."""

    def rng(self, rank: int) -> Mapping[str, Any] | None:
        """The random state of a rank; None where there is none that is known."""


class FileReader:
    """A full checkpoint. `alone`: rank 0 reads, and gives the others tensor by tensor."""

    def __init__(self, path: str, *, alone: bool) -> None:
        self._alone = alone
        self._tensors: dict[str, Tensor] = {}
        self._rng: Mapping[str, Any] = {}
        self.plain: Mapping[str, Any] = {}
        self.shapes: Mapping[str, Tensor]
        if alone:
            storage.on_rank_0(lambda: self._open(path))
        else:
            self._open(path)
        shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in self._tensors.items()}
        told: list[Any] = [(shapes, self.plain, self._rng)]
        if alone:
            dist.broadcast_object_list(told)
        self.shapes, self.plain, self._rng = told[0]
        self._incoming = Incoming.of(self.shapes.values(), 0)

    def _open(self, path: str) -> None:
        with storage.fetched(path) as file, torch.serialization.safe_globals(_PLAIN_CLASSES):
            found = read_file(file, map_location="cpu", mmap="archives")
        try:
            state = found["state"]
            self.plain = (
                json.loads(state["plain"]) if "plain" in state else _of_another(_nested_in_readers_form(state), path)
            )
            self._rng = found.get("rng", {})
            self._tensors = dict(
                _flat_tensors({name: state[name] for name in ("model", "optimizers") if name in state})
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path}: not a checkpoint of a Trainer: {type(error).__name__}: {error}") from error

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """See Reader."""
        if dist.get_global_rank() == 0:
            warn_of_casts(targets, {name: described.dtype for name, described in self.shapes.items()})
        for name, target in targets.items():
            values = self._tensors.get(name, self.shapes[name])
            values = self._incoming.take(values) if self._alone else values
            local(target).copy_(own_part_of_sharded(target, values))

    def rng(self, rank: int) -> Mapping[str, Any] | None:
        """See Reader."""
        found = self._rng.get(str(rank)) if isinstance(self._rng, Mapping) else None
        return found if isinstance(found, Mapping) else None


def _flat_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a nested dict, by names with dots."""
    for name, value in tree.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from _flat_tensors(value, f"{prefix}{name}.")


class FolderReader:
    """A sharded checkpoint: each rank reads what it needs. `planner`: torch's or a script's own, for tensors."""

    def __init__(self, path: str, planner: LoadPlanner | None) -> None:
        self._path, self._planner = path, planner
        found = FolderFiles(path).read_metadata()
        entries = found.state_dict_metadata
        self._tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._plain = [name for name in entries if name not in self._tensors]
        self._prefix = (
            _PREFIX if any(name.startswith(_PREFIX) for name in entries) else ""
        )  # a script's own, or converted
        self._names = _keys_in_readers_form(self._tensors, self._prefix)
        self.shapes: Mapping[str, Tensor] = {name: self._tensors[key] for name, key in self._names.items()}
        self.plain: Mapping[str, Any] = {}
        if f"{_PREFIX}plain" in self._plain:
            self.plain = json.loads(self._values([f"{_PREFIX}plain"])[f"{_PREFIX}plain"])
        else:
            paths = {
                name: _path_in_readers_form(tuple(found.planner_data.get(name, name.split("."))))
                for name in self._plain
            }
            known = self._values([name for name, at in paths.items() if _is_known(at)])
            values = {paths[name]: value for name, value in known.items()}
            self.plain = _of_another(values, path) if self._prefix else {"groups": _optimizer_groups(values)}

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """See Reader."""
        state = {self._names[name]: target for name, target in targets.items()}
        group = distributed.group.WORLD if distributed.is_initialized() else None
        if state:
            load_state(state, FolderFiles(self._path), CoordinatedRanks(group), self._planner, same_keys=False)

    def rng(self, rank: int) -> Mapping[str, Any] | None:
        """See Reader."""
        found = self._own(f"rng.{rank}.")
        if found is None:
            return None
        loader = self._values([name for name in self._plain if name == f"rng.{rank}.loader"])
        return found | {"loader": next(iter(loader.values()), "null"), "begun": self._own(f"rng.{rank}.begun.")}

    def _own(self, prefix: str) -> dict[str, Any] | None:
        if f"{prefix}plain" not in self._plain:
            return None
        names = [name for name in self._tensors if name.startswith(prefix) and "." not in name.removeprefix(prefix)]
        wanted = {name: torch.empty_like(self._tensors[name], device="cpu") for name in names}
        found = self._values([f"{prefix}plain"], wanted)
        return {name.removeprefix(prefix): value for name, value in found.items()}

    def _values(self, names: list[str], tensors: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
        """Values that are no tensors, for this rank alone, beside tensors that are filled."""
        state: dict[str, Any] = {**dict.fromkeys(names), **(tensors or {})}
        if state:
            load_state(state, FolderFiles(self._path), CoordinatedRanks(None), same_keys=False)
        return state


def _keys_in_readers_form(keys: Iterable[str], prefix: str) -> dict[str, str]:
    """The keys of a folder's tensors by the names that a Trainer has for them."""
    names = {key.removeprefix(prefix): key for key in keys if key.startswith(prefix)}
    if prefix:
        return names
    state = {name.removeprefix(_STATE): key for name, key in names.items() if name.startswith(_STATE)}
    found = {name: key for name, key in names.items() if not name.startswith(_STATE)}
    for name, key in state.items():
        of_model = f"model.{name.removesuffix(_MASTER)}"
        if name.endswith(_MASTER) and of_model in found:  # of a half-precision parameter
            found[of_model] = key
        else:
            found[f"optimizers.{ANY}.state.{name}"] = key
    return found


def _nested_in_readers_form(state: Any) -> dict[tuple[Any, ...], Any]:
    """The known values of another Trainer's file, by path, in the form of a folder."""
    found: dict[tuple[Any, ...], Any] = {
        ("timestamp", "Timestamp", key): value for key, value in state["timestamp"]["Timestamp"].items()
    }
    for kind, saved in state.get("optimizers", {}).items():
        for index, group in enumerate(saved.get("param_groups", ())):
            found |= {("optimizers", kind, "param_groups", index, key): value for key, value in group.items()}
    return {path: value for path, value in found.items() if _is_known(path)}


def _path_in_readers_form(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The path below `state`, in a Trainer's form, of a value that is not a tensor."""
    return ("optimizers", ANY, *path[1:]) if path[0] == "optimizer" else path[1:]


def _is_known(path: tuple[Any, ...]) -> bool:
    if path[-1:] == ("params",) and path[1:2] != (ANY,):  # mosaicml's names
        return False
    if path[:2] == ("timestamp", "Timestamp"):
        return len(path) == 3 and path[2] in Timestamp.__dataclass_fields__
    return path[:1] == ("optimizers",) and path[2:3] == ("param_groups",) and len(path) == 5


def _of_another(found: Mapping[tuple[Any, ...], Any], path: str) -> dict[str, Any]:
    """The plain values of another Trainer's checkpoint, in our form; a warning names the rest."""
    warnings.warn(
        f"{path} is another Trainer's: its random states, schedulers, callbacks and data loaders are not taken",
        stacklevel=2,
    )
    return {
        "timestamp": {at[2]: int(value) for at, value in found.items() if at[0] == "timestamp"},
        "groups": _optimizer_groups(found),
    }


def _optimizer_groups(found: Mapping[tuple[Any, ...], Any]) -> list[dict[str, Any]]:
    """The groups of the optimizer in a checkpoint."""
    groups: dict[int, dict[str, Any]] = {}
    for at, value in found.items():
        if at[0] == "optimizers":
            groups.setdefault(int(at[3]), {})[str(at[4])] = value
    return [groups[index] for index in sorted(groups)]


def find_checkpoint(path: str, sharded: bool | None) -> tuple[str, bool]:
    """The path of a checkpoint, with links resolved, and whether it is a folder; on this rank only. Raises CheckpointError if there is
    none.

    `{rank}` in the path is 0, as rank 0 writes what it names; files of several ranks are of an old format. `sharded`: what the
    configuration says; None: either.
    """
    template, path = path, path.replace("{rank}", "0")
    other = template.replace("{rank}", "1")
    if other != path and storage.exists(other) and not storage.is_folder(storage.followed(other)):
        raise CheckpointError(
            f"load_path {template!r}: checkpoints with a file for each rank, as torch 1.13 has them, are not read; convert them "
            "with the version that wrote them"
        )
    storage.restore_replaced(path)
    if not storage.exists(path) and not os.path.islink(path):
        raise CheckpointError(f"load_path: no checkpoint at {path}")
    real = storage.followed(path)
    storage.restore_replaced(real)
    if not storage.exists(real):
        raise CheckpointError(f"load_path: no checkpoint at {path}, which leads to {real}")
    is_folder = storage.is_folder(real)
    parent, _, name = real.rpartition("/")
    if not is_folder and (name == _METADATA or name.endswith(".distcp")):
        raise CheckpointError(
            f"load_path {path!r}: expected the folder of a sharded checkpoint, found one of its files; give {parent or '.'!r}"
        )
    if sharded is not None and sharded != is_folder:
        wanted, is_there = ("a folder", "a file") if sharded else ("a file", "a folder")
        raise CheckpointError(
            f"load_path {path!r}: expected {wanted}, as state_dict_type {'sharded' if sharded else 'full'} has it, found {is_there}; "
            f"give state_dict_type {'full' if sharded else 'sharded'}"
        )
    if is_folder and not storage.exists(f"{real}/{_METADATA}"):
        raise CheckpointError(f"load_path {path!r}: expected {_METADATA} in the folder, found none")
    return real, is_folder


def progress_of(path: str) -> Timestamp:
    """How far the run had come when it saved a checkpoint; no tensor is read. On this rank only.

    Raises CheckpointError for what does not say it.
    """
    try:
        if storage.is_folder(path):
            with warnings.catch_warnings(action="ignore"):  # it is looked at, and not loaded
                counts = dict(FolderReader(path, None).plain["timestamp"])
        else:
            with storage.opened(path) as file:
                tree = archived_records(file, path).by_name()
            for name in ("state", "timestamp", "Timestamp"):
                tree = tree[name].by_name()
            counts = {name: value for name, value in tree.items() if name in Timestamp.__dataclass_fields__}
        found = Timestamp(**counts)
        if not all(isinstance(value, int) for value in found.fields().values()):
            raise TypeError(f"expected numbers, found {counts}")
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        raise CheckpointError(f"{path}: not a checkpoint of a Trainer: {type(error).__name__}: {error}") from error
    return found


def check_is_whole(path: str) -> None:
    """Raise CheckpointError for a checkpoint that has not all its files, or not as they were written. On this rank only."""
    with warnings.catch_warnings(action="ignore"):  # of checksums that are missing: `open_checkpoint` gives it
        storage.check_files(path)
    if storage.is_folder(path):
        named = {info.relative_path for info in FolderFiles(path).read_metadata().storage_data.values()}
        missing = sorted(name for name in named if not storage.exists(f"{path}/{name}"))
        if missing:
            raise CheckpointError(f"{path}: missing: {', '.join(missing[:5])}")


def open_checkpoint(path: str, *, sharded: bool | None, alone: bool, planner: LoadPlanner | None = None) -> Reader:
    """A reader of a file or a folder, verified first; see `find_checkpoint`. Collective."""
    found: list[Any] = [None, False]

    def check() -> None:
        found[:] = find_checkpoint(path, sharded)
        storage.check_files(found[0])

    storage.on_rank_0(check)
    dist.broadcast_object_list(found)
    real = found[0] if is_url(path) else storage.followed(path.replace("{rank}", "0"))
    return FolderReader(real, planner) if found[1] else FileReader(real, alone=alone)
