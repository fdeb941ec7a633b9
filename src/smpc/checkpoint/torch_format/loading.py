"""Loading a state dict in place by the planners and readers of torch.distributed.checkpoint, whatever the ranks that saved it.

    load_state(state_dict, Reader("run/step_100"), ranks)       collective; tensors are filled, other values are replaced

Tensors of another dtype than the saved are filled by casting, as by torch; a warning says how many are, and which (`warn_of_casts`).

Data is verified before it is unpickled, and unpickled only with weights_only (`LoadPlanner`). Keys that the checkpoint lacks raise
MissingKeyError, which is a KeyError, on every rank.
"""

from __future__ import annotations

import io
import math
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner import LoadPlanner as AnyLoadPlanner
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader

from smpc.checkpoint.folder.files import load_tensors
from smpc.checkpoint.format.regular_file import printable
from smpc.checkpoint.torch_format.agreement import CoordinatedRanks
from smpc.errors import CheckpointError, MissingKeyError


class LoadPlanner(DefaultLoadPlanner):
    """torch's planner, but for values that are no tensors, which it would unpickle freely, and for the error of keys that are missing."""

    def create_local_plan(self) -> LoadPlan:
        """This rank's reads.

        torch takes a checkpoint to be of an old version, with other keys, where it has keys that this rank has not: keys of tensors of
        which FSDP1 has given this rank nothing. A checkpoint with all keys of this rank is not an old one.
        """
        assert self.metadata is not None, "set up"
        try:
            if self.state_dict.keys() <= self.metadata.state_dict_metadata.keys():
                plan = create_default_local_load_plan(self.state_dict, self.metadata)
            else:
                plan = super().create_local_plan()
        except (RuntimeError, ValueError) as error:
            present = list(self.metadata.state_dict_metadata)
            missing = [key for key in self.state_dict if key not in present]
            if missing:
                raise MissingKeyError(_missing_as_text(missing, present)) from error
            raise CheckpointError(f"the checkpoint does not fit: {error}") from error
        self._check_all_is_there(plan)
        return plan

    def _check_all_is_there(self, plan: LoadPlan) -> None:
        """CheckpointError if the checkpoint covers only a part of this rank's part of a tensor."""
        found: Counter[str] = Counter()
        for item in plan.items:
            if item.type is LoadItemType.TENSOR:
                found[item.dest_index.fqn] += math.prod(item.lengths)
        for name, value in self.state_dict.items():
            if isinstance(value, Tensor) and not value.is_meta:
                wanted = sum(math.prod(chunk.sizes) for chunk in _create_chunk_list(value))
                if found[name] != wanted:
                    raise CheckpointError(
                        f"the checkpoint has {found[name]} of the {wanted} elements that this rank has of {printable(name)}: it was saved "
                        "by some of the ranks that share it; save one checkpoint of all ranks"
                    )

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take a value that is no tensor."""
        name = read_item.dest_index.fqn
        found = load_tensors(value.getvalue(), f"the value {printable(name)}")
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], found)
        else:
            self.state_dict[name] = found


def warn_of_casts(targets: Mapping[str, Any], saved: Mapping[str, torch.dtype]) -> None:
    """One warning if tensors are about to be filled from tensors of another dtype; `saved` has the saved dtypes by the same names."""
    cast = [
        f"{printable(name)} from {saved[name]} to {target.dtype}"
        for name, target in targets.items()
        if isinstance(target, Tensor) and saved.get(name, target.dtype) is not target.dtype
    ]
    if cast:
        warnings.warn(
            f"load: expected tensors of the dtypes that were saved, found {len(cast)} of others, which are cast: {cast[0]}"
            f"{', ...' if len(cast) > 1 else ''}; give the model the checkpoint's dtype before loading if it should have its exact values",
            stacklevel=3,
        )


def load_state(
    state_dict: dict[str, Any],
    reader: StorageReader,
    ranks: CoordinatedRanks,
    planner: AnyLoadPlanner | None = None,
    *,
    same_keys: bool = True,
) -> None:
    """Fill a state dict. Collective. `same_keys`: check first that all ranks load the same keys.

    Raises CheckpointError on every rank if it fails on one; tensors may have been filled then.
    """
    keys = sorted(map(str, state_dict))
    if same_keys:
        _check_same_keys(ranks.everybody(keys))
    state = {
        key: value.state_dict() if isinstance(value, Stateful) else value for key, value in sorted(state_dict.items())
    }
    chosen = planner or LoadPlanner()
    is_coordinator = ranks.rank == ranks.coordinator

    def plan() -> LoadPlan:
        metadata = reader.read_metadata()
        chosen.set_up_planner(state, metadata, is_coordinator)
        reader.set_up_storage_reader(metadata, is_coordinator)
        if is_coordinator:
            entries = metadata.state_dict_metadata.items()
            saved = {
                name: entry.properties.dtype for name, entry in entries if isinstance(entry, TensorStorageMetadata)
            }
            warn_of_casts(getattr(chosen, "state_dict", state), saved)
        return reader.prepare_local_plan(chosen.create_local_plan())

    central = ranks.gather_scatter(plan, lambda plans: reader.prepare_global_plan(chosen.create_global_plan(plans)))

    def read() -> None:
        reader.read_data(chosen.finish_plan(central), chosen).wait()
        for key, value in state_dict.items():
            if isinstance(value, Stateful):
                value.load_state_dict(state[key])
            else:
                state_dict[key] = state[key]

    ranks.gather_scatter(read, lambda done: done)


def _check_same_keys(found: list[list[str]]) -> None:
    """Raise CheckpointError unless all ranks have the same keys."""
    lines = []
    for rank, keys in enumerate(found):
        missing, extra = sorted(set(found[0]) - set(keys)), sorted(set(keys) - set(found[0]))
        lines += [f"rank {rank} has no {', '.join(missing[:5])}, which rank 0 has"] if missing else []
        lines += [f"rank {rank} has {', '.join(extra[:5])}, which rank 0 has not"] if extra else []
    if lines:
        raise CheckpointError(
            "load: expected the same keys in the state dict of every rank, found others; pass check_keys_matched=False if that is meant\n"
            + "\n".join(lines)
        )


def _missing_as_text(missing: list[str], present: list[str]) -> str:
    """What the checkpoint lacks, for the error."""
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    there = ", ".join(map(printable, present[:5])) + (f" and {len(present) - 5} more" if len(present) > 5 else "")
    return (
        f"the checkpoint has no {', '.join(map(printable, missing[:5]))}{more}; it has {there or 'nothing'}; leave them out of the state "
        "dict, or load another checkpoint"
    )
