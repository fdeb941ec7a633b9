"""Results of microbatches as results of a step, and their way through bytes."""

import collections
import pickle
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from smpc.errors import StepError
from smpc.v1.steps.results import pack, read_results, unpack
from smpc.v1.steps.step_output import StepOutput


@dataclass
class Result:
    loss: Any
    note: Any = None


def over_the_wire(values):
    results = read_results(values, "f")
    form = pickle.loads(pickle.dumps(results.form()))
    payload = pack(results.tensors, torch.device("cpu"))
    assert payload.numel() == form.num_bytes
    return form.build(unpack(payload, form.specs))


def test_structures_are_kept():
    def value(m):
        return {
            "loss": torch.tensor(float(m)),
            "tuple": (torch.full((2,), m), m, None),
            "output": CausalLMOutput(logits=torch.full((1, 2), float(m))),
            "data": Result(torch.tensor([m]), "note"),
            "sometimes": None if m else 1,
        }

    result = over_the_wire([value(0), value(1)])
    assert isinstance(result["loss"], StepOutput)
    assert result["loss"].outputs == [torch.tensor(0.0), torch.tensor(1.0)]
    assert result["tuple"][1:] == ([0, 1], None)
    assert type(result["output"]) is CausalLMOutput
    assert torch.equal(result["output"].logits.concat(), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert result["data"].note == ["note", "note"]
    assert torch.equal(result["data"].loss.stack(), torch.tensor([[0], [1]]))
    assert result["sometimes"] == [1, None]


@pytest.mark.parametrize("value", [None, 3, [], ()])
def test_results_without_tensors(value):
    assert over_the_wire([value, value]) == ([3, 3] if value == 3 else value)


def test_every_dtype_survives_the_bytes():
    dtypes = [torch.bool, torch.complex64, torch.bfloat16, torch.uint8, torch.float64, torch.int16, torch.float8_e4m3fn]
    values = [torch.arange(3).to(dtype) for dtype in dtypes] + [torch.empty(0, 2), torch.arange(6).view(2, 3).t()]
    result = over_the_wire([values])
    for value, (got,) in zip(values, result, strict=True):
        assert (got.dtype, got.shape) == (value.dtype, value.shape)
        assert torch.equal(
            got.double() if got.dtype.itemsize == 1 else got, value.double() if value.dtype.itemsize == 1 else value
        )


def test_microbatches_that_return_different_structures():
    with pytest.raises(StepError, match=r"(?s)step function f must return the same structure.*microbatch 0.*in 1"):
        read_results([{"a": torch.ones(1)}, {"b": torch.ones(1)}], "f")
    with pytest.raises(StepError, match=r"tensor itself.*value itself"):
        read_results([torch.ones(1), 1], "f")


def test_history_is_kept_or_not():
    loss = torch.ones(1, requires_grad=True) * 2
    results = read_results([{"loss": loss, "n": 1}], "f")
    assert results.join(detach=False)["loss"].outputs[0] is loss
    detached = results.join(detach=True)
    assert detached["loss"].outputs == [torch.tensor([2.0])]
    assert detached["loss"].outputs[0].grad_fn is None
    assert detached["n"] == [1]


@pytest.mark.parametrize("members", [{1, 2}, {torch.ones(1), torch.zeros(1)}, {None}, set()])
def test_sets_are_refused_with_their_places(members):
    """Of values they ended in "unhashable type: 'list'"; of tensors, one microbatch's took the place of another's."""
    value = {"x": (members, 1), "y": frozenset(members)}
    with pytest.raises(
        StepError, match=r"^step function f: .* found as \['x'\]\[0\] a set, as \['y'\] a frozenset; .*: return a list"
    ):
        read_results([value, value], "f")
    with pytest.raises(StepError, match="found as the whole value a set"):
        read_results([members, members], "f")


class ReadOnly(dict):
    def __setitem__(self, key, value):
        raise KeyError("read only")


def test_classes_that_cannot_be_rebuilt_are_refused_with_their_places():
    @dataclass
    class Local:
        loss: Any

    local = read_results([(Result(1), Local(torch.ones(1)))], "f")
    with pytest.raises(
        StepError, match=r"as \[1\] \S+<locals>.Local\] \(AttributeError: .*; return tensors and values in lists"
    ):
        local.join(detach=True)
    unnamed = read_results([collections.namedtuple("Other", "loss")(1)], "f")
    with pytest.raises(StepError, match=r"\[as the whole value \S+:Other\] \(AttributeError"):
        unnamed.join(detach=True)
    with pytest.raises(StepError, match=r"ReadOnly\] \(KeyError: 'read only'\)"):
        read_results([ReadOnly(loss=1)], "f").join(detach=True)


def test_leaves_that_cannot_be_sent_are_refused_with_their_places():
    value = {"loss": torch.ones(1), "lock": threading.Lock(), "more": [iter(x for x in "ab")]}
    results = read_results([value, value], "f")
    assert results.join(detach=True)["lock"] == [value["lock"]] * 2  # without a pipeline it stays where it is
    found = r"as \['lock'\] a lock \(TypeError: .*\); as \['more'\]\[0\] a generator \(TypeError: .*\); return tensors and plain"
    with pytest.raises(StepError, match=found):
        results.form()


class Counter:
    n = 0


def test_a_form_is_not_equal_to_that_of_other_values():
    """Forms compared the values themselves: an array is no truth value, a changed object equals itself, and 1 is True."""
    counter = Counter()

    def form(value):
        return read_results([value, value], "f").form()

    before = form(counter)
    counter.n += 1
    assert form(counter) != before
    assert form(counter) == form(counter)
    assert form(np.arange(3)) == form(np.arange(3))
    assert form(np.arange(3)) != form(np.arange(3) + 1)
    assert form(1) != form(True)
