"""How a model limits the time that its rank waits for others, and tells them when it fails.

    with supervision.step(), supervision.guard():       a step: how long it may take; what ends the job if it fails
    with supervision.wait("state_dict", 1800.0):        any other exchange

`step` and `guard` are the monitor's own contexts, bound once by `follow`; while the first step is not over, steps take longer.

The session's `smpc.executor.FailureMonitor` does the work. A rank that is alone waits for nobody, so nothing here has an effect.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from smpc.executor.failure.start import StartPhase
from smpc.v1.session.process_state import Session
from smpc.v1.session.skipped_calls import Whereabouts


class Supervision:
    """The supervision of one model, which `follow` sets. `first`: the first model's supervision, if this is another model."""

    def __init__(self, session: Session, first: Supervision | None = None) -> None:
        self._monitor = session.monitor
        self._start_timeout = session.config.start_timeout
        self.step: Callable[[], AbstractContextManager[None]] = nullcontext  # limits how long a step may take
        # Tells the other ranks what is raised in the body, and raises PeerError where another one has failed.
        self.guard: Callable[[], AbstractContextManager[None]] = nullcontext
        self.whereabouts: Whereabouts | None = None if first is None else first.whereabouts
        if self._monitor is not None and first is None:
            self.whereabouts = Whereabouts(session, self._monitor)
            self._monitor.polled = self.whereabouts.answer

    def follow(self, where: Callable[[], str], position: Callable[[], int], close: Callable[[], None]) -> None:
        """Sets how to ask what the rank does and how far it has come, and how to end its connections. Call it first."""
        monitor = self._monitor
        if monitor is None:
            return
        usual = partial(monitor.watch, where, position=position)

        def step() -> AbstractContextManager[None]:
            if monitor.start.is_over:
                self.step = usual
                return usual()
            monitor.start.enter(StartPhase.STEP)
            return usual(timeout=self._start_timeout)

        self.step, self.guard = step, partial(monitor.step, where, close)

    @property
    def step_timeout(self) -> float | None:
        """Seconds that a step may take now; None: `step_timeout`."""
        return None if self._monitor is None or self._monitor.start.is_over else self._start_timeout

    def wait(self, what: str, timeout: float | None = None) -> AbstractContextManager[None]:
        """Limits how long `what` may take, an exchange outside a step; `timeout` is `step_timeout` if None."""
        return nullcontext() if self._monitor is None else self._monitor.watch(lambda: what, timeout=timeout)

    def allow_compilation(self) -> None:
        """Give the current step the time limit of a step that compiles, from now on."""
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
