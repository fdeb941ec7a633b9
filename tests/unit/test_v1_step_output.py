"""StepOutput against the same arithmetic on a stacked tensor."""

import pytest
import torch

from smpc.errors import StepError
from smpc.v1 import StepOutput


def test_reductions():
    tensors = [torch.randn(3, 2) for _ in range(4)]
    output = StepOutput(tensors)
    stacked = torch.stack(tensors)
    torch.testing.assert_close(output.reduce_mean(), stacked.mean(0))
    assert torch.equal(output.average(), output.reduce_mean())
    torch.testing.assert_close(output.reduce_sum(), stacked.sum(0))
    assert torch.equal(output.stack(), stacked)
    assert torch.equal(output.concat(), stacked.view(12, 2))


def test_it_is_a_sequence():
    tensors = [torch.tensor(1), torch.tensor(2)]
    output = StepOutput(tensors)
    assert len(output) == 2
    assert output[1] is tensors[1]
    assert list(output) == output.outputs == tensors
    assert repr(output) == "StepOutput([tensor(1), tensor(2)])"
    assert StepOutput([torch.tensor(1), torch.tensor(2)]).reduce_mean().item() == 1.5


def test_detach():
    output = StepOutput([torch.ones(1, requires_grad=True) * 2])
    assert output[0].requires_grad
    assert not output.detach()[0].requires_grad


def test_scalars_have_no_axis_to_concatenate():
    with pytest.raises(StepError, match="use stack"):
        StepOutput([torch.tensor(1.0)]).concat()
