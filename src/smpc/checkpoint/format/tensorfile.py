"""One file of tensors: written in a stream with checksums, and its header read without trust.

    write_tensors(path, [("w", shard), ...], block_size) -> Written      a safetensors file; every byte on the disk, file 0600
    read_header(file, where)                             -> Header       of one, or of a `torch_archive`; bounded, checked

Writing holds one tensor at most beside what there is (none, if tensors are contiguous on the CPU). A block goes to the disk while its
checksum is still in the processor's cache, and the kernel is told to start with the disk while the next blocks are summed.

An open file of tensors, safetensors or a `torch_archive`: every tensor against its checksums, where the file has them.

file = TensorFile(path)         reads the header, and checks it
file.damage                     what is wrong with the header and the checksums in it, one line each
file.read("head.weight")        raises CheckpointError if a block of it is damaged
file.blocks, file.check(block)  every block that has a checksum, to verify all before anything is used
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smpc.checkpoint.format.draft_content import Advance, Shard
from smpc.checkpoint.format.dtypes import byte_view, checked_shape, dtype_name, dtype_of, num_bytes
from smpc.checkpoint.format.header_checksums import KEY, Seal, sealed, unsealed
from smpc.checkpoint.format.manifest import File, ManifestPiece, without_duplicates
from smpc.checkpoint.format.regular_file import is_file, open_regular, printable
from smpc.checkpoint.format.torch_archive import ArchiveMark, find_mark
from smpc.errors import CheckpointError

MAX_HEADER = 100_000_000  # as the safetensors library has it
_FLUSH_EVERY = 32 << 20
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """The content of a file: pieces in the order of the given shards."""

    file: File
    pieces: tuple[ManifestPiece, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """Tensors by key: dtype, shape and the position of the first byte in the file. `mark`: of an archive; None of a safetensors file."""

    size: int
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], int]]
    metadata: dict[str, str]
    mark: ArchiveMark | None = None


def write_tensors(
    path: str,
    shards: Sequence[tuple[str, Shard]],
    block_size: int,
    *,
    metadata: dict[str, str] | None = None,
    advance: Advance | None = None,
    seal: bool = False,
) -> WrittenFile:
    """Write a new file of tensors by key, and bring it to the disk. Raises CheckpointError, naming the file.

    `seal`: with the checksums in its header (`smpc.checkpoint.format.header_checksums`), for a file that has no manifest.
    """
    # Widest first: every tensor then begins at a multiple of the size of its elements.
    order = sorted(range(len(shards)), key=lambda i: (-shards[i][1].dtype.itemsize, i))
    notes = dict(metadata or {"format": "pt"})
    if seal:
        notes[KEY] = unsealed([shards[i][1].num_bytes for i in order], block_size)
    header, begins = _header_bytes([shards[i] for i in order], notes)
    pieces: dict[int, ManifestPiece] = {}
    try:
        with _Stream(path) as stream:
            stream.write(memoryview(header))
            for index, begin in zip(order, begins, strict=True):
                shard = shards[index][1]
                values = shard.fetch()
                if tuple(values.shape) != shard.shape or values.dtype != shard.dtype:
                    raise CheckpointError(
                        f"{shard.kind} {printable(shard.name)}: expected {shard.dtype} of shape {list(shard.shape)}, found "
                        f"{values.dtype} of shape {list(values.shape)}"
                    )
                sums = _write_blocks(stream, values, block_size, advance)
                del values  # before the next one is fetched
                pieces[index] = ManifestPiece(os.path.basename(path), begin, shard.offsets, shard.shape, sums)
            if seal:
                header = sealed(header, [each for i in order for each in pieces[i].checksums], block_size)
                stream.rewrite(memoryview(header))
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
    size = len(header) + sum(shard.num_bytes for _, shard in shards)
    return WrittenFile(File(size, len(header), zlib.crc32(header)), tuple(pieces[i] for i in range(len(shards))))


def is_tensorfile(path: str) -> bool:
    """Whether `read_header` reads a file: a safetensors file by its name or its first bytes (a JSON object), or an archive with a mark."""
    if path.endswith(".safetensors"):
        return True
    if not is_file(path):  # a link to one is: files of torch.save may be that
        return False
    try:
        with open(path, "rb") as file:
            return file.read(9)[8:] == b"{" or find_mark(file.fileno(), path) is not None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def read_header(descriptor: int, where: str) -> Header:
    """The header of a file of tensors. Raises CheckpointError, naming the file, if anything in it is not as it must be."""
    mark = find_mark(descriptor, where)
    if mark is not None:
        return _archive_header(descriptor, mark, where)
    size = os.fstat(descriptor).st_size
    prefix = os.pread(descriptor, 8, 0)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(size - 8, MAX_HEADER):
        raise CheckpointError(f"{where}: not a safetensors file, or truncated: {size} bytes with a header of {length}")
    tensors, metadata = _parsed_header(os.pread(descriptor, length, 8), 8 + length, where)
    position = 8 + length
    for key, begin, end in _tensorfile_extents(tensors):
        if begin != position:
            raise CheckpointError(
                f"{where}: {key!r} begins at byte {begin}, expected {position}: tensors overlap or leave gaps"
            )
        position = end
    if position != size:
        raise CheckpointError(f"{where}: expected {position} bytes, found {size}")
    return Header(8 + length, tensors, metadata)


def _archive_header(descriptor: int, mark: ArchiveMark, where: str) -> Header:
    """The tensors of an archive, in which a tensor may have several names."""
    if mark.length > MAX_HEADER:
        raise CheckpointError(f"{where}: its header has {mark.length} bytes; at most {MAX_HEADER} are read")
    tensors, metadata = _parsed_header(os.pread(descriptor, mark.length, mark.begin), 0, where)
    last = (0, 0)
    for key, begin, end in _tensorfile_extents(tensors):
        if (begin < last[1] and (begin, end) != last) or end > mark.begin:
            raise CheckpointError(
                f"{where}: {key!r} in bytes {begin} to {end}: tensors overlap, or it is not in the file"
            )
        last = (begin, end)
    return Header(mark.length, tensors, metadata, mark)


_Tensors = dict[str, tuple[torch.dtype, tuple[int, ...], int]]


def _parsed_header(text: bytes, data: int, where: str) -> tuple[_Tensors, dict[str, str]]:
    """The tensors and notes of a header. `data`: the position in the file that its offsets count from."""
    try:
        document = json.loads(text, object_pairs_hook=without_duplicates)
        notes = document.pop("__metadata__", {})
        tensors = {key: _tensor_of_header(values, data) for key, values in document.items()}
        return tensors, {str(key): str(value) for key, value in notes.items()}
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where}: the header is damaged: {type(error).__name__}: {str(error)[:200]}") from error


def _tensorfile_extents(tensors: _Tensors) -> list[tuple[str, int, int]]:
    """Names, first bytes and ends, in the order of the file."""
    found = [(key, begin, begin + num_bytes(shape, dtype)) for key, (dtype, shape, begin) in tensors.items()]
    return sorted(found, key=lambda item: item[1:])


class _Stream:
    """A new file, written through a descriptor; on the disk when closed without an error."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, 0o600)
        self._size = self._flushed = 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def rewrite(self, data: memoryview) -> None:
        """Write the first bytes anew."""
        position = 0
        while position < len(data):
            position += os.pwrite(self._descriptor, data[position:], position)

    def write(self, data: memoryview) -> None:
        while data:
            count = os.write(self._descriptor, data)
            self._size, data = self._size + count, data[count:]
        if self._size - self._flushed >= _FLUSH_EVERY:
            # Starts writing back what is dirty and does not wait for it.
            os.posix_fadvise(self._descriptor, self._flushed, self._size - self._flushed, os.POSIX_FADV_DONTNEED)
            self._flushed = self._size


def _header_bytes(shards: Sequence[tuple[str, Shard]], metadata: dict[str, str]) -> tuple[bytes, list[int]]:
    """The bytes before the tensors, and the position in the file of each."""
    document: dict[str, Any] = {"__metadata__": metadata}
    starts: list[int] = []
    position = 0
    for key, shard in shards:
        if key in document:
            raise CheckpointError(f"two tensors of one file would be called {printable(key)}; rename one")
        starts.append(position)
        position += shard.num_bytes
        document[key] = {
            "dtype": dtype_name(shard.dtype),
            "shape": shard.shape,
            "data_offsets": [starts[-1], position],
        }
    text = json.dumps(document, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + start for start in starts]


def _write_blocks(stream: _Stream, values: Tensor, block_size: int, advance: Advance | None) -> tuple[int, ...]:
    data = byte_view(values)
    sums: list[int] = []
    for start in range(0, len(data), block_size):
        block = data[start : start + block_size]
        sums.append(zlib.crc32(block))
        stream.write(block)
        if advance is not None:
            advance(len(block))
    return tuple(sums)


def _tensor_of_header(values: Any, data: int) -> tuple[torch.dtype, tuple[int, ...], int]:
    """The dtype, shape and place of a tensor that the header describes."""
    dtype, shape, (begin, end) = dtype_of(values["dtype"]), checked_shape(values["shape"]), values["data_offsets"]
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in (begin, end)):
        raise ValueError("an offset is not a whole number")
    if end - begin != num_bytes(shape, dtype):
        raise ValueError(f"{num_bytes(shape, dtype)} bytes of a tensor are in {end - begin}")
    return dtype, shape, data + begin


OWN = "smpc_"  # what the names of notes begin with that only this library writes, always with checksums
_READ = 4 << 20


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes of a tensor, by their position in the file, and their crc32."""

    name: str
    begin: int
    size: int
    checksum: int


class TensorFile:
    """See the module's docstring; `close` it. Raises CheckpointError if it is no file of tensors."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = open_regular(path)
        try:
            self.header: Header = read_header(self._descriptor, path)
            self.damage, blocks = self._read_seal()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._blocks: dict[str, list[Block]] = {}
        for block in blocks:
            self._blocks.setdefault(block.name, []).append(block)

    @property
    def has_checksums(self) -> bool:
        """Whether its bytes can be checked."""
        return KEY in self.header.metadata

    @property
    def blocks(self) -> list[Block]:
        """All blocks that have a checksum."""
        return [block for blocks in self._blocks.values() for block in blocks]

    def read(self, name: str) -> Tensor:
        """A tensor, on the CPU. Raises CheckpointError if its bytes are damaged."""
        dtype, shape, begin = self.header.tensors[name]
        values = torch.empty(shape, dtype=dtype)
        view = byte_view(values)
        blocks = self._blocks.get(name)
        if blocks is None:
            self._fill(begin, view)
            return values
        for block in blocks:
            part = view[block.begin - begin : block.begin - begin + block.size]
            self._fill(block.begin, part)
            if zlib.crc32(part) != block.checksum:
                raise CheckpointError(self._damaged(block))
        return values

    def check(self, block: Block) -> str | None:
        """The error of a block; None if it is undamaged."""
        checksum, done = 0, 0
        buffer = memoryview(bytearray(min(block.size, _READ)))
        while done < block.size:
            part = buffer[: block.size - done]
            self._fill(block.begin + done, part)
            checksum, done = zlib.crc32(part, checksum), done + len(part)
        return None if checksum == block.checksum else self._damaged(block)

    def close(self) -> None:
        """Let go of the file; once."""
        os.close(self._descriptor)

    def _damaged(self, block: Block) -> str:
        place = f"in bytes {block.begin} to {block.begin + block.size} of the file"
        return f"{self.path}: damaged: {printable(block.name)}, {place}"

    def _fill(self, begin: int, view: memoryview) -> None:
        done = 0
        try:
            while done < len(view):
                count = os.preadv(self._descriptor, [view[done : done + (64 << 20)]], begin + done)
                if not count:
                    raise CheckpointError(f"{self.path}: truncated at byte {begin + done}")
                done += count
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from error

    def _read_seal(self) -> tuple[tuple[str, ...], list[Block]]:
        """The error of the header, and the blocks that its checksums cover."""
        notes, tensors = self.header.metadata, self.header.tensors
        text = notes.get(KEY)
        if text is None:  # unless what is damaged is the key
            strays = [key for key, value in notes.items() if Seal.parse(value) is not None or key.startswith(OWN)]
            return tuple(
                f"{self.path}: damaged: the header has {printable(key)!r}, and no checksums under {KEY!r}"
                for key in strays
            ), []
        seal = Seal.parse(text)
        ordered = sorted((begin, num_bytes(shape, dtype), name) for name, (dtype, shape, begin) in tensors.items())
        if seal is None or len(seal.sums) != sum(-(-size // seal.block_size) for _, size, _ in ordered):
            return (f"{self.path}: damaged: the checksums in the header do not match its {len(ordered)} tensors",), []
        damage = () if self._is_sealed_by(seal) else (f"{self.path}: damaged: the header",)
        sums, blocks = iter(seal.sums), []
        for begin, size, name in ordered:
            for start in range(begin, begin + size, seal.block_size):
                blocks.append(Block(name, start, min(seal.block_size, begin + size - start), next(sums)))
        return damage, blocks

    def _is_sealed_by(self, seal: Seal) -> bool:
        """Whether all bytes that belong to no tensor are as they were written."""
        mark = self.header.mark
        if mark is None:
            return seal.fits(self._header_bytes())
        extents = [(begin, begin + num_bytes(shape, dtype)) for dtype, shape, begin in self.header.tensors.values()]
        return mark.fits(self._descriptor, extents)

    def _header_bytes(self) -> bytes:
        data = memoryview(bytearray(self.header.size))
        self._fill(0, data)
        return bytes(data)
