"""Which of an optimizer's parameters are parts; see smpc.optimizers.split_parameters."""

import torch
from torch import nn

from smpc.optimizers.split_parameters import groups_of, note_split


class InUse(nn.Parameter):
    """A parameter to whose gradient another thread writes."""

    @property
    def grad(self):
        raise AssertionError("another model's gradient has been read")


def test_gradients_are_not_read():
    """Ranks that were threads read each other's while a backward wrote them, and the process was aborted."""
    first, second, group = nn.Linear(2, 2), nn.Linear(2, 2), object()
    second.weight = InUse(torch.ones(2, 2))
    for model in (first, second):
        note_split(model, ["weight"], group)
    assert groups_of([first.weight, first.bias]) == {id(first.weight): (group,)}
    assert groups_of([second.weight]) == {id(second.weight): (group,)}
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    first(torch.ones(1, 2)).sum().backward()
    optimizer.step()
