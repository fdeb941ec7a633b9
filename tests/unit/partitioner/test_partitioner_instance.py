"""The numeric planner on its own: against brute force, and what it says of bad or impossible instances."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction

import pytest
from drawn import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smpc.errors import MemoryLimitError, PartitionError
from smpc.partitioner import Instance, Link, Node, Processor, solve_instance
from smpc.partitioner.solvers import ilp

AMOUNTS = {
    "small": st.sampled_from([0, 0, 1, 2.5, 4, 7]),
    "zero": st.sampled_from([0, 0, 0, 1]),
    "fractions": st.sampled_from([0.1, 0.2, 0.3, 1 / 3, 0.7]),
    "near": st.sampled_from([10**9, 10**9 + 1, 10**9 + 2]),
    "far": st.sampled_from([0, 1e-3, 0.1, 3.0, 1e6 + 0.1, 1e12]),
    "beyond": st.sampled_from([0, 5e-324, 1e-150, 0.1, 3.0, 1e12 + 0.5, 1e150]),
}


@st.composite
def instances(draw, *kinds):
    n = draw(st.integers(1, 5))
    kind = draw(st.sampled_from(kinds))
    amounts = AMOUNTS[kind]
    nodes = [Node(f"n{i}", draw(amounts), draw(amounts), draw(amounts)) for i in range(n)]
    pairs = [(u, w) for u in range(n) for w in range(u + 1, n)]
    chosen = sorted(draw(st.sets(st.sampled_from(pairs), max_size=6))) if pairs else []
    edges = [Link(f"n{u}", f"n{w}", draw(amounts)) for u, w in chosen]
    in_flight = draw(st.lists(st.integers(1, 3), min_size=1, max_size=min(3, n)))
    speeds = st.sampled_from([1, 1, 0.5, 3, 1e-6, 1e9])

    def limit(held):
        """Just what some nodes take on this device, as a double: the nearest, which may be less."""
        some = draw(st.sets(st.sampled_from(nodes), min_size=1))
        return float(sum(Fraction(node.memory) + held * Fraction(node.activation_memory) for node in some))

    common = draw(st.sampled_from([None, 12, 25.5]))
    is_tight = kind not in ("far", "beyond") and draw(st.booleans())  # there, what just fits may be missed
    devices = [Processor(draw(speeds), limit(held) if is_tight else common, held) for held in in_flight]
    return Instance.of(nodes, edges, devices, draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])))


def loads(instance, stage_of):
    """Time and memory by device, written out from the definition, in fractions."""
    found = []
    for i, device in enumerate(instance.devices):
        own = [node for node in instance.nodes if stage_of[node.name] == i]
        memory = sum(Fraction(node.memory) + device.in_flight * Fraction(node.activation_memory) for node in own)
        found.append((sum(Fraction(node.time) for node in own) / Fraction(device.speed), memory))
    return found


def bottleneck(instance, stage_of):
    total_time = sum(Fraction(node.time) for node in instance.nodes) or 1
    mean = Fraction(sum(device.in_flight for device in instance.devices), len(instance.devices))
    total = sum(Fraction(node.memory) + mean * Fraction(node.activation_memory) for node in instance.nodes) or 1
    w = Fraction(instance.memory_weight)
    return max((1 - w) * time / total_time + w * memory / total for time, memory in loads(instance, stage_of))


def placements(instance):
    """All that are allowed."""
    names = [node.name for node in instance.nodes]
    for row in itertools.product(range(len(instance.devices)), repeat=len(names)):
        stage_of = dict(zip(names, row, strict=True))
        within = all(
            memory <= (math.inf if device.memory_limit is None else device.memory_limit)
            for (_, memory), device in zip(loads(instance, stage_of), instance.devices, strict=True)
        )
        ordered = all(stage_of[edge.source] <= stage_of[edge.target] for edge in instance.edges)
        ordered &= all(len({stage_of[name] for name in group}) == 1 for group in instance.together)
        if within and ordered and len({*row}) == len(instance.devices):
            yield stage_of


def received(instance, stage_of):
    """Bytes that cross: what one source sends to one device once."""
    sizes = {}
    for edge in instance.edges:
        if stage_of[edge.source] != stage_of[edge.target]:
            sizes.setdefault((edge.source, stage_of[edge.target]), []).append(Fraction(edge.num_bytes))
    return sum(map(max, sizes.values()))


def is_exact(instance):
    """Whether limits hold exactly: 61 bits are enough for all memory."""
    amounts = [Fraction(value) for node in instance.nodes for value in (node.memory, node.activation_memory)]
    most = max(device.in_flight for device in instance.devices) * sum(amounts)
    return most * max(value.denominator for value in amounts) <= 2**61


def check(instance):
    """Everything that is said of an instance, against all of its placements."""
    found = list(placements(instance))
    if not found:
        with pytest.raises(MemoryLimitError) as caught:
            solve_instance(instance)
        free = placements(unlimited(instance))
        least = min(max(memory for _, memory in loads(instance, stage_of)) for stage_of in free)
        assert math.floor(least) <= caught.value.least_bytes <= math.ceil(least * Fraction(1001, 1000))
        return
    solution = solve_instance(instance)
    best = float(min(bottleneck(instance, stage_of) for stage_of in found))
    assert solution.stage_of in found
    assert solution.bottleneck == pytest.approx(float(bottleneck(instance, solution.stage_of)), rel=1e-12, abs=0)
    assert solution.lower_bound <= best * (1 + 1e-12)
    assert solution.bottleneck <= best * (1 + 2e-3)
    if is_exact(instance):
        assert solution.gap <= 2e-3
    assert solution.lower_bound * (1 + solution.gap) == pytest.approx(solution.bottleneck, rel=1e-12, abs=0)
    for (time, memory), *reported in zip(
        loads(instance, solution.stage_of), solution.times, solution.memory, strict=True
    ):
        assert reported == [float(time), float(memory)]
    assert solution.received_bytes == float(received(instance, solution.stage_of))


THREE_AND_TWO = Instance(  # 0.25 was reported: the mean of one microbatch and two was taken for two
    (Node("a", 0), Node("b", 0), Node("c", 0, activation_memory=1)),
    (),
    (Processor(in_flight=1), Processor(in_flight=2)),
    memory_weight=0.5,
)
AS_MUCH_AS_IT_HAS = Instance(  # nothing was found to fit: 0.1 was rounded up, and the limit of 0.1 down
    (Node("a", 1, 0.1), Node("b", 1, 1e6)), (), (Processor(memory_limit=0.1), Processor()), memory_weight=0.5
)

BESIDE_THE_BOUND = Instance(  # nothing was found: where no cut fits, nothing near the bound was tried
    (Node("a", 0, activation_memory=1), Node("b", 0), Node("c", 0), Node("d", 1)),
    (),
    (Processor(memory_limit=0), Processor(memory_limit=1)),
)
SLOW_AND_FAST = Instance(  # the integer program could not be read: a cost of 1e15
    (Node("a", 0), Node("b", 0), Node("c", 1)), (Link("a", "b", 1),), (Processor(1e-6), Processor(1e9))
)
TWO_OF_A_KIND = Instance(  # 7 bytes were counted: what two nodes that belong together send to a third, once
    (Node("a", 1), Node("b", 1), Node("c", 2)),
    (Link("a", "c", 5), Link("b", "c", 7)),
    (Processor(), Processor()),
    together=(("a", "b"),),
)


@settings(max_examples=examples(60))
@given(instances("small", "zero"))
@example(THREE_AND_TWO)
@example(AS_MUCH_AS_IT_HAS)
@example(BESIDE_THE_BOUND)
@example(SLOW_AND_FAST)
@example(TWO_OF_A_KIND)
def test_equals_brute_force(instance):
    check(instance)


@settings(max_examples=examples(60))
@given(instances("fractions", "near", "far", "beyond"))
def test_equals_brute_force_where_numbers_are_awkward(instance):
    check(instance)


def test_the_instance_of_three_nodes_in_numbers():
    found = solve_instance(THREE_AND_TWO)
    assert found.bottleneck == pytest.approx(1 / 3, rel=1e-12)
    assert found.memory == (1.0, 0.0)


def unlimited(instance):
    devices = [Processor(device.speed, None, device.in_flight) for device in instance.devices]
    return Instance(instance.nodes, instance.edges, tuple(devices), instance.memory_weight, instance.together)


def diamond(devices=2, **options):
    nodes = [Node("a", 1, 4), Node("b", 8, 4), Node("c", 8, 4), Node("d", 1, 4)]
    edges = [("a", "b", 5), ("a", "c", 5), ("b", "d", 5), ("c", "d", 5)]
    return Instance.of(nodes, edges, devices, **options)


def test_module_docstring_example():
    found = solve_instance(diamond())
    assert found.bottleneck == 0.5
    assert found.gap < 1e-6
    assert found.received_bytes == 10
    assert found.times == (9.0, 9.0)


def test_a_faster_device_gets_more():
    found = solve_instance(diamond([Processor(speed=1), Processor(speed=9)]))
    assert found.stage_of == {"a": 0, "b": 1, "c": 1, "d": 1}
    assert found.times == (1.0, 17 / 9)
    mirrored = solve_instance(diamond([Processor(speed=9), Processor(speed=1)]))
    assert mirrored.stage_of == {"a": 0, "b": 0, "c": 0, "d": 1}


def test_a_small_device_gets_less():
    found = solve_instance(diamond([Processor(memory_limit=4), Processor(memory_limit=12)]))
    assert found.stage_of == {"a": 0, "b": 1, "c": 1, "d": 1}
    assert found.memory == (4.0, 12.0)


def test_nodes_that_belong_together():
    found = solve_instance(diamond(together=[("b", "c")]))
    assert found.stage_of["b"] == found.stage_of["c"]
    chained = Instance.of([Node(name, 1) for name in "abc"], [("a", "b"), ("b", "c")], 1, together=[("a", "c")])
    assert set(solve_instance(chained).stage_of.values()) == {0}
    with pytest.raises(PartitionError, match="at most as many devices as separable nodes, found 2 and 1"):
        solve_instance(Instance(chained.nodes, chained.edges, (Processor(), Processor()), 0.0, chained.together))


def test_too_little_memory_says_what_would_do():
    with pytest.raises(
        MemoryLimitError, match=r"limits 5, found none on 2 devices.* would do is 8.*fewest .* are 4"
    ) as caught:
        solve_instance(diamond([Processor(memory_limit=5)] * 2))
    assert caught.value.least_bytes == 8
    with pytest.raises(MemoryLimitError, match=r"limits 5, 4, found none"):
        solve_instance(diamond([Processor(memory_limit=5), Processor(memory_limit=4)]))
    with pytest.raises(MemoryLimitError, match=r"none of up to 128 devices"):
        solve_instance(diamond([Processor(memory_limit=3)] * 2))


def wide():
    """Eighteen units in two strands: no cut of them in order is the best."""
    nodes = [Node(f"n{i}", 17 * i % 29 + 1) for i in range(18)]
    return Instance.of(nodes, [(f"n{i}", f"n{i + 2}", 1 + i % 3) for i in range(16)], 4)


def test_a_time_limit_gives_the_best_placement_and_its_gap():
    found = solve_instance(wide(), time_limit=0.0)
    assert "limit" in found.note
    assert found.lower_bound <= found.bottleneck
    assert found.gap == found.bottleneck / found.lower_bound - 1
    assert found.bottleneck <= 1.05 * solve_instance(wide()).bottleneck


def test_without_a_solver_there_is_an_answer_and_a_warning(monkeypatch):
    best = solve_instance(diamond())
    monkeypatch.setattr(ilp, "solver_name", lambda: None)
    with pytest.warns(UserWarning, match="no solver for integer programs"):
        found = solve_instance(diamond())
    assert found.bottleneck == best.bottleneck
    assert "no solver is installed" in found.note


def test_json():
    text = json.dumps(
        {
            "nodes": [{"name": "a", "time": 1.5}, {"name": "b", "time": 0.5, "memory": 3}],
            "edges": [{"source": "a", "target": "b", "num_bytes": 7}],
            "devices": [{"speed": 2.0, "memory_limit": 10}, {}],
            "memory_weight": 0.25,
        }
    )
    assert Instance.from_json(text) == Instance(
        (Node("a", 1.5), Node("b", 0.5, 3)), (Link("a", "b", 7),), (Processor(2.0, 10), Processor()), 0.25
    )
    assert solve_instance(Instance.from_json(text)).received_bytes == 7


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([Node("a", -1)], [], 1), "time -1 of node a"),
        (([Node("a", math.nan)], [], 1), "time nan of node a"),
        (([Node("a", 1, memory=-2)], [], 1), "memory -2 of node a"),
        (([Node("a", 1)], [("a", "b")], 1), "unknown node b"),
        (([Node("a", 1), Node("b", 1)], [("a", "b", -3)], 1), "-3 bytes of edge a -> b"),
        (([Node("a", 1), Node("a", 1)], [], 1), "2 nodes called a"),
        (([Node("a", 1), Node("b", 1)], [("a", "b"), ("b", "a")], 1), "cycles, found a -> b -> a"),
        (([Node("a", 1)], [("a", "a")], 1), "cycles, found a -> a"),
        (([Node("a", 1)], [], 0), "no device"),
        (([], [], 1), "no node"),
        (([Node("a", 1)], [], [Processor(speed=0)]), "speed 0 of device 0"),
        (([Node("a", 1)], [], [Processor(memory_limit=-1)]), "memory limit -1 of device 0"),
        (([Node("a", 1)], [], [Processor(in_flight=0)]), "0 microbatches in flight on device 0"),
        (([Node("a", 1)], [], 1, 2.0), "memory weight 2.0"),
        (([Node("a", 1)], [], 1, 0.0, [["a", "z"]]), "unknown node z among those to keep together"),
    ],
)
def test_bad_instances(arguments, text):
    with pytest.raises(PartitionError, match=text):
        Instance.of(*arguments)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(PartitionError, match=r"time -1 of node a.*; .*no device; .*unknown node x"):
        Instance.of([Node("a", -1)], [("a", "x")], 0)


@pytest.mark.parametrize("text", ["[]", '{"nodes": []}', '{"nodes": [], "edges": [], "devices": 1, "device": 2}'])
def test_bad_json_objects(text):
    with pytest.raises(PartitionError, match="expected an object with nodes, edges and devices"):
        Instance.from_json(text)


def test_bad_json_rows():
    with pytest.raises(PartitionError, match=r"expected the keys \['name', 'time'\].*Node 0 has \['name'\]"):
        Instance.from_json('{"nodes": [{"name": "a"}], "edges": [], "devices": 1}')


def test_more_devices_than_nodes_and_bad_limits():
    with pytest.raises(PartitionError, match="found 2 and 1"):
        solve_instance(Instance.of([Node("a", 1)], [], 2))
    with pytest.raises(PartitionError, match="0 or more, found -1"):
        solve_instance(diamond(), time_limit=-1)


@pytest.mark.parametrize(
    ("node", "device", "text"),
    [
        (Node("a", 1e300), Processor(), "time 1e.300 of node a, which must be a number from 0 to 1e.200"),
        (Node("a", 10**400), Processor(), "time of 1329 bits of node a"),
        (Node("a", 1, math.inf), Processor(), "memory inf of node a"),
        (
            Node("a", 1),
            Processor(speed=1e-300),
            "speed 1e-300 of device 0, which must be a number from 1e-200 to 1e.200",
        ),
        (Node("a", 1), Processor(memory_limit=math.inf), "memory limit inf of device 0"),
        (Node("a", 1), Processor(in_flight=2**40), "1099511627776 microbatches in flight on device 0"),
    ],
)
def test_numbers_that_doubles_cannot_work_with(node, device, text):
    with pytest.raises(PartitionError, match=text):
        Instance.of([node], [], [device])


@pytest.mark.parametrize("unit", [1e-190, 1e-20, 1e20, 1e190])
def test_any_unit_of_time_and_memory_will_do(unit):
    def of(unit):
        nodes = [
            Node(name, time * unit, memory * unit) for name, time, memory in (("a", 3, 1), ("b", 2, 5), ("c", 4, 2))
        ]
        return Instance.of(nodes, [("a", "b"), ("b", "c")], [Processor(memory_limit=7 * unit)] * 2, 0.5)

    usual, found = solve_instance(of(1.0)), solve_instance(of(unit))
    assert found.stage_of == usual.stage_of
    assert found.bottleneck == pytest.approx(usual.bottleneck, rel=1e-12)
    assert found.lower_bound == pytest.approx(usual.lower_bound, rel=1e-5)
