"""Whole models for other programs: written from any source, one tensor in memory at a time.

    write_file_of(source, "model.safetensors")          one safetensors file
    write_archive_of(source, "pytorch_model.bin")       one file that torch.load reads
    write_folder(source, "export", files={"config.json": text})
        export/config.json
        export/model.safetensors                        up to `max_file_bytes`; else
        export/model-00001-of-00003.safetensors, ...    and model.safetensors.index.json, as from_pretrained opens them

All are published by a rename once they are on the disk, and replace nothing unless forced: then the old one stays until the new one is
complete, and is found by `standing` if the process dies between two renames. `rename` gives tensors other names (a translator to
Hugging Face's), or None to leave one out; `dtype` casts floating-point tensors; `notes` are texts for the header of every file, which
has checksums besides (`header_checksums`, `torch_archive`). If there are several files, each names its save, its number and their
count.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from smpc.checkpoint.channel import Channel, together
from smpc.checkpoint.folder.folders import DRAFT, Root, remove, sync_folder, write_new
from smpc.checkpoint.folder.locks import make_locked, publishing
from smpc.checkpoint.format.draft_content import Advance, Content, Shard
from smpc.checkpoint.format.manifest import BLOCK_SIZE, is_plain_name
from smpc.checkpoint.format.regular_file import printable
from smpc.checkpoint.format.tensorfile import write_tensors
from smpc.checkpoint.format.torch_archive import write_archive
from smpc.checkpoint.save import Saving
from smpc.checkpoint.sources.conversion_sources import INDEX, PART, SAVE, SINGLE, CheckpointSource, Source, SourceItem
from smpc.errors import CheckpointError

MAX_FILE_BYTES = 5_000_000_000

Rename = Callable[[str], str | None]


def write_file_of(
    source: Source,
    path: str | os.PathLike[str],
    *,
    kind: str = "model",
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    notes: Mapping[str, str] | None = None,
    force: bool = False,
    advance: Advance | None = None,
) -> str:
    """Write one safetensors file with all tensors of a kind. Raises CheckpointError if it exists or cannot be written."""
    shards = _shards_of_source(source, kind, rename, dtype)
    with new_export_path(path, force=force) as draft:
        write_tensors(draft, shards, BLOCK_SIZE, metadata=_noted_in_export_header(notes), advance=advance, seal=True)
    return os.path.abspath(os.fspath(path))


def write_archive_of(
    source: Source,
    path: str | os.PathLike[str],
    *,
    kind: str = "model",
    aliases: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    notes: Mapping[str, str] | None = None,
    force: bool = False,
    advance: Advance | None = None,
) -> str:
    """Write one file for torch.load with all tensors of a kind. `aliases`: more names, each with the source's name of its tensor.

    Raises CheckpointError if the file exists or cannot be written.
    """
    shards = _shards_of_source(source, kind, None, dtype)
    names = {name for name, _ in shards}
    more = {key: name for key, name in (aliases or {}).items() if name in names}
    with new_export_path(path, force=force) as draft:
        write_archive(draft, shards, BLOCK_SIZE, aliases=more, metadata=_noted_in_export_header(notes), advance=advance)
    return os.path.abspath(os.fspath(path))


def write_folder(
    source: Source,
    path: str | os.PathLike[str],
    *,
    files: Mapping[str, str] | None = None,
    kind: str = "model",
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    notes: Mapping[str, str] | None = None,
    force: bool = False,
    advance: Advance | None = None,
) -> str:
    """Write a folder with all tensors of a kind, and texts by name of file. A tensor larger than `max_file_bytes` has a file of its own."""
    wrong = [name for name in files or {} if not is_plain_name(name) or name.endswith((".safetensors", INDEX))]
    if wrong or max_file_bytes < 1:
        raise CheckpointError(
            f"expected plain names of other files than the tensors', found {', '.join(map(repr, wrong))}"
            if wrong
            else f"max_file_bytes: expected a positive number, found {max_file_bytes}"
        )
    groups = _grouped_in_files(_shards_of_source(source, kind, rename, dtype), max_file_bytes)
    names = (
        [SINGLE]
        if len(groups) == 1
        else [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in _count_to_export(groups)]
    )
    with new_export_path(path, force=force) as draft:
        os.mkdir(draft, 0o700)
        save_id = {SAVE: secrets.token_hex(8)} | dict(notes or {})
        for number, (name, group) in enumerate(zip(names, groups, strict=True), 1):
            parts = save_id | {PART: f"{number}/{len(groups)}"} if len(groups) > 1 else notes
            path_ = os.path.join(draft, name)
            write_tensors(path_, group, BLOCK_SIZE, metadata=_noted_in_export_header(parts), advance=advance, seal=True)
        texts = dict(files or {})
        if len(groups) > 1:
            total = sum(shard.num_bytes for group in groups for _, shard in group)
            where = {key: name for name, group in zip(names, groups, strict=True) for key, _ in group}
            texts[INDEX] = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n"
        for name, text in texts.items():
            write_new(os.path.join(draft, name), text.encode())
        sync_folder(draft)
    return os.path.abspath(os.fspath(path))


def save_full(
    path: str | os.PathLike[str],
    content: Content,
    channel: Channel,
    write: Callable[[Source, str], object] = write_file_of,
) -> str:
    """Write what the ranks hold in parts as whole tensors: with `write_file_of`, or `partial(write_folder, files=...)`. Collective.

    Raises CheckpointError on every rank; nothing is published then.
    """
    saving = FullSaving(path, content, channel, write)
    saving.agree()
    return saving.write()


class FullSaving:
    """Whole tensors on their way to `path`; in the same steps as `Saving`.

    The parts go to the disk first, all ranks at once and with checksums, and rank 0 puts them together from there; so no rank holds more
    than its share and one tensor, and the disk needs room for twice the tensors. `write` decides whether what exists is replaced.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        content: Content,
        channel: Channel,
        write: Callable[[Source, str], object],
    ) -> None:
        self._path, self._content, self._channel, self._write = os.path.abspath(path), content, channel, write
        self._stack = ExitStack()
        self._parts: Saving | None = None

    def agree(self) -> None:
        """Make the draft, and choose who writes what. Collective."""
        try:
            folder = together(self._channel, self._begin)[0]
            self._parts = Saving(Root(folder), "parts", self._content, self._channel)
            self._parts.agree()
        except BaseException:
            self.discard()
            raise

    @property
    def share(self) -> list[Shard]:
        """This rank's share to write."""
        return self._agreed.share

    @share.setter
    def share(self, shards: list[Shard]) -> None:
        self._agreed.share = shards

    def fail(self, error: Exception) -> None:
        """Make `write` fail on every rank."""
        self._agreed.fail(error)

    def write(self) -> str:
        """Write the parts, and the whole from them. Collective."""
        try:
            parts = self._agreed.write()
            together(self._channel, lambda: self._finish(parts))
        finally:
            self.discard()
        return self._path

    def discard(self) -> None:
        """Remove the drafts."""
        if self._parts is not None:
            self._parts.discard()
        self._stack.close()

    @property
    def _agreed(self) -> Saving:
        assert self._parts is not None, "the ranks have agreed"
        return self._parts

    def _begin(self) -> str:
        if self._channel.rank:
            return ""
        parent = os.path.dirname(self._path)
        os.makedirs(parent, 0o700, exist_ok=True)
        return self._stack.enter_context(_locked_folder(parent))

    def _finish(self, parts: str) -> None:
        if self._channel.rank == 0:
            with CheckpointSource(parts) as source:
                self._write(source, self._path)


def standing(path: str | os.PathLike[str]) -> str | None:
    """Where the exported file or folder is that `path` names: what a forced save had moved aside if that died; None if there is nothing."""
    target = os.path.abspath(os.fspath(path))
    if os.path.lexists(target):
        return target
    parent, name = os.path.split(target)
    return Root(parent).replaced(name)


@contextmanager
def new_export_path(path: str | os.PathLike[str], *, force: bool = False) -> Iterator[str]:
    """A name to write a file or a folder under; it becomes `path` if all goes well and is removed otherwise.

    Raises CheckpointError if `path` exists and is not to be replaced, at the beginning or at the end.
    """
    target = os.path.abspath(os.fspath(path))
    parent = os.path.dirname(target)
    if os.path.lexists(target) and not force:
        raise CheckpointError(f"{target} exists and is not overwritten")
    if not os.path.isdir(parent):
        raise CheckpointError(f"cannot write {target}: there is no folder {parent}")
    try:
        with _locked_folder(parent) as folder:
            draft = os.path.join(folder, "draft")
            yield draft
            with publishing(parent):
                _publish_export(draft, target, force)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror}") from error


def _publish_export(draft: str, target: str, force: bool) -> None:
    """Moves what was written to its name; with `force` in the place of what was there."""
    parent, name = os.path.split(target)
    replaced = None
    if force and os.path.lexists(target):
        if os.path.isfile(draft) and os.path.isfile(target):
            os.replace(draft, target)  # at once
            sync_folder(parent)
            return
        replaced = Root(parent).move_aside(name)
    if os.path.isdir(draft):
        if os.path.lexists(target):  # a rename would replace an empty folder
            raise CheckpointError(f"{target} exists and is not overwritten")
        os.rename(draft, target)
    else:
        os.link(draft, target)  # fails if there is one, which a rename does not
    sync_folder(parent)
    if replaced is not None:
        remove(replaced)


def _noted_in_export_header(notes: Mapping[str, str] | None) -> dict[str, str]:
    """The header's texts; Hugging Face wants to read the format."""
    return {"format": "pt", **(notes or {})}


@contextmanager
def _locked_folder(parent: str) -> Iterator[str]:
    """A folder for drafts, removed at the end; `Root.clean` removes a dead process's."""
    folder, lock = make_locked(parent, "export", DRAFT)
    try:
        yield folder
    finally:
        lock.close()
        shutil.rmtree(folder, ignore_errors=True)


def _shards_of_source(
    source: Source, kind: str, rename: Rename | None, dtype: torch.dtype | None
) -> list[tuple[str, Shard]]:
    """The tensors of a kind as shards that are read when they are written, by their names in the file."""
    items = [item for item in source.items if item.kind == kind]
    if not items:
        there = ", ".join(sorted({item.kind for item in source.items})) or "nothing"
        raise CheckpointError(f"expected tensors of the kind {kind}, found {there}")
    shards: dict[str, Shard] = {}
    for item in items:
        name = item.name if rename is None else rename(item.name)
        if name is None:
            continue
        if name in shards:
            raise CheckpointError(
                f"two tensors would be called {printable(name)}: {printable(shards[name].name)} and {printable(item.name)}"
            )
        as_dtype = dtype if dtype is not None and item.dtype.is_floating_point else item.dtype
        shards[name] = shard_of(source, item, as_dtype)
    return list(shards.items())


def shard_of(source: Source, item: SourceItem, dtype: torch.dtype | None = None) -> Shard:
    """A whole tensor of a source, read when it is written."""
    whole = replace(item, dtype=dtype or item.dtype)
    bring = partial(_read_for_export, source, item, whole.dtype)
    return Shard(item.kind, item.name, whole.dtype, item.shape, item.shape, (0,) * len(item.shape), bring)


def _read_for_export(source: Source, item: SourceItem, dtype: torch.dtype) -> Tensor:
    return source.read(item).to(dtype)


def _grouped_in_files(shards: Sequence[tuple[str, Shard]], most: int) -> list[list[tuple[str, Shard]]]:
    """In order, as many to a file as fit."""
    groups: list[list[tuple[str, Shard]]] = [[]]
    size = 0
    for key, shard in shards:
        if groups[-1] and size + shard.num_bytes > most:
            groups.append([])
            size = 0
        groups[-1].append((key, shard))
        size += shard.num_bytes
    return groups


def _count_to_export(groups: Sequence[object]) -> range:
    return range(1, len(groups) + 1)
