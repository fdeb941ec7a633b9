"""Schedules on real gloo processes, through `smpc.Runtime` and through `smpc.v1`: bitwise equal to one process."""

import itertools

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from executor_harness import run_workers

import smpc.v1 as smp
from smpc.compile import compile_model
from smpc.executor.transport import GlooTransport
from smpc.runtime import Runtime

MB = 4
STEPS = 2


def train(rank, _, name, num_ranks, options):
    model, batch = zoo.build(name)
    compilation = compile_model(model, batch, pipeline_parallel_degree=num_ranks, microbatches=MB, **options)
    runtime = Runtime(model, rank=rank, transport=GlooTransport(dist.new_group()))
    program = runtime.install(compilation)
    losses = []

    def on_output(m, output):
        loss = parity.loss_of(output) / MB
        losses.append(loss.detach())
        return [(loss, None)]

    for _ in range(STEPS):
        runtime.run(program, parity.split(batch, MB) if rank == 0 else None, on_output, training=True)
    own = {p for stage in compilation.plan.stages if stage.rank == rank for p in stage.parameters}
    shared = {item.name for item in compilation.plan.shared_parameters}
    return losses, {n: p.grad for n, p in model.named_parameters() if n in own}, shared


def eager(name):
    model, batch = zoo.build(name)
    losses = []
    for _ in range(STEPS):
        for args, kwargs in parity.split(batch, MB):
            loss = parity.loss_of(model(*args, **kwargs)) / MB
            losses.append(loss.detach())
            loss.backward()
    return losses, {name: p.grad for name, p in model.named_parameters()}


SAMPLE = {("gpt2", 2, "interleaved-1f1b"), ("unet", 2, "zb-v"), ("t5", 2, "zb-h1")}


@pytest.mark.long
@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("name", "num_ranks", "schedule"),
    [
        pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow)
        for case in itertools.product(
            ("gpt2", "t5", "unet", "tied"), (2, 4), ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
        )
    ],
)
def test_two_steps_equal_eager(tmp_path, name, num_ranks, schedule):
    results = run_workers(train, num_ranks, tmp_path, name, num_ranks, {"schedule": schedule})
    losses, gradients = eager(name)
    assert torch.equal(torch.stack(next(found for found, *_ in results if found)), torch.stack(losses))
    seen = set()
    for _, own, shared in results:
        for parameter, gradient in own.items():
            seen.add(parameter)
            if parameter in shared:
                error = (gradient - gradients[parameter]).abs().max()
                assert error <= 1e-6 * gradients[parameter].abs().max(), parameter
            else:
                assert torch.equal(gradient, gradients[parameter]), parameter
    assert seen == set(gradients)


@smp.step
def train_step(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


def script(rank, _, world, options):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": MB, "ddp": world > 2, **options})
    model = smp.DistributedModel(zoo.build("gpt2")[0])
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for ids in batches(smp.rdp_rank()):
        optimizer.zero_grad()
        losses.append(train_step(model, ids).outputs)
        optimizer.step()
    return losses, model.state_dict()


def batches(replica):
    generator = torch.Generator().manual_seed(replica)
    return [torch.randint(3, zoo.VOCABULARY, (zoo.BATCH, zoo.LENGTH), generator=generator) for _ in range(STEPS)]


def plain(num_replicas):
    """The same training in one process, the gradients of the replicas averaged."""
    model = zoo.build("gpt2")[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [[] for _ in range(num_replicas)]
    for step in range(STEPS):
        shares = []
        for replica in range(num_replicas):
            optimizer.zero_grad()
            parts = [model(input_ids=ids, labels=ids).loss for ids in batches(replica)[step].chunk(MB)]
            for loss in parts:
                (loss / MB).backward()
            losses[replica].append([loss.detach() for loss in parts])
            shares.append([p.grad / num_replicas for p in model.parameters()])
        for parameter, *grads in zip(model.parameters(), *shares, strict=True):
            parameter.grad = sum(grads[1:], grads[0])
        optimizer.step()
    return losses, model.state_dict()


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"virtual_pipeline_degree": 2}),
        (2, {"schedule": "zb-v"}),
        pytest.param(4, {"schedule": "zb-h1"}, marks=pytest.mark.slow),
        pytest.param(4, {"schedule": "zb-v"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_scripts_choose_schedules(tmp_path, world, options):
    results = run_workers(script, world, tmp_path, world, options)
    losses, state = plain(world // 2)
    for rank, (found, found_state) in enumerate(results):
        for ours, theirs in zip(found, losses[rank // 2], strict=True):
            assert torch.equal(torch.stack(list(ours)), torch.stack(theirs)), rank
        for key, value in state.items():
            assert torch.equal(found_state[key], value), (rank, key)
