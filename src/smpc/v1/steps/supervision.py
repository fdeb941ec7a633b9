"""How a model limits the time that its rank waits for others, and tells them when it fails.

    with supervision.step(), supervision.guard():       a step: how long it may take; what ends the job if it fails
    with supervision.wait("state_dict", 1800.0):        any other exchange

The work is that of `smpc.executor.FailureMonitor`. A rank that is alone waits for nobody: then nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from smpc.executor import FailureMonitor
from smpc.v1.state import Session
from smpc.v1.steps.connections import make_monitor


class Supervision:
    """Of one model. `where` says what the rank does in a step, `position` how far it has come, `close` ends its connections."""

    def __init__(
        self, session: Session, where: Callable[[], str], position: Callable[[], int], close: Callable[[], None]
    ) -> None:
        self._monitor: FailureMonitor | None = make_monitor(session) if session.mesh.world_size > 1 else None
        self._start_timeout = session.config.start_timeout
        self._where, self._position, self._close = where, position, close
        self.has_started = False  # the first step, which compiles, may take longer

    @property
    def step_timeout(self) -> float | None:
        """Seconds that a step may take now; None: `step_timeout`."""
        return None if self.has_started else self._start_timeout

    def step(self) -> AbstractContextManager[None]:
        """Limits how long a step may take."""
        if self._monitor is None:
            return nullcontext()
        return self._monitor.watch(self._where, timeout=self.step_timeout, position=self._position)

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

    def stop(self) -> None:
        """End the monitor's thread."""
        if self._monitor is not None:
            self._monitor.stop()
