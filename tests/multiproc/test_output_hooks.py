"""Hooks on a model's outputs, and gradients with respect to them: as in plain PyTorch, or refused where a script has copies."""

import pytest
import torch
import torch.distributed as dist
from executor_harness import run_workers
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import smpc.context_parallel
import smpc.tensor_parallel
import smpc.v1 as smp
import smpc.v2 as tsm
from smpc.errors import StepError
from smpc.executor.collectives import TensorGroup

IDS = (torch.arange(32) % 10).view(4, 8)
SHARDS = {"context": smpc.context_parallel.shard, "tensor": smpc.tensor_parallel.shard}


class Outputs(nn.Module):
    """Of `first` the ranks have slices with which they go on, or it is on another stage; nothing follows `last`."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(10, 64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.head = nn.Linear(64, 8)

    def forward(self, ids):
        first = self.embed(ids)
        hidden = torch.tanh(self.down(torch.tanh(self.up(first))))
        mean = hidden.mean(1)
        return {"first": first, "hidden": hidden, "mean": mean, "last": self.head(hidden) * mean.sum()}


def make():
    torch.manual_seed(0)
    return Outputs()


def loss_of(out, hooked):
    out[hooked].register_hook(lambda gradient: 3 * gradient / gradient.norm())
    return (
        out["last"].square().mean() + out["mean"].square().sum() + out["hidden"].mean() + out["first"].square().mean()
    )


def near(model, gradients):
    for name, gradient in gradients.items():
        if gradient.shape == model.get_parameter(name).shape:  # others are slices
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


def shared(rank, folder, axis):
    for hooked in ("mean", "last"):
        plain, model = make(), make()
        loss_of(plain(IDS), hooked).backward()
        sharded = SHARDS[axis](model, {"ids": IDS}, TensorGroup.of(dist.group.WORLD))
        loss_of(sharded(ids=IDS), hooked).backward()
        near(plain, {name: parameter.grad for name, parameter in model.named_parameters()})
    out = sharded(ids=IDS)
    for mark in (lambda: loss_of(out, "hidden"), lambda: out["hidden"].retain_grad()):
        with pytest.raises(StepError, match="expected register_hook and retain_grad on outputs that the model itself"):
            mark()
    gradients_of_outputs(make()(IDS), sharded(ids=IDS), sharded(ids=IDS))


def gradients_of_outputs(expected, found, own):
    """Of `hidden` the copy has a part of the gradient alone, and none of what comes from `last`."""
    for name in ("mean", "last"):
        pair = [
            torch.autograd.grad(sum(v.square().sum() for v in out.values()), out[name])[0] for out in (expected, found)
        ]
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-6)
    total, edge = own["last"].sum() + own["hidden"].mean(), get_gradient_edge(own["hidden"])
    for ask in (
        lambda: torch.autograd.grad(total, own["hidden"]),
        lambda: torch.autograd.grad(own["last"].sum(), [own["mean"], own["hidden"]], allow_unused=True),
        lambda: torch.autograd.grad(total, edge),
        lambda: total.backward(inputs=[own["hidden"]]),
    ):
        with pytest.raises(StepError, match=r"expected gradients .* with respect to outputs that the model itself"):
            ask()


@pytest.mark.parametrize("axis", SHARDS)
def test_hooks_on_outputs_of_ranks_that_share_a_model(tmp_path, axis):
    assert run_workers(shared, 2, tmp_path, axis) == [None] * 2


class Probed(Outputs):
    """Returns rows of its hidden states, which ranks that share sequences gather, and goes on with them."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()

    def forward(self, ids):
        rows = torch.tanh(self.embed(ids)).flatten(0, 1)
        return {"rows": rows, "last": self.head(rows).square().mean()}


WAYS = {
    "fully_shard": fully_shard,
    "FullyShardedDataParallel": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
}


def wrapped(rank, folder, way):
    """FSDP around a model that goes on with a slice of what it returns."""
    tsm.init({"context_parallel_degree": 2, "hybrid_shard_degree": 2})
    model = WAYS[way](tsm.transform(Probed().double()))
    chunks = IDS.chunk(4, 1)
    out = model(torch.cat([chunks[rank], chunks[3 - rank]], 1))
    out["last"].backward()
    with pytest.raises(StepError, match="expected register_hook and retain_grad on outputs that the model itself"):
        out["rows"].register_hook(lambda gradient: 2 * gradient)
    tsm.state.reset()
    return out["last"].item()


@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_fsdp_on_outputs_only_learn_of_a_backward(tmp_path, way):
    """FSDP's own hook was refused as a script's: no model with `output_router_logits` could be sharded by fully_shard."""
    expected = Probed().double()(IDS)["last"].item()
    assert run_workers(wrapped, 2, tmp_path, way) == [pytest.approx(expected, rel=1e-12)] * 2


@smp.step
def step(model, ids, hooked):
    loss = loss_of(model(ids), hooked)
    model.backward(loss)


def script(rank, folder, config):
    """By output: the gradients with a hook on it, or the error."""
    smp.init({"microbatches": 2, "ddp": True, **config})
    found = {}
    model = make()
    if config.get("auto_partition") is False:
        smp.set_partition(model.head, 1)
    model = smp.DistributedModel(model)
    for hooked in ("last", "first"):
        model.zero_grad()
        try:
            step(model, IDS, hooked)
            found[hooked] = {name: p.grad.clone() for name, p in model.local_named_parameters()}
        except StepError as error:
            found[hooked] = str(error)
    smp.shutdown()
    return found


PIPELINE = {"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0}


@pytest.mark.parametrize("config", [{"context_parallel_degree": 2}, PIPELINE, {}])
def test_hooks_on_outputs_in_scripts(tmp_path, config):
    for found in run_workers(script, 2, tmp_path, config):
        for hooked in ("last", "first"):
            if hooked == "first" and config:
                assert "expected register_hook and retain_grad on outputs that the model itself" in found[hooked]
                continue
            plain = make()
            for ids in IDS.chunk(2):
                (loss_of(plain(ids), hooked) / 2).backward()
            near(plain, found[hooked])
