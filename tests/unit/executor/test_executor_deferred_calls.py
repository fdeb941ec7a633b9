"""What a split backward puts off: which calls are products, and how W takes what is left."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smpc.executor.split_backward.deferred_calls import Pending, PendingAlias, PendingProduct, PendingRecord, as_product
from smpc.executor.split_backward.intercept import Deferral

WEIGHT, BIAS = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(5))
X = torch.randn(4, 6, requires_grad=True)


@pytest.mark.parametrize(
    ("func", "values", "places", "expected"),
    [
        (F.linear, [X, WEIGHT, BIAS], [0], [WEIGHT, BIAS]),
        (F.linear, [X, WEIGHT], [0], [WEIGHT]),
        (F.linear, [X, WEIGHT, BIAS.detach()], [0], [WEIGHT]),
        (F.linear, [X.view(2, 2, 6), WEIGHT, None], [0], [WEIGHT]),
        (torch.addmm, [BIAS, X, nn.Parameter(WEIGHT.t())], [1], None),
        (F.linear, [X[0], WEIGHT, BIAS], [0], None),  # a vector
        (F.linear, [X.detach(), WEIGHT, BIAS], [], None),  # there is nothing for B to do
        (F.linear, [X, WEIGHT.detach(), BIAS], [0], None),
        (F.linear, [X.view(1, 1, 4, 6), WEIGHT], [0], None),
        (F.linear, [X.expand(2, 4, 6), WEIGHT], [0], None),
        (torch.mm, [X, WEIGHT], [0], None),
    ],
)
def test_which_calls_are_products(func, values, places, expected):
    trained = [value for value in values if isinstance(value, nn.Parameter)]
    product = as_product(func, values, trained, places)
    if func is torch.addmm:
        expected = [values[2], BIAS]
    if expected is None:
        assert product is None
    else:
        assert [id(p) for p in product.parameters] == [id(p) for p in expected]


def test_under_autocast_a_product_is_recorded():
    with torch.autocast("cpu", torch.bfloat16):
        assert as_product(F.linear, [X, WEIGHT, BIAS], [WEIGHT, BIAS], [0]) is None


def test_what_a_module_leaves():
    module = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3))
    pending = Pending()
    with Deferral(pending, worthwhile=0):
        y = module(X)
    assert [type(entry) for entry in pending._entries] == [PendingProduct, PendingAlias, PendingAlias, PendingRecord]
    assert len(pending) == 0
    y.sum().backward()
    assert len(pending) == 4
    assert pending.run() is True
    assert pending.run() is None
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_a_gradient_is_given_to_the_parameter_and_not_copied():
    """The first gradient of a parameter takes the place of its `.grad`: no kernel but the product writes as much memory."""
    module, pending = nn.Linear(256, 256, bias=False), Pending()
    with Deferral(pending, worthwhile=0):
        y = module(torch.randn(64, 256, requires_grad=True))
    y.backward(torch.randn(64, 256))
    with torch.profiler.profile() as profile:
        pending.run()
    names = {event.key for event in profile.key_averages()}
    assert "aten::mm" in names
    assert not names & {"aten::copy_", "aten::clone", "aten::add_", "aten::add"}
