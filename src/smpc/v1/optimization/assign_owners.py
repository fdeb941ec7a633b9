"""Dealing parameters out to owners, so that all own about as many bytes: whole where it must be, in ranges of rows where that may be.

    deal([Lot(60_000, rows=100), Lot(9_000), Lot(600)], loads := [0, 0])
        [(Cut(owner=0, start=0, stop=43), Cut(owner=1, start=43, stop=100)), (Cut(owner=0),), (Cut(owner=1),)]
        and the loads are [34_800, 34_800]

Terms
    lot       a parameter: its bytes, and how many rows it has that may go to different owners; 0 rows: it goes to one owner
    granule   rows are cut at multiples of it
    load      the bytes that an owner has

What must stay whole goes first, from the largest to the smallest, each to the owner with the smallest load. Then the large lots that
may be cut, in their order, fill one owner after the other up to a common level: n owners make at most n - 1 cuts, and what an owner has
is a few long runs. Small lots, whole, even out what is left.

    level  ---------------------------
           | head     | head         |
           | (rest)   |--------------|     what must stay whole lies at the bottom, small lots on top
           |----------| embedding    |
           | whole    |              |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SMALLEST = 1 << 10  # bytes: smaller lots are not worth a cut
_SHARE = 1024  # nor are those that are less than this part of what each owner gets


@dataclass(frozen=True, slots=True)
class Lot:
    """What is dealt out; see the module's docstring."""

    size: int
    rows: int = 0
    granule: int = 1

    @property
    def may_be_cut(self) -> bool:
        """Whether it has rows for several owners."""
        return self.rows >= 2 * self.granule


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows of a lot that one owner gets; of a lot without rows, all of it."""

    owner: int
    start: int = 0
    stop: int = 0


def deal(lots: Sequence[Lot], loads: list[int]) -> list[tuple[Cut, ...]]:
    """The owners of each lot, in order of rows. `loads` of the owners are brought up to date."""
    share = (sum(loads) + sum(lot.size for lot in lots)) // len(loads)
    large = [i for i, lot in enumerate(lots) if lot.may_be_cut and lot.size >= max(_SMALLEST, share // _SHARE)]
    whole = sorted((i for i, lot in enumerate(lots) if not lot.may_be_cut), key=lambda i: -lots[i].size)
    known = {*large, *whole}
    small = sorted((i for i in range(len(lots)) if i not in known), key=lambda i: -lots[i].size)
    # The small ones among them may as well come last.
    first = [i for i in whole if lots[i].size >= share // _SHARE]
    last = sorted([*whole[len(first) :], *small], key=lambda i: -lots[i].size)
    found: dict[int, tuple[Cut, ...]] = {}
    for i in first:
        found[i] = (_least(lots[i], loads),)
    found |= _fill(lots, large, loads)
    for i in last:
        found[i] = (_least(lots[i], loads),)
    return [found[i] for i in range(len(lots))]


def _least(lot: Lot, loads: list[int]) -> Cut:
    owner = min(range(len(loads)), key=lambda owner: (loads[owner], owner))
    loads[owner] += lot.size
    return Cut(owner, 0, lot.rows)


def _fill(lots: Sequence[Lot], large: Sequence[int], loads: list[int]) -> dict[int, tuple[Cut, ...]]:
    """Owners one after the other, each up to the level that those left can reach together."""
    found: dict[int, list[Cut]] = {i: [] for i in large}
    left = sum(lots[i].size for i in large)
    queue = [(i, 0) for i in large]  # lot, first row that is left
    for owner in range(len(loads)):
        room = _level(loads[owner:], left) - loads[owner]
        is_last = owner == len(loads) - 1
        while queue and (room > 0 or is_last):
            i, start = queue.pop(0)
            stop = lots[i].rows if is_last else _stop(lots[i], start, room)
            size = _bytes(lots[i], start, stop)
            if stop > start:
                found[i].append(Cut(owner, start, stop))
                loads[owner] += size
                left -= size
                room -= size
            if stop < lots[i].rows:
                queue.insert(0, (i, stop))
                break
    return {i: tuple(cuts) for i, cuts in found.items()}


def _stop(lot: Lot, start: int, room: int) -> int:
    """Where to cut, so that the rows from `start` on fill the room as closely as possible."""
    granules = (room * lot.rows / lot.size) / lot.granule
    stop = start + round(granules) * lot.granule
    return lot.rows if lot.rows - stop < lot.granule else stop


def _bytes(lot: Lot, start: int, stop: int) -> int:
    return lot.size * stop // lot.rows - lot.size * start // lot.rows


def _level(loads: Sequence[int], left: int) -> int:
    """How high all that is left fills owners with these loads."""
    ordered = sorted(loads)
    filled = 0
    for count, load in enumerate(ordered, start=1):
        filled += load
        level = (left + filled) // count
        if count == len(ordered) or level <= ordered[count]:
            return level
    raise AssertionError("the last owner ends the search")
