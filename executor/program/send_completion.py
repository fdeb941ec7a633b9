"""When a rank may free the tensors that it has sent: derived from the programs of all ranks.

Some transports (gloo) cannot tell whether a tensor that was sent has arrived without waiting for it. The programs can:

    training      whoever sends a message has received everything that its program receives before. So each receive from a
                  peer tells how many of the own messages to it have arrived, and waiting for those takes no time
    evaluation    next to nothing comes back. There a send first waits for earlier messages to the same peer: for those that
                  it has received by then in a run of all ranks in lockstep (`_in_lockstep`), but for the last `window`. That run is an
                  order of all instructions in which every wait is for something earlier, so ranks never wait in a circle

Example: in `SEND e1 m0 r1, SEND e1 m1 r1, RECV_GRAD e1 m0 r1` of rank 0, with `RECV e1 m0 r0, F, B, SEND_GRAD e1 m0 r0, RECV e1 m1 r0` on
rank 1, the gradients tell rank 0 that its first message has arrived.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from smpc.codegen.buffers import told_by_messages
from smpc.codegen.program import Instruction, Op, RankProgram

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
