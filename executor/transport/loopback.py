"""All pipeline ranks in one process: a queue for every directed pair.

A message is a detached alias of the sender's tensor when its layout is as planned, a copy otherwise: what the
receiver sees has the layout that it would have after a real transport. Senders copy what they may write later
(see `smpc.executor.program.bind`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from smpc.errors import TransportError
from smpc.executor.transport.messages import WireFormat

Queues = dict[tuple[int, int], deque[Tensor]]


class LoopbackReceipt:
    """The next message of a queue."""

    __slots__ = ("_device", "_peer", "_queue")

    def __init__(self, queue: deque[Tensor], peer: int, device: torch.device) -> None:
        self._queue = queue
        self._peer = peer
        self._device = device

    def ready(self) -> bool:
        """Whether the message has arrived. Receipts of one queue are waited for in order, so the head is this one's."""
        return bool(self._queue)

    def wait(self) -> Tensor:
        """The message."""
        if not self._queue:
            raise TransportError(
                f"expected a message from pipeline rank {self._peer}, which has sent none; "
                "run programs of several ranks with run_loopback"
            )
        return self._queue.popleft().to(self._device)


class LoopbackTransport:
    """One rank's end of the queues; make them with `loopback_transports`."""

    receives_on_device = False

    def __init__(self, rank: int, queues: Queues, device: torch.device) -> None:
        self._rank = rank
        self._queues = queues
        self._device = device

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Queues need no connection."""

    def send(self, peer: int, tensor: Tensor, form: WireFormat) -> None:
        """Put a tensor into the queue to `peer`."""
        self._queues[self._rank, peer].append(form.conform(tensor))

    def receive(self, peer: int, form: WireFormat) -> LoopbackReceipt:
        """The next tensor from `peer`."""
        return LoopbackReceipt(self._queues[peer, self._rank], peer, self._device)

    def mark(self, peer: int) -> int:
        """Nothing is held, so nothing is counted."""
        return 0

    def reap(self, peer: int, mark: int) -> None:
        """Nothing is held."""

    def flush(self) -> None:
        """Nothing is held."""

    def held(self) -> Iterator[Tensor]:
        """Nothing: what was sent is what is received."""
        return iter(())

    def forget(self) -> None:
        """There are none."""

    def close(self) -> None:
        """Drop every message that this rank has sent or would receive."""
        for pair, queue in self._queues.items():
            if self._rank in pair:
                queue.clear()


def loopback_transports(num_ranks: int, device: torch.device | str = "cpu") -> list[LoopbackTransport]:
    """Connected transports of all ranks, in order of rank."""
    queues: Queues = {(a, b): deque() for a in range(num_ranks) for b in range(num_ranks) if a != b}
    return [LoopbackTransport(rank, queues, torch.device(device)) for rank in range(num_ranks)]
