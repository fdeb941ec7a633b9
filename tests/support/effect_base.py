"""What every kind of effect is made from: see `effect_models`."""

from dataclasses import dataclass

import torch
from torch import nn

WIDTH = 4
EQUAL, REFUSED = "equal", "refused"


@dataclass(frozen=True)
class Effect:
    """A kind of module, what must become of it, and the group of which a model may have one."""

    make: type
    expected: str
    alone: str = ""


EFFECTS: dict[str, Effect] = {}
READS: dict[str, Effect] = {}  # see `effect_reads`


def effect(expected, alone=""):
    """Class decorator: take a module into the list."""

    def add(cls):
        EFFECTS[cls.__name__] = Effect(cls, expected, alone)
        return cls

    return add


def reads(cls):
    """Class decorator: take a module into the list of those that read what a script changes."""
    READS[cls.__name__] = Effect(cls, EQUAL)
    return cls


class Layer(nn.Module):
    """Base: a linear map and a tanh, before what the subclass does in `act`."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.setup()

    def setup(self):
        pass

    def forward(self, x):
        return self.act(torch.tanh(self.linear(x)))

    def act(self, h):
        return h


def linear():
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


effect(EQUAL)(Layer)


class AtModel(Layer):
    """An effect that is set up with the whole model in view."""

    def at_model(self, model):
        raise NotImplementedError
