"""Batches of a library's training loop as microbatches: which can be cut, and outputs put together again."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

import smpc.v1 as smp
from smpc.containers import map_tensors
from smpc.errors import UsageError

IGNORED = -100  # the label that torch's cross entropy leaves out of its mean


def start(pipeline: Mapping[str, Any] | None, who: str, example: str) -> None:
    """Begin the session with this configuration, replicas allowed; with None, the script has begun it.

    `who` and `example` are named in the UsageError where it has not, or where both have.
    """
    if pipeline is None:
        if not smp.is_initialized():
            raise UsageError(f"{who}: expected the configuration of a pipeline; {example}, or call smp.init before")
        return
    if smp.is_initialized():
        raise UsageError(f"{who}: smp.init has been called already; leave the configuration out, or call smp.shutdown")
    smp.init({"ddp": True, **pipeline})


def divides(batch: Any) -> bool:
    """Whether every tensor in a batch can be cut into the microbatches of a step along axis 0."""
    microbatches = smp.state.cfg.microbatches
    sizes = {value.shape[0] for value in tree_leaves(batch) if isinstance(value, Tensor) and value.dim()}
    return all(size and size % microbatches == 0 for size in sizes)


def microbatches_of(batch: Any) -> list[Any]:
    """A batch that divides, cut along axis 0."""
    number = smp.state.cfg.microbatches

    def part(value: Tensor, index: int) -> Tensor:
        return value.chunk(number)[index] if value.dim() else value

    return [map_tensors(functools.partial(part, index=index), batch) for index in range(number)]


def uneven_labels(batch: Any) -> list[int]:
    """How many labels that count each microbatch of a batch has, if it is not the same number in all; else none.

    The mean of the microbatches' means then differs from the mean over the batch's labels.
    """
    microbatches = smp.state.cfg.microbatches
    for value in tree_leaves(batch):
        if (
            not isinstance(value, Tensor)
            or not value.dim()
            or value.is_floating_point()
            or value.shape[0] % microbatches
        ):
            continue
        counts = (value != IGNORED).reshape(microbatches, -1).sum(dim=1)
        if (counts != counts[0]).any():
            found: list[int] = counts.tolist()
            return found
    return []


def warn_of_uneven_labels(counts: list[int], remedy: str) -> bool:
    """Warn, and return True, if there are any counts (`uneven_labels`). `remedy`: what to do."""
    if counts:
        warnings.warn(
            f"the microbatches of a batch have {counts} labels other than {IGNORED}: the loss is the mean of their means, and not the mean "
            f"over the batch; {remedy}",
            stacklevel=2,
        )
    return bool(counts)


def joined(value: Any, *, whole: bool) -> Any:
    """Outputs of the microbatches joined to the batch's, numbers in a row; `whole`: every microbatch was the batch."""
    if isinstance(value, smp.StepOutput):
        if whole:
            return value[0]
        return value.concat() if value[0].dim() else value.stack()
    if isinstance(value, (list, tuple)):
        return tuple(joined(each, whole=whole) for each in value)
    if isinstance(value, Mapping):
        return {name: joined(each, whole=whole) for name, each in value.items()}
    return value
