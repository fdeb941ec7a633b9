"""What a search found: every way that was planned, what became of the others, and how much faster one of those could be.

    found.best                  Result(candidate=Candidate(pipeline_parallel_degree=4, ...), verdict="best", step_time=0.41, ...)
    found.gap                   0.01: nothing that was left out without a plan is more than 1% faster
    found.results[1].reason     "3.2% slower: bubble 12.1% of the step, not 8.0%"
    found.config()              the settings that train the best way

A `Result` says how long a step takes and how much memory a rank needs, as far as that is known: what was not planned has lower bounds, and
stands for as many ways as its `ways` says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from smpc.codegen.rewrite.context_parallel.rewrite import ContextTrace
from smpc.codegen.rewrite.expert_parallel import ExpertTrace
from smpc.codegen.rewrite.tensor_parallel.rewrite import ShardedTrace
from smpc.compile.options import PipelineOptions
from smpc.compile.replica_traffic import Sharding
from smpc.compile.result import Planned
from smpc.compile.search.space import Candidate, Setting
from smpc.compile.step_breakdown import StepParts
from smpc.config.numbers import at_least
from smpc.errors import MemoryLimitError, PartitionError
from smpc.partitioner.graph.plan import Plan
from smpc.tracer.ir import Trace

_SHARDED = {"tensor_parallel_plan": "auto", "prescaled_batch": True}  # settings that tensor-parallel ranks need
_PARTS = ("compute", "bubble", "waiting", "tensor", "data", "optimizer", "context", "expert", "offload", "executor")


class Verdict(StrEnum):
    """What became of a candidate."""

    BEST = "best"
    SLOWER = "slower"  # its step is longer than the best one, or cannot be shorter
    OPEN = "open"  # not planned, and may be faster: the search ended before
    MEMORY = "memory"  # its peak exceeds the limit
    IMPOSSIBLE = "impossible"  # there is no such pipeline: more stages than modules, for instance


@dataclass(frozen=True, slots=True)
class Result:
    """A candidate with its predicted seconds and bytes; 0 where not known.

    `step_is_bound`, `peak_is_bound`: not planned; it, and the other ways of its shape that it stands for, take at least this.
    """

    candidate: Candidate
    verdict: Verdict
    step_time: float = 0.0
    pipeline_time: float = 0.0
    reduce_time: float = 0.0
    optimizer_time: float = 0.0
    peak_bytes: int = 0
    step_is_bound: bool = False
    peak_is_bound: bool = False
    reason: str = ""
    ways: int = 1
    parts: tuple[float, ...] = ()  # seconds, in the order of `_PARTS`; () without a plan
    without: int = 0  # of one that offloads: bytes that its best cut takes without

    @classmethod
    def of(cls, candidate: Candidate, parts: StepParts, peak: int) -> Result:
        """What a plan takes."""
        times = parts.total, parts.pipeline, parts.data, parts.optimizer
        shares = tuple(float(getattr(parts, name)) for name in _PARTS)
        return cls(candidate, Verdict.SLOWER, *times, peak_bytes=peak, parts=shares)

    @property
    def in_short(self) -> str:
        """Its step, degrees above 1 and schedule, for people."""
        found = self.candidate
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
        return f"{self.step_time:.3g} s ({degrees or 'one rank'}, {found.schedule})"


@dataclass(frozen=True)
class Search:
    """What was found: `options` give the best candidate's plan, `planned`, made from the `trace` of one of its microbatches.

    gap: nothing that was left out without a plan could be faster by more than this part of the best step.
    """

    world_size: int
    batch_size: int
    memory_limit: int
    device: str
    optimizer: str
    results: tuple[Result, ...]  # the best first, then what fits by time, what is open, and what does not fit by memory
    planned: Planned
    options: PipelineOptions
    gap: float
    sharded: ShardedTrace | None = None  # with tensor-parallel ranks: how they share the trace
    parts: StepParts | None = None  # where the time of the best step goes
    context: ContextTrace | None = None  # with context-parallel ranks: how they share sequences
    divided: ExpertTrace | None = None  # with expert-parallel ranks: what travels

    @property
    def trace(self) -> Trace:
        """What one rank of each stage computes for a microbatch."""
        return self.planned.trace

    @property
    def plan(self) -> Plan:
        """The plan of the best candidate."""
        return self.planned.plan

    @property
    def best(self) -> Result:
        """The result of the best candidate."""
        return self.results[0]

    def config(self) -> dict[str, Any]:
        """The settings of `smpc.config.Config` that train this way."""
        found, outputs = self.best.candidate, self.options.tensor_parallel_outputs
        others = {
            name: degree
            for name in ("context_parallel_degree", "expert_parallel_degree")
            if (degree := getattr(found, name)) > 1
        }
        return {
            "pipeline_parallel_degree": found.pipeline_parallel_degree,
            "ddp": found.data_parallel_degree * found.tensor_parallel_degree * found.context_parallel_degree > 1,
            "placement_strategy": found.placement_strategy,
            "microbatches": found.microbatches,
            "schedule": found.schedule,
            "virtual_pipeline_degree": found.virtual_pipeline_degree,
            "memory_weight": self.options.memory_weight,
            **(_SHARDED if found.tensor_parallel_degree > 1 else {}),
            "tensor_parallel_degree": found.tensor_parallel_degree,
            **({"tensor_parallel_outputs": ",".join(outputs)} if outputs else {}),
            **({"shard_optimizer_state": True} if found.sharding is Sharding.STATE else {}),
            **({"fully_shard": True} if found.sharding is Sharding.FULL else {}),
            **others,
            **({"offload_activations": True, "activation_loading_horizon": found.offload} if found.offload else {}),
        }

    def to_json(self) -> str:
        """All but trace and plan as indented JSON; the same search gives the same bytes."""
        data = {
            "world_size": self.world_size,
            "batch_size": self.batch_size,
            "memory_limit": self.memory_limit,
            "device": self.device,
            "optimizer": self.optimizer,
            "plan": self.plan.fingerprint,
            "gap": self.gap,
            "config": self.config(),
            "recompute": list(self.options.recompute),
            "results": [asdict(result) for result in self.results],
        }
        return json.dumps(data, indent=2) + "\n"


def ordered(results: Sequence[Result], best: Result, limit: int) -> Iterator[Result]:
    """The best, then the others: slower ones by time, open ones, those over the limit by memory, impossible ones; each with a reason."""
    yield replace(best, verdict=Verdict.BEST)
    rank = {Verdict.SLOWER: 0, Verdict.OPEN: 1, Verdict.MEMORY: 2, Verdict.IMPOSSIBLE: 3}

    def key(result: Result) -> tuple[int, bool, float]:
        size = result.peak_bytes if result.verdict is Verdict.MEMORY else result.step_time
        return rank[result.verdict], result.verdict is Verdict.SLOWER and result.step_is_bound, size

    for result in sorted((result for result in results if result is not best), key=key):
        yield replace(result, reason=result.reason or _result_reason(result, best, limit))


def _result_reason(result: Result, best: Result, limit: int) -> str:
    if result.verdict is Verdict.MEMORY:
        return f"needs {at_least(result.peak_bytes)}, the limit is {at_least(limit)}"
    slower = result.step_time / best.step_time - 1.0
    if result.step_is_bound:
        return f"at least {slower:.1%} slower" if slower >= 0.0 else f"at most {-slower:.1%} faster, so not planned"
    return f"{slower:.1%} slower{_why_result_is_slower(result, best)}"


def _why_result_is_slower(result: Result, best: Result) -> str:
    """The part of the step that has grown the most."""
    if not result.parts or not best.parts or result.step_time <= best.step_time:
        return ""
    name, more = max(
        ((name, a - b) for name, a, b in zip(_PARTS, result.parts, best.parts, strict=True)), key=lambda pair: pair[1]
    )
    return f": {name} {more / best.step_time:+.1%}"


def nothing_fits(
    setting: Setting, results: Sequence[Result], total: int, found: tuple[int, Candidate] | None, *, is_least: bool
) -> Exception:
    """The error, with the least memory that was found to do, and for which candidate; `is_least`: no other can need less."""
    if found is None:
        impossible = [result for result in results if result.verdict is Verdict.IMPOSSIBLE]
        reason = impossible[0].reason if impossible else "no candidate"
        return PartitionError(f"expected a way to train on {setting.world_size} ranks, found none: {reason}")
    least, candidate = found
    moves = ", offloading activations" if candidate.offload else ""
    tensor = f" of {candidate.tensor_parallel_degree} ranks" if candidate.tensor_parallel_degree > 1 else ""
    known = "would do" if is_least else "is known to do"
    return MemoryLimitError(
        f"expected a way to train within {at_least(setting.limit)} on each of {setting.world_size} ranks, found none among "
        f"{total}: the least memory that {known} is {at_least(least)}, with pipelines of "
        f"{candidate.pipeline_parallel_degree} stages{tensor}, {candidate.data_parallel_degree} replicas, "
        f"{candidate.microbatches} microbatches "
        f"and the {candidate.schedule} schedule{moves}; raise memory_limit, use more ranks, or a smaller batch",
        least,
        is_least=is_least,
    )
