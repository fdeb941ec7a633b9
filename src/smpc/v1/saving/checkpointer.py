"""How this session's ranks save and load together: one channel for calls that scripts wait for, one for background saves.

The ranks meet in the job's store, not in a process group: creating a channel then needs no collective call, and if a rank does not
come, the others raise an error with its number after `checkpoint_timeout`.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence

from smpc.checkpoint import Alone, BackgroundSaver, Channel, StoreChannel
from smpc.v1.model.distributed_model import DistributedModel
from smpc.v1.session.connections import job_store
from smpc.v1.session.state import Session, state


class Checkpointer:
    """Made by the first checkpoint of a session; `smp.shutdown` ends it, and raises if a save in the background failed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.channel = _channel(session, "now", _skipped)
        self._saver: BackgroundSaver | None = None

    @property
    def saver(self) -> BackgroundSaver:
        """The saver in the background; made by its first use."""
        if self._saver is None:
            self._saver = BackgroundSaver(_channel(self._session, "background"))
        return self._saver

    def check(self) -> None:
        """Raise the failure of a save in the background that has ended. Never waits."""
        if self._saver is not None:
            self._saver.check()

    def wait(self) -> None:
        """Wait for the save in the background."""
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """Wait, and raise if the last save failed."""
        if self._saver is not None:
            self._saver.close()


def checkpointer() -> Checkpointer:
    """The session's checkpointer. Raises UsageError before `smp.init`."""
    if state.checkpointer is None:
        state.checkpointer = Checkpointer(state.session)
    found: Checkpointer = state.checkpointer
    return found


def _skipped(ranks: Sequence[int]) -> str | None:
    """Not for background saves, during which the other ranks continue."""
    whereabouts = state.model.whereabouts if isinstance(state.model, DistributedModel) else None
    return None if whereabouts is None else whereabouts.skipped(ranks)


def _channel(
    session: Session, name: str, skipped: Callable[[Sequence[int]], str | None] = lambda ranks: None
) -> Channel:
    size = session.mesh.world_size
    if size == 1:
        return Alone()
    timeout = datetime.timedelta(seconds=session.config.checkpoint_timeout)
    return StoreChannel(job_store(), session.rank, size, timeout, f"checkpoint/{state.session_number}/{name}", skipped)
