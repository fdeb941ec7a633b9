"""Zero-bubble schedules, with one stage per rank (arXiv 2401.10241): the backward is split.

Terms
    p, m    number of ranks, of microbatches; stage s is on rank s
    F       forward; I, the gradients of a stage's inputs (`B`); W, of its parameters. Also the time of each
    lag     by how many microbatches the W of a rank follow its B

Only B is waited for, by the rank before. W waits for nothing but its own B, so it fills what would be idle time.

Example: H1, p = 3, m = 5, F = I = W (`table`):

    rank 0  F0 F1 F2 .. .. B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4
    rank 1  .. F0 F1 .. B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 B4 W3 W4
    rank 2  .. .. F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4

ZB-V: a zero-bubble schedule with two pieces per rank, placed like a V (arXiv 2401.10241, section 6).

    rank 0    stage 0        stage 2p-1        a microbatch goes down the ranks through the first pieces
    rank 1      stage 1    stage 2p-2          and up again through the second ones, so the rank that starts it
    ...            ...                         also ends it, and has its loss at once
    rank p-1    stage p-1, stage p

Example: p = 2, m = 3, F = I = W (`table`):

    rank 0  0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 3F2 3B2 3W2 0B1 0W1 0B2 0W2 ...
    rank 1  ... 1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1B1 2B2 1B2 1W1 2W2 1W2
"""

from __future__ import annotations

import itertools

from smpc.codegen.program import Action, Schedule, backward, forward, weight
from smpc.codegen.schedules.list_scheduler import with_late_weights
from smpc.codegen.simulate import Costs, chain


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """The forwards and backwards of 1F1B; rank r's W lag r microbatches behind, which keeps every rank's memory at p.

    Rank r runs p - r forwards, then a backward and a forward in turn, from its (r + 1)-th backward on with a W between
    them, then the remaining backwards, each with a W.

    A step takes m (F + I + W) + (p - 1)(F + I - W) on balanced stages if m >= p and F, I, W are alike: with F = I = W the
    bubble is (p - 1) / (3 m + p - 1), a third of 1F1B's. In flight on every rank: min(m, p).
    """
    return tuple(_zero_bubble_order(rank, num_microbatches, num_ranks - rank, lag=rank) for rank in range(num_ranks))


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """More forwards before the first backward: no rank is idle between its first and its last action.

    Rank r runs 2 (p - r) - 1 forwards, enough to compute until its first backward can start; its W lag 2 r behind.

    With F = I = W and m >= 2 p - 1, rank r computes from r F to r F + m (F + I + W) without a pause; a step takes
    m (F + I + W) + (p - 1) F, nothing beyond the ramp-in of the last rank. In flight on every rank: min(m, 2 p - 1).
    """
    return tuple(
        _zero_bubble_order(rank, num_microbatches, 2 * (num_ranks - rank) - 1, lag=2 * rank)
        for rank in range(num_ranks)
    )


def _zero_bubble_order(stage: int, num_microbatches: int, warm_up: int, lag: int) -> tuple[Action, ...]:
    """`warm_up` forwards, then B, the W of `lag` microbatches ago, F; without forwards left, B and W in turn."""
    ahead = min(warm_up, num_microbatches)
    actions = [forward(stage, m) for m in range(ahead)]
    weights = 0
    for m in range(num_microbatches):
        actions.append(backward(stage, m))
        if m >= lag or ahead == num_microbatches:
            actions.append(weight(stage, weights))
            weights += 1
        if ahead < num_microbatches:
            actions.append(forward(stage, ahead))
            ahead += 1
    return (*actions, *(weight(stage, m) for m in range(weights, num_microbatches)))


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """The rank of each stage: 0, 1, ..., p - 1, p - 1, ..., 1, 0."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Rank r, with pieces 0 (on the way down) and 1 (on the way up):

    1. 2 (p - r) - 1 forwards of piece 0, until the first microbatch is back
    2. r times F1 F0
    3. p - r times F1 B1 W1
    4. F0 B0 W0 F1 B1 W1 in turn, as long as there are forwards
    5. r times B0 B1, p - r times B0 W0, then what is left of W1 and of W0

    With F = I = W on balanced pieces and m >= p, a step takes m (F + I + W) + (p - 1) F / 2, with F, I, W of a whole rank:
    nothing beyond the ramp-in of the last rank. In flight on every rank: at most min(2 m, 2 p) pieces, as much as min(m, p)
    microbatches of a whole rank.

    With m < 2 p - 1 the rule is applied to 2 p - 1 microbatches, without the missing ones. From 2 m < 3 p - 1 on, this
    leaves gaps in which a W is not yet due. So a rank runs its F and B in the order of the rule, each as soon as it is
    ready, and a W when it is 2 (p - 1) places overdue, or when nothing else is ready.
    """
    rule = tuple(_zb_v_actions(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
    if 2 * num_microbatches >= 3 * num_ranks - 1:
        return rule
    num_stages, slots = 2 * num_ranks, (2 * num_ranks,) * num_ranks
    lag = 2 * (num_ranks - 1)
    return with_late_weights(rule, v_placement(num_ranks), chain(num_stages), Costs.uniform(num_stages), lag, slots)


def _zb_v_actions(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """The actions of a rank in the schedule zb-v."""
    total, left = max(num_microbatches, 2 * num_ranks - 1), num_ranks - rank
    (f0, f1), (b0, b1), (w0, w1) = (
        [(make, piece) for piece in (rank, 2 * num_ranks - 1 - rank)] for make in (forward, backward, weight)
    )
    order = [f0] * (2 * left - 1) + [f1, f0] * rank + [f1, b1, w1] * left
    order += [f0, b0, w0, f1, b1, w1] * (total - num_ranks)
    order += [b0, b1] * rank + [b0, w0] * left + [w1] * rank + [w0] * rank
    numbers = {action: itertools.count() for action in (f0, b0, w0, f1, b1, w1)}
    numbered = ((make, stage, next(numbers[make, stage])) for make, stage in order)
    return tuple(make(stage, number) for make, stage, number in numbered if number < num_microbatches)
