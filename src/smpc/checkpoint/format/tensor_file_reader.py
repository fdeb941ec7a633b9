"""An open file of tensors, safetensors or a `torch_archive`: every tensor against its checksums, where the file has them.

file = TensorFile(path)         reads the header, and checks it
file.damage                     what is wrong with the header and the checksums in it, one line each
file.read("head.weight")        raises CheckpointError if a block of it is damaged
file.blocks, file.check(block)  every block that has a checksum, to verify all before anything is used
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from smpc.checkpoint.format.dtypes import byte_view, num_bytes
from smpc.checkpoint.format.header_checksums import KEY, Seal
from smpc.checkpoint.format.regular_file import open_regular, printable
from smpc.checkpoint.format.tensorfile import Header, read_header
from smpc.errors import CheckpointError

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
