"""`smp.DistributedOptimizer`: the optimizer of a model that lies on several ranks, in any precision.

    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    scheduler = StepLR(optimizer.optimizer, ...)                   # or of the wrapper; its groups are the same

    loss = train_step(model, ids)
    optimizer.clip_master_grads(1.0)
    optimizer.step()
    if not optimizer.overflow:
        scheduler.step()

The wrapped optimizer does the work: after the partition it finds gradients at this rank's parameters only, and leaves the others alone.

    fp32                    it updates the parameters
    fp16, bf16              it updates fp32 masters, which take the parameters' places in its groups (`masters` beside this)
    fp16                    gradients are those of the loss times `loss_scale`. If one of them is not finite, on any rank, that is an
                            overflow: `step` updates nothing, on no rank, but the scale (`loss_scaling` beside this)
    shard_optimizer_state   it updates what this rank owns, and ranks exchange parameters afterwards (`sharded_optimizer` beside this)

Source: public SMP v1 API ("smdistributed.modelparallel.torch.DistributedOptimizer").
"""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from smpc.checkpoint.stateful import Held, Purpose, asked_by_torch
from smpc.errors import ConfigError, ConfigTypeError, UsageError
from smpc.executor.sharded_tensor import as_state_of
from smpc.optimizers.gradients import clip_by, norm_of
from smpc.v1.models.model import DistributedModel
from smpc.v1.optimization.loss_scaling import LossScaler, make_scaler
from smpc.v1.optimization.optimizer_state import OptimizerState
from smpc.v1.optimization.precision import current_half_dtype, found_anywhere
from smpc.v1.optimization.sharded_optimizer import Shards
from smpc.v1.optimization.updates import Updates
from smpc.v1.optimizers import SessionNormGroups
from smpc.v1.state import state
from smpc.v1.steps.connections import make_world_control
from smpc.v1.steps.control import Control


class DistributedOptimizer(Optimizer):
    """Wraps an optimizer of the DistributedModel's parameters; `optimizer` is the wrapped one.

    `static_loss_scale`, `dynamic_loss_scale` and its arguments concern fp16 training: see `loss_scaling` beside this. The latter
    may be given by name or in a dict called `dynamic_loss_args`. Construct it on every rank.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        **dynamic_loss_args: Any,
    ) -> None:
        # Not Optimizer's: everything that it would set up is the wrapped optimizer's own.
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, DistributedOptimizer):
            raise ConfigTypeError(f"optimizer: expected a torch.optim.Optimizer, found {type(optimizer).__name__}")
        _check_unwrapped(optimizer)
        scaler = make_scaler(static_loss_scale, dynamic_loss_scale, dynamic_loss_args)
        half = current_half_dtype()
        if half is not torch.float16 and (static_loss_scale not in (1.0, None) or dynamic_loss_scale):
            dtype = half or torch.float32
            warnings.warn(
                f"loss scaling has no effect: it is for float16, and this model trains in {str(dtype).removeprefix('torch.')}",
                stacklevel=2,
            )
        self.optimizer = optimizer
        self._scaler: LossScaler | None = scaler if half is torch.float16 else None
        shards, self._world = _make_shards()
        tp_size = state.session.mesh.tp_size if state.initialized else 1
        self._updates = Updates(optimizer, half, shards, tp_size)
        self._state = OptimizerState(optimizer, self._updates, self._scaler, self._world)
        self._taken = False  # whether masters have the gradients of the last backward
        self._overflow = False
        self._clipped: Tensor | None = None  # what clipping has multiplied masters' gradients by
        self._deferred: Mapping[str, Any] | None = None
        state.optimizer = self
        self._prepare()

    # -- the wrapped optimizer's -----------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the wrapped optimizer."""
        own = {id(parameter) for parameter in self._updates.parameters()}
        given = param_group["params"]
        twice = [p for p in ([given] if isinstance(given, Tensor) else list(given)) if id(p) in own]
        if twice:
            raise ConfigError(f"add_param_group: {len(twice)} of the parameters are in another group already")
        self.optimizer.add_param_group(param_group)
        self._prepare()

    def exchange(self, exchanged: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Take other parameters for some, as `fully_shard` makes them; the model calls it before the first step runs."""
        for group in self.optimizer.param_groups:
            group["params"] = [exchanged.get(parameter, parameter) for parameter in group["params"]]
        for old in [parameter for parameter in self.optimizer.state if parameter in exchanged]:
            items, new = self.optimizer.state.pop(old), exchanged[old]  # type: ignore[index]
            self.optimizer.state[new] = {key: as_state_of(new, value) for key, value in items.items()}

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """See torch.optim.Optimizer; the hook gets the wrapped optimizer."""
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """See torch.optim.Optimizer; the hook gets the wrapped optimizer."""
        return self.optimizer.register_step_post_hook(hook)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    # -- steps -----------------------------------------------------------------------------------------------------------

    @property
    def overflow(self) -> bool:
        """Whether the last gradients were not all finite, on any rank, so that `step` skips or has skipped them; fp16 only."""
        return self._overflow

    @property
    def loss_scale(self) -> float:
        """What gradients are multiplied by in the next backward pass; 1 but for fp16."""
        return 1.0 if self._scaler is None else self._scaler.scale

    @property
    def scale_can_shrink(self) -> bool:
        """Whether overflows lower the loss scale."""
        return self._scaler is not None and self._scaler.can_shrink

    def update_master_grads(self) -> None:
        """Give the masters the gradients of the last backward pass, unscaled, and find out whether they overflow.

        `clip_master_grads` and `step` do it, if it has not been done. Collective over all ranks under fp16.
        """
        if self._updates.half is None or self._taken:
            return
        self._prepare()
        scaler = self._scaler
        with _watched("the optimizer's step: agreeing on overflows"):
            found = self._updates.masters.take_gradients(None if scaler is None else 1.0 / scaler.scale)
            self._overflow = scaler is not None and found_anywhere(found)
        self._taken, self._clipped = True, None

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that the norm of all of them, of the whole model, is at most `max_norm`; returns the norm they had.

        The gradients of the masters, unscaled; without masters those of the parameters. Equal to torch.nn.utils.clip_grad_norm_ in one
        process, whatever the degrees. After an overflow nothing is scaled, and -1 is returned. Collective over all ranks.
        """
        parameters = self._updates.parameters()
        groups = SessionNormGroups()
        if self._updates.half is None:
            with _watched("clip_master_grads"):
                return clip_by(parameters, max_norm, norm_type, False, groups, None)
        if not isinstance(max_norm, int | float) or not max_norm >= 0.0:
            raise UsageError(f"clip_master_grads: expected max_norm >= 0, found {max_norm!r}")
        if not isinstance(norm_type, int | float) or not norm_type > 0:
            raise UsageError(
                f"clip_master_grads: expected norm_type to be a positive number or infinity, found {norm_type!r}"
            )
        self.update_master_grads()
        if self._overflow:
            return torch.tensor(-1.0)
        # Replicas have the same gradients of all parameters, whoever has the masters.
        kept = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        grads = [grad for _, grad in kept]
        with _watched("clip_master_grads"), torch.no_grad():
            norm = norm_of(grads, [p for p, _ in kept], float(norm_type), groups, None, parameters)
        norm = norm / self.loss_scale
        if self._clipped is not None:
            norm = norm * self._clipped
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self._updates.masters.scale_gradients(factor)
        self._clipped = factor if self._clipped is None else self._clipped * factor
        return norm

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parameters. Under fp16, and with sharded state, collective over all ranks."""
        with state.model.optimizer_step() if state.model is not None else contextlib.nullcontext():
            if self._updates.is_plain:
                return self.optimizer.step() if closure is None else self.optimizer.step(closure)
            if closure is not None:
                raise UsageError(
                    "optimizer.step: closures are for fp32 training without shard_optimizer_state; run the step function first, "
                    "then optimizer.step()"
                )
            return self._step()

    def _step(self) -> Any:
        self._prepare()
        self.update_master_grads()
        self._taken = False
        if self._overflow and not self.scale_can_shrink and state.session.rank == 0:
            warnings.warn(
                f"optimizer.step: gradients are not finite at the loss scale {self.loss_scale:g}, which is not lowered further; the step "
                "is skipped. If this goes on, look for its cause (learning rate, data), use a smaller or dynamic loss scale, or bf16",
                stacklevel=4,
            )
        if self._scaler is not None:
            self._scaler.update(overflow=self._overflow)
        if self._overflow:
            self._updates.drop_gradients()
            return None
        with _watched("the optimizer's step: exchanging updated parameters"):
            return self._updates.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.gradients_changed()
        self._updates.drop_gradients()
        self.optimizer.zero_grad(set_to_none)
        for parameter in () if self._updates.is_plain else self._updates.parameters():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad = parameter.grad.detach().zero_()  # not in place: it may be a view of a bucket

    def gradients_changed(self) -> None:
        """There are other gradients than masters have taken; the model says so after every step function."""
        self._taken = False

    def parameter_of(self, entry: Tensor) -> Tensor:
        """The model's parameter at whose place `entry` is in the groups; itself, but for masters and parts."""
        return self._updates.parameter_of(entry)

    @property
    def masters(self) -> list[nn.Parameter]:
        """This rank's fp32 masters."""
        return self._updates.masters.all()

    @property
    def stepping_shards(self) -> Shards | None:
        """Who owns what, while the wrapped optimizer updates what this rank owns, and norms must be taken over the owners."""
        return self._updates.shards if self._updates.is_stepping else None

    def replicate(self, group: dist.ProcessGroup, source: int) -> None:
        """Take over the masters and the loss scale of the group's rank `source`. Collective over the group."""
        self._state.replicate(group, source)

    def _prepare(self) -> None:
        if isinstance(state.model, DistributedModel):
            self._updates.prepare(state.model)

    # -- state -----------------------------------------------------------------------------------------------------------

    @property
    def checkpoint_state(self) -> OptimizerState:
        """What of the optimizer a checkpoint holds."""
        self._prepare()
        return self._state

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """The optimizer state of this rank's parameters, with the key `_smp_is_partial`.

        `gather_if_shard`: with sharded state, also what other ranks own of them: collective over all ranks. Otherwise what this rank owns.
        """
        self._prepare()
        return self._state.local(gather=gather_if_shard)

    def state_dict(self, gather_to_rank0: bool = False) -> dict[str, Any]:
        """The optimizer state of the whole model, tensors on the CPU.

        Collective over the replica like `DistributedModel.state_dict`, with sharded state over all ranks. `gather_to_rank0`: only mp_rank 0
        gets it, the others {}. torch.distributed.checkpoint gets what this rank holds (`smpc.checkpoint.stateful`).
        """
        self._prepare()
        purpose = asked_by_torch()
        if purpose is not None and self._state.is_ready:
            return self._state.held(to_fill=purpose == Purpose.LOAD)
        return self._state.full(only_on_rank_0=gather_to_rank0)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a full or a partial state, or that of a torch optimizer in one process over the same parameters; on every rank.

        Loaded at once where the model is partitioned, else in its first step. Partial states are merged over the ranks. Where a state has
        no masters, as of a job in fp32, they are made of the parameters.
        Raises CheckpointError if the state does not fit the optimizer.
        """
        if not self._state.is_ready:
            self._deferred = state_dict
            return
        self._prepare()
        if isinstance(state_dict, Held):
            self._state.load_held(state_dict)
        else:
            self._state.load(state_dict)

    def load_deferred(self) -> None:
        """Load what was given before the partition; the model calls it."""
        self._prepare()
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self._state.load(deferred)


def _check_unwrapped(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer in which another wrapper keeps its masters."""
    known = state.optimizer
    entries = [entry for group in optimizer.param_groups for entry in group["params"]]
    if known is not None and any(known.parameter_of(entry) is not entry for entry in entries):
        raise ConfigError(
            "optimizer: another DistributedOptimizer wraps it already, and keeps fp32 masters in it; construct a new one from "
            "model.parameters()"
        )


def _make_shards() -> tuple[Shards | None, Control | None]:
    """Owners of the optimizer state, and messages among all ranks; None where it is not sharded. Collective."""
    if not state.initialized or not state.cfg.shard_optimizer_state or state.session.mesh.dp_size == 1:
        return None, None
    control = make_world_control(state.session)
    state.closers.append(control.close)
    return Shards(state.session), control


def _watched(what: str) -> contextlib.AbstractContextManager[None]:
    """Limits how long the ranks may wait for each other."""
    model = state.model
    return model.watch_exchange(what) if isinstance(model, DistributedModel) else contextlib.nullcontext()
