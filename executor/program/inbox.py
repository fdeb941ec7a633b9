"""Receives posted ahead: what one peer will send in a step, in order.

Terms
    delivery    everything that one instruction of the peer sends here: the values of an edge, or gradients
    presence    which gradients of a channel exist, and in which layout. Whether a value gets a gradient at all
                depends on the user's loss, and some kernels sum in another order when a gradient has other strides
                than its value; so the first delivery of gradients of a channel in a step begins with a mask: for
                each gradient one number, 1 if it follows, and its strides on arrival. The later
                deliveries of the step hold the same gradients. Example: mask, g0(m0), g0(m1), g0(m2)

Receives are posted before they are needed, so a transport can fill them meanwhile:

    those of the next `window` deliveries    Past a mask that has not arrived nothing can be posted, as nobody knows what follows.
    on the device (`receives_on_device`)     what `allow` names, see `smpc.executor.program.message_order`. There every gradient is sent,
                                             whether it exists or not, so that nothing has to wait for a mask: what follows always has the
                                             same length, and the mask says what it means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smpc.executor.transport import Receipt, Transport, WireFormat

MASK_DTYPE = torch.int64


class Presence:
    """The formats of one channel's gradients in this step, None where there is none; unknown until its first delivery."""

    __slots__ = ("forms", "has_elements")

    def __init__(self) -> None:
        self.forms: list[WireFormat | None] | None = None
        self.has_elements = False  # whether anything but a mask arrives

    def describe(self, planned: Sequence[WireFormat], gradients: Sequence[Tensor | None]) -> list[int]:
        """Take the layouts of the first gradients; the numbers of the mask."""
        self.forms = [
            None if gradient is None else form.laid_out_like(gradient)
            for form, gradient in zip(planned, gradients, strict=True)
        ]
        return [
            number
            for plan, form in zip(planned, self.forms, strict=True)
            for number in ([0] * (1 + len(plan.shape)) if form is None else [1, *form.arrival])
        ]

    def read(self, planned: Sequence[WireFormat], mask: Sequence[int]) -> None:
        """The inverse of `describe`."""
        self.forms, self.has_elements = [], False
        start = 0
        for form in planned:
            stop = start + 1 + len(form.shape)
            stride = tuple(mask[start + 1 : stop])
            self.forms.append(None if not mask[start] else form if stride == form.arrival else form.arriving(stride))
            self.has_elements |= bool(mask[start]) and not form.is_empty
            start = stop


@dataclass(frozen=True, slots=True)
class Delivery:
    """The messages that one instruction receives. `presence` is None for values; `is_first`: a mask comes before the gradients."""

    forms: tuple[WireFormat, ...]
    presence: Presence | None = None
    is_first: bool = False


def mask_form(planned: Sequence[WireFormat]) -> WireFormat:
    """The format of the mask of these gradients."""
    length = sum(1 + len(form.shape) for form in planned)
    return WireFormat("gradient mask", (length,), MASK_DTYPE, (1,), None, False, length == 0)


class Inbox:
    """The deliveries of one peer."""

    def __init__(self, transport: Transport, peer: int, window: int) -> None:
        self._transport = transport
        self._peer = peer
        self._on_device = transport.receives_on_device
        self._window = 0 if self._on_device else window
        self._deliveries: list[Delivery] = []
        self._masks: list[WireFormat | None] = []  # what comes before each delivery
        self._posted: deque[list[Receipt | None]] = deque()
        self._num_taken = 0
        self._allowed = 0
        self._waits_for_mask = False  # the last one posted is a mask

    def expect(self, delivery: Delivery) -> None:
        """Add a delivery to the end of every step; when the programs are bound."""
        self._deliveries.append(delivery)
        self._masks.append(mask_form(delivery.forms) if delivery.is_first else None)

    def start(self) -> None:
        """Begin a step: post the first receives."""
        self._posted.clear()
        self._num_taken = self._allowed = 0
        self._waits_for_mask = False
        self._post()

    def allow(self, count: int) -> None:
        """Post the receives of the first `count` deliveries of the step."""
        self._allowed = count
        self._post()

    def clear(self) -> None:
        """Forget what is posted, after a failure."""
        self._posted.clear()

    def _post(self) -> None:
        last = min(max(self._num_taken + self._window, self._allowed), len(self._deliveries))
        for index in range(self._num_taken + len(self._posted), last):
            if self._waits_for_mask:
                return
            delivery, mask = self._deliveries[index], self._masks[index]
            receipts: list[Receipt | None] = []
            if mask is not None:
                receipts.append(self._transport.receive(self._peer, mask))
                self._waits_for_mask = not self._on_device
            if not self._waits_for_mask:
                receipts += self._receive(delivery)
            self._posted.append(receipts)

    def _receive(self, delivery: Delivery) -> list[Receipt | None]:
        receive, peer = self._transport.receive, self._peer
        if delivery.presence is None or self._on_device:
            return [receive(peer, form) for form in delivery.forms]
        assert delivery.presence.forms is not None, "gradients posted before their mask"
        return [None if form is None else receive(peer, form) for form in delivery.presence.forms]

    def ready(self) -> bool:
        """Whether `take` would return at once (loopback: the sender puts a whole delivery into the queue at a time)."""
        if not self._posted:
            self.allow(self._num_taken + 1)
        return all(receipt is None or receipt.ready() for receipt in self._posted[0])

    def take(self) -> list[Tensor | None]:
        """Wait for the next delivery; None where a gradient does not exist."""
        delivery = self._deliveries[self._num_taken]
        if not self._posted:
            self.allow(self._num_taken + 1)
        if delivery.is_first:
            mask = self._posted[0].pop(0)
            assert mask is not None
            assert delivery.presence is not None
            delivery.presence.read(delivery.forms, mask.wait().tolist())
            if self._waits_for_mask:
                self._posted[0] = self._receive(delivery)
                self._waits_for_mask = False
        receipts = self._posted.popleft()
        self._num_taken += 1
        self._post()
        if delivery.presence is None:
            return _unpacked_from_inbox(delivery.forms, receipts)
        forms = delivery.presence.forms
        assert forms is not None, "gradients taken before their mask"
        return _unpacked_from_inbox(forms, receipts, as_planned=self._on_device)


def _unpacked_from_inbox(
    forms: Sequence[WireFormat | None], receipts: list[Receipt | None], *, as_planned: bool = False
) -> list[Tensor | None]:
    """Received tensors, one after the other: a tensor sent without its gaps is freed before the next one gets its gaps back."""
    tensors: list[Tensor | None] = []
    for index, form in enumerate(forms):
        receipt, receipts[index] = receipts[index], None
        tensor = None if receipt is None else receipt.wait()
        if form is None or tensor is None:
            tensors.append(None)
            continue
        tensors.append(form.unpack(tensor.as_strided(form.shape, form.stride) if as_planned else tensor))
    return tensors
