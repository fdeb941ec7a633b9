"""The manifest: what a checkpoint's files hold, and the checksums of every byte.

    File        size, and the crc32 of the bytes before the tensors (the safetensors header)
    Piece       a box of a global tensor in a file: where its bytes begin, and a crc32 for each `block_size` bytes of it
    Entry       a global tensor: kind, name, dtype, shape, and the pieces that tile it
    Manifest    all of it, the JSON values, and the number of the checkpoint in the order of saving

The crc32s find damage: flipped bits, truncated, swapped or stale files. They are no signature. The manifest ends with the sha256 of itself.
All its fields are checked when it is read: names of files are plain names in the same folder, boxes tile their tensors, bytes of pieces are
within their files. A manifest that fails a check is refused before a file is opened.

On disk, in one line: {"body": {...}, "sha256": "..."}.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smpc.checkpoint.format.draft_content import KIND
from smpc.checkpoint.format.dtypes import checked_shape, dtype_name, dtype_of, num_bytes
from smpc.checkpoint.format.regions import Box, find_gap
from smpc.checkpoint.format.regular_file import printable
from smpc.errors import CheckpointError

NAME = "manifest.json"
FORMAT, VERSION = "smpc-checkpoint", 1
BLOCK_SIZE = 4 << 20
MAX_BYTES = 1 << 30  # a manifest of more is not read
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-]*(\.[A-Za-z0-9_\-]+)*")


@dataclass(frozen=True, slots=True)
class File:
    """A file of tensors, or (`header_size` 0, `checksum` of all of it) of pickled content."""

    size: int
    header_size: int
    checksum: int


@dataclass(frozen=True, slots=True)
class ManifestPiece:
    """`begin`: position of the first byte in the file. One checksum for each block, the last of which may be short."""

    file: str
    begin: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    checksums: tuple[int, ...]

    @property
    def box(self) -> Box:
        """Its place in the global tensor."""
        return Box(self.offsets, self.shape)


@dataclass(frozen=True, slots=True)
class Entry:
    """A global tensor."""

    kind: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[ManifestPiece, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the full tensor in bytes."""
        return num_bytes(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class Manifest:
    """`sequence`: 1 more than the previous checkpoint's in the same folder. `pickled`: file by name."""

    tag: str
    sequence: int
    world_size: int
    block_size: int
    files: Mapping[str, File]
    entries: Mapping[tuple[str, str], Entry]
    metadata: Any
    ranks: tuple[Any, ...]
    user: Any
    pickled: Mapping[str, str]
    plan: str | None

    @property
    def kinds(self) -> tuple[str, ...]:
        """In order of names."""
        return tuple(sorted({kind for kind, _ in self.entries}))

    @property
    def num_bytes(self) -> int:
        """On disk, without the manifest."""
        return sum(file.size for file in self.files.values())

    def to_json(self) -> str:
        """The text of the file."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "tag": self.tag,
            "sequence": self.sequence,
            "world_size": self.world_size,
            "block_size": self.block_size,
            "files": {name: [f.size, f.header_size, f.checksum] for name, f in self.files.items()},
            "tensors": [_entry_json(entry) for entry in self.entries.values()],
            "metadata": self.metadata,
            "ranks": self.ranks,
            "user": self.user,
            "pickled": self.pickled,
            "plan": self.plan,
        }
        return _sealed_manifest(_canonical_manifest(body))

    @staticmethod
    def from_json(text: str, where: str) -> Manifest:
        """Read and check. `where` names the file in errors."""
        try:
            document = json.loads(text, object_pairs_hook=without_duplicates)
            body = document["body"]
            sealed = _sealed_manifest(_canonical_manifest(body))
            if not sealed.endswith(f'"sha256":"{document["sha256"]}"}}\n'):
                raise CheckpointError("it does not have the sha256 that it says, so it is damaged")
            if body["format"] != FORMAT or body["version"] > VERSION:
                raise CheckpointError(
                    f"expected the format {FORMAT} up to version {VERSION}, found {body['format']} version {body['version']}; "
                    "a later release wrote it"
                )
            found = _parsed_manifest(body)
            if sealed != text:  # the same values in other bytes: a capital letter in an escaped character, a space
                raise CheckpointError("it has other bytes than were written, so it is damaged")
            return found
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{where}: not a manifest, or damaged: {type(error).__name__}: {str(error)[:200]}"
            ) from error


def is_plain_name(name: object) -> bool:
    """Whether this names a file in a folder, and nothing elsewhere or hidden."""
    return isinstance(name, str) and len(name) <= 200 and _FILE.fullmatch(name) is not None


def num_blocks(piece: ManifestPiece, dtype: torch.dtype, block_size: int) -> int:
    """How many checksums a piece has."""
    return -(-num_bytes(piece.shape, dtype) // block_size)


def _sealed_manifest(body: str) -> str:
    """The text of the file, byte for byte."""
    return f'{{"body":{body},"sha256":"{hashlib.sha256(body.encode()).hexdigest()}"}}\n'


def _canonical_manifest(body: Any) -> str:
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError if a key occurs twice, as readers would take one or the other."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _entry_json(entry: Entry) -> list[Any]:
    pieces = [[p.file, p.begin, p.offsets, p.shape, p.checksums] for p in entry.pieces]
    return [entry.kind, entry.name, dtype_name(entry.dtype), entry.shape, pieces]


def _parsed_manifest(body: Mapping[str, Any]) -> Manifest:
    """The manifest that a JSON object is; CheckpointError if it is none."""
    files = {name: File(*_natural_numbers(values, 3)) for name, values in body["files"].items()}
    pickled = {str(name): str(file) for name, file in body["pickled"].items()}
    wrong = [
        f"expected the plain name of a file in the same folder, found {name!r}"
        for name in [*files, *pickled.values()]
        if not is_plain_name(name) or name == NAME
    ]
    if wrong:
        raise CheckpointError("; ".join(wrong))
    (block_size, sequence, world_size) = _natural_numbers(
        [body[k] for k in ("block_size", "sequence", "world_size")], 3
    )
    ranks = tuple(body["ranks"])
    if len(ranks) != world_size:
        raise CheckpointError(f"expected the state of {world_size} ranks, found that of {len(ranks)}")
    if not block_size:
        raise CheckpointError("block_size: expected a positive number, found 0")
    entries: dict[tuple[str, str], Entry] = {}
    for entry in map(_parsed_entry, body["tensors"]):
        if (entry.kind, entry.name) in entries:
            raise CheckpointError(f"{entry.kind} {printable(entry.name)} occurs twice")
        _check_entry(entry, files, block_size)
        entries[entry.kind, entry.name] = entry
    _check_overlaps(entries)
    return Manifest(
        tag=str(body["tag"]),
        sequence=sequence,
        world_size=world_size,
        block_size=block_size,
        files=files,
        entries=entries,
        metadata=body["metadata"],
        ranks=ranks,
        user=body["user"],
        pickled=pickled,
        plan=None if body["plan"] is None else str(body["plan"]),
    )


def _parsed_entry(values: Sequence[Any]) -> Entry:
    """The entry of a tensor in a manifest."""
    kind, name, dtype, shape, pieces = values
    if not isinstance(kind, str) or not KIND.fullmatch(kind) or not isinstance(name, str):
        raise CheckpointError(f"expected a kind and a name, found {str(kind)[:80]!r} and {str(name)[:80]!r}")
    return Entry(
        kind,
        name,
        dtype_of(dtype),
        checked_shape(shape),
        tuple(
            ManifestPiece(
                file,
                _natural_numbers([begin])[0],
                checked_shape(offsets),
                checked_shape(box),
                _natural_numbers(checksums),
            )
            for file, begin, offsets, box, checksums in pieces
        ),
    )


def _natural_numbers(values: Any, length: int | None = None) -> tuple[int, ...]:
    """A list of whole numbers; CheckpointError if it is none."""
    if not isinstance(values, list) or any(type(v) is not int or not 0 <= v < 1 << 62 for v in values):
        raise CheckpointError(f"expected a list of whole numbers, found {str(values)[:80]}")
    if length is not None and len(values) != length:
        raise CheckpointError(f"expected {length} numbers, found {len(values)}")
    return tuple(values)


def _check_entry(entry: Entry, files: Mapping[str, File], block_size: int) -> None:
    where = f"{entry.kind} {printable(entry.name)}"
    for piece in entry.pieces:
        file = files.get(piece.file)
        if file is None:
            raise CheckpointError(f"{where}: {piece.file!r} is not among the files")
        if piece.begin < file.header_size or piece.begin + num_bytes(piece.shape, entry.dtype) > file.size:
            raise CheckpointError(f"{where}: its bytes are not inside {piece.file}")
        if num_blocks(piece, entry.dtype, block_size) != len(piece.checksums):
            raise CheckpointError(f"{where}: expected a checksum for each block, found {len(piece.checksums)}")
    gap = find_gap(entry.shape, [piece.box for piece in entry.pieces])
    if gap is not None:
        raise CheckpointError(f"{where}: {gap}")


def _check_overlaps(entries: Mapping[tuple[str, str], Entry]) -> None:
    spans: dict[str, list[tuple[int, int, str]]] = {}
    for entry, piece in _manifest_pieces(entries):
        end = piece.begin + num_bytes(piece.shape, entry.dtype)
        spans.setdefault(piece.file, []).append((piece.begin, end, f"{entry.kind} {printable(entry.name)}"))
    for file, found in spans.items():
        found.sort()
        for (_, end, one), (begin, _, other) in itertools.pairwise(found):
            if begin < end:
                raise CheckpointError(f"{one} and {other} share bytes of {file}")


def _manifest_pieces(entries: Mapping[tuple[str, str], Entry]) -> Iterator[tuple[Entry, ManifestPiece]]:
    return ((entry, piece) for entry in entries.values() for piece in entry.pieces)
