"""Experts of a transformed model: each rank keeps some of them (`smpc.expert_parallel`), and routers do what `MoEConfig` says.

    moe_load_balancing    experts of a token                                       joins the loss, in training
    aux_loss              the model's own                                          aux loss, z-loss
    sinkhorn              of a plan that gives all experts the same, in training   z-loss
    balanced              round robin, with the model's own weights                z-loss
    none                  the model's own                                          z-loss

A router is a module beside the experts that returns, for tokens [N, H], logits [N, E], weights [N, k] and experts [N, k], in any order.
With sinkhorn the weights are softmax(logits) (k = 1: sigmoid) of the chosen: a model that was trained with others computes another
function, of which a warning tells. Losses act through gradients alone; they are means over this rank's tokens,
of all of a sequence that context-parallel ranks share: there, and with tensor parallelism, a router is called whole.

Rules of Megatron-core, which SMP v2 integrates: "MoE" in its public documentation.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from smpc.codegen.rewrite.tensor_parallel.layouts import Layout
from smpc.errors import ConfigError, ConfigUnsupportedError, UsageError
from smpc.executor.collectives import TensorGroup
from smpc.expert_parallel import cut_experts
from smpc.experts import aux_loss, join_loss, shuffle, sinkhorn, unshuffle, z_loss
from smpc.experts.find_experts import Found, Listed, Stacked, find_experts
from smpc.experts.routers import round_robin_route
from smpc.experts.stacked import Options, take_role
from smpc.in_place import whole_parameters
from smpc.nn.script_writes.between_steps import plain_parameters
from smpc.nn.script_writes.compare_writes import compare_scripts
from smpc.tracer import register_shape_rule
from smpc.v2.moe.moe_config import MoEConfig
from smpc.v2.moe.moe_layer import mark_block
from smpc.v2.transforming.listed_experts import note_divided
from smpc.v2.transforming.transformed_slices import ParameterPart, PartsByName, SliceCut, agree_on_weights, note_slices

_ROUTER, _SHUFFLE = "_smpc_router", "_smpc_shuffle"  # what a module's role knows
_RUNNING = "_smpc_running"  # of a model: what ends with its forward
_TOKENS = 4


@dataclass(frozen=True, slots=True)
class _Places:
    """The positions of logits, weights and experts in a router's output, and the number of experts."""

    logits: int
    weights: int
    index: int


@dataclass(slots=True)
class _Routing:
    config: MoEConfig
    places: _Places

    def __deepcopy__(self, memo: dict[int, Any]) -> _Routing:
        return self


@dataclass(slots=True)
class _Shuffling:
    group: TensorGroup
    seed: int

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shuffling:
        return self


class Router(nn.Module):
    """The forward of a router that balances by the given rule."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model's own router, with the replaced experts and weights."""
        found = list(self.own(*args, **kwargs))
        routing: _Routing = vars(self)[_ROUTER]
        config, places = routing.config, routing.places
        logits, weights, index = found[places.logits], found[places.weights], found[places.index]
        if config.moe_load_balancing == "sinkhorn":
            index, weights = sinkhorn(logits, index.shape[-1], training=self.training)
        elif config.moe_load_balancing == "balanced":
            index = round_robin_route(index.shape[0], index.shape[1], logits.shape[-1], index.device)
        if self.training:
            if config.moe_z_loss_coeff:
                weights = join_loss(weights, z_loss(logits, config.moe_z_loss_coeff))
            if config.moe_load_balancing == "aux_loss" and config.moe_aux_loss_coeff:
                weights = join_loss(weights, aux_loss(logits, index, config.moe_aux_loss_coeff))
        found[places.weights], found[places.index] = weights, index
        return tuple(found)

    def own(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The output of the model's own router."""
        return tuple(super().forward(*args, **kwargs))


def _recorded(router: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Replaces a router's forward while recording: balancing depends on values, so the router is called whole."""
    return cast(Router, router).own(*args, **kwargs)


register_shape_rule(Router, _recorded)


class Shuffled(nn.Module):
    """The forward of a block whose tokens are shuffled over the ranks first, and return afterwards."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The block's output. All ranks of the group call it. UsageError for further tensors, which may belong to tokens."""
        others = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if others:
            raise UsageError(
                f"global_token_shuffle: expected blocks of experts that take hidden states alone, found {type(self).__name__} called with "
                f"{len(others)} more tensors, which would not be shuffled with them; leave global_token_shuffle out"
            )
        shuffling: _Shuffling = vars(self)[_SHUFFLE]
        shuffling.seed += 1
        mixed, ticket = shuffle(hidden.reshape(-1, hidden.shape[-1]), shuffling.seed, shuffling.group)
        found = super().forward(mixed.view(hidden.shape), *args, **kwargs)
        first = found[0] if isinstance(found, tuple) else found
        own = unshuffle(first.reshape(-1, first.shape[-1]), ticket, shuffling.group).view(first.shape)
        return (own, *found[1:]) if isinstance(found, tuple) else own


def divide_experts(
    model: nn.Module,
    group: TensorGroup | None,
    config: MoEConfig | None,
    sources: Sequence[int] | None,
    *,
    is_recorded: bool,
) -> None:
    """Has the ranks of a group divide the experts of a model, in place; None: one rank has all. Collective over the group.

    `sources`: see `smpc.v2.transforming.transformed_slices`. `is_recorded`: whether the model is about to be recorded, for ranks that share
    its weights or its sequences. Raises ConfigError if there are no experts
    to divide, ConfigUnsupportedError for what cannot be done with them, before anything is changed.
    """
    experts = find_experts(model)
    if not experts:
        raise ConfigError(
            "expected a model with experts, as MoEConfig or expert_parallel_degree says; no module looks like experts"
        )
    _check_experts(experts, config, is_recorded=is_recorded)
    routers = [] if config is None else _configured_routers(model, experts, config)
    for one in experts:
        mark_block(_block(model, one))
    if group is not None:
        _cut_experts(model, experts, group, config, sources)
        if not is_recorded:
            model.register_forward_pre_hook(_begin_forward)
            model.register_forward_hook(_end_forward, always_call=True)
    if config is None:
        return
    for router, places in routers:
        vars(router)[_ROUTER] = _Routing(config, places)
        take_role(router, Router)
    if config.global_token_shuffle and group is not None:
        for one in experts:
            block = _block(model, one)
            vars(block)[_SHUFFLE] = _Shuffling(group, config.random_seed)
            take_role(block, Shuffled)


def _cut_experts(
    model: nn.Module,
    experts: list[Found],
    group: TensorGroup,
    config: MoEConfig | None,
    sources: Sequence[int] | None,
) -> None:
    agree_on_weights(model, group, sources)
    shapes = {name: whole.shape for whole in whole_parameters(model) for name in whole.names}
    way = "all_to_all" if config is None or config.moe_all_to_all_dispatcher else "all_gather"
    divided = cut_experts(model, group, Options(way, gradient_scale=1 / group.size), looks=True, in_parts=True)
    if divided.left_whole and group.rank == 0:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in divided.left_whole.items())
        warnings.warn(f"expert_parallel_degree: every rank has all of these experts: {reasons}", stacklevel=6)
    parts = PartsByName()
    for one in experts:
        if one.name not in divided.left_whole:
            cuts = _cuts(one, group)
            parts |= {name: ParameterPart((cut(shapes[name]),), is_expert=True) for name, cut in cuts.items()}
    note_slices(model, parts)
    note_divided(model, divided.blocks)


def _cuts(one: Found, group: TensorGroup) -> dict[str, Callable[[tuple[int, ...]], SliceCut]]:
    """By the names of parameters of experts, what makes the cut of a shape."""
    cut = partial(SliceCut, Layout.sharded(0), group=group, is_even=False)
    if isinstance(one, Stacked):
        return {f"{one.name}.{name}": cut for name in one.parameters}
    owners = [rank for rank, share in enumerate(group.shares(one.num_experts)) for _ in range(share)]
    return {
        f"{one.name}.{key}.{name}": partial(cut, owner=owner)
        for key, member, owner in zip(one.keys, one.members, owners, strict=True)
        for name, _ in member.named_parameters()
    }


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _begin_forward(model: nn.Module, args: Any) -> None:
    """Before the model runs, with ordinary parameters; where it is recorded, its programs do this."""
    compare_scripts(model)
    running = vars(model).setdefault(_RUNNING, contextlib.ExitStack())
    running.enter_context(plain_parameters(model))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _end_forward(model: nn.Module, args: Any, output: Any) -> None:
    """After it, also where it has failed."""
    vars(model).pop(_RUNNING, contextlib.ExitStack()).close()


def _check_experts(experts: list[Found], config: MoEConfig | None, *, is_recorded: bool) -> None:
    """Raises an error for experts or a configuration that cannot be transformed."""
    listed = [one.name for one in experts if isinstance(one, Listed)]
    lines = []
    if config is not None and config.global_token_shuffle and is_recorded:
        lines.append(
            "global_token_shuffle: not with tensor or context parallelism, whose ranks have the same tokens, or slices of the same "
            "sequences; leave it out"
        )
    if listed and config is not None and config.moe_load_balancing != "none":
        lines.append(
            f"moe_load_balancing: {config.moe_load_balancing!r} needs experts in one module, found modules of their own in "
            f"{', '.join(listed[:3])}; use 'none'"
        )
    if lines:
        raise ConfigUnsupportedError("\n".join(lines))


def _block(model: nn.Module, one: Found) -> nn.Module:
    """What has the router beside the experts: around a module that is called with the routing."""
    if isinstance(one, Listed) and one.block is not one.container:
        return one.block
    return model.get_submodule(one.name.rpartition(".")[0])


def _configured_routers(model: nn.Module, experts: list[Found], config: MoEConfig) -> list[tuple[nn.Module, _Places]]:
    """The routers that are to do something else than before; ConfigUnsupportedError if one is not found."""
    mode = config.moe_load_balancing
    if mode == "none" and not config.moe_z_loss_coeff:
        return []
    found, missing = [], []
    for one in experts:
        block = _block(model, one)
        inside = [child for name, child in block.named_children() if not one.name.endswith(f".{name}")]
        router = next(((child, places) for child in inside if (places := _router_places(child, one.num_experts))), None)
        if router is None:
            missing.append(one.name)
        else:
            found.append(router)
    if missing:
        raise ConfigUnsupportedError(
            f"moe_load_balancing: {mode!r} with moe_z_loss_coeff {config.moe_z_loss_coeff} needs a module that returns logits, weights and "
            f"experts of tokens, found none beside {', '.join(missing[:3])}; use 'none' with moe_z_loss_coeff=0.0"
        )
    if mode == "sinkhorn":
        warnings.warn(
            "moe_load_balancing 'sinkhorn': weights of experts are softmax(logits) at the chosen ones, not normalized over them; a model "
            "that was trained otherwise computes another function (use 'aux_loss' or 'none' to keep its own)",
            stacklevel=5,
        )
    return found


def _router_places(module: nn.Module, num_experts: int) -> _Places | None:
    """The layout of a router's output, found by running it on invented tokens on the meta device; None for another module."""
    for parameter in module.parameters():
        if parameter.dim() != 2 or num_experts not in parameter.shape:
            continue
        hidden = parameter.shape[1] if parameter.shape[0] == num_experts else parameter.shape[0]
        try:
            with torch.no_grad(), torch.random.fork_rng():
                found = module(torch.zeros(_TOKENS, hidden, dtype=parameter.dtype, device=parameter.device))
        except Exception:  # it is not called with tokens alone
            continue
        places = _routing_places(found, num_experts)
        if places is not None:
            return places
    return None


def _routing_places(found: Any, num_experts: int) -> _Places | None:
    """Where logits, weights and index are among what a router returns; None if it is no router."""
    if not isinstance(found, tuple) or not all(isinstance(value, Tensor) and value.dim() == 2 for value in found):
        return None
    logits = [i for i, value in enumerate(found) if value.shape == (_TOKENS, num_experts) and value.is_floating_point()]
    index = [i for i, value in enumerate(found) if not value.is_floating_point()]
    weights = [
        i
        for i, value in enumerate(found)
        if value.is_floating_point() and i not in logits[:1] and index and value.shape == found[index[0]].shape
    ]
    if not logits or len(index) != 1 or len(weights) != 1:
        return None
    return _Places(logits[0], weights[0], index[0])
