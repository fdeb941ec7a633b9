"""One replica's pipeline: a step of a model that is cut over several ranks.

    pipeline rank 0             others                      rank of the last stage
    ---------------------------------------------------------------------------------------------
    run the step function
    up to model(...)
    header, tensor arguments -> header                      header; receive the arguments
    run the program             run the program             run the program; the whole step function
                                                            where its outputs appear
    results                     results                  <- results

A manual partition (`smp.partition`) may give rank 0 the last stage too: it then does the work of the first and the last column.

Terms
    header      which program runs, whether the form of the arguments is the last one of this step function, and whether rank 0's script
                has written by numbers into parameters, which all ranks then compare; after the step, whether the last rank's has
    new         a signature without a program yet, see `smpc.v1.steps.programs.compiler`. The first one fixes which rank holds which
                parameter
    evaluation  a step without backward. The first call of a function in a signature runs a training program, which can do without
                gradients; from then on it is known, and the forward-only program runs

Errors that pipeline rank 0 finds before the step, and StepErrors of the step function on the last rank, are sent in the header and with
the results: all ranks of the pipeline raise them, no transfer stays in progress, and the next step may run. Other replicas hear of the
former (a batch that does not divide) as little as where there is no pipeline: a step of theirs waits for this one's next.

The rank of the last stage runs the step function on the pipeline's outputs, beside its instructions.

    output of microbatch m -> model(...) in the step function -> its loss -> model.backward(loss) -> roots of the backward pass of m

The step function runs whole for every microbatch, as soon as the output exists. A StepError in it is kept until the step is over, so
that every rank comes to the end and all can raise it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smpc.absent.stage_attributes import AttributeWatch, Told
from smpc.codegen.stage import StageModule
from smpc.compile.result import Compilation
from smpc.errors import StepError, UsageError
from smpc.executor.replicas.group_hooks import StepHooks
from smpc.executor.transport import Transport
from smpc.observe.observer import StepWatch
from smpc.partitioner.graph.plan import Plan
from smpc.runtime import Roots, Runtime
from smpc.sample_inputs import Inputs
from smpc.tracer.environment.environment_guards import Environment
from smpc.tracer.environment.memory_words import DictVersions
from smpc.tracer.input_guards import state_asked_for
from smpc.tracer.left_inputs import LeftInputs
from smpc.tracer.state.state_use import StateUse
from smpc.v1.session.step_errors import AGREED, Description, describe, raise_error_on_all_ranks
from smpc.v1.session.step_messages import Control
from smpc.v1.steps import written_inputs
from smpc.v1.steps.arguments import ArgumentForm, Arguments, StepBody, form_of, merge_arguments, on_device
from smpc.v1.steps.context import StepContext
from smpc.v1.steps.context_parallel import SharedSequences, digests_of
from smpc.v1.steps.given_inputs import GivenBefore, GivenElsewhere, GivenInputs
from smpc.v1.steps.model_calls import Capture, Captured, Tail
from smpc.v1.steps.programs.compiler import Compiler
from smpc.v1.steps.programs.signature import (
    ModeReader,
    ProgramTable,
    Signature,
    check_equal,
    read_signature,
    verify_first,
)
from smpc.v1.steps.results import (
    Losses,
    ResultForm,
    Returned,
    agree,
    loss_from_bits,
    loss_to_bits,
    pack,
    read_results,
    take,
)
from smpc.v1.steps.step_draws import DRAWS, Sent, as_tensors, drawing_from
from smpc.verification.random_state import RandomState


@dataclass(frozen=True, slots=True)
class Arrived:
    """Rank 0's tensors by slot, and for every microbatch its arguments, and the random states to run it from, if the function draws."""

    tensors: Sequence[Tensor]
    microbatches: list[tuple[Arguments, Sent | None]]


class LastRank:
    """The step function in one step.

    `arguments` returns what rank 0 has sent, once it has arrived. `before`: what the function has given the model in every microbatch when
    it ran up to it, if that is to be compared.
    """

    def __init__(
        self,
        context: StepContext,
        body: StepBody,
        arguments: Callable[[], Arrived],
        trains: bool,
        before: Sequence[GivenInputs] = (),
    ) -> None:
        self._context = context
        self._body = body
        self._arguments = arguments
        self._trains = trains
        self._before = before
        self._scale = context.scale  # of gradients
        self._arrived: Arrived | None = None
        self._left: dict[int, LeftInputs] = {}  # by microbatch
        self._written: list[Tensor] = []
        self._values: dict[int, Returned] = {}
        self.did_backward = False
        self.losses = Losses(context.precision)
        self.failure: StepError | None = None

    def on_left(self, microbatch: int, left: LeftInputs) -> None:
        """Note what forward has left in the model's inputs, before `on_output`."""
        self._left[microbatch] = left

    def on_output(self, microbatch: int, output: Any) -> Roots | None:
        """Run the step function for one microbatch; the roots of its backward pass.

        After a StepError the remaining microbatches run without it and without gradients, so that every rank comes to the end.
        """
        if self.failure is not None:
            return None
        try:
            return self._call(microbatch, output)
        except StepError as error:
            self.failure = error
            return None

    def _call(self, microbatch: int, output: Any) -> Roots | None:
        body = self._body
        if self._arrived is None:
            self._arrived = self._arguments()
        before = self._before[microbatch] if self._before else None
        module, shared = self._context.module, self._context.shared_use_of
        left = self._left.pop(microbatch, None)
        arguments, states = self._arrived.microbatches[microbatch]
        tail = Tail(body.name, output, self._scale, module, before, shared, left, arguments)
        self._context.calls = tail
        try:
            copies = written_inputs.Copies()
            if left is not None and any(values.requires_grad for _, values in left.written):
                arguments = copies.made_of(arguments)
            with drawing_from(states, self._context.session.device):
                self._values[microbatch] = take(body.call(arguments), body.detach_outputs)
        finally:
            self._context.calls = None
            tail.close()
        self._written += copies.write_back(tail.written) or tail.written
        if tail.roots is None:
            return None
        if not self._trains:
            raise StepError(
                f"step function {body.name} calls model.backward, but its earlier calls did not, so this step ran without "
                "keeping activations; use one step function for training and another for evaluation"
            )
        self.did_backward = True
        self.losses.add(microbatch, tail.losses)
        return tail.roots

    def values(self) -> list[Returned]:
        """The results of the microbatches, in order."""
        return [self._values[i] for i in range(len(self._values))]

    def written(self) -> tuple[list[int], Sequence[Tensor]]:
        """The slots of rank 0's tensors into which forward has written, and these tensors."""
        tensors = () if self._arrived is None else self._arrived.tensors
        return written_inputs.slots_of(tensors, self._written), tensors


OwnArguments = Callable[[], Arguments]  # this rank's arguments of a step; binding them may fail
_AT_END = 1 << 30
_NEW = -1
_FAILED = -2


@dataclass(slots=True)
class Memory:
    """Knowledge of a step function from its earlier calls, the same on all ranks."""

    arguments: ArgumentForm | None = None
    results: ResultForm | None = None
    trains: dict[int, bool] = field(default_factory=dict)  # program -> whether it was ever followed by a backward
    trained: bool | None = None  # the same for all programs with gradients so far; None: there was none


@dataclass(frozen=True)
class StepRequest:
    """A step as pipeline rank 0 begins it. `program`: its number, None if there is none yet. `arguments`: the step function's."""

    inputs: list[Inputs]
    signature: Signature
    form: ArgumentForm
    tensors: list[Tensor]
    arguments: Arguments
    before: list[GivenBefore]  # where the last stage is on this rank
    program: int = _NEW


@dataclass(frozen=True)
class Outcome:
    """A step's result on every rank, or the StepError that all of them raise. `verdict`: see `smpc.v1.steps.results`."""

    value: Any
    verdict: int = 0
    description: Description | None = None
    failure: Exception | None = None
    loss: float | None = None  # mean over the microbatches, where it is known
    did_backward: bool = False


class Pipeline:
    """One rank's part of the pipeline. `hooks` makes the data-parallel hooks of its stages."""

    def __init__(
        self,
        context: StepContext,
        transport: Transport,
        control: Control,
        hooks: Callable[[Mapping[int, StageModule]], StepHooks | None],
    ) -> None:
        session = context.session
        self._context, self._session, self._transport, self._control = context, session, transport, control
        self._num_microbatches = session.config.microbatches
        self._judges_alone = session.mesh.dp_size == 1  # signatures that `agree` need not check again
        self._versions = DictVersions()
        self._modes = ModeReader(context.module, self._versions)
        self._compiler = Compiler(context, transport, control, self._modes, self._versions)
        self._runtime = Runtime(
            context.module,
            rank=control.rank,
            transport=transport,
            device=session.device,
            hooks=hooks,
            observer=context.observer,
            checks_script=False,  # DistributedModel and DistributedOptimizer know of the other ranks
        )
        self.programs = ProgramTable(session.config.program_cache_size)
        self._memories: dict[int, Memory] = {}
        self.first: Compilation | None = None
        self._last = -1  # the pipeline rank of the last stage, once there is a plan
        self._is_last = False  # whether this is it, which runs the step function
        self.saved_plan: Plan | None = None  # of the checkpoint to resume from
        self._phase = "between steps"
        self._is_done = False  # the instructions of this step
        self._watches: dict[int, AttributeWatch] = {}  # by program
        self._unwatched: set[int] = set()  # programs that have not run yet
        self._told: list[Told] = []  # in this step
        self._given: list[GivenElsewhere] = []  # in this step, if rank 0 has told
        self._is_asked = False  # this step, without an error: what follows is not for this pipeline alone to give up

    @property
    def where(self) -> str:
        """This rank's current activity, for reports of a stall."""
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
    def hooks(self) -> StepHooks | None:
        """See `Runtime.hooks`."""
        return self._runtime.hooks

    def own_modules(self) -> tuple[str, ...]:
        """The modules that are wholly on this rank, without their submodules."""
        return tuple(name for stage in self.plan.stages if stage.rank == self._control.rank for name in stage.modules)

    def close(self) -> None:
        """End this rank's connections to the others of the pipeline."""
        self._transport.close()
        self._control.close()

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self, body: StepBody, own: OwnArguments, watch: StepWatch) -> tuple[Any, int]:
        """One step; returns its result and the verdict on its losses."""
        context = self._context
        supervision, join = context.supervision, context.join
        if self.first is not None and not context.placement.is_spread:
            context.placement.spread()
        attributes = context.placement.attributes
        with supervision.step(), ExitStack() as in_step:
            if join is not None and self.first is None:
                join.begin_partition()
            elif join is not None and context.sequences is not None:
                join.begin_batch()
            in_step.enter_context(nullcontext() if attributes.is_empty else attributes.in_step())
            try:
                program, request = self._begin(body, own)
            except AGREED as error:
                mesh = self._session.mesh
                agreed = mesh.ep_size if context.experts is not None and mesh.cp_size == 1 else mesh.cp_size
                waits = self._session.is_sharded or context.experts is not None  # wherever the script goes on
                is_told = self._is_asked or (waits and self.first is not None)  # else it may leave a batch out
                if is_told and (mesh.rdp_size if context.experts is None else mesh.dp_size) > agreed:
                    supervision.report(error)  # ranks that have not agreed would wait for this one
                raise
            except BaseException as error:
                with supervision.guard():
                    raise error
            if join is not None:
                join.begin_step(trains=self._trains(body, self.programs.entries[program][0], program))
            with supervision.guard():
                outcome = self._run(body, own, program, request)
        if self._told:
            attributes.take(self._told)
            self._told = []
        watch.loss = outcome.loss
        if outcome.description is not None:
            raise_error_on_all_ranks(outcome.description, outcome.failure)
        return outcome.value, outcome.verdict

    def _begin(self, body: StepBody, own: OwnArguments) -> tuple[int, StepRequest | None]:
        """Agree on the program of a step, compiling it if it is new; (program, rank 0's request).

        Raises rank 0's errors on all ranks.
        """
        self._phase = f"the start of step function {body.name}"
        self._is_done = self._is_asked = False
        self._given = []
        self._versions.poll()
        request: StepRequest | None = None
        failure: Exception | None = None
        if self._control.rank == 0:
            try:
                request = self._request(body, own)
            except Exception as error:
                failure = error
            if self._context.sequences is not None:
                failure = self._agree_on(self._context.sequences, body, request, failure)
            if self._context.experts is not None:
                failure = self._context.experts.agree(body.name, self._asks_to_train(body, request), failure)
            request = None if failure is not None else request
        if self.first is None:
            self._partition(request, failure)
            if request is not None and self.programs.entries[0][0] == request.signature:
                request = dataclasses.replace(request, program=0)
        return self._announce(body, request, failure), request

    def _run(self, body: StepBody, own: OwnArguments, program: int, request: StepRequest | None) -> Outcome:
        """Run the step that `_begin` has prepared."""
        memory = self._memories.setdefault(body.number, Memory())
        signature, recording = self.programs.entries[program]
        trains = self._trains(body, signature, program)
        self._phase = f"step function {body.name}, program {program}"
        if self._context.sequences is not None:
            self._context.sequences.begin_step(recording.trace)
        join = self._context.join
        if trains and join is not None and join.is_followed and not self._runtime.sums_like_first(program):
            raise StepError(
                f"join: expected step function {body.name} to divide sequences for the same parameters as in the first step, as replicas "
                "that ran out of data follow it with fully_shard, found others for these sizes; pad sequences to one length"
            )
        form = memory.arguments
        assert form is not None, "the header brings it"
        if request is not None and not self._is_last:
            self._control.send(request.tensors, form.formats, self._last)
        tail: LastRank | None = None
        if self._is_last:
            arguments = self._arguments(body, own, form, request)
            tail = LastRank(self._context, body, arguments, trains, self._given_before(memory, request))
        with torch._C.DisableTorchFunctionSubclass():
            self._modes.check(signature.modes)
        attributes = self._context.placement.attributes
        if self._control.rank != 0:  # which has compared it when it looked for the program
            with nullcontext() if attributes.is_empty else attributes.as_before():
                _check_environment(recording.environment)
        recording.environment.leave()
        self._context.trace = recording.trace
        with torch.inference_mode(False), torch.set_grad_enabled(signature.grad_enabled):
            self._runtime.run(
                program,
                None if request is None else request.inputs,
                None if tail is None else tail.on_output,
                training=trains,
                on_left=None if tail is None else tail.on_left,
            )
        if program in self._unwatched or not attributes.is_empty:
            self._unwatched.discard(program)
            self._told = self._control.gather(attributes.told(self._watches[program].changed()))
        if self._context.placement.out_of_date:
            self._context.placement.note_written()
        self._phase, self._is_done = f"the end of step function {body.name}", True
        outcome = self._share(body, memory, program, tail)
        if recording.trace.written and outcome.description is None:
            slots, tensors = ([], ()) if tail is None else tail.written()
            written_inputs.share(self._control, self._last, form, slots, tensors, own())
        self._control.acknowledge(self._last)
        if not trains:
            return outcome
        if self._context.join is not None:
            self._context.join.end_step(did_backward=outcome.did_backward)
        if not outcome.did_backward:
            self._runtime.did_not_train()
        if self._judges_alone:
            return outcome
        return dataclasses.replace(outcome, verdict=agree(outcome.verdict, body, self._session))

    def _asks_to_train(self, body: StepBody, request: StepRequest | None) -> bool | None:
        """The same of rank 0's request, whose program may be new; None if there is none."""
        return None if request is None else self._trains(body, request.signature, request.program)

    def _trains(self, body: StepBody, signature: Signature, program: int) -> bool:
        """Whether this step of the function runs the training program; replicas then exchange buffers and gradients in it."""
        memory = self._memories.setdefault(body.number, Memory())
        if (
            self._context.experts is not None and memory.trained is not None
        ):  # others that send tokens have other programs
            return signature.grad_enabled and memory.trained
        return signature.grad_enabled and memory.trains.get(program, True)

    def partition_without_data(self) -> None:
        """Take part in the first program of all, for a replica that has no batch."""
        self._partition(None, None)

    def _request(self, body: StepBody, own: OwnArguments) -> StepRequest:
        """Rank 0: run the step function up to the model, for every microbatch."""
        context, device = self._context, self._session.device
        arguments = on_device(own(), device)
        microbatches = body.split(arguments, self._num_microbatches, device)
        with torch._C.DisableTorchFunctionSubclass():  # absent parameters are read like others, and as fast
            modes = self._modes.read()
        inputs: list[Inputs] = []
        before: list[GivenBefore] = []
        runs_twice = self._is_last or self.first is None  # the whole function too, as far as is known
        signatures: list[Signature] = []
        states = [RandomState.now(self._session.device)]
        for index, microbatch in enumerate(microbatches):
            capture = Capture(body.name)
            context.calls = capture
            try:
                body.call(microbatch)
            except Captured:
                pass
            except Exception as error:
                error.add_note(f"in pipeline rank 0, step function {body.name} before the model, microbatch {index}")
                raise
            finally:
                context.calls = None
            if capture.inputs is None:
                raise StepError(
                    f"step function {body.name} returned without calling the model; call model(...) in it once"
                )
            inputs.append(capture.inputs)
            if runs_twice:
                before.append(GivenBefore(capture.inputs))
            signatures.append(read_signature(capture.inputs, modes, capture.grad_enabled, capture.autocast))
            states.append(RandomState.now(self._session.device))
        check_equal(signatures, body.name)
        drawn = {} if states[0].is_same(states[-1]) else {DRAWS: [as_tensors(each) for each in states[:-1]]}
        form, tensors = form_of({**arguments, **drawn}, device=device, detached=signatures[0].grad_enabled)
        asked = signatures[0].with_ones(inputs)
        attributes = context.placement.attributes
        with nullcontext() if attributes.is_empty else attributes.as_before():
            known = self.programs.lookup(asked, inputs, context.module)
        if known is not None:
            return StepRequest(inputs, self.programs.entries[known][0], form, tensors, arguments, before, known)
        return StepRequest(inputs, self._compiler.answered(asked, inputs), form, tensors, arguments, before)

    def _agree_on(
        self, sequences: SharedSequences, body: StepBody, request: StepRequest | None, failure: Exception | None
    ) -> Exception | None:
        """Rank 0: the failure of this step, the same on all ranks that share sequences."""
        asked: Any = None
        digests: dict[str, str] = {}
        try:
            if request is not None and failure is None:
                memory = self._memories.setdefault(body.number, Memory())
                signature = request.signature if request.program == _NEW else None
                form = None if memory.arguments == request.form else request.form
                asked = body.number, request.program, signature, form
                digests = digests_of(request.arguments, request.inputs)
            sequences.agree(body.name, asked, digests, failure)
        except Exception as error:
            return error
        return None

    def _announce(self, body: StepBody, request: StepRequest | None, failure: Exception | None) -> int:
        """The header, and the messages that it announces."""
        control = self._control
        memory = self._memories.setdefault(body.number, Memory())
        writes = self._context.placement.writes
        num_written = 0 if writes is None or writes.is_empty else writes.num_for_all
        numbers = [_FAILED, body.number, 0, 0]
        if request is not None:
            same = memory.arguments == request.form
            numbers = [request.program, body.number, int(same), num_written]
        program, number, same_form, written = control.broadcast_numbers(numbers, 0)
        if number != body.number:
            raise UsageError(
                f"this rank runs step function {body.name}, pipeline rank 0 runs another one; run the same step functions in the "
                "same order on all ranks"
            )
        if program == _FAILED:
            description = control.broadcast_object(describe(failure), 0)
            control.acknowledge(0)  # rank 0 may exit now, but not before all have read it
            raise_error_on_all_ranks(description, failure)
        self._is_asked = True
        if writes is not None and written:
            writes.compare()
        if program == _NEW:
            signature = control.broadcast_object(None if request is None else request.signature, 0)
            program = self._add(signature)
        self.programs.use(program)
        if not same_form:
            given = None
            if request is not None:
                given = request.form, [GivenElsewhere.of(each) for each in request.inputs]
            memory.arguments, self._given = control.broadcast_object(given, 0)
        return program

    def _given_before(self, memory: Memory, request: StepRequest | None) -> Sequence[GivenInputs]:
        """What the last rank compares with in this step."""
        if request is None:
            return self._given
        return request.before if self._session.device.type == "cpu" or memory.results is None else ()

    def _arguments(
        self, body: StepBody, own: OwnArguments, form: ArgumentForm, request: StepRequest | None
    ) -> Callable[[], Arrived]:
        """Last rank: post the receives now, wait when the first output exists."""
        formats = form.formats
        receipts = [] if request is not None else self._control.receive(formats, 0)

        def arrive() -> Arrived:
            tensors = request.tensors if request is not None else self._control.wait(receipts)
            device = self._session.device
            merged = on_device(merge_arguments(form, own(), tensors), device)
            states = merged.pop(DRAWS, [None] * self._num_microbatches)
            return Arrived(tensors, list(zip(body.split(merged, self._num_microbatches, device), states, strict=True)))

        return arrive

    def _share(self, body: StepBody, memory: Memory, program: int, tail: LastRank | None) -> Outcome:
        """Bring the results of the last rank to all."""
        control, last, writes = self._control, self._last, self._context.placement.writes
        form: ResultForm | None = None
        value: Any = None
        tensors: list[Tensor] = []
        failure: Exception | None = None if tail is None else tail.failure
        if tail is not None and failure is None:
            try:
                results = read_results(tail.values(), body.name)
                value, form, tensors = results.join(), results.form(), results.tensors
            except StepError as error:
                failure = error
        same = form is not None and form == memory.results
        numbers = [
            _FAILED if failure is not None else int(same),
            int(tail is not None and tail.did_backward),
            0 if tail is None else self._context.verdict(tail.losses),
            0 if tail is None else loss_to_bits(tail.losses.mean),
            0 if writes is None or writes.is_empty else writes.num_for_all,
        ]
        status, did_backward, verdict, bits, written = control.broadcast_numbers(numbers, last)
        if writes is not None and written:
            writes.compare()
        elif writes is not None and not writes.is_empty:
            writes.take()
        if status == _FAILED:
            description = control.broadcast_object(describe(failure), last)
            return Outcome(None, verdict, description, failure, did_backward=bool(did_backward))
        if not status:
            memory.results = control.broadcast_object(form, last)
        memory.trains[program] = memory.trains.get(program, False) or bool(did_backward)
        if self.programs.entries[program][0].grad_enabled:
            memory.trained = bool(memory.trained) or bool(did_backward)
        assert memory.results is not None, "it came with the first results"
        device = self._session.device
        if tail is not None:
            control.broadcast_bytes(pack(tensors, device), last)
        else:
            payload = torch.empty(memory.results.num_bytes, dtype=torch.uint8, device=device)
            control.broadcast_bytes(payload, last)
            value = memory.results.build(payload)
        return Outcome(value, verdict, loss=loss_from_bits(bits), did_backward=bool(did_backward))

    # -- programs ------------------------------------------------------------------------------------------------------

    def _partition(self, request: StepRequest | None, failure: Exception | None) -> None:
        """The first program of all; collective over all ranks of all replicas."""
        self._context.hooks.before_partition()
        own = None if request is None else (request.signature, request.inputs[0])
        signature = self._compiler.first_signature(own, failure)
        self._is_asked = True
        self._add(signature, None if request is None else request.inputs[0])
        self._last = self.plan.stages[-1].rank
        self._is_last = self._last == self._control.rank
        self._context.hooks.run()

    def _add(self, signature: Signature, microbatch: Inputs | None = None) -> int:
        """Compile and install a program; collective over the pipeline. Raises the same on all its ranks.

        `microbatch`: for the first program of all, on rank 0, the inputs to verify it on.
        """
        context = self._context
        if self.programs.entries and self._session.mesh.rdp_size > 1:
            self._modes.check_none_unfrozen(self.programs.entries[0][0].modes, signature.modes)
        compilation, recording = self._compiler.compile(signature, like=self.first, saved=self.saved_plan)
        is_shared = context.tensors is not None or context.sequences is not None or context.experts is not None
        if self.first is None and self._session.config.verify and not is_shared:
            compiled = compilation, recording
            verify_first(context.module, self._session, self._control, signature, compiled, microbatch)
        trace = compilation.trace
        context.placement.add(compilation.plan, state_asked_for(trace), StateUse.of(trace))
        if self.first is None:
            if context.tensors is None:
                context.placement.apply()
            else:
                optimizer = context.script.optimizer
                context.tensors.place(context.placement, {} if optimizer is None else optimizer.state)
            self.first = compilation
            context.is_cut = True
            if context.sequences is not None:
                context.sequences.is_begun = True
        program = self.programs.next_number()
        for memory in self._memories.values():
            memory.trains.pop(program, None)  # knowledge of the replaced program
        self._runtime.install(compilation, program)
        own = compilation.programs[self._control.rank].stages
        self._unwatched.add(program)
        self._watches[program] = AttributeWatch(context.module, {name for code in own for name in code.modules})
        if not self.programs.entries:
            self._modes.rebase()  # the parameters may have been replaced
        self.programs.put(program, signature, recording)
        return program


def _check_environment(environment: Environment) -> None:
    """Raise StepError if values that the model's Python reads have changed since the program was recorded."""
    difference = environment.difference()
    if difference is not None:
        raise StepError(
            f"{difference} when this rank recorded the program that pipeline rank 0 runs now, where it has not changed; change it "
            "on every rank, between the same two steps"
        )
