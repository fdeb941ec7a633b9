"""The `self` of a program for a whole model: the present model, by its names without wrappers.

self.layers[0].mlp.up.weight       the parameter there is at this moment: a slice that FSDP has just gathered, say
self.layers[0](h)                  calls the module with all that is around it
self.inside("layers.0", f, h)      calls it, too, but has it run `f(h)` in place of its own forward
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from smpc.codegen.recompute import buffer_owners, run_checkpointed
from smpc.errors import UsageError
from smpc.in_place.skeleton import INSTALLED
from smpc.in_place.wrappers import unwrapped
from smpc.sharding.tensors import local


class View:
    """A module of the model."""

    def __init__(self, module: nn.Module) -> None:
        object.__setattr__(self, "_smpc_module", module)

    def __getattr__(self, name: str) -> Any:
        return _seen_through_view(getattr(self._smpc_module, name))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(unwrapped(self._smpc_module), name, value)

    def __getitem__(self, key: Any) -> Any:
        module = self._smpc_module
        return _seen_through_view(getattr(module, str(key)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module with all that is around it."""
        return self._smpc_module(*args, **kwargs)


class Root(View):
    """The model itself. `_device` replaces the device of the trace."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__(module)
        object.__setattr__(self, "_device", device)

    def inside(self, name: str, function: Callable[..., Any], *values: Any) -> Any:
        """Has a module run `function(*values)`."""
        module = functools.reduce(getattr, name.split("."), self._smpc_module)
        return module(Run(function), *values)

    def checkpoint(
        self,
        region: Callable[..., Any],
        *values: Any,
        preserve_rng_state: bool = True,
        buffers: tuple[str, ...] = (),
    ) -> Any:
        """`region(*values)`, computed again for the backward pass; `buffers` names those that it uses and that change."""
        owners = buffer_owners(self._smpc_module, buffers) if buffers else ()
        return run_checkpointed(region, *values, preserve_rng_state=preserve_rng_state, buffers=owners)


def _seen_through_view(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return View(value)
    return local(value) if isinstance(value, Tensor) else value


class Run:
    """The argument of a module call that runs a function in place of the module's forward."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


class InstalledView:
    """The replacement of a module's forward. It belongs to this module, and cannot be copied."""

    def __init__(self, module: nn.Module) -> None:
        self.own = module.forward
        setattr(self, INSTALLED, True)
        functools.update_wrapper(self, self.own, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function that it is called with, or does what a call does otherwise."""
        if args and isinstance(args[0], Run):
            return tree_map_only(Tensor, _without_view, args[0].function(*args[1:]))
        return self.otherwise(*args, **kwargs)

    def otherwise(self, *args: Any, **kwargs: Any) -> Any:
        """The original call, which runs no function."""
        return self.own(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a transformed model cannot be copied or pickled: its forward belongs to the ranks that share it; copy its state_dict"
        )


def install(module: nn.Module) -> None:
    """Let a module run functions that it is called with."""
    if not hasattr(vars(module).get("forward"), INSTALLED):
        vars(module)["forward"] = InstalledView(module)


def _without_view(value: Tensor) -> Tensor:
    """Outputs that are views come as copies: an in-place operation on a view would drop the hooks that wrappers put on it."""
    return value.clone() if value._is_view() and value.requires_grad else value
