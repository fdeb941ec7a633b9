"""Reading a checkpoint: any box of any tensor, from whichever files hold it, every byte against its checksum.

    checkpoint = Checkpoint.open(Root("run").find("step_100"))
    checkpoint.entries["model", "head.weight"]                    dtype, shape
    checkpoint.read("model", "head.weight", Box((12564, 0), (2, 768)))
    checkpoint.read_into(shard)                                   fills the tensor of a Shard
    checkpoint.metadata, .plan, .user(), .rank_state(0), .pickled("name")

Only blocks that hold wanted rows are read, one at a time: beside the result there is one block, or, where a box takes part of each row,
one row along the first dimension. A box that takes whole rows is read into its tensor directly.
"""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smpc.checkpoint.folder.folders import check_whole
from smpc.checkpoint.format.draft_content import VALUES, Advance, Shard
from smpc.checkpoint.format.dtypes import byte_view, num_bytes
from smpc.checkpoint.format.manifest import Entry, Manifest, ManifestPiece
from smpc.checkpoint.format.plain_json import rebuild
from smpc.checkpoint.format.regions import Box
from smpc.checkpoint.format.regular_file import open_regular, printable, read_regular
from smpc.errors import CheckpointError


class Checkpoint:
    """An open checkpoint. Use it as a context manager, or `close` it."""

    def __init__(self, folder: str, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._descriptors: dict[str, int] = {}

    @staticmethod
    def open(folder: str | os.PathLike[str], *, any_name: bool = False) -> Checkpoint:
        """Read the manifest, and check that the files exist. Raises CheckpointError, naming the errors.

        `any_name`: to look at it only; otherwise the folder must have the name of the checkpoint in it (`folders.same_name`).
        """
        path = os.path.abspath(os.fspath(folder))
        return Checkpoint(path, check_whole(path, any_name=any_name))

    def close(self) -> None:
        """Close the files."""
        descriptors, self._descriptors = self._descriptors, {}
        for descriptor in descriptors.values():
            os.close(descriptor)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What it holds ------------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> Mapping[tuple[str, str], Entry]:
        """Tensors by kind and name."""
        return self.manifest.entries

    @property
    def metadata(self) -> Any:
        """The saved metadata."""
        return self._tree(self.manifest.metadata, "metadata")

    @property
    def plan(self) -> str | None:
        """JSON of the plan, if one was saved."""
        return self.manifest.plan

    def user(self) -> Any:
        """The user's content."""
        return self._tree(self.manifest.user, "user")

    def rank_state(self, rank: int) -> Any:
        """The state of a rank of the job that saved."""
        if not 0 <= rank < len(self.manifest.ranks):
            raise CheckpointError(
                f"{self.folder}: expected a rank below {len(self.manifest.ranks)}, with which it was saved, found {rank}"
            )
        return self._tree(self.manifest.ranks[rank], f"rank {rank}")

    def pickled(self, name: str) -> Any:
        """Unpickle content that was saved so. This RUNS what the file says; call it only for files that you trust."""
        file = self.manifest.pickled.get(name)
        if file is None:
            raise CheckpointError(
                f"{self.folder}: no pickled content {name!r}; there is {', '.join(self.manifest.pickled) or 'none'}"
            )
        path = os.path.join(self.folder, file)
        data = read_regular(path, self.manifest.files[file].size)
        if zlib.crc32(data) != self.manifest.files[file].checksum:
            raise _damaged_when_read(path)
        try:
            return pickle.loads(data)
        except Exception as error:  # whatever the user's classes raise
            raise CheckpointError(f"cannot unpickle {path}: {type(error).__name__}: {error}") from error

    # Reading tensors ----------------------------------------------------------------------------------------------------

    def read(self, kind: str, name: str, box: Box | None = None) -> Tensor:
        """A tensor, or a box of it, on the CPU."""
        entry = self._entry(kind, name)
        box = box or Box((0,) * len(entry.shape), entry.shape)
        values = torch.empty(box.shape, dtype=entry.dtype)
        self.read_into(Shard.of(kind, name, values, entry.shape, box.offsets))
        return values

    def read_into(self, shard: Shard) -> None:
        """Fill a shard's tensor, on whatever device; it is cast if its dtype is another. Shapes must agree.

        Raises CheckpointError, naming the file, at the first block that is damaged; the tensor is partly filled then. Use
        `smpc.checkpoint.load`, which verifies all first.
        """
        entry = self._entry(shard.kind, shard.name)
        if entry.shape != shard.global_shape:
            raise CheckpointError(
                f"{shard.kind} {printable(shard.name)}: expected the shape {list(shard.global_shape)}, {self.folder} has "
                f"{list(entry.shape)}"
            )
        wanted = Box(shard.offsets, shard.shape)
        target = shard.tensor.detach()
        with torch.no_grad():
            for piece in entry.pieces:
                common = wanted & piece.box
                if common is not None:
                    self._copy(entry, piece, common, target[common.within(wanted)])
        torch.autograd.graph.increment_version(shard.tensor)  # bytes were written behind torch's back

    def blocks(self, entry: Entry) -> int:
        """How many blocks hold a tensor."""
        return sum(len(piece.checksums) for piece in entry.pieces)

    def verify_block(self, entry: Entry, index: int) -> int:
        """Check a block of a tensor, counted through its pieces. Returns its size; raises CheckpointError, naming the file."""
        for piece in entry.pieces:
            if index < len(piece.checksums):
                return len(self._block(entry, piece, index))
            index -= len(piece.checksums)
        raise AssertionError("a block beyond the last")

    def verify_file(self, name: str) -> int:
        """Check what a file has beside tensors: its size, and its header or pickled content. Returns the bytes checked."""
        file, path = self.manifest.files[name], os.path.join(self.folder, name)
        size = file.header_size or file.size
        checksum = 0
        for start in range(0, size, self.manifest.block_size):
            count = min(self.manifest.block_size, size - start)
            checksum = zlib.crc32(self._pread(name, start, memoryview(bytearray(count))), checksum)
        if checksum != file.checksum or os.fstat(self._descriptor(name)).st_size != file.size:
            raise _damaged_when_read(path)
        return size

    # --------------------------------------------------------------------------------------------------------------------

    def _entry(self, kind: str, name: str) -> Entry:
        try:
            return self.manifest.entries[kind, name]
        except KeyError:
            raise CheckpointError(f"{self.folder} has no {kind} {printable(name)}") from None

    def _tree(self, values: Any, prefix: str) -> Any:
        return rebuild(values, lambda name: self.read(VALUES, f"{prefix}{name}"))

    def _copy(self, entry: Entry, piece: ManifestPiece, common: Box, target: Tensor) -> None:
        """Copy a box of a piece into `target`, which has its shape."""
        inner = Box((0,) * len(piece.shape), piece.shape)
        place = Box(tuple(a - b for a, b in zip(common.offsets, piece.offsets, strict=True)), common.shape)
        row = num_bytes(piece.shape[1:], entry.dtype)  # of a scalar: the bytes of one
        first, count = (place.offsets[0], place.shape[0]) if piece.shape else (0, 1)
        start, end = first * row, (first + count) * row
        whole_rows = place.shape[1:] == inner.shape[1:]
        if whole_rows and target.is_contiguous() and target.device.type == "cpu" and target.dtype == entry.dtype:
            view = byte_view(target)
            self._stream(entry, piece, start, end, lambda at, data: _place_read_data(view, at, data), view)
            return
        self._copy_rows(entry, piece, place, target, row)

    def _copy_rows(self, entry: Entry, piece: ManifestPiece, place: Box, target: Tensor, row: int) -> None:
        """As `_copy`, through a buffer of a few whole rows."""
        first, count = (place.offsets[0], place.shape[0]) if piece.shape else (0, 1)
        columns = place.within(Box((0,) * len(piece.shape), piece.shape))[1:]
        pending = bytearray()
        done = 0

        def take(_: int, data: memoryview) -> None:
            nonlocal pending, done
            pending += data
            rows = len(pending) // row
            if not rows:
                return
            chunk = torch.frombuffer(pending[: rows * row], dtype=entry.dtype).view(rows, *piece.shape[1:])
            if piece.shape:
                target[done : done + rows].copy_(chunk[(slice(None), *columns)])
            else:
                target.copy_(chunk[0])
            pending = pending[rows * row :]
            done += rows

        self._stream(entry, piece, first * row, (first + count) * row, take, None)

    def _stream(
        self,
        entry: Entry,
        piece: ManifestPiece,
        start: int,
        end: int,
        take: Callable[[int, memoryview], None],
        into: memoryview | None,
    ) -> None:
        """Give the bytes from `start` to `end` of a piece to `take`, with their distance from `start`, as they are verified.

        With `into`, which has room for all of them, blocks that are wanted whole are read there and not given.
        """
        size = self.manifest.block_size
        total = num_bytes(piece.shape, entry.dtype)
        for index in range(start // size, -(-end // size)):
            low, high = index * size, min((index + 1) * size, total)
            if into is not None and start <= low and high <= end:
                self._block(entry, piece, index, into[low - start : high - start])
                continue
            block = self._block(entry, piece, index)
            from_, to = max(low, start), min(high, end)
            take(from_ - start, block[from_ - low : to - low])

    def _block(self, entry: Entry, piece: ManifestPiece, index: int, into: memoryview | None = None) -> memoryview:
        size = self.manifest.block_size
        length = min(size, num_bytes(piece.shape, entry.dtype) - index * size)
        data = self._pread(piece.file, piece.begin + index * size, into or memoryview(bytearray(length)))
        if zlib.crc32(data) != piece.checksums[index]:
            raise _damaged_when_read(
                os.path.join(self.folder, piece.file), f", in {entry.kind} {printable(entry.name)}"
            )
        return data

    def _pread(self, name: str, position: int, into: memoryview) -> memoryview:
        path, done = os.path.join(self.folder, name), 0
        descriptor = self._descriptor(name)
        try:
            while done < len(into):
                count = os.preadv(descriptor, [into[done:]], position + done)
                if not count:
                    raise CheckpointError(f"{path}: truncated at byte {position + done}")
                done += count
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        return into

    def _descriptor(self, name: str) -> int:
        if name not in self._descriptors:
            self._descriptors[name] = open_regular(os.path.join(self.folder, name))
        return self._descriptors[name]


def verify(
    checkpoint: Checkpoint,
    advance: Advance | None = None,
    *,
    kinds: Collection[str] | None = None,
    rank: int = 0,
    size: int = 1,
) -> list[str]:
    """Check every byte, or only some kinds of tensors, or only this rank's part of them.

    Returns what is damaged, one line each: all of it, not the first alone.
    """
    entries = [entry for entry in checkpoint.entries.values() if kinds is None or entry.kind in kinds]
    files = checkpoint.manifest.files if kinds is None else {piece.file for entry in entries for piece in entry.pieces}
    work: list[Callable[[], int]] = [partial(checkpoint.verify_file, name) for name in sorted(files)]
    for entry in entries:
        work += [partial(checkpoint.verify_block, entry, index) for index in range(checkpoint.blocks(entry))]
    damaged: list[str] = []
    for check in work[rank::size]:
        try:
            count = check()
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        if advance is not None:
            advance(count)
    return list(dict.fromkeys(damaged))


def _place_read_data(view: memoryview, at: int, data: memoryview) -> None:
    view[at : at + len(data)] = data


def _damaged_when_read(path: str, where: str = "") -> CheckpointError:
    return CheckpointError(f"{path}: damaged{where}: its bytes do not have the checksum that the manifest says")
