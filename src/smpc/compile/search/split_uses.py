"""What is in flight beside each action of a schedule, in arrays: for guesses of memory where backwards are split, or ranks have several
stages.

    split = splits("zb-v", 128, 2, 512)      None where a formula says it (`profile.in_flight`)
    split.actions[Op.FORWARD].own.waiting    by action, microbatches of the same stage that wait for their backwards

After three times as many microbatches as there are stages, it is the same again and again. For a long schedule, it is taken from a short
one of fewer ranks and scaled by the number of ranks: what is in flight grows with the ranks. Then it is what a stage has beside its own
actions alone, as if all stages of a rank were fullest at once. Compared with schedules that are gone through, it is up to 6% too much.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smpc.codegen.offload import action_uses
from smpc.codegen.program import Op
from smpc.codegen.schedules.named import choose
from smpc.codegen.simulate import Costs, chain
from smpc.partitioner.memory.memory_by_action import ActionUse, Beside
from smpc.partitioner.stage_costs import IntArray

_ROUND = 3  # times the stages: microbatches that show all that a schedule of more has in flight
_LONG = 2000  # microbatches of stages whose actions take too long to go through for a guess
_FEW = 24  # ranks that show what the ranks of a long schedule have


@dataclass(frozen=True, slots=True, eq=False)
class BesideRows:
    """Some `Beside`, one a row, each of a stage. `is_first`: nothing has run before."""

    stage: IntArray
    waiting: IntArray
    deferred: IntArray
    has_gradients: NDArray[np.bool_]
    is_first: NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Iterable[tuple[int, Beside]]) -> BesideRows:
        """By stage and what is beside it."""
        numbers = [(stage, b.waiting, b.deferred, b.has_gradients) for stage, b in rows]
        stage, waiting, deferred, has_gradients = np.asarray(numbers, dtype=np.int64).reshape(-1, 4).T
        exist = has_gradients.astype(bool)
        return cls(stage, waiting, deferred, exist, (waiting == 0) & (deferred == 0) & ~exist)


@dataclass(frozen=True, slots=True, eq=False)
class ActionRows:
    """What is beside actions: of their own stages, and of the rank's other stages, each of these beside the action of a row."""

    own: BesideRows
    others: BesideRows
    row: IntArray

    @classmethod
    def of(cls, kinds: Sequence[Sequence[Beside]]) -> ActionRows:
        """By stage."""
        own = [(stage, beside) for stage, kind in enumerate(kinds) for beside in kind]
        others = [(row, *other) for row, (_, beside) in enumerate(own) for other in beside.others]
        rows = np.asarray([row for row, *_ in others], dtype=np.int64)
        return cls(BesideRows.of(own), BesideRows.of((stage, beside) for _, stage, beside in others), rows)


@dataclass(frozen=True, slots=True, eq=False)
class SplitUses:
    """By kind of action (None: backwards in one part) what is beside it. `before_backward`: by stage, the most microbatches between F and
    B; `share_ranks`: other stages of a rank are known."""

    actions: Mapping[Op | None, ActionRows]
    before_backward: IntArray
    share_ranks: bool

    @classmethod
    def of(cls, uses: Sequence[ActionUse]) -> SplitUses:
        """The uses of all stages."""
        actions = {
            Op.FORWARD: ActionRows.of([use.forwards for use in uses]),
            Op.BACKWARD: ActionRows.of([use.backwards for use in uses]),
            Op.WEIGHT: ActionRows.of([use.weights for use in uses]),
            None: ActionRows.of([use.whole for use in uses]),
        }
        before = np.asarray([use.before_backward for use in uses], dtype=np.int64)
        return cls(actions, before, len(actions[Op.FORWARD].row) > 0)


def splits(schedule: str, num_ranks: int, num_pieces: int, microbatches: int) -> SplitUses | None:
    """The uses of a schedule where backwards are split, or ranks have several stages and it is not long; else None."""
    return _splits_of_shown(schedule, num_ranks, num_pieces, min(microbatches, _ROUND * num_ranks * num_pieces))


@functools.lru_cache(4096)
def _splits_of_shown(schedule: str, num_ranks: int, num_pieces: int, shown: int) -> SplitUses | None:
    """One for all schedules of which as many microbatches are gone through."""
    is_split, is_long = schedule.startswith("zb"), _is_long(num_ranks, num_pieces, shown)
    if not is_split and (is_long or num_pieces == 1):
        return None
    uses = (_uses_of_long if is_long else _uses_of_short)(schedule, num_ranks, num_pieces, shown)
    return None if uses is None else SplitUses.of(uses)


def _is_long(num_ranks: int, num_pieces: int, microbatches: int) -> bool:
    return num_ranks * num_pieces * microbatches > _LONG


@functools.lru_cache(1024)
def _uses_of_short(schedule: str, num_ranks: int, num_pieces: int, microbatches: int) -> tuple[ActionUse, ...] | None:
    """Once for all the long schedules that it stands for."""
    num_stages = num_ranks * num_pieces
    choice = choose(num_ranks, microbatches, schedule=schedule, num_pieces=num_pieces)
    return action_uses(choice.build(chain(num_stages), Costs.uniform(num_stages)), num_stages)


def _uses_of_long(schedule: str, num_ranks: int, num_pieces: int, microbatches: int) -> tuple[ActionUse, ...] | None:
    def fewer(ranks: int) -> int:
        return -(-microbatches * ranks // num_ranks)

    few = next(few for few in range(min(_FEW, num_ranks), 0, -1) if not _is_long(few, num_pieces, fewer(few)))
    uses = _uses_of_short(schedule, few, num_pieces, fewer(few))
    if uses is None:
        return None
    scaled = [use.alone.times(num_ranks / few, microbatches) for use in uses]
    return tuple(scaled[stage * few // num_ranks] for stage in range(num_ranks * num_pieces))
