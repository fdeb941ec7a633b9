"""The record of the first rank that fails, in the store that all ranks share, for the others to show.

Terms
    report      JSON under the key `smpc/error`: the rank that is at fault, where it was, and a text for people. Written once: the first
                failure is the one that is shown

Whoever reaches the store's port can write to it. Nothing read from it is ever unpickled or run. A value that is not a record of this
format is itself the failure: it is shown, shortened and escaped, under `rank` -1.

Example: `publish(store, Report(3, "rank 3 failed in 'F s1 m2'", traceback))`, on another rank `find(store).text`
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from torch.distributed.distributed_c10d import Store

REPORT = "smpc/error"
_SHOWN_BYTES = 60
FOREIGN = -1


@dataclass(frozen=True, slots=True)
class Report:
    """`rank`: global rank at fault. `headline`: one line. `text`: the rest: a traceback, stacks. `is_stall`: no exception."""

    rank: int
    headline: str
    text: str = ""
    is_stall: bool = False

    def to_json(self) -> str:
        """Its text in the store."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, payload: bytes) -> Report:
        """The report in these bytes; of other bytes, a report that says so."""
        try:
            fields = json.loads(payload)
            rank, headline, text, is_stall = (fields[name] for name in ("rank", "headline", "text", "is_stall"))
        except (ValueError, TypeError, KeyError, RecursionError):
            return cls._of_junk(payload)
        if (type(rank), type(headline), type(text), type(is_stall)) != (int, str, str, bool) or len(fields) != 4:
            return cls._of_junk(payload)
        return cls(rank, headline, text, is_stall)

    @classmethod
    def _of_junk(cls, payload: bytes) -> Report:
        shown = f"{payload[:_SHOWN_BYTES]!r}{'...' if len(payload) > _SHOWN_BYTES else ''}"
        return cls(
            FOREIGN,
            f"the store of this job has {len(payload)} bytes under the key {REPORT!r} that no rank of the job wrote: {shown}; another "
            "process has written to the store's port, so nothing in it can be relied on; start the job again, on a host of its own",
        )

    def __str__(self) -> str:
        return f"{self.headline}:\n{self.text}" if self.text else self.headline


def publish(store: Store, report: Report) -> None:
    """Write a report, if it is the job's first."""
    store.compare_set(REPORT, "", report.to_json())


def find(store: Store) -> Report | None:
    """The job's report, if there is one."""
    return Report.read(store.get(REPORT)) if store.check([REPORT]) else None
