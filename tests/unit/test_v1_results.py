"""Results of microbatches as results of a step, and their way through bytes."""

import pickle
from dataclasses import dataclass
from typing import Any

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
    form, tensors = read_results(values, "f")
    form = pickle.loads(pickle.dumps(form))
    payload = pack(tensors, torch.device("cpu"))
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
