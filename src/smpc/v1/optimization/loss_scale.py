"""The loss scale of float16 training: fixed, or lowered when gradients overflow and raised when they have not for a while.

    scaler = make_scaler(None, True, {"dynamic_loss_args": {"init_scale": 2.0**16, "scale_window": 500}})
    scaler.update(overflow=True)            # after every step of the optimizer, with what all ranks have agreed on
    scaler.scale

Terms
    overflow      a gradient, or the loss, that is infinite or NaN. The step is skipped
    window        steps without overflow after which the scale is multiplied by `scale_factor`; counted anew from every overflow and
                  from every such multiplication
    hysteresis    overflows that are let pass before the scale is divided by `scale_factor`, down to `min_scale`. `delayed_shift` is what
                  it is set to: 1 divides at every overflow; 2 lets one pass. It is refilled at the end of a window, or, with
                  `consecutive_hysteresis`, in every step without overflow

        delayed_shift 2, scale_window 3        ok ok ok OVER ok OVER ok ok ok
        scale                                   8  8 16   16 16    8  8  8 16

With `delayed_shift` 1 this is torch.amp.GradScaler's rule, number for number: growth_factor = scale_factor, backoff_factor =
1 / scale_factor, growth_interval = scale_window, but for `min_scale`. Scales are fp32 numbers, and never infinite.

`refuse_torchs_scaler` tells torch's own GradScaler from `smp.amp.GradScaler`: with torch's, each rank would skip steps based on its own
gradients. torch.amp.GradScaler.step first reads an optimizer's `_step_supports_amp_scaling`.

Source: public SMP v1 API (names and defaults of the arguments of DistributedOptimizer).
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from smpc.errors import CheckpointError, ConfigError, UsageError

_NESTED = "dynamic_loss_args"
_steps: ContextVar[bool] = ContextVar("smpc_scaler_steps", default=False)


@dataclass(frozen=True, slots=True)
class DynamicOptions:
    """The options of a dynamic loss scale; see the module's docstring."""

    init_scale: float = 2.0**32
    scale_factor: float = 2.0
    scale_window: int = 1000
    min_scale: float = 1.0
    delayed_shift: int = 1
    consecutive_hysteresis: bool = False

    def faults(self) -> list[str]:
        """The violations, a line each."""
        wrong = []
        for name in ("init_scale", "scale_factor", "min_scale"):
            value, low = getattr(self, name), 1.0 if name == "scale_factor" else 0.0
            if not _is_number(value) or not low < value < math.inf:
                wrong.append(f"{name}: expected a finite number above {low:g}, found {value!r}")
        for name in ("scale_window", "delayed_shift"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                wrong.append(f"{name}: expected an int of at least 1, found {value!r}")
        flag: object = self.consecutive_hysteresis
        if not isinstance(flag, bool):
            wrong.append(f"consecutive_hysteresis: expected a bool, found {flag!r}")
        if not wrong and self.init_scale < self.min_scale:
            wrong.append(f"init_scale: expected at least min_scale = {self.min_scale:g}, found {self.init_scale:g}")
        return wrong


@dataclass(slots=True)
class LossScaler:
    """A loss scale; `options` is None for one that is fixed."""

    scale: float
    options: DynamicOptions | None = None
    hysteresis: int = field(init=False)
    good_steps: int = field(init=False, default=0)  # since the window began

    def __post_init__(self) -> None:
        self.scale = _rounded(self.scale)
        self.hysteresis = 1 if self.options is None else self.options.delayed_shift

    @property
    def can_shrink(self) -> bool:
        """Whether overflows lower the scale, sooner or later."""
        return self.options is not None and self.scale > self.options.min_scale

    def update(self, *, overflow: bool) -> None:
        """Update the scale after a step."""
        options = self.options
        if options is None:
            return
        if overflow:
            self.good_steps = 0
            if self.hysteresis > 1:
                self.hysteresis -= 1
            else:
                self.scale = max(_rounded(self.scale * (1.0 / options.scale_factor)), options.min_scale)
            return
        self.good_steps += 1
        ends = self.good_steps == options.scale_window
        if ends or options.consecutive_hysteresis:
            self.hysteresis = options.delayed_shift
        if ends:
            self.good_steps = 0
            grown = _rounded(self.scale * options.scale_factor)
            self.scale = grown if math.isfinite(grown) else self.scale

    def state_dict(self) -> dict[str, Any]:
        """The values that change in training, as plain numbers."""
        return {"scale": self.scale, "good_steps": self.good_steps, "hysteresis": self.hysteresis}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; a fixed scale does not change. Raises CheckpointError for anything else than a state."""
        if self.options is None:
            return
        names = ("scale", "good_steps", "hysteresis")
        if not all(_is_number(state.get(name)) for name in names) or not 0.0 < state["scale"] < math.inf:
            raise CheckpointError(f"loss scale: expected numbers called {', '.join(names)}, found {dict(state)}")
        self.scale = _rounded(state["scale"])
        # Options may differ from the saving job's.
        self.good_steps = min(int(state["good_steps"]), self.options.scale_window - 1)
        self.hysteresis = min(int(state["hysteresis"]), self.options.delayed_shift)


def make_scaler(static: Any, dynamic: Any, arguments: Mapping[str, Any]) -> LossScaler:
    """The scaler that the arguments of DistributedOptimizer describe. Raises ConfigError, listing all violations.

    `arguments`: options of the dynamic scale by name, or in one dict called `dynamic_loss_args`.
    """
    given, wrong = _merged(arguments)
    if not isinstance(dynamic, bool):
        wrong.append(f"dynamic_loss_scale: expected a bool, found {dynamic!r}")
    if static is not None and (not _is_number(static) or not 0.0 < static < math.inf):
        wrong.append(f"static_loss_scale: expected a finite number above 0, or None, found {static!r}")
    elif dynamic is True and static not in (None, 1.0):
        wrong.append(
            f"static_loss_scale: {static!r} and dynamic_loss_scale=True exclude each other; pass static_loss_scale=None, and "
            "dynamic_loss_args={'init_scale': ...} for the scale to begin with"
        )
    elif dynamic is False and static is None:
        wrong.append("static_loss_scale: None needs dynamic_loss_scale=True; pass one of the two")
    if given and dynamic is False:
        wrong.append(f"{', '.join(given)}: for a dynamic loss scale; pass dynamic_loss_scale=True, or leave it out")
    options = DynamicOptions(**given)
    wrong += options.faults()
    if wrong:
        raise ConfigError("\n".join(f"DistributedOptimizer: {line}" for line in wrong))
    return LossScaler(options.init_scale, options) if dynamic else LossScaler(static)


def _merged(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The options of both forms, and errors in their names."""
    nested = arguments.get(_NESTED)
    wrong = []
    if nested is not None and not isinstance(nested, Mapping):
        wrong.append(f"{_NESTED}: expected a dict, found {nested!r}")
        nested = None
    inner = dict(nested or {})
    outer = {name: value for name, value in arguments.items() if name != _NESTED}
    wrong += [f"{name}: given twice, in {_NESTED} too; keep one" for name in outer if name in inner]
    known = list(DynamicOptions.__dataclass_fields__)
    merged = {**inner, **outer}
    for name in merged:
        if name not in known:
            close = difflib.get_close_matches(str(name), known if name in inner else [*known, _NESTED], 1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"
            wrong.append(f"unknown argument {name!r}{hint}")
    return {name: value for name, value in merged.items() if name in known}, wrong


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _rounded(value: float) -> float:
    """The scale rounded to fp32, by which gradients are multiplied."""
    return float(torch.tensor(value, dtype=torch.float64).to(torch.float32))


@contextlib.contextmanager
def stepping() -> Iterator[None]:
    """Around the step of an `smp.amp.GradScaler`."""
    token = _steps.set(True)
    try:
        yield
    finally:
        _steps.reset(token)


def refuse_torchs_scaler() -> None:
    """Raise UsageError unless it is an `smp.amp.GradScaler` that asks."""
    if not _steps.get():
        raise UsageError(
            "GradScaler.step: expected smp.amp.GradScaler, which skips a step on all ranks if one of them finds an overflow, found "
            "torch's, by which each rank decides for itself; scaler = smp.amp.GradScaler() takes the same arguments"
        )
