"""What the passes of a compilation give, level by level.

    Traced         the trace of one rank of every stage, and what is known of its times
    Planned        its plan, with the channels between the stages, the schedule and the predicted timeline
    Compilation    the programs of all ranks

Each is made once, and handed on: `smpc.compile.passes` says by which passes.

`plan_warnings`: what was asked for and is not done, for people.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from smpc.codegen.printer import describe_channel, emit_rank
from smpc.codegen.program import Channel, RankProgram, Schedule, of_program
from smpc.codegen.rewrite.context_parallel.rewrite import ContextTrace
from smpc.codegen.rewrite.expert_parallel import ExpertTrace
from smpc.codegen.rewrite.tensor_parallel.rewrite import ShardedTrace
from smpc.codegen.simulate import Timeline, simulate_plan, timeline_text
from smpc.config.keep import MOST_PARAMETERS, SMALL_PARAMETERS
from smpc.kernels.setting import KernelUse
from smpc.partitioner.costs.named_optimizers import Optimizer
from smpc.partitioner.costs.node_costs import NodeTimes
from smpc.partitioner.graph.plan import Plan
from smpc.tracer.environment.environment_guards import Environment
from smpc.tracer.ir import Trace


@dataclass(frozen=True)
class Traced:
    """A recorded model after all rewrites."""

    trace: Trace
    sharded: ShardedTrace | None = None  # with tensor parallelism: `trace` before kernels, layouts and collectives
    kernels: tuple[KernelUse, ...] = ()  # what became of the ops that were asked for
    times: NodeTimes | None = None  # in place of the predicted ones
    is_measured: bool = False  # whether a device has been asked for `times`
    context: ContextTrace | None = (
        None  # with context parallelism: `trace` before tensor parallelism, layout and collectives
    )
    divided: ExpertTrace | None = None  # with experts over several ranks: `trace` before kernels, and what travels
    apart: tuple[frozenset[str], Optimizer] | None = (
        None  # experts that were divided before recording, by name, and what the optimizer keeps of them
    )
    sends_batch: bool = False  # in a script: see `smpc.partitioner.costs.node_costs`
    batches: tuple[int, ...] = ()  # in a script
    casts: bool = False  # in a script
    keeps_outputs: bool = False  # in a script without a program
    units: tuple[int, int] = (SMALL_PARAMETERS, MOST_PARAMETERS)  # without a program, what blocks in parts go by

    @property
    def experts(self) -> frozenset[str]:
        """The parameters of experts that ranks divide, by canonical names."""
        found = frozenset[str]() if self.divided is None else self.divided.parameters
        return found if self.apart is None else found | self.apart[0]

    def has_program(self, num_stages: int) -> bool:
        """Whether a program runs, and not the model as it is: for a pipeline, or for ranks that share operations or sequences."""
        return self.sends_batch or self.sharded is not None or self.context is not None or num_stages > 1


@dataclass(frozen=True)
class Planned:
    """A plan and what follows from it."""

    trace: Trace
    plan: Plan
    channels: tuple[Channel, ...]
    schedule: Schedule
    timeline: Timeline  # of one training step
    traced: Traced | None = field(default=None, repr=False)  # what it was planned from


@dataclass(frozen=True)
class Compilation:
    """A model compiled for one signature of its inputs. `evaluation_programs` run forwards only."""

    trace: Trace
    plan: Plan
    channels: tuple[Channel, ...]
    programs: tuple[RankProgram, ...]
    evaluation_programs: tuple[RankProgram, ...]
    sharded: ShardedTrace | None = None  # with tensor_parallel_degree: `trace` before kernels, layouts and collectives
    divided: ExpertTrace | None = None  # with expert_parallel_degree: `trace` before kernels, and what travels
    context: ContextTrace | None = None  # with context_parallel_degree: what the ranks of a group share, and what not
    # What else must stay as it was when the model was recorded.
    environment: Environment | None = field(default=None, compare=False)
    planned: Planned | None = field(default=None, compare=False, repr=False)  # what `programs` were made from

    def __getstate__(self) -> dict[str, Any]:
        """All but the environment, which belongs to the model of this process, and what can be made again."""
        return {**vars(self), "environment": None, "planned": None}

    def rank_source(self, rank: int) -> str:
        """The program of a pipeline rank as readable Python."""
        return emit_rank(self.programs[rank])

    def timeline(self) -> Timeline:
        """The predicted timeline of one training step."""
        if self.planned is not None:
            return self.planned.timeline
        schedule = tuple(of_program(program.instructions) for program in self.programs)
        return simulate_plan(self.plan, self.channels, schedule)

    def schedule_text(self) -> str:
        """The edges, every rank's instructions, and a drawing of the predicted timeline."""
        lines = [f"{self.plan.schedule.name} schedule, {self.plan.schedule.num_microbatches} microbatches", ""]
        lines += [describe_channel(channel) for channel in self.channels]
        lines += ["", timeline_text(self.timeline())]
        for program in self.programs:
            lines += ["", f"rank {program.rank}", *(f"  {instruction}" for instruction in program.instructions)]
        return "\n".join(lines) + "\n"
