"""Buffers of messages, against a count by hand."""

from smpc.codegen.buffers import messages_by_action
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
