"""Expert parallelism for any model, found by the compiler: find its experts, keep this rank's share, and send tokens to the experts of
other ranks.

    group = TensorGroup.of(process_group)
    module = shard(model, group)                     # finds experts by structure; the model's own router stays
    loss = module(input_ids=ids, labels=labels).loss # ids: this rank's
    loss.backward()
    module.average_gradients()                       # or DistributedDataParallel or fully_shard, for what is not an expert
    print(module)                                    # which experts were found, and what was left whole

Every rank passes its own inputs, as in data parallelism; ranks may also pass the same ones. All ranks must call the model, and run
backward, the same number of times.

The scale of gradients. The loss of the group is the mean of the ranks' losses. On each rank, a parameter outside the experts gets the
gradient of that rank's loss, which is to be averaged over the group. An expert gets the sum of the gradients of all ranks' losses, since
it serves the tokens of all. With `gradients="mean"` the backward pass divides it by the size of the group. It is then final: it must not
be averaged over this group again, only over other groups that hold the same experts. With "sum" it is not divided: for wrappers that
later divide by the number of all ranks, as FSDP's `set_gradient_divide_factor` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from smpc.codegen.rewrite.expert_parallel import PARTS
from smpc.errors import ConfigError, ConfigUnsupportedError
from smpc.executor.collectives import TensorGroup, sum_over
from smpc.executor.replicas.divided_modules import ExpertsApart
from smpc.experts.confirm_cut import Confirmations, Confirmed
from smpc.experts.dispatch import WAYS, owned
from smpc.experts.find_experts import (
    Found,
    Listed,
    Stacked,
    find_experts,
    register_experts,
    shared_and_trained,
    uses_of_parameters,
)
from smpc.experts.listed import ListedBlock, rows_of_rank, spread_out, unsuited_as_rows
from smpc.experts.stacked import Options, cut, look_at
from smpc.experts.whole_state import ExpertHoldings
from smpc.in_place.model_copy import plain_name
from smpc.nn.init.note_slices import note_rows
from smpc.nn.script_writes.between_steps import plain_parameters
from smpc.nn.script_writes.compare_writes import compare_scripts
from smpc.nn.script_writes.slice_parameters import note_slices
from smpc.optimizers.split_parameters import note_split
from smpc.sharding.whole_parameters import average_gradients

_ROUTERS = ("none", "balanced")
_GRADIENTS = ("mean", "sum")
__all__ = ["ExpertParallelModule", "register_experts", "shard"]


class ExpertParallelModule(nn.Module):
    """One rank's part of a model: some of its experts, and everything else. It is called like the model.

    `experts`: by the name of a module or container of experts, how many there are in all. `left_whole`: by name, why experts were not cut.
    """

    def __init__(
        self,
        model: nn.Module,
        group: TensorGroup,
        holdings: ExpertHoldings,
        experts: Mapping[str, int],
        left_whole: Mapping[str, str],
        blocks: Sequence[ListedBlock] = (),
    ) -> None:
        super().__init__()
        self.training = model.training
        self.group, self.experts, self.left_whole = group, dict(experts), dict(left_whole)
        self._holdings, self.blocks = holdings, tuple(blocks)
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the whole model returns for this rank's inputs."""
        compare_scripts(self.model)
        with plain_parameters(self.model):
            return self.model(*args, **kwargs)

    def extra_repr(self) -> str:
        """The experts that are divided, and the modules that were left whole."""
        found = [f"{name}: {count} experts on {self.group.size} ranks" for name, count in self.experts.items()]
        return "\n".join(found + [f"{name}: whole, {reason}" for name, reason in self.left_whole.items()])

    def expert_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's expert parameters, by their names in the model. Other ranks have other values under these names."""
        own = self._holdings.own()
        return ((name, each) for name, each in self.model.named_parameters() if plain_name(name) in own)

    def apart(self, mesh: DeviceMesh, group: dist.ProcessGroup) -> ExpertsApart:
        """This rank's experts for `StageShards(stages, replicas, ..., apart=...)`: sharded over the ranks that hold the same experts.

        `mesh` has these ranks, as (shard) or (replica, shard), and `group` all of them. ConfigUnsupportedError for experts that are modules
        of their own.
        """
        modules = tuple(module for module in self.model.modules() if PARTS in vars(module))
        held = {id(parameter) for module in modules for parameter in module.parameters()}
        own = tuple(parameter for _, parameter in self.expert_parameters())
        left = [name for name, parameter in self.expert_parameters() if id(parameter) not in held]
        if left:
            raise ConfigUnsupportedError(
                f"fully_shard: expected experts that are one module, found {left[0]} and {len(left) - 1} more parameters of experts that "
                "are modules of their own; leave these whole (`experts=`)"
            )
        return ExpertsApart(modules, own, mesh, group)

    def average_gradients(self) -> None:
        """Averages the gradients outside the experts over the group, in place. All ranks must call it, after backward.

        A parameter that has a gradient on some rank gets one on all; one that has none anywhere keeps none. An expert that is a module of
        its own and was called without rows has a gradient of zero, as in one process.
        """
        self._give_zeros()
        own = {id(parameter) for _, parameter in self.expert_parameters()}
        others = [p for p in self.model.parameters() if id(p) not in own and p.requires_grad]
        if not others or self.group.size == 1:
            return
        average_gradients(others, partial(sum_over, group=self.group), self.group.size)

    def _give_zeros(self) -> None:
        """Gives a gradient of zero to what trains of this rank's experts and has none, where gradients have reached their results since the
        last time.
        """
        for block in self.blocks:
            mine = block.wanted_parameters_of_all()
            block.wanted.clear()
            for parameter in mine:
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)

    def whole_state_dict(self) -> dict[str, Tensor]:
        """The whole model's `state_dict`, on every rank; all must call it."""
        compare_scripts(self.model)
        return self._holdings.whole(self._state(), lambda tensor: tensor)

    def whole_gradients(self) -> dict[str, Tensor]:
        """The whole gradient of every parameter that has one, on every rank; all must call it."""
        found = self._holdings.whole(self._state(), lambda tensor: tensor.grad)
        return {name: grad for name, grad in found.items() if self._holdings.first[name] == name}

    def load_whole_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes this rank's part of a whole model's `state_dict`. UsageError if it does not fit."""
        self._holdings.load(self._state(), state)

    def _state(self) -> dict[str, Tensor]:
        return {plain_name(name): value for name, value in self.model.state_dict(keep_vars=True).items()}


def shard(
    model: nn.Module,
    group: TensorGroup | dist.ProcessGroup,
    *,
    experts: Sequence[str] | None = None,
    dispatch: str = "all_to_all",
    capacity_factor: float | None = None,
    router: str = "none",
    gradients: str = "mean",
) -> ExpertParallelModule:
    """This rank's part of `model`, which it takes over: experts are cut in place.

    experts          patterns of the names of modules or containers of experts (`"*.mlp.experts"`), if the search also finds others, or
                     not all; None: all that it finds
    dispatch         how tokens travel: "all_to_all", or "all_gather" for small groups
    capacity_factor  how many even shares of a rank's tokens an expert takes; the rest is dropped. None: all tokens are served
    router           "none", the model's own; or "balanced": round robin, with the weights of the model's own
    gradients        "mean" or "sum": see above

    A model on the meta device stays there: move it with `to_empty` and fill it with `load_whole_state_dict`. Raises ConfigError for
    settings that are wrong, for a model without experts, and for a pattern that matches no experts.
    """
    group = group if isinstance(group, TensorGroup) else TensorGroup.of(group)
    options = _expert_options(group, dispatch, capacity_factor, router, gradients)
    module = cut_experts(model, group, options, experts, looks=True)
    if group.process_group is not None:
        note_split(model, [name for name, _ in module.expert_parameters()], group.process_group)
    return module


def cut_experts(
    model: nn.Module,
    group: TensorGroup,
    options: Options,
    experts: Sequence[str] | None = None,
    *,
    looks: bool = False,
    in_parts: bool = False,
) -> ExpertParallelModule:
    """`shard`, for callers that see themselves to it that gradients, optimizers and wrappers know of parts.

    `looks`: whether calls of the model look at what else uses the experts' parameters. `in_parts`: the parameters of a rank's experts will
    be in parts on the ranks that hold the same; of experts that are modules of their own, others keep them without rows.
    """
    confirmed, left_whole = _confirmed_for_expert_parallel(model, group, experts, options.router, in_parts=in_parts)
    found: list[Found] = [one.experts if isinstance(one, Confirmed) else one for one in confirmed]
    holdings = ExpertHoldings.of(model, found if group.size > 1 else [], group)
    options = replace(options, around=plain_parameters)
    blocks: list[ListedBlock] = []
    for one in confirmed if group.size > 1 else []:
        if isinstance(one, Confirmed):
            cut(one, group, options)
        else:
            blocks.append(spread_out(one, group, options, keeps=in_parts, in_parts=in_parts))
            if in_parts:
                _leave_rows(one, group)
    for stacked in (one for one in found if isinstance(one, Stacked) and group.size > 1):
        mine = owned(stacked.num_experts, group)
        note_rows(stacked.module, dict.fromkeys(stacked.parameters, (stacked.num_experts, mine)), group, stacked.name)
    if group.size > 1:
        divided = {id(each) for one in confirmed for each in _parameters_of(one)}
        whole = [name for name, each in model.named_parameters() if id(each) not in divided]
        note_slices(model, {}, group, whole=whole, are_replicas=True)
    if looks and group.size > 1:
        look_at(model, options)
    numbers = {one.name: one.num_experts for one in found}
    return ExpertParallelModule(model, group, holdings, numbers, left_whole, blocks)


def _parameters_of(one: Confirmed | Listed) -> Iterator[nn.Parameter]:
    """The parameters of the experts that this rank has."""
    modules = one.members if isinstance(one, Listed) else [one.experts.module]
    return (parameter for module in modules for parameter in module.parameters())


@torch.no_grad()
def _leave_rows(found: Listed, group: TensorGroup) -> None:
    """Leaves this rank all rows of its experts and none of the others, and has scripts that draw them draw the whole."""
    names = {parameter: name for name, parameter in found.container.named_parameters()}
    kept = {}
    for parameter, rows in rows_of_rank(found, group):
        kept[names[parameter]] = parameter.shape[0], rows
        parameter.grad = None
        parameter.data = parameter.data[rows.start : rows.stop].clone()
    note_rows(found.container, kept, group, found.name, of_one=kept, guesses=True)


def _expert_options(
    group: TensorGroup, dispatch: str, capacity_factor: float | None, router: str, gradients: str
) -> Options:
    """The options of expert parallelism, checked."""
    wrong = [
        f"{name}: expected one of {', '.join(allowed)}, found {value!r}"
        for name, value, allowed in (
            ("dispatch", dispatch, WAYS),
            ("router", router, _ROUTERS),
            ("gradients", gradients, _GRADIENTS),
        )
        if value not in allowed
    ]
    if capacity_factor is not None and not capacity_factor > 0:
        wrong.append(f"capacity_factor: expected a number above 0 or None, found {capacity_factor}")
    if wrong:
        raise ConfigError("; ".join(wrong))
    scale = 1 / group.size if gradients == "mean" else 1.0
    return Options(dispatch, capacity_factor, scale, router)


def _confirmed_for_expert_parallel(
    model: nn.Module, group: TensorGroup, patterns: Sequence[str] | None, router: str, *, in_parts: bool
) -> tuple[list[Confirmed | Listed], dict[str, str]]:
    """The experts to cut, and why others stay whole."""
    cuttable: list[Confirmed | Listed] = []
    whole: dict[str, str] = {}
    confirmations = Confirmations()
    every = find_experts(model, patterns)
    uses = uses_of_parameters(model, every)
    for one in every:
        reason = _unsuited_for_expert_parallel(one, group, router, uses)
        if reason is None and in_parts and isinstance(one, Listed):
            reason = unsuited_as_rows(one, in_parts=True)
        outcome = reason or confirmations.of(one)
        if isinstance(outcome, str):
            whole[one.name] = outcome
        else:
            cuttable.append(outcome)
    if not cuttable or (patterns is not None and whole):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in whole.items()) or "no module looks like experts"
        raise ConfigError(
            f"expected experts to cut over {group.size} ranks, found none that can be: {reasons}. Name them by `experts=`, or declare "
            "their class by `register_experts`"
        )
    return cuttable, whole


def _unsuited_for_expert_parallel(found: Found, group: TensorGroup, router: str, uses: Mapping[int, int]) -> str | None:
    """Why experts cannot be cut, independent of what they compute. `uses`: how many modules hold each parameter."""
    if found.num_experts < group.size:
        return f"{found.num_experts} experts are fewer than {group.size} ranks"
    if isinstance(found, Stacked) and (reason := shared_and_trained(found)) is not None:
        return reason
    modules = [found.module] if isinstance(found, Stacked) else [found.block, *found.members]
    inside = [
        module for own in ([found.module] if isinstance(found, Stacked) else found.members) for module in own.modules()
    ]
    if group.size > 1 and any(
        uses[id(p)] > 1 for module in inside for p in module._parameters.values() if p is not None
    ):
        return "other modules share its parameters"
    if any("forward" in vars(module) for module in modules):
        return "somebody has replaced the forward of an instance"
    if isinstance(found, Listed):
        if router != "none":
            return f"router {router!r} needs experts in one module"
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in inside):
            return "they have a BatchNorm, which depends on all rows that an expert gets"
    return None
