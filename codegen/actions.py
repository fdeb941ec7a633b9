"""Actions: the forwards and backwards that a schedule orders, before communication is decided.

An action prints as the instruction that it becomes, and parses back:

    F s2 m0    forward of stage 2 on microbatch 0
    B s2 m0    its backward; if the schedule has a W s2 m0, the gradients of the stage's inputs alone
    W s2 m0    the gradients of its parameters: the rest of the backward

A `Schedule` holds, for each pipeline rank, its actions in the order in which it runs them. For two stages on two ranks:

    (("F s0 m0", "F s0 m1", "B s0 m0", "B s0 m1"),
     ("F s1 m0", "B s1 m0", "F s1 m1", "B s1 m1"))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from smpc.codegen.program import Instruction, Op
from smpc.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class Action:
    """A forward, a backward or the deferred part of a backward, of one stage on one microbatch."""

    op: Op
    stage: int
    microbatch: int

    def __post_init__(self) -> None:
        if self.op not in (Op.FORWARD, Op.BACKWARD, Op.WEIGHT) or self.stage < 0 or self.microbatch < 0:
            raise ScheduleError(f"expected F, B or W of a stage and a microbatch, found {self}")

    def __str__(self) -> str:
        return f"{self.op} s{self.stage} m{self.microbatch}"

    @property
    def instruction(self) -> Instruction:
        """The instruction that runs it."""
        return Instruction(self.op, stage=self.stage, microbatch=self.microbatch)

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of `str`."""
        instruction = Instruction.parse(text)
        return cls(instruction.op, instruction.stage, instruction.microbatch)


Schedule = tuple[tuple[Action, ...], ...]


def forward(stage: int, microbatch: int) -> Action:
    """`F s<stage> m<microbatch>`."""
    return Action(Op.FORWARD, stage, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """`B s<stage> m<microbatch>`."""
    return Action(Op.BACKWARD, stage, microbatch)


def weight(stage: int, microbatch: int) -> Action:
    """`W s<stage> m<microbatch>`."""
    return Action(Op.WEIGHT, stage, microbatch)


def split_backwards(actions: Iterable[Action | Instruction]) -> frozenset[tuple[int, int]]:
    """The (stage, microbatch) whose backward has a deferred part among the actions or instructions."""
    return frozenset((action.stage, action.microbatch) for action in actions if action.op is Op.WEIGHT)


def of_program(instructions: Iterable[Instruction]) -> tuple[Action, ...]:
    """The actions of a rank's program."""
    ops = (Op.FORWARD, Op.BACKWARD, Op.WEIGHT)
    return tuple(Action(i.op, i.stage, i.microbatch) for i in instructions if i.op in ops)


def peaks(schedule: Schedule, num_stages: int) -> tuple[int, ...]:
    """By stage, the most microbatches in flight: those whose forward has run and whose backward has not, all of it.

    0 for a schedule without backwards, which keeps nothing.
    """
    most, now = [0] * num_stages, [0] * num_stages
    ends = {action.op for actions in schedule for action in actions} != {Op.FORWARD}
    for actions in schedule if ends else ():
        split = split_backwards(actions)
        for action in actions:
            if action.op is Op.FORWARD:
                now[action.stage] += 1
                most[action.stage] = max(most[action.stage], now[action.stage])
            elif action.op is Op.WEIGHT or (action.stage, action.microbatch) not in split:
                now[action.stage] -= 1
    return tuple(most)


def rank_peaks(schedule: Schedule) -> tuple[int, ...]:
    """By rank, the most (stage, microbatch) in flight at once."""
    most = []
    for actions in schedule:
        split, now, peak = split_backwards(actions), 0, 0
        for action in actions:
            if action.op is Op.FORWARD:
                now += 1
            elif action.op is Op.WEIGHT or (action.stage, action.microbatch) not in split:
                now -= 1
            peak = max(peak, now)
        most.append(peak)
    return tuple(most)
