"""What a module that is called whole leaves in attributes and containers: it was lost, so that losses lacked it, without a word."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from smpc.errors import TraceError
from smpc.tracer.record import record
from smpc.tracer.replay import replay


class Routed(nn.Module):
    """Cannot be recorded, as a size depends on values; `leave` then leaves something."""

    def __init__(self, leave):
        super().__init__()
        self.linear, self.leave = nn.Linear(4, 4), leave
        self.losses, self.held = [], SimpleNamespace(loss=0.0)

    def forward(self, x, *found):
        y = self.linear(x)
        rows = (y.sum(-1) > 0).nonzero()
        self.leave(self, y.square().mean(), len(rows), *found)
        return y


def attribute(module, loss, count):
    module.loss = loss


def in_list(module, loss, count):
    module.losses.append(loss)


def in_object(module, loss, count):
    module.held.loss = loss


def number(module, loss, count):
    module.count = count


class Around(nn.Module):
    """A model with one such module, and something that reads what it has left."""

    def __init__(self, leave, read):
        super().__init__()
        self.first, self.routed, self.read = nn.Linear(4, 4), Routed(leave), read
        self.shared = self.routed.losses

    def forward(self, x):
        self.shared.clear()
        y = self.routed(self.first(x))
        return y.mean() + self.read(self)


@pytest.mark.parametrize(
    ("leave", "read", "named"),
    [
        (attribute, lambda model: getattr(model.routed, "loss", 0.0), "routed.loss"),
        (attribute, lambda model: model.routed.loss if hasattr(model.routed, "loss") else 0.0, "routed.loss"),
        (in_list, lambda model: sum(model.routed.losses), r"routed.losses\[0\]"),
        (in_list, lambda model: sum(model.shared), r"routed.losses\[0\]"),
        (in_object, lambda model: model.routed.held.loss, "routed.held.loss"),
        (number, lambda model: getattr(model.routed, "count", 0) * 0.5, "routed.count"),
        (number, lambda model: 1.0 if getattr(model.routed, "count", 0) > 1 else 0.0, "routed.count"),
        (number, lambda model: torch.ones(2).mul(getattr(model.routed, "count", 0)).sum(), "routed.count"),
    ],
)
def test_a_use_of_it_is_an_error(leave, read, named):
    model = Around(leave, read)
    with pytest.raises(TraceError, match=f"attribute {named}, which a module that is called whole has computed"):
        record(model, (torch.randn(3, 4),), {})
    assert model.routed.losses == model.shared == []
    assert model.routed.held.loss == 0.0
    assert not hasattr(model.routed, "loss")
    assert not hasattr(model.routed, "count")


def check(model):
    x = torch.randn(3, 4)
    found = replay(record(model, (x,), {}), model, (x,), {})
    torch.testing.assert_close(found, model(x), rtol=0, atol=0)


@pytest.mark.parametrize("leave", [attribute, in_object, number])
def test_what_nobody_uses_is_no_error(leave):
    check(Around(leave, lambda model: 0.0))


class Giving(nn.Module):
    """A module that such a one is given a container by."""

    def __init__(self, make, leave, read):
        super().__init__()
        self.routed, self.make, self.read = Routed(leave), make, read

    def forward(self, x):
        found = self.make()
        return self.routed(x, found).mean() + self.read(found)


def into_list(module, loss, count, found):
    found.append(loss)


def into_dict(module, loss, count, found):
    found["loss"] = loss


@pytest.mark.parametrize(
    ("make", "leave", "read"),
    [(list, into_list, sum), (dict, into_dict, lambda found: found.get("loss", 0.0))],
)
def test_what_it_puts_into_an_argument_is_computed_by_the_module_around(make, leave, read):
    check(nn.Sequential(nn.Linear(4, 4), Giving(make, leave, read)))
