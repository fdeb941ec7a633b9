"""Attributes that forward sets in Python: found by what is in their place afterwards, sent between steps, an error in them."""

import copy
import pickle

import pytest
import torch
from torch import nn

from smpc.absent.stage_attributes import AttributeWatch, StageAttributes
from smpc.errors import UsageError


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.name, self.last, self.kept, self.history = 0, "a", None, 1.5, []
        self.object, self._smpc_own = object(), 0

    def forward(self, x):
        self.calls, self.name, self.last = self.calls + 1, self.name + "b", x.sum()
        self.kept = float("1.5")  # another object of the same value
        self.history.append(1)
        self.object, self._smpc_own = object(), 1
        return x


def make():
    return nn.ModuleDict({"block": nn.Sequential(Counts(), nn.ReLU())})


FOUND = [("block.0", "calls"), ("block.0", "name"), ("block.0", "last")]


def test_what_has_another_value_is_found():
    model = make()
    watch = AttributeWatch(model, {"block"})
    assert watch.changed() == []
    model["block"](torch.ones(2))
    assert watch.changed() == FOUND
    assert AttributeWatch(model, set()).changed() == []


def test_two_ranks():
    """Rank 1 runs the block."""
    here, there = make(), make()
    mine, theirs = StageAttributes(here, 0), StageAttributes(there, 1)
    assert mine.is_empty
    there["block"](torch.ones(2))
    told = [mine.told([]), theirs.told(FOUND)]
    assert told == [((), {}), (tuple(FOUND), {("block.0", "calls"): 1, ("block.0", "name"): "ab"})]
    for each in (mine, theirs):
        each.take(told)
        assert not each.is_empty
    counts = here["block"][0]
    assert (counts.calls, counts.name, there["block"][0].last.item()) == (1, "ab", 2.0)
    with pytest.raises(UsageError, match=r"'last' of module 'block.0', on pipeline rank 1: forward sets it there"):
        counts.last + torch.ones(1)
    with mine.in_step(), theirs.in_step():
        assert there["block"][0].calls == 1
        for use in (
            lambda c: c + 1,
            lambda c: c > 1,
            lambda c: c == 1,
            bool,
            float,
            len,
            lambda c: c.real,
            pickle.dumps,
        ):
            with pytest.raises(UsageError, match=r"'calls' of module 'block.0', on pipeline rank 1"):
                use(counts.calls)
        with pytest.raises(UsageError, match="'calls'"):
            torch.ones(1) * counts.calls
        assert f"{counts.calls} {counts.calls!r}" == " ".join(
            ["<attribute 'calls' of module 'block.0', on pipeline rank 1>"] * 2
        )
        assert copy.deepcopy(counts).calls is counts.calls
        with mine.as_before():
            assert (counts.calls, counts.name, counts.last) == (1, "ab", None)
    assert (counts.calls, counts.name) == (1, "ab")
    counts.calls = there["block"][0].calls = 7  # on all ranks
    with mine.in_step():
        there["block"](torch.ones(2))
    mine.take([mine.told([]), theirs.told([])])
    assert (counts.calls, counts.name) == (8, "abb")
