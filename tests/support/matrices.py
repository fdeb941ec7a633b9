"""Which cases of a large matrix `make test` runs; `make test-all` runs all.

`@pytest.mark.matrix(8)` on a parametrised test keeps eight of its cases and marks the others slow. They are chosen so that as many values
of each parameter as possible are among them, and every value twice only once all have been there, from all over the list. The choice
depends on nothing but the parameters, so that it is the same on every machine and in every worker.
"""

from collections.abc import Mapping, Sequence

import pytest

Case = frozenset[tuple[str, str]]  # name of a parameter and what tells its value from others


def chosen(cases: Sequence[Case], count: int) -> set[int]:
    """Indices of at most `count` cases: next is the one that brings most values not seen yet, of equals the farthest from those kept."""
    kept: list[int] = []
    missing: set[tuple[str, str]] = set()
    while len(kept) < min(count, len(cases)):
        rest = [index for index in range(len(cases)) if index not in kept]
        missing = missing or set().union(*(cases[index] for index in rest))
        best = max(
            rest, key=lambda index: (len(cases[index] & missing), min((abs(index - k) for k in kept), default=0))
        )
        if not cases[best] & missing:  # what is missing is in kept cases alone
            missing = set()
            continue
        kept.append(best)
        missing -= cases[best]
    return set(kept)


def case_of(parameters: Mapping[str, object]) -> Case:
    """A case by its parameters. Each option of a dict counts as a parameter.

    pytest's own `indices` are no help: each case of a function has another one, whatever its values.
    """
    flat: dict[str, object] = {}
    for name, value in parameters.items():
        flat |= {f"{name} {key}": item for key, item in value.items()} if isinstance(value, Mapping) else {name: value}
    return frozenset((name, repr(value)) for name, value in flat.items())


def mark_the_rest_slow(items: Sequence[pytest.Item]) -> None:
    """Marks what `@pytest.mark.matrix` leaves out of `make test`. Cases that are slow by themselves do not count."""
    matrices: dict[str, list[pytest.Function]] = {}
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and item.get_closest_marker("matrix")
            and not item.get_closest_marker("slow")
        ):
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for rows in matrices.values():
        kept = chosen([case_of(row.callspec.params) for row in rows], rows[0].get_closest_marker("matrix").args[0])
        for index, row in enumerate(rows):
            if index not in kept:
                row.add_marker(pytest.mark.slow)
