"""When receives are posted, in runs in which every send and every posted receive waits until all that its rank has under way is done.

That is what a device does that runs one kernel after another, or on which a kernel is loaded, or memory given back, at every
operation: the worst that can happen. A run in which less waits does not deadlock either, as none of these waits is for a later one.
"""

from collections import defaultdict

import pytest
from codegen_cases import chain_channels, channel, pipelines, split_backwards
from drawn import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from smpc.codegen.lower import lower
from smpc.codegen.program import Op, RankProgram, backward, forward
from smpc.codegen.schedules.named import NAMES, choose, evaluation, interleaved
from smpc.codegen.simulate import Costs, chain
from smpc.executor.program.message_order import posting_points

SENDS, RECEIVES = (Op.SEND, Op.SEND_GRAD), (Op.RECV, Op.RECV_GRAD)


class Wire:
    """From one rank to another, in messages. One gets through as soon as it has been sent and its receive has been posted."""

    def __init__(self):
        self.sent = self.posted = self.taken = 0


def others(program, reduce):
    return [rank for rank in sorted(program.shared_parameters[reduce.parameter][1]) if rank != program.rank]


def operations(program):
    """(instruction, number of the handler, ranks that it sends to, rank that it receives from or None)."""
    for instruction in program.instructions:
        if instruction.op is Op.REDUCE:
            yield instruction, 0, others(program, instruction), None
            for number, peer in enumerate(others(program, instruction)):
                yield instruction, 1 + number, [], peer
        else:
            peers = [instruction.peer]
            yield (
                instruction,
                0,
                peers if instruction.op in SENDS else [],
                instruction.peer if instruction.op in RECEIVES else None,
            )


class Run:
    """All ranks of `programs`, which post receives at `points`; `stuck` are those that do not reach their ends.

    `late` counts the receives that no point posts, but the wait for them.
    """

    def __init__(self, programs, points):
        self.wires, self.position, self.late = defaultdict(Wire), [0] * len(programs), 0
        ranks = {program.rank: self.rank(program, points[program.rank]) for program in programs}
        before = None
        while ranks and before != self.state():
            before = self.state()
            ranks = {rank: rest for rank, rest in ranks.items() if next(rest, "done") != "done"}
        self.stuck = sorted(ranks)

    def state(self):
        return [*self.position, *((w.sent, w.posted, w.taken) for w in self.wires.values())]

    def rank(self, program, points):
        """A generator that yields while the rank waits."""
        own = program.rank
        for instruction, number, destinations, source in operations(program):
            for peer, count in points.get((instruction, number), ()):
                yield from self.post(own, peer, count)
            for peer in destinations:
                self.wires[own, peer].sent += 1
                yield from self.device(own)
            if source is not None:
                wire = self.wires[source, own]
                wire.taken += 1
                self.late += wire.posted < wire.taken
                yield from self.post(own, source, wire.taken)
            self.position[own] += 1

    def post(self, rank, peer, count):
        wire = self.wires[peer, rank]
        while wire.posted < count:
            wire.posted += 1
            yield from self.device(rank)

    def device(self, rank):
        """Until nothing is under way on it."""
        while any(self.is_under_way(rank, *wire) for wire in self.wires.items()):
            yield

    def is_under_way(self, rank, pair, wire):
        return (pair[0] == rank and wire.sent > wire.posted) or (pair[1] == rank and wire.posted > wire.sent)


def programs_of(schedule, channels, num_ranks, shared=()):
    lowered = lower(schedule, channels, num_ranks=num_ranks, shared_parameters=shared)
    return tuple(RankProgram(r, num_ranks, 1, True, own, channels, (), shared, "", "") for r, own in enumerate(lowered))


def check(programs):
    run = Run(programs, [posting_points(programs, rank) for rank in range(len(programs))])
    assert not run.stuck
    assert not run.late


def named(name, num_ranks, num_microbatches):
    choice = choose(num_ranks, num_microbatches, schedule=name)
    num_stages = len(choice.placement)
    schedule = choice.build(chain(num_stages), Costs((1.0,) * num_stages, (2.0,) * num_stages, 0.1))
    shared = (("tied", (0, num_ranks - 1)), ("all", tuple(range(num_ranks))))
    return programs_of(schedule, chain_channels(choice.placement), num_ranks, shared)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 2), (2, 7), (3, 6), (4, 4), (4, 12), (8, 16)])
def test_no_schedule_deadlocks_though_every_operation_waits_for_all_that_is_under_way(
    name, num_ranks, num_microbatches
):
    check(named(name, num_ranks, num_microbatches))


def any_order(placement, channels, num_microbatches, numbers):
    """A schedule as a CSV file may hold it: each rank runs what it can, in whatever order."""
    edges = [(c.source, c.destination) for c in channels if c.source >= 0]
    waiting = [act(s, m) for act in (forward, backward) for s in range(len(placement)) for m in range(num_microbatches)]
    schedule = [[] for _ in range(4)]

    def may_run(action):
        if action.op is Op.FORWARD:
            needs = [forward(u, action.microbatch) for u, v in edges if v == action.stage]
        else:
            needs = [backward(v, action.microbatch) for u, v in edges if u == action.stage]
            needs.append(forward(action.stage, action.microbatch))
        return not any(need in waiting for need in needs)

    while waiting:
        action = numbers.choice([action for action in waiting if may_run(action)])
        waiting.remove(action)
        schedule[placement[action.stage]].append(action)
    return tuple(map(tuple, schedule))


SHARED = st.lists(st.sets(st.integers(0, 3), min_size=2), max_size=3)


@settings(max_examples=examples(150), deadline=None)
@given(pipelines(), SHARED, st.randoms(use_true_random=False))
def test_nor_does_any_pipeline(pipeline, shared, numbers):
    """Several channels between two ranks, ranks without stages, backwards in halves, parameters shared by any ranks."""
    placement, channels, num_microbatches, active = pipeline
    shared = tuple((f"p{i}", tuple(sorted(holders))) for i, holders in enumerate(shared))
    schedule = interleaved(len(placement), placement, num_microbatches, active)
    check(programs_of(schedule, channels, 4, shared))
    check(programs_of(any_order(placement, channels, num_microbatches, numbers), channels, 4, shared))
    check(programs_of(split_backwards(schedule, numbers), channels, 4, shared))
    check(programs_of(evaluation(len(placement), placement, num_microbatches), channels, 4))


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v"])
def test_posting_all_receives_at_once_would_deadlock(name):
    """What the test above would find."""
    programs = named(name, 4, 8)
    points = []
    for program in programs:
        received = [i.peer for i in program.instructions if i.op in RECEIVES]
        points.append({(program.instructions[0], 0): [(peer, received.count(peer)) for peer in set(received)]})
    assert Run(programs, points).stuck


def by_peer(points):
    """Of each point, all of one peer, then all of the next."""
    return {place: sorted(due) for place, due in points.items()}


def without_reduces(points):
    return {place: due for place, due in points.items() if place[0].op is not Op.REDUCE}


def skipping():
    """Three stages on three ranks, each with model inputs, and an edge from the first to the last."""
    placement = (0, 1, 2)
    ends = [(-1, 0), (-1, 1), (0, 1), (-1, 2), (0, 2), (1, 2)]
    channels = tuple(channel(i, *pair, placement) for i, pair in enumerate(ends))
    return programs_of(interleaved(3, placement, 1, 1), channels, 3)


@pytest.mark.parametrize(
    ("programs", "change"), [(skipping(), by_peer), (named("1f1b", 2, 4), without_reduces)], ids=["skip", "shared"]
)
def test_so_would_another_order_of_what_is_posted_before_one_instruction(programs, change):
    """Receives were posted peer after peer, and what REDUCE receives when it was waited for. A posted receive allocates its buffer, which
    may give memory back, and then waits for what has been posted or sent before it: two ranks that share an embedding each sent
    half of a message (the mask), and waited for it to arrive before they posted anything.
    """
    points = [posting_points(programs, rank) for rank in range(len(programs))]
    assert not Run(programs, points).stuck
    assert Run(programs, [change(own) for own in points]).stuck


def test_the_points_of_two_ranks():
    """F takes 1, B 2. Rank 0 sends at times 1, 2, 7; rank 1 at 4, 7, 10."""
    programs = programs_of(interleaved(2, (0, 1), 3, 4), chain_channels((0, 1)), 2)
    points = [{str(i): found for (i, _), found in posting_points(programs, rank).items()} for rank in range(2)]
    # Rank 0 waits for the first and the last; F s0 m2 ends at 7 as the second is sent, of which one of the two ranks is to be the first.
    assert points[0] == {"RECV_GRAD e1 m0 r1": [(1, 1)], "RECV_GRAD e1 m1 r1": [(1, 2)], "RECV_GRAD e1 m2 r1": [(1, 3)]}
    # F s1 m0 ends at 2, B s1 m1 at 7: what is sent meanwhile arrives meanwhile.
    assert points[1] == {"RECV e1 m0 r0": [(0, 1)], "F s1 m0": [(0, 2)], "B s1 m1": [(0, 3)]}
