"""Actions: the forwards and backwards that a schedule orders, before communication is decided.

An action prints as the instruction that it becomes, and parses back:

    F s2 m0    forward of stage 2 on microbatch 0
    B s2 m0    its backward

A `Schedule` holds, for each pipeline rank, its actions in the order in which it runs them. For two stages on two ranks:

    (("F s0 m0", "F s0 m1", "B s0 m0", "B s0 m1"),
     ("F s1 m0", "B s1 m0", "F s1 m1", "B s1 m1"))
"""

from __future__ import annotations

from dataclasses import dataclass

from smpc.codegen.program import Instruction, Op
from smpc.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class Action:
    """A forward or a backward of one stage on one microbatch."""

    op: Op
    stage: int
    microbatch: int

    def __post_init__(self) -> None:
        if self.op not in (Op.FORWARD, Op.BACKWARD) or self.stage < 0 or self.microbatch < 0:
            raise ScheduleError(f"expected F or B of a stage and a microbatch, found {self}")

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
