"""Experts that ranks divide beside what a script may have as well: `schedule: list`, communication hooks, and several models."""

import pytest
import torch
import torch.distributed as dist
from executor_harness import run_workers
from mixtures import MB, batch_of, made, train_step
from test_v1_experts import STEPS, check, clipped, eager, init, optimizer_of
from torch import nn
from torch.nn import functional as F

import smpc.v1 as smp

SETTINGS = {"expert_parallel_degree": 2, "microbatches": MB, "ddp": True}


@pytest.mark.slow
def test_the_order_of_a_list_schedule_is_that_of_the_first_program_everywhere(tmp_path):
    """Batches of pipelines have other lengths, so that predicted times, and orders that follow them, would be others."""
    check(tmp_path, "by hand", 2, 2, 4, {"schedule": "list"})


def averaged(state, bucket):
    """Any hook: it averages over all replicas, and counts its calls."""
    state.append(bucket.index())
    work = dist.all_reduce(bucket.buffer().div_(smp.rdp_size()), group=smp.get_rdp_process_group(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def hooked(rank, folder, pp):
    init(pp, 2)
    model, calls = smp.DistributedModel(made("by hand")), []
    model.register_comm_hook(calls, averaged)
    train_step(model, batch_of(0, smp.data_rank()))
    found = {name: (p.grad, model.slices.get(name)) for name, p in model.local_named_parameters()}
    smp.shutdown()
    return found, len(calls)


@pytest.mark.parametrize(("pp", "world"), [(1, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_a_communication_hook_averages_what_is_no_expert(tmp_path, pp, world):
    """Gradients are not divided by the number of microbatches then, experts' as little as others."""
    expected = eager("by hand", 2)[2]
    for found, num_calls in run_workers(hooked, world, tmp_path, pp):
        assert num_calls
        for name, (gradient, shard) in found.items():
            whole = expected[name] * MB
            own = whole if shard is None else whole.narrow(0, shard.start, gradient.shape[0])
            torch.testing.assert_close(gradient, own, rtol=1e-5, atol=1e-7)


class Judge(nn.Module):
    """A second model, without experts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.net = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, logits):
        return self.net(logits)


@smp.step
def judge(model, logits):
    loss = model(logits).square().mean()
    model.backward(loss)
    return loss


@smp.step
def teach(model, batch):
    output = model(**batch)
    model.backward(output.loss)
    return output.loss, output["logits"]


@smp.step
def learn(model, batch, target):
    loss = F.mse_loss(model(**batch)["logits"], target)
    model.backward(loss)
    return loss


NAMES = ("by hand", "listed")


def several(rank, folder, pp):
    """Two mixtures, one of which learns from the other, and a model without experts; losses and norms of each step."""
    smp.init({**SETTINGS, "pipeline_parallel_degree": pp})
    models = [smp.DistributedModel(module) for module in (*map(made, NAMES), Judge())]
    optimizers = [smp.DistributedOptimizer(optimizer_of(model.parameters())) for model in models]
    found = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        batch = batch_of(step, smp.data_rank())
        loss, logits = teach(models[0], batch)
        losses = [loss, learn(models[1], batch, logits.concat().detach()), judge(models[2], logits.concat().detach())]
        found.append([torch.stack(smp.allgather(loss.reduce_mean(), smp.WORLD)).mean().item() for loss in losses])
        found[-1] += [clipped(model.parameters()).item() for model in models]
        for optimizer in optimizers:
            optimizer.step()
    states = [model.state_dict() for model in models]
    smp.shutdown()
    return found, states


def several_in_one_process(parts):
    models = [*map(made, NAMES), Judge()]
    optimizers = [optimizer_of(model.parameters()) for model in models]
    found = []
    for step in range(STEPS):
        totals = [0.0, 0.0, 0.0]
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in range(parts):
            whole = batch_of(step, part)
            for index in range(MB):
                batch = {key: value.chunk(MB)[index] for key, value in whole.items()}
                output = models[0](**batch)
                target = output["logits"].detach()
                losses = [
                    output.loss,
                    F.mse_loss(models[1](**batch)["logits"], target),
                    models[2](target).square().mean(),
                ]
                for place, loss in enumerate(losses):
                    (loss / MB / parts).backward()
                    totals[place] += loss.item() / MB / parts
        found.append(totals + [clipped(model.parameters()).item() for model in models])
        for optimizer in optimizers:
            optimizer.step()
    return found, [dict(model.named_parameters()) for model in models]


@pytest.mark.parametrize(("pp", "world"), [(1, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_several_models_divide_their_experts(tmp_path, pp, world):
    expected, weights = several_in_one_process(2)
    for found, states in run_workers(several, world, tmp_path, pp):
        for own, whole in zip(found, expected, strict=True):
            assert own == pytest.approx(whole, rel=1e-5)
        for state, weight in zip(states, weights, strict=True):
            for name, value in weight.items():
                torch.testing.assert_close(state[name], value.detach(), rtol=1e-4, atol=2e-5)
