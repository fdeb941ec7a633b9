"""The interface of transports for the interpreter.

Tensors that one rank sends to another arrive in the order sent: first in, first out, one tensor a message.
Both ends know each message's format. A tensor handed to `send` must not be written afterwards; the transport
keeps it alive as long as it needs it. Ranks are pipeline ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from smpc.executor.transport.layout import WireFormat


class Receipt(Protocol):
    """A receive that was posted."""

    def ready(self) -> bool:
        """Whether `wait` would return at once; only a transport of one process (loopback) can tell."""

    def wait(self) -> Tensor:
        """The tensor, once it has arrived: a leaf without history, owned by the caller. To be called once."""


class Transport(Protocol):
    """Moves tensors between this rank and its peers."""

    @property
    def receives_on_device(self) -> bool:
        """Whether a posted receive occupies the device until the message comes (see `smpc.executor.program.receive_order`)."""

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Before a program runs first: open the ways of its messages, each from one rank to another. Collective over its ranks."""

    def send(self, peer: int, tensor: Tensor, form: WireFormat) -> None:
        """Start to send a tensor whose shape and dtype have been checked; returns at once."""

    def receive(self, peer: int, form: WireFormat) -> Receipt:
        """Post the receive of the next tensor from `peer`; returns at once."""

    def mark(self, peer: int) -> int:
        """How many tensors have been sent to `peer` in this step."""

    def reap(self, peer: int, mark: int) -> None:
        """Let go of the first `mark` tensors sent to `peer` in this step, which arrive without further ado; waits for them."""

    def flush(self) -> None:
        """End of step: return when everything sent has left, and count from 0 again."""

    def close(self) -> None:
        """After a failure: drop what is under way and close the connections, so that peers that wait wake up."""
