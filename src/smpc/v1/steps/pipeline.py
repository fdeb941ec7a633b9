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
    new         a signature without a program yet: every rank records the model (rank 0 on the real inputs, the others with meta tensors
                and its answers), rank 0 plans, all compile. The first one fixes which rank holds which parameter; with replicas it is that
                of replica 0, for all
    evaluation  a step without backward. The first call of a function in a signature runs a training program, which can do without
                gradients; from then on it is known, and the forward-only program runs

Errors that pipeline rank 0 finds before the step, and StepErrors of the step function on the last rank, travel in the header and with the
results: all ranks of the pipeline raise them, nothing is left under way, and the next step may go on.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smpc.codegen.actions import split_backwards
from smpc.codegen.stage import StageModule
from smpc.compile import Compilation, Inputs, PipelineOptions, compile_plan, make_plan, plan_warnings, with_kernels
from smpc.errors import ConfigUnsupportedError, StepError, TraceError, UsageError
from smpc.executor.bind import StepHooks
from smpc.executor.transport import Transport
from smpc.executor.wires import measure_wire
from smpc.mesh import Axis
from smpc.observe import Observer
from smpc.partitioner.cost import NodeTimes, Workspace, node_times
from smpc.partitioner.device import DEVICES, find_device
from smpc.partitioner.plan import KernelUse, Plan
from smpc.partitioner.timing import measure_times
from smpc.partitioner.workspace import measure_workspace
from smpc.runtime import Roots, Runtime
from smpc.tracer.guards import broken_guard
from smpc.tracer.ir import Guard, Trace
from smpc.tracer.questions import Answers
from smpc.tracer.record import record
from smpc.tracer.replay import input_values
from smpc.v1.models.compiled_tensors import CompiledTensors
from smpc.v1.models.partition import manual_partition
from smpc.v1.models.placement import Placement
from smpc.v1.optimization.precision import loss_scale, planned_optimizer
from smpc.v1.session.comm import gather_objects
from smpc.v1.state import Session, state
from smpc.v1.steps.arguments import ArgumentForm, form_of, merge_arguments
from smpc.v1.steps.calls import Capture, Captured, ModelCalls, Tail
from smpc.v1.steps.control import Control
from smpc.v1.steps.failures import Description, describe, raise_everywhere, raise_first
from smpc.v1.steps.join import Join
from smpc.v1.steps.microbatch import map_tensors
from smpc.v1.steps.nonfinite import Losses, agree, loss_from_bits
from smpc.v1.steps.programs import ProgramTable
from smpc.v1.steps.results import ResultForm, pack, read_results, unpack
from smpc.v1.steps.signature import ModeReader, Signature, check_equal, read_signature
from smpc.v1.steps.step_body import Arguments, StepBody

OwnArguments = Callable[[], Arguments]  # this rank's arguments of a step; binding them may fail
Enter = Callable[[ModelCalls | None], None]  # sets what model(...) and model.backward(...) do
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
        config = session.config
        self._tensors = tensors
        self._measures, self._measures_memory, self._transport = measures, measures_memory, transport
        self._times: NodeTimes | None = None  # measured before the first plan
        self._on_compile = on_compile
        self._module, self._session, self._control, self._enter = module, session, control, enter
        self._average = average
        self._options = PipelineOptions(
            pipeline_parallel_degree=config.pipeline_parallel_degree,
            microbatches=config.microbatches,
            pipeline=config.pipeline,
            schedule=config.schedule or None,
            virtual_pipeline_degree=config.virtual_pipeline_degree or None,
            memory_weight=config.memory_weight,
            active_microbatches=config.active_microbatches,
            device=_device_name(session.device),
            offload_activations=config.offload_activations,
            activation_loading_horizon=config.activation_loading_horizon,
            skip_tracing=config.skip_tracing,
            kernels=config.kernels,
            optimizer=planned_optimizer(config),
            data_parallel_degree=session.mesh.dp_size if config.shard_optimizer_state else 1,
            shard_optimizer_state=config.shard_optimizer_state,
        )
        self._kernels: tuple[KernelUse, ...] = ()  # what became of the ops in the last recording
        self.placement = Placement(module, control.rank, session.device)
        self.modes = ModeReader(module)
        device, rank = session.device, control.rank
        self._runtime = Runtime(module, rank=rank, transport=transport, device=device, hooks=hooks, observer=observer)
        self.programs = ProgramTable(config.program_cache_size)
        self._recorded: tuple[Signature, Trace] | None = None  # rank 0's last recording on real inputs
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
        tail = _LastRank(self, body, memory, trains) if self.is_last else None
        self._phase = f"step function {body.name}, program {program}"
        form = memory.arguments
        assert form is not None, "the header brings it"
        if request is not None and not self.is_last:
            self._control.send(request.tensors, form.formats, self._last)
        if tail is not None:
            tail.arguments = self._arguments(body, own, form, request)
        self._check_modes(signature)
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
        return dataclasses.replace(outcome, verdict=agree(outcome.verdict, self._session))

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
        microbatches = body.split(arguments, self._options.microbatches, device)
        modes = self.modes.read()
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
        return Request(inputs, self._answered(signatures[0], inputs), form, tensors)

    def _answered(self, signature: Signature, inputs: list[Inputs]) -> Signature:
        """Rank 0: the signature with the answers to what the model's Python asks of the inputs' values.

        A program whose guards hold on all microbatches is taken; otherwise the model is recorded on the first of them.
        """
        for known, trace in self.programs:
            is_alike = dataclasses.replace(known, answers=signature.answers) == signature
            if is_alike and all(self._broken(trace, microbatch) is None for microbatch in inputs):
                return known
        self._on_compile()
        trace = self._record(signature, inputs[0], None)
        for index, microbatch in enumerate(inputs):
            broken = self._broken(trace, microbatch)
            if broken is not None:
                raise StepError(
                    f"the model's Python depends on {broken[0]}: {broken[0].expected} in microbatch 0, {broken[1]} in microbatch "
                    f"{index}; the microbatches of one step run one program, so give them inputs that agree in this"
                )
        self._recorded = signature.with_answers(trace), trace
        return self._recorded[0]

    def _broken(self, trace: Trace, inputs: Inputs) -> tuple[Guard, Any] | None:
        """A guard that does not hold on the inputs of one microbatch."""
        return broken_guard(trace, self._module, input_values(trace, *inputs)) if trace.guards else None

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
            return body.split(merged, self._options.microbatches, self._session.device)

        return arrive

    def _share(self, body: StepBody, memory: Memory, program: int, tail: _LastRank | None) -> Outcome:
        """Bring the results of the last rank to all."""
        control, last = self._control, self._last
        form: ResultForm | None = None
        tensors: list[Tensor] = []
        failure: Exception | None = None if tail is None else tail.failure
        if tail is not None and failure is None:
            try:
                form, tensors = read_results(tail.values(), body.name)
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
            tensors = [tensor.detach() for tensor in tensors] if body.detach_outputs else tensors
        else:
            payload = torch.empty(memory.results.num_bytes, dtype=torch.uint8, device=device)
            control.broadcast_bytes(payload, last)
            tensors = unpack(payload, memory.results.specs)
        value = memory.results.build(tensors)
        return Outcome(value, verdict, loss=loss_from_bits(bits), did_backward=bool(did_backward))

    def _check_modes(self, signature: Signature) -> None:
        found = self.modes.read()
        if found != signature.modes:
            raise StepError(
                f"the model is not in the same mode on all ranks: {self.modes.describe_difference(signature.modes, found)}; call "
                "train(), eval() and requires_grad_() on every rank"
            )

    # -- programs ------------------------------------------------------------------------------------------------------

    def _partition(self, request: Request | None, failure: Exception | None) -> None:
        """The first program of all, on all ranks of all replicas: that of replica 0, or of the first one that has data."""
        session = self._session
        mesh = session.mesh
        leaders = [r for r in range(mesh.world_size) if mesh.pp_rank(r) == mesh.tp_rank(r) == 0]
        leaders.sort(key=mesh.rdp_rank)
        leader = leaders[0]
        times: list[list[float]] | None = None
        if (self._measures or self._measures_memory) and request is not None and session.rank == leader:
            try:
                self.placement.draw()  # what is measured runs for real
                times = self._measure(request)
            except Exception as error:
                failure = error
        mine = (describe(failure), None if request is None else request.signature, times)
        found = gather_objects(mine, session.groups[Axis.WORLD], session.message_device, session.device)
        raise_first([error for error, _, _ in found], failure)
        leader = next(r for r in leaders if found[r][1] is not None)
        times = found[leader][2]
        if times is not None:  # one rank's for all, so that all replicas are cut alike
            arrays = [np.asarray(numbers) for numbers in times]
            workspace = Workspace(arrays[2], arrays[3]) if self._measures_memory else None
            self._times = NodeTimes(arrays[0], arrays[1], workspace)
            if self._measures:
                self._measure_wire(leader)
        self._add(found[leader][1])

    def _add(self, signature: Signature) -> int:
        """Compile and install a program; collective over the pipeline. Raises the same on all its ranks."""
        if len(self.programs) and self._session.mesh.rdp_size > 1:
            self.modes.check_none_unfrozen(self.programs.signature(0).modes, signature.modes)
        self._on_compile()
        compilation = self._compile(signature)
        if self._session.config.fully_shard and any(split_backwards(p.instructions) for p in compilation.programs):
            raise ConfigUnsupportedError(
                f"fully_shard: the schedule {compilation.plan.schedule.name} splits backwards; use one whose backwards are whole"
            )
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

    def _compile(self, signature: Signature) -> Compilation:
        trace: Trace | None = None
        failure: Exception | None = None
        try:
            self._check_modes(signature)
            recorded = self._recorded
            trace = (
                recorded[1]
                if recorded and recorded[0] == signature
                else self._record(signature, signature.sample(), signature.decoded_answers())
            )
        except Exception as error:
            failure = error
        found = self._control.gather((describe(failure), None if trace is None else trace.fingerprint))
        raise_first([error for error, _ in found], failure)
        if len({fingerprint for _, fingerprint in found}) > 1:
            raise TraceError(
                "the pipeline ranks recorded different models, fingerprints by rank: "
                f"{[fingerprint[:12] for _, fingerprint in found]}; build the same model on every rank (same configuration, same "
                "library versions, no code that depends on the rank)"
            )
        assert trace is not None, "whoever has no trace has raised"
        plan: Plan | None = None
        if self._control.rank == 0:
            try:
                options = dataclasses.replace(
                    self._options, manual=manual_partition(self._module, self._session.config)
                )
                times = None if self.first else self._times
                if self._tensors is not None:
                    times = self._tensors.times(trace, options)
                plan = make_plan(
                    trace,
                    options,
                    like=self.first,
                    times=times,
                    kernels=self._kernels,
                    saved=self.saved_plan,
                    measured=self._measures,
                )
                for text in plan_warnings(plan) if self.first is None else ():
                    warnings.warn(text, stacklevel=2)
            except Exception as error:
                failure = error
        description, text = self._control.broadcast_object(
            (describe(failure), None if plan is None else plan.to_json()), 0
        )
        if description is not None:
            raise_everywhere(description, failure)
        return compile_plan(trace, plan or Plan.from_json(text))

    def _measure(self, request: Request) -> list[list[float]]:
        """Seconds of the forwards and backwards of the nodes, on this rank and the first microbatch; if wanted, their workspace."""
        assert self._recorded is not None, "the first request is recorded"
        trace, device = self._recorded[1], self._session.device
        state.tracing = True
        try:
            with torch.inference_mode(False), torch.enable_grad():
                args, kwargs = request.inputs[0]
                times = node_times(trace, self._options.cost_model)
                if self._measures:
                    times = measure_times(trace, self._module, args, kwargs, device=device)
                found: list[list[float]] = [times.forward.tolist(), times.backward.tolist()]
                if self._measures_memory:
                    workspace = measure_workspace(trace, self._module, args, kwargs, device)
                    found += [workspace.forward.tolist(), workspace.backward.tolist()]
        finally:
            state.tracing = False
        return found

    def _measure_wire(self, leader: int) -> None:
        """Plan with messages as they are here: those of the leader's pipeline, for all. Collective over all ranks."""
        session, control = self._session, self._control
        mine = measure_wire(self._transport, control.rank, control.size, session.device)
        wire = gather_objects(mine, session.groups[Axis.WORLD], session.message_device, session.device)[leader]
        device = dataclasses.replace(find_device(_device_name(session.device)), inside_host=wire, between_hosts=wire)
        self._options = dataclasses.replace(self._options, device=device)

    def _record(self, signature: Signature, inputs: Inputs, answers: Answers | None) -> Trace:
        """The trace of a signature, on real inputs or with the answers to what it asks of them."""
        state.tracing = True
        try:
            with (
                torch.inference_mode(False),
                torch.set_grad_enabled(signature.grad_enabled),
                self.placement.skeleton(),
            ):
                trace = record(
                    self._module, *inputs, device=self._session.device, answers=answers, autocast=signature.autocast
                )
        finally:
            state.tracing = False
        if self._tensors is not None:
            trace = self._tensors.rewrite(trace)
        rewritten = with_kernels(trace, self._options, on_gpu=self._session.device.type == "cuda")
        self._kernels = rewritten.uses
        return rewritten.trace


def _device_name(device: torch.device) -> str:
    """What times and memory are predicted for: see `smpc.partitioner.device`."""
    if device.type != "cuda":
        return "cpu"
    words = re.split(r"[^a-z0-9]+", torch.cuda.get_device_name(device).lower())
    return next((name for name in DEVICES if name in words), "h100")


class _LastRank:
    """The step function on the rank of the last stage, in one step."""

    def __init__(self, pipeline: Pipeline, body: StepBody, memory: Memory, trains: bool) -> None:
        self._pipeline = pipeline
        self._body = body
        self._trains = trains
        self.arguments: Callable[[], list[Arguments]] = list
        self._microbatches: list[Arguments] | None = None
        self._values: dict[int, Any] = {}
        self.did_backward = False
        self.losses = Losses()
        self.failure: StepError | None = None

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
        pipeline, body = self._pipeline, self._body
        if self._microbatches is None:
            self._microbatches = self.arguments()
        scale = pipeline._options.microbatches if pipeline._average else 1
        tail = Tail(body.name, output, scale / loss_scale())
        pipeline._enter(tail)
        try:
            self._values[microbatch] = body.call(self._microbatches[microbatch])
        finally:
            pipeline._enter(None)
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

    def values(self) -> list[Any]:
        """What the microbatches returned, in order."""
        return [self._values[i] for i in range(len(self._values))]
