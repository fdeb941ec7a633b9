"""Real processes against the same microbatches in one process: outputs, losses and every gradient, bit for bit."""

import itertools

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from executor_harness import run_workers

from smpc.compile import compile_model
from smpc.executor import StageReplicas
from smpc.executor.transport import GlooTransport
from smpc.runtime import Runtime
from smpc.tracer import flatten

MICROBATCHES = 4
CASES = list(itertools.product(["gpt2", "t5", "unet"], [2, 3], ["simple", "interleaved"]))


def compiled(name, stages, pipeline):
    model, batch = zoo.build(name)
    return compile_model(model, batch, pipeline_parallel_degree=stages, microbatches=MICROBATCHES, pipeline=pipeline)


def train(rank, runtime, program, batch):
    """One step; the losses and output tensors by microbatch (on the last rank), and the gradients of this rank's parameters."""
    found = {}

    def on_output(m, output):
        loss = parity.loss_of(output)
        found[m] = [loss.detach(), *(leaf.detach() for leaf in flatten(output)[0] if isinstance(leaf, torch.Tensor))]
        return [(loss / MICROBATCHES, None)]

    pieces = parity.split(batch, MICROBATCHES) if rank == 0 else None
    runtime.run(program, pieces, on_output, training=True)
    grads = {name: p.grad for stage in runtime.stages.values() for name, p in stage.named_parameters()}
    return found, grads


def run_all(rank, _, cases, compilations, replicated):
    """What four processes run, started once for everything here: all cases, then two replicas."""
    return run_cases(rank, cases, compilations), run_replicas(rank, replicated)


def run_cases(rank, cases, compilations):
    """The cases in turn, each on the first ranks; the others are idle."""
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3)}
    found = []
    for (name, stages, _), compilation in zip(cases, compilations, strict=True):
        if rank >= stages:
            found.append(None)
            continue
        model, batch = zoo.build(name)
        runtime = Runtime(model, rank=rank, transport=GlooTransport(groups[stages]))
        found.append(train(rank, runtime, runtime.install(compilation), batch))
    return found


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """By case that this run has chosen, its compilation and what the ranks had; and what replicas had. In one launch."""
    items = [item for item in request.session.items if item.fspath == request.fspath and hasattr(item, "callspec")]
    cases = [item.callspec.params["case"] for item in items]
    compilations = [compiled(*case) for case in cases]
    replicated = compiled("gpt2", 2, "interleaved")
    found = run_workers(run_all, 4, tmp_path_factory.mktemp("cases"), cases, compilations, replicated)
    by_case = zip(*(of_rank[0] for of_rank in found), strict=True)
    return dict(zip(cases, zip(compilations, by_case, strict=True), strict=True)), [of_rank[1] for of_rank in found]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def eager(name, seed=0):
    """The same step in this process: losses and outputs by microbatch, gradients."""
    model, batch = zoo.build(name)
    if seed:
        _, batch = zoo.build(name, seed)
    found = {}
    for m, (args, kwargs) in enumerate(parity.split(batch, MICROBATCHES)):
        output = model(*args, **kwargs)
        loss = parity.loss_of(output)
        found[m] = [loss.detach(), *(leaf.detach() for leaf in flatten(output)[0] if isinstance(leaf, torch.Tensor))]
        (loss / MICROBATCHES).backward()
    return found, {name: p.grad for name, p in model.named_parameters()}


def assert_gradient(found, expected, name, shared):
    if name in shared:
        error, scale = (found - expected).abs().max().item(), expected.abs().max().item()
        assert error <= 1e-6 * scale, f"gradient of shared {name} differs by {error}, largest value {scale}"
    else:
        assert torch.equal(found, expected), f"gradient of {name}"


@pytest.mark.long
@pytest.mark.matrix(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_step_equals_that_of_one_process(trained, case):
    name, stages, _ = case
    compilation, by_rank = trained[0][case]
    by_rank = by_rank[:stages]
    outputs, gradients = eager(name)
    assert [sorted(of_rank[0]) for of_rank in by_rank] == [[]] * (stages - 1) + [list(range(MICROBATCHES))]
    for m, expected in outputs.items():
        tensors = by_rank[-1][0][m]
        assert len(tensors) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True)), f"microbatch {m}"
    shared = {item.name for item in compilation.plan.shared_parameters}
    for parameter, expected in gradients.items():
        copies = [grads[parameter] for _, grads in by_rank if parameter in grads]
        assert len(copies) == 1 or parameter in shared, parameter
        for copy in copies:
            assert_gradient(copy, expected, parameter, shared)
            assert torch.equal(copy, copies[0]), f"holders of {parameter} differ"
    assert {key for _, grads in by_rank for key in grads} == set(gradients)


def run_replicas(rank, compilation):
    """Global rank = 2 * replica + pipeline rank; each replica has a batch of its own, and starts from other weights."""
    replica, position = divmod(rank, 2)
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    holders = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model, _ = zoo.build("gpt2")
    _, batch = zoo.build("gpt2", seed=replica + 1)
    if replica == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
    runtime = Runtime(
        model,
        rank=position,
        transport=GlooTransport(pipelines[replica]),
        hooks=lambda stages: StageReplicas(stages, holders[position]),
    )
    return train(position, runtime, runtime.install(compilation), batch)


def test_two_stages_times_two_replicas_average_the_gradients(trained):
    _, found = trained
    expected = [eager("gpt2", seed=1), eager("gpt2", seed=2)]
    for replica, (outputs, _) in enumerate(expected):
        for m, tensors in outputs.items():
            got = found[2 * replica + 1][0][m]
            assert all(torch.equal(a, b) for a, b in zip(got, tensors, strict=True)), f"microbatch {m}"
    for name in expected[0][1]:
        average = expected[0][1][name] / 2 + expected[1][1][name] / 2
        copies = [grads[name] for _, grads in found if name in grads]
        assert len(copies) == 2, name
        assert torch.equal(copies[0], copies[1]), name
        assert torch.equal(copies[0], average), name
