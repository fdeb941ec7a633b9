"""Small modules that do more in forward than compute, each by itself and in random combinations.

`EFFECTS` has them by name: a class, and what must become of it in a pipeline, `EQUAL` to plain PyTorch or `REFUSED` (by TraceError or
PartitionError, at the latest when it is compiled). `EffectModel` is a list of them, and a linear head.

To extend: write a module from [batch, WIDTH] to [batch, WIDTH] in double precision, and `@effect(EQUAL)` above it, in one of the files that
are imported here. Where more than one in a model would not give plain PyTorch's bits, though right (they draw random numbers on two
ranks), say `@effect(EQUAL, alone="random")`. What needs the whole model to be set up is an `AtModel`.
"""

import effect_autograd
import effect_memory
import effect_randomness
import torch
from effect_base import EFFECTS, READS, REFUSED, AtModel, linear
from torch import nn

KINDS = (effect_autograd, effect_memory, effect_randomness)  # files whose classes are in the list


class EffectModel(nn.Module):
    """Effects one after another; the same name twice is two modules. `shared`: the first linear map is the last one's, too."""

    def __init__(self, names, seed, shared=False):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList((EFFECTS.get(name) or READS[name]).make() for name in names)
        self.head = linear()
        if shared:
            self.head.weight = self.layers[0].linear.weight
        for layer in self.layers:
            if isinstance(layer, AtModel):
                layer.at_model(self)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def random_names(rng, count):
    """Names for a random model: of each group at most one, and mostly of those that a pipeline can run."""
    found, groups = [], set()
    while len(found) < count:
        name = rng.choice(list(EFFECTS))
        kind = EFFECTS[name]
        if kind.alone in groups or (kind.expected == REFUSED and rng.random() < 0.9):
            continue
        groups |= {kind.alone} - {""}
        found.append(name)
    return tuple(found)
