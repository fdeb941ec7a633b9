"""Saving: every rank writes its share into a draft, and the draft becomes the checkpoint or nothing does.

    save(Root("run"), "step_100", content, channel)      collective; the path of the checkpoint

          rank 0                               other ranks
    agree    make the draft                                           survey of all shards, writers chosen
    write    own files, on the disk            own files, on the disk
    agree    ------------------- everybody's checksums, or everybody's error -------------------
    publish  manifest, rename, marker, prune
    agree    --------------------------------- done, or the error ------------------------------

If several ranks hold a shard, one of them writes it: shards are assigned from the largest on, each to the holder with the fewest bytes
so far. All ranks compute that from the same survey, and check in passing that the shards tile their tensors.
"""

from __future__ import annotations

import os
import pickle
import warnings
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from smpc.checkpoint.channel import Channel, together
from smpc.checkpoint.folder.folders import Draft, Root, check_keep, write_new
from smpc.checkpoint.format.draft_content import VALUES, Advance, Content, Shard
from smpc.checkpoint.format.dtypes import dtype_name, dtype_of, num_bytes
from smpc.checkpoint.format.manifest import (
    BLOCK_SIZE,
    NAME,
    Entry,
    File,
    Manifest,
    ManifestPiece,
    is_plain_name,
)
from smpc.checkpoint.format.plain_json import flatten
from smpc.checkpoint.format.regions import Box, find_gap
from smpc.checkpoint.format.regular_file import printable
from smpc.checkpoint.format.tensorfile import write_tensors
from smpc.errors import CheckpointError

Described = tuple[
    str, str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]
]  # kind, name, dtype, shape, global, offsets


def save(
    root: Root,
    tag: str,
    content: Content,
    channel: Channel,
    *,
    force: bool = False,
    keep: int | None = None,
    advance: Advance | None = None,
) -> str:
    """Save a checkpoint and return its folder. Every rank of the channel calls this with the same tag, `force` and `keep`.

    force: replace a checkpoint of that tag; the old one stays until the new one is complete. keep: afterwards remove all but so many of the
    newest checkpoints; what cannot be removed is a warning. advance: told the bytes that this rank has written.

    Raises CheckpointError on every rank, naming the rank and the path, if it fails on one; nothing is published then. A rank that does not
    come, or dies, is an error on the others within the channel's timeout.
    """
    saving = Saving(root, tag, content, channel, force=force, keep=keep)
    saving.agree()
    return saving.write(advance)


class Saving:
    """One checkpoint on its way: `agree`, perhaps replace `share` by copies, `write`. `discard` it in place of `write`."""

    def __init__(
        self, root: Root, tag: str, content: Content, channel: Channel, *, force: bool = False, keep: int | None = None
    ) -> None:
        self._root, self._tag, self._content, self._channel = root, tag, content, channel
        self._force, self._keep = force, keep
        self._draft: Draft | None = None
        self._folder = ""
        self._failure: Exception | None = None
        self._held: list[Shard] = []
        self._trees: dict[str, Any] = {}
        self._pickles: dict[str, bytes] = {}
        self._survey: list[list[Described]] = []  # what each rank writes
        self.share: list[Shard] = []  # what this rank writes

    def agree(self) -> None:
        """Make the draft and choose who writes what. Collective."""
        try:
            answers = together(self._channel, self._begin)
            self._folder = answers[0]["folder"]
            self._divide(answers)  # every rank has all answers, so all raise or none
        except BaseException:
            self.discard()
            raise

    def fail(self, error: Exception) -> None:
        """Make `write` fail on every rank: this one cannot do its part."""
        self._failure = error

    def write(self, advance: Advance | None = None) -> str:
        """Write and publish. Collective; may run on another thread than `agree`."""
        try:
            answers = together(self._channel, lambda: self._write(advance))
            together(self._channel, lambda: self._publish(answers))
        except BaseException:
            self.discard()
            raise
        return os.path.join(self._root.path, self._tag)

    def _begin(self) -> Any:
        if self._keep is not None:
            check_keep(self._keep)
        self._held = _own_shards(self._content, self._trees, self._channel.rank)
        folder = ""
        if self._channel.rank == 0:
            self._pickles = _pickled_objects(self._content.pickled)
            for line in self._root.clean():
                warnings.warn(line, stacklevel=2)
            self._draft = self._root.begin(self._tag, force=self._force)
            folder = self._draft.path
        described = [(s.kind, s.name, dtype_name(s.dtype), s.shape, s.global_shape, s.offsets) for s in self._held]
        varying = [(s.kind, s.name) for s in self._held if s.varies]
        return {"tag": self._tag, "folder": folder, "shards": described, "varying": varying}

    def _divide(self, answers: Sequence[Any]) -> None:
        tags = sorted({answer["tag"] for answer in answers})
        if len(tags) > 1:
            raise CheckpointError(f"tag: expected the same on every rank, found {', '.join(tags)}")
        held = [[_described_to_save(values) for values in answer["shards"]] for answer in answers]
        _check_shards(held)
        varying = {(kind, name) for answer in answers for kind, name in answer["varying"]}
        self._survey = choose_writers(held, varying)
        own = dict(zip(held[self._channel.rank], self._held, strict=True))
        self.share = [own[described] for described in self._survey[self._channel.rank]]
        self._held = []

    def _write(self, advance: Advance | None) -> Any:
        if self._failure is not None:
            raise self._failure
        if not os.path.isdir(self._folder):
            raise CheckpointError(f"cannot see {self._folder}, which rank 0 made; all ranks must share the folder")
        files: dict[str, Any] = {}
        pieces: dict[int, Any] = {}  # by position in the share, which the other ranks know
        for kind in sorted({shard.kind for shard in self.share}):
            name = f"{kind}_{self._channel.rank:05d}.safetensors"
            members = {index: shard for index, shard in enumerate(self.share) if shard.kind == kind}
            keyed = [(_key_in_file(shard), shard) for shard in members.values()]
            written = write_tensors(os.path.join(self._folder, name), keyed, BLOCK_SIZE, advance=advance)
            files[name] = [written.file.size, written.file.header_size, written.file.checksum]
            for index, piece in zip(members, written.pieces, strict=True):
                pieces[index] = [piece.file, piece.begin, piece.checksums]
        self.share = []  # copies of tensors are not needed any more
        return {"files": files, "pieces": [pieces[index] for index in range(len(pieces))], "rank": self._trees["rank"]}

    def _publish(self, answers: Sequence[Any]) -> None:
        if self._draft is None:
            return
        draft = self._draft
        files = {name: File(*values) for answer in answers for name, values in answer["files"].items()}
        pickled = {}
        for name, data in self._pickles.items():
            pickled[name] = f"{name}.pkl"
            write_new(os.path.join(draft.path, pickled[name]), data)
            files[pickled[name]] = File(len(data), 0, zlib.crc32(data))
        for name, file in files.items():
            found = os.stat(os.path.join(draft.path, name)).st_size
            if found != file.size:
                raise CheckpointError(
                    f"{os.path.join(draft.path, name)}: expected {file.size} bytes, rank 0 sees {found}"
                )
        entries = self._entries(answers)
        with self._root.publishing():
            manifest = Manifest(
                tag=self._tag,
                sequence=self._root.next_sequence(),
                world_size=self._channel.size,
                block_size=BLOCK_SIZE,
                files=files,
                entries=entries,
                metadata=self._trees["metadata"],
                ranks=tuple(answer["rank"] for answer in answers),
                user=self._trees["user"],
                pickled=pickled,
                plan=self._content.plan,
            )
            write_new(os.path.join(draft.path, NAME), manifest.to_json().encode())
            self._root.publish(draft, force=self._force)
        self._draft = None
        if self._keep is not None:
            try:
                self._root.prune(self._keep)
            except CheckpointError as error:
                warnings.warn(f"old checkpoints are not removed: {error}", stacklevel=2)

    def _entries(self, answers: Sequence[Any]) -> dict[tuple[str, str], Entry]:
        found: dict[tuple[str, str], tuple[str, tuple[int, ...], list[ManifestPiece]]] = {}
        for described, answer in zip(self._survey, answers, strict=True):
            for (kind, name, dtype, shape, whole, offsets), (file, begin, sums) in zip(
                described, answer["pieces"], strict=True
            ):
                pieces = found.setdefault((kind, name), (dtype, whole, []))[2]
                pieces.append(ManifestPiece(file, begin, offsets, shape, tuple(sums)))
        return {
            (kind, name): Entry(kind, name, dtype_of(dtype), whole, tuple(sorted(pieces, key=lambda p: p.offsets)))
            for (kind, name), (dtype, whole, pieces) in found.items()
        }

    def discard(self) -> None:
        """Remove the draft, if there is one: nothing is published."""
        if self._draft is not None:
            self._root.discard(self._draft)
            self._draft = None


def choose_writers(
    held: Sequence[Sequence[Described]], varying: Collection[tuple[str, str]] = ()
) -> list[list[Described]]:
    """The shards that each rank writes, from the shards that each holds: every shard once, balanced by bytes. The same on every rank.

    `varying`: kind and name of tensors that the first rank that holds them writes. They, and shards with one holder, have no choice; the
    others follow, the largest first, each to the holder with the fewest bytes.
    """
    holders: dict[Described, list[int]] = {}
    for rank, shards in enumerate(held):
        for described in shards:
            ranks = holders.setdefault(described, [])
            if not ranks or described[:2] not in varying:
                ranks.append(rank)
    load = [0] * len(held)
    chosen: dict[Described, int] = {}
    order = sorted(holders.items(), key=lambda item: (len(item[1]) > 1, -_bytes_to_save(item[0]), item[0]))
    for described, ranks in order:
        chosen[described] = min(ranks, key=lambda rank: (load[rank], rank))
        load[chosen[described]] += _bytes_to_save(described)
    return [[described for described in shards if chosen[described] == rank] for rank, shards in enumerate(held)]


def _own_shards(content: Content, trees: dict[str, Any], rank: int) -> list[Shard]:
    """The rank's shards, those in its trees among them; fills `trees` with the trees' JSON."""
    shards = [shard for shard in content.shards if shard.num_bytes or 0 in shard.global_shape]
    if any(shard.kind == VALUES for shard in shards):
        raise CheckpointError(f"kind: {VALUES!r} is kept for tensors in metadata, user content and rank state")
    seen: set[tuple[str, str, tuple[int, ...]]] = set()
    for shard in shards:
        if (shard.kind, shard.name, shard.offsets) in seen:
            raise CheckpointError(f"{shard.kind} {printable(shard.name)} is given twice")
        seen.add((shard.kind, shard.name, shard.offsets))
    given = {"rank": (f"rank {rank}", content.rank_state)}
    if rank == 0:
        given |= {"metadata": ("metadata", content.metadata), "user": ("user", content.user)}
    for key, (prefix, tree) in given.items():
        trees[key], tensors = flatten(tree, prefix, objects=key == "user")
        shards += [Shard.whole(VALUES, f"{prefix}{name}", tensor) for name, tensor in tensors.items()]
    return shards


def _pickled_objects(objects: Mapping[str, Any]) -> dict[str, bytes]:
    """The pickles of objects by file name; CheckpointError for names or objects that cannot be."""
    data = {}
    for name, value in objects.items():
        if not is_plain_name(f"{name}.pkl"):
            raise CheckpointError(
                f"name of pickled content: expected letters, digits, '.', '_' and '-', found {name!r}"
            )
        try:
            data[name] = pickle.dumps(value)
        except Exception as error:  # whatever a user's __reduce__ raises
            raise CheckpointError(f"cannot pickle {name}: {type(error).__name__}: {error}") from error
    return data


def _check_shards(held: Sequence[Sequence[Described]]) -> None:
    """Raises CheckpointError, listing every tensor whose shards disagree or do not tile it."""
    tensors: dict[tuple[str, str], dict[Described, int]] = {}
    for rank, shards in enumerate(held):
        for described in shards:
            tensors.setdefault(described[:2], {}).setdefault(described, rank)
    wrong = []
    for (kind, name), found in tensors.items():
        (_, _, dtype, _, whole, _), first = next(iter(found.items()))
        for other, rank in found.items():
            if (other[2], other[4]) != (dtype, whole):
                wrong.append(
                    f"{kind} {printable(name)}: {dtype} of shape {list(whole)} on rank {first}, {other[2]} of shape {list(other[4])} on "
                    f"rank {rank}"
                )
                break
        else:
            gap = find_gap(whole, [Box(offsets, shape) for _, _, _, shape, _, offsets in found])
            wrong += [f"{kind} {printable(name)}: {gap}"] if gap else []
    if wrong:
        raise CheckpointError("\n".join(wrong))


def _described_to_save(values: Sequence[Any]) -> Described:
    kind, name, dtype, shape, whole, offsets = values
    return kind, name, dtype, tuple(shape), tuple(whole), tuple(offsets)


def _bytes_to_save(described: Described) -> int:
    return num_bytes(described[3], dtype_of(described[2]))


def _key_in_file(shard: Shard) -> str:
    """The key in a file; of a part, with its place."""
    if shard.shape == shard.global_shape:
        return shard.name
    place = ",".join(f"{start}:{start + size}" for start, size in zip(shard.offsets, shard.shape, strict=True))
    return f"{shard.name}[{place}]"
