"""What forward does beside computing, on ranks that are processes: plain PyTorch's numbers, in programs and in training scripts."""

import random

import effect_runs
import pytest
import torch
import torch.distributed as dist
from effect_base import WIDTH
from effect_models import EffectModel
from effect_runs import MICROBATCHES, SCHEDULES, STEPS, Case
from executor_harness import run_workers

import smpc.v1 as smp
from smpc.errors import PartitionError, TraceError
from smpc.executor.transport import GlooTransport
from smpc.runtime import Runtime

NAMES = (
    ("Layer", "Forces"),
    ("Forces", "Layer"),
    ("ForcesByTwoWays", "Layer"),
    ("InnerStep", "Layer"),
    ("Layer", "FullBackwardHook"),
    ("ForwardHooks", "HookAfterAccumulation"),
    ("HookOnArgument", "DetachesInPlace"),
    ("BufferOfAnother", "Layer"),
    ("CallsWithOthers", "SwapsOwn"),
    ("UsesOthersWeight", "Layer"),
    ("ComputesForNothing", "ReturnsForNothing"),
    ("UsesOthersForNothing", "Layer"),
    ("OwnTorchGenerator", "ForksAndSeeds"),
    ("PythonsRandom", "NumpysRandom"),
    ("SavesCoarsely", "ParametersOfAFlatOne"),
    ("WritesBias", "RenormalisesEmbedding"),
)
CASES = [Case(names, stages=2, schedule=SCHEDULES[i % 3], cut=i) for i, names in enumerate(NAMES)]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # torch says so of itself, in forward mode
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_case(rank, case, group):
    """Why a case is refused, "" if it is not, what a rank knows after the steps of what it holds, and the parameters of several ranks."""
    model = case.model()
    try:
        compilation = effect_runs.compiled(case, model)
        runtime = Runtime(model, rank=rank, transport=GlooTransport(group))
        effect_runs.seed_everything(case.seed + 1)
        program = runtime.install(compilation)
    except (TraceError, PartitionError) as error:
        return str(error), {}, ()
    stages = [stage for stage in compilation.plan.stages if stage.rank == rank]
    held = {name for stage in stages for name in (*stage.parameters, *stage.buffers)}
    for name, parameter in model.named_parameters():
        if name not in held:
            parameter.data = torch.empty(0, dtype=parameter.dtype)  # as in a training script

    def step(outputs):
        def on_output(m, output):
            outputs[m] = output
            return effect_runs.roots_of(output)

        runtime.run(program, case.pieces() if rank == 0 else None, on_output, training=True)

    found = effect_runs.train(model, step)
    results = {key: value for key, value in found.items() if "output" in key or key.rpartition(" ")[2] in held}
    return "", results, tuple(item.name for item in compilation.plan.shared_parameters)


def run_cases(rank, _, cases):
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3)}
    return [run_case(rank, case, groups[case.stages]) if rank < case.stages else None for case in cases]


def outcomes(folder, cases):
    """Runs the cases on up to three processes. By case "equal", or what all ranks have refused it for; asserts that there is no other."""
    by_rank = run_workers(run_cases, 3, folder, cases)
    for number, case in enumerate(cases):
        found = [of_rank[number] for of_rank in by_rank if of_rank[number] is not None]
        ((reason, shared),) = {(reason, shared) for reason, _, shared in found}
        if reason:
            yield reason
            continue
        expected = effect_runs.eager(case)
        known = {name for _, results, _ in found for name in results}
        assert {f"parameter {name}" for name, _ in case.model().named_parameters()} <= known, case
        assert {f"step {step}, output {m}" for step in range(STEPS) for m in range(MICROBATCHES)} <= known, case
        for _, results, _ in found:
            wrong = effect_runs.differences({name: expected[name] for name in results}, results, shared)
            assert not wrong, f"{case}: {wrong}"
        yield "equal"


@pytest.mark.long
def test_effects_on_real_ranks(tmp_path):
    """All of a list, and some random combinations."""
    seeds = [effect_runs.random_case(seed) for seed in range(4)]
    found = list(outcomes(tmp_path, [*CASES, *seeds]))
    assert found[: len(CASES)] == ["equal"] * len(CASES)
    assert found[len(CASES) :].count("equal") >= 2


@pytest.mark.slow
def test_many_random_combinations_on_real_ranks(tmp_path):
    first = random.SystemRandom().randrange(10**9)
    print(f"seeds from {first}")
    found = list(outcomes(tmp_path, [effect_runs.random_case(seed) for seed in range(first, first + 100)]))
    assert found.count("equal") > 50


@smp.step
def train_step(model, x):
    output = model(x)
    model.backward((output * torch.arange(1.0, WIDTH + 1, dtype=x.dtype)).sum() / x.shape[0])
    return output


@smp.step
def evaluate(model, x):
    return model(x)


SCRIPT = ("Layer", "Forces", "ForwardHooks", "FullBackwardHook", "ViewsOfABuffer", "ComputesForNothing")


def train_script(rank, folder, config):
    """A training script: outputs of every step, of an evaluation at the end, and the state dict."""
    smp.init({"microbatches": MICROBATCHES, **config})
    model = smp.DistributedModel(EffectModel(SCRIPT, 0))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    (x,), _ = Case(SCRIPT).batch()
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        found.append([output.detach() for output in train_step(model, x).outputs])
        optimizer.step()
    found.append([output.detach() for output in evaluate(model, x).outputs])
    return found, model.state_dict()


def script_by_itself():
    model = EffectModel(SCRIPT, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    (x,), _ = Case(SCRIPT).batch()
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        found.append([])
        for piece in x.chunk(MICROBATCHES):
            output = model(piece)
            loss = (output * torch.arange(1.0, WIDTH + 1, dtype=x.dtype)).sum() / piece.shape[0]
            (loss / MICROBATCHES).backward()
            found[-1].append(output.detach())
        optimizer.step()
    found.append([model(piece).detach() for piece in x.chunk(MICROBATCHES)])
    return found, model.state_dict()


@pytest.mark.parametrize(
    ("world", "config"),
    [
        (2, {"pipeline_parallel_degree": 2}),
        pytest.param(4, {"pipeline_parallel_degree": 2, "ddp": True}, marks=pytest.mark.slow),
        (4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True}),
    ],
    ids=["pipeline", "replicas", "tensor parallel"],
)
def test_a_training_script_with_forces_and_hooks(tmp_path, world, config):
    """Trained and then evaluated, where nothing asks for gradients but the model itself."""
    expected, state = script_by_itself()
    for found, own in run_workers(train_script, world, tmp_path, config):
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), f"step {step}"
        for name, value in own.items():
            assert torch.equal(value, state[name]), name
