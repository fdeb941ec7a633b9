"""A file of tensors that torch.load reads, with the checksums of this library.

    write_archive(path, [("w", shard), ...], block_size)     every byte on the disk, file 0600
    find_mark(descriptor)                                     where its header is; None if this library has not written it

It is a zip file, as torch.save's: the pickle `data.pkl`, which refers to one record for the bytes of each tensor. Two more things are
in it, which torch does not look at: a last record `smpc.json`, which is the header of a safetensors file with positions in the whole file,
and a mark in the comment of the zip file.

    smpc/0000000000a1b2c3/0000f00d/5f1e0a2c      begin and length of smpc.json, and the crc32 of all bytes that belong to no tensor,
                                                 but for the mark itself

So reading needs neither the pickle nor the zip file's directory, and a bit that is flipped anywhere is found.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import torch

from smpc.checkpoint.format.draft_content import Advance, Shard
from smpc.checkpoint.format.dtypes import byte_view, dtype_name
from smpc.checkpoint.format.header_checksums import KEY, Seal
from smpc.checkpoint.format.regular_file import printable
from smpc.errors import CheckpointError

_ZIP = b"PK\x03\x04"  # what a zip file begins with
_HEADER = "archive/smpc.json"  # the last record, so its name is near the end once more
_TAIL = 512
_MARK = re.compile(rb"smpc/([0-9a-f]{16})/([0-9a-f]{8})/([0-9a-f]{8})")
_LENGTH = len("smpc/") + 16 + 1 + 8 + 1 + 8
_ALIGNMENT = 64  # of tensors in the file, as torch has it
_RECORD = 30  # bytes before the name of a record, in its header
_ZIP64 = 20  # bytes that the lengths of a large record take in its header
_READ = 4 << 20


@dataclass(frozen=True, slots=True)
class ArchiveMark:
    """Where the header of an archive is, and the checksum of bytes outside tensors. `end`: where the mark itself begins."""

    begin: int
    length: int
    checksum: int
    end: int

    def fits(self, descriptor: int, tensors: Sequence[tuple[int, int]]) -> bool:
        """Whether the bytes around the tensors, each from its first byte to its last but one, are those that were written."""
        return _checksum_around(descriptor, tensors, self.end) == self.checksum


def find_mark(descriptor: int, where: str) -> ArchiveMark | None:
    """The mark of an open file. Raises CheckpointError if there was one, which is damaged."""
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, _TAIL, max(size - _TAIL, 0))
    match = _MARK.fullmatch(tail[-_LENGTH:])
    is_archive = os.pread(descriptor, len(_ZIP), 0) == _ZIP
    if match is None and not (is_archive and _HEADER.encode() in tail):
        return None
    begin, length, checksum = (int(text, 16) for text in match.groups()) if match else (size, 0, 0)
    if not is_archive or begin + length > size - _LENGTH:
        raise CheckpointError(
            f"{where}: damaged: its first bytes, or the mark at its end, which says where its header is"
        )
    return ArchiveMark(begin, length, checksum, size - _LENGTH)


def write_archive(
    path: str,
    shards: Sequence[tuple[str, Shard]],
    block_size: int,
    *,
    aliases: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
    advance: Advance | None = None,
) -> None:
    """Write a new file of whole tensors by name, and bring it to the disk. Raises CheckpointError, naming the file.

    `aliases`: more names of tensors, each with the name of a shard; torch.load gives them the same memory.
    """
    counts = Counter([*(name for name, _ in shards), *(aliases or {})])
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise CheckpointError(f"two tensors of one file would be called {printable(twice)}; rename one")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with os.fdopen(descriptor, "w+b") as file:
            _Archive(file, block_size, advance).write(dict(shards), dict(aliases or {}), dict(metadata or {}))
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error


class _Archive:
    """An archive that is being written."""

    def __init__(self, file: IO[bytes], block_size: int, advance: Advance | None) -> None:
        self._file, self._block_size, self._advance = file, block_size, advance
        self._zip = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED)
        self._extents: dict[str, tuple[int, int]] = {}
        self._sums: dict[str, list[int]] = {}

    def write(self, shards: dict[str, Shard], aliases: dict[str, str], metadata: dict[str, str]) -> None:
        """All of it."""
        with self._zip:
            self._put("archive/data.pkl", _pickled_tensors(shards, aliases))
            self._put("archive/byteorder", b"little")
            for number, (name, shard) in enumerate(shards.items()):
                self._put_tensor(f"archive/data/{number}", name, shard)
            self._put("archive/version", b"3\n")
            begin, length = self._put(_HEADER, self._header(shards, aliases, metadata))
            self._zip.comment = _archive_mark(begin, length, 0)
        self._file.flush()
        end = self._file.seek(0, os.SEEK_END) - _LENGTH
        checksum = _checksum_around(self._file.fileno(), list(self._extents.values()), end)
        os.pwrite(self._file.fileno(), _archive_mark(begin, length, checksum), end)

    def _put(self, record: str, data: bytes) -> tuple[int, int]:
        """A record, and where its bytes are."""
        with self._record(record) as opened:
            begin = self._file.tell()
            opened.write(data)
        return begin, len(data)

    def _put_tensor(self, record: str, name: str, shard: Shard) -> None:
        values = shard.fetch()
        if tuple(values.shape) != shard.shape or values.dtype != shard.dtype:
            raise CheckpointError(
                f"{shard.kind} {printable(shard.name)}: expected {shard.dtype} of shape {list(shard.shape)}, found {values.dtype} of "
                f"shape {list(values.shape)}"
            )
        data, sums = byte_view(values), self._sums.setdefault(name, [])
        with self._record(record) as opened:
            begin = self._file.tell()
            for start in range(0, len(data), self._block_size):
                block = data[start : start + self._block_size]
                sums.append(zlib.crc32(block))
                opened.write(block)
                if self._advance is not None:
                    self._advance(len(block))
        self._extents[name] = (begin, begin + len(data))

    @contextmanager
    def _record(self, name: str) -> Iterator[IO[bytes]]:
        """A new record, whose bytes begin at a multiple of the alignment."""
        info = zipfile.ZipInfo(name)  # of a fixed date
        header = self._file.tell() + _RECORD + len(info.filename) + _ZIP64
        padding = -(header + 4) % _ALIGNMENT
        info.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
        with self._zip.open(info, "w", force_zip64=True) as opened:
            yield opened

    def _header(self, shards: dict[str, Shard], aliases: dict[str, str], metadata: dict[str, str]) -> bytes:
        targets = {**{name: name for name in shards}, **aliases}
        ordered = sorted(targets, key=lambda name: (*self._extents[targets[name]], name))
        sums = tuple(checksum for name in ordered for checksum in self._sums[targets[name]])
        document: dict[str, Any] = {"__metadata__": {**metadata, KEY: str(Seal(self._block_size, 0, sums))}}
        for name, target in targets.items():
            shard = shards[target]
            extent = self._extents[target]
            document[name] = {"dtype": dtype_name(shard.dtype), "shape": shard.shape, "data_offsets": extent}
        return json.dumps(document, separators=(",", ":")).encode()


def _archive_mark(begin: int, length: int, checksum: int) -> bytes:
    return f"smpc/{begin:016x}/{length:08x}/{checksum:08x}".encode()


def _checksum_around(descriptor: int, extents: Sequence[tuple[int, int]], end: int) -> int:
    checksum, position = 0, 0
    for begin, after in [*sorted(extents), (end, end)]:
        while position < begin:
            data = os.pread(descriptor, min(_READ, begin - position), position)
            if not data:
                return -1  # truncated meanwhile
            checksum, position = zlib.crc32(data, checksum), position + len(data)
        position = max(position, after)
    return checksum


# -- the pickle --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """A stand-in for the bytes of a tensor."""

    kind: Any
    record: str
    size: int  # in elements of its kind


@dataclass(frozen=True, slots=True, eq=False)
class _Stand:
    """A stand-in for a tensor, which is pickled as torch.save pickles one."""

    storage: _Storage
    shard: Shard

    def __reduce__(self) -> tuple[Any, ...]:
        stride = torch.empty(self.shard.shape, device="meta").stride()
        hooks: OrderedDict[str, Any] = OrderedDict()
        values = (self.storage, 0, self.shard.shape, stride, False, hooks)
        if self.storage.kind is torch.UntypedStorage:
            return torch._utils._rebuild_tensor_v3, (*values, self.shard.dtype)
        return torch._utils._rebuild_tensor_v2, values


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", obj.kind, obj.record, "cpu", obj.size) if isinstance(obj, _Storage) else None


def _pickled_tensors(shards: dict[str, Shard], aliases: dict[str, str]) -> bytes:
    """The pickle of an archive: tensors by name, whose storages follow it."""
    kinds = torch.storage._dtype_to_storage_type_map()
    stands: dict[str, _Stand] = {}
    for number, (name, shard) in enumerate(shards.items()):
        kind = getattr(torch, kinds[shard.dtype]) if shard.dtype in kinds else torch.UntypedStorage
        size = shard.num_bytes if kind is torch.UntypedStorage else shard.num_bytes // shard.dtype.itemsize
        stands[name] = _Stand(_Storage(kind, str(number), size), shard)
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump({**stands, **{name: stands[target] for name, target in aliases.items()}})
    return stream.getvalue()
