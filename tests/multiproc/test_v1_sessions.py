"""Sessions of two processes that find each other by themselves: one after another, and optimizers that differ between the ranks."""

import gc
import os
import socket
import weakref

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import smpc.v1 as smp
from smpc.errors import ConfigError, UsageError

TIMEOUT = 300.0
MB = 2


def assert_ranks_end_well(body, *arguments):
    """Run `body(rank, *arguments)` in two processes, started as by hand: rank 0 serves the store of all sessions."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.start_processes(enter, args=(port, body, arguments), nprocs=2, join=False, start_method="forkserver")
    try:
        assert any(context.join(timeout=1.0) for _ in range(int(TIMEOUT))), f"no end after {TIMEOUT} s"
    finally:
        for process in context.processes:
            process.kill()


def enter(rank, port, body, arguments):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    body(rank, *arguments)


def make_module():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


def data(step):
    return torch.randn(4 * MB, 4, generator=torch.Generator().manual_seed(step))


@smp.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def train(model, optimizer, steps=2):
    for step in range(steps):
        optimizer.zero_grad()
        train_step(model, data(step))
        optimizer.step()


def eager():
    module = make_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for x in data(step).chunk(MB):
            (module(x).square().mean() / MB).backward()
        optimizer.step()
    return module.state_dict()


def one_after_another(rank):
    """Each session trains as eager PyTorch does, whatever the degrees were before."""
    expected, stale = eager(), []
    for degrees in (
        {"pipeline_parallel_degree": 2},
        {"pipeline_parallel_degree": 1, "ddp": True},
        {"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2, "ddp": True},
        {"pipeline_parallel_degree": 2},
    ):
        smp.init({"microbatches": MB, **degrees})
        model = smp.DistributedModel(make_module())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        train(model, optimizer)
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items()), degrees
        assert smp.allgather(rank, smp.WORLD) == [0, 1]
        check_stale(stale)
        stale.append((model, optimizer))
        smp.shutdown()
        check_stale(stale)


def check_stale(models):
    for model, optimizer in models:
        with pytest.raises(
            UsageError, match=r"this smp\.DistributedModel belongs to a session that smp\.shutdown has ended"
        ):
            model(data(0))
        with pytest.raises(UsageError, match=r"construct a new smp\.DistributedModel"):
            model.state_dict()
        with pytest.raises(UsageError, match=r"this smp\.DistributedOptimizer belongs to a session"):
            optimizer.step()


def test_sessions_one_after_another():
    """The second smp.init waited for ever: torch's keys of the first one were still in the store."""
    assert_ranks_end_well(one_after_another)


def lets_go(rank):
    """Models of each kind, one after another: nothing keeps them when their session has ended."""
    gc.unfreeze()  # what tests have imported before
    replicas = {"pipeline_parallel_degree": 1, "ddp": True}
    for degrees in (
        {"pipeline_parallel_degree": 2},
        replicas,
        replicas | {"fully_shard": True},
        replicas | {"tensor_parallel_degree": 2},
        replicas | {"tensor_parallel_degree": 2, "tensor_parallel_plan": "auto", "prescaled_batch": True},
        replicas | {"context_parallel_degree": 2},
    ):
        smp.init({"microbatches": MB, **degrees})
        with smp.tensor_parallelism("tensor_parallel_degree" in degrees and "tensor_parallel_plan" not in degrees):
            module = make_module()
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        train(model, optimizer)
        seen = weakref.ref(module), weakref.ref(next(iter(model.local_parameters())))
        smp.shutdown()
        del module, model, optimizer
        gc.collect()
        assert [each() for each in seen] == [None, None], degrees


@pytest.mark.long
def test_models_are_let_go_of_after_their_session():
    """A model of tensor parallelism stayed in memory until the process ended: what fills its slices knew it."""
    assert_ranks_end_well(lets_go)


def by_class(rank, parameters):
    return (torch.optim.Adam if rank else torch.optim.SGD)(parameters, lr=0.1)


def by_rate(rank, parameters):
    return torch.optim.SGD(parameters, lr=0.1 + 0.1 * rank)


def by_order(rank, parameters):
    groups = [{"params": [p for p in parameters if p.ndim == dim], "weight_decay": 0.1 * dim} for dim in (1, 2)]
    return torch.optim.SGD(groups[::-1] if rank else groups, lr=0.1)


def by_membership(rank, parameters):
    return torch.optim.SGD(parameters[: len(parameters) - rank], lr=0.1)


def by_number(rank, parameters):
    return torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}] if rank else parameters, lr=0.1)


def alike(rank, parameters):
    return torch.optim.AdamW([{"params": parameters[:2], "lr": torch.tensor(0.2)}, {"params": parameters[2:]}], lr=0.1)


DIFFERENCES = [
    (by_class, "class: torch.optim.sgd.SGD on rank 0, torch.optim.adam.Adam on rank 1"),
    (by_rate, "group 0, lr: 0.1 on rank 0, 0.2 on rank 1"),
    (by_order, "group 0, parameter 0: 0.bias on rank 0, 0.weight on rank 1"),
    (by_membership, "group 0, parameter 7: 3.bias on rank 0, nothing on rank 1"),
    (by_number, "number of groups: 1 on rank 0, 2 on rank 1"),
    (alike, None),
]


def differing_optimizers(rank, degree, half):
    for make, says in DIFFERENCES:
        smp.init({"pipeline_parallel_degree": degree, "microbatches": MB, "ddp": True, "bf16": half})
        model = smp.DistributedModel(make_module())
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = smp.DistributedOptimizer(make(rank, list(model.parameters())))
        if says is None:
            train(model, optimizer)
        else:
            with pytest.raises(ConfigError, match="expected the same optimizer on all ranks") as caught:
                train(model, optimizer)
            assert says in str(caught.value), str(caught.value)
            held = model.local_state_dict() if degree > 1 else model.state_dict()
            names = [name for name, _ in model.named_parameters()]
            assert all(torch.equal(held[n].to(b.dtype), b) for n, b in zip(names, before, strict=True) if n in held)
        smp.barrier()  # rank 0 has not updated either
        smp.shutdown()


@pytest.mark.parametrize(("degree", "half"), [(2, False), (1, False), pytest.param(2, True, marks=pytest.mark.slow)])
def test_optimizers_that_differ_are_told_before_the_first_update(degree, half):
    """Stages trained by different rules, and nothing said so."""
    assert_ranks_end_well(differing_optimizers, degree, half)


def optimizers_that_may_differ(rank):
    """Stages may list their own parameters, once the model is cut; rates may change between steps; ranks evaluate alone."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": MB})
    model = smp.DistributedModel(make_module())
    train(model, smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)), steps=1)
    train(model, smp.DistributedOptimizer(torch.optim.SGD(model.local_parameters(), lr=0.1)))
    smp.shutdown()
    smp.init({"pipeline_parallel_degree": 1, "microbatches": MB, "ddp": True})
    model = smp.DistributedModel(make_module())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def evaluate(model, x):
        return model(x).sum()

    if rank == 0:
        evaluate(model, data(0))
    optimizer.param_groups[0]["lr"] = 0.2
    train(model, optimizer)
    smp.barrier()
    smp.shutdown()


def test_optimizers_that_may_differ():
    assert_ranks_end_well(optimizers_that_may_differ)


def created_without_the_key(rank, degrees):
    """What is made has eager's weights, is distributed where that was asked for, and trains."""
    smp.init({"microbatches": MB, "ddp": True, **degrees})
    torch.manual_seed(0)
    with smp.model_creation(tensor_parallelism=smp.tp_size() > 1):
        module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    assert not any(parameter.is_meta for parameter in module.parameters())
    model = smp.DistributedModel(module)
    made = make_module().state_dict()
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in made.items())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer)
    found = model.state_dict()
    for name, value in eager().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)
    smp.shutdown()


@pytest.mark.parametrize(
    "degrees", [{"pipeline_parallel_degree": 2}, {"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2}]
)
def test_model_creation_without_delayed_parameter_initialization(degrees):
    assert_ranks_end_well(created_without_the_key, degrees)
