"""Detects that a rank which others wait for, to save, load or gather state, has continued without them.

Every rank runs the same script, and all ranks of a replica the same steps. So a rank of this replica that has begun a later step than this
one has passed the call that this one is in, and will not make it. The same holds for a rank that waits in a collective call while all
others wait as well. Then the call fails in seconds, naming that rank, and not after `checkpoint_timeout`. A rank that computes, reads data
or writes files is waited for.

    whereabouts.answer()          looks whether somebody asks for this rank, and answers; the monitor's thread calls it twice a second
    whereabouts.are_silent(ranks) whether one of these has been asked in vain, so that it may have died
    whereabouts.skipped(ranks)    asks for these ranks, of which none has come; what is known of one that will not come, or None

Terms
    answer      of a rank, in the job's store: how many steps it has begun, and, while its main thread is in a collective call, where
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import PrefixStore, Store

from smpc.checkpoint import channel
from smpc.executor.failure.monitor import FailureMonitor
from smpc.executor.failure.stall import WAITS, activity_of, frame_of, stack_of
from smpc.mesh import Axis
from smpc.v1.session import step_messages
from smpc.v1.session.pipeline_groups import job_store
from smpc.v1.session.process_state import Session, state

_BLOCKED_SECONDS = 10.0  # in which a collective call that others have entered would end
_SILENT_SECONDS = 4.0  # in which the monitor's thread looks eight times
_MAX_ANSWER = 20_000


@dataclass(frozen=True, slots=True)
class Answer:
    """`stack`: of a main thread in a collective call, else empty."""

    steps: int
    stack: str

    @staticmethod
    def read(payload: bytes) -> Answer | None:
        """None for text that is not an answer: anybody who reaches the store can write to it."""
        try:
            fields = json.loads(payload[:_MAX_ANSWER])
            return Answer(int(fields["steps"]), str(fields["stack"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None


class Whereabouts:
    """One rank's end. `monitor` knows how many steps it has begun."""

    def __init__(self, session: Session, monitor: FailureMonitor) -> None:
        self._rank, self._size = session.rank, session.mesh.world_size
        self._replica = frozenset(session.mesh.group(Axis.MP, session.rank))
        self._monitor, self._main = monitor, threading.get_ident()
        # A connection for each thread: a waiting thread would block the other.
        self._answering, self.store = (_store() for _ in range(2))
        self._unanswered: dict[int, float] = {}  # since when
        self._seen: dict[int, tuple[str, float]] = {}  # where ranks are in collective calls, and since when

    def answer(self) -> None:
        """See the module's docstring."""
        key = f"asked/{self._rank}"
        with contextlib.suppress(RuntimeError):  # the store's host has died; the monitor reports it
            if self._answering.check([key]):
                self._answering.delete_key(key)
                frame = frame_of(self._main)
                is_waiting = activity_of(frame, (step_messages.__file__, channel.__file__), False) in WAITS
                said = {
                    "steps": self._monitor.num_steps,
                    "stack": stack_of(frame)[-_MAX_ANSWER // 2 :] if is_waiting else "",
                }
                self._answering.set(f"answer/{self._rank}", json.dumps(said))

    def skipped(self, ranks: Sequence[int]) -> str | None:
        """A report on one of these ranks that will not come; None if they may. Call it every second or so."""
        answers = {rank: self._ask(rank) for rank in range(self._size) if rank != self._rank}
        for rank in ranks:
            found = answers.get(rank)
            if found is not None and rank in self._replica and found.steps > self._monitor.num_steps:
                return f"rank {rank} has gone on to step {found.steps} without it"
        now = time.monotonic()
        for rank, found in answers.items():
            stack = "" if found is None else found.stack
            if rank not in self._seen or self._seen[rank][0] != stack:
                self._seen[rank] = stack, now
        if all(stack and now - since > _BLOCKED_SECONDS for stack, since in self._seen.values()):
            last = self._seen[ranks[0]][0].strip().splitlines()
            place = next((line.strip() for line in reversed(last) if line.lstrip().startswith("File")), "")
            return f"rank {ranks[0]} waits elsewhere, and so does every other: {place}"
        return None

    def are_silent(self, ranks: Sequence[int]) -> bool:
        """See the module's docstring; after `skipped`."""
        now = time.monotonic()
        return any(now - self._unanswered.get(rank, now) > _SILENT_SECONDS for rank in ranks)

    def _ask(self, rank: int) -> Answer | None:
        """The last answer of a rank; also requests the next."""
        if self.store.check([f"asked/{rank}"]):
            self._unanswered.setdefault(rank, time.monotonic())
        else:
            self._unanswered.pop(rank, None)
        self.store.set(f"asked/{rank}", "")
        key = f"answer/{rank}"
        return Answer.read(self.store.get(key)) if self.store.check([key]) else None


def _store() -> Store:
    return PrefixStore(f"whereabouts/{state.session_number}", job_store())
