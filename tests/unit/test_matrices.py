"""tests/support/matrices.py: what is left to `make test` has every value that goes into the count."""

import itertools

import pytest
from matrices import chosen


def cases(*sizes):
    return [frozenset(enumerate(row)) for row in itertools.product(*(range(size) for size in sizes))]


@pytest.mark.parametrize("sizes", [(5,), (3, 4), (2, 3, 4), (7, 7)])
def test_every_value_is_among_twice_as_many_cases_as_the_longest_parameter_has_values(sizes):
    found = cases(*sizes)
    kept = chosen(found, 2 * max(sizes))
    assert len(kept) == min(2 * max(sizes), len(found))
    assert set().union(*(found[index] for index in kept)) == set().union(*found)


def test_a_count_beyond_the_matrix_keeps_all_and_a_smaller_one_is_kept_to():
    assert chosen(cases(2, 2), 9) == {0, 1, 2, 3}
    assert chosen(cases(9), 3) == {0, 4, 8}
    assert chosen([], 3) == set()
    for count in range(1, 13):
        assert len(chosen(cases(3, 4), count)) == count


def test_values_that_only_kept_cases_have_do_not_keep_it_waiting():
    rows = [frozenset({("a", 0), ("b", 0)}), frozenset({("a", 0)}), frozenset({("a", 0)})]
    assert chosen(rows, 3) == {0, 1, 2}
