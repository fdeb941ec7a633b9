"""Checks safetensors files that have no manifest: all bytes of those that this library wrote, the structure of others.

    verify_file("model.safetensors", advance)    Verified(damaged=(), has_checksums=True, num_tensors=148, num_bytes=497774208)
    safetensors_files("model")                   the files of a folder, as its index names them, or that one file

`read_header` checks the structure: every tensor has the bytes that its dtype and shape need, none overlap, none are left over. In
a folder with an index, each tensor must be in the file that the index names. `smpc.checkpoint.format.header_checksums` has the
checksums.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from smpc.checkpoint.format.draft_content import Advance
from smpc.checkpoint.format.tensorfile import TensorFile, is_tensorfile
from smpc.checkpoint.sources.conversion_sources import INDEX, SafetensorsSource, files_of
from smpc.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class FileCheck:
    """The result of checking a file: a line for each damage, and whether it had checksums."""

    damaged: tuple[str, ...]
    has_checksums: bool
    num_tensors: int
    num_bytes: int


def safetensors_files(path: str) -> list[str]:
    """The safetensors files that a path is or has. Raises CheckpointError if a folder's index and its files differ."""
    if not os.path.isdir(path):
        return [path] if is_tensorfile(path) else []
    if not any(name == INDEX or name.endswith(".safetensors") for name in os.listdir(path)):
        return []
    return files_of(path)


def wrong_set(path: str) -> list[str]:
    """The errors of a folder's files as a set, one line each: files of different saves, an index that disagrees."""
    try:
        SafetensorsSource(path).close()
    except CheckpointError as error:
        return str(error).splitlines()
    return []


def verify_file(path: str, advance: Advance | None = None) -> FileCheck:
    """Check a file: its structure, and every byte if it has checksums. Raises CheckpointError if the structure is damaged."""
    file = TensorFile(path)
    try:
        damaged = list(file.damage)
        for block in file.blocks:
            line = file.check(block)
            damaged += [line] if line is not None else []
            if advance is not None:
                advance(block.size)
        return FileCheck(tuple(damaged), file.has_checksums, len(file.header.tensors), os.path.getsize(path))
    finally:
        file.close()
