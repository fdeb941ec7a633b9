"""A script's operations on parameters without memory, recorded in order, and repeated once the parameters have memory.

    with noting():
        model = Model()                        # self.apply(self._init_weights), nn.init.normal_(self.table), p.data.mul_(0.5)
    fills = fills_of(parameter)                # all that changed this parameter, on the meta device without effect
    replay(fills, target, seed)                # does it to the memory that a rank has for it

A module's own initializer, `reset_parameters` or, in Hugging Face's models, `_init_weights`, is not the script's: it is run again when the
parameter is drawn, so nothing of it is kept, and what came before it is forgotten.

Changes are noted below torch's functions, as operations on a tensor, a view of the parameter, and numbers or tensors with values.
Functions of torch.nn.init that skip the meta device are noted as calls. A script that fills a parameter with values of another one without
values gets a ConfigError at once.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.nn.init
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_unflatten

from smpc.errors import ConfigError
from smpc.nn.init.draw_in_slices import NotByBlocks, SlicedDrawing, SlicedTarget
from smpc.nn.parallel import own_part_of

_ATEN = torch.ops.aten
_NOTES = "_smpc_script_fills"  # of a parameter, and of the memory that it does not have
_COPIES = (_ATEN.clone, _ATEN._to_copy)
_OWN, _HUGGING_FACE = ("reset_parameters", "_reset_parameters"), "_init_weights"
_TRUNCATED = "_no_grad_trunc_normal_"  # which `Drawing` does by blocks
_PASS_OVER_META = (_TRUNCATED, "orthogonal_")  # in torch.nn.init


@dataclass(frozen=True, slots=True)
class ScriptFill:
    """One change.

    `size`, `stride`, `offset`: of the view that is changed; `is_whole`: it is all of the parameter. `needs_values`: it would pass over a
    parameter that a rank keeps a slice of.
    """

    change: Callable[[Tensor], object]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_whole: bool
    needs_values: bool

    def apply(self, parameter: Tensor) -> None:
        """Do it to a tensor in the parameter's place. Raises NotByBlocks if it needs the whole one."""
        if self.needs_values and parameter.is_meta:
            raise NotByBlocks("an initializer of torch.nn.init")
        self.change(parameter if self.is_whole else parameter.as_strided(self.size, self.stride, self.offset))


@contextmanager
def noting() -> Iterator[None]:
    """Notes changes of tensors on the meta device; a model's parameters keep what is noted where a cast gives them other memory."""
    if any(isinstance(mode, _Noting) for mode in _get_current_dispatch_mode_stack()):
        yield  # contexts may be nested; what is done is noted once
        return
    seen: dict[int, nn.Parameter] = {}

    def see(module: nn.Module, name: str, value: nn.Module | nn.Parameter | None) -> None:
        """Also a reference to a module's registration: parameters of copies are registered nowhere."""
        found = value.parameters() if isinstance(value, nn.Module) else [] if value is None else [value]
        seen.update((id(parameter), parameter) for parameter in found if parameter.is_meta)

    handles = register_module_parameter_registration_hook(see), register_module_module_registration_hook(see)
    before = list(_imported_script_initializers())
    try:
        for module, name, function in before:
            setattr(module, name, _noted_script_initializer(function))
        with _Noting():  # type: ignore[no-untyped-call]
            yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)
        for handle in handles:
            handle.remove()
        for parameter in seen.values():
            hand_on(parameter, parameter)


def fills_of(parameter: Tensor) -> list[ScriptFill]:
    """The script's operations on a parameter, in order."""
    found: list[ScriptFill] | None = getattr(parameter.untyped_storage(), _NOTES, None)
    return vars(parameter).get(_NOTES, []) if found is None else found


def hand_on(old: Tensor, new: Tensor) -> None:
    """Transfers the script's operations on one parameter to its replacement."""
    if fills := fills_of(old):
        vars(new)[_NOTES] = list(fills)


def forget(parameter: Tensor) -> None:
    """It has been done."""
    fills_of(parameter).clear()
    vars(parameter).pop(_NOTES, None)


@torch.no_grad()
def replay(fills: list[ScriptFill], target: SlicedTarget, seed: int) -> None:
    """Do what the script did, to the part of a parameter that this rank keeps. Raises ConfigError where it needs more of it."""
    try:
        with SlicedDrawing([target], seed):
            for fill in fills:
                fill.apply(target.parameter)
    except NotByBlocks:
        own = target.part
        whole = nn.Parameter(torch.full(target.parameter.shape, math.nan, dtype=own.dtype, device=own.device))
        with SlicedDrawing([SlicedTarget(target.name, whole, None, whole)], seed):
            for fill in fills:
                fill.apply(whole)
        if bool(whole.isnan().any()):
            raise ConfigError(
                f"delayed initialization: {target.name} is cut over ranks, and what the script does to it needs its whole values; do it in "
                "reset_parameters of its module, or create the model without the delay"
            ) from None
        own.copy_(own_part_of(whole, target.shard, own.shape))


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is done to the memory that tensors on the meta device do not have."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        result = func(*args, **given)
        if func.overloadpacket in _COPIES and args[0].is_meta and result.is_meta:
            setattr(result.untyped_storage(), _NOTES, list(_notes_of_script_fills(args[0])))
        elif func._schema.is_mutable:
            _note_fill(func, args, given)
        return result


def _note_fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Notes a call that fills a parameter on meta."""
    written = _filled_tensor(func, args, kwargs)
    if written is None or not written.is_meta:
        return
    if _is_own_initializer(written):
        _notes_of_script_fills(written).clear()
        return
    leaves, form = tree_flatten((args, kwargs))
    if any(isinstance(leaf, Tensor) and leaf.is_meta and leaf is not written for leaf in leaves):
        raise ConfigError(
            f"delayed initialization: {func} fills a parameter with what is computed of tensors that have no values yet; do it in "
            "reset_parameters of its module, or create it outside of delay_param_initialization"
        )
    places = [leaf is written for leaf in leaves]
    kept = [leaf.clone() if isinstance(leaf, Tensor) and leaf is not written else leaf for leaf in leaves]
    kept = [None if is_it else leaf for is_it, leaf in zip(places, kept, strict=True)]

    def change(tensor: Tensor) -> object:
        own = [tensor if is_it else leaf for is_it, leaf in zip(places, kept, strict=True)]
        args, kwargs = tree_unflatten(own, form)
        return func(*args, **kwargs)

    _add_script_fill(written, change)


def _filled_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor that an operation changes; None if there is none, or several."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [value] if isinstance(value, Tensor) else []
    return found[0] if len(found) == 1 else None


def _add_script_fill(tensor: Tensor, change: Callable[[Tensor], object], *, by_blocks: bool = True) -> None:
    is_whole = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    place = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    _notes_of_script_fills(tensor).append(ScriptFill(change, *place, is_whole, not by_blocks))


def _imported_script_initializers() -> Iterator[tuple[ModuleType, str, Callable[..., Any]]]:
    """The modules and names of initializers that skip the meta device: scripts import them under these names.

    Perhaps before `smpc.nn.init.nn_init_on_slices` has wrapped them.
    """
    current = [vars(torch.nn.init)[name] for name in _PASS_OVER_META]
    functions = {id(function): function for function in (*current, *map(inspect.unwrap, current))}
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            known = [
                (name, functions[id(value)]) for name, value in list(vars(module).items()) if id(value) in functions
            ]
            yield from ((module, name, function) for name, function in known)


def _noted_script_initializer(function: Callable[..., Any]) -> Callable[..., Any]:
    """An initializer that passes over the meta device, noted as it is called."""

    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not tensor.is_meta:
            return function(tensor, *args, **kwargs)
        if _is_own_initializer(tensor):
            _notes_of_script_fills(tensor).clear()
        else:
            is_whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
            by_blocks = function.__name__ == _TRUNCATED and is_whole
            _add_script_fill(
                tensor, lambda view: vars(torch.nn.init)[function.__name__](view, *args, **kwargs), by_blocks=by_blocks
            )
        return tensor

    return call


def _notes_of_script_fills(tensor: Tensor) -> list[ScriptFill]:
    """The list that belongs to a tensor's memory, whatever views it; it is made here."""
    storage = tensor.untyped_storage()
    if not hasattr(storage, _NOTES):
        setattr(storage, _NOTES, [])
    found: list[ScriptFill] = getattr(storage, _NOTES)
    return found


def _is_own_initializer(tensor: Tensor) -> bool:
    """Whether a module's own initializer is running, on a parameter that it has."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name in (*_OWN, _HUGGING_FACE) and _initializes(frame.f_locals.get("self"), name, tensor.untyped_storage()):
            return True
        frame = frame.f_back
    return False


def _initializes(module: object, initializer: str, storage: torch.UntypedStorage) -> bool:
    """Whether the storage is a parameter that the initializer of this module fills."""
    if initializer == _HUGGING_FACE:
        transformers = sys.modules.get("transformers")
        return transformers is not None and isinstance(module, transformers.PreTrainedModel)
    own = module._parameters.values() if isinstance(module, nn.Module) else ()
    return any(parameter is not None and parameter.untyped_storage() is storage for parameter in own)
