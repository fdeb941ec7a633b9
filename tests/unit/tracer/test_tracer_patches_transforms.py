"""Python under torch.vmap, torch.func.grad and the like: recorded as what it comes down to, replayed and trained to the same bits."""

from __future__ import annotations

import parity
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smpc.compile import compile_model
from smpc.errors import TraceError
from smpc.tracer import NodeKind, record, verify


class Model(nn.Module):
    """Two layers around a function that runs in the model's own forward."""

    def __init__(self, function):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))
        self.function = function

    def forward(self, x):
        return self.last(self.function(self, self.first(x)))


def rows(self, x):
    return torch.vmap(lambda row: (row * self.scale).tanh())(x)


def nested(self, x):
    def inner(number):
        return number * 2 + torch.arange(3.0)[:, None].sum()

    return torch.vmap(torch.vmap(inner), in_dims=1, out_dims=1)(x)


def written(self, x):
    def write(row):
        row = row.clone()
        row += self.scale
        return row.mul_(2)

    return torch.vmap(write)(x.clone())


def dropped(self, x):
    return torch.vmap(lambda row: F.dropout(row, 0.5), randomness="different")(x)


def forces(self, x):
    return -torch.func.grad(lambda y: (self.inner(y) ** 3).sum())(x)


def gradients_of_rows(self, x):
    return torch.vmap(torch.func.grad(lambda row: (F.layer_norm(self.inner(row), (4,)) ** 2 * self.scale).sum()))(x)


def pullback(self, x):
    return torch.func.vjp(lambda y: F.gelu(self.inner(y)), x)[1](torch.ones_like(x))[0]


def pushforward(self, x):
    return torch.func.jvp(lambda y: (y * self.scale).sin().exp(), (x,), (torch.ones_like(x),))[1]


def jacobians(self, x):
    return (
        torch.func.jacrev(lambda y: (y @ self.scale).sin())(x)[0]
        + torch.func.jacfwd(lambda y: (y @ self.scale).cos())(x)[0]
    )


def curvature(self, x):
    return x + torch.func.hessian(lambda row: (row * self.scale).pow(3).sum())(x[0])


def ensemble(self, x):
    weights = {name: torch.stack([weight, weight * 2]) for name, weight in self.inner.named_parameters()}
    both = torch.vmap(lambda own, y: torch.func.functional_call(self.inner, own, (y,)), in_dims=(0, None))(weights, x)
    return both.sum(dim=0)


FUNCTIONS = (
    rows, nested, written, forces, gradients_of_rows, pullback, pushforward, jacobians, curvature, ensemble,
)  # fmt: skip


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*:DeprecationWarning"
)  # torch's own use, in forward-mode differentiation
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_runs_under_a_transform_is_recorded(function):
    torch.manual_seed(0)
    model, inputs = Model(function), ((torch.randn(8, 4),), {})
    compilation = compile_model(model, inputs, pipeline_parallel_degree=2, microbatches=2)
    assert not any(node.kind is NodeKind.CALL_MODULE for node in compilation.trace.nodes)
    verify(compilation.trace, model, *parity.split(inputs, 2)[0])
    shared = tuple(item.name for item in compilation.plan.shared_parameters)
    parity.assert_same(parity.run_eager(model, inputs, 2), parity.run_loopback(model, compilation, inputs), shared)


def test_random_numbers_under_a_transform_are_those_of_the_model():
    model, x = Model(dropped), torch.randn(8, 4)
    trace = record(model, (x,))
    assert any(node.random for node in trace.nodes)
    verify(trace, model, (x,))


def test_what_autograd_saves_under_a_transform_is_counted():
    x = torch.randn(1000, 4, requires_grad=True)
    trace = record(Model(rows), (x,))
    saved = {storage for node in trace.nodes if "ops.aten" in node.target for storage in node.saved}
    assert (
        sum(trace.storages[storage] for storage in saved) == 2 * 4 * 4000
    )  # x for the gradient of scale, and tanh's result


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5


def custom(self, x):
    return torch.vmap(Doubled.apply)(x)


class Inner(nn.Module):
    def forward(self, x):
        return torch.vmap(Doubled.apply)(x)


def test_a_custom_function_keeps_its_backward_or_is_refused():
    model, x = Model(custom), torch.randn(8, 4)
    with pytest.raises(
        TraceError, match=r"function Doubled is called under a transform, such as torch.vmap, where its backward"
    ):
        record(model, (x,))
    with torch.no_grad():
        trace = record(model, (x,))
    verify(trace, model.requires_grad_(False), (x,))
    layers = nn.Sequential(nn.Linear(4, 4), Inner(), nn.Linear(4, 4))
    trace = record(layers, (x,))
    assert [node.target for node in trace.nodes if node.kind is NodeKind.CALL_MODULE] == ["1"]
    verify(trace, layers, (x,))
