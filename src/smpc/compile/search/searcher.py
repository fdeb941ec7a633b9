"""The search for the fastest way to train a model on a number of devices, within a memory limit.

    found = search(model, batch, world_size=16, memory_limit="80GB")
    found.best.candidate        Candidate(pipeline_parallel_degree=4, data_parallel_degree=4, ..., schedule="zb-h1")
    found.plan                  its plan, as `smpc.partition` makes it
    found.results               every candidate, the best first, with what became of it
    found.gap                   how much faster one of those that were not planned could be

The sample inputs are the GLOBAL batch: what all replicas process together in one step. It is the same for every candidate (see
`smpc.compile.search.space`), and what is minimised is the predicted step (`smpc.compile.step_breakdown`).

How. There may be a million candidates, each of which takes a second to plan, and models take seconds to record. So the search goes from
what looks best to what looks worst, by a guess (`smpc.compile.search.estimate`):

    shape       degrees, places and microbatches. Its bound (`partitioner.costs.least_times`) and its guess are made from one recorded one
    candidate   a shape that looked best is recorded and rewritten (`workloads`), and is in the queue once for each way to train it
    plan        a candidate that looks best is planned as its best contiguous cut for balanced computation (`memory_weight` 0)

Of many shapes, the shapes with the smallest microbatch, which is recorded, come first: until there is a plan, nothing else is looked at.

A shape or candidate whose lower bound is above 99% of the best step, or whose bound on the peak exceeds the limit, is left alone. A cut
that breaks the limit is a bound itself, as a limit makes no cut faster: the candidate is cut within the limit when its turn comes again.
What differs from a planned candidate in its schedule alone is not planned if it is slower with the same cut. The search ends when nothing
is left, which proves that nothing is more than 1% faster; or when its budget is spent, or all that is left looks a tenth slower than the
best. Then the bounds of what is left say how much faster that could be. The budget is counted in operations, stages and microbatches, never
by a clock: the same search gives the same bytes. The best is then planned with all means.

With t tensor-parallel, c context-parallel and e expert-parallel ranks, what is planned is the trace of one of them: the compiler's best
layouts, with collectives that take what they send over the wires that these ranks share. Of a model that returns its `loss` and other
tensors these ranks return the loss alone, so that logits are never gathered; `found.config()` says so (`tensor_parallel_outputs`).

`Waiting` is the queue of a search, `Rest` what is left of it at the end.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from smpc.compile.result import Planned, Traced
from smpc.compile.search.estimate import EstimatedSample, Guess, least_peak, least_step
from smpc.compile.search.forecast import Forecast, Plans
from smpc.compile.search.search_result import Result, Search, Verdict, nothing_fits, ordered
from smpc.compile.search.space import (
    ALL_SCHEDULES,
    Candidate,
    Setting,
    Shape,
    Tried,
    context_degrees,
    expert_degrees,
    shapes,
    sharding_kinds,
    tensor_degrees,
    ways,
)
from smpc.compile.search.workloads import Load, Workloads
from smpc.config.numbers import parse_bytes
from smpc.errors import CodegenError, ConfigError, MemoryLimitError, PartitionError
from smpc.partitioner.costs.device import Device
from smpc.partitioner.costs.device_file import find_device
from smpc.partitioner.costs.named_optimizers import find_optimizer
from smpc.partitioner.graph.plan import Plan
from smpc.partitioner.planner import MAX_COARSE_UNITS, rank_peaks, with_bound
from smpc.sample_inputs import as_inputs


@dataclass(frozen=True, slots=True)
class Waiting:
    """A shape, or one candidate of it, in the queue. `breaks_limit`: its best cut does.

    less: where that is so, the same with the least on the device that offloading leaves, and about how many bytes less that is.
    """

    shape: Shape
    bound: float  # seconds that it takes at least
    peak: int  # bytes that it holds at least
    guess: Guess
    candidate: Candidate | None = None
    breaks_limit: bool = False
    is_corrected: bool = False  # its place in the queue is, by what others of its kind turned out to be
    less: tuple[Candidate, int] | None = None
    without: int = 0  # of one that offloads: bytes that the same cut takes without
    basis: Load | None = None  # what a shape's guess was made from


@dataclass
class Rest:
    """What is left of a shape without a plan."""

    ways: int = 0
    bound: float = math.inf
    peak: int = 0


TOLERANCE = 0.01  # how much faster a way that is not planned could be, where the search has come to its end
_MANY = 1000  # shapes
_LARGE = 1000  # operations
_EARLY = 0.2  # of the budget, for a plan to show at once
_HOPELESS = 0.1  # by how much a guess may be above the best step, at effort 1
_NO_LIMIT = 1 << 60  # bytes
_WITHOUT_PLAN = (
    2.0  # as much of the budget may be spent before there is a plan that fits, and once more on the least memory
)
_OFFLOADING = 0.1  # of the budget, on top of it, for ways that offload, once there is one that fits
_BUDGET, _BUDGET_FOR_NODE = 2500.0, 2.2  # about milliseconds of a core, at effort 1
_PLAN, _PLAN_FOR_NODE, _PLAN_FOR_ACTION, _PLAN_FOR_STAGES = 6.0, 0.06, 0.05, 0.15
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
    show("Tracing the model", 0, 1)
    found = tuple(shapes(world_size, loads.batch_size, kind, tried))
    if not found:
        raise ConfigError(
            f"world_size: expected a number of ranks of which some can share the batch of {loads.batch_size}, found "
            f"{world_size}; change the batch or the number of ranks"
        )
    forecast = Forecast.of(setting, loads, min(shape.microbatch_size for shape in found))
    plans = Plans(setting, loads, forecast.again)
    return _Searcher(setting, loads, show, forecast, plans, found).run()


@dataclass
class _Searcher:
    """One search."""

    setting: Setting
    loads: Workloads
    show: ShowProgress
    forecast: Forecast
    plans: Plans
    shapes: Sequence[Shape]
    fullness: dict[tuple[Load, str], float] = field(default_factory=dict)  # planned over guessed peaks
    slowness: dict[str, float] = field(default_factory=dict)  # planned over guessed steps, by schedule
    results: list[Result] = field(default_factory=list)
    best: tuple[Result, Planned] | None = None
    early: tuple[Result, Planned] | None = None  # see `_early_plan`
    least: tuple[int, Candidate] | None = None
    is_least: bool = True  # no other candidate can need less
    queue: list[tuple[bool, float, int, Waiting]] = field(default_factory=list)
    turns: int = 0
    spent: float = 0.0
    spent_offloading: float = 0.0
    gap: float = 0.0
    total: int = 0
    waiting: int = 0  # of these, in the queue, or not there yet
    left: list[Waiting] = field(default_factory=list)  # without a plan

    def run(self) -> Search:
        """The whole search."""
        self.total = self.waiting = sum(map(self.forecast.num_ways, self.shapes))
        self.early = self._early_plan()
        first, others = self._in_turn()
        for shape in first:
            self._enter(shape)
        self._go_on(to_a_plan=bool(others))
        for shape in others:
            self._enter(shape)
        self._go_on()
        if self.early is not None and (self.best is None or self.early[0].step_time < self.best[0].step_time):
            self.results.append(self.early[0])
            self.best = self.early
        if self.best is None:
            self._least_memory()
        if self.best is None:
            raise nothing_fits(self.setting, self.results, self.total, self.least, is_least=self.is_least)
        self._close()
        self.show("Planning the best", 0, 1)
        best, planned = self._proven(*self.best)
        setting = self.setting
        traced = self.plans.traced(best.candidate)
        return Search(
            setting.world_size,
            self.loads.batch_size,
            setting.limit,
            setting.device.name,
            planned.plan.optimizer,
            tuple(ordered(self.results, best, setting.limit)),
            planned,
            self.plans.options(best.candidate),
            max(0.0, self.gap),
            traced.sharded,
            self.plans.parts(best.candidate, planned),
            traced.context,
            traced.divided,
        )

    # -- shapes

    def _early_plan(self) -> tuple[Result, Planned] | None:
        """For a large model: a plan by what is recorded already, to show while experts are tried and recorded in parts, or many shapes are
        looked at. It changes nothing of the search after it."""
        size, trace = next(iter(self.loads.recorded.items()))
        takes_long = len(self.shapes) > _MANY or any(shape.expert_parallel_degree > 1 for shape in self.shapes)
        if len(trace.nodes) <= _LARGE or not takes_long:
            return None
        plain = [shape for shape in self.shapes if Load.of(shape) == Load(size)]
        setting = replace(self.setting, effort=min(1.0, self.setting.effort) * _EARLY)
        first = _Searcher(setting, self.loads, lambda *_: None, self.forecast, self.plans, plain)
        for shape in plain:
            first._enter(shape)
        first._go_on(to_a_plan=True, fitting=True)
        self.early = first.best
        self.show(self._phase(), *self._progress)
        return first.best

    def _in_turn(self) -> tuple[Sequence[Shape], Sequence[Shape]]:
        """All shapes; of many, which take minutes to look at, the shapes of the smallest microbatch, which is recorded, and the others."""
        if len(self.shapes) <= _MANY:
            return self.shapes, ()
        smallest = min(shape.microbatch_size for shape in self.shapes)
        first = [shape for shape in self.shapes if shape.microbatch_size == smallest]
        return first, [shape for shape in self.shapes if shape.microbatch_size != smallest]

    def _enter(self, shape: Shape) -> None:
        """A shape into the queue, or its rejection."""
        number = self.forecast.num_ways(shape)
        self.waiting -= number
        first = next(iter(ways(shape, self.forecast.tried)), None)
        if first is None:
            return
        most = len(next(iter(self.loads.recorded.values())).nodes)
        if shape.pipeline_parallel_degree > most:
            reason = f"expected at most as many stages as operations, of which there are {most}"
            self.results.append(Result(first, Verdict.IMPOSSIBLE, reason=reason, ways=number))
            return
        bound, peak = self.forecast.least(shape)
        if peak > self.setting.limit:
            rejected = Result(first, Verdict.MEMORY, bound, peak_bytes=peak, step_is_bound=True, peak_is_bound=True)
            self.results.append(replace(rejected, ways=number))
            return
        if self._is_slower(bound):
            self.left.append(Waiting(shape, bound, peak, Guess(bound, peak)))
            return
        self._push_shape(shape, bound, peak)

    def _push_shape(self, shape: Shape, bound: float, peak: int) -> None:
        """Into the queue, by what its best candidate may take."""
        look, fits = self._look(shape)
        waiting = Waiting(shape, bound, peak, look, basis=self.loads.nearest(Load.of(shape)))
        self._push(waiting, deferred=not fits)

    def _look(self, shape: Shape) -> tuple[Guess, bool]:
        """About what a shape's best candidate takes of those that seem to fit; where none does, the fastest of all, and False."""
        place, limit = self.forecast.place(shape), self.setting.limit
        by_way = self.forecast.typical(shape)
        peaks = [self.forecast.guessed_peak(ways[-1]) for ways in by_way]  # the least of each
        steps = [(self.forecast.guessed_step(way, place), way) for ways in by_way for way in ways]
        steps.sort(key=lambda pair: pair[0])
        if min(peaks) > limit:
            return Guess(steps[0][0], min(peaks)), False
        known = {id(ways[-1]): peak for ways, peak in zip(by_way, peaks, strict=True)}
        looks = (Guess(step, known.get(id(way)) or self.forecast.guessed_peak(way)) for step, way in steps)
        return next(look for look in looks if look.peak <= limit), True

    def _expand(self, waiting: Waiting) -> None:
        """A shape's candidates into the queue."""
        shape = waiting.shape
        load = Load.of(shape)
        self.spent += self.loads.cost(load)
        self.show(self._phase(), *self._progress)
        traced = self.loads.get(load)
        found = list(ways(shape, self.forecast.tried))
        least, _ = self.forecast.least(shape) if isinstance(traced, Traced) else (waiting.bound, 0)
        if isinstance(traced, str):
            self.results.append(Result(found[0], Verdict.IMPOSSIBLE, reason=traced, ways=len(found)))
            return
        place, plain = self.forecast.place(shape), self.forecast.sample(shape)
        most = len(traced.trace.nodes)
        rejected, entries = Rest(peak=_NO_LIMIT), list[Waiting]()
        for candidate in found:
            if candidate.num_stages > most:
                reason = f"expected at most as many stages as operations, of which there are {most}"
                self.results.append(Result(candidate, Verdict.IMPOSSIBLE, reason=reason))
                continue
            known = (
                plain
                if candidate.recompute == "model" and not traced.trace.regions
                else _sample_for_search_bounds(plain)
            )
            more = self.forecast.reruns(shape, candidate.recompute).at_least(candidate.num_stages)
            bound, peak = least_step(plain, candidate, place, more), least_peak(known, candidate)
            if peak > self.setting.limit:
                rejected.ways += 1
                rejected.bound, rejected.peak = min(rejected.bound, bound), min(rejected.peak, peak)
                example = candidate
                continue
            look = self.forecast.guessed(candidate, place, plain)
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
        self._put(False, 0.0, replace(waiting, is_corrected=True))

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
            self.waiting -= 1
            self._push_first(best[3])

    # -- the queue

    def _push(self, waiting: Waiting, *, deferred: bool | None = None) -> None:
        """Into the queue; what looks as if it did not fit goes behind all that does."""
        look = self._corrected(waiting)
        later = look.peak > self.setting.limit if deferred is None else deferred
        self._put(later, look.step, waiting)

    def _put(self, later: bool, step: float, waiting: Waiting) -> None:
        self.turns += 1
        self.waiting += self._ways_of(waiting)
        heapq.heappush(self.queue, (later, step, self.turns, waiting))

    def _ways_of(self, waiting: Waiting) -> int:
        return 1 if waiting.candidate is not None else self.forecast.num_ways(waiting.shape)

    def _corrected(self, waiting: Waiting) -> Guess:
        """Its guess, corrected by how far off the guesses were for planned candidates of its kind."""
        if not waiting.is_corrected or waiting.candidate is None or waiting.breaks_limit or waiting.candidate.offload:
            return waiting.guess
        fuller = self.fullness.get((Load.of(waiting.shape), waiting.candidate.recompute), 1.0)
        slower = self.slowness.get(waiting.candidate.schedule, 1.0)
        return Guess(waiting.guess.step * slower, waiting.guess.peak * fuller)

    def _go_on(self, *, to_a_plan: bool = False, fitting: bool = False) -> None:
        """From what looks best to what looks worst, until nothing is left or the budget is spent.

        `to_a_plan`: only until there is one, or half of what may be spent without one is; `fitting`: or nothing is left that seems to fit.
        """
        while self.queue:
            if to_a_plan and (self.best is not None or self.spent >= self._budget or (fitting and self.queue[0][0])):
                return
            later, _, _, waiting = heapq.heappop(self.queue)
            self.waiting -= self._ways_of(waiting)
            if self._is_slower(waiting.bound) or self._is_hopeless(waiting) or not self._affords(waiting):
                self.left.append(waiting)
                continue
            if waiting.candidate is None and waiting.basis != self.loads.nearest(Load.of(waiting.shape)):
                self._push_shape(waiting.shape, *self.forecast.least(waiting.shape))
                continue
            if waiting.candidate is not None and not waiting.is_corrected and not waiting.breaks_limit:
                self._push(replace(waiting, is_corrected=True), deferred=later or None)
                continue
            self.show(self._phase(), *self._progress)
            if waiting.candidate is None:
                self._expand(waiting)
            else:
                self._try(waiting, waiting.candidate)

    def _is_slower(self, bound: float) -> bool:
        """Whether what takes so long at least cannot be faster than the best, but for the tolerance."""
        return self.best is not None and bound >= self.best[0].step_time * (1.0 - TOLERANCE)

    def _is_hopeless(self, waiting: Waiting) -> bool:
        """Whether it looks too slow to be worth a look; a shape, whose guess is made from another one, even if all turns out well."""
        most = math.inf if self.best is None else self.best[0].step_time * (1.0 + _HOPELESS * self.setting.effort)
        if waiting.candidate is not None or waiting.guess.step <= most:
            return waiting.guess.step > most
        place, typical = self.forecast.place(waiting.shape), itertools.chain(*self.forecast.typical(waiting.shape))
        return min(self.forecast.guessed_step(way, place, hopeful=True) for way in typical) > most

    @property
    def _budget(self) -> float:
        number = len(next(iter(self.loads.recorded.values())).nodes)
        return (_BUDGET + _BUDGET_FOR_NODE * number) * self.setting.effort

    def _affords(self, waiting: Waiting) -> bool:
        """Whether the budget allows the next thing about it. What offloads has one of its own, so that it is in nobody's way."""
        offloads = waiting.candidate is not None and waiting.candidate.offload > 0
        share = _WITHOUT_PLAN if self.best is None else _OFFLOADING if offloads else 1.0
        spent = self.spent_offloading if offloads else self.spent
        return spent == 0 or spent + self._cost(waiting) <= share * self._budget

    def _cost(self, waiting: Waiting) -> float:
        """What the next thing about it takes, of the budget."""
        if waiting.candidate is None:
            return self.loads.cost(Load.of(waiting.shape))
        traced, candidate = self.plans.traced(waiting.candidate), waiting.candidate
        actions = 3 * candidate.num_stages * candidate.microbatches
        stages = _PLAN_FOR_STAGES * (candidate.num_stages / 32) ** 4
        return _PLAN + _PLAN_FOR_NODE * len(traced.trace.nodes) + _PLAN_FOR_ACTION * actions + stages

    def _try(self, waiting: Waiting, candidate: Candidate) -> None:
        """A candidate's plan, and what it says."""
        cost = self._cost(waiting)
        self.spent_offloading += cost if candidate.offload else 0.0
        self.spent += 0.0 if candidate.offload else cost
        if not waiting.breaks_limit:
            foretold = self.plans.foretold(candidate, waiting.peak)
            if foretold is not None and self.best is not None and foretold.step_time >= self.best[0].step_time:
                self.results.append(foretold)
                return
        result, planned = self._plan(
            candidate, waiting.bound, self.setting.limit if waiting.breaks_limit else _NO_LIMIT
        )
        plan = None if planned is None else planned.plan
        if plan is not None:
            peaks = rank_peaks(plan).values()
            if not waiting.breaks_limit and waiting.guess.peak > 0 and not candidate.offload:
                self.fullness[Load.of(waiting.shape), candidate.recompute] = max(peaks) / waiting.guess.peak
                self.slowness[candidate.schedule] = result.step_time / waiting.guess.step
            if max(peaks) > self.setting.limit:
                look = Guess(result.step_time, waiting.guess.peak)
                # With more offloaded no step is shown to be longer, only longer than without: a CPU copies at other times then.
                bound = waiting.bound if candidate.offload else max(waiting.bound, result.step_time)
                again = self._offload(replace(waiting, bound=bound, guess=look, breaks_limit=True), plan)
                self._push(again, deferred=sum(peaks) > self.setting.limit * len(peaks))
                if self.best is None and not waiting.breaks_limit:
                    self._look_for_one_that_fits(waiting.shape)
                return
        result = replace(result, without=waiting.without if candidate.offload else 0)
        self.results.append(result)
        if plan is None and waiting.less is not None and result.peak_bytes - waiting.less[1] <= self.setting.limit:
            self._push_offloading(waiting, waiting.less[0], result.peak_bytes - waiting.less[1])
        if plan is not None:
            self.plans.cuts.setdefault(candidate.cut, plan)
        if planned is not None and (self.best is None or result.step_time < self.best[0].step_time):
            self.best = result, planned

    def _offload(self, waiting: Waiting, plan: Plan) -> Waiting:
        """What is done about this plan, which breaks the limit, by offloading: see `space.offloading`.

        The first way whose best cut, which is this plan's, may fit goes into the queue. Where there is none, one may fit with the cut of
        the least memory: that is known when this way has been cut within the limit.
        """
        assert waiting.candidate is not None
        found = list(self.plans.offloading(waiting.candidate, plan))
        peak = max(rank_peaks(plan).values())
        waiting = replace(waiting, less=None, without=waiting.without or peak)
        fitting = [way for way in found if way[1] <= self.setting.limit]
        if fitting:
            self._push_offloading(waiting, *fitting[0])
        elif found:
            candidate, about = found[-1]
            return replace(waiting, less=(candidate, peak - about))
        return waiting

    def _push_offloading(self, waiting: Waiting, candidate: Candidate, about: int) -> None:
        """Into the queue, instead of a way that does not fit the same with more offloaded, and about this peak."""
        peak = least_peak(_sample_for_search_bounds(self.forecast.sample(waiting.shape)), candidate)
        self.total += 1
        look = Guess(waiting.guess.step, about)
        is_cut = waiting.less is not None  # without a limit, it has been cut
        self._push(replace(waiting, candidate=candidate, peak=peak, guess=look, breaks_limit=is_cut, less=None))

    def _close(self) -> None:
        """Results for what was not planned, one for each shape, and by how much it could be faster."""
        assert self.best is not None, "closed when there is one"
        best = self.best[0].step_time
        left = [waiting for waiting in self.left if waiting.candidate != self.best[0].candidate]
        left = [
            waiting
            if waiting.candidate
            else replace(waiting, bound=max(waiting.bound, self.forecast.least(waiting.shape)[0]))
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
                first = waiting.candidate or next(iter(ways(waiting.shape, self.forecast.tried)))
                rest.bound, rest.peak, examples[key] = waiting.bound, waiting.peak, first
            rest.ways += self._ways_of(waiting)
        for key, rest in rests.items():
            verdict = Verdict.OPEN if key[1] else Verdict.SLOWER
            result = Result(examples[key], verdict, rest.bound, peak_bytes=rest.peak, ways=rest.ways)
            self.results.append(replace(result, step_is_bound=True, peak_is_bound=True))

    def _phase(self) -> str:
        """What is known so far, for people."""
        number = f"Searching {self.total} ways to train"
        if self.best is None and self.early is not None:
            return f"{number}: best so far {self.early[0].in_short}, others still to be looked at"
        if self.best is None:
            return number
        best, least = self.best[0], min((waiting.bound for *_, waiting in self.queue), default=math.inf)
        faster = max(TOLERANCE, 1.0 - least / best.step_time)
        return f"{number}: best {best.in_short}, others at most {faster:.0%} faster"

    @property
    def _progress(self) -> tuple[int, int]:
        return min(self.total, max(0, self.total - self.waiting)), self.total

    # -- plans

    def _plan(self, candidate: Candidate, bound: float, limit: int) -> tuple[Result, Planned | None]:
        """The result of a candidate, and its plan if it has one."""
        try:
            planned = self.plans.planned(candidate, limit, prove=False)
        except MemoryLimitError as error:
            self.is_least = self.is_least and error.is_least
            if self.least is None or error.least_bytes < self.least[0]:
                self.least = error.least_bytes, candidate
            result = Result(candidate, Verdict.MEMORY, bound, peak_bytes=error.least_bytes, step_is_bound=True)
            return result, None
        except (PartitionError, ConfigError, CodegenError) as error:
            return Result(candidate, Verdict.IMPOSSIBLE, reason=str(error)), None
        return self.plans.result(candidate, planned), planned

    def _proven(self, quick: Result, quick_plan: Planned) -> tuple[Result, Planned]:
        """The best candidate planned with proof; its quick plan where that is faster, or as good as whatever ignores the limit.

        The quick plan is the best contiguous cut. Within the limit the integer program alone may have a better one, if it has more units
        than there are stages.
        """
        planned = self.plans.planned(quick.candidate, _NO_LIMIT, prove=True)
        result, best = quick, replace(quick_plan, plan=with_bound(quick_plan.plan, planned.plan.objective.lower_bound))
        breaks_limit = max(rank_peaks(planned.plan).values()) > self.setting.limit
        if breaks_limit and best.plan.objective.gap > TOLERANCE and quick.candidate.num_stages < MAX_COARSE_UNITS:
            planned = self.plans.planned(quick.candidate, prove=True)
        found = replace(self.plans.result(quick.candidate, planned), without=quick.without)
        if found.peak_bytes <= self.setting.limit and found.step_time <= quick.step_time:
            objective = replace(planned.plan.objective, memory_limit=self.setting.limit)
            result, best = found, replace(planned, plan=replace(planned.plan, objective=objective))
        self.results[self.results.index(quick)] = result
        return result, best

    def _least_memory(self) -> None:
        """Plans in the order of the bounds on the peak, until none can need less, or the budget is spent; one that fits is the best.

        Shapes that the search has rejected by their bounds are among them: one of these may need the least.
        """
        queue: list[tuple[int, int, Shape, Candidate | None]] = []  # with bounds on the peak
        for number, shape in enumerate(self.shapes):
            heapq.heappush(queue, (self.forecast.least(shape)[1], number, shape, None))
        self.spent, enough, turns = 0.0, _WITHOUT_PLAN * self._budget / min(1.0, self.setting.effort), len(queue)
        while queue:
            peak, _, shape, candidate = heapq.heappop(queue)
            self.show("Searching for the least memory", turns - len(queue), turns)
            if peak >= (self.least[0] if self.least else math.inf):
                break
            bound = self.forecast.least(shape)[0]
            cost = self._cost(Waiting(shape, bound, peak, Guess(0.0, 0.0), candidate))
            if self.spent + cost > enough and (candidate is None or self.least is not None):
                self.is_least = False
                continue
            self.spent += cost
            if candidate is None:
                for at_least, found in self._least_peaks(shape):
                    turns += 1
                    heapq.heappush(queue, (at_least, turns, shape, found))
                continue
            self._plan(candidate, bound, 1)
            traced = self.plans.traced(candidate)
            if candidate.recompute != "model" or traced.trace.regions:
                for least, _ in list(self.plans.offloading(candidate))[-1:]:  # with as much away as can be
                    self.spent += cost
                    self._plan(least, bound, 1)
            if self.least is not None and self.least[0] <= self.setting.limit:
                result, planned = self._plan(self.least[1], bound, self.setting.limit)
                if planned is not None:
                    self.results.append(result)
                    self.best = result, planned
                    return

    def _least_peaks(self, shape: Shape) -> Iterator[tuple[int, Candidate]]:
        """A shape's candidates, each with a bound on its peak; none of a shape that the model does not have."""
        traced = self.loads.get(Load.of(shape))
        if isinstance(traced, str):
            return
        plain = self.forecast.sample(shape)
        for candidate in ways(shape, self.forecast.tried):
            known = (
                plain
                if candidate.recompute == "model" and not traced.trace.regions
                else _sample_for_search_bounds(plain)
            )
            if candidate.num_stages <= len(traced.trace.nodes):
                yield least_peak(known, candidate), candidate


def _sample_for_search_bounds(sample: EstimatedSample) -> EstimatedSample:
    """For bounds where something is computed again or offloaded: without activations."""
    return replace(sample, activation_bytes=0.0)
