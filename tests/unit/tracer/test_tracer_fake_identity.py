"""What forward sees of the fakes that stand for tensors."""

import pytest
import torch
from applied import Block, applying
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from smpc import compile_model
from smpc.errors import TraceError
from smpc.runtime import LoopbackRuntime
from smpc.tracer import record
from smpc.tracer.attempt import RecordingRequest
from smpc.tracer.ir import NodeKind
from smpc.tracer.record import record_guarded
from smpc.tracer.state.fakes import FakeState, installed


def whole_modules(model):
    nodes = record(model, (torch.ones(2, 4),)).nodes
    return [node.target for node in nodes if node.kind is NodeKind.CALL_MODULE]


def assert_equal_to_eager(model):
    x = torch.randn(4, 4)
    expected = model(x)
    found = {}
    runtime = LoopbackRuntime(model)
    program = runtime.install(compile_model(model, (x,), pipeline_parallel_degree=2, microbatches=1))
    runtime.run(program, [((x,), {})], lambda m, output: found.update({m: output.detach()}) or [], training=False)
    assert torch.equal(found[0], expected)


ASK_FOR_THE_CLASS = {
    "type is": lambda block, x: x * (2 if type(x) is torch.Tensor else 3),
    "type is, of what was computed": lambda block, x: x * (2 if type(block.linear(x)) is torch.Tensor else 3),
    "type in": lambda block, x: x * (2 if type(x) in (torch.Tensor, nn.Parameter) else 3),
    "type as a key": lambda block, x: x * {torch.Tensor: 2}.get(type(x), 3),
    "the name of the type": lambda block, x: x * len(type(x).__name__),
    "__class__": lambda block, x: x * (2 if x.__class__ is torch.Tensor else 3),
    "a parameter": lambda block, x: x * (2 if type(block.linear.weight) is nn.Parameter else 3),
    "a buffer": lambda block, x: x * (2 if type(block.buffer) is torch.Tensor else 3),
    "what else type does": lambda block, x: (
        x * (2 if isinstance(nn.Linear, type) and type("Made", (), {}).__name__ == "Made" else 3)
    ),
    "the type of a class": lambda block, x: x * (2 if type(nn.Linear) is type and issubclass(type, object) else 3),
}


@pytest.mark.parametrize("name", ASK_FOR_THE_CLASS)
def test_fakes_have_the_class_of_what_they_stand_for(name):
    model = applying(ASK_FOR_THE_CLASS[name])
    assert whole_modules(model) == []
    assert_equal_to_eager(model)


def test_two_functions_of_one_file_may_ask():
    """The second found the stand-in for `type` among its globals, and a guard put it back there."""

    def also(x):
        return 2 if type(x) is torch.Tensor else 3

    def both(block, x):
        return x * also(x) * (2 if type(x) is torch.Tensor else 3)

    model = applying(both)
    recording = record_guarded(model, RecordingRequest((torch.ones(2, 4),), {}))
    assert "type" not in globals()
    assert recording.environment.difference() is None
    assert_equal_to_eager(model)


def test_afterwards_fakes_have_their_own_class_and_code_has_its_own_type():
    record(applying(ASK_FOR_THE_CLASS["__class__"]), (torch.ones(2, 4),))
    record(applying(ASK_FOR_THE_CLASS["type is"]), (torch.ones(2, 4),))
    assert "type" not in globals()
    assert "__class__" not in vars(FakeTensor)
    with pytest.raises(TraceError):
        record(Block(lambda block, x: type(x).nothing), (torch.ones(2, 4),))
    assert "type" not in globals()
    assert "__class__" not in vars(FakeTensor)


@pytest.mark.parametrize(
    "function",
    [
        lambda block, x: x * (2 if x.data_ptr() == block.buffer.data_ptr() else 3),
        lambda block, x: x * (2 if x.untyped_storage().data_ptr() == block.buffer.untyped_storage().data_ptr() else 3),
    ],
)
def test_who_asks_where_a_tensor_is_in_memory_is_called_whole(function):
    model = applying(function)
    assert whole_modules(model) == ["1"]
    assert_equal_to_eager(model)
    with pytest.raises(TraceError, match="says where a tensor is in memory"):
        record(Block(function), (torch.ones(2, 4),))


def test_weak_references_to_parameters_in_lists_are_to_what_stands_for_them():
    """nn.LSTM asks them whether somebody has replaced its weights."""
    model = nn.Sequential(nn.LSTM(2, 2))
    state = FakeState(by_original={id(tensor): nn.Parameter(tensor.detach().clone()) for tensor in model.parameters()})
    with installed(model, state):
        assert all(ref() is own for ref, own in zip(model[0]._flat_weight_refs, model.parameters(), strict=True))
        assert not model[0]._weights_have_changed()
    assert all(ref() is own for ref, own in zip(model[0]._flat_weight_refs, model.parameters(), strict=True))
