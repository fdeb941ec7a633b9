"""What scripts write between steps into experts that ranks divide: what one process writes into all of them, or an error."""

import re

import expert_models
import pytest
import torch
import torch.distributed as dist
from executor_harness import run_workers
from mixtures import MB, batch_of, made, train_step
from test_slice_writes import refused, run

import smpc.v1 as smp
from smpc.errors import UsageError
from smpc.expert_parallel import shard

RIGHT = """
p.data.mul_(0.9)
p.data.clamp_(-0.2, 0.2)
p.data[:, 2] = 0
p[:, 1:2].add_(1)
p[..., 3].sub_(p[..., 4])
p.view(-1).mul_(0.5)
p[p.abs() < 0.05] = 0
p.div_(p.flatten(1).norm(dim=1)[:, None, None])
p.copy_(torch.nn.functional.normalize(p, dim=-1))
p.normal_()
p.add_(torch.randn_like(p), alpha=0.1)
torch.nn.init.xavier_uniform_(p)
p.sub_(p.grad, alpha=0.1)
for expert in p: expert.div_(expert.norm())
for expert, grad in zip(p.data, p.grad): expert.sub_(grad)
n = p.square().sum(); total(n); p.div_(n.sqrt())
""".strip().splitlines()
REFUSED = {
    "does the same to each": """
        p.data[0] = 0
        p[0].zero_()
        p[0, 1] = 0
        p[0:1].mul_(2)
        p.narrow(0, 0, 1).zero_()
        p.grad[0] = 0
        p.data[torch.tensor([0])] = 0
        p.select(0, -1).zero_()
        p.view(-1)[:5].zero_()
        p.index_fill_(0, torch.tensor([0]), 0.0)
    """,
    "this rank's slice of .* alone": """
        p.div_(p.norm())
        p.sub_(p.mean(0))
        p.copy_(p.softmax(0))
        p.sub_(p[0])
    """,
}  # fmt: skip


def on_ranks(rank, folder):
    plain, model = (expert_models.make("stack", torch.float32) for _ in range(2))
    found = shard(model, dist.group.WORLD)
    batch = expert_models.tokens(0)
    found(**batch)["loss"].backward()
    plain(**batch)["loss"].backward()
    name = next(name for name, each in found.expert_parameters() if each.dim() == 3)
    own, whole = model.get_parameter(name), plain.get_parameter(name)
    refused(own, found.whole_state_dict, REFUSED, name=name)
    for line in RIGHT:
        run(line, own, dist.all_reduce)
        run(line, whole, lambda own: own)
        if not torch.allclose(found.whole_state_dict()[name], whole, rtol=1e-4, atol=1e-6):
            return line
    with torch.no_grad():
        torch.testing.assert_close(found(**batch)["loss"], plain(**batch)["loss"])
    return ""


@pytest.mark.parametrize("ranks", [2, 4])
def test_writes_into_experts_are_those_of_one_process_or_errors(tmp_path, ranks):
    """`weight[0] = 0` was another expert on each rank."""
    assert run_workers(on_ranks, ranks, tmp_path) == [""] * ranks


def in_training(rank, folder, config):
    """The same in a training script, before its first step, and after it."""
    smp.init({"ddp": True, "expert_parallel_degree": 2, "microbatches": MB, **config})
    model, plain = smp.DistributedModel(made("by hand")), made("by hand")
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(3):
        found = dict(model.local_named_parameters() if number else model.named_parameters())
        name = next(name for name in found if name.endswith("experts.up"))
        own, whole = found[name], plain.get_parameter(name.removeprefix("module."))
        for line in ("p.data.mul_(0.9)", "p.data[:, 2] = 0", "p.clamp_(-0.2, 0.2)", "p.normal_(); p.mul_(0.2)"):
            run(line, own)
            run(line, whole)
        state = model.state_dict()
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-6)
        for line in ("p.data[0] = 0", "p.data[:1].mul_(2)", "p.div_(p.norm())"):
            with pytest.raises(UsageError, match=re.escape("experts.up")):
                run(line, own)
        optimizer.zero_grad()
        train_step(model, batch_of(0, 0))
        optimizer.step()
        for batch in [{key: value.chunk(MB)[i] for key, value in batch_of(0, 0).items()} for i in range(MB)]:
            (plain(**batch).loss / MB).backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return ""


CONFIGS = [
    {},
    {"fully_shard": True},
    {"tensor_parallel_degree": 2, "tensor_parallel_plan": "auto", "prescaled_batch": True},
]


@pytest.mark.parametrize("config", CONFIGS, ids=["", "fully_shard", "tensor"])
def test_scripts_write_into_experts_between_steps(tmp_path, config):
    """So with `fully_shard`, and tensor-parallel ranks that divide a rank's experts once more."""
    ranks = 4 if config else 2
    assert run_workers(in_training, ranks, tmp_path, config) == [""] * ranks


OF_LISTS = """
for p in ps: p.add_(torch.randn_like(p), alpha=0.1)
for p in ps: p.data.normal_(0, 0.02)
for p in ps: p.mul_((torch.rand_like(p) > 0.1).float())
for p in ps: p.add_(torch.randn(p.shape), alpha=0.1)
for p in ps: p[torch.rand(p.size()) < 0.1] = 0
for p in ps: p.data.mul_(1 - 1 / p.shape[0])
for p in ps: p.copy_(torch.empty_like(p).uniform_(-0.3, 0.3)); p.bernoulli_(0.9) if p.dim() == 3 else None
for p in ps: p.mul_(torch.bernoulli(torch.full_like(p, 0.9)))
for p in ps: p.div_(1 + p.norm())
for p in ps: p.mul_(0.9 + 0.01 * p.square().mean().item())
for p in ps: p.sub_(p.grad, alpha=0.1) if p.grad is not None else None
for p in ps: p.grad.clamp_(-0.1, 0.1) if p.grad is not None else None
torch._foreach_mul_(ps, 0.9)
torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(ps).detach() * 0.9, ps)
for p in ps: p.mul_(1 - 10 / p.numel())
g = [p for p in ps if p.grad is not None]; torch._foreach_add_([p for p in g], [p.grad for p in g], alpha=-0.1)
n = torch.stack([p.norm() for p in lists]).square().sum(); total(n); [p.div_(n.sqrt()) for p in ps]
""".strip().splitlines()
OF_LISTS_REFUSED = """
n = sum(p.grad.norm().item() ** 2 for p in ps if p.grad is not None); c = min(1.0, 0.1 / n); [p.grad.mul_(c) for p in ps]
n = torch.stack([p.grad.norm() for p in ps if p.grad is not None]).norm(); [p.mul_(1 / n) for p in ps]
n = torch._foreach_norm(ps); torch._foreach_div_(ps, torch.stack(n).sum())
for p in ps: p.mul_(lists[0].mean() + lists[-1].mean())
bias.add_(lists[0].mean() + lists[-1].mean())
p = next(p for p in lists if p.dim() == 2 and not p.nbytes); p[:, :1].normal_()
n = sum(float(p.norm()) for p in ps); [p.mul_(0.1 / n) for p in ps]
""".strip().splitlines()


def writes_into_lists(rank, folder, config):
    """Lines that do not what one process does, or are no error."""
    smp.init({"ddp": True, "expert_parallel_degree": 2, "microbatches": MB, **config})
    model, plain = smp.DistributedModel(made("listed")), made("listed")
    train_step(model, batch_of(0, 0))
    for batch in [{key: value.chunk(MB)[i] for key, value in batch_of(0, 0).items()} for i in range(MB)]:
        (plain(**batch).loss / MB).backward()

    def run_on(line, root, total):
        named = dict(root.local_named_parameters() if root is model else root.named_parameters())
        found = {name.removeprefix("module."): each for name, each in named.items()}
        ps, lists = zip(*[(found[name], ".experts." in name) for name in sorted(found)], strict=True)
        run(
            line,
            None,
            total,
            ps=ps,
            lists=[p for p, is_one in zip(ps, lists, strict=True) if is_one],
            bias=found["head.bias"],
        )

    wrong = []
    for line in OF_LISTS:
        if config and ("foreach" in line or "stack" in line or "vector" in line):
            continue  # torch has none for parts and others together
        run_on(line, model, dist.all_reduce)
        run_on(line, plain, lambda own: own)
        state = model.state_dict()
        are_close = [
            torch.allclose(state[key], value, rtol=1e-4, atol=1e-6) for key, value in plain.state_dict().items()
        ]
        wrong += [] if all(are_close) else [line]
    for line in OF_LISTS_REFUSED:
        try:
            run_on(line, model, None)
            model.state_dict()
            wrong.append(line)
        except UsageError:
            pass
    return wrong


@pytest.mark.parametrize("config", CONFIGS[:2], ids=["", "fully_shard"])
def test_scripts_write_into_experts_of_lists(tmp_path, config):
    """A rank has none of the others' values: norms of all were those of its own, clipped by hand, and what it drew were other numbers."""
    ranks = 4 if config else 2
    assert run_workers(writes_into_lists, ranks, tmp_path, config) == [[]] * ranks


def draws_all(rank, folder):
    smp.init({"ddp": True, "expert_parallel_degree": 2, "microbatches": MB})
    model, plain = smp.DistributedModel(made("listed")), made("listed")
    for each in (model, plain):
        torch.manual_seed(3)
        for _, parameter in sorted(each.named_parameters()):
            torch.nn.init.normal_(parameter)
    state = model.state_dict()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=0)
    return ""


def test_all_ranks_draw_experts_that_are_modules_of_their_own(tmp_path):
    """Each drew its own, and from then on other numbers for what all have."""
    assert run_workers(draws_all, 2, tmp_path) == ["", ""]
