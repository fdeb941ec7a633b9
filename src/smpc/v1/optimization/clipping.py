"""torch's own clipping, for a model that is spread over several ranks: `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)` is right.

While a `DistributedModel` exists, torch's functions check their arguments:

    clip_grad_norm_           parameters of the model: the norm over all ranks, everything counted once, in full precision and without
                              loss scale. Collective over the ranks of the model
    get_total_norm            gradients or parameters that other ranks have more of: refused, since a rank without any could not tell
    clip_grads_with_norm_     gradients of the model that its masters take unscaled: refused
    clip_grad_value_          the same; otherwise it works element by element, and is right as it is

Tensors outside the model are left to torch, and so is a model that every rank has whole: the same code runs on the same tensors.

Names imported earlier change, too: see `smpc.optimizers.torch_patches`. Why not a subclass of Parameter: see docs/design/decisions.md, 24.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smpc.errors import StepError, UsageError
from smpc.nn.script_writes.slice_provenance import refuse_of_slices
from smpc.optimizers.gradients import clip_by
from smpc.optimizers.torch_patches import Tensors, clip_grad_norm_by, listed, replace_clipping
from smpc.v1.model.distributed_model import DistributedModel
from smpc.v1.optimization.fused import SessionNormGroups, check_same_number, clipping_in_join
from smpc.v1.session.process_state import state

_undo: list[Callable[[], None]] = []


def install() -> Callable[[], None]:
    """Let torch's functions know the model of this session; returns the function that undoes it."""
    if not _undo:
        _undo.append(replace_clipping(_MAKERS))
    return uninstall


def uninstall() -> None:
    """Restore everything."""
    while _undo:
        _undo.pop()()


# -- the functions -----------------------------------------------------------------------------------------------------


def _clip(given: list[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor | None:
    with _clipped_model_acting(given, "clip_grad_norm_"):
        if _is_ours("clip_grad_norm_", given):
            refuse_of_slices("clip_grad_norm_: max_norm", max_norm)
            return clip_model(given, float(max_norm), float(norm_type), error_if_nonfinite)
    return None


def _get_total_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_total_norm(tensors: Tensors, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(tensors, *args, **kwargs)
        tensors, given = listed(tensors)
        for model in _spread_models():
            parts = {id(tensor) for p in model.parameters() for tensor in (p, p.grad) if tensor is not None}
            if any(id(tensor) in parts for tensor in given):
                raise UsageError(
                    "get_total_norm: expected tensors that this rank has whole, found gradients or parameters of the DistributedModel, of "
                    "which other ranks have the others; torch.nn.utils.clip_grad_norm_(model.parameters(), float('inf')), on every rank, "
                    "returns the norm of all gradients and changes none"
                )
        return original(tensors, *args, **kwargs)

    return get_total_norm


def _clips_elements(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function that clips gradients by a number, refused where fp32 masters would not be clipped by it."""
    name = original.__name__.removeprefix("_")

    def clip(parameters: Tensors, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(parameters, *args, **kwargs)
        parameters, given = listed(parameters)
        with _clipped_model_acting(given, name):
            optimizer = state.optimizer
            is_ours = _is_ours(name, given)
            refused = is_ours and optimizer is not None and optimizer.has_taken_or_scales
        if is_ours:
            _check_value(name, args[0] if args else kwargs.get("clip_value", kwargs.get("max_norm")))
        if refused:
            raise UsageError(
                f"{name}: the optimizer's fp32 masters take the model's gradients without the loss scale, so clipping these by a number is "
                "not clipping those; clip by the norm: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm), or "
                "optimizer.clip_master_grads(max_norm)"
            )
        return original(parameters, *args, **kwargs)

    return clip


def _check_value(name: str, value: Any) -> None:
    """UsageError for a value to clip by that one process would not have. Collective over the ranks that have other parts of the model."""
    refuse_of_slices(f"{name}: the value to clip by", value)
    model = _model()
    if name == "clip_grad_value_" and model is not None and model.partitioned:
        with model.watch_exchange(name):
            check_same_number(f"{name}: clip_value", float(value))


_MAKERS = {
    "clip_grad_norm_": clip_grad_norm_by(_clip),
    "_get_total_norm": _get_total_norm,
    "_clip_grads_with_norm_": _clips_elements,
    "clip_grad_value_": _clips_elements,
}


def clip_model(given: list[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """`clip_grad_norm_` of parameters of the model, or of their masters or parts in the optimizer. Collective over the model's ranks.

    Raises UsageError for tensors that cannot be clipped, and StepError in a step function.
    """
    model, optimizer = state.model, state.optimizer
    assert isinstance(model, DistributedModel), "the parameters are its own"
    if model.is_in_step:
        raise StepError(
            "clip_grad_norm_ was called in a step function, where gradients are not complete; call it after the step function, on every "
            "rank"
        )
    if not model.partitioned:
        return torch.zeros(())  # no step has run, so there is no gradient
    parameters = [_parameter_of(tensor) for tensor in given]
    with model.watch_exchange("clip_grad_norm_"):
        check_same_number("clip_grad_norm_: max_norm", max_norm)
    with clipping_in_join(model, parameters, max_norm, norm_type, error_if_nonfinite):
        if optimizer is not None and optimizer.has_masters:
            total: Tensor = optimizer.clip_gradients(given, max_norm, norm_type, error_if_nonfinite)
            return total
        with model.watch_exchange("clip_grad_norm_"):
            return clip_by(parameters, max_norm, norm_type, error_if_nonfinite, SessionNormGroups(), None)


# -- whose tensors -----------------------------------------------------------------------------------------------------


def _is_ours(name: str, given: list[Tensor]) -> bool:
    """Whether the tensors belong to the model, and torch alone would treat them wrongly because the model is not whole."""
    model = _model()
    if model is None or not (_is_spread(model) or (state.optimizer is not None and state.optimizer.has_masters)):
        return False
    own = {id(parameter) for parameter in model.parameters()}
    found = sum(id(_parameter_of(tensor)) in own for tensor in given)
    if found and found < len(given):
        raise UsageError(
            f"{name}: expected parameters of the DistributedModel, or none of it, found {found} of them among {len(given)}; it is on "
            "several ranks, the others do not: clip them in two calls"
        )
    return bool(found)


def _parameter_of(tensor: Tensor) -> Tensor:
    """The model's parameter, for a master or a part."""
    return tensor if state.optimizer is None else state.optimizer.parameter_of(tensor)


def _clipped_model_acting(given: list[Tensor], what: str) -> contextlib.AbstractContextManager[None]:
    """In this context the tensors' model is the acting one."""
    return state.acting(state.script_with(given, what))


def _spread_models() -> list[DistributedModel]:
    """Models of which ranks have different parameters, or parts of them."""
    models = [script.model for script in state.scripts] if state.initialized else []
    return [model for model in models if isinstance(model, DistributedModel) and _is_spread(model)]


def _is_spread(model: DistributedModel) -> bool:
    """Whether ranks have different parameters, or parts of them."""
    mesh = state.session.mesh
    return mesh.pp_size > 1 or mesh.tp_size > 1 or mesh.ep_size > 1 or state.session.is_sharded


def _model() -> DistributedModel | None:
    model = state.model if state.initialized else None
    return model if isinstance(model, DistributedModel) else None
