"""Offloading to CPU memory: when what checkpointed regions keep is moved there and back, and how long the copies take.

A task is an action of a rank: F, B or W. Of a stage and microbatch whose B is the n-th task after its F, with n > horizon + 2, the program
gets

    OFFLOAD s m    after F and everything that F sends: copying starts
    RELEASE s m    when the next task has run: its memory is given up, once it has been copied
    RELOAD s m     `horizon` tasks ahead of B, so that copying it back overlaps with them

The others would be loaded back at once, and stay. So each copy has a task or more to hide behind: out the one after F, in those ahead of
B. What is moved is decided when the step runs (`smpc.executor.program.host_copies`), from the values themselves.

Example, horizon 1: F0 F1 F2 F3 B0 becomes F0 OFFLOAD0 F1 RELEASE0 F2 RELOAD0 F3 B0, and so for each microbatch.

`HostCopies` predicts when the copies run, and what of them computing waits for.

Terms
    copy        what OFFLOAD or RELOAD starts: bytes / rate + latency seconds. Each direction of a rank's link has one at a time, in the
                order of the program, and both work at once
    release     computing goes on behind a RELEASE when that copy out has ended: until then its memory is not free
    stall       what these waits add to the step

A device computes while it copies. So of a rank, task i is followed by these above, at the time t at which it and its
messages are done:

    OFFLOAD     starts at t, or when the copy out before it has ended
    RELEASE     t becomes the end of the copy out, if that is later
    RELOAD      starts at t, or when the copy in before it has ended; its B starts no sooner than it ends

A CPU does one after the other: each copy adds its seconds to t.

Example: forward 1, copies of 3, horizon 1, `F0 OFFLOAD0 F1 RELEASE0 F2`: F1 ends at 2, the copy at 4, so F2 starts at 4.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from smpc.codegen.program import Action, Instruction, Op, Schedule, split_backwards
from smpc.partitioner.graph.plan import HostLink, Plan
from smpc.partitioner.memory.memory_by_action import ActionUse, Beside, HeldMessages
from smpc.partitioner.memory.peak import Resident

_TASKS = (Op.FORWARD, Op.BACKWARD, Op.WEIGHT)
_SENDS = (Op.SEND, Op.SEND_GRAD)
Key = tuple[int, int]  # stage, microbatch
_BesideParts = tuple[int, int, bool, tuple[tuple[int, Beside], ...], HeldMessages | None]


def insert_offloads(
    programs: Sequence[Sequence[Instruction]], stages: Collection[int], horizon: int
) -> tuple[tuple[Instruction, ...], ...]:
    """The programs with OFFLOAD, RELEASE and RELOAD for these stages."""
    return tuple(_insert_moves(program, stages, horizon) for program in programs)


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


def action_uses(
    schedule: Schedule, num_stages: int, messages: Mapping[int, Sequence[HeldMessages]] | None = None
) -> tuple[ActionUse, ...] | None:
    """By stage, what there is beside its actions; None where no backward is split, and every rank has one stage.

    `messages`: of ranks with several stages, by action.
    """
    kinds = (Op.FORWARD, Op.BACKWARD, Op.WEIGHT, None)  # None: a backward in one part
    found: list[dict[Op | None, set[_BesideParts]]] = [{kind: set() for kind in kinds} for _ in range(num_stages)]
    is_plain = True
    for rank, actions in enumerate(schedule):
        split, own = split_backwards(actions), sorted({action.stage for action in actions})
        is_plain = is_plain and not split and len(own) < 2
        _note_uses(actions, split, own, (messages or {}).get(rank), found)
    if is_plain:
        return None
    return tuple(ActionUse(*(tuple(sorted(itertools.starmap(Beside, each[kind]))) for kind in kinds)) for each in found)


def _note_uses(
    actions: Sequence[Action],
    split: Collection[Key],
    own: Sequence[int],
    held: Sequence[HeldMessages] | None,
    found: Sequence[Mapping[Op | None, set[_BesideParts]]],
) -> None:
    """What there is beside the actions of a rank with these stages, as plain tuples: most of a long schedule is the same again."""
    known: dict[tuple[int, int, bool], Beside] = {}
    now = dict.fromkeys(own, Beside(0, 0, False))
    for number, action in enumerate(actions):
        stage, op = action.stage, action.op
        waiting, deferred, has_gradients, *_ = now[stage]
        is_forward, is_backward, is_weight = op is Op.FORWARD, op is Op.BACKWARD, op is Op.WEIGHT
        is_split = is_backward and (stage, action.microbatch) in split
        is_whole = is_backward and not is_split
        others = tuple([(other, now[other]) for other in own if other != stage])
        beside = (
            waiting - is_backward,
            deferred - is_weight,
            has_gradients,
            others,
            None if held is None else held[number],
        )
        found[stage][None if is_whole else op].add(beside)
        after = beside[0] + is_forward, beside[1] + is_split, has_gradients or is_weight or is_whole
        if after not in known:
            known[after] = Beside(*after)
        now[stage] = known[after]


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


def _insert_moves(program: Sequence[Instruction], stages: Collection[int], horizon: int) -> tuple[Instruction, ...]:
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


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy in time: an OFFLOAD, to the host, or a RELOAD, back."""

    rank: int
    op: Op
    stage: int
    microbatch: int
    start: float
    end: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Offloading:
    """What a plan offloads of each microbatch, by stage, over which link."""

    horizon: int
    num_bytes: Mapping[int, int]
    link: HostLink

    @classmethod
    def of(cls, plan: Plan, link: HostLink) -> Offloading | None:
        """None if it offloads nothing."""
        stages = {stage.index: size for stage in plan.stages if (size := stage.offloaded_bytes_per_microbatch)}
        if not stages or not plan.loading_horizon:
            return None
        return cls(plan.loading_horizon, stages, link)


class HostCopies:
    """The links of the ranks in one simulated step."""

    def __init__(self, offloading: Offloading, schedule: Schedule) -> None:
        self.copies: list[Copy] = []
        self.loaded: dict[Key, float] = {}  # when a RELOAD has ended
        self._offloading = offloading
        self._before = [moves(actions, offloading.horizon) for actions in schedule]
        self._left: dict[Key, float] = {}  # when an OFFLOAD has ended
        self._free: dict[tuple[int, Op], float] = {}  # when a direction of a rank's link is free

    def ahead_of(self, rank: int, task: int, time: float) -> float:
        """Starts what is due ahead of the rank's task of this number, the one before it done at `time`; when computing goes on."""
        for op, key in self._before[rank].get(task, ()):
            if key[0] not in self._offloading.num_bytes:
                continue
            if op is Op.RELEASE:
                time = max(time, self._left[key])
                continue
            end = self._copy(rank, op, key, time)
            (self._left if op is Op.OFFLOAD else self.loaded)[key] = end
            time = time if self._offloading.link.overlaps else end
        return time

    def _copy(self, rank: int, op: Op, key: Key, time: float) -> float:
        """When a copy ends that could start at this time."""
        num_bytes, link = self._offloading.num_bytes[key[0]], self._offloading.link
        start = max(time, self._free.get((rank, op), 0.0))
        end = self._free[rank, op] = start + link.latency + num_bytes / link.rate
        self.copies.append(Copy(rank, op, *key, start, end, num_bytes))
        return end
