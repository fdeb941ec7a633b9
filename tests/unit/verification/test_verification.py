"""Compiled programs beside plain PyTorch: what is broken on purpose is found, with its module; what is right passes and leaves no trace."""

import copy
import dataclasses
import itertools
import random

import numpy
import pytest
import torch
import zoo
from planning import compile_trace
from torch import nn

from smpc.compile import PipelineOptions, compile_model
from smpc.errors import VerificationError
from smpc.rank_models import RankModels
from smpc.sample_inputs import first_microbatch
from smpc.tracer import mark_leaf
from smpc.verification import verify_compilation
from smpc.verification.bounds import ARITHMETIC, BITWISE, ORDER, difference


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Block(nn.Module):
    """A buffer that counts, a draw that nobody uses, dropout, and arithmetic with constants."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        torch.rand(3)
        return torch.relu(nn.functional.dropout(self.linear(x), 0.5, self.training)) * 2.0


class Counts(nn.Module):
    """Called whole: Python's own state."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * self.calls


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Block(), Block()
        self.counts = Counts()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.counts(self.second(self.first(x) + 1.0) * self.scale)


BATCH = (torch.linspace(-1, 1, 8).reshape(2, 4),)


def compiled(model, batch=BATCH, **options):
    return compile_model(model, batch, pipeline_parallel_degree=2, **options)


def altered(compilation, change):
    """The compilation of a trace that `change` has made another one of."""
    changed = compile_trace(
        change(compilation.trace), PipelineOptions(2, 1, memory_weight=0.8)
    )  # cuts where the nodes show
    return dataclasses.replace(changed, environment=compilation.environment)


def with_node(trace, target, fqn, **changes):
    """The trace with one node of this target, in this module, changed."""
    found = [node for node in trace.nodes if node.target == target and trace.calls[node.call].fqn == fqn]
    (node,) = found
    return dataclasses.replace(
        trace, nodes=tuple(dataclasses.replace(n, **changes) if n is node else n for n in trace.nodes)
    )


def message(model, compilation, batch=BATCH):
    with pytest.raises(VerificationError) as caught:
        verify_compilation(model, compilation, (batch, {}))
    return str(caught.value)


def test_a_model_with_all_kinds_of_state_passes():
    model = Net()
    verified = verify_compilation(model, compiled(model), (BATCH, {}))
    assert verified.num_compared == 1 + 7 + 2 + 3, "outputs, gradients, buffers, generators"
    assert str(verified) == "13 results of one microbatch are those of plain PyTorch, bit by bit"


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [("gpipe", 2), ("1f1b", 4), ("zb-h1", 4), ("zb-v", 4), ("interleaved-1f1b", 4), ("list", 4)],
)
def test_every_schedule_has_a_first_microbatch(schedule, microbatches):
    model, batch = zoo.build("gpt2")
    compilation = compile_model(model, batch, pipeline_parallel_degree=2, microbatches=microbatches, schedule=schedule)
    assert verify_compilation(model, compilation, first_microbatch(batch, microbatches)).num_compared > 0


# -- what is broken is found -------------------------------------------------------------------------------------------


def test_a_wrong_output_is_found_in_its_module():
    """A constant that was baked in wrongly."""
    model = Net()
    wrong = altered(
        compiled(model),
        lambda trace: with_node(
            trace, "torch.Tensor.mul", "second", args=(_first_argument(trace, "torch.Tensor.mul", "second"), 3.0)
        ),
    )
    text = message(model, wrong)
    assert "the first difference in forward order: module second (Block): its output differs in" in text
    assert "(in the recording)" in text
    assert "output output: in " in text
    assert "gradient of first.linear.weight: in " in text
    assert "nothing has been trained" in text
    assert "smpc.mark_leaf" in text


def _first_argument(trace, target, fqn):
    (node,) = [node for node in trace.nodes if node.target == target and trace.calls[node.call].fqn == fqn]
    return node.args[0]


def test_a_wrong_value_between_modules_is_the_model_s_own():
    model = Net()
    wrong = altered(
        compiled(model),
        lambda trace: with_node(
            trace, "torch.Tensor.add", "", args=(_first_argument(trace, "torch.Tensor.add", ""), 1.5)
        ),
    )
    assert "forward order: the model (test_verification.Net), in its own code before it calls second" in message(
        model, wrong
    )


def test_a_lost_gradient_is_found_where_the_backward_pass_first_meets_it():
    model = Net()
    wrong = altered(compiled(model), lambda trace: with_node(trace, "torch.relu", "second", grad_enabled=False))
    text = message(model, wrong)
    assert "forward order: module second.linear (Linear), the first that the backward pass comes to" in text
    assert "gradient of second.linear.weight: expected float32[4, 4], found none" in text
    assert "\noutput" not in text


def test_a_lost_write_of_a_buffer_is_found():
    model = Net()
    wrong = altered(compiled(model), lambda trace: _without(trace, "first", lambda node: node.mutates))
    text = message(model, wrong)
    assert "forward order: module first (Block), whose forward gives the same: buffer first.steps" in text
    assert text.count("steps") == 2


def test_a_lost_draw_is_found():
    """No value shows it: the next draw would be another one."""
    model = Net().eval()
    wrong = altered(compiled(model), lambda trace: _without(trace, "second", lambda node: node.target == "torch.rand"))
    text = message(model, wrong)
    assert "forward order: module second (Block), in its own code before it calls second.linear" in text
    assert "random state torch's generator: other numbers" in text


def _without(trace, fqn, is_lost):
    """The trace with a node of a module that does nothing to anybody."""
    (lost,) = [node for node in trace.nodes if trace.calls[node.call].fqn == fqn and is_lost(node)]
    plain = dataclasses.replace(lost, target="torch.zeros", args=(3,), kwargs=(), mutates=(), random=False)
    return dataclasses.replace(trace, nodes=tuple(plain if node is lost else node for node in trace.nodes))


def test_a_lost_attribute_is_found(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), Counts(), nn.Linear(4, 4))
    compilation = compiled(model)
    original = RankModels.end_step

    def end_step(self):
        original(self)
        self._model[1].calls = 0

    monkeypatch.setattr(RankModels, "end_step", end_step)
    text = message(model, compilation)
    assert "forward order: module 1 (called whole), whose forward gives the same: attribute 1.calls" in text
    assert "attribute 1.calls: expected 1, found 0" in text


def test_wrong_code_of_a_stage_is_told_from_a_wrong_recording():
    model = Net()
    compilation = compiled(model)

    def broken(programs):
        return tuple(
            dataclasses.replace(
                p,
                stages=tuple(
                    dataclasses.replace(c, source=c.source.replace("* 2.0", "* 2.5").replace(", 2.0)", ", 2.5)"))
                    for c in p.stages
                ),
            )
            for p in programs
        )

    wrong = dataclasses.replace(
        compilation, programs=broken(compilation.programs), evaluation_programs=broken(compilation.evaluation_programs)
    )
    if wrong.programs == compilation.programs:
        first = compilation.programs[0].stages[0].source
        pytest.fail(f"nothing to break in\n{first}")
    text = message(model, wrong)
    assert "(in the programs; the recording is right)" in text


def test_programs_that_raise_and_models_that_raise():
    model = Net()
    compilation = compiled(model)
    wrong = altered(compilation, lambda trace: with_node(trace, "torch.relu", "first", args=("nothing",)))
    assert "the model runs by itself, and its compiled programs raise TypeError" in message(model, wrong)

    class Fails(Net):
        def forward(self, x):
            return super().forward(x)

    failing = Fails()
    recorded = compiled(failing)
    failing.scale.data = torch.ones(3)
    assert "the model itself, in plain PyTorch, raises RuntimeError" in message(failing, recorded)


# -- what may differ ---------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Gives other numbers in every run, as kernels with atomic additions do."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * (1 + self.size * (1 + next(_NUMBERS) % 7))


_NUMBERS = itertools.count()


@pytest.mark.parametrize(("size", "is_wrong"), [(2e-7, False), (1e-2, True)])
def test_a_model_that_does_not_repeat_itself_is_compared_within_rounding(size, is_wrong):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), mark_leaf(Noisy(size)), nn.Linear(4, 4))
    compilation = compiled(model)
    if is_wrong:
        assert "differ from those of plain PyTorch" in message(model, compilation)
    else:
        assert "differ from run to run in plain PyTorch, too" in str(
            verify_compilation(model, compilation, (BATCH, {}))
        )


def test_fused_kernels_are_compared_within_rounding():
    model, batch = zoo.build("llama")
    compilation = compiled(model, batch, kernels=("rms_norm", "swiglu"))
    assert any(use.count for use in compilation.plan.kernels)
    verified = verify_compilation(model, compilation, batch)
    assert "because fused kernels compute rms_norm, swiglu" in str(verified)


def test_gradients_of_shared_parameters_may_be_added_up_in_another_order():
    model, batch = zoo.build("gpt2_tied")
    verified = verify_compilation(model, compiled(model, batch), batch)
    assert "and within 1e-06 the gradients that several stages add up" in str(verified)


@pytest.mark.parametrize("kind", [BITWISE, ORDER, ARITHMETIC])
def test_bounds(kind):
    a = torch.tensor([1.0, float("nan"), float("inf"), -4.0])
    bound = kind.get(torch.float32, 0.0) * 4
    assert not difference(a, a.clone(), kind)
    inside, outside = a.clone(), a.clone()
    inside[0] += 0.5 * bound
    outside[0] += 2 * bound + 1e-6
    assert not difference(a, inside, kind)
    assert difference(a, outside, kind).startswith("in 1 of 4 elements, by at most ")
    assert difference(a, torch.zeros(4), kind)
    assert difference(torch.arange(3), torch.arange(3) + 1, kind)
    assert difference(a, a.double(), kind) == "expected float32[4], found float64[4]"
    assert difference(None, a, kind) == "expected none, found float32[4]"
    assert not difference(None, None, kind)


class CachesMask(nn.Module):
    """Keeps what depends on sizes alone: the recording holds for both values, and the programs never set it."""

    def __init__(self):
        super().__init__()
        self.mask = None
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(x.shape[0], 4).tril()
        return self.linear(x) * self.mask


def test_settled_caches_and_derived_weights_may_differ():
    normed = torch.nn.utils.spectral_norm(nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), CachesMask(), normed, nn.Linear(4, 4))
    assert verify_compilation(model, compiled(model), (BATCH, {})).num_compared > 0


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "convnet", "lstm", "unet"])
def test_models_with_dropout_and_half_precision_pass(name):
    model, batch = zoo.build(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    assert verify_compilation(model, compiled(model, batch), batch).num_compared > 0
    if name in ("gpt2", "llama"):
        model = model.to(torch.bfloat16)
        verify_compilation(model, compiled(model, batch), batch)


# -- nothing changes ---------------------------------------------------------------------------------------------------


class HasGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.own = random.Random(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) + torch.randn(4, generator=self.generator)


def test_nothing_is_changed():
    model = nn.Sequential(Net(), HasGenerator())
    compilation = compiled(model)
    model(*BATCH).sum().backward()
    before = copy.deepcopy(model)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    versions = [t._version for t in (*model.parameters(), *model.buffers())]
    states = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state(legacy=False))
    inputs = BATCH[0].clone()
    environment = compilation.environment.difference()
    verify_compilation(model, dataclasses.replace(compilation), ((inputs,), {}))
    assert torch.equal(inputs, BATCH[0])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(numpy.random.get_state(legacy=False))) == states[1:]
    assert [t._version for t in (*model.parameters(), *model.buffers())] == versions
    for (name, ours), theirs in zip(model.state_dict().items(), before.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    assert all(p.grad is gradients[name] for name, p in model.named_parameters())
    assert model[0].counts.calls == before[0].counts.calls
    assert torch.equal(model[1].generator.get_state(), before[1].generator.get_state())
    assert str(compilation.environment.difference()) == str(environment)
    assert not any(vars(module)["_forward_hooks"] for module in model.modules())
