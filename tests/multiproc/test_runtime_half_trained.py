"""Scripts that run `smpc.Runtime`: what other ranks have trained is an error, and no weight of before training."""

import copy
import gc
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from executor_harness import run_workers
from torch import nn
from torch.optim.swa_utils import AveragedModel

import smpc
from smpc.checkpoint import module_content
from smpc.errors import PeerError, UsageError
from smpc.executor.transport.gloo import GlooTransport
from smpc.runtime import Runtime

X = torch.arange(24.0).view(4, 6) / 24


class Model(nn.Module):
    """Two layers with running statistics, and one that nothing uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.second, self.unused = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(3, 3)
        self.last = nn.Linear(8, 6)

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.norm(self.first(x))))))


class Script:
    """One rank's loop; `gather` as the documents have it."""

    def __init__(self, rank):
        self.model, self.rank = Model(), rank
        compilation = smpc.compile_model(self.model, X, pipeline_parallel_degree=2, microbatches=2)
        self.runtime = Runtime(self.model, rank=rank, transport=GlooTransport(dist.group.WORLD))
        self.program = self.runtime.install(compilation)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def run(self, training):
        found = {}

        def on_output(microbatch, output):
            found[microbatch] = output.detach()
            return [(output.square().mean() / 2, None)] if training else None

        parts = [((part,), {}) for part in X.chunk(2)] if self.rank == 0 else None
        self.runtime.run(self.program, parts, on_output, training=training)
        return found

    def step(self):
        self.optimizer.zero_grad()
        self.run(training=True)
        self.optimizer.step()

    def gather(self):
        own = {name: value for stage in self.runtime.stages.values() for name, value in stage.state_dict().items()}
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, own)
        return {name: value for state in states for name, value in state.items()}

    def others(self):
        own = {id(p) for stage in self.runtime.stages.values() for p in stage.parameters()}
        return [p for p in self.model.parameters() if id(p) not in own]


def plain(steps):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        for part in X.chunk(2):
            (model(part).square().mean() / 2).backward()
        optimizer.step()
    return model


def twice(x: torch.Tensor):
    return x * 2


def refused(script, shadow, folder):
    """Lines that need values of other ranks."""
    model, other, real = script.model, script.others()[0], torch.ones(2)
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    with pytest.warns(DeprecationWarning, match="deprecated"):
        scripted = torch.jit.script(twice)
    return [
        lambda: model(X),
        lambda: sum(p.norm() for p in model.parameters()),
        lambda: sum(p.sum() for p in model.state_dict(keep_vars=True).values()),
        lambda: torch._foreach_norm(list(model.parameters())),
        lambda: nn.utils.parameters_to_vector(model.parameters()),
        lambda: [ours.lerp_(p, 0.5) for ours, p in zip(shadow.parameters(), model.parameters(), strict=True)],
        lambda: [ours.mul_(0.9).add_(p.data) for ours, p in zip(shadow.parameters(), model.parameters(), strict=True)],
        lambda: torch._foreach_lerp_(list(shadow.parameters()), list(model.parameters()), 0.5),
        lambda: AveragedModel(shadow).update_parameters(model) or AveragedModel(shadow).update_parameters(model),
        lambda: sum(b.sum() for b in buffers),
        lambda: other.detach().cpu().numpy(),
        lambda: other.data.tolist(),
        lambda: dist.all_reduce(other.data),
        lambda: dist.all_gather([torch.empty_like(real) for _ in range(2)], other),
        lambda: dist.all_gather_into_tensor(torch.empty(2 * other.numel()), other.data.view(-1)),
        lambda: dist.reduce_scatter_tensor(real, other),
        lambda: scripted(other),
        lambda: scripted(x=other),
        lambda: other.data_ptr(),
        lambda: real.copy_(other.data[0]),
        lambda: torch.save(dict(model.named_parameters()), folder / "parameters.pt"),
        lambda: pickle.dumps(model),
        lambda: torch.save(copy.deepcopy(model).state_dict(), folder / "state.pt"),
        lambda: module_content(model),
        lambda: model.state_dict(),
    ]


def script(rank, folder):
    job = Script(rank)
    model, shadow = job.model, copy.deepcopy(job.model).requires_grad_(False)
    assert torch.isfinite(model.eval()(X)).all()  # nothing has been trained
    model.train()
    job.run(training=False)
    assert torch.isfinite(sum(p.norm() for p in model.parameters()))
    with torch.no_grad():
        for buffer, start in zip(model.buffers(), Model().buffers(), strict=True):
            buffer.copy_(start)  # the evaluation has updated running statistics in training mode
    for _ in range(2):
        job.step()
        model.eval()
        with torch.no_grad():
            for number, line in enumerate(refused(job, shadow, folder)):
                with pytest.raises(UsageError, match=r"other ranks|on pipeline rank|load_state_dict"):
                    print(number, line())
        model.train()
    model.eval()
    with pytest.raises(
        UsageError, match=rf"on pipeline rank {1 - rank}, and pipeline rank {rank} has its values of befor"
    ):
        model(X)
    with pytest.warns(UserWarning, match="add up the squares of all ranks"):
        assert job.others()[0].grad is None
    model.train()
    untouched(job)
    expected = plain(2)
    evaluates(job, expected)
    reset(job)
    return job


def untouched(job):
    """What does not depend on values is as in one process."""
    model, other = job.model, job.others()[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in Model().parameters())
        assert torch.zeros_like(other).shape == other.shape
        assert isinstance(other, nn.Parameter)
        model.to("cpu").float()
        model.zero_grad()
        repr(model)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        smpc.compile_model(model, X[:2], pipeline_parallel_degree=2, microbatches=1)


def evaluates(job, expected):
    """By the runtime; by what all ranks have gathered; in a copy."""
    model = job.model
    model.eval()
    compilation = smpc.compile_model(model, X, pipeline_parallel_degree=2, microbatches=2)
    job.program = job.runtime.install(compilation)
    outputs = job.run(training=False)
    model.train()
    job.program = 0
    copied = copy.deepcopy(model)
    whole = job.gather()
    for each in (model, copied):
        each.load_state_dict(whole)
        torch.testing.assert_close(dict(each.state_dict()), dict(expected.state_dict()))
        torch.testing.assert_close(each.eval()(X), expected.eval()(X))
        each.train()
    for microbatch, output in outputs.items():
        torch.testing.assert_close(output, expected(X.chunk(2)[microbatch]))
    job.step()
    with pytest.raises(UsageError, match="on pipeline rank"):
        model.eval()(X)
    model.train()
    torch.testing.assert_close(job.gather(), dict(plain(3).state_dict()))


def reset(job):
    """Whoever fills all of a tensor has all of it; and a model stays half trained when its runtime is gone."""
    model, other = job.model, job.others()[0]
    with torch.no_grad():
        other[0] = 1.0
        with pytest.raises(UsageError, match="on pipeline rank"):
            other.sum()
        nn.init.constant_(other, 2.0)
        assert torch.equal(other, torch.full_like(other, 2.0))
    job.step()
    other.data = torch.full(other.shape, 3.0)
    assert other.mean() == 3
    job.step()
    del job.runtime
    gc.collect()
    with pytest.raises(UsageError, match="on pipeline rank"):
        model(X)


def checked(rank, folder):
    script(rank, folder)
    return True


def test_weights_of_before_training_are_an_error(tmp_path):
    """`model(x)`, norms and averages over all parameters had other ranks' initial weights, without a word."""
    assert run_workers(checked, 2, tmp_path) == [True] * 2


def with_other_stages(model):
    return smpc.compile_model(
        model, X, pipeline_parallel_degree=2, microbatches=2, virtual_pipeline_degree=2, schedule="interleaved-1f1b"
    )


def moved(rank, folder):
    """What a rank says of a program with other stages after a step."""
    job = Script(rank)
    other = with_other_stages(job.model)
    job.step()
    try:
        job.runtime.install(other)
    except UsageError as error:
        return str(error)
    return ""


def test_a_program_that_moves_trained_parameters_is_refused(tmp_path):
    """It trained them from their values of before, without a word."""
    assert any("other ranks have trained" in said for said in run_workers(moved, 2, tmp_path))


def switched(rank, folder, training):
    """What a rank says when a program with other stages, made before training, runs after steps of the first one."""
    job = Script(rank)
    second = job.runtime.install(with_other_stages(job.model))
    job.step()
    job.model.load_state_dict(job.gather())
    job.program, expected = second, plain(1)
    for microbatch, output in job.run(training=False).items():
        torch.testing.assert_close(output, expected(X.chunk(2)[microbatch]))
    job.program = 0
    job.step()
    job.program = second
    try:
        job.run(training)
    except (UsageError, PeerError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("training", [True, False])
def test_a_program_made_before_training_needs_what_other_ranks_have_trained(training, tmp_path):
    """Ranks of all programs counted as those that train: it went on from values of before the last step, without a word."""
    assert all("other ranks have trained" in said for said in run_workers(switched, 2, tmp_path, training))
