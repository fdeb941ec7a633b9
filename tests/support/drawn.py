"""How many examples a property test draws: a fifth in `make test`, whose examples are the same in every run."""

from hypothesis import core

_LEAST = 10


def examples(count: int) -> int:
    """`count` where a seed is given, as `make test-all` does; else a fifth of it, and at least ten."""
    return count if core.global_force_seed is not None else min(count, max(_LEAST, count // 5))
