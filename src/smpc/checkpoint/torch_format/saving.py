"""Saving a state dict by the planners and writers of torch.distributed.checkpoint, at once or in the background.

    save_state(state_dict, Writer("run/step_100"), ranks)                   collective
    saver.start(StateSaving(state_dict, Writer("run/step_100"), ranks))     the same, of a BackgroundSaver: tensors may change afterwards

          coordinator                          other ranks
    agree    plans of all ranks become one         their plans, of what they have
    (copy)   what this rank writes, no more        the same
    write    own files                             own files
             metadata: it is complete              done, or the error, on every rank

Ranks whose writers have different places save checkpoints of their own in one call, each with its own metadata: the local kind.

`local_parts` makes the state dict of the local kind: one rank's part, without the other ranks.

    local_parts({"model": {"weight": DTensor}})       {"model": {"weight": this rank's part}}, in the same memory

The local kind is loaded by ranks that have the same parts: the same number of shards; replicas may differ.

Writing a checkpoint's files so that an older one in the same place stays until the new one is complete.

    __1f0c_0_0.distcp __1f0c_1_0.distcp      each save's data files have names of their own, by its token
    .metadata                                replaced at once when all are there; it says which of them count
                                             then data files that it does not name are removed

So a process may be killed at any time: what `.metadata` says is always there. torch's own writer removes the old `.metadata` first, and
writes over the old data files. torch.distributed.checkpoint's reader reads what is written here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pickle
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystemWriter, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from smpc.checkpoint.format.draft_content import Shard
from smpc.checkpoint.torch_format.agreement import CoordinatedRanks
from smpc.checkpoint.torch_format.file_systems import file_system_of, is_url, names_in, replace_file

_KIND = "saved"


@dataclass(frozen=True, slots=True)
class _SaveAnswer:
    """The answer to a rank. `metadata`: of the checkpoint that it publishes, if it does. `is_alone`: no other is saved in this call."""

    plan: SavePlan
    metadata: Metadata | None
    members: tuple[int, ...]
    is_alone: bool


def save_state(
    state_dict: dict[str, Any],
    writer: StorageWriter,
    ranks: CoordinatedRanks,
    planner: SavePlanner | None = None,
    *,
    wait: bool = True,
) -> None:
    """Save, and return when the checkpoint is complete. Collective. Raises CheckpointError on every rank if it fails on one.

    `wait`: otherwise a rank returns when its own part is written, and only the coordinator hears of the others.
    """
    saving = StateSaving(state_dict, writer, ranks, planner, wait=wait)
    saving.agree()
    saving.write()


class StateSaving:
    """One save on its way, in the steps of `smpc.checkpoint.async_save.PendingSave`."""

    def __init__(
        self,
        state_dict: dict[str, Any],
        writer: StorageWriter,
        ranks: CoordinatedRanks,
        planner: SavePlanner | None = None,
        *,
        wait: bool = True,
    ) -> None:
        self._state_dict, self._writer, self._ranks, self._wait = state_dict, writer, ranks, wait
        self._planner = planner or DefaultSavePlanner()
        self._part: _SaveAnswer | None = None
        self._parts: list[_SaveAnswer] = []  # of all ranks, where this one coordinates
        self._values: dict[MetadataIndex, io.BytesIO] = {}
        self._failure: Exception | None = None
        self.share: list[Shard] = []  # the tensors that this rank writes

    def agree(self) -> None:
        """Plan who writes what. Collective."""
        self._part = self._ranks.gather_scatter(self._plan, self._divide)
        try:
            self._resolve()
        except Exception as error:  # the others hear of it in the exchange that they wait in
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Make `write` fail on every rank: this one cannot do its part."""
        self._failure = error

    def write(self) -> str:
        """Write and publish. Collective; may run on another thread than `agree`. Returns the place."""
        assert self._part is not None, "agreed"
        if not self._part.is_alone:
            results = self._ranks.gather_scatter(self._write, self._by_publisher)
            self._ranks.gather_scatter(lambda: self._publish(results), lambda done: done)
        elif self._wait:
            self._ranks.gather_scatter(self._write, self._publish_for_all)
        else:
            self._ranks.gather(self._write, self._publish)
        return _place_of_writer(self._writer)

    def _plan(self) -> tuple[str, SavePlan]:
        state = {key: _state_of(value) for key, value in self._state_dict.items()}
        is_coordinator = self._ranks.rank == self._ranks.coordinator
        self._planner.set_up_planner(state, self._writer.storage_meta(), is_coordinator)
        self._writer.set_up_storage_writer(is_coordinator)
        return _place_of_writer(self._writer), self._writer.prepare_local_plan(self._planner.create_local_plan())

    def _divide(self, plans: Sequence[tuple[str, SavePlan]]) -> list[_SaveAnswer]:
        """Every rank's part; ranks with one place make one checkpoint, which the first of them publishes, or the coordinator."""
        parts: dict[int, _SaveAnswer] = {}
        places: dict[str, list[int]] = {}
        for rank, (place, _) in enumerate(plans):
            places.setdefault(place, []).append(rank)
        for members in places.values():
            planned, metadata = self._planner.create_global_plan([plans[rank][1] for rank in members])
            publisher = self._ranks.coordinator if self._ranks.coordinator in members else members[0]
            for rank, plan in zip(members, self._writer.prepare_global_plan(planned), strict=True):
                published = metadata if rank == publisher else None
                parts[rank] = _SaveAnswer(plan, published, tuple(members), is_alone=len(places) == 1)
        self._parts = [parts[rank] for rank in range(len(plans))]
        return self._parts

    def _resolve(self) -> None:
        assert self._part is not None, "agreed"
        self._part = replace(self._part, plan=self._planner.finish_plan(self._part.plan))
        for item in self._part.plan.items:
            found = self._planner.resolve_data(item)
            if isinstance(found, Tensor):
                self.share.append(Shard.whole(_KIND, f"{item.index.fqn}@{item.index.offset}", found.detach()))
            else:
                self._values[item.index] = found

    def _write(self) -> list[WriteResult]:
        if self._failure is not None:
            raise self._failure
        assert self._part is not None, "agreed"
        items = self._part.plan.items
        tensors = dict(zip((item.index for item in items if item.index not in self._values), self.share, strict=True))
        written = self._writer.write_data(self._part.plan, _Resolved(tensors, self._values))
        written.wait()
        self.share, self._values = [], {}  # copies are not needed any more
        results: list[WriteResult] = written.value()
        return results

    def _by_publisher(self, results: Sequence[list[WriteResult]]) -> list[list[list[WriteResult]]]:
        """For each rank that publishes a checkpoint, what its members wrote; nothing for the others."""
        return [[] if part.metadata is None else [results[member] for member in part.members] for part in self._parts]

    def _publish_for_all(self, results: list[list[WriteResult]]) -> list[None]:
        self._publish(results)
        return [None] * self._ranks.size

    def _publish(self, results: list[list[WriteResult]]) -> None:
        assert self._part is not None, "agreed"
        if self._part.metadata is not None:
            self._writer.finish(self._part.metadata, results)


class _Resolved(SavePlanner):
    """A planner whose data exists already."""

    def __init__(self, tensors: Mapping[MetadataIndex, Shard], values: Mapping[MetadataIndex, io.BytesIO]) -> None:
        self._tensors, self._values = tensors, values

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is planned."""

    def create_local_plan(self) -> SavePlan:
        """Nothing is planned."""
        return SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Nothing is planned."""
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Nothing is planned."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """What is written for an item."""
        value = self._values.get(write_item.index)
        return self._tensors[write_item.index].fetch() if value is None else value


def _place_of_writer(writer: StorageWriter) -> str:
    return str(getattr(writer, "checkpoint_id", ""))


def _state_of(value: Any) -> Any:
    return value.state_dict() if isinstance(value, Stateful) else value


def local_parts(value: Any) -> Any:
    """The value with this rank's part in place of every tensor that is divided; dicts and lists are new ones."""
    if isinstance(value, Stateful):
        return local_parts(value.state_dict())
    if isinstance(value, dict):
        return {key: local_parts(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(local_parts(each) for each in value)
    return local_part(value) if isinstance(value, Tensor) else value


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; an empty one if it has none."""
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach()
    if isinstance(tensor, ShardedTensor):
        shards = tensor.local_shards()
        return shards[0].tensor.detach() if shards else torch.empty(0, dtype=tensor.dtype)
    return tensor


METADATA = ".metadata"
_DATA = re.compile(r"__([0-9a-f]{12}_)?\d+_\d+\.distcp")  # of ours, and of torch's own writer

Hook = Callable[[], object]


class TorchFormatWriter(FileSystemWriter):
    """A storage writer for `torch.distributed.checkpoint` too. Hooks are called on every rank, before and after it writes its data."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        pre_write_hooks: Iterable[Hook] = (),
        post_write_hooks: Iterable[Hook] = (),
        *,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__("." if is_url(path) else path, sync_files=not is_url(path))
        self._options = dict(options)
        self._hooks = tuple(pre_write_hooks or ()), tuple(post_write_hooks or ())
        self.fs, self.path = file_system_of(path, self._options)  # type: ignore[assignment]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Go on with another place, or save to the same one again."""
        if checkpoint_id:
            self.fs, self.path = file_system_of(checkpoint_id, self._options)  # type: ignore[assignment]
            self.sync_files = not is_url(checkpoint_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the folder."""
        self.fs.mkdir(self.path)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give this save its token, and each rank's files their names."""
        token = secrets.token_hex(6)
        return [dataclasses.replace(p, storage_data=_StoragePrefix(f"__{token}_{i}_")) for i, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files. Those that are not finished are removed."""
        for hook in self._hooks[0]:
            hook()
        try:
            written = super().write_data(plan, planner)
        except BaseException:
            for name in names_in(self.fs, self.path):
                if name.startswith(plan.storage_data.prefix):
                    with contextlib.suppress(OSError):
                        self.fs.rm_file(self.fs.concat_path(self.path, name))
            raise
        for hook in self._hooks[1]:
            hook()
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish: from here on the new files are the checkpoint."""
        found = dataclasses.replace(
            metadata,
            version=CURRENT_DCP_VERSION,
            storage_data={each.index: each.storage_data for rank in results for each in rank},
            storage_meta=self.storage_meta(),
        )
        replace_file(self.fs, self.path, METADATA, pickle.dumps(found))
        kept = {info.relative_path for info in found.storage_data.values()}
        for name in names_in(self.fs, self.path):
            if _DATA.fullmatch(name) and name not in kept:
                with contextlib.suppress(OSError):  # the next save tries again
                    self.fs.rm_file(self.fs.concat_path(self.path, name))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any place will do; what cannot be written says so when it is written."""
        return bool(checkpoint_id)
