"""Whether ranks in one process see that a script has changed what a module's attribute leads to, and what their copies of it are."""

import copy

import pytest
import torch

from smpc.rank_models import Print, paired


class Holder:
    def __init__(self):
        self.table, self.scale = torch.ones(2), 2.0


def tensor():
    value = torch.ones(2)
    value.factor = 0.5
    return value


CHANGES = {
    "a tensor's content": (tensor, lambda value: value.mul_(2)),
    "an attribute of a tensor": (tensor, lambda value: setattr(value, "factor", 3.0)),
    "an attribute more on a tensor": (tensor, lambda value: setattr(value, "other", None)),
    "a key": (lambda: {"a": torch.ones(1)}, lambda value: value.update(b=value.pop("a"))),
    "the name of an attribute": (Holder, lambda value: vars(value).update(size=vars(value).pop("scale"))),
    "an item of a list": (lambda: [torch.ones(1), 2], lambda value: value.reverse()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen(what):
    make, change = CHANGES[what]
    value = make()
    seen = Print(value)
    assert seen.is_of(value)
    change(value)
    assert not seen.is_of(value)


def test_values_are_paired_with_their_copies():
    inner = torch.ones(1)
    value = {"a": [inner, Holder()], "b": inner}
    copied = copy.deepcopy(value)
    found = {id(theirs): ours for theirs, ours in paired(value, copied)}
    assert found[id(inner)] is copied["b"] is copied["a"][0]
    assert found[id(value["a"][1].table)] is copied["a"][1].table
    assert list(paired([1.0], (1.0,))) == []
