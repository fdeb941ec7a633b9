"""What a step function gives the model in its two runs: up to the model on pipeline rank 0, and as a whole on the rank of the last stage.

The pipeline computes with what the first run has given. A function that depends on what its runs change (a counter, a state that the next
microbatch reads) or on what ranks have for themselves gives other values in the second, from which a loss would come that is no loss of
the model's outputs. That is a StepError:

    rank 0       model(x + 0.1 * n) with n = 1, 2
    last rank    model(x + 0.1 * n) with n = 3, 4, if it is rank 0 too

    GivenBefore       for the same rank: compared by value, in every step on a CPU, in a function's first step elsewhere
    GivenElsewhere    for another rank: by digests and samples, in a function's first step and where its arguments have another form
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
from smpc.v1.layout.placement import digest_of
from smpc.v1.steps.tensors_within import tensors_within

_ERROR = 1e-3  # of sums in another order, or on another device
_SAMPLES = 256  # of a tensor


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

    summaries: tuple[_Summary, ...]

    @classmethod
    def of(cls, inputs: Inputs) -> GivenElsewhere:
        """What another rank needs to know of a microbatch's inputs."""
        return cls(tuple(_Summary.of(each) for each in _compared(inputs)))

    def check(self, inputs: Inputs, step_name: str) -> None:
        """StepError unless the model is given the same again."""
        again = [_Summary.of(each) for each in _compared(inputs)]
        pairs = zip(self.summaries, again, strict=True) if len(again) == len(self.summaries) else ()
        if any(before.differ(now) for before, now in pairs):
            raise _changed(step_name)


@dataclass(frozen=True, slots=True)
class _Summary:
    """Of numbers with fractions: some of them, evenly spread, and the mean size of the finite ones. A digest of other tensors."""

    form: tuple[tuple[int, ...], str]
    digest: str = ""
    some: tuple[float, ...] = ()
    size: float = 0.0

    @classmethod
    @torch.no_grad()
    def of(cls, tensor: Tensor) -> _Summary:
        form = tuple(tensor.shape), str(tensor.dtype)
        if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
            return cls(form, digest_of(tensor))
        flat = torch.view_as_real(tensor.resolve_conj()).reshape(-1) if tensor.is_complex() else tensor.reshape(-1)
        finite = flat.float().nan_to_num(0.0, 0.0, 0.0)
        count = min(len(finite), _SAMPLES)
        spread = torch.arange(count, device=finite.device) * (len(finite) - 1) // max(1, count - 1)
        return cls(form, "", tuple(finite[spread].tolist()), float(finite.abs().mean()))

    def differ(self, other: _Summary) -> bool:
        """Whether they are of tensors of one form with other values."""
        if self.form != other.form:
            return False
        allowed = _ERROR * max(self.size, other.size)
        pairs = zip((*self.some, self.size), (*other.some, other.size), strict=True)
        return self.digest != other.digest or not all(
            math.isclose(one, two, rel_tol=_ERROR, abs_tol=allowed) for one, two in pairs
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
        f"step function {step_name}: expected it to give the model the same in both of its runs for a microbatch (up to the model, on the "
        "first pipeline rank, and as a whole, on the rank of the last stage, maybe the same one), found other values; have it depend "
        "on its arguments alone: change counters and states that a microbatch reads between steps, or inside the model, draw from a "
        "torch.Generator of the script's before the step, and make what ranks choose for themselves an argument"
    )
