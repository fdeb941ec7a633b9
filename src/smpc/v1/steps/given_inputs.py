"""What a step function gives the model in its two runs: up to the model on pipeline rank 0, and as a whole on the rank of the last stage.

The pipeline computes with what the first run has given. A function that depends on what its runs change (a counter, a state that the next
microbatch reads) or on what ranks have for themselves gives other values in the second, from which a loss would come that is no loss of
the model's outputs. That is a StepError:

    rank 0       model(x + 0.1 * n) with n = 1, 2
    last rank    model(x + 0.1 * n) with n = 3, 4, if it is rank 0 too

    GivenBefore       for the same rank: compared by value, in every step on a CPU, in a function's first step elsewhere
    GivenElsewhere    for another rank: what sums and digests tell, in a function's first step
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from smpc.errors import StepError
from smpc.sample_inputs import Inputs
from smpc.v1.steps.tensors_within import tensors_within

_ERROR = 1e-3  # of sums in another order, or on another device


class GivenInputs(Protocol):
    """See above."""

    def check(self, inputs: Inputs, step_name: str) -> None:
        """StepError unless the model is given the same again."""


class GivenBefore:
    """What has been written into since is not compared, nor are parts of sequences."""

    def __init__(self, inputs: Inputs) -> None:
        self._tensors = [(each, each._version) for each in _compared(inputs)]

    def check(self, inputs: Inputs, step_name: str) -> None:
        """StepError unless the model is given the same again."""
        again = _compared(inputs)
        pairs = zip(self._tensors, again, strict=True) if len(again) == len(self._tensors) else ()
        if any(before._version == version and _differ(before, now) for (before, version), now in pairs):
            raise _changed(step_name)


@dataclass(frozen=True, slots=True)
class GivenElsewhere:
    """Parts of sequences are not compared."""

    sums: tuple[_Sums, ...]

    @classmethod
    def of(cls, inputs: Inputs) -> GivenElsewhere:
        """What another rank needs to know of a microbatch's inputs."""
        return cls(tuple(_Sums.of(each) for each in _compared(inputs)))

    def check(self, inputs: Inputs, step_name: str) -> None:
        """StepError unless the model is given the same again."""
        again = [_Sums.of(each) for each in _compared(inputs)]
        pairs = zip(self.sums, again, strict=True) if len(again) == len(self.sums) else ()
        if any(before.differ(now) for before, now in pairs):
            raise _changed(step_name)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of a tensor's finite elements, and of their sizes; weighted ones of whole numbers, which are the same on all devices."""

    form: tuple[tuple[int, ...], str]
    total: float | int
    size: float
    is_whole: bool

    @classmethod
    @torch.no_grad()
    def of(cls, tensor: Tensor) -> _Sums:
        form = tuple(tensor.shape), str(tensor.dtype)
        flat = tensor.reshape(-1)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            weights = torch.arange(1, flat.numel() + 1, device=tensor.device)
            return cls(form, int((flat.long() * weights).sum()), 0.0, True)
        flat = torch.view_as_real(flat).reshape(-1) if tensor.is_complex() else flat
        wide = flat.to(torch.float32 if tensor.device.type == "mps" else torch.float64).nan_to_num(0.0, 0.0, 0.0)
        return cls(form, float(wide.sum()), float(wide.abs().sum()), False)

    def differ(self, other: _Sums) -> bool:
        """Whether they are of tensors of one form with other values."""
        if self.form != other.form:
            return False
        if self.is_whole:
            return self.total != other.total
        largest = _ERROR * max(self.size, other.size)
        return not (
            math.isclose(self.total, other.total, abs_tol=largest)
            and math.isclose(self.size, other.size, abs_tol=largest)
        )


def _compared(inputs: Inputs) -> Sequence[Tensor]:
    return [
        each
        for each in tensors_within(inputs)
        if type(each) in (Tensor, nn.Parameter) and each.layout is torch.strided and not each.is_inference()
    ]


@torch.no_grad()
def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether tensors of one form have other values, on a CPU by a bit; other devices may add in another order every time."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return False
    if not (one.is_floating_point() or one.is_complex()) or one.numel() == 0:
        return not torch.equal(one, other)
    largest = 0.0 if one.is_cpu else _ERROR * float(one.abs().amax())
    return not torch.allclose(one, other, rtol=0.0 if one.is_cpu else _ERROR, atol=largest, equal_nan=True)


def _changed(step_name: str) -> StepError:
    return StepError(
        f"step function {step_name}: expected it to give the model the same in both of its runs for a microbatch (up to the model on the "
        "first pipeline rank, and as a whole on the rank of the last stage), found other values; have it depend on its arguments alone: "
        "change counters and states that a microbatch reads between steps, or inside the model, and make what ranks choose for themselves "
        "an argument"
    )
