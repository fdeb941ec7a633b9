"""Signatures of model inputs, the modes of a model, and the table of programs, against a plain list of what was used when."""

import pickle

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from smpc.errors import StepError
from smpc.tracer import record
from smpc.v1.steps.programs.signature import ModeReader, ProgramTable, check_equal, read_signature


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


TRACE = record(nn.Linear(2, 2), (torch.zeros(1, 2),))
SIGNATURES = [read_signature(((torch.zeros(length, 2),), {}), b"", True) for length in range(1, 9)]


def find(table, signature):
    """The number of a signature's program; `lookup` asks the recording, too."""
    return next((number for number, (known, _) in enumerate(table.entries) if known == signature), None)


@given(st.integers(2, 5), st.lists(st.integers(0, len(SIGNATURES) - 1), max_size=60))
def test_the_one_that_has_waited_longest_gives_way_but_never_the_first(bound, steps):
    table = ProgramTable(bound)
    kept, uses = [], []  # signatures by number; what ran, in order
    for step in steps:
        signature = SIGNATURES[step]
        number = find(table, signature)
        assert (number is None) == (step not in kept)
        if number is None:
            number = table.next_number()
            if len(kept) < bound:
                kept.append(step)
            else:
                longest = min(kept[1:], key=lambda other: max(i for i, used in enumerate(uses) if used == other))
                assert kept[number] == longest
                kept[number] = step
            table.put(number, signature, TRACE)
        table.use(number)
        uses.append(step)
        assert kept[number] == step
        assert len(table.entries) == len(kept) <= bound
        assert [entry[0] for entry in table.entries] == [SIGNATURES[s] for s in kept]
        assert table.entries[number][0] == signature
        assert find(table, SIGNATURES[steps[0]]) == 0
