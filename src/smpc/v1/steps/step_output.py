"""`StepOutput`: what a step function returned in every microbatch, for one tensor of its return value.

    >>> output = StepOutput([torch.tensor(1.0), torch.tensor(3.0)])
    >>> output.reduce_mean()
    tensor(2.)

Source: public SMP v1 API.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from smpc.errors import StepError


class StepOutput:
    """One tensor for each microbatch, in order."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self.outputs = list(outputs)

    def reduce_mean(self) -> Tensor:
        """The mean over the microbatches, of the shape of one of them."""
        return self.reduce_sum() / len(self.outputs)

    def average(self) -> Tensor:
        """The same as `reduce_mean`."""
        return self.reduce_mean()

    def reduce_sum(self) -> Tensor:
        """The sum over the microbatches, of the shape of one of them."""
        return functools.reduce(operator.add, self.outputs)

    def concat(self) -> Tensor:
        """The tensors joined along axis 0, which they must have."""
        if any(not output.dim() for output in self.outputs):
            raise StepError("concat: expected tensors with at least one axis, found scalars; use stack()")
        return torch.cat(self.outputs)

    def stack(self) -> Tensor:
        """The tensors along a new axis 0, whose size is the number of microbatches."""
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """The same tensors without their history."""
        return StepOutput([output.detach() for output in self.outputs])

    def __len__(self) -> int:
        return len(self.outputs)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.outputs)

    def __getitem__(self, microbatch: int) -> Tensor:
        return self.outputs[microbatch]

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"
