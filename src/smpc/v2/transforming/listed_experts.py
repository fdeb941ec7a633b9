"""Experts of a transformed model that are modules of their own: what wrappers may do with them, and which of them have gradients.

Each rank has all rows of some and none of the others (`smpc.experts.listed`). What holds them is one unit of FSDP, over the ranks that
have the same ones. There all of a rank's experts are called, so that these average the same gradients. In one process an expert has one
only if a backward reaches what it has returned. So an update first takes the others' away, and gives those whose rows another rank has
one without rows: optimizers have the same states everywhere.

    optimizer.step        looks at what backwards have reached on all ranks, since
    zero_grad             where it leaves this rank's experts without gradients

FSDP1 is refused: torch's states of its optimizers have none of a parameter without rows, and flat parameters have one gradient for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from smpc.errors import ConfigUnsupportedError, UsageError
from smpc.executor.collectives import TensorGroup, sum_over
from smpc.experts.listed import ListedBlock, holds_parts
from smpc.in_place.model_copy import plain_name
from smpc.mesh import Axis
from smpc.optimizers.norm_groups import local_part
from smpc.optimizers.torch_patches import Undo, held_by, replace_method
from smpc.v2.state_handler import Session
from smpc.v2.transforming.transformed_slices import device_for, transformed_models

_DIVIDED = "_smpc_listed_experts"  # of a transformed model


class _Divided(list[ListedBlock]):
    """The blocks whose experts ranks divide."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Divided:
        return self


def note_divided(model: nn.Module, blocks: Sequence[ListedBlock]) -> None:
    """Ranks divide the experts of these blocks of a model."""
    vars(model)[_DIVIDED] = _Divided(blocks)


def check_unit(who: str, module: nn.Module) -> None:
    """UsageError for a unit of FSDP inside of what ranks divide: other ranks would not come to it."""
    for block in _blocks():
        if any(module is each for member in block.members for each in member.modules()):
            raise UsageError(
                f"{who}: expected no module inside of {block.name}, whose experts ranks divide, found {type(module).__name__}; leave it "
                "out: what holds the experts becomes a unit of its own"
            )


def check_flat(module: nn.Module) -> None:
    """ConfigUnsupportedError for experts that FSDP1 is to be around."""
    found = next((name or type(each).__name__ for name, each in module.named_modules() if holds_parts(each)), None)
    if found is not None:
        raise ConfigUnsupportedError(
            f"FullyShardedDataParallel: expected experts in one module, with parameters of [experts, ...], found modules of their own in "
            f"{plain_name(found)}, of which each rank has others; use fully_shard, or leave expert_parallel_degree out"
        )


def follow_gradients(session: Session) -> list[Undo]:
    """Have updates see the gradients of one process; the functions that take it back."""
    same = TensorGroup.of(session.groups[Axis.EXPERT_DATA])

    def before_update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        held = {id(parameter) for parameter in held_by(optimizer)}
        for block in _blocks():
            if any(id(parameter) in held for _, _, parameter in _trained(block)):
                _settle(block, same)

    return [
        register_optimizer_step_pre_hook(before_update).remove,
        replace_method(Optimizer, "zero_grad", _forgetting),
        replace_method(nn.Module, "zero_grad", _forgetting),
    ]


def _blocks() -> Iterator[ListedBlock]:
    for model in transformed_models():
        yield from vars(model).get(_DIVIDED, ())


_Trained = tuple[int, str, nn.Parameter]  # the number of the expert, and a name in it


def _trained(block: ListedBlock) -> Iterator[_Trained]:
    """In the same order on all ranks."""
    for expert, member in enumerate(block.members):
        for name, parameter in member.named_parameters():
            if parameter.requires_grad:
                yield expert, name, parameter


def _settle(block: ListedBlock, same: TensorGroup) -> None:
    """Leaves gradients to the experts that a backward has reached on some rank. Collective over all ranks that have some of the experts."""
    trained = list(_trained(block))
    reached = torch.zeros(len(block.members), dtype=torch.int32)
    reached[sorted({*block.wanted, *_with_values(trained, block.wanted)})] = 1
    device = device_for(block.group, trained[0][2])
    counts = sum_over(sum_over(reached.to(device), block.group), same).tolist()
    if not any(counts):
        return  # no backward: these gradients are the script's own
    names = block.parameters_in_results()
    for expert, name, parameter in trained:
        if not counts[expert]:
            parameter.grad = None
        elif parameter.grad is None and plain_name(name) in names:
            parameter.grad = torch.zeros_like(parameter)


def _with_values(trained: Sequence[_Trained], but: set[int]) -> set[int]:
    """The other experts with gradients that are not zero: a penalty on weights, say, which no result depends on."""
    return {
        expert
        for expert, _, parameter in trained
        if expert not in but and parameter.grad is not None and bool(local_part(parameter.grad).any())
    }


def _forgetting(original: Callable[..., None]) -> Callable[..., None]:
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for block in _blocks():
            own = (parameter for expert in block.mine for parameter in block.members[expert].parameters())
            if block.wanted and all(parameter.grad is None for parameter in own):
                block.wanted.clear()

    return zero_grad
