"""Which steps of a job are to be observed, and how `smpc run` tells its ranks.

    Observation("/tmp/here", Window(5, 8)).environment()
    {"SMPC_OBSERVE": "/tmp/here", "SMPC_OBSERVE_STEPS": "5:8"}

The ranks leave their records in the folder: see `smpc.observe.observer`. This file imports no torch, so that the launcher starts at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from smpc.config.numbers import MAX_COUNT, shown
from smpc.errors import ConfigError

FOLDER, STEPS = "SMPC_OBSERVE", "SMPC_OBSERVE_STEPS"  # environment variables


@dataclass(frozen=True, slots=True)
class Window:
    """The steps from `first` to `last` - 1; by default those after two that warm up."""

    first: int = 2
    last: int = 102

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last <= MAX_COUNT:
            raise ConfigError(f"steps: expected FIRST:LAST with 0 <= FIRST < LAST, found {self.first}:{self.last}")

    @property
    def memory_step(self) -> int | None:
        """The step in which memory is measured, whose times are not kept: the one before, but never the first of all, in which the
        optimizer has no state. So of 1:5 it is 1, and times are of 2 to 4. None: of 0:5, and where it would be the only step.
        """
        if self.first == 1:
            return 1 if self.last > 2 else None
        return self.first - 1 if self.first else None

    def __contains__(self, step: int) -> bool:
        return self.first <= step < self.last

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"

    @classmethod
    def parse(cls, text: str) -> Window:
        """`5:8` is steps 5, 6 and 7. Raises ConfigError."""
        first, _, last = text.partition(":")
        if not re.fullmatch(r"[0-9]{1,10}:[0-9]{1,10}", text):
            raise ConfigError(f"steps: expected FIRST:LAST such as 5:8, which is steps 5, 6 and 7, found {shown(text)}")
        return cls(int(first), int(last))


@dataclass(frozen=True, slots=True)
class Observation:
    """The request of `smpc run --report` and `--trace` to the ranks: to write records of the window's steps to a folder."""

    folder: str
    window: Window = Window()

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Observation | None:
        """From the environment; None if nothing is asked for. Raises ConfigError."""
        if not environ.get(FOLDER):
            return None
        try:
            return cls(environ[FOLDER], Window.parse(environ[STEPS]) if STEPS in environ else Window())
        except ConfigError as error:
            raise ConfigError(f"{STEPS}: {error}") from None

    def environment(self) -> dict[str, str]:
        """The inverse of `read`."""
        return {FOLDER: self.folder, STEPS: str(self.window)}
