"""Predicts when every action of a schedule runs, how long a step takes and how much of it is idle.

Terms
    link        what one stage passes to another for each microbatch, and what it gets back as gradients
    costs       seconds of each stage's forward, backward and of the part of the backward that W does if the schedule
                has one; latency and bandwidth of a directed pair of ranks; what a rank does for each message and
                between its actions
    event       an action with its rank, start and end
    makespan    end of the last event
    bubble      the idle part of the step: 1 - (sum of busy times) / (num_ranks x makespan)

Model: a rank runs one action at a time, in its order, as soon as the values it needs are there. It hands its messages over after the
action, one by one (`sending` seconds each, by default none), and takes one that it needs (`receiving`) before the action, when it has
nothing else to do; after each action it needs `between` for itself. None of these counts as busy. The messages of one directed pair of
ranks follow each other on the wire:

    arrival = max(handed over, wire free) + bytes / bandwidth + latency

Where a stage's parameters are in parts, the actions that gather them and sum their gradients take longer (`StageExchange`). Values that
stay on a rank arrive at once, and so do the model's inputs, which are sent ahead of need (see `lower`). What a plan offloads is copied to
the host and back meanwhile: see `smpc.codegen.offload`.

Example: two stages, three microbatches, 1F1B, backward twice as long as forward (`timeline_text`; one column is one
second, `--` goes on, `..` is idle):

    rank 0  F0 F1 .. .. B0 -- F2 B1 -- .. B2 --
    rank 1  .. F0 B0 -- F1 B1 -- F2 B2 -- .. ..

makespan 12 = (m + p - 1)(forward + backward), bubble 1/4 = (p - 1) / (m + p - 1): p ranks, m microbatches.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from smpc.codegen.offload import Copy, HostCopies, Offloading
from smpc.codegen.program import Action, Channel, Op, Schedule, backward, forward, split_backwards, weight
from smpc.errors import ScheduleError
from smpc.partitioner.graph.plan import INPUTS, Plan

_RANKING = {Op.BACKWARD: 0, Op.FORWARD: 1, Op.WEIGHT: 2}  # what a rank prefers; W can always wait


@dataclass(frozen=True, slots=True)
class Transfer:
    """Values that stage `source` (or INPUTS) passes to stage `destination`, in bytes for one microbatch."""

    source: int
    destination: int
    num_bytes: int = 0
    gradient_bytes: int = 0
    has_gradient: bool = True

    @classmethod
    def of(cls, channel: Channel) -> Transfer:
        """The transfer of a channel: gradients come back for values that require grad, but not to the model's inputs."""
        returned = [spec for spec in channel.specs if spec.requires_grad and channel.source != INPUTS]
        num_bytes = sum(spec.num_bytes for spec in channel.specs)
        gradient_bytes = sum(spec.num_bytes for spec in returned)
        return cls(channel.source, channel.destination, num_bytes, gradient_bytes, bool(returned))


def chain(num_stages: int, num_bytes: int = 0) -> tuple[Transfer, ...]:
    """Every stage passes `num_bytes` to the next and gets as many back."""
    return tuple(Transfer(stage, stage + 1, num_bytes, num_bytes) for stage in range(num_stages - 1))


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds by stage; seconds and bytes per second of a message between two ranks.

    `backward` is all of a backward. Of one that is split, W takes `weight` of it, by default a half: a backward has
    one matrix product for the gradients of the inputs and one for the gradients of the parameters. `actions`: seconds of single actions,
    whatever their stage takes. `split`: how much longer a forward and the two parts of its backward take, a third each.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    latency: float = 0.0
    bandwidth: float = math.inf
    weight: tuple[float, ...] | None = None
    sending: float = 0.0
    receiving: float = 0.0
    between: float = 0.0
    actions: Mapping[Action, float] = field(default_factory=dict, hash=False)
    split: tuple[float, ...] | None = None

    @classmethod
    def uniform(cls, num_stages: int, forward: float = 1.0, backward: float = 2.0) -> Costs:
        """Balanced stages and free communication; a backward has two matrix products for each one of the forward."""
        return cls((forward,) * num_stages, (backward,) * num_stages)

    @classmethod
    def of_plan(cls, plan: Plan) -> Costs:
        """What a plan predicts: times of its stages, and messages over the link that it was made for."""
        return cls(
            tuple(stage.forward_time for stage in plan.stages),
            tuple(stage.backward_time for stage in plan.stages),
            plan.schedule.link_latency,
            plan.schedule.link_bandwidth,
            tuple(stage.weight_time for stage in plan.stages),
            split=tuple(stage.split_time for stage in plan.stages),
        )

    def of(self, action: Action, is_split: bool = False) -> float:
        """Seconds that the action takes; `is_split`: a W takes its part of a backward."""
        known = self.actions.get(action)
        if known is not None:
            return known
        more = self.split[action.stage] / 3 if self.split is not None and is_split else 0.0
        if action.op is Op.FORWARD:
            return self.forward[action.stage] + more
        whole = self.backward[action.stage]
        deferred = whole / 2 if self.weight is None else self.weight[action.stage]
        if action.op is Op.WEIGHT:
            return deferred + more
        return whole - deferred + more if is_split else whole


@dataclass(frozen=True, slots=True)
class Event:
    """One action in time."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Events in order of their start; every event comes after those it depends on.

    copies: of what is offloaded, each rank's in the order of its program. stalled: seconds that they add to the step.
    """

    num_ranks: int
    events: tuple[Event, ...]
    copies: tuple[Copy, ...] = ()
    stalled: float = 0.0

    @property
    def schedule(self) -> Schedule:
        """The actions of each rank, in order."""
        actions: list[list[Action]] = [[] for _ in range(self.num_ranks)]
        for event in self.events:
            actions[event.rank].append(event.action)
        return tuple(tuple(order) for order in actions)

    @property
    def makespan(self) -> float:
        """When the last event ends."""
        return max((event.end for event in self.events), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        total = [0.0] * self.num_ranks
        for event in self.events:
            total[event.rank] += event.end - event.start
        return tuple(total)

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks' time: 1 - sum(busy) / (num_ranks x makespan)."""
        available = self.num_ranks * self.makespan
        return 1.0 - sum(self.busy) / available if available else 0.0


def simulate(schedule: Schedule, links: Sequence[Transfer], costs: Costs) -> Timeline:
    """Run a schedule as it is ordered. ScheduleError if it deadlocks."""
    return merge(tuple(enumerate(schedule)), links, costs, num_ranks=len(schedule))


def simulate_plan(plan: Plan, channels: Sequence[Channel], schedule: Schedule) -> Timeline:
    """One training step with the predicted times of the stages and of the messages between them."""
    return simulate_step(plan, [Transfer.of(channel) for channel in channels], schedule)


def simulate_step(plan: Plan, links: Sequence[Transfer], schedule: Schedule) -> Timeline:
    """The same with what the stages pass to each other, and with the copies of what the plan offloads."""
    costs, link = _with_exchanges(Costs.of_plan(plan), plan, schedule), plan.host_link
    offloading = None if link is None else Offloading.of(plan, link)
    plain = simulate(schedule, links, costs)
    if offloading is None:
        return plain
    copies = HostCopies(offloading, schedule)
    simulation = _Simulation(tuple(enumerate(schedule)), links, costs, len(schedule), None, copies)
    simulation.run()
    found = Timeline(len(schedule), tuple(simulation.events), tuple(copies.copies))
    return replace(found, stalled=found.makespan - plain.makespan)


def _with_exchanges(costs: Costs, plan: Plan, schedule: Schedule) -> Costs:
    """The costs with what the stages gather and sum, in the actions that wait for it."""
    exchanges = {stage.index: stage.exchange for stage in plan.stages if stage.exchange is not None}
    if not exchanges:
        return costs
    split = split_backwards(action for actions in schedule for action in actions)
    found: dict[Action, float] = {}
    for actions in schedule:
        begun, last = set[int](), {action.stage: action for action in actions if action.op is not Op.FORWARD}
        for action in actions:
            exchange = exchanges.get(action.stage)
            if exchange is None:
                continue
            seconds = costs.of(action, (action.stage, action.microbatch) in split)
            if action.op is Op.FORWARD:
                seconds += exchange.forward + (0.0 if action.stage in begun else exchange.first_forward)
                begun.add(action.stage)
            elif action.op is Op.BACKWARD:
                seconds += exchange.backward
            found[action] = seconds + (exchange.last_backward if action == last.get(action.stage) else 0.0)
    return replace(costs, actions=found)


def merge(
    sequences: Sequence[tuple[int, Sequence[Action]]],
    links: Sequence[Transfer],
    costs: Costs,
    *,
    num_ranks: int,
    in_flight: Sequence[int] | None = None,
) -> Timeline:
    """Run (rank, ordered actions) sequences; a rank with several takes, of those ready, a backward first, a W last,
    then the oldest microbatch. This is list scheduling: whenever a rank is free and something is ready, it works.

    With `in_flight`, stage s starts the forward of microbatch m only after the backward, all of it, of m - in_flight[s].
    The order is unique, since every choice has a total order, and it exists whenever the sequences, the links and the
    bounds together have no cycle. ScheduleError says who waits for what otherwise.
    """
    simulation = _Simulation(sequences, links, costs, num_ranks, in_flight)
    simulation.run()
    return Timeline(num_ranks, tuple(simulation.events))


def timeline_text(timeline: Timeline, *, max_columns: int = 160) -> str:
    """Draw a timeline: a row for each rank, a column for the shortest event (wider ones if `max_columns` needs it).

    A cell shows what runs in the middle of its column: `F3`, microbatch 3's forward, `B3`, its backward, `W3`, the
    deferred part of it, `--`, it goes on, `..`, nothing. Where a rank has several stages, the stage comes first: `2F3`.
    """
    if not timeline.events:
        return "".join(f"rank {rank}\n" for rank in range(timeline.num_ranks))
    several = len({(e.rank, e.action.stage) for e in timeline.events}) > len({e.rank for e in timeline.events})
    shortest = min((e.end - e.start for e in timeline.events if e.end > e.start), default=1.0)
    makespan = timeline.makespan
    column = max(shortest, makespan / max_columns)
    rows = [[""] * math.ceil(makespan / column - 1e-9) for _ in range(timeline.num_ranks)]
    for event in timeline.events:
        first, last = (math.ceil(time / column - 0.5 - 1e-9) for time in (event.start, event.end))
        stage = str(event.action.stage) if several else ""
        for index in range(first, last):
            rows[event.rank][index] = f"{stage}{event.action.op}{event.action.microbatch}" if index == first else "-"
    width = max((len(cell) for row in rows for cell in row), default=1)
    fill = {"": "." * width, "-": "-" * width}
    margin = len(f"rank {timeline.num_ranks - 1}")
    return "".join(
        f"{f'rank {rank}':<{margin}}  {' '.join(fill.get(cell, cell).ljust(width) for cell in row).rstrip()}\n"
        for rank, row in enumerate(rows)
    )


class _Simulation:
    """The state of one run. `arrived` has (index of the link, F or B, microbatch) of every message delivered."""

    def __init__(
        self,
        sequences: Sequence[tuple[int, Sequence[Action]]],
        links: Sequence[Transfer],
        costs: Costs,
        num_ranks: int,
        in_flight: Sequence[int] | None,
        copies: HostCopies | None = None,  # with one sequence for each rank
    ) -> None:
        self.copies = copies
        self.sequences = sequences
        self.costs = costs
        self.links = links
        self.in_flight = in_flight
        self.events: list[Event] = []
        self.position = [0] * len(sequences)
        self.free = [0.0] * num_ranks
        self.finished: dict[Action, float] = {}
        self.arrived: dict[tuple[int, Op, int], float] = {}
        self.wire_free: dict[tuple[int, int], float] = {}
        self.rank_of = {action.stage: rank for rank, actions in sequences for action in actions}
        self.split = split_backwards(action for _, actions in sequences for action in actions)
        self.on_rank: list[list[int]] = [[] for _ in range(num_ranks)]
        for index, (rank, _) in enumerate(sequences):
            self.on_rank[rank].append(index)
        self.incoming: dict[int, list[int]] = {stage: [] for stage in self.rank_of}
        self.outgoing: dict[int, list[int]] = {stage: [] for stage in self.rank_of}
        self.returning: dict[int, list[int]] = {stage: [] for stage in self.rank_of}  # of these, those with gradients
        for index, link in enumerate(links):
            missing = [s for s in (link.source, link.destination) if s != INPUTS and s not in self.rank_of]
            if missing:
                raise ScheduleError(f"expected a rank that runs stage {missing[0]}, since it has an edge; found none")
            if link.source != INPUTS:
                self.outgoing[link.source].append(index)
                self.incoming[link.destination].append(index)
                if link.has_gradient:
                    self.returning[link.source].append(index)

    def run(self) -> None:
        """Commit, again and again, the action that can start first: nothing uncommitted can end before it starts."""
        latest: dict[int, tuple[float, int] | None] = {}
        # (start, rank, sequence): the latest of each rank, and earlier ones that no longer hold
        queue: list[tuple[float, int, int]] = []

        def look(rank: int) -> None:
            found = latest[rank] = self.propose(rank)
            if found is not None:
                heapq.heappush(queue, (found[0], rank, found[1]))

        for rank in range(len(self.free)):
            look(rank)
        while queue:
            start, rank, index = heapq.heappop(queue)
            if latest[rank] != (start, index):  # that was before something else became ready
                continue
            latest[rank] = None
            for touched in self.commit(rank, start, index):
                look(touched)
        if any(index < len(actions) for index, (_, actions) in zip(self.position, self.sequences, strict=True)):
            raise ScheduleError(self.stuck())

    def propose(self, rank: int) -> tuple[float, int] | None:
        """The start time and the sequence of what the rank runs next, if anything is ready."""
        ready: list[tuple[float, int, int, int, int]] = []
        for index in self.on_rank[rank]:
            actions = self.sequences[index][1]
            if self.position[index] < len(actions):
                action = actions[self.position[index]]
                time = self.ready(action)
                if time is not None:
                    start = max(time, self.free[rank]) + self.costs.receiving * self.num_taken(action)
                    ready.append((start, _RANKING[action.op], action.microbatch, -action.stage, index))
        if not ready:
            return None
        start, *_, index = min(ready)
        return start, index

    def needs(self, action: Action) -> list[tuple[int, Op, int]]:
        """The messages without which the action cannot start."""
        if action.op is Op.WEIGHT:
            return []
        indices = self.incoming[action.stage] if action.op is Op.FORWARD else self.returning[action.stage]
        return [(index, action.op, action.microbatch) for index in indices]

    def num_taken(self, action: Action) -> int:
        """How many messages from other ranks the action needs."""
        if not self.costs.receiving:
            return 0
        senders = [self.producer(message).stage for message in self.needs(action)]
        return sum(self.rank_of[stage] != self.rank_of[action.stage] for stage in senders)

    def own_needs(self, action: Action) -> list[Action]:
        """The actions of the same stage without which the action cannot start."""
        if action.op is Op.BACKWARD:
            return [forward(action.stage, action.microbatch)]
        if action.op is Op.WEIGHT:
            return [backward(action.stage, action.microbatch)]
        if self.in_flight is None or action.microbatch < self.in_flight[action.stage]:
            return []
        earlier = action.microbatch - self.in_flight[action.stage]
        return [(weight if (action.stage, earlier) in self.split else backward)(action.stage, earlier)]

    def ready(self, action: Action) -> float | None:
        """When everything that the action needs is there; None as long as something has no time yet."""
        latest = 0.0
        for message in self.needs(action):
            arrived = self.arrived.get(message)
            if arrived is None:
                return None
            latest = max(latest, arrived)
        for before in self.own_needs(action):
            finished = self.finished.get(before)
            if finished is None:
                return None
            latest = max(latest, finished)
        if self.copies is not None and action.op is Op.BACKWARD:
            latest = max(latest, self.copies.loaded.get((action.stage, action.microbatch), 0.0))
        return latest

    def commit(self, rank: int, start: float, index: int) -> list[int]:
        """Run the next action of a sequence; return the ranks that it may have made ready."""
        action = self.sequences[index][1][self.position[index]]
        end = start + self.costs.of(action, (action.stage, action.microbatch) in self.split)
        self.events.append(Event(rank, action, start, end))
        self.position[index] += 1
        self.free[rank] = end + self.costs.between
        self.finished[action] = end
        touched = [rank, *self.hand_over(rank, action)]
        if self.copies is not None:
            self.free[rank] = self.copies.ahead_of(rank, self.position[index], self.free[rank])
        return touched

    def hand_over(self, rank: int, action: Action) -> list[int]:
        """Send what the action made, one message after the other; return who gets it."""
        if action.op is Op.WEIGHT:
            return []
        if action.op is Op.FORWARD:
            receivers = [(i, self.links[i].destination, self.links[i].num_bytes) for i in self.outgoing[action.stage]]
        else:
            returning = [i for i in self.incoming[action.stage] if self.links[i].has_gradient]
            receivers = [(i, self.links[i].source, self.links[i].gradient_bytes) for i in returning]
        peers = []
        for link, stage, num_bytes in receivers:
            peer = self.rank_of[stage]
            self.free[rank] += self.costs.sending if peer != rank else 0.0
            self.arrived[link, action.op, action.microbatch] = self.deliver(rank, peer, num_bytes, self.free[rank])
            peers.append(peer)
        return peers

    def deliver(self, rank: int, peer: int, num_bytes: int, time: float) -> float:
        """When a message handed over at `time` arrives."""
        if rank == peer:
            return time
        sent = max(time, self.wire_free.get((rank, peer), 0.0)) + num_bytes / self.costs.bandwidth
        self.wire_free[rank, peer] = sent
        return sent + self.costs.latency

    def stuck(self) -> str:
        """Who waits for what when nothing can run."""
        lines = ["the schedule deadlocks; each line names the next action of a rank and what it waits for:"]
        for index, (rank, actions) in enumerate(self.sequences):
            if self.position[index] < len(actions):
                action = actions[self.position[index]]
                waits = [before for before in self.own_needs(action) if before not in self.finished]
                waits += [self.producer(message) for message in self.needs(action) if message not in self.arrived]
                lines.append(f"  rank {rank}: {action} waits for {', '.join(map(str, waits))}")
        lines.append("order the actions of every rank so that each comes after those it depends on")
        return "\n".join(lines)

    def producer(self, message: tuple[int, Op, int]) -> Action:
        """The action that sends a message."""
        index, op, microbatch = message
        link = self.links[index]
        return forward(link.source, microbatch) if op is Op.FORWARD else backward(link.destination, microbatch)
