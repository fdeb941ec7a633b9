"""Replaces the modules of a model by their distributed versions.

    marks   what `tensor_parallelism` contexts and `set_tensor_parallelism` said of a module: whether, and with which keyword
            arguments. They are attributes of the modules themselves, so they are copied and pickled with them

If nested modules are marked and registered, the outermost is replaced. A module stays unchanged, with a warning that says why, if it
shares a parameter with another one, if its sizes cannot be split, or if it was made before its class was registered; modules inside it
may still be replaced. A replacement starts from the original's weights, if they can be translated (`Registration.state_hook`) and are
not on the meta device.

Source: "Enabling Tensor Parallelism" in the public reference of SMP v1.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from smpc.errors import ConfigError, ConfigTypeError, UsageError
from smpc.nn.distribution.registry import Registry
from smpc.nn.huggingface import families
from smpc.nn.init.delayed import is_delayed
from smpc.nn.init.script_fills import hand_on
from smpc.nn.parallel import DistributedModule, TensorParallel, distributed_modules, whole_shape
from smpc.nn.registration import ARGUMENTS, Fill, Registration
from smpc.nn.transformer.chains import link, name_layers
from smpc.tracer.regions import CheckpointMark, mark_checkpoint

_MARK = "_smpc_tensor_parallelism"
_ASKED = "_smpc_tensor_parallelism_asked"  # of the very module that was given to set_tensor_parallelism
_CONFIG = "config"  # of Hugging Face's models: what they were made of
_PREFIX = "_smpc_"  # of the attributes in which we note what was said of a module


@dataclass(frozen=True, slots=True)
class Mark:
    """The marks of a module."""

    enabled: bool
    kwargs: tuple[tuple[str, Any], ...]  # override arguments of the distributed module


@contextmanager
def tensor_parallelism(enabled: bool = True, **kwargs: Any) -> Iterator[None]:
    """Marks the modules that are created in this context, which can also decorate a function.

    `enabled`: whether they are distributed; the innermost of nested contexts wins. `kwargs`: arguments of the distributed modules.
    """
    mark = _mark_to_distribute("tensor_parallelism", enabled, kwargs)
    construct = nn.Module.__init__  # the outer context's, if there is one

    @functools.wraps(construct)
    def construct_marked(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        vars(self)[_MARK] = mark

    nn.Module.__init__ = construct_marked  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__init__ = construct  # type: ignore[method-assign]


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **kwargs: Any) -> None:
    """Marks a module and everything in it; later calls for parts of it override.

    `enabled`: whether it is distributed. `kwargs`: arguments of the distributed module.
    """
    if not isinstance(module, nn.Module):
        raise ConfigTypeError(f"set_tensor_parallelism: expected a torch.nn.Module, found {type(module).__name__}")
    mark = _mark_to_distribute("set_tensor_parallelism", enabled, kwargs)
    for inner in module.modules():
        vars(inner)[_MARK] = mark
    vars(module)[_ASKED] = enabled


def distribute(model: nn.Module, registry: Registry, parallel: TensorParallel) -> nn.Module:
    """The model with its marked modules replaced, in place; the replacement if it is the model itself."""
    _warn_of_unregistered(model, registry)
    _warn_of_untaken(model, registry)
    uses = _parameter_uses(model)
    made: dict[int, DistributedModule] = {}  # a module in several places is replaced by one
    layers: dict[int, None] = {}  # of Hugging Face's, by the id of what replaces them

    def visit(module: nn.Module, name: str, config: object) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        config = vars(module).get(_CONFIG, config)
        replacement = _distributed_replacement(module, name, config, registry, parallel, uses)
        if replacement is not None:
            made[id(module)] = replacement
            found = registry.find(module)
            if found is not None and found.format is not None:
                layers[id(replacement)] = None
            return replacement
        if not isinstance(module, DistributedModule):
            for child_name, child in list(module._modules.items()):  # a module in two places of it comes twice
                if child is None:
                    continue
                new = visit(child, f"{name}.{child_name}" if name else child_name, config)
                if new is not child:
                    setattr(module, child_name, new)
        return module

    distributed = visit(model, "", None)
    link(distributed, families.STACKS, layers)
    name_layers(distributed, families.STACKS, layers)
    return distributed


def load_whole(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Gives a module with distributed modules in it this rank's slices of whole values, by parameter and buffer name.

    Raises UsageError, before anything is written, listing what is missing, unexpected or of another shape.
    """
    owners = dict(distributed_modules(module))
    own: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    slices: dict[str, Tensor] = {}
    wrong = [f"missing: {name}" for name in own if name not in values]
    wrong += [f"unexpected: {name}" for name in values if name not in own]
    for name, whole in values.items():
        if name not in own:
            continue
        prefix, _, attribute = name.rpartition(".")
        shape = list(own[name].shape)
        shard = owners[prefix].shards.get(attribute) if prefix in owners else None
        if shard is not None:
            shape[shard.dim] = shard.size
        if list(whole.shape) != shape:
            wrong.append(f"shape of {name}: expected {shape}, found {list(whole.shape)}")
            continue
        slices[name] = owners[prefix].slice_of(attribute, whole) if prefix in owners else whole
    if wrong:
        raise UsageError("\n".join([f"the values do not fit {type(module).__name__}", *wrong]))
    with torch.no_grad():
        for name, value in slices.items():
            own[name].copy_(value)


def _mark_to_distribute(what: str, enabled: bool, kwargs: dict[str, Any]) -> Mark:
    if not isinstance(enabled, bool):
        raise ConfigTypeError(f"{what}: expected enabled to be a bool, found {type(enabled).__name__} {enabled!r}")
    return Mark(enabled, tuple(kwargs.items()))


def _distributed_replacement(
    module: nn.Module, name: str, config: object, registry: Registry, parallel: TensorParallel, uses: Counter[int]
) -> DistributedModule | None:
    """The distributed module in the place of a module; None if it stays."""
    mark: Mark | None = vars(module).get(_MARK)
    registration = registry.find(module)
    if mark is None or not mark.enabled or registration is None:
        return None
    what = f"{name or 'the model'} ({type(module).__name__})"
    own = _parameter_uses(module)
    shared = [n for n, p in module.named_parameters() if uses[id(p)] > own[id(p)]]
    if shared:
        _leave_undistributed(what, f"it shares {', '.join(shared)} with another module")
        return None
    try:
        arguments = registration.arguments(module, config)
        if arguments is None:
            _leave_undistributed(
                what, "it was made before its class was registered; call tp_register_with_module first"
            )
            return None
        distributed = _construct_distributed(
            registration, arguments, dict(mark.kwargs), _as_in(module, parallel), is_delayed(module)
        )
    except ConfigError as error:
        _leave_undistributed(what, str(error))
        return None
    _take_over(module, config, what, distributed, registration)
    _take_marks(module, distributed)
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        warnings.warn(
            f"{what}: hooks that were registered on it are not on its distributed version; register them after smp.DistributedModel",
            UserWarning,
            stacklevel=4,
        )
    registration.attach(distributed)
    return distributed.train(module.training)


def _warn_of_unregistered(model: nn.Module, registry: Registry) -> None:
    """Warns of modules marked by name that cannot be distributed; in contexts, many created modules have no distributed version."""
    for name, module in model.named_modules():
        inside = module.modules() if vars(module).get(_ASKED) else ()
        if inside and not any(isinstance(inner, DistributedModule) or registry.find(inner) for inner in inside):
            what = f"{name or 'the model'} ({type(module).__name__})"
            _leave_undistributed(
                what, "nothing in it has a distributed version; register its class with tp_register_with_module"
            )


def _warn_of_untaken(model: nn.Module, registry: Registry) -> None:
    """Arguments that no distributed module takes: most likely their names are wrong."""
    given: dict[str, None] = {}
    known: set[str] = set()
    for module in model.modules():
        mark, registration = vars(module).get(_MARK), registry.find(module)
        if mark is not None and mark.enabled and registration is not None:
            given.update((key, None) for key, _ in mark.kwargs)
            known.update(inspect.signature(registration.distributed).parameters)
    left = [key for key in given if key not in known]
    if left:
        warnings.warn(
            f"tensor_parallelism: no distributed module of this model takes {', '.join(left)}, which changes nothing",
            UserWarning,
            stacklevel=4,
        )


def _leave_undistributed(what: str, why: str) -> None:
    warnings.warn(f"{what} is not distributed by tensor parallelism: {why}", UserWarning, stacklevel=4)


def _construct_distributed(
    registration: Registration,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    overrides: dict[str, Any],
    parallel: TensorParallel,
    delay: bool,
) -> DistributedModule:
    """Constructs a distributed module with the arguments of the module that it replaces."""
    args, kwargs = arguments
    signature = inspect.signature(registration.distributed)
    bound = signature.bind_partial(*args, **kwargs)
    bound.arguments.update({key: value for key, value in overrides.items() if key in signature.parameters})
    bound.arguments["parallel"] = parallel
    with torch.device("meta") if delay else nullcontext():
        return registration.distributed(*bound.args, **bound.kwargs)


def _as_in(module: nn.Module, parallel: TensorParallel) -> TensorParallel:
    """The same split, with parameters of the dtype of the module's first one, unless the configuration names a dtype."""
    dtypes = [parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()]
    return replace(parallel, dtype=dtypes[0]) if dtypes and parallel.dtype is None else parallel


def _take_over(
    module: nn.Module, config: object, what: str, distributed: DistributedModule, registration: Registration
) -> None:
    """Gives the distributed module the original's weights, if there are any, and its frozen parameters."""
    _freeze_as(module, distributed, registration)
    if is_delayed(module):
        fills = {} if registration.fills is None else registration.fills(module, config)
        for name, fill in fills.items():
            _draw_with(distributed, name, fill)
        _hand_on_fills(module, distributed)
        return
    values = registration.values(module.state_dict())
    if values is None:
        warnings.warn(
            f"{what}: its distributed version starts from newly drawn weights, as it is registered without a state_hook",
            UserWarning,
            stacklevel=5,
        )
        return
    load_whole(distributed, values)


def _draw_with(distributed: DistributedModule, name: str, fill: Fill) -> None:
    """Has a parameter, if there is one of that name, drawn in another way."""
    prefix, _, own = name.rpartition(".")
    owner = dict(distributed_modules(distributed)).get(prefix)
    if owner is not None and own in dict(owner.named_parameters(recurse=False)):
        owner.draw(own, fill)


def _hand_on_fills(module: nn.Module, distributed: DistributedModule) -> None:
    """Repeats the script's operations on parameters for the distributed module's parameters of equal names and shapes."""
    owners = dict(distributed_modules(distributed))
    theirs = dict(module.named_parameters())
    for name, parameter in distributed.named_parameters():
        prefix, _, own = name.rpartition(".")
        shard = owners[prefix].shards.get(own) if prefix in owners else None
        if name in theirs and whole_shape(parameter, shard) == list(theirs[name].shape):
            hand_on(theirs[name], parameter)


def _freeze_as(module: nn.Module, distributed: DistributedModule, registration: Registration) -> None:
    """Parameters of the distributed module need gradients where the module's parameters do."""
    own = dict(distributed.named_parameters())
    rules = () if registration.format is None else registration.format.rules_of(list(module.state_dict()))
    names = {rule.theirs: rule.ours for rule in rules}
    for name, parameter in module.named_parameters():
        for known in names.get(name, (name,)):
            if known in own:
                own[known].requires_grad_(parameter.requires_grad)


def _take_marks(module: nn.Module, distributed: DistributedModule) -> None:
    """Copies the original's marks (its partition, whether it is checkpointed) to its replacement."""
    for key, value in vars(module).items():
        if key.startswith(_PREFIX) and key != ARGUMENTS and key not in vars(distributed):
            vars(distributed)[key] = value
    if vars(module).get("gradient_checkpointing", False):  # as Hugging Face's layers know of it
        mark_checkpoint(distributed, CheckpointMark(True, "", False))


def _parameter_uses(module: nn.Module) -> Counter[int]:
    """How often each parameter occurs in a module, by identity; a module that occurs several times counts once."""
    return Counter(
        id(parameter) for inner in module.modules() for parameter in inner._parameters.values() if parameter is not None
    )
