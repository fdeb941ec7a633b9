"""The attention kernels, in the interpreter, against attention in fp64."""

import pytest
import torch
from attention_cases import CASES, LONG_CASES, Case, check_case

from smpc.kernels.attention import flash_attention
from smpc.kernels.attention.forward_triton import launch_forward
from smpc.kernels.attention.op import attention_op
from smpc.kernels.attention.tiles_triton import Blocks
from smpc.kernels.launch.backend import Backend, backend


def test_the_kernels_run():
    assert backend(torch.device("cpu")) is Backend.INTERPRETER


@pytest.mark.matrix(5)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_gradients(case: Case):
    check_case(case, torch.float32)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("case", CASES[3:7], ids=str)
def test_forward_and_gradients_in_half_precision(case: Case):
    check_case(case, torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES[:3], *CASES[7:]], ids=str)
def test_the_other_cases_in_half_precision(case: Case):
    check_case(case, torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG_CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_long_sequences_and_large_heads(case: Case, dtype: torch.dtype):
    check_case(case, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("head", [1, 31, 32, 48, 64, 80, 96, 128, 160, 256])
def test_head_sizes(head: int):
    check_case(Case(head=head, causal=True, heads=2, key_heads=1), torch.float16)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("blocks", [Blocks(16, 32, 4, 1), Blocks(32, 16, 4, 1), Blocks(64, 64, 4, 1)], ids=str)
def test_block_sizes_change_nothing_but_the_order_of_sums(blocks: Blocks):
    q, k, v = (torch.randn(1, 2, 50, 32) for _ in range(3))
    out, lse = launch_forward(q, k, v, None, None, 0.2, True, 0, blocks)
    other, other_lse = launch_forward(q, k, v, None, None, 0.2, True, 0)
    torch.testing.assert_close(out, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, other_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_opcheck():
    q, k, v = (torch.randn(1, heads, 17, 32, requires_grad=True) for heads in (2, 1, 1))
    torch.library.opcheck(attention_op, (q, k, v, None, None, 0.2, True, 0))


def test_results_repeat():
    q, k, v = (torch.randn(2, 2, 33, 32) for _ in range(3))
    assert torch.equal(flash_attention(q, k, v, causal=True), flash_attention(q, k, v, causal=True))
