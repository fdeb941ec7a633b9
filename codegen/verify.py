"""Proves that the programs of all ranks work together, before the first step and without running a model.

What is proved, for programs from `lower` as well as for written or edited ones:

    complete    each rank runs exactly the instructions that the channels, the placement and the number of microbatches
                ask for, each once: every F and B, both ends of every message, every REDUCE, and nothing else but
                W: a backward may be split, which makes its B the part for the inputs; and OFFLOAD, RELEASE and RELOAD,
                in this order between F and B
    order       on each rank, every value is produced before it is used, B comes after F and W after B, and the forwards
                and the backwards of a stage go through the microbatches in ascending order, and so does what adds
                to the gradients of its parameters: each W, and each B without one
    memory      no stage has more microbatches in flight (F run, B or the W that goes with it not) than its bound
    messages    of each directed pair of ranks, the order of receives is the order of sends (first in, first out)
    progress    nobody waits for ever

The last two come from one discrete-event run in which sends do not block. One run is a proof: a rank has no choice in
what it does next, and which message it takes never depends on time (a Kahn network), so every other timing pairs the
same messages and stops at the same instructions. With `rendezvous`, a send blocks until its receive is reached, as on
transports without buffers; 1F1B on two ranks does not pass that, because an activation and a gradient cross.

Example: `verify` says of rank 0: [RECV_GRAD e0 m0 r1, F s0 m0, SEND e0 m0 r1, B s0 m0] and rank 1: [RECV e0 m0 r0, ...]

    deadlock: each of these waits for the next one, the last for the first
      rank 0, instruction 0: RECV_GRAD e0 m0 r1 waits for rank 1
      rank 1, instruction 0: RECV e0 m0 r0 waits for rank 0
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from smpc.codegen.program import Channel, Instruction, Op, RankProgram, backward, forward, split_backwards, weight
from smpc.codegen.simulate import Transfer
from smpc.errors import ScheduleError
from smpc.partitioner.graph.plan import INPUTS

_SENDS = (Op.SEND, Op.SEND_GRAD)
_MOVES = (Op.OFFLOAD, Op.RELEASE, Op.RELOAD)
_RECEIVES = {Op.SEND: Op.RECV, Op.SEND_GRAD: Op.RECV_GRAD}


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the programs are for. `placement` maps each stage to its pipeline rank."""

    channels: tuple[Channel, ...]
    placement: tuple[int, ...]
    num_ranks: int
    num_microbatches: int
    has_backward: bool = True
    shared_parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def holders(self, parameter: int) -> tuple[int, ...]:
        """The ranks that sum the gradients of a shared parameter."""
        ranks = tuple(sorted(set(self.shared_parameters[parameter][1])))
        return ranks if self.has_backward and len(ranks) > 1 else ()


def verify(
    programs: Sequence[Sequence[Instruction]],
    expectation: Expectation,
    *,
    max_in_flight: Sequence[int] | None = None,
    rendezvous: bool = False,
) -> tuple[int, ...]:
    """Prove what the module docstring says; return the most microbatches in flight on each stage.

    `max_in_flight` bounds them by stage. ScheduleError lists every violation, or the first mismatch of messages, or the
    circle of ranks that wait for each other.
    """
    problems = [*_check_channels(expectation)]
    if len(programs) != expectation.num_ranks:
        problems.append(f"expected programs for {expectation.num_ranks} ranks, found {len(programs)}")
    if not problems:
        for rank, program in enumerate(programs):
            needed = _expected_by_verifier(rank, expectation, split_backwards(program), _offloads_to_verify(program))
            problems += [f"rank {rank}{text}" for text in _check_complete(program, needed)]
            problems += [f"rank {rank}{text}" for text in _check_order(program, needed)]
    peaks = _peaks_in_flight(programs, expectation)
    bounds = peaks if max_in_flight is None else max_in_flight
    for stage, (peak, bound) in enumerate(zip(peaks, bounds, strict=True)):
        if peak > bound:
            problems.append(f"stage {stage} has {peak} microbatches in flight, more than its bound of {bound}")
    if problems:
        raise ScheduleError("\n".join(problems))
    _EventRun(programs, expectation, rendezvous).run()
    return peaks


def verify_programs(
    programs: Sequence[RankProgram], *, max_in_flight: Sequence[int] | None = None, rendezvous: bool = False
) -> tuple[int, ...]:
    """`verify` for the programs of all ranks, which also must agree on what they are for."""
    found = {stage.index: program.rank for program in programs for stage in program.stages}
    if sorted(found) != list(range(len(found))) or len(found) != sum(len(program.stages) for program in programs):
        raise ScheduleError(f"expected each stage on one rank, found (stage, rank) {sorted(found.items())}")
    placement = tuple(found[stage] for stage in range(len(found)))
    expectations = [
        Expectation(p.channels, placement, p.num_ranks, p.num_microbatches, p.has_backward, p.shared_parameters)
        for p in programs
    ]
    for rank, program in enumerate(programs):
        if program.rank != rank or expectations[rank] != expectations[0]:
            raise ScheduleError(
                f"expected the programs of one plan in order of ranks, found at position {rank} that of rank "
                f"{program.rank}; it differs from position 0 in {_difference_to_verify(expectations[0], expectations[rank])}; "
                "compile all of them again"
            )
    instructions = [program.instructions for program in programs]
    return verify(instructions, expectations[0], max_in_flight=max_in_flight, rendezvous=rendezvous)


def _difference_to_verify(first: Expectation, other: Expectation) -> str:
    """The fields in which they differ."""
    names = [field.name for field in fields(Expectation) if getattr(first, field.name) != getattr(other, field.name)]
    return ", ".join(names) or "nothing else"


def _check_channels(expectation: Expectation) -> Iterator[str]:
    placement = expectation.placement
    for index, channel in enumerate(expectation.channels):
        stages = range(len(placement))
        if channel.index != index or channel.destination not in stages or channel.source not in (INPUTS, *stages):
            yield f"expected channel {index} between stages of {tuple(stages)}, found {channel}"
            continue
        ranks = (0 if channel.source == INPUTS else placement[channel.source], placement[channel.destination])
        if (channel.source_rank, channel.destination_rank) != ranks:
            found = f"from rank {channel.source_rank} to {channel.destination_rank}"
            yield f"expected channel {index} from rank {ranks[0]} to {ranks[1]}, where its stages are, found {found}"


def _expected_by_verifier(
    rank: int, expectation: Expectation, split: frozenset[tuple[int, int]], away: frozenset[tuple[int, int]]
) -> dict[Instruction, tuple[Instruction, ...]]:
    """Every instruction that the rank must run, with those that must come before it."""
    needed: dict[Instruction, tuple[Instruction, ...]] = {}
    local = [channel for channel in expectation.channels if rank in (channel.source_rank, channel.destination_rank)]
    for microbatch in range(expectation.num_microbatches):
        obtained = [entry for channel in local for entry in _transfers_of_rank(rank, channel, microbatch, expectation)]
        needed.update((instruction, before) for instruction, before, _ in obtained)
        for stage in (stage for stage, home in enumerate(expectation.placement) if home == rank):
            ahead, back = forward(stage, microbatch).instruction, backward(stage, microbatch).instruction
            needed[ahead] = tuple(instruction for instruction, _, user in obtained if user == ahead)
            if expectation.has_backward:
                before = tuple(instruction for instruction, _, user in obtained if user == back)
                if (stage, microbatch) in away:
                    leave, release, load = (Instruction(op, stage=stage, microbatch=microbatch) for op in _MOVES)
                    needed[leave], needed[release], needed[load] = (ahead,), (leave,), (release,)
                    before = (*before, load)
                needed[back] = (ahead, *before)
                if (stage, microbatch) in split:
                    needed[weight(stage, microbatch).instruction] = (back,)
    backwards = tuple(instruction for instruction in needed if instruction.op in (Op.BACKWARD, Op.WEIGHT))
    for parameter in range(len(expectation.shared_parameters)):
        if rank in expectation.holders(parameter):
            needed[Instruction(Op.REDUCE, parameter=parameter)] = backwards
    return needed


def _offloads_to_verify(program: Sequence[Instruction]) -> frozenset[tuple[int, int]]:
    """The (stage, microbatch) whose activations leave or return in the program: they must do all of it."""
    return frozenset((i.stage, i.microbatch) for i in program if i.op in _MOVES)


def _transfers_of_rank(
    rank: int, channel: Channel, microbatch: int, expectation: Expectation
) -> Iterator[tuple[Instruction, tuple[Instruction, ...], Instruction | None]]:
    """What the rank does for a message and its gradients: (instruction, those before it, the action that uses it)."""
    ahead = forward(channel.destination, microbatch).instruction
    produced = () if channel.source == INPUTS else (forward(channel.source, microbatch).instruction,)
    directions = [(Op.SEND, Op.RECV, Op.MOVE, channel.source_rank, channel.destination_rank, produced, ahead)]
    if expectation.has_backward and Transfer.of(channel).has_gradient:
        produced = (backward(channel.destination, microbatch).instruction,)
        back = backward(channel.source, microbatch).instruction
        ranks = (channel.destination_rank, channel.source_rank)
        directions.append((Op.SEND_GRAD, Op.RECV_GRAD, Op.MOVE_GRAD, *ranks, produced, back))
    for send, receive, move, source, destination, before, user in directions:
        if source == destination == rank:
            yield Instruction(move, microbatch=microbatch, edge=channel.index), before, user
        elif source == rank:
            yield Instruction(send, microbatch=microbatch, edge=channel.index, peer=destination), before, None
        elif destination == rank:
            yield Instruction(receive, microbatch=microbatch, edge=channel.index, peer=source), (), user


def _check_complete(
    program: Sequence[Instruction], needed: dict[Instruction, tuple[Instruction, ...]]
) -> Iterator[str]:
    counts = Counter(program)
    for instruction in needed:
        if instruction not in counts:
            yield f": {instruction} is missing"
    for instruction, count in counts.items():
        if instruction not in needed:
            yield f", instruction {program.index(instruction)}: {instruction} is not part of the plan for this rank"
        elif count > 1:
            yield f", instruction {program.index(instruction)}: {instruction} runs {count} times"


def _check_order(
    program: Sequence[Instruction],
    needed: dict[Instruction, tuple[Instruction, ...]],
) -> Iterator[str]:
    split = split_backwards(program)
    done: set[Instruction] = set()
    latest: dict[tuple[Op | None, int], int] = {}  # None: what adds to the gradients of parameters
    for position, instruction in enumerate(program):
        for before in needed.get(instruction, ()):
            if before not in done:
                yield f", instruction {position}: {instruction} comes before {before}, which it needs"
        done.add(instruction)
        keys = [(kind, instruction.stage) for kind in _ordered_kinds(instruction, split)]
        after = max((latest.get(key, -1) for key in keys), default=-1)
        if instruction.microbatch < after:
            where = f", instruction {position}: {instruction}"
            yield f"{where} comes after microbatch {after}; expected ascending order"
        latest.update(dict.fromkeys(keys, instruction.microbatch))


def _ordered_kinds(instruction: Instruction, split: frozenset[tuple[int, int]]) -> tuple[Op | None, ...]:
    """The kinds that the instruction is of, each of which has the order of the microbatches on a stage."""
    if instruction.op is Op.FORWARD:
        return (Op.FORWARD,)
    if instruction.op is Op.WEIGHT:
        return (None,)
    if instruction.op is Op.BACKWARD:
        return (Op.BACKWARD,) if (instruction.stage, instruction.microbatch) in split else (Op.BACKWARD, None)
    return ()


def _peaks_in_flight(programs: Sequence[Sequence[Instruction]], expectation: Expectation) -> tuple[int, ...]:
    """By stage, the most microbatches whose F has run and whose last part of B has not; 0 if nothing is kept for a backward."""
    peaks = [0] * len(expectation.placement)
    now = [0] * len(expectation.placement)
    for program in programs if expectation.has_backward else ():
        split = split_backwards(program)
        for instruction in program:
            if instruction.stage in range(len(now)):
                now[instruction.stage] += (instruction.op is Op.FORWARD) - (None in _ordered_kinds(instruction, split))
                peaks[instruction.stage] = max(peaks[instruction.stage], now[instruction.stage])
    return tuple(peaks)


class _EventRun:
    """The discrete-event run: where each rank is, and the messages under way as (position of the send, its receive)."""

    def __init__(self, programs: Sequence[Sequence[Instruction]], expectation: Expectation, rendezvous: bool) -> None:
        self.programs = programs
        self.expectation = expectation
        self.rendezvous = rendezvous
        self.position = [0] * len(programs)
        self.queues: dict[tuple[int, int], deque[tuple[int, Instruction]]] = defaultdict(deque)

    def run(self) -> None:
        """Let every rank go on as far as it can, until all are done or none can."""
        progress = True
        while progress:
            progress = False
            for rank in range(len(self.programs)):
                while self.current(rank) is not None and self.advance(rank):
                    progress = True
        if any(self.current(rank) is not None for rank in range(len(self.programs))):
            raise ScheduleError(self.deadlock())

    def current(self, rank: int) -> Instruction | None:
        """The instruction that the rank is at; None when it is done."""
        program, position = self.programs[rank], self.position[rank]
        return program[position] if position < len(program) else None

    def advance(self, rank: int) -> bool:
        """Run the current instruction of a rank if nothing blocks it."""
        instruction = self.current(rank)
        assert instruction is not None
        if instruction.op in _SENDS:
            return self.send(rank, instruction)
        if instruction.op in _RECEIVES.values():
            return not self.rendezvous and self.receive(rank, instruction)
        if instruction.op is Op.REDUCE:
            holders = self.expectation.holders(instruction.parameter)
            if any(self.current(holder) != instruction for holder in holders):
                return False
            for holder in holders:
                self.position[holder] += 1
            return True
        self.position[rank] += 1
        return True

    def send(self, rank: int, instruction: Instruction) -> bool:
        """Send; with rendezvous, only together with the receive."""
        operands = {"microbatch": instruction.microbatch, "edge": instruction.edge}
        arriving = Instruction(_RECEIVES[instruction.op], peer=rank, **operands)
        waiting = self.current(instruction.peer)
        met = waiting is not None and waiting.op in _RECEIVES.values() and waiting.peer == rank
        if self.rendezvous and not met:
            return False
        self.queues[rank, instruction.peer].append((self.position[rank], arriving))
        self.position[rank] += 1
        if self.rendezvous:
            assert waiting is not None
            self.receive(instruction.peer, waiting)
        return True

    def receive(self, rank: int, instruction: Instruction) -> bool:
        """Take the first message from the peer, which must be the one asked for."""
        queue = self.queues[instruction.peer, rank]
        if not queue:
            return False
        position, arriving = queue.popleft()
        if arriving != instruction:
            sent = self.programs[instruction.peer][position]
            raise ScheduleError(
                f"rank {rank}, instruction {self.position[rank]}: {instruction} meets {sent}, instruction "
                f"{position} of rank {instruction.peer}; messages between two ranks arrive in the order in which they "
                "were sent: order the receives like the sends"
            )
        self.position[rank] += 1
        return True

    def waits_for(self, rank: int) -> int:
        """The rank that blocks a blocked rank."""
        instruction = self.current(rank)
        assert instruction is not None
        if instruction.op is Op.REDUCE:
            holders = self.expectation.holders(instruction.parameter)
            return next(holder for holder in holders if self.current(holder) != instruction)
        return instruction.peer

    def deadlock(self) -> str:
        """The circle of ranks that wait for each other.

        There is one: both ends of every message are in the programs, so a blocked rank waits for one that is not done.
        """
        rank = next(rank for rank in range(len(self.programs)) if self.current(rank) is not None)
        path: list[int] = []
        while rank not in path:
            path.append(rank)
            rank = self.waits_for(rank)
        mode = " (sends block until they are received)" if self.rendezvous else ""
        lines = [f"deadlock{mode}: each of these waits for the next one, the last for the first"]
        for member in path[path.index(rank) :]:
            where = f"  rank {member}, instruction {self.position[member]}"
            lines.append(f"{where}: {self.current(member)} waits for rank {self.waits_for(member)}")
        return "\n".join(lines)
