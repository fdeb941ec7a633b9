"""Losses that are NaN or infinite: all ranks learn of them at the end of the step, and react alike.

Terms
    loss      a tensor of one element that was given to `model.backward` without a gradient
    verdict   a number that is 0 where all losses are finite, and else says which one is not: 1 + 3 * (replica * microbatches +
              microbatch) + kind. The greatest counts where replicas differ: gradients are averaged over replicas, so a NaN in one
              is in all. It is 0, too, where the loss may owe it to a loss scale in use, which the optimizer's step will lower

The key `nan_policy` decides: `raise` NonFiniteLossError on all ranks, `skip` the step, or `ignore` it. The first two drop the gradients
that have accumulated, so that the optimizer changes nothing; training can go on after either.

Losses stay on their device until the step ends: they are read once, not for every microbatch.

The message that brings the verdict to all ranks also says which step function each tensor-parallel group runs: ranks of a group that run
different functions of equal shapes would mix their values, and sum gradients of different losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from smpc.errors import UsageError
from smpc.mesh import Axis
from smpc.v1.session.object_messages import gather_objects
from smpc.v1.session.precision import Precision
from smpc.v1.session.process_state import Session
from smpc.v1.steps.arguments import StepBody

_KINDS = ("nan", "inf", "-inf")
_NO_FUNCTION = -(1 << 33)  # less than the number of any step function, and than its negative


class Losses:
    """The losses of one step on the rank that computes them; constructed before the step function runs."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision
        self._values: list[Tensor] = []
        self._microbatches: list[int] = []
        self._num_scaled = precision.num_scaled
        self.mean: float | None = None  # over the microbatches, once there is a verdict

    def add(self, microbatch: int, losses: Sequence[Tensor]) -> None:
        """Notes the losses of one microbatch."""
        for loss in losses:
            self._values.append(loss.detach().reshape(()).to(torch.float32))
            self._microbatches.append(microbatch)

    def verdict(self, session: Session) -> int:
        """This replica's verdict."""
        if not self._values or session.config.nan_policy == "ignore":
            return 0
        values = torch.stack(self._values).tolist()
        self.mean = sum(values) / len(set(self._microbatches))
        if self._precision.overflow_is_curable(self._num_scaled):
            return 0
        for microbatch, value in zip(self._microbatches, values, strict=True):
            if not math.isfinite(value):
                kind = 0 if math.isnan(value) else 1 if value > 0 else 2
                replica = session.mesh.rdp_rank(session.rank)
                return 1 + 3 * (replica * session.config.microbatches + microbatch) + kind
        return 0


def agree(verdict: int, body: StepBody | None, session: Session) -> int:
    """The verdict of all ranks whose gradients are averaged. Collective over the ranks that run the same stage, in steps that train.

    `body` is None on a rank that takes part in others' steps. Raises UsageError on all ranks if a tensor-parallel group runs several
    functions.
    """
    mesh = session.mesh
    if mesh.dp_size == 1 or session.config.nan_policy == "ignore":
        return verdict
    numbers = [verdict]
    if mesh.tp_size > 1:  # two numbers for each group: the largest one's, and the smallest one's negative
        numbers += [_NO_FUNCTION] * 2 * mesh.rdp_size
        if body is not None:
            place = 1 + 2 * mesh.rdp_rank(session.rank)
            numbers[place : place + 2] = [body.number, -body.number]
    message = torch.tensor(numbers, dtype=torch.int64, device=session.message_device)
    dist.all_reduce(message, dist.ReduceOp.MAX, group=session.groups[Axis.DP])
    verdict, *found = message.tolist()
    if any(largest + negative for largest, negative in zip(found[::2], found[1::2], strict=True) if largest >= 0):
        raise _different_functions(body, session)
    return verdict


def _different_functions(body: StepBody | None, session: Session) -> UsageError:
    """The error that all ranks raise. Collective over them."""
    names = gather_objects(
        "none" if body is None else body.name, session.groups[Axis.DP], session.message_device, session.device
    )
    members = session.mesh.group(Axis.DP, session.rank)
    found = ", ".join(f"{name} on rank {rank}" for name, rank in zip(names, members, strict=True))
    return UsageError(
        f"expected all ranks of a tensor-parallel group to run the same step function, found {found}; run the same step functions in the "
        "same order on all of them"
    )


def describe_verdict(verdict: int, step_name: str, session: Session) -> str:
    """The message for a verdict other than 0."""
    place, kind = divmod(verdict - 1, 3)
    replica, microbatch = divmod(place, session.config.microbatches)
    where = f"microbatch {microbatch}" + (f" of replica {replica}" if session.mesh.rdp_size > 1 else "")
    return (
        f"step function {step_name}: expected a finite loss, found {_KINDS[kind]} in {where}; the gradients were dropped, so the "
        "parameters stay as they are. Look for its cause (learning rate, data, precision); nan_policy: skip goes on without such "
        "steps, nan_policy: ignore does not look"
    )
