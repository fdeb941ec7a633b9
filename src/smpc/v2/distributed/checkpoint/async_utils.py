"""Background saves, and their completion on all ranks.

    queue = AsyncCallsQueue()
    async_save(state_dict, checkpoint_id="run/step_100", queue=queue)      returns when tensors may change
    queue.maybe_finalize_async_calls(blocking=False)                       between steps: indices of the saves that stand by now
    queue.maybe_finalize_async_calls(blocking=True)                        before the end

A queue saves one checkpoint after the other; the next `async_save` waits for the last. A save that fails on one rank is an error at the
next call on every rank of its group. A process waits for its saves before it exits, with status 1 if a failure was never reported.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from smpc.checkpoint import Alone, BackgroundSaver, GroupChannel
from smpc.checkpoint.torch_format.agreement import CoordinatedRanks
from smpc.checkpoint.torch_format.saving import StateSaving

__all__ = ["AsyncCallsQueue", "AsyncRequestQueue"]
_TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class _Background:
    """Saves for the ranks of one process group."""

    world: dist.ProcessGroup | None  # the world that the group was made in: a script may end it, and make another
    group: dist.ProcessGroup | None
    saver: BackgroundSaver


class AsyncCallsQueue:
    """See the module's docstring. Every rank makes the same calls."""

    def __init__(self) -> None:
        self._backgrounds: dict[str, _Background] = {}
        self._calls: list[tuple[int, _Background]] = []
        self._next = 0

    def schedule(
        self,
        make: Callable[[CoordinatedRanks], StateSaving],
        process_group: dist.ProcessGroup | None,
        coordinator_rank: int,
    ) -> int:
        """Start what `make` gives, for ranks that talk over a group of their own; the index of the call."""
        background = self._background(process_group)
        self._end(background)
        background.saver.start(make(CoordinatedRanks(background.group, coordinator_rank)))
        number, self._next = self._next, self._next + 1
        self._calls.append((number, background))
        return number

    def maybe_finalize_async_calls(
        self, blocking: bool = False, process_group: dist.ProcessGroup | None = None, skip_sync: bool = False
    ) -> list[int]:
        """Ends saves: all of them if `blocking`, otherwise those that have ended on all ranks. Returns their indices.

        `skip_sync`: without asking the others, so that ranks may see different ones. Raises CheckpointError if one has failed.
        """
        if blocking:
            for background in dict.fromkeys(background for _, background in self._calls):
                self._end(background)
            done = self._calls
        else:
            num_done = sum(not background.saver.is_saving for _, background in self._calls)
            if not skip_sync and dist.is_initialized():
                num_done = min(CoordinatedRanks(process_group or dist.group.WORLD).everybody(num_done))
            done = self._calls[:num_done]
            for background in dict.fromkeys(background for _, background in done):
                self._check(background)
        self._calls = self._calls[len(done) :]
        return [number for number, _ in done]

    def get_num_unfinalized_calls(self) -> int:
        """Saves that have not been finalized."""
        return len(self._calls)

    def close(self) -> None:
        """End all saves, and free the copies."""
        self.maybe_finalize_async_calls(blocking=True)
        for background in self._backgrounds.values():
            background.saver.close()
        self._backgrounds.clear()

    def _end(self, background: _Background) -> None:
        """Wait for a group's save, and forget it if it has failed."""
        try:
            background.saver.wait()
        except BaseException:
            self._forget(background)
            raise

    def _check(self, background: _Background) -> None:
        try:
            background.saver.check()
        except BaseException:
            self._forget(background)
            raise

    def _forget(self, background: _Background) -> None:
        self._calls = [call for call in self._calls if call[1] is not background]

    def _background(self, process_group: dist.ProcessGroup | None) -> _Background:
        """The saver of a group; its own process group is made at the first call, which is collective."""
        world = dist.group.WORLD if dist.is_initialized() else None
        given = process_group or world
        name = "" if given is None else given.group_name
        found = self._backgrounds.get(name)
        if found is not None and found.world is world:
            return found
        group = None if given is None else _gloo_group(given, given is world)
        saver = BackgroundSaver(Alone() if group is None else GroupChannel(group, _TIMEOUT))
        self._backgrounds[name] = _Background(world, group, saver)
        return self._backgrounds[name]


AsyncRequestQueue = AsyncCallsQueue


def _gloo_group(given: dist.ProcessGroup, is_world: bool) -> dist.ProcessGroup:
    """A group of the same ranks for this use only, so that a thread may communicate over it."""
    ranks = dist.get_process_group_ranks(given)
    made: dist.ProcessGroup = dist.new_group(
        ranks, backend="gloo", timeout=_TIMEOUT, use_local_synchronization=not is_world
    )
    return made
