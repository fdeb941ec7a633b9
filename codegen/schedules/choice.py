"""Which schedule runs, and on which placement: what the settings `pipeline`, `schedule` and `virtual_pipeline_degree` say.

    name              what it is                                         pieces per rank   placement of stage s
    gpipe             `simple`: all forwards, then all backwards         any               rank s % p
    1f1b              `interleaved`: a backward first when it is ready   any               rank s % p
    interleaved-1f1b  1F1B, v pieces per rank in turn                    2 or more         rank s % p
    zb-h1, zb-h2      zero bubble                                        1                 rank s
    zb-v              zero bubble on two pieces per rank                 2                 a V: 0 1 .. p-1 p-1 .. 1 0
    list              a search over the predicted times of the stages    any               a V if v = 2, else rank s % p

`schedule` is one of these names. Without it, `pipeline` chooses: "simple" is gpipe, "interleaved" is 1f1b with one piece
per rank and interleaved-1f1b with several. Only gpipe and 1f1b run on other placements too, and only 1f1b obeys
`active_microbatches`: the others have the number in flight that their docstrings state.

Example: `choose(4, 8)` is 1f1b on ranks (0, 1, 2, 3); `choose(4, 8, schedule="zb-v")` has 8 stages on ranks
(0, 1, 2, 3, 3, 2, 1, 0).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from smpc.codegen.actions import Schedule, peaks
from smpc.codegen.schedule import in_flight, scheduler
from smpc.codegen.schedules.search import search
from smpc.codegen.schedules.virtual import interleaved_1f1b, loop_placement
from smpc.codegen.schedules.zero_bubble import zb_h1, zb_h2
from smpc.codegen.schedules.zero_bubble_v import v_placement, zb_v
from smpc.codegen.simulate import Costs, Link
from smpc.errors import ConfigError

_SEED_NAMES = {"gpipe": "simple", "1f1b": "interleaved"}
# name -> (fewest pieces per rank, most, default); most 0: no limit
_PIECES = {
    "gpipe": (1, 0, 1),
    "1f1b": (1, 0, 1),
    "interleaved-1f1b": (2, 0, 2),
    "zb-h1": (1, 1, 1),
    "zb-h2": (1, 1, 1),
    "zb-v": (2, 2, 2),
    "list": (1, 0, 1),
}
NAMES = tuple(_PIECES)


@dataclass(frozen=True, slots=True)
class Choice:
    """A schedule by name, with everything but the times of the stages."""

    name: str
    num_ranks: int
    num_pieces: int
    num_microbatches: int
    active_microbatches: int

    @property
    def num_stages(self) -> int:
        """Pieces of all ranks."""
        return self.num_ranks * self.num_pieces

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage."""
        if self.num_pieces == 2 and self.name in ("zb-v", "list"):
            return v_placement(self.num_ranks)
        return loop_placement(self.num_ranks, self.num_pieces)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """By stage, the most microbatches in flight."""
        if self.name in _SEED_NAMES:
            seed_name = _SEED_NAMES[self.name]
            return in_flight(seed_name, self.num_stages, self.num_microbatches, self.active_microbatches)
        return peaks(self._named(self._start if self.name == "list" else self.name), self.num_stages)

    def build(self, links: Sequence[Link], costs: Costs) -> Schedule:
        """The schedule. Links and costs matter to `list` alone, which holds no more in flight than `in_flight` says."""
        if self.name != "list":
            return self._named(self.name)
        start = self._named(self._start)
        return search(self.placement, self.num_microbatches, links, costs, starts=(start,), in_flight=self.in_flight)

    @property
    def _start(self) -> str:
        """The best named schedule on the placement of `list`."""
        return {1: "zb-h1", 2: "zb-v"}.get(self.num_pieces, "interleaved-1f1b")

    def _named(self, name: str) -> Schedule:
        if name in _SEED_NAMES:
            build = scheduler(_SEED_NAMES[name])
            return build(self.num_stages, self.placement, self.num_microbatches, self.active_microbatches)
        if name == "interleaved-1f1b":
            return interleaved_1f1b(self.num_ranks, self.num_pieces, self.num_microbatches)
        return {"zb-h1": zb_h1, "zb-h2": zb_h2, "zb-v": zb_v}[name](self.num_ranks, self.num_microbatches)


def choose(
    num_ranks: int,
    num_microbatches: int,
    *,
    pipeline: str = "interleaved",
    schedule: str | None = None,
    num_pieces: int | None = None,
    active_microbatches: int | None = None,
) -> Choice:
    """The schedule that the settings name. `num_pieces` is `virtual_pipeline_degree`; None: what the schedule needs.

    By default as many microbatches are active as there are stages, plus two. ConfigError for a name that does not exist
    or pieces that the schedule cannot have.
    """
    scheduler(pipeline)
    if schedule is None:
        several = (num_pieces or 1) > 1
        name = "gpipe" if pipeline == "simple" else "interleaved-1f1b" if several else "1f1b"
    else:
        name = schedule
        if name not in _PIECES:
            close = difflib.get_close_matches(name, NAMES, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"schedule: expected one of {', '.join(map(repr, NAMES))}, found {name!r}{hint}")
    fewest, most, default = _PIECES[name]
    pieces = default if num_pieces is None else num_pieces
    if pieces < fewest or (most and pieces > most):
        expected = f"{fewest}" if fewest == most else f"at least {fewest}"
        raise ConfigError(f"virtual_pipeline_degree: expected {expected} for the {name} schedule, found {pieces}")
    active = min(active_microbatches or num_ranks * pieces + 2, num_microbatches)
    return Choice(name, num_ranks, pieces, num_microbatches, active)
