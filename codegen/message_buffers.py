"""The message buffers that a rank with several stages holds while it runs its actions: found by running its program and counting them.

The transport between CPUs keeps receive buffers and uses them again (`smpc.executor.transport.gloo`), so their number never falls, whatever
the stage that they were for; and what is sent is held until a message of the receiver tells that it has arrived. Both depend on the order
of all messages of the rank's stages, so they are counted along the programs:

    posted      the next `RECEIVE_WINDOW` deliveries of each peer have a buffer before they come. The first gradients of a channel follow
                a mask, and nothing behind a mask is posted before it is there
    received    a value has its buffer until the backward of its microbatch, which counts it as an activation from the forward on; a
                gradient until the backward that reads it
    sent        until a receive of the same peer is told of
    moved       from one stage of the rank to another: a value until the forward that takes it, a gradient until the backward that does

The second step is counted: it uses the buffers of the first again.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from smpc.codegen.lower import lower
from smpc.codegen.program import Channel, Instruction, Op, Schedule
from smpc.partitioner.memory.memory_by_action import HeldMessages
from smpc.partitioner.memory.peak import LEAST_POOLED, RECEIVE_WINDOW
from smpc.tracer.ir import TensorSpec

_RECEIVES = (Op.RECV, Op.RECV_GRAD)
_SENDS = (Op.SEND, Op.SEND_GRAD)
_ACTIONS = (Op.FORWARD, Op.BACKWARD, Op.WEIGHT)
TRIES = 4  # buffers are taken and given back in nearly the same order, so a free one is near the head


def messages_by_action(
    schedule: Schedule, channels: tuple[Channel, ...], num_ranks: int
) -> dict[int, tuple[HeldMessages, ...]]:
    """By rank that has several stages, the message buffers that it holds during each of its actions."""
    programs = lower(schedule, channels, num_ranks=num_ranks)
    wanted = [rank for rank, actions in enumerate(schedule) if len({action.stage for action in actions}) > 1]
    return {rank: _MessageRun(rank, programs, channels).second_step() for rank in wanted}


@dataclass(eq=False, slots=True)
class _MessageBuffer:
    num_bytes: int
    is_kept: bool = False
    is_used: bool = True


class _MessageRun:
    """A run of the programs that counts the message buffers of one rank."""

    def __init__(self, rank: int, programs: Sequence[Sequence[Instruction]], channels: Sequence[Channel]) -> None:
        self._program, self._channels = programs[rank], channels
        self._told = {peer: deque(told_by_messages(program, rank)) for peer, program in enumerate(programs)}
        self._pool: dict[object, deque[_MessageBuffer]] = defaultdict(deque)
        self._local = [channels[edge] for edge in sorted({i.edge for i in self._program if i.op is Op.MOVE})]
        self._loose = 0  # bytes of buffers that are not kept
        self._kept = 0

    def second_step(self) -> tuple[HeldMessages, ...]:
        """The buffers that are held in the second step, by action."""
        told = {peer: tuple(numbers) for peer, numbers in self._told.items()}
        self._step()
        self._told = {peer: deque(numbers) for peer, numbers in told.items()}
        return self._step()

    def _step(self) -> tuple[HeldMessages, ...]:
        self._expected: dict[int, deque[Instruction]] = defaultdict(deque)
        self._posted: dict[int, deque[list[_MessageBuffer] | None]] = defaultdict(deque)  # None: a mask
        self._seen: set[tuple[int, int]] = set()  # (peer, edge) whose mask is there
        self._sent: dict[int, list[tuple[Instruction, int]]] = defaultdict(list)
        self._released: Counter[int] = Counter()
        self._values: dict[tuple[int, int], list[_MessageBuffer]] = defaultdict(list)
        self._gradients: dict[tuple[int, int], list[_MessageBuffer]] = defaultdict(list)
        self._waiting: set[tuple[int, int]] = set()  # (source, microbatch) of values for another stage of the rank
        self._running: set[tuple[int, int]] = set()  # microbatches whose activations are there
        for instruction in self._program:
            if instruction.op in _RECEIVES:
                self._expected[instruction.peer].append(instruction)
        for peer in self._expected:
            self._post(peer)
        found = []
        for instruction in self._program:
            if instruction.op in _ACTIONS:
                found.append(self._act(instruction))
            elif instruction.op in _RECEIVES:
                self._receive(instruction)
            elif instruction.op in _SENDS:
                self._sent[instruction.peer].append((instruction, self._sent_bytes(instruction)))
        for buffers in (*self._values.values(), *self._gradients.values()):
            self._free(buffers)
        return tuple(found)

    def _act(self, instruction: Instruction) -> HeldMessages:
        key = instruction.stage, instruction.microbatch
        if instruction.op is Op.FORWARD:
            self._running.add(key)
            self._waiting -= {(c.source, key[1]) for c in self._local if c.destination == key[0]}
        found = self._now()
        if instruction.op is Op.FORWARD:
            self._waiting |= {(c.source, key[1]) for c in self._local if c.source == key[0]}
        if instruction.op is Op.BACKWARD:
            for channel in self._local:
                if channel.destination == key[0]:
                    self._hand_back(channel, key[1])
            self._running.discard(key)
            self._free(self._values.pop(key, []))
            self._free(self._gradients.pop(key, []))
        return found

    def _now(self) -> HeldMessages:
        held = sum(buffer.num_bytes for key in self._running for buffer in self._values.get(key, ()))
        gradients = 0
        values = set(self._waiting)
        for peer, sent in self._sent.items():
            for instruction, num_bytes in sent[self._released[peer] :]:
                channel = self._channels[instruction.edge]
                gradients += num_bytes
                if instruction.op is Op.SEND and channel.source >= 0:
                    values.add((channel.source, instruction.microbatch))
        stages = Counter(stage for stage, _ in values)
        return HeldMessages(self._kept + self._loose - held + gradients, tuple(sorted(stages.items())), self._kept)

    def _hand_back(self, channel: Channel, microbatch: int) -> None:
        """The gradient of a value that the rank's previous stage has made."""
        made = [_MessageBuffer(spec.num_bytes) for spec in channel.specs if spec.requires_grad]
        self._loose += sum(buffer.num_bytes for buffer in made)
        self._gradients[channel.source, microbatch] += made

    def _sent_bytes(self, instruction: Instruction) -> int:
        if instruction.op is Op.SEND:
            return 0  # values are counted with their stage, which may save them
        return sum(spec.num_bytes for spec in self._specs(instruction))

    def _specs(self, instruction: Instruction) -> list[TensorSpec]:
        specs = self._channels[instruction.edge].specs
        is_value = instruction.op in (Op.RECV, Op.SEND)
        return [spec for spec in specs if spec.num_bytes and (is_value or spec.requires_grad)]

    def _receive(self, instruction: Instruction) -> None:
        peer, channel = instruction.peer, self._channels[instruction.edge]
        expected = self._expected[peer].popleft()
        assert expected == instruction, "messages come in the order of the program"
        buffers = self._posted[peer].popleft()
        if buffers is None:
            self._seen.add((peer, instruction.edge))
            buffers = [self._take(spec) for spec in self._specs(instruction)]
        self._post(peer)
        self._released[peer] = max(self._released[peer], self._told[peer].popleft())
        if instruction.op is Op.RECV:
            self._values[channel.destination, instruction.microbatch] += buffers
        else:
            self._gradients[channel.source, instruction.microbatch] += buffers

    def _post(self, peer: int) -> None:
        """Posts the receives of the next deliveries."""
        posted = self._posted[peer]
        for instruction in list(self._expected[peer])[len(posted) : RECEIVE_WINDOW]:
            if posted and posted[-1] is None:
                return
            is_known = instruction.op is Op.RECV or (peer, instruction.edge) in self._seen
            posted.append([self._take(spec) for spec in self._specs(instruction)] if is_known else None)

    def _take(self, spec: TensorSpec) -> _MessageBuffer:
        if spec.num_bytes < LEAST_POOLED:
            self._loose += spec.num_bytes
            return _MessageBuffer(spec.num_bytes)
        pool = self._pool[spec.shape, spec.stride, spec.dtype]
        for _ in range(min(TRIES, len(pool))):
            buffer = pool[0]
            pool.rotate(-1)
            if not buffer.is_used:
                buffer.is_used = True
                return buffer
        buffer = _MessageBuffer(spec.num_bytes, is_kept=True)
        pool.append(buffer)
        self._kept += spec.num_bytes
        return buffer

    def _free(self, buffers: Sequence[_MessageBuffer]) -> None:
        for buffer in buffers:
            buffer.is_used = False
            self._loose -= 0 if buffer.is_kept else buffer.num_bytes


def told_by_messages(program: Sequence[Instruction], rank: int) -> list[int]:
    """By message of a program to this rank, how many of the rank's messages have arrived when it is sent."""
    received, found = 0, []
    for instruction in program:
        if instruction.peer == rank:
            received += instruction.op in _RECEIVES
            if instruction.op in _SENDS:
                found.append(received)
    return found
