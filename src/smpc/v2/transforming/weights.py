"""Parts of weights: the ranks of a tensor- or expert-parallel group agree on the weights, and each keeps its slices.

load_state_dict_from_rank0    sources                    who has weights afterwards
False                         None                       all ranks that had some: the first rank's of each group, in slices
True                          the ranks that have some   the groups whose first rank is a source; others wait for `sync_module_states`

From rank 0 its expert-parallel group gets weights, of which each rank has experts of its own; from each of these its tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smpc.codegen.rewrite.tensor_parallel.layouts import Layout
from smpc.executor.collectives import TensorGroup
from smpc.executor.sharded_state import replacement, slice_parameters

FIRST_RANK: tuple[int, ...] = (0,)  # the source of all weights


def keep_slices(
    model: nn.Module, layouts: Mapping[str, Layout], group: TensorGroup, sources: Sequence[int] | None
) -> None:
    """Replaces parameters by this rank's slices. Collective over the group."""
    agree_on_weights(model, group, sources)
    slice_parameters(model, dict(layouts), group)


def agree_on_weights(model: nn.Module, group: TensorGroup, sources: Sequence[int] | None) -> None:
    """Gives all ranks of the group its first rank's weights; with `sources`, none if that rank is not a source. Collective."""
    assert group.process_group is not None
    if sources is not None and dist.get_global_rank(group.process_group, 0) not in sources:
        _to_meta(model)
        return
    if sources is not None and group.rank:
        _make_room(model)
    _agree(model, group)


@torch.no_grad()
def _agree(model: nn.Module, group: TensorGroup) -> None:
    """Everything is what the group's first rank has; what is on the meta device there has no values to agree on."""
    assert group.process_group is not None
    first = dist.get_global_rank(group.process_group, 0)
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            _broadcast(tensor, first, group.process_group)


def _broadcast(tensor: Tensor, first: int, group: dist.ProcessGroup) -> None:
    if tensor.is_contiguous():
        dist.broadcast(tensor, first, group)
    else:
        packed = tensor.contiguous()
        dist.broadcast(packed, first, group)
        tensor.copy_(packed)


def _to_meta(model: nn.Module) -> None:
    for module in model.modules():
        for _name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                parameter.data = parameter.data.to("meta")


def _make_room(model: nn.Module) -> None:
    """Replaces tensors on the meta device by empty ones; shared tensors stay shared."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    empty = torch.empty_like(tensor, device="cpu")
                    room = replacement(tensor, empty) if isinstance(tensor, nn.Parameter) else empty
                    held[name] = made.setdefault(id(tensor), room)  # type: ignore[assignment]
