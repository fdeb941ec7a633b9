"""compile_model: the forms of its inputs, its errors, the same bytes every time, and compilations like another one."""

import ctypes
import dataclasses
import os
import subprocess
import sys

import numpy as np
import parity
import pytest
import torch
import zoo
from locations import SUPPORT
from planning import compile_trace
from torch import nn
from torch.utils.checkpoint import checkpoint

from smpc.compile import PipelineOptions, Traced, compile_model, plan_trace
from smpc.compile.passes import schedule_plan, write_programs
from smpc.errors import ConfigError, PartitionError, StepError, TraceError
from smpc.runtime import LoopbackRuntime
from smpc.sample_inputs import as_inputs, first_microbatch
from smpc.tracer import flatten, mark_leaf, record


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x, mask=None, *, scale=1.0, pairs=()):
        for layer in self.layers:
            x = layer(x).tanh()
        x = x if mask is None else x * mask
        return x * scale + sum(pairs)


X = torch.linspace(-1, 1, 32).reshape(8, 4)
MASK = torch.arange(8.0)[:, None]


@pytest.mark.parametrize(
    "sample",
    [
        X,
        (X, MASK),
        [X, MASK],
        {"x": X, "mask": MASK},
        ((X,), {"mask": MASK}),
        ([X], {"scale": 2.0, "pairs": [X, MASK]}),
        {"x": X, "scale": torch.tensor(3.0)},
        {"x": X.to("meta"), "mask": MASK.to("meta")},
    ],
    ids=["tensor", "tuple", "list", "dict", "tuple and dict", "nested", "scalar tensor", "meta"],
)
def test_forms_of_sample_inputs(sample):
    compilation = compile_model(Model(), sample, pipeline_parallel_degree=2, microbatches=4)
    inputs = [node for node in compilation.trace.nodes if node.kind == "placeholder"]
    assert inputs[0].spec.shape == (2, 4)
    assert all(node.spec.shape in ((2, 4), (2, 1), ()) for node in inputs)
    given = [leaf for leaf in flatten(as_inputs(sample))[0] if isinstance(leaf, torch.Tensor)]
    assert len(inputs) == len(given)


def test_the_first_microbatch_is_the_first_part_of_every_tensor():
    args, kwargs = first_microbatch(((X, torch.tensor(5)), {"pairs": [MASK, "text"]}), 4)
    assert torch.equal(args[0], X[:2])
    assert args[1] == 5
    assert torch.equal(kwargs["pairs"][0], MASK[:2])
    assert kwargs["pairs"][1] == "text"


@pytest.mark.parametrize(
    ("sample", "options", "expected"),
    [
        (X, {"microbatches": 3}, ["input args[0]", "batch size 8", "microbatches = 3"]),
        (
            {"x": X, "pairs": [MASK, X[:7]]},
            {"microbatches": 3},
            ["input x: batch size 8", "input pairs[0]: batch size 8", "input pairs[1]: batch size 7"],
        ),
        (X[:0], {}, ["input args[0]", "batch size 0"]),
        (X, {"microbatches": 16}, ["batch size 8", "microbatches = 16"]),
        (X, {"microbatches": 0, "memory_weight": 1.5}, ["microbatches", "at least 1, found 0", "memory_weight", "1.5"]),
        (X, {"memory_weight": -0.1}, ["memory_weight: expected from 0.0 to 1.0, found -0.1"]),
        (X, {"memory_weight": float("nan")}, ["memory_weight"]),
        (X, {"active_microbatches": 0}, ["active_microbatches: expected at least 1, found 0"]),
        (X, {"pipeline_parallel_degree": 0}, ["pipeline_parallel_degree: expected at least 1, found 0"]),
        (X, {"pipeline": "interleave"}, ["pipeline", "'interleave'", "did you mean 'interleaved'?"]),
        (X, {"pipeline": "xyz"}, ["'interleaved'", "'simple'", "'xyz'"]),
        ("text", {}, ["sample inputs", "found str"]),
        (
            X,
            {"tensor_parallel_degree": 2, "trace_execution_times": True, "trace_memory_usage": True},
            ["trace_memory_usage: not with tensor_parallel_degree above 1", "trace_execution_times: not with"],
        ),
    ],
)
def test_bad_settings_and_inputs(sample, options, expected):
    with pytest.raises(ConfigError) as caught:
        compile_model(Model(), sample, **{"pipeline_parallel_degree": 2, **options})
    for part in expected:
        assert part in str(caught.value)


def test_more_stages_than_modules():
    with pytest.raises(PartitionError, match="found 4 stages and 3 modules"):
        compile_model(Model(), X, pipeline_parallel_degree=4)
    assert len(compile_model(Model(), X, pipeline_parallel_degree=3).plan.stages) == 3


def test_a_model_that_cannot_run_on_the_inputs():
    with pytest.raises(TraceError, match=r"module 'layers\.0' \(Linear\)"):
        compile_model(Model(), torch.ones(2, 5), pipeline_parallel_degree=2)


def test_active_microbatches_have_a_default_and_a_bound():
    def active(**options):
        return compile_model(Model(), X, **options).plan.schedule.active_microbatches

    assert active(pipeline_parallel_degree=2, microbatches=8) == 4
    assert active(pipeline_parallel_degree=2, microbatches=2) == 2
    assert active(pipeline_parallel_degree=2, microbatches=8, active_microbatches=20) == 8


def test_nothing_of_the_model_changes():
    model, batch = zoo.build("convnet")
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    compile_model(model, batch, pipeline_parallel_degree=3, microbatches=2)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert (id(tensor), True) == (before[name][0], torch.equal(tensor, before[name][1]))
        assert tensor.grad is None


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import zoo
from smpc.compile import compile_model
model, batch = zoo.build("unet")
compilation = compile_model(model, batch, pipeline_parallel_degree=3, microbatches=4)
sys.stdout.write(compilation.plan.to_json() + compilation.schedule_text())
sys.stdout.write("".join(compilation.rank_source(rank) for rank in range(3)) + compilation.trace.to_json())
"""


@pytest.mark.slow
def test_two_processes_with_other_hash_seeds_write_the_same_bytes():
    script = SCRIPT.format(tests=str(SUPPORT))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
        )
        for seed in ("1", "77")
    ]
    first, second = (process.communicate(timeout=120)[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert len(first) > 10_000
    assert first == second


@pytest.mark.long
@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", ["gpt2", "t5", "gpt2_tied", "convnet", "unet"])
def test_evaluation_of_another_batch_like_a_compilation(name):
    """Trained once, then evaluated in eval mode on microbatches of another size: all parameters where they were."""
    model, batch = zoo.build(name)
    compilation = compile_model(model, batch, pipeline_parallel_degree=2, microbatches=2)
    runtime = LoopbackRuntime(model)
    training = runtime.install(compilation)
    runtime.run(training, parity.split(batch, 2), lambda m, output: [(parity.loss_of(output) / 2, None)], training=True)
    model.eval()
    pieces = parity.split(batch, 8)
    if name in ("gpt2", "gpt2_tied"):
        pieces = [((), {key: value[:, :7] for key, value in kwargs.items()}) for _, kwargs in pieces]
    other = record(model, *pieces[0])
    like = compile_trace(other, PipelineOptions(2, 8), like=compilation)
    assert [s.parameters for s in like.plan.stages] == [s.parameters for s in compilation.plan.stages]
    program = runtime.install(like)
    outputs = {}
    with torch.no_grad():
        runtime.run(program, pieces, outputs.__setitem__, training=False)
        for m, (args, kwargs) in enumerate(pieces):
            expected = [leaf for leaf in flatten(model(*args, **kwargs))[0] if isinstance(leaf, torch.Tensor)]
            found = [leaf for leaf in flatten(outputs[m])[0] if isinstance(leaf, torch.Tensor)]
            assert len(found) == len(expected) > 0
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_an_evaluation_program_refuses_a_backward():
    model = Model()
    runtime = LoopbackRuntime(model)
    program = runtime.install(compile_model(model, X, pipeline_parallel_degree=2, microbatches=2))
    with pytest.raises(StepError, match="only evaluates"):
        runtime.run(program, parity.split(((X,), {}), 2), lambda m, y: [(y.sum(), None)], training=False)


def test_parts_on_some_ranks_are_those_of_as_many_replicas_and_slices_have_parts_too():
    def costs(**options):
        model = PipelineOptions(2, **options).cost_model.optimizer
        return model.shards, model.in_parts, model.buckets

    assert costs(data_parallel_degree=8, sharded_data_parallel_degree=2) == (2, True, False)
    assert costs(data_parallel_degree=8, fully_shard=True) == (8, True, False)
    assert costs(data_parallel_degree=8, sharded_data_parallel_degree=2, tensor_parallel_degree=2) == (2, True, False)
    assert costs(data_parallel_degree=8) == (1, False, True)
    with pytest.raises(ConfigError, match="expected a divisor of data_parallel_degree 8, found 3"):
        PipelineOptions(2, data_parallel_degree=8, sharded_data_parallel_degree=3)
    with pytest.raises(ConfigError, match="sharded_data_parallel_degree and shard_optimizer_state exclude"):
        PipelineOptions(2, data_parallel_degree=8, sharded_data_parallel_degree=2, shard_optimizer_state=True)


def test_a_schedule_of_list_that_is_given_stays():
    """Whatever the times of this trace are: pipelines whose ranks send each other tokens run one order."""
    options = PipelineOptions(pipeline_parallel_degree=2, microbatches=4, schedule="list")
    traced = Traced(record(Model(), (X[:2],)))
    own, other = plan_trace(traced, options), plan_trace(traced, dataclasses.replace(options, schedule="gpipe"))
    assert own.schedule != other.schedule
    found = plan_trace(traced, options, order=other.schedule)
    assert found.schedule == other.schedule
    in_flight = [stage.num_in_flight for stage in found.plan.stages]
    assert in_flight == [stage.num_in_flight for stage in other.plan.stages]
    assert (
        write_programs(found).programs
        == write_programs(schedule_plan(traced.trace, found.plan, other.schedule)).programs
    )


class Normed(nn.Module):
    """A BatchNorm that is called twice, the second time by running statistics or by those of the batch."""

    def __init__(self, *, by_running):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.by_running = by_running

    def forward(self, x):
        x = self.first(x)
        y, norm = self.norm(x), self.norm
        again = nn.functional.batch_norm(
            x, norm.running_mean, norm.running_var, norm.weight, norm.bias, not self.by_running
        )
        return self.last(y + again)


def test_running_statistics_that_a_backward_needs_are_not_written_under_way():
    options = {"pipeline_parallel_degree": 2, "microbatches": 2}
    compile_model(Normed(by_running=False).train(), {"x": X}, **options)
    compile_model(Normed(by_running=True).train(), {"x": X}, **options | {"microbatches": 1})
    compile_model(Normed(by_running=True).eval(), {"x": X}, **options)
    with pytest.raises(PartitionError, match=r"norm\.running_mean: needed as it was at .*, written in place at"):
        compile_model(Normed(by_running=True).train(), {"x": X}, **options)


class Rescaled(nn.Module):
    """Its forward writes a buffer that its backward needs, in a way of its own; `norm`: a whole module may have running statistics."""

    def __init__(self, write):
        super().__init__()
        self.first, self.norm, self.write = nn.Linear(4, 4), nn.BatchNorm1d(4), write
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        self.write(self.scale)
        return self.norm(self.first(x)) * self.scale


def by_pointer(scale):
    memory = (ctypes.c_float * 4).from_address(scale.data_ptr())
    memory[0] *= 2


def by_storage(scale):
    torch.empty(0).set_(scale.untyped_storage(), 0, (4,), (1,)).mul_(2)


WRITES = {
    "numpy": lambda scale: np.multiply(scale.numpy(), 2, out=scale.numpy()),
    "array": lambda scale: np.asarray(scale).fill(3),
    "pointer": by_pointer,
    "storage": by_storage,
    "dlpack": lambda scale: torch.from_dlpack(scale).mul_(2),
    "foreach": lambda scale: torch._foreach_mul_([scale], 2),
    "data": lambda scale: scale.data.mul_(2),
}


@pytest.mark.parametrize("write", WRITES)
def test_buffers_that_a_backward_needs_are_not_written_by_any_way(write):
    options = {"pipeline_parallel_degree": 2, "microbatches": 2}

    def model(write):
        return nn.Sequential(nn.Linear(4, 4), Rescaled(write), nn.Linear(4, 4))

    compile_model(model(lambda scale: None), X, **options)
    compile_model(
        model(lambda scale: scale.numpy().sum()), X, **options
    )  # called whole, with statistics that it may write
    compile_model(model(WRITES[write]), X, **options | {"microbatches": 1})
    with pytest.raises(PartitionError, match=r"found 1\.scale: needed as it was at .*, written in place at"):
        compile_model(model(WRITES[write]), X, **options)


def test_a_buffer_that_forward_gives_other_memory_is_refused():
    with pytest.raises(TraceError, match=r"forward gives 1\.scale other memory"):
        compile_model(
            nn.Sequential(nn.Linear(4, 4), Rescaled(lambda scale: scale.set_(scale * 2))), X, pipeline_parallel_degree=2
        )


class WholeNormed(Normed):
    """It is called whole."""

    def forward(self, x):
        self.norm.weight.detach().numpy()
        return super().forward(x)


def test_running_statistics_of_whole_modules_that_a_backward_needs_are_not_written_under_way():
    options = {"pipeline_parallel_degree": 2, "microbatches": 2}
    for kind in (mark_leaf, lambda module: module):
        for cls in (Normed, WholeNormed):
            compile_model(nn.Sequential(nn.Linear(4, 4), kind(cls(by_running=False))), X, **options)
            with pytest.raises(
                PartitionError, match=r"1\.norm\.running_mean: needed as it was at .*, written in place at"
            ):
                compile_model(nn.Sequential(nn.Linear(4, 4), kind(cls(by_running=True))), X, **options)


class Counting(nn.Module):
    """Its forward writes a tensor that is a plain attribute."""

    def __init__(self, write):
        super().__init__()
        self.layer, self.write, self.seen = nn.Linear(4, 4), write, torch.ones(4)

    def forward(self, x):
        self.write(self.seen)
        return self.layer(x) * self.seen


@pytest.mark.parametrize(
    "write",
    [
        lambda seen: seen.mul_(2),
        lambda seen: seen[1:].mul_(2),
        lambda seen: seen.data.mul_(2),
        lambda seen: np.multiply(seen.numpy(), 2, out=seen.numpy()),
    ],
)
def test_attributes_that_forward_writes_are_those_of_plain_pytorch(write):
    """A recording doubled them, or the program forgot what was written."""

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), Counting(write), nn.Linear(4, 4))

    model, plain, found = make(), make(), []
    compilation = compile_model(model, X, pipeline_parallel_degree=2, microbatches=1)
    assert torch.equal(model[1].seen, torch.ones(4))
    runtime = LoopbackRuntime(model)
    runtime.install(compilation)
    for _ in range(3):
        runtime.run(0, [((X,), {})], lambda _, output: found.append(output), training=False)
        torch.testing.assert_close(found[-1], plain(X))
    with pytest.raises(
        TraceError, match="forward writes into seen, a tensor that is no buffer; what to do: register it"
    ):
        compile_model(Counting(write), X, pipeline_parallel_degree=2)


class Recomputed(nn.Module):
    """Writes into a parameter where it is checkpointed, or only scales down what it looks up."""

    def __init__(self, writes):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(9, 4, max_norm=1.0), nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale, self.writes = nn.Parameter(torch.ones(4), requires_grad=False), writes

    def look_up(self, ids):
        if self.writes:
            with torch.no_grad():
                self.scale.mul_(0.9)
        return self.embed(ids) * self.scale.clone()

    def forward(self, ids):
        return self.down(self.up(checkpoint(self.look_up, ids, use_reentrant=False))).square().mean()


def test_what_is_computed_again_must_find_the_parameters_of_before():
    """With the next microbatch under way it found those of that one, and gradients were off by 1e-4, without a word."""
    ids = torch.randint(9, (2, 3))
    with pytest.raises(PartitionError, match=r"computed again in the backward .* forward writes into scale"):
        compile_model(Recomputed(True), ids, pipeline_parallel_degree=2, microbatches=2)
    compile_model(Recomputed(True), ids, pipeline_parallel_degree=2, microbatches=1)
    compile_model(Recomputed(True), ids, pipeline_parallel_degree=1, microbatches=2)
    compile_model(Recomputed(False), ids, pipeline_parallel_degree=2, microbatches=2)
