"""Which rank failed first, and the text for the user."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smpc.errors import printable

_CONNECTION_ERRORS = ("DistBackendError", "DistNetworkError")
_CONNECTION_WORDS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How one rank ended. `report` has the fields that the worker wrote; it is empty when the process just died.

    `forced`: the launcher had begun to end all ranks by then. `exit_code` is None while the process that has written a report still lives.
    """

    rank: int
    exit_code: int | None  # negative: killed by that signal
    observed: float  # seconds since the epoch
    report: Mapping[str, Any]
    forced: bool = False

    @property
    def status(self) -> int:
        """The exit status that tells this failure."""
        if self.report:
            return int(self.report["status"])
        assert self.exit_code is not None, "a rank without a report has ended"
        return self.exit_code if self.exit_code > 0 else 128 - self.exit_code

    @property
    def order(self) -> tuple[int, float, int]:
        """Failures sort by cause first, consequences last."""
        if self.report:
            told = 2 if "PeerError" in self.report["smpc_classes"] else int(self.lost_connection)
            return (told, self.report["time"], self.rank)
        # Deaths without a report: SIGABRT is how communication libraries end a process whose peer is gone. Any other that is not
        # the launcher's doing comes before the peers that saw the connection break.
        kind = 3 if self.forced else int(self.exit_code == -signal.SIGABRT)
        return (kind, self.observed - 1, self.rank)

    @property
    def lost_connection(self) -> bool:
        """Whether the report is of torch.distributed, that a peer is gone: whatever ended that one came before."""
        text = str(self.report.get("text", ""))
        return self.report.get("type") in _CONNECTION_ERRORS or any(words in text for words in _CONNECTION_WORDS)

    @property
    def is_consequence(self) -> bool:
        """Whether the report only says that another rank is gone or has failed."""
        return bool(self.report) and self.order[0] > 0

    @property
    def at_fault(self) -> int:
        """The global rank that the report blames."""
        return int(self.report.get("rank", self.rank))

    @property
    def summary(self) -> str:
        """One line: what happened to the rank."""
        if self.report and not self.report["type"]:
            return f"ended: {self.report['text']}"
        if self.report and not self.report["is_exit"]:
            return f"failed: {self.report['type']}: {self.report['text']}".splitlines()[0]
        if self.report or (self.exit_code or 0) > 0:
            return f"exited with status {self.status}"
        return f"was killed by signal {-(self.exit_code or 0)} ({_signal_name(-(self.exit_code or 0))})"


def read_report(path: Path) -> dict[str, Any]:
    """The worker's report in a file; {} if there is none, or it is not the worker's."""
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        report = message["extraInfo"]
        complete = "smpc_classes" in report
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return dict(report) if complete else {}


def describe(failures: Sequence[RankFailure], num_ranks: int, left_early: Sequence[int] = ()) -> str:
    """The text for the user when a job failed: the first failure in full, then a line for each later one.

    `left_early`: the ranks that have ended with status 0 by themselves. Where the others only say that a peer is gone, it was those.
    """
    return readable("\n".join(_failures_as_text(failures, num_ranks, left_early)))


def readable(text: str) -> str:
    """The text with control characters as escapes: names and values in errors come from data, and must not steer a terminal."""
    return "\n".join(printable(line.replace("\t", "    ")) for line in text.split("\n"))


def _failures_as_text(failures: Sequence[RankFailure], num_ranks: int, left_early: Sequence[int]) -> list[str]:
    """The lines about ranks that failed, the first one first."""
    first, *others = failures
    if first.report and "ConfigError" in first.report["smpc_classes"]:
        return [f"smpc: error: {line}" for line in first.report["text"].splitlines()]
    if first.report and not first.report["type"]:
        return [f"smpc: error: {first.report['text']}\n{first.report['py_callstack']}".rstrip()]
    consequence = ", which ended the other ranks" if num_ranks > 1 else ""
    lines = [f"smpc: error: rank {first.rank} {first.summary}{consequence}"]
    if first.is_consequence and left_early:
        gone = ", ".join(map(str, left_early))
        lines = [
            f"smpc: error: rank {gone} ended with status 0 while rank {first.rank} still needed its peers:",
            first.report["py_callstack"].rstrip(),
        ]
    elif first.report and not first.report["is_exit"]:
        lines = [f"smpc: error: rank {first.rank} failed{consequence}:", first.report["py_callstack"].rstrip()]
    told = [other for other in others if not other.forced and other.at_fault == other.rank and other.order[0] < 2]
    lines += [f"smpc: after that, rank {other.rank} {other.summary}" for other in told]
    return lines


def headline_of_failure(failure: RankFailure) -> str:
    """One line for the other ranks and the other nodes."""
    if failure.report and not failure.report["type"]:
        return str(failure.report["text"])
    return f"rank {failure.rank} {failure.summary}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return "no name"
