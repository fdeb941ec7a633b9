"""Named random states: `get_rng_state_tracker()`, as Megatron's published tracker.

    tracker = get_rng_state_tracker()
    tracker.add("model-parallel-rng", seed + tp_rank)
    with tracker.fork("model-parallel-rng"):
        scores = F.dropout(scores)            drawn from that state, which goes on from here the next time

A state belongs to the generator of the run's device: the GPU's, or the CPU's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from smpc.errors import UsageError

DEFAULT = "model-parallel-rng"


class RngStateTracker:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self._states.clear()
        self._seeds.clear()

    def add(self, name: str, seed: int) -> None:
        """A state under a new name, started from a new seed. UsageError for a name or seed that exists already."""
        if name in self._states:
            raise UsageError(
                f"add: expected a new name, found {name!r}, which has a state already; use set_states to replace it"
            )
        if seed in self._seeds:
            raise UsageError(
                f"add: expected a new seed, found {seed}, which another state was started from; use another one"
            )
        generator = _generator()
        before = generator.get_state()
        try:
            generator.manual_seed(seed)
            self._states[name] = generator.get_state()
            self._seeds.add(seed)
        finally:
            generator.set_state(before)

    def get_states(self) -> dict[str, Tensor]:
        """A copy of all states, by name."""
        return {name: state.clone() for name, state in self._states.items()}

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Continue from a result of `get_states`."""
        self._states = {name: state.clone() for name, state in states.items()}

    @contextmanager
    def fork(self, name: str = DEFAULT) -> Iterator[None]:
        """Inside, random numbers are drawn from the state of that name; outside, nothing has changed."""
        if name not in self._states:
            known = ", ".join(map(repr, self._states)) or "none"
            raise UsageError(f"fork: expected a name that add was called with, found {name!r}; there are {known}")
        generator = _generator()
        before = generator.get_state()
        generator.set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = generator.get_state()
            generator.set_state(before)


def _generator() -> torch.Generator:
    if torch.cuda.is_available():
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator
