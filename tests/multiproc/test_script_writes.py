"""What scripts write into parameters and gradients between steps, where ranks have parts of them: what one process writes, or an error."""

import math
import time

import pytest
import torch
import torch.distributed as dist
from executor_harness import run_workers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import smpc.v1 as smp
from smpc.errors import UsageError
from smpc.nn.init.note_slices import note_parts
from smpc.nn.script_writes import dtensor_writes
from smpc.sharding.dtensors import whole

ROWS = torch.tensor([1, 4, 5])
MASK = torch.arange(40).view(10, 4) % 3 == 0
LINES = """
p.data[3].zero_()
p.data[3] = 1.5
p[-1].fill_(3)
p[3:4][0].zero_()
p.data[:2] = torch.ones(2, 4)
p[:, 1] = 3
p.data[3, 2] = 9
p[rows] = torch.ones(3, 4)
p[rows, 1] = 4.0
p.data[[3, 4]] = 2.0
p[mask] = 0
p.narrow(0, 2, 5).add_(1)
p.t()[:, 3].zero_()
p.t()[1].zero_()
p.diagonal().zero_()
p.chunk(2)[1].zero_()
p.masked_fill_(mask, 0)
p.index_fill_(0, rows, 1.0)
p.index_copy_(0, rows, torch.ones(3, 4))
p.scatter_(0, rows[:, None], 1.0)
p.tril_()
p.renorm_(2, 0, 0.5)
p.data.copy_(torch.arange(40.0).view(10, 4))
p.data *= mask
p.data = p.data * 2
p.data = torch.ones(10, 4)
p.data[3] += p.data[4:6].sum(0)
p.data[8:] = p.data[:8].mean(0)
p.normal_()
p.data.uniform_(-1, 1)
p.data[8:].normal_(0, 0.02)
p.add_(torch.randn_like(p))
p.add_(torch.empty_like(p).bernoulli_(0.5))
p.data[9] = torch.randn(4)
p.data.mul_(0.9)
p.data.clamp_(-0.1, 0.1)
p.lerp_(torch.zeros_like(p), 0.3)
p.data /= p.data.norm()
p.masked_fill_(p.abs() < p.abs().median(), 0)
q = p.data.clone(); q[3] = 7; p.copy_(q)
""".strip().splitlines()
OF_ROWS = """
p.view(-1)[5:17].zero_()
p.data.flatten()[1] = 0
p.data[p.data > 0.5] = 0
p.masked_fill_(p.abs() < p.abs().view(-1).topk(20).values[-1], 0)
""".strip().splitlines()


def run(line, parameter, seed=5):
    """What is drawn next."""
    torch.manual_seed(seed)
    with torch.no_grad():
        exec(line, {"p": parameter, "torch": torch, "rows": ROWS, "mask": MASK})
    return torch.rand(3)


def make():
    torch.manual_seed(0)
    return nn.Linear(4, 10, bias=False)


def by_rows(model):
    fully_shard(model)


def by_columns(model):
    fully_shard(model, shard_placement_fn=lambda parameter: Shard(1))


def of_slices(model, style=ColwiseParallel):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], style())
    fully_shard(model, mesh=mesh["data"])


def of_slices_of_columns(model):
    of_slices(model, RowwiseParallel)


def write(rank, folder, divide, lines):
    note_parts()
    wrong = []
    for line in lines:
        model, plain = make(), make()
        divide(model)
        # Ranks draw as the first of those that have the other parts.
        drawn = run(line, model.weight, 5 + rank if "like" in line or "normal_" in line else 5), run(line, plain.weight)
        same = torch.allclose(whole(model.weight.detach()), plain.weight, rtol=1e-6, atol=1e-7)
        if not same or (rank == 0 and not torch.equal(*drawn)):
            wrong.append(line)
    return wrong


@pytest.mark.parametrize(
    ("divide", "world", "lines"),
    [
        (by_rows, 2, LINES + OF_ROWS),
        (by_columns, 2, LINES),
        (of_slices, 4, LINES[::3]),
        (of_slices_of_columns, 4, LINES[1::3]),
    ],
)
def test_writes_into_parts_are_those_of_one_process(tmp_path, divide, world, lines):
    """torch drops what is written into views that it has copied, and draws each part alike."""
    assert run_workers(write, world, tmp_path, divide, lines) == [[]] * world


def write_otherwise(rank, folder):
    note_parts()
    model = make()
    by_rows(model)
    before = whole(model.weight.detach())
    with torch.no_grad():
        with pytest.raises(
            UsageError, match="found a view of a tensor that ranks have in parts, which torch has copied"
        ):
            torch._foreach_zero_([model.weight[3]])
        with pytest.raises(UsageError, match="write into each view with its own method"):
            torch.mul(model.weight[3], 2, out=model.weight[3])
        with pytest.raises(UsageError, match="expected the same ordinary tensors on all ranks"):
            model.weight[3] = torch.full((4,), float(rank))
        with pytest.raises(UsageError, match=r"weight.data = ...: expected values of shape \[10, 4\]"):
            model.weight.data = torch.ones(5, 4)
    assert torch.equal(whole(model.weight.detach()), before)


def test_what_cannot_be_written_is_an_error_and_writes_nothing(tmp_path):
    assert run_workers(write_otherwise, 2, tmp_path) == [None] * 2


NUMBERS = """
p.norm().item()
float(p.abs().max())
float(p.mean())
int((p > 0).sum())
bool((p > 0.4).any())
(p.norm() ** 2).item()
p.norm().cpu().item()
p[3, 1].item()
1 if p.sum() > 0 else 0
math.sqrt(p.norm())
torch.zeros(()).add_(p.detach().square().sum()).add_(p.detach().mean(), alpha=2).item()
""".strip().splitlines()


def read_numbers(rank, folder):
    note_parts()
    model, plain = make(), make()
    by_rows(model)
    for draw in (torch.randn_like, torch.rand_like):  # gradients are enabled
        torch.manual_seed(rank)
        drawn = whole(draw(model.weight))
        torch.manual_seed(0)
        assert torch.equal(drawn, draw(plain.weight))
    pairs = [
        [eval(line, {"p": each.weight, "math": math, "torch": torch}) for each in (model, plain)] for line in NUMBERS
    ]
    return [line for line, (found, own) in zip(NUMBERS, pairs, strict=True) if found != pytest.approx(own)]


ALONE = """
p.norm().item()
p[3].zero_()
p[p > 0.5] = 0
p.normal_()
p.mul_(torch.ones(p.shape))
""".strip().splitlines()


def runs_alone(rank, folder, line):
    """What a rank is told that runs a line alone: rank 1 waits for it to end."""
    note_parts()
    dtensor_writes._WARNED_AFTER, dtensor_writes._LONGEST_WAIT = 1, 1
    model = make()
    by_rows(model)
    dist.barrier()
    if rank == 0:
        with (
            pytest.warns(UserWarning, match="have not come to this line in 1 s"),
            pytest.raises(UsageError, match=r"^<line>:1: expected a number .* on every rank"),
            torch.no_grad(),
        ):
            exec(compile(line, "<line>", "exec"), {"p": model.weight, "torch": torch})
        (folder / "told").touch()
    while not (folder / "told").exists():
        time.sleep(0.1)


@pytest.mark.parametrize("line", ALONE)
def test_a_line_that_one_rank_runs_is_an_error_there(tmp_path, line):
    """It waited until torch.distributed gave up, after half an hour."""
    assert run_workers(runs_alone, 2, tmp_path, line) == [None, None]


def test_numbers_of_parts_are_those_of_one_process(tmp_path):
    """torch has each rank's own of a sum that it has not summed up: `weight.norm().item()`."""
    assert run_workers(read_numbers, 2, tmp_path) == [[], []]


IDS = (torch.arange(32) % 10).view(4, 8)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(10, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, ids):
        x = torch.tanh(self.up(self.embed(ids)))
        return (self.down(x) + nn.functional.linear(x, self.down.weight.data)).square().mean()


def layers():
    torch.manual_seed(0)
    return Layers()


@smp.step
def step(model, ids):
    loss = model(ids)
    model.backward(loss)


@torch.no_grad()
def write_gradients(model):
    """A row that is frozen, and an update by hand."""
    model.embed.weight.grad[3] = 0
    model.up.weight.grad[:, 2].mul_(0.5)
    for parameter in model.parameters():
        parameter.grad.clamp_(-1e-3, 1e-3)
        parameter -= 0.1 * parameter.grad
    model.embed.weight.data[7] = 0.25


def train(rank, folder, config):
    smp.init({"microbatches": 2, "ddp": True, **config})
    model = smp.DistributedModel(layers())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        step(model, IDS)
        write_gradients(model.get_module())
    state = {name: whole(value.detach()) for name, value in model.named_parameters()}
    smp.shutdown()
    return state


PARTS = {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0, "sdp_param_persistence_threshold": 0}


@pytest.mark.parametrize("config", [{"fully_shard": True}, PARTS])
def test_a_script_that_writes_gradients_and_rows_trains_as_in_one_process(tmp_path, config):
    plain = layers()
    for _ in range(3):
        plain.zero_grad()
        for ids in IDS.chunk(2):
            (plain(ids) / 2).backward()
        write_gradients(plain)
    for state in run_workers(train, 2, tmp_path, config):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name.removeprefix("module.")], value, rtol=1e-5, atol=1e-7)


@torch.no_grad()
def clip(parameters):
    """Through `data`, and through an alias of it that is kept."""
    for parameter in parameters:
        kept = parameter.data
        parameter.data.clamp_(-0.25, 0.25)
        kept[..., :1] = 0.125


def train_half(rank, folder, config):
    smp.init({"microbatches": 2, "ddp": True, "bf16": True, **config})
    model = smp.DistributedModel(layers())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-5))
    for _ in range(2):
        optimizer.zero_grad()
        step(model, IDS)
        clip(model.local_parameters())
        optimizer.step()
    state = model.state_dict()
    smp.shutdown()
    return state


@pytest.mark.parametrize(
    "config",
    [{}, {"fully_shard": True}, {"shard_optimizer_state": True}, {"pipeline_parallel_degree": 2}],
)
def test_masters_take_over_what_is_written_through_data(tmp_path, config):
    """They overwrote it in the update: torch counts no version of the parameter for it."""
    plain = layers().bfloat16()
    clip(plain.parameters())
    for state in run_workers(train_half, 2, tmp_path, config):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name].float(), value.float(), rtol=1e-2, atol=1e-3)
