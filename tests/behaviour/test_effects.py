"""What forward does beside computing: each kind of it is plain PyTorch's in a pipeline, or refused before anything is wrong.

Every rank of these pipelines has memory of its own. `effect_models` has the kinds, `effect_runs` says what is compared.
"""

import collections
import copy
import json
import os
import random
import re

import effect_runs
import numpy
import pytest
import torch
from effect_autograd import ForceOf
from effect_base import EFFECTS, REFUSED, WIDTH, linear
from effect_runs import SCHEDULES, Case, outcome, random_case
from torch import nn
from torch.nn.modules import module as modules

from smpc.codegen.rewrite.tensor_parallel.layouts import Layout
from smpc.compile import compile_model
from smpc.errors import PartitionError, StepError, TraceError
from smpc.executor.collectives import TensorGroup
from smpc.executor.parameter_slices import slice_parameters
from smpc.runtime import LoopbackRuntime
from smpc.tracer import Trace, record
from smpc.tracer.ir import NodeKind

pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # torch says so of itself, in forward mode
]
NUM_SEEDS = 15
MANY_SEEDS = 1000


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trace_of(*names):
    case = Case(names)
    args, kwargs = case.pieces()[0]
    return record(case.model(), args, kwargs)


@pytest.mark.matrix(10)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if number % 3 == 0 else pytest.mark.slow) for number, name in enumerate(EFFECTS)],
)
def test_each_effect_is_equal_or_refused_wherever_it_is_cut(name):
    expected, position = EFFECTS[name].expected, list(EFFECTS).index(name)
    for number in range(2):
        names = (name, "Layer") if number else ("Layer", name)
        case = Case(names, stages=2 + number, schedule=SCHEDULES[(position + number) % 3], cut=position)
        found = outcome(case)
        assert found.partition(":")[0] == expected, f"{case}: {found}"


REASONS = {
    "SeedsTorch": "forward calls torch.manual_seed",
    "SeedsByMethod": "forward seeds or sets torch's generator",
    "SeedsPython": "forward calls random.seed",
    "SeedsNumpy": "forward calls numpy.random.seed",
    "FreezesParameter": "changes whether layers.1.linear.bias requires grad (requires_grad_)",
    "ReadsGradient": "uses the gradient of layers.1.linear.weight",
    "GivesParameterOtherData": "gives layers.1.other.weight other memory",
    "WritesWeight": "layers.1.other.weight: needed as it was at",
    "OverwritesFactor": "layers.1.mean: needed as it was at",
    "LeavesGradOff": "forward leaves grad mode changed",
    "LeavesDefaultDtype": "forward leaves the default dtype (torch.set_default_dtype) changed",
    "HookOnParameterInForward": "hangs a hook on layers.1.linear.bias",
    "BackwardToParameters": "a backward that adds to the gradients of parameters",
    "BufferOfAParameter": "found 'layers.1.linear.bias' and 'layers.1.shadow' in the same",
    "AttributeOfAParameter": "uses layers.1.shadow, no parameter, which shares the memory of layers.1.linear.bias",
    "TrainedAttribute": "uses layers.1.secret..0, no parameter, which requires grad",
    "AssignsForGood": "puts another tensor in the place of parameter layers.1.inner.weight",
    "HookOnTheModel": "it has a backward hook",
}


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", REASONS)
def test_a_refusal_says_what_where_and_what_to_do(name):
    found = outcome(Case(("Layer", name)))
    assert found.startswith("refused: "), found
    assert REASONS[name] in found
    assert "what to do:" in found or "; have forward" in found or "; give one module" in found
    if name not in ("BufferOfAParameter", "HookOnTheModel"):
        assert re.search(r"effect_\w+\.py:\d+", found)


def check_seeds(seeds):
    """No model of these seeds is wrong; returns how many there are of every outcome."""
    count, bad = collections.Counter(), []
    for seed in seeds:
        case = random_case(seed)
        found = outcome(case)
        kind = found.partition(":")[0]
        must_be_refused = any(EFFECTS[name].expected == REFUSED for name in case.names)
        may_be_refused = must_be_refused or "hooks on parameters that several stages use" in found
        if (kind == "refused" and may_be_refused) or (kind == "equal" and not must_be_refused):
            count[kind] += 1
        else:
            bad.append(f"seed {seed}, {case}: {found}")
    assert not bad, f"{len(bad)} of {len(seeds)}:\n" + "\n".join(bad)
    return count


@pytest.mark.long
def test_random_combinations_are_equal_or_refused():
    count = check_seeds(range(NUM_SEEDS))
    assert count["equal"] > NUM_SEEDS // 2
    assert count["refused"] > 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_random_combinations_are_equal_or_refused():
    first = int(os.environ.get("SMPC_EFFECTS_FIRST", random.SystemRandom().randrange(10**9)))
    print(f"SMPC_EFFECTS_FIRST={first}")
    print(dict(check_seeds(range(first, first + MANY_SEEDS))))


# -- what a trace says -------------------------------------------------------------------------------------------------


def test_what_differentiates_is_one_node_that_no_stage_splits():
    trace = trace_of("Layer", "Forces")
    assert [node.target for node in trace.nodes if node.kind is NodeKind.CALL_MODULE] == ["layers.1"]
    assert trace.differentiating == ("layers_1",)
    assert Trace.from_json(trace.to_json()) == trace
    case = Case(("Layer", "Forces"), schedule="zb-h1", cut=3)
    compilation = effect_runs.compile_cut(trace, case)
    sources = [code.source for program in compilation.programs for code in program.stages]
    assert sum("differentiates = True" in source for source in sources) == 1


def test_what_differentiates_may_follow_a_module_whose_graph_is_not_recorded():
    """A norm that averages over all batches needs the value of its counter, so it is called whole."""
    model = nn.Sequential(
        linear(), nn.BatchNorm1d(WIDTH, momentum=None, dtype=torch.float64), Case(("ForcesByTwoWays",)).model()
    )
    trace = record(model, (torch.zeros(4, WIDTH, dtype=torch.float64),))
    assert [node.target for node in trace.nodes if node.kind is NodeKind.CALL_MODULE] == ["1", "2.layers.0"]


def test_what_such_a_module_has_computed_is_not_differentiated_elsewhere():
    class Joins(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH, momentum=None, dtype=torch.float64)
            self.force = ForceOf()

        def forward(self, x):
            place = x * 2
            return place - self.force(self.norm(place), place)

    model = nn.Sequential(linear(), Joins(), linear())
    trace = record(model, (torch.zeros(4, WIDTH, dtype=torch.float64),))
    assert [node.target for node in trace.nodes if node.kind is NodeKind.CALL_MODULE] == ["1"]


def test_traces_without_such_effects_have_their_old_form():
    """So that plans of earlier jobs fit."""
    fields = json.loads(trace_of("Layer").to_json())
    assert "differentiating" not in fields
    assert "overwritten" not in fields


def test_one_microbatch_may_overwrite_what_its_own_backward_has_read():
    args, kwargs = Case(("Layer", "OverwritesFactor")).batch()
    model = Case(("Layer", "OverwritesFactor")).model()
    compile_model(model, (args, kwargs), pipeline_parallel_degree=2, microbatches=1)
    with pytest.raises(PartitionError, match="as 2 microbatches are under way"):
        compile_model(model, (args, kwargs), pipeline_parallel_degree=2, microbatches=2)


def test_a_checkpoint_around_what_differentiates_is_left_out():
    """Computing it again would run autograd inside autograd."""
    case = Case(("Layer", "Forces"))
    compilation = compile_model(
        case.model(), case.batch(), pipeline_parallel_degree=2, microbatches=2, recompute=("layers.*",), warn=False
    )
    assert any("runs autograd in its forward" in note for note in compilation.plan.notes)
    assert [region.name for stage in compilation.plan.stages for region in stage.checkpoints] == ["layers.0"]


def test_generators_are_afterwards_what_they_were():
    model = Case(("Dropout", "NumpysRandom", "OwnPythonGenerator", "ForksAndSeeds")).model()
    effect_runs.seed_everything(5)
    before, own = effect_runs.random_states(), model.layers[2].generator.getstate()
    record(model, *Case(("Layer",)).pieces()[0])
    after = effect_runs.random_states()
    assert effect_runs.differences(before, after) == []
    assert model.layers[2].generator.getstate() == own


def test_settings_are_afterwards_what_they_were():
    """Of a model that is refused because it leaves them changed, too."""
    for name in ("LeavesGradOff", "LeavesDefaultDtype"):
        with pytest.raises(TraceError, match="forward leaves"):
            trace_of("Layer", name)
        assert torch.is_grad_enabled()
        assert torch.get_default_dtype() is torch.float32


class Swallows(nn.Module):
    """Python that takes every exception for one of its own."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        h = self.linear(x)
        try:
            torch.manual_seed(0)
        except Exception:
            h = h + 1
        return h


def test_an_error_that_the_model_catches_is_raised_again():
    x = torch.randn(2, WIDTH, dtype=torch.float64)
    with pytest.raises(TraceError, match=r"forward calls torch\.manual_seed"):
        record(nn.Sequential(Swallows(), linear()), (x,))


class SharesGenerator(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.linear, self.generator = linear(), generator

    def forward(self, x):
        return self.linear(x) * self.generator.random()


def test_a_generator_of_two_modules_is_refused():
    """Each rank would have one of its own."""
    generator = numpy.random.default_rng(0)
    model = nn.Sequential(SharesGenerator(generator), SharesGenerator(generator))
    with pytest.raises(TraceError, match="module '0' draws from the same generator"):
        record(model, (torch.randn(2, WIDTH, dtype=torch.float64),))


# -- hooks that come later, and hooks of all modules -------------------------------------------------------------------


def cut_through_the_first(names, shared=False):
    """A case whose first layer is cut, and whose second one is whole."""
    for cut in range(20):
        case = Case(names, shared=shared, cut=cut)
        programs = effect_runs.compiled(case, case.model()).programs
        whole = {path for program in programs for code in program.stages for path in code.modules}
        if "layers.0" not in whole and "layers.1" in whole:
            return case
    raise AssertionError("20 random cuts, and none through the first layer")


def test_hooks_on_all_modules_are_refused():
    model, x = Case(("Layer",)).model(), torch.randn(2, WIDTH, dtype=torch.float64)
    registers = {
        "forward hook": modules.register_module_forward_hook,
        "forward pre-hook": modules.register_module_forward_pre_hook,
        "backward hook": modules.register_module_full_backward_hook,
        "backward pre-hook": modules.register_module_full_backward_pre_hook,
    }
    for kind, register in registers.items():
        handle = register(lambda *_: None)
        try:
            with pytest.raises(TraceError, match=f"a {kind} is registered for all modules"):
                record(model, (x,))
        finally:
            handle.remove()
    record(model, (x,))


def test_a_hook_that_comes_after_the_first_step_is_told_where_it_would_be_lost():
    """The first layer is cut between its linear map and the rest, the second one is whole."""
    case = cut_through_the_first(("Layer", "Layer"))
    model = case.model()
    runtime = LoopbackRuntime(model)
    program = runtime.install(effect_runs.compiled(case, model))

    def step():
        runtime.run(program, case.pieces(), lambda m, output: effect_runs.roots_of(output), training=True)

    step()
    seen = []
    model.layers[1].register_forward_hook(lambda module, args, output: seen.append(module))
    step()
    assert seen == [model.layers[1]] * 2
    handle = model.layers[0].register_full_backward_hook(lambda module, inputs, outputs: None)
    with pytest.raises(StepError, match=r"module 'layers\.0' has a backward hook now, but was cut"):
        step()
    handle.remove()
    step()


def test_a_late_hook_on_a_module_that_one_call_of_two_would_run_is_refused():
    """With other weights for the time of a call, that call is computed node by node; the hook ran once instead of twice."""
    trace = trace_of("AssignsForAWhile", "Layer")
    for cut in range(20):
        case = Case(("AssignsForAWhile", "Layer"), cut=cut)
        compilation = effect_runs.compile_cut(trace, case)
        sources = [code.source for program in compilation.programs for code in program.stages]
        if sum(source.count("self.layers[0].inner(") for source in sources) == 1:
            break
    else:
        raise AssertionError("20 random cuts, and none through the first layer")
    model = case.model()
    runtime = LoopbackRuntime(model)
    program = runtime.install(compilation)
    model.layers[0].inner.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(StepError, match=r"module 'layers\.0\.inner' has a forward hook now, but was cut"):
        runtime.run(program, case.pieces(), lambda m, output: effect_runs.roots_of(output), training=True)


def test_a_hook_on_a_shared_parameter_is_refused_whenever_it_comes():
    case = Case(("Layer", "Layer"), shared=True, cut=1)
    model = case.model()
    runtime = LoopbackRuntime(model)
    program = runtime.install(effect_runs.compiled(case, model))
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    with pytest.raises(PartitionError, match=r"no hooks on parameters that several stages use, found one on layers\.0"):
        runtime.run(program, case.pieces(), lambda m, output: effect_runs.roots_of(output), training=True)


def test_a_hook_on_a_parameter_that_becomes_slices_is_refused():
    """It would see the gradient of a slice, and of another one on each rank."""
    model = nn.Sequential(linear(), linear())
    model[1].weight.register_hook(lambda gradient: gradient / gradient.norm())
    group = TensorGroup()  # of one: its slices are whole, which the hook cannot know
    slice_parameters(model, {"0.weight": Layout.sharded(0)}, group)
    with pytest.raises(PartitionError, match=r"tensor-parallel ranks hold slices, found one on 1\.weight"):
        slice_parameters(model, {"1.weight": Layout.sharded(0)}, group)


# -- memory of the ranks -----------------------------------------------------------------------------------------------


def test_a_program_that_reads_what_its_rank_does_not_hold_fails_in_one_process_too():
    """As a depth model did on real ranks only: a module whose result is dropped was called where its weights were not."""
    case = cut_through_the_first(("Layer", "Layer"))
    model = case.model()
    runtime = LoopbackRuntime(model)
    runtime.install(effect_runs.compiled(case, model))
    *_, last = runtime.stages().values()
    of_last_rank = last._origin
    assert of_last_rank is not model
    assert of_last_rank.layers[0].linear.weight.numel() == 0
    with pytest.raises(RuntimeError):
        of_last_rank.layers[0].linear(torch.ones(1, WIDTH, dtype=torch.float64))


def test_what_ranks_hold_alone_is_the_models_own():
    """Gradients, optimizers and hooks meet the user's parameters; a shared one has a copy for each further rank."""
    case = cut_through_the_first(("Layer", "Layer"), shared=True)
    model = case.model()
    runtime = LoopbackRuntime(model)
    runtime.install(effect_runs.compiled(case, model))
    own = {id(p) for p in model.parameters()}
    first, last = (dict(stage.named_parameters()) for stage in runtime.stages().values())
    shared = {"layers.0.linear.weight", "head.weight"}
    assert all(id(p) in own for p in first.values())
    assert [name for name, p in last.items() if id(p) not in own] == [name for name in last if name in shared] != []
    assert all(p.data_ptr() != model.head.weight.data_ptr() for name, p in last.items() if name in shared)


def test_what_a_script_changes_between_steps_changes_on_all_ranks():
    model = Case(("Counts", "Layer")).model()
    case = Case(("Counts", "Layer"), cut=5)
    reference = copy.deepcopy(model)
    runtime = LoopbackRuntime(model)
    program = runtime.install(effect_runs.compiled(case, model))
    for value in (3.0, -1.0):
        with torch.no_grad():
            for each in (model, reference):
                each.layers[0].calls.fill_(value)
                each.head.bias.fill_(value)
        outputs = {}
        runtime.run(program, case.pieces(), outputs.__setitem__, training=False)
        for m, (args, kwargs) in enumerate(case.pieces()):
            assert torch.equal(outputs[m], reference(*args, **kwargs))
        assert torch.equal(model.layers[0].calls, reference.layers[0].calls)
