"""`smp.DistributedOptimizer`: the optimizer of a model that is spread over several ranks, in any precision.

    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    scheduler = StepLR(optimizer.optimizer, ...)                   # or of the wrapper; its groups are the same

    loss = train_step(model, ids)
    optimizer.clip_master_grads(1.0)
    optimizer.step()
    if not optimizer.overflow:
        scheduler.step()

The wrapped optimizer does the work: after the partition only this rank's parameters have gradients, so it skips the others.

    fp32                    it updates the parameters
    fp16, bf16              it updates fp32 masters, which take the parameters' places in its groups (`masters` beside this)
    fp16                    gradients are of the loss times `loss_scale`. If one of them is not finite, on any rank, that is an
                            overflow: `step` updates nothing, on no rank, but the scale (`loss_scaling` beside this)
    shard_optimizer_state   it updates what this rank owns, and ranks exchange parameters afterwards (`sharded_optimizer` beside this)

Source: public SMP v1 API ("smdistributed.modelparallel.torch.DistributedOptimizer").
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from smpc.absent.absent_tensors import AbsentParameter, reading_gradients
from smpc.checkpoint.stateful import LocalStateDict, Purpose, asked_by_torch
from smpc.errors import ConfigError, ConfigTypeError, UsageError
from smpc.nn.script_writes.slice_numbers import KINDS, check_numbers
from smpc.optimizers.gradients import check_finite, clip_by, norm_of
from smpc.optimizers.torch_patches import is_check_of_optimizers, looks_at_others
from smpc.sharding.dtensors import as_state_of, refuse_parts
from smpc.v1.model.distributed_model import DistributedModel
from smpc.v1.optimization.equal_optimizers import OptimizerAgreement
from smpc.v1.optimization.fused import FusedLamb, FusedNovoGrad, SessionNormGroups
from smpc.v1.optimization.loss_scale import LossScaler, make_scaler, refuse_torchs_scaler
from smpc.v1.optimization.optimizer_state import MASTER, OptimizerState
from smpc.v1.optimization.sharded_optimizer_state import ShardedNames, Shards, max_norm
from smpc.v1.optimization.update_targets import Updates, is_elementwise, is_elementwise_in_trial
from smpc.v1.session.pipeline_groups import make_world_control
from smpc.v1.session.precision import found_anywhere, session_half_dtype
from smpc.v1.session.process_state import ended, state
from smpc.v1.session.step_messages import Control

_PLAIN = frozenset({nn.Parameter, Tensor, AbsentParameter})
_HOOKS_OF_ALL = _global_optimizer_pre_hooks, _global_optimizer_post_hooks  # of all optimizers, as torch has them

P = ParamSpec("P")
R = TypeVar("R")


def _acts(
    method: Callable[Concatenate[DistributedOptimizer, P], R],
) -> Callable[Concatenate[DistributedOptimizer, P], R]:
    """A method that runs with the optimizer's own model acting."""

    @functools.wraps(method)
    def acting(self: DistributedOptimizer, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if len(state.scripts) == 1 and state.scripts[0] is self._script:  # which acts anyway
            return method(self, *args, **kwargs)
        with state.acting(self._script):
            return method(self, *args, **kwargs)

    return acting


def _followed(
    method: Callable[Concatenate[DistributedOptimizer, P], R],
) -> Callable[Concatenate[DistributedOptimizer, P], R]:
    """A method that ranks may repeat whose `join` is over."""

    @functools.wraps(method)
    def following(self: DistributedOptimizer, /, *args: P.args, **kwargs: P.kwargs) -> R:
        join = None if self._script.model is None else self._script.model.enclosing_join
        if join is None:
            return method(self, *args, **kwargs)
        given = inspect.signature(method).bind(self, *args, **kwargs)
        given.apply_defaults()
        with join.act(method.__name__, *given.args[1:]):
            return method(self, *args, **kwargs)

    return following


class DistributedOptimizer(ShardedNames):
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
        # Does not call Optimizer's: the wrapped optimizer has everything that it would set up.
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, DistributedOptimizer):
            raise ConfigTypeError(f"optimizer: expected a torch.optim.Optimizer, found {type(optimizer).__name__}")
        _check_unwrapped(optimizer)
        scaler = make_scaler(static_loss_scale, dynamic_loss_scale, dynamic_loss_args)
        half = session_half_dtype(state.current)
        if half is not torch.float16 and (static_loss_scale not in (1.0, None) or dynamic_loss_scale):
            dtype = half or torch.float32
            warnings.warn(
                f"loss scaling has no effect: it is for float16, and this model trains in {str(dtype).removeprefix('torch.')}",
                stacklevel=2,
            )
        self.optimizer = optimizer
        entries = [entry for group in optimizer.param_groups for entry in group["params"]]
        self._script = state.script_with(entries, "smp.DistributedOptimizer")
        with state.acting(self._script):
            self._begin(scaler, half)

    def _check_sees_enough(self) -> None:
        """Raise ConfigError for an optimizer that needs whole parameters, if this rank has a part of the experts."""
        model, optimizer = state.model, self.optimizer
        if model is None or is_elementwise(optimizer) or isinstance(optimizer, (FusedLamb, FusedNovoGrad)):
            return
        if any(model.has_experts_apart(each) for group in optimizer.param_groups for each in group["params"]):
            raise ConfigError(
                f"expert_parallel_degree: expected an optimizer whose update of an element depends on that element alone, or "
                f"smp.optimizers.FusedLamb or FusedNovoGrad; found {type(optimizer).__name__}, which may look at the whole of a parameter, "
                "where each rank has some of the experts; use another optimizer, or leave the degree out"
            )

    def _check_by_trial(self) -> None:
        """Raise ConfigError before the first step of an optimizer that looks at more than this rank has."""
        self._is_untried = False
        self._check_slices()
        self._check_coupling()

    def _check_coupling(self) -> None:
        """Raise ConfigError for an optimizer whose update of a parameter looks at others, which other ranks update."""
        optimizer, name = self.optimizer, type(self.optimizer).__name__
        couples = looks_at_others(optimizer)
        mesh = state.session.mesh
        degrees = ("pipeline_parallel_degree", mesh.pp_size), ("tensor_parallel_degree", mesh.tp_size)
        option = next((option for option, size in degrees if size > 1), "shard_optimizer_state")
        if couples:
            raise ConfigError(
                f"{option}: expected an optimizer whose update of a parameter depends on that parameter alone; found {name}, in which the "
                "gradient of one parameter changes the update of another (a norm over all of them, or one step size for all), and "
                "each rank has the gradients of its own parameters only; use another optimizer, or leave the option out "
                "(torch.nn.utils.clip_grad_norm_ counts all ranks, if a norm is wanted)"
            )
        if couples is None and state.session.rank == 0:
            warnings.warn(
                f"{option}: {name} could not be tried on a few small tensors, so nobody knows whether its update of a parameter depends on "
                "that parameter alone, as it must: each rank has the gradients of its own parameters only",
                stacklevel=4,
            )

    def _check_slices(self) -> None:
        """Raise ConfigError for an optimizer that looks at whole parameters of which this rank has slices."""
        model, optimizer = self._script.model, self.optimizer
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if model is None or not any(model.is_distributed_parameter(self.parameter_of(p)) for p in held):
            return
        if not is_elementwise_in_trial(optimizer):
            raise ConfigError(
                f"tensor_parallel_degree: expected an optimizer whose update of an element depends on that element alone, or "
                f"smp.optimizers.FusedLamb or FusedNovoGrad; found {type(optimizer).__name__}, which gives other values to the halves of a "
                "tensor than to the whole of it, and each rank has slices of parameters; use another optimizer, or leave the degree out"
            )

    def _begin(self, scaler: LossScaler, half: torch.dtype | None) -> None:
        optimizer = self.optimizer
        if isinstance(state.model, DistributedModel):
            self.exchange(state.model.exchanged)
        self._session = state.current
        self._scaler = scaler if half is torch.float16 else None
        self._check_sees_enough()
        shards, self._world = _make_shards()
        sizes = (state.session.mesh.tp_size, state.session.mesh.ep_size) if state.initialized else ()
        self._updates = Updates(optimizer, half, shards, *sizes)
        takes_norms = isinstance(optimizer, (FusedLamb, FusedNovoGrad))  # over all ranks
        has_own = state.initialized and (state.session.mesh.mp_size > 1 or shards is not None)  # parameters, or slices
        self._is_untried = has_own and not takes_norms and not is_elementwise(optimizer)
        self._state = OptimizerState(optimizer, self._updates, self._scaler, self._world)
        self._taken = False  # whether masters have the gradients of the last backward
        self._used_scale: float | None = None  # of the last backward
        self._overflow = False
        self._clipped: Tensor | None = None  # factor by which clipping has multiplied masters' gradients
        self._max_norm = max_norm()  # the norm that `step` clips to; 0: no clipping
        self._is_late = (
            state.model is not None and state.model.has_cut
        )  # made from the parameters that the first step has left on this rank
        self._agreement = _make_agreement()
        state.optimizer = self
        self._script.untold = None if self._agreement is None else self
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

    @_acts
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
        """Replace some parameters by others, as `fully_shard` makes them; the model calls it before the first step runs."""
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
        """The factor of gradients in the next backward pass; 1 except with fp16."""
        return 1.0 if self._scaler is None else self._scaler.scale

    @property
    def _scale_of_gradients(self) -> float:
        """The loss scale of the existing gradients: another one may have been loaded since, in a hook after the first step."""
        return self.loss_scale if self._used_scale is None else self._used_scale

    @property
    def scale_can_shrink(self) -> bool:
        """Whether overflows lower the loss scale."""
        return self._scaler is not None and self._scaler.can_shrink

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """A GradScaler reads it; it unscales the gradients itself."""
        refuse_torchs_scaler()
        return False

    @_acts
    @_followed
    def update_master_grads(self) -> None:
        """Give the masters the gradients of the last backward pass, unscaled, and find out whether they overflow.

        `clip_master_grads` and `step` do it, if it has not been done. Collective over all ranks under fp16.
        """
        if not self.has_masters or self._taken:
            return
        self._prepare()
        scaler = self._scaler
        with _watched("the optimizer's step: agreeing on overflows"):
            found = self._updates.masters.take_gradients(None if scaler is None else 1.0 / self._scale_of_gradients)
            join = None if state.model is None else state.model.enclosing_join
            joins = join is not None and not join.repeats_acts
            self._overflow = scaler is not None and found_anywhere(found, state.session, joins=joins)
        self._taken, self._clipped = True, None

    @_acts
    @_followed
    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that the norm of all of them, of the whole model, is at most `max_norm`; returns the norm they had.

        It scales the masters' unscaled gradients, or without masters the parameters'. Equal to torch.nn.utils.clip_grad_norm_ in one
        process, whatever the degrees. After an overflow nothing is scaled, and -1 is returned. Collective over all ranks.
        """
        parameters = self._updates.parameters()
        if not self.has_masters:
            with _watched("clip_master_grads"):
                return clip_by(parameters, max_norm, norm_type, False, SessionNormGroups(), None)
        if not isinstance(max_norm, int | float) or not max_norm >= 0.0:
            raise UsageError(f"clip_master_grads: expected max_norm >= 0, found {max_norm!r}")
        if not isinstance(norm_type, int | float) or not norm_type > 0:
            raise UsageError(
                f"clip_master_grads: expected norm_type to be a positive number or infinity, found {norm_type!r}"
            )
        self.update_master_grads()
        return torch.tensor(-1.0) if self._overflow else self._clip_masters(parameters, max_norm, norm_type, False)

    @_acts
    def clip_gradients(
        self, given: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> Tensor:
        """torch's `clip_grad_norm_` with masters: `clip_master_grads`, but with an infinite norm after an overflow.

        Raises UsageError unless `given`, parameters or masters, are all that train.
        """
        parameters = self._updates.parameters()
        own, found = {id(parameter) for parameter in parameters}, [self.parameter_of(tensor) for tensor in given]
        known = {id(parameter) for parameter in found}
        missing = sum(p.requires_grad and id(p) not in known for p in parameters)
        more = sum(p.requires_grad and id(p) not in own for p in found)
        if missing or more:
            raise UsageError(
                "clip_grad_norm_: with fp16 and bf16, whose fp32 masters are clipped, expected all parameters of the DistributedOptimizer "
                f"that train, found {missing} too few and {more} others; pass model.parameters()"
            )
        self.update_master_grads()
        if not self._overflow:
            return self._clip_masters(parameters, max_norm, norm_type, error_if_nonfinite)
        norm = torch.tensor(math.inf, device=state.session.device)
        if error_if_nonfinite:
            check_finite(norm)
        return norm

    def _clip_masters(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> Tensor:
        # Replicas have the same gradients of all parameters, whichever rank has the masters.
        kept = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        grads = [grad for _, grad in kept]
        with _watched("clipping the masters' gradients"), torch.no_grad():
            norm = norm_of(grads, [p for p, _ in kept], float(norm_type), SessionNormGroups(), None, parameters)
        norm = norm / self._scale_of_gradients
        if self._clipped is not None:
            norm = norm * self._clipped
        if error_if_nonfinite:
            check_finite(norm)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self._updates.masters.scale_gradients(factor)
        self._clipped = factor if self._clipped is None else self._clipped * factor
        return norm

    @_acts
    @_followed
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parameters. Under fp16, and with sharded state, collective over all ranks."""
        if self._session is not state.job.session:
            raise ended("smp.DistributedOptimizer")
        for group in self.optimizer.param_groups:
            if not KINDS.isdisjoint(map(type, group.values())):
                check_numbers("optimizer.step", group)
        if self._agreement is not None:
            self.tell_others(updates=True)
            agreement, self._agreement = self._agreement, None
            if self._script.untold is self:
                self._script.untold = None
            agreement.check()
        if self._is_untried:
            self._check_by_trial()
        model = self._script.model
        watched = model.optimizer_step() if model is not None else contextlib.nullcontext()
        ordinary = model.ordinary_parameters() if model is not None else contextlib.nullcontext()
        if self._max_norm > 0:
            self._norm = self.clip_master_grads(self._max_norm)
        with ordinary, watched, self._reading(closure):
            if self._updates.is_plain:
                try:
                    return self.optimizer.step() if closure is None else self.optimizer.step(closure)
                except RuntimeError as error:
                    refuse_parts(self.optimizer, error)
                    raise
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
        if self._scaler is not None and self._scale_of_gradients == self._scaler.scale:
            self._scaler.update(overflow=self._overflow)
        self._used_scale = None
        if self._overflow:
            self._updates.drop_gradients()
            return None
        with _watched("the optimizer's step: exchanging updated parameters"):
            return self._updates.step()

    @_acts
    @_followed
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self._taken, self._used_scale = False, None
        is_plain = self._updates.is_plain
        if not is_plain:
            self._updates.drop_gradients()
        model = self._script.model
        ordinary = model.ordinary_parameters() if model is not None else contextlib.nullcontext()
        with ordinary, self._reading():
            self.optimizer.zero_grad(set_to_none)
        for parameter in () if is_plain else self._updates.parameters():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad = parameter.grad.detach().zero_()  # not in place: it may be a view of a bucket

    def _reading(self, closure: Callable[[], Any] | None = None) -> contextlib.AbstractContextManager[object]:
        """Around the wrapped optimizer's use of gradients. Absent parameters have none, and reading them does not warn here.

        If only torch's own code runs on plain parameters, absent ones are read like any tensor, without a Python call for each. The
        script's closures and hooks see absent parameters as usual.
        """
        optimizer = self.optimizer
        home = type(optimizer).__module__
        if not home.startswith("torch.optim."):
            return contextlib.nullcontext() if home.startswith("torch.") else reading_gradients()
        own = vars(optimizer)
        step = own.get("step")  # set by torch's schedulers, or by the script
        is_wrapped = step is not None and getattr(step, "__wrapped__", None) is not type(optimizer).step
        hooks = own.get("_optimizer_step_pre_hooks"), own.get("_optimizer_step_post_hooks")
        of_all = itertools.chain(_HOOKS_OF_ALL[0].values(), _HOOKS_OF_ALL[1].values())
        is_watched = any(hooks) or not all(map(is_check_of_optimizers, of_all))
        if closure is not None or is_wrapped or "zero_grad" in own or is_watched:
            return contextlib.nullcontext()
        for group in optimizer.param_groups:
            if not _PLAIN.issuperset(map(type, group["params"])):
                return contextlib.nullcontext()
        return torch._C.DisableTorchFunctionSubclass()

    def gradients_changed(self) -> None:
        """Marks the masters' gradients as outdated; the model calls it after every step function."""
        self._taken = False
        if self._scaler is not None:
            self._used_scale = self._scaler.scale

    def parameter_of(self, entry: Tensor) -> Tensor:
        """The model's parameter that `entry` replaces in the groups; `entry` itself unless it is a master or a part."""
        return self._updates.parameter_of(entry)

    @property
    def has_masters(self) -> bool:
        """Whether masters take the gradients, unscaled: under fp16 and bf16."""
        return self._updates.half is not None

    @property
    def has_taken_or_scales(self) -> bool:
        """Whether a change to the parameters' gradients would not reach the gradients that the update uses."""
        return self.has_masters and (self._taken or self.loss_scale != 1.0)

    @property
    def masters(self) -> list[nn.Parameter]:
        """This rank's fp32 masters."""
        return self._updates.masters.all()

    @property
    def stepping_shards(self) -> Shards | None:
        """The owners, while the wrapped optimizer updates this rank's share and norms must be taken over the owners."""
        return self._updates.shards if self._updates.is_stepping else None

    @_acts
    def replicate(self, group: dist.ProcessGroup, source: int) -> None:
        """Take over the masters and the loss scale of the group's rank `source`. Collective over the group."""
        self._state.replicate(group, source)

    def _prepare(self) -> None:
        if isinstance(state.model, DistributedModel):
            if not self._updates.is_plain:
                state.model.spread()
            self._updates.prepare(state.model)

    @_acts
    def tell_others(self, updates: bool = False) -> None:
        """Report this optimizer to the other ranks, until it has been compared with theirs; the model calls it before a step."""
        if self._agreement is not None and state.model is not None:
            module, is_late = state.model.get_module(), self._is_late
            self._agreement.tell(self.optimizer, module, self.parameter_of, is_cut=is_late, updates=updates)

    # -- state -----------------------------------------------------------------------------------------------------------

    def _check_readable(self, what: str) -> None:
        """Raise UsageError if the state is not there yet, or ranks that hold parts of it are over in `join`."""
        self._script.check_filled(what)
        join = None if self._script.model is None else self._script.model.enclosing_join
        if join is not None and join.repeats_acts:
            join.meet_all(what)

    @property
    @_acts
    def checkpoint_state(self) -> OptimizerState:
        """The optimizer's state for a checkpoint."""
        self._prepare()
        return self._state

    @_acts
    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """The optimizer state of this rank's parameters, with the key `_smp_is_partial`.

        `gather_if_shard`: with sharded state, also the state that other ranks own: collective over all ranks. Otherwise only this rank's
        share.
        """
        self._check_readable("optimizer.local_state_dict")
        self._prepare()
        return self._state.local(gather=gather_if_shard)

    def state_dict(self, gather_to_rank0: bool = False) -> dict[str, Any]:
        """The optimizer state of the whole model, tensors on the CPU.

        Collective over the replica like `DistributedModel.state_dict`, with sharded state over all ranks. `gather_to_rank0`: only mp_rank 0
        gets it, the others {}. torch.distributed.checkpoint gets this rank's part (`smpc.checkpoint.stateful`).
        """
        purpose = asked_by_torch()  # inspects the caller of this method
        self._check_readable("optimizer.state_dict")
        with state.acting(self._script):
            self._prepare()
            if purpose is not None and self._state.is_ready:
                return self._state.held(to_fill=purpose == Purpose.LOAD)
            return self._state.full(only_on_rank_0=gather_to_rank0)

    @_acts
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a full or partial state, or the state of a torch optimizer in one process over the same parameters; on every rank.

        It is loaded at once if the model is partitioned; else the options of the groups are, and the tensors in the first step. Partial
        states are merged over the ranks. If a state has no masters (it comes from an fp32 job), they are made from the parameters. Raises
        CheckpointError if the state does not fit the optimizer.
        """
        if not self._state.is_ready:
            load = self._state.load_early(state_dict)
            masters = any(MASTER in items for items in state_dict["state"].values())
            state.model.when_partitioned(functools.partial(self._load_late, load), has_masters=masters)
            return
        self._prepare()
        if isinstance(state_dict, LocalStateDict):
            self._state.load_held(state_dict)
        else:
            self._state.load(state_dict)

    def save_optimizer_backcompat(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """`local_state_dict`, under another name that scripts use."""
        return self.local_state_dict(gather_if_shard)

    def load_optimizer_backcompat(self, state_dict: Mapping[str, Any], gather_if_shard: bool = True) -> None:
        """`load_state_dict`, under another name that scripts use; the state itself says whether it was gathered."""
        self.load_state_dict(state_dict)

    @_acts
    def prepare(self) -> None:
        """The model is partitioned, and calls it: find this rank's parameters, before states are loaded that were passed earlier."""
        self._prepare()

    @_acts
    def _load_late(self, load: Callable[[], None]) -> None:
        load()


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
    """Owners of the optimizer state, and messages among all ranks; None if it is not sharded. Collective."""
    if not state.initialized or not state.cfg.shard_optimizer_state or state.session.mesh.dp_size == 1:
        return None, None
    control = make_world_control(state.session)
    state.closers.append(control.close)
    return Shards(state.session), control


def _make_agreement() -> OptimizerAgreement | None:
    """Compares the optimizers of all ranks; None if there is one rank."""
    session = state.current
    state.num_optimizers += 1
    if session is None or session.monitor is None:
        return None
    mesh, store = session.mesh, PrefixStore(f"optimizer{state.num_optimizers}", session.monitor.store)
    return OptimizerAgreement(store, session.rank, mesh.world_size, mesh.pp_rank(session.rank))


def _watched(what: str) -> contextlib.AbstractContextManager[None]:
    """Limits how long the ranks may wait for each other."""
    model = state.model
    return model.watch_exchange(what) if isinstance(model, DistributedModel) else contextlib.nullcontext()
