"""The passes of a compilation: the one place that says which follows which. Read it from top to bottom.

    function         passes, in order                                                       gives
    compile_batch    record, then all below                                                 Compilation
    rewrite_trace    open attention, name outputs, draw whole, share the sequence, share operations, kernels  Traced
    measure_trace    measure times, measure memory                                          Traced, with times
    plan_trace       predict times, cut, connect, schedule, simulate                        Planned
    write_programs   split; lower, offload and verify, for training and for evaluation      Compilation

A caller that has the result of some passes starts further down: ranks that have agreed on a recording with `rewrite_trace`, a rank that was
sent a plan with `compile_plan`. A pass is a function of values that are never changed; each says itself what it needs.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from smpc.codegen.lower import lower
from smpc.codegen.offload import insert_offloads
from smpc.codegen.program import RankProgram, Schedule, StageCode
from smpc.codegen.rewrite import whole_draws
from smpc.codegen.rewrite.context_parallel.rewrite import ZIGZAG, ContextPlan, ContextTrace, share_sequence
from smpc.codegen.rewrite.context_parallel.rules import CALLS
from smpc.codegen.rewrite.expert_parallel import Experts, divide_experts, parts_of_experts, recorded_inside, shares_of
from smpc.codegen.rewrite.kernels import Rewritten, rewrite_kernels, select_rewrites
from smpc.codegen.rewrite.opened_attention import open_attention
from smpc.codegen.rewrite.outputs import keep_outputs, return_left_inputs, return_written_inputs
from smpc.codegen.rewrite.tensor_parallel.expert_rules import whole_expert_rules
from smpc.codegen.rewrite.tensor_parallel.rewrite import RING, rewrite
from smpc.codegen.rewrite.tensor_parallel.strategy import Facts, Rule
from smpc.codegen.rewrite.tensor_parallel.styles import StylePlan, choose_by_plan
from smpc.codegen.ring_order import prove_ring
from smpc.codegen.schedules.named import evaluation
from smpc.codegen.simulate import simulate_plan
from smpc.codegen.split import plan_channels, split
from smpc.codegen.verify import verify_programs
from smpc.compile.cut import Cut, schedule_of
from smpc.compile.options import PipelineOptions, asked_of, takes_options
from smpc.compile.replica_traffic import StepSurroundings, with_exchanges
from smpc.compile.result import Compilation, Planned, Traced
from smpc.errors import ConfigError, PartitionError
from smpc.kernels.setting import wanted
from smpc.partitioner.costs.node_costs import NodeTimes, node_times
from smpc.partitioner.costs.timing import measure_times, measure_workspace
from smpc.partitioner.graph.plan import Plan, plan_warnings
from smpc.partitioner.graph.recompute_regions import changing_parameters
from smpc.partitioner.planner import with_size_note
from smpc.sample_inputs import Inputs, as_inputs, first_microbatch
from smpc.tracer.attempt import RecordingRequest
from smpc.tracer.ir import Trace
from smpc.tracer.record import record_guarded
from smpc.tracer.state.state_use import other_forms
from smpc.tracer.targets import TENSOR_OPS

ShowPhase = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Sharing:
    """How tensor-parallel ranks share a model. `outputs`: the only tensors that are returned whole; None: all."""

    degree: int
    plan: StylePlan = field(default_factory=StylePlan)
    outputs: Sequence[str] | None = None
    may_lack_outputs: bool = False  # whether a trace that does not return them returns all it has

    @classmethod
    def of(cls, model: nn.Module, options: PipelineOptions) -> Sharing | None:
        """As the options say; None where nothing is shared. ConfigError for a plan that is wrong, or without effect."""
        degree, plan = options.tensor_parallel_degree, options.tensor_parallel_plan
        outputs = options.tensor_parallel_outputs
        if degree > 1:
            from smpc.compile.divided_experts import find_sharing_plan  # see `record_and_rewrite`

            return cls(degree, find_sharing_plan(model, plan), outputs)
        if plan not in ("auto", "off") or (outputs is not None and options.context_parallel_degree == 1):
            raise ConfigError(
                "tensor_parallel_plan and tensor_parallel_outputs have no effect with tensor_parallel_degree 1; leave them out, or set "
                "the degree"
            )
        return None


@dataclass(frozen=True, slots=True)
class ContextSharing:
    """How context-parallel ranks share a sequence. `outputs`, `may_lack_outputs`: see `Sharing`.

    `experts`: the modules of the model that hold some of the experts.
    """

    degree: int
    plan: ContextPlan = field(default_factory=ContextPlan)
    outputs: Sequence[str] | None = None
    may_lack_outputs: bool = False
    experts: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, options: PipelineOptions) -> ContextSharing | None:
        """As the options say; None where sequences are whole."""
        if options.context_parallel_degree == 1:
            return None
        plan = ContextPlan(options.context_parallel_layout, options.context_parallel_attention, sums_later=True)
        outputs, experts = options.tensor_parallel_outputs, parts_of_experts(model)
        return cls(options.context_parallel_degree, plan, outputs, experts=experts)


@takes_options
def compile_model(
    model: nn.Module,
    sample_inputs: Any,
    *,
    show_phase: Callable[[str], object] | None = None,
    warn: bool = True,
    **options: Any,
) -> Compilation:
    """Compiles a model for a batch like `sample_inputs` (see `smpc.sample_inputs` for its forms).

    `show_phase` gets the name of each phase as it starts. With `warn`, what is asked for and not done becomes a warning. Raises TypeError
    for an unknown option, ConfigError for settings out of bounds or a batch that `microbatches` does not divide, TraceError for a model
    that cannot be recorded, PartitionError when there are more stages than modules, or no plan within the memory limit.
    """
    compilation = compile_batch(model, sample_inputs, asked_of("compile_model", options), show_phase)
    for text in plan_warnings(compilation.plan) if warn else ():
        warnings.warn(text, stacklevel=2)
    return compilation


def compile_batch(
    model: nn.Module, sample_inputs: Any, options: PipelineOptions, show_phase: ShowPhase | None = None
) -> Compilation:
    """A model and a batch to programs: all passes."""
    show = show_phase or (lambda phase: None)
    inputs = first_microbatch(as_inputs(sample_inputs), options.microbatches)
    show("Tracing the model")
    request, experts = RecordingRequest(*inputs), _experts_of(model, options)
    recording = record_guarded(model, request, options.leaf_modules)
    if inside := recorded_inside(recording.trace, experts):
        _check_block_is_part(inside, experts)
        recording = record_guarded(model, request, (*options.leaf_modules, *inside))
    if options.tensor_parallel_degree > 1 or options.context_parallel_degree > 1:
        show("Choosing layouts")
    trace = return_written_inputs(recording.trace)
    traced = rewrite_trace(
        trace, options, Sharing.of(model, options), context=ContextSharing.of(model, options), experts=experts
    )
    traced = measure_trace(traced, options, model, inputs, show)
    show("Solving the partition")
    planned = plan_trace(traced, options)
    show("Writing and checking the programs")
    return write_programs(
        planned,
        sharded=traced.sharded,
        context=traced.context,
        divided=traced.divided,
        environment=recording.environment,
    )


def _expert_rules(plan: StylePlan) -> Mapping[str, Rule]:
    """The rules of modules of whose experts ranks may have some each."""
    return whole_expert_rules(dict(plan.by_expert), dict(plan.segmented))


def _experts_of(model: nn.Module, options: PipelineOptions) -> tuple[Experts, ...]:
    """The experts that expert-parallel ranks divide."""
    if options.expert_parallel_degree == 1:
        return ()
    from smpc.compile.divided_experts import experts_to_divide  # and what trains them, which takes a second

    return experts_to_divide(model, options.expert_parallel_degree)


def _check_block_is_part(blocks: Sequence[str], experts: Sequence[Experts]) -> None:
    """ConfigError for experts that the model's own forward calls: what calls experts is called whole, but not the model itself."""
    names = [found.name for found in experts if not found.module]
    if "" in blocks:
        raise ConfigError(
            f"expert_parallel_degree: expected experts that a part of the model calls, found that the model's own forward calls "
            f"{', '.join(names)}; put them and their router in a module of their own (without a pipeline, scripts may leave them there)"
        )


def rewrite_trace(
    trace: Trace,
    options: PipelineOptions,
    sharing: Sharing | None = None,
    *,
    context: ContextSharing | None = None,
    on_gpu: bool | None = None,
    experts: Sequence[Experts] = (),
) -> Traced:
    """A recorded model to what one rank of each stage runs. `on_gpu`: whether the target is one; None: as `options.device` says.

    `experts`: those that `options.expert_parallel_degree` ranks divide among them.
    """
    sharded, shared, divided = None, None, None
    trace = return_left_inputs(trace)
    if experts:
        divided = divide_experts(trace, experts, options.expert_parallel_degree)
        trace = divided.trace
    whole = options.draw_as_one_process
    if context is not None or sharing is not None:
        trace = open_attention(trace)
    if whole and (context is not None or sharing is not None):
        trace = whole_draws.draw_whole(trace)
    if context is not None:
        divided_in = (*context.experts, *(found.module for found in experts if found.tensors))
        named = _name_outputs(trace, context)
        shared = share_sequence(named, context.degree, context.plan, draws_whole=whole, experts=divided_in)
        trace = shared.sharded.trace
        _prove_rings(shared)
        divided = None if divided is None else dataclasses.replace(divided, collectives=shares_of(divided, trace))
    if sharing is not None:
        trace = _name_outputs(trace, sharing)
        more = {**CALLS, **whole_draws.RULES, **_expert_rules(sharing.plan)}
        facts = Facts(trace, sharing.degree, more=more, draws_whole=whole)
        sharded = rewrite(trace, choose_by_plan(trace, sharing.degree, sharing.plan, facts=facts), facts)
        trace = sharded.trace
    found = _use_kernels(trace, options, on_gpu)
    return Traced(found.trace, sharded, found.uses, context=shared, divided=divided)


def measure_trace(
    traced: Traced,
    options: PipelineOptions,
    model: nn.Module,
    inputs: Inputs,
    show: ShowPhase = lambda phase: None,
    device: torch.device | None = None,
) -> Traced:
    """With the times and the memory of operations on `device`, by default the model's, as far as the options ask for them."""
    trace, times = traced.trace, traced.times
    if options.trace_execution_times:
        show("Measuring the model")
        times = measure_times(trace, model, *inputs, device=device)
    if options.trace_memory_usage:
        show("Measuring memory")
        workspace = measure_workspace(trace, model, *inputs, device)
        times = dataclasses.replace(times or node_times(trace, options.cost_model), workspace=workspace)
    return dataclasses.replace(traced, times=times, is_measured=options.trace_execution_times)


def plan_trace(
    traced: Traced,
    options: PipelineOptions,
    *,
    like: Compilation | None = None,
    saved: Plan | None = None,
    order: Schedule | None = None,
    prove: bool = True,
    around: StepSurroundings | None = None,
) -> Planned:
    """The trace of a rank to a plan with its schedule; `like`, `saved` and `order`: see `smpc.compile.cut`.

    `around`: where its ranks are, by default as the options say.
    Without `prove` the best contiguous plan is taken, with no word on how good it is or how many stages would fit: much quicker.
    """
    if traced.times is None:
        traced = dataclasses.replace(traced, times=_times_with_collectives(traced, options))
    cut = dataclasses.replace(Cut.of(traced, options, like, saved), order=order)
    plan = cut.plan(prove)
    channels = plan_channels(traced.trace, plan)
    plan, schedule = cut.schedule(plan, channels)
    plan = with_size_note(plan, options.devices)
    around = around or StepSurroundings.of(options)
    if around.divides_parameters:
        plan = with_exchanges(plan, traced, around, traced.times or node_times(traced.trace, options.cost_model))
    timeline = simulate_plan(plan, channels, schedule)
    summary = dataclasses.replace(plan.schedule, bubble_fraction=timeline.bubble_fraction, step_time=timeline.makespan)
    return Planned(traced.trace, dataclasses.replace(plan, schedule=summary), channels, schedule, timeline, traced)


def write_programs(planned: Planned, **known: Any) -> Compilation:
    """A plan to the verified programs of all ranks. `known`: what else a `Compilation` holds.

    Raises PartitionError for a model that microbatches cannot take turns in.
    """
    plan = planned.plan
    _check_turns(planned)
    codes = split(planned.trace, plan)
    placement = tuple(stage.rank for stage in plan.stages)
    forward_only = evaluation(len(placement), placement, plan.schedule.num_microbatches)
    return Compilation(
        planned.trace,
        plan,
        planned.channels,
        _lower(planned, codes, planned.schedule, has_backward=True),
        _lower(planned, codes, forward_only, has_backward=False),
        planned=planned,
        **known,
    )


def _times_with_collectives(traced: Traced, options: PipelineOptions) -> NodeTimes | None:
    """Predicted times of what a rank of groups runs: what collectives add to its own; None where there are none."""
    found = []
    if traced.sharded is not None:
        found.append(options.sharded_times(traced.trace, traced.sharded))
    if traced.context is not None:
        found.append(options.context_times(traced.trace, traced.context))
    if traced.divided is not None:
        found.append(options.expert_times(traced.trace, traced.divided))
    if len(found) < 2:
        return next(iter(found), None)
    plain = node_times(traced.trace, options.cost_model)
    more = len(found) - 1
    forward = sum(times.forward for times in found) - more * plain.forward
    return NodeTimes(forward, sum(times.backward for times in found) - more * plain.backward)


def schedule_plan(trace: Trace, plan: Plan, order: Schedule | None = None) -> Planned:
    """A plan that was made elsewhere, with its channels and schedule: `order`, or what follows from the plan."""
    channels = plan_channels(trace, plan)
    schedule = order or schedule_of(plan, channels)
    return Planned(trace, plan, channels, schedule, simulate_plan(plan, channels, schedule))


def compile_plan(trace: Trace, plan: Plan) -> Compilation:
    """The programs of a plan that was made elsewhere."""
    return write_programs(schedule_plan(trace, plan))


def _name_outputs(trace: Trace, sharing: Sharing | ContextSharing) -> Trace:
    """The trace with the outputs that are asked for alone."""
    if sharing.outputs is None:
        return trace
    try:
        return keep_outputs(trace, sharing.outputs)
    except ConfigError:
        if sharing.may_lack_outputs:
            return trace
        raise


def _prove_rings(shared: ContextTrace) -> None:
    """ScheduleError unless the ring of every attention that goes around in one works: see `smpc.codegen.ring_order`."""
    rings = (node for node in shared.sharded.trace.nodes if node.target == f"{TENSOR_OPS}.{RING}")
    for causal in sorted({bool(dict(node.kwargs).get("causal", False)) for node in rings}):
        _prove_ring(shared.sharded.degree, causal, shared.layout == ZIGZAG)


@functools.lru_cache
def _prove_ring(num_ranks: int, causal: bool, mirrored: bool) -> None:
    """Once in a process: a search goes through the same rings again, and the rings of 64 ranks take half a second."""
    prove_ring(num_ranks, causal=causal, mirrored=mirrored)


def _use_kernels(trace: Trace, options: PipelineOptions, on_gpu: bool | None) -> Rewritten:
    """The trace with the ops that `options.kernels` asks for, as far as the model computes what they do."""
    if on_gpu is None:
        on_gpu = all(device.transport != "gloo" for device in options.devices)
    if not wanted(options.kernels, on_gpu=on_gpu):
        return Rewritten(trace, ())
    found = rewrite_kernels(trace, select_rewrites(options.kernels, on_gpu=on_gpu))
    if options.kernels != "auto":
        return found
    return dataclasses.replace(found, uses=tuple(use for use in found.uses if not use.reason))


def _lower(
    planned: Planned, codes: Sequence[StageCode], schedule: Schedule, *, has_backward: bool
) -> tuple[RankProgram, ...]:
    """The programs that run a schedule, proven to be free of deadlocks."""
    plan, channels = planned.plan, planned.channels
    placement = [stage.rank for stage in plan.stages]
    shared = tuple(
        (item.name, tuple(dict.fromkeys(placement[stage] for stage in item.stages))) for item in plan.shared_parameters
    )
    instructions = lower(schedule, channels, num_ranks=max(placement) + 1, shared_parameters=shared)
    if has_backward and plan.loading_horizon:
        offloading = [stage.index for stage in plan.stages if stage.offloaded_bytes_per_microbatch]
        instructions = insert_offloads(instructions, offloading, plan.loading_horizon)
    programs = tuple(
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
    verify_programs(programs, max_in_flight=[stage.num_in_flight for stage in plan.stages] if has_backward else None)
    return programs


def _check_turns(planned: Planned) -> None:
    """PartitionError if a microbatch would overwrite what the backward of another one, still to come, needs, or if stages would leave a
    buffer for which the next microbatch needs another program.
    """
    num_microbatches, overwritten = planned.plan.schedule.num_microbatches, planned.trace.overwritten
    if num_microbatches > 1 and overwritten:
        rows = [
            f"{name}: needed as it was at {read}, written in place at {written}" for name, read, written in overwritten
        ]
        raise PartitionError(
            f"expected a forward that leaves alone what a backward needs, as {num_microbatches} microbatches are under way at a time, "
            f"found {'; '.join(rows)}; have forward read a copy (.clone()), or use one microbatch"
        )
    regions = [region for stage in planned.plan.stages if stage.num_in_flight > 1 for region in stage.checkpoints]
    wrong = dict.fromkeys(name for region in regions for name in changing_parameters(planned.trace, region))
    if wrong:
        raise PartitionError(
            f"expected what is computed again in the backward to use parameters that forward leaves alone, as {num_microbatches} "
            f"microbatches are under way at a time, found that forward writes into {', '.join(wrong)}; write outside of what is "
            "checkpointed, and give it a copy (.clone()), hold it in a buffer, or use one microbatch"
        )
    if len(planned.plan.stages) > 1 and (changed := other_forms(planned.trace)):
        raise PartitionError(
            f"expected buffers to keep their shapes and types, as all microbatches and ranks of a pipeline run one program, found "
            f"{'; '.join(changed)}; give them their last shape and type before the first step, or hold in an attribute that is no buffer "
            "what depends on sizes alone"
        )
