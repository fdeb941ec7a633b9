"""ZB-V: a zero-bubble schedule with two pieces per rank that lie like a V (arXiv 2401.10241, section 6).

    rank 0    stage 0        stage 2p-1        a microbatch goes down the ranks through the first pieces
    rank 1      stage 1    stage 2p-2          and up again through the second ones, so the rank that starts it
    ...            ...                         also ends it, and has its loss at once
    rank p-1    stage p-1, stage p

The backward is split as in `smpc.codegen.schedules.zero_bubble`: B for the inputs, W for the parameters.

Example: p = 2, m = 3, F = I = W (`table`):

    rank 0  0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 3F2 3B2 3W2 0B1 0W1 0B2 0W2 ...
    rank 1  ... 1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1B1 2B2 1B2 1W1 2W2 1W2
"""

from __future__ import annotations

from smpc.codegen.actions import Action, Schedule, backward, forward, weight
from smpc.codegen.schedules.search import with_late_weights
from smpc.codegen.simulate import Costs, chain


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

    With F = I = W on balanced pieces and m >= p, a step takes m (F + I + W) + (p - 1) F / 2, F, I, W being those of a whole
    rank: nothing beyond the ramp-in of the last rank. In flight on every rank: at most min(2 m, 2 p) pieces, as much as
    min(m, p) microbatches of a whole rank.

    With m < 2 p - 1 the rule is that of 2 p - 1 microbatches without those that do not exist. From 2 m < 3 p - 1 on, that
    leaves gaps in which a W is not yet due, so a rank runs its F and B in the order of the rule, each as soon as it is
    there, and a W when it is 2 (p - 1) places overdue, or when nothing else is there.
    """
    rule = tuple(_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
    if 2 * num_microbatches >= 3 * num_ranks - 1:
        return rule
    num_stages, slots = 2 * num_ranks, (2 * num_ranks,) * num_ranks
    lag = 2 * (num_ranks - 1)
    return with_late_weights(rule, v_placement(num_ranks), chain(num_stages), Costs.uniform(num_stages), lag, slots)


def _rank(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    pieces = (rank, 2 * num_ranks - 1 - rank)
    total = max(num_microbatches, 2 * num_ranks - 1)
    done = {"F0": 0, "B0": 0, "W0": 0, "F1": 0, "B1": 0, "W1": 0}
    makers = {"F": forward, "B": backward, "W": weight}
    actions: list[Action] = []

    def run(*names: str) -> None:
        for name in names:
            if name != "F0" or done[name] < total:
                actions.append(makers[name[0]](pieces[int(name[1])], done[name]))
                done[name] += 1

    run(*["F0"] * (2 * (num_ranks - rank) - 1))
    run(*["F1", "F0"] * rank)
    run(*["F1", "B1", "W1"] * (num_ranks - rank))
    while done["F1"] < total:
        run("F0", "B0", "W0", "F1", "B1", "W1")
    run(*["B0", "B1"] * rank)
    run(*["B0", "W0"] * (num_ranks - rank))
    run(*["W1"] * (total - done["W1"]), *["W0"] * (total - done["W0"]))
    return tuple(action for action in actions if action.microbatch < num_microbatches)
