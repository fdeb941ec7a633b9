"""Full checkpoints in a run's folder: which exist, which is the newest, and which files belong together.

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

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from smpc.checkpoint import Root, read_file, standing
from smpc.checkpoint.folder.folders import check_whole, last_in_folder, read_marker, wrong_marker
from smpc.checkpoint.format.manifest import NAME, is_plain_name
from smpc.checkpoint.format.regular_file import is_file, printable
from smpc.checkpoint.format.tensorfile import is_tensorfile
from smpc.checkpoint.sources.conversion_sources import SAVE, SafetensorsSource
from smpc.errors import CheckpointError

MARKER, CONTENT = "newest_full", "user_content_"
TAG, INNER, NUMBER = "smpc_tag", "smpc_content", "smpc_number"


@dataclass(frozen=True, slots=True)
class Identity:
    """The notes in a full model's headers. `tag`, `save`: None in a model written by an earlier release."""

    content: str
    tag: str | None
    save: str | None
    number: int

    def notes(self) -> dict[str, str]:
        """The notes as stored in the header."""
        found = {INNER: self.content, NUMBER: str(self.number), TAG: self.tag, SAVE: self.save}
        return {key: text for key, text in found.items() if text is not None}


def identity_of(target: str) -> Identity | None:
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
    return Identity(
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


def _content_beside(path: str, tag: str, target: str, found: Identity) -> str | None:
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
