"""The changes of `tsm.init` to torch, in place, so that scripts may import FSDP earlier; `tsm.state.reset()` undoes them.

    FullyShardedDataParallel(...)      takes `post_param_init_fn`; without a process group of its own it shards over the shard degree
    fully_shard(module)                without a mesh it shards over the shard degree
    offload_wrapper(module)            with sm_activation_offloading: activations come back before they are needed
    clipping, loss scales              count all ranks' parts (`gradient_patch`)
    full state dicts                   have whole tensors (`full_state_patch`)

In native mode (see `tsm.state`) only `post_param_init_fn` and offloading are added.

    degree                   FSDP1's sharding_strategy                              process groups
    2 or more                none, FULL_SHARD: HYBRID_SHARD                         (shards, replicas) of this tensor-parallel rank
                             SHARD_GRAD_OP, _HYBRID_SHARD_ZERO2: the latter         the same
    1, tensor parallel       NO_SHARD                                               all ranks of this tensor-parallel rank
    experts                  FULL_SHARD; NO_SHARD if nobody else has them           all ranks that have the same experts

`post_param_init_fn` is called whenever `param_init_fn` has filled a module, before FSDP makes flat parameters of them, so that weights can
be tied again.

Everything that depends on the release of torch is in this file and in those named `*_patch`. Made for torch 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard import _fully_shard

from smpc.errors import UsageError
from smpc.executor.layer_offload import LayerOffload
from smpc.experts.listed import holds_parts
from smpc.experts.stacked import PartOfExperts
from smpc.in_place.model_copy import plain_name
from smpc.mesh import Axis
from smpc.mesh.device_mesh import device_mesh
from smpc.optimizers.torch_patches import patch_attribute, replace_method
from smpc.sharding.dtensors import has_hooks
from smpc.v2.session.checkpoint_patch import patch_distributed_checkpoints
from smpc.v2.session.evaluations import let_go_after_evaluations
from smpc.v2.session.flat_units import FlatUnits
from smpc.v2.session.full_state_patch import give_whole_state, patch_full_state
from smpc.v2.session.gradient_patch import note_unit, patch_gradients
from smpc.v2.session.ranks_in_step import ScriptUnits
from smpc.v2.state_handler import Session, state
from smpc.v2.transforming.listed_experts import check_flat, check_unit, follow_gradients
from smpc.v2.transforming.transformed_slices import is_sliced, make_distributed, notice_writes

_OF_OTHERS = ("auto_wrap_policy", "ignored_modules", "ignored_states")
_HYBRID = {
    None: ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.FULL_SHARD: ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.HYBRID_SHARD: ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.SHARD_GRAD_OP: ShardingStrategy._HYBRID_SHARD_ZERO2,
    ShardingStrategy._HYBRID_SHARD_ZERO2: ShardingStrategy._HYBRID_SHARD_ZERO2,
}


def patch(session: Session) -> Callable[[], None]:
    """Patch torch for a session; the function that takes it back."""
    units = FlatUnits()
    undo: list[Callable[[], None]] = [
        _patch_fsdp1(session, units),
        _patch_offloading(session),
        *patch_full_state(session),
    ]
    undo += patch_gradients(session)
    if session.config.is_native:
        undo += let_go_after_evaluations()
    else:
        undo += [*units.patch(), *_patch_fsdp2(session), *patch_distributed_checkpoints(session)]
        undo += follow_gradients(session) if session.mesh.size(Axis.EP) > 1 else []

    def take_back() -> None:
        for each in reversed(undo):
            each()

    return take_back


def default_mesh(session: Session) -> DeviceMesh:
    """The mesh of (replica, shard), or (shard) if there is one replica, that a session's parameters are sharded over."""
    axes = _sharding_axes(session)
    return _whole_mesh(session)[tuple(map(str, axes))] if session.mesh.tp_size > 1 else _whole_mesh(session)


def _sharding_axes(session: Session) -> tuple[Axis, ...]:
    return (Axis.REPLICA, Axis.FSDP) if session.mesh.size(Axis.REPLICA) > 1 else (Axis.FSDP,)


def _whole_mesh(session: Session) -> DeviceMesh:
    """The mesh of all parameters of a session, made once: with tensor parallelism its ranks are the last dimension."""
    if session.meshes:
        return session.meshes[0]
    axes = _sharding_axes(session) + ((Axis.TP,) if session.mesh.tp_size > 1 else ())
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    session.meshes.append(device_mesh(session.mesh, session.rank, kind, axes, fsdp_groups(session)))
    return session.meshes[0]


def _patch_fsdp2(session: Session) -> list[Callable[[], None]]:
    """Without a mesh of the script's own, `fully_shard` takes the session's; slices of weights become DTensors first."""
    find, taken = (vars(_fully_shard)[name] for name in ("_get_mesh_info", "_get_modules_and_states"))
    meshes: list[Any] = []
    is_alone = session.mesh.size(Axis.EP) == 1 and session.mesh.cp_size == 1
    units = ScriptUnits(functools.partial(default_mesh, session), is_alone=is_alone)

    def mesh_info(mesh: Any, *args: Any, **kwargs: Any) -> Any:
        meshes[:] = [mesh]
        return find(mesh, *args, **kwargs)

    def modules_and_states(module: Any, *args: Any, **kwargs: Any) -> Any:
        first = module if isinstance(module, nn.Module) else module[0]
        units.note(first)
        for each in (first,) if isinstance(module, nn.Module) else module:
            check_unit("fully_shard", each)
        _check_hooks("fully_shard", first, kwargs.get("ignored_params") or next(iter(args[1:]), None) or ())
        if session.mesh.tp_size > 1 and is_sliced(first) and not _has_experts(first):  # on a mesh of its own
            if meshes[0] != default_mesh(session):
                raise UsageError(
                    "fully_shard: expected no mesh for a model of which tensor-parallel ranks have slices, found one; leave it out: it is "
                    f"{default_mesh(session)}"
                )
            make_distributed(first, _whole_mesh(session)[str(Axis.TP)])
        return taken(module, *args, **kwargs)

    def init_param_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        notice_writes()
        return found

    experts = _patch_fsdp2_experts(session) if session.mesh.size(Axis.EP) > 1 else []
    return [
        *experts,
        replace_method(
            _fully_shard, "_init_param_group", lambda original: functools.partial(init_param_group, original)
        ),
        units.patch(),
        patch_attribute(_fully_shard, "_init_default_mesh", lambda *args, **kwargs: default_mesh(session)),
        patch_attribute(_fully_shard, "_get_mesh_info", mesh_info),
        patch_attribute(_fully_shard, "_get_modules_and_states", modules_and_states),
    ]


def _check_hooks(who: str, module: nn.Module, ignored: Iterable[Any]) -> None:
    """UsageError for hooks of scripts on parameters that are about to be sharded: torch puts others in their place, without the hooks."""
    spared = {id(one) for each in ignored for one in (each.parameters() if isinstance(each, nn.Module) else (each,))}
    held = module.named_parameters()
    hooked = [name for name, parameter in held if id(parameter) not in spared and has_hooks(parameter)]
    if hooked:
        raise UsageError(
            f"{who}: expected parameters without hooks on their gradients, found some on {', '.join(hooked[:5])}, which shards would not "
            "call; change gradients between backward and step instead"
        )


def _patch_fsdp2_experts(session: Session) -> list[Callable[[], None]]:
    """Experts become units of their own, over the ranks that have the same ones."""
    find = vars(_fully_shard)["_get_mesh_info"]
    axes = (Axis.REPLICA, Axis.EXPERT_FSDP) if session.mesh.size(Axis.REPLICA) > 1 else (Axis.EXPERT_FSDP,)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = device_mesh(session.mesh, session.rank, kind, axes, session.groups)

    def init_param_group(
        original: Callable[..., Any],
        fsdp_state: Any,
        params: Any,
        modules: Any,
        mesh_info: Any,
        after_forward: Any,
        device: Any,
        *rest: Any,
        **more: Any,
    ) -> Any:
        if any(map(_has_experts, modules)):
            mesh_info = find(mesh, None)
            after_forward = None if after_forward is None else mesh_info
        inside = [each for module in modules for _, _, each in experts_inside(module)]
        held = {id(parameter) for each in inside for parameter in each.parameters()}
        own = [parameter for parameter in params if id(parameter) not in held]
        for each in inside:
            _, precision, offload = rest[:3]
            fully_shard(each, mesh=mesh, mp_policy=precision, offload_policy=offload)
        return original(fsdp_state, own, modules, mesh_info, after_forward, device, *rest, **more)

    return [
        replace_method(
            _fully_shard, "_init_param_group", lambda original: functools.partial(init_param_group, original)
        )
    ]


def fsdp_groups(session: Session) -> dict[Axis, dist.ProcessGroup]:
    """The groups of replicas and shards; a session without sharding has none but of all that hold the same slices."""
    groups = dict(session.groups)
    if Axis.FSDP not in groups:  # every rank is a replica
        groups[Axis.REPLICA] = groups[Axis.RDP]
        groups[Axis.FSDP] = _alone(session)
    return groups


def _alone(session: Session) -> dist.ProcessGroup:
    made: dist.ProcessGroup = dist.new_group([session.rank], use_local_synchronization=True)
    return made


def _patch_fsdp1(session: Session, units: FlatUnits) -> Callable[[], None]:
    original = FullyShardedDataParallel.__init__

    @functools.wraps(original)
    def init(
        self: Any, module: nn.Module, *args: Any, post_param_init_fn: Callable[..., object] | None = None, **kwargs: Any
    ) -> None:
        places, before = _places_of_parameters(module), dict(module.named_parameters())
        _check_flattened(before, units)
        check_flat(module)
        left = (*(kwargs.get("ignored_modules") or ()), *(kwargs.get("ignored_states") or ()))
        _check_hooks("FullyShardedDataParallel", module, left)
        names = ("process_group", "sharding_strategy", "cpu_offload", "auto_wrap_policy", "backward_prefetch")
        given = {**dict(zip(names, args[:5], strict=False)), **kwargs}
        rest = args[5:]
        if not session.config.is_native and given.get("process_group") is None and given.get("device_mesh") is None:
            given |= _arranged(session, given.get("sharding_strategy"))
        if post_param_init_fn is not None and given.get("param_init_fn") is not None:
            given["param_init_fn"] = _fill_then_post(given["param_init_fn"], post_param_init_fn)
        if rest:
            raise TypeError("FullyShardedDataParallel: pass mixed_precision and what follows it by name")
        if _has_experts(module):
            given |= _experts_arranged(session)
        experts = experts_inside(module)
        fill = given.get("param_init_fn")
        fill = fill.fill if isinstance(fill, _Sparing) else fill
        if experts:
            _ignore_modules(given, [each for _, _, each in experts])
        if fill is not None:
            given["param_init_fn"] = _Sparing(fill, experts) if experts else fill
        original(self, module, **given)
        for owner, name, each in experts:
            if owner._modules[name] is each:  # otherwise a unit inside has done it
                more = {key: value for key, value in given.items() if key not in _OF_OTHERS}
                more |= {} if fill is None else {"param_init_fn": fill}
                setattr(owner, name, FullyShardedDataParallel(each, **more))
        _check_shared(self, places)
        give_whole_state(self)
        note_unit(self)
        units.note(self, before)

    undo = patch_attribute(FullyShardedDataParallel, "__init__", init)
    undo_summoning = _patch_summoning()
    reduce: Any = _refuse_copies
    FullyShardedDataParallel.__reduce_ex__ = reduce  # type: ignore[method-assign]

    def take_back() -> None:
        del FullyShardedDataParallel.__reduce_ex__
        undo_summoning()
        undo()

    return take_back


def _refuse_copies(unit: nn.Module, protocol: object) -> NoReturn:
    """In the place of torch's errors from deep inside."""
    raise UsageError(
        f"{type(unit).__name__} of {type(unit.module).__name__}: expected not to be copied or pickled, as its flat parameters belong to "
        "the ranks that share them; copy its state_dict; for an average of weights make a second model, wrap it alike, and update "
        "its parameters from those of the first"
    )


def _patch_summoning() -> Callable[[], None]:
    """What scripts write into whole slices is noticed."""
    original = FullyShardedDataParallel.summon_full_params

    @functools.wraps(original)
    @contextlib.contextmanager
    def summon_full_params(*args: Any, **kwargs: Any) -> Iterator[None]:
        with original(*args, **kwargs):
            notice_writes()
            yield

    return patch_attribute(FullyShardedDataParallel, "summon_full_params", staticmethod(summon_full_params))


_Places = dict[nn.Parameter, list[tuple[str, nn.Module, str]]]  # the name of a module, the module, and the name there


def _places_of_parameters(module: nn.Module) -> _Places:
    """Where each parameter is that several modules have."""
    found: _Places = {}
    for path, inner in module.named_modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, []).append((path, inner, name))
    return {parameter: places for parameter, places in found.items() if len(places) > 1}


def _check_shared(root: FullyShardedDataParallel, places: _Places) -> None:
    """UsageError for a parameter whose places are in several units, each of which would have one of its own, or the part of another's."""
    units: dict[tuple[int, str], Any] = {}
    for unit in FullyShardedDataParallel.fsdp_modules(root):
        flat = None if unit._handle is None else unit._handle.flat_param
        held: list[Any] = [] if flat is None else [*flat._param_infos, *flat._shared_param_infos]
        units |= {(id(each.module), each.param_name): unit for each in held}
    for each in places.values():
        if len({id(units.get((id(inner), name))) for _, inner, name in each}) > 1:
            raise _in_several_units([plain_name(f"{path}.{name}") for path, _, name in each])


def _check_flattened(named: Mapping[str, nn.Parameter], units: FlatUnits) -> None:
    """UsageError for a parameter that a unit further inside has made part of a flat one: here it would be another one."""
    for name, parameter in named.items():
        other = units.flattened(parameter)
        if other:
            raise _in_several_units([plain_name(name), plain_name(other)])


def _in_several_units(names: list[str]) -> UsageError:
    return UsageError(
        f"FullyShardedDataParallel: expected all uses of a parameter in one unit, found {' and '.join(names)}, which are one "
        "parameter, in several; make a unit of what holds them all, or of none of them (auto_wrap_policy), or use fully_shard with "
        "the modules in one list"
    )


class _Sparing:
    """A `param_init_fn` that leaves experts alone: FSDP1 ignores parameters by what they are, and filled ones are others."""

    def __init__(self, fill: Callable[[nn.Module], object], experts: list[tuple[nn.Module, str, nn.Module]]) -> None:
        self.fill = fill
        self._spared = {id(module) for _, _, each in experts for module in each.modules()}

    def __call__(self, module: nn.Module) -> None:
        """Fill a module, unless it is among the experts, whose own units do."""
        if id(module) not in self._spared:
            self.fill(module)


def _arranged(session: Session, strategy: ShardingStrategy | None) -> dict[str, Any]:
    """Process groups and strategy of FSDP1 for the degrees of a session."""
    if session.mesh.fsdp_size == 1:
        return {"process_group": session.groups[Axis.RDP], "sharding_strategy": ShardingStrategy.NO_SHARD}
    if strategy is ShardingStrategy.NO_SHARD:
        degree = session.mesh.fsdp_size
        warnings.warn(
            f"sharding_strategy: NO_SHARD has no effect, as the shard degree is {degree}; set hybrid_shard_degree: 1",
            stacklevel=4,
        )
    chosen = _HYBRID.get(strategy, ShardingStrategy.HYBRID_SHARD)
    return {"process_group": (session.groups[Axis.FSDP], session.groups[Axis.REPLICA]), "sharding_strategy": chosen}


def _experts_arranged(session: Session) -> dict[str, Any]:
    """The same for experts, which all ranks divide that have the same ones."""
    one = session.mesh.size(Axis.EXPERT_DATA) == 1
    strategy = ShardingStrategy.NO_SHARD if one else ShardingStrategy.FULL_SHARD
    return {"process_group": session.groups[Axis.EXPERT_DATA], "device_mesh": None, "sharding_strategy": strategy}


def _ignore_modules(given: dict[str, Any], modules: list[nn.Module]) -> None:
    """Have FSDP1 leave modules alone, in the form that the script has said of others."""
    states = list(given.get("ignored_states") or ())
    if given.get("ignored_modules"):
        given["ignored_modules"] = [*given["ignored_modules"], *modules]
    elif states and isinstance(states[0], nn.Module):
        given["ignored_states"] = [*states, *modules]
    else:
        known = {id(state) for state in states}
        more = [parameter for module in modules for parameter in module.parameters() if id(parameter) not in known]
        given["ignored_states"] = [*states, *more]


def experts_inside(module: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """(owner, name there, module) of this rank's experts in a module, which no FSDP is around yet."""
    return [
        (owner, name, child)
        for owner in module.modules()
        if not isinstance(owner, FullyShardedDataParallel)
        for name, child in owner.named_children()
        if _has_experts(child) and not isinstance(child, FSDPModule)
    ]


def _has_experts(module: nn.Module) -> bool:
    """Whether a module is what holds this rank's experts."""
    return isinstance(module, PartOfExperts) or holds_parts(module)


def _fill_then_post(fill: Callable[[nn.Module], object], post: Callable[..., object]) -> Callable[[nn.Module], None]:
    """The function that fills a module and then calls `post` with it."""

    def both(module: nn.Module) -> None:
        fill(module)
        post(module)

    return both


def _patch_offloading(session: Session) -> Callable[[], None]:
    """Wrapped modules keep their activations as `LayerOffload` does."""
    original = checkpoint_wrapper.OffloadWrapper.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not state.sm_activation_offloading:  # which scripts may assign
            return original(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        with LayerOffload(session.config.activation_loading_horizon):
            return self._checkpoint_wrapped_module(*args, **kwargs)

    return patch_attribute(checkpoint_wrapper.OffloadWrapper, "forward", forward)
