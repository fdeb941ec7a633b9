"""Runtimes: what they accept, several steps, several programs over one model, one rank and many."""

import copy

import parity
import pytest
import torch
import zoo
from odd_models import MovingAverage
from planning import compile_trace
from random_plans import compile_assignment, contiguous
from torch import nn

from smpc.compile import PipelineOptions, compile_model
from smpc.errors import StepError, TraceError, UsageError
from smpc.executor.transport import loopback_transports
from smpc.runtime import LoopbackRuntime, Runtime
from smpc.sample_inputs import first_microbatch
from smpc.tracer import record


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def roots(output):
    return [(parity.loss_of(output) / 2, None)]


def eager_step(model, batch, microbatches=2):
    for args, kwargs in parity.split(batch, microbatches):
        (parity.loss_of(model(*args, **kwargs)) / 2).backward()


@pytest.mark.long
@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", ["gpt2", "gpt2_tied", "convnet"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_three_optimizer_steps_equal_those_of_one_process(name, set_to_none):
    """A parameter held by several ranks is updated for all of them."""
    model, batch = zoo.build(name)
    reference = copy.deepcopy(model)
    compilation = compile_model(model, batch, pipeline_parallel_degree=3, microbatches=2)
    shared = {item.name for item in compilation.plan.shared_parameters}
    assert bool(shared) == (name == "gpt2_tied")
    runtime = LoopbackRuntime(model)
    program = runtime.install(compilation)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (model, reference)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        runtime.run(program, parity.split(batch, 2), lambda m, output: roots(output), training=True)
        eager_step(reference, batch)
        for optimizer in optimizers:
            optimizer.step()
    for (key, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if shared:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=key)
        else:
            assert torch.equal(ours, theirs), key


def test_gradients_accumulate_over_steps():
    model, batch = zoo.build("gpt2_tied")
    reference = copy.deepcopy(model)
    runtime = LoopbackRuntime(model)
    program = runtime.install(compile_model(model, batch, pipeline_parallel_degree=3, microbatches=2))
    for _ in range(3):
        runtime.run(program, parity.split(batch, 2), lambda m, output: roots(output), training=True)
        eager_step(reference, batch)
    for (key, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6, msg=key)


class Tied(nn.Module):
    """A weight on both ends, dropout, and buffers that are rebound, in the part that the last rank has copies of."""

    def __init__(self):
        super().__init__()
        self.first, self.average, self.drop, self.last = (
            nn.Linear(4, 4),
            MovingAverage(),
            nn.Dropout(0.5),
            nn.Linear(4, 4),
        )
        self.last.weight = self.first.weight

    def forward(self, x):
        h, count = self.average(self.first(x).tanh())
        return self.last(self.drop(h)), count


def cut_before(trace, module):
    (first,) = [call.first for call in trace.calls if call.fqn == module]
    return {
        node.name: int(position >= first)
        for position, node in enumerate(trace.nodes)
        if node.kind not in ("placeholder", "get_attr")
    }


def test_copies_of_a_rank_follow_the_models_mode_and_buffers():
    """Once, the copy that holds a tied weight stayed in training mode, and kept the buffers that it rebound to itself."""
    torch.manual_seed(0)
    model, batch = Tied(), ((torch.randn(4, 4),), {})
    reference = copy.deepcopy(model).eval()
    trace = record(model, *first_microbatch(batch, 2))
    compilation = compile_assignment(trace, cut_before(trace, "average"), microbatches=2)
    assert [item.name for item in compilation.plan.shared_parameters] == ["first.weight"]
    runtime = LoopbackRuntime(model)
    runtime.install(compilation)
    model.eval()
    like = compile_trace(record(model, *first_microbatch(batch, 2)), PipelineOptions(2, 2), like=compilation)
    program = runtime.install(like)
    for _ in range(2):
        outputs = {}
        runtime.run(program, parity.split(batch, 2), outputs.__setitem__, training=False)
        for m, (args, kwargs) in enumerate(parity.split(batch, 2)):
            for found, expected in zip(outputs[m], reference(*args, **kwargs), strict=True):
                assert torch.equal(found, expected)
        for (key, ours), theirs in zip(model.named_buffers(), reference.buffers(), strict=True):
            assert torch.equal(ours, theirs), key
    with torch.no_grad():
        model.average.a.mean = reference.average.a.mean = torch.full((4,), 3.0)
    runtime.run(program, parity.split(batch, 2), outputs.__setitem__, training=False)
    args, kwargs = parity.split(batch, 2)[0]
    assert torch.equal(outputs[0][0], reference(*args, **kwargs)[0])


def test_programs_of_one_model_see_each_others_buffers():
    """A buffer rebound by one program is the one that the next program reads, also in its node-by-node code."""
    torch.manual_seed(0)
    model, reference = MovingAverage(), None
    reference = copy.deepcopy(model)
    runtime = LoopbackRuntime(model)
    batches = [((torch.randn(rows, 4),), {}) for rows in (4, 8)]
    programs = []
    for batch in batches:
        trace = record(model, *first_microbatch(batch, 2))
        programs.append(runtime.install(compile_assignment(trace, contiguous(trace, 3, 1), microbatches=2)))
    for number in (0, 1, 0, 1, 1):
        outputs = {}
        runtime.run(programs[number], parity.split(batches[number], 2), outputs.__setitem__, training=False)
        for m, (args, kwargs) in enumerate(parity.split(batches[number], 2)):
            assert torch.equal(outputs[m][0], reference(*args, **kwargs)[0])
    assert torch.equal(model.b.mean, reference.b.mean)
    assert model.a.count == reference.a.count == 10


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, scale=1.0):
        return self.b(self.a(x)) * scale


@pytest.mark.parametrize(
    ("microbatches", "error", "expected"),
    [
        ([((torch.ones(2, 4),), {"scale": 2.0})], StepError, "runs 2 microbatches, found 1"),
        ([((torch.ones(2, 4),), {"scale": 3.0})] * 2, TraceError, r"\['scale'\]: expected 2.0, found 3.0"),
        ([((torch.ones(3, 4),), {"scale": 2.0})] * 2, TraceError, r"expected float32\[2,4\], found float32\[3,4\]"),
        ([((torch.ones(2, 4).double(),), {"scale": 2.0})] * 2, TraceError, "found float64"),
        ([((), {"x": torch.ones(2, 4), "scale": 2.0})] * 2, TraceError, "trace again"),
        ([((2.0,), {"scale": 2.0})] * 2, TraceError, r"expected float32\[2,4\], found 2.0"),
        ([((torch.ones(2, 4, requires_grad=True),), {"scale": 2.0})] * 2, StepError, "detach it"),
    ],
)
def test_inputs_of_another_signature_are_refused(microbatches, error, expected):
    """A trace bakes its constants and shapes in: other ones would give wrong results, not merely other ones."""
    model = Scaled()
    runtime = LoopbackRuntime(model)
    program = runtime.install(
        compile_model(model, ((torch.ones(4, 4),), {"scale": 2.0}), pipeline_parallel_degree=2, microbatches=2)
    )
    with pytest.raises(error, match=expected):
        runtime.run(program, microbatches, None, training=False)
    seen = {}
    runtime.run(program, [((torch.ones(2, 4),), {"scale": 2.0})] * 2, seen.__setitem__, training=False)
    assert torch.equal(seen[1], model(torch.ones(2, 4), 2.0))


def test_a_model_that_writes_into_its_inputs_gets_copies():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x[:, 1:].mul_(2)
            return self.b(self.a(x))

    model, x = Writes(), torch.ones(4, 4)
    runtime = LoopbackRuntime(model)
    program = runtime.install(compile_model(model, x, pipeline_parallel_degree=2, microbatches=2, pipeline="simple"))
    runtime.run(program, parity.split(((x,), {}), 2), lambda m, y: [(y.sum(), None)], training=True)
    assert torch.equal(x, torch.ones(4, 4))
    reference = copy.deepcopy(model)
    reference.zero_grad()
    for piece in x.clone().chunk(2):
        reference(piece.clone()).sum().backward()
    assert torch.equal(model.a.weight.grad, reference.a.weight.grad)


def test_one_rank_runs_on_its_own():
    model, batch = zoo.build("unet")
    compilation = compile_model(model, batch, pipeline_parallel_degree=1, microbatches=2)
    reference = copy.deepcopy(model)
    eager_step(reference, batch)
    runtime = Runtime(model, rank=0, transport=loopback_transports(1, torch.device("cpu"))[0])
    program = runtime.install(compilation)
    assert list(runtime.stages) == [0]
    runtime.run(program, parity.split(batch, 2), lambda m, output: roots(output), training=True)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_no_backward_where_on_output_gives_no_roots():
    model, batch = zoo.build("unet")
    runtime = LoopbackRuntime(model)
    program = runtime.install(compile_model(model, batch, pipeline_parallel_degree=2, microbatches=2))
    runtime.run(program, parity.split(batch, 2), lambda m, output: None, training=True)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (lambda loss: loss, r"a tensor of shape \[\]"),
        (lambda loss: loss * 0, r"a tensor of shape \[\]"),
        (lambda loss: [loss], r"a tensor of shape \[\]"),
        (lambda loss: {"loss": loss}, "dict {'loss': tensor"),
        (lambda loss: (loss, None), r"a tensor of shape \[\]"),
        (lambda loss: [(loss, 1.0)], "tuple .*1.0"),
        (lambda loss: loss.item(), "float "),
    ],
)
def test_what_on_output_must_return(returned, found):
    """A loss by itself was a TypeError of Python's, and one of 0 trained nothing."""
    model, batch = zoo.build("unet")
    runtime = LoopbackRuntime(model)
    program = runtime.install(compile_model(model, batch, pipeline_parallel_degree=2, microbatches=2))
    for _ in range(2):  # observed, too
        with pytest.raises(UsageError, match=rf"expected a list of pairs \(tensor, gradient\).*found {found}"):
            runtime.run(program, parity.split(batch, 2), lambda m, y: returned(parity.loss_of(y) / 2), training=True)
        runtime.observe()


def test_an_error_in_on_output_names_rank_and_instruction_and_the_runtime_goes_on():
    model, batch = zoo.build("unet")
    runtime = LoopbackRuntime(model)
    program = runtime.install(compile_model(model, batch, pipeline_parallel_degree=2, microbatches=2))

    def fail(m, output):
        if m == 1:
            raise ArithmeticError("from the loss")
        return roots(output)

    with pytest.raises(ArithmeticError) as caught:
        runtime.run(program, parity.split(batch, 2), fail, training=True)
    assert any("rank 1, instruction 'F s1 m1'" in note for note in caught.value.__notes__)
    model.zero_grad()
    reference = copy.deepcopy(model)
    eager_step(reference, batch)
    runtime.run(program, parity.split(batch, 2), lambda m, output: roots(output), training=True)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
