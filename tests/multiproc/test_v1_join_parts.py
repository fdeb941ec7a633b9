"""`model.join()` where replicas hold parts of parameters: the training of replicas that hold all of them, in the same `join`."""

import pytest
import torch
from executor_harness import run_workers
from test_v1_join import Small, data, evaluate, expected_parameters, feed, ids, small_evaluation, small_step, train
from torch import nn
from torch.utils.checkpoint import checkpoint
from v1_harness import FOR_A_MICROBATCH, FOR_THE_STEP, WHILE_RUNNING, Block, start

import smpc.v1 as smp
from smpc.errors import NonFiniteLossError, StepError, UsageError


class Deep(nn.Module):
    """Blocks, one of them called twice, one computed again, a weight that is used outside of its block, buffers, and what stays whole."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head, self.unused = nn.BatchNorm1d(6), nn.Linear(6, 2), nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        x = self.blocks[1](self.blocks[0](self.blocks[1](x)))
        x = checkpoint(self.blocks[2], x, use_reentrant=True)
        x = x + nn.functional.linear(x, self.blocks[0].up.weight).sum(1, keepdim=True)
        x = x + self.blocks[3](x).detach() if x.sum() > 0 else self.blocks[3](x)  # a backward that may not reach it
        return self.head(self.norm(x)) * self.scale


def clip(how, module, optimizer):
    if how == "a group":
        torch.nn.utils.clip_grad_norm_(module.head.parameters(), 0.01)
    elif how == "masters" and hasattr(optimizer, "clip_master_grads"):
        optimizer.clip_master_grads(0.05)
    elif how == "own" and hasattr(optimizer, "clip_master_grads"):
        smp.optimizers.clip_grad_norm_(module.parameters(), 0.05)
    else:
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)


def update(epoch, step, how, module, optimizer):
    """In the first epoch after each second step; the learning rate changes from step to step."""
    if step % 2 or epoch:
        clip(how, module, optimizer)
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)
        optimizer.step()
        optimizer.zero_grad()


def in_parts(rank, folder, case):
    config, counts, how, arguments = MODULES[case]
    smp.init({"pipeline_parallel_degree": 1, "ddp": True, "microbatches": 2, **config})
    model = smp.DistributedModel(Deep(rank).double())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.02))
    for epoch in range(2):
        with model.join(**arguments):
            for step, x in enumerate(data(rank, counts[rank])):
                with torch.no_grad():
                    small_evaluation(model, x.double())
                small_step(model, x.double())
                update(epoch, step, how, model.module, optimizer)
        optimizer.zero_grad()
    state = {name: items["exp_avg"] for name, items in optimizer.state_dict()["state"].items()}
    return model.state_dict(), state


def in_one_process(counts, how, divides_by_all):
    model = Deep(0).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for epoch in range(2):
        for step in range(max(counts)):
            batches = [data(rank, count)[step] for rank, count in enumerate(counts) if step < count]
            for x in batches:
                for part in x.double().chunk(2):
                    loss = model(part).pow(2).mean() / 2
                    (loss / (len(counts) if divides_by_all else len(batches))).backward()
            update(epoch, step, how, model, optimizer)
        optimizer.zero_grad()
    names = {id(p): name for name, p in model.named_parameters()}
    return model, {names[id(p)]: items["exp_avg"] for p, items in optimizer.state.items()}


BY_THE_REST = {"divide_by_initial_world_size": False}
MODULES = {
    "for the step": (FOR_THE_STEP, (2, 4), "torch", {}),
    "for a microbatch": (FOR_A_MICROBATCH, (4, 2), "masters", BY_THE_REST),
    "while they run": (WHILE_RUNNING, (2, 4), "own", {}),
    "while they run, by the rest": (WHILE_RUNNING, (4, 2), "a group", BY_THE_REST),
    "while they run, never": (WHILE_RUNNING, (0, 3), "torch", {}),
    "parts on two of four ranks": (WHILE_RUNNING, (1, 4, 3, 0), "torch", BY_THE_REST),
}


@pytest.mark.long
@pytest.mark.parametrize("case", MODULES)
def test_parts_of_modules(tmp_path, case):
    _, counts, how, arguments = MODULES[case]
    model, state = in_one_process(counts, how, not arguments)
    first, *others = run_workers(in_parts, len(counts), tmp_path, case)
    for other in others:
        torch.testing.assert_close(first, other, rtol=0, atol=0)
    parameters, found = first
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameters[name], parameter.detach(), rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(found, state, rtol=1e-7, atol=1e-10)


PIPELINES = {
    "one stage a rank": ((1, 3), {}),
    "two stages a rank": ((3, 1), {"virtual_pipeline_degree": 2, "schedule": "interleaved-1f1b"}),
    "split backwards, no data on the replica that would lead": ((0, 2), {"schedule": "zb-h1"}),
}


def pipelines(rank, folder, case):
    counts, config = PIPELINES[case]
    _, model, optimizer, _ = start(world=4, config={"fully_shard": True, **config})
    with model.join():
        for step in range(counts[smp.rdp_rank()]):
            batch = feed(ids(smp.rdp_rank(), step))
            evaluate(model, batch)
            train(model, batch)
            optimizer.step()
            optimizer.zero_grad()
    train(model, feed(ids(smp.rdp_rank(), 9)))
    optimizer.step()
    return model.state_dict()


@pytest.mark.long
@pytest.mark.parametrize("case", PIPELINES)
def test_parts_of_stages(tmp_path, case):
    expected = expected_parameters(PIPELINES[case][0], 1)
    for found in run_workers(pipelines, 4, tmp_path, case):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def tensor_parallel(rank, folder):
    found = []
    for config in ({}, FOR_THE_STEP):
        smp.init({"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2, "ddp": True, **config})
        torch.manual_seed(0)
        model = smp.DistributedModel(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2)))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        with model.join():
            for x in data(smp.dp_rank(), 1 + 2 * smp.rdp_rank()):
                small_step(model, x)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        found.append((model.state_dict(), optimizer.state_dict()["state"]))
        smp.shutdown()
    return found


@pytest.mark.long
def test_with_tensor_parallelism(tmp_path):
    for wholes, parts in run_workers(tensor_parallel, 4, tmp_path):
        torch.testing.assert_close(parts, wholes, rtol=1e-5, atol=1e-7)


def halves(rank, folder):
    """fp16 with a loss scale that overflows at first; the norm is asked for in between."""
    found = []
    for config in ({}, FOR_THE_STEP):
        smp.init({"pipeline_parallel_degree": 1, "ddp": True, "fp16": True, **config})
        torch.manual_seed(0)
        model = smp.DistributedModel(nn.Sequential(Block(), Block(), nn.Linear(6, 2)))
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaling = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**20, "scale_window": 2}}
        optimizer = smp.DistributedOptimizer(inner, **scaling)
        with model.join():
            for x in data(rank, 3 + 5 * rank):
                small_step(model, x)
                optimizer.update_master_grads()
                if not optimizer.overflow:
                    optimizer.clip_master_grads(0.5)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        found.append((optimizer.loss_scale, model.state_dict(), optimizer.state_dict()["state"]))
        smp.shutdown()
    return found


@pytest.mark.long
def test_loss_scales_stay_the_same(tmp_path):
    results = run_workers(halves, 2, tmp_path)
    for wholes, parts in results:
        assert wholes[0] == parts[0] < 2.0**20
        torch.testing.assert_close(parts[1:], wholes[1:], rtol=2e-3, atol=2e-4)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=0)


def halved(model, optimizer):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


@torch.no_grad()
def decayed(model, optimizer):
    model.module.layers[0].weight.data.mul_(0.9)


ENDS = {
    "other gradients": (halved, StepError, "the gradient of layers.0.weight"),
    "other parameters": (decayed, StepError, "layers.0.weight"),
    "a state dict": (lambda model, optimizer: model.state_dict(), UsageError, "all ranks in model.state_dict"),
    "the optimizer's": (
        lambda model, optimizer: optimizer.state_dict(),
        UsageError,
        "all ranks in optimizer.state_dict",
    ),
}


def ends(rank, folder, case):
    """What the script does between a step and its update, while the other replica is over."""
    act, kind, text = ENDS[case]
    smp.init({"pipeline_parallel_degree": 1, "ddp": True, **FOR_THE_STEP})
    model = smp.DistributedModel(Small(0))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    updates = []

    def loop():
        with model.join():
            for step, x in enumerate(data(rank, 1 + 2 * rank)):
                small_step(model, x)
                if step:
                    act(model, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                updates.append(step)

    with pytest.raises(kind) as caught:
        loop()
    assert rank == 0 or text in str(caught.value)
    return updates


@pytest.mark.parametrize("case", ENDS)
def test_what_replicas_without_data_cannot_follow(tmp_path, case):
    assert run_workers(ends, 2, tmp_path, case) == [[0], [0]]


def fine(rank, folder):
    """The same is as ever while all replicas have data; a loss that is not finite ends all of them."""
    smp.init({"pipeline_parallel_degree": 1, "ddp": True, **FOR_THE_STEP})
    model = smp.DistributedModel(Small(0))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with model.join():
        for x in data(rank, 2):
            small_step(model, x)
            halved(model, optimizer)
            with pytest.raises(UsageError, match="without a closure"):
                optimizer.step(lambda: None)
            optimizer.step()
            model.zero_grad()
            model.state_dict()
            smp.save_checkpoint(folder / "saved", "one", model=model, optimizer=optimizer)

    def spoilt():
        with model.join():
            for step, x in enumerate(data(rank, 1 + 2 * rank)):
                small_step(model, x * (float("nan") if step else 1))
                optimizer.step()
                model.zero_grad()

    with pytest.raises(NonFiniteLossError):
        spoilt()
    with model.join():
        for x in data(rank, 1 + 2 * rank):
            small_step(model, x)
            optimizer.step()
            model.zero_grad()  # gradients that are gone are gone on ranks that are over, too
    return model.state_dict()


def test_the_same_script_while_all_have_data(tmp_path):
    first, second = run_workers(fine, 2, tmp_path)
    assert all(torch.equal(first[name], second[name]) for name in first if "running" not in name)
    assert all(value.isfinite().all() for name, value in first.items() if "running" not in name)
