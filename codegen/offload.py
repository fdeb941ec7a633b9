"""Offloading: when what checkpointed regions keep waits in CPU memory for the backward pass.

A task is an action of a rank: F, B or W. Of a stage and microbatch whose B is the n-th task after its F, with n > horizon + 2, the program
gets

    OFFLOAD s m    after F and everything that F sends: copying starts
    RELEASE s m    when the next task has run: its memory is given up, once it has been copied
    RELOAD s m     `horizon` tasks ahead of B, so that copying it back overlaps with them

The others would be loaded back at once, and stay. So each copy has a task or more to hide behind: out the one after F, in those ahead of
B. What is moved is decided when the step runs (`smpc.executor.program.offload`), from the values themselves.

Example, horizon 1: F0 F1 F2 F3 B0 becomes F0 OFFLOAD0 F1 RELEASE0 F2 RELOAD0 F3 B0, and so for each microbatch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

from smpc.codegen.program import Action, Instruction, Op, Schedule, split_backwards
from smpc.partitioner.memory.deferred import Beside, SplitUse
from smpc.partitioner.memory.peak import Resident

_TASKS = (Op.FORWARD, Op.BACKWARD, Op.WEIGHT)
_SENDS = (Op.SEND, Op.SEND_GRAD)
Key = tuple[int, int]  # stage, microbatch


def insert_offloads(
    programs: Sequence[Sequence[Instruction]], stages: Collection[int], horizon: int
) -> tuple[tuple[Instruction, ...], ...]:
    """The programs with OFFLOAD, RELEASE and RELOAD for these stages."""
    return tuple(_insert(program, stages, horizon) for program in programs)


def resident(schedule: Schedule, num_stages: int, horizon: int) -> tuple[Resident, ...]:
    """By stage, how many microbatches at once are in flight and not offloaded.

    One whose backward is split is there until W: what that reads may be what a region reads.
    """
    most, last = [0] * num_stages, [0] * num_stages
    for actions in schedule:
        split = split_backwards(actions)
        before = moves(actions, horizon)
        now, in_flight = [0] * num_stages, [0] * num_stages
        forwards = Counter(action.stage for action in actions if action.op is Op.FORWARD)
        for position, action in enumerate(actions):
            for op, (stage, _) in before.get(position, ()):
                now[stage] += (op is Op.RELOAD) - (op is Op.RELEASE)
            stage = action.stage
            for counts in (now, in_flight):
                counts[stage] += action.op is Op.FORWARD
            most = [max(a, b) for a, b in zip(most, now, strict=True)]
            if not forwards[stage] and now[stage] == in_flight[stage]:
                last[stage] = max(last[stage], now[stage])
            forwards[stage] -= action.op is Op.FORWARD
            ends = Op.WEIGHT if (stage, action.microbatch) in split else Op.BACKWARD
            for counts in (now, in_flight):
                counts[stage] -= action.op is ends
    return tuple(map(Resident, most, last))


def split_uses(schedule: Schedule, num_stages: int) -> tuple[SplitUse, ...] | None:
    """By stage, what there is beside its actions; None unless every backward is split."""
    counts: list[dict[Op, set[Beside]]] = [{op: set() for op in _TASKS} for _ in range(num_stages)]
    for actions in schedule:
        split = split_backwards(actions)
        if any((a.stage, a.microbatch) not in split for a in actions):
            return None
        waiting, deferred, has_gradients = [0] * num_stages, [0] * num_stages, [False] * num_stages
        for op, stage in ((action.op, action.stage) for action in actions):
            waiting[stage] -= op is Op.BACKWARD
            deferred[stage] -= op is Op.WEIGHT
            counts[stage][op].add(Beside(waiting[stage], deferred[stage], has_gradients[stage]))
            waiting[stage] += op is Op.FORWARD
            deferred[stage] += op is Op.BACKWARD
            has_gradients[stage] |= op is Op.WEIGHT
    return tuple(SplitUse(*(tuple(sorted(found[op])) for op in _TASKS)) for found in counts)


def moves(tasks: Sequence[Action | Instruction], horizon: int) -> Mapping[int, Sequence[tuple[Op, Key]]]:
    """What is done before the task at a position, in order: OFFLOAD, RELEASE and RELOAD of a (stage, microbatch)."""
    forwards = {(task.stage, task.microbatch): i for i, task in enumerate(tasks) if task.op is Op.FORWARD}
    leaving: dict[int, Key] = {}  # by the position of its F
    returning: dict[int, list[Key]] = defaultdict(list)
    for i, task in enumerate(tasks):
        key = (task.stage, task.microbatch)
        if task.op is Op.BACKWARD and i - forwards[key] > horizon + 2:
            leaving[forwards[key]] = key
            returning[i - horizon].append(key)
    found: dict[int, list[tuple[Op, Key]]] = defaultdict(list)
    for position in range(1, len(tasks)):
        for op, behind in ((Op.OFFLOAD, 1), (Op.RELEASE, 2)):
            if position - behind in leaving:
                found[position].append((op, leaving[position - behind]))
        found[position] += [(Op.RELOAD, key) for key in returning.get(position, ())]
    return {position: before for position, before in found.items() if before}


def _insert(program: Sequence[Instruction], stages: Collection[int], horizon: int) -> tuple[Instruction, ...]:
    """Moves come after all that the task before them sends, ahead of what the next task receives."""
    before = moves([instruction for instruction in program if instruction.op in _TASKS], horizon)
    found: list[Instruction] = []
    due: Sequence[tuple[Op, Key]] = ()
    task = 0
    for instruction in program:
        if due and instruction.op not in _SENDS:
            found += [Instruction(op, stage=s, microbatch=m) for op, (s, m) in due if s in stages]
            due = ()
        found.append(instruction)
        if instruction.op in _TASKS:
            task += 1
            due = before.get(task, ())
    return tuple(found)
