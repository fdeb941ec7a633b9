"""Inputs that all layers of a chain share (masks, cross states, rotary angles), converted to the inner layout once and passed on with the
hidden state.

    shared = SharedInputs.of(hidden)                   # what the layer before has brought inside, if it was one of this chain
    mask = shared.inside(mask, parallel.enter_whole)   # its result for this very tensor, or a new one
    shared.pass_on(output)                             # to the layer that is given `output`

It lives as long as the hidden states of one forward pass. If the next layer does not get the same tensor object, as at the start of
another pipeline stage, it starts anew; all ranks of a group do the same, since they run the same program.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_ATTRIBUTE = "_smpc_shared_inputs"


class SharedInputs:
    """Tensors outside and inside."""

    def __init__(self) -> None:
        self._found: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def of(cls, hidden: Tensor) -> SharedInputs:
        """The shared inputs of a hidden state."""
        found = vars(hidden).get(_ATTRIBUTE)
        return found if isinstance(found, cls) else cls()

    def inside(self, tensor: Tensor, bring: Callable[[Tensor], Tensor]) -> Tensor:
        """The tensor in the inner layout; `bring` converts it. A tensor converted without a gradient is not used if one is needed."""
        needs_grad = tensor.requires_grad and torch.is_grad_enabled()
        for outside, found in self._found:
            if outside is tensor and found.requires_grad == needs_grad:
                return found
        brought = bring(tensor)
        self._found.append((tensor, brought))
        return brought

    def pass_on(self, hidden: Tensor) -> None:
        """Sends it on with a hidden state."""
        vars(hidden)[_ATTRIBUTE] = self
