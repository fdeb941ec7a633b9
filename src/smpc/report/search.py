"""What a search for the fastest way to train found, as text: the best, what else there was, and why it was rejected.

    print_search(found)         on stdout, as `smpc.report.terminal` does
    search_table(found)         the same as text cells

The table has the best candidate, the next ones by time, and, of each kind of rejection that those leave out, the one that came
closest; the last line counts the rest. Of a time or a peak that is only known to be at least so much, the table says `>`.
"""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.text import Text

from smpc.auto import Result, Search, Verdict
from smpc.report.format import count, format_bytes, format_time, printable
from smpc.report.tables import TextTable
from smpc.report.terminal import labelled, stdout_console, text_table

_SHOWN = 12  # candidates by time
_CLOSEST = 3  # of each other verdict
_WORDS = 30  # letters of a reason


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
    fitting = sum(result.verdict in (Verdict.BEST, Verdict.SLOWER) for result in found.results)
    return (
        f"{count(found.world_size, 'rank')} of {printable(found.device)}, a batch of {found.batch_size}, at most "
        f"{format_bytes(found.memory_limit)} each: {count(len(found.results), 'way')} to train, of which {fitting} may fit"
    )


def search_table(found: Search) -> TextTable:
    """Candidates with their steps and peaks; the best is marked."""
    headers = ("", "Ranks", "Batches", "Schedule", "Again", "Step", "Peak", "Why not")
    rows = tuple(_row(found, result) for result in _shown(found))
    return TextTable(headers, rows, left=("", "Schedule", "Again", "Why not"))


def search_summary(found: Search) -> tuple[tuple[str, str], ...]:
    """What the best step is made of, how to read the table, and what it leaves out."""
    best, left_out = found.best, Counter(result.verdict for result in found.results)
    left_out.subtract(result.verdict for result in _shown(found))
    names = {Verdict.SLOWER: "slower", Verdict.MEMORY: "over the memory limit", Verdict.IMPOSSIBLE: "impossible"}
    rest = ", ".join(f"{left_out[verdict]} {text}" for verdict, text in names.items() if left_out[verdict])
    placement = best.candidate.placement_strategy
    return (
        (
            "Best step",
            f"{format_time(best.step_time)}: pipeline {format_time(best.pipeline_time)}, sum of gradients over replicas "
            f"{format_time(best.reduce_time)} beyond it, optimizer {format_time(best.optimizer_time)}",
        ),
        (
            "Columns",
            "Ranks: pipeline x replicas x tensor-parallel ranks, n: replicas on neighbouring ranks, not pipelines; "
            "Batches: microbatches x samples; Schedule x stages of a rank; Again: what the backward computes again",
        ),
        *((("Left out", rest),) if rest else ()),
        ("Settings", f"placement_strategy: {placement}, optimizer {printable(found.optimizer)}"),
    )


def _shown(found: Search) -> tuple[Result, ...]:
    by_time = [result for result in found.results if result.verdict in (Verdict.BEST, Verdict.SLOWER)][:_SHOWN]
    others = [
        result
        for verdict in (Verdict.MEMORY, Verdict.IMPOSSIBLE)
        for result in [result for result in found.results if result.verdict is verdict][:_CLOSEST]
    ]
    return (*by_time, *others)


def _row(found: Search, result: Result) -> tuple[str, ...]:
    candidate = result.candidate
    near = " n" if candidate.placement_strategy in ("spread", "PDT") else ""
    tensor = f" x {candidate.tensor_parallel_degree}" if candidate.tensor_parallel_degree > 1 else ""
    pieces = f" x{candidate.virtual_pipeline_degree}" if candidate.virtual_pipeline_degree > 1 else ""
    step = f"{'> ' if result.step_is_bound else ''}{format_time(result.step_time)}" if result.step_time else "-"
    peak = f"{'> ' if result.peak_is_bound else ''}{format_bytes(result.peak_bytes)}" if result.peak_bytes else "-"
    return (
        "best" if result.verdict is Verdict.BEST else "",
        f"{candidate.pipeline_parallel_degree} x {candidate.data_parallel_degree}{tensor}{near}",
        f"{candidate.microbatches} x {candidate.microbatch_size}",
        f"{candidate.schedule}{pieces}",
        {"model": "-", "blocks": "blocks"}[candidate.recompute],
        step,
        peak,
        _why_not(found, result),
    )


def _why_not(found: Search, result: Result) -> str:
    """The reason in a few words; `Result.reason` has all of them."""
    if result.verdict is Verdict.MEMORY:
        return f"memory {result.peak_bytes / found.memory_limit - 1.0:+.1%}"
    if result.verdict is Verdict.IMPOSSIBLE:
        reason = printable(result.reason)
        return reason if len(reason) <= _WORDS else f"{reason[: _WORDS - 3]}..."
    return printable(result.reason)
