"""Tensors of one rank, given to all, one at a time: the others have room for the largest of them, and for no second one.

    incoming = Incoming.of(model.parameters(), source=0)
    values = incoming.take(weight)                  rank 0's values, on every rank; until the next call

A tensor of its own for each would be two now and then: a communication thread may hold on to the one before.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, distributed


class Incoming:
    """`num_bytes`: of the largest tensor. `source`: the rank of the world whose values all get."""

    def __init__(self, num_bytes: int, source: int, device: torch.device | str = "cpu") -> None:
        self._num_bytes, self._source, self._device = num_bytes, source, torch.device(device)
        self._room: Tensor | None = None

    @classmethod
    def of(cls, tensors: Iterable[Tensor], source: int, device: torch.device | str = "cpu") -> Incoming:
        """For these tensors, or others that are no larger."""
        return cls(max((tensor.nbytes for tensor in tensors), default=0), source, device)

    def take(self, own: Tensor) -> Tensor:
        """The source's values, until the next call. Collective.

        `own`: what this rank has, to be written to; on meta, only its shape counts.
        """
        values = self._empty(own) if own.is_meta else own.detach().contiguous()
        if distributed.is_initialized():
            distributed.broadcast(values, self._source)
        return values

    def _empty(self, own: Tensor) -> Tensor:
        assert own.nbytes <= self._num_bytes, "the largest was told"
        if self._room is None:
            self._room = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        return self._room[: own.nbytes].view(own.dtype).view(own.shape)
