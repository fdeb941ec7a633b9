"""Trains a model of `effect_models` by itself and as a pipeline, from the same seeds, and compares all that there is to compare."""

import random
from dataclasses import dataclass

import numpy
import parity
import torch
from effect_base import WIDTH
from effect_models import EffectModel, random_names
from random_plans import contiguous

from smpc.codegen.schedules.named import Choice
from smpc.compile import Compilation, compile_plan
from smpc.errors import PartitionError, TraceError
from smpc.partitioner.graph.plan import ScheduleSummary
from smpc.partitioner.planner import plan_from_assignment
from smpc.runtime import LoopbackRuntime
from smpc.tracer import Trace, record

MICROBATCHES, STEPS = 2, 2
SCHEDULES = ("simple", "interleaved", "zb-h1")
REFUSALS = (TraceError, PartitionError)


@dataclass(frozen=True)
class Case:
    """A model and how it is run; the same case gives the same model and the same numbers."""

    names: tuple[str, ...]
    seed: int = 0
    shared: bool = False
    stages: int = 2
    schedule: str = "interleaved"
    cut: int = 0  # seed of where it is cut

    def model(self):
        return EffectModel(self.names, self.seed, self.shared)

    def batch(self):
        generator = torch.Generator().manual_seed(self.seed)
        return ((torch.randn(3 * MICROBATCHES, WIDTH, generator=generator, dtype=torch.float64),), {})

    def pieces(self):
        return parity.split(self.batch(), MICROBATCHES)


def random_case(seed):
    """A model of two to four effects, cut in two or three."""
    rng = random.Random(seed)
    names = random_names(rng, rng.randint(2, 4))
    stages, schedule = rng.choice((2, 3)), rng.choice(SCHEDULES)
    return Case(names, seed, rng.random() < 0.3, stages, schedule, rng.randrange(10**6))


def roots_of(output):
    weights = torch.arange(1.0, WIDTH + 1, dtype=output.dtype)
    return [((output * weights).sum() / MICROBATCHES, None)]


def seed_everything(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def settings():
    """What a model may leave changed in the process."""
    return torch.is_grad_enabled(), torch.get_default_dtype()


def train(model, step):
    """Some steps of gradient descent; `step(found)` runs one, and puts outputs into `found`, by microbatch."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    results = {}
    for number in range(STEPS):
        optimizer.zero_grad()
        outputs = {}
        step(outputs)
        results |= {f"step {number}, output {m}": outputs[m].detach().clone() for m in sorted(outputs)}
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        results |= {f"step {number}, gradient of {name}": grad for name, grad in grads.items()}
        optimizer.step()
    results |= {f"parameter {name}": p.detach().clone() for name, p in model.named_parameters()}
    results |= {f"{name} requires grad": p.requires_grad for name, p in model.named_parameters()}
    results |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    for name, module in model.named_modules():
        if "counter" in vars(module):
            results[f"counter of {name}"] = dict(module.counter)
    return results


def random_states():
    return {
        "torch's generator": torch.get_rng_state().clone(),
        "Python's generator": random.getstate(),
        "numpy's generator": str(numpy.random.get_state(legacy=False)),
    }


def eager(case):
    """By itself: gradient accumulation over the microbatches."""
    model = case.model()
    seed_everything(case.seed + 1)

    def step(outputs):
        for m, (args, kwargs) in enumerate(case.pieces()):
            outputs[m] = model(*args, **kwargs)
            for root, _ in roots_of(outputs[m]):
                root.backward()

    return train(model, step) | random_states() | {"settings": settings()}


def compiled(case, model):
    """The programs of a model cut at random. Raises what refuses it."""
    args, kwargs = case.pieces()[0]
    trace = record(model, args, kwargs)
    return compile_cut(trace, case)


def compile_cut(trace: Trace, case) -> Compilation:
    """Like `random_plans.compile_assignment`, for every schedule."""
    assignment = contiguous(trace, case.stages, case.cut)
    num_stages = 1 + max(assignment.values())
    active = min(num_stages + 2, MICROBATCHES)
    choice = Choice(case.schedule, tuple(range(num_stages)), MICROBATCHES, active)
    plan = plan_from_assignment(
        trace,
        assignment,
        num_stages=num_stages,
        in_flight=choice.in_flight,
        placement=choice.placement,
        schedule=ScheduleSummary(case.schedule, MICROBATCHES, active, 0.0, 0.0),
    )
    return compile_plan(trace, plan)


def pipelined(case):
    """As a pipeline in this process. Returns the results and the names of what several ranks share; raises what refuses it."""
    model = case.model()
    before = settings()
    seed_everything(case.seed + 1)
    compilation = compiled(case, model)
    assert settings() == before, "a recording leaves settings changed"
    runtime = LoopbackRuntime(model)
    program = runtime.install(compilation)

    def step(outputs):
        def on_output(m, output):
            outputs[m] = output
            return roots_of(output)

        runtime.run(program, case.pieces(), on_output, training=True)

    results = train(model, step) | random_states() | {"settings": settings()}
    return results, tuple(item.name for item in compilation.plan.shared_parameters)


def differences(expected, got, shared=()):
    """What is not the same, for people. Where a gradient is summed over ranks, all that follows is close instead of equal."""
    if list(expected) != list(got):
        return [f"expected {list(expected)}, found {list(got)}"]
    return [name for name in expected if not _same(expected[name], got[name], bool(shared))]


def _same(a, b, is_close):
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a == b
    if not a.is_floating_point() or a.shape != b.shape:
        return torch.equal(a, b)
    if is_close:
        return torch.allclose(a, b, rtol=1e-9, atol=1e-10, equal_nan=True)
    return a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def outcome(case):
    """ "equal", "refused: why", "wrong: what", or "fails" where the model does not run by itself and nobody says why."""
    before = settings()
    try:
        expected = eager(case)
    except Exception as error:
        expected = error
    finally:
        restore(before)
    try:
        got, shared = pipelined(case)
    except REFUSALS as error:
        return f"refused: {error}"
    except Exception:
        if isinstance(expected, dict):
            raise
    finally:
        restore(before)
    if not isinstance(expected, dict):
        return f"fails: {type(expected).__name__}: {expected}"
    wrong = differences(expected, got, shared)
    return f"wrong: {'; '.join(wrong)}" if wrong else "equal"


def restore(before):
    """Puts the settings of the process back."""
    torch.set_grad_enabled(before[0])
    torch.set_default_dtype(before[1])
