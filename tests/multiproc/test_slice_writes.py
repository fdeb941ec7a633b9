"""What scripts write between steps into slices of parameters: what one process writes into the whole, or an error that writes nothing."""

import copy
import io
import json
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from executor_harness import run_workers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import smpc.tensor_parallel
import smpc.v1 as smp
from smpc.errors import UsageError
from smpc.executor.collectives import TensorGroup

IDS = (torch.arange(32) % 10).view(4, 8)
ROWS = torch.tensor([1, 4, 5])
RIGHT = """
p.data.mul_(0.9)
p.data.clamp_(-0.05, 0.05)
p *= 0.5
p.lerp_(torch.zeros_like(p), 0.3)
p.data[:, 2] = 0
p[:, 2].zero_()
p.data[..., 3].add_(1)
p.t()[2].zero_()
p.data[:, 2] -= p.data[:, 3]
p.data[:, cols] = 1.5
p.index_fill_(1, cols, 2.0)
p.data[p.data.abs() < 0.05] = 0
p.masked_fill_(p.abs() < 0.05, 0)
p.data *= p.data.abs() > 0.05
p.data /= p.data.norm(dim=1, keepdim=True)
p.copy_(p.softmax(1))
p.copy_(torch.nn.functional.normalize(p, dim=1))
p.data = p.data * 2
q = p.detach().clone(); q.mul_(3); p.copy_(q)
p.normal_()
p.data.uniform_(-1, 1)
p.add_(torch.randn_like(p), alpha=0.01)
p.data.mul_(torch.rand_like(p.data))
torch._foreach_mul_([p, p.data], 0.5)
p.grad.clamp_(-1e-3, 1e-3); p -= 0.1 * p.grad
p.grad *= 0.5; p.add_(p.grad, alpha=-0.1)
p.data.reshape(-1).sub_(0.1 * p.grad.reshape(-1))
p.add_(torch.randn_like(p.grad), alpha=0.01)
p.grad.add_(p.grad.clone().normal_(), alpha=0.01); p.sub_(p.grad)
torch._foreach_addcdiv_([p], [p.grad], torch._foreach_add(torch._foreach_sqrt([p.abs()]), 1), -0.1)
p.data = torch.nn.Parameter(p.data * 0.9).data
p.copy_(torch.stack([p, p * 0.5, p * 0.7]).median(dim=0).values)
p.copy_(torch.mean(torch.stack([p, p.abs()]), dim=0))
flat = torch.cat([p.data.view(-1), p.grad.reshape(-1)]); flat *= 0.5; p.copy_(flat[: p.numel()].view_as(p))
flat = torch.cat([p.data.flatten() for _ in range(2)]) - 1; p.data = flat.split(p.numel())[1].view_as(p)
flat = torch.zeros(2 * p.numel()); flat[: p.numel()] = p.view(-1); p.copy_(flat[: p.numel()].view_as(p))
p.copy_((p.t() * 2).t()); p.copy_(p.t().contiguous().softmax(0).t())
p.mul_(p.new_full((), 0.9)); p.mul_(torch.tensor(0.5, dtype=torch.float64).type_as(p)); p.add_(torch.ones(p.shape[1]).expand_as(p))
p.mul_(0.9); f"{p.norm():.3f}"
p[: p.shape[0]].mul_(0.9); p.narrow(0, 0, p.shape[0])[:, :32].mul_(0.9); p.split(32, dim=1)[0].mul_(0.9)
p.view(p.shape[0], 2, -1)[:, 0].mul_(0.5); p.view(-1, 2, p.shape[1] // 2)[:, :, 1].zero_(); p.unflatten(1, (2, -1))[:, 1].add_(1)
norm = full(p.square().sum()).item() + 0.0; norm = torch.tensor(norm); total(norm); p.div_(norm.sqrt().item())
norm = full(p.square().sum()); total(norm); p.div_(norm.sqrt())
""".strip().splitlines()
REFUSED = {
    "does the same to each": """
        p.data[3].zero_()
        p.data[3] = 0
        p[3] = 0
        p[3, 2] = 0
        p[3:5].mul_(2)
        p.data[rows] = 0
        p.narrow(0, 2, 5).zero_()
        p.t()[:, 3].zero_()
        p.view(-1)[5] = 0
        p.view(-1)[5:17].zero_()
        p.diagonal().zero_()
        p.index_fill_(0, rows, 0.0)
        p.index_add_(0, rows, torch.ones(3, 64))
        p.data.tril_()
        p.copy_(p.data).cumsum_(0)
        torch._foreach_zero_([p[3]])
        p.grad[3] = 0
        p.grad.data[3].zero_()
        p.grad.index_fill_(0, rows, 0)
        n = len(p); p.data[:n] = 0
        n = len(p); p[0:n].mul_(2)
        n = len(p); p[: n + 2].mul_(2)
        n = len(p); p.narrow(0, 0, n).zero_()
        n = len(p); p.split(n)[0].zero_()
        n = len(p); p[torch.arange(n)] = 0
        n = len(p); p.view(-1)[: n * p.shape[1]].zero_()
        n = len(p); p.grad[:n] = 0
    """,
    "random numbers for all of a parameter|does the same to each": """
        p.data[8:].normal_()
        p.data[:, 8:].uniform_()
    """,
    "this rank's slice of .* alone": """
        p.data /= p.data.norm()
        p.div_(p.norm())
        p.div_(torch.linalg.vector_norm(p))
        p.mul_(p.abs().mean() + 1)
        p.data.sub_(p.data.mean(0))
        p.sub_(p[0])
        p.data[:] = p.data.max()
        p.masked_fill_(p.abs() < p.abs().flatten().topk(20).values[-1], 0)
        p.data *= p.data.abs() > p.data.abs().median()
        p.copy_(torch.nn.functional.normalize(p, dim=0))
        p.copy_(p.softmax(0))
        p.copy_(p.flip(0))
        p.copy_(torch.nn.functional.dropout(p))
        p.mul_(torch.bernoulli(torch.full_like(p, 0.5)))
        p.data = p.data / p.data.norm()
        p.grad /= p.grad.norm()
        p.data = torch.nn.Parameter(p.data / p.data.norm()).data
        p.sub_((2 * p.grad.reshape(-1))[:64])
        torch._foreach_div_([p], torch._foreach_norm([p]))
        p.mul_(1 / p.norm().item())
        p.data *= min(1.0, 0.1 / (p.grad.norm().item() ** 2 + 1e-6) ** 0.5)
        p.add_(p.grad, alpha=-p.abs().mean().item())
        p.copy_(p * p.abs().max().item())
        p.data[:, 2] = p[3, 2].item()
        p.sub_(torch.full_like(p, p.norm().item()))
        torch._foreach_mul_([p], p.norm().item())
        flat = torch.cat([p.view(-1), p.grad.view(-1)]); p.copy_(flat[5:5 + p.numel()].view_as(p))
        p.div_(torch.cat([p.view(-1), p.grad.view(-1)]).norm())
        p.copy_(p.t().contiguous().softmax(1).t())
    """,
}  # fmt: skip


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(10, 64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, ids):
        x = self.embed(ids)
        return (x + self.down(torch.tanh(self.up(x)))).square().mean()


def make():
    torch.manual_seed(0)
    return Layers()


def run(line, parameter, total=None, **others):
    torch.manual_seed(5)
    with torch.no_grad():
        exec(
            line,
            {"p": parameter, "torch": torch, "rows": ROWS, "cols": ROWS, "total": total, "full": lambda own: own}
            | others,
        )


def refused(parameter, whole, refused=REFUSED, name="up.weight", **others):
    """Lines that are no error, or not the right one."""
    wrong, before = [], whole()
    for match, lines in refused.items():
        for line in map(str.strip, lines.strip().splitlines()):
            try:
                run(line, parameter, **others)
                wrong.append(line)
            except UsageError as error:
                if name not in str(error) or not re.search(match, str(error)):
                    wrong.append(f"{line}: {error}")
    assert not wrong, wrong
    torch.testing.assert_close(whole(), before, rtol=0, atol=0)


def looks_at(parameter):
    """What is about the parameter itself, and not its values."""
    with torch.no_grad():
        assert not parameter.requires_grad_(False).requires_grad
        assert parameter.requires_grad_(True) is parameter
        assert parameter.mul_(1) is parameter
        handle = parameter.register_hook(lambda grad: grad)
    assert parameter._backward_hooks
    handle.remove()
    assert isinstance(parameter, nn.Parameter)
    assert type(nn.Parameter(parameter)) is type(type(parameter)(torch.ones(2), False)) is nn.Parameter
    assert parameter.grad is parameter.grad
    assert parameter in {parameter: 0}
    with torch.no_grad():
        number = 2 * parameter.norm().item()
    assert f"{number:.2f} {json.dumps(number)}" == f"{float(number):.2f} {float(number)}"
    assert type(pickle.loads(pickle.dumps(number))) is type(copy.deepcopy(number)) is float
    (parameter.square().sum() * 0).backward()
    parameter.grad.detach_()


def sharded(rank, folder):
    model = make()
    found = smpc.tensor_parallel.shard(model, {"ids": IDS}, TensorGroup.of(dist.group.WORLD))
    assert found.layouts["up.weight"].dim == 0
    found(ids=IDS).backward()
    plain = make()
    plain(IDS).backward()
    looks_at(model.up.weight)
    refused(model.up.weight, found.whole_state_dict)
    wrong = []
    for line in RIGHT:
        run(line, model.up.weight, dist.all_reduce)
        run(line, plain.up.weight, lambda own: own)
        whole = found.whole_state_dict()["up.weight"]
        if not torch.allclose(whole, plain.up.weight, rtol=1e-4, atol=1e-6):
            wrong.append(line)
            break
    torch.testing.assert_close(found(ids=IDS), plain(IDS), rtol=1e-4, atol=1e-6)
    return wrong


def test_writes_into_slices_are_those_of_one_process_or_errors(tmp_path):
    """They went into other rows of each rank's slice, and scaled by its norm, without a word."""
    assert run_workers(sharded, 2, tmp_path) == [[]] * 2


OVER_GROUPS = """
n = p.square().sum(); total(n, tensor); p.div_(n.sqrt())
n = p.square().sum(); total(n); p.div_((n / 2).sqrt())
n = p.square().sum(); total(n, replicas); total(n, tensor); p.div_((n / 2).sqrt())
n = torch.zeros(()); n += p.square().sum(); total(n, tensor); p.div_(n.sqrt())
parts = [torch.empty_like(p) for _ in range(count)]; gather(parts, p, tensor); p.div_(torch.cat(parts[:slices]).norm())
parts = torch.empty(count); gather_single(parts, p.abs().max(), tensor); p.div_(parts[:slices].max())
q = p.grad.clone(); total(q, replicas); p.sub_(q, alpha=0.05)
total(p.grad, replicas); p.sub_(p.grad, alpha=0.05); p.grad.div_(copies)
""".strip().splitlines()  # fmt: skip
REFUSED_OVER_GROUPS = {
    "this rank's slice of .* alone": """
        n = p.square().sum(); total(n, replicas); p.div_(n.sqrt())
        n = torch.zeros(()); n += p.norm(); p.div_(n)
        n = torch.zeros(2); n[1] = p.norm(); p.div_(n[1])
        parts = [torch.zeros(()), torch.zeros(())]; gather(parts, p.norm(), replicas); p.div_(parts[0])
        q = p.clone(); total(q, replicas); p.div_(q.norm())
        n = p.norm(); to_one(n, 0); p.div_(n)
        q = p.grad.clone(); total(q, tensor); p.sub_(q)
    """,
    "a group of ranks that have the same rows": """
        total(p.grad)
        total(p.grad, tensor)
        total(p.data, tensor)
        total(p, tensor)
        send(p.data, 0)
        send(p[:, 2], 0)
    """,
}  # fmt: skip


def in_groups(rank, folder):
    """Slices on ranks 0 and 1, and on ranks 2 and 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "tensor"))
    groups = {name: mesh.get_group(name) for name in ("replicas", "tensor")}
    model, plain = make(), make()
    found = smpc.tensor_parallel.shard(model, {"ids": IDS}, TensorGroup.of(groups["tensor"]))
    found(ids=IDS).backward()
    plain(IDS).backward()
    functions = {
        "total": lambda tensor, group=None: dist.all_reduce(tensor, group=group),
        "gather": lambda parts, tensor, group: dist.all_gather(parts, tensor, group),
        "gather_single": lambda parts, tensor, group: dist.all_gather_into_tensor(parts, tensor.view(1), group),
        "send": dist.broadcast,
        "to_one": dist.reduce,
    }
    refused(model.up.weight, found.whole_state_dict, REFUSED_OVER_GROUPS, **functions, **groups)
    alone = {
        "total": lambda tensor, group=None: tensor.mul_(1 if group == "tensor" else 2),
        "gather": lambda parts, tensor, group: parts[0].copy_(tensor),
        "gather_single": lambda parts, tensor, group: parts[0].copy_(tensor),
    }
    for line in OVER_GROUPS:
        run(line, model.up.weight, **functions, **groups, count=2, slices=2, copies=2)
        run(line, plain.up.weight, **alone, replicas="replicas", tensor="tensor", count=1, slices=1, copies=2)
        whole = found.whole_state_dict()["up.weight"]
        if not torch.allclose(whole, plain.up.weight, rtol=1e-4, atol=1e-6):
            return line
    return ""


def test_sums_over_other_ranks_than_those_with_the_slices_stay_of_the_slice_alone(tmp_path):
    """Any all_reduce made a norm one of the whole, also one over replicas."""
    assert run_workers(in_groups, 4, tmp_path) == [""] * 4


@smp.step
def step(model, ids):
    loss = model(ids)
    model.backward(loss)


def train(rank, folder, config):
    """Clipping, decay and updates by hand, beside an optimizer, an average of weights, and what else looks at parameters."""
    smp.init({"microbatches": 2, "ddp": True, "tensor_parallel_degree": 2, **config})
    with smp.tensor_parallelism("tensor_parallel_plan" not in config):
        model = make()
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=5.0))
    average = None
    for _ in range(3):
        optimizer.zero_grad()
        step(model, IDS)
        with torch.no_grad():
            for parameter in model.local_parameters():
                parameter.grad.clamp_(-1e-3, 1e-3)
        optimizer.step()
        with torch.no_grad():
            own = list(model.local_parameters())
            average = average or [each.detach().clone() for each in own]
            for ours, parameter in zip(average, own, strict=True):
                parameter.data.clamp_(-0.2, 0.2)
                ours.lerp_(parameter, 0.5)
                parameter.copy_(ours)
        file = io.BytesIO()
        torch.save([own[0].data, copy.deepcopy(own[0])], file)
        file.seek(0)
        assert all(type(each) in (torch.Tensor, nn.Parameter) for each in torch.load(file))
    state = model.state_dict()
    weight = next(p for name, p in model.local_named_parameters() if name.endswith("up.weight"))
    with pytest.raises(UsageError, match="does the same to each of the"):
        weight.data[3, 3] = 0.5
    smp.shutdown()
    return state


AUTO = {"tensor_parallel_plan": "auto", "prescaled_batch": True}


@pytest.mark.parametrize("config", [AUTO, {"prescaled_batch": True}, AUTO | {"shard_optimizer_state": True}])
def test_scripts_that_write_elementwise_train_as_in_one_process(tmp_path, config):
    plain = make()
    optimizer = torch.optim.SGD(plain.parameters(), lr=5.0)
    average = None
    for _ in range(3):
        optimizer.zero_grad()
        for ids in IDS.chunk(2):
            (plain(ids) / 2).backward()
        for parameter in plain.parameters():
            parameter.grad.clamp_(-1e-3, 1e-3)
        optimizer.step()
        average = average or [each.detach().clone() for each in plain.parameters()]
        with torch.no_grad():
            for ours, parameter in zip(average, plain.parameters(), strict=True):
                ours.lerp_(parameter.clamp_(-0.2, 0.2), 0.5)
                parameter.copy_(ours)
    for state in run_workers(train, 2, tmp_path, config):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def in_parts(rank, folder, config, right, wrong):
    """Slices on ranks 0 and 1, and on ranks 2 and 3, which `fully_shard` divides over 0 and 2, and 1 and 3."""
    smp.init({"microbatches": 2, "ddp": True, "tensor_parallel_degree": 2, "fully_shard": True, **config})
    with smp.tensor_parallelism("tensor_parallel_plan" not in config):
        model = make()
    model, plain = smp.DistributedModel(model), make()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    step(model, IDS)
    for ids in IDS.chunk(2):
        (plain(ids) / 2).backward()

    def parameter():
        return next(each for name, each in model.local_named_parameters() if name.endswith("up.weight"))

    def whole():
        return {"up.weight": model.state_dict()["up.weight"]}

    def total(own):
        dist.all_reduce(own, group=smp.get_tp_process_group())

    assert isinstance(parameter(), DTensor)
    if rank == 0:  # no rank waits for another one
        with torch.no_grad():
            assert all(each.shape for each in (parameter().norm(dim=1), parameter().softmax(1), parameter() * 2))
    refused(parameter(), whole, wrong)
    for line in right:
        run(line, parameter(), total, full=lambda own: own.full_tensor())
        run(line, plain.up.weight, lambda own: own)
        if not torch.allclose(whole()["up.weight"], plain.up.weight, rtol=1e-4, atol=1e-6):
            return line
    optimizer.zero_grad()
    step(model, IDS)
    return "" if isinstance(parameter(), DTensor) else "no parts"


BY_COLUMNS = {
    "does the same to each": "p.data[:, 3] = 0",
    "this rank's slice of .* alone": "p.div_(p.norm(dim=1, keepdim=True))",
}
IN_PARTS = [
    line.replace('f"{p.norm():.3f}"', "str(p.norm())") for line in RIGHT if "zeros(" not in line
]  # torch formats no DTensors


@pytest.mark.parametrize(
    ("config", "right", "wrong"),
    [(AUTO, IN_PARTS, REFUSED), ({"prescaled_batch": True}, ["p.data[3] = 0", "p.data.normal_()"], BY_COLUMNS)],
)
def test_writes_into_slices_in_parts_are_those_of_one_process_or_errors(tmp_path, config, right, wrong):
    """Rows were those of each rank's slice, of which replicas have parts."""
    assert run_workers(in_parts, 4, tmp_path, config, right, wrong) == [""] * 4
