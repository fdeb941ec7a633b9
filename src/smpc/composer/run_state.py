"""The state of a run, which is passed to callbacks and saved, and its scale of losses.

`LossScale` is the factor on fp16 losses that keeps small gradients above zero. It is halved when one is infinite, and doubled after a
while. All ranks decide alike, also where each holds a part of the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from smpc import dist
from smpc.composer.duration import Timestamp
from smpc.composer.model import ComposerModel
from smpc.sharding.tensors import local


@dataclass(slots=True)
class LossScale:
    """`factor` now; `window`: updates without an infinite gradient until it doubles; `patience`: infinite ones until it halves."""

    factor: float = 65536.0
    window: int = 2000
    patience: int = 1
    least: float = 1.0
    is_fixed: bool = False
    good: int = 0
    bad: int = 0

    @classmethod
    def of_zero(cls, given: dict[str, float]) -> LossScale:
        """With the values of a ZeRO configuration's fp16."""
        if given.get("loss_scale", 0.0) > 0:
            return cls(given["loss_scale"], is_fixed=True)
        power = given.get("initial_scale_power", 16.0)
        window, patience = int(given.get("loss_scale_window", 1000)), int(given.get("hysteresis", 2))
        return cls(2.0**power, window, patience, given.get("min_loss_scale", 1.0))

    @torch.no_grad()
    def unscale(self, optimizer: torch.optim.Optimizer) -> bool:
        """Divide the gradients by the factor; whether all are finite on all ranks. Collective."""
        grads = [
            local(parameter.grad)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        is_finite = torch.tensor([1.0], device=grads[0].device if grads else "cpu")
        for grad in grads:
            grad.div_(self.factor)
            is_finite *= grad.isfinite().all().to(is_finite.device)  # some parts may be in CPU memory
        dist.all_reduce(is_finite, "MIN")
        self._learn(bool(is_finite.item()))
        return bool(is_finite.item())

    def _learn(self, is_finite: bool) -> None:
        if self.is_fixed:
            return
        self.good, self.bad = (self.good + 1, self.bad) if is_finite else (0, self.bad + 1)
        if self.bad >= self.patience:
            self.factor, self.bad = max(self.factor / 2, self.least), 0
        if self.good >= self.window:
            self.factor, self.good = self.factor * 2, 0


@dataclass(slots=True)
class State:
    """The state of a run, which callbacks get: `model`, `optimizer`, `schedulers`, `timestamp` and the following.

    `loss`: the mean over all samples of the last batch, on all ranks. `device_train_microbatch_size`: None if batches are not cut.
    `run_name`, `eval_outputs`: as the Trainer has them. `best`: the lowest evaluation loss so far. `scale`: the loss scale in amp_fp16.
    `loader`: the `state_dict` of a data loader within this epoch, None at the end of one, and for loaders without. `begun`: the random
    state at the beginning of this epoch's data; for a loader with a `state_dict`, at its next batch. `numbered`: see
    `smpc.fsdp.Prepared`.
    """

    model: ComposerModel
    optimizer: torch.optim.Optimizer
    schedulers: tuple[torch.optim.lr_scheduler.LRScheduler, ...] = ()
    timestamp: Timestamp = field(default_factory=Timestamp)
    device_train_microbatch_size: int | None = None
    loss: float | None = None
    run_name: str | None = None
    best: float | None = None
    scale: LossScale | None = None
    loader: Any = None
    begun: Mapping[str, Any] | None = None
    numbered: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    eval_outputs: list[Any] = field(default_factory=list)
