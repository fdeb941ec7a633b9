"""Loading on any topology: every rank says which boxes of which tensors it wants; all is checked before anything is written.

    load(folder, [Shard.of("model", "head.weight", rows, (50257, 768), (12564, 0)), ...], channel) -> Loaded

    1  every rank opens the checkpoint and compares names, shapes and dtypes; all that is wrong is listed together
    2  the ranks check every block that one of them wants, each a part of the blocks, each block once
    3  every rank reads its boxes into its tensors, against the checksums again

    verify_source(source, channel)      2 for all that a source has; nothing is filled

A failure on one rank is CheckpointError on all. Until 2 has succeeded everywhere no tensor has been touched. Each rank needs its tensors
and one block (see `smpc.checkpoint.reader`), whatever the checkpoint's size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from smpc.checkpoint.channel import Channel, together
from smpc.checkpoint.format.draft_content import Advance, Shard
from smpc.checkpoint.format.regular_file import printable
from smpc.checkpoint.reader import Checkpoint, verify
from smpc.checkpoint.sources.conversion_sources import Source, damaged_of
from smpc.errors import CheckpointError

Key = tuple[str, str]

_MOST = 10  # lines about damage
_NOTHING = "nothing was loaded; take another checkpoint by its tag, or bring an undamaged copy of this one"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The keys that `strict=False` ignored: missing tensors, and tensors that no rank wants; (kind, name) in order."""

    missing: tuple[Key, ...]
    unexpected: tuple[Key, ...]


def load(
    folder: str | os.PathLike[str],
    wanted: Sequence[Shard],
    channel: Channel,
    *,
    strict: bool = True,
    cast: bool = False,
    kinds: Collection[str] | None = None,
    known: Collection[Key] = (),
    verified: bool = False,
    advance: Advance | None = None,
) -> Loaded:
    """Fill the shards' tensors. Collective; ranks may want different boxes, or nothing.

    strict: tensors that are missing, or of `kinds` (by default the kinds wanted by any rank) and wanted by no rank, are errors.
    known: tensors that may be there and wanted by no rank, such as other names of tied parameters; the same on all ranks.
    cast: tensors of another dtype than the saved are filled by casting; otherwise they are errors. Shapes must always agree.
    verified: `verify_source` has been called for this checkpoint just now, so its blocks are not checked before they are read.
    advance: told the bytes that this rank has checked and read.

    Raises CheckpointError on every rank if anything is wrong on one.
    """
    opened: list[Checkpoint] = []
    try:
        answers, loaded = _agree_on_load(folder, wanted, channel, opened, strict, cast, kinds, known)
        keys = [(kind, name) for answer in answers for kind, name in answer["wanted"]]
        if not verified:
            together(channel, lambda: _verify_share(opened[0], list(dict.fromkeys(keys)), channel, advance))
        together(channel, lambda: _fill_shards(opened[0], wanted, loaded, advance))
        return loaded
    finally:
        for checkpoint in opened:
            checkpoint.close()


def verify_source(source: Source | Checkpoint, channel: Channel, kinds: Collection[str] | None = None) -> None:
    """Check every byte that has a checksum (in a checkpoint, of some kinds of tensors), each rank its part. Collective.

    Raises CheckpointError on every rank, listing what is damaged. Nothing has been loaded then.
    """

    def look() -> None:
        if isinstance(source, Checkpoint):
            found = verify(source, kinds=kinds, rank=channel.rank, size=channel.size)
        else:
            found = damaged_of(source, channel.rank, channel.size)
        if found:
            more = [f"and {len(found) - _MOST} more damaged"] if len(found) > _MOST else []
            raise CheckpointError("\n".join([*found[:_MOST], *more, _NOTHING]))

    together(channel, look)


def check(
    folder: str | os.PathLike[str],
    wanted: Sequence[Shard],
    channel: Channel,
    *,
    strict: bool = True,
    cast: bool = False,
    kinds: Collection[str] | None = None,
    known: Collection[Key] = (),
) -> Loaded:
    """Compare names, shapes and dtypes as `load` does, and fill nothing. Collective."""
    opened: list[Checkpoint] = []
    try:
        return _agree_on_load(folder, wanted, channel, opened, strict, cast, kinds, known)[1]
    finally:
        for checkpoint in opened:
            checkpoint.close()


def _agree_on_load(
    folder: str | os.PathLike[str],
    wanted: Sequence[Shard],
    channel: Channel,
    opened: list[Checkpoint],
    strict: bool,
    cast: bool,
    kinds: Collection[str] | None,
    known: Collection[Key],
) -> tuple[list[Any], Loaded]:
    """All ranks open the checkpoint and agree on what is loaded."""
    answers = together(channel, lambda: _compare_shards(folder, wanted, opened, cast))
    loaded = _loaded_by_all(opened[0], answers, kinds, frozenset(known))
    _refuse_load(loaded, answers, opened[0].folder, strict)
    return answers, loaded


def _compare_shards(
    folder: str | os.PathLike[str], wanted: Sequence[Shard], opened: list[Checkpoint], cast: bool
) -> Any:
    """This rank's answer: which wanted tensors are in the checkpoint, and what is wrong with them."""
    checkpoint = Checkpoint.open(folder)
    opened.append(checkpoint)
    wrong: list[str] = []
    missing: list[Key] = []
    found: list[Key] = []
    for shard in wanted:
        entry = checkpoint.entries.get((shard.kind, shard.name))
        if entry is None:
            missing.append((shard.kind, shard.name))
            continue
        found.append((shard.kind, shard.name))
        if entry.shape != shard.global_shape:
            wrong.append(
                f"shape of {shard.kind} {printable(shard.name)}: expected {list(shard.global_shape)}, found {list(entry.shape)}"
            )
        if entry.dtype != shard.dtype and not cast:
            wrong.append(
                f"dtype of {shard.kind} {printable(shard.name)}: expected {shard.dtype}, found {entry.dtype}; ask for a cast to load it"
            )
    return {"wanted": found, "missing": missing, "wrong": wrong, "sequence": checkpoint.manifest.sequence}


def _loaded_by_all(
    checkpoint: Checkpoint, answers: Sequence[Any], kinds: Collection[str] | None, known: Collection[Key]
) -> Loaded:
    """What is loaded, missing and unexpected on all ranks together."""
    wanted = {(kind, name) for answer in answers for kind, name in answer["wanted"]}
    missing = sorted({(kind, name) for answer in answers for kind, name in answer["missing"]})
    compared = set(kinds) if kinds is not None else {kind for kind, _ in [*wanted, *missing]}
    unexpected = sorted(
        key for key in checkpoint.entries if key[0] in compared and key not in wanted and key not in known
    )
    return Loaded(tuple(missing), tuple(unexpected))


def _refuse_load(loaded: Loaded, answers: Sequence[Any], folder: str, strict: bool) -> None:
    """Raise if anything does not fit. Every rank has all answers, so it needs no agreement."""
    wrong = list(dict.fromkeys(line for answer in answers for line in answer["wrong"]))
    if strict:
        wrong = [
            *(f"missing: {kind} {printable(name)}" for kind, name in loaded.missing),
            *(f"unexpected: {kind} {printable(name)}" for kind, name in loaded.unexpected),
            *wrong,
        ]
    if len({answer["sequence"] for answer in answers}) > 1:
        wrong.append("the ranks see different checkpoints under this path; all must share the folder")
    if wrong:
        raise CheckpointError("\n".join([f"{folder} does not fit, nothing was loaded", *wrong]))


def _verify_share(checkpoint: Checkpoint, keys: Sequence[Key], channel: Channel, advance: Advance | None) -> None:
    """Verifies this rank's share of the blocks."""
    turn = 0
    files: dict[str, None] = {}
    for key in keys:
        entry = checkpoint.entries[key]
        files |= dict.fromkeys(piece.file for piece in entry.pieces)
        for index in range(checkpoint.blocks(entry)):
            if turn % channel.size == channel.rank:
                _check_block(partial(checkpoint.verify_block, entry, index), advance)
            turn += 1
    for name in files:
        if turn % channel.size == channel.rank:
            _check_block(partial(checkpoint.verify_file, name), advance)
        turn += 1


def _check_block(check: Callable[[], int], advance: Advance | None) -> None:
    """Runs one check; its error says that nothing was loaded."""
    try:
        count = check()
    except CheckpointError as error:
        raise CheckpointError(f"{error}\n{_NOTHING}") from error
    if advance is not None:
        advance(count)


def _fill_shards(checkpoint: Checkpoint, wanted: Sequence[Shard], loaded: Loaded, advance: Advance | None) -> None:
    """Reads the wanted shards into their tensors."""
    missing = set(loaded.missing)
    for shard in wanted:
        if (shard.kind, shard.name) in missing:
            continue
        try:
            checkpoint.read_into(shard)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; the file changed while it was loaded, and tensors are partly filled"
            ) from error
        if advance is not None:
            advance(shard.num_bytes)
