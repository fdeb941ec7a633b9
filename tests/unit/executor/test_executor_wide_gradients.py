"""Half-precision parameters with fp32 gradients."""

import pytest
import torch
from torch import nn

from smpc.sharding.wide_gradients import gradient_dtype, is_wide, wide_stand_in, widen


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_gradients_are_not_lost_beside_a_large_sum(dtype):
    narrow, wide = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
    widen([wide])
    for parameter in (narrow, wide):
        for factor in (4096.0, *[0.25] * 64):
            (parameter * factor).sum().backward()
    assert narrow.grad.tolist() == [4096.0] * 3
    assert wide.grad.tolist() == [4112.0] * 3
    assert (narrow.grad.dtype, wide.grad.dtype, wide.dtype) == (dtype, torch.float32, dtype)


def test_others_stay_and_gradients_that_are_there_are_cast():
    half, single = nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2))
    frozen = nn.Parameter(torch.ones(2).bfloat16(), requires_grad=False)
    half.grad = torch.full((2,), 3.0).half()
    assert not is_wide(half)
    for _ in range(2):  # again does nothing
        widen([half, single, frozen])
        assert [is_wide(parameter) for parameter in (half, single, frozen)] == [True, False, True]
        assert (half.grad.dtype, half.grad.tolist()) == (torch.float32, [3.0, 3.0])
    assert gradient_dtype(single) is torch.float32
    frozen.requires_grad_(True)
    frozen.sum().backward()
    assert frozen.grad.dtype is torch.float32


def test_a_stand_in_takes_the_gradient_and_has_no_memory():
    parameter = nn.Parameter(torch.ones(4, 6).bfloat16().t())
    widen([parameter])
    parameter.float().sum().backward()
    other = wide_stand_in(parameter)
    assert (other.dtype, other.shape, other.stride()) == (torch.float32, parameter.shape, parameter.stride())
    assert other.untyped_storage().nbytes() == 0
    other.grad = parameter.grad
    assert other.grad.data_ptr() == parameter.grad.data_ptr()
