"""`smp.save_checkpoint` and `smp.resume_from_checkpoint`: model, optimizer, random state and the user's content, in one call on all ranks.

    smp.save_checkpoint(path, tag=f"step{step}", model=model, optimizer=optimizer, user_content={"step": step},
                        num_kept_partial_checkpoints=3)
    content = smp.resume_from_checkpoint(path)          # the newest; before or after the first step

    path/
      step200_partial/          partial=True: a checkpoint of `smpc.checkpoint`, of all ranks; loads on any topology
      newest                    names it
      step300                   partial=False: one safetensors file, or of a Hugging Face model a folder that from_pretrained opens
      user_content_step300/     the rest: optimizer, random state, user_content
      newest_full               names step300

Before the first step of a pipeline nothing is on its rank yet: what is loaded then is compared at once and filled in once the model is
partitioned, as the job that saved had partitioned it where it is the same on as many stages. Nothing is unpickled: see docs/checkpoints.md.

Source: public SMP v1 API ("APIs for Saving and Loading"). The keyword-only arguments are additions.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from smpc.checkpoint import Checkpoint, Content, Root, Shard, check, load, save, together
from smpc.errors import CheckpointError, ConfigError, ConfigTypeError, UsageError
from smpc.v1 import full, topology
from smpc.v1.checkpointer import Checkpointer, checkpointer
from smpc.v1.model import DistributedModel
from smpc.v1.optimizer import KIND, DistributedOptimizer
from smpc.v1.state import state

PARTIAL = "_partial"


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
    force: bool = False,
    pickle: Collection[str] = (),
) -> None:
    """Save a checkpoint. Collective: every rank of the job calls this.

    `user_content`: plain values, lists, dicts and tensors, of rank 0. `pickle`: keys of it that hold anything else and are to be pickled.
    `translate_if_full`: write a Hugging Face model as a folder with its configuration. `num_kept_partial_checkpoints`: afterwards remove
    all but so many of the newest partial ones. `asynchronous`: return as soon as this rank's share is copied; a failure is raised by the
    next step, the next save, or `smp.shutdown`. `force`: replace a partial checkpoint of this tag.

    Raises CheckpointError on all ranks, naming the rank and the file, if it fails on one; nothing is published then, and what exists stays.
    """
    path, tag = _check_save(
        path, tag, partial, model, optimizer, num_kept_partial_checkpoints, asynchronous, force, pickle
    )
    found, keep = checkpointer(), num_kept_partial_checkpoints
    found.wait()
    contents: list[Content] = []

    def collect() -> str:
        """What may fail on one rank alone."""
        contents.append(_content(model, optimizer, *_split(user_content, pickle)))
        return f"partial={partial}, asynchronous={asynchronous}, force={force}, num_kept_partial_checkpoints={keep}"

    said = sorted(set(together(found.channel, collect)))
    if len(said) > 1:
        raise CheckpointError(f"save_checkpoint: expected the same arguments on all ranks, found {'; '.join(said)}")
    (content,) = contents
    if not partial:
        assert model is not None, "checked above"
        shards = [shard for shard in content.shards if shard.kind == "model"]
        rest = replace(content, shards=[shard for shard in content.shards if shard.kind != "model"])
        full.save_model(path, tag, shards, rest, model, translate_if_full, found.channel)
    elif asynchronous:
        found.saver.save(Root(path), f"{tag}{PARTIAL}", content, force=force, keep=keep)
    else:
        save(Root(path), f"{tag}{PARTIAL}", content, found.channel, force=force, keep=keep)


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
) -> Any:
    """Load a checkpoint into the smp.DistributedModel and smp.DistributedOptimizer of this script, and return its user content. Collective.

    `tag`: None for the newest; if there is none, a warning says so and None is returned. `partial=False`: one that was saved so, or a file
    or folder of a Hugging Face model in `path`, of which `load_optimizer=False` says that there is no more; files of torch.save are read
    with weights_only=True. `strict`: missing and unexpected keys and other dtypes are errors; otherwise dtypes are cast.
    `translate_function`: makes a full state dict one with the module's names; all of it is in memory then. `unpickle`: keys of the user
    content that were pickled and are to be unpickled, which RUNS what the files say.

    On the topology that saved it every rank takes up its random state; otherwise all ranks are seeded alike, with a warning.
    Raises CheckpointError on all ranks, listing all that does not fit; nothing has been changed then.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigTypeError(f"path: expected the name of a folder, found {type(path).__name__}")
    if tag is not None and not isinstance(tag, str):
        raise ConfigTypeError(f"tag: expected a str or None, found {type(tag).__name__}")
    model, optimizer = _script(load_optimizer)
    if not load_sharded_optimizer_state and state.session.rank == 0:
        warnings.warn("load_sharded_optimizer_state has no effect: optimizer states are not sharded", stacklevel=2)
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
        return _resume(lambda: Root(path).find(found_tag), True, optimizer, strict, unpickle, found)
    rest = together(found.channel, lambda: full.rest_of(os.fspath(path), found_tag))[found.channel.rank]
    if rest is None and load_optimizer:
        raise CheckpointError(
            f"{os.path.join(path, found_tag)} has no optimizer state beside it; pass load_optimizer=False to load the model alone"
        )
    full.load_model(os.fspath(path), found_tag, model, strict, translate_function, found.channel)
    if rest is None:
        return full.legacy_content(os.fspath(path), found_tag)
    return _resume(lambda: rest, False, optimizer, strict, unpickle, found)


def _resume(
    find: Callable[[], str],
    with_model: bool,
    optimizer: DistributedOptimizer | None,
    strict: bool,
    unpickle: Collection[str],
    found: Checkpointer,
) -> Any:
    """Load what a folder of `smpc.checkpoint` has, the model too if it is there; its user content."""
    model, opened = _model(), []

    def read() -> None:
        """What may fail on one rank alone."""
        opened.append(Checkpoint.open(find()))
        saved = opened[0].metadata.get("optimizer")
        if optimizer is not None and saved is not None:
            optimizer.check_groups(saved["param_groups"])
        elif optimizer is not None and strict:
            raise CheckpointError(
                f"{opened[0].folder} has no optimizer state; pass load_optimizer=False to load the model alone"
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
            check(folder, shards, found.channel, strict=strict, cast=not strict, kinds=["model"])
        _use_plan(model, checkpoint)
        if model.partitioned:
            _fill(folder, model if with_model else None, optimizer, strict, found)
        else:
            model.when_partitioned(lambda: _fill(folder, model if with_model else None, optimizer, strict, found))
        model.checkpoint_state.load_extra(checkpoint.metadata.get("extra_state", {}))
        topology.restore(checkpoint, state.session, found.channel)
    finally:
        for each in opened[:1]:
            each.close()
    return user


def _fill(
    folder: str,
    model: DistributedModel | None,
    optimizer: DistributedOptimizer | None,
    strict: bool,
    found: Checkpointer,
) -> None:
    """Load all tensors, everything or nothing; later than `_resume` if the model is not partitioned yet. Collective."""
    with Checkpoint.open(folder) as checkpoint:
        shards: list[Shard] = [] if model is None else model.checkpoint_state.shards()
        kinds = [] if model is None else ["model"]
        state_targets: list[Shard] = []
        if optimizer is not None:
            entries = {n: (entry.shape, entry.dtype) for (kind, n), entry in checkpoint.entries.items() if kind == KIND}
            state_targets = optimizer.targets(entries)
            kinds.append(KIND)
        load(folder, [*shards, *state_targets], found.channel, strict=strict, cast=not strict, kinds=kinds)
        if optimizer is not None:
            ranks = range(checkpoint.manifest.world_size)
            plain = [checkpoint.rank_state(r) for r in ranks if checkpoint.manifest.ranks[r].get("optimizer")]
            optimizer.install_saved(
                state_targets, [found["optimizer"] for found in plain], checkpoint.metadata["optimizer"]["param_groups"]
            )


def _content(
    model: DistributedModel | None, optimizer: DistributedOptimizer | None, user: Any, pickled: Any
) -> Content:
    session = state.session
    metadata: dict[str, Any] = {"topology": topology.describe(session)}
    rank_state = topology.capture(session)
    shards: list[Shard] = []
    if model is not None:
        shards += model.checkpoint_state.shards()
        metadata["extra_state"] = model.checkpoint_state.extra()
    if optimizer is not None:
        tensors, plain = optimizer.shards()
        shards += tensors
        rank_state["optimizer"] = plain
        metadata["optimizer"] = {"param_groups": optimizer.param_groups_by_name()}
    plan = model.plan_json if model is not None else None
    return Content(shards, metadata, rank_state, user, pickled, plan)


def _use_plan(model: DistributedModel, checkpoint: Checkpoint) -> None:
    """Cut the model as it was. Another topology, or a plan that a later release wrote, is no error: then it is cut anew."""
    if checkpoint.plan is None or checkpoint.metadata.get("topology") != topology.describe(state.session):
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
        warnings.warn(
            f"no {kind} checkpoint in {os.path.abspath(path)}: nothing is loaded, training starts anew", stacklevel=3
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
    if keep is not None and (type(keep) is not int or keep < 1):
        wrong.append(f"num_kept_partial_checkpoints: expected at least 1, or None to keep all, found {keep!r}")
    if not partial:
        ignored = [("asynchronous", asynchronous), ("force", force), ("num_kept_partial_checkpoints", keep is not None)]
        wrong += [
            f"{name}: for partial checkpoints; leave it out with partial=False" for name, given in ignored if given
        ]
        wrong += ["model: a full checkpoint needs one"] if model is None else []
    if wrong:
        raise ConfigError("\n".join(wrong))
    return os.path.abspath(os.fspath(path)), tag


def _split(user: Any, names: Collection[str]) -> tuple[Any, dict[str, Any]]:
    """The user's content without what is to be pickled, and that."""
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


def _script(load_optimizer: bool) -> tuple[DistributedModel, DistributedOptimizer | None]:
    model, optimizer = _model(), state.optimizer
    if load_optimizer and optimizer is None:
        raise UsageError(
            "resume_from_checkpoint: there is no smp.DistributedOptimizer; construct it first, or pass load_optimizer=False"
        )
    return model, optimizer if load_optimizer else None


def _model() -> DistributedModel:
    model = state.model
    if not isinstance(model, DistributedModel):
        raise UsageError("resume_from_checkpoint: there is no smp.DistributedModel; construct it first")
    return model
