"""Full checkpoints: the model as plain safetensors, and what else a job needs in a folder of `smpc.checkpoint` beside it.

    path/tag                          a safetensors file with every key of the state dict; or, of a Hugging Face model whose parameters
                                      have their own names, a folder with config.json that from_pretrained opens
    path/user_content_tag/content_1/  optimizer, random state and user content
    path/newest_full                  the tag of the last one, written last

The model's files name the content that belongs to them, in their headers. So a forced save writes content_2 beside content_1, replaces the
model, and removes content_1: whenever it dies, a model has its own content. A full model is also loaded from what others have written:
.safetensors, Hugging Face folders, .pt and .bin files of torch.save.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from smpc.checkpoint import (
    Channel,
    Content,
    FullSaving,
    Root,
    Saving,
    Shard,
    open_source,
    read_file,
    standing,
    together,
    write_file_of,
    write_folder,
)
from smpc.checkpoint.folders import check_tag, sync_folder, write_new
from smpc.checkpoint.manifest import is_plain_name
from smpc.checkpoint.sources import SafetensorsSource, Source
from smpc.checkpoint.tensorfile import is_tensorfile
from smpc.checkpoint.views import Canonical, Computed, Named, View
from smpc.errors import CheckpointError
from smpc.nn.state_format import Format
from smpc.v1.models.model import DistributedModel
from smpc.v1.optimization.precision import loads_as
from smpc.v1.saving.hugging_face import Theirs, format_of, is_hugging_face, readings, texts_of

MARKER, CONTENT = "newest_full", "user_content_"
_INNER, _NOTE = "content", "smpc_content"


class ModelSaving:
    """The model and the rest on their way to `path`; in the same steps as `smpc.checkpoint.save.Saving`.

    `content`: the tensors of the kind "model" are the model, everything else is the rest.
    """

    def __init__(
        self,
        path: str,
        tag: str,
        content: Content,
        model: DistributedModel,
        translate: bool,
        channel: Channel,
        *,
        force: bool,
    ) -> None:
        self._root, self._tag, self._channel, self._force = Root(path), tag, channel, force
        self._translate, self._module = translate, model.get_module()
        self._aliases = model.checkpoint_state.aliases()
        self._shards = [shard for shard in content.shards if shard.kind == "model"]
        self._content = replace(content, shards=[shard for shard in content.shards if shard.kind != "model"])
        self._rest: Saving | None = None
        self._model: FullSaving | None = None

    def agree(self) -> None:
        """Make the drafts, and choose who writes what. Collective."""
        name = together(self._channel, self._begin)[0]
        writer = self._writer({"notes": {_NOTE: name}, "force": self._force})
        target = os.path.join(self._root.path, self._tag)
        self._rest = Saving(Root(self._beside), name, self._content, self._channel)
        self._model = FullSaving(target, Content(self._shards), self._channel, writer)
        try:
            self._rest.agree()
            self._model.agree()
        except BaseException:
            self._rest.discard()
            self._tidy()
            raise

    @property
    def share(self) -> list[Shard]:
        """What this rank writes."""
        rest, model = self._parts
        return [*rest.share, *model.share]

    @share.setter
    def share(self, shards: list[Shard]) -> None:
        rest, model = self._parts
        count = len(rest.share)
        rest.share, model.share = shards[:count], shards[count:]

    def fail(self, error: Exception) -> None:
        """Make `write` fail on every rank."""
        self._parts[0].fail(error)

    def write(self) -> str:
        """Write the rest, then the model, which names it, then the marker. Collective."""
        rest, model = self._parts
        try:
            rest.write()
            target = model.write()
        except BaseException:
            model.discard()
            self._tidy()
            raise
        together(self._channel, self._mark)
        return target

    def _tidy(self) -> None:
        """After a failure: content of a model that is not there is nobody's."""
        if self._channel.rank == 0 and standing(os.path.join(self._root.path, self._tag)) is None:
            shutil.rmtree(self._beside, ignore_errors=True)

    @property
    def _parts(self) -> tuple[Saving, FullSaving]:
        assert self._rest is not None, "the ranks have agreed"
        assert self._model is not None, "the ranks have agreed"
        return self._rest, self._model

    @property
    def _beside(self) -> str:
        return os.path.join(self._root.path, f"{CONTENT}{self._tag}")

    def _begin(self) -> str:
        """Check the tag; on rank 0, which alone changes the folder, clean up and choose the name of the content."""
        check_tag(self._tag)
        if self._tag == MARKER or self._tag.startswith(CONTENT):
            raise CheckpointError(
                f"tag: {self._tag!r} is the name of something else beside full models; choose another"
            )
        if self._channel.rank:
            return ""
        for line in [*self._root.clean(), *Root(self._beside).clean()]:
            warnings.warn(line, stacklevel=2)
        target = standing(os.path.join(self._root.path, self._tag))
        if target is not None and not self._force:
            raise CheckpointError(f"{target} exists and is not overwritten; choose another tag, or force")
        if target is not None and content_of(target) is None:
            raise CheckpointError(f"{target} exists and is not overwritten; save_checkpoint has not written it")
        return f"{_INNER}_{Root(self._beside).next_sequence()}"

    def _writer(self, options: dict[str, Any]) -> Callable[[Source, str], object]:
        """What puts the model together; only rank 0 calls it."""
        if self._translate and is_hugging_face(self._module):
            try:
                form, texts = format_of(self._module), texts_of(self._module)
                return lambda source, folder: write_folder(
                    source if form is None else Theirs(source, form),
                    folder,
                    files=texts,
                    **options,
                )
            except CheckpointError as error:
                if self._channel.rank == 0:
                    warnings.warn(f"{type(self._module).__name__} is saved as plain tensors: {error}", stacklevel=5)
        return lambda source, file: write_file_of(Named(source, self._aliases), file, **options)

    def _mark(self) -> None:
        if self._channel.rank:
            return
        path = self._root.path
        draft = os.path.join(path, f".{MARKER}.draft")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)  # of a job that died here
        write_new(draft, f"{self._tag}\n".encode())
        os.replace(draft, os.path.join(path, MARKER))
        sync_folder(path)
        Root(self._beside).prune(1)  # what belonged to the model that has been replaced


@contextlib.contextmanager
def opened_model(
    path: str,
    tag: str,
    model: DistributedModel,
    strict: bool,
    translate: Callable[[dict[str, Any]], Mapping[str, Any]] | None,
    channel: Channel,
) -> Iterator[Callable[[], object]]:
    """What loads the model, once all ranks have found that it fits. Collective, and so is loading; nothing is written before."""
    target = _standing(path, tag)
    opened: list[Source] = []
    try:

        def compare() -> None:
            opened.append(open_source(target))
            if translate is not None:
                opened[0] = Computed(opened[0], translate)
            opened[0] = _renamed(opened[0], model)
            _check(opened[0], model, strict, target)

        together(channel, compare)
        yield functools.partial(together, channel, lambda: _fill(opened[0], model))
    finally:
        for source in opened:
            source.__exit__(None, None, None)


def rest_of(path: str, tag: str) -> str | None:
    """The folder of what was saved beside a full model; None where there is none, as beside a model of others."""
    target = _standing(path, tag)
    if not os.path.lexists(target):
        beside = sorted(os.listdir(path)) if os.path.isdir(path) else []
        tags = [n.removeprefix(CONTENT) for n in beside if n.startswith(CONTENT)]
        there = [name for name in tags if standing(os.path.join(path, name)) is not None]
        raise CheckpointError(f"no full checkpoint {tag} in {path}; there are {', '.join(there) or 'none'}")
    name, beside_it = content_of(target), os.path.join(path, f"{CONTENT}{tag}")
    return Root(beside_it).find(name) if name is not None and os.path.isdir(beside_it) else None


def content_of(target: str) -> str | None:
    """The name of the content that the files of a full model say is theirs; None if `save_checkpoint` has not written them."""
    try:
        if os.path.isfile(target) and not is_tensorfile(target):
            return None
        with SafetensorsSource(target) as source:
            found = source.notes.get(_NOTE)
    except CheckpointError:
        return None  # what is wrong with it will be said where it is loaded
    return found if is_plain_name(found) else None


def _standing(path: str, tag: str) -> str:
    target = os.path.join(path, tag)
    return standing(target) or target


def legacy_content(path: str, tag: str) -> Any:
    """What lies beside a model of others: user_content.pt or user_content_tag, if it is a file that is not empty."""
    for name in (f"{CONTENT}{tag}", "user_content.pt"):
        file = os.path.join(path, name)
        if os.path.isfile(file) and os.path.getsize(file):
            return read_file(file, map_location="cpu")
    return None


def newest(path: str) -> str | None:
    """The tag of the last full checkpoint."""
    try:
        with open(os.path.join(path, MARKER), "rb") as file:
            tag = file.read(300).decode("utf-8", "replace").strip()
    except OSError:
        return None
    if not is_plain_name(tag) or standing(os.path.join(path, tag)) is None:
        warnings.warn(
            f"{os.path.join(path, MARKER)} names {tag!r}, which is not there; ask for one by its tag", stacklevel=4
        )
        return None
    return tag


# ----------------------------------------------------------------------------------------------------------------------


def _renamed(source: Source, model: DistributedModel) -> Source:
    """The source by canonical names: of tied parameters any name will do, and Hugging Face's base models lack a prefix."""
    own = model.checkpoint_state.saved_names()
    aliases = model.checkpoint_state.aliases()
    module = model.get_module()
    prefix = f"{module.base_model_prefix}." if is_hugging_face(module) else ""

    def canonical(name: str) -> str | None:
        guesses = (name, f"{prefix}{name}", name.removeprefix(prefix))
        return next((n for g in guesses for n in (g, aliases.get(g)) if n in own), None)

    def strangers(found: Source) -> int:
        return sum(canonical(item.name) is None for item in found.items if item.kind == "model")

    if prefix and strangers(
        source
    ):  # perhaps it has the names of a model whose layers are not distributed, or of its files
        source = min(readings(source, _format_of(module)), key=strangers)
    names: dict[str, str] = {}
    left: list[str] = []
    for item in source.items:
        found = canonical(item.name) if item.kind == "model" else None
        if found is None:
            left.append(item.name)
        elif found not in names or item.name == found:
            names[found] = item.name
    wanted = {*names.values(), *left}
    return Canonical(View(source, [item for item in source.items if item.name in wanted]), names)


def _check(source: Source, model: DistributedModel, strict: bool, target: str) -> None:
    there = {item.name: item for item in source.items}
    wrong: list[str] = []
    own = {shard.name: shard for shard in model.checkpoint_state.shards()}
    every = model.checkpoint_state.saved_names()
    if strict:
        wrong += [f"missing: {name}" for name in own if name not in there]
        wrong += [f"unexpected: {name}" for name in there if name not in every]
    for name, shard in own.items():
        item = there.get(name)
        if item is not None and item.shape != shard.global_shape:
            wrong.append(f"shape of {name}: expected {list(shard.global_shape)}, found {list(item.shape)}")
        if item is not None and strict and item.dtype != shard.dtype and not loads_as(item.dtype, shard.dtype):
            wrong.append(f"dtype of {name}: expected {shard.dtype}, found {item.dtype}")
    if wrong:
        lines = [
            f"{target} does not fit, nothing was loaded (strict=False allows missing and unexpected keys and casts)"
        ]
        raise CheckpointError("\n".join([*lines, *wrong]))


@torch.no_grad()
def _fill(source: Source, model: DistributedModel) -> None:
    own: dict[str, list[Shard]] = {}  # several of what this rank has several runs of
    for shard in model.checkpoint_state.shards():
        own.setdefault(shard.name, []).append(shard)
    for item in source.items:
        whole = source.read(item) if item.name in own else None
        for shard in own.get(item.name, []):
            assert whole is not None
            place = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.shape, strict=True))
            shard.tensor.copy_(whole[place])
        del whole  # before the next one comes
    model.checkpoint_state.loaded_in_parts()


def _format_of(module: nn.Module) -> Format | None:
    try:
        return format_of(module)
    except CheckpointError:
        return None  # what does not fit is listed by name
