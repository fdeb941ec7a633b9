"""Binds the instructions that carry values and gradients from stage to stage: SEND, RECV, MOVE, SEND_GRAD, RECV_GRAD, MOVE_GRAD.

    values       frame of the source .outputs -> checked against the plan -> frame of the destination .inputs
    gradients    frame of the destination .grads -> checked -> frame of the source .roots

A RECV may wait; `Handler.inbox` says for whom. `smpc.executor.program.message_order` describes how long sent tensors are held.

An `Inbox` has the receives posted ahead: what one peer will send in a step, in order.

Terms
    delivery    everything that one instruction of the peer sends here: the values of an edge, or gradients
    presence    which gradients of a channel exist, and in which layout. Whether a value gets a gradient at all
                depends on the user's loss, and some kernels sum in another order when a gradient has other strides
                than its value; so the first delivery of gradients of a channel in a step begins with a mask: for
                each gradient one number, 1 if it follows, and its strides on arrival. The later
                deliveries of the step hold the same gradients. Example: mask, g0(m0), g0(m1), g0(m2)

Receives are posted before they are needed, so a transport can fill them meanwhile:

    for the next `window` deliveries         Past a mask that has not arrived nothing can be posted, as nobody knows what follows.
    on the device (`receives_on_device`)     what `allow` names, see `smpc.executor.program.message_order`. There every gradient is sent,
                                             whether it exists or not, so that nothing has to wait for a mask: what follows always has the
                                             same length, and the mask says what it means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from smpc.codegen.program import Channel, Instruction, RankProgram
from smpc.errors import StepError
from smpc.executor.program.frame import Frame, Handler, StepInputs
from smpc.executor.program.message_order import awaited_by_sends, told_by_receives
from smpc.executor.transport import Receipt, Transport, WireFormat
from smpc.partitioner.graph.plan import INPUTS
from smpc.tracer.ir import dense_order

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
        presence = delivery.presence
        forms = delivery.forms if presence is None or self._on_device else presence.forms
        assert forms is not None, "gradients posted before their mask"
        receipts: list[Receipt | None] = []
        for form in forms:
            receipts.append(None if form is None else self._transport.receive(self._peer, form))
        return receipts

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


class ChannelBinder:
    """Binds what one rank's program says of its channels. `frames`: by (stage, microbatch); `peers`: the programs of all ranks."""

    def __init__(
        self,
        program: RankProgram,
        frames: Mapping[tuple[int, int], Frame],
        step: StepInputs,
        transport: Transport,
        device: torch.device,
        window: int,
        labels: Mapping[str, str],
        peers: Sequence[RankProgram],
    ) -> None:
        self.inboxes: dict[int, Inbox] = {}
        self._program = program
        self._codes = {code.index: code for code in program.stages}
        self._frames = frames
        self._step = step
        self._transport = transport
        self._device = device
        self._window = window
        self._labels = labels
        self._sent_masks: dict[int, Presence] = {}
        self._received_masks: dict[int, Presence] = {}
        self._marks: dict[int, list[int]] = {}  # peer -> tensors sent to it in this step up to each message
        self._told, self._awaited = _channel_arrivals(program, peers, window)

    def inbox(self, peer: int) -> Inbox:
        """The messages from a peer, in the order of the program."""
        if peer not in self.inboxes:
            self.inboxes[peer] = Inbox(self._transport, peer, self._window)
        return self.inboxes[peer]

    # ---- values

    def _channel(self, instruction: Instruction) -> tuple[Channel, tuple[WireFormat, ...]]:
        channel = self._program.channels[instruction.edge]
        named = [self._labels.get(value, value) for value in channel.values]
        forms = tuple(WireFormat.of(name, spec) for name, spec in zip(named, channel.specs, strict=True))
        return channel, forms

    def _source(self, channel: Channel, microbatch: int) -> Callable[[], list[Tensor]]:
        """A function that takes the channel's values out of where they are made."""
        step = self._step
        if channel.source == INPUTS:
            return partial(_given_inputs, step, channel, microbatch)
        outputs = self._codes[channel.source].outputs
        slots = tuple(outputs.index(value) for value in channel.values)
        frame = self._frames[channel.source, microbatch]

        def take() -> list[Tensor]:
            values = []
            for slot in slots:
                value = frame.outputs[slot]
                assert value is not None, f"output {slot} of stage {channel.source} is not there"
                values.append(value)
                frame.outputs[slot] = None
            return values

        return take

    def _sink(self, channel: Channel, microbatch: int) -> Callable[[Sequence[Tensor | None]], None]:
        """A function that hands values to the channel's destination, as leaves where they want gradients."""
        frame = self._frames[channel.destination, microbatch]
        inputs = self._codes[channel.destination].inputs
        slots = tuple(inputs.index(value) for value in channel.values)
        trains = self._program.has_backward and channel.source != INPUTS
        wants = tuple(trains and spec.requires_grad for spec in channel.specs)
        dense = tuple(dense_order(spec.shape, spec.stride) is not None for spec in channel.specs)

        def put(values: Sequence[Tensor | None]) -> None:
            grad_enabled = torch.is_grad_enabled()
            for slot, wanted, is_dense, value in zip(slots, wants, dense, values, strict=True):
                assert value is not None
                if wanted and grad_enabled:
                    keep = partial(_keep_layout, frame.grads, slot, value.stride() if is_dense else ())
                    value.requires_grad_().register_hook(keep)  # type: ignore[no-untyped-call]
                frame.inputs[slot] = value

        return put

    def send(self, instruction: Instruction) -> Callable[[], None]:
        """A handler that sends the values of a channel."""
        channel, forms = self._channel(instruction)
        take = self._source(channel, instruction.microbatch)
        transport, peer, where = self._transport, instruction.peer, _edge_text(channel)
        marks, own = self._sent_message(peer)
        awaited = self._awaited.get(instruction, 0)
        strict = self._program.has_backward and channel.source != INPUTS

        def run() -> None:
            values = take()
            gradients = strict and torch.is_grad_enabled()
            for value, form in zip(values, forms, strict=True):
                form.check(value, where, gradients=gradients)
            if awaited:
                transport.reap(peer, marks[awaited - 1])
            for value, form in zip(values, forms, strict=True):
                transport.send(peer, value, form)
            marks[own] = transport.mark(peer)

        return run

    def _sent_message(self, peer: int) -> tuple[list[int], int]:
        """The marks of the peer, with room for one message more, and that one's place."""
        marks = self._marks.setdefault(peer, [])
        marks.append(0)
        return marks, len(marks) - 1

    def receive(self, instruction: Instruction) -> Handler:
        """A handler that takes the values of a channel from their inbox."""
        channel, forms = self._channel(instruction)
        put = self._sink(channel, instruction.microbatch)
        peer, transport = instruction.peer, self._transport
        inbox = self.inbox(peer)
        inbox.expect(Delivery(forms))
        told = 0 if all(form.is_empty for form in forms) else self._told.get(instruction, 0)
        if not told:
            return Handler(lambda: put(inbox.take()), instruction, inbox)
        marks = self._marks[peer]  # of messages that this rank has sent before

        def run() -> None:
            put(inbox.take())
            transport.reap(peer, marks[told - 1])

        return Handler(run, instruction, inbox)

    def move(self, instruction: Instruction) -> Callable[[], None]:
        """A handler that hands values on between two stages of this rank, or the model's inputs to a stage."""
        channel, forms = self._channel(instruction)
        take = self._source(channel, instruction.microbatch)
        put = self._sink(channel, instruction.microbatch)
        where = (
            f"model inputs of microbatch {instruction.microbatch}" if channel.source == INPUTS else _edge_text(channel)
        )
        strict = self._program.has_backward and channel.source != INPUTS

        def run() -> None:
            values = take()
            gradients = strict and torch.is_grad_enabled()
            for value, form in zip(values, forms, strict=True):
                form.check(value, where, gradients=gradients)
            put(list(map(Tensor.detach, values)))

        return run

    # ---- gradients

    def _gradients(self, instruction: Instruction) -> tuple[Channel, tuple[WireFormat, ...]]:
        channel, forms = self._channel(instruction)
        return channel, tuple(form for form in forms if form.requires_grad)

    def _take_grads(self, channel: Channel, microbatch: int) -> Callable[[], list[Tensor | None]]:
        frame = self._frames[channel.destination, microbatch]
        inputs = self._codes[channel.destination].inputs
        slots = tuple(inputs.index(v) for v, s in zip(channel.values, channel.specs, strict=True) if s.requires_grad)

        def take() -> list[Tensor | None]:
            grads = [frame.grads[slot] for slot in slots]
            for slot in slots:
                frame.grads[slot] = None
            return grads

        return take

    def _put_grads(self, channel: Channel, microbatch: int) -> Callable[[Sequence[Tensor | None]], None]:
        frame = self._frames[channel.source, microbatch]
        outputs = self._codes[channel.source].outputs
        slots = tuple(outputs.index(v) for v, s in zip(channel.values, channel.specs, strict=True) if s.requires_grad)

        def put(grads: Sequence[Tensor | None]) -> None:
            for slot, grad in zip(slots, grads, strict=True):
                edge = frame.edges[slot]
                if grad is not None and edge is not None:
                    frame.roots.append((edge, grad))

        return put

    def send_grad(self, instruction: Instruction) -> Callable[[], None]:
        """A handler that sends the gradients of the values of a channel."""
        channel, forms = self._gradients(instruction)
        microbatch, peer, transport = instruction.microbatch, instruction.peer, self._transport
        take = self._take_grads(channel, microbatch)
        is_first = channel.index not in self._sent_masks
        presence = self._sent_masks.setdefault(channel.index, Presence())
        mask = mask_form(forms)
        where, device, sends_all = f"gradients of {_edge_text(channel)}", self._device, transport.receives_on_device
        marks, own = self._sent_message(peer)

        def run() -> None:
            grads = take()
            for grad, planned in zip(grads, forms, strict=True):
                if grad is not None:
                    planned.check(grad, where, gradients=False)
            if is_first:
                described = presence.describe(forms, grads)
                transport.send(peer, torch.tensor(described, dtype=MASK_DTYPE, device=device), mask)
            assert presence.forms is not None
            for grad, planned, form in zip(grads, forms, presence.forms, strict=True):
                if form is not None:
                    transport.send(peer, form.empty(device).zero_() if grad is None else grad, form)
                elif grad is not None:
                    _late_channel_gradient(channel.index, planned.value, microbatch)
                elif sends_all:
                    transport.send(peer, planned.empty(device), planned)
            marks[own] = transport.mark(peer)

        return run

    def receive_grad(self, instruction: Instruction) -> Handler:
        """A handler that takes gradients from their inbox."""
        channel, forms = self._gradients(instruction)
        put = self._put_grads(channel, instruction.microbatch)
        peer, transport = instruction.peer, self._transport
        inbox = self.inbox(peer)
        is_first = channel.index not in self._received_masks
        presence = self._received_masks.setdefault(channel.index, Presence())
        inbox.expect(Delivery(forms, presence, is_first))
        told, marks = self._told.get(instruction, 0), self._marks.get(peer, [])

        def run() -> None:
            put(inbox.take())
            if told and (is_first or presence.has_elements):  # a message came
                transport.reap(peer, marks[told - 1])

        return Handler(run, instruction, inbox)

    def move_grad(self, instruction: Instruction) -> Callable[[], None]:
        """A handler that hands gradients on between two stages of this rank."""
        channel, _ = self._gradients(instruction)
        take = self._take_grads(channel, instruction.microbatch)
        put = self._put_grads(channel, instruction.microbatch)
        return lambda: put(take())


def _channel_arrivals(
    program: RankProgram, peers: Sequence[RankProgram], window: int
) -> tuple[dict[Instruction, int], dict[Instruction, int]]:
    """See `smpc.executor.program.message_order`: what a receive implies, and what a send waits for."""
    if not peers:
        return {}, {}
    awaited = {} if program.has_backward else awaited_by_sends(peers, program.rank, window)
    return told_by_receives(peers, program.rank), awaited


def _edge_text(channel: Channel) -> str:
    return f"edge {channel.index} from stage {channel.source} to stage {channel.destination}"


def _keep_layout(grads: list[Tensor | None], slot: int, stride: tuple[int, ...], gradient: Tensor | None) -> None:
    """Keep a leaf's gradient of other strides, or if the leaf is not dense: what autograd would store as `.grad` is a copy.

    gradient: None where a custom function returned None for its only use of the leaf.
    """
    if gradient is not None and gradient.stride() != stride:
        grads[slot] = gradient


def _given_inputs(step: StepInputs, channel: Channel, microbatch: int) -> list[Tensor]:
    """The model's inputs for a channel; StepError if some are missing."""
    if step.inputs is None:
        raise StepError("pipeline rank 0 needs the model's inputs, found None")
    given = step.inputs[microbatch]
    if not given.keys() >= set(channel.values):
        missing = [value for value in channel.values if value not in given]
        raise StepError(f"microbatch {microbatch} lacks the model inputs {missing}, found {sorted(given)}")
    return list(map(given.__getitem__, channel.values))


def _late_channel_gradient(edge: int, value: str, microbatch: int) -> None:
    raise StepError(
        f"edge {edge}: value {value!r} has a gradient in microbatch {microbatch} but had none in the first "
        "microbatch of this step; a loss must use the same outputs in every microbatch"
    )
