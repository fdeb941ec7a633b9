"""Binds a program: turns every instruction into functions of no arguments whose operands are already looked up.

    F, B, W     one handler
    OFFLOAD, RELEASE, RELOAD    one handler each, see `smpc.executor.program.host_copies`
    SEND, RECV, MOVE, and for gradients        one handler each, see `smpc.executor.program.channels`
    REDUCE      a handler that sends to the other holders, one for each of them that waits for it, one that sums

`smpc.executor.program.frame` describes what a handler does with tensors.

A value that shares memory with a buffer (BatchNorm statistics, a slice of a position table) is copied when F
has run: the buffer may be written by the next microbatch before the value has been sent, or read by the next
stage of this rank.

`Reduction` sums the gradient of a parameter that several pipeline ranks hold. Every holder sends its gradient to every other and adds up
what exists in order of rank, so all end with the same bits. Where no holder has a gradient, there is none afterwards. A mask says whether
one follows.

Gradients accumulate over steps until the user clears them, and gradients of a former step are already summed: only the first holder may
contribute them. The others start every training step without gradients (`start`). If parameters are sharded over replicas, holders with
the same part sum that part.

Example: ranks 0 and 3 hold the embedding; before REDUCE 0 has g0 and 3 has g3, afterwards both have g0 + g3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from smpc.codegen.program import Instruction, Op, RankProgram, StageCode, split_backwards
from smpc.codegen.recompute import Checkpointing, may_checkpoint
from smpc.codegen.stage import StageModule
from smpc.errors import StepError, TransportError, UsageError
from smpc.executor.program.channels import MASK_DTYPE, ChannelBinder, Delivery, Inbox, Presence, mask_form
from smpc.executor.program.frame import Frame, Handler, Inputs, Root, StepInputs
from smpc.executor.program.host_copies import HostCopyMover, addresses
from smpc.executor.program.message_order import Points, other_holders, posting_points
from smpc.executor.program.shape_rule_calls import first_watched
from smpc.executor.replicas.group_hooks import StepHooks
from smpc.executor.shared_draws import StageDraws
from smpc.executor.split_backward.intercept import Deferral
from smpc.executor.transport import Transport, WireFormat
from smpc.partitioner.graph.plan import INPUTS
from smpc.sharding.dtensors import local, sharded_like
from smpc.sharding.wide_gradients import gradient_dtype
from smpc.tracer.effects.torch_calls import uncompiled
from smpc.tracer.ir import TensorSpec
from smpc.tracer.operations.opaque import shape_rule

_PAIR = 2  # a root and its gradient


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


class Split:
    """Whether splitting the backwards of a stage is worth it: until a whole step has left no work for its Ws, only gradients."""

    __slots__ = ("_found", "is_worthwhile")

    def __init__(self) -> None:
        self.is_worthwhile = True
        self._found: list[bool] = []

    def note(self, has_work: bool | None, is_last: bool) -> None:
        """The result of a W (see `Pending.run`); the last one of a step decides for the next."""
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
        draws: StageDraws | None = None,
    ) -> None:
        self.step = StepInputs()
        self._draws = draws
        self._program = program
        self._modules = stages
        self._codes = {code.index: code for code in program.stages}
        self._transport = transport
        self._parameters = parameters
        self._hooks = hooks
        self.reductions: list[Reduction] = []
        self.frames = {
            (code.index, m): Frame(len(code.inputs), len(code.outputs))
            for code in program.stages
            for m in range(program.num_microbatches)
        }
        self._channels = ChannelBinder(program, self.frames, self.step, transport, device, window, labels, peers)
        self.inboxes = self._channels.inboxes
        self._points: Points = posting_points(peers, program.rank) if transport.receives_on_device else {}
        self._split = split_backwards(program.instructions)
        self._splits = {code.index: Split() for code in program.stages}
        self._moving = frozenset((i.stage, i.microbatch) for i in program.instructions if i.op is Op.OFFLOAD)
        self._mover = HostCopyMover(device) if self._moving else None
        # By stage, the instruction that is the last to add to the gradients of its parameters.
        self._last = {i.stage: i for i in program.instructions if self._adds(i)}
        self._reduced = _bound_reductions(program.instructions, self._last) if hooks is not None else {}
        ends = [end for channel in program.channels for end in (channel.source, channel.destination)]
        self.last_stage = max([*ends, *self._codes], default=0)
        self.states = tuple(stage for stage in self._codes if self._unrooted(stage))

    def bind(self) -> list[Handler]:
        """The handlers, in order."""
        channels = self._channels
        binders: dict[Op, Callable[[Instruction], list[Handler]]] = {
            Op.FORWARD: lambda i: [Handler(self._forward(i), i)],
            Op.BACKWARD: lambda i: [Handler(self._backward(i), i)],
            Op.WEIGHT: lambda i: [Handler(self._weight(i), i)],
            Op.SEND: lambda i: [Handler(channels.send(i), i)],
            Op.RECV: lambda i: [channels.receive(i)],
            Op.SEND_GRAD: lambda i: [Handler(channels.send_grad(i), i)],
            Op.RECV_GRAD: lambda i: [channels.receive_grad(i)],
            Op.MOVE: lambda i: [Handler(channels.move(i), i)],
            Op.MOVE_GRAD: lambda i: [Handler(channels.move_grad(i), i)],
            Op.OFFLOAD: lambda i: [Handler(self._offload(i), i)],
            Op.RELEASE: lambda i: [Handler(self._release(i), i)],
            Op.RELOAD: lambda i: [Handler(self._reload(i), i)],
            Op.REDUCE: self._reduce,
        }
        bound = [(i, binders[i.op](i)) for i in self._program.instructions]
        return [self._posting(i, n, handler) for i, handlers in bound for n, handler in enumerate(handlers)]

    def _posting(self, instruction: Instruction, number: int, handler: Handler) -> Handler:
        """The handler of an instruction, extended to first post the receives that are due."""
        due = [(self.inboxes[peer], count) for peer, count in self._points.get((instruction, number), ())]
        if not due:
            return handler

        def run() -> None:
            for inbox, count in due:
                inbox.allow(count)
            handler.run()

        return Handler(run, instruction, handler.inbox)

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
        whole = isinstance(module, StageModule) and module.differentiates
        split = self._splits[stage] if (stage, microbatch) in self._split and not whole else None
        is_last = stage == self.last_stage
        num_inputs, num_outputs = len(frame.inputs), len(frame.outputs)
        has_backward = self._program.has_backward
        moves = (stage, microbatch) in self._moving
        checkpointing = Checkpointing() if self._may_checkpoint(stage) else nullcontext()
        draws = self._draws
        call = module if draws is None else draws.around(module)
        by_rule = self._modules_by_rule(stage)
        if by_rule:
            call = first_watched(call, by_rule, f"stage {stage}, microbatch {microbatch}")

        def run() -> None:
            arguments = frame.inputs
            frame.inputs = [None] * num_inputs
            with Checkpointing(frame.kept) if moves else checkpointing:
                if split is not None and split.is_worthwhile:
                    with uncompiled(), Deferral(frame.pending):
                        outputs = call(*arguments)
                else:
                    outputs = call(*arguments)
            assert len(outputs) == num_outputs, f"stage {stage} returned {len(outputs)} values, planned {num_outputs}"
            if moves:
                frame.stay = addresses((*outputs, *module.parameters(), *_model_inputs(step.inputs, microbatch)))
            for leaf in leaves:
                frame.leaves[leaf] = arguments[leaf]
            for output in kept:
                frame.outputs[output] = outputs[output]
            for output in unrooted:
                frame.outputs[output] = _bound_apart(outputs[output], step.state[stage])
            for output in rooted:
                frame.edges[output] = _bound_edge(outputs[output], keep_tensors)
            if is_last and step.on_output is not None:
                on_output = step.on_output if draws is None else draws.around(step.on_output)
                _finish_forward(frame, on_output(microbatch, outputs), has_backward)

        return run

    def _called_whole(self, stage: int) -> dict[str, nn.Module] | None:
        """By path, the modules that a stage calls whole; None: its code was not generated."""
        for found in self._modules[stage].modules():  # what has parts is around its stage
            if isinstance(found, StageModule):
                return {path: found.get_submodule(path) for path in self._codes[stage].modules}
        return None

    def _may_checkpoint(self, stage: int) -> bool:
        called = self._called_whole(stage)
        return called is None or may_checkpoint(called.values(), self._codes[stage].source)

    def _modules_by_rule(self, stage: int) -> dict[str, nn.Module]:
        """The modules that a stage calls whole by a shape rule, if it has several microbatches under way."""
        own = [each for each in self._program.instructions if each.stage == stage]
        forwards = [place for place, each in enumerate(own) if each.op is Op.FORWARD]
        backward = next((place for place, each in enumerate(own) if each.op is Op.BACKWARD), 0)
        if sum(place < backward for place in forwards) < 2:
            return {}
        called = self._called_whole(stage) or {}
        return {path: each for path, each in called.items() if shape_rule(each) is not None}

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
                torch.autograd.backward(*zip(*roots, strict=True))  # type: ignore[arg-type]
            if hooks is not None:
                _reduce_after_program(hooks, reduced[1:])
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
                _reduce_after_program(hooks, reduced)

        return run

    def _offload(self, instruction: Instruction) -> Callable[[], None]:
        frame, mover = self.frames[instruction.stage, instruction.microbatch], self._mover
        assert mover is not None

        def run() -> None:
            kept, frame.kept = frame.kept, []
            frame.away = mover.leave(kept, frame.stay)

        return run

    def _release(self, instruction: Instruction) -> Callable[[], None]:
        frame, mover = self.frames[instruction.stage, instruction.microbatch], self._mover
        assert mover is not None
        return lambda: mover.release(frame.away)

    def _reload(self, instruction: Instruction) -> Callable[[], None]:
        frame, mover = self.frames[instruction.stage, instruction.microbatch], self._mover
        assert mover is not None

        def run() -> None:
            frame.loaded = mover.load(frame.away)

        return run

    def _reduce(self, instruction: Instruction) -> list[Handler]:
        name, _ = self._program.shared_parameters[instruction.parameter]
        reduction = Reduction(self._parameters[name], name, self._program.rank, self._transport)
        self.reductions.append(reduction)
        handlers = [Handler(reduction.send, instruction)]
        for peer in other_holders(self._program, instruction):
            inbox = self._channels.inbox(peer)
            handlers.append(Handler(reduction.bind_peer(peer, inbox), instruction, inbox))
        return [*handlers, Handler(reduction.finish, instruction)]


def _bound_reductions(
    instructions: Sequence[Instruction], last: Mapping[int, Instruction]
) -> dict[Instruction, tuple[int, ...]]:
    """With which instructions the gradients of which stages are averaged over replicas.

    Always in falling order of stages, whatever the program's order: other replicas may run another program in this step, or none. So a
    stage whose last backward comes before a later stage's waits for that one: `B s3 m7 ... B s4 m7` averages 4, then 3.
    """
    position = {instruction: i for i, instruction in enumerate(instructions)}
    found: dict[Instruction, tuple[int, ...]] = {}
    point: Instruction | None = None
    for stage in sorted(last, reverse=True):
        if point is None or position[last[stage]] > position[point]:
            point = last[stage]
        found[point] = (*found.get(point, ()), stage)
    return found


def _reduce_after_program(hooks: StepHooks, stages: Sequence[int]) -> None:
    """Average the gradients of stages whose backwards are done: nothing but the hooks' own root is differentiated."""
    for stage in stages:
        extra = hooks.before_last_backward(stage, [])
        if extra is not None:
            torch.autograd.backward([extra[0]], [extra[1]])


def _bound_edge(value: Tensor, keep_tensor: bool) -> Tensor | GradientEdge | None:
    if not value.requires_grad:
        return None
    return value if keep_tensor or value.grad_fn is None else get_gradient_edge(value)


def _bound_apart(value: Tensor, state: frozenset[int]) -> Tensor:
    return value.clone() if value.untyped_storage().data_ptr() in state else value


def _finish_forward(frame: Frame, roots: Sequence[tuple[Tensor, Tensor | None]] | None, has_backward: bool) -> None:
    if roots is None:
        return
    if not isinstance(roots, (list, tuple)):
        raise _wrong_roots(roots)
    for root in roots:
        is_pair = isinstance(root, (tuple, list)) and len(root) == _PAIR
        if not (is_pair and isinstance(root[0], (Tensor, GradientEdge)) and isinstance(root[1], (Tensor, NoneType))):
            raise _wrong_roots(root)
    if not roots:
        return
    if not has_backward:
        raise StepError(
            "a backward was asked for, but this program only evaluates: call backward in every step or in none"
        )
    found: list[Root] = list(roots)
    frame.roots.extend(found)


def _wrong_roots(found: Any) -> UsageError:
    what = (
        f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else f"{type(found).__name__} {found!r}"
    )
    return UsageError(
        f"on_output: expected a list of pairs (tensor, gradient), the roots of the backward pass, such as [(loss / microbatches, None)], "
        f"or None for no backward of this microbatch, found {what}"
    )


def _model_inputs(inputs: Inputs | None, microbatch: int) -> Sequence[Tensor]:
    return () if inputs is None else tuple(inputs[microbatch].values())
