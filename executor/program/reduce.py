"""Sums the gradient of a parameter that several pipeline ranks hold.

Every holder sends its gradient to every other and adds up what exists in order of rank, so all end with the
same bits. Where no holder has a gradient, there is none afterwards. A mask says whether one
follows.

Gradients accumulate over steps until the user clears them, and gradients of a former step are already summed: only the first holder may
contribute them. The others start every training step without gradients (`start`). If parameters are sharded over replicas, holders with
the same part sum that part.

Example: ranks 0 and 3 hold the embedding; before REDUCE 0 has g0 and 3 has g3, afterwards both have g0 + g3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from smpc.errors import TransportError
from smpc.executor.program.inbox import MASK_DTYPE, Delivery, Inbox, Presence, mask_form
from smpc.executor.transport import Transport, WireFormat
from smpc.sharding.tensors import local, sharded_like
from smpc.sharding.wide_gradients import gradient_dtype
from smpc.tracer.ir import TensorSpec


class Reduction:
    """One shared parameter, on one of its holders."""

    def __init__(self, parameter: nn.Parameter, name: str, rank: int, transport: Transport) -> None:
        self._parameter = parameter
        self._name = name
        self._rank = rank
        self._transport = transport
        self._form = WireFormat.of(name, TensorSpec.of(local(parameter).to(gradient_dtype(parameter))))
        self._peers: list[int] = []
        self._found: dict[int, Tensor | None] = {}

    def bind_peer(self, peer: int, inbox: Inbox) -> Callable[[], None]:
        """A function that waits for the gradient of one other holder."""
        self._peers.append(peer)
        inbox.expect(Delivery((self._form,), Presence(), is_first=True))

        def receive() -> None:
            (self._found[peer],) = inbox.take()

        return receive

    def start(self) -> None:
        """Before a training step."""
        if self._rank > min(self._peers):
            self._parameter.grad = None

    def send(self) -> None:
        """Send the own gradient to the other holders."""
        grad = None if self._parameter.grad is None else local(self._parameter.grad)
        if grad is not None and grad.layout is not torch.strided:
            raise TransportError(
                f"parameter {self._name!r} is shared by several pipeline stages, so its gradient must be dense, found "
                f"{grad.layout}; use sparse=False"
            )
        presence = Presence()
        described = presence.describe((self._form,), (grad,))
        mask = torch.tensor(described, dtype=MASK_DTYPE, device=self._parameter.device)
        assert presence.forms is not None
        for peer in self._peers:
            self._transport.send(peer, mask, mask_form((self._form,)))
            if grad is not None and presence.forms[0] is not None:
                self._transport.send(peer, grad, presence.forms[0])
            elif self._transport.receives_on_device:
                self._transport.send(peer, self._form.empty(mask.device), self._form)
        self._found[self._rank] = grad

    def finish(self) -> None:
        """Set the sum. A new tensor: the old one may still be on its way."""
        total: Tensor | None = None
        for rank in sorted(self._found):
            grad = self._found[rank]
            if grad is not None:
                total = grad if total is None else total + grad
        self._found.clear()
        self._parameter.grad = None if total is None else sharded_like(self._parameter, total)
