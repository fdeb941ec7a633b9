"""The search for the fastest way to train a model on a number of devices, within a memory limit.

    found = search(model, batch, world_size=16, memory_limit="80GB")
    found.best.candidate        Candidate(pipeline_parallel_degree=4, data_parallel_degree=4, ..., schedule="zb-h1")
    found.plan                  its plan, as `smpc.partition` makes it
    found.results               every candidate, the best first, with what became of it
    found.gap                   how much faster one of those that were not planned could be

The sample inputs are the GLOBAL batch: what all replicas process together in one step. It is the same for every candidate (see
`smpc.compile.search.space`), and what is minimised is the predicted step (`smpc.compile.step`).

How. There may be a million candidates, each of which takes a second to plan, and models take seconds to record. So the search goes from
what looks best to what looks worst, by a guess (`smpc.compile.search.estimate`):

    shape       degrees, places and microbatches. Its bound is that of its FLOPs at peak, its guess made from one recorded microbatch
    candidate   a shape that looked best is recorded and rewritten (`workloads`), and stands in the queue once for each way to train it
    plan        a candidate that looks best is planned as its best contiguous cut for balanced computation (`memory_weight` 0)

A shape or candidate whose lower bound is above 99% of the best step, or whose bound on the peak exceeds the limit, is left alone. A cut
that breaks the limit is a bound itself, for a limit makes none faster: it is cut within the limit when its turn comes again. What
differs from a planned candidate in its schedule alone is not planned if it is slower with the same cut. The search ends when nothing is
left, which proves that nothing is more than 1% faster; or when its budget is spent, which says by the bounds of what is left how much
faster that could be. The budget is counted in operations, stages and microbatches, never by a clock: the same search gives the same bytes.
The best is then planned with all means.

With t tensor-parallel, c context-parallel and e expert-parallel ranks, what is planned is the trace of one of them: the compiler's best
layouts, with collectives that take what they send over the wires that these ranks share.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from smpc.compile.options import PipelineOptions
from smpc.compile.passes import plan_trace, schedule_plan
from smpc.compile.result import Planned, Traced
from smpc.compile.search.estimate import (
    Guess,
    Least,
    Place,
    Reruns,
    Sample,
    guess,
    least_peak,
    least_seconds,
    least_step,
)
from smpc.compile.search.result import Result, Search, Verdict, ordered
from smpc.compile.search.setting import Setting, expert_degrees, sharding_kinds
from smpc.compile.search.space import (
    ALL_SCHEDULES,
    Again,
    Candidate,
    Shape,
    Tried,
    candidate_of,
    context_degrees,
    schedules,
    shapes,
    shardings,
    tensor_degrees,
    ways,
    wire,
)
from smpc.compile.search.waiting import Rest, Waiting
from smpc.compile.search.workloads import Load, Workloads
from smpc.compile.step import Around, Sharding, StepParts, step_parts
from smpc.errors import CodegenError, ConfigError, MemoryLimitError, PartitionError
from smpc.mesh import Axis
from smpc.partitioner.costs.collectives import bandwidth
from smpc.partitioner.costs.cost import node_times
from smpc.partitioner.costs.description import Device, Group
from smpc.partitioner.costs.device import find_device
from smpc.partitioner.costs.optimizers import find_optimizer
from smpc.partitioner.graph.plan import Plan
from smpc.partitioner.memory_limit import rank_peaks
from smpc.partitioner.sizes import at_least, parse_bytes
from smpc.partitioner.solve import with_bound
from smpc.sample_inputs import as_inputs

TOLERANCE = 0.01  # how much faster a way that is not planned could be, where the search has come to its end
_NO_LIMIT = 1 << 60  # bytes
_WITHOUT_PLAN = (
    2.0  # as much of the budget may be spent before there is a plan that fits, and once more on the least memory
)
_BUDGET, _BUDGET_FOR_NODE = 2500.0, 3.5  # about milliseconds of a core, at effort 1
_PLAN, _PLAN_FOR_NODE, _PLAN_FOR_ACTION, _PLAN_FOR_STAGES = 6.0, 0.06, 0.05, 0.15
_Key = tuple[Load, bool, Group, Group, Group]
ShowProgress = Callable[[str, int, int], object]  # (phase, done, total)


def search(
    model: nn.Module,
    sample_inputs: Any,
    *,
    world_size: int,
    memory_limit: str | int | None = None,
    device: str | Device = "h100",
    optimizer: str = "adam",
    shard_optimizer_state: bool | None = None,
    schedules: Sequence[str] = ALL_SCHEDULES,
    tensor_parallel_degrees: Sequence[int] | None = None,
    context_parallel_degrees: Sequence[int] | None = None,
    expert_parallel_degrees: Sequence[int] | None = None,
    shardings: Sequence[str] | None = None,
    effort: float = 1.0,
    leaf_modules: Sequence[str] = (),
    show_progress: ShowProgress | None = None,
) -> Search:
    """The fastest way to train a model on `world_size` devices, each within `memory_limit`.

    `sample_inputs` are the global batch of a step, in the forms of `smpc.partition`; only shapes count. `memory_limit` is the most that a
    rank may hold at its predicted peak ("80GB" or a number of bytes), by default what the device has. `schedules` are the names to try,
    `tensor_parallel_degrees` the numbers of ranks that may share an operation, by default all that divide the world and a host's devices,
    `context_parallel_degrees` those that may share a sequence, by default all that divide the world, up to 64, and
    `expert_parallel_degrees` those that experts are divided over, by default all that a model's experts allow. `shardings` is what replicas
    may divide among them: "nothing", "optimizer state", "parameters, gradients and optimizer state", by default each of them; with
    `shard_optimizer_state` the optimizer state. `effort` multiplies the budget of the search; infinite: until there is a proof.
    `show_progress` is called with a phase, what is done of it and what there is to do. The other arguments are `smpc.partition`'s.

    Raises ConfigError for settings that cannot be, TraceError for a model that cannot be recorded, MemoryLimitError, which says the
    least memory that would do, if nothing fits.
    """
    kind = find_device(device)
    chosen = sharding_kinds(shardings, shard_optimizer_state)
    tried = Tried(
        tuple(tensor_degrees(world_size, kind) if tensor_parallel_degrees is None else tensor_parallel_degrees),
        tuple(context_degrees(world_size) if context_parallel_degrees is None else context_parallel_degrees),
        tuple(expert_degrees(model, world_size) if expert_parallel_degrees is None else expert_parallel_degrees),
        chosen,
        schedules=tuple(schedules),
    )
    limit = parse_bytes(kind.memory_bytes if memory_limit is None else memory_limit, "memory_limit")
    setting = Setting(world_size, limit, kind, find_optimizer(optimizer).name, tried, effort)
    show = show_progress or (lambda phase, done, total: None)
    loads = Workloads(model, as_inputs(sample_inputs), kind, tuple(leaf_modules))
    return _Searcher(setting, loads, show).run()


@dataclass
class _Searcher:
    """One search."""

    setting: Setting
    loads: Workloads
    show: ShowProgress
    again: Again = field(default_factory=Again)
    base: dict[str, Sample] = field(default_factory=dict)  # of the smallest microbatch, by what is computed again
    base_load: Load = field(default_factory=lambda: Load(1))
    leasts: dict[tuple[Load, tuple[Group, ...]], Least] = field(default_factory=dict)
    samples: dict[_Key, Sample] = field(default_factory=dict)
    reruns: dict[tuple[_Key, str], Reruns] = field(default_factory=dict)
    cuts: dict[Candidate, Plan] = field(default_factory=dict)
    fullness: dict[tuple[Load, str], float] = field(default_factory=dict)  # planned over guessed peaks
    slowness: dict[str, float] = field(default_factory=dict)  # planned over guessed steps, by schedule
    results: list[Result] = field(default_factory=list)
    best: tuple[Result, Plan] | None = None
    least: tuple[int, Candidate] | None = None
    is_least: bool = True  # no other candidate can need less
    queue: list[tuple[bool, float, int, Waiting]] = field(default_factory=list)
    turns: int = 0
    spent: float = 0.0
    gap: float = 0.0
    total: int = 0

    def run(self) -> Search:
        """The whole search."""
        setting, batch = self.setting, self.loads.batch_size
        self.show("Tracing the model", 0, 1)
        found = list(shapes(setting.world_size, batch, setting.device, setting.tried))
        if not found:
            raise ConfigError(
                f"world_size: expected a number of ranks of which some can share the batch of {batch}, found "
                f"{setting.world_size}; change the batch or the number of ranks"
            )
        self._look_at_model(min(shape.microbatch_size for shape in found))
        for shape in found:
            self._enter(shape)
        left = self._go_on()
        if self.best is None:
            self.is_least = all(waiting.candidate is not None for waiting in left)
            self._least_memory(found)
        if self.best is None:
            raise self._nothing_fits()
        self._close(left)
        self.show("Planning the best", 0, 1)
        best, plan = self._proven(*self.best)
        traced = self._traced(best.candidate)
        return Search(
            setting.world_size,
            batch,
            setting.limit,
            setting.device.name,
            plan.optimizer,
            tuple(ordered(self.results, best, setting.limit)),
            traced.trace,
            self._options(best.candidate),
            plan,
            max(0.0, self.gap),
            traced.sharded,
            self._parts(best.candidate, schedule_plan(traced.trace, plan)),
            traced.context,
            traced.divided,
        )

    # -- shapes

    def _look_at_model(self, size: int) -> None:
        """Record the smallest microbatch, and what of it may be computed again."""
        traced = self.loads.get(Load(size))
        if isinstance(traced, str):
            raise PartitionError(traced)
        trace, device = traced.trace, self.setting.device
        options = PipelineOptions(1, device=device, optimizer=self.setting.optimizer)
        self.again = Again.of(trace, node_times(trace, options.cost_model).forward.tolist())
        for name in self.again.names:
            state = next(iter(self.base.values())).state if self.base else None
            self.base[name] = Sample.of(trace, options.cost_model, self.again[name], state=state)
        self.base_load = Load(size)

    def _enter(self, shape: Shape) -> None:
        """A shape into the queue, or its rejection."""
        number = self._num_ways(shape)
        self.total += number
        first = next(iter(ways(shape, self.tried)), None)
        if first is None:
            return
        most = len(next(iter(self.loads.recorded.values())).nodes)
        if shape.pipeline_parallel_degree > most:
            reason = f"expected at most as many stages as operations, of which there are {most}"
            self.results.append(Result(first, Verdict.IMPOSSIBLE, reason=reason, ways=number))
            return
        bound, peak = self._least(shape)
        if peak > self.setting.limit:
            rejected = Result(first, Verdict.MEMORY, bound, peak_bytes=peak, step_is_bound=True, peak_is_bound=True)
            self.results.append(replace(rejected, ways=number))
            return
        self._push_shape(shape, bound, peak)

    def _push_shape(self, shape: Shape, bound: float, peak: int) -> None:
        """Into the queue, by what its best candidate may take."""
        place = self._place(shape)
        looks = [self._guessed(candidate, place, None) for candidate in self._typical(shape)]
        fitting = [look for look in looks if look.peak <= self.setting.limit]
        look = min(fitting or looks, key=lambda look: look.step)
        waiting = Waiting(shape, bound, peak, look, basis=self.loads.nearest(Load.of(shape)))
        self._push(waiting, deferred=not fitting)

    def _least(self, shape: Shape) -> tuple[float, int]:
        """Seconds and bytes that no candidate of a shape is below, by the smallest microbatch that is known of such ranks."""
        known, tensor, context = self.loads.nearest(Load.of(shape)), 1, 1
        if known is None:
            known, tensor, context = self.base_load, shape.tensor_parallel_degree, shape.context_parallel_degree
        exchanges = self.loads.exchanges(known, shape.mesh)
        key = known, tuple(group for _, group in exchanges)
        if key not in self.leasts:
            sent = sum(
                (item.forward_bytes + item.backward_bytes) / bandwidth(group, self.setting.device)
                for collectives, group in exchanges
                for item in collectives
                # Where sequences are shared, gradients of parameters that are used whole as well do not grow with the microbatch.
                if not item.overlaps and known.context == 1
            )
            options = PipelineOptions(1, device=self.setting.device)
            self.leasts[key] = least_seconds(self.loads.traced(known).trace, options.cost_model, sent)
        amount = shape.microbatch_size / known.size
        one = self.leasts[key].of(amount, tensor, context)
        bound = shape.microbatches * one / shape.pipeline_parallel_degree * (1.0 + self._place(shape).slowdown)
        state = self.base["model"].state
        split = shape.tensor_parallel_degree * shape.expert_parallel_degree * shape.pipeline_parallel_degree
        kept = min(state.kept(kind, shape.data_parallel_degree) for kind in shardings(shape, self.tried.sharding))
        return bound, int((kept + state.gradients) / split)

    @functools.cached_property
    def tried(self) -> Tried:
        """What is tried, with what may be computed again."""
        return replace(self.setting.tried, again=self.again.names)

    def _num_ways(self, shape: Shape) -> int:
        kinds = len(shardings(shape, self.tried.sharding))
        number = sum(1 for _ in ways(shape, replace(self.tried, again=("model",), sharding=(Sharding.NONE,))))
        return number * kinds * len(self.tried.again)

    def _typical(self, shape: Shape) -> list[Candidate]:
        """Some candidates of a shape, by which it is judged: the schedule with the smallest ramp, and what needs the least memory."""
        known = list(schedules(shape.pipeline_parallel_degree, self.tried.schedules))
        kinds = shardings(shape, self.tried.sharding)
        shown = [known[-1], known[0]] if known[-1] != known[0] else known[:1]
        pairs = [(again, kinds[-1]) for again in dict.fromkeys((self.tried.again[0], *self.tried.again[-2:]))]
        return [candidate_of(shape, *way, *pair) for way in shown for pair in pairs]

    def _expand(self, waiting: Waiting) -> None:
        """A shape's candidates into the queue."""
        shape = waiting.shape
        load = Load.of(shape)
        self.spent += self.loads.cost(load)
        self.show(self._phase(), *self._progress)
        traced = self.loads.get(load)
        found = list(ways(shape, self.tried))
        least, _ = self._least(shape) if isinstance(traced, Traced) else (waiting.bound, 0)
        if isinstance(traced, str):
            self.results.append(Result(found[0], Verdict.IMPOSSIBLE, reason=traced, ways=len(found)))
            return
        place, plain = self._place(shape), self._sample(shape)
        most = len(traced.trace.nodes)
        rejected, entries = Rest(peak=_NO_LIMIT), list[Waiting]()
        for candidate in found:
            if candidate.num_stages > most:
                reason = f"expected at most as many stages as operations, of which there are {most}"
                self.results.append(Result(candidate, Verdict.IMPOSSIBLE, reason=reason))
                continue
            known = plain if candidate.recompute == "model" else replace(plain, activation_bytes=0.0)
            more = self._reruns(shape, candidate.recompute).at_least(candidate.num_stages)
            bound, peak = least_step(plain, candidate, place, more), least_peak(known, candidate)
            if peak > self.setting.limit:
                rejected.ways += 1
                rejected.bound, rejected.peak = min(rejected.bound, bound), min(rejected.peak, peak)
                example = candidate
                continue
            look = self._guessed(candidate, place, plain)
            entries.append(Waiting(shape, max(bound, least), peak, look, candidate))
        self._push_all(entries)
        if rejected.ways:
            result = Result(example, Verdict.MEMORY, rejected.bound, peak_bytes=rejected.peak, ways=rejected.ways)
            self.results.append(replace(result, step_is_bound=True, peak_is_bound=True))

    def _push_all(self, entries: Sequence[Waiting]) -> None:
        """A shape's candidates into the queue; as long as there is no plan, the one that looks best is the next to be planned."""
        fitting = [waiting for waiting in entries if waiting.guess.peak <= self.setting.limit]
        first = min(fitting, key=lambda waiting: waiting.guess.step, default=None) if self.best is None else None
        for waiting in entries:
            if waiting is first:
                self._push_first(waiting)
            else:
                self._push(waiting)

    def _push_first(self, waiting: Waiting) -> None:
        """To be planned next."""
        self.turns += 1
        heapq.heappush(self.queue, (False, 0.0, self.turns, replace(waiting, is_corrected=True)))

    def _look_for_one_that_fits(self, shape: Shape) -> None:
        """Of a shape's candidates, the one that looks best of those that seem to fit by what is known now, to be planned next.

        Another shape may have to be rewritten first, which takes longer than a plan.
        """
        fuller = max(found for (load, _), found in self.fullness.items() if load == Load.of(shape))
        fitting = [
            entry
            for entry in self.queue
            if entry[3].shape == shape
            and entry[3].candidate is not None
            and not entry[3].breaks_limit
            and entry[3].guess.peak * fuller <= self.setting.limit
        ]
        if fitting:
            best = min(fitting, key=lambda entry: (entry[3].guess.step, entry[2]))
            self.queue.remove(best)
            heapq.heapify(self.queue)
            self._push_first(best[3])

    def _guessed(self, candidate: Candidate, place: Place, plain: Sample | None) -> Guess:
        """By the sample of the candidate's load, or by that of the smallest microbatch."""
        base, again, working = self.base["model"], self.base[candidate.recompute], 0.0
        tensor, context = candidate.tensor_parallel_degree, candidate.context_parallel_degree
        if plain is None:
            load = Load.of(candidate.shape)
            known = self.loads.nearest(load)
            if known is not None:
                amount = load.size / known.size
                plain = self._sample(replace(candidate.shape, microbatch_size=known.size)).scaled(amount, amount, 1.0)
            else:
                amount, parts = load.size / self.base_load.size, tensor * candidate.expert_parallel_degree
                plain = base.scaled(amount / tensor / context, amount / context, 1 / parts)
        if candidate.recompute != "model":
            modules = self.again[candidate.recompute]
            before = plain.activation_bytes
            plain = plain.like(base, again)
            if candidate.num_stages > len(modules) + 2:  # a module that a cut goes through is not computed again
                plain = replace(plain, activation_bytes=before)
            working = (before - plain.activation_bytes) / len(modules)  # of the one that is being computed again
        found = guess(plain, candidate, place)
        return replace(found, peak=found.peak + working)

    def _sample(self, shape: Shape) -> Sample:
        """Totals of what a rank of the shape computes, on its wires."""
        load, mesh, device = Load.of(shape), shape.mesh, self.setting.device
        key = self._key(shape)
        if key not in self.samples:
            traced = self.loads.get(load)
            assert isinstance(traced, Traced), "asked for after it was looked at"
            options = PipelineOptions(1, device=device, optimizer=self.setting.optimizer)
            # as with the fewest microbatches
            costs = replace(options.cost_model, accumulated=0.5 if shape.microbatches > 1 else 0.0)
            times = self.loads.times(load, mesh, costs)
            self.samples[key] = Sample.of(traced.trace, costs, (), times)
            times = times or node_times(traced.trace, costs)
            for name in self.again.names:
                self.reruns[key, name] = Reruns.of(traced.trace, self.again[name], times)
        return self.samples[key]

    def _reruns(self, shape: Shape, again: str) -> Reruns:
        """What candidates of a shape compute again."""
        self._sample(shape)
        return self.reruns[self._key(shape), again]

    def _key(self, shape: Shape) -> _Key:
        """What the times of a rank's microbatch depend on."""
        mesh, device = shape.mesh, self.setting.device
        groups = [Group.of(mesh, axis, device) for axis in (Axis.TP, Axis.CP, Axis.EP)]
        return Load.of(shape), shape.microbatches > 1, groups[0], groups[1], groups[2]

    def _place(self, shape: Shape) -> Place:
        mesh, device = shape.mesh, self.setting.device
        return Place(wire(device, mesh, Axis.PP), Group.of(mesh, Axis.RDP, device), device, shape.world_size)

    # -- the queue

    def _push(self, waiting: Waiting, *, deferred: bool | None = None) -> None:
        """Into the queue; what looks as if it did not fit goes behind all that does."""
        later = waiting.guess.peak > self.setting.limit if deferred is None else deferred
        self.turns += 1
        heapq.heappush(self.queue, (later, waiting.guess.step, self.turns, waiting))

    def _go_on(self) -> list[Waiting]:
        """From what looks best to what looks worst, until nothing is left or the budget is spent; what is left without a plan."""
        budget = self._budget
        left: list[Waiting] = []
        while self.queue:
            later, _, _, waiting = heapq.heappop(self.queue)
            if self.best is not None and waiting.bound >= self.best[0].step_time * (1.0 - TOLERANCE):
                left.append(waiting)
                continue
            enough = budget if self.best is not None else _WITHOUT_PLAN * budget
            if self.spent + self._cost(waiting) > enough and self.spent > 0:
                left.append(waiting)
                continue
            if waiting.candidate is None and waiting.basis != self.loads.nearest(Load.of(waiting.shape)):
                self._push_shape(waiting.shape, *self._least(waiting.shape))
                continue
            self.show(self._phase(), *self._progress)
            if waiting.candidate is None:
                self._expand(waiting)
            elif not waiting.is_corrected and not waiting.breaks_limit:
                self._correct(waiting, waiting.candidate, later=later)
            else:
                self._try(waiting, waiting.candidate)
        return left

    @property
    def _budget(self) -> float:
        number = len(next(iter(self.loads.recorded.values())).nodes)
        return (_BUDGET + _BUDGET_FOR_NODE * number) * self.setting.effort

    def _cost(self, waiting: Waiting) -> float:
        """What the next thing about it takes, of the budget."""
        if waiting.candidate is None:
            return self.loads.cost(Load.of(waiting.shape))
        traced, candidate = self._traced(waiting.candidate), waiting.candidate
        actions = 3 * candidate.num_stages * candidate.microbatches
        stages = _PLAN_FOR_STAGES * (candidate.num_stages / 32) ** 4
        return _PLAN + _PLAN_FOR_NODE * len(traced.trace.nodes) + _PLAN_FOR_ACTION * actions + stages

    def _correct(self, waiting: Waiting, candidate: Candidate, *, later: bool) -> None:
        """Back into the queue, with a guess that has learned from plans of its kind."""
        fuller = self.fullness.get((Load.of(waiting.shape), candidate.recompute), 1.0)
        slower = self.slowness.get(candidate.schedule, 1.0)
        found = Guess(waiting.guess.step * slower, waiting.guess.peak * fuller)
        self._push(replace(waiting, guess=found, is_corrected=True), deferred=later or found.peak > self.setting.limit)

    def _try(self, waiting: Waiting, candidate: Candidate) -> None:
        """A candidate's plan, and what it says."""
        self.spent += self._cost(waiting)
        if not waiting.breaks_limit:
            foretold = self._foretold(candidate, waiting.peak)
            if foretold is not None and self.best is not None and foretold.step_time >= self.best[0].step_time:
                self.results.append(foretold)
                return
        result, plan = self._plan(candidate, waiting.bound, self.setting.limit if waiting.breaks_limit else _NO_LIMIT)
        if plan is not None:
            peaks = rank_peaks(plan).values()
            if not waiting.breaks_limit and waiting.guess.peak > 0:
                fuller = self.fullness.get((Load.of(waiting.shape), candidate.recompute), 1.0)
                slower = self.slowness.get(candidate.schedule, 1.0)
                self.fullness[Load.of(waiting.shape), candidate.recompute] = fuller * max(peaks) / waiting.guess.peak
                self.slowness[candidate.schedule] = slower * result.step_time / waiting.guess.step
            if max(peaks) > self.setting.limit:
                look = Guess(result.step_time, waiting.guess.peak)
                bound = max(waiting.bound, result.step_time)
                again = replace(waiting, bound=bound, guess=look, breaks_limit=True)
                self._push(again, deferred=sum(peaks) > self.setting.limit * len(peaks))
                if self.best is None and not waiting.breaks_limit:
                    self._look_for_one_that_fits(waiting.shape)
                return
        self.results.append(result)
        if plan is not None:
            self.cuts.setdefault(candidate.cut, plan)
        if plan is not None and (self.best is None or result.step_time < self.best[0].step_time):
            self.best = result, plan

    def _close(self, left: Sequence[Waiting]) -> None:
        """Results for what was not planned, one for each shape, and by how much it could be faster."""
        assert self.best is not None, "closed when there is one"
        best = self.best[0].step_time
        left = [waiting for waiting in left if waiting.candidate != self.best[0].candidate]
        left = [
            waiting if waiting.candidate else replace(waiting, bound=max(waiting.bound, self._least(waiting.shape)[0]))
            for waiting in left
        ]
        open_until = min((waiting.bound for waiting in left), default=math.inf)
        self.gap = max(0.0, 1.0 - open_until / best)
        rests: dict[tuple[Shape, bool], Rest] = {}
        examples: dict[tuple[Shape, bool], Candidate] = {}
        for waiting in left:
            key = waiting.shape, waiting.bound < best * (1.0 - TOLERANCE)
            rest = rests.setdefault(key, Rest())
            if waiting.bound < rest.bound:
                first = waiting.candidate or next(iter(ways(waiting.shape, self.tried)))
                rest.bound, rest.peak, examples[key] = waiting.bound, waiting.peak, first
            rest.ways += 1 if waiting.candidate is not None else self._num_ways(waiting.shape)
        for key, rest in rests.items():
            verdict = Verdict.OPEN if key[1] else Verdict.SLOWER
            result = Result(examples[key], verdict, rest.bound, peak_bytes=rest.peak, ways=rest.ways)
            self.results.append(replace(result, step_is_bound=True, peak_is_bound=True))

    def _phase(self) -> str:
        """What is known so far, for people."""
        number = f"Searching {self.total} ways to train"
        if self.best is None:
            return number
        best, least = self.best[0], min((waiting.bound for *_, waiting in self.queue), default=math.inf)
        faster = max(TOLERANCE, 1.0 - least / best.step_time)
        found = best.candidate
        degrees = " x ".join(
            f"{name} {degree}"
            for name, degree in (
                ("pipeline", found.pipeline_parallel_degree),
                ("replicas", found.data_parallel_degree),
                ("tensor", found.tensor_parallel_degree),
                ("context", found.context_parallel_degree),
                ("expert", found.expert_parallel_degree),
            )
            if degree > 1
        )
        return f"{number}: best {best.step_time:.3g} s ({degrees or 'one rank'}, {found.schedule}), others at most {faster:.0%} faster"

    @property
    def _progress(self) -> tuple[int, int]:
        waiting = sum(1 if w.candidate is not None else self._num_ways(w.shape) for *_, w in self.queue)
        return min(self.total, max(0, self.total - waiting)), self.total

    # -- plans

    def _traced(self, candidate: Candidate) -> Traced:
        """What one rank of each stage runs."""
        traced = self.loads.get(Load.of(candidate.shape))
        assert isinstance(traced, Traced), "planned after it was looked at"
        return traced

    def _options(self, candidate: Candidate, limit: int | None = None) -> PipelineOptions:
        return self.setting.options(candidate, limit or self.setting.limit, self.again[candidate.recompute])

    def _planned(self, candidate: Candidate, limit: int | None = None, *, prove: bool) -> Planned:
        options = self._options(candidate, limit)
        times = self.loads.times(Load.of(candidate.shape), candidate.mesh, options.cost_model)
        return plan_trace(replace(self._traced(candidate), times=times), options, prove=prove)

    def _foretold(self, candidate: Candidate, least: int) -> Result | None:
        """What a candidate takes that differs in its schedule alone from one that was planned: the cut is the same, or a slower one."""
        plan, choice = self.cuts.get(candidate.cut), self._options(candidate).choice
        if plan is None or tuple(stage.rank for stage in plan.stages) != choice.placement:
            return None
        stages = tuple(
            replace(stage, num_in_flight=number) for stage, number in zip(plan.stages, choice.in_flight, strict=True)
        )
        summary = replace(plan.schedule, name=choice.name, active_microbatches=choice.active_microbatches)
        foretold = replace(plan, stages=stages, schedule=summary)
        found = self._parts(candidate, schedule_plan(self._traced(candidate).trace, foretold))
        return replace(Result.of(candidate, found, least), peak_is_bound=True)

    def _plan(self, candidate: Candidate, bound: float, limit: int) -> tuple[Result, Plan | None]:
        """The result of a candidate, and its plan if it has one."""
        try:
            planned = self._planned(candidate, limit, prove=False)
        except MemoryLimitError as error:
            if self.least is None or error.least_bytes < self.least[0]:
                self.least = error.least_bytes, candidate
            result = Result(candidate, Verdict.MEMORY, bound, peak_bytes=error.least_bytes, step_is_bound=True)
            return result, None
        except (PartitionError, ConfigError, CodegenError) as error:
            return Result(candidate, Verdict.IMPOSSIBLE, reason=str(error)), None
        return self._result(candidate, planned), planned.plan

    def _result(self, candidate: Candidate, planned: Planned) -> Result:
        """What a plan takes."""
        return Result.of(candidate, self._parts(candidate, planned), max(rank_peaks(planned.plan).values()))

    def _parts(self, candidate: Candidate, planned: Planned) -> StepParts:
        """Where the time of a plan's step goes."""
        device, mesh = self.setting.device, candidate.mesh
        ranks = (device,) * candidate.pipeline_parallel_degree
        around = Around.on(mesh, ranks, candidate.sharding)
        if candidate.expert_parallel_degree > 1:
            around = replace(around, experts=Group.of(mesh, Axis.EP, device))
        traced = planned.traced or self._traced(candidate)
        return step_parts(traced, planned.plan, planned.timeline, around, self._options(candidate).recompute)

    def _proven(self, quick: Result, quick_plan: Plan) -> tuple[Result, Plan]:
        """The best candidate planned with proof; its quick plan where that is faster."""
        planned = self._planned(quick.candidate, prove=True)
        result, plan = self._result(quick.candidate, planned), planned.plan
        if result.step_time > quick.step_time:
            proven = plan.objective.lower_bound  # of the same problem
            result, plan = quick, with_bound(quick_plan, proven)
        self.results[self.results.index(quick)] = result
        return result, plan

    def _least_memory(self, found: Sequence[Shape]) -> None:
        """Plans in the order of the bounds on the peak, until none can need less, or the budget is spent; one that fits is the best."""
        pending: list[tuple[int, int, Candidate, float]] = []
        for shape in found:
            traced = self.loads.known.get(Load.of(shape))
            if not isinstance(traced, Traced):
                continue
            plain, (bound, _) = self._sample(shape), self._least(shape)
            for candidate in ways(shape, self.tried):
                known = plain if candidate.recompute == "model" else replace(plain, activation_bytes=0.0)
                if candidate.num_stages <= len(traced.trace.nodes):
                    pending.append((least_peak(known, candidate), len(pending), candidate, bound))
        self.spent, enough = 0.0, _WITHOUT_PLAN * self._budget / min(1.0, self.setting.effort)
        for done, (peak, _, candidate, bound) in enumerate(sorted(pending)):
            self.show("Searching for the least memory", done, len(pending))
            if peak >= (self.least[0] if self.least else math.inf):
                break
            cost = self._cost(Waiting(candidate.shape, bound, peak, Guess(0.0, 0.0), candidate))
            if self.least is not None and self.spent + cost > enough:
                self.is_least = False
                break
            self.spent += cost
            self._plan(candidate, bound, 1)
            if self.least is not None and self.least[0] <= self.setting.limit:
                result, plan = self._plan(self.least[1], bound, self.setting.limit)
                if plan is not None:
                    self.results.append(result)
                    self.best = result, plan
                    return

    def _nothing_fits(self) -> Exception:
        """The error, with the least memory that would do."""
        setting = self.setting
        if self.least is None:
            impossible = [result for result in self.results if result.verdict is Verdict.IMPOSSIBLE]
            reason = impossible[0].reason if impossible else "no candidate"
            return PartitionError(f"expected a way to train on {setting.world_size} ranks, found none: {reason}")
        least, candidate = self.least
        tensor = f" of {candidate.tensor_parallel_degree} ranks" if candidate.tensor_parallel_degree > 1 else ""
        known = "would do" if self.is_least else "is known to do"
        return MemoryLimitError(
            f"expected a way to train within {at_least(setting.limit)} on each of {setting.world_size} ranks, found none among "
            f"{self.total}: the least memory that {known} is {at_least(least)}, with pipelines of "
            f"{candidate.pipeline_parallel_degree} stages{tensor}, {candidate.data_parallel_degree} replicas, "
            f"{candidate.microbatches} microbatches "
            f"and the {candidate.schedule} schedule; raise memory_limit, use more ranks, or a smaller batch",
            least,
        )
