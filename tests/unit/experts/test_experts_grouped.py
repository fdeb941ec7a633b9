"""One linear layer for each expert against a loop over them."""

import pytest
import torch
from torch.nn import functional as F

from smpc.experts.expert_linear import grouped_linear


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("counts", [(3, 0, 5), (0, 0, 4), (2, 2, 2), (0, 0, 0)])
@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float32, 8), (torch.float32, 5), (torch.float64, 8), (torch.bfloat16, 8)]
)
def test_rows_by_their_own_layer(counts, has_bias, is_transposed, dtype, width):
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), width, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, 16, width, dtype=dtype, requires_grad=True)
    bias = torch.randn(3, 16, dtype=dtype, requires_grad=True) if has_bias else None
    leaves = [leaf for leaf in (rows, weight, bias) if leaf is not None]
    own = weight.transpose(1, 2).contiguous() if is_transposed else weight
    found = grouped_linear(rows, own, counts, bias, is_transposed=is_transposed)
    parts = [
        F.linear(part, weight[i], None) + (bias[i] if has_bias else 0)
        for i, part in enumerate(rows.split(list(counts)))
    ]
    expected = torch.cat(parts)
    close = {} if dtype is not torch.bfloat16 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, expected, **close)
    gradient = torch.randn_like(found)
    for tensor, wanted in zip(
        torch.autograd.grad(found, leaves, gradient), torch.autograd.grad(expected, leaves, gradient), strict=True
    ):
        torch.testing.assert_close(tensor, wanted, **close)
