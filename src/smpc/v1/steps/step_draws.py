"""Random numbers that a step function itself draws are the same on the two ranks that run it.

Pipeline rank 0 runs the function up to the model, the last stage's rank runs it whole. A function that mixes samples, say, draws which
ones with which weight:

    order = torch.randperm(len(x))
    loss = loss_of(model(x + x[order]), y, y[order])      # rank 0 needs `order` for x, the last rank for y

Each rank has generators of its own, and stages draw from them (dropout), so the last rank would draw another order. If the function has
drawn on rank 0, its states as they were before each microbatch travel with the tensors, and the last rank runs the function from them. Its
own states are not changed by that. Where both ranks have the same states, the last rank's go on as they are.

Covers the generators that there are without asking: torch's for the CPU and for the device, NumPy's and Python's. Python's and NumPy's keep
one number more at times, of a pair of normal ones; it travels, too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from smpc.errors import UsageError
from smpc.verification.random_state import RandomState

Sent = Sequence[Tensor]  # torch's state, CUDA's (or nothing), whole numbers of the others, their pending numbers

DRAWS = ""  # what the states are called among the arguments of a step function: no parameter is called so
_NO_PENDING = float("nan")
_NUMPYS = "MT19937"  # the generator behind `numpy.random`, unless a script has put another one there


def as_tensors(states: RandomState) -> Sent:
    """Tensors, always of the same sizes. Raises UsageError for another generator of NumPy's than its own."""
    if states.numpy["bit_generator"] != _NUMPYS:
        raise UsageError(
            f"step function: it draws random numbers, so the last rank must get the states of all generators; expected NumPy's {_NUMPYS}, "
            f"found {states.numpy['bit_generator']}; leave numpy.random its own generator, or draw outside of the step function"
        )
    version, numbers, gauss = states.python
    numpys = states.numpy["state"]
    whole = torch.tensor([version, *numbers, *numpys["key"].tolist(), int(numpys["pos"])])
    cached = float(states.numpy["gauss"]) if states.numpy["has_gauss"] else _NO_PENDING
    pending = torch.tensor([_NO_PENDING if gauss is None else gauss, cached], dtype=torch.float64)
    return states.cpu, torch.empty(0) if states.cuda is None else states.cuda, whole, pending


def from_tensors(sent: Sent, device: torch.device) -> RandomState:
    """The states of another rank, for this rank's device."""
    own, cuda, whole, pending = (state.cpu() for state in sent)
    version, *numbers = whole.tolist()
    gauss, cached = pending.tolist()
    split = len(random.getstate()[1])
    numpys = {"key": np.array(numbers[split:-1], dtype=np.uint32), "pos": numbers[-1]}
    has_gauss = not math.isnan(cached)
    return RandomState(
        own,
        cuda if cuda.numel() else None,
        device,
        (version, tuple(numbers[:split]), None if math.isnan(gauss) else gauss),
        {"bit_generator": _NUMPYS, "state": numpys, "has_gauss": int(has_gauss), "gauss": cached if has_gauss else 0.0},
    )


@contextmanager
def drawing_from(sent: Sent | None, device: torch.device) -> Iterator[None]:
    """In this context the generators go on from these states; None: from their own."""
    if sent is None:
        yield
        return
    before, states = RandomState.now(device), from_tensors(sent, device)
    if before.is_same(states):
        yield
        return
    states.restore()
    try:
        yield
    finally:
        before.restore()
