"""The norm of each parameter's whole gradient, where ranks have other parameters, or parts of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from smpc.errors import UsageError
from smpc.optimizers.norm_groups import local_part
from smpc.v1.model.distributed_model import DistributedModel
from smpc.v1.optimization.fused import SessionNormGroups
from smpc.v1.session.object_messages import PP_GROUP, allgather
from smpc.v1.session.process_state import state


@torch.no_grad()
def whole_gradient_norms(named: Mapping[str, nn.Parameter], order: float) -> dict[str, Tensor]:
    """The norms of the gradients of parameters, by name and in this order, each without dimension; none for those without gradient.

    Of parameters of the DistributedModel it is the whole gradient's, on every rank; others are this rank's own. Collective over the ranks
    of the model. Raises UsageError with fp32 masters, which take the gradients of parameters in half precision.
    """
    with state.acting(state.script_with(named.values(), "grad_norm")):
        model, optimizer = state.model, state.optimizer
        if not isinstance(model, DistributedModel) or not model.partitioned:
            return _own_norms(named, order)
        if optimizer is not None and optimizer.has_masters:
            raise UsageError(
                "grad_norm: expected gradients that stay with their parameters, found an optimizer with fp32 masters (fp16 or bf16), which "
                "takes them; torch.nn.utils.clip_grad_norm_(model.parameters(), float('inf')), on every rank, returns the norm of all"
            )
        models = {id(parameter) for parameter in model.parameters()}
        local = {id(parameter) for parameter in model.local_parameters() if model.is_first_holder(parameter)}
        held = {name: one for name, one in named.items() if id(one) in local and one.grad is not None}
        found = _own_norms({name: one for name, one in named.items() if id(one) not in models}, order)
        with model.watch_exchange("grad_norm"):
            if held:
                norms = SessionNormGroups().whole_norms(
                    torch.stack([*_own_norms(held, order).values()]), [*held.values()], order
                )
                found |= dict(zip(held, norms.cpu().unbind(), strict=True))
            for others in allgather(found, PP_GROUP):
                found = others | found
    return {name: found[name] for name in named if name in found}


def _own_norms(named: Mapping[str, nn.Parameter], order: float) -> dict[str, Tensor]:
    return {
        name: torch.linalg.vector_norm(local_part(parameter.grad), order)
        for name, parameter in named.items()
        if parameter.grad is not None
    }
