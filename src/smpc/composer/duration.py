"""How long and how often: `4ba` is 4 batches, `160ep` 160 epochs, `1000sp` samples, `1000tok` tokens; a number counts epochs.

>>> Duration.parse("2ba", "save_interval")
Duration(count=2, unit='ba')
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from smpc.errors import ConfigError, ConfigTypeError

UNITS = {"ep": "epoch", "ba": "batch", "sp": "sample", "tok": "token"}


@dataclass(slots=True)
class Timestamp:
    """The progress of a run, over all ranks: whole epochs, batches, samples, tokens; and `batch_in_epoch`, of the present epoch."""

    epoch: int = 0
    batch: int = 0
    sample: int = 0
    token: int = 0
    batch_in_epoch: int = 0

    def fields(self) -> dict[str, int]:
        """The fields that file names may contain."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Duration:
    """A count of one unit: `ep`, `ba`, `sp` or `tok`."""

    count: int
    unit: str

    def __str__(self) -> str:
        """Its text, as the user gave it."""
        return f"{self.count}{self.unit}"

    @classmethod
    def parse(cls, value: object, name: str) -> Duration:
        """Read an argument called `name`. Raises ConfigError, or ConfigTypeError for a value that is neither text nor a number."""
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ConfigTypeError(f"{name}: expected text such as 4ba or 10ep, or a number of epochs, found {value!r}")
        text = f"{value}ep" if isinstance(value, int) else value.strip()
        found = re.fullmatch(r"([0-9]{1,18})(ep|ba|sp|tok)", text)
        if found is None or int(found[1]) < 1:
            raise ConfigError(f"{name}: expected a number of at least 1 and ep, ba, sp or tok, found {value!r}")
        return cls(int(found[1]), found[2])

    def is_over(self, now: Timestamp) -> bool:
        """Whether so much has been trained."""
        return int(getattr(now, UNITS[self.unit])) >= self.count

    def passed(self, before: Timestamp, now: Timestamp) -> bool:
        """Whether a multiple of this duration is between the two times, the end included."""
        name = UNITS[self.unit]
        return int(getattr(before, name)) // self.count < int(getattr(now, name)) // self.count
