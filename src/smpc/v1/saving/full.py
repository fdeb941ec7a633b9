"""Full checkpoints: the model in one file, and the rest of a job's state in a folder of `smpc.checkpoint` beside it.

    path/tag                          every key of the state dict in a file that torch.load reads; of a Hugging Face model by its own names.
                                      With full_format="safetensors" a safetensors file, or of a Hugging Face model a folder with
                                      config.json that from_pretrained opens
    path/user_content_tag/content_1/  optimizer, random state and user content
    path/newest_full                  the tag of the last one, written last

The model's files name the content that belongs to them, in their headers. So a forced save writes
content_2 beside content_1, replaces the model, and removes content_1: whenever the job dies, a model has its own content. A full model
also loads from files of other libraries: .safetensors, Hugging Face folders, .pt and .bin files of torch.save.

Full checkpoints in a run's folder: which exist, which is the newest, and which files belong together.

    path/tag                          the model; its files say in their headers whose they are
    path/user_content_tag/content_1/  what was saved beside it
    path/newest_full                  the marker

    note in the headers     smpc_tag        the tag that it was saved under
                            smpc_save       a number drawn for each save; also in the metadata of the content beside it
                            smpc_content    the name of what belongs to it, in user_content_tag
                            smpc_number     1 more than the highest of those that were there: the order of saving

These notes detect files and folders that were renamed or exchanged. A file that was copied to be loaded elsewhere is converted to a
full model of its own: `smpc checkpoint convert run/step300 new --to full`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

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
    verify_source,
    write_archive_of,
    write_file_of,
    write_folder,
)
from smpc.checkpoint.folder.folders import check_tag, check_whole, last_in_folder, mark, read_marker, wrong_marker
from smpc.checkpoint.format.manifest import NAME, is_plain_name
from smpc.checkpoint.format.regular_file import is_file, printable
from smpc.checkpoint.format.tensorfile import is_tensorfile
from smpc.checkpoint.sources.conversion_sources import (
    SAVE,
    CanonicalSource,
    ComputedSource,
    RenamedSource,
    SafetensorsSource,
    Source,
    SourceView,
)
from smpc.errors import CheckpointError
from smpc.nn.state_format import StateFormat
from smpc.v1.model.distributed_model import DistributedModel
from smpc.v1.saving.hugging_face import Theirs, format_of, is_hugging_face, readings, texts_of
from smpc.v1.session.precision import loads_as

MARKER, CONTENT = "newest_full", "user_content_"
TAG, INNER, NUMBER = "smpc_tag", "smpc_content", "smpc_number"


@dataclass(frozen=True, slots=True)
class FullModelNotes:
    """The notes in a full model's headers. `tag`, `save`: None in a model written by an earlier release."""

    content: str
    tag: str | None
    save: str | None
    number: int

    def notes(self) -> dict[str, str]:
        """The notes as stored in the header."""
        found = {INNER: self.content, NUMBER: str(self.number), TAG: self.tag, SAVE: self.save}
        return {key: text for key, text in found.items() if text is not None}


def identity_of(target: str) -> FullModelNotes | None:
    """The notes of the model at a path; None if `save_checkpoint` has not written it. Raises CheckpointError if it is damaged."""
    if is_file(target):
        is_ours = is_tensorfile(target)
    else:
        names = os.listdir(target) if os.path.isdir(target) else []
        is_ours = NAME not in names and any(name.endswith(".safetensors") for name in names)
    if not is_ours:
        return None
    with SafetensorsSource(target) as source:
        notes = source.notes
    content, number = notes.get(INNER), notes.get(NUMBER, "0")
    if not is_plain_name(content):
        return None
    assert content is not None, "a plain name"
    return FullModelNotes(
        content, notes.get(TAG), notes.get(SAVE), int(number) if number.isdecimal() and len(number) < 16 else 0
    )


def target_of(path: str, tag: str) -> str:
    """The path of a tag's model, whether it exists or not."""
    target = os.path.join(path, tag)
    return standing(target) or target


def rest_of(path: str, tag: str) -> str | None:
    """The folder of the content saved with a full model; None if there is none, as for a model of another library.

    Raises CheckpointError if there is no such model, it is damaged, or they do not belong together.
    """
    target = target_of(path, tag)
    if not os.path.lexists(target):
        there = [name for name in _tags(path) if standing(os.path.join(path, name)) is not None]
        raise CheckpointError(f"no full checkpoint {tag} in {path}; there are {', '.join(there) or 'none'}")
    found = identity_of(target)
    return None if found is None else _content_beside(path, tag, target, found)


def newest(path: str) -> str | None:
    """The tag of the last full checkpoint that is whole. Warns if the marker says otherwise, or of others that are not whole.

    Raises CheckpointError if there are some, and not one is whole.
    """
    complete, damaged = _complete_models(path)
    marked = read_marker(path, MARKER)
    if damaged and not complete:
        text = f"{path}: none of the full checkpoints there is whole; mend one, or move them away to start anew"
        raise CheckpointError("\n".join([text, *damaged]))
    for line in damaged:
        warnings.warn(f"ignored: {line}", stacklevel=4)
    if not complete:
        if marked is None or (is_plain_name(marked) and standing(os.path.join(path, marked)) is not None):
            return marked  # perhaps a model of another library
        warnings.warn(
            f"{os.path.join(path, MARKER)} names {marked!r}, which is not there; ask for one by its tag", stacklevel=4
        )
        return None
    last = last_in_folder(complete, marked)
    if marked != last:
        warnings.warn(wrong_marker(path, MARKER, marked, last), stacklevel=4)
    return last


def tags(path: str) -> list[str]:
    """The full checkpoints that are whole, oldest first."""
    return [tag for _, tag in _complete_models(path)[0]]


def next_number(path: str) -> int:
    """The number of the next checkpoint."""
    return 1 + max((number for number, _ in _complete_models(path)[0]), default=0)


def legacy_content(path: str, tag: str) -> Any:
    """The content beside a model of another library: user_content.pt or user_content_tag, if it is a file that is not empty."""
    for name in (f"{CONTENT}{tag}", "user_content.pt"):
        file = os.path.join(path, name)
        if is_file(file) and os.path.getsize(file):
            return read_file(file, map_location="cpu")
    return None


def _complete_models(path: str) -> tuple[list[tuple[int, str]], list[str]]:
    """Numbers and tags of the models that `save_checkpoint` has written, in order; and the errors of incomplete ones."""
    complete, damaged = [], []
    with_content = set(_tags(path))
    for tag in _candidates(path):
        try:
            target = target_of(path, tag)
            found = identity_of(target)
            if found is not None and _content_beside(path, tag, target, found) is not None:
                complete.append((found.number, tag))
            elif found is not None or tag in with_content:
                damaged.append(f"{target}: what was saved beside it is missing, or it is not a full checkpoint")
        except CheckpointError as error:
            if tag in with_content:
                damaged += str(error).splitlines()
    return sorted(complete), damaged


def _content_beside(path: str, tag: str, target: str, found: FullModelNotes) -> str | None:
    """The folder of a model's content; None if it is gone. Raises CheckpointError if it is damaged or belongs to another model."""
    if found.tag is not None and found.tag != tag:
        own = printable(found.tag)
        raise CheckpointError(
            f"{target}: it was saved as {own}, so it was renamed, copied or exchanged with another; rename it to {own}, in a folder of "
            "its own if there is another of that name, or make a model of its own of it with smpc checkpoint convert"
        )
    beside = Root(os.path.join(path, f"{CONTENT}{tag}"))
    if not os.path.isdir(beside.path):
        return None
    folder = beside.find(found.content)
    metadata = check_whole(folder).metadata
    saved = metadata.get(SAVE) if isinstance(metadata, dict) else None
    if found.save is not None and saved != found.save:
        raise CheckpointError(
            f"{folder}: it does not belong to {target}, which is of another save; bring back the {CONTENT}{tag} that was saved with it, or "
            "move it away and pass load_optimizer=False to load the model alone"
        )
    return folder


def _candidates(path: str) -> Iterator[str]:
    """Names that full models may have here."""
    names = os.listdir(path) if os.path.isdir(path) else []
    tags = [name for name in sorted({*_tags(path), *names}) if is_plain_name(name)]
    for tag in tags:
        if standing(os.path.join(path, tag)) is not None and tag != MARKER and not tag.startswith(CONTENT):
            yield tag


def _tags(path: str) -> list[str]:
    """The tags that have content here."""
    names = sorted(os.listdir(path)) if os.path.isdir(path) else []
    return [name.removeprefix(CONTENT) for name in names if name.startswith(CONTENT)]


_INNER = "content"
FullFormat = Literal["torch", "safetensors"]


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
        form: FullFormat,
        force: bool,
    ) -> None:
        self._root, self._tag, self._channel, self._force = Root(path), tag, channel, force
        self._translate, self._form, self._module = translate, form, model.get_module()
        self._aliases = model.checkpoint_state.aliases()
        self._shards = [shard for shard in content.shards if shard.kind == "model"]
        self._content = replace(content, shards=[shard for shard in content.shards if shard.kind != "model"])
        self._rest: Saving | None = None
        self._model: FullSaving | None = None

    def agree(self) -> None:
        """Make the drafts, and choose who writes what. Collective."""
        found = FullModelNotes(*together(self._channel, self._begin)[0])
        writer = self._writer({"notes": found.notes(), "force": self._force})
        target = os.path.join(self._root.path, self._tag)
        content = replace(self._content, metadata={**self._content.metadata, SAVE: found.save})
        self._rest = Saving(Root(self._beside), found.content, content, self._channel)
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
        """This rank's share to write."""
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
        """After a failure: removes content whose model does not exist."""
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

    def _begin(self) -> tuple[str, str, str, int]:
        """Check the tag; on rank 0, which alone changes the folder, clean up and choose the identity."""
        check_tag(self._tag)
        if self._tag == MARKER or self._tag.startswith(CONTENT):
            raise CheckpointError(
                f"tag: {self._tag!r} is the name of something else beside full models; choose another"
            )
        if self._channel.rank:
            return "", "", "", 0
        for line in [*self._root.clean(), *Root(self._beside).clean()]:
            warnings.warn(line, stacklevel=2)
        target = standing(os.path.join(self._root.path, self._tag))
        if target is not None and not self._force:
            raise CheckpointError(f"{target} exists and is not overwritten; choose another tag, or force")
        if target is not None and identity_of(target) is None:
            raise CheckpointError(f"{target} exists and is not overwritten; save_checkpoint has not written it")
        content = f"{_INNER}_{Root(self._beside).next_sequence()}"
        return content, self._tag, secrets.token_hex(8), next_number(self._root.path)

    def _writer(self, options: dict[str, Any]) -> Callable[[Source, str], object]:
        """The function that assembles the model; only rank 0 calls it."""
        as_theirs = self._as_theirs() if self._translate and is_hugging_face(self._module) else None
        if self._form == "torch":
            rename = as_theirs or (lambda source: source)
            return lambda source, file: write_archive_of(rename(source), file, aliases=self._aliases, **options)
        if as_theirs is None:
            return lambda source, file: write_file_of(RenamedSource(source, self._aliases), file, **options)
        texts = texts_of(self._module)
        return lambda source, folder: write_folder(as_theirs(source), folder, files=texts, **options)

    def _as_theirs(self) -> Callable[[Source], Source] | None:
        """The translation to a Hugging Face model's own names; None, with a warning, if there is none."""
        try:
            form = format_of(self._module)
        except CheckpointError as error:
            if self._channel.rank == 0:
                warnings.warn(
                    f"{type(self._module).__name__} is saved under the names of its modules: {error}", stacklevel=6
                )
            return None
        return lambda source: source if form is None else Theirs(source, form)

    def _mark(self) -> None:
        if self._channel.rank:
            return
        try:
            with self._root.publishing():
                mark(self._root.path, MARKER, self._tag)
            Root(self._beside).prune(1)  # content of the replaced model
        except CheckpointError as error:  # it is saved, and found without the marker
            warnings.warn(f"{os.path.join(self._root.path, self._tag)} is saved, but {error}", stacklevel=2)


@contextlib.contextmanager
def opened_model(
    path: str,
    tag: str,
    model: DistributedModel,
    strict: bool,
    translate: Callable[[dict[str, Any]], Mapping[str, Any]] | None,
    channel: Channel,
) -> Iterator[Callable[[], object]]:
    """Returns the function that loads the model, once all ranks have verified it. Collective, as loading is; nothing is written before."""
    target = target_of(path, tag)
    opened: list[Source] = []
    try:
        together(channel, lambda: opened.append(open_source(target)))
        verify_source(opened[0], channel)

        def compare() -> None:
            if translate is not None:
                opened[0] = ComputedSource(opened[0], translate)
            opened[0] = _renamed(opened[0], model)
            _check_full(opened[0], model, strict, target)

        together(channel, compare)
        yield functools.partial(together, channel, lambda: _fill_model(opened[0], model))
    finally:
        for source in opened:
            source.__exit__(None, None, None)


# ----------------------------------------------------------------------------------------------------------------------


def _renamed(source: Source, model: DistributedModel) -> Source:
    """The source by canonical names: tied parameters may have any of their names, and Hugging Face's base models lack a prefix."""
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
    return CanonicalSource(SourceView(source, [item for item in source.items if item.name in wanted]), names)


def _check_full(source: Source, model: DistributedModel, strict: bool, target: str) -> None:
    """Raises an error if the file does not fit the model."""
    there = {item.name: item for item in source.items}
    wrong: list[str] = []
    own = {shard.name: shard for shard in model.checkpoint_state.shards()}
    every, half = model.checkpoint_state.saved_names(), model.checkpoint_state.half
    if strict:
        wrong += [f"missing: {printable(name)}" for name in own if name not in there]
        wrong += [f"unexpected: {printable(name)}" for name in there if name not in every]
    for name, shard in own.items():
        item = there.get(name)
        if item is not None and item.shape != shard.global_shape:
            wrong.append(f"shape of {printable(name)}: expected {list(shard.global_shape)}, found {list(item.shape)}")
        if item is not None and strict and item.dtype != shard.dtype and not loads_as(item.dtype, shard.dtype, half):
            wrong.append(f"dtype of {printable(name)}: expected {shard.dtype}, found {item.dtype}")
    if wrong:
        lines = [
            f"{target} does not fit, nothing was loaded (strict=False allows missing and unexpected keys and casts)"
        ]
        raise CheckpointError("\n".join([*lines, *wrong]))


@torch.no_grad()
def _fill_model(source: Source, model: DistributedModel) -> None:
    """Reads this rank's part of the file into the model."""
    own: dict[str, list[Shard]] = {}  # several of what this rank has several runs of
    for shard in model.checkpoint_state.shards():
        own.setdefault(shard.name, []).append(shard)
    for item in source.items:
        try:
            whole = source.read(item) if item.name in own else None
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; the file changed while it was loaded, and parameters are partly filled"
            ) from error
        for shard in own.get(item.name, []):
            assert whole is not None
            place = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.shape, strict=True))
            shard.tensor.copy_(whole[place])
        del whole  # before the next one comes
    model.checkpoint_state.loaded_in_parts()


def _format_of(module: nn.Module) -> StateFormat | None:
    try:
        return format_of(module)
    except CheckpointError:
        return None  # mismatches are listed by name
