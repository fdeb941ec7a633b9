"""Binds the instructions that carry values and gradients from stage to stage: SEND, RECV, MOVE, SEND_GRAD, RECV_GRAD, MOVE_GRAD.

    values       frame of the source .outputs -> checked against the plan -> frame of the destination .inputs
    gradients    frame of the destination .grads -> checked -> frame of the source .roots

A RECV may wait; `Handler.inbox` says for whom. `smpc.executor.program.inbox` describes the messages, and how a peer learns
which gradients exist; `smpc.executor.program.message_order` describes how long sent tensors are held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from smpc.codegen.program import Channel, Instruction, RankProgram
from smpc.errors import StepError
from smpc.executor.program.frame import Frame, Handler, Step
from smpc.executor.program.inbox import MASK_DTYPE, Delivery, Inbox, Presence, mask_form
from smpc.executor.program.message_order import awaited_by_sends, told_by_receives
from smpc.executor.transport import Transport, WireFormat
from smpc.partitioner.graph.plan import INPUTS
from smpc.tracer.ir import dense_order


class ChannelBinder:
    """Binds what one rank's program says of its channels. `frames`: by (stage, microbatch); `peers`: the programs of all ranks."""

    def __init__(
        self,
        program: RankProgram,
        frames: Mapping[tuple[int, int], Frame],
        step: Step,
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


def _keep_layout(grads: list[Tensor | None], slot: int, stride: tuple[int, ...], gradient: Tensor) -> None:
    """Keep a leaf's gradient of other strides, or if the leaf is not dense: what autograd would store as `.grad` is a copy."""
    if gradient.stride() != stride:
        grads[slot] = gradient


def _given_inputs(step: Step, channel: Channel, microbatch: int) -> list[Tensor]:
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
