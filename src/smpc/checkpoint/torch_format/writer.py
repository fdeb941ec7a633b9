"""Writing a checkpoint's files so that an older one in the same place stays until the new one is complete.

    __1f0c_0_0.distcp __1f0c_1_0.distcp      each save's data files have names of their own, by its token
    .metadata                                replaced at once when all are there; it says which of them count
                                             then data files that it does not name are removed

So a process may be killed at any time: what `.metadata` says is always there. torch's own writer removes the old `.metadata` first, and
writes over the old data files. torch.distributed.checkpoint's reader reads what is written here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystemWriter, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from smpc.checkpoint.torch_format.places import is_url, names_in, place_of, replace_file_at_place

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
        self.fs, self.path = place_of(path, self._options)  # type: ignore[assignment]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Go on with another place, or save to the same one again."""
        if checkpoint_id:
            self.fs, self.path = place_of(checkpoint_id, self._options)  # type: ignore[assignment]
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
        replace_file_at_place(self.fs, self.path, METADATA, pickle.dumps(found))
        kept = {info.relative_path for info in found.storage_data.values()}
        for name in names_in(self.fs, self.path):
            if _DATA.fullmatch(name) and name not in kept:
                with contextlib.suppress(OSError):  # the next save tries again
                    self.fs.rm_file(self.fs.concat_path(self.path, name))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any place will do; what cannot be written says so when it is written."""
        return bool(checkpoint_id)
