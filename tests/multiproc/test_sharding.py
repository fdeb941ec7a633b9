"""`smpc.sharding` on real ranks: any units, any policy, with and without replicas, is training in one process."""

import pytest
import torch
import torch.distributed as dist
from executor_harness import run_workers
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from smpc.errors import ConfigUnsupportedError
from smpc.mesh import Axis, Mesh
from smpc.mesh.device_mesh import device_mesh, make_groups
from smpc.sharding import Keep, ShardingOptions, Unit, find_units, shard
from smpc.sharding.dtensors import local, own_part_of_sharded, whole
from smpc.sharding.wide_gradients import widen

MICROBATCHES, STEPS = 2, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x, kept):
        """Writes into what it is given, for the blocks that come after it."""
        kept["values"].append(x)
        kept["mean"] = sum(kept["values"]) / len(kept["values"])
        return x + self.down(torch.tanh(self.up(self.norm(kept["mean"]))))


class Model(nn.Module):
    """Rows that ranks do not divide, a tied embedding, a parameter that is frozen, one that is never used."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(7, 6), nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].up.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, ids):
        x = self.embed(ids)
        kept = {"values": [x]}
        for block in self.blocks:
            x = block(x, kept)
        return self.head(x + kept["mean"])


def make():
    torch.manual_seed(7)
    return Model()


def data(step, rank):
    return torch.randint(7, (2 * MICROBATCHES, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model, ids):
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def expected(world):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world):
            for ids in data(step, rank).chunk(MICROBATCHES):
                loss = loss_of(model, ids)
                (loss / MICROBATCHES / world).backward()
                losses.append(loss.detach())
        optimizer.step()
    return losses, model.state_dict(), {name: p.grad for name, p in model.named_parameters()}


def mesh_of(rank, world, shards):
    mesh = Mesh(world, sharded_data_parallel_degree=shards)
    groups = make_groups(mesh, rank, dist.group.WORLD)
    axes = (Axis.FSDP,) if shards == world else (Axis.REPLICA, Axis.FSDP)
    return device_mesh(mesh, rank, "cpu", axes, groups, [f"{axis}_{shards}" for axis in axes])


def train(rank, folder, shards, keep, kind, wide):
    """`kind`: with steps as they should be, with steps that nobody says are at their last backward, or without steps at all."""
    world = dist.get_world_size()
    model = make()
    if wide:
        widen(model.parameters())
    before = dict(model.named_parameters())
    sharded = shard(model, find_units(model), mesh_of(rank, world, shards), ShardingOptions(keep))
    assert all(sharded.exchanged[before[name]] is p and isinstance(p, DTensor) for name, p in model.named_parameters())
    assert sum(local(p).numel() for p in model.parameters()) < sum(p.numel() for p in make().parameters()) / shards + 60
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        if kind != "none":
            sharded.begin_step()
        for i, ids in enumerate(data(step, rank).chunk(MICROBATCHES)):
            if i == MICROBATCHES - 1 and kind == "steps":
                sharded.last_backward()
            loss = loss_of(model, ids)
            (loss / MICROBATCHES).backward()
            losses.append(loss.detach())
        if kind != "none":
            sharded.end_step()
        optimizer.step()
        with torch.no_grad():
            loss_of(model, ids)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "an evaluation leaves parts"
    state = {name: whole(p.detach()) for name, p in model.state_dict().items()}
    return losses, state, {name: None if p.grad is None else whole(p.grad) for name, p in model.named_parameters()}


def check(results, world):
    losses, state, grads = expected(world)
    for rank, (found, values, gradients) in enumerate(results):
        mine = [
            losses[step * world * MICROBATCHES + rank * MICROBATCHES + i]
            for step in range(STEPS)
            for i in range(MICROBATCHES)
        ]
        torch.testing.assert_close(found, mine, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(values, state, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradients, grads, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("keep", "kind", "wide"), [(Keep.NEVER, "steps", False), (Keep.STEP, "late", False)])
def test_training_is_that_of_one_process(tmp_path, keep, kind, wide):
    check(run_workers(train, 2, tmp_path, 2, keep, kind, wide), 2)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("kind", ["steps", "late", "none"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("keep", list(Keep))
def test_training_is_that_of_one_process_on_every_mesh(tmp_path, keep, wide, kind, shards):
    check(run_workers(train, 4, tmp_path, shards, keep, kind, wide), 4)


def parts(rank, folder):
    """Tensors of any placement; a unit with a divisor of its own; dtypes that a unit cannot have together."""
    mesh = mesh_of(rank, 4, 2)
    values = torch.arange(30.0).view(5, 6)
    for placements, expected_part in (
        ((Replicate(), Shard(0)), values[:3] if rank % 2 == 0 else values[3:]),
        (
            (Shard(0), Shard(1)),
            values[slice(0, 3) if rank < 2 else slice(3, 5), slice(0, 3) if rank % 2 == 0 else slice(3, 6)],
        ),
    ):
        tensor = DTensor.from_local(
            expected_part.clone(), mesh, placements, run_check=False, shape=values.shape, stride=values.stride()
        )
        assert torch.equal(own_part_of_sharded(tensor, values), expected_part)
        assert torch.equal(whole(tensor), values)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    shard(model, [Unit("0", divisor=2.0), Unit("1")], mesh)
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
    for each in (model, plain):
        each(torch.ones(1, 2)).sum().backward()
    grads = [(whole(p.grad), other.grad) for p, other in zip(model.parameters(), plain.parameters(), strict=True)]
    torch.testing.assert_close([own for own, _ in grads[:2]], [2 * other for _, other in grads[:2]])
    torch.testing.assert_close([own for own, _ in grads[2:]], [other for _, other in grads[2:]])
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2))
    with pytest.raises(
        ConfigUnsupportedError, match=r"of the model that train have the dtypes torch.float32, torch.float64"
    ):
        shard(mixed, ["0"], mesh)
    shard(mixed, ["1"], mesh)
    return


def test_parts_divisors_and_dtypes(tmp_path):
    assert run_workers(parts, 4, tmp_path) == [None] * 4


class Repeated(nn.Module):
    """Its outputs have one memory: one comes twice, and another is a view of it; all of them are views, if `is_view`."""

    def __init__(self, *, is_view):
        super().__init__()
        self.layer, self.is_view = nn.Linear(4, 6), is_view

    def forward(self, x):
        y = self.layer(x)
        return (y.view(3, 4), y.view(3, 4)[:0], None) if self.is_view else (y, y[:, 0], y)


def in_place(rank, folder, is_view):
    mesh = mesh_of(rank, 2, 2)
    torch.manual_seed(0)
    plain, parts = Repeated(is_view=is_view), Repeated(is_view=is_view)
    parts.load_state_dict(plain.state_dict())
    shard(parts, [], mesh)
    found = []
    for model in (plain, parts):
        one, some, same = model(torch.ones(2, 4))
        one.mul_(3)
        loss = (one if same is None else same).square().sum() + some.sum()
        loss.backward()
        found.append([loss.detach(), *(whole(parameter.grad) for parameter in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("is_view", [False, True])
def test_outputs_that_share_memory_may_be_written_in_place(tmp_path, is_view):
    assert run_workers(in_place, 2, tmp_path, is_view) == [None] * 2


class Views(nn.Module):
    """Its outputs are views of one hidden tensor, which it does not return."""

    def __init__(self, *, overlap):
        super().__init__()
        self.layer, self.overlap = nn.Linear(4, 6), overlap

    def forward(self, x):
        y = self.layer(x)
        return (y.view(3, 4), y.t(), y[0]) if self.overlap else (y[0], y[1], y[1])


def of_one_hidden(rank, folder, overlap):
    mesh = mesh_of(rank, 2, 2)
    torch.manual_seed(0)
    plain, parts = (
        nn.Sequential(nn.Linear(4, 4), Views(overlap=overlap)),
        nn.Sequential(nn.Linear(4, 4), Views(overlap=overlap)),
    )
    parts.load_state_dict(plain.state_dict())
    shard(parts, ["1"], mesh)
    for writes in (0, 1, 2):
        found = []
        for model in (plain, parts):
            model.zero_grad()
            outputs = model(torch.ones(2, 4))
            for output in outputs[:writes]:
                output.mul_(3)
            loss = sum(weight * output.square().sum() for weight, output in enumerate(outputs, 1))
            loss.backward()
            found.append([loss.detach(), *(whole(parameter.grad) for parameter in model.parameters())])
        torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("overlap", [False, True])
def test_views_of_one_hidden_tensor_may_be_written_in_place(tmp_path, overlap):
    assert run_workers(of_one_hidden, 2, tmp_path, overlap) == [None] * 2
