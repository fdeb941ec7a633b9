"""The published formulas of all named schedules: idle share, time of a step, activations in flight, p in 2..16, m in p..8p."""

import itertools

import pytest

from smpc.codegen.program import rank_peaks
from smpc.codegen.schedules.named import choose
from smpc.codegen.simulate import Costs, chain, simulate

# name -> pieces per rank; 1 - busy / (p makespan); most pieces in flight on rank r
BUBBLES = {
    "gpipe": (1, lambda p, m, v: (p - 1) / (m + p - 1), lambda p, m, v, r: m),
    "1f1b": (1, lambda p, m, v: (p - 1) / (m + p - 1), lambda p, m, v, r: min(m, p - r)),
    **dict.fromkeys(
        ("interleaved-1f1b 2", "interleaved-1f1b 3", "interleaved-1f1b 4"),
        (0, lambda p, m, v: (p - 1) / (v * m + p - 1), lambda p, m, v, r: min(v * m, v * p + p - 1 - 2 * r)),
    ),
    # m (F + I + W) + (p - 1)(F + I - W), in units of F = I = W
    "zb-h1": (1, lambda p, m, v: (p - 1) / (3 * m + p - 1), lambda p, m, v, r: min(m, p)),
    # nothing beyond the ramp-in: m (F + I + W) + (p - 1) F
    "zb-h2": (1, lambda p, m, v: (p - 1) / (3 * m + p - 1), lambda p, m, v, r: min(m, 2 * p - 1)),
    "zb-v": (2, lambda p, m, v: (p - 1) / (6 * m + p - 1), None),
}


def check(name, p, m):
    schedule, _, pieces = name.partition(" ")
    own, bubble, held = BUBBLES[name]
    v = int(pieces or own)
    choice = choose(p, m, schedule=schedule, num_pieces=v, active_microbatches=m)
    num_stages = p * v
    built = choice.build(chain(num_stages), Costs.uniform(num_stages))
    found = simulate(built, chain(num_stages), Costs.uniform(num_stages))
    assert found.bubble_fraction == pytest.approx(bubble(p, m, v)), (name, p, m)
    peaks = rank_peaks(built)
    if held is None:  # p microbatches of a whole rank
        assert max(peaks) <= v * min(m, p), (name, p, m)
    else:
        assert peaks == tuple(held(p, m, v, rank) for rank in range(p)), (name, p, m)


def microbatches(name, p):
    """All that the formula is for: interleaved 1F1B's is for multiples of p."""
    return range(p, 8 * p + 1, p if name.startswith("interleaved") else 1)


@pytest.mark.parametrize("name", BUBBLES)
def test_a_sample(name):
    for p in (2, 3, 5, 8):
        allowed = microbatches(name, p)
        for m in sorted({p, p + 1, 2 * p - 2, 2 * p - 1, 2 * p, 3 * p}):
            if m in allowed:
                check(name, p, m)


def test_zb_v_with_few_microbatches():
    """Where its rule does not fit: 2 m < 3 p - 1."""
    for p, m in [(4, 5), (7, 8), (9, 12), (12, 14), (16, 19)]:
        check("zb-v", p, m)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "p"), list(itertools.product(BUBBLES, range(2, 17))))
def test_all(name, p):
    for m in microbatches(name, p):
        check(name, p, m)
