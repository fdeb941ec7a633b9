"""Two gloo processes against an eager run over the same microbatches: bitwise."""

import torch
import torch.distributed as dist
from executor_harness import MB, Stage, layer, microbatches, run_workers, two_stage_program
from torch import nn

from smpc.compile import compile_model
from smpc.executor import Interpreter
from smpc.executor.measure.spans import LiveBytes
from smpc.executor.transport import GlooTransport, WireFormat
from smpc.runtime import Runtime
from smpc.tracer.ir import TensorSpec

VALUES = {
    "t": TensorSpec((8, 3), "float32", (1, 8), True),
    "wide": TensorSpec((3, 5), "float32", (1, 0), True),
    "mask": TensorSpec((3, 8), "bool", (8, 1)),
    "whole": TensorSpec((3, 8), "int64", (8, 1)),
    "scalar": TensorSpec((), "float32", (), True),
    "empty": TensorSpec((3, 0), "float32", (8, 1), True),
    "small": TensorSpec((3, 8), "bfloat16", (8, 1), True),
    "half": TensorSpec((3, 8), "float16", (8, 1), True),
    "unused": TensorSpec((3, 8), "float32", (8, 1), True),
}


def first(self, x):
    h = self.linear(x)
    wide = h.sum(1, keepdim=True).expand(3, 5)
    return h.t(), wide, x > 0, (x * 10).long(), h.sum(), h[:, :0], h.bfloat16(), h.half(), h * 2


def second(self, t, wide, mask, whole, scalar, empty, small, half, unused):
    wide = wide.contiguous()  # as it arrives
    return (self.linear(t.t() * mask) * whole + wide.sum() * scalar + empty.sum() + small.float() + half.float(),)


def loss(outputs):
    return outputs[0].square().mean() / MB


def train(rank, _):
    stage = Stage((first, second)[rank], rank)
    program = two_stage_program(rank, VALUES)
    interpreter = Interpreter(program, {rank: stage}, GlooTransport(dist.new_group()))
    losses = []

    def on_output(m, outputs):
        losses.append(loss(outputs).detach())
        return [(loss(outputs), None)]

    for step in range(3):
        interpreter.run(microbatches(step) if rank == 0 else None, on_output)
    return losses, {name: p.grad for name, p in stage.named_parameters()}


def test_three_steps_equal_eager(tmp_path):
    found = run_workers(train, 2, tmp_path)
    stages = [Stage(first, 0), Stage(second, 1)]
    expected = []
    for step in range(3):
        for data in microbatches(step):
            value = loss(stages[1](*stages[0](data["x"])))
            expected.append(value.detach())
            value.backward()
    assert torch.equal(torch.stack(found[1][0]), torch.stack(expected))
    for stage, (_, grads) in zip(stages, found, strict=True):
        for name, parameter in stage.named_parameters():
            assert torch.equal(grads[name], parameter.grad), name


def reduce(rank, _):
    stage = Stage(layer, 1)
    program = two_stage_program(rank, shared=(("linear.weight", (0, 1)), ("linear.bias", (0, 1))))
    parameters = dict(stage.named_parameters(prefix=""))
    interpreter = Interpreter(program, {rank: stage}, GlooTransport(dist.new_group()), parameters=parameters)
    for step in range(2):
        interpreter.run(microbatches(step) if rank == 0 else None, lambda m, outputs: [(loss(outputs), None)])
    return {name: p.grad for name, p in parameters.items()}


def test_shared_parameters_get_the_same_sum_on_all_holders(tmp_path):
    found = run_workers(reduce, 2, tmp_path)
    stage = Stage(layer, 1)
    for step in range(2):
        for data in microbatches(step):
            loss(stage(*stage(data["x"]))).backward()
    for name, parameter in stage.named_parameters():
        assert torch.equal(found[0][name], found[1][name])
        torch.testing.assert_close(found[0][name], parameter.grad, rtol=1e-5, atol=1e-6)


def exchange(rank, _):
    """Every dtype; more messages than are received ahead; a tensor kept by the receiver is not overwritten."""
    transport = GlooTransport(dist.new_group())
    kept = []
    for dtype in (torch.uint8, torch.int16, torch.complex64, torch.float64, torch.bool):
        form = WireFormat.of("value", TensorSpec((300, 200), str(dtype).removeprefix("torch."), (1, 300)))
        for number in range(6):
            tensor = torch.full((300, 200), number, dtype=dtype)
            transport.send(1 - rank, tensor, form)
            kept.append((transport.receive(1 - rank, form).wait(), tensor))
    transport.flush()
    return all(torch.equal(found, sent) and found.stride() == (1, 300) for found, sent in kept)


def test_every_dtype_crosses(tmp_path):
    assert run_workers(exchange, 2, tmp_path) == [True, True]


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))


def peaks(rank, _, counts):
    """Most bytes alive in a step, by number of microbatches; inputs not counted."""
    found = {}
    for schedule in ("1f1b", "zb-v"):
        for count in counts:
            model, batch = blocks(), torch.randn(8 * count, 64)
            compilation = compile_model(
                model, batch, pipeline_parallel_degree=2, microbatches=count, schedule=schedule, memory_weight=0.0
            )
            runtime = Runtime(model, rank=rank, transport=GlooTransport(dist.new_group()))
            program = runtime.install(compilation)
            parts = [((part,), {}) for part in batch.chunk(count)] if rank == 0 else None
            for training in (True, False):

                def on_output(_, output, training=training):
                    return [(output.square().mean(), None)] if training else None

                with torch.set_grad_enabled(training):
                    runtime.run(program, parts, on_output, training=training)  # gradients are there after it
                    with LiveBytes([batch]) as counter:
                        runtime.run(program, parts, on_output, training=training)
                found.setdefault((schedule, training), []).append(counter.peak - batch.nbytes)
    return found


def test_memory_does_not_grow_with_the_microbatches(tmp_path):
    for rank, found in enumerate(run_workers(peaks, 2, tmp_path, (8, 24))):
        for key, (few, many) in found.items():
            assert many <= few + 1024, (rank, key, few, many)  # a message has 2 KiB
