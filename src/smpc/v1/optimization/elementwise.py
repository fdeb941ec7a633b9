"""Which optimizers update every element of a parameter independently, so that ranks may update ranges of it.

    is_elementwise(torch.optim.AdamW(parameters))    True
    is_elementwise(FusedLamb(parameters))            False: it takes norms of parameters

They are known by exact class: a subclass may do anything. A class that is not in the list (LAMB, NovoGrad, Adafactor, Muon, LBFGS,
SparseAdam, classes of others) gets whole parameters.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

import smpc.optimizers as fused
from smpc.v1.optimization import fused as session_fused

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    fused.FusedAdamW,
    session_fused.FusedAdamW,
)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer's update of an element depends on nothing else of the parameter; see the module's docstring."""
    return type(optimizer) in ELEMENTWISE
