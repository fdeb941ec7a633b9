"""`torch.nn.utils.clip_grad_norm_(model.parameters(), c)` in a script equals one process's, on every rank.

Every rank clipped by the norm of what it holds: in two stages of GPT-2 by 2.1 and 1.7 in place of 2.7.
"""

import math

import pytest
import torch
from executor_harness import run_workers
from torch import nn
from torch.nn.utils import clip_grad_norm_ as imported_by_name
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from v1_harness import MB, batches, feed, make_model, start, train_step

import smpc.v1 as smp
from smpc.errors import StepError, UsageError

NORM_TYPES = (2.0, 1.0, math.inf)


def reference(name, num_replicas, max_norm):
    """Norms and the state dict after the steps, in plain PyTorch."""
    model, _, kwargs = make_model(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [batches(kwargs, replica) for replica in range(num_replicas)]
    norms = []
    for step, norm_type in enumerate(NORM_TYPES):
        optimizer.zero_grad()
        for replica in range(num_replicas):
            for ids in data[replica][step].chunk(MB):
                (model(input_ids=ids, labels=ids).loss / MB / num_replicas).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type).item())
        optimizer.step()
    return norms, model.state_dict()


def train(rank, folder, world, max_norm, config, call):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": MB, "ddp": world > 2, **config})
    module, _, kwargs = make_model("gpt2")
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    norms = []
    for ids, norm_type in zip(batches(kwargs, smp.rdp_rank()), NORM_TYPES, strict=True):
        optimizer.zero_grad()
        train_step(model, feed(ids), 1.0)
        norms.append(CALLS[call](model, optimizer, max_norm, norm_type).item())
        optimizer.step()
    return norms, model.state_dict()


CALLS = {
    "torch": lambda model, optimizer, *args: torch.nn.utils.clip_grad_norm_(model.parameters(), *args),
    "by name": lambda model, optimizer, *args: imported_by_name(list(model.parameters()), *args, foreach=False),
    "local": lambda model, optimizer, *args: imported_by_name(model.local_parameters(), *args),
    "groups": lambda model, optimizer, *args: imported_by_name(
        (p for group in optimizer.param_groups for p in group["params"]), *args, error_if_nonfinite=True
    ),
    "masters": lambda model, optimizer, *args: optimizer.clip_master_grads(*args),
}
CASES = [
    ("torch", 2, 0.1, {}),
    ("by name", 4, 0.1, {"fully_shard": True}),
    pytest.param("groups", 2, 1e9, {}, marks=pytest.mark.slow),
    pytest.param("local", 4, 0.1, {}, marks=pytest.mark.slow),
    pytest.param("groups", 4, 0.1, {"shard_optimizer_state": True}, marks=pytest.mark.slow),
    pytest.param("torch", 4, 0.1, {"pipeline_parallel_degree": 4, "ddp": False}, marks=pytest.mark.slow),
    pytest.param("local", 3, 0.1, {"pipeline_parallel_degree": 3, "ddp": False}, marks=pytest.mark.slow),
]


@pytest.mark.long
@pytest.mark.parametrize(("call", "world", "max_norm", "config"), CASES)
def test_stages_are_clipped_by_the_norm_of_the_whole_model(tmp_path, call, world, max_norm, config):
    """The embedding of GPT-2 is on both stages, and counts once."""
    replicas = world // config.get("pipeline_parallel_degree", 2)
    norms, state = reference("gpt2", replicas, max_norm)
    results = run_workers(train, world, tmp_path, world, max_norm, config, call)
    found = [found for found, _ in results]
    assert found[0] == pytest.approx(norms, rel=1e-6)
    assert all(other == found[0] for other in found), "ranks would drift apart"
    for name, value in results[0][1].items():
        torch.testing.assert_close(value, state[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize("other", ["torch", "groups"])
@pytest.mark.parametrize("config", [{"fp16": True}, {"bf16": True}], ids=str)
def test_masters_are_clipped_by_torchs_call(tmp_path, config, other):
    """It clipped gradients of the loss times the loss scale, which the masters then took unscaled."""
    results = {}
    for call in ("masters", other):
        (folder := tmp_path / call).mkdir()
        results[call] = run_workers(train, 2, folder, 2, 0.1, config, call)[0]
    assert results[other][0] == results["masters"][0]
    assert all(torch.equal(value, results["masters"][1][name]) for name, value in results[other][1].items())


class Slices(nn.Module):
    """A layer that tensor parallelism splits between ones that every rank has whole."""

    def __init__(self, has_modules):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        with smp.tensor_parallelism(has_modules):
            self.up = nn.Linear(16, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.up(self.embed(x))))


@smp.step
def square_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def train_slices(rank, folder, degree, config):
    smp.init(
        {"pipeline_parallel_degree": 1, "tensor_parallel_degree": degree, "ddp": True, "microbatches": 2, **config}
    )
    torch.manual_seed(0)
    model = smp.DistributedModel(Slices(not config))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
    norms = []
    for step, norm_type in enumerate(NORM_TYPES):
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        square_step(model, batch.chunk(smp.dp_size())[smp.dp_rank()] if not config else batch)
        norms.append(imported_by_name(model.parameters(), 0.1, norm_type).item())
        optimizer.step()
    assert degree == 1 or any(model.is_distributed_parameter(p) for p in model.parameters())
    return norms


@pytest.mark.parametrize(
    "config", [{}, {"tensor_parallel_plan": {"up": "colwise"}, "prescaled_batch": True}], ids=["modules", "compiled"]
)
def test_slices_are_clipped_by_the_norm_of_the_whole_model(tmp_path, config):
    found = {}
    for degree in (1, 2):
        (folder := tmp_path / str(degree)).mkdir()
        found[degree] = run_workers(train_slices, degree, folder, degree, config)
    assert found[2][0] == found[2][1]
    assert found[2][0] == pytest.approx(found[1][0], rel=1e-5)


@smp.step
def clips_inside(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss


def misuse(rank, folder, config):
    _, model, optimizer, kwargs = start(config=config)
    ids = batches(kwargs)[0]
    assert imported_by_name(model.parameters(), 1.0) == 0.0  # there is no gradient yet
    train_step(model, feed(ids), 1.0)
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    expected = torch.stack([p.grad.norm() for p in other.parameters()]).norm()
    assert torch.equal(imported_by_name(other.parameters(), 0.1), expected)  # not the model's: torch's own
    assert get_total_norm([p.grad for p in other.parameters()]) < 0.11
    with pytest.raises(UsageError, match=r"none of it, found \d+ of them among"):
        imported_by_name([*model.parameters(), *other.parameters()], 1.0)
    local = list(model.local_parameters())
    with pytest.raises(
        UsageError, match=r"get_total_norm: .*utils.clip_grad_norm_\(model.parameters\(\), float\('inf'\)\)"
    ):
        get_total_norm([p.grad for p in local])
    if config:
        optimizer.update_master_grads()
        for clip in (clip_grad_value_, lambda *args: clip_grads_with_norm_(*args, torch.ones(()))):
            with pytest.raises(UsageError, match="masters take the model's gradients without the loss scale"):
                clip(local, 0.1)
        with pytest.raises(UsageError, match=r"found \d+ too few"):
            imported_by_name(local[1:], 1.0)
    else:
        clip_grad_value_(model.parameters(), 1e-3)
        assert max(p.grad.abs().max() for p in local) <= 1e-3
    for parameter in local:
        parameter.grad.fill_(math.inf)
    with pytest.raises(RuntimeError, match="finite norm of the gradients, found inf; nothing was scaled"):
        imported_by_name(model.parameters(), 1.0, error_if_nonfinite=True)
    assert math.isinf(imported_by_name(model.parameters(), 1.0))
    smp.shutdown()
    assert not get_total_norm([p.grad for p in local]).isfinite()  # torch's own again


@pytest.mark.parametrize("config", [{}, {"fp16": True}], ids=["fp32", "fp16"])
def test_what_cannot_be_clipped_is_refused(tmp_path, config):
    assert run_workers(misuse, 2, tmp_path, config) == [None] * 2


def clip_inside(rank, folder):
    _, model, _, kwargs = start()
    with pytest.raises(StepError, match="clip_grad_norm_ was called in a step function"):
        clips_inside(model, feed(batches(kwargs)[0]))
    return train_step(model, feed(batches(kwargs)[0]), 1.0)["loss"].reduce_mean()


@pytest.mark.long
def test_clipping_in_a_step_function_is_refused(tmp_path):
    """Only the rank of the last stage runs it: it would wait for the others."""
    first, second = run_workers(clip_inside, 2, tmp_path)
    assert torch.equal(first, second)
