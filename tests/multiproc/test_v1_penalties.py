"""A loss that uses the model's parameters by itself: refused where ranks share them, else one process's gradients."""

import mixtures
import pytest
import torch
from executor_harness import run_workers
from torch import nn

import smpc.v1 as smp
from smpc.errors import PeerError, StepError

TENSOR = {"tensor_parallel_degree": 2, "tensor_parallel_plan": "auto", "prescaled_batch": True}


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(10, 64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, ids):
        x = self.embed(ids)
        return x + self.down(torch.tanh(self.up(x)))


class Layers(Tokens):
    """A transformer that ranks divide between layers that they have whole."""

    def __init__(self):
        super().__init__()
        self.layers = smp.nn.DistributedTransformer(
            num_layers=1, num_attention_heads=4, attention_head_size=16, hidden_size=64, intermediate_size=128,
            attention_dropout_prob=0.0, hidden_dropout_prob=0.0, causal_mask_size=8,
        )  # fmt: skip

    def forward(self, ids):
        return self.layers((super().forward(ids), None))[0]


def make(cls=Tokens):
    torch.manual_seed(0)
    return cls()


def loss_of(model, output):
    return output.square().mean() + 0.01 * sum(parameter.square().sum() for parameter in model.parameters())


@smp.step
def step(model, ids):
    loss = loss_of(model, model(ids))
    model.backward(loss)


def train(rank, folder, config):
    """The model's gradients, or the error."""
    smp.init({"microbatches": 2, "ddp": True, **config})
    model = smp.DistributedModel(make())
    try:
        step(model, torch.arange(32).view(4, 8) % 10)
    except StepError as error:
        return str(error)
    gradients = {name: p.grad for name, p in model.local_named_parameters()}
    smp.shutdown()
    return gradients


@pytest.mark.parametrize("config", [TENSOR, {"context_parallel_degree": 2}])
def test_a_penalty_on_parameters_that_ranks_share_is_refused(tmp_path, config):
    found = run_workers(train, 2, tmp_path, config)
    assert all(
        isinstance(error, str) and "uses the model's parameters by itself (a penalty on weights)" in error
        for error in found
    )


def test_a_penalty_in_replicas_is_that_of_one_process(tmp_path):
    plain = make()
    for ids in (torch.arange(32).view(4, 8) % 10).chunk(2):
        (loss_of(plain, plain(ids)) / 2).backward()
    for gradients in run_workers(train, 2, tmp_path, {}):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


@smp.step
def step_with_some(model, ids, name):
    loss = model(ids).square().mean()
    some = [parameter for key, parameter in model.named_parameters() if key.endswith(name)]
    loss = loss + sum(parameter.square().sum() for parameter in some)
    model.backward(loss)


def differentiate_with_some(model, ids, name):
    """The same, outside of steps."""
    loss = model(ids).square().mean()
    model.backward(loss + dict(model.named_parameters())[name].square().sum())


def with_modules(rank, folder, in_step):
    """Parameters that all ranks have may be used, slices not."""
    smp.init({"tensor_parallel_degree": 2, "microbatches": 2, "ddp": True, "prescaled_batch": not in_step})
    model = smp.DistributedModel(make(Layers))
    ids = torch.arange(32).view(4, 8) % 10
    sliced = next(name for name, p in model.named_parameters() if model.is_distributed_parameter(p))
    step_with_some(model, ids, "down.weight")
    with pytest.raises(StepError, match="expected tensors and their gradients alone, found retain_graph=True"):
        model.backward(None, retain_graph=True)
    told = (StepError, PeerError)  # its own, or that of the rank that was first, with its text
    with pytest.raises(told, match=r"\(a penalty on weights\), where this rank has a slice of one"):
        (step_with_some if in_step else differentiate_with_some)(model, ids, sliced)


@pytest.mark.parametrize("in_step", [False, True])
def test_a_penalty_on_parameters_of_distributed_modules_is_refused(tmp_path, in_step):
    assert run_workers(with_modules, 2, tmp_path, in_step) == [None] * 2


@smp.step
def step_with_experts(model, batch, name):
    loss = model(**batch).loss
    loss = loss + sum(p.square().mean() for key, p in model.named_parameters() if name in key)
    model.backward(loss)


def with_experts(rank, folder, name):
    smp.init({"expert_parallel_degree": 2, "microbatches": mixtures.MB, "ddp": True})
    model = smp.DistributedModel(mixtures.made(name))
    step_with_experts(model, mixtures.batch_of(0, rank), "head")
    with pytest.raises(
        (StepError, PeerError), match=r"\(a penalty on weights\), where this rank has those of some experts"
    ):
        step_with_experts(model, mixtures.batch_of(0, rank), "expert")


@pytest.mark.parametrize("name", ["by hand", "listed"])
def test_a_penalty_on_experts_that_ranks_divide_is_refused(tmp_path, name):
    """It was that of this rank's experts, without a word."""
    assert run_workers(with_experts, 2, tmp_path, name) == [None] * 2
