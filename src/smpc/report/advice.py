"""The gain and price of other settings: at most three findings about a plan, each planned and simulated, none guessed.

    advice(options, planned)
    ("--memory-weight 0: step 18.7% shorter, peak 42.8 of 74.5 GiB (now 31.0 GiB)", ...)

    outlook(options, planned)    these, with where the step's time goes and what the memory is; for terminals, pages and notebooks

It tries the memory weight, if it is above 0; to compute nothing again, if that was asked for; and, if at least a tenth of the ranks' time
is bubble, other schedules and more stages on a rank. Each is planned with everything else unchanged, without proof. A setting that does
not fit the device's memory (or the limit), or gains less than one percent, is not reported. A bubble over a quarter always gets a finding:
if no schedule helps, more microbatches do, and the finding says how far. A plan that needs far more memory than there is has other
problems: nothing is tried.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from smpc.compile.options import PipelineOptions
from smpc.compile.passes import plan_trace
from smpc.compile.replica_traffic import StepSurroundings
from smpc.compile.result import Planned
from smpc.compile.step_breakdown import StepParts, step_parts
from smpc.errors import SmpcError
from smpc.partitioner.planner import rank_peaks
from smpc.report.format import format_bytes
from smpc.report.memory_curve import memory_curves
from smpc.report.predict import predict
from smpc.report.tables import host_lines, memory_line, step_lines

_MOST = 3
_WORTH = 0.01  # of the step
_BUBBLE, _LARGE_BUBBLE = 0.1, 0.25
_NEAR = 1.5  # of the memory that there is: beyond, no schedule makes a plan fit, and a step that cannot run is not worth a shorter one
_OTHERS = (("zb-h1", 1), ("interleaved-1f1b", 2), ("zb-v", 2), ("interleaved-1f1b", 4))


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to train, as planned: seconds of its step, its bubble, bytes of the fullest rank and of all ranks on average."""

    seconds: float
    bubble: float
    peak: int
    mean_peak: float


def advice(options: PipelineOptions, planned: Planned) -> tuple[str, ...]:
    """The findings, the largest gain first; none for plans that were cut by hand or by measured times."""
    traced = planned.traced
    if options.manual is not None or options.skip_tracing or traced is None or traced.is_measured:
        return ()
    now, limit = _way(options, planned), options.limit_bytes or options.devices[0].memory_bytes
    found: list[tuple[float, str]] = []
    if options.memory_weight:  # None: the fastest plan that fits is what there is
        changed = dataclasses.replace(options, memory_weight=0.0)
        found += _setting(changed, planned, now, limit, "--memory-weight 0")
    if options.recompute and now.peak <= limit:
        changed = dataclasses.replace(options, recompute=())
        found += _setting(changed, planned, now, limit, "without --recompute")
    if now.bubble >= _BUBBLE and options.pipeline_parallel_degree > 1 and now.peak <= _NEAR * limit:
        ways = _schedules(options, planned, now, limit)
        if not ways and now.bubble > _LARGE_BUBBLE:
            ways = [(0.0, _more_microbatches(planned, now))]
        found += ways
    return tuple(text for _, text in sorted(found, reverse=True)[:_MOST])


@dataclass(frozen=True, slots=True)
class Outlook:
    """Where the time of a step goes, the most bytes that a rank holds and may hold, and what other settings would gain.

    `is_assumed`: times are for an assumed device, not for this machine.
    """

    parts: StepParts
    is_assumed: bool
    peak: int
    limit: int
    advice: tuple[str, ...]
    host: tuple[tuple[str, str], ...] = ()  # what is offloaded

    def lines(self) -> tuple[tuple[str, str], ...]:
        """Labels and texts."""
        advice = ((("Advice" if i == 0 else ""), text) for i, text in enumerate(self.advice))
        return (*step_lines(self.parts, self.is_assumed), memory_line(self.peak, self.limit), *self.host, *advice)


def outlook(options: PipelineOptions, planned: Planned) -> Outlook:
    """The advice on a plan that was made from a trace."""
    assert planned.traced is not None, "it was planned from a trace"
    return Outlook(
        step_parts(planned.traced, planned.plan, planned.timeline, StepSurroundings.of(options), options.recompute),
        any(device.is_assumed for device in options.devices) and not planned.traced.is_measured,
        max(curve.peak_bytes for curve in memory_curves(planned.plan, planned.timeline)),
        min(options.limit_bytes or device.memory_bytes for device in options.devices),
        advice(options, planned),
        host_lines(planned.plan, planned.timeline),
    )


def _setting(changed: PipelineOptions, planned: Planned, now: _Way, limit: int, flag: str) -> list[tuple[float, str]]:
    """What the same with one setting changed gains, if that is worth a finding."""
    free = _planned(_without_limit(changed), planned)
    other = _fitting(changed, planned, free, limit) if free is not None and _gain(now, free) > _WORTH else None
    if other is None or _gain(now, other) <= _WORTH:
        return []
    return [(_gain(now, other), f"{flag}: {_gain_as_text(now, other, limit)}")]


def _schedules(options: PipelineOptions, planned: Planned, now: _Way, limit: int) -> list[tuple[float, str]]:
    """The schedule that gains the most, if one does. A limit makes none faster: what gains most without one comes first."""
    ways: list[tuple[float, str, PipelineOptions, _Way]] = []
    for schedule, pieces in _OTHERS:
        if (options.schedule, options.virtual_pipeline_degree) == (schedule, pieces):
            continue
        flags = f"--schedule {schedule}" + (f" --virtual-pipeline-degree {pieces}" if pieces > 1 else "")
        try:
            changed = dataclasses.replace(options, schedule=schedule, virtual_pipeline_degree=pieces)
        except SmpcError:
            continue
        free = _planned(_without_limit(changed), planned)
        if free is not None:
            ways.append((_gain(now, free), flags, changed, free))
    best = _WORTH, ""
    for most, flags, changed, free in sorted(ways, key=lambda way: way[:2], reverse=True):
        if most <= best[0]:
            break
        other = _fitting(changed, planned, free, limit)
        if other is not None and _gain(now, other) > best[0]:
            bubble = f"bubble {now.bubble:.0%} to {other.bubble:.0%}"
            best = _gain(now, other), f"{flags}: {bubble}, {_gain_as_text(now, other, limit)}"
    return [best] if best[1] else []


def _more_microbatches(planned: Planned, now: _Way) -> str:
    """How small the bubble is with more microbatches of the same size."""
    number = planned.plan.schedule.num_microbatches
    other = predict(planned.plan, num_microbatches=4 * number)
    return (
        f"--microbatches {4 * number} of the same size, a batch four times as large: bubble {now.bubble:.0%} to "
        f"{other.schedule.bubble_fraction:.0%}"
    )


def _fitting(options: PipelineOptions, planned: Planned, free: _Way, limit: int) -> _Way | None:
    """Another way within the limit: as it is without one, or cut for it, if that is how it would be planned; None if it does not fit."""
    if free.peak <= limit:
        return free
    fits_device = options.memory_weight is None and not options.rank_cost_models
    if free.mean_peak > limit or (options.limit_bytes is None and not fits_device):
        return None
    way = _planned(dataclasses.replace(options, memory_limit=limit), planned)
    return way if way is not None and way.peak <= limit else None


def _without_limit(options: PipelineOptions) -> PipelineOptions:
    return dataclasses.replace(options, memory_limit=None, memory_weight=options.memory_weight or 0.0)


def _planned(options: PipelineOptions, planned: Planned) -> _Way | None:
    """Another way; None if there is none."""
    traced = planned.traced
    assert traced is not None
    try:
        return _way(options, plan_trace(dataclasses.replace(traced, times=None), options, prove=False))
    except SmpcError:
        return None


def _way(options: PipelineOptions, planned: Planned) -> _Way:
    assert planned.traced is not None
    parts = step_parts(planned.traced, planned.plan, planned.timeline, StepSurroundings.of(options), options.recompute)
    peaks = rank_peaks(planned.plan).values()
    return _Way(parts.total, planned.timeline.bubble_fraction, max(peaks), sum(peaks) / len(peaks))


def _gain(now: _Way, other: _Way) -> float:
    return 1.0 - other.seconds / now.seconds if now.seconds else 0.0


def _gain_as_text(now: _Way, other: _Way, limit: int) -> str:
    """What another way gains in time, and its peak."""
    return (
        f"step {_gain(now, other):.1%} shorter, peak {format_bytes(other.peak)} of {format_bytes(limit)} "
        f"(now {format_bytes(now.peak)})"
    )
