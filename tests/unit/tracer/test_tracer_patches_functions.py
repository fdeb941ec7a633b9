"""Custom autograd functions of every kind: one node each, and training in pieces equal to the model's own, bit for bit."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import parity
import pytest
import torch
import torch.nn.functional as F
from random_plans import compile_assignment, contiguous
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from smpc.codegen.rewrite.tensor_parallel.layouts import REPLICATED
from smpc.codegen.rewrite.tensor_parallel.rules import strategies
from smpc.codegen.rewrite.tensor_parallel.strategy import Facts, Strategy
from smpc.compile import compile_model
from smpc.errors import TraceError
from smpc.executor.split_backward import intercept
from smpc.sample_inputs import first_microbatch
from smpc.tracer import NodeKind, Trace, record, targets, to_fx, verify

# -- functions that are recorded ---------------------------------------------------------------------------------------


class OldStyle(Function):
    """A product of sines, whose backward is not its derivative."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.sin() * scale

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * (ctx.scale + 1), None


class SetupContext(Function):
    @staticmethod
    def forward(x, weight, bias=None, power=2):
        y = x**power @ weight
        return y if bias is None else y + bias

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
        return gradient @ weight.T * 2, x.T @ gradient, bias, None


class InPlace(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.mark_dirty(x)
        return x.mul_(factor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5, None


class Several(Function):
    """A number, nothing, two tensors with and one without gradient; what is not used has no gradient at all."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        values, index = x.sort(dim=-1)
        ctx.mark_non_differentiable(index)
        return values, None, index, x.mean(), x.shape[-1]

    @staticmethod
    def backward(ctx, values, nothing, index, mean, number):
        assert nothing is index is number is None
        found = torch.full((), 3.0) if mean is None else mean * 7
        return found.expand(4, 6) if values is None else values * 2 + found


class Constants(Function):
    """Arguments of all kinds that a trace can hold."""

    @staticmethod
    def forward(ctx, x, size, dtype, device, options, function, tensors, where, missing):
        assert type(size) is torch.Size
        assert (size.numel(), missing, where) == (x.numel(), None, (slice(None), Ellipsis))
        ctx.options = options
        y = torch.zeros(size, dtype=dtype, device=device) + x[where] * options["scale"]
        return function(y) + tensors[0] + tensors[1]["more"]

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.options["scale"], *[None] * 8


class Nested(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return OldStyle.apply(OldStyle.apply(x, 2.0), 0.5)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(OldStyle.apply(x, 3.0), x, gradient)
        return found


class View(Function):
    @staticmethod
    def forward(ctx, x):
        return x.transpose(-1, -2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.transpose(-1, -2) * 2


class Same(Function):
    """Returns its input, with a gradient that is clipped: no linear function of what it gets."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1e-3, 1e-3)


class Noise(Function):
    @staticmethod
    def forward(ctx, x, p):
        ctx.mask = torch.rand_like(x) > p
        return x * ctx.mask

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.mask, None


class Mixed(Function):
    """Computes in the precision of autocast, forward and backward."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class RunningMean(Function):
    """Writes into a buffer that it is given."""

    @staticmethod
    def forward(ctx, x, mean):
        mean.mul_(0.5).add_(x.mean(dim=0), alpha=0.5)
        return x - mean

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class OwnApply(Function):
    """Adds an argument to what its callers give."""

    @classmethod
    def apply(cls, x):
        return super().apply(x, 3.0)

    @staticmethod
    def forward(ctx, x, factor):
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 4, None


class Outer:
    class Inner(OldStyle):
        """Found by a name with two parts, and a backward that is inherited."""


# -- models that call them ---------------------------------------------------------------------------------------------


class Calls(nn.Module):
    """`function(module, h)` between two layers; `h` is a float tensor of 4 x 6."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))
        self.register_buffer("mean", torch.randn(6))
        self.function = function

    def forward(self, x):
        h = self.function(self, self.first(x))
        return self.last(h.float())


class Checkpointed:
    """`function`, computed again for the backward pass."""

    def __init__(self, function, use_reentrant):
        self.function, self.use_reentrant = function, use_reentrant

    def __call__(self, module, h):
        return checkpoint(functools.partial(self.function, module), h, use_reentrant=self.use_reentrant)


def several(module, h, used=(0, 3)):
    out = Several.apply(h)
    assert (out[1], out[4]) == (None, 6)
    h = h + out[2]
    return h + sum(out[i] for i in used)


def constants(module, h):
    options, tensors = {"scale": 2.0, "names": ["a", 1]}, [h.detach(), {"more": module.bias.detach()}]
    where = (slice(None), Ellipsis)
    return Constants.apply(h, h.shape, h.dtype, h.device, options, F.relu, tensors, where, None)


def in_place_on_a_view(module, h):
    y = h + 1
    z = InPlace.apply(y.view(24), 3.0)
    return y + z.view(4, 6).tanh()


def without_gradients(module, h):
    with torch.no_grad():
        mean = OldStyle.apply(h, 0.5)
    return h + mean


def autocast(module, h):
    with torch.autocast("cpu", torch.bfloat16):
        return Mixed.apply(h, module.weight) + Mixed.apply(h, module.weight)


def twice(module, h):
    y = OldStyle.apply(h, 0.5)
    z = y * 2
    return z + Same.apply(y) + OldStyle.apply(y, 2.0)


RECORDED = {
    "old style": lambda module, h: OldStyle.apply(h, 0.5),
    "setup context": lambda module, h: SetupContext.apply(h, module.weight, module.bias) * 1,
    "default argument": lambda module, h: SetupContext.apply(h, module.weight, bias=module.bias),
    "parameter used twice": lambda module, h: (h @ module.weight) * SetupContext.apply(h, module.weight),
    "in place": lambda module, h: InPlace.apply(h + 1, 3.0) * 2,
    "in place, used before": lambda module, h: (lambda y: y.sum() + InPlace.apply(y, 3.0) + y)(h + 1),
    "in place on a view": in_place_on_a_view,
    "several outputs": several,
    "one output unused": functools.partial(several, used=(0,)),
    "other output unused": functools.partial(several, used=(3,)),
    "no output used": functools.partial(several, used=()),
    "constants": constants,
    "nested": lambda module, h: Nested.apply(h),
    "view": lambda module, h: View.apply(View.apply(h)) + View.apply(h).sum(),
    "same": lambda module, h: Same.apply(h) + h,
    "random": lambda module, h: F.dropout(Noise.apply(F.dropout(h, 0.3), 0.3), 0.3),
    "no gradients": without_gradients,
    "autocast": autocast,
    "buffer": lambda module, h: RunningMean.apply(RunningMean.apply(h, module.mean), module.mean),
    "own apply": lambda module, h: OwnApply.apply(h),
    "class in a class": lambda module, h: Outer.Inner.apply(h, 0.5),
    "used twice": twice,
    "of torch": lambda module, h: nn.CrossMapLRN2d(3)(h.view(1, 4, 6, 1)).view(4, 6),
}


def build(function):
    torch.manual_seed(0)
    return Calls(function), ((torch.randn(8, 6),), {})


@pytest.mark.matrix(24)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RECORDED)
def test_training_in_pieces_equals_one_process(name, seed):
    model, batch = build(RECORDED[name])
    microbatches = 1 if name == "random" else 2  # several draw in another order in a pipeline
    trace = record(model, *first_microbatch(batch, microbatches))
    assert all(node.kind is not NodeKind.CALL_MODULE for node in trace.nodes)
    assert any(node.target.endswith(targets.APPLY) for node in trace.nodes)
    assert Trace.from_json(trace.to_json()) == trace
    if seed == 0:
        verify(trace, model, *first_microbatch(batch, microbatches))
    check_pieces(model, batch, compile_assignment(trace, contiguous(trace, seed + 2, seed), microbatches=microbatches))


def check_pieces(model, batch, compilation, summed=()):
    """`summed`: parameters whose gradients are summed in another order than in plain PyTorch."""
    shared = (*(item.name for item in compilation.plan.shared_parameters), *summed)
    microbatches, state = compilation.plan.schedule.num_microbatches, torch.get_rng_state()
    expected = parity.run_eager(model, batch, microbatches)
    torch.set_rng_state(state)
    parity.assert_same(expected, parity.run_loopback(model, compilation, batch), shared)


@pytest.mark.parametrize("name", ["old style", "setup context", "view", "several outputs", "same", "random"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_in_a_checkpointed_region(name, use_reentrant):
    model, batch = build(Checkpointed(RECORDED[name], use_reentrant))
    trace = record(model, *first_microbatch(batch, 1))
    assert trace.regions
    assert any(node.target.endswith(targets.APPLY) for node in trace.nodes)
    for seed in range(2):
        check_pieces(model, batch, compile_assignment(trace, contiguous(trace, 2, seed)))


@pytest.mark.parametrize("name", ["old style", "parameter used twice", "several outputs", "in place"])
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_under_other_schedules(name, schedule, monkeypatch):
    monkeypatch.setattr(intercept, "WORTHWHILE", 0)  # else backwards of so little work are not split
    model, batch = build(RECORDED[name])
    compilation = compile_model(model, batch, pipeline_parallel_degree=2, microbatches=4, schedule=schedule)
    is_split = schedule == "zb-h1" and name == "parameter used twice"  # each use adds to the gradient by itself
    check_pieces(model, batch, compilation, ("weight",) if is_split else ())


def node_of(function):
    """The node of the only call, and its trace."""
    model, ((x,), _) = build(function)
    trace = record(model, (x[:4],))
    (node,) = [node for node in trace.nodes if node.target.endswith(targets.APPLY)]
    return node, trace


def test_what_a_node_says():
    node, trace = node_of(RECORDED["setup context"])
    assert (node.name, node.target) == ("SetupContext", f"{__name__}.SetupContext.apply")
    assert node.inputs == ("linear", "weight", "bias")
    assert str(node.spec) == "float32[4,6]"
    assert (node.flops, node.random, node.grad_enabled, node.mutates) == (2 * 4 * 6 * 6, False, True, ())
    assert node.source.startswith("test_tracer_patches_functions.py:")
    reads_and_writes = [24 + 24, 24 + 36 + 24, 24 + 6 + 24]  # x ** 2; x @ weight; + bias
    assert node.bytes_moved == 4 * sum(reads_and_writes)
    assert [trace.storages[storage] for storage in node.saved] == [4 * 24]  # x; parameters do not count


class KeepsParts(Function):
    """Keeps what it computes on the way: by `save_for_backward` and, which torch allows too, as an attribute."""

    @staticmethod
    def forward(ctx, x):
        sine, cosine, unused = x.sin(), x.cos(), x.tan()
        ctx.save_for_backward(sine)
        ctx.parts = [cosine, {"shape": x.shape}]
        return sine * cosine + unused

    @staticmethod
    def backward(ctx, gradient):
        (sine,) = ctx.saved_tensors
        return gradient * (ctx.parts[0] - sine)


def test_what_is_kept_for_the_backward_counts():
    node, trace = node_of(lambda module, h: KeepsParts.apply(h))
    assert [trace.storages[storage] for storage in node.saved] == [96, 96]
    assert not node_of(lambda module, h: KeepsParts.apply(h.detach()))[0].saved


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("random", {"random": True, "mutates": ()}),
        ("in place", {"random": False, "mutates": ("add",)}),
        ("view", {"bytes_moved": 0, "storage": "linear"}),
    ],
)
def test_effects(name, expected):
    model, ((x,), _) = build(RECORDED[name])
    trace = record(model, (x[:4],))
    node = next(node for node in trace.nodes if node.target.endswith(targets.APPLY))
    if "storage" in expected:
        expected = {**expected, "storage": trace.node(expected["storage"]).storage}
    assert {key: getattr(node, key) for key in expected} == expected


def test_a_call_without_effect_that_nobody_reads_is_dead():
    def function(module, h):
        OldStyle.apply(h, 0.5)
        Noise.apply(h, 0.5)
        InPlace.apply(h, 2.0)
        return h

    model, ((x,), _) = build(function)
    trace = record(model, (x,))
    assert [(node.name, node.name in trace.live) for node in trace.nodes if node.target.endswith(targets.APPLY)] == [
        ("OldStyle", False), ("Noise", True), ("InPlace", True),
    ]  # fmt: skip


def test_a_question_about_its_values_becomes_a_guard():
    def function(module, h):
        positive = OldStyle.apply(module.mean, 1.0) > 0
        return h * int(positive.sum())

    model, batch = build(function)
    trace = record(model, *first_microbatch(batch, 2))
    (guard,) = trace.guards
    assert guard.expected == int((model.mean.sin() > 0).sum())
    assert not any(node.kind is NodeKind.CALL_MODULE for node in trace.nodes)
    check_pieces(model, batch, compile_assignment(trace, contiguous(trace, 2, 0), microbatches=2))


def test_as_an_fx_graph():
    model, ((x,), _) = build(RECORDED["several outputs"])
    trace = record(model, (x[:4],))
    (found,) = torch.fx.Interpreter(model, graph=to_fx(trace)).run(x[:4])
    assert torch.equal(found, model(x[:4]))
    (gradient,) = torch.autograd.grad(found.sum(), [model.first.weight])
    assert torch.equal(gradient, *torch.autograd.grad(model(x[:4]).sum(), [model.first.weight]))


def test_tensor_parallel_ranks_call_it_on_whole_values():
    """`Same` clips what it gets: a share of a gradient, clipped, is no share of the clipped gradient."""
    _, trace = node_of(RECORDED["same"])
    found = strategies(Facts(trace, 2), trace.node("Same"))
    assert found == (Strategy((REPLICATED,), REPLICATED),)
    assert len(strategies(Facts(trace, 2), trace.node("add"))) > 2


def test_a_class_that_is_defined_again_is_the_one_that_is_called():
    """As when a cell of a notebook is run again."""
    for power in (2, 3):
        again = type("Again", (Function,), {
            "__module__": __name__, "forward": staticmethod(lambda ctx, x, p=power: x**p),
            "backward": staticmethod(lambda ctx, gradient: gradient),
        })  # fmt: skip
        globals()["Again"] = again
        model, ((x,), _) = build(lambda module, h: globals()["Again"].apply(h))
        trace = record(model, (x,))
        assert any(node.target == f"{__name__}.Again.apply" for node in trace.nodes)
        verify(trace, model, (x,))
    del globals()["Again"]
    with pytest.raises(KeyError, match=r"Again\.apply, which a traced model calls, is not defined here"):
        targets.function.__wrapped__(f"{__name__}.Again.apply")


# -- functions that are not --------------------------------------------------------------------------------------------


class Item(Function):
    @staticmethod
    def forward(ctx, x):
        return x * float(x.sum() > 0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class ThroughNumpy(Item):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(np.sin(x.numpy()))


class RunsModule(Item):
    @staticmethod
    def forward(ctx, x, module):
        return x + module(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Batched(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


class Attribute(Function):
    scale = 1.0

    @staticmethod
    def forward(ctx, x):
        return x * Attribute.scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Captures(Item):
    captured: Any = None

    @staticmethod
    def forward(ctx, x):
        return x + Box.value


class Box:
    """Where models leave what their functions find."""

    value: Any = None


class Pair(NamedTuple):
    a: torch.Tensor
    b: float


class TakesPair(Item):
    @staticmethod
    def forward(ctx, pair):
        return pair.a * pair.b


def captures(what):
    def function(module, h):
        Box.value = what(module, h)
        try:
            return Captures.apply(h)
        finally:
            Box.value = None

    return function


def sets_attribute(module, h):
    Attribute.scale = 3.0
    return Attribute.apply(h)


def local(module, h):
    class Local(OldStyle):
        """No name leads here."""

    return Local.apply(h, 0.5)


def changes_itself(module, h):
    return Counts.apply(h)


class Counts(Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        Counts.calls += 1
        return x * Counts.calls

    @staticmethod
    def backward(ctx, gradient):
        return gradient


REFUSED = {
    "values": (lambda m, h: Item.apply(h), "custom autograd function Item does not run without values (DataDep"),
    "numpy": (lambda m, h: ThroughNumpy.apply(h), "ThroughNumpy does not run without values (RuntimeError"),
    "module": (lambda m, h: RunsModule.apply(h, m.last), "RunsModule.apply is a torch.nn.modules.linear.Linear, which"),
    "vmap": (lambda m, h: torch.vmap(Batched.apply)(h), "Batched is called under a transform, such as torch.vmap"),
    "local class": (local, "must be defined at the top of a module, where its name leads to it"),
    "parameter": (captures(lambda m, h: m.bias), "Captures uses bias, which is not among its arguments"),
    "buffer": (captures(lambda m, h: m.mean), "Captures uses mean, which is not among its arguments"),
    "recorded tensor": (captures(lambda m, h: h.sum()), "Captures uses sum, which is not among its arguments"),
    "named tuple": (lambda m, h: TakesPair.apply(Pair(h, 2.0)) + h, "TakesPair has a Pair as argument"),
    "class attribute": (sets_attribute, "Attribute has class attributes that are set while the model runs (scale)"),
    "own attribute": (changes_itself, "Counts has class attributes that are set while the model runs (calls)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_called_again_is_refused_with_a_reason(name):
    function, reason = REFUSED[name]
    model, ((x,), _) = build(function)
    with pytest.raises(TraceError) as caught:
        record(model, (x,))
    assert reason in str(caught.value)
    assert "cannot trace the model itself, test_tracer_patches_functions.py:" in str(caught.value)
    assert "smpc.mark_leaf" in str(caught.value)
    assert (Attribute.scale, Counts.calls) == (1.0, 0)  # as it was before


@pytest.mark.parametrize("name", ["values", "numpy", "module", "vmap", "local class"])
def test_a_module_around_it_is_called_whole(name):
    model, batch = build(REFUSED[name][0])
    model = nn.Sequential(nn.Linear(6, 6), model, nn.Linear(6, 6))
    compilation = compile_model(model, batch, pipeline_parallel_degree=2, microbatches=2)
    assert [node.target for node in compilation.trace.nodes if node.kind is NodeKind.CALL_MODULE] == ["1"]
    check_pieces(model, batch, compilation)


def test_functions_inside_torch_calls_are_part_of_them():
    trace = record(nn.Sequential(nn.Linear(6, 6), Halves()), (torch.randn(2, 6),))
    assert [node.target for node in trace.nodes][-1] == f"{__name__}.halved"
    assert not any(node.target.endswith(targets.APPLY) for node in trace.nodes)


def halved(x):
    """A function that modes see as one call, as torch's own Python functions are."""
    if torch.overrides.has_torch_function_unary(x):
        return torch.overrides.handle_torch_function(halved, (x,), x)
    return Same.apply(x) * 0.5


class Halves(nn.Module):
    def forward(self, x):
        return halved(x)
