"""Memory for the parameters and buffers of a module that was made on the meta device.

Source: "torch.sagemaker.utils.module_utils" in the public reference of SMP v2.
"""

from __future__ import annotations

import torch
from torch import nn

from smpc.executor.parameter_slices import replacement

__all__ = ["empty_module_params", "move_buffers_to_device"]


def empty_module_params(module: nn.Module, device: torch.device | None = None, recurse: bool = False) -> nn.Module:
    """Gives the parameters of a module (and with `recurse`, of its children) memory without values on a device. Returns the module.

    `device`: by default each parameter's own, or the run's device for parameters on the meta device. Shared parameters stay shared.
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
    """Moves the buffers of a module (and with `recurse`, of its children) to a device. Returns the module.

    Buffers on the meta device get memory without values: fill them.
    """
    for each in module.modules() if recurse else (module,):
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
    return module


def default_device() -> torch.device:
    """The run's device: this process's GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
