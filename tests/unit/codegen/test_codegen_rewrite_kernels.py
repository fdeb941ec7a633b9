"""Rewrites that call ops of smpc.kernels: what they find, what they refuse and why, and what the new nodes cost."""

import json
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from smpc.cli import main
from smpc.codegen.rewrite.kernels import REWRITES, rewrite_kernels, select_rewrites
from smpc.codegen.rewrite.kernels.prove_replacement import Checker
from smpc.codegen.rewrite.kernels.rewrite import Measurer
from smpc.compile import PipelineOptions
from smpc.errors import ConfigError
from smpc.kernels.activations import swiglu
from smpc.kernels.attention.op import flash_attention
from smpc.kernels.cross_entropy import cross_entropy
from smpc.kernels.linear_cross_entropy import linear_cross_entropy
from smpc.kernels.rms_norm import rms_norm
from smpc.tracer.record import record
from smpc.tracer.replay import replay

ROWS, COLUMNS = 6, 16


class Formula(nn.Module):
    """A function of x and of parameters `weight` and `bias`."""

    def __init__(self, function, columns=COLUMNS):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, columns))
        self.bias = nn.Parameter(torch.linspace(-1, 1, columns))

    def forward(self, *inputs):
        return self.function(*inputs, self.weight, self.bias)


def inputs(*shape, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(shape or (2, ROWS, COLUMNS), dtype=dtype)


def rewritten(function, *args, op, columns=COLUMNS, grad=True):
    """The trace of a formula without and with an op, and what became of it."""
    model = Formula(function, columns)
    before = record(model, tuple(arg.requires_grad_(grad and arg.is_floating_point()) for arg in args))
    result = rewrite_kernels(before, [rewrite for rewrite in REWRITES if rewrite.op == op])
    return model, before, result


def calls(trace):
    return [node for node in trace.nodes if node.target.startswith("smpc.kernels.")]


def reason(function, *args, op, **options):
    """Why an op is not used, once."""
    _, before, result = rewritten(function, *args, op=op, **options)
    assert result.trace is before
    [use] = result.uses
    return use.reason


def llama(x, weight, bias):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def gemma(x, weight, bias):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * (1.0 + weight.float())).type_as(x)


def by_root(x, weight, bias):
    return x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-3) * weight


def by_power(x, weight, bias):
    return torch.mul(torch.square(x).mean(2, keepdim=True).add(1e-2).pow(-0.5), x)


def by_inverse(x, weight, bias):
    return x * (1 / torch.sqrt(x.pow(2).mean((-1,), True) + 1e-6)) * (weight - 1 + 1)


def by_name(x, weight, bias):
    return F.rms_norm(x, (COLUMNS,), weight, 1e-4)


NORMS = {
    llama: {"eps": 1e-6},
    gemma: {"eps": 1e-5, "offset": 1.0},
    by_root: {"eps": 1e-3},
    by_power: {"eps": 1e-2},
    by_name: {"eps": 1e-4},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)
def test_every_spelling_of_rms_norm_keeps_its_own_eps_and_offset(norm, dtype):
    x = inputs(dtype=dtype)
    model = Formula(norm).to(dtype)
    trace = record(model, (x.requires_grad_(),))
    result = rewrite_kernels(trace, select_rewrites("rms_norm", on_gpu=True))
    [call] = calls(result.trace)
    assert call.target == "smpc.kernels.rms_norm.rms_norm"
    assert dict(call.kwargs) == NORMS[norm]
    assert (call.args[2] is None) == (norm is by_power)
    assert call.spec == trace.node(trace.output_names[0]).spec
    found, expected = (replay(t, model, (x,), {}) for t in (result.trace, trace))
    largest = expected.abs().max()
    assert (found - expected).abs().max() <= {torch.float32: 1e-6}.get(dtype, 3 * torch.finfo(dtype).eps) * largest


def eps_outside(x, weight, bias):
    return x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + 1e-2) * weight


def wrong_dim(x, weight, bias):
    return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-2) * weight


def sums(x, weight, bias):
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-2) * weight


def cubes(x, weight, bias):
    return x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-2) * weight


def of_another(x, weight, bias):
    return (x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-2) * weight


@pytest.mark.parametrize("norm", [eps_outside, wrong_dim, sums, cubes, of_another], ids=lambda norm: norm.__name__)
def test_what_is_no_rms_norm_is_not_taken_for_one(norm):
    assert reason(norm, inputs(), op="rms_norm") == "nothing in the model computes it"


def test_a_replacement_that_computes_something_else_is_refused():
    def almost(x, weight, bias):
        return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3)))

    text = reason(almost, inputs(), op="bias_gelu")
    assert text.startswith("its result differs from the op's by ")
    assert text.endswith(" of its size in fp64")


def test_a_pattern_is_checked_once_for_a_trace(monkeypatch):
    """The search for degrees rewrites one trace for each of them; running both sides took ten of its seconds."""
    checks = []
    once = Checker._check
    monkeypatch.setattr(Checker, "_check", lambda self, *of: checks.append(of) or once(self, *of))
    trace = record(Formula(llama), (inputs(),))
    for _ in range(2):
        assert len(calls(rewrite_kernels(trace, select_rewrites("rms_norm", on_gpu=True)).trace)) == 1
    assert len(checks) == 1


def test_calls_that_read_the_same_are_run_once_and_have_memory_of_their_own(monkeypatch):
    def run(self, *args):
        runs.append(None)
        return run_once(self, *args)

    class Forgetful(dict):
        def __contains__(self, key):
            return False

    def begin(self, trace):
        made(self, trace)
        self._known = Forgetful()

    def three(x, weight, bias):
        for width in (weight, bias, bias):
            x = F.rms_norm(x.tanh(), (COLUMNS,), width, 1e-4)
        return x

    runs, run_once, made = [], Measurer._run_once, Measurer.__init__
    monkeypatch.setattr(Measurer, "_run_once", run)
    trace = record(Formula(three), (inputs().requires_grad_(),))
    found = rewrite_kernels(trace, select_rewrites("rms_norm", on_gpu=True)).trace
    assert len(calls(found)) == 3
    number = len(runs)
    monkeypatch.setattr(Measurer, "__init__", begin)
    expected = rewrite_kernels(trace, select_rewrites("rms_norm", on_gpu=True)).trace
    assert found == expected
    assert (number, len(runs) - number) == (2, 3)  # tanh of the input wants no gradient
    assert len({node.storage for node in calls(found)}) == 3


def test_gradients_count_in_the_comparison():
    def detached(x, weight, bias):
        wide = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return wide * weight.detach().float()

    # The weight's gradient is None here; the op would give it one.
    _, before, result = rewritten(detached, inputs(), op="rms_norm")
    assert [call.args[2] for call in calls(result.trace)] == [None]
    assert before.node(before.output_names[0]).target == "torch.Tensor.mul"


def test_gelu_written_out_with_a_bias():
    def written(x, weight, bias):
        x = x + bias
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))

    model, before, result = rewritten(written, inputs(), op="bias_gelu")
    [call] = calls(result.trace)
    assert [argument.name for argument in call.args] == ["args_0", "bias"]
    assert dict(call.kwargs) == {"approximate": "tanh"}
    assert len(result.trace.nodes) == 3 < len(before.nodes)
    torch.testing.assert_close(replay(result.trace, model, (inputs(),), {}), replay(before, model, (inputs(),), {}))


def test_layer_norm_written_out():
    def cohere(x, weight, bias):
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return weight * ((x - mean) * torch.rsqrt(variance + 1e-5))

    def shared(x, weight, bias):
        centered = x - x.mean(-1, keepdim=True)
        return centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-5) * weight + bias

    _, _, result = rewritten(shared, inputs(), op="layer_norm")
    [call] = calls(result.trace)
    assert call.args[3] is not None
    _, _, result = rewritten(cohere, inputs(), op="layer_norm")
    [call] = calls(result.trace)
    assert call.args[3] is None


def test_a_value_inside_that_is_read_elsewhere_keeps_the_rest():
    def returns(x, weight, bias):
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * root * weight, root

    assert reason(returns, inputs(), op="rms_norm") == "the model returns a value inside it (rsqrt)"

    def reads(x, weight, bias):
        squares = x.pow(2)
        return x * torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-6) * weight + squares

    assert reason(reads, inputs(), op="rms_norm") == "something else reads a value inside it (pow)"


def test_autocast_gradients_regions_and_writes_in_place_are_kept():
    def autocast(x, weight, bias):
        with torch.autocast("cpu", torch.bfloat16):
            return llama(x, weight, bias)

    def half_without(x, weight, bias):
        with torch.no_grad():
            root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * root * weight

    def half_again(x, weight, bias):
        def root(x):
            return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

        return x * checkpoint(root, x, use_reentrant=False) * weight

    def writes(x, weight, bias):
        x = x + 1
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        x.mul_(2)
        return x * root * weight

    assert reason(autocast, inputs(), op="rms_norm") == "it runs under autocast, which ops take no part in"
    assert reason(half_without, inputs(), op="rms_norm") == "part of it runs without gradients"
    assert reason(half_again, inputs(), op="rms_norm") == "part of it is checkpointed and part is not"
    assert reason(writes, inputs(), op="rms_norm") in (
        "something writes in place to what it reads",
        "nothing in the model computes it",
    )


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


ANGLES = torch.linspace(0, 3, 5).unsqueeze(1) * torch.linspace(1, 0.1, 4)  # [positions, pairs]


@pytest.mark.parametrize("seq_dim", [1, 2])
def test_rotary_of_halves_and_of_neighbours(seq_dim):
    shape = (2, 3, 5, 8) if seq_dim == 2 else (2, 5, 3, 8)

    def halves(x, angles, weight, bias):
        table = torch.cat((angles, angles), -1)[None].unsqueeze(3 - seq_dim)
        return x * table.cos() + rotate_half(x) * table.sin()

    def neighbours(x, angles, weight, bias):
        table = angles.repeat_interleave(2, dim=-1).unsqueeze(0)
        cos, sin = table.cos().unsqueeze(3 - seq_dim), table.sin().unsqueeze(3 - seq_dim)
        return x * cos + rotate_pairs(x) * sin

    for function in (halves, neighbours):
        model = Formula(function)
        x = inputs(*shape).requires_grad_()
        trace = record(model, (x, ANGLES))
        result = rewrite_kernels(trace, select_rewrites("rotary", on_gpu=True))
        [call] = calls(result.trace)
        assert dict(call.kwargs).get("interleaved", False) is (function is neighbours)
        assert dict(call.kwargs)["seq_dim"] == seq_dim
        torch.testing.assert_close(replay(result.trace, model, (x, ANGLES), {}), model(x, ANGLES))


def test_tables_that_are_not_known_to_be_doubled_are_refused():
    def tables(x, cos, sin, weight, bias):
        return x * cos + rotate_half(x) * sin

    args = (inputs(2, 3, 5, 8), inputs(5, 8), inputs(5, 8))
    model = Formula(tables)
    result = rewrite_kernels(record(model, args), select_rewrites("rotary", on_gpu=True))
    assert [use.reason for use in result.uses] == ["nothing shows that its tables hold every column twice"]

    def swapped(x, angles, weight, bias):
        table = torch.cat((angles, angles.flip(-1)), -1)
        return x * table.cos() + rotate_half(x) * table.sin()

    result = rewrite_kernels(record(Formula(swapped), (args[0], ANGLES)), select_rewrites("rotary", on_gpu=True))
    assert [use.reason for use in result.uses] == ["nothing shows that its tables hold every column twice"]

    def of_pairs(x, angles, weight, bias):  # doubled as neighbours are, used as halves are
        table = angles.repeat_interleave(2, dim=-1)
        return x * table.cos() + rotate_half(x) * table.sin()

    result = rewrite_kernels(record(Formula(of_pairs), (args[0], ANGLES)), select_rewrites("rotary", on_gpu=True))
    [use] = result.uses
    assert use.reason.startswith("its result differs from the op's by ")


HEADS = (2, 4, 5, 8)


def attention(mask=None, **options):
    def call(q, k, v, *rest):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=rest[0] if mask else None, **options)

    return call


def key_mask():
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    mask[:, :, :, 4:] = False
    return mask


@pytest.mark.parametrize(
    ("function", "more", "options"),
    [
        (attention(), (), {}),
        (attention(is_causal=True, scale=0.3), (), {"scale": 0.3, "causal": True}),
        (attention(mask=True), (key_mask(),), {}),
        (attention(mask=True), (inputs(1, 4, 1, 5).detach(),), {}),
    ],
    ids=["full", "causal", "padding", "alibi"],
)
def test_attention(function, more, options):
    model = Formula(function)
    heads = tuple(inputs(*HEADS).requires_grad_() for _ in range(3))
    trace = record(model, (*heads, *more))
    result = rewrite_kernels(trace, select_rewrites("flash_attention", on_gpu=True))
    [call] = calls(result.trace)
    assert dict(call.kwargs) == options
    assert len(call.args) == 3 + len(more)
    torch.testing.assert_close(replay(result.trace, model, (*heads, *more), {}), model(*heads, *more))


@pytest.mark.parametrize(
    ("function", "more", "text"),
    [
        (attention(dropout_p=0.5), (), "it has dropout 0.5, the kernel none"),
        (attention(mask=True), (inputs(2, 1, 5, 5),), "its mask float32[2,1,5,5] is added to the scores and has a row for every query"),
        (attention(mask=True), (inputs(2, 1, 5, 5) > 0,), "its mask bool[2,1,5,5] hides other keys of every query"),
    ],
    ids=["dropout", "added", "hides"],
)  # fmt: skip
def test_attention_that_the_kernel_does_not_compute(function, more, text):
    heads = tuple(inputs(*HEADS).requires_grad_() for _ in range(3))
    result = rewrite_kernels(
        record(Formula(function), (*heads, *more)), select_rewrites("flash_attention", on_gpu=True)
    )
    assert [use.reason for use in result.uses] == [text]


def test_a_window_in_a_mask_is_not_the_future():
    def window(q, k, v, weight, bias):
        places = torch.arange(5)
        visible = (places[None] <= places[:, None]) & (places[None] > places[:, None] - 3)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible[None, None])

    heads = tuple(inputs(*HEADS).requires_grad_() for _ in range(3))
    result = rewrite_kernels(record(Formula(window), heads), select_rewrites("flash_attention", on_gpu=True))
    assert [use.reason for use in result.uses] == ["its mask bool[1,1,5,5] hides other keys of every query"]


def test_a_mask_that_is_written_in_place_is_not_what_it_was_made_as():
    def holes(q, k, v, weight, bias):
        visible = torch.ones(1, 1, 5, 5, dtype=torch.bool)
        visible[..., 3] = False
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)

    def holes_in_padding(q, k, v, padding, weight, bias):
        visible = torch.ones(5, 5, dtype=torch.bool).tril() & padding
        padding[..., 0] = False
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)

    heads = tuple(inputs(*HEADS).requires_grad_() for _ in range(3))
    for function, more in ((holes, ()), (holes_in_padding, (key_mask(),))):
        trace = record(Formula(function), (*heads, *more))
        result = rewrite_kernels(trace, select_rewrites("flash_attention", on_gpu=True))
        assert [use.reason for use in result.uses] == ["something writes in place to what it reads"]


def test_without_gradients():
    def frozen(x, weight, bias):
        with torch.no_grad():
            x = llama(x, weight, bias)
        return x * weight

    _, _, result = rewritten(frozen, inputs(), op="rms_norm")
    [call] = calls(result.trace)
    assert not call.grad_enabled
    assert not call.spec.requires_grad
    assert call.saved == ()


def test_swiglu_and_dropout():
    def gated(x, weight, bias):
        gate, up = x.chunk(2, -1)
        return gate * torch.sigmoid(gate) * up

    _, _, result = rewritten(gated, inputs(), op="swiglu")
    assert len(calls(result.trace)) == 1

    def dropped(x, weight, bias):
        return x + F.dropout(x * 2 + bias, 0.25)

    model, _, result = rewritten(dropped, inputs(), op="bias_dropout_add")
    [call] = calls(result.trace)
    assert call.random
    assert call.args[3] == 0.25
    x = inputs()
    out = replay(result.trace, model, (x,), {})
    kept = (out - x) / (x * 2 + model.bias)  # 0 or 1 / (1 - p)
    assert torch.allclose(kept * (kept - 4 / 3), torch.zeros(()), atol=1e-3)


class Head(nn.Module):
    """An output layer with its loss."""

    def __init__(self, returns_logits=False, **options):
        super().__init__()
        self.linear, self.returns_logits, self.options = nn.Linear(COLUMNS, 11), returns_logits, options

    def forward(self, hidden, labels):
        logits = self.linear(hidden).float()
        loss = F.cross_entropy(logits.view(-1, 11), labels.view(-1), **self.options)
        return (loss, logits) if self.returns_logits else loss


LABELS = torch.tensor([[1, 2, -100, 4, 10, 0], [3, -100, 5, 5, 5, 9]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", ["cross_entropy", "linear_cross_entropy"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "reduction": "sum"}], ids=["mean", "sum"])
def test_losses(op, options, dtype):
    torch.manual_seed(0)
    model, hidden = Head(**options).to(dtype), inputs(dtype=dtype).requires_grad_()
    trace = record(model, (hidden, LABELS))
    result = rewrite_kernels(trace, select_rewrites(op, on_gpu=True))
    [call] = calls(result.trace)
    assert call.target.endswith(f".{op}")
    targets = [node.target for node in result.trace.nodes]
    assert "torch.Tensor.float" not in targets  # no fp32 copy of the logits
    assert ("torch.nn.functional.linear" in targets) == (op == "cross_entropy")
    found, expected = replay(result.trace, model, (hidden, LABELS), {}), model(hidden, LABELS)
    assert (found - expected).abs() <= (1e-6 if dtype is torch.float32 else 2e-2) * expected


def test_losses_that_stay_as_they_are():
    hidden = inputs()
    with_logits = record(Head(returns_logits=True), (hidden, LABELS))
    result = rewrite_kernels(with_logits, select_rewrites("linear_cross_entropy", on_gpu=True))
    assert [use.reason for use in result.uses] == ["the model returns the logits"]

    def probabilities(x, weight, bias):
        return F.cross_entropy(x, torch.softmax(x, -1))

    assert (
        reason(probabilities, inputs(4, 16), op="cross_entropy") == "its target is float32: probabilities, not labels"
    )

    def channels(x, labels, weight, bias):
        return F.cross_entropy(x, labels)

    labels = torch.zeros(2, 5, dtype=torch.int64)
    text = reason(channels, inputs(2, 4, 5), labels, op="cross_entropy")
    assert text == "its classes are not in the last dimension"


class Written(nn.Module):
    """A block in torch's operations; `Called` is the same with the ops called by hand."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.up, self.head = nn.Linear(32, 96, bias=False), nn.Linear(48, 19, bias=False)

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def gated(self, gate, up):
        return F.silu(gate) * up

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def loss(self, x, labels):
        return F.cross_entropy(F.linear(x, self.head.weight), labels)

    def forward(self, x, labels):
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        x = self.gated(gate, up)
        heads = x.view(2, ROWS, 3, 16).transpose(1, 2)
        x = self.attend(heads, heads, heads).transpose(1, 2).reshape(2 * ROWS, 48)
        return self.loss(x, labels)


class Called(Written):
    def norm(self, x):
        return rms_norm(x, (32,), self.weight, eps=1e-6)

    def gated(self, gate, up):
        return swiglu(gate, up)

    def attend(self, q, k, v):
        return flash_attention(q, k, v, causal=True)

    def loss(self, x, labels):
        return cross_entropy(F.linear(x, self.head.weight), labels)


class CalledWhole(Called):
    def loss(self, x, labels):
        return linear_cross_entropy(x, self.head.weight, labels)


def cost(trace):
    """FLOPs and bytes that autograd keeps, each storage once."""
    kept = dict.fromkeys(storage for node in trace.nodes for storage in node.saved)
    return sum(node.flops for node in trace.nodes), sum(trace.storages[storage] for storage in kept)


@pytest.mark.parametrize(("called", "loss"), [(Called, "cross_entropy"), (CalledWhole, "linear_cross_entropy")])
def test_new_nodes_cost_what_the_same_calls_cost_when_they_are_recorded(called, loss):
    args = (inputs(2, ROWS, 32), torch.zeros(2 * ROWS, dtype=torch.int64))
    trace = record(Written(), args)
    result = rewrite_kernels(trace, select_rewrites(f"rms_norm,swiglu,flash_attention,{loss}", on_gpu=True))
    assert len(calls(result.trace)) == 4
    flops, kept = cost(result.trace)
    recorded_flops, recorded_kept = cost(record(called(), args))
    # The recorded call has its own gradients' products in its forward; the planner counts those in the backward.
    products = 2 * (2 * ROWS) * 48 * 19
    assert flops == recorded_flops - (2 * products if loss == "linear_cross_entropy" else 0)
    assert kept == recorded_kept
    assert flops == cost(trace)[0]
    assert kept < cost(trace)[1] or called is CalledWhole  # so few classes that the logits are the least


def test_sizes_of_real_models_are_checked_on_small_ones():
    x = torch.empty(4, 4096, 8192, device="meta")
    model = Formula(llama, 8192)
    result = rewrite_kernels(record(model, (x,)), select_rewrites("rms_norm", on_gpu=True))
    assert [use.reason for use in result.uses] == [""]


def test_names_of_kernels():
    assert select_rewrites("off", on_gpu=True) == select_rewrites((), on_gpu=True) == ()
    assert select_rewrites("auto", on_gpu=True) == ()  # none has been shown to be quicker
    assert [rewrite.op for rewrite in select_rewrites(" swiglu, rms_norm", on_gpu=False)] == ["rms_norm", "swiglu"]
    with pytest.raises(ConfigError) as caught:
        PipelineOptions(kernels="rmsnorm,swiglu,auto,sonnet")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("kernels: expected 'auto', 'off' or names among linear_cross_entropy, cross_entropy, ")
    assert lines[0].endswith("found 'rmsnorm'; did you mean 'rms_norm'?")
    assert lines[1] == "kernels: 'auto' stands alone, found it in a list of names"
    assert lines[2].endswith("found 'sonnet'")


FACTORY = """
import torch
from torch import nn

class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

def build():
    return nn.Sequential(*(nn.Sequential(Norm(), nn.Linear(16, 16)) for _ in range(4))), torch.zeros(8, 16)
"""


@pytest.fixture
def smpc(tmp_path, capsys, monkeypatch):
    """Runs `smpc compile` in this process; returns status, stdout and stderr."""
    path = tmp_path / "kernels_factory.py"
    path.write_text(FACTORY)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*options):
        try:
            status = main(["compile", f"{path}:build", "-p", "2", "-m", "2", *options])
        except SystemExit as ended:
            status = ended.code
        return status or 0, *capsys.readouterr()

    return run


def test_the_command_says_what_it_replaced_and_writes_it(smpc, tmp_path):
    status, out, err = smpc("--kernels", "rms_norm,swiglu", "--out", str(tmp_path / "out"))
    assert status == 0, err
    assert "smpc: warning: kernels: swiglu is not used: nothing in the model computes it" in err
    assert "Kernels    rms_norm at 4 places, from 0.0" in out
    assert "swiglu not used: nothing in the model computes it" in out
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan["kernels"] == [
        {"op": "rms_norm", "count": 4, "first": "0.0", "reason": ""},
        {"op": "swiglu", "count": 0, "first": "", "reason": "nothing in the model computes it"},
    ]
    assert "rms_norm at 4 places" in (tmp_path / "out" / "report.html").read_text()
    assert (tmp_path / "out" / "rank_0.py").read_text().count("smpc.kernels.rms_norm.rms_norm") > 0


def test_the_command_names_the_closest_kernel(smpc):
    status, out, err = smpc("--kernels", "rms_nrom")
    assert status != 0
    assert out == ""
    assert "did you mean 'rms_norm'?" in err


def test_the_setting_of_a_file(smpc, tmp_path):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"pipeline_parallel_degree": 2, "kernels": "rms_norm"}))
    status, out, err = smpc("--config", str(path))
    assert status == 0, err
    assert "rms_norm at 4 places" in out
    status, out, err = smpc("--config", str(path), "--kernels", "off")
    assert status == 0, err
    assert "rms_norm" not in out
