"""The predicted step in Chrome's trace event format, for https://ui.perfetto.dev and chrome://tracing.

One track for each rank with a slice for each action, two more for the copies of what it offloads, an arrow from each send to its receive,
and a counter for the memory of each rank. Times are microseconds. The same plan gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from smpc.codegen.offload import Copy
from smpc.codegen.program import Action, Op, backward, forward
from smpc.codegen.simulate import Event, Timeline
from smpc.partitioner.graph.plan import INPUTS, Plan
from smpc.report.memory_curve import memory_curves

_MICRO = 1e6
_CATEGORIES = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.WEIGHT: "deferred backward"}
_PROCESS = 0


def perfetto_json(plan: Plan, timeline: Timeline) -> str:
    """The content of timeline.json."""
    return trace_json(predicted_events(plan, timeline), {"plan": plan.fingerprint, "kind": "predicted"})


def predicted_events(plan: Plan, timeline: Timeline) -> list[dict[str, Any]]:
    """The events of the predicted step, under process 0."""
    return [
        *_predicted_names(plan, timeline),
        *_predicted_slices(timeline),
        *_predicted_messages(plan, timeline),
        *_memory_counters(plan, timeline),
    ]


def trace_json(events: Iterable[dict[str, Any]], other: Mapping[str, Any]) -> str:
    """A file of events, one a line. `other` is what else there is to know."""
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":[\n{lines}\n]}}\n'


def _predicted_names(plan: Plan, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The names of the ranks in the predicted trace."""
    title = f"{plan.model_class.rpartition('.')[2]}, predicted step"
    yield {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": title}}
    for rank in range(timeline.num_ranks):
        where = {"ph": "M", "pid": _PROCESS, "tid": rank}
        yield {**where, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield {**where, "name": "thread_sort_index", "args": {"sort_index": rank}}
    for track in dict.fromkeys(_perfetto_track(timeline, copy) for copy in timeline.copies):
        rank = track % timeline.num_ranks
        way = "to the host" if track < 2 * timeline.num_ranks else "from the host"
        where = {"ph": "M", "pid": _PROCESS, "tid": track}
        yield {**where, "name": "thread_name", "args": {"name": f"rank {rank}, {way}"}}
        yield {**where, "name": "thread_sort_index", "args": {"sort_index": rank}}


def _perfetto_track(timeline: Timeline, copy: Copy) -> int:
    """The number of the track of a direction of a rank's link."""
    return copy.rank + timeline.num_ranks * (1 if copy.op is Op.OFFLOAD else 2)


def _predicted_slices(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The actions in the predicted trace."""
    for event in timeline.events:
        action = event.action
        yield {
            "ph": "X",
            "pid": _PROCESS,
            "tid": event.rank,
            "ts": event.start * _MICRO,
            "dur": (event.end - event.start) * _MICRO,
            "name": f"{action.op}{action.microbatch}",
            "cat": _CATEGORIES[action.op],
            "args": {"stage": action.stage, "microbatch": action.microbatch},
        }
    for copy in timeline.copies:
        yield {
            "ph": "X",
            "pid": _PROCESS,
            "tid": _perfetto_track(timeline, copy),
            "ts": copy.start * _MICRO,
            "dur": (copy.end - copy.start) * _MICRO,
            "name": f"{copy.op} {copy.microbatch}",
            "cat": "offloading",
            "args": {"stage": copy.stage, "microbatch": copy.microbatch, "bytes": copy.num_bytes},
        }


def _predicted_messages(plan: Plan, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The messages in the predicted trace."""
    at = {event.action: event for event in timeline.events}
    number = 0
    for event in timeline.events:
        for receiver, num_bytes in _message_receivers(plan, event.action):
            target = at[receiver]
            if target.rank != event.rank:
                yield from _predicted_arrow(number, event, target, num_bytes)
                number += 1


def _message_receivers(plan: Plan, action: Action) -> Iterator[tuple[Action, int]]:
    """The actions that wait for a message from this one, and its bytes."""
    for edge in plan.edges:
        if edge.source == INPUTS:
            continue
        if action.op is Op.FORWARD and edge.source == action.stage:
            yield forward(edge.destination, action.microbatch), edge.num_bytes
        elif action.op is Op.BACKWARD and edge.destination == action.stage and edge.gradient_bytes:
            yield backward(edge.source, action.microbatch), edge.gradient_bytes


def _predicted_arrow(number: int, source: Event, target: Event, num_bytes: int) -> Iterator[dict[str, Any]]:
    """One message in the predicted trace."""
    # An arrow belongs to the slice around its end: just before the end of the sender, at the start of the receiver.
    leaves = source.end - (source.end - source.start) / 1000
    common = {"pid": _PROCESS, "id": number, "cat": "message", "name": "message", "args": {"bytes": num_bytes}}
    yield {"ph": "s", "tid": source.rank, "ts": leaves * _MICRO, **common}
    yield {"ph": "f", "bp": "e", "tid": target.rank, "ts": target.start * _MICRO, **common}


def _memory_counters(plan: Plan, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The memory of ranks in the predicted trace."""
    for curve in memory_curves(plan, timeline):
        for time, num_bytes in curve.points:
            args = {"static": curve.static_bytes, "activations": num_bytes - curve.static_bytes}
            yield {
                "ph": "C",
                "pid": _PROCESS,
                "name": f"memory of rank {curve.rank}",
                "ts": time * _MICRO,
                "args": args,
            }
