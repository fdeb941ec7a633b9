"""The compiled attention kernels on a card, against attention in fp64; skipped where there is none."""

import pytest
import torch
from attention_cases import CASES, LONG_CASES, Case, check_case

from smpc.kernels.attention import flash_attention
from smpc.kernels.attention.op import attention_op
from smpc.kernels.launch.backend import Backend, backend
from smpc.nn import FlashAttentionLayer


@pytest.fixture(autouse=True)
def card() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs an NVIDIA card from Ampere on")


def test_the_kernels_run():
    assert backend(torch.device("cuda")) is Backend.TRITON


@pytest.mark.parametrize("case", [*CASES, *LONG_CASES], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_forward_and_gradients(case: Case, dtype: torch.dtype):
    check_case(case, dtype, "cuda")


@pytest.mark.parametrize("head", [1, 31, 32, 48, 64, 80, 96, 128, 160, 256])
def test_head_sizes(head: int):
    check_case(Case(head=head, causal=True, heads=2, key_heads=1, queries=300, keys=300), torch.bfloat16, "cuda")


def test_opcheck():
    q, k, v = (
        torch.randn(1, heads, 130, 64, device="cuda", dtype=torch.float16, requires_grad=True) for heads in (4, 2, 2)
    )
    torch.library.opcheck(attention_op, (q, k, v, None, None, 0.2, True, 0), atol=1e-2, rtol=1e-2)


def test_gradients_repeat():
    q, k, v = (torch.randn(2, 8, 1000, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    first, second = (torch.autograd.grad(flash_attention(q, k, v, causal=True).sum(), (q, k, v)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_both_ways_of_the_layer_agree(causal: bool):
    qkv = torch.randn(2, 500, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    library = FlashAttentionLayer(0.0, 64)(qkv, causal=causal)
    own = FlashAttentionLayer(0.0, 64, triton_flash_attention=True)(qkv, causal=causal)
    torch.testing.assert_close(own, library, rtol=2e-2, atol=2e-2)
