"""Schedules: which forward and backward each pipeline rank runs, and in which order.

Terms
    p           number of stages; a stage waits for the one before it in forwards, for the one after it in backwards
    m           number of microbatches
    active      the most microbatches that may be between their first forward and their last backward
                (`active_microbatches`)
    in flight   microbatches of a stage whose forward has run and whose backward has not: their activations are kept
    placement   stage -> pipeline rank; a rank may have several stages: (1, 2, 1, 0)

Each schedule is a rule for the order of ONE stage's actions, as if every stage had a rank of its own. A rank with
several stages merges their orders: of the actions whose turn it is and whose values are there, a backward first, then
the oldest microbatch, in a simulation where a backward takes twice as long as a forward. The stages' orders never wait
for each other in a circle, so the merged ones do not either. Each stage runs its forwards and its backwards in
ascending order of microbatches: gradients are accumulated in the same order under every schedule, bit for bit.

Example: 1F1B for p = 3, m = 4 (`table`; the time of every action is taken as one):

    rank 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    rank 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    rank 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

Virtual stages: every rank runs v pieces of the model, and a microbatch goes round the ranks v times (1F1B,
interleaved; Megatron-LM, arXiv 2104.04473, section 2.3).

Terms
    p       number of ranks
    v       pieces per rank; stage s is on rank s % p, so piece s // p of that rank
    m       number of microbatches
    turn    p microbatches that a rank takes through one piece before it goes on with its next piece

Example: p = 2, v = 2, m = 4, backwards as long as forwards (`table`):

    rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 ... 2B2 ... 2B3 0B2 0B3
    rank 1  ... 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 ...

`choose`: which schedule runs, and on which placement, by the settings `pipeline`, `schedule` and `virtual_pipeline_degree`, or by a file.

    name of `schedule`   what it is                                        pieces per rank   rank of stage s
    gpipe                `simple`: all forwards, then all backwards        any               s % p
    1f1b                 `interleaved`: a backward first when it is ready  any               s % p
    interleaved-1f1b     1F1B, v pieces per rank in turn                   2 or more         s % p
    zb-h1, zb-h2         zero bubble                                       1                 s
    zb-v                 zero bubble, two pieces per rank                  2                 a V: 0 1 .. p-1 p-1 .. 1 0
    list                 a search over the predicted times of the stages   any               1: s; else `passes`
    FILE.csv             what the file says (`read_csv`)                   as in the file    as in the file

Without `schedule`, `pipeline` chooses: "simple" is gpipe, "interleaved" is 1f1b with one piece per rank and
interleaved-1f1b with several. gpipe, 1f1b and list run on every placement. Several pieces of `list` are put so that they
go down the ranks and up again (`passes`): an even number v in v passes, which makes for the shortest ramps; an odd one in
two, (v + 1) / 2 pieces of a rank on the way down and the others on the way up, which makes for the fewest messages. Only
1f1b obeys `active_microbatches`: the others have as many in flight as their docstrings say.

Example: `choose(4, 8)` is 1f1b on ranks (0, 1, 2, 3); `choose(4, 8, schedule="zb-v")` has 8 stages, on ranks
(0, 1, 2, 3, 3, 2, 1, 0).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from smpc.codegen.program import Action, Schedule, backward, forward, peaks, rank_peaks, split_backwards
from smpc.codegen.schedules.csv_file import read_csv
from smpc.codegen.schedules.list_scheduler import search
from smpc.codegen.schedules.zero_bubble import v_placement, zb_h1, zb_h2, zb_v
from smpc.codegen.simulate import Costs, Transfer, chain, merge, simulate, timeline_text
from smpc.config.numbers import shown, size_violation
from smpc.errors import ConfigError, ScheduleError, printable

_ALIASES = {"gpipe": "simple", "1f1b": "interleaved"}
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

Scheduler = Callable[[int, Sequence[int], int, int], Schedule]


def simple(num_stages: int, placement: Sequence[int], num_microbatches: int, active_microbatches: int) -> Schedule:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965).

    Bubble (p - 1) / (m + p - 1) on balanced stages, one to a rank. In flight: m on every stage, whatever
    `active_microbatches` says, since no backward starts before the last forward.
    """
    _check_schedule_sizes(num_stages, placement, num_microbatches, active_microbatches)
    microbatches = range(num_microbatches)
    return _merge_stages(
        [_forwards(s, microbatches) + _backwards(s, microbatches) for s in range(num_stages)], placement
    )


def interleaved(num_stages: int, placement: Sequence[int], num_microbatches: int, active_microbatches: int) -> Schedule:
    """1F1B: a backward first when it is ready (PipeDream-Flush, arXiv 2006.09503; arXiv 2104.04473, section 2.2).

    A stage takes a backward whenever it can, otherwise a forward, as long as at most w = min(m, p - s, active)
    microbatches are in flight on stage s. If active >= min(m, p) that is w forwards, then a backward and a forward in
    turn, then the remaining backwards; a lower limit makes waves of microbatches, with more idle time between them.
    More than p - s in flight are of no use as long as messages take no time: before microbatch 0 is
    back, it needs p - s - 1 forwards and as many backwards of later stages, and on balanced stages p - s - 1 more
    forwards of stage s are all that the later ones can take on until then. One more would only hold its activations.

    Bubble (p - 1) / (m + p - 1) on balanced stages, one to a rank, if active >= min(m, p).
    In flight on stage s: w, under any placement.
    """
    _check_schedule_sizes(num_stages, placement, num_microbatches, active_microbatches)
    return _merge_stages(
        _backward_first(num_microbatches, _peaks(num_stages, num_microbatches, active_microbatches)), placement
    )


def evaluation(num_stages: int, placement: Sequence[int], num_microbatches: int) -> Schedule:
    """Forwards only. Bubble (p - 1) / (m + p - 1); nothing is kept for a backward."""
    _check_schedule_sizes(num_stages, placement, num_microbatches, 1)
    return _merge_stages([_forwards(stage, range(num_microbatches)) for stage in range(num_stages)], placement)


SCHEDULES: Mapping[str, Scheduler] = MappingProxyType({"interleaved": interleaved, "simple": simple})


def scheduler(name: str) -> Scheduler:
    """The schedule of that name; ConfigError names the closest one if there is none."""
    if name not in SCHEDULES:
        known = ", ".join(repr(known) for known in SCHEDULES)
        close = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"pipeline: expected one of {known}, found {name!r}{hint}")
    return SCHEDULES[name]


def in_flight(name: str, num_stages: int, num_microbatches: int, active_microbatches: int) -> tuple[int, ...]:
    """By stage, the most microbatches whose activations the schedule of that name holds at once, under any placement.

    simple: m. interleaved: min(m, p - s, active) on stage s.
    """
    scheduler(name)
    _check_schedule_sizes(num_stages, range(num_stages), num_microbatches, active_microbatches)
    if name == "simple":
        return (num_microbatches,) * num_stages
    return _peaks(num_stages, num_microbatches, active_microbatches)


def table(schedule: Schedule) -> str:
    """A row for each rank, a column for each unit of time, every action taking one: see the module docstring.

    Backwards are either all split or none.
    """
    num_stages = 1 + max((action.stage for actions in schedule for action in actions), default=-1)
    backward_time = 2.0 if any(split_backwards(actions) for actions in schedule) else 1.0
    timeline = simulate(schedule, chain(num_stages), Costs.uniform(num_stages, backward=backward_time))
    return timeline_text(timeline, max_columns=max(1, round(timeline.makespan)))


def _peaks(num_stages: int, num_microbatches: int, active: int) -> tuple[int, ...]:
    return tuple(min(num_microbatches, num_stages - stage, active) for stage in range(num_stages))


def _forwards(stage: int, microbatches: range) -> tuple[Action, ...]:
    return tuple(forward(stage, microbatch) for microbatch in microbatches)


def _backwards(stage: int, microbatches: range) -> tuple[Action, ...]:
    return tuple(backward(stage, microbatch) for microbatch in microbatches)


def _backward_first(num_microbatches: int, peaks: Sequence[int]) -> list[tuple[Action, ...]]:
    """The order of each stage on a rank of its own, with at most `peaks[stage]` microbatches in flight."""
    microbatches, num_stages = range(num_microbatches), len(peaks)
    sequences = [(s, order(s, microbatches)) for s in range(num_stages) for order in (_forwards, _backwards)]
    costs = Costs.uniform(num_stages)
    return list(merge(sequences, chain(num_stages), costs, num_ranks=num_stages, in_flight=peaks).schedule)


def _merge_stages(orders: Sequence[tuple[Action, ...]], placement: Sequence[int]) -> Schedule:
    """The orders of the stages as orders of the ranks."""
    num_stages, num_ranks = len(orders), max(placement) + 1
    sequences = list(zip(placement, orders, strict=True))
    return merge(sequences, chain(num_stages), Costs.uniform(num_stages), num_ranks=num_ranks).schedule


def _check_schedule_sizes(num_stages: int, placement: Sequence[int], num_microbatches: int, active: int) -> None:
    """Raises an error for numbers of stages, ranks and microbatches that no schedule has."""
    problems = []
    if num_stages < 1 or len(placement) != num_stages:
        problems.append(f"expected a rank for each of {num_stages} stages, at least one; found {tuple(placement)}")
    if any(rank < 0 for rank in placement):
        problems.append(f"expected pipeline ranks from 0, found {tuple(placement)}")
    if num_microbatches < 1:
        problems.append(f"expected at least one microbatch, found {num_microbatches}")
    if active < 1:
        problems.append(f"expected at least one active microbatch, found {active}")
    if problems:
        raise ScheduleError("\n".join(problems))


def loop_placement(num_ranks: int, num_pieces: int) -> tuple[int, ...]:
    """The rank of each stage: stage s is on rank s % p."""
    return tuple(stage % num_ranks for stage in range(num_ranks * num_pieces))


def interleaved_1f1b(num_ranks: int, num_pieces: int, num_microbatches: int) -> Schedule:
    """1F1B over v pieces per rank.

    Rank r runs min(v m, 2 (p - r - 1) + (v - 1) p) forwards, then a forward and a backward in turn, then the remaining
    backwards. Its forwards take p microbatches through the first piece, the same ones through the second, and so on, then
    the next p; its backwards likewise, from the last piece to the first.

    Bubble (p - 1) / (v m + p - 1) on balanced pieces if p divides m. In flight on rank 0, in shares of a rank (v pieces
    are one): p + (p - 1) / v; rank r holds 2 r / v less. With fewer microbatches than that, v m pieces.

    If p does not divide m, it is the schedule for the next multiple of p, without the missing microbatches. No action
    is later than in that schedule, so a step takes at most as long as with ceil(m / p) p microbatches.
    """
    total = -(-num_microbatches // num_ranks) * num_ranks * num_pieces
    order = []
    for rank in range(num_ranks):
        forwards = [forward(s, m) for s, m in _forward_turns(rank, num_ranks, num_pieces, total)]
        backwards = [
            backward(num_ranks * num_pieces - 1 - s, m)
            for s, m in _forward_turns(num_ranks - 1 - rank, num_ranks, num_pieces, total)
        ]
        warm_up = min(total, 2 * (num_ranks - rank - 1) + (num_pieces - 1) * num_ranks)
        actions = [*forwards[:warm_up], *_alternate(forwards[warm_up:], backwards), *backwards[total - warm_up :]]
        order.append(tuple(action for action in actions if action.microbatch < num_microbatches))
    return tuple(order)


def _forward_turns(rank: int, num_ranks: int, num_pieces: int, total: int) -> Iterator[tuple[int, int]]:
    """(stage, microbatch) of a rank's forwards, in order."""
    for index in range(total):
        turn, within = divmod(index, num_ranks * num_pieces)
        piece, offset = divmod(within, num_ranks)
        yield piece * num_ranks + rank, turn * num_ranks + offset


def _alternate(forwards: list[Action], backwards: list[Action]) -> Iterator[Action]:
    """A forward and a backward in turn, as long as there are forwards."""
    for ahead, back in zip(forwards, backwards, strict=False):
        yield ahead
        yield back


@dataclass(frozen=True, slots=True)
class Choice:
    """A schedule by name, on a placement (stage -> rank). gpipe and 1f1b have the names that `pipeline` gives them.

    A file is read again whenever its schedule is asked for. ConfigError if there is no schedule of that name.
    """

    name: str
    placement: tuple[int, ...]
    num_microbatches: int
    active_microbatches: int

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES and (self.name in _ALIASES or self.name not in NAMES) and not _is_file(self.name):
            scheduler(self.name)
        _check_size(self.name, len(self.placement), self.num_microbatches)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """By stage, the most microbatches in flight; for `list`, the number for balanced stages: `build` may have others."""
        num_stages = len(self.placement)
        if self.name in SCHEDULES:
            return in_flight(self.name, num_stages, self.num_microbatches, self.active_microbatches)
        return peaks(self._typical if self.name == "list" else self._named(self.name), num_stages)

    def build(self, links: Sequence[Transfer], costs: Costs, in_flight: Sequence[int] | None = None) -> Schedule:
        """The schedule. Links and costs matter to `list` alone.

        A rank of `list` holds no more (stage, microbatch) than balanced stages need, but may share them among its stages
        in another way. With `in_flight`, and if that is not within it, it shares them as `Choice.in_flight` says.
        ScheduleError if the placement is not the schedule's.
        """
        if self.name != "list":
            return self._named(self.name)
        start, num_stages = self._typical, len(self.placement)
        found = search(
            self.placement, self.num_microbatches, links, costs, starts=(start,), slots=self._slots or rank_peaks(start)
        )
        if in_flight is None or all(a <= b for a, b in zip(peaks(found, num_stages), in_flight, strict=True)):
            return found
        return search(
            self.placement,
            self.num_microbatches,
            links,
            costs,
            starts=(start,),
            in_flight=peaks(start, num_stages),
            slots=rank_peaks(start),
        )

    @property
    def _slots(self) -> tuple[int, ...]:
        """The limit in flight of the ranks of `list` if no named schedule gives one: p microbatches of a whole rank."""
        num_stages, num_ranks = len(self.placement), self._num_ranks
        num_pieces = num_stages // num_ranks
        if num_pieces < 3 or self.placement != passes(num_ranks, num_pieces):
            return ()
        return (num_ranks * num_pieces,) * num_ranks

    @property
    def _typical(self) -> Schedule:
        """The start of `list`, before times are known: the named schedule of the placement, or what a search for
        balanced stages finds; odd numbers of pieces are for slow messages, so for these one takes a tenth of a rank's
        forward."""
        slots = self._slots
        if not slots:
            return self._start
        num_stages = len(self.placement)
        num_pieces = num_stages // self._num_ranks
        latency = 0.1 * num_pieces if num_pieces % 2 else 0.0
        costs = Costs((1.0,) * num_stages, (2.0,) * num_stages, latency)
        return search(self.placement, self.num_microbatches, chain(num_stages), costs, slots=slots, moves=0)

    @property
    def _num_ranks(self) -> int:
        return max(self.placement) + 1

    @property
    def _start(self) -> Schedule:
        """The best named schedule on the placement."""
        num_stages, num_ranks = len(self.placement), self._num_ranks
        if self.placement == v_placement(num_ranks):
            return self._named("zb-v")
        if self.placement == tuple(range(num_ranks)):
            return self._named("zb-h1")
        if num_stages % num_ranks == 0 and self.placement == loop_placement(num_ranks, num_stages // num_ranks):
            return self._named("interleaved-1f1b")
        return self._named("interleaved")

    def _named(self, name: str) -> Schedule:
        num_stages, num_ranks = len(self.placement), self._num_ranks
        if _is_file(name):
            schedule = read_csv(name)
            _check_file(name, schedule, self)
            return schedule
        if name in SCHEDULES:
            return scheduler(name)(num_stages, self.placement, self.num_microbatches, self.active_microbatches)
        num_pieces = num_stages // num_ranks
        expected = v_placement(num_ranks) if name == "zb-v" else loop_placement(num_ranks, num_pieces)
        if self.placement != expected:
            raise ScheduleError(f"the {name} schedule needs stages on ranks {expected}, found {self.placement}")
        if name == "interleaved-1f1b":
            return interleaved_1f1b(num_ranks, num_pieces, self.num_microbatches)
        return {"zb-h1": zb_h1, "zb-h2": zb_h2, "zb-v": zb_v}[name](num_ranks, self.num_microbatches)


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

    By default as many microbatches are active as there are ranks, plus two. ConfigError for a name that does not exist
    or pieces that the schedule cannot have.
    """
    scheduler(pipeline)
    if schedule is None:
        name = "gpipe" if pipeline == "simple" else "interleaved-1f1b" if (num_pieces or 1) > 1 else "1f1b"
    elif _is_file(schedule):
        return _choose_file(schedule, num_ranks, num_microbatches, num_pieces)
    else:
        name = schedule
        if name not in _PIECES:
            close = difflib.get_close_matches(name[:100], NAMES, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"schedule: expected one of {', '.join(map(repr, NAMES))} or a .csv file, found {shown(name)}{hint}"
            )
    fewest, most, default = _PIECES[name]
    pieces = default if num_pieces is None else num_pieces
    if pieces < fewest or (most and pieces > most):
        expected = f"{fewest}" if fewest == most else f"at least {fewest}"
        raise ConfigError(f"virtual_pipeline_degree: expected {expected} for the {name} schedule, found {pieces}")
    is_v = name == "zb-v" or (name == "list" and pieces > 1)
    _check_size(name, num_ranks * pieces, num_microbatches)
    placement = passes(num_ranks, pieces) if is_v else loop_placement(num_ranks, pieces)
    active = min(active_microbatches or num_ranks + 2, num_microbatches)
    return Choice(_ALIASES.get(name, name), placement, num_microbatches, active)


def passes(num_ranks: int, num_pieces: int) -> tuple[int, ...]:
    """Where `list` puts several pieces per rank, down the ranks and up again: see the module docstring.

    For 3 ranks: 2 pieces (0, 1, 2, 2, 1, 0); 3 pieces (0, 0, 1, 1, 2, 2, 2, 1, 0).
    """
    half = (num_pieces + 1) // 2
    lengths = (half, num_pieces - half) if num_pieces % 2 else (1,) * num_pieces
    ways = (range(num_ranks), range(num_ranks - 1, -1, -1))
    return tuple(rank for i, length in enumerate(lengths) for rank in ways[i % 2] for _ in range(length))


def _check_size(name: str, num_stages: int, num_microbatches: int) -> None:
    """Raise ConfigError for more actions than a schedule of that name is made of in any bearable time."""
    violation = size_violation(num_stages, num_microbatches, searched=name == "list")
    if violation:
        raise ConfigError(violation)


def _is_file(name: str) -> bool:
    return name.endswith(".csv")


def _choose_file(path: str, num_ranks: int, num_microbatches: int, num_pieces: int | None) -> Choice:
    schedule = read_csv(path)
    found = {action.stage: rank for rank, actions in enumerate(schedule) for action in actions}
    placement = tuple(found.get(stage, 0) for stage in range(max(found) + 1))
    choice = Choice(path, placement, num_microbatches, num_microbatches)
    _check_file(path, schedule, choice, num_ranks)
    if num_pieces is not None and len(placement) != num_ranks * num_pieces:
        raise ConfigError(
            f"virtual_pipeline_degree: {num_pieces} on {num_ranks} ranks needs {num_ranks * num_pieces} stages, but "
            f"{printable(path)} has {len(placement)}; leave it out"
        )
    return choice


def _check_file(path: str, schedule: Schedule, choice: Choice, num_ranks: int | None = None) -> None:
    """Whether a file is for these stages, ranks and microbatches; the verifier checks everything else."""
    actions = [(rank, action) for rank, row in enumerate(schedule) for action in row]
    ranks = choice._num_ranks if num_ranks is None else num_ranks
    wrong = []
    if len(schedule) != ranks:
        wrong.append(f"expected a row for each of {ranks} pipeline ranks, found {len(schedule)}")
    microbatches = 1 + max(action.microbatch for _, action in actions)
    if microbatches != choice.num_microbatches:
        wrong.append(f"expected {choice.num_microbatches} microbatches, found {microbatches}")
    placement = dict(enumerate(choice.placement))
    stages = sorted({action.stage for _, action in actions})
    if stages != list(placement):
        wrong.append(f"expected the stages {shown(list(placement))}, found {shown(stages)}")
    elsewhere = sorted({action.stage for rank, action in actions if placement.get(action.stage, rank) != rank})
    wrong += [
        f"expected stage {stage} in row {placement[stage] + 1} alone, where it is found too" for stage in elsewhere
    ]
    if wrong:
        raise ConfigError("\n".join(f"schedule: {printable(path)}: {line}" for line in wrong))
