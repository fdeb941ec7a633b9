"""Ranks go through the models that a script shards with `fully_shard` in step: `smpc.sharding.in_step`, as the models of other surfaces.

fully_shard(block), ...     ranks note the modules, which all of them make in one order
the first forward           torch finds out which of them is outermost; what is noted by then goes in step
a forward without gradients  all have their parameters in parts afterwards: scripts and optimizers read and write parts
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from smpc.nn.init.note_slices import note_parts
from smpc.optimizers.torch_patches import replace_method
from smpc.sharding.backwards import is_in_backward
from smpc.sharding.forward_writes.writes import KeptWrites
from smpc.sharding.in_step import InStep, ranks_of


class ScriptUnits:
    """The modules that a script shards. `mesh`: by default; `is_alone`: whether ranks wait for each other in sharded parameters alone."""

    def __init__(self, mesh: Callable[[], DeviceMesh], *, is_alone: bool) -> None:
        self._mesh, self._is_alone = mesh, is_alone
        self._noted: list[weakref.ref[nn.Module]] = []

    def note(self, module: nn.Module) -> None:
        """The script is about to shard a module."""
        self._noted.append(weakref.ref(module))

    def patch(self) -> Callable[[], None]:
        """Have what is noted go in step from its first forward on; the function that takes it back."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def lazy_init(state: FSDPState) -> None:
                if state._is_root is None:
                    self._begin()
                original(state)

            return lazy_init

        note_parts()
        return replace_method(FSDPState, "_lazy_init", make)

    def _begin(self) -> None:
        """Cover what is noted. Collective."""
        found = [module for module in (ref() for ref in self._noted) if isinstance(module, FSDPModule)]
        self._noted.clear()
        units = [unit for unit in found if isinstance(unit, nn.Module) and not _is_covered(unit)]
        inner = {id(module) for unit in units for module in unit.modules() if module is not unit}
        outer: list[Any] = [unit for unit in units if id(unit) not in inner]
        mesh = self._mesh()
        if not outer:
            return
        for root in outer:
            root.register_forward_hook(let_go_without_gradients)
        roots: dict[str, FSDPModule] = {str(i) if len(outer) > 1 else "": root for i, root in enumerate(outer)}
        named: dict[str, FSDPModule] = {}
        states: dict[int, Any] = {}
        for prefix, root in roots.items():
            for name, module in nn.Module.named_modules(root):  # type: ignore[arg-type]
                if isinstance(module, FSDPModule) and id(module._get_fsdp_state()) not in states:
                    states[id(module._get_fsdp_state())] = module
                    named[f"{prefix}.{name}".strip(".")] = module
        alike = {name: unit for name, unit in named.items() if _is_over(unit, mesh)}
        if mesh.size() == 1:
            KeptWrites(alike.values(), None)
            return
        made = InStep(roots, alike, mesh, is_alone=self._is_alone and len(alike) == len(named))
        made.begin()


def let_go_without_gradients(root: Any, *_: object) -> None:
    """No backward will free what is left whole: the outermost unit, and those that a script wants so after forwards."""
    if not torch.is_grad_enabled() and not is_in_backward():
        for unit in root.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()


def _is_covered(unit: Any) -> bool:
    group = unit._get_fsdp_state()._fsdp_param_group
    return group is not None and isinstance(group.unshard, functools.partial)


def _is_over(unit: FSDPModule, mesh: DeviceMesh) -> bool:
    """Whether its parameters, if it has some of its own, are sharded over the ranks of a mesh."""
    group = unit._get_fsdp_state()._fsdp_param_group
    return group is None or ranks_of(group.mesh_info.mesh) == ranks_of(mesh)
