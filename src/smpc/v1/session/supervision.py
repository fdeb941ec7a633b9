"""How a model limits the time that its rank waits for others, and tells them when it fails.

    with supervision.step(), supervision.guard():       a step: how long it may take; what ends the job if it fails
    with supervision.wait("state_dict", 1800.0):        any other exchange

The work is that of the session's `smpc.executor.FailureMonitor`. A rank that is alone waits for nobody: then nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from smpc.executor.failure.start import Phase
from smpc.v1.session.state import Session
from smpc.v1.session.whereabouts import Whereabouts


class Supervision:
    """Of one model, whose steps it is told by `follow`. `first`: that of the script's first model, if this is another."""

    def __init__(self, session: Session, first: Supervision | None = None) -> None:
        self._monitor = session.monitor
        self._start_timeout = session.config.start_timeout
        self._first = first or self
        self.num_steps = 0  # that this rank has begun, of any model; the first one counts
        self.whereabouts: Whereabouts | None = None if first is None else first.whereabouts
        if self._monitor is not None and first is None:
            self.whereabouts = Whereabouts(session, lambda: self.num_steps)
            self._monitor.polled = self.whereabouts.answer

    def follow(self, where: Callable[[], str], position: Callable[[], int], close: Callable[[], None]) -> None:
        """What the rank does in a step, how far it has come, and what ends its connections; before anything is supervised."""
        self._where, self._position, self._close = where, position, close

    @property
    def step_timeout(self) -> float | None:
        """Seconds that a step may take now; None: `step_timeout`."""
        return None if self._monitor is None or self._monitor.start.is_over else self._start_timeout

    def step(self) -> AbstractContextManager[None]:
        """Limits how long a step may take."""
        self._first.num_steps += 1
        if self._monitor is None:
            return nullcontext()
        if not self._monitor.start.is_over:
            self._monitor.start.enter(Phase.STEP)
            return self._monitor.watch(self._where, timeout=self._start_timeout, position=self._position)
        return self._monitor.watch(self._where, position=self._position)

    def wait(self, what: str, timeout: float | None = None) -> AbstractContextManager[None]:
        """Limits how long `what` may take, an exchange outside a step; `timeout` is `step_timeout` if None."""
        return nullcontext() if self._monitor is None else self._monitor.watch(lambda: what, timeout=timeout)

    def guard(self) -> AbstractContextManager[None]:
        """Tells the other ranks what is raised in the body, and raises PeerError where another one has failed."""
        return nullcontext() if self._monitor is None else self._monitor.step(self._where, self._close)

    def allow_compilation(self) -> None:
        """Give the current step as long as one that compiles, from now on."""
        if self._monitor is not None:
            self._monitor.extend(self._start_timeout)

    def report(self, error: BaseException, where: str = "") -> None:
        """Tell the other ranks of an error that ends no step."""
        if self._monitor is not None:
            self._monitor.report(error, where)

    def end_start(self) -> None:
        """The first step is done."""
        if self._monitor is not None and not self._monitor.start.is_over:
            self._monitor.start.end()
