"""When receives are posted, in runs in which every instruction first waits for all that its rank has under way.

That is what a device does on which a kernel is loaded, or memory given back, at every instruction: the worst that can happen.
"""

from collections import defaultdict

import pytest
from codegen_cases import chain_channels, pipelines
from hypothesis import given, settings

from smpc.codegen.lower import lower
from smpc.codegen.program import Op, RankProgram
from smpc.codegen.schedule import evaluation, interleaved
from smpc.codegen.schedules.choice import NAMES, choose
from smpc.codegen.simulate import Costs, chain
from smpc.executor.posting import posting_points

SENDS, RECEIVES = (Op.SEND, Op.SEND_GRAD), (Op.RECV, Op.RECV_GRAD)


class Wire:
    """From one rank to another, in messages. One gets through as soon as it has been sent and its receive has been posted."""

    def __init__(self):
        self.sent = self.posted = self.taken = 0


def others(program, reduce):
    return [rank for rank in program.shared_parameters[reduce.parameter][1] if rank != program.rank]


class Run:
    """All ranks of `programs`, which post receives at `points`; `stuck` are those that do not reach their ends."""

    def __init__(self, programs, points):
        self.wires, self.position = defaultdict(Wire), [0] * len(programs)
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
        for instruction in program.instructions:
            for peer, count in points.get(instruction, ()):
                wire = self.wires[peer, program.rank]
                wire.posted = max(wire.posted, count)
            while any(self.is_under_way(program.rank, *wire) for wire in self.wires.items()):
                yield
            if instruction.op in SENDS:
                self.wires[program.rank, instruction.peer].sent += 1
            elif instruction.op is Op.REDUCE:
                for peer in others(program, instruction):
                    self.wires[program.rank, peer].sent += 1
                for peer in others(program, instruction):
                    yield from self.take(self.wires[peer, program.rank])
            elif instruction.op in RECEIVES:
                yield from self.take(self.wires[instruction.peer, program.rank])
            self.position[program.rank] += 1

    def is_under_way(self, rank, pair, wire):
        return (pair[0] == rank and wire.sent > wire.posted) or (pair[1] == rank and wire.posted > wire.sent)

    def take(self, wire):
        wire.taken += 1
        wire.posted = max(wire.posted, wire.taken)
        while wire.sent < wire.taken:
            yield


def programs_of(schedule, channels, num_ranks, shared=()):
    lowered = lower(schedule, channels, num_ranks=num_ranks, shared_parameters=shared)
    return tuple(RankProgram(r, num_ranks, 1, True, own, channels, (), shared, "", "") for r, own in enumerate(lowered))


def check(programs):
    assert not Run(programs, [posting_points(programs, rank) for rank in range(len(programs))]).stuck


def named(name, num_ranks, num_microbatches):
    choice = choose(num_ranks, num_microbatches, schedule=name)
    num_stages = len(choice.placement)
    schedule = choice.build(chain(num_stages), Costs((1.0,) * num_stages, (2.0,) * num_stages, 0.1))
    shared = (("tied", (0, num_ranks - 1)), ("all", tuple(range(num_ranks))))
    return programs_of(schedule, chain_channels(choice.placement), num_ranks, shared)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 2), (2, 7), (3, 6), (4, 4), (4, 12), (8, 16)])
def test_no_schedule_deadlocks_though_every_instruction_waits_for_all_that_is_under_way(
    name, num_ranks, num_microbatches
):
    check(named(name, num_ranks, num_microbatches))


@settings(max_examples=150, deadline=None)
@given(pipelines())
def test_nor_does_any_pipeline(pipeline):
    placement, channels, num_microbatches, active = pipeline
    check(programs_of(interleaved(len(placement), placement, num_microbatches, active), channels, 4))
    check(programs_of(evaluation(len(placement), placement, num_microbatches), channels, 4))


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v"])
def test_posting_all_receives_at_once_would_deadlock(name):
    """What the test above would find."""
    programs = named(name, 4, 8)
    points = []
    for program in programs:
        received = [i.peer for i in program.instructions if i.op in RECEIVES]
        points.append({program.instructions[0]: [(peer, received.count(peer)) for peer in set(received)]})
    assert Run(programs, points).stuck


def test_the_points_of_two_ranks():
    """F takes 1, B 2. Rank 0 sends at times 1, 2, 7; rank 1 at 4, 7, 10."""
    programs = programs_of(interleaved(2, (0, 1), 3, 4), chain_channels((0, 1)), 2)
    points = [{str(i): found for i, found in posting_points(programs, rank).items()} for rank in range(2)]
    # Rank 0 waits for the first and the last; F s0 m2 ends at 7 as the second is sent, of which one of the two ranks is to be the first.
    assert points[0] == {"RECV_GRAD e1 m0 r1": [(1, 1)], "RECV_GRAD e1 m1 r1": [(1, 2)], "RECV_GRAD e1 m2 r1": [(1, 3)]}
    # F s1 m0 ends at 2, B s1 m1 at 7: what is sent meanwhile arrives meanwhile.
    assert points[1] == {"RECV e1 m0 r0": [(0, 1)], "F s1 m0": [(0, 2)], "B s1 m1": [(0, 3)]}
