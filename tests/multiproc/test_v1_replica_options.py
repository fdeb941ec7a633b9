"""The options of replicas with a pipeline, two stages that share a parameter, and microbatches: against plain PyTorch."""

import pytest
import torch
import torch.distributed as dist
import zoo
from executor_harness import run_workers

import smpc.v1 as smp

MB = 2
# what DistributedModel gets, and what gradients are multiplied by
OPTIONS = {
    "the default": ({}, 1),
    "at the end": ({"overlapping_allreduce": False}, 1),
    "summed over microbatches": ({"average_grads_across_microbatches": False}, MB),
    "small buckets": ({"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True, "broadcast_buffers": False}, 1),
    "a hook": (
        {"hook": True},
        4 * MB,
    ),  # it adds up, where the default averages over replicas and microbatches, and doubles
}


def summed_and_doubled(group, bucket):
    flat = bucket.buffer() * 2
    dist.all_reduce(flat, group=group)
    future = torch.futures.Future()
    future.set_result(flat)
    return future


@smp.step
def train_step(model, tokens):
    loss = model(tokens).square().mean()
    model.backward(loss)
    return loss


def tokens(replica):
    return torch.randint(0, zoo.VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(replica))


def train(rank, folder):
    found = []
    for options, _ in OPTIONS.values():
        options = dict(options)
        hook = options.pop("hook", False)
        smp.init({"pipeline_parallel_degree": 2, "microbatches": MB, "ddp": True})
        module, _ = zoo.build("tied")
        model = smp.DistributedModel(module, **options)
        if hook:
            model.register_comm_hook(smp.get_dp_process_group(), summed_and_doubled)
        train_step(model, tokens(smp.rdp_rank()))
        found.append({name: parameter.grad for name, parameter in model.local_named_parameters()})
        smp.shutdown()
    return found


@pytest.mark.long
def test_gradients(tmp_path):
    results = run_workers(train, 4, tmp_path)
    module, _ = zoo.build("tied")
    for replica in range(2):
        for part in tokens(replica).chunk(MB):
            (module(part).square().mean() / MB / 2).backward()
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    holders = {name: [r for r, result in enumerate(results) if name in result[0]] for name in expected}
    assert [0, 1, 2, 3] in holders.values()  # a parameter of both stages
    assert all(holders.values())
    for index, (case, (_, factor)) in enumerate(OPTIONS.items()):
        for name, ranks in holders.items():
            for rank in ranks:
                gradient = results[rank][index][name]
                message = f"{case}: {name} on rank {rank}"
                torch.testing.assert_close(gradient, expected[name] * factor, rtol=1e-5, atol=1e-8, msg=message)
