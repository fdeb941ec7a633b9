"""What ranks tell each other in the job's store about their processes: who they are, and which of them failed first.

Each rank signs with a description of its process. Other processes of its host can see more of it.

    sign(store, rank, place)                 this process is that rank, and was last there
    signed = signature(store, rank)          None where there is none
    print(signed.process.fate)               "process 4711 is stopped"; "" if it is on another host

Terms
    place   what the rank was doing when it signed, for people
    host    names the kernel and the process namespace: what /proc says of a process id counts only where they are the same

Nothing that is read from the store is run; what is no signature of this format counts as none.

The first rank that fails publishes a record, for the others to show.

Terms
    report      JSON under the key `smpc/error`: the rank that is at fault, where it was, and a text for people. Written once: the first
                failure is the one that is shown

Whoever reaches the store's port can write to it. Nothing read from it is ever unpickled or run. A value that is not a record of this
format is itself the failure: it is shown, shortened and escaped, under `rank` -1.

Example: `publish(store, Report(3, "rank 3 failed in 'F s1 m2'", traceback))`, on another rank `find(store).text`
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.distributed.distributed_c10d import Store

SIGNATURE = "smpc/process"  # store key, with the rank behind it
_STOPPED = ("T", "t")
_ENDED = ("Z", "X", "")


@dataclass(frozen=True, slots=True)
class Process:
    """A process: `born` is the start time that its kernel gives, which sets it apart from later ones with its number."""

    pid: int
    born: int
    host: str

    @classmethod
    def own(cls) -> Process:
        """This one."""
        _, born = _process_status(os.getpid())
        return cls(os.getpid(), born, _host_identity())

    @property
    def is_here(self) -> bool:
        """Whether this host's /proc tells of it."""
        return self.host == _host_identity() != ""

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have ended."""
        return self.is_here and self._letter in _ENDED

    @property
    def fate(self) -> str:
        """The fate of a process that does not answer; "" if nothing can be known."""
        if not self.is_here:
            return ""
        letter = self._letter
        if letter in _ENDED:
            return f"process {self.pid} has ended"
        if letter in _STOPPED:
            return f"process {self.pid} is stopped (by SIGSTOP, or a debugger)"
        return f"process {self.pid} lives, so native code holds Python's lock"

    @property
    def _letter(self) -> str:
        letter, born = _process_status(self.pid)
        return letter if born == self.born else ""


@dataclass(frozen=True, slots=True)
class ProcessSignature:
    """A rank's description of itself."""

    process: Process
    place: str

    def to_json(self) -> str:
        """Its text in the store."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, payload: bytes) -> ProcessSignature | None:
        """The inverse of `to_json`; None for anything else."""
        try:
            fields = json.loads(payload)
            process = fields["process"]
            return cls(Process(int(process["pid"]), int(process["born"]), str(process["host"])), str(fields["place"]))
        except (ValueError, TypeError, KeyError, RecursionError):
            return None


def sign_process(store: Store, rank: int, place: str) -> None:
    """Say that this process is that rank, and where it is."""
    store.set(f"{SIGNATURE}/{rank}", ProcessSignature(Process.own(), place).to_json())


def signature(store: Store, rank: int) -> ProcessSignature | None:
    """A rank's last description."""
    key = f"{SIGNATURE}/{rank}"
    return ProcessSignature.read(store.get(key)) if store.check([key]) else None


def _process_status(pid: int) -> tuple[str, int]:
    """The letter of a process's state and its start time; ("", 0) of none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return "", 0


def _host_identity() -> str:
    """The kernel and the process namespace of this process; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() + os.readlink(
            "/proc/self/ns/pid"
        )
    except OSError:
        return ""


REPORT = "smpc/error"
_SHOWN_BYTES = 60
FOREIGN = -1


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """`rank`: global rank at fault. `headline`: one line. `text`: the rest: a traceback, stacks. `is_stall`: no exception."""

    rank: int
    headline: str
    text: str = ""
    is_stall: bool = False

    def to_json(self) -> str:
        """Its text in the store."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, payload: bytes) -> ProcessReport:
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
    def _of_junk(cls, payload: bytes) -> ProcessReport:
        shown = f"{payload[:_SHOWN_BYTES]!r}{'...' if len(payload) > _SHOWN_BYTES else ''}"
        return cls(
            FOREIGN,
            f"the store of this job has {len(payload)} bytes under the key {REPORT!r} that no rank of the job wrote: {shown}; another "
            "process has written to the store's port, so nothing in it can be relied on; start the job again, on a host of its own",
        )

    def __str__(self) -> str:
        return f"{self.headline}:\n{self.text}" if self.text else self.headline


def publish(store: Store, report: ProcessReport) -> None:
    """Write a report, if it is the job's first."""
    store.compare_set(REPORT, "", report.to_json())


def find(store: Store) -> ProcessReport | None:
    """The job's report, if there is one."""
    return ProcessReport.read(store.get(REPORT)) if store.check([REPORT]) else None
