"""One replica's pipeline: what a step does when the model is cut over several ranks.

    pipeline rank 0             others                      rank of the last stage
    ---------------------------------------------------------------------------------------------
    run the step function
    up to model(...)
    header, tensor arguments -> header                      header; receive the arguments
    run the program             run the program             run the program; the whole step function
                                                            where its outputs appear
    results                     results                  <- results

By hand (`smp.partition`) a model may be cut so that rank 0 has the last stage too: it then does what its column and the last say.

Terms
    header      which program runs, and whether the form of the arguments is the last one of this step function
    new         a signature without a program yet, see `smpc.v1.steps.compiling`. The first one fixes which rank holds which parameter
    evaluation  a step without backward. The first call of a function in a signature runs a training program, which can do without
                gradients; from then on it is known, and the forward-only program runs

Errors that pipeline rank 0 finds before the step, and StepErrors of the step function on the last rank, travel in the header and with the
results: all ranks of the pipeline raise them, nothing is left under way, and the next step may go on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smpc.codegen.stage import StageModule
from smpc.compile import Compilation
from smpc.errors import StepError, UsageError
from smpc.executor.handler import StepHooks
from smpc.executor.transport import Transport
from smpc.observe import Observer
from smpc.partitioner.plan import Plan
from smpc.runtime import Runtime
from smpc.sample_inputs import Inputs
from smpc.v1.models.compiled_tensors import CompiledTensors
from smpc.v1.models.placement import Placement
from smpc.v1.state import Session
from smpc.v1.steps.arguments import ArgumentForm, form_of, merge_arguments
from smpc.v1.steps.calls import Capture, Captured, Enter
from smpc.v1.steps.compiling import Compiler
from smpc.v1.steps.control import Control
from smpc.v1.steps.failures import Description, describe, raise_everywhere
from smpc.v1.steps.join import Join
from smpc.v1.steps.last_rank import LastRank
from smpc.v1.steps.microbatch import map_tensors
from smpc.v1.steps.nonfinite import agree, loss_from_bits
from smpc.v1.steps.programs import ProgramTable
from smpc.v1.steps.results import ResultForm, pack, read_results, unpack
from smpc.v1.steps.signature import ModeReader, Signature, check_equal, read_signature
from smpc.v1.steps.step_body import Arguments, StepBody

OwnArguments = Callable[[], Arguments]  # this rank's arguments of a step; binding them may fail
_AT_END = 1 << 30
_NEW = -1
_FAILED = -2


@dataclass(slots=True)
class Memory:
    """What all ranks know of a step function from its earlier calls."""

    arguments: ArgumentForm | None = None
    results: ResultForm | None = None
    trains: dict[int, bool] = field(default_factory=dict)  # program -> whether it was ever followed by a backward


@dataclass(frozen=True)
class Request:
    """A step as pipeline rank 0 begins it."""

    inputs: list[Inputs]
    signature: Signature
    form: ArgumentForm
    tensors: list[Tensor]


@dataclass(frozen=True)
class Outcome:
    """What a step returns on every rank, or the StepError that all of them raise. `verdict`: see `smpc.v1.steps.nonfinite`."""

    value: Any
    verdict: int = 0
    description: Description | None = None
    failure: Exception | None = None
    loss: float | None = None  # mean over the microbatches, where it is known
    did_backward: bool = False

    def result(self) -> Any:
        """The value; raises the error."""
        if self.description is not None:
            raise_everywhere(self.description, self.failure)
        return self.value


class Pipeline:
    """One rank's part of it. `hooks` makes the data-parallel hooks of its stages; `on_compile` is called before a program is made."""

    def __init__(
        self,
        module: torch.nn.Module,
        session: Session,
        transport: Transport,
        control: Control,
        hooks: Callable[[Mapping[int, StageModule]], StepHooks | None],
        enter: Enter,
        average: bool,
        on_compile: Callable[[], None],
        measures: bool = False,
        measures_memory: bool = False,
        observer: Observer | None = None,
        tensors: CompiledTensors | None = None,
    ) -> None:
        device, rank = session.device, control.rank
        self._session, self._control, self._enter, self._tensors = session, control, enter, tensors
        self._num_microbatches = session.config.microbatches
        self._divisor = self._num_microbatches if average else 1  # of gradients
        self.placement = Placement(module, rank, device)
        self._modes = ModeReader(module)
        self._compiler = Compiler(
            module,
            session,
            transport,
            control,
            self.placement,
            self._modes,
            on_compile,
            measures,
            measures_memory,
            tensors,
        )
        self._runtime = Runtime(module, rank=rank, transport=transport, device=device, hooks=hooks, observer=observer)
        self.programs = ProgramTable(session.config.program_cache_size)
        self._memories: dict[int, Memory] = {}
        self.join: Join | None = None
        self.first: Compilation | None = None
        self.saved_plan: Plan | None = None  # that of the checkpoint to resume from
        self._phase = "between steps"
        self._is_done = False  # the instructions of this step

    @property
    def where(self) -> str:
        """What this rank is doing, for reports of a stall."""
        instruction = self._runtime.where()
        return f"{self._phase}: {instruction}" if instruction else self._phase

    @property
    def position(self) -> int:
        """How far this rank has come in the step."""
        return _AT_END if self._is_done else self._runtime.position()

    @property
    def plan(self) -> Plan:
        """The plan of the first signature, which fixed the placement."""
        assert self.first is not None, "the model is partitioned by the first step"
        return self.first.plan

    @property
    def is_last(self) -> bool:
        """Whether this rank runs the last stage, and with it the step function."""
        return self._last == self._control.rank

    @property
    def _last(self) -> int:
        return self.plan.stages[-1].rank

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin(self, body: StepBody, own: OwnArguments, on_partition: Callable[[], None]) -> tuple[int, Request | None]:
        """Agree on the program of a step, compiling it where it is new; (program, rank 0's request).

        `on_partition` is called when the first program is there. Raises on all ranks what rank 0 finds wrong.
        """
        self._phase = f"the start of step function {body.name}"
        self._is_done = False
        request: Request | None = None
        failure: Exception | None = None
        if self._control.rank == 0:
            try:
                request = self._request(body, own)
            except Exception as error:
                failure = error
        if self.first is None:
            self._partition(request, failure)
            on_partition()
        return self._announce(body, request, failure), request

    def run(self, body: StepBody, own: OwnArguments, program: int, request: Request | None) -> Outcome:
        """Run the step that `begin` has prepared."""
        memory = self._memories.setdefault(body.number, Memory())
        signature = self.programs.signature(program)
        trains = self.may_train(body, program)
        self._phase = f"step function {body.name}, program {program}"
        form = memory.arguments
        assert form is not None, "the header brings it"
        if request is not None and not self.is_last:
            self._control.send(request.tensors, form.formats, self._last)
        tail: LastRank | None = None
        if self.is_last:
            tail = LastRank(body, self._arguments(body, own, form, request), self._enter, trains, self._divisor)
        self._modes.check(signature.modes)
        with torch.inference_mode(False), torch.set_grad_enabled(signature.grad_enabled):
            self._runtime.run(
                program,
                None if request is None else request.inputs,
                None if tail is None else tail.on_output,
                training=trains,
            )
        self._phase, self._is_done = f"the end of step function {body.name}", True
        outcome = self._share(body, memory, program, tail)
        self._control.acknowledge(self._last)
        if not trains:
            return outcome
        if self.join is not None:
            self.join.end_step(did_backward=outcome.did_backward)
        if not outcome.did_backward:
            self._runtime.did_not_train()
        return dataclasses.replace(outcome, verdict=agree(outcome.verdict, body, self._session))

    def may_train(self, body: StepBody, program: int) -> bool:
        """Whether this step of the function runs the training program; replicas then exchange buffers and gradients in it."""
        known = self._memories.setdefault(body.number, Memory()).trains
        return self.programs.signature(program).grad_enabled and known.get(program, True)

    def partition_without_data(self, on_partition: Callable[[], None]) -> None:
        """Take part in the first program of all, for a replica that has no batch."""
        self._partition(None, None)
        on_partition()

    def _request(self, body: StepBody, own: OwnArguments) -> Request:
        """Rank 0: run the step function up to the model, for every microbatch."""
        device = self._session.device
        arguments = {name: map_tensors(value, lambda tensor: tensor.to(device)) for name, value in own().items()}
        microbatches = body.split(arguments, self._num_microbatches, device)
        modes = self._modes.read()
        inputs: list[Inputs] = []
        signatures: list[Signature] = []
        for index, microbatch in enumerate(microbatches):
            capture = Capture(body.name)
            self._enter(capture)
            try:
                body.call(microbatch)
            except Captured:
                pass
            except Exception as error:
                error.add_note(f"in pipeline rank 0, step function {body.name} before the model, microbatch {index}")
                raise
            finally:
                self._enter(None)
            if capture.inputs is None:
                raise StepError(
                    f"step function {body.name} returned without calling the model; call model(...) in it once"
                )
            inputs.append(capture.inputs)
            signatures.append(read_signature(capture.inputs, modes, capture.grad_enabled, capture.autocast))
        check_equal(signatures, body.name)
        form, tensors = form_of(arguments)
        signature = self._compiler.answered(signatures[0].with_ones(inputs), inputs, self.programs)
        return Request(inputs, signature, form, tensors)

    def _announce(self, body: StepBody, request: Request | None, failure: Exception | None) -> int:
        """The header, and what it says is to follow."""
        control = self._control
        memory = self._memories.setdefault(body.number, Memory())
        numbers = [_FAILED, body.number, 0]
        if request is not None:
            same = memory.arguments == request.form
            found = self.programs.find(request.signature)
            numbers = [_NEW if found is None else found, body.number, int(same)]
        program, number, same_form = control.broadcast_numbers(numbers, 0)
        if number != body.number:
            raise UsageError(
                f"this rank runs step function {body.name}, pipeline rank 0 runs another one; run the same step functions in the "
                "same order on all ranks"
            )
        if program == _FAILED:
            description = control.broadcast_object(describe(failure), 0)
            control.acknowledge(0)  # rank 0 may exit now, but not before all have read it
            raise_everywhere(description, failure)
        if program == _NEW:
            signature = control.broadcast_object(None if request is None else request.signature, 0)
            program = self._add(signature)
        self.programs.use(program)
        if not same_form:
            memory.arguments = control.broadcast_object(None if request is None else request.form, 0)
        return program

    def _arguments(
        self, body: StepBody, own: OwnArguments, form: ArgumentForm, request: Request | None
    ) -> Callable[[], list[Arguments]]:
        """Last rank: post the receives now, wait when the first output is there."""
        formats = form.formats
        receipts = [] if request is not None else self._control.receive(formats, 0)

        def arrive() -> list[Arguments]:
            tensors = request.tensors if request is not None else self._control.wait(receipts)
            merged = merge_arguments(form, own(), tensors)
            return body.split(merged, self._num_microbatches, self._session.device)

        return arrive

    def _share(self, body: StepBody, memory: Memory, program: int, tail: LastRank | None) -> Outcome:
        """Bring the results of the last rank to all."""
        control, last = self._control, self._last
        form: ResultForm | None = None
        value: Any = None
        tensors: list[Tensor] = []
        failure: Exception | None = None if tail is None else tail.failure
        if tail is not None and failure is None:
            try:
                results = read_results(tail.values(), body.name)
                value, form, tensors = results.join(body.detach_outputs), results.form(), results.tensors
            except StepError as error:
                failure = error
        same = form is not None and form == memory.results
        numbers = [
            _FAILED if failure is not None else int(same),
            int(tail is not None and tail.did_backward),
            0 if tail is None else tail.losses.verdict(self._session),
            0 if tail is None else tail.losses.bits(),
        ]
        status, did_backward, verdict, bits = control.broadcast_numbers(numbers, last)
        if status == _FAILED:
            description = control.broadcast_object(describe(failure), last)
            return Outcome(None, verdict, description, failure, did_backward=bool(did_backward))
        if not status:
            memory.results = control.broadcast_object(form, last)
        memory.trains[program] = memory.trains.get(program, False) or bool(did_backward)
        assert memory.results is not None, "it came with the first results"
        device = self._session.device
        if tail is not None:
            control.broadcast_bytes(pack(tensors, device), last)
        else:
            payload = torch.empty(memory.results.num_bytes, dtype=torch.uint8, device=device)
            control.broadcast_bytes(payload, last)
            value = memory.results.build(unpack(payload, memory.results.specs))
        return Outcome(value, verdict, loss=loss_from_bits(bits), did_backward=bool(did_backward))

    # -- programs ------------------------------------------------------------------------------------------------------

    def _partition(self, request: Request | None, failure: Exception | None) -> None:
        """The first program of all; collective over all ranks of all replicas."""
        own = None if request is None else (request.signature, request.inputs[0])
        self._add(self._compiler.first_signature(own, failure))

    def _add(self, signature: Signature) -> int:
        """Compile and install a program; collective over the pipeline. Raises the same on all its ranks."""
        if len(self.programs) and self._session.mesh.rdp_size > 1:
            self._modes.check_none_unfrozen(self.programs.signature(0).modes, signature.modes)
        compilation = self._compiler.compile(signature, like=self.first, saved=self.saved_plan)
        self.placement.add(compilation.plan)
        if self.first is None:
            if self._tensors is None:
                self.placement.apply()
            else:
                self._tensors.place(self.placement)
            self.first = compilation
        program = self.programs.next_number()
        for memory in self._memories.values():
            memory.trains.pop(program, None)  # what was known of the program that gives way
        self._runtime.install(compilation, program)
        self.programs.put(program, signature, compilation.trace)
        return program
