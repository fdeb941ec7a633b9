"""The kernels of norms, activations, rotary embedding and losses, compiled and run on the GPU, against formulas in fp64."""

import fused_cases as cases
import pytest
import torch

from smpc.kernels.launch.backend import Backend, backend

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DEVICE = "cuda"
pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert backend(torch.device(DEVICE)) is Backend.TRITON
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", [*cases.SHAPES, *cases.LONG_SHAPES, (300, 4096), (7, 8192), (7, 12288)], ids=str)
def test_rows(shape, dtype):
    cases.check_norms(shape, dtype, DEVICE)
    cases.check_activations(shape, dtype, DEVICE)
    cases.check_bias_dropout_add(shape, dtype, DEVICE)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_layouts(layout, dtype):
    cases.check_norms((17, 33), dtype, DEVICE, layout)
    cases.check_activations((17, 33), dtype, DEVICE, layout)
    cases.check_bias_dropout_add((17, 33), dtype, DEVICE, layout)
    cases.check_cross_entropy((17, 33), dtype, cases.RULES[1], DEVICE, layout, inplace=True)
    cases.check_linear_cross_entropy((7, 16, 33), dtype, cases.RULES[1], DEVICE, layout=layout)


@pytest.mark.parametrize("columns", [127, 4096, 4097, 12288])
def test_norms_from_their_output(columns, dtype):
    cases.check_norms((17, columns), dtype, DEVICE, memory_efficient=True)


@pytest.mark.parametrize("shape", cases.ROTARY_SHAPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half-rotated", "interleaved"])
def test_rotary(shape, dtype, interleaved):
    cases.check_rotary(shape, dtype, interleaved, DEVICE)


@pytest.mark.parametrize("shape", [*cases.LOSS_SHAPES, (64, 50257)], ids=str)
@pytest.mark.parametrize("rule", cases.RULES, ids=str)
def test_cross_entropy(shape, dtype, rule):
    cases.check_cross_entropy(shape, dtype, rule, DEVICE)
    cases.check_cross_entropy(shape, dtype, rule, DEVICE, inplace=True)


def test_rows_of_minus_infinity(dtype):
    cases.check_hidden_rows(DEVICE)


@pytest.mark.parametrize("shape", cases.LINEAR_SHAPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"accumulate_fp32": True}], ids=str)
def test_linear_cross_entropy(shape, dtype, options):
    cases.check_linear_cross_entropy(shape, dtype, cases.RULES[1], DEVICE, **options)
