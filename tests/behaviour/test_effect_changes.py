"""What a script changes between steps: plain PyTorch's numbers after it, or an error before the first wrong one.

`effect_reads` has modules that read what changes, `effect_changes` says what a script does and what is compared. The seeds of the long test
are drawn and printed; `SMPC_CHANGES_FIRST=7 SMPC_CHANGES_SEEDS=1 pytest -m slow` runs one of them again.
"""

import collections
import dataclasses
import os
import random

import effect_changes
import pytest
import torch
from effect_base import READS, WIDTH, Layer, linear
from effect_changes import MAY_BE_REFUSED, Changing, Recompiled, outcome, random_changing
from effect_runs import SCHEDULES, compiled
from torch import nn

from smpc.compile import compile_model
from smpc.errors import PartitionError, StepError
from smpc.executor.transport import loopback_transports
from smpc.rank_models import RankModels
from smpc.runtime import LoopbackRuntime, Runtime
from smpc.tracer.state.state_use import StateUse

pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # torch says so of itself, in forward mode
]
NUM_SEEDS = 6


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.matrix(20)
@pytest.mark.parametrize("name", READS)
def test_each_reader_is_equal_whatever_is_changed(name):
    number = list(READS).index(name)
    names = (name, "Layer") if number % 2 else ("Layer", name)
    case = Changing(names, number, schedule=SCHEDULES[number % 3], cut=number, kinds=("adds_attribute",), anew=True)
    assert outcome(case) == "equal", case


def check_seeds(seeds):
    """No step of these is wrong; returns how many were equal, or refused for which reason."""
    count, bad = collections.Counter(), []
    for seed in seeds:
        found = outcome(random_changing(seed))
        if found == "equal":
            count[found] += 1
            continue
        reasons = [reason for reason, text in MAY_BE_REFUSED.items() if text in found]
        if found.startswith("refused") and reasons:
            count[reasons[0]] += 1
        else:
            bad.append(f"seed {seed}, {random_changing(seed)}: {found}")
    assert not bad, f"{len(bad)} of {len(seeds)}:\n" + "\n".join(bad)
    return count


def test_a_cache_that_is_dropped_is_filled_again_by_a_program_that_has_run_before():
    """A cached_property is dropped, the program of its earlier value runs again, then what it is made from changes: the cache counts."""
    assert outcome(random_changing(95000044)) == "equal"


def test_random_changes_are_equal_or_refused():
    count = check_seeds(range(NUM_SEEDS))
    assert count["equal"] > 0.7 * NUM_SEEDS


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_random_changes_are_equal_or_refused():
    first = int(os.environ.get("SMPC_CHANGES_FIRST", random.SystemRandom().randrange(10**9)))
    number = int(os.environ.get("SMPC_CHANGES_SEEDS", "1000"))
    print(f"SMPC_CHANGES_FIRST={first} SMPC_CHANGES_SEEDS={number}")
    print(dict(check_seeds(range(first, first + number))))


def test_an_attribute_of_a_tensor_that_moves_to_another_rank_is_the_scripts():
    """The rank that calls the module whole from the third step on had a copy with the value of the first."""

    class Hooked(Changing):
        def change(self, model, number):
            if number == 2:
                model.layers[0].register_forward_hook(lambda module, args, output: output * 2)
                model.layers[0].table.factor = 3.0

    assert outcome(Hooked(("AttributeOfATensor", "Layer"), 1, schedule=SCHEDULES[0], cut=1)) == "equal"


# -- ranks in one process ----------------------------------------------------------------------------------------------


class Whole(Layer):
    """Called whole, for it has a hook; reads what a script changes in place."""

    def setup(self):
        self.config = {"scale": 0.5, "inner": nn.Sequential(nn.Tanh())}
        self.table, self.inner, self.gone = torch.ones(WIDTH, dtype=torch.float64), nn.Sequential(nn.Tanh()), 2.0
        self.register_forward_hook(lambda module, args, output: output + 1)

    def act(self, h):
        h = self.config["inner"](self.inner(h)) * self.config["scale"] + self.table
        return h * getattr(self, "gone", 1.0)


def add_module(model):
    model[1].inner.append(nn.Sigmoid())


def swap_module(model):
    model[1].inner[0] = nn.ReLU()


IN_PLACE = {
    "an item beside a module": lambda m: m[1].config.update(scale=2.0),
    "a tensor": lambda m: m[1].table.mul_(3),
    "a tensor's data": lambda m: setattr(m[1].table, "data", m[1].table * 3),
    "a submodule more": add_module,
    "another submodule": swap_module,
    "an attribute that is gone": lambda m: delattr(m[1], "gone"),
    "a class": lambda m: setattr(m[1].inner[0], "__class__", nn.Sigmoid),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_a_script_changes_in_place_changes_on_the_copies_of_ranks(name):
    """A copy kept what was changed inside of a list, an object or a module."""
    torch.manual_seed(0)
    model = nn.Sequential(linear(), Whole(), linear())
    model[2].borrowed = [model[1].linear]  # the whole module is held elsewhere, too
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    runtime = LoopbackRuntime(model)
    for number in range(2):
        if number:
            IN_PLACE[name](model)
        compilation = compile_model(model, ((x,), {}), pipeline_parallel_degree=2, microbatches=1, warn=False)
        outputs = {}
        runtime.run(runtime.install(compilation), [((x,), {})], outputs.__setitem__, training=False)
        assert torch.equal(outputs[0], model(x))


class AsksWhetherOne(nn.Module):
    """Called whole, for it has a hook."""

    def __init__(self):
        super().__init__()
        self.linear, self.first, self.table = linear(), torch.ones(WIDTH, dtype=torch.float64), {"second": None}
        self.table["second"] = self.first
        self.register_forward_hook(lambda module, args, output: output + 1)

    def forward(self, h):
        return self.linear(h) * (2 if self.first is self.table["second"] else 3)


def test_what_becomes_one_tensor_again_is_one_on_the_copies_of_ranks():
    torch.manual_seed(0)
    model = nn.Sequential(linear(), AsksWhetherOne(), linear())
    model[2].borrowed = [model[1].linear]  # the whole module is held elsewhere, too
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    runtime = LoopbackRuntime(model)
    for number in range(3):
        if number == 1:
            model[1].table["second"] = torch.zeros(WIDTH, dtype=torch.float64)
        elif number == 2:
            model[1].first = model[1].table["second"]
        compilation = compile_model(model, ((x,), {}), pipeline_parallel_degree=2, microbatches=1, warn=False)
        outputs = {}
        runtime.run(runtime.install(compilation), [((x,), {})], outputs.__setitem__, training=False)
        assert torch.equal(outputs[0], model(x))


def test_a_parameter_that_is_frozen_is_told():
    case = Changing(("Layer", "Layer"))
    model = case.model()
    pipeline = Recompiled(case, model)
    pipeline.step({})
    assert pipeline.difference() is None
    model.layers[0].linear.bias.requires_grad_(False)
    assert "requires_grad of parameter 'layers.0.linear.bias': False, which was True" in str(pipeline.difference())
    model.layers[0].linear.bias.requires_grad_(True)
    assert pipeline.difference() is None


def test_a_written_buffer_stays_where_it_is():
    """Another program wrote into the copy of another rank, and went on from old values."""
    case = Changing(("Counts", "Layer"))
    compilation = compiled(case, case.model())
    use = StateUse.of(compilation.trace)
    assert use.written == {"layers.0.calls"}
    plan = compilation.plan
    (rank,) = (stage.rank for stage in plan.stages if "layers.0.calls" in stage.buffers)
    swapped = dataclasses.replace(
        plan, stages=tuple(dataclasses.replace(stage, rank=1 - stage.rank, parameters=()) for stage in plan.stages)
    )
    models = RankModels(case.model(), plan, compilation.programs)
    models.add(plan, use)
    with pytest.raises(PartitionError, match=rf"'layers\.0\.calls', which forward writes, on the ranks .* \[{rank}\]"):
        models.add(swapped, use)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_that_is_replaced_is_refused(ranks):
    """The stages went on with the old one."""
    model, x = nn.Sequential(linear(), linear()), torch.randn(4, WIDTH, dtype=torch.float64)
    compilation = compile_model(model, ((x,), {}), pipeline_parallel_degree=ranks, microbatches=1, warn=False)
    runtime = LoopbackRuntime(model)
    if ranks == 1:
        runtime = Runtime(model, rank=0, transport=loopback_transports(1, torch.device("cpu"))[0])
    program = runtime.install(compilation)
    runtime.run(program, [((x,), {})], lambda m, output: None, training=False)
    model[0].weight = nn.Parameter(torch.ones_like(model[0].weight))
    with pytest.raises(StepError, match=r"parameter '0\.weight' was replaced by another one after the first program"):
        runtime.run(program, [((x,), {})], lambda m, output: None, training=False)


def test_all_files_are_in_the_list():
    assert {kind.__name__ for kind in effect_changes.KINDS} == {kind.make.__module__ for kind in READS.values()}
