"""Replicas of a model average their gradients, with a pipeline and without one."""

import copy

import pytest
import torch
import torch.distributed as dist
from executor_harness import run_workers
from torch import nn
from torch.utils.checkpoint import checkpoint
from v1_harness import (
    MB,
    batches,
    feed,
    make_model,
    start,
    train_step,
)

import smpc.v1 as smp


def replicas_with_unlike_batches(rank, folder):
    """The replicas' first batches have other lengths: both are cut as replica 0 says, and gradients are averaged."""
    _module, model, _optimizer, kwargs = start(world=4)
    ids = batches(kwargs)[0][:, : 12 - 4 * smp.rdp_rank()].contiguous()
    train_step(model, feed(ids), 1.0)
    grads = {name: parameter.grad for name, parameter in model.local_named_parameters()}
    for grad in grads.values():
        copies = [torch.empty_like(grad) for _ in range(2)]
        dist.all_gather(copies, grad, group=smp.get_dp_process_group())
        assert torch.equal(*copies)
    return grads


@pytest.mark.long
def test_replicas_with_unlike_batches(tmp_path):
    results = run_workers(replicas_with_unlike_batches, 4, tmp_path)
    grads = {}
    base, _, kwargs = make_model()
    for replica in range(2):
        model = copy.deepcopy(base)
        ids = batches(kwargs)[0][:, : 12 - 4 * replica].contiguous()
        for part in ids.chunk(MB):
            (model(input_ids=part, labels=part).loss / MB).backward()
        for name, parameter in model.named_parameters():
            grads[name] = grads[name] + parameter.grad / 2 if replica else parameter.grad / 2
    for result in results:
        for name, grad in result.items():
            torch.testing.assert_close(grad, grads[name], rtol=1e-5, atol=1e-8)


OPTIONS = [
    {},
    {"overlapping_allreduce": False, "broadcast_buffers": False},
    {"backward_passes_per_step": 2, "gradient_as_bucket_view": True, "bucket_cap_mb": 1},
    {"hook": True},
]


def halve(state, bucket):
    state.append(bucket.index())
    flat = bucket.buffer() / 2
    dist.all_reduce(flat)
    future = torch.futures.Future()
    future.set_result(flat)
    return future


@smp.step
def small_step(model, x, num_microbatches):
    loss = model(x).pow(2).mean()
    model.backward(loss / num_microbatches)
    return loss


def small_data(replica):
    generator = torch.Generator().manual_seed(replica)
    return [torch.randn(4, 6, generator=generator) for _ in range(2)]


class Small(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.layers(x)


def replicas_without_pipeline(rank, folder):
    found = []
    for options in OPTIONS:
        options = dict(options)
        hook = options.pop("hook", False)
        smp.init({"pipeline_parallel_degree": 1, "microbatches": 2, "ddp": True})
        model = smp.DistributedModel(Small(rank), **options)  # other weights: replica 0's count
        calls = []
        if hook:
            model.register_comm_hook(calls, halve)
        for x in small_data(rank):
            small_step(model, x, 2 if hook else 1)  # a hook gets sums over the microbatches
        assert bool(calls) == hook
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
        smp.shutdown()
    return found


def test_replicas_without_pipeline(tmp_path):
    results = run_workers(replicas_without_pipeline, 2, tmp_path)
    grads = []
    for replica in range(2):
        model = Small(0)
        for x in small_data(replica):
            for part in x.chunk(2):
                (model(part).pow(2).mean() / 2).backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name in grads[0]:
        expected = None if grads[0][name] is None else (grads[0][name] + grads[1][name]) / 2
        for result in results:
            for options, found in zip(OPTIONS, result, strict=True):
                if expected is None:
                    assert found[name] is None
                else:
                    torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-7, msg=f"{name} {options}")


class Reentrant(nn.Module):
    """Asks for reentrant checkpoints of a block that it uses twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda value: self.block(value).tanh(), x, use_reentrant=True)
        return self.last(x).square().mean()


def rows_of(replica):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(replica), dtype=torch.float64)


@smp.step
def reentrant_step(model, x):
    loss = model(x)
    model.backward(loss)
    return loss


def reentrant(rank, folder, within_steps):
    smp.init({"microbatches": 1, "ddp": True})
    model = smp.DistributedModel(Reentrant().double())
    if within_steps:
        reentrant_step(model, rows_of(rank))
    else:
        model(rows_of(rank)).backward()
    gradients = {name: parameter.grad for name, parameter in model.local_named_parameters()}
    smp.shutdown()
    return gradients


@pytest.mark.parametrize("within_steps", [True, False])
def test_reentrant_checkpoints(tmp_path, within_steps):
    """DistributedDataParallel counts a parameter in each backward within the backward, and raised "marked as ready twice"."""
    model = Reentrant().double()
    (sum(model(rows_of(replica)) for replica in range(2)) / 2).backward()
    for found in run_workers(reentrant, 2, tmp_path, within_steps):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-14)
