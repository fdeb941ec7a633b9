"""Trains a model of `effect_reads` and `effect_models` whose script changes it between steps, by itself and as a pipeline, and compares.

A pipeline is compiled again where its environment says that something has changed; a value that comes back takes the program of before.
Every step is compared by itself, so that what a later one is refused for does not hide what an earlier one got wrong.
"""

import dataclasses
import random
from dataclasses import dataclass

import effect_baked
import effect_holders
import effect_python
import effect_reads
import effect_runs
import torch
from effect_base import EFFECTS, READS, REFUSED
from effect_models import random_names
from effect_runs import SCHEDULES, Case, compile_cut, roots_of, seed_everything, settings
from torch import nn

from smpc.compile import compile_plan
from smpc.errors import SmpcError, StepError
from smpc.partitioner.keep_assignment import follow
from smpc.partitioner.planner import plan_from_assignment
from smpc.runtime import LoopbackRuntime
from smpc.tracer.attempt import RecordingRequest
from smpc.tracer.record import record_guarded

KINDS = (effect_baked, effect_holders, effect_python, effect_reads)  # files whose classes are in the list
STEPS = 5
MAY_BE_REFUSED = {  # why, and what the error says
    "a hook on a module that was cut": "register it before the first step, and it stays whole",
    "a hook on a shared parameter": "found one on",
    "nothing is left of a stage": "expected every stage to run at least one node",
    "another order of stages": "in the present partition",
    "a hook on a module that uses another's weight": "which is neither among its arguments nor its own",
    "a graph in a buffer of a module that is called whole now": "which requires grad and is neither",
    "a parameter that the script froze and forward thaws": "requires grad (requires_grad_)",
    "one that a module thaws which is called whole": "would be called whole, but it changes whether",
    "a hook on a module that overwrites what a part of it without a backward reads": "leaves alone what a backward needs",
    "state that another stage needs now": "on the ranks of the first program that uses it",
}


# -- what a script may do to any model ---------------------------------------------------------------------------------


def sets_mode(model, rng):
    rng.choice(list(model.modules())).train(rng.random() < 0.5)


def freezes(model, rng):
    """All but the last bias, so that something is trained."""
    own = model.head.bias if isinstance(model.head, nn.Linear) else None
    some = [parameter for parameter in model.layers.parameters() if parameter is not own]
    rng.choice(some).requires_grad_(rng.random() < 0.5)


def writes_parameter(model, rng):
    with torch.no_grad():
        rng.choice(list(model.parameters())).mul_(rng.choice((0.5, -1)))


def writes_buffer(model, rng):
    found = list(model.buffers())
    if found:
        with torch.no_grad():
            rng.choice(found).copy_(rng.choice(found).flatten()[0].clone())


def replaces_buffer(model, rng):
    owners = [module for module in model.modules() if any(b is not None for b in module._buffers.values())]
    if owners:
        owner = rng.choice(owners)
        name = rng.choice([name for name, buffer in owner._buffers.items() if buffer is not None])
        setattr(owner, name, owner._buffers[name].detach().clone() * 2)


def loads_state(model, rng):
    """What it has, a little smaller."""
    halves = ((name, value * 0.5 if value.is_floating_point() else value) for name, value in model.state_dict().items())
    model.load_state_dict(dict(halves))


def adds_attribute(model, rng):
    """Nobody reads it."""
    rng.choice(list(model.modules())).noted_by_script = rng.random()


def hooks_module(model, rng):
    """Adds one, or takes one away again."""
    module = rng.choice(list(model.layers.modules()))
    if "hook_of_script" in vars(module):
        vars(module).pop("hook_of_script").remove()
    else:
        module.hook_of_script = module.register_forward_hook(_doubles)


def _doubles(module, args, output):
    return output * 2 if isinstance(output, torch.Tensor) else output


def hooks_parameter(model, rng):
    rng.choice([p for p in model.layers.parameters() if p.requires_grad] or [model.head.bias]).register_hook(_halves)


def _halves(gradient):
    return gradient * 0.5


ON_ANY = (
    sets_mode,
    freezes,
    writes_parameter,
    writes_buffer,
    replaces_buffer,
    loads_state,
    adds_attribute,
    hooks_module,
    hooks_parameter,
)


# -- cases -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Changing(Case):
    """A case whose script changes something before some steps. `anew`: a change has the whole runtime made anew."""

    kinds: tuple[str, ...] = tuple(change.__name__ for change in ON_ANY)  # of changes to any model
    anew: bool = False

    def change(self, model, number):
        """What the script does before step `number`."""
        rng = random.Random(f"{self.seed} before step {number}")
        readers = [layer for layer in model.layers if hasattr(layer, "change")]
        for _ in range(rng.choice((0, 1, 1, 2, 3)) if number else 0):
            if readers and rng.random() < 0.75:
                rng.choice(readers).change(rng)
            else:
                rng.choice([change for change in ON_ANY if change.__name__ in self.kinds])(model, rng)


def random_changing(seed):
    """One to three modules that read, up to two other effects, in any order."""
    rng = random.Random(seed)
    names = [rng.choice(list(READS)) for _ in range(rng.randint(1, 3))]
    effects = random_names(rng, rng.randint(0, 2))
    names += [name for name in effects if EFFECTS[name].expected != REFUSED]
    if len(names) < 2:
        names.append("Layer")
    rng.shuffle(names)
    stages, schedule, cut = rng.choice((2, 3)), rng.choice(SCHEDULES), rng.randrange(10**6)
    return Changing(tuple(names), seed, rng.random() < 0.2, stages, schedule, cut, anew=rng.random() < 0.4)


# -- training ----------------------------------------------------------------------------------------------------------


def train(case, model, step):
    """Steps of gradient descent; `step(outputs)` runs one. Returns what there is after each, and the error that ended them, or None."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    found = []
    for number in range(STEPS):
        case.change(model, number)
        optimizer.zero_grad()
        outputs = {}
        try:
            step(outputs)
        except Exception as error:
            return found, error
        results = {f"output {m}": outputs[m].detach().clone() for m in sorted(outputs)}
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        results |= {f"gradient of {name}": grad for name, grad in grads.items()}
        optimizer.step()
        found.append(results | _state(model))
    return found, None


def _state(model):
    results = {f"parameter {name}": p.detach().clone() for name, p in model.named_parameters()}
    results |= {f"{name} requires grad": p.requires_grad for name, p in model.named_parameters()}
    results |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    for name, module in model.named_modules():
        if "counter" in vars(module):
            results[f"counter of {name}"] = dict(module.counter)
    return results | effect_runs.random_states() | {"settings": settings()}


def eager(case):
    model = case.model()
    seed_everything(case.seed + 1)

    def step(outputs):
        for m, (args, kwargs) in enumerate(case.pieces()):
            outputs[m] = model(*args, **kwargs)
            for root, _ in roots_of(outputs[m]):
                root.backward()

    return train(case, model, step)


class Recompiled:
    """A pipeline in this process that is compiled again whenever its model's Python would read something else."""

    def __init__(self, case, model):
        self._case, self._model = case, model
        self._runtime, self._compilations = LoopbackRuntime(model), []
        self.shared = ()

    def step(self, outputs):
        def on_output(m, output):
            outputs[m] = output
            return roots_of(output)

        for program, compilation in enumerate(self._compilations):
            if compilation.environment.difference() is None:
                try:
                    self._runtime.run(program, self._case.pieces(), on_output, training=True)
                except StepError as error:
                    is_late = "was cut" in str(error) and self._case.anew
                    if not is_late and "compile it for such inputs" not in str(error):
                        raise
                else:
                    return
        program = self._new_program()
        self._runtime.run(program, self._case.pieces(), on_output, training=True)

    def difference(self):
        """What has changed since the last program."""
        return self._compilations[-1].environment.difference()

    def _new_program(self):
        if self._case.anew:
            self._runtime, self._compilations = LoopbackRuntime(self._model), []
        self._compilations.append(self._compiled())
        return self._runtime.install(self._compilations[-1])

    def _compiled(self):
        before = settings()
        recording = record_guarded(self._model, RecordingRequest(*self._case.pieces()[0]))
        assert settings() == before, "a recording leaves settings changed"
        first = self._compilations[0] if self._compilations else None
        compilation = (
            compile_cut(recording.trace, self._case) if first is None else compile_like(recording.trace, first)
        )
        self.shared += tuple(item.name for item in compilation.plan.shared_parameters)
        return dataclasses.replace(compilation, environment=recording.environment)


def compile_like(trace, first):
    """Every module on the stage that it has in `first`."""
    plan = first.plan
    return compile_plan(
        trace,
        plan_from_assignment(
            trace,
            follow(trace, first.trace, plan),
            num_stages=len(plan.stages),
            in_flight=[stage.num_in_flight for stage in plan.stages],
            placement=tuple(stage.rank for stage in plan.stages),
            schedule=plan.schedule,
        ),
    )


def pipelined(case):
    """The results of every step, the error that ended them, and the names of parameters that were summed over ranks."""
    model = case.model()
    seed_everything(case.seed + 1)
    pipeline = Recompiled(case, model)
    found, error = train(case, model, pipeline.step)
    return found, error, pipeline.shared


def outcome(case):
    """ "equal", "refused: why", or "wrong: what"."""
    before = settings()
    try:
        expected, failure = eager(case)
        effect_runs.restore(before)
        try:
            found, error, shared = pipelined(case)
        except SmpcError as refused:
            found, error, shared = [], refused, ()
    finally:
        effect_runs.restore(before)
    return compared(expected, failure, found, error, shared)


def compared(expected, failure, found, error, shared):
    """The outcome of steps that were `expected`, until `failure`, and were `found`, until `error`."""
    for number, (theirs, ours) in enumerate(zip(expected, found, strict=False)):
        wrong = effect_runs.differences(theirs, ours, shared)
        if wrong:
            return f"wrong: step {number}: {'; '.join(wrong)}"
    if isinstance(error, SmpcError):
        return f"refused: step {len(found)}: {error}"
    if error is not None and failure is None:
        raise error
    if len(found) != len(expected):
        return f"wrong: fails by itself in step {len(expected)} ({failure}), runs {len(found)} steps as a pipeline"
    return "equal"
