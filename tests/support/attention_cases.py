"""The calls of attention that every way of computing it is tested with: formula, interpreter and GPU."""

import math
from dataclasses import dataclass

import torch
from attention_reference import alibi_bias, expected_attention, largest_error
from torch import Tensor

from smpc.kernels.attention import flash_attention_with_lse

# Largest error relative to the largest value of the fp64 result: rounding of inputs' type, summed over a row.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-12}


@dataclass(frozen=True)
class Case:
    batch: int = 1
    heads: int = 2
    key_heads: int = 2
    queries: int = 17
    keys: int = 17
    head: int = 32
    causal: bool = False
    offset: int = 0
    bias: str = (
        ""  # alibi, padding (the whole first batch entry is hidden), lowest (the same as lowest numbers), or none
    )

    def __str__(self) -> str:
        mask = f"causal{self.offset:+d}" if self.causal else "full"
        shape = f"b{self.batch} h{self.heads}/{self.key_heads} q{self.queries} k{self.keys} d{self.head}"
        return f"{shape} {mask} {self.bias}".strip()


CASES = (
    Case(queries=1, keys=1),
    Case(queries=1, keys=37, causal=True, offset=36),
    Case(causal=True),
    Case(heads=4, key_heads=2, bias="alibi"),
    Case(heads=4, key_heads=1, causal=True, bias="alibi"),
    Case(queries=37, keys=19, head=40),
    Case(queries=19, keys=50, causal=True, offset=31, head=64),
    Case(queries=33, keys=33, causal=True, offset=-5),
    Case(batch=2, heads=1, key_heads=1, queries=9, keys=20, bias="padding"),
    Case(batch=2, heads=1, key_heads=1, queries=20, keys=9, causal=True, bias="padding"),
    Case(batch=2, heads=1, key_heads=1, queries=9, keys=20, bias="lowest"),
    Case(batch=2, heads=2, key_heads=1, queries=20, keys=9, causal=True, bias="lowest"),
    Case(batch=0),
    Case(queries=0),
    Case(keys=0),
)

LONG_CASES = (
    Case(queries=127, keys=127, causal=True, head=128, heads=1, key_heads=1),
    Case(queries=127, keys=64, head=256, heads=1, key_heads=1),
    Case(queries=1000, keys=1000, causal=True, heads=1, key_heads=1),
    Case(queries=1000, keys=127, bias="alibi", heads=2, key_heads=1),
)


def bias_of(case: Case, device: str) -> Tensor | None:
    if case.bias == "alibi":
        return alibi_bias(case.heads, case.keys).to(device)
    if case.bias in ("padding", "lowest"):
        hidden = -math.inf if case.bias == "padding" else torch.finfo(torch.float32).min
        bias = torch.zeros(case.batch, 1, 1, case.keys, device=device)
        bias[0] = hidden
        bias[1:, ..., case.keys // 2 :] = hidden
        return bias
    return None


def check_case(case: Case, dtype: torch.dtype, device: str = "cpu") -> None:
    """Result, log-sum-exp and all gradients, through both outputs, from inputs with three kinds of strides."""
    torch.manual_seed(0)
    q = torch.randn(case.batch, case.heads, case.queries, case.head, device=device, dtype=dtype)
    k = torch.randn(case.batch, case.keys, 2, case.key_heads, case.head, device=device, dtype=dtype)[:, :, 1]
    v = torch.randn(case.batch, case.key_heads, case.head, case.keys, device=device, dtype=dtype)
    inputs = [x.requires_grad_() for x in (q, k.transpose(1, 2), v.transpose(2, 3))]
    settings = {"scale": 0.3, "causal": case.causal, "causal_offset": case.offset}
    bias = bias_of(case, device)
    out, lse = flash_attention_with_lse(*inputs, bias, **settings)
    expected, expected_lse = expected_attention(*inputs, bias, **settings)
    visible = torch.isfinite(expected_lse)
    assert torch.equal(torch.isfinite(lse), visible)
    assert not out[~visible].any()
    tolerance = TOLERANCE[dtype]
    bounded = expected_lse.clamp(min=-1e38)  # a lower bias counts as this
    assert largest_error(torch.where(visible, lse, 0), torch.where(visible, bounded, 0)) < min(tolerance, 1e-5)
    assert largest_error(out, expected) < tolerance

    grad, grad_lse = torch.randn_like(expected), torch.randn_like(expected_lse)
    pairs = zip(
        *(
            torch.autograd.grad((result * grad).sum() + (torch.where(visible, log, 0) * grad_lse).sum(), inputs)
            for result, log in ((out, lse), (expected, expected_lse))
        ),
        strict=True,
    )
    for found_grad, expected_grad in pairs:
        assert not found_grad.isnan().any()
        assert largest_error(found_grad, expected_grad.double()) < 2 * tolerance
