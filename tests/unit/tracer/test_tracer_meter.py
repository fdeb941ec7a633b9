"""Dtypes that real kernels refuse and fake ones take: a recording is refused if and only if eager PyTorch refuses the call."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import core
from torch import nn

from smpc.errors import TraceError
from smpc.tracer import record
from smpc.tracer.operations import meter

FLOAT, DOUBLE, HALF, BRAIN = torch.float32, torch.float64, torch.float16, torch.bfloat16
LONG, INT, BOOL = torch.int64, torch.int32, torch.bool


class Call(nn.Module):
    """A model that is one call."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def convolution(x, weight):
    return F.conv2d(x, weight, groups=4, stride=2, padding=3)


def attention(query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


# What is called, with the shapes and dtypes of a call that works.
CALLS = {
    "linear": (F.linear, ((2, 4), FLOAT), ((3, 4), FLOAT), ((3,), FLOAT)),
    "linear of three dimensions": (F.linear, ((2, 5, 4), FLOAT), ((3, 4), FLOAT)),
    "matmul": (torch.matmul, ((2, 4), FLOAT), ((4, 3), FLOAT)),
    "bmm": (torch.bmm, ((5, 2, 4), FLOAT), ((5, 4, 3), FLOAT)),
    "baddbmm": (torch.baddbmm, ((5, 2, 3), FLOAT), ((5, 2, 4), FLOAT), ((5, 4, 3), FLOAT)),
    "addmm": (torch.addmm, ((3,), FLOAT), ((2, 4), FLOAT), ((4, 3), FLOAT)),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), ((2, 4), FLOAT), ((4, 3), FLOAT)),
    "conv1d": (F.conv1d, ((2, 4, 9), FLOAT), ((6, 4, 3), FLOAT), ((6,), FLOAT)),
    "conv2d in groups": (convolution, ((2, 4, 9, 9), FLOAT), ((8, 1, 3, 3), FLOAT)),
    "conv_transpose2d": (F.conv_transpose2d, ((2, 4, 9, 9), FLOAT), ((4, 6, 3, 3), FLOAT)),
    "embedding": (F.embedding, ((2, 3), LONG), ((7, 4), FLOAT)),
    "layer_norm": (
        lambda x, weight, bias: F.layer_norm(x, (9,), weight, bias),
        ((2, 9), FLOAT),
        ((9,), FLOAT),
        ((9,), FLOAT),
    ),
    "group_norm": (lambda x, weight: F.group_norm(x, 3, weight), ((2, 9, 5), FLOAT), ((9,), FLOAT)),
    "batch_norm": (F.batch_norm, ((2, 8, 5), FLOAT), ((8,), FLOAT), ((8,), FLOAT)),
    "cross_entropy": (F.cross_entropy, ((6, 10), FLOAT), ((6,), LONG)),
    "cross_entropy of probabilities": (F.cross_entropy, ((6, 10), FLOAT), ((6, 10), FLOAT)),
    "binary_cross_entropy": (F.binary_cross_entropy, ((6,), FLOAT), ((6,), FLOAT)),
    "attention": (attention, *((((2, 3, 5, 8), FLOAT),) * 3), ((5, 5), FLOAT)),
    "gelu": (F.gelu, ((6,), FLOAT)),
    "log_softmax": (lambda x: F.log_softmax(x, -1), ((6,), FLOAT)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), ((2, 4, 9, 9), FLOAT)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 3), ((2, 4, 9, 9), FLOAT)),
    "grid_sample": (
        lambda x, grid: F.grid_sample(x, grid, align_corners=False),
        ((2, 3, 4, 4), FLOAT),
        ((2, 4, 4, 2), FLOAT),
    ),
    "cdist": (torch.cdist, ((2, 3, 4), FLOAT), ((2, 5, 4), FLOAT)),
    "bitwise_and": (torch.bitwise_and, ((2, 4), BOOL), ((2, 4), BOOL)),
    "gather": (lambda x, index: x.gather(1, index), ((2, 4), FLOAT), ((2, 4), LONG)),
    "index_add": (lambda x, index, y: x.index_add(0, index, y), ((2, 4), FLOAT), ((2,), LONG), ((2, 4), FLOAT)),
    "scatter_add": (
        lambda x, index, y: x.scatter_add(1, index, y),
        ((2, 4), FLOAT),
        ((2, 4), LONG),
        ((2, 4), FLOAT),
    ),
    "lerp": (torch.lerp, ((2, 4), FLOAT), ((2, 4), FLOAT), ((2, 4), FLOAT)),
    "add": (torch.add, ((2, 4), FLOAT), ((2, 4), FLOAT)),
    "add_": (lambda x, y: (x * 1).add_(y), ((2, 4), FLOAT), ((2, 4), FLOAT)),
    "where": (torch.where, ((2,), BOOL), ((2,), FLOAT), ((2,), FLOAT)),
    "topk": (lambda x: x.topk(5), ((12,), FLOAT)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3), ((2, 4, 9, 9), FLOAT)),
    "bernoulli": (torch.bernoulli, ((6,), FLOAT)),
}


def refusals(model, tensors):
    """What eager PyTorch and the recording say; None: nothing."""
    found = []
    for run in (lambda: model(*tensors), lambda: record(model, tensors)):
        try:
            run()
            found.append(None)
        except Exception as error:
            found.append(error)
    return found


def check(name, given):
    """Whether the call is refused; both must agree on that."""
    function, *arguments = CALLS[name]
    tensors = tuple(torch.ones(shape).to(dtype) for (shape, _), dtype in zip(arguments, given, strict=True))
    eager, recorded = refusals(Call(function), tensors)
    assert (eager is None) == (recorded is None), (name, given, eager, recorded)
    assert recorded is None or isinstance(recorded, TraceError)
    return recorded is not None


QUICK = {
    "add",
    "add_",
    "adaptive_avg_pool2d",
    "embedding",
    "gelu",
    "interpolate",
    "linear",
    "matmul",
    "max_pool2d",
    "topk",
    "where",
}


@pytest.mark.long
@pytest.mark.matrix(5)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CALLS]
)
def test_what_eager_takes_and_only_that_is_recorded(name):
    usual = [dtype for _, dtype in CALLS[name][1:]]
    assert not check(name, usual)
    refused = 0
    for i in range(len(usual)):
        for dtype in (FLOAT, DOUBLE, LONG, INT, BOOL):
            refused += check(name, [*usual[:i], dtype, *usual[i + 1 :]])
    if "float" in str(usual[0]) and name not in ("add", "where", "topk", "max_pool2d"):
        assert refused, "the test shows nothing"


@pytest.mark.slow
def test_random_dtypes_for_all_arguments():
    numbers = random.Random(core.global_force_seed or 0)
    for _ in range(2000):
        name = numbers.choice(list(CALLS))
        check(name, [numbers.choice((FLOAT, DOUBLE, LONG, INT, BOOL)) for _ in CALLS[name][1:]])


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def test_the_error_says_where_and_which_dtypes():
    """`smpc compile mlp.py:build --input x=int64[4,8]` made a plan."""
    text = (
        r"cannot trace module 'first' \(Linear\), .*: torch.linear: expected mat1 of float32, found int64 "
        r"\(self is float32, mat2 is float32\); aten::addmm says: .*; what to do: convert the tensor"
    )
    with pytest.raises(TraceError, match=text):
        record(Classifier(), (torch.zeros(4, 8, dtype=LONG),))
    with pytest.raises(TraceError, match=r"module 'first'.*expected .* of float16, found float32"):
        record(Classifier().half(), (torch.zeros(4, 8),))
    with torch.device("meta"):
        model = Classifier()
    with pytest.raises(TraceError, match="expected mat1 of float32, found int64"):
        record(model, (torch.zeros(4, 8, dtype=LONG, device="meta"),))


def test_autocast_is_part_of_the_call():
    x = torch.zeros(4, 8, dtype=BRAIN)
    with pytest.raises(
        TraceError, match=r"expected .* of float32, found bfloat16|expected .* of bfloat16, found float32"
    ):
        record(Classifier(), (x,))
    with torch.autocast("cpu", BRAIN):
        Classifier()(x)
        record(Classifier(), (x,))


def test_inside_a_module_that_is_called_whole():
    with pytest.raises(TraceError, match=r"Long|int64"):
        record(nn.Sequential(Classifier()), (torch.zeros(4, 8, dtype=LONG),), leaf_modules=["0"])


def test_a_dtype_that_only_this_processor_lacks_is_accepted():
    x = torch.zeros(2, 3, 4, dtype=HALF)
    with pytest.raises(RuntimeError, match="not implemented for 'Half'"):
        torch.cdist(x, x)
    record(Call(torch.cdist), (x, x))
    with pytest.raises(TraceError, match="cdist"):
        record(Call(torch.cdist), (x, x.float()))


def test_large_and_repeated_calls_cost_nothing_more():
    def runs(model, *shape):
        before = meter._refusal.cache_info().misses
        record(model, (torch.zeros(shape, device="meta"),))
        return meter._refusal.cache_info().misses - before

    layers = [nn.Linear(4096, 4096, device="meta") for _ in range(40)]
    meter._refusal.cache_clear()
    assert runs(nn.Sequential(*layers[:2]), 65536, 4096) > 0
    assert runs(nn.Sequential(*layers), 65536, 4096) == 0
    assert runs(nn.Sequential(*layers), 2**20, 4096) == 0


def test_nobodys_random_numbers_are_used():
    meter._refusal.cache_clear()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    record(Call(lambda x: torch.bernoulli(F.dropout(x))), (torch.full((6,), 0.5),))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("order", [(1, 1.0), (1.0, 1), (True, 1.0)])
def test_numbers_that_are_equal_are_not_the_same_argument(order):
    """What is known of `x & 1` says nothing of `x & 1.0`."""
    meter._refusal.cache_clear()
    for number in order:
        eager, recorded = refusals(Call(lambda x, number=number: x & number), (torch.ones(3, dtype=LONG),))
        assert (eager is None) == (recorded is None) == (type(number) is not float)
