"""Programs as data: the instructions of one rank, in the order in which it runs them.

Text form, one instruction a line; `s` stage, `m` microbatch, `e` edge, `r` pipeline rank, `p` shared parameter:

    RECV e1 m0 r0         receive the values of edge 1 from rank 0
    F s1 m0               forward of stage 1 on microbatch 0
    SEND e2 m0 r2         send the values of edge 2 to rank 2
    RECV_GRAD e2 m0 r2    receive their gradients
    B s1 m0               backward of stage 1; of its inputs alone if the program has a W s1 m0
    W s1 m0               the gradients of stage 1's parameters, which B s1 m0 has left out
    SEND_GRAD e1 m0 r0    send the gradients of edge 1's values back
    MOVE e1 m0            source and destination of the edge are on this rank: hand the values over
    MOVE_GRAD e1 m0       ... and their gradients back
    OFFLOAD s1 m0         start to copy what checkpointed regions of stage 1 have kept to CPU memory
    RELEASE s1 m0         ... give its memory up, once it is there
    RELOAD s1 m0          ... and start to copy it back, for B s1 m0
    REDUCE p0             sum the gradients of shared parameter 0 over the ranks that hold it

Messages between two ranks are matched first in, first out, in each direction: the order of the sends of one rank to
another is the order of the receives there. The verifier proves it.

Actions are what a schedule orders, before communication is decided: F, B and W of a stage and a microbatch. A `Schedule` holds, for each
pipeline rank, its actions in the order in which it runs them. For two stages on two ranks:

    (("F s0 m0", "F s0 m1", "B s0 m0", "B s0 m1"),
     ("F s1 m0", "B s1 m0", "F s1 m1", "B s1 m1"))
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from smpc.errors import ScheduleError
from smpc.tracer.ir import TensorSpec


class Op(StrEnum):
    """Opcodes."""

    FORWARD = "F"  # stage, microbatch
    BACKWARD = "B"  # stage, microbatch
    WEIGHT = "W"  # stage, microbatch
    SEND = "SEND"  # edge, microbatch, peer
    RECV = "RECV"  # edge, microbatch, peer
    SEND_GRAD = "SEND_GRAD"  # edge, microbatch, peer
    RECV_GRAD = "RECV_GRAD"  # edge, microbatch, peer
    MOVE = "MOVE"  # edge, microbatch
    MOVE_GRAD = "MOVE_GRAD"  # edge, microbatch
    OFFLOAD = "OFFLOAD"  # stage, microbatch
    RELEASE = "RELEASE"  # stage, microbatch
    RELOAD = "RELOAD"  # stage, microbatch
    REDUCE = "REDUCE"  # shared parameter


_OPERANDS = {
    Op.FORWARD: "sm",
    Op.BACKWARD: "sm",
    Op.WEIGHT: "sm",
    Op.SEND: "emr",
    Op.RECV: "emr",
    Op.SEND_GRAD: "emr",
    Op.RECV_GRAD: "emr",
    Op.MOVE: "em",
    Op.MOVE_GRAD: "em",
    Op.OFFLOAD: "sm",
    Op.RELEASE: "sm",
    Op.RELOAD: "sm",
    Op.REDUCE: "p",
}
_FIELDS = {"s": "stage", "m": "microbatch", "e": "edge", "r": "peer", "p": "parameter"}
_PRESENT = {op: tuple(letter in operands for letter in _FIELDS) for op, operands in _OPERANDS.items()}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a rank's program. Operands that an opcode does not have are -1."""

    op: Op
    stage: int = -1
    microbatch: int = -1
    edge: int = -1
    peer: int = -1
    parameter: int = -1

    def __post_init__(self) -> None:
        present = (self.stage >= 0, self.microbatch >= 0, self.edge >= 0, self.peer >= 0, self.parameter >= 0)
        if present != _PRESENT[self.op]:
            pairs = zip(_FIELDS.values(), present, _PRESENT[self.op], strict=True)
            name, is_given = next((name, given) for name, given, needed in pairs if given != needed)
            raise ScheduleError(f"{self.op} {'takes no' if is_given else 'needs'} {name}")

    def __str__(self) -> str:
        return " ".join([self.op, *(f"{x}{getattr(self, _FIELDS[x])}" for x in _OPERANDS[self.op])])

    @classmethod
    def parse(cls, text: str) -> Instruction:
        """The inverse of `str`."""
        op, *operands = text.split()
        if op not in list(Op) or not all(re.fullmatch(r"[smerp]\d+", operand) for operand in operands):
            raise ScheduleError(f"expected an instruction such as 'F s0 m1' or 'SEND e0 m1 r1', found {text!r}")
        return cls(Op(op), **{_FIELDS[operand[0]]: int(operand[1:]) for operand in operands})


@dataclass(frozen=True, slots=True)
class Channel:
    """An edge of the plan with the specs of its values; `source` is a stage or INPUTS (-1).

    `source_rank` and `destination_rank` are pipeline ranks. Only values whose spec requires grad have gradients.
    """

    index: int
    source: int
    destination: int
    source_rank: int
    destination_rank: int
    values: tuple[str, ...]
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class StageCode:
    """The code of one stage.

    `source` defines a class with `forward(self, *inputs) -> tuple`; `inputs` and `outputs` name, in order, the values that it
    takes and returns. Of the last stage, `outputs` are the model's output tensors followed by nothing else.
    """

    index: int
    class_name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    modules: tuple[str, ...]  # FQNs of modules that it calls
    attributes: tuple[str, ...]  # canonical FQNs of parameters, buffers and tensors that it reads itself


@dataclass(frozen=True, slots=True)
class RankProgram:
    """Everything one pipeline rank runs in one step, for training (`has_backward`) or evaluation."""

    rank: int
    num_ranks: int
    num_microbatches: int
    has_backward: bool
    instructions: tuple[Instruction, ...]
    channels: tuple[Channel, ...]  # every channel of the plan; channels[i].index == i
    stages: tuple[StageCode, ...]  # the stages of this rank
    shared_parameters: tuple[tuple[str, tuple[int, ...]], ...]  # name, ranks that hold it
    schedule: str
    fingerprint: str


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
        return _instruction_of(self.op, self.stage, self.microbatch)

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of `str`."""
        instruction = Instruction.parse(text)
        return cls(instruction.op, instruction.stage, instruction.microbatch)


Schedule = tuple[tuple[Action, ...], ...]
_KEPT = 1 << 15  # actions of each kind: a search simulates the same ones again and again


@lru_cache(3 * _KEPT, typed=True)
def _instruction_of(op: Op, stage: int, microbatch: int) -> Instruction:
    """The instruction of an action: lowering, verification and reports ask for the same ones."""
    return Instruction(op, stage=stage, microbatch=microbatch)


@lru_cache(_KEPT, typed=True)
def forward(stage: int, microbatch: int) -> Action:
    """`F s<stage> m<microbatch>`."""
    return Action(Op.FORWARD, stage, microbatch)


@lru_cache(_KEPT, typed=True)
def backward(stage: int, microbatch: int) -> Action:
    """`B s<stage> m<microbatch>`."""
    return Action(Op.BACKWARD, stage, microbatch)


@lru_cache(_KEPT, typed=True)
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
