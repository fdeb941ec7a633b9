"""State dicts of one rank's part, and optimizers that have their state before the first step.

    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=f"run/tp0_ep0_fsdp{rank}")

Source: public training scripts for SMP v2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from smpc.checkpoint.torch_format.saving import local_part
from smpc.errors import CheckpointError, UsageError

__all__ = ["SMStateDictType", "init_optim_state", "sm_state_dict_type"]


class SMStateDictType(Enum):
    """Kinds of state dicts beside torch's."""

    SM_LOCAL_STATE_DICT = "local"


@contextmanager
def sm_state_dict_type(module: nn.Module, state_dict_type: SMStateDictType) -> Iterator[None]:
    """Inside, `state_dict` and `load_state_dict` of a model cover this rank's part, by the present names of its parameters.

    Nothing is communicated. Such a state is loaded by as many shards as saved it.
    """
    if state_dict_type is not SMStateDictType.SM_LOCAL_STATE_DICT:
        raise UsageError(f"state_dict_type: expected SMStateDictType.SM_LOCAL_STATE_DICT, found {state_dict_type!r}")
    before = {name: vars(module)[name] for name in ("state_dict", "load_state_dict") if name in vars(module)}
    own = vars(module)
    own["state_dict"] = lambda *args, **kwargs: _local_state(module)
    own["load_state_dict"] = lambda state, *args, **kwargs: _load_local(module, state)
    try:
        yield
    finally:
        for name in ("state_dict", "load_state_dict"):
            del own[name]
        for name, value in before.items():
            own[name] = value


def init_optim_state(optimizer: torch.optim.Optimizer, skip_empty_param: bool = False) -> None:
    """Gives an optimizer the state that it has after a step, without changing parameters, so that a checkpoint can be loaded into it.

    `skip_empty_param`: not of parameters of which this rank has nothing.
    """
    if optimizer.state:
        return
    before = [(group, group["lr"]) for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    for parameter in parameters:
        skipped = not parameter.requires_grad or (skip_empty_param and not local_part(parameter).numel())
        parameter.grad = None if skipped else torch.zeros_like(parameter)
    for group, rate in before:
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    try:
        optimizer.step()
    finally:
        for group, rate in before:
            group["lr"] = rate
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _local_state(module: nn.Module) -> dict[str, Tensor]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: local_part(tensor.detach()) for name, tensor in named}


@torch.no_grad()
def _load_local(module: nn.Module, state: Mapping[str, Any]) -> None:
    own = _local_state(module)
    wrong = [f"{name}: expected it in the state, found nothing" for name in own if name not in state]
    wrong += [f"{name}: expected nothing of that name, found it" for name in state if name not in own]
    wrong += [
        f"{name}: expected a part of shape {list(own[name].shape)}, found {list(state[name].shape)}; load with as many shards as saved it"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    if wrong:
        raise CheckpointError("the local state does not fit this rank:\n" + "\n".join(wrong))
    for name, part in own.items():
        part.copy_(state[name])
