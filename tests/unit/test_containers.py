"""Elements of containers are exchanged without a constructor."""

import collections

import torch

from smpc.containers import map_tensors, tensors_in


class Scaled(collections.namedtuple("Scaled", "value calls")):
    """A named tuple whose constructor changes what it is given."""

    def __new__(cls, value, calls=0):
        return super().__new__(cls, value * 2, calls + 1)


def test_tensors_are_exchanged_without_a_constructor():
    """In two places of one value, beside what is no tensor; torch's pytree runs the constructor again."""
    ones = torch.ones(2)
    value = [Scaled(ones), {"shape": torch.Size([2]), "both": (ones, None)}, torch.topk(ones, 1)]
    found = map_tensors(lambda tensor: tensor + 1, value)
    assert type(found[0]) is Scaled
    assert found[0].value.tolist() == [3.0, 3.0]
    assert found[0].calls == 1
    assert found[1]["shape"] == torch.Size([2])
    assert type(found[1]["shape"]) is torch.Size
    assert found[1]["both"][0].tolist() == [2.0, 2.0]
    assert type(found[2]) is torch.return_types.topk
    assert found[2].values.tolist() == [2.0]
    assert value[0].value.tolist() == [2.0, 2.0], "the value itself is as it was"


def test_tensors_are_looked_at_in_the_order_in_which_they_are_exchanged():
    """Of mappings, tuples and pytree's own classes; one in two places comes twice. Nothing is copied."""
    a, b, c = torch.ones(1), torch.zeros(2), torch.ones(3)
    value = [Scaled(a), {"b": (b, None, "text"), "a": a}, collections.deque([c])]
    exchanged = []
    map_tensors(lambda tensor: exchanged.append(tensor) or tensor, value)
    found = list(tensors_in(value))
    assert (
        [id(each) for each in found]
        == [id(each) for each in exchanged]
        == [id(each) for each in (value[0].value, b, a, c)]
    )
