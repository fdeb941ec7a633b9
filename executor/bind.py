"""Binds a program: turns every instruction into functions of no arguments whose operands are already looked up.

    F, B, W     one handler
    OFFLOAD, RELOAD    one handler each, see `smpc.executor.offload`
    RECV ...    one handler that may wait; `Handler.inbox` says for whom
    REDUCE      a handler that sends to the other holders, one for each of them that waits for it, one that sums

What a handler does with tensors is described in `smpc.executor.frame`, what travels in `smpc.executor.inbox`.

A value that shares memory with a buffer (BatchNorm statistics, a slice of a position table) is copied when F
has run: the buffer may be written by the next microbatch before the value has been sent, or read by the next
stage of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from smpc.codegen.actions import split_backwards
from smpc.codegen.checkpoint import Checkpointing
from smpc.codegen.program import Channel, Instruction, Op, RankProgram, StageCode
from smpc.errors import StepError
from smpc.executor.arrivals import awaited_by_sends, told_by_receives
from smpc.executor.deferral import Deferral
from smpc.executor.frame import Frame, Root
from smpc.executor.inbox import Delivery, Inbox, Presence, mask_form
from smpc.executor.offload import Mover, addresses
from smpc.executor.reduce import Reduction
from smpc.executor.transport import Transport, WireFormat
from smpc.partitioner.plan import INPUTS

Inputs = Sequence[Mapping[str, Tensor]]
OnOutput = Callable[[int, tuple[Tensor, ...]], Sequence[tuple[Tensor, Tensor | None]] | None]


class StepHooks(Protocol):
    """What data parallelism adds to a step; see `smpc.executor.data_parallel`."""

    def start_of_step(self) -> None:
        """Before the first instruction of a training step."""

    def before_last_backward(self, stage: int, roots: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """Before a stage's last backward, with its root tensors; returns one more (root, gradient), or None."""

    def end_of_step(self) -> None:
        """After the last instruction of a training step."""

    def did_not_train(self) -> None:
        """After that, once it is known that nothing was differentiated."""


@dataclass(slots=True)
class Step:
    """What the caller of a step brings."""

    inputs: Inputs | None = None
    on_output: OnOutput | None = None
    state: dict[int, frozenset[int]] = field(default_factory=dict)  # stage -> addresses of its buffers' storages


@dataclass(frozen=True, slots=True)
class Handler:
    """A bound instruction. `inbox`: it first takes the next delivery from there."""

    run: Callable[[], None]
    instruction: Instruction
    inbox: Inbox | None = None


class Split:
    """Whether splitting the backwards of a stage is worth it: until a whole step has left no work for its Ws, only gradients."""

    __slots__ = ("_found", "is_worthwhile")

    def __init__(self) -> None:
        self.is_worthwhile = True
        self._found: list[bool] = []

    def note(self, has_work: bool | None, is_last: bool) -> None:
        """What a W found (see `Pending.run`); the last one of a step decides for the next."""
        if has_work is not None:
            self._found.append(has_work)
        if is_last and self._found:
            self.is_worthwhile = any(self._found)
            self._found.clear()


class Binder:
    """Binds one rank's program."""

    def __init__(
        self,
        program: RankProgram,
        stages: Mapping[int, nn.Module],
        transport: Transport,
        parameters: Mapping[str, nn.Parameter],
        hooks: StepHooks | None,
        device: torch.device,
        window: int,
        labels: Mapping[str, str],
        peers: Sequence[RankProgram],
    ) -> None:
        self.step = Step()
        self._device = device
        self._program = program
        self._modules = stages
        self._codes = {code.index: code for code in program.stages}
        self._transport = transport
        self._parameters = parameters
        self._hooks = hooks
        self._window = window
        self._labels = labels
        self.inboxes: dict[int, Inbox] = {}
        self.reductions: list[Reduction] = []
        self._sent_masks: dict[int, Presence] = {}
        self._received_masks: dict[int, Presence] = {}
        self._marks: dict[int, list[int]] = {}  # peer -> tensors sent to it in this step up to each message
        self._told, self._awaited = _arrivals(program, peers, window)
        self.frames = {
            (code.index, m): Frame(len(code.inputs), len(code.outputs))
            for code in program.stages
            for m in range(program.num_microbatches)
        }
        self._split = split_backwards(program.instructions)
        self._splits = {code.index: Split() for code in program.stages}
        self._moving = frozenset((i.stage, i.microbatch) for i in program.instructions if i.op is Op.OFFLOAD)
        self._mover = Mover(device) if self._moving else None
        # By stage, the instruction that is the last to add to the gradients of its parameters.
        self._last = {i.stage: i for i in program.instructions if self._adds(i)}
        self._reduced = _reductions(program.instructions, self._last) if hooks is not None else {}
        ends = [end for channel in program.channels for end in (channel.source, channel.destination)]
        self.last_stage = max([*ends, *self._codes], default=0)
        self.states = tuple(stage for stage in self._codes if self._unrooted(stage))

    def bind(self) -> list[Handler]:
        """The handlers, in order."""
        binders: dict[Op, Callable[[Instruction], list[Handler]]] = {
            Op.FORWARD: lambda i: [Handler(self._forward(i), i)],
            Op.BACKWARD: lambda i: [Handler(self._backward(i), i)],
            Op.WEIGHT: lambda i: [Handler(self._weight(i), i)],
            Op.SEND: lambda i: [Handler(self._send(i), i)],
            Op.RECV: lambda i: [self._receive(i)],
            Op.SEND_GRAD: lambda i: [Handler(self._send_grad(i), i)],
            Op.RECV_GRAD: lambda i: [self._receive_grad(i)],
            Op.MOVE: lambda i: [Handler(self._move(i), i)],
            Op.MOVE_GRAD: lambda i: [Handler(self._move_grad(i), i)],
            Op.OFFLOAD: lambda i: [Handler(self._offload(i), i)],
            Op.RELOAD: lambda i: [Handler(self._reload(i), i)],
            Op.REDUCE: self._reduce,
        }
        return [handler for i in self._program.instructions for handler in binders[i.op](i)]

    def _carried(self, stage: int) -> list[tuple[int, bool]]:
        """(output, whether it wants a gradient) of the values that leave the stage on channels."""
        outputs = self._codes[stage].outputs
        return [
            (outputs.index(value), spec.requires_grad)
            for channel in self._program.channels
            if channel.source == stage
            for value, spec in zip(channel.values, channel.specs, strict=True)
        ]

    def _unrooted(self, stage: int) -> tuple[int, ...]:
        return tuple(output for output, wants in self._carried(stage) if not wants)

    def _adds(self, instruction: Instruction) -> bool:
        """Whether the instruction adds to the gradients of its stage's parameters."""
        if instruction.op is Op.BACKWARD:
            return (instruction.stage, instruction.microbatch) not in self._split
        return instruction.op is Op.WEIGHT

    def _inbox(self, peer: int) -> Inbox:
        if peer not in self.inboxes:
            self.inboxes[peer] = Inbox(self._transport, peer, self._window)
        return self.inboxes[peer]

    # ---- computing

    def _forward(self, instruction: Instruction) -> Callable[[], None]:
        stage, microbatch = instruction.stage, instruction.microbatch
        frame, module, step = self.frames[stage, microbatch], self._modules[stage], self.step
        carried = self._carried(stage)
        kept = tuple(dict.fromkeys(output for output, _ in carried))
        rooted = (
            tuple(dict.fromkeys(output for output, wants in carried if wants)) if self._program.has_backward else ()
        )
        unrooted = self._unrooted(stage)
        leaves = self._leaves(self._codes[stage])
        last = self._last.get(stage)
        keep_tensors = (
            self._hooks is not None and last is not None and (last.op, last.microbatch) == (Op.BACKWARD, microbatch)
        )
        split = self._splits[stage] if (stage, microbatch) in self._split else None
        is_last = stage == self.last_stage
        num_inputs, num_outputs = len(frame.inputs), len(frame.outputs)
        has_backward = self._program.has_backward
        moves = (stage, microbatch) in self._moving

        def run() -> None:
            arguments = frame.inputs
            frame.inputs = [None] * num_inputs
            with Checkpointing(frame.kept if moves else None):
                if split is not None and split.is_worthwhile:
                    with Deferral(frame.pending):
                        outputs = module(*arguments)
                else:
                    outputs = module(*arguments)
            assert len(outputs) == num_outputs, f"stage {stage} returned {len(outputs)} values, planned {num_outputs}"
            if moves:
                frame.stay = addresses((*outputs, *module.parameters(), *_model_inputs(step.inputs, microbatch)))
            for leaf in leaves:
                frame.leaves[leaf] = arguments[leaf]
            for output in kept:
                frame.outputs[output] = outputs[output]
            for output in unrooted:
                frame.outputs[output] = _apart(outputs[output], step.state[stage])
            for output in rooted:
                frame.edges[output] = _edge(outputs[output], keep_tensors)
            if is_last and step.on_output is not None:
                _finish_forward(frame, step.on_output(microbatch, outputs), has_backward)

        return run

    def _leaves(self, code: StageCode) -> tuple[int, ...]:
        """The inputs that want gradients, by position."""
        if not self._program.has_backward:
            return ()
        wanted = [
            value
            for channel in self._program.channels
            if channel.destination == code.index and channel.source != INPUTS
            for value, spec in zip(channel.values, channel.specs, strict=True)
            if spec.requires_grad
        ]
        return tuple(code.inputs.index(value) for value in wanted)

    def _backward(self, instruction: Instruction) -> Callable[[], None]:
        stage = instruction.stage
        frame = self.frames[stage, instruction.microbatch]
        leaves = self._leaves(self._codes[stage])
        num_inputs, num_outputs = len(frame.inputs), len(frame.outputs)
        reduced = self._reduced.get(instruction, ())
        hooks = self._hooks if reduced else None
        mover = self._mover if (stage, instruction.microbatch) in self._moving else None

        def run() -> None:
            if mover is not None:
                mover.wait(frame.loaded)
                frame.loaded = None
            roots = frame.roots
            frame.roots = []
            frame.edges = [None] * num_outputs
            if hooks is not None:
                extra = hooks.before_last_backward(stage, [root for root, _ in roots if isinstance(root, Tensor)])
                if extra is not None:
                    roots.append(extra)
            if roots:
                torch.autograd.backward([root for root, _ in roots], [grad for _, grad in roots])  # type: ignore[arg-type]
            if hooks is not None:
                _reduce_alone(hooks, reduced[1:])
            for position in leaves:
                leaf = frame.leaves[position]
                if leaf is not None and frame.grads[position] is None:
                    frame.grads[position] = leaf.grad
            frame.leaves = [None] * num_inputs

        return run

    def _weight(self, instruction: Instruction) -> Callable[[], None]:
        stage = instruction.stage
        pending, split = self.frames[stage, instruction.microbatch].pending, self._splits[stage]
        is_last = instruction == self._last[stage]
        reduced = self._reduced.get(instruction, ())
        hooks = self._hooks if reduced else None

        def run() -> None:
            split.note(pending.run(), is_last)
            if hooks is not None:
                _reduce_alone(hooks, reduced)

        return run

    def _offload(self, instruction: Instruction) -> Callable[[], None]:
        frame, mover = self.frames[instruction.stage, instruction.microbatch], self._mover
        assert mover is not None

        def run() -> None:
            kept, frame.kept = frame.kept, []
            frame.away = mover.leave(kept, frame.stay)

        return run

    def _reload(self, instruction: Instruction) -> Callable[[], None]:
        frame, mover = self.frames[instruction.stage, instruction.microbatch], self._mover
        assert mover is not None

        def run() -> None:
            frame.loaded = mover.load(frame.away)

        return run

    # ---- values

    def _channel(self, instruction: Instruction) -> tuple[Channel, tuple[WireFormat, ...]]:
        channel = self._program.channels[instruction.edge]
        named = [self._labels.get(value, value) for value in channel.values]
        forms = tuple(WireFormat.of(name, spec) for name, spec in zip(named, channel.specs, strict=True))
        return channel, forms

    def _source(self, channel: Channel, microbatch: int) -> Callable[[], list[Tensor]]:
        """A function that takes the channel's values out of where they are made."""
        step = self.step
        if channel.source == INPUTS:
            return lambda: _inputs(step.inputs, channel, microbatch)
        outputs = self._codes[channel.source].outputs
        slots = tuple(outputs.index(value) for value in channel.values)
        frame = self.frames[channel.source, microbatch]

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
        frame = self.frames[channel.destination, microbatch]
        inputs = self._codes[channel.destination].inputs
        slots = tuple(inputs.index(value) for value in channel.values)
        trains = self._program.has_backward and channel.source != INPUTS
        wants = tuple(trains and spec.requires_grad for spec in channel.specs)

        def put(values: Sequence[Tensor | None]) -> None:
            grad_enabled = torch.is_grad_enabled()
            for slot, wanted, value in zip(slots, wants, values, strict=True):
                assert value is not None
                if wanted and grad_enabled:
                    keep = partial(_keep_layout, frame.grads, slot, value.stride())
                    value.requires_grad_().register_hook(keep)  # type: ignore[no-untyped-call]
                frame.inputs[slot] = value

        return put

    def _send(self, instruction: Instruction) -> Callable[[], None]:
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

    def _receive(self, instruction: Instruction) -> Handler:
        channel, forms = self._channel(instruction)
        put = self._sink(channel, instruction.microbatch)
        peer, transport = instruction.peer, self._transport
        inbox = self._inbox(peer)
        inbox.expect(Delivery(forms))
        told = 0 if all(form.is_empty for form in forms) else self._told.get(instruction, 0)
        if not told:
            return Handler(lambda: put(inbox.take()), instruction, inbox)
        marks = self._marks[peer]  # of messages that this rank has sent before

        def run() -> None:
            put(inbox.take())
            transport.reap(peer, marks[told - 1])

        return Handler(run, instruction, inbox)

    def _move(self, instruction: Instruction) -> Callable[[], None]:
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
            put([value.detach() for value in values])

        return run

    # ---- gradients

    def _gradients(self, instruction: Instruction) -> tuple[Channel, tuple[WireFormat, ...]]:
        channel, forms = self._channel(instruction)
        return channel, tuple(form for form in forms if form.requires_grad)

    def _take_grads(self, channel: Channel, microbatch: int) -> Callable[[], list[Tensor | None]]:
        frame = self.frames[channel.destination, microbatch]
        inputs = self._codes[channel.destination].inputs
        slots = tuple(inputs.index(v) for v, s in zip(channel.values, channel.specs, strict=True) if s.requires_grad)

        def take() -> list[Tensor | None]:
            grads = [frame.grads[slot] for slot in slots]
            for slot in slots:
                frame.grads[slot] = None
            return grads

        return take

    def _put_grads(self, channel: Channel, microbatch: int) -> Callable[[Sequence[Tensor | None]], None]:
        frame = self.frames[channel.source, microbatch]
        outputs = self._codes[channel.source].outputs
        slots = tuple(outputs.index(v) for v, s in zip(channel.values, channel.specs, strict=True) if s.requires_grad)

        def put(grads: Sequence[Tensor | None]) -> None:
            for slot, grad in zip(slots, grads, strict=True):
                edge = frame.edges[slot]
                if grad is not None and edge is not None:
                    frame.roots.append((edge, grad))

        return put

    def _send_grad(self, instruction: Instruction) -> Callable[[], None]:
        channel, forms = self._gradients(instruction)
        microbatch, peer, transport = instruction.microbatch, instruction.peer, self._transport
        take = self._take_grads(channel, microbatch)
        is_first = channel.index not in self._sent_masks
        presence = self._sent_masks.setdefault(channel.index, Presence())
        mask = mask_form(forms)
        where, device = f"gradients of {_edge_text(channel)}", self._device
        marks, own = self._sent_message(peer)

        def run() -> None:
            grads = take()
            for grad, planned in zip(grads, forms, strict=True):
                if grad is not None:
                    planned.check(grad, where, gradients=False)
            if is_first:
                described = presence.describe(forms, grads)
                transport.send(peer, torch.tensor(described, dtype=torch.uint8, device=device), mask)
            assert presence.forms is not None
            for grad, planned, form in zip(grads, forms, presence.forms, strict=True):
                if form is not None:
                    transport.send(peer, form.empty(device).zero_() if grad is None else grad, form)
                elif grad is not None:
                    _late_gradient(channel.index, planned.value, microbatch)
            marks[own] = transport.mark(peer)

        return run

    def _receive_grad(self, instruction: Instruction) -> Handler:
        channel, forms = self._gradients(instruction)
        put = self._put_grads(channel, instruction.microbatch)
        peer, transport = instruction.peer, self._transport
        inbox = self._inbox(peer)
        is_first = channel.index not in self._received_masks
        presence = self._received_masks.setdefault(channel.index, Presence())
        inbox.expect(Delivery(forms, presence, is_first))
        told, marks = self._told.get(instruction, 0), self._marks.get(peer, [])

        def run() -> None:
            grads = inbox.take()
            put(grads)
            if told and (is_first or any(grad is not None and grad.numel() for grad in grads)):  # a message came
                transport.reap(peer, marks[told - 1])

        return Handler(run, instruction, inbox)

    def _move_grad(self, instruction: Instruction) -> Callable[[], None]:
        channel, _ = self._gradients(instruction)
        take = self._take_grads(channel, instruction.microbatch)
        put = self._put_grads(channel, instruction.microbatch)
        return lambda: put(take())

    def _reduce(self, instruction: Instruction) -> list[Handler]:
        name, holders = self._program.shared_parameters[instruction.parameter]
        peers = [rank for rank in sorted(set(holders)) if rank != self._program.rank]
        reduction = Reduction(self._parameters[name], name, self._program.rank, self._transport)
        self.reductions.append(reduction)
        handlers = [Handler(reduction.send, instruction)]
        for peer in peers:
            inbox = self._inbox(peer)
            handlers.append(Handler(reduction.bind_peer(peer, inbox), instruction, inbox))
        return [*handlers, Handler(reduction.finish, instruction)]


def _reductions(
    instructions: Sequence[Instruction], last: Mapping[int, Instruction]
) -> dict[Instruction, tuple[int, ...]]:
    """With which instructions the gradients of which stages are averaged over replicas.

    Always in falling order of stages, whatever that of the program: other replicas may run another program in this step, or none. So a
    stage whose last backward comes before that of a later stage waits for that one: `B s3 m7 ... B s4 m7` averages 4, then 3.
    """
    position = {instruction: i for i, instruction in enumerate(instructions)}
    found: dict[Instruction, tuple[int, ...]] = {}
    point: Instruction | None = None
    for stage in sorted(last, reverse=True):
        if point is None or position[last[stage]] > position[point]:
            point = last[stage]
        found[point] = (*found.get(point, ()), stage)
    return found


def _arrivals(
    program: RankProgram, peers: Sequence[RankProgram], window: int
) -> tuple[dict[Instruction, int], dict[Instruction, int]]:
    """See `smpc.executor.arrivals`: what receives tell, and what sends wait for."""
    if not peers:
        return {}, {}
    awaited = {} if program.has_backward else awaited_by_sends(peers, program.rank, window)
    return told_by_receives(peers, program.rank), awaited


def _reduce_alone(hooks: StepHooks, stages: Sequence[int]) -> None:
    """Average the gradients of stages whose backwards are done: nothing but the hooks' own root is differentiated."""
    for stage in stages:
        extra = hooks.before_last_backward(stage, [])
        if extra is not None:
            torch.autograd.backward([extra[0]], [extra[1]])


def _edge_text(channel: Channel) -> str:
    return f"edge {channel.index} from stage {channel.source} to stage {channel.destination}"


def _edge(value: Tensor, keep_tensor: bool) -> Tensor | GradientEdge | None:
    if not value.requires_grad:
        return None
    return value if keep_tensor or value.grad_fn is None else get_gradient_edge(value)


def _keep_layout(grads: list[Tensor | None], slot: int, stride: tuple[int, ...], gradient: Tensor) -> None:
    """Keep a leaf's gradient of other strides: what autograd would store as `.grad` is a copy in the value's layout."""
    if gradient.stride() != stride:
        grads[slot] = gradient


def _apart(value: Tensor, state: frozenset[int]) -> Tensor:
    return value.clone() if value.untyped_storage().data_ptr() in state else value


def _finish_forward(frame: Frame, roots: Sequence[tuple[Tensor, Tensor | None]] | None, has_backward: bool) -> None:
    if not roots:
        return
    if not has_backward:
        raise StepError(
            "a backward was asked for, but this program only evaluates: call backward in every step or in none"
        )
    found: list[Root] = list(roots)
    frame.roots.extend(found)


def _inputs(inputs: Inputs | None, channel: Channel, microbatch: int) -> list[Tensor]:
    if inputs is None:
        raise StepError("pipeline rank 0 needs the model's inputs, found None")
    missing = [value for value in channel.values if value not in inputs[microbatch]]
    if missing:
        raise StepError(f"microbatch {microbatch} lacks the model inputs {missing}, found {sorted(inputs[microbatch])}")
    return [inputs[microbatch][value] for value in channel.values]


def _model_inputs(inputs: Inputs | None, microbatch: int) -> Sequence[Tensor]:
    return () if inputs is None else tuple(inputs[microbatch].values())


def _late_gradient(edge: int, value: str, microbatch: int) -> None:
    raise StepError(
        f"edge {edge}: value {value!r} has a gradient in microbatch {microbatch} but had none in the first "
        "microbatch of this step; a loss must use the same outputs in every microbatch"
    )
