"""`smp.amp.GradScaler`: torch's, for a model that is spread over several ranks. For autocast in fp32 training; `fp16` has a scale of its
own.

    scaler = smp.amp.GradScaler()

    @smp.step
    def train_step(model, scaler, inputs, targets):
        with torch.autocast("cuda", torch.float16):
            loss = loss_function(model(inputs), targets)
        model.backward(scaler.scale(loss))
        return loss

    train_step(model, scaler, inputs, targets)
    scaler.step(optimizer)                              # perhaps after scaler.unscale_(optimizer) and clipping
    scaler.update()

An overflow on one rank counts for all: all ranks skip the same steps and have the same scale. `unscale_`, and `step` if `unscale_` was not
called before, are collective over all ranks.

Source: public SMP v1 API ("smdistributed.modelparallel.torch.amp.GradScaler"); torch.amp.GradScaler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from smpc.errors import ConfigError, ConfigTypeError, UsageError
from smpc.v1.optimization.loss_scale import stepping
from smpc.v1.session.precision import found_anywhere, half_dtype
from smpc.v1.session.process_state import state

__all__ = ["GradScaler"]


_DEFAULTS: dict[str, Any] = {
    "device": None,  # the session's device
    "init_scale": 2.0**16,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "enabled": True,
}


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler with its arguments and methods; construct it after smp.init. `device`: None for the session's device.

    Positional arguments are torch.amp.GradScaler's, or torch.cuda.amp.GradScaler's: `GradScaler(65536.0)`.

    `smp.save_checkpoint` saves its state and `smp.resume_from_checkpoint` restores it.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        given = _named(args, options)
        device, init_scale, enabled = given.pop("device"), given.pop("init_scale"), given.pop("enabled")
        session = state.session
        if device is not None and not isinstance(device, str):
            raise ConfigTypeError(f"GradScaler: expected device to be a str such as 'cuda', found {device!r}")
        half = half_dtype(session.config)
        if enabled and half is not None:
            raise ConfigError(
                f"GradScaler: the model's parameters are {half}; fp16 has a loss scale of its own (smp.DistributedOptimizer(optimizer, "
                "static_loss_scale=None, dynamic_loss_scale=True)) and bf16 needs none; leave GradScaler out or pass enabled=False"
            )
        if enabled and not init_scale > 0.0:
            raise ConfigError(f"GradScaler: expected init_scale above 0, found {init_scale!r}")
        super().__init__(device or session.device.type, init_scale, **given, enabled=enabled)
        if self.is_enabled():
            # Done here because `scale`, which does it in torch, is called only on the rank of the last stage.
            self._lazy_init_scale_growth_tracker(session.device)
            state.scaler = self
        self.num_scaled = (
            0  # whether it has scaled a loss: an enabled scaler that scales none decides nothing about losses
        )

    def scale(self, outputs: Any) -> Any:
        """Torch's."""
        self.num_scaled += self.is_enabled()
        return super().scale(outputs)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Torch's."""
        with stepping():
            return super().step(optimizer, *args, **kwargs)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Torch's; the result covers all ranks, also ranks without gradients."""
        whole: Any = _Parameters(optimizer)
        found: dict[torch.device, Any] = super()._unscale_grads_(whole, inv_scale, found_inf, allow_fp16)
        session, join = state.session, None if state.model is None else state.model.enclosing_join
        if join is not None and join.repeats_acts:
            raise UsageError(
                "smp.amp.GradScaler: expected the loss scale of smp.DistributedOptimizer in `model.join` with fully_shard or "
                "divided experts, where ranks that ran out of data follow it, found a GradScaler; use that scale, or give all replicas as "
                "many batches"
            )
        anywhere = found_anywhere(
            max((float(each) for each in found.values()), default=0.0), session, joins=join is not None
        )
        device = session.device
        return {device: torch.full((1,), float(anywhere), device=device)}


def _named(args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by their names. Positional ones are torch.amp.GradScaler's or, without a device, torch.cuda.amp.GradScaler's."""
    names = [*_DEFAULTS]
    if args and isinstance(args[0], int | float) and not isinstance(args[0], bool):
        names.remove("device")
    wrong = [
        f"unknown argument {name!r}; known are {', '.join(_DEFAULTS)}" for name in options if name not in _DEFAULTS
    ]
    wrong += [f"{name}: given twice" for name in names[: len(args)] if name in options]
    if len(args) > len(names):
        wrong.append(f"expected at most {len(names)} positional arguments, found {len(args)}")
    if wrong:
        raise ConfigTypeError("\n".join(f"GradScaler: {line}" for line in wrong))
    return {**_DEFAULTS, **dict(zip(names, args, strict=False)), **options}


class _Parameters:
    """The groups of an optimizer, with the model's parameters in place of parts of them (`shard_optimizer_state`)."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        own: Any = state.optimizer
        parameter_of = (lambda entry: entry) if own is None else own.parameter_of
        self.param_groups = [
            {"params": [parameter_of(entry) for entry in group["params"]]} for group in optimizer.param_groups
        ]
