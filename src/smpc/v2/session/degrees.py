"""The degrees of parallelism that SMP v2 is configured with, and the rules that they keep on a number of ranks.

Terms, with the letters of the rules below
    W   world size
    T   tensor_parallel_degree: ranks that share a layer's weights
    H   shard degree: ranks over which parameters are sharded. hybrid_shard_degree, or W / T where that is 0
    C   context_parallel_degree: ranks of those H that share a sequence
    E   expert_parallel_degree: ranks of those H that share the experts

    W = replicas x H x T          C divides H          E divides H

    >>> list(broken_rules(8, hybrid_shard_degree=3))[0].split(";")[0]
    'hybrid_shard_degree: expected 0 or a divisor of 8 (8 processes / tensor_parallel_degree 1), found 3'

Source: the public configuration reference of SMP v2.
"""

from __future__ import annotations

from collections.abc import Iterator


def broken_rules(
    world_size: int,
    hybrid_shard_degree: int = 0,
    tensor_parallel_degree: int = 1,
    context_parallel_degree: int = 1,
    expert_parallel_degree: int = 1,
) -> Iterator[str]:
    """The violations of degrees on this many ranks, a line each. They are at least 1 (`hybrid_shard_degree`: 0)."""
    world, shard, tensor = world_size, hybrid_shard_degree, tensor_parallel_degree
    if world % tensor:
        yield (
            f"tensor_parallel_degree: expected a divisor of the number of processes, {world}, found {tensor}; use one of "
            f"{_divisors(world)}, or start a multiple of {tensor} processes"
        )
        return  # the other degrees divide what is left
    left = world // tensor
    if shard and left % shard:
        yield (
            f"hybrid_shard_degree: expected 0 or a divisor of {left} ({world} processes / tensor_parallel_degree {tensor}), found {shard}; "
            f"use one of 0, {_divisors(left)}, or start a multiple of {shard * tensor} processes"
        )
        return
    effective = shard or left
    written = f"hybrid_shard_degree {shard}" if shard else f"hybrid_shard_degree 0, which is {left} here"
    for name, degree in (
        ("context_parallel_degree", context_parallel_degree),
        ("expert_parallel_degree", expert_parallel_degree),
    ):
        if effective % degree:
            bound = f"at most {effective}" if degree > effective else f"a divisor of {effective}"
            yield f"{name}: expected {bound} ({written}), found {degree}; use one of {_divisors(effective)}, or another hybrid_shard_degree"


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
