"""Registering distributed versions: what is refused at once, and what stays as it is, with the reason."""

import warnings

import pytest
from tensor_ranks import tensor_groups
from torch import nn

from smpc.errors import UsageError
from smpc.nn import DistributedLinear, TensorParallel
from smpc.nn.distribution.distribute import distribute, set_tensor_parallelism, tensor_parallelism
from smpc.nn.distribution.registry import Registry


class Widening(nn.Module):
    def __init__(self, width, *, bias=True):
        super().__init__()
        self.inner = nn.Parameter(nn.Linear(width, 2 * width, bias).weight.detach())

    def forward(self, x, scale=1.0):
        return nn.functional.linear(x, self.inner) * scale


def to_linear(width, *, bias=True):
    return (width, 2 * width), {"bias": bias}


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ({"forward_hook": lambda self, x, scale=1.0: ((x,), {})}, r"found \(self, x, scale=1.0\)"),
        ({"init_hook": "to_linear"}, "expected init_hook to be callable, found str"),
        ({"return_hook": 3}, "expected return_hook to be callable, found int"),
    ],
)
def test_hooks_that_do_not_fit_are_refused(hooks, message):
    with pytest.raises(UsageError, match=message):
        Registry().register(Widening, DistributedLinear, **hooks)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ((Widening, nn.Linear), "dist_module to be a subclass of DistributedModule, found .*Linear"),
        ((len, DistributedLinear), "module_cls to be a subclass of Module, found .*len"),
        ((Widening(4), DistributedLinear), "module_cls to be a subclass of Module"),
    ],
)
def test_what_cannot_be_registered_is_refused(classes, message):
    with pytest.raises(UsageError, match=message):
        Registry().register(*classes)


def distributed(make, registry, size=2):
    model = nn.Sequential(make())
    set_tensor_parallelism(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = distribute(model, registry, TensorParallel(tensor_groups(size)[0]))[0]
    return found, [str(warning.message) for warning in caught]


def test_a_registered_class_is_replaced_and_others_are_not():
    registry = Registry()
    registry.register(Widening, DistributedLinear, init_hook=to_linear)
    found, texts = distributed(lambda: Widening(4), registry)
    assert isinstance(found, DistributedLinear)
    assert (found.in_features, found.out_features) == (4, 8)
    assert any("newly drawn weights, as it is registered without a state_hook" in text for text in texts)
    found, texts = distributed(lambda: nn.LayerNorm(4), registry)
    assert type(found) is nn.LayerNorm
    assert texts == [
        "the model (Sequential) is not distributed by tensor parallelism: nothing in it has a distributed version; register its class "
        "with tp_register_with_module"
    ]
    with tensor_parallelism():
        model = nn.Sequential(nn.LayerNorm(4))
    distribute(model, registry, TensorParallel(tensor_groups(2)[0]))  # nothing was asked of it by name: no warning


def test_an_argument_that_no_module_takes_is_named_once():
    registry = Registry()
    with tensor_parallelism(attention_dropout=0.1, bias=True):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    with pytest.warns(UserWarning, match="no distributed module") as told:
        distribute(model, registry, TensorParallel(tensor_groups(2)[0]))
    assert [str(each.message) for each in told] == [
        "tensor_parallelism: no distributed module of this model takes attention_dropout, which changes nothing"
    ]


def test_what_was_made_before_its_class_was_registered_stays_with_a_warning():
    class Late(Widening):
        pass

    module, registry = Late(4), Registry()
    registry.register(Late, DistributedLinear, init_hook=to_linear)
    found, texts = distributed(lambda: module, registry)
    assert found is module
    assert texts == [
        "0 (Late) is not distributed by tensor parallelism: it was made before its class was registered; call tp_register_with_module "
        "first"
    ]


def test_sizes_that_do_not_divide_stay_with_a_warning():
    registry = Registry()
    registry.register(Widening, DistributedLinear, init_hook=to_linear)
    found, (text,) = distributed(lambda: Widening(5), registry)
    assert type(found) is Widening
    assert "0 (Widening) is not distributed" in text
    assert "in_features divisible by tensor_parallel_degree 2, found 5" in text
