"""Random streams of tensor-parallel ranks: draws are equal where ranks hold equal data, and differ where the data is split.

    streams = RandomStreams(seed=1234, rank=tp_rank)
    with streams.replicated(hidden.device):     # the same draws on every rank of the group
        hidden = F.dropout(hidden)
    with streams.split(scores.device):          # other draws on each
        scores = F.dropout(scores)

Each stream stands in for the device's default generator while its context lasts, so everything that draws inside follows it. Without a
seed the contexts do nothing: draws come from the default generator. Source: Shoeybi et al. 2019, arXiv 1909.08053, appendix B.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor


class RandomStreams:
    """Two streams for each device, started from `seed`: one that all ranks share, one of this rank alone."""

    def __init__(self, seed: int | None = None, rank: int = 0) -> None:
        self._rank = rank
        self._seeds = None if seed is None else _seeds(seed, rank)
        self._states: dict[tuple[str, str], Tensor] = {}

    def replicated(self, device: torch.device) -> AbstractContextManager[None]:
        """Draws inside are the same on every rank of the group."""
        return self._fork("replicated", device)

    def split(self, device: torch.device) -> AbstractContextManager[None]:
        """Draws inside differ between the ranks of the group."""
        return self._fork("split", device)

    def reseed(self, seed: int) -> None:
        """Starts both streams anew from another seed, where there are any."""
        if self._seeds is not None:
            self._seeds, self._states = _seeds(seed, self._rank), {}

    def state_dict(self) -> dict[str, Tensor]:
        """Where the streams that have been drawn from stand, by `stream/device`."""
        return {f"{stream}/{device}": state.clone() for (stream, device), state in sorted(self._states.items())}

    def load_state_dict(self, states: dict[str, Tensor]) -> None:
        """Goes on from what `state_dict` returned."""
        self._states = {_split_key(key): state.clone() for key, state in states.items()}

    @contextmanager
    def _fork(self, stream: str, device: torch.device) -> Iterator[None]:
        if self._seeds is None or device.type == "meta":
            yield
            return
        generator = _default_generator(device)
        outside = generator.get_state()
        key = (stream, str(device))
        if key in self._states:
            generator.set_state(self._states[key])
        else:
            generator.manual_seed(self._seeds[stream])
        try:
            yield
        finally:
            self._states[key] = generator.get_state()
            generator.set_state(outside)


def _seeds(seed: int, rank: int) -> dict[str, int]:
    return {"replicated": seed, "split": seed + 2718 + rank}


def _split_key(key: str) -> tuple[str, str]:
    stream, _, device = key.partition("/")
    return stream, device


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator
