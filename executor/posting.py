"""When receives are posted that occupy the device until their message comes (NCCL).

Such a receive is a kernel that ends when the peer sends. Whatever waits for the whole device (a kernel that is loaded when it is first
used, memory given back to the driver, a cooperative kernel) waits for it too; and what the peer sends may depend on what this rank has
yet to do. So a receive may be posted too early. `posting_points` says when it is not, from the programs of all ranks:

    order     One order of all instructions in which each comes after what it waits for: by the times at which they end, where a
              forward takes 1, a backward 2 (its halves 1 each), and nothing else takes time.
    points    Before an instruction a rank posts the receives of all messages that were sent before it in this order.

In this order whatever is posted before an instruction can also arrive before it. So even where every instruction waits for all that is
under way on its device, posted receives and sends alike, no ranks wait in a circle. And nothing is gained by posting more: by the same
times, what was not posted yet is sent after the instruction has ended.

Example: rank 0 runs `F s0 m0, SEND e0 m0 r1, F s0 m1, SEND e0 m1 r1`, rank 1 `RECV e0 m0 r0, F s1 m0, RECV e0 m1 r0, F s1 m1`. Microbatch 1
is sent at time 2, when `F s1 m0` ends, and so rank 1 posts its receive before `F s1 m0`.

What REDUCE receives is posted when it is waited for. A program ends with its REDUCEs, and each sends before it waits.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence

from smpc.codegen.actions import split_backwards
from smpc.codegen.program import Instruction, Op, RankProgram

_SENDS = (Op.SEND, Op.SEND_GRAD)
_RECEIVES = (Op.RECV, Op.RECV_GRAD)

# Before this instruction: of this peer, so many messages of the step.
Points = Mapping[Instruction, Sequence[tuple[int, int]]]


def posting_points(programs: Sequence[RankProgram], rank: int) -> Points:
    """Where `rank` posts receives."""
    sent: dict[int, int] = defaultdict(int)  # by peer, messages to `rank`
    posted: dict[int, int] = defaultdict(int)
    points: dict[Instruction, list[tuple[int, int]]] = {}
    for source, instruction in _in_order(programs):
        if source == rank:
            new = [(peer, count) for peer, count in sent.items() if count > posted[peer]]
            posted.update(new)
            if new:
                points[instruction] = new
        elif instruction.op in _SENDS and instruction.peer == rank:
            sent[source] += 1
    return points


def _in_order(programs: Sequence[RankProgram]) -> list[tuple[int, Instruction]]:
    """(rank, instruction) of all programs, each after what it waits for, by the times at which they end."""
    costs = [_costs(program) for program in programs]
    position, now = [0] * len(programs), [0] * len(programs)
    sent_at: dict[tuple[int, int], list[int]] = defaultdict(list)  # times, by (source, destination)
    taken: dict[tuple[int, int], int] = defaultdict(int)
    waiting: dict[tuple[int, int], int] = {}  # for the next message: the rank that waits for it
    ready: list[tuple[int, int]] = []  # (when the next instruction ends, rank)
    order: list[tuple[int, Instruction]] = []

    def look(rank: int) -> None:
        """Put a rank among the ready ones, unless it is done or waits."""
        if position[rank] == len(programs[rank].instructions):
            return
        instruction = programs[rank].instructions[position[rank]]
        if instruction.op in _RECEIVES:
            pair = instruction.peer, rank
            if len(sent_at[pair]) == taken[pair]:
                waiting[pair] = rank
                return
            now[rank] = max(now[rank], sent_at[pair][taken[pair]])
            taken[pair] += 1
        heapq.heappush(ready, (now[rank] + costs[rank].get(instruction, 0), rank))

    for rank in range(len(programs)):
        look(rank)
    while ready:
        now_, rank = heapq.heappop(ready)
        instruction = programs[rank].instructions[position[rank]]
        now[rank] = now_
        position[rank] += 1
        order.append((rank, instruction))
        if instruction.op in _SENDS:
            pair = rank, instruction.peer
            sent_at[pair].append(now_)
            if pair in waiting:
                look(waiting.pop(pair))
        look(rank)
    assert len(order) == sum(len(program.instructions) for program in programs), "the verifier has excluded a deadlock"
    return order


def _costs(program: RankProgram) -> dict[Instruction, int]:
    """How long the instructions that compute take."""
    split = split_backwards(program.instructions)
    times = {Op.FORWARD: 1, Op.BACKWARD: 2, Op.WEIGHT: 1}
    return {
        i: 1 if i.op is Op.BACKWARD and (i.stage, i.microbatch) in split else times[i.op]
        for i in program.instructions
        if i.op in times
    }
