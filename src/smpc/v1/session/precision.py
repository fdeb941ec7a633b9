"""Training in half precision: how the keys `fp16` and `bf16` change a model.

    parameters, floating buffers    cast when smp.DistributedModel is constructed, as `module.half()` or `module.bfloat16()` does
    inputs of the model             fp32 tensors among them are cast to the parameters' dtype
    outputs of the model            fp16 and bf16 tensors are cast to fp32, so that losses of the step function are computed in it
    gradients                       have the parameters' dtype, or, with `_fp32_grad_accumulation`, add up in fp32 (see
                                    `smpc.sharding.dtensors`); with fp16 they are of the loss times a loss scale
    updates                         of fp32 masters, of which the parameters are rounded copies: see `smpc.v1.optimization.update_targets`

Without these keys nothing is cast.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from smpc.config import Config
from smpc.mesh import Axis
from smpc.v1.session.process_state import Script, Session

HALVES = (torch.float16, torch.bfloat16)


def half_dtype(config: Config) -> torch.dtype | None:
    """The dtype that parameters are cast to; None for fp32 training, which does not cast."""
    return torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else None


def planned_optimizer(config: Config) -> str:
    """The precision for which memory is predicted: see `smpc.partitioner.costs.node_costs`."""
    if half_dtype(config) is None:
        return "adam"
    return "adamw-fp32-master-wide-grad" if config._fp32_grad_accumulation else "adamw-fp32-master"


def session_half_dtype(session: Session | None) -> torch.dtype | None:
    """The dtype that a session casts parameters to; None without a session."""
    return None if session is None else half_dtype(session.config)


def cast_module(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Casts parameters and floating buffers, in place: parameters stay the same objects."""
    if dtype is torch.float16:
        module.half()
    elif dtype is torch.bfloat16:
        module.bfloat16()


def loads_as(saved: torch.dtype, own: torch.dtype, half: torch.dtype | None) -> bool:
    """Whether a state of one dtype may be loaded into another without being asked to cast: floating ones, in half precision."""
    return half is not None and saved.is_floating_point and own.is_floating_point


def found_anywhere(found: float, session: Session, *, joins: bool) -> bool:
    """Whether any rank has found a number other than 0. Collective over all ranks.

    `joins`: in `join`, over the ranks of a replica: other replicas may have ended, and gradients are the same on all.
    """
    group = session.groups[Axis.MP if joins else Axis.WORLD]
    number = torch.full((1,), found, device=session.message_device)
    if group.size() > 1:
        dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
    return bool(number)


class Precision:
    """The dtype that one model computes in, and the scale of its losses. `script`: it may get an optimizer or a GradScaler later."""

    def __init__(self, dtype: torch.dtype | None, script: Script) -> None:
        self.dtype = dtype  # of parameters that have been cast
        self._script = script

    @property
    def loss_scale(self) -> float:
        """The factor of gradients in this step."""
        optimizer = self._script.optimizer
        return 1.0 if optimizer is None else float(optimizer.loss_scale)

    @property
    def num_scaled(self) -> int:
        """How many losses the script's GradScaler has scaled, on this rank."""
        scaler = self._script.scaler
        return 0 if scaler is None else int(scaler.num_scaled)

    def overflow_is_curable(self, num_scaled_before: int) -> bool:
        """Whether the loss scale may have caused a loss that is not finite. The scale is then lowered and the step skipped.

        If the scale cannot be lowered, or a GradScaler has scaled nothing in this step, the scale is not the cause, and `nan_policy`
        decides. `num_scaled_before` is `num_scaled` at the beginning of the step. For the rank that runs the step function.
        """
        optimizer, scaler = self._script.optimizer, self._script.scaler
        if optimizer is not None and optimizer.scale_can_shrink:
            return True
        return self.num_scaled > num_scaled_before and bool(scaler.get_scale() > 1.0)
