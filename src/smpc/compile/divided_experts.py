"""Which experts of a model a compilation divides over ranks: those that `smpc.experts` finds and can cut.

`experts_to_divide` is for expert-parallel ranks, `find_sharing_plan` for tensor-parallel ones, which have slices of them or some of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from torch import nn

from smpc.codegen.rewrite.expert_parallel import PARTS, Experts
from smpc.codegen.rewrite.tensor_parallel.fused_experts import columns_of
from smpc.codegen.rewrite.tensor_parallel.styles import AUTO, StylePlan, find_plan
from smpc.errors import ConfigError
from smpc.experts.confirm_cut import Confirmations, Confirmed
from smpc.experts.find_experts import Found, Stacked, find_experts
from smpc.experts.segmented import find_segmented


def experts_to_divide(model: nn.Module, degree: int, confirmations: Confirmations | None = None) -> tuple[Experts, ...]:
    """The experts of a model, by names. ConfigError if there are none that `degree` ranks can divide among them.

    `confirmations`: of this model, so that its experts are tried once for all degrees.
    """
    found, reasons, confirmations = [], [], confirmations or Confirmations()
    for one in find_experts(model):
        reason = confirmations.of(one)
        if one.num_experts < degree:
            reason = f"{one.num_experts} experts are fewer than {degree} ranks"
        if isinstance(reason, str):
            reasons.append(f"{one.name}: {reason}")
        else:
            found.append(_named_experts(one))
    if not found:
        raise ConfigError(
            f"expert_parallel_degree: expected a model with experts that {degree} ranks can divide among them, found none: "
            f"{'; '.join(reasons) or 'no module looks like experts'}; leave it out (docs/expert_parallelism.md)"
        )
    return tuple(found)


def _named_experts(found: Found) -> Experts:
    if isinstance(found, Stacked):
        tensors = tuple(f"{found.name}.{name}" if found.name else name for name in found.parameters)
        return Experts(found.name, found.name, found.num_experts, tensors)
    members = tuple(
        tuple(f"{found.name}.{key}.{name}" for name in member.state_dict())
        for key, member in zip(found.keys, found.members, strict=True)
    )
    return Experts(found.name, found.block_name, found.num_experts, members=members)


def find_sharing_plan(model: nn.Module, plan: str | Mapping[str, str]) -> StylePlan:
    """`find_plan`, with the modules of which ranks may have some of the experts each."""
    found = find_plan(model, plan)
    if plan != AUTO:
        return found
    sliced = {name for name, module in model.named_modules() if columns_of(module) is not None}
    by_expert = divided_by_expert(model, sliced.difference(found.experts.undivided))
    return dataclasses.replace(found, by_expert=by_expert, segmented=tuple(find_segmented(model).items()))


def divided_by_expert(model: nn.Module, sliced: Collection[str] = ()) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The modules of whose experts tensor-parallel ranks may have some each, without `sliced`, of which they have slices.

    With the attributes that count experts. Modules that expert-parallel ranks divide already are among them.
    """
    found, confirmations = divided_parts(model), Confirmations()
    for one in find_experts(model):
        if isinstance(one, Stacked) and one.name not in sliced:
            known = confirmations.of(one)
            if isinstance(known, Confirmed) and known.may_share:
                found[one.name] = known.counts
    return tuple((name, counts) for name, counts in found.items() if name not in sliced)


def divided_parts(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Modules with some of the experts, of which tensor-parallel ranks may have some each; with the attributes that count experts."""
    parts = {name: vars(module)[PARTS] for name, module in model.named_modules() if PARTS in vars(module)}
    return {name: part.counts for name, part in parts.items() if part.may_share}
