"""Random models x random plans x random schedules never deadlock and never differ from the model itself."""

import copy

import parity
import pytest
import torch
from drawn import examples
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from random_models import RandomModel, inputs, models
from random_plans import compile_assignment, contiguous, scattered

from smpc.runtime import LoopbackRuntime
from smpc.sample_inputs import first_microbatch
from smpc.tracer import flatten, record

# No shrinking: every example compiles a pipeline, and a failure names its model and plan as it is.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
SETTINGS = settings(deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def roots_of(output):
    """A loss of whole numbers, over everything that has a gradient; nothing where nothing has one."""
    found = [leaf for leaf in flatten(output)[0] if leaf.requires_grad]
    weighted = [(leaf * torch.arange(1, leaf.shape[1] + 1)).sum() * (i + 1) for i, leaf in enumerate(found)]
    return [(sum(weighted), None)] if weighted else []


def eager(model, batch, microbatches):
    """The reference: gradient accumulation over the same microbatches."""
    outputs = {}
    for m, (args, kwargs) in enumerate(parity.split(batch, microbatches)):
        outputs[m] = model(*args, **kwargs)
        for root, _ in roots_of(outputs[m]):
            root.backward()
    return parity.results(model, outputs)


def pipelined(model, compilation, batch):
    runtime = LoopbackRuntime(model)
    program = runtime.install(compilation)
    outputs = {}

    def on_output(m, output):
        outputs[m] = output
        return roots_of(output)

    microbatches = parity.split(batch, compilation.plan.schedule.num_microbatches)
    runtime.run(program, microbatches, on_output, training=True)
    return parity.results(model, outputs)


def check(model, batch, compilation, *, exact):
    microbatches = compilation.plan.schedule.num_microbatches
    expected = eager(copy.deepcopy(model), batch, microbatches)
    got = pipelined(copy.deepcopy(model), compilation, batch)
    shared = tuple(item.name for item in compilation.plan.shared_parameters)
    parity.assert_same(expected, got, () if exact else shared)
    return expected


@st.composite
def placements(draw, num_stages):
    """A rank for each stage, every rank with at least one; mostly stage i on rank i."""
    if draw(st.booleans()):
        return None
    ranks = draw(st.lists(st.integers(0, num_stages - 1), min_size=num_stages, max_size=num_stages))
    number = {rank: i for i, rank in enumerate(sorted(set(ranks)))}
    return tuple(number[rank] for rank in ranks)


@pytest.mark.long
@settings(SETTINGS, max_examples=examples(60))
@given(
    model=models(exact=True),
    num_stages=st.sampled_from([2, 3, 4, 4, 1]),
    plan_seed=st.integers(0, 10**6),
    disorder=st.sampled_from([0.1, 0.3, 0.0, 1.0]),
    pipeline=st.sampled_from(["simple", "interleaved", "list"]),
    microbatches=st.sampled_from([2, 3, 4, 5, 1]),
    active=st.integers(1, 4),
    data=st.data(),
)
def test_any_plan_gives_the_bits_of_the_model(
    model, num_stages, plan_seed, disorder, pipeline, microbatches, active, data
):
    batch = inputs(2 * microbatches, exact=True, seed=plan_seed)
    args, kwargs = first_microbatch(batch, microbatches)
    trace = record(model, args, kwargs)
    assignment = scattered(trace, num_stages, plan_seed, disorder)
    placement = data.draw(placements(1 + max(assignment.values())))
    compilation = compile_assignment(
        trace, assignment, pipeline=pipeline, microbatches=microbatches, active=active, placement=placement
    )
    event(f"{len(compilation.plan.stages)} stages")
    event(pipeline)
    event("placed" if placement else "one stage a rank")
    event("shared parameters" if compilation.plan.shared_parameters else "none shared")
    event("recomputes" if any(stage.recomputed for stage in compilation.plan.stages) else "recomputes nothing")
    outputs, gradients, _ = check(model, batch, compilation, exact=True)
    tensors = [*(tensor for tensors in outputs for tensor in tensors), *gradients.values()]
    largest = max(float(tensor.detach().abs().max()) for tensor in tensors if tensor is not None)
    assert largest < 2**50, "sums of numbers this large would be rounded"


@pytest.mark.long
@settings(SETTINGS, max_examples=examples(60))
@given(
    model=models(exact=False),
    num_stages=st.sampled_from([2, 3, 4, 4, 1]),
    plan_seed=st.integers(0, 10**6),
    pipeline=st.sampled_from(["simple", "interleaved", "list"]),
    microbatches=st.sampled_from([2, 3, 4, 1]),
    active=st.integers(1, 4),
)
def test_cuts_of_the_order_of_execution_keep_the_order_of_sums(
    model, num_stages, plan_seed, pipeline, microbatches, active
):
    batch = inputs(3 * microbatches, exact=False, seed=plan_seed)
    args, kwargs = first_microbatch(batch, microbatches)
    trace = record(model, args, kwargs)
    assignment = contiguous(trace, num_stages, plan_seed)
    compilation = compile_assignment(trace, assignment, pipeline=pipeline, microbatches=microbatches, active=active)
    check(model, batch, compilation, exact=False)


@pytest.mark.long
@pytest.mark.parametrize("seeds", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_every_kind_of_step_is_cut_at_every_node(seeds):
    """The property tests draw steps at random; here each one is cut in several places, or everywhere, so none can be missed."""
    from random_models import STEPS

    for name in STEPS:
        model = RandomModel((("block", 0, 0), (name, 0, 1), (name, 0, 2)), (1, 2), exact=True, seed=1)
        batch = inputs(4, exact=True, seed=2)
        trace = record(model, *first_microbatch(batch, 2))
        cuts = {tuple(contiguous(trace, 2, seed).items()) for seed in range(seeds)}
        for cut in sorted(cuts):
            check(model, batch, compile_assignment(trace, dict(cut), microbatches=2), exact=True)
