"""Random pipelines for the tests of codegen, and an independent way to run their programs.

`replay` runs programs with ranks taking turns at random and numbers in place of tensors: a forward hashes what it got,
a backward hashes its forward's value with the gradients it got. `reference` computes the same numbers without programs.
"""

import random
from collections import defaultdict, deque

from hypothesis import strategies as st

from smpc.codegen.program import Channel, Op, weight
from smpc.tracer.ir import TensorSpec


def channel(index, source, destination, placement, *, grad=(True,)):
    """A channel with one float32[2] value for each entry of `grad`."""
    return Channel(
        index=index,
        source=source,
        destination=destination,
        source_rank=0 if source == -1 else placement[source],
        destination_rank=placement[destination],
        values=tuple(f"v{index}_{i}" for i in range(len(grad))),
        specs=tuple(TensorSpec((2,), "float32", (1,), requires_grad) for requires_grad in grad),
    )


def chain_channels(placement):
    """Stage s to stage s + 1, after one channel that brings the model's inputs to stage 0."""
    inputs = channel(0, -1, 0, placement, grad=(False,))
    return (inputs, *(channel(s + 1, s, s + 1, placement) for s in range(len(placement) - 1)))


@st.composite
def pipelines(draw, max_stages=6, max_microbatches=6):
    """(placement, channels, num_microbatches, active_microbatches): any placement, any DAG of channels."""
    num_stages = draw(st.integers(1, max_stages))
    placement = tuple(draw(st.lists(st.integers(0, 3), min_size=num_stages, max_size=num_stages)))
    pairs = [(u, v) for v in range(num_stages) for u in range(-1, v)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=12))
    grads = st.lists(st.booleans(), min_size=1, max_size=2)
    channels = tuple(channel(i, u, v, placement, grad=draw(grads)) for i, (u, v) in enumerate(chosen))
    return placement, channels, draw(st.integers(1, max_microbatches)), draw(st.integers(1, 8))


def split_backwards(schedule, numbers):
    """The schedule with the backward of about half of its (stage, microbatch) split, each W somewhere after its B."""
    result = []
    for actions in schedule:
        found, late = [], {}
        for action in actions:
            found.append(action)
            if action.op is Op.BACKWARD:
                waiting = late.setdefault(action.stage, [])
                # A whole backward adds to the gradients at once, so what was put off must come before it.
                if numbers.random() < 0.5:
                    waiting.append(weight(action.stage, action.microbatch))
                else:
                    found[-1:] = [*waiting, action]
                    waiting.clear()
            for waiting in late.values():
                while waiting and numbers.random() < 0.4:
                    found.append(waiting.pop(0))
        result.append(tuple(found + [action for waiting in late.values() for action in waiting]))
    return tuple(result)


def gradient(channel):
    """Whether gradients come back on the channel."""
    return channel.source != -1 and any(spec.requires_grad for spec in channel.specs)


def reference(num_stages, channels, num_microbatches, has_backward=True):
    """(F or B, stage, microbatch) -> number."""
    values = {}
    for m in range(num_microbatches):
        for s in range(num_stages):
            entering = [c for c in channels if c.destination == s]
            values["F", s, m] = hash((s, m, *(-1 if c.source == -1 else values["F", c.source, m] for c in entering)))
        for s in reversed(range(num_stages)) if has_backward else ():
            back = [values["B", c.destination, m] for c in channels if c.source == s and gradient(c)]
            values["B", s, m] = hash((values["F", s, m], *back))
    return values


def replay(programs, channels, shared=(), seed=0):
    """What every F and B computed, or None if the ranks stop short, mismatch, lack a value or do not sum a gradient."""
    order = random.Random(seed)
    position = [0] * len(programs)
    wires, held, values, summed = defaultdict(deque), {}, {}, []
    holders = [sorted(set(ranks)) if len(set(ranks)) > 1 else [] for _, ranks in shared]
    while True:
        waiting = [r for r, program in enumerate(programs) if position[r] < len(program)]
        order.shuffle(waiting)
        moved = []
        for rank in waiting:
            here = programs[rank][position[rank]]
            if here.op is Op.REDUCE:
                moved = holders[here.parameter]
                if any(here not in programs[r][position[r] : position[r] + 1] for r in moved):
                    moved = []
                    continue
                if any(i.op in (Op.BACKWARD, Op.WEIGHT) for r in moved for i in programs[r][position[r] :]):
                    return None
                summed.append(here.parameter)
            elif here.op in (Op.RECV, Op.RECV_GRAD) and not wires[here.peer, rank]:
                continue
            elif _run(here, rank, channels, wires, held, values):
                moved = [rank]
            else:
                return None
            break
        if not moved:
            break
        for rank in moved:
            position[rank] += 1
    complete = sorted(summed) == [p for p, ranks in enumerate(holders) if ranks]
    return values if complete and not waiting and not any(wires.values()) else None


def _run(here, rank, channels, wires, held, values):
    """One instruction; `held` has what a rank can read, by (rank, "F" or "B", edge, microbatch). False: impossible."""
    if here.op is Op.WEIGHT:
        key = ("B", here.stage, here.microbatch)
        done = held.setdefault((rank, "W"), set())
        possible = key in values and key not in done
        done.add(key)
        return possible
    m, kind = here.microbatch, "B" if here.op in (Op.BACKWARD, Op.SEND_GRAD, Op.RECV_GRAD, Op.MOVE_GRAD) else "F"
    if here.op in (Op.FORWARD, Op.BACKWARD):
        if (here.op, here.stage, m) in values:
            return False
        needed = [c for c in channels if (c.destination if kind == "F" else c.source) == here.stage]
        needed = [c for c in needed if kind == "F" or gradient(c)]
        got = [held.get((rank, kind, c.index, m)) for c in needed]
        own = (here.stage, m) if kind == "F" else (values.get(("F", here.stage, m)),)
        if None in got or None in own:
            return False
        values[str(here.op), here.stage, m] = hash((*own, *got))
        return True
    edge = channels[here.edge]
    producer = edge.source if kind == "F" else edge.destination
    if here.op in (Op.RECV, Op.RECV_GRAD):
        arrived, value = wires[here.peer, rank].popleft()
        held[rank, *arrived] = value
        return arrived == (kind, here.edge, m)
    value = -1 if producer == -1 else values.get((kind, producer, m))
    if here.op in (Op.MOVE, Op.MOVE_GRAD):
        if (rank, kind, here.edge, m) in held:
            return False
        held[rank, kind, here.edge, m] = value
    else:
        wires[rank, here.peer].append(((kind, here.edge, m), value))
    return value is not None
