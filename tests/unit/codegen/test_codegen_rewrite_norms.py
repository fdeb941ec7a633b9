"""Residual sums and their norms as one call: what is replaced, what it costs, and what stays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smpc.codegen.rewrite.kernels import rewrite_kernels, select_rewrites
from smpc.kernels.layer_norm import add_layer_norm
from smpc.kernels.rms_norm import add_rms_norm
from smpc.tracer.record import record
from smpc.tracer.replay import replay

COLUMNS = 16
ALL = "bias_dropout_add,add_rms_norm,add_layer_norm,rms_norm,layer_norm"


class Norm(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, COLUMNS))
        self.bias = nn.Parameter(torch.linspace(-1, 1, COLUMNS))

    def forward(self, x):
        if self.kind == "layer_norm":
            return F.layer_norm(x, (COLUMNS,), self.weight, self.bias, 1e-3)
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Layer(nn.Module):
    """A transformer layer as Llama has it; with `after`, as BERT has it."""

    def __init__(self, kind, after=False, p=0.0):
        super().__init__()
        self.one, self.two, self.after, self.p = Norm(kind), Norm(kind), after, p
        self.attend, self.feed = nn.Linear(COLUMNS, COLUMNS), nn.Linear(COLUMNS, COLUMNS)

    def normed_sum(self, x, residual):
        """What the op computes, here in torch's operations."""
        total = residual + x
        return self.two(total), total

    def forward(self, x):
        if self.after:
            return self.one(self.feed(x) + x)
        x, total = self.normed_sum(F.dropout(self.attend(self.one(x)), self.p, self.p > 0), x)
        return total + self.feed(x)


class Called(Layer):
    def normed_sum(self, x, residual):
        if self.two.kind == "layer_norm":
            return add_layer_norm(residual, x, self.two.weight, self.two.bias, 1e-3)
        return add_rms_norm(residual, x, self.two.weight, 1e-6)


def inputs(*shape, dtype=torch.float32):
    return torch.randn(shape or (2, 5, COLUMNS), generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


def model_of(*layers):
    torch.manual_seed(1)
    return nn.Sequential(*layers)


def rewritten(model, *args, kernels=ALL):
    trace = record(model, args)
    return trace, rewrite_kernels(trace, select_rewrites(kernels, on_gpu=True))


def used(result):
    return {use.op: use.count for use in result.uses if not use.reason}


def reasons(result, op):
    return [use.reason for use in result.uses if use.op == op]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_values_and_gradients(kind, dtype):
    model, x = model_of(Layer(kind), Layer(kind)).to(dtype), inputs(dtype=dtype)
    trace, result = rewritten(model, x)
    assert used(result) == {f"add_{kind}": 2, kind: 2}
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    runs = []
    for one in (trace, result.trace):
        out = replay(one, model, (x,), {})
        runs.append(
            (out, *torch.autograd.grad(out.float().square().sum(), (x, *model.parameters()), allow_unused=True))
        )
    compared = [(a, b) for a, b in zip(*runs, strict=True) if b is not None]
    assert len(compared) > 10
    for expected, found in compared:
        assert (expected - found).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_the_new_nodes_cost_what_the_same_call_costs_when_it_is_recorded(kind):
    def cost(trace):
        kept = dict.fromkeys(storage for node in trace.nodes for storage in node.saved)
        return (
            sum(node.flops for node in trace.nodes),
            sum(node.bytes_moved for node in trace.nodes),
            sum(trace.storages[storage] for storage in kept),
        )

    before, result = rewritten(Layer(kind), inputs(), kernels=f"add_{kind}")
    recorded = record(Called(kind), (inputs(),))
    flops, moved, kept = cost(result.trace)
    assert (flops, kept) == (cost(recorded)[0], cost(recorded)[2])
    statistics = 2 * 5 * 4 * (2 if kind == "layer_norm" else 1)  # the recorded call hands them out, too
    assert moved == cost(recorded)[1] - statistics
    assert moved < cost(before)[1]


def test_a_sum_that_nothing_else_reads_is_not_handed_out():
    _, result = rewritten(model_of(Layer("layer_norm", after=True)), inputs())
    assert used(result) == {"add_layer_norm": 1}
    assert [node.args[1] for node in result.trace.nodes if node.target == "_operator.getitem"] == [0]


def test_dropout_takes_its_sum_where_both_are_asked_for():
    _, result = rewritten(model_of(Layer("rms_norm", p=0.1)), inputs())
    assert used(result) == {"bias_dropout_add": 1, "rms_norm": 2}
    _, result = rewritten(model_of(Layer("rms_norm", p=0.1)), inputs(), kernels="add_rms_norm")
    assert used(result) == {"add_rms_norm": 1}


def test_a_sum_of_another_layer_stays():
    _, result = rewritten(model_of(Layer("rms_norm"), Norm("rms_norm")), inputs())
    assert used(result) == {"add_rms_norm": 1, "rms_norm": 2}
    text = "its sum is made in another layer, and pipelines are cut between layers"
    assert reasons(result, "add_rms_norm") == ["", text]


class Formula(Norm):
    """A function of x, a residual and this norm; both have gradients if they are `scaled` by a parameter."""

    def __init__(self, function, scaled=True):
        super().__init__("rms_norm")
        self.function, self.scaled = function, scaled

    def forward(self, *args):
        return self.function(*(arg * self.bias if self.scaled else arg for arg in args), super().forward)


def test_what_the_op_does_not_compute_stays():
    def read_before(x, residual, norm):
        total = x + residual
        doubled = total * 2
        return norm(total), doubled

    def scaled(x, residual, norm):
        return norm(torch.add(x, residual, alpha=2))

    def handed_out(x, residual, norm):
        total = x + residual
        return norm(total), total

    def written_in_place(x, residual, norm):
        total = x + residual
        out = norm(total)
        with torch.no_grad():
            residual.add_(1)
        return out

    def transposed(x, residual, norm):
        total = x.transpose(0, 1) + residual.transpose(0, 1)
        return norm(total), total

    expected = {
        read_before: "something else reads a value inside it (add)",
        scaled: "nothing in the model computes it",
        handed_out: "",
        written_in_place: "",
        transposed: "the op's result has another memory layout: strides (32, 16, 1), expected (16, 80, 1)",
    }
    for function, reason in expected.items():
        _, result = rewritten(Formula(function), inputs(), inputs(), kernels="add_rms_norm")
        assert reasons(result, "add_rms_norm") == [reason], function.__name__
    _, result = rewritten(Formula(lambda x, r, norm: norm(x + r)), inputs(), inputs(5, COLUMNS), kernels="add_rms_norm")
    assert reasons(result, "add_rms_norm") == ["nothing in the model computes it"]


def test_a_sum_without_a_gradient_stays_without_one():
    def handed_out(x, residual, norm):
        total = x + residual
        return norm(total), total

    _, result = rewritten(Formula(handed_out, scaled=False), inputs(), inputs(), kernels="add_rms_norm")
    [text] = reasons(result, "add_rms_norm")
    assert text == "the op gives float32[2,5,16] with a gradient, expected float32[2,5,16] without a gradient"
