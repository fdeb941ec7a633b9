"""The attention op where no kernel runs: formula, checks, and what torch's tools make of the op."""

import math

import pytest
import torch
from attention_cases import CASES, LONG_CASES, Case, check_case
from torch._subclasses.fake_tensor import FakeTensorMode

from smpc.kernels.attention import flash_attention, flash_attention_with_lse
from smpc.kernels.attention.op import attention_backward_op, attention_op


def heads(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)


@pytest.mark.matrix(17)
@pytest.mark.parametrize("case", [*CASES, *LONG_CASES], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_formula(case: Case, dtype: torch.dtype):
    check_case(case, dtype)


def test_equals_torch():
    q, k, v = heads(2, 4, 9, 16), heads(2, 2, 13, 16), heads(2, 2, 13, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(flash_attention(q, k, v, causal=True), expected)


def test_partial_results_merge():
    """What context parallelism does: two halves of the keys, merged with lse, equal the whole, gradients too."""
    q, k, v = (heads(1, 2, 12, 16, dtype=torch.float64, grad=True) for _ in range(3))
    parts = [
        flash_attention_with_lse(q, half_k, half_v) for half_k, half_v in zip(k.chunk(2, 2), v.chunk(2, 2), strict=True)
    ]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(torch.exp(part - lse).unsqueeze(-1) * out for out, part in parts)
    whole = flash_attention(q, k, v)
    torch.testing.assert_close(merged, whole)
    grad = torch.randn_like(whole)
    for found, expected in zip(
        torch.autograd.grad(merged, (q, k, v), grad), torch.autograd.grad(whole, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_gradcheck():
    q, k, v = (
        heads(1, 2, 5, 4, dtype=torch.float64, grad=True),
        *(heads(1, 1, 6, 4, dtype=torch.float64, grad=True) for _ in "kv"),
    )
    bias = torch.randn(1, 2, 1, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *x: flash_attention_with_lse(*x, bias, scale=0.4, causal=True), (q, k, v))


@pytest.mark.long
def test_opcheck():
    q, k, v = heads(2, 4, 5, 8, grad=True), heads(2, 2, 7, 8, grad=True), heads(2, 2, 7, 8, grad=True)
    strided = heads(2, 5, 4, 8).transpose(1, 2).requires_grad_()
    bias, shift = torch.randn(2, 1, 1, 7), torch.randn(2, 4, 5)
    torch.library.opcheck(attention_op, (q, k, v, bias, shift, 0.3, False, 0))
    torch.library.opcheck(attention_op, (strided, k, v, None, None, 0.3, True, 2))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = attention_op(q, k, v, None, None, 0.3, True, 0)
    torch.library.opcheck(
        attention_backward_op,
        (torch.randn_like(out), torch.randn_like(lse), q, k, v, None, None, out, lse, 0.3, True, 0),
    )


def test_fake_tensors_have_the_shapes_types_and_strides_of_real_ones():
    real = flash_attention_with_lse(*(heads(2, 3, 5, 8, dtype=torch.float16) for _ in "qkv"))
    with FakeTensorMode():
        fake = flash_attention_with_lse(*(heads(2, 3, 5, 8, dtype=torch.float16) for _ in "qkv"))
    for found, expected in zip(fake, real, strict=True):
        assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())


def test_export():
    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return flash_attention(q, q, q, causal=True)

    q = heads(1, 2, 6, 8)
    program = torch.export.export(Attention(), (q,))
    assert any(node.target is torch.ops.smpc.flash_attention.default for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(q), flash_attention(q, q, q, causal=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": heads(1, 2, 4, 8).int()}, "found q torch.int32, k torch.float32"),
        ({"k": heads(1, 2, 4, 8, dtype=torch.float16)}, "one of the types float16, bfloat16, float32, float64"),
        ({"q": heads(2, 4, 8)}, r"found q \[2, 4, 8\]"),
        ({name: heads(1, 2, 4, 257) for name in "qkv"}, "head size of 1 to 256; found 257"),
        ({"k": heads(1, 2, 5, 8)}, r"k and v of one shape; found q \[1, 2, 4, 8\], k \[1, 2, 5, 8\]"),
        ({"q": heads(1, 3, 4, 8)}, "heads to be a multiple"),
        ({"q": heads(3, 2, 4, 8)}, "one batch size and one head size"),
        ({"k": heads(1, 2, 4, 8).to("meta")}, "found q on cpu, k on meta"),
        ({"bias": torch.zeros(1, 1, 4, 4)}, r"a mask \[1 or 1, 2 or 1, 1, 4\]; found \[1, 1, 4, 4\]"),
        ({"bias": torch.zeros(1, 1, 1, 4, dtype=torch.bool)}, "floating point numbers .* found torch.bool"),
        ({"bias": torch.zeros(1, 1, 1, 4, requires_grad=True)}, "requires_grad"),
        ({"scale": math.inf}, "scale above 0; found inf"),
    ],
)
def test_bad_input(change: dict, message: str):
    good = {"q": heads(1, 2, 4, 8), "k": heads(1, 2, 4, 8), "v": heads(1, 2, 4, 8)}
    with pytest.raises(ValueError, match=message):
        flash_attention(**{**good, **change})


def test_all_faults_are_reported_together():
    with pytest.raises(ValueError, match=r"(?s)scale above 0.*multiple.*floating point"):
        flash_attention(heads(1, 3, 4, 8), heads(1, 2, 4, 8), heads(1, 2, 4, 8), torch.zeros(1).bool(), scale=-1.0)
