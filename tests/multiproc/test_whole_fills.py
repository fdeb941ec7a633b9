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

IDS = (torch.arange(32) % 10).view(4, 8)
SEED = 5
EARLIER = torch.nn.init.xavier_normal_, torch.nn.init.kaiming_normal_  # a name from before any model was divided


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(10, 64, padding_idx=7), nn.LayerNorm(64)
        self.up, self.down, self.head = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 10)

    def forward(self, ids):
        x = self.norm(self.embed(ids))
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
    EARLIER[0](model.head.weight)
    return torch.rand(3)


def same(state, drawn):
    plain = make()
    torch.testing.assert_close(drawn, fill(plain), rtol=0, atol=0)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-7)


def sharded(rank, folder):
    model = make()
    found = smpc.tensor_parallel.shard(model, {"ids": IDS}, TensorGroup.of(dist.group.WORLD))
    assert found.layouts
    drawn = fill(model, SEED + rank)
    same(found.whole_state_dict(), drawn)
    name = next(name for name in found.layouts if name.endswith("weight"))
    with pytest.raises(UsageError, match=r"call torch\.nn\.init\.kaiming_uniform_ by its module's name"):
        EARLIER[1](model.get_parameter(name))
    same(found.whole_state_dict(), drawn)


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
    smp.shutdown()


TENSOR = {"tensor_parallel_degree": 2, "tensor_parallel_plan": "auto", "prescaled_batch": True}
PIPELINE = {"pipeline_parallel_degree": 2}


@pytest.mark.parametrize(("world", "config"), [(2, TENSOR), (2, PIPELINE), (4, TENSOR | PIPELINE)])
def test_scripts_fill_parameters_as_one_process(tmp_path, world, config):
    assert run_workers(script, world, tmp_path, config) == [None] * world
