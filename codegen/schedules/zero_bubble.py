"""Zero-bubble schedules with one stage per rank (arXiv 2401.10241): the backward is split.

Terms
    p, m    number of ranks, of microbatches; stage s is on rank s
    F       forward; I, the gradients of a stage's inputs (`B`); W, those of its parameters. Also what each takes
    lag     by how many microbatches the W of a rank follow its B

Only B is waited for, by the rank before. W waits for nothing but its own B, so it fills what would be idle time.

Example: H1, p = 3, m = 5, F = I = W (`table`):

    rank 0  F0 F1 F2 .. .. B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4
    rank 1  .. F0 F1 .. B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 B4 W3 W4
    rank 2  .. .. F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4
"""

from __future__ import annotations

from smpc.codegen.actions import Action, Schedule, backward, forward, weight


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """The forwards and backwards of 1F1B; rank r's W lag r microbatches behind, which keeps every rank's memory at p.

    Rank r runs p - r forwards, then a backward and a forward in turn, from its (r + 1)-th backward on with a W between
    them, then the remaining backwards, each with a W.

    A step takes m (F + I + W) + (p - 1)(F + I - W) on balanced stages if m >= p and F, I, W are alike: with F = I = W the
    bubble is (p - 1) / (3 m + p - 1), a third of that of 1F1B. In flight on every rank: min(m, p).
    """
    return tuple(_order(rank, num_microbatches, num_ranks - rank, lag=rank) for rank in range(num_ranks))


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """More forwards before the first backward: no rank is idle between its first and its last action.

    Rank r runs 2 (p - r) - 1 forwards, enough to compute until its first backward can start; its W lag 2 r behind.

    With F = I = W and m >= 2 p - 1, rank r computes from r F to r F + m (F + I + W) without a pause; a step takes
    m (F + I + W) + (p - 1) F, nothing beyond the ramp-in of the last rank. In flight on every rank: min(m, 2 p - 1).
    """
    return tuple(_order(rank, num_microbatches, 2 * (num_ranks - rank) - 1, lag=2 * rank) for rank in range(num_ranks))


def _order(stage: int, num_microbatches: int, warm_up: int, lag: int) -> tuple[Action, ...]:
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
