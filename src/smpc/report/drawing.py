"""A timeline drawn with characters, as wide as the console allows.

`drawing` takes the wide form of `smpc.codegen.simulate.timeline_text` if every event can be seen in it, otherwise the
compact one, in which a column is a slice of time:

    rank 0  0-1-....0===1===
    rank 1  ..0-0===1-1===..
"""

from __future__ import annotations

from dataclasses import dataclass

from smpc.codegen.program import Op
from smpc.codegen.simulate import Timeline, timeline_text

_STROKES = {Op.FORWARD: "-", Op.BACKWARD: "=", Op.WEIGHT: "~"}


@dataclass(frozen=True, slots=True)
class Drawing:
    """Lines of text, what they mean, and regular expressions that find forwards and backwards in them.

    W, the deferred part of a backward, is found as a backward.
    """

    legend: str
    text: str
    forward: str
    backward: str


def drawing(timeline: Timeline, width: int) -> Drawing:
    """The timeline in at most `width` columns."""
    deferred = any(event.action.op is Op.WEIGHT for event in timeline.events)
    text = timeline_text(timeline, max_columns=width)
    if max(map(len, text.splitlines())) <= width and _is_faithful(timeline, text):
        more = ", W0: its rest" if deferred else ""
        legend = f"F0: forward of microbatch 0, B0: its backward{more}, --: it goes on, ..: idle"
        return Drawing(legend, text, forward=r"\d*F\d+ *( --+)*", backward=r"\d*[BW]\d+ *( --+)*")
    more = ", 0~~: its rest" if deferred else ""
    legend = f"0--: forward of microbatch 0 (last digit), 0==: its backward{more}, .: idle"
    return Drawing(legend, compact_timeline(timeline, width), forward=r"\d-*", backward=r"\d[=~]+")


def _is_faithful(timeline: Timeline, text: str) -> bool:
    """Whether every event has a cell of its own: short ones vanish where columns had to be widened."""
    return sum(text.count(letter) for letter in "FBW") == len(timeline.events)


def compact_timeline(timeline: Timeline, width: int) -> str:
    """A timeline as a row of single characters for each rank, at most `width` columns in all.

    An event starts with the last digit of its microbatch and goes on as `-` (forward), `=` (backward) or `~` (the deferred
    part of one); `.` is idle.
    An event shorter than a column may be hidden by its neighbour.

    rank 0  0-1-....0===1===
    rank 1  ..0-0===1-1===..
    """
    margin = len(f"rank {timeline.num_ranks - 1}  ")
    num_columns = max(1, width - margin)
    scale = num_columns / timeline.makespan if timeline.makespan else 0.0
    rows = [["."] * num_columns for _ in range(timeline.num_ranks)]
    for event in timeline.events:
        first = min(round(event.start * scale), num_columns - 1)
        last = max(first + 1, round(event.end * scale))
        rows[event.rank][first:last] = _STROKES[event.action.op] * (last - first)
        rows[event.rank][first] = str(event.action.microbatch % 10)
    return "".join(f"{f'rank {rank}':<{margin}}{''.join(row)}\n" for rank, row in enumerate(rows))
