"""Scripts that run `smpc.Runtime`: optimizers and norms that look at all parameters are refused where other ranks have some."""

import copy
import gc
import pickle

import pytest
import torch
from executor_harness import run_workers
from torch import nn

import smpc
from smpc.errors import ConfigError, UsageError
from smpc.executor.transport.gloo import GlooTransport
from smpc.runtime import Runtime


class ByOneNorm(torch.optim.SGD):
    """Divides by the norm of all gradients that it sees."""

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([each.norm() for each in gradients]).norm()
        for each in gradients:
            each /= norm
        return super().step(closure)


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(4, 6)


def tried(rank, folder):
    model, x = made()
    compilation = smpc.compile_model(model, x, pipeline_parallel_degree=2, microbatches=2)
    runtime = Runtime(model, rank=rank, transport=GlooTransport(torch.distributed.group.WORLD))
    number = runtime.install(compilation)
    runtime.run(
        number,
        [((part,), {}) for part in x.chunk(2)] if rank == 0 else None,
        (lambda microbatch, output: [(output.square().mean() / 2, None)]) if rank == 1 else None,
        training=True,
    )
    own = [p for stage in runtime.stages.values() for p in stage.parameters()]
    before = [p.detach().clone() for p in own]
    with pytest.raises(
        ConfigError, match="the gradient of one changes the update of another, for the stages of one rank"
    ):
        ByOneNorm(own, lr=0.1).step()
    assert all(map(torch.equal, own, before))
    gradients = [p.grad.clone() for p in own]
    with pytest.raises(ConfigError, match="clip_grad_norm_: expected all parameters whose gradients have one norm"):
        torch.nn.utils.clip_grad_norm_(own, 0.1)
    assert all(torch.equal(p.grad, kept) for p, kept in zip(own, gradients, strict=True))
    clipped_as_the_message_says(own)
    clipped = [p.grad.clone() for p in own]
    adam = torch.optim.AdamW(own, lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for refused in (scaler.unscale_, scaler.step):
        with pytest.raises(
            ConfigError, match="GradScaler: expected all parameters whose overflows skip one step, found"
        ):
            refused(adam)
    assert all(torch.equal(p.grad, kept) for p, kept in zip(own, clipped, strict=True))
    torch.amp.GradScaler("cpu", enabled=False).step(adam)
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    alone = torch.optim.SGD(other.parameters(), lr=0.1)
    scaler.scale(torch.ones(()))
    scaler.step(alone)
    ByOneNorm(other.parameters(), lr=0.1).step()  # no stage of the runtime
    return True


def clipped_as_the_message_says(own):
    total = torch.nn.utils.get_total_norm([p.grad for p in own]).square()
    torch.distributed.all_reduce(total)
    torch.nn.utils.clip_grads_with_norm_(own, 0.1, total.sqrt())
    plain, x = made()
    plain(x).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    expected = [p.grad for p in plain.parameters() if any(p.shape == each.shape for each in own)]
    torch.testing.assert_close([p.grad for p in own], expected)


def test_what_looks_at_all_parameters_is_refused(tmp_path):
    """Each rank took the norm of its own stages, without a word."""
    assert all(run_workers(tried, 2, tmp_path))


def trained_from(rank, folder, gives):
    model, x = made()
    model = nn.Sequential(*model, nn.Linear(2, 2), nn.Linear(2, 2))
    expected = copy.deepcopy(model)
    compilation = smpc.compile_model(model, x, pipeline_parallel_degree=2, microbatches=2, schedule="zb-v")
    runtime = Runtime(model, rank=rank, transport=GlooTransport(torch.distributed.group.WORLD))
    number = runtime.install(compilation)
    try:
        runtime.run(
            number,
            [((part,), {}) for part in x.chunk(2)] if rank == 0 else None,
            (lambda microbatch, output: [(output.square().mean() / 2, None)]) if rank in gives else None,
            training=True,
        )
    except UsageError as error:
        return str(error)
    except smpc.SmpcError:
        return ""
    expected(x).square().mean().backward()
    named = dict(expected.named_parameters())
    for stage in runtime.stages.values():
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, named[name].grad)
    return "trained"


def test_a_training_step_without_losses_is_refused(tmp_path):
    """Under zb-v the first rank has the last stage. A script that gave the losses on the last rank trained nothing, without a word."""
    first, last = run_workers(trained_from, 2, tmp_path, (1,))
    assert first.startswith(
        "run: expected on_output on pipeline rank 0, whose stage 3 is the last one under this schedule"
    )
    assert last == ""
    assert run_workers(trained_from, 2, tmp_path, (0, 1)) == ["trained"] * 2


def saved_from(rank, folder):
    model, x = made()
    assert model.state_dict()
    compilation = smpc.compile_model(model, x, pipeline_parallel_degree=2, microbatches=2)
    runtime = Runtime(model, rank=rank, transport=GlooTransport(torch.distributed.group.WORLD))
    number = runtime.install(compilation)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(runtime, training):
        parts = [((part,), {}) for part in x.chunk(2)] if rank == 0 else None
        runtime.run(
            number, parts, lambda _, y: [(y.square().mean() / 2, None)] if training else None, training=training
        )

    step(runtime, False)
    assert model.state_dict()  # nothing has been trained
    assert pickle.loads(pickle.dumps(model)).state_dict()
    step(runtime, True)
    optimizer.step()
    with pytest.raises(
        UsageError, match=f"state_dict: expected a model that is whole on this rank, found pipeline rank {rank}"
    ):
        nn.ModuleDict({"inner": model}).state_dict()
    with pytest.raises(UsageError, match="state_dict: expected a model that is whole on this rank"):
        torch.save(model, folder / f"whole{rank}.pt")
    assert copy.deepcopy(model).state_dict()  # to gather into
    found = {name: value for stage in runtime.stages.values() for name, value in stage.state_dict().items()}
    model.load_state_dict(found, strict=False)
    del runtime
    gc.collect()
    assert model.state_dict()
    return found


def test_the_state_of_a_model_that_is_in_part_on_other_ranks_is_refused(tmp_path):
    """Rank 0 saved the first stage's trained weights with the last stage's initial ones, without a word."""
    first, last = run_workers(saved_from, 2, tmp_path)
    plain, x = made()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(x).square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(first | last, dict(plain.state_dict()))
