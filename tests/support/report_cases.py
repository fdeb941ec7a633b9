"""A model for the tests of reports: hostile names, a layer called twice, tied weights, a branch that skips a stage."""

import functools

import torch
from torch import nn

from smpc.compile import compile_model

HOSTILE = "<script>alert(1)</script>"
WORSE = "</script><img src=x onerror=alert(2)><script>alert(3)</script>&amp;{{data}}"


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(x)))


WIDTH = 1024
NUM_PARAMETERS = WIDTH * WIDTH + 6 * (4 * WIDTH * WIDTH + 3 * WIDTH)


class Net(nn.Module):
    """Six blocks under odd names; the first block is called once more, the last layer's weight is the first's."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.embedding = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.add_module(HOSTILE, Block(width))
        self.add_module(WORSE, Block(width))
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, hidden):
        first = hidden = self.blocks[0](self.blocks[0](self.embedding(hidden)))
        for name, child in self.named_children():
            if isinstance(child, Block):
                assert name in (HOSTILE, WORSE)
                hidden = child(hidden)
        for block in self.blocks[1:]:
            hidden = block(hidden)
        return self.head(hidden + first)


@functools.cache
def compilation(num_stages=3, microbatches=4, pipeline="interleaved", **options):
    """The model compiled; its microbatches have two rows however many there are."""
    with torch.device("meta"):  # large enough for messages not to rule, and nothing is allocated
        model, inputs = Net(), torch.zeros(2 * microbatches, 128, WIDTH)
    return compile_model(
        model,
        inputs,
        pipeline_parallel_degree=num_stages,
        microbatches=microbatches,
        pipeline=pipeline,
        **options,
    )
