"""The state of a run: passed to callbacks, and saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from smpc.composer.duration import Timestamp
from smpc.composer.loss_scale import LossScale
from smpc.composer.model import ComposerModel


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
