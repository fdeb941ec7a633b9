"""What other libraries and usual lines do to a DistributedModel: refused at once, with what to do."""

import copy

import pytest
import torch
import torch.distributed as dist
from executor_harness import run_workers
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from v1_harness import batches, feed, start, train_step

import smpc.v1 as smp
from smpc.errors import StepError, UsageError


class Trainer:
    """What the Trainer of Hugging Face does first with a model; it is not to be had without accelerate."""

    def __init__(self, model):
        if getattr(model, "hf_device_map", None) is not None:
            self.devices = set(model.hf_device_map.values())


class Accelerator:
    """What accelerate's does first with a model."""

    def prepare(self, model):
        return model if getattr(model, "_is_accelerate_prepared", False) else DistributedDataParallel(model)


def wrap(rank, folder):
    _, model, optimizer, kwargs = start()
    lines = {
        r"accelerate.prepare\(DistributedModel\): .* prepare the data loaders alone": lambda: Accelerator().prepare(
            model
        ),
        r"Trainer\(model=DistributedModel\): .* write the loop with @smp.step": lambda: Trainer(model),
        r"DistributedDataParallel\(DistributedModel\): .* leave the wrapper out": lambda: DistributedDataParallel(
            model
        ),
        r"copy.deepcopy\(DistributedModel\): .* model.local_named_parameters\(\)": lambda: copy.deepcopy(model),
        "deepcopy": lambda: AveragedModel(model),
        "pickle of a DistributedModel: .* smp.save_checkpoint": lambda: torch.save(model, folder / "model.pt"),
        "parameters of the DistributedModel are torch.float32, and cannot be cast": lambda: model.half(),
        "cast the module before": lambda: model.to(torch.bfloat16),
    }
    for step in range(2):
        for message, line in lines.items():
            with pytest.raises(UsageError, match=message):
                line()
        model.to("cpu").float()
        train_step(model, feed(batches(kwargs)[step]), 1.0)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(UsageError, match=r"expected smp.amp.GradScaler, .*, found torch's"):
            scaler.step(optimizer)
        optimizer.step()


@pytest.mark.long
def test_what_would_train_wrongly_is_refused_at_once(tmp_path):
    """Some hung, some averaged gradients of different stages, some dropped what they were asked for."""
    assert run_workers(wrap, 2, tmp_path) == [None] * 2


@smp.step
def differentiates(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss


def differentiate(rank, folder):
    _, model, _, kwargs = start(config={"pipeline_parallel_degree": 1})
    with pytest.raises(
        StepError, match=r"by loss.backward\(\) or torch.autograd; call model.backward\(loss\) in its place"
    ):
        differentiates(model, feed(batches(kwargs)[0]))
    assert all(p.grad is None for p in model.local_parameters())


def test_a_step_function_that_differentiates_by_itself(tmp_path):
    """Without a pipeline gradients were sums over microbatches, each replica's own, and nothing was said."""
    assert run_workers(differentiate, 1, tmp_path) == [None] * 1


def averaged(group, bucket):
    flat = bucket.buffer() / (group.size() * 2)
    dist.all_reduce(flat, group=group)
    future = torch.futures.Future()
    future.set_result(flat)
    return future


@smp.step
def hook_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)


def hooked(rank, folder, degree, has_hook):
    smp.init({"pipeline_parallel_degree": degree, "microbatches": 2, "ddp": True})
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
    if has_hook:
        model.register_comm_hook(smp.get_dp_process_group(), averaged)
    hook_step(model, torch.randn(4, 4, generator=torch.Generator().manual_seed(smp.rdp_rank())))
    return {name: p.grad for name, p in model.local_named_parameters()}


@pytest.mark.parametrize("degree", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_comm_hooks_average_over_microbatches_themselves(tmp_path, degree):
    """They got means over the microbatches, so that hooks written for SMP divided twice."""
    results = []
    for has_hook in (False, True):
        (folder := tmp_path / str(has_hook)).mkdir()
        results.append(run_workers(hooked, 2 * degree, folder, degree, has_hook))
    for plain, own in zip(*results, strict=True):
        for name, gradient in plain.items():
            torch.testing.assert_close(own[name], gradient, rtol=1e-6, atol=1e-8)
