"""How the ranks of a pipeline make the programs of a signature: every rank records the model, rank 0 plans, all compile.

    rank 0                                  others
    ---------------------------------------------------------------------------------------------
    records on the real inputs              record with meta tensors and rank 0's answers
    fingerprint             <->             fingerprint: one model, or an error
    plans
    plan                     ->             plan
    writes all programs                     write all programs

Before the first plan of all, the ranks of all replicas agree on the signature, and one rank measures for all: so all replicas are cut
alike.

`one_trace` gives all ranks of a pipeline one trace, where they have recorded the same operations in different orders.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from smpc.codegen.program import Schedule
from smpc.codegen.rewrite.outputs import return_written_inputs
from smpc.compile.options import PipelineOptions
from smpc.compile.passes import measure_trace, plan_trace, rewrite_trace, schedule_plan, write_programs
from smpc.compile.result import Compilation, Planned, Traced
from smpc.errors import SmpcError, StepError, TraceError
from smpc.executor.failure.start import StartPhase
from smpc.executor.measure.link_measurement import measure_wire
from smpc.executor.transport import Transport
from smpc.mesh import Axis
from smpc.optimizers.kept_state import planned
from smpc.partitioner.costs.device import DEVICES
from smpc.partitioner.costs.named_optimizers import Optimizer, find_optimizer
from smpc.partitioner.costs.node_costs import NodeTimes, Workspace
from smpc.partitioner.graph.plan import Plan, plan_warnings
from smpc.sample_inputs import Inputs
from smpc.sharding import undivided
from smpc.tracer.attempt import RecordingRequest
from smpc.tracer.environment.memory_words import DictVersions
from smpc.tracer.input_guards import Answers
from smpc.tracer.ir import Trace
from smpc.tracer.record import Recording, record_guarded
from smpc.tracer.same_model import same_model
from smpc.v1.declare.partition import manual_partition
from smpc.v1.session.object_messages import gather_objects
from smpc.v1.session.precision import half_dtype, planned_optimizer
from smpc.v1.session.process_state import Session
from smpc.v1.session.step_errors import describe, raise_error_on_all_ranks, raise_first_step_error
from smpc.v1.session.step_messages import Control
from smpc.v1.session.wait_limits import enter, exchange
from smpc.v1.steps.context import Measures, StepContext
from smpc.v1.steps.programs.signature import ModeReader, Signature, broken


def one_trace(trace: Trace, control: Control) -> Trace | None:
    """Pipeline rank 0's trace, if the others differ from it only in order; else None. Collective, and the same on all ranks.

    The order of a set's strings differs between processes. More than fingerprints is sent only if traces differ.
    """
    text = control.broadcast_object(trace.to_json() if control.rank == 0 else None, 0)
    first = trace if control.rank == 0 else Trace.from_json(text)
    return first if all(control.gather(same_model(trace, first))) else None


class Compiler:
    """One rank's part of the compilation."""

    def __init__(
        self, context: StepContext, transport: Transport, control: Control, modes: ModeReader, versions: DictVersions
    ) -> None:
        self._context, self._module, self._session = context, context.module, context.session
        self._transport, self._control, self._modes, self._versions = transport, control, modes, versions
        self._options = _options(context.session, context.measures)
        self._times: NodeTimes | None = None  # measured before the first plan
        self._traced: Traced | None = None  # the rewritten form of the last recording
        self._recorded: tuple[Signature, Recording, Traced] | None = None  # rank 0's last recording on real inputs
        self._num_recorded = 0  # on real inputs
        self._latest: Recording | None = None  # of the last program that was compiled
        self._batches: tuple[int, ...] = ()  # by pipeline rank, the most of all replicas, see `StepContext.batch_bytes`

    def answered(self, signature: Signature, inputs: Sequence[Inputs]) -> Signature:
        """Rank 0: the whole signature of inputs that have no program: records the model on the first microbatch."""
        self._context.supervision.allow_compilation()
        recording = self._record(signature, inputs[0], None)
        trace = recording.trace
        for index, microbatch in enumerate(inputs):
            wrong = broken(trace, self._module, microbatch)
            if wrong is not None:
                raise StepError(
                    f"the model's Python depends on {wrong[0]}: {wrong[0].expected} in microbatch 0, {wrong[1]} in microbatch "
                    f"{index}; the microbatches of one step run one program, so give them inputs that agree in this"
                )
        signature = dataclasses.replace(signature.with_answers(trace), environment=self._num_recorded)
        assert self._traced is not None, "it was recorded"
        self._recorded, self._num_recorded = (signature, recording, self._traced), self._num_recorded + 1
        return signature

    def first_signature(self, own: tuple[Signature, Inputs] | None, failure: Exception | None) -> Signature:
        """The signature of the first program of all, on all ranks of all replicas: from replica 0, or the first replica that has data.

        `own`: rank 0's, with its first microbatch; None on others, and without data. Requested measurements are made here. Raises
        any rank's error on all ranks.
        """
        session, measures = self._session, self._context.measures
        mesh = session.mesh
        leaders = [r for r in range(mesh.world_size) if mesh.pp_rank(r) == mesh.tp_rank(r) == 0]
        leaders.sort(key=mesh.rdp_rank)
        leader = leaders[0]
        times: list[list[float]] | None = None
        if measures and own is not None and session.rank == leader:
            try:
                self._context.placement.draw()  # measured operations run for real
                times = self._measure(own[1])
            except Exception as error:
                failure = error
        mine = (describe(failure), None if own is None else own[0], times, self._context.batch_bytes)
        with exchange("the first step: agreeing on what to compile"):
            found = gather_objects(mine, session.groups[Axis.WORLD], session.message_device, session.device)
        raise_first_step_error([error for error, *_ in found], failure)
        leader = next(r for r in leaders if found[r][1] is not None)
        times = found[leader][2]
        if times is not None:  # one rank's for all, so that all replicas are cut alike
            arrays = [np.asarray(numbers) for numbers in times]
            workspace = Workspace(arrays[2], arrays[3]) if measures.memory else None
            self._times = NodeTimes(arrays[0], arrays[1], workspace)
            if measures.times:
                self._measure_wire(leader)
        ranks = [[r for r in range(mesh.world_size) if mesh.pp_rank(r) == pp_rank] for pp_rank in range(mesh.pp_size)]
        self._batches = tuple(max(found[r][3] for r in column) for column in ranks)  # replicas are cut alike
        signature: Signature = found[leader][1]
        return signature

    def compile(
        self, signature: Signature, like: Compilation | None, saved: Plan | None
    ) -> tuple[Compilation, Recording]:
        """The programs of a signature; collective over the pipeline. Raises the same on all its ranks.

        `like`: the compilation that fixed the placement of parameters; None for the first of all, which may follow the plan `saved` by an
        earlier job.
        """
        self._context.supervision.allow_compilation()
        recording = self._recording_of_group(signature)
        if (
            like is None
        ):  # one of this rank's own inputs was rewritten before this program decides how parameters are laid out
            self._recorded = None
        planned = self._agreed_plan(recording.trace, like, saved)
        enter(StartPhase.STEP, "compiling")
        assert self._traced is not None, "the model has been recorded"
        compilation = write_programs(planned, context=self._traced.context)
        return compilation, recording

    def _recording_of_group(self, signature: Signature) -> Recording:
        """This rank's recording with the trace that all ranks share, including ranks of other pipelines that share its sequences."""
        sequences = self._context.sequences
        if sequences is None:
            return self._agreed_recording(signature)
        recording: Recording | None = None
        failure: Exception | None = None
        try:
            recording = self._agreed_recording(signature)
        except Exception as error:
            failure = error
        experts = self._context.experts
        trace = None if recording is None else recording.trace
        sequences.check_model(trace if trace is None or experts is None else experts.alike(trace), failure)
        assert recording is not None, "whoever has no recording has raised"
        return recording

    def _agreed_recording(self, signature: Signature) -> Recording:
        """This rank's recording, with the trace that all ranks share."""
        recording: Recording | None = None
        failure: Exception | None = None
        with self._context.placement.attributes.as_before():
            change = None if self._latest is None else self._latest.environment.difference()
        try:
            self._modes.check(signature.modes)
            recorded = self._recorded
            if recorded and recorded[0] == signature:
                _, recording, self._traced = recorded
            else:
                recording = self._record(signature, signature.sample(), signature.decoded_answers())
        except Exception as error:
            failure = error
        fingerprint = None if recording is None else recording.trace.fingerprint
        found = self._control.gather((describe(failure), fingerprint, str(change or "nothing has changed")))
        errors = [error for error, _, _ in found]
        if None in errors:  # the error is not the model's: say whose recording has failed
            errors = [
                error and (error[0], f"{error[1]}\n(on pipeline rank {rank})", error[2])
                for rank, error in enumerate(errors)
            ]
        raise_first_step_error(errors, failure)
        assert recording is not None, "whoever has no recording has raised"
        if len({fingerprint for _, fingerprint, _ in found}) > 1:
            common = one_trace(recording.trace, self._control)
            if common is None:
                raise _unlike([fingerprint for _, fingerprint, _ in found], [change for _, _, change in found])
            recording = dataclasses.replace(recording, trace=common)
        self._latest = recording
        return recording

    def _agreed_plan(self, trace: Trace, like: Compilation | None, saved: Plan | None) -> Planned:
        """Rank 0's plan."""
        planned: Planned | None = None
        failure: Exception | None = None
        enter(StartPhase.STEP, "planning")
        if self._control.rank == 0:
            try:
                if like is None:
                    self._options = _with_optimizer_of(self._context, self._options)
                options = dataclasses.replace(
                    self._options, manual=manual_partition(self._module, self._session.config)
                )
                assert self._traced is not None, "the model has been recorded"
                times = None if like else self._times
                is_measured = self._context.measures.times and times is not None
                changes: dict[str, Any] = {"times": times, "is_measured": is_measured, "apart": self._experts_apart}
                changes |= {
                    "sends_batch": True,
                    "batches": self._batches,
                    "casts": half_dtype(self._session.config) is not None,
                }
                traced = dataclasses.replace(self._traced, trace=trace, **changes)
                planned = plan_trace(traced, options, like=like, saved=saved, order=self._order(like))
                for text in plan_warnings(planned.plan) if like is None else ():
                    warnings.warn(text, stacklevel=2)
            except Exception as error:
                failure = error
        description, text = self._control.broadcast_object(
            (describe(failure), None if planned is None else planned.plan.to_json()), 0
        )
        if description is not None:
            raise_error_on_all_ranks(description, failure)
        return planned or schedule_plan(trace, Plan.from_json(text), self._order(like))

    def _order(self, like: Compilation | None) -> Schedule | None:
        """The order of the first program, for `list`: other pipelines, whose batches may be longer, send their tokens in it."""
        is_shared = self._context.experts is not None and self._session.config.schedule == "list"
        return like.planned.schedule if is_shared and like is not None and like.planned is not None else None

    @property
    def _experts_apart(self) -> tuple[frozenset[str], Optimizer] | None:
        """The parameters that fewer ranks hold than others, and their optimizer state."""
        return _experts_apart(self._context, self._options)

    def _measure(self, inputs: Inputs) -> list[list[float]]:
        """Seconds of the forwards and backwards of the nodes, on this rank and the first microbatch; if wanted, their workspace."""
        assert self._recorded is not None, "the first request is recorded"
        trace, device = self._recorded[1].trace, self._session.device
        self._context.script.job.tracing = True
        try:
            with torch.inference_mode(False), torch.enable_grad():
                times = measure_trace(Traced(trace), self._options, self._module, inputs, device=device).times
        finally:
            self._context.script.job.tracing = False
        assert times is not None, "something is to be measured"
        parts = (times,) if times.workspace is None else (times, times.workspace)
        return [numbers.tolist() for part in parts for numbers in (part.forward, part.backward)]

    def _measure_wire(self, leader: int) -> None:
        """Plan with measured messages: the leader's pipeline measures for all. Collective over all ranks."""
        session, control = self._session, self._control
        mine = measure_wire(self._transport, control.rank, control.size, session.device)
        wire = gather_objects(mine, session.groups[Axis.WORLD], session.message_device, session.device)[leader]
        devices = [
            dataclasses.replace(device, inside_host=wire, between_hosts=wire) for device in self._options.devices
        ]
        self._options = dataclasses.replace(self._options, device=devices)

    def _record(self, signature: Signature, inputs: Inputs, answers: Answers | None) -> Recording:
        """The recording of a signature, on real inputs or with known answers to its questions about their values."""
        enter(StartPhase.STEP, "recording the model")
        context = self._context
        context.script.job.tracing = True
        buffers = dict(self._module.named_buffers())
        try:
            with (
                torch.inference_mode(False),
                torch.set_grad_enabled(signature.grad_enabled),
                context.placement.skeleton(),
            ):
                device, autocast = self._session.device, signature.autocast
                request = RecordingRequest(*inputs, device, answers, autocast, signature.ones, buffers)
                recording = record_guarded(self._module, request, versions=self._versions)
        finally:
            context.script.job.tracing = False
        tensors, on_gpu = context.tensors, self._session.device.type == "cuda"
        sharing = None if tensors is None else tensors.sharing
        sequences = None if context.sequences is None else context.sequences.sharing
        trace = return_written_inputs(recording.trace)
        self._traced = rewrite_trace(trace, self._options, sharing, context=sequences, on_gpu=on_gpu)
        if tensors is not None:
            tensors.latest = self._traced.sharded
        return dataclasses.replace(recording, trace=self._traced.trace)


def plan_alone(context: StepContext, signature: Signature, *, keeps_outputs: bool) -> Plan:
    """What is predicted of a rank that runs the whole model as it is, for microbatches of this signature.

    `keeps_outputs`: the step function has the model's outputs in its backward pass.
    Raises TraceError for a model that cannot be recorded without values.
    """
    session, module, config = context.session, context.module, context.session.config
    options, on_gpu = _options(session, Measures()), session.device.type == "cuda"
    options = _with_optimizer_of(context, options)
    request = RecordingRequest(
        *signature.sample(), session.device, None, signature.autocast, (), dict(module.named_buffers())
    )
    context.script.job.tracing = True
    try:
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(signature.grad_enabled),
            context.placement.skeleton(),
            undivided(module),
        ):
            trace = record_guarded(module, request).trace
    finally:
        context.script.job.tracing = False
    units = config.sdp_param_persistence_threshold, config.sdp_max_live_parameters
    traced = rewrite_trace(trace, options, on_gpu=on_gpu)
    traced = dataclasses.replace(traced, apart=_experts_apart(context, options), units=units)
    traced = dataclasses.replace(traced, casts=half_dtype(config) is not None, keeps_outputs=keeps_outputs)
    return plan_trace(traced, options, prove=False).plan


def _experts_apart(context: StepContext, options: PipelineOptions) -> tuple[frozenset[str], Optimizer] | None:
    """The parameters of experts that ranks divide, and their optimizer state."""
    experts, session, mesh = context.experts, context.session, context.session.mesh
    if experts is None:
        return None
    optimizer = find_optimizer(options.optimizer)
    if session.is_sharded:
        parts = Axis.EXPERT_FSDP if mesh.shard_size > 1 else Axis.EXPERT_DATA
        return experts.names, optimizer.in_parts_on(mesh.size(parts))
    return experts.names, optimizer.summed_at_end(mesh.size(Axis.EXPERT_DATA), options.shard_optimizer_state)


def _unlike(fingerprints: Sequence[str], changes: Sequence[str]) -> SmpcError:
    """Why the ranks have recorded different models."""
    if len(set(changes)) > 1:
        text = "; ".join(f"on pipeline rank {rank} {change}" for rank, change in enumerate(changes))
        return StepError(
            f"what the model's Python reads has changed since its last program was compiled, and not alike on all ranks: {text}; "
            "change it on every rank, between the same two steps"
        )
    return TraceError(
        f"the pipeline ranks recorded different models, fingerprints by rank: {[text[:12] for text in fingerprints]}; build the same "
        "model on every rank (same configuration, same library versions, no code that depends on the rank); if the model's Python goes "
        "through a set, PYTHONHASHSEED=0 gives sets the same order on all ranks. What forward itself keeps in Python, such as a count of "
        "its calls, may have changed on the rank of its stage alone: count outside of the model, on every rank, or in a buffer"
    )


def _options(session: Session, measures: Measures) -> PipelineOptions:
    """How to cut and schedule a model in this session."""
    config, mesh = session.config, session.mesh
    return PipelineOptions.of(
        config,
        device=session.planned_for or _device_name(session.device),
        optimizer=planned_optimizer(config),
        data_parallel_degree=mesh.rdp_size // mesh.cp_size,  # whose buckets, or parts, count as memory
        expert_parallel_degree=1,  # the model that is recorded has this rank's
        tensor_parallel_degree=1,  # the script's modules share operations, or `CompiledTensors` says how
        trace_execution_times=measures.times,
        trace_memory_usage=measures.memory,
    )


def _with_optimizer_of(context: StepContext, options: PipelineOptions) -> PipelineOptions:
    """The options for the script's own optimizer, if it has made it yet."""
    wrapper = context.script.optimizer
    if wrapper is None:
        return options
    return dataclasses.replace(options, optimizer=planned(wrapper.optimizer, planned_optimizer(context.session.config)))


def _device_name(device: torch.device) -> str:
    """The device for which times and memory are predicted: see `smpc.partitioner.costs.device`."""
    if device.type != "cuda":
        return "cpu"
    words = re.split(r"[^a-z0-9]+", torch.cuda.get_device_name(device).lower())
    return next((name for name in DEVICES if name in words), "h100")
