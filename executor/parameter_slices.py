"""Slices of parameters: what a rank of a tensor-parallel group keeps of them, and how the ranks put them together again.

>>> model = slice_parameters(model, {"up.weight": Layout.sharded(0)}, group)        # doctest: +SKIP
>>> model.up.weight.shape                                                           # doctest: +SKIP
torch.Size([32, 64])                              # of [128, 64], on each of four ranks
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from smpc.codegen.rewrite.tensor_parallel.layouts import Layout, LayoutKind
from smpc.errors import PartitionError, UsageError
from smpc.executor.collectives import TensorGroup, gathered, in_own_order
from smpc.executor.tensor_ops import own_part
from smpc.sharding.dtensors import has_hooks


def slice_parameters(model: nn.Module, layouts: Mapping[str, Layout], group: TensorGroup) -> None:
    """Replaces parameters by this rank's slices, in place and one by one; names of one parameter stay names of one.

    A parameter on the meta device becomes one of the slice's shape. Gradients that the whole parameter had are dropped.
    """
    check_no_hooks(model, layouts)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for aliases in names.values():
        layout = next((layouts[name] for name in aliases if name in layouts), None)
        if layout is None:
            continue
        whole = model.get_parameter(aliases[0])
        part = replacement(whole, slice_of(whole, layout, group).clone())
        for name in aliases:
            owner, _, own = name.rpartition(".")
            model.get_submodule(owner)._parameters[own] = part


def replacement(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A parameter for another one's place, with its attributes: what scripts set on one is set on both."""
    made = nn.Parameter(data, parameter.requires_grad)
    made.__dict__ = parameter.__dict__
    return made


def check_no_hooks(model: nn.Module, layouts: Mapping[str, Layout]) -> None:
    """PartitionError if a parameter that is to be sliced has hooks on its gradient: they would see this rank's part of it."""
    hooked = [name for name, parameter in model.named_parameters() if name in layouts and has_hooks(parameter)]
    if hooked:
        raise PartitionError(
            f"expected no hooks on parameters of which tensor-parallel ranks hold slices, found one on {', '.join(hooked)}: on each rank "
            "it would see a part of the gradient; change the gradient after the step instead, or leave the parameter whole "
            "(tensor_parallel_plan)"
        )


def slice_of(whole: Tensor, layout: Layout, group: TensorGroup) -> Tensor:
    """This rank's part of a tensor, outside autograd."""
    if layout.kind is not LayoutKind.SHARDED:
        return whole.detach()
    return own_part(whole.detach(), layout.dim, group, layout.blocks, layout.mirrored)


def whole_of(part: Tensor, layout: Layout, group: TensorGroup) -> Tensor:
    """The tensor that the ranks' parts make up, outside autograd. All ranks must call it."""
    if layout.kind is not LayoutKind.SHARDED or group.size == 1:
        return part.detach()
    parts = gathered(part.detach(), layout.dim, group)
    return in_own_order(parts, layout.dim, group.size, layout.blocks, layout.mirrored)


def load_whole(
    model: nn.Module, layouts: Mapping[str, Layout], state: Mapping[str, Tensor], group: TensorGroup
) -> None:
    """Copies this rank's part of every parameter and buffer of a whole model's `state_dict` into a sliced model.

    Raises UsageError if names are missing or shapes do not fit, before anything is copied.
    """
    own = dict(model.state_dict(keep_vars=True))
    wrong = [f"{name}: expected it in the state, found nothing" for name in own if name not in state]
    parts = {}
    for name, tensor in own.items():
        if name in state:
            parts[name] = slice_of(state[name], layouts.get(name, Layout(LayoutKind.REPLICATED)), group)
            if parts[name].shape != tensor.shape:
                wrong.append(
                    f"{name}: expected a slice of shape {tuple(tensor.shape)}, found {tuple(parts[name].shape)}"
                )
    if wrong:
        raise UsageError("the state does not fit the sharded model: " + "; ".join(wrong))
    with torch.no_grad():
        for name, part in parts.items():
            own[name].copy_(part)
