"""What scripts compute of slices and take out of tensors (numbers, branches, NumPy, sizes): what one process has, or an error.

An error comes where the script writes, or, where only a comparison of ranks can tell, when the model is used next.
"""

import math
import re
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from executor_harness import run_workers
from test_slice_writes import IDS, make

import smpc.tensor_parallel
import smpc.v1 as smp
from smpc.errors import PeerError, StepError, UsageError
from smpc.executor.collectives import TensorGroup
from smpc.nn.script_writes.slice_numbers import known_number

RIGHT = """
p.add_(torch.empty_like(p).normal_(), alpha=0.01)
p.mul_(torch.rand_like(p) > 0.1)
for q in ps: q.add_(torch.randn_like(q) * 0.01)
p.mul_(torch.arange(p.shape[1])); p.add_(torch.ones(p.shape)); p.mul_(torch.full(p.shape, 0.5))
p.copy_(p[:, torch.randperm(p.shape[1])]); p.mul_(1 / math.sqrt(p.shape[1]))
p.uniform_(-1 / p.size(1) ** 0.5, 1 / p.size(1) ** 0.5); p.view(p.shape[0], -1).mul_(0.5); p.view(p.numel()).mul_(0.5)
p.copy_(torch.from_numpy(p.numpy() * 2)); p.copy_(torch.tensor(p.tolist()) * 0.5)
for row in p: row.div_(row.norm())
if float(p.grad.norm()) > 0 and not p.isnan().any(): p.grad.mul_(0.5)
p.sub_(p.grad); f"{p.norm():.3f} {p.numel() / 1e6:.1f}M {100 * p.norm().item():g}"; p.sub_(p.grad.sign(), alpha=1e-3)
assert sorted([p.norm().item(), p.grad.norm().item()])[1] < float("inf") and 1 / max(p.norm().item(), 1e-6, d.norm().item()) > 0
nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(ps) * 0.5, ps)
average = torch.empty(p.shape).copy_(p); average.lerp_(p, 0.5); average.mul_(0.5).add_(p); p.copy_(average)
d.mul_(0.5); d.data[2] = 0; d.grad *= 0.5; d.add_(torch.ones(d.shape)); d.normal_(); d.copy_(torch.rand(d.shape)); d.data = d.data * 2
d.sub_(d.grad); d.clamp_(-1, 1); d[d.abs() < 0.1] = 0; d.div_(d.norm()); p.mul_(d.sum())
p.mul_(float(d.norm())); torch._foreach_mul_([p, d], 0.5)
p.copy_(p.double().mul(0.5).float()); d.mul_(0.5); p.data = p.data.clone() * 2; p.grad = p.grad * 2
""".strip().splitlines()  # fmt: skip
REFUSED = {
    "the same to all rows": """
        p.add_(torch.randn(p.shape), alpha=0.01)
        p.data = torch.randn(p.shape)
        p.copy_(torch.randn(*p.shape))
        p.add_(p.new_zeros(p.shape).normal_())
        p.add_(torch.normal(0.0, 1.0, p.shape))
        p.mul_(torch.rand(p.shape) > 0.1)
        p.grad.add_(torch.randn(p.grad.shape), alpha=0.01)
        p.grad = torch.randn(p.shape)
        p.view(-1).add_(torch.randn(p.numel()))
        q = p + torch.randn(p.shape); p.copy_(q * 0.5)
        p.add_(torch.from_numpy(np.random.randn(*p.shape)).float())
        p.mul_(torch.arange(p.shape[0])[:, None])
        p.copy_(torch.eye(*p.shape))
    """,
    "write the same": """
        p.mul_(float(p.norm()))
        p.mul_(1 / math.sqrt(p.norm().item()))
        p.mul_(float(f"{p.norm().item():.6f}"))
        p.mul_(float(p.norm().numpy()))
        p.mul_(np.mean([q.norm().item() for q in ps]))
        p.mul_(sum(map(sum, p.tolist())))
        p.copy_(p * float(p.norm()))
        p.mul_((p.abs() >= float(p.abs().median())).float())
        p.data = p.data / float(p.norm())
        q = p.clone(); q.mul_(float(p.norm())); p.copy_(q)
        p.grad.mul_(float(p.grad.norm()))
        p.grad = p.grad / float(p.grad.norm())
        order = p.norm(dim=0).topk(5).indices.tolist(); p[:, order] = 0
        if rank == 0: p.zero_()
        with torch.enable_grad(): n = p.norm(); p.data.div_(n.detach())
        d.mul_(float(p.norm()))
        d[:3] = float(p.norm())
        d.view(-1)[0].fill_(float(p.norm()))
        d.grad.mul_(float(p.norm()))
        d.grad = d.grad * float(p.norm())
        d.add_(torch.rand(d.shape) + rank)
        v = nn.utils.parameters_to_vector(ps[4:]); d.copy_(v * float(p.norm()))
        torch._foreach_mul_([p, d], float(p.norm()))
        torch.manual_seed(rank); d.normal_()
        if rank == 0: d.zero_()
    """,
    "this rank's slice of .* alone": """
        p.mul_((p.abs() >= p.abs().median()).float())
        p.div_(p.double().norm())
        p.mul_(p.norm().item() // 1); p.mul_(round(p.norm().item()))
        p.mul_(math.floor(p.norm().item()))
        p.mul_(int(p.norm().item()))
        p.mul_(1 / (p != 0).sum().item())
        i = p.norm(dim=0).argmin().item(); p[:, i] = 0
        if p.norm() > 5: p.mul_(0.5)
        d.mul_(p.norm())
        d.mul_(p.norm().item())
        d.data.add_(p.mean(0))
        d.data = d.data * p.norm()
        d[0] = p.norm()
        if p.norm().item() > 5: p.mul_(0.5)
        p.mul_(min(1.0, 1e3 / p.grad.norm().item()))
        p.mul_(2 / (p.size(0) + p.size(1)))
        p.mul_(1 / math.sqrt(p.shape[0]))
        p.normal_(0, p.shape[0] ** -0.5)
        nn.init.normal_(p, std=(2 / sum(p.shape)) ** 0.5)
        p.sub_(p.grad, alpha=0.1 * max(1, p.size(-2) / p.size(-1)) ** 0.5)
        nn.utils.vector_to_parameters(torch.randn_like(nn.utils.parameters_to_vector(ps)), ps)
    """,
    "does the same to each": "p.renorm_(2, 1, 1.0)",
    "read-only": """
        a = p.numpy(); a[3] = 0
        a = p.detach().cpu().numpy(); a *= 0.5
    """,
}  # fmt: skip


def run(line, parameters, rank):
    torch.manual_seed(5)
    np.random.seed(5)
    names = {"p": parameters[1], "d": parameters[4], "ps": parameters, "rank": rank}
    with torch.no_grad():
        exec(line, {"torch": torch, "nn": torch.nn, "math": math, "np": np} | names)


def runs_wrong(found, parameters, rank):
    """Lines that are no error, or not the right one."""
    kept = {name: value.detach().clone() for name, value in found.whole_state_dict().items()}
    wrong = []
    for match, lines in REFUSED.items():
        for line in filter(None, map(str.strip, lines.splitlines())):
            try:
                run(line, parameters, rank)
                found.whole_state_dict()
                wrong.append(line)
            except (UsageError, ValueError) as error:
                if not re.search(match, str(error)):
                    wrong.append(f"{line}: {error}")
            found.load_whole_state_dict(kept)
            for parameter in parameters:
                parameter.grad = None
            found(ids=IDS).backward()
    return wrong


def sharded(rank, folder):
    model, plain = make(), make()
    found = smpc.tensor_parallel.shard(model, {"ids": IDS}, TensorGroup.of(dist.group.WORLD))
    found(ids=IDS).backward()
    plain(IDS).backward()
    own, whole = list(model.parameters()), list(plain.parameters())
    wrong = runs_wrong(found, own, rank)
    for line in RIGHT:
        run(line, own, 0)
        run(line, whole, 0)
        for name, value in found.whole_state_dict().items():
            if not torch.allclose(value, plain.state_dict()[name], rtol=1e-4, atol=1e-6):
                wrong.append(f"{line}: {name}")
    return wrong


@pytest.mark.long
def test_numbers_of_slices_are_those_of_one_process_or_errors(tmp_path):
    """Noise was the same for the rows of all ranks, and numbers that had left their tensors scaled each rank's rows by another one."""
    assert run_workers(sharded, 2, tmp_path) == [[]] * 2


@smp.step
def step(model, ids):
    loss = model(ids)
    model.backward(loss)
    return loss


def trains(rank, folder, config, ends_in):
    """What ends a script that scales slices by numbers of each: the next step, `state_dict`, or a checkpoint."""
    smp.init({"microbatches": 2, "ddp": True, "tensor_parallel_degree": 2, **config})
    with smp.tensor_parallelism("tensor_parallel_plan" not in config):
        model = make()
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = IDS if config.get("pipeline_parallel_degree", 1) == 1 or rank < 2 else torch.empty(0)
    step(model, batches)
    optimizer.step()
    with torch.no_grad():
        next(model.local_parameters()).mul_(0.5)
    with pytest.raises(StepError):
        step(model, IDS[:3])
    step(model, batches)
    with torch.no_grad():
        for parameter in model.local_parameters():
            parameter.mul_(1 + float(parameter.norm()))
    ends = {
        "step": lambda: step(model, batches),
        "state_dict": model.state_dict,
        "checkpoint": lambda: smp.save_checkpoint(str(folder / "saved"), "now", partial=True, model=model),
    }
    with pytest.raises((UsageError, PeerError), match=r"write the same into parameters .* here it is mul_ of "):
        ends[ends_in]()


PLAN = {"tensor_parallel_plan": "auto", "prescaled_batch": True}


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "num_ranks", "ends_in"),
    [
        (PLAN, 2, "step"),
        ({"prescaled_batch": True}, 2, "checkpoint"),
        (PLAN | {"pipeline_parallel_degree": 2}, 4, "step"),
        (PLAN | {"pipeline_parallel_degree": 2}, 4, "state_dict"),
    ],
)
def test_ranks_compare_where_a_step_or_a_checkpoint_has_been_checked(tmp_path, config, num_ranks, ends_in):
    """A batch that does not divide is an error of its own, whatever has been written."""
    run_workers(trains, num_ranks, tmp_path, config, ends_in)


PENALTIES = {
    "p.norm()": False,
    "sum(each.square().sum() for each in ps)": False,
    "(torch.cat([each.view(-1) for each in ps]) ** 2).mean()": False,
    "p.T.abs().mean()": False,
    "torch.nn.functional.linear(torch.ones(2, p.shape[1]), p).sum()": False,
    "nn.utils.parameters_to_vector(ps).norm()": False,
    "torch.linalg.matrix_norm(p).square()": False,
    "d.norm() + d.abs().mean()": True,
    "sum(each.sum() for each in ps) * 0": True,
    "p.norm().detach() * 0 + p.norm().item() * 0": True,
}


def differentiates(rank, folder):
    model, plain = make(), make()
    found = smpc.tensor_parallel.shard(model, {"ids": IDS}, TensorGroup.of(dist.group.WORLD))
    own, wrong = list(model.parameters()), []
    for line, is_right in PENALTIES.items():
        names = {"torch": torch, "nn": torch.nn, "p": own[1], "d": own[4], "ps": own}
        loss = found(ids=IDS) + 0.01 * eval(line, names)
        try:
            loss.backward()
            if not is_right:
                wrong.append(line)
                continue
        except UsageError as error:
            if is_right or "beside the model" not in str(error):
                wrong.append(f"{line}: {error}")
        if is_right:
            (plain(IDS) + 0.01 * eval(line, names | {"p": plain.up.weight, "d": plain.down.bias})).backward()
            for name, gradient in found.whole_gradients().items():
                if not torch.allclose(gradient, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-7):
                    wrong.append(f"{line}: {name}")
        found.zero_grad()
        plain.zero_grad()
    with pytest.raises(RuntimeError, match="in-place"):
        own[1].mul_(2)
    return wrong


def test_penalties_of_slices_are_not_differentiated(tmp_path):
    """Each rank had the gradient of its slice's norm, and a loss of its own."""
    assert run_workers(differentiates, 2, tmp_path) == [[]] * 2


def saves(rank, folder):
    """Numbers of slices in files, by everything that a script can save with."""
    smp.init({"microbatches": 2, "ddp": True, "tensor_parallel_degree": 2, **PLAN})
    model = smp.DistributedModel(make())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step(model, IDS)
    weight = next(parameter for parameter in model.local_parameters() if known_number(parameter.shape[0]) is not None)
    norm, rows = weight.detach().norm().item(), weight.shape[0]
    found = {"norm": norm, "rows": [rows, (rows, 2)], "shape": weight.shape, "of all": 1.5}
    assert known_number(norm) is not None
    torch.save(found, folder / f"torch_{rank}.pt")
    smp.save(found, str(folder / "smp.pt"))
    smp.save_checkpoint(
        str(folder / "saved"), "now", partial=True, model=model, optimizer=optimizer, user_content={"found": found}
    )
    assert (found["norm"], found["rows"][0]) == (norm, rows)
    assert known_number(found["rows"][0]) is not None  # what is saved stays what it was
    user = smp.resume_from_checkpoint(str(folder / "saved"), "now", partial=True)["found"]
    user = user if rank == 0 else found  # rank 0's counts
    expected = {"norm": float(norm), "rows": [int(rows), (int(rows), 2)], "shape": torch.Size(map(int, weight.shape))}
    return [
        {name: each[name] for name in expected} == expected and each["of all"] == 1.5
        for each in (
            torch.load(folder / f"torch_{rank}.pt", weights_only=True), smp.load(str(folder / "smp.pt")), user
        )
    ]  # fmt: skip


SHOWN = {
    "float(p.norm())": True,
    "f'{p.norm():.3f}'": True,
    "str(p.norm())": True,
    "f'{p.norm().item():.3f}'": True,
    "repr(1 / p.norm().item())": True,
    "[float(p.norm()) for _ in range(3)]": True,
    "float(p[0, 0] > 1e9)": True,
    "float(d.norm()), str(d.norm()), d.numel()": False,
    "str(p), p.shape, f'{p.shape[1]}', f'{sum(q.numel() for q in ps):,}'": False,
    "torch.tensor(p.norm().item())": False,
    "float(p.norm().item())": True,
}


def shows(rank, folder):
    """By line, the warnings."""
    model = make()
    smpc.tensor_parallel.shard(model, {"ids": IDS}, TensorGroup.of(dist.group.WORLD))
    parameters, seen = [p.detach() for p in model.parameters()], {}
    names = {"torch": torch, "p": parameters[1], "d": parameters[4], "ps": parameters, "__name__": "script"}
    for line in SHOWN:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            exec(compile(line, "script.py", "exec"), dict(names))
        seen[line] = [f"{each.filename}:{each.lineno} {each.message}" for each in caught]
    return seen


def test_showing_a_number_of_a_slice_warns_once_at_its_line(tmp_path):
    """Logs had each rank's own norms, without a word."""
    for seen in run_workers(shows, 2, tmp_path):
        for line, expected in SHOWN.items():
            assert [text.split(" ", 1)[0] for text in seen[line]] == ["script.py:1"] * expected, (line, seen[line])
            assert all("what this rank has of a parameter alone" in text for text in seen[line])


def test_numbers_of_slices_are_ordinary_ones_in_files(tmp_path):
    """They made files, and checkpoints, which torch's loader of weights refused."""
    assert run_workers(saves, 2, tmp_path) == [[True] * 3] * 2
