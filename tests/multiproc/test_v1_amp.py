"""smp.amp.GradScaler and autocast in step functions, with and without a pipeline, compared with plain PyTorch."""

import pytest
import torch
from executor_harness import run_workers
from precision_jobs import MB, Job, batch, differences, gain_at, make_model, optimizer_of
from precision_jobs import train_step as unscaled_step
from torch import nn

import smpc.v1 as smp
from smpc.errors import ConfigError, NonFiniteLossError, StepError

STEPS, HUGE = 9, (3, 4)
OPTIONS = {"init_scale": 2.0**20, "growth_interval": 2}


@smp.step
def train_step(model, scaler, x, gain, targets, dtype):
    with torch.autocast("cpu", dtype):
        output = model(x, gain)
        loss = nn.functional.cross_entropy(output.float(), targets)
    assert (output.dtype is dtype) == (gain.dtype is dtype)
    model.backward(scaler.scale(loss))
    return loss


@smp.step
def evaluate(model, x, gain):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x, gain)


def with_torch(dtype):
    smp.init({"pipeline_parallel_degree": 1})
    model = make_model()
    smp.shutdown()
    optimizer = optimizer_of(model.parameters())
    scaler = torch.amp.GradScaler("cpu", **OPTIONS)
    losses, scales = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, targets = batch(step)
        gains = (gain_at(step, HUGE) ** 2).to(dtype)
        losses.append([])
        for part, gain, target in zip(x.chunk(MB), gains.chunk(MB), targets.chunk(MB), strict=True):
            with torch.autocast("cpu", dtype):
                loss = nn.functional.cross_entropy(model(part, gain).float(), target)
            (scaler.scale(loss) / MB).backward()
            losses[-1].append(loss.detach())
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return losses, scales, model.state_dict(), scaler.state_dict()


def disagree():
    """One rank alone finds an infinite gradient: all skip, all lower the scale. Then a loss that no scale would make finite."""
    job = Job((2, 1, 1))
    scaler = smp.amp.GradScaler(init_scale=4.0)
    job.forward_backward(0)
    first = next(job.model.local_parameters())
    if smp.pp_rank() == 1:
        first.grad.view(-1)[0] = torch.inf
    before = [parameter.detach().clone() for parameter in job.model.local_parameters()]
    scaler.step(job.optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(map(torch.equal, before, job.model.local_parameters()))
    x, targets = batch(0)
    nothing = torch.full_like(gain_at(0), torch.nan)
    with pytest.raises(NonFiniteLossError, match="nan in microbatch 0"):
        unscaled_step(job.model, x, nothing, targets)  # the scaler has scaled the step before, not this one
    train_step(job.model, scaler, x, nothing, targets, torch.bfloat16)  # the scale is 2: the loss may owe it to that
    scaler.step(job.optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0
    assert all(map(torch.equal, before, job.model.local_parameters()))
    with pytest.raises(NonFiniteLossError, match="nan in microbatch 0"):
        train_step(job.model, scaler, x, nothing, targets, torch.bfloat16)
    smp.shutdown()


def scaled(rank, folder, topology, dtype):
    job = Job(topology)
    scaler = smp.amp.GradScaler(**OPTIONS)
    assert isinstance(scaler, torch.amp.GradScaler)
    losses, scales = [], []
    for step in range(STEPS):
        job.optimizer.zero_grad()
        x, targets = batch(step, smp.dp_rank())
        gain = (gain_at(step, HUGE) ** 2).to(dtype)
        losses.append(train_step(job.model, scaler, x, gain, targets, dtype).outputs)
        scaler.unscale_(job.optimizer)
        job.optimizer.clip_master_grads(1e9)
        scaler.step(job.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    state = {key: value.clone() for key, value in job.model.state_dict().items()}
    logits = evaluate(job.model, batch(0)[0], gain_at(0)).concat()
    path = str(folder.parent / f"checkpoint{topology[0]}")
    smp.save_checkpoint(path, "a", model=job.model, optimizer=job.optimizer)
    saved = scaler.state_dict()
    scaler.update(1.0)
    smp.resume_from_checkpoint(path)
    assert scaler.state_dict() == saved
    if topology[0] > 1:
        with torch.autocast("cpu", dtype), pytest.raises(StepError, match="around the step function"):
            train_step(job.model, scaler, x, gain, targets, dtype)
    smp.shutdown()
    if topology == (2, 1, 1):
        disagree()
    return losses, scales, state, saved, logits


@pytest.mark.long
@pytest.mark.parametrize("topology", [(2, 1, 1), pytest.param((1, 1, 1), marks=pytest.mark.slow)])
def test_scales_and_weights_are_those_of_torch(tmp_path, topology):
    folder = tmp_path / "ranks"
    folder.mkdir()
    losses, scales, state, scaler = with_torch(torch.float16)
    assert len(set(scales)) > 3
    assert scales[3] == scales[2] / 2  # a step that overflows whatever the scale
    found = run_workers(scaled, topology[0], folder, topology, torch.float16)
    for own_losses, own_scales, own_state, own_scaler, logits in found:
        assert own_scales == scales
        for own, expected in zip(own_losses, losses, strict=True):
            assert torch.equal(torch.stack(own).nan_to_num(), torch.stack(expected).nan_to_num())
        assert differences(own_state, state) == []
        assert own_scaler == scaler
        assert logits.dtype is torch.float32  # a bf16 output, times gains in fp32
        assert torch.equal(logits, found[0][4])


def test_misuse():
    smp.init({"pipeline_parallel_degree": 1, "fp16": True})
    with pytest.raises(ConfigError, match="fp16 has a loss scale of its own"):
        smp.amp.GradScaler()
    assert not smp.amp.GradScaler(enabled=False).is_enabled()
    smp.shutdown()
    smp.init({"pipeline_parallel_degree": 1})
    scaler = smp.amp.GradScaler(1024.0, 4.0)  # as torch.cuda.amp.GradScaler takes them
    assert (scaler.get_scale(), scaler.get_growth_factor()) == (1024.0, 4.0)
    scaler = smp.amp.GradScaler("cpu", 512.0, growth_interval=7)  # as torch.amp.GradScaler does
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (512.0, 7)
    with pytest.raises(ConfigError, match="init_scale: given twice"):
        smp.amp.GradScaler(1024.0, init_scale=2.0)
    with pytest.raises(ConfigError, match=r"unknown argument 'scale'; known are device, init_scale"):
        smp.amp.GradScaler(scale=2.0)
    with pytest.raises(ConfigError, match="expected at most 5 positional arguments, found 6"):
        smp.amp.GradScaler(1.0, 2.0, 0.5, 3, True, 1)
    with pytest.raises(ConfigError, match="init_scale above 0, found -1"):
        smp.amp.GradScaler(init_scale=-1.0)
    smp.shutdown()


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.again(self.again(self.first(x)).tanh()))


@smp.step
def uncached_step(model, x):
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        output = model(x)
    loss = output.float().square().mean()
    model.backward(loss)
    return loss


def uncached(rank, folder):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    module = Reused()
    with smp.partition(1):
        module.out = nn.Linear(16, 4)
    module.load_state_dict(Reused().state_dict())
    model = smp.DistributedModel(module)
    uncached_step(model, torch.linspace(-1, 1, 64).view(4, 16))
    found = {name: p.grad for name, p in model.local_named_parameters()}
    smp.shutdown()
    return found


def test_a_step_functions_autocast_without_a_cache_has_none(tmp_path):
    """It had one in the pipeline: a weight that is used twice was cast once."""
    plain = Reused()
    for part in torch.linspace(-1, 1, 64).view(4, 16).chunk(2):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            output = plain(part)
        (output.float().square().mean() / 2).backward()
    found = {name: grad for each in run_workers(uncached, 2, tmp_path) for name, grad in each.items()}
    for name, parameter in plain.named_parameters():
        assert torch.equal(found[name], parameter.grad), name
