"""Which experts of a model a compilation divides over ranks: those that `smpc.experts` finds and can cut."""

from __future__ import annotations

from torch import nn

from smpc.codegen.rewrite.expert_parallel import Experts
from smpc.errors import ConfigError
from smpc.experts.confirm import confirm
from smpc.experts.structure import Found, Stacked, find_experts


def experts_to_divide(model: nn.Module, degree: int) -> tuple[Experts, ...]:
    """The experts of a model, by names. ConfigError if there are none that `degree` ranks can divide among them."""
    found, reasons = [], []
    for one in find_experts(model):
        reason = confirm(one) if isinstance(one, Stacked) else None
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
