"""The changes of `tsm.init` to torch's full state dicts; part of `fsdp_patch`.

    who makes or takes one                            what is changed
    FSDP1, with parameters on the CPU                 they are copies: torch takes tensors whose memory it then frees
    FSDP1, an optimizer                               whole tensors in place of slices, on every rank that saves any
    torch.distributed.checkpoint.state_dict           the same, of models and optimizers without FSDP and in FSDP2; and all ranks agree
                                                      on the states of optimizers, where FSDP1's group is a part of them

A state dict that only rank 0 has (`broadcast_from_rank0`) is loaded as it is elsewhere: its tensors travel whole, one after the other.

Full state dicts of models that several ranks have slices of have whole tensors, whatever FSDP does with the slices:

    put_together(state)      whole tensors in place of this rank's slices of them
    cut_full_state(state)    the inverse

The state dict of a model that FSDP1 wraps is one of whole tensors by hooks (`give_whole_state`); the other places where torch makes or
takes full state dicts call the functions above.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    StateDictType,
    _state_dict_utils,
    fully_sharded_data_parallel,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from smpc.in_place.model_copy import plain_name
from smpc.mesh import Axis
from smpc.optimizers.torch_patches import Undo, patch_attribute
from smpc.v2.state_handler import Session
from smpc.v2.transforming.transformed_slices import ParameterPart, device_for, map_parts, slices_of


def put_together(state: Any, device: torch.device | None = None, *, keep: bool = True) -> Any:
    """A state dict with whole tensors in place of slices. Collective over the ranks that share the model.

    `device`: of the whole tensors; None: the slices' device. `keep`: False on a rank that drops the whole tensors; they are empty there.
    """

    def whole(path: str, value: Any, part: ParameterPart) -> Any:
        if not part.may_be(value):
            return value
        own = value.full_tensor() if isinstance(value, DTensor) else value
        found = part.whole(own.to(device_for(part.group, own)))
        return found.to(device or own.device) if keep else found.new_empty(0)

    return map_parts(state, whole)


def cut_full_state(state: Any) -> Any:
    """A state dict with this rank's slices in place of whole tensors of which it has slices."""
    return map_parts(state, lambda path, value, part: part.of(value) if is_whole(value, part) else value, is_whole=True)


def is_whole(value: Any, part: ParameterPart) -> bool:
    """Whether a value of a full state dict is the whole tensor that a rank has a part of."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and tuple(value.shape) == part.shape


def give_whole_state(model: FullyShardedDataParallel) -> None:
    """Makes full state dicts of a model that FSDP1 wraps have whole tensors."""
    if slices_of(model) is not None:
        model._register_state_dict_hook(_give_whole)  # type: ignore[no-untyped-call]
        model._register_load_state_dict_pre_hook(_take_slices, with_module=True)  # type: ignore[no-untyped-call]


def _give_whole(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A hook: whole tensors in place of slices in a state dict that FSDP1 has made."""
    slices = slices_of(model)
    if slices is None or not _is_full(model):
        return
    for name, value in state.items():
        part = slices.get(plain_name(name.removeprefix(prefix)))
        if part is not None and isinstance(value, Tensor):
            state[name] = part.whole(value.to(device_for(part.group, value))).to(value.device)


def _take_slices(model: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """A hook: slices in place of whole tensors in a state dict that FSDP1 loads."""
    slices = slices_of(model)
    if slices is None or not _is_full(model):
        return
    for name, value in state.items():
        part = slices.get(plain_name(name.removeprefix(prefix)))
        if part is not None and is_whole(value, part):
            state[name] = part.of(value)


def _is_full(model: nn.Module) -> bool:
    kind = FullyShardedDataParallel.get_state_dict_type(model).state_dict_type
    return bool(kind is StateDictType.FULL_STATE_DICT)


def patch_full_state(session: Session) -> list[Undo]:
    """Patch torch for a session; the functions that take it back."""
    return [*_patch_copies(), *_patch_optimizers(), *_patch_checkpoint(), _patch_group(session)]


def _patch_copies() -> Iterator[Undo]:
    """Full state dicts of parameters on the CPU are copied, with `offload_to_cpu`, too."""

    def copying(original: Callable[..., Any]) -> Callable[..., Any]:
        def hook(module: Any, fsdp_state: Any, *args: Any, **kwargs: Any) -> Any:
            config = fsdp_state._state_dict_config
            if fsdp_state.compute_device.type != "cpu" or not config.offload_to_cpu:
                return original(module, fsdp_state, *args, **kwargs)
            fsdp_state._state_dict_config = dataclasses.replace(config, offload_to_cpu=False)
            try:
                return original(module, fsdp_state, *args, **kwargs)
            finally:
                fsdp_state._state_dict_config = config

        return hook

    for name in ("_full_pre_state_dict_hook", "_full_post_state_dict_hook"):
        yield patch_attribute(_state_dict_utils, name, copying(vars(_state_dict_utils)[name]))


def _patch_optimizers() -> Iterator[Undo]:
    """Full state dicts of optimizers of FSDP1."""
    whole_state = vars(fully_sharded_data_parallel)["_optim_state_dict"]
    load = FullyShardedDataParallel._optim_state_dict_to_load_impl

    def state_of_optimizer(**given: Any) -> Any:
        if all(parameter.is_cpu for parameter in given["model"].parameters()):
            given["cpu_offload"] = False
        if given["shard_state"] or slices_of(given["model"]) is None:
            return whole_state(**given)
        found = whole_state(**{**given, "rank0_only": False})  # of experts every rank has others
        keeps = not given["rank0_only"] or dist.get_rank(given["group"]) == 0
        together = put_together(found, torch.device("cpu") if given["cpu_offload"] else None, keep=keeps)
        return together if keeps else {}

    @functools.wraps(load)
    def state_to_load(optim_state_dict: Any, model: Any, *args: Any, **given: Any) -> Any:
        if slices_of(model) is not None and given.get("full_state_dict", True):
            if given.pop("rank0_only", False) and not _everybody_has(optim_state_dict):
                optim_state_dict = _of_rank0(optim_state_dict)
            optim_state_dict = cut_full_state(optim_state_dict)
        return load(optim_state_dict, model, *args, **given)

    yield patch_attribute(fully_sharded_data_parallel, "_optim_state_dict", state_of_optimizer)
    yield patch_attribute(FullyShardedDataParallel, "_optim_state_dict_to_load_impl", staticmethod(state_to_load))


def _patch_checkpoint() -> Iterator[Undo]:
    """Full state dicts that torch.distributed.checkpoint makes and loads, for models and optimizers."""
    owner = torch_state_dict
    names = ("_maybe_full_or_cpu_state_dict", "_distribute_state_dict", "_broadcast_state_dict")
    make, distribute, broadcast = (vars(owner)[name] for name in names)

    def whole_state(state: Any, info: Any) -> Any:
        is_whole_by_hooks = any(slices_of(unit) is not None for unit in info.fsdp_modules)  # see `give_whole_state`
        if info.full_state_dict and not is_whole_by_hooks:
            device = torch.device("cpu") if info.cpu_offload else None
            keep = not info.cpu_offload or not dist.is_initialized() or dist.get_rank() == 0
            state = put_together(state, device, keep=keep)
        return make(state, info)

    def distribute_slices(full: Any, local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        distribute(_cut_for(full, local), local, *args, **kwargs)

    def broadcast_slices(full: Any, local: dict[str, Any], device: torch.device, *args: Any, **kwargs: Any) -> None:
        sliced = _sliced_state_entries(local)
        own = {name: local.pop(name) for name in sliced}
        broadcast({name: value for name, value in full.items() if name not in own}, local, device, *args, **kwargs)
        for name, value in _of_rank0({name: full[name] for name in own if name in full}).items() if own else ():
            one = {name: own.pop(name)}
            distribute({name: sliced[name].of(value)}, one, device)
            local[name] = one[name].cpu() if kwargs.get("cpu_offload") else one[name]
        if not kwargs.get("strict"):
            local.update(own)

    yield patch_attribute(owner, "_maybe_full_or_cpu_state_dict", whole_state)
    yield patch_attribute(owner, "_distribute_state_dict", distribute_slices)
    yield patch_attribute(owner, "_broadcast_state_dict", broadcast_slices)


def _patch_group(session: Session) -> Undo:
    """torch.distributed.checkpoint has the ranks of FSDP1's group agree, where it takes global rank 0 to be in it; all ranks agree here."""
    owner = torch_state_dict
    find = vars(owner)["_get_fsdp_process_group"]

    def group_of(model: Any, info: Any) -> Any:
        found = find(model, info)
        return None if found is not None and found is session.groups.get(Axis.RDP) else found

    return patch_attribute(owner, "_get_fsdp_process_group", group_of)


def _cut_for(full: Mapping[str, Any], local: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a full state dict for a rank's own one."""
    parts = _sliced_state_entries(local)
    return {
        name: parts[name].of(value) if name in parts and is_whole(value, parts[name]) else value
        for name, value in full.items()
    }


def _sliced_state_entries(local: Mapping[str, Any]) -> dict[str, ParameterPart]:
    """The parts that entries of a flat state dict are of: what is whole, and DTensors of the whole, are left to torch."""
    found: dict[str, ParameterPart] = {}

    def note(path: str, value: Any, part: ParameterPart) -> Any:
        if part.may_be(value) and not part.is_whole(value):
            found[path.removeprefix(".")] = part
        return value

    map_parts({name: value for name, value in local.items() if isinstance(value, Tensor) and value.dim()}, note)
    return found


@dataclass(frozen=True, slots=True)
class _Announced:
    """A tensor that rank 0 is about to send."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def received(self, sent: Iterator[Tensor]) -> Tensor:
        """The tensor on the CPU; rank 0 has the next of those that it sends. Collective over all ranks."""
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        value = next(sent, None)
        held = torch.empty(self.shape, dtype=self.dtype, device=device) if value is None else value.detach().to(device)
        held = held.contiguous()
        dist.broadcast(held, 0)
        return held.cpu()


def _of_rank0(state: Any) -> Any:
    """The state dict of rank 0. Collective over all ranks."""
    told: list[Any] = [tree_map_only(Tensor, lambda value: _Announced(tuple(value.shape), value.dtype), state)]
    dist.broadcast_object_list(told, src=0)
    sent = iter([leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)] if dist.get_rank() == 0 else [])
    return tree_map_only(_Announced, lambda announced: announced.received(sent), told[0])


def _everybody_has(state: Any) -> bool:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, bool(state))
    return all(found)
