"""Calibrates and writes the file; what every rank runs."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

import torch

from smpc.calibration.device_toml import to_toml
from smpc.calibration.measure import calibrate
from smpc.calibration.ranks import Ranks
from smpc.errors import ConfigError


def calibrate_to(path: str, seconds: float, show: Callable[..., None] = lambda *_: None) -> None:
    """Measure this machine in about so many seconds; rank 0 writes the file and says so. ConfigError where it cannot be written."""
    ranks = Ranks.here()
    device = calibrate(ranks, seconds, show)
    if ranks.rank == 0:
        text = to_toml(device, _source(ranks))
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out {path!r}: cannot write it: {error.strerror}") from error
    ranks.end()


def _source(ranks: Ranks) -> str:
    day = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    at_once = "one process" if ranks.size == 1 else f"{ranks.size} processes at once"
    threads = torch.get_num_threads()
    return f"smpc calibrate, {day}: torch {torch.__version__}, {at_once}, {threads} thread{'s' * (threads > 1)} each"
