"""Models of which the ranks of a group hold parts, outside of a session, and what torch does with their gradients.

    note_split(model, names, group)          the ranks of `group` have other parts of these parameters, and the same of all others

    a script calls                            then
    torch.nn.utils.clip_grad_norm_            the norm of all ranks' parts, each whole parameter counted once
    torch.nn.utils.get_total_norm             refused
    torch.amp.GradScaler                      an overflow of one rank counts for all
    FullyShardedDataParallel                  refused
    DistributedDataParallel, fully_shard      refused over ranks that have other parts: these would give all of them the first one's, or
                                              put parts of different ranks together
    the first step of an optimizer            refused if an element's update depends on others of the parameter

By themselves these see this rank's part and no more, so that ranks would take other steps, without a word. torch is changed when the first
model is noted, and stays so: models that are not noted are left to it.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.nn.parallel import DistributedDataParallel

from smpc.errors import UsageError
from smpc.optimizers.gradients import clip_by
from smpc.optimizers.norm_groups import NormGroups, sum_norms
from smpc.optimizers.torch_patches import (
    Tensors,
    check_optimizers,
    clip_grad_norm_by,
    listed,
    replace_clipping,
    replace_method,
    replace_unscaling,
)

# The module that has the parameter, its name there, and the group of those that have the other parts.
_Part = tuple[weakref.ref[nn.Module], str, dist.ProcessGroup]
_split: weakref.WeakKeyDictionary[nn.Module, list[_Part]] = weakref.WeakKeyDictionary()


def note_split(model: nn.Module, names: Collection[str], group: dist.ProcessGroup) -> None:
    """The ranks of `group` hold parts of the model's parameters of these names. A model may be split over several groups."""
    _patch_torch()
    parts = _split.setdefault(model, [])
    for name in names:
        path, _, own = name.rpartition(".")
        parts.append((weakref.ref(model.get_submodule(path)), own, group))


def groups_of(tensors: Sequence[Tensor]) -> dict[int, tuple[dist.ProcessGroup, ...]]:
    """By id of the parameters among `tensors` that are parts: the groups that have the other parts.

    No gradient is looked at: of another model, another thread's backward may be writing it.
    """
    given = {id(tensor) for tensor in tensors}
    parts = (part for model in list(_split) for part in _parts_in(model))
    return {id(parameter): groups for parameter, groups in parts if id(parameter) in given}


def _parts_in(model: nn.Module) -> list[tuple[nn.Parameter, tuple[dist.ProcessGroup, ...]]]:
    """The parts that it has now: parameters may have been replaced, and modules wrapped."""
    found: dict[int, tuple[nn.Parameter, tuple[dist.ProcessGroup, ...]]] = {}
    for owner, name, group in _split[model]:
        module = owner()
        parameter = None if module is None else module._parameters.get(name)
        if parameter is not None:
            _, before = found.get(id(parameter), (None, ()))
            found[id(parameter)] = parameter, (*before, *(each for each in (group,) if each not in before))
    return list(found.values())


def _groups_to_ask(given: Sequence[Tensor]) -> list[tuple[dist.ProcessGroup, ...]]:
    """The groups of all parts of the models that the tensors belong to: a rank without gradients may have been given none of its own."""
    ids, found = {id(tensor) for tensor in given}, list[tuple[dist.ProcessGroup, ...]]()
    for model in list(_split):
        if any(id(parameter) in ids for parameter in model.parameters()):
            found += [groups for _, groups in _parts_in(model)]
    return list(dict.fromkeys(found))


def _gradient_of_part_in(tensors: Sequence[Tensor]) -> bool:
    given = {id(tensor) for tensor in tensors}
    return any(id(parameter.grad) in given for model in list(_split) for parameter, _ in _parts_in(model))


def _all_groups(tensors: Sequence[Tensor]) -> list[dist.ProcessGroup]:
    return list(dict.fromkeys(group for groups in groups_of(tensors).values() for group in groups))


@functools.cache
def _patch_torch() -> None:
    replace_clipping({"clip_grad_norm_": clip_grad_norm_by(_clip), "_get_total_norm": _get_total_norm})
    replace_method(DistributedDataParallel, "__init__", _replicated)
    replace_method(_fully_shard, "_init_param_group", _sharded)
    replace_method(FullyShardedDataParallel, "__init__", _flattened)
    replace_unscaling(_all_groups)
    check_optimizers(
        lambda held: "parts of a model that was given to shard" if groups_of(held) else "", "leave them whole"
    )


@dataclass(frozen=True, slots=True)
class _Parts(NormGroups):
    """Norms of which each group sums one number: of listed experts, ranks may have gradients of other numbers.

    `split`: see `groups_of`. `asked`: groups that are asked in any case, as other ranks ask them.
    """

    split: Mapping[int, tuple[dist.ProcessGroup, ...]] = field(default_factory=dict)
    asked: Sequence[tuple[dist.ProcessGroup, ...]] = ()

    def groups_of(self, parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
        """See NormGroups."""
        found = NormGroups.groups_of(self, parameter)
        return (*found, *(group for group in self.split.get(id(parameter), ()) if group not in found))

    def total_norm(self, norms: Tensor, parameters: Sequence[Tensor], order: float = 2.0) -> Tensor:
        """See NormGroups."""
        own = [self.groups_of(parameter) for parameter in parameters]
        totals = []
        for groups in dict.fromkeys((*self.asked, *own)):
            places = [place for place, found in enumerate(own) if found == groups]
            total = torch.linalg.vector_norm(norms[places], order) if places else norms.new_zeros(())
            for group in groups:
                total = sum_norms(total, order, group)
            totals.append(total)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(totals), order)
        return norm


def _clip(given: list[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor | None:
    asked = _groups_to_ask(given)
    if not asked:
        return None
    return clip_by(given, max_norm, norm_type, error_if_nonfinite, _Parts(split=groups_of(given), asked=asked), None)


def _get_total_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_total_norm(tensors: Tensors, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(tensors, *args, **kwargs)
        tensors, given = listed(tensors)
        if groups_of(given) or _gradient_of_part_in(given):
            raise UsageError(
                "get_total_norm: expected tensors that this rank has whole, found parts of a model whose other parts other ranks have; "
                "torch.nn.utils.clip_grad_norm_(parameters, float('inf')), on every rank, returns the norm of all gradients and changes "
                "none"
            )
        return original(tensors, *args, **kwargs)

    return get_total_norm


def _replicated(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original).bind(self, module, *args, **kwargs).arguments
        mesh = given.get("device_mesh")
        group = given.get("process_group") or (mesh.get_group() if mesh is not None else None)
        ignored = vars(module).get("_ddp_params_and_buffers_to_ignore", ())  # as torch looks for it
        replicated = [parameter for name, parameter in module.named_parameters() if name not in ignored]
        _check_ranks("DistributedDataParallel", replicated, dist.get_process_group_ranks(group))
        original(self, module, *args, **kwargs)

    return init


def _sharded(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_param_group(state: Any, parameters: Any, modules: Any, mesh_info: Any, *args: Any, **kwargs: Any) -> Any:
        _check_ranks("fully_shard", parameters, mesh_info.mesh.mesh.flatten().tolist())
        return original(state, parameters, modules, mesh_info, *args, **kwargs)

    return init_param_group


def _flattened(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original).bind(self, module, *args, **kwargs).arguments
        ignored = [*(given.get("ignored_modules") or ()), *(given.get("ignored_states") or ())]
        spared = {
            id(one) for each in ignored for one in (each.parameters() if isinstance(each, nn.Module) else (each,))
        }
        if groups_of([parameter for parameter in module.parameters() if id(parameter) not in spared]):
            raise UsageError(
                "FullyShardedDataParallel: expected parameters that this rank has whole, found parts of a model that was given to shard; "
                "use fully_shard(module, mesh=...) over the ranks that have the same parts, or ignored_states"
            )
        original(self, module, *args, **kwargs)

    return init


def _check_ranks(what: str, parameters: Sequence[Tensor], ranks: Sequence[int]) -> None:
    """UsageError if ranks among which parameters are to be equal, or divided, have other parts of one than this rank."""
    for group in _all_groups(parameters):
        others = (set(ranks) & set(dist.get_process_group_ranks(group))) - {dist.get_rank()}
        if others:
            raise UsageError(
                f"{what}: expected ranks that have the same parts of parameters, found {sorted(ranks)}, of which {sorted(others)} have "
                f"other parts than rank {dist.get_rank()}; give it a group or mesh of ranks that have the same parts: one of each group "
                "that was given to shard"
            )
