"""Full state dicts of models that several ranks have slices of: whole tensors in them, whatever FSDP does with the slices.

    put_together(state)      whole tensors in place of this rank's slices of them
    cut(state)               the inverse

The state dict of a model that FSDP1 wraps is one of whole tensors by hooks (`give_whole_state`); the other places where torch makes or
takes full state dicts call the functions above (`smpc.v2.session.full_state_patch`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor

from smpc.executor.collectives import TensorGroup
from smpc.v2.transforming.slices import Part, map_parts, plain_name, slices_of


def put_together(state: Any, device: torch.device | None = None, *, keep: bool = True) -> Any:
    """A state dict with whole tensors in place of slices. Collective over the ranks that share the model.

    `device`: of the whole tensors; None: the slices' device. `keep`: False on a rank that drops the whole tensors; they are empty there.
    """

    def whole(path: str, value: Any, part: Part) -> Any:
        if not isinstance(value, Tensor) or tuple(value.shape) != part.own_shape:
            return value
        own = value.full_tensor() if isinstance(value, DTensor) else value
        found = part.whole(own.to(_device_of(part.group, own)))
        return found.to(device or own.device) if keep else found.new_empty(0)

    return map_parts(state, whole)


def cut(state: Any) -> Any:
    """A state dict with this rank's slices in place of whole tensors of which it has slices."""
    return map_parts(state, lambda path, value, part: part.of(value) if is_whole(value, part) else value)


def is_whole(value: Any, part: Part) -> bool:
    """Whether a value of a full state dict is the whole tensor that a rank has a part of."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and tuple(value.shape) == part.shape


def give_whole_state(model: FullyShardedDataParallel) -> None:
    """Makes full state dicts of a model that FSDP1 wraps have whole tensors."""
    if slices_of(model) is not None:
        model._register_state_dict_hook(_give)  # type: ignore[no-untyped-call]
        model._register_load_state_dict_pre_hook(_take, with_module=True)  # type: ignore[no-untyped-call]


def _give(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    slices = slices_of(model)
    if slices is None or not _is_full(model):
        return
    for name, value in state.items():
        part = slices.get(plain_name(name.removeprefix(prefix)))
        if part is not None and isinstance(value, Tensor):
            state[name] = part.whole(value.to(_device_of(part.group, value))).to(value.device)


def _take(model: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
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


def _device_of(group: TensorGroup, value: Tensor) -> torch.device:
    assert group.process_group is not None
    if value.is_cpu and dist.get_backend(group.process_group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return value.device
