"""What a script's optimizer keeps for every element of a parameter, as plans count it.

    planned(torch.optim.SGD(parameters, momentum=0.9), "adam")      one tensor for each parameter, none while it steps
    planned(torch.optim.AdamW(parameters), "adam")                  what was assumed

A copy of an optimizer of torch.optim steps on a few small parameters on the CPU. Tensors of a parameter's size in its state are counted,
and what a step makes and drops beside them. What was assumed stays for an optimizer of any other class, whose step may do more than it
says, for one whose copy cannot step, and for one that keeps larger tensors, such as LBFGS.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from smpc.executor.measure.spans import LiveBytes
from smpc.optimizers.elementwise import small_copy, step_of_class
from smpc.partitioner.costs.named_optimizers import Optimizer, find_optimizer

_CPU = torch.device("cpu")
_AT_ONCE = 2  # tensors that a step on a CPU makes of one parameter, for one of all parameters on a GPU


def planned(optimizer: torch.optim.Optimizer, assumed: str) -> Optimizer:
    """The optimizer in place of `assumed`, the name of one that plans know; in its precision."""
    known = find_optimizer(assumed)
    is_assumed = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    if is_assumed and not any(group.get("amsgrad") for group in optimizer.param_groups):
        return known
    if type(optimizer).__module__.split(".")[:2] != ["torch", "optim"]:
        return known
    try:
        with torch.random.fork_rng([]), torch.enable_grad():
            numbers = _tried(optimizer)
    except Exception:  # for dense parameters, say, of one that wants sparse gradients
        numbers = None
    if numbers is None:
        return known
    wide, narrow, made = numbers
    name = type(optimizer).__name__
    own, float32 = (0, wide) if known.float32 else (wide, 0)
    return replace(known, name=name, own=own, float32=float32, byte=narrow, scratch=math.ceil(made / _AT_ONCE))


def _tried(optimizer: torch.optim.Optimizer) -> tuple[int, int, int] | None:
    """How many tensors for a parameter: kept in its dtype, kept in bytes, and made and dropped by a step."""
    trial, tried = small_copy(optimizer, torch.float32, _CPU)

    def closure() -> Tensor:
        for i, value in enumerate(tried):
            value.grad = torch.full_like(value, 0.1 * (i + 1))
        return torch.ones(())

    closure()
    step_of_class(trial, closure)
    closure()
    most = max(value.dim() for value in tried)  # most elements are in matrices
    counted = [value for value in tried if value.dim() == most]
    kept = [[each for each in trial.state.get(p, {}).values() if isinstance(each, Tensor)] for p in counted]
    if most == 0 or any(each.numel() > p.numel() for p, own in zip(counted, kept, strict=True) for each in own):
        return None
    held = [tensor for value in tried for tensor in (value, value.grad) if tensor is not None]
    held += [each for own in trial.state.values() for each in own.values() if isinstance(each, Tensor)]
    with LiveBytes(held) as counter:
        before = counter.live
        step_of_class(trial, closure)
    made = round((counter.peak - before) / max(value.nbytes for value in tried))
    whole = [
        [each.itemsize > 1 for each in own if each.numel() == p.numel()] for p, own in zip(counted, kept, strict=True)
    ]
    return max(sum(own) for own in whole), max(len(own) - sum(own) for own in whole), made
