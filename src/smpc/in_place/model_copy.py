"""A model to be recorded: a copy of the present model, without wrappers, with whole parameters on the meta device.

Parameters may be anywhere when a recording is made: in slices, in parts of flat parameters, gathered as plain tensors. So what they are as
a whole is noted beforehand (`whole_parameters`), and the copy has stand-ins. All else is the model's own: buffers, and the values of
attributes. Only what refers to modules of the model is copied, as `copy.deepcopy` does, and refers to their copies.

Wrappers that scripts put around modules, and the modules inside.

    FSDP1, checkpoint_wrapper, offload_wrapper, torch.compile      a module around the module
    FSDP2 (fully_shard)                                            a subclass, and hooks

A module is known by its name in the model without wrappers: `layers.0.mlp`, whatever `layers.0` is wrapped in.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from smpc.containers import map_tensors

_INSIDE = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def plain_name(name: str) -> str:
    """A name as the model has it without wrappers."""
    for part in _INSIDE:
        name = name.replace(f"{part}.", "")
    return name


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


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_OF_FSDP2 = "__composable_api"  # how what `fully_shard` keeps in a module is called
INSTALLED = "_smpc_installed"  # on the replacement of a forward


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The copy. `originals`: what each of its parts is a copy of, by id; None for parameters, which have stand-ins."""

    model: nn.Module
    originals: Mapping[int, Any]

    def original(self, value: Any) -> Any:
        """The original of a part of the copy; other objects are returned unchanged."""
        return self.originals.get(id(value), value)


@dataclass(frozen=True, slots=True)
class WholeParameter:
    """A parameter as the model has it before anybody divides it. `names`: all that it has; `requires_grad`: where nobody knows better."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def whole_parameters(model: nn.Module) -> tuple[WholeParameter, ...]:
    """All parameters of a model that nothing is wrapped around yet."""
    names: dict[int, list[str]] = {}
    found: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        found[id(parameter)] = parameter
    return tuple(
        WholeParameter(tuple(names[key]), tuple(one.shape), one.dtype, one.requires_grad) for key, one in found.items()
    )


def skeleton(model: nn.Module, parameters: tuple[WholeParameter, ...]) -> Skeleton:
    """The copy. Its parameters have the dtypes that FSDP's mixed precision computes in."""
    memo: dict[int, Any] = {}
    originals: dict[int, Any] = {}
    pairs, units = [], dict[str, Casts | None]()
    for name, outer, inner in own_modules(model):
        made = object.__new__(_plain_class(inner))
        memo[id(inner)] = memo[id(outer)] = made
        around = outer
        while around is not inner:
            memo[id(around)] = made
            around = next(child for child in around._modules.values() if child is not None)
        pairs.append((name, inner, made))
        units[name] = casts_of(outer)
    named = {name: whole for whole in parameters for name in whole.names}
    stand_ins = {whole.names[0]: _stand_in(model, whole, units) for whole in parameters}
    referring = _Referring(memo)
    for name, inner, made in pairs:
        prefix = f"{name}." if name else ""
        keys = _keys_of(named, prefix)
        _fill_copy(inner, made, {key: stand_ins[named[prefix + key].names[0]] for key in keys}, referring, memo)
        originals |= {id(made): inner, id(vars(made)): vars(inner)}
        originals |= {id(vars(made)[table]): vars(inner)[table] for table in ("_modules", "_buffers")}
        originals[id(vars(made)["_parameters"])] = None
    for value in memo.get(id(memo), []):  # what `copy.deepcopy` has copied
        made = memo[id(value)]
        originals[id(made)] = value
        if hasattr(made, "__dict__") and type(vars(made)) is dict:
            originals[id(vars(made))] = vars(value)
    for name, _, made in pairs:
        unit = units[name]
        if name and unit is not None:  # the model's own casts come before and after all of this
            _cast_like_unit(made, unit)
    return Skeleton(memo[id(model)], originals)


def _keys_of(named: Mapping[str, WholeParameter], prefix: str) -> list[str]:
    rest = (name.removeprefix(prefix) for name in named if name.startswith(prefix))
    return [key for key in rest if "." not in key]


def _stand_in(model: nn.Module, whole: WholeParameter, units: Mapping[str, Casts | None]) -> nn.Parameter:
    dtype = whole.dtype
    owner, _, key = whole.names[0].rpartition(".")
    if dtype.is_floating_point:
        above = [".".join(owner.split(".")[:end]) for end in range(len(owner.split(".")), 0, -1)] if owner else []
        unit = next((found for name in above if (found := units.get(name)) is not None), None)
        if unit is None:  # the outermost one, which may be around the model: its parameters are there while it runs
            now = getattr(unwrapped(_unwrapped_submodule(model, owner)), key, None)
            unit = Casts(now.dtype if isinstance(now, Tensor) else None)
        dtype = unit.parameters or dtype
    made = nn.Parameter(torch.empty(whole.shape, dtype=dtype, device="meta"), whole.requires_grad)
    held = unwrapped(_unwrapped_submodule(model, owner))._parameters.get(key)
    if held is not None:
        made.requires_grad_(held.requires_grad)
        made.__dict__ = held.__dict__  # attributes that scripts give it: guards watch this very dict
    return made


def trained_parameters(module: nn.Module) -> tuple[bool, ...]:
    """Which of a module's own parameters require grad, as far as they are its own now."""
    return tuple(parameter.requires_grad for parameter in module._parameters.values() if parameter is not None)


def _unwrapped_submodule(model: nn.Module, name: str) -> nn.Module:
    """The submodule of that name, inside of all wrappers."""
    found = model
    for key in name.split(".") if name else ():
        inner = unwrapped(found)._modules[key]
        assert inner is not None, name
        found = inner
    return found


def _cast_like_unit(module: nn.Module, unit: Casts) -> None:
    """Has a copy take and give what the unit would."""
    inputs, outputs = unit.inputs, unit.outputs
    if inputs is not None:
        module.register_forward_pre_hook(
            lambda _, args, kwargs: (_in_dtype(args, inputs), _in_dtype(kwargs, inputs)), with_kwargs=True
        )
    if outputs is not None:
        module.register_forward_hook(lambda _, args, output: _in_dtype(output, outputs))


def _in_dtype(values: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda value: value.to(dtype) if value.is_floating_point() else value, values)


def _plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of the module without FSDP2, which makes a subclass of it."""
    found = type(module)
    if isinstance(module, FSDPModule):
        return next(base for base in found.__bases__ if base is not FSDPModule)
    return found


class _Memo(dict[int, Any]):
    """For `copy.deepcopy`, which asks it for copies of a value's references."""

    def __init__(self, modules: Mapping[int, Any]) -> None:
        super().__init__()
        self._modules = modules
        self.has_modules = False

    def get(self, key: int, default: Any = None) -> Any:
        """The copy of a module, or an existing copy."""
        self.has_modules = self.has_modules or key in self._modules
        return self._modules[key] if key in self._modules else super().get(key, default)


class _Referring:
    """Which values refer to modules of the model. `modules`: their copies, by id."""

    def __init__(self, modules: Mapping[int, Any]) -> None:
        self._modules = dict(modules)
        self._known: dict[int, bool] = {}

    def __contains__(self, value: object) -> bool:
        if type(value) in _PLAIN or isinstance(value, Tensor):
            return False
        if id(value) not in self._known:
            memo = _Memo(self._modules)
            with suppress(Exception):  # what cannot be copied is what it is
                copy.deepcopy(value, memo)
            self._known[id(value)] = memo.has_modules
        return self._known[id(value)]


def _fill_copy(
    module: nn.Module,
    made: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    referring: _Referring,
    memo: dict[int, Any],
) -> None:
    """Gives a copy the state of its module."""
    theirs = _hooks_of_torch(module)
    for key, value in vars(module).items():
        if key in parameters or str(key).startswith(_OF_FSDP2) or hasattr(value, INSTALLED):
            continue
        if key == "_parameters":
            found: Any = {name: parameters.get(name) for name in value if name in parameters or value[name] is None}
            found |= {name: one for name, one in parameters.items() if name not in found}
        elif key == "_modules":
            found = {name: None if child is None else memo[id(child)] for name, child in value.items()}
        elif key in ("_buffers", "_non_persistent_buffers_set"):
            found = value.copy()
        elif key.startswith("_") and "hooks" in key and isinstance(value, dict):
            found = type(value)((number, hook) for number, hook in value.items() if number not in theirs)
        else:
            found = copy.deepcopy(value, memo) if value in referring else value
        vars(made)[key] = found


def _hooks_of_torch(module: nn.Module) -> set[int]:
    """The numbers of hooks that torch's wrappers, and what goes with them, have registered: they act when the module itself is called."""
    found = set()
    for key, hooks in vars(module).items():
        if key.startswith("_") and "hooks" in key and isinstance(hooks, dict):
            for number, hook in hooks.items():
                called = hook.func if isinstance(hook, functools.partial) else hook
                owner = getattr(called, "__self__", None)
                place = getattr(called, "__module__", "") if owner is None else type(owner).__module__
                if str(place).startswith(("torch.distributed", "smpc.sharding")):
                    found.add(number)
    return found
