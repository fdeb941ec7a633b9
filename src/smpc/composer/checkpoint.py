"""Saving a run and resuming it: whole in one file, or sharded over the ranks; resumed on any number of ranks.

    full       {save_folder}/{save_filename}              torch.save by rank 0: {"state": {model, optimizers, timestamp, plain}, "rng"}
    sharded    {save_folder}/{prefix}/.metadata, __{rank}_0.distcp          torch.distributed.checkpoint's, N + 1 files
    latest     {save_folder}/latest-rank0.pt              a link to the newest
    checks     {save_folder}/.smpc/{name}.json            size and crc32 of each file

A checkpoint is complete or absent: it is written under a hidden name, synced to the disk, renamed, and then linked. In object storage,
files of a sharded one have different names for each save, and count once `.metadata` names them. Each rank takes its part of each tensor,
so a checkpoint of any number of ranks, full or sharded, resumes on any other number.

The state of a run, which is passed to callbacks and saved, and its scale of losses.

`LossScale` is the factor on fp16 losses that keeps small gradients above zero. It is halved when one is infinite, and doubled after a
while. All ranks decide alike, also where each holds a part of the gradients.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from smpc import dist
from smpc.checkpoint.folder.files import write_file
from smpc.checkpoint.folder.folders import sync_folder
from smpc.checkpoint.rng import capture_rng, restore_rng
from smpc.checkpoint.torch_format.file_systems import is_url
from smpc.checkpoint.torch_format.saving import TorchFormatWriter
from smpc.composer import storage
from smpc.composer.checkpoint_readers import ANY, Reader
from smpc.composer.duration import Timestamp
from smpc.composer.json_values import decoded, encodable, encoded
from smpc.composer.model import ComposerModel
from smpc.errors import CheckpointError
from smpc.sharding.dtensors import local, sharded_like, whole


@dataclass(slots=True)
class LossScale:
    """`factor` now; `window`: updates without an infinite gradient until it doubles; `patience`: infinite ones until it halves."""

    factor: float = 65536.0
    window: int = 2000
    patience: int = 1
    least: float = 1.0
    is_fixed: bool = False
    good: int = 0
    bad: int = 0

    @classmethod
    def of_zero(cls, given: dict[str, float]) -> LossScale:
        """With the values of a ZeRO configuration's fp16."""
        if given.get("loss_scale", 0.0) > 0:
            return cls(given["loss_scale"], is_fixed=True)
        power = given.get("initial_scale_power", 16.0)
        window, patience = int(given.get("loss_scale_window", 1000)), int(given.get("hysteresis", 2))
        return cls(2.0**power, window, patience, given.get("min_loss_scale", 1.0))

    @torch.no_grad()
    def unscale(self, optimizer: torch.optim.Optimizer) -> bool:
        """Divide the gradients by the factor; whether all are finite on all ranks. Collective."""
        grads = [
            local(parameter.grad)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        is_finite = torch.tensor([1.0], device=grads[0].device if grads else "cpu")
        for grad in grads:
            grad.div_(self.factor)
            is_finite *= grad.isfinite().all().to(is_finite.device)  # some parts may be in CPU memory
        dist.all_reduce(is_finite, "MIN")
        self._learn(bool(is_finite.item()))
        return bool(is_finite.item())

    def _learn(self, is_finite: bool) -> None:
        if self.is_fixed:
            return
        self.good, self.bad = (self.good + 1, self.bad) if is_finite else (0, self.bad + 1)
        if self.bad >= self.patience:
            self.factor, self.bad = max(self.factor / 2, self.least), 0
        if self.good >= self.window:
            self.factor, self.good = self.factor * 2, 0


@dataclass(slots=True)
class State:
    """The state of a run, which callbacks get: `model`, `optimizer`, `schedulers`, `timestamp` and the following.

    `loss`: the mean over all samples of the last batch, on all ranks. `device_train_microbatch_size`: None if batches are not cut.
    `run_name`, `eval_outputs`: as the Trainer has them. `best`: the lowest evaluation loss so far. `scale`: the loss scale in amp_fp16.
    `loader`: the `state_dict` of a data loader within this epoch, None at the end of one, and for loaders without. `begun`: the random
    state at the beginning of this epoch's data; for a loader with a `state_dict`, at its next batch. `numbered`: see
    `smpc.fsdp.Prepared`. `kept`: the names in `save_folder` of the run's checkpoints, oldest first, where their number is limited.
    """

    model: ComposerModel
    optimizer: torch.optim.Optimizer
    schedulers: tuple[torch.optim.lr_scheduler.LRScheduler, ...] = ()
    timestamp: Timestamp = field(default_factory=Timestamp)
    device_train_microbatch_size: int | None = None
    loss: float | None = None
    run_name: str | None = None
    best: float | None = None
    scale: LossScale | None = None
    loader: Any = None
    begun: Mapping[str, Any] | None = None
    numbered: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    eval_outputs: list[Any] = field(default_factory=list)


_OPTIMIZERS, _SCHEDULERS, _TIMESTAMP, _RNG = "state/optimizers", "state/schedulers", "state/timestamp", "rng"


def _plain_state(state: State, groups: bool = True) -> dict[str, Any]:
    """The values of a run that are no tensors."""
    names = _parameter_names(state)
    return {
        "timestamp": asdict(state.timestamp),
        "world_size": dist.get_world_size(),
        "run_name": state.run_name,
        "microbatch": state.device_train_microbatch_size,
        "best": state.best,
        "kept": state.kept,
        "scale": None if state.scale is None else [state.scale.factor, state.scale.good, state.scale.bad],
        "schedulers": [encoded(encodable(scheduler.state_dict())) for scheduler in state.schedulers],
        "groups": [
            {
                key: [names[parameter] for parameter in value] if key == "params" else _jsonable_value(value)
                for key, value in encodable({**group, "params": tuple(group["params"])}).items()
            }
            for group in (state.optimizer.param_groups if groups else ())
        ],
        "values": {
            names[parameter]: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
            for parameter, values in (state.optimizer.state.items() if groups else ())
        },
    }


def _jsonable_value(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Tensor | np.ndarray):
        return value.item() if value.ndim == 0 or value.shape == (1,) else value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _jsonable_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable_value(inner) for inner in value]
    return value.item() if isinstance(value, np.generic) else value


def _parameter_names(state: State) -> dict[Any, str]:
    return {parameter: name for name, parameter in state.model.named_parameters()}


def _state_tree(state: State, *, weights_only: bool) -> dict[str, Any]:
    """The state to save, with tensors as this rank has them."""
    kind = type(state.optimizer).__name__
    names = _parameter_names(state)
    found: dict[str, Any] = {
        "model": {_name_in_composer_checkpoint(state, name): value for name, value in state.model.state_dict().items()},
        "timestamp": {"Timestamp": asdict(state.timestamp)},
        "plain": json.dumps(_plain_state(state, groups=not weights_only)),
    }
    if not weights_only:
        moments = {
            _name_in_composer_checkpoint(state, names[parameter]): {
                key: value for key, value in values.items() if isinstance(value, Tensor)
            }
            for parameter, values in state.optimizer.state.items()
        }
        found["optimizers"] = {kind: {"state": moments}}
    return found


def _name_in_composer_checkpoint(state: State, name: str) -> str:
    """The name in a sharded checkpoint: with the number of this rank's group, where groups have values of their own."""
    return f"{name}@{state.numbered[name][0]}" if name in state.numbered else name


def _names_there(state: State, names: Iterable[str], there: Collection[str]) -> dict[str, str]:
    """The names in a checkpoint, which has `there`, of these names of the state; names that it lacks are left out.

    Raises CheckpointError for values of other groups than the state has: none is the right one.
    """
    numbers: dict[str, set[int]] = {}
    for stored in there:
        name = _plain_name(stored)
        if name != stored:
            numbers.setdefault(name, set()).add(int(stored.rpartition("@")[2]))
    found, wrong = {}, []
    for name in names:
        number, count = state.numbered.get(name, (0, 1))
        if name in there:
            found[name] = name
        elif name in numbers and (name not in state.numbered or numbers[name] != set(range(count))):
            wrong.append(f"{name} as {len(numbers[name])} groups have it, the model as {count}")
        elif name in numbers:
            found[name] = f"{name}@{number}"
    if wrong:
        raise CheckpointError(
            f"the checkpoint does not fit the model: it has {'; '.join(wrong[:5])}; give process groups that are as many, or leave these "
            "names out with load_ignore_keys"
        )
    return found


def _plain_name(stored: str) -> str:
    """The name without the number of a group."""
    name, mark, number = stored.rpartition("@")
    return name if mark and number.isdecimal() else stored


def _own_in_composer_checkpoint(state: State) -> dict[str, Any]:
    """State of this rank only: its random state, the random state at the beginning of the epoch's data, and its data loader's position."""
    begun = {} if state.begun is None or not state.timestamp.batch_in_epoch else _random_state_tensors(state.begun)
    return {**_random_state_tensors(capture_rng()), "loader": encoded(state.loader), "begun": begun}


def _random_state_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """The random state of a rank, as tensors and JSON."""
    version, numbers, gauss = state["python"]
    name, keys, *rest = state["numpy"]
    tensors = {"torch": state["torch"], "python": numbers, "numpy": keys}
    tensors |= {f"cuda{index}": tensor for index, tensor in enumerate(state["cuda"])}
    return {**tensors, "plain": json.dumps([version, gauss, name, rest, len(state["cuda"])])}


def _captured_in_composer_checkpoint(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A random state as `restore_rng` takes it."""
    version, gauss, name, rest, count = json.loads(saved["plain"])
    cuda = [saved[f"cuda{index}"] for index in range(count)]
    python = (version, saved["python"], gauss)
    return {"torch": saved["torch"], "cuda": cuda, "python": python, "numpy": (name, saved["numpy"], *rest)}


def save_full(state: State, path: str, *, weights_only: bool, overwrite: bool) -> str:
    """Rank 0 writes one file with whole tensors. Collective; the path."""
    tree = _mapped_checkpoint_tree(_state_tree(state, weights_only=weights_only), lambda tensor: whole(tensor).cpu())
    rng = dist.all_gather_object(_own_in_composer_checkpoint(state))

    def write() -> None:
        storage.check_free(path, overwrite=overwrite)
        with storage.written(path) as file:
            write_file({"state": tree, "rng": {str(rank): own for rank, own in enumerate(rng)}}, file)

    storage.on_rank_0(write)
    return path


def _mapped_checkpoint_tree(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree.detach())
    return (
        {name: _mapped_checkpoint_tree(value, change) for name, value in tree.items()}
        if isinstance(tree, Mapping)
        else tree
    )


def save_sharded(
    state: State, path: str, *, weights_only: bool, overwrite: bool, planner: SavePlanner | None = None
) -> str:
    """Every rank writes its parts into a folder. Collective; the path. `planner`: torch's or a script's own."""
    tree = {
        "state": _state_tree(state, weights_only=weights_only),
        "rng": {str(dist.get_global_rank()): _own_in_composer_checkpoint(state)},
    }
    if is_url(path):
        return _save_remote(tree, path, overwrite=overwrite, planner=planner)
    parent, name = os.path.split(os.path.abspath(path))
    draft = os.path.join(parent, f".{name}.draft")

    def begin() -> None:
        storage.restore_replaced(path)
        storage.check_free(path, overwrite=overwrite)
        shutil.rmtree(draft, ignore_errors=True)  # of a job that was killed
        os.makedirs(draft)

    def publish() -> None:
        for file in sorted(Path(draft).iterdir()):
            _sync_file(str(file))
        sync_folder(draft)
        storage.announce_checks(path, draft)
        aside = storage.replaced_name(path)
        shutil.rmtree(aside, ignore_errors=True)
        if os.path.isdir(path):
            os.rename(path, aside)
        os.rename(draft, path)
        sync_folder(parent)
        storage.adopt_checks(path)
        shutil.rmtree(aside, ignore_errors=True)

    storage.on_rank_0(begin)
    _save_tree(tree, path, checkpoint_id=draft, planner=planner)
    storage.on_rank_0(publish)
    return path


def _save_remote(tree: dict[str, Any], path: str, *, overwrite: bool, planner: SavePlanner | None) -> str:
    """Into object storage, where nothing can be renamed: the old one stays until the new `.metadata` is written."""

    def begin() -> None:
        storage.check_free(path, overwrite=overwrite)
        storage.forget_checks(path)

    storage.on_rank_0(begin)
    _save_tree(tree, path, storage_writer=TorchFormatWriter(path), planner=planner)
    storage.on_rank_0(lambda: storage.write_checks(path))
    return path


def _save_tree(tree: dict[str, Any], path: str, **options: Any) -> None:
    """Saves a nested dict; its failures on all ranks are one CheckpointError."""
    try:
        save(tree, **options)
    except CheckpointException as error:
        failures = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items()))
        raise CheckpointError(f"cannot write {path}: {failures[:2000]}") from error


def _sync_file(path: str) -> None:
    """Brings a file to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@torch.no_grad()
def model_loading(state: State, reader: Reader, *, strict: bool, ignore: Sequence[str]) -> Callable[[], None]:
    """What fills the parameters and buffers of the model; raises CheckpointError for names and shapes, before a tensor changes."""
    own = dict(state.model.state_dict())
    there = {name.removeprefix("model."): tensor for name, tensor in reader.shapes.items() if name.startswith("model.")}

    def is_skipped(name: str) -> bool:
        return any(fnmatch.fnmatch(f"state/model/{each}", p) for p in ignore for each in (name, _plain_name(name)))

    called = _names_there(state, [name for name in own if not is_skipped(name)], there)
    missing = sorted(name for name in own if name not in called and not is_skipped(name))
    unexpected = sorted(
        name for name in there if name not in own and _plain_name(name) not in called and not is_skipped(name)
    )
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"the checkpoint does not fit the model: missing {', '.join(missing[:8]) or 'nothing'}, unexpected "
            f"{', '.join(unexpected[:8]) or 'nothing'}; load_strict_model_weights=False takes what fits"
        )
    targets = {stored: own[name] for name, stored in called.items()}
    wrong = [
        f"{name}: expected the shape {tuple(target.shape)}, found {tuple(there[name].shape)}"
        for name, target in targets.items()
        if target.shape != there[name].shape
    ]
    if wrong:
        raise CheckpointError("the checkpoint does not fit the model: " + "; ".join(wrong[:8]))
    strangers = [
        pattern
        for pattern in ignore
        if not any(fnmatch.fnmatch(f"state/model/{name}", pattern) for name in {*own, *there})
        and not any(_is_left_out(part, [pattern]) for part in (_OPTIMIZERS, _SCHEDULERS, _TIMESTAMP, _RNG))
    ]
    if strangers:
        warnings.warn(f"load_ignore_keys: nothing is called {', '.join(strangers[:8])}", stacklevel=4)
    filled = {f"model.{name}": target for name, target in targets.items()}
    return torch.no_grad()(lambda: reader.fill(filled))


def _is_left_out(part: str, ignore: Sequence[str]) -> bool:
    """Whether patterns name a part of a checkpoint, or all below it."""
    return any(fnmatch.fnmatch(part, each) for pattern in ignore for each in (pattern, pattern.removesuffix("/*")))


def rest_loading(state: State, reader: Reader, ignore: Sequence[str]) -> Callable[[], None]:
    """What fills the optimizer, the schedulers, how far the run has come, and random states; all of it is checked before, and read.

    Collective, as is the call of what is returned.
    """
    _check_plain(reader.plain)
    _warn_of_missing_parts(reader, ignore)
    works: list[Callable[[], None]] = []
    if not _is_left_out(_OPTIMIZERS, ignore):
        works.append(_load_optimizer(state, reader))
    if not _is_left_out(_SCHEDULERS, ignore):
        works.append(_load_schedulers(state, reader.plain.get("schedulers")))
    timestamp = state.timestamp if _is_left_out(_TIMESTAMP, ignore) else Timestamp(**reader.plain.get("timestamp", {}))
    if not _is_left_out(_RNG, ignore):
        works.append(_load_random_state(state, reader, knows_place=not _is_left_out(_TIMESTAMP, ignore)))

    def load() -> None:
        for work in works:
            work()
        state.timestamp = timestamp
        state.device_train_microbatch_size = state.device_train_microbatch_size or reader.plain.get("microbatch")
        best = reader.plain.get("best")
        state.best = None if best is None or math.isnan(best) else best  # older versions stored NaN
        state.kept = list(reader.plain.get("kept", ()))
        if state.scale is not None and reader.plain.get("scale"):
            state.scale.factor, state.scale.good, state.scale.bad = reader.plain["scale"]

    return load


def _warn_of_missing_parts(reader: Reader, ignore: Sequence[str]) -> None:
    """Raise CheckpointError for weights alone, and warn of a checkpoint that lacks a part of a run."""
    has_optimizer = any(name.startswith("optimizers.") for name in reader.shapes)
    if not reader.plain.get("timestamp"):
        if not has_optimizer:
            raise CheckpointError(
                "the checkpoint does not say how far a run has come; give load_weights_only=True for its weights"
            )
        warnings.warn(
            "the checkpoint has weights and an optimizer's state, and does not say how far a run has come: it begins at batch 0",
            stacklevel=5,
        )
    if not (has_optimizer or reader.plain.get("groups")) and not _is_left_out(_OPTIMIZERS, ignore):
        warnings.warn(
            "the checkpoint has weights, and no optimizer (save_weights_only): that begins anew", stacklevel=5
        )


def _load_random_state(state: State, reader: Reader, *, knows_place: bool) -> Callable[[], None]:
    """What restores this rank's random state, and with it its place in the data; nothing on another number of ranks."""
    rng = reader.rng(dist.get_global_rank())
    if rng is None or reader.plain.get("world_size") != dist.get_world_size():
        return lambda: None
    captured = _captured_in_composer_checkpoint(rng)
    begun = _captured_in_composer_checkpoint(rng["begun"]) if rng.get("begun") else None
    loader = decoded(rng.get("loader", "null"))

    def load() -> None:
        restore_rng(captured)
        if knows_place:
            state.begun, state.loader = begun, loader

    return load


def _load_schedulers(state: State, saved: Sequence[Any] | None) -> Callable[[], None]:
    """`saved`: None in checkpoints of other Trainers."""
    if saved is not None and len(saved) != len(state.schedulers):
        warnings.warn(
            f"the checkpoint has {len(saved)} schedulers, and the Trainer {len(state.schedulers)}: what one of them alone has is not "
            "taken, or begins anew",
            stacklevel=5,
        )
    read = [decoded(own) if isinstance(own, str) else dict(own) for own in saved or ()]  # older ones have no kinds

    def load() -> None:
        for scheduler, own in zip(state.schedulers, read, strict=False):
            scheduler.load_state_dict(own)

    return load


def _check_plain(plain: Mapping[str, Any]) -> None:
    """Raise CheckpointError for values that no run has, before one of them is taken."""
    counts = dict(plain.get("timestamp") or {})
    wrong = [f"timestamp.{name}: {value!r}" for name, value in counts.items() if not _is_number(value, int)]
    best, size, scale = (plain.get(name) for name in ("best", "microbatch", "scale"))
    if best is not None and not isinstance(best, int | float):
        wrong.append(f"best: {best!r}")
    if size is not None and not (_is_number(size, int) and size):
        wrong.append(f"microbatch: {size!r}")
    kept = plain.get("kept", [])
    if not (isinstance(kept, list) and all(isinstance(name, str) for name in kept)):
        wrong.append(f"kept: {kept!r}")
    if scale is not None and not (len(scale) == 3 and all(_is_number(value, int | float) for value in scale)):
        wrong.append(f"scale: {scale!r}")
    if wrong:
        raise CheckpointError(f"the checkpoint: expected values as a run has them, found {'; '.join(wrong)[:500]}")


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and value >= 0


def _load_optimizer(state: State, reader: Reader) -> Callable[[], None]:
    optimizer, kind = state.optimizer, type(state.optimizer).__name__
    saved_kinds = {name.split(".")[1] for name in reader.shapes if name.startswith("optimizers.")} - {ANY}
    if saved_kinds and saved_kinds != {kind}:
        raise CheckpointError(f"the optimizer: expected a checkpoint of {kind}, found {', '.join(sorted(saved_kinds))}")
    names, groups = _parameter_names(state), reader.plain.get("groups", ())
    _check_groups([[names[p] for p in group["params"]] for group in optimizer.param_groups], groups)
    _check_options(optimizer, groups)
    targets: dict[str, Tensor] = {}
    states: dict[Any, dict[str, Any]] = {}
    root = f"optimizers.{kind if saved_kinds else ANY}.state."
    below = (name for name in reader.shapes if name.startswith(root))
    there = {name.removeprefix(root).rpartition(".")[0] for name in below}
    called = _names_there(state, names.values(), there)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        prefix = f"{root}{called.get(names[parameter], names[parameter])}."
        keys = [name.removeprefix(prefix) for name in reader.shapes if name.startswith(prefix)]
        values = {
            key: _room_for_composer_state(parameter, reader.shapes[prefix + key]) for key in keys if "." not in key
        }
        targets |= {prefix + key: value for key, value in values.items()}
        values |= reader.plain.get("values", {}).get(names[parameter], {})
        if values:
            states[parameter] = values
    if saved_kinds and not targets:
        raise CheckpointError(
            "the optimizer: expected states under the names of the model's parameters, found none of them; give load_weights_only=True, or "
            "load_ignore_keys=['state/optimizers']"
        )

    def load() -> None:
        with torch.no_grad():
            reader.fill(targets)
        optimizer.state.update(states)
        for group, saved in zip(optimizer.param_groups, groups, strict=False):
            for key, value in saved.items():
                if key != "params" and isinstance(group.get(key), Tensor):
                    group[key].copy_(torch.as_tensor(value))
                elif key != "params":
                    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value

    return load


def _check_options(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise CheckpointError for options of groups that are no numbers, where the optimizer has numbers."""
    for group, saved in zip(optimizer.param_groups, groups, strict=False):
        for key, value in saved.items():
            own = group.get(key)
            if isinstance(own, float) and not isinstance(value, int | float):
                raise CheckpointError(f"the optimizer: {key}: expected a number, found {value!r}")
            if isinstance(own, Tensor) and torch.as_tensor(value).shape not in (own.shape, ()):
                raise CheckpointError(f"the optimizer: {key}: expected the shape {tuple(own.shape)}, found {value!r}")


def _check_groups(own: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Raise CheckpointError for options of other groups than the optimizer has."""
    if saved and len(saved) != len(own):
        raise CheckpointError(f"the optimizer: expected {len(own)} groups of parameters, found {len(saved)}")
    for index, (names, group) in enumerate(zip(own, saved, strict=False)):
        others = sorted(set(names) ^ set(group.get("params", names)))
        if others:
            raise CheckpointError(
                f"the optimizer: expected group {index} to have the parameters that it had when it was saved; they differ in "
                f"{', '.join(others[:5])}; make the optimizer as it was, or give load_ignore_keys=['state/optimizers']"
            )


def _room_for_composer_state(parameter: Tensor, described: Tensor) -> Tensor:
    """Memory for an optimizer's state of a parameter: sharded like it, if it has the same shape."""
    if described.shape != parameter.shape or not described.dim():
        return torch.empty_like(described, device="cpu")
    return sharded_like(parameter, torch.empty_like(local(parameter), dtype=described.dtype))
