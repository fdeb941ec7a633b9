"""`smp.save_checkpoint` and `smp.resume_from_checkpoint`: model, optimizer, random state and the user's content, in one call on all ranks.

    smp.save_checkpoint(path, tag=f"step{step}", model=model, optimizer=optimizer, user_content={"step": step},
                        num_kept_partial_checkpoints=3)
    content = smp.resume_from_checkpoint(path)          # the newest; before or after the first step

    path/
      step200_partial/          partial=True: a checkpoint of `smpc.checkpoint`, of all ranks; loads on any topology
      newest                    names it
      step300                   partial=False: one file, which torch.load(weights_only=True) reads; of a Hugging Face model by its own names
      user_content_step300/     the rest: optimizer, random state, user_content, which smp.load reads; the model says which in there is its
      newest_full               names step300

Before the first step of a pipeline the model is not partitioned, and whole on each rank. A checkpoint loaded then fills the model at once;
the optimizer's state is compared at once, and filled in once the model is partitioned. With as many stages and the same model, the
partition is the saving job's. Nothing is unpickled: see docs/checkpoints.md.

Source: public SMP v1 API ("APIs for Saving and Loading"). The keyword-only arguments are additions.

A `Checkpointer` is how this session's ranks save and load together. It has one channel for calls that scripts wait for, and one for
background saves. The ranks meet in the job's store, not in a process group: creating a channel then needs no collective call, and if a rank
does not come, the others raise an error with its number after `checkpoint_timeout`.

Random state belongs to the ranks that saved it. On the same topology (degrees, number of ranks, placement) every rank continues the random
numbers of the rank of its number: N steps equal N/2 + N/2 steps, bit by bit. On another topology no rank's state fits, so all ranks are
seeded alike, from a number derived from the checkpoint: resuming twice gives the same results twice. All ranks do the same.
"""

from __future__ import annotations

import datetime
import os
import random
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch

from smpc.checkpoint import (
    Alone,
    BackgroundSaver,
    Channel,
    Checkpoint,
    Content,
    Root,
    Saving,
    Shard,
    StoreChannel,
    capture_rng,
    check,
    load,
    restore_rng,
    together,
    verify_source,
)
from smpc.checkpoint.format.draft_content import VALUES
from smpc.checkpoint.sources.conversion_sources import TIED
from smpc.errors import CheckpointError, ConfigError, ConfigTypeError, UsageError
from smpc.v1.model.distributed_model import DistributedModel
from smpc.v1.optimization.distributed_optimizer import DistributedOptimizer
from smpc.v1.optimization.optimizer_state import KIND, MASTER, SEPARATOR
from smpc.v1.saving import data_position, full
from smpc.v1.saving.data_position import StatefulData, check_data
from smpc.v1.session.pipeline_groups import job_store
from smpc.v1.session.precision import session_half_dtype
from smpc.v1.session.process_state import Script, Session, state
from smpc.v1.session.wait_limits import loading

RNG, STREAMS = "rng", "tensor_parallel_rng"


def describe_topology(session: Session) -> dict[str, Any]:
    """The values that must be equal for random state to be restored."""
    mesh = session.mesh
    some = {name: size for name, size in (("context", mesh.cp_size), ("expert", mesh.ep_size)) if size > 1}
    return {
        "pipeline": mesh.pp_size,
        "tensor": mesh.tp_size,
        "replicas": mesh.rdp_size,
        "placement": mesh.placement,
        **some,
    }


def capture_random_state(session: Session) -> dict[str, Any]:
    """This rank's random state: the generators, and the streams of tensor-parallel modules."""
    return {RNG: capture_rng(), STREAMS: session.parallel.streams.state_dict()}


def restore_random_state(checkpoint: Checkpoint, session: Session, channel: Channel) -> None:
    """Restore the random state of this rank, or seed all ranks anew with a warning. Collective."""
    saved = checkpoint.metadata.get("topology") if isinstance(checkpoint.metadata, Mapping) else None
    if saved == describe_topology(session):
        states: list[Any] = []

        def read() -> bool:
            states.append(checkpoint.rank_state(session.rank))
            return isinstance(states[0], Mapping) and RNG in states[0] and len(states[0][RNG]["cuda"]) in _devices()

        if all(together(channel, read)):
            restore_rng(states[0][RNG])
            session.parallel.streams.load_state_dict(states[0].get(STREAMS, {}))
            return
    seed = 0x5EED + checkpoint.manifest.sequence
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    session.parallel.streams.reseed(seed)
    if session.rank == 0:
        warnings.warn(
            f"{checkpoint.folder} was saved on {_topology_text(saved)}, and this job has "
            f"{_topology_text(describe_topology(session))}: its random state does not fit, and all ranks are seeded with {seed}",
            stacklevel=4,
        )


def _devices() -> tuple[int, int]:
    """Numbers of CUDA devices whose state can be restored."""
    return 0, torch.cuda.device_count()


def _topology_text(topology: Any) -> str:
    if not isinstance(topology, Mapping):
        return "an unknown arrangement of ranks"
    return ", ".join(f"{key} {value}" for key, value in topology.items())


class Checkpointer:
    """Made by the first checkpoint of a session; `smp.shutdown` ends it, and raises if a save in the background failed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.channel = _checkpoint_channel(session, "now", _skipped)
        self._saver: BackgroundSaver | None = None

    @property
    def saver(self) -> BackgroundSaver:
        """The saver in the background; made by its first use."""
        if self._saver is None:
            self._saver = BackgroundSaver(_checkpoint_channel(self._session, "background"))
        return self._saver

    def check(self) -> None:
        """Raise the failure of a save in the background that has ended. Never waits."""
        if self._saver is not None:
            self._saver.check()

    def wait(self) -> None:
        """Wait for the save in the background."""
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """Wait, and raise if the last save failed."""
        if self._saver is not None:
            self._saver.close()


def checkpointer() -> Checkpointer:
    """The session's checkpointer. Raises UsageError before `smp.init`."""
    if state.checkpointer is None:
        state.checkpointer = Checkpointer(state.session)
    found: Checkpointer = state.checkpointer
    return found


def _skipped(ranks: Sequence[int]) -> str | None:
    """Not for background saves, during which the other ranks continue."""
    whereabouts = state.model.whereabouts if isinstance(state.model, DistributedModel) else None
    return None if whereabouts is None else whereabouts.skipped(ranks)


def _checkpoint_channel(
    session: Session, name: str, skipped: Callable[[Sequence[int]], str | None] = lambda ranks: None
) -> Channel:
    """The channel of all ranks for checkpoints, through the store."""
    size = session.mesh.world_size
    if size == 1:
        return Alone()
    timeout = datetime.timedelta(seconds=session.config.checkpoint_timeout)
    return StoreChannel(job_store(), session.rank, size, timeout, f"checkpoint/{state.session_number}/{name}", skipped)


PARTIAL, GRAD_SCALER = "_partial", "grad_scaler"


def save_checkpoint(
    path: str,
    tag: str,
    partial: bool = True,
    model: DistributedModel | None = None,
    optimizer: DistributedOptimizer | None = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
    *,
    asynchronous: bool = False,
    force: bool = True,
    pickle: Collection[str] = (),
    data: StatefulData | None = None,
    full_format: full.FullFormat = "torch",
) -> None:
    """Save a checkpoint. Collective: every rank of the job calls this.

    `user_content`: rank 0's counts. Plain values, lists, dicts and tensors come back as they are; other objects as mappings of their
    attributes (`smpc.checkpoint.format.plain_json`). `pickle`: keys of it that are to be pickled instead. `translate_if_full`: write a
    Hugging Face model under its own names, not under the names of distributed layers. `full_format`: "torch" for a file like
    torch.save's, "safetensors" for a safetensors file; for a translated Hugging Face model it is a folder with its configuration, for
    from_pretrained. `num_kept_partial_checkpoints`: afterwards remove all but this many of the newest partial ones; with partial=False it
    has no effect, and a warning says so. `asynchronous`: return as soon as this rank's share is copied; a failure is raised by the next
    step, the next save, or `smp.shutdown`. A checkpoint of this tag is replaced, and stays until the new one is complete; with
    `force=False` it is an error. `data`: the object that knows this rank's position in its data, see `smpc.v1.saving.data_position`.

    Raises CheckpointError on all ranks, naming the rank and the file, if it fails on one; nothing is published then, and what exists stays.
    """
    path, tag = _check_save(
        path, tag, partial, model, optimizer, num_kept_partial_checkpoints, asynchronous, force, pickle, full_format
    )
    check_data(data)
    found, keep = checkpointer(), num_kept_partial_checkpoints
    found.wait()
    script = _script_that_saves(model)
    contents: list[Content] = []

    def collect() -> str:
        """The work that may fail on one rank alone."""
        with state.acting(script):
            contents.append(_saved_content(model, optimizer, data, *_split_pickled(user_content, pickle)))
        return f"partial={partial}, asynchronous={asynchronous}, force={force}, num_kept_partial_checkpoints={keep}, {full_format=}"

    _check_alike(together(found.channel, collect))
    if model is not None:
        model.checkpoint_state.check_written()
    (content,) = contents
    channel = found.saver.channel if asynchronous else found.channel
    saving: Saving | full.ModelSaving
    if partial:
        saving = Saving(Root(path), f"{tag}{PARTIAL}", content, channel, force=force, keep=keep)
    else:
        assert model is not None, "checked above"
        saving = full.ModelSaving(path, tag, content, model, translate_if_full, channel, form=full_format, force=force)
    if asynchronous:
        found.saver.start(saving)
    else:
        saving.agree()
        saving.write()


def _script_that_saves(model: DistributedModel | None) -> Script:
    """The one whose objects are saved, once all its ranks are there. Collective."""
    script = state.acting_script if model is None else state.script_of(model)
    if script.model is not None and script.model.enclosing_join is not None:
        script.model.enclosing_join.meet_all("smp.save_checkpoint")
    return script


def _check_alike(said: Iterable[str]) -> None:
    """Raise CheckpointError if ranks save with different arguments."""
    found = sorted(set(said))
    if len(found) > 1:
        raise CheckpointError(f"save_checkpoint: expected the same arguments on all ranks, found {'; '.join(found)}")


@loading
def resume_from_checkpoint(
    path: str,
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    *,
    unpickle: Collection[str] = (),
    data: StatefulData | None = None,
) -> Any:
    """Load a checkpoint into the smp.DistributedModel and smp.DistributedOptimizer of this script, and return its user content. Collective.

    `tag`: None for the newest; if there is none, a warning says so and None is returned. `partial=False`: a full checkpoint, or a file or
    folder of a Hugging Face model in `path` (pass `load_optimizer=False` if there is no more than the model); files of torch.save are read
    with weights_only=True. `strict`: missing and unexpected keys and other dtypes are errors; otherwise dtypes are cast.
    `translate_function`: converts a full state dict to the module's names; the whole state dict is then in memory. `unpickle`: keys of the
    user content that were pickled and are to be unpickled, which RUNS code from the files. `data`: its position is restored, see
    `data_position`. `load_optimizer`: a checkpoint without an optimizer is loaded without, with a warning; a full model also before the
    script has one.

    On the saving topology every rank restores its random state; otherwise all ranks are seeded alike, with a warning. Raises
    CheckpointError on all ranks, listing all mismatches; then nothing has changed.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigTypeError(f"path: expected the name of a folder, found {type(path).__name__}")
    if tag is not None and not isinstance(tag, str):
        raise ConfigTypeError(f"tag: expected a str or None, found {type(tag).__name__}")
    check_data(data)
    model = _resumed_model()
    only_masters = not load_sharded_optimizer_state and state.cfg.shard_optimizer_state
    if not load_sharded_optimizer_state and not only_masters and state.session.rank == 0:
        warnings.warn("load_sharded_optimizer_state has no effect: shard_optimizer_state is not set", stacklevel=2)
    if partial and translate_function is not None:
        raise ConfigError(
            "translate_function: for full checkpoints (partial=False); partial ones have the module's names"
        )
    found = checkpointer()
    found.wait()
    found_tag = _agreed_tag(os.fspath(path), tag, partial, found)
    if found_tag is None:
        return None
    if partial:
        return _resume_contents(
            lambda: Root(path).find(found_tag), True, load_optimizer, only_masters, strict, unpickle, data, found
        )
    rest = together(found.channel, lambda: full.rest_of(os.fspath(path), found_tag))[found.channel.rank]
    if load_optimizer:
        _check_optimizer(os.fspath(path), found_tag, rest)
    with full.opened_model(os.fspath(path), found_tag, model, strict, translate_function, found.channel) as load_model:
        if rest is None:
            content = _legacy_content(os.fspath(path), found_tag, found)
            if data is not None:
                _warn("data: there is no position beside this model; the data begins at its present position")
        else:
            content = _resume_contents(lambda: rest, False, load_optimizer, only_masters, strict, unpickle, data, found)
        load_model()  # last: all that can be wrong with the rest has been found
    return content


def _check_optimizer(path: str, tag: str, rest: str | None) -> None:
    """Warn if a full model is loaded without the optimizer. Raises CheckpointError if it was saved with content that is gone."""
    if state.optimizer is None:
        _warn(
            "resume_from_checkpoint: there is no smp.DistributedOptimizer yet, so the model is loaded alone; load_optimizer=False says so "
            "without this warning"
        )
    elif rest is None:
        target = full.target_of(path, tag)
        if full.identity_of(target) is not None:
            beside = f"{full.CONTENT}{tag}"
            raise CheckpointError(
                f"{target}: what was saved beside it, {beside}, is gone; pass load_optimizer=False to load the model alone"
            )
        _warn_of_missing_state(target)


def _warn_of_missing_state(where: str) -> None:
    _warn(
        f"{where} has no optimizer state: the optimizer begins anew; load_optimizer=False says so without this warning"
    )


def _warn(text: str, stacklevel: int = 5) -> None:
    if state.session.rank == 0:
        warnings.warn(text, stacklevel=stacklevel)


def _legacy_content(path: str, tag: str, found: Checkpointer) -> Any:
    contents: list[Any] = []
    together(found.channel, lambda: contents.append(full.legacy_content(path, tag)))
    return contents[0]


def _resume_contents(
    find: Callable[[], str],
    with_model: bool,
    load_optimizer: bool,
    only_masters: bool,
    strict: bool,
    unpickle: Collection[str],
    data: StatefulData | None,
    found: Checkpointer,
) -> Any:
    """Load the contents of a folder of `smpc.checkpoint`, with the model if it is there; returns its user content."""
    model, optimizer, opened = _resumed_model(), state.optimizer if load_optimizer else None, []

    def read() -> None:
        """The work that may fail on one rank alone."""
        opened.append(Checkpoint.open(find()))
        saved = opened[0].metadata.get("optimizer")
        if optimizer is not None and saved is not None:
            optimizer.checkpoint_state.check_groups(saved["param_groups"])
        elif optimizer is not None:
            _warn_of_missing_state(opened[0].folder)
        elif saved is not None and load_optimizer and with_model:
            raise CheckpointError(
                f"{opened[0].folder} has the state of an optimizer, and there is no smp.DistributedOptimizer; construct it first, or pass "
                "load_optimizer=False"
            )
        opened.append(_joined(opened[0].user(), {name: opened[0].pickled(name) for name in unpickle}))

    try:
        together(found.channel, read)
        checkpoint, user = opened
        folder = checkpoint.folder
        if checkpoint.metadata.get("optimizer") is None:
            optimizer = None
        if with_model:
            shards = model.checkpoint_state.shards()
            known = _tied(model)
            check(folder, shards, found.channel, strict=strict, cast=_casts(strict), kinds=["model"], known=known)
        kinds = [VALUES, *(["model"] if with_model else []), *([KIND] if optimizer is not None else [])]
        verify_source(checkpoint, found.channel, kinds)  # from here on things change
        _use_plan(model, checkpoint)
        into, late = model if with_model else None, None if model.partitioned else optimizer
        if into is not None or late is None:
            now = optimizer if late is None else None
            _fill_from_checkpoint(folder, into, now, only_masters, strict, True, found)
        if late is not None:
            _fill_late(checkpoint, late, only_masters, strict, found)
        model.checkpoint_state.load_extra(checkpoint.metadata.get("extra_state", {}))
        data_position.restore(checkpoint, data, state.session, found.channel)
        restore_random_state(checkpoint, state.session, found.channel)
        if optimizer is not None and state.scaler is not None and GRAD_SCALER in checkpoint.metadata:
            state.scaler.load_state_dict(checkpoint.metadata[GRAD_SCALER])
    finally:
        for each in opened[:1]:
            each.close()
    return user


def _fill_late(
    checkpoint: Checkpoint, optimizer: DistributedOptimizer, only_masters: bool, strict: bool, found: Checkpointer
) -> None:
    """Load the optimizer's options, and its tensors once the model is partitioned."""
    folder = checkpoint.folder
    _resumed_model().when_partitioned(
        lambda: _fill_from_checkpoint(folder, None, optimizer, only_masters, strict, False, found),
        has_masters=any(kind == KIND and name.endswith(f"{SEPARATOR}{MASTER}") for kind, name in checkpoint.entries),
    )
    if not only_masters:
        optimizer.checkpoint_state.install_options(checkpoint.metadata["optimizer"])


def _fill_from_checkpoint(
    folder: str,
    model: DistributedModel | None,
    optimizer: DistributedOptimizer | None,
    only_masters: bool,
    strict: bool,
    verified: bool,
    found: Checkpointer,
) -> None:
    """Load all tensors, everything or nothing; the optimizer's once the model is partitioned. Collective."""
    with Checkpoint.open(folder) as checkpoint:
        shards: list[Shard] = [] if model is None else model.checkpoint_state.shards()
        kinds = [] if model is None else ["model"]
        state_targets: list[Shard] = []
        if optimizer is not None:
            entries = {n: (entry.shape, entry.dtype) for (kind, n), entry in checkpoint.entries.items() if kind == KIND}
            state_targets = optimizer.checkpoint_state.targets(entries, only_masters=only_masters)
            kinds += [] if only_masters else [KIND]
        known = [] if model is None else _tied(model)
        wanted = [*shards, *state_targets]
        options: dict[str, Any] = {"strict": strict, "cast": _casts(strict), "kinds": kinds, "known": known}
        load(folder, wanted, found.channel, verified=verified, **options)
        if model is not None:
            model.checkpoint_state.loaded_in_parts()
        if optimizer is not None:
            ranks = range(checkpoint.manifest.world_size)
            plain = [checkpoint.rank_state(r) for r in ranks if checkpoint.manifest.ranks[r].get("optimizer")]
            saved = checkpoint.metadata["optimizer"]
            optimizer.checkpoint_state.install_saved(
                state_targets,
                [found["optimizer"] for found in plain],
                saved,
                only_masters=only_masters,
                late=not (verified or only_masters),
            )


def _saved_content(
    model: DistributedModel | None,
    optimizer: DistributedOptimizer | None,
    data: StatefulData | None,
    user: Any,
    pickled: Any,
) -> Content:
    """What a rank saves: model, optimizer, data's position and the user's content."""
    session = state.session
    metadata: dict[str, Any] = {"topology": describe_topology(session)}
    rank_state = capture_random_state(session) | data_position.capture(data)
    shards: list[Shard] = []
    if optimizer is not None:
        state.acting_script.check_filled("save_checkpoint")
    if model is not None:
        model.checkpoint_state.before_saving()
        shards += model.checkpoint_state.shards()
        metadata["extra_state"] = model.checkpoint_state.extra()
        metadata[TIED] = model.checkpoint_state.aliases()
    if optimizer is not None:
        tensors, plain = optimizer.checkpoint_state.shards()
        shards += tensors
        rank_state["optimizer"] = plain
        metadata["optimizer"] = optimizer.checkpoint_state.metadata()
        if state.scaler is not None:
            metadata[GRAD_SCALER] = state.scaler.state_dict()
    plan = model.plan_json if model is not None else None
    return Content(shards, metadata, rank_state, user, pickled, plan)


def _tied(model: DistributedModel) -> list[tuple[str, str]]:
    """Other names of tied parameters, which checkpoints of other libraries may also have."""
    return [("model", name) for name in model.checkpoint_state.aliases()]


def _casts(strict: bool) -> bool:
    """Whether tensors are loaded into other dtypes: also from jobs in other precisions."""
    return not strict or session_half_dtype(state.current) is not None


def _use_plan(model: DistributedModel, checkpoint: Checkpoint) -> None:
    """Cut the model as the saving job did. Another topology, or a plan of a later release, is not an error: then it is cut anew."""
    if checkpoint.plan is None or checkpoint.metadata.get("topology") != describe_topology(state.session):
        return
    try:
        model.use_plan(checkpoint.plan)
    except (ValueError, KeyError, TypeError) as error:
        warnings.warn(f"{checkpoint.folder}: its plan cannot be read, the model is cut anew: {error}", stacklevel=2)


def _agreed_tag(path: str, tag: str | None, partial: bool, found: Checkpointer) -> str | None:
    """The tag that rank 0 finds, as the name in the folder."""

    def choose() -> str | None:
        if found.channel.rank:
            return None
        if not partial:
            return full.newest(path) if tag is None else tag
        if tag is None:
            return Root(path).newest()
        name = tag if tag.endswith(PARTIAL) else f"{tag}{PARTIAL}"
        Root(path).find(name)
        return name

    chosen: str | None = together(found.channel, choose)[0]
    if chosen is None and state.session.rank == 0:
        kind = "partial" if partial else "full"
        others = full.tags(path) if partial else Root(path).tags()
        hint = f"; there are full ones, {', '.join(others)}: pass partial=False to load them" if partial else ""
        hint = hint or f"; there are partial ones, {', '.join(others)}: pass partial=True to load them"
        warnings.warn(
            f"no {kind} checkpoint in {os.path.abspath(path)}: nothing is loaded, training starts anew{hint if others else ''}",
            stacklevel=3,
        )
    return chosen


def _check_save(
    path: Any,
    tag: Any,
    partial: bool,
    model: Any,
    optimizer: Any,
    keep: Any,
    asynchronous: bool,
    force: bool,
    pickle: Any,
    full_format: Any,
) -> tuple[str, str]:
    if not isinstance(path, (str, os.PathLike)) or not isinstance(tag, str):
        raise ConfigTypeError(f"path, tag: expected names, found {type(path).__name__} and {type(tag).__name__}")
    if model is not None and not isinstance(model, DistributedModel):
        raise ConfigTypeError(f"model: expected the smp.DistributedModel, found {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, DistributedOptimizer):
        raise ConfigTypeError(f"optimizer: expected the smp.DistributedOptimizer, found {type(optimizer).__name__}")
    if isinstance(pickle, str):
        raise ConfigTypeError(f"pickle: expected a list of keys of user_content, found the str {pickle!r}")
    wrong = []
    if full_format not in get_args(full.FullFormat):
        wrong.append(f"full_format: expected 'torch' or 'safetensors', found {full_format!r}")
    if keep is not None and (type(keep) is not int or keep < 1):
        wrong.append(f"num_kept_partial_checkpoints: expected at least 1, or None to keep all, found {keep!r}")
    if not partial:
        if keep is not None:
            _warn(
                "num_kept_partial_checkpoints has no effect: partial=False saves a full checkpoint, and all of them are kept",
                stacklevel=4,
            )
        if model is None:
            wrong.append("model: a full checkpoint needs one")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return os.path.abspath(os.fspath(path)), tag


def _split_pickled(user: Any, names: Collection[str]) -> tuple[Any, dict[str, Any]]:
    """The user's content without the part to be pickled, and that part."""
    if not names:
        return user, {}
    if user is None and state.session.rank:
        return None, {}  # only rank 0's counts
    missing = [name for name in names if not isinstance(user, Mapping) or name not in user]
    if missing:
        raise ConfigError(f"pickle: expected keys of user_content, which has no {', '.join(map(repr, missing))}")
    return {key: value for key, value in user.items() if key not in names}, {name: user[name] for name in names}


def _joined(user: Any, pickled: Mapping[str, Any]) -> Any:
    return {**user, **pickled} if pickled else user


def _resumed_model() -> DistributedModel:
    """The model that is resumed; UsageError if there is none, or several."""
    model = state.model
    if len(state.with_models) > 1:
        raise UsageError(
            f"resume_from_checkpoint: there are {len(state.with_models)} DistributedModels, and it resumes one; torch.load what "
            "model.state_dict() and optimizer.state_dict() of each were saved to, and load them with load_state_dict"
        )
    if not isinstance(model, DistributedModel):
        raise UsageError("resume_from_checkpoint: there is no smp.DistributedModel; construct it first")
    return model
