"""Lowers a schedule to instructions: decides every message, and its place on both ranks.

Terms
    channel       an edge of the plan; its values are one message for each microbatch, their gradients another
    global order  all actions of all ranks in one order that keeps every rank's order and every dependency; here,
                  by start times in a simulation in which a backward takes twice as long as a forward

Around each action of a rank are

    RECV / MOVE of each channel that enters the stage          F s m   SEND of each channel that leaves it
    RECV_GRAD / MOVE_GRAD of each channel that leaves it       B s m   SEND_GRAD of each channel that enters it

and nothing around W s m. There are gradients only on channels that have a value which requires grad, and never to
the model's inputs. A channel whose ends are on one rank is a MOVE. A training program ends with the REDUCEs, in the
order of the shared parameters.

Order of receives. Along the global order, each send goes to the end of the queue of its directed pair of ranks,
activations and gradients in one queue. A receive takes everything from the front of the queue up to its message, so
that what a later action needs may be received early, never late. Receives thus have the order of the sends; and as
each send precedes, in the global order, the action that waits for it, no ranks wait for each other in a circle, as
long as sends do not block.

The model's inputs start on rank 0. It sends the inputs of microbatch m before its own first forward of m and before the
messages which that waits for, so they are in transit while earlier stages compute. If the receiver needs them sooner,
because its stage comes earlier in the pipeline than rank 0's stages, they are sent one action ahead of that need.

Example: two stages on two ranks, edge 0 = inputs to the last stage (labels), edge 1 = activations, one microbatch:

    rank 0: SEND e0 m0 r1, F s0 m0, SEND e1 m0 r1, RECV_GRAD e1 m0 r1, B s0 m0
    rank 1: RECV e0 m0 r0, RECV e1 m0 r0, F s1 m0, B s1 m0, SEND_GRAD e1 m0 r0
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence

from smpc.codegen.program import Action, Channel, Instruction, Op, Schedule
from smpc.codegen.simulate import Costs, Event, Transfer, simulate
from smpc.errors import ScheduleError
from smpc.partitioner.graph.plan import INPUTS

_OPS = {
    Op.FORWARD: (Op.SEND, Op.RECV, Op.MOVE),
    Op.BACKWARD: (Op.SEND_GRAD, Op.RECV_GRAD, Op.MOVE_GRAD),
}


def lower(
    schedule: Schedule,
    channels: tuple[Channel, ...],
    *,
    num_ranks: int,
    shared_parameters: tuple[tuple[str, tuple[int, ...]], ...] = (),
) -> tuple[tuple[Instruction, ...], ...]:
    """The instructions of each rank.

    `shared_parameters` are (name, ranks that hold it). A schedule without backwards gives programs for evaluation: no
    gradients, no REDUCE. ScheduleError if the schedule deadlocks.
    """
    if len(schedule) > num_ranks:
        raise ScheduleError(f"expected a schedule for {num_ranks} ranks, found one for {len(schedule)}")
    num_stages = 1 + max((action.stage for actions in schedule for action in actions), default=-1)
    links = [Transfer.of(channel) for channel in channels]
    order = simulate(schedule, links, Costs.uniform(num_stages)).events
    inputs = _place_inputs(order, channels)
    lowering = _Lowering(channels, num_ranks)
    for position, event in enumerate(order):
        for channel, microbatch in inputs[position]:
            lowering.send(Op.FORWARD, channel, microbatch)
        lowering.run(event.rank, event.action)
    assert not any(lowering.queues.values()), "a message is never received"
    if any(event.action.op is Op.BACKWARD for event in order):
        for parameter, (_, ranks) in enumerate(shared_parameters):
            for rank in sorted(set(ranks)) if len(set(ranks)) > 1 else ():
                lowering.programs[rank].append(Instruction(Op.REDUCE, parameter=parameter))
    return tuple(tuple(program) for program in lowering.programs)


def _place_inputs(order: Sequence[Event], channels: Sequence[Channel]) -> dict[int, list[tuple[Channel, int]]]:
    """Position in the global order -> model inputs that rank 0 sends just before the event there."""
    entering = defaultdict(list)
    for channel in channels:
        if channel.source == INPUTS and channel.destination_rank != channel.source_rank:
            entering[channel.destination].append(channel)
    own_forward: dict[int, int] = {}
    of_rank_0 = [position for position, event in enumerate(order) if event.rank == 0]
    for position in of_rank_0:
        if order[position].action.op is Op.FORWARD:
            own_forward.setdefault(order[position].action.microbatch, position)
    placed = defaultdict(list)
    for event in order:
        microbatch = event.action.microbatch
        if event.action.op is Op.FORWARD and event.action.stage in entering:
            earlier = bisect_left(of_rank_0, event.start, key=lambda own: order[own].start)
            ahead = of_rank_0[earlier - 1] if earlier else 0
            for channel in entering[event.action.stage]:
                placed[min(ahead, own_forward.get(microbatch, ahead))].append((channel, microbatch))
    return placed


class _Lowering:
    """Programs under construction and, for each directed pair of ranks, the messages sent and not yet received."""

    def __init__(self, channels: tuple[Channel, ...], num_ranks: int) -> None:
        self.programs: list[list[Instruction]] = [[] for _ in range(num_ranks)]
        self.queues: dict[tuple[int, int], deque[Instruction]] = defaultdict(deque)
        self.received: set[Instruction] = set()
        self.forward_in: dict[int, list[Channel]] = defaultdict(list)
        self.forward_out: dict[int, list[Channel]] = defaultdict(list)
        self.backward_in: dict[int, list[Channel]] = defaultdict(list)
        self.backward_out: dict[int, list[Channel]] = defaultdict(list)
        for channel in channels:
            self.forward_in[channel.destination].append(channel)
            self.forward_out[channel.source].append(channel)
            if Transfer.of(channel).has_gradient:
                self.backward_in[channel.source].append(channel)
                self.backward_out[channel.destination].append(channel)

    def run(self, rank: int, action: Action) -> None:
        """Receive what the action needs, run it, send what it makes."""
        if action.op is Op.WEIGHT:
            self.programs[rank].append(action.instruction)
            return
        if action.op is Op.FORWARD:
            entering, leaving = self.forward_in[action.stage], self.forward_out[action.stage]
        else:
            entering, leaving = self.backward_in[action.stage], self.backward_out[action.stage]
        for channel in entering:
            self.receive(action.op, channel, action.microbatch)
        self.programs[rank].append(action.instruction)
        for channel in leaving:
            self.send(action.op, channel, action.microbatch)

    def send(self, direction: Op, channel: Channel, microbatch: int) -> None:
        """Send a message to another rank; what stays on the rank is moved when it is needed."""
        source, destination = _message_ends(direction, channel)
        if source != destination:
            send, receive, _ = _OPS[direction]
            self.programs[source].append(Instruction(send, microbatch=microbatch, edge=channel.index, peer=destination))
            arriving = Instruction(receive, microbatch=microbatch, edge=channel.index, peer=source)
            self.queues[source, destination].append(arriving)

    def receive(self, direction: Op, channel: Channel, microbatch: int) -> None:
        """Receive a message and everything that was sent before it, unless that has been done."""
        source, destination = _message_ends(direction, channel)
        _, receive, move = _OPS[direction]
        if source == destination:
            self.programs[destination].append(Instruction(move, microbatch=microbatch, edge=channel.index))
            return
        wanted = Instruction(receive, microbatch=microbatch, edge=channel.index, peer=source)
        while wanted not in self.received:
            message = self.queues[source, destination].popleft()
            self.programs[destination].append(message)
            self.received.add(message)


def _message_ends(direction: Op, channel: Channel) -> tuple[int, int]:
    """The ranks that a message comes from and goes to."""
    if direction is Op.FORWARD:
        return channel.source_rank, channel.destination_rank
    return channel.destination_rank, channel.source_rank
