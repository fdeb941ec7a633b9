"""What stages call whole, what they compute node by node, and that odd models keep their meaning however they are cut."""

import copy
import re
from functools import partial

import odd_models
import parity
import pytest
import torch
import zoo
from odd_models import MovingAverage
from random_plans import compile_assignment, contiguous
from torch import nn
from torch.utils.checkpoint import checkpoint

from smpc.codegen.split import split
from smpc.compile import compile_model
from smpc.errors import CodegenError
from smpc.runtime import LoopbackRuntime
from smpc.sample_inputs import first_microbatch
from smpc.tracer import record, verify


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", odd_models.CASES)
def test_odd_models_replay_and_run_in_pieces(name):
    model, batch = odd_models.build(name)
    before = {key: dict(vars(module)) for key, module in model.named_modules()}
    args, kwargs = first_microbatch(batch, 2)
    trace = record(model, args, kwargs)
    assert {key: dict(vars(module)) for key, module in model.named_modules()} == before
    verify(trace, model, args, kwargs)
    cuts = {tuple(contiguous(trace, stages, seed).items()): stages for seed in range(3) for stages in (2, 3, 4)}
    for number, assignment in enumerate(map(dict, cuts)):
        pipeline = ("simple", "interleaved")[number % 2]
        compilation = compile_assignment(trace, assignment, pipeline=pipeline, microbatches=2)
        expected = parity.run_eager(model, copy.deepcopy(batch), 2)
        got = parity.run_loopback(model, compilation, copy.deepcopy(batch))
        parity.assert_same(expected, got, tuple(item.name for item in compilation.plan.shared_parameters))


def stage_of(model, inputs, **modules):
    """The code of the stage of each module (its name, with `_` for `.`); nodes outside of them go with what comes before."""
    trace = record(model, inputs)
    stages, stage = {}, 0
    for node in trace.nodes:
        call = trace.calls[node.call].fqn.replace(".", "_")
        stage = max([stage, *(s for name, s in modules.items() if call == name or call.startswith(name + "_"))])
        if node.kind not in ("placeholder", "get_attr"):
            stages[node.name] = stage
    return compile_assignment(trace, stages)


def body(compilation, stage):
    """The statements of a stage, without deletions and indentation."""
    (code,) = [code for program in compilation.programs for code in program.stages if code.index == stage]
    lines = code.source.partition("def forward")[2].splitlines()[1:]
    return [line.strip() for line in lines if not line.strip().startswith("del ")]


def test_blocks_of_gpt2_are_called_whole():
    model, (_, kwargs) = zoo.build("gpt2")
    trace = record(model, (), kwargs)
    (cut,) = [call.first for call in trace.calls if call.fqn == "transformer.h.2"]
    stages = {
        node.name: int(position >= cut)
        for position, node in enumerate(trace.nodes)
        if node.kind not in ("placeholder", "get_attr")
    }
    compilation = compile_assignment(trace, stages)
    first, second = (program.stages[0] for program in compilation.programs)
    assert first.modules[-2:] == ("transformer.h.0", "transformer.h.1")
    assert second.modules == ("transformer.h.2", "transformer.h.3", "transformer.ln_f", "lm_head")
    assert "transformer.wte" in first.modules
    (line,) = [line for line in body(compilation, 1) if line.startswith("h_3 =")]
    assert re.fullmatch(r"h_3 = self\.transformer\.h\[3\]\(h_2, .*\)", line)


class Leaks(nn.Module):
    """`leaky` lets another module use a value that it does not return."""

    class Leaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            self.kept = self.inner(x)
            return self.kept * 2

    def __init__(self):
        super().__init__()
        self.leaky, self.tidy, self.out = self.Leaky(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)

    def forward(self, x):
        return self.out(self.tidy(self.leaky(x)) + self.leaky.kept)


def test_a_call_with_a_value_that_leaks_is_opened_and_its_children_are_called():
    assert body(stage_of(Leaks(), (torch.ones(2, 4),), out=1), 0) == [
        "inner = self.leaky.inner(args_0)",
        "leaky = inner * 2",
        "tidy = self.tidy(leaky)",
        "add = tidy + inner",
        "return (add,)",
    ]


def test_a_call_that_is_cut_is_opened_in_both_stages():
    compilation = stage_of(
        nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.ReLU()), (torch.ones(2, 4),), **{"0_1": 1}
    )
    assert body(compilation, 0) == ["v_1 = self[0][0](args_0)", "return (v_1,)"]
    assert body(compilation, 1) == ["_0 = self[0][1](v_1)", "_1 = self[1](_0)", "return (_1,)"]


class Dead(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.used(x)
        self.unused(h).exp()
        torch.rand(2)
        return self.out(h)


def test_what_nobody_uses_is_left_out_but_random_draws_stay():
    assert body(stage_of(Dead(), (torch.ones(2, 4),), out=1), 0) == [
        "used = self.used(args_0)",
        "rand = torch.rand(2)",
        "return (used,)",
    ]


def test_a_rebound_buffer_is_read_before_it_is_rebound():
    lines = body(stage_of(MovingAverage(), (torch.ones(2, 4),)), 0)
    assert lines[0] == "a_mean = self.a.mean"
    assert any(line.startswith("self.a.mean = ") for line in lines)
    assert not any("* self.a.mean" in line for line in lines)


class Modes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            h = x * 2
            g = h + 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.a(g)
        return self.out(y.float())


def test_grad_mode_and_autocast_are_written_once_around_their_statements():
    compilation = stage_of(Modes(), (torch.ones(2, 4),), out=1)
    assert body(compilation, 0) == [
        "with torch.no_grad():",
        "mul = args_0 * 2",
        "add = mul + 1",
        "with torch.autocast('cpu', torch.bfloat16, enabled=True):",
        "a = self.a(add)",
        "float_1 = a.float()",
        "return (float_1,)",
    ]


LOW = {"device_type": "cpu", "dtype": torch.bfloat16}


class UsedAgain(nn.Module):
    """A weight that several layers use under autocast: torch casts it once, and adds up its gradients in half precision, per scope."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.a, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.out(self.inside(self.first(x)).float())


class WithAnInterlude(UsedAgain):
    def inside(self, h):
        with torch.autocast(**LOW):
            h = self.a(h)
            with torch.autocast("cpu", enabled=False):
                h = torch.tanh(h.float())
            return self.a(h)


class TwoScopes(UsedAgain):
    def inside(self, h):
        with torch.autocast(**LOW):
            h = self.a(h)
        with torch.autocast(**LOW):
            return self.a(self.a(h))


class WithoutCache(UsedAgain):
    def inside(self, h):
        with torch.autocast(**LOW, cache_enabled=False):
            return self.a(self.a(h))


class Forgetting(UsedAgain):
    def inside(self, h):
        with torch.autocast(**LOW):
            h = self.a(h)
            torch.clear_autocast_cache()
            return self.a(h)


class AroundARegion(UsedAgain):
    def inside(self, h):
        with torch.autocast(**LOW):
            h = checkpoint(lambda x: self.a(x).tanh(), self.a(h), use_reentrant=False)
            return self.a(h)


class ScopesInARegion(UsedAgain):
    def inside(self, h):
        return checkpoint(partial(TwoScopes.inside, self), h, use_reentrant=False)


class WithoutGrad(UsedAgain):
    def inside(self, h):
        with torch.autocast(**LOW):
            with torch.no_grad():
                scale = self.a(h).sigmoid()
            return self.a(h) * scale


class Scoped(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.a = a

    def forward(self, h):
        return TwoScopes.inside(self, h)


class AroundModules(UsedAgain):
    """Autocasts inside of a module that is called whole are its own, unless there is one around it."""

    def __init__(self):
        super().__init__()
        self.alone, self.among = Scoped(self.a), Scoped(self.a)

    def inside(self, h):
        h = self.alone(h.tanh())
        with torch.autocast(**LOW):
            left, right = self.among(h).chunk(2, -1)
            with torch.autocast("cpu", enabled=False):
                h = torch.cat([right.float(), left.float()], -1)
            return self.among(h)


@pytest.mark.parametrize(
    "kind",
    [
        WithAnInterlude,
        TwoScopes,
        WithoutCache,
        Forgetting,
        AroundARegion,
        ScopesInARegion,
        WithoutGrad,
        AroundModules,
    ],
)
def test_casts_of_parameters_live_as_long_as_in_the_model(kind):
    """Contexts next to each other were joined, and nested ones taken apart: gradients were off by 1e-3, and replays called defects."""
    model, x = kind(), torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    verify(record(model, (x,)), model, (x,))
    compilation = compile_model(model, (x,), pipeline_parallel_degree=1, microbatches=2)
    runtime, mine = LoopbackRuntime(model), copy.deepcopy(model)
    runtime.install(compilation)
    parts = x.chunk(2)
    runtime.run(0, [((part,), {}) for part in parts], lambda _, out: [(out.square().sum(), None)], training=True)
    for part in parts:
        mine(part).square().sum().backward()
    assert mine.a.weight.grad is not None or kind is WithoutGrad  # there torch reuses a cast that has no gradient
    for (name, found), expected in zip(model.named_parameters(), mine.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None), name
        assert found.grad is None or torch.equal(found.grad, expected.grad), name


def test_no_variable_outlives_its_last_use():
    model, batch = zoo.build("unet")
    compilation = compile_model(model, batch, pipeline_parallel_degree=2)
    for program in compilation.programs:
        for code in program.stages:
            lines = [line.strip() for line in code.source.splitlines()]
            kept = set(re.findall(r"\w+", lines[-1]))
            alive = set(re.findall(r"\w+", lines[3].partition("(self, ")[2]))
            for line in lines[4:-1]:
                if line.startswith("del "):
                    alive -= set(line[4:].split(", "))
                elif not line.startswith("with"):
                    alive |= set(re.match(r"(\w+) = ", line).groups())
            assert alive == kept - {"return"}


def test_a_plan_of_another_trace_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = compile_model(model, torch.ones(2, 4), pipeline_parallel_degree=2).plan
    with pytest.raises(CodegenError, match="plan again"):
        split(record(model, (torch.ones(3, 4),)), plan)


def test_dead_modules_are_not_run_where_their_arguments_could_be_had():
    """A module that nobody uses, called on a value that another stage could recompute, once ran without its argument."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.mid, self.dead, self.out = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            h = self.first(x)
            with torch.no_grad():
                g = h * 2
            y = self.mid(x)
            self.dead(g)
            return self.out(y)

    compilation = stage_of(Model(), (torch.ones(2, 4),), dead=1)
    assert body(compilation, 1) == ["out = self.out(mid)", "return (out,)"]
