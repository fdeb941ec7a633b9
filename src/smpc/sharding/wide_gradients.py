"""Gradients of half-precision parameters in fp32: what microbatches, steps and replicas yield is added up in it, and stays in it.

    widen(parameters)                   from now on `.grad` of those in fp16 and bf16 is fp32
    gradient_dtype(parameter)           the dtype of its `.grad`
    stand_in(parameter)                 an fp32 one for DistributedDataParallel, whose buckets are as parameters are

A backward pass still computes in the parameters' dtype; autograd casts what comes for a parameter before it adds it to `.grad`:

    microbatch 0     bf16 gradient -> fp32 --.
    microbatch 1     bf16 gradient -> fp32 --+--> .grad, fp32 --> averaged over replicas in fp32

So small gradients are not lost beside a large sum. It takes two more bytes for each element.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

_HALVES = (torch.float16, torch.bfloat16)


def widen(parameters: Iterable[nn.Parameter]) -> None:
    """Give half-precision parameters fp32 gradients; an existing one is cast."""
    for parameter in parameters:
        if parameter.dtype in _HALVES and gradient_dtype(parameter) is not torch.float32:
            grad, parameter.grad = parameter.grad, None
            parameter.grad_dtype = torch.float32
            if grad is not None:
                parameter.grad = grad.float()


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's `.grad`."""
    return parameter.grad_dtype or parameter.dtype


def is_wide(parameter: Tensor) -> bool:
    """Whether a parameter has fp32 gradients without being fp32."""
    return gradient_dtype(parameter) is not parameter.dtype


def wide_stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """An fp32 parameter of the same form, without memory, for code that reads no values but needs parameters like their gradients."""
    other = torch.empty_like(parameter.detach(), dtype=gradient_dtype(parameter))
    other.untyped_storage().resize_(0)
    return nn.Parameter(other)


def keep_wide(sharded: FSDPModule) -> None:
    """Have FSDP leave gradients that it reduces in fp32 as they are.

    It would cast them to the dtype of the parameters, for which it has no option.
    """
    group: Any = sharded._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    take_note = group._init_mp_dtypes

    def take_note_of_wide() -> None:
        take_note()
        group._orig_dtype = torch.float32

    group._init_mp_dtypes = take_note_of_wide
