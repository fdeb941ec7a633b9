"""Modules that forward converts: those that are so already are recorded, a conversion is refused, and a later one is noticed."""

import pytest
import torch
from expert_models import hugging_face, tokens
from torch import nn

from smpc.errors import TraceError
from smpc.tracer import record
from smpc.tracer.attempt import RecordingRequest
from smpc.tracer.ir import NodeKind
from smpc.tracer.record import record_guarded
from smpc.tracer.replay import verify


class Converting(nn.Module):
    """Switch Transformers' routers are converted so in every call."""

    def __init__(self, convert, inner=None):
        super().__init__()
        self.convert = convert
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) if inner is None else inner

    def forward(self, x):
        self.inner = self.convert(self.inner)
        return self.inner(x)


class Around(nn.Module):
    """Something before it, so that the module inside may be called whole; `keep` converts from outside."""

    def __init__(self, inner, keep=False):
        super().__init__()
        self.first, self.inner, self.keep = nn.Linear(4, 4), inner, keep

    def forward(self, x):
        if self.keep:
            self.inner.inner = self.inner.inner.float()
        return self.inner(self.first(x))


class Branching(nn.Module):
    """It is called whole, as its Python depends on values; it comes to the conversion in a real run alone."""

    def __init__(self, dtype):
        super().__init__()
        self.inner, self.dtype = nn.Linear(4, 4), dtype

    def forward(self, x):
        x = x * 2 if self.inner.weight.sum() > 0 else x
        self.inner.to(self.dtype)
        return self.inner(x.to(self.dtype)).to(torch.float32)


def to_float(module):
    return module.to(torch.float32)


SAME = {
    "to": to_float,
    "float": nn.Module.float,
    "cpu": nn.Module.cpu,
    "device and type": lambda module: module.to("cpu", torch.float32),
    "as a tensor": lambda module: module.to(torch.ones(1)),
    "type": lambda module: (module[0].type(torch.float32), module)[1],
}
OTHER = {
    "half": (nn.Module.half, "inner.inner.0.weight from torch.float32 on cpu to torch.float16 on cpu"),
    "double": (nn.Module.double, "from torch.float32 on cpu to torch.float64 on cpu"),
    "device": (lambda module: module.to("meta"), "from torch.float32 on cpu to torch.float32 on meta"),
    "memory": (lambda module: module.to_empty(device="cpu"), "in other memory, or with other values"),
    "values": (lambda module: module._apply(torch.Tensor.zero_), "in other memory, or with other values"),
}
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("how", SAME)
def test_a_conversion_to_what_a_module_is_already_changes_nothing(how):
    """It looked at gradients, an error of the model."""
    model = Around(Converting(SAME[how]))
    trace = record(model, (X,))
    verify(trace, model, (X,))
    assert all(call.whole for call in trace.calls)  # stages may call them
    assert not [node for node in trace.nodes if "to" in node.target.split(".")[-1:]]


def test_submodules_that_are_put_where_they_are():
    model = Around(Converting(nn.Module.float), keep=True)
    trace = record(model, (X,))
    verify(trace, model, (X,))
    assert all(call.whole for call in trace.calls)


def test_a_buffer_of_another_type_is_refused():
    """It would have another type in the second step, on one rank of a pipeline alone."""
    model = Around(Converting(nn.Module.float, nn.BatchNorm1d(4)))
    model.inner.inner.running_mean = model.inner.inner.running_mean.double()
    with pytest.raises(
        TraceError, match=r"converts inner.inner.running_mean from torch.float64 on cpu to torch.float32"
    ):
        record(model, (X,))


def test_a_buffer_that_forward_has_computed_is_converted_as_torch_does():
    class Computing(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x):
            self.scale = x.double().mean(0)
            self.float()
            return x * self.scale

    model, plain = Around(Computing()), Around(Computing())
    plain.load_state_dict(model.state_dict())
    verify(record(model, (X,)), model, (X,))
    torch.testing.assert_close(model(X), plain(X), rtol=0, atol=0)
    assert model.inner.scale.dtype is torch.float32


@pytest.mark.parametrize("how", OTHER)
def test_other_conversions_are_refused(how):
    convert, said = OTHER[how]
    with pytest.raises(TraceError, match=f"forward converts .*{said}.*; what to do: convert it once"):
        record(Around(Converting(convert)), (X,))


@pytest.mark.long
def test_a_module_that_is_called_whole():
    model = Around(Branching(torch.float32))
    verify(record(model, (X,)), model, (X,))
    with pytest.raises(TraceError, match=r"it converts its tensors of torch.float32 to torch.float64; what to do"):
        record(Around(Branching(torch.float64)), (X,))


def test_a_later_call_that_would_convert_is_noticed():
    """A parameter has another type then, in the same object; one that no conversion has looked at counts for nothing."""
    model = Around(Converting(to_float))
    environment = record_guarded(model, RecordingRequest((X,), {})).environment
    assert environment.difference() is None
    model.first.weight.data = model.first.weight.data.double()
    assert environment.difference() is None
    weight = model.inner.inner[0].weight
    weight.data = weight.data.double()
    assert (
        str(environment.difference())
        == "parameter 'weight' of module 'inner.inner.0': torch.float64, which was torch.float32"
    )
    weight.data = weight.data.float()
    assert environment.difference() is None


@pytest.mark.long
def test_switch_transformers():
    model = hugging_face("SwitchTransformersForConditionalGeneration", torch.float32, router_jitter_noise=0.01)
    trace = record(model.eval(), (), tokens(0))
    verify(trace, model, (), tokens(0))
    whole = [node.target for node in trace.nodes if node.kind is NodeKind.CALL_MODULE]
    assert whole == ["encoder.block.1.layer.1.mlp", "decoder.block.1.layer.2.mlp"]
