"""`model.join()`: replicas with different numbers of batches, against torch's DistributedDataParallel.join and a plain run."""

import copy
import os
import signal

import pytest
import torch
import torch.distributed as dist
from executor_harness import Launch, run_workers
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from v1_harness import MB, WHILE_RUNNING, feed, make_model, start

import smpc.v1 as smp
from smpc.errors import NonFiniteLossError, StepError, UsageError

JOIN = {
    "the default": {},
    "by those that still train": {"divide_by_initial_world_size": False},
    "at the end": {"overlapping_allreduce": False},
    "every second step": {"backward_passes_per_step": 2},
    "own buffers": {"broadcast_buffers": False},
    "bucket views": {"gradient_as_bucket_view": True, "divide_by_initial_world_size": False},
}
COUNTS = (2, 5), (5, 2), (0, 3), (4, 4)


class Small(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.layers(x)


@smp.step
def small_step(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss


@smp.step
def small_evaluation(model, x):
    return model(x).sum()


def data(replica, count):
    generator = torch.Generator().manual_seed(100 * replica)
    return [torch.randn(4, 6, generator=generator) for _ in range(count)]


def with_smpc(rank, counts, options):
    options = dict(options)
    arguments = {key: options.pop(key) for key in list(options) if key.startswith("divide")}
    passes = options.get("backward_passes_per_step", 1)
    smp.init({"pipeline_parallel_degree": 1, "ddp": True})
    model = smp.DistributedModel(Small(rank), **options)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with model.join(**arguments):
        for i, x in enumerate(data(rank, counts[rank])):
            small_step(model, x)
            if i % passes == passes - 1:
                optimizer.step()
                optimizer.zero_grad()
    found = copy.deepcopy(model.state_dict())
    smp.shutdown()
    return found


def with_torch(rank, counts, options):
    options = dict(options)
    arguments = {key: options.pop(key) for key in list(options) if key.startswith("divide")}
    passes = options.pop("backward_passes_per_step", 1)
    options.pop("overlapping_allreduce", None)
    module = Small(rank)
    model = DistributedDataParallel(module, find_unused_parameters=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(**arguments):
        for i, x in enumerate(data(rank, counts[rank])):
            if i % passes < passes - 1:
                with model.no_sync():
                    model(x).pow(2).mean().backward()
            else:
                model(x).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return module.state_dict()


def both(rank, folder):
    found = []
    for name, options in JOIN.items():
        for counts in COUNTS if name == "the default" else COUNTS[:1]:
            found.append((name, counts, with_smpc(rank, counts, options), with_torch(rank, counts, options)))
    return found


def test_the_same_bits_as_torch(tmp_path):
    results = run_workers(both, 2, tmp_path)
    for ours, theirs in zip(*results, strict=True):
        for (name, counts, found, expected), other in ((ours, theirs[2]), (theirs, ours[2])):
            for key in expected:
                is_buffer = "running" in key or "tracked" in key
                if is_buffer and name == "every second step":
                    continue  # torch broadcasts buffers after a synchronised backward only
                assert torch.equal(found[key], expected[key]), (name, counts, key)
                assert (is_buffer and name == "own buffers") or torch.equal(found[key], other[key]), (name, counts, key)


PIPELINES = {
    "overlapping": ((1, 3), {}, {}),
    "no data on the replica that would lead": ((0, 2), {}, {"overlapping_allreduce": False}),
    "two stages on each rank": ((3, 1), {"virtual_pipeline_degree": 2, "schedule": "interleaved-1f1b"}, {}),
    "windows of two": ((2, 4), {"nan_policy": "ignore"}, {"backward_passes_per_step": 2}),
}


def ids(replica, step):
    generator = torch.Generator().manual_seed(10 * replica + step)
    return torch.randint(3, 60, (8, 12), generator=generator)


@smp.step
def train(model, batch):
    loss = model(input_ids=batch, labels=batch).loss
    model.backward(loss)
    return loss


@smp.step
def evaluate(model, batch):
    return model(input_ids=batch, labels=batch).loss


def pipelines(rank, folder, case):
    counts, config, options = PIPELINES[case]
    _, model, optimizer, _ = start(world=4, config=config, **options)
    passes = options.get("backward_passes_per_step", 1)
    with model.join():
        for step in range(counts[smp.rdp_rank()]):
            batch = feed(ids(smp.rdp_rank(), step))
            evaluate(model, batch)  # the first time it runs a program that could train, which is no step of a window
            train(model, batch)
            if step % passes == passes - 1:
                optimizer.step()
                optimizer.zero_grad()
    train(model, feed(ids(smp.rdp_rank(), 9)))  # as if nothing had been
    if passes == 1:
        optimizer.step()
    return {key: value.clone() for key, value in model.local_state_dict().items() if key != "_smp_is_partial"}


def expected_parameters(counts, passes):
    """The replicas one after another in one process."""
    model, _, _ = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def gradients(batches):
        """Of one replica, which may have none."""
        optimizer.zero_grad()
        for part in (part for batch in batches for part in batch.chunk(MB)):
            (model(input_ids=part, labels=part).loss / MB).backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad / 2 for p in model.parameters()]

    def update(batches_of_replicas):
        pairs = zip(*map(gradients, batches_of_replicas), strict=True)
        for parameter, pair in zip(model.parameters(), list(pairs), strict=True):
            parameter.grad = pair[0] + pair[1]
        optimizer.step()

    for first in range(0, max(counts), passes):
        window = range(first, first + passes)
        update([[ids(replica, step) for step in window if step < count] for replica, count in enumerate(counts)])
    if passes == 1:
        update([[ids(replica, 9)] for replica in range(2)])
    return model.state_dict()


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize("case", PIPELINES)
def test_pipelines(tmp_path, case):
    counts, _, options = PIPELINES[case]
    results = run_workers(pipelines, 4, tmp_path, case)
    expected = expected_parameters(counts, options.get("backward_passes_per_step", 1))
    for rank in range(2):
        for key, value in results[rank].items():
            assert torch.equal(value, results[rank + 2][key]), key
            assert torch.equal(value, expected[key]), key
    assert set(results[0]) | set(results[1]) == set(expected)


def words(rank, folder):
    """What is refused, and how a loop ends that does not come to its end."""
    smp.init({"pipeline_parallel_degree": 1, "ddp": True})
    model = smp.DistributedModel(Small(0))
    found = {}
    with model.join(), pytest.raises(UsageError, match="one at a time"), model.join():
        pass
    with model.join(enable=False):
        small_step(model, data(rank, 1)[0])
    steps = 0
    try:
        with model.join(throw_on_early_termination=True):
            for x in data(rank, 2 + rank):
                small_step(model, x)
                steps += 1
    except StepError as error:
        found["early"] = (steps, str(error))
    try:
        with model.join():
            for x in data(rank, 1 + 2 * rank):
                small_step(model, x * (float("nan") if steps > 3 else 1))
                steps += 1
    except NonFiniteLossError as error:
        found["nan"] = (steps, str(error))
    with model.join():
        small_step(model, data(rank, 1)[0])
    gradients = [torch.empty(6, 6) for _ in range(2)]
    dist.all_gather(gradients, model.module.layers[0].weight.grad)
    assert torch.equal(*gradients)
    return found


def test_ends_that_all_ranks_agree_on(tmp_path):
    over, active = run_workers(words, 2, tmp_path)
    assert (over["early"][0], active["early"][0]) == (2, 2)
    for found in (over, active):
        assert "replica 0 ran out of data" in found["early"][1]
    assert (over["nan"][0], active["nan"][0]) == (3, 4)  # replica 0 was over by then
    for found in (over, active):
        assert "found nan in microbatch 0 of replica 1" in found["nan"][1]


def unlike(rank, folder):
    smp.init({"pipeline_parallel_degree": 1, "ddp": True})
    model = smp.DistributedModel(Small(0))
    join = model.join(divide_by_initial_world_size=rank == 0)
    with pytest.raises(StepError, match=r"replica 0: join\(divide_by_initial_world_size=True") as caught, join:
        pass
    return str(caught.value)


def test_unlike_arguments(tmp_path):
    first, second = run_workers(unlike, 2, tmp_path)
    assert first == second


def tensor_parallel(rank, folder):
    smp.init({"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2, "ddp": True})
    torch.manual_seed(rank)
    model = smp.DistributedModel(nn.Linear(6, 2))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    with model.join():
        for x in data(smp.dp_rank(), 1 + smp.rdp_rank()):
            small_step(model, x)
            optimizer.step()
            optimizer.zero_grad()
    momentum = [items["momentum_buffer"] for items in optimizer.state.values()]
    return smp.dp_rank(), [*model.parameters(), *momentum]


def test_ranks_of_tensor_parallel_groups_average_their_own_samples(tmp_path):
    results = run_workers(tensor_parallel, 4, tmp_path)
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replicas = {0: (0, 1), 1: (2, 3)}  # data-parallel ranks: the order of the letters is DPT
    for step in range(2):
        optimizer.zero_grad()
        for replica, ranks in replicas.items():
            for rank in ranks if step <= replica else ():
                (model(data(rank, 2)[step]).pow(2).mean() / 4).backward()
        optimizer.step()
    expected = [*model.parameters(), *(items["momentum_buffer"] for items in optimizer.state.values())]
    for _, found in results:
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def ends_badly(rank, folder, how, config):
    smp.init({"pipeline_parallel_degree": 1, "ddp": True, **config})
    model = smp.DistributedModel(Small(0))
    with model.join():
        for step, x in enumerate(data(rank, 1 + 3 * rank)):
            small_step(model, x)
            if step == 1 and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 1:
                raise LookupError("no such file")


@pytest.mark.parametrize("config", [{}, WHILE_RUNNING], ids=["wholes", "parts"])
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_nobody_waits_for_a_replica_that_has_ended(tmp_path, how, config):
    """Replica 0 is over and shadows, or listens; step_timeout is half an hour."""
    (status, log), (cause, _) = Launch(ends_badly, 2, tmp_path, how, config).wait()
    assert status not in (0, "hung"), log
    assert cause == (-signal.SIGKILL if how == "killed" else 1)
    assert how == "killed" or "LookupError: no such file" in log
