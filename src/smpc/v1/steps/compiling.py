"""How the ranks of a pipeline come to the programs of a signature: every rank records the model, rank 0 plans, all compile.

    rank 0                                  others
    ---------------------------------------------------------------------------------------------
    records on the real inputs              record with meta tensors and rank 0's answers
    fingerprint             <->             fingerprint: one model, or an error
    plans
    plan                     ->             plan
    writes all programs                     write all programs

Before the first plan of all, the ranks of all replicas agree on the signature, and what is to be measured is measured, by one rank for
all: so all replicas are cut alike.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from smpc.codegen.actions import split_backwards
from smpc.compile import Compilation, PipelineOptions, compile_plan, make_plan, plan_warnings, with_kernels
from smpc.errors import ConfigUnsupportedError, StepError, TraceError
from smpc.executor.transport import Transport
from smpc.executor.wires import measure_wire
from smpc.mesh import Axis
from smpc.partitioner.cost import NodeTimes, Workspace, node_times
from smpc.partitioner.device import DEVICES, find_device
from smpc.partitioner.plan import KernelUse, Plan
from smpc.partitioner.timing import measure_times
from smpc.partitioner.workspace import measure_workspace
from smpc.sample_inputs import Inputs
from smpc.tracer.guards import broken_guard
from smpc.tracer.ir import Guard, Trace
from smpc.tracer.questions import Answers
from smpc.tracer.record import record
from smpc.tracer.replay import input_values
from smpc.v1.models.compiled_tensors import CompiledTensors
from smpc.v1.models.partition import manual_partition
from smpc.v1.models.placement import Placement
from smpc.v1.optimization.precision import planned_optimizer
from smpc.v1.session.comm import gather_objects
from smpc.v1.state import Session, state
from smpc.v1.steps.control import Control
from smpc.v1.steps.failures import describe, raise_everywhere, raise_first
from smpc.v1.steps.signature import ModeReader, Signature


class Compiler:
    """One rank's part of it. `on_compile` is called before a program is made; `measures`, `measures_memory`: see DistributedModel."""

    def __init__(
        self,
        module: nn.Module,
        session: Session,
        transport: Transport,
        control: Control,
        placement: Placement,
        modes: ModeReader,
        on_compile: Callable[[], None],
        measures: bool,
        measures_memory: bool,
        tensors: CompiledTensors | None,
    ) -> None:
        self._module, self._session, self._transport, self._control = module, session, transport, control
        self._placement, self._modes, self._on_compile, self._tensors = placement, modes, on_compile, tensors
        self._measures, self._measures_memory = measures, measures_memory
        self._options = _options(session)
        self._times: NodeTimes | None = None  # measured before the first plan
        self._kernels: tuple[KernelUse, ...] = ()  # what became of the ops in the last recording
        self._recorded: tuple[Signature, Trace] | None = None  # rank 0's last recording on real inputs

    def answered(
        self, signature: Signature, inputs: Sequence[Inputs], programs: Iterable[tuple[Signature, Trace]]
    ) -> Signature:
        """Rank 0: the signature with the answers to what the model's Python asks of the inputs' values.

        One of `programs` whose guards hold on all microbatches is taken; otherwise the model is recorded on the first of them.
        """
        for known, trace in programs:
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

    def first_signature(self, own: tuple[Signature, Inputs] | None, failure: Exception | None) -> Signature:
        """What the first program of all is for, on all ranks of all replicas: that of replica 0, or of the first one that has data.

        `own`: rank 0's, with its first microbatch; None on others, and without data. What is to be measured is measured here. Raises
        on all ranks what one of them finds wrong.
        """
        session = self._session
        mesh = session.mesh
        leaders = [r for r in range(mesh.world_size) if mesh.pp_rank(r) == mesh.tp_rank(r) == 0]
        leaders.sort(key=mesh.rdp_rank)
        leader = leaders[0]
        times: list[list[float]] | None = None
        if (self._measures or self._measures_memory) and own is not None and session.rank == leader:
            try:
                self._placement.draw()  # what is measured runs for real
                times = self._measure(own[1])
            except Exception as error:
                failure = error
        mine = (describe(failure), None if own is None else own[0], times)
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
        signature: Signature = found[leader][1]
        return signature

    def compile(self, signature: Signature, like: Compilation | None, saved: Plan | None) -> Compilation:
        """The programs of a signature; collective over the pipeline. Raises the same on all its ranks.

        `like`: what fixed which rank holds which parameter; None for the first of all, which may follow the plan `saved` by an earlier job.
        """
        self._on_compile()
        trace = self._agreed_trace(signature)
        compilation = compile_plan(trace, self._agreed_plan(trace, like, saved))
        if self._session.config.fully_shard and any(split_backwards(p.instructions) for p in compilation.programs):
            raise ConfigUnsupportedError(
                f"fully_shard: the schedule {compilation.plan.schedule.name} splits backwards; use one whose backwards are whole"
            )
        return compilation

    def _agreed_trace(self, signature: Signature) -> Trace:
        """This rank's recording, which is that of all."""
        trace: Trace | None = None
        failure: Exception | None = None
        try:
            self._modes.check(signature.modes)
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
        return trace

    def _agreed_plan(self, trace: Trace, like: Compilation | None, saved: Plan | None) -> Plan:
        """Rank 0's plan."""
        plan: Plan | None = None
        failure: Exception | None = None
        if self._control.rank == 0:
            try:
                options = dataclasses.replace(
                    self._options, manual=manual_partition(self._module, self._session.config)
                )
                times = None if like else self._times
                if self._tensors is not None:
                    times = self._tensors.times(trace, options)
                plan = make_plan(
                    trace,
                    options,
                    like=like,
                    times=times,
                    kernels=self._kernels,
                    saved=saved,
                    measured=self._measures,
                )
                for text in plan_warnings(plan) if like is None else ():
                    warnings.warn(text, stacklevel=2)
            except Exception as error:
                failure = error
        description, text = self._control.broadcast_object(
            (describe(failure), None if plan is None else plan.to_json()), 0
        )
        if description is not None:
            raise_everywhere(description, failure)
        return plan or Plan.from_json(text)

    def _measure(self, inputs: Inputs) -> list[list[float]]:
        """Seconds of the forwards and backwards of the nodes, on this rank and the first microbatch; if wanted, their workspace."""
        assert self._recorded is not None, "the first request is recorded"
        trace, device = self._recorded[1], self._session.device
        state.tracing = True
        try:
            with torch.inference_mode(False), torch.enable_grad():
                args, kwargs = inputs
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
                self._placement.skeleton(),
            ):
                trace = record(
                    self._module,
                    *inputs,
                    device=self._session.device,
                    answers=answers,
                    autocast=signature.autocast,
                    shown=signature.ones,
                )
        finally:
            state.tracing = False
        if self._tensors is not None:
            trace = self._tensors.rewrite(trace)
        rewritten = with_kernels(trace, self._options, on_gpu=self._session.device.type == "cuda")
        self._kernels = rewritten.uses
        return rewritten.trace


def _options(session: Session) -> PipelineOptions:
    """How to cut and schedule a model in this session."""
    config = session.config
    return PipelineOptions(
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
        data_parallel_degree=session.mesh.dp_size if config.shard_optimizer_state or config.fully_shard else 1,
        shard_optimizer_state=config.shard_optimizer_state,
        fully_shard=config.fully_shard,
    )


def _device_name(device: torch.device) -> str:
    """What times and memory are predicted for: see `smpc.partitioner.device`."""
    if device.type != "cuda":
        return "cpu"
    words = re.split(r"[^a-z0-9]+", torch.cuda.get_device_name(device).lower())
    return next((name for name in DEVICES if name in words), "h100")
