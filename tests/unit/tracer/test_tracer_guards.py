"""Python that depends on the values of inputs: answered from the sample, guarded, and refused for other values."""

import warnings

import parity
import pytest
import torch
from torch import nn
from transformers.utils import import_utils

from smpc.compile import compile_model
from smpc.errors import StepError, TraceError
from smpc.tracer import NodeKind, Trace, record, verify
from smpc.tracer.input_guards import Answers, broken_guard
from smpc.tracer.replay import input_values


class Lengths(nn.Module):
    """Cuts the sequence at its longest length, picks rows by a mask, and branches on a flag in a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("flag", torch.tensor(True))

    def forward(self, tokens, lengths):
        longest = lengths.clone()
        longest[0] += 0
        size = int(longest.max())
        x = self.embed(tokens)[:, :size]
        if self.flag:
            x = x * 2
        for layer in self.layers:
            x = layer(x).relu()
        return x[lengths > 1].sum(dim=0), (lengths > 1).nonzero()


def batch(*lengths):
    return (torch.arange(len(lengths) * 5).reshape(-1, 5) % 10, torch.tensor(lengths)), {}


def test_answers_come_from_the_inputs_and_become_guards():
    model, (args, kwargs) = Lengths(), batch(2, 1, 4, 3)
    trace = record(model, args, kwargs)
    verify(trace, model, args, kwargs)
    assert [(guard.target.rpartition(".")[2], guard.expected) for guard in trace.guards] == [
        ("__int__", 4),
        ("__bool__", True),
    ]
    assert all(guard.source.startswith("test_tracer_guards.py:") for guard in trace.guards)
    assert not any(node.kind is NodeKind.CALL_MODULE for node in trace.nodes)
    assert Trace.from_json(trace.to_json()) == trace


def test_answers_replace_inputs():
    model, (args, kwargs) = Lengths(), batch(2, 1, 4, 3)
    trace = record(model, args, kwargs)
    answers = Answers.of(trace)
    meta = tuple(tensor.to("meta") for tensor in args)
    assert record(model, meta, answers=answers) == trace
    with pytest.raises(TraceError, match=r"lengths has no values here|only a shape"):
        record(model, meta)


@pytest.mark.parametrize(("lengths", "broken"), [((4, 3, 1, 2), None), ((2, 1, 2, 3), 0), ((2, 2, 4, 3), None)])
def test_guards_hold_for_inputs_on_which_python_goes_the_same_way(lengths, broken):
    model, (args, kwargs) = Lengths(), batch(2, 1, 4, 3)
    trace = record(model, args, kwargs)
    found = broken_guard(trace, model, input_values(trace, *batch(*lengths)))
    assert (None if found is None else trace.guards.index(found[0])) == broken


def test_a_pipeline_runs_where_guards_hold_and_refuses_the_rest():
    model = Lengths()
    compilation = compile_model(model, batch(2, 1, 4, 3, 4, 1, 2, 3), pipeline_parallel_degree=2, microbatches=2)
    good = batch(4, 2, 1, 2, 3, 1, 4, 2)
    parity.assert_same(parity.run_eager(model, good, 2), parity.run_loopback(model, compilation, good))
    with pytest.raises(StepError, match=r"microbatch 1: the model's Python depends on torch\.Tensor\.__int__"):
        parity.run_loopback(model, compilation, batch(4, 2, 1, 2, 3, 1, 3, 2))


class OnParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * 2 if self.weight.sum() > 0 else x


def test_what_depends_on_parameters_has_no_answer():
    with pytest.raises(TraceError, match="it depends on parameter weight"):
        record(OnParameter(), (torch.ones(2),))


class Drawing(nn.Module):
    """Draws as many rows as the input's values say, as ViLT does of patches."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, lengths):
        chosen = torch.multinomial(torch.ones(x.shape[0]), lengths.min())
        return self.second(self.first(x)[chosen])


def test_a_guard_draws_no_random_numbers():
    """Guards are checked before a step, and ask for the shape of what is drawn: the step's own draws must not change by that."""
    torch.manual_seed(0)
    model, inputs = Drawing(), ((torch.randn(6, 3), torch.tensor([4, 5, 6, 6, 6, 6])), {})
    compilation = compile_model(model, inputs[0], pipeline_parallel_degree=2, microbatches=1)
    assert [guard.target for guard in compilation.trace.guards] == ["torch.multinomial"]
    torch.manual_seed(1)
    eager = parity.run_eager(model, inputs, 1)
    torch.manual_seed(1)
    parity.assert_same(eager, parity.run_loopback(model, compilation, inputs), ())


class Positions(nn.Module):
    """Asks about positions, which depend on the length of a row alone."""

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device)
        return x * 2 if (positions.diff() == 1).all() and positions.max() > 3 else x


@pytest.mark.parametrize("options", [{}, {"answers": Answers(())}])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_depends_on_sizes_alone_needs_no_values_and_no_guard(device, options):
    long, short = (record(Positions(), (torch.ones(2, n, device=device),), **options) for n in (5, 4))
    assert not long.guards
    assert not short.guards
    assert any(node.target == "torch.Tensor.mul" for node in long.nodes)
    assert not any(node.target == "torch.Tensor.mul" for node in short.nodes)
    verify(long, Positions(), (torch.ones(2, 5),))
    verify(short, Positions(), (torch.ones(2, 4),))


class Asking(nn.Module):
    """Warns of what Hugging Face's code would say that it is being traced."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("positions", torch.arange(3))

    def forward(self, x):
        values = {
            "input": x,
            "parameter": self.linear(x),
            "buffer": self.positions + 1,
            "random": torch.rand(3),
            "sizes": torch.arange(x.shape[0]).cumsum(0),
        }
        warnings.warn(" ".join(name for name, value in values.items() if import_utils.is_tracing(value)), stacklevel=1)
        return values["parameter"]


def test_libraries_may_look_at_what_depends_on_sizes_alone():
    original = import_utils.is_fake_tensor
    with pytest.warns(UserWarning, match="^input parameter buffer random$"):
        record(Asking(), (torch.ones(2, 3),))
    assert import_utils.is_fake_tensor is original


class Counter(nn.Module):
    """Asks for a buffer that it writes, in place or by another tensor."""

    def __init__(self, rebinds, asked=True):
        super().__init__()
        self.linear, self.rebinds, self.asked = nn.Linear(3, 3), rebinds, asked
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        x = self.linear(x)
        if self.asked and self.seen[0] > 1:
            x = x * 2
        if self.rebinds:
            self.seen = self.seen + 1
        else:
            self.seen[:] += 1
        return x


class AsksAnother(nn.Module):
    """Asks for the buffer of a module that writes it."""

    def __init__(self):
        super().__init__()
        self.counter, self.last = Counter(False, asked=False), nn.Linear(3, 3)

    def forward(self, x):
        x = self.counter(x)
        return self.last(x) if self.counter.seen > 3 else x


@pytest.mark.parametrize("rebinds", [False, True])
def test_an_answer_does_not_rest_on_a_buffer_that_the_model_writes(rebinds):
    """The answer was taken for all microbatches and steps, though each finds another value."""
    model = nn.Sequential(nn.Linear(3, 3), Counter(rebinds), nn.Linear(3, 3))
    inputs = (torch.randn(8, 3),), {}
    compilation = compile_model(model, inputs, pipeline_parallel_degree=2, microbatches=4)
    assert [node.target for node in compilation.trace.nodes if node.kind is NodeKind.CALL_MODULE] == ["1"]
    parity.assert_same(parity.run_eager(model, inputs, 4), parity.run_loopback(model, compilation, inputs))
    with pytest.raises(
        TraceError,
        match=r"test_tracer_guards\.py:\d+: Python needs the value of buffer seen, which the model writes in",
    ):
        record(Counter(rebinds), *inputs)
    with pytest.raises(TraceError, match=r"the model itself, .* Python needs the value of buffer counter\.seen, which"):
        record(AsksAnother(), *inputs)


class Places(nn.Module):
    """Returns, first of all that it computes, how many there are of something, which only values tell."""

    def __init__(self, of_input):
        super().__init__()
        self.of_input = of_input
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        h = self.layers[0](x)
        places = ((x if self.of_input else h) > 0).nonzero()
        for layer in self.layers[1:]:
            h = layer(h).relu()
        return h, places


@pytest.mark.parametrize("of_input", [True, False])
def test_results_without_a_shape_are_computed_where_they_are_returned(of_input):
    torch.manual_seed(0)
    model, inputs = Places(of_input), ((torch.randn(8, 8),), {})
    compilation = compile_model(model, inputs, pipeline_parallel_degree=2, microbatches=2)
    parity.assert_same(parity.run_eager(model, inputs, 2), parity.run_loopback(model, compilation, inputs))
