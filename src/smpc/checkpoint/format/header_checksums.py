"""Checksums of a safetensors file in its own header, so that a plain file can be checked, byte for byte, wherever it goes.

    {"__metadata__": {"format": "pt", "smpc_checksums": "crc32/4194304/5f1e0a2c/93d0c1aa..."}, "head.weight": {...}, ...}

    what/size of a block/checksum of the header/checksums of the blocks of all tensors, in their order in the file

Every checksum is a crc32 in 8 hexadecimal digits. The header's checksum covers all bytes before the tensors, with zeros in place of the
digits of all checksums. So the length of the text is known before a tensor is written, and the text is filled in afterwards. Other
readers of safetensors, Hugging Face's `from_pretrained` among them, see a text that they do not know.

    text = unsealed([1024, 4])                  before: the header is written with metadata {KEY: text}
    header = sealed(header, sums, block_size)   after
    Seal.parse(text).fits(header)               when it is checked
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

KEY = "smpc_checksums"
_TEXT = re.compile(r"crc32/([1-9][0-9]{0,11})/([0-9a-f]{8})/((?:[0-9a-f]{8})*)")


@dataclass(frozen=True, slots=True)
class Seal:
    """The checksums in the text."""

    block_size: int
    header: int
    sums: tuple[int, ...]

    @staticmethod
    def parse(text: str) -> Seal | None:
        """None if it is not such a text."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return None
        sums = tuple(int(match[3][i : i + 8], 16) for i in range(0, len(match[3]), 8))
        return Seal(int(match[1]), int(match[2], 16), sums)

    def __str__(self) -> str:
        return f"crc32/{self.block_size}/{self.header:08x}/{''.join(f'{each:08x}' for each in self.sums)}"

    def fits(self, header: bytes) -> bool:
        """Whether these bytes before the tensors are those that were sealed."""
        own, blank = _quoted(self), _quoted(Seal(self.block_size, 0, (0,) * len(self.sums)))
        return header.count(own) == 1 and zlib.crc32(header.replace(own, blank)) == self.header


def unsealed(sizes: Sequence[int], block_size: int) -> str:
    """The text for tensors of so many bytes, before their checksums are known."""
    return str(Seal(block_size, 0, (0,) * sum(-(-size // block_size) for size in sizes)))


def sealed(header: bytes, sums: Sequence[int], block_size: int) -> bytes:
    """The bytes before the tensors, in which the text is unsealed, with the checksums."""
    blank = Seal(block_size, 0, (0,) * len(sums))
    return header.replace(_quoted(blank), _quoted(Seal(block_size, zlib.crc32(header), tuple(sums))), 1)


def _quoted(seal: Seal) -> bytes:
    return f'"{KEY}":"{seal}"'.encode()  # quotes within texts and names are escaped, so this is in no other
