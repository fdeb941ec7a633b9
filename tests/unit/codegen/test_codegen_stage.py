"""Stage modules hold the model's own parts under the model's own names."""

import pytest
import torch
import zoo
from odd_models import MovingAverage, OddNames
from random_plans import compile_assignment, contiguous
from torch import nn

from smpc.codegen.stage import build_stage
from smpc.compile import compile_model
from smpc.runtime import LoopbackRuntime
from smpc.tracer import record


def stages_of(model, compilation):
    return [build_stage(code, model) for program in compilation.programs for code in program.stages]


def test_modules_called_whole_are_the_models_own():
    model, batch = zoo.build("gpt2")
    compilation = compile_model(model, batch, pipeline_parallel_degree=2)
    codes = [code for program in compilation.programs for code in program.stages]
    for code, stage in zip(codes, stages_of(model, compilation), strict=True):
        assert code.modules
        for name in code.modules:
            assert stage.get_submodule(name) is model.get_submodule(name)


@pytest.mark.long
def test_names_and_tensors_of_all_stages_are_those_of_the_model():
    for name in ("gpt2", "t5", "convnet", "gpt2_tied", "lstm"):
        model, batch = zoo.build(name)
        stages = stages_of(model, compile_model(model, batch, pipeline_parallel_degree=3))
        found = {key: value for stage in stages for key, value in stage.state_dict(keep_vars=True).items()}
        expected = model.state_dict(keep_vars=True)
        assert found.keys() <= expected.keys(), name
        assert all(found[key] is expected[key] for key in found), name
        named = {key for stage in stages for key, _ in stage.named_parameters()}
        assert named == {key for key, _ in model.named_parameters()}, name


def test_no_stage_holds_what_others_own():
    model, batch = zoo.build("unet")
    stages = stages_of(model, compile_model(model, batch, pipeline_parallel_degree=3))
    held = [{id(p) for p in stage.parameters()} for stage in stages]
    assert sum(map(len, held)) == len(set.union(*held)) == len(list(model.parameters()))


def test_odd_names_are_reached_from_node_by_node_code():
    model = OddNames()
    trace = record(model, (torch.ones(2, 4), torch.ones(2, 4)))
    for seed in range(4):
        compilation = compile_assignment(trace, contiguous(trace, 4, seed))
        names = {key for stage in stages_of(model, compilation) for key, _ in stage.named_parameters()}
        assert names == {key for key, _ in model.named_parameters()}


def test_hooks_of_blocks_fire_for_every_microbatch():
    model, (args, kwargs) = zoo.build("gpt2")
    compilation = compile_model(model, (args, kwargs), pipeline_parallel_degree=2, microbatches=4)
    seen = []
    model.transformer.h[0].register_forward_hook(lambda module, inputs, output: seen.append(module))
    runtime = LoopbackRuntime(model)
    program = runtime.install(compilation)
    pieces = [((), {key: value[2 * m : 2 * m + 2] for key, value in kwargs.items()}) for m in range(4)]
    runtime.run(program, pieces, lambda m, output: [(output.loss, None)], training=True)
    assert seen == [model.transformer.h[0]] * 4


def test_a_buffer_rebound_in_stage_code_is_rebound_in_the_model():
    model = MovingAverage()
    trace = record(model, (torch.ones(2, 4),))
    assignment = {node.name: 0 for node in trace.nodes if node.kind not in ("placeholder", "get_attr")}
    (stage,) = stages_of(model, compile_assignment(trace, assignment))
    before = model.a.mean
    stage(torch.ones(2, 4))
    assert stage.a.mean is model.a.mean is not before
    assert model.a.mean.any()
    model.a.mean = torch.full((4,), 7.0)
    stage.refresh()
    assert stage.a.mean is model.a.mean


def test_buffers_keep_whether_they_are_saved():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.ones(4))
            self.register_buffer("derived", torch.ones(4), persistent=False)
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x * self.kept + self.derived)

    model = Model()
    (stage,) = stages_of(model, compile_model(model, torch.ones(2, 4), pipeline_parallel_degree=1))
    assert list(stage.state_dict()) == ["kept", "linear.weight", "linear.bias"]
    assert stage.derived is model.derived


def test_a_parameter_replaced_after_the_trace_is_the_one_that_is_used():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    compilation = compile_model(model, torch.ones(2, 4), pipeline_parallel_degree=2)
    model[1].weight = nn.Parameter(torch.full((4, 4), 3.0))
    first, second = stages_of(model, compilation)
    assert torch.equal(second(first(torch.ones(2, 4))[0])[0], model(torch.ones(2, 4)))


def test_tracebacks_show_the_generated_line():
    import traceback

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    (stage,) = stages_of(model, compile_model(model, torch.ones(2, 4), pipeline_parallel_degree=1))
    try:
        stage(torch.ones(2, 3))
    except RuntimeError as error:
        lines = [frame.line for frame in traceback.extract_tb(error.__traceback__)]
    assert "_0 = self[0](input)" in lines or any(line and line.startswith("_0 = self[0](") for line in lines)
