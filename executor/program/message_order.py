"""When a rank may free the tensors that it has sent, and when it posts receives: derived from the programs of all ranks.

Sending. Some transports (gloo) cannot tell whether a tensor that was sent has arrived without waiting for it. The programs can:

    training      whoever sends a message has received everything that its program receives before. So each receive from a
                  peer tells how many of the own messages to it have arrived, and waiting for those takes no time
    evaluation    next to nothing comes back. There a send first waits for earlier messages to the same peer: for those that
                  it has received by then in a run of all ranks in lockstep (`_in_lockstep`), but for the last `window`. That run is an
                  order of all instructions in which every wait is for something earlier, so ranks never wait in a circle

Example: in `SEND e1 m0 r1, SEND e1 m1 r1, RECV_GRAD e1 m0 r1` of rank 0, with `RECV e1 m0 r0, F, B, SEND_GRAD e1 m0 r0, RECV e1 m1 r0` on
rank 1, the gradients tell rank 0 that its first message has arrived.

Receiving. Over NCCL a posted receive occupies the device until its message comes. It is a kernel that ends when the peer sends. Any
operation that waits for the whole device (a kernel that is loaded when it is first used, memory returned to the driver, a cooperative
kernel) waits for it too; and the peer's message may depend on work that this rank has yet to do. So a receive may be posted too early.
`posting_points` says when it is not, from the programs of all ranks:

    step       what a handler does (`smpc.executor.program.bind`): an instruction; of a REDUCE, first the sends to all other holders, then
               each receive
    order      One order of all steps in which each comes after what it waits for: by the times at which they end, where a
               forward takes 1, a backward 2 (its halves 1 each), and nothing else takes time.
    points     Before a step a rank posts the receives of all messages that were sent before it in this order, in the order in which
               they were sent.

So every rank acts in this order, and a message is sent and its receive posted at the same position of it. The earliest operation
that has not happened can always happen: ranks never wait in a circle, not even if each send or posted receive first waits for
everything in progress on the device, or blocks the process until its peer's has come. Posting more would gain nothing: by the same
times, a message whose receive is not posted yet is sent after the step has ended.

Example: rank 0 runs `F s0 m0, SEND e0 m0 r1, F s0 m1, SEND e0 m1 r1`, rank 1 `RECV e0 m0 r0, F s1 m0, RECV e0 m1 r0, F s1 m1`. Microbatch 1
is sent at time 2, when `F s1 m0` ends, and so rank 1 posts its receive before `F s1 m0`.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smpc.codegen.message_buffers import told_by_messages
from smpc.codegen.program import Instruction, Op, RankProgram, split_backwards

_SENDS = (Op.SEND, Op.SEND_GRAD)
_RECEIVES = (Op.RECV, Op.RECV_GRAD)


def message_pairs(programs: Sequence[RankProgram]) -> list[tuple[int, int]]:
    """(source, destination) of all messages of the programs, ascending."""
    pairs = {(p.rank, i.peer) for p in programs for i in p.instructions if i.op in _SENDS}
    for program in programs:
        for _, holders in program.shared_parameters:
            pairs.update(itertools.permutations(sorted(set(holders)), 2))
    return sorted(pairs)


def other_holders(program: RankProgram, reduce: Instruction) -> tuple[int, ...]:
    """With which ranks a REDUCE exchanges gradients, in the order in which it sends to them, and receives from them."""
    _, holders = program.shared_parameters[reduce.parameter]
    return tuple(rank for rank in sorted(set(holders)) if rank != program.rank)


def told_by_receives(programs: Sequence[RankProgram], rank: int) -> dict[Instruction, int]:
    """Receive of `rank` -> how many of its messages to that peer have arrived when it is there. Messages are instructions, not tensors."""
    found: dict[Instruction, int] = {}
    for peer, program in enumerate(programs):
        own = [i for i in programs[rank].instructions if i.op in _RECEIVES and i.peer == peer]
        found.update(zip(own, told_by_messages(program.instructions, rank), strict=True))
    return found


def awaited_by_sends(programs: Sequence[RankProgram], rank: int, window: int) -> dict[Instruction, int]:
    """Send of `rank` -> how many of its messages to that peer it first waits for."""
    sent_at, taken_at = _in_lockstep(programs, rank)
    return {
        send: max(0, bisect_left(taken_at[send.peer], round_number) - window) for send, round_number in sent_at.items()
    }


def _in_lockstep(programs: Sequence[RankProgram], rank: int) -> tuple[dict[Instruction, int], dict[int, list[int]]]:
    """All ranks in rounds, at most one instruction of each in a round, none that waits: in which round `rank` runs its sends, and in
    which ones each peer receives its messages."""
    position = [0] * len(programs)
    under_way: dict[tuple[int, int], int] = defaultdict(int)
    sent_at: dict[Instruction, int] = {}
    taken_at: dict[int, list[int]] = defaultdict(list)
    number = 0
    while any(at < len(program.instructions) for at, program in zip(position, programs, strict=True)):
        before = list(position)
        for own, program in enumerate(programs):
            if position[own] == len(program.instructions):
                continue
            instruction = program.instructions[position[own]]
            pair = (instruction.peer, own)
            if instruction.op in _RECEIVES:
                if not under_way[pair]:
                    continue
                under_way[pair] -= 1
                if instruction.peer == rank:
                    taken_at[own].append(number)
            elif instruction.op in _SENDS:
                under_way[own, instruction.peer] += 1
                if own == rank:
                    sent_at[instruction] = number
            position[own] += 1
        assert position != before, "the verifier has excluded a deadlock"
        number += 1
    return sent_at, taken_at


# Before this handler of this instruction (its first is 0): of these peers, so many messages of the step, one after another.
Points = Mapping[tuple[Instruction, int], Sequence[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class _Step:
    """One handler of an instruction. It takes one message of `source`, if that is not -1, and sends one to each of `destinations`."""

    instruction: Instruction
    handler: int = 0
    source: int = -1
    destinations: tuple[int, ...] = ()


def posting_points(programs: Sequence[RankProgram], rank: int) -> Points:
    """Where `rank` posts receives."""
    sent: dict[int, int] = defaultdict(int)  # by peer, messages to `rank`
    due: list[tuple[int, int]] = []
    points: dict[tuple[Instruction, int], list[tuple[int, int]]] = {}
    for source, step in _in_order(programs):
        if source == rank:
            if due:
                points[step.instruction, step.handler] = due
            due = []
        elif rank in step.destinations:
            sent[source] += 1
            due.append((source, sent[source]))
    return points


def _steps_in_receive_order(program: RankProgram) -> list[_Step]:
    """The program's steps that take time, send or receive, and the first of every instruction."""
    steps = []
    for instruction in program.instructions:
        if instruction.op in _SENDS:
            steps.append(_Step(instruction, destinations=(instruction.peer,)))
        elif instruction.op in _RECEIVES:
            steps.append(_Step(instruction, source=instruction.peer))
        elif instruction.op is Op.REDUCE:
            peers = other_holders(program, instruction)
            steps.append(_Step(instruction, destinations=peers))
            steps += [_Step(instruction, handler, peer) for handler, peer in enumerate(peers, 1)]
        else:
            steps.append(_Step(instruction))
    return steps


def _in_order(programs: Sequence[RankProgram]) -> list[tuple[int, _Step]]:
    """(rank, step) of all programs, each after what it waits for, by the times at which they end."""
    steps, costs = (
        [_steps_in_receive_order(program) for program in programs],
        [_instruction_times(program) for program in programs],
    )
    position, now = [0] * len(programs), [0] * len(programs)
    sent_at: dict[tuple[int, int], list[int]] = defaultdict(list)  # times, by (source, destination)
    taken: dict[tuple[int, int], int] = defaultdict(int)
    waiting: dict[tuple[int, int], int] = {}  # for the next message: the rank that waits for it
    ready: list[tuple[int, int]] = []  # (when the next step ends, rank)
    order: list[tuple[int, _Step]] = []

    def look(rank: int) -> None:
        """Put a rank among the ready ones, unless it is done or waits."""
        if position[rank] == len(steps[rank]):
            return
        step = steps[rank][position[rank]]
        if step.source >= 0:
            pair = step.source, rank
            if len(sent_at[pair]) == taken[pair]:
                waiting[pair] = rank
                return
            now[rank] = max(now[rank], sent_at[pair][taken[pair]])
            taken[pair] += 1
        heapq.heappush(ready, (now[rank] + costs[rank].get(step.instruction, 0), rank))

    for rank in range(len(programs)):
        look(rank)
    while ready:
        now_, rank = heapq.heappop(ready)
        step = steps[rank][position[rank]]
        now[rank] = now_
        position[rank] += 1
        order.append((rank, step))
        for destination in step.destinations:
            pair = rank, destination
            sent_at[pair].append(now_)
            if pair in waiting:
                look(waiting.pop(pair))
        look(rank)
    assert len(order) == sum(map(len, steps)), "the verifier has excluded a deadlock"
    return order


def _instruction_times(program: RankProgram) -> dict[Instruction, int]:
    """How long the instructions that compute take."""
    split = split_backwards(program.instructions)
    times = {Op.FORWARD: 1, Op.BACKWARD: 2, Op.WEIGHT: 1}
    return {
        i: 1 if i.op is Op.BACKWARD and (i.stage, i.microbatch) in split else times[i.op]
        for i in program.instructions
        if i.op in times
    }
