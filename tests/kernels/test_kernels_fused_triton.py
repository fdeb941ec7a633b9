"""The kernels of norms, activations, rotary embedding and losses, in the interpreter, against formulas in fp64."""

import fused_cases as cases
import pytest
import torch

from smpc.kernels.launch.backend import Backend, backend
from smpc.kernels.layer_norm import _add_layer_norm, layer_norm
from smpc.kernels.linear_cross_entropy import _linear_cross_entropy

DTYPES = (torch.float32, torch.float16)
pytestmark = [
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    # The interpreter writes a sigmoid as 1 / (1 + exp(-x)), and NumPy warns where that overflows to the 0 that it should be.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
]


@pytest.mark.matrix(4)
@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_norms(shape, dtype):
    assert backend(torch.device("cpu")) is Backend.INTERPRETER
    cases.check_norms(shape, dtype)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("shape", [(17, 17), (3, 127)], ids=str)
def test_norms_from_their_output(shape, dtype):
    cases.check_norms(shape, dtype, memory_efficient=True)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_layouts(layout, dtype):
    cases.check_norms((17, 33), dtype, layout=layout)
    cases.check_activations((17, 33), dtype, layout=layout)
    cases.check_bias_dropout_add((17, 33), dtype, layout=layout)
    cases.check_linear_cross_entropy((7, 16, 33), dtype, cases.RULES[1], layout=layout)
    cases.check_cross_entropy((17, 33), dtype, cases.RULES[1], layout=layout, inplace=True)


@pytest.mark.slow
@pytest.mark.parametrize("shape", cases.LONG_SHAPES, ids=str)
def test_long_shapes(shape, dtype):
    cases.check_norms(shape, dtype)
    cases.check_activations(shape, dtype)
    cases.check_bias_dropout_add(shape, dtype)
    cases.check_cross_entropy(shape, dtype, cases.RULES[3])


@pytest.mark.slow
@pytest.mark.parametrize("columns", [8192, 8193, 12288])
def test_wide_rows(columns, dtype):
    cases.check_norms((7, columns), dtype)
    cases.check_norms((7, columns), dtype, memory_efficient=True)


def test_rows_beyond_what_programs_hold(dtype):
    """One column more than the fused backward kernel takes from an output, 4096."""
    x = cases.leaf(cases.made((3, 4097), dtype))
    weight, bias = cases.leaf(torch.rand(4097).add(0.5).to(dtype)), cases.leaf(cases.made((4097,), dtype))
    (output,) = cases.compare(
        lambda x, w, b: layer_norm(x, (4097,), w, b, memory_efficient=True),
        lambda x, w, b: cases.exact_layer_norm(x, w, b, 1e-5),
        (x, weight, bias),
        dtype,
        factor=8.0,
    )
    assert output.shape == x.shape


@pytest.mark.matrix(4)
@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_activations(shape, dtype):
    cases.check_activations(shape, dtype)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("shape", [*cases.SHAPES, (9, 1000)], ids=str)
def test_bias_dropout_add(shape, dtype):
    cases.check_bias_dropout_add(shape, dtype)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("shape", cases.ROTARY_SHAPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half-rotated", "interleaved"])
def test_rotary(shape, dtype, interleaved):
    cases.check_rotary(shape, dtype, interleaved)


@pytest.mark.matrix(5)
@pytest.mark.parametrize("shape", [*cases.LOSS_SHAPES, (2, 9000)], ids=str)
@pytest.mark.parametrize("rule", cases.RULES, ids=str)
def test_cross_entropy(shape, dtype, rule):
    cases.check_cross_entropy(shape, dtype, rule, inplace=rule == cases.RULES[0])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy computes both sides of `where`
def test_rows_of_minus_infinity(dtype):
    if dtype == torch.float32:
        cases.check_hidden_rows()


@pytest.mark.matrix(5)
@pytest.mark.parametrize("shape", cases.LINEAR_SHAPES, ids=str)
@pytest.mark.parametrize("rule", cases.RULES, ids=str)
def test_linear_cross_entropy(shape, dtype, rule):
    cases.check_linear_cross_entropy(shape, dtype, rule)


def test_opcheck(dtype):
    x, residual, weight, bias = (
        torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((5, 17), (5, 17), (17,), (17,))
    )
    torch.library.opcheck(_add_layer_norm, (x, residual, weight, bias, 1e-5))
    labels = torch.arange(5)
    table = torch.randn(9, 17, dtype=dtype, requires_grad=True)
    numbers = (-100, 0.1, 0.1, True, 2, False)
    torch.library.opcheck(_linear_cross_entropy, (x, table, labels, None, *numbers, True, True, False))
