"""What a search found: every candidate with what became of it, and the plan of the best.

    found.best                  Result(candidate=Candidate(pipeline_parallel_degree=4, ...), verdict="best", step_time=0.41, ...)
    found.results[1].reason     "3.2% slower"
    found.config()              the settings that train the best way

A `Result` says how long a step takes and how much memory a rank needs, as far as that is known: what was not planned has lower bounds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from smpc.auto.space import Candidate
from smpc.codegen.rewrite.tensor_parallel import ShardedTrace
from smpc.compile import PipelineOptions
from smpc.partitioner.plan import Plan
from smpc.partitioner.sizes import at_least
from smpc.tracer.ir import Trace

_SHARDED = {"tensor_parallel_plan": "auto", "prescaled_batch": True}  # settings that tensor-parallel ranks need


class Verdict(StrEnum):
    """What became of a candidate."""

    BEST = "best"
    SLOWER = "slower"  # its step is longer than the best one, or cannot be shorter
    MEMORY = "memory"  # its peak exceeds the limit
    IMPOSSIBLE = "impossible"  # there is no such pipeline: more stages than modules, for instance


@dataclass(frozen=True, slots=True)
class Result:
    """A candidate with its predicted seconds and bytes; 0 where not known.

    `step_is_bound`, `peak_is_bound`: not planned; it takes at least this.
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


@dataclass(frozen=True)
class Search:
    """What was found: `options` give the best candidate's `plan`, `trace` is that of one of its microbatches."""

    world_size: int
    batch_size: int
    memory_limit: int
    device: str
    optimizer: str
    results: tuple[Result, ...]  # the best first, then what fits by time, then what does not by memory
    trace: Trace
    options: PipelineOptions
    plan: Plan
    sharded: ShardedTrace | None = None  # with tensor-parallel ranks: how they share the trace

    @property
    def best(self) -> Result:
        """The result of the best candidate."""
        return self.results[0]

    def config(self) -> dict[str, Any]:
        """The settings of `smpc.config.Config` that train this way."""
        found = self.best.candidate
        return {
            "pipeline_parallel_degree": found.pipeline_parallel_degree,
            "ddp": found.data_parallel_degree * found.tensor_parallel_degree > 1,
            "placement_strategy": found.placement_strategy,
            "microbatches": found.microbatches,
            "schedule": found.schedule,
            "virtual_pipeline_degree": found.virtual_pipeline_degree,
            "memory_weight": self.options.memory_weight,
            **(_SHARDED if found.tensor_parallel_degree > 1 else {}),
            "tensor_parallel_degree": found.tensor_parallel_degree,
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
            "config": self.config(),
            "results": [asdict(result) for result in self.results],
        }
        return json.dumps(data, indent=2) + "\n"


def ordered(results: Sequence[Result], best: Result, limit: int) -> Iterator[Result]:
    """The best, then the others: slower ones by time, then those over the limit by memory, then impossible ones; each with a reason."""
    yield replace(best, verdict=Verdict.BEST)
    rank = {Verdict.SLOWER: 0, Verdict.MEMORY: 1, Verdict.IMPOSSIBLE: 2}

    def key(result: Result) -> tuple[int, bool, float]:
        size = result.step_time if result.verdict is Verdict.SLOWER else result.peak_bytes
        return rank[result.verdict], result.verdict is Verdict.SLOWER and result.step_is_bound, size

    for result in sorted((result for result in results if result is not best), key=key):
        yield replace(result, reason=result.reason or _reason(result, best, limit))


def _reason(result: Result, best: Result, limit: int) -> str:
    if result.verdict is Verdict.MEMORY:
        return f"needs {at_least(result.peak_bytes)}, the limit is {at_least(limit)}"
    slower = result.step_time / best.step_time - 1.0
    if result.step_is_bound:
        return f"at least {slower:.1%} slower" if slower > 0.0 else f"at most {-slower:.1%} faster, so not planned"
    return f"{slower:.1%} slower"
