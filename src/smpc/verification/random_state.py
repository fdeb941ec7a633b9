"""The states of the generators of random numbers that a process has: torch's, Python's, numpy's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """The states at one moment; `cuda` of the device that is used, if it is a GPU."""

    cpu: Tensor
    cuda: Tensor | None
    device: torch.device
    python: Any
    numpy: Any

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """The states as they are."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), cuda, device, random.getstate(), np.random.get_state(legacy=False))

    def restore(self) -> None:
        """Makes these the states again."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def is_same(self, other: RandomState) -> bool:
        """Whether the generators would draw the same."""
        cuda = (self.cuda is None and other.cuda is None) or (
            self.cuda is not None and other.cuda is not None and torch.equal(self.cuda, other.cuda)
        )
        same = cuda and torch.equal(self.cpu, other.cpu) and self.python == other.python
        return same and state_text(self.numpy) == state_text(other.numpy)

    def parts(self) -> dict[str, str]:
        """Each state in a comparable form, by name."""
        cuda = "" if self.cuda is None else self.cuda.numpy().tobytes().hex()
        return {
            "torch's generator": self.cpu.numpy().tobytes().hex() + cuda,
            "Python's generator": repr(self.python),
            "numpy's generator": state_text(self.numpy),
        }


@contextmanager
def kept(device: torch.device) -> Iterator[RandomState]:
    """The states are afterwards what they were."""
    state = RandomState.now(device)
    try:
        yield state
    finally:
        state.restore()


def state_text(state: Any) -> str:
    """A state of numpy's, with all numbers of its arrays."""
    if isinstance(state, dict):
        return repr(dict(zip(state, map(state_text, state.values()), strict=True)))
    return state.tobytes().hex() if isinstance(state, np.ndarray) else repr(state)
