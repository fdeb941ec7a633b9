"""Which schedule runs, and on which placement: by the settings `pipeline`, `schedule` and `virtual_pipeline_degree`, or by a CSV file.

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

Schedules are read from CSV files (`read_csv`) and written to them (`to_csv`) in the format of torch.distributed.pipelining
("compute_only"): a row for each rank, a cell for each action, in order:

    0F3     forward of stage 0 on microbatch 3
    0B3     its backward
    0I3     the part of its backward for the inputs; our `B` of a backward that has a `W`
    0W3     the part for the parameters

Empty cells are pauses and mean nothing here. `(1F2;0B1)OVERLAP_F_B` is its actions, one after the other. Cells of the
other format of torch ("compute_comms": SEND_F, RECV_B, UNSHARD, RESHARD, REDUCE_GRAD and so on) are passed over:
`smpc.codegen.lower` decides communication itself.

Example, two ranks and two microbatches, `simple`:

    0F0,0F1,0B0,0B1
    1F0,1F1,1B0,1B1
"""

from __future__ import annotations

import csv
import difflib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from smpc.codegen.program import Action, Op, Schedule, peaks, rank_peaks, split_backwards
from smpc.codegen.schedule import SCHEDULES, in_flight, interleaved_1f1b, loop_placement, scheduler
from smpc.codegen.schedules.search import search
from smpc.codegen.schedules.zero_bubble import v_placement, zb_h1, zb_h2, zb_v
from smpc.codegen.simulate import Costs, Transfer, chain
from smpc.config.files import read_text
from smpc.config.numbers import MAX_MICROBATCHES, MAX_STEPS, shown, size_violation
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


MAX_CSV_BYTES = 16 << 20
_CELL = re.compile(r"([0-9]{1,6})(F|I|W|B)([0-9]{1,6})")
_NUMBERED = re.compile(r"[0-9]+[FIWB][0-9]+")
_TOO_MANY = f"of at most {MAX_MICROBATCHES} microbatches and {MAX_STEPS} stages x microbatches, "
_COMMUNICATION = re.compile(r"[0-9]{1,6}(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)[0-9]{0,6}")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_OPS = {"F": Op.FORWARD, "B": Op.BACKWARD, "I": Op.BACKWARD, "W": Op.WEIGHT}


def read_csv(path: str | Path) -> Schedule:
    """The schedule in a file. ConfigError names the file and every cell that is wrong."""
    return parse_csv(read_text(path, f"schedule {path}", most=MAX_CSV_BYTES), str(path))


def parse_csv(text: str, origin: str) -> Schedule:
    """The schedule in a text; messages call it `origin`."""
    rows, wrong, letters = [], [], {}
    origin = printable(origin)
    for rank, row in enumerate(_csv_rows(text, origin)):
        actions = []
        for column, cell in enumerate(row):
            if not _is_known(cell):
                wrong.append(
                    f"schedule: {origin}, row {rank + 1}, cell {column + 1}: expected an action such as 0F3, 0B3, 0I3 "
                    f"or 0W3, {_TOO_MANY if _NUMBERED.fullmatch(cell.strip()) else ''}found {shown(cell)}"
                )
                continue
            for stage, letter, microbatch in () if _COMMUNICATION.fullmatch(cell.strip()) else _CELL.findall(cell):
                action = Action(_OPS[letter], int(stage), int(microbatch))
                actions.append(action)
                letters[letter, action.stage, action.microbatch] = f"row {rank + 1}, cell {column + 1}"
        rows.append(tuple(actions))
    for (letter, stage, microbatch), where in letters.items():
        needs = {"W": "I", "I": "W"}.get(letter)
        if needs and (needs, stage, microbatch) not in letters:
            found = f"{stage}{letter}{microbatch} without {stage}{needs}{microbatch}"
            wrong.append(f"schedule: {origin}, {where}: expected both parts of a split backward, found {found}")
    if not any(rows):
        wrong.append(f"schedule: {origin}: expected a row of actions for every rank, found none")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return tuple(rows)


def to_csv(schedule: Schedule) -> str:
    """The inverse of `parse_csv`."""
    lines = []
    for actions in schedule:
        split = split_backwards(actions)
        lines.append(",".join(_cells(actions, split)))
    return "".join(f"{line}\n" for line in lines)


def _cells(actions: tuple[Action, ...], split: frozenset[tuple[int, int]]) -> Iterator[str]:
    for action in actions:
        is_part = action.op is Op.BACKWARD and (action.stage, action.microbatch) in split
        yield f"{action.stage}{'I' if is_part else action.op}{action.microbatch}"


def _csv_rows(text: str, origin: str) -> Iterator[list[str]]:
    """The rows of a CSV file; malformed ones are a ConfigError."""
    reader = csv.reader(io.StringIO(text))
    try:
        yield from reader
    except csv.Error as error:  # a cell of more than 128 KiB, for instance
        raise ConfigError(f"schedule: {origin}, line {reader.line_num}: malformed CSV: {error}") from None


def _is_known(cell: str) -> bool:
    cell = cell.strip()
    if overlap := _OVERLAP.fullmatch(cell):
        return all(_is_action(part.strip()) for part in overlap[1].split(";"))
    return not cell or _is_action(cell) or bool(_COMMUNICATION.fullmatch(cell))


def _is_action(cell: str) -> bool:
    found = _CELL.fullmatch(cell)
    return found is not None and not size_violation(int(found[1]) + 1, int(found[3]) + 1)
