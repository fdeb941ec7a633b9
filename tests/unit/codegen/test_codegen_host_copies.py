"""Copies of what is offloaded, in time: small steps by hand, and any step against the longest path through its programs."""

import math

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpc.codegen.offload import HostCopies, Offloading, insert_offloads
from smpc.codegen.program import Action, Op
from smpc.codegen.schedules.named import interleaved, simple
from smpc.codegen.schedules.zero_bubble import zb_h1
from smpc.codegen.simulate import Costs, Transfer, _Simulation, chain
from smpc.partitioner.graph.plan import HostLink


def run(schedule, links, costs, offloading):
    """The events and the copies of a step."""
    copies = HostCopies(offloading, schedule)
    simulation = _Simulation(tuple(enumerate(schedule)), links, costs, len(schedule), None, copies)
    simulation.run()
    return simulation.events, copies.copies


def by_hand(text, seconds, horizon=1, overlaps=True):
    """`F0 0-1` for each action of one rank, forward 1 and backward 2, with copies that take so many seconds."""
    schedule = (tuple(Action.parse(f"{part[0]} s0 m{part[1:]}") for part in text.split()),)
    offloading = Offloading(horizon, {0: 1}, HostLink(math.inf, seconds, overlaps))
    events, copies = run(schedule, (), Costs.uniform(1), offloading)
    return (
        " ".join(f"{e.action.op}{e.action.microbatch} {e.start:g}-{e.end:g}" for e in events),
        " ".join(f"{c.op}{c.microbatch} {c.start:g}-{c.end:g}" for c in copies),
    )


FOUR = "F0 F1 F2 F3 B0 B1 B2 B3"


def test_short_copies_are_hidden():
    assert by_hand(FOUR, 1.0) == (
        "F0 0-1 F1 1-2 F2 2-3 F3 3-4 B0 4-6 B1 6-8 B2 8-10 B3 10-12",
        # Before F3: OFFLOAD2, RELEASE1, RELOAD0. Both directions work at once.
        "OFFLOAD0 1-2 OFFLOAD1 2-3 OFFLOAD2 3-4 RELOAD0 3-4 OFFLOAD3 4-5 RELOAD1 4-5 RELOAD2 6-7 RELOAD3 8-9",
    )


def test_a_task_waits_for_memory_and_a_backward_for_its_values():
    assert by_hand(FOUR, 3.0) == (
        # F2 waits for RELEASE0 until 4, F3 for RELEASE1 until 7, B0 for RELEASE2 until 10: one copy after the other.
        # B1 waits for RELEASE3 until 13; what is loaded back is there by then.
        "F0 0-1 F1 1-2 F2 4-5 F3 7-8 B0 10-12 B1 13-15 B2 16-18 B3 19-21",
        "OFFLOAD0 1-4 OFFLOAD1 4-7 OFFLOAD2 7-10 RELOAD0 7-10 OFFLOAD3 10-13 RELOAD1 10-13 RELOAD2 13-16 RELOAD3 16-19",
    )


def test_a_cpu_copies_between_its_tasks():
    found, copies = by_hand(FOUR, 0.5, overlaps=False)
    assert found == "F0 0-1 F1 1.5-2.5 F2 3-4 F3 5-6 B0 7-9 B1 9.5-11.5 B2 12-14 B3 14-16"
    assert copies.startswith("OFFLOAD0 1-1.5 OFFLOAD1 2.5-3 OFFLOAD2 4-4.5 RELOAD0 4.5-5 OFFLOAD3 6-6.5")


def test_stages_that_offload_nothing_wait_for_nothing():
    schedule = (tuple(Action.parse(f"{part[0]} s0 m{part[1:]}") for part in FOUR.split()),)
    events, copies = run(schedule, (), Costs.uniform(1), Offloading(1, {1: 10**9}, HostLink(1.0, 1.0, True)))
    assert (events[-1].end, copies) == (12.0, [])


def longest_paths(schedule, links, costs, offloading):
    """When each action ends, by the constraints that the written programs have, instruction by instruction."""
    graph = nx.DiGraph()
    written = insert_offloads(
        [[action.instruction for action in actions] for actions in schedule], offloading.num_bytes, offloading.horizon
    )
    split = {(a.stage, a.microbatch) for actions in schedule for a in actions if a.op is Op.WEIGHT}

    def seconds(instruction):
        if instruction.op in (Op.OFFLOAD, Op.RELOAD):
            return offloading.link.latency + offloading.num_bytes[instruction.stage] / offloading.link.rate
        if instruction.op is Op.RELEASE:
            return 0.0
        action = Action(instruction.op, instruction.stage, instruction.microbatch)
        return costs.of(action, (action.stage, action.microbatch) in split)

    graph.add_node("start")
    for program in written:
        computing, wires = "start", {Op.OFFLOAD: "start", Op.RELOAD: "start"}
        for instruction in program:
            key = instruction.stage, instruction.microbatch
            name, takes = (instruction.op, *key), seconds(instruction)
            graph.add_edge(computing, name, weight=takes)
            if instruction.op in wires:  # begins when the rank gets there; the rank goes on, unless it copies itself
                graph.add_edge(wires[instruction.op], name, weight=takes)
                wires[instruction.op] = name
                computing = computing if offloading.link.overlaps else name
                continue
            if instruction.op is Op.RELEASE:
                graph.add_edge((Op.OFFLOAD, *key), name, weight=0.0)
            if instruction.op is Op.BACKWARD and (Op.RELOAD, *key) in graph:
                graph.add_edge((Op.RELOAD, *key), name, weight=takes)
            computing = name
    for program in schedule:
        for a in program:
            for link in links:
                if a.op is Op.FORWARD and link.destination == a.stage:
                    graph.add_edge(
                        (Op.FORWARD, link.source, a.microbatch),
                        (a.op, a.stage, a.microbatch),
                        weight=seconds(a.instruction),
                    )
                if a.op is Op.BACKWARD and link.source == a.stage:
                    graph.add_edge(
                        (Op.BACKWARD, link.destination, a.microbatch),
                        (a.op, a.stage, a.microbatch),
                        weight=seconds(a.instruction),
                    )
    ends = {"start": 0.0}
    for node in nx.topological_sort(graph):
        if node != "start":
            ends[node] = max(ends[before] + graph.edges[before, node]["weight"] for before in graph.predecessors(node))
    return ends


@given(st.data())
def test_any_step_is_the_longest_path_through_its_programs(data):
    number, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    build = data.draw(st.sampled_from([simple, interleaved, zb_h1]))
    ranks = tuple(range(number))
    schedule = (
        build(number, microbatches)
        if build is zb_h1
        else build(number, ranks, microbatches, data.draw(st.integers(1, 7)))
    )
    whole = st.integers(1, 9).map(float)
    costs = Costs(tuple(data.draw(whole) for _ in ranks), tuple(data.draw(whole) for _ in ranks))
    offloading = Offloading(
        data.draw(st.integers(1, 4)),
        {stage: data.draw(st.integers(1, 40)) for stage in ranks if data.draw(st.booleans())},
        HostLink(
            data.draw(st.sampled_from([1.0, 4.0, 64.0])),
            data.draw(st.sampled_from([0.0, 0.5])),
            data.draw(st.booleans()),
        ),
    )
    links = chain(number)
    events, copies = run(schedule, links, costs, offloading)
    expected = longest_paths(schedule, links, costs, offloading)
    for event in events:
        assert event.end == pytest.approx(expected[event.action.op, event.action.stage, event.action.microbatch])
    for copy in copies:
        assert copy.end == pytest.approx(expected[copy.op, copy.stage, copy.microbatch])
    plain, none = run(schedule, links, costs, Offloading(1, {}, offloading.link))
    assert none == []
    before = {event.action: event.end for event in plain}
    assert all(event.end >= before[event.action] for event in events)  # offloading makes nothing faster


def test_what_comes_out_late_holds_up_other_ranks():
    """Two ranks, F and B of one second each: rank 1 waits for what rank 0's link is late with."""
    schedule = simple(2, (0, 1), 4, 4)
    links = (Transfer(0, 1, 0, 0),)
    costs = Costs((1.0, 1.0), (1.0, 1.0))
    events, _ = run(schedule, links, costs, Offloading(1, {0: 1}, HostLink(math.inf, 5.0, True)))
    ends = {(e.rank, str(e.action)): e.end for e in events}
    assert ends[0, "F s0 m2"] == 7.0  # F1 ended at 2, RELEASE0 at 6
    assert ends[1, "F s1 m2"] == 8.0
