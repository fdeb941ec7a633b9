"""`_fp32_grad_accumulation`: gradients of half-precision parameters add up in fp32, compared with sums made by hand."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from executor_harness import run_workers
from precision_jobs import SAMPLES, Job, batch, differences, gain_at, make_model, optimizer_of, train_step
from torch import nn

import smpc.v1 as smp
from smpc.sharding.dtensors import whole

MB, STEPS = 8, 3
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Case:
    """A job, and which of its first gradients may differ from gradients by hand; None: none, and no parameters or masters."""

    topology: tuple[int, int, int]
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    distributed: bool = False
    batches: int = 2  # to a step, each of MB microbatches
    rtol: float | None = None


def by_hand(precision, case, accumulation):
    """Gradients of the first step, and parameters and masters after three."""
    dtype = HALF[precision]
    smp.init({"pipeline_parallel_degree": 1})
    model = make_model(case.distributed).to(dtype)
    smp.shutdown()
    names, parameters = zip(*model.named_parameters(), strict=True)
    masters = [nn.Parameter(p.detach().float()) for p in parameters]
    optimizer = optimizer_of(masters)
    first, replicas = None, case.topology[1] * case.topology[2]
    for step in range(STEPS):
        sums = [torch.zeros_like(p, dtype=accumulation) for p in parameters]
        for number in range(2 * step, 2 * step + case.batches):
            own = [add_batch(model, sums, number, replica, accumulation) for replica in range(replicas)]
            shares = zip(*([grad / replicas for grad in grads] for grads in own), strict=True)
            sums = [sum(each[1:], each[0]) for each in shares]
        first = first or dict(zip(names, sums, strict=True))
        for master, grad in zip(masters, sums, strict=True):
            master.grad = grad.float()
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
    return first, model.state_dict(), dict(zip(names, masters, strict=True))


def add_batch(model, sums, number, replica, accumulation):
    """Sums with the gradients of a batch, which are half-precision for each microbatch."""
    x, targets = batch(number, replica)
    parameters = list(model.parameters())
    dtype = parameters[0].dtype
    for part, gain, target in zip(x.chunk(MB), gain_at(number).chunk(MB), targets.chunk(MB), strict=True):
        loss = nn.functional.cross_entropy(model(part.to(dtype), gain.to(dtype)).float(), target)
        grads = torch.autograd.grad(loss / MB, parameters)
        assert {grad.dtype for grad in grads} == {dtype}
        sums = [total + grad.to(accumulation) for total, grad in zip(sums, grads, strict=True)]
    return sums


def train(rank, folder, precision, cases):
    found = []
    for case in cases:
        config = {precision: True, "_fp32_grad_accumulation": True, "microbatches": MB, **case.config}
        job = Job(case.topology, config, distributed=case.distributed, model_options=case.options)
        first = None
        for step in range(STEPS):
            job.forward_backward(2 * step)
            if step == 0:
                job.optimizer.zero_grad(set_to_none=False)
                train_more(job, 0)
            if case.batches == 2:
                train_more(job, 2 * step + 1)
            held = dict(job.model.local_named_parameters())
            assert {parameter.dtype for parameter in held.values()} == {HALF[precision]}
            assert {parameter.grad.dtype for parameter in held.values()} == {torch.float32}
            slices = [
                name for name, p in held.items() if case.topology[1] > 1 and job.model.is_distributed_parameter(p)
            ]
            first = first or {name: whole(held[name].grad).clone() for name in held if name not in slices}
            assert float(job.optimizer.clip_master_grads(1e9)) > 0
            job.optimizer.step()
        optimizer = job.optimizer.state_dict()["state"]
        masters = {name: items["master"].clone() for name, items in optimizer.items()}
        found.append((first, {key: value.clone() for key, value in job.model.state_dict().items()}, masters))
        smp.shutdown()
    return found


def train_more(job, number):
    """Another batch, without clearing gradients."""
    x, targets = batch(number, smp.dp_rank())
    train_step(job.model, x, gain_at(number), targets)


def check(folder, precision, *cases):
    results = run_workers(train, math.prod(cases[0].topology), folder, precision, cases)
    for case in cases:
        expected = by_hand(precision, case, torch.float32)
        assert differences(by_hand(precision, case, HALF[precision])[2], expected[2])  # so that it matters
        for found in results:
            grads, parameters, masters = found.pop(0)
            if case.rtol is None:
                assert [name for name in grads if not torch.equal(grads[name], expected[0][name])] == [], case
                assert differences(parameters, expected[1]) == []
                assert differences(masters, expected[2]) == []
            for name, grad in grads.items():
                largest = float(expected[0][name].abs().max())
                torch.testing.assert_close(grad, expected[0][name], rtol=0, atol=(case.rtol or 0) * largest)


@pytest.mark.parametrize("precision", [pytest.param("fp16", marks=pytest.mark.slow), "bf16"])
def test_sums_of_microbatches_and_batches_are_those_by_hand(tmp_path, precision):
    check(tmp_path, precision, Case((1, 1, 1)))


@pytest.mark.long
def test_in_a_pipeline(tmp_path):
    # The ends share a weight: what both find is summed in fp32, by hand in fp16 for each microbatch.
    tied = Case((2, 1, 1), distributed=True, rtol=1e-3)
    check(tmp_path, "fp16", Case((2, 1, 1)), Case((2, 1, 1), {"schedule": "zb-h1"}), tied)


@pytest.mark.long
def test_over_replicas(tmp_path):
    views = {"overlapping_allreduce": False, "gradient_as_bucket_view": True}
    check(
        tmp_path,
        "bf16",
        Case((2, 1, 2)),
        Case((2, 1, 2), options=views),
        Case((2, 1, 2), {"shard_optimizer_state": True}),
        Case((2, 1, 2), {"fully_shard": True}, batches=1),
        Case((2, 1, 2), {"fully_shard": True}, rtol=1e-6),  # adds what each batch has averaged
    )


def test_in_parts_that_every_microbatch_averages(tmp_path):
    """Told to keep fp32 only before a step's last backward, FSDP2 averaged the first ones to bf16, which fp32 gradients refuse."""
    often = {"fully_shard": True, "sdp_param_persistence_threshold": 0}
    check(tmp_path, "bf16", Case((1, 1, 2), often, rtol=1e-6))


@smp.step
def step_without_last_backward(model, x, gain, targets, number):
    loss = nn.functional.cross_entropy(model(x, gain), targets)
    if int(number[0]) < MB - 1:
        model.backward(loss)
    return loss


def without_last_backward(rank, folder):
    found = []
    number = torch.arange(MB).repeat_interleave(SAMPLES // MB)
    for shards in (False, True):
        config = {"bf16": True, "_fp32_grad_accumulation": True, "microbatches": MB, "fully_shard": shards}
        job = Job((2, 1, 2), config)
        x, targets = batch(0, smp.dp_rank())
        step_without_last_backward(job.model, x, gain_at(0), targets, number)
        found.append({name: whole(p.grad).clone() for name, p in job.model.local_named_parameters()})
        train_more(job, 1)  # goes on
        smp.shutdown()
    return found


@pytest.mark.long
def test_a_step_whose_last_microbatch_has_no_backward(tmp_path):
    for plain, shards in run_workers(without_last_backward, 4, tmp_path):
        assert {grad.dtype for grad in plain.values()} == {torch.float32}
        assert differences(shards, plain) == []
        assert all(bool(grad.any()) for grad in plain.values())


@pytest.mark.slow
def test_over_tensor_parallel_ranks(tmp_path):
    check(tmp_path, "fp16", Case((1, 2, 1), distributed=True, rtol=5e-3))
