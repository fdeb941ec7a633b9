"""How the ranks of a checkpoint talk: every rank gives a message and gets everybody's.

    channel.exchange("mine") -> ["of rank 0", "of rank 1", ...]      in order of rank, on every rank

Nothing else is needed to save and load. A channel belongs to one user at a time: saving in the background needs one of its own. An exchange
returns, or raises CheckpointError, within the channel's timeout and names the ranks that did not come where it can; it never hangs.

    Alone()                                     one process
    GroupChannel(group, timeout)                a gloo process group
    StoreChannel(store, rank, size, timeout)    a torch.distributed store; needs no process group

`together` runs a piece of work on every rank, and makes the failure of one the failure of all. Messages are JSON: nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from smpc.errors import CheckpointError

_SLICE = 1.0  # seconds
_STAY = datetime.timedelta(seconds=10)  # for ranks that have only to read


class Channel(Protocol):
    """One rank's end."""

    @property
    def rank(self) -> int:
        """The rank of this process."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def exchange(self, message: str) -> list[str]:
        """Every rank's message, in order of rank. Raises CheckpointError in time if a rank does not come."""


class Alone:
    """The channel of a single process."""

    rank, size = 0, 1

    def exchange(self, message: str) -> list[str]:
        """The received value."""
        return [message]


class GroupChannel:
    """The ranks of a process group with gloo. `timeout`: of an exchange, that is of the slowest rank's work before it."""

    def __init__(self, group: dist.ProcessGroup, timeout: datetime.timedelta) -> None:
        if "gloo" not in dist.get_backend(group):
            raise CheckpointError(
                f"a checkpoint's process group must use gloo, found {dist.get_backend(group)}; make one with new_group(backend='gloo')"
            )
        self._group, self._timeout = group, timeout
        self.rank, self.size = group.rank(), group.size()

    def exchange(self, message: str) -> list[str]:
        """See Channel."""
        try:
            # Only this collective names missing ranks; later ones then do not wait for a late rank.
            dist.monitored_barrier(self._group, timeout=self._timeout, wait_all_ranks=True)
            data = message.encode()
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(data)]), group=self._group)
            longest = max(int(length) for length in lengths)
            padded = torch.frombuffer(bytearray(data.ljust(longest or 1)), dtype=torch.uint8)
            messages = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(messages, padded, group=self._group)
        except (RuntimeError, ValueError) as error:  # ValueError: the group has been destroyed
            raise CheckpointError(
                f"rank {self.rank}: another rank ended, or did not come within {self._timeout.total_seconds():g} s: "
                f"{str(error).strip().splitlines()[0]}"
            ) from error
        return [
            found[: int(length)].numpy().tobytes().decode() for found, length in zip(messages, lengths, strict=True)
        ]


class StoreChannel:
    """Ranks that share a store. `prefix` sets channels of one store apart; no two may ever have used the same.

    `skipped` tells what is known of a rank that will not come; None where it may.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
        prefix: str = "checkpoint",
        skipped: Callable[[Sequence[int]], str | None] = lambda ranks: None,
    ) -> None:
        self._store, self._skipped = PrefixStore(prefix, store), skipped
        self._timeout, self._turn = timeout, 0
        self._broken = False
        self.rank, self.size = rank, size

    def exchange(self, message: str) -> list[str]:
        """See Channel."""
        if self._broken:  # what a rank that came late has left would be taken for an answer
            raise CheckpointError(
                f"rank {self.rank}: the ranks lost each other in an earlier checkpoint; start the processes again"
            )
        turn, self._turn = self._turn, self._turn + 1
        found: list[str] = []
        try:
            self._store.set(f"{turn}/{self.rank}", "+" + message)  # a store may take an empty value for a missing one
            for rank in range(self.size):
                self._await(f"{turn}/{rank}", rank)
                found.append(self._store.get(f"{turn}/{rank}")[1:].decode())
            if turn:  # every rank has come here, so every rank has read the turn before
                self._store.delete_key(f"{turn - 1}/{self.rank}")
            self._stay(turn)
        except (RuntimeError, ValueError) as error:
            self._broken = True
            raise CheckpointError(
                f"rank {self.rank}: rank {len(found)} ended, or did not come within {self._timeout.total_seconds():g} s: "
                f"{str(error).strip().splitlines()[0]}"
            ) from error
        return found

    def _await(self, key: str, rank: int) -> None:
        """Wait for a key. In slices, between which it may become known that the rank will not come."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        while True:
            left = deadline - time.monotonic()
            try:
                self._store.wait([key], datetime.timedelta(seconds=max(min(left, _SLICE), 0.001)))
                return
            except RuntimeError:
                if left <= _SLICE:
                    raise
            reason = self._skipped([rank])
            if reason is not None:
                self._broken = True
                raise CheckpointError(
                    f"rank {self.rank}: saving and loading must be called on all {self.size} ranks, and {reason}"
                )

    def _stay(self, turn: int) -> None:
        """Rank 0, whose process may hold the store, returns when all have read: it may be the last thing that it does.

        Everything has been said by then, so a rank that dies here makes no error.
        """
        with contextlib.suppress(RuntimeError, ValueError):
            if self.rank:
                self._store.set(f"{turn}/read/{self.rank}", "+")
                return
            for rank in range(1, self.size):
                self._store.wait([f"{turn}/read/{rank}"], min(self._timeout, _STAY))
                self._store.delete_key(f"{turn}/read/{rank}")


def together(channel: Channel, work: Callable[[], Any]) -> list[Any]:
    """Run `work` on every rank and return what it returned on each, in order of rank. It returns plain JSON values.

    If it raises on one rank, CheckpointError is raised on every rank, naming each rank that failed and why.
    """
    value, failure, cause = None, None, None
    try:
        value = work()
    except Exception as error:
        failure, cause = describe(error), error
    answers = channel.exchange(json.dumps({"failure": failure, "value": value}))
    try:
        decoded = [json.loads(answer) for answer in answers]
        said = [(f"rank {rank}: " if channel.size > 1 else "", found["failure"]) for rank, found in enumerate(decoded)]
        failures = [f"{rank}{failure}" for rank, failure in said if failure]
        values = [answer["value"] for answer in decoded]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"rank {channel.rank}: another rank sent something that is not a message of a checkpoint"
        ) from error
    if failures:
        raise CheckpointError("\n".join(failures)) from cause
    return values


def describe(error: BaseException) -> str:
    """An error's text; the type too unless the error is ours."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    return f"{type(error).__name__}: {error}"
