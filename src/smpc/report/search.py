"""The result of a search for the fastest way to train, as text: the best candidate, the others, and why they were rejected.

    print_search(found)         on stdout, as `smpc.report.terminal` does
    search_table(found)         the same as text cells

The table has the best candidate, the next ones by time, and the closest candidate of each other kind of rejection. The last lines count
the rest, and say by how much a candidate that was not planned could beat the best step. `>` marks a time or a peak that is only a lower
bound. `others` has, for each degree and setting, the best candidate without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

from smpc.compile.replica_traffic import Sharding
from smpc.compile.search import Result, Search, Verdict
from smpc.report.format import count, format_bytes, format_time, printable
from smpc.report.tables import TextTable
from smpc.report.terminal import labelled, stdout_console, text_table

_SHOWN = 12  # candidates by time
_CLOSEST = 3  # of each other verdict
_WORDS = 30  # letters of a reason
_NAME = 12  # letters of a name in the table
_SHARED = {Sharding.NONE: "-", Sharding.STATE: "state", Sharding.FULL: "all"}


def _again_in_search(name: str) -> str:
    return "none" if name == "model" else printable(name)


def _again_in_table(name: str) -> str:
    """A name as it is, or the number of parts, where their names would fill lines; each set has another number."""
    if name == "model":
        return "-"
    parts = name.split(" + ")
    return printable(name) if len(parts) == 1 or len(name) <= _NAME else f"{len(parts)} parts"


def _parts_legend(found: Search) -> tuple[str, ...]:
    """The legend of a number in the table: `2 parts of a block computed again: norm + attention`."""
    names = sorted(
        {result.candidate.recompute for result in _shown_results(found)}, key=lambda name: (name.count(" + "), name)
    )
    return tuple(
        f"{short} of a block computed again: {printable(name)}"
        for name in names
        if (short := _again_in_table(name)) not in ("-", printable(name))
    )


def _offloaded_in_search(horizon: int) -> str:
    return f"yes, back {count(horizon, 'task')} ahead" if horizon else "no"


# field of a candidate -> its name for people, and how a value is shown
_DIMENSIONS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "pipeline_parallel_degree": ("pipeline", str),
    "tensor_parallel_degree": ("tensor", str),
    "context_parallel_degree": ("context", str),
    "expert_parallel_degree": ("expert", str),
    "microbatch_size": ("samples of a microbatch", str),
    "schedule": ("schedule", str),
    "sharding": ("shared by replicas", str),
    "recompute": ("computed again", _again_in_search),
    "offload": ("offloaded", _offloaded_in_search),
}


def print_search(found: Search, console: Console | None = None) -> None:
    """Print what was searched, the table, and what it leaves out."""
    console = console or stdout_console()
    console.print(Text(search_title(found), style="bold"))
    console.print(Text())
    console.print(text_table(search_table(found), console.width))
    console.print(Text())
    console.print(labelled(search_summary(found)))


def search_title(found: Search) -> str:
    """`16 ranks of H100 SXM, a batch of 64, at most 74.5 GiB each: 4 ways to train fit, of 20`."""
    number = sum(result.ways for result in found.results)
    planned = sum(
        result.verdict in (Verdict.BEST, Verdict.SLOWER) and not result.step_is_bound for result in found.results
    )
    return (
        f"{count(found.world_size, 'rank')} of {printable(found.device)}, a batch of {found.batch_size}, at most "
        f"{format_bytes(found.memory_limit)} each: {count(number, 'way')} to train, of which {planned} were planned"
    )


def search_table(found: Search) -> TextTable:
    """Candidates with their steps and peaks; the best is marked."""
    headers = ("", "Ranks", "Batches", "Schedule", "Shared", "Again", "Step", "Peak", "Why not")
    rows = tuple(_result_row(found, result) for result in _shown_results(found))
    return TextTable(headers, rows, left=("", "Schedule", "Shared", "Again", "Why not"))


def search_summary(found: Search) -> tuple[tuple[str, str], ...]:
    """The parts of the best step, how to read the table, and what it leaves out."""
    best, left_out = found.best, Counter[Verdict]()
    for result in found.results:
        left_out[result.verdict] += result.ways
    left_out.subtract(result.verdict for result in _shown_results(found))
    names = {
        Verdict.SLOWER: "slower",
        Verdict.OPEN: "that may be faster",
        Verdict.MEMORY: "over the memory limit",
        Verdict.IMPOSSIBLE: "impossible",
    }
    rest = ", ".join(f"{left_out[verdict]} {text}" for verdict, text in names.items() if left_out[verdict] > 0)
    placement = best.candidate.placement_strategy
    proof = f"nothing that was not planned is more than {max(found.gap, 0.01):.1%} faster"
    if found.gap > 0.01:
        proof += "; --effort 10 searches ten times as long"
    return (
        (
            "Best step",
            f"{format_time(best.step_time)}: pipeline {format_time(best.pipeline_time)}, sum of gradients over replicas "
            f"{format_time(best.reduce_time)} beyond it, optimizer {format_time(best.optimizer_time)}",
        ),
        ("Proof", proof),
        *(("Without" if i == 0 else "", text) for i, text in enumerate(others(found))),
        (
            "Columns",
            "Ranks: pipeline x replicas x tensor-parallel ranks, c: context-parallel, e: expert-parallel ranks, n: replicas on "
            "neighbouring ranks, not pipelines; Batches: microbatches x samples; Schedule x stages of a rank, or how many "
            "ways were left without a plan, with what the best of them takes at least; Shared: what replicas "
            "divide; Again: what the backward computes again, +host: and what that reads is offloaded",
        ),
        *(("", text) for text in _parts_legend(found)),
        *((("Left out", rest),) if rest else ()),
        ("Settings", f"placement_strategy: {placement}, optimizer {printable(found.optimizer)}"),
        *_not_settings(found),
    )


def others(found: Search) -> tuple[str, ...]:
    """For each degree and setting of the best candidate, the best planned one with another value, and what makes it slower."""
    best = found.best
    planned = [r for r in found.results if r.verdict is Verdict.SLOWER and not r.step_is_bound and r.step_time]
    rows = []
    for name, (title, shown) in _DIMENSIONS.items():
        own = getattr(best.candidate, name)
        other = min(
            (result for result in planned if getattr(result.candidate, name) != own),
            key=lambda result: result.step_time,
            default=None,
        )
        if other is not None:
            value = shown(getattr(other.candidate, name))
            rows.append(f"{title} {shown(own)}: {value}, {format_time(other.step_time)}, {printable(other.reason)}")
    if best.without:
        needs = f"the fastest cut needs {format_bytes(best.without)}, the limit is {format_bytes(found.memory_limit)}"
        rows.append(f"offloading: {needs}")
    return tuple(rows)


def _not_settings(found: Search) -> tuple[tuple[str, str], ...]:
    """The steps that a script has to do itself to train the best candidate, beside common settings."""
    candidate, rows = found.best.candidate, []
    if candidate.recompute != "model":
        names = found.options.recompute
        shown = ", ".join(map(printable, names[:2])) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
        rows.append(("", f"activation checkpointing of {shown} (docs/activation_checkpointing.md)"))
    if candidate.offload:
        text = f"offload_activations: true, activation_loading_horizon: {candidate.offload} (docs/activation_checkpointing.md)"
        rows.append(("", text))
    if candidate.expert_parallel_degree > 1:
        rows.append(
            (
                "",
                f"expert_parallel_degree: {candidate.expert_parallel_degree} divides the experts (docs/expert_parallelism.md)",
            )
        )
        if candidate.tensor_parallel_degree > 1:
            rows.append(
                ("", "beside tensor parallelism a script has a rank's experts whole; smpc.v2 cuts them once more")
            )
    return tuple(rows)


def _shown_results(found: Search) -> tuple[Result, ...]:
    """The results of a search that its report shows."""
    by_time = [result for result in found.results if result.verdict in (Verdict.BEST, Verdict.SLOWER)][:_SHOWN]
    others = [
        result
        for verdict in (Verdict.OPEN, Verdict.MEMORY, Verdict.IMPOSSIBLE)
        for result in [result for result in found.results if result.verdict is verdict][:_CLOSEST]
    ]
    return (*by_time, *others)


def _result_row(found: Search, result: Result) -> tuple[str, ...]:
    """A result of a search, as a row of its table."""
    candidate = result.candidate
    near = " n" if candidate.placement_strategy in ("spread", "PDT") else ""
    tensor = f" x {candidate.tensor_parallel_degree}" if candidate.tensor_parallel_degree > 1 else ""
    context = f" c{candidate.context_parallel_degree}" if candidate.context_parallel_degree > 1 else ""
    expert = f" e{candidate.expert_parallel_degree}" if candidate.expert_parallel_degree > 1 else ""
    pieces = f" x{candidate.virtual_pipeline_degree}" if candidate.virtual_pipeline_degree > 1 else ""
    step = f"{'> ' if result.step_is_bound else ''}{format_time(result.step_time)}" if result.step_time else "-"
    peak = f"{'> ' if result.peak_is_bound else ''}{format_bytes(result.peak_bytes)}" if result.peak_bytes else "-"
    again = _again_in_table(candidate.recompute) + ("+host" if candidate.offload else "")
    own = (f"{candidate.schedule}{pieces}", _SHARED[candidate.sharding], again)
    if result.ways > 1:  # all that is left of its ranks and batches, none of them planned
        own = (f"{result.ways} ways", "", "")
    return (
        "best" if result.verdict is Verdict.BEST else "",
        f"{candidate.pipeline_parallel_degree} x {candidate.data_parallel_degree}{tensor}{context}{expert}{near}",
        f"{candidate.microbatches} x {candidate.microbatch_size}",
        *own,
        step,
        peak,
        _why_not(found, result),
    )


def _why_not(found: Search, result: Result) -> str:
    """The reason in a few words; `Result.reason` has all of them."""
    if result.verdict is Verdict.OPEN:
        return f"up to {1.0 - result.step_time / found.best.step_time:.1%} faster, not planned"
    if result.verdict is Verdict.MEMORY:
        return f"memory {result.peak_bytes / found.memory_limit - 1.0:+.1%}"
    if result.verdict is Verdict.IMPOSSIBLE:
        reason = printable(result.reason)
        return reason if len(reason) <= _WORDS else f"{reason[: _WORDS - 3]}..."
    return printable(result.reason)
