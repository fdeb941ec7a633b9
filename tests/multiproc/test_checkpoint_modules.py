"""Modules with DTensors (FSDP2, tensor parallelism) in our format and in torch's, saved on one mesh and loaded on another."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_harness import run_ranks, values_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from smpc.checkpoint import (
    Alone,
    Checkpoint,
    Root,
    load_modules,
    module_content,
    open_source,
    save,
    shard_of,
    write_checkpoint,
    write_distributed,
)
from smpc.errors import CheckpointError


class Net(nn.Module):
    """Sizes that ranks do not divide, a tied parameter, buffers of both kinds, extra state."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(5, 6), nn.Linear(6, 10), nn.Linear(10, 6, bias=False)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.calls = 0

    def forward(self, ids):
        hidden = self.embed(ids) * self.scale.prod()
        return self.head(hidden + self.down(torch.tanh(self.up(hidden))))

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def build(layout, seed):
    torch.manual_seed(seed)
    model, ranks = Net(), dist.get_world_size() if dist.is_initialized() else 1
    if layout == "2d":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    elif layout == "hybrid":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    elif layout == "fsdp":
        fully_shard(model.up, mesh=init_device_mesh("cpu", (ranks,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    elif layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed, betas=(0.8, 0.9))
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.arange(8).view(2, 4) % 5).square().mean().backward()
    optimizer.step()


def whole(model, optimizer):
    """The numbers of every tensor, gathered, by the names of the plain module."""
    module = inner(model)
    found = {name: full(tensor) for name, tensor in [*module.named_parameters(), ("scale", module.scale)]}
    for name, parameter in module.named_parameters():
        found |= {f"{name}::{key}": full(value) for key, value in optimizer.state[parameter].items()}
    return found | {"calls": module.calls, "lr": optimizer.param_groups[0]["lr"]}


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).tolist()


def save_both(rank, channel, folder, layout):
    """Train, and save in our format and in torch's; what was saved."""
    model, optimizer = build(layout, 1)
    step(model, optimizer)
    inner(model).calls = 3
    save(Root(f"{folder}/ours"), layout, module_content(model, optimizer, metadata={"step": 1}), channel)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=f"{folder}/torch_{layout}")
    return whole(model, optimizer)


def inner(model):
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def load_all(rank, channel, folder, layout, sources):
    """Our checkpoints, then torch's through our format, and ours through torch's loader."""
    model, optimizer = build(layout, 2)
    found = []
    for source in sources:
        load_modules(f"{folder}/{source}", model, optimizer, channel)
        found.append(whole(model, optimizer))
        step(model, optimizer)  # goes on
        inner(model).calls = 9
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=f"{folder}/for_torch")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    found.append(whole(model, optimizer))
    other = torch.optim.AdamW([{"params": [parameter]} for parameter in model.parameters()])
    with pytest.raises(CheckpointError, match="construct the optimizer as it was saved"):
        load_modules(f"{folder}/{sources[0]}", model, other, channel)
    return found


def convert(folder, layout):
    """torch's checkpoint in our format, and ours in torch's."""
    with open_source(folder / f"torch_{layout}") as source:
        write_checkpoint(source, folder / "ours" / f"of_torch_{layout}")
    with open_source(folder / "ours" / layout) as source:
        write_distributed(source, folder / "for_torch")


def check_meshes(tmp_path, saver, loaders):
    layout, ranks = saver
    saved = values_of(run_ranks(ranks, save_both, tmp_path, str(tmp_path), layout))
    assert all(found == saved[0] for found in saved)
    convert(tmp_path, layout)
    sources = [f"ours/{layout}", f"ours/of_torch_{layout}"]
    for other, count in loaders:
        for results in values_of(run_ranks(count, load_all, tmp_path, str(tmp_path), other, sources)):
            assert results == [saved[0]] * 3, (layout, other)
    model, optimizer = build("plain", 2)  # one process, and no group
    load_modules(str(tmp_path / sources[0]), model, optimizer, Alone())
    assert whole(model, optimizer) == saved[0]
    with Checkpoint.open(tmp_path / sources[0]) as checkpoint:
        assert checkpoint.metadata["step"] == 1
        names = {name for kind, name in checkpoint.entries if kind == "model"}
        assert names == {"embed.weight", "up.weight", "up.bias", "down.weight", "scale"}
        pieces = checkpoint.entries["model", "up.weight"].pieces
        assert len(pieces) == {"fsdp": ranks, "2d": 4, "hybrid": 2, "ddp": 1}[layout]  # by shards, replicas once


def test_what_two_meshes_save_two_ranks_load(tmp_path):
    check_meshes(tmp_path, ("2d", 4), [("fsdp", 2)])


@pytest.mark.slow
@pytest.mark.parametrize("saver", [("fsdp", 3), ("2d", 4), ("hybrid", 4), ("ddp", 2)], ids=lambda s: s[0])
def test_what_any_mesh_saves_every_other_loads(tmp_path, saver):
    check_meshes(tmp_path, saver, [("fsdp", 2), ("fsdp", 3), ("2d", 4), ("hybrid", 4), ("ddp", 2)])


def halves(rank, channel, folder):
    """A bf16 module in parts whose masters are, too; what whole masters and moments are, and whether they come back."""
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = Net().bfloat16()
        fully_shard(model, mesh=init_device_mesh("cpu", (channel.size,)))
        masters = {p: nn.Parameter(p.detach().float()) for p in model.parameters()}
        optimizer = torch.optim.AdamW(masters.values(), lr=0.1)
        for master in masters.values():
            master.grad = torch.full_like(master, 1 / 3)
        optimizer.step()
        if seed == 1:
            with torch.no_grad():
                for parameter, master in masters.items():
                    parameter.copy_(master)
            save(Root(folder), "halves", module_content(model, optimizer, masters=masters), channel)
        else:
            load_modules(f"{folder}/halves", model, optimizer, channel, masters=masters)
        found.append([full(tensor) for tensor in (*model.parameters(), *masters.values())])
    assert found[0] == found[1]
    return found[0]


def test_masters_in_parts_are_saved_and_loaded_in_parts(tmp_path):
    saved = values_of(run_ranks(2, halves, tmp_path, str(tmp_path)))
    assert saved[0] == saved[1]
    with Checkpoint.open(tmp_path / "halves") as checkpoint:
        assert len(checkpoint.entries["optimizer", "up.weight::master"].pieces) == 2
    torch.manual_seed(3)
    model = Net()  # one process, in fp32
    load_modules(str(tmp_path / "halves"), model, torch.optim.AdamW(model.parameters()), Alone(), cast=True)
    assert [full(parameter) for parameter in model.parameters()] == saved[0][4:]


def refusals(rank, channel, folder):
    mesh = init_device_mesh("cpu", (channel.size,))
    summed = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(CheckpointError, match="still to be summed"):
        shard_of("model", "w", summed)
    uneven = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False, shape=(3,), stride=(1,))
    with pytest.raises(CheckpointError, match=r"expected a local part of shape \[3\], found \[2\]"):
        shard_of("model", "w", uneven)
    return True


def test_dtensors_without_values_are_refused(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert values_of(run_ranks(2, refusals, tmp_path, str(tmp_path))) == [True, True]
