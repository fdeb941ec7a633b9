"""smp.checkpoint and its relatives: signatures, bad input, without a pipeline; with one: tests/multiproc/test_checkpointing_gloo.py."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import smpc.v1 as smp
from smpc.errors import ConfigError, ConfigTypeError, UsageError


class Layer(nn.Module):
    """Dropout and BatchNorm; counts its runs."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.runs = nn.Linear(4, 4), nn.BatchNorm1d(4), 0

    def forward(self, x, *, scale=1.0):
        self.runs += 1
        return nn.functional.dropout(self.norm(self.linear(x)), 0.3, self.training) * scale


class Pair(Layer):
    """A layer of tuples."""

    def forward(self, values):
        left, right = values
        return super().forward(left), left + right


class Model(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.layers, self.run = nn.Sequential(Layer(), Layer(), Layer()), run

    def forward(self, x):
        return self.run(self, x)


@pytest.fixture
def session():
    smp.init({"pipeline_parallel_degree": 1, "microbatches": 2})
    yield
    smp.shutdown()


def parameters(function):
    return [(p.name, p.default, p.kind.name) for p in inspect.signature(function).parameters.values()]


def test_signatures_of_the_reference():
    empty, plain = inspect.Parameter.empty, "POSITIONAL_OR_KEYWORD"
    assert parameters(smp.checkpoint) == [
        ("module", empty, plain),
        ("args", empty, "VAR_POSITIONAL"),
        ("preserve_rng_state", True, "KEYWORD_ONLY"),
    ]
    assert parameters(smp.checkpoint_sequential) == [
        ("sequential_module", empty, plain),
        ("input", empty, plain),
        ("strategy", "each", plain),
        ("preserve_rng_state", True, plain),
        ("pack_args_as_tuple", False, plain),
    ]
    assert parameters(smp.set_activation_checkpointing) == [
        ("module", empty, plain),
        ("preserve_rng_state", True, plain),
        ("pack_args_as_tuple", False, plain),
        ("strategy", "each", plain),
    ]
    assert smp.patches.checkpoint.checkpoint is smp.checkpoint
    assert smp.patches.checkpoint.checkpoint_sequential is smp.checkpoint_sequential


WAYS = {
    "checkpoint": (lambda model, x: smp.checkpoint(model.layers[1], model.layers[0](x)), [1, 2, 0]),
    "each": (lambda model, x: smp.checkpoint_sequential(model.layers, x), [2, 2, 2]),
    "group_2": (lambda model, x: smp.checkpoint_sequential(model.layers, x, strategy="group_2"), [2, 2, 2]),
    "contiguous": (lambda model, x: smp.checkpoint_sequential(model.layers, x, strategy="contiguous"), [2, 2, 2]),
}


def train(model, x):
    torch.manual_seed(1)
    model(x).pow(2).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | dict(model.named_buffers()) | {"next": torch.rand(2)}


@pytest.mark.parametrize("way", WAYS)
def test_in_plain_pytorch(way):
    run, runs = WAYS[way]
    torch.manual_seed(0)
    model, x = Model(run), torch.randn(6, 4)
    plain = copy.deepcopy(model)
    used = len([count for count in runs if count])
    plain.run = lambda model, x: model.layers[:used](x)
    expected, found = train(plain, x), train(model, x)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert [layer.runs for layer in model.layers] == runs
    model.eval()
    with torch.no_grad():
        model(x)
    assert [layer.runs for layer in model.layers] == [count + (count > 0) for count in runs]


def test_tuples():
    model = nn.Sequential(Pair(), Pair())
    pair = (torch.randn(5, 4, requires_grad=True), torch.randn(5, 4))
    torch.manual_seed(2)
    expected = model(pair)
    torch.manual_seed(2)
    found = smp.checkpoint_sequential(model, pair, strategy="contiguous", pack_args_as_tuple=True)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    gradients = [torch.autograd.grad(sum(pair_.sum() for pair_ in out), pair[0])[0] for out in (expected, found)]
    assert torch.equal(*gradients)
    with pytest.raises(UsageError, match="the layer Pair gets a tuple of 2 values; pass pack_args_as_tuple=True"):
        smp.checkpoint_sequential(model, pair)
    with pytest.raises(UsageError, match="expected a tensor or a tuple of tensors for the layer Pair, found list"):
        smp.checkpoint_sequential(model, list(pair), pack_args_as_tuple=True)


def test_bad_input():
    layer, layers, x = Layer(), nn.Sequential(Layer()), torch.zeros(2, 4)
    with pytest.raises(
        ConfigTypeError, match=r"smp\.checkpoint: expected a torch\.nn\.Module, found relu; a function cannot"
    ):
        smp.checkpoint(torch.relu, x)
    with pytest.raises(ConfigTypeError, match=r"expected a torch\.nn\.Sequential, found Layer; use smp\.checkpoint"):
        smp.checkpoint_sequential(layer, x)
    with pytest.raises(
        ConfigTypeError, match=r"smp\.set_activation_checkpointing: expected a torch\.nn\.Module, found str"
    ):
        smp.set_activation_checkpointing("layers.0")
    for function in (
        lambda s: smp.checkpoint_sequential(layers, x, strategy=s),
        lambda s: smp.set_activation_checkpointing(layers, strategy=s),
    ):
        with pytest.raises(ConfigError, match=r"strategy: expected 'each', 'contiguous' or 'group_N' .* found 'group'"):
            function("group")
    alone = r"is for torch\.nn\.Sequential and torch\.nn\.ModuleList alone, found Layer"
    with pytest.raises(ConfigError, match=f"strategy='group_2' {alone}"):
        smp.set_activation_checkpointing(layer, strategy="group_2")
    with pytest.raises(ConfigError, match=f"pack_args_as_tuple=True {alone}"):
        smp.set_activation_checkpointing(layer, pack_args_as_tuple=True)


@smp.step
def step(model, x):
    loss = model(x).pow(2).sum()
    model.backward(loss)
    return loss


@pytest.mark.parametrize("whole", [False, True])
def test_marked_modules_without_a_pipeline(session, whole):
    torch.manual_seed(0)
    model, x = Model(lambda model, x: model.layers(x)), torch.randn(8, 4)
    plain = copy.deepcopy(model)
    smp.set_activation_checkpointing(
        model.layers if whole else model.layers[1], **({"strategy": "group_2"} if whole else {})
    )
    assert [layer.runs for layer in pickle.loads(pickle.dumps(model.layers))] == [0] * 3
    distributed = smp.DistributedModel(model)
    torch.manual_seed(1)
    step(distributed, x)
    assert [layer.runs for layer in model.layers] == ([4, 4, 4] if whole else [2, 4, 2])
    torch.manual_seed(1)
    for part in x.chunk(2):
        (plain(part).pow(2).sum() / 2).backward()
    for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad), name
    for (name, buffer), found in zip(plain.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(found, buffer), name
    assert list(distributed.state_dict()) == list(plain.state_dict())


class Listed(nn.Module):
    """As Hugging Face's models: a list of layers that the model's own code calls."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("strategy", ["each", "contiguous", "group_2"])
@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
def test_a_list_means_its_members_also_after_distributed_model(session, strategy, is_late):
    torch.manual_seed(0)
    model, x = Listed(), torch.randn(8, 4)
    plain = copy.deepcopy(model)
    mark = {"pack_args_as_tuple": True, "strategy": strategy}
    if not is_late:
        smp.set_activation_checkpointing(model.layers, **mark)
    distributed = smp.DistributedModel(model)
    if is_late:
        smp.set_activation_checkpointing(distributed.get_module().layers, **mark)
    torch.manual_seed(1)
    step(distributed, x)
    assert [layer.runs for layer in model.layers] == [4, 4, 4]
    torch.manual_seed(1)
    for part in x.chunk(2):
        (plain(part).pow(2).sum() / 2).backward()
    for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad), name
    step(distributed, x)
    smp.set_activation_checkpointing(model.layers)  # without a pipeline at any time, and again
    step(distributed, x)
    assert [layer.runs for layer in model.layers] == [12, 12, 12]


def test_what_is_no_part_of_the_model_is_refused(session):
    model = smp.DistributedModel(Listed())
    with pytest.raises(
        UsageError, match=r"the Layer is no part of the DistributedModel; pass a part of model.get_module"
    ):
        smp.set_activation_checkpointing(Layer())
    smp.set_activation_checkpointing(model.get_module().layers[0])


def test_offloading_needs_a_pipeline():
    smp.init({"pipeline_parallel_degree": 1, "offload_activations": True})
    try:
        with pytest.warns(UserWarning, match="offload_activations has no effect: there is no pipeline"):
            smp.DistributedModel(nn.Linear(2, 2))
    finally:
        smp.shutdown()
