"""When a job stalls: the position of every rank, and which one the others wait for.

Terms
    standing    what one rank says of itself: the place in its program, since when it is there, the Python stack of its main thread
    activity    what the main thread does, from its innermost frames:
                    waiting      in smpc's own receives: for a peer
                    reducing     in a backward pass, at whose end replicas reduce gradients: for a peer, or for itself
                    exchanging   in a collective of the program: of ranks that share operations, sequences or experts
                    collective   in a call of torch.distributed that the script, the model or torch makes
                    busy         anything else: the model, user code, data loading, asleep
                    silent       the rank did not answer: it has ended or is stopped, or native code holds Python's lock
    stalled     the rank at fault. Waiting ranks are victims, so it is the one of the most active kind; among those, the one furthest behind
                in the program, and then the one that has been longest at its place

Example, of two ranks:

    rank 0 stalled: nothing has moved for 30 s; step 3, pipeline rank 0, instruction 'F s0 m2' (stage 0, microbatch 2), there for 29 s, busy
      File "train.py", line 12, in forward
    the ranks are at
      rank 0: step 3, pipeline rank 0, instruction 'F s0 m2' (stage 0, microbatch 2), busy for 29 s
      rank 1: step 3, pipeline rank 1, instruction 'RECV e1 m2 from r0' (...), waiting for 30 s
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType

import torch

from smpc.executor.failure.process_reports import ProcessReport


def _executor_files(*names: str) -> tuple[str, ...]:
    """Files and folders of the executor, as frames name them."""
    paths = [Path(__file__).parents[1] / name for name in names]
    assert all(path.exists() for path in paths), paths
    return tuple(map(str, paths))


_WAITS = _executor_files("transport/gloo.py", "transport/nccl.py", "transport/loopback.py", "program/channels.py")
_TORCH = Path(torch.__file__).parent
_OF_TORCH = str(_TORCH / "distributed")
_EXCHANGES = _executor_files("collectives.py", "sequence", "host_memory", "transport/rings.py")
_AUTOGRAD = str(_TORCH / "autograd")
_MAX_FRAMES = 25
_MAX_COLLECTIVES = 3
_RECORDERS = (
    "_dump_nccl_trace_json",
    "_dump_fr_trace_json",
)  # NCCL's, which only some builds have, and gloo's; no public names


class Activity(StrEnum):
    """The activity of a rank's main thread; the earlier in this list, the more likely the others wait for it."""

    SILENT = "silent"
    BUSY = "busy"
    COLLECTIVE = "collective"
    EXCHANGING = "exchanging"
    REDUCING = "reducing"
    WAITING = "waiting"


WAITS = (Activity.COLLECTIVE, Activity.EXCHANGING, Activity.WAITING)  # for peers, and for nothing else


@dataclass(frozen=True, slots=True)
class Standing:
    """`progress`: (steps begun, instructions begun in the last of them; before the first one the phase of the start). `seconds`: how long
    at this place. `allowed`: how long it may go on.

    `flight`: the last collectives that torch's flight recorder has, where that is on. `fate`: what others can see of the process of a
    silent rank, whose `place` is the last that it has told.
    """

    rank: int
    activity: Activity
    place: str = ""
    progress: tuple[int, int] = (0, 0)
    seconds: float = 0.0
    allowed: float = 0.0
    stack: str = ""
    flight: str = ""
    fate: str = ""

    def to_json(self) -> str:
        """Its text in the store."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, rank: int, payload: bytes) -> Standing:
        """The inverse of `to_json`; a silent standing for anything else."""
        try:
            fields = json.loads(payload)
            activity = Activity(fields["activity"])
            step, position = (int(number) for number in fields["progress"])
            seconds, allowed = float(fields["seconds"]), float(fields["allowed"])
            place, stack, flight = str(fields["place"]), str(fields["stack"]), str(fields["flight"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return cls(rank, Activity.SILENT)
        return cls(rank, activity, place, (step, position), seconds, allowed, stack, flight)

    def __str__(self) -> str:
        if self.activity is Activity.SILENT:
            fate = self.fate or "the process has ended or is stopped, or native code holds Python's lock"
            return f"rank {self.rank}: no answer; {fate}{self.place and f'; it was last {self.place}'}"
        return f"rank {self.rank}: {self.place}, {self.activity} for {self.seconds:.0f} s"


def find_stalled(standings: Sequence[Standing]) -> Standing:
    """The rank that the others wait for."""
    order = list(Activity)
    return min(standings, key=lambda s: (order.index(s.activity), s.progress, -s.seconds, s.rank))


def report_of(
    standings: Sequence[Standing], timeout: float, *, key: str = "", gone: Sequence[int] = ()
) -> ProcessReport:
    """The report that all ranks show. `key`: the key of the configuration that limits the wait. `gone`: ranks that have ended meanwhile."""
    stalled = find_stalled([standing for standing in standings if not gone or standing.rank in gone])
    details = ["the ranks are at", *(f"  {standing}" for standing in standings)]
    if stalled.stack:
        details += [f"the Python stack of rank {stalled.rank}, innermost call last", stalled.stack.rstrip()]
    details += [f"last collectives of rank {s.rank}: {s.flight}" for s in standings if s.flight]
    if all(standing.activity in WAITS for standing in standings):
        details.append(
            "every rank waits, so they wait in different calls: make the same calls, in the same order, on all ranks"
        )
        details += [
            f"rank {standing.rank} waits in\n{standing.stack.rstrip()}" for standing in standings if standing != stalled
        ]
    if key:
        details.append(f"where this is slow and not stuck, raise {key} in the configuration of smp.init")
    _, _, where = str(stalled).partition(": ")
    what = f"stalled, nothing moved for {timeout:g} s{key and f' ({key})'}"
    if gone:
        what = "is gone, while all others wait"
    return ProcessReport(stalled.rank, f"rank {stalled.rank} {what}: {where}", "\n".join(details), True)


def activity_of(frame: FrameType | None, waits: Sequence[str], reduces: bool) -> Activity:
    """The activity of a thread with this innermost frame.

    `waits`: files, beside the executor's own, in which a rank waits for its peers. `reduces`: whether a backward pass may
    wait for replicas.
    """
    found = Activity.BUSY
    if frame is not None and reduces and frame.f_code.co_filename.startswith(_AUTOGRAD):
        return Activity.REDUCING
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith((*_WAITS, *waits)):
            return Activity.WAITING
        if file.startswith(_EXCHANGES):
            found = Activity.EXCHANGING
        elif file.startswith(_OF_TORCH):
            found = Activity.COLLECTIVE if found is Activity.BUSY else found
        elif not file.endswith("contextlib.py"):
            return found
        frame = frame.f_back
    return found


def stack_of(frame: FrameType | None) -> str:
    """The innermost frames, as in a traceback."""
    return "".join(traceback.format_stack(frame)[-_MAX_FRAMES:]) if frame is not None else ""


def frame_of(thread: int) -> FrameType | None:
    """A thread's innermost frame."""
    return sys._current_frames().get(thread)


def last_collectives() -> str:
    """The newest entries of torch's flight recorders; "" where they are off (TORCH_FR_BUFFER_SIZE) or missing."""
    return "; ".join(text for recorder in _RECORDERS for text in _recorded_collectives(recorder))


def _recorded_collectives(recorder: str) -> list[str]:
    """The collectives that torch's flight recorder knows of, as text."""
    try:
        dump = getattr(torch._C._distributed_c10d, recorder)
        # True: collectives too, not just communicators; False: also those that have completed.
        entries = json.loads(dump(True, False)).get("entries", [])
        return [
            f"{entry['profiling_name']} {entry['input_sizes']} in group {entry['process_group'][0]}, {entry['state']}"
            for entry in entries[-_MAX_COLLECTIVES:]
        ]
    except (AttributeError, RuntimeError, ValueError, KeyError, IndexError, TypeError):
        return []
