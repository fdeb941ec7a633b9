"""Norms of gradients and clipping equal torch's."""

import math

import pytest
import torch
from torch import nn

from smpc.errors import UsageError
from smpc.optimizers import clip_grad_norm_, global_norm


def parameters(dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    found = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((3, 5), (1,), (0, 2), (), (127,), (4,))]
    for p in found[:-1]:  # the last has no gradient
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(dtype)
    return found


@pytest.mark.parametrize("order", [2.0, math.inf, 1.0, 3.5])
@pytest.mark.parametrize("limit", [0.5, 1e4, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_clipping_is_torchs(order, limit, dtype):
    ours, theirs = parameters(dtype), parameters(dtype)
    if order == math.inf:  # torch refuses the maximum over an empty tensor
        ours.pop(2), theirs.pop(2)
    found = clip_grad_norm_(ours, limit, order)
    expected = torch.nn.utils.clip_grad_norm_(theirs, limit, order)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_norms_of_half_precision_do_not_overflow():
    found = parameters(torch.float16, scale=1e4)
    exact = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in found[:-1]))
    assert exact > torch.finfo(torch.float16).max
    assert float(global_norm([p.grad for p in found[:-1]])) == pytest.approx(exact, rel=1e-6)
    assert float(clip_grad_norm_(found, 1.0)) == pytest.approx(exact, rel=1e-6)
    assert float(global_norm([p.grad for p in found[:-1]])) == pytest.approx(1.0, rel=2e-3)


def test_mixed_dtypes_and_single_tensors():
    tensors = [torch.full((3,), 2.0, dtype=dtype) for dtype in (torch.float16, torch.float64, torch.bfloat16)]
    assert float(global_norm(tensors)) == pytest.approx(6.0, rel=1e-6)
    assert global_norm(tensors).dtype == torch.float64
    assert float(global_norm(tensors[0], math.inf)) == 2.0
    assert float(global_norm([])) == 0.0
    assert float(clip_grad_norm_([], 1.0)) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_gradients_that_are_not_finite(bad, order):
    found = [p for p in parameters() if p.numel()]
    found[0].grad[0, 0] = bad
    kept = found[1].grad.clone()
    with pytest.raises(
        UsageError, match=r"expected a finite norm of the gradients, found (nan|inf); nothing was scaled"
    ):
        clip_grad_norm_(found, 1.0, order, error_if_nonfinite=True)
    assert torch.equal(found[1].grad, kept)
    norm = clip_grad_norm_(found, 1.0, order)
    assert torch.equal(norm, torch.tensor(bad)) or bool(norm.isnan()) is math.isnan(bad)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: global_norm([torch.ones(2)], 0.0),
            "expected norm_type to be a positive number or infinity, found 0.0",
        ),
        (lambda: global_norm([torch.ones(2)], math.nan), "norm_type.*found nan"),
        (lambda: global_norm([torch.ones(2, dtype=torch.int32)]), "found torch.int32"),
        (lambda: global_norm([torch.ones(2).to_sparse()]), "expected dense tensors, found layout torch.sparse_coo"),
        (lambda: global_norm([3]), "expected tensors, found int"),
        (lambda: clip_grad_norm_(parameters(), -1.0), "expected max_norm >= 0, found -1.0"),
        (lambda: clip_grad_norm_(parameters(), math.nan), "expected max_norm >= 0, found nan"),
        (lambda: clip_grad_norm_(parameters(), 1.0, shard_group=lambda p: 3), "ProcessGroup or None, found int"),
    ],
)
def test_bad_input(call, text):
    with pytest.raises(ValueError, match=text):
        call()
