"""What scripts compute of slices where gradients are recorded: numbers to look at, but nothing that may be differentiated.

    loss = model(ids) + 0.01 * weight.norm()
    loss.item()                                of this rank's slice, as any number of it
    loss.backward()                            UsageError: the gradient of the norm of a slice is another one
    loss + 0 * weight.sum()                    of no account, as scripts have it so that each parameter has a gradient

Gradients of sums over elements would be right, but their value is of the slice alone, and so is the loss. In steps of `smpc.v1`, and in a
model's own forward, parameters are ordinary ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smpc.errors import UsageError


class _Undifferentiated(torch.autograd.Function):
    """An alias of a slice; its name is for the message."""

    generate_vmap_rule = True

    @staticmethod
    def forward(slice_: Tensor, name: str) -> Tensor:
        """The alias."""
        return slice_.view_as(slice_)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the name."""
        _, ctx.parameter = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Zeros, or the error."""
        (gradient,) = gradients
        if not gradient.any():
            return gradient, None
        raise UsageError(
            f"backward: expected a loss of what the model returns, and of parameters that all ranks have whole, found one that uses "
            f"{ctx.parameter!r} beside the model, of which this rank has a slice (a penalty such as weight.norm()): its value, and its "
            "gradient, would be those of the slice; compute it in the model's forward, or take weight_decay of the optimizer"
        )


def undifferentiated(parameter: Tensor, name: str) -> Tensor:
    """An alias of a slice, of which nothing can be differentiated."""
    found: Tensor = _Undifferentiated.apply(parameter, name)  # type: ignore[no-untyped-call]
    return found
