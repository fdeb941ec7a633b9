"""What the scripts of this folder train on, and how they tell what came of it; without smpc, so that plain PyTorch uses the same."""

import json
import os
import sys

import torch


def images(steps, batch_size, rank, size, seed=1):
    """Batches of `rank` out of `size` shards: images with the labels."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        pixels = torch.randn(batch_size * size, 1, 12, 12, generator=generator)
        labels = torch.randint(0, 10, (batch_size * size,), generator=generator)
        yield pixels.chunk(size)[rank], labels.chunk(size)[rank]


def tokens(steps, batch_size, rank, size, vocabulary=61, length=12, seed=1):
    """Batches of `rank` out of `size` shards: ids of tokens and the mask of what counts."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(0, vocabulary, (batch_size * size, length), generator=generator)
        yield ids.chunk(size)[rank], torch.ones_like(ids).chunk(size)[rank]


def report(what, value):
    """One line of JSON, which the test reads; of every rank."""
    sys.stdout.write(json.dumps({"rank": int(os.environ.get("RANK", "0")), "what": what, "value": value}) + "\n")
    sys.stdout.flush()
