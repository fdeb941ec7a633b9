"""The cut: which stage computes what, and how many microbatches are in flight on each.

stages of the modules come from           if
the plan of another compilation           `like` is given: every module stays where it is there
the user                                  `PipelineOptions.manual` is
the plan of an earlier job                `saved` is one of the same operations, on as many stages
parameter sizes alone                     `PipelineOptions.skip_tracing`
the solver                                otherwise
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from smpc.codegen.message_buffers import messages_by_action
from smpc.codegen.offload import action_uses, resident
from smpc.codegen.program import Channel, Schedule, peaks
from smpc.codegen.schedules.named import SCHEDULES, Choice
from smpc.codegen.simulate import Costs, Transfer, chain
from smpc.codegen.split import plan_channels
from smpc.compile.options import PipelineOptions
from smpc.compile.result import Compilation, Traced
from smpc.config.numbers import at_least
from smpc.errors import MemoryLimitError, PartitionError
from smpc.partitioner.costs.device import Device
from smpc.partitioner.costs.node_costs import CostModel
from smpc.partitioner.costs.timing import parameter_times
from smpc.partitioner.graph.plan import HostLink, Plan, ScheduleSummary
from smpc.partitioner.heterogeneous import on_devices, solve_mixed
from smpc.partitioner.keep_assignment import fits, follow
from smpc.partitioner.manual import assign_manually
from smpc.partitioner.memory.memory_by_action import ActionUse
from smpc.partitioner.memory.peak import Resident
from smpc.partitioner.planner import check_peaks, plan_from_assignment, rank_peaks, solve_partition, with_note
from smpc.tracer.ir import Trace

_HOPELESS = 1.5  # of the memory that there is: where contiguous cuts need more, no other way to cut fits


@dataclass(frozen=True)
class Cut:
    """The passes that cut one trace. `assignment`: the stage of every module, where it is given; `is_kept`: as it is in a compilation.

    `order`: the schedule of `list`, where other ranks run the same one whatever the times of this trace are.
    """

    traced: Traced
    options: PipelineOptions
    choice: Choice
    assignment: Mapping[str, int] | None = None
    is_kept: bool = False
    order: Schedule | None = None

    @classmethod
    def of(
        cls, traced: Traced, options: PipelineOptions, like: Compilation | None = None, saved: Plan | None = None
    ) -> Cut:
        """Decides, by the table above, where stages come from, and with them the placement that the schedule is built on."""
        trace, choice, manual = traced.trace, options.choice, options.manual
        if like is not None:
            placement = tuple(stage.rank for stage in like.plan.stages)
            choice = dataclasses.replace(choice, placement=placement)
            return cls(traced, options, choice, follow(trace, like.trace, like.plan), is_kept=True)
        if manual is not None:
            num_ranks = options.pipeline_parallel_degree
            assignment, placement = assign_manually(trace, dict(manual.marks), manual.default, num_ranks=num_ranks)
            return cls(traced, options, dataclasses.replace(choice, placement=placement), assignment)
        if saved is not None and fits(saved, trace) and tuple(s.rank for s in saved.stages) == choice.placement:
            return cls(traced, options, choice, dict(saved.assignment))
        by_size = _by_parameters(trace, len(choice.placement)) if options.skip_tracing else None
        return cls(traced, options, choice, by_size)

    def plan(self, prove: bool) -> Plan:
        """The plan, whose schedule has no times yet. `prove`: see `smpc.partitioner.planner`."""
        options = self.options
        if self.assignment is None:
            plan = self._solved(prove)
        else:
            # No other cut would be taken for the one that is kept, whatever is proven of it.
            plan = self._assigned(self.assignment, self.choice.in_flight, prove and not self.is_kept)
            plan = on_devices(self.traced.trace, plan, self._models) if self._models else plan
            if not self.is_kept:
                check_peaks(plan, options.rank_limits)
                if options.manual is not None:
                    _check_cut_keeps_checkpoints_whole(plan)
        moves = options.offload_activations
        return dataclasses.replace(
            plan,
            pipeline_parallel_degree=options.pipeline_parallel_degree,
            loading_horizon=options.activation_loading_horizon if moves else 0,
            host_link=_host_link(options.devices) if moves else None,
            kernels=self.traced.kernels,
        )

    def schedule(self, plan: Plan, channels: Sequence[Channel]) -> tuple[Plan, Schedule]:
        """The schedule for the times of the stages; of `list`, with the memory for the microbatches that it has in flight.

        The cut was made before there were times, for balanced stages, and messages. Where that memory breaks a limit, the plan stays as
        it is.
        """
        if self.choice.name != "list":
            schedule = schedule_of(plan, channels)
            return self._with_messages(plan, schedule, channels), schedule
        links = [Transfer.of(channel) for channel in channels]
        schedule = self.order or self.choice.build(links, Costs.of_plan(plan))
        in_flight, actions = peaks(schedule, len(plan.stages)), action_uses(schedule, len(plan.stages))
        if actions is None and in_flight == tuple(stage.num_in_flight for stage in plan.stages):
            return plan, schedule
        found = _with_memory_of(plan, self._assigned(dict(plan.assignment), in_flight, False, actions))
        if self.order is not None:
            return found, schedule
        try:
            check_peaks(found, self.options.rank_limits)
        except PartitionError:
            return plan, schedule_of(plan, channels)
        return found, schedule

    def _with_messages(self, plan: Plan, schedule: Schedule, channels: Sequence[Channel]) -> Plan:
        """The plan with the memory of messages of ranks with several stages, counted along their programs."""
        num_ranks = len(set(self.choice.placement))
        if not self._model.holds_sent or self._actions is None or num_ranks == len(plan.stages) or self._models:
            return plan
        messages = messages_by_action(schedule, tuple(channels), num_ranks)
        in_flight, actions = peaks(schedule, len(plan.stages)), action_uses(schedule, len(plan.stages), messages)
        found = _with_memory_of(plan, self._assigned(dict(plan.assignment), in_flight, False, actions))
        try:
            check_peaks(found, self.options.rank_limits)
        except PartitionError as error:  # limits are kept by the solvers' count, which has no order of messages
            return with_note(plan, f"with the messages between the stages of a rank counted one by one: {error}")
        return found

    @cached_property
    def _model(self) -> CostModel:
        """What nodes and messages cost."""
        model, divided = self.options.cost_model, self.traced.divided
        if divided is not None:
            model = dataclasses.replace(model, apart=divided.parameters, optimizer_apart=self.options.expert_optimizer)
        if self.traced.apart is not None:
            names, optimizer = self.traced.apart
            model = dataclasses.replace(model, apart=names, optimizer_apart=optimizer)
        units = self.traced.units if self._runs_as_it_is else None
        traced = self.traced
        model = dataclasses.replace(
            model,
            sends_batch=traced.sends_batch,
            batches=traced.batches,
            casts=traced.casts,
            keeps_outputs=traced.keeps_outputs,
            units=units,
        )
        return (
            dataclasses.replace(model, device=f"{model.device}, times measured") if self.traced.is_measured else model
        )

    @property
    def _runs_as_it_is(self) -> bool:
        """Whether no program runs, and blocks gather the parameters that are in parts: scripts without a pipeline."""
        return self.options.num_shards > 1 and not self.traced.has_program(len(self.choice.placement))

    @cached_property
    def _models(self) -> list[CostModel]:
        """Where ranks have devices of several kinds, what each stage costs; else empty."""
        by_rank = self.options.rank_cost_models
        return [by_rank[rank] for rank in self.choice.placement] if by_rank else []

    def _solved(self, prove: bool) -> Plan:
        """The plan with the best cut. If no weight is asked for: the fastest that fits the device, or where none does, balanced memory."""
        options = self.options
        if options.memory_weight is not None or self._models or options.limit_bytes is not None:
            weight = options.memory_weight or 0.0
            try:
                return self._weighted(weight, options.limit_bytes, prove)
            except MemoryLimitError:
                plan = self._ordered_within_limit(weight, prove)
                if plan is None:
                    raise
                return plan
        room = options.devices[0].memory_bytes
        if (error := self._no_fit(room)) is not None and error.least_bytes > _HOPELESS * room:
            return self._balanced(error, prove)
        fastest = self._weighted(0.0, None, prove)
        peak = max(rank_peaks(fastest).values())
        if peak <= room:
            return fastest
        needs = f"the fastest plan needs {at_least(peak)} of {at_least(room)}"
        try:
            return with_note(self._weighted(0.0, room, prove), f"{needs}: this is the fastest found that fits")
        except MemoryLimitError as error:
            return self._balanced(error, prove)

    def _ordered_within_limit(self, memory_weight: float, prove: bool) -> Plan | None:
        """For `list`: the cut without a limit, if the order of its actions keeps the limit: stages of a rank are not fullest at once."""
        if self.choice.name != "list" or self._models or self.options.limit_bytes is None:
            return None
        free = self._weighted(memory_weight, None, prove)
        found, _ = self.schedule(free, plan_channels(self.traced.trace, free))
        return free if max(rank_peaks(found).values()) <= self.options.limit_bytes else None

    def _no_fit(self, room: int) -> MemoryLimitError | None:
        """The error where no contiguous cut is within the room. No proof of the fastest plan is needed to know it."""
        try:
            self._weighted(0.0, room, prove=False)
        except MemoryLimitError as error:
            return error
        return None

    def _balanced(self, error: MemoryLimitError, prove: bool) -> Plan:
        least = f"the least memory{'' if error.is_least else ' that is known to do'} is {at_least(error.least_bytes)}"
        return with_note(self._weighted(1.0, None, prove), f"no plan fits: {least}, and memory alone was balanced")

    def _weighted(self, memory_weight: float, memory_limit: int | None, prove: bool) -> Plan:
        """The plan with the best cut at a weight of memory, within a limit if there is one."""
        options, placement, models = self.options, self.choice.placement, self._models
        limits = [options.rank_limits[rank] for rank in placement] if models else ()
        if (
            memory_limit is not None and self._runs_as_it_is
        ):  # there is one plan, and solvers take its parameters to be whole
            return _within(self._weighted(memory_weight, None, prove), memory_limit)
        says_fewest = prove and not models and memory_limit == options.limit_bytes

        def solve(speeds: tuple[float, ...] = ()) -> Plan:
            return solve_partition(
                self.traced.trace,
                num_stages=len(placement),
                memory_weight=memory_weight,
                in_flight=self.choice.in_flight,
                placement=placement,
                cost_model=self._model,
                schedule=self._summary,
                times=self.traced.times,
                memory_limit=memory_limit,
                in_flight_of=options.in_flight_of if says_fewest else None,
                prove=prove,
                recompute=options.recompute,
                resident=self._resident,
                actions=self._actions,
                speeds=speeds,
                limits=limits,
            )

        return solve_mixed(self.traced.trace, models, solve) if models else solve()

    def _assigned(
        self,
        stages: Mapping[str, int],
        in_flight: Sequence[int],
        prove: bool,
        actions: tuple[ActionUse, ...] | None = None,
    ) -> Plan:
        """The plan with these stages of the modules, and so many microbatches in flight on each."""
        return plan_from_assignment(
            self.traced.trace,
            stages,
            num_stages=len(self.choice.placement),
            memory_weight=self.options.memory_weight or 0.0,
            in_flight=in_flight,
            placement=self.choice.placement,
            cost_model=self._model,
            schedule=self._summary,
            times=self.traced.times,
            recompute=self.options.recompute,
            resident=self._resident,
            prove=prove,
            actions=self._actions if actions is None else actions,
        )

    @property
    def _summary(self) -> ScheduleSummary:
        return ScheduleSummary(
            self.choice.name,
            self.options.microbatches,
            self.choice.active_microbatches,
            0.0,
            0.0,
            self._model.link_bandwidth,
            self._model.link_latency,
        )

    @cached_property
    def _resident(self) -> tuple[Resident, ...] | None:
        """With offloading: by stage, the microbatches in flight whose activations are on the device."""
        if not self.options.offload_activations:
            return None
        num_stages = len(self.choice.placement)
        return resident(self._typical, num_stages, self.options.activation_loading_horizon)

    @cached_property
    def _actions(self) -> tuple[ActionUse, ...] | None:
        """By stage, what there is beside its actions; None if no backward has two parts, and no rank several stages.

        Of `list`, whose actions depend on the cut, they are known later: see `schedule`.
        """
        choice, num_stages = self.choice, len(self.choice.placement)
        if choice.name == "list":
            return None
        if choice.name in SCHEDULES and len(set(choice.placement)) == num_stages:
            return None
        return action_uses(self._typical, num_stages)

    @cached_property
    def _typical(self) -> Schedule:
        """The schedule for balanced stages."""
        num_stages = len(self.choice.placement)
        return self.choice.build(chain(num_stages), Costs.uniform(num_stages))


def schedule_of(plan: Plan, channels: Sequence[Channel]) -> Schedule:
    """The schedule that a plan names, for the times of its stages."""
    summary, placement = plan.schedule, tuple(stage.rank for stage in plan.stages)
    choice = Choice(summary.name, placement, summary.num_microbatches, summary.active_microbatches)
    in_flight = [stage.num_in_flight for stage in plan.stages]
    return choice.build([Transfer.of(channel) for channel in channels], Costs.of_plan(plan), in_flight)


def _within(plan: Plan, limit: int) -> Plan:
    """The plan of one rank. MemoryLimitError if it breaks the limit."""
    peak = max(rank_peaks(plan).values())
    if peak > limit:
        raise MemoryLimitError(
            f"no plan fits into {at_least(limit)}: the least memory is {at_least(peak)}; raise memory_limit, use more ranks, or make "
            "microbatches smaller",
            peak,
        )
    return plan


def _host_link(devices: Sequence[Device]) -> HostLink:
    """The link between the ranks' devices and their hosts; of several kinds, the slowest."""
    overlaps = all(device.transport != "gloo" for device in devices)
    return HostLink(
        min(device.host.rate for device in devices), max(device.host.latency for device in devices), overlaps
    )


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


def _with_memory_of(plan: Plan, other: Plan) -> Plan:
    """The plan with the microbatches in flight of another one, whose stages are the same, and the memory for them."""
    names = (
        "num_in_flight",
        "peak_memory_bytes",
        "activation_bytes_per_microbatch",
        "communication_bytes",
        "transient_bytes",
        "offloaded_bytes_per_microbatch",
        "deferred_bytes_per_microbatch",
        "in_flight_bytes",
    )
    stages = zip(plan.stages, other.stages, strict=True)
    return dataclasses.replace(
        plan, stages=tuple(dataclasses.replace(a, **{name: getattr(b, name) for name in names}) for a, b in stages)
    )


def _check_cut_keeps_checkpoints_whole(plan: Plan) -> None:
    """PartitionError if a partition by hand cuts through a checkpointed module."""
    wrong = [
        f"{name or 'the model'} is on stages {', '.join(map(str, stages))}" for name, stages in plan.split_checkpoints
    ]
    if wrong:
        raise PartitionError(
            f"expected every checkpointed module on one partition, found that {'; '.join(wrong)}; put all of it on one partition, or "
            "checkpoint the modules inside it"
        )
