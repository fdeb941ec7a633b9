"""Wrappers that scripts put around modules, and the modules inside.

    FSDP1, checkpoint_wrapper, offload_wrapper, torch.compile      a module around the module
    FSDP2 (fully_shard)                                            a subclass, and hooks

A module is known by its name in the model without wrappers: `layers.0.mlp`, whatever `layers.0` is wrapped in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

_INSIDE = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def unwrapped(module: nn.Module) -> nn.Module:
    """The script's own module, without what is around it."""
    while (name := next((each for each in _INSIDE if each in module._modules), None)) is not None:
        inner = module._modules[name]
        assert inner is not None
        module = inner
    return module


def own_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """(name, what is called by that name, the module inside of it), each module once; "" is the model."""
    waiting, seen = [("", model)], set[int]()
    while waiting:
        name, outer = waiting.pop()
        inner = unwrapped(outer)
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        yield name, outer, inner
        children = [
            (f"{name}.{key}" if name else key, child) for key, child in inner._modules.items() if child is not None
        ]
        waiting += reversed(children)


def is_wrapped(outer: nn.Module, inner: nn.Module) -> bool:
    """Whether something acts when the module is called."""
    return outer is not inner or isinstance(inner, FSDPModule)


@dataclass(frozen=True, slots=True)
class Casts:
    """Mixed precision of an FSDP unit: the dtype of its parameters, inputs and outputs; None: no cast."""

    parameters: torch.dtype | None = None
    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None


def casts_of(outer: nn.Module) -> Casts | None:
    """The casts of the unit of FSDP that begins with a module; None if none does."""
    while True:
        if isinstance(outer, FullyShardedDataParallel):
            precision = outer.mixed_precision
            if precision is None:
                return Casts()
            return Casts(precision.param_dtype, precision.param_dtype if precision.cast_forward_inputs else None)
        if isinstance(outer, FSDPModule):
            policy = outer._get_fsdp_state()._mp_policy
            inputs = policy.param_dtype if policy.cast_forward_inputs else None
            return Casts(policy.param_dtype, inputs, policy.output_dtype)
        name = next((each for each in _INSIDE if each in outer._modules), None)
        inner = None if name is None else outer._modules[name]
        if inner is None:
            return None
        outer = inner
