"""The loop: batches, epochs, checkpoints, evaluation. All arguments are checked before any process group is made."""

from __future__ import annotations

import dataclasses
import functools
import random
import string
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from smpc import dist
from smpc.checkpoint.rng import capture_rng, restore_rng
from smpc.composer import arguments as checked
from smpc.composer import checkpoint
from smpc.composer.batch_step import Stepper
from smpc.composer.checkpoint import LossScale, State
from smpc.composer.checkpoint_folder import SaveSettings, named
from smpc.composer.checkpoint_readers import open_checkpoint
from smpc.composer.duration import Duration
from smpc.composer.microbatches import check_alike, check_same_batch, moved, num_samples, share_random_state
from smpc.composer.model import ComposerModel
from smpc.errors import CheckpointError, ConfigError, UsageError
from smpc.fsdp import prepare
from smpc.sharding.out_of_memory import Agreement

_END = object()


class Trainer:
    """Trains a ComposerModel: docs/trainer.md describes every argument, with units and defaults.

    Every argument is by keyword; unknown arguments are refused by name. Raises ConfigError, ConfigTypeError or ConfigUnsupportedError
    for invalid arguments, and CheckpointError if `load_path` does not fit. Collective.
    """

    def __init__(
        self,
        *,
        model: ComposerModel,
        optimizers: Any = None,
        train_dataloader: Iterable[Any] | None = None,
        eval_dataloader: Iterable[Any] | None = None,
        max_duration: int | str | None = None,
        schedulers: Any = None,
        step_schedulers_every_batch: bool = False,
        device: Any = None,
        precision: str | None = None,
        device_train_microbatch_size: int | str | None = None,
        accumulate_train_batch_on_tokens: bool = False,
        fsdp_config: Any = None,
        parallelism_config: Any = None,
        deepspeed_config: Any = None,
        save_folder: str | None = None,
        save_filename: str = "ep{epoch}-ba{batch}-rank{rank}.pt",
        save_latest_filename: str | None = "latest-rank{rank}.pt",
        save_best_filename: str | None = None,
        save_interval: int | str = "1ep",
        save_overwrite: bool = False,
        save_weights_only: bool = False,
        save_num_checkpoints_to_keep: int = -1,
        load_path: str | None = None,
        load_weights_only: bool = False,
        load_strict_model_weights: bool = True,
        load_ignore_keys: Sequence[str] | None = None,
        autoresume: bool = False,
        run_name: str | None = None,
        eval_interval: int | str = 1,
        callbacks: Any = None,
        seed: int | None = None,
        dist_timeout: float = 300.0,
        ddp_sync_strategy: str | None = None,
        **others: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "others")}
        found = checked.check(given, others)
        how, loader = found.how, train_dataloader
        save_folder, load_path = found.places
        self._save_interval, self._eval_interval = found.save_interval, found.eval_interval
        self._max_duration = found.max_duration
        _begin_training(given, found)
        self._train, self._eval, self._by_batch = loader, eval_dataloader, step_schedulers_every_batch
        self._device = torch.device("cuda", dist.get_local_rank()) if how.device == "gpu" else torch.device("cpu")
        self._callbacks = found.callbacks
        self.state = State(model, found.optimizer, found.schedulers)
        self.state.device_train_microbatch_size, self.state.run_name = how.microbatch_size, run_name or _drawn_name()
        save_folder = None if save_folder is None else named(save_folder, {"run_name": self.state.run_name})
        names = (save_filename, save_latest_filename, how.prefix, save_best_filename)
        self._save = SaveSettings(
            save_folder, names, save_overwrite, save_weights_only, save_num_checkpoints_to_keep, how.save_planner
        )
        self._stepper = self._made(how, ddp_sync_strategy, by_tokens=accumulate_train_batch_on_tokens)
        newest = self._save.newest(self.state) if autoresume else None
        options = (load_strict_model_weights, found.ignored)
        self._load(newest or load_path, how, *options, weights_only=load_weights_only and newest is None)

    def _made(self, how: checked.TrainingArguments, strategy: str | None, *, by_tokens: bool) -> Stepper:
        """Runs batches: on a sharded model, or on replicas."""
        model, prepared = self.state.model, None
        if how.config is None:
            checked.check_values(model)
            model.to(self._device)
        else:
            prepared = prepare(model, how.config, how.precision, self.state.optimizer, self._device.type, how.tensor)
            if prepared.tensor_group is not None:
                share_random_state(prepared.tensor_group)
            self.state.numbered = prepared.numbered
            if self._save.folder is not None:
                self._save.check_kind(self.state)
        agreement = None
        if how.is_automatic:
            in_step = None if prepared is None else prepared.in_step
            agreement = Agreement.over(model, self._device, is_sliced=how.slices > 1, in_step=in_step)
        by_hand = prepared is None and (how.is_automatic or strategy == "forced_sync")
        scale = None
        if how.precision == "amp_fp16":
            scale = LossScale() if how.scale is None else LossScale.of_zero(how.scale)
        self.state.scale = scale
        return Stepper(
            self.state,
            functools.partial(self._wrapped, by_hand=by_hand, is_sharded=prepared is not None, strategy=strategy),
            prepared,
            how.precision,
            self._device,
            scale,
            how.clipping,
            by_hand,
            agreement,
            strategy == "multi_auto_sync",
            by_tokens,
        )

    def _load(
        self,
        path: str | None,
        how: checked.TrainingArguments,
        strict: bool,
        ignore: tuple[str, ...],
        *,
        weights_only: bool,
    ) -> None:
        if path is None:
            return
        try:
            planner = None if how.config is None else how.config.load_planner
            reader = open_checkpoint(path, sharded=how.is_sharded, alone=how.reads_alone, planner=planner)
            works = [checkpoint.model_loading(self.state, reader, strict=strict, ignore=ignore)]
            if not weights_only:
                works.append(checkpoint.rest_loading(self.state, reader, ignore))
            for work in works:  # all is checked: now it changes
                work()
            self._save.go_on(self.state, path)
            if not how.is_automatic:
                self.state.device_train_microbatch_size = how.microbatch_size
            for buffers in () if self._stepper.prepared is None else self._stepper.prepared.buffers:
                buffers.settle()
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise CheckpointError(f"{path}: not as a Trainer writes it: {type(error).__name__}: {error}") from error

    def _wrapped(self, *, by_hand: bool, is_sharded: bool, strategy: str | None) -> Any:
        model = self.state.model
        if is_sharded or dist.get_world_size() == 1:
            return model
        if by_hand or not any(parameter.requires_grad for parameter in model.parameters()):
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), 0)
            return model
        devices = [self._device.index] if self._device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, find_unused_parameters=strategy == "multi_auto_sync")

    def fit(self, duration: int | str | None = None) -> None:
        """Train until `max_duration`, or for `duration` more, and save the end.

        Raises UsageError without data, parameters to train or an end. Collective.
        """
        if self._train is None:
            raise UsageError("fit: expected a train_dataloader, found None")
        if not any(parameter.requires_grad for parameter in self.state.model.parameters()):
            raise UsageError("fit: expected a model with parameters that require grad, found none")
        end = self._end(duration)
        self._save.check_first(self.state, self._save_interval, end, _batches_of_epoch(self._train))
        first = self.state.timestamp.batch
        if end.is_over(self.state.timestamp):
            warnings.warn(
                f"fit: nothing to train: the run is at {self.state.timestamp}, and ends after {end}", stacklevel=2
            )
        self.state.model.train()
        while not end.is_over(self.state.timestamp):
            began = self.state.timestamp.batch
            for batch, following in self._epoch():
                before = dataclasses.replace(self.state.timestamp)
                self._batch(batch, following)
                if self.state.timestamp.token == before.token:
                    self._check_units(end)
                for callback in self._callbacks:
                    callback(self.state)
                if self._eval is not None and self._eval_interval.passed(before, self.state.timestamp):
                    self._save.save_best(self.state, self.eval())
                if self._save.folder is not None and self._save_interval.passed(before, self.state.timestamp):
                    self.save_checkpoint()
                if end.is_over(self.state.timestamp):
                    break
            if self.state.timestamp.batch == began:
                raise ConfigError("train_dataloader: expected at least one batch, found none")
        if self._save.folder is not None and self.state.timestamp.batch not in (first, self._save.newest_batch):
            self.save_checkpoint()

    def _check_units(self, end: Duration) -> None:
        """For a batch without tokens: raise ConfigError if a duration is counted in tokens."""
        units = {"max_duration": end.unit, "save_interval": None, "eval_interval": None}
        if self._save.folder is not None:
            units["save_interval"] = self._save_interval.unit
        if self._eval is not None:
            units["eval_interval"] = self._eval_interval.unit
        wrong = [name for name, unit in units.items() if unit == "tok"]
        if wrong:
            raise ConfigError(
                f"{', '.join(wrong)}: expected batches with tokens, in input_ids or a tensor of integers with two dimensions, found none; "
                "give samples, batches or epochs"
            )

    def _end(self, duration: int | str | None) -> Duration:
        if duration is not None:
            more, now = Duration.parse(duration, "duration"), self.state.timestamp.fields()
            reached = now[{"ep": "epoch", "ba": "batch", "sp": "sample", "tok": "token"}[more.unit]]
            return Duration(reached + more.count, more.unit)
        if self._max_duration is None:
            raise UsageError("fit: expected max_duration, in the Trainer or as the duration here")
        return self._max_duration

    def _epoch(self) -> Iterator[tuple[Any, Any]]:
        """The batches of this epoch that are not trained yet, each with the one that follows, None after the last."""
        assert self._train is not None, "checked in fit"
        sampler = getattr(self._train, "sampler", None)
        if sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.state.timestamp.epoch)
        batches, batch = self._begun()
        self._stepper.begin()
        told = getattr(self._train, "state_dict", None)
        while batch is not _END:
            place = told() if callable(told) and self._save.folder is not None else None
            if place is not None:
                self.state.begun = capture_rng()  # in which what follows is read
            following = next(batches, _END)
            self.state.loader = None if following is _END else place
            yield batch, None if following is _END else following
            batch = following

    def _begun(self) -> tuple[Iterator[Any], Any]:
        """The data of this epoch from where the run is, and its first batch.

        A loader with a position resumes there, with the random state that it had. Others are read up to the position, from the random
        state at the beginning of the epoch, so they draw the same order again. The run continues with its saved random state.
        """
        assert self._train is not None, "checked in fit"
        state, trained = self.state, self.state.timestamp.batch_in_epoch
        resumed = capture_rng() if trained and state.begun is not None else None
        if resumed is not None and state.begun is not None:
            restore_rng(state.begun)
        else:
            state.begun = capture_rng()
        load = getattr(self._train, "load_state_dict", None)
        knows_place = False
        if state.loader is not None and callable(load):
            load(state.loader)
            trained, knows_place = 0, True
        batches = iter(self._train)
        if knows_place and resumed is not None and state.begun is not None:
            restore_rng(state.begun)  # beginning may have drawn numbers
        for _ in range(trained):
            next(batches, _END)
        batch = next(batches, _END)
        if resumed is not None:
            restore_rng(resumed)
        return batches, batch

    def _batch(self, batch: Any, following: Any | None) -> None:
        check_same_batch(batch, self._stepper.tensor_group)
        samples, tokens = self._stepper.run(moved(batch, self._device), following)
        now, is_last = self.state.timestamp, following is None
        now.batch, now.batch_in_epoch = now.batch + 1, now.batch_in_epoch + 1
        now.sample, now.token = now.sample + samples, now.token + tokens
        if is_last:
            now.epoch, now.batch_in_epoch = now.epoch + 1, 0
        if self._by_batch or is_last:
            for scheduler in self.state.schedulers:
                scheduler.step()

    @torch.no_grad()
    def eval(self) -> float:
        """The mean loss over the evaluation's samples, of all ranks. Raises UsageError without data. Collective."""
        if self._eval is None:
            raise UsageError("eval: expected an eval_dataloader, found None")
        model, was_training = self.state.model, self.state.model.training
        model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for given, counts in self._evaluated(self._eval):
            check_same_batch(given, self._stepper.tensor_group)
            batch = moved(given, self._device)
            loss = float(self._stepper.mean_loss(batch))
            if counts:
                sums += torch.tensor([loss, 1.0], device=self._device) * num_samples(batch)
        dist.all_reduce(sums)
        model.train(was_training)
        if not float(sums[1]):
            raise ConfigError("eval_dataloader: expected at least one batch, found none")
        return float(sums[0] / sums[1])

    def _evaluated(self, loader: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
        """The evaluation's batches, and whether they count: a sharded model runs on all ranks, and those without data repeat their last."""
        batches, last = iter(loader), None
        while True:
            batch = next(batches, _END)
            if self._stepper.prepared is None and batch is _END:
                return
            if self._stepper.prepared is not None:
                there = [bool(each) for each in dist.all_gather(torch.tensor([int(batch is not _END)]))]
                if not any(there):
                    return
                if last is None and not all(there):
                    raise ConfigError(
                        f"eval_dataloader: expected at least one batch on every rank, found none on rank {there.index(False)}"
                    )
            last = last if batch is _END else batch
            yield last, batch is not _END

    def save_checkpoint(self, path: str | None = None) -> str:
        """Save the run now, in `save_folder` or at `path`; where it is. Collective."""
        return self._save.save(self.state, path)


def _batches_of_epoch(loader: Iterable[Any]) -> int | None:
    """How many batches an epoch has; None where nothing says so, as for a DataLoader of an IterableDataset."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # every DataLoader has a length, but for what its data set has
        return None


def _begin_training(given: Mapping[str, Any], found: checked.Arguments) -> None:
    """Process groups, where nothing is wrong that is known before; equal arguments on all ranks; seeds."""
    load_path = found.places[1]
    if load_path is not None and not given["autoresume"]:  # that may have a newer one
        found.how.check_there(load_path)
    dist.initialize_dist(found.how.device, timeout=given["dist_timeout"])
    check_alike(given, given["model"], found.optimizer)
    _seed_rank(given["seed"])


def _seed_rank(given: int | None) -> None:
    """Seeds all generators of this rank."""
    if given is None:
        return
    seed = given + dist.get_global_rank()
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _drawn_name() -> str:
    """One name for all ranks, that no seed changes."""
    own = random.SystemRandom()
    name: list[Any] = [f"{int(time.time())}-{''.join(own.choice(string.ascii_lowercase) for _ in range(6))}"]
    dist.broadcast_object_list(name)
    return str(name[0])
