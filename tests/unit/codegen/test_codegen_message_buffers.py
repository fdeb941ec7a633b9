"""Buffers of messages, against a count by hand."""

from smpc.codegen.message_buffers import messages_by_action
from smpc.codegen.program import Channel
from smpc.codegen.schedules.named import choose
from smpc.codegen.simulate import Costs, chain
from smpc.tracer.ir import TensorSpec

NUM_BYTES = 1 << 20
VALUE = TensorSpec((NUM_BYTES // 4,), "float32", (1,), True)


def test_buffers_of_two_virtual_stages():
    """Two ranks, two stages each, two microbatches: rank 1 gets 0 -> 1 twice, 2 -> 3 twice, and gradients of 1 -> 2 behind a mask."""
    choice = choose(2, 2, schedule="interleaved-1f1b", num_pieces=2)
    schedule = choice.build(chain(4), Costs.uniform(4))
    channels = tuple(Channel(i, i, i + 1, i % 2, (i + 1) % 2, (f"h{i}",), (VALUE,)) for i in range(3))
    found = messages_by_action(schedule, channels, 2)
    assert {rank: len(actions) for rank, actions in found.items()} == {0: 8, 1: 8}
    last = [(held.num_bytes // NUM_BYTES, dict(held.sent)) for held in found[1]]
    assert dict(zip([str(action.instruction) for action in schedule[1]], last, strict=True)) == {
        "F s1 m0": (3, {}),  # four are posted when the step begins, and this forward has one of them
        "F s1 m1": (2, {1: 1}),
        "F s3 m0": (1, {1: 1}),  # its value tells that stage 1's first one has arrived
        "B s3 m0": (1, {1: 1}),
        "F s3 m1": (2, {}),  # the buffer of the first microbatch, and its gradient, sent
        "B s3 m1": (2, {}),
        "B s1 m0": (3, {}),  # two buffers, one of which has the gradient that came, and one gradient sent
        "B s1 m1": (4, {}),
    }


def on_a_v(num_microbatches):
    """What rank 1, with stages 1 and 2 of the four, holds by action, in values of an edge."""
    choice = choose(2, num_microbatches, schedule="zb-v")
    schedule, ranks = choice.build(chain(4), Costs.uniform(4)), choice.placement
    channels = tuple(Channel(i, i, i + 1, ranks[i], ranks[i + 1], (f"h{i}",), (VALUE,)) for i in range(3))
    actions = zip(schedule[1], messages_by_action(schedule, channels, 2)[1], strict=True)
    return {str(action.instruction): (held.num_bytes // NUM_BYTES, dict(held.sent)) for action, held in actions}


def test_what_one_stage_of_a_rank_hands_to_the_next_one():
    assert on_a_v(2) == {
        "F s1 m0": (3, {}),  # four buffers, two for gradients, and this forward has one of them
        "F s2 m0": (3, {}),  # it has taken what F s1 m0 has made
        "F s1 m1": (2, {2: 1}),
        "F s2 m1": (2, {2: 1}),
        "B s2 m0": (2, {2: 1}),
        "B s1 m0": (3, {2: 1}),  # the gradient that B s2 m0 has made
        "W s2 m0": (4, {2: 1}),  # three buffers that no microbatch has, and a gradient sent
        "B s2 m1": (4, {}),
        "W s1 m0": (5, {}),  # the gradient for B s1 m1
        "B s1 m1": (5, {}),
        "W s2 m1": (6, {}),  # four buffers, and two gradients sent
        "W s1 m1": (6, {}),
    }
    waiting = [action for action, (_, values) in on_a_v(4).items() if 1 in values]
    assert waiting == [
        "B s1 m0",
        "W s1 m0",
        "B s1 m1",
        "W s1 m1",
    ]  # from F s1 m2 to F s2 m2, and from F s1 m3 to F s2 m3
