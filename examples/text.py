"""Real text that every machine has: the source of Python's own standard library, read as bytes."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch


def load_text(max_bytes: int = 8_000_000) -> torch.Tensor:
    """The bytes, as an int64 tensor of shape [num_bytes]; files in alphabetical order."""
    content = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        content += path.read_bytes()
        if len(content) >= max_bytes:
            break
    return torch.frombuffer(bytearray(content[:max_bytes]), dtype=torch.uint8).long()


def unigram_entropy(text: torch.Tensor) -> float:
    """Nats per byte of the best model that knows nothing but how frequent each byte is."""
    counts = torch.bincount(text, minlength=256).double()
    probabilities = counts[counts > 0] / counts.sum()
    return -sum(p * math.log(p) for p in probabilities.tolist())


def batches(text: torch.Tensor, batch_size: int, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless batches of random excerpts, shape [batch_size, length]; the same seed gives the same batches."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(text) - length, (batch_size,), generator=generator)
        yield torch.stack([text[start : start + length] for start in starts.tolist()])
