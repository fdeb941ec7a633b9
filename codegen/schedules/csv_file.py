"""Schedules in files: read from CSV files (`read_csv`) and written to them (`to_csv`) in the format of torch.distributed.pipelining
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
import io
import re
from collections.abc import Iterator
from pathlib import Path

from smpc.codegen.program import Action, Op, Schedule, split_backwards
from smpc.config.numbers import MAX_MICROBATCHES, MAX_STEPS, shown, size_violation
from smpc.config.user_files import read_text
from smpc.errors import ConfigError, printable

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
