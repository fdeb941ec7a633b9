"""Saving in the background: what is saved is what was there when `save` was called.

    saver = BackgroundSaver(channel)            a channel that nobody else uses, on every rank
    saver.save(root, "step_100", content)       copies this rank's share to memory, and returns
    saver.check()                               at every step: raises if a save has failed
    saver.wait()                                the folder of the last save; raises if it failed
    saver.close()                               waits, raises, frees the copies

    training  |--save: agree, copy--|------ steps ------|--save: waits for the first, agree, copy--|---- ...
    thread                          |-- write, agree, publish, agree --|                           |-- ...

A second save waits until the first has ended, and raises if it failed. If nobody has seen a failure, the process exits with
status 1 and a line on stderr. A process waits for its saves before it exits; they end within the channel's timeout. The copies
are kept for the next save, pinned if the tensors are on a GPU: memory of one share of the checkpoint.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from smpc.checkpoint.channel import Channel
from smpc.checkpoint.folder.folders import Root
from smpc.checkpoint.format.draft_content import Content, Shard
from smpc.checkpoint.save import Saving
from smpc.errors import CheckpointError

_Key = tuple[str, str, tuple[int, ...]]


class PendingSave(Protocol):
    """See `Saving`. `share`: this rank's part, in tensors that may be replaced by copies before `write`."""

    share: list[Shard]

    def agree(self) -> None:
        """See Saving."""

    def fail(self, error: Exception) -> None:
        """See Saving."""

    def write(self) -> str:
        """See Saving; runs on another thread than the others."""


class BackgroundSaver:
    """Saves checkpoints one after the other on a thread of its own. Every rank makes the same calls."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._path: str | None = None
        self._copies: dict[_Key, Tensor] = {}
        atexit.register(self._at_exit)

    def save(self, root: Root, tag: str, content: Content, *, force: bool = False, keep: int | None = None) -> None:
        """Start to save. As `smpc.checkpoint.save`; tensors may change as soon as this returns.

        Raises CheckpointError if this save cannot begin, or the one before it failed.
        """
        self.start(Saving(root, tag, content, self._channel, force=force, keep=keep))

    def start(self, saving: PendingSave) -> None:
        """Start to save anything that saves in the steps of `Saving`, over this saver's channel. Raises as `save` does."""
        self.wait()
        saving.agree()
        try:
            saving.share = self._copy(saving.share)
        except Exception as error:  # out of memory; the others hear of it in the exchange that they wait in
            saving.fail(error)
        self._thread = threading.Thread(target=self._run, args=(saving,), name="smpc checkpoint")
        self._thread.start()

    def check(self) -> None:
        """Raise the failure of a save that has ended with one. Never waits."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"saving in the background failed: {failure}") from failure

    def wait(self) -> str | None:
        """Wait for the save under way. Returns the folder of the last checkpoint that was saved, if any."""
        if self._thread is not None:
            self._thread.join()
        self.check()
        return self._path

    @property
    def channel(self) -> Channel:
        """The channel of its ranks."""
        return self._channel

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Wait, free the copies, and raise if the last save failed."""
        try:
            self.wait()
        finally:
            self._copies.clear()
            atexit.unregister(self._at_exit)

    def _run(self, saving: PendingSave) -> None:
        try:
            self._path = saving.write()
        except BaseException as error:
            self._failure = error

    def _copy(self, shards: list[Shard]) -> list[Shard]:
        copies: dict[_Key, Tensor] = {}
        copied: list[Shard] = []
        on_gpu = False
        for shard in shards:
            values = shard.tensor if isinstance(shard.values, Tensor) else shard.fetch()
            key = (shard.kind, shard.name, shard.offsets)
            copy = self._copies.get(key)
            if copy is None or copy.shape != values.shape or copy.dtype != values.dtype:
                copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
            copy.copy_(values.detach(), non_blocking=values.is_cuda)
            on_gpu = on_gpu or values.is_cuda
            copies[key] = copy
            copied.append(replace(shard, values=copy))
        if on_gpu:
            torch.cuda.synchronize()
        self._copies = copies
        return copied

    def _at_exit(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            print(f"smpc: error: saving in the background failed: {self._failure}", file=sys.stderr)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(1)  # an exception here would leave the status at 0
