"""Ready-made callbacks for `register_step_callback`: a progress line, TensorBoard, and Weights & Biases.

    model.register_step_callback(smpc.ProgressLine(num_steps=1000))
    model.register_step_callback(smpc.TensorBoard("runs/first"))
    model.register_step_callback(smpc.WandB(project="first", peak_flops=989e12))

A callback is any function of a `smpc.StepInfo`. They may be registered on every rank: each decides on which ranks it shows or
writes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from smpc.errors import ConfigError
from smpc.observe.observer import StepInfo
from smpc.report.format import format_bytes, format_number, format_time

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_PLAIN_SECONDS = 10.0  # between two lines, if the output is not a terminal


class ProgressLine:
    """A line on rank 0's stderr about the last step: overwritten on a terminal, elsewhere printed anew at intervals.

    `num_steps` is the number of steps, if it is known. Evaluation steps are not shown.
    """

    def __init__(
        self, num_steps: int | None = None, *, console: Console | None = None, seconds: float = _PLAIN_SECONDS
    ) -> None:
        self._num_steps = num_steps
        self._console = console or Console(file=sys.stderr, markup=False, highlight=False, emoji=False)
        self._seconds = seconds
        self._shown_at = -float("inf")
        self._live: Live | None = None

    def __call__(self, info: StepInfo) -> None:
        """Show a step."""
        if info.rank != 0 or not info.training:
            return
        is_last = self._num_steps is not None and info.step + 1 >= self._num_steps
        text = Text(self.text(info), no_wrap=True, overflow="ellipsis")
        if not self._console.is_terminal:
            if is_last or time.monotonic() - self._shown_at >= self._seconds:
                self._shown_at = time.monotonic()
                self._console.print(text, soft_wrap=True)
            return
        if self._live is None:
            self._live = Live(text, console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(text, refresh=True)
        if is_last:
            self.close()

    def text(self, info: StepInfo) -> str:
        """`step 12/100  loss 3.1416  215 ms  149 samples/s  9.5 K tokens/s  idle 12.3%  1.2 GiB`."""
        parts = [f"step {info.step}" + ("" if self._num_steps is None else f"/{self._num_steps}")]
        parts += [] if info.loss is None else [f"loss {info.loss:.4f}"]
        parts += [format_time(info.seconds)]
        rates = ((info.samples_per_second, "samples/s"), (info.tokens_per_second, "tokens/s"))
        parts += [f"{format_number(rate)} {what}" for rate, what in rates if rate is not None]
        parts += [] if info.bubble is None else [f"idle {info.bubble:.1%}"]
        parts += [] if info.peak_bytes is None else [format_bytes(info.peak_bytes)]
        return "  ".join(parts)

    def close(self) -> None:
        """Leave the last line where it is."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()


class TensorBoard:
    """Scalars of every step for TensorBoard, in a folder for each rank: `FOLDER/rank0` and so on.

    A training step writes smpc/step_seconds, smpc/samples_per_second, smpc/tokens_per_second, smpc/flops_per_second, smpc/bubble,
    smpc/loss, smpc/peak_bytes, as far as the rank knows them, and smpc/mfu with `peak_flops`, the FLOP/s of a device. Evaluation steps
    write the same under smpc/evaluation. Raises ConfigError if tensorboard is not installed.
    """

    def __init__(self, folder: str | Path, *, peak_flops: float | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"TensorBoard: the package tensorboard is not installed ({error}); pip install tensorboard"
            ) from None
        self._make = SummaryWriter
        self._folder = Path(folder)
        self._peak_flops = peak_flops
        self._writer: SummaryWriter | None = None

    def __call__(self, info: StepInfo) -> None:
        """Write a step."""
        if self._writer is None:
            self._writer = self._make(str(self._folder / f"rank{info.rank}"))
        for name, value in _scalars(info, self._peak_flops).items():
            self._writer.add_scalar(name, value, info.step)

    def close(self) -> None:
        """Write buffered values. This also happens when the script ends."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandB:
    """Scalars of every step for Weights & Biases, from rank 0: one run, which starts at the first step.

    `options` go to `wandb.init`, such as project="gpt" or mode="offline"; names and `peak_flops` are as for `TensorBoard`. Raises
    ConfigError if wandb is not installed.
    """

    def __init__(self, *, peak_flops: float | None = None, **options: Any) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(f"WandB: the package wandb is not installed ({error}); pip install wandb") from None
        self._init = wandb.init
        self._options = options
        self._peak_flops = peak_flops
        self._run: Any = None

    def __call__(self, info: StepInfo) -> None:
        """Log a step."""
        if info.rank != 0:
            return
        if self._run is None:
            self._run = self._init(**self._options)
        self._run.log(_scalars(info, self._peak_flops), step=info.step)

    def close(self) -> None:
        """End the run. This also happens when the script ends."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()


def _scalars(info: StepInfo, peak_flops: float | None) -> dict[str, float]:
    """The known values of a step, by the names under which they are written."""
    group = "smpc" if info.training else "smpc/evaluation"
    speed = info.flops_per_second
    found = {
        "step_seconds": info.seconds,
        "samples_per_second": info.samples_per_second,
        "tokens_per_second": info.tokens_per_second,
        "flops_per_second": speed,
        "mfu": None if speed is None or peak_flops is None else speed / peak_flops,
        "bubble": info.bubble,
        "loss": info.loss,
        "peak_bytes": info.peak_bytes,
    }
    return {f"{group}/{name}": float(value) for name, value in found.items() if value is not None}
