"""Two stages times two replicas in four gloo processes, against an eager run of both replicas."""

import pytest
import torch
import torch.distributed as dist
from executor_harness import MB, Stage, layer, microbatches, run_workers, two_stage_program
from torch import nn

from smpc.executor import Interpreter, StageReplicas
from smpc.executor.transport import GlooTransport

# global rank = 2 * replica + pipeline rank

OPTIONS = {  # and the steps at whose ends gradients are averaged
    "overlapping": ({}, (0, 1)),
    "at the end": ({"overlapping": False, "bucket_cap_mb": 1}, (0, 1)),
    "bucket views": ({"gradient_as_bucket_view": True}, (0, 1)),
    "every second step": ({"backward_passes_per_step": 2}, (1,)),
}


def groups(rank):
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return pipelines[rank // 2], replicas[rank % 2]


class Spare(Stage):
    """With parameters that are never used, used in the first microbatch alone, used on replica 1 alone."""

    def __init__(self, function, seed):
        super().__init__(function, seed)
        self.unused = nn.Parameter(torch.ones(8))
        self.at_first = nn.Parameter(torch.ones(8))
        self.by_one = nn.Parameter(torch.ones(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.replica = 0

    def forward(self, *inputs):
        self.calls += 1
        (h,) = super().forward(*inputs)
        if self.calls % MB == 1:
            h = h * self.at_first
        if self.replica == 1:
            h = h * self.by_one
        return (h,)


def loss(outputs):
    return outputs[0].square().mean() / MB


def train(rank, _):
    """The gradients for each of OPTIONS."""
    replica, position = divmod(rank, 2)
    pipeline, replicas = groups(rank)
    transport = GlooTransport(pipeline)
    found = []
    for options, _ in OPTIONS.values():
        stage = Spare(layer, 10 * rank)  # other weights in replica 1: construction replaces them
        hooks = StageReplicas({position: stage}, replicas, **options)
        stage.replica = replica
        interpreter = Interpreter(two_stage_program(position), {position: stage}, transport, hooks=hooks)
        for step in range(2):
            inputs = microbatches(2 * step + replica) if position == 0 else None
            interpreter.run(inputs, lambda m, outputs: [(loss(outputs), None)])
        found.append({name: p.grad for name, p in stage.named_parameters()})
    return found


def eager(averaged_steps):
    """Gradients of two replicas of two stages, averaged after each of `averaged_steps`."""
    models = [[Spare(layer, 0), Spare(layer, 10)] for _ in range(2)]
    for step in range(2):
        for replica, stages in enumerate(models):
            for stage in stages:
                stage.replica = replica
            for data in microbatches(2 * step + replica):
                loss(stages[1](*stages[0](data["x"]))).backward()
        if step in averaged_steps:
            for stages in zip(*models, strict=True):
                for pair in zip(*(stage.parameters() for stage in stages), strict=True):
                    grads = [p.grad for p in pair]
                    if any(grad is not None for grad in grads):
                        halves = [torch.zeros_like(p) if p.grad is None else p.grad / 2 for p in pair]
                        for parameter in pair:
                            parameter.grad = halves[0] + halves[1]
    return models[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run_workers(train, 4, tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize("case", OPTIONS)
def test_gradients_are_averaged(trained, case):
    _, averaged_steps = OPTIONS[case]
    found = [gradients[list(OPTIONS).index(case)] for gradients in trained]
    for position, stage in enumerate(eager(averaged_steps)):
        for name, parameter in stage.named_parameters():
            pair = [found[position][name], found[2 + position][name]]
            if parameter.grad is None:
                assert pair == [None, None], name
            else:
                assert torch.equal(pair[0], parameter.grad), name
                assert torch.equal(pair[1], parameter.grad), name
        assert stage.unused.grad is None


class Counter(nn.Module):
    """No parameters; a buffer that differs on the replicas."""

    def __init__(self, replica):
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0 + replica))

    def forward(self, h):
        return (h * self.scale,)


def unreached(rank, _):
    """The first stage has no parameters; replica 1 never does a backward."""
    replica, position = divmod(rank, 2)
    pipeline, replicas = groups(rank)
    stage = Counter(replica) if position == 0 else Stage(layer, 1)
    hooks = StageReplicas({position: stage}, replicas)
    if replica == 1 and position == 0:
        stage.scale.fill_(7)  # broadcast again at the start of the step
    interpreter = Interpreter(two_stage_program(position), {position: stage}, GlooTransport(pipeline), hooks=hooks)
    inputs = microbatches(0) if position == 0 else None
    interpreter.run(inputs, lambda m, outputs: [(loss(outputs), None)] if replica == 0 else None)
    interpreter.run(inputs, lambda m, outputs: None)
    return stage.linear.weight.grad if position == 1 else stage.scale


def test_replicas_without_backward_or_parameters(tmp_path):
    found = run_workers(unreached, 4, tmp_path)
    assert found[0] == found[2] == 2
    stage = Stage(layer, 1)
    for data in microbatches(0):
        loss(stage(data["x"] * 2)).backward()
    assert torch.equal(found[1], found[3])
    torch.testing.assert_close(found[1], stage.linear.weight.grad / 2)
