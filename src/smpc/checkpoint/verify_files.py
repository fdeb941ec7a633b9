"""Checks safetensors files that have no manifest: all bytes of those that this library wrote, the structure of others.

    verify_file("model.safetensors", advance)    Verified(damaged=(), has_checksums=True, num_tensors=148, num_bytes=497774208)
    safetensors_files("model")                   the files of a folder, as its index names them, or that one file

The structure is what `read_header` looks at: every tensor has the bytes that its dtype and shape say, none overlap, none are left
over. Of a folder with an index, each tensor must lie in the file that the index says. Checksums are those of `smpc.checkpoint.seals`.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass

from smpc.checkpoint.dtypes import num_bytes
from smpc.checkpoint.seals import KEY, Seal
from smpc.checkpoint.sources import INDEX, files_of
from smpc.checkpoint.tensorfile import Advance, Header, is_tensorfile, open_regular, read_header
from smpc.errors import CheckpointError

_READ = 4 << 20


@dataclass(frozen=True, slots=True)
class Verified:
    """What came of checking a file: a line for each damage, and whether it had checksums."""

    damaged: tuple[str, ...]
    has_checksums: bool
    num_tensors: int
    num_bytes: int


def safetensors_files(path: str) -> list[str]:
    """The safetensors files that a path is or has. Raises CheckpointError if the index of a folder is not what lies there."""
    if not os.path.isdir(path):
        return [path] if is_tensorfile(path) else []
    if not any(name == INDEX or name.endswith(".safetensors") for name in os.listdir(path)):
        return []
    files = files_of(path)
    index = os.path.join(path, INDEX)
    if os.path.lexists(index):
        _check_index(index, files)
    return files


def verify_file(path: str, advance: Advance | None = None) -> Verified:
    """Check a file: its structure, and every byte if it has checksums. Raises CheckpointError if the structure is damaged."""
    descriptor = open_regular(path)
    try:
        header = read_header(descriptor, path)
        size, text = os.fstat(descriptor).st_size, header.metadata.get(KEY)
        if text is not None:
            damaged = tuple(_damaged(descriptor, path, header, text, advance))
        else:  # unless what is damaged is the key
            strays = [key for key, value in header.metadata.items() if Seal.parse(value) is not None]
            damaged = tuple(f"{path}: damaged: the header has checksums under {key!r}, not {KEY!r}" for key in strays)
        return Verified(damaged, text is not None, len(header.tensors), size)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _damaged(descriptor: int, path: str, header: Header, text: str, advance: Advance | None) -> list[str]:
    seal = Seal.parse(text)
    ordered = sorted((begin, num_bytes(shape, dtype), name) for name, (dtype, shape, begin) in header.tensors.items())
    if seal is None or len(seal.sums) != sum(-(-size // seal.block_size) for _, size, _ in ordered):
        return [f"{path}: damaged: the checksums in the header are not those of its {len(ordered)} tensors"]
    found = [] if seal.fits(os.pread(descriptor, header.size, 0)) else [f"{path}: damaged: the header"]
    rest = iter(seal.sums)
    for begin, size, name in ordered:
        for start in range(begin, begin + size, seal.block_size):
            count = min(seal.block_size, begin + size - start)
            if _checksum(descriptor, start, count, advance) != next(rest):
                found.append(f"{path}: damaged: {name}, in bytes {start} to {start + count} of the file")
    return found


def _checksum(descriptor: int, start: int, count: int, advance: Advance | None) -> int:
    checksum = 0
    while count:
        data = os.pread(descriptor, min(count, _READ), start)
        if not data:
            return -1  # truncated while it was read
        checksum = zlib.crc32(data, checksum)
        start, count = start + len(data), count - len(data)
        if advance is not None:
            advance(len(data))
    return checksum


def _check_index(index: str, files: list[str]) -> None:
    """That each tensor lies in the file that the index says, and no other does."""
    with open(open_regular(index), "rb") as file:
        said = {str(name): str(where) for name, where in json.load(file)["weight_map"].items()}
    there: dict[str, str] = {}
    for path in files:
        descriptor = open_regular(path)
        try:
            there |= dict.fromkeys(read_header(descriptor, path).tensors, os.path.basename(path))
        finally:
            os.close(descriptor)
    wrong = [
        f"{name} is in {there.get(name)}, not in {where}" for name, where in said.items() if there.get(name) != where
    ]
    wrong += [f"{name}, in {where}, is not in it" for name, where in there.items() if name not in said]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(f"{index}: damaged: {'; '.join(wrong[:5])}{more}")
