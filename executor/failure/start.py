"""The start of a job: what a rank does from `smp.init` to the end of its first step, and how long others wait for it.

Terms
    phase       how far the rank has come, see `StartPhase`; every change is told in the store, so that it is known of a rank that stops
    waits       the main thread is inside one and the same call of torch.distributed, or of smpc's own exchanges, from look to look of the
                watcher. Whoever waits longer than `timeout` asks all ranks for their position, and the job ends with the answer
    gone        a rank that has ended, or has called `smp.shutdown`, before its first step. Nobody can go on who waits for it

Only those who wait have a clock: a rank that builds its model for an hour is ended by the others, if they wait for it longer than
`timeout`, and never by itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from types import FrameType

from torch.distributed.distributed_c10d import Store

from smpc.executor.failure.process_reports import Process, sign_process

LEFT = "smpc/left"  # store key: ranks that have ended, or left the session, each with a comma behind it
_PATIENCE = 3.0  # seconds that a rank waits before it looks for ranks that are gone, and then between two looks


class StartPhase(IntEnum):
    """The phases of a rank until it trains."""

    INIT = 0
    SCRIPT = 1
    MODEL = 2
    READY = 3
    STEP = 4

    def __str__(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    StartPhase.INIT: "in smp.init",
    StartPhase.SCRIPT: "after smp.init, before smp.DistributedModel (building the model, loading data, other code of the script)",
    StartPhase.MODEL: "in smp.DistributedModel",
    StartPhase.READY: "after smp.DistributedModel, before its first step (the optimizer, data, other code of the script)",
    StartPhase.STEP: "in its first step",
}


class Start:
    """The start of one rank. `enter`, `within` and `end` are for the main thread, the rest for the watcher of
    `smpc.executor.failure.monitor`.

    `timeout`: None where there is no start to watch. `ended` tells the ranks that a launcher knows to have ended.
    """

    def __init__(
        self, store: Store, rank: int, timeout: float | None, ended: Callable[[], Iterable[int]] = lambda: ()
    ) -> None:
        self._store, self._rank, self._ended = store, rank, ended
        self._is_watched = timeout is not None
        self.timeout = float("inf") if timeout is None else timeout
        self.phase = StartPhase.INIT
        self.is_over = timeout is None
        self._details: list[str] = []
        self._allowed_until = 0.0
        self._signed = ""
        self._processes: Mapping[int, Process] = {}
        self._call: int | None = None  # the one in which the main thread waits
        self._since = 0.0
        self._deadline = float("inf")
        self._next_look = 0.0
        if self._is_watched:
            self.sign()

    def enter(self, phase: StartPhase, detail: str = "") -> None:
        """The rank has come to a phase, or to a part of it; it never goes back."""
        if self.is_over or phase < self.phase:
            return
        self.phase, self._details = phase, [detail] if detail else []
        self.sign()

    @contextlib.contextmanager
    def within(self, what: str, seconds: float = 0.0) -> Iterator[None]:
        """The rank is in such a call, which may work for so long while others wait for it."""
        outer = self._allowed_until
        self._details.append(what)
        self._allowed_until = max(outer, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._allowed_until = outer
            if what in self._details:
                self._details.remove(what)

    def end(self) -> None:
        """The first step is done."""
        if not self.is_over:
            self.is_over, self._deadline = True, float("inf")
            self.sign()

    def know(self, processes: Mapping[int, Process]) -> None:
        """The processes of the other ranks."""
        self._processes = {rank: process for rank, process in processes.items() if process.is_here}

    @property
    def place(self) -> str:
        """Phase and call."""
        if self.is_over:
            return "after its first step"
        return ": ".join([str(self.phase), *self._details[-1:]])

    @property
    def allowed(self) -> float:
        """Seconds that this rank's activity may still take."""
        return max(self._allowed_until - time.monotonic(), 0.0)

    def sign(self) -> None:
        """Tell the others where this rank is, if that is news."""
        place = self.place
        if place != self._signed:
            self._signed = place
            with contextlib.suppress(RuntimeError):  # the store may have ended with its host
                sign_process(self._store, self._rank, place)

    def leave(self) -> None:
        """Tell the others that this rank will do nothing more."""
        if not self._is_watched:
            return
        with contextlib.suppress(RuntimeError):
            self._store.append(LEFT, f"{self._rank},")  # type: ignore[attr-defined]

    # -- the watcher ---------------------------------------------------------------------------------------------------

    def look(self, frame: FrameType | None, waits: bool, now: float) -> None:
        """Note the activity of the main thread."""
        call = _call_of(frame) if waits and not self.is_over else None
        if call is None or call != self._call:
            self._since, self._next_look = now, now + _PATIENCE
            self._deadline = float("inf") if call is None else now + self.timeout
        self._call = call
        if not self.is_over:
            self.sign()

    @property
    def waited(self) -> float:
        """Seconds that the main thread has waited."""
        return 0.0 if self._call is None else time.monotonic() - self._since

    @property
    def is_late(self) -> bool:
        """Whether this rank has waited for too long."""
        return time.monotonic() > self._deadline and not self.is_over

    def extend(self, seconds: float) -> None:
        """Wait for so long from now on."""
        self._deadline = max(self._deadline, time.monotonic() + seconds)

    def gone(self) -> list[int]:
        """The others that are gone, if this rank waits; asked now and then."""
        now = time.monotonic()
        if self.is_over or self._call is None or now < self._next_look:
            return []
        self._next_look = now + _PATIENCE
        return self.all_gone()

    def fate(self, rank: int) -> str:
        """What is visible of a rank's process; "" if nothing."""
        return self._processes[rank].fate if rank in self._processes else ""

    def dead(self) -> list[int]:
        """The ranks of this host whose processes have ended."""
        return [rank for rank, process in sorted(self._processes.items()) if process.has_ended]

    def all_gone(self) -> list[int]:
        """The others that are gone."""
        found = set(self.dead())
        with contextlib.suppress(RuntimeError):  # the store's host may be the one
            found |= {*self._ended(), *self.left()}
        return sorted(found - {self._rank})

    def left(self) -> list[int]:
        """The ranks that have said that they will do nothing more. RuntimeError without the store."""
        told = self._store.get(LEFT).decode(errors="replace") if self._store.check([LEFT]) else ""
        return [int(number) for number in told.split(",") if number.isascii() and number.isdigit()]


def _call_of(frame: FrameType | None) -> int:
    """Sets a call apart from the next one of the same function, but for two that a tight loop makes."""
    places = []
    while frame is not None:
        places.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(places))
