"""Whole numbers that stay exact: all that solvers add up is below 2^63, or it is an error.

Solvers work on times and bytes as 64-bit whole numbers, whose sums do not depend on their order. NumPy says nothing where such a sum
overflows, so every total is formed in Python's integers first, which do not.

    times   whole femtoseconds, if all of a model's together are less than 2^63 of them (2.56 hours); else the first of pico-, nano-,
            micro-, milliseconds and seconds in which they are. The unit depends on the sum alone. Times that need a larger unit
            are hours in all, so a picosecond more or less changes nothing
    bytes   never scaled: more than 2^63 of them (8 EiB) at once are an error, which says of what there are so many
    others  numbers that need not be whole, of instances without a model, become whole ones in proportion: `in_proportion`

Costs are fractions of the totals, in double precision: dividing a whole number by a total is monotone, so of two stages the one with
more never costs less, and equal ones cost the same, however large they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from smpc.errors import PartitionError

LARGEST = 2**63 - 1
_ROOM = 2**61  # for sums of numbers that need not be whole, with a margin for what rounding up adds
UNITS_PER_SECOND = (1e15, 1e12, 1e9, 1e6, 1e3, 1.0)


def whole_times(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Times in whole numbers of one unit: see the module docstring. PartitionError for times that are no numbers or too long."""
    if not np.isfinite(seconds).all() or (seconds < 0).any():
        wrong = seconds[~(np.isfinite(seconds) & (seconds >= 0))][0]
        raise PartitionError(
            f"expected times of operations that are finite and not negative, found {wrong} seconds: check the FLOP/s and bandwidths "
            "of the device, and times that were measured"
        )
    for per_second in UNITS_PER_SECOND:
        with np.errstate(over="ignore"):
            rounded = np.rint(seconds * per_second)
        if (rounded < 2.0**63).all():
            whole = rounded.astype(np.int64)
            if sum(whole.tolist()) <= LARGEST:
                return whole
    raise PartitionError(
        f"expected operations that take less than {LARGEST:.3g} seconds in all, found {float(seconds.sum()):.3g}: check the FLOP/s and "
        "bandwidths of the device"
    )


def check_total(
    total: int, what: str, hint: str = "make microbatches smaller, or have fewer of them in flight"
) -> None:
    """PartitionError if whole numbers with this sum cannot be added up exactly; `what` says what they are."""
    if total > LARGEST:
        raise PartitionError(f"expected less than 2^63 {what}, found {float(total):.3g}: {hint}")


def in_proportion(values: Sequence[float], multiplier: int = 1) -> tuple[list[int], Fraction]:
    """Whole numbers in proportion to `values`, and the proportion.

    The proportion is the least power of two that makes all whole: every double is a fraction with such a denominator. Where
    `multiplier` times the sum would not fit, it is the largest that does, and values are rounded up.
    """
    exact = [Fraction(value) for value in values]
    room = Fraction(_ROOM) / (multiplier * (sum(exact) or 1))
    wanted = max((value.denominator for value in exact), default=1)
    power = room.numerator.bit_length() - room.denominator.bit_length()
    power -= Fraction(2) ** power > room
    factor = min(Fraction(wanted), Fraction(2) ** power)
    return [math.ceil(value * factor) for value in exact], factor
