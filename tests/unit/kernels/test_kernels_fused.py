"""Norms, activations, rotary embedding and losses where no kernel runs: formulas, gradients, and what torch's tools make of the ops."""

import re
from pathlib import Path

import fused_cases as cases
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from smpc import kernels
from smpc.kernels.activations import _bias_gelu, _bias_gelu_backward, _swiglu, _swiglu_backward, bias_gelu, swiglu
from smpc.kernels.attention import flash_attention
from smpc.kernels.bias_dropout_add import (
    _bias_dropout_add,
    _bias_dropout_add_backward,
    bias_dropout_add,
    kept,
    philox,
)
from smpc.kernels.cross_entropy import _cross_entropy, cross_entropy
from smpc.kernels.layer_norm import (
    _add_layer_norm,
    _layer_norm,
    _layer_norm_backward,
    add_layer_norm,
    layer_norm,
)
from smpc.kernels.linear_cross_entropy import _linear_cross_entropy, _scaled, linear_cross_entropy
from smpc.kernels.rms_norm import _add_rms_norm, _rms_norm, _rms_norm_backward, add_rms_norm, rms_norm
from smpc.kernels.rotary import _rotary, rotary
from smpc.kernels.shared.token_loss import _logits_gradient, _logits_gradient_

DTYPES = pytest.mark.parametrize("dtype", list(cases.TOLERANCE), ids=str)


@pytest.fixture(autouse=True)
def numbers():
    """The same random numbers in every run."""
    torch.manual_seed(0)


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def as_leaf(view):
    """A leaf of autograd with the strides of a view: opcheck reads the .grad of what it gets."""
    return view.detach().requires_grad_()


@pytest.mark.matrix(5)
@DTYPES
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_layouts(layout, dtype):
    cases.check_norms((17, 33), dtype, layout=layout)
    cases.check_activations((17, 33), dtype, layout=layout)
    cases.check_bias_dropout_add((17, 33), dtype, layout=layout)
    cases.check_linear_cross_entropy((7, 16, 33), dtype, cases.RULES[1], layout=layout)
    for inplace in (False, True):
        cases.check_cross_entropy((17, 33), dtype, cases.RULES[1], layout=layout, inplace=inplace)


@pytest.mark.matrix(7)
@DTYPES
@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_shapes(shape, dtype):
    cases.check_norms(shape, dtype)
    cases.check_activations(shape, dtype)
    cases.check_bias_dropout_add(shape, dtype)


@DTYPES
def test_norms_from_their_output(dtype):
    cases.check_norms((17, 127), dtype, memory_efficient=True)


@DTYPES
@pytest.mark.parametrize("shape", cases.ROTARY_SHAPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half-rotated", "interleaved"])
def test_rotary(shape, dtype, interleaved):
    cases.check_rotary(shape, dtype, interleaved)


@DTYPES
@pytest.mark.parametrize("shape", cases.LOSS_SHAPES, ids=str)
@pytest.mark.parametrize("rule", cases.RULES, ids=str)
def test_cross_entropy(shape, dtype, rule):
    cases.check_cross_entropy(shape, dtype, rule)


@DTYPES
@pytest.mark.parametrize("shape", cases.LINEAR_SHAPES, ids=str)
def test_linear_cross_entropy(shape, dtype):
    for rule in cases.RULES:
        cases.check_linear_cross_entropy(shape, dtype, rule, with_bias=rule != cases.RULES[0])
    cases.check_linear_cross_entropy(shape, dtype, {}, accumulate_fp32=True)


def test_rows_of_minus_infinity():
    cases.check_hidden_rows()


def test_equal_to_torch():
    functional = torch.nn.functional
    x, weight, bias = torch.randn(5, 3, 7), torch.randn(3, 7), torch.randn(3, 7)
    torch.testing.assert_close(
        layer_norm(x, (3, 7), weight, bias), functional.layer_norm(x, (3, 7), weight, bias, 1e-5)
    )
    torch.testing.assert_close(rms_norm(x, (3, 7), weight), functional.rms_norm(x, (3, 7), weight))
    torch.testing.assert_close(
        bias_gelu(x, weight[0], approximate="tanh"), functional.gelu(x + weight[0], approximate="tanh")
    )
    target = torch.tensor([1, 6, -100, 0, 3])
    for smoothing in (0.0, 0.3):
        torch.testing.assert_close(
            cross_entropy(x[:, 0], target, label_smoothing=smoothing),
            functional.cross_entropy(x[:, 0], target, label_smoothing=smoothing),
        )


def test_only_what_wants_a_gradient_gets_one():
    """A frozen output layer costs no gradient GEMM, and no memory for it."""
    hidden, table, labels = leaf(4, 3), torch.randn(5, 3), torch.arange(4)
    loss = linear_cross_entropy(hidden, table, labels)
    loss.backward()
    numbers = (-100, 0.0, 0.0, True, 2, False)
    assert _linear_cross_entropy(hidden, table, labels, None, *numbers, True, False, False)[3].numel() == 0
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, table, labels), loss.detach())


def test_the_logits_are_overwritten_when_that_is_asked_for():
    logits = torch.randn(3, 5).requires_grad_()
    inner = logits * 1
    (gradient,) = torch.autograd.grad(cross_entropy(inner, torch.arange(3), inplace_backward=True), inner)
    assert gradient.data_ptr() == inner.data_ptr()


def test_gradcheck():
    def check(function, *shapes):
        inputs = [leaf(*shape, dtype=torch.float64) for shape in shapes]
        assert torch.autograd.gradcheck(function, inputs)

    labels = torch.tensor([1, -100, 2])
    rule = {"label_smoothing": 0.1, "z_loss": 0.1}
    for efficient in (False, True):
        check(lambda x, w, b, e=efficient: layer_norm(x, (5,), w, b, memory_efficient=e), (3, 5), (5,), (5,))
        check(lambda x, w, e=efficient: rms_norm(x, (5,), w, memory_efficient=e), (3, 5), (5,))
    check(add_layer_norm, (3, 5), (3, 5), (5,), (5,))
    check(lambda x, r, w: add_rms_norm(x, r, w, offset=1.0), (3, 5), (3, 5), (5,))
    check(lambda x: cross_entropy(x, labels, reduction="none", **rule), (3, 5))
    check(lambda h, w, b: linear_cross_entropy(h, w, labels, b, chunk_rows=2, **rule), (3, 4), (5, 4), (5,))


OPS = {
    "layer_norm": lambda: (_layer_norm, (leaf(2, 3, 5), leaf(5), leaf(5), 1e-5, False)),
    "layer_norm from output": lambda: (_layer_norm, (leaf(2, 3, 5), leaf(5), leaf(5), 1e-5, True)),
    "add_layer_norm": lambda: (_add_layer_norm, (leaf(3, 5), leaf(3, 5), leaf(5), None, 1e-5)),
    "rms_norm": lambda: (_rms_norm, (as_leaf(leaf(2, 5).t()), None, 1e-5, 0.0, False)),
    "add_rms_norm": lambda: (_add_rms_norm, (leaf(3, 5), leaf(3, 5), leaf(5), 1e-5, 1.0)),
    "bias_gelu": lambda: (_bias_gelu, (leaf(3, 5), leaf(5), True)),
    "swiglu": lambda: (_swiglu, tuple(map(as_leaf, leaf(3, 10).chunk(2, -1)))),
    "bias_dropout_add": lambda: (
        _bias_dropout_add,
        (leaf(3, 5), leaf(5), leaf(3, 5), 0.5, torch.tensor(7)),
    ),
    "rotary": lambda: (
        _rotary,
        (as_leaf(leaf(2, 4, 3, 6).transpose(1, 2)), torch.randn(4, 2), torch.randn(4, 2), True, 2, False),
    ),
    "cross_entropy": lambda: (_cross_entropy, (leaf(3, 5), torch.arange(3), -100, 0.1, 0.1, False)),
    "linear_cross_entropy": lambda: (
        _linear_cross_entropy,
        (leaf(3, 4), leaf(5, 4), torch.arange(3), leaf(5), -100, 0.1, 0.0, True, 2, False, True, True, True),
    ),
    "layer_norm_backward": lambda: (
        _layer_norm_backward,
        (*(torch.randn(3, 5) for _ in range(3)), False, torch.randn(5), torch.randn(5), *torch.rand(2, 3), 1e-5),
    ),
    "layer_norm_backward without weights": lambda: (
        _layer_norm_backward,
        (torch.randn(3, 5), None, torch.randn(3, 5), True, None, None, None, torch.rand(3), 1e-5),
    ),
    "rms_norm_backward": lambda: (
        _rms_norm_backward,
        (torch.randn(5, 3).t(), None, torch.randn(3, 5), True, torch.rand(5), torch.rand(3), 1e-5, 1.0),
    ),
    "bias_gelu_backward": lambda: (_bias_gelu_backward, (torch.randn(3, 5), torch.randn(3, 5), torch.randn(5), False)),
    "bias_gelu_backward without a bias": lambda: (
        _bias_gelu_backward,
        (torch.randn(3, 5), torch.randn(3, 5), None, True),
    ),
    "swiglu_backward": lambda: (_swiglu_backward, (torch.randn(3, 5), *torch.randn(3, 10).chunk(2, -1))),
    "bias_dropout_add_backward": lambda: (
        _bias_dropout_add_backward,
        (torch.randn(3, 5, dtype=torch.float16), 0.5, torch.tensor(7), True),
    ),
    "bias_dropout_add_backward without a bias": lambda: (
        _bias_dropout_add_backward,
        (torch.randn(5, 3).t(), 0.5, torch.tensor(7), False),
    ),
    "logits_gradient": lambda: (_logits_gradient, _losses()),
    "logits_gradient_": lambda: (_logits_gradient_, _losses()),
    "scaled": lambda: (_scaled, (torch.randn(3, 5), torch.tensor(2.0), torch.float16)),
}


def _losses():
    return torch.randn(3), torch.randn(3, 5), torch.tensor([1, -100, 4]), torch.randn(3), 0, 5, -100, 0.1, 0.1


@pytest.mark.matrix(8)
@pytest.mark.parametrize("op", OPS)
def test_opcheck(op):
    function, arguments = OPS[op]()
    torch.library.opcheck(function, arguments)


def test_every_op_is_checked():
    """The others: attention in test_kernels_attention.py, the vocabulary-parallel loss in test_kernels_vocab_parallel.py."""
    elsewhere = {"flash_attention", "flash_attention_backward", "vocab_parallel_cross_entropy"}
    folder = Path(kernels.__file__).parent
    defined = {
        name for file in folder.rglob("*.py") for name in re.findall(r'custom_op\(\s*"smpc::(\w+)"', file.read_text())
    }
    assert {name.partition(" ")[0] for name in OPS} == defined - elsewhere


def test_fake_tensors():
    with FakeTensorMode():
        x, table = torch.empty(6, 8, requires_grad=True), torch.empty(9, 8, requires_grad=True)
        labels = torch.empty(6, dtype=torch.int64)
        hidden, _ = add_rms_norm(x, x * 2, table[0])
        linear_cross_entropy(bias_dropout_add(swiglu(hidden, x), None, x, 0.1), table, labels).backward()
    assert x.grad.shape == x.shape
    assert table.grad.shape == table.shape


def test_the_mask_keeps_its_share_and_repeats():
    x = torch.zeros(300, 100)
    ones = torch.ones_like(x)
    seed = torch.tensor(11)
    first = bias_dropout_add(ones, None, x, 0.25, seed=seed)
    assert torch.equal(first, bias_dropout_add(ones, None, x, 0.25, seed=seed))
    assert not torch.equal(first, bias_dropout_add(ones, None, x, 0.25, seed=seed + 1))
    # 30000 places: five standard deviations are 0.0125.
    assert (first != 0).double().mean().item() == pytest.approx(0.75, abs=0.0125)
    assert torch.equal(kept(x.shape, 0.25, seed), first != 0)
    torch.manual_seed(3)
    drawn = bias_dropout_add(ones, None, x, 0.25)
    assert not torch.equal(drawn, bias_dropout_add(ones, None, x, 0.25))
    torch.manual_seed(3)
    assert torch.equal(drawn, bias_dropout_add(ones, None, x, 0.25))


def test_words_of_philox():
    """Known answers of Random123, the authors' library: counter and key zero, and counter zero with another key."""
    words = [int(word) for word in philox(torch.zeros(1, dtype=torch.int64), torch.tensor(0))]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


X = torch.zeros(2, 4)
LABELS = torch.tensor([1, 2])
TABLES = torch.zeros(3, 2)
HEADS = torch.zeros(1, 2, 3, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer_norm(X, (5,)), r"last dimensions are \(5,\), found \(2, 4\)"),
        (lambda: layer_norm(X, (4,), torch.zeros(4), eps=0.0), "eps > 0, found 0.0"),
        (lambda: layer_norm(X, (4,), None, torch.zeros(4)), "expected weight along with bias, found None"),
        (lambda: layer_norm(X.long(), (4,)), "found torch.int64"),
        (lambda: layer_norm(X, (4,), torch.zeros(4, device="meta")), "one device, found x on cpu, weight on meta"),
        (lambda: add_layer_norm(X, X[0]), r"expected residual like x, \(2, 4\) torch.float32, found \(4,\)"),
        (lambda: rms_norm(X, (4,), torch.zeros(3)), r"last dimensions are \(4,\), found \(3,\)"),
        (lambda: rms_norm(torch.zeros(2, 0), (0,)), "at least one column"),
        (lambda: add_rms_norm(X, X.half()), "found .* torch.float16"),
        (lambda: bias_gelu(X, torch.zeros(3)), r"bias of shape \(4,\), found \(3,\)"),
        (lambda: bias_gelu(X, approximate="erf"), "one of none, tanh, found 'erf'"),
        (lambda: swiglu(X, X[:1]), r"found \(1, 4\)"),
        (lambda: bias_dropout_add(X, None, X, 1.5), "probability from 0 to 1, found 1.5"),
        (lambda: bias_dropout_add(X, None, X, 0.5, seed=torch.tensor(1.0)), "torch.int64 tensor of no dimension"),
        (lambda: rotary(X, TABLES, TABLES), "4 dimensions"),
        (lambda: rotary(HEADS, torch.zeros(3, 4), torch.zeros(3, 4)), "1 to 2 pairs"),
        (lambda: rotary(HEADS, torch.zeros(5, 2), torch.zeros(5, 2)), r"\(3, 'pairs'\) or \(1, 3, 'pairs'\)"),
        (lambda: rotary(HEADS, TABLES, TABLES.double()), "sin like cos"),
        (lambda: rotary(HEADS, leaf(3, 2), TABLES), "detach them"),
        (lambda: cross_entropy(X, LABELS.double()), "torch.int64 or torch.int32 .* found torch.float64"),
        (lambda: cross_entropy(X, LABELS.to("meta")), "one device, found .* on cpu, .* on meta"),
        (lambda: cross_entropy(X, LABELS[:1]), r"target of shape \(2,\), found \(1,\)"),
        (lambda: cross_entropy(X, LABELS + 2), "labels from 0 to 3 or ignore_index -100, found 4"),
        (lambda: cross_entropy(X, LABELS, label_smoothing=1.0), "label_smoothing from 0 to below 1, found 1.0"),
        (lambda: cross_entropy(X, LABELS, z_loss=-1.0, reduction="all"), "z_loss .*; expected reduction .* 'all'"),
        (lambda: linear_cross_entropy(X, TABLES, LABELS), r"found \(2, 4\) and \(3, 2\)"),
        (lambda: linear_cross_entropy(X, X, LABELS, reduction="none"), "mean, sum, found 'none'"),
        (lambda: linear_cross_entropy(X, X.half(), LABELS), "hidden's dtype torch.float32, found torch.float16"),
        (lambda: linear_cross_entropy(X, X, LABELS, chunk_rows=0), "chunk_rows of at least 1, found 0"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


ARGUMENTS = {
    "layer_norm": (lambda x, w, b: layer_norm(x, (4,), w, b), (X, X[0], X[0])),
    "add_layer_norm": (add_layer_norm, (X, X, X[0], X[0])),
    "rms_norm": (lambda x, w: rms_norm(x, (4,), w), (X, X[0])),
    "add_rms_norm": (add_rms_norm, (X, X, X[0])),
    "bias_gelu": (bias_gelu, (X, X[0])),
    "swiglu": (swiglu, (X, X)),
    "bias_dropout_add": (lambda x, b, r: bias_dropout_add(x, b, r, 0.1), (X, X[0], X)),
    "rotary": (rotary, (HEADS, TABLES, TABLES)),
    "cross_entropy": (lambda x: cross_entropy(x, LABELS.to(x.device)), (X,)),
    "linear_cross_entropy": (lambda h, w, b: linear_cross_entropy(h, w, LABELS % 2, b), (X, X, X[:, 0])),
    "flash_attention": (flash_attention, (HEADS, HEADS, HEADS)),
}


@pytest.mark.parametrize("op", ARGUMENTS)
def test_wrong_types_and_mixed_devices(op):
    function, arguments = ARGUMENTS[op]
    function(*arguments)
    for index, given in enumerate(arguments):
        for wrong, found in ((given.long(), "torch.int64"), (given.to("meta"), "on meta")):
            if wrong.is_meta and len(arguments) == 1:
                continue
            with pytest.raises(ValueError, match=f"expected .*found.*{found}"):
                function(*arguments[:index], wrong, *arguments[index + 1 :])
