"""Models that are hard to record, cut in 2 and 4 and trained in loopback: bitwise equal to one process. What cannot be says why."""

import awkward_models
import parity
import pytest
import torch
from torch import nn

from smpc.compile import compile_model
from smpc.errors import TraceError
from smpc.runtime import LoopbackRuntime
from smpc.tracer import NodeKind, record

# What these call whole: modules with transforms inside.
OPAQUE = {"gradients": ["steps.0", "steps.1", "steps.2"]}


@pytest.mark.matrix(6)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", awkward_models.CASES)
def test_training_equals_one_process(name, stages):
    model, batch = awkward_models.build(name)
    compilation = compile_model(model, batch, pipeline_parallel_degree=stages, microbatches=4)
    nodes = compilation.trace.nodes
    assert [node.target for node in nodes if node.kind is NodeKind.CALL_MODULE] == OPAQUE.get(name, [])
    expected = parity.run_eager(awkward_models.build(name)[0], batch, 4)
    got = parity.run_loopback(awkward_models.build(name)[0], compilation, batch)
    parity.assert_same(expected, got, tuple(item.name for item in compilation.plan.shared_parameters))


def test_a_recording_leaves_torchscript_modules_as_they_were():
    torch.manual_seed(0)
    model, x = awkward_models.ScriptModules(), torch.randn(2, 4)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    expected = model(x)
    trace = record(model, (x,))
    assert [node.target for node in trace.nodes if node.kind is NodeKind.CALL_MODULE] == ["compiled", "traced"]
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert torch.equal(model(x), expected)


def test_torchscript_modules_train_as_in_one_process():
    def steps(run):
        torch.manual_seed(0)
        model = awkward_models.ScriptModules()
        optimizer, step = torch.optim.SGD(model.parameters(), lr=0.1), run(model)
        for _ in range(3):
            optimizer.zero_grad()
            step()
            optimizer.step()
        return {name: value.detach() for name, value in model.state_dict().items()}

    parts = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).chunk(2)

    def alone(model):
        return lambda: [(model(part).square().sum() / 2).backward() for part in parts]

    def in_stages(model):
        runtime = LoopbackRuntime(model)
        runtime.install(compile_model(model, (torch.cat(parts),), pipeline_parallel_degree=3, microbatches=2))
        batches = [((part,), {}) for part in parts]
        return lambda: runtime.run(0, batches, lambda _, out: [(out.square().sum() / 2, None)], training=True)

    torch.testing.assert_close(steps(in_stages), steps(alone), rtol=0, atol=0)


class Refused(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.linear, self.body = nn.Linear(4, 4), body

    def forward(self, x):
        return self.body(self.linear(x))


_LARGE = torch.zeros(70, 70)
_WRITTEN = torch.zeros(4)

REFUSED = {
    "a hook without a name": (lambda x: x.register_hook(lambda g: g) and x, "argument of torch.Tensor.register_hook"),
    "Python on elements": (lambda x: x.detach().apply_(abs), "torch.Tensor.apply_ calls Python"),
    "a large global": (lambda x: x + _LARGE[0, :4], r"a tensor \(70, 70\) .* register it as a buffer"),
    "a written global": (lambda x: x + _WRITTEN.add_(1), "no module holds: register it as a buffer"),
    "a local script": (lambda x: awkward_models.compiled(_local)(x), "must be defined at the top of a module"),
}


def _local(x: torch.Tensor):
    return x + 1


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_recorded_names_the_line_and_a_way_out(name):
    body, message = REFUSED[name]
    with pytest.raises(TraceError, match=message) as caught:
        record(Refused(body), (torch.randn(2, 4),))
    assert "test_parity_awkward.py:" in str(caught.value)
    assert "what to do" in str(caught.value)


def test_a_lazy_module_must_have_run_once():
    with pytest.raises(TraceError, match=r"found 0\.weight without one \(a lazy module\): run the model once"):
        record(nn.Sequential(nn.LazyLinear(4)), (torch.randn(2, 4),))


def test_an_index_computed_from_what_it_indexes():
    class Select(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, steps):
            steps = steps * 2
            return self.linear(x) * steps[steps > 3].numel()

    trace = record(Select(), (torch.randn(2, 4), torch.arange(6)))
    assert trace.guards[0].expected == ((4,),)


def test_stages_of_a_module_with_parameters_of_its_own_are_counted_by_calls():
    model, batch = awkward_models.build("own parameters")
    assert len(compile_model(model, batch, pipeline_parallel_degree=5, microbatches=1).plan.stages) == 5
    with pytest.raises(ValueError, match="at most as many stages as modules, found 6 stages and 5 modules"):
        compile_model(model, batch, pipeline_parallel_degree=6, microbatches=1)
