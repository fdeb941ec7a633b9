"""Runs the program of one rank (`Interpreter`), or the programs of all pipeline ranks in one process (`run_loopback`).

The interpreter has no policy: it goes through the instructions in order, and everything about them was looked
up when it was built (`smpc.executor.program.bind`). A step is

    start       broadcast buffers (data parallel), post the first receives
    advance     ... the instructions, one after another
    finish      wait until everything sent has left; reduce what data parallelism has not reduced yet

`run` does all of it.

Example, on each rank: `Interpreter(program, stages, transport).run(inputs, on_output)` where `stages[i]` is
the module of stage i, `inputs[m]["input_ids"]` a tensor of microbatch m (on rank 0 alone), and `on_output(m,
outputs)` computes the loss of microbatch m from the model's outputs (on the rank of the last stage alone) and
returns `[(loss, None)]`, or None to do no backward.

An exception leaves the interpreter empty and carries a note that names rank, instruction, stage and
microbatch.

`run_loopback` runs the interpreters of all pipeline ranks in one thread. Ranks take turns; each runs until it needs a message that has not
been sent. The result equals real processes', bit by bit. For tests, debugging and training on one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from smpc.codegen.program import Op, RankProgram
from smpc.errors import ScheduleError
from smpc.executor.measure.spans import SpanRecorder
from smpc.executor.program.bind import Binder
from smpc.executor.program.frame import Inputs, OnOutput
from smpc.executor.program.message_order import message_pairs
from smpc.executor.replicas.group_hooks import StepHooks
from smpc.executor.shared_draws import StageDraws
from smpc.executor.transport import Transport

DEFAULT_WINDOW = 4


class Interpreter:
    """Runs the program of one rank, step after step.

    `stages` maps the rank's stage indices to their modules, `parameters` canonical names to parameters (only the shared ones are looked
    up). Received tensors are put on `device`. `window` is how many messages of a peer are received ahead. `labels`: names of values in
    error messages, if not their own. `peers`: the programs of all ranks, from which it knows early when sent tensors have arrived;
    without them tensors are held until the step ends. With them, construction is collective over the ranks, since their connections are
    made. `draws`: where the stages' random numbers come from, if not from the default generators as they are.
    """

    def __init__(
        self,
        program: RankProgram,
        stages: Mapping[int, nn.Module],
        transport: Transport,
        *,
        device: torch.device | str = "cpu",
        parameters: Mapping[str, nn.Parameter] | None = None,
        hooks: StepHooks | None = None,
        window: int = DEFAULT_WINDOW,
        labels: Mapping[str, str] | None = None,
        peers: Sequence[RankProgram] = (),
        draws: StageDraws | None = None,
    ) -> None:
        expected = [code.index for code in program.stages]
        assert sorted(stages) == sorted(expected), f"rank {program.rank} runs stages {expected}, got {sorted(stages)}"
        assert window >= 1, "at least the next message must be received"
        if not program.has_backward:
            hooks = None
        self.program = program
        self._modules = dict(stages)
        self._transport = transport
        self._hooks = hooks
        self._binder = Binder(
            program,
            stages,
            transport,
            parameters or {},
            hooks,
            torch.device(device),
            window,
            labels or {},
            peers,
            draws,
        )
        self._handlers = self._binder.bind()
        self._runs = [handler.run for handler in self._handlers]
        self._position = len(self._handlers)
        transport.connect(message_pairs(peers))

    @property
    def finished(self) -> bool:
        """Whether no instruction is left."""
        return self._position == len(self._handlers)

    @property
    def position(self) -> int:
        """How many instructions of the step are behind it."""
        return self._position

    def record(self, recorder: SpanRecorder | None) -> None:
        """From the next step on, report to `recorder` when each instruction runs; None: no reports."""
        handlers = self._handlers
        if recorder is None:
            self._runs = [handler.run for handler in handlers]
        else:
            self._runs = [recorder.timed(handler.instruction, handler.run) for handler in handlers]

    def where(self) -> str:
        """The current instruction, for people: rank, text, position. For any thread: the step continues meanwhile."""
        position = self._position
        if position == len(self._handlers):
            return f"pipeline rank {self.program.rank}, after the last instruction"
        instruction = self._handlers[position].instruction
        towards = "from" if instruction.op in (Op.RECV, Op.RECV_GRAD) else "to"
        text = str(instruction) if instruction.peer < 0 else str(instruction).replace(" r", f" {towards} r")
        operands = [
            f"{name} {number}"
            for name, number in (
                ("stage", instruction.stage),
                ("edge", instruction.edge),
                ("microbatch", instruction.microbatch),
                ("with pipeline rank", instruction.peer),
            )
            if number >= 0
        ]
        if instruction.parameter >= 0:
            operands.append(f"shared parameter {self.program.shared_parameters[instruction.parameter][0]!r}")
        return f"pipeline rank {self.program.rank}, instruction '{text}' ({', '.join(operands)})"

    def run(self, inputs: Inputs | None, on_output: OnOutput | None) -> None:
        """One step."""
        self.start(inputs, on_output)
        try:
            for position, run in enumerate(self._runs):
                self._position = position
                run()
            self._position = len(self._runs)
        except BaseException as error:
            self._fail(error)
            raise
        self.finish()

    def start(self, inputs: Inputs | None, on_output: OnOutput | None) -> None:
        """Begin a step."""
        step = self._binder.step
        step.inputs, step.on_output = inputs, on_output
        for stage in self._binder.states:
            step.state[stage] = frozenset(b.untyped_storage().data_ptr() for b in self._modules[stage].buffers())
        if self.program.has_backward:
            for reduction in self._binder.reductions:
                reduction.start()
        if self._hooks is not None:
            self._hooks.start_of_step()
        self._position = 0
        for inbox in self._binder.inboxes.values():
            inbox.start()

    def blocked(self) -> bool:
        """Whether the current instruction waits for a message that has not come (loopback can tell)."""
        inbox = self._handlers[self._position].inbox
        return inbox is not None and not inbox.ready()

    def advance(self) -> bool:
        """Run the current instruction unless it would have to wait. True if it ran."""
        if self.finished or self.blocked():
            return False
        try:
            self._runs[self._position]()
        except BaseException as error:
            self._fail(error)
            raise
        self._position += 1
        return True

    def finish(self) -> None:
        """End a step."""
        try:
            self._transport.flush()
            if self._hooks is not None:
                self._hooks.end_of_step()
        except BaseException as error:
            self._fail(error)
            raise
        self._binder.step.inputs = self._binder.step.on_output = None

    def abandon(self) -> None:
        """Drop everything that belongs to the current step."""
        self._position = len(self._handlers)
        for frame in self._binder.frames.values():
            frame.clear()
        for inbox in self._binder.inboxes.values():
            inbox.clear()
        self._binder.step.inputs = self._binder.step.on_output = None

    def close(self) -> None:
        """After a failure: close the transport, so that peers that wait wake up."""
        self._transport.close()

    def _fail(self, error: BaseException) -> None:
        error.add_note(f"in {self.where()}")
        self.abandon()


def run_loopback(interpreters: Sequence[Interpreter], inputs: Inputs, on_output: OnOutput | None) -> None:
    """One step on all ranks; `interpreters[r]` is rank r's, over the transports of `loopback_transports`.

    `inputs` go to rank 0 and `on_output` to the last stage's rank, as in `Interpreter.run`. ScheduleError if no rank
    can continue.
    """
    try:
        for rank, interpreter in enumerate(interpreters):
            interpreter.start(inputs if rank == 0 else None, on_output)
        while not all(interpreter.finished for interpreter in interpreters):
            progress = [_run_until_blocked(interpreter) for interpreter in interpreters]
            if not any(progress):
                raise ScheduleError(_deadlock_of_interpreters(interpreters))
        for interpreter in interpreters:
            interpreter.finish()
    except BaseException:
        for interpreter in interpreters:
            interpreter.abandon()
            interpreter.close()
        raise


def _run_until_blocked(interpreter: Interpreter) -> bool:
    progress = False
    while interpreter.advance():
        progress = True
    return progress


def _deadlock_of_interpreters(interpreters: Sequence[Interpreter]) -> str:
    waiting = [interpreter.where() for interpreter in interpreters if not interpreter.finished]
    lines = "\n".join(f"  {where} waits for a message" for where in waiting)
    return f"deadlock: no rank can go on\n{lines}\nverify the programs before running them"
