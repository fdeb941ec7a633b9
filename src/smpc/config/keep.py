"""How long the blocks of a model whose parameters are in parts stay whole: the rule by which scripts shard, and plans predict memory."""

from __future__ import annotations

from enum import StrEnum

SMALL_PARAMETERS = 1_000_000  # `sdp_param_persistence_threshold`
MOST_PARAMETERS = 1_000_000_000  # `sdp_max_live_parameters`


class Keep(StrEnum):
    """How long whole parameters stay: see `smpc.sharding.shard`."""

    NEVER = "never"
    MICROBATCH = "microbatch"
    STEP = "step"


def keep_of(largest: int, total: int, small: int, most: int) -> Keep:
    """For a block whose largest parameter has so many elements, in a model that has `total` on this rank; both limits are the keys'."""
    if largest < small:
        return Keep.STEP
    return Keep.MICROBATCH if total <= most else Keep.NEVER
