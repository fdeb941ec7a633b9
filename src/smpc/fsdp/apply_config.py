"""Applies a configuration to a model: meshes, units, precision, recomputation, and the optimizer, which continues with the shards.
Collective.

    prepared = prepare(model, config, "fp32", optimizer)
    loss(model(batch)).backward()       gradients are averaged over the ranks that hold the parts
    prepared.clip(1.0)                  the norm over all ranks
    optimizer.step()

Every direct child of the model that has parameters is sharded by itself: code that calls a child, and not the model, works too.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from smpc import dist
from smpc.errors import ConfigError, ConfigTypeError, ConfigUnsupportedError
from smpc.fsdp.broadcast_values import ValuesBeforeSlicing
from smpc.fsdp.buffer_dtypes import CastBuffers, cast_buffers
from smpc.fsdp.config import FSDPConfig, MixedPrecision
from smpc.fsdp.meshes import MeshesOver, key_of, meshes_of, over_all
from smpc.fsdp.tensor_slices import AXIS, TensorConfig, check_beside, data_sizes
from smpc.fsdp.wrapping import Wrapped, recomputed, units_of
from smpc.nn.init.note_slices import note_parts
from smpc.sharding import Keep, Sharded, ShardingOptions, Unit, shard
from smpc.sharding.dtensors import as_state_of, local
from smpc.sharding.in_step import InStep
from smpc.sharding.shard import Incoming, check_gradients_of_parts, keep_in_step, own_modules
from smpc.tracer.state.fakes import check_own_memory


@dataclass(slots=True)
class Prepared:
    """A sharded model. `numbered`: what differs between groups, by its name in state dicts: of units of which not all ranks hold parts.

    For each of these it has the number of this rank's values, and how many there are; ranks that hold parts of the same values have the
    same number. `mesh`: of all ranks, with the axis `tensor` if layers are sliced. `buffers`: the cast ones; after filling a state dict in
    place without loading it, call `settle` of each.
    """

    model: nn.Module
    config: FSDPConfig
    mesh: DeviceMesh
    numbered: dict[str, tuple[int, int]] = field(default_factory=dict)
    buffers: tuple[CastBuffers, ...] = ()
    in_step: InStep | None = None

    def __post_init__(self) -> None:
        note_parts()

    @property
    def tensor_group(self) -> distributed.ProcessGroup | None:
        """The ranks that slice layers together with this one; None if none are sliced."""
        return self.mesh[AXIS].get_group() if AXIS in (self.mesh.mesh_dim_names or ()) else None

    @torch.no_grad()
    def clip(self, most: float, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most `most`; the norm before. Collective.

        `parameters`: those that are updated; None: all of the model.
        """
        total = torch.zeros((), dtype=torch.float64)
        grads = []
        for parameter in self.model.parameters() if parameters is None else parameters:
            if parameter.grad is None:
                continue
            own = local(parameter.grad)
            grads.append(own)
            holders = self._copies(parameter)
            total += own.double().square().sum().cpu() / holders
        device = next((grad.device for grad in grads), torch.device("cpu"))
        total = total.to(device)
        dist.all_reduce(total)
        norm = total.sqrt()
        factor = float(torch.clamp(most / (norm + 1e-6), max=1.0))
        for own in grads:
            own.mul_(factor)
        return norm.float()

    def _copies(self, parameter: Tensor) -> int:
        """How many ranks of the world hold the same part."""
        if not isinstance(parameter, DTensor):
            return dist.get_world_size()
        sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        copies = math.prod(size for size, placement in sizes if placement.is_replicate())
        is_whole = self.tensor_group is not None and AXIS not in (parameter.device_mesh.mesh_dim_names or ())
        return copies * (self.mesh[AXIS].size() if is_whole else 1)


def prepare(
    model: nn.Module,
    config: FSDPConfig,
    precision: str,
    optimizer: torch.optim.Optimizer | None = None,
    device_type: str = "cpu",
    tensor: TensorConfig | None = None,
) -> Prepared:
    """Shard the children of a model in place, with rank 0's values. Collective.

    `precision`: `fp32`, `amp_fp16` or `amp_bf16`, which named mixed precisions refer to. `optimizer`: gets the sharded parameters in place
    of the whole ones. `device_type`: "cpu" or "cuda". `tensor`: layers that are sliced first; FSDP shards over the ranks with the same
    slices. Raises ConfigError for fields that do not fit the model or the ranks, before any process group is made.
    """
    roots = _roots_to_prepare(model, config)
    units = {name: units_of(root) for name, root in roots.items()}
    _check_shared(model, roots)
    slices = 1 if tensor is None else tensor.tensor_parallel_degree
    degrees = config.degrees(*data_sizes(slices))
    _check_options(units, config)
    check_own_memory(model)
    own = over_all((_group_to_prepare(unit, config) for each in units.values() for unit in each), slices)
    if slices > 1:
        check_beside(config)
    ignored = _ignored_parameters(model, config)
    policies = _precision_policies(units, config, precision)
    is_meta = _check_meta(model, config)
    _tell_of_fields(config)
    is_hybrid = config.is_hybrid or config.sharding_strategy == "NO_SHARD"
    prepared = Prepared(model, config, _mesh_to_prepare(device_type, degrees, slices, is_hybrid=is_hybrid))
    meshes = meshes_of(own.values(), device_type)
    before = dict(model.named_parameters(remove_duplicate=False))
    source = Incoming.of(model.parameters(), 0, device_type)
    values = None
    if tensor is not None and slices > 1:
        check_gradients_of_parts(model, ignored)
        values = ValuesBeforeSlicing(model, source, device_type, offload=config.cpu_offload)
        values.slice(tensor, prepared.mesh, is_meta=is_meta)
    if config.activation_checkpointing or config.activation_cpu_offload:
        _save_less(roots.values(), config)
    whole = MixedPrecision.of(config.mixed_precision, precision)
    options = _sharding_options(whole, config)
    over = prepared.mesh if slices == 1 else prepared.mesh[("replica", "shard") if is_hybrid else ("shard",)]
    filled, models = source if values is None else None, dict[str, Sharded]()
    for name, root in roots.items():
        asked = [_unit_options(name, unit, config, policies, meshes, own) for unit in units[name]]
        models[name] = shard(root, asked, over, options, ignored=ignored, source=filled, in_step=False)
        _settle(models[name], root, config, units[name])
    prepared.in_step = keep_in_step(models, over)
    if values is not None:
        values.settle()
    prepared.numbered = _numbered_prepared_units(model, roots, units, config, own)
    if config.auto_wrap:
        _sync_buffers(model, device_type)
        prepared.buffers = _cast_buffers(model, config, policies, whole)
    if optimizer is not None:
        _give_parameters(optimizer, before, model)
    if config.verbose and dist.get_global_rank() == 0:
        _print_prepared(prepared, units, policies, degrees)
    return prepared


def _give_parameters(optimizer: torch.optim.Optimizer, before: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """An optimizer of a model's parameters as they were before gets those that are in their places."""
    after = dict(model.named_parameters(remove_duplicate=False))
    hand_over(optimizer, {old: after[name] for name, old in before.items() if old is not after[name]})


def _sharding_options(whole: MixedPrecision, config: FSDPConfig) -> ShardingOptions:
    dtypes = (whole.param_dtype, whole.reduce_dtype)
    return ShardingOptions(Keep.NEVER, *dtypes, cast_inputs=True, offload=config.cpu_offload)


def _settle(sharded: Sharded, root: nn.Module, config: FSDPConfig, wrapped: Sequence[Wrapped]) -> None:
    """Set how long units stay whole, and which are gathered ahead of need."""
    sharded.settle()
    _set_prefetch(root, config, wrapped)


def _tell_of_fields(config: FSDPConfig) -> None:
    for line in config.told:
        warnings.warn(line, stacklevel=4)


def _precision_policies(
    units: Mapping[str, Sequence[Wrapped]], config: FSDPConfig, precision: str
) -> dict[tuple[str, str], MixedPrecision]:
    """The mixed precision of every unit."""
    return {
        (root, unit.name): MixedPrecision.of(
            unit.options.get("mixed_precision", config.mixed_precision),
            precision,
            f"fsdp_wrap_fn({root}.{unit.name}): mixed_precision",
        )
        for root, wrapped in units.items()
        for unit in wrapped
    }


def _cast_buffers(
    model: nn.Module,
    config: FSDPConfig,
    policies: Mapping[tuple[str, str], MixedPrecision],
    whole: MixedPrecision,
) -> tuple[CastBuffers, ...]:
    children = {
        name: child for name, child in _children_to_prepare(model) if getattr(child, "_fsdp_wrap", True) is not False
    }
    dtypes: dict[str, dict[str, torch.dtype | None]] = {name: {"": whole.buffer_dtype} for name in children}
    for (root, unit), policy in policies.items():
        dtypes[root][unit] = policy.buffer_dtype
    return cast_buffers(children, dtypes, config.ignored_modules or ())


def _unit_options(
    root: str,
    unit: Wrapped,
    config: FSDPConfig,
    policies: Mapping[tuple[str, str], MixedPrecision],
    meshes: Mapping[MeshesOver, DeviceMesh],
    own: Mapping[Any, MeshesOver],
) -> Unit:
    """A unit with what the configuration and its wrapping ask for."""
    over = _prepared_unit_over(unit, config, own)
    keep = Keep.MICROBATCH if _keeps_whole(unit, config) else Keep.NEVER
    mesh = None if over is None else meshes[over]
    return Unit(unit.name, mesh, keep=keep, policy=_prepared_policy(policies[root, unit.name]))


def _group_to_prepare(unit: Wrapped, config: FSDPConfig) -> Any:
    return unit.options.get("process_group", config.process_group)


def _prepared_unit_over(unit: Wrapped, config: FSDPConfig, own: Mapping[Any, MeshesOver]) -> MeshesOver | None:
    group = _group_to_prepare(unit, config)
    return None if group is None else own[key_of(group)]


def _numbered_prepared_units(
    model: nn.Module,
    roots: Mapping[str, nn.Module],
    units: Mapping[str, Sequence[Wrapped]],
    config: FSDPConfig,
    own: Mapping[Any, MeshesOver],
) -> dict[str, tuple[int, int]]:
    """See `Prepared`."""
    rank = dist.get_global_rank()
    numbers = {over: over.number(rank) for over in own.values() if not over.is_whole}
    if not numbers:
        return {}
    number_of: dict[nn.Module, tuple[int, int]] = {}
    for name, root in roots.items():
        for unit in units[name]:
            over = _prepared_unit_over(unit, config, own)
            if over in numbers:
                number_of |= dict.fromkeys(own_modules(root.get_submodule(unit.name)), numbers[over])
    return {
        f"{path}.{name}".lstrip("."): number_of[module]
        for path, module in model.named_modules(remove_duplicate=False)
        if module in number_of
        for name in (*module._parameters, *module._buffers, "_extra_state")
    }


def _roots_to_prepare(model: nn.Module, config: FSDPConfig) -> dict[str, nn.Module]:
    """The direct children that have parameters; none where the script has sharded the model by itself."""
    if not config.auto_wrap:
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            return {}
        raise ConfigError(
            "fsdp_config: auto_wrap: expected modules that fully_shard has sharded already beside False, found none"
        )
    direct = [name for name, _ in model.named_parameters(recurse=False)]
    if direct:
        raise ConfigUnsupportedError(
            f"fsdp_config: expected parameters in the children of {type(model).__name__} alone, found {', '.join(direct)} in itself; put "
            "them into a module"
        )
    found = {}
    for name, child in _children_to_prepare(model):
        if next(child.parameters(), None) is None or type(child).__module__.startswith("torchmetrics"):
            continue
        if getattr(child, "_fsdp_wrap", True) is False:
            raise ConfigUnsupportedError(
                f"fsdp_config: {name} has parameters and _fsdp_wrap = False: each rank would train its own copy; put it into a child "
                "that is wrapped, or name it in ignored_modules"
            )
        found[name] = child
    return found


def _children_to_prepare(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The direct children; of lists and dictionaries of modules, which are never called, their members."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict) and type(child).forward is nn.Module.forward:
            yield from _children_to_prepare(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _check_shared(model: nn.Module, roots: Mapping[str, nn.Module]) -> None:
    owner: dict[int, str] = {}
    for name, root in roots.items():
        for inner, parameter in root.named_parameters():
            other = owner.setdefault(id(parameter), name)
            if other != name:
                raise ConfigUnsupportedError(
                    f"fsdp_config: {name}.{inner} is a parameter of {other}, too; put both modules into one child of {type(model).__name__}"
                )


def _check_options(units: Mapping[str, Sequence[Wrapped]], config: FSDPConfig) -> None:
    """Raise ConfigError for options of units that are wrong, and for strategies that need another mesh than the configuration's."""
    for root, wrapped in units.items():
        for unit in wrapped:
            given = {
                name: unit.options[name] for name in ("sharding_strategy", "backward_prefetch") if name in unit.options
            }
            own = FSDPConfig.read(given)
            resharding = unit.options.get("reshard_after_forward", True)
            if not isinstance(resharding, bool):
                raise ConfigTypeError(
                    f"fsdp_wrap_fn({root}.{unit.name}): reshard_after_forward: expected True or False, found {resharding!r}"
                )
            kinds = [
                ("HYBRID" in each.sharding_strategy, each.sharding_strategy == "NO_SHARD") for each in (own, config)
            ]
            if "sharding_strategy" in given and kinds[0] != kinds[1]:
                raise ConfigUnsupportedError(
                    f"fsdp_wrap_fn({root}.{unit.name}): sharding_strategy {own.sharding_strategy} beside {config.sharding_strategy}: a "
                    "unit is over the ranks of the configuration, or of a process_group of its own; only how long it stays whole is free"
                )


def _ignored_parameters(model: nn.Module, config: FSDPConfig) -> frozenset[nn.Parameter]:
    """The parameters of `ignored_modules`."""
    modules = [] if config.ignored_modules is None else list(config.ignored_modules)
    strangers = [type(module).__name__ for module in modules if all(module is not own for own in model.modules())]
    if strangers:
        raise ConfigError(f"fsdp_config: ignored_modules: expected modules of the model, found {', '.join(strangers)}")
    return frozenset(parameter for module in modules for parameter in module.parameters())


def _check_meta(model: nn.Module, config: FSDPConfig) -> bool:
    """Whether some rank has meta tensors. Collective.

    Raises ConfigError on all ranks, unless rank 0 has all values, and the others too where they must.
    """
    tensors = [*model.parameters(), *model.buffers()]
    is_own = not config.auto_wrap  # the script has sharded the model and filled it
    meta = dist.all_gather_object(any(tensor.is_meta for tensor in tensors))
    if meta[0] or (any(meta) and (is_own or not config.sync_module_states)):
        where = ", ".join(str(rank) for rank, is_meta in enumerate(meta) if is_meta)
        elsewhere = " beside auto_wrap False" if is_own else " unless sync_module_states is True"
        raise ConfigError(
            f"fsdp_config: expected parameters with values on rank 0, and elsewhere too{elsewhere}; found meta tensors on ranks {where}"
        )
    return any(meta)


@torch.no_grad()
def _sync_buffers(model: nn.Module, device_type: str) -> None:
    """Moves whole parameters to the device, and gives all ranks rank 0's buffers. Collective. Shards are there already."""
    made: dict[Tensor, Tensor] = {}  # one buffer may have several names
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer not in made:
                is_meta = buffer.is_meta
                made[buffer] = torch.empty_like(buffer, device=device_type) if is_meta else buffer.to(device_type)
            if buffer is not None:
                module._buffers[name] = made[buffer]
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(device_type)
    for each in model.buffers():
        buffer = local(each)
        values = buffer.detach().contiguous()
        dist.broadcast(values, 0)
        buffer.copy_(values)


def _mesh_to_prepare(device_type: str, degrees: tuple[int, int], slices: int, *, is_hybrid: bool) -> DeviceMesh:
    axes = {"replica": degrees[0], "shard": degrees[1]} if is_hybrid else {"shard": degrees[1]}
    axes |= {AXIS: slices} if slices > 1 else {}
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def _keeps_whole(unit: Wrapped, config: FSDPConfig) -> bool:
    if "reshard_after_forward" in unit.options:
        return not unit.options["reshard_after_forward"]
    if "sharding_strategy" in unit.options:
        return FSDPConfig.read({"sharding_strategy": unit.options["sharding_strategy"]}).keeps_whole
    return config.keeps_whole


def _prepared_policy(precision: MixedPrecision) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype)


def _save_less(roots: Iterable[nn.Module], config: FSDPConfig) -> None:
    """Have the chosen modules recompute what backward needs, or keep it in CPU memory; with both, what recomputing begins with."""
    chosen = {root: recomputed(root) for root in roots}
    if not any(chosen.values()):
        warnings.warn(
            "fsdp_config: activation_checkpointing and activation_cpu_offload have no effect: no module is chosen; set "
            "_activation_checkpointing = True on modules, or define activation_checkpointing_fn(module) in a child of the model",
            stacklevel=4,
        )
    for root, names in chosen.items():
        for name in names:
            module = root.get_submodule(name)
            if config.activation_checkpointing:
                module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
            if config.activation_cpu_offload:
                module.forward = functools.partial(_prepared_offloaded, module.forward)


def _prepared_offloaded(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return forward(*args, **options)


def _set_prefetch(root: nn.Module, config: FSDPConfig, wrapped: Sequence[Wrapped]) -> None:
    """Sets which units are gathered ahead of need."""
    units: list[FSDPModule] = [module for module in root.modules() if isinstance(module, FSDPModule)]
    if config.forward_prefetch:
        for index, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + config.forward_prefetch_limit])
    if config.backward_prefetch == "NONE":
        for unit in units:
            unit.set_modules_to_backward_prefetch([unit])
    elif config.backward_prefetch_limit > 1:
        for index, unit in enumerate(units):
            first = max(index - config.backward_prefetch_limit, 0)
            unit.set_modules_to_backward_prefetch(list(reversed(units[first:index])) or [unit])
    for each in wrapped:
        if str(each.options.get("backward_prefetch")).upper() == "NONE":
            alone: Any = root.get_submodule(each.name)
            alone.set_modules_to_backward_prefetch([alone])


def hand_over(optimizer: torch.optim.Optimizer, exchanged: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Let an optimizer continue with the shards: groups, options and state stay."""
    state: dict[Any, dict[str, Any]] = dict(optimizer.state)
    optimizer.state.clear()
    for old, values in state.items():
        new = exchanged.get(old, old)
        optimizer.state[new] = {
            name: _prepared_beside_parameter(new, as_state_of(new, value)) for name, value in values.items()
        }
    for group in optimizer.param_groups:
        group["params"] = [exchanged.get(parameter, parameter) for parameter in group["params"]]


def _prepared_beside_parameter(parameter: nn.Parameter, value: Any) -> Any:
    """An optimizer's state for a parameter, moved to its device; a count of steps may stay anywhere."""
    return value.to(parameter.device) if isinstance(value, Tensor) and value.dim() else value


def _print_prepared(
    prepared: Prepared,
    units: Mapping[str, Sequence[Wrapped]],
    policies: Mapping[tuple[str, str], MixedPrecision],
    degrees: tuple[int, int],
) -> None:
    """Prints how a model was sharded."""
    held = sum(local(parameter).numel() for parameter in prepared.model.parameters())
    total = sum(parameter.numel() for parameter in prepared.model.parameters())
    lines = [f"smpc: fsdp: {degrees[0]} replicas x {degrees[1]} shards; this rank holds {held} of {total} elements"]
    for root, wrapped in units.items():
        for unit in wrapped:
            policy = policies[root, unit.name]
            group = unit.options.get("process_group", prepared.config.process_group) or "all ranks"
            lines.append(
                f"smpc: fsdp: unit {f'{root}.{unit.name}'.rstrip('.')}: {group}, computes in {policy.param_dtype}, "
                f"averages in {policy.reduce_dtype}, buffers {policy.buffer_dtype or 'as they are'}"
            )
    print("\n".join(lines), file=sys.stderr)
