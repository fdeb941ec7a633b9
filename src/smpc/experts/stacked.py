"""A module with all experts becomes this rank's part of it: fewer experts, which serve the tokens of all ranks.

The module stays the same object under the same name, with the same hooks. Its class becomes a subclass whose forward sends tokens to the
ranks of their experts, calls the module's own forward there, with one expert a row and weights of one, and multiplies by the weights
where the tokens came from. A rank to which no token comes calls it with one row of zeros, so that its parameters get gradients of zero.

Tensor-parallel ranks, which have the same tokens, may divide these experts once more (`by_expert`), or all of a module's: each serves
what goes to its own, and returns a summand. Rank k of t has the k-th part of each expert-parallel rank's experts, so one run of the whole.

`take_role` gives a module that stays the same object another forward: its class becomes a subclass that a role comes first in.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from smpc.codegen.rewrite.expert_parallel import PARTS, SLICES
from smpc.errors import UsageError
from smpc.executor.collectives import TensorGroup
from smpc.executor.parameter_slices import replacement
from smpc.experts.confirm_cut import Confirmed
from smpc.experts.dispatch import capacity_of, combine, dispatch, owned
from smpc.experts.expert_linear import scale_gradient
from smpc.experts.find_experts import LEAVE_WHOLE
from smpc.experts.outside_uses import OutsideUses
from smpc.experts.routers import round_robin_route
from smpc.tracer import register_shape_rule
from smpc.tracer.recording.recorder import current_recorder


def take_role(module: nn.Module, role: type[nn.Module]) -> None:
    """Makes the module one of its class and of a role, whose forward is called and finds the class's own by `super()`."""
    classes: Any = (type(module), role)
    module.__class__ = _with_role(*classes)


@functools.cache
def _with_role(module_class: Any, role: Any) -> Any:
    return type(module_class.__name__, (role, module_class), {"__module__": module_class.__module__})


_TENSOR = "_smpc_tensor_ranks"  # the argument by which a part is told that tensor-parallel ranks divide it
_ROUTING = 3  # hidden states, experts, weights
_USES = "_smpc_uses_of_experts"


def _nothing_around(module: nn.Module) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Options:
    """How tokens travel. `gradient_scale`: what the gradients of experts, sums over all ranks' tokens, are multiplied by.

    `capacity_factor`: how many even shares an expert takes of each rank's slots; None: all that come. `router`: "none", the model's own,
    or "balanced", which sends the slots round robin, with the model's weights. `around`: what a module's forward runs in. `uses`: knows
    the experts that are divided with these.
    """

    way: str = "all_to_all"
    capacity_factor: float | None = None
    gradient_scale: float = 1.0
    router: str = "none"
    around: Callable[[nn.Module], AbstractContextManager[None]] = _nothing_around
    uses: OutsideUses = field(default_factory=OutsideUses, compare=False)


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """What a part of the experts knows of the whole."""

    num_experts: int
    group: TensorGroup
    options: Options
    names: tuple[str, ...]  # of the three arguments of forward
    counts: tuple[str, ...] = ()  # the attributes that count experts
    may_share: bool = False  # whether tensor-parallel ranks may divide them once more

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParts:
        return self


class WithExperts(nn.Module):
    """A model with divided experts: what else uses their parameters is an error (`smpc.experts.outside_uses`)."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        uses: OutsideUses = vars(self)[_USES]
        with uses.looking(self):
            return super().__call__(*args, **kwargs)


def look_at(model: nn.Module, options: Options) -> None:
    """Has calls of a model look at what uses the parameters of experts that are divided with these options, in place."""
    if _USES not in vars(model):
        take_role(model, WithExperts)
    vars(model)[_USES] = options.uses


class PartOfExperts(nn.Module):
    """The forward of a module that holds some of the experts."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What its forward returns, and what hooks around it do."""
        parts: ExpertParts = vars(self)[PARTS]
        with parts.options.uses.inside(self):
            return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the whole module returns for this rank's tokens. All ranks of the group call it.

        Of a slice of a sequence (`SLICES`: one of so many) every rank has a summand of the gradients of one loss, where others have the
        gradients of a loss of their own: for the experts, its rows count as many times.
        """
        if (
            current_recorder() is not None
        ):  # a module around it runs on invented values, which other ranks know nothing of
            return _recorded_forward(self, *args, **kwargs)
        parts: ExpertParts = vars(self)[PARTS]
        num_slices, tensor = kwargs.pop(SLICES, 1), kwargs.pop(_TENSOR, None)
        hidden, index, weights = _routing_arguments(parts.names, args, kwargs)
        hidden, weights = scale_gradient(hidden, 1 / num_slices), scale_gradient(weights, 1 / num_slices)
        few = parts.group.share(parts.num_experts) // (1 if tensor is None else tensor.size)
        with parts.options.around(self), counting(self, parts.counts, few):
            found = _mixed(super().forward, parts, hidden, index, weights, tensor)
        return scale_gradient(found, num_slices)


def _mixed(
    own: Callable[..., Tensor],
    parts: ExpertParts,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    tensor: TensorGroup | None = None,
) -> Tensor:
    """What the experts of all ranks of `parts.group` return; with `tensor`, of these what this rank's part of that group has."""
    options, group = parts.options, parts.group
    tokens = hidden.reshape(-1, hidden.shape[-1])
    index = index.reshape(-1, index.shape[-1])
    if options.router == "balanced":
        index = round_robin_route(len(tokens), index.shape[1], parts.num_experts, index.device)
    capacity = None
    if options.capacity_factor is not None:
        capacity = capacity_of(options.capacity_factor, len(tokens), index.shape[1], parts.num_experts)
    num_experts = parts.num_experts
    if tensor is not None:
        index, num_experts = _own_share(index, parts, tensor), num_experts // tensor.size
    how: dict[str, Any] = {"way": options.way, "capacity": capacity, "is_sorted": False}  # the module sorts them
    rows, plan = dispatch(tokens, index, num_experts, group, **how)
    local = plan.index().unsqueeze(1)
    outputs = _served(own, scale_gradient(rows, 1 / options.gradient_scale), local)
    outputs = scale_gradient(outputs, options.gradient_scale)
    found = combine(outputs, plan, weights.reshape(index.shape), group)
    return found.view(*hidden.shape[:-1], found.shape[-1])


def _served(own: Callable[..., Tensor], rows: Tensor, local: Tensor) -> Tensor:
    """This rank's experts on their rows [R, H]; `local` [R, 1] numbers them from 0."""
    if rows.shape[0]:
        return own(rows, local, rows.new_ones(local.shape))
    one = rows.sum(0, keepdim=True)  # zero, and connected
    return own(one, local.new_zeros(1, 1), one.new_ones(1, 1))[:0]


def _own_share(index: Tensor, parts: ExpertParts, tensor: TensorGroup) -> Tensor:
    """The experts of each token as numbers of those that ranks like this one in their tensor-parallel groups have; -1 for others."""
    each = parts.num_experts // parts.group.size
    own = each // tensor.size
    place = index % each
    is_own = (index >= 0) & (index < parts.num_experts) & (place // own == tensor.rank)
    return torch.where(is_own, index // each * own + place % own, -1)


@contextmanager
def counting(module: nn.Module, counts: tuple[str, ...], number: int) -> Iterator[None]:
    """In this context the attributes that count experts are this number."""
    before = {name: getattr(module, name) for name in counts}
    for name in counts:
        setattr(module, name, number)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


class _Viewed(Protocol):
    """A module of a model that runs in place (`smpc.in_place`)."""

    def around_and_inside(self) -> tuple[nn.Module, nn.Module]:
        """What is called, and the model's own module inside of what is around it."""


def by_expert(
    module: nn.Module | _Viewed, counts: tuple[str, ...], group: TensorGroup, *args: Any, **kwargs: Any
) -> Any:
    """Calls a module of whose experts this tensor-parallel rank has some, by rank: a summand of what it returns with all of them.

    `counts`: its attributes that say how many there are. Hooks of the module see this rank's call of it, with all tokens.
    """
    outer, inner = (module, module) if isinstance(module, nn.Module) else module.around_and_inside()
    if PARTS in vars(inner):
        return outer(*args, **kwargs, **{_TENSOR: group})
    own, instead = inner.forward, vars(inner).get("forward")
    names = tuple(inspect.signature(own).parameters)[:_ROUTING]

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        few = _first_dimension(inner)
        parts = ExpertParts(few * group.size, TensorGroup(), Options(), names, counts)
        with counting(inner, counts, few):
            return _mixed(own, parts, *_routing_arguments(names, args, kwargs), group)

    vars(inner)["forward"] = forward
    try:
        return outer(*args, **kwargs)
    finally:
        del vars(inner)["forward"]
        if instead is not None:
            vars(inner)["forward"] = instead


def _first_dimension(module: nn.Module) -> int:
    """How many experts are there: of what FSDP has put in the places of parameters, too."""
    tensors = (
        value
        for part in module.modules()
        for value in (*part._parameters.values(), *vars(part).values())
        if isinstance(value, Tensor)
    )
    return next(tensors).shape[0]


def _routing_arguments(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """The hidden states, index and weights among the arguments of a call of experts."""
    given = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
    if (
        len(given) != len(args) + len(kwargs)
        or not all(isinstance(value, Tensor) for value in given)
        or len(given) != len(names)
    ):
        found = ", ".join(
            [type(value).__name__ for value in args] + [f"{name}={type(kwargs[name]).__name__}" for name in kwargs]
        )
        raise UsageError(f"expected three tensors, {', '.join(names)}, found ({found}); {LEAVE_WHOLE}")
    return given[0], given[1], given[2]


def _recorded_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """What a recorder runs in place of a part's forward: the same shape, and what rows evenly spread over experts compute and keep."""
    parts: ExpertParts = vars(module)[PARTS]
    hidden, index, weights = _routing_arguments(parts.names, args, kwargs)
    rows = hidden.new_empty(index.numel(), hidden.shape[-1], requires_grad=True)
    for parameter in module.parameters():
        if parameter.dim() == 3:  # [E, out, in], or the other way round
            first, second = parameter.shape[1:]
            taken = rows.shape[1], rows.shape[1] // 2
            is_turned = first in taken and second not in taken
            rows = _activated(rows, first if is_turned else second)
            rows = torch.nn.functional.linear(rows, parameter[0].t() if is_turned else parameter[0])
    slots = (
        rows if rows.shape[1] == hidden.shape[-1] else hidden.new_empty(len(rows), hidden.shape[-1], requires_grad=True)
    )
    _ = slots * weights.reshape(-1, 1)  # keeps the slots for the gradients of the weights
    return hidden + next(module.parameters()).flatten()[0]  # has gradients if the tokens or the experts do


def _activated(rows: Tensor, width: int) -> Tensor:
    """Rows between two products, with what an activation keeps of them: of twice the width one half is the other's gate."""
    if rows.shape[1] == 2 * width:
        gate, up = rows.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    if rows.shape[1] != width:
        return rows.new_empty(rows.shape[0], width, requires_grad=True)
    return torch.nn.functional.silu(rows) if rows.grad_fn is not None else rows


register_shape_rule(PartOfExperts, _recorded_forward)


def cut(confirmed: Confirmed, group: TensorGroup, options: Options) -> None:
    """Makes the module this rank's part, in place. Its parameters are new ones, of fewer experts; old gradients are dropped."""
    module = confirmed.experts.module
    mine = owned(confirmed.experts.num_experts, group)
    for name in confirmed.experts.parameters:
        owner, _, own = name.rpartition(".")
        whole = module.get_parameter(name)
        part = whole.detach()[mine.start : mine.stop].clone(memory_format=torch.contiguous_format)
        module.get_submodule(owner)._parameters[own] = replacement(whole, part)
    become_part(confirmed, group, options)


def become_part(confirmed: Confirmed, group: TensorGroup, options: Options) -> None:
    """Makes the module one that serves the tokens of all ranks with this rank's experts, which are its parameters already, or soon."""
    module, num_experts = confirmed.experts.module, confirmed.experts.num_experts
    names = tuple(inspect.signature(module.forward).parameters)[:_ROUTING]
    may_share = confirmed.may_share and num_experts % group.size == 0
    vars(module)[PARTS] = ExpertParts(num_experts, group, options, names, confirmed.counts, may_share)
    options.uses.add(confirmed.experts.name, module)
    take_role(module, PartOfExperts)
