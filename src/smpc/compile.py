"""From a model to the programs of every rank: trace, plan, split, schedule, lower, prove.

    compilation = compile_model(model, sample_inputs, pipeline_parallel_degree=2, microbatches=4)
    print(compilation.plan.to_json())
    print(compilation.rank_source(1))

Sample inputs are one whole batch, in the forms of `smpc.sample_inputs`. Only shapes and dtypes count, so tensors on the meta device will
do, and so will a model on the meta device: nothing is allocated.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from smpc.codegen.actions import Schedule, of_program, peaks
from smpc.codegen.emit import describe_channel, emit_rank
from smpc.codegen.lower import lower
from smpc.codegen.offload import insert_offloads, resident
from smpc.codegen.program import Channel, Instruction, RankProgram, StageCode
from smpc.codegen.rewrite.by_plan import rewrite_by_plan
from smpc.codegen.rewrite.kernels import Rewritten, rewrite_kernels, select_rewrites
from smpc.codegen.rewrite.tensor_parallel import ShardedTrace, with_collectives
from smpc.codegen.schedule import evaluation
from smpc.codegen.schedules.choice import Choice, choose
from smpc.codegen.simulate import Costs, Link, Timeline, chain, simulate, timeline_text
from smpc.codegen.split import plan_channels, split
from smpc.codegen.verify import verify_programs
from smpc.errors import ConfigError, PartitionError, SmpcError
from smpc.partitioner.cost import CostModel, NodeTimes, node_times
from smpc.partitioner.device import Device, find_devices
from smpc.partitioner.follow import fits, follow
from smpc.partitioner.limit import check_peaks, with_size_note
from smpc.partitioner.manual import ManualPartition, assign_manually
from smpc.partitioner.mixed import on_devices, solve_mixed
from smpc.partitioner.optimizer import Optimizer, find_optimizer
from smpc.partitioner.plan import KernelUse, Plan, ScheduleSummary
from smpc.partitioner.sizes import parse_bytes
from smpc.partitioner.solve import plan_from_assignment, solve_partition
from smpc.partitioner.timing import measure_times, parameter_times
from smpc.partitioner.workspace import measure_workspace
from smpc.sample_inputs import as_inputs, first_microbatch
from smpc.tracer.ir import Trace
from smpc.tracer.record import record


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """How to cut and schedule a model; `smpc.config.Config` gives the same keys the same meaning."""

    pipeline_parallel_degree: int = 1
    microbatches: int = 1
    pipeline: str = "interleaved"
    memory_weight: float = 0.8
    active_microbatches: int | None = None
    device: str | Device | Sequence[str | Device] = "h100"  # one for all ranks, or one for each
    optimizer: str = "adam"
    memory_limit: str | int | None = None
    schedule: str | None = None
    virtual_pipeline_degree: int | None = None
    manual: ManualPartition | None = None
    data_parallel_degree: int = 1  # replicas, as far as memory depends on them
    shard_optimizer_state: bool = False
    fully_shard: bool = False
    skip_tracing: bool = False  # cut by parameter sizes and the order of modules alone
    recompute: tuple[
        str, ...
    ] = ()  # modules to checkpoint beside those that the model asks for: name patterns as in a shell
    offload_activations: bool = False
    activation_loading_horizon: int = 4  # how many pipeline tasks ahead offloaded activations are loaded back
    kernels: str | tuple[str, ...] = "auto"  # ops of smpc.kernels to use: "auto", "off" or names

    def __post_init__(self) -> None:
        wrong = [
            f"{name}: expected at least 1, found {value}"
            for name in (
                "pipeline_parallel_degree",
                "microbatches",
                "active_microbatches",
                "virtual_pipeline_degree",
                "data_parallel_degree",
                "activation_loading_horizon",
            )
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if not 0.0 <= self.memory_weight <= 1.0:
            wrong.append(f"memory_weight: expected a number from 0 to 1, found {self.memory_weight}")
        if self.fully_shard and self.shard_optimizer_state:
            wrong.append("fully_shard and shard_optimizer_state exclude each other; keep one")
        if wrong:
            raise ConfigError("\n".join(wrong))
        _ = self.choice
        _ = self.limit_bytes
        _ = self.devices
        find_optimizer(self.optimizer)
        select_rewrites(self.kernels, on_gpu=True)

    @property
    def cost_model(self) -> CostModel:
        """What nodes and messages cost on the device, and parameters with the optimizer."""
        optimizer, replicas = find_optimizer(self.optimizer), self.data_parallel_degree
        in_parts = optimizer.fully_sharded(replicas) if self.fully_shard else None
        return self._cost_models(in_parts or optimizer.replicated(replicas, self.shard_optimizer_state))[0]

    def sharded_times(self, trace: Trace, sharded: ShardedTrace) -> NodeTimes:
        """Predicted times of what a tensor-parallel rank runs: collectives take time too. `trace`: `sharded`'s, with kernels or without."""
        wire = self.devices[0].wire(sharded.degree)
        return with_collectives(trace, sharded, self.cost_model, wire.bandwidth, wire.latency)

    @property
    def devices(self) -> tuple[Device, ...]:
        """That of each pipeline rank."""
        return find_devices(self.device, self.pipeline_parallel_degree)

    @property
    def rank_cost_models(self) -> tuple[CostModel, ...]:
        """Where ranks have devices of several kinds, what each costs; empty: all are alike."""
        models = self._cost_models(self.cost_model.optimizer)
        return () if all(device == self.devices[0] for device in self.devices) else models

    def _cost_models(self, optimizer: Optimizer) -> tuple[CostModel, ...]:
        """By rank; all with the slowest of their wires."""
        number = self.pipeline_parallel_degree
        models = [CostModel.of(device, number, optimizer) for device in self.devices]
        bandwidth, latency = min(m.link_bandwidth for m in models), max(m.link_latency for m in models)
        return tuple(dataclasses.replace(m, link_bandwidth=bandwidth, link_latency=latency) for m in models)

    @property
    def rank_limits(self) -> tuple[int, ...]:
        """Most bytes on each rank: the memory limit, and what the device has where ranks have several kinds; empty: none."""
        limit = self.limit_bytes
        if self.rank_cost_models:
            return tuple(min(limit or device.memory_bytes, device.memory_bytes) for device in self.devices)
        return () if limit is None else (limit,) * self.pipeline_parallel_degree

    @property
    def limit_bytes(self) -> int | None:
        """The memory limit in bytes."""
        return None if self.memory_limit is None else parse_bytes(self.memory_limit, "memory_limit")

    def in_flight_of(self, num_ranks: int) -> tuple[int, ...] | None:
        """Microbatches in flight by stage with another number of ranks and one stage on each; None: no such schedule."""
        try:
            choice = dataclasses.replace(self, pipeline_parallel_degree=num_ranks, manual=None).choice
        except SmpcError:
            return None
        return tuple(choice.in_flight) if len(choice.placement) == num_ranks else None

    @property
    def choice(self) -> Choice:
        """The schedule, and the placement of the stages that it needs."""
        return choose(
            self.pipeline_parallel_degree,
            self.microbatches,
            pipeline=self.pipeline,
            schedule=self.schedule,
            num_pieces=self.virtual_pipeline_degree,
            active_microbatches=self.active_microbatches,
        )


@dataclass(frozen=True)
class Compilation:
    """A model compiled for one signature of its inputs. `evaluation_programs` run forwards only."""

    trace: Trace
    plan: Plan
    channels: tuple[Channel, ...]
    programs: tuple[RankProgram, ...]
    evaluation_programs: tuple[RankProgram, ...]
    sharded: ShardedTrace | None = None  # with tensor_parallel_degree: `trace` before kernels, layouts and collectives

    def rank_source(self, rank: int) -> str:
        """The program of a pipeline rank as readable Python."""
        return emit_rank(self.programs[rank])

    def timeline(self) -> Timeline:
        """The predicted timeline of one training step."""
        schedule = tuple(of_program(program.instructions) for program in self.programs)
        return _simulate(self.plan, self.channels, schedule)

    def schedule_text(self) -> str:
        """The edges, every rank's instructions, and a drawing of the predicted timeline."""
        lines = [f"{self.plan.schedule.name} schedule, {self.plan.schedule.num_microbatches} microbatches", ""]
        lines += [describe_channel(channel) for channel in self.channels]
        lines += ["", timeline_text(self.timeline())]
        for program in self.programs:
            lines += ["", f"rank {program.rank}", *(f"  {instruction}" for instruction in program.instructions)]
        return "\n".join(lines) + "\n"


def compile_model(
    model: nn.Module,
    sample_inputs: Any,
    *,
    pipeline_parallel_degree: int,
    microbatches: int = 1,
    pipeline: str = "interleaved",
    memory_weight: float = 0.8,
    active_microbatches: int | None = None,
    device: str | Device | Sequence[str | Device] = "h100",
    optimizer: str = "adam",
    memory_limit: str | int | None = None,
    trace_execution_times: bool = False,
    trace_memory_usage: bool = False,
    schedule: str | None = None,
    virtual_pipeline_degree: int | None = None,
    manual: ManualPartition | None = None,
    leaf_modules: Sequence[str] = (),
    data_parallel_degree: int = 1,
    shard_optimizer_state: bool = False,
    fully_shard: bool = False,
    skip_tracing: bool = False,
    recompute: Sequence[str] = (),
    offload_activations: bool = False,
    activation_loading_horizon: int = 4,
    kernels: str | Sequence[str] = "auto",
    tensor_parallel_degree: int = 1,
    tensor_parallel_plan: str | Mapping[str, str] = "auto",
    tensor_parallel_outputs: Sequence[str] | None = None,
    show_phase: Callable[[str], object] | None = None,
    warn: bool = True,
) -> Compilation:
    """Compiles a model for a batch like `sample_inputs` (see `smpc.sample_inputs` for its forms).

    `leaf_modules` are called whole, with nothing recorded inside. `device` (see `smpc.partitioner.device`; several: one for each rank) and
    `optimizer` (see `smpc.partitioner.optimizer`) are what times and memory are predicted for. `memory_limit` is the most that a rank may
    hold at its predicted peak: "80GB", or a number of bytes. With `trace_execution_times`, times are measured on the device that the model
    is on, not predicted; with `trace_memory_usage`, so is what operations take and give back while they work, which is otherwise left
    out. `show_phase` gets the name of each phase as it starts. With `warn`, what is asked for and not done becomes a warning.
    `data_parallel_degree` is the number of replicas of the pipeline, each with a batch like this: their gradients are summed in
    buckets, which take memory; with `shard_optimizer_state` they split the optimizer state among them, with `fully_shard` (see
    docs/data_parallel.md) that, parameters and gradients, and have no buckets.
    `recompute` are patterns of names of modules whose activations are computed again for the backward pass, such as
    "model.layers.*", `offload_activations` moves what these keep to CPU memory and back: see docs/activation_checkpointing.md.
    `kernels` says which ops of smpc.kernels replace what the model computes: "auto", "off" or names, see docs/kernels.md.
    `tensor_parallel_degree` ranks share every operation of a stage as `tensor_parallel_plan` says ("auto", "huggingface", "off" or styles
    by name pattern, see docs/tensor_parallel_compiler.md): plan and programs are those of one of them. `tensor_parallel_outputs` are the
    only tensors that they return whole, such as ("loss",), so that logits need not be gathered; by default all are.
    With `skip_tracing`, parameter sizes and the order of modules alone decide about the cut, not what is recorded of them.
    `schedule` and `virtual_pipeline_degree`: see docs/schedules.md. `manual` puts modules on ranks by name: `smpc.partitioner.manual`.

    Raises ConfigError for settings out of bounds or a batch that `microbatches` does not divide, TraceError for a model that cannot be
    recorded, PartitionError when there are more stages than modules, or no plan within the memory limit.
    """
    options = PipelineOptions(
        pipeline_parallel_degree,
        microbatches,
        pipeline,
        memory_weight,
        active_microbatches,
        device,
        optimizer,
        memory_limit,
        schedule,
        virtual_pipeline_degree,
        manual,
        data_parallel_degree,
        shard_optimizer_state,
        fully_shard,
        skip_tracing,
        tuple(recompute),
        offload_activations,
        activation_loading_horizon,
        kernels if isinstance(kernels, str) else tuple(kernels),
    )
    if tensor_parallel_degree > 1:
        _check_whole(trace_execution_times, trace_memory_usage, fully_shard)
    args, kwargs = first_microbatch(as_inputs(sample_inputs), microbatches)
    show = show_phase or (lambda phase: None)
    show("Tracing the model")
    trace = record(model, args, kwargs, leaf_modules=leaf_modules)
    if tensor_parallel_degree > 1:
        show("Choosing tensor-parallel layouts")
    sharded = rewrite_by_plan(model, trace, tensor_parallel_degree, tensor_parallel_plan, tensor_parallel_outputs)
    rewritten = with_kernels(trace if sharded is None else sharded.trace, options)
    trace = rewritten.trace
    times = None if sharded is None else options.sharded_times(trace, sharded)
    if trace_execution_times:
        show("Measuring the model")
        times = measure_times(trace, model, args, kwargs)
    if trace_memory_usage:
        show("Measuring memory")
        workspace = measure_workspace(trace, model, args, kwargs)
        times = dataclasses.replace(times or node_times(trace, options.cost_model), workspace=workspace)
    show("Solving the partition")
    plan = make_plan(trace, options, times=times, kernels=rewritten.uses, measured=trace_execution_times)
    for text in plan_warnings(plan) if warn else ():
        warnings.warn(text, stacklevel=2)
    show("Writing and checking the programs")
    return dataclasses.replace(compile_plan(trace, plan), sharded=sharded)


def _check_whole(trace_execution_times: bool, trace_memory_usage: bool, fully_shard: bool) -> None:
    """ConfigError for options that exclude tensor parallelism: the model at hand is whole, and FSDP2 cuts parameters its own way."""
    given = {
        "trace_execution_times": trace_execution_times,
        "trace_memory_usage": trace_memory_usage,
        "fully_shard": fully_shard,
    }
    wrong = [f"{name}: not with tensor_parallel_degree above 1; leave one of them out" for name in given if given[name]]
    if wrong:
        raise ConfigError("\n".join(wrong))


def compile_trace(trace: Trace, options: PipelineOptions, like: Compilation | None = None) -> Compilation:
    """Compiles a trace of one microbatch. With `like`, every module stays on the stage that it has there."""
    rewritten = with_kernels(trace, options)
    return compile_plan(rewritten.trace, make_plan(rewritten.trace, options, like, kernels=rewritten.uses))


def with_kernels(trace: Trace, options: PipelineOptions, on_gpu: bool | None = None) -> Rewritten:
    """The trace with the ops that `options.kernels` asks for, as far as the model computes what they do.

    `on_gpu`: whether the target is one; by default what the devices say that times are predicted for.
    """
    if on_gpu is None:
        on_gpu = all(device.transport != "gloo" for device in options.devices)
    found = rewrite_kernels(trace, select_rewrites(options.kernels, on_gpu=on_gpu))
    if options.kernels != "auto":
        return found
    return dataclasses.replace(found, uses=tuple(use for use in found.uses if not use.reason))


def make_plan(
    trace: Trace,
    options: PipelineOptions,
    like: Compilation | None = None,
    times: NodeTimes | None = None,
    prove: bool = True,
    kernels: tuple[KernelUse, ...] = (),
    saved: Plan | None = None,
    measured: bool = True,
) -> Plan:
    """The plan of a trace; its schedule is simulated with the predicted times of the stages.

    Every module stays on the stage that it has in `like`, if given; otherwise it goes where `options.manual` says, if that is given, or
    where it was in the plan `saved` by an earlier job, if that is one of the same operations on as many stages.
    `kernels` is what `with_kernels` did to the trace, for the record. `times` replace the predicted ones; `measured`: on a device.
    Without `prove` the best contiguous plan is taken, with no word on how good it is or how many stages would fit: much quicker.
    """
    choice, assignment = _given(trace, options, like, saved)
    model = options.cost_model
    if times is not None and measured:
        model = dataclasses.replace(model, device=f"{model.device}, times measured")
    planner = _Planner(trace, options, choice, model, times)
    if assignment is None:
        plan = planner.solved(prove)
    else:
        plan = planner.assigned(assignment, choice.in_flight)
        plan = on_devices(trace, plan, planner.models) if planner.models else plan
        if like is None:
            check_peaks(plan, options.rank_limits)
            if options.manual is not None:
                _check_not_split(plan)
    plan = dataclasses.replace(
        plan,
        pipeline_parallel_degree=options.pipeline_parallel_degree,
        loading_horizon=options.activation_loading_horizon if options.offload_activations else 0,
        kernels=kernels,
    )
    if choice.name == "list":
        plan = _with_found_peaks(plan, planner)
    plan = with_size_note(plan, options.devices)
    timeline = predict_timeline(trace, plan)
    summary = dataclasses.replace(plan.schedule, bubble_fraction=timeline.bubble_fraction, step_time=timeline.makespan)
    return dataclasses.replace(plan, schedule=summary)


@dataclass(frozen=True)
class _Planner:
    """Makes plans of one trace for one choice of schedule, without the schedule's times. `model`: what nodes and messages cost."""

    trace: Trace
    options: PipelineOptions
    choice: Choice
    model: CostModel
    times: NodeTimes | None

    @cached_property
    def models(self) -> list[CostModel]:
        """Where ranks have devices of several kinds, what each stage costs; else empty."""
        by_rank = self.options.rank_cost_models
        return [by_rank[rank] for rank in self.choice.placement] if by_rank else []

    def solved(self, prove: bool) -> Plan:
        """The plan with the best cut."""
        options, placement, models = self.options, self.choice.placement, self.models
        limits = [options.rank_limits[rank] for rank in placement] if models else ()

        def solve(speeds: tuple[float, ...] = ()) -> Plan:
            return solve_partition(
                self.trace,
                num_stages=len(placement),
                memory_weight=options.memory_weight,
                in_flight=self.choice.in_flight,
                placement=placement,
                cost_model=self.model,
                schedule=self._summary,
                times=self.times,
                memory_limit=options.limit_bytes,
                in_flight_of=options.in_flight_of if prove and not models else None,
                prove=prove,
                recompute=options.recompute,
                resident=self._resident,
                speeds=speeds,
                limits=limits,
            )

        return solve_mixed(self.trace, models, solve) if models else solve()

    def assigned(self, stages: Mapping[str, int], in_flight: Sequence[int]) -> Plan:
        """The plan with these stages of the modules, and so many microbatches in flight on each."""
        return plan_from_assignment(
            self.trace,
            stages,
            num_stages=len(self.choice.placement),
            memory_weight=self.options.memory_weight,
            in_flight=in_flight,
            placement=self.choice.placement,
            cost_model=self.model,
            schedule=self._summary,
            times=self.times,
            recompute=self.options.recompute,
            resident=self._resident,
        )

    @property
    def _summary(self) -> ScheduleSummary:
        return ScheduleSummary(
            self.choice.name,
            self.options.microbatches,
            self.choice.active_microbatches,
            0.0,
            0.0,
            self.model.link_bandwidth,
            self.model.link_latency,
        )

    @cached_property
    def _resident(self) -> tuple[int, ...] | None:
        """With offloading: by stage, the most microbatches in flight whose activations are on the device."""
        if not self.options.offload_activations:
            return None
        num_stages = len(self.choice.placement)
        schedule = self.choice.build(chain(num_stages), Costs.uniform(num_stages))
        return resident(schedule, num_stages, self.options.activation_loading_horizon)


def _given(
    trace: Trace, options: PipelineOptions, like: Compilation | None, saved: Plan | None
) -> tuple[Choice, dict[str, int] | None]:
    """The stage of every module, where it does not have to be searched for, and the schedule's choice with the placement it implies."""
    choice = options.choice
    if like is not None:
        placement = tuple(stage.rank for stage in like.plan.stages)
        return dataclasses.replace(choice, placement=placement), follow(trace, like.trace, like.plan)
    if options.manual is not None:
        marks, default, num_ranks = dict(options.manual.marks), options.manual.default, options.pipeline_parallel_degree
        assignment, placement = assign_manually(trace, marks, default, num_ranks=num_ranks)
        return dataclasses.replace(choice, placement=placement), assignment
    if saved is not None and fits(saved, trace) and tuple(s.rank for s in saved.stages) == choice.placement:
        return choice, dict(saved.assignment)
    return choice, _by_parameters(trace, len(choice.placement)) if options.skip_tracing else None


def _with_found_peaks(plan: Plan, planner: _Planner) -> Plan:
    """The plan with as many microbatches in flight by stage as the search finds best for the times of its stages, and the
    memory for them; as it is, if that breaks a limit. The cut was made before there were times, for balanced stages."""
    channels = plan_channels(planner.trace, plan)
    schedule = planner.choice.build([Link.of(channel) for channel in channels], Costs.of_plan(plan))
    in_flight = peaks(schedule, len(plan.stages))
    if in_flight == tuple(stage.num_in_flight for stage in plan.stages):
        return plan
    again = planner.assigned(dict(plan.assignment), in_flight)
    found = dataclasses.replace(
        plan,
        stages=tuple(
            dataclasses.replace(
                stage,
                num_in_flight=other.num_in_flight,
                peak_memory_bytes=other.peak_memory_bytes,
                communication_bytes=other.communication_bytes,
                transient_bytes=other.transient_bytes,
                offloaded_bytes_per_microbatch=other.offloaded_bytes_per_microbatch,
            )
            for stage, other in zip(plan.stages, again.stages, strict=True)
        ),
    )
    try:
        check_peaks(found, planner.options.rank_limits)
    except PartitionError:
        return plan
    return found


def _by_parameters(trace: Trace, num_stages: int) -> dict[str, int]:
    """Stages of about as many bytes of parameters, in the order of execution."""
    plan = solve_partition(
        trace,
        num_stages=num_stages,
        memory_weight=0.0,
        in_flight=(1,) * num_stages,
        times=parameter_times(trace),
        prove=False,
    )
    return dict(plan.assignment)


def _check_not_split(plan: Plan) -> None:
    """PartitionError if a partition by hand cuts through a checkpointed module."""
    wrong = [
        f"{name or 'the model'} lies on stages {', '.join(map(str, stages))}" for name, stages in plan.split_checkpoints
    ]
    if wrong:
        raise PartitionError(
            f"expected every checkpointed module on one partition, found that {'; '.join(wrong)}; put all of it on one partition, or "
            "checkpoint the modules inside it"
        )


def plan_warnings(plan: Plan) -> tuple[str, ...]:
    """What was asked for and is not done, for people."""
    split = [
        f"{name or 'the model'} is not checkpointed: the partition puts it on stages {', '.join(map(str, stages))}"
        for name, stages in plan.split_checkpoints
    ]
    idle = plan.loading_horizon and not any(stage.checkpoints for stage in plan.stages)
    nothing = ["offload_activations has no effect: no module is checkpointed, and only what those keep is offloaded"]
    unused = [
        f"kernels: {use.op} is not used"
        + (f" at {use.first or 'the model'}" if use.count else "")
        + (f" and {use.count - 1} more" if use.count > 1 else "")
        + f": {use.reason}"
        for use in plan.kernels
        if use.reason
    ]
    return (*plan.notes, *split, *(nothing if idle else ()), *unused)


def predict_timeline(trace: Trace, plan: Plan) -> Timeline:
    """One training step of a plan, simulated as `make_plan` did."""
    channels = plan_channels(trace, plan)
    return _simulate(plan, channels, _schedule(plan, channels))


def compile_plan(trace: Trace, plan: Plan) -> Compilation:
    """The verified programs of a plan."""
    codes, channels = split(trace, plan)
    placement = tuple(stage.rank for stage in plan.stages)
    num_ranks = max(placement) + 1
    shared = tuple(
        (item.name, tuple(dict.fromkeys(placement[stage] for stage in item.stages))) for item in plan.shared_parameters
    )
    training = _schedule(plan, channels)
    forward_only = evaluation(len(placement), placement, plan.schedule.num_microbatches)
    built = []
    for schedule, has_backward in ((training, True), (forward_only, False)):
        instructions = lower(schedule, channels, num_ranks=num_ranks, shared_parameters=shared)
        if has_backward and plan.loading_horizon:
            offloading = [stage.index for stage in plan.stages if stage.offloaded_bytes_per_microbatch]
            instructions = insert_offloads(instructions, offloading, plan.loading_horizon)
        programs = _programs(plan, codes, channels, instructions, shared, has_backward)
        held = [stage.num_in_flight for stage in plan.stages] if has_backward else None
        verify_programs(programs, max_in_flight=held)
        built.append(programs)
    return Compilation(trace, plan, channels, built[0], built[1])


def _programs(
    plan: Plan,
    codes: Sequence[StageCode],
    channels: tuple[Channel, ...],
    instructions: Sequence[tuple[Instruction, ...]],
    shared: tuple[tuple[str, tuple[int, ...]], ...],
    has_backward: bool,
) -> tuple[RankProgram, ...]:
    placement = [stage.rank for stage in plan.stages]
    return tuple(
        RankProgram(
            rank,
            len(instructions),
            plan.schedule.num_microbatches,
            has_backward,
            tuple(own),
            channels,
            tuple(code for code in codes if placement[code.index] == rank),
            shared,
            plan.schedule.name if has_backward else "evaluation",
            plan.fingerprint,
        )
        for rank, own in enumerate(instructions)
    )


def _schedule(plan: Plan, channels: tuple[Channel, ...]) -> Schedule:
    """The schedule of a training step."""
    summary, placement = plan.schedule, tuple(stage.rank for stage in plan.stages)
    choice = Choice(summary.name, placement, summary.num_microbatches, summary.active_microbatches)
    in_flight = [stage.num_in_flight for stage in plan.stages]
    return choice.build([Link.of(channel) for channel in channels], Costs.of_plan(plan), in_flight)


def _simulate(plan: Plan, channels: tuple[Channel, ...], schedule: Schedule) -> Timeline:
    """One training step with the predicted times of the stages and of the messages between them."""
    return simulate(schedule, [Link.of(channel) for channel in channels], Costs.of_plan(plan))
