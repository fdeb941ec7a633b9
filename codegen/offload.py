"""Offloading: when what checkpointed regions keep waits in CPU memory for the backward pass.

A task is an action of a rank: F, B or W. Of a stage and microbatch whose B is the n-th task after its F, with n > horizon + 1, the program
gets

    OFFLOAD s m    after F and everything that F sends
    RELOAD s m     `horizon` tasks ahead of B, so that loading overlaps with them

The others would be loaded back at once, and stay. What is moved is decided when the step runs (`smpc.executor.program.offload`), from the
values themselves.

Example, horizon 1: F0 F1 F2 B0 B1 B2 becomes F0 OFFLOAD0 F1 OFFLOAD1 RELOAD0 F2 OFFLOAD2 B0 RELOAD... as each B is due.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from smpc.codegen.program import Action, Instruction, Op, Schedule

_TASKS = (Op.FORWARD, Op.BACKWARD, Op.WEIGHT)
Key = tuple[int, int]  # stage, microbatch


def insert_offloads(
    programs: Sequence[Sequence[Instruction]], stages: Collection[int], horizon: int
) -> tuple[tuple[Instruction, ...], ...]:
    """The programs with OFFLOAD and RELOAD for these stages."""
    return tuple(_insert(program, stages, horizon) for program in programs)


def resident(schedule: Schedule, num_stages: int, horizon: int) -> tuple[int, ...]:
    """By stage, the most microbatches at once that are in flight and not offloaded."""
    most = [0] * num_stages
    for actions in schedule:
        leaves, returns = _offloaded(actions, horizon)
        now = [0] * num_stages
        for position, action in enumerate(actions):
            for stage, _ in returns[position]:
                now[stage] += 1
            now[action.stage] += action.op is Op.FORWARD
            most = [max(a, b) for a, b in zip(most, now, strict=True)]
            if action.op is Op.BACKWARD or (action.stage, action.microbatch) in leaves:
                now[action.stage] -= 1
    return tuple(most)


def _offloaded(tasks: Sequence[Action | Instruction], horizon: int) -> tuple[frozenset[Key], dict[int, list[Key]]]:
    """What is offloaded, and what is loaded back before the task at a position."""
    forwards = {(task.stage, task.microbatch): i for i, task in enumerate(tasks) if task.op is Op.FORWARD}
    returns: dict[int, list[Key]] = defaultdict(list)
    leaves = []
    for i, task in enumerate(tasks):
        key = (task.stage, task.microbatch)
        if task.op is Op.BACKWARD and i - forwards[key] > horizon + 1:
            returns[i - horizon].append(key)
            leaves.append(key)
    return frozenset(leaves), returns


def _insert(program: Sequence[Instruction], stages: Collection[int], horizon: int) -> tuple[Instruction, ...]:
    positions = [i for i, instruction in enumerate(program) if instruction.op in _TASKS]
    leaves, returns = _offloaded([program[i] for i in positions], horizon)
    before: dict[int, list[Instruction]] = defaultdict(list)
    for task, keys in returns.items():
        before[positions[task]] += [Instruction(Op.RELOAD, stage=s, microbatch=m) for s, m in keys if s in stages]
    found: list[Instruction] = []
    waiting: Instruction | None = None
    for i, instruction in enumerate(program):
        if waiting is not None and instruction.op is not Op.SEND:
            found.append(waiting)
            waiting = None
        found += before[i]
        found.append(instruction)
        key = (instruction.stage, instruction.microbatch)
        if instruction.op is Op.FORWARD and key in leaves and instruction.stage in stages:
            waiting = Instruction(Op.OFFLOAD, stage=instruction.stage, microbatch=instruction.microbatch)
    return tuple(found if waiting is None else [*found, waiting])
