"""What is noted of parameters after steps: again once others are in their places, and only then."""

import gc
import weakref

import pytest
import torch
from torch import nn

from smpc.nn.script_writes.between_steps import NoticedParameter, after_steps, between_steps, plain_parameters


class Seen(NoticedParameter):
    """A class that parameters have between steps."""


@pytest.fixture
def noted():
    """A model, and how often each of its places was noted."""
    model, asked = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    places = [(weakref.ref(module), name) for module in model for name in ("weight", "bias")]

    def note():
        asked.append(len(asked))
        for place, name in places:
            module = place()
            if module is not None and module._parameters[name] is not None:
                between_steps(module._parameters[name], Seen)

    after_steps(model, note, places)
    return model, asked


def step(model):
    with plain_parameters(model):
        assert {type(each) for each in model.parameters()} == {nn.Parameter}


def test_what_stays_is_not_noted_again(noted):
    model, asked = noted
    assert len(asked) == 1
    assert {type(each) for each in model.parameters()} == {Seen}
    step(model)
    step(model)
    assert len(asked) == 1
    assert {type(each) for each in model.parameters()} == {Seen}


def test_an_exchanged_parameter_is(noted):
    model, asked = noted
    with plain_parameters(model):
        model[1].weight = nn.Parameter(torch.zeros(2, 2))
    assert type(model[1].weight) is Seen
    step(model)
    assert len(asked) == 2


def test_a_place_that_is_empty_for_a_while(noted):
    """As a bias that is set to None, and given back."""
    model, asked = noted
    bias = model[0].bias
    with plain_parameters(model):
        model[0].bias = None
    step(model)
    assert len(asked) == 3, "looked at until it is there"
    with plain_parameters(model):
        model[0].bias = nn.Parameter(bias.detach())
    assert type(model[0].bias) is Seen
    step(model)
    assert len(asked) == 4


def test_a_module_that_is_gone_is_let_go(noted):
    model, _ = noted
    gone = weakref.ref(model[1])
    model[1] = nn.Identity()
    step(model)
    gc.collect()
    assert gone() is None
