"""Signatures of model inputs, and the modes of a model."""

import pickle

import numpy
import pytest
import torch
from torch import nn

from smpc.errors import StepError
from smpc.v1.steps.programs.signature import ModeReader, check_equal, read_signature


def signature(*args, grad_enabled=True, **kwargs):
    return read_signature((args, kwargs), b"", grad_enabled)


def test_equal_for_other_values_of_tensors_only():
    first = signature(torch.ones(2, 3), mode="a", n=numpy.int64(3))
    assert signature(torch.zeros(2, 3), mode="a", n=3) == first
    assert hash(signature(torch.zeros(2, 3), mode="a", n=3)) == hash(first)
    others = [
        signature(torch.ones(2, 4), mode="a", n=3),
        signature(torch.ones(2, 3, dtype=torch.float64), mode="a", n=3),
        signature(torch.ones(3, 2).t(), mode="a", n=3),
        signature(torch.ones(2, 3), mode="b", n=3),
        signature(torch.ones(2, 3), mode="a", n=3.0),
        signature(torch.ones(2, 3), mode="a", n=True),
        signature([torch.ones(2, 3)], mode="a", n=3),
        signature(torch.ones(2, 3), mode="a", n=3, grad_enabled=False),
    ]
    assert len({first, *others}) == len(others) + 1


def test_samples_have_the_sizes_and_allocate_nothing():
    found = pickle.loads(pickle.dumps(signature({"x": torch.ones(3, 2).t()}, flag=True)))
    (batch,), kwargs = found.sample()
    assert kwargs == {"flag": True}
    assert (batch["x"].shape, batch["x"].stride(), batch["x"].device.type) == ((2, 3), (1, 2), "meta")


def test_inputs_that_want_gradients():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(StepError, match=r"model input kwargs\['x'\] requires grad"):
        signature(x=x)
    signature(x=x, grad_enabled=False)


def test_objects_that_cannot_be_sent():
    with pytest.raises(StepError, match=r"model input args\[0\] is a generator"):
        signature(i for i in range(3))


def test_microbatches_must_agree():
    first = signature(torch.ones(2), n=1)
    check_equal([first, first], "f")
    with pytest.raises(StepError, match=r"step function f .* 0 and 1: args\[0\] = float32\[2\], then float32\[3\]"):
        check_equal([first, signature(torch.ones(3), n=1)], "f")
    with pytest.raises(StepError, match=r"0 and 2: kwargs\['n'\] = 1, then 2"):
        check_equal([first, first, signature(torch.ones(2), n=2)], "f")


def test_modes():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    reader = ModeReader(model)
    first = reader.read()
    reader.check(first)
    model[1].eval()
    with pytest.raises(StepError, match=r"module '1': training = True on pipeline rank 0, False here; call train\(\)"):
        reader.check(first)
    model[1].train()
    model[0].bias.requires_grad_(False)
    frozen = reader.read()
    with pytest.raises(StepError, match=r"parameter '0.bias': requires_grad = True on pipeline rank 0, False here"):
        reader.check(first)
    reader.check_none_unfrozen(first, frozen)
    with pytest.raises(StepError, match=r"parameter '0.bias' requires grad now"):
        reader.check_none_unfrozen(frozen, first)
