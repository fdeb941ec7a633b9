"""A model of three layers, in the middle of which a function runs."""

import torch
from torch import nn


class Block(nn.Module):
    """Applies a function to itself and its input."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function
        self.register_buffer("buffer", torch.ones(4))

    def forward(self, x):
        return self.function(self, x)


def applying(function):
    """Its second module calls `function(module, x)`."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Block(function), nn.Linear(4, 4))
