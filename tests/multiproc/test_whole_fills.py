"""torch.nn.init between steps, where ranks have slices or nothing of a parameter: the values, and the next draw, of one process."""

import pytest
import torch
import torch.distributed as dist
from executor_harness import run_workers
from torch import nn

import smpc.tensor_parallel
import smpc.v1 as smp
from smpc.errors import UsageError
from smpc.executor.collectives import TensorGroup
from smpc.sharding.dtensors import whole

IDS = (torch.arange(32) % 10).view(4, 8)
SEED = 5
EARLIER = {  # names from before any model was divided
    name: getattr(torch.nn.init, name)
    for name in ("xavier_normal_", "kaiming_normal_", "orthogonal_", "sparse_", "eye_", "dirac_")
}


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(10, 64, padding_idx=7), nn.LayerNorm(64)
        self.up, self.down, self.head = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 10)
        self.conv = nn.Conv1d(64, 64, 1)

    def forward(self, ids):
        x = self.norm(self.embed(ids))
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x + self.down(torch.tanh(self.up(x)))).square().mean()


def make():
    torch.manual_seed(0)
    return Layers()


def fill(model, seed=SEED):
    """What is drawn next."""
    torch.manual_seed(seed)
    for layer in (model.embed, model.norm, model.up, model.down, model.head):
        layer.reset_parameters()
    nn.init.kaiming_normal_(model.up.weight, mode="fan_out")
    nn.init.trunc_normal_(model.up.bias, std=0.1)
    nn.init.orthogonal_(model.down.weight)
    nn.init.normal_(model.down.bias)
    EARLIER["xavier_normal_"](model.head.weight)
    return torch.rand(3)


def fill_otherwise(model, seed=SEED):
    """By names that were imported earlier, and through aliases of parameters."""
    fill(model, seed)
    return refill(model)


def refill(model, seed=None):
    """What is not a module's own."""
    if seed is not None:
        torch.manual_seed(seed)
    EARLIER["kaiming_normal_"](model.up.weight, mode="fan_out")
    EARLIER["orthogonal_"](model.down.weight)
    EARLIER["sparse_"](model.embed.weight, 0.5)
    EARLIER["eye_"](model.head.weight)
    EARLIER["dirac_"](model.conv.weight)
    nn.init.uniform_(model.up.bias.data, -1, 1)
    nn.init.normal_(model.norm.bias.detach(), 0.5)
    nn.init.trunc_normal_(model.norm.weight.data)
    return torch.rand(3)


def same(state, drawn, how=fill):
    plain = make()
    torch.testing.assert_close(drawn, how(plain), rtol=0, atol=0)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-7)


def sharded(rank, folder):
    model = make()
    found = smpc.tensor_parallel.shard(model, {"ids": IDS}, TensorGroup.of(dist.group.WORLD))
    assert found.layouts
    drawn = fill(model, SEED + rank)
    same(found.whole_state_dict(), drawn)
    name = next(name for name in found.layouts if name.endswith("weight"))
    before = found.whole_state_dict()
    with pytest.raises(UsageError, match=rf"{name}: expected random numbers for all of a parameter"):
        nn.init.normal_(model.get_parameter(name).data[:2])
    torch.testing.assert_close(found.whole_state_dict(), before, rtol=0, atol=0)
    drawn = fill_otherwise(model, SEED + rank)
    same(found.whole_state_dict(), drawn, fill_otherwise)


def test_slices_are_filled_as_whole_parameters(tmp_path):
    assert run_workers(sharded, 2, tmp_path) == [None] * 2


@smp.step
def step(model, ids):
    loss = model(ids)
    model.backward(loss)


def script(rank, folder, config):
    smp.init({"microbatches": 2, "ddp": True, **config})
    model = smp.DistributedModel(make())
    step(model, IDS)
    drawn = fill(model.get_module())
    state = model.state_dict()
    if smp.pp_rank() == smp.tp_rank() == 0:
        same(state, drawn)
    torch.testing.assert_close(drawn, fill(make()), rtol=0, atol=0)
    drawn = fill_otherwise(model.get_module())
    state = model.state_dict()
    if smp.pp_rank() == smp.tp_rank() == 0:
        same(state, drawn, fill_otherwise)
    torch.testing.assert_close(drawn, fill_otherwise(make()), rtol=0, atol=0)
    smp.shutdown()


TENSOR = {"tensor_parallel_degree": 2, "tensor_parallel_plan": "auto", "prescaled_batch": True}
PIPELINE = {"pipeline_parallel_degree": 2}


@pytest.mark.parametrize(("world", "config"), [(2, TENSOR), (2, PIPELINE), (4, TENSOR | PIPELINE)])
def test_scripts_fill_parameters_as_one_process(tmp_path, world, config):
    assert run_workers(script, world, tmp_path, config) == [None] * world


def declared(rank, folder):
    """The ranks draw as their first."""
    smp.init({"microbatches": 2, "ddp": True, "tensor_parallel_degree": 2})
    with smp.tensor_parallelism():
        model = make()
    model = smp.DistributedModel(model)
    step(model, IDS)
    before, state = refill(model.get_module(), SEED + rank), model.state_dict()
    plain = make()
    torch.testing.assert_close(before, refill(plain, SEED), rtol=0, atol=0)
    for name in ("up.weight", "up.bias", "down.weight", "down.bias", "embed.weight", "conv.weight", "norm.weight"):
        torch.testing.assert_close(state[name], plain.get_parameter(name).detach(), rtol=1e-6, atol=1e-7)
    smp.shutdown()


def test_slices_of_distributed_modules_are_filled_as_whole_parameters(tmp_path):
    """They were drawn as wide as slices, and alike on all ranks."""
    assert run_workers(declared, 2, tmp_path) == [None] * 2


def divided(rank, folder):
    smp.init({"microbatches": 2, "ddp": True, "fully_shard": True})
    model = smp.DistributedModel(make())
    step(model, IDS)
    drawn = fill_otherwise(model.get_module(), SEED + rank)
    found = {name: whole(value.detach()) for name, value in model.named_parameters()}
    same(found, drawn, fill_otherwise)
    smp.shutdown()


def test_parts_are_filled_as_whole_parameters(tmp_path):
    """They were drawn alike on all ranks; `eye_` gave each rank all of it."""
    assert run_workers(divided, 2, tmp_path) == [None] * 2
