"""Random streams of tensor-parallel ranks: draws are equal where ranks hold equal data, and differ where the data is split.

    streams = RandomStreams(seed=1234, rank=tp_rank)
    with streams.replicated(hidden.device):     # the same draws on every rank of the group
        hidden = F.dropout(hidden)
    with streams.split(scores.device):          # other draws on each
        scores = F.dropout(scores)

A stream counts its contexts; each seeds the device's default generator from the stream's seed and its number while it lasts, so everything
that draws inside follows it. Without a seed the contexts do nothing: draws come from the default generator.

Activation checkpointing runs a context twice, and must draw the same. Whoever checkpoints (we, torch, Hugging Face) restores the default
generator, but knows no stream. So each context first draws a ticket from the default generator: a ticket that was seen before means a
second run, which gets the number of the first. Source of the two streams: Shoeybi et al. 2019, arXiv 1909.08053, appendix B.2.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from smpc.executor.shared_draws import seed_of

_TICKETS = 2**62
_KEPT_TICKETS = 1 << 16  # more contexts than microbatches in flight have between their forward and their backward pass


class RandomStreams:
    """Two streams, started from `seed`: one that all ranks share, one of this rank alone; others on each pipeline rank."""

    def __init__(self, seed: int | None = None, rank: int = 0, pipeline_rank: int = 0) -> None:
        self._rank = rank
        self._pipeline = f"/stages of {pipeline_rank}" if pipeline_rank else ""
        self._seed = seed
        self._counts = {"replicated": 0, "split": 0}
        self._tickets: OrderedDict[tuple[str, int], int] = OrderedDict()

    def replicated(self, device: torch.device) -> AbstractContextManager[None]:
        """Draws inside are the same on every rank of the group."""
        return self._fork("replicated", device)

    def split(self, device: torch.device) -> AbstractContextManager[None]:
        """Draws inside differ between the ranks of the group."""
        return self._fork("split", device)

    def reseed(self, seed: int) -> None:
        """Starts both streams anew from another seed, where there are any."""
        if self._seed is not None:
            self._seed = seed
            self.load_state_dict({})

    def state_dict(self) -> dict[str, Tensor]:
        """How far each stream is."""
        return {stream: torch.tensor(count) for stream, count in sorted(self._counts.items())}

    def load_state_dict(self, states: dict[str, Tensor]) -> None:
        """Continues from a result of `state_dict`."""
        self._counts = {stream: int(states.get(stream, 0)) for stream in self._counts}
        self._tickets.clear()

    @contextmanager
    def _fork(self, stream: str, device: torch.device) -> Iterator[None]:
        if self._seed is None or device.type == "meta":
            yield
            return
        number = self._number(stream)
        generator = _default_generator(device)
        outside = generator.get_state()
        place = f"{stream}/{self._rank if stream == 'split' else ''}/{number}{self._pipeline}"
        generator.manual_seed(seed_of(self._seed, place))
        try:
            yield
        finally:
            generator.set_state(outside)

    def _number(self, stream: str) -> int:
        ticket = (stream, int(torch.randint(_TICKETS, ())))
        if ticket not in self._tickets:
            self._tickets[ticket] = self._counts[stream]
            self._counts[stream] += 1
            if len(self._tickets) > _KEPT_TICKETS:
                self._tickets.popitem(last=False)
        return self._tickets[ticket]


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator
