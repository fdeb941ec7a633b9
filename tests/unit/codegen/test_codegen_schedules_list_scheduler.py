"""The list scheduler: never worse than what it starts from, within its bounds, possible, the same every time."""

import pytest
from codegen_cases import channel
from drawn import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from smpc.codegen.lower import lower
from smpc.codegen.program import peaks, rank_peaks
from smpc.codegen.schedules.list_scheduler import search
from smpc.codegen.schedules.named import interleaved_1f1b, loop_placement, passes
from smpc.codegen.schedules.zero_bubble import v_placement, zb_h1, zb_h2, zb_v
from smpc.codegen.simulate import Costs, Transfer, chain, simulate
from smpc.codegen.verify import Expectation, verify
from smpc.errors import ScheduleError


def costs_of(num_pieces, num_stages, backward_input, backward_weight, latency=0.0):
    """A whole rank takes F = 1."""
    whole = (backward_input + backward_weight) / num_pieces
    weight = (backward_weight / num_pieces,) * num_stages
    return Costs((1 / num_pieces,) * num_stages, (whole,) * num_stages, latency, weight=weight)


GROUNDS = {
    "zb-h1": (lambda p: tuple(range(p)), zb_h1, 1),
    "zb-h2": (lambda p: tuple(range(p)), zb_h2, 1),
    "zb-v": (v_placement, zb_v, 2),
    "interleaved-1f1b": (lambda p: loop_placement(p, 2), lambda p, m: interleaved_1f1b(p, 2, m), 2),
}


@settings(max_examples=examples(40), deadline=None)
@given(
    st.sampled_from(sorted(GROUNDS)),
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from([(1.0, 1.0), (1.4, 0.6), (0.5, 1.5)]),
    st.sampled_from([0.0, 0.3]),
)
def test_never_worse_than_its_start_on_the_ground_of_the_start(name, p, m, parts, latency):
    placement_of, build, v = GROUNDS[name]
    placement, start = placement_of(p), build(p, m)
    n = len(placement)
    costs = costs_of(v, n, *parts, latency)
    held, slots = peaks(start, n), rank_peaks(start)
    options = {"starts": (start,), "in_flight": held, "slots": slots, "moves": 50}
    found = search(placement, m, chain(n), costs, **options)
    assert simulate(found, chain(n), costs).makespan <= simulate(start, chain(n), costs).makespan + 1e-9
    assert all(a <= b for a, b in zip(peaks(found, n), held, strict=True))
    assert all(a <= b for a, b in zip(rank_peaks(found), slots, strict=True))
    assert found == search(placement, m, chain(n), costs, **options)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_any_graph_on_any_placement_without_a_start_is_proved_by_the_verifier(data):
    n, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    placement = tuple(data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
    pairs = [(u, v) for v in range(n) for u in range(v)]
    chosen = data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=6)) if pairs else []
    channels = tuple(channel(i, u, v, placement) for i, (u, v) in enumerate(chosen))
    times = st.floats(0.1, 3.0)
    numbers = [data.draw(times) for _ in range(n)]
    costs = Costs(tuple(numbers), tuple(2 * x for x in reversed(numbers)), data.draw(st.sampled_from([0.0, 0.5])))
    num_ranks = max(placement) + 1
    tight = [placement.count(rank) for rank in range(num_ranks)]  # one microbatch at a time
    slots = [count + data.draw(st.integers(0, 3)) for count in tight]
    links = [Transfer.of(channel) for channel in channels]
    schedule = search(placement, m, links, costs, slots=slots, moves=50)
    assert all(a <= b for a, b in zip(rank_peaks(schedule), slots, strict=True))
    verify(lower(schedule, channels, num_ranks=num_ranks), Expectation(channels, placement, num_ranks, m))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_pieces", "parts", "latency", "best", "shares", "points"),
    [
        (4, (1.0, 1.0), 0.0, 6.8, 8.0, 0.0),
        (4, (1.4, 0.6), 0.0, 9.86, 9.75, 2.0),
        (5, (1.0, 1.0), 0.1, 12.41, 8.0, 2.0),
    ],
    ids=["F=I=W", "I=1.4, W=0.6", "slow messages"],
)
def test_torchs_best_schedules_are_beaten(num_pieces, parts, latency, best, shares, points):
    """p = 8, m = 16: the idle share in percent of the best of torch's schedules, and what it holds in shares of a rank."""
    p, m = 8, 16
    placement, n = passes(p, num_pieces), p * num_pieces
    costs = costs_of(num_pieces, n, *parts, latency)
    found = search(placement, m, chain(n), costs, slots=(p * num_pieces,) * p, moves=0)
    assert 100 * simulate(found, chain(n), costs).bubble_fraction <= best - points
    assert max(rank_peaks(found)) <= shares * num_pieces


def test_two_pieces_per_rank_cannot_beat_zb_v_by_two_points_when_messages_are_slow():
    """What a rank runs before its first backward is at most its memory of forwards; so the last rank of a V idles.

    With p = 8, m = 16 and messages of 0.1 it starts at 7 (0.5 + 0.1) and its first backward arrives 8 + 1.4 + 7 (0.5 + 0.1)
    after the start of the step; in between fit 8 units of forwards. So a step takes at least 48 + 5.6: 10.45% idle.
    """
    p, m, latency = 8, 16, 0.1
    hops = 2 * (p - 1)
    first_backward = p + hops * latency + (p - 1) * (0.5 + latency)
    idle = first_backward - p
    assert idle == pytest.approx(5.6)
    assert 1 - 3 * m / (3 * m + idle) > 0.124 - 0.02
    costs = costs_of(2, 2 * p, 1.0, 1.0, latency)
    start = zb_v(p, m)
    assert simulate(start, chain(2 * p), costs).makespan == pytest.approx(54.8)
    assert simulate(start, chain(2 * p), costs).makespan >= 3 * m + idle


def test_equal_weights_are_solved_without_a_start():
    p, m = 4, 12
    found = search(v_placement(p), m, chain(2 * p), Costs.uniform(2 * p), slots=(6 * p,) * p, moves=0)
    assert simulate(found, chain(2 * p), Costs.uniform(2 * p)).makespan == 6 * m + p - 1


def test_bounds_that_allow_nothing():
    with pytest.raises(ScheduleError, match="slots for each of the 2 stages of rank 0, found 1; allow more in flight"):
        search((0, 1, 0), 2, chain(3), Costs.uniform(3), slots=(1, 1))
    with pytest.raises(ScheduleError, match="allow more in flight"):
        search((0, 1), 2, chain(2), Costs.uniform(2), in_flight=(1, 0))
