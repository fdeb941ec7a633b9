"""Creating a model without memory for its parameters, which are drawn where they belong once that is known.

    with delay_param_initialization():
        model = MyModel()                              # parameters on the meta device, all else as always
    draw_delayed(model, device, seed, wanted)          # memory and values for the parameters whose names are wanted, none for the others
    draw_delayed(model, device, seed, wanted, slices)  # ... and of some of them this rank's slices alone

Parameters made with `torch.empty`, which an initializer fills afterwards, are delayed. The initializer runs when they are drawn:
`reset_parameters` of the parameter's module, or `_init_weights` of a Hugging Face model; then the script's own operations on the
parameter (`smpc.nn.init.script_fills`). A parameter that none of them fills is an error.

A parameter's values depend only on the seed and its name, so a rank that draws some parameters draws the same values as a rank that
draws all; slices belong to the same whole (`smpc.nn.init.draw_in_slices` draws them without the whole). The values differ from those that
the model would have drawn without the delay. An initializer that needs whole tensors (an orthogonal one, say) gets its module's, which
are freed at once.

Source: `delay_param_initialization` in the public SMP v1 API.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors

from smpc.errors import ConfigError, ConfigTypeError
from smpc.executor.shared_draws import seed_of
from smpc.nn.init.draw_in_slices import NotByBlocks, SlicedDrawing, SlicedTarget
from smpc.nn.init.module_initializers import Fill, reset_of
from smpc.nn.init.script_fills import fills_of, forget, hand_on, noting, replay
from smpc.nn.layers.embedding import DistributedEmbedding
from smpc.nn.layers.linear import DistributedLinear
from smpc.nn.parallel import DistributedModule, ParameterSlice, own_part_of, whole_shape

_DRAWN = "_is_hf_initialized"  # of a tensor: Hugging Face's initializers leave it alone


@contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Delays the initialization of parameters of modules that are created in this context; also decorates a function.

    `enabled`: False makes it a context without effect. See the module docstring for the values that parameters get.
    """
    if not isinstance(enabled, bool):
        raise ConfigTypeError(
            f"delay_param_initialization: expected enabled to be a bool, found {type(enabled).__name__} {enabled!r}"
        )
    if not enabled:
        yield
        return
    with noting(), _NoMemory():
        yield


class _NoMemory(TorchFunctionMode):
    """Puts tensors without values on the meta device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty and given.get("device") is None:
            given["device"] = "meta"
        return func(*args, **given)


def is_delayed(model: nn.Module) -> bool:
    """Whether parameters of the model are still to be drawn."""
    return any(parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
def draw_delayed(
    model: nn.Module,
    device: torch.device,
    seed: int,
    wanted: Callable[[str], bool] = lambda name: True,
    slices: Mapping[str, tuple[ParameterSlice, torch.Size]] = MappingProxyType({}),
) -> None:
    """Draws the delayed parameters that are wanted, on `device`; the others become empty. Parameter objects stay what they are.

    `slices`: those that this rank is to have of parameters, and their shapes, by name. Distributed modules know their own.
    Raises ConfigError, listing them, for parameters and buffers that nothing fills.
    """
    late = {name: parameter for name, parameter in model.named_parameters() if parameter.is_meta}
    if not late:
        return
    parts: dict[str, Tensor] = {}
    for name, parameter in late.items():
        if wanted(name) and name in slices:
            parts[name] = _empty_delayed_parameter(parameter, slices[name][1], device)
        else:
            _replace_delayed_memory(
                parameter,
                _empty_delayed_parameter(parameter, parameter.shape if wanted(name) else torch.Size([0]), device),
            )
    due = {name: parameter for name, parameter in late.items() if wanted(name)}
    names = {id(parameter): name for name, parameter in due.items()}
    targets = [
        SlicedTarget(name, p, slices[name][0] if name in parts else None, parts.get(name, p)) for name, p in due.items()
    ]
    done = [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in names]
    flagged = [tensor for tensor in done if _DRAWN not in vars(tensor)]
    for tensor in flagged:
        vars(tensor)[_DRAWN] = True
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            _draw_initial_values(model, names, targets, seed)
            _redo_fills(model, targets, seed)
    finally:
        for tensor in flagged:
            del vars(tensor)[_DRAWN]
    for target in targets:
        if target.shard is not None:
            _replace_delayed_memory(due[target.name], target.part)
    _check_filled(model, due)


@torch.no_grad()
def draw_module(
    module: nn.Module,
    name: str,
    fills: Sequence[Fill],
    seed: int,
    wanted: Mapping[str, str],
    buffers: Sequence[str] = (),
) -> list[str]:
    """Draws the parameters of one module (not its children's) and fills its buffers, whose memory exists already.

    `name`: of the module in its model; `fills`: what fills it, in order. `wanted`: by its name in the module, the name in the model of a
    parameter to draw. `buffers`: names in the module. Values depend only on the seed and on names. Returns the names in the module of what
    nothing fills.
    """
    own = dict(module.named_parameters(recurse=False))
    targets = [SlicedTarget(full, own[each], None, own[each]) for each, full in wanted.items()]
    made = {each: module._buffers[each] for each in buffers}
    versions = {each: buffer._version for each, buffer in made.items() if buffer is not None and buffer.numel()}
    devices = {target.part.device for target in targets if target.part.device.type == "cuda"}

    def unfilled_after(ways: Sequence[Fill]) -> list[str]:
        for target in targets:
            vars(target.parameter).pop(_DRAWN, None)
            target.part.fill_(torch.nan)
        with torch.random.fork_rng(sorted(devices, key=str)), SlicedDrawing(targets, seed):
            torch.manual_seed(seed_of(seed, name))
            for way in ways:
                way()
        left = [each for each, target in zip(wanted, targets, strict=True) if bool(target.part.isnan().any())]
        return left + [each for each, old in versions.items() if _is_as_before(module._buffers[each], made[each], old)]

    left, reset = unfilled_after(fills), reset_of(module)
    if left and reset is not None:
        return unfilled_after([reset, *fills])  # what the model passes over has the values of its constructor
    return left


def _is_as_before(buffer: Tensor | None, made: Tensor | None, version: int) -> bool:
    """Whether nobody has put another one in the place of a buffer, or written into it."""
    return buffer is made and buffer is not None and buffer._version == version


def _draw_initial_values(model: nn.Module, names: Mapping[int, str], targets: list[SlicedTarget], seed: int) -> None:
    """Runs the initializers of all modules; once more, on whole tensors, those that have left slices as they were."""
    with_due = [
        (name, module, owner)
        for name, module, owner in _innermost_first(model, None, "")
        if any(id(parameter) in names for parameter in module.parameters())
    ]
    for name, module, owner in with_due:
        own = _inside_delayed_targets(module, targets)
        torch.manual_seed(seed_of(seed, name))
        try:
            with SlicedDrawing(own, seed):
                _initialize_delayed(module, owner, names)
        except (NotByBlocks, RuntimeError):
            if all(target.shard is None for target in own):
                raise
            _initialize_whole(module, name, owner, names, own, seed)
    unfilled = {id(t.parameter) for t in targets if t.shard is not None and bool(t.part.isnan().any())}
    for name, module, owner in with_due if unfilled else ():  # initializers may pass over the meta device
        if any(id(parameter) in unfilled for parameter in module.parameters(recurse=False)):
            _initialize_whole(module, name, owner, names, _inside_delayed_targets(module, targets), seed)


def _redo_fills(model: nn.Module, targets: list[SlicedTarget], seed: int) -> None:
    """Does what the script did to parameters when it created them. Distributed modules have slices, of which they know the whole."""
    noted = [target for target in targets if fills_of(target.parameter)]
    slices = {
        id(parameter): module.shards.get(name)
        for module in model.modules()
        if noted and isinstance(module, DistributedModule)
        for name, parameter in module.named_parameters(recurse=False)
    }
    for target in noted:
        fills, own = fills_of(target.parameter), target
        shard = slices.get(id(target.parameter))
        if shard is not None:
            whole = torch.empty(whole_shape(target.part, shard), dtype=target.part.dtype, device="meta")
            own = SlicedTarget(target.name, nn.Parameter(whole), shard, target.part)
        replay(fills, own, seed)
        forget(target.parameter)


def _initialize_whole(
    module: nn.Module,
    name: str,
    owner: nn.Module | None,
    names: Mapping[int, str],
    own: list[SlicedTarget],
    seed: int,
) -> None:
    """Runs an initializer on whole tensors in place of slices, and keeps the slices of the written values."""
    sliced = [target for target in own if target.shard is not None]
    for target in sliced:
        _replace_delayed_memory(
            target.parameter, _empty_delayed_parameter(target.parameter, target.parameter.shape, target.part.device)
        )
    torch.manual_seed(seed_of(seed, name))
    with SlicedDrawing([SlicedTarget(t.name, t.parameter, None, t.parameter) for t in own], seed):
        _initialize_delayed(module, owner, names)
    for target in sliced:
        found = own_part_of(target.parameter.detach(), target.shard, target.part.shape)
        target.part.copy_(torch.where(found.isnan(), target.part, found))
        _replace_delayed_memory(target.parameter, torch.empty(target.parameter.shape, dtype=found.dtype, device="meta"))


def _inside_delayed_targets(module: nn.Module, targets: list[SlicedTarget]) -> list[SlicedTarget]:
    inside = {id(parameter) for parameter in module.parameters()}
    return [target for target in targets if id(target.parameter) in inside]


def _empty_delayed_parameter(parameter: Tensor, shape: torch.Size, device: torch.device) -> Tensor:
    """Memory for a parameter; NaN marks values that are not drawn yet."""
    return torch.full(shape, torch.nan, dtype=parameter.dtype, device=device)


def _replace_delayed_memory(parameter: nn.Parameter, value: Tensor) -> None:
    """Gives a parameter other memory; it stays the same object."""
    new = nn.Parameter(value, requires_grad=parameter.requires_grad)
    vars(new).update({key: value for key, value in vars(parameter).items() if key != _DRAWN})
    hand_on(parameter, new)
    swap_tensors(parameter, new)  # type: ignore[no-untyped-call]


def _innermost_first(
    module: nn.Module, owner: nn.Module | None, name: str
) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """All modules, children before their parents, with the model of Hugging Face's around each."""
    if isinstance(module, _hugging_face()):
        owner = module
    for child_name, child in module.named_children():
        yield from _innermost_first(child, owner, f"{name}.{child_name}" if name else child_name)
    yield name, module, owner


def owners_of(model: nn.Module) -> dict[int, nn.Module]:
    """By the identity of a module, the Hugging Face model around it, if there is one."""
    return {id(module): owner for _, module, owner in _innermost_first(model, None, "") if owner is not None}


def _hugging_face() -> tuple[type[nn.Module], ...]:
    """The class of Hugging Face's models, if the script has imported it."""
    transformers = sys.modules.get("transformers")
    return () if transformers is None else (transformers.PreTrainedModel,)


def _initialize_delayed(module: nn.Module, owner: nn.Module | None, names: Mapping[int, str]) -> None:
    """Runs what fills the parameters of a module."""
    own = [parameter for parameter in module.parameters(recurse=False) if id(parameter) in names]
    if isinstance(module, DistributedModule):
        if own:
            if owner is not None:
                _draw_as(owner, module)
            module.reset_parameters()
    elif owner is not None:
        owner._init_weights(module)  # type: ignore[operator]
    elif own and (reset := reset_of(module)) is not None:
        reset()


def _draw_as(owner: nn.Module, module: DistributedModule) -> None:
    """Has a distributed linear layer or embedding drawn as a model of Hugging Face's draws plain ones."""
    kinds: dict[type[nn.Module], type[nn.Module]] = {DistributedLinear: nn.Linear, DistributedEmbedding: nn.Embedding}
    kind = kinds.get(type(module))
    if kind is None:
        return

    def fill(block: Tensor) -> None:
        plain = kind(1, 1, device="meta")
        plain.weight = nn.Parameter(block)
        owner._init_weights(plain)  # type: ignore[operator]

    module.draw("weight", fill)
    if "bias" in dict(module.named_parameters(recurse=False)):
        module.draw("bias", Tensor.zero_)


def _check_filled(model: nn.Module, due: Mapping[str, nn.Parameter]) -> None:
    unfilled = [name for name, parameter in due.items() if bool(parameter.isnan().any())]
    unfilled += [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if unfilled:
        raise ConfigError(
            f"delayed initialization: nothing fills {', '.join(unfilled)}; expected the modules that have them to have a method "
            "reset_parameters; give them one, or create them outside of delay_param_initialization"
        )
