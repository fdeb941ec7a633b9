"""tests/support/matrices.py: what is left to `make test` has every value that goes into the count."""

import itertools
from types import SimpleNamespace

import pytest
from matrices import case_of, chosen, mark_the_rest_slow

NUMBERS = itertools.count()


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


class Item(pytest.Function):
    """As pytest collects it, with what `mark_the_rest_slow` asks of it alone."""

    nodeid, is_slow = "file::test[case]", False

    def get_closest_marker(self, name):
        return pytest.mark.matrix(20).mark if name == "matrix" else None

    def add_marker(self, marker):
        self.is_slow = marker.name == "slow"


def item(**parameters):
    made = Item.__new__(Item)  # which pytest leaves to its collectors
    made.callspec = SimpleNamespace(params=parameters, indices=dict.fromkeys(parameters, next(NUMBERS)))
    return made


def test_values_are_told_by_themselves():
    """They were once told by pytest's number of the case, so that no two cases seemed to share one, and eight of sixteen changes were left
    out of twenty cases."""
    assert case_of({"a": 1, "b": {"c": 2, "d": None}}) == case_of({"b": {"d": None, "c": 2}, "a": 1})
    assert case_of({"a": 1}) != case_of({"a": 2})
    items = [item(surface=surface, what=what) for surface in range(4) for what in "abcdefghijklmnop"]
    mark_the_rest_slow(items)
    kept = [each.callspec.params for each in items if not each.is_slow]
    assert len(kept) == 20
    assert {params["what"] for params in kept} == set("abcdefghijklmnop")
    assert {params["surface"] for params in kept} == set(range(4))
