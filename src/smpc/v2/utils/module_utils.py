"""Memory for the parameters and buffers of a module that was made on the meta device.

Source: "torch.sagemaker.utils.module_utils" in the public reference of SMP v2.
"""

from __future__ import annotations

import torch
from torch import nn

from smpc.executor.sharded_state import replacement

__all__ = ["empty_module_params", "move_buffers_to_device"]


def empty_module_params(module: nn.Module, device: torch.device | None = None, recurse: bool = False) -> nn.Module:
    """Gives the parameters of a module memory without values on a device, those of its children too with `recurse`; the module.

    `device`: that of each parameter by default, and the run's device for those on the meta device. Names of one parameter stay so.
    """
    made: dict[int, nn.Parameter] = {}
    for each in module.modules() if recurse else (module,):
        for name, parameter in each._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                target = device if device is not None else (default_device() if parameter.is_meta else parameter.device)
                made[id(parameter)] = replacement(parameter, torch.empty_like(parameter, device=target))
            each._parameters[name] = made[id(parameter)]
    return module


def move_buffers_to_device(module: nn.Module, device: torch.device, recurse: bool = False) -> nn.Module:
    """Moves the buffers of a module to a device, those of its children too with `recurse`; the module.

    Those on the meta device get memory without values: give them some.
    """
    for each in module.modules() if recurse else (module,):
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
    return module


def default_device() -> torch.device:
    """Where the run computes: this process's GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
