"""The search for the fastest way to train a model on a number of devices, within a memory limit.

    found = search(model, batch, world_size=16, memory_limit="80GB")
    found.best.candidate        Candidate(pipeline_parallel_degree=4, data_parallel_degree=4, ..., schedule="zb-h1")
    found.plan                  its plan, as `smpc.partition` makes it
    found.results               every candidate, the best first, with what became of it

The sample inputs are the GLOBAL batch: what all replicas process together in one step. It is the same for every candidate (see
`smpc.auto.space`), and what is minimised is the predicted step (`smpc.auto.estimate`).

How. The model is recorded once for each size of a microbatch. Candidates are planned in the order of their lower bounds on the step,
each as its best contiguous cut for balanced computation (`memory_weight` 0), until the next bound is above 99% of the best step: what is
left cannot be much faster. A cut that breaks the limit is itself a bound, for a limit makes none faster: it is cut within the limit when
its turn comes again. The best is then planned with all means. A candidate whose bound on the peak exceeds the limit is not planned, nor is
one that differs from a planned one in its schedule alone and is slower with the same cut; and a size of microbatches at which no candidate
can fit rules out the larger ones. Nothing depends on the clock, so the same search gives the same bytes.

With t tensor-parallel ranks, what is planned is the trace of one of them: the compiler's best layouts (`smpc.codegen.rewrite`), which
split what t divides (heads, channels, vocabularies) and leave the rest whole, with collectives that take what they send over the
wires that these ranks share. A degree at which nothing can be split is impossible.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from smpc.auto.estimate import Sample, step_time
from smpc.auto.found import Result, Search, Verdict, ordered
from smpc.auto.space import SCHEDULES, Candidate, candidates, repeated_blocks, tensor_degrees, wire
from smpc.codegen.rewrite.search import choose
from smpc.codegen.rewrite.tensor_parallel import ShardedTrace, rewrite, with_collectives
from smpc.compile import PipelineOptions, make_plan, predict_timeline
from smpc.errors import CodegenError, ConfigError, MemoryLimitError, PartitionError
from smpc.mesh import Axis
from smpc.partitioner.cost import NodeTimes
from smpc.partitioner.device import Device, Wire, find_device
from smpc.partitioner.limit import rank_peaks
from smpc.partitioner.optimizer import find_optimizer
from smpc.partitioner.plan import Plan
from smpc.partitioner.sizes import at_least, parse_bytes
from smpc.sample_inputs import Inputs, as_inputs, first_microbatch
from smpc.tracer.ir import Trace
from smpc.tracer.record import record
from smpc.tracer.structure import flatten

ALL_SCHEDULES = tuple(known for known, _ in SCHEDULES)
_NO_LIMIT = 1 << 60  # bytes
TOLERANCE = 0.01  # how much faster a way that is not planned could be
ShowProgress = Callable[[str, int, int], object]  # (phase, done, total)


def search(
    model: nn.Module,
    sample_inputs: Any,
    *,
    world_size: int,
    memory_limit: str | int | None = None,
    device: str | Device = "h100",
    optimizer: str = "adam",
    shard_optimizer_state: bool = False,
    schedules: Sequence[str] = ALL_SCHEDULES,
    tensor_parallel_degrees: Sequence[int] | None = None,
    leaf_modules: Sequence[str] = (),
    show_progress: ShowProgress | None = None,
) -> Search:
    """The fastest way to train a model on `world_size` devices, each within `memory_limit`.

    `sample_inputs` are the global batch of a step, in the forms of `smpc.partition`; only shapes count. `memory_limit` is the most that a
    rank may hold at its predicted peak ("80GB" or a number of bytes), by default what the device has. `schedules` are the names to try,
    `tensor_parallel_degrees` the numbers of ranks that may share an operation, by default all that divide the world and a host's devices.
    `show_progress` is called with a phase, what is done of it and what there is to do. The other arguments are `smpc.partition`'s.

    Raises ConfigError for settings that cannot be, TraceError for a model that cannot be recorded, MemoryLimitError, which says the
    least memory that would do, if nothing fits.
    """
    kind = find_device(device)
    setting = _Setting(
        world_size,
        parse_bytes(kind.memory_bytes if memory_limit is None else memory_limit, "memory_limit"),
        kind,
        find_optimizer(optimizer).name,
        shard_optimizer_state,
        tuple(schedules),
        tuple(tensor_degrees(world_size, kind) if tensor_parallel_degrees is None else tensor_parallel_degrees),
    )
    show = show_progress or (lambda phase, done, total: None)
    return _Searcher(setting, model, as_inputs(sample_inputs), tuple(leaf_modules), show).run()


@dataclass(frozen=True, slots=True)
class _Setting:
    """What is searched for."""

    world_size: int
    limit: int
    device: Device
    optimizer: str
    shard_optimizer_state: bool
    schedules: tuple[str, ...]
    tensor_degrees: tuple[int, ...]

    def __post_init__(self) -> None:
        known = [name for name, _ in SCHEDULES]
        wrong = [
            f"schedules: expected some of {', '.join(known)}, found {n!r}" for n in self.schedules if n not in known
        ]
        if not self.schedules:
            wrong.append(f"schedules: expected some of {', '.join(known)}, found none")
        if self.world_size < 1:
            wrong.append(f"world_size: expected at least 1, found {self.world_size}")
        wrong += [
            f"tensor_parallel_degrees: expected numbers that divide the world size {self.world_size}, found {degree}"
            for degree in self.tensor_degrees
            if degree < 1 or self.world_size % degree
        ]
        if wrong:
            raise ConfigError("\n".join(wrong))

    def options(self, candidate: Candidate, limit: int, blocks: Sequence[str] = ()) -> PipelineOptions:
        """How to plan a candidate."""
        link = wire(self.device, candidate.mesh, Axis.PP)
        return PipelineOptions(
            pipeline_parallel_degree=candidate.pipeline_parallel_degree,
            microbatches=candidate.microbatches,
            memory_weight=0.0,
            device=replace(self.device, inside_host=link, between_hosts=link),
            optimizer=self.optimizer,
            memory_limit=limit,
            schedule=candidate.schedule,
            virtual_pipeline_degree=candidate.virtual_pipeline_degree,
            data_parallel_degree=candidate.data_parallel_degree,
            shard_optimizer_state=self.shard_optimizer_state,
            recompute=tuple(blocks),
        )


@dataclass(frozen=True)
class _Bounded:
    """A candidate and what it takes at least."""

    candidate: Candidate
    step: float
    peak: int

    def unplanned(self, verdict: Verdict, step: float) -> Result:
        """What becomes of it without a plan, or without one within the limit; its step takes at least this."""
        return Result(self.candidate, verdict, step, peak_bytes=self.peak, step_is_bound=True, peak_is_bound=True)


class _Searcher:
    """One search; `traces` are the recorded microbatches by size, `sharded` those of a tensor-parallel rank by size and degree."""

    def __init__(
        self, setting: _Setting, model: nn.Module, inputs: Inputs, leaf_modules: tuple[str, ...], show: ShowProgress
    ) -> None:
        self.setting, self.model, self.inputs, self.leaf_modules, self.show = setting, model, inputs, leaf_modules, show
        self.batch_size = _batch_size(inputs)
        self.traces: dict[int, Trace] = {}
        self.sharded: dict[tuple[int, int], ShardedTrace] = {}
        self.samples: dict[tuple[int, int, str, Wire], Sample] = {}
        self.results: list[Result] = []
        self.cuts: dict[Candidate, Plan] = {}  # the first plan of the candidates that differ in their schedules alone
        self.best: tuple[Result, Plan] | None = None
        self.blocks: tuple[str, ...] = ()
        self.least: tuple[int, Candidate] | None = None  # memory that would do

    def run(self) -> Search:
        """Everything, in order."""
        setting = self.setting
        plain = tuple(
            candidates(
                setting.world_size,
                self.batch_size,
                setting.device,
                setting.schedules,
                tensor_degrees=setting.tensor_degrees,
            )
        )
        self.show("Tracing the model", 0, 1)
        sizes = [candidate.microbatch_size for candidate in plain]
        self.blocks = repeated_blocks(self._recorded(min(sizes))) if sizes else ()
        found = [
            replace(c, recompute=name) for c in plain for name in (("model", "blocks") if self.blocks else ("model",))
        ]
        if not found:
            raise ConfigError(
                f"world_size: expected a number of ranks of which some can share the batch of {self.batch_size}, found "
                f"{setting.world_size}; change the batch or the number of ranks"
            )
        self._plan_in_order(self._bounded(found))
        if self.best is None:
            raise self._nothing_fits(found)
        self.show("Planning the best", 0, 1)
        best, plan = self._proven(*self.best)
        return Search(
            setting.world_size,
            self.batch_size,
            setting.limit,
            setting.device.name,
            plan.optimizer,
            tuple(ordered(self.results, best, setting.limit)),
            self._trace(best.candidate),
            self._options(best.candidate),
            plan,
            self.sharded.get((best.candidate.microbatch_size, best.candidate.tensor_parallel_degree)),
        )

    # -- bounds

    def _bounded(self, found: Sequence[Candidate]) -> list[_Bounded]:
        """What may fit, by its bound on the step; the rest is rejected."""
        groups = sorted({(c.tensor_parallel_degree, c.microbatch_size) for c in found})
        kept: list[_Bounded] = []
        hopeless: dict[int, int] = {}  # tensor-parallel degree -> the least peak at a smaller size, where none can fit
        for i, (degree, size) in enumerate(groups):
            self.show("Tracing the model", i, len(groups))
            of_size = [c for c in found if (c.tensor_parallel_degree, c.microbatch_size) == (degree, size)]
            if degree not in hopeless:
                reason = self._why_whole(size, degree)
                self.results += [Result(c, Verdict.IMPOSSIBLE, reason=reason) for c in of_size if reason]
                group = [] if reason else [self._bound(candidate) for candidate in of_size]
            else:
                group = [_Bounded(candidate, 0.0, hopeless[degree]) for candidate in of_size]
            fitting = [bounded for bounded in group if bounded.peak <= self.setting.limit]
            self.results += [b.unplanned(Verdict.MEMORY, b.step) for b in group if b.peak > self.setting.limit]
            kept += fitting
            if group and not fitting:
                hopeless.setdefault(degree, min(bounded.peak for bounded in group))
        order = {candidate: i for i, candidate in enumerate(found)}
        return sorted(kept, key=lambda bounded: (bounded.step, order[bounded.candidate]))

    def _why_whole(self, size: int, degree: int) -> str:
        """Why so many tensor-parallel ranks cannot share the model's operations; "" if they can."""
        if degree == 1:
            return ""
        try:
            sharded = rewrite(self._recorded(size), choose(self._recorded(size), degree))
        except CodegenError as error:
            return str(error)
        self.sharded[size, degree] = sharded
        return "" if sharded.layouts else f"no parameter can be split over {degree} tensor-parallel ranks"

    def _trace(self, candidate: Candidate) -> Trace:
        """What one rank of each stage runs."""
        size, degree = candidate.microbatch_size, candidate.tensor_parallel_degree
        return self._recorded(size) if degree == 1 else self.sharded[size, degree].trace

    def _times(self, candidate: Candidate) -> NodeTimes | None:
        """Times with collectives; None: those that planning predicts."""
        if candidate.tensor_parallel_degree == 1:
            return None
        sharded = self.sharded[candidate.microbatch_size, candidate.tensor_parallel_degree]
        link = wire(self.setting.device, candidate.mesh, Axis.TP)
        return with_collectives(
            sharded.trace, sharded, self._options(candidate).cost_model, link.bandwidth, link.latency
        )

    def _recorded(self, size: int) -> Trace:
        """That of a microbatch of this size."""
        if size not in self.traces:
            args, kwargs = first_microbatch(self.inputs, self.batch_size // size)
            self.traces[size] = record(self.model, args, kwargs, leaf_modules=self.leaf_modules)
        return self.traces[size]

    def _options(self, candidate: Candidate, limit: int | None = None) -> PipelineOptions:
        blocks = self.blocks if candidate.recompute == "blocks" else ()
        return self.setting.options(candidate, limit or self.setting.limit, blocks)

    def _bound(self, candidate: Candidate) -> _Bounded:
        options, link = self._options(candidate), wire(self.setting.device, candidate.mesh, Axis.TP)
        key = (candidate.microbatch_size, candidate.tensor_parallel_degree, candidate.recompute, link)
        costs = options.cost_model
        if key not in self.samples:
            times = self._times(candidate)
            self.samples[key] = Sample.of(self._trace(candidate), costs, options.recompute, times)
        sample, link = self.samples[key], wire(self.setting.device, candidate.mesh, Axis.RDP)
        return _Bounded(candidate, sample.least_step(candidate, costs, link), sample.least_peak(candidate, costs))

    # -- plans

    def _plan_in_order(self, pending: Sequence[_Bounded]) -> None:
        """Plan candidates until no bound is below the best step."""
        queue = [(bounded.step, turn, bounded, False) for turn, bounded in enumerate(pending)]
        while queue:
            step, turn, bounded, breaks_limit = heapq.heappop(queue)
            self.show(f"Planning {len(pending)} ways to train", len(pending) - len(queue) - 1, len(pending))
            if self.best is not None and step >= self.best[0].step_time * (1.0 - TOLERANCE):
                left = sorted([(step, turn, bounded, breaks_limit), *queue])
                self.results += [rest.unplanned(Verdict.SLOWER, least) for least, _, rest, _ in left]
                return
            if not breaks_limit:
                foretold = self._foretold(bounded)
                if foretold is not None and self.best is not None and foretold.step_time >= self.best[0].step_time:
                    self.results.append(foretold)
                    continue
            result, plan = self._plan(bounded, self.setting.limit if breaks_limit else _NO_LIMIT)
            if plan is not None and max(rank_peaks(plan).values()) > self.setting.limit:
                heapq.heappush(queue, (max(step, result.step_time), turn, bounded, True))
                continue
            self.results.append(result)
            if plan is not None:
                self.cuts.setdefault(_cut_of(bounded.candidate), plan)
            if plan is not None and (self.best is None or result.step_time < self.best[0].step_time):
                self.best = result, plan

    def _foretold(self, bounded: _Bounded) -> Result | None:
        """What a candidate takes that differs in its schedule alone from one that was planned: the cut is the same, or a slower one."""
        candidate = bounded.candidate
        plan, choice = self.cuts.get(_cut_of(candidate)), self._options(candidate).choice
        if plan is None or tuple(stage.rank for stage in plan.stages) != choice.placement:
            return None
        stages = tuple(
            replace(stage, num_in_flight=number) for stage, number in zip(plan.stages, choice.in_flight, strict=True)
        )
        summary = replace(plan.schedule, name=choice.name, active_microbatches=choice.active_microbatches)
        found = self._measured(candidate, replace(plan, stages=stages, schedule=summary))
        return replace(found, peak_bytes=bounded.peak, peak_is_bound=True)

    def _plan(self, bounded: _Bounded, limit: int) -> tuple[Result, Plan | None]:
        """The result of a candidate, and its plan if it has one."""
        candidate = bounded.candidate
        try:
            plan = self._made(candidate, limit, prove=False)
        except MemoryLimitError as error:
            if self.least is None or error.least_bytes < self.least[0]:
                self.least = error.least_bytes, candidate
            result = Result(candidate, Verdict.MEMORY, bounded.step, peak_bytes=error.least_bytes, step_is_bound=True)
            return result, None
        except (PartitionError, ConfigError, CodegenError) as error:
            return Result(candidate, Verdict.IMPOSSIBLE, reason=str(error)), None
        return self._measured(candidate, plan), plan

    def _made(self, candidate: Candidate, limit: int | None = None, *, prove: bool) -> Plan:
        options, times = self._options(candidate, limit), self._times(candidate)
        return make_plan(self._trace(candidate), options, times=times, prove=prove, measured=False)

    def _measured(self, candidate: Candidate, plan: Plan) -> Result:
        """What a plan takes, as a result."""
        device = self.setting.device
        timeline = predict_timeline(self._trace(candidate), plan)
        link = wire(device, candidate.mesh, Axis.RDP)
        seconds = step_time(plan, timeline, candidate.data_parallel_degree, link, device.memory_bandwidth)
        peak = max(rank_peaks(plan).values())
        times = seconds.total, seconds.pipeline, seconds.reduce, seconds.optimizer
        return Result(candidate, Verdict.SLOWER, *times, peak_bytes=peak)

    def _proven(self, quick: Result, quick_plan: Plan) -> tuple[Result, Plan]:
        """The best candidate planned with proof; its quick plan where that is faster."""
        plan = self._made(quick.candidate, prove=True)
        result = self._measured(quick.candidate, plan)
        if result.step_time > quick.step_time:
            result, plan = quick, quick_plan
        self.results[self.results.index(quick)] = result
        return result, plan

    def _nothing_fits(self, found: Sequence[Candidate]) -> Exception:
        """The error, with the least memory that would do: plans in the order of the bounds on the peak."""
        setting, impossible = self.setting, [r for r in self.results if r.verdict is Verdict.IMPOSSIBLE]
        known = [c for c in found if c.tensor_parallel_degree == 1 and c.microbatch_size in self.traces]
        known += [c for c in found if (c.microbatch_size, c.tensor_parallel_degree) in self.sharded]
        left = {result.candidate for result in impossible}
        bounds = [self._bound(c) for c in known if c not in left]
        pending = sorted(bounds, key=lambda bounded: bounded.peak)
        for done, bounded in enumerate(pending):
            self.show("Searching for the least memory", done, len(pending))
            if bounded.peak >= (self.least[0] if self.least else math.inf):
                break
            self._plan(bounded, 1)
        if self.least is None:
            reason = impossible[0].reason if impossible else "no candidate"
            return PartitionError(f"expected a way to train on {setting.world_size} ranks, found none: {reason}")
        least, candidate = self.least
        tensor = f" of {candidate.tensor_parallel_degree} ranks" if candidate.tensor_parallel_degree > 1 else ""
        return MemoryLimitError(
            f"expected a way to train within {at_least(setting.limit)} on each of {setting.world_size} ranks, found none among "
            f"{len(found)}: the least memory that would do is {at_least(least)}, with pipelines of "
            f"{candidate.pipeline_parallel_degree} stages{tensor}, {candidate.data_parallel_degree} replicas, "
            f"{candidate.microbatches} microbatches "
            f"and the {candidate.schedule} schedule; raise memory_limit, use more ranks, or a smaller batch",
            least,
        )


def _cut_of(candidate: Candidate) -> Candidate:
    """The same for candidates that are cut alike: computation is balanced, whatever the schedule."""
    return replace(candidate, schedule="")


def _batch_size(inputs: Inputs) -> int:
    """Parts into which every tensor of the batch can be split: the greatest common divisor of their sizes along axis 0."""
    leaves, _ = flatten(inputs)
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if 0 in sizes:
        raise ConfigError("sample inputs: expected tensors of at least one sample, found an empty one")
    return math.gcd(*sizes) or 1
