"""Real text that every machine has: Python's own standard library. As bytes, or as the sentences of its documentation."""

from __future__ import annotations

import math
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_SENTENCE = re.compile(r"[A-Z][A-Za-z ,;:'-]*\.")
_WORD = re.compile(r"[A-Za-z'-]+|[.,;:]")


@dataclass(frozen=True)
class Words:
    """Text as numbers of words: `ids`, int64, shape [num_words], number `vocabulary`."""

    vocabulary: tuple[str, ...]
    ids: torch.Tensor

    def encode(self, text: str) -> list[int]:
        """The numbers of words that are all known; otherwise ValueError."""
        return [self.vocabulary.index(word) for word in _WORD.findall(text)]

    def decode(self, ids: list[int]) -> str:
        """The words, with a blank before each that is not punctuation."""
        return re.sub(r" ([.,;:])", r"\1", " ".join(self.vocabulary[number] for number in ids))


def load_text(max_bytes: int = 8_000_000) -> torch.Tensor:
    """The bytes, as an int64 tensor of shape [num_bytes]; files in alphabetical order."""
    content = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        content += path.read_bytes()
        if len(content) >= max_bytes:
            break
    return torch.frombuffer(bytearray(content[:max_bytes]), dtype=torch.uint8).long()


def load_words(size: int = 1024) -> Words:
    """The sentences of the docstrings that need no other words than the `size` most frequent ones."""
    folder = Path(sysconfig.get_path("stdlib"))
    sentences: dict[str, list[str]] = {}
    for path in sorted((*folder.glob("*.py"), *folder.glob("[a-z]*/*.py"))):
        if not path.parent.name.startswith(("test", "idle", "lib2to3", "site-packages")):
            for sentence in _sentences(path.read_text(encoding="utf-8", errors="replace")):
                sentences.setdefault(sentence, _WORD.findall(sentence))
    frequent = Counter(word for words in sentences.values() for word in words).most_common(size)
    vocabulary = tuple(sorted(word for word, _ in frequent))
    number = {word: i for i, word in enumerate(vocabulary)}
    known = [words for words in sentences.values() if all(word in number for word in words)]
    return Words(vocabulary, torch.tensor([number[word] for words in known for word in words]))


def _sentences(source: str) -> Iterator[str]:
    for docstring in _DOCSTRING.findall(source):
        for paragraph in docstring.split("\n\n"):
            for sentence in _END.split(" ".join(paragraph.split())):
                if _SENTENCE.fullmatch(sentence) and sentence.count(" ") >= 3:
                    yield sentence


def unigram_entropy(ids: torch.Tensor) -> float:
    """Nats per token of the best model that knows nothing but how frequent each is."""
    counts = torch.bincount(ids).double()
    probabilities = counts[counts > 0] / counts.sum()
    return -sum(p * math.log(p) for p in probabilities.tolist())


def batches(ids: torch.Tensor, batch_size: int, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless batches of random excerpts, shape [batch_size, length]; the same seed gives the same batches."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(ids) - length, (batch_size,), generator=generator)
        yield torch.stack([ids[start : start + length] for start in starts.tolist()])
