"""Containers of scripts: every tensor that an output leads to, whatever it is held by."""

import collections
import dataclasses

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from smpc.v1.steps.model_calls import cast_inputs, cast_outputs, tensors_within


class Batch(dict):
    """A dict of the script's own, of which pytree knows nothing."""


class Slots:
    __slots__ = ("__hidden", "absent", "seen")

    def __init__(self, hidden, seen):
        self.__hidden, self.seen = hidden, seen


@dataclasses.dataclass
class Record:
    values: list
    more: object = None


def found_in(value):
    return sorted(tensor.item() for tensor in tensors_within(value))


def t(number):
    return torch.tensor(float(number))


def test_tensors_are_found_in_whatever_holds_them():
    extra = Batch(a=t(1))
    extra.note = t(2)
    assert found_in(extra) == [1, 2]
    assert found_in(Slots(t(1), [t(2)])) == [1, 2]
    assert found_in(Record([t(1), Batch(b=Record([t(2)]))], more={t(3)})) == [1, 2, 3]
    assert found_in(CausalLMOutput(loss=t(1), logits=t(2))) == [1, 2]
    assert found_in(collections.UserDict(a=t(1))) == [1]
    assert found_in((t(1), collections.deque([t(2)]), collections.defaultdict(list, a=[t(3)]))) == [1, 2, 3]


def test_what_leads_to_itself_ends_and_models_are_not_entered():
    circle = Record([t(1)])
    circle.more = circle
    assert found_in(circle) == [1]
    assert found_in(Record([nn.Linear(1, 1)], more="text")) == []


@dataclasses.dataclass(frozen=True)
class Frozen:
    values: dict
    name: str = "a"


def test_half_precision_is_cast_in_dataclasses():
    half, long = torch.ones(2, dtype=torch.float16), torch.arange(2)
    inner = Frozen({"logits": half, "ids": long})
    outer = Record([inner, long], more=(half, nn.Linear(1, 1)))
    outer.kept = "an attribute that is no field"
    found = cast_outputs(outer, torch.float16)
    assert found.values[0].values["logits"].dtype is found.more[0].dtype is torch.float32
    assert found.values[0].values["ids"] is found.values[1] is long
    assert found.more[1] is outer.more[1]
    assert (type(found), type(found.values[0]), found.kept) == (Record, Frozen, outer.kept)
    assert [inner.values["logits"].dtype, outer.more[0].dtype] == [torch.float16] * 2, (
        "the model's own objects are left alone"
    )
    assert cast_inputs(found, torch.bfloat16).more[0].dtype is torch.bfloat16
    assert cast_outputs(found, torch.float16) is found
    outer.more = outer
    assert cast_outputs(outer, torch.float16).values[0].values["logits"].dtype is torch.float32, "one that holds itself"
