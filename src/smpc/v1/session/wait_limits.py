"""How long a session's ranks wait for each other, and the error for a rank that does not come.

    make_monitor(...)                           in `smp.init`, as soon as the ranks have met
    with exchange("smp.barrier(WORLD)"): ...    a call of torch.distributed, which waits for other ranks
    enter(Phase.MODEL)                          what this rank does, until its first step is done

`smpc.executor.FailureMonitor` does the work, one for each session. A rank that is alone waits for nobody, so nothing here has an
effect.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import Store

from smpc.config import Config
from smpc.executor import FailureMonitor
from smpc.executor.failure.start import StartPhase
from smpc.launch.rendezvous import ENDED
from smpc.mesh import Mesh
from smpc.v1.session.process_state import state
from smpc.v1.session.step_errors import tell_launcher

_PACKAGE = Path(__file__).parents[2]
# Where a rank waits for its peers, beside the calls of torch.distributed.
_WAITS = tuple(
    str(_PACKAGE / name)
    for name in (
        "v1/session/step_messages.py",
        "v1/steps/join/join.py",
        "checkpoint/channel.py",
        "experts/shuffle.py",
        "optimizers/norm_groups.py",
    )
)
assert all(map(os.path.exists, _WAITS)), _WAITS


def make_monitor(store: Store, config: Config, mesh: Mesh, rank: int, session: int) -> FailureMonitor:
    """Watches this process, and the others' reports. `store`: the job's, on a connection of its own."""
    return FailureMonitor(
        store,
        rank,
        mesh.world_size,
        step_timeout=config.step_timeout,
        waits=_WAITS,
        reduces=mesh.dp_size > 1,
        on_end=tell_launcher,
        start_timeout=config.start_timeout,
        ended=lambda: ranks_that_ended(store),
        session=session,
    )


def ranks_that_ended(launcher: Store) -> Sequence[int]:
    """The ranks that have ended with status 0, if a launcher reports them."""
    told = launcher.get(ENDED).decode() if launcher.check([ENDED]) else ""
    return [int(number) for number in told.split(",") if number.isdecimal()]


def longest_timeout(config: Config) -> float:
    """Seconds that an exchange of the script's own may take, which no key limits."""
    return max(config.start_timeout, config.step_timeout, config.checkpoint_timeout)


def exchange(what: str, works: float = 0.0) -> AbstractContextManager[None]:
    """An exchange with other ranks, outside of steps. `works`: seconds that a rank may work in it while others wait."""
    session = state.current
    if session is None or session.monitor is None:
        return nullcontext()
    return session.monitor.exchange(what, longest_timeout(session.config), works)


def loading(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that loads: before the first step is done, others wait for a rank in it for `checkpoint_timeout`."""

    @functools.wraps(function)
    def load(*args: Any, **kwargs: Any) -> Any:
        session = state.current
        if session is None or session.monitor is None:
            return function(*args, **kwargs)
        with session.monitor.start.within(f"smp.{function.__name__}", session.config.checkpoint_timeout):
            return function(*args, **kwargs)

    return load


def enter(phase: StartPhase, detail: str = "") -> None:
    """This rank has come to a phase of its start."""
    session = state.current
    if session is not None and session.monitor is not None:
        session.monitor.start.enter(phase, detail)
