"""Keys and values of earlier calls as tuples: how releases of transformers without `Cache` objects hand them to a layer and get them back.

cache = TupleCache(past)                       # (key, value), then cross-attention's if there is one; () before the first call
keys, values = cache.update(states, False)     # keys and values of earlier calls, then these
cache.present                                  # what the layer returns, in the same order
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

States = tuple[Tensor, Tensor]


class TupleCache:
    """Keys and values [N, heads / tp, S, head size] of one layer in one call. `has_crossed`: also those of cross-attention."""

    def __init__(self, past: tuple[Tensor, ...], has_crossed: bool) -> None:
        self._past, self._has_crossed = tuple(past), has_crossed
        self.present: tuple[Tensor, ...] = ()

    def update(self, states: States, is_crossed: bool) -> States:
        """These keys and values after the earlier ones; of cross-attention, the earlier ones, if there are any."""
        if is_crossed and not self._has_crossed:
            return states
        past = self._past[2:4] if is_crossed else self._past[:2]
        if past and is_crossed:
            states = (past[0], past[1])
        elif past:
            states = (torch.cat((past[0], states[0]), -2), torch.cat((past[1], states[1]), -2))
        self.present = (*self.present, *states)
        return states

    def get_seq_length(self, index: int) -> int:
        """How many positions there were before; as `Cache` objects say it, of any layer."""
        return self._past[0].shape[-2] if self._past else 0


def returned(cache: Any) -> Any:
    """A layer's result for a cache: its keys and values, or a `Cache` object itself."""
    return cache.present if isinstance(cache, TupleCache) else cache
